#!/bin/sh
# A Makefile that knows nothing of spool, with each line of its recipes as a job.
set -e
printf '%s\n' 'all: a.txt b.txt' '	cat $^' '%.txt:' '	echo made $* > $@' > Makefile
make -j4 SHELL=spool .SHELLFLAGS='run --quiet --cpus 1 -c'

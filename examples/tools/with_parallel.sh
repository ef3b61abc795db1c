#!/bin/sh
# GNU parallel; `-j` is the number of jobs in the queue.
set -e
parallel -j 50 spool run --quiet --cpus 1 -- echo sample {} ::: a b c

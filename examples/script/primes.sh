#!/bin/sh
# Counts the primes below a limit, 20000 if none is given.
#
#     spool submit primes.sh           with the options below
#     spool submit -t 1m primes.sh     options on the command line win
#     spool submit primes.sh 1000      words after the script are its arguments
#     sh primes.sh                     for the shell the lines are comments
#
#SPOOL --name primes --cpus 1 --memory 200M
#SPOOL --time-limit 5m --retry 1
#SPOOL --tag example
set -eu
limit=${1:-20000}
echo "job ${SPOOL_JOB:-none}, attempt ${SPOOL_ATTEMPT:-none}"
awk -v limit="$limit" 'BEGIN {
    for (n = 2; n < limit; n++) {
        if (!(n in composite)) {
            primes++
            for (m = n * n; m < limit; m += n) composite[m] = 1
        }
    }
    print primes, "primes below", limit
}'

#!/bin/sh
# Each test file is a job, or each of several shards; `--wait` fails if a test does.
set -e
printf 'def test_it():\n    assert 1\n' | tee test_a.py > test_b.py
spool submit --wait --name files --matrix "file=$(printf '%s\n' test_*.py | paste -sd,)" -- python3 -m pytest -q '{file}'
# shellcheck disable=SC2016  # the shell of the job expands it
spool submit --wait --name shards --array 0-1 -c 'python3 -m pytest -q $(ls test_*.py | awk "NR % 2 == {index}")'
spool log files && spool log shards

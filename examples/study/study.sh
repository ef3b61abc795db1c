#!/bin/sh
# A parameter study: one job for each point, and one that waits for them all and prints the best.
set -eu
cd "$(dirname "$0")"
mkdir -p results

after=
for degree in 1 3 5; do
    for rate in 0.01 0.1; do
        name=fit-d$degree-r$rate
        spool submit --replace --name "$name" --set group=fit --set group_limit=4 -- \
            python3 fit.py --degree "$degree" --rate "$rate" --out "results/$name.json"
        after=$after,$name
    done
done

# ended: report what there is, even if some of the others failed.
spool submit --replace --name fit-best --depends-on "ended:${after#,}" -- python3 best.py results
spool wait fit-best
spool log fit-best

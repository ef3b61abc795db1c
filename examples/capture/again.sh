#!/bin/sh
# Runs two versions of a script, shows what differs, and runs the first one again exactly as it was.
set -e
tree=$(mktemp -d)
cd "$tree"
git init -q
# shellcheck disable=SC2016  # the script expands it
echo 'echo "the loss is 0.5" && echo "loss = 0.5" >> "$SPOOL_METADIR/metrics"' > train.sh
git add train.sh
git -c user.name=me -c user.email=me@example.org commit -qm 'Train'
spool submit --name first --wait -- sh train.sh
sed -i s/0.5/0.4/g train.sh                    # not committed
spool submit --name second --wait -- sh train.sh
spool diff first second
spool rerun first --exact --name first-again
spool wait first-again
spool log first-again

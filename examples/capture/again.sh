#!/bin/sh
# Runs two versions of a script, shows what differs, and runs the second one again, in a work tree with its code.
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
spool show first second
runs="${SPOOL_DIR:-$HOME/.spool}/jobs"
git checkout -q train.sh                       # gone, but for the patch that was captured
git worktree add -q --detach "$tree.again" "$(sed -n 's/^commit = "\(.*\)"/\1/p' "$runs/second/1/capture.toml")"
git -C "$tree.again" apply "$runs/second/1/capture.diff"
spool rerun second/1 --name again --workdir "$tree.again"
spool wait again
spool log again

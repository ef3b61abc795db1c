#!/bin/sh
# Makes this machine, Debian or Ubuntu, a node of the cluster whose slurm.conf lies beside this script. As root.
set -eu
cd "$(dirname "$0")"
etc=${DESTDIR:-}/etc
if [ -e "$etc/slurm/slurm.conf" ] && ! grep -q 'Written by configure.py of spool' "$etc/slurm/slurm.conf"; then
    echo "cannot install: $etc/slurm/slurm.conf is of another cluster; remove it first" >&2
    exit 1
fi
daemons=slurmd
if grep -Eq "^SlurmctldHost=$(hostname -s)(\(|\$)" slurm.conf; then
    daemons='slurmctld slurmd'
fi

export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
# shellcheck disable=SC2086 # one or two words
apt-get -qq install munge slurm-client $daemons
install -o munge -g munge -m 400 munge.key "$etc/munge/munge.key"
install -m 644 slurm.conf gres.conf "$etc/slurm/"
for service in munge $daemons; do
    systemctl enable "$service"
    systemctl restart "$service"
done
echo "$(hostname -s): ready"

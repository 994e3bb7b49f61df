#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# slurm_env.sh FOLDER: Debian's Slurm, unpacked into FOLDER (7 MB) and not installed, so that no service of this machine
# changes: tests/scripts/bench_world.sh starts its daemons from there, inside namespaces of its own. Exit 77, with the
# reason as the last line, where it cannot be had.
set -euo pipefail
folder=$1
mkdir -p "$folder"
folder=$(realpath "$folder")

skip() {
    echo "$1"
    exit 77
}

[ ! -e "$folder/ready" ] || { echo "slurm: $folder, as it was" && exit 0; }
command -v apt-get >/dev/null && command -v dpkg >/dev/null || skip "no apt-get and dpkg to get Slurm with"
# What an installation would fetch: Slurm and what this machine lacks of its dependencies.
packages=$(apt-get --print-uris -y --no-install-recommends install slurmctld slurmd slurm-client 2>/dev/null |
    sed -n "s/^'\([^']*\)'.*/\1/p" | xargs -r -n1 basename | cut -d_ -f1)
if [ -z "$packages" ] && ! command -v slurmctld >/dev/null; then
    skip "apt-get does not know slurmctld (apt-get update?)"
fi
cd "$folder"
for package in $packages slurmctld slurmd slurm-client slurm-wlm-basic-plugins; do
    ls "${package}"_*.deb >/dev/null 2>&1 || timeout 120 apt-get -qq download "$package" 2>/dev/null ||
        skip "apt-get could not download $package"
done
for package in ./*.deb; do
    dpkg -x "$package" root
done
rm -f ./*.deb
for tool in sbin/slurmctld sbin/slurmd sbin/slurmstepd bin/srun; do # Debian's own names end in -wlm
    [ -e "root/usr/$tool" ] || ln -s "$(basename "$tool")-wlm" "root/usr/$tool"
done
touch ready
echo "slurm: $(find . -name 'slurmctld*' | head -1) in $folder"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# deb.sh [FOLDER]: Debian packages of this tree, built in FOLDER (build-deb) and left there: libepx0, libepx-dev,
# epx-tools, epx-standin, python3-epx. As root it installs what the build needs. scripts/packages.sh tests them on bare
# machines.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build-deb}
jobs=${JOBS:-$(nproc)}
. scripts/wait_shown.sh

scripts/deps.sh --install deb
version=$(sed -nE 's/^#define EPX_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+)$/\2/p' include/epx/epx.h | paste -sd.)
date=$(git log -1 --format=%cD 2>/dev/null || date -R)
# A tree that is not a release's sorts before it.
[ "$(git describe --tags --exact-match 2>/dev/null)" = "v$version" ] ||
    version+="~git$(date -d "$date" +%Y%m%d).$(git rev-parse --short HEAD 2>/dev/null || echo 0)"

rm -rf "$folder"
mkdir -p "$folder/epx-$version"
folder=$(realpath "$folder")
# The files of the tree as they are, without what was built in it.
if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files -co --exclude-standard -z | tar --null -cf - --ignore-failed-read -T -
else
    tar --exclude='./build*' -cf - .
fi | tar -C "$folder/epx-$version" -xf -

cat >"$folder/epx-$version/debian/changelog" <<CHANGES
epx ($version) unstable; urgency=medium

  * See CHANGELOG.md.

 -- EPX maintainers <maintainers@epx.invalid>  $date
CHANGES
log=$folder/build.log
(cd "$folder/epx-$version" && DEB_BUILD_OPTIONS="parallel=$jobs nocheck" exec dpkg-buildpackage -b -us -uc) \
    >"$log" 2>&1 &
step() { grep -oE '^\[ *[0-9]+%\]|^ +dh_[a-z_]+' "$log"; }
wait_shown $! "make deb" step || {
    tail -40 "$log"
    echo "deb: dpkg-buildpackage failed; the whole log is $log"
    exit 1
}
(cd "$folder" && ls -1s --block-size=K ./*.deb)

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# container.sh [--bare]: builds the image of the Dockerfile with docker, podman or buildah, the first that works here,
# and runs it: the demo, then `epx doctor`. The image stays, by the name epx. buildah has no engine: as root it runs
# each command in a chroot, which works inside other containers too.
# --bare (buildah): the Debian that the Dockerfile begins with is made here (scripts/fresh.sh, whose variables count),
# not downloaded from a registry.
# Exit 77: none of the three works here.
set -euo pipefail
cd "$(dirname "$0")/.."
bare=
case ${1:-} in
--bare) bare=1 ;;
"") ;;
*) echo "usage: scripts/container.sh [--bare]" && exit 2 ;;
esac
[ -n "$bare" ] && engines=buildah || engines="docker podman buildah"
for engine in $engines none; do
    [ "$engine" != none ] || { echo "container: of $engines none works here" && exit 77; }
    ! "$engine" info >/dev/null 2>&1 || break
done
chrooted=(--isolation chroot --network host)
work=$(mktemp -d "${EPX_FRESH_TMP:-/var/tmp}/epx-container.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT

# The image that FROM names, of a bare Debian.
make_base() {
    local name container
    name=$(sed -n 's/^FROM \(debian:[a-z-]*\).*/\1/p' Dockerfile | sort -u)
    EPX_FRESH_ROOT=$work/base scripts/fresh.sh bookworm true >"$work/log" || { cat "$work/log" && exit 1; }
    rm -rf --one-file-system "$work/base/clone"
    container=$(buildah from scratch)
    buildah add -q "$container" "$work/base" / >/dev/null
    buildah commit -q --rm "$container" "localhost/$name" >/dev/null
    rm -rf --one-file-system "$work/base"
}

in_image() { # command...: none is the image's own
    local container rc=0 command=("$@")
    if [ "$engine" != buildah ]; then
        "$engine" run --rm epx "$@"
        return
    fi
    container=$(buildah from --pull=never epx)
    [ $# -gt 0 ] || mapfile -t command < <(buildah inspect --format '{{range .OCIv1.Config.Cmd}}{{println .}}{{end}}' \
        "$container" | sed '/^$/d')
    buildah run "${chrooted[@]}" "$container" "${command[@]}" || rc=$?
    buildah rm "$container" >/dev/null
    return $rc
}

began=$SECONDS
[ -z "$bare" ] || make_base
if [ "$engine" = buildah ]; then
    buildah bud "${chrooted[@]}" ${bare:+--pull=never} -t epx .
else
    "$engine" build -t epx .
fi
echo "container: built by $engine in $((SECONDS - began)) s"
in_image
in_image epx doctor
echo "container: built by $engine, the demo and epx doctor ran in it: $((SECONDS - began)) s"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# packages.sh [SUITE]...: for Debian 12 and 13 (bookworm, trixie), or those named: builds the packages on a bare
# machine, looks at them with lintian, compares the library's interface with the recorded one (scripts/check_abi.py),
# and installs, uses and purges them on another bare machine. Those of Debian 12 are built by the lines of the
# Dockerfile, and its image is made and run (scripts/dockerfile.py). Variables as for scripts/fresh.sh. Exit 77: it
# cannot be done here.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- bookworm trixie
work=$(mktemp -d "${EPX_FRESH_TMP:-/var/tmp}/epx-packages.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT

for suite; do
    began=$SECONDS
    if [ "$suite" = bookworm ]; then
        scripts/dockerfile.py --keep "$work"
        root=$work/build debs=/epx/build-deb commands=()
    else
        root=$work/root debs=/clone/build-deb commands=("make deb")
    fi
    EPX_FRESH_ROOT=$root scripts/fresh.sh "$suite" ${commands[@]+"${commands[@]}"} "scripts/lint_deb.sh $debs" \
        "scripts/deps.sh --install abi && scripts/check_abi.py"
    mkdir "$work/$suite"
    cp "$root$debs"/*.deb "$work/$suite/"
    rm -rf --one-file-system "$root"
    EPX_FRESH_FILES=$work/$suite scripts/fresh.sh "$suite" "EPX_TEST_DISPOSABLE=1 scripts/check_deb.sh /files"
    echo "packages: $suite: $((SECONDS - began)) s"
done

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# packages.sh [SUITE]...: for Debian 12 and 13 (bookworm, trixie), or those named: builds the packages on a bare
# machine, looks at them with lintian, compares the library's interface with the recorded one (scripts/check_abi.py),
# and installs, uses and purges them on another bare machine. Variables as for scripts/fresh.sh. Exit 77: it cannot be
# done here.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- bookworm trixie
work=$(mktemp -d "${EPX_FRESH_TMP:-/var/tmp}/epx-packages.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT

for suite; do
    began=$SECONDS
    EPX_FRESH_ROOT=$work/root scripts/fresh.sh "$suite" "make deb" "scripts/lint_deb.sh build-deb" \
        "scripts/deps.sh --install abi && scripts/check_abi.py"
    mkdir "$work/$suite"
    cp "$work"/root/clone/build-deb/*.deb "$work/$suite/"
    rm -rf --one-file-system "$work/root"
    EPX_FRESH_FILES=$work/$suite scripts/fresh.sh "$suite" "EPX_TEST_DISPOSABLE=1 scripts/check_deb.sh /files"
    echo "packages: $suite: $((SECONDS - began)) s"
done

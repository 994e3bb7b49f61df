#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# under_load.sh [TIMES] [STAGE]: the stage gcc (or another) several times in a row, 3 unless told, while stress-ng keeps
# every core busy: no test may take a slow machine for a fault. Prints one line per run; exit 0 if all runs were green.
set -uo pipefail
cd "$(dirname "$0")/.."
times=${1:-3} stage=${2:-gcc}

if ! command -v stress-ng >/dev/null; then
    [ "$(id -u)" -eq 0 ] &&
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends stress-ng; } >/dev/null 2>&1 \
            </dev/null ||
        { echo "there is no stress-ng (Debian: stress-ng)" && exit 1; }
fi
scripts/deps.sh --install check || exit 1 # else tests are skipped for want of a package, and the stage fails
# Compiled without the load: it is the tests that are tried.
scripts/configure.sh build && cmake --build build -j"$(nproc)" >/dev/null || exit 1

stress-ng --quiet --cpu "$(nproc)" --vm 1 --vm-bytes 256M &
load=$!
trap 'kill "$load" 2>/dev/null; wait "$load" 2>/dev/null' EXIT
trap 'exit 143' INT TERM
bad=0 lines=()
for ((i = 1; i <= times; i++)); do
    began=$SECONDS rc=0
    scripts/test.sh "$stage" || rc=$?
    lines+=("under load: run $i of $times: exit $rc, $((SECONDS - began)) s")
    [ $rc -eq 0 ] || bad=1
done
printf '%s\n' "${lines[@]}"
exit $bad

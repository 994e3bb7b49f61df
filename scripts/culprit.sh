#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# culprit.sh BUILD: `make culprit`. Each case of tests/unit/test_culprit.c with EVENTS (50) kills or stops. Stops CASES
# (4) at a time: they wait for deadlines and compute little. Kills one after the other: what they take is measured.
set -euo pipefail
build=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
began=$SECONDS

run_case() {
    if EPX_TEST_EVENTS=${EVENTS:-50} EPX_TEST_ONLY=$3 "$1/tests/test_culprit" >"$2/$3" 2>&1; then
        grep "events right" "$2/$3" || tail -n 3 "$2/$3"
    else
        { echo "FAILED: $3"; grep -v '^\[' "$2/$3"; } | tee "$2/$3.failed"
    fi
}
export -f run_case

run_cases() {
    local at_once=$1
    shift
    printf '%s\n' "$@" | xargs -P "$at_once" -I{} bash -c 'run_case "$@"' - "$build" "$work" {}
}
run_cases 1 killed_{ll,ht}_on_{two_nodes,one_node}
run_cases "${CASES:-4}" stopped_{ll,ht}_on_{two_nodes,one_node}
cat "$work"/*_{node,nodes} | awk -v s=$((SECONDS - began)) '
    match($0, /[0-9]+ of [0-9]+ events/) { split(substr($0, RSTART), e, " ")
        kind = $1; sub(",", "", kind); right[kind] += e[1]; all[kind] += e[3] }
    END { for (k in all) printf "%s: %d of %d events right\n", k, right[k], all[k]; print s " s" }'
! ls "$work"/*.failed >/dev/null 2>&1

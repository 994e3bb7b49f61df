#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# culprit.sh BUILD: `make culprit`. Each case of tests/unit/test_culprit.c with EVENTS (50) kills or stops, CASES (4) at
# a time: they wait for deadlines and compute little.
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

# The stops first: each waits for its deadline.
printf '%s\n' {stopped,killed}_{ll,ht}_on_{two_nodes,one_node} |
    xargs -P "${CASES:-4}" -I{} bash -c 'run_case "$@"' - "$build" "$work" {}
cat "$work"/*_{node,nodes} | awk -v s=$((SECONDS - began)) '
    match($0, /[0-9]+ of [0-9]+ events/) { split(substr($0, RSTART), e, " ")
        kind = $1; sub(",", "", kind); right[kind] += e[1]; all[kind] += e[3] }
    END { for (k in all) printf "%s: %d of %d events right\n", k, right[k], all[k]; print s " s" }'
! ls "$work"/*.failed >/dev/null 2>&1

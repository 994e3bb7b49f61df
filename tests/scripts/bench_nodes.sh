#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `epx bench` across nodes over libfabric's tcp: both modes are checked, the JSON has the numbers of the network,
# neighbouring rows are merged, --vs ofi and --vs mpi give ratios, and --vs ofi says when it has nothing to compare.
# Proxies and networks under ThreadSanitizer: nccl_ep.sh has ranks on two nodes there, test_net_ofi.c the network alone.
# ctest: labels=notsan serial
set -uo pipefail

. "$(dirname "$0")/../lib/bench_cli.sh"
small=(--nodes 2 --ranks 4 --net tcp --tokens 24 --hidden 512 --experts 16 --topk 4 --iters 2 --warmup 1)

json_of="o['op'] != 'update'"

timeout 200 "$epx" bench ll "${small[@]}" --json >"$work/out" 2>"$work/err"
rc=$?
if [ $rc -eq 2 ]; then
    skip "$(cat "$work/err")"
fi
# What the analysis says crosses, crosses.
[ $rc -eq 0 ] && json "rows that cross, low latency: each row once" "o['net_bytes'] >= o['rows_remote'] * 1024" ||
    fail "rows that cross, low latency: exit status $rc"

shapes=("ll" "ll --layout rank" "ll --dtype fp8" "ll --logfmt" "ll --plain-memory" "ht" "ht --layout expert"
    "ht --dtype fp8" "ll --nodes 3 --ranks 5" "ht --nodes 4")
# As in bench.sh: processes start slowly under sanitizers, and the property tests try the shapes there.
[ "${EPX_SANITIZE:-none}" = none ] || shapes=("ll --nodes 3 --ranks 5" "ht --layout expert")

# A rate that rounds to 0 GB/s is one of a busy machine.
for shape in "${shapes[@]}"; do
    # shellcheck disable=SC2086
    set -- $shape
    expect 0 "$shape is checked" "$1" "${small[@]}" "${@:2}" --check --json &&
        json "$shape: numbers of the network" "o['check'] == 'ok' and o['rows_remote'] > 0 and
            (o['wire_GBps'] > 0 or o['net_bytes'] < 2 * o['us_p50']) and o['net_puts'] > 0 and
            o['net_commands'] > 0 and o['net_bytes'] > 0 and o['writes_per_row'] > 0 and
            o['network'].startswith(('ofi: libfabric', 'verbs: '))"
done

# Neighbours merge: at most 0.35 writes per (token, destination) of low latency. A figure, not for sanitizers.
[ "${EPX_SANITIZE:-none}" != none ] ||
    { expect 0 "128 tokens, 2 nodes of 4 ranks" ll --nodes 2 --ranks 8 --net tcp --hidden 1024 --iters 3 --json \
        --report "$work/page.html" && json "writes per row" "o['writes_per_row'] <= 0.35" &&
        { grep -q 'network</th><td>ofi: libfabric' "$work/page.html" || fail "the page does not name the network"; }; }

expect 0 "against fi_write" ht "${small[@]}" --iters 10 --vs ofi --json &&
    # What is printed is rounded, and ofi_GBps may be small on a busy machine.
    json "ratios" "abs(o['vs_ofi'] * o['ofi_GBps'] - o['wire_GBps']) < 0.0006 * (1 + o['vs_ofi']) + 0.0006 \
        and o['vs_ofi_large'] > 0"
expect 2 "fi_write has nothing to do on one node" ht --vs ofi && says "and why" "--nodes 2 or more"
expect 2 "an unknown network" ht --nodes 2 --net pigeons && says "which is named" '"pigeons"' &&
    says "with the known ones" "tcp, shm, ofi"
expect 2 "fi_write against another network" ht --nodes 2 --net null --vs ofi && says "which is named" "'null'"

if [ -x "$(dirname "$epx")/epx-mpi-baseline" ] && command -v mpirun >/dev/null &&
    { [ "$(id -u)" -eq 0 ] || unshare -Ur true 2>/dev/null; }; then
    for mode in ll ht; do
        expect 0 "$mode against MPI, both checked" "$mode" "${small[@]}" --iters 10 --check --vs mpi --json &&
            json "$mode: the ratio" \
                "abs(o['vs_mpi'] * o['us_p50'] - o['mpi_us_p50']) < 0.06 * (1 + o['vs_mpi']) + 0.006 * o['us_p50'] \
                and o['mpi_variant']"
    done
else
    echo "skipped: --vs mpi (no epx-mpi-baseline in this build, no mpirun, or no right to give nodes their names)"
fi

finish

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# EPX_TRACE on two machines, of which one (a time namespace) has a clock that is 1000 s ahead: the files are merged, and
# causes precede effects. ctest: labels=slow
set -uo pipefail

. "$(dirname "$0")/../lib/bench_cli.sh"
small=(--tokens 16 --hidden 512 --experts 16 --topk 4 --iters 1 --warmup 1)
unshare -T --monotonic 1000 --fork true 2>/dev/null || skip "may not make time namespaces here"

export EPX_TRACE=$work/clocks0.json WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29719
RANK=0 LOCAL_RANK=0 "$epx" bench ll "${small[@]}" --timing wall >"$work/out" 2>"$work/err" &
EPX_TRACE=$work/clocks1.json RANK=1 LOCAL_RANK=1 unshare -T --monotonic 1000 --fork \
    "$epx" bench ll "${small[@]}" --timing wall >"$work/out1" 2>&1
wait $! && echo "ok: two clocks" || fail "two clocks"
unset EPX_TRACE WORLD_SIZE MASTER_ADDR MASTER_PORT
"$epx" trace merge --output "$work/clocks.json" "$work/clocks0.json" "$work/clocks1.json" >"$work/out" ||
    fail "files of two machines are merged"
python3 "$root/tests/scripts/trace_check.py" "$work/clocks.json" --ranks 2 --operations "ll dispatch,ll combine" ||
    fail "the trace"
finish

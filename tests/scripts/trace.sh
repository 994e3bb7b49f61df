#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# EPX_TRACE: one file of all ranks that a JSON reader opens; spans nest, causes precede effects, clocks of other
# machines (time namespaces) are aligned; a second run begins anew; without the variable there is no file. NVTX: a
# profiler that is injected sees a range for each call.
# ctest: timeout=120 labels=slow
set -uo pipefail

. "$(dirname "$0")/../lib/bench_cli.sh"
here=$(cd "$(dirname "$0")" && pwd)
small=(--tokens 16 --hidden 512 --experts 16 --topk 4 --iters 3 --warmup 1)
check() { python3 "$here/trace_check.py" "$@" || fail "the trace: $*"; }

EPX_TRACE=$work/ht.json expect 0 "two nodes, high throughput" ht "${small[@]}" --ranks 4 --nodes 2
check "$work/ht.json" --ranks 4 --nets --operations "ht update,ht dispatch,ht combine"
EPX_TRACE=$work/ht.json expect 0 "the same file again" ll "${small[@]}" --ranks 3
check "$work/ht.json" --ranks 3 --operations "ll dispatch,ll combine"
EPX_TRACE=$work/threads.json expect 0 "ranks that are threads" ll "${small[@]}" --ranks 3 --threads
check "$work/threads.json" --ranks 3 --operations "ll dispatch,ll combine"
EPX_TRACE=$work/no/such/folder expect 0 "a file that cannot be written" ll "${small[@]}" --ranks 2 &&
    says "is a warning" "EPX_TRACE: cannot write"
expect 0 "without the variable" ll "${small[@]}" --ranks 2
[ "$(find "$work" -name '*.json' | wc -l)" = 2 ] && echo "ok: there is no file" || fail "there is a file"

# Another machine's clock: rank 1 lives 1000 s later.
if unshare -T --monotonic 1000 --fork true 2>/dev/null; then
    export EPX_TRACE=$work/clocks.json WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29719
    RANK=0 LOCAL_RANK=0 "$epx" bench ll "${small[@]}" --timing wall >"$work/out" 2>"$work/err" &
    RANK=1 LOCAL_RANK=1 unshare -T --monotonic 1000 --fork \
        "$epx" bench ll "${small[@]}" --timing wall >"$work/out1" 2>&1
    wait $! && echo "ok: two clocks" || fail "two clocks"
    unset EPX_TRACE WORLD_SIZE MASTER_ADDR MASTER_PORT
    check "$work/clocks.json" --ranks 2 --operations "ll dispatch,ll combine" --slack-us 2000
else
    echo "no time namespaces here: clocks of two machines are not tried"
fi

nvtx=$(sed -n 's/^EPX_NVTX_INCLUDE:PATH=//p' "${EPX_BUILD_DIR:-build}/CMakeCache.txt" 2>/dev/null)
if [ -e "$nvtx/nvtx3/nvToolsExt.h" ]; then
    cc -shared -fPIC -I"$nvtx" "$here/../lib/nvtx_injected.c" -o "$work/injected.so" || fail "the injected library"
    NVTX_INJECTION64_PATH=$work/injected.so expect 0 "under a profiler" ll "${small[@]}" --ranks 2
    grep -q "^nvtx epx_dispatch$" "$work/err" && echo "ok: ranges" || fail "no range epx_dispatch"
    [ "$(grep -c '^nvtx ' "$work/err")" = "$(grep -c '^nvtx-pop' "$work/err")" ] && echo "ok: and their ends" ||
        fail "ranges that do not end"
fi
[ "$failures" -eq 0 ]

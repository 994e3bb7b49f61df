#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GPUs of several hosts as one node, without a GPU and without a rack: src/device/gpu/fabric.c over a driver that
# tests/fabric plays, ranks of one machine that look like those of several hosts (EPX_RANKS_PER_HOST), and results that
# the benchmark compares with its oracle. Then everything that a driver may refuse: a sentence, and nodes of one host.
# ctest: cost=8 labels=processes,noasan,notsan
set -uo pipefail
. "$(dirname "$0")/../lib/script.sh"
cc=${CC:-gcc}
flags=(-std=gnu11 -D_GNU_SOURCE= -O1 -g1 -Wall -Wextra -Werror -fPIC -shared -I"$root/include" -I"$root/src")
"$cc" "${flags[@]}" -o "$work/libcuda.so.1" "$root/tests/fabric/fake_driver.c" &&
    "$cc" "${flags[@]}" -DFAKE_NVML -o "$work/libnvidia-ml.so.1" "$root/tests/fabric/fake_driver.c" &&
    "$cc" "${flags[@]}" -fvisibility=hidden -o "$work/libepx_cuda.so" "$root/tests/fabric/module.c" \
        "$root/src/device/gpu/fabric.c" -ldl -lpthread || die "they do not compile"
export EPX_MODULE_DIR=$work LD_LIBRARY_PATH=$work${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} EPX_LOG=info
export EPX_FABRIC=1 EPX_RANKS_PER_HOST=2

# try NAME WANTED [VARIABLE=VALUE...] -- ARGUMENTS: a checked benchmark whose output has a line like WANTED.
try() {
    local name=$1 wanted=$2 settings=()
    shift 2
    while [ "$1" != -- ]; do settings+=("$1") && shift; done
    shift
    if ! env ${settings[@]+"${settings[@]}"} timeout 100 "$build/epx" bench "$@" --device cuda --tokens 12 \
        --experts 8 --hidden 512 --iters 1 --warmup 0 --check >"$work/out" 2>&1; then
        fail "$name"
    elif ! grep -qE "$wanted" "$work/out"; then
        fail "$name: expected a line like $wanted"
    else
        echo "ok: $name"
    fi
}
four=(--ranks 4)
try "two hosts are one node, low latency" "group of 4 ranks on 1 nodes" -- ll "${four[@]}"
try "two hosts are one node, high throughput" "group of 4 ranks on 1 nodes" -- ht "${four[@]}" --plain-memory
try "ranks as threads" "group of 4 ranks on 1 nodes" -- ll "${four[@]}" --threads
try "by file descriptors" "group of 4 ranks on 1 nodes" EPX_FABRIC=files -- ll "${four[@]}"
try "two nodes of two hosts" "group of 4 ranks on 2 nodes" EPX_RANKS_PER_HOST=1 EPX_RANKS_PER_NODE=2 -- ll "${four[@]}"
try "not asked for" "group of 4 ranks on 2 nodes" EPX_FABRIC=0 -- ll "${four[@]}"
try "one host needs none" "group of 4 ranks on 1 nodes" EPX_RANKS_PER_HOST=4 FAKE_DRIVER=create -- ll "${four[@]}"
# refused WHAT SENTENCE: said, and the usual way.
refused() {
    try "refused: $1" "use_fabric: no effect, hosts are reached by the network: .*$2" FAKE_DRIVER="$1" -- \
        ll "${four[@]}"
    grep -q "group of 4 ranks on 2 nodes" "$work/out" ||
        fail "refused: $1: expected two nodes"
}
refused attribute "rank 0: the driver offers no fabric handles"
refused create "cuMemCreate: CUDA_ERROR_NOT_PERMITTED .*IMEX channel"
refused export "cuMemExportToShareableHandle"
refused import "cuMemImportFromShareableHandle"
refused map "cuMemMap"
refused nvml "NVML tells no fabric of GPU 0 .error 9"
refused state "has not registered with a fabric .NVML: state 2"
refused cluster "GPU 0 is in no cluster"
refused clique "no two of them are in one fabric"
try "host heaps" "EPX_GPU_HEAP=host puts heaps into host memory" EPX_GPU_HEAP=host -- ll "${four[@]}"

# epx top shows rates of a device whose kernels cannot write its pages; a rank that is stopped does not answer.
export FAKE_GPU_MEMORY=1
"$build/epx" bench ll "${four[@]}" --device cuda --tokens 8 --experts 8 --hidden 512 --iters 10000 --timing events \
    --timeout 60 >"$work/out" 2>&1 &
bench=$!
look() { # NAME CONDITION
    python3 "$root/tests/scripts/top_look.py" "$build/epx" "$bench" "$2" && echo "ok: $1" || fail "$1"
}
look "epx top: rates of a device with memory of its own" "g['device'] == 'cuda' and len(r) == 4 and
    all(h['operations_per_second'] > 0 and h['bytes_per_second'] > 0 and
        h['operations']['ll combine']['per_second'] > 0 and 'p50_us' not in h['operations']['ll combine']
        for h in r.values())"
for _ in $(seq 300); do # a second may pass in which no rank had a core
    "$build/epx" top --once >"$work/top"
    ! grep -qE "ll dispatch +[1-9][0-9]*/s$" "$work/top" || break
    sleep 0.1
done
grep -qE "ll dispatch +[1-9][0-9]*/s$" "$work/top" || fail "epx top: as text"
rank=$(python3 "$root/tests/scripts/top_look.py" "$build/epx" "$bench" "len(r) == 4" "r[1]['pid']")
kill -STOP "$rank"
look "epx top: a stopped rank" "g.get('waiting_for') == 1 and r[1]['state'] == 'stopped'"
kill -CONT "$rank"
kill "$bench"
wait "$bench" 2>/dev/null
finish

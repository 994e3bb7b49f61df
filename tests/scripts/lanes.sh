#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU kernels without a GPU: src/device/gpu compiled for the CPU, where fibers emulate the lanes (tests/gpu_lanes),
# as a module that takes the place of libepx_cuda.so (32 lanes) and of libepx_hip.so (64 lanes, FNUZ casts). Every
# result is compared with the oracle; lanes that do not come to the same meeting end the test.
#   lanes.sh bus    instead: how often kernels of two nodes wait for a bus, with heaps in host memory (make bus)
# ctest: cost=95 timeout=1800 labels=slow,noasan,notsan
set -uo pipefail
. "$(dirname "$0")/../lib/script.sh"
mode=${1:-} cc=${CC:-gcc} cxx=${CXX:-g++}
"$cxx" --version >/dev/null 2>&1 || skip "no C++ compiler"
# As many cases as the scale says; a launch here takes a thousand times as long as on a GPU.
scale=$(awk "BEGIN { print 0.03 * ${EPX_TEST_SCALE:-1} }")

# module FOLDER DEVICE FLAGS...: blocks of two warps, so that launches have several. What is shared memory on a GPU is
# thread-local here, 300 KiB of it: processes load the module when they start (LD_PRELOAD), so that its place is known
# without a call for each access, which took a fifth of all time. Kernels that share functions are one compilation.
module() {
    local folder=$1 name=$2 files file objects=()
    shift 2
    local flags=(-O1 -g1 -Wall -Wextra -Werror -Wno-unknown-pragmas -fPIC -fvisibility=hidden -ffp-contract=off
        -fno-strict-aliasing -ftls-model=initial-exec -DLAUNCH_WARPS=2 "-DEPX_HARDWARE=\"hardware.h\"" -I"$root/include"
        -I"$root/src" -I"$root" -I"$root/tests/gpu_lanes" "$@")
    mkdir -p "$folder"
    for files in "ll_dispatch ll_combine mask layout_count ring_bench" "ht_notify ht_dispatch ht_combine" \
        ll_combine_logfmt "ll_dispatch_one_node ll_combine_one_node" ll_combine_logfmt_one_node; do
        for file in $files; do
            # Files have static arrays of the same names.
            printf '#undef %s\n' route_counts node_descs
            printf '#define %s %s\n' route_counts "${file}_counts" node_descs "${file}_descs"
            echo "#include \"device/gpu/$file.cu\""
        done >"$folder/${files%% *}.cu"
        file=${files%% *}
        local counted=() # bus.c; the sanitizer's instrumentation makes gcc warn of what it does not warn of otherwise
        case $mode:$file in bus:ht_*) counted=(-fsanitize=thread -w) ;; esac
        "$cxx" -x c++ -std=c++17 "${flags[@]}" ${counted[@]+"${counted[@]}"} -c "$folder/$file.cu" \
            -o "$folder/$file.o" || return
        objects+=("$folder/$file.o")
    done
    "$cc" -std=gnu11 -D_GNU_SOURCE= -shared "${flags[@]}" -o "$folder/libepx_$name.so" \
        "$root/tests/gpu_lanes/module.c" \
        "$root/tests/gpu_lanes/lanes.c" "$root/tests/gpu_lanes/bus.c" "$root/sim/fiber.c" "${objects[@]}" \
        -lstdc++ -lm -lpthread || return
    for file in logfmt_bits block_leave; do
        "$cxx" -x c++ -std=c++17 "${flags[@]}" -c "$root/tests/gpu_lanes/$file.cu" -o "$folder/$file.o" || return
        "$cc" -std=gnu11 -D_GNU_SOURCE= "${flags[@]}" -o "$folder/$file" "$folder/$file.o" \
            "$root/tests/gpu_lanes/lanes.c" "$root/tests/gpu_lanes/bus.c" "$root/sim/fiber.c" \
            "$build/libepx_static.a" -lstdc++ -lm -lpthread -ldl || return
    done
}

try() { # NAME COMMAND...
    local name=$1 rc
    shift
    LD_PRELOAD=$EPX_MODULE_DIR/libepx_${EPX_MODULE_DIR##*/}.so timeout 600 "$@" >"$work/out" 2>&1
    rc=$?
    if [ $rc -eq 0 ]; then
        echo "ok: $name"
    else
        fail "$name: exit code $rc"
    fi
}

# Per operation of a rank: loads of the slowest lane of each launch, added up over the launches (bus.c). Update,
# dispatch and combine took 81, 573 and 427 when every word of a record, of a descriptor and of the counts was a load of
# its own.
bus() {
    module "$work/cuda" cuda || return
    export EPX_MODULE_DIR=$work/cuda
    try "cuda: two nodes, counted" env LANES_BUS="$work/bus" "$build/epx" bench ht --device cuda --nodes 2 --ranks 4 \
        --tokens 64 --experts 16 --topk 4 --hidden 1024 --iters 2 --warmup 1 --check
    awk '{ chain[$1] += $4; launches[$1] += $3; if (!($1 in first)) first[$1] = $2; if ($2 == first[$1]) ops[$1] += $3 }
        END {
            split("update dispatch combine", name); most[1] = 45; most[2] = 130; most[3] = 85; bad = 0
            for (k = 3; k <= 5; k++) {
                printf "%s: %.1f loads across the bus in %.1f launches, at most %d\n", name[k - 2],
                    chain[k] / ops[k], launches[k] / ops[k], most[k - 2]
                bad += chain[k] / ops[k] > most[k - 2] || ops[k] == 0
            }
            exit bad
        }' "$work/bus" || fail "loads across the bus"
}

if [ "$mode" = bus ]; then
    bus || exit 1
    finish
    exit
fi
module "$work/cuda" cuda & first=$!
module "$work/hip" hip -DEPX_HIP & second=$!
wait $first && wait $second || die "the modules do not compile"

# Lanes that a CPU emulates are late by more than any limit: all go on where a case does not say otherwise.
export EPX_LL_WIDE_WAIT_US=0 EPX_LL_FEW_SMS=1 # of two
# epx top of a benchmark: kernels keep times from the first look on; an operation of high throughput is several
# launches. A kernel that waits for a rank whose process is stopped says for whom.
started() { # OPTION...: two ranks with memory as that of a GPU, which the host copies
    FAKE_GPU_MEMORY=1 LD_PRELOAD=$work/cuda/libepx_cuda.so "$build/epx" bench "$@" --device cuda --ranks 2 --tokens 3 \
        --experts 4 --topk 2 --hidden 512 --iters 10000 >"$work/out" 2>&1 &
    bench=$!
}
look() { # PYTHON [PYTHON]
    python3 "$root/tests/scripts/top_look.py" "$build/epx" $bench "$@"
}
ended() { # NAME: what the look before it has found
    local rc=$?
    kill $bench
    wait $bench 2>/dev/null
    [ $rc -eq 0 ] && echo "ok: $1" || fail "$1"
}
top() {
    started ht --timing wall
    look "g['device'] == 'cuda' and len(r) == 2 and
        all(1 < h['operations'][name]['p50_us'] <= h['operations'][name]['p99_us']
            for h in r.values() for name in ('ht update', 'ht dispatch', 'ht combine'))"
    ended "epx top has times of kernels"
    started ll --timing events
    local pid
    pid=$(look "len(r) == 2 and r[1]['operations']['ll combine']['count'] > 0" "r[1]['pid']") && kill -STOP "$pid" &&
        look "g['waiting_for'] == 1 and r[0]['waits']['peer'] == 1 and r[0]['waits']['seconds'] > 0.8" &&
        kill -CONT "$pid" && look "'waits' not in r[0] and 'waiting_for' not in g"
    ended "epx top has waits of kernels"
}
EPX_MODULE_DIR=$work/cuda top
for device in cuda hip; do
    export EPX_MODULE_DIR=$work/$device EPX_TEST_DEVICE=$device
    # By events a benchmark of low latency makes dozens of operations in a row, whatever --iters says. Three runs with
    # 32 lanes and one with 64 do that; the others check one dispatch and one combine.
    small=(--device $device --ranks 3 --tokens 9 --experts 12 --iters 1 --warmup 0 --check)
    wall=(--timing wall) row=()
    [ $device = cuda ] || row=("${wall[@]}")
    EPX_TRACE=$work/ll.json try "$device: low latency, FP8" "$build/epx" bench ll "${small[@]}" --hidden 1408 \
        --dtype fp8
    EPX_LL_WIDE_WAIT_US=1 try "$device: low latency, late peers" "$build/epx" bench ll "${small[@]}" --hidden 1408 \
        ${row[@]+"${row[@]}"}
    try "$device: low latency, LogFMT" "$build/epx" bench ll "${small[@]}" --tokens 4 --hidden 1536 \
        --logfmt "${wall[@]}"
    try "$device: LogFMT, bit by bit" "$work/$device/logfmt_bits"
    try "$device: warps that leave a block" "$work/$device/block_leave"
    try "$device: high throughput" "$build/epx" bench ht "${small[@]}" --hidden 4360
    EPX_HT_NODE_BYTES=1 try "$device: windows" "$build/epx" bench ht "${small[@]}" --hidden 1024 --plain-memory
    try "$device: high throughput by the clock" "$build/epx" bench ht "${small[@]}" --hidden 1024 --timing wall
    try "$device: ranks as threads, fp8 input" "$build/epx" bench ht --device $device --ranks 2 --tokens 9 \
        --experts 12 --hidden 1024 --iters 2 --threads --dtype fp8-input
    try "$device: replays, staged" "$build/epx" bench ll --device $device --ranks 2 --tokens 5 \
        --experts 12 --hidden 512 --replays 4 --staged --overlap
    for mode in ll ht; do
        EPX_TRACE=$work/nodes.json try "$device: two nodes, $mode" "$build/epx" bench $mode "${small[@]}" --nodes 2 \
            --ranks 4 --hidden 1024 ${row[@]+"${row[@]}"}
    done
    trace=("$root/tests/scripts/trace_check.py" --gpu)
    try "$device: marks of low latency" "${trace[@]}" "$work/ll.json" --ranks 3 --operations "ll dispatch,ll combine"
    try "$device: marks of two nodes" "${trace[@]}" "$work/nodes.json" --nets --ranks 4 \
        --operations "ht update,ht dispatch,ht combine"
    EPX_GPU_HEAP=split EPX_HT_BUFFER_BYTES=100K try "$device: memory for the network" "$build/epx" bench ht \
        "${small[@]}" --nodes 2 --ranks 4 --hidden 1024 --tokens 40
    EPX_GPU_HEAP=split EPX_HT_BUFFER_BYTES=100K EPX_HT_NODE_BYTES=1 try "$device: windows, memory for the network" \
        "$build/epx" bench ht "${small[@]}" --nodes 2 --ranks 4 --hidden 512 --plain-memory
    EPX_GPU_HEAP=split try "$device: low latency, memory for the network" "$build/epx" bench ll "${small[@]}" \
        --nodes 2 --ranks 4 --hidden 512 "${wall[@]}"
    # With buffers of two sizes; the CPU device has all.
    EPX_TEST_SCALE=$scale try "$device: zones, source maps, sums in top-k order" "$build/tests/test_expand"
    EPX_DEVICE=$device try "$device: more tokens than the group is for" "$build/tests/test_ht_tokens"
    EPX_DEVICE=$device try "$device: NVFP4" "$build/tests/test_nvfp4"
    EPX_DEVICE=$device try "$device: counts of epx_dispatch_layout" "$build/tests/test_layout"
    modes=mixed rings=1 wide_wait=1
    # With 64 lanes few lines are different: one kind of case will do, in which peers are always late.
    [ $device = cuda ] && modes="ll ht" rings=2 wide_wait=0
    try "$device: commands to the proxies" "$build/epx" bench ring --device $device --rings $rings --agents 3 --ms 5
    for mode in $modes; do
        EPX_TEST_SCALE=$scale EPX_LL_WIDE_WAIT_US=$wide_wait try "$device: random cases, $mode" \
            "$build/tests/test_prop_$mode"
    done
done
finish

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU kernels without a GPU: src/device/gpu compiled for the CPU, where fibers emulate the lanes (tests/gpu_lanes),
# as a module that takes the place of libepx_cuda.so (32 lanes) and of libepx_hip.so (64 lanes, FNUZ casts). Every
# result is compared with the oracle; lanes that do not come to the same meeting end the test.
# ctest: timeout=1800 labels=slow,noasan,notsan
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${EPX_BUILD_DIR:-build}
cc=${CC:-gcc} cxx=${CXX:-g++}
if ! "$cxx" --version >/dev/null 2>&1; then
    echo "skipped: no C++ compiler"
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
# As many cases as the scale says; a launch here takes a thousand times as long as on a GPU.
scale=$(awk "BEGIN { print 0.03 * ${EPX_TEST_SCALE:-1} }")

# module FOLDER DEVICE FLAGS...: blocks of two warps, so that launches have several.
module() {
    local folder=$1 name=$2 file objects=()
    shift 2
    local flags=(-O1 -g1 -Wall -Wextra -Werror -Wno-unknown-pragmas -fPIC -fvisibility=hidden -ffp-contract=off
        -fno-strict-aliasing -DLAUNCH_WARPS=2 "-DEPX_HARDWARE=\"hardware.h\"" -I"$root/include"
        -I"$root/src" -I"$root/tests/gpu_lanes" "$@")
    mkdir -p "$folder"
    for file in ll_dispatch ll_combine ll_combine_logfmt ht_notify ht_dispatch ht_combine mask layout_count \
        ring_bench; do
        "$cxx" -x c++ -std=c++17 "${flags[@]}" -c "$root/src/device/gpu/$file.cu" -o "$folder/$file.o" || return
        objects+=("$folder/$file.o")
    done
    "$cc" -std=gnu11 -D_GNU_SOURCE= -shared "${flags[@]}" -o "$folder/libepx_$name.so" \
        "$root/tests/gpu_lanes/module.c" \
        "$root/tests/gpu_lanes/lanes.c" "$root/src/sim/fiber.c" "${objects[@]}" -lstdc++ -lm -lpthread
}

try() { # NAME COMMAND...
    local name=$1 rc
    shift
    timeout 600 "$@" >"$work/out" 2>&1
    rc=$?
    if [ $rc -eq 0 ]; then
        echo "ok: $name"
    else
        tail -25 "$work/out"
        echo "FAILED: $name: exit code $rc"
        failures=$((failures + 1))
    fi
}

module "$work/cuda" cuda & first=$!
module "$work/hip" hip -DEPX_HIP & second=$!
wait $first && wait $second || { echo "FAILED: the modules do not compile"; exit 1; }

for device in cuda hip; do
    export EPX_MODULE_DIR=$work/$device EPX_TEST_DEVICE=$device
    small=(--device $device --ranks 3 --tokens 9 --experts 12 --iters 2 --warmup 1 --check)
    try "$device: low latency, FP8" "$build/epx" bench ll "${small[@]}" --hidden 1408 --dtype fp8
    try "$device: low latency, LogFMT" "$build/epx" bench ll "${small[@]}" --hidden 1536 --logfmt
    try "$device: high throughput" "$build/epx" bench ht "${small[@]}" --hidden 1400
    try "$device: high throughput by the clock" "$build/epx" bench ht "${small[@]}" --hidden 1024 --timing wall
    try "$device: ranks as threads, fp8 input" "$build/epx" bench ht --device $device --ranks 2 --tokens 9 \
        --experts 12 --hidden 1024 --iters 2 --threads --dtype fp8-input
    try "$device: replays, staged" "$build/epx" bench ll --device $device --ranks 2 --tokens 5 \
        --experts 12 --hidden 512 --replays 4 --staged --overlap
    for mode in ll ht; do
        try "$device: two nodes, $mode" "$build/epx" bench $mode "${small[@]}" --nodes 2 --ranks 4 --hidden 1024
    done
    try "$device: zones, source maps, sums in top-k order" "$build/tests/test_expand"
    EPX_DEVICE=$device try "$device: NVFP4" "$build/tests/test_nvfp4"
    EPX_DEVICE=$device try "$device: counts of epx_dispatch_layout" "$build/tests/test_layout"
    try "$device: commands to the proxies" "$build/epx" bench ring --device $device --rings 2 --agents 3 --ms 20
    modes=mixed
    [ $device = cuda ] && modes="ll ht" # what is different with 64 lanes is few lines: one kind of random case will do
    for mode in $modes; do
        EPX_TEST_SCALE=$scale try "$device: random cases, $mode" "$build/tests/test_prop_$mode"
    done
done
echo "$failures failures"
[ "$failures" -eq 0 ]

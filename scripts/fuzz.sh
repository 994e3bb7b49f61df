#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh [NAME]...: looks for inputs that break the decoders (docs/fuzzing.md): builds tests/fuzz with clang's
# libFuzzer, runs each harness, or those named, for FUZZ_SECONDS (3600), as many at once as there are cores, and prints
# a table.
#     FUZZ_SECONDS=60 scripts/fuzz.sh frames hello
#     FUZZ_KEEP=1 ...     adds what is worth keeping to tests/fuzz/corpus, the fewest inputs that reach as much
# What was found is in build-logs/fuzz: an input that fails is FINDING-NAME-*, to be run by
# build-fuzz/tests/fuzz/fuzz_NAME FILE. Exit 77: no libFuzzer here.
set -uo pipefail
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-3600}
build=${FUZZ_BUILD:-build-fuzz}
logs=build-logs/fuzz
jobs=${JOBS:-$(nproc)}

probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
echo '#include <stddef.h>
int LLVMFuzzerTestOneInput(const unsigned char *d, size_t n) { return (void)d, (void)n, 0; }' >"$probe/probe.c"
if ! clang -fsanitize=fuzzer,address "$probe/probe.c" -o "$probe/probe" 2>"$probe/why"; then
    echo "skipped: clang has no libFuzzer here (Debian: clang, libclang-rt-NN-dev): $(tail -1 "$probe/why")"
    exit 77
fi
# LeakSanitizer takes seconds per process on some machines (aarch64), and is not to be had where ptrace is not.
leaks=1
began=$(date +%s)
ASAN_OPTIONS=detect_leaks=1 timeout 20 "$probe/probe" -runs=10 >/dev/null 2>&1 && [ $(($(date +%s) - began)) -lt 2 ] ||
    leaks=0
export ASAN_OPTIONS=detect_leaks=$leaks:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1

names=("$@")
[ ${#names[@]} -ne 0 ] || mapfile -t names < <(cd tests/fuzz && ls fuzz_*.c | sed 's/^fuzz_//; s/\.c$//')

mkdir -p "$logs"
# One target at a time: make would compile what they share once for each.
compile() {
    local target
    cmake -S . -B "$build" -DCMAKE_C_COMPILER=clang -DCMAKE_BUILD_TYPE=Release -DEPX_SANITIZE=fuzz -DEPX_CUDA=OFF \
        -DEPX_WERROR=ON || return
    for target in "${names[@]/#/fuzz_}"; do
        cmake --build "$build" -j"$jobs" --target "$target" || return
    done
}
if ! compile >"$logs/build.log" 2>&1; then
    tail -30 "$logs/build.log"
    echo "fuzz: the harnesses do not build"
    exit 1
fi

run_one() { # name
    local program=$build/tests/fuzz/fuzz_$1 seeds=tests/fuzz/corpus/$1 found=$build/corpus/$1
    mkdir -p "$found"
    rm -f "$logs/FINDING-$1-"*
    timeout $((seconds + 120)) "$program" -max_total_time="$seconds" -max_len=2048 -timeout=20 -rss_limit_mb=4096 \
        -detect_leaks=$leaks -seed="${EPX_TEST_SEED:-0}" -print_final_stats=1 \
        -artifact_prefix="$logs/FINDING-$1-" "$found" "$seeds" \
        >"$logs/$1.log" 2>&1
    echo $? >"$logs/$1.rc"
}
began=$SECONDS
for name in "${names[@]}"; do
    [ -x "$build/tests/fuzz/fuzz_$name" ] || { echo "fuzz: there is no harness $name" && exit 2; }
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    run_one "$name" &
done
wait

keep() { # name: the fewest inputs that reach every edge that seeds and new ones reach
    local program=$build/tests/fuzz/fuzz_$1 kept=$build/kept/$1
    rm -rf "$kept" && mkdir -p "$kept"
    "$program" -set_cover_merge=1 -use_counters=0 -max_len=1024 -detect_leaks=0 "$kept" "tests/fuzz/corpus/$1" \
        "$build/corpus/$1" >"$logs/$1.merge.log" 2>&1
    cp -n "$kept"/* "tests/fuzz/corpus/$1/"
}

failed=0
printf '%-12s %8s %12s %10s %8s %s\n' harness seconds executions edges seeds result
for name in "${names[@]}"; do
    log=$logs/$name.log
    executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    edges=$(grep -oE 'cov: [0-9]+' "$log" | tail -1 | tr -dc 0-9)
    result=ok
    if [ "$(cat "$logs/$name.rc")" -ne 0 ]; then
        result="FAILED: $(grep -hoE 'SUMMARY.*|[^ ]*: does not hold.*' "$log" | tail -1)"
        failed=$((failed + 1))
    elif [ -n "${FUZZ_KEEP:-}" ]; then
        keep "$name"
    fi
    printf '%-12s %8s %12s %10s %8s %s\n' "$name" "$seconds" "${executions:-?}" "${edges:-?}" \
        "$(find "tests/fuzz/corpus/$name" -type f | wc -l)" "$result"
done
[ $leaks -eq 1 ] || echo "leaks were not looked for: LeakSanitizer is slow here, or cannot run"
echo "fuzz: $((${#names[@]} - failed)) of ${#names[@]} harnesses ended without a finding, $((SECONDS - began)) s"
[ $failed -eq 0 ]

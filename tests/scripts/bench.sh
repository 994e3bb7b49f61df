#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `epx bench` on small shapes: both modes and all layouts are checked, --json is JSON with the promised keys, a spoilt
# result makes the exit code 1, what this build cannot do makes it 2, and --vs mpi gives a ratio.
# ctest: timeout=240 serial
set -uo pipefail

epx=${EPX_BUILD_DIR:-build}/epx
small=(--ranks 4 --tokens 24 --hidden 512 --experts 16 --topk 4 --iters 2 --warmup 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

fail() {
    echo "FAILED: $1"
    sed 's/^/    /' "$work/out" "$work/err" 2>/dev/null
    failures=$((failures + 1))
}

# expect CODE NAME ARGUMENTS...: runs epx bench, keeps its output, compares the exit code
expect() {
    local code=$1 name=$2 got
    shift 2
    timeout 120 "$epx" bench "$@" >"$work/out" 2>"$work/err"
    got=$?
    if [ "$got" -eq "$code" ]; then
        echo "ok: $name"
    else
        fail "$name: exit code $got, expected $code (epx bench $*)"
        return 1
    fi
}

says() { # NAME TEXT: the output of the last run has TEXT
    grep -qF -- "$2" "$work/out" "$work/err" && echo "ok: $1" || fail "$1: '$2' is not in the output"
}

json() { # NAME CONDITION: every line is an object o, for which the Python expression holds
    python3 - "$work/out" "$2" <<'PY' && echo "ok: $1" || fail "$1"
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
assert rows, "no lines"
for o in rows:
    assert eval(sys.argv[2]), (sys.argv[2], o)
PY
}

keys="{'op','mode','ranks','nodes','us_p50','us_p99','logical_GBps','wire_GBps','check','tokens','hidden','topk',"
keys+="'experts','dtype','routing','device','memcpy_GBps'}"

shapes=("ll" "ll --layout rank" "ll --dtype fp8" "ll --logfmt" "ht" "ht --layout expert --align 8"
    "ht --dtype fp8" "ht --routing hot" "ll --routing zipf" "ht --plain-memory" "ll --ranks 1" "ht --ranks 3")
spoils=(1 2)
# Processes start slowly under sanitizers, and the property tests try the shapes there: here it is the program's turn.
if [ "${EPX_SANITIZE:-none}" != none ]; then
    shapes=("ll --logfmt" "ht --layout expert --align 8")
    spoils=(2)
fi

for shape in "${shapes[@]}"; do
    # shellcheck disable=SC2086
    set -- $shape
    expect 0 "$shape is checked" "$1" "${small[@]}" "${@:2}" --check --json &&
        json "$shape: keys and numbers" "$keys <= set(o) and o['check'] == 'ok' and 0 < o['us_p50'] <= o['us_p99']"
done

expect 0 "table" ht "${small[@]}" --check && says "the table says that the check passed" "check    ok"
expect 0 "no check unless asked" ll "${small[@]}" --json && json "check is off" "o['check'] == 'off'"
expect 0 "low latency has two operations" ll "${small[@]}" --json &&
    json "dispatch and combine" "[r['op'] for r in rows] == ['dispatch', 'combine']"
expect 0 "high throughput has three" ht "${small[@]}" --json &&
    json "update, dispatch, combine" "[r['op'] for r in rows] == ['update', 'dispatch', 'combine']"

expect 0 "the command ring" ring --ms 20 --rings 2 --json &&
    json "its numbers" "o['op'] == 'ring' and o['device'] == 'cpu' and o['puts_per_cmd'] > 0.99" &&
    json "merged and round trip" "o['merged_puts_per_cmd'] < 0.5 and 0 < o['rtt_us_p50'] <= o['rtt_us_p99']"
expect 2 "a ring on a device that there is not" ring --device abacus && says "the choices" "expected cpu, cuda or hip"

# The check can fail, and says where.
for spoilt in "${spoils[@]}"; do
    export EPX_BENCH_CORRUPT=$spoilt
    for mode in ll ht; do
        expect 1 "a spoilt result ($mode, $spoilt) is found" "$mode" "${small[@]}" --check --json &&
            says "the message names the rank" "epx rank 3" && json "check is fail" "o['check'] == 'fail'"
    done
done
expect 0 "without --check nobody looks" ll "${small[@]}" --json
unset EPX_BENCH_CORRUPT

expect 2 "an unknown mode" sideways
expect 2 "a bad number" ll --ranks 0 && says "the message has the range" "expected a number from 1"
expect 2 "a bad word" ll --dtype int3 && says "the message has the choices" "expected bf16 or fp8"
expect 2 "a device that this build does not have" ll "${small[@]}" --device hip

if [ -x "$(dirname "$epx")/epx-mpi-baseline" ] && command -v mpirun >/dev/null; then
    for shape in "ll" "ll --layout rank" "ht" "ht --layout expert --align 8" "ht --dtype fp8"; do
        # shellcheck disable=SC2086
        set -- $shape
        expect 0 "$shape against MPI, both checked" "$1" "${small[@]}" "${@:2}" --check --vs mpi --json &&
            json "$shape: the ratio" "abs(o['vs_mpi'] - o['mpi_us_p50'] / o['us_p50']) < 0.1 and o['mpi_variant']"
    done
    EPX_BENCH_CORRUPT=3 expect 1 "a spoilt result of MPI is found" ht "${small[@]}" --check --vs mpi
else
    echo "skipped: --vs mpi (no epx-mpi-baseline in this build, or no mpirun)"
fi

echo "$failures failures"
[ "$failures" -eq 0 ]

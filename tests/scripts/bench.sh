#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `epx bench` on small shapes: both modes and all layouts are checked, --json is JSON with the promised keys, --timing
# events, --threads and --replays work, a spoilt result makes the exit status 1, a wrong command line or what this build
# cannot do makes it 2, and --vs mpi gives a ratio.
# ctest: labels=notsan serial
set -uo pipefail

. "$(dirname "$0")/../lib/bench_cli.sh"
few=(--ranks 4 --tokens 24 --hidden 512 --experts 16 --topk 4)
small=("${few[@]}" --iters 2 --warmup 1)

keys="{'op','mode','ranks','nodes','us_p50','us_p99','logical_GBps','wire_GBps','check','tokens','hidden','topk',"
keys+="'experts','dtype','routing','device','memcpy_GBps'}"

shapes=("ll" "ll --layout rank" "ll --dtype fp8" "ll --logfmt" "ht" "ht --layout expert --align 8"
    "ht --dtype fp8" "ht --routing hot" "ll --routing zipf"
    "ht --routing groups" "ht --plain-memory" "ll --ranks 1" "ht --ranks 3")
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

# Whole layers: fresh routing, ordinary memory, host time.
for shape in "layer" "layer ll" "layer --layout expert --dtype fp8" "layer --nodes 2"; do
    # shellcheck disable=SC2086
    set -- $shape
    expect 0 "$shape is checked" "$@" "${small[@]}" --check --json &&
        json "$shape: keys and numbers" "o['op'] == 'layer' and o['plain_memory'] and o['check'] == 'ok' and
            0 < o['us_p50'] <= o['us_p99'] and 0 < o['host_us'] and o['host_count_us'] <= o['host_us']"
done
expect 0 "a table of layers" layer "${small[@]}" && says "with host time" "host"
# As many layers as --iters says, whatever rounds they are measured in: on each of 4 ranks one before, and 13.
EPX_TRACE=$work/layers.json expect 0 "13 layers" layer "${few[@]}" --iters 13 --warmup 0 &&
    says "the table says so" "13 layers in 2 rounds"
calls=$(grep -o '"name":"epx_dispatch"' "$work/layers.json" | wc -l)
[ "$calls" -eq $((4 * 14)) ] && echo "ok: 13 layers are made" || fail "--iters 13 made $calls calls of epx_dispatch"
expect 2 "layers are not compared with MPI" layer --vs mpi && says "says why" "layer measures calls"
EPX_BENCH_CORRUPT=2 expect 1 "a spoilt layer is found" layer "${small[@]}" --check

expect 0 "table" ht "${small[@]}" --check && says "the table says that the check passed" "check    ok"
# Nothing passes the bound but noise. Rows of a model's size, so that copying is what takes the time; the quietest of
# three runs counts.
if [ "${EPX_SANITIZE:-none}" = none ]; then
    for shape in "ht" "ll --layout rank"; do
        for run in 1 2 3; do
            # shellcheck disable=SC2086
            timeout 200 "$epx" bench $shape --tokens 64 --iters 5 --json >"$work/run$run" 2>"$work/err" ||
                fail "$shape: exit code $?"
        done
        cat "$work"/run? >"$work/out"
        json "$shape: at most its bound" "0 < min(r['of_bound'] for r in rows if r['op'] == 'dispatch') <= 1.05"
    done
fi
EPX_BENCH_CORRUPT=4 expect 0 "a bound that is passed" ll "${small[@]}" &&
    says "is a reference" "dispatch passed it: here it is a reference"
EPX_BENCH_CORRUPT=4 expect 0 "in a sweep too" ll --ranks 2 --iters 1 --over-tokens 8,16 &&
    says "it is a reference" "%: a reference, no bound"
expect 0 "no check unless asked" ll "${small[@]}" --json && json "check is off" "o['check'] == 'off'"
expect 0 "low latency has two operations" ll "${small[@]}" --json &&
    json "dispatch and combine" "[r['op'] for r in rows] == ['dispatch', 'combine']"
expect 0 "high throughput has three" ht "${small[@]}" --json &&
    json "update, dispatch, combine" "[r['op'] for r in rows] == ['update', 'dispatch', 'combine']"

# Puts of commands that a proxy has taken may be pending when it is asked: some in a hundred of so short a time, on a
# busy machine. Where commands merge, hundreds become one put.
expect 0 "the command ring" ring --ms 20 --rings 2 --json &&
    json "its numbers" "o['op'] == 'ring' and o['device'] == 'cpu' and 0.9 < o['puts_per_cmd'] < 1.1" &&
    json "merged and round trip" "o['merged_puts_per_cmd'] < 0.5 and 0 < o['rtt_us_p50'] <= o['rtt_us_p99']"
expect 2 "a ring on a device that there is not" ring --device abacus && says "the choices" "expected cpu, cuda or hip"
expect 2 "an unknown option of ring" ring --ring 2 &&
    says "the right program" "epx bench ring: unknown option '--ring' (did you mean '--rings'?)"

# Time stamps of the device: per rank, in one series of operations.
event_keys="{'us_p50','us_slowest_p50','us_p99','us_min','logical_GBps','wire_GBps'}"
for shape in "ll" "ll --threads --staged" "ht --layout expert --plain-memory" "ht --threads --dtype fp8"; do
    # shellcheck disable=SC2086
    set -- $shape
    expect 0 "$shape by events, checked" "$1" "${small[@]}" "${@:2}" --timing events --check --json &&
        json "$shape: keys and numbers" "$event_keys <= set(o) and o['timing'] == 'events' and o['check'] == 'ok' and
            0 < o['us_min'] <= o['us_p50'] <= o['us_slowest_p50'] <= o['us_p99']"
done
expect 0 "low latency by events" ll "${small[@]}" --timing events --json &&
    json "has series, too" "[r['op'] for r in rows] == ['dispatch', 'combine', 'pair', 'dispatches', 'combines']"
expect 0 "high throughput by events" ht "${small[@]}" --timing events --dtype fp8-input --json &&
    json "has the update" "[r['op'] for r in rows] == ['update', 'dispatch', 'combine']"
expect 0 "a table by events" ht "${small[@]}" --timing events --check && says "and its check" "check    ok"
expect 0 "threads by the clock" ht "${small[@]}" --threads --check --json &&
    json "are said to be" "o['threads'] and o['check'] == 'ok'"
expect 0 "only a check" ll "${small[@]}" --iters 0 --check --json &&
    json "has no times" "o['us_p50'] is None and o['check'] == 'ok'"
expect 0 "replays" ll "${few[@]}" --replays 6 --overlap --staged --json &&
    json "are counted" "o['op'] == 'replays' and o['replays'] == 6 and o['check'] == 'ok'"
expect 0 "replays with changing row counts" ht "${few[@]}" --replays 6 --threads --json
expect 1 "rows that are copied are found" ht "${small[@]}" --timing events --plain-memory --expect-zero-copy --check &&
    says "with the number of bytes" "--expect-zero-copy expects 0"

# The check can fail, and says where.
for spoilt in "${spoils[@]}"; do
    export EPX_BENCH_CORRUPT=$spoilt
    for mode in ll ht; do
        expect 1 "a spoilt result ($mode, $spoilt) is found" "$mode" "${small[@]}" --check --json &&
            says "the message names the rank" "epx rank 3" && json "check is fail" "o['check'] == 'fail'"
        expect 1 "also by events ($mode, $spoilt)" "$mode" "${small[@]}" --timing events --check --json &&
            says "the message names the rank" "epx rank 3" && json "check is fail" "o['check'] == 'fail'"
    done
done
EPX_BENCH_CORRUPT=2 expect 1 "also in a replay" ll "${few[@]}" --replays 3 &&
    says "the message names the replay" "epx rank 3, replay 1"
expect 0 "without --check nobody looks" ll "${small[@]}" --json
unset EPX_BENCH_CORRUPT

# refused MESSAGE ARGUMENTS...: a wrong command line, before any rank starts: status 2, what was expected, where to read
# more.
refused() {
    local text=$1
    shift
    expect 2 "refused: $*" "$@" && says "with the reason" "epx bench: $text" &&
        says "and where to read more" "; see epx bench --help"
}
refused "the mode is 'sideways'; expected layer, ll, ht, sweep or ring" sideways
refused "the mode is missing" --check
refused "--ranks is '0'; expected a number from 1 to 1024" ll --ranks 0
refused "--dtype is 'int3'; expected bf16, fp8 or fp8-input" ll --dtype int3
refused "--hidden is 100; expected a multiple of 8" ll --hidden 100
refused "--hidden is 1400; expected a multiple of 16 with --dtype fp8" ht --hidden 1400 --dtype fp8
refused "--topk is 8; expected at most the number of experts, 3" ll --experts 3
refused "--align belongs to ht with --layout expert; got ll" ll --align 8
refused "--align belongs to ht with --layout expert; got ht with --layout flat" ht --align 8
refused "--layout is 'flat'; expected expert or rank with ll" ll --layout flat
refused "--layout is 'rank'; expected flat or expert with ht" ht --layout rank
refused "--logfmt belongs to ll" ht --logfmt
refused "--staged belongs to ll" ht --staged
refused "--nodes is 9; expected at most the number of ranks, 8" ll --nodes 9
refused "--nodes is 3; 4 ranks with 2 per node are 2 nodes" ll --ranks 4 --nodes 3
refused "--net is 'tcp', but one node needs no network" ll --net tcp
refused "--net: " ll --nodes 2 --net pigeons
refused "--iters 0 measures nothing" ll --iters 0
refused "--overlap belongs to --replays" ll --overlap
refused "--replays does not measure; expected no --iters" ll --replays 3 --iters 2
refused "--replays does not measure; expected no --warmup" ll --replays 3 --warmup 0
refused "--tokens has no meaning with --over-tokens alone" ll --tokens 3 --over-tokens 1,2
refused "--ranks has no meaning with --over-ranks alone" ll --ranks 3 --over-ranks 2,4
refused "--tokens has no meaning with --compare FILE without a mode" --compare "$work/out" --tokens 3
refused "--json has no meaning with --compare FILE --new FILE" --compare "$work/out" --new "$work/out" --json
refused "--expect-zero-copy belongs to ht with --plain-memory" ht --expect-zero-copy
refused "--dtype fp8-input is only measured" ht --dtype fp8-input --check
refused "--vs compares times between barriers" ht --timing events --vs mpi
refused "--vs is 'ucx'; expected mpi or ofi" ht --vs ucx
refused "--vs mpi casts to fp8 itself" ht --vs mpi --dtype fp8-input
refused "--vs mpi compares processes" ht --vs mpi --threads
refused "--ranks times --tokens times --topk" ht --ranks 1024 --tokens 1000000
refused "unknown option '--rank' (did you mean '--ranks'?)" ll --rank 4
refused "unknown option '--np' (did you mean '--ranks'?)" ll --np 4
refused "unknown option '--token' (did you mean '--tokens'?)" ll --token 4
refused "unexpected argument 'extra'" ll extra
if [ -e /dev/nvidiactl ] || [ -e /dev/kfd ]; then
    EPX_MODULE_DIR=$work refused "no CUDA device module here" ll "${small[@]}" --device cuda
    says "and what to do" "EPX_MODULE_DIR"
else
    EPX_MODULE_DIR=$work refused "--device cuda: expected a GPU, found none: " ll "${small[@]}" --device cuda
    EPX_MODULE_DIR=$work expect 2 "the ring without a GPU" ring --device hip &&
        says "is refused, too" "device hip: expected a GPU, found none: "
    EPX_DEVICE=cuda expect 2 "a group without a GPU" ll "${small[@]}" --device auto &&
        says "says so, too" "epx_group_create: device cuda: expected a GPU, found none: "
fi

# A misspelt variable is named once, not by every rank.
EPX_LOGG=debug expect 0 "a misspelt variable" ll "${small[@]}" --json
[ "$(grep -c "EPX_LOGG is set, but EPX reads no such variable; did you mean EPX_LOG?" "$work/err")" = 1 ] &&
    [ "$(wc -l <"$work/err")" = 1 ] &&
    echo "ok: is named once" || fail "a misspelt variable is not named once"

# Beyond `ulimit -f` the kernel ends a process by a signal, unless it is ignored.
limit=$(ulimit -S -f)
ulimit -S -f 8
expect 1 "no file may have more than 8 KiB" ll "${small[@]}" &&
    says "and bench says so" "allow larger files (ulimit -f)"
ulimit -S -f "$limit"

# The table of docs/bench.md is the one that --help prints.
"$epx" bench --help=markdown >"$work/out"
[ "$(wc -l <"$work/out")" -gt 20 ] || fail "no table"
while IFS= read -r row; do
    grep -qxF -- "$row" "$root/docs/bench.md" || fail "docs/bench.md lacks: $row"
done <"$work/out"

if [ -x "$(dirname "$epx")/epx-mpi-baseline" ] && command -v mpirun >/dev/null; then
    for shape in "ll" "ll --layout rank" "ht" "ht --layout expert --align 8" "ht --dtype fp8"; do
        # shellcheck disable=SC2086
        set -- $shape
        expect 0 "$shape against MPI, both checked" "$1" "${small[@]}" "${@:2}" --iters 10 --check --vs mpi --json &&
            json "$shape: the ratio" \
                "abs(o['vs_mpi'] * o['us_p50'] - o['mpi_us_p50']) < 0.06 * (1 + o['vs_mpi']) + 0.006 * o['us_p50'] \
                and o['mpi_variant']"
    done
    expect 0 "few iterations" ht "${small[@]}" --vs mpi &&
        says "give no ratio" "none of 2 iterations: expected --iters 10"
    expect 0 "nor in JSON" ht "${small[@]}" --vs mpi --json &&
        json "only times" "o['vs_mpi'] is None and o['vs_mpi_best'] is None and o['mpi_us_p50'] > 0"
    EPX_BENCH_CORRUPT=3 expect 1 "a spoilt result of MPI is found" ht "${small[@]}" --check --vs mpi
else
    echo "skipped: --vs mpi (no epx-mpi-baseline in this build, or no mpirun)"
fi

finish

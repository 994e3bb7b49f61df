#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `epx bench` with a rank that is stopped (SIGSTOP): the run ends after --timeout, names the rank and leaves nothing
# behind. And the line of progress, which is shown on a terminal only.
# ctest: cost=60 labels=slow,noasan,notsan sleeps
set -uo pipefail
epx=${EPX_BUILD_DIR:-build}/epx
. "$(dirname "$0")/../lib/slow.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

fail() {
    echo "FAILED: $1"
    sed 's/^/    /' "$work/out" "$work/err" 2>/dev/null
    failures=$((failures + 1))
}

# A rank that is stopped, wherever it is, ends the run after the deadline, with its name.
stop_one() { # NAME SECONDS_UNTIL_THE_STOP OPTIONS...
    local name=$1 after=$2 start=$SECONDS driver rank="" i most
    shift 2
    most=$(slow 60)
    "$epx" bench "$@" --ranks 4 --tokens 24 --hidden 512 --experts 16 --topk 4 --iters 10000 --warmup 0 \
        --timeout "$(slow 3)" >"$work/out" 2>"$work/err" &
    driver=$!
    for i in $(seq 1200); do # its process: the one of this driver's ranks that has RANK=2
        for pid in $(pgrep -f "bench --worker /proc/$driver/"); do
            grep -qz '^RANK=2$' "/proc/$pid/environ" 2>/dev/null && rank=$pid
        done
        [ -z "$rank" ] || break
        sleep 0.05
    done
    sleep "$after"
    kill -STOP "$rank"
    wait $driver
    i=$?
    [ $i -eq 1 ] && grep -q "rank 2" "$work/err" && [ $((SECONDS - start)) -lt "$most" ] &&
        echo "ok: $name ($((SECONDS - start)) s)" ||
        fail "$name: exit status $i after $((SECONDS - start)) s; expected 1 and a message that names rank 2"
    ! grep -qE 'SIG(SEGV|BUS|ABRT|ILL)' "$work/err" || fail "$name: another rank crashed"
    [ ! -e "/proc/$rank" ] || fail "$name: the stopped rank is left behind"
}
stop_one "a rank that is stopped while it starts" 0 ll
stop_one "a rank that is stopped between barriers, ll" 1.1 ll --check
stop_one "a rank that is stopped between barriers, ht" 1.5 ht --check
stop_one "a rank that is stopped in a measurement by events" 1 ll --timing events

# Ranks that work longer than the deadline without a barrier are not late.
"$epx" bench ll --ranks 2 --tokens 64 --hidden 1024 --experts 16 --timing events --iters 1500 \
    --timeout "$(slow 1)" --json \
    >"$work/out" 2>"$work/err" && echo "ok: a series that takes longer than --timeout" ||
        fail "a series that takes longer than --timeout"

# Progress: on a terminal, after two seconds, and never in a file.
if ! command -v script >/dev/null; then
    echo "skipped: progress on a terminal: no script(1)"
else
    script -qec "$epx bench ll --ranks 2 --iters 3000 --tokens 64" "$work/typescript" >/dev/null
    grep -qE 'epx bench: [0-9]+ %, round [0-9] of 5, (EPX|memcpy|bound)' "$work/typescript" &&
        echo "ok: progress on a terminal" ||
        { cp "$work/typescript" "$work/err"; fail "no progress on a terminal"; }
    "$epx" bench ll --ranks 2 --iters 3000 --tokens 64 >"$work/out" 2>"$work/err"
    [ $? -eq 0 ] && [ ! -s "$work/err" ] && echo "ok: no progress elsewhere" || fail "progress was written to a file"
fi

echo "$failures failures"
[ "$failures" -eq 0 ]

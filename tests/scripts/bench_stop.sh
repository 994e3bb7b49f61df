#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `epx bench` with a rank that is stopped (SIGSTOP): the run ends after --timeout, names the rank and leaves nothing
# behind. And the line of progress, which is shown on a terminal only.
# ctest: cost=60 labels=slow,noasan,notsan sleeps
set -uo pipefail
. "$(dirname "$0")/../lib/script.sh"
. "$(dirname "$0")/../lib/slow.sh"

# The process of a driver's rank, once it is there. A driver that has ended has no rank.
rank_of() { # DRIVER RANK
    local pid
    while [ -e "/proc/$1/exe" ]; do
        for pid in $(pgrep -f "bench --worker /proc/$1/"); do
            ! grep -qz "^RANK=$2\$" "/proc/$pid/environ" 2>/dev/null || { echo "$pid" && return; }
        done
        sleep 0.1
    done
}

# A rank that is stopped, wherever it is, ends the run after the deadline, with its name. Nothing else can end it, so
# that how long it takes matters only if it is for ever. Until then the other ranks poll: all of these run side by side,
# so that they share the cores in which they would otherwise wait one after the other.
stop_one() { # NAME SECONDS_UNTIL_THE_STOP OPTIONS...
    local name=$1 after=$2 driver rank since code
    shift 2
    work=$(mktemp -d "$work/XXXXXX")
    "$epx" bench "$@" --ranks 4 --tokens 24 --hidden 512 --experts 16 --topk 4 --iters 10000 --warmup 0 \
        --timeout "$deadline" >"$work/out" 2>"$work/err" &
    driver=$!
    rank=$(rank_of $driver 2)
    sleep "$after"
    since=$SECONDS
    [ -n "$rank" ] && kill -STOP "$rank" || fail "$name: rank 2 cannot be stopped"
    wait $driver
    code=$? since=$((SECONDS - since))
    [ $code -eq 1 ] && grep -q "rank 2" "$work/err" && [ $since -lt $((20 * deadline)) ] &&
        echo "ok: $name ($since s)" ||
        fail "$name: exit status $code after $since s; expected 1 and a message that names rank 2"
    ! grep -qE 'SIG(SEGV|BUS|ABRT|ILL)' "$work/err" || fail "$name: another rank crashed"
    [ ! -e "/proc/$rank" ] || fail "$name: the stopped rank is left behind"
    return "$failures"
}
deadline=$(slow 6) stops=()
stop_one "a rank that is stopped while it starts" 0 ll & stops+=($!)
stop_one "a rank that is stopped between barriers, ll" 1.1 ll --check & stops+=($!)
stop_one "a rank that is stopped between barriers, ht" 1.5 ht --check & stops+=($!)
stop_one "a rank that is stopped in a measurement by events" 1 ll --timing events & stops+=($!)
for pid in "${stops[@]}"; do
    wait "$pid" || failures=$((failures + 1))
done

# Ranks that work longer than the deadline without a barrier are not late.
"$epx" bench ll --ranks 2 --tokens 64 --hidden 1024 --experts 16 --timing events --iters 1500 \
    --timeout "$(slow 2)" --json \
    >"$work/out" 2>"$work/err" && echo "ok: a series that takes longer than --timeout" ||
        fail "a series that takes longer than --timeout"

# Progress: on a terminal, after two seconds, and never in a file. Both run until it has been seen on the terminal.
if ! command -v script >/dev/null; then
    echo "skipped: progress on a terminal: no script(1)"
else
    long=(bench ll --ranks 2 --iters 10000 --tokens 64)
    "$epx" "${long[@]}" >"$work/out" 2>"$work/err" & elsewhere=$!
    script -qefc "exec $epx ${long[*]}" "$work/typescript" >/dev/null 2>&1 & terminal=$!
    while kill -0 $terminal 2>/dev/null && kill -0 $elsewhere 2>/dev/null &&
        ! grep -qE 'epx bench: [0-9]+ %, round [0-9] of 5, (EPX|memcpy|bound)' "$work/typescript" 2>/dev/null; do
        sleep 0.1
    done
    kill -0 $elsewhere && [ ! -s "$work/err" ] && echo "ok: no progress elsewhere" ||
        fail "progress was written to a file, or the run has ended"
    kill -0 $terminal && echo "ok: progress on a terminal" ||
        { cp "$work/typescript" "$work/err"; fail "no progress on a terminal"; }
    kill $terminal $elsewhere
    wait
fi

finish

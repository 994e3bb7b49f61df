#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `epx top`: rates of a group that runs; of one that hangs because a rank is stopped or was killed, which rank it is;
# ranks of several nodes are one group; pages are their user's alone, and vanish with the groups, also those of killed
# ranks; EPX_TOP=0 makes none.
# ctest: labels=slow
set -uo pipefail

. "$(dirname "$0")/../lib/script.sh"
bench=
trap '[ -z "$bench" ] || kill -KILL -- -"$bench" 2>/dev/null; rm -rf "$work"' EXIT
fail() {
    echo "FAILED: $1"
    cat "$work"/* 2>/dev/null | head -40
    exit 1
}

set -m # groups of processes of their own
"$epx" bench ll --ranks 3 --tokens 8 --hidden 512 --experts 16 --topk 4 --iters 10000 --timing events --timeout 60 \
    >"$work/bench" 2>&1 &
bench=$!
set +m

# The group whose ranks $bench started; r: its ranks.
look() { # PYTHON [PYTHON]: the first holds within 100 seconds; then prints the second
    python3 "$(dirname "$0")/top_look.py" "$epx" "$bench" "$@"
}

# All of the output is read: a grep that leaves early would end `epx top` with a failure.
text() { # WORDS [OPTION]...: does it have them?
    "$epx" top "${@:2}" >"$work/text" && grep -q "$1" "$work/text"
}

look "len(r) == 3 and g['device'] == 'cpu' and all(h['operations_per_second'] > 0 and h['bytes_per_second'] > 0 and
    0 < h['operations']['ll dispatch']['p50_us'] <= h['operations']['ll dispatch']['p99_us'] for h in r.values())" ||
    fail "a group that runs has rates"
echo "ok: rates of a group that runs"
text "3 of 3 ranks here" || fail "text"
for page in /dev/shm/epx-top-"$(id -u)"-*; do # of other groups too, which may end meanwhile
    mode=$(stat -c %a "$page" 2>/dev/null) || continue
    [ "$mode" = 600 ] || fail "$page is open to others"
done
echo "ok: pages are the user's alone"

"$epx" bench ll --ranks 4 --nodes 2 --tokens 8 --hidden 512 --experts 16 --topk 4 --iters 10000 --timing events \
    --timeout 60 >/dev/null 2>&1 &
beside=$!
for _ in $(seq 600); do
    "$epx" top --json >"$work/top.json"
    [ "$(grep -o '"device":' "$work/top.json" | wc -l)" -lt 2 ] || break
    sleep 0.1
done
[ "$(grep -o '"device":' "$work/top.json" | wc -l)" -ge 2 ] || fail "two jobs are two groups"
python3 "$(dirname "$0")/top_look.py" "$epx" "$beside" "len(r) == 4 and g['nodes'] == 2" || fail "two nodes, one group"
kill "$beside"
wait "$beside" 2>/dev/null
echo "ok: two jobs are two groups; two nodes are one"

pid=$(look "len(r) == 3" "r[1]['pid']") || fail "rank 1's process"
kill -STOP "$pid"
look "r[1]['state'] == 'stopped' and g.get('waiting_for') == 1 and r[0]['waits']['peer'] == 1 and
    r[0]['waits']['seconds'] > 1.2 and 'wait for' in r[0]['waits']['phase']" || fail "the stopped rank is named"
echo "ok: a group that hangs: the stopped rank is named, and since when others wait"
text "others wait for rank 1 (process $pid is stopped)" --once || fail "the text names it"
kill -STOP "$bench" "$(awk '{ print $4 }' "/proc/$pid/stat")" # who would end the others
kill -KILL "$pid"
look "1 not in r and g.get('waiting_for') == 1" || fail "a rank that was killed is named"
text "others wait for rank 1 (it has ended" --once || fail "the text names the rank that was killed"
kill -KILL -- -"$bench" 2>/dev/null
for _ in $(seq 300); do
    "$epx" top --json >"$work/top.json"
    grep -q "\"pid\":$pid," "$work/top.json" || break
    sleep 0.2
done
bench=
ls /dev/shm/epx-top-"$(id -u)"-"$pid"-* 2>/dev/null && fail "the page of a killed rank stays"
echo "ok: pages of killed ranks are removed"
EPX_TOP=0 "$epx" bench ll --ranks 2 --tokens 4 --hidden 512 --experts 4 --topk 2 --iters 1 >"$work/out" 2>&1 ||
    fail "EPX_TOP=0"
"$epx" top --interval 0 >"$work/out" 2>&1
[ $? = 2 ] || fail "a wrong option has status 2"
start=$(date +%s%N)
"$epx" top --once --interval 0.7 >"$work/out" 2>&1
[ $(($(date +%s%N) - start)) -ge 700000000 ] || fail "--interval does not count with --once"
echo "ok: EPX_TOP=0, wrong options"

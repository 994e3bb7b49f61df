#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_models.sh [--all] [NAME]: runs spin on models/*.pml: the protocols, which must hold, and broken variants of each
# rule, of which each must be found. One line a run: bounds, states, result. --all: larger bounds too (minutes, 6 GB).
# NAME: only runs whose name has it. docs/models.md says how to read a counterexample; it is kept in build-logs/models.
#
# Searches are complete: states are stored whole (COLLAPSE keeps them exactly); no bit-state hashing or hash compaction.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

all=0
[ "${1:-}" != --all ] || { all=1 && shift; }
only=${1:-}
memory=${MEMORY:-6000} # MiB of one verifier
limit=${LIMIT:-900}    # seconds of one verifier
models=$PWD/models
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
kept=build-logs/models
started=$SECONDS

spin_options() { # of "MODEL name=value ...": what spin takes
    local word
    for word in "$@"; do echo "-D$word"; done
}

# What a verifier has found, in the words of the models' heads.
result_of() { # OUTPUT STATUS
    local out=$1
    if [ "$2" -ne 0 ] || ! grep -q State-vector "$out"; then
        echo "no result: $(tail -1 "$out" | cut -c1-60)"
    elif grep -q 'errors: 0' "$out"; then
        if grep -qE 'not completed|too small|out of memory|max search depth' "$out"; then
            echo incomplete
        else
            echo ok
        fi
    else
        case $(grep -m1 'pan:1' "$out") in
        *'non-progress'*) echo 'found: cycle' ;;
        *'invalid end'*) echo 'found: deadlock' ;;
        *nfull* | *q_full*) echo 'channel full' ;;
        *'slot['*==0* | *'back['*==0*) echo 'found: slot' ;;
        *'slot['* | *'back['* | *'reply['* | *'window['*) echo 'found: mixed' ;;
        *'now['*) echo 'found: place' ;;
        *'violated (rows['* | *'violated ( !((rows['*) echo 'found: rows' ;;
        *serves*'n<='* | *'n<=1'*) echo 'found: P2 now' ;;
        *'rdy['*) echo 'found: P2 ever' ;;
        *'(serves['*) echo 'found: P5' ;;
        *'newest['*) echo 'found: P4' ;;
        *'violated ok'*) echo 'found: refused' ;;
        *'set['*) echo 'found: P1' ;;
        *) echo "found?: $(grep -m1 'pan:1' "$out" | cut -c1-60)" ;;
        esac
    fi
}

verify() { # NUMBER NAME WANT MODEL OPTION...: one run, one line
    local dir=$work/$1 name=$2 want=$3 model=$4 status=0 states seconds result mark=' '
    local kind=-DSAFETY flags=() optimize=-O0
    shift 4
    [[ $want != ok ]] || optimize=-O1
    [ $all -eq 0 ] || optimize=-O2
    case " $* " in *' CYCLES '*) kind=-DNP flags=(-l) ;; esac
    mkdir -p "$dir"
    (
        cd "$dir" && mapfile -t options < <(spin_options "$@") &&
            spin -a "${options[@]}" "$models/$model.pml" && sed -i '/^#line/d' pan.[cmt] &&
            ${CC:-gcc} "$optimize" -w "$kind" -DCOLLAPSE "-DMEMLIM=$memory" -DVECTORSZ=1024 -o pan pan.c &&
            timeout "$limit" ./pan -m1000000 -w20 ${flags[@]+"${flags[@]}"}
    ) >"$dir/out" 2>&1 || status=$?
    states=$(awk '/states, stored/ { print $1; exit }' "$dir/out")
    seconds=$(sed -n 's/.*elapsed time \([0-9.]*\).*/\1/p' "$dir/out")
    result=$(result_of "$dir/out" $status)
    case $want:$result in
    ok:ok) ;;
    "$result:$result") ;;
    *)
        mark='!'
        mkdir -p "$kept" && cp "$dir"/*.trail "$kept/$model-$1.trail" 2>/dev/null
        cp "$dir/out" "$kept/$model-$1.out"
        ;;
    esac
    [ "$mark" = ' ' ] || touch "$work/failed"
    printf '%s %-6s %-44s %-52s %9s  %-16s %6s\n' "$mark" "$model" "$name" "$*" "${states:--}" "$result" "${seconds:--}"
    rm -rf "$dir"
}

count=0
run() { # WANT NAME MODEL OPTION...: two at a time
    [[ -z $only || "$2" == *"$only"* ]] || return 0
    count=$((count + 1))
    [ "$(jobs -rp | wc -l)" -lt "${JOBS:-2}" ] || wait -n
    verify "$count" "$2" "$1" "${@:3}" &
}
holds() { run ok "$@"; }
breaks() { run "found: $1" "${@:2}"; } # PROPERTY NAME MODEL OPTION...

to_all="TO0=15 TO1=15 TO2=15 TO3=15"
uneven="N0=3 N1=1 N2=2 N3=0"

rows() {
    # shellcheck disable=SC2086
    {
        holds 'A, hot' rows FORM=1 T=3
        holds 'A, to all, one of a node plain' rows FORM=1 T=3 $to_all PLAIN=9
        holds 'A, to all, none plain' rows FORM=1 T=2 $to_all PLAIN=0
        holds 'A, uneven, two operations of a kind' rows FORM=1 T=3 $uneven $to_all PLAIN=1 SEQ=4 OPS=3
        holds 'B, hot' rows FORM=2 T=2
        holds 'B, to all' rows FORM=2 T=1 $to_all
        holds 'B, no cycle' rows FORM=2 T=1 CYCLES
        holds 'C, hot' rows FORM=3 SEQ=0 W=4 T=5
        holds 'C, to all, one of a node plain' rows FORM=3 SEQ=0 W=4 T=5 $to_all PLAIN=9
        breaks deadlock 'C, three slots' rows FORM=3 SEQ=0 W=3 T=5 $to_all OPS=1
        breaks mixed 'C, credit in the turn that takes' rows FORM=3 SEQ=0 W=4 T=5 $to_all OPS=1 BROKEN=31
        breaks mixed 'C, turns of the node not awaited' rows FORM=3 SEQ=0 W=4 T=3 $to_all OPS=1 BROKEN=32
        breaks deadlock 'first draft' rows FORM=0 T=6 C=2 OPS=1
        breaks deadlock 'A, one slot' rows FORM=1 W=1 $to_all PLAIN=9
        breaks slot 'A, credit before the slot is read' rows BROKEN=1 $to_all PLAIN=9
        breaks slot 'A, requests before all slots are free' rows BROKEN=3 $to_all PLAIN=9
        breaks deadlock 'A, credits of the inbox, not the source' rows BROKEN=4 $to_all PLAIN=9
        breaks slot 'A, slots of the next operation not awaited' rows BROKEN=5 $to_all PLAIN=9 SEQ=0
        breaks place 'A, READY not awaited' rows BROKEN=6 $to_all PLAIN=9
        breaks rows 'A, DATA not awaited' rows BROKEN=7 $to_all PLAIN=9
        breaks place 'A, DATA of combine not awaited' rows BROKEN=8 $to_all PLAIN=0
        breaks place 'A, DONE not awaited' rows BROKEN=9 $to_all PLAIN=9
        breaks slot 'A, asks before it has taken' rows BROKEN=10 $to_all PLAIN=9
        breaks mixed 'A, counters of one operation' rows BROKEN=11 $to_all PLAIN=9 SEQ=0
        breaks place 'A, relay of plain ranks too' rows BROKEN=12 $to_all PLAIN=9
        breaks slot 'A, one counter for both kinds' rows BROKEN=13 $to_all PLAIN=1 OPS=3
        breaks deadlock 'A, gate waits for a credit of its turn' rows BROKEN=14 $to_all PLAIN=9
        breaks slot 'A, gate waits for anything' rows BROKEN=15 $to_all PLAIN=9
        breaks slot 'B, requests before all slots are free' rows FORM=2 T=2 BROKEN=3
        breaks rows 'B, DATA not awaited' rows FORM=2 T=1 $to_all PLAIN=1 BROKEN=7
        breaks place 'B, DONE not awaited' rows FORM=2 T=1 $to_all PLAIN=1 BROKEN=9 OPS=3
        breaks deadlock 'B, blocks for room' rows FORM=2 T=2 $to_all OPS=1 BROKEN=21
        breaks slot 'B, credit when the round lands' rows FORM=2 T=6 C=2 OPS=1 BROKEN=22
        breaks deadlock 'B, ends with its own rows' rows FORM=2 T=2 BROKEN=23
    }
}

rows_all() {
    # shellcheck disable=SC2086
    {
        holds 'A, to all, three operations' rows FORM=1 T=3 $to_all PLAIN=9 OPS=3
        holds 'B, to all, no cycle' rows FORM=2 T=1 $to_all OPS=1 CYCLES
        holds 'A, hot, any set of plain ranks' rows FORM=1 T=2 PLAIN=16
        holds 'A, to all' rows FORM=1 T=3 $to_all
        holds 'A, to all, rounds of two' rows FORM=1 T=5 C=2 $to_all PLAIN=9 OPS=4
        holds 'A, to all, three slots' rows FORM=1 T=5 W=3 $to_all PLAIN=5 OPS=2
        holds 'C, to all, any set of plain ranks' rows FORM=3 SEQ=0 W=4 T=3 $to_all OPS=1 PLAIN=16
        holds 'B, hot, rounds of two' rows FORM=2 T=6 C=2 OPS=1
        holds 'B, to all, one of a node plain' rows FORM=2 T=2 $to_all PLAIN=9 OPS=1
        holds 'B, hot, three operations' rows FORM=2 T=2 OPS=3
        holds 'B, to all, two tokens' rows FORM=2 T=2 $to_all OPS=1
    }
}

views() {
    holds 'protocol' views N=3 CHANGES=3 CALLS=2 FAULTS=0
    holds 'one may leave' views N=3 CHANGES=3 CALLS=1 FAULTS=1 SHRINK ANY=1
    holds 'newcomer' views N=3 NEW=1 CHANGES=2 CALLS=1 FAULTS=2
    holds '4 ranks, two ends' views N=4 CHANGES=1 CALLS=1 FAULTS=2
    holds 'fence' views N=3 CHANGES=2 CALLS=1 FAULTS=1 FENCE
    holds 'P3, no cycle' views N=3 CHANGES=2 CALLS=1 FAULTS=1 CYCLES
    holds 'P3, calm: all install' views N=4 CHANGES=3 CALLS=3 FAULTS=0 CALM=2 SHRINK
}

views_broken() {
    breaks 'P2 ever' 'C1 end is proof' views BROKEN=1 CHANGES=2 FAULTS=2
    breaks 'P2 ever' 'C2 doubts not counted' views BROKEN=2 CHANGES=3 FAULTS=0
    breaks 'P2 ever' 'C3 commit binds' views BROKEN=3 CHANGES=3 FAULTS=1 ANY=1
    breaks refused 'C4 leavers do not count' views BROKEN=4 CALLS=3 CHANGES=3 FAULTS=0 CALM=2 SHRINK
    breaks 'P2 ever' 'C5 burned is forgotten' views BROKEN=5 CHANGES=3 FAULTS=0 ANY=1
    breaks 'P2 now' 'C6 back to the old view' views BROKEN=6 CHANGES=3 FAULTS=0
    breaks 'P2 ever' 'C7 proof by number' views BROKEN=7 NEW=1 CHANGES=2 CALLS=1 FAULTS=1
    breaks P1 'C8 name by number, newcomer leads' views BROKEN=8 NEW=1 CHANGES=2 CALLS=1 FAULTS=1 ANY=1
    breaks 'P2 ever' 'newcomer counts' views BROKEN=10 NEW=1 CHANGES=2 FAULTS=1
    breaks 'P2 ever' 'silence, refusal or a mask is an end' views BROKEN=11 CHANGES=2 FAULTS=1
    breaks P4 'agrees suffice, no ready' views BROKEN=12 CHANGES=3 FAULTS=0
    breaks 'P2 ever' 'either half' views BROKEN=13 CHANGES=3 FAULTS=0
    breaks 'P2 ever' 'block read before the end' views BROKEN=14 CHANGES=3 FAULTS=1
    breaks 'P2 ever' 'ready sent before the block' views BROKEN=15 CHANGES=3 FAULTS=1
    breaks 'P2 now' 'leavers agree, send no ready' views BROKEN=16 CHANGES=3 FAULTS=0 SHRINK
    breaks P1 'own burned number not counted' views BROKEN=18 CHANGES=3 FAULTS=0
    breaks 'P2 ever' 'named set, no majority' views BROKEN=19 CHANGES=2 FAULTS=0
    breaks P5 'fence: looks before the word' views BROKEN=20 CHANGES=2 CALLS=1 FAULTS=0 FENCE
    breaks P5 'no fence' views BROKEN=21 CHANGES=2 CALLS=1 FAULTS=0 FENCE
    breaks P5 'writer does not look' views BROKEN=23 CHANGES=2 CALLS=1 FAULTS=0 FENCE
}

views_all() {
    breaks 'P2 ever' 'commit of a left attempt' views BROKEN=9 CHANGES=3 CALLS=3 FAULTS=0 K=3
    breaks 'P2 ever' 'newcomer with a doubt leads' views BROKEN=17 NEW=1 CHANGES=2 FAULTS=1
    holds 'ends' views N=3 CHANGES=3 CALLS=2 FAULTS=2
    holds 'ends and losses' views N=3 CHANGES=3 CALLS=2 FAULTS=2 LOSS=1
    holds 'any coordinator' views N=3 CHANGES=3 CALLS=2 FAULTS=1 ANY=1
    holds 'some may leave' views N=3 CHANGES=3 CALLS=2 FAULTS=1 SHRINK
    holds 'nodes of 1 and 2' views N=3 CHANGES=3 CALLS=2 FAULTS=2 PERNODE=1
    holds '4 ranks, any, ends and losses' views N=4 CHANGES=1 CALLS=1 FAULTS=2 LOSS=1 ANY=1
    holds '4 ranks, two nodes' views N=4 CHANGES=2 CALLS=1 FAULTS=2 PERNODE=2
    holds '4 ranks and a newcomer' views N=4 NEW=1 CHANGES=2 CALLS=1 FAULTS=1
    holds '3 calls each' views N=3 CHANGES=3 CALLS=3 FAULTS=0
    breaks P5 'fence: the last installed view alone' views BROKEN=22 CHANGES=3 CALLS=3 FAULTS=0 FENCE
    holds 'fence, two calls' views N=3 CHANGES=2 CALLS=2 FAULTS=0 FENCE
    holds 'fence, 4 ranks on two nodes' views N=4 CHANGES=1 CALLS=1 FAULTS=1 PERNODE=2 FENCE WRITES=2
}

command -v spin >/dev/null || { echo "skipped: no spin here (Debian's package spin)" && exit 77; }
spin -V
echo "complete searches: -DCOLLAPSE -DMEMLIM=$memory, pan -m1000000 -w20; bounds not shown: the models' own"
printf '  %-6s %-44s %-52s %9s  %-16s %6s\n' model run bounds states result s
rows
views
views_broken
if [ $all -ne 0 ]; then
    rows_all
    views_all
fi
wait
echo "$count runs, $((SECONDS - started)) s"
[ ! -e "$work/failed" ]

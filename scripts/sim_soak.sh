#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs many seeds of `epx sim`, in chunks, over all modes and faults, and records every chunk in a text file. A run that
# was interrupted goes on where the file ends. One process at a time, niced.
#
#   scripts/sim_soak.sh [--seeds N] [--chunk N] [--from SEED] [--record FILE] [--epx PROGRAM] [--report]
#
#   --seeds N      how many in this run, over all combinations together (100000)
#   --chunk N      seeds of one line of the record (1000)
#   --from SEED    the first seed of every combination, when the record is empty (10000000)
#   --record FILE  where results go (build/sim_soak.txt)
#   --epx PROGRAM  the program (build/epx)
#   --report       prints what the record says, and runs nothing
#
# A line of the record:   MODE FAULTS FROM COUNT FAILED STEPS STALLS DEATHS SECONDS PROGRAM
#                         (PROGRAM: the first digits of its SHA-256)
# A failing seed:         FAILED MODE FAULTS SEED MESSAGE...
# Exit status: 0, or 1 when any seed in the record failed, or 2 for a wrong call.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
seeds=100000 chunk=1000 first=10000000 record=$root/build/sim_soak.txt epx=$root/build/epx report=0
combinations="mixed:all ht:all ll:all mixed:delay mixed:death ht:delay ht:death ll:delay ll:death mixed:none"
combinations="$combinations mixed:late ll:late mixed:join ll:join mixed:recover ll:recover mixed:stop"
combinations="$combinations ht-in-reach:all ht-in-reach:stop ht-in-reach:late ht-in-reach:recover"

usage() { sed -n '/^#   scripts/,/^# Exit/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
    --seeds | --chunk | --from | --record | --epx) [ $# -ge 2 ] || usage ;;
    esac
    case $1 in
    --seeds) seeds=$2; shift ;;
    --chunk) chunk=$2; shift ;;
    --from) first=$2; shift ;;
    --record) record=$2; shift ;;
    --epx) epx=$2; shift ;;
    --report) report=1 ;;
    *) usage ;;
    esac
    shift
done
case $seeds$chunk$first in *[!0-9]*) usage ;; esac
[ "$chunk" -gt 0 ] || usage
mkdir -p "$(dirname "$record")"
touch "$record"

# Where a combination goes on: behind its last recorded chunk.
next_seed() { # mode faults
    awk -v m="$1" -v f="$2" -v first="$first" '$1 == m && $2 == f && $3 + $4 > next_ { next_ = $3 + $4 }
        END { printf "%.0f", next_ ? next_ : first }' "$record"
}

field() { # name: of the JSON line on stdin, the only one
    sed -n "s/.*\"$1\": \"\{0,1\}\([0-9.]*\).*/\1/p"
}

# MODE of a record: -in-reach behind it is an option of its own.
options() { # mode faults
    echo "--mode ${1%-in-reach} --faults $2"
    [ "$1" = "${1%-in-reach}" ] || echo "--in-reach"
}

# A chunk without a result: which of its seeds crashes? Where none does the program was stopped: nothing is recorded,
# and the next run begins with this chunk.
run_singly() { # mode faults from
    local seed rc crashed=0
    for seed in $(seq "$3" $(($3 + chunk - 1))); do
        rc=0
        # shellcheck disable=SC2046 # options without spaces
        nice "$epx" sim --seeds 1 --from "$seed" $(options "$1" "$2") >/dev/null 2>&1 || rc=$?
        [ $rc -gt 1 ] || continue
        crashed=$((crashed + 1))
        echo "FAILED $1 $2 $seed the program ended with status $rc" | tee -a "$record" >&2
    done
    if [ $crashed -eq 0 ]; then
        echo "sim_soak: $epx sim --mode $1 --faults $2 --from $3 gave no result" >&2
        exit 1
    fi
    echo "$1 $2 $3 $chunk $crashed 0 0 0 0 $(sha256sum "$epx" | cut -c1-12)" >>"$record"
}

run_chunk() { # mode faults
    local from json errors version
    from=$(next_seed "$1" "$2")
    errors=$(mktemp)
    version=$(sha256sum "$epx" | cut -c1-12)
    # shellcheck disable=SC2046 # options without spaces
    json=$(nice "$epx" sim --seeds "$chunk" --from "$from" $(options "$1" "$2") --keep-going --json 2>"$errors") || true
    if [ -z "$(echo "$json" | field seeds)" ]; then
        rm -f "$errors"
        run_singly "$1" "$2" "$from"
        return
    fi
    sed -n "s/^epx sim: seed \([0-9]*\) failed: \(.*\)/FAILED $1 $2 \1 \2/p" "$errors" | cut -c1-400 |
        tee -a "$record" >&2
    rm -f "$errors"
    echo "$1 $2 $from $(echo "$json" | field seeds) $(echo "$json" | field failed) $(echo "$json" | field steps)" \
        "$(echo "$json" | field stalls) $(echo "$json" | field deaths) $(echo "$json" | field seconds)" \
        "$version" >>"$record"
}

print_report() {
    awk '$1 == "FAILED" { next }
        { n[$1 " " $2] += $4; bad[$1 " " $2] += $5; all += $4; failed += $5 }
        { steps += $6; stalls += $7; deaths += $8; s += $9 }
        END { for (k in n) printf "%-19s %9d seeds, %d failed\n", k, n[k], bad[k] | "sort"
              close("sort")
              printf "%d seeds, %d failed; %.0f steps, ", all, failed, steps
              printf "%d stalls, %d deaths, %.0f s\n", stalls, deaths, s }' "$record"
    ! grep "^FAILED" "$record"
}

if [ $report -eq 0 ]; then
    done_=0
    while [ $done_ -lt "$seeds" ]; do
        for c in $combinations; do
            [ $done_ -lt "$seeds" ] || break
            run_chunk "${c%:*}" "${c#*:}"
            done_=$((done_ + chunk))
        done
    done
fi
print_report

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Includes under src/ point downwards only (docs/architecture.md), and none leaves it; those of sim/ and standin/ point
# into it. Everything may include epx/epx.h and kernel/params.h, stages.h, marks.h, times.h and command.h, the words
# that host and kernels share. Kernels include kernel/ alone; a device's kernels.* and the files of a GPU's compiler
# (*.cu, *.hip) are where a device's compiler meets them, so they may include them.
set -euo pipefail
cd "$(dirname "$0")/.."

allowed() { # layer of the including file -> the layers it may include
    case $1 in
    api) echo "api modes group proxy net kernel device boot util" ;;
    modes) echo "modes group proxy net kernel device boot util" ;;
    group) echo "group proxy net kernel device boot util" ;;
    proxy) echo "proxy kernel net device util" ;;
    net) echo "net boot util" ;;
    kernel) echo "kernel" ;;
    device) echo "device util" ;;
    boot) echo "boot util" ;;
    util) echo "util" ;;
    nccl_ep) echo "nccl_ep boot util" ;;                 # a library of its own, over epx.h
    sim) echo "sim proxy net kernel device boot util" ;; # takes the place of threads, device and network
    standin) echo "standin nccl_ep boot util" ;;
    *) echo "" ;;
    esac
}

bad=0
complain() {
    echo "$1: includes \"$2\": $3"
    bad=$((bad + 1))
}

check() { # file, included path
    local file=$1 path=$2 from=${1#src/} to=${2%%/*}
    from=${from%%/*}
    case $path in
    epx/epx.h | kernel/params.h | kernel/command.h | kernel/stages.h | kernel/marks.h | kernel/times.h) return ;;
    ../* | */../*) complain "$file" "$path" "write paths from src/ downwards, without .."; return ;;
    */*) ;;
    *)
        [ -f "$(dirname "$file")/$path" ] || complain "$file" "$path" "not in this folder; write paths from src/"
        return
        ;;
    esac
    if [[ $file == src/device/*/kernels.* || $file == src/device/*.cu || $file == src/device/*.hip ]] &&
        [ "$to" = kernel ]; then
        return
    fi
    if [ -z "$(allowed "$from")" ]; then
        complain "$file" "$path" "$from is no layer that docs/architecture.md knows"
    elif [[ " $(allowed "$from") " != *" $to "* ]]; then
        complain "$file" "$path" "$from may include only: $(allowed "$from")"
    fi
}

count=0
while IFS=: read -r file line; do
    check "$file" "$(sed -E 's/^[^"]*"([^"]*)".*$/\1/' <<<"$line")"
    count=$((count + 1))
done < <(grep -rE --include='*.[ch]' --include='*.cu' --include='*.cuh' --include='*.hip' \
    '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' src sim standin || true)

[ "$bad" -eq 0 ] && echo "$count includes point downwards"
[ "$bad" -eq 0 ]

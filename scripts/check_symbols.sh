#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_symbols.sh FOLDER: each library there exports exactly the functions that its header declares for export:
# libepx.so those of epx.h, under a version; libnccl_ep.so those of nccl_ep.h; the stand-ins those of nccl.h and
# cuda_runtime.h. Kernels of libepx_cuda.so, where it is there, have the names that profiles of DeepEP are searched for.
set -euo pipefail
build=$(realpath "$1")
cd "$(dirname "$0")/.."

bad=0 total=0
report() { # sentence, names
    if [ -n "$2" ]; then
        echo "$1:" $2
        bad=1
    fi
}

check() { # library, header, pattern of a name, pattern of its version ("" = none)
    local library=$1 header=$2 name=$3 version=$4 exported names declared
    exported=$(nm -D --defined-only --with-symbol-versions "$build/$library" | awk '$2 != "A" {print $NF}' | sort)
    names=$(sed 's/@.*//' <<<"$exported" | sort -u)
    # Only what is in the header itself: it includes others.
    declared=$(gcc -E -Iinclude -Iinclude/nccl_ep -Istandin/include/nccl -Istandin/include/cuda -x c "$header" |
        awk -v file="$header" '/^# [0-9]/ { mine = index($3, "\"" file "\"") == 1; next } mine' | tr '\n' ' ' |
        grep -oE 'visibility\("default"\)[^;{]*' | grep -oE "$name *\(" | tr -d ' (' | sort -u)
    report "$library: exported with another version than $version" \
        "$(grep -vE "^[A-Za-z0-9_]+$version\$" <<<"$exported" | sed '/^$/d' || true)"
    report "$library: exported, not declared in $header" \
        "$(comm -23 <(echo "$names") <(echo "$declared") | sed '/^$/d')"
    report "$library: declared in $header, not exported" \
        "$(comm -13 <(echo "$names") <(echo "$declared") | sed '/^$/d')"
    total=$((total + $(wc -l <<<"$names")))
}

check libepx.so include/epx/epx.h 'epx_[a-z0-9_]+' '@@EPX_[0-9.]+'
check libnccl_ep.so include/nccl_ep/nccl_ep.h 'ncclEp[A-Za-z]+' ''
check libepx_nccl.so standin/include/nccl/nccl.h '(nccl|epxNccl)[A-Za-z]+' ''
check libepx_cudart.so standin/include/cuda/cuda_runtime.h '(cuda|epxCudart)[A-Za-z]+' ''
if [ -f "$build/libepx_cuda.so" ]; then
    kernels=$(nm -C "$build/libepx_cuda.so" | grep -oE ' epx_(ll|ll_one_node|ll_marks|ht)::[a-z]+\(' | tr -d ' (' |
        sort -u)
    wanted=$(printf '%s\n' epx_ht::combine epx_ht::dispatch epx_ht::notify epx_ll::combine epx_ll::dispatch \
        epx_ll_one_node::combine epx_ll_one_node::dispatch epx_ll_marks::combine epx_ll_marks::dispatch | sort)
    report "libepx_cuda.so: kernels that are not there" "$(comm -13 <(echo "$kernels") <(echo "$wanted"))"
fi
[ "$bad" -eq 0 ] && echo "$total symbols in 4 libraries, all declared, those of libepx.so versioned"
[ "$bad" -eq 0 ]

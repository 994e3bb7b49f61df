#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What moves rows on a GPU keeps its values in registers: the compiler's report must show no spill stores for it, but for
# one address or two (16 bytes) that a function may put aside before its loop.
# ctest: timeout=600 labels=cuda,slow,noasan,notsan
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
if [ ! -x "$nvcc" ]; then
    echo "skipped: no nvcc"
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
hot='copy_row|copy_row_many|sum_fastILi[12]E|fp8_rowILi[12]E|logfmt_encode_row|route_tokens'
for kernel in ll_dispatch ll_combine ht_dispatch ht_combine ht_notify; do
    "$nvcc" -std=c++17 -O3 -fmad=false -Xptxas -v -I"$root/include" -I"$root/src" -gencode arch=compute_90,code=sm_90 \
        -cubin -o "$work/$kernel.cubin" "$root/src/device/cuda/$kernel.cu" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    grep -A1 'Function properties' "$work/log" | grep -v '^--' | paste - - >>"$work/functions"
done
grep -E "$hot" "$work/functions" >"$work/hot" || { echo "FAILED: the report names none of $hot"; exit 1; }
if grep -vE ' (0|4|8|12|16) bytes spill stores' "$work/hot"; then
    echo "FAILED: these functions spill registers"
    exit 1
fi
echo "$(wc -l <"$work/hot") hot functions, no spills"

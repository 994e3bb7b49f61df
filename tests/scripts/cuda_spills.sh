#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What moves rows on a GPU keeps its values in registers: the compiler's report, kept when the module was built, must
# show no spill stores for it, but for one address or two (16 bytes) that a function may put aside before its loop.
# copy_row_many may spill nothing: it would spill vectors of a row between its loads, in the loop over destinations.
# ctest: labels=cuda,slow,noasan,notsan
set -eu
. "$(dirname "$0")/../lib/script.sh"
reports=$build/ptxas
[ -d "$reports" ] || skip "this build has no CUDA module"
sums='sum_fastILi[123]E|sum_ringILi[12]E|sum_groupedILi[123]E|sum_logfmt'
hot="copy_row_many|$sums|fp8_rowILi[12]E|fp8_row_manyILi[12]E|logfmt_encode_row|route_tokens"
for kernel in ll_dispatch ll_combine ll_combine_logfmt ht_dispatch ht_combine ht_notify; do
    grep -qs 'Function properties' "$reports/$kernel.cu.txt" || die "there is no report of $kernel: it did not compile"
    grep -A1 'Function properties' "$reports/$kernel.cu.txt" | grep -v '^--' | paste - - >>"$work/functions"
done
grep -E "$hot" "$work/functions" >"$work/hot" || die "the report names none of $hot"
if grep copy_row_many "$work/hot" | grep -v ' 0 bytes spill stores' ||
    grep -vE ' (0|4|8|12|16) bytes spill stores' "$work/hot"; then
    die "these functions spill registers"
fi
echo "$(wc -l <"$work/hot") hot functions, no spills"

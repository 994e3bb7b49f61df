#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# NVTX: a profiler that is injected sees a range for each call, and its end. ctest: labels=slow
set -uo pipefail

. "$(dirname "$0")/../lib/bench_cli.sh"
nvtx=$(sed -n 's/^EPX_NVTX_INCLUDE:PATH=//p' "$build/CMakeCache.txt" 2>/dev/null)
[ -e "$nvtx/nvtx3/nvToolsExt.h" ] || skip "this build has no NVTX"

cc -shared -fPIC -I"$nvtx" "$root/tests/unit/nvtx_injected.c" -o "$work/injected.so" || die "the injected library"
NVTX_INJECTION64_PATH=$work/injected.so expect 0 "under a profiler" ll --ranks 2 --tokens 16 --hidden 512 \
    --experts 16 --topk 4 --iters 1
grep -q "^nvtx epx_dispatch$" "$work/err" && echo "ok: ranges" || fail "no range epx_dispatch"
[ "$(grep -c '^nvtx ' "$work/err")" = "$(grep -c '^nvtx-pop' "$work/err")" ] && echo "ok: and their ends" ||
    fail "ranges that do not end"
finish

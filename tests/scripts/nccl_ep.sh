#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# NCCL EP's interface on 8 ranks of the CPU device, on the stand-ins for NCCL and CUDA: all layouts against the oracle,
# what is refused, masks; on one node and on two. ctest: cost=14 labels=processes
set -u
. "$(dirname "$0")/../lib/script.sh"
ranks=$build/tests/nccl_ep_ranks
leak_checked=${ASAN_OPTIONS:-} # at the end of one rank, not of eight: it takes seconds on some machines
no_leak_checks
export EPX_ALLOC_BYTES=64M # ThreadSanitizer leaves little room for addresses
. "$(dirname "$0")/../lib/slow.sh"
EPX_TEST_SLOW=$(slow 1)
export EPX_TEST_SLOW
many=8
case ${EPX_SANITIZE:-none} in none | OFF) ;; *) many=4 ;; esac # more ranks have nothing more for them to see

check() { # name, ranks, arguments...
    local name=$1 n=$2
    shift 2
    if "$epx" run -n "$n" --timeout 800 -- "$ranks" "$@"; then
        echo "ok $name"
    else
        fail "$name"
    fi
}

check "one node" $many standin runtime layouts misuse masks
EPX_STANDIN_CAPABILITY=9.0 check "without NVFP4" 2 nvfp4
check "four ranks" 4 rules drop recipes eager memory nvfp4 elastic pinned counts mxfp8
EPX_RANKS_PER_NODE=2 check "two nodes of two" 4 rules drop recipes eager memory nvfp4 elastic pinned counts mxfp8 masks
EPX_RANKS_PER_NODE=$((many / 2)) check "two nodes" $many layouts runtime
said=$work/said
ASAN_OPTIONS=$leak_checked NCCL_EP_DEBUG=1 NCCL_EP_ENV_VERBOSE=1 NVCC=none NCCL_EP_COMM_SMS=many EPX_LOG=info \
    check "one rank" 1 standin runtime layouts misuse 2>"$said"
# NCCL_EP_DEBUG: a banner, and of each call why its rows are moved in place or not; _ENV_VERBOSE: all variables.
for words in "NCCL EP version" "rank 0: ncclEpDispatch: outputs.tokens: zero-copy: memory of ncclEpxMemAlloc" \
    "ncclEpDispatch: outputs.tokens (in a window): no zero-copy" "rank 0: ncclEpCombine: inputs.tokens: no zero-copy" \
    "NVCC=none (no effect: nothing is compiled at run time)" "config.num_qp_per_rank is 4: no effect here" \
    "config.version is 9, this library knows 3" "NCCL_EP_COMM_SMS is \"many\", expected 1 to"; do
    grep -qF "$words" "$said" || fail "one rank does not say: $words"
done
"$build/tests/nccl_ep_comm" "$build/libepx_nccl.so" || fail "nccl_ep_comm"
"$build/tests/nccl_ep_sms" || fail "nccl_ep_sms"
finish

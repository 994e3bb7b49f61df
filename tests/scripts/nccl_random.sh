#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Random programs for nccl_ep.h against a plain model of its rules, and calls with nonsense in them. More by hand:
# build/tests/nccl_ep_random SEED COUNT 0, build/tests/nccl_ep_nonsense SEED COUNT. EPX_TEST_SEED is added to the seeds.
# ctest: cost=8 labels=processes
set -u
. "$(dirname "$0")/../lib/script.sh"
no_leak_checks
export EPX_ALLOC_BYTES=16M
seed=${EPX_TEST_SEED:-0}

check() { # name, command...
    local name=$1
    shift
    if timeout 300 "$@"; then
        echo "ok $name"
    else
        fail "$name"
    fi
}

check "threads, one to eight ranks" "$build/tests/nccl_ep_random" $((seed + 1)) 24 0
check "processes" "$epx" run -n 3 --timeout 200 -- "$build/tests/nccl_ep_random" $((seed + 100)) 12
EPX_RANKS_PER_NODE=2 check "two nodes of two" "$epx" run -n 4 --timeout 200 -- \
    "$build/tests/nccl_ep_random" $((seed + 200)) 12
EPX_RANKS_PER_NODE=2 check "two nodes, threads" "$build/tests/nccl_ep_random" $((seed + 300)) 6 4
check "nonsense" "$build/tests/nccl_ep_nonsense" $((seed + 1)) 8 300
finish

#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Random programs for epx.h against a plain model of its rules: every byte of every tensor, and every status. Thousands
# by hand: build/tests/epx_random FIRST_SEED PROGRAMS [RANKS [NET]]; in a build with EPX_SANITIZE=address under
# ASAN_OPTIONS=detect_leaks=0, for libfabric leaks. A failure prints its program; EPX_TEST_PRINT=1 prints all of them.
# EPX_TEST_SEED: the first seed. ctest: cost=3 labels=processes
set -u
. "$(dirname "$0")/../lib/script.sh"
no_leak_checks

seed=${EPX_TEST_SEED:-1}
run() { # programs at scale 1, network
    local count
    count=$(awk -v n="$1" -v s="${EPX_TEST_SCALE:-1}" 'BEGIN { n = int(n * s); print n < 2 ? 2 : n }')
    if timeout 600 "$build/tests/epx_random" "$seed" "$count" 0 "$2"; then
        echo "ok $count programs, nodes over $2"
    else
        fail "nodes over $2"
    fi
}

# Not over ofi:shm: ranks are threads here, which it cannot connect (src/net/ofi/process.c).
run 65 ofi:tcp
finish

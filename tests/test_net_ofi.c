/* SPDX-License-Identifier: Apache-2.0 */
/* The network suite over libfabric, and what only a network of sockets can be told. ctest: timeout=120 */
#include "tests/net_suite_cmocka.h"

static const struct net_suite tcp = {.label = "ofi_tcp", .ops = &net_ofi_ops, .provider = "tcp"};
/* The layer that older versions of libfabric put above tcp; verbs is used through it too. */
static const struct net_suite rxm = {
    .label = "ofi_rxm",
    .ops = &net_ofi_ops,
    .provider = "tcp;ofi_rxm",
    .gaps = {
        {"death_is_told", "ofi_rxm of libfabric 1.17 reads a null pointer when a peer dies in the middle of a write"},
        {"survivors_go_on", "the same"}}};
static const struct net_suite shm = {
    .label = "ofi_shm",
    .ops = &net_ofi_ops,
    .provider = "shm",
    .gaps = {{"survivors_go_on",
              "shm answers in order over all peers: what a dead one leaves unanswered holds up the rest"}}};

int main(void)
{
    static struct CMUnitTest tests[NET_SUITE_TESTS];
    int count = 0;

    count = net_suite_add(&tcp, tests, count);
    count = net_suite_add(&rxm, tests, count);
    count = net_suite_add(&shm, tests, count);
    return _cmocka_run_group_tests("net_ofi", tests, (size_t)count, NULL, NULL);
}

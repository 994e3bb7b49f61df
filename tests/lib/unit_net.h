/* SPDX-License-Identifier: Apache-2.0 */
/* A test case that needs a network between nodes. */
#ifndef EPX_TESTS_LIB_UNIT_NET_H
#define EPX_TESTS_LIB_UNIT_NET_H

#include <string.h>
#include <unistd.h>

#include "net/net.h"
#include "tests/lib/child.h"
#include "tests/lib/unit.h"

/* Skips the case where libfabric, or this provider of its, cannot be used; "" means any provider. */
static inline void unit_need_ofi(const char *provider)
{
    char text[256];

    if (net_ofi_ops.probe(provider, text, sizeof(text)) == EPX_OK)
        return;
    print_message("no network to test with: %s\n", text);
    skip();
}

/* The same for a test that forks later: libraries that were opened before a fork need not work behind it, so that a
 * child asks. `net` is NULL, for one node, or "ofi:PROVIDER". */
static inline void unit_need_net(const char *net)
{
    char text[256];
    const pid_t pid = net ? child_fork() : -1;

    if (pid == 0)
        _exit(net_ofi_ops.probe(net + strlen("ofi:"), text, sizeof(text)) != EPX_OK);
    if (!net || child_succeeded(pid))
        return;
    print_message("not over %s: it cannot be used here\n", net);
    skip();
}

#endif

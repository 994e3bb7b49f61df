/* SPDX-License-Identifier: Apache-2.0 */
/* A test case that needs a network between nodes. */
#ifndef EPX_TESTS_LIB_UNIT_NET_H
#define EPX_TESTS_LIB_UNIT_NET_H

#include "net/net.h"
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

#endif

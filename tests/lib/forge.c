/* SPDX-License-Identifier: Apache-2.0 */
#include "forge.h"

#include <unistd.h>

#include "net/ofi/ofi.h"

#if EPX_HAVE_OFI

enum { MOST = 32 };

static struct ofi_net *open_net(const struct sockaddr_in *at, int count, fi_addr_t *to)
{
    const struct net_options options = {.nranks = 1, .timeout_ms = 60000, .provider = "tcp"};
    struct ofi_net *n;
    struct net *net;

    if (net_ofi_ops.open(&options, &net) != EPX_OK)
        return NULL;
    n = (struct ofi_net *)net;
    for (int i = 0; i < count; i++)
        if (fi_av_insert(n->av, &at[i], 1, &to[i], 0, NULL) != 1)
            return NULL;
    return n;
}

void forge_signals(const struct sockaddr_in *at, int count, uint32_t ranks)
{
    fi_addr_t to[MOST];
    struct ofi_net *n = count > 0 && count <= MOST ? open_net(at, count, to) : NULL;
    struct fi_cq_data_entry entry;

    if (!n)
        return;
    for (uint32_t i = 0;; i++) {
        struct fi_msg_rma message = {.addr = to[i % (uint32_t)count],
                                     .data = 0x80000000u | i % ranks | (i / ranks % 4096) << 12,
                                     .context = &n->ops[i % 64]};
        (void)fi_writemsg(n->ep, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION);
        if (fi_cq_read(n->cq, &entry, 1) == -FI_EAVAIL) {
            struct fi_cq_err_entry error = {0};
            fi_cq_readerr(n->cq, &error, 0);
        }
        if (i % 64 == 0)
            usleep(500);
    }
}

#else

void forge_signals(const struct sockaddr_in *at, int count, uint32_t ranks)
{
    (void)at;
    (void)count;
    (void)ranks;
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "forge.h"

#include <unistd.h>

#include "net/ofi/ofi.h"

void forge_add(struct forge_targets *targets, int port)
{
    const int at = atomic_fetch_add(&targets->count, 1);

    if (at < FORGE_PORTS)
        atomic_store(&targets->ports[at], port);
}

#if EPX_HAVE_OFI

static struct ofi_net *open_net(void)
{
    const struct net_options options = {.nranks = 1, .timeout_ms = 60000, .provider = "tcp"};
    struct net *net;

    return net_ofi_ops.open(&options, &net) == EPX_OK ? (struct ofi_net *)net : NULL;
}

/* Those that are told by now; *known grows. */
static int learn(struct ofi_net *n, const struct forge_targets *targets, fi_addr_t *to, int *known)
{
    for (; *known < FORGE_PORTS && atomic_load(&targets->ports[*known]); ++*known) {
        const struct sockaddr_in at = {.sin_family = AF_INET,
                                       .sin_addr = targets->host,
                                       .sin_port = htons((uint16_t)atomic_load(&targets->ports[*known]))};

        if (fi_av_insert(n->av, &at, 1, &to[*known], 0, NULL) != 1)
            return -1;
    }
    return 0;
}

/* Each port gets every signal of every rank. */
static void write_nothing(struct ofi_net *n, const fi_addr_t *to, uint32_t count, uint32_t ranks, uint32_t number)
{
    const uint32_t signal = number / count;
    struct fi_msg_rma message = {.addr = to[number % count],
                                 .data = 0x80000000u | signal % ranks | (signal / ranks % 4096) << 12,
                                 .context = &n->ops[number % 64]};
    struct fi_cq_data_entry entry;

    (void)fi_writemsg(n->ep, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION);
    if (fi_cq_read(n->cq, &entry, 1) == -FI_EAVAIL) {
        struct fi_cq_err_entry error = {0};
        fi_cq_readerr(n->cq, &error, 0);
    }
}

void forge_signals(const struct forge_targets *targets, int newest, uint32_t ranks)
{
    fi_addr_t to[FORGE_PORTS];
    struct ofi_net *n = open_net();
    int known = 0;

    if (!n)
        return;
    for (uint32_t i = 0; !learn(n, targets, to, &known); i++) {
        const int first = known > newest ? known - newest : 0;

        if (known)
            write_nothing(n, to + first, (uint32_t)(known - first), ranks, i);
        if (i % 64 == 0 || !known)
            usleep(500);
    }
}

#else

void forge_signals(const struct forge_targets *targets, int newest, uint32_t ranks)
{
    (void)targets;
    (void)newest;
    (void)ranks;
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Finds cards, selects those that may be used, and selects a GID of each. */
#ifndef EPX_NET_VERBS_CARD_H
#define EPX_NET_VERBS_CARD_H

#include "net/net.h"
#include "net/verbs/lib.h"

#if EPX_HAVE_VERBS

enum verbs_transport_kind { VERBS_RC = 1, VERBS_SRD = 2 };

struct verbs_card { /* one active port of one device */
    char device[64];
    enum verbs_transport_kind transport;
    uint8_t port, link_layer, gid_index;
    uint8_t mtu; /* enum ibv_mtu */
    uint16_t lid;
    uint32_t max_message;
    union ibv_gid gid;
};

#define VERBS_MAX_CARDS 64

/* How good a GID is for RoCE, 0 = unusable: RoCEv2 over IPv4, RoCEv2 over a global IPv6 address, RoCEv2 over a
 * link-local one, InfiniBand or RoCEv1. */
int verbs_gid_rank(const uint8_t gid[16], uint32_t gid_type);

/* All usable cards in the order of the devices. `filter` "" = EPX_IB_HCA. EPX_ERR_UNSUPPORTED when there is none: the
 * message says what was found instead. */
epx_status verbs_cards_find(const struct verbs_lib *lib, const char *filter, struct verbs_card *cards, int *count);
/* Which of them an endpoint uses: verbs.c says how. sysfs: "/sys", or a copy of it. */
int verbs_card_choose(const char *sysfs, const struct net_options *options, const struct verbs_card *cards, int count);
/* One line, as `epx doctor` shows it. */
void verbs_card_describe(const struct verbs_card *card, char *text, size_t bytes);
/* Opens the device of a card. */
epx_status verbs_card_open(const struct verbs_lib *lib, const struct verbs_card *card, struct ibv_context **context);

#endif
#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "net/verbs/card.h"

#if EPX_HAVE_VERBS

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "net/card_filter.h"
#include "util/env.h"
#include "util/status.h"

enum { VENDOR_AMAZON = 0x1d0f };

int verbs_gid_rank(const uint8_t gid[16], uint32_t gid_type)
{
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff}, zero[16];

    if (!memcmp(gid, zero, 16) || !memcmp(gid + 8, zero, 8))
        return 0;
    if (gid_type != IBV_GID_TYPE_ROCE_V2)
        return 1;
    if (!memcmp(gid, mapped, 12))
        return 4;
    return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80 ? 2 : 3;
}

/* The best GID of a port, or the one EPX_IB_GID_INDEX asks for. Returns 0 when there is one. */
static int choose_gid(const struct verbs_lib *lib, struct ibv_context *context, int table, struct verbs_card *card)
{
    int64_t asked = env_int("EPX_IB_GID_INDEX", -1, -1, 255);
    int best = 0;

    for (int i = 0; i < table; i++) {
        struct ibv_gid_entry entry;
        int rank;
        if ((asked >= 0 && i != asked) || lib->query_gid_ex(context, card->port, (uint32_t)i, &entry, 0, sizeof(entry)))
            continue;
        rank = verbs_gid_rank(entry.gid.raw, entry.gid_type);
        if (rank > best) {
            best = rank;
            card->gid = entry.gid;
            card->gid_index = (uint8_t)i;
        }
    }
    return best ? 0 : -1;
}

static int is_srd(const struct verbs_lib *lib, struct ibv_context *context)
{
#if EPX_HAVE_EFADV
    struct efadv_device_attr attr;

    return lib->efa_query_device && !lib->efa_query_device(context, &attr, sizeof(attr));
#else
    (void)lib;
    (void)context;
    return 0;
#endif
}

/* Fills the card; returns NULL, or why this port cannot be used. */
static const char *inspect_port(const struct verbs_lib *lib, struct ibv_context *context, int port,
                                const struct ibv_device_attr *device, struct verbs_card *card)
{
    struct ibv_port_attr attr;

    memset(&attr, 0, sizeof(attr)); /* the function fills only the fields from before extensions */
    if (lib->query_port(context, (uint8_t)port, (struct _compat_ibv_port_attr *)&attr))
        return "cannot be queried";
    if (attr.state != IBV_PORT_ACTIVE)
        return "is not active";
    card->port = (uint8_t)port;
    card->link_layer = attr.link_layer;
    card->lid = attr.lid;
    card->mtu = (uint8_t)attr.active_mtu;
    card->max_message = attr.max_msg_sz;
    card->transport = is_srd(lib, context) ? VERBS_SRD : VERBS_RC;
    if (card->transport == VERBS_RC && device->vendor_id == VENDOR_AMAZON)
        return "is an EFA, for which libefa.so.1 and its header are needed";
    return choose_gid(lib, context, attr.gid_tbl_len, card) ? "has no GID that can be used" : NULL;
}

/* Adds the usable ports of one device. `why` gets the reason why the last unusable one is not. */
static void inspect_device(const struct verbs_lib *lib, struct ibv_device *device, const char *filter,
                           struct verbs_card *cards, int *count, char *why, size_t bytes)
{
    const char *name = lib->get_device_name(device), *reason;
    struct ibv_device_attr attr;
    struct ibv_context *context = lib->open_device(device);

    if (!context || lib->query_device(context, &attr)) {
        snprintf(why, bytes, "%s cannot be opened: %s", name, strerror(errno));
        if (context)
            lib->close_device(context);
        return;
    }
    for (int port = 1; port <= attr.phys_port_cnt && *count < VERBS_MAX_CARDS; port++) {
        struct verbs_card *card = &cards[*count];
        if (!card_filter_match(filter, name, port)) {
            snprintf(why, bytes, "%s:%d is filtered out by \"%s\"", name, port, filter);
            continue;
        }
        memset(card, 0, sizeof(*card));
        snprintf(card->device, sizeof(card->device), "%s", name);
        reason = inspect_port(lib, context, port, &attr, card);
        if (!reason)
            ++*count;
        else
            snprintf(why, bytes, "%s:%d %s", name, port, reason);
    }
    lib->close_device(context);
}

epx_status verbs_cards_find(const struct verbs_lib *lib, const char *filter, struct verbs_card *cards, int *count)
{
    const char *asked = filter && filter[0] ? filter : env_string("EPX_IB_HCA");
    struct ibv_device **list;
    char why[160] = "the kernel has none";
    int devices = 0;

    *count = 0;
    list = lib->get_device_list(&devices);
    if (!list)
        return fail_errno(EPX_ERR_UNSUPPORTED, "verbs: the devices cannot be listed");
    for (int i = 0; i < devices; i++)
        inspect_device(lib, list[i], asked ? asked : "", cards, count, why, sizeof(why));
    lib->free_device_list(list);
    return *count ? EPX_OK : fail(EPX_ERR_UNSUPPORTED, "verbs: no card can be used: %s", why);
}

void verbs_card_describe(const struct verbs_card *card, char *text, size_t bytes)
{
    const char *link = card->link_layer == IBV_LINK_LAYER_ETHERNET     ? "RoCE"
                       : card->link_layer == IBV_LINK_LAYER_INFINIBAND ? "InfiniBand"
                                                                       : "link unspecified";
    char gid[INET6_ADDRSTRLEN] = "?";

    inet_ntop(AF_INET6, card->gid.raw, gid, sizeof(gid));
    snprintf(text, bytes, "%s:%d (%s, %s, GID %d %s, MTU %d)", card->device, card->port,
             card->transport == VERBS_SRD ? "SRD" : "RC", link, card->gid_index, gid, 128 << card->mtu);
}

epx_status verbs_card_open(const struct verbs_lib *lib, const struct verbs_card *card, struct ibv_context **context)
{
    int devices = 0;
    struct ibv_device **list = lib->get_device_list(&devices);

    *context = NULL;
    for (int i = 0; list && i < devices && !*context; i++)
        if (!strcmp(lib->get_device_name(list[i]), card->device))
            *context = lib->open_device(list[i]);
    if (list)
        lib->free_device_list(list);
    return *context ? EPX_OK : fail_errno(EPX_ERR_SYSTEM, "verbs: %s cannot be opened", card->device);
}

#endif

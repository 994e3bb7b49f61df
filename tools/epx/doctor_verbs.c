/* SPDX-License-Identifier: Apache-2.0 */
/* Cards that libibverbs knows: ports, links, GIDs by type, and which of them EPX would use. */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "doctor.h"
#include "net/card_filter.h"
#include "net/verbs/card.h"
#include "util/env.h"

#if EPX_HAVE_VERBS

enum { BROADCOM = 0x14e4, PENSANDO = 0x1dd8, GIDS_SHOWN = 32, NAME_ROOM = 64, MEMLOCK_LEAST_GIB = 1 };

static const char *gid_type(uint32_t type)
{
    switch (type) {
    case IBV_GID_TYPE_ROCE_V2:
        return "RoCE v2";
    case IBV_GID_TYPE_ROCE_V1:
        return "RoCE v1";
    case IBV_GID_TYPE_IB:
        return "InfiniBand";
    default:
        return "of unknown type";
    }
}

static const char *link_layer(uint8_t link)
{
    return link == IBV_LINK_LAYER_ETHERNET     ? "Ethernet"
           : link == IBV_LINK_LAYER_INFINIBAND ? "InfiniBand"
                                               : "no link layer";
}

static const char *port_state(enum ibv_port_state state)
{
    static const char *const names[] = {"no state", "down", "initialising", "armed", "active", "active, deferred"};

    return (unsigned)state < sizeof(names) / sizeof(names[0]) ? names[state] : "in an unknown state";
}

/* Gb/s: lanes times their speed; 0 when the card reports unknown codes. */
static double port_rate(const struct ibv_port_attr *attr)
{
    static const struct {
        int code;
        double value;
    } lanes[] = {{1, 1}, {2, 4}, {4, 8}, {8, 12}, {16, 2}},
      speeds[] = {{1, 2.5}, {2, 5}, {4, 10}, {8, 10}, {16, 14}, {32, 25}, {64, 50}, {128, 100}};
    double rate = 0;

    for (size_t i = 0; i < sizeof(lanes) / sizeof(lanes[0]); i++)
        for (size_t j = 0; j < sizeof(speeds) / sizeof(speeds[0]); j++)
            if (lanes[i].code == attr->active_width && speeds[j].code == attr->active_speed)
                rate = lanes[i].value * speeds[j].value;
    return rate;
}

static void show_gids(struct report *report, const struct verbs_lib *lib, struct ibv_context *context, int port,
                      int table)
{
    char text[INET6_ADDRSTRLEN];
    int shown = 0;

    for (int i = 0; i < table && shown < GIDS_SHOWN; i++) {
        struct ibv_gid_entry entry;
        if (lib->query_gid_ex(context, (uint32_t)port, (uint32_t)i, &entry, 0, sizeof(entry)) ||
            !verbs_gid_rank(entry.gid.raw, entry.gid_type) || !inet_ntop(AF_INET6, entry.gid.raw, text, sizeof(text)))
            continue;
        report_row(report, "cards", "    GID %d: %s, %s", i, text, gid_type(entry.gid_type));
        shown++;
    }
    if (!shown)
        report_row(report, "cards", "    no GID that can be used");
}

static void show_port(struct report *report, const struct verbs_lib *lib, struct ibv_context *context, const char *name,
                      int port)
{
    const char *filter = env_string("EPX_IB_HCA");
    struct ibv_port_attr attr;
    double rate;

    memset(&attr, 0, sizeof(attr)); /* the function knows only the first fields, as they were before extensions */
    if (lib->query_port(context, (uint8_t)port, (struct _compat_ibv_port_attr *)&attr)) {
        report_row(report, "cards", "  port %d cannot be queried: %s", port, strerror(errno));
        return;
    }
    rate = port_rate(&attr);
    report_row(report, "cards", "  port %d: %s, %s, %.0f Gb/s%s, MTU %d, LID %d%s", port, port_state(attr.state),
               link_layer(attr.link_layer), rate, rate > 0 ? "" : " (unknown)", 128 << attr.active_mtu, attr.lid,
               filter && !card_filter_match(filter, name, port) ? "; left out by EPX_IB_HCA" : "");
    show_gids(report, lib, context, port, attr.gid_tbl_len);
}

/* Cards on which others have found that too much in flight costs a lot. */
static void advise_window(struct report *report, uint32_t vendor, const char *name)
{
    const char *bytes = vendor == BROADCOM ? "1572864" : vendor == PENSANDO ? "2097152" : NULL;

    if (bytes && !env_string("EPX_IB_MAX_INFLIGHT_BYTES"))
        report_advise(report,
                      "%s: where many nodes send at once, such cards do better with EPX_IB_MAX_INFLIGHT_BYTES=%s "
                      "EPX_IB_MAX_INFLIGHT_NORMAL=1",
                      name, bytes);
}

static void show_device(struct report *report, const struct verbs_lib *lib, struct ibv_device *device)
{
    const char *name = lib->get_device_name(device);
    struct ibv_device_attr attr;
    struct ibv_context *context = lib->open_device(device);

    if (!context || lib->query_device(context, &attr)) {
        report_row(report, "cards", "%s cannot be opened: %s", name, strerror(errno));
        report_warn(report, "Card %s cannot be opened: %s", name, strerror(errno));
        if (context)
            lib->close_device(context);
        return;
    }
    report_row(report, "cards", "%s: vendor %04x, part %u, firmware %.60s", name, attr.vendor_id, attr.vendor_part_id,
               attr.fw_ver[0] ? attr.fw_ver : "unknown");
    for (int port = 1; port <= attr.phys_port_cnt; port++)
        show_port(report, lib, context, name, port);
    advise_window(report, attr.vendor_id, name);
    lib->close_device(context);
}

static void show_chosen(struct report *report, const struct verbs_lib *lib)
{
    struct verbs_card cards[VERBS_MAX_CARDS];
    char text[200];
    int count = 0;

    if (verbs_cards_find(lib, "", cards, &count) != EPX_OK) {
        report_row(report, "for EPX", "none");
        return; /* the section on networks has the reason */
    }
    for (int i = 0; i < count; i++) {
        verbs_card_describe(&cards[i], text, sizeof(text));
        report_row(report, "for EPX", "%s", text);
    }
}

/* Cards read pinned memory: a heap that may not be pinned cannot be registered. */
static void check_memlock(struct report *report)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur >> 30 < MEMLOCK_LEAST_GIB)
        report_warn(report,
                    "Only %llu KiB of memory may be locked, too few for a card to reach a heap: ulimit -l unlimited",
                    (unsigned long long)limit.rlim_cur >> 10);
}

static void show_efa(struct report *report, const struct verbs_lib *lib)
{
#if EPX_HAVE_EFADV
    report_row(report, "EFA", "%s",
               lib->efa_query_device ? "libefa.so.1 is there: SRD on cards that are an EFA"
                                     : "no libefa.so.1 (Debian: ibverbs-providers)");
#else
    (void)lib;
    report_row(report, "EFA", "this EPX was built without <infiniband/efadv.h>");
#endif
}

void doctor_verbs(struct report *report)
{
    const char *why;
    const struct verbs_lib *lib = verbs_lib_open(&why);
    struct ibv_device **list;
    int count = 0;

    report_section(report, "libibverbs");
    if (!lib) {
        report_row(report, "library", "%s", why);
        return;
    }
    list = lib->get_device_list(&count);
    report_row(report, "library", "is there; %d card%s%s", count, count == 1 ? "" : "s",
               path_exists("/sys/class/infiniband") ? "" : " (this kernel has no RDMA subsystem, or it is not loaded)");
    show_efa(report, lib);
    show_chosen(report, lib);
    for (int i = 0; list && i < count; i++)
        show_device(report, lib, list[i]);
    if (list)
        lib->free_device_list(list);
    if (count)
        check_memlock(report);
}

#else

void doctor_verbs(struct report *report)
{
    report_section(report, "libibverbs");
    report_row(report, "library", "this EPX was built without <infiniband/verbs.h> (Debian: libibverbs-dev)");
}

#endif

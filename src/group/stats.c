/* SPDX-License-Identifier: Apache-2.0 */
/* Statistics: operations that the host counts, rows and waits that kernels count, traffic that proxies count. */
#include "group/stats.h"

#include <string.h>

/* Kernels count in device memory: the host reads it in place where it can, and copies it otherwise. */
static epx_status read_device_stats(struct epx_group *group, struct device_stats *out)
{
    const struct device_ops *ops = group->device->ops;
    const uint64_t *from = (const uint64_t *)group->shadow.stats;
    uint64_t *to = (uint64_t *)out;

    if (!(ops->caps & DEVICE_HOST_ACCESS))
        return ops->copy(group->device, out, group->shadow.stats, sizeof(*out));
    for (size_t i = 0; i < sizeof(*out) / sizeof(*to); i++)
        to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
    return EPX_OK;
}

static epx_status clear_device_stats(struct epx_group *group)
{
    static const struct device_stats none;
    const struct device_ops *ops = group->device->ops;
    uint64_t *words = (uint64_t *)group->shadow.stats;

    if (!(ops->caps & DEVICE_HOST_ACCESS))
        return ops->copy(group->device, group->shadow.stats, &none, sizeof(none));
    for (size_t i = 0; i < sizeof(none) / sizeof(*words); i++)
        __atomic_store_n(&words[i], 0, __ATOMIC_RELAXED);
    return EPX_OK;
}

/* A recovery that has failed leaves no proxies; net_base has what those before had counted. */
static void read_net(struct epx_group *group, struct proxy_stats *out)
{
    memset(out, 0, sizeof(*out));
    if (group->proxies)
        proxy_stats_read(group->proxies, out);
}

static void add_net_stats(struct epx_group *group, epx_stats *stats)
{
    struct proxy_stats p;

    read_net(group, &p);
    stats->net_commands = p.commands - group->net_base.commands;
    stats->net_puts = p.puts - group->net_base.puts;
    stats->net_signals = p.signals - group->net_base.signals;
    stats->net_bytes = p.bytes - group->net_base.bytes;
    stats->net_arrivals = p.arrivals - group->net_base.arrivals;
    stats->net_window_waits = p.window_waits - group->net_base.window_waits;
    stats->net_sleeps = p.sleeps - group->net_base.sleeps;
    stats->net_refused = p.refused - group->net_base.refused;
    stats->net_stuck = p.stuck;
}

void stats_keep_net(struct epx_group *group, const struct proxy_stats *counted)
{
    uint64_t *base = (uint64_t *)&group->net_base;
    const uint64_t *words = (const uint64_t *)counted;

    for (size_t i = 0; i < sizeof(*counted) / sizeof(*words); i++)
        base[i] -= words[i]; /* below zero, modulo 2^64: what is read is the new proxies' less this */
}

epx_status stats_read(struct epx_group *group, epx_stats *out)
{
    struct device_stats d;
    epx_status status = read_device_stats(group, &d);

    if (status != EPX_OK)
        return status;
    *out = group->stats;
    out->size = sizeof(*out);
    out->rows_sent = d.rows_sent;
    out->rows_received = d.rows_received;
    out->rows_remote = d.rows_remote;
    out->rows_returned = d.rows_returned;
    out->bytes_peer = d.bytes_peer;
    out->bytes_local = d.bytes_local;
    out->waits = d.waits;
    out->wait_ns = d.wait_ns;
    out->timeouts = d.timeouts;
    add_net_stats(group, out);
    return EPX_OK;
}

epx_status stats_reset(struct epx_group *group)
{
    epx_status status = clear_device_stats(group);

    if (status != EPX_OK)
        return status;
    memset(&group->stats, 0, sizeof(group->stats));
    read_net(group, &group->net_base);
    return EPX_OK;
}

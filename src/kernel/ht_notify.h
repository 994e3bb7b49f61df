/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High-throughput notify (handle update), epoch e, slot e % 2: after it every rank knows where each of its rows goes.
 *
 *   rank s                                            rank d
 *   route its tokens
 *   wait HN_DONE[*] >= e - 2  (slot free)
 *   slot: ecount[E], rcount[R]; signal HN_DATA = e -->  wait HN_DATA[*] >= e, read everybody's counts
 *                                                       base[key] = rows of earlier ranks (+ zone start) at the
 *                                                       destination; totals, offsets and padding of its own zones
 *                             <----------------------  signal HN_DONE = e
 */
#ifndef EPX_KERNEL_HT_NOTIFY_H
#define EPX_KERNEL_HT_NOTIFY_H

#include "kernel/route.h"
#include "kernel/rows.h"

struct hn_post {
    struct agreement agree;
    int32_t alignment;
    int32_t reserved;
};
EPX_STATIC_ASSERT(sizeof(struct hn_post) == 32, "shared between ranks");

KFN char *hn_slot(const struct group_dev *g, int rank, uint64_t epoch)
{
    return heap_at(g, rank, g->ht.counts + (epoch % 2) * g->ht.counts_stride);
}

KFN const int32_t *hn_ecount(const struct group_dev *g, int rank, uint64_t epoch)
{
    return (const int32_t *)(hn_slot(g, rank, epoch) + sizeof(struct hn_post));
}

KFN const int32_t *hn_rcount(const struct group_dev *g, int rank, uint64_t epoch)
{
    return hn_ecount(g, rank, epoch) + g->experts;
}

KFN void hn_publish(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    char *slot = hn_slot(g, g->rank, epoch);
    int32_t *counts = (int32_t *)(slot + sizeof(struct hn_post));

    AG_EACH_ALL(ag, int, e, g->experts) counts[e] = p->h->ecount[e];
    AG_EACH_ALL(ag, int, r, g->nranks) counts[g->experts + r] = p->h->rcount[r];
    if (!sync_last(ag, g, 0))
        return;
    if (ag_leader(ag)) {
        struct hn_post *post = (struct hn_post *)slot;
        post->agree = p->agree;
        post->alignment = p->alignment;
        g->state->epoch[OP_HT_NOTIFY] = epoch;
    }
    ag_sync(ag);
    signal_all(ag, g, SIG_HN_DATA, 0, epoch);
}

/* FLAT: rows of earlier ranks at each destination. */
KFN void hn_base_flat(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    AG_EACH_ALL(ag, int, d, g->nranks)
    {
        int32_t run = 0;
        for (int s = 0; s < g->rank; s++)
            run += g->mask[s] ? hn_rcount(g, s, epoch)[d] : 0;
        p->h->base[d] = run;
    }
}

/* EXPERT_MAJOR: zone start of each expert at its rank, plus rows of earlier ranks. */
KFN void hn_base_zones(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    const int L = g->local_experts, align = p->alignment;

    AG_EACH_ALL(ag, int, d, g->nranks)
    {
        int32_t start = 0;
        for (int e = d * L; e < d * L + L && e < g->experts; e++) {
            int32_t total = 0, earlier = 0;
            for (int s = 0; s < g->nranks; s++) {
                const int32_t n = g->mask[s] ? hn_ecount(g, s, epoch)[e] : 0;
                earlier += s < g->rank ? n : 0;
                total += n;
            }
            p->h->base[e] = start + earlier;
            if (d == g->rank) {
                p->h->zone[e - d * L] = start;
                p->h->filled[e - d * L] = total;
            }
            start += (total + align - 1) / align * align;
        }
    }
}

/* The caller's counters and what the host will ask for. One lane of one agent. */
KFN void hn_report_counts(const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;
    struct handle_dev *h = p->h;
    const int L = g->local_experts, align = p->alignment;
    const int flat = p->layout == LAYOUT_FLAT;
    int64_t total = 0, offset = 0;

    for (int l = 0; l < L; l++) {
        int64_t n = 0;
        const int e = g->rank * L + l;
        for (int s = 0; s < g->nranks && e < g->experts; s++)
            n += g->mask[s] ? hn_ecount(g, s, epoch)[e] : 0;
        const int64_t padded = flat ? n : (n + align - 1) / align * align;
        h->info->expert_counts[l] = n;
        if (e >= g->experts && !flat) {
            h->zone[l] = (int32_t)offset;
            h->filled[l] = 0;
        }
        h->padded[l] = (int32_t)padded;
        if (p->expert_counts.data)
            index_put(&p->expert_counts, l, padded);
        if (p->expert_offsets.data)
            index_put(&p->expert_offsets, l, offset);
        offset += padded;
    }
    for (int s = 0; s < g->nranks; s++) {
        int64_t n = 0;
        if (g->mask[s] && flat)
            n = hn_rcount(g, s, epoch)[g->rank];
        for (int e = g->rank * L; g->mask[s] && !flat && e < g->rank * L + L && e < g->experts; e++)
            n += hn_ecount(g, s, epoch)[e];
        if (p->rank_counts.data)
            index_put(&p->rank_counts, s, n);
        total += n;
    }
    h->recv_rows = flat ? total : offset;
    h->info->rows = h->recv_rows;
    if (p->total.data)
        index_put(&p->total, 0, h->recv_rows);
}

KFN int hn_run(struct agent *ag, const struct ht_notify_params *p, uint64_t epoch)
{
    const struct group_dev *g = p->g;

    if (route_plan(ag, g, p->h, &p->route))
        return 1;
    if (epoch > 2 && wait_all(ag, g, SIG_HN_DONE, 0, epoch - 2, PHASE_HN_SLOT, NULL))
        return 1;
    hn_publish(ag, p, epoch);
    if (wait_all(ag, g, SIG_HN_DATA, 0, epoch, PHASE_HN_DATA, NULL))
        return 1;
    for (int s = 0; s < g->nranks; s++) {
        const struct hn_post *theirs = (const struct hn_post *)hn_slot(g, s, epoch);
        if (g->mask[s] && check_agreement(ag, g, &p->agree, &theirs->agree, PHASE_HN_DATA, s))
            return 1;
    }
    if (p->layout == LAYOUT_FLAT)
        hn_base_flat(ag, p, epoch);
    else
        hn_base_zones(ag, p, epoch);
    if (!sync_last(ag, g, 1))
        return 0;
    if (ag_leader(ag)) {
        hn_report_counts(p, epoch);
        ag_store_release(&p->h->info->epoch, p->h->info->epoch + 1); /* pairs with the host's acquire, recv_count */
    }
    ag_sync(ag);
    signal_all(ag, g, SIG_HN_DONE, 0, epoch);
    return 0;
}

KFN void kernel_ht_notify(struct agent *ag, const struct ht_notify_params *p)
{
    const uint64_t epoch = p->g->state->epoch[OP_HT_NOTIFY] + 1;

    if (!kernel_begin(ag, p->g))
        hn_run(ag, p, epoch);
    kernel_end(ag, p->g);
}

#endif

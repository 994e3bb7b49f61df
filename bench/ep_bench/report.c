/* SPDX-License-Identifier: Apache-2.0 */
/* The lines. Bandwidths are 1e9 bytes per second; times are means over iterations, then over ranks. */
#include <stdio.h>
#include <stdlib.h>

#include "ep_bench.h"

struct summary {
    double mean, low, high;
    int low_rank, high_rank;
};

static struct summary summarize(double mine)
{
    double *all = malloc((size_t)world.nranks * sizeof(*all));
    struct summary s = {0, 0, 0, 0, 0};

    if (!all)
        failed("malloc", 0, "no memory");
    world_gather(mine, all);
    s.low = s.high = all[0];
    for (int r = 0; r < world.nranks; r++) {
        s.mean += all[r] / world.nranks;
        if (all[r] < s.low) {
            s.low = all[r];
            s.low_rank = r;
        }
        if (all[r] > s.high) {
            s.high = all[r];
            s.high_rank = r;
        }
    }
    free(all);
    return s;
}

static double rate(double bytes, double us)
{
    return us > 0 ? bytes / us / 1e3 : 0;
}

/* ---- Low latency ------------------------------------------------------------------------------------------------- */

/* `plain`: what the bytes would be without quantisation. */
static void ll_line(const char *name, double us, double bytes, double plain)
{
    const struct summary time = summarize(us), bus = summarize(rate(bytes, us));
    const double total = summarize(bytes).mean, unquantised = summarize(plain).mean;

    if (world.rank)
        return;
    printf("%-12s avg %10.2f us  min %10.2f us  max %10.2f us\n", name, time.mean, time.low, time.high);
    printf(
        "%-12s bus bandwidth %8.2f GB/s (min %.2f on rank %d, max %.2f on rank %d)  algorithm bandwidth %8.2f GB/s\n",
        "", bus.mean, bus.low, bus.low_rank, bus.high, bus.high_rank, total > 0 ? bus.mean * unquantised / total : 0);
}

static void ll_report(const struct bench *b, const struct times *t)
{
    const struct shape *s = &b->shape;
    const struct traffic sent = traffic_sent(s, &b->mine, world.rank);
    const double rows = s->o->layout == NCCL_EP_LAYOUT_RANK_MAJOR ? sent.pairs : sent.valid;
    const double d = sent.pairs * (double)s->payload, c = rows * (double)s->combine_payload;
    const double plain = (double)s->plain_bytes;
    const double mean_d = summarize(d).mean / 1e6, mean_c = summarize(c).mean / 1e6;
    const double plain_d = summarize(sent.pairs * plain).mean / 1e6, plain_c = summarize(rows * plain).mean / 1e6;

    ll_line("Dispatch:", t->dispatch, d, sent.pairs * plain);
    if (!s->o->dispatch_only) {
        ll_line("Combine:", t->combine, c, rows * plain);
        ll_line("Total (D+C):", t->total, d + c, (sent.pairs + rows) * plain);
    }
    if (!world.rank)
        printf("Mean payload/rank: dispatch %.3f MB, combine %.3f MB (unquantised %.3f and %.3f)\n", mean_d,
               s->o->dispatch_only ? 0 : mean_c, plain_d, s->o->dispatch_only ? 0 : plain_c);
}

/* ---- High throughput --------------------------------------------------------------------------------------------- */

static void ht_line(const char *name, const struct traffic *t, double row_bytes, double us)
{
    const double all = summarize(t->pairs * row_bytes).mean, remote = summarize(t->remote * row_bytes).mean;
    const double time = summarize(us).mean;

    if (!world.rank)
        printf("  %-5s total_bw %8.2f GB/s  nvl_bw %8.2f GB/s  rdma_bw %8.2f GB/s  (%.2f MB, rdma %.2f)\n", name,
               rate(all, time), rate(all - remote, time), rate(remote, time), all / 1e6, remote / 1e6);
}

static void ht_report(const struct bench *b, const struct times *t)
{
    const struct shape *s = &b->shape;
    const struct traffic sent = traffic_sent(s, &b->mine, world.rank), received = traffic_received(s, world.rank);
    const double d = summarize(t->dispatch).mean, c = summarize(t->combine).mean;

    if (!world.rank)
        printf("Dispatch: total %.2f us\n", d);
    ht_line("recv", &received, (double)s->payload, t->dispatch);
    ht_line("send", &sent, (double)s->payload, t->dispatch);
    if (!s->o->dispatch_only) {
        if (!world.rank)
            printf("Combine: total %.2f us\n", c);
        ht_line("recv", &sent, (double)s->plain_bytes, t->combine);
        ht_line("send", &received, (double)s->plain_bytes, t->combine);
    }
    if (!world.rank)
        printf("NOTE: times of kernels alone need CUPTI; the times above are of the stream\n");
}

/* ---- Both -------------------------------------------------------------------------------------------------------- */

static double mb(size_t now, size_t before)
{
    return ((double)now - (double)before) / 1e6;
}

void report(const struct bench *b, const struct times *t)
{
    const struct shape *s = &b->shape;
    const struct options *o = s->o;
    const int ll = o->algorithm == NCCL_EP_ALGO_LOW_LATENCY;

    if (!world.rank)
        printf("EP benchmark: %s %s, %d ranks (%d per LSA team), %d tokens, hidden %d, top-k %d, %d experts, "
               "%d + %d iterations\n",
               ll ? "low latency" : "high throughput",
               o->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? "expert-major"
               : ll                                     ? "rank-major"
                                                        : "flat",
               s->R, world.lsa_ranks, s->M, s->H, s->K, s->E, o->warmup, o->iters);
    if (ll)
        ll_report(b, t);
    else
        ht_report(b, t);
    if (world.rank)
        return;
    printf("Setup Timing: group %.3f ms, handle %.3f ms\n", b->group_ms, b->handle_ms);
    printf("GPU Memory (rank 0): group %.1f MB, handle and tensors %.1f MB, run %.1f MB\n",
           mb(b->memory_group, b->memory_before), mb(b->memory_handle, b->memory_group),
           mb(b->memory_end, b->memory_handle));
}

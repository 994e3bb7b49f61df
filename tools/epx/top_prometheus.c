/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `epx top --prometheus`: the pages of the ranks as Prometheus' text format. A family of metrics is printed as a whole,
 * so each has a function that goes through all pages.
 */
#include <stdio.h>

#include "top.h"

#define LABELS_BYTES 128

typedef void print_samples(const struct top *top, const struct top_page *p, const char *labels);

static void family(const struct top *top, const char *name, const char *type, const char *help, print_samples *print)
{
    char labels[LABELS_BYTES];

    printf("# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
    for (int i = 0; i < top->count; i++) {
        const struct watch *w = top->pages[i].page;

        snprintf(labels, sizeof(labels), "group=\"%016llx\",rank=\"%d\"", (unsigned long long)w->group, w->rank);
        print(top, &top->pages[i], labels);
    }
}

static void info(const struct top *top, const struct top_page *p, const char *labels)
{
    (void)top;
    printf("epx_rank_info{%s,pid=\"%d\",state=\"%s\",device=\"%s\",ranks=\"%d\",nodes=\"%d\"} 1\n", labels,
           p->page->pid, top_state_text(p->state), p->page->device, p->page->nranks, p->page->nnodes);
}

static void failed(const struct top *top, const struct top_page *p, const char *labels)
{
    (void)top;
    printf("epx_group_failed{%s} %d\n", labels, p->page->failed != 0);
}

static void operations(const struct top *top, const struct top_page *p, const char *labels)
{
    (void)top;
    for (int k = 0; k < WATCH_KERNELS; k++) {
        const struct watch *w = p->page;
        static const double quantiles[] = {0.5, 0.99};

        if (!w->count[k])
            continue;
        for (int q = 0; q < 2 && top_percentile_us(w, k, 50) > 0; q++) /* not measured before: none */
            printf("epx_operation_duration_seconds{%s,operation=\"%s\",quantile=\"%g\"} %g\n", labels,
                   top_kernel_name((uint32_t)k), quantiles[q], top_percentile_us(w, k, quantiles[q] * 100) / 1e6);
        printf("epx_operation_duration_seconds_sum{%s,operation=\"%s\"} %.9g\n", labels, top_kernel_name((uint32_t)k),
               (double)w->total_ns[k] / 1e9);
        printf("epx_operation_duration_seconds_count{%s,operation=\"%s\"} %llu\n", labels, top_kernel_name((uint32_t)k),
               (unsigned long long)w->count[k]);
    }
}

static void sent_bytes(const struct top *top, const struct top_page *p, const char *labels)
{
    const struct watch *w = p->page;
    unsigned long long elsewhere = 0;

    (void)top;
    for (int r = 0; r < w->nranks; r++)
        elsewhere += watch_windows(w)[r].sent_bytes;
    printf("epx_sent_bytes_total{%s,to=\"node\"} %llu\n", labels, (unsigned long long)w->stats.bytes_peer);
    printf("epx_sent_bytes_total{%s,to=\"network\"} %llu\n", labels, elsewhere);
}

static void timeouts(const struct top *top, const struct top_page *p, const char *labels)
{
    (void)top;
    printf("epx_timeouts_total{%s} %llu\n", labels, (unsigned long long)p->page->stats.timeouts);
}

static void waits(const struct top *top, const struct top_page *p, const char *labels)
{
    const struct watch_wait *wait = top_longest_wait(p->page);
    const uint64_t since_ns = wait ? wait->since_ns : 0;

    printf("epx_wait_seconds{%s} %.3f\n", labels,
           since_ns && top->now_ns > since_ns ? (double)(top->now_ns - since_ns) / 1e9 : 0);
}

static void peers(const struct top *top, const struct top_page *p, const char *labels)
{
    const struct watch_wait *wait = top_longest_wait(p->page);

    (void)top;
    printf("epx_wait_peer{%s} %d\n", labels, wait ? wait->peer : -1);
}

static void masked(const struct top *top, const struct top_page *p, const char *labels)
{
    int count = 0;

    (void)top;
    for (int r = 0; r < p->page->nranks; r++)
        count += !watch_mask(p->page)[r];
    printf("epx_masked_ranks{%s} %d\n", labels, count);
}

static void in_flight(const struct top *top, const struct top_page *p, const char *labels)
{
    unsigned long long bytes = 0;

    (void)top;
    for (int r = 0; r < p->page->nranks; r++)
        bytes += watch_windows(p->page)[r].bytes;
    printf("epx_network_in_flight_bytes{%s} %llu\n", labels, bytes);
}

static void waiting_for(const struct top *top)
{
    puts("# HELP epx_group_waiting_for The rank that keeps the others of its group waiting; -1: none does.\n"
         "# TYPE epx_group_waiting_for gauge");
    for (int first = 0, page; first < top->count; first = top_group_end(top, first))
        printf("epx_group_waiting_for{group=\"%016llx\"} %d\n", (unsigned long long)top->pages[first].page->group,
               top_culprit(top, first, top_group_end(top, first), &page));
}

void top_print_prometheus(const struct top *top)
{
    family(top, "epx_rank_info", "gauge", "A rank of a group on this machine.", info);
    family(top, "epx_group_failed", "gauge", "1: the group of the rank has an error.", failed);
    family(top, "epx_operation_duration_seconds", "summary",
           "Time of an operation from its first launch to the end of its last one, waits included.", operations);
    family(top, "epx_sent_bytes_total", "counter", "Bytes that the rank has moved to ranks of its node and of others.",
           sent_bytes);
    family(top, "epx_timeouts_total", "counter", "Waits that have ended by their deadline.", timeouts);
    family(top, "epx_wait_seconds", "gauge", "For how long the rank has waited for another one; 0: it does not wait.",
           waits);
    family(top, "epx_wait_peer", "gauge", "The rank it waits for; -1: no single one, or it does not wait.", peers);
    waiting_for(top);
    family(top, "epx_masked_ranks", "gauge", "Ranks that this rank has masked.", masked);
    family(top, "epx_network_in_flight_bytes", "gauge", "Bytes on their way to ranks of other nodes.", in_flight);
}

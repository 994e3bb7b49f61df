/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_TOOLS_TOP_H
#define EPX_TOOLS_TOP_H

#include "util/watch.h"

/* What /proc says of a process: R running, S asleep, T stopped, Z or X ended, ? not known. */
struct top_page {
    const struct watch *page; /* mapped, read only; it changes while it is read */
    size_t bytes;
    char state;
    uint64_t before[WATCH_KERNELS], bytes_before;
};

struct top {
    struct top_page *pages; /* by group, then by rank */
    int count;
    uint64_t before_ns, now_ns;
};

void top_open(struct top *top);
/* Asks ranks whose counters are sampled for new ones, and waits for them a moment. */
void top_ask(const struct top *top);
void top_close(struct top *top);

/* Bytes that the rank has moved so far: to ranks of its node and to other nodes. */
uint64_t top_bytes(const struct watch *w);
/* The wait of one of its agents that has lasted longest; NULL: none waits for a peer. */
const struct watch_wait *top_longest_wait(const struct watch *w);
/* Kernels of a GPU do not write pages: what they count is sampled; times and long waits only while somebody looks. */
int top_kernels_are_silent(const struct watch *w);
/* Is there a rank whose kernels have done nothing since the first look, and say not yet for whom they wait? */
int top_is_still(const struct top *top);
/* The rank that keeps the group waiting, -1: nobody does; the index of its page, -1: it has none on this machine. */
int top_culprit(const struct top *top, int first, int end, int *page);
double top_percentile_us(const struct watch *w, int kernel, double percent);

const char *top_kernel_name(uint32_t id);
const char *top_state_text(char state);
/* Behind the last page of the group of page `first`. */
int top_group_end(const struct top *top, int first);

void top_print(const struct top *top);
void top_print_json(const struct top *top);
/* Prometheus' text format, version 0.0.4. */
void top_print_prometheus(const struct top *top);

#endif

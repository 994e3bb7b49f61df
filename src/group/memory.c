/* SPDX-License-Identifier: Apache-2.0 */
#include "group/memory.h"

#include <stdlib.h>
#include <string.h>

#include "group/region.h"
#include "util/status.h"
#include "util/watch.h"

#define RINGS_MAX 64

struct blocks {
    size_t state, stats, times, mask, members, mask_epochs, heaps, tables, layout_counts, node_ranks;
    size_t nodes, expected, pushed, rings, order, packed; /* several nodes */
    size_t expected_all, pushed_all, records, counts_copy;
    size_t total;
};

/* In memory that host and device share. */
struct host_blocks {
    size_t windows, by_deadline, counters, sent, aggregates, sent_all, total;
};

/* One for each (ring, kind, slot). */
static size_t aggregate_bytes(const struct epx_group *group)
{
    return (size_t)RINGS_MAX * (size_t)SIG_COUNT * (size_t)group->set.sig_slots * sizeof(uint64_t);
}

static size_t take(size_t *at, size_t bytes)
{
    const size_t place = (*at + 255) / 256 * 256;
    *at = place + bytes;
    return place;
}

/* node_of[R], recv_index_at[R], recv_index_of[R], relay_rank[N], relay_slot[N], sources[relay_max], by_node[R],
 * node_start[N + 1], place_of[R], relay_of[R], relay_number[R], routes[R]. */
static size_t node_table_words(const struct epx_group *group)
{
    return 8 * (size_t)group->nranks + 3 * (size_t)group->nnodes + 1 + (size_t)group->set.relay_max;
}

/* Of the largest record; without high throughput none. */
static size_t record_stride(const struct epx_group *group)
{
    return ((size_t)group->plan.ht.record + 63) / 64 * 64;
}

static void lay_out_nodes(const struct epx_group *group, struct blocks *b, size_t *at)
{
    const size_t R = (size_t)group->nranks, M = (size_t)group->set.max_tokens;

    b->nodes = take(at, node_table_words(group) * sizeof(int32_t));
    b->expected = take(at, (size_t)SIG_COUNT * (size_t)group->set.sig_slots * R * sizeof(uint64_t));
    b->pushed = take(at, R * sizeof(uint64_t));
    b->expected_all = take(at, aggregate_bytes(group));
    b->pushed_all = take(at, RINGS_MAX * sizeof(uint64_t));
    b->rings = take(at, RINGS_MAX * sizeof(struct ring_dev));
    b->order = take(at, 2 * M * sizeof(int32_t));
    b->packed = take(at, (size_t)group->plan.ll.halves * M * (size_t)group->set.max_topk * sizeof(int32_t));
    b->records = take(at, (size_t)group->set.agents * record_stride(group));
    b->counts_copy = take(at, R * group->plan.ht.counts_stride);
}

static struct blocks lay_out(const struct epx_group *group)
{
    const size_t R = (size_t)group->nranks;
    struct blocks b;
    size_t at = sizeof(struct group_dev);

    memset(&b, 0, sizeof(b));
    b.state = take(&at, sizeof(struct group_state));
    b.stats = take(&at, sizeof(struct device_stats));
    if (!(group->device->ops->caps & DEVICE_HOST_ACCESS))
        b.times = take(&at, sizeof(struct kernel_times));
    b.mask = take(&at, R * sizeof(int32_t));
    b.members = take(&at, R * sizeof(int32_t));
    b.mask_epochs = take(&at, OP_COUNT * sizeof(uint64_t) + R * sizeof(int32_t));
    b.heaps = take(&at, R * sizeof(char *));
    b.node_ranks = take(&at, R * sizeof(int32_t));
    b.tables = take(&at, (size_t)group->set.agents * ((size_t)group->set.experts + 2 * R) * sizeof(int32_t));
    b.layout_counts = take(&at, ((size_t)group->set.experts + 2 * R + 1) * sizeof(int32_t));
    if (group->nnodes > 1)
        lay_out_nodes(group, &b, &at);
    b.total = at;
    return b;
}

static struct host_blocks lay_out_host(const struct epx_group *group)
{
    const size_t R = (size_t)group->nranks;
    struct host_blocks b;
    size_t at = sizeof(struct error_record);

    memset(&b, 0, sizeof(b));
    b.windows = take(&at, sizeof(uint64_t));
    b.by_deadline = take(&at, R * sizeof(uint32_t));
    if (group->nnodes > 1) {
        b.counters = take(&at, (size_t)SIG_COUNT * (size_t)group->set.sig_slots * R * sizeof(uint64_t));
        b.sent = take(&at, R * sizeof(uint64_t));
        b.aggregates = take(&at, aggregate_bytes(group));
        b.sent_all = take(&at, RINGS_MAX * sizeof(uint64_t));
    }
    b.total = at;
    return b;
}

static epx_status copy_nodes(struct epx_group *group, const struct blocks *b)
{
    const struct node_map *map = &group->map;
    const size_t R = (size_t)group->nranks, N = (size_t)group->nnodes;
    const size_t words = node_table_words(group), by_node = 3 * R + 2 * N + (size_t)group->set.relay_max;
    int32_t *t = calloc(words + R + N, sizeof(int32_t)), *place_of; /* R + N words to count in */
    epx_status status;

    if (!t)
        return fail(EPX_ERR_MEMORY, "%s: no memory for the tables of %zu nodes", group->call, N);
    place_of = t + by_node + R + N + 1;
    node_recv_indices(map, group->rank, t + R, t + 2 * R, t + words);
    for (size_t r = 0; r < R; r++) {
        t[r] = map->node_of[r];
        place_of[3 * R + r] = (int32_t)node_route(map, group->rank, (int)r);
    }
    for (int n = 0; n < group->nnodes; n++) {
        t[3 * R + (size_t)n] = node_relay(map, group->rank, n);
        t[3 * R + N + (size_t)n] = n == group->node ? -1 : node_relay_number(map, group->rank, n);
    }
    node_order(map, t + by_node, t + by_node + R, place_of);
    node_relays_in(map, group->node, place_of + R, place_of + 2 * R, t + words + N);
    /* Without high throughput there are no relays, and relay_max does not bound them when ranks are left out. */
    group->shadow.relay_count = 0;
    if (group->set.modes & EPX_HIGH_THROUGHPUT)
        group->shadow.relay_count = node_relay_sources(map, group->rank, t + 3 * R + 2 * N);
    status =
        group->device->ops->copy(group->device, (char *)group->device_memory + b->nodes, t, words * sizeof(int32_t));
    free(t);
    return status;
}

static void fill_nodes(struct epx_group *group, const struct blocks *b)
{
    const size_t R = (size_t)group->nranks, N = (size_t)group->nnodes;
    char *base = group->device_memory;
    const int32_t *t = (const int32_t *)(base + b->nodes);
    struct group_dev *g = &group->shadow;

    g->remotes = group->map.remotes;
    g->relay_max = group->set.relay_max;
    g->node_of = t;
    g->recv_index_at = t + R;
    g->recv_index_of = t + 2 * R;
    g->relay_rank = t + 3 * R;
    g->relay_slot = t + 3 * R + N;
    g->relay_sources = t + 3 * R + 2 * N;
    g->by_node = g->relay_sources + group->set.relay_max;
    g->node_start = g->by_node + R;
    g->place_of = g->node_start + N + 1;
    g->relay_of = g->place_of + R;
    g->relay_number = g->relay_of + R;
    g->routes = g->relay_number + R;
    g->expected = (uint64_t *)(base + b->expected);
    g->pushed = (uint64_t *)(base + b->pushed);
    g->expected_all = (uint64_t *)(base + b->expected_all);
    g->pushed_all = (uint64_t *)(base + b->pushed_all);
    g->order = (int32_t *)(base + b->order);
    g->packed_at = (int32_t *)(base + b->packed);
    g->records = base + b->records;
    g->record_stride = record_stride(group);
    g->counts_copy = base + b->counts_copy;
    g->net = group->net_memory ? group->net_memory : group->heap.base;
}

static void fill_shadow(struct epx_group *group, const struct blocks *b)
{
    char *base = group->device_memory;
    struct group_dev *g = &group->shadow;

    g->rank = group->rank;
    g->nranks = group->nranks;
    g->experts = group->set.experts;
    g->local_experts = group->set.local_experts;
    g->max_tokens = group->set.max_tokens;
    g->max_topk = group->set.max_topk;
    g->inflight = group->set.inflight;
    g->enable_mask = group->set.enable_mask;
    g->timeout_ns = (uint64_t)group->set.timeout_ms * 1000000u;
    g->heap = (char *const *)(base + b->heaps);
    g->node_ranks = (const int32_t *)(base + b->node_ranks);
    for (int r = 0; r < group->nranks; r++)
        g->node_size += !group->remote[r];
    g->regions = regions_table(group);
    g->state = (struct group_state *)(base + b->state);
    g->mask = (int32_t *)(base + b->mask);
    g->members = (int32_t *)(base + b->members);
    group->mask_epochs = (uint64_t *)(base + b->mask_epochs);
    g->error = group->error;
    g->stats = (struct device_stats *)(base + b->stats);
    if (group->watch && group->device->ops->caps & DEVICE_HOST_ACCESS) {
        g->watch = group->watch;
        g->stats = &group->watch->stats;
    }
    if (!(group->device->ops->caps & DEVICE_HOST_ACCESS))
        g->times = (struct kernel_times *)(base + b->times);
    g->tables = (int32_t *)(base + b->tables);
    g->layout_counts = (int32_t *)(base + b->layout_counts);
    g->max_agents = group->set.agents;
    g->signals = group->plan.signals;
    g->ll = group->plan.ll;
    g->ht = group->plan.ht;
    g->nnodes = group->nnodes;
    g->node = group->node;
    g->sig_slots = group->set.sig_slots;
    if (group->nnodes > 1)
        fill_nodes(group, b);
}

epx_status group_device_timeout(struct epx_group *group)
{
    struct group_dev *g = &group->shadow;

    g->timeout_ns = (uint64_t)group->set.timeout_ms * 1000000u;
    if (group->watch)
        group->watch->timeout_ms = group->set.timeout_ms;
    return group->device->ops->copy(group->device,
                                    (char *)group->device_memory + offsetof(struct group_dev, timeout_ns),
                                    &g->timeout_ns, sizeof(g->timeout_ns));
}

static epx_status copy_node_ranks(struct epx_group *group, const struct blocks *b)
{
    int32_t *ranks = calloc((size_t)group->nranks, sizeof(*ranks));
    int n = 0;
    epx_status status;

    if (!ranks)
        return fail(EPX_ERR_MEMORY, "%s: no memory for the list of %d ranks", group->call, group->nranks);
    for (int r = 0; r < group->nranks; r++)
        if (!group->remote[r])
            ranks[n++] = r;
    status = group->device->ops->copy(group->device, (char *)group->device_memory + b->node_ranks, ranks,
                                      (size_t)n * sizeof(*ranks));
    free(ranks);
    return status;
}

static epx_status copy_in(struct epx_group *group, const struct blocks *b)
{
    const struct device_ops *ops = group->device->ops;
    char *base = group->device_memory;
    epx_status status = group_device_members(group);

    if (status == EPX_OK)
        status = copy_node_ranks(group, b);
    if (status == EPX_OK)
        status = ops->copy(group->device, base, &group->shadow, sizeof(group->shadow));
    return status == EPX_OK ? group_device_heaps(group) : status;
}

static epx_status zero(struct epx_group *group, void *ptr, size_t bytes)
{
    void *zeros = calloc(1, bytes);
    epx_status status;

    if (!zeros)
        return fail(EPX_ERR_MEMORY, "no memory to clear %zu bytes", bytes);
    status = group->device->ops->copy(group->device, ptr, zeros, bytes);
    free(zeros);
    return status;
}

epx_status group_mem_alloc(struct epx_group *group, size_t bytes, void **ptr)
{
    const struct settings *set = &group->set;
    epx_status status;
    int rc;

    if (!set->device_alloc)
        return group->device->ops->mem_alloc(group->device, bytes, ptr);
    *ptr = NULL;
    rc = set->device_alloc(ptr, bytes, set->device_context);
    if (rc || !*ptr || (uintptr_t)*ptr % 256) {
        status = fail(EPX_ERR_MEMORY, "device_alloc: expected 0 and %zu bytes aligned to 256, got %d and %p", bytes, rc,
                      *ptr);
        if (!rc && *ptr)
            group_mem_free(group, *ptr);
        return status;
    }
    status = zero(group, *ptr, bytes);
    if (status != EPX_OK)
        group_mem_free(group, *ptr);
    return status;
}

void group_mem_free(struct epx_group *group, void *ptr)
{
    if (!group->set.device_free)
        group->device->ops->mem_free(group->device, ptr);
    else if (ptr)
        (void)group->set.device_free(ptr, group->set.device_context);
}

epx_status group_device_alloc(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    const struct blocks b = lay_out(group);
    const struct host_blocks hb = lay_out_host(group);
    epx_status status = ops->host_alloc(group->device, hb.total, &group->host_memory);

    if (status != EPX_OK)
        return status;
    group->error = group->host_memory;
    group->shadow.windows = (uint64_t *)((char *)group->host_memory + hb.windows);
    group->shadow.by_deadline = (uint32_t *)((char *)group->host_memory + hb.by_deadline);
    status = group_mem_alloc(group, b.total, &group->device_memory);
    if (status != EPX_OK) {
        group->device_memory = NULL;
        return status;
    }
    group->dev = group->device_memory;
    if (group->nnodes > 1) {
        group->shadow.counters = (uint64_t *)((char *)group->host_memory + hb.counters);
        group->shadow.sent = (uint64_t *)((char *)group->host_memory + hb.sent);
        group->shadow.aggregates = (uint64_t *)((char *)group->host_memory + hb.aggregates);
        group->shadow.sent_all = (uint64_t *)((char *)group->host_memory + hb.sent_all);
    }
    return EPX_OK;
}

epx_status group_device_fill(struct epx_group *group)
{
    const struct blocks b = lay_out(group);

    fill_shadow(group, &b);
    return copy_in(group, &b);
}

/* Of the ranks that are left out, or of the members: by_deadline[]. */
static void set_by_deadline(struct epx_group *group, int out)
{
    for (int r = 0; r < group->nranks; r++)
        if (!group->map.out[r] == !out) /* release: pairs with the acquire in mask_by_deadline() */
            __atomic_store_n(&group->shadow.by_deadline[r], (uint32_t)out, __ATOMIC_RELEASE);
}

epx_status group_device_members(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    const struct blocks b = lay_out(group);
    const size_t bytes = (size_t)group->nranks * sizeof(int32_t);
    char *base = group->device_memory;
    int32_t *in = malloc(bytes);
    epx_status status;

    if (!in)
        return fail(EPX_ERR_MEMORY, "no memory for the mask of %d ranks", group->nranks);
    for (int r = 0; r < group->nranks; r++)
        in[r] = !group->map.out[r];
    set_by_deadline(group, 1); /* before the mask, and after it: a proxy would take them for masked by hand */
    status = ops->copy(group->device, base + b.mask, in, bytes);
    if (status == EPX_OK)
        set_by_deadline(group, 0);
    if (status == EPX_OK)
        status = ops->copy(group->device, base + b.members, in, bytes);
    free(in);
    if (status == EPX_OK && group->nnodes > 1)
        status = copy_nodes(group, &b);
    if (status == EPX_OK && group->nnodes > 1) /* the relays' sources */
        status = ops->copy(group->device, base, &group->shadow, sizeof(group->shadow));
    return status;
}

epx_status group_device_heaps(struct epx_group *group)
{
    const struct blocks b = lay_out(group);

    return group->device->ops->copy(group->device, (char *)group->device_memory + b.heaps, group->bases,
                                    (size_t)group->nranks * sizeof(void *));
}

epx_status group_device_rings(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    const struct blocks b = lay_out(group);
    const int n = group->proxies ? proxy_ring_count(group->proxies) : 0;
    char *at = (char *)group->device_memory + b.rings;
    epx_status status = EPX_OK;

    if (n > RINGS_MAX)
        return fail(EPX_ERR_UNSUPPORTED, "%s: expected at most %d proxy threads, got %d", group->call, RINGS_MAX, n);
    for (int i = 0; i < n && status == EPX_OK; i++)
        status = ops->copy(group->device, at + (size_t)i * sizeof(struct ring_dev), proxy_ring(group->proxies, i),
                           sizeof(struct ring_dev));
    group->shadow.rings = (const struct ring_dev *)at;
    group->shadow.nrings = n;
    if (status == EPX_OK)
        status = ops->copy(group->device, group->device_memory, &group->shadow, sizeof(group->shadow));
    return status;
}

void group_device_destroy(struct epx_group *group)
{
    if (group->device_memory)
        group_mem_free(group, group->device_memory);
    if (group->host_memory)
        group->device->ops->host_free(group->device, group->host_memory);
}

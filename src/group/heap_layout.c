/* SPDX-License-Identifier: Apache-2.0 */
#include "group/heap_layout.h"

#include "device/cpu/math.h"
#include "kernel/command.h"
#include "util/runtime.h"
#include "util/status.h"

#include <inttypes.h>
#include <string.h>

static uint64_t up(uint64_t n, uint64_t align)
{
    return (n + align - 1) / align * align;
}

/* Takes `bytes` at the next multiple of 64. */
static uint64_t take(uint64_t *at, uint64_t bytes)
{
    const uint64_t place = up(*at, 64);
    *at = place + bytes;
    return place;
}

/* Scales of the widest fp8 row that low latency casts: 4 bytes per 128 channels. */
static uint64_t scale_bytes(const struct settings *set)
{
    return up(((uint64_t)set->max_hidden_bytes + 127) / 128 * 4, 16);
}

void settings_nodes(struct settings *set, const struct node_map *map)
{
    set->nnodes = map->nnodes;
    set->remotes = map->remotes;
    set->relay_max = map->relay_max;
    /* With enable_mask, ranks may relay for those that are left out: up to twice as many sources. */
    if (set->enable_mask)
        set->relay_max = 2 * map->relay_max < map->remotes ? 2 * map->relay_max : map->remotes;
    set->smallest_node = map->smallest;
    set->sig_slots = set->inflight;
    if (set->nnodes > 1 && set->sig_slots < HT_SLOTS)
        set->sig_slots = HT_SLOTS;
    set->largest_node = map->largest;
}

/* Descriptor and tables before the rows, in the layout of ll_view_at() in kernel/ll_slot.h. */
static uint64_t table_bytes(const struct settings *set)
{
    const uint64_t M = (uint64_t)set->max_tokens, pairs = up(M * (uint64_t)set->max_topk * 4, 16);

    return up(sizeof(struct ll_desc) + up(M * 4, 16) + 3 * pairs + up((uint64_t)set->nranks * 4, 16) +
                  up((uint64_t)set->experts * 4, 16),
              64);
}

static uint64_t remote_rows(const struct settings *set)
{
    const int *most = runtime()->remote_rows;

    return most && *most > 0 && *most < set->max_tokens ? (uint64_t)*most : (uint64_t)set->max_tokens;
}

static void plan_ll_dispatch(const struct settings *set, struct ll_layout *ll)
{
    const uint64_t R = (uint64_t)set->nranks, M = (uint64_t)set->max_tokens;

    ll->pitch = up((uint64_t)set->max_hidden_bytes, 16) + scale_bytes(set);
    ll->headers = up(R * M * 4, 64);
    ll->rows = ll->headers + table_bytes(set);
    if (set->nnodes > 1) {
        /* Records and headers of kernel/ll_remote.h. */
        const uint64_t header = up(sizeof(struct ll_header) + (uint64_t)set->local_experts * 4, 16);
        ll->pitch += up(4 + (uint64_t)set->max_topk * 12, 16);
        ll->head = up(header, 64);
        ll->rows += up(R * header, 64);
    }
    ll->slot_stride = up(ll->rows + M * ll->pitch, 64);
    ll->recv_stride = up(ll->head + remote_rows(set) * ll->pitch, 64);
}

static void plan_ll_combine(const struct settings *set, struct ll_layout *ll)
{
    const uint64_t M = (uint64_t)set->max_tokens, K = (uint64_t)set->max_topk;
    /* Between nodes the length of a row is stored before it (kernel/ll_combine.h). */
    const uint64_t logfmt = up(math_logfmt_bound(set->max_hidden_bytes / 2), 16) + (set->nnodes > 1 ? 16 : 0);
    uint64_t at = sizeof(struct lc_desc);

    ll->cpitch = up((uint64_t)set->max_hidden_bytes, 16);
    if (logfmt > ll->cpitch)
        ll->cpitch = logfmt;
    ll->begin = take(&at, (uint64_t)set->local_experts * (uint64_t)set->nranks * 4);
    ll->cdescs = take(&at, (uint64_t)set->remotes * sizeof(struct lc_desc));
    ll->halves = set->nnodes > 1 && set->enable_mask ? 2 : 1;
    ll->crows = take(&at, ll->halves * M * K * ll->cpitch);
    ll->cslot_stride = up(at, 64);
}

#define LL_SPLIT_ROWS 2048 /* most rows of the stage where no row is put from the heap */

/* Rows on their way out: half of what ranks that share memory save in receive buffers, or a few. More rows are sent
 * in turns. Where none is put from the heap, twice the rows that evenly chosen experts on two nodes return. */
static uint64_t stage_rows(const struct settings *set)
{
    const uint64_t M = (uint64_t)set->max_tokens, all = M * (uint64_t)set->max_topk;
    const uint64_t saved = (uint64_t)set->inflight * M * (uint64_t)(set->smallest_node - 1) / 2;
    const uint64_t few = !set->split ? (M < 64 ? M : 64) : all < LL_SPLIT_ROWS ? all : LL_SPLIT_ROWS;

    if (set->nnodes == 1)
        return 0;
    return saved > few ? saved : few;
}

/* What the network reads and writes, in memory of its own. */
static void plan_ll_net(const struct settings *set, struct ll_layout *ll, uint64_t *net)
{
    const uint64_t W = (uint64_t)set->inflight;
    uint64_t at = sizeof(struct lc_desc);

    ll->net_headers = 0;
    ll->net_rows = up((uint64_t)set->nranks * (ll->head), 64);
    ll->net_slot_stride = up(ll->net_rows + (uint64_t)set->max_tokens * ll->pitch, 64);
    ll->net_slots = take(net, W * ll->net_slot_stride);
    ll->net_cdescs = take(&at, (uint64_t)set->remotes * sizeof(struct lc_desc));
    ll->net_crows = take(&at, ll->halves * (uint64_t)set->max_tokens * (uint64_t)set->max_topk * ll->cpitch);
    ll->net_cslot_stride = up(at, 64);
    ll->net_cslots = take(net, W * ll->net_cslot_stride);
}

static void plan_ll_net_in_heap(struct ll_layout *ll)
{
    ll->net_slots = ll->slots;
    ll->net_slot_stride = ll->slot_stride;
    ll->net_headers = ll->headers;
    ll->net_rows = ll->rows;
    ll->net_cslots = ll->cslots;
    ll->net_cslot_stride = ll->cslot_stride;
    ll->net_cdescs = ll->cdescs;
    ll->net_crows = ll->crows;
}

static void plan_ll(const struct settings *set, struct heap_plan *plan, uint64_t *at)
{
    const uint64_t W = (uint64_t)set->inflight;
    const uint64_t start = up(*at, 4096);
    uint64_t *net = set->split ? &plan->net_bytes : at;
    struct ll_layout *ll = &plan->ll;

    plan_ll_dispatch(set, ll);
    plan_ll_combine(set, ll);
    *at = start;
    ll->slots = take(at, W * ll->slot_stride);
    ll->cslots = take(at, W * ll->cslot_stride);
    ll->split = set->split;
    if (ll->split)
        plan_ll_net(set, ll, net);
    else
        plan_ll_net_in_heap(ll);
    ll->recv_buf = take(net, W * (uint64_t)set->remotes * ll->recv_stride);
    ll->stage_rows = stage_rows(set);
    ll->stage = take(net, ll->stage_rows * ll->cpitch);
    plan->ll_bytes = *at - start;
    /* Rows and their tables: the most that a rank reads of each of its peers. */
    plan->ll_receive_bytes = (uint64_t)set->largest_node * (table_bytes(set) + (uint64_t)set->max_tokens * 4) +
                             (uint64_t)set->nranks * (ll->head + (uint64_t)set->max_tokens * ll->pitch) +
                             (uint64_t)set->max_tokens * (uint64_t)set->max_topk * ll->cpitch;
}

static void plan_ht_tables(const struct settings *set, struct ht_layout *ht, uint64_t *at, uint64_t *net)
{
    const uint64_t P = (uint64_t)set->largest_node, L = (uint64_t)set->local_experts;
    const uint64_t received = set->nnodes > 1 ? (uint64_t)set->relay_max : 0;

    ht->base_stride = (int32_t)(P * L + P); /* of experts or ranks, and of lines */
    ht->counts_stride = up(48 + (P + P * L + (uint64_t)ht->rounds + (uint64_t)set->nranks) * 4, 64);
    ht->counts = take(at, 2 * ((uint64_t)set->nnodes + received) * ht->counts_stride);
    ht->split = set->split;
    ht->net_counts = set->split ? take(net, 2 * ((uint64_t)set->nnodes + received) * ht->counts_stride) : ht->counts;
    ht->dispatch_descs = take(at, (uint64_t)set->nranks * sizeof(struct hd_desc));
    ht->combine_descs = take(at, (uint64_t)set->nranks * sizeof(struct hc_desc));
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

#define HT_RELAY_BYTES ((uint64_t)400 << 20)    /* for rows between nodes, where the configuration says nothing */
#define HT_ONE_NODE_BYTES ((uint64_t)512 << 20) /* for tensors in ordinary memory on one node, likewise */
#define HT_NODES_BYTES ((uint64_t)450 << 20)    /* the same on several */
#define HT_SPLIT_BYTES ((uint64_t)640 << 20)    /* and where slots are in other memory */

static uint64_t node_bytes(const struct settings *set)
{
    if (set->ht_node_bytes)
        return set->ht_node_bytes;
    return set->nnodes == 1 ? HT_ONE_NODE_BYTES : set->split ? HT_SPLIT_BYTES : HT_NODES_BYTES;
}

/* What the receive buffer has for one row. */
static uint64_t recv_row_bytes(const struct ht_layout *ht, uint64_t K)
{
    return ht->pitch + ht->scale_pitch + K * 4 + K * 8 + 8 + (K + 2) * 4;
}

/* May rows be more than the receive buffer has room for? Who says how many there are at most (max_recv_tokens) gets
 * room for them. */
static int has_windows(const struct settings *set, const struct ht_layout *ht)
{
    return !set->max_recv_given &&
           (uint64_t)set->max_recv_tokens > node_bytes(set) / recv_row_bytes(ht, (uint64_t)set->max_topk);
}

/* Rows that a round may send to one node: as many as the bytes for rows between nodes hold, and no more than the tokens
 * of a rank need. Where rows may pass through windows, a window has room for all rows of a round, and for its own
 * tokens. */
static void plan_ht_rounds(const struct settings *set, struct ht_layout *ht, uint64_t bytes)
{
    const uint64_t M = (uint64_t)set->max_tokens, relays = (uint64_t)set->relay_max, others = (uint64_t)set->nnodes - 1;
    const uint64_t row = relays * (ht->cpitch + ht->record) + others * ht->cpitch;
    const uint64_t one_put = ((uint64_t)COMMAND_MAX_UNITS * COMMAND_UNIT - HT_HEADER_BYTES) / ht->record;
    const uint64_t eighth = (M + HT_SLOTS - 1) / HT_SLOTS, place = 2 * (uint64_t)set->max_topk * ht->cpitch;
    uint64_t rows = least(least(bytes / (HT_SLOTS * row), one_put), eighth), tokens = M, blocks, per_round;

    if (has_windows(set, ht)) {
        rows = least(rows, node_bytes(set) / ((relays + 1) * place)); /* a token has one row to a node at most */
        rows = rows > 1 ? rows : 1;
        tokens = node_bytes(set) > rows * relays * place ? (node_bytes(set) - rows * relays * place) / place : 0;
        tokens = least(tokens > 1 ? tokens : 1, eighth);
        ht->sum_tokens = (int32_t)tokens;
    }
    rows = rows > 1 ? rows : 1;
    ht->round_rows = (int32_t)rows;
    ht->block_tokens = (int32_t)least(rows >= 4 ? rows / 4 : 1, tokens);
    blocks = (M + (uint64_t)ht->block_tokens - 1) / (uint64_t)ht->block_tokens;
    /* hn_cut_rounds() ends no round before it has so many */
    per_round = least(rows, tokens) / (uint64_t)ht->block_tokens;
    ht->rounds = (int32_t)((blocks + per_round - 1) / per_round);
}

/* Between nodes: slots for rows that this rank relays and for sums that return to it, its own rows on their way out,
 * and the records that go with them. */
static void plan_ht_relay(const struct settings *set, struct ht_layout *ht, uint64_t *at)
{
    const uint64_t M = (uint64_t)set->max_tokens, K = (uint64_t)set->max_topk;
    const uint64_t relays = (uint64_t)set->relay_max, others = (uint64_t)set->nnodes - 1, C = (uint64_t)ht->round_rows;
    const uint64_t copies = others < K ? others : K; /* a token goes to so many other nodes at most */

    ht->relay_block = up(C * ht->cpitch, 64);
    ht->relay_stride = up(ht->relay_block + HT_HEADER_BYTES + C * ht->record, 64);
    ht->relay = take(at, relays * HT_SLOTS * ht->relay_stride);
    ht->back_stride = up(C * ht->cpitch, 64);
    ht->back = take(at, others * HT_SLOTS * ht->back_stride);
    ht->stage = take(at, M * (ht->pitch + ht->scale_pitch));
    ht->blocks = take(at, M * copies * ht->record + (uint64_t)set->nnodes * (uint64_t)ht->rounds * HT_HEADER_BYTES);
}

/* Between nodes: the windows of combine are known (plan_ht_rounds). Those of dispatch have the same memory, at least
 * for one token. The receive buffer has the rest. */
static void plan_ht_nodes(const struct settings *set, struct ht_layout *ht, uint64_t head, uint64_t taken)
{
    const uint64_t M = (uint64_t)set->max_tokens, K = (uint64_t)set->max_topk, bytes = node_bytes(set);
    const uint64_t relayed = 2 * (uint64_t)set->relay_max * (uint64_t)ht->round_rows * K * ht->cpitch;
    const uint64_t own = (uint64_t)ht->sum_tokens * K * ht->cpitch;

    ht->half = up(larger(own + relayed / 2, head + taken), 64);
    ht->relay_window = up(2 * own, 64); /* from the window's start, for now */
    ht->window_row = taken;
    ht->take_tokens = (int32_t)least((ht->half - head) / taken, M);
    ht->rows = bytes > 2 * ht->half ? (int64_t)((bytes - 2 * ht->half) / recv_row_bytes(ht, K)) : 1;
    ht->rows = ht->rows > 1 ? ht->rows : 1;
    ht->half = up(larger(ht->half, (ht->relay_window + relayed + 1) / 2), 64);
}

/* Rows of the receive buffer, and the windows for those that are more (kernel/ht_window.h). */
static void plan_ht_node(const struct settings *set, struct ht_layout *ht)
{
    const uint64_t M = (uint64_t)set->max_tokens, K = (uint64_t)set->max_topk, row = recv_row_bytes(ht, K);
    const uint64_t bytes = node_bytes(set);
    const uint64_t taken = up(ht->pitch + ht->scale_pitch, 16) + up(2 * K * 4, 16), routes = 2 * K * 4;
    const uint64_t head = up(M * routes, 16) + 64; /* a half is never without room for all routes */
    uint64_t take_tokens, sum_tokens;

    ht->rows = set->max_recv_tokens;
    if (!has_windows(set, ht)) {
        /* All tokens are one window: kernels divide by these. */
        ht->take_tokens = ht->sum_tokens = ht->wide_tokens = (int32_t)M;
        return;
    }
    if (set->nnodes > 1) {
        plan_ht_nodes(set, ht, head, taken);
        return;
    }
    ht->half = up(head + larger(bytes / 8, larger(taken, K * ht->cpitch)), 64);
    take_tokens = (ht->half - head) / taken;
    sum_tokens = ht->half / (K * ht->cpitch);
    ht->window_row = taken;
    ht->take_tokens = (int32_t)(take_tokens < M ? take_tokens : M);
    ht->wide_tokens = (int32_t)least((ht->half - 64 - 16) / (2 * routes), M); /* at least M / 2 */
    ht->sum_tokens = (int32_t)(sum_tokens < M ? sum_tokens : M);
    ht->rows = bytes > 2 * ht->half + row ? (int64_t)((bytes - 2 * ht->half) / row) : 1;
}

static void plan_ht(const struct settings *set, struct heap_plan *plan, uint64_t *at)
{
    const uint64_t K = (uint64_t)set->max_topk;
    const uint64_t start = up(*at, 4096);
    struct ht_layout *ht = &plan->ht;

    *at = start;
    ht->pitch = up((uint64_t)set->max_hidden_bytes, 16);
    ht->scale_pitch = 2 * scale_bytes(set); /* the caller's: rows of fp8 beside bf16 may have one per 32 channels */
    ht->cpitch = ht->pitch + up(K * 4, 16);
    ht->record = up(4 + K * 12, 16) + ht->scale_pitch + up(K * 4, 16);
    if (set->nnodes > 1)
        plan_ht_rounds(set, ht, set->ht_buffer_bytes ? set->ht_buffer_bytes : HT_RELAY_BYTES);
    plan_ht_tables(set, ht, at, &plan->net_bytes);
    plan_ht_node(set, ht);
    const uint64_t N = (uint64_t)ht->rows;
    ht->scales = take(at, N * ht->scale_pitch);
    ht->weights = take(at, N * K * 4);
    ht->topk_idx = take(at, N * K * 8);
    ht->src_rank = take(at, N * 4);
    ht->src_token = take(at, N * 4);
    ht->map = take(at, N * (K + 2) * 4);
    *at = up(*at, 4096);
    ht->tokens = take(at, N * ht->pitch);
    if (ht->half) {
        ht->window_routes = take(at, 64 + 2 * (uint64_t)set->max_tokens * K * 4 + (uint64_t)(ht->rounds + 1) * 4);
        ht->window_shown = take(at, 2 * (uint64_t)set->relay_max * 4);
        ht->window = take(at, 2 * ht->half);
        ht->relay_window += ht->window;
    }
    plan->ht_receive_bytes = (uint64_t)set->max_recv_tokens * (ht->pitch + ht->scale_pitch + K * 16 + 16);
    if (set->nnodes > 1)
        plan_ht_relay(set, ht, set->split ? &plan->net_bytes : at);
    if (ht->half && set->split)
        ht->shown = take(at, 2 * (uint64_t)set->relay_max * ht->relay_stride);
    plan->ht_bytes = *at - start;
}

static void plan_puts(const struct settings *set, struct heap_plan *plan)
{
    if (set->nnodes == 1)
        return;
    plan->row_put = larger(larger(plan->ll.pitch, plan->ll.cpitch), larger(plan->ht.cpitch, plan->ht.record));
    plan->table_put = larger(plan->ll.head, plan->ht.counts_stride);
}

void heap_plan_make(const struct settings *set, struct heap_plan *plan)
{
    uint64_t at = sizeof(struct control);

    memset(plan, 0, sizeof(*plan));
    plan->signals =
        take(&at, (uint64_t)SIG_COUNT * (uint64_t)set->sig_slots * (uint64_t)set->nranks * sizeof(struct signal));
    plan->control_bytes = up(at, 4096);
    if (set->modes & EPX_LOW_LATENCY)
        plan_ll(set, plan, &at);
    if (set->modes & EPX_HIGH_THROUGHPUT)
        plan_ht(set, plan, &at);
    plan->alloc = up(at, 4096);
    plan->total = plan->alloc + up(set->alloc_bytes, 4096);
    plan_puts(set, plan);
}

epx_status heap_plan_check(const struct settings *set, const struct heap_plan *plan)
{
    const uint64_t most = (uint64_t)COMMAND_MAX_UNITS * COMMAND_UNIT;
    const uint64_t reach = plan->net_bytes ? plan->net_bytes : plan->total;

    if (plan->row_put > most)
        return fail(EPX_ERR_ARGUMENT,
                    "epx_group_config.max_hidden_bytes: %d make rows of up to %" PRIu64
                    " bytes; between nodes at most %" PRIu64 " travel as one",
                    set->max_hidden_bytes, plan->row_put, most);
    if (plan->table_put > most)
        return fail(EPX_ERR_ARGUMENT,
                    "epx_group_config.num_experts: %d make tables of %" PRIu64 " bytes; between nodes at most %" PRIu64
                    " travel as one",
                    set->experts, plan->table_put, most);
    if (set->nnodes > 1 && reach > COMMAND_MAX_OFFSET)
        return fail(EPX_ERR_ARGUMENT,
                    "epx_group_config.alloc_bytes: %" PRIu64 " make a heap of %" PRIu64
                    " bytes; between nodes at most %" PRIu64 " can be addressed",
                    set->alloc_bytes, reach, COMMAND_MAX_OFFSET);
    return EPX_OK;
}

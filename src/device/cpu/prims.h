/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The primitives that kernels are written in, for the CPU: an agent has one lane. The contract is in kernel/agent.h.
 */
#ifndef EPX_DEVICE_CPU_PRIMS_H
#define EPX_DEVICE_CPU_PRIMS_H

#include "device/cpu/agent.h"
#include "device/cpu/math.h"
#include "kernel/command.h"
#include "util/trace.h"

#include <string.h>

#define KFN static inline
#define KFN_STEP static inline
#define AG_UNROLL
#define AG_ONE_LANE 1
#define AG_STAGED 0
#define AG_LOOK_AHEAD 1

#define AG_EACH(ag, type, i, n) for (type i = ((void)(ag), 0); i < (type)(n); i++)
#define AG_ROUNDS AG_EACH
#define AG_EACH_ALL(ag, type, i, n) for (type i = (type)(ag)->index; i < (type)(n); i += (type)(ag)->count)
#define AG_EACH_BLOCK AG_EACH_ALL
#define AG_BLOCKS 0

/* Phases, waits and signals of a trace: what AG_MARK says, and for whom ag_wait_ge is about to wait. */
#define AG_MARK(ag, name) ((ag)->traced ? cpu_mark(ag, name) : (void)0)
#define AG_WAITS(ag, phase, peer) cpu_waits(ag, phase, peer)
#define AG_TRACED(ag) ((ag)->traced != NULL)
#define AG_WAITS_SIGNAL(ag, kind, slot, value) ((ag)->wait_what = (ag)->traced ? TRACE_WHAT(kind, slot, value) : 0)
#define AG_SIGNALS(ag, g, kind, slot, value) \
    ((ag)->traced ? cpu_trace_signal(ag, (g)->nranks, kind, slot, value) : (void)0)

/* The hardware follows a row once it has seen its beginning; this covers that. */
#define PREFETCH_BYTES 512
#define AG_PREFETCH(ptr) cpu_prefetch(ptr)
#define AG_WILL_WRITE(ag, bytes) ((ag)->past_cache = math_past_cache(bytes))

/* A wait that only learns whom it is for has begun before. */
KFN void cpu_waits(struct agent *ag, int phase, int peer)
{
    if (ag->wait_phase != phase)
        ag->wait_since_ns = 0;
    ag->wait_phase = phase;
    ag->wait_peer = peer;
}

KFN void cpu_prefetch(const void *row)
{
    for (int i = 0; i < PREFETCH_BYTES; i += 64)
        __builtin_prefetch((const char *)row + i);
}

struct copy_set {
    void *to[KERNEL_MAX_TOPK];
};

struct sum_set {
    struct reduce_row row[KERNEL_MAX_TOPK];
};

KFN void ag_begin(struct agent *ag, uint64_t timeout_ns, struct control *own)
{
    ag->timeout_ns = timeout_ns;
    ag->bell = &own->bell;
    ag->abort_word = &own->abort_word;
    ag->waits = 0;
    ag->wait_ns = 0;
    ag->past_cache = 0;
}

KFN int ag_index(const struct agent *ag)
{
    return ag->index;
}

KFN int ag_count(const struct agent *ag)
{
    return ag->count;
}

#define AG_LANES 1
KFN int ag_lane(const struct agent *ag)
{
    (void)ag;
    return 0;
}

KFN int ag_block_index(const struct agent *ag)
{
    return ag->index;
}

KFN int ag_block_count(const struct agent *ag)
{
    return ag->count;
}

KFN int ag_leader(const struct agent *ag)
{
    (void)ag;
    return 1;
}

KFN void ag_sync(struct agent *ag)
{
    (void)ag;
}

KFN uint64_t ag_now(struct agent *ag)
{
    return ag->env->now_ns(ag->env->self);
}

KFN uint64_t ag_load_acquire(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

KFN uint64_t ag_peek(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

KFN void ag_store_signal(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

KFN void ag_peeked(struct agent *ag)
{
    (void)ag;
}

KFN void ag_store_release(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

KFN void ag_store_release_device(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

KFN uint32_t ag_fetch_add(struct agent *ag, uint32_t *word, uint32_t n)
{
    (void)ag;
    return __atomic_fetch_add(word, n, __ATOMIC_ACQ_REL);
}

KFN uint64_t ag_fetch_add64(struct agent *ag, uint64_t *word, uint64_t n)
{
    (void)ag;
    return __atomic_fetch_add(word, n, __ATOMIC_ACQ_REL);
}

KFN void ag_add_fenced(struct agent *ag, uint64_t *word, uint64_t n)
{
    (void)ag;
    __atomic_fetch_add(word, n, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

KFN uint64_t ag_claim_slots(struct agent *ag, const struct ring_dev *ring, uint64_t n, uint64_t *seen)
{
    (void)ag;
    *seen = __atomic_load_n(ring->tail_seen, __ATOMIC_ACQUIRE);
    return __atomic_fetch_add(ring->head, n, __ATOMIC_RELAXED);
}

KFN uint64_t ag_look(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

KFN uint64_t ag_look_behind(const uint64_t *word)
{
    /* Loads before it stay before it. Pairs with the release of who sets the word and reuses what was read after it. */
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

#define AG_POINTS 5
#define AG_GLANCES 1
#define AG_BELLS 1
#define AG_NODE_WORD(g) 1

KFN int ag_last(struct agent *ag, uint32_t *word, int id)
{
    (void)id;
    if (__atomic_fetch_add(word, 1, __ATOMIC_ACQ_REL) != (uint32_t)ag->count - 1)
        return 0;
    *word = 0; /* nobody comes before the last one has let the others go on */
    return 1;
}

KFN uint64_t ag_timeout(const struct agent *ag)
{
    return ag->timeout_ns;
}

KFN void ag_add_stat(uint64_t *word, uint64_t n)
{
    __atomic_fetch_add(word, n, __ATOMIC_RELAXED);
}

KFN void ag_table_add(int32_t *word, int32_t n)
{
    *word += n;
}

KFN void ag_add_device(int32_t *word, int32_t n)
{
    __atomic_fetch_add(word, n, __ATOMIC_RELAXED);
}

KFN int64_t ag_sum(struct agent *ag, int64_t v)
{
    (void)ag;
    return v;
}

KFN int64_t ag_scan(struct agent *ag, int64_t v)
{
    (void)ag;
    (void)v;
    return 0;
}

KFN int ag_vote(struct agent *ag, int v, int *before)
{
    (void)ag;
    *before = 0;
    return v != 0;
}

KFN int ag_any(struct agent *ag, int v)
{
    (void)ag;
    return v != 0;
}

KFN int ag_claim(uint32_t *word, uint32_t from, uint32_t to)
{
    return __atomic_compare_exchange_n(word, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

KFN void ag_store_release32(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

KFN void ag_ring(struct agent *ag, struct doorbell *bell)
{
    cpu_ring_bell(ag, bell);
}

KFN enum wait_result ag_wait_ge(struct agent *ag, const uint64_t *word, uint64_t target, uint64_t timeout_ns)
{
    return cpu_wait_ge(ag, word, target, timeout_ns);
}

KFN void ag_copy(struct agent *ag, void *to, const void *from, size_t bytes)
{
    (void)ag;
    math_copy(to, from, bytes);
}

KFN void ag_zero(struct agent *ag, void *to, size_t bytes)
{
    (void)ag;
    math_fill_zero(to, bytes);
}

KFN void copy_set_put(struct agent *ag, struct copy_set *set, int i, void *to)
{
    (void)ag;
    set->to[i] = to;
}

KFN void *copy_set_get(struct agent *ag, const struct copy_set *set, int i)
{
    (void)ag;
    return set->to[i];
}

KFN void copy_set_begin(struct copy_set *set)
{
    set->to[0] = NULL;
}

KFN void copy_set_offer(struct copy_set *set, int place, void *to)
{
    set->to[place] = to;
}

KFN void copy_set_settle(struct agent *ag, struct copy_set *set)
{
    (void)ag;
    (void)set;
}

struct int_pair {
    int a, b;
};

struct pair_set {
    struct int_pair pair[KERNEL_MAX_TOPK];
};

KFN void pair_set_begin(struct pair_set *set)
{
    set->pair[0].a = -1;
}

KFN void pair_set_offer(struct pair_set *set, int place, int a, int b)
{
    set->pair[place].a = a;
    set->pair[place].b = b;
}

KFN void pair_set_settle(struct agent *ag, struct pair_set *set)
{
    (void)ag;
    (void)set;
}

KFN struct int_pair pair_set_get(struct agent *ag, const struct pair_set *set, int i)
{
    (void)ag;
    return set->pair[i];
}

struct word_set {
    char *to[KERNEL_MAX_TOPK];
    int64_t stride[KERNEL_MAX_TOPK];
};

KFN void word_set_begin(struct word_set *set)
{
    set->to[0] = NULL;
}

KFN void word_set_offer(struct word_set *set, int place, void *to, int64_t stride)
{
    set->to[place] = (char *)to;
    set->stride[place] = stride;
}

KFN void word_set_settle(struct agent *ag, struct word_set *set)
{
    (void)ag;
    (void)set;
}

KFN void ag_copy_words(struct agent *ag, const struct word_set *set, int n, const char *from, int64_t stride, int words)
{
    (void)ag;
    for (int i = 0; i < n; i++)
        for (int j = 0; j < words; j++)
            memcpy(set->to[i] + j * set->stride[i], from + j * stride, 4);
}

KFN void ag_copy_many(struct agent *ag, const struct copy_set *set, int n, const void *from, size_t bytes)
{
    (ag->past_cache ? math_copy_many_past : math_copy_many)(set->to, n, from, bytes);
}

KFN void sum_set_put(struct agent *ag, struct sum_set *set, int i, const void *data, float weight, int format)
{
    (void)ag;
    set->row[i].data = data;
    set->row[i].weight = weight;
    set->row[i].format = format;
}

KFN void sum_set_begin(struct sum_set *set)
{
    set->row[0].data = NULL;
}

KFN void sum_set_offer(struct sum_set *set, int place, const void *data, float weight, int format)
{
    set->row[place].data = data;
    set->row[place].weight = weight;
    set->row[place].format = format;
}

KFN void sum_set_settle(struct agent *ag, struct sum_set *set)
{
    (void)ag;
    (void)set;
}

KFN void ag_reduce(struct agent *ag, void *out, int dtype, int hidden, const struct sum_set *set, int n, int weighted,
                   const void *bias0, const void *bias1)
{
    (void)ag;
    math_reduce(out, dtype, hidden, set->row, n, weighted, bias0, bias1);
}

KFN void ag_reduce_groups(struct agent *ag, void *out, int dtype, int hidden, const struct sum_set *set, int n,
                          uint32_t ends, const void *bias0, const void *bias1)
{
    (void)ag;
    math_reduce_groups(out, dtype, hidden, set->row, n, ends, bias0, bias1);
}

KFN void ag_reduce_mxfp8(struct agent *ag, void *out, int hidden, const struct sum_set *set, int n, uint32_t ends,
                         const void *bias0, const void *bias1)
{
    (void)ag;
    math_reduce_mxfp8(out, hidden, set->row, n, ends, bias0, bias1);
}

KFN void ag_reduce_logfmt(struct agent *ag, void *out, int hidden, int begin, int end, const struct sum_set *set, int n,
                          int weighted, const void *bias0, const void *bias1)
{
    (void)ag;
    (void)begin;
    (void)end;
    math_reduce(out, DTYPE_BF16, hidden, set->row, n, weighted, bias0, bias1);
}

KFN void ag_cast_fp8(struct agent *ag, void *q, void *scales, int ue8m0, int round_scale, const void *x, int dtype,
                     int hidden)
{
    (void)ag;
    math_cast_fp8((uint8_t *)q, scales, ue8m0 ? SCALE_UE8M0 : SCALE_FLOAT, round_scale, x, dtype, hidden);
}

KFN void ag_cast_fp8_many(struct agent *ag, const struct copy_set *set, const struct word_set *words, int n,
                          char *scratch, int ue8m0, int round_scale, const void *x, int dtype, int channels)
{
    const int blocks = (channels + 127) / 128;
    char *scales = scratch + (((size_t)channels + 15) & ~(size_t)15);

    ag_cast_fp8(ag, scratch, scales, ue8m0, round_scale, x, dtype, channels);
    (ag->past_cache ? math_copy_many_past : math_copy_many)(set->to, n, scratch, (size_t)channels);
    ag_copy_words(ag, words, n, scales, 4, ue8m0 ? (blocks + 3) / 4 : blocks);
}

KFN void ag_logfmt_begin(struct agent *ag)
{
    (void)ag;
}

KFN size_t ag_logfmt_encode(struct agent *ag, void *to, const void *x, int hidden)
{
    (void)ag;
    return (math_logfmt_encode(to, (const uint16_t *)x, hidden) + 15) & ~(size_t)15;
}

KFN size_t ag_nvfp4_encode(struct agent *ag, void *to, const void *x, int hidden, float row_scale)
{
    (void)ag;
    return math_nvfp4_encode(to, (const uint16_t *)x, hidden, row_scale);
}

KFN void *ag_scratch(struct agent *ag, size_t bytes)
{
    return agent_scratch(ag, bytes);
}

struct command_set {
    struct command command[RING_MAX_PUSH];
};

KFN void command_set_put(struct agent *ag, struct command_set *set, int i, struct command c)
{
    (void)ag;
    set->command[i] = c;
}

KFN const struct command *command_set_list(const struct command_set *set)
{
    return set->command;
}

KFN void ag_store_commands(struct agent *ag, const struct ring_dev *ring, uint64_t first, const struct command *cmds,
                           int n)
{
    (void)ag;
    /* The first one comes last: the proxy looks at nothing behind it, and so takes no cache line away from here that is
     * still being written. */
    for (int i = n - 1; i >= 0; i--) {
        const uint64_t index = first + (uint64_t)i;
        struct command *slot = &ring->slots[index & ring->mask];
        const uint64_t parity = ring_parity(ring->mask, index);

        /* Release: pairs with the acquires of ring_peek (proxy/ring.h), which takes no command before both are there,
         * and those behind the first after it. */
        __atomic_store_n(&slot->b, cmds[i].b | parity, __ATOMIC_RELAXED);
        __atomic_store_n(&slot->a, cmds[i].a | parity, i ? __ATOMIC_RELAXED : __ATOMIC_RELEASE);
    }
}

/* One token: its ids with what is dropped as -1, and of each pair the number among its expert's and (the first of its
 * rank) its rank's. Returns 1 + the place of the first bad index, or 0. */
struct routed {
    int32_t ids[KERNEL_MAX_TOPK], eidx[KERNEL_MAX_TOPK], ridx[KERNEL_MAX_TOPK];
};

KFN int route_token(const struct group_dev *g, const struct route_in *in, int t, int32_t *table, struct routed *out)
{
    const int K = in->topk_n, E = g->experts, L = g->local_experts;
    const int64_t first = (int64_t)t * K;
    int bad = 0;

    for (int k = 0; k < K; k++) {
        int64_t id = in->idx64 ? ((const int64_t *)in->topk)[first + k] : ((const int32_t *)in->topk)[first + k];
        int j = in->shared ? 0 : k;
        if (id < -1 || id >= E) {
            bad = bad ? bad : k + 1;
            id = -1;
        }
        if (id >= 0 && !g->mask[id / L])
            id = -1;
        while (j < k && out->ids[j] != id) /* of those before it, the one whose row it shares */
            j++;
        out->ids[k] = (int32_t)id;
        out->eidx[k] = id < 0 ? -1 : j < k ? out->eidx[j] : table[id]++;
        out->ridx[k] = -1;
        if (id < 0)
            continue;
        for (j = 0; j < k && (out->ids[j] < 0 || out->ids[j] / L != id / L); j++)
            ;
        if (j == k)
            out->ridx[k] = table[E + id / L]++;
    }
    return bad;
}

struct route_kept {
    char nothing;
};

/* Adds tokens [t0, t1) to `table`: table[e] pairs per expert, table[E + r] tokens per rank. */
KFN void ag_route_count(struct agent *ag, const struct group_dev *g, const struct route_in *in, int t0, int t1,
                        int32_t *table, struct route_kept *kept)
{
    struct routed routed;

    (void)ag;
    (void)kept;
    for (int t = t0; t < t1; t++)
        route_token(g, in, t, table, &routed);
}

/*
 * Fills ids, eidx, ridx and rord of the handle (params.h) for tokens [t0, t1); the numbers go on from what `table`
 * says. `kept` is NULL if nobody counted before. `bad` gets 1 + the place of the first index that is out of range; it
 * counts as dropped.
 */
KFN void ag_route_number(struct agent *ag, const struct group_dev *g, const struct handle_dev *h,
                         const struct route_in *in, int t0, int t1, int32_t *table, const struct route_kept *kept,
                         int64_t *bad)
{
    const int K = in->topk_n, L = g->local_experts;

    (void)ag;
    (void)kept;
    *bad = 0;
    for (int t = t0; t < t1; t++) {
        const int64_t first = (int64_t)t * K;
        struct routed r;
        const int wrong = route_token(g, in, t, table, &r);
        if (wrong && !*bad)
            *bad = first + wrong;
        for (int k = 0; k < K; k++) {
            int smaller = 0;
            for (int j = 0; j < K && r.ridx[k] >= 0; j++)
                smaller += r.ridx[j] >= 0 && r.ids[j] / L < r.ids[k] / L;
            h->ids[first + k] = r.ids[k];
            h->eidx[first + k] = r.eidx[k];
            h->ridx[first + k] = r.ridx[k];
            h->rord[first + k] = r.ridx[k] >= 0 ? smaller : -1;
        }
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random programs for epx.h against a model of its rules (model.h): every byte of every tensor, and every status.
 * usage: epx_random FIRST_SEED SEEDS [RANKS [NET]]   RANKS: 0 = 1 to 9, drawn; NET: between nodes, ofi:tcp if not given
 */
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rank.h"
#include "tests/lib/thread_boot.h"

int wrong(const struct rank *me, const char *file, int line, const char *format, ...)
{
    static atomic_int failures;
    char text[900];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    fprintf(stderr, "epx_random: seed %llu rank %d at step %d, %s:%d: %s\n", (unsigned long long)me->p->seed, me->rank,
            me->at, strrchr(file, '/') ? strrchr(file, '/') + 1 : file, line, text);
    if (!atomic_fetch_add(&failures, 1))
        plan_print(me->p, stderr);
    return -1;
}

static int run_complete(struct rank *me, const struct step *s)
{
    TRY(epx_complete(me->h[s->handle].handle, me->stream[me->p->handle[s->handle].group][s->stream]));
    return 0;
}

int run_sync(struct rank *me)
{
    for (int g = 0; g < me->p->ngroups; g++)
        for (int i = 0; i < 3 && me->active[g][me->rank]; i++)
            TRY(epx_stream_sync(me->group[g], me->stream[g][i]));
    for (int h = 0; h < me->p->nhandles; h++)
        if (me->h[h].staged)
            return 0;
    if (tensors_check(me))
        return -1;
    tensors_free(me);
    return 0;
}

static int run_step(struct rank *me, const struct step *s)
{
    struct handle_run *h = &me->h[s->handle];

    if (!me->active[me->p->handle[s->handle].group][me->rank] && s->kind < SYNC)
        return 0;
    switch (s->kind) {
    case UPDATE:
        return run_update(me, s);
    case DISPATCH:
        h->staged = s->staged && !s->busy;
        return run_dispatch(me, s);
    case COMBINE:
        h->staged = s->staged && !s->busy;
        return run_combine(me, s);
    case COMPLETE:
        h->staged = 0;
        return run_complete(me, s);
    case SYNC:
        return run_sync(me);
    default:
        return run_membership(me, s);
    }
}

epx_group_config group_config(const struct plan *p)
{
    epx_group_config c = EPX_GROUP_CONFIG_INIT;

    c.device = EPX_DEVICE_CPU;
    c.modes = p->modes;
    c.num_experts = p->E;
    c.max_tokens_per_rank = p->M;
    c.max_hidden_bytes = p->bytes;
    c.max_topk = p->K;
    c.layouts = EPX_LAYOUT_BIT(EPX_FLAT) | EPX_LAYOUT_BIT(EPX_EXPERT_MAJOR);
    c.max_recv_tokens = p->bounded ? p->R * p->M * p->K + p->L * 9 : 0;
    c.max_inflight = p->inflight;
    c.num_agents = p->agents;
    c.ranks_per_node = p->per_node;
    c.enable_mask = p->mask;
    c.timeout_ms = 60000;
    c.alloc_bytes = 256u << 20;
    c.ht_buffer_bytes = p->ht_buffer;
    c.ht_node_bytes = p->ht_node;
    memcpy(c.net, p->net, sizeof(c.net));
    return c;
}

static int open_rank(struct rank *me, epx_bootstrap *boot)
{
    const epx_group_config config = group_config(me->p);

    for (int g = 0; g < me->p->ngroups; g++) {
        TRY(epx_group_create(&me->group[g], boot, &config));
        if (open_handles(me, g))
            return -1;
    }
    return 0;
}

static int close_rank(struct rank *me)
{
    for (int i = 0; i < me->p->nhandles; i++) {
        routing_free(&me->h[i].routing);
        received_free(&me->h[i].received);
        me->h[i].idx = NULL;
    }
    tensors_free(me);
    for (int g = 0; g < me->p->ngroups; g++) {
        TRY(epx_group_destroy(me->group[g]));
        forget_handles(me, g);
    }
    return 0;
}

static int run_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    struct rank *me = calloc(1, sizeof(*me));

    (void)n;
    me->p = arg;
    me->rank = rank;
    me->d.state = workload_hash(me->p->seed, 100 + (uint64_t)rank);
    me->boot = boot;
    for (int i = 0; i < MOST_GROUPS * MOST_RANKS; i++)
        me->active[i / MOST_RANKS][i % MOST_RANKS] = 1;
    if (open_rank(me, boot))
        exit(1); /* the others would wait for this one */
    for (me->at = 0; me->at < me->p->nsteps; me->at++)
        if (run_step(me, &me->p->step[me->at]))
            exit(1);
    if (close_rank(me))
        exit(1);
    free(me);
    return 0;
}

int main(int argc, char **argv)
{
    const uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    const int count = argc > 2 ? atoi(argv[2]) : 1, ranks = argc > 3 ? atoi(argv[3]) : 0;
    struct plan *p = malloc(sizeof(*p));

    setvbuf(stderr, NULL, _IOLBF, 0);
    for (uint64_t seed = first; p && seed < first + (uint64_t)count; seed++) {
        plan_draw(p, seed, ranks, argc > 4 ? argv[4] : "ofi:tcp");
        if (getenv("EPX_TEST_PRINT")) {
            fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
            plan_print(p, stderr);
        }
        setenv("EPX_REGISTER", p->registered ? "1" : "0", 1);
        if (run_ranks(p->R, run_rank, p)) {
            fprintf(stderr, "epx_random: seed %llu FAILED\n", (unsigned long long)seed);
            return 1;
        }
    }
    free(p);
    printf("epx_random: %d programs from seed %llu: ok\n", count, (unsigned long long)first);
    return 0;
}

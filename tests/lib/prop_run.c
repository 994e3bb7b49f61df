/* SPDX-License-Identifier: Apache-2.0 */
/* Property tests: running a case with ranks as threads, and many cases. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "prop_actor.h"
#include "thread_boot.h"
#include "util/pause.h"

static long long env_number(const char *name, long long otherwise)
{
    const char *text = getenv(name);

    return text && *text ? strtoll(text, NULL, 0) : otherwise;
}

/* ---- A rank ------------------------------------------------------------------------------------------------------ */

static int run_updates(struct actor *actors, const struct prop_case *c)
{
    int rc = 0;

    for (int u = 0; !rc && u < c->updates; u++)
        rc = actors_update(actors, c, u);
    return rc;
}

static int tokens_per_rank(const struct prop_case *c)
{
    int most = 1;

    for (int i = 0; i < c->nhandles; i++)
        most = c->handle[i].w.max_tokens > most ? c->handle[i].w.max_tokens : most;
    return most + c->spare_tokens;
}

static epx_group_config group_config(const struct shared *s, int group)
{
    const struct prop_case *c = s->c;
    epx_group_config config = EPX_GROUP_CONFIG_INIT;

    config.device = test_device();
    config.modes = c->modes;
    config.num_experts = c->handle[0].w.experts;
    config.max_tokens_per_rank = tokens_per_rank(c);
    config.max_inflight = c->max_inflight;
    config.num_agents = c->num_agents;
    config.enable_mask = c->enable_mask;
    config.timeout_ms = c->timeout_ms ? c->timeout_ms : (int)env_number("EPX_TEST_TIMEOUT_MS", PROP_TIMEOUT_MS);
    config.ranks_per_node = c->ranks_per_node;
    snprintf(config.net, sizeof(config.net), "%s", c->net);
    config.alloc_bytes = config.device == EPX_DEVICE_CPU ? 256u << 20 : 64u << 20; /* a GPU's heap is there at once */
    config.layouts = EPX_LAYOUT_BIT(EPX_FLAT) | EPX_LAYOUT_BIT(EPX_EXPERT_MAJOR);
    config.ht_buffer_bytes = c->ht_buffer_bytes;
    config.ht_node_bytes = c->ht_node_bytes;
    config.max_recv_tokens = c->bounded ? s->max_recv[group] : 0;
    for (int i = group; i < c->nhandles; i += c->ngroups) {
        const struct prop_handle *h = &c->handle[i];
        if (h->recv_tensor) /* the receive buffer has room for it */
            config.ht_node_bytes = 0;
        int in = h->w.hidden * (int)tensor_element_size(h->w.dtype);
        int back = h->w.hidden * (int)tensor_element_size(h->result_dtype);
        int most = in > back ? in : back;

        config.max_hidden_bytes = most > config.max_hidden_bytes ? most : config.max_hidden_bytes;
        config.max_topk = h->w.topk > config.max_topk ? h->w.topk : config.max_topk;
    }
    return config;
}

/* A GPU has 32 queues for the streams of a process, and kernels in one queue may wait for each other: there, handles of
 * a group share two streams. `a` is the last of `number` + 1 actors. */
static int open_streams(struct actor *a, int number)
{
    const int want = a->p->streams == PROP_TWO_STREAMS ? 2 : a->p->streams == PROP_OWN_STREAM ? 1 : 0;

    for (int i = 0; i < want; i++) {
        for (struct actor *b = a - number; b < a && test_device() != EPX_DEVICE_CPU && !a->stream[i]; b++)
            if (b->group == a->group)
                a->stream[i] = b->stream[i];
        a->foreign[i] = a->stream[i] != NULL;
        if (!a->stream[i])
            TRY(a, epx_stream_create(a->group, &a->stream[i]));
    }
    return 0;
}

static int open_actor(struct actor *a, struct shared *s, int rank, int number, epx_group *group)
{
    epx_handle_config config = EPX_HANDLE_CONFIG_INIT;

    a->shared = s;
    a->p = &s->c->handle[number];
    a->rank = rank;
    a->number = number;
    a->group = group;
    a->tokens_per_rank = tokens_per_rank(s->c);
    a->rng.state = workload_hash(s->c->seed, 1000 + (uint64_t)rank * 8 + (uint64_t)number);
    config.mode = a->p->mode;
    config.layout = a->p->layout;
    config.topk = a->p->w.topk;
    config.expert_alignment = a->p->alignment;
    config.flags = a->p->flags;
    TRY(a, epx_handle_create(&a->handle, group, &config));
    if (open_streams(a, number))
        return -1;
    if (a->p->streams == PROP_TWO_STREAMS)
        TRY(a, epx_event_create(group, &a->event));
    return 0;
}

static int close_actor(struct actor *a, int ok)
{
    /* After a failure too: streams belong to whoever made them. */
    for (int i = 0; i < 2; i++) {
        const int own = a->stream[i] && !a->foreign[i];
        const epx_status status = own ? epx_stream_destroy(a->group, a->stream[i]) : EPX_OK;
        if (ok)
            TRY(a, status);
    }
    if (a->event && ok)
        TRY(a, epx_event_destroy(a->event));
    /* Half of the handles are left to the group. */
    if (a->handle && ok && prop_chance(&a->rng, 50))
        TRY(a, epx_handle_destroy(a->handle));
    return 0;
}

/* On a GPU memory may not be had while kernels of other ranks of the process wait for this one (docs/cuda.md): all have
 * theirs before the first kernel runs. */
static int meet(epx_bootstrap *boot, int n)
{
    char *all = calloc((size_t)n, 1);
    const char here = 1;
    const int rc = all ? boot->allgather(boot->context, &here, all, 1) : -1;

    free(all);
    return rc;
}

/* A process without a place: it asks for that of a rank. */
/* -1: one of them failed, or `rc` says that something has before. */
static int close_actors(struct actor *actors, const struct prop_case *c, int rc)
{
    for (int i = 0; actors && i < c->nhandles; i++)
        if (actors[i].group && close_actor(&actors[i], !rc))
            rc = -1;
    return rc;
}

static int run_spare(int spare, struct shared *s)
{
    const struct prop_case *c = s->c;
    const int rank = c->replaces[spare];
    struct actor *actors = calloc(PROP_MAX_HANDLES, sizeof(*actors));
    epx_group_config config = group_config(s, 0);
    epx_group *group = NULL;
    int rc = actors ? actors_await_ticket(s, workload_hash(c->seed, 77 + (uint64_t)spare)) : -1;

    if (!rc) {
        const epx_status status = epx_group_join(&group, s->ticket, rank, &config, 24 * c->timeout_ms);

        actors[0].shared = s;
        actors[0].rank = rank;
        /* Of two for one place, one is told. */
        rc = status == EPX_ERR_MISMATCH && c->spares > 1 && strstr(epx_last_error(), "another process has taken")
                 ? -1
                 : actor_status(&actors[0], "epx_group_join", status);
    }
    if (!rc && prop_hooks.joined)
        prop_hooks.joined(group);
    for (int i = 0; !rc && i < c->nhandles; i++)
        rc = open_actor(&actors[i], s, rank, i, group);
    if (!rc)
        rc = actors_joined(actors, c);
    if (group && prop_hooks.leaves)
        prop_hooks.leaves(rank, group);
    rc = close_actors(actors, c, rc);
    if (group && actor_status(&actors[0], "epx_group_destroy", epx_group_destroy(group)))
        rc = -1;
    free(actors);
    return rc;
}

/* Half of the ranks that are through do something else for up to a deadline, and then look at their group: nothing has
 * happened to it, whoever has ended meanwhile. */
static int linger(struct actor *a)
{
    const struct prop_case *c = a->shared->c;
    struct prop_rng own = {workload_hash(c->seed, 500 + (uint64_t)a->rank)};

    if (prop_chance(&own, 50))
        pause_ns((uint64_t)c->timeout_ms * 10000u * (uint64_t)(1 + prop_draw(&own, 100)));
    return actor_status(a, "epx_group_error", epx_group_error(a->group, NULL));
}

static int run_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    struct shared *s = arg;
    const struct prop_case *c = s->c;
    struct actor *actors;
    epx_group *groups[PROP_MAX_GROUPS] = {NULL};
    int rc;

    if (rank >= c->nranks)
        return run_spare(rank - c->nranks, s);
    actors = calloc(PROP_MAX_HANDLES, sizeof(*actors));
    rc = actors ? 0 : -1;

    for (int g = 0; !rc && g < c->ngroups; g++) {
        epx_group_config config = group_config(s, g);
        actors[0].shared = s;
        actors[0].rank = rank;
        rc = actor_status(&actors[0], "epx_group_create", epx_group_create(&groups[g], boot, &config));
    }
    if (!rc && c->spares)
        rc = actor_status(&actors[0], "epx_group_ticket", epx_group_ticket(groups[0], s->ticket, sizeof(s->ticket)));
    for (int i = 0; !rc && i < c->nhandles; i++)
        rc = open_actor(&actors[i], s, rank, i, groups[i % c->ngroups]);
    if (!rc && test_device() != EPX_DEVICE_CPU)
        rc = meet(boot, n);
    if (!rc) {
        rc = run_updates(actors, c);
        if ((rc && c->recover) || c->cleans)
            rc = actors_recover(actors, c);
    }
    if (!rc && c->lingers)
        rc = linger(&actors[0]);
    for (int g = 0; !rc && !c->may_fail && g < c->ngroups && g < c->nhandles; g++)
        rc = actors_check_stats(actors, c, g);
    if (prop_hooks.leaves)
        prop_hooks.leaves(rank, groups[0]);
    rc = close_actors(actors, c, rc);
    for (int g = 0; g < c->ngroups; g++)
        if (groups[g] && actor_status(&actors[0], "epx_group_destroy", epx_group_destroy(groups[g])))
            rc = -1;
    free(actors);
    return rc;
}

/* ---- A case ------------------------------------------------------------------------------------------------------ */

static int shared_init(struct shared *s)
{
    const struct prop_case *c = s->c;

    for (int u = 0; u <= PROP_MAX_UPDATES; u++) {
        if (u >= c->updates && (u < PROP_MAX_UPDATES || !c->recover))
            continue;
        for (int i = 0; i < c->nhandles; i++) {
            const struct prop_handle *h = &c->handle[i];
            struct workload *w = &s->w[u][i];

            *w = h->w;
            w->seed = workload_hash(w->seed, (uint64_t)u);
            if (oracle_route_from_workload(&s->route[u][i], w, tokens_per_rank(c), h->mode, h->layout, h->flags,
                                           h->alignment))
                return -1;
            s->route[u][i].ranks_per_node = c->ranks_per_node;
            s->route[u][i].node_of = c->uneven ? c->node_of : NULL;
            for (int r = 0; h->mode == EPX_HIGH_THROUGHPUT && r < c->nranks; r++) {
                struct oracle_recv recv;
                int *most = &s->max_recv[i % c->ngroups];

                if (oracle_recv_init(&recv, &s->route[u][i], r))
                    return -1;
                *most = recv.total > *most ? (int)recv.total : *most;
                oracle_recv_free(&recv);
            }
        }
    }
    return 0;
}

int prop_run_case_on(const struct prop_case *c, int (*ranks)(int n, prop_rank_fn fn, void *arg), char *error,
                     size_t bytes)
{
    struct shared *s = calloc(1, sizeof(*s));
    int rc = -1;

    snprintf(error, bytes, "no memory for the case");
    if (!s)
        return -1;
    s->c = c;
    s->error = error;
    s->error_bytes = bytes;
    if (shared_init(s) == 0) {
        error[0] = 0;
        setenv("EPX_REGISTER", c->registered ? "1" : "0", 1);
        rc = ranks(c->nranks, run_rank, s) ? -1 : 0;
        if (c->may_fail && !error[0])
            rc = 0;
        if (rc && !error[0])
            snprintf(error, bytes, "a rank failed without a word");
        unsetenv("EPX_REGISTER");
    }
    while (s->kept) {
        struct kept *next = s->kept->next;
        free(s->kept->memory);
        free(s->kept);
        s->kept = next;
    }
    for (int u = 0; u <= PROP_MAX_UPDATES; u++)
        for (int i = 0; i < PROP_MAX_HANDLES; i++)
            oracle_route_free(&s->route[u][i]);
    free(s);
    return rc;
}

int prop_run_case(const struct prop_case *c, char *error, size_t bytes)
{
    return prop_run_case_on(c, run_ranks, error, bytes);
}

/* ---- Many cases -------------------------------------------------------------------------------------------------- */

uint64_t prop_seed(uint64_t usual)
{
    return (uint64_t)env_number("EPX_TEST_SEED", (long long)usual);
}

double prop_scale(void)
{
    const char *text = getenv("EPX_TEST_SCALE");
    double scale = text ? atof(text) : 1;

    return scale > 0 ? scale : 1;
}

void prop_print_case(const struct prop_case *c)
{
    char text[400];

    fprintf(stderr,
            "  ranks %d groups %d updates %d pairs %d agents %d inflight %d spare %d bounded %d ht_buffer %llu/%llu "
            "mask %d "
            "registered %d "
            "modes %u\n",
            c->nranks, c->ngroups, c->updates, c->pairs, c->num_agents, c->max_inflight, c->spare_tokens, c->bounded,
            (unsigned long long)c->ht_buffer_bytes, (unsigned long long)c->ht_node_bytes, c->enable_mask, c->registered,
            c->modes);
    if (c->late)
        fprintf(stderr, "  rank %d comes late to operation %d of each handle, deadline %d ms\n", c->late - 1,
                c->late_from, c->timeout_ms);
    if (c->recover)
        fprintf(stderr, "  after a failure the ranks that are left go on\n");
    if (c->uneven) {
        fprintf(stderr, "  nodes of the ranks:");
        for (int r = 0; r < c->nranks; r++)
            fprintf(stderr, " %d", c->node_of[r]);
        fprintf(stderr, "\n");
    }
    for (int i = 0; i < c->nhandles; i++) {
        const struct prop_handle *h = &c->handle[i];
        fprintf(stderr,
                "  handle %d: mode %d layout %d align %d flags %u out %d scale %d round %d result %d weights %d idx %d "
                "src %d biases %d logfmt %d round_ranks %d backward %d staged %d/%d async %d streams %d alloc %d%% "
                "in_reach %d%% recv_tensor %d\n"
                "            %s\n",
                i, h->mode, h->layout, h->alignment, h->flags, h->out_dtype, h->out_scale_dtype, h->round_scale,
                h->result_dtype, h->weights, h->idx_out, h->src_out, h->biases, h->logfmt, h->round_ranks, h->backward,
                h->staged_dispatch, h->staged_combine, h->async, (int)h->streams, h->in_epx_alloc, h->in_reach,
                h->recv_tensor, workload_describe(&h->w, text, sizeof(text)));
    }
}

int prop_run(const char *program, const char *name, int cases, int modes, int max_ranks, prop_change_fn change)
{
    uint64_t first = prop_seed(1);
    long long scaled = (long long)(cases * prop_scale());
    long long count = env_number("EPX_TEST_CASES", scaled > 1 ? scaled : 1);
    char error[1200];

    for (uint64_t seed = first; seed < first + (uint64_t)count; seed++) {
        struct prop_case c;
        struct prop_rng rng = {workload_hash(seed, 0xc4a9e)};

        prop_draw_case(&c, seed, modes, max_ranks);
        if (change) {
            change(&c, &rng);
            prop_shrink(&c);
        }
        prop_widen(&c);
        if (prop_run_case(&c, error, sizeof(error)) == 0)
            continue;
        fprintf(stderr, "%s, %s: seed %llu failed: %s\n", program, name, (unsigned long long)seed, error);
        prop_print_case(&c);
        fprintf(stderr, "  again: EPX_TEST_SEED=%llu EPX_TEST_CASES=1 EPX_TEST_ONLY=%s %s\n", (unsigned long long)seed,
                name, program);
        return 1;
    }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Property tests: a group's statistics, and what ranks do after a failure that they may survive. */
#include <string.h>

#include "prop_actor.h"
#include "util/pause.h"

static int check_stat(struct actor *a, const char *name, uint64_t expected, uint64_t got)
{
    return expected == got ? 0
                           : actor_failure(a, "epx_stats.%s: expected %llu, got %llu", name,
                                           (unsigned long long)expected, (unsigned long long)got);
}

/* All operations of all handles of a group, when all of them went well. */
int actors_check_stats(struct actor *actors, const struct prop_case *c, int group)
{
    struct actor *first = &actors[group];
    epx_stats e = EPX_STATS_INIT, got = EPX_STATS_INIT;

    TRY(first, epx_group_stats(first->group, &got));
    for (int i = group; i < c->nhandles; i += c->ngroups) {
        const epx_stats *one = &actors[i].expected;
        e.rows_sent += one->rows_sent;
        e.rows_received += one->rows_received;
        e.rows_returned += one->rows_returned;
        e.bytes_peer += one->bytes_peer;
        e.ll_dispatches += one->ll_dispatches;
        e.ll_combines += one->ll_combines;
        e.ht_dispatches += one->ht_dispatches;
        e.ht_combines += one->ht_combines;
    }
    return check_stat(first, "rows_sent", e.rows_sent, got.rows_sent) ||
                   check_stat(first, "rows_received", e.rows_received, got.rows_received) ||
                   check_stat(first, "rows_returned", e.rows_returned, got.rows_returned) ||
                   check_stat(first, "bytes_peer", e.bytes_peer, got.bytes_peer) ||
                   check_stat(first, "ll_dispatches", e.ll_dispatches, got.ll_dispatches) ||
                   check_stat(first, "ll_combines", e.ll_combines, got.ll_combines) ||
                   check_stat(first, "ht_dispatches", e.ht_dispatches, got.ht_dispatches) ||
                   check_stat(first, "ht_combines", e.ht_combines, got.ht_combines)
               ? -1
               : 0;
}

/* ---- Going on without some --------------------------------------------------------------------------------------- */

static epx_status recover_group(epx_group *group, int cleans)
{
    if (prop_hooks.starts_over)
        prop_hooks.starts_over(group, cleans);
    return cleans ? epx_mask_clean(group, NULL) : epx_group_error_clear(group);
}

static struct {
    uint64_t ranks, rounds;
} recovered;

static struct {
    uint64_t processes, rounds;
} joined; /* only in simulations, on one thread */

void prop_recoveries(uint64_t *ranks, uint64_t *rounds)
{
    *ranks = __atomic_load_n(&recovered.ranks, __ATOMIC_RELAXED);
    *rounds = __atomic_load_n(&recovered.rounds, __ATOMIC_RELAXED);
}

/* Masks the rank that did not answer this one: the others learn of it in epx_group_error_clear. */
static int mask_the_culprits(struct actor *a, int32_t *mask)
{
    epx_error_info info = EPX_ERROR_INFO_INIT;
    epx_status status = epx_group_error(a->group, &info);

    if (epx_mask_query(a->group, mask, NULL) != EPX_OK)
        return actor_failure(a, "epx_mask_query: %s", epx_last_error());
    epx_stream_sync(a->group, NULL);
    /* A timeout or a network error names the peer at fault; EPX_ERR_PEER only says that some rank failed. */
    if ((status != EPX_ERR_TIMEOUT && strcmp(info.phase, "network") != 0) || info.peer < 0 || info.peer == a->rank)
        return 0;
    mask[info.peer] = 0;
    if (prop_hooks.masks)
        prop_hooks.masks(a->rank, info.peer);
    status = epx_mask_update(a->group, mask, NULL);
    return status == EPX_OK ? 0 : actor_failure(a, "epx_mask_update: %s", epx_last_error());
}

static int make_left_routes(struct actor *actors, const struct prop_case *c, const int32_t *mask)
{
    for (int i = 0; i < c->nhandles; i++) {
        struct actor *a = &actors[i];
        const struct prop_handle *h = a->p;

        if (oracle_route_from_workload(&a->left, &a->shared->w[PROP_MAX_UPDATES][i], a->tokens_per_rank, h->mode,
                                       h->layout, h->flags, h->alignment))
            return actor_failure(a, "no memory for the oracle");
        a->left.ranks_per_node = c->ranks_per_node;
        a->left.node_of = c->uneven ? c->node_of : NULL;
        memcpy(a->left.active, mask, (size_t)c->nranks * sizeof(*mask));
        a->failed = 0;
    }
    return 0;
}

/* Where processes join there is a second step, epx_mask_clean: a rank that is late, or was left out, may still be in
 * the first. Then both are told so. It is the same where ranks are late in epx_mask_clean, and others have recovered
 * since. */
static int recovery_status(struct actor *a, const char *call, epx_status status)
{
    if (status == EPX_ERR_MISMATCH && (a->shared->c->spares || a->shared->c->repeat) &&
        strstr(epx_last_error(), "different functions"))
        return -1;
    return actor_status(a, call, status);
}

/* One update with those that are there. */
static int go_on(struct actor *actors, const struct prop_case *c, int32_t *mask)
{
    struct actor *a = &actors[0];
    int rc = actor_status(a, "epx_group_error", epx_group_error(a->group, NULL));

    if (!rc)
        rc = actor_status(a, "epx_mask_query", epx_mask_query(a->group, mask, NULL));
    if (!rc)
        rc = actor_status(a, "epx_stream_sync", epx_stream_sync(a->group, NULL));
    if (!rc)
        rc = make_left_routes(actors, c, mask);
    if (!rc)
        rc = actors_update(actors, c, PROP_MAX_UPDATES);
    for (int i = 0; i < c->nhandles; i++)
        oracle_route_free(&actors[i].left);
    return rc;
}

/* Once more, when processes may have come that were late. */
static int clean_and_go_on(struct actor *actors, const struct prop_case *c, int32_t *mask)
{
    struct actor *a = &actors[0];
    int rc;

    a->shared->stage = 2;
    rc = recovery_status(a, "epx_mask_clean", recover_group(a->group, 1));
    if (!rc && prop_hooks.recovered)
        prop_hooks.recovered(a->group);
    return rc ? rc : go_on(actors, c, mask);
}

/* One call that recovers, and what follows. */
static int recover_once(struct actor *actors, const struct prop_case *c, int cleans, int32_t *mask)
{
    struct actor *a = &actors[0];
    const epx_status status = recover_group(a->group, cleans);

    if (status != EPX_OK && prop_hooks.not_recovered)
        prop_hooks.not_recovered(a->rank, status);
    if (recovery_status(a, cleans ? "epx_mask_clean" : "epx_group_error_clear", status))
        return -1;
    if (prop_hooks.recovered)
        prop_hooks.recovered(a->group);
    return go_on(actors, c, mask);
}

/* Low latency has masked a late rank, and would go on without it: clearing that error is local. A program that starts
 * over instead is no longer in step with those that go on, and says so. */
static int leave_the_step(struct actor *a)
{
    epx_error_info info = EPX_ERROR_INFO_INIT;

    if (epx_group_error(a->group, &info) != EPX_ERR_TIMEOUT || !strstr(info.message, "masked now"))
        return 0;
    return epx_group_abort(a->group, EPX_ERR_TIMEOUT) == EPX_OK
               ? 0
               : actor_failure(a, "epx_group_abort: %s", epx_last_error());
}

/* As a program that does not give up. */
static int recover_often(struct actor *actors, const struct prop_case *c, int32_t *mask)
{
    struct actor *a = &actors[0];
    int rc = -1;

    if (prop_hooks.recovers)
        prop_hooks.recovers(a->rank);
    for (int i = 0; rc && i < c->repeat && !__atomic_load_n(&a->shared->lock, __ATOMIC_RELAXED); i++) {
        if (i && leave_the_step(a))
            break;
        rc = recover_once(actors, c, c->cleans && !i, mask);
    }
    if (rc)
        return rc;
    if (prop_hooks.through)
        prop_hooks.through(a->rank, mask);
    __atomic_fetch_add(&recovered.ranks, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&recovered.rounds, (uint64_t)c->pairs, __ATOMIC_RELAXED);
    return 0;
}

/* As a program that does not give up when it is told that the others continue without it: it asks again, some time
 * later, when they may have ended. */
static epx_status clear_error(struct actor *a)
{
    const epx_status status = recover_group(a->group, 0);
    struct prop_rng own = {workload_hash(a->shared->c->seed, 900 + (uint64_t)a->rank)};

    if (status != EPX_ERR_PEER || !strstr(epx_last_error(), "continues without") || !prop_hooks.not_recovered)
        return status;
    prop_hooks.not_recovered(a->rank, status);
    pause_ns((uint64_t)a->shared->c->timeout_ms * 100000u * (uint64_t)(1 + prop_draw(&own, 100)));
    return recover_group(a->group, 0);
}

/* 0: this rank is through, or ended in a way that faults excuse. */
int actors_recover(struct actor *actors, const struct prop_case *c)
{
    struct actor *a = &actors[0];
    int32_t *mask = tensor_memory(a->group, (size_t)c->nranks * sizeof(*mask)); /* written by a kernel */
    int rc = !mask ? actor_failure(a, "no memory") : c->cleans ? 0 : mask_the_culprits(a, mask);

    if (c->repeat) {
        rc = rc ? rc : recover_often(actors, c, mask);
        tensor_memory_free(a->group, mask);
        return rc;
    }
    if (!rc)
        rc = recovery_status(a, "epx_group_error_clear", clear_error(a));
    if (!rc && prop_hooks.recovered)
        prop_hooks.recovered(a->group);
    if (!rc) {
        __atomic_fetch_add(&recovered.ranks, 1, __ATOMIC_RELAXED);
        rc = go_on(actors, c, mask);
    }
    if (!rc)
        __atomic_fetch_add(&recovered.rounds, (uint64_t)c->pairs, __ATOMIC_RELAXED);
    if (!rc && c->spares)
        rc = clean_and_go_on(actors, c, mask);
    tensor_memory_free(a->group, mask);
    return rc;
}

/* ---- A process that joins ---------------------------------------------------------------------------------------- */

int actors_await_ticket(struct shared *s, uint64_t draw)
{
    const uint64_t step = (uint64_t)s->c->timeout_ms * 1000000u / 16;

    for (int i = 0; i < 64 && !s->ticket[0]; i++)
        pause_ns(step);
    pause_ns(1 + step * (draw % 20));
    return s->ticket[0] ? 0 : -1;
}

int actors_joined(struct actor *actors, const struct prop_case *c)
{
    struct actor *a = &actors[0];
    const int early = a->shared->stage < 2; /* no member comes so far without this process */
    int32_t *mask = tensor_memory(a->group, (size_t)c->nranks * sizeof(*mask));
    int rc = mask ? 0 : actor_failure(a, "no memory");

    joined.processes++;
    if (!rc)
        rc = go_on(actors, c, mask);
    if (!rc)
        joined.rounds += (uint64_t)c->pairs;
    if (!rc && early)
        rc = clean_and_go_on(actors, c, mask);
    tensor_memory_free(a->group, mask);
    return rc;
}

void prop_joins(uint64_t *processes, uint64_t *rounds)
{
    *processes = joined.processes;
    *rounds = joined.rounds;
}

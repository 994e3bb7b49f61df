/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that are masked, and become active again. */
#include <stdlib.h>
#include <time.h>

#include "steps.h"

int has_masked(const struct rank *me, int group)
{
    for (int r = 0; r < me->p->R; r++)
        if (!me->active[group][r])
            return 1;
    return 0;
}

static int sync_all(struct rank *me, int group)
{
    for (int i = 0; i < 3; i++)
        TRY(epx_stream_sync(me->group[group], me->stream[group][i]));
    return 0;
}

/* All ranks of the program. */
static int meet(struct rank *me)
{
    char from[MOST_RANKS], byte = 1;

    CHECK(!me->boot->allgather(me->boot->context, &byte, from, 1));
    return 0;
}

static int check_mask(struct rank *me, const struct step *s, const int *expected)
{
    const int group = plan_of(me, s)->group;
    struct tensor *t = packed(me, s, "mask", EPX_INT32, 1, me->p->R, 0, 0);

    CHECK(t);
    for (int r = 0; r < me->p->R; r++)
        tensor_expect_int(t, r, expected[r]);
    TRY(epx_mask_query(me->group[group], t->t.data, stream_of(me, s)));
    return sync_all(me, group);
}

static int mask_rank(struct rank *me, const struct step *s, int32_t active)
{
    const int group = plan_of(me, s)->group;
    int32_t mask[MOST_RANKS];

    for (int r = 0; r < me->p->R; r++)
        mask[r] = 1;
    mask[s->rank] = me->active[group][s->rank] = active;
    TRY(epx_mask_update(me->group[group], mask, stream_of(me, s)));
    return check_mask(me, s, me->active[group]);
}

/* The rank that is masked is idle: it has done all that it was part of. */
static int run_mask(struct rank *me, const struct step *s)
{
    const int group = plan_of(me, s)->group;

    if (sync_all(me, group) || meet(me))
        return -1;
    if (me->rank != s->rank)
        return mask_rank(me, s, 0) || (s->again && mask_rank(me, s, 1)) ? -1 : 0;
    me->active[group][s->rank] = s->again;
    return 0;
}

/* High throughput before the ranks have agreed. */
static int fail_high(struct rank *me, const struct step *s)
{
    const struct handle_plan *h = plan_of(me, s);
    struct tensor *idx = packed(me, s, "topk_idx", EPX_INT32, 2, 1, h->K, 0);
    epx_status status;

    CHECK(idx);
    for (int k = 0; k < h->K; k++)
        tensor_give_int(idx, k, -1);
    status = epx_handle_update(me->h[s->handle].handle, of(idx), NULL, stream_of(me, s));
    if (status == EPX_OK)
        status = epx_stream_sync(me->group[h->group], stream_of(me, s));
    CHECK(status != EPX_OK);
    return 0;
}

static int run_clear(struct rank *me, const struct step *s)
{
    const int group = plan_of(me, s)->group;
    const int fails =
        s->counts && !is_low(plan_of(me, s)); /* what others have under way would end with it: they meet */
    int all[MOST_RANKS];

    for (int r = 0; r < me->p->R; r++)
        all[r] = 1;
    if ((me->active[group][me->rank] && sync_all(me, group)) || (fails && meet(me)))
        return -1;
    if (!me->active[group][me->rank])
        return 0;
    if (fails && fail_high(me, s))
        return -1;
    if (!s->again) {
        TRY(epx_group_error_clear(me->group[group]));
        return check_mask(me, s, me->active[group]);
    }
    TRY(epx_mask_clean_active(me->group[group], stream_of(me, s)));
    return check_mask(me, s, all);
}

/* ---- Replacement ------------------------------------------------------------------------------------------------- */

/* A rank ends, and another begins in its place, here in the same thread. */
static int replace(struct rank *me, int group, const char *ticket)
{
    const epx_group_config config = group_config(me->p);

    for (int i = 0; i < me->p->nhandles; i++)
        if (me->p->handle[i].group == group)
            me->h[i].idx = NULL;
    if (run_sync(me))
        return -1;
    TRY(epx_group_destroy(me->group[group]));
    forget_handles(me, group);
    if (meet(me))
        return -1;
    TRY(epx_group_join(&me->group[group], ticket, me->rank, &config, 0));
    return open_handles(me, group);
}

/* The others: until it is there. */
static int admit(struct rank *me, const struct step *s)
{
    const int group = plan_of(me, s)->group;
    int32_t *mask = calloc((size_t)me->p->R, sizeof(*mask));

    CHECK(mask && !meet(me));
    for (int missing = 1; missing;) {
        const struct timespec pause = {0, 2000000};

        TRY(epx_mask_clean(me->group[group], stream_of(me, s)));
        TRY(epx_mask_query(me->group[group], mask, stream_of(me, s)));
        if (sync_all(me, group))
            return -1;
        missing = !mask[s->rank];
        nanosleep(&pause, NULL);
    }
    free(mask);
    return 0;
}

static int run_join(struct rank *me, const struct step *s)
{
    const int group = plan_of(me, s)->group;
    char *ticket = malloc(EPX_TICKET_BYTES);
    int rc;

    CHECK(ticket);
    TRY(epx_group_ticket(me->group[group], ticket, EPX_TICKET_BYTES));
    if (sync_all(me, group) || meet(me))
        return -1;
    rc = me->rank == s->rank ? replace(me, group, ticket) : admit(me, s);
    free(ticket);
    return rc;
}

int run_membership(struct rank *me, const struct step *s)
{
    const int group = plan_of(me, s)->group;

    if (s->kind == MASK)
        return run_mask(me, s);
    if (s->kind == JOIN)
        return run_join(me, s);
    if (s->kind == CLEAR)
        return run_clear(me, s);
    if ((me->active[group][me->rank] && sync_all(me, group)) || (s->again && meet(me)))
        return -1;
    TRY(epx_mask_clean(me->group[group], stream_of(me, s)));
    for (int r = 0; r < me->p->R; r++)
        me->active[group][r] = 1;
    return check_mask(me, s, me->active[group]);
}

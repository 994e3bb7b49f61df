/* SPDX-License-Identifier: Apache-2.0 */
/* Handles: over memory of the library, of the caller, or over a copy of that. */
#include <stdlib.h>
#include <string.h>

#include "steps.h"

static epx_handle_config config_of(const struct rank *me, int number)
{
    const struct handle_plan *h = &me->p->handle[number];
    epx_handle_config c = EPX_HANDLE_CONFIG_INIT;

    c.mode = h->mode;
    c.layout = h->layout;
    c.topk = h->K;
    c.expert_alignment = h->alignment;
    c.flags = h->flags;
    c.drop_rows = model_drop(me->p, h, me->rank);
    return c;
}

/* Room for the tables of a handle. */
static int find_memory(struct rank *me, int number, epx_handle_config *c)
{
    size_t bytes = 0;

    TRY(epx_handle_memory(me->group[me->p->handle[number].group], c, &bytes));
    CHECK(!posix_memalign(&c->memory, 16, bytes + 16));
    memset(c->memory, 0x5a, bytes);
    c->memory_bytes = bytes;
    return 0;
}

int open_handles(struct rank *me, int group)
{
    for (int i = 1; i < 3; i++)
        TRY(epx_stream_create(me->group[group], &me->stream[group][i]));
    for (int i = 0; i < me->p->nhandles; i++) {
        epx_handle_config c = config_of(me, i);

        if (me->p->handle[i].group != group)
            continue;
        if (chance(&me->d, 40) && find_memory(me, i, &c))
            return -1;
        me->h[i].memory = c.memory;
        TRY(epx_handle_create(&me->h[i].handle, me->group[group], &c));
    }
    return 0;
}

void forget_handles(struct rank *me, int group)
{
    for (int i = 0; i < me->p->nhandles; i++)
        if (me->p->handle[i].group == group) {
            free(me->h[i].memory);
            me->h[i].memory = NULL;
        }
}

int move_handle(struct rank *me, int number)
{
    struct handle_run *run = &me->h[number];
    const int group = me->p->handle[number].group;
    epx_handle_config c = config_of(me, number);

    if (!run->memory || is_low(&me->p->handle[number]) || !chance(&me->d, 25))
        return 0;
    for (int i = 0; i < 3; i++)
        TRY(epx_stream_sync(me->group[group], me->stream[group][i]));
    if (find_memory(me, number, &c))
        return -1;
    memcpy(c.memory, run->memory, c.memory_bytes);
    TRY(epx_handle_destroy(run->handle));
    free(run->memory);
    run->memory = c.memory;
    TRY(epx_handle_create(&run->handle, me->group[group], &c));
    return 0;
}

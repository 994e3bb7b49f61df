/* SPDX-License-Identifier: Apache-2.0 */
#include "group/region.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util/env.h"
#include "util/log.h"
#include "util/status.h"

enum {
    EXPORT_WORDS = (int)(sizeof(struct heap_export) / sizeof(uint64_t)),
    /* A full table lets go of a region that so many uses of others have passed by: mapping costs far more than a copy. */
    UNUSED = 4 * LENT_REGIONS
};
EPX_STATIC_ASSERT(sizeof(struct heap_export) % sizeof(uint64_t) == 0, "copied by words");

/* All words are read and written atomically: peers look at any time. */
struct notice {
    uint64_t offer; /* 0 = none; never the same twice */
    uint64_t words[EXPORT_WORDS];
};

struct lend_board {
    uint64_t changes;
    uint64_t pad[7];
    struct notice notice[LENT_REGIONS];
    uint64_t taken[]; /* [R][LENT_REGIONS]: which offer of each rank this one has mapped */
};

struct lent {
    uint64_t id; /* 0 = free */
    uint64_t base, bytes;
    uint64_t offer; /* 0 = the device refused to export it */
    uint64_t used;  /* when */
    int everybody;  /* all peers have it */
    int captured;   /* a graph may post it again */
};

struct borrowed {
    uint64_t offer; /* that was taken, or could not be; 0 = none */
    int open;
    void *base;
    struct heap_export region;
};

struct peer {
    int rank;
    uint64_t changes; /* seen */
    struct heap_export export;
    struct lend_board *board;
    struct borrowed borrowed[LENT_REGIONS];
};

struct lend {
    struct heap memory;
    struct lend_board *board;
    uint64_t *table; /* device memory */
    struct peer *peers;
    int npeers;
    int shared;   /* a peer lives in this process */
    int asked;    /* EPX_REGISTER=1: lend also then */
    int possible; /* every member of the node has a board, and may be lent to */
    struct lent lent[LENT_REGIONS];
    uint64_t offers, clock;
    int turn; /* which region is looked at next, whether its memory is still there */
    /* A region that is to make room: once `idle` has happened, no operation reads it. */
    struct device_event *idle;
    int leaving;           /* -1 = none */
    uint64_t leaving_used; /* as it was then */
};

/* Pairs with publish(). */
static uint64_t look(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* What was written before is visible to who looks. */
static void publish(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static uint64_t *taken_of(const struct lend_board *board, int lender, int region)
{
    return (uint64_t *)(uintptr_t)&board->taken[(size_t)lender * LENT_REGIONS + (size_t)region];
}

static epx_status table_set(struct epx_group *group, int rank, int region, uint64_t address)
{
    uint64_t *at = group->lend->table + (size_t)rank * LENT_REGIONS + region;

    return group->device->ops->copy(group->device, at, &address, sizeof(address));
}

/* ---- Begin and end ---------------------------------------------------------------------------------------------- */

epx_status lend_create(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    const size_t R = (size_t)group->nranks, words = R * LENT_REGIONS;
    const int asked = (int)env_int("EPX_REGISTER", -1, 0, 1);
    struct lend *lend;
    void *table;
    epx_status status;

    if (asked < 0 ? !(ops->caps & DEVICE_LENDS) : !asked)
        return EPX_OK;
    lend = group->lend = calloc(1, sizeof(*lend));
    if (!lend)
        return fail(EPX_ERR_MEMORY, "epx_group_create: no memory to lend from");
    lend->leaving = -1;
    lend->asked = asked > 0;
    for (int r = 0; r < group->nranks; r++)
        lend->npeers += r != group->rank && !group->remote[r];
    lend->peers = calloc((size_t)lend->npeers + 1, sizeof(*lend->peers));
    if (!lend->peers)
        return fail(EPX_ERR_MEMORY, "epx_group_create: no memory for what %d ranks lend", lend->npeers);
    lend->npeers = 0; /* until they are met */
    status = ops->mem_alloc(group->device, words * sizeof(uint64_t), &table);
    lend->table = table;
    if (status == EPX_OK)
        status = ops->event_create(group->device, &lend->idle);
    /* A memory file, whatever the device: the node's ranks may map those of each other. */
    if (status == EPX_OK)
        status = cpu_device_ops.heap_create(NULL, sizeof(*lend->board) + words * sizeof(uint64_t), &lend->memory);
    lend->board = lend->memory.base;
    return status;
}

void lend_destroy(struct epx_group *group)
{
    struct lend *lend = group->lend;
    const struct device_ops *ops = group->device->ops;

    if (!lend)
        return;
    for (int i = 0; i < lend->npeers; i++) {
        struct peer *peer = &lend->peers[i];

        for (int e = 0; e < LENT_REGIONS; e++)
            if (peer->borrowed[e].open)
                ops->region_close(group->device, &peer->borrowed[e].region, peer->borrowed[e].base, 0);
        if (peer->board)
            cpu_device_ops.heap_close(NULL, &peer->export, peer->board);
    }
    if (lend->memory.base)
        cpu_device_ops.heap_destroy(NULL, &lend->memory);
    if (lend->idle)
        ops->event_destroy(group->device, lend->idle);
    if (lend->table)
        ops->mem_free(group->device, lend->table);
    free(lend->peers);
    free(lend);
    group->lend = NULL;
}

struct heap_export lend_board(const struct epx_group *group)
{
    static const struct heap_export none;

    return group->lend ? group->lend->memory.export : none;
}

void lend_meet(struct epx_group *group, int rank, const struct heap_export *board)
{
    struct lend *lend = group->lend;
    struct peer *peer;
    void *base = NULL;

    if (!lend || rank == group->rank)
        return;
    peer = &lend->peers[lend->npeers++];
    peer->rank = rank;
    peer->export = *board;
    lend->shared |= board->pid == (int64_t)getpid();
    if (board->bytes && cpu_device_ops.heap_open(NULL, board, &base) != EPX_OK)
        log_line(LOG_INFO, "nothing is lent to rank %d: %s", rank, epx_last_error());
    peer->board = base;
}

void lend_members(struct epx_group *group)
{
    struct lend *lend = group->lend;

    if (!lend)
        return;
    lend->possible = lend->asked || !lend->shared;
    for (int i = 0; i < lend->npeers; i++)
        lend->possible &= lend->peers[i].board || group->map.out[lend->peers[i].rank];
    for (int e = 0; e < LENT_REGIONS; e++)
        lend->lent[e].everybody = 0;
}

const uint64_t *lend_table(const struct epx_group *group)
{
    return group->lend ? group->lend->table : NULL;
}

/* ---- Borrowing -------------------------------------------------------------------------------------------------- */

static void give_back(struct epx_group *group, struct peer *peer, int e)
{
    struct borrowed *b = &peer->borrowed[e];

    publish(taken_of(group->lend->board, peer->rank, e), 0);
    /* The lender's operations that posted it are over, and so are this rank's readings. Unmapping may wait for what runs
     * here, which must not wait in turn for another rank of this process. */
    if (b->open)
        group->device->ops->region_close(group->device, &b->region, b->base, !group->lend->shared);
    b->open = 0;
    b->offer = 0;
}

/* 0: the notice is being changed; `changes` will say so again. */
static int read_notice(const struct notice *notice, uint64_t offer, struct heap_export *region)
{
    uint64_t words[EXPORT_WORDS];

    for (int i = 0; i < EXPORT_WORDS; i++)
        words[i] = __atomic_load_n(&notice->words[i], __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* pairs with the one in write_notice() */
    if (__atomic_load_n(&notice->offer, __ATOMIC_RELAXED) != offer)
        return 0;
    memcpy(region, words, sizeof(*region));
    return 1;
}

static void borrow(struct epx_group *group, struct peer *peer, int e, uint64_t offer)
{
    struct borrowed *b = &peer->borrowed[e];
    epx_status status;

    if (!read_notice(&peer->board->notice[e], offer, &b->region))
        return;
    b->offer = offer; /* once is enough, also if it cannot be had */
    status = group->device->ops->region_open(group->device, &b->region, &b->base);
    b->open = status == EPX_OK;
    if (status == EPX_OK)
        status = table_set(group, peer->rank, e, (uint64_t)(uintptr_t)b->base);
    if (status == EPX_OK)
        publish(taken_of(group->lend->board, peer->rank, e), offer);
    else
        log_line(LOG_INFO, "memory of rank %d is not read where it is: %s", peer->rank, epx_last_error());
}

static int captures(struct epx_group *group, struct device_stream *stream)
{
    return group->device->ops->stream_captures(group->device, stream ? stream : group->default_stream);
}

void lend_look(struct epx_group *group, struct device_stream *stream)
{
    struct lend *lend = group->lend;

    for (int i = 0; lend && i < lend->npeers; i++) {
        struct peer *peer = &lend->peers[i];
        const uint64_t changes = peer->board ? look(&peer->board->changes) : 0;

        if (changes == peer->changes)
            continue;
        if (captures(group, stream)) /* mapping is not allowed now */
            return;
        peer->changes = changes;
        for (int e = 0; e < LENT_REGIONS; e++) {
            const uint64_t offer = look(&peer->board->notice[e].offer);

            if (offer == peer->borrowed[e].offer)
                continue;
            give_back(group, peer, e);
            if (offer)
                borrow(group, peer, e, offer);
        }
    }
}

/* ---- Lending ---------------------------------------------------------------------------------------------------- */

static void changed(struct lend *lend)
{
    publish(&lend->board->changes, lend->board->changes + 1);
}

static void withdraw(struct lend *lend, int e)
{
    publish(&lend->board->notice[e].offer, 0);
    if (lend->lent[e].offer)
        changed(lend);
    memset(&lend->lent[e], 0, sizeof(lend->lent[e]));
}

static void write_notice(struct lend *lend, int e, const struct heap_export *region, uint64_t offer)
{
    struct notice *notice = &lend->board->notice[e];
    uint64_t words[EXPORT_WORDS];

    memcpy(words, region, sizeof(words));
    __atomic_thread_fence(__ATOMIC_RELEASE); /* who sees a new word sees that the last offer has ended */
    for (int i = 0; i < EXPORT_WORDS; i++)
        __atomic_store_n(&notice->words[i], words[i], __ATOMIC_RELAXED);
    publish(&notice->offer, offer);
    changed(lend);
}

/* The region that was longest not used, of those that no graph may post; -1 = none. */
static int oldest(const struct lend *lend)
{
    int found = -1;

    for (int e = 0; e < LENT_REGIONS; e++)
        if (!lend->lent[e].captured && (found < 0 || lend->lent[e].used < lend->lent[found].used))
            found = e;
    return found;
}

/* Chooses a region that is to make room, and marks in the order of operations where its last use is over. */
static void begin_leaving(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    struct lend *lend = group->lend;
    const int e = oldest(lend);

    if (e < 0 || lend->lent[e].used + UNUSED > lend->clock || !group->last_stream ||
        ops->stream_captures(group->device, group->last_stream) ||
        ops->event_record(group->device, lend->idle, group->last_stream) != EPX_OK)
        return;
    lend->leaving = e;
    lend->leaving_used = lend->lent[e].used;
}

/* A place for one region more, or -1: not now. */
static int make_room(struct epx_group *group)
{
    struct lend *lend = group->lend;
    const int e = lend->leaving;

    for (int i = 0; i < LENT_REGIONS; i++)
        if (!lend->lent[i].id)
            return i;
    for (int i = 0; i < LENT_REGIONS; i++)
        if (!lend->lent[i].offer) /* refused */
            return i;
    if (e < 0) {
        begin_leaving(group);
        return -1;
    }
    if (group->device->ops->event_query(group->device, lend->idle) != EPX_OK)
        return -1;
    lend->leaving = -1;
    if (lend->lent[e].used != lend->leaving_used || lend->lent[e].captured)
        return -1;
    withdraw(lend, e);
    return e;
}

static void offer(struct epx_group *group, const void *data, uint64_t id)
{
    struct lend *lend = group->lend;
    const int e = make_room(group);
    struct heap_export region;
    epx_status status;

    if (e < 0)
        return;
    withdraw(lend, e);
    lend->lent[e].id = id;
    lend->lent[e].used = lend->clock;
    status = group->device->ops->region_export(group->device, data, &region);
    if (status == EPX_OK)
        status = table_set(group, group->rank, e, region.address);
    if (status != EPX_OK) {
        log_line(LOG_INFO, "rows at %p are copied: %s", data, epx_last_error());
        return;
    }
    /* What was there before has been freed. */
    for (int i = 0; i < LENT_REGIONS; i++)
        if (lend->lent[i].offer && lend->lent[i].base < region.address + region.bytes &&
            region.address < lend->lent[i].base + lend->lent[i].bytes)
            withdraw(lend, i);
    lend->lent[e].base = region.address;
    lend->lent[e].bytes = region.bytes;
    lend->lent[e].offer = ++lend->offers;
    write_notice(lend, e, &region, lend->lent[e].offer);
}

/* One region per call: memory that was freed is not kept by those who have mapped it. */
static void check_one(struct epx_group *group)
{
    struct lend *lend = group->lend;
    const int e = lend->turn;

    lend->turn = (e + 1) % LENT_REGIONS;
    if (lend->lent[e].offer && lend->lent[e].base &&
        group->device->ops->region_id(group->device, (const void *)(uintptr_t)lend->lent[e].base) != lend->lent[e].id)
        withdraw(lend, e);
}

static int everybody_has(struct epx_group *group, int e)
{
    struct lend *lend = group->lend;
    struct lent *lent = &lend->lent[e];

    for (int i = 0; i < lend->npeers && !lent->everybody; i++) {
        const struct peer *peer = &lend->peers[i];

        if (!group->map.out[peer->rank] && look(taken_of(peer->board, group->rank, e)) != lent->offer)
            return 0;
    }
    lent->everybody = 1;
    return 1;
}

int lend_find(struct epx_group *group, const void *data, uint64_t bytes, struct device_stream *stream, uint64_t *offset)
{
    struct lend *lend = group->lend;
    const uint64_t at = (uint64_t)(uintptr_t)data;
    struct lent *lent;
    uint64_t id;
    int e = 0, capture;

    *offset = 0;
    if (!lend || !lend->possible || !bytes)
        return 0;
    capture = captures(group, stream);
    if (!capture)
        check_one(group);
    id = group->device->ops->region_id(group->device, data);
    if (!id)
        return 0;
    lend->clock++;
    while (e < LENT_REGIONS && lend->lent[e].id != id)
        e++;
    if (e == LENT_REGIONS) {
        if (!capture)
            offer(group, data, id);
        return 0;
    }
    lent = &lend->lent[e];
    lent->used = lend->clock;
    if (!lent->offer || at < lent->base || at - lent->base > lent->bytes || bytes > lent->bytes - (at - lent->base) ||
        !everybody_has(group, e))
        return 0;
    lent->captured |= capture;
    *offset = at - lent->base;
    return e + 1;
}

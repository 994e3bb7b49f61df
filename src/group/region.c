/* SPDX-License-Identifier: Apache-2.0 */
#include "group/region.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util/env.h"
#include "util/log.h"
#include "util/pause.h"
#include "util/status.h"

enum {
    EXPORT_WORDS = (int)(sizeof(struct heap_export) / sizeof(uint64_t)),
    /* When all slots are used, a region is evicted once other regions were used this often since its last use:
     * importing costs far more than a copy. */
    EVICT_AFTER_USES = 4 * REGION_SLOTS,
    /* How long, and how often, a capture looks whether all peers have imported a region. */
    CAPTURE_WAIT_NS = 1000000000,
    CAPTURE_POLL_NS = 50000
};
EPX_STATIC_ASSERT(sizeof(struct heap_export) % sizeof(uint64_t) == 0, "copied by words");

/* All words are read and written atomically: peers read them at any time. */
struct region_slot {
    uint64_t generation; /* 0 = empty; never the same twice */
    uint64_t words[EXPORT_WORDS];
};

struct region_directory {
    uint64_t changes;
    uint64_t pad[7];
    struct region_slot slot[REGION_SLOTS];
    uint64_t imported[]; /* [R][REGION_SLOTS]: the generation in each slot of each rank that this rank has imported */
};

struct exported_region {
    uint64_t id; /* 0 = free */
    uint64_t base, bytes;
    uint64_t generation; /* 0 = the device refused to export it */
    uint64_t used;       /* regions.clock at its last use */
    int by_all;          /* all peers have imported it */
    int captured;        /* a graph may use it again */
};

struct imported_region {
    uint64_t generation; /* that was imported, or failed to be; 0 = none */
    int open;
    void *base;
    struct heap_export region;
};

struct peer {
    int rank;
    uint64_t changes; /* seen */
    struct heap_export export;
    struct region_directory *directory;
    struct imported_region imported[REGION_SLOTS];
};

struct regions {
    struct heap memory;
    struct region_directory *directory;
    uint64_t *table; /* device memory */
    struct peer *peers;
    int npeers;
    int same_process; /* a peer is a rank of this process */
    int asked;        /* EPX_REGISTER=1: share regions even then */
    int possible;     /* every member of the node has a directory */
    struct exported_region exported[REGION_SLOTS];
    uint64_t generations, clock;
    int turn;  /* the slot that is checked next for freed memory */
    int alone; /* peers have not come while a capture waited for them */
    /* The slot that is being evicted: once `idle` has happened, no operation reads its region. */
    struct device_event *idle;
    int evicting;           /* -1 = none */
    uint64_t evicting_used; /* exported_region.used when the eviction began */
};

/* Pairs with store_release(). */
static uint64_t load_acquire(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* Everything written before is visible to a reader of the new value: pairs with load_acquire(). */
static void store_release(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static uint64_t *imported_word(const struct region_directory *directory, int exporter, int region)
{
    return (uint64_t *)(uintptr_t)&directory->imported[(size_t)exporter * REGION_SLOTS + (size_t)region];
}

static epx_status table_set(struct epx_group *group, int rank, int region, uint64_t address)
{
    uint64_t *at = group->regions->table + (size_t)rank * REGION_SLOTS + region;

    return group->device->ops->copy(group->device, at, &address, sizeof(address));
}

/* ---- Create and destroy --------------------------------------------------------------------------------------- */

epx_status regions_create(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    const size_t R = (size_t)group->nranks, words = R * REGION_SLOTS;
    const int asked = (int)env_int("EPX_REGISTER", -1, 0, 1);
    struct regions *regions;
    void *table;
    epx_status status;

    if (group->fabric || (asked < 0 ? !(ops->caps & DEVICE_EXPORTS_REGIONS) : !asked))
        return EPX_OK; /* ranks of other hosts could not map the directory */
    regions = group->regions = calloc(1, sizeof(*regions));
    if (!regions)
        return fail(EPX_ERR_MEMORY, "%s: out of memory for the region directory", group->call);
    regions->evicting = -1;
    regions->asked = asked > 0;
    for (int r = 0; r < group->nranks; r++)
        regions->npeers += r != group->rank && !group->remote[r];
    regions->peers = calloc((size_t)regions->npeers + 1, sizeof(*regions->peers));
    if (!regions->peers)
        return fail(EPX_ERR_MEMORY, "%s: out of memory for the regions of %d peers", group->call, regions->npeers);
    regions->npeers = 0; /* regions_add_peer() counts them */
    status = ops->mem_alloc(group->device, words * sizeof(uint64_t), &table);
    regions->table = table;
    if (status == EPX_OK)
        status = ops->event_create(group->device, &regions->idle);
    /* A memory file on every device: ranks of the node can map each other's. */
    if (status == EPX_OK)
        status =
            cpu_device_ops.heap_create(NULL, sizeof(*regions->directory) + words * sizeof(uint64_t), &regions->memory);
    regions->directory = regions->memory.base;
    return status;
}

void regions_destroy(struct epx_group *group)
{
    struct regions *regions = group->regions;
    const struct device_ops *ops = group->device->ops;

    if (!regions)
        return;
    for (int i = 0; i < regions->npeers; i++) {
        struct peer *peer = &regions->peers[i];

        for (int e = 0; e < REGION_SLOTS; e++)
            if (peer->imported[e].open)
                ops->region_close(group->device, &peer->imported[e].region, peer->imported[e].base, 0);
        if (peer->directory)
            cpu_device_ops.heap_close(NULL, &peer->export, peer->directory);
    }
    if (regions->memory.base)
        cpu_device_ops.heap_destroy(NULL, &regions->memory);
    if (regions->idle)
        ops->event_destroy(group->device, regions->idle);
    if (regions->table)
        ops->mem_free(group->device, regions->table);
    free(regions->peers);
    free(regions);
    group->regions = NULL;
}

struct heap_export regions_directory(const struct epx_group *group)
{
    static const struct heap_export none;

    return group->regions ? group->regions->memory.export : none;
}

static void open_directory(struct regions *regions, struct peer *peer, const struct heap_export *directory)
{
    void *base = NULL;

    peer->export = *directory;
    regions->same_process |= directory->bytes && directory->pid == (int64_t)getpid();
    if (directory->bytes && cpu_device_ops.heap_open(NULL, directory, &base) != EPX_OK)
        log_line(LOG_INFO, "regions are not shared with rank %d: %s", peer->rank, epx_last_error());
    peer->directory = base;
}

void regions_add_peer(struct epx_group *group, int rank, const struct heap_export *directory)
{
    struct regions *regions = group->regions;
    struct peer *peer;

    if (!regions || rank == group->rank)
        return;
    peer = &regions->peers[regions->npeers++];
    peer->rank = rank;
    open_directory(regions, peer, directory);
}

void regions_update_members(struct epx_group *group)
{
    struct regions *regions = group->regions;

    if (!regions)
        return;
    regions->possible = regions->asked || !regions->same_process;
    for (int i = 0; i < regions->npeers; i++)
        regions->possible &= regions->peers[i].directory || group->map.out[regions->peers[i].rank];
    for (int e = 0; e < REGION_SLOTS; e++)
        regions->exported[e].by_all = 0;
}

const uint64_t *regions_table(const struct epx_group *group)
{
    return group->regions ? group->regions->table : NULL;
}

/* ---- Import -------------------------------------------------------------------------------------------------- */

static void release_import(struct epx_group *group, struct peer *peer, int e)
{
    struct imported_region *import = &peer->imported[e];

    store_release(imported_word(group->regions->directory, peer->rank, e), 0);
    /* The exporter's operations that used the region are complete, and so are this rank's reads. Unmapping may wait
     * for the device's queued work, which must not wait in turn for another rank of this process. */
    if (import->open)
        group->device->ops->region_close(group->device, &import->region, import->base, !group->regions->same_process);
    import->open = 0;
    import->generation = 0;
}

void regions_replace_peer(struct epx_group *group, int rank, const struct heap_export *directory)
{
    struct regions *regions = group->regions;

    for (int i = 0; regions && i < regions->npeers; i++) {
        struct peer *peer = &regions->peers[i];

        if (peer->rank != rank)
            continue;
        for (int e = 0; e < REGION_SLOTS; e++)
            release_import(group, peer, e); /* also says to the new process that nothing of it is imported */
        if (peer->directory)
            cpu_device_ops.heap_close(NULL, &peer->export, peer->directory);
        peer->changes = 0;
        open_directory(regions, peer, directory);
    }
}

/* 0: the slot is being changed; `changes` will differ again. */
static int read_slot(const struct region_slot *slot, uint64_t generation, struct heap_export *region)
{
    uint64_t words[EXPORT_WORDS];

    for (int i = 0; i < EXPORT_WORDS; i++)
        words[i] = __atomic_load_n(&slot->words[i], __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* pairs with the one in write_slot() */
    if (__atomic_load_n(&slot->generation, __ATOMIC_RELAXED) != generation)
        return 0;
    memcpy(region, words, sizeof(*region));
    return 1;
}

static void import_region(struct epx_group *group, struct peer *peer, int e, uint64_t generation)
{
    struct imported_region *import = &peer->imported[e];
    epx_status status;

    if (!read_slot(&peer->directory->slot[e], generation, &import->region))
        return;
    import->generation = generation; /* tried once, also if it fails */
    status = group->device->ops->region_open(group->device, &import->region, &import->base);
    import->open = status == EPX_OK;
    if (status == EPX_OK)
        status = table_set(group, peer->rank, e, (uint64_t)(uintptr_t)import->base);
    if (status == EPX_OK)
        store_release(imported_word(group->regions->directory, peer->rank, e), generation);
    else
        log_line(LOG_INFO, "a region of rank %d cannot be imported, its rows are copied: %s", peer->rank,
                 epx_last_error());
}

/* Slot e of a peer's directory. Zero: an import that a capture must not end is in the way. */
static int follow_slot(struct epx_group *group, struct peer *peer, int e, int capture)
{
    const uint64_t generation = load_acquire(&peer->directory->slot[e].generation);

    if (generation == peer->imported[e].generation)
        return 1;
    if (capture && peer->imported[e].open) /* unmapping may wait for the device */
        return 0;
    release_import(group, peer, e);
    if (generation)
        import_region(group, peer, e, generation);
    return 1;
}

/* Follows all peers, if the stream captures as `capture` says. */
static void follow_peers(struct epx_group *group, struct device_stream *stream, int capture)
{
    struct regions *regions = group->regions;

    for (int i = 0; regions && i < regions->npeers; i++) {
        struct peer *peer = &regions->peers[i];
        const uint64_t changes = peer->directory ? load_acquire(&peer->directory->changes) : 0;

        if (changes == peer->changes)
            continue;
        if (group_captures(group, stream) != capture)
            return;
        int all = 1;
        for (int e = 0; e < REGION_SLOTS; e++)
            all &= follow_slot(group, peer, e, capture);
        if (all)
            peer->changes = changes;
    }
}

void regions_import(struct epx_group *group, struct device_stream *stream)
{
    follow_peers(group, stream, 0);
}

void regions_import_captured(struct epx_group *group, struct device_stream *stream)
{
    follow_peers(group, stream, 1);
}

/* ---- Export ---------------------------------------------------------------------------------------------------- */

static void announce_change(struct regions *regions)
{
    store_release(&regions->directory->changes, regions->directory->changes + 1);
}

static void withdraw_export(struct regions *regions, int e)
{
    store_release(&regions->directory->slot[e].generation, 0);
    if (regions->exported[e].generation)
        announce_change(regions);
    memset(&regions->exported[e], 0, sizeof(regions->exported[e]));
}

static void write_slot(struct regions *regions, int e, const struct heap_export *region, uint64_t generation)
{
    struct region_slot *slot = &regions->directory->slot[e];
    uint64_t words[EXPORT_WORDS];

    memcpy(words, region, sizeof(words));
    __atomic_thread_fence(__ATOMIC_RELEASE); /* a reader of a new word sees that the previous generation has ended */
    for (int i = 0; i < EXPORT_WORDS; i++)
        __atomic_store_n(&slot->words[i], words[i], __ATOMIC_RELAXED);
    store_release(&slot->generation, generation);
    announce_change(regions);
}

/* Among the regions that no graph may use; -1 = none. */
static int least_recently_used(const struct regions *regions)
{
    int found = -1;

    for (int e = 0; e < REGION_SLOTS; e++)
        if (!regions->exported[e].captured && (found < 0 || regions->exported[e].used < regions->exported[found].used))
            found = e;
    return found;
}

/* Is a combine under way whose second half is not launched yet? Peers may still have to read its rows. */
static int combine_is_staged(const struct epx_group *group)
{
    for (const struct epx_handle *h = group->handles; h; h = h->next)
        if (h->staged == STAGED_COMBINE)
            return 1;
    return 0;
}

/* Chooses a region to evict, and records an event after its last use. */
static void begin_eviction(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    struct regions *regions = group->regions;
    const int e = least_recently_used(regions);

    if (e < 0 || combine_is_staged(group) || regions->exported[e].used + EVICT_AFTER_USES > regions->clock ||
        !group->last_stream || ops->stream_captures(group->device, group->last_stream) ||
        ops->event_record(group->device, regions->idle, group->last_stream) != EPX_OK)
        return;
    regions->evicting = e;
    regions->evicting_used = regions->exported[e].used;
}

/* A free slot, or -1: none now. A capture evicts nothing: it could not ask whether its last use is over. */
static int find_slot(struct epx_group *group, int capture)
{
    struct regions *regions = group->regions;
    const int e = regions->evicting;

    for (int i = 0; i < REGION_SLOTS; i++)
        if (!regions->exported[i].id)
            return i;
    for (int i = 0; i < REGION_SLOTS; i++)
        if (!regions->exported[i].generation) /* refused */
            return i;
    if (capture)
        return -1;
    if (e < 0) {
        begin_eviction(group);
        return -1;
    }
    if (group->device->ops->event_query(group->device, regions->idle) != EPX_OK)
        return -1;
    regions->evicting = -1;
    if (regions->exported[e].used != regions->evicting_used || regions->exported[e].captured)
        return -1;
    withdraw_export(regions, e);
    return e;
}

/* The slot that the region has got, or -1: none is free. */
static int export_region(struct epx_group *group, const void *data, uint64_t id, int capture)
{
    struct regions *regions = group->regions;
    const int e = find_slot(group, capture);
    struct heap_export region;
    epx_status status;

    if (e < 0)
        return -1;
    withdraw_export(regions, e);
    regions->exported[e].id = id;
    regions->exported[e].used = regions->clock;
    status = group->device->ops->region_export(group->device, data, &region);
    if (status == EPX_OK)
        status = table_set(group, group->rank, e, region.address);
    if (status != EPX_OK) {
        log_line(LOG_INFO, "rows at %p are copied: %s", data, epx_last_error());
        return e;
    }
    /* Regions that overlap the new one have been freed. */
    for (int i = 0; i < REGION_SLOTS; i++)
        if (regions->exported[i].generation && regions->exported[i].base < region.address + region.bytes &&
            region.address < regions->exported[i].base + regions->exported[i].bytes)
            withdraw_export(regions, i);
    regions->exported[e].base = region.address;
    regions->exported[e].bytes = region.bytes;
    regions->exported[e].generation = ++regions->generations;
    write_slot(regions, e, &region, regions->exported[e].generation);
    return e;
}

/* One slot per call: peers do not keep freed memory mapped. */
static void check_next_freed(struct epx_group *group)
{
    struct regions *regions = group->regions;
    const int e = regions->turn;

    regions->turn = (e + 1) % REGION_SLOTS;
    if (regions->exported[e].generation && regions->exported[e].base &&
        group->device->ops->region_id(group->device, (const void *)(uintptr_t)regions->exported[e].base) !=
            regions->exported[e].id)
        withdraw_export(regions, e);
}

static int imported_by_all(struct epx_group *group, int e)
{
    struct regions *regions = group->regions;
    struct exported_region *region = &regions->exported[e];

    for (int i = 0; i < regions->npeers && !region->by_all; i++) {
        const struct peer *peer = &regions->peers[i];

        if (!group->map.out[peer->rank] &&
            load_acquire(imported_word(peer->directory, group->rank, e)) != region->generation)
            return 0;
    }
    region->by_all = 1;
    return 1;
}

/*
 * A capture waits for the peers: what is captured as a copy is copied in every replay. All ranks capture the same
 * operations, so the others come to this call, and import here what this rank waits for: not before they have exported
 * their own, so that nobody leaves the call who has yet to import that. Peers that did not come once are not waited for
 * again until they have: they do not capture, or do so later.
 */
static void wait_for_imports(struct epx_group *group, int e, struct device_stream *stream)
{
    struct regions *regions = group->regions;
    const uint64_t start = host_now_ns();

    while (regions->exported[e].generation && !imported_by_all(group, e)) {
        if (regions->alone)
            return;
        regions_import_captured(group, stream);
        pause_ns(CAPTURE_POLL_NS);
        regions->alone = host_now_ns() - start > CAPTURE_WAIT_NS;
    }
    regions->alone = 0;
}

int regions_find(struct epx_group *group, const void *data, uint64_t bytes, struct device_stream *stream,
                 uint64_t *offset)
{
    struct regions *regions = group->regions;
    const uint64_t at = (uint64_t)(uintptr_t)data;
    struct exported_region *region;
    uint64_t id;
    int e = 0, capture;

    *offset = 0;
    if (!regions || !regions->possible || !bytes)
        return 0;
    capture = group_captures(group, stream);
    if (!capture)
        check_next_freed(group);
    id = group->device->ops->region_id(group->device, data);
    if (!id)
        return 0;
    regions->clock++;
    while (e < REGION_SLOTS && regions->exported[e].id != id)
        e++;
    if (e == REGION_SLOTS) {
        e = export_region(group, data, id, capture);
        if (e < 0 || !capture)
            return 0;
    }
    if (capture)
        wait_for_imports(group, e, stream);
    region = &regions->exported[e];
    region->used = regions->clock;
    if (!region->generation || at < region->base || at - region->base > region->bytes ||
        bytes > region->bytes - (at - region->base) || !imported_by_all(group, e))
        return 0;
    region->captured |= capture;
    *offset = at - region->base;
    return e + 1;
}

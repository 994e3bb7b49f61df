/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows in a caller's own memory are read in place once every rank of the node has imported their region, and copied
 * until then; statistics tell which. Ranks are threads. Where the content of a mapping matters, the device's regions
 * are memory files that each peer maps at its own address, read-only: a mapping that outlives its region shows old
 * bytes, and one that was unmapped too early faults.
 *
 * ctest: labels=ranks
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "group/objects.h"
#include "net/net.h"
#include "util/clock.h"
#include "util/runtime.h"
#include "util/status.h"

/* The number of slots decides some of what is tested. */
enum { RANKS = 4, PLENTY = REGION_SLOTS + 6, FILES_MOST = RANKS * (PLENTY + 64), SLOT = 1 << 16 };

static epx_status refuse(const void *data)
{
    return fail(EPX_ERR_UNSUPPORTED, "test device: the region at %p is not exported", data);
}

#include "tests/lib/fixture.h"
#include "tests/lib/thread_boot.h"
#include "tests/lib/unit.h"
#include "tests/lib/unit_net.h"

/* ---- A device whose regions are files --------------------------------------------------------------------------- */

/* This rank's calls are taken for captured ones. They run at once all the same. */
static _Thread_local int pretend_capture;
static _Thread_local int fast_clock; /* each of this rank's looks at the clock takes half a second */

/* Address space in which each rank has PLENTY slots; a slot holds a region or nothing. */
static struct {
    pthread_mutex_t lock;
    char *base;
    struct {
        uint64_t id;
        int fd;
    } slot[RANKS * PLENTY];
    int files[FILES_MOST], nfiles;
    uint64_t ids;
    int opened, closed, exported, refuse;
} world = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct device_ops test_ops;

/* A new region in the slot, in the place of the one that was there. */
static char *region_make(int slot)
{
    char *at = world.base + (size_t)slot * SLOT;
    const int fd = memfd_create("epx-test-region", MFD_CLOEXEC);

    if (fd < 0 || ftruncate(fd, SLOT) != 0 ||
        mmap(at, SLOT, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != at)
        return NULL;
    pthread_mutex_lock(&world.lock);
    world.slot[slot].id = ++world.ids;
    world.slot[slot].fd = fd;
    world.files[world.nfiles++] = fd; /* closed at the end: a peer may just be about to map it */
    pthread_mutex_unlock(&world.lock);
    return at;
}

static void region_free(int slot)
{
    pthread_mutex_lock(&world.lock);
    (void)mmap(world.base + (size_t)slot * SLOT, SLOT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    world.slot[slot].id = 0;
    pthread_mutex_unlock(&world.lock);
}

static uint64_t region_id(struct device *device, const void *data)
{
    const size_t at = (size_t)((const char *)data - world.base);
    uint64_t id = 0;

    (void)device;
    pthread_mutex_lock(&world.lock);
    if ((const char *)data >= world.base && at < (size_t)RANKS * PLENTY * SLOT)
        id = world.slot[at / SLOT].id;
    pthread_mutex_unlock(&world.lock);
    return id;
}

static epx_status region_export(struct device *device, const void *data, struct heap_export *region)
{
    const size_t slot = (size_t)((const char *)data - world.base) / SLOT;

    (void)device;
    __atomic_fetch_add(&world.exported, 1, __ATOMIC_RELAXED);
    if (__atomic_load_n(&world.refuse, __ATOMIC_RELAXED))
        return refuse(data);
    memset(region, 0, sizeof(*region));
    region->bytes = SLOT;
    region->address = (uint64_t)(uintptr_t)(world.base + slot * SLOT);
    region->pid = getpid();
    region->token = world.slot[slot].fd;
    return EPX_OK;
}

static epx_status region_open(struct device *device, const struct heap_export *region, void **base)
{
    (void)device;
    *base = mmap(NULL, region->bytes, PROT_READ, MAP_SHARED, (int)region->token, 0);
    if (*base == MAP_FAILED)
        return refuse(*base);
    __atomic_fetch_add(&world.opened, 1, __ATOMIC_RELAXED);
    return EPX_OK;
}

static void region_close(struct device *device, const struct heap_export *region, void *base, int now)
{
    (void)device;
    (void)now;
    munmap(base, region->bytes);
    __atomic_fetch_add(&world.closed, 1, __ATOMIC_RELAXED);
}

static uint64_t stream_captures(struct device *device, struct device_stream *stream)
{
    (void)device;
    (void)stream;
    return (uint64_t)pretend_capture;
}

static uint64_t now_ns(void)
{
    static _Thread_local uint64_t ahead;

    ahead += fast_clock ? 500000001 : 0;
    return clock_ns() + ahead;
}

static epx_status open_device(int index, struct device **device)
{
    const epx_status status = cpu_device_ops.open(index, device);

    if (status == EPX_OK)
        (*device)->ops = &test_ops;
    return status;
}

static int files_begin(void **state)
{
    (void)state;
    test_ops = cpu_device_ops;
    test_ops.open = open_device;
    test_ops.region_id = region_id;
    test_ops.region_export = region_export;
    test_ops.region_open = region_open;
    test_ops.region_close = region_close;
    test_ops.stream_captures = stream_captures;
    world.base = mmap(NULL, (size_t)RANKS * PLENTY * SLOT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    world.opened = world.closed = world.exported = world.refuse = 0;
    runtime_swap(&(const struct runtime){.device = &test_ops, .now_ns = now_ns});
    setenv("EPX_REGISTER", "1", 1);
    return world.base == MAP_FAILED ? -1 : 0;
}

static int files_end(void **state)
{
    (void)state;
    runtime_swap(NULL);
    unsetenv("EPX_REGISTER");
    munmap(world.base, (size_t)RANKS * PLENTY * SLOT);
    while (world.nfiles > 0)
        close(world.files[--world.nfiles]);
    memset(world.slot, 0, sizeof(world.slot));
    return 0;
}

/* ---- Rounds ----------------------------------------------------------------------------------------------------- */

static int complain(struct fixture *s, const char *what, long long number)
{
    snprintf(s->why, sizeof(s->why), "%s (%lld; last error: %s)", what, number, epx_last_error());
    return -1;
}

/* One checked round whose rows lie at `rows`; *copied: bytes that the combine copied first. */
static int round_at(struct fixture *s, void *rows, uint64_t *copied)
{
    void *usual = s->ht_rows.data;
    epx_stats before = EPX_STATS_INIT, after = EPX_STATS_INIT;
    int rc;

    s->ht_rows.data = rows ? rows : usual;
    rc = fixture_ht_dispatch(s) || epx_group_stats(s->group, &before) != EPX_OK || fixture_ht_combine(s) ||
         epx_group_stats(s->group, &after) != EPX_OK;
    s->ht_rows.data = usual;
    *copied = after.bytes_local - before.bytes_local;
    return rc ? -1 : 0;
}

/* Rounds until one copies nothing: three at the most, for every rank's call comes after all calls of the last round. */
static int round_until_in_place(struct fixture *s, void *rows)
{
    uint64_t copied = 1;

    for (int i = 0; i < 3; i++)
        if (round_at(s, rows, &copied))
            return -1;
    return copied ? complain(s, "the third round still copies its rows", (long long)copied) : 0;
}

/* Nobody waits for a stream that captures: the capture ends, and the next one begins. */
static epx_status sync_between_captures(struct fixture *s, epx_status status)
{
    const int pretended = pretend_capture;

    pretend_capture = 0;
    status = fixture_sync(s, status);
    pretend_capture = pretended;
    return status;
}

/* The same for low latency; `staged`: by a send half and epx_complete. */
static int ll_round_at(struct fixture *s, void *rows, int staged, uint64_t *copied)
{
    void *usual = s->ll_rows.data;
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;
    epx_stats before = EPX_STATS_INIT, after = EPX_STATS_INIT;
    int rc;

    config.send_only = staged;
    s->ll_rows.data = rows ? rows : usual;
    fixture_refill(s);
    rc = epx_handle_update(s->ll, &s->idx, NULL, NULL) != EPX_OK ||
         sync_between_captures(s, epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL)) != EPX_OK ||
         fixture_check_ll_dispatch(s) || epx_group_stats(s->group, &before) != EPX_OK ||
         epx_combine(s->ll, &s->ll_cin, &s->cout, &config, NULL) != EPX_OK ||
         (staged && epx_complete(s->ll, NULL) != EPX_OK) || sync_between_captures(s, EPX_OK) != EPX_OK ||
         epx_group_stats(s->group, &after) != EPX_OK || fixture_check_ll_combine(s);
    s->ll_rows.data = usual;
    *copied = after.bytes_local - before.bytes_local;
    return rc ? -1 : 0;
}

static int ll_share(struct fixture *s)
{
    const int slot = s->rank * PLENTY;

    for (int staged = 0; staged < 2; staged++) {
        char *rows = region_make(slot); /* the second one in the place of the first */
        uint64_t copied = 0;

        if (!rows || ll_round_at(s, rows, staged, &copied))
            return -1;
        if (!copied && s->ll_recv.total)
            return complain(s, "the first low-latency round must copy its rows; staged", staged);
        for (int i = 0; i < 3; i++)
            if (ll_round_at(s, rows, staged, &copied))
                return -1;
        if (copied)
            return complain(s, "low latency still copies rows of a region that all have imported", (long long)copied);
    }
    return 0;
}

/* What is captured reads rows in place from the first call on: every rank waits for the others to import its region.
 * Where they do not come, it goes on, and does not wait again before they have. */
static int ll_share_captured(struct fixture *s)
{
    char *rows = region_make(s->rank * PLENTY), *more = region_make(s->rank * PLENTY + 1);
    uint64_t copied = 1;
    int in_place = 0, rc;

    pretend_capture = 1;
    rc = !rows || !more || ll_round_at(s, rows, 0, &copied);
    if (!rc && copied)
        rc = complain(s, "a captured call copies its rows", (long long)copied);
    for (int i = 0; i < 2 && !rc && s->rank == 0; i++) { /* waits for a second that soon passes, then not at all */
        fast_clock = i == 0;
        rc = epx_register(s->group, more, SLOT, NULL, &in_place) != EPX_OK || in_place;
    }
    fast_clock = pretend_capture = 0;
    rc = rc || fixture_meet(s) || (s->rank && epx_register(s->group, more, SLOT, NULL, &in_place) != EPX_OK) ||
         fixture_meet(s);
    pretend_capture = s->rank == 0;
    rc = rc || (s->rank == 0 && (epx_register(s->group, more, SLOT, NULL, &in_place) != EPX_OK || !in_place));
    pretend_capture = 0;
    return rc || fixture_meet(s);
}

static int ranks_per_node;
static uint64_t node_bytes;

static int run_fixtures(int nranks, fixture_fn fn, int enable_mask)
{
    epx_group_config config = fixture_config(20000);

    config.ranks_per_node = ranks_per_node;
    config.ht_node_bytes = node_bytes;
    config.enable_mask = enable_mask;
    return fixture_run(nranks, &config, fn, NULL);
}

/* ---- Ranks of one process --------------------------------------------------------------------------------------- */

static int share_ordinary(struct fixture *s)
{
    uint64_t copied;

    if (round_at(s, NULL, &copied))
        return -1;
    if (!copied && s->ht_recv.total)
        return complain(s, "the first round must copy its rows", 0);
    if (round_until_in_place(s, NULL))
        return -1;
    for (int i = 0; i < 4; i++) {
        char *other = aligned_alloc(64, SLOT); /* all memory of a process is one region */
        const int rc = round_at(s, other, &copied);

        free(other);
        if (rc || copied)
            return rc ? -1 : complain(s, "memory of the process is one region, and was copied", (long long)copied);
    }
    return 0;
}

static void rows_in_ordinary_memory_are_read_there(void **state)
{
    (void)state;
    setenv("EPX_REGISTER", "1", 1);
    assert_int_equal(run_fixtures(RANKS, share_ordinary, 0), 0);
    assert_int_equal(run_fixtures(1, share_ordinary, 0), 0);
    unsetenv("EPX_REGISTER");
}

static void also_by_relays_between_nodes(void **state)
{
    (void)state;
    unit_need_ofi("");
    setenv("EPX_REGISTER", "1", 1);
    for (ranks_per_node = 1; ranks_per_node <= 2; ranks_per_node++)
        assert_int_equal(run_fixtures(RANKS, share_ordinary, 0), 0);
    ranks_per_node = 0;
    unsetenv("EPX_REGISTER");
}

static int share_copied(struct fixture *s)
{
    uint64_t copied;

    for (int i = 0; i < 5; i++) {
        if (round_at(s, NULL, &copied))
            return -1;
        if (!copied && s->ht_recv.total)
            return complain(s, "nothing may be shared, and the rows were not copied; round", i);
    }
    return 0;
}

static void nothing_is_shared_unless_asked(void **state)
{
    (void)state;
    unsetenv("EPX_REGISTER");
    assert_int_equal(run_fixtures(RANKS, share_copied, 0), 0);
    setenv("EPX_REGISTER", "0", 1);
    assert_int_equal(run_fixtures(RANKS, share_copied, 0), 0);
    unsetenv("EPX_REGISTER");
}

/* ---- Regions ---------------------------------------------------------------------------------------------------- */

static int share_freed(struct fixture *s)
{
    const int slot = s->rank * PLENTY;
    uint64_t copied;

    for (int i = 0; i < 6; i++) {
        char *rows = region_make(slot); /* the same address, another region: whoever reads the old one is wrong */

        if (!rows || round_at(s, rows, &copied))
            return -1;
        if (!copied && s->ht_recv.total)
            return complain(s, "a new region was taken for the one that was freed; round", i);
        if (i % 2 == 0 && round_until_in_place(s, rows))
            return -1;
    }
    region_free(slot);
    /* Freed memory is found in turn, without being given again, and not kept by the others. */
    for (int i = 0; i < REGION_SLOTS + 2; i++)
        if (round_at(s, NULL, &copied))
            return -1;
    if (fixture_meet(s))
        return -1;
    const int open =
        __atomic_load_n(&world.opened, __ATOMIC_RELAXED) - __atomic_load_n(&world.closed, __ATOMIC_RELAXED);
    return fixture_meet(s) || (open ? complain(s, "mappings of memory that was freed", open) : 0);
}

static void freed_memory_is_not_read_and_not_kept(void **state)
{
    (void)state;
    assert_int_equal(run_fixtures(RANKS, share_freed, 0), 0);
}

static void low_latency_reads_regions_too(void **state)
{
    (void)state;
    assert_int_equal(run_fixtures(RANKS, ll_share, 0), 0);
}

static void captured_calls_wait_for_imports(void **state)
{
    (void)state;
    assert_int_equal(run_fixtures(RANKS, ll_share_captured, 0), 0);
}

/* One checked dispatch of tokens at `tokens`; *copied: bytes of its rows that were copied once more. */
static int dispatch_from(struct fixture *s, void *tokens, uint64_t *copied)
{
    void *usual = s->tokens.data;
    epx_stats before = EPX_STATS_INIT, after = EPX_STATS_INIT;
    int rc;

    s->tokens.data = tokens;
    rc = epx_group_stats(s->group, &before) != EPX_OK || fixture_ht_dispatch(s) ||
         epx_group_stats(s->group, &after) != EPX_OK;
    s->tokens.data = usual;
    *copied = after.bytes_local - before.bytes_local;
    return rc || fixture_meet(s) ? -1 : 0;
}

/* Results in ordinary memory: their rows are taken from the tokens of the other ranks, once all have imported all of
 * these. Rank 0 then has its tokens elsewhere, twice: all ranks copy again, until that is imported too. */
static int share_tokens(struct fixture *s)
{
    const int slot = s->rank * PLENTY;
    uint64_t copied;

    for (int moved = 0; moved < 3; moved++) {
        char *tokens = s->rank == 0 || !moved ? region_make(slot + moved) : world.base + (size_t)slot * SLOT;

        if (!tokens || dispatch_from(s, tokens, &copied))
            return -1;
        if (!copied && s->ht_recv.total)
            return complain(s, "rows were taken from a region that nobody has imported; moved", moved);
        for (int i = 0; i < 12; i++)
            if (dispatch_from(s, tokens, &copied))
                return -1;
        if (copied)
            return complain(s, "rows of tokens in regions are still copied; moved", moved);
    }
    return 0;
}

/* The same, but copied always: in groups with masks a rank that slept would read at addresses of a later operation. */
static int share_no_tokens(struct fixture *s)
{
    char *tokens = region_make(s->rank * PLENTY);
    uint64_t copied;

    for (int i = 0; i < 4; i++) {
        if (!tokens || dispatch_from(s, tokens, &copied))
            return -1;
        if (!copied && s->ht_recv.total)
            return complain(s, "rows were not copied; dispatch", i);
    }
    return 0;
}

static void dispatch_takes_rows_from_regions(void **state)
{
    (void)state;
    node_bytes = 1;
    assert_int_equal(run_fixtures(RANKS, share_tokens, 0), 0);
    assert_int_equal(run_fixtures(RANKS, share_no_tokens, 1), 0);
    node_bytes = 0;
}

/* Rank 0 calls when the others have already queued the same operations: they have imported none of its regions. */
static int share_late(struct fixture *s)
{
    char *rows = region_make(s->rank * PLENTY);
    void *usual = s->ht_rows.data;
    epx_stats before = EPX_STATS_INIT, after = EPX_STATS_INIT;
    int rc;

    s->ht_rows.data = rows;
    rc = !rows || fixture_ht_dispatch(s) || epx_group_stats(s->group, &before) != EPX_OK || fixture_meet(s);
    for (int turn = 0; turn < 2 && !rc; turn++) {
        rc = (s->rank == 0) != turn ? 0
                                    : epx_combine(s->ht, &s->ht_cin, &s->cout, NULL, NULL) != EPX_OK ||
                                          epx_combine(s->ht, &s->ht_cin, &s->cout, NULL, NULL) != EPX_OK;
        rc = rc || fixture_meet(s);
    }
    rc = rc || fixture_ht_combine(s) || epx_group_stats(s->group, &after) != EPX_OK;
    s->ht_rows.data = usual;
    if (!rc && s->rank == 0 &&
        after.bytes_local - before.bytes_local < 2 * (uint64_t)s->ht_recv.total * FIXTURE_HIDDEN * 2)
        rc = complain(s, "rows were published in memory that nobody has mapped", 0);
    return rc;
}

static void nothing_is_published_before_all_have_mapped_it(void **state)
{
    (void)state;
    assert_int_equal(run_fixtures(RANKS, share_late, 0), 0);
}

static int share_plenty(struct fixture *s)
{
    const int first = s->rank * PLENTY;
    char *rows[PLENTY];
    uint64_t copied;
    int in_place = 0;

    for (int i = 0; i < PLENTY; i++)
        if (!(rows[i] = region_make(first + i)))
            return complain(s, "no region", i);
    for (int i = 0; i < 3 * PLENTY; i++) { /* in turn: each is used too often to be evicted */
        if (round_at(s, rows[i % PLENTY], &copied))
            return -1;
        in_place += i >= 2 * PLENTY && !copied;
    }
    if (s->ht_recv.total && in_place != REGION_SLOTS)
        return complain(s, "expected as many exported regions as there are slots, got", in_place);
    /* The last one alone: the others become old, and one is evicted. */
    for (int i = 0; i < 5 * REGION_SLOTS; i++)
        if (round_at(s, rows[PLENTY - 1], &copied))
            return -1;
    if (copied)
        return complain(s, "no region was evicted", (long long)copied);
    /* Regions that are still exported work as before. */
    for (int i = 0; i < PLENTY; i++)
        if (round_at(s, rows[i], &copied))
            return -1;
    return 0;
}

static void a_full_directory_keeps_what_is_used(void **state)
{
    (void)state;
    assert_int_equal(run_fixtures(2, share_plenty, 0), 0);
    assert_int_equal(world.opened, world.closed); /* nothing stays mapped after the end */
    assert_true(world.opened > 2 * REGION_SLOTS);
}

static int share_refused(struct fixture *s)
{
    char *rows = region_make(s->rank * PLENTY);
    uint64_t copied;

    for (int i = 0; i < 5; i++) {
        if (!rows || round_at(s, rows, &copied))
            return -1;
        if (!copied && s->ht_recv.total)
            return complain(s, "rows that cannot be exported were not copied; round", i);
    }
    return 0;
}

static void what_cannot_be_exported_is_asked_for_once(void **state)
{
    (void)state;
    world.refuse = 1;
    assert_int_equal(run_fixtures(RANKS, share_refused, 0), 0);
    assert_int_equal(world.exported, RANKS);
    assert_int_equal(world.opened, 0);
}

/* ---- More rows than the receive buffer holds -------------------------------------------------------------------- */

static const char *const too_many[] = {"epx_combine", "max_recv_tokens = 1", NULL};

static int share_narrow(struct fixture *s)
{
    char *rows = region_make(s->rank * PLENTY);
    void *usual = s->ht_rows.data, *heap;
    const size_t bytes = (size_t)tensor_rows(&s->ht_rows) * FIXTURE_HIDDEN * 2;
    const int many = s->ht_recv.total > 1;
    int in_place = -1, rc = 0;

    s->ht_out.topk_weights = s->ht_out.topk_idx = NULL;
    if (!rows || epx_alloc(s->group, bytes, &heap) != EPX_OK ||
        epx_register(s->group, heap, bytes, NULL, &in_place) != EPX_OK || !in_place)
        return complain(s, "memory of epx_alloc is always read in place", in_place);
    for (int i = 0; i < 4 && !rc; i++) {
        s->ht_rows.data = heap;
        rc = fixture_ht_dispatch(s) || fixture_meet(s);
        memcpy(rows, heap, bytes);
        s->ht_rows.data = rows;
        if (!rc && many && i == 0)
            rc = fixture_expect(s, "epx_combine", epx_combine(s->ht, &s->ht_cin, &s->cout, NULL, NULL),
                                EPX_ERR_OVERFLOW, too_many);
        rc = rc || fixture_meet(s) || epx_register(s->group, rows, bytes, NULL, &in_place) != EPX_OK;
        rc = rc || fixture_meet(s); /* all have exported: the next call imports, and the one after it reads in place */
        if (!in_place)
            s->ht_rows.data = memcpy(heap, rows, bytes);
        rc = rc || fixture_ht_combine(s);
    }
    s->ht_rows.data = usual;
    return rc || (in_place ? 0 : complain(s, "never read in place", 0));
}

static void the_receive_buffer_does_not_bound_registered_rows(void **state)
{
    epx_group_config config = fixture_config(20000);

    (void)state;
    config.max_recv_tokens = 1;
    assert_int_equal(fixture_run(RANKS, &config, share_narrow, NULL), 0);
}

/* ---- Members ---------------------------------------------------------------------------------------------------- */

/* The last rank leaves; the others share regions without it. */
static int share_members(struct fixture *s)
{
    char *rows = region_make(s->rank * PLENTY), *fresh;
    int32_t mask[RANKS];

    if (!rows || round_until_in_place(s, rows) || fixture_meet(s))
        return -1;
    if (s->rank == RANKS - 1)
        return fixture_meet(s) || fixture_meet(s); /* masked: idle */
    for (int r = 0; r < RANKS; r++)
        mask[r] = r < RANKS - 1;
    if (epx_mask_update(s->group, mask, NULL) != EPX_OK || epx_stream_sync(s->group, NULL) != EPX_OK ||
        fixture_meet(s) || epx_group_error_clear(s->group) != EPX_OK)
        return complain(s, "going on without a rank", 0);
    fixture_set_active(s, RANKS - 1, 0);
    fresh = region_make(s->rank * PLENTY + 1);
    return round_until_in_place(s, rows) || !fresh || round_until_in_place(s, fresh) || fixture_meet(s);
}

static void remaining_ranks_share_with_each_other(void **state)
{
    (void)state;
    assert_int_equal(run_fixtures(RANKS, share_members, 1), 0);
}

UNIT_MAIN(cmocka_unit_test(rows_in_ordinary_memory_are_read_there), cmocka_unit_test(also_by_relays_between_nodes),
          cmocka_unit_test(nothing_is_shared_unless_asked),
          cmocka_unit_test_setup_teardown(freed_memory_is_not_read_and_not_kept, files_begin, files_end),
          cmocka_unit_test_setup_teardown(low_latency_reads_regions_too, files_begin, files_end),
          cmocka_unit_test_setup_teardown(dispatch_takes_rows_from_regions, files_begin, files_end),
          cmocka_unit_test_setup_teardown(captured_calls_wait_for_imports, files_begin, files_end),
          cmocka_unit_test_setup_teardown(nothing_is_published_before_all_have_mapped_it, files_begin, files_end),
          cmocka_unit_test_setup_teardown(a_full_directory_keeps_what_is_used, files_begin, files_end),
          cmocka_unit_test_setup_teardown(what_cannot_be_exported_is_asked_for_once, files_begin, files_end),
          cmocka_unit_test_setup_teardown(the_receive_buffer_does_not_bound_registered_rows, files_begin, files_end),
          cmocka_unit_test_setup_teardown(remaining_ranks_share_with_each_other, files_begin, files_end))

/* SPDX-License-Identifier: Apache-2.0 */
/* The cases of the network suite: data. */
#include "tests/lib/net_suite_cases.h"

#include <errno.h>
#include <string.h>

enum { MIB = 1 << 20, HALF = SUITE_HEAP / 2 };

/*
 * The heap in most cases: the lower half is where puts come from, the upper half is where they land, a quarter of it
 * for each source.
 */
static uint64_t recv_buf(int source)
{
    return HALF + (uint64_t)source * (HALF / SUITE_RANKS);
}

/* ---- Sizes */

static const uint32_t sizes[] = {0, 16, 48, 1040, 4096, 14352, 65552, 262144, MIB - 16, 16, 0, MIB};
enum { SIZES = (int)(sizeof(sizes) / sizeof(sizes[0])) };

static int check_sizes(struct suite_rank *self, int peer, uint32_t index)
{
    int64_t at = suite_differs(self->heap + recv_buf(peer), sizes[index % SIZES], peer, index);

    return at < 0 ? 0 : suite_fail(self, "put %u of %d: byte %lld not there", index, peer, (long long)at);
}

/* One put at a time, of every size, both ways: the bytes are there when the immediate comes. */
static int all_sizes(struct suite_rank *self)
{
    const int peer = 1 - self->rank;

    self->check = check_sizes;
    SUITE_TRY(suite_open(self));
    for (uint32_t i = 0; i < 2 * SIZES; i++) {
        suite_fill(self->heap, sizes[i % SIZES], self->rank, i);
        SUITE_TRY(suite_put(self, peer, 0, recv_buf(self->rank), sizes[i % SIZES], 0));
        SUITE_TRY(suite_wait_arrived(self, peer, i + 1));
        SUITE_TRY(suite_wait_completed(self));
        SUITE_TRY(suite_barrier(self));
    }
    SUITE_CHECK(self, suite_guards_hold(self));
    return suite_barrier(self);
}

/* ---- Many puts in slots of their own */

struct flood {
    uint32_t puts, slot, bytes; /* bytes <= slot; slots are used again after `slots` puts */
};

static uint32_t slots_of(const struct flood *flood)
{
    return (HALF / SUITE_RANKS) / flood->slot;
}

/* Sends everything to `peer` as fast as it goes: polls only when there is no room. Sources are reused when their put
 * has completed. */
static int flood_peer(struct suite_rank *self, const struct flood *flood, int peer)
{
    const uint32_t slots = slots_of(flood), i = self->posted[peer];
    const uint64_t source = (uint64_t)peer * (HALF / SUITE_RANKS) + (uint64_t)(i % slots) * flood->slot;

    while (i - self->completed[peer] >= slots)
        SUITE_TRY(suite_step(self));
    suite_fill(self->heap + source, flood->bytes, self->rank, i);
    return suite_put(self, peer, source, recv_buf(self->rank) + (uint64_t)(i % slots) * flood->slot, flood->bytes, 0);
}

static int check_flood(struct suite_rank *self, const struct flood *flood, int peer, uint32_t index)
{
    const uint32_t slot = index % slots_of(flood);
    int64_t at = suite_differs(self->heap + recv_buf(peer) + (uint64_t)slot * flood->slot, flood->bytes, peer, index);

    return at < 0 ? 0 : suite_fail(self, "put %u of %d: byte %lld not there", index, peer, (long long)at);
}

static int flood_all(struct suite_rank *self, const struct flood *flood)
{
    const uint32_t puts = flood->puts > 1000 ? suite_share(flood->puts) : flood->puts;

    SUITE_TRY(suite_open(self));
    for (uint32_t i = 0; i < puts; i++)
        for (int d = 1; d < self->nranks; d++)
            SUITE_TRY(flood_peer(self, flood, (self->rank + d) % self->nranks));
    for (int d = 1; d < self->nranks; d++)
        SUITE_TRY(suite_wait_arrived(self, (self->rank + d) % self->nranks, puts));
    return suite_finish(self);
}

/* Each put into a place of its own, so that all can be compared however late they are looked at. */
static const struct flood small = {.puts = 8000, .slot = 128, .bytes = 112};
static const struct flood signals = {.puts = 5000, .slot = 16, .bytes = 0};
static const struct flood middle = {.puts = 64, .slot = 16384, .bytes = 14352};
static const struct flood big = {.puts = 16, .slot = 65536, .bytes = 65536};

static int check_small(struct suite_rank *self, int peer, uint32_t index)
{
    return check_flood(self, &small, peer, index);
}

static int check_middle(struct suite_rank *self, int peer, uint32_t index)
{
    return check_flood(self, &middle, peer, index);
}

static int check_big(struct suite_rank *self, int peer, uint32_t index)
{
    return check_flood(self, &big, peer, index);
}

static int many_small(struct suite_rank *self)
{
    self->check = check_small;
    return flood_all(self, &small);
}

static int many_signals(struct suite_rank *self)
{
    return flood_all(self, &signals);
}

static int four_ranks(struct suite_rank *self)
{
    self->check = check_middle;
    return flood_all(self, &middle);
}

static int four_ranks_big(struct suite_rank *self)
{
    self->check = check_big;
    return flood_all(self, &big);
}

/* Both ways at once and nobody looks at what comes until nothing goes any more: -EAGAIN, never a deadlock. */
static int both_ways_without_polling(struct suite_rank *self)
{
    enum { BYTES = 16384 };
    const uint32_t puts = suite_share(3000);
    const int peer = 1 - self->rank;

    SUITE_TRY(suite_open(self));
    for (uint32_t i = 0; i < puts; i++)
        SUITE_TRY(suite_put(self, peer, 0, recv_buf(self->rank), BYTES, 0));
    SUITE_TRY(suite_wait_arrived(self, peer, puts));
    SUITE_TRY(suite_wait_completed(self));
    return suite_barrier(self);
}

/* ---- The meaning of NET_SENT: the source may change */

/* Few source slots, reused as soon as their puts complete, each put into a place of its own. */
static int sources_free_when_sent(struct suite_rank *self)
{
    enum { SOURCES = 4 };
    const int peer = 1 - self->rank;

    self->check = check_middle;
    SUITE_TRY(suite_open(self));
    for (uint32_t i = 0; i < middle.puts; i++) {
        const uint64_t source = (i % SOURCES) * (uint64_t)middle.slot;
        while (i - self->completed[peer] >= SOURCES)
            SUITE_TRY(suite_step(self));
        suite_fill(self->heap + source, middle.bytes, self->rank, i);
        SUITE_TRY(suite_put(self, peer, source, recv_buf(self->rank) + (uint64_t)i * middle.slot, middle.bytes, 0));
    }
    SUITE_TRY(suite_wait_completed(self));
    memset(self->heap, 0xee, SOURCES * (size_t)middle.slot);
    SUITE_TRY(suite_wait_arrived(self, peer, middle.puts));
    return suite_barrier(self);
}

/* ---- more and flush */

/* Chains of all lengths to changing peers; a chain ends with a put without `more`, or with flush. */
static int chains(struct suite_rank *self)
{
    uint32_t total = 0;

    self->check = check_small;
    SUITE_TRY(suite_open(self));
    for (uint32_t length = 1; length <= 80; length++) {
        for (uint32_t i = 0; i < length; i++, total++) {
            for (int d = 1; d < self->nranks; d++) {
                const int peer = (self->rank + d) % self->nranks;
                const uint64_t at = (uint64_t)total * small.slot;
                suite_fill(self->heap + at, small.bytes, self->rank, total);
                SUITE_TRY(
                    suite_put(self, peer, at, recv_buf(self->rank) + at, small.bytes, i + 1 < length || length % 2));
            }
        }
        SUITE_CHECK(self, self->suite->ops->flush(self->net) == 0);
    }
    for (int d = 1; d < self->nranks; d++)
        SUITE_TRY(suite_wait_arrived(self, (self->rank + d) % self->nranks, total));
    SUITE_TRY(suite_wait_completed(self));
    return suite_barrier(self);
}

const struct suite_case suite_cases[] = {
    {.name = "all_sizes", .nranks = 2, .body = all_sizes},
    {.name = "many_small", .nranks = 2, .body = many_small},
    {.name = "many_signals", .nranks = 2, .body = many_signals},
    {.name = "four_ranks", .nranks = 4, .body = four_ranks},
    {.name = "four_ranks_big", .nranks = 4, .body = four_ranks_big},
    {.name = "both_ways_without_polling", .nranks = 2, .body = both_ways_without_polling},
    {.name = "sources_free_when_sent", .nranks = 2, .body = sources_free_when_sent},
    {.name = "chains", .nranks = 2, .body = chains},
    {.name = "chains_to_three", .nranks = 4, .body = chains},
    {.name = "open_and_close_often", .nranks = 2, .body = case_open_and_close_often},
    {.name = "reopened_pairs_work", .nranks = 2, .body = case_reopened_pairs_work},
    {.name = "own_bounds", .nranks = 2, .body = case_own_bounds},
    {.name = "remote_bounds", .nranks = 2, .body = case_remote_bounds, .timeout_ms = 1500},
    {.name = "wrong_version", .nranks = 2, .body = case_wrong_version},
    {.name = "peer_never_there", .nranks = 2, .body = case_peer_never_there, .loses = 1, .timeout_ms = 1500},
    {.name = "sleeper_wakes", .nranks = 2, .body = case_sleeper_wakes},
    {.name = "sleeper_sleeps", .nranks = 2, .body = case_sleeper_sleeps},
    {.name = "death_is_told", .nranks = 3, .body = case_death_is_told, .needs_kill = 1, .loses = 1, .timeout_ms = 3000},
    {.name = "survivors_go_on",
     .nranks = 3,
     .body = case_survivors_go_on,
     .needs_kill = 1,
     .loses = 1,
     .timeout_ms = 3000},
};
const int suite_case_count = (int)(sizeof(suite_cases) / sizeof(suite_cases[0]));

/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/net_suite_rank.h"

#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/lib/slow.h"
#include "util/clock.h"

enum { INDEX_BITS = 24, GUARD_BYTE = 0xa5, EVENTS = 32, SPINS = 50 };

void (*suite_switch)(void);

/* ---- Outcome */

static int tell(struct suite_rank *self, int outcome, const char *format, va_list args)
{
    if (!atomic_exchange(&self->shared->reported, 1)) {
        int used = snprintf(self->shared->text, sizeof(self->shared->text), "rank %d: ", self->rank);
        vsnprintf(self->shared->text + used, sizeof(self->shared->text) - (size_t)used, format, args);
        self->shared->outcome = outcome;
    }
    atomic_store(&self->shared->stop, 1);
    return -1;
}

int suite_fail(struct suite_rank *self, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    tell(self, NET_SUITE_FAILED, format, args);
    va_end(args);
    return -1;
}

int suite_skip(struct suite_rank *self, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    tell(self, NET_SUITE_SKIPPED, format, args);
    va_end(args);
    return -1;
}

/* ---- Patterns */

static uint64_t pattern(int source, uint32_t index, uint32_t word)
{
    uint64_t x = ((uint64_t)(source + 1) << 56) ^ ((uint64_t)index << 24) ^ word;

    x *= 0x9e3779b97f4a7c15u;
    return x ^ x >> 29;
}

enum { BLOCK = 512 };

/* The bytes of a put behind `from`, at most BLOCK; returns how many. In blocks, for sanitizers: each memcpy and memcmp
 * takes them longer than the bytes in it. */
static uint32_t make_block(uint64_t *words, uint32_t from, uint32_t bytes, int source, uint32_t index)
{
    const uint32_t n = bytes - from < BLOCK ? bytes - from : BLOCK;

    for (uint32_t i = 0; i < n; i += 8)
        words[i / 8] = pattern(source, index, from + i);
    return n;
}

void suite_fill(uint8_t *at, uint32_t bytes, int source, uint32_t index)
{
    uint64_t words[BLOCK / 8];
    uint32_t n;

    for (uint32_t i = 0; i < bytes; i += n) {
        n = make_block(words, i, bytes, source, index);
        memcpy(at + i, words, n);
    }
}

int64_t suite_differs(const uint8_t *at, uint32_t bytes, int source, uint32_t index)
{
    uint64_t words[BLOCK / 8];
    const uint8_t *expected = (const uint8_t *)words;
    uint32_t n, j = 0;

    for (uint32_t i = 0; i < bytes; i += n) {
        n = make_block(words, i, bytes, source, index);
        if (memcmp(at + i, expected, n) == 0)
            continue;
        while (j < n && at[i + j] == expected[j])
            j++;
        return i + j;
    }
    return -1;
}

int suite_guards_hold(const struct suite_rank *self)
{
    for (int i = 0; i < SUITE_GUARD; i++)
        if (self->memory[i] != GUARD_BYTE || self->heap[SUITE_HEAP + i] != GUARD_BYTE)
            return 0;
    return 1;
}

/* ---- Open and close */

int suite_open_alone(struct suite_rank *self)
{
    const struct net_options options = {.rank = self->rank,
                                        .nranks = self->nranks,
                                        .timeout_ms = self->timeout_ms,
                                        .provider = self->suite->provider ? self->suite->provider : "",
                                        .world = self->world,
                                        .key =
                                            self->no_key ? NULL : (const uint8_t *)"the key of all ranks of a suite "};
    const size_t bytes = SUITE_GUARD + SUITE_HEAP + SUITE_GUARD;

    self->memory = self->suite->memory ? self->suite->memory(bytes) : aligned_alloc(4096, bytes);
    if (!self->memory)
        return suite_fail(self, "no memory");
    memset(self->memory, GUARD_BYTE, bytes);
    self->heap = self->memory + SUITE_GUARD;
    memset(self->heap, 0, SUITE_HEAP);
    for (int i = 0; i < self->nranks; i++) {
        self->seen[i] = calloc(1, SUITE_PUTS);
        if (!self->seen[i])
            return suite_fail(self, "no memory");
    }
    if (self->suite->ops->open(&options, &self->net))
        return suite_fail(self, "open: %s", epx_last_error());
    return 0;
}

int suite_publish(struct suite_rank *self)
{
    const struct net_ops *ops = self->suite->ops;
    const struct net_memory memory = {.base = self->heap, .bytes = SUITE_HEAP, .kind = EPX_DEVICE_CPU, .dmabuf = -1};

    if (ops->address(self->net, &self->shared->addresses[self->rank]))
        return suite_fail(self, "address: %s", epx_last_error());
    if (ops->add_region(self->net, &memory, &self->shared->regions[self->rank]))
        return suite_fail(self, "add_region: %s", epx_last_error());
    SUITE_CHECK(self, self->shared->addresses[self->rank].bytes <= NET_ADDRESS_MAX);
    SUITE_CHECK(self, self->shared->regions[self->rank].key_bytes <= NET_KEY_MAX);
    SUITE_CHECK(self, self->shared->regions[self->rank].bytes == SUITE_HEAP);
    return suite_barrier(self);
}

int suite_connect(struct suite_rank *self)
{
    for (int peer = 0; peer < self->nranks; peer++)
        if (peer != self->rank &&
            self->suite->ops->connect(self->net, peer, &self->shared->addresses[peer], &self->shared->regions[peer]))
            return suite_fail(self, "connect to %d: %s", peer, epx_last_error());
    return 0;
}

int suite_open(struct suite_rank *self)
{
    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    SUITE_TRY(suite_connect(self));
    return suite_barrier(self);
}

void suite_close(struct suite_rank *self)
{
    if (self->net)
        self->suite->ops->close(self->net);
    self->net = NULL;
    for (int i = 0; i < self->nranks; i++) {
        free(self->seen[i]);
        self->seen[i] = NULL;
    }
    if (self->memory && self->suite->memory)
        self->suite->memory_free(self->memory);
    else
        free(self->memory);
    self->memory = self->heap = NULL;
}

/* ---- Events */

static int on_sent(struct suite_rank *self, const struct net_event *event)
{
    const int peer = event->peer;

    SUITE_CHECK(self, peer >= 0 && peer < self->nranks && peer != self->rank);
    SUITE_CHECK(self, event->count >= 1 && event->count <= self->posted[peer] - self->completed[peer]);
    /* Cookies are the numbers of the puts: the last of the `count` that have completed. */
    if (event->cookie != self->completed[peer] + event->count - 1)
        return suite_fail(self, "completion of %u puts to %d has cookie %llu, expected %u", event->count, peer,
                          (unsigned long long)event->cookie, self->completed[peer] + event->count - 1);
    self->completed[peer] += event->count;
    return 0;
}

static int on_arrived(struct suite_rank *self, const struct net_event *event)
{
    const int peer = (int)(event->immediate >> INDEX_BITS);
    const uint32_t index = event->immediate & ((1u << INDEX_BITS) - 1);

    if (peer >= self->nranks || peer == self->rank || index >= SUITE_PUTS)
        return suite_fail(self, "immediate %#x was never sent", event->immediate);
    if (self->seen[peer][index]++)
        return suite_fail(self, "immediate %u of %d arrived twice", index, peer);
    self->arrived[peer]++;
    return self->check ? self->check(self, peer, index) : 0;
}

static int on_event(struct suite_rank *self, const struct net_event *event)
{
    switch (event->kind) {
    case NET_SENT:
        return on_sent(self, event);
    case NET_ARRIVED:
        return on_arrived(self, event);
    case NET_FAILED:
        SUITE_CHECK(self, event->peer >= 0 && event->peer < self->nranks);
        SUITE_CHECK(self, event->error > 0);
        if (self->lost[event->peer])
            return suite_fail(self, "the loss of %d is reported twice", event->peer);
        self->lost[event->peer] = event->error;
        return 0;
    case NET_REFUSED:
        return self->strangers ? 0 : suite_fail(self, "%u arrivals of peers were refused", event->count);
    }
    return suite_fail(self, "event of kind %d", (int)event->kind);
}

void suite_yield(struct suite_rank *self)
{
    if (self->suite->world_idle)
        self->suite->world_idle(self->world);
    if (suite_switch)
        suite_switch();
    else if (++self->idle < SPINS)
        sched_yield();
    else /* on a busy machine a thread that sleeps has a core sooner than one that yields */
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
}

int suite_step(struct suite_rank *self)
{
    struct net_event events[EVENTS];
    int count;

    if (atomic_load(&self->shared->stop))
        return -1;
    if (!self->net) {
        suite_yield(self);
        return 0;
    }
    count = self->suite->ops->poll(self->net, events, EVENTS);
    if (count < 0)
        return suite_fail(self, "poll: %s", strerror(-count));
    SUITE_CHECK(self, count <= EVENTS);
    for (int i = 0; i < count; i++)
        SUITE_TRY(on_event(self, &events[i]));
    if (count)
        self->idle = 0;
    else
        suite_yield(self);
    return 0;
}

int suite_time_scale(void)
{
    const char *text = getenv("EPX_TEST_TIME_SCALE");
    const int times = text ? atoi(text) : 1;

    return times > 1 ? times : 1;
}

uint32_t suite_share(uint32_t n)
{
    return suite_time_scale() > 1 ? n / 4 : n;
}

static uint64_t limit(void)
{
    return clock_ns() + (uint64_t)suite_time_scale() * (uint64_t)slow_ms(SUITE_LIMIT_MS) * 1000000u;
}

/* ---- Waits */

static int living(const struct suite_rank *self)
{
    int count = 0;

    for (int i = 0; i < self->nranks; i++)
        count += !atomic_load(&self->shared->gone[i]);
    return count;
}

int suite_barrier(struct suite_rank *self)
{
    const uint64_t deadline = limit();
    const int round = atomic_load(&self->shared->round);

    if (atomic_fetch_add(&self->shared->arrived, 1) + 1 >= living(self)) {
        atomic_store(&self->shared->arrived, 0);
        atomic_fetch_add(&self->shared->round, 1);
    }
    while (atomic_load(&self->shared->round) == round) {
        SUITE_TRY(suite_step(self));
        if (clock_ns() > deadline)
            return suite_fail(self, "the other ranks did not come to the barrier");
    }
    return 0;
}

int suite_finish(struct suite_rank *self)
{
    SUITE_TRY(suite_wait_completed(self));
    SUITE_CHECK(self, suite_guards_hold(self));
    return suite_barrier(self);
}

int suite_try_put(struct suite_rank *self, int peer, uint64_t source, uint64_t target, uint32_t bytes, int more)
{
    const uint32_t index = self->posted[peer];
    const struct net_put put = {.peer = peer,
                                .bytes = bytes,
                                .source = source,
                                .target = target,
                                .immediate = (uint32_t)self->rank << INDEX_BITS | index,
                                .more = (uint32_t)more,
                                .cookie = index};
    const int rc = self->suite->ops->put(self->net, &put);

    self->posted[peer] += !rc;
    self->again += rc == -EAGAIN;
    return rc;
}

int suite_put(struct suite_rank *self, int peer, uint64_t source, uint64_t target, uint32_t bytes, int more)
{
    const uint64_t deadline = limit();
    int rc;

    SUITE_CHECK(self, self->posted[peer] < SUITE_PUTS);
    while ((rc = suite_try_put(self, peer, source, target, bytes, more)) == -EAGAIN) {
        SUITE_TRY(suite_step(self));
        if (clock_ns() > deadline)
            return suite_fail(self, "no room for a put to %d", peer);
    }
    return rc ? suite_fail(self, "put of %u bytes to %d: %s", bytes, peer, strerror(-rc)) : 0;
}

int suite_wait_arrived(struct suite_rank *self, int peer, uint32_t count)
{
    const uint64_t deadline = limit();

    while (self->arrived[peer] < count) {
        SUITE_TRY(suite_step(self));
        if (self->lost[peer])
            return suite_fail(self, "%d is lost: %s", peer, strerror(self->lost[peer]));
        if (clock_ns() > deadline)
            return suite_fail(self, "%u immediates of %d arrived, expected %u", self->arrived[peer], peer, count);
    }
    return 0;
}

int suite_wait_completed(struct suite_rank *self)
{
    const uint64_t deadline = limit();

    for (int peer = 0; peer < self->nranks; peer++) {
        while (self->completed[peer] < self->posted[peer] && !self->lost[peer]) {
            SUITE_TRY(suite_step(self));
            if (clock_ns() > deadline)
                return suite_fail(self, "%u puts to %d completed, expected %u", self->completed[peer], peer,
                                  self->posted[peer]);
        }
    }
    return 0;
}

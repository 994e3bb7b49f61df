/* SPDX-License-Identifier: Apache-2.0 */
/* The cases of the network suite: life, sleep and death of endpoints, and what must not be written. */
#include "tests/lib/net_suite_cases.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/lib/slow.h"
#include "util/clock.h"

enum { SLEEP_MS = 60000 }; /* of a sleeper that nobody wakes */

/* Under sanitizers less often: libfabric's own threads take most of the time there. */
int case_open_and_close_often(struct suite_rank *self)
{
    const char *sanitizer = getenv("EPX_SANITIZE");
    const int times = sanitizer && strcmp(sanitizer, "none") ? 5 : 15;

    for (int i = 0; i < times; i++) {
        SUITE_TRY(suite_open_alone(self));
        SUITE_TRY(suite_publish(self));
        suite_close(self);
    }
    return suite_barrier(self);
}

/* What the last pair left behind does not disturb the next. */
int case_reopened_pairs_work(struct suite_rank *self)
{
    const int peer = 1 - self->rank;

    for (int i = 0; i < 5; i++) {
        SUITE_TRY(suite_open(self));
        self->posted[peer] = self->completed[peer] = self->arrived[peer] = 0;
        suite_fill(self->heap, 4096, self->rank, (uint32_t)i);
        SUITE_TRY(suite_put(self, peer, 0, 8192, 4096, 0));
        SUITE_TRY(suite_wait_arrived(self, peer, 1));
        SUITE_CHECK(self, suite_differs(self->heap + 8192, 4096, peer, (uint32_t)i) < 0);
        SUITE_TRY(suite_wait_completed(self));
        SUITE_TRY(suite_barrier(self));
        suite_close(self);
        SUITE_TRY(suite_barrier(self));
    }
    return 0;
}

/* A put that would leave either region, or goes to nobody, is refused at once; the peer stays usable. */
int case_own_bounds(struct suite_rank *self)
{
    const int peer = 1 - self->rank;
    const struct {
        uint64_t source, target;
        uint32_t bytes;
    } bad[] = {{SUITE_HEAP, 0, 16},    {SUITE_HEAP - 16, 0, 32}, {0, SUITE_HEAP, 16},       {0, SUITE_HEAP - 16, 32},
               {(uint64_t)-16, 0, 32}, {0, (uint64_t)-16, 32},   {0, (uint64_t)1 << 40, 16}};

    SUITE_TRY(suite_open(self));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        int rc = suite_try_put(self, peer, bad[i].source, bad[i].target, bad[i].bytes, 0);
        if (rc >= 0 || rc == -EAGAIN)
            return suite_fail(self, "a put of %u bytes from %llu to %llu gives %d", bad[i].bytes,
                              (unsigned long long)bad[i].source, (unsigned long long)bad[i].target, rc);
    }
    for (int nobody = -1; nobody <= self->nranks; nobody += self->nranks + 1) {
        const struct net_put put = {.peer = nobody};
        int rc = self->suite->ops->put(self->net, &put);
        SUITE_CHECK(self, rc < 0 && rc != -EAGAIN);
    }
    SUITE_TRY(suite_put(self, peer, SUITE_HEAP - 16, SUITE_HEAP - 16, 16, 0)); /* the last 16 bytes are allowed */
    SUITE_TRY(suite_wait_arrived(self, peer, 1));
    return suite_finish(self);
}

/* Rank 0 believes that the region of rank 1 is larger than it is. Nothing may be written beyond it, no immediate may
 * come, and rank 1 lives. */
int case_remote_bounds(struct suite_rank *self)
{
    const uint64_t until = 400000000u;
    uint64_t start;

    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    if (!self->rank)
        self->shared->regions[1].bytes += SUITE_GUARD;
    SUITE_TRY(suite_barrier(self));
    SUITE_TRY(suite_connect(self));
    memset(self->heap, 0x77, 4096);
    SUITE_TRY(suite_barrier(self));
    if (!self->rank) {
        int rc;
        while ((rc = suite_try_put(self, 1, 0, SUITE_HEAP - 64, 1024, 0)) == -EAGAIN)
            SUITE_TRY(suite_step(self));
    }
    start = clock_ns();
    while (clock_ns() - start < until)
        SUITE_TRY(suite_step(self));
    SUITE_CHECK(self, suite_guards_hold(self));
    SUITE_CHECK(self, !self->arrived[1 - self->rank]);
    return suite_barrier(self);
}

int case_wrong_version(struct suite_rank *self)
{
    const int peer = 1 - self->rank;
    struct net_address bad;
    char name[32];

    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    bad = self->shared->addresses[peer];
    bad.version += 1;
    snprintf(name, sizeof(name), "rank %d", peer);
    SUITE_CHECK(self,
                self->suite->ops->connect(self->net, peer, &bad, &self->shared->regions[peer]) == EPX_ERR_MISMATCH);
    SUITE_CHECK(self, strstr(epx_last_error(), "version") && strstr(epx_last_error(), name));
    bad = self->shared->addresses[peer];
    bad.bytes = NET_ADDRESS_MAX + 1;
    SUITE_CHECK(self, self->suite->ops->connect(self->net, peer, &bad, &self->shared->regions[peer]) != EPX_OK);
    bad.bytes = 0;
    SUITE_CHECK(self, self->suite->ops->connect(self->net, peer, &bad, &self->shared->regions[peer]) != EPX_OK);
    SUITE_TRY(suite_connect(self)); /* the right one still works */
    SUITE_TRY(suite_put(self, peer, 0, 0, 64, 0));
    SUITE_TRY(suite_wait_arrived(self, peer, 1));
    return suite_barrier(self);
}

/* Waits until the loss of `peer` is reported. Puts now and then: silence tells nobody anything. */
static int wait_lost(struct suite_rank *self, int peer)
{
    const int usual_ms = self->suite->finds_deaths ? self->timeout_ms / 2 : slow_ms(2 * self->timeout_ms + 6000);
    const int limit_ms = usual_ms * (self->suite->finds_deaths ? 1 : suite_time_scale());
    const uint64_t deadline = clock_ns() + (uint64_t)limit_ms * 1000000u;
    uint64_t next = 0;

    while (!self->lost[peer]) {
        if (clock_ns() >= next) {
            suite_try_put(self, peer, 0, 0, 64, 0);
            next = clock_ns() + 500000u;
        }
        SUITE_TRY(suite_step(self));
        if (clock_ns() > deadline)
            return suite_fail(self, "the loss of %d was not reported within %d ms", peer, limit_ms);
    }
    return 0;
}

/* Rank 1 closes before anybody has spoken to it: its address leads nowhere. */
int case_peer_never_there(struct suite_rank *self)
{
    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    if (self->rank) {
        suite_close(self);
        SUITE_TRY(suite_barrier(self));
        return suite_barrier(self);
    }
    SUITE_TRY(suite_barrier(self));
    if (!self->suite->ops->connect(self->net, 1, &self->shared->addresses[1], &self->shared->regions[1])) {
        SUITE_TRY(wait_lost(self, 1));
        SUITE_CHECK(self, suite_try_put(self, 1, 0, 0, 64, 0) < 0);
    }
    return suite_barrier(self);
}

/* Sleeps on the descriptor until something arrives; 1 = it did, 0 = the time is over. *turns: how often it looked. */
static int sleep_on(struct suite_rank *self, int limit_ms, int *turns)
{
    const uint64_t deadline = clock_ns() + (uint64_t)limit_ms * 1000000u;
    struct pollfd fd = {.fd = self->suite->ops->wait_fd(self->net), .events = POLLIN};

    for (*turns = 0; !self->arrived[0] && clock_ns() < deadline; ++*turns) {
        int rc = self->suite->ops->arm(self->net);
        if (rc < 0 && rc != -EAGAIN)
            return suite_fail(self, "arm: %s", strerror(-rc));
        if (rc >= 0)
            poll(&fd, 1, rc ? rc / 1000000 + 1 : (int)((deadline - clock_ns()) / 1000000u));
        SUITE_TRY(suite_step(self));
    }
    return self->arrived[0] ? 1 : 0;
}

/* Rank 1 sleeps; a put that comes later wakes it long before its time is over. Twice: the second sleep is armed anew.
 * */
static int sleep_twice(struct suite_rank *self, int most_turns)
{
    int turns;

    SUITE_TRY(suite_open(self));
    if (self->suite->ops->wait_fd(self->net) < 0)
        return suite_skip(self, "nothing to sleep on: proxies poll");
    if (self->suite->ranks == NET_SUITE_FIBERS)
        return suite_skip(self, "coroutines do not sleep");
    for (int i = 0; i < 2; i++) {
        SUITE_TRY(suite_barrier(self));
        if (self->rank) {
            const uint64_t start = clock_ns();
            self->arrived[0] = 0;
            SUITE_CHECK(self, sleep_on(self, SLEEP_MS, &turns) == 1);
            SUITE_CHECK(self, turns <= most_turns);
            SUITE_CHECK(self, (clock_ns() - start) / 1000000u < SLEEP_MS / 2);
        } else {
            usleep(200000);
            SUITE_TRY(suite_put(self, 1, 0, 0, 4096, 0));
            SUITE_TRY(suite_wait_completed(self));
        }
    }
    return suite_barrier(self);
}

int case_sleeper_wakes(struct suite_rank *self)
{
    return sleep_twice(self, INT_MAX);
}

/* What ended the first sleep must not keep the second from being one. */
int case_sleeper_sleeps(struct suite_rank *self)
{
    return sleep_twice(self, 1000);
}

/* Rank 2 is killed while the others flood it: they hear of it. 1 for rank 2. */
static int lose_rank_2(struct suite_rank *self)
{
    SUITE_TRY(suite_open(self));
    if (self->rank == 2) {
        while (!atomic_load(&self->shared->gone[2]) && !suite_step(self)) /* until killed */
            if (self->posted[0] < SUITE_PUTS)
                suite_try_put(self, 0, 0, 0, 16384, 0);
        return 1;
    }
    while (!self->rank && self->arrived[2] < 20) {
        if (self->posted[2] < SUITE_PUTS / 2)
            suite_try_put(self, 2, 0, 65536, 16384, 0);
        SUITE_TRY(suite_step(self));
    }
    if (!self->rank) {
        atomic_store(&self->shared->gone[2], 1);
        if (self->suite->ranks == NET_SUITE_PROCESSES)
            kill(atomic_load(&self->shared->pids[2]), SIGKILL);
        else
            self->suite->world_kill(self->world, 2);
    }
    return wait_lost(self, 2);
}

int case_death_is_told(struct suite_rank *self)
{
    SUITE_TRY(lose_rank_2(self));
    SUITE_CHECK(self, suite_try_put(self, 2, 0, 0, 64, 0) < 0);
    SUITE_CHECK(self, !self->lost[1 - self->rank] && suite_guards_hold(self));
    return suite_barrier(self);
}

int case_survivors_go_on(struct suite_rank *self)
{
    const int other = 1 - self->rank;

    SUITE_TRY(lose_rank_2(self));
    for (int i = 0; i < 500; i++)
        SUITE_TRY(suite_put(self, other, 0, 131072, 16384, 0));
    SUITE_TRY(suite_wait_arrived(self, other, 500));
    SUITE_TRY(suite_wait_completed(self));
    SUITE_CHECK(self, !self->lost[other] && suite_guards_hold(self));
    return suite_barrier(self);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_shm.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "util/clock.h"

#define BENCH_SHM_MAGIC 0x45505842454e4348u
/* A team may sleep for as long as another one runs; when the driver dies, its watcher ends it anyway. */
#define IDLE_MS 3600000

/* Sleeps while *word == seen, at most ms. Shared between processes, so not FUTEX_PRIVATE. */
static void futex_wait(uint32_t *word, uint32_t seen, int ms)
{
    struct timespec ts = {ms / 1000, (long)(ms % 1000) * 1000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &ts, NULL, 0);
}

static void futex_wake(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

struct bench_shm *bench_shm_create(const struct bench_config *config, char *path, int path_bytes)
{
    struct bench_shm *shm;
    int fd = memfd_create("epx-bench", MFD_CLOEXEC);

    if (fd < 0)
        return NULL;
    if (ftruncate(fd, sizeof(*shm)) != 0)
        goto close_fd;
    shm = mmap(NULL, sizeof(*shm), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shm == MAP_FAILED)
        goto close_fd;
    /* The descriptor stays open: others reach the memory through it, and it vanishes with this process. */
    snprintf(path, (size_t)path_bytes, "/proc/%d/fd/%d", (int)getpid(), fd);
    shm->magic = BENCH_SHM_MAGIC;
    shm->config = *config;
    return shm;
close_fd:
    close(fd);
    return NULL;
}

int bench_shm_attach(struct bench_shm_rank *self, const char *path, enum bench_team_id team, int rank)
{
    struct bench_shm *shm;
    int fd = open(path, O_RDWR | O_CLOEXEC);

    if (fd < 0)
        return -1;
    shm = mmap(NULL, sizeof(*shm), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (shm == MAP_FAILED)
        return -1;
    if (shm->magic != BENCH_SHM_MAGIC) {
        munmap(shm, sizeof(*shm));
        errno = EPROTO;
        return -1;
    }
    *self = (struct bench_shm_rank){.shm = shm, .team = &shm->team[team], .rank = rank};
    return 0;
}

int bench_shm_stopped(const struct bench_shm *shm)
{
    /* pairs with the release in bench_shm_fail: a reader that sees `stop` may read the message */
    return __atomic_load_n(&shm->stop, __ATOMIC_ACQUIRE) != 0;
}

static void wake_everybody(struct bench_shm *shm)
{
    int i;

    for (i = 0; i < BENCH_TEAMS; i++) {
        futex_wake(&shm->team[i].command_seq);
        futex_wake(&shm->team[i].done);
        futex_wake(&shm->team[i].phase);
    }
}

void bench_shm_fail(struct bench_shm *shm, enum bench_failure failure, const char *format, ...)
{
    uint32_t none = BENCH_FINE;
    va_list args;

    if (__atomic_compare_exchange_n(&shm->failure, &none, failure, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        va_start(args, format);
        vsnprintf(shm->message, sizeof(shm->message), format, args);
        va_end(args);
        /* pairs with the acquire in bench_shm_stopped */
        __atomic_store_n(&shm->stop, 1, __ATOMIC_RELEASE);
    }
    wake_everybody(shm);
}

void bench_shm_order(struct bench_shm *shm, enum bench_team_id team, const struct bench_command *command)
{
    struct bench_team *t = &shm->team[team];

    t->command = *command;
    __atomic_store_n(&t->done, 0, __ATOMIC_RELAXED);
    /* pairs with the acquire in bench_shm_next: the command is complete before its number changes */
    __atomic_fetch_add(&t->command_seq, 1, __ATOMIC_RELEASE);
    futex_wake(&t->command_seq);
}

int bench_shm_poll_done(struct bench_shm *shm, enum bench_team_id team, int ms)
{
    struct bench_team *t = &shm->team[team];
    /* pairs with the release in bench_shm_done: times and names are there when the rank counts as done */
    uint32_t done = __atomic_load_n(&t->done, __ATOMIC_ACQUIRE);

    if (bench_shm_stopped(shm))
        return -1;
    if (done >= (uint32_t)shm->config.ranks)
        return 1;
    futex_wait(&t->done, done, ms);
    return 0;
}

/* Waits until *word differs from `seen`. 0, or -1 when stopped or past the deadline. */
static int wait_change(struct bench_shm *shm, uint32_t *word, uint32_t seen, int timeout_ms)
{
    uint64_t deadline = clock_ns() + (uint64_t)timeout_ms * 1000000u;

    /* pairs with the releases in bench_shm_order and bench_shm_barrier */
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == seen) {
        if (bench_shm_stopped(shm) || clock_ns() > deadline)
            return -1;
        futex_wait(word, seen, 500);
    }
    return bench_shm_stopped(shm) ? -1 : 0;
}

int bench_shm_next(struct bench_shm_rank *self, struct bench_command *command)
{
    if (wait_change(self->shm, &self->team->command_seq, self->command_seen, IDLE_MS) != 0)
        return -1;
    self->command_seen++;
    *command = self->team->command;
    return 0;
}

void bench_shm_done(struct bench_shm_rank *self)
{
    /* pairs with the acquire in bench_shm_poll_done */
    __atomic_fetch_add(&self->team->done, 1, __ATOMIC_RELEASE);
    futex_wake(&self->team->done);
}

static void barrier_open(struct bench_team *team)
{
    __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
    team->release_ns = clock_ns();
    /* pairs with the acquire in wait_change: who leaves the barrier sees release_ns and arrived = 0 */
    __atomic_fetch_add(&team->phase, 1, __ATOMIC_RELEASE);
    futex_wake(&team->phase);
}

/* Waits for the barrier that was in phase `phase`; a late team is reported once. */
static int barrier_wait(struct bench_shm_rank *self, uint32_t phase)
{
    struct bench_shm *shm = self->shm;

    if (wait_change(shm, &self->team->phase, phase, shm->config.timeout_ms) == 0)
        return 0;
    if (!bench_shm_stopped(shm))
        bench_shm_fail(shm, BENCH_ERROR, "rank %d waited %d ms at a barrier that %u of %d ranks reached", self->rank,
                       shm->config.timeout_ms, __atomic_load_n(&self->team->arrived, __ATOMIC_RELAXED),
                       shm->config.ranks);
    return -1;
}

/* One more rank is here; is it the last? Acquire and release: the last sees what all the others wrote before. */
static int barrier_arrive(struct bench_shm_rank *self)
{
    uint32_t before = __atomic_fetch_add(&self->team->arrived, 1, __ATOMIC_ACQ_REL);

    return before + 1 == (uint32_t)self->shm->config.ranks;
}

int bench_shm_barrier(struct bench_shm_rank *self)
{
    uint32_t phase = __atomic_load_n(&self->team->phase, __ATOMIC_RELAXED);

    if (barrier_arrive(self)) {
        self->team->last_end_ns = 0;
        barrier_open(self->team);
        return bench_shm_stopped(self->shm) ? -1 : 0;
    }
    return barrier_wait(self, phase);
}

int bench_shm_finish(struct bench_shm_rank *self, enum bench_op op, int variant, int slot)
{
    struct bench_team *team = self->team;
    uint32_t phase = __atomic_load_n(&team->phase, __ATOMIC_RELAXED);
    uint64_t now = clock_ns();
    uint64_t last = __atomic_load_n(&team->last_end_ns, __ATOMIC_RELAXED);

    while (now > last)
        if (__atomic_compare_exchange_n(&team->last_end_ns, &last, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            break;
    if (!barrier_arrive(self))
        return barrier_wait(self, phase);
    if (slot >= 0 && slot < BENCH_MAX_ITERS)
        team->times[op][variant][slot] = team->last_end_ns - team->release_ns;
    team->last_end_ns = 0;
    barrier_open(team);
    return bench_shm_stopped(self->shm) ? -1 : 0;
}

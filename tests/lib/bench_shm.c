/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_shm.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
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
    shm->here = (uint32_t)config->ranks;
    return shm;
close_fd:
    close(fd);
    return NULL;
}

void bench_shm_destroy(struct bench_shm *shm, const char *path)
{
    close(atoi(strrchr(path, '/') + 1));
    munmap(shm, sizeof(*shm));
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
    if (rank < 0 || rank >= BENCH_MAX_RANKS) {
        munmap(shm, sizeof(*shm));
        errno = ERANGE;
        return -1;
    }
    *self = (struct bench_shm_rank){.shm = shm, .team = &shm->team[team], .rank = rank};
    __atomic_store_n(&self->team->ranks[rank].pid, (int32_t)getpid(), __ATOMIC_RELAXED);
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
    if (done >= shm->here)
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
    __atomic_fetch_add(&self->team->ranks[self->rank].commands, 1, __ATOMIC_RELAXED);
    /* pairs with the acquire in bench_shm_poll_done */
    __atomic_fetch_add(&self->team->done, 1, __ATOMIC_RELEASE);
    futex_wake(&self->team->done);
}

void bench_shm_step(struct bench_shm_rank *self)
{
    __atomic_fetch_add(&self->team->ranks[self->rank].steps, 1, __ATOMIC_RELAXED);
}

static void barrier_open(struct bench_team *team)
{
    __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
    team->release_ns = clock_ns();
    /* pairs with the acquire in wait_change: who leaves the barrier sees release_ns and arrived = 0 */
    __atomic_fetch_add(&team->phase, 1, __ATOMIC_RELEASE);
    futex_wake(&team->phase);
}

/* ---- Ranks that are late ------------------------------------------------------------------------------------- */

/* What the system says of a process: " (process 4711 is stopped)". */
static void describe_process(int pid, char *text, size_t bytes)
{
    char path[32], line[256] = "", *state;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    file = pid > 0 ? fopen(path, "re") : NULL;
    if (file != NULL && fgets(line, sizeof(line), file) == NULL)
        line[0] = '\0';
    if (file != NULL)
        fclose(file);
    state = strrchr(line, ')'); /* "4711 (name) T ..." */
    if (pid <= 0)
        snprintf(text, bytes, " (its process has not started)");
    else if (state == NULL)
        snprintf(text, bytes, " (process %d is gone)", pid);
    else
        snprintf(text, bytes, " (process %d%s)", pid, strchr("Tt", state[2]) != NULL ? " is stopped" : "");
}

/* "rank 3 (process 4711 is stopped), rank 5 (process 4713)": ranks with fewer barriers, or commands, than `reached`. */
static void list_late(const struct bench_shm *shm, const struct bench_team *team, int commands, uint32_t reached,
                      char *text, size_t bytes)
{
    char process[64];
    size_t used = 0;
    int rank;

    text[0] = '\0';
    for (rank = 0; rank < shm->config.ranks && used + 80 < bytes; rank++) {
        const struct bench_rank_state *state = &team->ranks[rank];
        const uint32_t *count = commands ? &state->commands : &state->barriers;

        if (__atomic_load_n(count, __ATOMIC_RELAXED) >= reached)
            continue;
        if (shm->here == 1 && state->pid == 0)
            continue; /* it has memory of its own */
        describe_process(__atomic_load_n(&state->pid, __ATOMIC_RELAXED), process, sizeof(process));
        used += (size_t)snprintf(text + used, bytes - used, "%srank %d%s", used > 0 ? ", " : "", rank, process);
    }
}

uint64_t bench_shm_progress(const struct bench_shm *shm, enum bench_team_id team)
{
    uint64_t sum = 0;
    int rank;

    for (rank = 0; rank < shm->config.ranks; rank++)
        sum += (uint64_t)__atomic_load_n(&shm->team[team].ranks[rank].barriers, __ATOMIC_RELAXED) +
               __atomic_load_n(&shm->team[team].ranks[rank].commands, __ATOMIC_RELAXED) +
               __atomic_load_n(&shm->team[team].ranks[rank].steps, __ATOMIC_RELAXED);
    return sum;
}

void bench_shm_fail_late(struct bench_shm *shm, enum bench_team_id team, int waited_ms)
{
    char late[512];

    list_late(shm, &shm->team[team], 1, __atomic_load_n(&shm->team[team].command_seq, __ATOMIC_RELAXED), late,
              sizeof(late));
    bench_shm_fail(shm, BENCH_ERROR, "no progress for %d ms (--timeout); waiting for %s", waited_ms, late);
}

/* Waits for the barrier that was in phase `phase`, as long as others make progress; a late team is reported once. */
static int barrier_wait(struct bench_shm_rank *self, uint32_t phase)
{
    struct bench_shm *shm = self->shm;
    const enum bench_team_id team = (enum bench_team_id)(self->team - shm->team);
    uint64_t seen;
    char late[512];

    do {
        seen = bench_shm_progress(shm, team);
        if (wait_change(shm, &self->team->phase, phase, shm->config.timeout_ms) == 0)
            return 0;
        if (bench_shm_stopped(shm))
            return -1;
    } while (bench_shm_progress(shm, team) != seen);
    list_late(shm, self->team, 0, __atomic_load_n(&self->team->ranks[self->rank].barriers, __ATOMIC_RELAXED), late,
              sizeof(late));
    bench_shm_fail(shm, BENCH_ERROR, "rank %d waited %d ms (--timeout) at a barrier for %s", self->rank,
                   shm->config.timeout_ms, late);
    return -1;
}

/* One more rank is here; is it the last? Acquire and release: the last sees what all the others wrote before. */
static int barrier_arrive(struct bench_shm_rank *self)
{
    uint32_t before;

    __atomic_fetch_add(&self->team->ranks[self->rank].barriers, 1, __ATOMIC_RELAXED);
    before = __atomic_fetch_add(&self->team->arrived, 1, __ATOMIC_ACQ_REL);
    return before + 1 == (uint32_t)self->shm->config.ranks;
}

/* ---- Ranks with a link ---------------------------------------------------------------------------------------- */

static int gather(struct bench_shm_rank *self, const void *mine, void *all, size_t bytes)
{
    if (self->link->gather(self->link->context, mine, all, bytes) == 0)
        return 0;
    bench_shm_fail(self->shm, BENCH_ERROR, "rank %d: %s", self->rank, self->link->why());
    return -1;
}

/* All ranks are here. *ns: in, this rank's time; out, the largest. A rank that has failed says so here. */
static int meet(struct bench_shm_rank *self, uint64_t *ns)
{
    const uint64_t mine[2] = {*ns, bench_shm_stopped(self->shm)};
    static uint64_t all[BENCH_MAX_RANKS][2];
    int rank;

    __atomic_fetch_add(&self->team->ranks[self->rank].barriers, 1, __ATOMIC_RELAXED);
    if (gather(self, mine, all, sizeof(mine)) != 0)
        return -1;
    for (rank = 0; rank < self->shm->config.ranks; rank++) {
        *ns = all[rank][0] > *ns ? all[rank][0] : *ns;
        if (all[rank][1] && !mine[1])
            bench_shm_fail(self->shm, BENCH_ERROR, "rank %d has failed; it says why", rank);
    }
    self->team->release_ns = clock_ns();
    return bench_shm_stopped(self->shm) ? -1 : 0;
}

struct counted {
    struct bench_net net[BENCH_OPS];
    struct bench_event_times events[BENCH_EVENT_OPS];
    struct bench_host_time host;
};

static void add_net(struct bench_net *to, const struct bench_net *from)
{
    to->ops += from->ops;
    to->rows += from->rows;
    to->commands += from->commands;
    to->puts += from->puts;
    to->signals += from->signals;
    to->bytes += from->bytes;
}

int bench_shm_collect(struct bench_shm_rank *self)
{
    struct bench_shm *shm = self->shm;
    struct counted mine, *all = calloc((size_t)shm->config.ranks, sizeof(*all));
    int rank, i, failed;

    memcpy(mine.net, shm->net, sizeof(mine.net));
    for (i = 0; i < BENCH_EVENT_OPS; i++)
        mine.events[i] = shm->event_times[i][self->rank];
    mine.host = shm->host[self->rank];
    failed = all == NULL || gather(self, &mine, all, sizeof(mine)) != 0;
    memset(shm->net, 0, failed ? 0 : sizeof(shm->net));
    for (rank = 0; rank < shm->config.ranks && !failed; rank++) {
        for (i = 0; i < BENCH_OPS; i++)
            add_net(&shm->net[i], &all[rank].net[i]);
        for (i = 0; i < BENCH_EVENT_OPS; i++)
            shm->event_times[i][rank] = all[rank].events[i];
        shm->host[rank] = all[rank].host;
    }
    free(all);
    return failed ? -1 : 0;
}

/* ---- Barriers --------------------------------------------------------------------------------------------------- */

int bench_shm_barrier(struct bench_shm_rank *self)
{
    uint64_t none = 0;
    uint32_t phase = __atomic_load_n(&self->team->phase, __ATOMIC_RELAXED);

    if (self->link != NULL)
        return meet(self, &none);
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

    if (self->link != NULL) {
        uint64_t ns = now - team->release_ns;

        if (meet(self, &ns) != 0)
            return -1;
        if (slot >= 0 && slot < BENCH_MAX_ITERS)
            team->times[op][variant][slot] = ns;
        return 0;
    }
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

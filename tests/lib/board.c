/* SPDX-License-Identifier: Apache-2.0 */
#include "board.h"

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

#define BOARD_MAGIC 0x45505842454e4348u
/* A team may sleep for as long as another one plays; when the conductor dies, its watcher ends it anyway. */
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

struct board *board_create(const struct bench_config *config, char *path, int path_bytes)
{
    struct board *board;
    int fd = memfd_create("epx-bench", MFD_CLOEXEC);

    if (fd < 0)
        return NULL;
    if (ftruncate(fd, sizeof(*board)) != 0)
        goto close_fd;
    board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (board == MAP_FAILED)
        goto close_fd;
    /* The descriptor stays open: others reach the memory through it, and it vanishes with this process. */
    snprintf(path, (size_t)path_bytes, "/proc/%d/fd/%d", (int)getpid(), fd);
    board->magic = BOARD_MAGIC;
    board->config = *config;
    return board;
close_fd:
    close(fd);
    return NULL;
}

int board_attach(struct board_seat *seat, const char *path, enum board_team_id team, int rank)
{
    struct board *board;
    int fd = open(path, O_RDWR | O_CLOEXEC);

    if (fd < 0)
        return -1;
    board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (board == MAP_FAILED)
        return -1;
    if (board->magic != BOARD_MAGIC) {
        munmap(board, sizeof(*board));
        errno = EPROTO;
        return -1;
    }
    *seat = (struct board_seat){.board = board, .team = &board->team[team], .rank = rank};
    return 0;
}

int board_stopped(const struct board *board)
{
    /* pairs with the release in board_fail: a reader that sees `stop` may read the message */
    return __atomic_load_n(&board->stop, __ATOMIC_ACQUIRE) != 0;
}

static void wake_everybody(struct board *board)
{
    int i;

    for (i = 0; i < BOARD_TEAMS; i++) {
        futex_wake(&board->team[i].command_seq);
        futex_wake(&board->team[i].done);
        futex_wake(&board->team[i].phase);
    }
}

void board_fail(struct board *board, enum board_failure failure, const char *format, ...)
{
    uint32_t none = BOARD_FINE;
    va_list args;

    if (__atomic_compare_exchange_n(&board->failure, &none, failure, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        va_start(args, format);
        vsnprintf(board->message, sizeof(board->message), format, args);
        va_end(args);
        /* pairs with the acquire in board_stopped */
        __atomic_store_n(&board->stop, 1, __ATOMIC_RELEASE);
    }
    wake_everybody(board);
}

void board_order(struct board *board, enum board_team_id team, const struct board_command *command)
{
    struct board_team *t = &board->team[team];

    t->command = *command;
    __atomic_store_n(&t->done, 0, __ATOMIC_RELAXED);
    /* pairs with the acquire in board_next: the command is complete before its number changes */
    __atomic_fetch_add(&t->command_seq, 1, __ATOMIC_RELEASE);
    futex_wake(&t->command_seq);
}

int board_poll_done(struct board *board, enum board_team_id team, int ms)
{
    struct board_team *t = &board->team[team];
    /* pairs with the release in board_done: times and names are there when the rank counts as done */
    uint32_t done = __atomic_load_n(&t->done, __ATOMIC_ACQUIRE);

    if (board_stopped(board))
        return -1;
    if (done >= (uint32_t)board->config.ranks)
        return 1;
    futex_wait(&t->done, done, ms);
    return 0;
}

/* Waits until *word differs from `seen`. 0, or -1 when stopped or past the deadline. */
static int wait_change(struct board *board, uint32_t *word, uint32_t seen, int timeout_ms)
{
    uint64_t deadline = clock_ns() + (uint64_t)timeout_ms * 1000000u;

    /* pairs with the releases in board_order and board_barrier */
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == seen) {
        if (board_stopped(board) || clock_ns() > deadline)
            return -1;
        futex_wait(word, seen, 500);
    }
    return board_stopped(board) ? -1 : 0;
}

int board_next(struct board_seat *seat, struct board_command *command)
{
    if (wait_change(seat->board, &seat->team->command_seq, seat->command_seen, IDLE_MS) != 0)
        return -1;
    seat->command_seen++;
    *command = seat->team->command;
    return 0;
}

void board_done(struct board_seat *seat)
{
    /* pairs with the acquire in board_poll_done */
    __atomic_fetch_add(&seat->team->done, 1, __ATOMIC_RELEASE);
    futex_wake(&seat->team->done);
}

static void barrier_open(struct board_team *team)
{
    __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
    team->release_ns = clock_ns();
    /* pairs with the acquire in wait_change: who leaves the barrier sees release_ns and arrived = 0 */
    __atomic_fetch_add(&team->phase, 1, __ATOMIC_RELEASE);
    futex_wake(&team->phase);
}

/* Waits for the barrier that was in phase `phase`; a late team is reported once. */
static int barrier_wait(struct board_seat *seat, uint32_t phase)
{
    struct board *board = seat->board;

    if (wait_change(board, &seat->team->phase, phase, board->config.timeout_ms) == 0)
        return 0;
    if (!board_stopped(board))
        board_fail(board, BOARD_ERROR, "rank %d waited %d ms at a barrier that %u of %d ranks reached", seat->rank,
                   board->config.timeout_ms, __atomic_load_n(&seat->team->arrived, __ATOMIC_RELAXED),
                   board->config.ranks);
    return -1;
}

/* One more rank is here; is it the last? Acquire and release: the last sees what all the others wrote before. */
static int barrier_arrive(struct board_seat *seat)
{
    uint32_t before = __atomic_fetch_add(&seat->team->arrived, 1, __ATOMIC_ACQ_REL);

    return before + 1 == (uint32_t)seat->board->config.ranks;
}

int board_barrier(struct board_seat *seat)
{
    uint32_t phase = __atomic_load_n(&seat->team->phase, __ATOMIC_RELAXED);

    if (barrier_arrive(seat)) {
        seat->team->last_end_ns = 0;
        barrier_open(seat->team);
        return board_stopped(seat->board) ? -1 : 0;
    }
    return barrier_wait(seat, phase);
}

int board_finish(struct board_seat *seat, enum board_op op, int variant, int slot)
{
    struct board_team *team = seat->team;
    uint32_t phase = __atomic_load_n(&team->phase, __ATOMIC_RELAXED);
    uint64_t now = clock_ns();
    uint64_t last = __atomic_load_n(&team->last_end_ns, __ATOMIC_RELAXED);

    while (now > last)
        if (__atomic_compare_exchange_n(&team->last_end_ns, &last, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            break;
    if (!barrier_arrive(seat))
        return barrier_wait(seat, phase);
    if (slot >= 0 && slot < BOARD_MAX_ITERS)
        team->times[op][variant][slot] = team->last_end_ns - team->release_ns;
    team->last_end_ns = 0;
    barrier_open(team);
    return board_stopped(seat->board) ? -1 : 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared memory of a benchmark: one driver (the benchmark program) sends commands to teams of rank processes, which
 * write their times and their first error there. EPX's ranks and the MPI baseline's ranks are two teams that take
 * turns; a team that does not run sleeps in the kernel, so that it takes no time from the other.
 *
 *      driver                                      every rank of a team
 *      ------                                      --------------------
 *      writes team.command, command_seq++   --->   waits for command_seq to change
 *                                                  runs: barriers inside the team, times[op][variant][i]
 *      waits for team.done == nranks        <---   done++
 *
 *      stop = 1 (driver, or a rank that failed after writing `message`): every wait returns at once.
 *
 * In a world that a launcher has started, on one machine or several, every rank has such memory and a driver of its
 * own, which gives the same commands; barriers and times then go through a link, an all-gather of all ranks.
 *
 * A rank's times start when the last rank reached the barrier and end when the last rank has finished: the slowest
 * rank counts, as it does in a model.
 */
#ifndef EPX_TESTS_LIB_BENCH_SHM_H
#define EPX_TESTS_LIB_BENCH_SHM_H

#include <stddef.h>
#include <stdint.h>

#include "bench_config.h"

enum bench_team_id { BENCH_EPX = 0, BENCH_MPI = 1, BENCH_TEAMS = 2 };
enum bench_op { BENCH_UPDATE = 0, BENCH_DISPATCH = 1, BENCH_COMBINE = 2, BENCH_OPS = 3 };

/* `epx bench layer` times whole layers, and no update by itself: their times are where an update's would be. */
#define BENCH_WHOLE BENCH_UPDATE

#define BENCH_VARIANTS 4
#define BENCH_MAX_ITERS 10000
#define BENCH_MAX_RANKS 1024

struct bench_command {
    uint64_t seed;   /* of routing and data */
    int32_t quit;    /* leave; nothing else counts */
    int32_t variant; /* which way of doing it, for a team that has several */
    int32_t warmup;  /* iterations before the timed ones */
    int32_t iters;
    int32_t first;  /* where in times[] the first iteration goes; -1 = nowhere */
    int32_t trace;  /* with tracing on; times go to variant 1 */
    int32_t verify; /* compare the last iteration's results with the oracle */
};

/* How far a rank has come, for whoever waits for it. */
struct bench_rank_state {
    int32_t pid;
    uint32_t barriers; /* reached */
    uint32_t commands; /* finished */
    uint32_t steps;    /* signs of life between barriers */
};

struct bench_team {
    uint32_t command_seq; /* futex */
    uint32_t done;        /* futex: ranks that finished the command */
    uint32_t phase;       /* futex: barriers passed */
    uint32_t arrived;
    uint64_t release_ns;  /* when the last barrier opened */
    uint64_t last_end_ns; /* latest end of the running measurement */
    struct bench_command command;
    int32_t variants[BENCH_OPS]; /* how many ways the team knows: its rank 0 writes this before the first `done` */
    char library[64];            /* what the team runs on, likewise */
    struct bench_rank_state ranks[BENCH_MAX_RANKS];
    char variant_name[BENCH_OPS][BENCH_VARIANTS][48];
    uint64_t times[BENCH_OPS][BENCH_VARIANTS][BENCH_MAX_ITERS]; /* ns */
};

/* What EPX's ranks gave to the network in the timed iterations, all of them together. */
struct bench_net {
    uint64_t ops;  /* ranks times iterations */
    uint64_t rows; /* for ranks of other nodes */
    uint64_t commands, puts, signals, bytes;
};

/* Times of one rank by the device's time stamps, in microseconds. */
enum bench_event_op {
    BENCH_EVENT_UPDATE,
    BENCH_EVENT_DISPATCH,
    BENCH_EVENT_COMBINE,
    BENCH_EVENT_PAIR,       /* dispatch and combine in turn, with a stamp after every tenth pair */
    BENCH_EVENT_DISPATCHES, /* of one kind in a row, likewise */
    BENCH_EVENT_COMBINES,
    BENCH_EVENT_OPS
};

struct bench_event_times {
    double p50, p99, least; /* 0: not measured */
};

/* `epx bench layer`: what the host of one rank does in a layer, in microseconds. */
struct bench_host_time {
    double us, count_us; /* until the calls have returned; of it, waiting for the number of rows */
};

/* Where the time of an operation goes, by the marks of rank 0's first agent. */
struct bench_phase {
    char name[24];
    uint64_t ns, count;
};
#define BENCH_PHASES 16

/* What EPX's ranks do just now, for the line of progress; rank 0 writes it. */
enum bench_stage { BENCH_STARTING, BENCH_CHECKING, BENCH_CAPTURING, BENCH_MEASURING, BENCH_REPLAYING };

/* What a failed rank leaves behind. */
enum bench_failure { BENCH_FINE = 0, BENCH_ERROR = 1, BENCH_MISMATCH = 2, BENCH_UNSUPPORTED = 3 };

struct bench_shm {
    uint64_t magic;
    uint32_t here;    /* ranks that have this memory: all, or one */
    uint32_t stop;    /* 1: everybody leaves */
    uint32_t failure; /* enum bench_failure; the first one stays */
    char message[768];
    struct bench_config config;
    struct bench_net net[BENCH_OPS];
    struct bench_phase phases[BENCH_OPS][BENCH_PHASES];
    uint32_t stage;   /* enum bench_stage */
    char network[64]; /* the one between nodes, as rank 0 found it; "": there is none */
    struct bench_event_times event_times[BENCH_EVENT_OPS][BENCH_MAX_RANKS];
    struct bench_host_time host[BENCH_MAX_RANKS];
    uint64_t host_ns[BENCH_OPS],
        host_calls[BENCH_OPS]; /* timed operations: until the calls have returned, of all ranks */
    struct bench_team team[BENCH_TEAMS];
};

/* How ranks without common memory meet: each gives `bytes` and gets those of all, in rank order. 0, or -1 with
 * epx_last_error(). */
struct bench_link {
    int (*gather)(void *context, const void *send, void *recv, size_t bytes);
    void *context;
    const char *(*why)(void);
};

/* One rank's view of it. */
struct bench_shm_rank {
    struct bench_shm *shm;
    const struct bench_link *link; /* NULL: all ranks have the same memory */
    struct bench_team *team;
    int rank;
    uint32_t command_seen;
};

/* Driver: makes the memory; `path` is what other processes open while this one lives. NULL with errno set. */
struct bench_shm *bench_shm_create(const struct bench_config *config, char *path, int path_bytes);
/* Driver: lets go of it; ranks that have mapped it keep it. */
void bench_shm_destroy(struct bench_shm *shm, const char *path);
/* Rank: maps it. 0 or -1 with errno set. */
int bench_shm_attach(struct bench_shm_rank *self, const char *path, enum bench_team_id team, int rank);

/* Driver: orders a command; then polls. */
void bench_shm_order(struct bench_shm *shm, enum bench_team_id team, const struct bench_command *command);
/* Waits up to ms; 1 when all ranks are done, 0 not yet, -1 stopped. */
int bench_shm_poll_done(struct bench_shm *shm, enum bench_team_id team, int ms);
/* Grows while ranks of the team reach barriers, finish commands or call bench_shm_step. */
uint64_t bench_shm_progress(const struct bench_shm *shm, enum bench_team_id team);
/* Fails with the names of the ranks that have not finished the command. */
void bench_shm_fail_late(struct bench_shm *shm, enum bench_team_id team, int waited_ms);

/* Rank: waits for the next command. 0, or -1 when stopped or when nothing came within the deadline. */
int bench_shm_next(struct bench_shm_rank *self, struct bench_command *command);
void bench_shm_done(struct bench_shm_rank *self);
/* Rank: makes progress in something that takes long and has no barriers. */
void bench_shm_step(struct bench_shm_rank *self);
/* Rank: barrier of the team. 0, or -1 when stopped or late (then the message names the missing ranks). */
int bench_shm_barrier(struct bench_shm_rank *self);
/* Rank: ends a measurement that began at the last barrier, with a barrier; the time goes to times[op][variant][slot],
 * or nowhere when slot < 0. */
int bench_shm_finish(struct bench_shm_rank *self, enum bench_op op, int variant, int slot);

/* Rank with a link: what all ranks have counted and timed, in the memory of each. 0 or -1. */
int bench_shm_collect(struct bench_shm_rank *self);

/* Anyone: stores the first error, and stops everybody. */
void bench_shm_fail(struct bench_shm *shm, enum bench_failure failure, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int bench_shm_stopped(const struct bench_shm *shm);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The board: a shared page on which one conductor (the benchmark program) directs teams of rank processes, and on
 * which they write times and complaints. EPX's ranks and the MPI baseline's ranks are two teams that take turns; a
 * team that is not playing sleeps in the kernel, so that it costs the other nothing.
 *
 *      conductor                                   every rank of a team
 *      ---------                                   --------------------
 *      writes team.command, command_seq++   --->   waits for command_seq to change
 *                                                  plays: barriers inside the team, times[op][variant][i]
 *      waits for team.done == nranks        <---   done++
 *
 *      stop = 1 (conductor, or a rank that failed after writing `message`): every wait returns at once.
 *
 * A rank's times start when the last rank reached the barrier and end when the last rank has finished: the slowest
 * rank counts, as it does in a model.
 */
#ifndef EPX_TESTS_LIB_BOARD_H
#define EPX_TESTS_LIB_BOARD_H

#include <stdint.h>

#include "bench_config.h"

enum board_team_id { BOARD_EPX = 0, BOARD_MPI = 1, BOARD_TEAMS = 2 };
enum board_op { BOARD_UPDATE = 0, BOARD_DISPATCH = 1, BOARD_COMBINE = 2, BOARD_OPS = 3 };

#define BOARD_VARIANTS 4
#define BOARD_MAX_ITERS 10000

struct board_command {
    uint64_t seed;   /* of routing and data */
    int32_t quit;    /* leave; nothing else counts */
    int32_t variant; /* which way of doing it, for a team that has several */
    int32_t warmup;  /* iterations before the timed ones */
    int32_t iters;
    int32_t first;  /* where in times[] the first iteration goes; -1 = nowhere */
    int32_t verify; /* compare the last iteration's results with the oracle */
};

struct board_team {
    uint32_t command_seq; /* futex */
    uint32_t done;        /* futex: ranks that finished the command */
    uint32_t phase;       /* futex: barriers passed */
    uint32_t arrived;
    uint64_t release_ns;  /* when the last barrier opened */
    uint64_t last_end_ns; /* latest end of the running measurement */
    struct board_command command;
    int32_t variants[BOARD_OPS]; /* how many ways the team knows: its rank 0 writes this before the first `done` */
    char library[64];            /* what the team runs on, likewise */
    char variant_name[BOARD_OPS][BOARD_VARIANTS][48];
    uint64_t times[BOARD_OPS][BOARD_VARIANTS][BOARD_MAX_ITERS]; /* ns */
};

/* What EPX's ranks gave to the network in the timed iterations, all of them together. */
struct board_net {
    uint64_t ops;  /* ranks times iterations */
    uint64_t rows; /* for ranks of other nodes */
    uint64_t commands, puts, signals, bytes;
};

/* What a failed rank leaves behind. */
enum board_failure { BOARD_FINE = 0, BOARD_ERROR = 1, BOARD_MISMATCH = 2, BOARD_UNSUPPORTED = 3 };

struct board {
    uint64_t magic;
    uint32_t stop;    /* 1: everybody leaves */
    uint32_t failure; /* enum board_failure; the first one stays */
    char message[768];
    struct bench_config config;
    struct board_net net[BOARD_OPS];
    struct board_team team[BOARD_TEAMS];
};

/* A rank's seat. */
struct board_seat {
    struct board *board;
    struct board_team *team;
    int rank;
    uint32_t command_seen;
};

/* The conductor's: makes the board; `path` is what other processes open while this one lives. NULL with errno set. */
struct board *board_create(const struct bench_config *config, char *path, int path_bytes);
/* A rank's: maps it. 0 or -1 with errno set. */
int board_attach(struct board_seat *seat, const char *path, enum board_team_id team, int rank);

/* Conductor: orders a command; then polls. */
void board_order(struct board *board, enum board_team_id team, const struct board_command *command);
/* Waits up to ms; 1 when all ranks are done, 0 not yet, -1 stopped. */
int board_poll_done(struct board *board, enum board_team_id team, int ms);

/* Rank: waits for the next command. 0, or -1 when stopped or when nothing came within the deadline. */
int board_next(struct board_seat *seat, struct board_command *command);
void board_done(struct board_seat *seat);
/* Rank: barrier of the team. 0, or -1 when stopped or late (then the board says who was missing). */
int board_barrier(struct board_seat *seat);
/* Rank: ends a measurement that began at the last barrier, with a barrier; the time goes to times[op][variant][slot],
 * or nowhere when slot < 0. */
int board_finish(struct board_seat *seat, enum board_op op, int variant, int slot);

/* Anyone: the first complaint stays; stops everybody. */
void board_fail(struct board *board, enum board_failure failure, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
int board_stopped(const struct board *board);

#endif

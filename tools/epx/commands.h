/* SPDX-License-Identifier: Apache-2.0 */
/* The subcommands of `epx`, and the launcher of ranks that they share. */
#ifndef EPX_TOOLS_COMMANDS_H
#define EPX_TOOLS_COMMANDS_H

#include <stddef.h>

/* Exit statuses of `epx`: docs/bench.md and docs/run.md list them. */
enum exit_status { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

/* argv[0] is the subcommand's own name; the result is the exit status of `epx`. */
int cmd_run(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_ep_bench(int argc, char **argv);
int cmd_sim(int argc, char **argv);
int cmd_top(int argc, char **argv);
int cmd_trace(int argc, char **argv);
int cmd_predict(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
/* `epx help environment [--markdown]`; argv[0] is "environment". */
int help_environment(int argc, char **argv);

/*
 * Starts ranks of a program on this machine, each with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR,
 * MASTER_PORT and EPX_JOB_ID beside the caller's environment, and waits for all of them. Fields left zero take the
 * default.
 */
struct launch_options {
    const char *title; /* first word of messages; "epx" when NULL */
    int nranks;        /* 1..LAUNCH_MAX_RANKS */
    char *const *argv; /* the program (searched in PATH) and its arguments, NULL at the end */
    int self;          /* start this very program again (/proc/self/exe) with argv, instead of argv[0] */
    int port;          /* MASTER_PORT; 0 = a free one */
    int tag;           /* each line of output starts with [rank] */
    int grace_ms;   /* time for the other ranks to end after the first failure; 0 = LAUNCH_GRACE_MS, negative = none */
    int timeout_ms; /* end everything after this long, as a failure; 0 = no limit */
    /* Gets rank 0's standard output line by line, without the newline, instead of it going to ours. */
    void (*rank0_line)(void *context, const char *line);
    void *context;
};

enum { LAUNCH_MAX_RANKS = 1024, LAUNCH_GRACE_MS = 5000, LAUNCH_TIMED_OUT = 124 };

/* 0 when every rank returned 0. Otherwise the exit status of the first rank that failed, or 128 + its signal; 127 or
 * 126 when the program cannot be started; LAUNCH_TIMED_OUT. A failure is reported on stderr. */
int launch_ranks(const struct launch_options *options);

#endif

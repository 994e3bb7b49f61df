/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `epx bench`, in parts:
 *
 *      bench.c          the driver: starts the teams, gives rounds to them in turn, collects
 *      bench_options.c  the command line
 *      bench_team.c     starting and ending EPX's ranks and mpirun
 *      bench_join.c     the world of a launcher, which this process is one rank of
 *      bench_worker.c   one EPX rank, a process or a thread
 *      bench_ops.c      its operations
 *      bench_events.c   --timing events: time stamps of the device, graphs
 *      bench_layer.c    `epx bench layer`: whole layers with fresh routing; bench_layer_report.c its report
 *      bench_replay.c   --replays: one graph with changing routing, checked
 *      bench_ofi.c      a loop around fi_write: the baseline of --vs ofi
 *      bench_stats.c    percentiles, bandwidths; bench_bound.c what bounds a dispatch, bench_memcpy.c memcpy
 *      bench_ring.c     `epx bench ring`, which has nothing to do with the others
 *      bench_session.c  one run or several, and what is made of their rows: bench_session.h
 *      bench_report.c   the table and the JSON lines; bench_event_report.c those of --timing events
 *
 * The ranks' side of the measurement (shared memory, timed loop, data, check) is in tests/lib/, shared with the MPI
 * baseline.
 */
#ifndef EPX_TOOLS_BENCH_H
#define EPX_TOOLS_BENCH_H

#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "commands.h"
#include "tests/lib/bench_work.h"
#include "tests/lib/bench_shm.h"

struct bench_options {
    struct bench_config config;
    int32_t iters, warmup, timing;
    int32_t check, json, vs_mpi, vs_ofi;
    const char *report, *compare, *newer;
    struct bench_list {
        int count;
        int32_t values[16];
    } over_tokens, over_ranks;
    int sweep, tokens_given, iters_given;
    uint64_t given;   /* options, see options_given() */
    int phases;       /* rounds with tracing, too */
    int joined, rank; /* in a launcher's world */
};

/* 0, 1 when only help was asked for (and given), or -1 after a message. */
int bench_options_parse(struct bench_options *options, int argc, char **argv);
int bench_option_given(const struct bench_options *options, const char *name);
const char *bench_mode_name(const struct bench_config *config);
const char *bench_layout_name(const struct bench_config *config);
const char *bench_routing_name(const struct bench_config *config);
const char *bench_device_name(const struct bench_config *config);
const char *bench_dtype_name(const struct bench_config *config);

/* ---- Teams */

/* Starts EPX's ranks or the baseline's; the process that watches over them, or -1 after a message. */
pid_t bench_team_start_epx(const struct bench_config *config, const char *shm_path);
/* log_fd: gets mpirun's own output. */
pid_t bench_team_start_mpi(const struct bench_config *config, const char *shm_path, int log_fd);
/* Has it ended? Its exit code (128 + signal), or -1 while it runs. */
int bench_team_poll(pid_t pid);
/* Waits up to limit_ms, then sends SIGTERM, then SIGKILL. Its exit code, or -1 when that is not known. */
int bench_team_end(pid_t pid, int limit_ms);
/* Waits for a child up to limit_ms, then kills it. 0 when it returned 0, else -1. */
int bench_wait_child(pid_t pid, int limit_ms);

/* One EPX rank, or (threads > 0) all of them as threads; an exit status. The error is in the shared memory. */
int bench_worker(const char *shm_path, int threads);

/* The same in a launcher's world: one rank, on a thread of this process. */
int bench_worker_joined(const char *shm_path, int rank, const struct bench_link *link);

/* ---- A launcher's world (bench_join.c) */

/* Has a launcher started several ranks, of which this is one? Their number, 0 = none, -1 after a message.
 * `per_machine`: ranks here, 0 = not known. */
int bench_join_world(int *rank, int *per_machine);
/* Starts the rank; 0 or -1 after a message. Its end, within the limit: 0, or -1. */
int bench_join_start(const char *shm_path, int rank, int timeout_ms);
int bench_join_end(int limit_ms);

/* `epx bench ring`; an exit code. */
int bench_ring(int argc, char **argv);

/* ---- Statistics */

/* Fewer iterations give no ratio to another program: one that was interrupted is most of them. */
enum { BENCH_RATIO_ITERS = 10 };

struct bench_row {
    enum bench_op op;
    double us_p50, us_p99;
    double logical_GBps, wire_GBps; /* 0 for an update */
    double copies_GBps;             /* one row per (token, destination rank): what `wire` is on one node */
    double of_memcpy, of_bound;     /* dispatch only */
    double us_low, us_high;         /* least and largest p50 of five parts of the run: the noise */
    double trace_cost;              /* share of time that tracing adds; 0: not measured */
    double host_us;                 /* until the calls have returned, mean of all ranks */
    double mpi_us_p50, vs_mpi;      /* the variant with MPI_Alltoallv; 0 without MPI, ratios of few iterations too */
    double mpi_best_us_p50, vs_mpi_best;
    double vs_ofi[2]; /* enum bench_ofi_size; 0 without */
    const char *mpi_variant, *mpi_best;
    double mpi_variant_us_p50[BENCH_VARIANTS];
};

/* Least and largest median of five parts of n times, in the order in which they were measured. */
void bench_noise(const uint64_t *values, int n, double *low, double *high);
/* Nearest-rank percentile of n values, which it sorts. */
double bench_percentile(uint64_t *values, int n, double percent);
/* Likewise of speeds. */
double bench_percentile_double(double *values, int n, double percent);
struct bench_report;
/* Fills a row from the times in shared memory. */
void bench_row_fill(struct bench_row *row, struct bench_shm *shm, enum bench_op op, const struct bench_report *report);
/* Bytes of one row on its way: dispatch has scales with fp8, combine is bf16. */
double bench_row_bytes(const struct bench_config *config, enum bench_op op);

/* Ceilings, GB per second written; the best so far, 0 = not measured. */
struct bench_ceiling {
    double memcpy_GBps; /* one process on every core, which copies */
    double bound_GBps;  /* as many processes as ranks have agents, which do nothing but write the rows of a dispatch */
    int processes, bound_processes;
};
void bench_memcpy_measure(struct bench_ceiling *ceiling);
void bench_bound_measure(struct bench_ceiling *ceiling, const struct bench_report *report);

/* ---- Report */

/* The loop around fi_write: one write per row, or per MiB as where all rows are neighbours. */
enum bench_ofi_size { BENCH_OFI_ROWS, BENCH_OFI_LARGE, BENCH_OFI_SIZES };

struct bench_ofi_rounds {
    uint32_t message_bytes[BENCH_OFI_SIZES];
    int threads, count; /* of GBps */
    double GBps[BENCH_OFI_SIZES][BENCH_MAX_ITERS];
    double p50[BENCH_OFI_SIZES];
};

struct bench_report {
    const struct bench_options *options;
    const struct bench_shm *shm;
    struct bench_traffic traffic;
    struct bench_ceiling ceiling;
    FILE *to;                     /* of JSON */
    struct bench_ofi_rounds *ofi; /* NULL without --vs ofi */
    int rounds;
    int failed; /* the check found something */
    int nrows;
    struct bench_row rows[BENCH_OPS];
};

struct bench_layer_row {
    double us_p50, us_p99, host_us, count_us; /* per layer; 0: not measured */
    double us_low, us_high;
    double logical_GBps, wire_GBps; /* dispatch and combine together */
};

#define BENCH_LAYERS_PER_ROUND 10
/* Rounds of a number of layers, and the layers of one round: ten, or a few less where they do not divide evenly. */
int bench_layer_rounds(int layers);
int bench_layer_count(int layers, int round);
void bench_layer_fill(const struct bench_report *report, struct bench_layer_row *row);
void bench_layer_report_table(const struct bench_report *report);
void bench_layer_report_json(const struct bench_report *report);

const char *bench_op_name(enum bench_op op);
void bench_report_table(const struct bench_report *report);
void bench_report_json(const struct bench_report *report);
/* --timing events. */
void bench_event_report_table(const struct bench_report *report);
void bench_event_report_json(const struct bench_report *report);
/* Parts of both: the lines above a table, and the end of a JSON object. */
void bench_report_configuration(const struct bench_report *report);
void bench_report_json_shape(const struct bench_report *report);
/* Bytes that an operation moves, counted as pairs or as what is sent. */
void bench_row_moved(const struct bench_config *config, const struct bench_traffic *traffic, enum bench_op op,
                     double *logical, double *wire);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `epx bench`, in parts:
 *
 *      bench.c          the driver: starts the teams, gives rounds to them in turn, collects
 *      bench_options.c  the command line
 *      bench_team.c     starting and ending EPX's ranks and mpirun
 *      bench_worker.c   one EPX rank; bench_ll.c and bench_ht.c have its operations
 *      bench_ofi.c      a loop around fi_write: the baseline of --vs ofi
 *      bench_stats.c    percentiles, bandwidths; bench_memcpy.c the ceiling
 *      bench_ring.c     `epx bench ring`, which has nothing to do with the others
 *      bench_report.c   the table, the JSON lines, the progress line
 *
 * The ranks' side of the measurement (shared memory, timed loop, data, check) is in tests/lib/, shared with the MPI baseline.
 */
#ifndef EPX_TOOLS_BENCH_H
#define EPX_TOOLS_BENCH_H

#include <stdint.h>
#include <sys/types.h>

#include "tests/lib/bench_work.h"
#include "tests/lib/bench_shm.h"

enum { BENCH_EXIT_OK = 0, BENCH_EXIT_FAILED = 1, BENCH_EXIT_USAGE = 2 };

struct bench_options {
    struct bench_config config;
    int iters, warmup;
    int check, json, vs_mpi, vs_ofi;
    const char *worker; /* path of the shared memory, for a rank that the driver started */
};

/* 0, 1 when only help was asked for (and given), or -1 after a message. */
int bench_options_parse(struct bench_options *options, int argc, char **argv);
const char *bench_mode_name(const struct bench_config *config);
const char *bench_layout_name(const struct bench_config *config);
const char *bench_routing_name(const struct bench_config *config);
const char *bench_device_name(const struct bench_config *config);

/* ---- Teams */

/* Starts EPX's ranks or the baseline's; the process that watches over them, or -1 after a message. */
pid_t bench_team_start_epx(const struct bench_config *config, const char *shm_path);
/* log_fd: where mpirun's own chatter goes. */
pid_t bench_team_start_mpi(const struct bench_config *config, const char *shm_path, int log_fd);
/* Has it ended? Its exit code (128 + signal), or -1 while it runs. */
int bench_team_poll(pid_t pid);
/* Waits, then asks, then insists. */
void bench_team_end(pid_t pid);

/* One EPX rank; an exit code. The error is in the shared memory. */
int bench_worker(const char *shm_path);

/* `epx bench ring`; an exit code. */
int bench_ring(int argc, char **argv);

/* ---- Statistics */

struct bench_row {
    enum bench_op op;
    double us_p50, us_p99;
    double logical_GBps, wire_GBps; /* 0 for an update */
    double copies_GBps;             /* one row per (token, destination rank): what `wire` is on one node */
    double of_memcpy;               /* dispatch only */
    double mpi_us_p50, vs_mpi;      /* the variant with MPI_Alltoallv; 0 without MPI */
    double mpi_best_us_p50, vs_mpi_best;
    double vs_ofi[2]; /* enum bench_ofi_size; 0 without */
    const char *mpi_variant, *mpi_best;
    double mpi_variant_us_p50[BENCH_VARIANTS];
};

/* Nearest-rank percentile of n values, which it sorts. */
double bench_percentile(uint64_t *values, int n, double percent);
/* Likewise of speeds. */
double bench_percentile_double(double *values, int n, double percent);
struct bench_report;
/* Fills a row from the times in shared memory. */
void bench_row_fill(struct bench_row *row, struct bench_shm *shm, enum bench_op op, const struct bench_report *report);
/* Bytes of one row on its way: dispatch has scales with fp8, combine is bf16. */
double bench_row_bytes(const struct bench_config *config, enum bench_op op);

/* Plain memcpy by one process on every core at once, GB copied per second; 0 with errno set. */
double bench_memcpy_ceiling(int *processes);

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
    double memcpy_GBps;
    int memcpy_processes;
    struct bench_ofi_rounds *ofi; /* NULL without --vs ofi */
    int rounds;
    int failed; /* the check found something */
    int nrows;
    struct bench_row rows[BENCH_OPS];
};

const char *bench_op_name(enum bench_op op);
void bench_report_table(const struct bench_report *report);
void bench_report_json(const struct bench_report *report);
/* On a terminal only; NULL ends the line. */
void bench_progress(const char *format, ...) __attribute__((format(printf, 1, 2)));
void bench_progress_end(void);

#endif

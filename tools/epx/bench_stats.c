/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

double bench_percentile(uint64_t *values, int n, double percent)
{
    int rank;

    if (n < 1)
        return 0;
    qsort(values, (size_t)n, sizeof(*values), by_value);
    rank = (int)ceil(percent / 100 * n);
    return (double)values[rank < 1 ? 0 : rank > n ? n - 1 : rank - 1];
}

static int by_speed(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

double bench_percentile_double(double *values, int n, double percent)
{
    int rank = (int)ceil(percent / 100 * n);

    if (n < 1)
        return 0;
    qsort(values, (size_t)n, sizeof(*values), by_speed);
    return values[rank < 1 ? 0 : rank > n ? n - 1 : rank - 1];
}

void bench_noise(const uint64_t *values, int n, double *low, double *high)
{
    enum { PARTS = 5 };
    const int parts = n < PARTS ? n : PARTS;
    uint64_t part[BENCH_MAX_ITERS / PARTS + 1];
    int i;

    *low = *high = 0;
    for (i = 0; i < parts; i++) {
        const int from = n * i / parts, count = n * (i + 1) / parts - from;
        double us;

        memcpy(part, values + from, (size_t)count * sizeof(*part));
        us = bench_percentile(part, count, 50) / 1e3;
        *low = i == 0 || us < *low ? us : *low;
        *high = us > *high ? us : *high;
    }
}

double bench_row_bytes(const struct bench_config *c, enum bench_op op)
{
    if (op == BENCH_DISPATCH && c->fp8)
        return c->hidden + 4.0 * bench_work_scales(c);
    return c->hidden * 2.0;
}

/* The baseline is what most programs do, MPI_Alltoallv of packed rows; the fastest of all variants is reported as
 * well. */
static void fill_mpi(struct bench_row *row, struct bench_team *team, enum bench_op op, int iters)
{
    int v;

    for (v = 0; v < team->variants[op]; v++) {
        double us = bench_percentile(team->times[op][v], iters, 50) / 1e3;

        row->mpi_variant_us_p50[v] = us;
        if (row->mpi_best == NULL || us < row->mpi_best_us_p50) {
            row->mpi_best_us_p50 = us;
            row->mpi_best = team->variant_name[op][v];
        }
        if (row->mpi_variant == NULL || strstr(team->variant_name[op][v], "Alltoallv") != NULL) {
            row->mpi_us_p50 = us;
            row->mpi_variant = team->variant_name[op][v];
        }
    }
    if (row->us_p50 > 0 && iters >= BENCH_RATIO_ITERS) {
        row->vs_mpi = row->mpi_us_p50 / row->us_p50;
        row->vs_mpi_best = row->mpi_best_us_p50 / row->us_p50;
    }
}

/* Combine returns a row per pair where experts' rows are kept apart until the sum, else one per copy. */
static double copies_of(const struct bench_config *c, const struct bench_traffic *traffic, enum bench_op op)
{
    return (double)(op == BENCH_COMBINE && c->layout == EPX_EXPERT_MAJOR ? traffic->pairs : traffic->copies);
}

void bench_row_moved(const struct bench_config *c, const struct bench_traffic *traffic, enum bench_op op,
                     double *logical, double *wire)
{
    const double remote = (double)(op == BENCH_COMBINE ? traffic->remote_back : traffic->remote);
    const double bytes = bench_row_bytes(c, op);

    *logical = (double)traffic->pairs * bytes;
    *wire = (c->nodes > 1 ? remote : copies_of(c, traffic, op)) * bytes;
}

/* Dispatch sends one copy to a rank; what it finally writes there is a row per pair in the expert-major layout. */
static void fill_bandwidths(struct bench_row *row, const struct bench_config *c, const struct bench_traffic *traffic,
                            const struct bench_ceiling *ceiling)
{
    const double bytes = bench_row_bytes(c, row->op), ns = row->us_p50 * 1e3;
    const double written = (double)(c->layout == EPX_EXPERT_MAJOR ? traffic->pairs : traffic->copies);
    double logical, wire;

    if (ns <= 0)
        return;
    bench_row_moved(c, traffic, row->op, &logical, &wire);
    row->logical_GBps = logical / ns;
    row->copies_GBps = copies_of(c, traffic, row->op) * bytes / ns;
    row->wire_GBps = wire / ns;
    if (row->op == BENCH_DISPATCH && ceiling->memcpy_GBps > 0)
        row->of_memcpy = written * bytes / ns / ceiling->memcpy_GBps;
    if (row->op == BENCH_DISPATCH && ceiling->bound_GBps > 0)
        row->of_bound = written * bytes / ns / ceiling->bound_GBps;
}

static void fill_ofi(struct bench_row *row, const struct bench_ofi_rounds *ofi, int iters)
{
    int size;

    for (size = 0; size < BENCH_OFI_SIZES && iters >= BENCH_RATIO_ITERS; size++)
        row->vs_ofi[size] = ofi->p50[size] > 0 ? row->wire_GBps / ofi->p50[size] : 0;
}

void bench_row_fill(struct bench_row *row, struct bench_shm *shm, enum bench_op op, const struct bench_report *report)
{
    uint64_t *times = shm->team[BENCH_EPX].times[op][0];
    int iters = report->options->iters;

    memset(row, 0, sizeof(*row));
    row->op = op;
    bench_noise(times, iters, &row->us_low, &row->us_high);
    row->host_us = shm->host_calls[op] > 0 ? (double)shm->host_ns[op] / 1e3 / (double)shm->host_calls[op] : 0;
    row->us_p50 = bench_percentile(times, iters, 50) / 1e3;
    row->us_p99 = bench_percentile(times, iters, 99) / 1e3;
    if (report->options->phases && row->us_p50 > 0)
        row->trace_cost = bench_percentile(shm->team[BENCH_EPX].times[op][1], iters, 50) / 1e3 / row->us_p50 - 1;
    if (op != BENCH_UPDATE)
        fill_bandwidths(row, &shm->config, &report->traffic, &report->ceiling);
    if (op != BENCH_UPDATE && report->ofi != NULL)
        fill_ofi(row, report->ofi, iters);
    if (report->options->vs_mpi)
        fill_mpi(row, &shm->team[BENCH_MPI], op, iters);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The report of `epx bench layer`: one row. */
#include <stdio.h>
#include <string.h>

#include "bench.h"

void bench_layer_fill(const struct bench_report *r, struct bench_layer_row *row)
{
    const struct bench_config *c = &r->options->config;
    static uint64_t per_layer[BENCH_MAX_ITERS]; /* nanoseconds, round by round */
    const int layers = r->options->iters, n = bench_layer_rounds(layers);
    double logical[2], wire[2], host[BENCH_MAX_RANKS], count[BENCH_MAX_RANKS];
    int i;

    memset(row, 0, sizeof(*row));
    for (i = 0; i < n; i++)
        per_layer[i] = r->shm->team[BENCH_EPX].times[BENCH_WHOLE][0][i] / (uint64_t)bench_layer_count(layers, i);
    bench_noise(per_layer, n, &row->us_low, &row->us_high);
    row->us_p50 = bench_percentile(per_layer, n, 50) / 1e3;
    row->us_p99 = bench_percentile(per_layer, n, 99) / 1e3;
    for (i = 0; i < c->ranks; i++) {
        host[i] = r->shm->host[i].us;
        count[i] = r->shm->host[i].count_us;
    }
    row->host_us = bench_percentile_double(host, c->ranks, 50);
    row->count_us = bench_percentile_double(count, c->ranks, 50);
    bench_row_moved(c, &r->traffic, BENCH_DISPATCH, &logical[0], &wire[0]);
    bench_row_moved(c, &r->traffic, BENCH_COMBINE, &logical[1], &wire[1]);
    if (row->us_p50 > 0) {
        row->logical_GBps = (logical[0] + logical[1]) / (row->us_p50 * 1e3);
        row->wire_GBps = (wire[0] + wire[1]) / (row->us_p50 * 1e3);
    }
}

static void json_number(FILE *to, const char *name, int decimals, double value, int measured)
{
    if (measured)
        fprintf(to, ",\"%s\":%.*f", name, decimals, value);
    else
        fprintf(to, ",\"%s\":null", name);
}

void bench_layer_report_json(const struct bench_report *r)
{
    const struct bench_config *c = &r->options->config;
    struct bench_layer_row row;
    int measured;

    bench_layer_fill(r, &row);
    measured = row.us_p50 > 0;
    fprintf(r->to, "{\"op\":\"layer\",\"mode\":\"%s\",\"ranks\":%d,\"nodes\":%d", bench_mode_name(c), c->ranks,
            c->nodes);
    json_number(r->to, "us_p50", 1, row.us_p50, measured);
    json_number(r->to, "us_p99", 1, row.us_p99, measured);
    json_number(r->to, "us_low", 1, row.us_low, measured);
    json_number(r->to, "us_high", 1, row.us_high, measured);
    json_number(r->to, "host_us", 1, row.host_us, measured);
    json_number(r->to, "host_count_us", 1, row.count_us, measured);
    json_number(r->to, "logical_GBps", 3, row.logical_GBps, measured);
    json_number(r->to, "wire_GBps", 3, row.wire_GBps, measured);
    fprintf(r->to, ",\"check\":\"%s\"", !r->options->check ? "off" : r->failed ? "fail" : "ok");
    bench_report_json_shape(r);
}

void bench_layer_report_table(const struct bench_report *r)
{
    const struct bench_config *c = &r->options->config;
    struct bench_layer_row row;

    bench_layer_fill(r, &row);
    bench_report_configuration(r);
    if (row.us_p50 > 0) {
        printf("%-10s%12s%12s%12s%15s%15s\n", "", "p50", "p99", "host", "logical", "wire");
        printf("%-10s%9.0f us%9.0f us%9.0f us%10.1f GB/s%10.1f GB/s\n\n", "layer", row.us_p50, row.us_p99, row.host_us,
               row.logical_GBps, row.wire_GBps);
    }
    printf("  layer    routing that is new each time, %sdispatch%s,\n           combine%s; %d layer%s in %d round%s\n",
           c->mode == EPX_LOW_LATENCY ? "" : "update, number of rows, ",
           c->mode == EPX_LOW_LATENCY ? "" : " with weights and indices",
           c->mode == EPX_LOW_LATENCY && c->layout == EPX_RANK_MAJOR ? "" : " with weights", r->options->iters,
           r->options->iters == 1 ? "" : "s", bench_layer_rounds(r->options->iters),
           bench_layer_rounds(r->options->iters) == 1 ? "" : "s");
    printf("  time     wall clock of a round until its last rank has finished, per layer: p50 and p99 of the rounds\n");
    printf("  host     until the calls of a layer have returned, median rank");
    if (c->mode != EPX_LOW_LATENCY)
        printf("; %.0f us of it waiting for the number of rows", row.count_us);
    printf("\n  logical  as if each (token, expert) pair were moved, there and back\n");
    printf("  check    %s\n\n", r->options->check ? "ok: layers before and after, with routings of their own"
                                                  : "off (--check compares layers with the oracle)");
    fflush(stdout);
}

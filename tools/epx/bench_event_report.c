/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The report of --timing events and --replays. Each rank has times of its own; a row is over the ranks: the median
 * rank's p50, the slowest rank's p50, the largest p99, the least time of all.
 */
#include <stdio.h>
#include <string.h>

#include "bench.h"

struct event_row {
    double p50, slowest_p50, p99, least; /* us; 0: not measured */
    double logical_GBps, wire_GBps;      /* of all ranks, by the slowest rank's p50; 0 for an update */
};

static const char *const names[BENCH_EVENT_OPS] = {"update", "dispatch", "combine", "pair", "dispatches", "combines"};

/* The operation whose bytes a row moves; -1: none, or two. */
static int moved_by(int op)
{
    if (op == BENCH_EVENT_DISPATCH || op == BENCH_EVENT_DISPATCHES)
        return BENCH_DISPATCH;
    return op == BENCH_EVENT_COMBINE || op == BENCH_EVENT_COMBINES ? BENCH_COMBINE : -1;
}

static void fill(const struct bench_report *r, int op, struct event_row *row)
{
    const struct bench_config *c = &r->options->config;
    const struct bench_event_times *times = r->shm->event_times[op];
    double p50[BENCH_MAX_RANKS], logical, wire;
    int i;

    memset(row, 0, sizeof(*row));
    for (i = 0; i < c->ranks; i++) {
        p50[i] = times[i].p50;
        row->slowest_p50 = times[i].p50 > row->slowest_p50 ? times[i].p50 : row->slowest_p50;
        row->p99 = times[i].p99 > row->p99 ? times[i].p99 : row->p99;
        row->least = i == 0 || times[i].least < row->least ? times[i].least : row->least;
    }
    row->p50 = bench_percentile_double(p50, c->ranks, 50);
    if (moved_by(op) < 0 || row->slowest_p50 <= 0)
        return;
    bench_row_moved(c, &r->traffic, (enum bench_op)moved_by(op), &logical, &wire);
    row->logical_GBps = logical / (row->slowest_p50 * 1e3);
    row->wire_GBps = wire / (row->slowest_p50 * 1e3);
}

static int is_shown(const struct bench_config *c, int op)
{
    const int ll = c->mode == EPX_LOW_LATENCY;

    return op == BENCH_EVENT_UPDATE ? !ll : ll || op <= BENCH_EVENT_COMBINE;
}

static const char *check_name(const struct bench_report *r)
{
    return r->failed ? "fail" : r->options->check || r->options->config.replays ? "ok" : "off";
}

/* ---- JSON */

static void json_number(FILE *to, const char *name, int decimals, double value)
{
    if (value > 0)
        fprintf(to, ",\"%s\":%.*f", name, decimals, value);
    else
        fprintf(to, ",\"%s\":null", name);
}

static void json_row(const struct bench_report *r, int op)
{
    const struct bench_config *c = &r->options->config;
    struct event_row row;

    fill(r, op, &row);
    fprintf(r->to, "{\"op\":\"%s\",\"mode\":\"%s\",\"ranks\":%d,\"nodes\":%d", names[op], bench_mode_name(c), c->ranks,
            c->nodes);
    json_number(r->to, "us_p50", 1, row.p50);
    json_number(r->to, "us_slowest_p50", 1, row.slowest_p50);
    json_number(r->to, "us_p99", 1, row.p99);
    json_number(r->to, "us_min", 1, row.least);
    json_number(r->to, "logical_GBps", 3, row.logical_GBps);
    json_number(r->to, "wire_GBps", 3, row.wire_GBps);
    fprintf(r->to, ",\"check\":\"%s\"", check_name(r));
    bench_report_json_shape(r);
}

void bench_event_report_json(const struct bench_report *r)
{
    const struct bench_config *c = &r->options->config;
    int op;

    if (c->replays > 0) {
        fprintf(r->to,
                "{\"op\":\"replays\",\"mode\":\"%s\",\"ranks\":%d,\"nodes\":%d,\"replays\":%d,\"overlap\":%s,\"check\":"
                "\"%s\"",
                bench_mode_name(c), c->ranks, c->nodes, c->replays, c->overlap ? "true" : "false", check_name(r));
        bench_report_json_shape(r);
    }
    for (op = 0; op < BENCH_EVENT_OPS && c->replays == 0; op++)
        if (is_shown(c, op))
            json_row(r, op);
}

/* ---- Table */

static void print_cell(int width, double value, const char *unit)
{
    char text[32] = "-";

    if (value > 0)
        snprintf(text, sizeof(text), "%.1f%s", value, unit);
    printf("%*s", width, text);
}

static void print_row(const struct bench_report *r, int op)
{
    struct event_row row;

    fill(r, op, &row);
    printf("%-11s", names[op]);
    print_cell(13, row.p50, " us");
    print_cell(14, row.slowest_p50, " us");
    print_cell(13, row.p99, " us");
    print_cell(13, row.least, " us");
    print_cell(15, row.logical_GBps, " GB/s");
    print_cell(14, row.wire_GBps, " GB/s");
    printf("\n");
}

static void print_notes(const struct bench_report *r)
{
    const struct bench_config *c = &r->options->config;

    printf("\n  time     between time stamps of each rank's device: median rank, slowest rank, largest p99, least of "
           "all\n");
    printf("  logical  of all ranks, as if each of the %lld (token, expert) pairs were moved; by the slowest rank\n",
           (long long)r->traffic.pairs);
    printf("  wire     of all ranks: rows that %s; by the slowest rank\n",
           c->nodes > 1 ? "cross between nodes" : "go to a destination rank");
    if (c->mode == EPX_LOW_LATENCY)
        printf("  pair     dispatch and combine in turn; dispatches, combines: one kind in a row; a stamp after every "
               "tenth\n");
    printf("  check    %s\n\n", r->options->check ? "ok: every row that dispatch and combine delivered to every rank"
                                                  : "off (--check compares every result with the oracle)");
}

void bench_event_report_table(const struct bench_report *r)
{
    const struct bench_config *c = &r->options->config;
    int op;

    bench_report_configuration(r);
    if (c->replays > 0) {
        printf("%d replays%s: every result of every rank is right\n\n", c->replays,
               c->overlap ? " beside copies on another stream" : "");
        return;
    }
    printf("%-11s%13s%14s%13s%13s%15s%14s\n", "", "p50", "slowest p50", "p99", "min", "logical", "wire");
    for (op = 0; op < BENCH_EVENT_OPS; op++)
        if (is_shown(c, op))
            print_row(r, op);
    print_notes(r);
    fflush(stdout);
}

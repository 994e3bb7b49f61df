/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Figures that are known, predicted beside measured or published ones. Those of the calibration are EPX's own
 * (docs/performance.md), and the numbers of h200-shared.machine were chosen by them. The others are of other libraries
 * on other machines, and nothing was chosen by them: what is predicted there is EPX.
 *
 * Bandwidths are counted as their publishers do: rows per (token, node), the own node included, or inside a node per
 * (token, rank), times the bytes of a row with its scales, over the time.
 */
#include <stdlib.h>

#include "commands.h"
#include "options.h"
#include "predict.h"
#include "progress.h"
#include "tests/lib/workload.h"

enum unit { MICROSECONDS, GB_PER_NODE_ROW, GB_PER_ROW };

struct known {
    const char *source, *machine;
    int mode, dtype, ranks, sms;
    enum unit unit;
    double value[PREDICT_OPS]; /* 0 = not known */
    double update_us;
};

enum { LL = EPX_LOW_LATENCY, HT = EPX_HIGH_THROUGHPUT, ITERS = 3 };

static const struct known measured[] = {
    {"EPX", "h200-shared", LL, PREDICT_FP8, 8, 16, MICROSECONDS, {59, 66}, 0},
    {"EPX", "h200-shared", HT, PREDICT_FP8, 8, 16, MICROSECONDS, {540, 957}, 161},
    {"EPX", "h200-shared", HT, PREDICT_BF16, 8, 16, MICROSECONDS, {945, 957}, 161},
};

static const struct known published[] = {
    {"DeepEP V1", "h800-cx7", LL, PREDICT_FP8, 8, 0, MICROSECONDS, {77, 114}, 0},
    {"DeepEP V1", "h800-cx7", LL, PREDICT_FP8, 16, 0, MICROSECONDS, {118, 195}, 0},
    {"DeepEP V1", "h800-cx7", LL, PREDICT_FP8, 32, 0, MICROSECONDS, {155, 273}, 0},
    {"DeepEP V1", "h800-cx7", LL, PREDICT_FP8, 64, 0, MICROSECONDS, {173, 314}, 0},
    {"DeepEP V1", "h800-cx7", LL, PREDICT_FP8, 128, 0, MICROSECONDS, {192, 369}, 0},
    {"DeepEP V1", "h800-cx7", LL, PREDICT_FP8, 256, 0, MICROSECONDS, {194, 360}, 0},
    {"DeepEP V1", "h800-cx7", HT, PREDICT_FP8, 8, 24, GB_PER_ROW, {153, 158}, 0},
    {"DeepEP V1", "h800-cx7", HT, PREDICT_FP8, 16, 24, GB_PER_NODE_ROW, {43, 43}, 0},
    {"DeepEP V1", "h800-cx7", HT, PREDICT_FP8, 32, 24, GB_PER_NODE_ROW, {58, 57}, 0},
    {"DeepEP V1", "h800-cx7", HT, PREDICT_FP8, 64, 24, GB_PER_NODE_ROW, {51, 50}, 0},
    {"UCCL-EP", "h200-efa", LL, PREDICT_FP8, 16, 0, MICROSECONDS, {226, 293}, 0},
    {"UCCL-EP", "h200-efa", LL, PREDICT_FP8, 24, 0, MICROSECONDS, {386, 580}, 0},
    {"UCCL-EP", "h200-efa", LL, PREDICT_FP8, 32, 0, MICROSECONDS, {465, 694}, 0},
    {"UCCL-EP", "h200-cx7", HT, PREDICT_FP8, 8, 24, GB_PER_ROW, {320, 319}, 0},
    {"UCCL-EP", "h200-efa", HT, PREDICT_FP8, 16, 24, GB_PER_NODE_ROW, {50, 18}, 0},
    {"UCCL-EP", "h200-efa", HT, PREDICT_FP8, 24, 24, GB_PER_NODE_ROW, {53, 26}, 0},
    {"UCCL-EP", "h200-efa", HT, PREDICT_FP8, 32, 24, GB_PER_NODE_ROW, {54, 43}, 0},
};

/* Their set-up: in low latency 288 experts where these divide; in high throughput up to 4 nodes per token. */
static struct predict_point point_of(const struct known *k, const struct cost_machine *machine, uint64_t seed)
{
    struct predict_point p = {.machine = *machine,
                              .mode = k->mode,
                              .ranks = k->ranks,
                              .tokens = k->mode == LL ? 128 : 4096,
                              .hidden = 7168,
                              .topk = 8,
                              .experts = 256,
                              .dtype = k->dtype,
                              .iters = ITERS,
                              .seed = seed};
    const int nodes = predict_nodes(&p);

    if (k->sms)
        p.machine.sms = (uint64_t)k->sms;
    if (k->mode == LL && 288 % k->ranks == 0)
        p.experts = 288;
    if (k->mode == HT && 256 % k->ranks != 0)
        p.experts = 256 / k->ranks * k->ranks;
    if (k->mode == HT && nodes > 1) {
        p.routing = WORKLOAD_GROUPS;
        p.groups = nodes;
        p.topk_groups = nodes < 4 ? nodes : 4;
    }
    return p;
}

/* In the unit of the figure. */
static double predicted(const struct known *k, const struct predict_point *p, const struct predict_result *r, int op)
{
    const int fp8 = op == PREDICT_DISPATCH && k->dtype == PREDICT_FP8;
    const int scales = p->hidden / 128;
    const double bytes = fp8 ? p->hidden + scales * 4 : 2.0 * p->hidden;

    if (k->unit == MICROSECONDS)
        return r->op[op].us_median;
    return (k->unit == GB_PER_ROW ? r->rows : r->node_rows) * bytes / r->op[op].us_median / 1000;
}

static double percent(double is, double should)
{
    return should > 0 ? 100 * (is / should - 1) : 0;
}

static void print_head(int calibration)
{
    printf("%-10s %-12s %-4s %5s %-5s  %27s  %27s\n", "", "", "", "", "", "dispatch", "combine");
    printf("%-10s %-12s %-4s %5s %-5s  %9s %9s %7s  %9s %9s %7s\n", calibration ? "measured" : "published", "machine",
           "mode", "ranks", "unit", "known", "predicted", "error", "known", "predicted", "error");
}

static void print_row(const struct known *k, const struct predict_point *p, const struct predict_result *r)
{
    printf("%-10s %-12s %-4s %5d %-5s", k->source, k->machine, k->mode == LL ? "ll" : "ht", k->ranks,
           k->unit == MICROSECONDS ? "us" : "GB/s");
    for (int op = 0; op < PREDICT_OPS; op++) {
        const double is = predicted(k, p, r, op);
        printf("  %9.0f %9.0f %+6.0f%%", k->value[op], is, percent(is, k->value[op]));
    }
    if (k->update_us > 0)
        printf("  update %.0f %.0f %+.0f%%", k->update_us, r->update_us, percent(r->update_us, k->update_us));
    printf("\n");
    fflush(stdout);
}

static void print_json(const struct known *k, const struct predict_point *p, const struct predict_result *r)
{
    printf("{\"source\":\"%s\",\"machine\":\"%s\",\"mode\":\"%s\",\"ranks\":%d,\"dtype\":\"%s\",\"unit\":\"%s\"",
           k->source, k->machine, k->mode == LL ? "ll" : "ht", k->ranks, k->dtype == PREDICT_FP8 ? "fp8" : "bf16",
           k->unit == MICROSECONDS ? "us" : "GB/s");
    for (int op = 0; op < PREDICT_OPS; op++) {
        const double is = predicted(k, p, r, op);
        printf(",\"%s\":{\"known\":%.1f,\"predicted\":%.1f,\"error_percent\":%.1f}",
               op == PREDICT_DISPATCH ? "dispatch" : "combine", k->value[op], is, percent(is, k->value[op]));
    }
    printf("}\n");
    fflush(stdout);
}

int predict_known(int calibration, int modes, int json, uint64_t seed)
{
    const struct known *list = calibration ? measured : published;
    const int n = (int)(calibration ? sizeof(measured) : sizeof(published)) / (int)sizeof(*list);

    if (!json)
        print_head(calibration);
    for (int i = 0; i < n; i++) {
        struct predict_result result;
        struct predict_point point;
        struct cost_machine machine;

        if (!(list[i].mode & modes))
            continue;
        if (machine_load(list[i].machine, &machine) != 0)
            return EXIT_FAILED;
        point = point_of(&list[i], &machine, seed);
        progress_wait("epx predict", 100.0 * i / n, "%s, %d ranks", list[i].source, list[i].ranks);
        if (predict_run(&point, &result) != 0) {
            progress_end();
            fprintf(stderr, "epx predict: %s: %s\n", list[i].source, result.error);
            return EXIT_FAILED;
        }
        progress_end();
        (json ? print_json : print_row)(&list[i], &point, &result);
    }
    return EXIT_OK;
}

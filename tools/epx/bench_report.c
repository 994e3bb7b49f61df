/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "bench.h"

const char *bench_op_name(enum bench_op op)
{
    static const char *const names[] = {"update", "dispatch", "combine"};

    return names[op];
}

static const char *check_name(const struct bench_report *r)
{
    return !r->options->check ? "off" : r->failed ? "fail" : "ok";
}

/* ---- JSON ----------------------------------------------------------------------------------------------------- */

/* A number under its name; null when nothing was measured, as after a failed check. */
static void json_number(FILE *to, const char *name, int decimals, double value, int measured)
{
    if (measured)
        fprintf(to, ",\"%s\":%.*f", name, decimals, value);
    else
        fprintf(to, ",\"%s\":null", name);
}

static void json_mpi(const struct bench_report *r, const struct bench_row *row)
{
    const struct bench_team *team = &r->shm->team[BENCH_MPI];
    int v, measured = row->mpi_us_p50 > 0;

    json_number(r->to, "mpi_us_p50", 1, row->mpi_us_p50, measured);
    json_number(r->to, "vs_mpi", 3, row->vs_mpi, row->vs_mpi > 0);
    json_number(r->to, "mpi_best_us_p50", 1, row->mpi_best_us_p50, measured);
    json_number(r->to, "vs_mpi_best", 3, row->vs_mpi_best, row->vs_mpi_best > 0);
    fprintf(r->to, ",\"mpi_variant\":\"%s\",\"mpi_best\":\"%s\",\"mpi_library\":\"%s\"",
            row->mpi_variant != NULL ? row->mpi_variant : "", row->mpi_best != NULL ? row->mpi_best : "",
            team->library);
    for (v = 0; measured && v < team->variants[row->op]; v++)
        fprintf(r->to, "%s\"%s\":%.1f%s", v == 0 ? ",\"mpi_variants\":{" : ",", team->variant_name[row->op][v],
                row->mpi_variant_us_p50[v], v + 1 == team->variants[row->op] ? "}" : "");
}

/* Numbers of one operation of all ranks; the ratio per row, which is a (token, destination). */
static void json_net(const struct bench_report *r, const struct bench_row *row)
{
    const struct bench_net *net = &r->shm->net[row->op];
    const double ops = (double)net->ops / r->options->config.ranks;
    const int measured = row->us_p50 > 0 && net->ops > 0;

    json_number(r->to, "rows_remote", 1, (double)net->rows / ops, measured);
    json_number(r->to, "net_commands", 1, (double)net->commands / ops, measured);
    json_number(r->to, "net_puts", 1, (double)net->puts / ops, measured);
    json_number(r->to, "net_signals", 1, (double)net->signals / ops, measured);
    json_number(r->to, "net_bytes", 0, (double)net->bytes / ops, measured);
    if (row->op != BENCH_UPDATE)
        json_number(r->to, "writes_per_row", 3, (double)net->puts / (double)net->rows, measured && net->rows > 0);
}

static void json_ofi(const struct bench_report *r, const struct bench_row *row)
{
    const double *GBps = r->ofi->p50;

    json_number(r->to, "ofi_GBps", 3, GBps[BENCH_OFI_ROWS], GBps[BENCH_OFI_ROWS] > 0);
    json_number(r->to, "vs_ofi", 3, row->vs_ofi[BENCH_OFI_ROWS], row->vs_ofi[BENCH_OFI_ROWS] > 0);
    json_number(r->to, "ofi_large_GBps", 3, GBps[BENCH_OFI_LARGE], GBps[BENCH_OFI_LARGE] > 0);
    json_number(r->to, "vs_ofi_large", 3, row->vs_ofi[BENCH_OFI_LARGE], row->vs_ofi[BENCH_OFI_LARGE] > 0);
    fprintf(r->to, ",\"ofi_threads\":%d,\"ofi_row_bytes\":%u,\"ofi_large_bytes\":%u", r->ofi->threads,
            r->ofi->message_bytes[BENCH_OFI_ROWS], r->ofi->message_bytes[BENCH_OFI_LARGE]);
}

static void json_phases(const struct bench_report *r, const struct bench_row *row)
{
    const struct bench_phase *p = r->shm->phases[row->op];

    fprintf(r->to, ",\"trace_cost\":%.4f", row->trace_cost);
    for (int i = 0; i < BENCH_PHASES && p[i].count > 0; i++)
        fprintf(r->to, "%s\"%s\":%.2f", i == 0 ? ",\"phases\":{" : ",", p[i].name,
                (double)p[i].ns / 1e3 / (double)p[i].count);
    fputs(p[0].count > 0 ? "}" : "", r->to);
}

static void json_row(const struct bench_report *r, const struct bench_row *row)
{
    const struct bench_config *c = &r->options->config;
    int measured = row->us_p50 > 0;

    fprintf(r->to, "{\"op\":\"%s\",\"mode\":\"%s\",\"ranks\":%d,\"nodes\":%d", bench_op_name(row->op),
            bench_mode_name(c), c->ranks, c->nodes);
    json_number(r->to, "us_p50", 1, row->us_p50, measured);
    json_number(r->to, "us_p99", 1, row->us_p99, measured);
    json_number(r->to, "us_low", 1, row->us_low, measured);
    json_number(r->to, "us_high", 1, row->us_high, measured);
    json_number(r->to, "host_us", 1, row->host_us, measured);
    json_number(r->to, "logical_GBps", 3, row->logical_GBps, measured);
    json_number(r->to, "wire_GBps", 3, row->wire_GBps, measured);
    json_number(r->to, "copies_GBps", 3, row->copies_GBps, measured);
    fprintf(r->to, ",\"check\":\"%s\"", check_name(r));
    if (c->nodes > 1)
        json_net(r, row);
    if (r->ofi != NULL && row->op != BENCH_UPDATE)
        json_ofi(r, row);
    if (r->options->vs_mpi)
        json_mpi(r, row);
    json_number(r->to, "memcpy_GBps", 2, r->ceiling.memcpy_GBps, r->ceiling.memcpy_GBps > 0);
    json_number(r->to, "bound_GBps", 2, r->ceiling.bound_GBps, r->ceiling.bound_GBps > 0);
    if (row->op == BENCH_DISPATCH) {
        json_number(r->to, "of_memcpy", 3, row->of_memcpy, measured);
        json_number(r->to, "of_bound", 3, row->of_bound, measured && row->of_bound > 0);
    }
    if (r->options->phases)
        json_phases(r, row);
    bench_report_json_shape(r);
}

void bench_report_json_shape(const struct bench_report *r)
{
    const struct bench_config *c = &r->options->config;

    fprintf(r->to,
            ",\"tokens\":%d,\"hidden\":%d,\"topk\":%d,\"experts\":%d,\"dtype\":\"%s\",\"routing\":\"%s\","
            "\"layout\":\"%s\",\"device\":\"%s\",\"net\":\"%s\",\"logfmt\":%s,\"plain_memory\":%s,\"iters\":%d,"
            "\"agents\":%d,\"threads\":%s,\"staged\":%s,\"timing\":\"%s\",\"seed\":%llu",
            c->tokens, c->hidden, c->topk, c->experts, bench_dtype_name(c), bench_routing_name(c), bench_layout_name(c),
            bench_device_name(c), c->net[0] != '\0' ? c->net : "auto", c->logfmt ? "true" : "false",
            c->plain_memory ? "true" : "false", r->options->iters, c->agents, c->threads ? "true" : "false",
            c->staged ? "true" : "false", c->events ? "events" : "wall", (unsigned long long)c->seed);
    if (r->shm->network[0] != '\0')
        fprintf(r->to, ",\"network\":\"%s\"", r->shm->network);
    fputs("}\n", r->to);
}

void bench_report_json(const struct bench_report *report)
{
    int i;

    for (i = 0; i < report->nrows; i++)
        json_row(report, &report->rows[i]);
}

/* ---- Table ---------------------------------------------------------------------------------------------------- */

void bench_report_configuration(const struct bench_report *r)
{
    const struct bench_config *c = &r->options->config;

    printf("\nEPX %d.%d.%d  %s, %s layout: %d rank%s, %d node%s, device %s\n", EPX_VERSION_MAJOR, EPX_VERSION_MINOR,
           EPX_VERSION_PATCH, c->mode == EPX_LOW_LATENCY ? "low latency" : "high throughput", bench_layout_name(c),
           c->ranks, c->ranks == 1 ? "" : "s", c->nodes, c->nodes == 1 ? "" : "s", bench_device_name(c));
    printf("%d tokens per rank, hidden %d, top-%d of %d experts, dispatch %s, combine %s, %s routing, seed %llu\n",
           c->tokens, c->hidden, c->topk, c->experts, bench_dtype_name(c), c->logfmt ? "LogFMT-10" : "bf16",
           bench_routing_name(c), (unsigned long long)c->seed);
    printf("ranks are %s, tensors in %s, %d iterations", c->threads ? "threads" : "processes",
           c->plain_memory ? "ordinary memory" : "epx_alloc memory", r->options->iters);
    if (r->rounds > 0)
        printf(" in %d rounds", r->rounds);
    if (r->shm->network[0] != '\0')
        printf("\nnetwork between nodes is %s", r->shm->network);
    printf("\n\n");
}

/* A number, or a dash where there is none. */
static void print_cell(int width, int decimals, double value, const char *unit)
{
    char text[32] = "-";

    if (value > 0)
        snprintf(text, sizeof(text), "%.*f%s", decimals, value, unit);
    printf("%*s", width, text);
}

static void print_rows(const struct bench_report *r)
{
    int i, mpi = r->options->vs_mpi, ofi = r->ofi != NULL;

    printf("%-10s%12s%12s%15s%12s%12s", "", "p50", "p99", "logical", "wire", "of bound");
    if (mpi)
        printf("%14s%10s%10s", "MPI p50", "vs MPI", "vs best");
    printf(ofi ? "%10s\n" : "\n", "vs ofi");
    for (i = 0; i < r->nrows; i++) {
        const struct bench_row *row = &r->rows[i];

        printf("%-10s", bench_op_name(row->op));
        print_cell(12, 0, row->us_p50, " us");
        print_cell(12, 0, row->us_p99, " us");
        print_cell(15, 1, row->logical_GBps, " GB/s");
        print_cell(12, 1, row->wire_GBps, " GB/s");
        print_cell(12, 0, row->of_bound * 100, " %");
        if (mpi) {
            print_cell(14, 0, row->mpi_us_p50, " us");
            print_cell(10, 2, row->vs_mpi, "x");
            print_cell(10, 2, row->vs_mpi_best, "x");
        }
        if (ofi)
            print_cell(10, 2, row->vs_ofi[BENCH_OFI_ROWS], "x");
        printf("\n");
    }
    printf("\n");
}

static void print_mpi_note(const struct bench_report *r)
{
    int i;

    printf("  MPI      %s:", r->shm->team[BENCH_MPI].library);
    for (i = 0; i < r->nrows; i++)
        printf("%s %s %s", i > 0 ? "," : "", bench_op_name(r->rows[i].op), r->rows[i].mpi_variant);
    printf("\n  best     the fastest of all MPI variants:");
    for (i = 0; i < r->nrows; i++)
        printf("%s %s %s", i > 0 ? "," : "", bench_op_name(r->rows[i].op), r->rows[i].mpi_best);
    printf("\n");
}

static void print_net_note(const struct bench_report *r)
{
    int i;

    for (i = 0; i < r->nrows; i++) {
        const struct bench_net *net = &r->shm->net[r->rows[i].op];
        const double ops = (double)net->ops / r->options->config.ranks;

        if (net->ops == 0)
            continue;
        printf("  net      %s: %.0f rows to other nodes in %.0f commands, %.0f writes (%.0f of them without bytes), "
               "%.1f MB",
               bench_op_name(r->rows[i].op), (double)net->rows / ops, (double)net->commands / ops,
               (double)net->puts / ops, (double)net->signals / ops, (double)net->bytes / ops / 1e6);
        if (net->rows > 0)
            printf("; %.2f writes per row", (double)net->puts / (double)net->rows);
        printf("\n");
    }
}

static void print_ofi_note(const struct bench_report *r)
{
    const struct bench_ofi_rounds *ofi = r->ofi;
    int i;

    printf("  ofi      the same bytes by plain fi_write, %d thread%s per process: %.2f GB/s by one write per row\n",
           ofi->threads, ofi->threads == 1 ? "" : "s", ofi->p50[BENCH_OFI_ROWS]);
    printf("           and %.2f GB/s by writes of %u bytes", ofi->p50[BENCH_OFI_LARGE],
           ofi->message_bytes[BENCH_OFI_LARGE]);
    for (i = 0; i < r->nrows; i++)
        if (r->rows[i].vs_ofi[BENCH_OFI_LARGE] > 0)
            printf(", against which %s has %.2fx", bench_op_name(r->rows[i].op), r->rows[i].vs_ofi[BENCH_OFI_LARGE]);
    printf("; compared with wire\n");
}

static void print_wire_note(const struct bench_report *r)
{
    const struct bench_config *c = &r->options->config;
    const struct bench_traffic *t = &r->traffic;
    const char *unit = c->mode == EPX_LOW_LATENCY ? "destination rank" : "node";

    if (c->nodes > 1) {
        printf("  wire     between nodes: one row for each of the %lld (token, %s): %.1f MB per dispatch%s\n",
               (long long)t->remote, unit, (double)t->remote * bench_row_bytes(c, BENCH_DISPATCH) / 1e6,
               t->remote_back != t->remote ? "; combine returns pairs" : "");
        return;
    }
    printf("  wire     one row for each of the %lld (token, destination rank): %.1f MB per dispatch%s\n",
           (long long)t->copies, (double)t->copies * bench_row_bytes(c, BENCH_DISPATCH) / 1e6,
           c->layout == EPX_EXPERT_MAJOR ? "; combine returns pairs" : "");
}

static void print_ceiling_note(const struct bench_report *r)
{
    const struct bench_config *c = &r->options->config;
    const struct bench_ceiling *ceiling = &r->ceiling;

    printf("  bound    %.1f GB/s: the %.1f MB that dispatch writes, by %d process%s that only read each row once and "
           "write it\n           to its places, in memory shared as that of the ranks. Plain memcpy on all cores: %.1f "
           "GB/s\n",
           ceiling->bound_GBps,
           (double)(c->layout == EPX_EXPERT_MAJOR ? r->traffic.pairs : r->traffic.copies) *
               bench_row_bytes(c, BENCH_DISPATCH) / 1e6,
           ceiling->bound_processes, ceiling->bound_processes == 1 ? "" : "es", ceiling->memcpy_GBps);
    for (int i = 0; i < r->nrows; i++)
        if (r->rows[i].of_bound > 1)
            printf("           %s passed it: here it is a reference and no bound, because its rows were in a cache or "
                   "the\n           machine was busier while it was measured\n",
                   bench_op_name(r->rows[i].op));
}

static void print_notes(const struct bench_report *r)
{
    const struct bench_config *c = &r->options->config;

    printf("  time     from the moment all ranks may start until the last one has finished\n");
    printf("  logical  as if each of the %lld (token, expert) pairs were moved: %.1f MB per dispatch\n",
           (long long)r->traffic.pairs, (double)r->traffic.pairs * bench_row_bytes(c, BENCH_DISPATCH) / 1e6);
    print_wire_note(r);
    if (r->ceiling.bound_GBps > 0)
        print_ceiling_note(r);
    if (c->nodes > 1)
        print_net_note(r);
    if (r->ofi != NULL)
        print_ofi_note(r);
    if (r->options->vs_mpi)
        print_mpi_note(r);
    if ((r->ofi != NULL || r->options->vs_mpi) && r->options->iters < BENCH_RATIO_ITERS)
        printf("  ratios   none of %d iterations: expected --iters %d or more\n", r->options->iters, BENCH_RATIO_ITERS);
    printf("  check    %s\n\n", !r->options->check ? "off (--check compares every result with the oracle)"
                                : r->failed        ? "FAILED"
                                                   : "ok: every row that dispatch and combine delivered to every rank");
}

void bench_report_table(const struct bench_report *report)
{
    bench_report_configuration(report);
    print_rows(report);
    print_notes(report);
    fflush(stdout);
}

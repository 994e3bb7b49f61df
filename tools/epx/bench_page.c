/* SPDX-License-Identifier: Apache-2.0 */
/* --report: the page of a benchmark, from the rows that --json prints. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench_session.h"
#include "page.h"

static const struct {
    const char *mode, *name;
} modes[] = {{"ll", "low latency"}, {"ht", "high throughput"}};
enum { MODES = 2, OPS = 4 };

static const struct {
    const char *op;
    int colour;
} ops[OPS] = {{"layer", 0}, {"update", 2}, {"dispatch", 1}, {"combine", 3}};

static int is_row(const struct numbers_row *row, const char *mode, const char *op)
{
    return strcmp(row_text(row, "mode"), mode) == 0 && strcmp(row_text(row, "op"), op) == 0;
}

/* How many different values of `name` have rows with this value of `other`? */
static int count_values(const struct numbers *n, const char *mode, const char *name, const char *other, double value)
{
    int count = 0;

    for (int i = 0; i < n->count; i++) {
        int again = 0;

        if (strcmp(row_text(&n->rows[i], "mode"), mode) != 0 || row_number(&n->rows[i], other) != value)
            continue;
        for (int j = 0; j < i; j++)
            again |= strcmp(row_text(&n->rows[j], "mode"), mode) == 0 && row_number(&n->rows[j], other) == value &&
                     row_number(&n->rows[j], name) == row_number(&n->rows[i], name);
        count += !again;
    }
    return count;
}

/* The value of `other` along which a plot over `name` has the most points; of equals the largest. */
static double best_line(const struct numbers *n, const char *mode, const char *name, const char *other)
{
    double best = 0;
    int most = 0;

    for (int i = 0; i < n->count; i++) {
        const double v = row_number(&n->rows[i], other);
        const int count = strcmp(row_text(&n->rows[i], "mode"), mode) == 0 ? count_values(n, mode, name, other, v) : 0;

        if (count > most || (count == most && count > 0 && v > best)) {
            most = count;
            best = v;
        }
    }
    return best;
}

/* A line needs two points. */
static int has_line(const struct numbers *n, int mode, const char *over, const char *other)
{
    const char *name = modes[mode].mode;

    return count_values(n, name, over, other, best_line(n, name, over, other)) > 1;
}

static int any_line(const struct numbers *n, const char *over, const char *other)
{
    int any = 0;

    for (int mode = 0; mode < MODES; mode++)
        any |= has_line(n, mode, over, other);
    return any;
}

/* One plot over tokens or over ranks of one mode: p50 solid, p99 dashed. */
static void plot_times(struct page *page, const struct numbers *n, int mode, const char *over, const char *other,
                       const char *title, int with_p99)
{
    static struct plot plot;
    const double fixed = best_line(n, modes[mode].mode, over, other);
    char text[128];

    snprintf(text, sizeof(text), "%s, %s (%g %s)", title, modes[mode].name, fixed,
             strcmp(other, "ranks") == 0 ? "ranks" : "tokens per rank");
    plot = (struct plot){.title = text,
                         .x_label = strcmp(over, "ranks") == 0 ? "ranks" : "tokens per rank",
                         .y_label = "microseconds",
                         .ticks_at_points = 1};
    for (int o = 0; o < OPS; o++) {
        for (int i = 0; i < n->count; i++) {
            const struct numbers_row *row = &n->rows[i];
            char label[64];

            if (!is_row(row, modes[mode].mode, ops[o].op) || row_number(row, other) != fixed)
                continue;
            snprintf(label, sizeof(label), "%s p50", ops[o].op);
            plot_add(plot_series(&plot, label, ops[o].colour, 0), row_number(row, over), row_number(row, "us_p50"));
            if (!with_p99)
                continue;
            snprintf(label, sizeof(label), "%s p99", ops[o].op);
            plot_add(plot_series(&plot, label, ops[o].colour, 1), row_number(row, over), row_number(row, "us_p99"));
        }
    }
    page_plot(page, &plot);
}

static void plot_bandwidth(struct page *page, const struct numbers *n, int mode)
{
    static struct plot plot;
    char title[64];

    snprintf(title, sizeof(title), "Bandwidth over bytes, %s", modes[mode].name);
    plot = (struct plot){.title = title, .x_label = "MB moved by one operation of all ranks", .y_label = "GB/s"};
    plot.linear_y = 1;
    for (int o = 0; o < OPS; o++) {
        for (int i = 0; i < n->count; i++) {
            const struct numbers_row *row = &n->rows[i];
            const double GBps = row_number(row, "wire_GBps");

            if (is_row(row, modes[mode].mode, ops[o].op) && GBps > 0 &&
                row_number(row, "ranks") == best_line(n, modes[mode].mode, "tokens", "ranks"))
                plot_add(plot_series(&plot, ops[o].op, ops[o].colour, 0), GBps * row_number(row, "us_p50") / 1e3, GBps);
        }
    }
    page_plot(page, &plot);
}

static void row_label(const struct numbers_row *row, char *label, size_t bytes)
{
    snprintf(label, bytes, "%s %s, %g x %g", row_text(row, "mode"), row_text(row, "op"), row_number(row, "ranks"),
             row_number(row, "tokens"));
}

/* The largest row of each (mode, op): bars of everything would be a wall. */
static int is_largest(const struct numbers *n, int i)
{
    const struct numbers_row *row = &n->rows[i];

    for (int j = 0; j < n->count; j++) {
        const struct numbers_row *other = &n->rows[j];
        const double a = row_number(row, "ranks") * row_number(row, "tokens");
        const double b = row_number(other, "ranks") * row_number(other, "tokens");

        if (j != i && is_row(other, row_text(row, "mode"), row_text(row, "op")) && (b > a || (b == a && j > i)))
            return 0;
    }
    return 1;
}

/* Instead of lines with one point. */
static void bars_times(struct page *page, const struct numbers *n, int mode)
{
    static const char *const fields[] = {"us_p50", "us_p99"};
    static struct bars bars;
    char title[128] = "", label[64];

    bars = (struct bars){.title = title, .unit = "us"};
    for (int i = 0; i < n->count; i++) {
        const struct numbers_row *row = &n->rows[i];

        if (strcmp(row_text(row, "mode"), modes[mode].mode) != 0 || !is_largest(n, i))
            continue;
        snprintf(title, sizeof(title), "Time, %s (%g ranks, %g tokens per rank)", modes[mode].name,
                 row_number(row, "ranks"), row_number(row, "tokens"));
        for (int f = 0; f < 2; f++) {
            snprintf(label, sizeof(label), "%s %s", row_text(row, "op"), fields[f] + 3);
            bar_part(bars_add(&bars, label), fields[f], row_number(row, fields[f]));
        }
    }
    page_bars(page, &bars);
}

static void bars_bandwidth(struct page *page, const struct numbers *n, int mode)
{
    static struct bars bars;
    char title[64];

    snprintf(title, sizeof(title), "Bandwidth, %s", modes[mode].name);
    bars = (struct bars){.title = title, .unit = "GB/s"};
    for (int i = 0; i < n->count; i++) {
        const struct numbers_row *row = &n->rows[i];

        if (strcmp(row_text(row, "mode"), modes[mode].mode) == 0 && is_largest(n, i) &&
            row_number(row, "wire_GBps") > 0)
            bar_part(bars_add(&bars, row_text(row, "op")), "wire", row_number(row, "wire_GBps"));
    }
    page_bars(page, &bars);
}

/* Phases of less than 2 % of an operation are one part: they have no room for a colour. */
static void add_phases(struct bar *bar, const struct numbers_row *row)
{
    double sum = 0, rest = 0;

    for (int small = 0; small < 2; small++)
        for (int f = 0; f < row->count; f++) {
            const double us = row->fields[f].value;

            if (strncmp(row->fields[f].name, "phases.", 7) != 0)
                continue;
            if (!small)
                sum += us;
            else if (us < 0.02 * sum)
                rest += us;
            else
                bar_part(bar, row->fields[f].name + 7, us);
        }
    bar_part(bar, "other", rest);
}

static int has_phases(const struct numbers_row *row)
{
    for (int f = 0; f < row->count; f++)
        if (strncmp(row->fields[f].name, "phases.", 7) == 0 && row->fields[f].value > 0)
            return 1;
    return 0;
}

static void bars_phases(struct page *page, const struct numbers *n)
{
    static struct bars bars;
    char label[64];

    bars = (struct bars){.title = "Time per phase, of rank 0's first agent", .unit = "us", .by_part = 1};
    for (int i = 0; i < n->count; i++) {
        const struct numbers_row *row = &n->rows[i];

        if (!is_largest(n, i) || !has_phases(row))
            continue;
        row_label(row, label, sizeof(label));
        add_phases(bars_add(&bars, label), row);
    }
    page_bars(page, &bars);
}

static void bars_host(struct page *page, const struct numbers *n)
{
    static struct bars bars;
    char label[64];

    bars = (struct bars){.title = "Host: until the calls have returned, without the wait for counts", .unit = "us"};
    for (int i = 0; i < n->count; i++) {
        const double us = row_number(&n->rows[i], "host_us") - fmax(0, row_number(&n->rows[i], "host_count_us"));

        if (!is_largest(n, i) || us <= 0)
            continue;
        row_label(&n->rows[i], label, sizeof(label));
        bar_part(bars_add(&bars, label), "host", us);
    }
    page_bars(page, &bars);
}

static void bars_ratio(struct page *page, const struct numbers *n, const char *field, const char *title,
                       const char *unit, double factor, double mark)
{
    static struct bars bars;
    char label[64];

    bars = (struct bars){.title = title, .unit = unit, .mark = mark};
    for (int i = 0; i < n->count; i++) {
        if (row_number(&n->rows[i], field) <= 0)
            continue;
        row_label(&n->rows[i], label, sizeof(label));
        bar_part(bars_add(&bars, label), field, factor * row_number(&n->rows[i], field));
    }
    page_bars(page, &bars);
}

static const struct {
    const char *title, *field;
    int decimals, is_ratio;
} columns[] = {{"ranks", "ranks", 0, 0},
               {"nodes", "nodes", 0, 0},
               {"tokens", "tokens", 0, 0},
               {"p50 us", "us_p50", 1, 0},
               {"p99 us", "us_p99", 1, 0},
               {"host us", "host_us", 1, 0},
               {"logical GB/s", "logical_GBps", 2, 0},
               {"wire GB/s", "wire_GBps", 2, 0},
               {"of bound", "of_bound", 2, 1},
               {"of memcpy", "of_memcpy", 2, 1},
               {"vs MPI", "vs_mpi", 2, 1},
               {"vs fi_write", "vs_ofi", 2, 1}};
enum { COLUMNS = (int)(sizeof(columns) / sizeof(columns[0])) };

static int has_column(const struct numbers *n, int column)
{
    for (int i = 0; i < n->count; i++)
        if (row_number(&n->rows[i], columns[column].field) > 0)
            return 1;
    return 0;
}

static void write_row(struct page *page, const struct numbers *n, const struct numbers_row *row)
{
    fprintf(page->to, "<tr><td>");
    page_text(page, row_text(row, "mode"));
    fprintf(page->to, "</td><td>");
    page_text(page, row_text(row, "op"));
    fprintf(page->to, "</td>");
    for (int c = 0; c < COLUMNS; c++) {
        const double v = row_number(row, columns[c].field);

        if (has_column(n, c) && v > 0)
            fprintf(page->to, "<td class=\"n\">%.*f</td>", columns[c].decimals, v);
        else if (has_column(n, c))
            fputs("<td class=\"n\"></td>", page->to);
    }
    fprintf(page->to, "<td>");
    page_text(page, row_text(row, "check"));
    fprintf(page->to, "</td></tr>\n");
}

static void write_table(struct page *page, const struct numbers *n)
{
    fputs("<div class=\"wide\"><table id=\"all\"><thead><tr><th>mode</th><th>operation</th>", page->to);
    for (int c = 0; c < COLUMNS; c++)
        if (has_column(n, c))
            fprintf(page->to, "<th class=\"n\">%s</th>", columns[c].title);
    fputs("<th>check</th></tr></thead><tbody>\n", page->to);
    for (int i = 0; i < n->count; i++)
        write_row(page, n, &n->rows[i]);
    fputs("</tbody></table></div>\n", page->to);
}

/* The network that was used; files of older versions have what was asked for only. */
static const char *network_of(const struct numbers_row *row)
{
    if (row_number(row, "nodes") < 2)
        return "none: one node";
    return row_text(row, "network")[0] != '\0' ? row_text(row, "network") : row_text(row, "net");
}

static void write_configuration(struct page *page, const struct numbers_row *row)
{
    page_facts_begin(page, "Configuration");
    page_fact(page, "device", "%s", row_text(row, "device"));
    page_fact(page, "hidden", "%g elements", row_number(row, "hidden"));
    page_fact(page, "experts", "top-%g of %g", row_number(row, "topk"), row_number(row, "experts"));
    page_fact(page, "rows of dispatch", "%s", row_text(row, "dtype"));
    page_fact(page, "routing", "%s, seed %g", row_text(row, "routing"), row_number(row, "seed"));
    page_fact(page, "network", "%s", network_of(row));
    page_fact(page, "ranks are", "%s", row_number(row, "threads") > 0 ? "threads" : "processes");
    page_facts_end(page);
}

#define TIME_TEXT                                                                                                      \
    "From the moment all ranks may start until the last one has finished. A layer is what a model waits for: routing " \
    "that is new each time, dispatch and combine, rows in ordinary memory. The other rows are parts of it in steady "  \
    "state."

static void write_times(struct page *page, const struct numbers *n)
{
    if (any_line(n, "tokens", "ranks"))
        page_section(page, "Time over tokens", TIME_TEXT " Solid: p50, dashed: p99.");
    else
        page_section(page, "Time", TIME_TEXT);
    page_plots_begin(page);
    for (int mode = 0; mode < MODES; mode++)
        if (has_line(n, mode, "tokens", "ranks"))
            plot_times(page, n, mode, "tokens", "ranks", "Time over tokens", 1);
        else
            bars_times(page, n, mode);
    page_plots_end(page);
    page_section(page, any_line(n, "tokens", "ranks") ? "Bandwidth over bytes" : "Bandwidth",
                 "Bytes that are really sent: one row per (token, destination rank), between nodes one per (token, "
                 "node). A layer counts dispatch and combine together.");
    page_plots_begin(page);
    for (int mode = 0; mode < MODES; mode++)
        if (has_line(n, mode, "tokens", "ranks"))
            plot_bandwidth(page, n, mode);
        else
            bars_bandwidth(page, n, mode);
    page_plots_end(page);
}

static void write_ratios(struct page *page, const struct numbers *n)
{
    int any = 0;

    for (int c = 0; c < COLUMNS; c++)
        any |= columns[c].is_ratio && has_column(n, c);
    if (!any)
        return;
    page_section(page, "Ratios",
                 "The bound is what dispatch could do if exchanging cost nothing: as many processes as the ranks have "
                 "agents, at once, read the rows of the same routing once and write them to their places, in memory "
                 "that is shared as that of the ranks. Where dispatch passes it, it is a reference and no bound: its "
                 "rows were in a cache, or the machine was busier while it was measured. Plain memcpy is no ceiling, "
                 "because it reads every byte that it writes; dispatch may pass it. Baselines are there when they "
                 "were measured in the same run (--vs mpi, --vs ofi): above 1, EPX is faster.");
    page_plots_begin(page);
    bars_ratio(page, n, "of_bound", "Dispatch, share of the bound (read once, write many)", "%", 100, 100);
    bars_ratio(page, n, "of_memcpy", "Dispatch, bytes written compared with memcpy's", "%", 100, 100);
    bars_ratio(page, n, "vs_mpi", "Times as fast as MPI (packed rows, MPI_Alltoallv)", "x", 1, 1);
    bars_ratio(page, n, "vs_ofi", "Bandwidth compared with a loop around fi_write", "x", 1, 1);
    page_plots_end(page);
}

static void write_plots(struct page *page, const struct numbers *n)
{
    write_times(page, n);
    page_section(page, "Where the time goes",
                 "Phases by the kernels' own marks, in a run of its own with tracing on, and the host's share. "
                 "Label: mode, operation, ranks x tokens.");
    page_plots_begin(page);
    bars_phases(page, n);
    bars_host(page, n);
    page_plots_end(page);
    write_ratios(page, n);
    if (!any_line(n, "ranks", "tokens"))
        return;
    page_section(page, "Scaling over ranks", "All ranks are on this machine, so that they share its cores and memory.");
    page_plots_begin(page);
    for (int mode = 0; mode < MODES; mode++)
        if (has_line(n, mode, "ranks", "tokens"))
            plot_times(page, n, mode, "ranks", "tokens", "Time over ranks", 0);
    page_plots_end(page);
}

int bench_page_write(const char *path, const char *rows, int argc, char **argv)
{
    struct numbers n;
    struct page page;
    char subtitle[128];

    if (numbers_parse(&n, rows, "op") != 0 || n.count == 0 ||
        page_begin(&page, "epx bench", path, "epx bench",
                   "Mixture-of-Experts dispatch and combine, measured on this machine") != 0) {
        numbers_free(&n);
        return -1;
    }
    page_command(&page, argc, argv);
    page_plots_begin(&page);
    page_machine(&page, "Machine");
    write_configuration(&page, &n.rows[n.count - 1]);
    page_plots_end(&page);
    write_plots(&page, &n);
    snprintf(subtitle, sizeof(subtitle), "%d row%s. The page has them as JSON: epx bench --compare reads it.", n.count,
             n.count == 1 ? "" : "s");
    page_section(&page, "All numbers", subtitle);
    write_table(&page, &n);
    numbers_free(&n);
    return page_end(&page, "epx bench", rows);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* --report of `epx predict`: the page, with the rows of --json in it. */
#include <stdlib.h>

#include "page.h"
#include "predict.h"
#include "routing.h"

static const struct {
    const char *label;
    int mode, op, colour, dashed;
} lines[] = {
    {"low latency, dispatch", EPX_LOW_LATENCY, PREDICT_DISPATCH, 0, 0},
    {"low latency, combine", EPX_LOW_LATENCY, PREDICT_COMBINE, 0, 1},
    {"high throughput, dispatch", EPX_HIGH_THROUGHPUT, PREDICT_DISPATCH, 1, 0},
    {"high throughput, combine", EPX_HIGH_THROUGHPUT, PREDICT_COMBINE, 1, 1},
};
enum { LINES = 4 };

enum quantity { TIME, SLOWEST, NET, LINKS, MESSAGES, MEMORY };

static double value_of(const struct predict_result *r, enum quantity what, int op)
{
    const struct predict_op_result *o = &r->op[op];

    switch (what) {
    case TIME:
        return o->us_median;
    case SLOWEST:
        return o->us_slowest;
    case NET:
        return o->bytes / 1e6;
    case LINKS:
        return o->link_bytes / 1e6;
    case MESSAGES:
        return o->messages;
    default:
        return op == PREDICT_DISPATCH ? r->memory_bytes / 1e6 : 0;
    }
}

/* Lines over ranks need two numbers of ranks. */
static int has_lines(const struct predict_point *points, int n)
{
    for (int i = 1; i < n; i++)
        if (points[i].ranks != points[0].ranks)
            return 1;
    return 0;
}

static const char *label_of(int line, enum quantity what)
{
    if (what != MEMORY)
        return lines[line].label;
    return lines[line].mode == EPX_LOW_LATENCY ? "low latency" : "high throughput"; /* of both operations */
}

static void draw_bars(struct page *page, const char *title, enum quantity what, const struct predict_point *points,
                      const struct predict_result *results, int n)
{
    static const char *const units[] = {"us", "us", "MB", "MB", "", "MB"}; /* short: they follow each number */
    static struct bars bars;
    char text[128];

    snprintf(text, sizeof(text), "%s (%d ranks)", title, points[0].ranks);
    bars = (struct bars){.title = text, .unit = units[what]};
    for (int line = 0; line < LINES; line++)
        for (int i = 0; i < n; i++) {
            const double value = value_of(&results[i], what, lines[line].op);
            struct bar *bar =
                points[i].mode == lines[line].mode && value > 0 ? bars_add(&bars, label_of(line, what)) : NULL;

            if (bar)
                bar_part(bar, "", value);
        }
    if (bars.count > 0)
        page_bars(page, &bars);
}

static void draw(struct page *page, const char *title, const char *unit, enum quantity what,
                 const struct predict_point *points, const struct predict_result *results, int n)
{
    static struct plot plot;

    if (!has_lines(points, n)) {
        draw_bars(page, title, what, points, results, n);
        return;
    }
    plot = (struct plot){.title = title, .x_label = "ranks", .y_label = unit, .ticks_at_points = 1};
    for (int line = 0; line < LINES; line++) {
        struct plot_series *s = plot_series(&plot, label_of(line, what), lines[line].colour, lines[line].dashed);

        for (int i = 0; i < n; i++)
            if (points[i].mode == lines[line].mode)
                plot_add(s, points[i].ranks, value_of(&results[i], what, lines[line].op));
    }
    page_plot(page, &plot);
}

static void write_facts(struct page *page, const struct predict_point *p)
{
    page_facts_begin(page, "Predicted machine");
    page_fact(page, "name", "%s", p->machine.name);
    page_fact(page, "SMs per rank", "%llu", (unsigned long long)p->machine.sms);
    page_fact(page, "hidden", "%d elements", p->hidden);
    page_fact(page, "experts per token", "%d", p->topk);
    page_fact(page, "rows of dispatch", "%s", p->dtype == PREDICT_FP8 ? "fp8" : "bf16");
    page_fact(page, "routing", "%s, seed %llu", option_choice_name(routing_choices, p->routing),
              (unsigned long long)p->seed);
    page_facts_end(page);
}

static void write_plots(struct page *page, const struct predict_point *points, const struct predict_result *results,
                        int n)
{
    page_section(
        page, has_lines(points, n) ? "Time over ranks" : "Time",
        "The real kernels, proxies and algorithms on a virtual clock with a cost for everything they do; every "
        "result was checked. docs/scale.md says what the model is and how good it is.");
    page_plots_begin(page);
    draw(page, "Time of the median rank", "microseconds", TIME, points, results, n);
    draw(page, "Time of the slowest rank", "microseconds", SLOWEST, points, results, n);
    page_plots_end(page);
    page_section(page, "What is moved", "Per rank and operation.");
    page_plots_begin(page);
    draw(page, "Between nodes", "MB", NET, points, results, n);
    draw(page, "Inside a node, over links", "MB", LINKS, points, results, n);
    draw(page, "Messages between nodes", "messages", MESSAGES, points, results, n);
    draw(page, "EPX's own memory", "MB per rank", MEMORY, points, results, n);
    page_plots_end(page);
}

static void write_table(struct page *page, const struct predict_point *points, const struct predict_result *results,
                        int n)
{
    static const char *const names[PREDICT_OPS] = {"dispatch", "combine"};

    page_section(page, "All numbers", "The page has them as JSON, too.");
    fputs(
        "<div class=\"wide\"><table id=\"all\"><thead><tr><th>mode</th><th>operation</th><th class=\"n\">ranks</th><th "
        "class=\"n\">nodes</th><th class=\"n\">tokens</th><th class=\"n\">median us</th><th class=\"n\">slowest us</th>"
        "<th class=\"n\">net MB</th><th class=\"n\">links MB</th><th class=\"n\">messages</th></tr></thead><tbody>\n",
        page->to);
    for (int i = 0; i < n * PREDICT_OPS; i++) {
        const struct predict_point *p = &points[i / PREDICT_OPS];
        const struct predict_op_result *o = &results[i / PREDICT_OPS].op[i % PREDICT_OPS];

        fprintf(page->to,
                "<tr><td>%s</td><td>%s</td><td class=\"n\">%d</td><td class=\"n\">%d</td><td class=\"n\">%d</td><td "
                "class=\"n\">%.1f</td><td class=\"n\">%.1f</td><td class=\"n\">%.2f</td><td class=\"n\">%.2f</td><td "
                "class=\"n\">%.0f</td></tr>\n",
                p->mode == EPX_LOW_LATENCY ? "ll" : "ht", names[i % PREDICT_OPS], p->ranks, predict_nodes(p), p->tokens,
                o->us_median, o->us_slowest, o->bytes / 1e6, o->link_bytes / 1e6, o->messages);
    }
    fputs("</tbody></table></div>\n", page->to);
}

int predict_page(const char *path, const struct predict_point *points, const struct predict_result *results, int n,
                 int argc, char **argv)
{
    struct page page;
    char *rows = NULL;
    size_t bytes = 0;
    FILE *to = open_memstream(&rows, &bytes);
    int bad;

    for (int i = 0; to && i < n; i++)
        predict_json(to, &points[i], &results[i]);
    if (!to || fclose(to) != 0 ||
        page_begin(&page, "epx predict", path, "epx predict",
                   "Dispatch and combine on a machine that is not here, predicted") != 0) {
        free(rows);
        return -1;
    }
    page_command(&page, argc, argv);
    page_plots_begin(&page);
    write_facts(&page, &points[0]);
    page_machine(&page, "Predicted on");
    page_plots_end(&page);
    write_plots(&page, points, results, n);
    write_table(&page, points, results, n);
    bad = page_end(&page, "epx predict", rows);
    free(rows);
    return bad;
}

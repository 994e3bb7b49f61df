/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plot, as SVG: one panel for each of time, bytes, messages and memory per rank, over the number of ranks, both
 * axes logarithmic; one line per mode and operation.
 */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "options.h"
#include "predict.h"

enum { WIDTH = 470, HEIGHT = 330, LEFT = 64, TOP = 40, RIGHT = 16, BOTTOM = 46, LINES = 4, PANELS = 4 };

static const struct {
    const char *label, *colour, *dash;
    int mode, op;
} lines[LINES] = {
    {"low latency, dispatch", "#1f6fb4", "", EPX_LOW_LATENCY, PREDICT_DISPATCH},
    {"low latency, combine", "#1f6fb4", "6 4", EPX_LOW_LATENCY, PREDICT_COMBINE},
    {"high throughput, dispatch", "#c4561a", "", EPX_HIGH_THROUGHPUT, PREDICT_DISPATCH},
    {"high throughput, combine", "#c4561a", "6 4", EPX_HIGH_THROUGHPUT, PREDICT_COMBINE},
};

static double value_time(const struct predict_result *r, int op)
{
    return r->op[op].us_median;
}

static double value_bytes(const struct predict_result *r, int op)
{
    return (r->op[op].bytes + r->op[op].link_bytes) / 1e6;
}

static double value_messages(const struct predict_result *r, int op)
{
    return r->op[op].messages;
}

static double value_memory(const struct predict_result *r, int op)
{
    return op == PREDICT_DISPATCH ? r->memory_bytes / 1e6 : 0;
}

static const struct panel {
    const char *title;
    double (*value)(const struct predict_result *r, int op);
} panels[PANELS] = {
    {"time, microseconds", value_time},
    {"MB to other GPUs, per rank and operation", value_bytes},
    {"messages between nodes, per rank and operation", value_messages},
    {"EPX's memory per rank, MB", value_memory},
};

struct plot {
    FILE *to;
    const struct predict_point *points;
    const struct predict_result *results;
    int n;
    double x0, x1, y0, y1; /* of the panel, logarithms of base 10 */
    int left, top;         /* of the panel */
};

static double at_x(const struct plot *p, double ranks)
{
    const double span = p->x1 > p->x0 ? p->x1 - p->x0 : 1;

    return p->left + LEFT + (log10(ranks) - p->x0) / span * (WIDTH - LEFT - RIGHT);
}

static double at_y(const struct plot *p, double value)
{
    return p->top + HEIGHT - BOTTOM - (log10(value) - p->y0) / (p->y1 - p->y0) * (HEIGHT - TOP - BOTTOM);
}

/* Whole decades around all values. Zero: there are none. */
static int find_range(struct plot *p, const struct panel *panel)
{
    double least = INFINITY, most = 0;

    for (int i = 0; i < p->n; i++) {
        for (int op = 0; op < PREDICT_OPS; op++) {
            const double v = panel->value(&p->results[i], op);
            if (v <= 0)
                continue;
            least = v < least ? v : least;
            most = v > most ? v : most;
        }
    }
    if (most <= 0)
        return 0;
    p->y0 = floor(log10(least));
    p->y1 = ceil(log10(most) + 1e-9);
    return 1;
}

static void draw_frame(const struct plot *p, const char *title)
{
    const double right = p->left + WIDTH - RIGHT, bottom = p->top + HEIGHT - BOTTOM;

    fprintf(p->to, "<text x=\"%d\" y=\"%d\" class=\"title\">%s</text>\n", p->left + LEFT, p->top + TOP - 14, title);
    for (int i = 0; p->y0 + i <= p->y1 + 0.5; i++) {
        const double d = p->y0 + i, y = at_y(p, pow(10, d));
        fprintf(p->to, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"grid\"/>\n", p->left + LEFT, y,
                right, y);
        fprintf(p->to, "<text x=\"%d\" y=\"%.1f\" class=\"tick\" text-anchor=\"end\">%.6g</text>\n", p->left + LEFT - 8,
                y + 4, pow(10, d));
    }
    for (int i = 0; i < p->n; i++) {
        const double x = at_x(p, p->points[i].ranks);
        if (p->points[i].mode != p->points[0].mode)
            break;
        fprintf(p->to, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"grid\"/>\n", x,
                at_y(p, pow(10, p->y1)), x, bottom);
        fprintf(p->to, "<text x=\"%.1f\" y=\"%.1f\" class=\"tick\" text-anchor=\"middle\">%d</text>\n", x, bottom + 18,
                p->points[i].ranks);
    }
    fprintf(p->to, "<text x=\"%.1f\" y=\"%.1f\" class=\"tick\" text-anchor=\"end\">ranks</text>\n", right, bottom + 36);
}

static void draw_line(const struct plot *p, const struct panel *panel, int line)
{
    char point = 'M';

    fprintf(p->to, "<path fill=\"none\" stroke=\"%s\" stroke-width=\"2\" stroke-dasharray=\"%s\" d=\"",
            lines[line].colour, lines[line].dash);
    for (int i = 0; i < p->n; i++) {
        const double v = panel->value(&p->results[i], lines[line].op);
        if (p->points[i].mode != lines[line].mode || v <= 0)
            continue;
        fprintf(p->to, "%c%.1f %.1f ", point, at_x(p, p->points[i].ranks), at_y(p, v));
        point = 'L';
    }
    fprintf(p->to, "\"/>\n");
    for (int i = 0; i < p->n; i++) {
        const double v = panel->value(&p->results[i], lines[line].op);
        if (p->points[i].mode == lines[line].mode && v > 0)
            fprintf(p->to, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", at_x(p, p->points[i].ranks),
                    at_y(p, v), lines[line].colour);
    }
}

static void draw_legend(const struct plot *p)
{
    for (int i = 0; i < LINES; i++) {
        const int x = 20 + i % LINES * 228, y = 2 * HEIGHT + 58;
        fprintf(p->to,
                "<line x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\" stroke=\"%s\" stroke-width=\"2\" "
                "stroke-dasharray=\"%s\"/>\n",
                x, y - 4, x + 34, y - 4, lines[i].colour, lines[i].dash);
        fprintf(p->to, "<text x=\"%d\" y=\"%d\" class=\"tick\">%s</text>\n", x + 42, y, lines[i].label);
    }
}

static void draw_all(struct plot *p)
{
    const struct predict_point *first = &p->points[0];

    fprintf(p->to,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\">\n"
            "<style>.grid{stroke:#ddd}.tick{font-size:12px;fill:#333}.title{font-size:13px;font-weight:bold}"
            ".head{font-size:15px}</style>\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            2 * WIDTH, 2 * HEIGHT + 76);
    fprintf(p->to, "<text x=\"20\" y=\"24\" class=\"head\">epx predict: %s, hidden %d, top-%d, dispatch %s</text>\n",
            first->machine.name, first->hidden, first->topk, first->dtype == PREDICT_FP8 ? "fp8" : "bf16");
    for (int i = 0; i < PANELS; i++) {
        p->left = i % 2 * WIDTH;
        p->top = 30 + i / 2 * HEIGHT;
        if (!find_range(p, &panels[i]))
            continue;
        draw_frame(p, panels[i].title);
        for (int line = 0; line < LINES; line++)
            draw_line(p, &panels[i], line);
    }
    draw_legend(p);
    fprintf(p->to, "</svg>\n");
}

int plot_write(const char *path, const struct predict_point *points, const struct predict_result *results, int n)
{
    struct plot p = {.to = fopen(path, "w"), .points = points, .results = results, .n = n, .x0 = INFINITY};
    int bad;

    for (int i = 0; i < n; i++) {
        p.x0 = fmin(p.x0, log10(points[i].ranks));
        p.x1 = fmax(p.x1, log10(points[i].ranks));
    }
    if (p.to && n > 0)
        draw_all(&p);
    bad = !p.to || ferror(p.to);
    if (p.to && fclose(p.to) != 0)
        bad = 1;
    return bad ? options_complain("epx predict", "cannot write '%s': %s", path, strerror(errno)) : 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Plots of a page, as SVG: lines over two axes, and horizontal bars. Every point and every bar has its numbers in a
 * <title>, which browsers show under the pointer, and in data-x and data-y. */
#include <math.h>
#include <string.h>

#include "page.h"

enum { WIDTH = 540, HEIGHT = 300, LEFT = 58, RIGHT = 14, TOP = 26, BOTTOM = 42, TICKS_MOST = 12 };

struct axis {
    double from, to; /* of logarithms where `log` */
    int log;
    int start, length; /* in the picture; length < 0: upwards */
};

struct plot_series *plot_series(struct plot *plot, const char *label, int colour, int dashed)
{
    struct plot_series *s;

    for (int i = 0; i < plot->count; i++)
        if (!strcmp(plot->series[i].label, label))
            return &plot->series[i];
    if (plot->count == PLOT_SERIES)
        return NULL;
    s = &plot->series[plot->count++];
    memset(s, 0, sizeof(*s));
    snprintf(s->label, sizeof(s->label), "%s", label);
    s->colour = colour;
    s->dashed = dashed;
    return s;
}

/* Sorted by x: lines go from left to right, in whatever order points were measured. */
void plot_add(struct plot_series *s, double x, double y)
{
    int at;

    if (!s || s->count == PLOT_POINTS || !(x > 0) || !(y > 0))
        return;
    for (at = s->count++; at > 0 && s->x[at - 1] > x; at--) {
        s->x[at] = s->x[at - 1];
        s->y[at] = s->y[at - 1];
    }
    s->x[at] = x;
    s->y[at] = y;
}

static double at(const struct axis *a, double value)
{
    const double v = a->log ? log10(value) : value, span = a->to > a->from ? a->to - a->from : 1;

    return a->start + (v - a->from) / span * a->length;
}

static void print_number(FILE *to, double v)
{
    const int round = fmod(v, 500) == 0; /* 5k, but 1024 tokens */

    if (v >= 1e6)
        fprintf(to, "%gM", v / 1e6);
    else if (v >= 1e4 || (v >= 1e3 && round))
        fprintf(to, "%gk", v / 1e3);
    else
        fprintf(to, "%g", v);
}

/* Leaves room around the values. */
static void fit_axis(struct axis *a, double least, double most)
{
    if (!a->log) {
        a->from = 0;
        a->to = most * 1.08;
        return;
    }
    a->from = log10(least) - 0.04;
    a->to = log10(most) + 0.06;
    if (a->to - a->from < 0.5) {
        const double middle = (a->to + a->from) / 2;
        a->from = middle - 0.25;
        a->to = middle + 0.25;
    }
}

static int fit(const struct plot *plot, struct axis *x, struct axis *y)
{
    double least[2] = {INFINITY, INFINITY}, most[2] = {0, 0};

    for (int i = 0; i < plot->count; i++) {
        const struct plot_series *s = &plot->series[i];
        for (int p = 0; p < s->count; p++) {
            least[0] = fmin(least[0], s->x[p]);
            most[0] = fmax(most[0], s->x[p]);
            least[1] = fmin(least[1], s->y[p]);
            most[1] = fmax(most[1], s->y[p]);
        }
    }
    *x = (struct axis){.log = 1, .start = LEFT, .length = WIDTH - LEFT - RIGHT};
    *y = (struct axis){.log = !plot->linear_y, .start = HEIGHT - BOTTOM, .length = -(HEIGHT - TOP - BOTTOM)};
    if (most[1] <= 0)
        return 0;
    fit_axis(x, least[0], most[0]);
    fit_axis(y, least[1], most[1]);
    return 1;
}

static void draw_tick(FILE *to, const struct axis *a, int vertical, double v)
{
    const double p = at(a, v);

    if (vertical)
        fprintf(to,
                "<line class=\"grid-line\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/><text x=\"%d\" y=\"%.1f\" "
                "text-anchor=\"end\">",
                LEFT, WIDTH - RIGHT, p, p, LEFT - 7, p + 4);
    else
        fprintf(to,
                "<line class=\"grid-line\" y1=\"%d\" y2=\"%d\" x1=\"%.1f\" x2=\"%.1f\"/><text x=\"%.1f\" y=\"%d\" "
                "text-anchor=\"middle\">",
                TOP, HEIGHT - BOTTOM, p, p, p, HEIGHT - BOTTOM + 17);
    print_number(to, v);
    fputs("</text>\n", to);
}

/* 1, 2 and 5 of every decade; only some of them where that would be too many, and more where it would be too few. */
static void draw_log_ticks(FILE *to, const struct axis *a, int vertical)
{
    static const struct {
        double multiple, decades; /* drawn where the axis has no more decades than these */
    } ticks[] = {{1, 99}, {1.5, 1}, {2, 2.4}, {3, 1}, {4, 0.6}, {5, 3.2}, {7, 1}};

    for (int d = (int)floor(a->from); d <= (int)ceil(a->to); d++) {
        for (size_t i = 0; i < sizeof(ticks) / sizeof(ticks[0]); i++) {
            const double v = ticks[i].multiple * pow(10, d);
            if (a->to - a->from > ticks[i].decades)
                continue;
            if (log10(v) >= a->from && log10(v) <= a->to)
                draw_tick(to, a, vertical, v);
        }
    }
}

/* A step of 1, 2 or 5 times a power of ten that gives four to eight ticks. */
static double linear_step(double most)
{
    const double raw = most / 5, power = pow(10, floor(log10(raw))), m = raw / power;

    return (m < 1.5 ? 1 : m < 3.5 ? 2 : m < 7.5 ? 5 : 10) * power;
}

static void draw_ticks(FILE *to, const struct axis *a, int vertical)
{
    if (a->log) {
        draw_log_ticks(to, a, vertical);
        return;
    }
    for (int i = 0; i < TICKS_MOST && i * linear_step(a->to) <= a->to; i++)
        draw_tick(to, a, vertical, i * linear_step(a->to));
}

/* Where there are few values, as of ranks, the ticks are these. */
static void draw_x_ticks(FILE *to, const struct plot *plot, const struct axis *x)
{
    double values[TICKS_MOST];
    int count = 0;

    for (int s = 0; s < plot->count && plot->ticks_at_points; s++) {
        for (int p = 0; p < plot->series[s].count && count < TICKS_MOST; p++) {
            int known = 0;

            for (int i = 0; i < count; i++)
                known |= values[i] == plot->series[s].x[p];
            if (!known)
                values[count++] = plot->series[s].x[p];
        }
    }
    if (count == 0 || count == TICKS_MOST)
        draw_ticks(to, x, 0);
    for (int i = 0; i < count && count < TICKS_MOST; i++)
        draw_tick(to, x, 0, values[i]);
}

static void draw_series(struct page *page, const struct plot *plot, const struct plot_series *s, const struct axis *x,
                        const struct axis *y)
{
    FILE *to = page->to;

    fprintf(to, "<path class=\"s s%d%s\" d=\"", s->colour, s->dashed ? " dash" : "");
    for (int i = 0; i < s->count; i++)
        fprintf(to, "%c%.1f %.1f", i ? 'L' : 'M', at(x, s->x[i]), at(y, s->y[i]));
    fputs("\"/>\n", to);
    for (int i = 0; i < s->count; i++) {
        fprintf(to, "<circle class=\"s s%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"%s\" data-x=\"%.9g\" data-y=\"%.6g\"><title>",
                s->colour, at(x, s->x[i]), at(y, s->y[i]), s->dashed ? "2.4" : "3.4", s->x[i], s->y[i]);
        page_text(page, s->label);
        fprintf(to, ": %.6g at %.9g (", s->y[i], s->x[i]);
        page_text(page, plot->x_label);
        fputs(")</title></circle>\n", to);
    }
}

static void draw_legend(struct page *page, const struct plot *plot)
{
    fputs("<ul class=\"legend\">", page->to);
    for (int i = 0; i < plot->count; i++) {
        const struct plot_series *s = &plot->series[i];
        if (!s->count)
            continue;
        fprintf(page->to,
                "<li><svg viewBox=\"0 0 26 10\"><line class=\"s s%d%s\" x1=\"0\" x2=\"26\" y1=\"5\" y2=\"5\"/></svg>",
                s->colour, s->dashed ? " dash" : "");
        page_text(page, s->label);
        fputs("</li>", page->to);
    }
    fputs("</ul>", page->to);
}

void page_plots_begin(struct page *page)
{
    fputs("<div class=\"grid\">\n", page->to);
}

void page_plots_end(struct page *page)
{
    fputs("</div>\n", page->to);
}

static void begin_figure(struct page *page, const char *kind, const char *title)
{
    fprintf(page->to, "<figure class=\"%s\" id=\"plot-%d\"><h3>", kind, ++page->plots);
    page_text(page, title);
    fputs("</h3>\n", page->to);
}

void page_plot(struct page *page, struct plot *plot)
{
    struct axis x, y;

    if (!fit(plot, &x, &y))
        return;
    begin_figure(page, "plot", plot->title);
    fprintf(page->to, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH, HEIGHT);
    page_text(page, plot->title);
    fputs("\">\n", page->to);
    draw_x_ticks(page->to, plot, &x);
    draw_ticks(page->to, &y, 1);
    for (int i = 0; i < plot->count; i++)
        if (plot->series[i].count)
            draw_series(page, plot, &plot->series[i], &x, &y);
    fprintf(page->to, "<text class=\"ends\" x=\"%d\" y=\"%d\" text-anchor=\"end\">", WIDTH - RIGHT, HEIGHT - 6);
    page_text(page, plot->x_label);
    fprintf(page->to, "</text><text class=\"ends\" x=\"%d\" y=\"%d\">", 2, 14);
    page_text(page, plot->y_label);
    fputs("</text>\n</svg>\n", page->to);
    draw_legend(page, plot);
    fputs("</figure>\n", page->to);
}

/* ---- Bars ------------------------------------------------------------ */

enum { BAR_TOP = 6, BAR_MARK = 16, LETTER = 7, BAR_LEFT = 178, BAR_RIGHT = 74, BAR_STEP = 25, BAR_THICK = 15 };

struct bar *bars_add(struct bars *bars, const char *label)
{
    struct bar *bar;

    if (bars->count == BARS)
        return NULL;
    bar = &bars->bars[bars->count++];
    memset(bar, 0, sizeof(*bar));
    snprintf(bar->label, sizeof(bar->label), "%s", label);
    return bar;
}

void bar_part(struct bar *bar, const char *label, double value)
{
    if (!bar || bar->count == BAR_PARTS || !(value > 0))
        return;
    snprintf(bar->parts[bar->count].label, sizeof(bar->parts[0].label), "%s", label);
    bar->parts[bar->count++].value = value;
}

static double bar_sum(const struct bar *bar)
{
    double sum = 0;

    for (int i = 0; i < bar->count; i++)
        sum += bar->parts[i].value;
    return sum;
}

/* Labels of parts get colours in the order in which they first appear. */
static int part_colour(const struct bars *bars, const char *label, char seen[][40], int *count)
{
    int i = 0;

    if (!bars->by_part)
        return 0;
    while (i < *count && strcmp(seen[i], label) != 0)
        i++;
    if (i == *count && *count < BAR_PARTS)
        snprintf(seen[(*count)++], 40, "%s", label);
    return i;
}

/* Eight colours, then the same ones paler. */
static void print_colour(FILE *to, int colour)
{
    fprintf(to, "s s%d%s", colour % 8, colour >= 8 ? " pale" : "");
}

/* The name of a part, where it has room. */
static void draw_name(struct page *page, const struct bar_part *p, int colour, double x, double y, double width)
{
    if (width < LETTER * (double)strlen(p->label) + 6)
        return;
    fprintf(page->to, "<text class=\"%s\" x=\"%.1f\" y=\"%.1f\">", colour >= 8 ? "ends" : "in", x + 4,
            y + BAR_THICK - 4);
    page_text(page, p->label);
    fputs("</text>\n", page->to);
}

static int decimals(double value, const char *unit)
{
    if (value < 0.1)
        return unit[0] == '%' ? 2 : 3;
    return value >= 10 ? 0 : unit[0] == 'x' || value < 1 ? 2 : 1;
}

static void draw_bar(struct page *page, const struct bars *bars, const struct bar *bar, double y, double scale,
                     char seen[][40], int *count)
{
    FILE *to = page->to;
    double x = BAR_LEFT;

    fprintf(to, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">", BAR_LEFT - 8, y + BAR_THICK - 3);
    page_text(page, bar->label);
    fputs("</text>\n", to);
    for (int i = 0; i < bar->count; i++) {
        const struct bar_part *p = &bar->parts[i];
        const int c = part_colour(bars, p->label, seen, count);

        fputs("<rect class=\"", to);
        print_colour(to, c);
        fprintf(to, "\" x=\"%.1f\" y=\"%.1f\" width=\"%.2f\" height=\"%d\" data-y=\"%.6g\"><title>", x, y,
                p->value * scale > 1.5 ? p->value * scale - 1 : p->value * scale, BAR_THICK, p->value);
        page_text(page, bar->label);
        fputs(", ", to);
        page_text(page, p->label);
        fprintf(to, ": %.4g %s</title></rect>\n", p->value, bars->unit);
        if (bars->by_part)
            draw_name(page, p, c, x, y, p->value * scale);
        x += p->value * scale;
    }
    fprintf(to, "<text class=\"ends\" x=\"%.1f\" y=\"%.1f\">%.*f %s</text>\n", x + 5, y + BAR_THICK - 3,
            decimals(bar_sum(bar), bars->unit), bar_sum(bar), bars->unit);
}

static void draw_part_legend(struct page *page, char seen[][40], int count)
{
    fputs("<ul class=\"legend\">", page->to);
    for (int i = 0; i < count; i++) {
        fputs("<li><svg viewBox=\"0 0 26 10\"><rect class=\"", page->to);
        print_colour(page->to, i);
        fputs("\" width=\"26\" height=\"10\"/></svg>", page->to);
        page_text(page, seen[i]);
        fputs("</li>", page->to);
    }
    fputs("</ul>", page->to);
}

void page_bars(struct page *page, const struct bars *bars)
{
    char seen[BAR_PARTS][40];
    const int top = BAR_TOP + (bars->mark > 0 ? BAR_MARK : 0), height = top + bars->count * BAR_STEP + 4;
    double most = bars->mark, scale;
    int count = 0;

    for (int i = 0; i < bars->count; i++)
        most = fmax(most, bar_sum(&bars->bars[i]));
    if (most <= 0 || bars->count == 0)
        return;
    scale = (WIDTH - BAR_LEFT - BAR_RIGHT) / most;
    begin_figure(page, "bars", bars->title);
    fprintf(page->to, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH, height);
    page_text(page, bars->title);
    fputs("\">\n", page->to);
    for (int i = 0; i < bars->count; i++)
        draw_bar(page, bars, &bars->bars[i], top + i * BAR_STEP, scale, seen, &count);
    if (bars->mark > 0)
        fprintf(page->to,
                "<line class=\"mark\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/><text class=\"ends\" x=\"%.1f\" "
                "y=\"14\" text-anchor=\"middle\">%g %s</text>\n",
                BAR_LEFT + bars->mark * scale, BAR_LEFT + bars->mark * scale, BAR_MARK + 2, height - 2,
                BAR_LEFT + bars->mark * scale, bars->mark, bars->unit);
    fputs("</svg>\n", page->to);
    if (bars->by_part)
        draw_part_legend(page, seen, count);
    fputs("</figure>\n", page->to);
}

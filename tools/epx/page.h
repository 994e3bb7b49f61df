/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A report as one HTML file that needs nothing else: no network, no script, no font. Plots are SVG written here: a
 * library for plots would be many times the size of the numbers and run in the reader's browser, where SVG is drawn by
 * every browser, printed as lines, searched, and follows the page's colours (dark and light) by style sheets.
 *
 *      page.c        the file, its style, tables, what the machine is
 *      page_plot.c   lines and bars
 */
#ifndef EPX_TOOLS_PAGE_H
#define EPX_TOOLS_PAGE_H

#include <stdio.h>

struct page {
    FILE *to;
    int plots;
    int sections;
    char path[512];
};

/* Before anything is measured for it: can a file be written there? It is left as it was. 0, or -1 after a message of
 * `program`. */
int page_check(const char *program, const char *path);
/* 0, or -1 after a message of `program`. */
int page_begin(struct page *page, const char *program, const char *path, const char *title, const char *subtitle);
/* Writes the numbers, which are JSON objects, one per line, and closes the file. 0, or -1 after a message. */
int page_end(struct page *page, const char *program, const char *rows);

void page_section(struct page *page, const char *title, const char *text);
/* Escaped text. */
void page_text(struct page *page, const char *text);
/* The command line, as it can be pasted into a shell. */
void page_command(struct page *page, int argc, char **argv);
/* Rows "name, value" between these two. */
void page_facts_begin(struct page *page, const char *title);
void page_fact(struct page *page, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));
void page_facts_end(struct page *page);
/* CPU, cores, memory, kernel, date. */
void page_machine(struct page *page, const char *title);

/* ---- Plots */

enum { PLOT_SERIES = 12, PLOT_POINTS = 64 };

struct plot_series {
    char label[64];
    int colour; /* 0..7 */
    int dashed;
    int count;
    double x[PLOT_POINTS], y[PLOT_POINTS];
};

struct plot {
    const char *title, *x_label, *y_label;
    int linear_y;        /* from 0; else both axes are logarithmic */
    int ticks_at_points; /* of the x axis */
    int count;
    struct plot_series series[PLOT_SERIES];
};

/* The series of that label, which is made where there is none; NULL: there are too many. */
struct plot_series *plot_series(struct plot *plot, const char *label, int colour, int dashed);
void plot_add(struct plot_series *series, double x, double y);
/* Draws nothing when there is no point. */
void page_plots_begin(struct page *page);
void page_plot(struct page *page, struct plot *plot);
void page_plots_end(struct page *page);

enum { BAR_PARTS = 16, BARS = 24 };

/* A horizontal bar, of one part or several. */
struct bar {
    char label[64];
    int count;
    struct bar_part {
        char label[40];
        double value;
    } parts[BAR_PARTS];
};

struct bars {
    const char *title, *unit;
    double mark; /* a line here; 0 = none */
    int by_part; /* parts that have the same label have the same colour, and there is a legend */
    int count;
    struct bar bars[BARS];
};

struct bar *bars_add(struct bars *bars, const char *label);
void bar_part(struct bar *bar, const char *label, double value);
void page_bars(struct page *page, const struct bars *bars);

#endif

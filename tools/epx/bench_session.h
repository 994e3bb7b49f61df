/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A session of `epx bench` is one run, or several: `epx bench sweep`, --over-tokens, --over-ranks, or what a file of
 * numbers had (--compare). Its rows are JSON lines, from which the page (--report) and the comparison are made.
 *
 *      bench_session.c   which runs there are, and what is done with their rows
 *      bench_page.c      the page
 *      bench_compare.c   what has changed beyond noise
 */
#ifndef EPX_TOOLS_BENCH_SESSION_H
#define EPX_TOOLS_BENCH_SESSION_H

#include "bench.h"
#include "numbers.h"

/* One run; its rows go to `rows` as JSON lines. quiet: no table. An exit code. */
int bench_run(const struct bench_options *options, FILE *rows, int quiet);
/* `epx bench` but for ring and workers. An exit code. */
int bench_session(int argc, char **argv);

/* 0, or -1 after a message. argv: the command line without the program's name. */
int bench_page_write(const char *path, const char *rows, int argc, char **argv);

/* Prints what has changed; an exit code. */
int bench_compare(const char *old_path, const struct numbers *new_rows);
/* The command line that measures a row again: words of `argv`, at most `most`, in `text`. Their number. */
int bench_row_command(const struct numbers_row *row, char **argv, int most, char *text, size_t bytes);

#endif

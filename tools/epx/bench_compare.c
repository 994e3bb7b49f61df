/* SPDX-License-Identifier: Apache-2.0 */
/*
 * --compare: rows of an earlier run beside those of this one. A row's noise is the span of the medians of five parts of
 * its run (us_low to us_high). A change counts when the spans of both runs lie apart and p50 differs by 3 % or more;
 * rows without spans (--timing events) have to differ by 10 %.
 */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "bench_session.h"
#include "commands.h"
#include "options.h"

#define LEAST_CHANGE 0.03
#define LEAST_CHANGE_WITHOUT_SPAN 0.10

static const char *const same_text[] = {"op", "mode", "dtype", "routing", "layout", "device", "net", "timing"};
static const char *const same_number[] = {"ranks",  "nodes",        "tokens",  "hidden", "topk",  "experts",
                                          "logfmt", "plain_memory", "threads", "staged", "agents"};

static int is_same(const struct numbers_row *a, const struct numbers_row *b)
{
    for (size_t i = 0; i < sizeof(same_text) / sizeof(same_text[0]); i++)
        if (strcmp(row_text(a, same_text[i]), row_text(b, same_text[i])) != 0)
            return 0;
    for (size_t i = 0; i < sizeof(same_number) / sizeof(same_number[0]); i++)
        if (row_number(a, same_number[i]) != row_number(b, same_number[i]))
            return 0;
    return 1;
}

static int is_beyond_noise(const struct numbers_row *old, const struct numbers_row *now)
{
    const double before = row_number(old, "us_p50"), after = row_number(now, "us_p50");
    const double change = fabs(after / before - 1);

    if (row_number(old, "us_high") <= 0 || row_number(now, "us_high") <= 0)
        return change >= LEAST_CHANGE_WITHOUT_SPAN;
    return change >= LEAST_CHANGE && (row_number(old, "us_high") < row_number(now, "us_low") ||
                                      row_number(now, "us_high") < row_number(old, "us_low"));
}

/* 1 if it changed. */
static int print_pair(const struct numbers_row *old, const struct numbers_row *now)
{
    const double before = row_number(old, "us_p50"), after = row_number(now, "us_p50");
    const int changed = is_beyond_noise(old, now);

    printf("%-4s %-10s %6g %8g %10.1f us %10.1f us %+8.1f %%  %s\n", row_text(now, "mode"), row_text(now, "op"),
           row_number(now, "ranks"), row_number(now, "tokens"), before, after, 100 * (after / before - 1),
           !changed         ? "within noise"
           : after > before ? "SLOWER"
                            : "faster");
    return changed;
}

static int compare_rows(const struct numbers *old, const struct numbers *now)
{
    int compared = 0, changed = 0;

    printf("%-4s %-10s %6s %8s %13s %13s %10s\n", "mode", "operation", "ranks", "tokens", "old p50", "new p50",
           "change");
    for (int i = 0; i < now->count; i++) {
        for (int j = 0; j < old->count; j++) {
            if (!is_same(&now->rows[i], &old->rows[j]) || row_number(&old->rows[j], "us_p50") <= 0 ||
                row_number(&now->rows[i], "us_p50") <= 0)
                continue;
            changed += print_pair(&old->rows[j], &now->rows[i]);
            compared++;
            break;
        }
    }
    printf("\n%d rows compared, %d changed beyond noise%s\n", compared, changed,
           compared == 0 ? ": no row of both has the same configuration" : "");
    fflush(stdout);
    return compared > 0 ? EXIT_OK : EXIT_FAILED;
}

int bench_compare(const char *old_path, const struct numbers *now)
{
    struct numbers old;
    int code;

    if (numbers_read(&old, old_path, "op") != 0) {
        options_complain("epx bench", "cannot read '%s': %s", old_path, strerror(errno));
        return EXIT_USAGE;
    }
    code = compare_rows(&old, now);
    numbers_free(&old);
    return code;
}

/* ---- Measuring a row again ------------------------------------------------------------ */

struct words {
    char **argv;
    int count, most;
    char *text;
    size_t bytes, used;
};

static void add_word(struct words *w, const char *word)
{
    const size_t n = strlen(word) + 1;

    if (w->count + 1 >= w->most || w->used + n > w->bytes)
        return;
    w->argv[w->count++] = memcpy(w->text + w->used, word, n);
    w->argv[w->count] = NULL;
    w->used += n;
}

static void add_number(struct words *w, const char *option, double value)
{
    char text[32];

    snprintf(text, sizeof(text), "%.0f", value);
    add_word(w, option);
    add_word(w, text);
}

static void add_flags(struct words *w, const struct numbers_row *row, int layer)
{
    if (row_number(row, "logfmt") > 0)
        add_word(w, "--logfmt");
    if (row_number(row, "plain_memory") > 0 && !layer)
        add_word(w, "--plain-memory");
    if (row_number(row, "threads") > 0)
        add_word(w, "--threads");
    if (row_number(row, "staged") > 0)
        add_word(w, "--staged");
    if (row_number(row, "agents") > 0)
        add_number(w, "--agents", row_number(row, "agents"));
    if (strcmp(row_text(row, "timing"), "events") == 0) {
        add_word(w, "--timing");
        add_word(w, "events");
    }
}

int bench_row_command(const struct numbers_row *row, char **argv, int most, char *text, size_t bytes)
{
    static const char *const numbers[] = {"ranks", "nodes", "tokens", "hidden", "topk", "experts", "iters", "seed"};
    static const char *const texts[] = {"dtype", "routing", "layout", "device", "net"};
    struct words w = {.argv = argv, .most = most, .text = text, .bytes = bytes};
    const int layer = strcmp(row_text(row, "op"), "layer") == 0;
    char option[32];

    add_word(&w, "bench");
    if (layer)
        add_word(&w, "layer");
    add_word(&w, row_text(row, "mode"));
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        snprintf(option, sizeof(option), "--%s", numbers[i]);
        add_number(&w, option, row_number(row, numbers[i]));
    }
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        if (strcmp(texts[i], "net") == 0 && row_number(row, "nodes") < 2)
            continue;
        snprintf(option, sizeof(option), "--%s", texts[i]);
        add_word(&w, option);
        add_word(&w, row_text(row, texts[i]));
    }
    add_flags(&w, row, layer);
    return w.count;
}

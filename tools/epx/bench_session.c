/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_session.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "options.h"
#include "page.h"
#include "progress.h"

enum { MOST_WORDS = 96, TEXT_BYTES = 4096, MOST_RUNS = 128 };

static const char *const program = "epx bench";

/* A run's command line; --over-tokens and --over-ranks are given to all runs, and mean nothing to one. */
struct run {
    char tokens[16], ranks[16];
    int argc;
    char *argv[MOST_WORDS];
    char text[TEXT_BYTES];
    size_t used;
};

/* "layer ll": two words; "ll": one. */
struct mode_words {
    const char *first, *second;
};

struct session {
    struct bench_options options; /* of the command line as a whole */
    struct run *runs;
    int nruns;
    char *rows;
    size_t row_bytes;
    FILE *to;
};

static void add_word(struct run *run, const char *word)
{
    const size_t n = strlen(word) + 1;

    if (run->argc + 1 >= MOST_WORDS || run->used + n > TEXT_BYTES)
        return;
    run->argv[run->argc++] = memcpy(run->text + run->used, word, n);
    run->argv[run->argc] = NULL;
    run->used += n;
}

static struct run *add_run(struct session *s)
{
    if (!s->runs)
        s->runs = calloc(MOST_RUNS, sizeof(*s->runs));
    return s->runs && s->nruns < MOST_RUNS ? &s->runs[s->nruns++] : NULL;
}

/* ---- Which runs ------------------------------------------------------------ */

/* The caller's words in another mode. Layers are not compared with baselines. */
static void add_words(struct run *run, const struct mode_words *mode, int argc, char **argv, int first)
{
    add_word(run, "bench");
    add_word(run, mode->first);
    if (mode->second)
        add_word(run, mode->second);
    for (int i = first; i < argc; i++) {
        if (mode->second && strcmp(argv[i], "--vs") == 0)
            i++;
        else if (!mode->second || strncmp(argv[i], "--vs=", 5) != 0)
            add_word(run, argv[i]);
    }
}

/* Are there such tokens and ranks in this mode already? */
static int is_planned(const struct session *s, const struct mode_words *mode, const char *tokens, const char *ranks)
{
    for (int i = 0; i < s->nruns; i++) {
        const struct run *run = &s->runs[i];

        if (strcmp(run->argv[1], mode->first) == 0 && (!mode->second || strcmp(run->argv[2], mode->second) == 0) &&
            strcmp(run->tokens, tokens) == 0 && strcmp(run->ranks, ranks) == 0)
            return 1;
    }
    return 0;
}

static int add_point(struct session *s, const struct mode_words *mode, int argc, char **argv, int first, int tokens,
                     int ranks)
{
    struct run *run;
    char tokens_text[16], ranks_text[16];

    snprintf(tokens_text, sizeof(tokens_text), "%d", tokens);
    snprintf(ranks_text, sizeof(ranks_text), "%d", ranks);
    if (is_planned(s, mode, tokens_text, ranks_text))
        return 0;
    if (!(run = add_run(s)))
        return options_complain(program, "too many runs; expected at most %d", MOST_RUNS);
    add_words(run, mode, argc, argv, first);
    memcpy(run->tokens, tokens_text, sizeof(run->tokens));
    memcpy(run->ranks, ranks_text, sizeof(run->ranks));
    add_word(run, "--tokens");
    add_word(run, tokens_text);
    add_word(run, "--ranks");
    add_word(run, ranks_text);
    if (s->options.sweep && !s->options.iters_given) {
        add_word(run, "--iters");
        add_word(run, "20");
    }
    return 0;
}

/* Over tokens with the ranks of the command line, then over ranks with its tokens. */
static int add_mode(struct session *s, const struct mode_words *mode, int argc, char **argv, int first)
{
    const struct bench_options *o = &s->options;
    const int ll = strcmp(mode->second ? mode->second : mode->first, "ll") == 0;
    const int tokens = o->tokens_given ? o->config.tokens : ll ? 128 : 256, ranks = o->config.ranks;
    int bad = 0;

    for (int i = 0; i < o->over_tokens.count && !bad; i++)
        bad = add_point(s, mode, argc, argv, first, o->over_tokens.values[i] * (o->sweep && !ll ? 8 : 1), ranks);
    for (int i = 0; i < o->over_ranks.count && !bad; i++)
        bad = add_point(s, mode, argc, argv, first, tokens, o->over_ranks.values[i]);
    return bad;
}

/* What a file of numbers has: each configuration once. */
static int add_old(struct session *s, const char *path)
{
    struct numbers old;

    if (numbers_read(&old, path, "op") != 0)
        return options_complain(program, "cannot read '%s': %s", path, strerror(errno));
    for (int i = 0; i < old.count; i++) {
        struct run run = {0}, *again;
        int known = 0;

        run.argc = bench_row_command(&old.rows[i], run.argv, MOST_WORDS, run.text, TEXT_BYTES);
        for (int j = 0; j < s->nruns && !known; j++) {
            known = s->runs[j].argc == run.argc;
            for (int w = 0; w < run.argc && known; w++)
                known = strcmp(s->runs[j].argv[w], run.argv[w]) == 0;
        }
        if (known || !(again = add_run(s)))
            continue;
        again->argc = bench_row_command(&old.rows[i], again->argv, MOST_WORDS, again->text, TEXT_BYTES);
    }
    numbers_free(&old);
    return s->nruns > 0 ? 0 : options_complain(program, "'%s' has no rows of epx bench --json", path);
}

static int plan(struct session *s, int argc, char **argv)
{
    static const struct mode_words all[] = {{"layer", "ht"}, {"layer", "ll"}, {"ll", NULL}, {"ht", NULL}};
    const struct bench_options *o = &s->options;
    const struct mode_words one = {o->config.layer ? "layer" : argv[1],
                                   o->config.layer ? bench_mode_name(&o->config) : NULL};
    int bad = 0;

    if (o->compare && !o->config.mode)
        return add_old(s, o->compare);
    if (o->sweep) {
        for (int i = 0; i < 4 && !bad; i++)
            bad = add_mode(s, &all[i], argc, argv, 2);
        return bad;
    }
    if (o->over_tokens.count && !o->over_ranks.count && bench_option_given(o, "tokens"))
        return options_complain(program, "--tokens has no meaning with --over-tokens alone");
    if (o->over_ranks.count && !o->over_tokens.count && bench_option_given(o, "ranks"))
        return options_complain(program, "--ranks has no meaning with --over-ranks alone");
    if (o->over_tokens.count || o->over_ranks.count)
        bad = add_mode(s, &one, argc, argv, o->config.layer && argc > 2 && argv[2][0] != '-' ? 3 : 2);
    return bad;
}

/* ---- Running ------------------------------------------------------------ */

static void print_new_rows(const struct session *s, size_t from, int first)
{
    struct numbers n;

    if (first)
        printf("%-4s %-10s %6s %8s %11s %11s %11s %14s %12s %9s\n", "mode", "operation", "ranks", "tokens", "p50",
               "p99", "host", "logical", "wire", "of bound");
    if (numbers_parse(&n, s->rows + from, "op") != 0)
        return;
    for (int i = 0; i < n.count; i++) {
        const struct numbers_row *r = &n.rows[i];

        printf("%-4s %-10s %6g %8g %8.0f us %8.0f us %8.0f us", row_text(r, "mode"), row_text(r, "op"),
               row_number(r, "ranks"), row_number(r, "tokens"), row_number(r, "us_p50"), row_number(r, "us_p99"),
               row_number(r, "host_us"));
        if (row_number(r, "wire_GBps") > 0)
            printf(" %9.1f GB/s %7.1f GB/s", row_number(r, "logical_GBps"), row_number(r, "wire_GBps"));
        if (row_number(r, "of_bound") > 0)
            printf(" %7.0f %%%s", 100 * row_number(r, "of_bound"),
                   row_number(r, "of_bound") > 1 ? ": a reference, no bound" : "");
        printf("\n");
    }
    fflush(stdout);
    numbers_free(&n);
}

static int run_one(struct session *s, int i)
{
    struct run *run = &s->runs[i];
    struct bench_options options;
    size_t from;
    int code;

    fflush(s->to);
    from = s->row_bytes;
    if (bench_options_parse(&options, run->argc, run->argv) != 0)
        return EXIT_USAGE;
    progress_show(program, 100.0 * i / s->nruns, "run %d of %d: %s, %d ranks, %d tokens", i + 1, s->nruns,
                  options.config.layer ? "layer" : bench_mode_name(&options.config), options.config.ranks,
                  options.config.tokens);
    code = bench_run(&options, s->to, 1);
    fflush(s->to);
    if (code != EXIT_OK)
        return code;
    if (s->options.json) {
        fwrite(s->rows + from, 1, s->row_bytes - from, stdout);
        fflush(stdout);
    } else if (!s->options.compare) {
        print_new_rows(s, from, i == 0);
    }
    return EXIT_OK;
}

/* Before the first one is measured. */
static int check_runs(const struct session *s)
{
    struct bench_options options;

    for (int i = 0; i < s->nruns; i++)
        if (bench_options_parse(&options, s->runs[i].argc, s->runs[i].argv) != 0)
            return -1;
    return 0;
}

static int run_all(struct session *s)
{
    int code = EXIT_OK;

    if (s->nruns == 0)
        return bench_run(&s->options, s->to, s->options.compare != NULL && !s->options.json);
    if (check_runs(s) != 0)
        return EXIT_USAGE;
    for (int i = 0; i < s->nruns && code == EXIT_OK; i++)
        code = run_one(s, i);
    return code;
}

/* The rows are complete: the page, and the comparison. */
static int finish(struct session *s, int argc, char **argv)
{
    struct numbers rows;
    int code = EXIT_OK;

    if (s->options.joined && s->options.rank != 0)
        return EXIT_OK;
    if (s->options.report && bench_page_write(s->options.report, s->rows, argc, argv) != 0)
        return EXIT_FAILED;
    if (s->options.report && !s->options.json)
        printf("\nThe report is in %s\n", s->options.report);
    if (s->options.compare) {
        if (s->options.newer ? numbers_read(&rows, s->options.newer, "op") : numbers_parse(&rows, s->rows, "op")) {
            options_complain(program, "cannot read '%s': %s", s->options.newer ? s->options.newer : "the rows",
                             strerror(errno));
            return EXIT_USAGE;
        }
        code = bench_compare(s->options.compare, &rows);
        numbers_free(&rows);
    }
    return code;
}

/* Of ranks that a launcher has started the first one writes. */
static int writes_page(const struct bench_options *o)
{
    return o->report && !(o->joined && o->rank != 0);
}

int bench_session(int argc, char **argv)
{
    struct session s = {.nruns = 0};
    int code, parsed = bench_options_parse(&s.options, argc, argv);

    if (parsed != 0)
        return parsed > 0 ? EXIT_OK : EXIT_USAGE;
    if (writes_page(&s.options) && page_check(program, s.options.report) != 0)
        return EXIT_USAGE;
    s.to = open_memstream(&s.rows, &s.row_bytes);
    if (!s.to)
        return EXIT_FAILED;
    code = s.options.newer ? EXIT_OK : plan(&s, argc, argv) != 0 ? EXIT_USAGE : run_all(&s);
    fflush(s.to);
    if (code == EXIT_OK)
        code = finish(&s, argc, argv);
    fclose(s.to);
    free(s.rows);
    free(s.runs);
    return code;
}

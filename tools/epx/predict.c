/* SPDX-License-Identifier: Apache-2.0 */
/* `epx predict`: what dispatch and combine will take on machines that are not here. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "options.h"
#include "page.h"
#include "predict.h"
#include "progress.h"
#include "routing.h"

enum { MAX_POINTS = 64, LL_TOKENS = 128, HT_TOKENS = 4096, FEW_EXPERTS = 256, DEFAULT_ITERS = 3 };

struct options {
    struct predict_point point;
    const char *machine, *svg, *report, *show;
    int32_t ranks[MAX_POINTS], nranks;
    int32_t sms, json, machines, known, calibration;
    int32_t modes;
    uint64_t given;
};

#define FIELD(name) offsetof(struct options, name)
#define INT(title, meta, field, least, most, text, about)                                                          \
    {                                                                                                              \
        .name = title, .kind = OPTION_INT, .value = meta, .help = about, .fallback = text, .offset = FIELD(field), \
        .low = least, .high = most                                                                                 \
    }
#define FLAG(title, field, about)                                                 \
    {                                                                             \
        .name = title, .kind = OPTION_FLAG, .help = about, .offset = FIELD(field) \
    }

static int set_ranks(void *target, const char *text);

static const struct option_choice modes[] = {
    {"ll", EPX_LOW_LATENCY}, {"ht", EPX_HIGH_THROUGHPUT}, {"both", EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT}, {NULL, 0}};
static const struct option_choice dtypes[] = {{"bf16", PREDICT_BF16}, {"fp8", PREDICT_FP8}, {NULL, 0}};

static const struct option_spec specs[] = {
    {.kind = OPTION_TITLE, .help = "What is predicted:"},
    {.name = "machine",
     .kind = OPTION_TEXT,
     .value = "NAME",
     .help = "a built-in machine (--machines lists them), or a machine file",
     .fallback = "h800-cx7",
     .offset = FIELD(machine)},
    {.name = "mode",
     .kind = OPTION_CHOICE,
     .value = "MODE",
     .help = "ll, ht or both",
     .fallback = "both",
     .offset = FIELD(modes),
     .choices = modes},
    {.name = "ranks",
     .letter = 'n',
     .kind = OPTION_CALL,
     .value = "LIST",
     .help = "numbers of ranks, separated by commas",
     .fallback = "8,16,32,64,128,256",
     .call = set_ranks},
    INT("tokens", "N", point.tokens, 1, 1 << 16, "ll 128, ht 4096", "tokens per rank"),
    INT("hidden", "N", point.hidden, 8, 1 << 16, "7168", "elements of a token"),
    INT("topk", "K", point.topk, 1, EPX_MAX_TOPK, "8", "experts per token"),
    INT("experts", "N", point.experts, 1, 1 << 16, "256, or one per rank", "experts of all ranks together"),
    {.name = "dtype",
     .kind = OPTION_CHOICE,
     .value = "TYPE",
     .help = "rows of dispatch: bf16 or fp8; ll casts to fp8, ht is given it",
     .fallback = "fp8",
     .offset = FIELD(point.dtype),
     .choices = dtypes},
    {.name = "routing",
     .kind = OPTION_CHOICE,
     .value = "NAME",
     .help = ROUTING_HELP,
     .fallback = "uniform",
     .offset = FIELD(point.routing),
     .choices = routing_choices},
    INT("groups", "N", point.groups, 1, 4096, "8", "with --routing groups: how many there are"),
    INT("topk-groups", "N", point.topk_groups, 1, 32, "4", "with --routing groups: how many a token draws"),
    INT("sms", "N", sms, 1, 1024, "the machine's", "SMs that one rank's operations use"),
    {.name = "seed",
     .kind = OPTION_U64,
     .value = "N",
     .help = "seed of routing and data",
     .fallback = "1",
     .offset = FIELD(point.seed),
     .high = INT64_MAX},
    {.kind = OPTION_TITLE, .help = "Known figures:"},
    FLAG("calibration", calibration, "the H200's measured figures, predicted beside measured"),
    FLAG("published", known, "other libraries' published figures, predicted beside published"),
    {.kind = OPTION_TITLE, .help = "How it is run and reported:"},
    INT("iters", "N", point.iters, 1, 100, "3", "pairs of dispatch and combine in the series"),
    INT("agents", "N", point.agents, PREDICT_FEW_AGENTS, 1024, "automatic",
        "agents per rank that are simulated; each represents several"),
    {.name = "svg", .kind = OPTION_TEXT, .value = "FILE", .help = "write a plot", .offset = FIELD(svg)},
    {.name = "report",
     .kind = OPTION_TEXT,
     .value = "FILE",
     .help = "write a page with plots and all numbers, which any browser opens",
     .offset = FIELD(report)},
    FLAG("json", json, "one JSON object per line instead of a table"),
    FLAG("machines", machines, "list the built-in machines"),
    {.name = "show",
     .kind = OPTION_TEXT,
     .value = "NAME",
     .help = "print a built-in machine's file",
     .offset = FIELD(show)},
};

static const struct option_table table = {
    .program = "epx predict",
    .usage = "epx predict [options]",
    .about = "Predicts dispatch and combine on a machine that is described by a file: the real kernels, proxies and\n"
             "algorithms run on a virtual clock with a cost for everything they do, and every result is checked.\n"
             "docs/scale.md says what the model is, how good it is, and what it leaves out.",
    .notes =
        "Exit status: 0 on success, 1 when a result was wrong or nothing could be predicted, 2 for a wrong command\n"
        "line.\n",
    .specs = specs,
    .count = (int)(sizeof(specs) / sizeof(specs[0])),
    .given = FIELD(given),
};

/* Options that leave no room for others but these. Nothing that was given is ignored. */
static int check_given(const struct options *o)
{
    static const struct {
        const char *name, *beside;
    } alone[] = {{"machines", "machines"},
                 {"show", "show"},
                 {"calibration", "calibration mode seed json"},
                 {"published", "published mode seed json"}};

    for (size_t i = 0; i < sizeof(alone) / sizeof(alone[0]); i++) {
        const char *odd = options_given_beside(&table, o, alone[i].beside);
        if (odd && options_given(&table, o, alone[i].name))
            return options_complain(table.program, "--%s has no meaning with --%s", odd, alone[i].name);
    }
    for (int i = 0; i < 2 && o->point.routing != WORKLOAD_GROUPS; i++) {
        const char *name = i ? "topk-groups" : "groups";
        if (options_given(&table, o, name))
            return options_complain(table.program, "--%s belongs to --routing groups", name);
    }
    return 0;
}

static int set_ranks(void *target, const char *text)
{
    struct options *o = target;
    char *end;

    o->nranks = 0;
    for (const char *at = text;; at = end + 1) {
        const long n = strtol(at, &end, 10);
        if (end == at || (*end && *end != ',') || n < 1 || n > SIM_MAX_RANKS || o->nranks == MAX_POINTS)
            return options_complain(table.program, "--ranks is '%s'; expected numbers from 1 to %d, with commas", text,
                                    SIM_MAX_RANKS);
        o->ranks[o->nranks++] = (int32_t)n;
        if (!*end)
            return 0;
    }
}

static int show_machine(const char *name)
{
    for (const struct machine_text *m = machine_texts; m->name; m++)
        if (!strcmp(m->name, name)) {
            fputs(m->text, stdout);
            return EXIT_OK;
        }
    options_complain(table.program, "--show is '%s'; expected a built-in machine (--machines lists them)", name);
    return EXIT_USAGE;
}

static struct predict_point make_point(const struct options *o, int mode, int ranks)
{
    struct predict_point p = o->point;

    p.mode = mode;
    p.ranks = ranks;
    if (!p.tokens)
        p.tokens = mode == EPX_LOW_LATENCY ? LL_TOKENS : HT_TOKENS;
    if (!p.experts)
        p.experts = ranks > FEW_EXPERTS ? ranks : FEW_EXPERTS;
    if (o->sms)
        p.machine.sms = (uint64_t)o->sms;
    return p;
}

/* Each simulated agent represents one of the machine's or several. */
static int check_agents(const struct options *o)
{
    const uint64_t sms = o->sms ? (uint64_t)o->sms : o->point.machine.sms, most = sms * o->point.machine.warps_per_sm;

    if ((uint64_t)o->point.agents <= most)
        return 0;
    return options_complain(table.program, "--agents is %d; expected at most the %" PRIu64 " warps of %" PRIu64 " SMs",
                            o->point.agents, most, sms);
}

static int predict_all(const struct options *o, int argc, char **argv)
{
    static struct predict_point points[2 * MAX_POINTS];
    static struct predict_result results[2 * MAX_POINTS];
    const int total = o->nranks * (o->modes == (EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT) ? 2 : 1);
    int n = 0;

    if (!o->json)
        predict_table_head();
    for (int mode = EPX_LOW_LATENCY; mode <= EPX_HIGH_THROUGHPUT; mode <<= 1) {
        for (int i = 0; i < o->nranks && mode & o->modes; i++) {
            points[n] = make_point(o, mode, o->ranks[i]);
            progress_wait("epx predict", 100.0 * n / total, "%s, %d ranks", mode == EPX_LOW_LATENCY ? "ll" : "ht",
                          o->ranks[i]);
            if (predict_run(&points[n], &results[n]) != 0) {
                progress_end();
                fprintf(stderr, "epx predict: %d ranks: %s\n", o->ranks[i], results[n].error);
                return EXIT_FAILED;
            }
            progress_end();
            if (o->json)
                predict_json(stdout, &points[n], &results[n]);
            else
                predict_table_row(&points[n], &results[n]);
            n++;
        }
    }
    if (o->svg && plot_write(o->svg, points, results, n) != 0)
        return EXIT_FAILED;
    if (o->report && predict_page(o->report, points, results, n, argc, argv) != 0)
        return EXIT_FAILED;
    if (o->report && !o->json)
        printf("\nThe report is in %s\n", o->report);
    return EXIT_OK;
}

int cmd_predict(int argc, char **argv)
{
    struct options o = {.point = {.hidden = 7168, .topk = 8, .dtype = PREDICT_FP8, .seed = 1, .iters = DEFAULT_ITERS},
                        .machine = "h800-cx7",
                        .modes = EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT};
    enum option_result parsed;
    int next;

    set_ranks(&o, "8,16,32,64,128,256");
    parsed = options_parse(&table, &o, argc, argv, 1, &next);
    if (parsed != OPTIONS_OK)
        return parsed == OPTIONS_HELP ? EXIT_OK : EXIT_USAGE;
    if (check_given(&o) != 0)
        return EXIT_USAGE;
    if (o.machines) {
        machine_list(stdout);
        return EXIT_OK;
    }
    if (o.show)
        return show_machine(o.show);
    if (o.calibration || o.known)
        return predict_known(o.calibration, o.modes, o.json, o.point.seed);
    if (machine_load(o.machine, &o.point.machine) != 0 || check_agents(&o) != 0)
        return EXIT_USAGE;
    if ((o.report && page_check(table.program, o.report) != 0) || (o.svg && page_check(table.program, o.svg) != 0))
        return EXIT_USAGE;
    return predict_all(&o, argc, argv);
}

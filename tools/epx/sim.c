/* SPDX-License-Identifier: Apache-2.0 */
/* `epx sim`: many seeds, each a whole group of ranks simulated on one thread and compared with the oracle. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "options.h"
#include "progress.h"
#include "routing.h"
#include "tests/lib/sim_case.h"
#include "util/clock.h"

struct options {
    struct sim_case_options given;
    uint64_t seeds, from;
    const char *mode, *faults;
    int32_t routing; /* enum workload_routing, or -1 */
    int json, twice, keep_going, verbose;
};

struct tally {
    uint64_t run, failed, stalls, deaths, ended, named, misnamed, masks, masked_healthy, steps, hash;
    uint64_t first_failure;
    double seconds;
};

#define FIELD(name) offsetof(struct options, name)

static int set_mode(void *target, const char *text);
static int set_faults(void *target, const char *text);

static const struct option_spec specs[] = {
    {.kind = OPTION_TITLE, .help = "What is simulated:"},
    {.name = "seeds",
     .kind = OPTION_U64,
     .value = "N",
     .help = "number of seeds",
     .fallback = "1000",
     .offset = FIELD(seeds),
     .low = 1,
     .high = 1000000000},
    {.name = "from",
     .kind = OPTION_U64,
     .value = "SEED",
     .help = "the first seed",
     .fallback = "1",
     .offset = FIELD(from),
     .high = INT64_MAX},
    {.name = "ranks",
     .letter = 'n',
     .kind = OPTION_INT,
     .value = "R",
     .help = "ranks of every group",
     .fallback = "drawn from the seed",
     .offset = FIELD(given.ranks),
     .low = 1,
     .high = PROP_MAX_RANKS,
     .hints = "np"},
    {.name = "nodes",
     .kind = OPTION_INT,
     .value = "N",
     .help = "nodes that the ranks are split into",
     .fallback = "drawn from the seed",
     .offset = FIELD(given.nodes),
     .low = 1,
     .high = PROP_MAX_RANKS},
    {.name = "mode",
     .kind = OPTION_CALL,
     .value = "MODE",
     .help = "ll, ht or mixed",
     .fallback = "mixed",
     .call = set_mode},
    {.name = "routing",
     .kind = OPTION_CHOICE,
     .value = "NAME",
     .help = ROUTING_HELP,
     .fallback = "drawn from the seed",
     .offset = FIELD(routing),
     .choices = routing_choices},
    {.name = "faults",
     .kind = OPTION_CALL,
     .value = "FAULTS",
     .help =
         "none, delay (ranks stall), death (ranks end), late (others go on without a rank that stalls), "
         "recover (ranks stall or end between two messages of a recovery), stop (one rank stops for good, and others "
         "do not run for a while), join (others take the places of those that end) or all: delay and death",
     .fallback = "none",
     .call = set_faults},
    {.name = "in-reach",
     .kind = OPTION_FLAG,
     .help = "results of dispatch in ordinary memory, more than buffers hold, of tokens that the others often reach",
     .offset = FIELD(given.in_reach)},
    {.kind = OPTION_TITLE, .help = "How it is run and reported:"},
    {.name = "keep-going",
     .kind = OPTION_FLAG,
     .help = "continue after a seed that fails",
     .offset = FIELD(keep_going)},
    {.name = "twice",
     .kind = OPTION_FLAG,
     .help = "run every seed twice and compare the two runs, step by step",
     .offset = FIELD(twice)},
    {.name = "verbose", .kind = OPTION_FLAG, .help = "print the case of every seed", .offset = FIELD(verbose)},
    {.name = "json", .kind = OPTION_FLAG, .help = "print one JSON object at the end", .offset = FIELD(json)},
};

static const struct option_table table = {
    .program = "epx sim",
    .usage = "epx sim [options]",
    .about =
        "Simulates groups of ranks on one thread. The seed decides in which order agents, proxies and the network\n"
        "take their steps, and every result is compared with the oracle. A seed that fails is printed with the\n"
        "command that replays it.",
    .notes = "Exit status: 0 when every seed passed, 1 when one failed, 2 for a wrong command line.\n",
    .specs = specs,
    .count = (int)(sizeof(specs) / sizeof(specs[0])),
};

static int choose(const char *option, const char *text, const struct option_choice *choices, int *value)
{
    char list[128] = "";
    size_t used = 0;

    for (const struct option_choice *c = choices; c->name; c++) {
        if (!strcmp(text, c->name)) {
            *value = c->value;
            return 0;
        }
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", used ? ", " : "", c->name);
    }
    return options_complain(table.program, "--%s is '%s'; expected one of %s", option, text, list);
}

static int set_mode(void *target, const char *text)
{
    static const struct option_choice modes[] = {{"ll", EPX_LOW_LATENCY},
                                                 {"ht", EPX_HIGH_THROUGHPUT},
                                                 {"mixed", EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT},
                                                 {NULL, 0}};
    struct options *o = target;

    o->mode = text;
    return choose("mode", text, modes, &o->given.modes);
}

static int set_faults(void *target, const char *text)
{
    static const struct option_choice kinds[] = {{"none", 0},
                                                 {"delay", SIM_FAULT_DELAY},
                                                 {"death", SIM_FAULT_DEATH},
                                                 {"late", SIM_FAULT_LATE},
                                                 {"recover", SIM_FAULT_RECOVER},
                                                 {"stop", SIM_FAULT_STOP},
                                                 {"join", SIM_FAULT_DEATH | SIM_FAULT_JOIN},
                                                 {"all", SIM_FAULT_DELAY | SIM_FAULT_DEATH},
                                                 {NULL, 0}};
    struct options *o = target;
    int bits = 0;

    o->faults = text;
    if (choose("faults", text, kinds, &bits) != 0)
        return -1;
    o->given.faults = (unsigned)bits;
    return 0;
}

static enum option_result parse(int argc, char **argv, struct options *o)
{
    int next;
    enum option_result result = options_parse(&table, o, argc, argv, 1, &next);

    if (result == OPTIONS_OK && o->given.ranks && o->given.nodes > o->given.ranks) {
        options_complain(table.program, "--nodes is %d; expected at most the number of ranks, %d", o->given.nodes,
                         o->given.ranks);
        result = OPTIONS_BAD;
    }
    return result;
}

static void tell_failure(const struct options *o, const struct sim_case *c, const char *error)
{
    progress_end();
    fprintf(stderr, "epx sim: seed %" PRIu64 " failed: %s\n", c->seed, error);
    sim_case_print(c);
    fprintf(stderr, "  to replay it: epx sim --seeds 1 --from %" PRIu64 " --mode %s --faults %s", c->seed, o->mode,
            o->faults);
    if (o->given.ranks)
        fprintf(stderr, " --ranks %d", o->given.ranks);
    if (o->given.nodes)
        fprintf(stderr, " --nodes %d", o->given.nodes);
    if (o->given.in_reach)
        fprintf(stderr, " --in-reach");
    if (o->routing >= 0)
        fprintf(stderr, " --routing %s", option_choice_name(routing_choices, o->routing));
    fprintf(stderr, "\n");
}

/* Both runs of a seed must take the same steps. */
static int run_again(const struct sim_case *c, struct sim_report *first)
{
    struct sim_report *second = malloc(sizeof(*second));
    int rc = -1;

    if (!second)
        return -1;
    sim_case_run(c, second);
    if (first->outcome.totals.hash == second->outcome.totals.hash && !strcmp(first->error, second->error))
        rc = 0;
    else
        snprintf(first->error, sizeof(first->error),
                 "two runs of one seed differ: %" PRIu64 " steps and hash %016" PRIx64 ", then %" PRIu64
                 " steps and hash %016" PRIx64,
                 first->outcome.totals.steps, first->outcome.totals.hash, second->outcome.totals.steps,
                 second->outcome.totals.hash);
    free(second);
    return rc;
}

static int run_seed(const struct options *o, uint64_t seed, struct sim_report *report, struct tally *tally)
{
    struct sim_case c;
    int rc;

    sim_case_draw(&c, seed, &o->given);
    for (int i = 0; i < c.prop.nhandles && o->routing >= 0; i++)
        c.prop.handle[i].w.routing = (enum workload_routing)o->routing;
    if (o->verbose)
        sim_case_print(&c);
    rc = sim_case_run(&c, report);
    if (o->twice && run_again(&c, report) != 0)
        rc = -1;
    tally->run++;
    tally->steps += report->outcome.totals.steps;
    tally->stalls += (uint64_t)report->outcome.totals.stalls;
    tally->deaths += (uint64_t)report->outcome.totals.deaths;
    tally->ended += report->outcome.failures > 0 && rc == 0;
    tally->named += (uint64_t)report->named;
    tally->misnamed += (uint64_t)report->misnamed;
    tally->masks += (uint64_t)report->masks;
    tally->masked_healthy += (uint64_t)report->masked_healthy;
    tally->hash = tally->hash * 0x100000001b3u + report->outcome.totals.hash;
    if (rc == 0)
        return 0;
    if (!tally->failed++)
        tally->first_failure = seed;
    tell_failure(o, &c, report->error);
    return -1;
}

static void print_tally(const struct options *o, const struct tally *t)
{
    uint64_t ranks, rounds, joined, joined_rounds;

    prop_recoveries(&ranks, &rounds);
    prop_joins(&joined, &joined_rounds);
    if (o->json) {
        printf("{\"seeds\": %" PRIu64 ", \"from\": %" PRIu64 ", \"failed\": %" PRIu64 ", \"first_failure\": ", t->run,
               o->from, t->failed);
        if (t->failed)
            printf("%" PRIu64, t->first_failure);
        else
            printf("null");
        printf(", \"mode\": \"%s\", \"faults\": \"%s\", \"stalls\": %" PRIu64 ", \"deaths\": %" PRIu64
               ", \"ended_by_faults\": %" PRIu64 ", \"named\": %" PRIu64 ", \"misnamed\": %" PRIu64
               ", \"masks\": %" PRIu64 ", \"masked_healthy\": %" PRIu64 ", \"ranks_gone_on\": %" PRIu64
               ", \"rounds_since\": %" PRIu64 ", \"joined\": %" PRIu64 ", \"steps\": %" PRIu64
               ", \"hash\": \"%016" PRIx64 "\", \"seconds\": %.3f}\n",
               o->mode, o->faults, t->stalls, t->deaths, t->ended, t->named, t->misnamed, t->masks, t->masked_healthy,
               ranks, rounds, joined, t->steps, t->hash, t->seconds);
        return;
    }
    printf("%" PRIu64 " seeds from %" PRIu64 ", mode %s, faults %s: %" PRIu64 " failed\n", t->run, o->from, o->mode,
           o->faults, t->failed);
    printf("  work     %" PRIu64 " steps in %.1f s, hash %016" PRIx64 "\n", t->steps, t->seconds, t->hash);
    if (t->stalls || t->deaths || joined)
        printf("  faults   %" PRIu64 " stalls, %" PRIu64 " deaths; %" PRIu64 " runs ended by them\n"
               "  culprit  %" PRIu64 " ranks told who it was, %" PRIu64 " of them wrongly; %" PRIu64
               " masked others, %" PRIu64 " of them healthy ones\n"
               "  after    %" PRIu64 " ranks went on for %" PRIu64 " rounds, %" PRIu64 " processes joined for %" PRIu64
               "\n",
               t->stalls, t->deaths, t->ended, t->named, t->misnamed, t->masks, t->masked_healthy, ranks, rounds,
               joined, joined_rounds);
}

int cmd_sim(int argc, char **argv)
{
    struct options o = {.given = {.modes = EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT},
                        .seeds = 1000,
                        .from = 1,
                        .mode = "mixed",
                        .routing = -1,
                        .faults = "none"};
    struct tally tally = {0};
    struct sim_report *report;
    const uint64_t start = clock_ns();
    const enum option_result parsed = parse(argc, argv, &o);

    if (parsed != OPTIONS_OK)
        return parsed == OPTIONS_HELP ? EXIT_OK : EXIT_USAGE;
    setenv("EPX_LOG", "error", 0); /* injected faults would cause many warnings */
    report = malloc(sizeof(*report));
    if (!report)
        return EXIT_FAILED;
    for (uint64_t seed = o.from; seed < o.from + o.seeds; seed++) {
        progress_show("epx sim", 100.0 * (double)tally.run / (double)o.seeds, "seed %" PRIu64 ", %" PRIu64 " failed",
                      seed, tally.failed);
        if (run_seed(&o, seed, report, &tally) != 0 && !o.keep_going)
            break;
    }
    progress_end();
    tally.seconds = (double)(clock_ns() - start) / 1e9;
    print_tally(&o, &tally);
    free(report);
    return tally.failed ? EXIT_FAILED : EXIT_OK;
}

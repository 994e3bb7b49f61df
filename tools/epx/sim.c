/* SPDX-License-Identifier: Apache-2.0 */
/* `epx sim`: many seeds, each a whole group of ranks simulated on one thread and compared with the oracle. */
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "tests/lib/sim_case.h"
#include "util/clock.h"

enum { USAGE_ERROR = 2 };

struct options {
    struct sim_case_options given;
    uint64_t seeds, from;
    const char *mode, *faults;
    int json, twice, keep_going, verbose;
};

struct tally {
    uint64_t run, failed, stalls, deaths, ended, steps, hash;
    uint64_t first_failure;
    double seconds;
};

static void usage(FILE *to)
{
    fprintf(
        to,
        "usage: epx sim [options]\n\n"
        "Simulates groups of ranks on one thread: agents, proxies and the network take turns as the seed says, and\n"
        "every result is compared with the oracle. A failing seed is printed with the command that replays it.\n\n"
        "  --seeds N       how many (1000)\n"
        "  --from S        the first one (1)\n"
        "  --ranks R       in all; drawn by default\n"
        "  --nodes N       that the ranks are split into; drawn by default\n"
        "  --mode M        ll, ht or mixed (mixed)\n"
        "  --faults F      none, delay (ranks stall), death (ranks end) or all (none)\n"
        "  --keep-going    do not stop at the first failing seed\n"
        "  --twice         run every seed twice and compare the two runs, step by step\n"
        "  --verbose       print every seed's case\n"
        "  --json          one JSON object at the end\n");
}

static int number(const char *option, const char *text, uint64_t low, uint64_t high, uint64_t *value)
{
    char *end;
    const unsigned long long parsed = strtoull(text, &end, 0);

    if (!*text || *end || *text == '-' || parsed < low || parsed > high) {
        fprintf(stderr, "epx sim: --%s: expected %" PRIu64 " to %" PRIu64 ", got \"%s\"\n", option, low, high, text);
        return -1;
    }
    *value = parsed;
    return 0;
}

static int choose(const char *option, const char *text, const char *const *names, const int *values, int n, int *value)
{
    for (int i = 0; i < n; i++) {
        if (!strcmp(text, names[i])) {
            *value = values[i];
            return 0;
        }
    }
    fprintf(stderr, "epx sim: --%s: expected", option);
    for (int i = 0; i < n; i++)
        fprintf(stderr, "%s %s", i ? "," : "", names[i]);
    fprintf(stderr, ", got \"%s\"\n", text);
    return -1;
}

static int set_mode(struct options *o, const char *text)
{
    static const char *const names[] = {"ll", "ht", "mixed"};
    static const int values[] = {EPX_LOW_LATENCY, EPX_HIGH_THROUGHPUT, EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT};

    o->mode = text;
    return choose("mode", text, names, values, 3, &o->given.modes);
}

static int set_faults(struct options *o, const char *text)
{
    static const char *const names[] = {"none", "delay", "death", "all"};
    static const int values[] = {0, SIM_FAULT_DELAY, SIM_FAULT_DEATH, SIM_FAULT_DELAY | SIM_FAULT_DEATH};
    int bits = 0, rc = choose("faults", text, names, values, 4, &bits);

    o->faults = text;
    o->given.faults = (unsigned)bits;
    return rc;
}

static int set_option(struct options *o, int c)
{
    uint64_t value = 0;

    switch (c) {
    case 's':
        return number("seeds", optarg, 1, 1000000000, &o->seeds);
    case 'f':
        return number("from", optarg, 0, UINT64_MAX / 2, &o->from);
    case 'r':
        if (number("ranks", optarg, 1, SIM_MAX_RANKS, &value))
            return -1;
        o->given.ranks = (int)value;
        return 0;
    case 'n':
        if (number("nodes", optarg, 1, SIM_MAX_RANKS, &value))
            return -1;
        o->given.nodes = (int)value;
        return 0;
    case 'm':
        return set_mode(o, optarg);
    case 'x':
        return set_faults(o, optarg);
    case 'j':
        o->json = 1;
        return 0;
    case 't':
        o->twice = 1;
        return 0;
    case 'k':
        o->keep_going = 1;
        return 0;
    case 'v':
        o->verbose = 1;
        return 0;
    default:
        return -1;
    }
}

/* 0 = go on, otherwise the exit code + 1. */
static int parse(int argc, char **argv, struct options *o)
{
    static const struct option names[] = {
        {"seeds", required_argument, NULL, 's'}, {"from", required_argument, NULL, 'f'},
        {"ranks", required_argument, NULL, 'r'}, {"nodes", required_argument, NULL, 'n'},
        {"mode", required_argument, NULL, 'm'},  {"faults", required_argument, NULL, 'x'},
        {"json", no_argument, NULL, 'j'},        {"twice", no_argument, NULL, 't'},
        {"keep-going", no_argument, NULL, 'k'},  {"verbose", no_argument, NULL, 'v'},
        {"help", no_argument, NULL, 'h'},        {NULL, 0, NULL, 0}};
    int c;

    optind = 1;
    while ((c = getopt_long(argc, argv, "h", names, NULL)) != -1) {
        if (c == 'h') {
            usage(stdout);
            return 1;
        }
        if (set_option(o, c) != 0) {
            fprintf(stderr, "epx sim --help lists the options\n");
            return USAGE_ERROR + 1;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "epx sim: unexpected argument \"%s\"\n", argv[optind]);
        return USAGE_ERROR + 1;
    }
    if (o->given.ranks && o->given.nodes > o->given.ranks) {
        fprintf(stderr, "epx sim: --ranks %d cannot be split into --nodes %d\n", o->given.ranks, o->given.nodes);
        return USAGE_ERROR + 1;
    }
    return 0;
}

static void tell_failure(const struct options *o, const struct sim_case *c, const char *error)
{
    fprintf(stderr, "epx sim: seed %" PRIu64 " failed: %s\n", c->seed, error);
    sim_case_print(c);
    fprintf(stderr, "  again: epx sim --seeds 1 --from %" PRIu64 " --mode %s --faults %s", c->seed, o->mode, o->faults);
    if (o->given.ranks)
        fprintf(stderr, " --ranks %d", o->given.ranks);
    if (o->given.nodes)
        fprintf(stderr, " --nodes %d", o->given.nodes);
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
    uint64_t ranks, rounds;

    prop_recoveries(&ranks, &rounds);
    if (o->json) {
        printf("{\"seeds\": %" PRIu64 ", \"from\": %" PRIu64 ", \"failed\": %" PRIu64 ", \"first_failure\": ", t->run,
               o->from, t->failed);
        if (t->failed)
            printf("%" PRIu64, t->first_failure);
        else
            printf("null");
        printf(", \"mode\": \"%s\", \"faults\": \"%s\", \"stalls\": %" PRIu64 ", \"deaths\": %" PRIu64
               ", \"ended_by_faults\": %" PRIu64 ", \"ranks_gone_on\": %" PRIu64 ", \"rounds_since\": %" PRIu64
               ", \"steps\": %" PRIu64 ", \"hash\": \"%016" PRIx64 "\", \"seconds\": %.3f}\n",
               o->mode, o->faults, t->stalls, t->deaths, t->ended, ranks, rounds, t->steps, t->hash, t->seconds);
        return;
    }
    printf("%" PRIu64 " seeds from %" PRIu64 ", mode %s, faults %s: %" PRIu64 " failed; %" PRIu64 " steps, %" PRIu64
           " stalls, %" PRIu64 " deaths, %" PRIu64 " runs ended by them, %" PRIu64 " ranks went on for %" PRIu64
           " rounds; %.1f s, hash %016" PRIx64 "\n",
           t->run, o->from, o->mode, o->faults, t->failed, t->steps, t->stalls, t->deaths, t->ended, ranks, rounds,
           t->seconds, t->hash);
}

int cmd_sim(int argc, char **argv)
{
    struct options o = {.given = {.modes = EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT},
                        .seeds = 1000,
                        .from = 1,
                        .mode = "mixed",
                        .faults = "none"};
    struct tally tally = {0};
    struct sim_report *report;
    const uint64_t start = clock_ns();
    int rc = parse(argc, argv, &o);

    if (rc)
        return rc - 1;
    setenv("EPX_LOG", "error", 0); /* faults are what it is about: warnings of them would be many */
    report = malloc(sizeof(*report));
    if (!report)
        return 1;
    for (uint64_t seed = o.from; seed < o.from + o.seeds; seed++)
        if (run_seed(&o, seed, report, &tally) != 0 && !o.keep_going)
            break;
    tally.seconds = (double)(clock_ns() - start) / 1e9;
    print_tally(&o, &tally);
    free(report);
    return tally.failed ? 1 : 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank of a group that exchanges tokens in both modes and compares all it gets with the oracle. The ranks connect
 * as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say, so that they may be started anywhere: by `epx run`, in network
 * namespaces (netns.sh), on several machines.
 *
 *      shapes   one group, a handle per mode and layout; every round routes and dispatches anew
 *      cases    groups and handles drawn from a number: types, shapes, options, streams (tests/lib/prop.h)
 *      fault    rounds until an operation fails, which must be soon enough and name a peer; then, where asked, the
 *               group
 *               is cleared, and rounds must be right again
 *
 * The last line is "exchange: rank R ok" exactly when the exit status is 0.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/lib/bench_work.h"
#include "tests/lib/prop.h"
#include "tests/lib/slow.h"
#include "util/clock.h"

enum { VARIANTS = 4, BOTH = EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT };

static const char usage_text[] =
    "usage: exchange [options]   (with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set)\n"
    "  --rounds N       rounds of each mode and layout      (4)\n"
    "  --cases N        random cases after them             (0)\n"
    "  --seed S         of rounds and cases                 (1)\n"
    "  --mode M         ll, ht or both                      (both)\n"
    "  --tokens T       per rank                            (32)\n"
    "  --hidden H       elements of a bf16 token            (1024)\n"
    "  --experts E      in all                              (4 per rank)\n"
    "  --topk K         experts of a token                  (4)\n"
    "  --timeout-ms MS  deadline of every wait              (20000)\n"
    "  --until-fault S  go on until an operation fails and names a peer; none within S\n"
    "                   seconds is a failure\n"
    "  --recover        then clear the error, again until that succeeds, and do the rounds again\n";

struct options {
    int rounds, cases, modes, tokens, hidden, experts, topk, timeout_ms, until_fault_s, recover;
    uint64_t seed;
};

struct variant { /* one handle */
    const char *name;
    struct bench_config config;
    struct bench_work work;
    epx_handle *handle;
    int in_epx_alloc;
};

struct rank {
    struct options options;
    epx_group *group;
    epx_group_info info;
    struct variant variants[VARIANTS];
    int nvariants;
};

static struct rank self; /* tensors hang on it until the process ends */

/* ---- Options -------------------------------------------------------------------------------------------------- */

static int parse_mode(const char *text)
{
    if (!strcmp(text, "ll"))
        return EPX_LOW_LATENCY;
    if (!strcmp(text, "ht"))
        return EPX_HIGH_THROUGHPUT;
    return !strcmp(text, "both") ? BOTH : 0;
}

/* 0, or -1 after a complaint. */
static int parse_number(const char *name, const char *text, long low, long high, int *value)
{
    char *end;
    long number = strtol(text, &end, 10);

    if (end != text && !*end && number >= low && number <= high) {
        *value = (int)number;
        return 0;
    }
    fprintf(stderr, "exchange: --%s is \"%s\", expected a number from %ld to %ld\n", name, text, low, high);
    return -1;
}

static int parse_options(int argc, char **argv, struct options *o)
{
    static const struct option names[] = {
        {"rounds", 1, NULL, 'r'},     {"cases", 1, NULL, 'c'},   {"seed", 1, NULL, 's'},        {"mode", 1, NULL, 'm'},
        {"tokens", 1, NULL, 't'},     {"hidden", 1, NULL, 'H'},  {"experts", 1, NULL, 'e'},     {"topk", 1, NULL, 'k'},
        {"timeout-ms", 1, NULL, 'T'}, {"recover", 0, NULL, 'R'}, {"until-fault", 1, NULL, 'u'}, {NULL, 0, NULL, 0}};
    int letter, bad = 0, index = 0;

    *o = (struct options){.rounds = 4, .modes = BOTH, .tokens = 32, .hidden = 1024, .topk = 4, .seed = 1};
    o->timeout_ms = 20000;
    while (!bad && (letter = getopt_long(argc, argv, "", names, &index)) != -1) {
        const char *name = letter == '?' ? "" : names[index].name;
        int *const number[] = {
            ['r'] = &o->rounds, ['c'] = &o->cases,      ['t'] = &o->tokens,        ['H'] = &o->hidden,
            ['k'] = &o->topk,   ['T'] = &o->timeout_ms, ['u'] = &o->until_fault_s, ['e'] = &o->experts};
        if (letter == '?')
            bad = 1;
        else if (letter == 'm')
            bad = !(o->modes = parse_mode(optarg));
        else if (letter == 's')
            o->seed = strtoull(optarg, NULL, 0);
        else if (letter == 'R')
            o->recover = 1;
        else
            bad = parse_number(name, optarg, letter == 'c' ? 0 : 1, 1 << 20, number[letter]);
    }
    if (bad || optind < argc)
        fputs(usage_text, stderr);
    return bad || optind < argc ? -1 : 0;
}

/* ---- Rounds --------------------------------------------------------------------------------------------------- */

static int failed(const char *call, epx_status status)
{
    if (status == EPX_OK)
        return 0;
    fprintf(stderr, "exchange: rank %d: %s: %s: %s\n", self.info.rank, call, epx_strerror(status), epx_last_error());
    return -1;
}

static int create_group(void)
{
    const struct options *o = &self.options;
    const char *world = getenv("WORLD_SIZE");
    epx_group_config config = EPX_GROUP_CONFIG_INIT;

    config.modes = (uint32_t)o->modes;
    config.num_experts = o->experts ? o->experts : 4 * (world ? atoi(world) : 1);
    config.max_tokens_per_rank = o->tokens;
    config.max_hidden_bytes = o->hidden * 2;
    config.max_topk = o->topk;
    config.timeout_ms = o->timeout_ms;
    config.layouts = EPX_LAYOUT_BIT(EPX_FLAT) | EPX_LAYOUT_BIT(EPX_EXPERT_MAJOR);
    self.info = (epx_group_info)EPX_GROUP_INFO_INIT;
    self.info.rank = getenv("RANK") ? atoi(getenv("RANK")) : -1;
    return failed("epx_group_create", epx_group_create(&self.group, NULL, &config)) ||
                   failed("epx_group_query", epx_group_query(self.group, &self.info))
               ? -1
               : 0;
}

static void *variant_alloc(void *context, size_t bytes)
{
    const struct variant *variant = context;
    void *ptr = NULL;

    if (!variant->in_epx_alloc)
        return aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
    return epx_alloc(self.group, bytes, &ptr) == EPX_OK ? ptr : NULL;
}

static int open_variant(const char *name, epx_mode mode, epx_layout layout, int in_epx_alloc)
{
    const struct options *o = &self.options;
    struct variant *variant = &self.variants[self.nvariants];
    epx_handle_config config = EPX_HANDLE_CONFIG_INIT;

    if (!(o->modes & mode))
        return 0;
    self.nvariants++;
    variant->name = name;
    variant->in_epx_alloc = in_epx_alloc;
    variant->config = (struct bench_config){.mode = mode,
                                            .layout = layout,
                                            .ranks = self.info.nranks,
                                            .tokens = o->tokens,
                                            .hidden = o->hidden,
                                            .topk = o->topk,
                                            .experts = self.info.num_experts,
                                            .alignment = 1};
    config.mode = mode;
    config.layout = layout;
    config.topk = o->topk;
    if (failed("epx_handle_create", epx_handle_create(&variant->handle, self.group, &config)))
        return -1;
    if (bench_work_open(&variant->work, &variant->config, self.info.rank, variant_alloc, variant)) {
        fprintf(stderr, "exchange: rank %d: no memory for the tensors of %s\n", self.info.rank, name);
        return -1;
    }
    variant->work.ranks_per_node = self.info.nnodes > 1 ? self.info.ranks_per_node : 0;
    return 0;
}

/* *status is what EPX said; what it called good must be right. */
static int run_round(uint64_t round, epx_status *status)
{
    struct mismatch m;

    for (int i = 0; i < self.nvariants; i++) {
        struct variant *variant = &self.variants[i];

        if (bench_work_seed(&variant->work, workload_hash(self.options.seed, round * VARIANTS + (uint64_t)i))) {
            fprintf(stderr, "exchange: rank %d: no memory for the oracle\n", self.info.rank);
            return -1;
        }
        bench_work_poison(&variant->work);
        *status = bench_work_exchange(&variant->work, self.group, variant->handle);
        if (*status != EPX_OK)
            return 0;
        if (bench_work_check(&variant->work, &m)) {
            fprintf(stderr, "exchange: rank %d: %s, round %llu: %s\n", self.info.rank, variant->name,
                    (unsigned long long)round, m.text);
            return -1;
        }
    }
    return 0;
}

static int run_rounds(uint64_t first)
{
    epx_status status = EPX_OK;

    for (int i = 0; i < self.options.rounds; i++)
        if (run_round(first + (uint64_t)i, &status) || failed("round", status))
            return -1;
    return 0;
}

/* ---- Faults --------------------------------------------------------------------------------------------------- */

/* How long the operation took that failed: no more than its deadline, and time for one rank to tell another. */
static int check_fault(epx_status status, uint64_t ns)
{
    epx_error_info error = EPX_ERROR_INFO_INIT;
    const long long ms = (long long)(ns / 1000000);

    epx_group_error(self.group, &error);
    printf("exchange: rank %d fault: %s, peer %d, after %lld ms: %s\n", self.info.rank, epx_strerror(status),
           error.peer, ms, error.message);
    fflush(stdout);
    if (status != EPX_ERR_PEER && status != EPX_ERR_TIMEOUT)
        return failed("expected a lost peer or a timeout, got", status);
    if (error.peer < 0 || error.peer >= self.info.nranks) {
        fprintf(stderr, "exchange: rank %d: the error names no peer (%d)\n", self.info.rank, error.peer);
        return -1;
    }
    if (ms > slow_ms(2 * self.options.timeout_ms + 1000)) {
        fprintf(stderr, "exchange: rank %d: %lld ms passed, expected about %d\n", self.info.rank, ms,
                self.options.timeout_ms);
        return -1;
    }
    return 0;
}

/* The network may not be whole yet: no clear that fails is the last. */
static int clear(void)
{
    const uint64_t end = clock_ns() + (uint64_t)self.options.until_fault_s * 1000000000u;
    epx_status status = EPX_ERR_PEER;

    for (int i = 1; status != EPX_OK && clock_ns() < end; i++) {
        const uint64_t begin = clock_ns();

        status = epx_group_error_clear(self.group);
        if (status == EPX_OK)
            break;
        printf("exchange: rank %d: clear %d failed after %lld ms: %s\n", self.info.rank, i,
               (long long)((clock_ns() - begin) / 1000000), epx_last_error());
        fflush(stdout);
        usleep(100000);
    }
    return failed("epx_group_error_clear", status);
}

static int run_until_fault(void)
{
    const uint64_t end = clock_ns() + (uint64_t)self.options.until_fault_s * 1000000000u;
    uint64_t round, begin = clock_ns();
    epx_status status = EPX_OK;

    for (round = 1000; status == EPX_OK && clock_ns() < end; round++) {
        begin = clock_ns();
        if (run_round(round, &status))
            return -1;
        if (round == 1000)
            printf("exchange: rank %d running\n", self.info.rank);
        fflush(stdout);
    }
    if (status == EPX_OK) {
        fprintf(stderr, "exchange: rank %d: no fault within %d s\n", self.info.rank, self.options.until_fault_s);
        return -1;
    }
    if (check_fault(status, clock_ns() - begin))
        return -1;
    if (!self.options.recover)
        return 0;
    return clear() ? -1 : run_rounds(2000);
}

/* ---- Random cases --------------------------------------------------------------------------------------------- */

/* The other ranks are other processes. */
static int this_rank_alone(int n, prop_rank_fn fn, void *arg)
{
    return fn(self.info.rank, n, NULL, arg) ? 1 : 0;
}

static int run_cases(void)
{
    const struct options *o = &self.options;
    struct prop_case c;
    char error[1200];

    for (int i = 0; i < o->cases; i++) {
        const uint64_t seed = o->seed + (uint64_t)i;

        prop_draw_case_of(&c, seed, o->modes, self.info.nranks);
        c.timeout_ms = o->timeout_ms;
        c.ranks_per_node = self.info.nnodes > 1 ? self.info.ranks_per_node : 0;
        if (!prop_run_case_on(&c, this_rank_alone, error, sizeof(error)))
            continue;
        fprintf(stderr, "exchange: rank %d: case %llu: %s\n", self.info.rank, (unsigned long long)seed, error);
        if (self.info.rank == 0)
            prop_print_case(&c);
        return -1;
    }
    return 0;
}

static int run_all(void)
{
    if (create_group() || open_variant("ll expert-major", EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, 0) ||
        open_variant("ht flat", EPX_HIGH_THROUGHPUT, EPX_FLAT, 0) ||
        open_variant("ll rank-major", EPX_LOW_LATENCY, EPX_RANK_MAJOR, 1) ||
        open_variant("ht expert-major", EPX_HIGH_THROUGHPUT, EPX_EXPERT_MAJOR, 1))
        return -1;
    if (self.info.rank == 0) {
        printf("exchange: %d ranks on %d nodes over %s\n", self.info.nranks, self.info.nnodes,
               self.info.nnodes > 1 ? self.info.net_name : "shared memory");
        fflush(stdout);
    }
    if (self.options.until_fault_s)
        return run_until_fault();
    return run_rounds(0) || run_cases() ? -1 : 0;
}

int main(int argc, char **argv)
{
    int rc;

    if (parse_options(argc, argv, &self.options))
        return 2;
    rc = run_all();
    for (int i = 0; i < self.nvariants; i++)
        bench_work_close(&self.variants[i].work);
    if (self.group && failed("epx_group_destroy", epx_group_destroy(self.group)))
        rc = -1;
    printf("exchange: rank %d %s\n", self.info.rank, rc ? "FAILED" : "ok");
    return rc ? 1 : 0;
}

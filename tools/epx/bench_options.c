/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "commands.h"
#include "net/name.h"

static const char usage_text[] = "usage: epx bench ll|ht [options]\n"
                                 "       epx bench ring [options]   (epx bench ring --help)\n"
                                 "\n"
                                 "Measures dispatch and combine: ll = low latency, ht = high throughput.\n"
                                 "\n"
                                 "  --ranks R       ranks to start on this machine               (8)\n"
                                 "  --nodes N       nodes that they pretend to be on             (1)\n"
                                 "  --tokens T      tokens per rank                              (ll 128, ht 512)\n"
                                 "  --hidden H      elements of a token                          (7168)\n"
                                 "  --topk K        experts per token                            (8)\n"
                                 "  --experts E     experts in all                               (256)\n"
                                 "  --dtype D       dispatch in bf16, or cast to fp8             (bf16)\n"
                                 "  --routing X     uniform, zipf or hot                         (uniform)\n"
                                 "  --layout X      ll: expert or rank; ht: flat or expert       (ll expert, ht flat)\n"
                                 "  --align A       ht, expert layout: rows of a zone            (1)\n"
                                 "  --device D      auto, cpu, cuda or hip                       (cpu)\n"
                                 "  --net X         network: tcp, shm, ofi:PROVIDER, verbs, ...  (auto)\n"
                                 "  --agents A      agents per operation                         (automatic)\n"
                                 "  --logfmt        ll: combine sends LogFMT-10\n"
                                 "  --plain-memory  tensors in ordinary memory, not epx_alloc's\n"
                                 "  --iters I       timed iterations                             (50)\n"
                                 "  --warmup W      untimed ones before every round              (2)\n"
                                 "  --seed S        of routing and data                          (1)\n"
                                 "  --check         compare results with the oracle; a mismatch makes the exit code 1\n"
                                 "  --vs mpi        the same work on MPI, in turns with EPX\n"
                                 "  --vs ofi        between nodes: the same bytes by a plain loop around fi_write\n"
                                 "  --json          one object per line instead of a table\n"
                                 "\n"
                                 "docs/bench.md says what the columns mean.\n";

enum option_id {
    OPT_RANKS = 256,
    OPT_NODES,
    OPT_TOKENS,
    OPT_HIDDEN,
    OPT_TOPK,
    OPT_EXPERTS,
    OPT_DTYPE,
    OPT_ROUTING,
    OPT_LAYOUT,
    OPT_ALIGN,
    OPT_DEVICE,
    OPT_NET,
    OPT_AGENTS,
    OPT_LOGFMT,
    OPT_PLAIN,
    OPT_ITERS,
    OPT_WARMUP,
    OPT_SEED,
    OPT_CHECK,
    OPT_VS,
    OPT_JSON,
    OPT_WORKER
};

static const struct option long_options[] = {
    {"ranks", required_argument, NULL, OPT_RANKS},   {"nodes", required_argument, NULL, OPT_NODES},
    {"tokens", required_argument, NULL, OPT_TOKENS}, {"hidden", required_argument, NULL, OPT_HIDDEN},
    {"topk", required_argument, NULL, OPT_TOPK},     {"experts", required_argument, NULL, OPT_EXPERTS},
    {"dtype", required_argument, NULL, OPT_DTYPE},   {"routing", required_argument, NULL, OPT_ROUTING},
    {"layout", required_argument, NULL, OPT_LAYOUT}, {"align", required_argument, NULL, OPT_ALIGN},
    {"device", required_argument, NULL, OPT_DEVICE}, {"net", required_argument, NULL, OPT_NET},
    {"agents", required_argument, NULL, OPT_AGENTS}, {"logfmt", no_argument, NULL, OPT_LOGFMT},
    {"plain-memory", no_argument, NULL, OPT_PLAIN},  {"iters", required_argument, NULL, OPT_ITERS},
    {"warmup", required_argument, NULL, OPT_WARMUP}, {"seed", required_argument, NULL, OPT_SEED},
    {"check", no_argument, NULL, OPT_CHECK},         {"vs", required_argument, NULL, OPT_VS},
    {"json", no_argument, NULL, OPT_JSON},           {"help", no_argument, NULL, 'h'},
    {"worker", required_argument, NULL, OPT_WORKER}, {NULL, 0, NULL, 0},
};

struct choice {
    const char *name;
    int value;
};

static const struct choice dtypes[] = {{"bf16", 0}, {"fp8", 1}, {NULL, 0}};
static const struct choice routings[] = {
    {"uniform", WORKLOAD_UNIFORM}, {"zipf", WORKLOAD_ZIPF}, {"hot", WORKLOAD_HOT}, {NULL, 0}};
static const struct choice devices[] = {
    {"auto", EPX_DEVICE_AUTO}, {"cpu", EPX_DEVICE_CPU}, {"cuda", EPX_DEVICE_CUDA}, {"hip", EPX_DEVICE_HIP}, {NULL, 0}};
static const struct choice ll_layouts[] = {{"expert", EPX_EXPERT_MAJOR}, {"rank", EPX_RANK_MAJOR}, {NULL, 0}};
static const struct choice ht_layouts[] = {{"flat", EPX_FLAT}, {"expert", EPX_EXPERT_MAJOR}, {NULL, 0}};

static const char *name_of(const struct choice *choices, int value)
{
    for (; choices->name != NULL; choices++)
        if (choices->value == value)
            return choices->name;
    return "?";
}

const char *bench_mode_name(const struct bench_config *config)
{
    return config->mode == EPX_LOW_LATENCY ? "ll" : "ht";
}

const char *bench_layout_name(const struct bench_config *config)
{
    return name_of(config->mode == EPX_LOW_LATENCY ? ll_layouts : ht_layouts, config->layout);
}

const char *bench_routing_name(const struct bench_config *config)
{
    return name_of(routings, config->routing);
}

const char *bench_device_name(const struct bench_config *config)
{
    return name_of(devices, config->device);
}

static int parse_choice(const char *option, const struct choice *choices, const char *text, int32_t *value)
{
    const struct choice *c;

    for (c = choices; c->name != NULL; c++)
        if (strcmp(c->name, text) == 0) {
            *value = c->value;
            return 0;
        }
    fprintf(stderr, "epx bench: --%s is '%s'; expected", option, text);
    for (c = choices; c->name != NULL; c++)
        fprintf(stderr, "%s %s", c == choices ? "" : c[1].name == NULL ? " or" : ",", c->name);
    fprintf(stderr, "\n");
    return -1;
}

static int parse_int(const char *option, const char *text, int low, int high, int32_t *value)
{
    char *end;
    long n;

    errno = 0;
    n = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || n < low || n > high) {
        fprintf(stderr, "epx bench: --%s is '%s'; expected a number from %d to %d\n", option, text, low, high);
        return -1;
    }
    *value = (int32_t)n;
    return 0;
}

static int parse_seed(const char *text, uint64_t *seed)
{
    char *end;

    errno = 0;
    *seed = strtoull(text, &end, 0);
    if (errno == 0 && end != text && *end == '\0')
        return 0;
    fprintf(stderr, "epx bench: --seed is '%s'; expected a number\n", text);
    return -1;
}

static int parse_net(const char *text, char *net, size_t bytes)
{
    struct net_name name;

    if (strcmp(text, "auto") == 0)
        text = "";
    if (text[0] != '\0' && net_name_parse(text, &name) != EPX_OK) {
        fprintf(stderr, "epx bench: --net: %s\n", epx_last_error());
        return -1;
    }
    if (strlen(text) >= bytes) {
        fprintf(stderr, "epx bench: --net is '%s'; expected at most %zu characters\n", text, bytes - 1);
        return -1;
    }
    memcpy(net, text, strlen(text) + 1);
    return 0;
}

/* May be given once for each. */
static int parse_vs(const char *text, struct bench_options *o)
{
    static const struct choice baselines[] = {{"mpi", 1}, {"ofi", 2}, {NULL, 0}};
    int32_t which;

    if (parse_choice("vs", baselines, text, &which) != 0)
        return -1;
    if (which == 1)
        o->vs_mpi = 1;
    else
        o->vs_ofi = 1;
    return 0;
}

/* Options about the shape of the work. 1 = not one of them. */
static int parse_shape(struct bench_config *c, int id, const char *name, const char *arg)
{
    switch (id) {
    case OPT_RANKS:
        return parse_int(name, arg, 1, LAUNCH_MAX_RANKS, &c->ranks);
    case OPT_NODES:
        return parse_int(name, arg, 1, LAUNCH_MAX_RANKS, &c->nodes);
    case OPT_TOKENS:
        return parse_int(name, arg, 1, 1 << 20, &c->tokens);
    case OPT_HIDDEN:
        return parse_int(name, arg, 8, 1 << 20, &c->hidden);
    case OPT_TOPK:
        return parse_int(name, arg, 1, EPX_MAX_TOPK, &c->topk);
    case OPT_EXPERTS:
        return parse_int(name, arg, 1, 1 << 16, &c->experts);
    case OPT_DTYPE:
        return parse_choice(name, dtypes, arg, &c->fp8);
    case OPT_ROUTING:
        return parse_choice(name, routings, arg, &c->routing);
    case OPT_ALIGN:
        return parse_int(name, arg, 1, 1 << 16, &c->alignment);
    default:
        return 1;
    }
}

/* The other ones. */
static int parse_rest(struct bench_options *o, int id, const char *name, const char *arg)
{
    struct bench_config *c = &o->config;

    switch (id) {
    case OPT_LAYOUT:
        return parse_choice(name, c->mode == EPX_LOW_LATENCY ? ll_layouts : ht_layouts, arg, &c->layout);
    case OPT_DEVICE:
        return parse_choice(name, devices, arg, &c->device);
    case OPT_NET:
        return parse_net(arg, c->net, sizeof(c->net));
    case OPT_AGENTS:
        return parse_int(name, arg, 0, 4096, &c->agents);
    case OPT_LOGFMT:
        c->logfmt = 1;
        return 0;
    case OPT_PLAIN:
        c->plain_memory = 1;
        return 0;
    case OPT_ITERS:
        return parse_int(name, arg, 1, BENCH_MAX_ITERS, &o->iters);
    case OPT_WARMUP:
        return parse_int(name, arg, 0, BENCH_MAX_ITERS, &o->warmup);
    case OPT_SEED:
        return parse_seed(arg, &c->seed);
    case OPT_CHECK:
        o->check = 1;
        return 0;
    case OPT_VS:
        return parse_vs(arg, o);
    case OPT_JSON:
        o->json = 1;
        return 0;
    case OPT_WORKER:
        o->worker = arg;
        return 0;
    default:
        return -1; /* getopt has said what is wrong */
    }
}

/* The first word decides the defaults, so it is looked at first. */
static int parse_mode(struct bench_options *o, const char *word)
{
    static const struct choice modes[] = {{"ll", EPX_LOW_LATENCY}, {"ht", EPX_HIGH_THROUGHPUT}, {NULL, 0}};
    const struct choice *mode = modes;

    while (mode->name != NULL && strcmp(mode->name, word) != 0)
        mode++;
    if (mode->name == NULL) {
        fprintf(stderr, "epx bench: the mode is '%s'; expected ll, ht or ring (epx bench --help says more)\n", word);
        return -1;
    }
    o->iters = 50;
    o->warmup = 2;
    o->config = (struct bench_config){.mode = mode->value,
                                      .layout = mode->value == EPX_LOW_LATENCY ? EPX_EXPERT_MAJOR : EPX_FLAT,
                                      .ranks = 8,
                                      .nodes = 1,
                                      .tokens = mode->value == EPX_LOW_LATENCY ? 128 : 512,
                                      .hidden = 7168,
                                      .topk = 8,
                                      .experts = 256,
                                      .alignment = 1,
                                      .device = EPX_DEVICE_CPU,
                                      .timeout_ms = 300000,
                                      .seed = 1};
    return 0;
}

/* --vs ofi compares with the provider that EPX runs on, so EPX must run on ofi. */
static int settle_ofi(struct bench_options *o)
{
    const char *env = getenv("EPX_NET"), *net = env != NULL && strcmp(env, "auto") != 0 ? env : "ofi";
    struct net_name name;

    if (o->config.nodes < 2) {
        fprintf(stderr, "epx bench: --vs ofi compares what crosses between nodes; expected --nodes 2 or more\n");
        return -1;
    }
    if (o->config.net[0] == '\0' && parse_net(net, o->config.net, sizeof(o->config.net)) != 0)
        return -1;
    if (net_name_parse(o->config.net, &name) == EPX_OK && name.ops == &net_ofi_ops)
        return 0;
    fprintf(stderr, "epx bench: --vs ofi with the network '%s'; expected tcp, ofi, or ofi:PROVIDER\n", o->config.net);
    return -1;
}

static int check_combination(struct bench_options *o)
{
    if (o->vs_ofi && settle_ofi(o) != 0)
        return -1;
    if (o->config.logfmt && o->config.mode != EPX_LOW_LATENCY) {
        fprintf(stderr, "epx bench: --logfmt belongs to ll; ht was given\n");
        return -1;
    }
    if (o->config.nodes > o->config.ranks) {
        fprintf(stderr, "epx bench: --nodes is %d; expected at most the number of ranks, %d\n", o->config.nodes,
                o->config.ranks);
        return -1;
    }
    return 0;
}

int bench_options_parse(struct bench_options *o, int argc, char **argv)
{
    const char *corrupt = getenv("EPX_BENCH_CORRUPT"); /* for the test of the check itself */
    int id, index, result;

    memset(o, 0, sizeof(*o));
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        fputs(usage_text, argc < 2 ? stderr : stdout);
        return argc < 2 ? -1 : 1;
    }
    if (parse_mode(o, argv[1]) != 0)
        return -1;
    optind = 2;
    while ((id = getopt_long(argc, argv, "h", long_options, &index)) != -1) {
        if (id == 'h') {
            fputs(usage_text, stdout);
            return 1;
        }
        if (id == '?')
            return -1;
        result = parse_shape(&o->config, id, long_options[index].name, optarg);
        if (result > 0)
            result = parse_rest(o, id, long_options[index].name, optarg);
        if (result != 0)
            return -1;
    }
    if (optind < argc) {
        fprintf(stderr, "epx bench: '%s' is one word too many\n", argv[optind]);
        return -1;
    }
    o->config.corrupt = corrupt != NULL ? atoi(corrupt) : 0;
    return check_combination(o);
}

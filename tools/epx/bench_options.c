/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of `epx bench ll|ht`: the table of options, and which of them go together. */
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "commands.h"
#include "device/device.h"
#include "device/module.h"
#include "net/name.h"
#include "options.h"
#include "routing.h"

enum {
    TIMING_AUTO,
    TIMING_WALL,
    TIMING_EVENTS,
    ROW_ALIGN = 16,
    SCALE_BLOCK = 128,
    MOST_AGENTS = 1024,
    EVENTS_WARMUP = 5
};
#define DEFAULT_TIMEOUT_MS 120000
#define DEFAULT_RANKS 8

static const struct option_choice dtypes[] = {
    {"bf16", BENCH_BF16}, {"fp8", BENCH_FP8_CAST}, {"fp8-input", BENCH_FP8_INPUT}, {NULL, 0}};
static const struct option_choice devices[] = {
    {"auto", EPX_DEVICE_AUTO}, {"cpu", EPX_DEVICE_CPU}, {"cuda", EPX_DEVICE_CUDA}, {"hip", EPX_DEVICE_HIP}, {NULL, 0}};
static const struct option_choice layouts[] = {
    {"expert", EPX_EXPERT_MAJOR}, {"rank", EPX_RANK_MAJOR}, {"flat", EPX_FLAT}, {NULL, 0}};
static const struct option_choice timings[] = {{"wall", TIMING_WALL}, {"events", TIMING_EVENTS}, {NULL, 0}};

static int set_net(void *target, const char *text);
static int set_vs(void *target, const char *text);
static int set_over_tokens(void *target, const char *text);
static int set_over_ranks(void *target, const char *text);

#define CONFIG(name) offsetof(struct bench_options, config.name)
#define FIELD(name) offsetof(struct bench_options, name)
#define TITLE(text)                        \
    {                                      \
        .kind = OPTION_TITLE, .help = text \
    }
#define FLAG(NAME, OFFSET, HELP)                                          \
    {                                                                     \
        .name = NAME, .kind = OPTION_FLAG, .help = HELP, .offset = OFFSET \
    }
#define INT(NAME, VALUE, OFFSET, LOW, HIGH, DEFAULT, HELP)                                                     \
    {                                                                                                          \
        .name = NAME, .kind = OPTION_INT, .value = VALUE, .help = HELP, .fallback = DEFAULT, .offset = OFFSET, \
        .low = LOW, .high = HIGH                                                                               \
    }
#define CHOICE(NAME, VALUE, OFFSET, CHOICES, DEFAULT, HELP)                                                       \
    {                                                                                                             \
        .name = NAME, .kind = OPTION_CHOICE, .value = VALUE, .help = HELP, .fallback = DEFAULT, .offset = OFFSET, \
        .choices = CHOICES                                                                                        \
    }

static const struct option_spec specs[] = {
    TITLE("Shape of the work:"),
    {.name = "ranks",
     .letter = 'n',
     .kind = OPTION_INT,
     .value = "N",
     .help = "ranks to start on this machine; not in the world of a launcher",
     .fallback = "8",
     .offset = CONFIG(ranks),
     .low = 1,
     .high = LAUNCH_MAX_RANKS,
     .hints = "np nproc nprocs ntasks num-ranks"},
    INT("nodes", "N", CONFIG(nodes), 1, LAUNCH_MAX_RANKS, "1",
        "split the ranks into N nodes, which reach each other only by the network"),
    INT("tokens", "N", CONFIG(tokens), 1, 1 << 20, "ll 128, ht 512", "tokens per rank"),
    INT("hidden", "N", CONFIG(hidden), 8, 1 << 20, "7168", "elements of a token, a multiple of 8"),
    INT("topk", "K", CONFIG(topk), 1, EPX_MAX_TOPK, "8", "experts per token"),
    INT("experts", "N", CONFIG(experts), 1, 1 << 16, "256", "experts of all ranks together"),
    CHOICE("dtype", "TYPE", CONFIG(fp8), dtypes, "bf16",
           "rows of dispatch: bf16; fp8, cast by dispatch;\nfp8-input, given as fp8"),
    CHOICE("layout", "NAME", CONFIG(layout), layouts, "ll expert, ht flat",
           "of the received rows; ll: expert or rank; ht: flat or expert"),
    INT("align", "N", CONFIG(alignment), 1, 1 << 16, "1",
        "ht with --layout expert: rows of an expert start at multiples of N"),
    CHOICE("routing", "NAME", CONFIG(routing), routing_choices, "uniform", ROUTING_HELP),
    {.name = "seed",
     .kind = OPTION_U64,
     .value = "N",
     .help = "seed of routing and data",
     .fallback = "1",
     .offset = CONFIG(seed),
     .high = INT64_MAX},
    TITLE("Where it runs:"),
    CHOICE("device", "NAME", CONFIG(device), devices, "cpu", "auto (EPX_DEVICE, else cpu), cpu, cuda or hip"),
    {.name = "net",
     .kind = OPTION_CALL,
     .value = "NAME",
     .help = "network between nodes: auto, tcp, shm, verbs, ofi or\nofi:PROVIDER (epx doctor lists them)",
     .fallback = "auto",
     .call = set_net,
     .hints = "network provider"},
    INT("agents", "N", CONFIG(agents), 1, MOST_AGENTS, "automatic",
        "CPU threads, or GPU warps, per operation of a rank"),
    FLAG("threads", CONFIG(threads), "ranks are threads of one process, instead of processes"),
    FLAG("plain-memory", CONFIG(plain_memory), "tensors in ordinary memory, not in that of epx_alloc"),
    {.name = "timeout",
     .kind = OPTION_SECONDS,
     .value = "SECONDS",
     .help = "deadline of every wait: of the group's operations,\nand for ranks that stop making progress",
     .fallback = "120; groups EPX_TIMEOUT_MS",
     .offset = CONFIG(timeout_ms),
     .low = 1,
     .high = 1000000000},
    TITLE("What is done:"),
    FLAG("check", FIELD(check), "compare all results with the oracle; exit status 1 if one differs"),
    INT("iters", "N", FIELD(iters), 0, BENCH_MAX_ITERS, "50, layer 100",
        "timed iterations; 0 with --check: only check"),
    INT("warmup", "N", FIELD(warmup), 0, BENCH_MAX_ITERS, "2, events 5, layer 10",
        "untimed iterations before each round, or series of events"),
    CHOICE("timing", "HOW", FIELD(timing), timings, "wall; on a GPU events",
           "wall: from a barrier until the last rank has finished;\nevents: each rank by time stamps of its device, in "
           "a graph"),
    FLAG("logfmt", CONFIG(logfmt), "ll: rows of combine travel as LogFMT-10, or are rounded to its values when read"),
    FLAG("staged", CONFIG(staged), "ll: send and receive halves apart (send_only, epx_complete)"),
    {.name = "vs",
     .kind = OPTION_CALL,
     .value = "BASELINE",
     .help = "compare in the same run with mpi: the same work on MPI;\nofi: the same bytes by a loop around fi_write",
     .call = set_vs},
    INT("replays", "N", CONFIG(replays), 1, 1000000, NULL,
        "do not measure: replay one graph N times with changing\nrouting, and check every result"),
    FLAG("overlap", CONFIG(overlap), "with --replays: copies on another stream meanwhile"),
    FLAG("expect-zero-copy", CONFIG(zero_copy),
         "with --plain-memory: fail if combine copies rows before\nother ranks read them"),
    TITLE("Output:"),
    FLAG("json", FIELD(json), "one JSON object per operation instead of a table"),
    {.name = "report",
     .kind = OPTION_TEXT,
     .value = "FILE",
     .help = "write a page with plots and all numbers, which any browser opens",
     .offset = FIELD(report)},
    {.name = "over-tokens",
     .kind = OPTION_CALL,
     .value = "LIST",
     .help = "a run for each number of tokens, separated by commas; sweep:\nof ll, the others have 8 times as many",
     .fallback = "sweep 1,8,32,128",
     .call = set_over_tokens},
    {.name = "over-ranks",
     .kind = OPTION_CALL,
     .value = "LIST",
     .help = "a run for each number of ranks",
     .fallback = "sweep 2,4,8",
     .call = set_over_ranks},
    {.name = "compare",
     .kind = OPTION_TEXT,
     .value = "FILE",
     .help = "print what has changed beyond noise since FILE, the output of\n--json or a page; without a mode: measure "
             "again what it has",
     .offset = FIELD(compare)},
    {.name = "new",
     .kind = OPTION_TEXT,
     .value = "FILE",
     .help = "with --compare: measure nothing, compare with this file",
     .offset = FIELD(newer)},
};

static const struct option_table table = {
    .program = "epx bench",
    .usage = "epx bench layer [ll] [options]  whole layers as a model calls them, with new routing each time\n"
             "epx bench ll [options]          low latency: decoding, some hundred tokens per rank\n"
             "epx bench ht [options]          high throughput: prefill and training, thousands of tokens\n"
             "epx bench sweep [options]       all of these over tokens and over ranks, for --report\n"
             "epx bench --compare FILE        what has changed since FILE was measured\n"
             "epx bench ring [options]        the way of commands from a device to its proxies",
    .about =
        "Starts ranks on this machine and measures dispatch (tokens to their experts) and combine (results back).\n"
        "With --check every result of every rank is compared with a reference computed beforehand. Started by\n"
        "torchrun, mpirun, srun or by hand as one of several ranks, it joins these, on any number of machines; rank 0\n"
        "reports.",
    .notes =
        "Examples:\n"
        "  epx bench layer --check                      what a model waits for in each of its layers\n"
        "  epx bench ll --check                         8 ranks, checked, a table\n"
        "  epx bench ht --tokens 4096 --dtype fp8 --json\n"
        "  epx bench ht --nodes 2 --net tcp --vs ofi    through proxies and TCP, beside plain libfabric\n"
        "  epx bench sweep --report out.html            curves, phases and ratios as a page\n"
        "  epx bench ll --device cuda --dtype fp8       kernel times on the GPUs of this machine\n"
        "\n"
        "Exit status: 0 success; 1 a check or an operation failed; 2 a wrong command line, or something that this\n"
        "build or machine cannot do. docs/bench.md explains the columns.\n",
    .specs = specs,
    .count = (int)(sizeof(specs) / sizeof(specs[0])),
    .given = FIELD(given),
};

static const char *const program = "epx bench";

int bench_option_given(const struct bench_options *options, const char *name)
{
    return options_given(&table, options, name);
}

const char *bench_mode_name(const struct bench_config *config)
{
    return config->mode == EPX_LOW_LATENCY ? "ll" : "ht";
}

const char *bench_layout_name(const struct bench_config *config)
{
    return option_choice_name(layouts, config->layout);
}

const char *bench_routing_name(const struct bench_config *config)
{
    return option_choice_name(routing_choices, config->routing);
}

const char *bench_device_name(const struct bench_config *config)
{
    return option_choice_name(devices, config->device);
}

const char *bench_dtype_name(const struct bench_config *config)
{
    return option_choice_name(dtypes, config->fp8);
}

static int set_net(void *target, const char *text)
{
    struct bench_config *c = &((struct bench_options *)target)->config;
    struct net_name name;

    if (strcmp(text, "auto") == 0)
        text = "";
    if (strlen(text) >= sizeof(c->net))
        return options_complain(program, "--net is '%s'; expected at most %zu characters", text, sizeof(c->net) - 1);
    if (text[0] != '\0' && net_name_parse(text, &name) != EPX_OK)
        return options_complain(program, "--net: %s", epx_last_error());
    memcpy(c->net, text, strlen(text) + 1);
    return 0;
}

/* May be given once for each. */
static int set_vs(void *target, const char *text)
{
    struct bench_options *o = target;

    if (strcmp(text, "mpi") == 0)
        o->vs_mpi = 1;
    else if (strcmp(text, "ofi") == 0)
        o->vs_ofi = 1;
    else
        return options_complain(program, "--vs is '%s'; expected mpi or ofi", text);
    return 0;
}

static int set_list(struct bench_list *list, const char *option, const char *text, long most)
{
    char *end;

    list->count = 0;
    for (const char *at = text;; at = end + 1) {
        const long n = strtol(at, &end, 10);

        if (end == at || (*end && *end != ',') || n < 1 || n > most || list->count == 16)
            return options_complain(program, "--%s is '%s'; expected up to 16 numbers from 1 to %ld, with commas",
                                    option, text, most);
        list->values[list->count++] = (int32_t)n;
        if (!*end)
            return 0;
    }
}

static int set_over_tokens(void *target, const char *text)
{
    return set_list(&((struct bench_options *)target)->over_tokens, "over-tokens", text, 1 << 20);
}

static int set_over_ranks(void *target, const char *text)
{
    return set_list(&((struct bench_options *)target)->over_ranks, "over-ranks", text, LAUNCH_MAX_RANKS);
}

/* The first word decides the defaults, so it is looked at first. */
static int set_mode(struct bench_options *o, const char *word)
{
    const int ll = strcmp(word, "ll") == 0;

    if (!ll && strcmp(word, "ht") != 0)
        return options_complain(program, "the mode is '%s'; expected layer, ll, ht, sweep or ring", word);
    o->iters = 50;
    o->warmup = 2;
    o->config = (struct bench_config){.mode = ll ? EPX_LOW_LATENCY : EPX_HIGH_THROUGHPUT,
                                      .layout = ll ? EPX_EXPERT_MAJOR : EPX_FLAT,
                                      .nodes = 1,
                                      .tokens = ll ? 128 : 512,
                                      .hidden = 7168,
                                      .topk = 8,
                                      .experts = 256,
                                      .device = EPX_DEVICE_CPU,
                                      .seed = 1};
    return 0;
}

/* "ll", "ht", "layer", "layer ll" or "layer ht": returns the number of words, or -1 after a message. */
static int take_mode(struct bench_options *o, int argc, char **argv)
{
    const int sweep = strcmp(argv[1], "sweep") == 0, layer = sweep || strcmp(argv[1], "layer") == 0;
    const int second = layer && !sweep && argc > 2 && argv[2][0] != '-';

    if (set_mode(o, second ? argv[2] : layer ? "ht" : argv[1]) != 0)
        return -1;
    if (layer) {
        o->iters = 100;
        o->config.layer = o->config.plain_memory = 1;
    }
    o->sweep = sweep;
    return 1 + second;
}

/* ---- Combinations ----------------------------------------------------------------------------------------------- */

static int check_shape(const struct bench_config *c)
{
    const int per_node = bench_ranks_per_node(c);

    if (c->hidden % 8 != 0)
        return options_complain(program, "--hidden is %d; expected a multiple of 8, for rows in units of %d bytes",
                                c->hidden, ROW_ALIGN);
    if (c->fp8 != BENCH_BF16 && c->hidden % ROW_ALIGN != 0)
        return options_complain(program, "--hidden is %d; expected a multiple of %d with --dtype %s", c->hidden,
                                ROW_ALIGN, bench_dtype_name(c));
    if (c->fp8 == BENCH_FP8_INPUT && c->hidden % SCALE_BLOCK != 0)
        return options_complain(program, "--hidden is %d; expected a multiple of %d with --dtype fp8-input", c->hidden,
                                SCALE_BLOCK);
    if (c->topk > c->experts)
        return options_complain(program, "--topk is %d; expected at most the number of experts, %d", c->topk,
                                c->experts);
    if (c->nodes > c->ranks)
        return options_complain(program, "--nodes is %d; expected at most the number of ranks, %d", c->nodes, c->ranks);
    if ((c->ranks + per_node - 1) / per_node != c->nodes)
        return options_complain(program, "--nodes is %d; %d ranks with %d per node are %d nodes", c->nodes, c->ranks,
                                per_node, (c->ranks + per_node - 1) / per_node);
    if ((int64_t)c->ranks * c->tokens * c->topk > INT_MAX)
        return options_complain(program, "--ranks times --tokens times --topk is %lld; expected at most %d",
                                (long long)c->ranks * c->tokens * c->topk, INT_MAX);
    return 0;
}

static int check_mode(const struct bench_config *c)
{
    const int ll = c->mode == EPX_LOW_LATENCY;

    if (c->layout == (ll ? EPX_FLAT : EPX_RANK_MAJOR))
        return options_complain(program, "--layout is '%s'; expected %s", bench_layout_name(c),
                                ll ? "expert or rank with ll" : "flat or expert with ht");
    if (c->alignment != 0 && (ll || c->layout != EPX_EXPERT_MAJOR))
        return options_complain(program, "--align belongs to ht with --layout expert; got %s with --layout %s",
                                bench_mode_name(c), bench_layout_name(c));
    if (c->logfmt && !ll)
        return options_complain(program, "--logfmt belongs to ll; got ht");
    if (c->staged && !ll)
        return options_complain(program, "--staged belongs to ll; got ht");
    if (c->net[0] != '\0' && c->nodes < 2)
        return options_complain(program, "--net is '%s', but one node needs no network; expected --nodes 2 or more",
                                c->net);
    return 0;
}

/* Nothing is measured: what says how would be ignored. */
static int check_replays(const struct bench_options *o)
{
    static const char *const measuring[] = {"vs", "iters", "warmup", "timing", "report", "compare"};

    for (size_t i = 0; i < sizeof(measuring) / sizeof(measuring[0]); i++)
        if (bench_option_given(o, measuring[i]))
            return options_complain(program, "--replays does not measure; expected no --%s", measuring[i]);
    return 0;
}

static int check_work(const struct bench_options *o)
{
    const struct bench_config *c = &o->config;

    if (o->iters == 0 && !o->check && !c->replays)
        return options_complain(program, "--iters 0 measures nothing; expected --check as well");
    if (c->layer && (c->replays || c->staged || o->vs_mpi || o->vs_ofi || o->timing != TIMING_AUTO ||
                     c->fp8 == BENCH_FP8_INPUT || c->zero_copy))
        return options_complain(program, "layer measures calls as a model makes them, by the clock; expected no "
                                         "--replays, --staged, --vs, --timing, --expect-zero-copy or fp8-input");
    if (c->overlap && !c->replays)
        return options_complain(program, "--overlap belongs to --replays");
    if (c->fp8 == BENCH_FP8_INPUT && (o->check || c->replays))
        return options_complain(program, "--dtype fp8-input is only measured; expected no --check and no --replays");
    if (c->zero_copy && (!c->plain_memory || c->mode == EPX_LOW_LATENCY))
        return options_complain(program, "--expect-zero-copy belongs to ht with --plain-memory");
    if (c->zero_copy && !c->events && !c->replays)
        return options_complain(program, "--expect-zero-copy belongs to --timing events or --replays");
    if (c->replays)
        return check_replays(o);
    if (o->vs_mpi && c->fp8 == BENCH_FP8_INPUT)
        return options_complain(program, "--vs mpi casts to fp8 itself; expected --dtype bf16 or fp8");
    if (o->vs_mpi && c->threads)
        return options_complain(program, "--vs mpi compares processes; expected no --threads");
    return 0;
}

/* Time stamps say what the device does; the baselines have none. */
static int settle_timing(struct bench_options *o)
{
    const int gpu = o->config.device == EPX_DEVICE_CUDA || o->config.device == EPX_DEVICE_HIP;
    const int vs = o->vs_mpi || o->vs_ofi;

    if (o->timing == TIMING_EVENTS && vs)
        return options_complain(program, "--vs compares times between barriers; expected --timing wall");
    if (o->config.layer)
        return 0;
    o->config.events = o->timing == TIMING_EVENTS || (o->timing == TIMING_AUTO && (gpu || o->joined) && !vs);
    return 0;
}

/* --vs ofi compares with the provider that EPX runs on, so EPX must run on ofi. */
static int settle_ofi(struct bench_options *o)
{
    const char *env = getenv("EPX_NET");
    const char *net = env != NULL && env[0] != '\0' && strcmp(env, "auto") != 0 ? env : "ofi";
    struct net_name name;

    if (o->config.nodes < 2)
        return options_complain(program, "--vs ofi compares what crosses between nodes; expected --nodes 2 or more");
    if (o->config.net[0] == '\0' && set_net(o, net) != 0)
        return -1;
    if (net_name_parse(o->config.net, &name) == EPX_OK && name.ops == &net_ofi_ops)
        return 0;
    return options_complain(program, "--vs ofi with the network '%s'; expected tcp, shm, ofi or ofi:PROVIDER",
                            o->config.net);
}

/* The module alone: whether it finds a GPU is seen by the ranks. */
static int check_device(const struct bench_config *c)
{
    const struct device_ops *ops;
    const char *why;

    if (c->device != EPX_DEVICE_CUDA && c->device != EPX_DEVICE_HIP)
        return 0;
    if (device_explain(bench_device_name(c), device_module_open(bench_device_name(c), &ops)) == EPX_OK)
        return 0;
    why = epx_last_error(); /* begins with "device NAME: " */
    return options_complain(program, "--device %s%s", bench_device_name(c), strchr(why, ':') ? strchr(why, ':') : why);
}

/* A launcher's world has its ranks and machines; without one, ranks are started here. */
static int settle_world(struct bench_options *o)
{
    struct bench_config *c = &o->config;
    int per_machine = 0;
    const int world = bench_join_world(&o->rank, &per_machine);

    o->joined = world > 0;
    if (world <= 0) {
        c->ranks = c->ranks != 0 ? c->ranks : DEFAULT_RANKS;
        return world;
    }
    if (c->ranks != 0 && c->ranks != world)
        return options_complain(program, "--ranks is %d, but the launcher has started %d", c->ranks, world);
    if (c->threads || o->vs_mpi || o->vs_ofi)
        return options_complain(program, "--threads and --vs start processes of their own: not in a launcher's world");
    c->ranks = world;
    if (c->nodes == 1 && per_machine > 0 && world % per_machine == 0)
        c->nodes = world / per_machine;
    return 0;
}

static int settle_session(struct bench_options *o)
{
    const int lists = o->over_tokens.count > 0 || o->over_ranks.count > 0;

    if (o->joined && (o->sweep || lists))
        return options_complain(program, "sweep and --over start ranks of their own: not in a launcher's world");
    if (o->sweep && !o->over_tokens.count && set_over_tokens(o, "1,8,32,128") != 0)
        return -1;
    if (o->sweep && !o->over_ranks.count && set_over_ranks(o, "2,4,8") != 0)
        return -1;
    return 0;
}

static int settle(struct bench_options *o)
{
    struct bench_config *c = &o->config;

    if (settle_world(o) != 0 || settle_session(o) != 0)
        return -1;
    if (o->sweep) /* each of its runs is checked by itself */
        return 0;
    if (check_shape(c) != 0 || check_mode(c) != 0 || settle_timing(o) != 0 || check_work(o) != 0 ||
        (o->vs_ofi && settle_ofi(o) != 0) || check_device(c) != 0)
        return -1;
    o->phases = o->report != NULL && (c->device == EPX_DEVICE_CPU || !c->events);
    c->traced = o->phases;
    c->alignment = c->alignment != 0 ? c->alignment : 1;
    c->group_timeout_ms = c->timeout_ms;
    c->timeout_ms = c->timeout_ms != 0 ? c->timeout_ms : DEFAULT_TIMEOUT_MS;
    c->check = o->check;
    c->iters = o->iters;
    c->warmup = bench_option_given(o, "warmup") ? o->warmup : c->layer ? BENCH_LAYERS_PER_ROUND : EVENTS_WARMUP;
    return 0;
}

/* What was given on the command line, and what is a default. */
static void take_given(struct bench_options *o)
{
    o->tokens_given = o->config.tokens > 0;
    o->iters_given = o->iters >= 0;
    o->config.tokens = abs(o->config.tokens);
    o->iters = o->iters_given ? o->iters : -o->iters - 1;
}

/* The file has the shape of the work; a second one has the numbers too. */
static int check_compare(const struct bench_options *o, int words)
{
    const char *odd = options_given_beside(&table, o, o->newer ? "compare new" : "compare json report");

    if (o->newer && words)
        return options_complain(program, "--new measures nothing; expected no mode");
    if (odd)
        return options_complain(program, "--%s has no meaning with --compare FILE%s", odd,
                                o->newer ? " --new FILE" : " without a mode");
    return 0;
}

int bench_options_parse(struct bench_options *o, int argc, char **argv)
{
    const char *corrupt = getenv("EPX_BENCH_CORRUPT"); /* for the test of the check itself */
    enum option_result result;
    int next, words = 0;

    memset(o, 0, sizeof(*o));
    if (argc < 2) {
        options_help(&table, stderr);
        return -1;
    }
    if (argv[1][0] != '-' && (words = take_mode(o, argc, argv)) < 0)
        return -1;
    o->config.tokens = -o->config.tokens; /* negative: not given */
    o->iters = -o->iters - 1;
    result = options_parse(&table, o, argc, argv, 1 + words, &next);
    if (result != OPTIONS_OK)
        return result == OPTIONS_HELP ? 1 : -1;
    take_given(o);
    if (o->newer && !o->compare)
        return options_complain(program, "--new belongs to --compare");
    if (o->compare && (o->config.mode == 0 || o->newer))
        return check_compare(o, words);
    if (o->config.mode == 0)
        return options_complain(program, "the mode is missing; expected epx bench layer, ll, ht or ring");
    o->config.corrupt = corrupt != NULL ? atoi(corrupt) : 0;
    return settle(o);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `epx bench ring`: what the way from an agent through a command ring and a proxy thread into a network costs, the
 * network itself left out (net/null.c). The agents run kernel/ring_bench.h on the device that is asked for.
 *
 *      agents of ring i --32 commands at a time--> ring i --> proxy thread i --> null network       commands per second
 *      agent 0 --1 command--> ring 1 --> its proxy --> null network --> "sent" counter              round trip
 *
 * Commands are counted by the proxies over spans of time while everything runs. Two patterns: scattered, in which no
 * two commands touch and each becomes a put of its own; contiguous, in which neighbours merge.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"
#include "device/device.h"
#include "options.h"
#include "progress.h"
#include "proxy/internal.h"
#include "util/clock.h"

enum {
    RINGS_MOST = 16,
    AGENTS_MOST = 1024,
    SPANS = 5,
    RING_SLOTS = 4096,
    TRIPS = 20000,     /* round trips of a series, */
    TRIPS_LEAST = 200, /* fewer where one is slow: two threads that spin for each other on a busy machine */
    TRIPS_MS = 100,    /* how long a series should take at the most */
    TRIP_TIMEOUT_MS = 10000,
    PAUSE_MOST_NS = 1000,
    PAUSE_STEP_NS = 100
};
#define HEAP_BYTES ((uint64_t)1 << 30)
#define BYTES 64u

struct options {
    int32_t device; /* epx_device */
    int32_t rings, agents, ms, json;
};

static const struct option_choice devices[] = {
    {"cpu", EPX_DEVICE_CPU}, {"cuda", EPX_DEVICE_CUDA}, {"hip", EPX_DEVICE_HIP}, {NULL, 0}};

#define FIELD(name) offsetof(struct options, name)

static const struct option_spec specs[] = {
    {.kind = OPTION_TITLE, .help = "Options:"},
    {.name = "device",
     .kind = OPTION_CHOICE,
     .value = "NAME",
     .help = "where commands are pushed: cpu, cuda or hip",
     .fallback = "cpu",
     .offset = FIELD(device),
     .choices = devices},
    {.name = "rings",
     .kind = OPTION_INT,
     .value = "N",
     .help = "rings, each with a proxy thread",
     .fallback = "1",
     .offset = FIELD(rings),
     .low = 1,
     .high = RINGS_MOST},
    {.name = "agents",
     .kind = OPTION_INT,
     .value = "N",
     .help = "agents (CPU threads, GPU warps) that push into each ring",
     .fallback = "cpu 1, else 8",
     .offset = FIELD(agents),
     .low = 1,
     .high = AGENTS_MOST / RINGS_MOST},
    {.name = "ms",
     .kind = OPTION_INT,
     .value = "N",
     .help = "milliseconds of each of the five timed spans",
     .fallback = "200",
     .offset = FIELD(ms),
     .low = 1,
     .high = 60000},
    {.name = "json", .kind = OPTION_FLAG, .help = "one JSON object instead of text", .offset = FIELD(json)},
};

static const struct option_table table = {
    .program = "epx bench ring",
    .usage = "epx bench ring [options]",
    .about = "Measures how fast agents push commands into rings and proxy threads take them out, over a network that\n"
             "discards everything, and how long one command takes until its answer is seen.",
    .notes = "Exit status: 0 success; 1 failure; 2 a wrong command line, or a device that is not there.\n",
    .specs = specs,
    .count = (int)(sizeof(specs) / sizeof(specs[0])),
};

/* In memory that the device's kernels reach. */
struct words {
    struct control control;
    uint64_t stop, failed;
    uint8_t pad[48];
    uint64_t counters[RINGS_MOST + 1], sent[RINGS_MOST + 1];
    uint64_t pushed[AGENTS_MOST];
};

struct bench {
    const struct options *options;
    struct device *device;
    struct device_stream *stream;
    struct words *words;
    void *rings; /* device memory: the proxies' rings, as kernels see them */
    void *times; /* device memory: [2][TRIPS] */
    struct proxy_group *proxies;
    char error[200];
};

struct trip {
    double p50, p99, push; /* us: until the answer; the push alone, p50 */
    double pause, eager;   /* us: from the push to the first look; p50 without a pause */
};

struct rate {
    double median, best; /* commands per second, all rings together */
    double cpu_ns;       /* a proxy's CPU time per command */
    double puts;         /* per command */
};

static void on_error(void *context, int status, int peer, int64_t expected, int64_t seen, const char *text)
{
    struct bench *b = context;

    snprintf(b->error, sizeof(b->error), "%s (status %d, peer %d, expected %lld, seen %lld)", text, status, peer,
             (long long)expected, (long long)seen);
}

static int complain(const char *text)
{
    fprintf(stderr, "epx bench ring: %s\n", text);
    return -1;
}

/* ---- Device, proxies, launches ------------------------------------------------------------------------------ */

static epx_status open_device(struct bench *b)
{
    epx_status status = device_open((epx_device)b->options->device, 0, &b->device);
    void *words = NULL;

    if (status == EPX_OK)
        status = b->device->ops->stream_create(b->device, &b->stream);
    if (status == EPX_OK)
        status = b->device->ops->host_alloc(b->device, sizeof(*b->words), &words);
    b->words = words;
    return status;
}

/* Rank 0 among 1 + rings ranks, all others remote: ring i serves the ranks p with p % rings == i. */
static epx_status open_proxies(struct bench *b)
{
    const int n = b->options->rings, nranks = n + 1;
    uint8_t remote[RINGS_MOST + 1];
    struct proxy_address addresses[(RINGS_MOST + 1) * RINGS_MOST];
    const struct proxy_options o = {.nranks = nranks,
                                    .threads = n,
                                    .ring_slots = RING_SLOTS,
                                    .timeout_ms = TRIP_TIMEOUT_MS,
                                    .net = &net_null_ops,
                                    .remote = remote,
                                    .heap_bytes = HEAP_BYTES,
                                    .device_kind = b->device->ops->kind,
                                    .device = b->device,
                                    .counters = b->words->counters,
                                    .sent = b->words->sent,
                                    .kinds = 1,
                                    .slots = 1,
                                    .bell = &b->words->control.bell,
                                    .on_error = on_error,
                                    .context = b};
    epx_status status;
    int i;

    memset(remote, 1, sizeof(remote));
    status = proxy_open(&o, &b->proxies);
    if (status == EPX_OK)
        status = proxy_addresses(b->proxies, addresses);
    if (status != EPX_OK)
        return status;
    for (i = n; i < nranks * n; i++)
        addresses[i] = addresses[i % n];
    return proxy_connect(b->proxies, addresses);
}

static epx_status open_memory(struct bench *b)
{
    const struct device_ops *ops = b->device->ops;
    const size_t each = sizeof(struct ring_dev);
    epx_status status = ops->mem_alloc(b->device, RINGS_MOST * each, &b->rings);
    int i;

    if (status == EPX_OK)
        status = ops->mem_alloc(b->device, 2 * TRIPS * sizeof(uint64_t), &b->times);
    for (i = 0; i < b->options->rings && status == EPX_OK; i++)
        status = ops->copy(b->device, (char *)b->rings + (size_t)i * each, proxy_ring(b->proxies, i), each);
    return status;
}

static void close_bench(struct bench *b)
{
    if (!b->device)
        return;
    if (b->stream)
        b->device->ops->stream_destroy(b->device, b->stream);
    if (proxy_close(b->proxies) != EPX_OK)
        return; /* a proxy was left behind, and uses what follows */
    if (b->rings)
        b->device->ops->mem_free(b->device, b->rings);
    if (b->times)
        b->device->ops->mem_free(b->device, b->times);
    if (b->words)
        b->device->ops->host_free(b->device, b->words);
    b->device->ops->close(b->device);
}

static epx_status launch(struct bench *b, int contiguous, int trips, uint64_t pause_ns)
{
    struct words *w = b->words;
    const struct ring_bench_params params = {.control = &w->control,
                                             .rings = b->rings,
                                             .nrings = b->options->rings,
                                             .contiguous = contiguous,
                                             .trips = trips,
                                             .bytes = BYTES,
                                             .pause_ns = pause_ns,
                                             .heap_bytes = HEAP_BYTES,
                                             .timeout_ns = (uint64_t)TRIP_TIMEOUT_MS * 1000000u,
                                             .stop = &w->stop,
                                             .sent = w->sent,
                                             .pushed = w->pushed,
                                             .failed = &w->failed,
                                             .times = b->times};

    memset(w->pushed, 0, sizeof(w->pushed));
    w->failed = 0;
    __atomic_store_n(&w->stop, 0, __ATOMIC_RELEASE); /* pairs with the acquire in ring_bench_rate */
    return b->device->ops->launch(b->device, b->stream, KERNEL_RING_BENCH, &params, sizeof(params),
                                  trips ? 1 : b->options->rings * b->options->agents);
}

static uint64_t cpu_ns_of(const struct bench *b)
{
    uint64_t sum = 0;
    int i;

    for (i = 0; i < b->options->rings; i++) {
        struct timespec ts = {0, 0};
        clockid_t clock;

        if (pthread_getcpuclockid(b->proxies->threads[i].pthread, &clock) == 0)
            clock_gettime(clock, &ts);
        sum += (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
    }
    return sum;
}

/* ---- Commands per second ------------------------------------------------------------------------------------ */

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void measure_spans(struct bench *b, struct rate *rate)
{
    const struct timespec span = {.tv_sec = b->options->ms / 1000, .tv_nsec = b->options->ms % 1000 * 1000000L};
    struct proxy_stats first, before, after;
    double rates[SPANS];
    uint64_t cpu, start, now;
    int i;

    nanosleep(&span, NULL); /* warm-up */
    proxy_stats_read(b->proxies, &after);
    first = after;
    cpu = cpu_ns_of(b);
    now = clock_ns();
    for (i = 0; i < SPANS; i++) {
        progress_show("epx bench ring", 100.0 * i / SPANS, "commands per second");
        before = after;
        start = now;
        nanosleep(&span, NULL);
        proxy_stats_read(b->proxies, &after);
        now = clock_ns();
        rates[i] = (double)(after.commands - before.commands) * 1e9 / (double)(now - start);
    }
    rate->cpu_ns = (double)(cpu_ns_of(b) - cpu) / (double)(after.commands - first.commands);
    rate->puts = (double)(after.puts - first.puts) / (double)(after.commands - first.commands);
    qsort(rates, SPANS, sizeof(rates[0]), compare_doubles);
    rate->median = rates[SPANS / 2];
    rate->best = rates[SPANS - 1];
}

/* Everything that was pushed must have been taken and answered. */
static int check_all_taken(struct bench *b, uint64_t pushed, uint64_t before)
{
    struct proxy_stats stats;

    if (proxy_quiet(b->proxies) != EPX_OK)
        return complain(epx_last_error());
    proxy_stats_read(b->proxies, &stats);
    if (b->error[0] || stats.refused || stats.dropped || stats.commands - before != pushed) {
        fprintf(stderr, "epx bench ring: %llu commands were pushed, %llu taken; %s\n", (unsigned long long)pushed,
                (unsigned long long)(stats.commands - before), b->error);
        return -1;
    }
    return 0;
}

static int measure_rate(struct bench *b, int contiguous, struct rate *rate)
{
    struct proxy_stats stats;
    uint64_t pushed = 0;
    int i;

    proxy_stats_read(b->proxies, &stats);
    if (launch(b, contiguous, 0, 0) != EPX_OK)
        return complain(epx_last_error());
    measure_spans(b, rate);
    __atomic_store_n(&b->words->stop, 1, __ATOMIC_RELEASE); /* pairs with the acquire in ring_bench_rate */
    if (b->device->ops->stream_sync(b->device, b->stream) != EPX_OK)
        return complain(epx_last_error());
    for (i = 0; i < AGENTS_MOST; i++)
        pushed += b->words->pushed[i];
    if (b->words->failed)
        return complain("a push did not find room in time");
    return check_all_taken(b, pushed, stats.commands);
}

/* ---- Round trip --------------------------------------------------------------------------------------------- */

static int measure_paused(struct bench *b, int trips, uint64_t pause_ns, struct trip *trip)
{
    static uint64_t times[2 * TRIPS];
    const size_t bytes = (size_t)(trips + trips / RING_BENCH_KEPT) * sizeof(times[0]);

    if (launch(b, 0, trips, pause_ns) != EPX_OK || b->device->ops->stream_sync(b->device, b->stream) != EPX_OK ||
        b->device->ops->copy(b->device, times, b->times, bytes) != EPX_OK)
        return complain(epx_last_error());
    for (int i = 0; i < trips; i++)
        if (times[i] == 0) {
            fprintf(stderr, "epx bench ring: command %d was not answered within %d ms\n", i, TRIP_TIMEOUT_MS);
            return -1;
        }
    trip->p50 = bench_percentile(times, trips, 50) / 1e3;
    trip->p99 = bench_percentile(times, trips, 99) / 1e3;
    trip->push = bench_percentile(times + trips, trips / RING_BENCH_KEPT, 50) / 1e3;
    trip->pause = (double)pause_ns / 1e3;
    return 0;
}

/* How many trips take TRIPS_MS, by what a few take; or -1. */
static int choose_trips(struct bench *b)
{
    const uint64_t start = clock_ns();
    struct trip probe = {0};
    double each;

    if (measure_paused(b, TRIPS_LEAST, 0, &probe) != 0)
        return -1;
    each = (double)(clock_ns() - start) / TRIPS_LEAST;
    if (each * TRIPS <= TRIPS_MS * 1e6)
        return TRIPS;
    if (each * TRIPS_LEAST >= TRIPS_MS * 1e6)
        return TRIPS_LEAST;
    return (int)(TRIPS_MS * 1e6 / each) / RING_BENCH_KEPT * RING_BENCH_KEPT;
}

/* The best of several pauses before the first look, which on a GPU is a trip across the bus of its own. */
static int measure_trips(struct bench *b, struct trip *trip)
{
    const uint64_t most = b->device->ops->kind == EPX_DEVICE_CPU ? 0 : PAUSE_MOST_NS;
    const int trips = choose_trips(b);
    double eager = 0;

    if (trips < 0)
        return -1;
    for (uint64_t pause = 0; pause <= most; pause += PAUSE_STEP_NS) {
        struct trip one = {0};
        if (measure_paused(b, trips, pause, &one) != 0)
            return -1;
        eager = pause == 0 ? one.p50 : eager;
        if (pause == 0 || one.p50 < trip->p50)
            *trip = one;
    }
    trip->eager = eager;
    return 0;
}

/* ---- Command line ------------------------------------------------------------------------------------------- */

static void print_rate(const char *name, const struct rate *r, int rings)
{
    printf("  %-11s %8.2f M/s  (best span %.2f; %.2f per ring)   %6.1f ns of a proxy's CPU time each   %.3f puts per "
           "command\n",
           name, r->median / 1e6, r->best / 1e6, r->median / 1e6 / rings, r->cpu_ns, r->puts);
}

static int run(struct bench *b)
{
    struct rate scattered = {0}, contiguous = {0};
    const struct options *o = b->options;
    struct trip trip = {0};

    if (measure_trips(b, &trip) != 0 || measure_rate(b, 0, &scattered) != 0 || measure_rate(b, 1, &contiguous) != 0)
        return EXIT_FAILED;
    progress_end();
    if (o->json) {
        printf("{\"op\":\"ring\",\"device\":\"%s\",\"rings\":%d,\"agents\":%d,\"push\":%d,\"cmds_per_s\":%.0f,"
               "\"cmds_per_s_best\":%.0f,\"merged_cmds_per_s\":%.0f,\"merged_cmds_per_s_best\":%.0f,"
               "\"proxy_ns_per_cmd\":%.1f,\"merged_proxy_ns_per_cmd\":%.1f,\"puts_per_cmd\":%.3f,"
               "\"merged_puts_per_cmd\":%.4f,\"push_us_p50\":%.2f,\"rtt_us_p50\":%.2f,\"rtt_us_p99\":%.2f,"
               "\"rtt_pause_us\":%.1f,\"rtt_eager_us_p50\":%.2f}\n",
               b->device->ops->name, o->rings, o->agents, RING_MAX_PUSH, scattered.median, scattered.best,
               contiguous.median, contiguous.best, scattered.cpu_ns, contiguous.cpu_ns, scattered.puts, contiguous.puts,
               trip.push, trip.p50, trip.p99, trip.pause, trip.eager);
        return EXIT_OK;
    }
    printf("command ring, %s: %d ring%s with %d agent%s and a proxy thread each, pushes of %d, network null\n",
           b->device->ops->name, o->rings, o->rings == 1 ? "" : "s", o->agents, o->agents == 1 ? "" : "s",
           RING_MAX_PUSH);
    print_rate("scattered", &scattered, o->rings);
    print_rate("contiguous", &contiguous, o->rings);
    printf("  round trip  %8.2f us p50, %.2f us p99   one command, until its put is answered (%.2f us of it for the "
           "push)\n",
           trip.p50, trip.p99, trip.push);
    if (trip.pause > 0)
        printf("              looks for the answer begin %.1f us after the push; at once: %.2f us p50\n", trip.pause,
               trip.eager);
    return EXIT_OK;
}

int bench_ring(int argc, char **argv)
{
    struct options options = {.device = EPX_DEVICE_CPU, .rings = 1, .ms = 200};
    struct bench b = {.options = &options};
    epx_status status;
    int next, code = EXIT_FAILED;
    const enum option_result parsed = options_parse(&table, &options, argc, argv, 1, &next);

    if (parsed != OPTIONS_OK)
        return parsed == OPTIONS_HELP ? EXIT_OK : EXIT_USAGE;
    if (!options.agents)
        options.agents = options.device == EPX_DEVICE_CPU ? 1 : 8;
    status = open_device(&b);
    if (status == EPX_OK)
        status = open_proxies(&b);
    if (status == EPX_OK)
        status = open_memory(&b);
    if (status == EPX_OK)
        code = run(&b);
    else
        complain(epx_last_error());
    close_bench(&b);
    return status == EPX_ERR_UNSUPPORTED ? EXIT_USAGE : code;
}

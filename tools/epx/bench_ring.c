/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `epx bench ring`: what the way from an agent through a command ring and a proxy thread into a network costs, the
 * network itself left out (net/null.c).
 *
 *      producer i --32 commands at a time--> ring i --> proxy thread i --> null network       commands per second
 *      producer 0 --1 command--> ring 0 --> proxy 0 --> null network --> "sent" counter       round trip
 *
 * Commands are counted by the proxies over spans of time while everything runs. Two patterns: scattered, in which no two
 * commands touch and each becomes a put of its own; contiguous, in which neighbours merge.
 */
#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench.h"
#include "device/cpu/prims.h"
#include "kernel/ring.h"
#include "proxy/internal.h"
#include "util/clock.h"

enum { RINGS_MOST = 16, SPANS = 5, RING_SLOTS = 4096, TRIPS = 20000, TRIP_TIMEOUT_MS = 10000 };
#define HEAP_BYTES ((uint64_t)1 << 30)
#define BYTES 64u

static const char usage_text[] = "usage: epx bench ring [options]\n"
                                 "\n"
                                 "Measures command rings and proxy threads, over a network that forgets everything.\n"
                                 "\n"
                                 "  --device D      where commands are pushed: cpu               (cpu)\n"
                                 "  --rings N       rings, each with a producer and a proxy      (1)\n"
                                 "  --ms M          length of each of the five timed spans       (200)\n"
                                 "  --json          one object instead of a table\n";

struct options {
    int rings, ms, json;
};

struct producer {
    struct agent agent;
    const struct ring_dev *ring;
    int peer; /* the one that this ring serves */
    int contiguous;
    const int *stop;
    uint64_t pushed;
    enum wait_result result;
    pthread_t thread;
};

struct bench {
    const struct options *options;
    struct proxy_group *proxies;
    uint64_t *counters, *sent;
    struct doorbell bell;
    char error[200];
};

struct rate {
    double median, best; /* commands per second and proxy thread */
    double cpu_ns;       /* a proxy's CPU time per command */
    double puts;         /* per command */
};

static void on_error(void *context, int status, int peer, int64_t expected, int64_t seen, const char *text)
{
    struct bench *b = context;

    snprintf(b->error, sizeof(b->error), "%s (status %d, peer %d, expected %lld, seen %lld)", text, status, peer,
             (long long)expected, (long long)seen);
}

/* ---- Proxies and producers ---------------------------------------------------------------------------------- */

/* Rank 0 among 1 + rings ranks, all others remote: ring i serves the ranks p with p % rings == i. */
static int open_proxies(struct bench *b)
{
    const int n = b->options->rings, nranks = n + 1;
    uint8_t remote[RINGS_MOST + 1];
    struct proxy_card cards[(RINGS_MOST + 1) * RINGS_MOST];
    const struct proxy_options o = {.nranks = nranks,
                                    .threads = n,
                                    .ring_slots = RING_SLOTS,
                                    .timeout_ms = TRIP_TIMEOUT_MS,
                                    .net = &net_null_ops,
                                    .remote = remote,
                                    .heap_bytes = HEAP_BYTES,
                                    .device_kind = EPX_DEVICE_CPU,
                                    .counters = b->counters,
                                    .sent = b->sent,
                                    .kinds = 1,
                                    .slots = 1,
                                    .bell = &b->bell,
                                    .on_error = on_error,
                                    .context = b};
    int i;

    memset(remote, 1, sizeof(remote));
    if (proxy_open(&o, &b->proxies) != EPX_OK || proxy_cards(b->proxies, cards) != EPX_OK)
        return -1;
    for (i = n; i < nranks * n; i++)
        cards[i] = cards[i % n];
    return proxy_connect(b->proxies, cards, 0) == EPX_OK ? 0 : -1;
}

static struct agent make_agent(struct bench *b)
{
    return (struct agent){
        .count = 1, .env = &cpu_thread_env, .bell = &b->bell, .timeout_ns = (uint64_t)TRIP_TIMEOUT_MS * 1000000u};
}

static void *producer_main(void *arg)
{
    struct producer *p = arg;
    const uint64_t stride = p->contiguous ? BYTES : 2 * BYTES;
    struct command cmds[RING_MAX_PUSH];
    uint64_t offset = 0;

    while (!__atomic_load_n(p->stop, __ATOMIC_RELAXED) && p->result == WAIT_OK) {
        int i;

        for (i = 0; i < RING_MAX_PUSH; i++, offset += stride) {
            if (offset + stride > HEAP_BYTES)
                offset = 0;
            cmds[i] = command_pack((uint32_t)p->peer, 0, offset, offset, BYTES);
        }
        p->result = ag_push(&p->agent, p->ring, cmds, RING_MAX_PUSH);
        p->pushed += RING_MAX_PUSH;
    }
    return NULL;
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
        before = after;
        start = now;
        nanosleep(&span, NULL);
        proxy_stats_read(b->proxies, &after);
        now = clock_ns();
        rates[i] = (double)(after.commands - before.commands) * 1e9 / (double)(now - start) / b->options->rings;
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

    if (proxy_quiet(b->proxies) != EPX_OK) {
        fprintf(stderr, "epx bench: %s\n", epx_last_error());
        return -1;
    }
    proxy_stats_read(b->proxies, &stats);
    if (b->error[0] || stats.refused || stats.dropped || stats.commands - before != pushed) {
        fprintf(stderr, "epx bench: %llu commands were pushed, %llu taken; %s\n", (unsigned long long)pushed,
                (unsigned long long)(stats.commands - before), b->error);
        return -1;
    }
    return 0;
}

static int measure_rate(struct bench *b, int contiguous, struct rate *rate)
{
    struct producer producers[RINGS_MOST];
    struct proxy_stats stats;
    uint64_t pushed = 0;
    int i, n, stop = 0, failed = 0;

    proxy_stats_read(b->proxies, &stats);
    for (n = 0; n < b->options->rings; n++) {
        const int ring = (n + 1) % b->options->rings;

        producers[n] = (struct producer){.agent = make_agent(b),
                                         .ring = proxy_ring(b->proxies, ring),
                                         .peer = n + 1,
                                         .contiguous = contiguous,
                                         .stop = &stop};
        if (pthread_create(&producers[n].thread, NULL, producer_main, &producers[n]) != 0)
            break;
    }
    if (n == b->options->rings)
        measure_spans(b, rate);
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (i = 0; i < n; i++) {
        pthread_join(producers[i].thread, NULL);
        pushed += producers[i].pushed;
        failed |= producers[i].result != WAIT_OK;
    }
    if (n < b->options->rings || failed) {
        fprintf(stderr, "epx bench: %s\n", failed ? "a push did not find room in time" : "cannot start threads");
        return -1;
    }
    return check_all_taken(b, pushed, stats.commands);
}

/* ---- Round trip --------------------------------------------------------------------------------------------- */

static int measure_trips(struct bench *b, double *p50, double *p99)
{
    static uint64_t times[TRIPS];
    struct agent agent = make_agent(b);
    const struct ring_dev *ring = proxy_ring(b->proxies, 1 % b->options->rings);
    uint64_t *sent = &b->sent[1], target = __atomic_load_n(sent, __ATOMIC_ACQUIRE), start = 0, now;
    int i;

    for (i = 0; i < TRIPS; i++) {
        const struct command c = command_pack(1, 0, 0, 0, BYTES);

        start = clock_ns();
        if (ag_push(&agent, ring, &c, 1) != WAIT_OK)
            return -1;
        target++;
        /* Acquire: pairs with the release in window_answered. As a GPU waits: looking again and again. */
        do
            now = clock_ns();
        while (__atomic_load_n(sent, __ATOMIC_ACQUIRE) != target && now - start < (uint64_t)TRIP_TIMEOUT_MS * 1000000u);
        times[i] = now - start;
    }
    if (__atomic_load_n(sent, __ATOMIC_ACQUIRE) != target) {
        fprintf(stderr, "epx bench: a command was not answered within %d ms\n", TRIP_TIMEOUT_MS);
        return -1;
    }
    *p50 = bench_percentile(times, TRIPS, 50) / 1e3;
    *p99 = bench_percentile(times, TRIPS, 99) / 1e3;
    return 0;
}

/* ---- Command line ------------------------------------------------------------------------------------------- */

static void print_rate(const char *name, const struct rate *r)
{
    printf("  %-11s %8.2f M/s  (best span %.2f)   %6.1f ns of a proxy's CPU time each   %.3f puts per command\n", name,
           r->median / 1e6, r->best / 1e6, r->cpu_ns, r->puts);
}

static int run(struct bench *b)
{
    struct rate scattered = {0}, contiguous = {0};
    double p50 = 0, p99 = 0;

    if (measure_trips(b, &p50, &p99) != 0 || measure_rate(b, 0, &scattered) != 0 ||
        measure_rate(b, 1, &contiguous) != 0)
        return BENCH_EXIT_FAILED;
    if (b->options->json) {
        printf("{\"op\":\"ring\",\"device\":\"cpu\",\"rings\":%d,\"push\":%d,\"cmds_per_s\":%.0f,"
               "\"cmds_per_s_best\":%.0f,\"merged_cmds_per_s\":%.0f,\"merged_cmds_per_s_best\":%.0f,"
               "\"proxy_ns_per_cmd\":%.1f,\"merged_proxy_ns_per_cmd\":%.1f,\"puts_per_cmd\":%.3f,"
               "\"merged_puts_per_cmd\":%.4f,\"rtt_us_p50\":%.2f,\"rtt_us_p99\":%.2f}\n",
               b->options->rings, RING_MAX_PUSH, scattered.median, scattered.best, contiguous.median, contiguous.best,
               scattered.cpu_ns, contiguous.cpu_ns, scattered.puts, contiguous.puts, p50, p99);
        return BENCH_EXIT_OK;
    }
    printf("command ring, cpu: %d ring%s with a producer and a proxy thread each, pushes of %d, network null\n",
           b->options->rings, b->options->rings == 1 ? "" : "s", RING_MAX_PUSH);
    print_rate("scattered", &scattered);
    print_rate("contiguous", &contiguous);
    printf("  round trip  %8.2f us p50, %.2f us p99   one command, until its put is answered\n", p50, p99);
    return BENCH_EXIT_OK;
}

static int parse_number(const char *name, const char *text, int low, int high, int *value)
{
    char *end;
    long n;

    errno = 0;
    n = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || n < low || n > high) {
        fprintf(stderr, "epx bench: --%s is '%s'; expected a number from %d to %d\n", name, text, low, high);
        return -1;
    }
    *value = (int)n;
    return 0;
}

/* 0, 1 when only help was asked for (and given), or -1 after a message. */
static int parse(struct options *o, int argc, char **argv)
{
    static const struct option long_options[] = {
        {"device", required_argument, NULL, 'd'}, {"rings", required_argument, NULL, 'r'},
        {"ms", required_argument, NULL, 'm'},     {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},         {NULL, 0, NULL, 0}};
    int id, bad = 0;

    *o = (struct options){.rings = 1, .ms = 200};
    optind = 1;
    while (!bad && (id = getopt_long(argc, argv, "h", long_options, NULL)) != -1) {
        if (id == 'h') {
            fputs(usage_text, stdout);
            return 1;
        } else if (id == 'r') {
            bad = parse_number("rings", optarg, 1, RINGS_MOST, &o->rings);
        } else if (id == 'm') {
            bad = parse_number("ms", optarg, 1, 60000, &o->ms);
        } else if (id == 'j') {
            o->json = 1;
        } else if (id != 'd') {
            bad = -1; /* getopt has said what is wrong */
        } else if (strcmp(optarg, "cpu") != 0) {
            fprintf(stderr, "epx bench: --device is '%s'; rings are measured on cpu alone\n", optarg);
            bad = -1;
        }
    }
    if (!bad && optind < argc) {
        fprintf(stderr, "epx bench: '%s' is one word too many\n", argv[optind]);
        bad = -1;
    }
    return bad;
}

int bench_ring(int argc, char **argv)
{
    struct options options;
    struct bench b = {.options = &options};
    int code = parse(&options, argc, argv);

    if (code != 0)
        return code > 0 ? BENCH_EXIT_OK : BENCH_EXIT_USAGE;
    b.counters = calloc((size_t)options.rings + 1, sizeof(*b.counters));
    b.sent = calloc((size_t)options.rings + 1, sizeof(*b.sent));
    code = BENCH_EXIT_FAILED;
    if (b.counters && b.sent && open_proxies(&b) == 0)
        code = run(&b);
    else
        fprintf(stderr, "epx bench: %s\n", epx_last_error());
    proxy_close(b.proxies);
    free(b.sent);
    free(b.counters);
    return code;
}

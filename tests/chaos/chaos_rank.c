/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank of a job to which chaos.py does bad things (docs/chaos.md), or one stranger.
 *
 *     chaos_rank TABLE MODE MASK TIMEOUT_MS       MODE: ll, ht; MASK: enable_mask; 2: ranks will be masked
 *     chaos_rank forge ADDRESS PORT...            writes of nothing with completion data, as ranks do for signals
 *     chaos_rank forge ADDRESS                    the same at every port of this host where somebody begins to listen
 *
 *   rank                                                 chaos.py
 *   "ready" after the first good round                   does something
 *   rounds, each checked, until table.last;              sets table.last when nothing was to fail
 *     or "fault STATUS PEER MS TEXT"             --->    judges it; mends what can be mended
 *   waits for table.go                           <---    1: recover, -1: end
 *   epx_group_error_clear, more rounds
 *     MASK 2: "masked RANK", and rounds without it until table.last; then "rests", waits for table.go as after a
 *     fault, and all recover by epx_mask_clean
 *   "recovered RANKS"; "refused COUNT": what strangers sent; "ok" or "failed TEXT" comes last
 *
 * With CHAOS_LATE_MS a rank is slow to connect, so that a stranger who is quick has time to write before the last rank
 * comes, after which it is shut out. chaos_rank.py is the same in Python, and not slow.
 */
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "group/abort.h"
#include "util/clock.h"
#include "tests/lib/fixture.h"
#include "tests/lib/forge.h"

enum { MOST_RANKS = 16, AFTER_ROUNDS = 8, AFTER = 100000, GO_S = 60 };

struct table { /* chaos.py has the same, as 64-bit numbers */
    atomic_llong last, go, round[MOST_RANKS];
};

struct options {
    int low, mask, leaves;
};

static void report(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void report(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    fflush(stdout);
}

static int late_ms;

/* In place of libc's, for libfabric too. */
__attribute__((visibility("default"))) int connect(int fd, const struct sockaddr *to, socklen_t bytes)
{
    if (late_ms)
        usleep((useconds_t)late_ms * 1000);
    return (int)syscall(SYS_connect, fd, to, bytes);
}

/* Sockets and memory files: what a group must not leave behind. */
static int count_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    const struct dirent *entry;
    int count = 0;

    while (folder && (entry = readdir(folder))) {
        char link[64] = "";
        const ssize_t n = readlinkat(dirfd(folder), entry->d_name, link, sizeof(link) - 1);
        if (n > 0)
            count += !strncmp(link, "socket:", 7) || !strncmp(link, "/memfd:", 7);
    }
    if (folder)
        closedir(folder);
    return count;
}

/* ---- Low latency with masks: an operation that has masked a rank goes on, and an error tells of it -------------- */

/* The operation that was issued has ended, and the group has not failed. *masked: who was masked meanwhile, or -1. */
static int end_operation(struct fixture *s, epx_status status, int *masked)
{
    int32_t mask[MOST_RANKS];

    (void)epx_stream_sync(s->group, NULL); /* an error that told of a masked rank stays */
    if (status != EPX_OK || epx_mask_query(s->group, mask, NULL) != EPX_OK)
        return fixture_fail(s, "low latency with masks");
    (void)epx_stream_sync(s->group, NULL);
    *masked = -1;
    for (int r = 0; r < s->nranks; r++)
        if (!mask[r] && s->ll_route.active[r])
            *masked = r;
    return abort_word(s->group) ? fixture_fail(s, "low latency with masks") : 0;
}

static void go_on_without(struct fixture *s, int rank)
{
    fixture_set_active(s, rank, 0);
    report("masked %d", rank);
}

/* A dispatch that masks a rank of the node may count rows of it that it has not written; others have none of it. */
static int check_dispatch(struct fixture *s, int masked)
{
    struct mismatch m;

    if (masked < 0)
        return fixture_check_ll_dispatch(s);
    if (!oracle_check_layout(&s->ll_recv, &s->ll_info, &m)) {
        fixture_fill_ll(s);
        go_on_without(s, masked);
        return 0;
    }
    go_on_without(s, masked);
    return fixture_check_ll_dispatch(s);
}

static int one_masked_round(struct fixture *s)
{
    int masked;

    fixture_refill(s);
    if (epx_handle_update(s->ll, &s->idx, NULL, NULL) != EPX_OK)
        return fixture_fail(s, "epx_handle_update");
    if (end_operation(s, epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL), &masked) ||
        check_dispatch(s, masked))
        return -1;
    if (end_operation(s, epx_combine(s->ll, &s->ll_cin, &s->cout, NULL, NULL), &masked))
        return -1;
    if (masked >= 0)
        go_on_without(s, masked);
    return fixture_check_ll_combine(s);
}

static int one_round(struct fixture *s, const struct options *o, uint64_t *ns)
{
    const uint64_t begin = clock_ns();
    const int rc = o->leaves ? one_masked_round(s) : o->low ? fixture_ll(s) : fixture_ht(s);

    *ns = clock_ns() - begin;
    return rc;
}

/* ---- Rounds ----------------------------------------------------------------------------------------------------- */

/* 0: as many rounds as were asked for; 1: an operation failed, and a status said so; -1: wrong. */
static int rounds(struct fixture *s, const struct options *o, struct table *table)
{
    uint64_t ns = 0;

    for (long long i = 0; i < atomic_load(&table->last); i++) {
        epx_error_info info = EPX_ERROR_INFO_INIT;
        epx_status status;

        atomic_store(&table->round[s->rank], i);
        if (!one_round(s, o, &ns)) {
            if (i == 0)
                report("ready");
            continue;
        }
        status = epx_group_error(s->group, &info);
        if (status == EPX_OK || (o->leaves && !abort_word(s->group)))
            return -1; /* EPX called it good */
        report("fault %d %d %llu %s", (int)status, info.peer, (unsigned long long)(ns / 1000000), info.message);
        return 1;
    }
    if (o->leaves)
        report("rests");
    return o->leaves;
}

/* With those that are left. */
static int recover(struct fixture *s, const struct options *o, const struct table *table)
{
    const uint64_t until = clock_ns() + GO_S * 1000000000ull;
    int32_t active[MOST_RANKS];
    char names[128] = "";
    uint64_t ns;

    while (!atomic_load(&table->go) && clock_ns() < until)
        usleep(1000);
    if (atomic_load(&table->go) != 1)
        return 0;
    if ((o->leaves ? epx_mask_clean(s->group, NULL) : epx_group_error_clear(s->group)) != EPX_OK)
        return fixture_fail(s, "the recovery");
    for (int r = 0; r < s->nranks; r++)
        active[r] = 1;
    if (o->mask && (epx_mask_query(s->group, active, NULL) != EPX_OK || epx_stream_sync(s->group, NULL) != EPX_OK))
        return fixture_fail(s, "epx_mask_query");
    for (int r = 0; r < s->nranks; r++) {
        fixture_set_active(s, r, active[r]);
        if (active[r])
            snprintf(names + strlen(names), sizeof(names) - strlen(names), "%s%d", names[0] ? "," : "", r);
    }
    s->w.round = AFTER;
    for (int i = 0; i < AFTER_ROUNDS; i++)
        if (one_round(s, o, &ns))
            return -1;
    report("recovered %s", names);
    return 0;
}

static void report_refused(struct fixture *s)
{
    epx_stats stats = EPX_STATS_INIT;

    if (epx_group_stats(s->group, &stats) == EPX_OK)
        report("refused %llu", (unsigned long long)stats.net_refused);
}

static int be_rank(char **argv)
{
    const struct options o = {.low = !strcmp(argv[2], "ll"), .mask = atoi(argv[3]) != 0, .leaves = atoi(argv[3]) == 2};
    const int fd = open(argv[1], O_RDWR);
    epx_group_config config = fixture_config(atoi(argv[4]));
    const int rank = atoi(getenv("RANK")), nranks = atoi(getenv("WORLD_SIZE")), before = count_descriptors();
    struct table *table = mmap(NULL, sizeof(*table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    struct fixture *s = calloc(1, sizeof(*s));
    int rc, left;

    if (table == MAP_FAILED || !s)
        return 1;
    config.modes = o.low ? EPX_LOW_LATENCY : EPX_HIGH_THROUGHPUT;
    config.enable_mask = o.mask;
    config.ranks_per_node = getenv("EPX_RANKS_PER_NODE") ? atoi(getenv("EPX_RANKS_PER_NODE")) : 0; /* for the oracle */
    rc = fixture_open(s, rank, nranks, NULL, &config);
    if (!rc)
        rc = rounds(s, &o, table);
    if (rc > 0)
        rc = recover(s, &o, table);
    if (!rc)
        report_refused(s);
    if (rc)
        report("failed %s", s->why);
    fixture_close(s);
    /* Ranks stay connected with rank 0, for groups that the process may create later. */
    left = count_descriptors() - before - (rank ? 1 : nranks - 1);
    if (!rc && left > 0)
        report("failed %d sockets and memory files are left", left);
    else if (!rc)
        report("ok");
    free(s);
    return rc != 0;
}

/* ---- A stranger -------------------------------------------------------------------------------------------------- */

static struct forge_targets targets;

static int is_own(unsigned port)
{
    for (int fd = 0; fd < 256; fd++) {
        struct sockaddr_in at = {0};
        socklen_t bytes = sizeof(at);
        if (!getsockname(fd, (struct sockaddr *)&at, &bytes) && at.sin_family == AF_INET && ntohs(at.sin_port) == port)
            return 1;
    }
    return 0;
}

/* The kernel tells everybody of a host who listens there. */
static void *watch(void *arg)
{
    static uint8_t seen[65536];
    char line[256];
    unsigned port, state;

    for (;; usleep(200)) {
        FILE *file = fopen("/proc/net/tcp", "r");
        while (file && fgets(line, sizeof(line), file)) {
            if (sscanf(line, " %*d: %*8x:%4x %*8x:%*4x %2x", &port, &state) != 2 || state != 0x0a || seen[port])
                continue;
            seen[port] = 1;
            if (!is_own(port))
                forge_add(&targets, (int)port);
        }
        if (file)
            fclose(file);
    }
    return arg;
}

/* Returns only if it cannot. */
static int forge(int argc, char **argv)
{
    pthread_t watcher;

    inet_pton(AF_INET, argv[2], &targets.host);
    for (int i = 3; i < argc; i++)
        forge_add(&targets, atoi(argv[i]));
    if (argc == 3 && pthread_create(&watcher, NULL, watch, NULL))
        return 1;
    forge_signals(&targets, FORGE_PORTS, 8);
    return EPX_HAVE_OFI;
}

int main(int argc, char **argv)
{
    if (argc >= 3 && !strcmp(argv[1], "forge"))
        return forge(argc, argv);
    late_ms = getenv("CHAOS_LATE_MS") ? atoi(getenv("CHAOS_LATE_MS")) : 0;
    if (argc == 5 && getenv("RANK") && getenv("WORLD_SIZE"))
        return be_rank(argv);
    fprintf(stderr, "usage: chaos_rank TABLE ll|ht MASK TIMEOUT_MS, or chaos_rank forge ADDRESS [PORT]...\n");
    return 2;
}

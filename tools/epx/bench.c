/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver of `epx bench`.
 *
 *      start EPX's ranks, and mpirun if asked for           they set up, then sleep on a futex
 *      check                                                every team, every variant, once
 *      round 1..n:  memcpy | EPX | MPI variant 0 | 1 | ... | fi_write   in turns, because a machine's speed drifts
 *                   (the last round's results are checked)
 *      check                                                EPX again, with routing and data that are new
 *      quit, percentiles, report
 */
#include "bench.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench_ofi.h"
#include "bench_session.h"
#include "commands.h"
#include "net/name.h"
#include "progress.h"
#include "util/clock.h"

enum { LATER_MS = 2000, END_LIMIT_MS = 10000, FAILED_LIMIT_MS = 1000 };

struct driver {
    const struct bench_options *options;
    struct bench_shm *shm;
    char shm_path[64];
    pid_t pid[BENCH_TEAMS]; /* 0 = not started */
    int mpi_log;            /* what mpirun said */
    struct bench_report report;
    int quiet;     /* no table */
    char what[64]; /* what is done just now; "": the ranks know */
    int rounds_done;
};

static const char *const team_names[BENCH_TEAMS] = {"EPX", "MPI"};

/* A team whose watcher has ended will not finish anything any more. */
static int team_lost(struct driver *c, int team)
{
    int code = c->pid[team] > 0 ? bench_team_poll(c->pid[team]) : -1;

    if (code < 0)
        return 0;
    c->pid[team] = 0;
    bench_shm_fail(c->shm, BENCH_ERROR, "the %s ranks ended too early, with exit code %d", team_names[team], code);
    return 1;
}

/* Shows how far the run is. Rounds are most of it; with --timing events the ranks say what they do. */
static void show_progress(const struct driver *c)
{
    static const char *const stages[] = {"starting ranks", "checking", "capturing graphs", "measuring", "replaying"};
    const int rounds = c->report.rounds;

    if (c->what[0] == '\0')
        progress_show("epx bench", -1, "%s", stages[__atomic_load_n(&c->shm->stage, __ATOMIC_RELAXED)]);
    else
        progress_show("epx bench", rounds > 0 ? 100.0 * c->rounds_done / rounds : 0, "%s", c->what);
}

static void show_stage(struct driver *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void show_stage(struct driver *c, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(c->what, sizeof(c->what), format, args);
    va_end(args);
    show_progress(c);
}

/* Gives a command to a team and waits until it is done, as long as its ranks make progress. 0 or -1. */
static int drive(struct driver *c, enum bench_team_id team, const struct bench_command *command)
{
    /* The ranks' own deadlines come first: their messages say more. */
    const uint64_t limit = ((uint64_t)c->options->config.timeout_ms + LATER_MS) * 1000000u;
    uint64_t seen, now, last = clock_ns();
    int done;

    bench_shm_order(c->shm, team, command);
    seen = bench_shm_progress(c->shm, team);
    while ((done = bench_shm_poll_done(c->shm, team, 100)) == 0) {
        show_progress(c);
        if (team_lost(c, (int)team))
            return -1;
        now = clock_ns();
        if (bench_shm_progress(c->shm, team) != seen) {
            seen = bench_shm_progress(c->shm, team);
            last = now;
        } else if (now - last > limit) {
            bench_shm_fail_late(c->shm, team, c->options->config.timeout_ms + LATER_MS);
            return -1;
        }
    }
    return done > 0 ? 0 : -1;
}

static int mpi_variants(const struct bench_team *team)
{
    int op, most = 1;

    for (op = 0; op < BENCH_OPS; op++)
        most = team->variants[op] > most ? team->variants[op] : most;
    return most;
}

/* One untimed iteration: with --check of every team and variant, and always as a first touch of all memory. */
static int drive_check(struct driver *c, uint64_t seed, int teams)
{
    struct bench_command command = {.seed = seed, .iters = 1, .first = -1, .verify = c->options->check};

    show_stage(c, "%s, seed %llu", c->options->check ? "checking" : "warming up", (unsigned long long)seed);
    if (drive(c, BENCH_EPX, &command) != 0)
        return -1;
    if (teams < 2)
        return 0;
    do {
        if (drive(c, BENCH_MPI, &command) != 0)
            return -1;
    } while (++command.variant < mpi_variants(&c->shm->team[BENCH_MPI]));
    return 0;
}

/* Of a network name that check_combination has accepted; "" = EPX_OFI_PROVIDER, or automatic. */
static const char *ofi_provider(const struct bench_config *config)
{
    struct net_name name;

    return net_name_parse(config->net, &name) == EPX_OK ? name.provider : "";
}

/* As many bytes and threads as EPX's dispatch has; the processes exist for this round only. 0 or -1. */
static int measure_ofi(struct driver *c, int iters)
{
    const struct bench_config *config = &c->options->config;
    struct bench_ofi_rounds *ofi = c->report.ofi;
    const int pairs = (config->ranks + 1) / 2;
    const double bytes = (double)c->report.traffic.remote * bench_row_bytes(config, BENCH_DISPATCH) / (2 * pairs);
    int size;

    iters = iters < OFI_BASELINE_MAX_REPEATS ? iters : OFI_BASELINE_MAX_REPEATS;
    for (size = 0; size < BENCH_OFI_SIZES && bytes >= 1; size++)
        if (ofi_baseline(ofi_provider(config), (uint64_t)bytes, ofi->message_bytes[size], ofi->threads, pairs, iters,
                         ofi->GBps[size] + ofi->count) != 0) {
            bench_shm_fail(c->shm, BENCH_ERROR, "the loop around fi_write could not be measured");
            return -1;
        }
    ofi->count += bytes >= 1 ? iters : 0;
    return 0;
}

static void end_ofi(struct bench_ofi_rounds *ofi)
{
    int size;

    for (size = 0; size < BENCH_OFI_SIZES; size++)
        ofi->p50[size] = bench_percentile_double(ofi->GBps[size], ofi->count, 50);
}

/* Messages of a row, and of as much as proxies make of contiguous rows. */
static void begin_ofi(struct driver *c)
{
    static struct bench_ofi_rounds ofi;
    const char *threads = getenv("EPX_PROXY_THREADS");

    ofi.message_bytes[BENCH_OFI_ROWS] = (uint32_t)bench_row_bytes(&c->options->config, BENCH_DISPATCH);
    ofi.message_bytes[BENCH_OFI_LARGE] = 1 << 20;
    ofi.threads = threads != NULL && atoi(threads) > 0 ? atoi(threads) : 1;
    c->report.ofi = &ofi;
}

static int drive_mpi_round(struct driver *c, int round, struct bench_command *command)
{
    const int variants = mpi_variants(&c->shm->team[BENCH_MPI]);

    for (command->variant = 0; command->variant < variants; command->variant++) {
        show_stage(c, "round %d of %d, MPI variant %d of %d", round + 1, c->report.rounds, command->variant + 1,
                   variants);
        if (drive(c, BENCH_MPI, command) != 0)
            return -1;
    }
    return 0;
}

/* The same with tracing on, in turns with the rounds without it: phases, and what tracing costs. */
static int drive_traced(struct driver *c, struct bench_command command)
{
    command.trace = 1;
    command.variant = 1;
    return drive(c, BENCH_EPX, &command);
}

static void measure_ceilings(struct driver *c, int round)
{
    show_stage(c, "round %d of %d, memcpy", round + 1, c->report.rounds);
    bench_memcpy_measure(&c->report.ceiling);
    show_stage(c, "round %d of %d, bound", round + 1, c->report.rounds);
    bench_bound_measure(&c->report.ceiling, &c->report);
}

static int drive_round(struct driver *c, int round, int first, int iters)
{
    const struct bench_options *o = c->options;
    struct bench_command command = {.seed = o->config.seed, .warmup = o->warmup, .iters = iters, .first = first};
    int last = first + iters == o->iters;

    if (!o->joined) /* other ranks of this machine would measure at the same time */
        measure_ceilings(c, round);
    show_stage(c, "round %d of %d, EPX", round + 1, c->report.rounds);
    command.verify = o->check && last;
    if (drive(c, BENCH_EPX, &command) != 0)
        return -1;
    command.verify = 0;
    if (o->phases && drive_traced(c, command) != 0)
        return -1;
    if (o->vs_mpi && drive_mpi_round(c, round, &command) != 0)
        return -1;
    if (!o->vs_ofi)
        return 0;
    show_stage(c, "round %d of %d, fi_write", round + 1, c->report.rounds);
    return measure_ofi(c, iters);
}

static int drive_all(struct driver *c)
{
    const struct bench_options *o = c->options;
    int round, first = 0;

    c->report.rounds = o->iters < 5 ? o->iters : 5;
    if (drive_check(c, o->config.seed, o->vs_mpi ? 2 : 1) != 0)
        return -1;
    for (round = 0; round < c->report.rounds; round++) {
        int next = (int)((int64_t)o->iters * (round + 1) / c->report.rounds);

        if (drive_round(c, round, first, next - first) != 0)
            return -1;
        c->rounds_done++;
        first = next;
    }
    return o->check ? drive_check(c, o->config.seed + 1, 1) : 0;
}

/* --timing events, --replays and `layer`: the ranks do everything by themselves. */
static int drive_events(struct driver *c)
{
    const struct bench_command command = {.seed = c->options->config.seed};

    return drive(c, BENCH_EPX, &command);
}

static int is_events(const struct driver *c)
{
    return c->options->config.events || c->options->config.replays > 0 || c->options->config.layer;
}

static int start_teams(struct driver *c)
{
    const struct bench_config *config = &c->options->config;

    c->shm = bench_shm_create(config, c->shm_path, sizeof(c->shm_path));
    if (c->shm == NULL) {
        fprintf(stderr, "epx bench: cannot make shared memory for the measurements: %s%s\n", strerror(errno),
                errno == EFBIG ? "; allow larger files (ulimit -f)" : "");
        return -1;
    }
    if (c->options->joined) {
        c->shm->here = 1;
        return bench_join_start(c->shm_path, c->options->rank, config->timeout_ms);
    }
    if (c->options->vs_mpi) {
        c->mpi_log = memfd_create("epx-bench-mpi", MFD_CLOEXEC);
        if ((c->pid[BENCH_MPI] = bench_team_start_mpi(config, c->shm_path, c->mpi_log)) < 0)
            return -1;
    }
    if ((c->pid[BENCH_EPX] = bench_team_start_epx(config, c->shm_path)) < 0)
        return -1;
    return 0;
}

static void end_teams(struct driver *c)
{
    struct bench_command quit = {.quit = 1};
    int team;

    for (team = 0; team < BENCH_TEAMS; team++)
        if (c->pid[team] > 0 || (c->options->joined && team == BENCH_EPX))
            bench_shm_order(c->shm, (enum bench_team_id)team, &quit);
    if (c->options->joined && bench_join_end(bench_shm_stopped(c->shm) ? FAILED_LIMIT_MS : END_LIMIT_MS))
        bench_shm_fail(c->shm, BENCH_ERROR, "rank %d was measured, but did not end", c->options->rank);
    for (team = 0; team < BENCH_TEAMS; team++) {
        const int failed = bench_shm_stopped(c->shm);
        const int code = c->pid[team] > 0 ? bench_team_end(c->pid[team], failed ? FAILED_LIMIT_MS : END_LIMIT_MS) : 0;

        /* A rank that crashes while it ends makes the run a failure, too. */
        if (!failed && code != 0 && team == BENCH_EPX)
            bench_shm_fail(c->shm, BENCH_ERROR, "the EPX ranks were measured, but ended with exit code %d", code);
    }
}

/* The output of mpirun, which may explain a failure. */
static void show_mpi_log(int fd)
{
    char text[4096];
    ssize_t n;

    lseek(fd, 0, SEEK_SET);
    while ((n = read(fd, text, sizeof(text))) > 0)
        fwrite(text, 1, (size_t)n, stderr);
}

static void fill_rows(struct driver *c)
{
    struct bench_report *r = &c->report;
    int op, first = c->options->config.mode == EPX_LOW_LATENCY ? BENCH_DISPATCH : BENCH_UPDATE;

    if (r->ofi != NULL)
        end_ofi(r->ofi);
    for (op = first; op < BENCH_OPS; op++)
        bench_row_fill(&r->rows[r->nrows++], c->shm, (enum bench_op)op, r);
}

static void print_report(struct driver *c)
{
    struct bench_report *r = &c->report;

    if (!is_events(c))
        fill_rows(c);
    (c->options->config.layer ? bench_layer_report_json
     : is_events(c)           ? bench_event_report_json
                              : bench_report_json)(r);
    fflush(r->to);
    if (c->quiet || c->options->json)
        return;
    (c->options->config.layer ? bench_layer_report_table
     : is_events(c)           ? bench_event_report_table
                              : bench_report_table)(r);
}

/* Prints what failed; the exit status. */
static int report_failure(struct driver *c)
{
    struct bench_shm *shm = c->shm;

    fprintf(stderr, "epx bench: %s%s\n", shm->failure == BENCH_MISMATCH ? "check failed: " : "", shm->message);
    if (c->options->vs_mpi && strstr(shm->message, "MPI") != NULL)
        show_mpi_log(c->mpi_log);
    if (shm->failure == BENCH_MISMATCH && c->options->json) {
        c->report.failed = 1;
        print_report(c);
    }
    return shm->failure == BENCH_UNSUPPORTED ? EXIT_USAGE : EXIT_FAILED;
}

static int run(struct driver *c)
{
    struct bench_report *r = &c->report;

    r->options = c->options;
    bench_work_traffic(&c->options->config, c->options->config.seed, &r->traffic);
    if (c->options->vs_ofi)
        begin_ofi(c);
    if (start_teams(c) == 0)
        (void)(is_events(c) ? drive_events : drive_all)(c);
    else if (c->shm != NULL)
        bench_shm_fail(c->shm, BENCH_UNSUPPORTED, "nothing was measured");
    if (c->shm == NULL)
        return EXIT_FAILED;
    end_teams(c);
    progress_end();
    r->shm = c->shm;
    if (bench_shm_stopped(c->shm))
        return report_failure(c);
    if (!c->options->joined || c->options->rank == 0)
        print_report(c);
    return EXIT_OK;
}

/* Rows on stdout, too, where JSON is asked for and nobody else prints them. */
int bench_run(const struct bench_options *options, FILE *rows, int quiet)
{
    struct driver driver = {.options = options, .mpi_log = -1, .quiet = quiet, .report = {.to = rows}};
    char *text = NULL;
    size_t bytes = 0;
    int code;

    if (access("/proc/self/fd", X_OK) != 0) {
        fprintf(stderr,
                "epx bench: /proc/self/fd: expected the folder by which ranks share memory, got: %s; mount /proc\n",
                strerror(errno));
        return EXIT_FAILED;
    }
    driver.report.to = open_memstream(&text, &bytes);
    if (driver.report.to == NULL)
        return EXIT_FAILED;
    code = run(&driver);
    fclose(driver.report.to);
    fwrite(text, 1, bytes, rows);
    if (options->json && !quiet)
        fwrite(text, 1, bytes, stdout);
    fflush(stdout);
    free(text);
    if (driver.shm != NULL && !options->joined)
        bench_shm_destroy(driver.shm, driver.shm_path);
    return code;
}

int cmd_bench(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "ring") == 0)
        return bench_ring(argc - 1, argv + 1);
    if (argc == 4 && strcmp(argv[1], "--worker") == 0) /* started by bench_team.c */
        return bench_worker(argv[2], atoi(argv[3]));
    return bench_session(argc, argv);
}

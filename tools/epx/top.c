/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `epx top`: the groups of this user on this machine, from the pages that their ranks have in shared memory
 * (util/watch.h). Nothing is asked of the ranks: it works while a group hangs, which is when it is needed.
 *
 *      top.c              the command: looks twice, prints, again and again
 *      top_pages.c        finding and mapping pages; what became of their processes
 *      top_print.c        text and JSON
 *      top_prometheus.c   metrics for Prometheus
 */
#include "top.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "options.h"
#include "util/clock.h"

enum {
    ONCE_MS = 200,
    INTERVAL_MS = 1000,
    STILL_MS = 800, /* kernels of a GPU that wait say so every 500 ms */
    STILL_LOOK_MS = 50
};

struct options {
    int32_t json, prometheus, once, interval_ms;
};

#define FIELD(name) offsetof(struct options, name)

static const struct option_spec specs[] = {
    {.kind = OPTION_TITLE, .help = "Options:"},
    {.name = "interval",
     .kind = OPTION_SECONDS,
     .value = "SECONDS",
     .help = "time between two looks",
     .fallback = "1; printed once, 0.2 or longer",
     .offset = FIELD(interval_ms),
     .low = 50,
     .high = 3600000},
    {.name = "once",
     .kind = OPTION_FLAG,
     .help = "print once and end; so it does without a terminal",
     .offset = FIELD(once)},
    {.name = "json", .kind = OPTION_FLAG, .help = "one JSON object, once", .offset = FIELD(json)},
    {.name = "prometheus",
     .kind = OPTION_FLAG,
     .help = "metrics in Prometheus' text format, once",
     .offset = FIELD(prometheus)},
};

static const struct option_table table = {
    .program = "epx top",
    .usage = "epx top [options]",
    .about =
        "Shows the running groups of this user on this machine: operations and bytes per second, p50 and p99, who\n"
        "waits for whom and since when, windows to other nodes, masked ranks. It reads shared memory, and waits\n"
        "for no rank, so that it also shows a group that hangs.",
    .notes = "Exit status: 0 when there are groups, 1 when there are none (--prometheus: 0 then, too), 2 for a wrong\n"
             "command line.\n",
    .specs = specs,
    .count = (int)(sizeof(specs) / sizeof(specs[0])),
};

/* What the counters were at the first look. */
static void remember(struct top *top)
{
    for (int i = 0; i < top->count; i++) {
        struct top_page *p = &top->pages[i];

        memcpy(p->before, p->page->count, sizeof(p->before));
        p->bytes_before = top_bytes(p->page);
    }
    top->before_ns = clock_ns();
}

/* A single look at a group on GPUs that does nothing lasts until its kernels say for whom they wait. */
static void wait_for_words(const struct top *top)
{
    for (int ms = 0; ms < STILL_MS && top_is_still(top); ms += STILL_LOOK_MS)
        usleep(STILL_LOOK_MS * 1000);
}

/* One view: pages that come and go meanwhile are seen next time. */
static int look(const struct options *o, int ms, int clear)
{
    struct top top = {0};
    int count;

    top_open(&top);
    top_ask(&top);
    remember(&top);
    usleep((useconds_t)ms * 1000);
    if (!o->interval_ms && !clear)
        wait_for_words(&top);
    top_ask(&top);
    top.now_ns = clock_ns();
    if (clear)
        fputs("\033[H\033[J", stdout);
    if (o->json)
        top_print_json(&top);
    else if (o->prometheus)
        top_print_prometheus(&top);
    else
        top_print(&top);
    fflush(stdout);
    count = top.count;
    top_close(&top);
    return count;
}

int cmd_top(int argc, char **argv)
{
    struct options o = {.interval_ms = 0};
    int next, terminal = isatty(STDOUT_FILENO), count;
    const enum option_result parsed = options_parse(&table, &o, argc, argv, 1, &next);

    if (parsed != OPTIONS_OK)
        return parsed == OPTIONS_HELP ? EXIT_OK : EXIT_USAGE;
    if (o.json && o.prometheus) {
        options_complain(table.program, "--json and --prometheus: expected one of them");
        return EXIT_USAGE;
    }
    if (o.json || o.prometheus || o.once || !terminal)
        return look(&o, o.interval_ms ? o.interval_ms : ONCE_MS, 0) > 0 || o.prometheus ? EXIT_OK : EXIT_FAILED;
    do
        count = look(&o, o.interval_ms ? o.interval_ms : INTERVAL_MS, 1);
    while (count > 0 || terminal);
    return EXIT_OK;
}

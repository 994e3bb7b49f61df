/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every network must do, as a suite over any of them. A back end fills a struct net_suite and runs the cases:
 *
 *      static const struct net_suite suite = {.label = "ofi_tcp", .ops = &net_ofi_ops, .provider = "tcp"};
 *      for (int i = 0; i < net_suite_count(); i++)
 *          outcome = net_suite_run(&suite, i, text, sizeof(text));
 *
 * Ranks of a case are processes, threads, or coroutines of one thread (for a network whose ranks share a world that is
 * not safe with threads). They share a struct suite_shared in shared memory. All waits have deadlines.
 */
#ifndef EPX_TESTS_LIB_NET_SUITE_H
#define EPX_TESTS_LIB_NET_SUITE_H

#include "net/net.h"

enum { NET_SUITE_GAPS = 4 };
enum net_suite_ranks { NET_SUITE_PROCESSES, NET_SUITE_THREADS, NET_SUITE_FIBERS };

struct net_suite {
    const char *label; /* a word of letters, digits, _ */
    const struct net_ops *ops;
    const char *provider;
    enum net_suite_ranks ranks;
    /* For networks with a world (options.world); NULL otherwise. */
    void *(*world_open)(int nranks);
    void (*world_close)(void *world);
    /* Called by a rank that waits: may advance a virtual clock. */
    void (*world_idle)(void *world);
    /* Ends a rank as if its machine died. Processes are killed without it; else NULL skips the cases that need it. */
    void (*world_kill)(void *world, int rank);
    /* Where heaps come from, in each rank's own process or thread; NULL = ordinary memory. */
    void *(*memory)(size_t bytes);
    void (*memory_free)(void *memory);
    /* A peer whose process has ended is lost at once, not at the deadline: cases of losses have a long one. */
    int finds_deaths;
    /* What this network is known not to do; ends at a name of NULL. */
    struct {
        const char *name, *why;
    } gaps[NET_SUITE_GAPS];
};

enum net_suite_outcome { NET_SUITE_PASSED = 0, NET_SUITE_SKIPPED = 1, NET_SUITE_FAILED = 2 };

int net_suite_count(void);
const char *net_suite_name(int index);
/* `text`: why it was skipped or what failed, else "". */
enum net_suite_outcome net_suite_run(const struct net_suite *suite, int index, char *text, size_t bytes);

#endif

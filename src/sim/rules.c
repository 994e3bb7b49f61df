/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/rules.h"

#include <stdio.h>
#include <string.h>

#include "sim/sched.h"

/* Of struct control. */
enum { ACTIVE = 0, GAVE_UP = 1, LEFT_OUT = 2 };

static char broken[240];

enum { MOST_JOINED = 16 };

/* Processes whose place was taken. */
static struct {
    int rank;
    uint64_t process;
} gone[MOST_JOINED];
static int ngone;
static uint64_t holds[SIM_MAX_RANKS];

void sim_rules_begin(void)
{
    broken[0] = 0;
    ngone = 0;
    memset(holds, 0, sizeof(holds));
}

void sim_rule_joined(int rank, uint64_t process)
{
    if (ngone < MOST_JOINED) {
        gone[ngone].rank = rank;
        gone[ngone++].process = holds[rank];
    }
    holds[rank] = process;
}

const char *sim_rules_broken(void)
{
    return broken;
}

static void breach(const char *format, int a, int b)
{
    char text[128];

    if (broken[0])
        return;
    snprintf(text, sizeof(text), format, a, b);
    snprintf(broken, sizeof(broken), "the rule of completion is broken at %llu us: %s",
             (unsigned long long)sim_now() / 1000, text);
}

static struct control *control_at(void *heap)
{
    return heap;
}

/* Without masks, a rank that is LEFT_OUT could not recover: no operation has run with it since. */
static int counts(const struct group_dev *g, int rank)
{
    const uint64_t state = control_at(g->heap[rank])->gave_up;

    return state == GAVE_UP || (state == LEFT_OUT && g->enable_mask);
}

int sim_rule_gone(const struct group_dev *g)
{
    for (int p = 0; p < g->nranks; p++)
        if (p != g->rank && g->heap[p] && g->mask[p] && counts(g, p))
            return p;
    return -1;
}

static int was_replaced(const struct group_dev *g, int rank)
{
    for (int i = 0; i < ngone; i++)
        if (gone[i].rank == rank && control_at(g->heap[rank])->process == gone[i].process)
            return 1;
    return 0;
}

void sim_rule_looked(const struct group_dev *g, int gave_up, int failed)
{
    if (gave_up >= 0 && !failed)
        breach("an operation of rank %d ends as good although rank %d of its node has given up", g->rank, gave_up);
    /* A dead one that is raised in the end ends what it had begun with the processes of then. */
    for (int i = 0; i < ngone && !failed && !sim_has_died(sim_rank()); i++)
        if (g->heap[gone[i].rank] && g->mask[gone[i].rank] && was_replaced(g, gone[i].rank))
            breach("an operation of rank %d ends as good with memory of a process of rank %d that was replaced",
                   g->rank, gone[i].rank);
}

void sim_rule_reuse(int rank, int nranks, void *const *heaps)
{
    struct control *own = control_at(heaps[rank]);

    if (!own->abort_word)
        return;
    for (int p = 0; p < nranks; p++)
        if (!(own->abort_word & ABORT_LEFT_OUT) && heaps[p] && !control_at(heaps[p])->abort_word)
            breach("rank %d gives up and has not told rank %d of its node", rank, p);
    own->gave_up = own->abort_word & ABORT_LEFT_OUT ? LEFT_OUT : GAVE_UP;
}

void sim_rule_ends(const struct group_dev *g, uint64_t word)
{
    if (word)
        sim_rule_reuse(g->rank, g->nranks, (void *const *)g->heap);
}

void sim_rule_late_read(int from, int to)
{
    breach("the network read memory of rank %d, which had given up, for rank %d", from, to);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/rules.h"

#include <stdio.h>
#include <stdlib.h>
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

/* Of each process, as sim_rank() numbers them: a process whose place was taken may go on beside the one that took it.
 *   rank, process  its place, and what its control block says of it
 *   without[r]     it goes on without rank r
 *   knows[r]       the process that has the place of rank r, for this one; before[r]: the one that had it before
 *   left           it has ended its program
 *   count, time    how often it has recovered, and when it last did; JOINED: it counts as those do that it hears
 *                  of first
 *   agreed         what all that recovered with it have the same; 0: it has not recovered yet
 *   given          its last signals
 *   reset          what signals were set to when it last recovered
 *   late           its abort word has said that another gave up because of it, and it has not recovered since
 *   restores       it recovers by epx_mask_clean
 * Times count signals and recoveries. Small cases only: larger ones have no masks. */
enum { MOST_MASKED = 64, MOST_SLOTS = 8, JOINED = -1 };
static struct {
    int rank, count;
    uint64_t process, time, agreed;
    uint8_t without[MOST_MASKED], late, restores, left;
    uint64_t knows[MOST_MASKED], before[MOST_MASKED];
    struct {
        uint64_t value, time, agreed;
        int count;
    } given[SIG_COUNT][MOST_SLOTS];
    uint64_t reset[SIG_COUNT][MOST_SLOTS];
} processes[MOST_MASKED];
static uint64_t times;
static int repeats;

/* Of each rank's heap, and of its memory for the network alone, for every 16 bytes that rows were written to: 1 + who
 * wrote last. */
enum { UNIT = 16 };
static struct rows {
    uint8_t *who;
    size_t units;
} rows_of[MOST_MASKED][2];
static int watches_rows, rouses;

/* Whose memory for the network alone is whose. */
enum { MOST_SPLIT = 64 };
static struct {
    const void *memory;
    const struct control *control;
} splits[MOST_SPLIT];
static int nsplits;

void sim_rules_end(void)
{
    for (int r = 0; r < MOST_MASKED; r++)
        for (int split = 0; split < 2; split++)
            free(rows_of[r][split].who);
    memset(rows_of, 0, sizeof(rows_of));
}

void sim_rules_begin(int watch_rows, int rouse)
{
    watches_rows = watch_rows;
    rouses = rouse;
    repeats = 0;
    nsplits = 0;
    broken[0] = 0;
    ngone = 0;
    memset(holds, 0, sizeof(holds));
    memset(processes, 0, sizeof(processes));
    for (int r = 0; r < MOST_MASKED; r++)
        processes[r].rank = r;
    times = 0;
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

void sim_rule_left(void)
{
    if (sim_rank() < MOST_MASKED)
        processes[sim_rank()].left = 1;
}

static int number_of(int rank, uint64_t process)
{
    for (int q = 0; q < MOST_MASKED && process; q++)
        if (processes[q].rank == rank && processes[q].process == process)
            return q;
    return rank;
}

/* The process that has a rank's place, as sim_rank() numbers it. */
static int process_of(int rank)
{
    return number_of(rank, holds[rank]);
}

/* Where the network has cut the group, each part has a process of its own in that place: asked is the one that `seer`
 * had there. */
static void check_ended(int rank, uint64_t process, int seer)
{
    const uint64_t knows = processes[seer].knows[rank], old = knows == process ? processes[seer].before[rank] : knows;
    const int q = number_of(rank, old);

    if (!processes[q].left && !sim_has_died(q))
        breach("another process joins in the place of rank %d, whose process has not ended; %d have been replaced",
               rank, ngone);
}

void sim_rule_joined(int rank, uint64_t process, int seer)
{
    if (seer >= 0 && seer < MOST_MASKED && rank < MOST_MASKED)
        check_ended(rank, process, seer);
    if (ngone < MOST_JOINED) {
        gone[ngone].rank = rank;
        gone[ngone++].process = holds[rank];
    }
    holds[rank] = process;
    if (sim_rank() >= MOST_MASKED)
        return;
    processes[sim_rank()].rank = rank;
    processes[sim_rank()].process = process;
    processes[sim_rank()].count = JOINED;
}

const char *sim_rules_broken(void)
{
    return broken;
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

/* The process whose memory a rank's is for this one. */
static uint64_t process_at(const struct group_dev *g, int rank)
{
    return control_at(g->heap[rank])->process;
}

static int was_replaced(int rank, uint64_t process)
{
    for (int i = 0; i < ngone; i++)
        if (gone[i].rank == rank && gone[i].process == process)
            return 1;
    return 0;
}

/* Whether the process that has a place now goes on with this process of `rank`: two parts of a group that have lost
 * each other each go on, and each with its own processes, which may be of the same ranks. */
static int is_in_part_of(int place, int rank, uint64_t process)
{
    const int q = process_of(place);

    return q < MOST_MASKED && rank < MOST_MASKED && !processes[q].without[rank] && processes[q].knows[rank] == process;
}

/* Whether it has mapped memory of rank p that is not of the process with which it goes on, or with which its part does.
 */
static int is_of_another(const struct group_dev *g, int p)
{
    const uint64_t process = process_at(g, p);

    if (sim_rank() < MOST_MASKED && p < MOST_MASKED && processes[sim_rank()].knows[p] != process)
        return 1;
    return was_replaced(p, process) && is_in_part_of(p, g->rank, process_at(g, g->rank));
}

void sim_rule_looked(const struct group_dev *g, int gave_up, int failed)
{
    /* A dead one that is raised in the end ends what it had begun with the processes of then. A process that the others
     * went on without, and replaced, may go on by itself. */
    for (int p = 0; p < g->nranks && ngone && !failed && !sim_has_died(sim_rank()); p++)
        if (p != g->rank && g->heap[p] && g->mask[p] && is_of_another(g, p))
            breach("an operation of rank %d ends as good with memory of a process of rank %d that was replaced",
                   g->rank, p);
    if (gave_up >= 0 && !failed)
        breach("an operation of rank %d ends as good although rank %d of its node has given up", g->rank, gave_up);
}

void sim_rule_reuse(int rank, int nranks, void *const *heaps)
{
    struct control *own = control_at(heaps[rank]);

    if (!own->abort_word)
        return;
    /* A dead one that is raised in the end has told them before, and they have recovered since. */
    for (int p = 0; p < nranks && !sim_has_died(sim_rank()); p++)
        if (!(own->abort_word & ABORT_LEFT_OUT) && heaps[p] && !control_at(heaps[p])->abort_word)
            breach("rank %d gives up and has not told rank %d of its node", rank, p);
    own->gave_up = own->abort_word & ABORT_LEFT_OUT ? LEFT_OUT : GAVE_UP;
}

const struct control *sim_rule_control(const void *memory)
{
    for (int i = 0; i < nsplits; i++)
        if (splits[i].memory == memory)
            return splits[i].control;
    return NULL;
}

static void record_split(const struct group_dev *g)
{
    if (g->net == g->heap[g->rank] || sim_rule_control(g->net) || nsplits == MOST_SPLIT)
        return;
    splits[nsplits].memory = g->net;
    splits[nsplits++].control = control_at(g->heap[g->rank]);
}

void sim_rule_ends(const struct group_dev *g, uint64_t word, int failed)
{
    record_split(g);
    if (failed && !word)
        breach("an operation of rank %d has failed, and rank %d would recover alone", g->rank, g->rank);
    if (word)
        sim_rule_reuse(g->rank, g->nranks, (void *const *)g->heap);
}

void sim_rule_late_read(int from, int to)
{
    breach("the network read memory of rank %d, which had given up, for rank %d", from, to);
}

void sim_rule_goes_on(int peer)
{
    if (sim_rank() < MOST_MASKED && peer < MOST_MASKED)
        processes[sim_rank()].without[peer] = 1;
    /* Most often it wakes up soon, in the midst of what the others do without it. */
    if (rouses && sim_draw(4))
        sim_rouse(peer, sim_draw(1000u << sim_draw(15)));
}

void sim_rules_repeat(void)
{
    repeats = 1;
}

void sim_rule_starts_over(int late, int restores)
{
    if (sim_rank() >= MOST_MASKED)
        return;
    processes[sim_rank()].late |= late;
    processes[sim_rank()].restores = restores;
}

/* This process was late, and has recovered; `out`: without these. None of them that goes on without it, or has done so
 * and ended, is in a set of which as many are out as have recovered here. */
static void check_late(int nranks, const uint8_t *out)
{
    const int rank = processes[sim_rank()].rank;
    int here = 0;

    for (int r = 0; r < nranks; r++)
        here += !out[r];
    for (int q = 0; q < nranks; q++) {
        int beside = 0;

        if (!out[q] || sim_has_died(q) || !processes[q].without[rank])
            continue;
        for (int r = 0; r < nranks; r++)
            beside += out[r] && !processes[q].without[r];
        if (beside >= here)
            breach("rank %d was late, knows it, and recovers beside rank %d, which goes on without it", rank, q);
    }
}

void sim_rule_members(int nranks, const uint8_t *out, const uint64_t *who, uint64_t agreed)
{
    const int me = sim_rank();

    if (me >= MOST_MASKED)
        return;
    if (nranks <= MOST_MASKED && processes[me].late && !processes[me].restores && !sim_has_died(me))
        check_late(nranks, out);
    processes[me].late = 0;
    for (int r = 0; r < nranks && r < MOST_MASKED; r++) {
        processes[me].without[r] = out[r];
        if (processes[me].knows[r] != who[r])
            processes[me].before[r] = processes[me].knows[r];
        processes[me].knows[r] = who[r];
    }
    processes[me].count += processes[me].count != JOINED;
    processes[me].agreed = agreed;
    processes[me].time = ++times;
}

void sim_rule_resets(int kind, int slot, uint64_t value)
{
    if (sim_rank() < MOST_MASKED && slot < MOST_SLOTS)
        processes[sim_rank()].reset[kind][slot] = value;
}

void sim_rule_signals(int kind, int slot, uint64_t value)
{
    const int me = sim_rank();

    if (me >= MOST_MASKED || slot >= MOST_SLOTS)
        return;
    processes[me].given[kind][slot].value = value;
    processes[me].given[kind][slot].time = ++times;
    processes[me].given[kind][slot].count = processes[me].count;
    processes[me].given[kind][slot].agreed = processes[me].agreed;
}

/* Whether process q has given this signal since this process has recovered. If it went on without this rank it does not
 * count: this rank cannot know it at once. */
static int may_be_received(int q, int rank, int kind, int slot, uint64_t value)
{
    return !processes[q].without[rank] && processes[q].given[kind][slot].value == value &&
           processes[q].given[kind][slot].time >= processes[sim_rank()].time &&
           processes[q].given[kind][slot].count != JOINED;
}

/* Of the processes that have had the place of rank p, one that recovered with this one has given the signal, if any
 * has. */
static int recovered_together(int rank, int p, int kind, int slot, uint64_t value)
{
    const int me = sim_rank();
    int received = 0;

    for (int q = 0; q < MOST_MASKED; q++) {
        if (q == me || processes[q].rank != p || !may_be_received(q, rank, kind, slot, value))
            continue;
        if (processes[me].count == JOINED)
            processes[me].count = processes[q].given[kind][slot].count;
        if (repeats ? processes[q].given[kind][slot].agreed == processes[me].agreed
                    : processes[q].given[kind][slot].count == processes[me].count)
            return 1;
        received = 1;
    }
    return !received;
}

void sim_rule_received(const struct group_dev *g, int all, int kind, int slot, uint64_t value)
{
    if (sim_rank() >= MOST_MASKED || g->rank >= MOST_MASKED || slot >= MOST_SLOTS || sim_has_died(sim_rank()))
        return;
    /* There since the recovery. A process whose place was taken may give it still, to nobody that recovered. */
    if (value <= processes[sim_rank()].reset[kind][slot])
        return;
    for (int p = 0; p < g->nranks && p < MOST_MASKED; p++)
        if (p != g->rank && g->mask[p] && (all || g->heap[p]) && !recovered_together(g->rank, p, kind, slot, value))
            breach("rank %d counts on rank %d, which has not come through the same recoveries", g->rank, p);
}

/* The process whose memory `to` is for this one, as sim_rank() numbers it; -1: not known. */
static int owner_of(const struct group_dev *g, int to)
{
    for (int q = 0; q < MOST_MASKED && g->rank < MOST_MASKED; q++)
        if (processes[q].rank == to && processes[q].process == process_at(g, to))
            return q;
    return -1;
}

void sim_rule_writes(const struct group_dev *g, int to)
{
    const int from = g->rank, owner = owner_of(g, to);
    const uint64_t own = process_at(g, from);

    /* A dead one that is raised in the end writes into memory of those that ended before. */
    if (to == from || owner < 0 || sim_has_died(sim_rank()))
        return;
    if (processes[owner].without[from])
        breach("rank %d writes rows into memory of rank %d, which goes on without it", from, to);
    else if (processes[owner].knows[from] != own ||
             (was_replaced(from, own) && is_in_part_of(from, to, process_at(g, to))))
        breach("a process of rank %d that was replaced writes rows into memory of rank %d", from, to);
}

static int watch(struct rows *rows, uint64_t end)
{
    const size_t units = (size_t)(end / UNIT) + 1;
    uint8_t *more;

    if (units <= rows->units)
        return 1;
    more = realloc(rows->who, 2 * units);
    if (!more)
        return 0;
    memset(more + rows->units, 0, 2 * units - rows->units);
    rows->who = more;
    rows->units = 2 * units;
    return 1;
}

void sim_rule_landed(int from, int to, int split, uint64_t at, uint64_t bytes)
{
    if (watches_rows && from < MOST_MASKED && to < MOST_MASKED && watch(&rows_of[to][split], at + bytes))
        memset(rows_of[to][split].who + at / UNIT, 1 + from, (size_t)((bytes + UNIT - 1) / UNIT));
}

void sim_rule_sums(const struct group_dev *g, int from, const char *row, uint64_t bytes)
{
    const int rank = g->rank, split = g->net != g->heap[rank] && !g->heap[from];
    const uint64_t at = (uint64_t)(row - (split ? g->net : g->heap[rank]));

    /* A dead one that is raised in the end sums what others have written since. One that was left out follows what it
     * reads of others' later operations; look_behind() ends its own as not good. */
    if (!watches_rows || rank >= MOST_MASKED || from >= MOST_MASKED || sim_has_died(sim_rank()) ||
        control_at(g->heap[rank])->abort_word)
        return;
    if (!watch(&rows_of[rank][split], at + bytes))
        return;
    for (uint64_t unit = at / UNIT; unit * UNIT < at + bytes; unit++)
        if (rows_of[rank][split].who[unit] != 1 + from)
            breach("rank %d sums a row that was written last by rank %d", rank, rows_of[rank][split].who[unit] - 1);
}

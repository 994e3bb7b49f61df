/* SPDX-License-Identifier: Apache-2.0 */
#include "sim_case.h"

#include <stdio.h>
#include <string.h>

#include "group/abort.h"
#include "group/objects.h"
#include "group/signals.h"
#include "sim/rules.h"

enum { TIMEOUT_MS = 1000 }; /* of virtual time */

static int pick_one(struct prop_rng *rng, const int *from, int n)
{
    return from[prop_draw(rng, n)];
}

/* ---- The exchange ------------------------------------------------------------------------------------------- */

static int draw_nodes(struct prop_rng *rng, const struct sim_case_options *o)
{
    static const int likely[] = {1, 2, 2, 2, 3, 4};
    int nodes = o->nodes ? o->nodes : pick_one(rng, likely, 6);

    if (!o->nodes && o->ranks)
        while (o->ranks % nodes)
            nodes--;
    if (o->ranks && nodes > o->ranks)
        nodes = o->ranks;
    return nodes;
}

/* Nodes of any sizes, their ranks mixed, numbered by their lowest ranks as EPX does. */
static void draw_uneven_nodes(struct prop_case *c, struct prop_rng *rng, int nodes)
{
    int number[SIM_MAX_RANKS], named = 0;

    for (int n = 0; n < nodes; n++)
        number[n] = -1;
    for (int r = 0; r < c->nranks; r++) {
        /* The first ranks see to it that no node is empty. */
        const int drawn = r < nodes ? r : prop_draw(rng, nodes);

        if (number[drawn] < 0)
            number[drawn] = named++;
        c->node_of[r] = (uint8_t)number[drawn];
    }
    c->uneven = 1;
    c->ranks_per_node = 0;
}

/* Small rows: what is looked for lies in the order of events, not in their size. */
static void make_small(struct prop_case *c, struct prop_rng *rng)
{
    for (int i = 0; i < c->nhandles; i++) {
        struct workload *w = &c->handle[i].w;
        const int unit = 16;

        if (w->hidden > 256)
            w->hidden = unit * (1 + prop_draw(rng, 16));
        if (w->max_tokens > 12 && !prop_chance(rng, 10))
            w->max_tokens = 1 + prop_draw(rng, 12);
        if (w->topk > 8)
            w->topk = 1 + prop_draw(rng, 8);
        /* Now and then more tokens than one put can merge. */
        if (prop_chance(rng, 4)) {
            w->hidden = unit;
            w->max_tokens = 64 + prop_draw(rng, 128);
            w->topk = 1 + prop_draw(rng, 2);
        }
    }
    prop_shrink(c);
}

/* Several handles of one mode in one group, and few slots: operations meet those before them. */
static void make_crowded(struct prop_case *c, struct prop_rng *rng)
{
    const int staged = prop_chance(rng, 30);

    c->nhandles = PROP_MAX_HANDLES;
    c->ngroups = 1;
    c->max_inflight = staged ? PROP_MAX_HANDLES : 1 + prop_draw(rng, 2);
    for (int i = 0; i < c->nhandles; i++) {
        struct prop_handle *h = &c->handle[i];

        if (i > 0 && h->mode != c->handle[0].mode) {
            *h = c->handle[0];
            h->w.seed += (uint64_t)i;
        }
        h->recv_tensor = 0;
        h->staged_dispatch &= staged;
        h->staged_combine &= staged;
    }
}

static void draw_exchange(struct sim_case *c, struct prop_rng *rng, const struct sim_case_options *o)
{
    const int nodes = draw_nodes(rng, o);
    int ranks = o->ranks;

    if (!ranks)
        ranks = nodes * (1 + prop_draw(rng, nodes > 4 ? 2 : 8 / nodes));
    prop_draw_case_of(&c->prop, c->seed, o->modes, ranks);
    if (prop_chance(rng, 25))
        make_crowded(&c->prop, rng);
    make_small(&c->prop, rng);
    c->prop.ranks_per_node = nodes > 1 ? ranks / nodes : 0;
    /* With numbers of their own, so that seeds mean what they meant before. */
    struct prop_rng own = {workload_hash(c->seed, 0x0de5)};
    if (nodes > 1 && ranks > nodes && nodes < 256 && (ranks % nodes || prop_chance(&own, 20)))
        draw_uneven_nodes(&c->prop, &own, nodes);
    if (nodes > 1)
        snprintf(c->prop.net, sizeof(c->prop.net), "sim");
    c->prop.timeout_ms = TIMEOUT_MS + 100 * ranks; /* one processor runs them all */
}

/* ---- The schedule ------------------------------------------------------------------------------------------- */

static void draw_schedule(struct sim_options *s, struct prop_rng *rng, uint64_t seed, int ranks)
{
    static const int every[] = {0, 1, 2, 8, 64};
    static const int steps[] = {10, 100, 1000};

    s->seed = seed;
    s->nranks = ranks;
    s->policy = (enum sim_policy)prop_draw(rng, SIM_POLICIES);
    s->laggard = prop_draw(rng, ranks);
    s->point_every = pick_one(rng, every, 5);
    s->step_ns = (uint64_t)pick_one(rng, steps, 3);
    s->max_steps = 20000000;
}

/* ---- The network -------------------------------------------------------------------------------------------- */

static void draw_network(struct sim_case *c, struct prop_rng *rng)
{
    static const int latencies[] = {100, 2000, 20000, 200000};
    static const int depths[] = {1, 2, 8, 64, 1024};
    struct sim_net_options *n = &c->net;

    n->seed = c->seed;
    n->nranks = c->prop.nranks;
    n->latency_ns = (uint64_t)pick_one(rng, latencies, 4);
    /* Often so much that nothing keeps its order. */
    n->jitter_ns = n->latency_ns * (uint64_t)prop_draw(rng, 4) * (uint64_t)prop_draw(rng, 8);
    n->message_ns = prop_chance(rng, 50) ? 0 : (uint64_t)prop_draw(rng, 2000);
    n->bytes_per_us = prop_chance(rng, 30) ? 0 : 50 + (uint64_t)prop_draw(rng, 20000);
    n->depth = pick_one(rng, depths, 5);
    /* Slow, but not so slow that what is asked of it takes longer than the deadline. */
    while ((n->latency_ns + n->jitter_ns) / (uint64_t)n->depth > 100000) {
        n->latency_ns /= 2;
        n->jitter_ns /= 2;
    }
    n->ordered = prop_chance(rng, 10);
    n->torn_percent = prop_chance(rng, 50) ? prop_draw(rng, 101) : 0;
    n->refuse_percent = prop_chance(rng, 30) ? prop_draw(rng, 50) : 0;
    n->anonymous = prop_chance(rng, 50);
    n->death_ns = prop_chance(rng, 50) ? SIM_NET_NEVER : 1000u << prop_draw(rng, 16);
}

/* ---- Faults ------------------------------------------------------------------------------------------------- */

/* Somewhere in the run, which has some hundreds to some ten thousands of steps. */
static uint64_t draw_moment(struct prop_rng *rng)
{
    const int magnitude = 4 + prop_draw(rng, 12);

    return (1u << magnitude) + (uint64_t)prop_draw(rng, 1 << magnitude);
}

static void draw_faults(struct sim_case *c, struct prop_rng *rng, unsigned allowed)
{
    struct sim_options *s = &c->setup.sched;
    const uint64_t timeout_ns = (uint64_t)c->prop.timeout_ms * 1000000u;

    c->faults = allowed & (SIM_FAULT_DELAY | SIM_FAULT_DEATH) & (unsigned)(1 + prop_draw(rng, 3));
    if (c->faults & SIM_FAULT_DEATH) {
        const int n = prop_chance(rng, 80) ? 1 : 2;
        for (int i = 0; i < n; i++)
            s->fault[s->nfaults++] =
                (struct sim_fault){.at = draw_moment(rng), .ns = SIM_NEVER, .rank = prop_draw(rng, s->nranks)};
    }
    if (c->faults & SIM_FAULT_DELAY) {
        /* Well within the deadline, near it, or far beyond. */
        const int n = 1 + prop_draw(rng, 2), much = prop_draw(rng, 3);
        for (int i = 0; i < n; i++) {
            uint64_t ns = much == 0   ? timeout_ns / 8 * (uint64_t)prop_draw(rng, 3)
                          : much == 1 ? timeout_ns / 8 * (uint64_t)(6 + prop_draw(rng, 4))
                                      : timeout_ns * (uint64_t)(1 + prop_draw(rng, 6));
            s->fault[s->nfaults++] =
                (struct sim_fault){.at = draw_moment(rng), .ns = ns, .rank = prop_draw(rng, s->nranks)};
        }
        if (much > 0)
            c->prop.may_fail = 1;
    }
    if (c->faults & SIM_FAULT_DEATH) {
        c->prop.may_fail = 1;
        if (prop_chance(rng, 30))
            c->net.lose_one_in = 1u << (4 + prop_draw(rng, 8));
    }
}

/* A masked rank is taken for dead: one that is only late may be in the midst of writing to its peers. And masking is
 * for low latency: high throughput has others in between, who may have masked other ranks than those that miss them.
 * Nor does a combine that is queued before its dispatch has ended know that results are missing. */
static void choose_mask(struct sim_case *c)
{
    int others = 0;

    for (int i = 0; i < c->prop.nhandles; i++)
        others |= c->prop.handle[i].mode == EPX_HIGH_THROUGHPUT || c->prop.handle[i].async;
    if (c->prop.may_fail && (c->faults & SIM_FAULT_DELAY || others))
        c->prop.enable_mask = 0;
}

/* After deaths, and where no call queues what comes after a failure: the others go on, in both modes. */
static void choose_recovery(struct sim_case *c)
{
    struct prop_rng own = {workload_hash(c->seed, 0x6e0e)};
    int async = 0;

    for (int i = 0; i < c->prop.nhandles; i++)
        async |= c->prop.handle[i].async;
    if (c->faults != SIM_FAULT_DEATH || async || c->prop.ngroups > 1 || !prop_chance(&own, 70))
        return;
    c->prop.enable_mask = 1;
    c->prop.recover = 1;
}

/* The first of the ranks that are late stops while it writes rows into memory of its node: those that go on without it
 * wait for the end of that. It wakes up when they do, or later. */
static void stop_at_a_row(struct sim_case *c)
{
    struct sim_options *s = &c->setup.sched;
    const uint64_t timeout_ns = (uint64_t)c->prop.timeout_ms * 1000000u;
    /* A number with which none of the seeds that have found something (docs/simulation.md) means anything else. */
    struct prop_rng own = {workload_hash(c->seed, 0x643)};

    if (!prop_chance(&own, 20))
        return;
    s->fault[0].row = 1 + prop_draw(&own, 1 << prop_draw(&own, 8));
    s->fault[0].ns = timeout_ns + timeout_ns / 16 * (uint64_t)prop_draw(&own, 24);
}

/* Ranks that are masked, or left out, while they are only late: they sleep for one to five deadlines, and most wake up
 * while the others go on. Those go on by themselves in low latency, and by a recovery in both modes. */
static void choose_late(struct sim_case *c)
{
    struct sim_options *s = &c->setup.sched;
    const uint64_t timeout_ns = (uint64_t)c->prop.timeout_ms * 1000000u;
    struct prop_rng own = {workload_hash(c->seed, 0x1a7e)};
    int high = 0;

    c->faults = SIM_FAULT_LATE;
    c->setup.rouse = 1;
    c->prop.may_fail = 1;
    c->prop.enable_mask = 1;
    c->prop.recover = 1;
    c->prop.ngroups = 1;
    c->prop.lingers = 1;
    for (int i = 0; i < c->prop.nhandles; i++) {
        c->prop.handle[i].async = 0;
        high |= c->prop.handle[i].mode == EPX_HIGH_THROUGHPUT;
    }
    c->prop.goes_on = !high;
    c->prop.pairs += high ? 0 : 2; /* operations that meet slots of those before the mask */
    s->nfaults = 1 + prop_chance(&own, 20);
    for (int i = 0; i < s->nfaults; i++)
        s->fault[i] = (struct sim_fault){.at = draw_moment(&own),
                                         .ns = timeout_ns + timeout_ns / 16 * (uint64_t)prop_draw(&own, 64),
                                         .rank = prop_draw(&own, s->nranks)};
    /* Another one is slow at the same time: it wakes up about when the others go on without the first, and has not
     * noticed that. They do so up to a deadline after the first one: whoever has come until then is not left out. */
    if (s->nfaults < SIM_MAX_FAULTS && prop_chance(&own, 40)) {
        const uint64_t at = s->fault[0].at + (uint64_t)prop_draw(&own, 200);

        s->fault[s->nfaults++] = (struct sim_fault){
            .at = at, .ns = timeout_ns / 16 * (uint64_t)(8 + prop_draw(&own, 24)), .rank = prop_draw(&own, s->nranks)};
    }
    stop_at_a_row(c);
}

/* Others come for the places of those that die, often two for one place. Now and then the process that is to be
 * replaced is only late: as long as it exists, nobody may take its place. */
static void choose_spares(struct sim_case *c)
{
    struct sim_options *s = &c->setup.sched;
    const uint64_t timeout_ns = (uint64_t)c->prop.timeout_ms * 1000000u;
    struct prop_rng own = {workload_hash(c->seed, 0x10b)};

    c->faults = SIM_FAULT_DEATH;
    c->prop.may_fail = c->prop.enable_mask = c->prop.recover = 1;
    c->prop.ngroups = 1;
    for (int i = 0; i < c->prop.nhandles; i++)
        c->prop.handle[i].async = 0;
    if (!s->nfaults)
        s->fault[s->nfaults++] =
            (struct sim_fault){.at = draw_moment(&own), .ns = SIM_NEVER, .rank = prop_draw(&own, s->nranks)};
    c->prop.spares = 1 + prop_chance(&own, 60);
    for (int i = 0; i < c->prop.spares; i++)
        c->prop.replaces[i] =
            i && prop_chance(&own, 70) ? c->prop.replaces[0] : s->fault[prop_draw(&own, s->nfaults)].rank;
    for (int i = 0; i < s->nfaults; i++)
        if (prop_chance(&own, 15))
            s->fault[i].ns = timeout_ns + timeout_ns / 16 * (uint64_t)prop_draw(&own, 64);
    if (c->setup.deaths_seen || prop_chance(&own, 10))
        return;
    c->setup.deaths_seen = 1; /* else the old process may be alive: nobody is admitted */
    c->net.death_ns = 1000u << prop_draw(&own, 16);
}

/* The n-th of the ranks that do not die before, from 0: the leader of the recovery is the lowest. */
static int nth_left(const struct sim_options *s, int n)
{
    int r = -1;

    do {
        r++;
        n -= !(s->nfaults && s->fault[0].rank == r && !s->fault[0].transfer);
    } while (n >= 0 && r + 1 < s->nranks);
    return r;
}

/* A stall of less than a slice, about a deadline, or more; or death. */
static uint64_t draw_stop(struct prop_rng *rng, uint64_t timeout_ns)
{
    switch (prop_draw(rng, 8)) {
    case 0:
        return timeout_ns / 20 / (1u + (unsigned)prop_draw(rng, 8));
    case 1:
        return timeout_ns / 16 * (uint64_t)(8 + prop_draw(rng, 16));
    case 2:
        return timeout_ns / 16 * (uint64_t)(16 + prop_draw(rng, 80));
    default:
        return SIM_NEVER;
    }
}

/* The first of the ranks that stop in the recovery does so while it resets its own state, between two copies of its
 * device, rather than at a message: of these there are ten to twenty. It is most often late: one that is dead has reset
 * nothing that anybody sees. */
static void stop_at_a_copy(struct sim_case *c)
{
    enum { COPIES = 16 };
    struct sim_options *s = &c->setup.sched;
    const uint64_t timeout_ns = (uint64_t)c->prop.timeout_ms * 1000000u;
    struct prop_rng own = {workload_hash(c->seed, 0xc0b7)};
    int i = 0;

    while (i < s->nfaults && !s->fault[i].transfer)
        i++;
    if (i == s->nfaults || !prop_chance(&own, 25))
        return;
    s->fault[i].transfer = 0;
    s->fault[i].copy = 1 + prop_draw(&own, COPIES);
    if (prop_chance(&own, 80))
        s->fault[i].ns = timeout_ns / 16 * (uint64_t)(8 + prop_draw(&own, 88));
}

/* All recover: because a rank has died, or by epx_mask_clean. Meanwhile one rank, or two, stop between two messages,
 * most often the one that leads the recovery, and that often near its end. A transfer carries a part of a message: of a
 * rank with the leader there are 170 to 200 in a recovery. */
static void choose_faults_in_recovery(struct sim_case *c)
{
    enum { TRANSFERS = 200, LATE_TRANSFERS = 150 };
    struct sim_options *s = &c->setup.sched;
    const uint64_t timeout_ns = (uint64_t)c->prop.timeout_ms * 1000000u;
    struct prop_rng own = {workload_hash(c->seed, 0x4ec0)};
    int others;

    c->faults = SIM_FAULT_RECOVER;
    c->prop.may_fail = c->prop.enable_mask = c->prop.recover = c->prop.ngroups = 1;
    c->prop.repeat = 6;
    c->setup.repeat = 1;
    for (int i = 0; i < c->prop.nhandles; i++)
        c->prop.handle[i].async = 0;
    c->net.lose_one_in = 0;
    c->net.depth = c->net.depth < 64 ? 64 : c->net.depth;
    c->setup.deaths_seen = !prop_chance(&own, 10);
    c->net.death_ns = c->setup.deaths_seen ? 1000u << prop_draw(&own, 16) : SIM_NET_NEVER;
    s->nfaults = 0;
    c->prop.cleans = prop_chance(&own, 50);
    if (!c->prop.cleans)
        s->fault[s->nfaults++] =
            (struct sim_fault){.at = draw_moment(&own), .ns = SIM_NEVER, .rank = prop_draw(&own, s->nranks)};
    others = s->nranks - s->nfaults;
    for (int left = others > 0 ? 1 + prop_chance(&own, 30) : 0; left > 0; left--) {
        const int leader = s->nfaults < 2 && prop_chance(&own, 70);
        const int rank = nth_left(s, leader ? 0 : prop_draw(&own, others));
        const int peers = leader && others > 1 ? others - 1 : 1;
        const int least = prop_chance(&own, 50) ? LATE_TRANSFERS * peers : 1;

        s->fault[s->nfaults++] = (struct sim_fault){.ns = draw_stop(&own, timeout_ns),
                                                    .rank = rank,
                                                    .transfer = least + prop_draw(&own, TRANSFERS * peers - least)};
    }
    stop_at_a_copy(c);
}

/* One rank stops, and does not go on before all others have given up. On a busy machine: when their deadlines are
 * near, up to three of them do not run for one to five slices (kernel/waiting_for.h). Still all name the one that has
 * stopped. */
static void choose_stop(struct sim_case *c)
{
    struct sim_options *s = &c->setup.sched;
    const uint64_t timeout_ns = (uint64_t)c->prop.timeout_ms * 1000000u;
    struct prop_rng own = {workload_hash(c->seed, 0x5709)};
    const int victim = prop_draw(&own, s->nranks);

    c->faults = SIM_FAULT_STOP;
    c->prop.may_fail = c->prop.ngroups = 1;
    c->prop.enable_mask = c->prop.recover = 0;
    c->net.lose_one_in = 0;
    c->net.depth = c->net.depth < 64 ? 64 : c->net.depth;
    s->nfaults = 1;
    s->fault[0] = (struct sim_fault){.at = draw_moment(&own), .ns = 16 * timeout_ns, .rank = victim};
    for (int left = s->nranks > 1 ? prop_draw(&own, SIM_MAX_FAULTS) : 0; left > 0; left--)
        s->fault[s->nfaults++] = (struct sim_fault){.after_ns = timeout_ns / 64 * (uint64_t)(32 + prop_draw(&own, 64)),
                                                    .ns = timeout_ns / 16 * (uint64_t)(1 + prop_draw(&own, 5)),
                                                    .rank = (victim + 1 + prop_draw(&own, s->nranks - 1)) % s->nranks};
}

/* In one case of four with ranks that stop, a rank receives nothing meanwhile, as over TCP. In half of these the
 * connection to one that is lost is shut. */
static void choose_receivers(struct sim_case *c, const struct sim_case_options *o)
{
    /* A number with which none of the seeds that have found something (docs/simulation.md) means anything else. */
    struct prop_rng own = {workload_hash(c->seed, 0x17f3ddd)};
    const int drawn = prop_chance(&own, 25), shuts = prop_chance(&own, 50);

    if (!c->prop.net[0] || !(c->faults & (SIM_FAULT_DELAY | SIM_FAULT_LATE | SIM_FAULT_STOP)))
        return;
    if (o->stopped)
        c->net.stopped = (enum sim_net_stopped)(o->stopped - 1);
    else if (drawn)
        c->net.stopped = shuts ? SIM_NET_SHUTS : SIM_NET_READS;
}

/* After all other draws, whose seeds mean what they meant. Groups with masks take no rows where they are: these stay
 * where faults need them, for some of the cases. */
static void choose_in_reach(struct sim_case *c, const struct sim_case_options *o)
{
    struct prop_rng own = {workload_hash(c->seed, 0x1ea)};
    const int needs_masks = o->faults & (SIM_FAULT_JOIN | SIM_FAULT_LATE | SIM_FAULT_RECOVER) || prop_chance(&own, 10);

    if (!o->in_reach)
        return;
    prop_force_in_reach(&c->prop, &own);
    if (!needs_masks)
        c->prop.enable_mask = c->prop.recover = 0;
}

void sim_case_draw(struct sim_case *c, uint64_t seed, const struct sim_case_options *options)
{
    struct prop_rng rng = {workload_hash(seed, 0x51b)};

    memset(c, 0, sizeof(*c));
    c->seed = seed;
    draw_exchange(c, &rng, options);
    draw_schedule(&c->setup.sched, &rng, seed, c->prop.nranks);
    draw_network(c, &rng);
    c->setup.gather_ns = 4000000u * (uint64_t)c->prop.timeout_ms;
    c->setup.deaths_seen = c->net.death_ns != SIM_NET_NEVER;
    draw_faults(c, &rng, options->faults);
    choose_mask(c);
    choose_recovery(c);
    if (options->faults & SIM_FAULT_JOIN)
        choose_spares(c);
    if (options->faults & SIM_FAULT_LATE)
        choose_late(c);
    if (options->faults & SIM_FAULT_RECOVER)
        choose_faults_in_recovery(c);
    if (options->faults & SIM_FAULT_STOP)
        choose_stop(c);
    choose_receivers(c, options);
    choose_in_reach(c, options);
    /* Offsets are of one group, and ranks of one process each. */
    c->setup.watch_rows = c->prop.ngroups == 1 && !c->prop.spares;
}

/* ---- Running ------------------------------------------------------------------------------------------------ */

/* One simulation at a time in a process, as the simulator has it. */
static struct {
    const struct sim_case *c;
    struct sim_report *report;
    uint8_t has_left[PROP_MAX_RANKS]; /* its group was not created: it is gone, and masked with reason */
    uint8_t in_order[PROP_MAX_RANKS]; /* it has ended its group, which had not failed */
    /* RECOVER. */
    uint8_t recovers[PROP_MAX_RANKS], is_through[PROP_MAX_RANKS], has_ended[PROP_MAX_RANKS];
    uint8_t told_by[PROP_MAX_RANKS][PROP_MAX_RANKS]; /* who was told by whom that others go on without it */
    uint8_t without[PROP_MAX_RANKS][PROP_MAX_RANKS]; /* who has recovered without whom */
    uint8_t recovered[PROP_MAX_RANKS];
    int32_t mask[PROP_MAX_RANKS][PROP_MAX_RANKS]; /* of those that are through */
    int excused;                                  /* more ranks are lost than others can relay for */
} now;

static int simulated_ranks(int n, prop_rank_fn fn, void *arg)
{
    static uint8_t machines[PROP_MAX_RANKS + PROP_MAX_SPARES];
    struct sim_setup setup = now.c->setup;

    (void)n;
    setup.net = &now.c->net;
    setup.spares = now.c->prop.spares;
    for (int r = 0; r < now.c->prop.nranks; r++)
        machines[r] = now.c->prop.node_of[r];
    for (int i = 0; i < setup.spares; i++)
        machines[now.c->prop.nranks + i] = machines[now.c->prop.replaces[i]];
    setup.node_of = now.c->prop.uneven ? machines : NULL;
    if (sim_run_ranks(&setup, fn, arg, &now.report->outcome) != 0)
        return -1;
    return now.report->outcome.failures;
}

/* Only where the caller has been told of a failure: an abort word may come after operations have completed. */
static void reuses(epx_group *group)
{
    if (group->gave_up)
        sim_rule_reuse(group->rank, group->nranks, (void *const *)group->bases);
}

static void wrong_recovery(const char *format, int a, int b)
{
    struct sim_report *r = now.report;

    if (!r->wrong_culprit[0])
        snprintf(r->wrong_culprit, sizeof(r->wrong_culprit), format, a, b);
}

/* Rank b has recovered with a rank that had told rank a that it goes on without it. */
static int is_of_those_that_told(int a, int b)
{
    for (int t = 0; t < now.c->prop.nranks; t++)
        if (now.told_by[a][t] && now.recovered[t] && memcmp(now.without[t], now.without[b], PROP_MAX_RANKS) == 0)
            return 1;
    return 0;
}

/* Rank a was told that it is left out, and recovers although those that told it have recovered without it, rank b among
 * them, in no smaller set. Others that rank a has not heard of may have lost it as it has lost them (a network that is
 * cut, docs/design.md): each part goes on. */
static void check_two_sets(int a, int b)
{
    int more = 0;

    for (int r = 0; r < now.c->prop.nranks; r++)
        more += now.without[b][r] - now.without[a][r];
    if (is_of_those_that_told(a, b) && now.without[b][a] && more <= 0)
        wrong_recovery("rank %d was told that it is left out, and recovers beside rank %d", a, b);
}

/* A rank that was told that it is left out makes no second set, not even when those that told it have ended. Where
 * processes join, the one that was told is not the one that recovers. */
static void check_second_set(const epx_group *group)
{
    const int me = group->rank;

    if (now.c->prop.spares || sim_has_died(me))
        return;
    memcpy(now.without[me], group->map.out, (size_t)group->nranks);
    now.recovered[me] = 1;
    for (int r = 0; r < group->nranks; r++)
        now.told_by[me][r] &= group->map.out[r]; /* one that takes it along has not gone on without it */
    for (int r = 0; r < group->nranks; r++)
        if (now.recovered[r] && !sim_has_died(r)) {
            check_two_sets(me, r);
            check_two_sets(r, me);
        }
}

/* Of a signal that is a word here and a counter there, with other values, the one that surely was there. */
static void tell_resets(const epx_group *group)
{
    for (int kind = 0; kind < SIG_COUNT; kind++)
        for (int slot = 0; slot < group->set.sig_slots; slot++) {
            const uint64_t word = signal_after(group, group->restarted, kind, slot);
            const uint64_t counter = counter_after(group, group->restarted, kind, slot);

            sim_rule_resets(kind, slot, word < counter ? word : counter);
        }
}

static void has_recovered(epx_group *group)
{
    uint64_t who[PROP_MAX_RANKS] = {0}, agreed = 1;

    for (int r = 0; r < group->nranks && group->membership; r++)
        who[r] = membership_incarnation(group->membership, r);
    for (int r = 0; r < group->nranks; r++)
        agreed = workload_hash(agreed, group->map.out[r]);
    for (int i = 0; i < OP_COUNT; i++)
        agreed = workload_hash(agreed, group->restarted[i]);
    sim_rule_members(group->nranks, group->map.out, who, agreed);
    tell_resets(group);
    check_second_set(group);
}

/* Is it a fault of this rank that others see? A stall within a slice of a wait (kernel/waiting_for.h) is none. */
static int is_faulty(const struct sim_case *c, int rank)
{
    const struct sim_options *s = &c->setup.sched;
    const uint64_t slice_ns = (uint64_t)c->prop.timeout_ms * 1000000u / 16;

    if (c->faults == SIM_FAULT_STOP)
        return rank == s->fault[0].rank;
    for (int i = 0; i < s->nfaults; i++)
        if (s->fault[i].rank == rank && s->fault[i].ns > slice_ns)
            return 1;
    return 0;
}

/* ---- Faults in a recovery: who is well stays ---------------------------------------------------------------- */

/* Ranks end in this case, and the others see it; nobody is late. */
static int only_deaths(const struct sim_case *c)
{
    const struct sim_options *s = &c->setup.sched;

    for (int i = 0; i < s->nfaults; i++)
        if (s->fault[i].ns != SIM_NEVER && is_faulty(c, s->fault[i].rank))
            return 0;
    return c->setup.deaths_seen;
}

static int is_well(int rank)
{
    return !sim_has_died(rank) && !is_faulty(now.c, rank);
}

static void recovers(int rank)
{
    now.recovers[rank] = 1;
    sim_count_transfers();
}

static void starts_over(epx_group *group, int cleans)
{
    sim_rule_starts_over(group_late_for(group) >= 0, cleans);
}

/* Nobody waits out a deadline, for nobody is late: whoever is missing has ended, or comes. */
static void not_recovered(int rank, epx_status status)
{
    int by;

    now.excused |= status == EPX_ERR_UNSUPPORTED;
    if (status == EPX_ERR_PEER && strstr(epx_last_error(), "continues without") &&
        sscanf(epx_last_error(), "rank %d", &by) == 1)
        now.told_by[rank][by] = 1;
    if ((status == EPX_ERR_TIMEOUT || status == EPX_ERR_MISMATCH) && !sim_has_died(rank) && only_deaths(now.c))
        wrong_recovery("nobody is late, and a recovery of rank %d ends with status %d", rank, (int)status);
}

/* No two sets go on side by side, and a rank that is well is in the one that does. */
static void through(int rank, const int32_t *mask)
{
    const size_t bytes = (size_t)now.c->prop.nranks * sizeof(*mask);

    if (sim_has_died(rank))
        return;
    for (int r = 0; r < now.c->prop.nranks; r++) {
        if (!mask[r] && is_well(r) && !now.has_left[r] && !now.has_ended[r])
            wrong_recovery("rank %d goes on without rank %d, which is well", rank, r);
        if (now.is_through[r] && !now.has_ended[r] && !sim_has_died(r) && memcmp(mask, now.mask[r], bytes) != 0)
            wrong_recovery("rank %d and rank %d go on with different ranks", rank, r);
    }
    now.is_through[rank] = 1;
    memcpy(now.mask[rank], mask, bytes);
}

/* At the end of its program. */
static void check_through(int rank)
{
    now.has_ended[rank] = 1;
    if (now.recovers[rank] && !now.is_through[rank] && is_well(rank) && only_deaths(now.c) && !now.excused)
        wrong_recovery("rank %d, which is well, has not recovered in %d attempts", rank, now.c->prop.repeat);
}

/* group NULL: this rank could not create it. */
static void leaves(int rank, epx_group *group)
{
    if (!group)
        now.has_left[rank] = 1;
    now.in_order[rank] = group && !sim_has_died(rank) && !abort_word(group);
    check_through(rank);
    sim_rule_left();
}

/* A member of its node that was there when the process was admitted, not one that came with it; -1: none. */
static int old_neighbour(const epx_group *group)
{
    for (int r = 0; r < group->nranks; r++)
        if (r != group->rank && !group->map.out[r] && group->map.node_of[r] == group->node &&
            !membership_incarnation(group->membership, r))
            return r;
    return -1;
}

static void has_joined(epx_group *group)
{
    sim_rule_joined(group->rank, membership_incarnation(group->membership, group->rank), old_neighbour(group));
    has_recovered(group); /* whom the process before went on without does not matter */
}

/* A network that loses messages, or whose whole queue the puts to a dead rank fill, keeps a healthy rank silent. */
static int can_be_silenced(const struct sim_case *c)
{
    return c->net.lose_one_in || c->net.depth <= 8;
}

/* May a healthy rank be unreachable, or late, without a fault of its own? Also one that waits in another group, or that
 * others went on without. */
static int others_may_be_late(const struct sim_case *c)
{
    return can_be_silenced(c) || c->prop.ngroups > 1 || c->prop.enable_mask;
}

/* Where a receiver must run, what others say to this rank before they close their endpoints may not reach it. */
static int may_miss_words(const struct sim_case *c, int rank)
{
    const struct sim_options *s = &c->setup.sched;

    for (int i = 0; i < s->nfaults && c->net.stopped != SIM_NET_TAKES; i++)
        if (s->fault[i].rank == rank)
            return 1;
    return 0;
}

/* One that has stopped until the deadline is lost before it says goodbye, too. */
static int may_lack_a_goodbye(const struct sim_case *c, int from, int to)
{
    return can_be_silenced(c) || may_miss_words(c, from) || may_miss_words(c, to);
}

/* Who has ended its group in order has said so, and nobody takes it for lost. */
static void check_goodbye(const struct epx_error_info *info, int rank)
{
    struct sim_report *r = now.report;

    if (strcmp(info->phase, "network") == 0 && info->peer >= 0 && now.in_order[info->peer] &&
        !sim_has_died(info->peer) && !sim_has_died(rank) && now.c->prop.ngroups == 1 &&
        !may_lack_a_goodbye(now.c, info->peer, rank))
        snprintf(r->wrong_culprit, sizeof(r->wrong_culprit),
                 "a rank that has ended its group in order is named: %.200s", info->message);
}

/* Culprits. Nobody names itself. Nobody says of a rank without a fault that it failed: a wait that expired may name
 * one, with "may" in its message. That it does so rarely is counted. */
static void told(epx_group *group, int rank)
{
    epx_error_info info = EPX_ERROR_INFO_INIT;
    const epx_status status = epx_group_error(group, &info);
    struct sim_report *r = now.report;
    int wrong;

    if (status != EPX_ERR_TIMEOUT && status != EPX_ERR_PEER)
        return;
    check_goodbye(&info, rank);
    /* "failed (...)" is what a rank says of itself. That it cannot go on because of another one is no failure of it. */
    wrong = info.peer >= 0 && !is_faulty(now.c, info.peer) &&
            (!strstr(info.message, "failed (") || strstr(info.message, epx_strerror(EPX_ERR_USAGE)));
    if (info.peer == rank || (wrong && !strstr(info.message, "may ") && !strstr(info.message, "masked")))
        snprintf(r->wrong_culprit, sizeof(r->wrong_culprit), "%s named: %s",
                 info.peer == rank ? "a rank that fails itself is" : "a healthy rank is", info.message);
    if (is_faulty(now.c, rank) || others_may_be_late(now.c) || may_miss_words(now.c, rank))
        return;
    r->named++;
    wrong |= info.peer < 0;
    r->misnamed += wrong;
    if (wrong && now.c->faults == SIM_FAULT_STOP)
        snprintf(r->wrong_culprit, sizeof(r->wrong_culprit), "rank %d has stopped, and rank %d is told: %s",
                 now.c->setup.sched.fault[0].rank, rank, info.message);
}

/* Where ranks are only late, no healthy one masks another. */
static void masks(int rank, int peer)
{
    const int healthy = !is_faulty(now.c, peer) && !now.has_left[peer];

    if (is_faulty(now.c, rank) || can_be_silenced(now.c))
        return;
    now.report->masks++;
    now.report->masked_healthy += healthy;
    if (healthy && now.c->faults == SIM_FAULT_LATE)
        snprintf(now.report->wrong_culprit, sizeof(now.report->wrong_culprit),
                 "rank %d masks rank %d, and neither was late", rank, peer);
}

/* Says what a case has failed with, if that is anything. */
static int failure(struct sim_report *report, const char *text)
{
    if (!text[0])
        return 0;
    snprintf(report->error, sizeof(report->error), "%s", text);
    return -1;
}

int sim_case_run(const struct sim_case *c, struct sim_report *report)
{
    int rc;

    memset(report, 0, sizeof(*report));
    memset(&now, 0, sizeof(now));
    now.c = c;
    now.report = report;
    prop_hooks = (struct prop_hooks){.reuses = reuses,
                                     .starts_over = starts_over,
                                     .told = told,
                                     .joined = has_joined,
                                     .recovered = has_recovered,
                                     .masks = masks,
                                     .leaves = leaves,
                                     .recovers = recovers,
                                     .not_recovered = not_recovered,
                                     .through = through};
    rc = prop_run_case_on(&c->prop, simulated_ranks, report->error, sizeof(report->error));
    prop_hooks = (struct prop_hooks){0};
    if (rc == 0)
        rc = failure(report, report->wrong_culprit);
    rc |= failure(report, report->outcome.broken);
    return rc | failure(report, report->outcome.stuck);
}

void sim_case_print(const struct sim_case *c)
{
    static const char *const stopped[] = {"", ", receivers must run, their connections are shut",
                                          ", receivers must run, their connections stay"};
    const struct sim_options *s = &c->setup.sched;

    prop_print_case(&c->prop);
    fprintf(stderr, "  schedule: policy %d, laggard %d, a point in %d, %llu ns a step\n", (int)s->policy, s->laggard,
            s->point_every, (unsigned long long)s->step_ns);
    if (c->prop.ranks_per_node || c->prop.uneven)
        fprintf(
            stderr,
            "  network: %d ranks per node, latency %llu + %llu ns, message %llu ns, %llu bytes/us, depth %d, ordered "
            "%d, torn %d%%, refused %d%%, anonymous %d, one in %llu lost%s\n",
            c->prop.ranks_per_node, (unsigned long long)c->net.latency_ns, (unsigned long long)c->net.jitter_ns,
            (unsigned long long)c->net.message_ns, (unsigned long long)c->net.bytes_per_us, c->net.depth,
            c->net.ordered, c->net.torn_percent, c->net.refuse_percent, c->net.anonymous,
            (unsigned long long)c->net.lose_one_in, stopped[c->net.stopped]);
    for (int i = 0; i < c->prop.spares; i++)
        fprintf(stderr, "  a process comes for the place of rank %d\n", c->prop.replaces[i]);
    for (int i = 0; i < s->nfaults; i++) {
        const struct sim_fault *f = &s->fault[i];
        const char *where = f->transfer   ? "transfer (in its recoveries)"
                            : f->copy     ? "copy (in its recoveries)"
                            : f->row      ? "row that it writes, number"
                            : f->after_ns ? "so many us after the first fault:"
                                          : "step";
        const unsigned long long at = f->transfer   ? (unsigned long long)f->transfer
                                      : f->copy     ? (unsigned long long)f->copy
                                      : f->row      ? (unsigned long long)f->row
                                      : f->after_ns ? (unsigned long long)f->after_ns / 1000
                                                    : (unsigned long long)f->at;

        if (f->ns == SIM_NEVER)
            fprintf(stderr, "  rank %d dies at %s %llu\n", f->rank, where, at);
        else
            fprintf(stderr, "  rank %d stalls at %s %llu for %llu us\n", f->rank, where, at,
                    (unsigned long long)f->ns / 1000);
    }
}

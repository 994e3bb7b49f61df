/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Signals between ranks, and barriers between the agents of one launch.
 *
 *   writer                                             reader
 *   data stores                                        wait_peers(kind, slot, v): acquire sig[kind][slot][writer] >= v
 *   sync_last(): acq_rel over the agents                 sync_barrier() shares it with its other agents
 *   signal_peers(kind, slot, v): release sig[..][me] = v data loads
 *
 * To a rank on another node a signal is a put of no bytes: its proxy counts it (put.h). Who waits for all ranks looks
 * at the words of its node and at one word of each of its proxies, the aggregate (proxy/count.c), however many ranks
 * there are. The counters of single ranks say who is missing when a wait fails, and who is masked.
 *
 * Every wait has a deadline. Expiry masks the peer if the group allows it, otherwise it records who waited for whom,
 * in which phase, for what and what was there, and tells all ranks through their abort words.
 *
 * Who is blamed: kernel/blame.h.
 *
 * How an operation ends (docs/design.md, "Completion"). Its caller may use the memory again, good or not:
 *
 *   good      all reads of other ranks' memory; own abort word still 0 (kernel_end); the kernel ends
 *   not good  abort words of the node are set; the network reads no memory of this rank any more (network_stop);
 *             the kernel ends
 *
 * So whoever reads memory of a rank that has given up finds its own abort word set when it looks behind the reads.
 */
#ifndef EPX_KERNEL_SYNC_H
#define EPX_KERNEL_SYNC_H

#include "kernel/agent.h"
#include "kernel/blame.h"
#include "kernel/put.h"
#include "kernel/stages.h"

KFN struct control *control_of(const struct group_dev *g, int rank)
{
    return (struct control *)g->heap[rank];
}

/* A low-latency epoch uses slot (e - 1) % W, and is that slot's ((e - 1) / W + 1)-th. High throughput has one operation
 * of a kind in flight at a time: slot 0, and the epoch itself. */
KFN_STEP int slot_of(const struct group_dev *g, uint64_t epoch)
{
    return (int)((epoch - 1) % (uint64_t)g->inflight);
}

KFN_STEP uint64_t lap_of(const struct group_dev *g, uint64_t epoch)
{
    return (epoch - 1) / (uint64_t)g->inflight + 1;
}

/* Does this launch run stage s of the operation? */
KFN int stage_runs(const struct agent *ag, int s)
{
#if AG_STAGED
    return STAGE_NUMBER(ag_stage(ag)) == s;
#else
    (void)ag;
    (void)s;
    return 1;
#endif
}

/* The phase that a stage is has ended. Where each is a launch, the host knows its name (group/marks.c). */
#if AG_STAGED
#define STAGE_MARK(ag, s, name) ((void)0)
#else
#define STAGE_MARK(ag, s, name) AG_MARK(ag, name)
#endif

#if AG_STAGED
/* Which turn of a repeated stage this launch runs. */
KFN int stage_turn(const struct agent *ag)
{
    return STAGE_TURN(ag_stage(ag));
}
#endif

/* An operation stores its epoch at the end of stage `stored`: is that behind this launch? */
KFN uint64_t stage_epoch(const struct agent *ag, const struct group_dev *g, int operation, int stored)
{
    const uint64_t last = g->state->epoch[operation];

#if AG_STAGED
    if (STAGE_NUMBER(ag_stage(ag)) > stored)
        return last;
#else
    (void)ag;
    (void)stored;
#endif
    return last + 1;
}

KFN int is_local(const struct group_dev *g, int rank)
{
    return g->heap[rank] != NULL;
}

/* The i-th rank of this node. Where all ranks are, nothing is loaded to know it. */
KFN int node_rank(const struct group_dev *g, int i)
{
    return g->nnodes == 1 ? i : g->node_ranks[i];
}

KFN size_t signal_index(const struct group_dev *g, int kind, int slot, int from)
{
    return ((size_t)kind * (size_t)g->sig_slots + (size_t)slot) * (size_t)g->nranks + (size_t)from;
}

/* The word in `owner`'s heap that `from`, of the same node, writes. */
KFN_STEP uint64_t *signal_at(const struct group_dev *g, int owner, int kind, int slot, int from)
{
    return &((struct signal *)heap_at(g, owner, g->signals))[signal_index(g, kind, slot, from)].value;
}

/* Where this rank sees the signal of `from`, wherever that is. */
KFN_STEP const uint64_t *signal_from(const struct group_dev *g, int kind, int slot, int from)
{
    return is_local(g, from) ? signal_at(g, g->rank, kind, slot, from)
                             : &g->counters[signal_index(g, kind, slot, from)];
}

/* Records an error for the host; the first one wins. Does not stop anything by itself. */
KFN_STEP void report(struct agent *ag, const struct group_dev *g, int status, int phase, int peer, int64_t expected,
                     int64_t seen, int64_t detail0, int64_t detail1)
{
    if (!ag_leader(ag) || !ag_claim(&g->state->reported, 0, 1))
        return;
    g->error->status = status;
    g->error->phase = phase;
    g->error->peer = peer;
    g->error->expected = expected;
    g->error->seen = seen;
    g->error->detail[0] = detail0;
    g->error->detail[1] = detail1;
    ag_store_release32(&g->error->state, ERROR_SET); /* pairs with the host's acquire in group_error() */
}

/* One rank of the node, this one included; its first word stays. By each lane for itself. */
KFN void set_abort_word(struct agent *ag, const struct group_dev *g, int rank, uint64_t word)
{
    struct control *c = control_of(g, rank);

    if (!ag_peek(&c->abort_word))
        ag_store_release(&c->abort_word, word); /* pairs with the acquires in ag_wait_ge and kernel_end() */
    ag_ring(ag, &c->bell);
}

/* The other ranks of the node. Always before this rank ends anything: what they read here may then be reused. */
KFN_STEP void tell_node(struct agent *ag, const struct group_dev *g, uint64_t word)
{
    AG_EACH(ag, int, i, g->node_size)
    if (node_rank(g, i) != g->rank)
        set_abort_word(ag, g, node_rank(g, i), word);
    ag_sync(ag);
}

/* This rank's operation ends because of its abort word, which says who is to blame: never this rank itself. */
KFN_STEP void report_abort(struct agent *ag, const struct group_dev *g, int phase, int64_t expected, int64_t seen,
                           uint64_t word)
{
    const int culprit = ABORT_CULPRIT(word);

    report(ag, g, KSTATUS_PEER, phase, culprit == g->rank ? -1 : culprit, expected, seen, ABORT_STATUS(word),
           (int64_t)word);
}

/* Ends the operation on every rank: abort words wake all waiters. The own one comes last: another agent, or the host,
 * may end this rank's operation as soon as it sees it. */
KFN_STEP int fail_all(struct agent *ag, const struct group_dev *g, int status, int phase, int peer, int64_t expected,
                      int64_t seen)
{
    const int others = peer >= 0 && (status == KSTATUS_TIMEOUT || status == KSTATUS_MISMATCH);
    const uint64_t word = ABORT_BLAMES(status, phase, g->rank, others ? peer : g->rank);

    /* -1: invalid data. check_signature() reports fields of signatures that differ before it comes here. */
    report(ag, g, status, phase, peer, expected, seen, status == KSTATUS_MISMATCH ? -1 : 0, 0);
    tell_node(ag, g, word);
    if (ag_leader(ag))
        set_abort_word(ag, g, g->rank, word);
    ag_sync(ag);
    put_abort(ag, g, word);
    return 1;
}

/* A decision that may differ from agent to agent, because it depends on a word that others change. All agents of a
 * block take the same way, or those that stay would wait at the block's next barrier for those that left. */
KFN int block_decides(struct agent *ag, int v)
{
#if AG_BLOCKS
    return ag_block_any(ag, v);
#else
    (void)ag;
    return v;
#endif
}

/* Is this agent the first of its block? Where there are no blocks, each is. */
KFN int block_first(struct agent *ag)
{
#if AG_BLOCKS
    return ag_block_index(ag) == 0;
#else
    (void)ag;
    return 1;
#endif
}

/* First lines of every kernel: non-zero if the group has failed and the kernel must not run. That is an error of this
 * rank too: the operation must not be reported as done. */
KFN int kernel_begin(struct agent *ag, const struct group_dev *g)
{
    AG_MARK(ag, MARK_BEGIN);
    ag_begin(ag, g->timeout_ns, control_of(g, g->rank));
    /* Nothing is read behind it. One agent of a block looks for all: the word may lie across a bus. */
    const int looks = block_first(ag);
    const int stops = block_decides(ag, looks && ag_look(&control_of(g, g->rank)->abort_word) != 0);
    if (stops && looks)
        report_abort(ag, g, PHASE_NONE, 0, 0, ag_load_acquire(&control_of(g, g->rank)->abort_word));
    return stops;
}

/* The same for high throughput, which needs a membership that all ranks agreed on (group/recover.c): other ranks still
 * count, and relay for, a rank that is masked here alone. */
KFN_STEP int kernel_begin_agreed(struct agent *ag, const struct group_dev *g)
{
    int odd = -1;

    if (kernel_begin(ag, g))
        return 1;
    for (int r = 0; g->enable_mask && r < g->nranks && odd < 0; r++)
        if (g->mask[r] != g->members[r])
            odd = r;
    if (!g->enable_mask || !block_decides(ag, odd >= 0))
        return 0;
    if (ag_index(ag) == 0)
        fail_all(ag, g, KSTATUS_USAGE, PHASE_MASKS, odd, odd < 0 ? 0 : g->members[odd], odd < 0 ? 0 : g->mask[odd]);
    return 1;
}

/*
 * Rows that are written into memory of other ranks of the node, where ranks may be masked (docs/design.md, "Masks"):
 *
 *   this rank                                       whoever goes on without it
 *   writes_begun += 1; full fence                   sets this rank's abort word; full fence
 *   abort word 0? rows                              writes_ended >= writes_begun? it goes on
 *   writes_ended += 1
 *
 * One of the two sees what the other did first. So a rank that the others go on without, and that wakes up later,
 * writes nothing any more. Nothing between begin and end waits for anybody. Non-zero: the group has failed.
 */
KFN_STEP int writes_begin(struct agent *ag, const struct group_dev *g, int phase)
{
    struct control *own = control_of(g, g->rank);

    if (!g->enable_mask)
        return 0;
    ag_add_fenced(ag, &own->writes_begun, 1); /* pairs with the fences in still_writes() and group_await_writers() */
    const uint64_t word = INJECT_BUG(BUG_LATE_WRITES, 0, ag_look(&own->abort_word));
    if (!word)
        return 0;
    ag_add_fenced(ag, &own->writes_ended, 1);
    report_abort(ag, g, phase, 0, 0, word);
    return 1;
}

KFN_STEP void writes_end(struct agent *ag, const struct group_dev *g)
{
    struct control *own = control_of(g, g->rank);

    if (!g->enable_mask)
        return;
    ag_add_fenced(ag, &own->writes_ended, 1); /* release: pairs with the acquire of the wait in still_writes() */
    if (!ag_look(&own->abort_word))
        return;
    /* Somebody may wait for the end of it. */
    AG_EACH(ag, int, i, g->node_size)
    if (node_rank(g, i) != g->rank)
        ag_ring(ag, &control_of(g, node_rank(g, i))->bell);
}

/* `peer`, of the node, has its abort word: does it still write into memory of others, a whole deadline later? */
KFN_STEP enum wait_result still_writes(struct agent *ag, const struct group_dev *g, int peer)
{
    struct control *theirs = control_of(g, peer);

    ag_add_fenced(ag, &control_of(g, g->rank)->writes_ended, 0); /* pairs with the fence in writes_begin() */
    const uint64_t begun = ag_load_acquire(&theirs->writes_begun);
    return ag_wait_ge(ag, &theirs->writes_ended, begun, g->timeout_ns);
}

/* May a wait in this phase end by masking the peer? */
KFN int phase_masks(int phase)
{
    return (int)(MASKABLE_PHASES >> phase & 1);
}

KFN_STEP int wait_failed_by_word(struct agent *ag, const struct group_dev *g, int phase, uint64_t target, uint64_t seen)
{
    report_abort(ag, g, phase, (int64_t)target, (int64_t)seen, ag_load_acquire(&control_of(g, g->rank)->abort_word));
    return 1; /* kernel_end() tells the others */
}

/* A wait that ended without its word. `culprit` keeps `peer` from answering; most often it is `peer` itself. */
KFN_STEP int wait_failed(struct agent *ag, const struct group_dev *g, enum wait_result why, int phase, int peer,
                         int culprit, uint64_t target, uint64_t seen)
{
    if (why == WAIT_ABORTED)
        return wait_failed_by_word(ag, g, phase, target, seen);
    if (ag_leader(ag))
        ag_add_stat(&g->stats->timeouts, 1);
    if (g->enable_mask && peer >= 0 && culprit >= 0 && phase_masks(phase)) {
        enum wait_result ended = WAIT_OK;
        if (is_local(g, peer)) {
            /* If it is late rather than dead, what it reads from now on may belong to a later operation. */
            if (ag_leader(ag))
                set_abort_word(ag, g, peer, ABORT_BLAMES(KSTATUS_TIMEOUT, phase, g->rank, peer) | ABORT_LEFT_OUT);
            ag_sync(ag);
            ended = still_writes(ag, g, peer);
        }
        if (ended == WAIT_ABORTED)
            return wait_failed_by_word(ag, g, phase, target, seen);
        if (ended == WAIT_OK) {
            report(ag, g, KSTATUS_TIMEOUT, phase, peer, (int64_t)target, (int64_t)seen, 1, 0);
            if (ag_leader(ag)) /* a proxy thread may read it: pairs with mask_read() */
                ag_store_release32((uint32_t *)&g->mask[peer], 0);
            AG_GOES_ON(ag, g, peer);
            ag_sync(ag);
            return 0;
        }
        culprit = peer; /* it stopped, or ended, while it wrote rows: nobody can go on without a recovery */
    }
    report(ag, g, KSTATUS_TIMEOUT, phase, culprit, (int64_t)target, (int64_t)seen, 0, peer);
    return fail_all(ag, g, KSTATUS_TIMEOUT, phase, culprit, (int64_t)target, (int64_t)seen);
}

/* A push that did not go through: its ring stayed full for a whole deadline, or the group has failed meanwhile. */
KFN_STEP int push_failed(struct agent *ag, const struct group_dev *g)
{
    const int aborted = ag_load_acquire(&control_of(g, g->rank)->abort_word) != 0;
    int peer = -1;

    for (int i = 0; !aborted && i < g->nrings && peer < 0; i++)
        peer = (int)ag_load_acquire(g->rings[i].blocked) - 1; /* pairs with the release in report_blocked() */
    return wait_failed(ag, g, aborted ? WAIT_ABORTED : WAIT_TIMEOUT, PHASE_RING, peer,
                       peer < 0 ? -1 : find_culprit(ag, g, peer), 0, 0);
}

enum { OWN_DEADLINES = 4 }; /* for agents of this rank: a wait for a peer, questions, and a wait until it is masked */

/* Barrier of all agents of the launch. Non-zero: the operation has failed. */
KFN_STEP int sync_barrier(struct agent *ag, const struct group_dev *g)
{
    struct group_state *st = g->state;
    const uint64_t generation = ag_load_acquire(&st->barrier);

    ag_sync(ag);
    if (ag_count(ag) == 1)
        return 0;
    if (ag_last(ag, &st->arrived, 0)) {
        if (ag_leader(ag))
            ag_store_release_device(&st->barrier, generation + 1); /* pairs with the acquire of the waits below */
        ag_ring(ag, &control_of(g, g->rank)->bell);
        ag_sync(ag);
        return 0;
    }
    AG_WAITS(ag, PHASE_AGENTS, -1);
    /* Agent 0 may be spending a whole deadline on a peer, and more on finding out why (wait_word()). */
    const enum wait_result why = ag_wait_ge(ag, &st->barrier, generation + 1, OWN_DEADLINES * g->timeout_ns);
    if (why == WAIT_OK)
        return 0;
    return wait_failed(ag, g, why, PHASE_AGENTS, -1, -1, generation + 1, ag_load_acquire(&st->barrier));
}

/*
 * Barrier of the agents of a block: what one of them did or saw is visible to the others. Non-zero: one of them has
 * failed. It does not order blocks: an agent that needs the work of another block waits for a signal that its rank
 * gives after sync_last(), or calls sync_barrier().
 */
KFN int block_barrier(struct agent *ag, const struct group_dev *g, int failed)
{
#if AG_BLOCKS
    (void)g;
    return ag_block_any(ag, failed);
#else
    return sync_barrier(ag, g) || failed;
#endif
}

/* True for the agent that comes last to `point` (0..3, each once per kernel): all others' work is visible to it. */
KFN int sync_last(struct agent *ag, const struct group_dev *g, int point)
{
    ag_sync(ag);
    if (ag_count(ag) == 1)
        return 1;
    return ag_last(ag, &g->state->ticket[point], 1 + point);
}

/* Statistics lie in the host's memory: agents add up in device memory, and the last one (sync_last) passes it on. */
KFN void count_returned(struct agent *ag, const struct group_dev *g, uint64_t rows)
{
    if (rows)
        ag_fetch_add64(ag, &g->state->returned, rows);
}

KFN void report_returned(struct agent *ag, const struct group_dev *g)
{
    if (!ag_leader(ag))
        return;
    ag_add_stat(&g->stats->rows_returned, g->state->returned);
    g->state->returned = 0;
}

enum scope { SCOPE_ALL, SCOPE_NODE, SCOPE_REMOTE };

KFN int in_scope(const struct group_dev *g, enum scope scope, int rank)
{
    if (!g->mask[rank])
        return 0;
    return scope == SCOPE_ALL || (scope == SCOPE_NODE) == is_local(g, rank);
}

/* With masks: has `to`, of this node, the signals of all ranks of its node that are not masked? Of two ranks that
 * signal at the same time at least one sees both (ag_store_signal and ag_peek are in one order). Ranks that do not
 * agree on who is masked may all leave the wake-up to another: the sleeper then polls by itself. */
KFN int signals_there(const struct group_dev *g, int to, int kind, int slot, uint64_t value)
{
    for (int i = 0; i < g->node_size; i++) {
        const int r = node_rank(g, i);
        if (r != g->rank && g->mask[r] && (int64_t)(ag_peek(signal_at(g, to, kind, slot, r)) - value) < 0)
            return 0;
    }
    return 1;
}

/* Is the signal that this rank has just given to `to`, of its node, the last one of its (kind, slot)? A wait for a kind
 * inside a node is for all of its ranks (wait_peers), and a wake-up before the last one is useless: eight ranks on two
 * cores would spend a tenth of their time on those. All ranks add to one word, so that nobody looks at the others': no
 * rank gives the next signal of a slot before it has those of all others of the last one. */
KFN int signals_complete(struct agent *ag, const struct group_dev *g, int to, int kind, int slot, uint64_t value)
{
    struct signal *own = &((struct signal *)heap_at(g, to, g->signals))[signal_index(g, kind, slot, to)];

    if (g->enable_mask)
        return signals_there(g, to, kind, slot, value);
    return (ag_fetch_add64(ag, &own->arrived, 1) + 1) % (uint64_t)g->node_size == 0;
}

/* Called by one agent, after sync_last: everything this rank did before is visible to whoever sees the signal. */
KFN_STEP void signal_peers(struct agent *ag, const struct group_dev *g, enum scope scope, int kind, int slot,
                           uint64_t value)
{
    struct put_batch batch;

    AG_SIGNALS(ag, g, kind, slot, value);
    AG_EACH(ag, int, i, g->node_size)
    {
        const int p = node_rank(g, i);
        if (!in_scope(g, scope, p))
            continue;
        ag_store_signal(signal_at(g, p, kind, slot, g->rank), value); /* pairs with the acquire in wait_word */
        if (AG_BELLS && signals_complete(ag, g, p, kind, slot, value))
            ag_ring(ag, &control_of(g, p)->bell);
    }
    if (g->nnodes == 1 || scope == SCOPE_NODE)
        return;
    /* Ring by ring: one push for up to 32 ranks, not one for each. */
    put_begin(&batch);
    for (int ring = 0; ring < g->nrings; ring++)
        for (int p = 0; p < g->nranks; p++)
            if (!is_local(g, p) && ring_of(g, p, COUNTER(kind, slot)) == ring && in_scope(g, scope, p))
                put(ag, g, &batch, p, COUNTER(kind, slot), 0, 0, 0);
    if (put_flush(ag, g, &batch))
        push_failed(ag, g); /* who waits for the signal is told */
}

/* One word of one peer; `start` is when the caller began to wait, for one deadline over many. Non-zero: failed. */
KFN_STEP int wait_word(struct agent *ag, const struct group_dev *g, const uint64_t *word, uint64_t target, int phase,
                       int peer, uint64_t start)
{
    const uint64_t spent = ag_now(ag) - start;
    AG_WAITS(ag, phase, peer);
    enum wait_result why = wait_aloud(ag, g, word, target, peer, spent < g->timeout_ns ? g->timeout_ns - spent : 0);
    int culprit = peer;

    /* One deadline for many: those of the last ones expire at once, and time for questions runs out too. */
    if (why == WAIT_TIMEOUT && peer >= 0 && spent < g->timeout_ns + g->timeout_ns / 2) {
        culprit = find_culprit(ag, g, peer);
        /* It may have come meanwhile. A rank that waits for another one is not masked in its place: it is given time to
         * mask that one. */
        const int extended = culprit >= 0 && culprit != peer && g->enable_mask && phase_masks(phase);
        why = wait_aloud(ag, g, word, target, peer, extended ? g->timeout_ns : 0);
    }
    return why == WAIT_OK ? 0 : wait_failed(ag, g, why, phase, peer, culprit, target, ag_load_acquire(word));
}

/* What the proxy of ring i has of all its peers. */
KFN size_t aggregate_index(const struct group_dev *g, int ring, int kind, int slot)
{
    return ((size_t)ring * SIG_COUNT + (size_t)kind) * (size_t)g->sig_slots + (size_t)slot;
}

KFN int scope_has_rings(const struct group_dev *g, enum scope scope)
{
    return g->nnodes > 1 && scope != SCOPE_NODE;
}

/* Are the signals of all peers there? Lanes look at the node's words and at the aggregates. */
KFN int glance_peers(struct agent *ag, const struct group_dev *g, enum scope scope, int kind, int slot, uint64_t value,
                     int phase)
{
    const int near = scope == SCOPE_REMOTE ? 0 : g->node_size, far = scope_has_rings(g, scope) ? g->nrings : 0;
    int last = -1; /* of the ranks that a lane missed */

    AG_GLANCES_BEGIN(ag);
    for (int i = 0; i < AG_GLANCES; i++) {
        int missing = 0, late = -1;
        AG_EACH(ag, int, n, near + far)
        {
            const int p = n < near ? node_rank(g, n) : -1;
            const uint64_t *word = n < near ? signal_at(g, g->rank, kind, slot, p)
                                            : &g->aggregates[aggregate_index(g, n - near, kind, slot)];
            if ((p < 0 || g->mask[p]) && (int64_t)(ag_peek(word) - value) < 0) {
                missing = 1;
                late = p;
            }
        }
        if (!ag_any(ag, missing)) {
            ag_peeked(ag);
            AG_GLANCED(ag, phase, last, kind, slot, value);
            return 1;
        }
        last = late;
    }
    return 0;
}

/* The first rank elsewhere whose counter is below `value`; -1: none any more. */
KFN_STEP int late_peer(const struct group_dev *g, const uint64_t *counters, uint64_t value)
{
    for (int p = 0; p < g->nranks; p++)
        if (!is_local(g, p) && g->mask[p] && (int64_t)(ag_load_acquire(&counters[p]) - value) < 0)
            return p;
    return -1;
}

/* An aggregate is enough as long as nobody is late: who waits longer asks the rank that is missing (wait_word). */
#define AGGREGATE_PART 8 /* of a deadline */

/* The ranks elsewhere, by the aggregates: each of their counters has reached `value`. Non-zero: failed. */
KFN_STEP int wait_remotes(struct agent *ag, const struct group_dev *g, int kind, int slot, uint64_t value, int phase,
                          uint64_t start)
{
    const uint64_t *counters = &g->counters[signal_index(g, kind, slot, 0)];

    for (int i = 0; i < g->nrings; i++) {
        int late;
        AG_WAITS(ag, phase, -1);
        if (ag_wait_ge(ag, &g->aggregates[aggregate_index(g, i, kind, slot)], value, g->timeout_ns / AGGREGATE_PART) ==
            WAIT_OK)
            continue;
        while ((late = late_peer(g, counters, value)) >= 0)
            if (wait_word(ag, g, &counters[late], value, phase, late, start))
                return 1;
    }
    return 0;
}

/* The own signal, which another agent of this rank gives. That one may be spending a whole deadline on a peer: it gets
 * more than that, as in sync_barrier(), and no rank is masked for it, least of all this one. */
KFN_STEP int wait_own(struct agent *ag, const struct group_dev *g, int kind, int slot, uint64_t value, int64_t *wait_ns)
{
    const uint64_t *word = signal_at(g, g->rank, kind, slot, g->rank);
    const uint64_t before = wait_ns ? ag_now(ag) : 0;
    AG_WAITS(ag, PHASE_AGENTS, -1);
    const enum wait_result why = ag_wait_ge(ag, word, value, OWN_DEADLINES * g->timeout_ns);

    if (wait_ns && ag_leader(ag))
        wait_ns[g->rank] += (int64_t)(ag_now(ag) - before);
    return why == WAIT_OK ? 0 : wait_failed(ag, g, why, PHASE_AGENTS, -1, -1, value, ag_load_acquire(word));
}

/* Waits until every active peer's signal reaches `value`; one deadline for all of them. One agent. Non-zero: failed. */
KFN_STEP int wait_each(struct agent *ag, const struct group_dev *g, enum scope scope, int kind, int slot,
                       uint64_t value, int phase, int64_t *wait_ns)
{
    int failed = 0;

    if (!wait_ns && glance_peers(ag, g, scope, kind, slot, value, phase)) {
        AG_HEARD(ag, g, scope, kind, slot, value);
        return 0;
    }
    if (in_scope(g, scope, g->rank) && wait_own(ag, g, kind, slot, value, wait_ns))
        return 1;
    const uint64_t start = ag_now(ag);
    const int each = g->enable_mask || wait_ns; /* a wait of its own for each rank elsewhere */
    for (int i = 0; i < (each ? g->nranks : g->node_size) && !failed; i++) {
        const int p = each ? i : node_rank(g, i);
        if (p == g->rank || !in_scope(g, scope, p))
            continue;
        const uint64_t before = wait_ns ? ag_now(ag) : 0;
        AG_WAITS_SIGNAL(ag, kind, slot, value);
        failed = wait_word(ag, g, signal_from(g, kind, slot, p), value, phase, p, start);
        AG_WAITS_SIGNAL(ag, -1, 0, 0);
        if (wait_ns && ag_leader(ag))
            wait_ns[p] += (int64_t)(ag_now(ag) - before); /* not what earlier ranks took */
    }
    if (!failed && !each && scope_has_rings(g, scope))
        failed = wait_remotes(ag, g, kind, slot, value, phase, start);
    if (!failed)
        AG_HEARD(ag, g, scope, kind, slot, value);
    return failed;
}

/*
 * The same for all agents, which all call it. Each block waits for itself, and nothing else that other blocks do is
 * waited for. Where a wait may end by masking a peer, one agent decides that for the whole launch.
 */
KFN_STEP int wait_peers(struct agent *ag, const struct group_dev *g, enum scope scope, int kind, int slot,
                        uint64_t value, int phase, int64_t *wait_ns)
{
    const int one = g->enable_mask;
    int failed = 0;

    if ((one ? ag_index(ag) : ag_block_index(ag)) == 0)
        failed = wait_each(ag, g, scope, kind, slot, value, phase, ag_index(ag) == 0 ? wait_ns : NULL);
    if (one ? sync_barrier(ag, g) || failed : block_barrier(ag, g, failed))
        return 1;
    if (AG_BLOCKS && !one)
        return 0;
    /* One agent has waited for all: where that failed, the others know it by the abort word, which it set before they
     * met. */
    return ag_look(&control_of(g, g->rank)->abort_word) && wait_failed(ag, g, WAIT_ABORTED, phase, -1, -1, value, 0);
}

/* The same where no agent does anything behind it that needs the peers: the operation waits, and on a GPU one block of
 * it. The others leave their SMs to whoever computes. */
KFN int wait_peers_end(struct agent *ag, const struct group_dev *g, enum scope scope, int kind, int slot,
                       uint64_t value, int phase)
{
#if AG_BLOCKS
    if (!g->enable_mask && ag_block_number(ag) != 0)
        return 0;
#endif
    return wait_peers(ag, g, scope, kind, slot, value, phase, NULL);
}

/* `n` more rows of a counter of rows. One agent per (kind, slot, peer); the others learn of it at the next barrier. */
KFN_STEP int wait_rows(struct agent *ag, const struct group_dev *g, int kind, int slot, int peer, uint64_t n, int phase,
                       uint64_t start)
{
    const size_t i = signal_index(g, kind, slot, peer);
    const uint64_t target = g->expected[i] + n;

    ag_sync(ag);
    if (ag_leader(ag))
        g->expected[i] = target;
    return wait_word(ag, g, &g->counters[i], target, phase, peer, start);
}

/* So many more rows are expected of a peer: late_rows() finds who is late. One agent per (kind, slot, peer). */
KFN void expect_rows(struct agent *ag, const struct group_dev *g, int kind, int slot, int peer, uint64_t n)
{
    if (ag_leader(ag))
        g->expected[signal_index(g, kind, slot, peer)] += n;
}

/* The first rank elsewhere of which rows are missing; -1: none. */
KFN_STEP int late_rows(const struct group_dev *g, int kind, int slot)
{
    for (int p = 0; p < g->nranks; p++) {
        const size_t i = signal_index(g, kind, slot, p);
        if (!is_local(g, p) && (int64_t)(ag_load_acquire(&g->counters[i]) - g->expected[i]) < 0)
            return p;
    }
    return -1;
}

/* `rows` more from all ranks of a ring together. One agent per (kind, slot); a group without masks. */
KFN_STEP int wait_ring_rows(struct agent *ag, const struct group_dev *g, int ring, uint64_t rows, int kind, int slot,
                            int phase, uint64_t start)
{
    const size_t i = aggregate_index(g, ring, kind, slot), first = signal_index(g, kind, slot, 0);
    const uint64_t target = g->expected_all[i] + rows;
    int late;

    ag_sync(ag);
    if (ag_leader(ag))
        g->expected_all[i] = target;
    AG_WAITS(ag, phase, -1);
    if (ag_wait_ge(ag, &g->aggregates[i], target, g->timeout_ns / AGGREGATE_PART) == WAIT_OK)
        return 0;
    while ((late = late_rows(g, kind, slot)) >= 0)
        if (wait_word(ag, g, &g->counters[first + (size_t)late], g->expected[first + (size_t)late], phase, late, start))
            return 1;
    return wait_word(ag, g, &g->aggregates[i], target, phase, -1, start);
}

/* The first rank elsewhere with puts that the network has not read; -1: none. */
KFN_STEP int late_sent(const struct group_dev *g)
{
    for (int r = 0; r < g->nranks; r++)
        if (!is_local(g, r) && (int64_t)(ag_load_acquire(&g->sent[r]) - ag_load_acquire(&g->pushed[r])) < 0)
            return r;
    return -1;
}

/* All puts through a ring have been read. Nobody pushes meanwhile: the sum is complete when each of its parts is. */
KFN_STEP int wait_ring_sent(struct agent *ag, const struct group_dev *g, int ring, int phase, uint64_t start)
{
    int late;

    AG_WAITS(ag, phase, -1);
    if (ag_wait_ge(ag, &g->sent_all[ring], ag_load_acquire(&g->pushed_all[ring]), g->timeout_ns / AGGREGATE_PART) ==
        WAIT_OK)
        return 0;
    while ((late = late_sent(g)) >= 0)
        if (wait_word(ag, g, &g->sent[late], ag_load_acquire(&g->pushed[late]), phase, late, start))
            return 1;
    return 0;
}

/* All puts to ranks elsewhere that were pushed so far have been read from this rank's memory. One agent, or each. */
KFN_STEP int wait_sent(struct agent *ag, const struct group_dev *g, int phase)
{
    const uint64_t start = ag_now(ag);

    for (int r = 0; r < g->nranks; r++)
        if (!is_local(g, r) && g->mask[r] &&
            wait_word(ag, g, &g->sent[r], ag_load_acquire(&g->pushed[r]), phase, r, start))
            return 1;
    return 0;
}

/* The same by one look at each ring, while no agent pushes: a later put to one rank would count for one to another.
 * With masks the puts to some ranks are never read. */
KFN_STEP int wait_all_sent(struct agent *ag, const struct group_dev *g, int phase)
{
    const uint64_t start = ag_now(ag);

    if (g->enable_mask)
        return wait_sent(ag, g, phase);
    for (int i = 0; i < g->nrings; i++)
        if (wait_ring_sent(ag, g, i, phase, start))
            return 1;
    return 0;
}

KFN int signature_differs(const struct signature *a, const struct signature *b)
{
    return a->hidden_bytes != b->hidden_bytes || a->dtype != b->dtype || a->scale_bytes != b->scale_bytes ||
           a->topk != b->topk || a->layout != b->layout || a->extra != b->extra;
}

/* `theirs` was read from a peer's heap. Non-zero: the operation has failed, and the report names the first field. */
KFN_STEP int check_signature(struct agent *ag, const struct group_dev *g, const struct signature *mine,
                             const struct signature *theirs, int phase, int peer)
{
    const int32_t *a = (const int32_t *)mine, *b = (const int32_t *)theirs;

    if (!signature_differs(mine, theirs))
        return 0;
    /* A peer masked this rank meanwhile, and `theirs` belongs to a later operation: that is no mismatch. */
    const uint64_t word = ag_load_acquire(&control_of(g, g->rank)->abort_word);
    if (word) {
        report_abort(ag, g, phase, 0, 0, word);
        return 1;
    }
    for (int i = 0; i < (int)(sizeof(*mine) / sizeof(*a)); i++) {
        if (a[i] != b[i]) {
            report(ag, g, KSTATUS_MISMATCH, phase, peer, a[i], b[i], i, 0);
            break;
        }
    }
    return fail_all(ag, g, KSTATUS_MISMATCH, phase, peer, 0, 0);
}

/* The same for the descriptors of all ranks of the node, which open with a signature: one look by all lanes. */
KFN_STEP int check_node(struct agent *ag, const struct group_dev *g, const struct signature *mine, uint64_t desc,
                        int phase)
{
    const int words = (int)(sizeof(*mine) / 4);
    int odd = 0;

    AG_EACH(ag, int, i, g->node_size *words)
    {
        const int r = node_rank(g, i / words);
        if (g->mask[r])
            odd |= ((const int32_t *)heap_at(g, r, desc))[i % words] != ((const int32_t *)mine)[i % words];
    }
    for (int i = 0; ag_any(ag, odd) && i < g->node_size; i++) {
        const int r = node_rank(g, i);
        if (g->mask[r] && check_signature(ag, g, mine, (const struct signature *)heap_at(g, r, desc), phase, r))
            return 1;
    }
    return 0;
}

enum { STOP_WAITS = 8 }; /* several: a process that was stopped meanwhile has lost one of them, not all */

/* The proxies stop (proxy/stop.c): when this returns, the network reads no memory of this rank any more, unless a
 * proxy is stuck in the network's library for half a deadline. */
KFN_STEP void network_stop(struct agent *ag, const struct group_dev *g)
{
    for (int i = 0; i < g->nrings; i++) {
        if (ag_leader(ag))
            ag_store_release(g->rings[i].stop, 1); /* pairs with the acquire in stop_asked() */
        ag_ring(ag, g->rings[i].bell);
    }
    for (int i = 0; i < g->nrings; i++) {
        if (ag_leader(ag))
            ag->abort_word = g->rings[i].stopped; /* the group's would end the wait at once */
        ag_sync(ag);
        /* Acquire: pairs with the release in stop_progress(). */
        for (int n = 0; n < INJECT_BUG(BUG_NO_STOP, 0, STOP_WAITS) && !ag_load_acquire(g->rings[i].stopped); n++)
            ag_wait_ge(ag, g->rings[i].stopped, 1, g->timeout_ns / (2 * STOP_WAITS));
        /* The stages that follow do not wait for it again. Should it stop just now, that costs a warning. */
        if (INJECT_BUG(BUG_NO_STOP, 0, 1) && ag_leader(ag) && !ag_peek(g->rings[i].stopped))
            ag_store_release(g->rings[i].stopped, 2);
    }
}

/* This rank was left out, and the others go on: it must not end their operations. But a rank that has not left it out
 * may be reading its memory, and looks at this in node_left(). */
KFN_STEP void tell_left_out(struct agent *ag, const struct group_dev *g)
{
    AG_EACH(ag, int, i, g->node_size)
    if (node_rank(g, i) != g->rank)
        ag_store_release(signal_at(g, node_rank(g, i), SIG_ABORT, 0, g->rank),
                         1); /* pairs with ag_peeked() in node_left() */
    ag_sync(ag);
}

/* With masks: has a rank of the node that this rank counts on been left out by others, and given up? Then what was
 * read of it may have been reused. Where the group has no masks nobody is left out. The rank, or -1. */
KFN int node_left(struct agent *ag, const struct group_dev *g)
{
    int left = 0;

    if (!g->enable_mask)
        return -1;
    AG_EACH(ag, int, p, g->nranks)
    if (p != g->rank && in_scope(g, SCOPE_NODE, p) && ag_peek(signal_at(g, g->rank, SIG_ABORT, 0, p)))
        left = 1;
    if (!ag_any(ag, left))
        return -1;
    ag_peeked(ag);
    for (int p = 0; p < g->nranks; p++)
        if (p != g->rank && in_scope(g, SCOPE_NODE, p) && ag_load_acquire(signal_at(g, g->rank, SIG_ABORT, 0, p)))
            return p;
    return -1;
}

/* The others have gone on without `left`, and this rank has not: its operation is not good, theirs are. It cannot catch
 * up with them by itself, for its caller stops here. So the operation ends on all ranks, and they recover together. */
KFN_STEP uint64_t fail_left(struct agent *ag, const struct group_dev *g, int left)
{
    report_abort(ag, g, PHASE_MASKS, 0, 0, ABORT_BLAMES(KSTATUS_TIMEOUT, PHASE_MASKS, g->rank, left));
    if (INJECT_BUG(BUG_FAILS_ALONE, 0, 1))
        fail_all(ag, g, KSTATUS_TIMEOUT, PHASE_MASKS, left, 0, 0);
    return ag_load_acquire(&control_of(g, g->rank)->abort_word);
}

/* This operation is not good: other ranks may have stopped waiting for this one, or reused what it has read. */
KFN_STEP void give_up(struct agent *ag, const struct group_dev *g, uint64_t word)
{
    report_abort(ag, g, PHASE_NONE, 0, 0, word);
    if (word & ABORT_LEFT_OUT) {
        tell_left_out(ag, g);
    } else {
        if (INJECT_BUG(BUG_NO_TELL, 0, 1))
            tell_node(ag, g, word);
        if (ag_load_acquire(&control_of(g, g->rank)->abort_told) != word)
            put_abort(ag, g, word);
    }
    if (g->nnodes > 1)
        network_stop(ag, g);
}

/* The last look of a kernel: behind all that this agent, and those for which it looks, have read of other ranks. */
KFN void look_behind(struct agent *ag, const struct group_dev *g)
{
    const int gone = AG_GONE(ag, g);
    uint64_t word = INJECT_BUG(BUG_NO_RECHECK, 0, ag_look_behind(&control_of(g, g->rank)->abort_word));
    const int left = word ? -1 : node_left(ag, g);

    AG_LOOKED(ag, g, gone, word != 0 || left >= 0);
    if (left >= 0)
        word = fail_left(ag, g, left);
    if (word)
        give_up(ag, g, word);
    AG_ENDS(ag, g, word, word != 0 || left >= 0);
}

/* Last lines of every kernel. Where agents form blocks, the last one of each block looks for all of it: the word may
 * lie across a bus, where hundreds of loads of one word come one after the other. */
KFN void kernel_end(struct agent *ag, const struct group_dev *g)
{
#if AG_BLOCKS
    if (ag_block_last(ag))
        look_behind(ag, g);
#else
    look_behind(ag, g);
#endif
    if (ag->waits && ag_leader(ag)) {
        ag_add_stat(&g->stats->waits, ag->waits);
        ag_add_stat(&g->stats->wait_ns, ag->wait_ns);
    }
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reader's side of signals: waits for the signals of all peers.
 *
 *   glance_peers()   first looks, by all lanes at once; most waits end here
 *   wait_each()      then rank by rank, with one deadline for all; ranks elsewhere by their rings' aggregates
 *   wait_peers()     the same for all agents of a launch
 */
#ifndef EPX_KERNEL_WAIT_PEERS_H
#define EPX_KERNEL_WAIT_PEERS_H

#include "kernel/barrier.h"

/* Are the signals of all peers there? Lanes look at the node's words and at the aggregates. */
KFN int glance_peers(struct agent *ag, const struct group_dev *g, enum scope scope, int kind, int slot, uint64_t value,
                     int phase)
{
    const int one = has_node_word(g), local = scope == SCOPE_REMOTE ? 0 : one ? 1 : g->node_size;
    const int remote = scope_has_rings(g, scope) ? g->nrings : 0;
    int last = -1; /* of the ranks that a lane missed */

    AG_GLANCES_BEGIN(ag);
    for (int i = 0; i < AG_GLANCES; i++) {
        int missing = 0, late = -1;
        AG_EACH(ag, int, n, local + remote)
        {
            const int p = n < local && !one ? node_rank(g, n) : -1;
            const uint64_t *word = n >= local ? &g->aggregates[aggregate_index(g, n - local, kind, slot)]
                                   : one      ? &node_signal(g, kind, slot)->all
                                              : signal_at(g, g->rank, kind, slot, p);
            if ((p < 0 || is_active(g, p)) && (int64_t)(ag_peek(word) - value) < 0) {
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

/* The first rank elsewhere whose counter is below `value`; -1: none any more. Acquire: pairs with the releases of the
 * proxy that counts (proxy/count.c). */
KFN_STEP int late_peer(const struct group_dev *g, const uint64_t *counters, uint64_t value)
{
    for (int p = 0; p < g->nranks; p++)
        if (!is_local(g, p) && is_active(g, p) && (int64_t)(ag_load_acquire(&counters[p]) - value) < 0)
            return p;
    return -1;
}

/* An aggregate is enough as long as nobody is late: who waits longer asks the rank that is missing (wait_word). */
#define AGGREGATE_PART 8 /* of a deadline */

/* The ranks elsewhere, by the aggregates: each of their counters has reached `value`. Non-zero: failed. */
KFN_STEP int wait_remotes(struct agent *ag, const struct group_dev *g, int kind, int slot, uint64_t value, int phase)
{
    const uint64_t *counters = &g->counters[signal_index(g, kind, slot, 0)];

    for (int i = 0; i < g->nrings; i++) {
        int late;
        AG_WAITS(ag, phase, -1);
        if (ag_wait_ge(ag, &g->aggregates[aggregate_index(g, i, kind, slot)], value, g->timeout_ns / AGGREGATE_PART) ==
            WAIT_OK)
            continue;
        while ((late = late_peer(g, counters, value)) >= 0)
            if (wait_word(ag, g, &counters[late], value, phase, late))
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

/* The ranks of the node, by their one word, where there is one. Zero: not all are there after a slice of the deadline,
 * or the group has failed: the caller asks rank by rank, who is late or what has happened. */
KFN int wait_node(struct agent *ag, const struct group_dev *g, enum scope scope, int kind, int slot, uint64_t value,
                  int phase)
{
    (void)phase; /* where waits leave no marks */
    if (!has_node_word(g) || scope == SCOPE_REMOTE || AG_TRACED(ag))
        return 0;
    AG_WAITS(ag, phase, -1);
    return ag_wait_ge(ag, &node_signal(g, kind, slot)->all, value, wait_slice(g)) == WAIT_OK;
}

/* Waits until every active peer's signal reaches `value`; one deadline for all of them. One agent. Non-zero: failed. */
KFN_STEP int wait_each(struct agent *ag, const struct group_dev *g, enum scope scope, int kind, int slot,
                       uint64_t value, int phase, int64_t *wait_ns)
{
    int failed = 0;

    if (!wait_ns && glance_peers(ag, g, scope, kind, slot, value, phase)) {
        AG_RECEIVED(ag, g, scope, kind, slot, value);
        return 0;
    }
    const int each = has_masks(g) || wait_ns; /* a wait of its own for each rank elsewhere */
    const int waited = !each && wait_node(ag, g, scope, kind, slot, value, phase);
    if (!waited && in_scope(g, scope, g->rank) && wait_own(ag, g, kind, slot, value, wait_ns))
        return 1;
    waits_begin(ag, g);
    for (int i = 0; i < (each ? g->nranks : waited ? 0 : g->node_size) && !failed; i++) {
        const int p = each ? i : node_rank(g, i);
        if (p == g->rank || !in_scope(g, scope, p))
            continue;
        const uint64_t before = wait_ns ? ag_now(ag) : 0;
        AG_WAITS_SIGNAL(ag, kind, slot, value);
        failed = wait_word(ag, g, signal_from(g, kind, slot, p), value, phase, p);
        AG_WAITS_SIGNAL(ag, -1, 0, 0);
        if (wait_ns && ag_leader(ag))
            wait_ns[p] += (int64_t)(ag_now(ag) - before); /* not what earlier ranks took */
    }
    if (!failed && !each && scope_has_rings(g, scope))
        failed = wait_remotes(ag, g, kind, slot, value, phase);
    if (!failed)
        AG_RECEIVED(ag, g, scope, kind, slot, value);
    return failed;
}

/*
 * The same for all agents, which all call it. Each block waits for itself, and nothing else that other blocks do is
 * waited for. Where a wait may end by masking a peer, one agent decides that for the whole launch.
 */
KFN_STEP int wait_peers(struct agent *ag, const struct group_dev *g, enum scope scope, int kind, int slot,
                        uint64_t value, int phase, int64_t *wait_ns)
{
    const int one = has_masks(g);
    int failed = 0;

    if ((one ? ag_index(ag) : ag_block_index(ag)) == 0)
        failed = wait_each(ag, g, scope, kind, slot, value, phase, ag_index(ag) == 0 ? wait_ns : NULL);
    if (one ? sync_barrier(ag, g) : block_barrier(ag, g, failed))
        return 1;
    if (AG_BLOCKS && !one)
        return 0;
    /* One agent has waited for all: where that failed, the others know it by the abort word, which it set before they
     * met. It may also be set now, between the looks of two agents: those of a block do the same. */
    if (!failed && ag_look(&control_of(g, g->rank)->abort_word))
        failed = wait_failed(ag, g, WAIT_ABORTED, phase, -1, -1, value, 0);
    return block_decides(ag, failed);
}

/* The same where no agent does anything behind it that needs the peers: the operation waits, and on a GPU one block of
 * it. The others leave their SMs to whoever computes. */
KFN int wait_peers_end(struct agent *ag, const struct group_dev *g, enum scope scope, int kind, int slot,
                       uint64_t value, int phase)
{
#if AG_BLOCKS
    if (!has_masks(g) && ag_block_number(ag) != 0)
        return 0;
#endif
    return wait_peers(ag, g, scope, kind, slot, value, phase, NULL);
}

#endif

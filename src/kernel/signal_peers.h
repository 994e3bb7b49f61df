/* SPDX-License-Identifier: Apache-2.0 */
/* The writer's side of signals: this rank tells its peers that it has done what a kind of signal means. */
#ifndef EPX_KERNEL_SIGNAL_PEERS_H
#define EPX_KERNEL_SIGNAL_PEERS_H

#include "kernel/wait_word.h"

/* With masks: has `to`, of this node, the signals of all ranks of its node that are not masked? Of two ranks that
 * signal at the same time at least one sees both (ag_store_signal and ag_peek are in one order). Ranks that do not
 * agree on who is masked may all leave the wake-up to another: the sleeper then polls by itself. */
KFN int signals_there(const struct group_dev *g, int to, int kind, int slot, uint64_t value)
{
    for (int i = 0; i < g->node_size; i++) {
        const int r = node_rank(g, i);
        if (r != g->rank && is_active(g, r) && (int64_t)(ag_peek(signal_at(g, to, kind, slot, r)) - value) < 0)
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

    if (has_masks(g))
        return signals_there(g, to, kind, slot, value);
    return (ag_fetch_add64(ag, &own->arrived, 1) + 1) % (uint64_t)g->node_size == 0;
}

/* With one word for the node (has_node_word): what a rank does for a signal does not depend on how many others there
 * are. All add to one count, and the last one stores the value that all have given, and wakes them. The own word is for
 * whoever waits long and asks who is missing. It follows the addition: whoever goes on by the words of all, without the
 * node's, must not add for the next signal before all have added for this one. */
KFN void signal_node(struct agent *ag, const struct group_dev *g, int kind, int slot, uint64_t value)
{
    struct signal *node = node_signal(g, kind, slot);
    uint64_t *own = signal_at(g, g->rank, kind, slot, g->rank);
    const uint64_t most = (uint64_t)g->node_size - INJECT_BUG(BUG_NODE_WORD, g->node_size > 2, 0);

    if (INJECT_BUG(BUG_WORD_FIRST, 1, 0))
        ag_store_signal(own, value);
    /* Release and acquire: the last one has seen all that the others did before, and passes it on. As in
     * signals_complete(), no rank adds for its next signal before it has the last one of all others. */
    const int last = ag_fetch_add64(ag, &node->arrived, 1) % (uint64_t)g->node_size == most - 1;
    ag_store_signal(own, value); /* pairs with the acquire in wait_word */
    if (!last)
        return;
    ag_store_signal(&node->all, value); /* pairs with the acquire in wait_node */
    AG_EACH(ag, int, i, g->node_size) ag_ring(ag, &control_of(g, node_rank(g, i))->bell);
}

/* Called by one agent, after sync_last: everything this rank did before is visible to whoever sees the signal. */
KFN_STEP void signal_peers(struct agent *ag, const struct group_dev *g, enum scope scope, int kind, int slot,
                           uint64_t value)
{
    struct put_batch batch;

    AG_SIGNALS(ag, g, kind, slot, value);
    if (has_node_word(g) && scope != SCOPE_REMOTE)
        signal_node(ag, g, kind, slot, value);
    AG_EACH(ag, int, i, has_node_word(g) ? 0 : g->node_size)
    {
        const int p = node_rank(g, i);
        if (!in_scope(g, scope, p))
            continue;
        ag_store_signal(signal_at(g, p, kind, slot, g->rank), value); /* pairs with the acquire in wait_word */
        if (AG_BELLS && signals_complete(ag, g, p, kind, slot, value))
            ag_ring(ag, &control_of(g, p)->bell);
    }
    AG_SIGNALLED(ag, kind, slot, value);
    if (!has_nodes(g) || scope == SCOPE_NODE)
        return;
    /* Ring by ring: one push for up to 32 ranks, not one for each. */
    put_begin(&batch);
    for (int ring = 0; ring < g->nrings; ring++)
        for (int p = 0; p < g->nranks; p++)
            if (!is_local(g, p) && ring_of(g, p, COUNTER(kind, slot)) == ring && in_scope(g, scope, p))
                put(ag, g, &batch, p, COUNTER(kind, slot), 0, 0, 0);
    if (put_flush(ag, g, &batch))
        push_failed(ag, g, batch.failed); /* who waits for the signal is told */
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The producers' side of a command ring (struct ring_dev): any number of agents push, one proxy thread takes.
 *
 *   agent                                             proxy thread (proxy/ring.h)
 *   -----                                             ------------
 *   P1 seen = tail_seen
 *      first = head; head += n   (one add per push)
 *   P2 room?  first + n - seen <= capacity
 *      no: wait until tail >= first + n - capacity    C4 ring the rank's bell
 *          tail_seen = tail
 *   P3 slots first + n - 1 .. first: a and b, each    C1 slot at `taken`: a's parity is that of this lap, and b's
 *      with the parity of the lap (release)              too? (acquire)
 *   P4 ring the proxy's bell, which wakes it if it    C2 ... taken += 1
 *      sleeps                                         C3 tail = taken, now and then (release)
 *
 * P2 acquires what C3 released: the proxy has read a slot before it is written again. tail_seen hands that on from the
 * producer that read tail to the others. A tail_seen that steps back (two producers store out of order) is an older
 * value: it costs one more load of tail.
 *
 * A claim cannot be given back: an agent whose wait for room ends without room leaves slots that will never be filled,
 * at which the proxy stops. That happens only when the operation fails as a whole (deadline or abort word), after which
 * the group takes no operation any more. In exchange a claim is one add, whatever the number of agents: claims by
 * compare-and-swap fall apart when hundreds of warps retry.
 */
#ifndef EPX_KERNEL_RING_H
#define EPX_KERNEL_RING_H

#include "kernel/agent.h"
#include "kernel/command.h"

/* P2: waits until slots up to `end` may be written, unless the tail that was seen already allows it. */
KFN enum wait_result ring_room(struct agent *ag, const struct ring_dev *ring, uint64_t end, uint64_t seen)
{
    const uint64_t need = end - (ring->mask + 1); /* the tail that makes room */
    enum wait_result result;

    if ((int64_t)(seen - need) >= 0)
        return WAIT_OK;
    result = ag_wait_ge(ag, ring->tail, need, ag_timeout(ag)); /* acquire: pairs with C3 */
    if (result == WAIT_OK && ag_leader(ag))
        ag_store_release(ring->tail_seen, ag_load_acquire(ring->tail));
    return result;
}

/*
 * Pushes n (1 to RING_MAX_PUSH, and no more than the ring has slots) commands, which the proxy takes in this order.
 * WAIT_TIMEOUT, WAIT_ABORTED: nothing was pushed, and the ring is not to be used any more.
 */
KFN enum wait_result ag_push(struct agent *ag, const struct ring_dev *ring, const struct command *cmds, int n)
{
    uint64_t seen; /* acquire: pairs with the release of tail_seen in ring_room(), by another agent */
    const uint64_t first = ag_claim_slots(ag, ring, (uint64_t)n, &seen); /* P1 */
    const enum wait_result result = ring_room(ag, ring, first + (uint64_t)n, seen);

    if (result != WAIT_OK)
        return result;
    ag_store_commands(ag, ring, first, cmds, n); /* P3 */
    ag_ring(ag, ring->bell);                     /* P4 */
    return WAIT_OK;
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The consumer's side of a command ring. The protocol is drawn in kernel/ring.h. One thread takes. */
#ifndef EPX_PROXY_RING_H
#define EPX_PROXY_RING_H

#include "device/device.h"
#include "kernel/command.h"

struct ring {
    struct ring_dev dev; /* what producers see */
    uint64_t taken;      /* consumed so far */
    uint64_t returned;   /* what *tail says */
    struct device *device;
    struct ring_words *words;
    struct ring_claims *claims;
};

/* `slots`: a power of two, at least RING_MAX_PUSH. All counters start at `start` (0, but for tests of their wrap).
 * `device`: whose kernels push; NULL = the CPU, and ordinary memory. */
epx_status ring_create(struct ring *ring, struct device *device, int slots, uint64_t start);
void ring_destroy(struct ring *ring);

/* C1: the next command, if both its words are there. Their parity bits are left in. */
static inline int ring_peek(const struct ring *ring, struct command *c)
{
    const struct command *slot = &ring->dev.slots[ring->taken & ring->dev.mask];
    const uint64_t parity = ring_parity(ring->dev.mask, ring->taken);

    /* Acquire: pairs with the release of ag_store_commands, whichever word comes last. */
    c->a = __atomic_load_n(&slot->a, __ATOMIC_ACQUIRE);
    if ((c->a & RING_PARITY) != parity)
        return 0;
    c->b = __atomic_load_n(&slot->b, __ATOMIC_ACQUIRE);
    return (c->b & RING_PARITY) == parity;
}

/* C2 */
static inline void ring_take(struct ring *ring)
{
    ring->taken++;
}

/* C3: tells the producers; the caller rings their bell (C4). Non-zero if there was something to tell. */
static inline int ring_return(struct ring *ring)
{
    if (ring->returned == ring->taken)
        return 0;
    ring->returned = ring->taken;
    /* Release: pairs with the acquires of tail in kernel/ring.h; slots before it have been read. */
    __atomic_store_n(ring->dev.tail, ring->taken, __ATOMIC_RELEASE);
    return 1;
}

#endif

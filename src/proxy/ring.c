/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a command ring. */
#include "proxy/ring.h"

#include <stdlib.h>
#include <string.h>

#include "util/status.h"

/* Producers share head and tail_seen, the consumer owns tail: each on lines of its own, two because cores fetch pairs. */
struct ring_words {
    uint64_t head, tail_seen;
    uint8_t pad0[112];
    uint64_t tail;
    uint8_t pad1[120];
    struct doorbell bell;
    uint8_t pad2[64];
};
EPX_STATIC_ASSERT(sizeof(struct ring_words) == 384, "whole pairs of cache lines");

static void *zeroed(size_t bytes)
{
    void *block = aligned_alloc(128, (bytes + 127) / 128 * 128);

    if (block)
        memset(block, 0, bytes);
    return block;
}

/* As if the ring had been in use for ever: slots of the lap that `start` is in are invalid from `start` on, and those
 * before it belong to the same lap and are consumed. */
static void set_parities(struct ring_dev *dev, uint64_t start)
{
    uint64_t i;

    for (i = 0; i <= dev->mask; i++) {
        uint64_t lap_first = start & ~dev->mask;
        uint64_t last_written = lap_first + i < start ? lap_first + i : lap_first + i - dev->mask - 1;

        dev->slots[i].a = ring_parity(dev->mask, last_written);
    }
}

epx_status ring_create(struct ring *ring, int slots, uint64_t start)
{
    struct ring_words *words;

    if (slots < RING_MAX_PUSH || (slots & (slots - 1)) != 0)
        return fail(EPX_ERR_ARGUMENT, "command ring: expected a power of two of at least %d slots, got %d",
                    RING_MAX_PUSH, slots);
    memset(ring, 0, sizeof(*ring));
    ring->words = words = zeroed(sizeof(*words));
    ring->dev.slots = zeroed((size_t)slots * sizeof(struct command));
    if (!words || !ring->dev.slots) {
        ring_destroy(ring);
        return fail(EPX_ERR_MEMORY, "command ring: no memory for %d slots", slots);
    }
    words->head = words->tail = words->tail_seen = ring->taken = ring->returned = start;
    ring->dev.mask = (uint64_t)slots - 1;
    ring->dev.head = &words->head;
    ring->dev.tail = &words->tail;
    ring->dev.tail_seen = &words->tail_seen;
    ring->dev.bell = &words->bell;
    set_parities(&ring->dev, start);
    return EPX_OK;
}

void ring_destroy(struct ring *ring)
{
    free(ring->dev.slots);
    free(ring->words);
    memset(ring, 0, sizeof(*ring));
}

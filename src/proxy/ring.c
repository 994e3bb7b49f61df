/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a command ring: slots, tail and doorbell in host memory that kernels reach; head in the device's own
 * memory. */
#include "proxy/ring.h"

#include <stdlib.h>
#include <string.h>

#include "util/status.h"

/* Producers share head and tail_seen, and write the bell with every push; the consumer owns tail, and reads the words
 * from `stop` on in every iteration: each has cache lines of its own, two because cores fetch pairs. */
struct ring_words {
    uint64_t tail;
    uint8_t pad0[120];
    struct doorbell bell;
    uint8_t pad1[64];
    uint64_t stop, stopped, alarm, ask, asked, blocked;
    uint8_t pad2[80];
};
EPX_STATIC_ASSERT(sizeof(struct ring_words) == 384, "whole pairs of cache lines");

struct ring_claims {
    uint64_t head, tail_seen;
    uint8_t pad[112];
};
EPX_STATIC_ASSERT(sizeof(struct ring_claims) == 128, "a pair of cache lines");

/* Zeroed memory: the CPU's; or host memory that the device's kernels reach (`on_device` 0); or the device's own. */
static void *alloc_words(struct device *device, size_t bytes, int on_device)
{
    const size_t whole = (bytes + 127) / 128 * 128;
    void *block = NULL;
    epx_status status = EPX_OK;

    if (!device) {
        block = aligned_alloc(128, whole);
        return block ? memset(block, 0, whole) : NULL;
    }
    status = on_device ? device->ops->mem_alloc(device, whole, &block) : device->ops->host_alloc(device, whole, &block);
    return status == EPX_OK ? block : NULL;
}

static void free_words(struct device *device, void *block, int on_device)
{
    if (!device)
        free(block);
    else if (block && on_device)
        device->ops->mem_free(device, block);
    else if (block)
        device->ops->host_free(device, block);
}

/* As if the ring had been in use for ever: slots of the lap that `start` is in are invalid from `start` on, and those
 * before it belong to the same lap and are consumed. */
static void set_parities(struct ring_dev *dev, uint64_t start)
{
    uint64_t i;

    for (i = 0; i <= dev->mask; i++) {
        uint64_t lap_first = start & ~dev->mask;
        uint64_t last_written = lap_first + i < start ? lap_first + i : lap_first + i - dev->mask - 1;

        dev->slots[i].a = dev->slots[i].b = ring_parity(dev->mask, last_written);
    }
}

static epx_status set_claims(struct ring *ring, uint64_t start)
{
    const struct ring_claims first = {.head = start, .tail_seen = start};

    if (ring->device)
        return ring->device->ops->copy(ring->device, ring->claims, &first, sizeof(first));
    *ring->claims = first;
    return EPX_OK;
}

epx_status ring_create(struct ring *ring, struct device *device, int slots, uint64_t start)
{
    epx_status status;

    memset(ring, 0, sizeof(*ring));
    if (slots < RING_MAX_PUSH || (slots & (slots - 1)) != 0)
        return fail(EPX_ERR_ARGUMENT, "command ring: expected a power of two of at least %d slots, got %d",
                    RING_MAX_PUSH, slots);
    ring->device = device;
    ring->words = alloc_words(device, sizeof(*ring->words), 0);
    ring->claims = alloc_words(device, sizeof(*ring->claims), 1);
    ring->dev.slots = alloc_words(device, (size_t)slots * sizeof(struct command), 0);
    if (!ring->words || !ring->claims || !ring->dev.slots) {
        ring_destroy(ring);
        return fail(EPX_ERR_MEMORY, "command ring: no memory for %d slots%s%s", slots, device ? " on device " : "",
                    device ? device->ops->name : "");
    }
    ring->words->tail = ring->taken = ring->returned = start;
    ring->dev.mask = (uint64_t)slots - 1;
    ring->dev.head = &ring->claims->head;
    ring->dev.tail_seen = &ring->claims->tail_seen;
    ring->dev.tail = &ring->words->tail;
    ring->dev.bell = &ring->words->bell;
    ring->dev.stop = &ring->words->stop;
    ring->dev.stopped = &ring->words->stopped;
    ring->dev.alarm = &ring->words->alarm;
    ring->dev.ask = &ring->words->ask;
    ring->dev.asked = &ring->words->asked;
    ring->dev.blocked = &ring->words->blocked;
    set_parities(&ring->dev, start);
    status = set_claims(ring, start);
    if (status != EPX_OK)
        ring_destroy(ring);
    return status;
}

void ring_destroy(struct ring *ring)
{
    free_words(ring->device, ring->dev.slots, 0);
    free_words(ring->device, ring->claims, 1);
    free_words(ring->device, ring->words, 0);
    memset(ring, 0, sizeof(*ring));
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that the ranks of a node reach, given out in the order of streams, and tensors over it.
 *
 *   | used by A | hole {1,3} | used by B | hole {} | small | small |
 *
 * A hole has the set of streams whose queued work may still use it: of the stream that took its memory, of the one that
 * was current when it was released, and of those that heap_used_on() names. A stream takes memory that no other stream
 * may use without a wait. For other streams of the set an event is recorded, and the taker waits for it on the device.
 * The host never waits. CPU tensors have no streams: all sets are empty.
 *
 * Memory that no stream has used is kept apart as long as possible: captured calls begin with it.
 *
 * Captured calls have segments of their own. A graph may be replayed at any time, so calls outside of captures never
 * take these. Replays of one group run one after the other, so graphs of one stream share them.
 *
 * Tensors are released on any thread, with Python's lock or without it. One mutex is of all segments. Python is never
 * called under it.
 */
#ifndef CALLS_HEAP_H
#define CALLS_HEAP_H

#include "calls.h"

struct heap;

int heap_init(PyObject *module);
struct heap *heap_of(PyObject *object); /* of a Heap of Python; NULL: it is none */
/* The tensors of `parts` for work of `stream`, as far as there is room: `tensor` stays NULL for the others. */
int heap_tensors(struct heap *heap, uintptr_t stream, int in_graph, struct part *parts, int count);
int heap_holds(const struct heap *heap, const void *address);
/* Queued work of a stream uses what is at an address, in some heap or in none. */
void heap_used_on(uintptr_t stream, const void *address);

#endif

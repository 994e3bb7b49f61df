/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command that a kernel pushes to a CPU proxy, and the immediate that crosses the network: both versioned, both
 * checked in full by whoever takes them, in release builds too.
 *
 *   command, 128 bits in two words
 *     a:  0 parity | 1..2 version | 3..6 op | 7..22 rank | 23..34 counter | 35..54 units of 16 bytes | 55..63 target
 *     b:  0 parity | 1..36 source unit | 37..63 target unit, its lower 27 of 36 bits
 *
 * Both words carry the parity of the lap: whoever stores a command by one 16-byte store (a GPU) need not rely on its
 * arriving in one piece, as long as 8 bytes do.
 *
 *   immediate, 32 bits
 *     0..11 source rank | 12..23 counter | 24..30 count - 1 | 31 version
 *
 * PUT means: copy `units` of 16 bytes from this rank's heap to the target rank's heap, and add one to the counter there
 * once they have landed. Zero units is a pure signal. A proxy may merge neighbours that are contiguous on both sides and
 * name the same counter: the count of the immediate says how many.
 *
 * A counter is (kind, slot): COUNTER(kind, slot). Counters are kept per source rank, 64 bits, never reset.
 */
#ifndef EPX_KERNEL_COMMAND_H
#define EPX_KERNEL_COMMAND_H

#include "kernel/params.h"
#include "kernel/inject_bug.h"

#ifndef COMMAND_FN /* a device compiler may give the functions its own qualifiers */
#define COMMAND_FN static inline
#endif

struct command {
    uint64_t a, b;
};
EPX_STATIC_ASSERT(sizeof(struct command) == 16, "one aligned store");

enum { COMMAND_VERSION = 2, COMMAND_PUT = 1 };

/* Version and operation, in place. */
#define COMMAND_HEAD ((uint64_t)COMMAND_VERSION << 1 | (uint64_t)COMMAND_PUT << 3)
#define COMMAND_HEAD_MASK ((uint64_t)0x3f << 1)

#define COMMAND_UNIT 16u
#define COMMAND_MAX_UNITS ((1u << 20) - 1)
#define COMMAND_MAX_OFFSET (((uint64_t)1 << 36) * COMMAND_UNIT) /* 1 TiB of heap */
#define COMMAND_COUNTERS 4096

/* Six bits each: at most 64 kinds and 64 slots. */
#define COUNTER(kind, slot) ((uint32_t)(kind) << 6 | (uint32_t)(slot))
#define COUNTER_KIND(counter) ((counter) >> 6)
#define COUNTER_SLOT(counter) ((counter)&63u)

struct command_fields {
    uint32_t op, version, rank, counter, units;
    uint64_t source, target; /* in units */
};

/* The parity bits are the ring's business: they are zero here. */
COMMAND_FN struct command command_pack(uint32_t rank, uint32_t counter, uint64_t source_offset, uint64_t target_offset,
                                       uint32_t bytes)
{
    const uint64_t source = source_offset / COMMAND_UNIT, target = target_offset / COMMAND_UNIT;
    struct command c;
    c.a = COMMAND_HEAD | (uint64_t)(rank & 0xffffu) << 7 | (uint64_t)(counter & 0xfffu) << 23 |
          (uint64_t)(bytes / COMMAND_UNIT & 0xfffffu) << 35 | (target >> 27) << 55;
    c.b = (source & 0xfffffffffu) << 1 | (target & 0x7ffffffu) << 37;
    return c;
}

COMMAND_FN struct command_fields command_unpack(struct command c)
{
    struct command_fields f;
    f.version = (uint32_t)(c.a >> 1 & 3);
    f.op = (uint32_t)(c.a >> 3 & 15);
    f.rank = (uint32_t)(c.a >> 7 & 0xffff);
    f.counter = (uint32_t)(c.a >> 23 & 0xfff);
    f.units = (uint32_t)(c.a >> 35 & 0xfffff);
    f.source = c.b >> 1 & 0xfffffffffu;
    f.target = (c.a >> 55) << 27 | c.b >> 37;
    return f;
}

enum { IMMEDIATE_VERSION = 1, IMMEDIATE_MAX_COUNT = 128, IMMEDIATE_MAX_RANKS = 4096 };

COMMAND_FN uint32_t immediate_pack(uint32_t rank, uint32_t counter, uint32_t count)
{
    return (rank & 0xfffu) | (counter & 0xfffu) << 12 | ((count - 1) & INJECT_BUG(BUG_IMMEDIATE, 0x3fu, 0x7fu)) << 24 |
           (uint32_t)IMMEDIATE_VERSION << 31;
}

COMMAND_FN uint32_t immediate_rank(uint32_t imm)
{
    return imm & 0xfffu;
}

COMMAND_FN uint32_t immediate_counter(uint32_t imm)
{
    return imm >> 12 & 0xfffu;
}

COMMAND_FN uint32_t immediate_count(uint32_t imm)
{
    return (imm >> 24 & 0x7fu) + 1;
}

COMMAND_FN uint32_t immediate_version(uint32_t imm)
{
    return imm >> 31;
}

/*
 * A ring of commands from the agents of one rank to one proxy thread. `slots` (power of two) lie in host memory. The
 * producers claim by adding to `head` (device memory); slot i % capacity of lap i / capacity is valid when its parity
 * bits equal (lap + 1) & 1, so nothing is ever cleared. The consumer returns `tail` now and then; producers read it
 * only when their remembered tail says that the ring may be full. head, tail and tail_seen count commands modulo 2^64
 * and are compared by their difference. kernel/ring.h has the producers' side, proxy/ring.c the consumer's.
 */
struct ring_dev {
    struct command *slots;
    uint64_t mask;         /* capacity - 1 */
    uint64_t *head;        /* claimed so far; device memory */
    uint64_t *tail;        /* consumed so far, written by the proxy; host memory */
    uint64_t *tail_seen;   /* the producers' copy of it; device memory */
    struct doorbell *bell; /* wakes a sleeping proxy (CPU producers) */
};

#define RING_MAX_PUSH 32
#define RING_PARITY ((uint64_t)1) /* in both words */

/* The parity that makes slot `index` valid. The lap is index / capacity, hence odd when this bit is set. */
COMMAND_FN uint64_t ring_parity(uint64_t mask, uint64_t index)
{
    return index & (mask + 1) ? 0 : RING_PARITY;
}

#endif

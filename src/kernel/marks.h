/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Marks: which phase of a kernel ended when, for a trace (docs/trace.md). AG_MARK in a kernel names the phase that ends
 * there. CPU agents add it to the trace at once (device/cpu/marks.c). On a GPU
 *
 *   agent 0           adds marks to a list in its block's memory, and stores the list behind the others' when the
 *                     launch ends: struct kernel_marks, in device memory. Nothing crosses a bus.
 *   its block         adds waits for signals, of whichever agent waits, to a list of their own
 *   whoever signals   stores the time of the signal, at a place that its kind, slot and value give, behind the signal:
 *                     peers do not wait for that store
 *   the host          reads it all when the group ends (group/marks.c)
 *
 * Launches of a group run one after the other: the list needs no lock. Without tracing the pointer is NULL.
 */
#ifndef EPX_KERNEL_MARKS_H
#define EPX_KERNEL_MARKS_H

#include <stddef.h>
#include <stdint.h>

#include "kernel/signals.h"

#define PHASE_MARKS(X)      \
    X(ASK, "ask")           \
    X(BEGIN, "begin")       \
    X(CAST, "cast")         \
    X(COPY_OUT, "copy out") \
    X(COUNT, "count")       \
    X(COUNTS, "counts")     \
    X(DATA, "data")         \
    X(DONE, "done")         \
    X(END, "end")           \
    X(FORWARD, "forward")   \
    X(LANDED, "landed")     \
    X(LAST, "last")         \
    X(OR, "or")             \
    X(PLACES, "places")     \
    X(PUBLISH, "publish")   \
    X(READY, "ready")       \
    X(ROUTE, "route")       \
    X(ROWS, "rows")         \
    X(SLOT, "slot")         \
    X(STAGE, "stage")       \
    X(SUM, "sum")           \
    X(TABLES, "tables")     \
    X(WRITTEN, "written")   \
    X(ZERO, "zero")

#define MARK_ENUM(name, text) MARK_##name,
enum phase_mark { PHASE_MARKS(MARK_ENUM) PHASE_MARK_COUNT };
#undef MARK_ENUM

enum mark_type {
    MARK_NONE,
    MARK_LAUNCH, /* a launch begins: MARK_IS_*, enum kernel_id; its stage and how many marks follow */
    MARK_PHASE,  /* a phase ended: enum phase_mark */
    MARK_WAIT,   /* a wait began: enum kernel_phase, the peer or 0xffff; the signal's kind + 1 and slot, or 0 ... */
    MARK_WAITED, /* ... and ended, always the next mark: whether it was agent 0 that waited; the signal's value */
    MARK_ENDED   /* the launch ends */
};

/* Of the operation's launches, the first, the last. */
#define MARK_IS_FIRST 1u
#define MARK_IS_LAST 2u

#define MARK_WHAT(type, a, b) ((uint32_t)(type) | (uint32_t)(a) << 8 | (uint32_t)(b) << 16)
#define MARK_TYPE(what) ((what)&0xffu)
#define MARK_A(what) ((what) >> 8 & 0xffu)
#define MARK_B(what) ((what) >> 16)
#define MARK_NOBODY 0xffffu

struct mark {
    uint64_t ns; /* of the device's clock */
    uint32_t what, more;
};
EPX_STATIC_ASSERT(sizeof(struct mark) == 16, "one store");

struct mark_signal {
    uint64_t ns, value;
};

enum {
    MARKS_OF_PHASES = 24, /* of a launch; more are counted, and not kept */
    MARKS_OF_WAITS = 40,  /* two for each wait */
    MARKS_KEPT = 1 << 18, /* of a group: the last ones */
    MARK_SIGNALS_KEPT = 1 << 17
};

struct marks_head {
    uint64_t next;         /* marks so far */
    uint64_t lost;         /* those that a launch had too many of */
    uint32_t slots, depth; /* of signals: [SIG_COUNT][slots][depth], depth a power of two */
};

/* In device memory. */
struct kernel_marks {
    struct marks_head head;
    uint64_t reserved[5];
    struct mark_signal signals[MARK_SIGNALS_KEPT];
    struct mark ring[MARKS_KEPT];
};

EPX_STATIC_ASSERT(offsetof(struct kernel_marks, signals) % sizeof(struct mark_signal) == 0, "stored by pair_store");

/* Of one launch, in the memory of each block. */
struct launch_marks {
    struct kernel_marks *to; /* NULL: nothing is traced */
    struct marks_head head;  /* of *to, when the launch began */
    int32_t is_first;        /* this block has agent 0, and what follows */
    int32_t nphases, nwaits; /* marks of each; they may be more than there is room for */
    int32_t reserved;
    struct mark waits[1 + MARKS_OF_WAITS]; /* the first one is MARK_LAUNCH */
    struct mark phases[MARKS_OF_PHASES + 1];
};

EPX_STATIC_ASSERT(MARKS_OF_PHASES + MARKS_OF_WAITS < 256, "MARK_LAUNCH has a byte for the number of marks");

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Marks: AG_MARK in a kernel names the phase that ends there, for a trace (docs/trace.md). */
#ifndef EPX_KERNEL_MARKS_H
#define EPX_KERNEL_MARKS_H

#define PHASE_MARKS(X)      \
    X(BEGIN, "begin")       \
    X(CAST, "cast")         \
    X(COPY_OUT, "copy out") \
    X(COUNT, "count")       \
    X(COUNTS, "counts")     \
    X(DATA, "data")         \
    X(DONE, "done")         \
    X(END, "end")           \
    X(FORWARD, "forward")   \
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

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of signals, and of the phases of an operation in which a wait may fail. Everything that is known about a
 * signal is in its row: the enums, the masks and (group/signals.c) the host's tables are generated from here. A new
 * signal is a new row.
 *
 *   kind        SIG_<kind>, and PHASE_<kind>: the phase of waiting for it
 *   operation   OP_<operation>: whose epochs it counts
 *   counts      what its value is:
 *                 LAPS    operations of one low-latency slot (slot_of(), lap_of())
 *                 EPOCHS  operations, in slot 0
 *                 PARITY  inside a node operations, in slot 0; between nodes operations of each parity, in slots 0, 1
 *                 ROWS    between nodes rows, so that what is expected adds up from operation to operation
 *                 STEPS   operations and the windows of each (ht_window.h), in slot 0
 *                 STATUS  nothing: a question, which the proxy answers (kernel/waiting_for.h)
 *   flow        PROXY_<flow>: which limit of messages its puts are under (proxy/proxy.h)
 *   owed        whose signal may still be on its way when this rank's operations have completed: NOBODY, ALL, its RELAY
 *   maskable    1: a wait for it may end by masking the peer. Low latency goes on without a rank. High throughput
 *               cannot: the rank that waits is not always the rank that would miss rows
 *   text        the phase in messages and in epx_error_info.phase
 */
#ifndef EPX_KERNEL_SIGNALS_H
#define EPX_KERNEL_SIGNALS_H

#include <stdint.h>

#ifdef __cplusplus
#define EPX_STATIC_ASSERT static_assert
#else
#define EPX_STATIC_ASSERT _Static_assert
#endif

/* clang-format off */
#define SIGNALS(X)                                                                                                   \
    /* kind     operation    counts  flow         owed    maskable  text */                                          \
    /* The peer's slot is filled and may be read. */                                                                 \
    X(LL_DATA,  LL_DISPATCH, LAPS,   LOW_LATENCY, NOBODY, 1, "ll dispatch: wait for data")                           \
    /* The peer has read this rank's slot. */                                                                        \
    X(LL_DONE,  LL_DISPATCH, LAPS,   LOW_LATENCY, ALL,    1, "ll dispatch: wait for readers")                        \
    /* The peer's rows may be read, in its heap or here in the receive slot. */                                      \
    X(LC_DATA,  LL_COMBINE,  LAPS,   LOW_LATENCY, NOBODY, 1, "ll combine: wait for data")                            \
    /* The peer has read this rank's rows, and its receive slot is free again. */                                    \
    X(LC_DONE,  LL_COMBINE,  LAPS,   LOW_LATENCY, ALL,    1, "ll combine: wait for readers")                         \
    /* The peer's counts may be read. */                                                                             \
    X(HN_DATA,  HT_NOTIFY,   PARITY, LOW_LATENCY, NOBODY, 0, "ht update: wait for counts")                           \
    /* The peer has read this rank's counts. Inside a node. */                                                       \
    X(HN_DONE,  HT_NOTIFY,   EPOCHS, LOW_LATENCY, NOBODY, 0, "ht update: wait for readers")                          \
    /* The peer's receive tensors may be written. */                                                                 \
    X(HD_READY, HT_DISPATCH, EPOCHS, LOW_LATENCY, NOBODY, 0, "ht dispatch: wait for receiver")                       \
    /* Inside a node: the peer has written all its rows here. */                                                     \
    X(HD_DATA,  HT_DISPATCH, EPOCHS, LOW_LATENCY, NOBODY, 0, "ht dispatch: wait for data")                           \
    /* Inside a node: the peer is through with a window. */                                                          \
    X(HD_STEP,  HT_DISPATCH, STEPS,  LOW_LATENCY, NOBODY, 0, "ht dispatch: wait for window")                         \
    X(HC_STEP,  HT_COMBINE,  STEPS,  LOW_LATENCY, NOBODY, 0, "ht combine: wait for window")                          \
    /* The peer's rows may be read. */                                                                               \
    X(HC_DATA,  HT_COMBINE,  EPOCHS, LOW_LATENCY, NOBODY, 0, "ht combine: wait for data")                            \
    /* The peer has read this rank's rows. */                                                                        \
    X(HC_DONE,  HT_COMBINE,  EPOCHS, LOW_LATENCY, NOBODY, 0, "ht combine: wait for readers")                         \
    /* Inside a node (in laps): the peer's rows are staged, or written here. Between nodes: a row has arrived. */    \
    X(LL_ROWS,  LL_DISPATCH, ROWS,   LOW_LATENCY, NOBODY, 1, "ll dispatch: wait for rows")                           \
    /* Between nodes: a row has arrived. */                                                                          \
    X(LC_ROWS,  LL_COMBINE,  ROWS,   LOW_LATENCY, NOBODY, 1, "ll combine: wait for rows")                            \
    /* Inside a node: counts of those for whom the peer relays have arrived. */                                      \
    X(HN_TABLE, HT_NOTIFY,   EPOCHS, LOW_LATENCY, NOBODY, 0, "ht update: wait for table")                            \
    /* A row has arrived at the relay; slot = round % HT_SLOTS (ht_rounds.h), here and below. */                     \
    X(HD_ROWS,  HT_DISPATCH, ROWS,   NORMAL,      NOBODY, 0, "ht dispatch: wait for rows")                           \
    /* A block of records has arrived at the relay. */                                                               \
    X(HD_BLOCK, HT_DISPATCH, ROWS,   LOW_LATENCY, NOBODY, 0, "ht dispatch: wait for block")                          \
    /* The relay has forwarded this rank's rows of a round: a credit for another. */                                 \
    X(HD_FREE,  HT_DISPATCH, ROWS,   LOW_LATENCY, RELAY,  0, "ht dispatch: wait for relay")                          \
    /* A block of records has arrived at the relay: its source asks for these rows. */                               \
    X(HC_BLOCK, HT_COMBINE,  ROWS,   LOW_LATENCY, NOBODY, 0, "ht combine: wait for source")                          \
    /* A row was returned by a relay, or all of a round were. */                                                     \
    X(HC_ROWS,  HT_COMBINE,  ROWS,   NORMAL,      NOBODY, 0, "ht combine: wait for rows")                            \
    /* Between nodes: the peer asks whom this rank waits for. Inside a node, in slot 0: the peer */                  \
    /* was left out by others and has given up (tell_left_out()). */                                                 \
    X(ABORT,    NONE,        STATUS, LOW_LATENCY, NOBODY, 0, "abort")

/* Phases that are not the wait for a signal of the operation itself: phase, maskable, text. */
#define OTHER_PHASES(X)                                                                                              \
    X(NONE,    0, "none")                                                                                            \
    X(LL_SLOT, 1, "ll dispatch: wait for free slot") /* LL_DONE of the slot's operation before */                    \
    X(LC_SLOT, 1, "ll combine: wait for free slot")  /* LC_DONE, likewise */                                         \
    X(HN_SLOT, 0, "ht update: wait for free slot")   /* HN_DONE, likewise */                                         \
    X(LC_SENT, 1, "ll combine: wait for network")    /* puts whose source is needed again */                         \
    X(HD_SENT, 0, "ht dispatch: wait for network")                                                                   \
    X(AGENTS,  0, "wait for own agents")                                                                             \
    X(ROUTING, 0, "routing")                                                                                         \
    X(RING,    0, "push to the command ring")                                                                        \
    X(NET,     0, "network")                                                                                         \
    X(MASKS,   0, "masks")                                                                                           \
    X(LC_SIGNAL, 0, "ll combine: wait for signal")
/* clang-format on */

enum operation { OP_NONE = -1, OP_LL_DISPATCH, OP_LL_COMBINE, OP_HT_NOTIFY, OP_HT_DISPATCH, OP_HT_COMBINE, OP_COUNT };

#define SIGNAL_ENUM(kind, operation, counts, flow, owed, maskable, text) SIG_##kind,
enum signal_kind { SIGNALS(SIGNAL_ENUM) SIG_COUNT };
#undef SIGNAL_ENUM

#define PHASE_ENUM(phase, maskable, text) PHASE_##phase,
#define SIGNAL_PHASE_ENUM(kind, operation, counts, flow, owed, maskable, text) PHASE_##kind,
enum kernel_phase { OTHER_PHASES(PHASE_ENUM) SIGNALS(SIGNAL_PHASE_ENUM) PHASE_COUNT };
#undef PHASE_ENUM
#undef SIGNAL_PHASE_ENUM

/* Bit p: a wait in phase p may end by masking the peer. */
#define PHASE_BIT(phase, maskable, text) | (uint64_t)(maskable) << PHASE_##phase
#define SIGNAL_PHASE_BIT(kind, operation, counts, flow, owed, maskable, text) | (uint64_t)(maskable) << PHASE_##kind
#define MASKABLE_PHASES ((uint64_t)0 OTHER_PHASES(PHASE_BIT) SIGNALS(SIGNAL_PHASE_BIT))

#define SIGNAL_MASKABLE_OK(kind, operation, counts, flow, owed, maskable, text)                            \
    EPX_STATIC_ASSERT((maskable) == (OP_##operation == OP_LL_DISPATCH || OP_##operation == OP_LL_COMBINE), \
                      "low latency alone masks: " #kind);
SIGNALS(SIGNAL_MASKABLE_OK)
#undef SIGNAL_MASKABLE_OK

EPX_STATIC_ASSERT(SIG_COUNT <= 64, "a counter has six bits of kind (kernel/command.h)");
EPX_STATIC_ASSERT(PHASE_COUNT <= 64, "MASKABLE_PHASES has a bit for each");
EPX_STATIC_ASSERT(PHASE_NONE == 0, "an empty error record has no phase");

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is in every rank's heap: the control block, signals, and the descriptors by which ranks tell each other where
 * rows are; and the offsets of all of it. Other ranks read and write these structures: their layouts are asserted.
 *
 * The heap of a rank (the same offsets on all ranks, see group/heap_layout.c)
 *
 *   control | signals[SIG_COUNT][slots][R] | LL dispatch and combine slots[W] | HT descriptors, counts, tables |
 *   HT receive buffer | HT relay and return rows | alloc
 *
 * A signal word belongs to one kind (kernel/signals.h), one slot and one peer, which alone advances it, by one per
 * operation of that slot: its value is the number of operations of the slot for which the peer has done what the kind
 * means. (Staged operations may complete in any order, so slots are independent.) A peer of the node stores it; for a
 * peer on another node the own proxy counts it when the put arrives, in struct group_dev.counters. Epochs belong to the
 * group and count operations of one kind; they are in device memory and are advanced by kernels, so that a captured
 * graph replays.
 */
#ifndef EPX_KERNEL_HEAP_H
#define EPX_KERNEL_HEAP_H

#include <stddef.h>
#include <stdint.h>

#include "kernel/signals.h"

#define KERNEL_MAX_TOPK 32
#define KERNEL_MAX_RANKS 4096

/* Wakes sleeping waiters of one rank. CPU only: whoever changes a word that a CPU agent of the rank may wait for rings
 * it (device/cpu/wait.c): takes the `waiters` flag and, if it was set, bumps `seq` and wakes the futex on it. */
struct doorbell {
    uint32_t seq;
    uint32_t waiters;
    int32_t wake_fd; /* 0, or an eventfd of this process to write instead of the futex: who sleeps there polls it */
    uint8_t pad[52];
};
EPX_STATIC_ASSERT(sizeof(struct doorbell) == 64, "one cache line");

/* First bytes of every rank's heap. */
struct control {
    uint64_t magic;
    uint32_t rank;
    uint32_t nranks;
    uint64_t process; /* which one has this rank: 0 = the first, else its incarnation (group/join.h) */
    uint8_t pad0[40];
    struct doorbell bell;
    uint64_t
        abort_word; /* 0, or who failed and how: set by ranks of the node, or by the own proxy for those elsewhere */
    uint64_t abort_told;  /* the abort word that this rank's kernels have passed on to other nodes */
    uint64_t gave_up;     /* simulation only (sim/rules.c): 1 = this rank's memory may be reused, whoever reads it */
    uint64_t waits;       /* WAITS_WORD: whom this rank's kernels wait for; stored again and again as long as they do */
    uint64_t not_writing; /* with masks: 0, less 1 for each agent that writes rows into memory of others of the node, or
                           * is about to see that it may not (writes_begin() in kernel/late_writes.h) */
    uint8_t pad1[24];
};
EPX_STATIC_ASSERT(sizeof(struct control) == 192, "three cache lines");

#define CONTROL_MAGIC 0x3130305850452e00u

/*
 * abort_word: 1 << 63 | ABORT_LEFT_OUT | phase << 40 | status << 32 | culprit << 16 | rank. The first one stays.
 * `rank` noticed first; `culprit` is gone, stuck or has failed: `rank` itself where it failed by itself. The phase is
 * that in which a wait expired (EPX_ERR_TIMEOUT), else PHASE_NONE. Everybody repeats what this word says.
 */
#define ABORT_CAUSED(status, phase, rank, culprit)                                                                  \
    ((uint64_t)1 << 63 | (uint64_t)(phase) << 40 | (uint64_t)(status) << 32 | (uint64_t)(uint16_t)(culprit) << 16 | \
     (uint64_t)(uint16_t)(rank))
#define ABORT_WORD(status, rank) ABORT_CAUSED(status, PHASE_NONE, rank, rank)
/* Set in the word of a rank that the others go on without (masked, or left out of a recovery). It ends this rank
 * alone, which must not pass it on. */
#define ABORT_LEFT_OUT ((uint64_t)1 << 62)
#define ABORT_PHASE(word) ((int)((word) >> 40 & 0xff))
#define ABORT_STATUS(word) ((int)((word) >> 32 & 0xff))
#define ABORT_CULPRIT(word) ((int)((word) >> 16 & 0xffff))
#define ABORT_RANK(word) ((int)((word)&0xffff))

/* control.waits: beat << 32 | rank that is waited for. The beat grows as long as the wait lasts: a word that
 * does not change is that of a rank that does not wait, or does not run. */
#define WAITS_WORD(beat, peer) ((uint64_t)(beat) << 32 | (uint64_t)(uint32_t)(peer))
#define WAIT_SLICES 16 /* of a deadline: how often the word is stored; each at most WAIT_SLICE_MAX_NS */
#define WAIT_SLICE_MAX_NS 500000000u
#define WAITS_BEAT(word) ((word) >> 32)
#define WAITS_PEER(word) ((int)((word)&0xffffffffu))

/* One cache line per (kind, slot, peer): peers on different cores never share one. */
struct signal {
    uint64_t value;
    uint64_t arrived; /* of a rank's own word, CPU only: signals of this (kind, slot) that ranks of the node gave it */
    uint64_t all;     /* of the first rank of a node, with AG_NODE_WORD: the last value that all ranks have given */
    uint8_t pad[40];
};
EPX_STATIC_ASSERT(sizeof(struct signal) == 64, "one cache line");

/* Between nodes (ht_rounds.h): rounds of one source that may be on their way to one relay at a time. */
#define HT_SLOTS 8
/* Rounds that a turn takes where each stage is a launch of its own. */
#define HT_TURN_STAGED (HT_SLOTS / 2)
/* Opens a block: the signature, which tells a relay which operation this is. */
#define HT_HEADER_BYTES 32

/* What the ranks must agree on in one operation, carried by every descriptor and compared by every reader. */
struct signature {
    int32_t hidden_bytes; /* of one row on the wire, scales not counted */
    int32_t dtype;        /* on the wire */
    int32_t scale_bytes;  /* per row; 0 = none */
    int32_t topk;
    int32_t layout;
    int32_t extra; /* SIGNATURE_*; HT update: the alignment of experts */
};
EPX_STATIC_ASSERT(sizeof(struct signature) == 24, "shared between ranks");

/* Opens what a source puts to a rank of another node in a low-latency dispatch (ll_remote.h). count[L] follows: its
 * rows for each expert of that rank. The first fields are those of struct signature. */
struct ll_header {
    int32_t hidden_bytes, scale_bytes;
    uint8_t dtype, topk, layout, extra;
    int32_t rows;  /* that come with it */
    int32_t place; /* where the first of them returns to: `back` of the source */
};
EPX_STATIC_ASSERT(sizeof(struct ll_header) == 20, "shared between ranks");
EPX_STATIC_ASSERT(KERNEL_MAX_TOPK <= 255, "a header has a byte for it");

/* Right before the rows of a low-latency dispatch slot, and behind the tables (ll_view in ll_slot.h). */
struct ll_desc {
    struct signature signature;
    int32_t ntokens;
    int16_t ordered;     /* 1: row pos[t] is token t's; 0: row t */
    int16_t recv_half;   /* which half of its receive rows those of this dispatch return to (ll_recv_half.h) */
    uint64_t rows;       /* heap offset of row 0 for readers of the node: in the slot, or the caller's tensor */
    uint64_t row_stride; /* bytes */
    /* Where this rank's receive tensors are, if they are in its heap and it receives in this very operation. */
    int32_t open;    /* 1: rows may be written there */
    int32_t written; /* 1: this rank wrote its rows into its peers' tensors; valid with LL_ROWS */
    uint64_t tokens, outer_stride, stride;
    uint64_t scales, scale_outer_stride, scale_row_stride, scale_stride;
    uint64_t src_token;  /* 0, or where senders write the number of each row's token */
    uint64_t outer_rows; /* of that, from an expert's first to the next one's */
};
EPX_STATIC_ASSERT(sizeof(struct ll_desc) == 128, "shared between ranks");

/* Opens a low-latency combine slot; EXPERT_MAJOR: begin[L][R] follows. */
struct lc_desc {
    struct signature signature;
    int32_t pulled; /* 1: read the rows where this rank has them; 0: they were written into the reader's receive slot */
    int32_t rows_in; /* what `rows` counts from: 0 = this rank's heap, n = the region in its slot n - 1 */
    uint64_t rows;
    uint64_t outer_stride, row_stride; /* bytes */
    uint64_t pad;
};
EPX_STATIC_ASSERT(sizeof(struct lc_desc) == 64, "shared between ranks");

/* struct hc_desc.tokens_in: this rank writes its rows into their readers' windows (ht_window.h). struct
 * hd_shown.rows_in: its rows are in its own window. */
enum { IN_WINDOW = -1 };

/* High-throughput dispatch: where this rank wants its rows. Offsets into its heap; 0 = not asked for. */
struct hd_desc {
    struct signature signature;
    int32_t idx;      /* IDX_* */
    int32_t pulls;    /* HD_* */
    int64_t capacity; /* rows */
    uint64_t tokens, token_stride;
    uint64_t scales, scale_row_stride, scale_stride;
    uint64_t weights, topk_idx, src_rank, src_token;
    uint64_t map; /* [map_lines][2 + K] */
    int32_t map_lines, source_stride;
};
EPX_STATIC_ASSERT(sizeof(struct hd_desc) == 128, "shared between ranks");
/* struct hd_desc.pulls, where rows may pass through windows (ht_window.h). */
enum {
    HD_PULLS = 1,   /* nobody writes to this rank's tensors: it takes its rows itself */
    HD_IN_REACH = 2 /* its own tokens are taken where they are, not from its window */
};

/* Opens a half of a window of dispatch. */
struct hd_shown {
    int32_t tokens;  /* of this window */
    int32_t rows_in; /* where their rows are: IN_WINDOW, or what the offsets count from, as in struct hc_desc */
    int32_t scales_in;
    int32_t reserved;
    uint64_t rows, row_stride; /* of all tokens of the rank, not of the window alone */
    uint64_t scales, scale_row_stride, scale_stride;
};
EPX_STATIC_ASSERT(sizeof(struct hd_shown) == 56, "shared between ranks");
EPX_STATIC_ASSERT(sizeof(struct signature) <= HT_HEADER_BYTES, "a header holds it");

/* Regions that a rank exports at a time (group/region.h). */
#define REGION_SLOTS 64

/* What an operation with steps of windows adds to *group_dev.windows: the first of these, and others. The host looks
 * whether a count has changed: one that overflows into the next is seen as a change too many. */
#define HW_HINT ((uint64_t)1)
#define HW_HINT_OTHERS ((uint64_t)1 << 20) /* this rank's own tensors are in reach */
#define HW_HINT_ROWS ((uint64_t)1 << 40)   /* a dispatch, with rows in windows */

/* High-throughput combine: where this rank's rows are. */
struct hc_desc {
    struct signature signature;
    int64_t rows; /* how many */
    uint64_t tokens, token_stride;
    uint64_t weights;
    int32_t tokens_in,
        weights_in; /* what the offsets count from: 0 = this rank's heap, n = the region in its slot n - 1; IN_WINDOW */
};
EPX_STATIC_ASSERT(sizeof(struct hc_desc) == 64, "shared between ranks");

/* Offsets inside a heap, computed once from the configuration. */
struct ll_layout {
    uint64_t slots, slot_stride;    /* dispatch: list[R][M], headers[R], tables, descriptor, rows[M] */
    uint64_t headers, rows;         /* from a slot's start; headers between nodes only */
    uint64_t pitch;                 /* most bytes of a row: payload, then scales, then (between nodes) a record */
    uint64_t recv_buf, recv_stride; /* [W][remote ranks]: header, rows[M] from each */
    uint64_t head;                  /* from a receive buffer's start to its rows: room for the header */
    uint64_t cslots, cslot_stride;  /* combine */
    uint64_t begin, cdescs,
        crows;       /* from a combine slot's start: begin[L][R], descriptors of remote ranks, receive rows */
    uint64_t cpitch; /* most bytes of a receive row */
    uint64_t halves; /* of the receive rows, each of M*K: 2 between nodes with masks (ll_recv_half.h), else 1 */
    uint64_t stage, stage_rows; /* combine: rows on their way to other nodes, when they are not in the heap */
    /* Where the network reads and writes: recv_buf, stage, and these. split 0: the same places of the heap. */
    int32_t split, reserved;
    uint64_t net_slots, net_slot_stride;   /* dispatch: headers[R], rows[M] on their way out */
    uint64_t net_headers, net_rows;        /* from the start of one of these */
    uint64_t net_cslots, net_cslot_stride; /* combine: the own descriptor */
    uint64_t net_cdescs, net_crows;        /* from the start of one of these: what remote ranks have put */
};

struct ht_layout {
    uint64_t counts, counts_stride; /* [2 slots][own, one per node, then each source of this relay]: hn_desc, counts */
    uint64_t dispatch_descs, combine_descs; /* [R] where the node has one word for signals, else the own alone */
    uint64_t tokens, scales, weights, topk_idx, src_rank, src_token, map; /* receive buffer of the node */
    uint64_t pitch, scale_pitch;
    int64_t rows; /* of the receive buffer */
    /* Where rows of a node may be more than that (ht_window.h); 0: they are never. */
    uint64_t window, half;  /* two halves of `half` bytes */
    uint64_t window_row;    /* dispatch: a token's row, lines and weights in a window */
    uint64_t window_routes; /* combine: the tokens of this rank, ids[M][K], rows[M][K]; between nodes round_token[] */
    int32_t take_tokens;    /* dispatch: tokens of a window */
    int32_t sum_tokens;     /* combine: likewise; between nodes the most of a round */
    int32_t wide_tokens;    /* dispatch on one node: tokens of a window that has no rows (HD_IN_REACH) */
    int32_t reserved;
    uint64_t window_shown; /* between nodes, [2][relay_max]: rows of each source in a round that the node looks at */
    uint64_t relay_window; /* combine, [2][relay_max][C][K]: rows that this rank sums as a relay */
    uint64_t shown;        /* split, [2][relay_max]: copies of slots of rounds that the node looks at */
    /* Between nodes */
    int32_t round_rows;           /* C: most rows of a round to one node */
    int32_t block_tokens;         /* a round is a number of blocks of so many tokens */
    int32_t rounds;               /* most that max_tokens tokens can have */
    int32_t base_stride;          /* of struct handle_dev.relay_base */
    int32_t split;                /* 1: what follows is in group_dev.net alone, 0: in the heap (group/heap.c) */
    uint64_t net_counts;          /* blocks as in `counts`, on their way out and where they land; split 0: `counts` */
    uint64_t relay, relay_stride; /* [sources of this relay][HT_SLOTS]: rows in (dispatch) or out (combine), a block */
    uint64_t relay_block;         /* from a slot's start to its block */
    uint64_t back, back_stride;   /* [other nodes][HT_SLOTS]: sums that come back (combine) */
    uint64_t stage;               /* [M]: own rows on their way out (dispatch) that are not in the heap */
    uint64_t blocks;              /* own blocks on their way out */
    uint64_t record;              /* most bytes of a record */
    uint64_t cpitch;              /* most bytes of a row: payload, and of a sum the weights */
};

#endif

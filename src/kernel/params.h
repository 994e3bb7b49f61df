/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What host and kernels share: kernel numbers, the contents of every rank's heap (heap.h), per-group and per-handle
 * device tables, kernel parameters. C11, C++ and device compilers all read this file.
 */
#ifndef EPX_KERNEL_PARAMS_H
#define EPX_KERNEL_PARAMS_H

#include <stddef.h>
#include <stdint.h>

#include "kernel/heap.h"

struct ring_dev; /* kernel/command.h */
struct watch;    /* util/watch.h */
struct kernel_times;

/* Kernels, and the operations that they are to a reader of traces. The third is the second, of LogFMT rows. */
#define KERNELS(X)                     \
    X(LL_DISPATCH, "ll dispatch")      \
    X(LL_COMBINE, "ll combine")        \
    X(LL_COMBINE_LOGFMT, "ll combine") \
    X(HT_NOTIFY, "ht update")          \
    X(HT_DISPATCH, "ht dispatch")      \
    X(HT_COMBINE, "ht combine")        \
    X(MASK, "mask")                    \
    X(LAYOUT, "layout")                \
    X(RING_BENCH, "ring bench")

#define KERNEL_ENUM(name, text) KERNEL_##name,
enum kernel_id { KERNELS(KERNEL_ENUM) KERNEL_COUNT };
#undef KERNEL_ENUM

#define KERNEL_PARAMS_MAX 1024

/* Copies of what epx.h says; kernels do not include the public header. group/kernel_constants.c compares them. */
enum { DTYPE_BF16 = 1, DTYPE_FP16 = 2, DTYPE_FP32 = 3 };                  /* epx_dtype */
enum { LAYOUT_EXPERT_MAJOR = 1, LAYOUT_RANK_MAJOR = 2, LAYOUT_FLAT = 3 }; /* epx_layout */
enum {                                                                    /* epx_status */
       KSTATUS_ARGUMENT = 1,
       KSTATUS_USAGE = 2,
       KSTATUS_MISMATCH = 3,
       KSTATUS_OVERFLOW = 4,
       KSTATUS_MEMORY = 5,
       KSTATUS_TIMEOUT = 7,
       KSTATUS_PEER = 8,
       KSTATUS_LAST = 12
};

/* How a wait ends: ag_wait_ge() and, for the last two, wait_aloud() of kernel/waiting_for.h. */
enum wait_result { WAIT_OK, WAIT_TIMEOUT, WAIT_ABORTED, WAIT_LEFT, WAIT_LOST };

/* How a row to be summed is coded. ROWS_ROUNDED: bf16, whose values count as LogFMT would have carried them. */
enum { ROWS_PLAIN = 0, ROWS_LOGFMT = 1, ROWS_NVFP4 = 2, ROWS_ROUNDED = 3 };
/* How a received top-k row is written. */
enum { TOPK_COMPACT = 1, TOPK_ALL_WEIGHTS = 2, TOPK_GLOBAL = 4 };
/* What becomes of rows beyond drop_rows. */
enum {
    DROP_FLAT = 1,  /* the first of two updates: FLAT tokens that stay, in `pos`, are the routing of the second */
    DROP_ZONES = 2, /* EXPERT_MAJOR: pos is -1 where the row is beyond */
    DROP_TOKENS = 4 /* and PHANTOM(row) where the row stays but its token is beyond */
};
#define PHANTOM(row) (-2 - (row)) /* its own inverse */
/* struct hd_desc.idx: of topk_idx. */
enum { IDX_64 = 1, IDX_GLOBAL = 2 };

/* struct signature.extra. A message shows them as a number: each operation has its own. */
enum {
    SIGNATURE_WEIGHTS = 1,    /* dispatch, HT combine: weights are asked for */
    SIGNATURE_BACKWARD = 2,   /* HT */
    SIGNATURE_COMPACT = 4,    /* HT: compact top-k */
    SIGNATURE_UE8M0 = 8,      /* dispatch: scales are int32, which may be as long as those in fp32 */
    SIGNATURE_SUM_AT = 3,     /* HT combine: SUM_* from this bit on */
    SIGNATURE_MAP = 1 << 24,  /* HT update: handles keep what source maps need */
    SIGNATURE_DROP = 1 << 25, /* HT update: rows are dropped */
    SIGNATURE_LOGFMT = 1,     /* LL combine */
    SIGNATURE_NVFP4 = 2       /* LL combine */
};

/* How a high-throughput combine adds the rows of a token: EPX_SUM_* of epx.h (group/kernel_constants.c). */
enum { SUM_TOPK_ORDER = 1, SUM_ROUND_RANKS = 2, SUM_ROUND_NODES = 4, SUM_MXFP8 = 8 };

/* ---- In a rank's own device memory --------------------------------------------------------------------------- */

struct group_state {
    uint64_t epoch[OP_COUNT]; /* the last one begun */
    uint64_t combined[2];     /* low latency, by parity: the last combine that all ranks are known to have ended */
    uint64_t barrier;         /* generation */
    uint32_t arrived;         /* agents in the barrier */
    uint32_t ticket[4];       /* agents past a point of the running kernel, see sync_last() */
    uint64_t returned;        /* rows that the running combine has summed */
    uint32_t reported;        /* 1: an agent of this rank has the error record; not there: a bus may lack atomics */
    int32_t lost, recv_half;  /* low latency: see ll_recv_half.h */
    int32_t pulled;           /* the running dispatch has rows in windows (ht_take.h) */
    int32_t reserved;
    uint64_t dirty;      /* likewise, a bit per slot */
    uint64_t verdict[2]; /* of OP_LL_*: see ll_wide_wait.h */
    uint64_t narrowed;   /* when few blocks went on with an operation the last time; likewise */
};

enum error_state { ERROR_NONE = 0, ERROR_WRITING = 1, ERROR_SET = 2 };

/* In memory that the host reads at any time; the first error wins. Kernels and proxies have one each. */
struct error_record {
    uint32_t state;
    int32_t status;
    int32_t peer;
    int32_t phase;
    int64_t expected, seen;
    int64_t detail[2];
};

/* Kept by kernels in device memory. */
struct device_stats {
    uint64_t rows_sent, rows_received, rows_returned;
    uint64_t rows_remote; /* of rows_sent and rows returned: to ranks (low latency) or nodes elsewhere */
    uint64_t bytes_peer, bytes_local;
    uint64_t waits, wait_ns, timeouts;
};

/* A group as kernels see it; constant after creation but for is_watched and what the pointers lead to. */
struct group_dev {
    int32_t rank, nranks;
    int32_t experts, local_experts;
    int32_t max_tokens, max_topk;
    int32_t inflight; /* W */
    int32_t enable_mask;
    uint64_t timeout_ns;
    char *const *heap;       /* [R]: each rank's heap as mapped here */
    const uint64_t *regions; /* [R][REGION_SLOTS]: addresses of imported and own regions; or NULL */
    struct group_state *state;
    int32_t *mask;          /* [R] 1 = active */
    const int32_t *members; /* [R] likewise, as all ranks agreed last */
    struct error_record *error;
    struct device_stats *stats;
    uint64_t *windows;      /* a hint for the host: HW_HINT* of every operation (ht_window.h) */
    struct watch *watch;    /* what epx top sees; NULL on a GPU, and where there is none */
    int32_t *tables;        /* [agents][E + 2 * R]: counting, see route.h and layout.h */
    int32_t *layout_counts; /* [E + 2 * R + 1]: sums and a ticket, zero between launches, see layout.h */
    int32_t max_agents;
    int32_t is_watched;         /* 1: operations of a GPU keep times for epx top; changes while kernels run */
    struct kernel_times *times; /* of a GPU */
    uint64_t signals;
    struct ll_layout ll;
    struct ht_layout ht;
    /* Nodes. heap[r] is NULL for ranks of other nodes. */
    int32_t nnodes, node;
    int32_t sig_slots;
    int32_t remotes;     /* most ranks of other nodes that any rank has */
    int32_t relay_count; /* sources this rank relays for */
    int32_t relay_max;   /* most that any rank relays for */
    int32_t nrings;
    int32_t node_size;
    int32_t reserved2;
    const int32_t *node_ranks;    /* [node_size]: the ranks of this node, this one included */
    const int32_t *node_of;       /* [R] */
    const int32_t *recv_index_at; /* [R]: this rank's number among the remote ranks of r */
    const int32_t *recv_index_of; /* [R]: r's number among this rank's remote ranks */
    const int32_t *relay_rank;    /* [nnodes]: who relays this rank's rows in each other node; -1 = own node */
    const int32_t *relay_slot;    /* [nnodes]: this rank's number among the sources of that relay */
    const int32_t *relay_sources; /* [relay_count] */
    const int32_t *by_node;       /* [R]: ranks by node, ascending */
    const int32_t *node_start;    /* [nnodes + 1]: where a node begins in by_node */
    const int32_t *place_of;      /* [R]: a rank's number among those of its node */
    const int32_t *relay_of;      /* [R]: who relays for r in this rank's node; -1 = r is of this node */
    const int32_t *relay_number;  /* [R]: r's number among the sources of that relay */
    uint64_t *counters;           /* [SIG_COUNT][sig_slots][R]: counted by the proxies; host memory */
    uint64_t *expected;           /* likewise: rows expected so far */
    uint64_t *sent;               /* [R]: puts to each rank whose source may be reused; counted by the proxies */
    uint64_t *pushed;             /* [R]: puts given to the rings so far */
    const struct ring_dev *rings; /* [nrings]; ring_of() says which */
    const int32_t *routes;        /* [R]: of puts to and from each rank, see ROUTE_RING */
    /* One look instead of one per rank: what the proxy of each ring has of all its peers; host memory. */
    uint64_t *aggregates;   /* [nrings][SIG_COUNT][sig_slots]: the least counter; of rows, the sum of counters */
    uint64_t *sent_all;     /* [nrings]: the sum of `sent` */
    uint64_t *pushed_all;   /* [nrings]: puts given to each ring so far */
    uint64_t *expected_all; /* as aggregates: rows expected so far, of all ranks together */
    int32_t *order;         /* [2*M]: low-latency staging order, and the keys that it follows, see ll_order() */
    /* High throughput, where each stage is a launch: what kernels would else read word by word across a bus. */
    char *records;          /* [max_agents]: the record that an agent works on, see ht_copy_record() */
    uint64_t record_stride; /* of that */
    char *net;              /* the memory of this rank that the network reads and writes: its heap, or host memory */
    char *counts_copy;      /* [R]: what each rank said in the last update, see hn_fetch() */
    int32_t *packed_at;     /* [halves*M*K]: where LogFMT rows of other nodes begin, in units of 16 bytes */
    uint32_t *by_deadline;  /* [R]: 1: a deadline has masked this rank, not epx_mask_update; host memory */
};

/* What the host reads after a high-throughput notify. */
struct recv_info {
    uint64_t epoch;           /* number of the last update that has completed */
    int64_t rows;             /* padding included */
    int64_t used_rows;        /* as in struct handle_state */
    int64_t tokens;           /* tokens that have an expert here */
    int64_t rounds;           /* between nodes: that this rank has a part in */
    int64_t windowed;         /* as in struct handle_state */
    int64_t most_tokens;      /* likewise */
    int64_t all_rounds;       /* likewise */
    int64_t unexpected;       /* as in struct handle_state */
    int64_t too_many;         /* likewise */
    int64_t too_many_rank;    /* whose tokens these are */
    int64_t expert_counts[1]; /* [L] */
};

/* What kernels change in a handle. */
struct handle_state {
    uint64_t epoch; /* of the staged operation in flight */
    int32_t ntokens;
    int32_t topk;
    int64_t recv_rows;   /* high throughput; padding included */
    int64_t filled_rows; /* likewise, those that carry tokens */
    int64_t used_rows;   /* where the last of these ends: combine reads nothing behind it */
    int64_t peer_rows;   /* of these, those that another rank of the node writes here */
    int64_t tokens;      /* tokens that have an expert here */
    uint64_t key;   /* high throughput: of the handle whose routing this is (handle_key); 0 = none, or half of one */
    int32_t rounds; /* between nodes: of the own tokens */
    int32_t most_rounds; /* of those and of all sources of this relay */
    int32_t drop;        /* DROP_*, of the last update */
    int32_t windowed;    /* 1: a rank of the node gets more rows than a receive buffer holds (ht_window.h) */
    int64_t most_tokens; /* of a rank of the node */
    int32_t lost;        /* low latency: masked ranks elsewhere that were told of this dispatch (ll_recv_half.h) */
    int32_t all_rounds;  /* between nodes: the most of any rank; all ranks know the same */
    int64_t unexpected;  /* 1: a rank gets more rows than it expected (epx_layout_info.expected_rows) */
    int64_t too_many;    /* 0, or the tokens of a rank that has more than max_tokens: nobody can use this routing */
    int64_t all_rows;    /* EXPERT_MAJOR: recv_rows, and those that are dropped */
};

/* A handle's tables. M and K are the group's limits here, so that a handle can be used with any number of tokens. */
struct handle_dev {
    struct handle_state *state;
    /* Of this rank's tokens, [B*K]: */
    int32_t *ids;    /* expert, or -1 */
    int32_t *eidx;   /* how many earlier (token, k) of this rank name the same expert */
    int32_t *ridx;   /* for the first k of a token that names a rank: how many earlier tokens go there; else -1 */
    int32_t *rord;   /* likewise: how many ranks of this token are smaller; else -1 */
    int32_t *ecount; /* [E] */
    int32_t *rcount; /* [R] */
    /* Low latency: of what this rank received */
    int32_t *begin;  /* [L*R] first row of each (expert, source) */
    int32_t *count;  /* [L*R] */
    int32_t *first;  /* EXPERT_MAJOR [E]: where this rank's rows begin at each expert */
    int32_t *source; /* EXPERT_MAJOR [L*R], RANK_MAJOR [R]: the source's `back` for this expert or rank */
    int32_t
        *back; /* of this rank's tokens, EXPERT_MAJOR [E], RANK_MAJOR [R]: first row in the combine receive buffer */
    /* High throughput */
    int32_t *base;      /* FLAT [ranks of the node], EXPERT_MAJOR [their experts]: where this rank's rows begin there;
                        then [ranks of the node]: where its lines begin */
    int32_t *zone;      /* EXPERT_MAJOR [L]: first row of each local expert */
    int32_t *filled;    /* EXPERT_MAJOR [L]: rows that carry tokens */
    int32_t *padded;    /* [L]: rows of each zone, the zeroed ones included */
    int32_t *pos;       /* [B*K]: the row of (token, k) at its destination in this node; -1 = no row of its own there;
                        PHANTOM(row) = a row of zeros, for which it is this rank that writes them */
    int32_t *drop_base; /* [R]: where FLAT rows are dropped, rows of earlier ranks at each destination; else NULL */
    int32_t *limits;    /* [R]: where rows are dropped, how many each destination takes; else NULL */
    int32_t *line; /* [B*K]: EXPERT_MAJOR with a source map, the token's line at the rank of (token, k), for the first
                        k of that rank of this node; else -1. NULL = none */
    /* Between nodes */
    int32_t *nidx; /* [B*K]: for the first k of a token that names a node: its number among the tokens that go there */
    int32_t *block_start; /* [blocks + 1][nnodes]: rows to a node before a block of tokens */
    int32_t *round_block; /* [rounds + 1]: the first block of a round */
    int32_t *node_first;  /* [nnodes]: rows to nodes before this one */
    /* Relay: [source number] of what other nodes route through this rank */
    int32_t *relay_n;      /* tokens */
    int32_t *relay_peer;   /* rows that other ranks of this node hold for them */
    int32_t *relay_rounds; /* rounds */
    int32_t *relay_rows;   /* [ht.rounds]: rows of each round */
    int32_t *relay_base;   /* [ht.base_stride]: as `base` */
    struct recv_info *info;
};

/* ---- Kernel parameters --------------------------------------------------------------------------------------- */

struct index_out { /* an int32 or int64 output, or NULL */
    void *data;
    int64_t is64;
};

struct route_in {
    const void *topk; /* [B, K] int32 or int64 */
    int32_t idx64, ntokens, topk_n;
    int32_t shared; /* 1: entries of a token that name the same expert share a row */
};

enum {
    STEP_SEND = 1,
    STEP_RECV = 2,
    STEP_WAIT = 4 /* alone: what STEP_RECV would wait for, by few agents. Nothing is received. */
};

enum { CAST_NONE = 0, CAST_FP8 = 1, CAST_NVFP4 = 2 };

/* How a row of the caller's becomes a row on the wire. */
struct row_in {
    const char *tokens;
    int64_t stride; /* bytes */
    const char *scales;
    int64_t scale_row_stride, scale_stride; /* bytes */
    int32_t hidden;                         /* elements */
    int32_t dtype;                          /* of tokens */
    int32_t cast;                           /* CAST_* */
    int32_t scale_ue8m0, round_scale, nscales;
    const float *global_scale; /* CAST_NVFP4: of every row; NULL = 1 */
};

struct row_out {
    char *tokens;
    int64_t outer_stride, stride; /* bytes */
    char *scales;
    int64_t scale_outer_stride, scale_row_stride, scale_stride;
};

/* How long a launch waits for late peers with all its blocks, and with how many it waits then (ll_wide_wait.h). */
struct ll_wide_wait {
    int32_t us; /* 0: as long as it takes */
    int32_t few_blocks;
};

struct ll_dispatch_params {
    const struct group_dev *g;
    struct handle_dev *h;
    int32_t steps, layout, topk_form; /* TOPK_* */
    int32_t outer_rows;               /* second extent of the caller's tensors: R*M or more, or M or more */
    struct signature signature;
    struct route_in route;
    struct row_in in;
    const float *weights;
    uint64_t in_place;                 /* heap offset of tokens when they are read where they are; 0 = staged */
    uint64_t open_tokens, open_scales; /* heap offsets of what `out` has; 0 = not in the heap */
    uint64_t open_src_token;           /* likewise of src_token */
    struct row_out out;
    int64_t scale_tiles; /* 1: scales are in tiles of 128 rows, and out.scale_row_stride is from tile to tile */
    float *out_weights;
    struct index_out out_idx;
    int32_t *src_rank, *src_token;
    struct index_out expert_counts, rank_counts, total;
    int64_t *layout_range;
    int32_t *expert_stats;
    int64_t *wait_ns;
    struct ll_wide_wait wide_wait;
    int32_t one_node, reserved; /* 1: all ranks are in one node, and none is ever masked (flavour.h) */
};

struct ll_combine_params {
    const struct group_dev *g;
    struct handle_dev *h;
    int32_t steps, layout, logfmt, nvfp4;
    struct signature signature;
    const char *tokens;
    int64_t outer_stride, stride;
    const float *row_scales; /* nvfp4: [outer][row_scale_rows] */
    int64_t row_scale_rows;
    uint64_t in_place; /* pulled: where that is */
    int32_t pulled;    /* 1: ranks of the node read the rows where they are */
    int32_t rows_in;   /* pulled: what in_place counts from, see struct lc_desc */
    int32_t nodes;     /* 1: the group has several */
    int32_t signal_rows;
    uint32_t *signals; /* [L][signal_stride]: when rows may be read; NULL = at once */
    int64_t signal_stride;
    uint32_t signal_value;
    int32_t one_node; /* as in struct ll_dispatch_params */
    const float *weights;
    const char *bias[2];
    int64_t bias_stride[2];
    char *out;
    int64_t out_stride;
    int32_t hidden, dtype;
    int64_t *wait_ns;
    struct ll_wide_wait wide_wait;
    const void *topk; /* [B, K]: entries that are negative are skipped; NULL = those of the routing alone */
    int64_t topk_idx64;
};

struct ht_notify_params {
    const struct group_dev *g;
    struct handle_dev *h;
    struct route_in route;
    struct signature signature;
    int32_t layout, alignment;
    int32_t nodes; /* 1: the group has several */
    int32_t drop;  /* DROP_* */
    int64_t drop_rows;
    int64_t expected_rows;
    int64_t too_many; /* 0, or so many tokens of this rank are more than max_tokens: it routes none of them */
    uint64_t key;
    uint64_t number; /* of this update of the handle, from 1 on; in a graph that of its recording; 0 = the first part */
    struct index_out expert_counts, expert_offsets, rank_counts, total, rank_matrix, rank_tokens, relay_counts;
    struct index_out expert_rows, expert_ends, source_ends;
    int32_t *expert_stats;
    int32_t source_ends_n, reserved2;
};

/* Which receive tensors lie outside the heap: their rows come through the receive buffer and are copied. */
enum {
    BUFFERED_TOKENS = 1,
    BUFFERED_SCALES = 2,
    BUFFERED_WEIGHTS = 4,
    BUFFERED_IDX = 8,
    BUFFERED_SRC_RANK = 16,
    BUFFERED_SRC_TOKEN = 32,
    BUFFERED_MAP = 64
};

struct ht_dispatch_params {
    const struct group_dev *g;
    struct handle_dev *h;
    int32_t layout, compact;
    struct signature signature;
    struct row_in in;
    const float *weights;
    uint64_t in_place;     /* heap offset of tokens, where rows for other nodes are put from there */
    struct hd_desc desc;   /* where senders write */
    struct hd_desc own;    /* what this rank writes where it takes its rows from windows: its tensors */
    struct hd_shown shown; /* where others take the rows of this rank, but for the number of tokens */
    int32_t buffered;      /* BUFFERED_* */
    int32_t nodes;         /* 1: the group has several */
    int32_t drop;          /* DROP_* */
    int32_t turns;         /* between nodes, or of windows, where each stage is a launch: how many */
    uint64_t key;          /* the routing must be for this handle, and for so many tokens */
    int64_t ntokens;
    /* The caller's tensors. */
    struct row_out final;
    float *final_weights;
    struct index_out final_idx;
    int32_t *final_src_rank, *final_src_token, *final_map;
    int64_t final_rows;
    struct index_out expert_counts, total; /* EXPERT_MAJOR: of this routing, once more */
    int64_t if_expected;                   /* 1: nothing is done after an update that was not as expected */
};

struct ht_combine_params {
    const struct group_dev *g;
    struct handle_dev *h;
    int32_t layout, compact;
    struct signature signature;
    const char *tokens; /* to be copied to the receive buffer; NULL = in place */
    int64_t stride;
    const float *weights;   /* likewise */
    const char *own_tokens; /* the caller's, wherever they are */
    const float *own_weights;
    struct hc_desc desc;
    const char *bias[2];
    int64_t bias_stride[2];
    char *out;
    int64_t out_stride;
    float *out_weights;
    int32_t hidden, dtype;
    int32_t nodes; /* 1: the group has several */
    int32_t sum;   /* SUM_* */
    int32_t turns; /* as in struct ht_dispatch_params */
    int32_t reserved;
    uint64_t key;
    int64_t ntokens;
    int32_t round, rounds; /* rows of other nodes one by one (hc_round_row): this launch of so many; 0 = all at once */
    char *kept;            /* [B][K] rows of other nodes that earlier rounds brought */
    int64_t kept_stride;
};

struct layout_count_params {
    const struct group_dev *g;
    struct route_in route;
    int32_t experts, local_experts;
    int32_t *per_rank, *per_node, *per_expert; /* [R], [nodes], [E]; or NULL */
    uint8_t *in_rank;                          /* [B][R], or NULL */
};

struct mask_params {
    const struct group_dev *g;
    const struct handle_dev *staged; /* NULL, or: tell all that its staged operation will not be completed */
    int32_t staged_kind;             /* what they wait for: SIG_LL_DONE or SIG_LC_DONE */
    int32_t hidden;                  /* 1: `query` shows ranks that the others have left out as active */
    int32_t *query;                  /* copy the mask here, or NULL */
    int32_t update;                  /* 1: take `bits` */
    uint8_t bits[KERNEL_MAX_RANKS / 8];
};

/* `epx bench ring`: rank 0 among 1 + nrings ranks; ring i serves ranks p with p % nrings == i. */
#define RING_BENCH_KEPT 4 /* trips whose times are stored together */

struct ring_bench_params {
    struct control *control;
    const struct ring_dev *rings; /* [nrings] */
    int32_t nrings, contiguous;
    int32_t trips; /* 0: commands until *stop is set; else so many round trips of agent 0 */
    uint32_t bytes;
    uint64_t pause_ns; /* from a push to the first look for its answer */
    uint64_t heap_bytes, timeout_ns;
    const uint64_t *stop, *sent; /* written by the host, by the proxies */
    uint64_t *pushed;            /* [agents] */
    uint64_t *failed;            /* 1: a push found no room in time */
    uint64_t
        *times; /* in nanoseconds: [trips] until the answer (0: none came), [trips / RING_BENCH_KEPT] of pushes alone */
};

EPX_STATIC_ASSERT(sizeof(struct ll_dispatch_params) <= KERNEL_PARAMS_MAX, "fits");
EPX_STATIC_ASSERT(sizeof(struct ht_dispatch_params) <= KERNEL_PARAMS_MAX, "fits");
EPX_STATIC_ASSERT(sizeof(struct mask_params) <= KERNEL_PARAMS_MAX, "fits");

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oracle: what dispatch must deliver and combine must return, written down as plainly as possible and without
 * anything from src/. It reads all ranks' routing, lists the rows that one rank receives, and compares tensors with
 * them row by row; remote rows are generated again when needed, never exchanged.
 *
 *      workload --> oracle_route (all ranks' routing, shared, read only)
 *                       |
 *                       +--> oracle_recv (one rank's rows) --> oracle_check_layout / oracle_check_dispatch
 *                       |                                 \--> oracle_fill_results (combine's input)
 *                       +--> oracle_check_combine (one rank's tokens)
 */
#ifndef EPX_TESTS_LIB_ORACLE_H
#define EPX_TESTS_LIB_ORACLE_H

#include <stdint.h>

#include "compare.h"
#include "epx/epx.h"
#include "workload.h"

/* The routing of all ranks and how it shall be laid out. */
struct oracle_route {
    int nranks, experts, local_experts, topk;
    int max_tokens;         /* M of the group: decides the shape of low-latency tensors */
    int mode;               /* epx_mode */
    int layout;             /* epx_layout */
    uint32_t flags;         /* EPX_HANDLE_* */
    int alignment;          /* HT EXPERT_MAJOR; at least 1 */
    const uint8_t *node_of; /* [nranks] of the caller's, for nodes of different sizes; NULL = by ranks_per_node */
    int ranks_per_node;     /* 0 = one node. HT combine sums inside every other node first, rounding its sum */
    int *tokens;            /* [nranks] */
    int32_t *idx;           /* [nranks][max_tokens][topk] */
    int32_t *active;        /* [nranks]: 0 = masked rank, neither sends nor receives */
    /* oracle_route_index(): the tokens that name rank r, as source rank * max_tokens + token, ascending, are
     * named[first[r]] .. named[first[r + 1] - 1]. NULL = all tokens are looked at, for each rank. */
    int64_t *first;
    uint32_t *named;
};

/* Allocates for the given sizes, all tokens 0, all ranks active. 0, or -1 without memory. */
int oracle_route_init(struct oracle_route *route, int nranks, int experts, int topk, int max_tokens, int mode,
                      int layout, uint32_t flags, int alignment);
/* oracle_route_init with the sizes of `w` (max_tokens 0 = the workload's), then its routing. */
int oracle_route_from_workload(struct oracle_route *route, const struct workload *w, int max_tokens, int mode,
                               int layout, uint32_t flags, int alignment);
/* Once the routing is final, where it is large. 0, or -1 without memory. */
int oracle_route_index(struct oracle_route *route);
void oracle_route_free(struct oracle_route *route);
static inline int oracle_node_of(const struct oracle_route *route, int rank)
{
    if (route->node_of)
        return route->node_of[rank];
    return route->ranks_per_node ? rank / route->ranks_per_node : 0;
}

int32_t *oracle_idx(const struct oracle_route *route, int rank, int token);
/* Does a token with these entries go to `rank`? */
int oracle_names_rank(const struct oracle_route *route, const int32_t *idx, int rank);

/* One row that a rank receives. */
struct oracle_place {
    int64_t row; /* in the tokens tensor, its dimensions before H flattened */
    int src_rank, src_token;
    int expert; /* EXPERT_MAJOR: local expert; else -1 */
    int k;      /* EXPERT_MAJOR: entry of the source's top-k; else -1. A token that names an expert twice has two
                       rows in high throughput, one (the first k) in low latency, whose shape has no room for more */
};

struct oracle_recv {
    const struct oracle_route *route;
    int rank;
    int64_t nplaces;
    struct oracle_place *places; /* ordered by row */
    int64_t rows;                /* rows of the tokens tensor that may be touched: LL L*R*M or R*M, HT = total */
    int64_t total;               /* rows received, padding included */
    int64_t *expert_counts;      /* [L], padded in HT EXPERT_MAJOR */
    int64_t *expert_rows;        /* [L], never padded: what epx_handle_recv_count returns */
    int64_t *expert_offsets;     /* [L] */
    int64_t *rank_counts;        /* [R] */
    int64_t *layout_range;       /* [L][R] */
};

int oracle_recv_init(struct oracle_recv *recv, const struct oracle_route *route, int rank);
void oracle_recv_free(struct oracle_recv *recv);

/* Where rows come from: the workload's functions, or a test's own. Each must be a pure function of its arguments. */
struct oracle_data {
    void *context;
    void (*token)(void *context, int rank, int token, void *row);
    void (*scales)(void *context, int rank, int token, void *scales);
    void (*weights)(void *context, int rank, int token, float *weights);
    /* EXPERT_MAJOR: expert is the global id and k the entry of the source's top-k; other layouts: both -1. */
    void (*result)(void *context, int owner, int expert, int rank, int token, int k, void *row);
    float (*result_weight)(void *context, int rank, int token, int k);
    void (*bias)(void *context, int which, int rank, int token, void *row);
    int hidden;
    int dtype;                    /* of tokens */
    int result_dtype;             /* of results, biases and combine's output */
    int scale_dtype, scale_count; /* fp8 tokens */
};

/* Everything from `w`, which must outlive it. */
struct oracle_data oracle_data_workload(const struct workload *w, int result_dtype);

/* All checks return 0, or -1 with `m` filled. Tensors that are NULL are not checked. */

int oracle_check_layout(const struct oracle_recv *recv, const epx_layout_info *info, struct mismatch *m);

/*
 * Checks what dispatch wrote. `config` for round_scale and direction. Padding of HT EXPERT_MAJOR must be zero; rows
 * that must be left alone are compared with `untouched` (the byte that the caller filled the tensors with before), or
 * not looked at if it is negative.
 */
int oracle_check_dispatch(const struct oracle_recv *recv, const struct oracle_data *data,
                          const epx_dispatch_outputs *outputs, const epx_dispatch_config *config, int untouched,
                          struct mismatch *m);

/* Writes combine's input: data->result into each received row (padding is left alone). weights: NULL, or FLAT [N,K]
 * or HT EXPERT_MAJOR [N], from data->result_weight. */
void oracle_fill_results(const struct oracle_recv *recv, const struct oracle_data *data, epx_tensor *tokens,
                         epx_tensor *weights);

struct oracle_combine {
    int weighted;    /* LL EXPERT_MAJOR: multiply by data->weights */
    int biases;      /* 0, 1 or 2: how many data->bias are added first */
    int logfmt;      /* rows travelled as LogFMT-10: compare within its error bound, not bit by bit */
    int round_ranks; /* HT EXPERT_MAJOR: EPX_SUM_ROUND_RANKS alone */
};

/* Checks what combine returned to `rank`, bit by bit but for logfmt. */
int oracle_check_combine(const struct oracle_route *route, const struct oracle_data *data, int rank,
                         const struct oracle_combine *how, const epx_combine_outputs *outputs, struct mismatch *m);

/* What one operation adds to a rank's statistics (oracle_count.c). */
struct oracle_counts {
    uint64_t rows_sent, rows_received, rows_returned;
    uint64_t rows_peer; /* epx_stats.bytes_peer, in rows */
};
void oracle_count_dispatch(const struct oracle_route *route, int rank, struct oracle_counts *counts);
void oracle_count_combine(const struct oracle_route *route, int rank, struct oracle_counts *counts);

/* ---- The scalar references, also for tests of src/device ------------------------------------------------------ */

float oracle_to_float(int dtype, const void *element);
void oracle_from_float(int dtype, float value, void *element);
float oracle_e4m3_to_float(uint8_t code);
uint8_t oracle_float_to_e4m3(float value); /* nearest even, saturating to +-448 */
/* One row to fp8: q[hidden], scales ceil(hidden/128) floats or ceil(hidden/512) int32 when `ue8m0`. */
void oracle_cast_fp8(uint8_t *q, void *scales, int ue8m0, int round_scale, const void *row, int dtype, int hidden);
/* One bf16 row through LogFMT-10 and back, as floats, and how far any implementation may be off the true value. */
void oracle_logfmt(float *decoded, float *bound, const uint16_t *row, int hidden);

#endif

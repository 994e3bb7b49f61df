/* SPDX-License-Identifier: Apache-2.0 */
/* The two modes on the host: checked tensors become kernel parameters and launches. */
#ifndef EPX_MODES_MODES_H
#define EPX_MODES_MODES_H

#include "group/objects.h"

/* epx_layout_info, checked; data NULL = not requested. */
struct layout_tensors {
    epx_tensor expert_counts, expert_offsets, rank_counts, total, layout_range, expert_stats, wait_ns;
    epx_tensor rank_matrix, rank_tokens, relay_counts;
    epx_tensor expert_rows, expert_ends, source_ends;
    uint32_t expected_rows, drop_rows;
};

/* Dispatch and combine, checked; strides are explicit; data NULL = not given. */
struct dispatch_args {
    epx_tensor tokens, scales, weights, global_scale; /* in */
    epx_tensor out_tokens, out_scales, out_weights, out_idx, src_rank, src_token, source_map;
    struct layout_tensors info;
    int cast, round_scale, send_only, backward, source_stride, global_ids, max_sms, if_expected;
    int nvfp4; /* EPX_NVFP4_* */
};

struct combine_args {
    epx_tensor tokens, weights, bias[2], row_scales, signals, topk;
    epx_tensor out_tokens, out_weights, wait_ns;
    int logfmt, nvfp4, send_only, backward;
    unsigned sum; /* EPX_SUM_* */
    int max_sms;
    int signal_rows;
    uint32_t signal_value;
};

/* epx_dispatch_layout_outputs, checked; NULL = not asked for. */
struct layout_results {
    int32_t *per_rank, *per_node, *per_expert;
    uint8_t *in_rank;
};

epx_status dispatch_layout(struct epx_group *group, const epx_tensor *topk, const struct layout_results *results,
                           struct device_stream *stream);
epx_status ht_update(struct epx_handle *handle, const epx_tensor *topk, const struct layout_tensors *info,
                     struct device_stream *stream);
epx_status ht_dispatch(struct epx_handle *handle, const struct dispatch_args *args, struct device_stream *stream);
epx_status ht_combine(struct epx_handle *handle, const struct combine_args *args, struct device_stream *stream);
epx_status ll_dispatch(struct epx_handle *handle, const struct dispatch_args *args, struct device_stream *stream);
epx_status ll_combine(struct epx_handle *handle, const struct combine_args *args, struct device_stream *stream);
epx_status ll_complete(struct epx_handle *handle, struct device_stream *stream);
/* Before a launch of the graph: EPX_ERR_BUSY if one of its operations would wait for the slot of a staged one. */
epx_status ll_graph_check(const struct epx_graph *graph);
/* After it. */
void ll_graph_launched(const struct epx_graph *graph);

/* Shared by the modes (modes/params.c). */
struct signature make_signature(const struct epx_handle *handle, const epx_tensor *wire, uint64_t scale_bytes,
                                int extra);
struct row_in make_row_in(const struct dispatch_args *args);
struct row_out make_row_out(const epx_tensor *tokens, const epx_tensor *scales);
struct index_out make_index(const epx_tensor *t);
struct route_in make_route(const epx_tensor *topk);
/* Bytes from the first to past the last element. */
uint64_t tensor_span(const epx_tensor *t);
/* Its offset in this rank's heap; 0 = ordinary memory, or no tensor. */
uint64_t tensor_heap_offset(const struct epx_group *group, const epx_tensor *t);
uint64_t scale_row_bytes(const struct dispatch_args *args);
/* The part of a signature that tells scales in fp32 from UE8M0. */
int scales_signature(const struct dispatch_args *args);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libnccl_ep.so: NCCL EP's interface over epx.h, and nothing else of EPX but its log.
 *
 *      ncclEpX(handle, structs of nccl_ep.h)
 *          |  struct_check, compat_tensor: sizes, magic numbers; descriptions and windows -> epx_tensor
 *          |  what only this interface forbids or demands (docs/nccl_ep.md)
 *          v
 *      epx_x(...)  ->  compat_result: epx_status -> ncclResult_t, the message is kept for ncclEpxGetLastError
 */
#ifndef EPX_COMPAT_NCCL_EP_COMPAT_H
#define EPX_COMPAT_NCCL_EP_COMPAT_H

#include <nccl_ep.h>

#include "epx/epx.h"

/* ---- Failures (error.c) ----------------------------------------------------------------------------------------- */

/* Stores the message for ncclEpxGetLastError of this thread, logs it at level "info", returns `result`. */
ncclResult_t compat_fail(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Converts the status of an epx call. On failure it stores EPX's message with `call` before it. */
ncclResult_t compat_result(epx_status status, const char *call);
/* NULL, or a struct of this size and magic number. `name` is how the caller knows it. */
ncclResult_t struct_check(const char *call, const char *name, const void *given, size_t size);
/* The same for one that may not be NULL. */
ncclResult_t struct_need(const char *call, const char *name, const void *given, size_t size);

/* ---- Communicators (comm.c) ------------------------------------------------------------------------------------- */

struct comm {
    ncclComm_t comm;
    int rank, nranks;
    int real;         /* NCCL's own, not the stand-in's */
    int device_index; /* of the GPU in use */
    int timeout_ms;   /* of one all-gather */
    /* What its library has of these. */
    int (*host_gather)(ncclComm_t comm, const void *send, void *recv, size_t bytes);
    ncclResult_t (*gather)(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream);
    ncclResult_t (*async_error)(ncclComm_t comm, ncclResult_t *result);
    ncclResult_t (*window_pointer)(ncclComm_t comm, ncclWindow_t window, void **ptr);
};

/* Finds out about a communicator, whoever's it is. */
ncclResult_t comm_open(struct comm *comm, ncclComm_t given, int timeout_ms);
/* An epx_allgather_fn; the context is a struct comm. */
int comm_allgather(void *context, const void *send, void *recv, size_t bytes);
/* Where a window's memory begins. */
ncclResult_t comm_window(const struct comm *comm, const char *call, const char *name, ncclWindow_t window, void **base);
/* Multiprocessors of the GPU; 0: not known. */
int gpu_multiprocessors(int device_index);

/* ---- Groups and handles (objects.c): looked up before they are followed ------------------------------------------ */

struct stream_pair { /* CPU device: a caller's stream, and the group's stream that does its work */
    cudaStream_t given;
    epx_stream own;
    struct stream_pair *next;
};

struct ncclEpGroup {
    epx_group *group;
    struct comm comm;
    int low_latency;
    int is_cpu;
    int max_topk;
    int64_t min_rows; /* high throughput: rows that receive tensors must have */
    int error_kept;   /* MaskClean met an error that ErrorClear has not ended */
    struct stream_pair *streams;
    struct ncclEpHandle *handles;
    struct ncclEpGroup *next;
};

struct ncclEpHandle {
    struct ncclEpGroup *group;
    epx_handle *handle; /* NULL until K is known */
    epx_handle_config config;
    struct ncclEpHandle *next; /* of the group */
};

void group_list_add(struct ncclEpGroup *group);
void group_list_remove(struct ncclEpGroup *group);
void handle_list_add(struct ncclEpHandle *handle);
void handle_list_remove(struct ncclEpHandle *handle);
ncclResult_t group_need(const struct ncclEpGroup *group, const char *call);
ncclResult_t handle_need(const struct ncclEpHandle *handle, const char *call);
/* Can a dispatch or combine of this direction begin with the handle? */
ncclResult_t operation_check(const struct ncclEpHandle *handle, const char *call, ncclEpPassDir_t direction);

/* All groups, kept from changing until group_list_unlock. */
struct ncclEpGroup *group_list_lock(void);
void group_list_unlock(void);

/* ---- Streams (streams.c) ----------------------------------------------------------------------------------------- */

/* Finds the stand-in for CUDA's runtime, where it is in the process. */
void streams_attach(void);
/* The epx_stream for a caller's stream, for one operation that is issued next. */
ncclResult_t compat_stream(struct ncclEpGroup *group, cudaStream_t stream, const char *call, epx_stream *out);

/* Of a group that is destroyed. */
void streams_forget(struct ncclEpGroup *group);

/* ---- Tensors (tensor.c) ------------------------------------------------------------------------------------------ */

/* One tensor of a call on its way to epx: `at` is &storage, or NULL where none was given. */
struct compat_tensor {
    epx_tensor storage;
    epx_tensor *at;
};

/* NULL is fine and stays NULL. */
ncclResult_t compat_tensor(const struct ncclEpGroup *group, const char *call, const char *name,
                           const ncclEpTensor_t *given, struct compat_tensor *out);
/* fp8 scales: uint8 [.., S] becomes int32 [.., S / 4], as EPX knows UE8M0. */
ncclResult_t compat_scales(const struct ncclEpGroup *group, const char *call, const char *name,
                           const ncclEpTensor_t *given, struct compat_tensor *out);

struct compat_layout {
    struct compat_tensor expert_counters, src_rank_counters, expert_offsets, recv_total_counter;
    epx_layout_info info;
    const epx_layout_info *at; /* NULL where nothing was asked for */
};
ncclResult_t compat_layout(const struct ncclEpGroup *group, const char *call, const ncclEpLayoutInfo_t *given,
                           struct compat_layout *out);

#endif

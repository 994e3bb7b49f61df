/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libnccl_ep.so: NCCL EP's interface over epx.h, and nothing else of EPX but its log.
 *
 *      ncclEpX(handle, structs of nccl_ep.h)
 *          |  struct_take, compat_tensor: sizes, magic numbers; descriptions and windows -> epx_tensor
 *          |  what only this interface forbids or demands (docs/nccl_ep.md)
 *          v
 *      epx_x(...)  ->  compat_result: epx_status -> ncclResult_t, the message is kept for ncclEpxGetLastError
 */
#ifndef EPX_NCCL_EP_COMPAT_H
#define EPX_NCCL_EP_COMPAT_H

#include <nccl_ep.h>

#include "nccl_ep/environment.h"
#include "epx/epx.h"

/* ---- Failures (error.c) ----------------------------------------------------------------------------------------- */

/* Stores the message for ncclEpxGetLastError of this thread, logs it at level "info", returns `result`. */
ncclResult_t compat_fail(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Converts the status of an epx call. On failure it stores EPX's message with `call` before it. */
ncclResult_t compat_result(epx_status status, const char *call);
/* Takes a struct of any version over zeros: as many bytes as its caller and this library know. `name` is how the caller
 * knows it, `first` its size in version 1; less, or another magic number, is refused.
 * NULL leaves zeros. */
ncclResult_t struct_take(const char *call, const char *name, const void *given, size_t first, void *own, size_t bytes);
/* The same for one that may not be NULL. */
ncclResult_t struct_need(const char *call, const char *name, const void *given, size_t first, void *own, size_t bytes);

/* What the kernel says of the caller's pointers (pointers.c). A call begins with the first; handle_need() and
 * group_need() call it. */
void pointers_begin(void);
int pointer_readable(const void *at, size_t bytes);
/* InvalidArgument unless so many bytes can be read. */
ncclResult_t pointer_need(const char *call, const char *name, const void *at, size_t bytes);
/* The same, and unless they can be written: a result goes there. */
ncclResult_t pointer_need_result(const char *call, const char *name, void *at, size_t bytes);

struct ncclEpGroup;

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
ncclResult_t comm_open(struct comm *comm, ncclComm_t given);
/* Is the stream being captured into a graph? */
int stream_capturing(const struct ncclEpGroup *group, cudaStream_t stream);
/* An epx_allgather_fn; the context is a struct comm. */
int comm_allgather(void *context, const void *send, void *recv, size_t bytes);
/* Where a window's memory begins. */
ncclResult_t comm_window(const struct comm *comm, const char *call, const char *name, ncclWindow_t window, void **base);
/* Does NCCL EP have NVFP4 on this device? What a runtime in the process says of it, or on a GPU the driver. */
int device_has_nvfp4(int is_cpu, int device_index);
/* Multiprocessors of the GPU; 0: not known. */
int gpu_multiprocessors(int device_index);

/* One tensor of a call on its way to epx: `at` is &storage, or NULL where none was given. */
struct compat_tensor {
    epx_tensor storage; /* types that EPX does not have: bytes */
    epx_tensor *at;
    ncclDataType_t type;
    uint64_t window_offset;
    int window; /* win_hdl was set */
};

/* ---- Groups and handles (objects.c): looked up before they are followed ------------------------------------------ */

struct stream_pair { /* CPU device: a caller's stream, and the group's stream that does its work */
    cudaStream_t given;
    epx_stream own;
    struct stream_pair *next;
};

struct ncclEpGroup {
    epx_group *group;
    struct comm comm;
    ncclEpGroupConfig_t config;
    struct environment env;
    int low_latency;
    int is_cpu, nodes, timeout_ms;
    int nvfp4; /* the device is one for which NCCL EP has it */
    int max_topk;
    int dispatch_sms, combine_sms; /* high throughput on a GPU: at most so many; 0: as many as the group has */
    int eager;                     /* high throughput without max_recv_tokens_per_rank: the host waits for counts */
    int error_kept;                /* MaskClean met an error that ErrorClear has not ended */
    int rejoin;       /* MaskClean was called: all ranks meet in the next operation, those that were masked too */
    int self_masked;  /* MaskUpdate with 0 for this rank itself: it takes part again by MaskClean, or by 1 */
    int handles_made; /* so far */
    int device;       /* of the stand-in for CUDA's runtime, current when the group was made */
    int waiters;      /* threads that wait for its streams on behalf of that runtime (objects.c) */
    struct stream_pair *streams;
    struct ncclEpHandle *handles;
    struct ncclEpGroup *next;
};

struct ncclEpHandle {
    struct ncclEpGroup *group;
    epx_handle *handle;
    epx_handle_config config;
    int updated;
    struct compat_tensor topk; /* low latency: of the last update */
    struct ncclEpHandle *next; /* of the group */
};

/* Logs that a field of the configuration has no effect here, if it is set. */
void warn_unused(const char *field, unsigned int value);
/* The group's limits of SMs (sms.c), as agents of `out` and for each call. */
ncclResult_t sms_limit(struct ncclEpGroup *group, int gpu, epx_group_config *out);

void group_list_add(struct ncclEpGroup *group);
/* Nobody finds the group any more. Returns when nobody waits for its streams: a thread of another rank may, by a
 * cudaFree of its own. */
void group_list_remove(struct ncclEpGroup *group);
/* Of a group that was found under group_list_lock. */
void group_waiter_leave(struct ncclEpGroup *group);
void handle_list_add(struct ncclEpHandle *handle);
void handle_list_remove(struct ncclEpHandle *handle);
ncclResult_t group_need(const struct ncclEpGroup *group, const char *call);
ncclResult_t handle_need(const struct ncclEpHandle *handle, const char *call);
/* Eager high throughput: rows that the routing brings here. Waits for the update. */
ncclResult_t eager_rows(const struct ncclEpHandle *handle, const char *call, cudaStream_t stream, int64_t *rows);
/* Low latency, before an operation: where masks were cleaned, or the others go on without this rank, all ranks meet. */
int group_waits_to_rejoin(struct ncclEpGroup *group);
ncclResult_t group_rejoin(struct ncclEpGroup *group, const char *call, cudaStream_t stream);
/* High throughput with a number of rows, and no leave to drop any. */
int group_traps(const struct ncclEpGroup *group);
/* What an operation returned. Where this rank has no room for its rows, and the policy is TRAP, the others are told, so
 * that they do not wait for a rank that does not take part. */
ncclResult_t operation_result(struct ncclEpHandle *handle, epx_status status, const char *call);
/* Can a dispatch or combine of this direction begin with the handle? */
ncclResult_t operation_check(const struct ncclEpHandle *handle, const char *call, ncclEpPassDir_t direction);

/* All groups, kept from changing until group_list_unlock. */
struct ncclEpGroup *group_list_lock(void);
void group_list_unlock(void);

/* ---- Streams (streams.c) ----------------------------------------------------------------------------------------- */

/* Finds the stand-in for CUDA's runtime, where it is in the process; returns the device that is current there. */
int streams_attach(void);
/* The epx_stream for a caller's stream, for one operation that is issued next. */
ncclResult_t compat_stream(struct ncclEpGroup *group, cudaStream_t stream, const char *call, epx_stream *out);

/* Of a group that is destroyed. */
void streams_forget(struct ncclEpGroup *group);

/* ---- Tensors (tensor.c) ------------------------------------------------------------------------------------------ */

/* NULL is fine and stays NULL. */
ncclResult_t compat_tensor(const struct ncclEpGroup *group, const char *call, const char *name,
                           const ncclEpTensor_t *given, struct compat_tensor *out);
/* With NCCL_EP_DEBUG (zero_copy.c): why rows of this tensor are moved in place or not. */
void zero_copy_log(const struct ncclEpGroup *group, const char *call, const char *name, const struct compat_tensor *t);
/* Memory of ncclEpxMemAlloc, and its end; NULL: all of the group. */
void zero_copy_add(const struct ncclEpGroup *group, const void *start, size_t bytes);
void zero_copy_forget(const struct ncclEpGroup *group, const void *start);
int64_t tensor_row_bytes(const struct compat_tensor *t);
/* Sets of types: bits of ncclDataType_t. */
#define TYPE_BIT(type) (1u << (unsigned int)(type))
#define TYPES_PLAIN (TYPE_BIT(ncclBfloat16) | TYPE_BIT(ncclFloat16) | TYPE_BIT(ncclFloat32))
/* InvalidArgument unless the tensor is there, has so many dimensions, and a type of the set. */
ncclResult_t tensor_need(const struct compat_tensor *t, const char *call, const char *name, int ndim,
                         unsigned int types);

struct compat_layout {
    struct compat_tensor expert_counters, src_rank_counters, expert_offsets, recv_total_counter;
    epx_layout_info info;
    const epx_layout_info *at; /* NULL where nothing was asked for */
    int global_ids;            /* recv_topk_idx_kind */
};
/* Tensors of layout_info that a call looks at; at recv_topk_idx_kind every one does. */
enum { LOOK_EXPERT_COUNTERS = 1, LOOK_RANK_COUNTERS = 2, LOOK_OFFSETS = 4, LOOK_TOTAL = 8 };
unsigned int update_looks_at(const struct ncclEpGroup *group, int layout);
unsigned int dispatch_looks_at(const struct ncclEpHandle *handle);
ncclResult_t compat_layout(const struct ncclEpGroup *group, const char *call, const ncclEpLayoutInfo_t *given,
                           unsigned int looks_at, struct compat_layout *out);

/* ---- Quantisation recipes (recipe.c) ----------------------------------------------------------------------------- */

struct dispatch {
    struct compat_tensor tokens, weights, scales;
    struct compat_tensor out_tokens, out_weights, out_scales, out_idx;
    struct compat_layout layout;
    ncclEpDispatchInputs_t in;
    ncclEpDispatchOutputs_t out;
    ncclEpDispatchConfig_t config;
};

/* Everything that a recipe demands of types, shapes, windows; then the tensors as EPX moves them. */
ncclResult_t dispatch_recipe(const struct ncclEpHandle *handle, const char *call, struct dispatch *d);

struct combine {
    struct compat_tensor tokens, weights, scales, out_tokens, out_weights;
    ncclEpCombineInputs_t in;
    ncclEpCombineOutputs_t out;
    ncclEpCombineConfig_t config;
};

ncclResult_t combine_recipe(const struct ncclEpHandle *handle, const char *call, struct combine *c);

#endif

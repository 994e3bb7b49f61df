/* SPDX-License-Identifier: Apache-2.0 */
/*
 * EPX, expert-parallel exchange: the native C API.
 *
 * A GROUP is a set of ranks that exchange tokens; creating and destroying one is collective.
 * A HANDLE belongs to a group and carries one routing (which token goes to which experts).
 * DISPATCH sends each token to the ranks of its experts; COMBINE brings the results back and sums them.
 * Both are asynchronous on a STREAM: they return once the work is queued.
 *
 * Rules that hold everywhere
 *  - Every function returns an epx_status. epx_last_error() returns the full message for the calling thread.
 *  - Every struct starts with its own size, set by the EPX_*_INIT macro. A library that is newer than its caller uses
 *    defaults for fields that the caller does not know; an older one refuses non-zero fields that it does not know.
 *    Sizes that no version of the struct has had are refused.
 *  - Tensor memory is memory of the group's device. On the CPU device that is ordinary memory.
 *  - Operations of one group are issued in the same order on all its ranks, and run in that order.
 *  - Nothing waits for ever: see epx_group_config.timeout_ms.
 *  - Threads: any thread may call. Calls that issue something (all but queries and waits) run one at a time in each
 *    group; a second thread waits for the first, at most the group's timeout. Queries and waits (epx_group_error and
 *    _query, epx_stream_sync and _query, epx_event_sync and _query, epx_handle_recv_*) run beside them. Ranks need
 *    the same order of operations: the program sees to that. epx_group_destroy returns EPX_ERR_USAGE while another
 *    thread is inside a call of the group, and the destroy calls of handles, events and streams while one waits for the
 *    object or queries it. A function given to epx_stream_call may query, and must not issue or wait. A thread must not
 *    be cancelled (pthread_cancel) inside a call: what it has locked would stay so.
 *  - fork: a child has none of its parent's threads. There, every call with an object of the parent, and
 *    epx_group_create, return EPX_ERR_USAGE at once; the parent goes on. Start ranks by exec, or fork before the first
 *    group.
 *
 * Letters: B tokens of this rank, M = max_tokens_per_rank, R ranks, E experts, L = ceil(E / R) local experts (experts
 * r*L .. r*L+L-1 live on rank r; where R does not divide E the last ranks have fewer, and their tensors keep size L),
 * K top-k, H hidden, N rows of a receive tensor.
 */
#ifndef EPX_EPX_H
#define EPX_EPX_H

#include <stddef.h>
#include <stdint.h>

/* Zeros, and the size of the struct: what EPX_*_INIT are. */
#ifdef __cplusplus
template <typename T> inline T epx_initial_value()
{
    T value = T();
    value.size = static_cast<uint32_t>(sizeof(T));
    return value;
}
#define EPX_INITIAL_VALUE(type) epx_initial_value<type>()
extern "C" {
#else
#define EPX_INITIAL_VALUE(type)        \
    {                                  \
        .size = (uint32_t)sizeof(type) \
    }
#endif

#define EPX_VERSION_MAJOR 0
#define EPX_VERSION_MINOR 1
#define EPX_VERSION_PATCH 0
#define EPX_VERSION_CODE (EPX_VERSION_MAJOR * 10000 + EPX_VERSION_MINOR * 100 + EPX_VERSION_PATCH)

#if defined(__GNUC__)
#define EPX_API __attribute__((visibility("default")))
#else
#define EPX_API
#endif

/* ---- Status ------------------------------------------------------------------------------------------------- */

typedef enum epx_status {
    EPX_OK = 0,
    EPX_ERR_ARGUMENT = 1,     /* a value is wrong: null, shape, dtype, range, struct size */
    EPX_ERR_USAGE = 2,        /* the call is not allowed now, or not with this configuration */
    EPX_ERR_MISMATCH = 3,     /* ranks disagree: the message names the rank and the field */
    EPX_ERR_OVERFLOW = 4,     /* a receive tensor is too small: the message names the rows that are needed */
    EPX_ERR_MEMORY = 5,       /* out of memory, or the heap of epx_alloc is full */
    EPX_ERR_SYSTEM = 6,       /* a system call failed: the message has errno's text */
    EPX_ERR_TIMEOUT = 7,      /* a wait reached its deadline: the message names rank, peer, phase, expected, seen */
    EPX_ERR_PEER = 8,         /* another rank reported a failure */
    EPX_ERR_BUSY = 9,         /* too many staged operations in flight: see epx_group_config.max_inflight */
    EPX_ERR_UNSUPPORTED = 10, /* this build or this machine cannot do it */
    EPX_ERR_NOT_READY = 11,   /* a query: not finished yet */
    EPX_ERR_INTERNAL = 12     /* a bug in EPX: please report it */
} epx_status;

/* One line that describes a status. Never NULL, also for unknown values. */
EPX_API const char *epx_strerror(epx_status status);
/* The message of the last failed call on this thread ("" if none): what was expected and what was given. */
EPX_API const char *epx_last_error(void);
/* EPX_VERSION_CODE of the library in use. */
EPX_API epx_status epx_version(int *code);

/* ---- Tensors ------------------------------------------------------------------------------------------------- */

typedef enum epx_dtype {
    EPX_BF16 = 1,
    EPX_FP16 = 2,
    EPX_FP32 = 3,
    EPX_FP8_E4M3 = 4, /* OCP e4m3, "fn": no infinities, +-448 */
    EPX_INT32 = 5,
    EPX_INT64 = 6,
    EPX_UINT8 = 7
} epx_dtype;

#define EPX_MAX_NDIM 4
#define EPX_MAX_TOPK 32

typedef struct epx_tensor {
    uint32_t size;
    int32_t dtype; /* epx_dtype */
    int32_t ndim;
    uint32_t reserved;
    void *data;
    int64_t shape[EPX_MAX_NDIM];
    int64_t stride[EPX_MAX_NDIM]; /* in elements; all zero means contiguous, row-major */
} epx_tensor;

#define EPX_TENSOR_INIT EPX_INITIAL_VALUE(epx_tensor)

/* Fills a contiguous descriptor. Only the first ndim of d0..d3 count. */
static inline epx_tensor epx_tensor_make(void *data, epx_dtype dtype, int ndim, int64_t d0, int64_t d1, int64_t d2,
                                         int64_t d3)
{
    epx_tensor t;
    int i;
    t.size = (uint32_t)sizeof(t);
    t.dtype = (int32_t)dtype;
    t.ndim = ndim;
    t.reserved = 0;
    t.data = data;
    t.shape[0] = d0;
    t.shape[1] = d1;
    t.shape[2] = d2;
    t.shape[3] = d3;
    for (i = 0; i < EPX_MAX_NDIM; i++)
        t.stride[i] = 0;
    return t;
}

EPX_API size_t epx_dtype_size(epx_dtype dtype); /* 0 for an unknown dtype */

/* ---- Bootstrap ----------------------------------------------------------------------------------------------- */

/*
 * How ranks find each other. With `allgather` set, EPX calls it, on the thread that creates the group or clears its
 * errors or masks (so it must stay usable as long as the group): every rank gives `bytes` bytes and receives nranks *
 * bytes in rank order; it returns 0, or anything else to fail. A NULL bootstrap reads the variables of the launcher:
 * torchrun, `epx run`, mpirun, srun, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set by hand.
 */
typedef int (*epx_allgather_fn)(void *context, const void *send, void *recv, size_t bytes);

typedef struct epx_bootstrap {
    uint32_t size;
    int32_t rank;
    int32_t nranks;
    uint32_t reserved;
    epx_allgather_fn allgather;
    void *context;
} epx_bootstrap;

#define EPX_BOOTSTRAP_INIT EPX_INITIAL_VALUE(epx_bootstrap)

/* What the launcher of this process says, without connecting to anybody; with none, one rank. A program that brings a
 * communicator of another library (nccl_ep.h, MPI) learns its place this way. */
typedef struct epx_world {
    uint32_t size;
    int32_t rank, nranks;
    int32_t local_rank, local_nranks; /* on this machine; -1 = not known */
    int32_t port;                     /* at `host`: where the ranks meet unless it is taken; 0 with one rank */
    char host[512];                   /* of rank 0, or several addresses separated by commas; "" with one rank */
    char launcher[32];                /* "torchrun", "Open MPI", ...; "" = none */
} epx_world;

#define EPX_WORLD_INIT EPX_INITIAL_VALUE(epx_world)
EPX_API epx_status epx_world_query(epx_world *world);

/* ---- Groups -------------------------------------------------------------------------------------------------- */

typedef struct epx_group epx_group;
typedef struct epx_handle epx_handle;
typedef struct epx_event epx_event;
typedef struct epx_graph epx_graph;
/* A stream of the group's device: NULL is the group's own default stream, and not the device's. A stream of the
 * caller's own lives until the group has been given an operation on another one, or has ended: the next operation, and
 * whatever waits for the group's work, asks for it. cudaStreamPerThread is that of the thread that calls. */
typedef void *epx_stream;

typedef enum epx_device { EPX_DEVICE_AUTO = 0, EPX_DEVICE_CPU = 1, EPX_DEVICE_CUDA = 2, EPX_DEVICE_HIP = 3 } epx_device;

/* Modes are bits: one group may serve both. */
typedef enum epx_mode { EPX_LOW_LATENCY = 1, EPX_HIGH_THROUGHPUT = 2 } epx_mode;

typedef int (*epx_device_alloc_fn)(void **ptr, size_t bytes, void *context);
typedef int (*epx_device_free_fn)(void *ptr, void *context);

typedef struct epx_group_config {
    uint32_t size;
    int32_t device;              /* epx_device; AUTO = EPX_DEVICE, or the CPU */
    int32_t device_index;        /* which GPU; ignored on the CPU */
    uint32_t modes;              /* epx_mode bits; 0 = both */
    int32_t num_experts;         /* E */
    int32_t max_tokens_per_rank; /* M: most tokens one rank dispatches in one call */
    int32_t max_hidden_bytes;    /* most bytes of one token row, scales not counted: H * sizeof(element), of the fp8
                                    row where dispatch casts to fp8; in 16s */
    int32_t max_topk;            /* most experts per token, 1..EPX_MAX_TOPK; 0 = 8 */
    int32_t max_recv_tokens;     /* high throughput: most rows one rank receives; 0 = the worst case of `layouts` */
    uint32_t layouts;            /* high throughput: EPX_LAYOUT_BIT()s whose worst case the buffers hold; 0 = FLAT */
    int32_t max_inflight;   /* low latency: staged operations in flight at a time; 0 = 2. A dispatch (combine) needs
                                    that the one max_inflight dispatches (combines) before it is not staged any more */
    int32_t num_agents;     /* agents (CPU threads, GPU warps) per operation; 0 = automatic, or EPX_NUM_AGENTS */
    int32_t ranks_per_node; /* 0 = EPX_RANKS_PER_NODE, or the ranks of each machine */
    int32_t enable_mask;    /* 1: ranks may be masked, and the others continue (needs TCP between all ranks) */
    int32_t timeout_ms;     /* deadline of every wait; 0 = EPX_TIMEOUT_MS, or 100000 */
    uint64_t alloc_bytes;   /* heap for epx_alloc; 0 = EPX_ALLOC_BYTES, or 4 GiB of untouched address space (CPU) */
    char net[16];           /* network between nodes; "" = automatic, or EPX_NET */
    /* Both or neither: device memory for what other ranks do not map, the tables of the group and of its handles.
     * 256-byte aligned; device_alloc returns 0, or the call fails. EPX writes it at once, on a stream of its own: no
     * queued work uses it, as cudaMalloc's; an allocator that reuses memory in the order of a stream waits first. */
    epx_device_alloc_fn device_alloc;
    epx_device_free_fn device_free;
    void *device_context;
    /* High throughput: most bytes of the slots through which rows between nodes pass, per rank; 0 =
     * EPX_HT_BUFFER_BYTES, or 400 MiB. Rows that do not fit wait for those before them; one row per slot is the least.
     * The buffer for tensors in ordinary memory is another: ht_node_bytes or max_recv_tokens bound it. */
    uint64_t ht_buffer_bytes;
    /* High throughput, max_recv_tokens = 0: most bytes of the buffers through which rows of tensors in ordinary memory
     * pass, per rank; 0 = EPX_HT_NODE_BYTES, or 512 MiB on one node and 450 MiB on several. More rows than fit pass in
     * turns. */
    uint64_t ht_node_bytes;
    /* 1: GPUs of several hosts whose NVLinks are one fabric, such as those of a rack, are one node: their heaps are
     * exported by fabric handles. Where the driver of any rank refuses these, hosts are nodes as usual, and rank 0 logs
     * why. 0 = EPX_FABRIC, or not. */
    int32_t use_fabric;
    int32_t reserved; /* 0 */
} epx_group_config;

/* Worst cases: FLAT has one row per (token, rank): R*M. EXPERT_MAJOR has one per entry of a token's top-k, also where
 * two name the same expert: R*M*max_topk, and 127 rows of padding per local expert. Zones of a larger expert_alignment
 * can need more: then max_recv_tokens says so. Only tensors in ordinary memory pass through these buffers. */
#define EPX_LAYOUT_BIT(layout) (1u << (layout))

#define EPX_GROUP_CONFIG_INIT EPX_INITIAL_VALUE(epx_group_config)

/* Collective. Ranks compare their configurations: a difference fails on all of them, and the message names rank and
 * field. */
EPX_API epx_status epx_group_create(epx_group **group, const epx_bootstrap *bootstrap, const epx_group_config *config);
/*
 * A process takes the place of a rank that has ended; it has the same configuration. Both modes, on one node and on
 * several; the group has enable_mask.
 *   epx_group_ticket  any rank, any time: text for the new process, which finds the group by it as long as one of the
 *                     ranks that were members then is there. It is a secret unless the job has one (docs/security.md).
 *   epx_group_join    the new process: waits, at most timeout_ms (0 = the group's timeout), until the members admit
 *                     it. They do so in their next collective epx_group_error_clear, epx_mask_clean or
 *                     epx_mask_clean_active; then all go on from there. Handles need an update.
 * EPX_ERR_MISMATCH: the members refuse it (another configuration or version, a place that was given to another process,
 * a machine that cannot map the memory of its node). EPX_ERR_PEER: no member is there. EPX_ERR_TIMEOUT: not admitted in
 * time; the message says why, as far as members have said it: the old process has to end first. None of this harms the
 * members. Ranks that were left out when another was replaced cannot come back; their places can be taken too.
 */
#define EPX_TICKET_BYTES 8192
EPX_API epx_status epx_group_ticket(epx_group *group, char *text, size_t bytes);
EPX_API epx_status epx_group_join(epx_group **group, const char *ticket, int rank, const epx_group_config *config,
                                  int timeout_ms);
/* Local: waits for the group's queued work, which deadlines bound, then frees everything, including handles, events
 * and streams. Ranks that are still at work do not miss this one; of a process that ends without this call they may
 * miss the last writes. EPX_ERR_TIMEOUT: the group is destroyed all the
 * same, but a thread has not returned from the network's library; memory that it may still use, including the heap,
 * stays allocated until the process ends. */
EPX_API epx_status epx_group_destroy(epx_group *group);
/*
 * Local: operations of both groups, and of those that one of them was ordered with before, run in the order of their
 * calls from now on, on whatever streams, as those of one group do. Operations that are queued already are not ordered.
 * Both are on the same device. EPX_ERR_USAGE: both were ordered with others before. Kernels wait for other ranks
 * while they occupy the GPU: where it has no room for those of two groups at the same time (ranks share it, or
 * num_agents is large), ranks whose streams begin them in different order would wait for each other until the deadline.
 * All ranks make the calls of these groups in the same order: groups of other ranks, which may wait for each other in
 * any order, are not ordered. On the CPU it has no effect: threads always find room. No other thread uses either group
 * meanwhile.
 */
EPX_API epx_status epx_group_order_with(epx_group *group, epx_group *other);

typedef struct epx_group_info {
    uint32_t size;
    int32_t rank, nranks;
    int32_t node, nnodes; /* this rank's node and how many there are */
    int32_t ranks_per_node;
    int32_t num_experts, local_experts;
    int32_t device;
    int32_t num_agents;
    int32_t timeout_ms;
    int32_t max_recv_tokens; /* the worst case if the configuration had 0 */
    char device_name[32];
    char net_name[16];
} epx_group_info;

#define EPX_GROUP_INFO_INIT EPX_INITIAL_VALUE(epx_group_info)
EPX_API epx_status epx_group_query(const epx_group *group, epx_group_info *info);
/* Another deadline for the waits of this group, as epx_group_config.timeout_ms: of operations that are queued from here
 * on, and of calls. Waits for those that are queued. Local; no other call of the group runs meanwhile. Groups of one
 * node: networks keep the deadline that they were opened with. */
EPX_API epx_status epx_group_set_timeout(epx_group *group, int timeout_ms);

/* Memory that a group with this configuration would use on each rank. Local, before any group exists. */
typedef struct epx_memory_info {
    uint32_t size;
    uint32_t reserved;
    uint64_t heap_bytes;        /* shared memory in all: the sum of the next four */
    uint64_t control_bytes;     /* signals and tables */
    uint64_t low_latency_bytes; /* slots, max_inflight times */
    uint64_t high_throughput_bytes;
    uint64_t alloc_bytes;      /* for epx_alloc */
    uint64_t ll_receive_bytes; /* worst-case bytes one low-latency dispatch plus one combine receive */
    uint64_t ht_receive_bytes; /* worst-case bytes one high-throughput dispatch receives */
} epx_memory_info;

#define EPX_MEMORY_INFO_INIT EPX_INITIAL_VALUE(epx_memory_info)
EPX_API epx_status epx_group_memory(const epx_group_config *config, int nranks, epx_memory_info *info);

/*
 * Memory that every rank of the node can reach: peers read and write tensors in it in place (zero-copy). 256-byte
 * aligned. Local calls. Free it after the operations that use it have completed.
 */
EPX_API epx_status epx_alloc(epx_group *group, size_t bytes, void **ptr);
EPX_API epx_status epx_free(epx_group *group, void *ptr);

/*
 * Registers ordinary memory: high-throughput combine then reads rows in [data, data + bytes) in place, without a copy
 * and without the limit of max_recv_tokens. On one node so does high-throughput dispatch, where a rank receives into
 * ordinary memory more rows than its buffer holds (ht_node_bytes): of tokens and scales. The whole allocation is
 * exported to the ranks of the node, which import it in their next call; until all of them have, rows are copied. Works
 * for GPU memory of cudaMalloc between processes (EPX_REGISTER). Such operations register their rows by themselves:
 * this call does it in advance. *in_place is 1 if a combine of [data, data + bytes) that is issued next copies nothing.
 * Local; does not wait. Registered memory is freed like any other, after the operations that use it have completed. If
 * one of them failed, free it after epx_group_error_clear only: a late rank may still read it.
 */
EPX_API epx_status epx_register(epx_group *group, const void *data, size_t bytes, epx_stream stream, int *in_place);

/* ---- Streams and events: as on a GPU, also on the CPU -------------------------------------------------------- */

/* A stream belongs to the group that created it: other groups refuse it. Events may be waited for across groups. */
EPX_API epx_status epx_stream_create(epx_group *group, epx_stream *stream);
EPX_API epx_status epx_stream_destroy(epx_group *group, epx_stream stream);
/* Waits until all queued work is done. Returns the group's asynchronous error, if there is one. EPX_ERR_USAGE: the
 * stream captures a graph, which a wait would end. */
EPX_API epx_status epx_stream_sync(epx_group *group, epx_stream stream);
/* EPX_OK when idle, EPX_ERR_NOT_READY when not. EPX_ERR_USAGE as in epx_stream_sync. */
EPX_API epx_status epx_stream_query(epx_group *group, epx_stream stream);
/* Runs fn(arg) in stream order on a thread of EPX: a CPU program queues its own work between operations this way. */
EPX_API epx_status epx_stream_call(epx_group *group, epx_stream stream, void (*fn)(void *arg), void *arg);
EPX_API epx_status epx_event_create(epx_group *group, epx_event **event);
EPX_API epx_status epx_event_destroy(epx_event *event);
EPX_API epx_status epx_event_record(epx_event *event, epx_stream stream);
/* An event that was never recorded counts as reached. EPX_ERR_USAGE: it was recorded on a stream that captures. */
EPX_API epx_status epx_event_sync(epx_event *event);
EPX_API epx_status epx_event_query(epx_event *event);
EPX_API epx_status epx_stream_wait_event(epx_group *group, epx_stream stream, epx_event *event);

/*
 * Graphs: what this thread queues on the stream between begin and end is recorded and does not run; each launch runs it
 * all, with the routing and the rows that are in memory then. Staged operations belong in one graph with their
 * epx_complete. A launch whose low-latency operations would wait for the slot of one that is staged outside of the
 * graph is refused (EPX_ERR_BUSY); launches by the vendor's calls reach their deadline there. epx_graph_end ends the
 * recording also when it fails. A graph belongs to its group; what it uses must live as long. Programs on a GPU may as
 * well capture streams of their own by the vendor's calls. Operations of a group that one capture takes from several
 * streams run one after the other, in the order of their calls.
 */
EPX_API epx_status epx_graph_begin(epx_group *group, epx_stream stream);
EPX_API epx_status epx_graph_end(epx_group *group, epx_stream stream, epx_graph **graph);
EPX_API epx_status epx_graph_launch(epx_graph *graph, epx_stream stream);
/* After its launches have completed. */
EPX_API epx_status epx_graph_destroy(epx_graph *graph);

/* ---- Handles: one routing each ------------------------------------------------------------------------------- */

/*
 * Layouts of what a rank receives.
 *  EXPERT_MAJOR  low latency:     tokens [L, R*M, H], the first expert_counts[l] rows of each expert, by (rank, token);
 *                                 entries of a token that name the same expert share a row, and each adds it in combine
 *                high throughput: tokens [N, H], a zone per local expert, each padded with zeros to expert_alignment
 *  RANK_MAJOR    low latency:     tokens [R, M, H], the first rank_counts[r] rows of each rank, in token order
 *  FLAT          high throughput: tokens [N, H], one row per (token, this rank), by (source rank, token)
 */
typedef enum epx_layout { EPX_EXPERT_MAJOR = 1, EPX_RANK_MAJOR = 2, EPX_FLAT = 3 } epx_layout;

/* FLAT and RANK_MAJOR: local expert ids come first, in ascending order, then -1; weights likewise. Without the flag
 * they are in the source's k-order, with -1 (weight 0) where an expert is not local. */
#define EPX_HANDLE_COMPACT_TOPK 1u
/* High throughput, EXPERT_MAJOR: dispatches may ask for a source map. Costs a third more bytes in the tables that an
 * update sends to other nodes. FLAT handles need no flag. */
#define EPX_HANDLE_SOURCE_MAP 2u
/* RANK_MAJOR without EPX_HANDLE_COMPACT_TOPK: all K weights of the source, also where topk_idx is -1. */
#define EPX_HANDLE_ALL_WEIGHTS 4u

/* With drop_rows, EXPERT_MAJOR: a token whose number among those that come here is drop_rows or more is dropped whole,
 * before rows are. */
#define EPX_HANDLE_DROP_TOKENS 8u

typedef struct epx_handle_config {
    uint32_t size;
    int32_t mode;             /* one epx_mode */
    int32_t layout;           /* epx_layout */
    int32_t topk;             /* K */
    int32_t expert_alignment; /* high throughput: zones are multiples of it, 1 to 2^20; 0 = 1. FLAT: expert_ends only */
    uint32_t flags;           /* EPX_HANDLE_* */
    /* NULL, or the caller's device memory for the tables: epx_handle_memory() bytes, 16-byte aligned. Low latency
     * writes it in epx_handle_create, as memory of device_alloc. */
    void *memory;
    uint64_t memory_bytes;
    int32_t drop_rows; /* high throughput: 0, or the most rows that this rank receives; what is beyond is dropped */
    uint32_t reserved;
} epx_handle_config;

/*
 * drop_rows: rows are given their places as if all were kept, and those from drop_rows on are left out. Dispatch and
 * combine go on without them: combine adds nothing for them. Either all ranks drop or none; each has its own number.
 *  FLAT          the first rows by (source rank, token) stay. total counts all rows, the other counts those that stay
 *  EXPERT_MAJOR  expert_counts, expert_offsets and the rows of epx_handle_recv_count are those of the zones' parts
 *                below drop_rows; total and the other counts are those of all rows. Rows in these parts that have lost
 *                their token are zero, as padding is; so are the tensors' rows behind them. Not with both
 *                EPX_HANDLE_SOURCE_MAP and EPX_HANDLE_DROP_TOKENS
 * A source map has a line for every token that EXPERT_MAJOR counts, also where its rows were dropped: max_recv_tokens,
 * where it is given, bounds the lines of maps in ordinary memory too.
 */

#define EPX_HANDLE_CONFIG_INIT EPX_INITIAL_VALUE(epx_handle_config)

/*
 * The routing of a high-throughput handle is whole in its memory. With `memory` given, a handle over memory that has a
 * routing, or over a copy of its bytes elsewhere, needs no update: same group, mode, layout, topk, alignment and flags.
 * The first dispatch or combine of such a handle waits for the group's queued work and for that of its stream, to look
 * at the memory. epx_handle_recv_count (expert_counts are not in the memory: expected NULL), recv_tokens, recv_fits and
 * recv_poll wait for the group's alone, until the handle has an update of its own. Memory that is the caller's stays
 * so, and must be there as long as the handle and its operations.
 */

/* Local. A handle with a staged operation is destroyed only after epx_complete (or with its group, or after a failure):
 * the other ranks wait for its receive half. */
EPX_API epx_status epx_handle_create(epx_handle **handle, epx_group *group, const epx_handle_config *config);
EPX_API epx_status epx_handle_destroy(epx_handle *handle);
/* Bytes of device memory that a handle with this configuration uses in addition to the group's heap. */
EPX_API epx_status epx_handle_memory(const epx_group *group, const epx_handle_config *config, size_t *bytes);

/*
 * Where EPX writes counts of what was received: tensors in device memory, all optional, complete when the operation is.
 * High throughput fills them in epx_handle_update, low latency in the receive half of dispatch. High throughput's
 * EXPERT_MAJOR has expert_counts and total in dispatch too: those of the routing, written once more.
 */
typedef struct epx_layout_info {
    uint32_t size;
    /*
     * High throughput, an input: rows that this rank has room for; 0 = it does not say. A dispatch with
     * config.if_expected may then be queued before the number of rows is known. If a rank of the group gets more rows
     * than it expected, that dispatch does nothing, on every rank alike (epx_handle_recv_fits); it is issued again with
     * enough room, without if_expected. In a group of several nodes it never fits: no rank knows all counts.
     */
    uint32_t expected_rows;
    epx_tensor *expert_counts;  /* int32 or int64 [L]: rows per expert (padded in HT EXPERT_MAJOR; not LL RANK_MAJOR) */
    epx_tensor *expert_offsets; /* int32 or int64 [L]: first row of each zone (HT EXPERT_MAJOR) */
    epx_tensor *rank_counts;    /* int32 or int64 [R]: rows (FLAT, RANK_MAJOR) or token-expert pairs from each rank */
    epx_tensor *total;          /* int32 or int64 [1]: rows received, padding included */
    epx_tensor *layout_range;   /* int64 [L,R]: LL EXPERT_MAJOR, first row << 32 | rows */
    epx_tensor *expert_stats;   /* int32 [L]: rows per expert, unpadded, are ADDED to it (not in LL RANK_MAJOR) */
    epx_tensor *wait_ns;        /* int64 [R]: time spent waiting for each rank is ADDED to it (low latency) */
    /* High throughput, int32 or int64: counts of all ranks */
    epx_tensor
        *rank_matrix; /* [R,R]: tokens that rank i sends to rank r; -1 where r is of another node than this one */
    epx_tensor *rank_tokens;  /* [R]: tokens that each rank has */
    epx_tensor *relay_counts; /* [R]: tokens of each rank of another node that reach this node through this rank */
    /* High throughput, int32 or int64: sizes of zones and of sources, as grouped matrix products want them */
    epx_tensor *expert_rows; /* [L]: rows per local expert, without padding */
    epx_tensor *expert_ends; /* [L]: EXPERT_MAJOR: past the last token of each zone. FLAT: inclusive sums of the counts,
                                each rounded up to expert_alignment */
    epx_tensor
        *source_ends; /* [n], n divides R: inclusive sums, by source rank modulo n, of tokens with experts here */
    /* High throughput, an input of epx_handle_update: the drop_rows of this routing, for a handle that was created with
     * drop_rows; 0 = those of the handle. */
    uint32_t drop_rows;
    uint32_t reserved;
} epx_layout_info;

#define EPX_LAYOUT_INFO_INIT EPX_INITIAL_VALUE(epx_layout_info)

/* Results of epx_dispatch_layout(): all optional. */
typedef struct epx_dispatch_layout_outputs {
    uint32_t size;
    uint32_t reserved;
    const epx_tensor *tokens_per_rank;   /* int32 [R] */
    const epx_tensor *tokens_per_node;   /* int32 [nodes] */
    const epx_tensor *tokens_per_expert; /* int32 [E] */
    const epx_tensor *token_in_rank;     /* uint8 [B, R]: 1 = the token goes there */
} epx_dispatch_layout_outputs;
#define EPX_DISPATCH_LAYOUT_OUTPUTS_INIT EPX_INITIAL_VALUE(epx_dispatch_layout_outputs)

/*
 * Where tokens would go: topk_idx int32 or int64 [B, K], -1 = dropped. Local and asynchronous: nothing is sent, and no
 * mask is looked at. An index out of range is reported by epx_group_error() and counts as dropped.
 */
EPX_API epx_status epx_dispatch_layout(epx_group *group, const epx_tensor *topk_idx,
                                       const epx_dispatch_layout_outputs *outputs, epx_stream stream);

/*
 * Sets the routing: topk_idx int32 or int64 [B, K], -1 = dropped.
 * High throughput: collective and asynchronous; ranks exchange counts; the handle keeps its own copy, so that any
 * number of dispatches and combines may follow. Low latency: local; the indices are read when each dispatch runs.
 * High throughput, a rank with more tokens than max_tokens_per_rank: all ranks get EPX_ERR_OVERFLOW from
 * epx_handle_recv_count, or from the dispatch, and the group can be used as before. A larger group takes the tokens.
 */
EPX_API epx_status epx_handle_update(epx_handle *handle, const epx_tensor *topk_idx, const epx_layout_info *info,
                                     epx_stream stream);

/* High throughput: waits until the update has exchanged counts, and returns the exact number of rows that this rank
 * will receive and, where expert_counts is not NULL, the (unpadded) rows of each local expert. The tensors of the
 * update's epx_layout_info are complete when the stream has run the update. */
EPX_API epx_status epx_handle_recv_count(epx_handle *handle, int64_t *rows, int64_t *expert_counts);

/* High throughput: the same wait; the number of tokens with experts here (in FLAT, of rows). */
EPX_API epx_status epx_handle_recv_tokens(epx_handle *handle, int64_t *tokens);

/* High throughput: waits for the update. *fits is 1 if no rank gets more rows than it expected: a dispatch with
 * config.if_expected is done, or will be. The same on all ranks. */
EPX_API epx_status epx_handle_recv_fits(epx_handle *handle, int *fits);

/* High throughput: waits for the update, but at most max_us microseconds: EPX_OK, EPX_ERR_NOT_READY, or the group's
 * error. For callers that have to look at something else now and then. */
EPX_API epx_status epx_handle_recv_poll(epx_handle *handle, uint64_t max_us);

/*
 * A tensor inside EPX's own receive buffer, for a high-throughput handle: dispatch into it moves each token once. Its
 * content is valid until the next high-throughput operation of the group that uses ordinary memory or this tensor.
 * `which`: EPX_RECV_*. rows: rows of the returned descriptor; EPX_ERR_OVERFLOW if the buffer holds fewer (with
 * max_recv_tokens given, it holds these). A row has at most max_hidden_bytes, of scales
 * 4 * ceil(max_hidden_bytes / 64).
 */
typedef enum epx_recv_part { EPX_RECV_TOKENS = 1, EPX_RECV_SCALES = 2 } epx_recv_part;
EPX_API epx_status epx_handle_recv_tensor(epx_handle *handle, epx_recv_part which, epx_dtype dtype, int64_t rows,
                                          int64_t columns, epx_tensor *tensor);

/* ---- Dispatch ------------------------------------------------------------------------------------------------ */

typedef enum epx_direction { EPX_FORWARD = 0, EPX_BACKWARD = 1 } epx_direction;

typedef struct epx_dispatch_inputs {
    uint32_t size;
    uint32_t reserved;
    const epx_tensor *tokens;       /* [B, H] bf16, fp16, fp32, or fp8 with scales; rows contiguous, a multiple of 16
                                       bytes */
    const epx_tensor *scales;       /* fp8 input: [B, S] fp32 or int32, any strides, forwarded as they are; a row has at
                                       most ceil(max_hidden_bytes / 128) scales, in high throughput
                                       ceil(max_hidden_bytes / 64), or fits in max_hidden_bytes with its token */
    const epx_tensor *topk_weights; /* [B, K] fp32, if outputs.topk_weights is set */
    const epx_tensor *topk_idx;     /* low latency, may be NULL: sets the routing first, as epx_handle_update does */
    const epx_tensor *global_scale; /* nvfp4: fp32 [1], what every row is multiplied with; NULL = 1 */
} epx_dispatch_inputs;

/*
 * NVFP4 (low latency, bf16 in, H in 64s, 2H <= max_hidden_bytes): outputs.tokens are uint8 with H/2 columns, two e2m1
 * codes a byte, the even element in the low half. outputs.scales are int32 with H/64 columns, each four e4m3 scales of
 * 16 elements. The cast is that of combine's nvfp4 with the sender's global_scale for every row: back, an element is
 * code * scale / global_scale.
 *  EPX_NVFP4_ROWS   scales have tokens' outer extents and any strides
 *  EPX_NVFP4_TILES  scales are contiguous, with tokens' rows rounded up to 128s, in the order that matrix kernels read:
 *                   [outer][rows / 128][H / 64][32][4], where row r of a tile is at [r % 32][r / 32]
 */
#define EPX_NVFP4_ROWS 1
#define EPX_NVFP4_TILES 2

/* Rows beyond those that were received are not written, except topk_idx (-1) in FLAT and RANK_MAJOR, and topk_weights
 * (0) in high throughput. */
typedef struct epx_dispatch_outputs {
    uint32_t size;
    uint32_t reserved;
    epx_tensor *tokens;       /* shaped by the layout. fp8 here and another dtype in inputs.tokens: EPX casts */
    epx_tensor *scales;       /* fp8: tokens' shape with ceil(H/128) fp32, or ceil(H/512) int32 (UE8M0), any strides;
                                 the same dtype on all ranks */
    epx_tensor *topk_weights; /* FLAT [N,K], RANK_MAJOR [R,M,K], HT EXPERT_MAJOR [N]; fp32 */
    epx_tensor *topk_idx;     /* FLAT [N,K], RANK_MAJOR [R,M,K]: local expert id or -1; int32 or int64 */
    epx_tensor *src_rank;     /* int32, tokens' shape without H: source rank of each row; -1 in padding of zones */
    epx_tensor *src_token;    /* int32, likewise: source token of each row */
    /* High throughput: int32 [T, 2 + K], a line per token with experts here, by (source rank, token): source rank *
     * source_stride + token, source rank; then in EXPERT_MAJOR (EPX_HANDLE_SOURCE_MAP) the row of each entry, or -1.
     * FLAT writes the first two columns. */
    epx_tensor *source_map;
} epx_dispatch_outputs;

typedef struct epx_dispatch_config {
    uint32_t size;
    int32_t send_only;   /* low latency: return after the send half; epx_complete runs the receive half */
    int32_t round_scale; /* fp8 cast: scales are powers of two (implied by int32 scales) */
    int32_t direction;   /* high throughput: EPX_BACKWARD dispatches gradients of a combine, without weights and idx */
    int32_t source_stride; /* of this rank's source_map; 0 = max_tokens_per_rank */
    int32_t global_ids;    /* outputs.topk_idx counts experts from 0, and not from this rank's first */
    int32_t max_sms;       /* high throughput on a GPU: at most so many multiprocessors; 0 = the group's number */
    int32_t if_expected;   /* high throughput: see epx_layout_info.expected_rows */
    int32_t nvfp4;         /* low latency: EPX_NVFP4_*; 0 = none */
    uint32_t reserved;
} epx_dispatch_config;

#define EPX_DISPATCH_INPUTS_INIT EPX_INITIAL_VALUE(epx_dispatch_inputs)
#define EPX_DISPATCH_OUTPUTS_INIT EPX_INITIAL_VALUE(epx_dispatch_outputs)
#define EPX_DISPATCH_CONFIG_INIT EPX_INITIAL_VALUE(epx_dispatch_config)

/* Collective. `info` is low latency's; high throughput has it in epx_handle_update, and here expert_counts and total of
 * EXPERT_MAJOR alone. config may be NULL. */
EPX_API epx_status epx_dispatch(epx_handle *handle, const epx_dispatch_inputs *inputs,
                                const epx_dispatch_outputs *outputs, const epx_layout_info *info,
                                const epx_dispatch_config *config, epx_stream stream);

/* ---- Combine ------------------------------------------------------------------------------------------------- */

/*
 *  LL EXPERT_MAJOR: out[b] = sum over k, in k-order, of topk_weights[b][k] * row of (b, k); -1 and masked ranks skipped
 *  LL RANK_MAJOR:   out[b] = sum over ranks, in the order of the first k that names each, of the row that it returned
 *                   (weight 1)
 *  HT FLAT:         the same over ranks, ascending; HT EXPERT_MAJOR: sum over k, in k-order, weight 1
 * A bias is added first. Sums are computed in fp32 and rounded once; across nodes, high throughput sums the rows of
 * another node there, and rounds that sum too. The routing is that of the handle's last dispatch, in high throughput
 * that of its last update.
 *
 * High throughput can add in another order: epx_combine_config.sum.
 *  EPX_SUM_TOPK_ORDER   a rank, and a node, has the place of its last entry in the token's top-k instead of its number,
 *                       in EXPERT_MAJOR also where that entry's row was dropped.
 *                       FLAT's topk_weights return from the rank of the entry's expert alone, and are not summed
 *  EPX_SUM_ROUND_RANKS  EXPERT_MAJOR: each rank's rows are summed and rounded first, in k-order. Without TOPK_ORDER the
 *                       ranks are then added as FLAT's rows are: ascending, other nodes' sums rounded
 *  EPX_SUM_ROUND_NODES  with TOPK_ORDER, several nodes: each node's sum is rounded, that of the own node too
 *  EPX_SUM_MXFP8        with ROUND_RANKS alone, EXPERT_MAJOR, one node, bf16, H in 32s: the sums of ranks are rounded
 *                       to MXFP8 (docs/formats.md) instead of bf16
 * TOPK_ORDER without ROUND_NODES adds all rows (or ranks' sums) in one order and rounds once; between nodes every row
 * then crosses by itself.
 */
#define EPX_SUM_TOPK_ORDER 1u
#define EPX_SUM_ROUND_RANKS 2u
#define EPX_SUM_ROUND_NODES 4u
#define EPX_SUM_MXFP8 8u

typedef struct epx_combine_inputs {
    uint32_t size;
    uint32_t reserved;
    /* Shaped as dispatch's output tokens: bf16, fp16 or fp32. High throughput: N is any number of rows that has all
     * that carry tokens; padding behind the last of these is not read. Too few are EPX_ERR_OVERFLOW: of this call where
     * the update has finished, else of the operation, on all ranks. Nothing is read behind the tensor. */
    const epx_tensor *tokens;
    const epx_tensor *topk_weights; /* LL EXPERT_MAJOR: fp32 [B,K]. HT: as dispatch's output weights, to be returned */
    const epx_tensor *bias[2];      /* [B, H], tokens' dtype */
    const epx_tensor *row_scales;   /* nvfp4: fp32, tokens' shape without H: 2688 / max|row|, 0 for a row of zeros */
    /* LL EXPERT_MAJOR, may be NULL: int32 [L, S], written while the operation runs. Row r of local expert l is read
     * and sent when signals[l][r / config.signal_rows] has reached config.signal_value. signal_rows = 0: all rows of l
     * wait for signals[l][0]; otherwise S is at least ceil(rows of an expert in tokens / signal_rows). Not with logfmt.
     * Rows are sent in the order of experts. */
    const epx_tensor *signals;
    /* LL EXPERT_MAJOR, may be NULL: int32 or int64 [B,K]. An entry that is negative here is skipped, as one that was -1
     * in the routing: its row is not read. The other values do not count. */
    const epx_tensor *topk_idx;
} epx_combine_inputs;

typedef struct epx_combine_outputs {
    uint32_t size;
    uint32_t reserved;
    epx_tensor *tokens;       /* [B, H] */
    epx_tensor *topk_weights; /* HT: fp32 [B, K], each weight back in its (token, k) place */
} epx_combine_outputs;

typedef struct epx_combine_config {
    uint32_t size;
    int32_t send_only;
    int32_t logfmt;      /* low latency, bf16: rows travel as LogFMT-10, or are rounded to its values when read */
    int32_t direction;   /* high throughput: EPX_BACKWARD combines gradients of a dispatch (needs weights in and out) */
    epx_tensor *wait_ns; /* as in epx_layout_info */
    uint32_t sum;        /* high throughput: EPX_SUM_*, the same on all ranks; 0 = as described above */
    int32_t max_sms;     /* as in epx_dispatch_config; low latency: of a combine with signals */
    int32_t nvfp4;       /* low latency, bf16, H in 16s: rows travel as NVFP4, with inputs.row_scales */
    int32_t signal_rows; /* with inputs.signals */
    uint32_t signal_value;
    uint32_t reserved;
} epx_combine_config;

#define EPX_COMBINE_INPUTS_INIT EPX_INITIAL_VALUE(epx_combine_inputs)
#define EPX_COMBINE_OUTPUTS_INIT EPX_INITIAL_VALUE(epx_combine_outputs)
#define EPX_COMBINE_CONFIG_INIT EPX_INITIAL_VALUE(epx_combine_config)

EPX_API epx_status epx_combine(epx_handle *handle, const epx_combine_inputs *inputs, const epx_combine_outputs *outputs,
                               const epx_combine_config *config, epx_stream stream);

/* Runs the receive half of the handle's staged (send_only) operation; does nothing if there is none. Ranks may
 * complete in different orders, except combines whose tokens the ranks of the node read where they are: in epx_alloc
 * memory, and on a GPU in any memory (EPX_REGISTER). Such a combine waits until its rows have been read, and the caller
 * leaves them as they are until it has completed. */
EPX_API epx_status epx_complete(epx_handle *handle, epx_stream stream);

/* ---- Masks, errors, statistics ------------------------------------------------------------------------------- */

/*
 * Masks: 1 = active, 0 = masked: no rank sends to it or waits for it. They need enable_mask. `mask` of query is
 * device int32 [R]. epx_mask_update stores the array, in stream order: a rank that it masked becomes active again by
 * 1, with a wait for the stream, if the caller has begun no operation since. Otherwise that rank has missed operations:
 * only epx_mask_clean makes it active again (epx_mask_update returns EPX_ERR_USAGE). Low latency uses each rank's own
 * mask. High throughput needs a mask that all ranks agree on: after a rank was masked, its operations fail until
 * epx_group_error_clear. A rank that epx_mask_update masks must be dead or idle until epx_group_error_clear: if it
 * still runs, it may write into memory of its node. One that was masked by a deadline writes nothing any more. The
 * low-latency dispatch whose deadline has masked a rank of the node may count rows of it that it has not written: their
 * content, src_rank and src_token are what was there before. What comes from other ranks is complete.
 */
EPX_API epx_status epx_mask_query(epx_group *group, int32_t *mask, epx_stream stream);
EPX_API epx_status epx_mask_update(epx_group *group, const int32_t *host_mask, epx_stream stream);
/* Collective over all ranks whose processes exist: all of them become active again. The others stay masked. After a
 * failure all call it again: a rank that came too late for it has no error of its own, and epx_group_error_clear would
 * be local there. */
EPX_API epx_status epx_mask_clean(epx_group *group, epx_stream stream);
/* The same without the ranks that are masked, which need not call: collective over the ranks that no rank has masked.
 * epx_mask_query shows all of them as active from then on; in truth the masked ones stay so until all ranks
 * call epx_mask_clean. Handles need an update. EPX_ERR_PEER: this rank is one of the masked. */
EPX_API epx_status epx_mask_clean_active(epx_group *group, epx_stream stream);
/* *left_out: 1 = other ranks go on without this one, as far as it has been told. Local. */
EPX_API epx_status epx_mask_left_out(epx_group *group, int *left_out);

typedef struct epx_error_info {
    uint32_t size;
    int32_t status; /* epx_status, EPX_OK = none */
    int32_t rank;   /* that found the error */
    int32_t peer;   /* that is gone, stuck or has failed, the same on all ranks; never this rank; -1 = none known */
    int64_t expected, seen;
    char phase[32]; /* for example "ll dispatch: wait for data" */
    char message[256];
} epx_error_info;

#define EPX_ERROR_INFO_INIT EPX_INITIAL_VALUE(epx_error_info)
/* The first error since the last clear: its status; info may be NULL. Does not wait for operations. Between nodes, the
 * first call after a failure waits until the network reads no memory of this rank any more: microseconds, or at most
 * half the timeout where the network's library does not return. */
EPX_API epx_status epx_group_error(epx_group *group, epx_error_info *info);
/*
 * Clears the error. After an error that ended an operation (timeout, peer, mismatch), and after epx_mask_update, it
 * is collective: ranks call it when their streams are idle, and the group can be used again; handles need an update.
 * After a low-latency operation that has masked a late peer (enable_mask) and gone on without it, it is local: a
 * program that starts over there calls epx_group_abort first, so that the others do too.
 * Without enable_mask all ranks take part, through the bootstrap. With it, ranks take part whose processes exist and
 * that no other rank has masked; the group continues without the rest, in both modes. A rank that neither calls nor
 * has ended is named after twice the timeout, and can be masked then. Across nodes, a rank without an error of its
 * own waits up to a second for the report of one that has. A rank whose own proxy is blocked in the network's library
 * cannot recover: EPX_ERR_TIMEOUT, and the message says what the proxy is doing. A rank that was told that others
 * continue without it (EPX_ERR_PEER) becomes a member again only by epx_mask_clean on all ranks. So does one whose
 * operation ended because others had waited for it too long, if it is not among more ranks than are missing: those may
 * have continued without it, and ended.
 */
EPX_API epx_status epx_group_error_clear(epx_group *group);
/*
 * This rank cannot take part in what the others wait for: ends the group's operations on all ranks, at once. They get
 * EPX_ERR_PEER, which names this rank and `why`, an error; this rank's next call gets it too. Local.
 * epx_group_error_clear recovers the group.
 */
EPX_API epx_status epx_group_abort(epx_group *group, epx_status why);

typedef struct epx_stats {
    uint32_t size;
    uint32_t reserved;
    uint64_t ll_dispatches, ll_combines, ht_updates, ht_dispatches, ht_combines;
    /* rows_sent: dispatch, one per (token, rank), in high throughput's EXPERT_MAJOR per (token, expert).
     * rows_received: rows of receive tensors, without padding. rows_returned: rows that combine summed; another
     * node's sum counts as one in high throughput. */
    uint64_t rows_sent, rows_received, rows_returned;
    uint64_t bytes_peer;     /* payload of rows of other ranks of the node: dispatched, forwarded, read for sums */
    uint64_t bytes_local;    /* payload copied a second time inside this rank */
    uint64_t waits, wait_ns; /* waits that were not satisfied at once, and their time */
    uint64_t timeouts;
    /* Between nodes; a recovery keeps them */
    uint64_t rows_remote;             /* rows sent through proxies: per destination rank (LL) or node (HT) */
    uint64_t net_commands, net_puts;  /* commands taken from the rings; writes posted after merging */
    uint64_t net_signals;             /* of net_puts: those without bytes */
    uint64_t net_bytes, net_arrivals; /* posted; counted */
    uint64_t net_window_waits, net_sleeps, net_refused; /* refused: invalid or from strangers, connections too */
    uint64_t net_stuck; /* proxy threads that were blocked in the network's library at the last check */
} epx_stats;

#define EPX_STATS_INIT EPX_INITIAL_VALUE(epx_stats)
EPX_API epx_status epx_group_stats(epx_group *group, epx_stats *stats);
EPX_API epx_status epx_group_stats_reset(epx_group *group);

#ifdef __cplusplus
}
#endif
#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What EPX asks of a device (CPU, CUDA, HIP): memory, a heap that other processes of the node can map, streams, events,
 * and launching one of EPX's kernels with a number of agents. One table per device; every slot is filled.
 */
#ifndef EPX_DEVICE_DEVICE_H
#define EPX_DEVICE_DEVICE_H

#include "epx/epx.h"
#include "kernel/params.h"

struct device;        /* one opened device; starts with `const struct device_ops *ops` */
struct device_stream; /* the device's own stream object; what the caller sees as epx_stream */
struct device_event;
struct device_timers;
struct device_graph;

/* Everything a peer needs to map memory of this rank: its heap, or a region that it exports. Goes through the bootstrap
 * as it is. */
struct heap_export {
    uint64_t bytes;
    uint64_t address; /* in the exporting process */
    int64_t pid;
    int64_t token;      /* CPU: file descriptor in the exporting process */
    uint8_t opaque[96]; /* CUDA: IPC handle; CPU: device and inode of the memory file */
};

struct heap {
    void *base;
    uint64_t bytes;
    struct heap_export export;
};

enum {
    DEVICE_HOST_ACCESS = 1,     /* the host can read and write device memory directly */
    DEVICE_SPARSE_HEAP = 2,     /* untouched heap pages cost nothing */
    DEVICE_HOST_HEAP = 4,       /* the host can read and write heaps directly */
    DEVICE_EXPORTS_REGIONS = 8, /* callers' own memory is exported to the ranks of the node unless EPX_REGISTER=0 */
    DEVICE_GRAPHS = 16,         /* graph_begin to graph_destroy work */
    DEVICE_MARKS = 32,          /* launches keep marks in struct device.marks; else agents add to the trace at once */
    DEVICE_MAPPED_HEAPS = 64,   /* a heap must not be freed while a peer has it mapped (group/giveback.h) */
    DEVICE_OWN_LINKS = 128      /* rows go to ranks of the node beside those that a network carries */
};

enum { DEVICE_PCI = 32 };

enum heap_place {
    HEAP_DEVICE, /* in the device's own memory */
    HEAP_HOST,   /* in host memory that kernels reach */
    HEAP_FABRIC  /* in the device's own memory, for devices of other hosts too */
};

struct device_ops {
    const char *name;
    int kind; /* epx_device */
    unsigned caps;
    int agents_per_sm; /* of a launch, where a caller may say how many multiprocessors it takes; 0 = it may not */

    /* From here on functions alone, all of them there. */
    epx_status (*open)(int index, struct device **device);
    void (*close)(struct device *device);
    /* The calling thread will hand memory of this device to a library that asks for the thread's current one. */
    epx_status (*use)(struct device *device);
    /* 64 bytes that two ranks share exactly when they can map each other's heaps. */
    epx_status (*identity)(struct device *device, uint8_t id[64]);
    /* The same for heaps at HEAP_FABRIC, which ranks of several hosts may be able to map. A failure says why there are
     * none here. */
    epx_status (*fabric)(struct device *device, uint8_t id[64]);
    /* Its PCI address, as "0000:1b:00.0", for the choice of a card near it; "" = none, or not known. */
    void (*pci)(struct device *device, char text[DEVICE_PCI]);
    /* How many agents an operation should use when `local_ranks` ranks share this device. */
    int (*default_agents)(struct device *device, int local_ranks);

    epx_status (*mem_alloc)(struct device *device, size_t bytes, void **ptr); /* zeroed, 256-byte aligned */
    void (*mem_free)(struct device *device, void *ptr);
    /* Memory that both host and kernels reach (pinned and mapped on a GPU), zeroed. */
    epx_status (*host_alloc)(struct device *device, size_t bytes, void **ptr);
    void (*host_free)(struct device *device, void *ptr);
    /* Memory for one row of so many bytes per agent of a launch, before any kernel runs: a kernel of this rank may
     * later have to start while those of others wait for it, and memory may not be had then. */
    epx_status (*rows_reserve)(struct device *device, size_t row_bytes, int agents);
    /* How far the clock of kernels (ag_now) is ahead of CLOCK_MONOTONIC, give or take *error_ns. Takes a moment. */
    epx_status (*clock)(struct device *device, int64_t *ahead_ns, uint64_t *error_ns);
    /* Synchronous copy between host and device memory, for set-up only. */
    epx_status (*copy)(struct device *device, void *to, const void *from, size_t bytes);

    /* Where heaps lie from now on; a device whose memory is the host's ignores the first two. May change `ops`. While
     * there are no heaps. */
    epx_status (*heap_place)(struct device *device, enum heap_place place);
    epx_status (*heap_create)(struct device *device, uint64_t bytes, struct heap *heap);
    void (*heap_destroy)(struct device *device, struct heap *heap);
    /* Maps a peer's heap; a peer in the same process (same pid) is used at its own address. */
    epx_status (*heap_open)(struct device *device, const struct heap_export *peer, void **base);
    void (*heap_close)(struct device *device, const struct heap_export *peer, void *base);
    /* Frees and unmaps what mem_free() to heap_close() have kept because that waits for queued work. 0: not now. */
    int (*release)(void);
    /* For cards: a dma-buf of a heap in the device's memory (the caller closes it); what must be done before kernels
     * are told of what a card wrote there (enum arrival_rule, device/arrivals.h); and that, if it is a flush. */
    epx_status (*heap_dmabuf)(struct device *device, const struct heap *heap, int *fd);
    int (*arrivals)(struct device *device);
    epx_status (*flush_arrivals)(struct device *device);

    /* The caller's own memory, shared with other ranks (group/region.h). A region is a whole allocation. Its id is
     * never used again in this process, also after the memory is freed; 0 = no region that can be exported holds
     * `data`. Quick, and allowed while a graph is captured. */
    uint64_t (*region_id)(struct device *device, const void *data);
    /* How peers map the region that holds `data`; address and bytes are those of the region. */
    epx_status (*region_export)(struct device *device, const void *data, struct heap_export *region);
    epx_status (*region_open)(struct device *device, const struct heap_export *region, void **base);
    /* now = 1: may wait for the device's queued work; 0: stays mapped until no wait is needed. */
    void (*region_close)(struct device *device, const struct heap_export *region, void *base, int now);

    epx_status (*stream_create)(struct device *device, struct device_stream **stream);
    epx_status (*stream_destroy)(struct device *device, struct device_stream *stream); /* after its work is done */
    epx_status (*stream_sync)(struct device *device, struct device_stream *stream);
    epx_status (*stream_query)(struct device *device, struct device_stream *stream); /* EPX_OK or EPX_ERR_NOT_READY */
    /* Not 0 = what it is given is recorded into a graph, to run later: the number of that capture, never used again. */
    uint64_t (*stream_captures)(struct device *device, struct device_stream *stream);
    epx_status (*stream_call)(struct device *device, struct device_stream *stream, void (*fn)(void *), void *arg);
    epx_status (*stream_wait)(struct device *device, struct device_stream *stream, struct device_event *event);
    /* Copies in stream order. */
    epx_status (*stream_copy)(struct device *device, struct device_stream *stream, void *to, const void *from,
                              size_t bytes);
    /* Runs kernel `id` with `agents` agents; `params` (bytes <= KERNEL_PARAMS_MAX) is copied. */
    epx_status (*launch)(struct device *device, struct device_stream *stream, enum kernel_id id, const void *params,
                         size_t bytes, int agents);

    epx_status (*event_create)(struct device *device, struct device_event **event);
    void (*event_destroy)(struct device *device, struct device_event *event);
    epx_status (*event_record)(struct device *device, struct device_event *event, struct device_stream *stream);
    epx_status (*event_sync)(struct device *device, struct device_event *event);
    epx_status (*event_query)(struct device *device, struct device_event *event);

    /* Time stamps in stream order, for benchmarks. A stamp that is recorded while the stream captures belongs to the
     * graph: every launch of the graph takes it anew. */
    epx_status (*timers_create)(struct device *device, int count, struct device_timers **timers);
    void (*timers_destroy)(struct device *device, struct device_timers *timers);
    epx_status (*timers_record)(struct device *device, struct device_timers *timers, int i,
                                struct device_stream *stream);
    /* Microseconds between two stamps of streams that have been synchronised. */
    epx_status (*timers_elapsed)(struct device *device, struct device_timers *timers, int from, int to, double *us);

    /* Graphs, for benchmarks and tests: what this thread queues on the stream between begin and end is captured and
     * does not run. graph_end ends the capture also when it fails. EPX_ERR_UNSUPPORTED without DEVICE_GRAPHS. */
    epx_status (*graph_begin)(struct device *device, struct device_stream *stream);
    epx_status (*graph_end)(struct device *device, struct device_stream *stream, struct device_graph **graph);
    epx_status (*graph_launch)(struct device *device, struct device_graph *graph, struct device_stream *stream);
    void (*graph_destroy)(struct device *device, struct device_graph *graph);
};

struct device {
    const struct device_ops *ops;
    struct kernel_marks *marks; /* of the next launch: where it keeps its marks, or NULL (kernel/marks.h) */
    /* What is freed is kept until no device is open: another rank of the group is a thread of this process, so that
     * nobody waits for all that the device runs, or peers do not tell when they have unmapped it. */
    int keeps;
};

/* The status of a device that could not be opened; where this machine has no GPU, that is the reason given, and not the
 * module or the runtime that miss it too. */
epx_status device_explain(const char *name, epx_status status);
/* Finds and opens: AUTO follows EPX_DEVICE, else the CPU. */
epx_status device_open(epx_device kind, int index, struct device **device);

extern const struct device_ops cpu_device_ops;

#endif

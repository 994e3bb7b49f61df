/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host part of a GPU module: what its files share. Written in the names of CUDA's runtime, of which nothing newer
 * than 12.4 is called; device/gpu/hip/runtime.h maps them to HIP's.
 */
#ifndef EPX_DEVICE_GPU_GPU_H
#define EPX_DEVICE_GPU_GPU_H

#ifdef EPX_HIP
#include "device/gpu/hip/runtime.h"
#else
#include "device/gpu/runtime.h"
#endif

#include "device/module.h"

struct gpu_device {
    struct device base;
    int index;
    int sms;
    int overlaps_launches;      /* programmatic dependent launches work */
    int resident[KERNEL_COUNT]; /* most blocks of each kernel that run at a time */
    cudaStream_t side;          /* copies of set-up, beside the caller's streams */
    struct gpu_device *next;    /* of those that are open */
    char *scratch;
    size_t scratch_bytes; /* in all */
};

/* What the library gave this module. */
extern const struct device_host *gpu_host;
#define fail gpu_host->fail

/* EPX_OK, or the failure of `what` with the runtime's own words. */
epx_status gpu_check(cudaError_t error, const char *what);
epx_status gpu_use(struct device *device);

/*
 * Freeing memory waits for everything that the process has queued on the device. So what is freed is kept, and released
 * when a device is closed, or when memory runs short. What is queued then waits only for peers whose calls follow from
 * what this rank has already called, and not for longer than its deadline. Where ranks are threads of one process, the
 * queue also has kernels that wait for this very thread to go on: there it is released when no device is open.
 */
void gpu_later(void (*release)(void *ptr, void *context), void *ptr, void *context);
void gpu_opened(struct gpu_device *gpu);
void gpu_closed(struct gpu_device *gpu);
/* Releases what is kept now. 0: ranks are threads of this process. */
int gpu_release(void);

/* memory.c */
epx_status gpu_mem_alloc(struct device *device, size_t bytes, void **ptr);
/* shared: for other GPUs and processes too, while kernels run. */
epx_status gpu_mem_alloc_for(struct device *device, size_t bytes, int shared, void **ptr);
void gpu_mem_free(struct device *device, void *ptr);
epx_status gpu_host_alloc(struct device *device, size_t bytes, void **ptr);
void gpu_host_free(struct device *device, void *ptr);
/* What a capture forbids is allowed to this thread until gpu_capture_restore() gets the result. */
int gpu_capture_relax(void);
void gpu_capture_restore(int mode);
epx_status gpu_copy(struct device *device, void *to, const void *from, size_t bytes);

/* heap.c */
epx_status gpu_heap_create(struct device *device, uint64_t bytes, struct heap *heap);
void gpu_heap_destroy(struct device *device, struct heap *heap);
epx_status gpu_heap_open(struct device *device, const struct heap_export *peer, void **base);
void gpu_heap_close(struct device *device, const struct heap_export *peer, void *base);
epx_status gpu_host_heap_create(struct device *device, uint64_t bytes, struct heap *heap);
void gpu_host_heap_destroy(struct device *device, struct heap *heap);
epx_status gpu_host_heap_open(struct device *device, const struct heap_export *peer, void **base);
void gpu_host_heap_close(struct device *device, const struct heap_export *peer, void *base);

/* heap_fabric.c */
epx_status gpu_fabric(struct device *device, uint8_t id[64]);
epx_status gpu_fabric_heap_create(struct device *device, uint64_t bytes, struct heap *heap);
void gpu_fabric_heap_destroy(struct device *device, struct heap *heap);
epx_status gpu_fabric_heap_open(struct device *device, const struct heap_export *peer, void **base);
void gpu_fabric_heap_close(struct device *device, const struct heap_export *peer, void *base);

/* direct.c */
epx_status gpu_heap_dmabuf(struct device *device, const struct heap *heap, int *fd);
int gpu_arrivals(struct device *device);
epx_status gpu_flush_arrivals(struct device *device);

/* region.c */
uint64_t gpu_region_id(struct device *device, const void *data);
epx_status gpu_region_export(struct device *device, const void *data, struct heap_export *region);
epx_status gpu_region_open(struct device *device, const struct heap_export *region, void **base);
void gpu_region_close(struct device *device, const struct heap_export *region, void *base, int now);

/* stream.c */
epx_status gpu_stream_create(struct device *device, struct device_stream **stream);
epx_status gpu_stream_destroy(struct device *device, struct device_stream *stream);
epx_status gpu_stream_sync(struct device *device, struct device_stream *stream);
epx_status gpu_stream_query(struct device *device, struct device_stream *stream);
uint64_t gpu_stream_captures(struct device *device, struct device_stream *stream);
epx_status gpu_stream_call(struct device *device, struct device_stream *stream, void (*fn)(void *), void *arg);
epx_status gpu_stream_wait(struct device *device, struct device_stream *stream, struct device_event *event);
epx_status gpu_stream_copy(struct device *device, struct device_stream *stream, void *to, const void *from,
                           size_t bytes);
epx_status gpu_event_create(struct device *device, struct device_event **event);
void gpu_event_destroy(struct device *device, struct device_event *event);
epx_status gpu_event_record(struct device *device, struct device_event *event, struct device_stream *stream);
epx_status gpu_event_sync(struct device *device, struct device_event *event);
epx_status gpu_event_query(struct device *device, struct device_event *event);

/* timer.c */
epx_status gpu_timers_create(struct device *device, int count, struct device_timers **timers);
void gpu_timers_destroy(struct device *device, struct device_timers *timers);
epx_status gpu_timers_record(struct device *device, struct device_timers *timers, int i, struct device_stream *stream);
epx_status gpu_timers_elapsed(struct device *device, struct device_timers *timers, int from, int to, double *us);
epx_status gpu_graph_begin(struct device *device, struct device_stream *stream);
epx_status gpu_graph_end(struct device *device, struct device_stream *stream, struct device_graph **graph);
epx_status gpu_graph_launch(struct device *device, struct device_graph *graph, struct device_stream *stream);
void gpu_graph_destroy(struct device *device, struct device_graph *graph);

/* launch.c */
epx_status gpu_kernels_load(struct gpu_device *gpu);
/* A kernel that does nothing. */
epx_status gpu_first_launch(cudaStream_t stream);
epx_status gpu_clock(struct device *device, int64_t *ahead_ns, uint64_t *error_ns); /* clock.c */
epx_status gpu_rows_reserve(struct device *device, size_t row_bytes, int agents);
epx_status gpu_launch(struct device *device, struct device_stream *stream, enum kernel_id id, const void *params,
                      size_t bytes, int agents);

#endif

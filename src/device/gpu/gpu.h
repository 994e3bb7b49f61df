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

struct cuda_device {
    struct device base;
    int index;
    int sms;
    int overlaps_launches;      /* programmatic dependent launches work */
    int resident[KERNEL_COUNT]; /* most blocks of each kernel that run at a time */
    cudaStream_t side;          /* copies of set-up, beside the caller's streams */
    struct cuda_device *next;   /* of those that are open */
    char *scratch;
    size_t scratch_bytes; /* in all */
};

/* What the library gave this module. */
extern const struct device_host *cuda_host;
#define fail cuda_host->fail

/* EPX_OK, or the failure of `what` with the runtime's own words. */
epx_status cuda_check(cudaError_t error, const char *what);
epx_status cuda_use(struct device *device);

/*
 * Freeing memory waits for everything that the process has queued on the device. So what is freed is kept, and released
 * when a device is closed, or when memory runs short. What is queued then waits only for peers whose calls follow from
 * what this rank has already called, and not for longer than its deadline. Where ranks are threads of one process, the
 * queue also has kernels that wait for this very thread to go on: there it is released when no device is open.
 */
void cuda_later(void (*release)(void *ptr, void *context), void *ptr, void *context);
void cuda_opened(struct cuda_device *cuda);
void cuda_closed(struct cuda_device *cuda);
/* Releases what is kept now. 0: ranks are threads of this process. */
int cuda_release(void);

/* memory.c */
epx_status cuda_mem_alloc(struct device *device, size_t bytes, void **ptr);
/* shared: for other GPUs and processes too, while kernels run. */
epx_status cuda_mem_alloc_for(struct device *device, size_t bytes, int shared, void **ptr);
void cuda_mem_free(struct device *device, void *ptr);
epx_status cuda_host_alloc(struct device *device, size_t bytes, void **ptr);
void cuda_host_free(struct device *device, void *ptr);
/* What a capture forbids is allowed to this thread until cuda_capture_restore() gets the result. */
int cuda_capture_relax(void);
void cuda_capture_restore(int mode);
epx_status cuda_copy(struct device *device, void *to, const void *from, size_t bytes);

/* heap.c */
epx_status cuda_heap_create(struct device *device, uint64_t bytes, struct heap *heap);
void cuda_heap_destroy(struct device *device, struct heap *heap);
epx_status cuda_heap_open(struct device *device, const struct heap_export *peer, void **base);
void cuda_heap_close(struct device *device, const struct heap_export *peer, void *base);
epx_status cuda_host_heap_create(struct device *device, uint64_t bytes, struct heap *heap);
void cuda_host_heap_destroy(struct device *device, struct heap *heap);
epx_status cuda_host_heap_open(struct device *device, const struct heap_export *peer, void **base);
void cuda_host_heap_close(struct device *device, const struct heap_export *peer, void *base);

/* heap_fabric.c */
epx_status cuda_fabric(struct device *device, uint8_t id[64]);
epx_status cuda_fabric_heap_create(struct device *device, uint64_t bytes, struct heap *heap);
void cuda_fabric_heap_destroy(struct device *device, struct heap *heap);
epx_status cuda_fabric_heap_open(struct device *device, const struct heap_export *peer, void **base);
void cuda_fabric_heap_close(struct device *device, const struct heap_export *peer, void *base);

/* direct.c */
epx_status cuda_heap_dmabuf(struct device *device, const struct heap *heap, int *fd);
int cuda_arrivals(struct device *device);
epx_status cuda_flush_arrivals(struct device *device);

/* region.c */
uint64_t cuda_region_id(struct device *device, const void *data);
epx_status cuda_region_export(struct device *device, const void *data, struct heap_export *region);
epx_status cuda_region_open(struct device *device, const struct heap_export *region, void **base);
void cuda_region_close(struct device *device, const struct heap_export *region, void *base, int now);

/* stream.c */
epx_status cuda_stream_create(struct device *device, struct device_stream **stream);
epx_status cuda_stream_destroy(struct device *device, struct device_stream *stream);
epx_status cuda_stream_sync(struct device *device, struct device_stream *stream);
epx_status cuda_stream_query(struct device *device, struct device_stream *stream);
int cuda_stream_captures(struct device *device, struct device_stream *stream);
epx_status cuda_stream_call(struct device *device, struct device_stream *stream, void (*fn)(void *), void *arg);
epx_status cuda_stream_wait(struct device *device, struct device_stream *stream, struct device_event *event);
epx_status cuda_stream_copy(struct device *device, struct device_stream *stream, void *to, const void *from,
                            size_t bytes);
epx_status cuda_event_create(struct device *device, struct device_event **event);
void cuda_event_destroy(struct device *device, struct device_event *event);
epx_status cuda_event_record(struct device *device, struct device_event *event, struct device_stream *stream);
epx_status cuda_event_sync(struct device *device, struct device_event *event);
epx_status cuda_event_query(struct device *device, struct device_event *event);

/* timer.c */
epx_status cuda_timers_create(struct device *device, int count, struct device_timers **timers);
void cuda_timers_destroy(struct device *device, struct device_timers *timers);
epx_status cuda_timers_record(struct device *device, struct device_timers *timers, int i, struct device_stream *stream);
epx_status cuda_timers_elapsed(struct device *device, struct device_timers *timers, int from, int to, double *us);
epx_status cuda_graph_begin(struct device *device, struct device_stream *stream);
epx_status cuda_graph_end(struct device *device, struct device_stream *stream, struct device_graph **graph);
epx_status cuda_graph_launch(struct device *device, struct device_graph *graph, struct device_stream *stream);
void cuda_graph_destroy(struct device *device, struct device_graph *graph);

/* launch.c */
epx_status cuda_kernels_load(struct cuda_device *cuda);
/* A kernel that does nothing. */
epx_status cuda_first_launch(cudaStream_t stream);
epx_status cuda_clock(struct device *device, int64_t *ahead_ns, uint64_t *error_ns); /* clock.c */
epx_status cuda_rows_reserve(struct device *device, size_t row_bytes, int agents);
epx_status cuda_launch(struct device *device, struct device_stream *stream, enum kernel_id id, const void *params,
                       size_t bytes, int agents);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The parts of libepx_cudart.so.
 *
 *      cudaMemcpyAsync(S) ...  -->  work_submit -->  S captures: into its graph
 *                                               -->  EPX has work in flight on S: behind that (epxCudartHooks.call)
 *                                               -->  else: done at once, by the caller
 *      ncclEpDispatch(S) ...   -->  S captures: EPX records too, and gives that as one node (epxCudartHooks.take)
 */
#ifndef EPX_STANDIN_CUDART_H
#define EPX_STANDIN_CUDART_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "nccl_ep/capture.h"

/* Keeps an error for cudaGetLastError and returns it. */
cudaError_t keep_error(cudaError_t error);

/* Stores a result that may not be NULL. */
cudaError_t give(int *out, int value);

/* So many that a rank may take its own number. */
enum { DEVICES = 1024 };

enum work_kind { WORK_COPY, WORK_FILL, WORK_RECORD, WORK_WAIT, WORK_CALL, WORK_EPX };

/* One thing that a stream does. */
struct work {
    enum work_kind kind;
    union {
        struct {
            void *to;
            const void *from;
            size_t bytes;
        } copy;
        struct {
            void *ptr;
            int value;
            size_t bytes;
        } fill;
        struct {
            struct CUevent_st *event;
            uint64_t ticket;
        } event;
        struct {
            cudaHostFn_t fn;
            void *arg;
        } call;
        struct capture_node epx; /* in graphs only */
    };
};

/* Does it in order of the stream, or records it. */
cudaError_t work_submit(cudaStream_t stream, const struct work *work);

/* Waits for what libnccl_ep.so has on the stream. */
cudaError_t stream_drain(cudaStream_t stream);

/* ---- Handles that exist (cudart_known.c) ------------------------------------------------------------------------- */

enum known_kind { KNOWN_EVENT, KNOWN_GRAPH, KNOWN_EXEC, KNOWN_MEMORY };

int known_add(enum known_kind kind, const void *handle); /* -1: no memory */
int known_has(enum known_kind kind, const void *handle);
int known_remove(enum known_kind kind, const void *handle); /* was it there? */

/* ---- Events (cudart_event.c): a record has a ticket, which the stream reaches ------------------------------------ */

void event_hold(struct CUevent_st *event);
void event_release(struct CUevent_st *event);
/* The ticket of a new record, or of the latest. */
uint64_t event_issue(struct CUevent_st *event);
uint64_t event_latest(struct CUevent_st *event);
void event_reach(struct CUevent_st *event, uint64_t ticket);
void event_await(struct CUevent_st *event, uint64_t ticket);

/* ---- Graphs (cudart_graph.c) ------------------------------------------------------------------------------------- */

struct CUgraph_st *graph_new(void);
void graph_release(struct CUgraph_st *graph);
cudaError_t graph_add(struct CUgraph_st *graph, const struct work *work);

#endif

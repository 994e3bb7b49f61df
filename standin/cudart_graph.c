/* SPDX-License-Identifier: Apache-2.0 */
/* Graphs: lists of work. An executable graph shares the list of the graph that it was made of. */
#include "standin/cudart.h"

#include <pthread.h>
#include <stdlib.h>

struct node {
    struct work work;
    struct node *next;
};

struct CUgraph_st {
    pthread_mutex_t lock; /* of holders */
    int holders;
    struct node *first, **last;
};

struct CUgraphExec_st {
    struct CUgraph_st *graph;
};

struct CUgraph_st *graph_new(void)
{
    struct CUgraph_st *graph = calloc(1, sizeof(*graph));

    if (graph && known_add(KNOWN_GRAPH, graph)) {
        free(graph);
        return NULL;
    }
    if (graph) {
        pthread_mutex_init(&graph->lock, NULL);
        graph->holders = 1;
        graph->last = &graph->first;
    }
    return graph;
}

static void work_release(const struct work *work)
{
    if (work->kind == WORK_RECORD)
        event_release(work->event.event);
    else if (work->kind == WORK_EPX)
        work->epx.destroy(work->epx.context);
}

void graph_release(struct CUgraph_st *graph)
{
    int left;

    pthread_mutex_lock(&graph->lock);
    left = --graph->holders;
    pthread_mutex_unlock(&graph->lock);
    if (left)
        return;
    known_remove(KNOWN_GRAPH, graph); /* a capture that was given up: nobody has destroyed it */
    while (graph->first) {
        struct node *node = graph->first;

        graph->first = node->next;
        work_release(&node->work);
        free(node);
    }
    pthread_mutex_destroy(&graph->lock);
    free(graph);
}

cudaError_t graph_add(struct CUgraph_st *graph, const struct work *work)
{
    struct node *node = calloc(1, sizeof(*node));

    if (!node) {
        if (work->kind == WORK_EPX)
            work->epx.destroy(work->epx.context);
        return cudaErrorMemoryAllocation;
    }
    node->work = *work;
    if (work->kind == WORK_RECORD)
        event_hold(work->event.event);
    *graph->last = node;
    graph->last = &node->next;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    (void)flags;
    if (!exec || !known_has(KNOWN_GRAPH, graph))
        return keep_error(cudaErrorInvalidValue);
    *exec = calloc(1, sizeof(**exec));
    if (!*exec || known_add(KNOWN_EXEC, *exec)) {
        free(*exec);
        *exec = NULL;
        return keep_error(cudaErrorMemoryAllocation);
    }
    pthread_mutex_lock(&graph->lock);
    graph->holders++;
    pthread_mutex_unlock(&graph->lock);
    (*exec)->graph = graph;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaStreamIsCapturing(stream, &status);

    if (!known_has(KNOWN_EXEC, exec))
        return keep_error(cudaErrorInvalidResourceHandle);
    if (status != cudaStreamCaptureStatusNone)
        return keep_error(cudaErrorStreamCaptureUnsupported);
    for (const struct node *node = exec->graph->first; node && error == cudaSuccess; node = node->next) {
        if (node->work.kind != WORK_EPX)
            error = work_submit(stream, &node->work);
        else if (node->work.epx.launch(node->work.epx.context, stream))
            error = cudaErrorUnknown;
    }
    return keep_error(error);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    if (!known_remove(KNOWN_EXEC, exec))
        return keep_error(cudaErrorInvalidResourceHandle);
    graph_release(exec->graph);
    free(exec);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    if (!known_remove(KNOWN_GRAPH, graph))
        return keep_error(cudaErrorInvalidResourceHandle);
    graph_release(graph);
    return cudaSuccess;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The objects behind the public API: groups, handles, events. */
#ifndef EPX_GROUP_OBJECTS_H
#define EPX_GROUP_OBJECTS_H

#include <pthread.h>

#include "group/heap_layout.h"
#include "boot/boot.h"
#include "boot/membership.h"
#include "device/device.h"
#include "proxy/proxy.h"

struct heap_block;   /* alloc.c */
struct regions;      /* region.c */
struct ledger;       /* giveback.c */
struct owned_stream; /* streams.c */

enum stuck_state { STUCK_UNKNOWN, STUCK_ASKING, STUCK_NO, STUCK_YES };

/* ENDING: nothing is outstanding, and errors of the network are ignored from now on. MEMORY: that of the group goes. */
enum closing { CLOSING_NOT, CLOSING_ENDING, CLOSING_MEMORY };

enum staged_kind { STAGED_NONE, STAGED_DISPATCH, STAGED_COMBINE, STAGED_KINDS };

/* Marks of kernels, for a trace (group/marks.c). */
struct group_marks {
    struct kernel_marks *device; /* NULL: none */
    struct kernel_marks *copy;
    struct trace_buffer *track, *waits;
    uint64_t taken, lost; /* marks that are in the trace; those that never will be */
    uint64_t signals_ns;  /* when the last signal was that is in the trace */
    uint32_t signals;     /* that are kept */
    int operation;        /* enum kernel_id of the one whose last launch has not come, since operation_ns; or -1 */
    uint64_t operation_ns;
};

/* High throughput: memory for the rows that rounds of a combine keep (modes/high_throughput.c). */
struct kept_rows {
    struct kept_rows *next;
    void *memory;
    uint64_t bytes;
    int recorded; /* a graph may use it as long as the group lives */
};

/* Captures that go on at the same time: the stream of the last operation in each. The last few that began are kept. */
enum { CAPTURES = 8 };
struct captured {
    uint64_t in[CAPTURES]; /* device_ops.stream_captures; 0: none */
    struct device_stream *last[CAPTURES];
    int next;
};

struct epx_group {
    struct device *device;
    struct boot *boot;
    uint8_t key[32];               /* that only the ranks of this group know */
    int has_key;                   /* 0: EPX_SECRET=none, one rank, or a simulation */
    uint8_t seed[32];              /* the key is made of it and the secret of the job */
    int own_secret;                /* that secret may be in this user's file */
    struct membership *membership; /* NULL without enable_mask */
    int use_membership;            /* collective steps go through it during recovery */
    int masks_hidden;              /* queries show masked ranks as active: epx_mask_clean_active */
    int mask_updated;              /* epx_mask_update has masked ranks since the ranks last agreed */
    uint8_t *masked_by_update;     /* [R]: which, but for those that a deadline has masked */
    uint64_t *mask_epochs;         /* device: group_state.epoch, and the mask, when the first of them was masked */
    int mask_epochs_known;         /* 0: nothing is there, for a graph masks ranks */
    void *room;                    /* what a collective step receives: handshake_begin() */
    int32_t *recovery_mask;        /* [R]: for group_recover(), which has no other memory before the ranks meet */
    uint8_t *recovery_out;         /* [R]: the same */
    int rank, nranks, node, nnodes;
    struct settings set;
    int64_t fields[20];           /* what ranks compared when the group was created: settings_pack() */
    uint8_t (*identities)[64];    /* [R]: equal where ranks can map each other's memory */
    uint8_t (*hosts)[64];         /* [R]: equal where ranks are on one host: the same, unless `fabric` */
    int fabric;                   /* nodes have ranks of several hosts (fabric.h) */
    uint64_t *mapped;             /* [R]: which process's memory is known; membership_incarnation() */
    uint8_t *stale;               /* [R]: left out when another rank was replaced: only a replacement takes its place */
    uint64_t restarted[OP_COUNT]; /* the epochs that all began with after the last recovery */
    int joining;                  /* not a member yet: group_join() */
    const char *call;             /* the collective call that messages of its steps name */
    struct heap stand_in;         /* for ranks of the node that were gone when this one joined */
    int users;                    /* calls that are inside; the registry's lock protects it */
    pthread_mutex_t calls;        /* held by a call that issues something; recursive, for calls that use others */
    int ending; /* epx_group_destroy waits for streams: nothing is issued meanwhile; `calls` protects it */
    struct heap_plan plan;
    struct node_map map;

    struct heap heap;
    struct ledger *ledger;         /* who has mapped it; NULL: it may be freed at any time */
    void *net_memory;              /* plan.net_bytes bytes of host memory, or NULL */
    struct heap_export *exports;   /* [R] */
    void **bases;                  /* [R]: mapped heaps, own included; NULL = not mapped */
    struct regions *regions;       /* NULL: regions are not shared */
    void *device_memory;           /* one block: group_dev, state, mask, heap table, route tables */
    struct group_dev *dev;         /* device memory */
    struct group_dev shadow;       /* the host's copy */
    void *host_memory;             /* one block: error record, count of windows, by_deadline, the proxies' counters */
    uint64_t windows_hinted;       /* what *group_dev.windows was last */
    uint64_t windows_others;       /* operations with windows because of other ranks, likewise */
    int windows_quiet;             /* calls since these were fewer */
    uint64_t windows_with_rows;    /* dispatches with rows in windows, likewise */
    int windows_wide;              /* changes since these were fewer */
    struct error_record *error;    /* the kernels' */
    struct error_record net_error; /* the proxies' */
    char net_text[224];            /* of net_error: for what has no message of its own */
    struct proxy_group *proxies;   /* NULL on one node */
    struct proxy_stats net_base;   /* when statistics were last reset */
    const char *net_name;
    uint8_t *remote;           /* [R] */
    int closing;               /* enum closing */
    int kept;                  /* a thread is blocked in a library: memory that it may use is never freed */
    int gave_up;               /* since the last failure: the node is told and the network has stopped (abort.c) */
    pthread_mutex_t giving_up; /* held by who gives up, or asks the proxies why */
    int recovering;            /* a call of `recoverer` closes and opens the network; `giving_up` protects both */
    pthread_t recoverer;
    int stuck_state; /* enum stuck_state: were own proxies found blocked after the last failure? */
    char stuck_text[128];

    struct heap_block *blocks; /* epx_alloc */
    struct device_stream *default_stream;
    struct device_stream
        *last_stream; /* of the last operation; operations of a group run in the order of their calls */
    struct device_event *order_event;
    struct launch_turns *turns; /* groups whose operations run in one order with those of this one; NULL: none */
    struct captured captured;
    struct kept_rows *kept_rows; /* the largest first */
    int all_trace;               /* EPX_TRACE is set on all ranks */
    struct group_marks marks;
    uint64_t number;     /* of the group, for epx top: the same on all ranks, also on those that have joined */
    struct watch *watch; /* for epx top (watch.c); NULL: none */
    char watch_path[64];
    int watch_fd;
    pthread_t sampler; /* of watch_sample.c */
    int sampler_state;
    uint64_t issued[STAGED_KINDS];   /* low-latency operations so far, those of launched graphs included */
    uint64_t recorded[STAGED_KINDS]; /* ... and those that graphs were given */
    struct recording *recordings;    /* between epx_graph_begin and epx_graph_end */
    struct epx_handle *handles;
    struct epx_event *events;
    struct epx_graph *graphs;
    struct owned_stream *streams; /* of epx_stream_create */
    epx_stats stats;
};

struct epx_handle {
    struct epx_group *group;
    struct epx_handle *next;
    epx_handle_config config;
    void *tables; /* one block of device memory, the group's or the caller's: struct handle_state first */
    struct handle_dev *dev;
    struct recv_info *info; /* host-visible */
    uint32_t expected_rows; /* of the last update */
    size_t info_bytes;
    uint64_t updates;    /* high throughput: how many were queued or recorded */
    uint64_t attempts;   /* the same, with those whose launch failed */
    int recorded;        /* some of these belong to graphs */
    uint64_t wait_since; /* when the host began to wait for the last one; 0 = not yet */
    int adopted;         /* high throughput, never updated: there is a routing in the caller's memory */
    int64_t ntokens;     /* B of the last update; -1 = none yet */
    epx_tensor topk;     /* low latency: what the next dispatch reads */
    int dispatched;      /* a combine has a dispatch to follow */
    enum staged_kind staged;
    int staged_recorded;    /* it belongs to a graph, as its completion does: it holds no slot between launches */
    uint64_t staged_number; /* group->issued when it was staged, or group->recorded */
    union {
        struct ll_dispatch_params dispatch;
        struct ll_combine_params combine;
    } pending; /* the receive half */
};

struct epx_event {
    struct epx_group *group;
    struct device_event *event;
    int captured;           /* recorded in a capture: it is no point of a stream's work */
    struct epx_event *next; /* of the group */
};

/* What a stream records. */
struct recording {
    struct device_stream *stream;
    uint64_t operations[STAGED_KINDS]; /* of low latency */
    struct recording *next;            /* of the group */
};

struct epx_graph {
    struct epx_group *group;
    struct device_graph *graph;
    uint64_t operations[STAGED_KINDS]; /* of low latency, in each launch */
    struct epx_graph *next;            /* of the group */
};

/* NULL is the group's default stream. */
static inline struct device_stream *group_stream(const struct epx_group *group, epx_stream stream)
{
    return stream ? (struct device_stream *)stream : group->default_stream;
}

/* Does the stream record a graph? */
static inline int group_captures(const struct epx_group *group, epx_stream stream)
{
    return group->device->ops->stream_captures(group->device, group_stream(group, stream)) != 0;
}

#endif

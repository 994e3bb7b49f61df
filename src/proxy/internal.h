/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of this folder share.
 *
 *   proxy.c    open, connect, close; statistics; quiet
 *   at_exit.c  the end of the process
 *   request.c  the thread, and the calls that a caller waits for with a deadline
 *   thread.c   the loop around proxy_progress: spin, sleep, wake, pin
 *   loop.c     proxy_progress, one iteration: take commands, check, merge, post, handle network events
 *   window.c   how much may be in flight to a peer
 *   count.c    arrivals
 *   alarm.c    aborts and questions, which do not pass through the ring
 *   goodbye.c  a rank that ends its group in order says so
 *   stop.c     after this rank has failed: until the network no longer reads its memory
 *   ring.c     memory of the command rings; ring.h has the consumer's side
 *
 * A peer belongs to one thread of each rank, or the rounds of high throughput are divided among threads.
 * Everything here belongs to one thread, but for the words marked "shared".
 */
#ifndef EPX_PROXY_INTERNAL_H
#define EPX_PROXY_INTERNAL_H

#include <pthread.h>

#include "device/cpu/agent.h"
#include "proxy/proxy.h"
#include "proxy/ring.h"
#include "util/trace.h"
#include "util/watch.h"

/* A put that is not posted yet: commands are merged into it. */
struct pending {
    uint64_t source, end; /* bytes [source, end) of the own heap; 0 and 0 without bytes */
    uint64_t target;
    uint16_t counter;
    uint8_t count;  /* commands in it, 1 to IMMEDIATE_MAX_COUNT */
    uint8_t flow;   /* enum proxy_flow */
    uint32_t alarm; /* or ALARM_NONE: it has a counter */
};

/* A put that was posted, by sequence number % depth. */
struct posted {
    uint64_t at_ns;
    uint32_t bytes;
    uint32_t ahead_kib; /* bytes in flight to this peer when it was posted, itself included */
    uint8_t count;      /* commands in it */
    uint8_t open;       /* not completed yet */
    uint8_t flow;
    uint8_t kind; /* of its counter */
};

struct window {
    uint64_t bytes; /* in flight */
    uint32_t messages;
    uint32_t by_flow[PROXY_FLOWS];
    uint64_t bytes_limit; /* what adapts */
    uint32_t messages_limit;
    uint32_t messages_max; /* what it may grow to */
    uint64_t round_end;    /* the limits change when the put with this number completes */
    uint64_t round_ns, round_bytes;
    uint64_t best_ns;   /* shortest time to a completion seen lately */
    uint64_t best_rate; /* highest, bytes per microsecond, likewise */
    uint32_t late, timely;
    uint8_t limited; /* something waited for the window in this round */
    uint8_t refused; /* the network had no room in this round */
};

enum { MERGE_DEPTH = 8 }; /* so many pending puts are tried; a power of two */

struct peer {
    int rank;
    uint8_t dead;
    uint8_t listed;     /* in the thread's `busy` */
    uint8_t stalled;    /* its first pending put waits */
    uint8_t unreported; /* dead, but on_error waits for the grace period */
    uint8_t told_left;  /* that this rank goes on without it */
    uint8_t told_bye;   /* that this rank ends its group, or goes on without it */
    uint8_t heard;      /* something has come from it */
    uint8_t needed;     /* a command for it has come */
    uint8_t asked;      /* a question was sent to it */
    uint8_t missed;     /* it is dead, and a put was given up that cannot be missed (options.missable) */
    uint8_t left;       /* it has said goodbye: nothing is sent to it, and its loss is none */
    int error;          /* errno of its loss */
    uint64_t lost_ns;
    uint32_t head, tail; /* of queue: pending[head .. tail) */
    /* First and last unit, lower 32 bits, of the pending put with number i % MERGE_DEPTH, or of one that has left: they
     * tell at once that a put touches none of the last MERGE_DEPTH. */
    uint32_t first_unit[MERGE_DEPTH], end_unit[MERGE_DEPTH];
    struct pending *queue;
    struct posted *posted;
    uint64_t next, oldest; /* numbers of the next put and of the oldest one in flight */
    uint64_t region_bytes;
    struct window window;
};

enum { POLL_MAX = 64, TAKE_MAX = 256, POST_MAX = 256 };

/* What a caller asks of the thread that owns the endpoint. */
enum request { REQUEST_NONE, REQUEST_OPEN, REQUEST_REGISTER, REQUEST_CONNECT, REQUEST_CLOSE };

/* Where a thread is. Messages about a blocked thread name it. */
enum proxy_state {
    STATE_BETWEEN_CALLS,
    STATE_OPEN,
    STATE_REGISTER,
    STATE_CONNECT,
    STATE_POLL,
    STATE_PUT,
    STATE_FLUSH,
    STATE_ARRIVALS,
    STATE_ARM,
    STATE_SLEEP,
    STATE_CLOSE
};

/* Whoever may be in a network's library when the process ends. */
struct caller {
    /* Once at_exit_began(): tells the thread to leave the network. 1: it is not there, and does not go there again.
     * Waits for nothing. */
    int (*stays_away)(void *of);
    void *of;
    struct caller *next;
};

struct proxy_thread {
    struct proxy_group *group;
    int index;
    struct net *net;
    const struct net_ops *ops;
    struct ring ring;
    struct peer *peers;
    int npeers;
    int members;       /* peers that were there when it was opened: who advances the aggregates */
    uint32_t *reached; /* [kinds][slots]: of these, those whose counter is above the aggregate */
    uint32_t depth;    /* of a peer's queue and of its posted puts; a power of two */
    int32_t *by_rank;  /* [nranks]: index in peers, -1 = none of this thread's */
    int *busy;         /* peers with pending puts */
    int nbusy, first_busy;
    uint64_t bytes_in_flight, messages_in_flight;             /* to all its peers */
    uint64_t still_read;                                      /* bytes of puts to lost peers: window_keep() */
    uint64_t bytes_max;                                       /* the user's limits, or the largest number */
    uint32_t by_flow[PROXY_FLOWS], messages_max[PROXY_FLOWS]; /* messages, likewise */
    uint32_t merge_bytes;
    uint64_t now_ns;     /* read at most once per iteration */
    int broken;          /* the endpoint failed, or is closed */
    int stopping;        /* 1: only aborts are posted; 2: the network no longer reads anything either (stop.c) */
    uint64_t stop_by_ns; /* then the endpoint is closed */
    int unflushed;       /* the doorbell is still to be rung */
    int blocked;         /* the ring's next command waits for room in its peer's queue */
    int ring_bell;       /* in this iteration: agents may wait for what it did */
    int unreported;      /* peers whose loss is still to be reported */
    int alarm_next;      /* peers that have the ring's alarm in their queues, or need not */
    uint64_t asked_word; /* the last question taken from the ring's word */
    int told;            /* shared: after a stop, 1 = the alarm has left, and nothing is pending or in flight */
    int blocked_by;      /* while `blocked`: which peer; and since when, or since it was last reported */
    uint64_t blocked_ns;
    struct proxy_stats stats; /* shared: relaxed stores here, relaxed loads in proxy_stats_read */
    struct pending *pendings; /* memory of all peers */
    struct posted *posteds;

    int state, state_peer; /* shared: enum proxy_state, and the peer where there is one */
    uint64_t iterations;   /* shared: begun so far */
    int wake_fd;
    uint64_t sleep_ns;
    int events;                   /* reported by the network in the last iteration */
    int net_woke, spurious_wakes; /* the network's descriptor ended a sleep; so many times for nothing */
    int connect_wakes;            /* wakes while the network connects */
    uint64_t asked;               /* shared: proxy_quiet counts up */
    uint64_t quiet;               /* shared: the last `asked` for which nothing was left */
    int waiting_for;              /* shared: a peer with puts in flight, or -1 */

    /* Of request.c. The caller's, but for what `lock` protects. */
    pthread_t pthread;
    int tid; /* shared: the kernel's id of the thread, once it runs */
    int begun, started;
    pthread_mutex_t lock;   /* protects what follows; never held during a call of the network */
    pthread_cond_t changed; /* request, abandoned */
    int request;            /* enum request */
    int called;             /* for a request, or as the process ends; also read without the lock, by the loop */
    int abandoned;          /* the caller no longer waits for this thread; written once, by the caller */
    int connected;          /* the loop runs between requests */
    int inside;             /* the thread may be in the network's library */
    int ended;              /* it calls nothing any more */
    epx_status outcome;     /* of the last request, and its message */
    char text[256];
    struct proxy_address own_address;     /* filled by REQUEST_REGISTER */
    struct proxy_address *peer_addresses; /* [npeers], for REQUEST_CONNECT */
    struct caller caller;                 /* in the list of at_exit.c */
};

/* How long a caller waits for threads in all, and how much of that is left. */
struct budget {
    int ms;
    uint64_t left_ns, last_ns;
};

struct proxy_group {
    struct proxy_options options;
    const struct cpu_env *env;
    uint8_t *remote;  /* [2][nranks]: options.remote, and options.relays */
    uint32_t *routes; /* [nranks]: options.routes */
    char provider[64];
    struct proxy_thread *threads;
    struct proxy_limits limits; /* options' or the environment's */
    uint32_t merge_bytes;       /* largest put made of several commands */
    uint64_t spin_ns;           /* idle time after which a thread sleeps */
    uint32_t reported;          /* shared: bit per enum fault that was reported */
    struct budget opening;      /* for opening and registering together */
    int manual;                 /* no threads: the caller runs proxy_step() */
    int in_place;               /* no threads, manual or in a simulation: the caller runs the requests itself */
    int connected;
    int leaving; /* shared: this rank ends its group (proxy_leave) */
    int leaked;  /* on purpose: an abandoned thread may still use it */
};

/* Whose thread counts arrivals from `rank` for this counter, and posts puts with it. */
static inline int proxy_ring_of(const struct proxy_group *g, int rank, uint32_t counter)
{
    return ROUTE_RING(g->routes[rank], counter, g->options.threads);
}

enum fault {
    FAULT_COMMAND,    /* version or operation */
    FAULT_RANK,       /* of a command */
    FAULT_RANGE,      /* of a command: outside a heap */
    FAULT_COUNTER,    /* of a command */
    FAULT_ARRIVAL,    /* an immediate */
    FAULT_COMPLETION, /* the network completes what was not posted */
    FAULT_ENDPOINT,   /* the network as a whole */
    FAULT_FLUSH,      /* the device cannot make visible what arrived */
};

/* ---- proxy.c */
void proxy_fault(struct proxy_thread *t, enum fault fault, int status, int peer, int64_t expected, int64_t seen,
                 const char *text);

/* ---- request.c */
/* Starts the thread; nothing is open yet. */
epx_status request_start(struct proxy_thread *t);
struct budget budget_of(int ms);
/* Takes the time since the last call from the budget, but no more than one check may take: where this thread did not
 * run, because the process was stopped or other threads had its core, the awaited thread did not run either. 0: nothing
 * is left. */
int budget_spend(struct budget *budget);
/* A request is first submitted to all threads; then the caller waits for each, with one budget for all.
 * EPX_ERR_TIMEOUT: the budget is spent, and the thread is abandoned. */
void request_submit(struct proxy_thread *t, enum request request);
epx_status request_wait(struct proxy_thread *t, struct budget *budget);
/* After REQUEST_CLOSE: waits also until the thread has ended. */
epx_status request_join(struct proxy_thread *t, struct budget *budget);
void request_free(struct proxy_thread *t);

static inline void set_state(struct proxy_thread *t, enum proxy_state state)
{
    __atomic_store_n(&t->state, (int)state, __ATOMIC_RELAXED);
}

/* ---- at_exit.c */
/* Non-zero: libraries are being ended, and no call of the network may begin. To be asked with the lock held under which
 * a caller's stays_away() then finds that the thread is inside; or behind at_exit_add(). */
int at_exit_began(void);
void at_exit_add(struct caller *caller);
void at_exit_remove(const struct caller *caller);

/* ---- thread.c */
epx_status thread_open(struct proxy_thread *t);
/* Runs until the thread is called. */
void thread_loop(struct proxy_thread *t);
void thread_pin(const struct proxy_thread *t);
void thread_wake(struct proxy_thread *t);
void thread_close(struct proxy_thread *t);

/* ---- loop.c */
/* One bounded iteration; non-zero if there was something to do. */
int proxy_progress(struct proxy_thread *t);
/* `reads`: the network may still read the memory of posted puts, which do not count as sent until the endpoint is
 * closed. */
void peer_lost(struct proxy_thread *t, struct peer *peer, int error, int reads);
uint64_t loop_now(struct proxy_thread *t);
/* Adds a put to the queue of its peer. 0: the queue is full. */
int put_enqueue(struct proxy_thread *t, struct peer *peer, const struct pending *put);
/* So many commands to the peer are counted as read, though nothing is sent. */
void commands_drop(struct proxy_thread *t, const struct peer *peer, uint64_t commands);

/* ---- alarm.c */
/* Steps of proxy_progress(): the words beside the ring, if alarm_waits(); a question of a peer; whatever a peer sends
 * without which this rank goes on; a ring that is blocked. The first returns how much there was to do. */
int alarm_progress(struct proxy_thread *t);
void alarm_reply(struct proxy_thread *t, int rank);
void alarm_left_out(struct proxy_thread *t, int rank);
void report_blocked(struct proxy_thread *t);
/* At the end of an iteration after a stop: have all aborts left? */
void alarm_report(struct proxy_thread *t);
/* Waits for that, but not for long: a peer that is stuck takes none. Before endpoints are closed. */
void alarm_wait(struct proxy_group *g);
/* Of a peer that is lost: at once, or when the grace period is over. */
void report_loss(struct proxy_thread *t, const struct peer *peer);
void report_losses(struct proxy_thread *t);

/* An alarm to one peer, or a question if it is ALARM_NONE. 0: there is no room for it now. */
int send_alarm(struct proxy_thread *t, struct peer *peer, uint32_t alarm);

/* ---- goodbye.c */
/* Step of proxy_progress(), while this rank leaves: how many peers were told. */
int goodbye_progress(struct proxy_thread *t);
/* `rank` has said goodbye. */
void goodbye_take(struct proxy_thread *t, int rank);

static inline int is_leaving(const struct proxy_thread *t)
{
    return __atomic_load_n(&t->group->leaving, __ATOMIC_ACQUIRE); /* pairs with the release in proxy_leave() */
}

/* ---- stop.c */
/* Steps of proxy_progress(), once a stop was asked for: before new commands are taken, and after all was posted. */
void stop_begin(struct proxy_thread *t);
void stop_progress(struct proxy_thread *t);

static inline int stop_asked(const struct proxy_thread *t)
{
    /* Acquire: pairs with the release of network_stop() in kernel/begin_end.h, or of proxy_stop(). */
    return __atomic_load_n(t->ring.dev.stop, __ATOMIC_ACQUIRE) != 0;
}

/* ---- window.c */
void window_init(struct window *w, uint32_t depth);
/* The network had no room for a put. */
void window_refused(struct window *w);
/* Puts number - count + 1 .. number have completed. Negative: they were not in flight. */
int window_completed(struct proxy_thread *t, struct peer *peer, uint64_t number, uint32_t count);
void window_forget(struct proxy_thread *t, struct peer *peer);
/* The network may still read what is in flight to this lost peer. It does not count as sent, but others need not wait
 * for room that it takes. */
void window_keep(struct proxy_thread *t, struct peer *peer);

/* ---- count.c */
/* Before arrivals: aggregates of the counters as they are. */
epx_status count_begin(struct proxy_thread *t);
void count_arrival(struct proxy_thread *t, const struct net_event *event);
/* The source bytes of so many commands to the peer may be reused. */
void count_sent(struct proxy_thread *t, const struct peer *peer, uint64_t commands);

/* The adaptive window. One put is always allowed, however large. */
static inline int window_open(const struct window *w, uint64_t bytes)
{
    return w->messages == 0 || (w->bytes + bytes <= w->bytes_limit && w->messages < w->messages_limit);
}

/* A posted put is recorded. */
static inline int posted_has_room(const struct proxy_thread *t, const struct peer *peer)
{
    return peer->next - peer->oldest < t->depth;
}

/* The user's limits, which do not adapt. */
static inline int limits_allow(const struct proxy_thread *t, uint64_t bytes, int flow)
{
    if (t->bytes_in_flight + bytes > t->bytes_max && t->bytes_in_flight)
        return 0;
    return t->by_flow[flow] < t->messages_max[flow];
}

static inline void window_posted(struct proxy_thread *t, struct peer *peer, const struct pending *p)
{
    const uint32_t bytes = (uint32_t)(p->end - p->source);
    struct window *w = &peer->window;
    struct posted *posted = &peer->posted[peer->next & (t->depth - 1)];

    w->bytes += bytes;
    w->messages++;
    w->by_flow[p->flow]++;
    t->by_flow[p->flow]++;
    t->bytes_in_flight += bytes;
    t->messages_in_flight++;
    posted->at_ns = t->now_ns;
    posted->bytes = bytes;
    posted->ahead_kib = (uint32_t)(w->bytes >> 10);
    posted->count = p->count;
    posted->open = 1;
    posted->flow = p->flow;
    posted->kind = (uint8_t)COUNTER_KIND(p->counter);
    peer->next++;
}

static inline int is_alarm(const struct proxy_options *o, uint32_t counter)
{
    return o->on_alarm && COUNTER_KIND(counter) == (uint32_t)o->alarm_kind;
}

static inline int counter_exists(const struct proxy_options *o, uint32_t counter)
{
    if (is_alarm(o, counter))
        return COUNTER_SLOT(counter) == 0;
    return COUNTER_KIND(counter) < (uint32_t)o->kinds && COUNTER_SLOT(counter) < (uint32_t)o->slots;
}

/* Has the ring an alarm for peers that are not told yet, or a new question? The acquires pair with the releases of
 * put_abort() and put_question() (src/kernel), and of proxy_alarm(). */
static inline int alarm_waits(const struct proxy_thread *t)
{
    return (t->alarm_next < t->npeers && __atomic_load_n(t->ring.dev.alarm, __ATOMIC_ACQUIRE) != 0) ||
           __atomic_load_n(t->ring.dev.ask, __ATOMIC_ACQUIRE) != t->asked_word;
}

/* For epx top. */
static inline void show_window(const struct proxy_thread *t, const struct peer *peer, uint64_t posted)
{
    struct watch_window *w = t->group->options.windows ? &t->group->options.windows[peer->rank] : NULL;

    if (!w)
        return;
    __atomic_store_n(&w->is_used, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&w->bytes, peer->window.bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&w->bytes_limit, peer->window.bytes_limit, __ATOMIC_RELAXED);
    __atomic_store_n(&w->messages, peer->window.messages, __ATOMIC_RELAXED);
    __atomic_store_n(&w->messages_limit, peer->window.messages_limit, __ATOMIC_RELAXED);
    __atomic_store_n(&w->pending, peer->tail - peer->head, __ATOMIC_RELAXED);
    __atomic_store_n(&w->sent_bytes, w->sent_bytes + posted, __ATOMIC_RELAXED);
}

/* A simulation has another clock, and is not traced. */
static inline int proxy_traces(const struct proxy_thread *t)
{
    return trace_on() && t->group->env == &cpu_thread_env;
}

/* Statistics have one writer each. */
static inline void stat_add(uint64_t *word, uint64_t n)
{
    __atomic_store_n(word, *word + n, __ATOMIC_RELAXED);
}

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The thread, the processes of a house, and who is told. liveness.h has the protocol. */
#include "group/liveness_state.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "util/clock.h"
#include "util/descriptor.h"
#include "util/log.h"
#include "util/pause.h"
#include "util/status.h"

enum {
    AGAIN_NS = 2000000,
    LOOK_NS = 500000,
    CLOSE_MS = 2000 /* for on_news() to return */
};

static struct {
    pthread_mutex_t lock;
    pthread_t thread;
    uint64_t serial; /* of the thread: one that has another number ends */
    int runs;
    int wake_fd; /* 0: none yet; kept until the process ends */
    pid_t pid;
    int over;   /* the process ends: the thread does nothing any more */
    int inside; /* threads that have not ended */
    struct liveness *first;
} watcher = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void wake(void)
{
    const uint64_t one = 1;

    if (watcher.wake_fd > 0 && write(watcher.wake_fd, &one, sizeof(one)) < 0 && errno != EAGAIN)
        log_line(LOG_WARN, "the thread that watches processes cannot be woken: %s", strerror(errno));
}

/* ---- Processes ------------------------------------------------------------------------------------------------- */

static int open_process(int64_t pid)
{
#ifdef SYS_pidfd_open
    return fd_own((int)syscall(SYS_pidfd_open, (pid_t)pid, 0));
#else
    (void)pid;
    errno = ENOSYS;
    return -1;
#endif
}

int liveness_has_pidfd(void)
{
    const int fd = open_process(getpid());

    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

static int has_ended(int pidfd)
{
    struct pollfd process = {.fd = pidfd, .events = POLLIN};

    return poll(&process, 1, 0) == 1 && (process.revents & POLLIN);
}

static void forget_process(struct live_peer *peer)
{
    if (peer->page)
        cpu_device_ops.heap_close(NULL, &peer->export, (void *)(uintptr_t)peer->page);
    if (peer->pidfd >= 0)
        close(peer->pidfd);
    peer->page = NULL;
    peer->pidfd = -1;
}

/* Its page is mapped after its process was named: the page is that of a process that lived then, so the name is its
 * own. */
static void watch_process(struct liveness *l, int rank, int64_t pid, const struct liveness_card *card)
{
    struct live_peer *peer = &l->peers[rank];
    void *base = NULL;

    peer->pidfd = open_process(pid);
    peer->export = (struct heap_export){
        .bytes = l->memory.export.bytes, .address = card->address, .pid = pid, .token = card->token};
    memcpy(peer->export.opaque, card->file, sizeof(card->file));
    if (peer->pidfd >= 0 && cpu_device_ops.heap_open(NULL, &peer->export, &base) == EPX_OK) {
        peer->page = base;
        return;
    }
    log_line(LOG_INFO, "the end of rank %d is noticed at the deadline: its process cannot be watched: %s", rank,
             peer->pidfd < 0 ? strerror(errno) : epx_last_error());
    forget_process(peer);
}

void live_found(struct liveness *l, int rank, enum liveness_state state)
{
    struct live_peer *peer = &l->peers[rank];
    struct live_page *own = live_own_page(l);

    if (l->left || peer->state == LIVENESS_ENDED || peer->state == LIVENESS_LEFT ||
        (state == LIVENESS_UNREACHABLE && peer->unreachable))
        return;
    if (state == LIVENESS_ENDED) {
        peer->state = state;
        if (!own->cause) /* release: pairs with the acquire in take_end() of a mate */
            __atomic_store_n(&own->cause, CAUSE(rank, peer->incarnation), __ATOMIC_RELEASE);
    }
    peer->unreachable = state == LIVENESS_UNREACHABLE;
    peer->found = ++l->count;
    links_send_news(l, rank, state);
}

/* The process of a mate has ended. What it knew comes first. */
static void take_end(struct liveness *l, int rank)
{
    struct live_peer *peer = &l->peers[rank];
    /* Both were written before the process ended, whose end is in the past. */
    const uint64_t left = __atomic_load_n(&peer->page->left, __ATOMIC_ACQUIRE);
    const uint64_t cause = __atomic_load_n(&peer->page->cause, __ATOMIC_ACQUIRE);
    const int first = CAUSE_RANK(cause);

    if (first >= 0 && first < l->o.nranks && first != l->o.rank && first != rank &&
        cause == CAUSE(first, l->peers[first].incarnation))
        live_found(l, first, LIVENESS_ENDED);
    if (left)
        peer->state = peer->state == LIVENESS_LIVES ? LIVENESS_LEFT : peer->state;
    else
        live_found(l, rank, LIVENESS_ENDED);
    forget_process(peer);
}

/* ---- The thread ------------------------------------------------------------------------------------------------- */

struct polls {
    struct pollfd *list;
    size_t count, room;
};

/* Without memory the rest is not looked at now. */
static void add_polls(struct polls *polls, const struct pollfd *more, size_t n)
{
    if (polls->count + n > polls->room) {
        const size_t room = 2 * (polls->count + n) + 16;
        struct pollfd *larger = realloc(polls->list, room * sizeof(*larger));

        if (!larger)
            return;
        polls->list = larger;
        polls->room = room;
    }
    if (n)
        memcpy(polls->list + polls->count, more, n * sizeof(*more));
    polls->count += n;
}

static void gather_polls(struct polls *polls)
{
    const struct pollfd waking = {.fd = watcher.wake_fd, .events = POLLIN};

    polls->count = 0;
    add_polls(polls, &waking, 1);
    for (struct liveness *l = watcher.first; l; l = l->next) {
        size_t n = 0;
        const struct pollfd *more = l->port && !l->left ? links_polls(l, &n) : NULL;

        for (int r = 0; r < l->o.nranks; r++) {
            const struct pollfd process = {.fd = l->peers[r].pidfd, .events = POLLIN};

            if (process.fd >= 0)
                add_polls(polls, &process, 1);
        }
        add_polls(polls, more, n);
    }
}

static void look_at_processes(struct liveness *l)
{
    for (int r = 0; r < l->o.nranks; r++)
        if (l->peers[r].pidfd >= 0 && l->peers[r].page && has_ended(l->peers[r].pidfd))
            take_end(l, r);
}

/* The oldest news that on_news() has not taken; -1: none. */
static int next_news(const struct liveness *l, uint64_t now, enum liveness_state *state)
{
    int first = -1;

    if (!l->tells || l->left || l->busy || l->again_ns > now)
        return -1;
    for (int r = 0; r < l->o.nranks; r++) {
        const struct live_peer *p = &l->peers[r];
        const int is = p->state == LIVENESS_ENDED ? LIVENESS_ENDED : p->unreachable ? LIVENESS_UNREACHABLE : 0;

        if (!is || p->told == is || (first >= 0 && l->peers[first].found < p->found))
            continue;
        first = r;
        *state = (enum liveness_state)is;
    }
    return first;
}

/* One of the news. 0: there were none. */
static int tell_one(uint64_t now)
{
    for (struct liveness *l = watcher.first; l; l = l->next) {
        enum liveness_state state = LIVENESS_LIVES;
        const int rank = next_news(l, now, &state);
        int taken;

        if (rank < 0)
            continue;
        l->busy = 1;
        pthread_mutex_unlock(&watcher.lock);
        taken = l->o.on_news(l->o.context, rank, state);
        pthread_mutex_lock(&watcher.lock);
        l->busy = 0;
        l->again_ns = taken ? 0 : clock_ns() + AGAIN_NS;
        if (taken)
            l->peers[rank].told = (int)state;
        return 1;
    }
    return 0;
}

static int wait_ms(uint64_t now)
{
    uint64_t next = UINT64_MAX;

    for (struct liveness *l = watcher.first; l; l = l->next) {
        const uint64_t links = l->port && !l->left ? links_next(l) : UINT64_MAX;

        next = links < next ? links : next;
        if (l->again_ns && l->tells && !l->left && l->again_ns < next)
            next = l->again_ns;
    }
    if (next == UINT64_MAX)
        return -1;
    return next <= now ? 0 : (int)((next - now) / 1000000 < 60000 ? (next - now) / 1000000 + 1 : 60000);
}

static void step(void)
{
    uint64_t count;

    if (read(watcher.wake_fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
        log_line(LOG_WARN, "the thread that watches processes: %s", strerror(errno));
    for (struct liveness *l = watcher.first; l; l = l->next) {
        look_at_processes(l);
        if (l->port && !l->left)
            links_step(l, clock_ns());
    }
    while (!watcher.over && tell_one(clock_ns()))
        ;
}

/* Descriptors may be closed, and their numbers given anew, while it sleeps: what poll() reports only wakes it. */
static void *run(void *arg)
{
    const uint64_t serial = (uint64_t)(uintptr_t)arg;
    struct polls polls = {0};

    pthread_mutex_lock(&watcher.lock);
    while (watcher.serial == serial && watcher.runs && !watcher.over) {
        const int ms = wait_ms(clock_ns());

        gather_polls(&polls);
        pthread_mutex_unlock(&watcher.lock);
        (void)poll(polls.list, polls.count, polls.count ? ms : 1);
        pthread_mutex_lock(&watcher.lock);
        if (watcher.serial == serial && watcher.runs && !watcher.over)
            step();
    }
    watcher.inside--;
    pthread_mutex_unlock(&watcher.lock);
    free(polls.list);
    return NULL;
}

/* Before libraries are ended, of which the thread may use one. */
static void at_exit(void)
{
    int tries = CLOSE_MS, ends;

    if (watcher.pid != getpid()) /* a child of fork() has the lock, and not the thread */
        return;
    while (pthread_mutex_trylock(&watcher.lock) && tries-- > 0)
        pause_ns(LOOK_NS);
    if (tries < 0)
        return;
    watcher.over = 1;
    ends = watcher.runs;
    watcher.runs = 0;
    wake();
    while (watcher.inside && tries-- > 0) {
        pthread_mutex_unlock(&watcher.lock);
        pause_ns(LOOK_NS);
        pthread_mutex_lock(&watcher.lock);
    }
    ends = ends && !watcher.inside;
    pthread_mutex_unlock(&watcher.lock);
    if (ends)
        pthread_join(watcher.thread, NULL);
}

static epx_status open_wake(void)
{
    static int at_exits;

    if (!watcher.wake_fd)
        watcher.wake_fd = fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (watcher.wake_fd < 0) {
        watcher.wake_fd = 0;
        return fail_errno(EPX_ERR_SYSTEM, "cannot create an eventfd");
    }
    at_exits = at_exits || atexit(at_exit) == 0;
    return EPX_OK;
}

static epx_status start_thread(void)
{
    sigset_t all, before;
    epx_status status = open_wake();
    int rc;

    if (status != EPX_OK || watcher.runs)
        return status;
    sigfillset(&all); /* signals are the program's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    watcher.pid = getpid();
    rc = pthread_create(&watcher.thread, NULL, run, (void *)(uintptr_t)++watcher.serial);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    watcher.runs = rc == 0;
    watcher.inside += rc == 0;
    errno = rc;
    return rc ? fail_errno(EPX_ERR_SYSTEM, "cannot start the thread that watches processes") : EPX_OK;
}

/* ---- A group ---------------------------------------------------------------------------------------------------- */

epx_status liveness_open(const struct liveness_options *options, struct liveness_card *own, struct liveness **out)
{
    const size_t n = (size_t)options->nranks;
    struct liveness *l = calloc(1, sizeof(*l) + n * sizeof(l->peers[0]));
    epx_status status;

    if (!l)
        return fail(EPX_ERR_MEMORY, "no memory to watch %zu processes", n);
    l->o = *options;
    if (options->key)
        memcpy(l->key, options->key, sizeof(l->key));
    l->o.key = options->key ? l->key : NULL;
    for (size_t r = 0; r < n; r++)
        l->peers[r].pidfd = -1;
    status = cpu_device_ops.heap_create(NULL, sizeof(struct live_page), &l->memory);
    if (status != EPX_OK) {
        free(l);
        return status;
    }
    memset(own, 0, sizeof(*own));
    own->address = l->memory.export.address;
    own->token = l->memory.export.token;
    memcpy(own->file, l->memory.export.opaque, sizeof(own->file));
    if (l->o.links && links_open(l, &own->port) != EPX_OK)
        log_line(LOG_WARN, "ends of processes on other nodes are noticed late: %s", epx_last_error());
    *out = l;
    return EPX_OK;
}

void liveness_set_peer(struct liveness *l, int rank, uint64_t incarnation, int64_t pid, int mate,
                       const struct liveness_card *card)
{
    struct live_peer *peer = &l->peers[rank];
    uint64_t early;

    pthread_mutex_lock(&watcher.lock);
    early = peer->early;
    forget_process(peer);
    if (l->port)
        links_forget(l, rank);
    *peer = (struct live_peer){.incarnation = incarnation, .pidfd = -1, .port = card->port};
    if (mate)
        watch_process(l, rank, pid, card);
    if (early == CAUSE(rank, incarnation))
        live_found(l, rank, LIVENESS_ENDED);
    wake();
    pthread_mutex_unlock(&watcher.lock);
}

static int is_watched(const struct liveness *l)
{
    const struct liveness *at = watcher.first;

    while (at && at != l)
        at = at->next;
    return at != NULL;
}

epx_status liveness_start(struct liveness *l, uint64_t token)
{
    epx_status status;

    pthread_mutex_lock(&watcher.lock);
    if (l->token == token && is_watched(l)) { /* a process that joins has tried before */
        pthread_mutex_unlock(&watcher.lock);
        return EPX_OK;
    }
    l->token = token;
    l->next = watcher.first;
    watcher.first = l;
    status = start_thread();
    if (status != EPX_OK)
        watcher.first = l->next;
    wake();
    pthread_mutex_unlock(&watcher.lock);
    return status;
}

int liveness_meet(struct liveness *l, int ms)
{
    const uint64_t until = clock_ns() + (uint64_t)ms * 1000000u;
    int open = 0;

    while (!open && clock_ns() < until) {
        pthread_mutex_lock(&watcher.lock);
        open = !l->port || links_are_open(l);
        pthread_mutex_unlock(&watcher.lock);
        if (!open)
            pause_ns(LOOK_NS);
    }
    return open;
}

void liveness_tell(struct liveness *l)
{
    pthread_mutex_lock(&watcher.lock);
    l->tells = 1;
    wake();
    pthread_mutex_unlock(&watcher.lock);
}

enum liveness_state liveness_of(struct liveness *l, int rank)
{
    enum liveness_state state;

    pthread_mutex_lock(&watcher.lock);
    state = l->peers[rank].state == LIVENESS_LIVES && l->peers[rank].unreachable ? LIVENESS_UNREACHABLE
                                                                                 : l->peers[rank].state;
    pthread_mutex_unlock(&watcher.lock);
    return state;
}

void liveness_met_again(struct liveness *l)
{
    pthread_mutex_lock(&watcher.lock);
    for (int r = 0; r < l->o.nranks; r++)
        if (l->peers[r].unreachable) {
            l->peers[r].unreachable = 0;
            l->peers[r].told = 0;
        }
    pthread_mutex_unlock(&watcher.lock);
}

void liveness_leave(struct liveness *l)
{
    /* Before the process ends: pairs with the acquire in take_end() of a mate. */
    __atomic_store_n(&live_own_page(l)->left, 1, __ATOMIC_RELEASE);
    pthread_mutex_lock(&watcher.lock);
    if (l->port && !l->left)
        links_send_goodbye(l);
    l->left = 1;
    pthread_mutex_unlock(&watcher.lock);
}

/* The lock is held. 1: the thread has nothing left to do, and nobody else waits for its end. */
static int leave_list(struct liveness *l)
{
    struct liveness **link = &watcher.first;
    int ends;

    while (*link && *link != l)
        link = &(*link)->next;
    if (*link)
        *link = l->next;
    ends = !watcher.first && watcher.runs;
    if (ends)
        watcher.runs = 0;
    return ends;
}

static int await_idle(const struct liveness *l)
{
    const uint64_t until = clock_ns() + CLOSE_MS * 1000000u;

    while (l->busy && clock_ns() < until) {
        pthread_mutex_unlock(&watcher.lock);
        pause_ns(LOOK_NS);
        pthread_mutex_lock(&watcher.lock);
    }
    return !l->busy;
}

int liveness_close(struct liveness *l)
{
    pthread_t thread;
    int ends;

    liveness_leave(l);
    pthread_mutex_lock(&watcher.lock);
    if (!await_idle(l)) {
        pthread_mutex_unlock(&watcher.lock);
        log_line(LOG_WARN, "rank %d: the device does not return from a copy; memory of the group is not freed",
                 l->o.rank);
        return -1;
    }
    thread = watcher.thread;
    ends = leave_list(l);
    wake();
    if (l->port)
        links_close(l);
    for (int r = 0; r < l->o.nranks; r++)
        forget_process(&l->peers[r]);
    pthread_mutex_unlock(&watcher.lock);
    if (ends)
        pthread_join(thread, NULL);
    cpu_device_ops.heap_destroy(NULL, &l->memory);
    free(l);
    return 0;
}

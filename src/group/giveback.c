/* SPDX-License-Identifier: Apache-2.0 */
#include "group/giveback.h"

#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "util/descriptor.h"
#include "util/log.h"
#include "util/pause.h"
#include "util/status.h"

enum { LOOK_NS = 200000 };

/* The words of a ledger. */
enum { WORD_OPEN, WORD_CLOSING, WORD_CLOSED };

struct ledger_peer {
    struct heap_export export;
    const uint64_t *closed; /* [nranks], of its ledger; NULL: not mapped, or no peer */
    int is_peer;
    int pidfd; /* -1: none */
};

struct ledger {
    struct heap memory; /* uint64_t closed[nranks] */
    int nranks, rank, doubt;
    /* Of a group that has ended: */
    const struct device_ops *ops;
    struct heap heap;
    int published;       /* its own words */
    struct ledger *next; /* of those that are kept */
    struct ledger_peer peers[];
};

static struct ledger *kept;
static int nopen; /* ledgers of groups that have not ended */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

epx_status ledger_create(int nranks, int rank, struct ledger **out)
{
    struct ledger *ledger = calloc(1, sizeof(*ledger) + (size_t)nranks * sizeof(ledger->peers[0]));
    epx_status status;

    *out = NULL;
    if (!ledger)
        return fail(EPX_ERR_MEMORY, "epx_group_create: out of memory for the ledger of %d ranks", nranks);
    status = cpu_device_ops.heap_create(NULL, (uint64_t)nranks * sizeof(uint64_t), &ledger->memory);
    if (status != EPX_OK) {
        free(ledger);
        return status;
    }
    ledger->nranks = nranks;
    ledger->rank = rank;
    for (int r = 0; r < nranks; r++)
        ledger->peers[r].pidfd = -1;
    pthread_mutex_lock(&lock);
    nopen++;
    pthread_mutex_unlock(&lock);
    *out = ledger;
    return EPX_OK;
}

struct ledger_address ledger_address(const struct ledger *ledger)
{
    struct ledger_address address = {0};

    if (!ledger)
        return address;
    address.address = ledger->memory.export.address;
    address.token = ledger->memory.export.token;
    memcpy(address.file, ledger->memory.export.opaque, sizeof(address.file));
    return address;
}

/* It names this process as long as it is open, also when another one has got its number. */
static int open_process(int64_t pid)
{
#ifdef SYS_pidfd_open
    return pid == (int64_t)getpid() ? -1 : fd_own((int)syscall(SYS_pidfd_open, (pid_t)pid, 0));
#else
    (void)pid;
    return -1;
#endif
}

static void forget_peer(struct ledger_peer *peer)
{
    if (peer->closed)
        cpu_device_ops.heap_close(NULL, &peer->export, (void *)(uintptr_t)peer->closed);
    if (peer->pidfd >= 0)
        close(peer->pidfd);
    *peer = (struct ledger_peer){.pidfd = -1};
}

void ledger_set_peer(struct ledger *ledger, int rank, int64_t pid, const struct ledger_address *address)
{
    struct ledger_peer *peer = &ledger->peers[rank];
    void *base = NULL;

    forget_peer(peer);
    peer->is_peer = 1;
    peer->export = (struct heap_export){
        .bytes = ledger->memory.export.bytes, .address = address->address, .pid = pid, .token = address->token};
    memcpy(peer->export.opaque, address->file, sizeof(address->file));
    if (!address->address) {
        log_line(LOG_INFO, "heaps are kept until no group is left: rank %d has no ledger (EPX_GIVEBACK)", rank);
        return;
    }
    peer->pidfd = open_process(pid);
    /* Mapped after its process was named: its file is that of a process that lived then, so the name is its own. */
    if (cpu_device_ops.heap_open(NULL, &peer->export, &base) == EPX_OK)
        peer->closed = base;
    else
        log_line(LOG_INFO, "memory that rank %d maps is kept: %s", rank, epx_last_error());
}

void ledger_doubt(struct ledger *ledger, int doubt)
{
    ledger->doubt = doubt;
}

static void publish(struct ledger *ledger, uint64_t word)
{
    uint64_t *closed = ledger->memory.base;

    for (int r = 0; r < ledger->nranks; r++)
        __atomic_store_n(&closed[r], word, __ATOMIC_RELEASE); /* after the unmapping: pairs with word_of() */
}

void ledger_closing(struct ledger *ledger, int closing)
{
    publish(ledger, closing ? WORD_CLOSING : WORD_OPEN);
}

/* This rank has unmapped the heaps of all. */
static void publish_closed(struct ledger *ledger)
{
    publish(ledger, WORD_CLOSED);
    ledger->published = 1;
}

static void ledger_free(struct ledger *ledger)
{
    for (int r = 0; r < ledger->nranks; r++)
        forget_peer(&ledger->peers[r]);
    cpu_device_ops.heap_destroy(NULL, &ledger->memory);
    free(ledger);
}

static int has_ended(const struct ledger_peer *peer)
{
    struct pollfd process = {.fd = peer->pidfd, .events = POLLIN};

    return peer->pidfd >= 0 && poll(&process, 1, 0) == 1 && (process.revents & POLLIN);
}

static uint64_t word_of(const struct ledger *ledger, const struct ledger_peer *peer)
{
    /* Acquire: pairs with the release in publish(). */
    return peer->closed ? __atomic_load_n(&peer->closed[ledger->rank], __ATOMIC_ACQUIRE) : WORD_OPEN;
}

static int has_closed(const struct ledger *ledger, const struct ledger_peer *peer)
{
    return !peer->is_peer || word_of(ledger, peer) == WORD_CLOSED || has_ended(peer);
}

/* A rank that may have the heap mapped, or -1. */
static int find_mapped(const struct ledger *ledger)
{
    for (int r = 0; r < ledger->nranks; r++)
        if (!has_closed(ledger, &ledger->peers[r]))
            return r;
    return -1;
}

static int can_be_freed(const struct ledger *ledger, int all)
{
    return ledger->published && (all || (!ledger->doubt && find_mapped(ledger) < 0));
}

/* Takes those that can be freed out of the list. Under the lock. */
static struct ledger *take_freeable(int all, int *left)
{
    struct ledger *taken = NULL, **link = &kept;

    *left = 0;
    while (*link) {
        struct ledger *ledger = *link;

        if (!ledger->published && ledger->ops->release())
            publish_closed(ledger);
        if (!can_be_freed(ledger, all)) {
            link = &ledger->next;
            ++*left;
            continue;
        }
        *link = ledger->next;
        ledger->next = taken;
        taken = ledger;
    }
    return taken;
}

static int sweep(int last)
{
    struct ledger *taken;
    int left;

    pthread_mutex_lock(&lock);
    taken = take_freeable(last && !nopen, &left);
    pthread_mutex_unlock(&lock);
    while (taken) { /* without the lock: freeing GPU memory may take long */
        struct ledger *ledger = taken;

        taken = ledger->next;
        ledger->ops->heap_destroy(NULL, &ledger->heap);
        (void)ledger->ops->release();
        ledger_free(ledger);
    }
    return left;
}

int giveback_sweep(void)
{
    return sweep(0);
}

/* Ranks of other processes whose words may come soon. */
static int is_worth_waiting(const struct ledger *ledger)
{
    if (ledger->doubt || !ledger->published)
        return 0;
    for (int r = 0; r < ledger->nranks; r++) {
        const struct ledger_peer *peer = &ledger->peers[r];

        if (!has_closed(ledger, peer) && (!peer->closed || peer->export.pid == (int64_t)getpid()))
            return 0;
    }
    return 1;
}

/* Is a rank about to unmap the heap of this ledger, which is kept? */
static int is_being_unmapped(const struct ledger *ledger)
{
    int closing = 0;

    pthread_mutex_lock(&lock);
    for (const struct ledger *l = kept; l; l = l->next)
        for (int r = 0; l == ledger && r < l->nranks; r++)
            closing |= !has_closed(l, &l->peers[r]) && word_of(l, &l->peers[r]) == WORD_CLOSING;
    pthread_mutex_unlock(&lock);
    return closing;
}

/* Under the lock. */
static void tell_why(const struct ledger *ledger)
{
    const int r = find_mapped(ledger);

    if (!ledger->heap.base)
        return;
    if (ledger->doubt || !ledger->published || r < 0)
        log_line(LOG_INFO, "%" PRIu64 " bytes of a group that has ended are kept until no group is left: %s",
                 ledger->heap.bytes,
                 ledger->doubt ? "its creation failed" : "ranks of the group are threads of this process");
    else
        log_line(LOG_INFO,
                 "%" PRIu64 " bytes of a group that has ended are kept: rank %d (process %" PRId64 ") has not unmapped "
                 "them",
                 ledger->heap.bytes, r, ledger->peers[r].export.pid);
}

void giveback_keep(struct ledger *ledger, const struct device_ops *ops, const struct heap *heap, int closing_ms)
{
    uint64_t soon, late;
    int before = 0, waits;

    ledger->ops = ops;
    ledger->heap = *heap;
    if (ops->release())
        publish_closed(ledger);
    else
        ledger_closing(ledger, 0); /* not soon: ranks of the group are threads of this process */
    waits = heap->base && is_worth_waiting(ledger);
    pthread_mutex_lock(&lock);
    nopen--;
    for (const struct ledger *l = kept; l; l = l->next)
        before++;
    ledger->next = kept;
    kept = ledger;
    pthread_mutex_unlock(&lock);
    soon = host_now_ns() + (uint64_t)GIVEBACK_WAIT_MS * 1000000u; /* behind release(), which may take long */
    late = host_now_ns() + (uint64_t)closing_ms * 1000000u;
    while (sweep(0) > before && waits && (host_now_ns() < soon || (host_now_ns() < late && is_being_unmapped(ledger))))
        pause_ns(LOOK_NS);
    if (sweep(1) == 0)
        return;
    pthread_mutex_lock(&lock);
    for (const struct ledger *l = kept; l; l = l->next)
        if (l == ledger)
            tell_why(l);
    pthread_mutex_unlock(&lock);
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "group/giveback.h"

#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "util/log.h"
#include "util/status.h"

struct ledger_peer {
    struct heap_export export;
    const uint64_t *closed; /* [nranks], of its ledger; NULL: not mapped, or no peer */
    int is_peer;
    int pidfd; /* -1: none */
};

struct ledger {
    struct heap memory; /* uint64_t closed[nranks] */
    int nranks, rank;
    void (*release)(void *context);
    void *context;
    struct ledger *next; /* of those that are kept */
    struct ledger_peer peers[];
};

static struct ledger *kept;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

epx_status ledger_create(int nranks, struct ledger **out)
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
    for (int r = 0; r < nranks; r++)
        ledger->peers[r].pidfd = -1;
    *out = ledger;
    return EPX_OK;
}

struct heap_export ledger_export(const struct ledger *ledger)
{
    return ledger->memory.export;
}

/* It names this process as long as it is open, also when another one has got its number. */
static int open_process(int64_t pid)
{
#ifdef SYS_pidfd_open
    return pid == (int64_t)getpid() ? -1 : (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
#else
    (void)pid;
    return -1;
#endif
}

void ledger_add_peer(struct ledger *ledger, int rank, const struct heap_export *export)
{
    struct ledger_peer *peer = &ledger->peers[rank];
    void *base = NULL;

    peer->is_peer = 1;
    peer->export = *export;
    peer->pidfd = open_process(export->pid);
    /* Mapped after its process was named: its file is that of a process that lived then, so the name is its own. */
    if (cpu_device_ops.heap_open(NULL, export, &base) == EPX_OK)
        peer->closed = base;
    else
        log_line(LOG_INFO, "memory that rank %d maps is kept: %s", rank, epx_last_error());
}

static void forget_peer(struct ledger_peer *peer)
{
    if (peer->closed)
        cpu_device_ops.heap_close(NULL, &peer->export, (void *)(uintptr_t)peer->closed);
    if (peer->pidfd >= 0)
        close(peer->pidfd);
    *peer = (struct ledger_peer){.pidfd = -1};
}

void ledger_replace_peer(struct ledger *ledger, int rank, const struct heap_export *export)
{
    forget_peer(&ledger->peers[rank]);
    ledger_add_peer(ledger, rank, export);
}

void ledger_closed(struct ledger *ledger, int exporter)
{
    uint64_t *closed = ledger->memory.base;

    __atomic_store_n(&closed[exporter], 1, __ATOMIC_RELEASE); /* after the unmapping: pairs with has_closed() */
}

void ledger_destroy(struct ledger *ledger)
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

static int has_closed(const struct ledger *ledger, const struct ledger_peer *peer)
{
    /* Acquire: pairs with the release in ledger_closed(). */
    if (!peer->is_peer || (peer->closed && __atomic_load_n(&peer->closed[ledger->rank], __ATOMIC_ACQUIRE)))
        return 1;
    return has_ended(peer);
}

static int is_unmapped(const struct ledger *ledger)
{
    for (int r = 0; r < ledger->nranks; r++)
        if (!has_closed(ledger, &ledger->peers[r]))
            return 0;
    return 1;
}

void giveback_keep(struct ledger *ledger, int rank, void (*release)(void *context), void *context)
{
    ledger->rank = rank;
    ledger->release = release;
    ledger->context = context;
    pthread_mutex_lock(&lock);
    ledger->next = kept;
    kept = ledger;
    pthread_mutex_unlock(&lock);
}

int giveback_sweep(int all)
{
    struct ledger *freed = NULL, **link = &kept;
    int n = 0;

    pthread_mutex_lock(&lock);
    while (*link) {
        struct ledger *ledger = *link;

        if (!all && !is_unmapped(ledger)) {
            link = &ledger->next;
            n++;
            continue;
        }
        *link = ledger->next;
        ledger->next = freed;
        freed = ledger;
    }
    pthread_mutex_unlock(&lock);
    while (freed) { /* without the lock: freeing GPU memory may take long */
        struct ledger *ledger = freed;

        freed = ledger->next;
        ledger->release(ledger->context);
        ledger_destroy(ledger);
    }
    return n;
}

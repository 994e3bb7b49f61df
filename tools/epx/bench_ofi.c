/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The baseline of `epx bench ht --vs ofi`: a loop around fi_write.
 *
 *      process 2p, thread t     <--- fi_write both ways --->     process 2p + 1, thread t        p = 0..pairs - 1
 *
 * The processes share memory: addresses and keys, barriers, times. One exchange that is not timed
 * makes the connections. A side has finished an exchange when its writes are completed and the last write of the other
 * side, which carries CQ data, has arrived. Where there are fewer cores than threads, a thread that finds nothing to do
 * yields its core, as the proxies do: a loop that spins there takes the time of the one that it waits for.
 */
#include "tools/epx/bench_ofi.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "net/ofi/ofi.h"

#if EPX_HAVE_OFI

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util/clock.h"

enum { MAX_PAIRS = 64, MAX_THREADS = 16, MAX_PROCESSES = 2 * MAX_PAIRS, ADDRESS_BYTES = 240, LIMIT_S = 60 };
enum { WINDOW_MESSAGES = 64 };            /* in flight: more only makes the caches miss */
#define MEMORY_MOST ((uint64_t)256 << 20) /* to write from, per thread, and as much to write to; then writes go round */

struct endpoint_info {
    size_t address_bytes;
    uint8_t address[ADDRESS_BYTES];
    uint64_t key, base;
};

struct ofi_shm {
    atomic_int failed;
    atomic_int arrived; /* sides that reached a barrier, over all barriers */
    struct {
        atomic_ullong first_ns, last_ns; /* start of the first, end of the last */
    } times[OFI_BASELINE_MAX_REPEATS + 1];
    char text[256];
    struct endpoint_info endpoints[MAX_PROCESSES][MAX_THREADS];
};

struct job {
    struct ofi_shm *shm;
    const char *provider;
    uint64_t messages; /* per thread */
    uint32_t message_bytes;
    int threads, processes;
    int repeats; /* after the first, which is not timed */
    int yield;
};

struct side {
    const struct job *job;
    int process, thread;
    const struct ofi_lib *lib;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_ep *ep;
    struct fid_mr *mr;
    uint8_t *memory;
    size_t memory_bytes;
    struct fi_context2 *contexts;
    fi_addr_t peer;
    uint64_t posted, completed; /* of this exchange */
    int last_received;          /* last writes of the other side, minus exchanges */
    int barriers;               /* passed */
};

static int complain(const struct side *side, int rc, const char *what)
{
    if (!atomic_exchange(&side->job->shm->failed, 1))
        snprintf(side->job->shm->text, sizeof(side->job->shm->text), "process %d thread %d: %s: %s", side->process,
                 side->thread, what, side->lib ? side->lib->strerror(-rc) : "");
    return -1;
}

static uint64_t deadline(void)
{
    return clock_ns() + LIMIT_S * 1000000000ull;
}

/* ---- An endpoint */

static int open_objects(struct side *side)
{
    struct fi_cq_attr cq = {.size = 16384, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE};
    struct fi_av_attr av = {.type = side->info->domain_attr->av_type, .count = 1};
    int rc = side->lib->fabric(side->info->fabric_attr, &side->fabric, NULL);

    if (!rc)
        rc = fi_domain(side->fabric, side->info, &side->domain, NULL);
    if (!rc)
        rc = fi_av_open(side->domain, &av, &side->av, NULL);
    if (!rc)
        rc = fi_cq_open(side->domain, &cq, &side->cq, NULL);
    if (!rc)
        rc = fi_endpoint(side->domain, side->info, &side->ep, NULL);
    if (!rc)
        rc = fi_ep_bind(side->ep, &side->av->fid, 0);
    if (!rc)
        rc = fi_ep_bind(side->ep, &side->cq->fid, FI_TRANSMIT | FI_RECV);
    return rc ? rc : fi_enable(side->ep);
}

static int open_memory(struct side *side)
{
    const int mode = side->info->domain_attr->mr_mode;
    struct endpoint_info *own = &side->job->shm->endpoints[side->process][side->thread];
    int rc;

    side->memory_bytes = side->job->messages * side->job->message_bytes;
    if (side->memory_bytes > MEMORY_MOST && side->job->message_bytes <= MEMORY_MOST)
        side->memory_bytes = MEMORY_MOST / side->job->message_bytes * side->job->message_bytes;
    side->memory = aligned_alloc(4096, (side->memory_bytes * 2 + 4095) & ~(size_t)4095);
    side->contexts = calloc(side->info->tx_attr->size, sizeof(*side->contexts));
    if (!side->memory || !side->contexts)
        return -FI_ENOMEM;
    memset(side->memory, side->process + 1, side->memory_bytes * 2);
    rc = fi_mr_reg(side->domain, side->memory, side->memory_bytes * 2, FI_WRITE | FI_REMOTE_WRITE, 0, 1, 0, &side->mr,
                   NULL);
    if (!rc && (mode & (FI_MR_ENDPOINT | FI_MR_RMA_EVENT))) {
        rc = fi_mr_bind(side->mr, &side->ep->fid, 0);
        if (!rc)
            rc = fi_mr_enable(side->mr);
    }
    own->key = rc ? 0 : fi_mr_key(side->mr);
    own->base = mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)side->memory : 0;
    own->address_bytes = ADDRESS_BYTES;
    return rc ? rc : fi_getname(&side->ep->fid, own->address, &own->address_bytes);
}

static void close_side(struct side *side)
{
    struct fid *fids[] = {side->mr ? &side->mr->fid : NULL,         side->ep ? &side->ep->fid : NULL,
                          side->cq ? &side->cq->fid : NULL,         side->av ? &side->av->fid : NULL,
                          side->domain ? &side->domain->fid : NULL, side->fabric ? &side->fabric->fid : NULL};

    for (size_t i = 0; i < sizeof(fids) / sizeof(fids[0]); i++)
        if (fids[i])
            fi_close(fids[i]);
    if (side->info)
        side->lib->freeinfo(side->info);
    free(side->contexts);
    free(side->memory);
}

/* ---- The loop */

static int drain(struct side *side)
{
    struct fi_cq_data_entry entries[64];
    struct fi_cq_err_entry error;
    const ssize_t got = fi_cq_read(side->cq, entries, 64);

    for (ssize_t i = 0; i < got; i++) {
        if (entries[i].flags & FI_REMOTE_CQ_DATA && !(entries[i].flags & FI_WRITE))
            side->last_received++;
        else
            side->completed++;
    }
    if (got >= 0 || got == -FI_EAGAIN)
        return 0;
    memset(&error, 0, sizeof(error));
    if (got == -FI_EAVAIL)
        fi_cq_readerr(side->cq, &error, 0);
    return complain(side, got == -FI_EAVAIL ? -error.err : (int)got, "a write failed");
}

/* The last one carries CQ data. Returns 0, or -1; *posted tells whether there was room. */
static int post(struct side *side, int last, int *posted)
{
    const struct job *job = side->job;
    const struct endpoint_info *other = &job->shm->endpoints[side->process ^ 1][side->thread];
    const uint64_t offset = side->posted * job->message_bytes % side->memory_bytes;
    void *context = &side->contexts[side->posted % side->info->tx_attr->size];
    void *desc = fi_mr_desc(side->mr);
    const uint64_t target = other->base + side->memory_bytes + (last ? 0 : offset);
    ssize_t rc;

    if (last)
        rc = fi_writedata(side->ep, side->memory, 0, desc, 1, side->peer, target, other->key, context);
    else
        rc = fi_write(side->ep, side->memory + offset, job->message_bytes, desc, side->peer, target, other->key,
                      context);
    *posted = !rc;
    return !rc || rc == -FI_EAGAIN ? 0 : complain(side, (int)rc, "fi_write");
}

static int write_all(struct side *side)
{
    const uint64_t until = deadline();
    const uint64_t window = side->info->tx_attr->size < WINDOW_MESSAGES ? side->info->tx_attr->size : WINDOW_MESSAGES;
    const int ordered = (side->info->tx_attr->msg_order & side->info->rx_attr->msg_order & FI_ORDER_WAW) != 0;
    const uint64_t total = side->job->messages + 1;
    uint64_t before;
    int room;

    side->posted = side->completed = 0;
    while (side->completed < total || side->last_received <= 0) {
        room = side->posted < total && side->posted - side->completed < window;
        /* Where writes may overtake each other, the last one waits until the rest is completed. */
        if (room && (ordered || side->posted + 1 < total || side->completed + 1 == total)) {
            if (post(side, side->posted + 1 == total, &room))
                return -1;
            side->posted += (uint64_t)room;
        } else {
            room = 0;
        }
        before = side->completed;
        if ((!room || !(side->posted & 15)) && drain(side))
            return -1;
        if (room || side->completed != before)
            continue;
        if (atomic_load(&side->job->shm->failed) || clock_ns() > until)
            return complain(side, -FI_ETIMEDOUT, "the writes did not end in time");
        if (side->job->yield)
            sched_yield();
    }
    side->last_received--;
    return 0;
}

/* Polls meanwhile, now and then: the other side may need it. */
static int barrier(struct side *side)
{
    const uint64_t until = deadline();
    atomic_int *count = &side->job->shm->arrived;

    atomic_fetch_add(count, 1);
    side->barriers++;
    while (atomic_load(count) < side->barriers * side->job->processes * side->job->threads) {
        if (atomic_load(&side->job->shm->failed) || clock_ns() > until)
            return complain(side, -FI_ETIMEDOUT, "the others did not reach a barrier");
        if (side->peer != FI_ADDR_UNSPEC && drain(side))
            return -1;
        usleep(side->peer == FI_ADDR_UNSPEC ? 1000 : 50);
    }
    return 0;
}

static void record_time(atomic_ullong *slot, uint64_t now, int earliest)
{
    unsigned long long seen = atomic_load(slot);

    while ((!seen || (earliest ? now < seen : now > seen)) && !atomic_compare_exchange_weak(slot, &seen, now))
        ;
}

static void exchange(struct side *side)
{
    struct ofi_shm *shm = side->job->shm;

    for (int i = 0; i <= side->job->repeats; i++) {
        if (barrier(side))
            return;
        record_time(&shm->times[i].first_ns, clock_ns(), 1);
        if (write_all(side))
            return;
        record_time(&shm->times[i].last_ns, clock_ns(), 0);
    }
    barrier(side);
}

static void *run_side(void *arg)
{
    struct side *side = arg;
    struct ofi_shm *shm = side->job->shm;
    const struct endpoint_info *other = &shm->endpoints[side->process ^ 1][side->thread];
    const struct net_options options = {
        .provider = side->job->provider, .index = side->thread, .memory_kind = EPX_DEVICE_CPU};
    const char *missing;
    int rc;

    side->peer = FI_ADDR_UNSPEC;
    side->lib = ofi_lib_get(&missing);
    if (!side->lib || ofi_choose(side->lib, &options, &side->info)) {
        complain(side, -FI_ENODATA, side->lib ? epx_last_error() : missing);
        return NULL;
    }
    rc = open_objects(side);
    if (!rc)
        rc = open_memory(side);
    if (rc) {
        complain(side, rc, "open");
    } else if (!barrier(side)) {
        if (fi_av_insert(side->av, other->address, 1, &side->peer, 0, NULL) != 1)
            complain(side, -FI_EINVAL, "fi_av_insert");
        else
            exchange(side);
    }
    close_side(side);
    return NULL;
}

static void run_process(const struct job *job, int process)
{
    struct side sides[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    int started = 0;

    memset(sides, 0, sizeof(sides));
    for (; started < job->threads; started++) {
        sides[started].job = job;
        sides[started].process = process;
        sides[started].thread = started;
        if (pthread_create(&threads[started], NULL, run_side, &sides[started])) {
            complain(&sides[started], 0, "a thread cannot be started");
            break;
        }
    }
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
}

/* ---- Processes */

/* Waits for a process; once one has failed (its deadlines are LIMIT_S), the others get a second. 0 when it returned
 * 0. */
static int wait_process(const struct job *job, pid_t pid)
{
    enum { STEP_US = 2000, GRACE_US = 1000000 };
    int status = -1, waited = 0;

    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (atomic_load(&job->shm->failed) && (waited += STEP_US) > GRACE_US)
            kill(pid, SIGKILL); /* one that is stopped, too */
        usleep(STEP_US);
    }
    return status == 0 ? 0 : -1;
}

static int run_pairs(const struct job *job)
{
    pid_t pids[MAX_PROCESSES];
    int started = 0, failed = 0;

    for (; started < job->processes; started++) {
        pids[started] = fork();
        if (pids[started] < 0) {
            atomic_store(&job->shm->failed, 1);
            break;
        }
        if (!pids[started]) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            run_process(job, started);
            _exit(0);
        }
    }
    for (int i = 0; i < started; i++)
        if (wait_process(job, pids[i]) != 0) {
            atomic_store(&job->shm->failed, 1); /* the others need not wait for this one */
            failed = 1;
        }
    return failed || atomic_load(&job->shm->failed) ? -1 : 0;
}

int ofi_baseline(const char *provider, uint64_t bytes, uint32_t message_bytes, int threads, int pairs, int repeats,
                 double *gbytes_per_s)
{
    struct job job = {.provider = provider,
                      .message_bytes = message_bytes,
                      .threads = threads,
                      .processes = 2 * pairs,
                      .repeats = repeats,
                      .yield = 2 * pairs * threads > sysconf(_SC_NPROCESSORS_ONLN)};
    int rc;

    if (threads < 1 || threads > MAX_THREADS || pairs < 1 || pairs > MAX_PAIRS || !message_bytes || !bytes ||
        repeats < 1 || repeats > OFI_BASELINE_MAX_REPEATS) {
        fprintf(stderr,
                "epx: ofi baseline: %d threads, %d pairs, %u bytes a message, %d repeats; expected 1 to %d, 1 to %d, "
                "> 0, 1 to %d\n",
                threads, pairs, message_bytes, repeats, MAX_THREADS, MAX_PAIRS, OFI_BASELINE_MAX_REPEATS);
        return -1;
    }
    job.messages = (bytes / (uint64_t)threads + message_bytes - 1) / message_bytes;
    job.shm = mmap(NULL, sizeof(*job.shm), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (job.shm == MAP_FAILED) {
        fprintf(stderr, "epx: ofi baseline: no shared memory: %s\n", strerror(errno));
        return -1;
    }
    rc = run_pairs(&job);
    if (rc)
        fprintf(stderr, "epx: ofi baseline: %s\n", job.shm->text[0] ? job.shm->text : "a process failed");
    for (int i = 0; !rc && i < repeats; i++)
        gbytes_per_s[i] = (double)(job.messages * message_bytes) * threads * job.processes /
                          (double)(job.shm->times[i + 1].last_ns - job.shm->times[i + 1].first_ns);
    munmap(job.shm, sizeof(*job.shm));
    return rc;
}

#else

int ofi_baseline(const char *provider, uint64_t bytes, uint32_t message_bytes, int threads, int pairs, int repeats,
                 double *gbytes_per_s)
{
    (void)provider;
    (void)repeats;
    (void)bytes;
    (void)message_bytes;
    (void)threads;
    (void)pairs;
    (void)gbytes_per_s;
    fprintf(stderr, "epx: ofi baseline: this EPX was built without the headers of libfabric\n");
    return -1;
}

#endif

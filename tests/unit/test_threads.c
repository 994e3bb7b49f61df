/* SPDX-License-Identifier: Apache-2.0 */
/* Threads, streams of other groups, recoveries that fail, and fork: what epx.h states, enforced. ctest: labels=ranks */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "group/objects.h"
#include "modes/handle.h"
#include "util/clock.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit.h"

enum { THREADS = 4, ROUNDS = 40, DEADLINE_MS = 120000 };

/* ---- Streams ----------------------------------------------------------------------------------------------------- */

static int refused(struct fixture *s, const char *call, epx_status status)
{
    static const char *const words[] = {"stream", "another group", NULL};

    return fixture_expect(s, call, status, EPX_ERR_ARGUMENT, words);
}

/* All calls of one group with a stream of another one, which is then destroyed. */
static int refuses_a_stream_of(struct fixture *other)
{
    struct fixture *s = other->arg;
    epx_stream stream = NULL;
    epx_event *event = NULL;
    int rc;

    if (epx_stream_create(other->group, &stream) != EPX_OK || epx_event_create(s->group, &event) != EPX_OK)
        return fixture_fail(s, "the other group");
    fixture_refill(s);
    rc = refused(s, "epx_stream_sync", epx_stream_sync(s->group, stream)) ||
         refused(s, "epx_stream_query", epx_stream_query(s->group, stream)) ||
         refused(s, "epx_stream_destroy", epx_stream_destroy(s->group, stream)) ||
         refused(s, "epx_event_record", epx_event_record(event, stream)) ||
         refused(s, "epx_stream_wait_event", epx_stream_wait_event(s->group, stream, event)) ||
         refused(s, "epx_handle_update", epx_handle_update(s->ht, &s->idx, NULL, stream)) ||
         epx_handle_update(s->ll, &s->idx, NULL, NULL) != EPX_OK ||
         refused(s, "epx_dispatch", epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, stream)) ||
         refused(s, "epx_graph_begin", epx_graph_begin(s->group, stream));
    if (!rc && (fixture_meet(s) || epx_group_destroy(other->group) != EPX_OK))
        rc = fixture_fail(s, "the other group is destroyed");
    other->group = NULL;
    if (!rc && epx_stream_sync(s->group, stream) != EPX_ERR_ARGUMENT)
        rc = fixture_fail(s, "a stream that was destroyed with its group is used");
    return rc || fixture_ll(s) || fixture_ht(s);
}

static int uses_a_foreign_stream(struct fixture *s)
{
    const epx_group_config config = fixture_config(DEADLINE_MS);

    return fixture_group(s->rank, s->nranks, s->boot, &config, refuses_a_stream_of, s);
}

static void a_stream_of_another_group_is_refused(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(2, NULL, uses_a_foreign_stream, NULL), 0);
}

/* ---- Threads ----------------------------------------------------------------------------------------------------- */

/* One of several threads of a rank that is alone in its group. */
struct worker {
    pthread_t thread;
    epx_group *group;
    atomic_int *stop;
    char why[300];
};

static int tried(struct worker *w, const char *call, epx_status status)
{
    if (status == EPX_OK)
        return 1;
    snprintf(w->why, sizeof(w->why), "%s: %.200s", call, epx_last_error());
    return 0;
}

#define TRY_CALL(w, call) tried(w, #call, call)

/* A dispatch of two tokens to the only rank. */
static int exchange(struct worker *w, epx_handle *handle)
{
    uint16_t tokens[2 * FIXTURE_HIDDEN] = {0}, rows[FIXTURE_EXPERTS * FIXTURE_M * FIXTURE_HIDDEN];
    int64_t idx[2 * FIXTURE_TOPK] = {0, 1, 2, 3, 4, 5};
    epx_tensor t = epx_tensor_make(tokens, EPX_BF16, 2, 2, FIXTURE_HIDDEN, 0, 0);
    epx_tensor i = epx_tensor_make(idx, EPX_INT64, 2, 2, FIXTURE_TOPK, 0, 0);
    epx_tensor o = epx_tensor_make(rows, EPX_BF16, 3, FIXTURE_EXPERTS, FIXTURE_M, FIXTURE_HIDDEN, 0);
    epx_dispatch_inputs in = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;

    in.tokens = &t;
    in.topk_idx = &i;
    out.tokens = &o;
    return TRY_CALL(w, epx_dispatch(handle, &in, &out, NULL, NULL, NULL)) &&
           TRY_CALL(w, epx_stream_sync(w->group, NULL));
}

static void *work(void *arg)
{
    struct worker *w = arg;
    const epx_handle_config config = fixture_handle_config(EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, FIXTURE_TOPK);
    epx_stats stats = EPX_STATS_INIT;

    for (int i = 0; i < ROUNDS && !w->why[0]; i++) {
        epx_handle *handle = NULL;
        epx_stream stream = NULL;
        epx_event *event = NULL;
        void *memory = NULL;

        if (TRY_CALL(w, epx_handle_create(&handle, w->group, &config)) &&
            TRY_CALL(w, epx_stream_create(w->group, &stream)) && TRY_CALL(w, epx_event_create(w->group, &event)) &&
            TRY_CALL(w, epx_alloc(w->group, 1000, &memory)) && exchange(w, handle) &&
            TRY_CALL(w, epx_event_record(event, stream)) && TRY_CALL(w, epx_event_sync(event)) &&
            TRY_CALL(w, epx_free(w->group, memory)) && TRY_CALL(w, epx_event_destroy(event)) &&
            TRY_CALL(w, epx_stream_destroy(w->group, stream)))
            TRY_CALL(w, epx_handle_destroy(handle));
        TRY_CALL(w, epx_group_stats(w->group, &stats));
    }
    return NULL;
}

static int shares_its_group(struct fixture *s)
{
    static struct worker w[THREADS];
    int rc = 0;

    for (int i = 0; i < THREADS; i++) {
        w[i] = (struct worker){.group = s->group};
        if (pthread_create(&w[i].thread, NULL, work, &w[i]) != 0)
            return fixture_fail(s, "a thread");
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(w[i].thread, NULL);
        if (w[i].why[0])
            rc = fixture_fail(s, w[i].why);
    }
    return rc || fixture_ll(s) || fixture_ht(s);
}

static void a_group_is_used_by_several_threads(void **state)
{
    epx_group_config config = fixture_config(DEADLINE_MS);

    (void)state;
    config.max_inflight = THREADS;
    assert_int_equal(fixture_run(1, &config, shares_its_group, NULL), 0);
}

static void *ask_again_and_again(void *arg)
{
    struct worker *w = arg;
    epx_status status = EPX_OK;

    while (!atomic_load(w->stop) && status == EPX_OK) {
        status = epx_stream_sync(w->group, NULL);
        usleep(20);
    }
    return NULL;
}

/* A thread that is inside, or comes again, finds a group that exists or an error, whatever the other does. */
static int ends_under_another_thread(struct fixture *s)
{
    atomic_int stop = 0;
    struct worker w = {.group = s->group, .stop = &stop};
    epx_status status = EPX_ERR_USAGE;

    if (pthread_create(&w.thread, NULL, ask_again_and_again, &w) != 0)
        return fixture_fail(s, "a thread");
    usleep(2000);
    for (int i = 0; i < 1000 && status == EPX_ERR_USAGE; i++)
        status = epx_group_destroy(s->group);
    atomic_store(&stop, 1);
    pthread_join(w.thread, NULL);
    if (status == EPX_ERR_USAGE) /* the other thread was always there */
        status = epx_group_destroy(s->group);
    if (status == EPX_OK)
        s->group = NULL;
    return status == EPX_OK ? 0 : fixture_fail(s, "epx_group_destroy");
}

static void a_group_is_not_destroyed_under_a_call(void **state)
{
    (void)state;
    for (int i = 0; i < 10; i++)
        assert_int_equal(fixture_run(1, NULL, ends_under_another_thread, NULL), 0);
}

/* The caller's own functions for device memory run while a group is destroyed, as other threads do. */
struct freed {
    epx_handle *handle;
    epx_event *event;
    int calls, found;
};

static int allocate(void **ptr, size_t bytes, void *context)
{
    (void)context;
    *ptr = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *ptr == NULL;
}

static int look_and_free(void *ptr, void *context)
{
    struct freed *f = context;

    if (f->event) {
        f->calls++;
        f->found += epx_event_query(f->event) != EPX_ERR_ARGUMENT ||
                    epx_event_record(f->event, NULL) != EPX_ERR_ARGUMENT ||
                    epx_handle_recv_poll(f->handle, 0) != EPX_ERR_ARGUMENT;
    }
    free(ptr);
    return 0;
}

/* What belongs to a group that is being destroyed is not found any more. */
static int asks_in_the_midst_of_the_end(struct fixture *s)
{
    struct freed *f = s->arg;
    epx_status status;

    f->handle = s->ht;
    if (fixture_ht(s) || epx_event_create(s->group, &f->event) != EPX_OK)
        return fixture_fail(s, "an event");
    status = epx_group_destroy(s->group);
    s->group = NULL;
    if (status != EPX_OK || !f->calls || f->found)
        return fixture_fail(s, "objects of a group that ends are found");
    return 0;
}

static void objects_end_with_their_group(void **state)
{
    struct freed f = {0};
    epx_group_config config = fixture_config(DEADLINE_MS);

    (void)state;
    config.device_alloc = allocate;
    config.device_free = look_and_free;
    config.device_context = &f;
    assert_int_equal(fixture_run(1, &config, asks_in_the_midst_of_the_end, &f), 0);
}

/* libc's, with a clock of the day that is ahead: an administrator may set it. */
static atomic_int ahead_s;

int clock_gettime(clockid_t clock, struct timespec *now)
{
    const int rc = (int)syscall(SYS_clock_gettime, clock, now);

    if (clock == CLOCK_REALTIME)
        now->tv_sec += atomic_load(&ahead_s);
    return rc;
}

static void *sleep_in_the_group(void *arg)
{
    struct worker *w = arg;

    pthread_mutex_lock(&w->group->calls); /* as a call does that waits for other ranks */
    atomic_store(w->stop, 1);
    while (atomic_load(w->stop))
        usleep(1000);
    pthread_mutex_unlock(&w->group->calls);
    return NULL;
}

/* The clock is set back by an hour as soon as it was read. */
static int waits_by_a_clock_that_nobody_sets(struct fixture *s)
{
    static const char *const words[] = {"another thread", NULL};
    atomic_int inside = 0;
    struct worker w = {.group = s->group, .stop = &inside};
    int rc;

    if (pthread_create(&w.thread, NULL, sleep_in_the_group, &w) != 0)
        return fixture_fail(s, "a thread");
    while (!atomic_load(&inside))
        usleep(100);
    atomic_store(&ahead_s, 3600);
    rc = fixture_expect(s, "epx_group_error_clear", epx_group_error_clear(s->group), EPX_ERR_TIMEOUT, words);
    atomic_store(&ahead_s, 0);
    atomic_store(&inside, 0);
    pthread_join(w.thread, NULL);
    return rc;
}

static void a_call_behind_another_ends_though_the_clock_is_set(void **state)
{
    epx_group_config config = fixture_config(100);

    (void)state;
    assert_int_equal(fixture_group_run(1, &config, waits_by_a_clock_that_nobody_sets, NULL), 0);
}

/* ---- Objects that another thread waits for ----------------------------------------------------------------------- */

/* A thread that waits behind a call of the default stream, which ends when it is told to. */
struct waiter {
    struct fixture *s;
    epx_event *event;
    pthread_t thread;
    atomic_int inside, go; /* inside: the thread's number, just before its call */
    epx_status status;
    int64_t rows;
};

static int own_number(void)
{
    return (int)syscall(SYS_gettid);
}

static void wait_to_go(void *arg)
{
    struct waiter *w = arg;

    while (!atomic_load(&w->go))
        usleep(100);
}

static void *wait_for_the_event(void *arg)
{
    struct waiter *w = arg;

    atomic_store(&w->inside, own_number());
    w->status = epx_event_sync(w->event);
    return NULL;
}

static void *wait_for_counts(void *arg)
{
    struct waiter *w = arg;

    atomic_store(&w->inside, own_number());
    w->status = epx_handle_recv_count(w->s->ht, &w->rows, NULL);
    return NULL;
}

static void *wait_for_tokens(void *arg)
{
    struct waiter *w = arg;

    atomic_store(&w->inside, own_number());
    w->status = epx_handle_recv_tokens(w->s->ht, &w->rows);
    return NULL;
}

static void *wait_whether_it_fits(void *arg)
{
    struct waiter *w = arg;
    int fits = 0;

    atomic_store(&w->inside, own_number());
    w->status = epx_handle_recv_fits(w->s->ht, &fits);
    w->rows = fits;
    return NULL;
}

/* Between its number and its call it would be running, or ready to. */
static int sleeps(int thread)
{
    char path[64], text[256] = "";
    const char *state;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/self/task/%d/stat", thread);
    file = fopen(path, "r");
    if (!file)
        return 0;
    text[fread(text, 1, sizeof(text) - 1, file)] = 0;
    fclose(file);
    state = strrchr(text, ')');
    return state && strncmp(state, ") S", 3) == 0;
}

/* The thread is inside its call, and waits. */
static int start_waiter(struct waiter *w, void *(*wait)(void *))
{
    if (pthread_create(&w->thread, NULL, wait, w) != 0)
        return fixture_fail(w->s, "a thread");
    for (int i = 0; i < 10000 && !sleeps(atomic_load(&w->inside)); i++) /* one that does not wait has ended */
        usleep(1000);
    return 0;
}

static void end_waiter(struct waiter *w)
{
    atomic_store(&w->go, 1);
    pthread_join(w->thread, NULL);
}

static int destroys_what_is_waited_for(struct fixture *s)
{
    static const char *const words[] = {"event", "other threads", NULL};
    struct waiter w = {.s = s};
    int rc;

    if (epx_event_create(s->group, &w.event) != EPX_OK || epx_stream_call(s->group, NULL, wait_to_go, &w) != EPX_OK ||
        epx_event_record(w.event, NULL) != EPX_OK || start_waiter(&w, wait_for_the_event))
        return fixture_fail(s, "an event");
    rc = fixture_expect(s, "epx_event_destroy", epx_event_destroy(w.event), EPX_ERR_USAGE, words);
    end_waiter(&w);
    if (!rc && (w.status != EPX_OK || epx_event_destroy(w.event) != EPX_OK))
        rc = fixture_fail(s, "the event that was waited for");
    return rc || fixture_ll(s);
}

static void an_event_is_not_destroyed_under_a_wait(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(1, NULL, destroys_what_is_waited_for, NULL), 0);
}

/* A wait that a recovery ends is no wait for an update that has run. */
static int recovers_under_a_wait(struct fixture *s)
{
    static void *(*const waits[])(void *) = {wait_for_counts, wait_for_tokens, wait_whether_it_fits};

    for (int i = 0; i < 30; i++) {
        struct waiter behind = {.s = s}, w = {.s = s};
        int64_t rows = -1;

        fixture_refill(s);
        if (epx_handle_update(s->ht, &s->idx, NULL, NULL) != EPX_OK ||
            epx_handle_recv_count(s->ht, &rows, NULL) != EPX_OK ||
            epx_stream_call(s->group, NULL, wait_to_go, &behind) != EPX_OK ||
            epx_handle_update(s->ht, &s->idx, NULL, NULL) != EPX_OK)
            return fixture_fail(s, "update");
        pthread_create(&w.thread, NULL, waits[i % 3], &w);
        while (!atomic_load(&w.inside))
            usleep(10);
        usleep(300); /* later the wait is slower than the recovery, and finds the failure first */
        if (epx_group_abort(s->group, EPX_ERR_SYSTEM) != EPX_OK)
            return fixture_fail(s, "epx_group_abort");
        atomic_store(&behind.go, 1);
        if (epx_group_error_clear(s->group) != EPX_OK)
            return fixture_fail(s, "epx_group_error_clear");
        pthread_join(w.thread, NULL);
        if (w.status == EPX_OK)
            return fixture_fail(s, "counts of an update that never ran");
    }
    return 0;
}

static void counts_of_an_update_that_never_ran_are_refused(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(1, NULL, recovers_under_a_wait, NULL), 0);
}

static void *wait_in_vain(void *arg)
{
    const uint64_t start = clock_ns();

    wait_for_counts(arg);
    ((struct waiter *)arg)->rows = (int64_t)((clock_ns() - start) / 1000000u); /* it has none */
    return NULL;
}

/* The deadline of each wait is its own: one that ends does not begin those of others again. */
static int several_wait_in_vain(struct fixture *s)
{
    struct waiter behind = {.s = s}, w[3] = {{.s = s}, {.s = s}, {.s = s}};
    const int timeout_ms = *(const int *)s->arg;
    int rc = 0;

    fixture_refill(s);
    if (epx_stream_call(s->group, NULL, wait_to_go, &behind) != EPX_OK ||
        epx_handle_update(s->ht, &s->idx, NULL, NULL) != EPX_OK)
        return fixture_fail(s, "update");
    for (int i = 0; i < 3; i++)
        start_waiter(&w[i], wait_in_vain);
    for (int i = 0; i < 3; i++)
        pthread_join(w[i].thread, NULL);
    for (int i = 0; i < 3; i++)
        if (w[i].status != EPX_ERR_TIMEOUT || w[i].rows >= 9 * timeout_ms) /* 4; the third took 12 */
            rc = fixture_fail(s, "a wait in vain took too long, or had no deadline");
    atomic_store(&behind.go, 1);
    (void)epx_stream_sync(s->group, NULL);
    return rc;
}

static void waits_for_counts_have_a_deadline_each(void **state)
{
    int timeout_ms = slow_ms(250);
    const epx_group_config config = fixture_config(timeout_ms);

    (void)state;
    assert_int_equal(fixture_run(1, &config, several_wait_in_vain, &timeout_ms), 0);
}

/* Who waits for an update when another thread queues the next waits for that one. */
static int updates_what_is_waited_for(struct fixture *s)
{
    struct waiter w = {.s = s};
    epx_status status;

    fixture_refill(s);
    if (epx_stream_call(s->group, NULL, wait_to_go, &w) != EPX_OK ||
        epx_handle_update(s->ht, &s->idx, NULL, NULL) != EPX_OK || start_waiter(&w, wait_for_counts))
        return fixture_fail(s, "an update");
    status = epx_handle_update(s->ht, &s->idx, NULL, NULL);
    usleep(5000);
    end_waiter(&w);
    if (status != EPX_OK || w.status != EPX_OK || w.rows != FIXTURE_TOKENS)
        return fixture_fail(s, "the counts of the last update");
    return fixture_ht(s);
}

static void a_wait_for_counts_goes_on_with_the_next_update(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(1, NULL, updates_what_is_waited_for, NULL), 0);
}

/* The same, when the update has run and the thread that queues it is not through yet. */
static const struct device_ops *real;
static epx_handle *updated;
static epx_status found;

static epx_status launch_and_wait(struct device *device, struct device_stream *stream, enum kernel_id id,
                                  const void *params, size_t bytes, int agents)
{
    epx_status status = real->launch(device, stream, id, params, bytes, agents);

    if (status == EPX_OK)
        status = real->stream_sync(device, stream);
    found = handle_poll_update(updated, "a thread that waits", 0);
    return status;
}

static int looks_before_the_update_returns(struct fixture *s)
{
    struct device_ops slow = *s->group->device->ops;
    epx_status status;

    fixture_refill(s);
    real = s->group->device->ops;
    slow.launch = launch_and_wait;
    updated = s->ht;
    s->group->device->ops = &slow;
    status = epx_handle_update(s->ht, &s->idx, NULL, NULL);
    s->group->device->ops = real;
    if (status != EPX_OK || found != EPX_OK)
        return fixture_fail(s, "an update that has run is not found");
    return fixture_ht(s);
}

static void an_update_that_has_run_is_found_at_once(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(1, NULL, looks_before_the_update_returns, NULL), 0);
}

/* Kernels that were queued before the capture use the handle's tables. */
static int destroys_under_a_capture(struct fixture *s)
{
    static const char *const words[] = {"captures a graph", NULL};
    struct waiter w = {.s = s};
    epx_graph *graph = NULL;
    int rc;

    fixture_refill(s);
    if (epx_stream_call(s->group, NULL, wait_to_go, &w) != EPX_OK ||
        epx_handle_update(s->ht, &s->idx, NULL, NULL) != EPX_OK || epx_graph_begin(s->group, NULL) != EPX_OK)
        return fixture_fail(s, "a capture");
    rc = fixture_expect(s, "epx_handle_destroy", epx_handle_destroy(s->ht), EPX_ERR_USAGE, words);
    atomic_store(&w.go, 1);
    if (epx_graph_end(s->group, NULL, &graph) != EPX_OK || epx_graph_destroy(graph) != EPX_OK)
        rc = fixture_fail(s, "the end of the capture");
    if (epx_stream_sync(s->group, NULL) != EPX_OK) /* the update reads what fixture_ht() fills */
        rc = fixture_fail(s, "the update");
    return rc || fixture_ht(s);
}

static void a_handle_is_not_destroyed_under_a_capture(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(1, NULL, destroys_under_a_capture, NULL), 0);
}

/* ---- A thread that watches --------------------------------------------------------------------------------------- */

struct watcher {
    epx_group *group;
    pthread_t thread;
    atomic_int stop, lost; /* lost: the group had no network */
};

static void *watch(void *arg)
{
    struct watcher *w = arg;

    while (!atomic_load(&w->stop)) {
        epx_group_info info = EPX_GROUP_INFO_INIT;

        (void)epx_group_error(w->group, NULL);
        if (epx_group_query(w->group, &info) != EPX_OK || !strcmp(info.net_name, "none"))
            atomic_store(&w->lost, 1);
    }
    return NULL;
}

/* It may look at the network while this thread closes and opens it. */
static int recovers_beside_a_watcher(struct fixture *s)
{
    struct watcher w = {.group = s->group};
    int rc = 0;

    if (pthread_create(&w.thread, NULL, watch, &w) != 0)
        return fixture_fail(s, "a thread");
    for (int i = 0; i < 5 && !rc; i++)
        rc = (s->rank == i % 2 && epx_group_abort(s->group, EPX_ERR_SYSTEM) != EPX_OK) || fixture_meet(s) ||
             epx_group_error_clear(s->group) != EPX_OK;
    atomic_store(&w.stop, 1);
    pthread_join(w.thread, NULL);
    if (rc || atomic_load(&w.lost))
        return fixture_fail(s, rc ? "a recovery" : "a watcher found no network");
    return fixture_ll(s);
}

static void a_group_recovers_beside_a_thread_that_watches(void **state)
{
    epx_group_config config = fixture_config(DEADLINE_MS);

    (void)state;
    config.ranks_per_node = 1;
    assert_int_equal(fixture_run(2, &config, recovers_beside_a_watcher, NULL), 0);
}

/* ---- A recovery that fails --------------------------------------------------------------------------------------- */

/* Nobody can open a network while rank 0 has set the limit of descriptors to `files`. */
static epx_status clear_with(struct fixture *s, const struct rlimit *files)
{
    epx_status status;

    if (fixture_meet(s) || (s->rank == 0 && setrlimit(RLIMIT_NOFILE, files) != 0) || fixture_meet(s))
        return EPX_ERR_SYSTEM;
    status = epx_group_error_clear(s->group);
    return fixture_meet(s) ? EPX_ERR_SYSTEM : status;
}

/* The network is closed when the recovery fails, and its rings are freed: a launch finds neither. */
static int launch_after_a_failed_recovery(struct fixture *s)
{
    const struct rlimit *files = s->arg, none = {0, files->rlim_max};
    epx_graph *graph = NULL;

    fixture_refill(s);
    if (fixture_ll(s) || epx_graph_begin(s->group, NULL) != EPX_OK ||
        epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL) != EPX_OK ||
        epx_graph_end(s->group, NULL, &graph) != EPX_OK || fixture_meet(s))
        return fixture_fail(s, "recording a dispatch");
    if (epx_group_abort(s->group, EPX_ERR_SYSTEM) != EPX_OK || clear_with(s, &none) == EPX_OK)
        return fixture_fail(s, "a recovery without descriptors");
    if (fixture_sync(s, epx_graph_launch(graph, NULL)) == EPX_OK || fixture_meet(s))
        return fixture_fail(s, "a launch after a recovery that failed");
    return clear_with(s, files) == EPX_OK ? fixture_ll(s) : fixture_fail(s, "a recovery with descriptors");
}

static void a_launch_after_a_failed_recovery_fails(void **state)
{
    epx_group_config config = fixture_config(DEADLINE_MS);
    struct rlimit files;

    (void)state;
    config.ranks_per_node = 1;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &files), 0);
    assert_int_equal(fixture_run(2, &config, launch_after_a_failed_recovery, &files), 0);
}

/* ---- fork -------------------------------------------------------------------------------------------------------- */

/* In the child: 0, or the number of the first call that did not refuse. */
static int calls_in_the_child(struct fixture *s)
{
    epx_group_config config = fixture_config(DEADLINE_MS);
    epx_group_info info = EPX_GROUP_INFO_INIT;
    epx_group *made = NULL;
    epx_stream stream = NULL;
    void *memory = NULL;
    const epx_status got[] = {epx_group_query(s->group, &info),
                              epx_group_error(s->group, NULL),
                              epx_stream_sync(s->group, NULL),
                              epx_stream_create(s->group, &stream),
                              epx_alloc(s->group, 100, &memory),
                              epx_handle_update(s->ll, &s->idx, NULL, NULL),
                              epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL),
                              epx_combine(s->ll, &s->ll_cin, &s->cout, NULL, NULL),
                              epx_handle_destroy(s->ll),
                              epx_group_error_clear(s->group),
                              epx_group_destroy(s->group),
                              epx_group_create(&made, s->boot, &config)};

    for (size_t i = 0; i < sizeof(got) / sizeof(*got); i++)
        if (got[i] != EPX_ERR_USAGE || !strstr(epx_last_error(), "fork"))
            return (int)i + 1;
    return 0;
}

static int forks(struct fixture *s)
{
    const uint64_t start = clock_ns();
    pid_t pid;
    int status = 0;

    if (fixture_ll(s))
        return -1;
    pid = s->rank == 0 ? child_fork() : 0;
    if (s->rank == 0 && pid == 0)
        _exit(calls_in_the_child(s));
    if (s->rank == 0 && (waitpid(pid, &status, 0) != pid || status != 0))
        return fixture_fail(s, "a call in the child did not refuse");
    if (clock_ns() - start > DEADLINE_MS / 2 * (uint64_t)1000000)
        return fixture_fail(s, "the child has waited");
    return fixture_ll(s) || fixture_ht(s);
}

static void a_child_of_fork_is_refused_and_the_parent_goes_on(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(2, NULL, forks, NULL), 0);
}

static void *create_alone(void *arg)
{
    const epx_group_config config = fixture_config(DEADLINE_MS);
    epx_group *group = NULL;

    *(epx_status *)arg = epx_group_create(&group, NULL, &config);
    return NULL;
}

/* TCP sockets of this process, those of libfabric among them. */
static int count_sockets(void)
{
    int count = 0;

    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_storage at;
        socklen_t length = sizeof(at);

        count += !getsockname(fd, (struct sockaddr *)&at, &length) && at.ss_family == AF_INET;
    }
    return count;
}

/* The thread that creates a group waits for another rank, which never comes, with locks that a child inherits. */
static void a_child_that_is_forked_beside_a_creation_is_refused(void **state)
{
    const int before = count_sockets();
    epx_status status = EPX_OK;
    pthread_t thread;
    int rc = -1;
    pid_t pid;

    (void)state;
    child_world(2);
    setenv("RANK", "0", 1);
    child_set_int("EPX_BOOT_TIMEOUT_MS", slow_ms(600));
    assert_int_equal(pthread_create(&thread, NULL, create_alone, &status), 0);
    for (int i = 0; i < 10000 && count_sockets() == before; i++) /* it listens for the other rank then */
        usleep(1000);
    pid = child_fork();
    if (pid == 0) {
        alarm(60);
        create_alone(&status);
        _exit(status == EPX_ERR_USAGE && strstr(epx_last_error(), "fork") ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &rc, 0), pid);
    pthread_join(thread, NULL);
    unsetenv("EPX_BOOT_TIMEOUT_MS");
    assert_int_equal(rc, 0);
    assert_int_equal(status, EPX_ERR_TIMEOUT);
}

/* A rank that is killed looks alive where a child of it keeps its sockets: a data loader, for instance. They are known
 * a moment after the group was created. */
static int forks_without_sockets(struct fixture *s)
{
    int clean = 0;

    if (!count_sockets())
        return fixture_fail(s, "a rank without sockets");
    for (int i = 0; i < 100 && !clean; i++) {
        const pid_t pid = child_fork();

        if (pid == 0)
            _exit(count_sockets());
        clean = pid > 0 && child_succeeded(pid);
        usleep(clean ? 0 : 10000);
    }
    if (!clean || epx_mask_clean(s->group, NULL) != EPX_OK)
        return fixture_fail(s, clean ? "epx_mask_clean" : "the child has sockets of its parent");
    return 0;
}

static int be_rank_that_forks(int rank, void *arg)
{
    epx_group_config config = fixture_config(DEADLINE_MS);

    (void)arg;
    config.enable_mask = 1;
    config.ranks_per_node = 1;
    snprintf(config.net, sizeof(config.net), "ofi:tcp");
    return fixture_group(rank, 2, NULL, &config, forks_without_sockets, NULL) != 0;
}

static void a_child_has_no_sockets_of_its_parent(void **state)
{
    pid_t pids[2];

    (void)state;
    child_world(2);
    assert_int_equal(child_start_ranks(pids, 2, be_rank_that_forks, NULL), 0);
    assert_int_equal(child_failures(pids, 2), 0);
}

UNIT_TESTS(a_stream_of_another_group_is_refused, a_group_is_used_by_several_threads,
           a_group_is_not_destroyed_under_a_call, objects_end_with_their_group, an_event_is_not_destroyed_under_a_wait,
           a_wait_for_counts_goes_on_with_the_next_update, an_update_that_has_run_is_found_at_once,
           counts_of_an_update_that_never_ran_are_refused, waits_for_counts_have_a_deadline_each,
           a_handle_is_not_destroyed_under_a_capture, a_group_recovers_beside_a_thread_that_watches,
           a_launch_after_a_failed_recovery_fails, a_call_behind_another_ends_though_the_clock_is_set,
           a_child_of_fork_is_refused_and_the_parent_goes_on, a_child_that_is_forked_beside_a_creation_is_refused,
           a_child_has_no_sockets_of_its_parent)

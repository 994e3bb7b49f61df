/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Waits. Another thread that computes in Python keeps a thread that has let go of Python's lock for 5 ms: so the first
 * 300 us are waited with it, which is longer than nearly all waits. Then it is let go of, and taken back every 50 ms:
 * signals have their turn then, and a group that was destroyed meanwhile is found.
 */
#include <errno.h>
#include <semaphore.h>
#include <stdlib.h>
#include <time.h>

#include "calls.h"

enum { WITH_LOCK_US = 300, SLICE_US = 50000 };

int wait_counts(const struct call *call, PyObject *handle, int64_t *rows, int64_t *expert_counts)
{
    epx_handle *address = handle_of(call, handle);
    epx_status status = address ? library.epx_handle_recv_poll(address, WITH_LOCK_US) : EPX_ERR_USAGE;

    while (address && status == EPX_ERR_NOT_READY) {
        Py_BEGIN_ALLOW_THREADS status = library.epx_handle_recv_poll(address, SLICE_US);
        Py_END_ALLOW_THREADS if (PyErr_CheckSignals()) return -1;
        address = handle_of(call, handle);
    }
    if (!address || library_check(status))
        return -1;
    return library_check(library.epx_handle_recv_count(address, rows, expert_counts));
}

/* Both the waiter and the stream refer to it: a waiter that is interrupted leaves it to the stream. */
struct mark {
    sem_t reached;
    int references;
};

static void mark_put(struct mark *mark)
{
    if (__atomic_sub_fetch(&mark->references, 1, __ATOMIC_ACQ_REL) == 0) { /* pairs with itself */
        (void)sem_destroy(&mark->reached);
        free(mark);
    }
}

static void mark_reach(void *arg)
{
    struct mark *mark = arg;

    (void)sem_post(&mark->reached);
    mark_put(mark);
}

static int wait_mark(struct mark *mark, int64_t us)
{
    struct timespec until;

    (void)clock_gettime(CLOCK_REALTIME, &until); /* sem_timedwait's */
    until.tv_nsec += us * 1000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return sem_timedwait(&mark->reached, &until) == 0;
}

static int wait_slices(const struct call *call, struct mark *mark)
{
    int reached = wait_mark(mark, WITH_LOCK_US);

    while (!reached) {
        Py_BEGIN_ALLOW_THREADS reached = wait_mark(mark, SLICE_US);
        Py_END_ALLOW_THREADS if (PyErr_CheckSignals() || !group_of(call)) return -1;
    }
    return 0;
}

int wait_queued(const struct call *call)
{
    epx_group *group = group_of(call);
    struct mark *mark = group ? malloc(sizeof(*mark)) : NULL;
    epx_status status;
    PyObject *settled;
    int failed;

    if (!mark) {
        if (group)
            PyErr_NoMemory();
        return -1;
    }
    (void)sem_init(&mark->reached, 0, 0);
    mark->references = 2;
    status = library.epx_stream_call(group, NULL, mark_reach, mark);
    if (status != EPX_OK)
        mark->references = 1;
    failed = status != EPX_OK ? library_check(status) : wait_slices(call, mark);
    mark_put(mark);
    if (failed || !(group = group_of(call)))
        return -1;
    if (library.epx_group_error(group, NULL) == EPX_OK)
        return 0;
    settled = call_helper("settle", "(O)", call->group); /* of a masked rank it is no error */
    Py_XDECREF(settled);
    return settled ? 0 : -1;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The rest of libepx_nccl.so: memory, windows, words. */
#include <nccl.h>

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <strings.h>

#include "nccl_ep/driver.h"
#include "standin/standin.h"
#include "util/env.h"
#include "util/log.h"

static _Thread_local char last_message[1200];

ncclResult_t standin_fail(ncclResult_t result, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(last_message, sizeof(last_message), format, args);
    va_end(args);
    log_line(LOG_INFO, "%s", last_message);
    return result;
}

const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return last_message;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[] = {"success",
                                        "a CUDA call failed",
                                        "a system call failed",
                                        "internal error",
                                        "an argument is wrong",
                                        "the call is not allowed now",
                                        "another rank failed",
                                        "still in progress"};

    return (unsigned int)result < sizeof(texts) / sizeof(texts[0]) ? texts[result] : "unknown result";
}

ncclResult_t ncclGetVersion(int *version)
{
    if (!version)
        return standin_fail(ncclInvalidArgument, "ncclGetVersion: version: expected a pointer, got NULL");
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

static int device_is(const char *name)
{
    const char *device = env_string("EPX_DEVICE");

    return device && !strcasecmp(device, name);
}

struct piece { /* host memory that ncclMemAlloc gave */
    void *ptr;
    struct piece *next;
};

static pthread_mutex_t pieces_lock = PTHREAD_MUTEX_INITIALIZER;
static struct piece *pieces;

static ncclResult_t host_alloc(void **ptr, size_t size)
{
    struct piece *piece = malloc(sizeof(*piece));

    if (!piece || posix_memalign(ptr, NCCL_WIN_REQUIRED_ALIGNMENT, size ? size : 1)) {
        *ptr = NULL;
        free(piece);
        return standin_fail(ncclSystemError, "ncclMemAlloc: no %zu bytes", size);
    }
    piece->ptr = *ptr;
    pthread_mutex_lock(&pieces_lock);
    piece->next = pieces;
    pieces = piece;
    pthread_mutex_unlock(&pieces_lock);
    return ncclSuccess;
}

static int host_free(void *ptr)
{
    struct piece **link = &pieces, *piece;

    pthread_mutex_lock(&pieces_lock);
    while (*link && (*link)->ptr != ptr)
        link = &(*link)->next;
    piece = *link;
    if (piece)
        *link = piece->next;
    pthread_mutex_unlock(&pieces_lock);
    if (!piece)
        return -1;
    free(piece);
    free(ptr);
    return 0;
}

ncclResult_t ncclMemAlloc(void **ptr, size_t size)
{
    const struct driver *driver = device_is("cuda") ? driver_open() : NULL;
    driver_address at = 0;

    if (!ptr)
        return standin_fail(ncclInvalidArgument, "ncclMemAlloc: ptr: expected a pointer, got NULL");
    *ptr = NULL;
    if (device_is("hip"))
        return standin_fail(ncclInvalidUsage, "ncclMemAlloc: there is none for AMD's GPUs: use hipMalloc");
    if (!device_is("cuda"))
        return host_alloc(ptr, size);
    if (!driver || driver->mem_alloc(&at, size ? size : 1) != DRIVER_SUCCESS)
        return standin_fail(ncclUnhandledCudaError, "ncclMemAlloc: no %zu bytes on the current GPU (is a device set?)",
                            size);
    *ptr = (void *)(uintptr_t)at;
    return ncclSuccess;
}

ncclResult_t ncclMemFree(void *ptr)
{
    const struct driver *driver = device_is("cuda") ? driver_open() : NULL;

    if (ptr && (device_is("cuda") ? !driver || driver->mem_free((driver_address)(uintptr_t)ptr) != DRIVER_SUCCESS
                                  : host_free(ptr)))
        return standin_fail(ncclInvalidArgument, "ncclMemFree: expected a pointer of ncclMemAlloc, got %p", ptr);
    return ncclSuccess;
}

/* ---- Windows ----------------------------------------------------------------------------------------------------- */

struct ncclWindow_vidmem {
    ncclComm_t comm;
    void *base;
    struct ncclWindow_vidmem *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ncclWindow_vidmem *windows;

/* Where the window hangs in the list, with the lock held; NULL: it is none of this communicator's. */
static struct ncclWindow_vidmem **find(ncclComm_t comm, ncclWindow_t win)
{
    struct ncclWindow_vidmem **link = &windows;

    while (*link && *link != win)
        link = &(*link)->next;
    return *link && (*link)->comm == comm ? link : NULL;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int flags)
{
    struct ncclWindow_vidmem *window;

    (void)flags; /* symmetric or not: nothing is mapped */
    if (!comm_known(comm) || !buff || !size || !win)
        return standin_fail(
            ncclInvalidArgument,
            "ncclCommWindowRegister: expected a communicator, memory and a place for the window, got %p, "
            "%zu bytes at %p, %p",
            (void *)comm, size, buff, (void *)win);
    window = malloc(sizeof(*window));
    if (!window)
        return standin_fail(ncclSystemError, "ncclCommWindowRegister: no memory");
    pthread_mutex_lock(&lock);
    *window = (struct ncclWindow_vidmem){.comm = comm, .base = buff, .next = windows};
    windows = window;
    pthread_mutex_unlock(&lock);
    *win = window;
    return ncclSuccess;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win)
{
    struct ncclWindow_vidmem **link, *window = NULL;

    pthread_mutex_lock(&lock);
    link = find(comm, win);
    if (link) {
        window = *link;
        *link = window->next;
    }
    pthread_mutex_unlock(&lock);
    free(window);
    return link ? ncclSuccess
                : standin_fail(ncclInvalidArgument, "ncclCommWindowDeregister: win: expected a window of comm, got %p",
                               (void *)win);
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **ptr)
{
    struct ncclWindow_vidmem **link;

    if (!ptr)
        return standin_fail(ncclInvalidArgument, "ncclWinGetUserPtr: ptr: expected a pointer, got NULL");
    pthread_mutex_lock(&lock);
    link = find(comm, win);
    *ptr = link ? (*link)->base : NULL;
    pthread_mutex_unlock(&lock);
    return link ? ncclSuccess
                : standin_fail(ncclInvalidArgument, "ncclWinGetUserPtr: win: expected a window of comm, got %p",
                               (void *)win);
}

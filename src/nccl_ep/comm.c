/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a communicator is good for here: rank, number of ranks, and an all-gather of host memory for EPX's bootstrap.
 *
 * Its library is found in the process by name, never linked: the stand-in (libepx_nccl.so) gathers host memory itself;
 * NCCL gathers GPU memory, so that bytes go there and back:
 *
 *      host --copy--> [mine]  --ncclAllGather-->  [rank 0 | rank 1 | ...] --copy--> host
 *      \___________ on a stream of its own __________/
 */
#include "nccl_ep/compat.h"

#include <dlfcn.h>
#include <time.h>

#include "nccl_ep/driver.h"
#include "util/clock.h"
#include "util/log.h"

enum { DEFAULT_TIMEOUT_MS = 100000 };

/* The stand-in, if it is the one that made the communicator. A process may have NCCL too: torch brings its own. */
static void *standin_of(ncclComm_t comm, void *library)
{
    int (*gather)(ncclComm_t comm, const void *send, void *recv, size_t bytes);
    Dl_info where;

    *(void **)&gather = dlsym(library, "epxNcclHostAllGather");
    if (!gather || gather(comm, NULL, NULL, 0) || !dladdr(*(void **)&gather, &where))
        return NULL;
    return dlopen(where.dli_fname, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
}

/* The library that a communicator belongs to. Some are opened out of sight of RTLD_DEFAULT, as Python does it. */
static void *library_of(ncclComm_t comm)
{
    void *const places[] = {RTLD_DEFAULT, dlopen("libepx_nccl.so.0", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD),
                            dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)};
    void *library = NULL;

    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]) && !library; i++)
        library = standin_of(comm, places[i]); /* one that is not loaded is NULL, which is RTLD_DEFAULT again */
    if (library || dlsym(RTLD_DEFAULT, "ncclCommUserRank"))
        return library ? library : RTLD_DEFAULT;
    return places[2] ? places[2] : places[1];
}

static ncclResult_t ask(const struct comm *comm, void *library, const char *name, int *value)
{
    ncclResult_t (*query)(const ncclComm_t comm, int *value);
    ncclResult_t result;

    *(void **)&query = dlsym(library, name);
    if (!query)
        return compat_fail(
            ncclInvalidUsage,
            "ncclEpCreateGroup: comm: no %s in this process: expected NCCL (libnccl.so.2) or EPX's stand-in "
            "(libepx_nccl.so) to be linked or loaded",
            name);
    result = query(comm->comm, value);
    if (result != ncclSuccess)
        return compat_fail(result, "ncclEpCreateGroup: comm: %s returned %d", name, (int)result);
    return ncclSuccess;
}

static int current_device(void)
{
    const struct driver *driver = driver_open();
    int device = 0;

    return driver && driver->current_device(&device) == DRIVER_SUCCESS ? device : 0;
}

ncclResult_t comm_open(struct comm *comm, ncclComm_t given)
{
    ncclResult_t result;
    void *library;

    if (!given)
        return compat_fail(ncclInvalidArgument, "ncclEpCreateGroup: comm: expected a communicator, got NULL");
    library = library_of(given);
    comm->comm = given;
    *(void **)&comm->host_gather = dlsym(library, "epxNcclHostAllGather");
    *(void **)&comm->gather = dlsym(library, "ncclAllGather");
    *(void **)&comm->async_error = dlsym(library, "ncclCommGetAsyncError");
    *(void **)&comm->window_pointer = dlsym(library, "ncclWinGetUserPtr");
    comm->real = !comm->host_gather || comm->host_gather(given, NULL, NULL, 0) != 0;
    result = ask(comm, library, "ncclCommUserRank", &comm->rank);
    if (result == ncclSuccess)
        result = ask(comm, library, "ncclCommCount", &comm->nranks);
    if (result == ncclSuccess && comm->real)
        result = ask(comm, library, "ncclCommCuDevice", &comm->device_index);
    else if (result == ncclSuccess)
        comm->device_index = current_device();
    return result;
}

/* ---- Gathering through a GPU ------------------------------------------------------------------------------------- */

static void rest(void)
{
    const struct timespec pause = {.tv_nsec = 50000};

    nanosleep(&pause, NULL);
}

/* NCCL has taken the operation (a communicator need not block), and the stream has done it. */
static int await(const struct comm *comm, const struct driver *driver, ncclResult_t begun, void *stream)
{
    const int ms = comm->timeout_ms ? comm->timeout_ms : DEFAULT_TIMEOUT_MS;
    const uint64_t deadline = clock_ns() + (uint64_t)ms * 1000000u;
    int state = DRIVER_NOT_READY;

    while (begun == ncclInProgress && comm->async_error && clock_ns() < deadline) {
        rest();
        if (comm->async_error(comm->comm, &begun) != ncclSuccess)
            break;
    }
    if (begun != ncclSuccess) {
        log_line(LOG_ERROR, "rank %d: ncclAllGather for the bootstrap returned %d", comm->rank, (int)begun);
        return -1;
    }
    while ((state = driver->stream_query(stream)) == DRIVER_NOT_READY && clock_ns() < deadline)
        rest();
    if (state != DRIVER_SUCCESS)
        log_line(LOG_ERROR, "rank %d: ncclAllGather for the bootstrap: %s (CUDA %d)", comm->rank,
                 state == DRIVER_NOT_READY ? "not within its deadline" : "failed", state);
    return state == DRIVER_SUCCESS ? 0 : -1;
}

static int gather_on(const struct comm *comm, const struct driver *driver, driver_address at, void *stream,
                     const void *send, void *recv, size_t bytes)
{
    const driver_address all = at + (bytes + 255) / 256 * 256;

    if (driver->copy_in(at, send, bytes, stream) != DRIVER_SUCCESS)
        return -1;
    if (await(comm, driver,
              comm->gather((const void *)(uintptr_t)at, (void *)(uintptr_t)all, bytes, ncclUint8, comm->comm,
                           (cudaStream_t)stream),
              stream))
        return -1;
    return driver->copy_out(recv, all, bytes * (size_t)comm->nranks) == DRIVER_SUCCESS ? 0 : -1;
}

/* The GPU's context is current. What a failed operation may still write to is left to the end of the process. */
static int gather_in_context(const struct comm *comm, const struct driver *driver, const void *send, void *recv,
                             size_t bytes)
{
    driver_address at = 0;
    void *stream = NULL;
    int rc = -1;

    if (!comm->gather ||
        driver->mem_alloc(&at, (bytes + 255) / 256 * 256 + bytes * (size_t)comm->nranks) != DRIVER_SUCCESS)
        return -1;
    if (driver->stream_create(&stream, 1) == DRIVER_SUCCESS) /* not ordered after the default stream */
        rc = gather_on(comm, driver, at, stream, send, recv, bytes);
    if (rc)
        return rc;
    driver->stream_destroy(stream);
    driver->mem_free(at);
    return 0;
}

static int gather_by_gpu(const struct comm *comm, const void *send, void *recv, size_t bytes)
{
    const struct driver *driver = driver_open();
    void *context = NULL;
    int device, rc;

    if (!driver || driver->device_get(&device, comm->device_index) != DRIVER_SUCCESS ||
        driver->context_retain(&context, device) != DRIVER_SUCCESS) {
        log_line(LOG_ERROR, "rank %d: no CUDA driver to gather through GPU %d", comm->rank, comm->device_index);
        return -1;
    }
    rc = driver->context_push(context) == DRIVER_SUCCESS ? 0 : -1;
    if (!rc) {
        rc = gather_in_context(comm, driver, send, recv, bytes);
        driver->context_pop(&context);
    }
    driver->context_release(device);
    return rc;
}

int comm_allgather(void *context, const void *send, void *recv, size_t bytes)
{
    const struct comm *comm = context;

    return comm->real ? gather_by_gpu(comm, send, recv, bytes) : comm->host_gather(comm->comm, send, recv, bytes);
}

/* ---- Windows and GPUs -------------------------------------------------------------------------------------------- */

ncclResult_t comm_window(const struct comm *comm, const char *call, const char *name, ncclWindow_t window, void **base)
{
    *base = NULL;
    if (!comm->window_pointer)
        return compat_fail(ncclInvalidUsage,
                           "%s: %s.win_hdl: this NCCL has no ncclWinGetUserPtr (it came with 2.29): set data as well",
                           call, name);
    if (comm->window_pointer(comm->comm, window, base) != ncclSuccess || !*base)
        return compat_fail(ncclInvalidArgument, "%s: %s.win_hdl: expected a window of the group's communicator, got %p",
                           call, name, (void *)window);
    return ncclSuccess;
}

int stream_capturing(const struct ncclEpGroup *group, cudaStream_t stream)
{
    int (*query)(cudaStream_t stream, int *status) = NULL;
    void *driver = group->is_cpu ? NULL : dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    int status = 0;

    /* A GPU's driver knows; on the CPU device, the stand-in for the runtime if the program has it. */
    *(void **)&query = driver ? dlsym(driver, "cuStreamIsCapturing") : dlsym(RTLD_DEFAULT, "cudaStreamIsCapturing");
    status = query && query(stream, &status) == 0 && status != 0;
    if (driver)
        dlclose(driver);
    return status;
}

/* Compute capability times ten; 0: nobody knows. */
static int capability(int is_cpu, int device_index)
{
    const struct driver *driver = is_cpu ? NULL : driver_open();
    int (*ask_runtime)(int *value, int attribute, int device) = NULL;
    int device, major = 0, minor = 0;

    *(void **)&ask_runtime = is_cpu ? dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute") : NULL;
    if (ask_runtime && !ask_runtime(&major, DRIVER_CAPABILITY_MAJOR, 0) &&
        !ask_runtime(&minor, DRIVER_CAPABILITY_MINOR, 0))
        return major * 10 + minor;
    if (driver && driver->device_get(&device, device_index) == DRIVER_SUCCESS &&
        driver->device_attribute(&major, DRIVER_CAPABILITY_MAJOR, device) == DRIVER_SUCCESS &&
        driver->device_attribute(&minor, DRIVER_CAPABILITY_MINOR, device) == DRIVER_SUCCESS)
        return major * 10 + minor;
    return 0;
}

int device_has_nvfp4(int is_cpu, int device_index)
{
    static const int have[] = {100, 103, 110, 120, 121};
    const int mine = capability(is_cpu, device_index);

    for (size_t i = 0; i < sizeof(have) / sizeof(have[0]); i++)
        if (mine == have[i])
            return 1;
    return is_cpu && !mine; /* EPX itself has it everywhere */
}

int gpu_multiprocessors(int device_index)
{
    const struct driver *driver = driver_open();
    int device, count = 0;

    if (!driver || driver->device_get(&device, device_index) != DRIVER_SUCCESS ||
        driver->device_attribute(&count, DRIVER_MULTIPROCESSOR_COUNT, device) != DRIVER_SUCCESS)
        return 0;
    return count;
}

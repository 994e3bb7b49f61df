/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU as a device: its operations table, plain memory, who can share memory with whom, thread creation. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/arrivals.h"
#include "device/cpu/cpu.h"
#include "util/descriptor.h"
#include "util/status.h"

static epx_status cpu_open(int index, struct device **device)
{
    struct cpu_device *cpu = calloc(1, sizeof(*cpu));

    (void)index; /* there is one CPU device, whatever the number */
    if (!cpu)
        return fail(EPX_ERR_MEMORY, "cpu device: no memory for %zu bytes", sizeof(*cpu));
    cpu->base.ops = &cpu_device_ops;
    cpu->kernels = cpu_kernels;
    *device = &cpu->base;
    return EPX_OK;
}

static void cpu_close(struct device *device)
{
    free(device);
}

/* ---- Identity ----------------------------------------------------------------------------------------------- */

/*
 * Two ranks map each other's heaps through /proc/PID/fd/FD. That works on one booted kernel, where both see the same
 * process numbers, and where they run as the same user of the same user namespace.
 */
struct identity {
    char name[8];
    char boot[36]; /* text of the boot id, without the end of line */
    uint32_t user;
    uint64_t pid_namespace;
    uint64_t user_namespace;
};
EPX_STATIC_ASSERT(sizeof(struct identity) == 64, "travels through the bootstrap");

static epx_status read_boot_id(char boot[36])
{
    static const char path[] = "/proc/sys/kernel/random/boot_id";
    int fd = fd_own(open(path, O_RDONLY | O_CLOEXEC));
    ssize_t got;

    if (fd < 0)
        return fail_errno(EPX_ERR_SYSTEM, "cpu device: cannot open %s", path);
    got = read(fd, boot, 36);
    if (got != 36) {
        close(fd);
        return fail(EPX_ERR_SYSTEM, "cpu device: %s: expected 36 characters, got %zd", path, got);
    }
    close(fd);
    return EPX_OK;
}

static uint64_t namespace_inode(const char *path)
{
    struct stat st;

    /* A kernel without this kind of namespace has only one, so that 0 is as good a name as any. */
    return stat(path, &st) == 0 ? (uint64_t)st.st_ino : 0;
}

/* A processor is as near to one card as to another, as far as is known here. */
void cpu_pci(struct device *device, char text[DEVICE_PCI])
{
    (void)device;
    text[0] = 0;
}

static epx_status cpu_identity(struct device *device, uint8_t id[64])
{
    struct identity identity = {.name = "cpu"};
    epx_status status = read_boot_id(identity.boot);

    (void)device;
    if (status != EPX_OK)
        return status;
    identity.user = (uint32_t)geteuid();
    identity.pid_namespace = namespace_inode("/proc/self/ns/pid");
    identity.user_namespace = namespace_inode("/proc/self/ns/user");
    memcpy(id, &identity, sizeof(identity));
    return EPX_OK;
}

/* ---- Agents and threads ------------------------------------------------------------------------------------- */

/* CPUs that this process may run on: a launcher that pins ranks is respected. */
static int usable_cpus(void)
{
    int size, n;

    for (size = 1024; size <= 1 << 20; size *= 2) {
        cpu_set_t *set = CPU_ALLOC(size);
        int rc, error;

        if (!set)
            break;
        rc = sched_getaffinity(0, CPU_ALLOC_SIZE(size), set);
        error = errno;
        n = rc == 0 ? CPU_COUNT_S(CPU_ALLOC_SIZE(size), set) : 0;
        CPU_FREE(set);
        if (rc == 0)
            return n;
        if (error != EINVAL) /* EINVAL: the kernel knows more CPUs than the set has room for */
            break;
    }
    n = (int)sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? n : 1;
}

static int cpu_default_agents(struct device *device, int local_ranks)
{
    int agents = usable_cpus() / (local_ranks > 0 ? local_ranks : 1);

    (void)device;
    if (agents < 1)
        return 1;
    return agents < CPU_MAX_AGENTS ? agents : CPU_MAX_AGENTS;
}

epx_status cpu_thread_start(pthread_t *thread, const char *name, void *(*main)(void *), void *arg)
{
    sigset_t all, old;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* the new thread inherits it */
    rc = pthread_create(thread, NULL, main, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc != 0) {
        errno = rc;
        return fail_errno(EPX_ERR_SYSTEM, "cpu device: cannot start thread %s", name);
    }
    pthread_setname_np(*thread, name);
    return EPX_OK;
}

/* ---- Memory ------------------------------------------------------------------------------------------------- */

enum { MEM_ALIGN = 256 };

/* calloc leaves large blocks untouched (the kernel's zero pages), which an aligned allocation and memset would not. The
 * block's own address is stored in the word below the pointer handed out. */
static epx_status cpu_mem_alloc(struct device *device, size_t bytes, void **ptr)
{
    char *block, *aligned;

    (void)device;
    *ptr = NULL;
    block = bytes <= SIZE_MAX - 2 * MEM_ALIGN ? calloc(1, bytes + 2 * MEM_ALIGN) : NULL;
    if (!block)
        return fail(EPX_ERR_MEMORY, "cpu device: no memory for %zu bytes", bytes);
    aligned = block + 2 * MEM_ALIGN - (uintptr_t)block % MEM_ALIGN - MEM_ALIGN;
    if (aligned - block < (ptrdiff_t)sizeof(void *))
        aligned += MEM_ALIGN;
    memcpy(aligned - sizeof(void *), &block, sizeof(void *));
    *ptr = aligned;
    return EPX_OK;
}

static void cpu_mem_free(struct device *device, void *ptr)
{
    void *block;

    (void)device;
    if (!ptr)
        return;
    memcpy(&block, (char *)ptr - sizeof(void *), sizeof(void *));
    free(block);
}

/* Word by word where it can be: a rank that the others have left out may still look at signals and abort words while
 * they are reset, and where the host reads a heap by copies, its words are written meanwhile. */
static epx_status cpu_copy(struct device *device, void *to, const void *from, size_t bytes)
{
    const size_t words = ((uintptr_t)to | (uintptr_t)from) % sizeof(uint64_t) ? 0 : bytes / sizeof(uint64_t);
    const size_t done = words * sizeof(uint64_t);

    (void)device;
    for (size_t i = 0; i < words; i++)
        __atomic_store_n((uint64_t *)to + i, __atomic_load_n((const uint64_t *)from + i, __ATOMIC_RELAXED),
                         __ATOMIC_RELAXED);
    if (bytes > done)
        memcpy((char *)to + done, (const char *)from + done, bytes - done);
    return EPX_OK;
}

/* Its agents take what they need when they need it. */
epx_status cpu_clock(struct device *device, int64_t *ahead_ns, uint64_t *error_ns)
{
    (void)device;
    *ahead_ns = 0;
    *error_ns = 0;
    return EPX_OK;
}

epx_status cpu_rows_reserve(struct device *device, size_t row_bytes, int agents)
{
    (void)device;
    (void)row_bytes;
    (void)agents;
    return EPX_OK;
}

/* Its memory is the host's: cards reach it as such, and it is where heaps lie in any case. */
epx_status cpu_heap_place(struct device *device, enum heap_place place)
{
    (void)device;
    (void)place;
    return EPX_OK;
}

epx_status cpu_fabric(struct device *device, uint8_t id[64])
{
    (void)device;
    (void)id;
    return fail(EPX_ERR_UNSUPPORTED, "memory of a CPU has no fabric handles");
}

epx_status cpu_heap_dmabuf(struct device *device, const struct heap *heap, int *fd)
{
    (void)device;
    (void)heap;
    *fd = -1;
    return fail(EPX_ERR_UNSUPPORTED, "device cpu: its heaps are host memory, which has no dma-buf");
}

int cpu_arrivals(struct device *device)
{
    (void)device;
    return ARRIVALS_VISIBLE;
}

epx_status cpu_use(struct device *device)
{
    (void)device;
    return EPX_OK;
}

epx_status cpu_flush_arrivals(struct device *device)
{
    (void)device;
    return EPX_OK;
}

/* ---- Regions: all memory of the process is one, for its own ranks ------------------------------------------------ */

uint64_t cpu_region_id(struct device *device, const void *data)
{
    (void)device;
    return data != NULL;
}

epx_status cpu_region_export(struct device *device, const void *data, struct heap_export *region)
{
    (void)device;
    (void)data;
    *region = (struct heap_export){.bytes = UINT64_MAX, .address = 0, .pid = (int64_t)getpid()};
    return EPX_OK;
}

epx_status cpu_region_open(struct device *device, const struct heap_export *region, void **base)
{
    (void)device;
    *base = NULL; /* as in the exporting rank: the same process */
    if (region->pid == (int64_t)getpid())
        return EPX_OK;
    return fail(EPX_ERR_UNSUPPORTED, "device cpu: only ranks of one process reach each other's ordinary memory");
}

void cpu_region_close(struct device *device, const struct heap_export *region, void *base, int now)
{
    (void)device;
    (void)region;
    (void)base;
    (void)now;
}

const struct device_ops cpu_device_ops = {
    .name = "cpu",
    .kind = EPX_DEVICE_CPU,
    .caps = DEVICE_HOST_ACCESS | DEVICE_SPARSE_HEAP | DEVICE_HOST_HEAP | DEVICE_GRAPHS,
    .open = cpu_open,
    .close = cpu_close,
    .identity = cpu_identity,
    .fabric = cpu_fabric,
    .pci = cpu_pci,
    .default_agents = cpu_default_agents,
    .mem_alloc = cpu_mem_alloc,
    .mem_free = cpu_mem_free,
    .host_alloc = cpu_mem_alloc, /* host and device memory are one */
    .host_free = cpu_mem_free,
    .rows_reserve = cpu_rows_reserve,
    .clock = cpu_clock,
    .copy = cpu_copy,
    .heap_place = cpu_heap_place,
    .heap_create = cpu_heap_create,
    .heap_destroy = cpu_heap_destroy,
    .heap_open = cpu_heap_open,
    .heap_close = cpu_heap_close,
    .release = cpu_release,
    .heap_dmabuf = cpu_heap_dmabuf,
    .arrivals = cpu_arrivals,
    .flush_arrivals = cpu_flush_arrivals,
    .use = cpu_use,
    .region_id = cpu_region_id,
    .region_export = cpu_region_export,
    .region_open = cpu_region_open,
    .region_close = cpu_region_close,
    .stream_create = cpu_stream_create,
    .stream_destroy = cpu_stream_destroy,
    .stream_sync = cpu_stream_sync,
    .stream_query = cpu_stream_query,
    .stream_captures = cpu_stream_captures,
    .stream_call = cpu_stream_call,
    .stream_wait = cpu_stream_wait,
    .stream_copy = cpu_stream_copy,
    .launch = cpu_launch,
    .event_create = cpu_event_create,
    .event_destroy = cpu_event_destroy,
    .event_record = cpu_event_record,
    .event_sync = cpu_event_sync,
    .event_query = cpu_event_query,
    .timers_create = cpu_timers_create,
    .timers_destroy = cpu_timers_destroy,
    .timers_record = cpu_timers_record,
    .timers_elapsed = cpu_timers_elapsed,
    .graph_begin = cpu_graph_begin,
    .graph_end = cpu_graph_end,
    .graph_launch = cpu_graph_launch,
    .graph_destroy = cpu_graph_destroy,
};

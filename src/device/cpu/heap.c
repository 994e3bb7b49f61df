/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The heap of a rank: memory that the other ranks of the node map too.
 *
 *   rank A                                          rank B
 *   memfd_create -> fd, mmap                        bootstrap brings {pid, fd, bytes, device, inode}
 *   export = {pid, fd, bytes, device, inode}  --->  open /proc/pid/fd/fd, fstat, compare all of them, mmap
 *
 * The file has no name anywhere: when the last process that maps it ends, however it ends, the memory is gone. The file
 * descriptor stays open as long as the heap, for peers that come late. Pages are there once touched; untouched ones
 * cost nothing. The size is sealed, so that no process can shrink it under the others.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/cpu/cpu.h"
#include "util/descriptor.h"
#include "util/status.h"

/*
 * Heaps of this process, counted by who uses them: the rank that made one and every rank of the same process that
 * opened it. Ranks end in any order, and a peer may still read, or ring the bell of, a rank that is already done.
 */
struct living {
    void *base;
    uint64_t bytes;
    int fd, users;
    struct living *next;
};
static struct living *living_heaps;
static pthread_mutex_t living_lock = PTHREAD_MUTEX_INITIALIZER;

static epx_status living_add(void *base, uint64_t bytes, int fd)
{
    struct living *l = malloc(sizeof(*l));

    if (!l)
        return fail(EPX_ERR_MEMORY, "cpu heap: no memory for its entry");
    pthread_mutex_lock(&living_lock);
    *l = (struct living){.base = base, .bytes = bytes, .fd = fd, .users = 1, .next = living_heaps};
    living_heaps = l;
    pthread_mutex_unlock(&living_lock);
    return EPX_OK;
}

/* One user more; zero if there is no such heap. */
static int living_join(void *base)
{
    struct living *l;

    pthread_mutex_lock(&living_lock);
    for (l = living_heaps; l && l->base != base;)
        l = l->next;
    if (l)
        l->users++;
    pthread_mutex_unlock(&living_lock);
    return l != NULL;
}

/* One user less; the last one unmaps. */
static void living_leave(void *base)
{
    struct living **link, *gone = NULL;

    pthread_mutex_lock(&living_lock);
    for (link = &living_heaps; *link && (*link)->base != base;)
        link = &(*link)->next;
    if (*link && --(*link)->users == 0) {
        gone = *link;
        *link = gone->next;
    }
    pthread_mutex_unlock(&living_lock);
    if (!gone)
        return;
    munmap(gone->base, gone->bytes);
    close(gone->fd);
    free(gone);
}

/* heap_export.opaque: which file it is. A process number may be given anew and its descriptors numbered alike, but an
 * inode number is not used twice while a file lives; a mark inside the memory would need room in the kernels'
 * layout. */
struct file_id {
    uint64_t device;
    uint64_t inode;
};
EPX_STATIC_ASSERT(sizeof(struct file_id) <= sizeof(((struct heap_export *)0)->opaque), "fits");

static struct file_id file_id_of(const struct stat *st)
{
    return (struct file_id){.device = (uint64_t)st->st_dev, .inode = (uint64_t)st->st_ino};
}

static epx_status heap_map(int fd, uint64_t bytes, void **base)
{
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);

    if (map == MAP_FAILED)
        return fail_errno(EPX_ERR_MEMORY, "cpu heap: cannot map %" PRIu64 " bytes", bytes);
    /* Best effort, both. Huge pages for shared memory come only where transparent_hugepage/shmem_enabled says advise:
     * with the common default, never, this changes nothing; where they come, scattered rows of 14 KiB copy some 20 to
     * 40 % faster (measured with private memory on 64-bit ARM). Core files need no copy of what may be many GiB. */
    (void)madvise(map, bytes, MADV_HUGEPAGE);
    (void)madvise(map, bytes, MADV_DONTDUMP);
    *base = map;
    return EPX_OK;
}

/* A file that is made larger than its limit costs the process its life (SIGXFSZ), not the call its success. */
static epx_status check_file_limit(uint64_t bytes)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= bytes)
        return EPX_OK;
    return fail(EPX_ERR_MEMORY,
                "cpu heap: expected files of at least %" PRIu64
                " bytes to be allowed (ulimit -f; the heap is a memory file), got a limit of %llu",
                bytes, (unsigned long long)limit.rlim_cur);
}

static epx_status heap_file(uint64_t bytes, int *fd, struct stat *st)
{
    epx_status status = check_file_limit(bytes);

    if (status != EPX_OK)
        return status;
    *fd = fd_own(memfd_create("epx-heap", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (*fd < 0)
        return fail_errno(EPX_ERR_SYSTEM, "cpu heap: memfd_create");
    if (ftruncate(*fd, (off_t)bytes) != 0) {
        status = fail_errno(EPX_ERR_MEMORY, "cpu heap: cannot size a memory file of %" PRIu64 " bytes", bytes);
        goto close_fd;
    }
    if (fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        status = fail_errno(EPX_ERR_SYSTEM, "cpu heap: cannot seal the memory file's size");
        goto close_fd;
    }
    if (fstat(*fd, st) != 0) {
        status = fail_errno(EPX_ERR_SYSTEM, "cpu heap: fstat of the memory file");
        goto close_fd;
    }
    return EPX_OK;

close_fd:
    close(*fd);
    return status;
}

epx_status cpu_heap_create(struct device *device, uint64_t bytes, struct heap *heap)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    struct file_id id;
    struct stat st;
    epx_status status;
    int fd;

    (void)device;
    memset(heap, 0, sizeof(*heap));
    if (bytes == 0 || bytes > INT64_MAX - page)
        return fail(EPX_ERR_ARGUMENT, "cpu heap: expected 1 to 2^63 bytes, got %" PRIu64, bytes);
    bytes = (bytes + page - 1) / page * page;
    status = heap_file(bytes, &fd, &st);
    if (status != EPX_OK)
        return status;
    status = heap_map(fd, bytes, &heap->base);
    if (status != EPX_OK)
        goto close_fd;
    status = living_add(heap->base, bytes, fd);
    if (status != EPX_OK)
        goto unmap;
    id = file_id_of(&st);
    heap->bytes = bytes;
    heap->export = (struct heap_export){
        .bytes = bytes, .address = (uint64_t)(uintptr_t)heap->base, .pid = (int64_t)getpid(), .token = fd};
    memcpy(heap->export.opaque, &id, sizeof(id));
    return EPX_OK;

unmap:
    munmap(heap->base, bytes);
    heap->base = NULL;
close_fd:
    close(fd);
    return status;
}

void cpu_heap_destroy(struct device *device, struct heap *heap)
{
    (void)device;
    if (!heap->base)
        return;
    living_leave(heap->base);
    memset(heap, 0, sizeof(*heap));
}

/* ---- The peer's side ---------------------------------------------------------------------------------------- */

static epx_status check_file(int fd, const struct heap_export *peer)
{
    struct file_id expected, seen;
    struct stat st;

    if (fstat(fd, &st) != 0)
        return fail_errno(EPX_ERR_SYSTEM, "cpu heap: fstat of the heap of process %" PRId64, peer->pid);
    memcpy(&expected, peer->opaque, sizeof(expected));
    seen = file_id_of(&st);
    if (seen.device != expected.device || seen.inode != expected.inode || (uint64_t)st.st_size != peer->bytes)
        return fail(EPX_ERR_PEER,
                    "cpu heap: descriptor %" PRId64 " of process %" PRId64
                    " is not the heap that was announced (expected "
                    "inode %" PRIu64 " of %" PRIu64 " bytes, found inode %" PRIu64 " of %" PRIu64
                    " bytes): the process has ended or closed its heap",
                    peer->token, peer->pid, expected.inode, peer->bytes, seen.inode, (uint64_t)st.st_size);
    return EPX_OK;
}

static epx_status open_peer_file(const struct heap_export *peer, int *fd)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/%" PRId64 "/fd/%" PRId64, peer->pid, peer->token);
    *fd = fd_own(open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK));
    if (*fd >= 0)
        return EPX_OK;
    if (errno == EACCES || errno == EPERM)
        return fail_errno(EPX_ERR_SYSTEM,
                          "cpu heap: cannot open %s: may not look into process %" PRId64
                          " (expected one of the same user, that has not made itself undumpable)",
                          path, peer->pid);
    if (errno == ENOENT)
        return fail_errno(EPX_ERR_PEER,
                          "cpu heap: cannot open %s: process %" PRId64
                          " has ended or closed its heap, or lives in another pid namespace",
                          path, peer->pid);
    return fail_errno(EPX_ERR_SYSTEM, "cpu heap: cannot open %s", path);
}

epx_status cpu_heap_open(struct device *device, const struct heap_export *peer, void **base)
{
    epx_status status;
    int fd;

    (void)device;
    *base = NULL;
    if (peer->pid == (int64_t)getpid()) {
        /* One mapping per process: every thread sees one address, and so do the tools that watch for races. */
        status = check_file((int)peer->token, peer);
        if (status == EPX_OK && !living_join((void *)(uintptr_t)peer->address))
            status = fail(EPX_ERR_PEER, "cpu heap: a rank of this process has closed its heap already");
        if (status == EPX_OK)
            *base = (void *)(uintptr_t)peer->address;
        return status;
    }
    status = open_peer_file(peer, &fd);
    if (status != EPX_OK)
        return status;
    status = check_file(fd, peer);
    if (status == EPX_OK)
        status = heap_map(fd, peer->bytes, base);
    close(fd); /* the mapping keeps the file */
    return status;
}

void cpu_heap_close(struct device *device, const struct heap_export *peer, void *base)
{
    (void)device;
    if (!base)
        return;
    if (peer->pid == (int64_t)getpid())
        living_leave(base);
    else
        munmap(base, peer->bytes);
}

/* Nothing is kept: unmapping waits for nobody. */
int cpu_release(void)
{
    return 1;
}

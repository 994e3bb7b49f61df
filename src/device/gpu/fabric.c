/* SPDX-License-Identifier: Apache-2.0 */
#include "device/gpu/fabric.h"
#include "util/descriptor.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#define fail gpu_host->fail

#ifdef __has_include
#if __has_include(<cuda.h>)
#include <cuda.h>
#endif
#endif

/* ---- The driver's functions, with the numbers and structs of cuda.h ---------------------------------------------- */

enum {
    HANDLE_FILE = 1,   /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
    HANDLE_FABRIC = 8, /* CU_MEM_HANDLE_TYPE_FABRIC */
    FILES_SUPPORTED = 103,
    RDMA_SUPPORTED = 110,
    FABRIC_SUPPORTED = 128,
    NOT_PERMITTED = 800,
    HANDLE_BYTES = 64,
    GRANULARITY_RECOMMENDED = 1,
    IS_PINNED = 1,
    IN_DEVICE = 1,
    READ_WRITE = 3
};

struct location {
    int type, id;
};

struct allocation {
    int type, handle_types;
    struct location location;
    void *windows;
    struct {
        uint8_t compression, rdma;
        uint16_t usage;
        uint8_t reserved[4];
    } flags;
};

struct access {
    struct location location;
    int flags;
};
EPX_STATIC_ASSERT(sizeof(struct allocation) == 32, "CUmemAllocationProp");
EPX_STATIC_ASSERT(sizeof(struct access) == 12, "CUmemAccessDesc");

#if defined(CUDA_VERSION) && CUDA_VERSION >= 12040
#define SAME(mine, theirs) EPX_STATIC_ASSERT((int)(mine) == (int)(theirs), "as in cuda.h")
SAME(HANDLE_FILE, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(HANDLE_FABRIC, CU_MEM_HANDLE_TYPE_FABRIC);
SAME(HANDLE_BYTES, sizeof(CUmemFabricHandle));
SAME(FILES_SUPPORTED, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(RDMA_SUPPORTED, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
SAME(FABRIC_SUPPORTED, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
SAME(NOT_PERMITTED, CUDA_ERROR_NOT_PERMITTED);
SAME(GRANULARITY_RECOMMENDED, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
SAME(IS_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(IN_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(sizeof(struct allocation), sizeof(CUmemAllocationProp));
SAME(offsetof(struct allocation, location), offsetof(CUmemAllocationProp, location));
SAME(offsetof(struct allocation, flags.rdma), offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
SAME(sizeof(struct access), sizeof(CUmemAccessDesc));
SAME(offsetof(struct access, flags), offsetof(CUmemAccessDesc, flags));
#endif

static struct {
    int (*init)(unsigned flags);
    int (*attribute)(int *value, int which, int device);
    int (*pci)(char *text, int bytes, int device);
    int (*error_name)(int error, const char **text);
    int (*granularity)(size_t *bytes, const struct allocation *what, int option);
    int (*create)(uint64_t *handle, size_t bytes, const struct allocation *what, unsigned long long flags);
    int (*release)(uint64_t handle);
    int (*export)(void *out, uint64_t handle, int type, unsigned long long flags);
    int (*import)(uint64_t *handle, void *from, int type);
    int (*reserve)(uint64_t *address, size_t bytes, size_t align, uint64_t wish, unsigned long long flags);
    int (*free)(uint64_t address, size_t bytes);
    int (*map)(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
    int (*unmap)(uint64_t address, size_t bytes);
    int (*set_access)(uint64_t address, size_t bytes, const struct access *list, size_t count);
} driver;

static const char *driver_missing; /* what the driver's library has not got; NULL: all is there */
static uint64_t process_number;    /* random: process numbers are given on several hosts */

static void find_driver(void)
{
    const struct {
        const char *name;
        void *at;
    } wanted[] = {{"cuInit", &driver.init},
                  {"cuDeviceGetAttribute", &driver.attribute},
                  {"cuDeviceGetPCIBusId", &driver.pci},
                  {"cuGetErrorName", &driver.error_name},
                  {"cuMemGetAllocationGranularity", &driver.granularity},
                  {"cuMemCreate", &driver.create},
                  {"cuMemRelease", &driver.release},
                  {"cuMemExportToShareableHandle", &driver.export},
                  {"cuMemImportFromShareableHandle", &driver.import},
                  {"cuMemAddressReserve", &driver.reserve},
                  {"cuMemAddressFree", &driver.free},
                  {"cuMemMap", &driver.map},
                  {"cuMemUnmap", &driver.unmap},
                  {"cuMemSetAccess", &driver.set_access}};
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

    if (!library)
        driver_missing = "libcuda.so.1";
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]) && !driver_missing; i++) {
        void *found = dlsym(library, wanted[i].name);

        memcpy(wanted[i].at, &found, sizeof(found));
        if (!found)
            driver_missing = wanted[i].name;
    }
    if (!driver_missing && driver.init(0) != 0)
        driver_missing = "a GPU that it can use (cuInit)";
    if (getrandom(&process_number, sizeof(process_number), 0) != (ssize_t)sizeof(process_number))
        process_number = 0; /* then nothing is taken for this process's own */
}

static epx_status need_driver(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, find_driver);
    if (driver_missing)
        return fail(EPX_ERR_UNSUPPORTED, "the driver has no %s", driver_missing);
    return EPX_OK;
}

static epx_status check(int error, const char *what)
{
    const char *name = NULL;

    if (error == 0)
        return EPX_OK;
    if (driver.error_name(error, &name) != 0 || !name)
        name = "unknown";
    return fail(error == 2 ? EPX_ERR_MEMORY : EPX_ERR_UNSUPPORTED, "%s: %s (error %d)%s", what, name, error,
                error == NOT_PERMITTED ? ": has this process an IMEX channel (/dev/nvidia-caps-imex-channels)?" : "");
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

/* heap_export.opaque */
struct fabric_export {
    uint8_t handle[HANDLE_BYTES]; /* with files: the descriptor's number in the exporting process */
    uint64_t process;             /* process_number */
    int32_t files, reserved;
};
EPX_STATIC_ASSERT(sizeof(struct fabric_export) <= sizeof(((struct heap_export *)0)->opaque), "fits");

static int handle_type(void)
{
    return gpu_host->fabric_files ? HANDLE_FILE : HANDLE_FABRIC;
}

static struct allocation describe(int index)
{
    struct allocation what = {
        .type = IS_PINNED, .handle_types = handle_type(), .location = {.type = IN_DEVICE, .id = index}};
    int rdma = 0;

    what.flags.rdma = driver.attribute(&rdma, RDMA_SUPPORTED, index) == 0 && rdma;
    return what;
}

/* Maps memory at an address of its own. */
static epx_status map(int index, uint64_t handle, uint64_t bytes, void **base)
{
    const struct access own = {.location = {.type = IN_DEVICE, .id = index}, .flags = READ_WRITE};
    uint64_t address = 0;
    epx_status status = check(driver.reserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve");

    if (status != EPX_OK)
        return status;
    status = check(driver.map(address, bytes, 0, handle, 0), "cuMemMap");
    if (status != EPX_OK) {
        driver.free(address, bytes);
        return status;
    }
    status = check(driver.set_access(address, bytes, &own, 1), "cuMemSetAccess");
    *base = (void *)(uintptr_t)address;
    if (status != EPX_OK)
        fabric_heap_unmap(*base, bytes);
    return status;
}

void fabric_heap_unmap(void *base, uint64_t bytes)
{
    driver.unmap((uint64_t)(uintptr_t)base, bytes);
    driver.free((uint64_t)(uintptr_t)base, bytes);
}

static epx_status export_memory(uint64_t handle, struct fabric_export *export)
{
    memset(export, 0, sizeof(*export));
    export->process = process_number;
    export->files = gpu_host->fabric_files;
    return check(driver.export(export->handle, handle, handle_type(), 0), "cuMemExportToShareableHandle");
}

static void close_file(const struct fabric_export *export)
{
    int fd;

    memcpy(&fd, export->handle, sizeof(fd));
    if (export->files)
        close(fd);
}

/* Makes memory that can be exported, and exports it. *bytes is rounded up. */
static epx_status create(int index, uint64_t *bytes, uint64_t *handle, struct fabric_export *export)
{
    const struct allocation what = describe(index);
    size_t unit = 0;
    epx_status status = check(driver.granularity(&unit, &what, GRANULARITY_RECOMMENDED), "granularity of memory");

    if (status != EPX_OK)
        return status;
    unit = unit ? unit : 1;
    *bytes = (*bytes + unit - 1) / unit * unit;
    status = check(driver.create(handle, *bytes, &what, 0), "cuMemCreate");
    if (status != EPX_OK)
        return status;
    status = export_memory(*handle, export);
    if (status != EPX_OK)
        driver.release(*handle);
    return status;
}

epx_status fabric_heap_create(int index, uint64_t bytes, struct heap *heap)
{
    struct fabric_export export;
    uint64_t handle = 0;
    epx_status status = need_driver();

    memset(heap, 0, sizeof(*heap));
    if (status == EPX_OK)
        status = create(index, &bytes, &handle, &export);
    if (status != EPX_OK)
        return status;
    status = map(index, handle, bytes, &heap->base);
    if (status != EPX_OK) {
        close_file(&export);
        driver.release(handle);
        heap->base = NULL;
        return status;
    }
    heap->bytes = bytes;
    heap->export = (struct heap_export){
        .bytes = bytes, .address = (uint64_t)(uintptr_t)heap->base, .pid = (int64_t)getpid(), .token = (int64_t)handle};
    memcpy(heap->export.opaque, &export, sizeof(export));
    return EPX_OK;
}

void fabric_heap_free(const struct heap *heap)
{
    struct fabric_export export;

    memcpy(&export, heap->export.opaque, sizeof(export));
    fabric_heap_unmap(heap->base, heap->bytes);
    close_file(&export);
    driver.release((uint64_t)heap->export.token);
}

int fabric_heap_is_mapped(const struct heap_export *peer)
{
    struct fabric_export export;

    memcpy(&export, peer->opaque, sizeof(export));
    return !process_number || export.process != process_number;
}

/* Another process of this host may hand out its descriptors to those that might trace it. */
static epx_status fetch_file(const struct heap_export *peer, const struct fabric_export *export, int *fd)
{
    int number, process = fd_own((int)syscall(SYS_pidfd_open, (pid_t)peer->pid, 0));

    memcpy(&number, export->handle, sizeof(number));
    *fd = process < 0 ? -1 : fd_own((int)syscall(SYS_pidfd_getfd, process, number, 0));
    if (*fd < 0) {
        const int error = errno;

        if (process >= 0)
            close(process);
        return fail(EPX_ERR_UNSUPPORTED, "no descriptor of process %d: %s", (int)peer->pid, strerror(error));
    }
    close(process);
    return EPX_OK;
}

static epx_status import(const struct heap_export *peer, struct fabric_export *export, uint64_t *handle)
{
    epx_status status;
    int fd;

    if (!export->files)
        return check(driver.import(handle, export->handle, HANDLE_FABRIC), "cuMemImportFromShareableHandle");
    status = fetch_file(peer, export, &fd);
    if (status != EPX_OK)
        return status;
    status =
        check(driver.import(handle, (void *)(uintptr_t)fd, HANDLE_FILE), "cuMemImportFromShareableHandle of a file");
    close(fd);
    return status;
}

epx_status fabric_heap_open(int index, const struct heap_export *peer, void **base)
{
    struct fabric_export export;
    uint64_t handle = 0;
    epx_status status = need_driver();

    *base = NULL;
    if (status != EPX_OK)
        return status;
    memcpy(&export, peer->opaque, sizeof(export));
    if (!fabric_heap_is_mapped(peer)) {
        const struct access own = {.location = {.type = IN_DEVICE, .id = index}, .flags = READ_WRITE};

        status = check(driver.set_access(peer->address, peer->bytes, &own, 1), "cuMemSetAccess");
        *base = status == EPX_OK ? (void *)(uintptr_t)peer->address : NULL;
        return status;
    }
    status = import(peer, &export, &handle);
    if (status != EPX_OK)
        return status;
    status = map(index, handle, peer->bytes, base);
    driver.release(handle); /* what is mapped stays */
    if (status != EPX_OK)
        *base = NULL;
    return status;
}

/* ---- Who reaches whom -------------------------------------------------------------------------------------------- */

enum { STATE_COMPLETED = 3, UUID_BYTES = 16 };

/* nvmlGpuFabricInfo_v2_t; without its first and last field: nvmlGpuFabricInfo_t. */
struct fabric_info {
    unsigned version;
    uint8_t cluster[UUID_BYTES];
    int status;
    unsigned clique;
    uint8_t state;
    unsigned health;
};
EPX_STATIC_ASSERT(sizeof(struct fabric_info) == 36, "nvmlGpuFabricInfo_v2_t");

struct identity {
    char name[8];
    uint8_t cluster[UUID_BYTES];
    uint32_t clique;
    uint8_t zero[36];
};
EPX_STATIC_ASSERT(sizeof(struct identity) == 64, "travels through the bootstrap");

/* NVML's number of the failure, or 0. */
static int ask_nvml(void *library, const char *pci, struct fabric_info *info)
{
    int (*init)(void), (*shutdown)(void), (*device_at)(const char *, void **), (*ask)(void *, void *);
    void *device = NULL;
    int rc;

    *(void **)&init = dlsym(library, "nvmlInit_v2");
    *(void **)&shutdown = dlsym(library, "nvmlShutdown");
    *(void **)&device_at = dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2");
    *(void **)&ask = dlsym(library, "nvmlDeviceGetGpuFabricInfoV");
    memset(info, 0, sizeof(*info));
    info->version = (unsigned)sizeof(*info) | 2u << 24;
    if (!init || !shutdown || !device_at || !ask)
        return -1;
    rc = init();
    if (rc)
        return rc;
    rc = device_at(pci, &device);
    if (!rc)
        rc = ask(device, info);
    shutdown();
    return rc;
}

static epx_status fabric_of(int index, struct identity *id)
{
    static const uint8_t none[UUID_BYTES];
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    struct fabric_info info;
    char pci[DEVICE_PCI] = "";
    int rc;

    if (!library)
        return fail(EPX_ERR_UNSUPPORTED, "there is no libnvidia-ml.so.1 to ask for the fabric of GPU %d", index);
    rc = driver.pci(pci, sizeof(pci), index) ? -1 : ask_nvml(library, pci, &info);
    dlclose(library);
    if (rc)
        return fail(EPX_ERR_UNSUPPORTED, "NVML tells no fabric of GPU %d (error %d)", index, rc);
    if (info.state != STATE_COMPLETED || info.status)
        return fail(EPX_ERR_UNSUPPORTED, "GPU %d has not registered with a fabric (NVML: state %d, status %d)", index,
                    (int)info.state, info.status);
    if (!memcmp(info.cluster, none, sizeof(none)))
        return fail(EPX_ERR_UNSUPPORTED, "GPU %d is in no cluster: its NVLinks end in this machine", index);
    memcpy(id->name, "fabric", 6);
    memcpy(id->cluster, info.cluster, sizeof(id->cluster));
    id->clique = info.clique;
    return EPX_OK;
}

epx_status fabric_identity(int index, const uint8_t host[64], uint8_t id[64])
{
    const int files = gpu_host->fabric_files;
    struct identity identity = {.name = ""};
    struct fabric_export export;
    uint64_t bytes = 1, handle = 0;
    int can = 0;
    epx_status status = need_driver();

    if (status != EPX_OK)
        return status;
    if (driver.attribute(&can, files ? FILES_SUPPORTED : FABRIC_SUPPORTED, index) != 0 || !can)
        return fail(EPX_ERR_UNSUPPORTED, "the driver offers no %s for GPU %d",
                    files ? "file descriptors" : "fabric handles", index);
    if (files)
        memcpy(&identity, host, sizeof(identity));
    else
        status = fabric_of(index, &identity);
    if (status == EPX_OK)
        status = create(index, &bytes, &handle, &export);
    if (status != EPX_OK)
        return status;
    close_file(&export);
    driver.release(handle);
    memcpy(id, &identity, sizeof(identity));
    return EPX_OK;
}

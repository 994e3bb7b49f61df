/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcuda.so.1 and libnvidia-ml.so.1 as far as src/device/gpu/fabric.c asks for them: memory is a memory file, a fabric
 * handle names the file (process, descriptor, inode), and a rack is this machine. Compiled once for each library.
 *   FAKE_DRIVER  what it refuses: attribute, create, export, import, map, nvml, state, cluster; clique: each process
 *                has another
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OUT_OF_MEMORY = 2, INVALID = 1, NOT_PERMITTED = 800, NOT_SUPPORTED = 801, BY_FILE = 1, BY_FABRIC = 8 };

static int refuses(const char *what)
{
    const char *asked = getenv("FAKE_DRIVER");

    return asked && strcmp(asked, what) == 0;
}

struct name {
    int64_t pid, fd;
    uint64_t inode;
    char zero[40];
};
_Static_assert(sizeof(struct name) == 64, "a fabric handle");

#ifndef FAKE_NVML

int cuInit(unsigned flags);
int cuDeviceGetAttribute(int *value, int which, int device);
int cuDeviceGetPCIBusId(char *text, int bytes, int device);
int cuGetErrorName(int error, const char **text);
int cuMemGetAllocationGranularity(size_t *bytes, const void *what, int option);
int cuMemCreate(uint64_t *handle, size_t bytes, const int *what, unsigned long long flags);
int cuMemRelease(uint64_t handle);
int cuMemExportToShareableHandle(void *out, uint64_t handle, int type, unsigned long long flags);
int cuMemImportFromShareableHandle(uint64_t *handle, void *from, int type);
int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t align, uint64_t wish, unsigned long long flags);
int cuMemAddressFree(uint64_t address, size_t bytes);
int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
int cuMemUnmap(uint64_t address, size_t bytes);
int cuMemSetAccess(uint64_t address, size_t bytes, const void *list, size_t count);

int cuInit(unsigned flags)
{
    return flags ? INVALID : 0;
}

int cuDeviceGetAttribute(int *value, int which, int device)
{
    (void)which;
    *value = !refuses("attribute");
    return device ? INVALID : 0;
}

int cuDeviceGetPCIBusId(char *text, int bytes, int device)
{
    snprintf(text, (size_t)bytes, "0000:00:0%d.0", device);
    return 0;
}

int cuGetErrorName(int error, const char **text)
{
    *text = error == NOT_PERMITTED ? "CUDA_ERROR_NOT_PERMITTED" : "CUDA_ERROR_OF_THE_FAKE";
    return 0;
}

int cuMemGetAllocationGranularity(size_t *bytes, const void *what, int option)
{
    (void)what;
    (void)option;
    *bytes = (size_t)2 << 20;
    return 0;
}

/* A handle is a descriptor. */
int cuMemCreate(uint64_t *handle, size_t bytes, const int *what, unsigned long long flags)
{
    int fd;

    if (refuses("create"))
        return NOT_PERMITTED;
    if (flags || what[0] != 1 || (what[1] != BY_FILE && what[1] != BY_FABRIC) || bytes % ((size_t)2 << 20))
        return INVALID;
    fd = memfd_create("fake memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        return OUT_OF_MEMORY;
    *handle = (uint64_t)fd;
    return 0;
}

int cuMemRelease(uint64_t handle)
{
    return close((int)handle) ? INVALID : 0;
}

int cuMemExportToShareableHandle(void *out, uint64_t handle, int type, unsigned long long flags)
{
    struct name name = {.pid = getpid(), .fd = (int64_t)handle};
    struct stat st;
    int fd;

    if (refuses("export"))
        return NOT_SUPPORTED;
    if (flags || fstat((int)handle, &st) != 0)
        return INVALID;
    name.inode = st.st_ino;
    fd = type == BY_FILE ? dup((int)handle) : -1;
    memcpy(out, type == BY_FILE ? (const void *)&fd : &name, type == BY_FILE ? sizeof(fd) : sizeof(name));
    return 0;
}

int cuMemImportFromShareableHandle(uint64_t *handle, void *from, int type)
{
    struct name name;
    struct stat st;
    char path[64];
    int fd;

    if (refuses("import"))
        return NOT_PERMITTED;
    if (type == BY_FILE) {
        fd = dup((int)(uintptr_t)from);
        *handle = (uint64_t)fd;
        return fd < 0 ? INVALID : 0;
    }
    memcpy(&name, from, sizeof(name));
    snprintf(path, sizeof(path), "/proc/%lld/fd/%lld", (long long)name.pid, (long long)name.fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0 || st.st_ino != name.inode)
        return INVALID;
    *handle = (uint64_t)fd;
    return 0;
}

int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t align, uint64_t wish, unsigned long long flags)
{
    void *map = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    *address = (uint64_t)(uintptr_t)map;
    return map == MAP_FAILED || align || wish || flags ? OUT_OF_MEMORY : 0;
}

int cuMemAddressFree(uint64_t address, size_t bytes)
{
    return munmap((void *)(uintptr_t)address, bytes) ? INVALID : 0;
}

/* What no access was set for cannot be touched. */
int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags)
{
    if (refuses("map"))
        return INVALID;
    return flags || mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle,
                         (off_t)offset) == MAP_FAILED
               ? INVALID
               : 0;
}

int cuMemUnmap(uint64_t address, size_t bytes)
{
    return mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
                -1, 0) == MAP_FAILED
               ? INVALID
               : 0;
}

int cuMemSetAccess(uint64_t address, size_t bytes, const void *list, size_t count)
{
    (void)list;
    return count != 1 || mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE) ? INVALID : 0;
}

#else

struct info {
    unsigned version;
    uint8_t cluster[16];
    int status;
    unsigned clique;
    uint8_t state;
    unsigned health;
};

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **device);
int nvmlDeviceGetGpuFabricInfoV(void *device, struct info *info);

int nvmlInit_v2(void)
{
    return refuses("nvml") ? 9 : 0;
}

int nvmlShutdown(void)
{
    return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **device)
{
    *device = device;
    return strcmp(pci, "0000:00:00.0") ? 2 : 0;
}

int nvmlDeviceGetGpuFabricInfoV(void *device, struct info *info)
{
    if (!device || info->version != (sizeof(*info) | 2u << 24))
        return 25;
    memset(info->cluster, refuses("cluster") ? 0 : 7, sizeof(info->cluster));
    info->status = 0;
    info->clique = refuses("clique") ? (unsigned)getpid() : 1;
    info->state = refuses("state") ? 2 : 3;
    return 0;
}

#endif

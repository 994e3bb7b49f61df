/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A quicker LeakSanitizer for gcc 12 on aarch64. There the allocator of AddressSanitizer divides 256 TiB into regions
 * of 1 MiB, and each of the four walks over all blocks of memory looks at every one of these 2^28 regions: 4 s at the
 * end of a process, however small it is. Here the first walk writes down which blocks there are, and the others read
 * that list: 1 s. All four are made while the other threads are stopped, so that no block comes or goes between them.
 *
 * The linker puts these functions between two parts of libasan.a (--wrap; tests/CMakeLists.txt). They run in a thread
 * that LeakSanitizer has made without libc's help: no malloc, no errno, no thread-local variables.
 */
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void block_fn(uintptr_t block, void *arg);

/* __lsan::ForEachChunk and __lsan::LockStuffAndStopTheWorld. */
#define EACH "_ZN6__lsan12ForEachChunkEPFvmPvES0_"
#define STOP                                                                             \
    "_ZN6__lsan24LockStuffAndStopTheWorldEPFvRKN11__sanitizer20SuspendedThreadsListEPvE" \
    "PNS_18CheckForLeaksParamE"
void real_each(block_fn *fn, void *arg) __asm__("__real_" EACH);
void wrap_each(block_fn *fn, void *arg) __asm__("__wrap_" EACH);
void real_stop(void *fn, void *arg) __asm__("__real_" STOP);
void wrap_stop(void *fn, void *arg) __asm__("__wrap_" STOP);

#define MOST_BLOCKS (1u << 22) /* 32 MiB of addresses, of which only those in use become memory */

static uintptr_t *list; /* complements of addresses, which nothing takes for references to the blocks */
static size_t count;
static int is_current;

static void append(uintptr_t block, void *arg)
{
    (void)arg;
    if (count < MOST_BLOCKS)
        list[count] = ~block;
    count++;
}

/* Returns whether the list has all blocks. */
static int make_list(void)
{
    if (is_current)
        return count <= MOST_BLOCKS;
    if (!list) {
        const long at = syscall(SYS_mmap, NULL, MOST_BLOCKS * sizeof(*list), PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == -1)
            return 0;
        list = (uintptr_t *)at;
    }
    count = 0;
    real_each(append, NULL);
    is_current = 1;
    return count <= MOST_BLOCKS;
}

void wrap_each(block_fn *fn, void *arg)
{
    if (!make_list()) {
        real_each(fn, arg);
        return;
    }
    for (size_t i = 0; i < count; i++)
        fn(~list[i], arg);
}

/* One look for leaks. A process may take several. */
void wrap_stop(void *fn, void *arg)
{
    is_current = 0;
    real_stop(fn, arg);
    is_current = 0;
}

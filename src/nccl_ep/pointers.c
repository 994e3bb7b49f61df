/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Can the caller's structs be read? A pointer that is not one is refused as any other wrong argument is, and does not
 * end the process.
 *
 * The kernel is asked, one word per page: rt_sigprocmask() copies the new mask from the caller's memory before it looks
 * at `how`. With a `how` that does not exist it changes nothing, and fails with EFAULT where the word cannot be read,
 * else with EINVAL. It costs 0.1 us. The structs of a call lie in two or three pages (a stack, a heap), so a call asks
 * for each page once. Memory that another thread unmaps during the call is not found out.
 *
 * Can a result be written? FUTEX_WAKE_OP changes a word of the caller's memory atomically before it wakes those that
 * wait at another. Here it sets no bits, at a word where nobody waits: nothing changes, and it fails with EFAULT where
 * the word cannot be written.
 */
#include "nccl_ep/compat.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE ((uintptr_t)4096) /* pages may be larger: then some are asked for twice */
#define KERNEL_SIGSET_BYTES 8
enum { NO_SUCH_HOW = -1, PAGES = 4 };

/* Pages that this thread's call has found readable, the latest first to be replaced; 0 is none. */
static _Thread_local uintptr_t known[PAGES];
static _Thread_local unsigned int next_known;

void pointers_begin(void)
{
    for (int i = 0; i < PAGES; i++)
        known[i] = 0;
}

static int page_readable(uintptr_t page)
{
    const int before = errno;
    int readable;

    if (!page) /* NULL is no set to the kernel: it would not be read, and not be refused */
        return 0;
    for (int i = 0; i < PAGES; i++)
        if (known[i] == page)
            return 1;
    readable = !(syscall(SYS_rt_sigprocmask, NO_SUCH_HOW, page, NULL, KERNEL_SIGSET_BYTES) && errno == EFAULT);
    errno = before;
    if (readable)
        known[next_known++ % PAGES] = page;
    return readable;
}

int pointer_readable(const void *at, size_t bytes)
{
    const uintptr_t first = (uintptr_t)at, last = first + (bytes ? bytes - 1 : 0);

    if (last < first)
        return 0;
    for (uintptr_t page = first & ~(PAGE - 1); page_readable(page); page += PAGE)
        if (last - page < PAGE)
            return 1;
    return 0;
}

static int word_writable(uintptr_t at)
{
    static uint32_t nobody; /* waits here */
    const int before = errno;
    const int writable = !(syscall(SYS_futex, &nobody, FUTEX_WAKE_OP | FUTEX_PRIVATE_FLAG, 0, NULL, at & ~(uintptr_t)3,
                                   FUTEX_OP(FUTEX_OP_OR, 0, FUTEX_OP_CMP_EQ, 0)) < 0 &&
                           errno == EFAULT);

    errno = before;
    return writable;
}

ncclResult_t pointer_need_result(const char *call, const char *name, void *at, size_t bytes)
{
    const ncclResult_t result = pointer_need(call, name, at, bytes);

    if (result != ncclSuccess)
        return result;
    if (!word_writable((uintptr_t)at) || !word_writable((uintptr_t)at + bytes - 1))
        return compat_fail(ncclInvalidArgument,
                           "%s: %s: expected a pointer to %zu bytes for a result, got %p, which is not writable", call,
                           name, bytes, at);
    return ncclSuccess;
}

ncclResult_t pointer_need(const char *call, const char *name, const void *at, size_t bytes)
{
    if (!at)
        return compat_fail(ncclInvalidArgument, "%s: %s: expected a pointer, got NULL", call, name);
    if (!pointer_readable(at, bytes))
        return compat_fail(ncclInvalidArgument,
                           "%s: %s: expected a pointer to %zu bytes, got %p, which is not readable", call, name, bytes,
                           at);
    return ncclSuccess;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "nccl_ep/compat.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "util/log.h"

static _Thread_local char last_message[1200];

const char *ncclEpxGetLastError(void)
{
    return last_message;
}

ncclResult_t compat_fail(ncclResult_t result, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(last_message, sizeof(last_message), format, args);
    va_end(args);
    log_line(LOG_INFO, "%s", last_message);
    return result;
}

static ncclResult_t result_of(epx_status status)
{
    switch (status) {
    case EPX_OK:
        return ncclSuccess;
    case EPX_ERR_ARGUMENT:
    case EPX_ERR_OVERFLOW:
        return ncclInvalidArgument;
    case EPX_ERR_USAGE:
    case EPX_ERR_MISMATCH:
    case EPX_ERR_BUSY:
    case EPX_ERR_UNSUPPORTED:
        return ncclInvalidUsage;
    case EPX_ERR_MEMORY:
    case EPX_ERR_SYSTEM:
        return ncclSystemError;
    case EPX_ERR_TIMEOUT:
    case EPX_ERR_PEER:
        return ncclRemoteError;
    case EPX_ERR_NOT_READY:
        return ncclInProgress;
    case EPX_ERR_INTERNAL:
        break;
    }
    return ncclInternalError;
}

/* EPX has logged the sentence already. */
ncclResult_t compat_result(epx_status status, const char *call)
{
    if (status != EPX_OK)
        snprintf(last_message, sizeof(last_message), "%s: %s", call, epx_last_error());
    return result_of(status);
}

ncclResult_t struct_take(const char *call, const char *name, const void *given, size_t first, void *own, size_t bytes)
{
    unsigned int head[2]; /* size, magic */
    ncclResult_t result;

    memset(own, 0, bytes);
    if (!given)
        return ncclSuccess;
    result = pointer_need(call, name, given, sizeof(head));
    if (result != ncclSuccess)
        return result;
    memcpy(head, given, sizeof(head));
    if (head[0] < first || head[1] != NCCL_EP_MAGIC)
        return compat_fail(
            ncclInvalidArgument,
            "%s: %s: expected size %zu or more and magic 0x%x, as its NCCL_EP_*_INIT sets them, got %u and 0x%x", call,
            name, first, NCCL_EP_MAGIC, head[0], head[1]);
    if (bytes > head[0])
        bytes = head[0];
    result = pointer_need(call, name, given, bytes);
    if (result == ncclSuccess)
        memcpy(own, given, bytes);
    return result;
}

ncclResult_t struct_need(const char *call, const char *name, const void *given, size_t first, void *own, size_t bytes)
{
    if (!given)
        return compat_fail(ncclInvalidArgument, "%s: %s: expected a pointer, got NULL", call, name);
    return struct_take(call, name, given, first, own, bytes);
}

ncclResult_t ncclEpGetVersion(int *version)
{
    ncclResult_t result;

    pointers_begin();
    result = pointer_need_result("ncclEpGetVersion", "version", version, sizeof(*version));
    if (result == ncclSuccess)
        *version = NCCL_EP_VERSION_CODE;
    return result;
}

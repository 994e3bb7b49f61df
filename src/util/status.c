/* SPDX-License-Identifier: Apache-2.0 */
#include "util/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "util/log.h"
#include "util/runtime.h"

enum { MESSAGE_BYTES = RUNTIME_ERROR_BYTES };

static char *last_message(void)
{
    static _Thread_local char of_thread[MESSAGE_BYTES];
    char *given = runtime()->last_error ? runtime()->last_error() : NULL;

    return given ? given : of_thread;
}

/* Publishes a finished sentence. Built aside first, because an argument of fail() may be epx_last_error() itself. */
static void remember(const char *sentence)
{
    memcpy(last_message(), sentence, strlen(sentence) + 1);
    log_line(LOG_INFO, "%s", sentence);
}

epx_status fail(epx_status status, const char *format, ...)
{
    char sentence[MESSAGE_BYTES];
    int saved = errno;
    va_list args;

    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    remember(sentence);
    errno = saved;
    return status;
}

/* strerror is not safe with threads, and strerror_r has two incompatible forms: %m does the same in all libcs on
 * Linux. */
epx_status fail_errno(epx_status status, const char *format, ...)
{
    char sentence[MESSAGE_BYTES];
    int saved = errno;
    size_t used;
    va_list args;

    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    used = strlen(sentence);
    errno = saved;
    snprintf(sentence + used, sizeof(sentence) - used, ": %m");
    remember(sentence);
    errno = saved;
    return status;
}

const char *epx_last_error(void)
{
    return last_message();
}

const char *epx_strerror(epx_status status)
{
    switch (status) {
    case EPX_OK:
        return "success";
    case EPX_ERR_ARGUMENT:
        return "an argument is wrong";
    case EPX_ERR_USAGE:
        return "the call is not allowed now or with this configuration";
    case EPX_ERR_MISMATCH:
        return "ranks disagree";
    case EPX_ERR_OVERFLOW:
        return "a receive tensor is too small";
    case EPX_ERR_MEMORY:
        return "out of memory";
    case EPX_ERR_SYSTEM:
        return "a system call failed";
    case EPX_ERR_TIMEOUT:
        return "a wait reached its deadline";
    case EPX_ERR_PEER:
        return "another rank failed";
    case EPX_ERR_BUSY:
        return "too many staged operations in flight";
    case EPX_ERR_UNSUPPORTED:
        return "not supported by this build or machine";
    case EPX_ERR_NOT_READY:
        return "not finished yet";
    case EPX_ERR_INTERNAL:
        return "a bug in EPX, please report it";
    }
    return "unknown status";
}

epx_status epx_version(int *code)
{
    if (!code)
        return fail(EPX_ERR_ARGUMENT, "epx_version: code is NULL, expected a pointer to int");
    *code = EPX_VERSION_CODE;
    return EPX_OK;
}

size_t epx_dtype_size(epx_dtype dtype)
{
    switch (dtype) {
    case EPX_FP8_E4M3:
    case EPX_UINT8:
        return 1;
    case EPX_BF16:
    case EPX_FP16:
        return 2;
    case EPX_FP32:
    case EPX_INT32:
        return 4;
    case EPX_INT64:
        return 8;
    }
    return 0;
}

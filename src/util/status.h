/* SPDX-License-Identifier: Apache-2.0 */
/* Status and message: the first function that sees a fault calls fail(), the others pass its status on. */
#ifndef EPX_UTIL_STATUS_H
#define EPX_UTIL_STATUS_H

#include "epx/epx.h"

/* Remembers the formatted sentence for epx_last_error() on this thread, logs it at level "info", returns `status`. */
epx_status fail(epx_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same with ": " and the text of errno appended; errno is kept. */
epx_status fail_errno(epx_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif

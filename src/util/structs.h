/* SPDX-License-Identifier: Apache-2.0 */
/* Sized structs of callers older or newer than this library. */
#ifndef EPX_UTIL_STRUCTS_H
#define EPX_UTIL_STRUCTS_H

#include "epx/epx.h"

/* Copies a caller's struct (its first field is its size) into ours of `bytes`: fields the caller does not know are
 * zero; fields we do not know must be zero. */
epx_status struct_in(void *ours, size_t bytes, const void *theirs, const char *name);
/* Copies ours out, at most the caller's size; the caller's size field is kept. */
epx_status struct_out(void *theirs, const void *ours, size_t bytes, const char *name);

#endif

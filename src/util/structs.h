/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sized structs of callers older or newer than this library. The size that a caller claims is that of this library,
 * one of an earlier version (a table in structs.c), or a larger one whose unknown bytes are zero; every other size is
 * refused.
 */
#ifndef EPX_UTIL_STRUCTS_H
#define EPX_UTIL_STRUCTS_H

#include "epx/epx.h"

/* Copies a caller's struct (its first field is its size) into ours of `bytes`: fields that the caller does not know are
 * zero. `name` is the struct's type. */
epx_status struct_in(void *ours, size_t bytes, const void *theirs, const char *name);
/* Copies ours out, at most the caller's size; the caller's size field is kept. */
epx_status struct_out(void *theirs, const void *ours, size_t bytes, const char *name);

#endif

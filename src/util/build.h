/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The number of this build: the version, and 32 bits of a hash of the sources that decide what ranks exchange and what
 * lies in the memory that they share (cmake/build_number.cmake). Ranks with different ones make no group: they would
 * read each other's memory by different layouts.
 */
#ifndef EPX_UTIL_BUILD_H
#define EPX_UTIL_BUILD_H

#include <stdint.h>

#include "epx/epx.h"

uint64_t build_number(void);

enum { BUILD_TEXT = 32 };
/* "0.1.0-5f3a9c21" */
const char *build_text(uint64_t number, char text[BUILD_TEXT]);
/* EPX_ERR_MISMATCH, with both numbers. who: "rank 3", "a rank". */
epx_status build_fail(const char *who, uint64_t theirs, const char *other, uint64_t others);

#endif

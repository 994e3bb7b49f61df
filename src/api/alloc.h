/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the heap that epx_alloc serves from: first fit over a sorted list of used blocks. */
#ifndef EPX_API_ALLOC_H
#define EPX_API_ALLOC_H

#include "group/objects.h"

void blocks_free_all(struct epx_group *group);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of the heap that epx_alloc serves from: first fit over a sorted list of used blocks, from the beginning;
 * small blocks from the end, where those that live long do not divide the room of large ones.
 */
#ifndef EPX_GROUP_ALLOC_H
#define EPX_GROUP_ALLOC_H

#include "group/objects.h"

epx_status heap_alloc(struct epx_group *group, size_t bytes, void **ptr);
epx_status heap_free(struct epx_group *group, void *ptr);
void heap_free_all(struct epx_group *group);

#endif

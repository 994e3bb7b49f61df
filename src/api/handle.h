/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_API_HANDLE_H
#define EPX_API_HANDLE_H

#include "group/objects.h"

/* Low latency: checks the indices, but for their values, and sets the routing. */
epx_status handle_route(struct epx_handle *handle, const epx_tensor *topk_idx, const char *call, const char *name);

#endif

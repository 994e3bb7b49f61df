/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_API_HANDLE_H
#define EPX_API_HANDLE_H

#include "algo/objects.h"

void handle_free(struct epx_handle *handle);

#endif

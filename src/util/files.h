/* SPDX-License-Identifier: Apache-2.0 */
/* File descriptors: a limit is raised before it is met, and where that is not allowed the message says so. */
#ifndef EPX_UTIL_FILES_H
#define EPX_UTIL_FILES_H

#include "epx/epx.h"

/* Raises RLIMIT_NOFILE, as far as its hard limit allows, so that `count` more descriptors can be opened. `who` needs
 * them, for the message: "rank 0 of 512 ranks". poll() takes no more entries than that limit either. */
epx_status files_need(const char *who, int count);

#endif

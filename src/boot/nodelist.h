/* SPDX-License-Identifier: Apache-2.0 */
/* Slurm's compressed lists of hosts: "login,node[01-04,07],rack[1-2]n[0-3]". */
#ifndef EPX_BOOT_NODELIST_H
#define EPX_BOOT_NODELIST_H

#include <stddef.h>

/* Writes host number `index` (from 0) of `list` to `out`. Returns how many hosts the list has, or -1 when the list is
 * malformed or the name does not fit. `out` is "" when the list has no such host. */
long nodelist_host(const char *list, long index, char *out, size_t bytes);

#endif

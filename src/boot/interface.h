/* SPDX-License-Identifier: Apache-2.0 */
/* Which network interfaces EPX_SOCKET_IFNAME picks, and their addresses. */
#ifndef EPX_BOOT_INTERFACE_H
#define EPX_BOOT_INTERFACE_H

#include "boot/socket.h"
#include "epx/epx.h"

/* Whether `spec` ("eth,ib0", "=eth0", "^docker,lo") picks interface `name`. */
int interface_match(const char *spec, const char *name);
/* Addresses (IPv4 and IPv6, scope ids set, port 0) of the interfaces that are up and picked, at most `limit`. None is
 * a failure, whose message lists the interfaces that there are. */
epx_status interface_addresses(const char *spec, struct endpoint *out, int limit, int *count);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The network interfaces that EPX_SOCKET_IFNAME selects, and their addresses. */
#ifndef EPX_BOOT_INTERFACE_H
#define EPX_BOOT_INTERFACE_H

#include "boot/socket.h"
#include "epx/epx.h"

/* Whether `spec` ("eth,ib0", "=eth0", "^docker,lo") selects interface `name`. */
int interface_match(const char *spec, const char *name);
/* The source address of packets to `to`: 0, or -1. Sends nothing. */
int interface_towards(const struct endpoint *to, struct endpoint *from);
/* One address of this machine, port 0, to which the other ranks can connect: loopback where MASTER_ADDR is a loopback
 * address, or is not set and `one_host` is true; else an address that EPX_SOCKET_IFNAME selects; else the one that
 * faces MASTER_ADDR (interface_facing). */
epx_status interface_own_address(int one_host, struct endpoint *own);
/* The address from which this machine reaches `host`, port 0; where that is loopback or not known, the one of the
 * default route; else the first that is not loopback. */
epx_status interface_facing(const char *host, struct endpoint *own);
/* Addresses (IPv4 and IPv6, scope ids set, port 0) of the selected interfaces that are up, at most `limit`. Fails
 * when there is none; the message lists the interfaces of this machine. */
epx_status interface_addresses(const char *spec, struct endpoint *out, int limit, int *count);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* Where rank 0 of a rendezvous listens. */
#ifndef EPX_BOOT_LISTEN_H
#define EPX_BOOT_LISTEN_H

#include "boot/rendezvous.h"

struct listeners {
    int fds[RENDEZVOUS_MAX_ADDRESSES];
    int count;
    char text[160]; /* their addresses, for messages */
};

/* On the port of `config`, or, where that allows several, the first that is free. Addresses: of MASTER_ADDR, if it is
 * this machine's; else the one that faces MASTER_ADDR; else those of the interfaces that EPX_SOCKET_IFNAME selects. */
epx_status listeners_open(const struct rendezvous_config *config, uint64_t deadline, struct listeners *listeners);
void listeners_close(struct listeners *listeners);

#endif

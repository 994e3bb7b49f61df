/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a process needs to meet the members of a group that exists: their addresses, and what makes the group's key
 * together with the secret of the job. As text: hexadecimal digits after "epx-ticket-1:". Where the job has no secret
 * of its own (docs/security.md), whoever has the ticket has the key.
 */
#ifndef EPX_BOOT_TICKET_H
#define EPX_BOOT_TICKET_H

#include "boot/conn.h"
#include "util/crypto.h"

enum { TICKET_DOORS = 32 };

enum ticket_flags {
    TICKET_PROVES = 1,     /* 0: EPX_SECRET=none */
    TICKET_OWN_SECRET = 2, /* the secret may be this user's file */
    TICKET_ONE_HOST = 4    /* all ranks are on one machine */
};

struct ticket {
    uint64_t build; /* util/build.h */
    uint32_t flags;
    int32_t nranks, ndoors;
    uint64_t token;           /* of the membership */
    uint8_t seed[CRYPTO_KEY]; /* random numbers of all ranks */
    struct {
        int32_t rank;
        struct conn_address address;
    } door[TICKET_DOORS];
};

/* EPX_ERR_ARGUMENT: `bytes` are too few. */
epx_status ticket_write(const struct ticket *ticket, char *text, size_t bytes);
/* EPX_ERR_ARGUMENT, or EPX_ERR_MISMATCH for a ticket of another build. */
epx_status ticket_read(const char *text, struct ticket *ticket);

#endif

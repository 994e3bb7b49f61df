/* SPDX-License-Identifier: Apache-2.0 */
/* The secret that the ranks of a job share, and strangers do not (docs/security.md). */
#ifndef EPX_BOOT_SECRET_H
#define EPX_BOOT_SECRET_H

#include "util/crypto.h"

struct secret {
    int off;                 /* EPX_SECRET=none: nobody proves anything */
    uint8_t key[CRYPTO_KEY]; /* made from the secret */
    char from[300];          /* where it is from, for messages */
};

/* EPX_SECRET, else the content of EPX_SECRET_FILE, else, with `own_file`, that of a file of this user's, which is made
 * when it is missing; else a key of zeros. */
epx_status secret_read(int own_file, struct secret *secret);
/* A random secret as text, for EPX_SECRET. */
enum { SECRET_TEXT = 65 };
epx_status secret_make(char text[SECRET_TEXT]);

#endif

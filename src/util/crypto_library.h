/* SPDX-License-Identifier: Apache-2.0 */
/* Internal to crypto*.c: the libraries. Each is opened at the first call, and NULL where the machine has none. */
#ifndef EPX_UTIL_CRYPTO_LIBRARY_H
#define EPX_UTIL_CRYPTO_LIBRARY_H

#include "util/crypto.h"

const struct crypto_ops *crypto_sodium(void);
const struct crypto_ops *crypto_openssl(void);

/* Opens the first of several names; NULL-terminated. */
void *crypto_dlopen(const char *const *names);
/* The address of a symbol into *slot, a function pointer: 0, or -1. */
int crypto_symbol(void *handle, const char *name, void *slot);

#endif

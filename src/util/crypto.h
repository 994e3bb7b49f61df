/* SPDX-License-Identifier: Apache-2.0 */
/*
 * HMAC-SHA-256 and ChaCha20-Poly1305 (RFC 8439) from a library of the machine, opened at run time: libsodium, else
 * libcrypto of OpenSSL. Both compute the same bytes, so ranks with different libraries understand each other.
 */
#ifndef EPX_UTIL_CRYPTO_H
#define EPX_UTIL_CRYPTO_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx.h"

enum { CRYPTO_KEY = 32, CRYPTO_TAG = 16, CRYPTO_NONCE = 12 };

/* What one library does. Functions return 0, or -1: the library refused, or, for unseal, the text was changed. */
struct crypto_ops {
    const char *name; /* "libsodium", "libcrypto" */
    int (*hmac)(const uint8_t key[CRYPTO_KEY], const void *data, size_t bytes, uint8_t out[CRYPTO_KEY]);
    /* out: bytes + CRYPTO_TAG. `header` is authenticated and not encrypted. */
    int (*seal)(const uint8_t key[CRYPTO_KEY], const uint8_t nonce[CRYPTO_NONCE], const void *header,
                size_t header_bytes, const void *text, size_t bytes, uint8_t *out);
    /* sealed: bytes + CRYPTO_TAG; out: bytes. */
    int (*unseal)(const uint8_t key[CRYPTO_KEY], const uint8_t nonce[CRYPTO_NONCE], const void *header,
                  size_t header_bytes, const uint8_t *sealed, size_t bytes, void *out);
};

/* The library that is used, opened once per process; NULL with a message: there is none. */
const struct crypto_ops *crypto(void);
/* Library 0, 1, ...: opened, or NULL when this machine does not have it. *end: there is no such number. */
const struct crypto_ops *crypto_library(int number, int *end);

/* Compares secrets in a time that does not depend on them. */
int crypto_equal(const void *a, const void *b, size_t bytes);
epx_status crypto_random(void *out, size_t bytes);

#endif

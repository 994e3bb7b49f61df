/* SPDX-License-Identifier: Apache-2.0 */
#include "util/crypto.h"

#include <pthread.h>
#include <string.h>
#include <sys/random.h>

#include "util/crypto_library.h"
#include "util/log.h"
#include "util/status.h"

/* libsodium first: it is opened in a tenth of the time, and has no configuration of its own to read. */
static const struct crypto_ops *(*const libraries[])(void) = {crypto_sodium, crypto_openssl};
enum { LIBRARIES = (int)(sizeof(libraries) / sizeof(libraries[0])) };

static const struct crypto_ops *chosen;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* A library that refuses an algorithm (an OpenSSL in FIPS mode) is as good as none. */
static int works(const struct crypto_ops *ops)
{
    static const uint8_t key[CRYPTO_KEY] = {1}, nonce[CRYPTO_NONCE] = {2}, text[3] = "epx";
    uint8_t mac[CRYPTO_KEY], sealed[sizeof(text) + CRYPTO_TAG], opened[sizeof(text)];

    return !ops->hmac(key, text, sizeof(text), mac) && !ops->seal(key, nonce, text, 1, text, sizeof(text), sealed) &&
           !ops->unseal(key, nonce, text, 1, sealed, sizeof(text), opened) && !memcmp(text, opened, sizeof(text));
}

const struct crypto_ops *crypto_library(int number, int *end)
{
    const struct crypto_ops *ops;

    *end = number < 0 || number >= LIBRARIES;
    if (*end)
        return NULL;
    ops = libraries[number]();
    return ops && works(ops) ? ops : NULL;
}

static void choose(void)
{
    int end = 0;

    for (int i = 0; !chosen && !end; i++)
        chosen = crypto_library(i, &end);
    if (chosen)
        log_line(LOG_DEBUG, "connections are authenticated by %s", chosen->name);
}

const struct crypto_ops *crypto(void)
{
    pthread_once(&once, choose);
    if (!chosen)
        fail(EPX_ERR_UNSUPPORTED,
             "ranks cannot prove who they are: neither libsodium nor libcrypto of OpenSSL can be opened (Debian: "
             "libsodium23 or libssl3); EPX_SECRET=none on all ranks does without (docs/security.md)");
    return chosen;
}

int crypto_equal(const void *a, const void *b, size_t bytes)
{
    const volatile uint8_t *x = a, *y = b;
    uint8_t differ = 0;

    for (size_t i = 0; i < bytes; i++)
        differ |= (uint8_t)(x[i] ^ y[i]);
    return !differ;
}

epx_status crypto_random(void *out, size_t bytes)
{
    if (getrandom(out, bytes, 0) != (ssize_t)bytes)
        return fail_errno(EPX_ERR_SYSTEM, "getrandom of %zu bytes", bytes);
    return EPX_OK;
}

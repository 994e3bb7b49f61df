/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libsodium. Its headers are not needed to build EPX: these four functions have kept their form since 1.0.9, through
 * both versions of the library's binary interface.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "util/crypto_library.h"
#include "util/descriptor.h"

typedef unsigned long long length;

static int (*sodium_init)(void);
static int (*auth_hmacsha256)(uint8_t *out, const uint8_t *in, length bytes, const uint8_t *key);
static int (*aead_encrypt)(uint8_t *out, length *out_bytes, const uint8_t *text, length bytes, const uint8_t *header,
                           length header_bytes, const uint8_t *unused, const uint8_t *nonce, const uint8_t *key);
static int (*aead_decrypt)(uint8_t *out, length *out_bytes, uint8_t *unused, const uint8_t *sealed, length bytes,
                           const uint8_t *header, length header_bytes, const uint8_t *nonce, const uint8_t *key);

void *crypto_dlopen(const char *const *names)
{
    void *handle = NULL;

    fd_hold_standard();
    for (; *names && !handle; names++)
        handle = dlopen(*names, RTLD_LAZY | RTLD_LOCAL);
    return handle;
}

int crypto_symbol(void *handle, const char *name, void *slot)
{
    void *symbol = dlsym(handle, name);

    if (!symbol)
        return -1;
    memcpy(slot, &symbol, sizeof(symbol));
    return 0;
}

static int hmac(const uint8_t key[CRYPTO_KEY], const void *data, size_t bytes, uint8_t out[CRYPTO_KEY])
{
    return auth_hmacsha256(out, data, bytes, key);
}

static int seal(const uint8_t key[CRYPTO_KEY], const uint8_t nonce[CRYPTO_NONCE], const void *header,
                size_t header_bytes, const void *text, size_t bytes, uint8_t *out)
{
    length written;

    return aead_encrypt(out, &written, text, bytes, header, header_bytes, NULL, nonce, key);
}

static int unseal(const uint8_t key[CRYPTO_KEY], const uint8_t nonce[CRYPTO_NONCE], const void *header,
                  size_t header_bytes, const uint8_t *sealed, size_t bytes, void *out)
{
    length written;

    return aead_decrypt(out, &written, NULL, sealed, bytes + CRYPTO_TAG, header, header_bytes, nonce, key);
}

static const struct crypto_ops ops = {.name = "libsodium", .hmac = hmac, .seal = seal, .unseal = unseal};
static int usable;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void open_once(void)
{
    static const char *const names[] = {"libsodium.so.23", "libsodium.so.26", "libsodium.so", NULL};
    void *handle = crypto_dlopen(names);

    usable = handle && !crypto_symbol(handle, "sodium_init", &sodium_init) &&
             !crypto_symbol(handle, "crypto_auth_hmacsha256", &auth_hmacsha256) &&
             !crypto_symbol(handle, "crypto_aead_chacha20poly1305_ietf_encrypt", &aead_encrypt) &&
             !crypto_symbol(handle, "crypto_aead_chacha20poly1305_ietf_decrypt", &aead_decrypt) && sodium_init() >= 0;
}

const struct crypto_ops *crypto_sodium(void)
{
    pthread_once(&once, open_once);
    return usable ? &ops : NULL;
}

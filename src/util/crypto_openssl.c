/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcrypto of OpenSSL, 1.1 or 3. Its headers are not needed to build EPX: these functions and the numbers of the two
 * controls are the same in both.
 */
#include <pthread.h>

#include "util/crypto_library.h"

enum { GET_TAG = 0x10, SET_TAG = 0x11 }; /* EVP_CTRL_AEAD_... */

struct cipher_context;
struct cipher;
struct digest;

static const struct digest *(*sha256)(void);
static const struct cipher *(*chacha20_poly1305)(void);
static uint8_t *(*hmac_at_once)(const struct digest *digest, const void *key, int key_bytes, const uint8_t *data,
                                size_t bytes, uint8_t *out, unsigned *out_bytes);
static struct cipher_context *(*context_new)(void);
static void (*context_free)(struct cipher_context *context);
static int (*context_ctrl)(struct cipher_context *context, int what, int bytes, void *data);
/* The last argument of init: 1 = encrypt. */
static int (*cipher_init)(struct cipher_context *context, const struct cipher *cipher, void *engine, const uint8_t *key,
                          const uint8_t *nonce, int encrypt);
static int (*cipher_update)(struct cipher_context *context, uint8_t *out, int *out_bytes, const uint8_t *in, int bytes);
static int (*cipher_final)(struct cipher_context *context, uint8_t *out, int *out_bytes);

static int hmac(const uint8_t key[CRYPTO_KEY], const void *data, size_t bytes, uint8_t out[CRYPTO_KEY])
{
    unsigned written = 0;

    return hmac_at_once(sha256(), key, CRYPTO_KEY, data, bytes, out, &written) && written == CRYPTO_KEY ? 0 : -1;
}

static int seal(const uint8_t key[CRYPTO_KEY], const uint8_t nonce[CRYPTO_NONCE], const void *header,
                size_t header_bytes, const void *text, size_t bytes, uint8_t *out)
{
    struct cipher_context *context = context_new();
    int n = 0, rc;

    if (!context)
        return -1;
    rc = cipher_init(context, chacha20_poly1305(), NULL, key, nonce, 1) == 1 &&
         cipher_update(context, NULL, &n, header, (int)header_bytes) == 1 &&
         cipher_update(context, out, &n, text, (int)bytes) == 1 && cipher_final(context, out + bytes, &n) == 1 &&
         context_ctrl(context, GET_TAG, CRYPTO_TAG, out + bytes) == 1;
    context_free(context);
    return rc ? 0 : -1;
}

static int unseal(const uint8_t key[CRYPTO_KEY], const uint8_t nonce[CRYPTO_NONCE], const void *header,
                  size_t header_bytes, const uint8_t *sealed, size_t bytes, void *out)
{
    struct cipher_context *context = context_new();
    int n = 0, rc;

    if (!context)
        return -1;
    rc = cipher_init(context, chacha20_poly1305(), NULL, key, nonce, 0) == 1 &&
         cipher_update(context, NULL, &n, header, (int)header_bytes) == 1 &&
         cipher_update(context, out, &n, sealed, (int)bytes) == 1 &&
         context_ctrl(context, SET_TAG, CRYPTO_TAG, (void *)(uintptr_t)(sealed + bytes)) == 1 &&
         cipher_final(context, (uint8_t *)out + bytes, &n) == 1;
    context_free(context);
    return rc ? 0 : -1;
}

static const struct crypto_ops ops = {.name = "libcrypto", .hmac = hmac, .seal = seal, .unseal = unseal};
static int usable;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void open_once(void)
{
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so", NULL};
    void *handle = crypto_dlopen(names);

    usable = handle && !crypto_symbol(handle, "EVP_sha256", &sha256) &&
             !crypto_symbol(handle, "EVP_chacha20_poly1305", &chacha20_poly1305) &&
             !crypto_symbol(handle, "HMAC", &hmac_at_once) &&
             !crypto_symbol(handle, "EVP_CIPHER_CTX_new", &context_new) &&
             !crypto_symbol(handle, "EVP_CIPHER_CTX_free", &context_free) &&
             !crypto_symbol(handle, "EVP_CIPHER_CTX_ctrl", &context_ctrl) &&
             !crypto_symbol(handle, "EVP_CipherInit_ex", &cipher_init) &&
             !crypto_symbol(handle, "EVP_CipherUpdate", &cipher_update) &&
             !crypto_symbol(handle, "EVP_CipherFinal_ex", &cipher_final);
}

const struct crypto_ops *crypto_openssl(void)
{
    pthread_once(&once, open_once);
    return usable ? &ops : NULL;
}

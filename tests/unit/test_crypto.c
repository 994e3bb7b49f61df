/* SPDX-License-Identifier: Apache-2.0 */
/* The libraries under authentication: published vectors, and that both compute the same.
 * ctest: labels=notsan (one thread) */
#include <string.h>

#include "util/crypto.h"
#include "tests/lib/unit.h"

/* Runs `check` for every library of this machine, of which there must be one. */
static void for_all(void (*check)(const struct crypto_ops *ops))
{
    int end = 0, count = 0;

    for (int i = 0; !end; i++) {
        const struct crypto_ops *ops = crypto_library(i, &end);
        if (ops) {
            check(ops);
            count++;
        }
    }
    assert_true(count > 0);
    assert_non_null(crypto());
}

/* RFC 4231, test case 4, has a key of 25 bytes; HMAC fills a key up with zeros, so it is one of 32, too. */
static void check_hmac(const struct crypto_ops *ops)
{
    static const uint8_t expected[32] = {0x82, 0x55, 0x8a, 0x38, 0x9a, 0x44, 0x3c, 0x0e, 0xa4, 0xcc, 0x81,
                                         0x98, 0x99, 0xf2, 0x08, 0x3a, 0x85, 0xf0, 0xfa, 0xa3, 0xe5, 0x78,
                                         0xf8, 0x07, 0x7a, 0x2e, 0x3f, 0xf4, 0x67, 0x29, 0x66, 0x5b};
    uint8_t key[CRYPTO_KEY] = {0}, data[50], out[CRYPTO_KEY];

    for (int i = 0; i < 25; i++)
        key[i] = (uint8_t)(i + 1);
    memset(data, 0xcd, sizeof(data));
    assert_int_equal(ops->hmac(key, data, sizeof(data), out), 0);
    assert_memory_equal(out, expected, sizeof(expected));
}

static void hmac_is_that_of_rfc_4231(void **state)
{
    (void)state;
    for_all(check_hmac);
}

/* RFC 8439, section 2.8.2. */
static void check_seal(const struct crypto_ops *ops)
{
    static const char text[] = "Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
                               "future, sunscreen would be it.";
    static const uint8_t nonce[12] = {0x07, 0, 0, 0, 0x40, 0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x47};
    static const uint8_t header[12] = {0x50, 0x51, 0x52, 0x53, 0xc0, 0xc1, 0xc2, 0xc3, 0xc4, 0xc5, 0xc6, 0xc7};
    static const uint8_t first[8] = {0xd3, 0x1a, 0x8d, 0x34, 0x64, 0x8e, 0x60, 0xdb};
    static const uint8_t tag[16] = {0x1a, 0xe1, 0x0b, 0x59, 0x4f, 0x09, 0xe2, 0x6a,
                                    0x7e, 0x90, 0x2e, 0xcb, 0xd0, 0x60, 0x06, 0x91};
    enum { BYTES = sizeof(text) - 1 };
    uint8_t key[CRYPTO_KEY], sealed[BYTES + CRYPTO_TAG], opened[BYTES + 1];

    for (int i = 0; i < CRYPTO_KEY; i++)
        key[i] = (uint8_t)(0x80 + i);
    assert_int_equal(ops->seal(key, nonce, header, sizeof(header), text, BYTES, sealed), 0);
    assert_memory_equal(sealed, first, sizeof(first));
    assert_memory_equal(sealed + BYTES, tag, sizeof(tag));
    assert_int_equal(ops->unseal(key, nonce, header, sizeof(header), sealed, BYTES, opened), 0);
    assert_memory_equal(opened, text, BYTES);
    for (size_t i = 0; i < sizeof(sealed); i += 13) {
        sealed[i] ^= 1;
        assert_int_not_equal(ops->unseal(key, nonce, header, sizeof(header), sealed, BYTES, opened), 0);
        sealed[i] ^= 1;
    }
    assert_int_not_equal(ops->unseal(key, nonce, header, sizeof(header) - 1, sealed, BYTES, opened), 0);
}

static void sealing_is_that_of_rfc_8439(void **state)
{
    (void)state;
    for_all(check_seal);
}

static void secrets_are_compared_whole(void **state)
{
    uint8_t a[32] = {0}, b[32] = {0};

    (void)state;
    assert_true(crypto_equal(a, b, sizeof(a)));
    b[31] = 1;
    assert_false(crypto_equal(a, b, sizeof(a)));
    assert_true(crypto_equal(a, b, 31));
}

UNIT_TESTS(hmac_is_that_of_rfc_4231, sealing_is_that_of_rfc_8439, secrets_are_compared_whole)

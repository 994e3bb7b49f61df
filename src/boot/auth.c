/* SPDX-License-Identifier: Apache-2.0 */
#include "boot/auth.h"

#include <endian.h>
#include <stddef.h>
#include <string.h>

#include "util/build.h"

int auth_derive(const uint8_t key[CRYPTO_KEY], const char *label, const void *context, size_t bytes,
                uint8_t out[CRYPTO_KEY])
{
    const struct crypto_ops *ops = crypto();
    uint8_t text[256];
    const size_t length = strlen(label) + 1; /* its zero ends the label */

    if (!ops || length + bytes > sizeof(text))
        return -1;
    memcpy(text, label, length);
    if (bytes)
        memcpy(text + length, context, bytes);
    return ops->hmac(key, text, length + bytes, out);
}

/* HMAC of a label and both greetings. */
static int derive(const struct auth *auth, const char *label, uint8_t out[CRYPTO_KEY])
{
    struct auth_greeting both[2] = {auth->client_greeting, auth->server_greeting};

    return auth_derive(auth->key, label, both, sizeof(both), out);
}

/* By which a server knows from the first message who has the key. It may be said again by those who have heard it: it
 * proves nothing. */
static int make_mark(const struct auth *auth, const struct auth_greeting *greeting, uint8_t mark[AUTH_NONCE])
{
    uint8_t whole[CRYPTO_KEY];

    if (auth_derive(auth->key, "greeting", greeting, offsetof(struct auth_greeting, mark), whole))
        return -1;
    memcpy(mark, whole, AUTH_NONCE);
    return 0;
}

int auth_start(struct auth *auth, const uint8_t key[CRYPTO_KEY], enum auth_purpose purpose, int server)
{
    struct auth_greeting own = {
        .magic = AUTH_MAGIC, .version = AUTH_VERSION, .purpose = (uint16_t)purpose, .build = build_number()};

    memset(auth, 0, sizeof(*auth));
    memcpy(auth->key, key, CRYPTO_KEY);
    auth->server = server;
    if (!crypto() || crypto_random(own.nonce, sizeof(own.nonce)) != EPX_OK)
        return -1;
    if (server ? crypto_random(own.mark, sizeof(own.mark)) != EPX_OK : make_mark(auth, &own, own.mark))
        return -1;
    *(server ? &auth->server_greeting : &auth->client_greeting) = own;
    return 0;
}

/* Keeps the greeting of another version, too, for its build. */
static int understood(const struct auth_greeting *own, const struct auth_greeting *theirs, struct auth_greeting *kept)
{
    if (theirs->magic == AUTH_MAGIC)
        *kept = *theirs;
    return theirs->magic == AUTH_MAGIC && theirs->version == own->version && theirs->purpose == own->purpose;
}

uint64_t auth_build(const struct auth *auth)
{
    return (auth->server ? &auth->client_greeting : &auth->server_greeting)->build;
}

static int make_keys(struct auth *auth)
{
    return derive(auth, auth->server ? "records of the server" : "records of the client", auth->send.key) ||
           derive(auth, auth->server ? "records of the client" : "records of the server", auth->receive.key);
}

enum auth_result auth_take_greeting(struct auth *auth, const struct auth_greeting *greeting, struct auth_reply *reply)
{
    uint8_t expected[AUTH_NONCE];

    memset(reply, 0, sizeof(*reply));
    reply->greeting = auth->server_greeting;
    if (!understood(&auth->server_greeting, greeting, &auth->client_greeting))
        return AUTH_ALIEN;
    if (derive(auth, "server", reply->proof) || make_mark(auth, greeting, expected))
        return AUTH_ALIEN;
    return crypto_equal(expected, greeting->mark, sizeof(expected)) ? AUTH_OK : AUTH_STRANGER;
}

enum auth_result auth_take_reply(struct auth *auth, const struct auth_reply *reply, struct auth_proof *proof)
{
    uint8_t expected[CRYPTO_KEY];

    if (!understood(&auth->client_greeting, &reply->greeting, &auth->server_greeting))
        return AUTH_ALIEN;
    if (derive(auth, "server", expected) || !crypto_equal(expected, reply->proof, sizeof(expected)))
        return AUTH_STRANGER;
    return derive(auth, "client", proof->proof) || make_keys(auth) ? AUTH_ALIEN : AUTH_OK;
}

enum auth_result auth_take_proof(struct auth *auth, const struct auth_proof *proof)
{
    uint8_t expected[CRYPTO_KEY];

    if (derive(auth, "client", expected) || !crypto_equal(expected, proof->proof, sizeof(expected)))
        return AUTH_STRANGER;
    return make_keys(auth) ? AUTH_ALIEN : AUTH_OK;
}

/* A key is used for one direction of one connection, so the number of the record is enough. */
static void make_nonce(uint64_t number, uint8_t nonce[CRYPTO_NONCE])
{
    number = htole64(number);
    memset(nonce, 0, CRYPTO_NONCE);
    memcpy(nonce + CRYPTO_NONCE - sizeof(number), &number, sizeof(number));
}

size_t auth_seal(struct auth *auth, const void *text, size_t bytes, uint8_t *out)
{
    const struct crypto_ops *ops = crypto();
    const uint32_t head = htole32((uint32_t)bytes);
    uint8_t nonce[CRYPTO_NONCE];

    if (!ops || !bytes || bytes > AUTH_RECORD)
        return 0;
    make_nonce(auth->send.number++, nonce);
    memcpy(out, &head, sizeof(head));
    if (ops->seal(auth->send.key, nonce, out, sizeof(head), text, bytes, out + sizeof(head)))
        return 0;
    return sizeof(head) + bytes + CRYPTO_TAG;
}

size_t auth_record_bytes(const uint8_t head[4])
{
    uint32_t bytes;

    memcpy(&bytes, head, sizeof(bytes));
    bytes = le32toh(bytes);
    return bytes <= AUTH_RECORD ? bytes : 0;
}

int auth_unseal(struct auth *auth, const uint8_t *record, size_t bytes, void *text)
{
    const struct crypto_ops *ops = crypto();
    uint8_t nonce[CRYPTO_NONCE];

    if (!ops || !bytes || bytes != auth_record_bytes(record))
        return -1;
    make_nonce(auth->receive.number++, nonce);
    return ops->unseal(auth->receive.key, nonce, record, 4, record + 4, bytes, text);
}

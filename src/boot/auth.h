/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How two ends of a connection prove to each other that they know the same key, before anything else is said, and how
 * they seal what they say then. No function here touches a socket.
 *
 *      client (connects)                                server (listens)
 *        | -- GREETING (build, nonce, mark) ------------> | the mark is an HMAC of the rest: nobody waits for the proof
 *        |                                                | of a client without the key, which is told all the same
 *        | <-------- REPLY (nonce, HMAC "server" of both)- | a client without the key learns 32 bytes of no use
 *        | checks it: nothing more for a server without   |
 *        | -- PROOF (HMAC "client" of both) ------------> | checks it, or closes
 *        | == records ==================================> |
 *        | <================================== records == |
 *
 * Greetings, replies and proofs keep their layout in all builds, so that ranks of different ones can say so: each side
 * has the number of the other's build (util/build.h) in clear, before any proof. It is for messages alone. What refuses
 * a rank of another build is its hello (wire.h), where nobody else can have set the number.
 *
 *      record:  bytes (4, authenticated) | text, encrypted (bytes) | tag (16)
 *
 * Each direction has its own key, made of the shared key and both nonces, and numbers its records: a record that was
 * changed, left out, repeated or taken from another connection is not accepted.
 */
#ifndef EPX_BOOT_AUTH_H
#define EPX_BOOT_AUTH_H

#include <assert.h>

#include "util/crypto.h"

enum {
    AUTH_MAGIC = 0x41585045, /* "EPXA" */
    AUTH_VERSION = 3,
    AUTH_NONCE = 16,
    AUTH_RECORD = 8192 /* most bytes of text in a record */
};

enum auth_purpose { AUTH_RENDEZVOUS = 1, AUTH_MEMBERSHIP = 2, AUTH_TREE = 3 };

struct auth_greeting {
    uint32_t magic;
    uint16_t version, purpose;
    uint64_t build;
    uint8_t nonce[AUTH_NONCE];
    uint8_t mark[AUTH_NONCE]; /* client: HMAC of what is before it; server: random too */
};
static_assert(sizeof(struct auth_greeting) == 48, "on the wire");

struct auth_reply {
    struct auth_greeting greeting; /* the server's */
    uint8_t proof[CRYPTO_KEY];
};
static_assert(sizeof(struct auth_reply) == 80, "on the wire");

struct auth_proof {
    uint8_t proof[CRYPTO_KEY];
};
static_assert(sizeof(struct auth_proof) == 32, "on the wire");

struct auth_direction {
    uint8_t key[CRYPTO_KEY];
    uint64_t number; /* of the next record */
};

/* One end of a connection. */
struct auth {
    uint8_t key[CRYPTO_KEY]; /* shared */
    int server;
    struct auth_greeting client_greeting, server_greeting;
    struct auth_direction send, receive;
};

/* What a message means for the connection. */
enum auth_result {
    AUTH_OK,
    AUTH_ALIEN,   /* not EPX, another version of this protocol, or another purpose */
    AUTH_STRANGER /* it does not know the key */
};

/* The number of the other end's build, if it has sent one that can be read, or 0. */
uint64_t auth_build(const struct auth *auth);
/* 0, or -1: no random numbers, or the library failed. */
int auth_start(struct auth *auth, const uint8_t key[CRYPTO_KEY], enum auth_purpose purpose, int server);
/* Server: takes a greeting and makes the reply, for a stranger too: it sees by that whose secret is another. */
enum auth_result auth_take_greeting(struct auth *auth, const struct auth_greeting *greeting, struct auth_reply *reply);
/* Client: takes a reply and makes the proof; may seal and unseal from then on. */
enum auth_result auth_take_reply(struct auth *auth, const struct auth_reply *reply, struct auth_proof *proof);
/* Server: takes a proof; may seal and unseal from then on. */
enum auth_result auth_take_proof(struct auth *auth, const struct auth_proof *proof);

/* out: 4 + bytes + CRYPTO_TAG. Returns that number, or 0: the library failed. bytes: 1 to AUTH_RECORD. */
size_t auth_seal(struct auth *auth, const void *text, size_t bytes, uint8_t *out);
/* The bytes of text that follow the first four of a record, or 0: invalid. */
size_t auth_record_bytes(const uint8_t head[4]);
/* record: 4 + bytes + CRYPTO_TAG. 0, or -1: it is not the next record of this connection. */
int auth_unseal(struct auth *auth, const uint8_t *record, size_t bytes, void *text);

/* A key for one use of a key: HMAC of a label and a context. */
int auth_derive(const uint8_t key[CRYPTO_KEY], const char *label, const void *context, size_t bytes,
                uint8_t out[CRYPTO_KEY]);

#endif

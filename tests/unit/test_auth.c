/* SPDX-License-Identifier: Apache-2.0 */
/* How two ends of a connection prove the key and seal what they say: messages in memory, no sockets. */
#include <string.h>

#include "boot/auth.h"
#include "util/text.h"
#include "tests/lib/unit.h"

static const uint8_t ours[CRYPTO_KEY] = {1, 2, 3}, theirs[CRYPTO_KEY] = {3, 2, 1};

struct pair {
    struct auth client, server;
    struct auth_reply reply;
    struct auth_proof proof;
};

/* Up to the client's proof. */
static enum auth_result meet(struct pair *p, const uint8_t *client_key, const uint8_t *server_key)
{
    assert_int_equal(auth_start(&p->client, client_key, AUTH_RENDEZVOUS, 0), 0);
    assert_int_equal(auth_start(&p->server, server_key, AUTH_RENDEZVOUS, 1), 0);
    assert_int_equal(auth_take_greeting(&p->server, &p->client.client_greeting, &p->reply),
                     client_key == server_key ? AUTH_OK : AUTH_STRANGER);
    return auth_take_reply(&p->client, &p->reply, &p->proof);
}

static void both_ends_that_know_the_key_talk(void **state)
{
    uint8_t record[4 + AUTH_RECORD + CRYPTO_TAG], text[AUTH_RECORD];
    struct pair p;

    (void)state;
    assert_int_equal(meet(&p, ours, ours), AUTH_OK);
    assert_int_equal(auth_take_proof(&p.server, &p.proof), AUTH_OK);
    for (size_t bytes = 1; bytes <= AUTH_RECORD; bytes = bytes * 5 + 1) {
        memset(text, (int)bytes, bytes);
        assert_int_equal(auth_seal(&p.client, text, bytes, record), 4 + bytes + CRYPTO_TAG);
        assert_int_equal(auth_record_bytes(record), bytes);
        memset(text, 0, bytes);
        assert_int_equal(auth_unseal(&p.server, record, bytes, text), 0);
        assert_int_equal(text[bytes - 1], (uint8_t)bytes);
    }
}

static void a_server_without_the_key_is_found_out_first(void **state)
{
    struct pair p;

    (void)state;
    assert_int_equal(meet(&p, ours, theirs), AUTH_STRANGER);
}

static void a_client_without_the_key_is_found_out(void **state)
{
    struct pair p;

    (void)state;
    meet(&p, theirs, ours); /* it could go on all the same */
    memset(&p.proof, 0, sizeof(p.proof));
    assert_int_equal(auth_take_proof(&p.server, &p.proof), AUTH_STRANGER);
}

/* What a server says is of no use as a client's proof, and a recorded proof is of no use another time. */
static void nothing_can_be_said_again(void **state)
{
    struct pair p, q;

    (void)state;
    assert_int_equal(meet(&p, ours, ours), AUTH_OK);
    assert_int_equal(meet(&q, ours, ours), AUTH_OK);
    memcpy(&q.proof, p.reply.proof, sizeof(q.proof));
    assert_int_equal(auth_take_proof(&p.server, &q.proof), AUTH_STRANGER);
    assert_int_equal(auth_take_proof(&q.server, &p.proof), AUTH_STRANGER);
    assert_int_equal(auth_take_reply(&q.client, &p.reply, &q.proof), AUTH_STRANGER);
}

static void another_purpose_version_or_magic_is_alien(void **state)
{
    struct pair p;

    (void)state;
    for (int what = 0; what < 3; what++) {
        meet(&p, ours, ours);
        p.client.client_greeting.magic ^= what == 0;
        p.client.client_greeting.version ^= what == 1;
        p.client.client_greeting.purpose ^= what == 2 ? AUTH_RENDEZVOUS ^ AUTH_MEMBERSHIP : 0;
        assert_int_equal(auth_take_greeting(&p.server, &p.client.client_greeting, &p.reply), AUTH_ALIEN);
    }
}

/* Both ends can name the other's build, of which nothing else may be understood. */
static void another_version_shows_its_build(void **state)
{
    struct pair p;

    (void)state;
    meet(&p, ours, theirs);
    p.client.client_greeting.version++;
    p.client.client_greeting.build = 17;
    assert_int_equal(auth_take_greeting(&p.server, &p.client.client_greeting, &p.reply), AUTH_ALIEN);
    assert_int_equal(auth_build(&p.server), 17);
    p.reply.greeting.build = 18;
    assert_int_equal(auth_take_reply(&p.client, &p.reply, &p.proof), AUTH_ALIEN);
    assert_int_equal(auth_build(&p.client), 18);
}

static void records_are_taken_once_whole_and_in_order(void **state)
{
    uint8_t first[4 + 8 + CRYPTO_TAG], second[4 + 8 + CRYPTO_TAG], text[8] = "records";
    struct pair p;

    (void)state;
    for (int what = 0; what < 4; what++) {
        assert_int_equal(meet(&p, ours, ours), AUTH_OK);
        assert_int_equal(auth_take_proof(&p.server, &p.proof), AUTH_OK);
        auth_seal(&p.client, text, 8, first);
        auth_seal(&p.client, text, 8, second);
        if (what == 0)
            assert_int_not_equal(auth_unseal(&p.server, second, 8, text), 0);
        if (what == 1)
            assert_int_not_equal(auth_unseal(&p.client, first, 8, text), 0); /* sent back */
        if (what == 2) {
            assert_int_equal(auth_unseal(&p.server, first, 8, text), 0);
            assert_int_not_equal(auth_unseal(&p.server, first, 8, text), 0);
        }
        if (what == 3) {
            first[9] ^= 4;
            assert_int_not_equal(auth_unseal(&p.server, first, 8, text), 0);
        }
    }
    memset(first, 0xff, 4);
    assert_int_equal(auth_record_bytes(first), 0);
    assert_int_not_equal(auth_unseal(&p.server, first, 0, text), 0);
}

static void text_of_others_is_harmless(void **state)
{
    char out[16];

    (void)state;
    assert_string_equal(text_clean(out, sizeof(out), "rank 3", 6), "rank 3");
    assert_string_equal(text_clean(out, sizeof(out), "a\x1b[2J\r\nb\x7f", 20), "a?[2J??b?");
    assert_string_equal(text_clean(out, sizeof(out), "\xc3\xa4\xff\xc2\x9b", 20), "\xc3\xa4??"
                                                                                  "?");
    assert_string_equal(text_clean(out, 4, "endless", 7), "end");
    assert_string_equal(text_clean(out, sizeof(out), "no zero here", 2), "no");
    assert_string_equal(text_clean(out, 5, "abc\xc3\xa4", 5), "abc");
}

UNIT_TESTS(both_ends_that_know_the_key_talk, a_server_without_the_key_is_found_out_first,
           a_client_without_the_key_is_found_out, nothing_can_be_said_again, another_purpose_version_or_magic_is_alien,
           another_version_shows_its_build, records_are_taken_once_whole_and_in_order, text_of_others_is_harmless)

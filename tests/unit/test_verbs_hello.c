/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hellos of queue pairs where the proof cannot be computed: none is sent, and none is accepted, also not one with the
 * zeros that a rank without a key sends. The card is a table of functions that do nothing.
 */
#include <stddef.h>

#include "boot/auth.h"
#include "net/net.h"
#include "util/crypto_library.h"
#include "tests/lib/unit.h"

#include "net/verbs/rc.h"

#if EPX_HAVE_VERBS

enum { RANKS = 2, OWN = 1, GRH = 40, SLOTS = 1 };
#define TOKEN 0x1122334455667788ull

/* ---- A library for HMACs that stops to work, in the place of all others ----------------------------------------- */

static int crypto_works = 1;

static int hmac(const uint8_t key[CRYPTO_KEY], const void *data, size_t bytes, uint8_t out[CRYPTO_KEY])
{
    memcpy(out, key, CRYPTO_KEY);
    for (size_t i = 0; i < bytes; i++)
        out[i % CRYPTO_KEY] = (uint8_t)(out[i % CRYPTO_KEY] * 31 + ((const uint8_t *)data)[i] + 1);
    return crypto_works ? 0 : -1;
}

static int seal(const uint8_t key[CRYPTO_KEY], const uint8_t nonce[CRYPTO_NONCE], const void *header,
                size_t header_bytes, const void *text, size_t bytes, uint8_t *out)
{
    (void)key, (void)nonce, (void)header, (void)header_bytes;
    memcpy(out, text, bytes);
    return 0;
}

static int unseal(const uint8_t key[CRYPTO_KEY], const uint8_t nonce[CRYPTO_NONCE], const void *header,
                  size_t header_bytes, const uint8_t *sealed, size_t bytes, void *out)
{
    (void)key, (void)nonce, (void)header, (void)header_bytes;
    memcpy(out, sealed, bytes);
    return 0;
}

static const struct crypto_ops ops = {.name = "a test", .hmac = hmac, .seal = seal, .unseal = unseal};

const struct crypto_ops *crypto_sodium(void)
{
    return &ops;
}

const struct crypto_ops *crypto_openssl(void)
{
    return NULL;
}

/* ---- The card ---------------------------------------------------------------------------------------------------- */

static struct ibv_context context;
static struct ibv_qp pairs[RANKS + 1];
static int npairs, sent;

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    (void)qp, (void)wr, (void)bad;
    sent++;
    return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    (void)qp, (void)wr, (void)bad;
    return 0;
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    (void)pd, (void)attr;
    pairs[npairs] = (struct ibv_qp){.context = &context, .qp_num = (uint32_t)npairs + 1};
    return &pairs[npairs++];
}

static int modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    (void)qp, (void)attr, (void)mask;
    return 0;
}

static int destroy_qp(struct ibv_qp *qp)
{
    (void)qp;
    return 0;
}

static const struct verbs_lib card = {.create_qp = create_qp, .modify_qp = modify_qp, .destroy_qp = destroy_qp};

struct bench {
    struct verbs_net net;
    struct rc_state rc;
    struct verbs_peer peers[RANKS];
    struct ibv_srq srq;
    struct ibv_mr mr;
    int dirty[RANKS];
    uint8_t memory[(SLOTS + HELLO_SENDS) * HELLO_BYTES];
};

static struct verbs_net *set_up(struct bench *b)
{
    memset(b, 0, sizeof(*b));
    npairs = sent = 0;
    crypto_works = 1;
    context.ops.post_send = post_send;
    context.ops.post_recv = post_recv;
    b->net = (struct verbs_net){.net = {.ops = &net_verbs_ops},
                                .lib = &card,
                                .transport = &verbs_rc,
                                .card = {.mtu = IBV_MTU_1024},
                                .rank = OWN,
                                .nranks = RANKS,
                                .timeout_ms = 1000,
                                .token = TOKEN,
                                .has_key = 1,
                                .context = &context,
                                .peers = b->peers,
                                .state = &b->rc};
    b->rc = (struct rc_state){.depth = RC_DEPTH,
                              .srq = &b->srq,
                              .shared = 1,
                              .hello_receives = SLOTS,
                              .ud = create_qp(NULL, NULL),
                              .ud_mr = &b->mr,
                              .ud_memory = b->memory,
                              .dirty = b->dirty};
    b->peers[0].known = 1;
    b->peers[0].address.token = TOKEN + 1;
    return &b->net;
}

struct hello_text { /* as hello.c has it */
    uint32_t magic;
    uint16_t version, flags;
    uint64_t to, from;
    uint32_t rank, qpn, psn, reserved;
    uint8_t mac[16];
};

static void take(struct verbs_net *net, int proved)
{
    const struct ibv_wc wc = {
        .wr_id = WR_ID(WR_HELLO_RECEIVE, 0, 0), .status = IBV_WC_SUCCESS, .byte_len = GRH + sizeof(struct hello_text)};
    struct hello_text hello = {.magic = 0x48585045u, .version = 2, .to = TOKEN, .from = TOKEN + 1, .qpn = 7};
    uint8_t mac[CRYPTO_KEY] = {0};

    if (proved)
        assert_int_equal(auth_derive(net->key, "hello of a queue pair", &hello, offsetof(struct hello_text, mac), mac),
                         0);
    memcpy(hello.mac, mac, sizeof(hello.mac));
    memcpy(rc_of(net)->ud_memory + GRH, &hello, sizeof(hello));
    hello_take(net, &wc);
}

static void only_a_proof_that_is_verified_is_accepted(void **state)
{
    static struct bench b;
    struct verbs_net *net = set_up(&b);

    (void)state;
    take(net, 0);
    assert_null(net->peers[0].pair);
    crypto_works = 0;
    take(net, 0); /* zeros, and this rank has no proof to compare them with */
    assert_null(net->peers[0].pair);
    crypto_works = 1;
    take(net, 1);
    assert_non_null(net->peers[0].pair);
    assert_true(net->peers[0].pair->have && sent == 1);
    free(net->peers[0].pair);
}

static void nothing_is_sent_without_a_proof(void **state)
{
    static struct bench b;
    struct verbs_net *net = set_up(&b);

    (void)state;
    crypto_works = 0;
    hello_want(net, 0);
    assert_int_equal(sent, 0);
    assert_true(net->broken);
    free(net->peers[0].pair);
}

UNIT_TESTS(only_a_proof_that_is_verified_is_accepted, nothing_is_sent_without_a_proof)

#else

int main(void)
{
    print_message("EPX is built without verbs\n");
    return 77;
}

#endif

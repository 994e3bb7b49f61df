/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How two ranks exchange the numbers of their queue pairs. A reliable connection needs one queue pair per PEER, and
 * their numbers are too many for the bootstrap (ranks x ranks). So every endpoint exports one datagram queue pair, and
 * two ranks connect over it when the first of the two has a put for the other:
 *
 *     rank a: put to b                                    rank b
 *       makes queue pair 17
 *       HELLO (17, psn)                ------------->       makes queue pair 42, connects it to 17
 *       connects 17 to 42              <-------------       HELLO (42, psn, HAVE)
 *       may put from now on
 *       HELLO (17, psn, HAVE, DONE)    ------------->       may put from now on
 *
 *     HAVE: I have your queue pair, mine sends and receives.  DONE: and I know that you have mine.
 *
 * Datagrams can be lost and duplicated: a hello is repeated until a reply arrives, every hello that is not DONE is
 * replied to with the own state, and each may arrive any number of times. Both may start at the same time. A hello
 * carries the tokens of its receiver and of its sender. Both were exchanged through the bootstrap, so that hellos of
 * another job, or of an earlier group of this job, are ignored; and an HMAC by the group's key, so that nobody else can
 * make one, even who has seen tokens go by. A rank that does not know the peer's address yet ignores a hello too: it
 * will be repeated. From then on the card checks the sender: a queue pair takes packets of the one it is connected to.
 */
#include "net/verbs/rc.h"

#if EPX_HAVE_VERBS

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "boot/auth.h"
#include "util/clock.h"
#include "util/log.h"
#include "util/status.h"

#define HELLO_MAGIC 0x48585045u /* "EPXH" */
#define HELLO_VERSION 2
enum { HELLO_HAVE = 1, HELLO_DONE = 2 };
enum { GRH_BYTES = 40, FIRST_PAUSE_MS = 20, LAST_PAUSE_MS = 640 };
#define MS 1000000ull

struct hello { /* little endian */
    uint32_t magic;
    uint16_t version, flags;
    uint64_t to, from; /* tokens */
    uint32_t rank, qpn, psn, reserved;
    uint8_t mac[16]; /* of what is before it; zeros without a key */
};
_Static_assert(sizeof(struct hello) == 56, "crosses the wire");
_Static_assert(GRH_BYTES + sizeof(struct hello) <= HELLO_BYTES, "fits a receive buffer");

/* 0, or -1: it cannot be computed. */
static int make_mac(const struct verbs_net *net, const struct hello *hello, uint8_t mac[16])
{
    uint8_t all[CRYPTO_KEY] = {0};

    if (net->has_key && auth_derive(net->key, "hello of a queue pair", hello, offsetof(struct hello, mac), all))
        return -1;
    memcpy(mac, all, 16);
    return 0;
}

/* ---- The datagram queue pair ---------------------------------------------------------------------------------- */

static int post_receive(struct verbs_net *net, uint32_t slot)
{
    struct rc_state *rc = rc_of(net);
    struct ibv_sge piece = {.addr = (uint64_t)(uintptr_t)(rc->ud_memory + (size_t)slot * HELLO_BYTES),
                            .length = HELLO_BYTES,
                            .lkey = rc->ud_mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = WR_ID(WR_HELLO_RECEIVE, 0, slot), .sg_list = &piece, .num_sge = 1}, *bad;

    return ibv_post_recv(rc->ud, &wr, &bad);
}

static int start_ud(struct verbs_net *net)
{
    struct rc_state *rc = rc_of(net);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = net->card.port, .qkey = rc->qkey};
    int error = net->lib->modify_qp(rc->ud, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);

    for (int i = 0; !error && i < rc->hello_receives; i++)
        error = post_receive(net, (uint32_t)i);
    attr.qp_state = IBV_QPS_RTR;
    if (!error)
        error = net->lib->modify_qp(rc->ud, &attr, IBV_QP_STATE);
    attr.qp_state = IBV_QPS_RTS;
    if (!error)
        error = net->lib->modify_qp(rc->ud, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
    return error;
}

epx_status hello_open(struct verbs_net *net)
{
    struct rc_state *rc = rc_of(net);
    const size_t bytes = (size_t)(rc->hello_receives + HELLO_SENDS) * HELLO_BYTES;
    struct ibv_qp_init_attr init = {.send_cq = net->cq,
                                    .recv_cq = net->cq,
                                    .qp_type = IBV_QPT_UD,
                                    .sq_sig_all = 1,
                                    .cap = {.max_send_wr = HELLO_SENDS,
                                            .max_recv_wr = (uint32_t)rc->hello_receives,
                                            .max_send_sge = 1,
                                            .max_recv_sge = 1}};
    int error;

    rc->qkey = (uint32_t)(net->token >> 32) & 0x7fffffff; /* the high bit would ask for a privileged one */
    if (posix_memalign((void **)&rc->ud_memory, 4096, bytes)) {
        rc->ud_memory = NULL;
        return fail(EPX_ERR_MEMORY, "verbs: no memory for %zu bytes of hellos", bytes);
    }
    memset(rc->ud_memory, 0, bytes);
    rc->ud_mr = net->lib->reg_mr(net->pd, rc->ud_memory, bytes, IBV_ACCESS_LOCAL_WRITE);
    if (!rc->ud_mr)
        return fail_errno(EPX_ERR_SYSTEM, "verbs: %s cannot register %zu bytes", net->card.device, bytes);
    rc->ud = net->lib->create_qp(net->pd, &init);
    if (!rc->ud)
        return fail_errno(EPX_ERR_SYSTEM, "verbs: %s: no datagram queue pair", net->card.device);
    error = start_ud(net);
    if (error) {
        errno = error;
        return fail_errno(EPX_ERR_SYSTEM, "verbs: %s: the datagram queue pair cannot be started", net->card.device);
    }
    return EPX_OK;
}

void hello_close(struct verbs_net *net)
{
    struct rc_state *rc = rc_of(net);

    if (rc->ud)
        net->lib->destroy_qp(rc->ud);
    if (rc->ud_mr)
        net->lib->dereg_mr(rc->ud_mr);
    free(rc->ud_memory);
}

/* ---- Sending -------------------------------------------------------------------------------------------------- */

/* A hello that does not fit into the send queue is lost like any other datagram: it will be repeated. */
static void send_hello(struct verbs_net *net, int peer)
{
    struct rc_state *rc = rc_of(net);
    struct verbs_peer *p = &net->peers[peer];
    struct verbs_pair *pair = p->pair;
    const uint32_t slot = rc->hello_next % HELLO_SENDS;
    uint8_t *memory = rc->ud_memory + (size_t)((uint32_t)rc->hello_receives + slot) * HELLO_BYTES;
    struct hello hello = {.magic = HELLO_MAGIC,
                          .version = HELLO_VERSION,
                          .flags = (uint16_t)((pair->have ? HELLO_HAVE : 0) | (pair->done ? HELLO_DONE : 0)),
                          .to = p->address.token,
                          .from = net->token,
                          .rank = (uint32_t)net->rank,
                          .qpn = pair->qp->qp_num,
                          .psn = pair->psn};
    struct ibv_sge piece = {.addr = (uint64_t)(uintptr_t)memory, .length = sizeof(hello), .lkey = rc->ud_mr->lkey};
    struct ibv_send_wr wr = {.wr_id = WR_ID(WR_HELLO, peer, slot),
                             .sg_list = &piece,
                             .num_sge = 1,
                             .opcode = IBV_WR_SEND,
                             .send_flags = IBV_SEND_SIGNALED,
                             .wr.ud = {.ah = p->ah, .remote_qpn = p->address.qpn, .remote_qkey = p->address.qkey}},
                       *bad;

    if (rc->hello_sending >= HELLO_SENDS)
        return;
    if (make_mac(net, &hello, hello.mac)) {
        verbs_break(net, EIO, "the proof of a hello cannot be computed");
        return;
    }
    memcpy(memory, &hello, sizeof(hello));
    if (ibv_post_send(rc->ud, &wr, &bad)) {
        verbs_break(net, EIO, "the datagram queue pair takes no hello");
        return;
    }
    rc->hello_next++;
    rc->hello_sending++;
}

static void ask(struct verbs_net *net, struct verbs_pair *pair)
{
    struct rc_state *rc = rc_of(net);

    if (!pair->repeat_ns)
        net->asking++;
    pair->pause_ms = FIRST_PAUSE_MS;
    pair->repeat_ns = clock_ns() + pair->pause_ms * MS;
    pair->deadline_ns = 0;
    if (net->asking == 1 || pair->repeat_ns < rc->repeat_ns)
        rc->repeat_ns = pair->repeat_ns;
}

static void stop(struct verbs_net *net, struct verbs_pair *pair)
{
    if (pair->repeat_ns)
        net->asking--;
    pair->repeat_ns = 0;
}

void hello_stop(struct verbs_net *net, int peer)
{
    stop(net, net->peers[peer].pair);
}

void hello_want(struct verbs_net *net, int peer)
{
    struct verbs_pair *pair = rc_pair(net, peer);

    if (!pair || (pair->wanted && pair->repeat_ns))
        return;
    pair->wanted = 1;
    ask(net, pair);
    send_hello(net, peer);
}

static void repeat(struct verbs_net *net, int peer, struct verbs_pair *pair, uint64_t now)
{
    if (now < pair->repeat_ns)
        return;
    pair->pause_ms = pair->pause_ms * 2 > LAST_PAUSE_MS ? LAST_PAUSE_MS : pair->pause_ms * 2;
    pair->repeat_ns = now + pair->pause_ms * MS;
    send_hello(net, peer);
}

int hello_progress(struct verbs_net *net)
{
    struct rc_state *rc = rc_of(net);
    uint64_t now;

    if (!net->asking || (now = clock_ns()) < rc->repeat_ns)
        return net->asking;
    rc->repeat_ns = now + LAST_PAUSE_MS * MS;
    for (int i = 0; i < net->nranks; i++) {
        struct verbs_pair *pair = net->peers[i].pair;
        if (!pair || !pair->repeat_ns)
            continue;
        repeat(net, i, pair, now);
        if (pair->repeat_ns < rc->repeat_ns)
            rc->repeat_ns = pair->repeat_ns;
    }
    return net->asking;
}

/* The time counts from the first check on: polled_ns may be from long before the hello was sent. */
static void expire(struct verbs_net *net, int peer, struct verbs_pair *pair)
{
    if (!pair->deadline_ns)
        pair->deadline_ns = net->polled_ns + (uint64_t)net->timeout_ms * MS;
    if (net->polled_ns < pair->deadline_ns)
        return;
    stop(net, pair);
    if (pair->wanted)
        verbs_peer_lost(net, peer, ETIMEDOUT, "it did not reply to a hello");
}

void hello_expire(struct verbs_net *net)
{
    for (int i = 0; i < net->nranks && net->asking; i++) {
        struct verbs_pair *pair = net->peers[i].pair;
        if (pair && pair->repeat_ns)
            expire(net, i, pair);
    }
}

/* ---- Listening ------------------------------------------------------------------------------------------------ */

/* The rank that sent a valid hello, or -1. */
static int check(const struct verbs_net *net, const struct hello *hello)
{
    uint8_t mac[sizeof(hello->mac)];

    if (hello->magic != HELLO_MAGIC || hello->version != HELLO_VERSION || hello->to != net->token ||
        hello->rank >= (uint32_t)net->nranks)
        return -1;
    if (!net->peers[hello->rank].known || net->peers[hello->rank].address.token != hello->from)
        return -1;
    if (make_mac(net, hello, mac) || !crypto_equal(mac, hello->mac, sizeof(mac)))
        return -1;
    return (int)hello->rank;
}

static void listen_to(struct verbs_net *net, const struct hello *hello)
{
    const int peer = check(net, hello);
    struct verbs_pair *pair;

    if (peer < 0 || !(pair = rc_pair(net, peer)))
        return;
    if (!pair->have) {
        if (rc_pair_connect(net, peer, hello->qpn & 0xffffff, hello->psn & 0xffffff))
            return;
        pair->have = 1;
    }
    if (!pair->done && (hello->flags & HELLO_HAVE)) {
        pair->done = 1;
        pair->wanted = 0;
        stop(net, pair);
    } else if (!pair->done && !pair->repeat_ns) {
        ask(net, pair);
    }
    if (!(hello->flags & HELLO_DONE))
        send_hello(net, peer);
}

void hello_take(struct verbs_net *net, const struct ibv_wc *wc)
{
    struct rc_state *rc = rc_of(net);
    const uint32_t slot = WR_NUMBER(wc->wr_id);
    struct hello hello;

    if (WR_KIND(wc->wr_id) == WR_HELLO) {
        rc->hello_sending--;
        if (wc->status != IBV_WC_SUCCESS)
            verbs_break(net, EIO, net->lib->wc_status_str(wc->status));
        return;
    }
    if (wc->status != IBV_WC_SUCCESS) {
        verbs_break(net, EIO, net->lib->wc_status_str(wc->status));
        return;
    }
    memcpy(&hello, rc->ud_memory + (size_t)slot * HELLO_BYTES + GRH_BYTES, sizeof(hello));
    if (post_receive(net, slot))
        verbs_break(net, EIO, "the datagram queue pair takes no receives");
    if (wc->byte_len == GRH_BYTES + sizeof(hello))
        listen_to(net, &hello);
    else
        log_line(LOG_DEBUG, "verbs: ignored a datagram of %u bytes that is no hello", wc->byte_len);
}

#endif

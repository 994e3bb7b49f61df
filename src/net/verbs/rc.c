/* SPDX-License-Identifier: Apache-2.0 */
/* Reliable connections: queue pairs, chains of puts, receives. */
#include "net/verbs/rc.h"

#if EPX_HAVE_VERBS

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "util/env.h"
#include "util/log.h"
#include "util/status.h"

/* ---- Opening -------------------------------------------------------------------------------------------------- */

/* The largest power of two up to `want` that is no more than `limit`. */
static int fit(int want, int limit)
{
    while (want > limit && want > 1)
        want /= 2;
    return want;
}

/*
 * The card repeats a packet `retries` times, after 4.096 us * 2^timeout each: by default for about eight seconds, less
 * where the timeout of the group is shorter. Not 7 times: for Soft-RoCE that means "for ever". A card may take up to
 * four times as long, and cards have lower bounds of their own: deadline.c keeps the group's timeout. A fourth of it
 * here would make cards that take no longer lose peers for a few packets that were dropped.
 */
static void choose_timeout(struct verbs_net *net, struct rc_state *rc)
{
    int timeout = 18;

    rc->retries = (int)env_int("EPX_IB_RETRY_CNT", 6, 0, 7);
    while (timeout > 10 && (4096ull << timeout) * (uint64_t)(rc->retries + 1) > (uint64_t)net->timeout_ms * 1000000)
        timeout--;
    rc->timeout = (int)env_int("EPX_IB_TIMEOUT", timeout, 1, 31);
    net->grace_ns = (4096ull << rc->timeout) * (uint64_t)(rc->retries + 1);
}

/*
 * Every completion has room: the queue holds the receives, the puts in flight (also the unsignalled ones: all of them
 * complete when a queue pair fails) and the hellos.
 */
static epx_status rc_size(struct verbs_net *net, const struct ibv_device_attr *device, int *entries)
{
    struct rc_state *rc = net->state = calloc(1, sizeof(*rc));
    int hellos, receives, want_srq = (int)env_int("EPX_IB_SRQ", 1, 0, 1);

    if (!rc || !(rc->dirty = calloc((size_t)net->nranks, sizeof(*rc->dirty))))
        return fail(EPX_ERR_MEMORY, "verbs: no memory for the state of %d pairs", net->nranks);
    choose_timeout(net, rc);
    rc->depth = (uint32_t)fit(RC_DEPTH, device->max_qp_wr);
    rc->hello_receives = net->nranks < 64 ? 64 : net->nranks > 1024 ? 1024 : net->nranks;
    hellos = rc->hello_receives + HELLO_SENDS;
    rc->shared = want_srq && device->max_srq > 0 && device->max_srq_wr >= VERBS_RECEIVE_BATCH;
    if (rc->shared) {
        rc->receive_depth = fit(RC_RECEIVES, device->max_srq_wr);
        rc->receive_depth = fit(rc->receive_depth, device->max_cqe / 2);
        receives = rc->receive_depth;
    } else {
        rc->receive_depth = fit(4 * VERBS_RECEIVE_BATCH, device->max_qp_wr);
        while (rc->receive_depth > VERBS_RECEIVE_BATCH &&
               (int64_t)rc->receive_depth * net->nranks > device->max_cqe / 2)
            rc->receive_depth /= 2;
        receives = rc->receive_depth * net->nranks;
    }
    net->send_room = (uint32_t)fit(RC_SENDS, device->max_cqe / 4);
    *entries = receives + hellos + (int)net->send_room;
    if (rc->receive_depth < VERBS_RECEIVE_BATCH || *entries > device->max_cqe)
        return fail(EPX_ERR_UNSUPPORTED, "verbs: %s has completion queues of %d entries, %d ranks need %d",
                    net->card.device, device->max_cqe, net->nranks, *entries);
    return EPX_OK;
}

static void rc_fill_srq(struct verbs_net *net)
{
    struct rc_state *rc = rc_of(net);

    for (; rc->receives_due >= VERBS_RECEIVE_BATCH; rc->receives_due -= VERBS_RECEIVE_BATCH)
        if (verbs_post_receives(net, rc->srq, NULL, 0)) {
            verbs_break(net, EIO, "the shared receive queue takes no more");
            return;
        }
}

static epx_status rc_open(struct verbs_net *net)
{
    struct rc_state *rc = rc_of(net);

    if (rc->shared) {
        struct ibv_srq_init_attr attr = {.attr = {.max_wr = (uint32_t)rc->receive_depth, .max_sge = 1}};
        rc->srq = net->lib->create_srq(net->pd, &attr);
        if (!rc->srq)
            return fail_errno(EPX_ERR_SYSTEM, "verbs: %s: no shared receive queue of %d", net->card.device,
                              rc->receive_depth);
        rc->receives_due = rc->receive_depth;
        rc_fill_srq(net);
    }
    net->inline_bytes = VERBS_INLINE;
    return hello_open(net);
}

static void rc_address(struct verbs_net *net, struct verbs_address *address)
{
    address->qpn = rc_of(net)->ud->qp_num;
    address->qkey = rc_of(net)->qkey;
}

static void rc_close(struct verbs_net *net)
{
    struct rc_state *rc = rc_of(net);

    if (!rc)
        return;
    for (int i = 0; i < net->nranks; i++) {
        struct verbs_pair *pair = net->peers[i].pair;
        if (pair && pair->qp)
            net->lib->destroy_qp(pair->qp);
        free(pair);
    }
    hello_close(net);
    if (rc->srq)
        net->lib->destroy_srq(rc->srq);
    free(rc->dirty);
    free(rc);
}

/* ---- Pairs ---------------------------------------------------------------------------------------------------- */

static int create_qp(struct verbs_net *net, int peer, struct verbs_pair *pair)
{
    struct rc_state *rc = rc_of(net);
    struct ibv_qp_init_attr init = {
        .qp_context = &net->peers[peer],
        .send_cq = net->cq,
        .recv_cq = net->cq,
        .srq = rc->srq,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = rc->depth,
                .max_recv_wr = rc->srq ? 0 : (uint32_t)rc->receive_depth,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = (uint32_t)net->inline_bytes},
    };
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT, .port_num = net->card.port, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};

    pair->qp = net->lib->create_qp(net->pd, &init);
    if (!pair->qp && net->inline_bytes) { /* some cards take no data inside work requests */
        net->inline_bytes = 0;
        init.cap.max_inline_data = 0;
        pair->qp = net->lib->create_qp(net->pd, &init);
    }
    if (!pair->qp)
        return errno ? errno : EIO;
    return net->lib->modify_qp(pair->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

/* Receives of the pair's own: needed before the peer may send. */
static int fill_pair(struct verbs_net *net, int peer, struct verbs_pair *pair)
{
    int rc = 0;

    for (; !rc && pair->receives_due >= VERBS_RECEIVE_BATCH; pair->receives_due -= VERBS_RECEIVE_BATCH)
        rc = verbs_post_receives(net, NULL, pair->qp, peer);
    return rc;
}

struct verbs_pair *rc_pair(struct verbs_net *net, int peer)
{
    struct verbs_peer *p = &net->peers[peer];
    struct verbs_pair *pair = p->pair;
    int error;

    if (pair || p->error)
        return p->error ? NULL : pair;
    p->pair = pair = calloc(1, sizeof(*pair));
    if (!pair) {
        verbs_peer_lost(net, peer, ENOMEM, "no memory for a pair");
        return NULL;
    }
    error = getrandom(&pair->psn, sizeof(pair->psn), 0) == (ssize_t)sizeof(pair->psn) ? 0 : EIO;
    pair->psn &= 0xffffff;
    if (!error)
        error = create_qp(net, peer, pair);
    if (!error && !rc_of(net)->srq) {
        pair->receives_due = rc_of(net)->receive_depth;
        error = fill_pair(net, peer, pair);
    }
    if (error) {
        verbs_peer_lost(net, peer, error, "no queue pair");
        return NULL;
    }
    return pair;
}

int rc_pair_connect(struct verbs_net *net, int peer, uint32_t qpn, uint32_t psn)
{
    struct rc_state *rc = rc_of(net);
    struct verbs_peer *p = &net->peers[peer];
    const uint8_t mtu = p->address.mtu < net->card.mtu ? p->address.mtu : net->card.mtu;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR,
                               .path_mtu = (enum ibv_mtu)mtu,
                               .dest_qp_num = qpn,
                               .rq_psn = psn,
                               .max_dest_rd_atomic = 1,
                               .min_rnr_timer = 12 /* 0.64 ms */};
    int error;

    verbs_ah_attr(net, &p->address, &attr.ah_attr);
    error = net->lib->modify_qp(p->pair->qp, &attr,
                                IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (!error) {
        attr.qp_state = IBV_QPS_RTS;
        attr.sq_psn = p->pair->psn;
        attr.timeout = (uint8_t)rc->timeout;
        attr.retry_cnt = (uint8_t)rc->retries;
        attr.rnr_retry = 7; /* for ever: a peer that is late with receives is lost by the deadline alone */
        attr.max_rd_atomic = 1;
        error = net->lib->modify_qp(p->pair->qp, &attr,
                                    IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                        IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
    }
    if (!error)
        return 0;
    verbs_peer_lost(net, peer, error, "the queue pair cannot be connected");
    return -1;
}

/* What was posted completes as flushed; what waits in the chain is dropped. */
static void rc_lost(struct verbs_net *net, int peer)
{
    struct verbs_pair *pair = net->peers[peer].pair;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

    if (!pair)
        return;
    hello_stop(net, peer);
    net->outstanding -= pair->chained;
    pair->posted -= pair->chained;
    pair->chained = 0;
    if (pair->qp)
        net->lib->modify_qp(pair->qp, &attr, IBV_QP_STATE);
}

/* ---- Puts ----------------------------------------------------------------------------------------------------- */

static void post_chain(struct verbs_net *net, int peer)
{
    struct verbs_pair *pair = net->peers[peer].pair;
    struct ibv_send_wr *bad, *last;
    int error;

    if (!pair->chained)
        return;
    last = &pair->chain[pair->chained - 1];
    last->next = NULL;
    last->send_flags |= IBV_SEND_SIGNALED;
    error = ibv_post_send(pair->qp, pair->chain, &bad);
    if (!error) {
        pair->chained = 0;
        return;
    }
    /* Those before `bad` are posted and will complete; the others are dropped with the peer. */
    pair->chained -= (uint32_t)(bad - pair->chain);
    verbs_peer_lost(net, peer, error, "the card takes no puts");
}

static void rc_flush(struct verbs_net *net)
{
    struct rc_state *rc = rc_of(net);

    for (int i = 0; i < rc->dirty_count; i++) {
        net->peers[rc->dirty[i]].pair->dirty = 0;
        post_chain(net, rc->dirty[i]);
    }
    rc->dirty_count = 0;
}

static void chain_put(struct verbs_net *net, int peer, struct verbs_pair *pair, const struct net_put *put)
{
    const struct verbs_peer *p = &net->peers[peer];
    struct ibv_send_wr *wr = &pair->chain[pair->chained];
    struct ibv_sge *piece = &pair->pieces[pair->chained];

    pair->posted++;
    pair->chained++;
    net->outstanding++;
    pair->cookies[pair->posted & (rc_of(net)->depth - 1)] = put->cookie;
    piece->addr = (uint64_t)(uintptr_t)(net->heap + put->source);
    piece->length = put->bytes;
    piece->lkey = net->mr->lkey;
    wr->wr_id = WR_ID(WR_PUT, peer, pair->posted);
    wr->next = wr + 1;
    wr->sg_list = piece;
    wr->num_sge = put->bytes ? 1 : 0;
    wr->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    wr->send_flags = put->bytes && put->bytes <= (uint32_t)net->inline_bytes ? IBV_SEND_INLINE : 0;
    wr->imm_data = htobe32(put->immediate);
    wr->wr.rdma.remote_addr = p->base + put->target;
    wr->wr.rdma.rkey = p->rkey;
}

static int rc_put(struct verbs_net *net, int peer, const struct net_put *put)
{
    struct rc_state *rc = rc_of(net);
    struct verbs_pair *pair = net->peers[peer].pair;

    if (!pair || !pair->done) {
        hello_want(net, peer);
        return -EAGAIN;
    }
    if (pair->posted - pair->completed >= rc->depth || net->outstanding >= net->send_room) {
        rc_flush(net); /* what is in a chain completes only once it is posted */
        return -EAGAIN;
    }
    if (pair->posted == pair->completed)
        net->peers[peer].moved = 1;
    chain_put(net, peer, pair, put);
    if (!pair->dirty) {
        pair->dirty = 1;
        rc->dirty[rc->dirty_count++] = peer;
    }
    if (pair->chained == RC_CHAIN)
        post_chain(net, peer);
    return 0;
}

/* Completions of a queue pair come in order: one completes all before it. */
static int rc_sent(struct verbs_net *net, const struct ibv_wc *wc, struct net_event *event)
{
    const int peer = WR_PEER(wc->wr_id);
    struct verbs_pair *pair = net->peers[peer].pair;
    const uint32_t number = WR_NUMBER(wc->wr_id), count = number - pair->completed;

    pair->completed = number;
    net->outstanding -= count;
    if (wc->status != IBV_WC_SUCCESS) {
        verbs_peer_lost(net, peer, verbs_status_errno(wc->status), net->lib->wc_status_str(wc->status));
        return 0;
    }
    net->peers[peer].moved |= !net->peers[peer].error;
    *event = (struct net_event){
        .kind = NET_SENT, .peer = peer, .count = count, .cookie = pair->cookies[number & (rc_of(net)->depth - 1)]};
    return 1;
}

static uint32_t rc_in_flight(const struct verbs_net *net, int peer)
{
    const struct verbs_pair *pair = net->peers[peer].pair;

    return pair ? pair->posted - pair->completed : 0;
}

static void receive_consumed(struct verbs_net *net, const struct ibv_wc *wc)
{
    struct rc_state *rc = rc_of(net);
    const int peer = WR_PEER(wc->wr_id);
    struct verbs_pair *pair;

    if (rc->srq) {
        if (++rc->receives_due >= VERBS_RECEIVE_BATCH)
            rc_fill_srq(net);
        return;
    }
    pair = net->peers[peer].pair;
    if (wc->status != IBV_WC_SUCCESS) {
        verbs_peer_lost(net, peer, verbs_status_errno(wc->status), net->lib->wc_status_str(wc->status));
    } else if (++pair->receives_due >= VERBS_RECEIVE_BATCH && !net->peers[peer].error) {
        int error = fill_pair(net, peer, pair);
        if (error)
            verbs_peer_lost(net, peer, error, "the queue pair takes no receives");
    }
}

static void rc_other(struct verbs_net *net, const struct ibv_wc *wc)
{
    if (WR_KIND(wc->wr_id) == WR_RECEIVE)
        receive_consumed(net, wc);
    else
        hello_take(net, wc);
}

const struct verbs_transport verbs_rc = {
    .caps = NET_ORDERED | NET_KNOWN_SENDERS,
    .size = rc_size,
    .open = rc_open,
    .address = rc_address,
    .put = rc_put,
    .flush = rc_flush,
    .sent = rc_sent,
    .in_flight = rc_in_flight,
    .other = rc_other,
    .progress = hello_progress,
    .expire = hello_expire,
    .lost = rc_lost,
    .close = rc_close,
};

#endif

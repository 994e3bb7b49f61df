/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SRD, the reliable datagrams of Amazon's EFA: one queue pair for all peers, an address handle for each, delivery in
 * any order. This code has never run on a card (docs/verbs.md); it follows the manual pages efadv_create_qp_ex(3),
 * efadv_query_device(3) and ibv_wr_post(3), and shares everything else with RC, which is tested.
 *
 * Every work request is signalled and completes in any order. Completions are reported in order: a window per peer
 * records which puts have completed, and those before the first that has not are reported.
 */
#include "net/verbs/verbs.h"

#if EPX_HAVE_VERBS

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/status.h"

#if EPX_HAVE_EFADV

enum {
    /* Of efadv_query_device(3); headers before rdma-core 47 lack the second. */
    EFA_CAPS_RNR_RETRY = 1 << 1,
    EFA_CAPS_RDMA_WRITE = 1 << 3,
    /* Byte of struct efadv_qp_init_attr that holds the service level from rdma-core 51 on; reserved, zero, before. */
    EFA_ATTR_SL_BYTE = 14,
    SRD_DEPTH = 2048,
    SRD_BATCH = 32,   /* puts per doorbell */
    SRD_WINDOW = 256, /* puts in flight per peer; a power of two */
    SCRATCH_BYTES = 64
};
_Static_assert(sizeof(struct efadv_qp_init_attr) == 16, "the service level lies in byte 14");

struct srd_window { /* puts to one peer, numbered from 1 */
    uint32_t posted, reported;
    uint8_t completed[SRD_WINDOW]; /* by number % SRD_WINDOW */
    uint64_t cookies[SRD_WINDOW];
};

struct srd_state {
    struct ibv_qp *qp;
    struct ibv_qp_ex *ex;
    uint32_t qkey;
    uint32_t caps;
    int depth, receive_depth, receives_due;
    int batched; /* puts between ibv_wr_start and ibv_wr_complete */
    /* A receive must name a buffer here, though a write with an immediate puts nothing into it. */
    struct ibv_mr *scratch_mr;
    struct ibv_sge scratch_piece;
    uint8_t *scratch;
};

static struct srd_state *srd_of(const struct verbs_net *net)
{
    return net->state;
}

static epx_status srd_size(struct verbs_net *net, const struct ibv_device_attr *device, int *entries)
{
    struct efadv_device_attr attr;
    struct srd_state *srd = net->state = calloc(1, sizeof(*srd));

    if (!srd)
        return fail(EPX_ERR_MEMORY, "verbs: no memory for an SRD queue pair");
    memset(&attr, 0, sizeof(attr));
    if (net->lib->efa_query_device(net->context, &attr, sizeof(attr)))
        return fail(EPX_ERR_SYSTEM, "verbs: %s: efadv_query_device failed", net->card.device);
    if (!(attr.device_caps & EFA_CAPS_RDMA_WRITE))
        return fail(EPX_ERR_UNSUPPORTED, "verbs: %s has no RDMA write (device_caps 0x%x), which EPX needs",
                    net->card.device, attr.device_caps);
    srd->caps = attr.device_caps;
    srd->depth = attr.max_sq_wr < SRD_DEPTH ? (int)attr.max_sq_wr : SRD_DEPTH;
    srd->receive_depth = attr.max_rq_wr < SRD_DEPTH ? (int)attr.max_rq_wr : SRD_DEPTH;
    srd->receive_depth -= srd->receive_depth % VERBS_RECEIVE_BATCH;
    if (attr.max_rdma_size < net->card.max_message || !net->card.max_message)
        net->card.max_message = attr.max_rdma_size;
    net->grace_ns = 8000000000ull;
    net->send_room = (uint32_t)srd->depth;
    *entries = srd->depth + srd->receive_depth;
    if (srd->depth < SRD_BATCH || srd->receive_depth < VERBS_RECEIVE_BATCH || *entries > device->max_cqe)
        return fail(EPX_ERR_UNSUPPORTED, "verbs: %s has queues of %u and %u and completion queues of %d: too small",
                    net->card.device, attr.max_sq_wr, attr.max_rq_wr, device->max_cqe);
    return EPX_OK;
}

static struct ibv_qp *create_qp(struct verbs_net *net)
{
    struct srd_state *srd = srd_of(net);
    struct ibv_qp_init_attr_ex init = {
        .send_cq = net->cq,
        .recv_cq = net->cq,
        .cap = {.max_send_wr = (uint32_t)srd->depth,
                .max_recv_wr = (uint32_t)srd->receive_depth,
                .max_send_sge = 1,
                .max_recv_sge = 1},
        .qp_type = IBV_QPT_DRIVER,
        .sq_sig_all = 1,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .pd = net->pd,
        .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
    };
    struct efadv_qp_init_attr efa = {.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD};
    struct ibv_qp *qp;

    ((uint8_t *)&efa)[EFA_ATTR_SL_BYTE] = (uint8_t)net->sl;
    qp = net->lib->efa_create_qp(net->context, &init, &efa, sizeof(efa));
    if (!qp && net->sl) { /* a library or card that knows no service level */
        ((uint8_t *)&efa)[EFA_ATTR_SL_BYTE] = 0;
        qp = net->lib->efa_create_qp(net->context, &init, &efa, sizeof(efa));
    }
    return qp;
}

static int start_qp(struct verbs_net *net)
{
    struct srd_state *srd = srd_of(net);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = net->card.port, .qkey = srd->qkey};
    int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    int error = net->lib->modify_qp(srd->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);

    attr.qp_state = IBV_QPS_RTR;
    if (!error)
        error = net->lib->modify_qp(srd->qp, &attr, IBV_QP_STATE);
    attr.qp_state = IBV_QPS_RTS;
    if (srd->caps & EFA_CAPS_RNR_RETRY) {
        attr.rnr_retry = 7; /* for ever */
        mask |= IBV_QP_RNR_RETRY;
    }
    if (!error)
        error = net->lib->modify_qp(srd->qp, &attr, mask);
    for (srd->receives_due = srd->receive_depth; !error && srd->receives_due >= VERBS_RECEIVE_BATCH;
         srd->receives_due -= VERBS_RECEIVE_BATCH)
        error = verbs_post_receives(net, NULL, srd->qp, 0);
    return error;
}

static epx_status srd_open(struct verbs_net *net)
{
    struct srd_state *srd = srd_of(net);
    int error;

    srd->scratch = calloc(1, SCRATCH_BYTES);
    if (!srd->scratch)
        return fail(EPX_ERR_MEMORY, "verbs: no memory for a receive buffer");
    srd->scratch_mr = net->lib->reg_mr(net->pd, srd->scratch, SCRATCH_BYTES, IBV_ACCESS_LOCAL_WRITE);
    srd->qp = srd->scratch_mr ? create_qp(net) : NULL;
    srd->ex = srd->qp ? net->lib->qp_to_qp_ex(srd->qp) : NULL;
    if (!srd->ex)
        return fail_errno(EPX_ERR_SYSTEM, "verbs: %s: no SRD queue pair", net->card.device);
    srd->scratch_piece = (struct ibv_sge){
        .addr = (uint64_t)(uintptr_t)srd->scratch, .length = SCRATCH_BYTES, .lkey = srd->scratch_mr->lkey};
    for (int i = 0; i < VERBS_RECEIVE_BATCH; i++) {
        net->receives[i].sg_list = &srd->scratch_piece;
        net->receives[i].num_sge = 1;
    }
    srd->qkey = (uint32_t)(net->token >> 32) & 0x7fffffff;
    error = start_qp(net);
    if (error) {
        errno = error;
        return fail_errno(EPX_ERR_SYSTEM, "verbs: %s: the SRD queue pair cannot be started", net->card.device);
    }
    return EPX_OK;
}

static void srd_address(struct verbs_net *net, struct verbs_address *address)
{
    address->qpn = srd_of(net)->qp->qp_num;
    address->qkey = srd_of(net)->qkey;
}

static void srd_flush(struct verbs_net *net)
{
    struct srd_state *srd = srd_of(net);
    int batched = srd->batched;

    srd->batched = 0;
    if (batched && ibv_wr_complete(srd->ex))
        verbs_break(net, EIO, "the SRD queue pair takes no puts");
}

/* The peer's window, made by the first put; NULL: the peer was marked lost. */
static struct srd_window *window_of(struct verbs_net *net, int peer)
{
    struct verbs_peer *p = &net->peers[peer];

    if (!p->window)
        p->window = calloc(1, sizeof(*p->window));
    if (!p->window)
        verbs_peer_lost(net, peer, ENOMEM, "no memory for a window");
    return p->window;
}

static int srd_put(struct verbs_net *net, int peer, const struct net_put *put)
{
    struct srd_state *srd = srd_of(net);
    const struct verbs_peer *p = &net->peers[peer];
    struct srd_window *window = window_of(net, peer);
    uint32_t number;

    if (!window)
        return -EAGAIN;
    if (window->posted - window->reported >= SRD_WINDOW || net->outstanding >= net->send_room) {
        srd_flush(net);
        return -EAGAIN;
    }
    if (window->posted == window->reported)
        net->peers[peer].moved = 1;
    number = ++window->posted;
    window->completed[number % SRD_WINDOW] = 0;
    window->cookies[number % SRD_WINDOW] = put->cookie;
    net->outstanding++;
    if (!srd->batched)
        ibv_wr_start(srd->ex);
    srd->ex->wr_id = WR_ID(WR_PUT, peer, number);
    srd->ex->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write_imm(srd->ex, p->rkey, p->base + put->target, htobe32(put->immediate));
    ibv_wr_set_sge(srd->ex, net->mr->lkey, (uint64_t)(uintptr_t)(net->heap + put->source), put->bytes);
    ibv_wr_set_ud_addr(srd->ex, p->ah, p->address.qpn, p->address.qkey);
    if (++srd->batched == SRD_BATCH)
        srd_flush(net);
    return 0;
}

static int srd_sent(struct verbs_net *net, const struct ibv_wc *wc, struct net_event *event)
{
    const int peer = WR_PEER(wc->wr_id);
    struct srd_window *window = net->peers[peer].window;
    uint32_t count = 0;

    net->outstanding--;
    if (wc->status != IBV_WC_SUCCESS)
        verbs_peer_lost(net, peer, verbs_status_errno(wc->status), net->lib->wc_status_str(wc->status));
    window->completed[WR_NUMBER(wc->wr_id) % SRD_WINDOW] = 1;
    while (window->reported != window->posted && window->completed[(window->reported + 1) % SRD_WINDOW]) {
        window->reported++;
        count++;
    }
    if (!count || net->peers[peer].error)
        return 0;
    net->peers[peer].moved = 1;
    *event = (struct net_event){
        .kind = NET_SENT, .peer = peer, .count = count, .cookie = window->cookies[window->reported % SRD_WINDOW]};
    return 1;
}

static uint32_t srd_in_flight(const struct verbs_net *net, int peer)
{
    const struct srd_window *window = net->peers[peer].window;

    return window ? window->posted - window->reported : 0;
}

static void srd_other(struct verbs_net *net, const struct ibv_wc *wc)
{
    struct srd_state *srd = srd_of(net);

    if (wc->status != IBV_WC_SUCCESS) {
        verbs_break(net, EIO, net->lib->wc_status_str(wc->status));
        return;
    }
    if (++srd->receives_due < VERBS_RECEIVE_BATCH)
        return;
    srd->receives_due -= VERBS_RECEIVE_BATCH;
    if (verbs_post_receives(net, NULL, srd->qp, 0))
        verbs_break(net, EIO, "the SRD queue pair takes no receives");
}

static int srd_progress(struct verbs_net *net)
{
    (void)net;
    return 0;
}

static void srd_expire(struct verbs_net *net)
{
    (void)net;
}

static void srd_lost(struct verbs_net *net, int peer)
{
    (void)net; /* the queue pair serves the other peers; what was posted to this one completes, or is read on */
    (void)peer;
}

static void srd_close(struct verbs_net *net)
{
    struct srd_state *srd = srd_of(net);

    if (srd->batched)
        ibv_wr_abort(srd->ex);
    if (srd->qp)
        net->lib->destroy_qp(srd->qp);
    if (srd->scratch_mr)
        net->lib->dereg_mr(srd->scratch_mr);
    for (int i = 0; i < net->nranks; i++)
        free(net->peers[i].window);
    free(srd->scratch);
    free(srd);
}

const struct verbs_transport verbs_srd = {
    .caps = NET_KNOWN_SENDERS, /* the card asks for the Q_Key, which was exchanged with the address */
    .size = srd_size,
    .open = srd_open,
    .address = srd_address,
    .put = srd_put,
    .flush = srd_flush,
    .sent = srd_sent,
    .in_flight = srd_in_flight,
    .other = srd_other,
    .progress = srd_progress,
    .expire = srd_expire,
    .lost = srd_lost,
    .close = srd_close,
};

#else

/* Never chosen: card.c recognises no SRD card without the header. */
const struct verbs_transport verbs_srd = {0};

#endif
#endif

/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs network: what RC and SRD share. */
#include "net/verbs/verbs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "net/topology.h"
#include "util/env.h"
#include "util/log.h"
#include "util/status.h"

#if EPX_HAVE_VERBS

/* ---- Failure -------------------------------------------------------------------------------------------------- */

void verbs_peer_lost(struct verbs_net *net, int peer, int error, const char *what)
{
    struct verbs_peer *p = &net->peers[peer];

    if (p->error)
        return;
    p->error = error;
    log_line(LOG_WARN, "verbs: %s: rank %d is lost: %s (%s)", net->card.device, peer, what, strerror(error));
    net->transport->lost(net, peer);
    verbs_deadline_lost(net, peer);
}

void verbs_break(struct verbs_net *net, int error, const char *what)
{
    if (net->broken)
        return;
    net->broken = error;
    log_line(LOG_ERROR, "verbs: %s:%d can no longer be used: %s", net->card.device, net->card.port, what);
}

int verbs_status_errno(enum ibv_wc_status status)
{
    switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
        return ECONNRESET; /* not ETIMEDOUT: the peer may be the one that has given this rank up, and reset its end */
    case IBV_WC_RNR_RETRY_EXC_ERR:
        return ENOBUFS;
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_LOC_PROT_ERR:
        return EACCES;
    case IBV_WC_REM_OP_ERR:
    case IBV_WC_REM_ABORT_ERR:
        return EREMOTEIO;
    default:
        return EIO;
    }
}

/* ---- Opening -------------------------------------------------------------------------------------------------- */

static epx_status verbs_probe(const char *provider, char *text, size_t bytes)
{
    struct verbs_card cards[VERBS_MAX_CARDS];
    const char *why;
    const struct verbs_lib *lib = verbs_lib_open(&why);
    int count = 0;
    size_t used = 0;
    epx_status status;

    if (!lib) {
        snprintf(text, bytes, "%s", why);
        return EPX_ERR_UNSUPPORTED;
    }
    status = verbs_cards_find(lib, provider, cards, &count);
    if (status) {
        snprintf(text, bytes, "%s", epx_last_error());
        return status;
    }
    for (int i = 0; i < count && used < bytes; i++) {
        char line[160];
        verbs_card_describe(&cards[i], line, sizeof(line));
        used += (size_t)snprintf(text + used, bytes - used, "%s%s", i ? ", " : "", line);
    }
    return EPX_OK;
}

/*
 * A GPU uses the cards that are nearest to it, one for each endpoint; GPUs that have the same nearest cards begin with
 * different ones. On machines that are alike, GPU g and endpoint i choose the same card everywhere: endpoint i is
 * connected to endpoint i, so rows for a relay (the rank of the same place) stay on one rail. For the processor,
 * endpoints of a rank and ranks of a machine are distributed over the cards.
 */
int verbs_card_choose(const char *sysfs, const struct net_options *options, const struct verbs_card *cards, int count)
{
    const char *names[VERBS_MAX_CARDS];
    int order[VERBS_MAX_CARDS], nearest;

    if (!options->pci || !options->pci[0])
        return (options->rank + options->index) % count;
    for (int i = 0; i < count; i++)
        names[i] = cards[i].device;
    nearest = topology_sort(sysfs, options->pci, names, count, order);
    return order[(options->gpu + options->index) % nearest];
}

static epx_status choose_card(struct verbs_net *net, const struct net_options *options)
{
    struct verbs_card cards[VERBS_MAX_CARDS];
    int count;
    epx_status status = verbs_cards_find(net->lib, options->provider, cards, &count);

    if (status)
        return status;
    net->card = cards[verbs_card_choose(TOPOLOGY_SYSFS, options, cards, count)];
    if (options->pci && options->pci[0])
        log_line(LOG_INFO, "verbs: rank %d: endpoint %d of the GPU at %s uses %s", options->rank, options->index,
                 options->pci, net->card.device);
    net->transport = net->card.transport == VERBS_SRD ? &verbs_srd : &verbs_rc;
    net->sl = (int)env_int("EPX_IB_SL", net->card.transport == VERBS_SRD ? 8 : 3, 0, 15);
    net->tc = (int)env_int("EPX_IB_TC", net->card.transport == VERBS_SRD ? 0 : 104, 0, 255);
    return EPX_OK;
}

static void prepare_receives(struct verbs_net *net)
{
    for (int i = 0; i < VERBS_RECEIVE_BATCH; i++) {
        net->receives[i].wr_id = WR_ID(WR_RECEIVE, 0, 0);
        net->receives[i].next = i + 1 < VERBS_RECEIVE_BATCH ? &net->receives[i + 1] : NULL;
    }
}

int verbs_post_receives(struct verbs_net *net, struct ibv_srq *srq, struct ibv_qp *qp, int peer)
{
    struct ibv_recv_wr *bad;

    if (srq)
        return ibv_post_srq_recv(srq, net->receives, &bad);
    for (int i = 0; i < VERBS_RECEIVE_BATCH; i++)
        net->receives[i].wr_id = WR_ID(WR_RECEIVE, peer, 0);
    return ibv_post_recv(qp, net->receives, &bad);
}

static epx_status open_device(struct verbs_net *net)
{
    const struct verbs_lib *lib = net->lib;
    struct ibv_device_attr attr;
    int entries = 0;
    epx_status status = verbs_card_open(lib, &net->card, &net->context);

    if (status)
        return status;
    net->pd = lib->alloc_pd(net->context);
    if (!net->pd || lib->query_device(net->context, &attr))
        return fail_errno(EPX_ERR_SYSTEM, "verbs: %s: cannot allocate a protection domain", net->card.device);
    status = verbs_event_open(net);
    if (!status)
        status = net->transport->size(net, &attr, &entries);
    if (status)
        return status;
    net->cq = lib->create_cq(net->context, entries, NULL, net->channel, 0);
    if (!net->cq)
        return fail_errno(EPX_ERR_SYSTEM, "verbs: %s: cannot create a completion queue of %d entries", net->card.device,
                          entries);
    return net->transport->open(net);
}

static void verbs_close(struct net *base)
{
    struct verbs_net *net = verbs_of(base);
    const struct verbs_lib *lib = net->lib;

    if (net->state)
        net->transport->close(net);
    for (int i = 0; net->peers && i < net->nranks; i++)
        if (net->peers[i].ah)
            lib->destroy_ah(net->peers[i].ah);
    verbs_event_close(net); /* acknowledges: a completion queue with events left cannot be destroyed */
    if (net->cq)
        lib->destroy_cq(net->cq);
    if (net->channel)
        lib->destroy_comp_channel(net->channel);
    if (net->mr)
        lib->dereg_mr(net->mr);
    if (net->pd)
        lib->dealloc_pd(net->pd);
    if (net->context)
        lib->close_device(net->context);
    free(net->peers);
    free(net);
}

static epx_status verbs_open(const struct net_options *options, struct net **out)
{
    const char *why;
    const struct verbs_lib *lib = verbs_lib_open(&why);
    struct verbs_net *net;
    epx_status status;

    *out = NULL;
    if (!lib)
        return fail(EPX_ERR_UNSUPPORTED, "verbs: %s", why);
    net = calloc(1, sizeof(*net));
    if (!net || !(net->peers = calloc((size_t)options->nranks, sizeof(*net->peers)))) {
        free(net);
        return fail(EPX_ERR_MEMORY, "verbs: no memory for %d peers", options->nranks);
    }
    net->net.ops = &net_verbs_ops;
    net->lib = lib;
    net->rank = options->rank;
    net->nranks = options->nranks;
    net->timeout_ms = options->timeout_ms;
    net->wait_fd = -1;
    net->has_key = options->key != NULL;
    if (options->key)
        memcpy(net->key, options->key, sizeof(net->key));
    prepare_receives(net);
    if (getrandom(&net->token, sizeof(net->token), 0) != (ssize_t)sizeof(net->token))
        status = fail_errno(EPX_ERR_SYSTEM, "verbs: getrandom");
    else
        status = choose_card(net, options);
    if (!status)
        status = open_device(net);
    if (status) {
        verbs_close(&net->net);
        return status;
    }
    *out = &net->net;
    return EPX_OK;
}

static unsigned verbs_caps(struct net *net)
{
    return verbs_of(net)->transport->caps;
}

/* ---- Addresses, memory, peers --------------------------------------------------------------------------------- */

static epx_status verbs_get_address(struct net *base, struct net_address *out)
{
    struct verbs_net *net = verbs_of(base);
    struct verbs_address address;

    memset(&address, 0, sizeof(address));
    address.token = net->token;
    memcpy(address.gid, net->card.gid.raw, sizeof(address.gid));
    address.lid = net->card.lid;
    address.mtu = net->card.mtu;
    address.transport = (uint8_t)net->card.transport;
    address.link_layer = net->card.link_layer;
    net->transport->address(net, &address);
    memset(out, 0, sizeof(*out));
    out->bytes = sizeof(address);
    out->version = VERBS_ADDRESS_VERSION;
    memcpy(out->data, &address, sizeof(address));
    return EPX_OK;
}

void verbs_ah_attr(const struct verbs_net *net, const struct verbs_address *to, struct ibv_ah_attr *attr)
{
    memset(attr, 0, sizeof(*attr));
    attr->port_num = net->card.port;
    if (net->card.transport != VERBS_SRD)
        attr->sl = (uint8_t)net->sl; /* SRD has it in the queue pair */
    attr->dlid = to->lid;
    /* InfiniBand inside one subnet goes by LID; everything else by GID. */
    if (net->card.link_layer == IBV_LINK_LAYER_INFINIBAND && !memcmp(to->gid, net->card.gid.raw, 8))
        return;
    attr->is_global = 1;
    memcpy(attr->grh.dgid.raw, to->gid, sizeof(attr->grh.dgid.raw));
    attr->grh.sgid_index = net->card.gid_index;
    attr->grh.hop_limit = 64;
    attr->grh.traffic_class = (uint8_t)net->tc;
}

/* GPU memory is registered by dma-buf; if that fails, like host memory, which works where a peer memory module is
 * loaded. */
static epx_status register_gpu(struct verbs_net *net, const struct net_memory *memory, int access)
{
    const uint64_t at = (uint64_t)(uintptr_t)memory->base;
    int dmabuf_errno = 0;

    if (memory->dmabuf >= 0 && net->lib->reg_dmabuf_mr) {
        net->mr = net->lib->reg_dmabuf_mr(net->pd, 0, (size_t)memory->bytes, at, memory->dmabuf, access);
        dmabuf_errno = errno;
    }
    if (!net->mr)
        net->mr = net->lib->reg_mr(net->pd, memory->base, (size_t)memory->bytes, access);
    if (net->mr)
        return EPX_OK;
    return fail(EPX_ERR_UNSUPPORTED,
                "verbs: %s cannot register %llu bytes of GPU memory: by dma-buf: %s; by a peer memory module: %s",
                net->card.device, (unsigned long long)memory->bytes,
                memory->dmabuf < 0        ? "the device has none"
                : net->lib->reg_dmabuf_mr ? strerror(dmabuf_errno)
                                          : "libibverbs has no ibv_reg_dmabuf_mr",
                strerror(errno));
}

static epx_status register_host(struct verbs_net *net, const struct net_memory *memory, int access)
{
    net->mr = net->lib->reg_mr(net->pd, memory->base, (size_t)memory->bytes, access);
    if (!net->mr)
        return fail_errno(EPX_ERR_SYSTEM, "verbs: %s cannot register %llu bytes (is locked memory limited? ulimit -l)",
                          net->card.device, (unsigned long long)memory->bytes);
    return EPX_OK;
}

static epx_status verbs_add_region(struct net *base, const struct net_memory *memory, struct net_region *region)
{
    struct verbs_net *net = verbs_of(base);
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    struct verbs_key key = {.base = (uint64_t)(uintptr_t)memory->base};
    epx_status status;

    if (net->mr)
        return fail(EPX_ERR_USAGE, "verbs: the endpoint has a region already; expected one call");
    status = net_memory_is_gpu(memory->kind) ? register_gpu(net, memory, access) : register_host(net, memory, access);
    if (status != EPX_OK)
        return status;
    net->heap = memory->base;
    net->heap_bytes = memory->bytes;
    key.rkey = net->mr->rkey;
    memset(region, 0, sizeof(*region));
    region->bytes = memory->bytes;
    region->key_bytes = sizeof(key);
    memcpy(region->key, &key, sizeof(key));
    return EPX_OK;
}

static epx_status check_address(const struct verbs_net *net, int peer, const struct net_address *address,
                                const struct net_region *region, struct verbs_address *to)
{
    if (peer < 0 || peer >= net->nranks)
        return fail(EPX_ERR_ARGUMENT, "verbs: connect to rank %d, expected a rank below %d", peer, net->nranks);
    if (address->version != VERBS_ADDRESS_VERSION || address->bytes != sizeof(*to))
        return fail(EPX_ERR_MISMATCH, "verbs: rank %d's address has version %u and %u bytes, expected %d and %zu", peer,
                    address->version, address->bytes, VERBS_ADDRESS_VERSION, sizeof(*to));
    if (region->key_bytes != sizeof(struct verbs_key))
        return fail(EPX_ERR_MISMATCH, "verbs: rank %d's memory key has %u bytes, expected %zu", peer, region->key_bytes,
                    sizeof(struct verbs_key));
    memcpy(to, address->data, sizeof(*to));
    if (to->transport != net->card.transport || to->link_layer != net->card.link_layer)
        return fail(EPX_ERR_MISMATCH, "verbs: the card of rank %d uses transport %d over link %d, %s uses %d over %d",
                    peer, to->transport, to->link_layer, net->card.device, net->card.transport, net->card.link_layer);
    if (to->mtu < IBV_MTU_256 || to->mtu > IBV_MTU_4096)
        return fail(EPX_ERR_MISMATCH, "verbs: rank %d's address has MTU code %d", peer, to->mtu);
    return EPX_OK;
}

/* Nothing is sent to the peer yet: RC pairs connect when one of the two has a put for the other (hello.c). */
static epx_status verbs_connect(struct net *base, int peer, const struct net_address *address,
                                const struct net_region *region)
{
    struct verbs_net *net = verbs_of(base);
    struct verbs_address to;
    struct verbs_key key;
    struct ibv_ah_attr attr;
    struct verbs_peer *p;
    epx_status status = check_address(net, peer, address, region, &to);

    if (status)
        return status;
    p = &net->peers[peer];
    if (p->known)
        return fail(EPX_ERR_USAGE, "verbs: rank %d is already connected", peer);
    memcpy(&key, region->key, sizeof(key));
    p->address = to;
    p->base = key.base;
    p->rkey = key.rkey;
    p->bytes = region->bytes;
    verbs_ah_attr(net, &to, &attr);
    p->ah = net->lib->create_ah(net->pd, &attr);
    if (!p->ah)
        return fail_errno(EPX_ERR_SYSTEM, "verbs: %s: no route to rank %d", net->card.device, peer);
    p->known = 1;
    return EPX_OK;
}

/* ---- Moving --------------------------------------------------------------------------------------------------- */

static int check_put(const struct verbs_net *net, const struct net_put *put)
{
    const struct verbs_peer *peer;

    if (net->broken)
        return net->broken_told ? -net->broken : -EAGAIN; /* else it would be told here: that nothing is read */
    if (put->peer < 0 || put->peer >= net->nranks)
        return -EINVAL;
    peer = &net->peers[put->peer];
    if (!peer->known || !net->mr)
        return -ENOTCONN;
    if (peer->error)
        return peer->told ? -peer->error : -EAGAIN; /* likewise */
    if (put->bytes > net->card.max_message || put->source > net->heap_bytes ||
        put->bytes > net->heap_bytes - put->source || put->target > peer->bytes ||
        put->bytes > peer->bytes - put->target)
        return -ERANGE;
    return 0;
}

static int verbs_put(struct net *base, const struct net_put *put)
{
    struct verbs_net *net = verbs_of(base);
    int rc = check_put(net, put);

    if (rc)
        return rc;
    rc = net->transport->put(net, put->peer, put);
    if (rc == 0 && !put->more)
        net->transport->flush(net);
    return rc;
}

static int tell_broken(struct verbs_net *net)
{
    net->broken_told = net->broken != 0;
    return -net->broken;
}

static int verbs_flush(struct net *base)
{
    struct verbs_net *net = verbs_of(base);

    net->transport->flush(net);
    return tell_broken(net);
}

static int report_lost(struct verbs_net *net, struct net_event *events, int max)
{
    int count = 0;

    for (int i = 0; i < net->nranks && net->reports && count < max; i++) {
        struct verbs_peer *peer = &net->peers[i];
        if (!peer->report)
            continue;
        peer->report = 0;
        peer->told = 1;
        net->reports--;
        events[count++] = (struct net_event){.kind = NET_FAILED, .peer = i, .error = peer->error, .reads = peer->reads};
    }
    return count;
}

/* One completion; 1 if it made an event. */
static int take(struct verbs_net *net, const struct ibv_wc *wc, struct net_event *event)
{
    switch (WR_KIND(wc->wr_id)) {
    case WR_PUT:
        return net->transport->sent(net, wc, event);
    case WR_RECEIVE:
        net->transport->other(net, wc);
        if (wc->status != IBV_WC_SUCCESS || !(wc->wc_flags & IBV_WC_WITH_IMM))
            return 0;
        *event = (struct net_event){.kind = NET_ARRIVED, .peer = -1, .immediate = be32toh(wc->imm_data)};
        return 1;
    default:
        net->transport->other(net, wc);
        return 0;
    }
}

static int verbs_poll(struct net *base, struct net_event *events, int max)
{
    struct verbs_net *net = verbs_of(base);
    struct ibv_wc wcs[VERBS_POLL];
    int count = 0, taken, asked;

    /* What has come before the endpoint broke is reported first, unless there is no end of it. */
    if (net->broken && net->broken_polls++ >= VERBS_BROKEN_POLLS)
        return tell_broken(net);
    if (net->reports)
        count = report_lost(net, events, max);
    if (net->stashed && count < max) {
        net->stashed = 0;
        count += take(net, &net->stash, &events[count]);
    }
    if (count == max)
        return count;
    if (net->outstanding || net->asking)
        verbs_deadline_begin(net);
    asked = max - count < VERBS_POLL ? max - count : VERBS_POLL;
    taken = ibv_poll_cq(net->cq, asked, wcs);
    for (int i = 0; i < taken; i++)
        count += take(net, &wcs[i], &events[count]);
    if (taken < 0)
        verbs_break(net, EIO, "the completion queue cannot be read");
    else if (net->look_ns)
        verbs_deadline_polled(net, taken, asked);
    /* It makes a system call: only when idle, and seldom then. */
    if (taken == 0 && (++net->idle_polls & 4095) == 0)
        verbs_event_check(net);
    if (net->draining)
        verbs_deadline_drained(net);
    net->transport->progress(net);
    if (net->broken && !count)
        return tell_broken(net);
    return count;
}

static int verbs_wait_fd(struct net *base)
{
    return verbs_of(base)->wait_fd;
}

static int verbs_arm(struct net *base)
{
    struct verbs_net *net = verbs_of(base);

    verbs_event_check(net);
    net->transport->flush(net);
    verbs_deadline_sleep(net);
    if (net->broken || net->reports || net->port_down_ns || net->transport->progress(net))
        return -EAGAIN;
    return verbs_event_arm(net);
}

const struct net_ops net_verbs_ops = {
    .name = "verbs",
    .probe = verbs_probe,
    .open = verbs_open,
    .caps = verbs_caps,
    .address = verbs_get_address,
    .add_region = verbs_add_region,
    .connect = verbs_connect,
    .put = verbs_put,
    .flush = verbs_flush,
    .poll = verbs_poll,
    .wait_fd = verbs_wait_fd,
    .arm = verbs_arm,
    .close = verbs_close,
};

#endif

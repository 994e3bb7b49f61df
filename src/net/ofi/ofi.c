/* SPDX-License-Identifier: Apache-2.0 */
#include "net/ofi/ofi.h"

#if EPX_HAVE_OFI

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "util/files.h"
#include "util/log.h"
#include "util/status.h"
#include "util/text.h"

enum { KEY_DRAWS = 8 };

static struct ofi_net *of(struct net *net)
{
    return (struct ofi_net *)net;
}

static epx_status fail_ofi(struct ofi_net *n, int rc, const char *what)
{
    char where[128];

    ofi_describe(n->info, where, sizeof(where));
    return fail(rc == -FI_ENOMEM ? EPX_ERR_MEMORY : EPX_ERR_SYSTEM, "ofi: %s, %s: %s", where, what,
                n->lib->strerror(-rc));
}

static epx_status probe(const char *provider, char *text, size_t bytes)
{
    const char *missing;
    const struct ofi_lib *lib = ofi_lib_get(&missing);
    struct fi_info *info;
    char where[128];
    epx_status status;

    if (!lib) {
        snprintf(text, bytes, "%s", missing);
        return fail(EPX_ERR_UNSUPPORTED, "ofi: %s", missing);
    }
    status = ofi_choose(lib, &(const struct net_options){.provider = provider, .memory_kind = EPX_DEVICE_CPU}, &info);
    if (status) {
        snprintf(text, bytes, "%s", epx_last_error());
        return status;
    }
    ofi_describe(info, where, sizeof(where));
    snprintf(text, bytes, "libfabric %u.%u, %s", FI_MAJOR(lib->version()), FI_MINOR(lib->version()), where);
    lib->freeinfo(info);
    return EPX_OK;
}

/* ---- Open and close */

static void fid_close(struct fid *fid)
{
    if (fid)
        fi_close(fid);
}

/*
 * ofi_rxm closes the connections of an endpoint and then posts receives to them again, for completions that were still
 * queued: it reads freed memory (libfabric's issue 11828; seen with 1.17, open in 2.4). Over tcp receives belong to all
 * connections, so it does not happen there. Over verbs an endpoint is left to the end of the process; its memory region
 * is not, so nobody writes any more.
 */
static int must_leave_open(const struct ofi_net *n)
{
    const char *provider = n->info ? n->info->fabric_attr->prov_name : "";

    return n->ep && strstr(provider, "verbs") && strstr(provider, "ofi_rxm");
}

/* Also for an endpoint that open could not complete. */
static void net_close(struct net *net)
{
    struct ofi_net *n = of(net);

    if (!n)
        return;
    for (int peer = 0; n->peers && peer < n->nranks; peer++)
        ofi_reach_end(&n->peers[peer]);
    if (n->refused)
        log_line(LOG_WARN, "ofi: ignored %llu arrivals that no rank of this group had sent",
                 (unsigned long long)n->refused);
    ofi_tokens_close(n);
    ofi_local_remove(n);
    fid_close(n->mr ? &n->mr->fid : NULL);
    ofi_wait_close(n);
    if (must_leave_open(n)) {
        log_line(LOG_INFO, "ofi: %s: the endpoint stays open until the process ends", n->info->fabric_attr->prov_name);
        n->ep = NULL;
        n->cq = NULL;
        n->av = NULL;
        n->domain = NULL;
        n->fabric = NULL;
    }
    fid_close(n->ep ? &n->ep->fid : NULL);
    fid_close(n->cq ? &n->cq->fid : NULL);
    fid_close(n->av ? &n->av->fid : NULL);
    fid_close(n->domain ? &n->domain->fid : NULL);
    fid_close(n->fabric ? &n->fabric->fid : NULL);
    if (n->info)
        n->lib->freeinfo(n->info);
    free(n->suspects);
    free(n->ops);
    free(n->reported);
    free(n->dirty);
    free(n->held);
    free(n->peers);
    free(n);
}

/* Four times as many operations as may be in flight: those of lost peers may never complete. */
static epx_status make_tables(struct ofi_net *n)
{
    const size_t count = (size_t)n->depth * 4, ranks = (size_t)n->nranks;

    n->peers = calloc(ranks, sizeof(*n->peers));
    n->held = calloc(ranks, sizeof(*n->held));
    n->dirty = calloc(ranks, sizeof(*n->dirty));
    n->reported = calloc(ranks, sizeof(*n->reported));
    n->ops = calloc(count, sizeof(*n->ops));
    if (!n->peers || !n->held || !n->dirty || !n->reported || !n->ops)
        return fail(EPX_ERR_MEMORY, "ofi: no memory for %zu peers and %zu puts in flight", ranks, count);
    for (size_t i = 0; i < count; i++) {
        n->ops[i].next = n->free;
        n->free = &n->ops[i];
    }
    return EPX_OK;
}

/* Opens the queue with a descriptor to sleep on where the provider has one. */
static int open_cq(struct ofi_net *n)
{
    struct fi_cq_attr attr = {.size = 16384, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_FD};
    int rc = fi_cq_open(n->domain, &attr, &n->cq, NULL);

    if (!rc) {
        if (!fi_control(&n->cq->fid, FI_GETWAIT, &n->cq_fd)) {
            ofi_wait_open(n);
            return 0;
        }
        fi_close(&n->cq->fid);
        n->cq_fd = -1;
    }
    n->cq = NULL;
    attr.wait_obj = FI_WAIT_NONE;
    return fi_cq_open(n->domain, &attr, &n->cq, NULL);
}

/* A provider over sockets has a connection for each peer, and reports nothing when it gets no descriptor for one. */
static epx_status reserve_files(const struct ofi_net *n)
{
    char who[64];

    if (n->info->addr_format != FI_SOCKADDR_IN && n->info->addr_format != FI_SOCKADDR_IN6)
        return EPX_OK;
    snprintf(who, sizeof(who), "ofi: rank %d of %d ranks", n->rank, n->nranks);
    return files_need(who, n->nranks + 16);
}

static epx_status open_endpoint(struct ofi_net *n)
{
    struct fi_av_attr attr = {.type = n->info->domain_attr->av_type, .count = (size_t)n->nranks};
    epx_status status = reserve_files(n);
    int rc;

    if (status)
        return status;
    rc = n->lib->fabric(n->info->fabric_attr, &n->fabric, NULL);
    if (rc)
        return fail_ofi(n, rc, "open the fabric");
    rc = fi_domain(n->fabric, n->info, &n->domain, NULL);
    if (rc)
        return fail_ofi(n, rc, "open the domain");
    rc = fi_av_open(n->domain, &attr, &n->av, NULL);
    if (rc)
        return fail_ofi(n, rc, "open the address vector");
    rc = open_cq(n);
    if (rc)
        return fail_ofi(n, rc, "open the completion queue");
    rc = fi_endpoint(n->domain, n->info, &n->ep, NULL);
    if (rc)
        return fail_ofi(n, rc, "open the endpoint");
    rc = fi_ep_bind(n->ep, &n->av->fid, 0);
    if (!rc)
        rc = fi_ep_bind(n->ep, &n->cq->fid, FI_TRANSMIT | FI_RECV | (n->selective ? FI_SELECTIVE_COMPLETION : 0));
    if (!rc)
        rc = fi_enable(n->ep);
    return rc ? fail_ofi(n, rc, "enable the endpoint") : EPX_OK;
}

static epx_status net_open(const struct net_options *options, struct net **net)
{
    const char *missing;
    const struct ofi_lib *lib = ofi_lib_get(&missing);
    struct ofi_net *n;
    epx_status status;

    if (!lib)
        return fail(EPX_ERR_UNSUPPORTED, "ofi: %s", missing);
    if (options->nranks < 1 || options->rank < 0 || options->rank >= options->nranks)
        return fail(EPX_ERR_ARGUMENT, "ofi: rank %d of %d, expected 0 to nranks - 1", options->rank, options->nranks);
    n = calloc(1, sizeof(*n));
    if (!n)
        return fail(EPX_ERR_MEMORY, "ofi: no memory for an endpoint");
    n->net.ops = &net_ofi_ops;
    n->lib = lib;
    n->rank = options->rank;
    n->nranks = options->nranks;
    n->timeout_ns = (uint64_t)(options->timeout_ms > 0 ? options->timeout_ms : 100000) * 1000000u;
    n->cq_fd = n->wait_fd = n->listener = -1;
    status = ofi_choose(lib, options, &n->info);
    if (status)
        goto close;
    if (options->pci && options->pci[0])
        log_line(LOG_INFO, "ofi: rank %d: endpoint %d of the GPU at %s uses %s", options->rank, options->index,
                 options->pci, n->info->domain_attr->name);
    n->depth = n->info->tx_attr->size < OFI_MAX_DEPTH ? (uint32_t)n->info->tx_attr->size : OFI_MAX_DEPTH;
    /* A provider over sockets makes connections. Its CQ data must have room for more than an immediate. */
    n->uses_hello = (n->info->addr_format == FI_SOCKADDR_IN || n->info->addr_format == FI_SOCKADDR_IN6) &&
                    n->info->domain_attr->cq_data_size >= sizeof(uint64_t);
    n->selective = (n->info->tx_attr->comp_order & OFI_ORDER_STRICT) == OFI_ORDER_STRICT;
    status = make_tables(n);
    if (!status)
        status = ofi_tokens_open(n, options);
    if (!status)
        status = open_endpoint(n);
    if (!status)
        status = ofi_local_add(n);
    if (status)
        goto close;
    *net = &n->net;
    return EPX_OK;
close:
    net_close(&n->net);
    return status;
}

static unsigned caps(struct net *net)
{
    const struct fi_info *info = of(net)->info;
    unsigned flags = 0;

    if ((info->tx_attr->msg_order & FI_ORDER_WAW) && (info->rx_attr->msg_order & FI_ORDER_WAW) &&
        info->ep_attr->max_order_waw_size >= info->ep_attr->max_msg_size)
        flags |= NET_ORDERED;
    if (info->domain_attr->data_progress == FI_PROGRESS_MANUAL)
        flags |= NET_NEEDS_PROGRESS;
    if (info->caps & FI_HMEM)
        flags |= NET_DEVICE_MEMORY;
    if (of(net)->tokens)
        flags |= NET_KNOWN_SENDERS;
    return flags;
}

/* ---- Address, region, connect */

static epx_status address(struct net *net, struct net_address *address)
{
    struct ofi_net *n = of(net);
    struct ofi_wire_address wire = {.magic = OFI_MAGIC, .format = n->info->addr_format};
    size_t bytes = NET_ADDRESS_MAX - sizeof(wire);
    int rc;

    memset(address, 0, sizeof(*address));
    rc = fi_getname(&n->ep->fid, address->data + sizeof(wire), &bytes);
    if (rc)
        return fail_ofi(n, rc, "ask for the endpoint's address");
    wire.bytes = (uint32_t)bytes;
    snprintf(wire.provider, sizeof(wire.provider), "%s", n->info->fabric_attr->prov_name);
    memcpy(address->data, &wire, sizeof(wire));
    address->bytes = (uint32_t)(sizeof(wire) + bytes);
    address->version = OFI_ADDRESS_VERSION;
    return EPX_OK;
}

/* Does EPX choose the keys of memory? */
static int chooses_keys(const struct fi_info *info)
{
    return !(info->domain_attr->mr_mode & FI_MR_PROV_KEY);
}

/* Where EPX chooses the key, it is random: a rank of another job that is reached by mistake refuses it. */
static epx_status draw_key(const struct fi_info *info, uint64_t *key)
{
    const size_t bytes = info->domain_attr->mr_key_size;

    *key = 1;
    if (!chooses_keys(info))
        return EPX_OK;
    if (getrandom(key, sizeof(*key), 0) != (ssize_t)sizeof(*key))
        return fail_errno(EPX_ERR_SYSTEM, "ofi: getrandom");
    if (bytes < sizeof(*key))
        *key &= ((uint64_t)1 << 8 * bytes) - 1;
    return EPX_OK;
}

/* GPU memory is registered by its kind and device; if that fails, by dma-buf where libfabric supports it. */
static int register_gpu(struct ofi_net *n, const struct net_memory *memory, struct fi_mr_attr *attr)
{
    int rc;

    attr->iface = memory->kind == EPX_DEVICE_CUDA ? FI_HMEM_CUDA : FI_HMEM_ROCR;
    attr->device.cuda = memory->kind == EPX_DEVICE_CUDA ? memory->index : 0;
    rc = fi_mr_regattr(n->domain, attr, 0, &n->mr);
#ifdef FI_MR_DMABUF
    if (rc && memory->dmabuf >= 0) {
        const struct fi_mr_dmabuf dmabuf = {.fd = memory->dmabuf, .len = memory->bytes, .base_addr = memory->base};

        attr->dmabuf = &dmabuf;
        rc = fi_mr_regattr(n->domain, attr, FI_MR_DMABUF, &n->mr);
    }
#endif
    return rc;
}

static int register_with_key(struct ofi_net *n, const struct net_memory *memory, uint64_t key)
{
    const struct iovec piece = {.iov_base = memory->base, .iov_len = memory->bytes};
    struct fi_mr_attr attr = {
        .mr_iov = &piece, .iov_count = 1, .access = FI_WRITE | FI_REMOTE_WRITE, .requested_key = key};

    return net_memory_is_gpu(memory->kind) ? register_gpu(n, memory, &attr)
                                           : fi_mr_regattr(n->domain, &attr, 0, &n->mr);
}

/* A short key may be in use already where endpoints share the keys of a card: another one is drawn then. */
static epx_status register_memory(struct ofi_net *n, const struct net_memory *memory)
{
    int rc = -FI_ENOKEY;

    for (int i = 0; i < KEY_DRAWS && rc == -FI_ENOKEY; i++) {
        uint64_t key;
        const epx_status status = draw_key(n->info, &key);

        if (status)
            return status;
        rc = register_with_key(n, memory, key);
        if (!chooses_keys(n->info))
            break;
    }
    return rc ? fail_ofi(n, rc, net_memory_is_gpu(memory->kind) ? "register GPU memory" : "register the heap") : EPX_OK;
}

static epx_status add_region(struct net *net, const struct net_memory *memory, struct net_region *region)
{
    struct ofi_net *n = of(net);
    void *const base = memory->base;
    const uint64_t bytes = memory->bytes;
    const int mode = n->info->domain_attr->mr_mode;
    struct ofi_wire_key wire;
    epx_status status;
    int rc = 0;

    if (net_memory_is_gpu(memory->kind) && !(n->info->caps & FI_HMEM))
        return fail(EPX_ERR_UNSUPPORTED, "ofi: the provider %s registers no GPU memory (FI_HMEM)",
                    n->info->fabric_attr->prov_name);
    if (n->mr)
        return fail(EPX_ERR_USAGE, "ofi: this endpoint has a region of %llu bytes, expected one call",
                    (unsigned long long)n->bytes);
    status = register_memory(n, memory);
    if (status)
        return status;
    if (mode & (FI_MR_ENDPOINT | FI_MR_RMA_EVENT)) {
        rc = fi_mr_bind(n->mr, &n->ep->fid, 0);
        if (!rc)
            rc = fi_mr_enable(n->mr);
    }
    if (rc)
        return fail_ofi(n, rc, "enable the registered memory");
    n->desc = fi_mr_desc(n->mr);
    n->base = base;
    n->bytes = bytes;
    wire.key = fi_mr_key(n->mr);
    wire.base = mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)base : 0;
    if (wire.key == FI_KEY_NOTAVAIL)
        return fail(EPX_ERR_UNSUPPORTED, "ofi: %s has keys of more than 8 bytes", n->info->fabric_attr->prov_name);
    memset(region, 0, sizeof(*region));
    region->bytes = bytes;
    region->key_bytes = sizeof(wire);
    memcpy(region->key, &wire, sizeof(wire));
    return EPX_OK;
}

static epx_status check_address(const struct ofi_net *n, int peer, const struct net_address *address,
                                const struct net_region *region, struct ofi_wire_address *wire)
{
    char theirs[OFI_PROVIDER_BYTES];

    if (address->version != OFI_ADDRESS_VERSION)
        return fail(EPX_ERR_MISMATCH, "ofi: rank %d has version %u of the address format, this rank has %d", peer,
                    address->version, OFI_ADDRESS_VERSION);
    if (address->bytes <= sizeof(*wire) || address->bytes > NET_ADDRESS_MAX)
        return fail(EPX_ERR_MISMATCH, "ofi: the address of rank %d has %u bytes, expected %zu to %d", peer,
                    address->bytes, sizeof(*wire) + 1, NET_ADDRESS_MAX);
    memcpy(wire, address->data, sizeof(*wire));
    wire->provider[OFI_PROVIDER_BYTES - 1] = 0;
    if (wire->magic != OFI_MAGIC || wire->bytes != address->bytes - sizeof(*wire))
        return fail(EPX_ERR_MISMATCH, "ofi: the address of rank %d is not one of the ofi network", peer);
    text_clean(theirs, sizeof(theirs), wire->provider, sizeof(wire->provider));
    if (strncmp(wire->provider, n->info->fabric_attr->prov_name, OFI_PROVIDER_BYTES - 1) ||
        wire->format != n->info->addr_format)
        return fail(EPX_ERR_MISMATCH,
                    "ofi: rank %d uses the provider \"%s\" (address format %u), this rank \"%s\" (%u); "
                    "EPX_OFI_PROVIDER sets one for all",
                    peer, theirs, wire->format, n->info->fabric_attr->prov_name, n->info->addr_format);
    if (region->key_bytes != sizeof(struct ofi_wire_key))
        return fail(EPX_ERR_MISMATCH, "ofi: the key of rank %d's memory has %u bytes, expected %zu", peer,
                    region->key_bytes, sizeof(struct ofi_wire_key));
    if (n->info->src_addr && ofi_address_is_loopback(wire->format, address->data + sizeof(*wire), wire->bytes) !=
                                 ofi_address_is_loopback(n->info->addr_format, n->info->src_addr, n->info->src_addrlen))
        return fail(EPX_ERR_MISMATCH,
                    "ofi: of rank %d and this rank only one is on a loopback address; EPX_SOCKET_IFNAME names the "
                    "interface to use",
                    peer);
    return EPX_OK;
}

/* Starts to connect and does not wait: the connection needs the peer to poll, and the peer may be waiting here too.
 * Until the connection is established, put returns -EAGAIN. */
static epx_status net_connect(struct net *net, int peer, const struct net_address *address,
                              const struct net_region *region)
{
    struct ofi_net *n = of(net);
    struct ofi_wire_address wire;
    struct ofi_wire_key key;
    struct ofi_peer *p;
    epx_status status;

    if (peer < 0 || peer >= n->nranks)
        return fail(EPX_ERR_ARGUMENT, "ofi: connect to rank %d, expected 0 to %d", peer, n->nranks - 1);
    p = &n->peers[peer];
    if (p->state != OFI_UNKNOWN)
        return fail(EPX_ERR_USAGE, "ofi: rank %d is already connected", peer);
    status = check_address(n, peer, address, region, &wire);
    if (!status)
        status = ofi_local_check(n, peer, address->data + sizeof(wire), wire.bytes);
    if (status)
        return status;
    if (fi_av_insert(n->av, address->data + sizeof(wire), 1, &p->address, 0, NULL) != 1)
        return fail(EPX_ERR_PEER, "ofi: %s does not accept the address of rank %d", n->info->fabric_attr->prov_name,
                    peer);
    memcpy(&key, region->key, sizeof(key));
    p->key = key.key;
    p->base = key.base;
    p->bytes = region->bytes;
    p->state = OFI_CONNECTED;
    ofi_start_connection(n, peer);
    return EPX_OK;
}

const struct net_ops net_ofi_ops = {.name = "ofi",
                                    .probe = probe,
                                    .open = net_open,
                                    .caps = caps,
                                    .address = address,
                                    .add_region = add_region,
                                    .connect = net_connect,
                                    .put = ofi_put,
                                    .flush = ofi_flush,
                                    .poll = ofi_poll,
                                    .wait_fd = ofi_wait_fd,
                                    .arm = ofi_arm,
                                    .close = net_close};

#endif

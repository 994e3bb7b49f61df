/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What networks take from others: addresses and keys of ranks (connect), datagrams with hellos of verbs, and CQ data of
 * ofi, with hellos and tokens. Cards and providers are played by tables of functions that do nothing.
 *
 *     network (1) | with a key (1) | things: which (1), then what it needs
 */
#include "fuzz.h"

#include "boot/auth.h"
#include "net/net.h"
#include "net/ofi/ofi.h"
#include "net/verbs/rc.h"

enum { RANKS = 4, OWN = 1, THINGS = 64 };

static const uint8_t key[CRYPTO_KEY] = "a key of the group, 32 bytes....";

FUZZ_BEGIN(fuzz_quiet)

/* ---- verbs ------------------------------------------------------------------------------------------------------- */

#if EPX_HAVE_VERBS

#define TOKEN 0x1122334455667788ull
enum { GRH = 40, PAIRS = 64 };

static struct ibv_context context;
static struct ibv_qp qps[PAIRS];
static int nqps, sent;

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    (void)bad;
    FUZZ_REQUIRE(qp && wr->num_sge == 1 && wr->sg_list->length <= HELLO_BYTES);
    sent++;
    return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    (void)bad;
    FUZZ_REQUIRE(qp && wr);
    return 0;
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    (void)pd;
    (void)attr;
    FUZZ_REQUIRE(nqps < PAIRS);
    qps[nqps] = (struct ibv_qp){.context = &context, .qp_num = (uint32_t)nqps + 1};
    return &qps[nqps++];
}

static int modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    FUZZ_REQUIRE(qp);
    if (mask & IBV_QP_DEST_QPN)
        FUZZ_REQUIRE(attr->dest_qp_num < 1u << 24 && attr->rq_psn < 1u << 24 && attr->path_mtu >= IBV_MTU_256 &&
                     attr->path_mtu <= IBV_MTU_4096);
    return 0;
}

static int destroy_qp(struct ibv_qp *qp)
{
    (void)qp;
    return 0;
}

static struct ibv_ah *create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
    static struct ibv_ah ah;

    (void)pd;
    (void)attr;
    return &ah;
}

static const char *status_text(enum ibv_wc_status status)
{
    (void)status;
    return "failed";
}

static const struct verbs_lib verbs_table = {.create_qp = create_qp,
                                             .modify_qp = modify_qp,
                                             .destroy_qp = destroy_qp,
                                             .create_ah = create_ah,
                                             .wc_status_str = status_text};

struct hello_text { /* as hello.c has it; of another layout, all of them are refused */
    uint32_t magic;
    uint16_t version, flags;
    uint64_t to, from;
    uint32_t rank, qpn, psn, reserved;
    uint8_t mac[16];
};

static void draw_hello(struct fuzz *f, const struct verbs_net *net, uint8_t *out)
{
    struct hello_text hello = {.magic = 0x48585045u, .version = 2, .to = net->token};
    uint8_t mac[CRYPTO_KEY];

    hello.rank = fuzz_below(f, RANKS + 1);
    hello.from = hello.rank < RANKS ? net->peers[hello.rank].address.token : 0;
    hello.flags = (uint16_t)fuzz_below(f, 4);
    hello.qpn = (uint32_t)fuzz_int(f, 4);
    hello.psn = (uint32_t)fuzz_int(f, 4);
    if (fuzz_below(f, 3) && net->has_key &&
        !auth_derive(net->key, "hello of a queue pair", &hello, offsetof(struct hello_text, mac), mac))
        memcpy(hello.mac, mac, sizeof(hello.mac));
    memcpy(out, &hello, sizeof(hello));
    if (!fuzz_below(f, 4))
        out[fuzz_below(f, sizeof(hello))] ^= (uint8_t)fuzz_int(f, 1);
}

static void verbs_one(struct fuzz *f, struct verbs_net *net)
{
    struct rc_state *rc = net->state;
    const uint32_t slot = fuzz_below(f, (unsigned)rc->hello_receives);
    struct ibv_wc wc = {.wr_id = WR_ID(WR_HELLO_RECEIVE, 0, slot),
                        .status = fuzz_below(f, 32) ? IBV_WC_SUCCESS : IBV_WC_WR_FLUSH_ERR,
                        .byte_len = GRH + sizeof(struct hello_text)};
    struct verbs_address to = {.token = TOKEN, .mtu = (uint8_t)fuzz_below(f, 7)};
    struct net_address address = {.bytes = sizeof(to), .version = VERBS_ADDRESS_VERSION};
    struct net_region region = {.bytes = 1 << 20, .key_bytes = sizeof(struct verbs_key)};

    switch (fuzz_below(f, 6)) {
    case 0:
        fuzz_fill(f, rc->ud_memory + slot * HELLO_BYTES, HELLO_BYTES);
        wc.byte_len = (uint32_t)fuzz_int(f, 1);
        hello_take(net, &wc);
        break;
    case 1:
        to.token += fuzz_below(f, 3);
        memcpy(address.data, &to, sizeof(to));
        if (!fuzz_below(f, 4))
            address.data[fuzz_below(f, sizeof(to))] ^= (uint8_t)fuzz_int(f, 1);
        if (!fuzz_below(f, 8))
            address.bytes = (uint32_t)fuzz_int(f, 4);
        if (!fuzz_below(f, 8))
            region.key_bytes = (uint32_t)fuzz_int(f, 4);
        (void)net_verbs_ops.connect(&net->net, (int)fuzz_below(f, RANKS + 2) - 1, &address, &region);
        break;
    case 2:
        wc.wr_id = WR_ID(WR_HELLO, 0, 0);
        if (rc->hello_sending)
            hello_take(net, &wc);
        break;
    default:
        draw_hello(f, net, rc->ud_memory + slot * HELLO_BYTES + GRH);
        hello_take(net, &wc);
        break;
    }
}

static void verbs_all(struct fuzz *f, int with_key)
{
    struct verbs_net *net = calloc(1, sizeof(*net));
    struct rc_state *rc = calloc(1, sizeof(*rc));
    struct ibv_srq srq = {0};
    struct ibv_mr mr = {0};

    FUZZ_REQUIRE(net && rc);
    nqps = 0;
    context.ops.post_send = post_send;
    context.ops.post_recv = post_recv;
    *net = (struct verbs_net){.net = {.ops = &net_verbs_ops},
                              .lib = &verbs_table,
                              .transport = &verbs_rc,
                              .card = {.mtu = IBV_MTU_1024},
                              .rank = OWN,
                              .nranks = RANKS,
                              .timeout_ms = 1000,
                              .token = TOKEN,
                              .has_key = with_key,
                              .context = &context,
                              .state = rc};
    memcpy(net->key, key, sizeof(net->key));
    *rc = (struct rc_state){.depth = RC_DEPTH, .srq = &srq, .shared = 1, .hello_receives = 8, .ud_mr = &mr};
    rc->ud = create_qp(NULL, NULL);
    rc->ud_memory = calloc(8 + HELLO_SENDS, HELLO_BYTES);
    rc->dirty = calloc(RANKS, sizeof(*rc->dirty));
    net->peers = calloc(RANKS, sizeof(*net->peers));
    FUZZ_REQUIRE(rc->ud_memory && rc->dirty && net->peers);
    for (int i = 0; i < THINGS && f->left && !net->broken; i++)
        verbs_one(f, net);
    (void)hello_progress(net);
    for (int r = 0; r < RANKS; r++) {
        FUZZ_REQUIRE(!net->peers[r].pair || net->peers[r].known); /* nobody else gets a queue pair */
        free(net->peers[r].pair);
    }
    free(net->peers);
    free(rc->dirty);
    free(rc->ud_memory);
    free(rc);
    free(net);
}

#endif

/* ---- ofi --------------------------------------------------------------------------------------------------------- */

#if EPX_HAVE_OFI

static struct fuzz *cq_input;
static struct net_options ofi_options = {.rank = OWN, .nranks = RANKS, .timeout_ms = 1000};

/* The token that a rank sends to this one, as token.c makes it. */
static uint64_t token_of(int from)
{
    const int32_t pair[3] = {0, from, OWN};
    uint8_t bytes[CRYPTO_KEY];
    uint32_t token;

    FUZZ_REQUIRE(!auth_derive(key, "arrivals", pair, sizeof(pair), bytes));
    memcpy(&token, bytes, sizeof(token));
    token &= OFI_TOKEN_MASK;
    return token | !token;
}

static ssize_t cq_read(struct fid_cq *cq, void *buffer, size_t count)
{
    struct fi_cq_data_entry *entries = buffer;
    size_t n = 0;

    (void)cq;
    while (n < count && cq_input->left && fuzz_below(cq_input, 8)) {
        struct fi_cq_data_entry *e = &entries[n++];
        const int from = (int)fuzz_below(cq_input, RANKS);

        memset(e, 0, sizeof(*e));
        e->flags = FI_REMOTE_WRITE | (fuzz_below(cq_input, 8) ? FI_REMOTE_CQ_DATA : 0);
        e->data = fuzz_below(cq_input, 4)
                      ? token_of(from) << OFI_TOKEN_AT | (fuzz_below(cq_input, 2) ? OFI_HELLO : 0) |
                            (fuzz_below(cq_input, 2) ? (uint32_t)from : (uint32_t)fuzz_int(cq_input, 4))
                      : fuzz_int(cq_input, 8);
    }
    return n ? (ssize_t)n : -FI_EAGAIN;
}

static ssize_t cq_readerr(struct fid_cq *cq, struct fi_cq_err_entry *entry, uint64_t flags)
{
    (void)cq;
    (void)entry;
    (void)flags;
    return 0;
}

static int ep_getname(fid_t fid, void *at, size_t *bytes)
{
    (void)fid;
    (void)at;
    (void)bytes;
    return -FI_ENOSYS;
}

static int av_insert(struct fid_av *av, const void *address, size_t count, fi_addr_t *out, uint64_t flags, void *arg)
{
    volatile uint8_t sum = 0;

    (void)av;
    (void)flags;
    (void)arg;
    for (size_t i = 0; i < 16; i++) /* a socket address has so many bytes */
        sum = (uint8_t)(sum + ((const uint8_t *)address)[i]);
    *out = 0;
    return (int)count;
}

/* Asked where puts are refused for long, which a busy machine makes of any time: nothing may be connected to. */
static int av_lookup(struct fid_av *av, fi_addr_t address, void *out, size_t *bytes)
{
    (void)av;
    (void)address;
    (void)out;
    (void)bytes;
    return -FI_ENOSYS;
}

static ssize_t ep_writemsg(struct fid_ep *ep, const struct fi_msg_rma *message, uint64_t flags)
{
    (void)ep;
    (void)message;
    (void)flags;
    return -FI_EAGAIN;
}

static const char *ofi_text(int error)
{
    (void)error;
    return "failed";
}

static void ofi_connect_one(struct fuzz *f, struct ofi_net *n)
{
    struct ofi_wire_address wire = {.magic = OFI_MAGIC, .format = FI_SOCKADDR_IN, .bytes = 16, .provider = "tcp"};
    struct net_address address = {.bytes = sizeof(wire) + 16, .version = OFI_ADDRESS_VERSION};
    struct net_region region = {.bytes = 1 << 20, .key_bytes = sizeof(struct ofi_wire_key)};

    if (!fuzz_below(f, 4))
        wire.bytes = (uint32_t)fuzz_int(f, 4);
    if (!fuzz_below(f, 4))
        address.bytes = (uint32_t)fuzz_int(f, 4);
    memcpy(address.data, &wire, sizeof(wire));
    fuzz_fill(f, address.data + sizeof(wire), 28);
    if (!fuzz_below(f, 4))
        address.data[fuzz_below(f, sizeof(wire))] ^= (uint8_t)fuzz_int(f, 1);
    if (!fuzz_below(f, 8))
        region.key_bytes = (uint32_t)fuzz_int(f, 4);
    (void)net_ofi_ops.connect(&n->net, (int)fuzz_below(f, RANKS + 2) - 1, &address, &region);
}

static void ofi_one(struct fuzz *f, struct ofi_net *n)
{
    struct net_event events[96];
    const int max = 1 + (int)fuzz_below(f, 96);
    int got;

    if (!fuzz_below(f, 3)) {
        ofi_connect_one(f, n);
        return;
    }
    cq_input = f;
    got = ofi_poll(&n->net, events, max);
    FUZZ_REQUIRE(got <= max);
    for (int i = 0; i < got; i++) {
        FUZZ_REQUIRE(events[i].peer >= -1 && events[i].peer < RANKS);
        FUZZ_REQUIRE(events[i].kind == NET_ARRIVED || events[i].kind == NET_FAILED || events[i].kind == NET_REFUSED);
        FUZZ_REQUIRE(events[i].kind != NET_ARRIVED || !n->tokens || events[i].peer >= 0);
    }
    FUZZ_REQUIRE(n->awaited >= 0 && n->awaited <= RANKS);
}

static void ofi_all(struct fuzz *f, int with_key)
{
    static struct fi_ops_cq cq_ops = {.size = sizeof(cq_ops), .read = cq_read, .readerr = cq_readerr};
    static struct fi_ops_cm cm_ops = {.size = sizeof(cm_ops), .getname = ep_getname};
    static struct fi_ops_av av_ops = {.size = sizeof(av_ops), .insert = av_insert, .lookup = av_lookup};
    static struct fi_ops_rma rma_ops = {.size = sizeof(rma_ops), .writemsg = ep_writemsg};
    static const struct ofi_lib lib = {.strerror = ofi_text};
    struct fi_fabric_attr fabric = {.prov_name = "tcp"};
    struct fi_domain_attr domain = {.cq_data_size = 8};
    struct fi_info info = {.addr_format = FI_SOCKADDR_IN, .fabric_attr = &fabric, .domain_attr = &domain};
    struct fid_cq cq = {.ops = &cq_ops};
    struct fid_av av = {.ops = &av_ops};
    struct fid_ep ep = {.cm = &cm_ops, .rma = &rma_ops};
    struct ofi_net *n = calloc(1, sizeof(*n));
    int held[RANKS], dirty[RANKS];
    uint8_t reported[RANKS] = {0}, heap[64] = {0};

    FUZZ_REQUIRE(n);
    *n = (struct ofi_net){.net = {.ops = &net_ofi_ops},
                          .lib = &lib,
                          .info = &info,
                          .cq = &cq,
                          .av = &av,
                          .ep = &ep,
                          .base = heap,
                          .bytes = sizeof(heap),
                          .rank = OWN,
                          .nranks = RANKS,
                          .timeout_ns = 1000000000,
                          .uses_hello = 1,
                          .held = held,
                          .dirty = dirty,
                          .reported = reported,
                          .depth = 4};
    n->ops = calloc(16, sizeof(*n->ops));
    n->free = n->ops;
    n->peers = calloc(RANKS, sizeof(*n->peers));
    FUZZ_REQUIRE(n->ops && n->peers);
    ofi_options.key = with_key ? key : NULL;
    FUZZ_REQUIRE(ofi_tokens_open(n, &ofi_options) == EPX_OK);
    for (int i = 0; i < THINGS && f->left; i++)
        ofi_one(f, n);
    ofi_tokens_close(n);
    free(n->peers);
    free(n->ops);
    free(n);
}

#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz f = {data, bytes};
    const int which = (int)fuzz_int(&f, 1) & 1, with_key = (int)fuzz_int(&f, 1) & 1;

#if EPX_HAVE_VERBS
    if (which)
        verbs_all(&f, with_key);
#endif
#if EPX_HAVE_OFI
    if (!which)
        ofi_all(&f, with_key);
#endif
    return 0;
}

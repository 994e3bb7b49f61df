/* SPDX-License-Identifier: Apache-2.0 */
/* Puts over verbs that do not complete, on a card that is played: docs/verbs.md, "Failure". Soft-RoCE has the same with
 * a peer that does not poll (test_net_verbs.c). ctest: sleeps */
#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "device/cpu/prims.h"
#include "kernel/ring.h"
#include "net/verbs/lib.h"
#include "proxy/proxy.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit.h"
#include "util/clock.h"

#if EPX_HAVE_VERBS

#include "net/verbs/rc.h"

enum { OWN, PEER, OTHER, RANKS, TIMEOUT_MS = 160, CQ = 64, EVENTS = 8 };
#define MS 1000000ull

struct card { /* what it was told, and the completions that it has ready */
    struct verbs_net *net;
    struct ibv_context context;
    struct ibv_cq cq;
    struct ibv_qp qps[RANKS];
    struct ibv_wc ready[CQ];
    int count;
    int posted[RANKS], resets[RANKS]; /* by peer */
    int flushes;                      /* a queue pair that is reset completes what was posted to it */
    int stops;                        /* the process is stopped behind the next poll: this put to PEER completes then */
    int floods;                       /* there is another arrival with each poll */
};
static struct card card;

static void complete(int peer, int number, enum ibv_wc_status status)
{
    assert_true(card.count < CQ);
    card.ready[card.count++] = (struct ibv_wc){.wr_id = WR_ID(WR_PUT, peer, number), .status = status};
}

static void arrive(void)
{
    assert_true(card.count < CQ);
    card.ready[card.count++] = (struct ibv_wc){.wr_id = WR_ID(WR_RECEIVE, 0, 0), .wc_flags = IBV_WC_WITH_IMM};
}

static void pause_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *out)
{
    int n;

    (void)cq;
    if (card.floods)
        arrive();
    n = card.count < most ? card.count : most;
    memcpy(out, card.ready, (size_t)n * sizeof(*out));
    memmove(card.ready, card.ready + n, (size_t)(card.count - n) * sizeof(*out));
    card.count -= n;
    if (card.stops) {
        pause_ms(2 * card.net->timeout_ms);
        complete(PEER, card.stops, IBV_WC_SUCCESS);
        card.stops = 0;
    }
    return n;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    (void)bad;
    for (; wr; wr = wr->next)
        card.posted[qp - card.qps]++;
    return 0;
}

static int modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    const int peer = (int)(qp - card.qps);

    (void)mask;
    assert_int_equal(attr->qp_state, IBV_QPS_ERR);
    card.resets[peer]++;
    for (uint32_t i = card.net->peers[peer].pair->completed; card.flushes && i < (uint32_t)card.posted[peer]; i++)
        complete(peer, (int)i + 1, IBV_WC_WR_FLUSH_ERR);
    return 0;
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    (void)srq;
    (void)wr;
    (void)bad;
    return 0;
}

static const char *status_text(enum ibv_wc_status status)
{
    (void)status;
    return "failed";
}

static int notify_cq(struct ibv_cq *cq, int solicited)
{
    (void)cq;
    (void)solicited;
    return 0;
}

static int no_event(struct ibv_context *context, struct ibv_async_event *event)
{
    (void)context;
    (void)event;
    return -1;
}

static int no_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **context)
{
    (void)channel;
    (void)cq;
    (void)context;
    return -1;
}

static const struct verbs_lib lib = {
    .modify_qp = modify_qp, .wc_status_str = status_text, .get_async_event = no_event, .get_cq_event = no_cq_event};

/* Connected to two peers. */
static int set_up(void **state)
{
    static struct ibv_mr mr;
    static struct ibv_srq srq = {.context = &card.context};
    static uint8_t heap[4096];
    struct verbs_net *net = calloc(1, sizeof(*net));
    struct rc_state *rc = calloc(1, sizeof(*rc));

    *net = (struct verbs_net){.net = {.ops = &net_verbs_ops},
                              .lib = &lib,
                              .transport = &verbs_rc,
                              .card = {.device = "played", .max_message = 4096},
                              .nranks = RANKS,
                              .timeout_ms = slow_ms(TIMEOUT_MS),
                              .context = &card.context,
                              .cq = &card.cq,
                              .heap = heap,
                              .heap_bytes = sizeof(heap),
                              .mr = &mr,
                              .send_room = CQ,
                              .state = rc};
    *rc = (struct rc_state){.depth = RC_DEPTH, .srq = &srq, .shared = 1, .dirty = calloc(RANKS, sizeof(*rc->dirty))};
    net->peers = calloc(RANKS, sizeof(*net->peers));
    card = (struct card){.net = net, .flushes = 1};
    card.context.ops.poll_cq = poll_cq;
    card.context.ops.post_send = post_send;
    card.context.ops.post_srq_recv = post_srq_recv;
    card.context.ops.req_notify_cq = notify_cq;
    card.cq.context = &card.context;
    card.cq.cqe = CQ;
    for (int i = PEER; i < RANKS; i++) {
        card.qps[i].context = &card.context;
        net->peers[i] =
            (struct verbs_peer){.known = 1, .bytes = sizeof(heap), .pair = calloc(1, sizeof(struct verbs_pair))};
        net->peers[i].pair->qp = &card.qps[i];
        net->peers[i].pair->done = 1;
    }
    *state = &net->net;
    return 0;
}

static int tear_down(void **state)
{
    struct verbs_net *net = *state;
    struct rc_state *rc = net->state;

    for (int i = 0; i < RANKS; i++)
        free(net->peers[i].pair);
    free(rc->dirty);
    free(rc);
    free(net->peers);
    free(net);
    return 0;
}

static int put(struct net *net, int peer)
{
    const struct net_put put = {.peer = peer, .bytes = 128};

    return net->ops->put(net, &put);
}

/* As a proxy that has nothing to do: polls, and sleeps for a millisecond. 1 and the event, or 0 after so long. */
static int wait_event(struct net *net, int ms, struct net_event *event)
{
    const uint64_t end = clock_ns() + (uint64_t)ms * MS;

    do {
        const int n = net->ops->poll(net, event, 1);

        assert_true(n >= 0);
        if (n)
            return 1;
        if (net->ops->arm(net) != -EAGAIN)
            pause_ms(1);
    } while (clock_ns() < end);
    return 0;
}

static int timeout_ms(const struct net *net)
{
    return ((const struct verbs_net *)net)->timeout_ms;
}

/* The event is the loss of PEER, and puts to it fail from then on. */
static void is_lost(struct net *net, const struct net_event *event, int error, int reads)
{
    assert_int_equal(event->kind, NET_FAILED);
    assert_int_equal(event->peer, PEER);
    assert_int_equal(event->error, error);
    assert_int_equal(event->reads, reads);
    assert_int_equal(card.resets[PEER], 1);
    assert_int_equal(card.resets[OTHER], 0);
    assert_int_equal(put(net, PEER), -error);
}

/* What a receiver that is stopped looks like: its card asks the sender to repeat, without end. */
static void puts_are_given_up_at_the_deadline(void **state)
{
    struct net *net = *state;
    const uint64_t begin = clock_ns();
    struct net_event event;

    assert_int_equal(put(net, PEER), 0);
    assert_int_equal(put(net, PEER), 0);
    assert_int_equal(wait_event(net, 20 * timeout_ms(net), &event), 1);
    assert_true(clock_ns() - begin >= (uint64_t)timeout_ms(net) * MS);
    is_lost(net, &event, ETIMEDOUT, 0);
    assert_int_equal(wait_event(net, 5, &event), 0);
    assert_int_equal(put(net, OTHER), 0);
    assert_int_equal(((struct verbs_net *)net)->outstanding, 1);
}

/* One to which something completes before the timeout, again and again, is not lost beside one that is. */
static void slow_peers_are_not_lost(void **state)
{
    struct net *net = *state;
    struct net_event event;

    assert_int_equal(put(net, PEER), 0);
    assert_int_equal(put(net, OTHER), 0);
    for (int i = 1; i <= 8; i++) {
        assert_int_equal(put(net, OTHER), 0);
        if (wait_event(net, timeout_ms(net) / 4, &event))
            is_lost(net, &event, ETIMEDOUT, 0);
        complete(OTHER, i, IBV_WC_SUCCESS);
        do {
            assert_int_equal(wait_event(net, timeout_ms(net), &event), 1);
            if (event.kind != NET_SENT)
                is_lost(net, &event, ETIMEDOUT, 0);
        } while (event.kind != NET_SENT);
    }
    assert_int_equal(card.resets[PEER], 1);
}

/* Before the card has completed a put its memory is not free: no event, and put does not tell either. */
static void a_loss_is_told_when_nothing_is_read(void **state)
{
    struct net *net = *state;
    struct net_event event;

    card.flushes = 0;
    for (int i = 0; i < 3; i++)
        assert_int_equal(put(net, PEER), 0);
    complete(PEER, 1, IBV_WC_RETRY_EXC_ERR);
    complete(PEER, 2, IBV_WC_WR_FLUSH_ERR);
    assert_int_equal(wait_event(net, 1, &event), 0);
    assert_int_equal(card.resets[PEER], 1);
    assert_int_equal(put(net, PEER), -EAGAIN);
    complete(PEER, 3, IBV_WC_WR_FLUSH_ERR);
    assert_int_equal(wait_event(net, timeout_ms(net), &event), 1);
    is_lost(net, &event, ECONNRESET, 0);
}

static void a_card_that_completes_nothing_may_read(void **state)
{
    struct net *net = *state;
    const uint64_t begin = clock_ns();
    struct net_event event;

    card.flushes = 0;
    assert_int_equal(put(net, PEER), 0);
    assert_int_equal(wait_event(net, 20 * timeout_ms(net), &event), 1);
    assert_true(clock_ns() - begin >= (uint64_t)timeout_ms(net) * MS * 9 / 8);
    is_lost(net, &event, ETIMEDOUT, 1);
    complete(PEER, 1, IBV_WC_WR_FLUSH_ERR);
    assert_int_equal(wait_event(net, 5, &event), 0);
}

/* Its card has worked on; what has completed is found after it. */
static void a_process_that_was_stopped_loses_nobody(void **state)
{
    struct net *net = *state;
    struct net_event event;

    assert_int_equal(put(net, PEER), 0);
    assert_int_equal(net->ops->arm(net), 0);
    pause_ms(2 * timeout_ms(net));
    assert_int_equal(net->ops->arm(net), 0);
    assert_int_equal(card.resets[PEER], 0);
    complete(PEER, 1, IBV_WC_SUCCESS);
    assert_int_equal(wait_event(net, timeout_ms(net), &event), 1);
    assert_int_equal(event.kind, NET_SENT);
}

/* As if PEER had been silent for so many 64ths of the timeout, and were checked just now. */
static void was_silent(struct net *net, int parts)
{
    struct verbs_peer *peer = &card.net->peers[PEER];
    struct net_event event;

    while (peer->moved)
        assert_int_equal(wait_event(net, 1, &event), 0);
    card.net->checked_ns = clock_ns();
    peer->since_ns = card.net->polled_ns - (uint64_t)timeout_ms(net) * MS * (uint64_t)parts / 64;
}

/* Silent until shortly before the deadline. Then it completes, while the own process is stopped: before an iteration,
 * or in the midst of it. */
static void what_completed_during_a_stop_counts(void **state)
{
    struct net *net = *state;
    struct net_event event;

    for (int within = 0; within < 2; within++) {
        assert_int_equal(put(net, PEER), 0);
        was_silent(net, 62);
        if (within) {
            card.stops = 2;
        } else {
            complete(PEER, 1, IBV_WC_SUCCESS);
            pause_ms(2 * timeout_ms(net));
            assert_int_equal(net->ops->arm(net), -EAGAIN);
        }
        assert_int_equal(wait_event(net, 4 * timeout_ms(net), &event), 1);
        assert_int_equal(event.kind, NET_SENT);
    }
    assert_int_equal(card.resets[PEER], 0);
}

static void what_was_flushed_during_a_stop_is_not_read(void **state)
{
    struct net *net = *state;
    struct net_event event;

    card.flushes = 0;
    assert_int_equal(put(net, PEER), 0);
    assert_int_equal(put(net, PEER), 0);
    complete(PEER, 1, IBV_WC_RETRY_EXC_ERR);
    assert_int_equal(wait_event(net, 1, &event), 0);
    was_silent(net, 6);
    complete(PEER, 2, IBV_WC_WR_FLUSH_ERR);
    pause_ms(2 * timeout_ms(net));
    assert_int_equal(net->ops->arm(net), -EAGAIN);
    assert_int_equal(wait_event(net, timeout_ms(net), &event), 1);
    is_lost(net, &event, ECONNRESET, 0);
}

/* A queue that is never empty hides nobody who is silent. */
static void a_flood_does_not_hide_a_silent_peer(void **state)
{
    struct net *net = *state;
    const uint64_t end = clock_ns() + 20 * (uint64_t)timeout_ms(net) * MS;
    struct net_event event = {.kind = NET_ARRIVED};

    assert_int_equal(put(net, PEER), 0);
    arrive();
    card.floods = 1;
    while (event.kind == NET_ARRIVED && clock_ns() < end)
        assert_true(net->ops->poll(net, &event, 1) >= 0);
    is_lost(net, &event, ETIMEDOUT, 0);
}

/* The reply may be in the queue when the process goes on; or it was lost, and the hello is repeated. */
static void a_hello_waits_while_it_is_polled(void **state)
{
    static uint8_t memory[HELLO_SENDS * HELLO_BYTES];
    static struct ibv_mr mr;
    struct net *net = *state;
    struct rc_state *rc = card.net->state;
    struct net_event event;
    int sent;

    card.net->peers[PEER].pair->done = 0;
    rc->ud = &card.qps[OWN];
    rc->ud->context = &card.context;
    rc->ud_mr = &mr;
    rc->ud_memory = memory;
    assert_int_equal(put(net, PEER), -EAGAIN);
    assert_int_equal(wait_event(net, timeout_ms(net) / 16, &event), 0);
    sent = card.posted[OWN];
    pause_ms(2 * timeout_ms(net));
    assert_int_equal(net->ops->arm(net), -EAGAIN);
    assert_int_equal(wait_event(net, timeout_ms(net) / 2, &event), 0);
    assert_true(card.posted[OWN] > sent);
    assert_int_equal(put(net, PEER), -EAGAIN);
    assert_int_equal(wait_event(net, 20 * timeout_ms(net), &event), 1);
    is_lost(net, &event, ETIMEDOUT, 0);
    assert_int_equal(card.net->asking, 0);
}

/* An error of put would say that nothing is read; poll says that the endpoint is broken, whatever completes. */
static void a_broken_endpoint_is_told_by_poll(void **state)
{
    struct net *net = *state;
    struct net_event event;
    int polls = 0, n;

    assert_int_equal(put(net, PEER), 0);
    verbs_break(card.net, ENETDOWN, "its port is down");
    assert_int_equal(put(net, PEER), -EAGAIN);
    assert_int_equal(net->ops->arm(net), -EAGAIN);
    card.floods = 1;
    while ((n = net->ops->poll(net, &event, 1)) == 1 && ++polls <= VERBS_BROKEN_POLLS)
        assert_int_equal(put(net, PEER), -EAGAIN);
    assert_int_equal(n, -ENETDOWN);
    assert_int_equal(put(net, PEER), -ENETDOWN);
}

static void a_broken_endpoint_is_told_at_once_by_others(void **state)
{
    struct net *net = *state;
    struct net_event event;

    verbs_break(card.net, ENETDOWN, "its port is down");
    assert_int_equal(net->ops->poll(net, &event, 1), -ENETDOWN);
    assert_int_equal(put(net, PEER), -ENETDOWN);
    card.net->broken_told = 0;
    assert_int_equal(net->ops->flush(net), -ENETDOWN);
    assert_int_equal(put(net, PEER), -ENETDOWN);
}

/* ---- With a proxy --------------------------------------------------------------------------------------------- */

static int never_readable;

static epx_status played_open(const struct net_options *options, struct net **net)
{
    (void)options;
    *net = &card.net->net;
    return EPX_OK;
}

static epx_status played_address(struct net *net, struct net_address *address)
{
    (void)net;
    (void)address;
    return EPX_OK;
}

static epx_status played_region(struct net *net, const struct net_memory *memory, struct net_region *region)
{
    (void)net;
    region->bytes = memory->bytes;
    return EPX_OK;
}

static epx_status played_connect(struct net *net, int peer, const struct net_address *a, const struct net_region *r)
{
    (void)net;
    (void)peer;
    (void)a;
    (void)r;
    return EPX_OK;
}

static int played_wait_fd(struct net *net)
{
    (void)net;
    return never_readable;
}

static void played_close(struct net *net)
{
    (void)net;
}

static void on_error(void *context, int status, int peer, int64_t expected, int64_t seen, const char *text)
{
    (void)status;
    (void)expected;
    (void)seen;
    (void)text;
    __atomic_store_n((int *)context, peer, __ATOMIC_RELEASE); /* pairs with wait_lost() */
}

static struct proxy_group *open_proxy(struct net_ops *ops, int *lost)
{
    static const uint8_t remote[RANKS] = {0, 1, 1};
    static uint64_t counters[RANKS];
    static struct doorbell bell;
    struct proxy_address addresses[RANKS] = {0};
    struct proxy_options options = {.rank = OWN,
                                    .nranks = RANKS,
                                    .threads = 1,
                                    .ring_slots = 64,
                                    .timeout_ms = card.net->timeout_ms,
                                    .net = ops,
                                    .remote = remote,
                                    .heap = card.net->heap,
                                    .heap_bytes = card.net->heap_bytes,
                                    .device_kind = EPX_DEVICE_CPU,
                                    .counters = counters,
                                    .kinds = 1,
                                    .slots = 1,
                                    .bell = &bell,
                                    .on_error = on_error,
                                    .context = lost};
    struct proxy_group *proxies;

    assert_int_equal(proxy_open(&options, &proxies), EPX_OK);
    assert_int_equal(proxy_addresses(proxies, &addresses[OWN]), EPX_OK);
    addresses[PEER] = addresses[OTHER] = addresses[OWN];
    assert_int_equal(proxy_connect(proxies, addresses), EPX_OK);
    return proxies;
}

static int wait_lost(const int *lost, int ms)
{
    const uint64_t end = clock_ns() + (uint64_t)ms * MS;

    while (!__atomic_load_n(lost, __ATOMIC_ACQUIRE) && clock_ns() < end) /* pairs with on_error() */
        pause_ms(1);
    return __atomic_load_n(lost, __ATOMIC_ACQUIRE);
}

/* No descriptor wakes a proxy for the deadline. It sleeps for a millisecond while a put is in flight, and each sleep
 * counts, however many polls there are in a second. */
static void a_proxy_that_sleeps_finds_a_silent_peer(void **state)
{
    struct net_ops ops = net_verbs_ops;
    const struct command command = command_pack(PEER, 0, 0, 0, 16);
    struct agent agent = {.count = 1, .env = &cpu_thread_env, .timeout_ns = 1000 * MS};
    struct proxy_group *proxies;
    struct proxy_stats stats;
    int lost = 0, limit;

    limit = 20 * timeout_ms(*state);
    ops.open = played_open;
    ops.address = played_address;
    ops.add_region = played_region;
    ops.connect = played_connect;
    ops.wait_fd = played_wait_fd;
    ops.close = played_close;
    never_readable = eventfd(0, EFD_CLOEXEC);
    assert_true(never_readable >= 0);
    proxies = open_proxy(&ops, &lost);
    assert_int_equal(ag_push(&agent, proxy_ring(proxies, 0), &command, 1), WAIT_OK);
    assert_int_equal(wait_lost(&lost, limit), PEER);
    proxy_stats_read(proxies, &stats);
    assert_int_equal(proxy_close(proxies), EPX_OK);
    close(never_readable);
    assert_int_equal(card.posted[PEER], 1);
    assert_int_equal(card.resets[PEER], 1);
    assert_in_range(stats.sleeps, 16, 2 * (uint64_t)timeout_ms(*state));
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        CASE(puts_are_given_up_at_the_deadline),
        CASE(slow_peers_are_not_lost),
        CASE(a_loss_is_told_when_nothing_is_read),
        CASE(a_card_that_completes_nothing_may_read),
        CASE(a_process_that_was_stopped_loses_nobody),
        CASE(what_completed_during_a_stop_counts),
        CASE(what_was_flushed_during_a_stop_is_not_read),
        CASE(a_flood_does_not_hide_a_silent_peer),
        CASE(a_hello_waits_while_it_is_polled),
        CASE(a_broken_endpoint_is_told_by_poll),
        CASE(a_broken_endpoint_is_told_at_once_by_others),
        CASE(a_proxy_that_sleeps_finds_a_silent_peer),
    };
    return unit_run("verbs_deadline", tests, UNIT_COUNT(tests));
}

#else

int main(void)
{
    return 0;
}

#endif

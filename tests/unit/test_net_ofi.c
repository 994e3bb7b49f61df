/* SPDX-License-Identifier: Apache-2.0 */
/* The network suite over libfabric, and cases for networks over sockets. Ranks are processes of one thread: nothing for
 * ThreadSanitizer, which sees this network under proxies in the programs of groups.
 * ctest: cost=75 labels=leaks,notsan,noclang */
#include "tests/unit/net_suite_cmocka.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include "net/ofi/ofi.h"
#include "util/clock.h"
#include "tests/lib/unit.h"

static const struct net_suite tcp = {.label = "ofi_tcp", .ops = &net_ofi_ops, .provider = "tcp", .finds_deaths = 1};
/* The layer that older versions of libfabric put above tcp; verbs is used through it too. */
static const struct net_suite rxm = {
    .label = "ofi_rxm",
    .ops = &net_ofi_ops,
    .provider = "tcp;ofi_rxm",
    .finds_deaths = 1,
    .gaps = {
        {"death_is_told", "ofi_rxm of libfabric 1.17 reads a null pointer when a peer dies in the middle of a write"},
        {"survivors_go_on", "ofi_rxm of libfabric 1.17 reads a null pointer when a peer dies in the middle of a write"},
        {"sleeper_sleeps", "before libfabric 1.18.1 the queue under ofi_rxm often stays readable, and a proxy spins"}}};
static const struct net_suite shm = {
    .label = "ofi_shm",
    .ops = &net_ofi_ops,
    .provider = "shm",
    /* What becomes of a group then: test_killed.c. */
    .gaps = {{"death_is_told", "of 78 killed processes 4 held a lock of shm's, and the others never came back from it"},
             {"survivors_go_on",
              "of 37 times 19 lost the living peer too, for shm answers in order over all peers, dead "
              "ones included; 2 never came back"}}};

#if EPX_HAVE_OFI

/* ---- Which interface */

/* Opens an endpoint under the environment of the caller; its IPv4 or IPv6 address, or -1 with a message in the shared
 * memory. */
static int own_address(struct suite_rank *self, struct sockaddr_storage *at)
{
    struct net_address address;
    struct ofi_wire_address wire;

    SUITE_TRY(suite_open_alone(self));
    SUITE_CHECK(self, !self->suite->ops->address(self->net, &address));
    memcpy(&wire, address.data, sizeof(wire));
    SUITE_CHECK(self, wire.format == FI_SOCKADDR_IN || wire.format == FI_SOCKADDR_IN6);
    memset(at, 0, sizeof(*at));
    memcpy(at, address.data + sizeof(wire), wire.bytes);
    return 0;
}

static int is_loopback4(const struct sockaddr_storage *at)
{
    return at->ss_family == AF_INET && ntohl(((const struct sockaddr_in *)at)->sin_addr.s_addr) == INADDR_LOOPBACK;
}

static int master_on_loopback(struct suite_rank *self)
{
    struct sockaddr_storage at;

    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("EPX_SOCKET_IFNAME", "none-such", 1); /* has no say: all ranks are here */
    SUITE_TRY(own_address(self, &at));
    SUITE_CHECK(self, is_loopback4(&at));
    return 0;
}

static int interface_by_name(struct suite_rank *self)
{
    struct sockaddr_storage at;

    unsetenv("MASTER_ADDR");
    setenv("EPX_SOCKET_IFNAME", "=lo", 1);
    SUITE_TRY(own_address(self, &at));
    SUITE_CHECK(self, is_loopback4(&at));
    return 0;
}

static int interface_that_is_not_there(struct suite_rank *self)
{
    struct net_options options = {.nranks = 1, .provider = "tcp", .timeout_ms = 1000};
    struct net *net = NULL;

    unsetenv("MASTER_ADDR");
    setenv("EPX_SOCKET_IFNAME", "none-such", 1);
    SUITE_CHECK(self, self->suite->ops->open(&options, &net) == EPX_ERR_UNSUPPORTED);
    SUITE_CHECK(self, strstr(epx_last_error(), "EPX_SOCKET_IFNAME") && strstr(epx_last_error(), "none-such"));
    return 0;
}

/* The message names the provider, where the name came from, and what there is instead. */
static int names_provider(const char *text, const char *provider)
{
    return strstr(text, provider) && strstr(text, "this libfabric has") && strstr(text, "tcp");
}

static int provider_that_is_not_there(struct suite_rank *self)
{
    struct net_options options = {.nranks = 1, .provider = "tpc", .timeout_ms = 1000};
    struct net *net = NULL;
    const struct net_ops *ops;
    const char *provider;

    SUITE_CHECK(self, self->suite->ops->open(&options, &net) == EPX_ERR_UNSUPPORTED);
    SUITE_CHECK(self, names_provider(epx_last_error(), "\"tpc\"") && !strstr(epx_last_error(), "EPX_OFI_PROVIDER"));
    options.provider = "";
    setenv("EPX_OFI_PROVIDER", "efaa", 1);
    SUITE_CHECK(self, self->suite->ops->open(&options, &net) == EPX_ERR_UNSUPPORTED);
    SUITE_CHECK(self, names_provider(epx_last_error(), "EPX_OFI_PROVIDER") && strstr(epx_last_error(), "\"efaa\""));
    /* Also where the network was to be found, if there is no card that verbs could use. */
    if (net_find("", &ops, &provider) != EPX_OK)
        SUITE_CHECK(self, names_provider(epx_last_error(), "\"efaa\"") && strstr(epx_last_error(), "verbs: "));
    return 0;
}

/* The address that faces rank 0's machine: here that machine is this one, under the first address that is not
 * loopback. */
static int address_that_reaches_the_master(struct suite_rank *self)
{
    struct ifaddrs *list, *found;
    struct sockaddr_storage at;
    struct in_addr expected = {0};
    char host[INET_ADDRSTRLEN];

    SUITE_CHECK(self, !getifaddrs(&list));
    for (found = list; found; found = found->ifa_next)
        if (found->ifa_addr && found->ifa_addr->sa_family == AF_INET && (found->ifa_flags & IFF_UP) &&
            !(found->ifa_flags & IFF_LOOPBACK))
            break;
    if (found)
        expected = ((struct sockaddr_in *)found->ifa_addr)->sin_addr;
    freeifaddrs(list);
    if (!expected.s_addr)
        return suite_skip(self, "this machine has loopback alone");
    unsetenv("EPX_SOCKET_IFNAME");
    setenv("MASTER_ADDR", inet_ntop(AF_INET, &expected, host, sizeof(host)), 1);
    SUITE_TRY(own_address(self, &at));
    SUITE_CHECK(self, at.ss_family == AF_INET);
    SUITE_CHECK(self, ((struct sockaddr_in *)&at)->sin_addr.s_addr == expected.s_addr);
    return 0;
}

/* ---- Peers that do not fit */

static int connect_says(struct suite_rank *self, const struct net_address *address, const char *word)
{
    SUITE_CHECK(self, self->suite->ops->connect(self->net, 1 - self->rank, address,
                                                &self->shared->regions[1 - self->rank]) == EPX_ERR_MISMATCH);
    if (!strstr(epx_last_error(), word) || !strstr(epx_last_error(), self->rank ? "rank 0" : "rank 1"))
        return suite_fail(self, "\"%s\" names neither the peer nor \"%s\"", epx_last_error(), word);
    return 0;
}

static int peers_that_do_not_fit(struct suite_rank *self)
{
    struct net_address bad;
    struct ofi_wire_address wire;
    struct sockaddr_in at;

    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    bad = self->shared->addresses[1 - self->rank];
    memcpy(&wire, bad.data, sizeof(wire));
    snprintf(wire.provider, sizeof(wire.provider), "carrier-pigeon");
    memcpy(bad.data, &wire, sizeof(wire));
    SUITE_TRY(connect_says(self, &bad, "carrier-pigeon"));

    bad = self->shared->addresses[1 - self->rank];
    memset(bad.data, 0x5a, 4);
    SUITE_TRY(connect_says(self, &bad, "not one of the ofi network"));

    bad = self->shared->addresses[1 - self->rank]; /* on the other side of the loopback border */
    memcpy(&at, bad.data + sizeof(wire), sizeof(at));
    if (at.sin_family == AF_INET) {
        at.sin_addr.s_addr = htonl(ntohl(at.sin_addr.s_addr) == INADDR_LOOPBACK ? 0xc0000201u : INADDR_LOOPBACK);
        memcpy(bad.data + sizeof(wire), &at, sizeof(at));
        SUITE_TRY(connect_says(self, &bad, "EPX_SOCKET_IFNAME"));
    }
    return suite_barrier(self);
}

/* ---- Strangers who connect */

/* Connects to rank 0 and sends, by kind: 0 nothing, 1 noise, 2 and up noise behind bytes that look like a header. */
static int connect_to_rank_0(struct suite_rank *self, uint32_t kind)
{
    struct sockaddr_storage at = {0};
    struct ofi_wire_address wire;
    uint8_t noise[4096];
    struct timeval limit = {.tv_sec = 1};
    int fd;

    memcpy(&wire, self->shared->addresses[0].data, sizeof(wire));
    memcpy(&at, self->shared->addresses[0].data + sizeof(wire), wire.bytes);
    fd = socket(at.ss_family, SOCK_STREAM, 0);
    SUITE_CHECK(self, fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    if (connect(fd, (struct sockaddr *)&at, (socklen_t)wire.bytes))
        return close(fd), suite_fail(self, "cannot connect to rank 0: %s", strerror(errno));
    suite_fill(noise, sizeof(noise), 2, kind);
    if (kind >= 2) {
        noise[0] = (uint8_t)(1 + kind % 4); /* a version */
        noise[1] = (uint8_t)(kind / 4 % 4); /* an operation */
        noise[2] = noise[3] = 0;
    }
    for (int i = 0; kind && i < 8; i++)
        if (send(fd, noise, sizeof(noise), MSG_NOSIGNAL) < 0)
            break;
    usleep(5000);
    return close(fd);
}

/* Rank 2 connects to rank 0 again and again and sends no valid message. The others are not disturbed. */
static int strangers_do_no_harm(struct suite_rank *self)
{
    enum { CALLS = 24, PUTS = 20 };
    const int peer = 1 - self->rank;

    self->no_key = 1; /* with one, nobody can connect to rank 0 any more */
    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    if (self->rank < 2 &&
        self->suite->ops->connect(self->net, peer, &self->shared->addresses[peer], &self->shared->regions[peer]))
        return suite_fail(self, "connect: %s", epx_last_error());
    for (uint32_t call = 0; call < CALLS; call++) {
        if (self->rank == 2) {
            SUITE_TRY(connect_to_rank_0(self, call));
        } else {
            for (int i = 0; i < PUTS; i++)
                SUITE_TRY(suite_put(self, peer, 0, 65536, 16384, 0));
            SUITE_TRY(suite_wait_arrived(self, peer, (call + 1) * PUTS));
        }
        SUITE_TRY(suite_barrier(self));
    }
    SUITE_TRY(suite_wait_completed(self));
    SUITE_CHECK(self, suite_guards_hold(self));
    SUITE_CHECK(self, self->rank == 2 || !self->lost[peer]);
    return suite_barrier(self);
}

/* ---- Somebody who knows an address and speaks libfabric, but does not know the key */

static int join_peer(struct suite_rank *self, int peer)
{
    if (self->suite->ops->connect(self->net, peer, &self->shared->addresses[peer], &self->shared->regions[peer]))
        return suite_fail(self, "connect: %s", epx_last_error());
    return 0;
}

/* A hello of rank 0's, then signals of rank 0's: writes without a single byte, for which libfabric asks for no key. */
static int write_nothing(struct ofi_net *n, fi_addr_t to, int number)
{
    const uint64_t data = number ? 0x80000000u | (uint64_t)(number % 64) << 12 : OFI_HELLO;
    struct fi_msg_rma message = {.addr = to, .data = data, .context = &n->ops[number]};

    return (int)fi_writemsg(n->ep, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION);
}

static int forge(struct suite_rank *self)
{
    const struct net_options options = {.nranks = 3, .timeout_ms = 5000, .provider = "tcp"};
    const uint64_t end = clock_ns() + 20000000000u;
    struct fi_cq_data_entry entry;
    struct ofi_net *n;
    struct net *net;
    fi_addr_t to;
    int posted = 0, done = 0;

    SUITE_CHECK(self, !net_ofi_ops.open(&options, &net));
    n = (struct ofi_net *)net;
    SUITE_CHECK(self, fi_av_insert(n->av, self->shared->addresses[1].data + sizeof(struct ofi_wire_address), 1, &to, 0,
                                   NULL) == 1);
    while (done < 101 && clock_ns() < end) {
        posted += posted < 101 && !write_nothing(n, to, posted);
        done += fi_cq_read(n->cq, &entry, 1) == 1;
    }
    net_ofi_ops.close(net);
    SUITE_CHECK(self, done == 101);
    atomic_store(&self->shared->word, 1);
    return 0;
}

/* Rank 1 sees what is forged, and nothing of it gets through. */
static int watch(struct suite_rank *self)
{
    uint32_t refused = 0;

    while (!atomic_load(&self->shared->stop) && (!atomic_load(&self->shared->word) || refused < 101)) {
        struct net_event events[8];
        const int n = self->suite->ops->poll(self->net, events, 8);

        SUITE_CHECK(self, n >= 0);
        for (int i = 0; i < n; i++) {
            if (events[i].kind != NET_REFUSED)
                return suite_fail(self, "event of kind %d, immediate %#x", (int)events[i].kind, events[i].immediate);
            refused += events[i].count;
        }
        suite_yield(self);
    }
    SUITE_CHECK(self, refused == 101); /* the hello too */
    return 0;
}

static int forged_arrivals_are_ignored(struct suite_rank *self)
{
    const int peer = 1 - self->rank;

    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    if (self->rank == 1)
        SUITE_TRY(join_peer(self, 0));
    if (self->rank == 2)
        SUITE_TRY(forge(self));
    else if (self->rank == 1)
        SUITE_TRY(watch(self));
    SUITE_TRY(suite_barrier(self));
    if (self->rank == 0) /* its hello comes after the stranger's */
        SUITE_TRY(join_peer(self, 1));
    for (int i = 0; i < 20 && self->rank < 2; i++)
        SUITE_TRY(suite_put(self, peer, 0, 65536, 16384, 0));
    if (self->rank < 2)
        SUITE_TRY(suite_wait_arrived(self, peer, 20));
    return suite_finish(self);
}

/* ---- Somebody who has come before all ranks had ------------------------------------------------------------------ */

struct early {
    struct ofi_net *n;
    fi_addr_t to;
    int fd; /* a connection that says nothing */
    int posted;
};

/* Calls of write_until_shut: what they all write does not reach OFI_MAX_REFUSED, however fast this machine is. */
enum { EARLY_WRITES = OFI_REFUSED_STEP / 2 };

/* Writes for `ms`, or until the connection that says nothing is shut: 1. -1: that did not happen in time. */
static int write_until_shut(struct early *e, int ms, int shut)
{
    const uint64_t end = clock_ns() + (uint64_t)ms * 1000000u;
    const int most = e->posted + EARLY_WRITES;
    struct fi_cq_data_entry entry;
    struct fi_cq_err_entry error;
    uint8_t byte;

    while (clock_ns() < end) {
        e->posted += e->posted < most && !write_nothing(e->n, e->to, 1 + e->posted % 32);
        if (fi_cq_read(e->n->cq, &entry, 1) == -FI_EAVAIL) {
            memset(&error, 0, sizeof(error));
            fi_cq_readerr(e->n->cq, &error, 0);
        }
        if (shut && recv(e->fd, &byte, 1, MSG_DONTWAIT) == 0)
            return 1;
    }
    return shut ? -1 : 0;
}

static in_port_t claimed; /* 0: none */

/* In place of libc's, for libfabric too: what it says about itself to whom it connects. */
__attribute__((visibility("default"))) int getsockname(int fd, struct sockaddr *at, socklen_t *bytes)
{
    const int rc = (int)syscall(SYS_getsockname, fd, at, bytes);
    socklen_t size = sizeof(int);
    int listens = 0;

    if (!rc && claimed && !getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) && listens)
        ((struct sockaddr_in *)at)->sin_port = claimed;
    return rc;
}

static int come_early(struct suite_rank *self, struct early *e)
{
    const struct net_options options = {.nranks = 3, .timeout_ms = 5000, .provider = "tcp"};
    const uint8_t *at = self->shared->addresses[1].data + sizeof(struct ofi_wire_address);
    struct net *net;

    e->fd = socket(AF_INET, SOCK_STREAM, 0);
    SUITE_CHECK(self, !connect(e->fd, (const struct sockaddr *)at, sizeof(struct sockaddr_in)));
    SUITE_CHECK(self, !net_ofi_ops.open(&options, &net));
    e->n = (struct ofi_net *)net;
    SUITE_CHECK(self, fi_av_insert(e->n->av, at, 1, &e->to, 0, NULL) == 1);
    return 0;
}

/* Or a later one: on a busy machine a rank does not see all of them. */
static int poll_until(struct suite_rank *self, int word)
{
    while (atomic_load(&self->shared->word) < word)
        SUITE_TRY(suite_step(self));
    return 0;
}

static int poll_for(struct suite_rank *self, int ms)
{
    const uint64_t end = clock_ns() + (uint64_t)ms * 1000000u;

    while (clock_ns() < end)
        SUITE_TRY(suite_step(self));
    return 0;
}

/* Word 1: it has written, 2: it was shut, 3: it has tried for long. */
static int be_early(struct suite_rank *self)
{
    struct early e = {0};

    SUITE_TRY(come_early(self, &e));
    write_until_shut(&e, 300, 0);
    SUITE_CHECK(self, e.posted > 0);
    atomic_store(&self->shared->word, 1);
    SUITE_CHECK(self, write_until_shut(&e, 20000, 1) == 1);
    atomic_store(&self->shared->word, 2);
    write_until_shut(&e, 1000, 0);
    atomic_store(&self->shared->word, 3);
    net_ofi_ops.close(&e.n->net);
    close(e.fd);
    return 0;
}

/* Rank 1 has refused something, and refuses no more when the stranger was shut out, which goes on to write. */
static int outlast_early(struct suite_rank *self)
{
    const struct ofi_net *n = (const struct ofi_net *)self->net;
    uint64_t before;

    SUITE_TRY(poll_until(self, 2));
    SUITE_CHECK(self, n->refused > 2);
    SUITE_TRY(poll_for(self, 200)); /* what was on the way */
    before = n->refused;
    SUITE_TRY(poll_until(self, 3));
    SUITE_CHECK(self, n->refused == before);
    return 0;
}

static int put_both_ways(struct suite_rank *self, uint32_t count)
{
    const int peer = 1 - self->rank;

    for (uint32_t i = 0; i < count; i++)
        SUITE_TRY(suite_put(self, peer, 0, 65536, 16384, 0));
    return suite_wait_arrived(self, peer, count);
}

static int those_who_came_early_are_shut_out(struct suite_rank *self)
{
    self->strangers = 1;
    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    if (self->rank == 2)
        SUITE_TRY(be_early(self));
    if (self->rank == 1)
        SUITE_TRY(join_peer(self, 0));
    if (self->rank < 2)
        SUITE_TRY(poll_until(self, 1));
    if (self->rank == 0)
        SUITE_TRY(join_peer(self, 1));
    if (self->rank < 2)
        SUITE_TRY(put_both_ways(self, 20));
    if (self->rank == 1)
        SUITE_TRY(outlast_early(self));
    SUITE_CHECK(self, self->rank == 2 || !self->lost[1 - self->rank]);
    return suite_finish(self);
}

/* Somebody who connects and sends nothing. It is shut out, and counts as no arrival. */
static int be_silent(struct suite_rank *self)
{
    const uint8_t *at = self->shared->addresses[1].data + sizeof(struct ofi_wire_address);
    const struct timeval limit = {.tv_sec = 20};
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    uint8_t byte;

    SUITE_CHECK(self, !setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
    SUITE_CHECK(self, !connect(fd, (const struct sockaddr *)at, sizeof(struct sockaddr_in)));
    atomic_store(&self->shared->word, 1);
    SUITE_CHECK(self, recv(fd, &byte, 1, 0) == 0);
    atomic_store(&self->shared->word, 2);
    close(fd);
    return 0;
}

static int a_silent_connection_is_no_arrival(struct suite_rank *self)
{
    self->strangers = 1;
    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    if (self->rank == 2)
        SUITE_TRY(be_silent(self));
    else
        SUITE_TRY(poll_until(self, 1));
    if (self->rank < 2) {
        SUITE_TRY(join_peer(self, 1 - self->rank));
        SUITE_TRY(put_both_ways(self, 20));
        SUITE_TRY(poll_until(self, 2));
        SUITE_CHECK(self, !((struct ofi_net *)self->net)->refused);
    }
    return suite_finish(self);
}

/* While rank 0 is late, rank 1 is written to as often as it ignores at a time. It shuts the stranger out, and rank 0
 * gets in. */
static int a_flood_is_shut_out_before_all_have_come(struct suite_rank *self)
{
    self->strangers = 1;
    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    if (self->rank == 1) {
        SUITE_TRY(join_peer(self, 0));
        ((struct ofi_net *)self->net)->refused = OFI_REFUSED_STEP - 3;
    }
    if (self->rank == 2)
        SUITE_TRY(be_early(self));
    else
        SUITE_TRY(poll_until(self, 2));
    SUITE_CHECK(self, self->rank != 1 || !((struct ofi_net *)self->net)->peers[0].hello_received);
    if (self->rank == 0)
        SUITE_TRY(join_peer(self, 1));
    if (self->rank < 2)
        SUITE_TRY(put_both_ways(self, 20));
    return suite_finish(self);
}

/* ---- Somebody who writes faster than a rank reads ---- */

static uint32_t endless_reads;

/* A completion queue that never runs out of what a stranger has written, or not for long. */
static ssize_t read_endless(struct fid_cq *cq, void *buffer, size_t count)
{
    struct fi_cq_data_entry *entries = buffer;

    (void)cq;
    if (++endless_reads > OFI_MAX_REFUSED / OFI_BATCH)
        return -FI_EAGAIN;
    for (size_t i = 0; i < count; i++)
        entries[i] = (struct fi_cq_data_entry){.flags = FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA, .data = 1};
    return (ssize_t)count;
}

static int poll_endless(struct suite_rank *self, struct net_event *event)
{
    struct ofi_net *n = (struct ofi_net *)self->net;
    struct fi_ops_cq *const ops = n->cq->ops;
    struct fi_ops_cq fake = *ops;
    int got;

    fake.read = read_endless;
    n->cq->ops = &fake;
    endless_reads = 0;
    got = net_ofi_ops.poll(self->net, event, 1);
    n->cq->ops = ops;
    return got;
}

/* Poll comes back, tells how many there were, and looks for the strangers when the hello of rank 0, which may be behind
 * them in the queue, has had time. */
static int a_flood_does_not_hold_poll(struct suite_rank *self)
{
    struct net_event event = {0};
    struct ofi_net *n;

    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    if (self->rank == 0)
        return 0;
    SUITE_TRY(join_peer(self, 0));
    n = (struct ofi_net *)self->net;
    SUITE_CHECK(self, poll_endless(self, &event) == 1 && event.kind == NET_REFUSED);
    SUITE_CHECK(self, event.count == n->refused && n->refused < OFI_REFUSED_STEP / 16);
    n->refused = OFI_REFUSED_STEP - 1;
    SUITE_CHECK(self, poll_endless(self, &event) == 1 && n->shut_due);
    SUITE_CHECK(self, n->refused < OFI_REFUSED_STEP + OFI_REFUSED_STEP / 16);
    n->refused = OFI_REFUSED_STEP + OFI_REFUSED_STEP / 4;
    SUITE_CHECK(self, poll_endless(self, &event) == 1 && !n->shut_due);
    n->shut_due = 1;
    n->refused = OFI_REFUSED_STEP + 2;
    (void)net_ofi_ops.poll(self->net, &event, 1); /* the queue is empty */
    SUITE_CHECK(self, !n->shut_due);
    return 0;
}

/* A stranger says that it is rank 0, which libfabric then keeps out. Rank 1 shuts it out. */
static int who_says_it_is_rank_0_does_not_keep_it_out(struct suite_rank *self)
{
    struct early e = {0};
    struct sockaddr_in at;

    self->strangers = 1;
    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    memcpy(&at, self->shared->addresses[0].data + sizeof(struct ofi_wire_address), sizeof(at));
    if (self->rank == 1)
        SUITE_TRY(join_peer(self, 0));
    if (self->rank == 2) {
        claimed = at.sin_port;
        SUITE_TRY(come_early(self, &e));
        write_until_shut(&e, 300, 0);
        SUITE_CHECK(self, e.posted > 0);
        atomic_store(&self->shared->word, 1);
        SUITE_TRY(poll_until(self, 3));
        net_ofi_ops.close(&e.n->net);
        return suite_finish(self);
    }
    SUITE_TRY(poll_until(self, 1));
    if (self->rank == 0)
        SUITE_TRY(join_peer(self, 1));
    SUITE_TRY(put_both_ways(self, 20));
    atomic_fetch_add(&self->shared->word, 1);
    return suite_finish(self);
}

/* Rank 0 of a busy machine connects, and gets no processor before it can say hello. It is no stranger. */
static int who_says_hello_late_is_let_in(struct suite_rank *self)
{
    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    SUITE_TRY(join_peer(self, 1 - self->rank));
    if (self->rank == 0) {
        SUITE_TRY(suite_step(self));
        usleep(1300000);
    }
    SUITE_TRY(put_both_ways(self, 20));
    return suite_finish(self);
}

/* Where it is not shut out, rank 1 gives up in time, and says why. */
static int too_many_guesses_end_an_endpoint(struct suite_rank *self)
{
    struct net_event events[8];
    struct early e = {0};
    int rc = 0;

    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    if (self->rank == 1) {
        ((struct ofi_net *)self->net)->refused = OFI_MAX_REFUSED;
        while (rc >= 0 && !atomic_load(&self->shared->stop))
            rc = self->suite->ops->poll(self->net, events, 8);
        SUITE_CHECK(self, rc == -EPROTO && self->net->why);
        SUITE_CHECK(self, strstr(self->net->why, " arrivals with a wrong token came from outside"));
        atomic_store(&self->shared->word, 1);
    }
    if (self->rank == 2)
        SUITE_TRY(come_early(self, &e));
    while (self->rank == 2 && !atomic_load(&self->shared->word) && !atomic_load(&self->shared->stop))
        write_until_shut(&e, 100, 0);
    if (self->rank == 2)
        net_ofi_ops.close(&e.n->net);
    return 0;
}

static int count_descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;

    while (folder && readdir(folder))
        count++;
    if (folder)
        closedir(folder);
    return count;
}

/* Rank 2 opens 1500 connections to each of the others, and keeps them. */
static int flood(struct suite_rank *self)
{
    struct rlimit limit = {.rlim_cur = 4096, .rlim_max = 4096};

    setrlimit(RLIMIT_NOFILE, &limit);
    for (int i = 0; i < 3000; i++) {
        struct sockaddr_storage at = {0};
        struct ofi_wire_address wire;
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);

        memcpy(&wire, self->shared->addresses[i % 2].data, sizeof(wire));
        memcpy(&at, self->shared->addresses[i % 2].data + sizeof(wire), wire.bytes);
        if (fd >= 0 && connect(fd, (struct sockaddr *)&at, (socklen_t)wire.bytes) && errno != EINPROGRESS)
            return suite_fail(self, "connect: %s", strerror(errno));
    }
    usleep(300000);
    atomic_store(&self->shared->word, 1);
    return 0;
}

static int connections_of_strangers_cost_nothing(struct suite_rank *self)
{
    const int peer = 1 - self->rank;
    int before = 0;
    uint32_t sent = 0;

    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    if (self->rank < 2) {
        SUITE_TRY(join_peer(self, peer));
        SUITE_TRY(suite_put(self, peer, 0, 65536, 16384, 0));
        SUITE_TRY(suite_wait_arrived(self, peer, ++sent));
        before = count_descriptors();
    }
    SUITE_TRY(suite_barrier(self));
    if (self->rank == 2)
        SUITE_TRY(flood(self));
    for (; self->rank < 2 && sent < 400; sent++) {
        SUITE_TRY(suite_put(self, peer, 0, 65536, 16384, 0));
        SUITE_TRY(suite_wait_arrived(self, peer, sent + 1));
    }
    while (self->rank < 2 && !atomic_load(&self->shared->word))
        SUITE_TRY(suite_step(self));
    if (self->rank < 2 && count_descriptors() > before)
        return suite_fail(self, "%d descriptors after 1500 connections, %d before", count_descriptors(), before);
    SUITE_CHECK(self, self->rank == 2 || !self->lost[peer]);
    SUITE_TRY(suite_wait_completed(self));
    return suite_barrier(self);
}

/* Without the refusal, a put to an endpoint of the same process that has been closed ends the process (process.c). */
static int ranks_as_threads_are_refused(struct suite_rank *self)
{
    const struct net_options options = {
        .rank = 1, .nranks = 2, .timeout_ms = self->timeout_ms, .provider = self->suite->provider};
    const struct net_ops *ops = self->suite->ops;
    struct net_address address;
    struct net *other = NULL;

    SUITE_TRY(suite_open_alone(self));
    SUITE_TRY(suite_publish(self));
    if (self->rank)
        return suite_barrier(self);
    SUITE_CHECK(self, !ops->open(&options, &other) && !ops->address(other, &address));
    SUITE_CHECK(self, ops->connect(self->net, 1, &address, &self->shared->regions[1]) == EPX_ERR_UNSUPPORTED);
    SUITE_CHECK(self, strstr(epx_last_error(), "rank 1 and this rank are threads of one process"));
    ops->close(other);
    SUITE_TRY(suite_connect(self)); /* to the other process */
    return suite_barrier(self);
}

/* Word 1: rank 1 - r was lost, and the source of the puts to it has other bytes. */
enum { STOPPED_PUT = 1 << 20, STOPPED_PUTS = 6 };

/* As an idle proxy on a busy machine, which sleeps between polls, and for long: time passes for it, too. */
static int sleep_until_lost(struct suite_rank *self, int peer)
{
    int polls = 0;

    for (; !self->lost[peer]; polls++) {
        SUITE_TRY(suite_step(self));
        (void)self->net->ops->arm(self->net);
        usleep((useconds_t)self->timeout_ms * 1000 / 125);
    }
    SUITE_CHECK(self, polls < 400); /* the clock is looked at once in 64: with an eighth of the deadline each, 576 */
    return 0;
}

static int send_to_the_stopped(struct suite_rank *self, int peer)
{
    for (int i = 0; i < STOPPED_PUTS; i++)
        SUITE_CHECK(self, !suite_try_put(self, peer, 0, (uint64_t)i * STOPPED_PUT, STOPPED_PUT, 0));
    SUITE_TRY(sleep_until_lost(self, peer));
    SUITE_CHECK(self, self->completed[peer] < self->posted[peer]);
    memset(self->heap, 0xee, STOPPED_PUT);
    atomic_store(&self->shared->word, 1);
    return poll_for(self, 1000);
}

/* A rank stops, and the puts to it are given up. What it gets when it goes on was there before. */
static int a_rank_that_was_lost_gets_no_memory_that_is_used_again(struct suite_rank *self, int sender)
{
    SUITE_TRY(suite_open(self));
    SUITE_TRY(put_both_ways(self, 1)); /* both have connected */
    SUITE_TRY(poll_for(self, 300));    /* and named their connections */
    memset(self->heap, 0x11, SUITE_HEAP);
    SUITE_TRY(suite_barrier(self));
    if (self->rank == sender)
        return send_to_the_stopped(self, 1 - sender);
    while (!atomic_load(&self->shared->word) && !atomic_load(&self->shared->stop))
        usleep(1000);
    SUITE_TRY(poll_for(self, 500));
    for (size_t i = 0; i < (size_t)STOPPED_PUTS * STOPPED_PUT; i++)
        SUITE_CHECK(self, self->heap[i] != 0xee);
    return 0;
}

static int what_was_given_up_is_not_sent(struct suite_rank *self)
{
    return a_rank_that_was_lost_gets_no_memory_that_is_used_again(self, 0);
}

static int what_was_given_up_is_not_sent_to_a_lower_rank(struct suite_rank *self)
{
    return a_rank_that_was_lost_gets_no_memory_that_is_used_again(self, 1);
}

/* Rank 0 is stopped for longer than its deadline while puts are on their way: nobody is lost to it for that. */
static int who_was_stopped_itself_loses_nobody(struct suite_rank *self)
{
    SUITE_TRY(suite_open(self));
    SUITE_TRY(put_both_ways(self, 1));
    SUITE_TRY(suite_barrier(self));
    if (self->rank == 0) {
        for (int i = 0; i < STOPPED_PUTS; i++)
            SUITE_CHECK(self, !suite_try_put(self, 1, 0, (uint64_t)i * STOPPED_PUT, STOPPED_PUT, 0));
        SUITE_TRY(poll_for(self, 100));
        SUITE_CHECK(self, self->completed[1] < self->posted[1]);
        usleep(1000000);
        SUITE_TRY(poll_for(self, 100));
        SUITE_CHECK(self, !self->lost[1]);
        atomic_store(&self->shared->word, 1);
    }
    while (!atomic_load(&self->shared->word) && !atomic_load(&self->shared->stop))
        usleep(1000);
    if (self->rank == 1)
        SUITE_TRY(suite_wait_arrived(self, 0, 1 + STOPPED_PUTS));
    SUITE_TRY(suite_wait_completed(self));
    return suite_finish(self);
}

/* A completion queue that says that one put has failed, as a provider does whose own timers have expired. */
static struct fi_cq_err_entry failed_put;

static ssize_t read_failed(struct fid_cq *cq, void *buffer, size_t count)
{
    (void)cq, (void)buffer, (void)count;
    return failed_put.op_context ? -FI_EAVAIL : -FI_EAGAIN;
}

static ssize_t read_failure(struct fid_cq *cq, struct fi_cq_err_entry *entry, uint64_t flags)
{
    (void)cq, (void)flags;
    *entry = failed_put;
    failed_put.op_context = NULL;
    return 1;
}

/* Rank 0 finds that the provider has timed out. That is not this rank's deadline, which would be ETIMEDOUT. */
static int find_failed(struct suite_rank *self)
{
    struct ofi_net *n = (struct ofi_net *)self->net;
    struct fi_ops_cq *const ops = n->cq->ops;
    struct fi_ops_cq fake = *ops;
    struct net_event event = {0};
    int got;

    fake.read = read_failed;
    fake.readerr = read_failure;
    SUITE_CHECK(self, !suite_try_put(self, 1, 0, 0, STOPPED_PUT, 0));
    SUITE_CHECK(self, n->peers[1].first);
    failed_put = (struct fi_cq_err_entry){.op_context = n->peers[1].first, .err = FI_ETIMEDOUT};
    n->cq->ops = &fake;
    got = net_ofi_ops.poll(self->net, &event, 1);
    n->cq->ops = ops;
    SUITE_CHECK(self, got == 1 && event.kind == NET_FAILED && event.peer == 1);
    SUITE_CHECK(self, event.error == ECONNRESET);
    return 0;
}

static int a_provider_that_times_out_is_not_the_deadline(struct suite_rank *self)
{
    SUITE_TRY(suite_open(self));
    SUITE_TRY(put_both_ways(self, 1));
    SUITE_TRY(suite_wait_completed(self));
    SUITE_TRY(suite_barrier(self));
    if (self->rank == 0)
        SUITE_TRY(find_failed(self));
    return suite_barrier(self);
}

/* ---- Keys of memory */

static int no_random;

/* In the place of libc's. */
ssize_t getrandom(void *out, size_t bytes, unsigned flags)
{
    if (no_random) {
        errno = ENOSYS;
        return -1;
    }
    return syscall(SYS_getrandom, out, bytes, flags);
}

static int open_for_keys(struct suite_rank *self, struct net **net)
{
    const struct net_options options = {.nranks = 1, .timeout_ms = 5000, .provider = "tcp"};

    SUITE_CHECK(self, !net_ofi_ops.open(&options, net));
    SUITE_CHECK(self, !(((struct ofi_net *)*net)->info->domain_attr->mr_mode & FI_MR_PROV_KEY));
    return 0;
}

static char some_memory[4096];
static const struct net_memory memory_for_keys = {
    .base = some_memory, .bytes = sizeof(some_memory), .kind = EPX_DEVICE_CPU, .dmabuf = -1};

/* A key that anybody can guess is none. */
static int without_random_numbers_no_memory_is_registered(struct suite_rank *self)
{
    struct net_region region;
    struct net *net;
    epx_status status;

    SUITE_TRY(open_for_keys(self, &net));
    no_random = 1;
    status = net_ofi_ops.add_region(net, &memory_for_keys, &region);
    no_random = 0;
    net_ofi_ops.close(net);
    SUITE_CHECK(self, status == EPX_ERR_SYSTEM && strstr(epx_last_error(), "getrandom"));
    return 0;
}

static struct fi_ops_mr *own_mr;
static int keys_in_use;

static int refuse_keys(struct fid *domain, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **mr)
{
    return keys_in_use-- > 0 ? -FI_ENOKEY : own_mr->regattr(domain, attr, flags, mr);
}

static int a_key_that_is_in_use_is_drawn_again(struct suite_rank *self)
{
    struct net_region region;
    struct fi_ops_mr fake;
    struct net *net;
    struct ofi_net *n;
    epx_status all_used, one_used;

    SUITE_TRY(open_for_keys(self, &net));
    n = (struct ofi_net *)net;
    own_mr = n->domain->mr;
    fake = *own_mr;
    fake.regattr = refuse_keys;
    n->domain->mr = &fake;
    keys_in_use = 1000;
    all_used = net_ofi_ops.add_region(net, &memory_for_keys, &region);
    keys_in_use = 1;
    one_used = net_ofi_ops.add_region(net, &memory_for_keys, &region);
    n->domain->mr = own_mr;
    net_ofi_ops.close(net);
    SUITE_CHECK(self, all_used == EPX_ERR_SYSTEM && one_used == EPX_OK);
    return 0;
}

static const struct suite_case shm_cases[] = {
    {.name = "ranks_as_threads_are_refused", .nranks = 2, .body = ranks_as_threads_are_refused}};

static const struct suite_case own_cases[] = {
    {.name = "master_on_loopback", .nranks = 1, .body = master_on_loopback},
    {.name = "interface_by_name", .nranks = 1, .body = interface_by_name},
    {.name = "interface_that_is_not_there", .nranks = 1, .body = interface_that_is_not_there},
    {.name = "provider_that_is_not_there", .nranks = 1, .body = provider_that_is_not_there},
    {.name = "address_that_reaches_the_master", .nranks = 1, .body = address_that_reaches_the_master},
    {.name = "peers_that_do_not_fit", .nranks = 2, .body = peers_that_do_not_fit},
    {.name = "strangers_do_no_harm", .nranks = 3, .body = strangers_do_no_harm},
    {.name = "forged_arrivals_are_ignored", .nranks = 3, .body = forged_arrivals_are_ignored},
    {.name = "those_who_came_early_are_shut_out", .nranks = 3, .body = those_who_came_early_are_shut_out},
    {.name = "a_silent_connection_is_no_arrival", .nranks = 3, .body = a_silent_connection_is_no_arrival},
    {.name = "a_flood_is_shut_out_before_all_have_come", .nranks = 3, .body = a_flood_is_shut_out_before_all_have_come},
    {.name = "a_flood_does_not_hold_poll", .nranks = 2, .body = a_flood_does_not_hold_poll},
    {.name = "who_says_it_is_rank_0_does_not_keep_it_out",
     .nranks = 3,
     .body = who_says_it_is_rank_0_does_not_keep_it_out,
     .timeout_ms = 8000},
    {.name = "who_says_hello_late_is_let_in", .nranks = 2, .body = who_says_hello_late_is_let_in},
    {.name = "too_many_guesses_end_an_endpoint", .nranks = 3, .body = too_many_guesses_end_an_endpoint},
    {.name = "connections_of_strangers_cost_nothing", .nranks = 3, .body = connections_of_strangers_cost_nothing},
    {.name = "who_was_stopped_itself_loses_nobody",
     .nranks = 2,
     .body = who_was_stopped_itself_loses_nobody,
     .timeout_ms = 1000},
    {.name = "what_was_given_up_is_not_sent", .nranks = 2, .body = what_was_given_up_is_not_sent, .timeout_ms = 1000},
    {.name = "what_was_given_up_is_not_sent_to_a_lower_rank",
     .nranks = 2,
     .body = what_was_given_up_is_not_sent_to_a_lower_rank,
     .timeout_ms = 1000},
    {.name = "without_random_numbers_no_memory_is_registered",
     .nranks = 1,
     .body = without_random_numbers_no_memory_is_registered},
    {.name = "a_key_that_is_in_use_is_drawn_again", .nranks = 1, .body = a_key_that_is_in_use_is_drawn_again},
    {.name = "a_provider_that_times_out_is_not_the_deadline",
     .nranks = 2,
     .body = a_provider_that_times_out_is_not_the_deadline},
};
enum { OWN_CASES = (int)(sizeof(own_cases) / sizeof(own_cases[0])) };

#define TCP_CASES own_cases, OWN_CASES
#define SHM_CASES shm_cases, 1

#else

#define TCP_CASES NULL, 0
#define SHM_CASES NULL, 0

#endif

int main(void)
{
    static struct CMUnitTest tests[NET_SUITE_TESTS];
    int count = 0;

    /* Receive buffers of ofi_rxm per connection: with as many as it has by itself, sanitizers spend most of the time on
     * making them. */
    setenv("FI_OFI_RXM_MSG_RX_SIZE", "16", 0);
    count = net_suite_add(&tcp, suite_cases, suite_case_count, tests, count);
    count = net_suite_add(&tcp, TCP_CASES, tests, count);
    count = net_suite_add(&rxm, suite_cases, suite_case_count, tests, count);
    count = net_suite_add(&shm, suite_cases, suite_case_count, tests, count);
    count = net_suite_add(&shm, SHM_CASES, tests, count);
    return unit_run("net_ofi", tests, (size_t)count);
}

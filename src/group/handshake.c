/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Creation of a group. Each step is an all-gather that also carries every rank's result so far, so that a rank that
 * cannot continue says so and no other waits for it. Memory for all steps is taken before the first: a rank that finds
 * none there tells the others over the connection to rank 0 (boot_abandon), which a caller's all-gather does not have.
 *
 *   1. compare      builds (util/build.h), then settings of all ranks: equal, or EPX_ERR_MISMATCH on all; which ranks
 *                   share memory: the nodes; random numbers of all ranks, which make the group's key together with the
 *                   secret of the job
 *   2. place        with several nodes and a GPU: heaps in GPU memory or in host memory (heap.c)
 *   3. exchange     each rank has opened its heap, its region directory (region.h), with several nodes its proxies
 *                   (net.c), with enable_mask its port; then it maps the heaps of its node and connects its proxies
 *   4. connected    all have done so: from here on signals may be sent. With enable_mask this round goes over the
 *                   connections that ranks make after one has failed, so that they are known to work
 */
#include "group/handshake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/random.h>

#include "boot/auth.h"
#include "boot/boot.h"
#include "group/config.h"
#include "group/create.h"
#include "group/fabric.h"
#include "group/giveback.h"
#include "group/heap.h"
#include "group/memory.h"
#include "group/net.h"
#include "group/region.h"
#include "kernel/inject_bug.h"
#include "util/build.h"
#include "util/crypto.h"
#include "util/env.h"
#include "util/runtime.h"
#include "util/status.h"
#include "util/text.h"
#include "util/trace.h"

/* Travels in every round, from each rank to each: no longer than what other ranks show of it. */
enum { SHOWN_BYTES = 200 };
struct step_result {
    int32_t status;
    char message[SHOWN_BYTES + 4];
};
EPX_STATIC_ASSERT(sizeof(struct step_result) == 208, "sent by every rank");

struct settings_message {
    struct step_result result;
    int64_t fields[SETTINGS_FIELDS];
    struct fabric_offer place; /* where ranks can map each other's memory */
    uint8_t nonce[CRYPTO_KEY]; /* random */
    int64_t proves;            /* enum proves */
    int32_t traces;            /* EPX_TRACE is set */
    int32_t heap;              /* EPX_GPU_HEAP: heap_asked() */
    uint8_t secret[8];         /* equal where ranks have the same secret, and of no use to learn it */
};

enum proves { PROVES_NOTHING /* EPX_SECRET=none */, PROVES_SECRET, PROVES_WITHOUT_LIBRARY };

struct flag_message {
    struct step_result result;
    int64_t flag;
};

struct heap_message {
    struct step_result result;
    struct heap_export export;
    struct heap_export directory; /* of regions; 0 bytes: none */
    struct ledger_address ledger;
};

static void result_set(struct step_result *result, epx_status mine)
{
    memset(result, 0, sizeof(*result));
    result->status = mine;
    if (mine != EPX_OK)
        strncpy(result->message, epx_last_error(), sizeof(result->message) - 1);
}

/* The last error has the whole sentence, of which the others see the beginning. */
static epx_status own_failure(const struct step_result *own)
{
    char text[512];

    snprintf(text, sizeof(text), "%s", epx_last_error());
    if (strncmp(text, own->message, strnlen(own->message, sizeof(own->message))))
        text_clean(text, sizeof(own->message), own->message, sizeof(own->message));
    return fail((epx_status)own->status, "%s", text);
}

/* All ranks fail if one does. A rank reports its own failure, otherwise that of the lowest rank that failed. */
static epx_status results_check(const struct epx_group *group, const void *cards, size_t stride)
{
    const struct step_result *own = (const struct step_result *)((const char *)cards + (size_t)group->rank * stride);
    char text[sizeof(own->message)];

    if (own->status != EPX_OK)
        return own_failure(own);
    for (int r = 0; r < group->nranks; r++) {
        const struct step_result *result = (const struct step_result *)((const char *)cards + (size_t)r * stride);
        if (result->status != EPX_OK)
            return fail(EPX_ERR_PEER, "%s: rank %d failed: %s", group->call, r,
                        text_clean(text, SHOWN_BYTES + 1, result->message, sizeof(result->message)));
    }
    return EPX_OK;
}

/* How long a step of the creation may wait for other ranks. */
static int creation_ms(const struct epx_group *group)
{
    return (int)env_int("EPX_BOOT_TIMEOUT_MS", group->set.timeout_ms, 1, INT32_MAX);
}

int handshake_step_ms(const struct epx_group *group)
{
    return creation_ms(group) / 4 * 3;
}

epx_status handshake_allgather(struct epx_group *group, const void *send, void *recv, size_t bytes)
{
    if (group->use_membership)
        return membership_allgather(group->membership, send, recv, bytes);
    return boot_allgather(group->boot, send, recv, bytes);
}

/* Nodes: ranks of one identity, cut to ranks_per_node where that is set. Node numbers go by the lowest rank. A rank is
 * compared with the first of each node, the latest first: most ranks follow one of their own node. */
void handshake_find_nodes(struct epx_group *group)
{
    const int per = group->set.ranks_per_node;
    int *node_of = group->map.node_of, *first = group->map.members, nodes = 0;

    for (int r = 0; r < group->nranks; r++) {
        int n = nodes - 1;

        while (n >= 0 && ((per && r / per != first[n] / per) ||
                          memcmp(group->identities[r], group->identities[first[n]], sizeof(group->identities[r]))))
            n--;
        if (n < 0) {
            n = nodes++;
            first[n] = r;
        }
        node_of[r] = n;
    }
    group_take_nodes(group);
}

/* Only groups that make connections of their own need a key. */
static int needs_key(const struct epx_group *group)
{
    return group->nranks > 1 && !runtime()->conns && (group->nnodes > 1 || group->fabric || group->set.enable_mask);
}

/* All ranks come to the same result. */
static epx_status check_proves(const struct epx_group *group, const struct settings_message *all)
{
    for (int r = 1; r < group->nranks; r++)
        if (!all[r].proves != !all[0].proves)
            return fail(EPX_ERR_MISMATCH,
                        "epx_group_create: rank %d has EPX_SECRET=none and rank %d has not: expected the same on all",
                        all[r].proves ? 0 : r, all[r].proves ? r : 0);
    for (int r = 1; r < group->nranks; r++)
        if (all[r].proves == PROVES_SECRET && all[0].proves == PROVES_SECRET &&
            memcmp(all[r].secret, all[0].secret, sizeof(all[r].secret)) != 0)
            return fail(
                EPX_ERR_MISMATCH,
                "epx_group_create: rank %d has another secret than rank 0: expected the same EPX_SECRET, or the "
                "same file in EPX_SECRET_FILE, on all ranks",
                r);
    for (int r = 0; needs_key(group) && r < group->nranks; r++)
        if (all[r].proves == PROVES_WITHOUT_LIBRARY)
            return fail(EPX_ERR_UNSUPPORTED,
                        "epx_group_create: rank %d cannot prove who it is: it has neither libsodium nor libcrypto of "
                        "OpenSSL (Debian: libsodium23 or libssl3); EPX_SECRET=none on all ranks does without "
                        "(docs/security.md)",
                        r);
    return EPX_OK;
}

/* The random numbers have come over the caller's all-gather, or sealed over the rendezvous. Their messages are gone
 * afterwards. */
static epx_status make_key(struct epx_group *group, struct settings_message *all)
{
    static const uint8_t label[CRYPTO_KEY] = "EPX: random numbers of a group";
    const size_t n = (size_t)group->nranks;
    uint8_t *nonces = (uint8_t *)all;
    epx_status status = check_proves(group, all);

    if (status != EPX_OK || !all[0].proves || !needs_key(group))
        return status;
    for (size_t r = 0; r < n; r++)
        memmove(nonces + r * CRYPTO_KEY, all[r].nonce, CRYPTO_KEY);
    group->own_secret = boot_own_secret(group->boot);
    if (crypto()->hmac(label, nonces, n * CRYPTO_KEY, group->seed))
        status = fail(EPX_ERR_SYSTEM, "epx_group_create: the key of %zu ranks cannot be computed", n);
    if (status == EPX_OK)
        status = handshake_make_key(group, boot_key(group->boot));
    return status == EPX_OK ? EPX_OK : boot_abandon(group->boot, status); /* this rank alone */
}

epx_status handshake_make_key(struct epx_group *group, const uint8_t *secret)
{
    group->has_key = !crypto()->hmac(secret, group->seed, sizeof(group->seed), group->key);
    return group->has_key ? EPX_OK : fail(EPX_ERR_SYSTEM, "the key of the group cannot be computed");
}

const uint8_t *handshake_key(const struct epx_group *group)
{
    return group->has_key ? group->key : NULL;
}

/* This rank's part of the key, and what the others must know of its secret. */
static epx_status describe_secret(const struct epx_group *group, struct settings_message *own)
{
    const uint8_t *key = boot_key(group->boot);
    uint8_t check[CRYPTO_KEY];

    if (runtime()->conns || !key)
        return EPX_OK;
    own->proves = PROVES_WITHOUT_LIBRARY;
    if (!crypto())
        return EPX_OK;
    own->proves = PROVES_SECRET;
    if (auth_derive(key, "the same secret", NULL, 0, check))
        return fail(EPX_ERR_SYSTEM, "epx_group_create: %s cannot compute an HMAC", crypto()->name);
    memcpy(own->secret, check, sizeof(own->secret));
    return crypto_random(own->nonce, sizeof(own->nonce));
}

/* Ranks that ask for different places would lay out their heaps differently. */
static epx_status check_heaps(const struct settings_message *all, int nranks)
{
    for (int r = 1; r < nranks; r++)
        if (all[r].heap != all[0].heap)
            return fail(EPX_ERR_MISMATCH,
                        "epx_group_create: rank %d has EPX_GPU_HEAP=%s where rank 0 has %s: expected the same on all",
                        r, heap_asked_word(all[r].heap), heap_asked_word(all[0].heap));
    return EPX_OK;
}

/* Of one layout in all builds, and before any other message: theirs may have other lengths. The rendezvous of EPX has
 * compared builds already. */
struct build_message {
    uint64_t build, reserved;
};
static_assert(sizeof(struct build_message) == 16, "sent by every rank of every build");

static epx_status compare_builds(struct epx_group *group)
{
    const struct build_message own = {.build = build_number()};
    struct build_message *all = handshake_room(group);
    char who[48];
    epx_status status = EPX_OK;

    if (boot_own_secret(group->boot) || runtime()->env)
        return EPX_OK;
    status = handshake_allgather(group, &own, all, sizeof(own));
    for (int r = 1; status == EPX_OK && r < group->nranks; r++) {
        snprintf(who, sizeof(who), "epx_group_create: rank %d", r);
        if (all[r].build != all[0].build)
            status = build_fail(who, all[r].build, "rank 0", all[0].build);
    }
    return status;
}

epx_status handshake_compare(struct epx_group *group, epx_status mine)
{
    struct settings_message own, *all = handshake_room(group);
    epx_status status = compare_builds(group);

    if (status != EPX_OK)
        return status;
    memset(&own, 0, sizeof(own));
    if (mine == EPX_OK)
        mine = fabric_describe(group, &own.place);
    if (mine == EPX_OK)
        mine = describe_secret(group, &own);
    result_set(&own.result, mine);
    settings_pack(&group->set, own.fields);
    own.traces = trace_on();
    own.heap = heap_asked();
    status = handshake_allgather(group, &own, all, sizeof(own));
    if (status == EPX_OK)
        status = results_check(group, all, sizeof(*all));
    if (status == EPX_OK)
        status = settings_compare(all[0].fields, group->nranks, sizeof(*all));
    if (status == EPX_OK)
        status = check_heaps(all, group->nranks);
    memcpy(group->fields, own.fields, sizeof(own.fields));
    if (status == EPX_OK)
        fabric_choose(group, &all[0].place, sizeof(*all));
    if (status == EPX_OK)
        handshake_find_nodes(group);
    group->all_trace = status == EPX_OK;
    for (int r = 0; status == EPX_OK && r < group->nranks; r++)
        group->all_trace &= all[r].traces != 0;
    return status == EPX_OK ? make_key(group, all) : status;
}

/* The heap of a rank of the node, in the place of what was mapped for that rank before. */
static epx_status map_heap(struct epx_group *group, int r, uint64_t process, const struct heap_export *export)
{
    const struct device_ops *ops = group->device->ops;
    const struct control *c;
    char text[400];
    void *base;
    epx_status status = ops->heap_open(group->device, export, &base);

    if (status != EPX_OK) {
        snprintf(text, sizeof(text), "%.399s", epx_last_error());
        return fail(status, "%s: the memory of rank %d: %s", group->call, r, text);
    }
    c = base;
    if (ops->caps & DEVICE_HOST_HEAP &&
        (c->magic != CONTROL_MAGIC || c->rank != (uint32_t)r || c->process != process)) {
        ops->heap_close(group->device, export, base);
        return fail(EPX_ERR_MISMATCH, "%s: the heap of rank %d does not begin as expected", group->call, r);
    }
    if (group->bases[r] && group->bases[r] != group->stand_in.base)
        ops->heap_close(group->device, &group->exports[r], group->bases[r]);
    group->exports[r] = *export;
    group->bases[r] = base;
    return EPX_OK;
}

/* Numbers of processes mean the same there. */
static int is_of_this_host(const struct epx_group *group, int r)
{
    return memcmp(group->hosts[r], group->hosts[group->rank], sizeof(group->hosts[r])) == 0;
}

/* Before anything is mapped: a rank that fails from here on is known to the others too. */
static void meet_ledgers(struct epx_group *group, const struct heap_message *all)
{
    for (int r = 0; group->ledger && r < group->nranks; r++)
        if (r != group->rank && !group->remote[r])
            ledger_set_peer(group->ledger, r, all[r].export.pid, &all[r].ledger);
    if (group->ledger)
        ledger_doubt(group->ledger, 0);
}

/* Before the first launch: ranks of this process. */
static void find_threads(struct epx_group *group, const struct heap_message *all)
{
    for (int r = 0; r < group->nranks; r++)
        if (r != group->rank && all[r].export.pid == (int64_t)getpid() && is_of_this_host(group, r))
            __atomic_store_n(&group->device->keeps, 1, __ATOMIC_RELAXED);
}

/* The step that follows needs all of them: a number that is another process's by then belongs to a rank that has ended,
 * and that step fails. */
static void find_process(struct epx_group *group, int r, const struct heap_message *all)
{
    if (group->membership && r != group->rank && is_of_this_host(group, r))
        membership_set_process(group->membership, r, all[r].export.pid);
}

static epx_status map_heaps(struct epx_group *group, const struct heap_message *all)
{
    meet_ledgers(group, all);
    find_threads(group, all);
    for (int r = 0; r < group->nranks; r++) {
        epx_status status = group->remote[r] ? EPX_OK : map_heap(group, r, 0, &all[r].export);

        find_process(group, r, all);
        if (status != EPX_OK)
            return status;
        if (!group->remote[r])
            regions_add_peer(group, r, &all[r].directory);
    }
    regions_update_members(group);
    return EPX_OK;
}

static epx_status map_heaps_again(struct epx_group *group, const struct heap_message *all)
{
    find_threads(group, all);
    for (int r = 0; r < group->nranks; r++) {
        const uint64_t incarnation = membership_incarnation(group->membership, r);
        epx_status status = EPX_OK;

        if (r == group->rank || !all[r].export.bytes || group->mapped[r] == incarnation)
            continue; /* a rank that does not take part has sent nothing */
        find_process(group, r, all);
        if (group->ledger && !group->remote[r])
            ledger_set_peer(group->ledger, r, all[r].export.pid, &all[r].ledger);
        if (!group->remote[r] && !INJECT_BUG(BUG_OLD_HEAP, group->bases[r] != group->stand_in.base, 0))
            status = map_heap(group, r, incarnation, &all[r].export);
        if (status != EPX_OK)
            return status;
        if (!group->remote[r])
            regions_replace_peer(group, r, &all[r].directory);
        group->mapped[r] = incarnation;
    }
    if (group->ledger)
        ledger_doubt(group->ledger, 0);
    return group_device_heaps(group);
}

static void describe_heap(struct epx_group *group, struct heap_message *own, epx_status mine)
{
    memset(own, 0, sizeof(*own));
    result_set(&own->result, mine);
    own->export = group->heap.export;
    own->directory = regions_directory(group);
    own->ledger = ledger_address(group->ledger);
    if (group->ledger)
        ledger_doubt(group->ledger, 1); /* until the others are known */
}

epx_status handshake_heaps_again(struct epx_group *group)
{
    struct heap_message own, *all = handshake_room(group);
    epx_status status;

    describe_heap(group, &own, EPX_OK);
    status = handshake_allgather(group, &own, all, sizeof(own));
    if (status == EPX_OK)
        status = results_check(group, all, sizeof(*all));
    if (status == EPX_OK)
        status = map_heaps_again(group, all);
    return status;
}

/* ---- The exchange ------------------------------------------------------------------------------------------------ */

/* Then what the network tells. */
struct exchange_message {
    struct heap_message heap;
    struct conn_address address;
    uint64_t token; /* rank 0's is taken */
};

static size_t exchange_stride(size_t net_bytes)
{
    return (sizeof(struct exchange_message) + net_bytes + 7) / 8 * 8;
}

epx_status exchange_alloc(struct epx_group *group, struct exchange *x)
{
    const size_t n = (size_t)group->nranks, net = group_net_message_most(group);

    x->own = calloc(1, exchange_stride(net));
    x->net = calloc(1, net);
    x->all_net = calloc(n, net);
    x->heaps = calloc(n, sizeof(*x->heaps));
    x->addresses = calloc(n, sizeof(*x->addresses));
    x->out = calloc(n, 1);
    if (!x->own || !x->net || !x->all_net || !x->heaps || !x->addresses || !x->out)
        return fail(EPX_ERR_MEMORY, "epx_group_create: no memory for %zu ranks", n);
    return EPX_OK;
}

void exchange_free(struct exchange *x)
{
    free(x->own);
    free(x->net);
    free(x->all_net);
    free(x->heaps);
    free(x->addresses);
    free(x->out);
}

epx_status handshake_begin(struct epx_group *group)
{
    const size_t n = (size_t)group->nranks, exchange = exchange_stride(group_net_message_most(group));

    static_assert(sizeof(struct settings_message) >= HANDSHAKE_ROOM, "of one rank");
    group->room = calloc(n, exchange > sizeof(struct settings_message) ? exchange : sizeof(struct settings_message));
    return group->room ? EPX_OK : fail(EPX_ERR_MEMORY, "no memory to receive from %zu ranks", n);
}

void *handshake_room(struct epx_group *group)
{
    return group->room;
}

void handshake_keep(struct epx_group *group)
{
    void *smaller = group->room ? realloc(group->room, (size_t)group->nranks * HANDSHAKE_ROOM) : NULL;

    static_assert(sizeof(struct flag_message) <= HANDSHAKE_ROOM && sizeof(struct heap_message) <= HANDSHAKE_ROOM,
                  "what recoveries send");
    if (smaller)
        group->room = smaller;
}

void handshake_end(struct epx_group *group)
{
    free(group->room);
    group->room = NULL;
}

epx_status handshake_open_membership(struct epx_group *group, struct exchange *x)
{
    epx_status status;

    if (!group->set.enable_mask || group->nranks == 1)
        return EPX_OK;
    status = membership_open(group->rank, group->nranks, group->nnodes == 1 && !group->fabric, handshake_key(group),
                             &x->address, &group->membership);
    if (status == EPX_OK && getrandom(&x->token, sizeof(x->token), 0) != (ssize_t)sizeof(x->token))
        status = fail_errno(EPX_ERR_SYSTEM, "epx_group_create: getrandom");
    return status;
}

/* FNV-1a over the heaps of all ranks, of which no two groups have the same: for epx top. */
static uint64_t number_of(const struct heap_message *heaps, int n)
{
    uint64_t hash = 0xcbf29ce484222325u;

    for (int r = 0; r < n; r++)
        for (size_t i = 0; i < sizeof(heaps[r].export); i++)
            hash = (hash ^ ((const uint8_t *)&heaps[r].export)[i]) * 0x100000001b3u;
    return hash;
}

static void take_exchange(struct epx_group *group, struct exchange *x, const char *all, size_t stride)
{
    for (int r = 0; r < group->nranks; r++) {
        const struct exchange_message *m = (const struct exchange_message *)(all + (size_t)r * stride);

        x->heaps[r] = m->heap;
        x->addresses[r] = m->address;
        memcpy(x->all_net + (size_t)r * x->net_bytes, m + 1, x->net_bytes);
    }
    if (group->membership)
        membership_set_peers(group->membership, x->addresses, ((const struct exchange_message *)all)->token);
    group->number = number_of(x->heaps, group->nranks);
}

epx_status handshake_exchange(struct epx_group *group, struct exchange *x, epx_status mine)
{
    struct exchange_message *own = x->own;
    char *all = handshake_room(group);
    size_t stride;
    epx_status status;

    x->net_bytes = group_net_message_bytes(group);
    stride = exchange_stride(x->net_bytes);
    describe_heap(group, &own->heap, mine);
    own->address = x->address;
    own->token = x->token;
    memcpy(own + 1, x->net, x->net_bytes);
    status = handshake_allgather(group, own, all, stride);
    if (status == EPX_OK)
        status = results_check(group, all, stride);
    if (status == EPX_OK)
        take_exchange(group, x, all, stride);
    return status;
}

epx_status handshake_map(struct epx_group *group, const struct exchange *x)
{
    return map_heaps(group, x->heaps);
}

epx_status handshake_any(struct epx_group *group, epx_status mine, int *flag)
{
    struct flag_message own, *all = handshake_room(group);
    epx_status status;

    memset(&own, 0, sizeof(own));
    result_set(&own.result, mine);
    own.flag = *flag;
    status = handshake_allgather(group, &own, all, sizeof(own));
    if (status == EPX_OK)
        status = results_check(group, all, sizeof(*all));
    for (int r = 0; r < group->nranks && status == EPX_OK; r++)
        *flag |= all[r].flag != 0;
    return status;
}

epx_status handshake_ready(struct epx_group *group, epx_status mine)
{
    int none = 0;

    return handshake_any(group, mine, &none);
}

/* A rank that cannot be reached is left out of the round, and all others fail. */
static epx_status check_reached(const struct epx_group *group, const uint8_t *out)
{
    for (int r = 0; r < group->nranks; r++)
        if (out[r])
            return fail(
                EPX_ERR_SYSTEM,
                "epx_group_create: rank %d cannot be reached over TCP, or it ended, or it gave up after %d ms because "
                "others were late (EPX_BOOT_TIMEOUT_MS): groups with enable_mask need connections between all ranks "
                "(EPX_SOCKET_IFNAME picks the interfaces)",
                r, creation_ms(group));
    return EPX_OK;
}

epx_status handshake_connected(struct epx_group *group, struct exchange *x, epx_status mine)
{
    char text[512];
    epx_status status;

    if (!group->membership)
        return handshake_ready(group, mine);
    snprintf(text, sizeof(text), "%s", mine == EPX_OK ? "" : epx_last_error());
    status = membership_agree(group->membership, MEMBERSHIP_CREATION, x->out, creation_ms(group));
    if (status == EPX_OK) {
        mine = mine == EPX_OK ? check_reached(group, x->out) : fail(mine, "%s", text);
        group->use_membership = 1;
        status = handshake_ready(group, mine);
        group->use_membership = 0;
    }
    membership_end(group->membership);
    return status;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The process that takes the place of a rank: join.h has the protocol. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "boot/launcher.h"
#include "boot/secret.h"
#include "boot/socket.h"
#include "boot/ticket.h"
#include "group/config.h"
#include "group/create.h"
#include "group/handshake.h"
#include "group/heap.h"
#include "group/join.h"
#include "group/memory.h"
#include "group/recover.h"
#include "group/region.h"
#include "group/registry.h"
#include "util/build.h"
#include "util/env.h"
#include "util/log.h"
#include "util/pause.h"
#include "util/runtime.h"
#include "util/status.h"

enum { AGAIN_NS = 20000000, NOT_MAPPED = -1 };

/* The group's key, as the members have it. */
static epx_status find_key(struct epx_group *group, const struct ticket *ticket)
{
    struct secret secret;
    epx_status status = EPX_OK;

    memcpy(group->seed, ticket->seed, sizeof(group->seed));
    group->own_secret = (ticket->flags & TICKET_OWN_SECRET) != 0;
    if (runtime()->conns)
        return EPX_OK;
    status = secret_read(group->own_secret, &secret);
    if (status != EPX_OK)
        return status;
    if (!secret.off != !!(ticket->flags & TICKET_PROVES))
        return fail(EPX_ERR_MISMATCH, "epx_group_join: EPX_SECRET=none is set on %s: expected the same on all",
                    secret.off ? "this process and not on the ranks of the group"
                               : "the ranks of the group and not on this process");
    return secret.off ? EPX_OK : handshake_make_key(group, secret.key);
}

/* Where no launcher says where the others are, this process takes the interface that faces one of them. */
static void choose_interface(const struct ticket *ticket)
{
    char host[LAUNCHER_HOST_BYTES];
    struct launcher launcher;
    struct endpoint at;
    char text[ENDPOINT_TEXT], *end;

    launcher_host(host);
    if (host[0] || runtime()->conns || conn_address_get(&ticket->door[0].address, &at))
        return;
    memset(&launcher, 0, sizeof(launcher));
    endpoint_text(&at, text);
    end = strrchr(text, ':');
    if (end)
        *end = 0;
    snprintf(launcher.host, sizeof(launcher.host), "%s", text[0] == '[' ? text + 1 : text);
    if (text[0] == '[' && strchr(launcher.host, ']'))
        *strchr(launcher.host, ']') = 0;
    launcher_keep_host(&launcher);
}

static epx_status open_port(struct epx_group *group, const struct ticket *ticket)
{
    struct conn_address own, *none = calloc((size_t)group->nranks, sizeof(*none));
    uint64_t incarnation = 0;
    epx_status status = none ? EPX_OK : fail(EPX_ERR_MEMORY, "epx_group_join: no memory for %d ranks", group->nranks);

    while (status == EPX_OK && !incarnation)
        status = crypto_random(&incarnation, sizeof(incarnation));
    if (status == EPX_OK)
        status = membership_open(group->rank, group->nranks, (ticket->flags & TICKET_ONE_HOST) != 0,
                                 handshake_key(group), &own, &group->membership);
    if (status == EPX_OK) {
        membership_set_peers(group->membership, none, ticket->token);
        membership_replace(group->membership, group->rank, incarnation, &own);
    }
    free(none);
    return status;
}

static epx_status make_request(struct epx_group *group, struct join_request *request)
{
    epx_status status;

    memset(request, 0, sizeof(*request));
    request->build = build_number();
    request->bytes = sizeof(*request);
    settings_pack(&group->set, group->fields);
    memcpy(request->fields, group->fields, sizeof(request->fields));
    status = fabric_describe(group, &request->place);
    memcpy(group->identities[group->rank], request->place.host, sizeof(request->place.host));
    memcpy(group->hosts[group->rank], request->place.host, sizeof(request->place.host));
    return status;
}

/* ---- Welcome ---------------------------------------------------------------------------------------------------- */

static const struct join_rank *ranks_of(const struct join_welcome *welcome)
{
    return (const struct join_rank *)(welcome + 1);
}

static epx_status check_welcome(const struct epx_group *group, const struct join_welcome *welcome, size_t bytes)
{
    const size_t n = (size_t)group->nranks;

    if (bytes != sizeof(*welcome) + n * sizeof(struct join_rank) || welcome->nranks != group->nranks)
        return fail(EPX_ERR_MISMATCH, "epx_group_join: invalid welcome of %zu bytes", bytes);
    for (size_t r = 0; r < n; r++)
        if (ranks_of(welcome)[r].node < 0 || ranks_of(welcome)[r].node >= group->nranks)
            return fail(EPX_ERR_MISMATCH, "epx_group_join: invalid welcome: rank %zu is on node %d", r,
                        ranks_of(welcome)[r].node);
    return EPX_OK;
}

/* Kernels tell all ranks of the node of a failure, also those that are out: these have something to write to until
 * their place is taken. */
static epx_status map_stand_ins(struct epx_group *group)
{
    static const struct heap_export no_directory;
    const struct device_ops *ops = group->device->ops;
    const uint64_t words = (uint64_t)SIG_COUNT * (uint64_t)group->set.sig_slots * (uint64_t)group->nranks;
    epx_status status =
        ops->heap_create(group->device, group->plan.signals + words * sizeof(struct signal), &group->stand_in);

    if (status == EPX_OK)
        status = ops->heap_open(group->device, &group->heap.export, &group->bases[group->rank]);
    if (status != EPX_OK)
        return status;
    group->exports[group->rank] = group->heap.export;
    for (int r = 0; r < group->nranks; r++) {
        if (r == group->rank || group->remote[r])
            continue;
        group->bases[r] = group->stand_in.base;
        regions_add_peer(group, r, &no_directory);
    }
    return EPX_OK;
}

/* Everything of its own, once the nodes are known. */
static epx_status build(struct epx_group *group, const struct join_welcome *welcome)
{
    epx_status status = EPX_OK;

    for (int r = 0; r < group->nranks; r++)
        group->map.node_of[r] = ranks_of(welcome)[r].node;
    group_take_nodes(group);
    group->number = welcome->number;
    group->fabric = welcome->place == HEAP_FABRIC;
    if (status == EPX_OK && group->fabric)
        status = group->device->ops->heap_place(group->device, HEAP_FABRIC);
    else if (status == EPX_OK && welcome->place == HEAP_HOST && !(group->device->ops->caps & DEVICE_HOST_HEAP))
        status = group->device->ops->heap_place(group->device, HEAP_HOST);
    if (status == EPX_OK)
        status = group_open_heap(group);
    if (status == EPX_OK)
        status = map_stand_ins(group);
    if (status == EPX_OK)
        status = group_open_tables(group);
    return status;
}

/* Who the members are now. */
static void meet_members(struct epx_group *group, const struct join_rank *ranks, uint8_t *out)
{
    for (int r = 0; r < group->nranks; r++) {
        out[r] = ranks[r].out && r != group->rank;
        memcpy(group->identities[r], ranks[r].identity, sizeof(ranks[r].identity));
        memcpy(group->hosts[r], ranks[r].host, sizeof(ranks[r].host));
        if (r == group->rank)
            continue;
        membership_replace(group->membership, r, ranks[r].incarnation, &ranks[r].address);
        group->stale[r] = out[r];
    }
}

static epx_status take_part(struct epx_group *group, const struct join_welcome *welcome, size_t bytes)
{
    uint8_t *out = calloc((size_t)group->nranks, 1);
    epx_status status = out ? check_welcome(group, welcome, bytes)
                            : fail(EPX_ERR_MEMORY, "epx_group_join: no memory for %d ranks", group->nranks);

    if (status == EPX_OK)
        meet_members(group, ranks_of(welcome), out);
    if (status == EPX_OK && !group->dev)
        status = build(group, welcome);
    if (status == EPX_OK) {
        node_map_leave_out(&group->map, out);
        status = group_device_members(group);
    }
    free(out);
    return status == EPX_OK ? group_recover(group, "epx_group_join", welcome->unmask) : status;
}

/* Until the members have taken this process in. A round that fails, because a member or this process was too late or a
 * member has ended, is followed by another one. */
static epx_status become_member(struct epx_group *group, const struct ticket *ticket,
                                const struct join_request *request, uint64_t deadline)
{
    struct conn_address *doors = calloc((size_t)group->nranks, sizeof(*doors));
    epx_status status =
        doors ? EPX_ERR_PEER : fail(EPX_ERR_MEMORY, "epx_group_join: no memory for %d ranks", group->nranks);

    for (int d = 0; doors && d < ticket->ndoors; d++)
        doors[ticket->door[d].rank] = ticket->door[d].address;
    while (status == EPX_ERR_PEER) {
        void *welcome = NULL;
        size_t bytes = 0;

        status = membership_knock(group->membership, doors, request, sizeof(*request), deadline, &welcome, &bytes);
        if (status != EPX_OK)
            break;
        status = take_part(group, welcome, bytes);
        free(welcome);
        for (int r = 0; r < group->nranks; r++)
            if (r != group->rank && membership_address(group->membership, r)->bytes)
                doors[r] = *membership_address(group->membership, r);
        /* The members may have gone on without it; those that called different functions may try again. */
        if ((status == EPX_ERR_TIMEOUT || status == EPX_ERR_MISMATCH) && host_now_ns() < deadline)
            status = EPX_ERR_PEER;
        if (status == EPX_ERR_PEER)
            pause_ns(AGAIN_NS);
    }
    free(doors);
    return status;
}

static epx_status prepare(struct epx_group *group, const struct ticket *ticket, const epx_group_config *config,
                          struct join_request *request)
{
    epx_status status = find_key(group, ticket);

    if (status == EPX_OK)
        status = group_prepare(group, config);
    if (status == EPX_OK)
        status = make_request(group, request);
    if (status == EPX_OK) {
        choose_interface(ticket);
        status = handshake_begin(group);
    }
    if (status == EPX_OK) {
        handshake_keep(group);
        status = open_port(group, ticket);
    }
    for (int r = 0; status == EPX_OK && r < group->nranks; r++)
        group->mapped[r] = (uint64_t)NOT_MAPPED;
    return status;
}

epx_status group_join(const char *text, int rank, const epx_group_config *config, int timeout_ms,
                      struct epx_group **out)
{
    const uint64_t start = host_now_ns();
    struct join_request request;
    struct ticket ticket;
    struct epx_group *group;
    epx_status status = ticket_read(text, &ticket);

    if (status == EPX_OK && (rank < 0 || rank >= ticket.nranks))
        status = fail(EPX_ERR_ARGUMENT, "epx_group_join: rank: expected 0 to %d, got %d", ticket.nranks - 1, rank);
    if (status == EPX_OK && timeout_ms < 0)
        status = fail(EPX_ERR_ARGUMENT, "epx_group_join: timeout_ms: expected 0 or more, got %d", timeout_ms);
    if (status == EPX_OK)
        status = group_new("epx_group_join", &group);
    if (status != EPX_OK)
        return status;
    group->rank = rank;
    group->nranks = ticket.nranks;
    group->joining = 1;
    log_set_rank(rank);
    env_warn_unknown();
    status = registry_add(REGISTRY_GROUP, group, group); /* before the others count on this process */
    if (status == EPX_OK)
        status = prepare(group, &ticket, config, &request);
    if (status == EPX_OK)
        status = become_member(group, &ticket, &request,
                               start + (uint64_t)(timeout_ms ? timeout_ms : group->set.timeout_ms) * 1000000u);
    group->joining = 0;
    if (status != EPX_OK) {
        registry_remove(REGISTRY_GROUP, group);
        (void)group_free(group); /* the message is that of the first failure */
        return status;
    }
    log_line(LOG_INFO, "rank %d of %d has joined, on %d nodes", rank, group->nranks, group->nnodes);
    *out = group;
    return EPX_OK;
}

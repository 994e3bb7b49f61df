/* SPDX-License-Identifier: Apache-2.0 */
/* The members' side: join.h has the protocol. */
#include "group/join.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "boot/ticket.h"
#include "group/config.h"
#include "group/handshake.h"
#include "kernel/inject_bug.h"
#include "util/build.h"
#include "util/log.h"
#include "util/status.h"

EPX_STATIC_ASSERT(SETTINGS_FIELDS <= sizeof(((struct epx_group *)0)->fields) / sizeof(int64_t), "they fit");

enum {
    GRACE_MS = 300, /* for a process at the door to prove itself */
    ENDED_MS = 100, /* for a port of this machine to refuse */
    OFFERS = 2,     /* of one rank in one roll call: ranks begin at different ones */
    CHOICES = 16
};

struct offer {
    int32_t rank, reserved;
    uint64_t incarnation; /* 0 = none */
    struct conn_address address;
    uint8_t identity[64], host[64];
};

struct roll {
    uint64_t incarnation; /* of this rank's process */
    struct conn_address address;
    uint8_t identity[64];
    struct offer offers[OFFERS];
};

/* The second half, when all know the choice. */
struct verdict {
    int32_t unknown;        /* this rank has not mapped all members */
    int32_t count;          /* of what it has chosen */
    uint64_t chosen;        /* a digest of that */
    uint8_t alive[CHOICES]; /* the process that would be replaced is still there */
};

struct choices {
    struct offer list[CHOICES];
    int count;
};

/* ---- Who may join --------------------------------------------------------------------------------------------- */

static void refuse(struct epx_group *group, const struct membership_joiner *joiner, const char *text)
{
    log_line(LOG_WARN, "a process that asks for the place of rank %d is refused: %s", joiner->rank, text);
    membership_reply(group->membership, joiner->incarnation, REPLY_REFUSED, text, strlen(text));
}

static void let_wait(struct epx_group *group, uint64_t incarnation, const char *text)
{
    membership_reply(group->membership, incarnation, REPLY_WAIT, text, strlen(text));
}

/* What does not depend on who is left. */
static int request_is_good(struct epx_group *group, const struct membership_joiner *joiner)
{
    struct join_request request;
    char text[200], difference[128], theirs[BUILD_TEXT], own[BUILD_TEXT];

    memset(&request, 0, sizeof(request));
    memcpy(&request, joiner->request, joiner->bytes < sizeof(request) ? joiner->bytes : sizeof(request));
    if (request.build != build_number() || joiner->bytes != sizeof(request) || request.bytes != sizeof(request)) {
        snprintf(text, sizeof(text), "it has build %s of EPX, the group %s", build_text(request.build, theirs),
                 build_text(build_number(), own));
        refuse(group, joiner, text);
        return 0;
    }
    if (settings_difference(request.fields, group->fields, difference, sizeof(difference))) {
        snprintf(text, sizeof(text), "it has %s", difference);
        refuse(group, joiner, text);
        return 0;
    }
    return 1;
}

/* Ranks of a node map each other's memory. -1, or a member of the node that cannot. */
static int stranger_to(const struct epx_group *group, const struct offer *offer, const uint8_t *out)
{
    for (int r = 0; r < group->nranks; r++)
        if (r != offer->rank && !out[r] && group->map.node_of[r] == group->map.node_of[offer->rank] &&
            memcmp(group->identities[r], offer->identity, sizeof(offer->identity)) != 0)
            return r;
    return -1;
}

/* The offers of this rank: joiners at its door for ranks that are out. */
static void make_offers(struct epx_group *group, const uint8_t *out, struct offer *offers)
{
    struct membership_joiner joiner, all[CHOICES];
    struct join_request request;
    int count = 0, given = 0;

    for (int i = 0; count < CHOICES && membership_joiner(group->membership, i, &joiner);) {
        if (!request_is_good(group, &joiner))
            continue; /* it is gone from the list */
        i++;
        if (out[joiner.rank])
            all[count++] = joiner;
        else
            let_wait(group, joiner.incarnation, "the rank whose place this process asks for is a member");
    }
    for (int i = 0; i < count && given < OFFERS; i++) {
        const struct membership_joiner *at = &all[(i + group->rank) % count];
        struct offer *offer = &offers[given++];

        memcpy(&request, at->request, sizeof(request));
        offer->rank = at->rank;
        offer->incarnation = at->incarnation;
        offer->address = at->address;
        memcpy(offer->identity, group->fabric ? request.place.fabric : request.place.host, sizeof(offer->identity));
        memcpy(offer->host, request.place.host, sizeof(offer->host));
    }
}

/* The same on all: the first offer for each place, by the lowest rank. */
static void choose(const struct epx_group *group, const struct roll *all, const uint8_t *out, struct choices *choices)
{
    choices->count = 0;
    for (int i = 0; i < group->nranks; i++) {
        const int r = INJECT_BUG(BUG_OWN_CHOICE, (i + group->rank) % group->nranks, i);

        for (int o = 0; o < OFFERS && !out[r] && choices->count < CHOICES; o++) {
            const struct offer *offer = &all[r].offers[o];
            int taken = !offer->incarnation || offer->rank < 0 || offer->rank >= group->nranks || !out[offer->rank];

            for (int c = 0; c < choices->count && !taken; c++)
                taken = choices->list[c].rank == offer->rank;
            if (!taken)
                choices->list[choices->count++] = *offer;
        }
    }
}

static uint64_t digest(const struct choices *choices)
{
    uint64_t all = 0;

    for (int c = 0; c < choices->count; c++)
        all = (all ^ choices->list[c].incarnation) * 0x9e3779b97f4a7c15u + (uint64_t)choices->list[c].rank;
    return all;
}

/* ---- Roll call -------------------------------------------------------------------------------------------------- */

/* Which process every member is: a member that was not there when another was replaced learns it here. */
static int learn(struct epx_group *group, const struct roll *all, const uint8_t *out)
{
    int unknown = 0;

    for (int r = 0; r < group->nranks; r++) {
        if (out[r] || r == group->rank)
            continue;
        if (membership_incarnation(group->membership, r) != all[r].incarnation)
            membership_replace(group->membership, r, all[r].incarnation, &all[r].address);
        memcpy(group->identities[r], all[r].identity, sizeof(all[r].identity)); /* all decide by the same */
        unknown |= group->mapped[r] != all[r].incarnation;
    }
    return unknown;
}

static epx_status gather_rolls(struct epx_group *group, const uint8_t *out, struct roll *all)
{
    struct roll own;
    int missing = 0;

    for (int r = 0; r < group->nranks; r++)
        missing |= out[r];
    membership_listen(group->membership, missing ? GRACE_MS : 0);
    memset(&own, 0, sizeof(own));
    own.incarnation = membership_incarnation(group->membership, group->rank);
    own.address = *membership_address(group->membership, group->rank);
    memcpy(own.identity, group->identities[group->rank], sizeof(own.identity));
    make_offers(group, out, own.offers);
    return handshake_allgather(group, &own, all, sizeof(own));
}

/* A process of this node that has not ended may still write into the memory of others. What ranks of other nodes send
 * ends at closed endpoints. */
static void find_alive(struct epx_group *group, const struct choices *choices, struct verdict *own)
{
    for (int c = 0; c < choices->count; c++) {
        const int rank = choices->list[c].rank;

        own->alive[c] = INJECT_BUG(BUG_STILL_THERE, 0, 1) && group->map.node_of[rank] == group->node &&
                        !membership_has_ended(group->membership, rank, ENDED_MS);
    }
}

static epx_status gather_verdicts(struct epx_group *group, const uint8_t *out, struct verdict *own)
{
    struct verdict *all = calloc((size_t)group->nranks, sizeof(*all));
    epx_status status = all ? EPX_OK : fail(EPX_ERR_MEMORY, "no memory for %d ranks", group->nranks);

    if (status == EPX_OK)
        status = handshake_allgather(group, own, all, sizeof(*own));
    for (int r = 0; status == EPX_OK && r < group->nranks; r++) {
        if (out[r])
            continue;
        /* Verdicts are of choices by their numbers. */
        if (all[r].count != own->count || all[r].chosen != own->chosen)
            status =
                fail(EPX_ERR_INTERNAL, "rank %d and rank %d have chosen different processes to join", group->rank, r);
        own->unknown |= all[r].unknown;
        for (int c = 0; c < CHOICES; c++)
            own->alive[c] |= all[r].alive[c];
    }
    free(all);
    return status;
}

/* ---- Welcome ---------------------------------------------------------------------------------------------------- */

static void welcome(struct epx_group *group, const struct join_round *join, const uint8_t *out, uint64_t incarnation)
{
    const size_t bytes = sizeof(struct join_welcome) + (size_t)group->nranks * sizeof(struct join_rank);
    struct join_welcome *head = calloc(1, bytes);
    struct join_rank *ranks = head ? (struct join_rank *)(head + 1) : NULL;

    if (!head)
        return; /* others that were asked say it */
    head->unmask = join->unmask;
    head->nranks = group->nranks;
    head->number = group->number;
    head->place = group->fabric ? HEAP_FABRIC : group->device->ops->caps & DEVICE_HOST_HEAP ? HEAP_HOST : HEAP_DEVICE;
    for (int r = 0; r < group->nranks; r++) {
        ranks[r].incarnation = membership_incarnation(group->membership, r);
        ranks[r].address = *membership_address(group->membership, r);
        memcpy(ranks[r].identity, group->identities[r], sizeof(ranks[r].identity));
        memcpy(ranks[r].host, group->hosts[r], sizeof(ranks[r].host));
        ranks[r].node = group->map.node_of[r];
        ranks[r].out = out[r] && !join->in[r];
    }
    membership_reply(group->membership, incarnation, REPLY_WELCOME, head, bytes);
    free(head);
}

/* The process that was admitted for this rank; 0 = none. */
static uint64_t chosen_for(const struct choices *choices, int rank)
{
    for (int c = 0; c < choices->count; c++)
        if (choices->list[c].rank == rank)
            return choices->list[c].incarnation;
    return 0;
}

/* Those at this rank's door: welcome, or why not. */
static void reply_to_all(struct epx_group *group, const struct join_round *join, const uint8_t *out,
                         const struct choices *admitted)
{
    struct membership_joiner joiner, all[CHOICES];
    int count = 0;

    while (count < CHOICES && membership_joiner(group->membership, count, &joiner))
        all[count++] = joiner;
    for (int i = 0; i < count; i++) {
        const uint64_t chosen = chosen_for(admitted, all[i].rank);

        if (chosen == all[i].incarnation)
            welcome(group, join, out, chosen);
        else if (chosen)
            refuse(group, &all[i], "another process has taken the place of that rank");
    }
}

/* The members of the node must be able to map its memory. */
static int is_admissible(struct epx_group *group, const struct offer *offer, int alive, const uint8_t *out)
{
    const int stranger = stranger_to(group, offer, out);
    char text[160];

    if (alive) {
        snprintf(text, sizeof(text),
                 "the process of rank %d has not ended, and may still write into memory of its node", offer->rank);
        let_wait(group, offer->incarnation, text);
    } else if (stranger >= 0) {
        const struct membership_joiner joiner = {.rank = offer->rank, .incarnation = offer->incarnation};

        snprintf(text, sizeof(text), "it is on another machine, or another user's, than rank %d of its node", stranger);
        refuse(group, &joiner, text);
    }
    return !alive && stranger < 0;
}

static void admit(struct epx_group *group, struct join_round *join, const uint8_t *out, struct choices *choices,
                  const struct verdict *verdict)
{
    struct choices admitted = {.count = 0};

    for (int c = 0; c < choices->count; c++) {
        const struct offer *offer = &choices->list[c];

        if (join->failed[offer->rank] || !is_admissible(group, offer, verdict->alive[c], out))
            continue;
        membership_replace(group->membership, offer->rank, offer->incarnation, &offer->address);
        memcpy(group->identities[offer->rank], offer->identity, sizeof(offer->identity));
        memcpy(group->hosts[offer->rank], offer->host, sizeof(offer->host));
        group->stale[offer->rank] = 0;
        join->in[offer->rank] = 1;
        admitted.list[admitted.count++] = *offer;
        log_line(LOG_INFO, "rank %d: another process takes the place of rank %d", group->rank, offer->rank);
    }
    join->admitted = admitted.count;
    reply_to_all(group, join, out, &admitted);
}

epx_status join_roll_call(struct epx_group *group, struct join_round *join, const uint8_t *out)
{
    struct roll *all = calloc((size_t)group->nranks, sizeof(*all));
    epx_status status = all ? EPX_OK : fail(EPX_ERR_MEMORY, "no memory for a roll call of %d ranks", group->nranks);
    struct choices choices;
    struct verdict verdict;

    memset(&verdict, 0, sizeof(verdict));
    join->admitted = join->replaced = 0;
    if (status == EPX_OK)
        status = gather_rolls(group, out, all);
    if (status == EPX_OK) {
        choose(group, all, out, &choices);
        verdict.count = choices.count;
        verdict.chosen = digest(&choices);
        verdict.unknown = learn(group, all, out);
        find_alive(group, &choices, &verdict);
        status = gather_verdicts(group, out, &verdict);
    }
    if (status == EPX_OK) {
        join->replaced = verdict.unknown;
        memcpy(join->out, out, (size_t)group->nranks); /* one that comes back now would take others out with it */
        admit(group, join, out, &choices, &verdict);
    }
    free(all);
    return status;
}

void join_mark(const struct epx_group *group, const struct join_round *join, uint8_t *out)
{
    for (int r = 0; r < group->nranks; r++)
        out[r] = join->failed[r] || ((out[r] || join->out[r]) && !join->in[r]);
}

int join_give_up(struct epx_group *group, struct join_round *join)
{
    int any = 0;

    for (int r = 0; r < group->nranks; r++) {
        any |= join->in[r];
        join->failed[r] |= join->in[r];
        group->stale[r] |= join->in[r];
        join->in[r] = 0;
    }
    return any;
}

void join_done(struct epx_group *group, const uint8_t *out)
{
    for (int r = 0; r < group->nranks; r++)
        group->stale[r] |= out[r];
}

/* ---- Tickets ---------------------------------------------------------------------------------------------------- */

/* Doors of ranks spread over all. */
static void add_doors(const struct epx_group *group, struct ticket *ticket)
{
    const int step = (group->nranks + TICKET_DOORS - 1) / TICKET_DOORS;

    for (int first = 0; first < step; first++)
        for (int r = first; r < group->nranks && ticket->ndoors < TICKET_DOORS; r += step) {
            if (group->map.out[r])
                continue;
            ticket->door[ticket->ndoors].rank = r;
            ticket->door[ticket->ndoors++].address = *membership_address(group->membership, r);
        }
}

epx_status group_ticket(struct epx_group *group, char *text, size_t bytes)
{
    struct ticket ticket = {.build = build_number(), .nranks = group->nranks};

    if (!group->membership)
        return fail(EPX_ERR_USAGE, "epx_group_ticket: expected a group of several ranks with enable_mask = 1");
    ticket.flags = (group->has_key ? TICKET_PROVES : 0) | (group->own_secret ? TICKET_OWN_SECRET : 0) |
                   (group->nnodes == 1 && !group->fabric ? TICKET_ONE_HOST : 0);
    ticket.token = membership_token(group->membership);
    memcpy(ticket.seed, group->seed, sizeof(ticket.seed));
    add_doors(group, &ticket);
    return ticket_write(&ticket, text, bytes);
}

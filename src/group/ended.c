/* SPDX-License-Identifier: Apache-2.0 */
#include "group/ended.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "group/abort.h"
#include "group/error.h"
#include "group/handshake.h"
#include "group/mask.h"
#include "util/descriptor.h"
#include "util/files.h"
#include "util/log.h"
#include "util/runtime.h"
#include "util/status.h"

enum { SILENCE_PART = 3 /* of the deadline */, SILENCE_MIN_MS = 2000, MEET_MS = 3000, MOST_FILES = 256 };

static int silence_ms(const struct epx_group *group)
{
    const int ms = group->set.timeout_ms / SILENCE_PART;

    return ms > SILENCE_MIN_MS ? ms : SILENCE_MIN_MS;
}

void ended_text(const struct epx_group *group, int phase, int rank, char *text, size_t bytes)
{
    if (phase == PHASE_ENDED)
        snprintf(text, bytes, "rank %d has ended without epx_group_destroy", rank);
    else if (rank == group->rank)
        snprintf(text, bytes, "the machine of this rank did not reply to other ranks for %d ms", silence_ms(group));
    else
        snprintf(text, bytes, "rank %d is unreachable: its machine has not replied for %d ms", rank, silence_ms(group));
}

/* ---- News, from the thread of liveness.c ------------------------------------------------------------------------- */

/* Behind the record: pairs with ended_fd(), which looks for it behind the descriptor. */
static void make_readable(const struct epx_group *group)
{
    const int fd = __atomic_load_n(&group->error_fd, __ATOMIC_SEQ_CST);
    const uint64_t one = 1;

    if (fd >= 0 && write(fd, &one, sizeof(one)) < 0 && errno != EAGAIN)
        log_line(LOG_WARN, "rank %d: epx_group_error_fd: %s", group->rank, strerror(errno));
}

/* May the group go on without that rank, once it was told? */
static int goes_on(const struct epx_group *group)
{
    return group->set.enable_mask && group->set.modes & EPX_LOW_LATENCY;
}

/* The group goes on without it: it was masked, or left out of a recovery. */
static int is_out(struct epx_group *group, int rank)
{
    int masked = 0;

    return group->map.out[rank] || (group->set.enable_mask && mask_is_set(group, rank, &masked) == EPX_OK && masked);
}

/* Has the group failed before? Then ranks end because of that. Another rank of the node may have been quicker with the
 * same news, and set the word. */
static int has_failed_before(struct epx_group *group, int rank)
{
    const uint64_t word = abort_word(group);

    return word && !(PHASE_IS_NEWS(ABORT_PHASE(word)) && ABORT_CULPRIT(word) == rank);
}

static void take(struct epx_group *group, int rank, int phase)
{
    char text[160];

    ended_text(group, phase, rank, text, sizeof(text));
    /* Release: pairs with the loads of kernels, which read nothing behind it. */
    __atomic_store_n(&group->shadow.ended[rank], (uint64_t)phase, __ATOMIC_RELEASE);
    if (is_out(group, rank) || has_failed_before(group, rank)) {
        log_line(LOG_INFO, "%s", text);
    } else {
        log_line(LOG_WARN, "%s", text);
        error_record_ended(group, phase, rank);
        if (!goes_on(group))
            group_abort_ended(group, phase, rank);
    }
    if (!is_out(group, rank))
        make_readable(group);
}

static int on_news(void *context, int rank, enum liveness_state state)
{
    struct epx_group *group = context;

    if (__atomic_load_n(&group->closing, __ATOMIC_RELAXED))
        return 1;
    if (pthread_mutex_trylock(&group->giving_up) != 0)
        return 0;
    if (group->recovering) {
        pthread_mutex_unlock(&group->giving_up);
        return 0;
    }
    take(group, rank, state == LIVENESS_ENDED ? PHASE_ENDED : PHASE_UNREACHABLE);
    pthread_mutex_unlock(&group->giving_up);
    return 1;
}

/* ---- The group --------------------------------------------------------------------------------------------------- */

static int is_of_this_host(const struct epx_group *group, int r)
{
    return memcmp(group->hosts[r], group->hosts[group->rank], sizeof(group->hosts[r])) == 0;
}

/* Connections of one machine, in the place of pidfds, are between processes that all lack these. */
static int needs_links(struct epx_group *group)
{
    if (group->joining)
        group->without_pidfd = !liveness_has_pidfd();
    return group->nnodes > 1 || group->fabric || group->without_pidfd;
}

epx_status ended_open(struct epx_group *group, struct liveness_card *card)
{
    struct liveness_options o = {
        .rank = group->rank,
        .nranks = group->nranks,
        .incarnation = group->joining ? membership_incarnation(group->membership, group->rank) : 0,
        .links = needs_links(group),
        .one_host = group->nnodes == 1 && !group->fabric, /* nodes of one machine may have networks of their own */
        .key = handshake_key(group),
        .silence_ms = silence_ms(group),
        .on_news = on_news,
        .context = group,
    };

    memset(card, 0, sizeof(*card));
    if (runtime()->env || group->nranks == 1) /* ranks of a simulation are not processes */
        return EPX_OK;
    if (files_need("watching processes", group->nranks < MOST_FILES ? group->nranks : MOST_FILES) != EPX_OK)
        log_line(LOG_INFO, "%s", epx_last_error()); /* what is not watched is noticed at the deadline */
    return liveness_open(&o, card, &group->liveness);
}

void ended_set_peer(struct epx_group *group, int rank, int64_t pid, const struct liveness_card *card)
{
    const int mate = !group->remote[rank] && is_of_this_host(group, rank) && pid != (int64_t)getpid();

    __atomic_store_n(&group->shadow.ended[rank], 0, __ATOMIC_RELAXED);
    if (group->liveness && rank != group->rank)
        liveness_set_peer(group->liveness, rank,
                          group->membership ? membership_incarnation(group->membership, rank) : 0, pid,
                          mate && !group->without_pidfd, card);
}

epx_status ended_start(struct epx_group *group, int alone)
{
    epx_status status;

    if (!group->liveness)
        return EPX_OK;
    if (alone) {
        ended_close(group);
        return EPX_OK;
    }
    status = liveness_start(group->liveness, group->number);
    if (status == EPX_OK && !group->joining && !liveness_meet(group->liveness, MEET_MS))
        log_line(LOG_WARN,
                 "rank %d: no TCP connections to all neighbours within %d ms: ends of ranks on other nodes may be "
                 "noticed at the deadline only (EPX_SOCKET_IFNAME picks the interfaces)",
                 group->rank, MEET_MS);
    return status;
}

void ended_tell(struct epx_group *group)
{
    if (group->liveness)
        liveness_tell(group->liveness);
}

void ended_met_again(struct epx_group *group)
{
    if (!group->liveness)
        return;
    for (int r = 0; r < group->nranks; r++)
        if (__atomic_load_n(&group->shadow.ended[r], __ATOMIC_RELAXED) == PHASE_UNREACHABLE)
            __atomic_store_n(&group->shadow.ended[r], 0, __ATOMIC_RELAXED);
    liveness_met_again(group->liveness);
}

int ended_is(const struct epx_group *group, int rank)
{
    return group->liveness && liveness_of(group->liveness, rank) == LIVENESS_ENDED;
}

int ended_member(const struct epx_group *group)
{
    for (int r = 0; r < group->nranks; r++)
        if (!group->map.out[r] && ended_is(group, r))
            return r;
    return -1;
}

int ended_unmasked(struct epx_group *group)
{
    int masked = 0;

    for (int r = 0; group->set.enable_mask && group->liveness && r < group->nranks; r++)
        if (!group->map.out[r] && __atomic_load_n(&group->shadow.ended[r], __ATOMIC_RELAXED) &&
            mask_is_set(group, r, &masked) == EPX_OK && !masked)
            return r;
    return -1;
}

void ended_leave(struct epx_group *group)
{
    if (group->liveness)
        liveness_leave(group->liveness);
}

void ended_close(struct epx_group *group)
{
    if (!group->liveness)
        return;
    group->kept |= liveness_close(group->liveness) != 0;
    group->liveness = NULL;
}

/* ---- The descriptor ---------------------------------------------------------------------------------------------- */

epx_status ended_fd(struct epx_group *group, int *fd)
{
    epx_error_info info;

    if (group->error_fd < 0) {
        const int made = fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));

        if (made < 0)
            return fail_errno(EPX_ERR_SYSTEM, "epx_group_error_fd: cannot create an eventfd");
        __atomic_store_n(&group->error_fd, made, __ATOMIC_SEQ_CST);
        if (error_read(group, &info) != EPX_OK || abort_word(group))
            make_readable(group);
    }
    *fd = group->error_fd;
    return EPX_OK;
}

void ended_fd_clear(struct epx_group *group)
{
    uint64_t count;

    if (group->error_fd >= 0 && read(group->error_fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
        log_line(LOG_WARN, "rank %d: epx_group_error_fd: %s", group->rank, strerror(errno));
}

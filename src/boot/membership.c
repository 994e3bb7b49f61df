/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The coordinator is the lowest rank that is not excluded. It connects to every other rank, and every other rank to it.
 * A rank sends only on connections that it made and receives only on connections that it accepted. So both ranks of a
 * connection take part in the round, and a closed port is detected by whoever connects to it.
 *
 *   rank r                                                    coordinator c
 *   connect to c    -- VIEW (purpose, excluded ranks) ------>  adds those ranks to its own set
 *                   <------ VIEW (the same, who has arrived) -  to all, when its own set has grown, and now and then
 *   adds them and sends its own view again if that changes it; if it excludes c now, it turns to the next rank
 *                   <--------------------- COMMIT (excluded) -  once all that are left have sent the same set: agreed
 *                   -- DATA 1 ------------------------------>
 *                   <------------------------------- DATA 1 -  of all, once all have sent theirs; and so on
 *                   <--------------- FAIL (status, message) -  instead of anything, when a rank is lost or too late
 *   close
 *
 * The set of excluded ranks only grows, so the views converge. Ranks with different coordinators exclude different
 * ranks; whoever hears of more turns to the higher one, which connects to all others and so tells them. Where both come
 * to a result (two ranks that exclude each other), a rank takes part in the first that it hears of and closes its
 * connection to the other coordinator, whose all-gather fails: an all-gather succeeds only if all ranks of the set have
 * agreed to that set, with that coordinator. When a connection is closed before its rank has agreed, that rank gave up
 * the round, or could not keep the connection: this rank connects again, and the coordinator repeats its COMMIT. When
 * it is closed later, that rank failed during the round.
 *
 * A round has 2 (n - 1) connections. Each rank connected to each other before: 128 ranks took 15 s.
 *
 * The port of a rank that has ended may be another's: who listens there and says nothing is like a rank that is late.
 * So ranks of one machine know each other's processes (pidfd), and look there first.
 */
#include "boot/membership_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "boot/rendezvous.h"
#include "util/pause.h"
#include "util/status.h"
#include "util/text.h"

enum {
    BACKOFF_MIN_NS = 20000,
    BACKOFF_MAX_NS = 1000000,
    BACKOFF_GROWTH = 4,
    WAIT_MAX_NS = 20000000,
    WAIT_CONNECTED_NS = 100000000,
    LINGER_MS = 300,
    END_MS = 1000,
    NEWS_MIN_MS = 50,
    NEWS_MAX_MS = 1000,
    NEWS_MISSED = 4 /* more than so many: the coordinator is silent */
};

/* ---- Consensus ---------------------------------------------------------------------------------------------- */

/* To all that are connected and have not been told. Without memory the others find out by the end of connections.
 * `arrived`: not to those that have not come, whose round has yet to begin. */
static void tell_failure(struct membership *m, epx_status status, const char *text, int arrived)
{
    struct failure failure = {.status = status};

    snprintf(failure.text, sizeof(failure.text), "%s", text);
    for (int r = 0; r < m->nranks; r++)
        if (m->peers[r].conn >= 0 && !m->peers[r].told && is_in_touch(m, r) && (!arrived || m->peers[r].has_view))
            m->peers[r].told = queue_frame(m, &m->peers[r], FRAME_FAIL, m->number, &failure, sizeof(failure)) == EPX_OK;
}

static int all_sent(const struct membership *m)
{
    for (int r = 0; r < m->nranks; r++)
        if (!is_sent(&m->peers[r]))
            return 0;
    return 1;
}

/* Sends what is queued, for so long at the most. */
static void send_rest(struct membership *m, int most_ms)
{
    const uint64_t until = host_now_ns() + (uint64_t)most_ms * 1000000u;

    while (!all_sent(m) && host_now_ns() < until) {
        for (int r = 0; r < m->nranks; r++)
            flush_tx(m, &m->peers[r]);
        if (!all_sent(m))
            m->ops->wait(m->port, BACKOFF_MIN_NS);
    }
}

/* Others go on without this rank. Who takes part here counts on it, and has not gone on without it: only ranks that it
 * was told of and that are missing here may have, and they may have done their work and ended. Ranks that were left out
 * make no set of their own beside those, unless they are more: then it was the others that were left out. A rank that
 * is here does not speak for those that it was to go on with: they may have left it out, too, and it may not know. */
static int stays_out(const struct membership *m)
{
    int missing = 0, left = 0;

    for (int r = 0; r < m->nranks; r++) {
        missing += m->without[r] && m->excluded[r];
        left += !m->excluded[r];
    }
    return left <= missing && m->purpose != MEMBERSHIP_RESTORES;
}

static void find_left_out_by(struct membership *m)
{
    if (m->late_for >= 0 && m->excluded[m->late_for])
        m->left_out_by = m->late_for;
    for (int r = 0; r < m->nranks; r++)
        if (m->without[r] && (m->left_out_by < 0 || (m->excluded[r] && !m->excluded[m->left_out_by])))
            m->left_out_by = r;
}

/* The coordinator tells the others, which would wait for it until their deadlines. */
static epx_status fail_left_out(struct membership *m)
{
    char text[256];

    find_left_out_by(m);
    snprintf(text, sizeof(text),
             "rank %d was %s, and ranks that may have gone on without it do not take part, rank %d among them: call "
             "epx_mask_clean on all ranks to restore it, or end it and let a new process join",
             m->rank, m->late_for < 0 ? "left out" : "too late", m->left_out_by);
    if (m->coordinator == m->rank) {
        tell_failure(m, EPX_ERR_PEER, text, 1);
        send_rest(m, NEWS_MIN_MS);
    }
    return fail(EPX_ERR_PEER, "%s", text);
}

/* Adds what the other ranks exclude. A process that joins has no purpose of its own: as the coordinator it compares
 * those of the others, which do not hear of each other. */
static epx_status merge_views(struct membership *m)
{
    int purpose = m->purpose, whose = m->rank;

    if (m->left_out_by >= 0)
        return fail(
            EPX_ERR_PEER,
            "rank %d continues without rank %d, which is masked: call epx_mask_clean on all ranks to restore it",
            m->left_out_by, m->rank);
    for (int r = 0; r < m->nranks; r++) {
        struct peer *peer = &m->peers[r];

        if (r == m->rank || m->excluded[r] || !peer->has_view)
            continue;
        if (purpose == MEMBERSHIP_ANY_PURPOSE) {
            purpose = peer->purpose;
            whose = r;
        }
        if (!same_purpose(purpose, peer->purpose))
            return fail(EPX_ERR_MISMATCH,
                        "rank %d and rank %d call different functions to recover: one epx_group_error_clear, the other"
                        " epx_mask_clean",
                        whose, r);
        for (int i = 0; i < m->nranks && peer->fresh; i++)
            m->excluded[i] |= peer->excluded[i];
        peer->fresh = 0;
    }
    return stays_out(m) ? fail_left_out(m) : EPX_OK;
}

/* The coordinator has the same view of all that are left. While some are missing, none is compared. */
static int all_agree(const struct membership *m)
{
    for (int r = 0; r < m->nranks; r++)
        if (r != m->rank && !m->excluded[r] && (!m->peers[r].has_view || m->peers[r].conn < 0))
            return 0;
    for (int r = 0; r < m->nranks; r++)
        if (r != m->rank && !m->excluded[r] && memcmp(m->peers[r].excluded, m->excluded, (size_t)m->nranks) != 0)
            return 0;
    return 1;
}

/* The connection to a rank ended before that rank has shown, by data, that it knows the result: it may have closed the
 * connection because it had no memory for it or too many others, unread. A rank that knows the result closes the next
 * one, too. */
static int may_lack_commit(const struct membership *m, int rank)
{
    const struct peer *peer = &m->peers[rank];

    return m->coordinator == m->rank && peer->rx.conn >= 0 && !peer->data[1].number;
}

/* Everything that can be done without waiting. */
static epx_status progress(struct membership *m)
{
    epx_status status = EPX_OK;

    m->progressed = 0;
    accept_pending(m);
    for (int r = 0; r < m->nranks && status == EPX_OK; r++) {
        struct peer *peer = &m->peers[r];

        if (!m->agreed && !m->excluded[r] && !peer->has_view && is_in_touch(m, r) && process_has_ended(m, r)) {
            m->excluded[r] = 1;
            m->progressed = 1;
        }
        if (is_in_touch(m, r) && (!m->agreed || m->excluded[r] || may_lack_commit(m, r)))
            status = connect_peer(m, r);
        if (peer->conn >= 0 && flush_tx(m, peer) && !m->agreed) {
            m->excluded[r] = 1;
            m->progressed = 1;
        }
        recv_frames(m, peer);
        if (!m->agreed)
            m->coordinator = lowest_left(m);
    }
    return status;
}

/* The coordinator tells all others who has arrived, again and again: they need it in the text of a timeout, and its
 * silence says that it has stopped. */
static uint64_t news_ns(const struct membership *m)
{
    const int ms = m->timeout_ms / 16;

    return (uint64_t)(ms < NEWS_MIN_MS ? NEWS_MIN_MS : ms > NEWS_MAX_MS ? NEWS_MAX_MS : ms) * 1000000u;
}

/* The coordinator knows who is missing, and tells it at its deadline. The others wait a little longer. */
static uint64_t end_of_wait(const struct membership *m, uint64_t deadline)
{
    return m->coordinator == m->rank ? deadline : deadline + news_ns(m);
}

/* What the ranks do, in words of a message. */
static const char *what_for(const struct membership *m)
{
    return m->purpose == MEMBERSHIP_CREATION ? "creation of the group" : "recovery";
}

/* What a rank that receives from the coordinator alone can tell if it receives nothing: not who has stopped. EPX_OK:
 * the coordinator has reported. */
static epx_status check_silence(const struct membership *m, int number)
{
    const uint64_t silent = host_now_ns() - m->reported_ns;

    if (m->coordinator == m->rank || (!number && !m->peers[m->coordinator].arrived))
        return EPX_OK;
    if (number)
        return fail(EPX_ERR_TIMEOUT,
                    "rank %d: no result from rank %d, which leads the %s, within %d ms: it may have stopped, or a "
                    "rank that it waits for",
                    m->rank, m->coordinator, what_for(m), m->timeout_ms);
    if (silent <= NEWS_MISSED * news_ns(m))
        return EPX_OK;
    return fail(EPX_ERR_TIMEOUT,
                "rank %d: no word from rank %d, which leads the %s, in the last %d of %d ms: it may have stopped",
                m->rank, m->coordinator, what_for(m), (int)(silent / 1000000u), m->timeout_ms);
}

static epx_status too_late(const struct membership *m, int number)
{
    epx_status status = check_silence(m, number);
    unsigned char *there;
    char names[128];

    if (status != EPX_OK)
        return status;
    there = calloc((size_t)m->nranks, 1);
    if (!there)
        return fail(EPX_ERR_TIMEOUT, "rank %d: not all ranks joined the %s within %d ms", m->rank, what_for(m),
                    m->timeout_ms);
    for (int r = 0; r < m->nranks; r++) {
        const int arrived = number ? m->peers[r].data[number & 1].number == number : m->peers[r].arrived;
        /* Other ranks than the coordinator have only its word of the others, and none before it has come itself. */
        const int reported =
            m->coordinator != m->rank && r != m->coordinator && (m->reported[r] || !m->peers[m->coordinator].arrived);
        there[r] = r == m->rank || m->excluded[r] || arrived || reported;
    }
    if (absent_ranks(there, m->nranks, names, sizeof(names)))
        status = fail(EPX_ERR_TIMEOUT, "rank %d: %s did not join the %s within %d ms", m->rank, names, what_for(m),
                      m->timeout_ms);
    else
        status = fail(EPX_ERR_TIMEOUT, "rank %d: the ranks did not agree within %d ms on the ranks that are masked",
                      m->rank, m->timeout_ms);
    free(there);
    return status;
}

/* Only the coordinator, and who has no connection to it, does something by the clock. All else ends a wait. */
static int is_connected(const struct membership *m)
{
    return m->coordinator != m->rank && m->peers[m->coordinator].conn >= 0;
}

/* Waits, longer each time, while there is no progress. What ends the waits early for nothing costs little. */
static void backoff(const struct membership *m, uint64_t deadline, uint64_t *ns)
{
    const uint64_t most = is_connected(m) ? WAIT_CONNECTED_NS : WAIT_MAX_NS, now = host_now_ns();

    if (m->progressed) {
        *ns = BACKOFF_MIN_NS;
        return;
    }
    *ns = BACKOFF_GROWTH * *ns < most ? BACKOFF_GROWTH * *ns : most;
    if (*ns == most)
        pause_ns(BACKOFF_MAX_NS);
    if (now < deadline)
        m->ops->wait(m->port, *ns < deadline - now ? *ns : deadline - now);
}

/* Sends the view to all connected ranks if it has changed, and the coordinator's now and then. */
static epx_status send_view(struct membership *m)
{
    const size_t n = (size_t)m->nranks;
    const int grown = memcmp(m->view, m->excluded, n) != 0;
    const int due = m->coordinator == m->rank && host_now_ns() - m->view_ns > news_ns(m);
    epx_status status = EPX_OK;

    if (!grown && !due)
        return EPX_OK;
    memcpy(m->view, m->excluded, n);
    for (size_t r = 0; r < n; r++)
        m->view[n + r] = (uint8_t)m->peers[r].arrived;
    m->view_ns = host_now_ns();
    for (int r = 0; r < m->nranks && status == EPX_OK; r++)
        if (m->peers[r].conn >= 0)
            status = queue_frame(m, &m->peers[r], FRAME_VIEW, m->purpose, m->view, 2 * n);
    return status;
}

/* What the coordinator has said, if it has. */
static epx_status told_failure(const struct membership *m)
{
    char text[sizeof(m->failure.text)];

    if (m->fail_from < 0)
        return EPX_OK;
    text_clean(text, sizeof(text), m->failure.text, sizeof(m->failure.text));
    return fail(m->failure.status > EPX_OK && m->failure.status <= EPX_ERR_INTERNAL ? (epx_status)m->failure.status
                                                                                    : EPX_ERR_PEER,
                "%s", text);
}

/* After a mismatch: gives the other ranks time to receive this rank's view and to report the same. */
static epx_status linger(struct membership *m, epx_status status)
{
    const uint64_t until = host_now_ns() + (uint64_t)LINGER_MS * 1000000u;
    char text[512];

    snprintf(text, sizeof(text), "%s", epx_last_error());
    while (status == EPX_ERR_MISMATCH && host_now_ns() < until && progress(m) == EPX_OK) {
        if (m->coordinator == m->rank)
            tell_failure(m, status, text, 0);
        m->ops->wait(m->port, BACKOFF_MAX_NS);
    }
    return fail(status, "%s", text);
}

/* The deadline has passed before all have agreed. */
static epx_status give_up(struct membership *m)
{
    const epx_status status = too_late(m, 0);
    char text[512];

    if (m->coordinator != m->rank)
        return status;
    snprintf(text, sizeof(text), "%s", epx_last_error());
    tell_failure(m, status, text, 1);
    send_rest(m, NEWS_MIN_MS);
    return fail(status, "%s", text);
}

/* All have the same set: tells them. */
static epx_status commit(struct membership *m)
{
    epx_status status = EPX_OK;

    for (int r = 0; r < m->nranks && status == EPX_OK; r++)
        if (r != m->rank && !m->excluded[r])
            status = queue_frame(m, &m->peers[r], FRAME_COMMIT, m->purpose, m->excluded, (size_t)m->nranks);
    m->agreed = status == EPX_OK;
    return status;
}

static void begin_round(struct membership *m, int purpose, const uint8_t *excluded, int timeout_ms)
{
    const size_t n = (size_t)m->nranks;

    membership_end(m);
    memcpy(m->excluded, excluded, n);
    m->excluded[m->rank] = 0;
    memset(m->view, 0, 2 * n);
    memcpy(m->view, m->excluded, n);
    memset(m->reported, 0, n);
    m->view_ns = m->reported_ns = host_now_ns();
    m->coordinator = lowest_left(m);
    m->purpose = purpose;
    m->timeout_ms = timeout_ms;
    m->number = 0;
    m->left_out_by = m->fail_from = -1;
    m->failed = EPX_OK;
    m->no_files_ns = 0;
    for (int r = 0; r < m->nranks; r++)
        m->peers[r].arrived = m->peers[r].viewed = 0;
}

/* One step towards m->agreed. */
static epx_status try_to_agree(struct membership *m)
{
    epx_status status = progress(m);

    if (status == EPX_OK && !m->agreed)
        status = told_failure(m);
    if (status != EPX_OK && m->fail_from >= 0)
        find_left_out_by(m);
    if (status == EPX_OK && !m->agreed)
        status = merge_views(m);
    if (!m->agreed)
        m->coordinator = lowest_left(m);
    if (status == EPX_OK && !m->agreed)
        status = send_view(m);
    if (status == EPX_OK && !m->agreed && m->coordinator == m->rank && all_agree(m))
        status = commit(m);
    return status;
}

epx_status membership_agree(struct membership *m, int purpose, uint8_t *excluded, int timeout_ms)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)timeout_ms * 1000000u;
    uint64_t ns = BACKOFF_MIN_NS;

    begin_round(m, purpose, excluded, timeout_ms);
    for (;;) {
        const epx_status status = try_to_agree(m);

        if (status != EPX_OK)
            return linger(m, status);
        if (m->agreed && stays_out(m)) /* by what the coordinator has told last */
            return fail_left_out(m);
        if (m->agreed)
            break;
        if (host_now_ns() >= end_of_wait(m, deadline))
            return give_up(m);
        backoff(m, end_of_wait(m, deadline), &ns);
    }
    for (int r = 0; r < m->nranks; r++)
        if (m->peers[r].conn >= 0 && !is_in_touch(m, r))
            close_tx(m, &m->peers[r]); /* it is told by that, should it wait for this rank */
    memcpy(m->view, m->excluded, (size_t)m->nranks);
    memcpy(excluded, m->excluded, (size_t)m->nranks);
    return EPX_OK;
}

/* ---- All-gather --------------------------------------------------------------------------------------------- */

static const char *data_of(const struct membership *m, int rank, int number)
{
    return m->peers[rank].data[number & 1].number == number ? m->peers[rank].data[number & 1].data : NULL;
}

/* *there: `expected` bytes of the rank have arrived. Fails when they cannot arrive any more. */
static epx_status check_arrival(const struct membership *m, int rank, size_t expected, int *there)
{
    const struct peer *peer = &m->peers[rank];
    const size_t bytes = peer->data[m->number & 1].bytes;

    *there = data_of(m, rank, m->number) != NULL;
    if (*there && bytes != expected)
        return fail(EPX_ERR_MISMATCH, "rank %d sends %zu bytes to an all-gather, rank %d expected %zu", rank, bytes,
                    m->rank, expected);
    if (!*there && peer->rx.conn < 0)
        return fail(EPX_ERR_PEER, "rank %d ended or gave up during the %s, or its connection was cut", rank,
                    what_for(m));
    return EPX_OK;
}

/* *all: what this rank waits for has arrived: the parts of all, or the result from the coordinator. */
static epx_status check_arrivals(const struct membership *m, size_t bytes, int *all)
{
    /* A failure that came behind the result is the next all-gather's: others have this one, too, and went on. */
    epx_status status = data_of(m, m->coordinator, m->number) ? EPX_OK : told_failure(m);
    int there;

    *all = 1;
    if (m->coordinator != m->rank)
        return status == EPX_OK ? check_arrival(m, m->coordinator, bytes * (size_t)m->nranks, all) : status;
    for (int r = 0; r < m->nranks && status == EPX_OK; r++)
        if (r != m->rank && !m->excluded[r]) {
            status = check_arrival(m, r, bytes, &there);
            *all &= there;
        }
    return status;
}

void membership_on_silence(struct membership *m, int ms, void (*fn)(void *arg), void *arg)
{
    m->silence_ms = ms;
    m->silence = fn;
    m->silence_arg = arg;
}

static void run_on_silence(struct membership *m, uint64_t since)
{
    void (*fn)(void *arg) = m->silence;

    if (!fn || m->coordinator == m->rank || host_now_ns() - since < (uint64_t)m->silence_ms * 1000000u)
        return;
    m->silence = NULL;
    fn(m->silence_arg);
}

static epx_status await_data(struct membership *m, size_t bytes)
{
    const uint64_t begin = host_now_ns(), deadline = begin + (uint64_t)m->timeout_ms * 1000000u;
    uint64_t ns = BACKOFF_MIN_NS;
    int all = 0;

    for (;;) {
        epx_status status = progress(m);

        if (status == EPX_OK)
            status = check_arrivals(m, bytes, &all);
        if (all || status != EPX_OK)
            return status;
        run_on_silence(m, begin);
        if (host_now_ns() >= end_of_wait(m, deadline))
            return too_late(m, m->number);
        backoff(m, end_of_wait(m, deadline), &ns);
    }
}

/* Once all parts have arrived, all ranks have the result before: its memory is free. */
static epx_status send_result(struct membership *m, const void *send, size_t bytes)
{
    const size_t total = bytes * (size_t)m->nranks;
    char **result = &m->result[m->number & 1];
    epx_status status = EPX_OK;

    free(*result);
    *result = calloc(1, total + 1);
    if (!*result)
        return fail(EPX_ERR_MEMORY, "rank %d has no memory for an all-gather of %zu bytes", m->rank, total);
    for (int r = 0; r < m->nranks; r++)
        if (!m->excluded[r] && bytes)
            memcpy(*result + (size_t)r * bytes, r == m->rank ? send : data_of(m, r, m->number), bytes);
    for (int r = 0; r < m->nranks && status == EPX_OK; r++)
        if (r != m->rank && !m->excluded[r])
            status = queue_result(m, &m->peers[r], m->number, *result, total);
    return status;
}

static epx_status gather(struct membership *m, const void *send, void *recv, size_t bytes)
{
    const int leads = m->coordinator == m->rank;
    epx_status status = EPX_OK;

    m->number++;
    if (!leads)
        status = queue_frame(m, &m->peers[m->coordinator], FRAME_DATA, m->number, send, bytes);
    if (status == EPX_OK)
        status = await_data(m, bytes);
    if (status == EPX_OK && leads)
        status = send_result(m, send, bytes);
    if (status != EPX_OK) {
        char text[512];
        snprintf(text, sizeof(text), "%s", epx_last_error());
        if (leads)
            tell_failure(m, status, text, 0);
        return fail(status, "%s", text);
    }
    if (bytes)
        memcpy(recv, leads ? m->result[m->number & 1] : data_of(m, m->coordinator, m->number),
               bytes * (size_t)m->nranks);
    if (leads)
        (void)progress(m); /* the first bytes leave now: the caller may be long until the next call */
    return EPX_OK;
}

/* After a failed all-gather other ranks may be one all-gather ahead: they would take this rank's next data for that
 * one. So the round is over, and every later call returns the same failure. */
epx_status membership_allgather(struct membership *m, const void *send, void *recv, size_t bytes)
{
    if (m->failed == EPX_OK)
        m->failed = gather(m, send, recv, bytes);
    return m->failed;
}

int membership_left_out(const struct membership *m)
{
    return m->left_out_by >= 0;
}

void membership_was_late(struct membership *m, int by, const uint8_t *out)
{
    m->late_for = by;
    for (int r = 0; r < m->nranks; r++)
        m->without[r] |= r != m->rank && !out[r];
}

void membership_taken_back(struct membership *m)
{
    memset(m->without, 0, (size_t)m->nranks);
    m->late_for = -1;
}

int membership_coordinator(const struct membership *m)
{
    return m->coordinator;
}

void membership_end(struct membership *m)
{
    if (m->agreed)
        send_rest(m, END_MS);
    m->agreed = 0;
    for (int r = 0; r < m->nranks; r++) {
        close_tx(m, &m->peers[r]);
        m->peers[r].retry_ns = 0;
        reset_rx(m, &m->peers[r]);
    }
    for (int i = 0; i < MAX_PENDING; i++)
        close_rx(m, &m->pending[i]);
}

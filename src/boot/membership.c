/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every rank connects to every other rank that is not excluded. A rank sends only on connections that it made and
 * receives only on connections that it accepted. So both ranks of a connection take part in the round, and a rank
 * detects a closed port when it connects to it.
 *
 *   rank a                                               rank b
 *   connect to b    -- VIEW (purpose, ranks that a ------->  adds those ranks to its own set and sends its own view
 *                           excludes, views it has)          again if that changes it
 *                   <------------------------------ VIEW --
 *   ... until all ranks that are left have sent the same set, and that they have a's view: agreed
 *                   -- DATA 1 ---------------------------->
 *                   <---------------------------- DATA 1 --  one all-gather; and so on
 *   close
 *
 * The set of excluded ranks only grows, so the views converge. When a connection is closed before its rank has agreed,
 * that rank gave up the round: this rank connects again. When it is closed later, that rank failed during the round.
 */
#include "boot/membership_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "boot/rendezvous.h"
#include "util/pause.h"
#include "util/runtime.h"
#include "util/status.h"

enum { BACKOFF_MIN_NS = 20000, BACKOFF_MAX_NS = 1000000, LINGER_MS = 300, END_MS = 1000 };

/* ---- Agreement ---------------------------------------------------------------------------------------------- */

/* Adds what the other ranks exclude. */
static epx_status merge_views(struct membership *m)
{
    if (m->left_out_by >= 0)
        return fail(
            EPX_ERR_PEER,
            "rank %d continues without rank %d, which is masked: call epx_mask_clean on all ranks to restore it",
            m->left_out_by, m->rank);
    for (int r = 0; r < m->nranks; r++) {
        const struct peer *peer = &m->peers[r];

        if (r == m->rank || m->excluded[r] || !peer->has_view)
            continue;
        if (peer->purpose != m->purpose)
            return fail(EPX_ERR_MISMATCH,
                        "rank %d and rank %d call different functions to recover: one epx_group_error_clear, the other"
                        " epx_mask_clean",
                        m->rank, r);
        for (int i = 0; i < m->nranks; i++)
            m->excluded[i] |= peer->excluded[i];
    }
    return EPX_OK;
}

static int all_agree(const struct membership *m)
{
    for (int r = 0; r < m->nranks; r++)
        if (r != m->rank && !m->excluded[r] &&
            (!m->peers[r].has_view || !m->peers[r].has[m->rank] ||
             memcmp(m->peers[r].excluded, m->excluded, (size_t)m->nranks) != 0))
            return 0;
    return 1;
}

/* Everything that can be done without waiting. */
static epx_status progress(struct membership *m)
{
    epx_status status = EPX_OK;

    m->progressed = 0;
    accept_pending(m);
    for (int r = 0; r < m->nranks && status == EPX_OK; r++) {
        struct peer *peer = &m->peers[r];

        if (r == m->rank || (m->excluded[r] && !peer->has_view)) /* an excluded rank that connects is told so */
            continue;
        if (!m->agreed)
            status = connect_peer(m, r);
        if (flush_tx(m, peer) && !m->agreed) {
            m->excluded[r] = 1;
            m->progressed = 1;
        }
        recv_frames(m, peer);
    }
    return status;
}

static epx_status too_late(const struct membership *m, int number)
{
    unsigned char *there = calloc((size_t)m->nranks, 1);
    char names[128];
    epx_status status;

    if (!there)
        return fail(EPX_ERR_MEMORY, "no memory for %d ranks", m->nranks);
    for (int r = 0; r < m->nranks; r++)
        there[r] = r == m->rank || m->excluded[r] ||
                   (number ? m->peers[r].data[number & 1].number == number : m->peers[r].arrived);
    if (absent_ranks(there, m->nranks, names, sizeof(names)))
        status =
            fail(EPX_ERR_TIMEOUT, "rank %d: %s did not join the recovery within %d ms", m->rank, names, m->timeout_ms);
    else
        status = fail(EPX_ERR_TIMEOUT, "rank %d: the ranks did not agree within %d ms on the ranks that are masked",
                      m->rank, m->timeout_ms);
    free(there);
    return status;
}

/* Sleeps, twice as long each time, while there is no progress. */
static void backoff(const struct membership *m, uint64_t *ns)
{
    *ns = m->progressed ? BACKOFF_MIN_NS : 2 * *ns < BACKOFF_MAX_NS ? 2 * *ns : BACKOFF_MAX_NS;
    if (!m->progressed)
        pause_ns(*ns);
}

/* Sends the view to all connected ranks if it has changed. */
static epx_status send_view(struct membership *m)
{
    const size_t n = (size_t)m->nranks;
    epx_status status = EPX_OK;
    int changed = memcmp(m->view, m->excluded, n) != 0;

    memcpy(m->view, m->excluded, n);
    for (size_t r = 0; r < n; r++) {
        changed |= m->view[n + r] != m->peers[r].has_view;
        m->view[n + r] = (uint8_t)m->peers[r].has_view;
    }
    for (int r = 0; changed && r < m->nranks && status == EPX_OK; r++)
        if (r != m->rank && !m->excluded[r] && m->peers[r].conn >= 0)
            status = queue_frame(m, &m->peers[r], FRAME_VIEW, m->purpose, m->view, 2 * n);
    return status;
}

/* After a mismatch: gives the other ranks time to receive this rank's view and to report the same. */
static epx_status linger(struct membership *m, epx_status status)
{
    const uint64_t until = host_now_ns() + (uint64_t)LINGER_MS * 1000000u;
    char text[512];

    snprintf(text, sizeof(text), "%s", epx_last_error());
    while (status == EPX_ERR_MISMATCH && host_now_ns() < until && progress(m) == EPX_OK)
        pause_ns(BACKOFF_MAX_NS);
    return fail(status, "%s", text);
}

epx_status membership_agree(struct membership *m, int purpose, uint8_t *excluded, int timeout_ms)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)timeout_ms * 1000000u;
    uint64_t ns = BACKOFF_MIN_NS;
    epx_status status = EPX_OK;

    membership_end(m);
    memcpy(m->excluded, excluded, (size_t)m->nranks);
    m->excluded[m->rank] = 0;
    memset(m->view, 0, 2 * (size_t)m->nranks);
    memcpy(m->view, m->excluded, (size_t)m->nranks);
    m->purpose = purpose;
    m->timeout_ms = timeout_ms;
    m->number = 0;
    m->left_out_by = -1;
    m->failed = EPX_OK;
    for (int r = 0; r < m->nranks; r++)
        m->peers[r].arrived = 0;
    for (;;) {
        status = progress(m);
        if (status == EPX_OK)
            status = merge_views(m);
        if (status == EPX_OK)
            status = send_view(m);
        if (status != EPX_OK)
            return linger(m, status);
        if (all_agree(m))
            break;
        if (host_now_ns() >= deadline)
            return too_late(m, 0);
        backoff(m, &ns);
    }
    m->agreed = 1;
    memcpy(excluded, m->excluded, (size_t)m->nranks);
    return EPX_OK;
}

/* ---- All-gather --------------------------------------------------------------------------------------------- */

/* *all: the data of all ranks has arrived. Fails when the data of a rank cannot arrive any more. */
static epx_status check_arrivals(const struct membership *m, int number, size_t bytes, int *all)
{
    *all = 1;
    for (int r = 0; r < m->nranks; r++) {
        const struct peer *peer = &m->peers[r];
        const int there = peer->data[number & 1].number == number && peer->data[number & 1].data;

        if (r == m->rank || m->excluded[r])
            continue;
        if (there && peer->data[number & 1].bytes != bytes)
            return fail(EPX_ERR_MISMATCH, "rank %d sends %zu bytes to an all-gather, rank %d %zu", m->rank, bytes, r,
                        peer->data[number & 1].bytes);
        if (!there && peer->rx.conn < 0)
            return fail(EPX_ERR_PEER, "rank %d ended or gave up during the recovery", r);
        *all &= there;
    }
    return EPX_OK;
}

static epx_status gather(struct membership *m, const void *send, void *recv, size_t bytes)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)m->timeout_ms * 1000000u;
    const int number = ++m->number;
    uint64_t ns = BACKOFF_MIN_NS;
    epx_status status = EPX_OK;
    int all = 0;

    for (int r = 0; r < m->nranks && status == EPX_OK; r++)
        if (r != m->rank && !m->excluded[r])
            status = queue_frame(m, &m->peers[r], FRAME_DATA, number, send, bytes);
    while (status == EPX_OK) {
        status = progress(m);
        if (status == EPX_OK)
            status = check_arrivals(m, number, bytes, &all);
        if (all || status != EPX_OK)
            break;
        if (host_now_ns() >= deadline)
            return too_late(m, number);
        backoff(m, &ns);
    }
    if (status != EPX_OK)
        return status;
    for (int r = 0; r < m->nranks; r++) {
        char *to = (char *)recv + (size_t)r * bytes;
        if (m->excluded[r])
            memset(to, 0, bytes);
        else
            memmove(to, r == m->rank ? send : m->peers[r].data[number & 1].data, bytes);
    }
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

/* ---- Open and close ----------------------------------------------------------------------------------------- */

static int all_sent(const struct membership *m)
{
    for (int r = 0; r < m->nranks; r++)
        if (m->peers[r].conn >= 0 && m->peers[r].sent < m->peers[r].length)
            return 0;
    return 1;
}

void membership_end(struct membership *m)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)END_MS * 1000000u;

    /* Sends what is still queued. */
    while (m->agreed && !all_sent(m) && host_now_ns() < deadline) {
        for (int r = 0; r < m->nranks; r++)
            flush_tx(m, &m->peers[r]);
        if (!all_sent(m))
            pause_ns(BACKOFF_MIN_NS);
    }
    m->agreed = 0;
    for (int r = 0; r < m->nranks; r++) {
        close_tx(m, &m->peers[r]);
        m->peers[r].retry_ns = 0;
        reset_rx(m, &m->peers[r]);
    }
    for (int i = 0; i < MAX_PENDING; i++)
        close_rx(m, &m->pending[i]);
}

void membership_set_peers(struct membership *m, const struct conn_address *all, uint64_t token)
{
    memcpy(m->addresses, all, (size_t)m->nranks * sizeof(*all));
    m->token = token;
}

epx_status membership_open(int rank, int nranks, int one_host, const uint8_t *key, struct conn_address *own,
                           struct membership **out)
{
    const size_t n = (size_t)nranks;
    struct membership *m = calloc(1, sizeof(*m));
    epx_status status;

    *out = NULL;
    if (!m)
        return fail(EPX_ERR_MEMORY, "no memory for the membership of %d ranks", nranks);
    m->ops = runtime()->conns ? runtime()->conns : &conn_socket_ops;
    m->rank = rank;
    m->nranks = nranks;
    for (int i = 0; i < MAX_PENDING; i++)
        m->pending[i].conn = -1;
    m->addresses = calloc(n, sizeof(*m->addresses));
    m->peers = calloc(n, sizeof(*m->peers));
    m->excluded = calloc(3 + 2 * n, n); /* excluded, view, then excluded and has of every peer */
    m->view = m->excluded ? m->excluded + n : NULL;
    for (size_t r = 0; m->peers && m->excluded && r < n; r++) {
        m->peers[r].excluded = m->excluded + (3 + 2 * r) * n;
        m->peers[r].has = m->excluded + (4 + 2 * r) * n;
    }
    for (int r = 0; m->peers && r < nranks; r++)
        m->peers[r].conn = m->peers[r].rx.conn = -1;
    if (!m->addresses || !m->peers || !m->excluded)
        status = fail(EPX_ERR_MEMORY, "no memory for the membership of %d ranks", nranks);
    else
        status = m->ops->port_open(rank, one_host, key, own, &m->port);
    if (status != EPX_OK) {
        membership_close(m);
        return status;
    }
    *out = m;
    return EPX_OK;
}

void membership_close(struct membership *m)
{
    if (!m)
        return;
    if (m->port) {
        membership_end(m);
        m->ops->port_close(m->port);
    }
    for (int r = 0; m->peers && r < m->nranks; r++)
        free(m->peers[r].tx);
    free(m->peers);
    free(m->addresses);
    free(m->excluded);
    free(m);
}

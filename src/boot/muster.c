/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every rank calls every other one that is not out and speaks on that line alone; what it hears comes on the lines that
 * others call. So both ends of a line are in the meeting, and a port that is gone is noticed by whoever calls it.
 *
 *   rank a                                               rank b
 *   call b's port    -- CARD (purpose, whom a leaves out, -->  adds those to its own, says its card anew if that
 *                            whose cards it has)                changes it
 *                    <------------------------------ CARD --
 *   ... until all that are left say the same, and that they have a's card: agreed
 *                    -- DATA 1 ----------------------------->
 *                    <---------------------------- DATA 1 --   one all-gather; and so on
 *   hang up
 *
 * Whom a rank leaves out only grows, so the cards come to rest. A line that ends before its rank has agreed was a
 * meeting given up: it is called again. A line that ends later is a rank that failed in the midst of it.
 */
#include "boot/muster.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "boot/meet.h"
#include "util/pause.h"
#include "util/status.h"

enum {
    FRAME_MAGIC = 0x4d585045, /* "EPXM" */
    PAYLOAD_MOST = 64 << 20,
    VISITORS = 64,
    VISIT_NS = 2000000000, /* what a caller gets to say who it is */
    REDIAL_NS = 20000000,
    NAP_LEAST_NS = 20000,
    NAP_MOST_NS = 1000000,
    LINGER_MS = 300,
    END_MS = 1000
};

enum frame_kind { FRAME_CARD = 1, FRAME_DATA = 2 };

struct frame {
    uint32_t magic;
    uint32_t kind;
    uint64_t token;
    int32_t rank;
    int32_t number; /* CARD: purpose; DATA: of the all-gather */
    uint64_t bytes;
};
static_assert(sizeof(struct frame) == 32, "on the wire");

/* A line that is heard. */
struct ear {
    int line; /* -1 = none */
    struct frame frame;
    size_t got; /* of frame and payload */
    char *payload;
    uint64_t since_ns;
};

struct peer {
    int line; /* that this rank speaks on; -1 = none */
    uint64_t redial_ns;
    char *text; /* to be said: [said, length) */
    size_t said, length, room;
    struct ear ear;
    int came; /* in this meeting, though it may have hung up since */
    int has_card, purpose;
    uint8_t *out, *has; /* [nranks]: as its card says */
    struct {
        int number;
        size_t bytes;
        char *data;
    } data[2]; /* of the last two all-gathers */
};

struct muster {
    const struct line_ops *ops;
    struct line_port *port;
    int rank, nranks, timeout_ms;
    uint64_t token;
    struct line_address *addresses;
    struct peer *peers;
    struct ear visitors[VISITORS]; /* lines whose rank is not known yet */
    uint8_t *out;                  /* [nranks] */
    uint8_t *card;                 /* as said last: out[nranks], has[nranks] */
    int purpose, number, agreed;
    int left_out_by; /* a rank that goes on without this one, or -1 */
    int moved;       /* something happened in this turn */
    epx_status gone; /* how a gather of this meeting has failed; EPX_OK = none has */
};

/* ---- Speaking ----------------------------------------------------------------------------------------------- */

static epx_status tell(struct muster *m, struct peer *peer, enum frame_kind kind, int number, const void *data,
                       size_t bytes)
{
    const struct frame frame = {
        .magic = FRAME_MAGIC, .kind = kind, .token = m->token, .rank = m->rank, .number = number, .bytes = bytes};
    const size_t need = peer->length + sizeof(frame) + bytes;

    if (need > peer->room) {
        char *larger = realloc(peer->text, 2 * need);
        if (!larger)
            return fail(EPX_ERR_MEMORY, "no memory for a message of %zu bytes", bytes);
        peer->text = larger;
        peer->room = 2 * need;
    }
    memcpy(peer->text + peer->length, &frame, sizeof(frame));
    if (bytes)
        memcpy(peer->text + peer->length + sizeof(frame), data, bytes);
    peer->length = need;
    return EPX_OK;
}

static void lose_line(struct muster *m, struct peer *peer)
{
    if (peer->line >= 0)
        m->ops->hang_up(m->port, peer->line);
    peer->line = -1;
    peer->said = peer->length = 0;
    peer->redial_ns = host_now_ns() + REDIAL_NS;
}

/* Non-zero: the peer's port is gone. */
static int speak(struct muster *m, struct peer *peer)
{
    int n = -EAGAIN;

    while (peer->line >= 0 && peer->said < peer->length) {
        n = m->ops->say(m->port, peer->line, peer->text + peer->said, peer->length - peer->said);
        if (n <= 0)
            break;
        peer->said += (size_t)n;
        m->moved = 1;
    }
    if (peer->said == peer->length)
        peer->said = peer->length = 0;
    if (peer->line >= 0 && (n >= 0 || n == -EAGAIN)) { /* nobody answers on this line, but may hang up */
        char nothing;
        n = m->ops->hear(m->port, peer->line, &nothing, 1);
    }
    if (n >= 0 || n == -EAGAIN)
        return 0;
    lose_line(m, peer);
    return n == -ECONNREFUSED;
}

static epx_status dial(struct muster *m, int rank)
{
    struct peer *peer = &m->peers[rank];
    int line;

    if (peer->line >= 0 || host_now_ns() < peer->redial_ns)
        return EPX_OK;
    line = m->ops->call(m->port, &m->addresses[rank]);
    if (line == -ECONNREFUSED) {
        m->out[rank] = 1;
        m->moved = 1;
        return EPX_OK;
    }
    if (line == -EMFILE || line == -ENFILE) {
        errno = -line;
        return fail_errno(EPX_ERR_SYSTEM, "rank %d cannot call rank %d", m->rank, rank);
    }
    if (line < 0) { /* no way there just now */
        peer->redial_ns = host_now_ns() + REDIAL_NS;
        return EPX_OK;
    }
    peer->line = line;
    m->moved = 1;
    return tell(m, peer, FRAME_CARD, m->purpose, m->card, 2 * (size_t)m->nranks);
}

/* ---- Hearing ------------------------------------------------------------------------------------------------ */

static void stop_hearing(struct muster *m, struct ear *ear)
{
    if (ear->line >= 0)
        m->ops->hang_up(m->port, ear->line);
    free(ear->payload);
    memset(ear, 0, sizeof(*ear));
    ear->line = -1;
}

/* Of this group, and of a size that can be. */
static int is_sound(const struct muster *m, const struct frame *f)
{
    if (f->magic != FRAME_MAGIC || f->token != m->token || f->rank < 0 || f->rank >= m->nranks || f->rank == m->rank)
        return 0;
    return f->kind == FRAME_CARD ? f->bytes == 2 * (uint64_t)m->nranks
                                 : f->kind == FRAME_DATA && f->bytes <= PAYLOAD_MOST;
}

/* 1: a whole frame is there; 0: not yet; -1: the line is to be given up. */
static int hear(struct muster *m, struct ear *ear)
{
    const size_t head = sizeof(ear->frame);

    for (;;) {
        const size_t want = ear->got < head ? head - ear->got : (size_t)ear->frame.bytes - (ear->got - head);
        char *to = ear->got < head ? (char *)&ear->frame + ear->got : ear->payload + (ear->got - head);
        int n;

        if (ear->got >= head && !want)
            return 1;
        n = m->ops->hear(m->port, ear->line, to, want);
        if (n <= 0)
            return n == -EAGAIN ? 0 : -1;
        m->moved = 1;
        ear->got += (size_t)n;
        if (ear->got != head)
            continue;
        if (!is_sound(m, &ear->frame) || !(ear->payload = malloc((size_t)ear->frame.bytes + 1)))
            return -1;
    }
}

/* Takes the frame that `peer`'s ear holds. */
static void take_frame(struct muster *m, struct peer *peer)
{
    struct ear *ear = &peer->ear;

    if (ear->frame.kind == FRAME_CARD) {
        peer->has_card = peer->came = 1;
        peer->purpose = ear->frame.number;
        memcpy(peer->out, ear->payload, (size_t)m->nranks);
        memcpy(peer->has, ear->payload + m->nranks, (size_t)m->nranks);
        free(ear->payload);
        if (peer->out[m->rank] && peer->purpose == m->purpose)
            m->left_out_by = ear->frame.rank; /* also if it has hung up since, being through */
    } else {
        const int turn = ear->frame.number & 1;
        free(peer->data[turn].data);
        peer->data[turn].data = ear->payload;
        peer->data[turn].bytes = (size_t)ear->frame.bytes;
        peer->data[turn].number = ear->frame.number;
    }
    ear->payload = NULL;
    ear->got = 0;
}

/* Everything of the peer's last call. */
static void forget_words(struct muster *m, struct peer *peer)
{
    stop_hearing(m, &peer->ear);
    peer->has_card = 0;
    for (int i = 0; i < 2; i++) {
        free(peer->data[i].data);
        memset(&peer->data[i], 0, sizeof(peer->data[i]));
    }
}

static void listen_to(struct muster *m, struct peer *peer)
{
    int state = 1;

    while (peer->ear.line >= 0 && (state = hear(m, &peer->ear)) > 0)
        take_frame(m, peer);
    if (state >= 0)
        return;
    m->moved = 1;
    if (m->agreed)
        stop_hearing(m, &peer->ear); /* what it has said before still counts */
    else
        forget_words(m, peer);
}

/* A visitor that has said who it is. */
static void welcome(struct muster *m, struct ear *visitor)
{
    struct peer *peer = &m->peers[visitor->frame.rank];

    if (m->agreed) { /* it is through, or has given up, and begins anew: it calls again when this meeting is over, too */
        stop_hearing(m, visitor);
        return;
    }
    forget_words(m, peer);
    peer->ear = *visitor;
    memset(visitor, 0, sizeof(*visitor));
    visitor->line = -1;
    take_frame(m, peer);
}

static void receive_visitors(struct muster *m)
{
    for (int i = 0; i < VISITORS; i++) {
        struct ear *visitor = &m->visitors[i];
        int state;

        if (visitor->line < 0) {
            visitor->line = m->ops->answer(m->port);
            if (visitor->line < 0) {
                visitor->line = -1;
                continue;
            }
            visitor->since_ns = host_now_ns();
            m->moved = 1;
        }
        state = hear(m, visitor);
        if (state > 0)
            welcome(m, visitor);
        else if (state < 0 || host_now_ns() - visitor->since_ns > VISIT_NS)
            stop_hearing(m, visitor);
    }
}

/* ---- Agreeing ----------------------------------------------------------------------------------------------- */

/* Learns from the others' cards. */
static epx_status learn(struct muster *m)
{
    if (m->left_out_by >= 0)
        return fail(EPX_ERR_PEER,
                    "rank %d goes on without rank %d, which is masked: epx_mask_clean on all ranks brings it back",
                    m->left_out_by, m->rank);
    for (int r = 0; r < m->nranks; r++) {
        const struct peer *peer = &m->peers[r];

        if (r == m->rank || m->out[r] || !peer->has_card)
            continue;
        if (peer->purpose != m->purpose)
            return fail(EPX_ERR_MISMATCH,
                        "rank %d and rank %d call different functions to go on: one clears an error, one"
                        " cleans the mask",
                        m->rank, r);
        for (int i = 0; i < m->nranks; i++)
            m->out[i] |= peer->out[i];
    }
    return EPX_OK;
}

static int all_agree(const struct muster *m)
{
    for (int r = 0; r < m->nranks; r++)
        if (r != m->rank && !m->out[r] &&
            (!m->peers[r].has_card || !m->peers[r].has[m->rank] ||
             memcmp(m->peers[r].out, m->out, (size_t)m->nranks) != 0))
            return 0;
    return 1;
}

/* Everything that can be done without waiting. */
static epx_status turn(struct muster *m)
{
    epx_status status = EPX_OK;

    m->moved = 0;
    receive_visitors(m);
    for (int r = 0; r < m->nranks && status == EPX_OK; r++) {
        struct peer *peer = &m->peers[r];

        if (r == m->rank || (m->out[r] && !peer->has_card)) /* one that is out and calls all the same is told so */
            continue;
        if (!m->agreed)
            status = dial(m, r);
        if (speak(m, peer) && !m->agreed) {
            m->out[r] = 1;
            m->moved = 1;
        }
        listen_to(m, peer);
    }
    return status;
}

static epx_status too_late(const struct muster *m, int number)
{
    unsigned char *there = calloc((size_t)m->nranks, 1);
    char names[128];
    epx_status status;

    if (!there)
        return fail(EPX_ERR_MEMORY, "no memory for %d ranks", m->nranks);
    for (int r = 0; r < m->nranks; r++)
        there[r] =
            r == m->rank || m->out[r] || (number ? m->peers[r].data[number & 1].number == number : m->peers[r].came);
    if (absent_ranks(there, m->nranks, names, sizeof(names)))
        status = fail(EPX_ERR_TIMEOUT, "rank %d: %s did not come to go on with the others within %d ms", m->rank, names,
                      m->timeout_ms);
    else
        status = fail(EPX_ERR_TIMEOUT, "rank %d: the ranks did not agree on who is masked within %d ms", m->rank,
                      m->timeout_ms);
    free(there);
    return status;
}

/* Longer and longer, while nothing happens. */
static void nap(const struct muster *m, uint64_t *ns)
{
    *ns = m->moved ? NAP_LEAST_NS : 2 * *ns < NAP_MOST_NS ? 2 * *ns : NAP_MOST_NS;
    if (!m->moved)
        pause_ns(*ns);
}

/* To all that have been called, where it has changed. */
static epx_status say_card(struct muster *m)
{
    const size_t n = (size_t)m->nranks;
    epx_status status = EPX_OK;
    int changed = memcmp(m->card, m->out, n) != 0;

    memcpy(m->card, m->out, n);
    for (size_t r = 0; r < n; r++) {
        changed |= m->card[n + r] != m->peers[r].has_card;
        m->card[n + r] = (uint8_t)m->peers[r].has_card;
    }
    for (int r = 0; changed && r < m->nranks && status == EPX_OK; r++)
        if (r != m->rank && !m->out[r] && m->peers[r].line >= 0)
            status = tell(m, &m->peers[r], FRAME_CARD, m->purpose, m->card, 2 * n);
    return status;
}

/* A moment more for the others to hear what this rank has against it. */
static epx_status linger(struct muster *m, epx_status status)
{
    const uint64_t until = host_now_ns() + (uint64_t)LINGER_MS * 1000000u;
    char text[512];

    snprintf(text, sizeof(text), "%s", epx_last_error());
    while (status == EPX_ERR_MISMATCH && host_now_ns() < until && turn(m) == EPX_OK)
        pause_ns(NAP_MOST_NS);
    return fail(status, "%s", text);
}

epx_status muster_begin(struct muster *m, int purpose, uint8_t *out, int timeout_ms)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)timeout_ms * 1000000u;
    uint64_t ns = NAP_LEAST_NS;
    epx_status status = EPX_OK;

    muster_end(m);
    memcpy(m->out, out, (size_t)m->nranks);
    m->out[m->rank] = 0;
    memset(m->card, 0, 2 * (size_t)m->nranks);
    memcpy(m->card, m->out, (size_t)m->nranks);
    m->purpose = purpose;
    m->timeout_ms = timeout_ms;
    m->number = 0;
    m->left_out_by = -1;
    m->gone = EPX_OK;
    for (int r = 0; r < m->nranks; r++)
        m->peers[r].came = 0;
    for (;;) {
        status = turn(m);
        if (status == EPX_OK)
            status = learn(m);
        if (status == EPX_OK)
            status = say_card(m);
        if (status != EPX_OK)
            return linger(m, status);
        if (all_agree(m))
            break;
        if (host_now_ns() >= deadline)
            return too_late(m, 0);
        nap(m, &ns);
    }
    m->agreed = 1;
    memcpy(out, m->out, (size_t)m->nranks);
    return EPX_OK;
}

/* ---- Gathering ---------------------------------------------------------------------------------------------- */

/* *all: everybody has said theirs. A failure: somebody will not. */
static epx_status look_around(const struct muster *m, int number, size_t bytes, int *all)
{
    *all = 1;
    for (int r = 0; r < m->nranks; r++) {
        const struct peer *peer = &m->peers[r];
        const int there = peer->data[number & 1].number == number && peer->data[number & 1].data;

        if (r == m->rank || m->out[r])
            continue;
        if (there && peer->data[number & 1].bytes != bytes)
            return fail(EPX_ERR_INTERNAL, "rank %d gathers %zu bytes, rank %d %zu", m->rank, bytes, r,
                        peer->data[number & 1].bytes);
        if (!there && peer->ear.line < 0)
            return fail(EPX_ERR_PEER, "rank %d ended, or gave up, while the ranks were meeting to go on", r);
        *all &= there;
    }
    return EPX_OK;
}

static epx_status gather(struct muster *m, const void *send, void *recv, size_t bytes)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)m->timeout_ms * 1000000u;
    const int number = ++m->number;
    uint64_t ns = NAP_LEAST_NS;
    epx_status status = EPX_OK;
    int all = 0;

    for (int r = 0; r < m->nranks && status == EPX_OK; r++)
        if (r != m->rank && !m->out[r])
            status = tell(m, &m->peers[r], FRAME_DATA, number, send, bytes);
    while (status == EPX_OK) {
        status = turn(m);
        if (status == EPX_OK)
            status = look_around(m, number, bytes, &all);
        if (all || status != EPX_OK)
            break;
        if (host_now_ns() >= deadline)
            return too_late(m, number);
        nap(m, &ns);
    }
    if (status != EPX_OK)
        return status;
    for (int r = 0; r < m->nranks; r++) {
        char *to = (char *)recv + (size_t)r * bytes;
        if (m->out[r])
            memset(to, 0, bytes);
        else
            memmove(to, r == m->rank ? send : m->peers[r].data[number & 1].data, bytes);
    }
    return EPX_OK;
}

/* After one that failed, others may be a step further than this rank: what it says next would be taken for that step. The
 * meeting is over, and the last failure's words stand. */
epx_status muster_gather(struct muster *m, const void *send, void *recv, size_t bytes)
{
    if (m->gone == EPX_OK)
        m->gone = gather(m, send, recv, bytes);
    return m->gone;
}

/* ---- Opening and ending ------------------------------------------------------------------------------------- */

static int all_spoken(const struct muster *m)
{
    for (int r = 0; r < m->nranks; r++)
        if (m->peers[r].line >= 0 && m->peers[r].said < m->peers[r].length)
            return 0;
    return 1;
}

void muster_end(struct muster *m)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)END_MS * 1000000u;

    /* The last words still reach those that have not heard them. */
    while (m->agreed && !all_spoken(m) && host_now_ns() < deadline) {
        for (int r = 0; r < m->nranks; r++)
            speak(m, &m->peers[r]);
        if (!all_spoken(m))
            pause_ns(NAP_LEAST_NS);
    }
    m->agreed = 0;
    for (int r = 0; r < m->nranks; r++) {
        lose_line(m, &m->peers[r]);
        m->peers[r].redial_ns = 0;
        forget_words(m, &m->peers[r]);
    }
    for (int i = 0; i < VISITORS; i++)
        stop_hearing(m, &m->visitors[i]);
}

void muster_know(struct muster *m, const struct line_address *all, uint64_t token)
{
    memcpy(m->addresses, all, (size_t)m->nranks * sizeof(*all));
    m->token = token;
}

epx_status muster_open(int rank, int nranks, int near, struct line_address *own, struct muster **out)
{
    const size_t n = (size_t)nranks;
    struct muster *m = calloc(1, sizeof(*m));
    epx_status status;

    *out = NULL;
    if (!m)
        return fail(EPX_ERR_MEMORY, "no memory for the meetings of %d ranks", nranks);
    m->ops = line_override ? line_override : &line_socket_ops;
    m->rank = rank;
    m->nranks = nranks;
    for (int i = 0; i < VISITORS; i++)
        m->visitors[i].line = -1;
    m->addresses = calloc(n, sizeof(*m->addresses));
    m->peers = calloc(n, sizeof(*m->peers));
    m->out = calloc(3 + 2 * n, n); /* out, card, then out and has of every peer */
    m->card = m->out ? m->out + n : NULL;
    for (size_t r = 0; m->peers && m->out && r < n; r++) {
        m->peers[r].out = m->out + (3 + 2 * r) * n;
        m->peers[r].has = m->out + (4 + 2 * r) * n;
    }
    for (int r = 0; m->peers && r < nranks; r++)
        m->peers[r].line = m->peers[r].ear.line = -1;
    if (!m->addresses || !m->peers || !m->out)
        status = fail(EPX_ERR_MEMORY, "no memory for the meetings of %d ranks", nranks);
    else
        status = m->ops->open(rank, near, own, &m->port);
    if (status != EPX_OK) {
        muster_close(m);
        return status;
    }
    *out = m;
    return EPX_OK;
}

void muster_close(struct muster *m)
{
    if (!m)
        return;
    if (m->port) {
        muster_end(m);
        m->ops->close(m->port);
    }
    for (int r = 0; m->peers && r < m->nranks; r++)
        free(m->peers[r].text);
    free(m->peers);
    free(m->addresses);
    free(m->out);
    free(m);
}

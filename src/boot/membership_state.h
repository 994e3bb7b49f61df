/* SPDX-License-Identifier: Apache-2.0 */
/* Internal to membership*.c: the state of a rank, and its connections. membership.c has the protocol. */
#ifndef EPX_BOOT_MEMBERSHIP_STATE_H
#define EPX_BOOT_MEMBERSHIP_STATE_H

#include <assert.h>

#include "boot/membership.h"

enum { MAX_PENDING = 64 };

enum frame_kind {
    FRAME_VIEW = 1,   /* excluded[nranks], arrived[nranks] */
    FRAME_DATA = 2,   /* to the coordinator: a rank's part; from it: the result */
    FRAME_COMMIT = 3, /* excluded[nranks]: agreed */
    FRAME_FAIL = 4,   /* struct failure: the round is over */
    FRAME_JOIN = 16,  /* from here on: frames of membership_join.c, which are no part of a round */
    FRAME_REPLY = 17
};

struct failure {
    int32_t status;
    char text[252];
};
static_assert(sizeof(struct failure) == 256, "on the wire");

struct frame {
    uint32_t magic;
    uint32_t kind;
    uint64_t token;
    int32_t rank;
    int32_t number; /* VIEW: the purpose; DATA: the number of the all-gather */
    uint64_t bytes;
};
static_assert(sizeof(struct frame) == 32, "on the wire");

/* The receive side of a connection that was accepted. */
struct rx {
    int conn; /* -1 = none */
    struct frame frame;
    size_t got; /* bytes of frame and payload */
    char *payload;
    uint64_t since_ns;
};

struct peer {
    int conn; /* to the peer, for sending; -1 = none */
    uint64_t retry_ns;
    char *tx; /* still to be sent: [sent, length), then result[result_sent, result_bytes) */
    size_t sent, length, room;
    const char *result; /* of an all-gather, in membership.result; NULL = none */
    size_t result_sent, result_bytes;
    int told;   /* coordinator: a FAIL was sent */
    int viewed; /* this rank has sent it a view in this round */
    struct rx rx;
    int arrived; /* it sent a view in this round, though it may have closed the connection since */
    int has_view, purpose;
    int fresh;         /* its view is not merged yet */
    uint8_t *excluded; /* [nranks]: from its view */
    struct {
        int number;
        size_t bytes;
        char *data;
    } data[2]; /* of the last two all-gathers */
};

enum { MAX_JOINERS = 16 };

/* A process that asks to take the place of a rank. Its connection stays open as long as it waits. */
struct joiner {
    struct rx rx;
    struct membership_joiner who; /* `request` is in `payload` */
    char *payload;
};

struct membership {
    const struct conn_ops *ops;
    struct conn_port *port;
    int rank, nranks, timeout_ms;
    uint64_t token;
    struct conn_address *addresses;
    struct peer *peers;
    struct rx pending[MAX_PENDING]; /* accepted connections whose rank is not known yet */
    uint8_t *excluded;              /* [nranks] */
    uint8_t *view;                  /* as sent last: excluded[nranks], arrived[nranks] */
    uint8_t *reported;              /* [nranks]: ranks that have arrived, by the coordinator's last report */
    uint64_t reported_ns;           /* when */
    uint64_t view_ns;               /* when `view` was sent last */
    int purpose, number, agreed;
    int coordinator; /* of the round: the lowest rank that is not excluded; fixed once agreed */
    char *result[2]; /* coordinator: of the last two all-gathers; ranks that still wait for one send nothing new */
    int fail_from;   /* the rank that sent `failure`, or -1 */
    struct failure failure;
    uint64_t no_files_ns;       /* since when this process has no descriptor for a connection; 0 = it has */
    int left_out_by;            /* in this round: a rank that excludes this one, or -1 */
    uint8_t *without;           /* [nranks]: who goes on without this rank, as those have said in any round so far, or
                                 * may, by membership_was_late() */
    int late_for;               /* who said so then, or -1 */
    void (*silence)(void *arg); /* membership_on_silence() */
    void *silence_arg;
    int silence_ms;
    int progressed;         /* the last progress() did something */
    epx_status failed;      /* status of the first all-gather of this round that failed */
    uint64_t *incarnations; /* [nranks]: 0 = the process that has created the group */
    int *processes;         /* [nranks]: descriptors of those on this machine (pidfd); -1 = none */
    struct joiner joiners[MAX_JOINERS];
    struct rx reply; /* to this rank, which asks to join; payload NULL = none yet */
};

/* ---- Connections: membership_conn.c ---------------------------------------------------------------------------- */

/* For rank `rank` of a group: of this group, and of a possible size. */
int frame_is_valid(const struct frame *frame, uint64_t token, int rank, int nranks);
/* Whether this rank sends to `rank` in this round. */
int is_in_touch(const struct membership *m, int rank);
int lowest_left(const struct membership *m);
epx_status queue_frame(struct membership *m, struct peer *peer, enum frame_kind kind, int number, const void *data,
                       size_t bytes);
void close_tx(struct membership *m, struct peer *peer);
/* Queues a frame whose data is sent from where it is: it must stay until it is sent or the connection closed. */
epx_status queue_result(struct membership *m, struct peer *peer, int number, const char *data, size_t bytes);
int is_sent(const struct peer *peer);
/* Non-zero: the peer's port does not exist any more. */
int flush_tx(struct membership *m, struct peer *peer);
epx_status connect_peer(struct membership *m, int rank);
void close_rx(struct membership *m, struct rx *rx);
/* Drops everything that was received on the peer's last connection. */
void reset_rx(struct membership *m, struct peer *peer);
void recv_frames(struct membership *m, struct peer *peer);
void accept_pending(struct membership *m);
/* Its process is known here, and has ended. */
int process_has_ended(const struct membership *m, int rank);
void forget_process(struct membership *m, int rank);

static inline int same_purpose(int a, int b)
{
    return a == b || a == MEMBERSHIP_ANY_PURPOSE || b == MEMBERSHIP_ANY_PURPOSE;
}

/* ---- Joining: membership_join.c ------------------------------------------------------------------------------- */

/* What the frames of a rank carry: processes that have taken the place of a rank differ from those before. */
uint64_t frame_token(const struct membership *m, uint32_t kind, int rank);
int join_frame_is_valid(const struct membership *m, const struct frame *frame);
/* Takes the frame of a pending connection, and the connection if it is needed. */
void join_take(struct membership *m, struct rx *pending);
void join_open(struct membership *m);
void join_close(struct membership *m);

#endif

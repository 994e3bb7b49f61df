/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames of membership.c: rank 1 of four agrees on who is left and gathers, while the input plays the connections of
 * all others, on a clock of its own.
 *
 *     what recv finds next: 0 a whole good frame with fields changed | 1 raw bytes | 2 the end | 3 nothing yet
 *
 * Whatever comes, it ends by its deadline; and when ranks have agreed, this rank is not among the excluded.
 */
#include <errno.h>

#include "fuzz.h"

#include "boot/membership.h"
#include "boot/membership_state.h"
#include "util/runtime.h"

enum {
    RANKS = 4,
    OWN = 1,
    CONNS = 64,
    PAYLOAD = sizeof(struct failure),
    TIMEOUT_MS = 50,
    TOKEN = 0x1234,
    MAGIC = 0x4d585045
};

static struct fuzz input;
static uint64_t clock_now;
static int conns;
static struct {
    uint8_t bytes[sizeof(struct frame) + PAYLOAD];
    size_t have, taken;
    int ended;
} received[CONNS];

static uint64_t now_ns(void)
{
    return clock_now += 1000;
}

static void pause_for(uint64_t ns)
{
    clock_now += ns;
}

/* ---- Connections ------------------------------------------------------------------------------------------------- */

static epx_status port_open(int rank, int one_host, const uint8_t *key, struct conn_address *own,
                            struct conn_port **port)
{
    (void)rank;
    (void)one_host;
    (void)key;
    memset(own, 0, sizeof(*own));
    *port = (struct conn_port *)&conns;
    return EPX_OK;
}

static int new_conn(void)
{
    if (conns == CONNS)
        return -EMFILE;
    memset(&received[conns], 0, sizeof(received[conns]));
    return conns++;
}

static int conn_connect(struct conn_port *port, const struct conn_address *to)
{
    (void)port;
    (void)to;
    switch (input.left ? fuzz_below(&input, 16) : 1) {
    case 0:
        return -ECONNREFUSED;
    case 1:
        return -EHOSTUNREACH;
    default:
        return new_conn();
    }
}

static int conn_accept(struct conn_port *port)
{
    (void)port;
    return input.left && fuzz_below(&input, 2) ? new_conn() : -EAGAIN;
}

static int conn_send(struct conn_port *port, int conn, const void *data, size_t bytes)
{
    (void)port;
    (void)data;
    FUZZ_REQUIRE(conn >= 0 && conn < conns && bytes);
    switch (input.left ? fuzz_below(&input, 16) : 2) {
    case 0:
        return -ENOTCONN;
    case 1:
        return -ECONNREFUSED;
    case 2:
        return -EAGAIN;
    case 3:
        return 1;
    default:
        return bytes > INT32_MAX ? INT32_MAX : (int)bytes;
    }
}

/* What a rank could send, with one field of another kind now and then. */
static void make_frame(int conn)
{
    struct frame frame = {.magic = MAGIC, .kind = FRAME_VIEW, .token = TOKEN, .bytes = 2 * (uint64_t)RANKS};
    const unsigned wrong = fuzz_below(&input, 16);
    uint8_t *at = received[conn].bytes;
    size_t payload;

    frame.rank = (int32_t)fuzz_below(&input, RANKS);
    frame.number = 7;
    if (fuzz_below(&input, 3) == 0) {
        frame.kind = FRAME_DATA;
        frame.number = (int32_t)fuzz_below(&input, 4);
        frame.bytes = fuzz_below(&input, 48);
    } else if (fuzz_below(&input, 3) == 0) {
        frame.kind = fuzz_below(&input, 2) ? FRAME_COMMIT : FRAME_FAIL;
        frame.bytes = frame.kind == FRAME_COMMIT ? RANKS : sizeof(struct failure);
    }
    frame.magic ^= wrong == 1 ? (uint32_t)fuzz_int(&input, 4) : 0;
    frame.kind ^= wrong == 2 ? (uint32_t)fuzz_int(&input, 4) : 0;
    frame.token ^= wrong == 3 ? fuzz_int(&input, 8) : 0;
    frame.rank = wrong == 4 ? (int32_t)fuzz_int(&input, 4) : frame.rank;
    frame.number = wrong == 5 ? (int32_t)fuzz_int(&input, 4) : frame.number;
    frame.bytes = wrong == 6 ? fuzz_int(&input, 8) : frame.bytes;
    memcpy(at, &frame, sizeof(frame));
    payload = frame.bytes < PAYLOAD ? (size_t)frame.bytes : PAYLOAD;
    fuzz_fill(&input, at + sizeof(frame), payload);
    for (size_t i = 0; frame.kind != FRAME_DATA && frame.kind != FRAME_FAIL && i < payload;
         i++) /* mostly: nobody is excluded, all have sent */
        at[sizeof(frame) + i] = at[sizeof(frame) + i] > 240 ? at[sizeof(frame) + i] : i >= RANKS;
    received[conn].have = sizeof(frame) + payload;
}

static int conn_recv(struct conn_port *port, int conn, void *data, size_t bytes)
{
    size_t left, n;

    (void)port;
    FUZZ_REQUIRE(conn >= 0 && conn < conns && bytes);
    if (received[conn].taken == received[conn].have) {
        received[conn].taken = received[conn].have = 0;
        if (received[conn].ended)
            return -ENOTCONN;
        switch (input.left ? fuzz_below(&input, 8) : 7) {
        case 0:
        case 1:
        case 2:
            make_frame(conn);
            break;
        case 3:
            received[conn].have = 1 + fuzz_below(&input, 255);
            fuzz_fill(&input, received[conn].bytes, received[conn].have);
            break;
        case 4:
            received[conn].ended = 1;
            return -ENOTCONN;
        default:
            return -EAGAIN;
        }
    }
    left = received[conn].have - received[conn].taken;
    n = bytes < left ? bytes : left;
    memcpy(data, received[conn].bytes + received[conn].taken, n);
    received[conn].taken += n;
    return (int)n;
}

static void conn_wait(struct conn_port *port, uint64_t ns)
{
    (void)port;
    clock_now += ns;
}

static void conn_close(struct conn_port *port, int conn)
{
    (void)port;
    FUZZ_REQUIRE(conn >= 0 && conn < conns);
    received[conn].ended = 1;
}

static void port_close(struct conn_port *port)
{
    FUZZ_REQUIRE(port);
}

static const struct conn_ops ops = {.port_open = port_open,
                                    .connect = conn_connect,
                                    .accept = conn_accept,
                                    .send = conn_send,
                                    .recv = conn_recv,
                                    .wait = conn_wait,
                                    .close = conn_close,
                                    .port_close = port_close};

/* ------------------------------------------------------------------------------------------------------------------ */

static void begin(void)
{
    const struct runtime own = {.now_ns = now_ns, .pause_ns = pause_for, .conns = &ops};

    fuzz_quiet();
    runtime_swap(&own);
}

FUZZ_BEGIN(begin)

/* A round: consensus, then all-gathers. */
static void round_of(struct membership *m)
{
    uint8_t excluded[RANKS] = {0};
    const uint64_t began = clock_now;
    epx_status status = membership_agree(m, 7, excluded, TIMEOUT_MS);

    FUZZ_REQUIRE(status >= EPX_OK && status <= EPX_ERR_INTERNAL);
    if (status == EPX_OK) {
        FUZZ_REQUIRE(!excluded[OWN]);
        for (int i = 0; i < 3 && status == EPX_OK; i++) {
            const size_t bytes = fuzz_below(&input, 40);
            uint8_t *send = calloc(1, bytes + 1), *recv = malloc(RANKS * bytes + 1);

            FUZZ_REQUIRE(send && recv);
            memset(send, 0xa5, bytes);
            status = membership_allgather(m, send, recv, bytes);
            if (status == EPX_OK)
                FUZZ_REQUIRE(!bytes || !memcmp(recv + OWN * bytes, send, bytes));
            for (int r = 0; status == EPX_OK && r < RANKS; r++)
                for (size_t at = 0; excluded[r] && at < bytes; at++)
                    FUZZ_REQUIRE(!recv[(size_t)r * bytes + at]);
            free(send);
            free(recv);
        }
    }
    membership_end(m);
    FUZZ_REQUIRE(clock_now - began < 8ull * TIMEOUT_MS * 1000000u + 2000000000u);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const struct conn_address all[RANKS] = {{0}};
    struct conn_address own;
    struct membership *m;

    input = (struct fuzz){data, bytes};
    clock_now = 1000;
    conns = 0;
    FUZZ_REQUIRE(membership_open(OWN, RANKS, 1, NULL, &own, &m) == EPX_OK);
    membership_set_peers(m, all, TOKEN);
    for (int i = 0; i < 2; i++)
        round_of(m);
    membership_close(m);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames of the bootstrap, and the records under them. The input is what the other end of a socket says:
 *
 *     0  hellos, one after the other, as rank 0 checks them
 *     1  all-gather, rank 0 of three: frames of both others      2  all-gather, another rank: what rank 0 sends
 *     3  a stranger at a port: greeting, proof, whatever          4  a stranger that a rank has connected to
 *     5  a rank that knows the key, and then sends raw bytes      6  ... and then sends frames in good records
 *
 * A stranger never gets past the handshake; what is received lies inside the caller's buffer; all of it ends at once,
 * because the other end has closed.
 */
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz.h"

#include "boot/allgather.h"
#include "boot/channel.h"
#include "boot/rendezvous.h"
#include "util/build.h"

enum { RANKS = 3, TIMEOUT_MS = 2000, GATHER = 24, SEQUENCE = 5, GROUP = 1 };

static const uint8_t key[CRYPTO_KEY] = "a key of the group, 32 bytes....";

FUZZ_BEGIN(fuzz_quiet)

/* A channel of ours whose other end is the returned socket. */
static int open_pair(struct channel *channel, const uint8_t *with, int server)
{
    int fds[2];

    FUZZ_REQUIRE(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds));
    FUZZ_REQUIRE(!channel_start(channel, fds[0], with, AUTH_RENDEZVOUS, server));
    return fds[1];
}

/* Says the next `bytes` of the input. */
static void send_bytes(int fd, struct fuzz *f, size_t bytes)
{
    const size_t n = bytes < f->left ? bytes : f->left;

    if (n)
        (void)!write(fd, f->at, n);
    f->at += n;
    f->left -= n;
}

static void end_conn(int fd)
{
    shutdown(fd, SHUT_WR);
}

/* ---- Hellos ------------------------------------------------------------------------------------------------------ */

static void hellos(struct fuzz *f)
{
    unsigned char present[RANKS] = {1};

    while (f->left) {
        struct wire_hello hello = {.magic = WIRE_HELLO_MAGIC, .build = build_number(), .nranks = RANKS};
        struct wire_error error;
        const unsigned how = fuzz_below(f, 4);

        hello.rank = (int32_t)fuzz_int(f, 1);
        if (how == 0)
            fuzz_fill(f, &hello, sizeof(hello));
        if (check_hello(&hello, RANKS, present) == EPX_OK) {
            FUZZ_REQUIRE(hello.rank > 0 && hello.rank < RANKS && !present[hello.rank]);
            present[hello.rank] = 1;
        }
        if (how == 3) {
            fuzz_fill(f, &error, sizeof(error));
            FUZZ_REQUIRE(fail_with(&error) > EPX_OK);
            for (const char *c = epx_last_error(); *c; c++)
                FUZZ_REQUIRE((unsigned char)*c >= 0x20 && *c != 0x7f);
        }
    }
}

/* ---- All-gathers ------------------------------------------------------------------------------------------------- */

/* A frame that fits, or nearly. */
static struct wire_frame draw_frame(struct fuzz *f, uint32_t op, uint64_t bytes)
{
    struct wire_frame frame = {
        .magic = WIRE_FRAME_MAGIC, .op = op, .sequence = SEQUENCE, .bytes = bytes, .group = GROUP};

    switch (fuzz_below(f, 10)) {
    case 0:
        frame.magic = (uint32_t)fuzz_int(f, 4);
        break;
    case 1:
        frame.op = fuzz_below(f, 10);
        break;
    case 2:
        frame.sequence = fuzz_int(f, 8);
        break;
    case 3:
        frame.bytes = fuzz_int(f, 8);
        break;
    case 4:
        frame.op = WIRE_ERROR;
        frame.bytes = fuzz_below(f, 4) ? sizeof(struct wire_error) : fuzz_int(f, 2);
        break;
    case 5:
        frame.group = (uint32_t)fuzz_int(f, 4);
        break;
    default:
        break;
    }
    return frame;
}

/* One end's part of a conversation, by `send`. */
static void converse(struct fuzz *f, uint32_t op, uint64_t bytes, void (*send)(void *to, const void *data, size_t n),
                     void *to)
{
    const int frames = 1 + (int)fuzz_below(f, 3);

    for (int i = 0; i < frames; i++) {
        const struct wire_frame frame = draw_frame(f, op, bytes);
        uint8_t payload[sizeof(struct wire_error)];
        size_t n = frame.op == WIRE_ERROR ? sizeof(payload) : (size_t)bytes;

        if (!fuzz_below(f, 6))
            n = fuzz_int(f, 2) % sizeof(payload);
        fuzz_fill(f, payload, n);
        send(to, &frame, sizeof(frame));
        send(to, payload, n);
    }
}

static void send_plain(void *to, const void *data, size_t n)
{
    if (n)
        (void)!write(*(int *)to, data, n);
}

static void send_sealed(void *to, const void *data, size_t n)
{
    if (n)
        (void)channel_send_all(to, data, n, deadline_in(0));
}

static struct gather make_gather(int rank, const void *send, void *recv)
{
    return (struct gather){.rank = rank,
                           .nranks = RANKS,
                           .timeout_ms = TIMEOUT_MS,
                           .sequence = SEQUENCE,
                           .group = GROUP,
                           .send = send,
                           .recv = recv,
                           .bytes = GATHER};
}

static void gather_root(struct fuzz *f)
{
    struct channel channels[RANKS] = {CHANNEL_CLOSED, CHANNEL_CLOSED, CHANNEL_CLOSED};
    uint8_t send[GATHER] = {1}, *recv = malloc(RANKS * GATHER);
    const struct gather gather = make_gather(0, send, recv);
    int others[RANKS] = {-1, -1, -1};

    FUZZ_REQUIRE(recv);
    for (int r = 1; r < RANKS; r++) {
        others[r] = open_pair(&channels[r], NULL, 1);
        if (fuzz_below(f, 4))
            converse(f, WIRE_GATHER, GATHER, send_plain, &others[r]);
        else
            send_bytes(others[r], f, fuzz_int(f, 1));
        end_conn(others[r]);
    }
    if (allgather_root(&gather, channels) == EPX_OK)
        FUZZ_REQUIRE(!memcmp(recv, send, GATHER));
    for (int r = 1; r < RANKS; r++) {
        channel_close(&channels[r]);
        close(others[r]);
    }
    free(recv);
}

static void gather_client(struct fuzz *f)
{
    struct channel channel = CHANNEL_CLOSED;
    uint8_t send[GATHER] = {1}, *recv = malloc(RANKS * GATHER);
    const struct gather gather = make_gather(1, send, recv);
    int other = open_pair(&channel, NULL, 0);

    FUZZ_REQUIRE(recv);
    if (fuzz_below(f, 4))
        converse(f, WIRE_RESULT, RANKS * GATHER, send_plain, &other);
    else
        send_bytes(other, f, f->left);
    end_conn(other);
    (void)allgather_client(&gather, &channel);
    channel_close(&channel);
    close(other);
    free(recv);
}

/* ---- Strangers --------------------------------------------------------------------------------------------------- */

static void stranger(struct fuzz *f, int server)
{
    struct channel channel = CHANNEL_CLOSED;
    struct auth_greeting greeting = {
        .magic = AUTH_MAGIC, .version = AUTH_VERSION, .purpose = (uint16_t)AUTH_RENDEZVOUS};
    const int other = open_pair(&channel, key, server), good = (int)fuzz_below(f, 4);
    struct auth auth;

    fuzz_fill(f, greeting.nonce, sizeof(greeting.nonce));
    if (good > 1 && !auth_start(&auth, key, AUTH_RENDEZVOUS, 0)) /* as one may send it again who has heard a rank */
        greeting = auth.client_greeting;
    if (good)
        (void)!write(other, &greeting, sizeof(greeting));
    while (f->left && channel_handshake(&channel) == 0)
        send_bytes(other, f, 1 + fuzz_int(f, 1));
    end_conn(other);
    FUZZ_REQUIRE(channel_handshake_all(&channel, deadline_in(TIMEOUT_MS)) < 0); /* but for 2^-256 */
    channel_close(&channel);
    close(other);
}

/* ---- Ranks that know the key ------------------------------------------------------------------------------------- */

/* Both ends of a connection whose handshake is done. */
static void open_known(struct channel *server, struct channel *client)
{
    FUZZ_REQUIRE(!channel_start(client, open_pair(server, key, 1), key, AUTH_RENDEZVOUS, 0));
    for (int i = 0; i < 8; i++) {
        (void)channel_handshake(client);
        (void)channel_handshake(server);
        (void)channel_send_all(client, NULL, 0, deadline_in(0));
    }
}

/* More follows than the longest record has, so that a record is received as far as its head says. */
static void raw_records(struct fuzz *f)
{
    static const uint8_t rest[3 * AUTH_RECORD];
    struct channel server, client;
    uint8_t first = 0, got[64];

    open_known(&server, &client);
    (void)channel_send_all(&client, &first, 1, deadline_in(0)); /* the proof travels before it */
    FUZZ_REQUIRE(channel_handshake(&server) == 1);
    FUZZ_REQUIRE(!channel_receive_all(&server, got, 1, deadline_in(TIMEOUT_MS)));
    send_bytes(client.fd, f, f->left);
    (void)!write(client.fd, rest, sizeof(rest));
    end_conn(client.fd);
    FUZZ_REQUIRE(channel_receive_all(&server, got, sizeof(got), deadline_in(TIMEOUT_MS)) < 0);
    channel_close(&server);
    channel_close(&client);
}

static void sealed_frames(struct fuzz *f)
{
    struct channel channels[RANKS] = {CHANNEL_CLOSED, CHANNEL_CLOSED, CHANNEL_CLOSED}, others[RANKS];
    uint8_t send[GATHER] = {1}, *recv = malloc(RANKS * GATHER);
    const struct gather gather = make_gather(0, send, recv);

    FUZZ_REQUIRE(recv);
    for (int r = 1; r < RANKS; r++) {
        open_known(&channels[r], &others[r]);
        converse(f, WIRE_GATHER, GATHER, send_sealed, &others[r]);
        (void)channel_handshake(&channels[r]);
        end_conn(others[r].fd);
    }
    (void)allgather_root(&gather, channels);
    for (int r = 1; r < RANKS; r++) {
        channel_close(&channels[r]);
        channel_close(&others[r]);
    }
    free(recv);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz f = {data, bytes < 16384 ? bytes : 16384};

    switch (fuzz_below(&f, 7)) {
    case 0:
        hellos(&f);
        break;
    case 1:
        gather_root(&f);
        break;
    case 2:
        gather_client(&f);
        break;
    case 3:
        stranger(&f, 1);
        break;
    case 4:
        stranger(&f, 0);
        break;
    case 5:
        raw_records(&f);
        break;
    default:
        sealed_frames(&f);
        break;
    }
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Others on this machine while ranks meet: a listener on MASTER_PORT, hellos without the secret, connections that say
 * nothing. None of them ends, delays or alters a start, and none learns anything. ctest: cost=8 labels=leaks sleeps
 */
#include "tests/unit/boot_fixture.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/stat.h>

#include "boot/channel.h"
#include "boot/lobby.h"
#include "boot/secret.h"
#include "net/net.h"
#include "util/env.h"
#include "tests/lib/fixture.h"
#include "tests/lib/slow.h"

enum { MANY = 500 };

/* ---- A port that somebody else holds ---------------------------------------------------------------------------- */

static void a_held_port_is_an_error(void **state)
{
    struct world world = world_make(3, open_and_gather);
    int listener = listen_at(world.port);

    (void)state;
    world.timeout_ms = slow_ms(3000);
    world_run(&world);
    close(listener);
    expect_failure(&world, 0, EPX_ERR_SYSTEM, "which another process holds: set EPX_MASTER_PORT to a free one");
    assert_true(world.outcomes[0].seconds * 1000 < world.timeout_ms); /* at once */
    for (int i = 1; i < 3; i++)
        expect_failure(&world, i, EPX_ERR_TIMEOUT, "rank 0 did not reply at 127.0.0.1, port ");
    world_end(&world);
}

/* What a squatter has got, in memory that it shares with the test. */
struct loot {
    volatile int connections;
    volatile size_t most; /* bytes of one connection */
};

/* Takes everybody's bytes for a while. With `plays`, it answers as rank 0 does, as far as that needs no secret. */
static void squat(int listener, struct loot *loot, int plays)
{
    for (;;) {
        struct auth_reply reply = {
            .greeting = {.magic = AUTH_MAGIC, .version = AUTH_VERSION, .purpose = AUTH_RENDEZVOUS}};
        struct timeval limit = {.tv_usec = 700000};
        char bytes[4096];
        size_t got = 0;
        ssize_t n;
        const int fd = accept(listener, NULL, NULL);

        if (fd < 0)
            continue;
        loot->connections++;
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
        while (got < sizeof(bytes) && (n = recv(fd, bytes + got, sizeof(bytes) - got, 0)) > 0) {
            got += (size_t)n;
            loot->most = got > loot->most ? got : loot->most;
            if (plays && send(fd, &reply, sizeof(reply), MSG_NOSIGNAL) < 0)
                break;
        }
        close(fd);
    }
}

static void run_with_squatter(int plays)
{
    struct world world = world_make(3, open_and_gather);
    struct loot *loot = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const int listener = listen_at(world.port);
    const pid_t pid = fork();

    if (!pid) {
        limit_time();
        squat(listener, loot, plays);
    }
    close(listener);
    setenv("EPX_MASTER_PORTS", "17", 1);
    world_run(&world);
    unsetenv("EPX_MASTER_PORTS");
    for (int i = 0; i < 60000 && !loot->most; i++) /* ranks may be through before it had time to read */
        usleep(1000);
    stop_service(pid);
    expect_all_ok(&world);
    assert_true(loot->connections > 0);
    assert_int_equal(loot->most, sizeof(struct auth_greeting)); /* random numbers, and not a byte of a hello */
    munmap(loot, 4096);
    world_end(&world);
}

static void a_squatter_learns_nothing(void **state)
{
    (void)state;
    run_with_squatter(0);
}

static void a_squatter_that_plays_rank_0_learns_nothing(void **state)
{
    (void)state;
    run_with_squatter(1);
}

/* ---- Hellos without the secret ---------------------------------------------------------------------------------- */

/* The ranks have ended well while these connections were there. */
static void succeeded_beside(struct world *world, const int *fds, int count)
{
    for (int i = 0; i < count; i++)
        close(fds[i]);
    expect_all_ok(world);
    world_end(world);
}

/* Wrong version, rank, size, or right and never acknowledged. */
static struct wire_hello make_hello(const struct world *world, int kind)
{
    struct wire_hello hello = {.magic = WIRE_HELLO_MAGIC, .version = WIRE_VERSION, .rank = 1, .nranks = world->nranks};

    hello.job = (0xcbf29ce484222325u ^ (uint64_t)world->port) * 0x100000001b3u; /* of settings.c, with no job id */
    hello.version += kind == 0;
    hello.rank = kind == 1 ? world->nranks + 7 : 1;
    hello.nranks += kind == 2;
    return hello;
}

/* Says hello at once, as before there was a secret, or behind a greeting and a proof that is none. */
static int send_hello(const struct world *world, int kind, int after_greeting)
{
    const struct auth_greeting greeting = {.magic = AUTH_MAGIC, .version = AUTH_VERSION, .purpose = AUTH_RENDEZVOUS};
    const struct auth_proof proof = {{1, 2, 3}};
    const struct wire_hello hello = make_hello(world, kind);
    struct auth_reply reply;
    const int fd = connect_to(world->port);

    assert_true(fd >= 0);
    if (after_greeting) {
        assert_int_equal(write(fd, &greeting, sizeof(greeting)), sizeof(greeting));
        assert_int_equal(recv(fd, &reply, sizeof(reply), MSG_WAITALL), sizeof(reply));
        assert_int_equal(write(fd, &proof, sizeof(proof)), sizeof(proof));
    }
    (void)!send(fd, &hello, sizeof(hello), MSG_NOSIGNAL);
    return fd; /* stays open */
}

static void hellos_without_the_secret_do_no_harm(void **state)
{
    struct world world = world_make(3, last_comes_late);
    int fds[8];

    (void)state;
    world_start_unnamed(&world);
    for (int i = 0; i < 8; i++)
        fds[i] = send_hello(&world, i / 2, i % 2);
    world_wait(&world);
    succeeded_beside(&world, fds, 8);
}

/* Two ranks with secrets of their own, and what each says at its deadline: that of rank 1 is so much later. */
static struct world run_strangers(const char *of_0, const char *of_1, int later_ms)
{
    struct world world = world_make(2, open_and_gather);

    world.timeout_ms = slow_ms(2400);
    setenv("EPX_SECRET", of_0, 1);
    world.absent[0] = 1;
    world_start(&world);
    setenv("EPX_SECRET", of_1, 1);
    world.timeout_ms += slow_ms(later_ms);
    world.pids[1] = fork();
    if (!world.pids[1])
        be_rank(&world, 1);
    unsetenv("EPX_SECRET");
    world_wait(&world);
    return world;
}

static void expect_strangers(const char *of_0, const char *of_1, const char *words_0, const char *words_1)
{
    struct world world = run_strangers(of_0, of_1, 0);

    expect_failure(&world, 0, EPX_ERR_TIMEOUT, words_0);
    expect_failure(&world, 1, EPX_ERR_TIMEOUT, words_1);
    world_end(&world);
}

static void ranks_with_another_secret_are_named(void **state)
{
    static const char one[] = "the secret of rank 0, and of it alone",
                      unknown[] = "connections did not know rank 0's secret, which is from EPX_SECRET";

    (void)state;
    expect_strangers(one, "another secret, which rank 1 was given", unknown,
                     "it does not know this rank's secret, which is from EPX_SECRET");
    expect_strangers(one, "none", unknown, "it has a secret, and this rank has EPX_SECRET=none");
    expect_strangers("none", one, "connections came with a secret, and rank 0 has EPX_SECRET=none",
                     "connection closed without a proof: not EPX, an older one, or it has EPX_SECRET=none");
}

/* Rank 0 is gone before rank 1 has its deadline, and nobody accepts the last attempts. */
static void what_rank_0_replied_is_said_when_it_has_gone(void **state)
{
    struct world world =
        run_strangers("the secret of rank 0, and of it alone", "another secret, which rank 1 was given", 800);

    (void)state;
    expect_failure(&world, 1, EPX_ERR_TIMEOUT, "Connection refused; before it 127.0.0.1:");
    expect_failure(&world, 1, EPX_ERR_TIMEOUT, "it does not know this rank's secret, which is from EPX_SECRET");
    world_end(&world);
}

/* ---- Somebody in the path ---------------------------------------------------------------------------------------- */

/* Passes on what ranks and rank 0 say, and changes one byte of what rank 0 says. */
static void meddle(int listener, int port, size_t at)
{
    const int fds[2] = {accept(listener, NULL, NULL), connect_to(port)};
    struct pollfd polls[2] = {{.fd = fds[0], .events = POLLIN}, {.fd = fds[1], .events = POLLIN}};
    size_t passed = 0;
    char bytes[4096];

    while (poll(polls, 2, -1) > 0)
        for (int i = 0; i < 2; i++) {
            const ssize_t n = polls[i].revents ? recv(fds[i], bytes, sizeof(bytes), 0) : 1;
            if (n <= 0)
                _exit(0);
            if (!polls[i].revents)
                continue;
            if (i == 1 && passed <= at && at < passed + (size_t)n)
                bytes[at - passed] ^= 1;
            passed += i == 1 ? (size_t)n : 0;
            (void)!send(fds[!i], bytes, (size_t)n, MSG_NOSIGNAL);
        }
}

/* Changes byte `at` of what rank 0 says after its handshake with rank 1, which rank 1 reports with these words. */
static struct world run_meddled(size_t at, const char *words)
{
    struct world world = world_make(2, open_and_gather);
    const struct sockaddr_in here = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)world.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1)};
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    pid_t pid;

    assert_int_equal(bind(listener, (const struct sockaddr *)&here, sizeof(here)), 0);
    assert_int_equal(listen(listener, 4), 0);
    world.absent[0] = 1;
    world_start(&world);
    pid = fork();
    if (!pid) {
        limit_time();
        meddle(listener, world.port, sizeof(struct auth_reply) + at);
        _exit(0);
    }
    close(listener);
    world.host = "127.0.0.2";
    world.pids[1] = fork();
    if (!world.pids[1])
        be_rank(&world, 1);
    world_wait(&world);
    stop_service(pid);
    expect_failure(&world, 1, EPX_ERR_PEER, words);
    return world;
}

/* Nobody says that rank 0 has ended, or rank 1: neither has. */
static void what_was_changed_on_its_way_is_said(void **state)
{
    static const char words[] = "rank 1: what rank 0 sent in all-gather 1 was changed on its way";
    struct world world = run_meddled(150, words); /* a result */

    (void)state;
    expect_failure(&world, 0, EPX_ERR_PEER, words);
    world_end(&world);
    world = run_meddled(60, "what rank 0 sent before all ranks had connected was changed on its way"); /* START */
    expect_failure(&world, 0, EPX_ERR_PEER, "rank 1 ended during all-gather 1");
    expect_failure(&world, 0, EPX_ERR_PEER, "or its connection was cut");
    world_end(&world);
}

/* ---- Connections that say nothing -------------------------------------------------------------------------------- */

static void idle_connections_do_not_delay_a_start(void **state)
{
    struct world world = world_make(4, last_comes_late);
    static int fds[MANY];
    uint64_t began;

    (void)state;
    world_start(&world);
    for (int i = 0; i < MANY; i++) {
        fds[i] = connect_to(world.port);
        assert_true(fds[i] >= 0);
    }
    began = clock_ns(); /* the last rank comes now */
    world_wait(&world);
    assert_false(slow_late(began, 10000));
    succeeded_beside(&world, fds, MANY);
}

/* One who connects behind hundreds that say nothing. */
static void last_is_accepted(struct lobby *lobby, int listener, int port, const uint8_t *key)
{
    struct channel mine, theirs = CHANNEL_CLOSED;

    assert_int_equal(channel_start(&mine, connect_to(port), key, AUTH_MEMBERSHIP, 0), 0);
    fcntl(mine.fd, F_SETFL, O_NONBLOCK);
    for (int i = 0; i < 60000 && theirs.fd < 0; i++) {
        assert_true(channel_handshake(&mine) >= 0);
        if (mine.state == CHANNEL_OPEN)
            (void)channel_send(&mine, &(struct transfer){.data = "hello", .bytes = 5}); /* the proof goes before it */
        assert_int_equal(lobby_accept(lobby, listener), 0);
        (void)lobby_next(lobby, &theirs);
        usleep(1000);
    }
    assert_true(theirs.fd >= 0);
    channel_close(&theirs);
    channel_close(&mine);
}

/* Strangers that greet, as anybody can: none of them keeps a place, and each is told that its key is another. */
static void a_lobby_waits_for_nobody_without_the_key(void **state)
{
    static const uint8_t key[CRYPTO_KEY] = {9}, other[CRYPTO_KEY] = {8};
    struct lobby *lobby = calloc(1, sizeof(*lobby));
    struct channel strangers[LOBBY_PLACES];
    const int port = some_port(), listener = listen_at(port);

    (void)state;
    assert_non_null(lobby);
    fcntl(listener, F_SETFL, O_NONBLOCK);
    assert_int_equal(listen(listener, 4096), 0);
    lobby_open(lobby, key, AUTH_MEMBERSHIP);
    for (int i = 0; i < LOBBY_PLACES; i++) {
        assert_int_equal(channel_start(&strangers[i], connect_to(port), other, AUTH_MEMBERSHIP, 0), 0);
        fcntl(strangers[i].fd, F_SETFL, O_NONBLOCK);
        assert_int_equal(channel_handshake(&strangers[i]), 0);
    }
    assert_int_equal(lobby_accept(lobby, listener), 0);
    assert_int_equal(lobby_count(lobby), 0);
    assert_int_equal(lobby->strangers, LOBBY_PLACES);
    for (int i = 0; i < LOBBY_PLACES; i++) {
        assert_int_equal(channel_handshake_all(&strangers[i], deadline_in(60000)), -1);
        assert_int_equal(errno, EACCES);
        channel_close(&strangers[i]);
    }
    lobby_close(lobby);
    close(listener);
    free(lobby);
}

/* What a client says first. */
static struct auth_greeting greeting_of(const uint8_t *key)
{
    struct auth_greeting greeting;
    struct channel client;
    int ends[2];

    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    assert_int_equal(channel_start(&client, ends[0], key, AUTH_MEMBERSHIP, 0), 0);
    assert_int_equal(channel_handshake(&client), 0);
    assert_int_equal(read(ends[1], &greeting, sizeof(greeting)), sizeof(greeting));
    channel_close(&client);
    close(ends[1]);
    return greeting;
}

/* Somebody has heard the greeting of a rank, and says it again and again: that keeps no place. */
static void a_greeting_that_is_repeated_keeps_no_place(void **state)
{
    static const uint8_t key[CRYPTO_KEY] = {9};
    const struct auth_greeting greeting = greeting_of(key);
    struct lobby *lobby = calloc(1, sizeof(*lobby));
    const int port = some_port(), listener = listen_at(port);
    int fds[LOBBY_PLACES], newcomer;

    (void)state;
    assert_non_null(lobby);
    fcntl(listener, F_SETFL, O_NONBLOCK);
    assert_int_equal(listen(listener, 4096), 0);
    lobby_open(lobby, key, AUTH_MEMBERSHIP);
    for (int i = 0; i < LOBBY_PLACES; i++) {
        fds[i] = connect_to(port);
        assert_int_equal(write(fds[i], &greeting, sizeof(greeting)), sizeof(greeting));
    }
    assert_int_equal(lobby_accept(lobby, listener), 0);
    assert_int_equal(lobby_count(lobby), LOBBY_PLACES);
    assert_true(lobby->place[0].greeted);
    for (int i = 1; i < LOBBY_PLACES; i++)
        assert_false(lobby->place[i].greeted);
    usleep((LOBBY_SILENT_MS + 1) * 1000);
    newcomer = connect_to(port);
    assert_int_equal(lobby_accept(lobby, listener), 0);
    assert_int_equal(lobby->strangers, 1); /* it has the place of one of them */
    assert_true(lobby->place[0].greeted);
    lobby_close(lobby);
    for (int i = 0; i < LOBBY_PLACES; i++)
        close(fds[i]);
    close(newcomer);
    close(listener);
    free(lobby);
}

/* A lobby keeps few, and of these those who speak. */
static void a_lobby_accepts_who_sends(void **state)
{
    static const uint8_t key[CRYPTO_KEY] = {9};
    static int silent[MANY];
    struct lobby *lobby = calloc(1, sizeof(*lobby));
    struct channel mine, theirs;
    struct pollfd polls[LOBBY_PLACES];
    const int port = some_port(), listener = listen_at(port);
    int kept = 0;

    (void)state;
    assert_non_null(lobby);
    fcntl(listener, F_SETFL, O_NONBLOCK);
    assert_int_equal(listen(listener, 4096), 0); /* newcomers wait there while all places are taken */
    lobby_open(lobby, key, AUTH_MEMBERSHIP);
    assert_int_equal(channel_start(&mine, connect_to(port), key, AUTH_MEMBERSHIP, 0), 0);
    fcntl(mine.fd, F_SETFL, O_NONBLOCK);
    assert_true(channel_handshake(&mine) == 0); /* it has sent its greeting */
    for (int i = 0; i < MANY; i++) {
        silent[i] = connect_to(port);
        assert_int_equal(lobby_accept(lobby, listener), 0);
    }
    lobby_polls(lobby, polls);
    for (int i = 0; i < LOBBY_PLACES; i++)
        kept += polls[i].fd >= 0;
    assert_int_equal(kept, LOBBY_PLACES);
    assert_int_equal(channel_handshake_all(&mine, deadline_in(60000)), 0);
    assert_int_equal(channel_send_all(&mine, "hello", 5, deadline_in(60000)), 0);
    for (int i = 0; i < 60000 && !lobby_next(lobby, &theirs); i++)
        usleep(1000);
    assert_int_equal(theirs.state, CHANNEL_OPEN);
    channel_close(&theirs);
    channel_close(&mine);
    last_is_accepted(lobby, listener, port, key);
    lobby_close(lobby);
    for (int i = 0; i < MANY; i++)
        close(silent[i]);
    close(listener);
    free(lobby);
}

/* ---- Where a secret is from -------------------------------------------------------------------------------------- */

static void write_secret(const char *path, const char *text, mode_t mode)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    assert_int_equal(chmod(path, mode), 0);
}

static void secrets_are_read_only_where_nobody_else_can(void **state)
{
    char folder[] = "/tmp/epx-test-XXXXXX", path[64], own[64];
    struct secret first, second;

    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/file", folder);
    setenv("EPX_SECRET_FILE", path, 1);
    assert_int_equal(secret_read(1, &first), EPX_ERR_SYSTEM); /* no such file: never another secret instead */
    write_secret(path, "a secret of two lines\nin all\n", 0600);
    assert_int_equal(secret_read(1, &first), EPX_OK);
    write_secret(path, "a secret of two lines\nin all", 0600);
    assert_int_equal(secret_read(1, &second), EPX_OK);
    assert_memory_equal(first.key, second.key, CRYPTO_KEY);
    write_secret(path, "a secret", 0640);
    assert_int_equal(secret_read(1, &second), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "can be read by others"));
    write_secret(path, " \n\n", 0600); /* what a shell writes that was given no secret */
    assert_int_equal(secret_read(1, &second), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "expected a text"));
    unlink(path);
    unsetenv("EPX_SECRET_FILE");

    /* The user's own is made once. */
    setenv("HOME", folder, 1);
    assert_int_equal(secret_read(1, &first), EPX_OK);
    assert_int_equal(secret_read(1, &second), EPX_OK);
    assert_memory_equal(first.key, second.key, CRYPTO_KEY);
    snprintf(own, sizeof(own), "%s/.epx/secret", folder);
    assert_string_equal(first.from, own);
    assert_int_equal(unlink(own), 0);
    assert_int_equal(secret_read(1, &second), EPX_OK);
    assert_memory_not_equal(first.key, second.key, CRYPTO_KEY);
    unlink(own);
    snprintf(own, sizeof(own), "%s/.epx", folder);
    assert_int_equal(rmdir(own), 0); /* nothing else is left there */
    rmdir(folder);
}

/* ---- Secrets beside a caller's all-gather ------------------------------------------------------------------------ */

/* The environment belongs to one rank after the other: each has read it when it gathers for the first time. */
struct turn {
    epx_bootstrap real;
    pthread_mutex_t *lock;
    int taken;
};

static int gather_after_turn(void *context, const void *send, void *recv, size_t bytes)
{
    struct turn *turn = context;

    if (turn->taken)
        pthread_mutex_unlock(turn->lock);
    turn->taken = 0;
    return turn->real.allgather(turn->real.context, send, recv, bytes);
}

struct secrets {
    const char *of_rank[3], *words;
};

static int create_with_secret(int rank, int n, epx_bootstrap *boot, void *arg)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    const struct secrets *secrets = arg;
    struct turn turn = {.real = *boot, .lock = &lock, .taken = 1};
    const epx_group_config config = fixture_config(0);
    epx_bootstrap mine = *boot;

    mine.allgather = gather_after_turn;
    mine.context = &turn;
    pthread_mutex_lock(&lock);
    setenv("EPX_SECRET", secrets->of_rank[rank], 1);
    return fixture_refused(rank, n, &mine, &config, EPX_ERR_MISMATCH, (const char *const[]){secrets->words, NULL});
}

static void secrets_that_differ_are_named(void **state)
{
    static const char one[] = "the one secret of all ranks", other[] = "the other secret, of one";
    struct secrets cases[] = {{{one, one, other}, "rank 2 has another secret than rank 0"},
                              {{one, "none", one}, "rank 1 has EPX_SECRET=none and rank 0 has not"},
                              {{"none", one, one}, "rank 0 has EPX_SECRET=none and rank 1 has not"}};

    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(cases); i++)
        assert_int_equal(run_ranks(3, create_with_secret, &cases[i]), 0);
    unsetenv("EPX_SECRET");
}

/* What goes by on a caller's all-gather, which others may read. */
static struct {
    pthread_mutex_t lock;
    size_t used;
    char bytes[1 << 20];
} captured = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int gather_overheard(void *context, const void *send, void *recv, size_t bytes)
{
    const epx_bootstrap *real = context;

    pthread_mutex_lock(&captured.lock);
    if (captured.used + bytes <= sizeof(captured.bytes)) {
        memcpy(captured.bytes + captured.used, send, bytes);
        captured.used += bytes;
    }
    pthread_mutex_unlock(&captured.lock);
    return real->allgather(real->context, send, recv, bytes);
}

static int create_overheard(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(0);
    epx_bootstrap mine = *boot;

    (void)arg;
    config.ranks_per_node = 1;
    snprintf(config.net, sizeof(config.net), "ofi:tcp");
    mine.allgather = gather_overheard;
    mine.context = boot;
    return fixture_group(rank, n, &mine, &config, NULL, NULL);
}

/* Addresses of endpoints go with the keys of memory, in one structure, whose magic number cannot be overheard. */
static int sends_addresses(const char *secret)
{
    static const char magic[] = {0x45, 0x58, 0x46, 0x4f, 0}; /* OFI_MAGIC in memory, either byte order */
    static const char turned[] = {0x4f, 0x46, 0x58, 0x45, 0};

    if (secret)
        setenv("EPX_SECRET", secret, 1);
    captured.used = 0;
    assert_int_equal(run_ranks(2, create_overheard, NULL), 0);
    unsetenv("EPX_SECRET");
    assert_true(captured.used > 0);
    return memmem(captured.bytes, captured.used, magic, 4) || memmem(captured.bytes, captured.used, turned, 4);
}

static void addresses_are_sealed_for_a_callers_all_gather(void **state)
{
    char text[256];

    (void)state;
    if (net_ofi_ops.probe("tcp", text, sizeof(text)) != EPX_OK) {
        print_message("no network to test with: %s\n", text);
        skip();
    }
    assert_false(sends_addresses("a secret that all ranks know"));
    assert_false(sends_addresses(NULL));
    assert_true(sends_addresses("none")); /* the test would hear them */
}

UNIT_TESTS_WITHIN(name_this_run, NULL, a_held_port_is_an_error, a_squatter_learns_nothing,
                  a_squatter_that_plays_rank_0_learns_nothing, hellos_without_the_secret_do_no_harm,
                  ranks_with_another_secret_are_named, what_rank_0_replied_is_said_when_it_has_gone,
                  idle_connections_do_not_delay_a_start, a_lobby_accepts_who_sends,
                  a_lobby_waits_for_nobody_without_the_key, a_greeting_that_is_repeated_keeps_no_place,
                  what_was_changed_on_its_way_is_said, secrets_are_read_only_where_nobody_else_can,
                  secrets_that_differ_are_named, addresses_are_sealed_for_a_callers_all_gather)

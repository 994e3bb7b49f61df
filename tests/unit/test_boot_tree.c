/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: cost=7 labels=leaks,notsan sleeps */
/* Results through relays (boot/tree.h): 8 ranks in blocks of 3, so that ranks 3 and 6 pass on to 4, 5 and 7. Ranks are
 * processes of one thread: nothing for ThreadSanitizer. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/time.h>

#include "boot/allgather.h"
#include "boot/launcher.h"
#include "boot/secret.h"
#include "boot/tree.h"
#include "tests/unit/boot_fixture.h"
#include "util/build.h"
#include "util/crypto.h"

enum { RANKS = 8, RELAY = 3, SLOW = 4, LARGE = 1 << 20, SILENT = 500 };

/* A descriptor is there for the connection to rank 0 and none for the relay. */
static int gather_without_relay(const struct world *world, int rank)
{
    const int next = crypto() ? dup(0) : -1; /* crypto() opens a library */
    struct rlimit files;

    close(next);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = (rlim_t)next + 1;
    if (rank == RELAY + 1)
        setrlimit(RLIMIT_NOFILE, &files);
    return open_and_gather(world, rank);
}

static const struct world *hang; /* where the relay hangs until all others have ended; NULL = it ends itself */

static void stop_here(int signal)
{
    (void)signal;
    if (!hang)
        raise(SIGKILL);
    await_others(hang, RELAY);
    _exit(0);
}

/* The relay ends, or hangs, after world->absent[1] microseconds of all-gathers; the others go on until they fail. */
static int gather_until_failure(const struct world *world, int rank)
{
    const struct itimerval when = {.it_value.tv_usec = world->absent[1]};
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    if (!status && rank == RELAY) {
        signal(SIGALRM, stop_here);
        setitimer(ITIMER_REAL, &when, NULL);
    }
    for (int round = 0; !status; round++)
        status = gather_checked(boot, world->bytes, round);
    return status;
}

/* ---- Ranks that do by hand what boot_open() and boot_allgather() do --------------------------------------------- */

struct by_hand {
    struct launcher launcher;
    struct secret secret;
    struct rendezvous_config config;
    struct channel channel;
    struct tree tree;
};

static epx_status meet_by_hand(const struct world *world, struct by_hand *own, int *block)
{
    epx_status status = launcher_read(&own->launcher);

    status = status ? status : secret_read(1, &own->secret);
    if (status)
        return status;
    rendezvous_from_launcher(&own->launcher, &own->secret, world->timeout_ms, &own->config);
    return rendezvous_client(&own->config, &own->channel, block);
}

static epx_status open_by_hand(const struct world *world, struct by_hand *own)
{
    int block = 0;
    epx_status status = meet_by_hand(world, own, &block);

    return status ? status : tree_open_client(&own->config, block, &own->channel, &own->tree);
}

static epx_status gather_by_hand(struct by_hand *own, int round)
{
    unsigned char send[64], recv[RANKS * sizeof(send)];
    const struct gather gather = {.rank = own->config.rank,
                                  .nranks = own->config.nranks,
                                  .timeout_ms = own->config.timeout_ms,
                                  .sequence = (uint64_t)round + 1,
                                  .group = 1,
                                  .send = send,
                                  .recv = recv,
                                  .bytes = sizeof(send),
                                  .tree = &own->tree};
    epx_status status;

    for (size_t i = 0; i < sizeof(send); i++)
        send[i] = pattern(own->config.rank, i, round);
    status = allgather_client(&gather, &own->channel);
    for (size_t i = 0; !status && i < sizeof(recv); i++)
        if (recv[i] != pattern((int)(i / sizeof(send)), i % sizeof(send), round))
            return EPX_ERR_MISMATCH;
    return status;
}

/* A small all-gather, and large ones until one fails. */
static epx_status gather_small_then_large(const struct world *world)
{
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    for (int round = 0; !status; round++)
        status = gather_checked(boot, round ? world->bytes : 64, round);
    return (epx_status)status;
}

/* The relay passes on the second result to one child, and hangs. */
static int pass_on_to_one(const struct world *world, int rank)
{
    struct by_hand own;
    epx_status status;

    if (rank != RELAY)
        return (int)gather_small_then_large(world);
    status = open_by_hand(world, &own);
    status = status ? status : gather_by_hand(&own, 0);
    own.tree.count = 1;
    status = status ? status : gather_by_hand(&own, 1);
    await_others(world, rank);
    return (int)status;
}

/* A child gives its part of the second all-gather, and takes nothing. */
static int take_nothing(const struct world *world, int rank)
{
    struct by_hand own;
    unsigned char *part = calloc(1, LARGE);
    epx_status status;

    if (rank != SLOW) {
        free(part);
        return (int)gather_small_then_large(world);
    }
    if (part)
        pattern_fill(part, LARGE, rank, 1);
    status = open_by_hand(world, &own);
    status = status ? status : gather_by_hand(&own, 0);
    const struct gather gather = {.sequence = 2, .group = 1};
    const struct wire_frame frame = gather_frame(&gather, WIRE_GATHER, LARGE);
    if (!status && !channel_send_all(&own.channel, &frame, sizeof(frame), deadline_in(LIMIT_MS)))
        (void)channel_send_all(&own.channel, part, LARGE, deadline_in(LIMIT_MS));
    free(part);
    await_others(world, rank);
    return (int)status;
}

/* Rank 0 is late, but comes, and rank 1 never does. The others have waited long by then. */
static int come_late(const struct world *world, int rank)
{
    struct boot *boot;
    int status = boot_open(NULL, world->timeout_ms, &boot);

    status = status ? status : gather_checked(boot, 64, 0);
    if (rank == 0)
        usleep((useconds_t)(RENDEZVOUS_SLACK_MS + world->timeout_ms / 4) * 1000);
    if (rank == 1)
        await_others(world, rank);
    return status ? status : gather_checked(boot, 64, 1);
}

static void expect_culprit(const struct world *world, int culprit, epx_status status, const char *words)
{
    for (int r = 0; r < RANKS; r++)
        if (r != culprit)
            expect_failure(world, r, status, words);
}

/* ---- Tests ---------------------------------------------------------------------------------------------------- */

static void blocks_are_the_root_of_many_ranks(void **state)
{
    (void)state;
    unsetenv("EPX_BOOT_BLOCK");
    assert_int_equal(tree_block(63), 0);
    assert_int_equal(tree_block(64), 8);
    assert_int_equal(tree_block(1024), 32);
    assert_int_equal(tree_block(1025), 33);
    setenv("EPX_BOOT_BLOCK", "3", 1);
    assert_int_equal(tree_block(RANKS), 3);
    assert_int_equal(tree_block(3), 0);
    assert_int_equal(tree_parent(3, 2), 0);
    assert_int_equal(tree_parent(3, 3), 0);
    assert_int_equal(tree_parent(3, 5), 3);
}

static void results_come_through_relays(void **state)
{
    static const size_t sizes[] = {0, 1, LARGE};
    struct world world = world_make(RANKS, open_and_gather);

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        world.bytes = sizes[i];
        world.port = some_port();
        if (i == 1)
            setenv("EPX_SECRET", "none", 1);
        world_run(&world);
        unsetenv("EPX_SECRET");
        expect_all_ok(&world);
    }
    world_end(&world);
}

static void a_child_without_its_relay_asks_rank_0(void **state)
{
    (void)state;
    ranks_succeed(RANKS, gather_without_relay);
}

static void a_relay_that_ends_is_named_by_all(void **state)
{
    static const int after_us[] = {100, 9000, 70000};

    (void)state;
    hang = NULL;
    for (size_t i = 0; i < sizeof(after_us) / sizeof(after_us[0]); i++) {
        struct world world = world_make(RANKS, gather_until_failure);

        world.bytes = LARGE;
        world.absent[1] = after_us[i];
        world_run(&world);
        expect_culprit(&world, RELAY, EPX_ERR_PEER, "rank 3 ended during all-gather");
        world_end(&world);
    }
}

/* A relay, at any time; one that has passed on a result to one of two children; a child that keeps its relay from
 * coming; a rank that keeps rank 0 waiting, which itself came late. All at once: it takes one deadline. */
static void who_hangs_is_named_by_all(void **state)
{
    struct world worlds[] = {world_make(RANKS, gather_until_failure), world_make(RANKS, pass_on_to_one),
                             world_make(RANKS, take_nothing), world_make(RANKS, come_late)};

    (void)state;
    hang = &worlds[0];
    worlds[0].absent[1] = 30000;
    for (int i = 0; i < 4; i++) {
        worlds[i].bytes = i == 1 ? 64 : LARGE;
        worlds[i].timeout_ms = slow_ms(2500);
        world_start(&worlds[i]);
    }
    for (int i = 0; i < 4; i++)
        world_wait(&worlds[i]);
    expect_culprit(&worlds[0], RELAY, EPX_ERR_TIMEOUT, "rank 3 did not");
    expect_culprit(&worlds[1], RELAY, EPX_ERR_TIMEOUT, "rank 3 did not send data");
    expect_culprit(&worlds[2], SLOW, EPX_ERR_TIMEOUT, "rank 4 did not receive the result of all-gather 2 from rank 3");
    expect_culprit(&worlds[3], 1, EPX_ERR_TIMEOUT, "rank 1 did not send data");
    for (int i = 0; i < 4; i++)
        world_end(&worlds[i]);
}

/* ---- Strangers at a relay's port -------------------------------------------------------------------------------- */

/* What the test and its ranks tell each other. */
struct told {
    volatile int started, go; /* the slow rank has heard START; it may look for its relay */
    uint64_t job;
    int has_relay;
    int log; /* what the relay says */
};
static struct told *told;

/* The ports of relays stay open as long as this rank has not found its own. */
static epx_status open_slowly(const struct world *world)
{
    struct by_hand own;
    int block = 0;
    epx_status status = meet_by_hand(world, &own, &block);

    told->job = own.config.job;
    told->started = 1;
    while (!told->go)
        usleep(1000);
    status = status ? status : tree_open_client(&own.config, block, &own.channel, &own.tree);
    if (status)
        return status;
    told->has_relay = own.tree.parent.fd >= 0;
    for (int round = 0; !status && round < 3; round++)
        status = gather_by_hand(&own, round);
    tree_close(&own.tree);
    channel_close(&own.channel);
    return status;
}

static int gather_among_strangers(const struct world *world, int rank)
{
    if (rank == RELAY)
        dup2(told->log, STDERR_FILENO);
    return rank == SLOW ? (int)open_slowly(world) : open_and_gather(world, rank);
}

static int has_socket(pid_t pid, unsigned long inode)
{
    char folder[32], path[300], name[64], expected[64];
    const struct dirent *entry;
    int found = 0;
    DIR *fds;

    snprintf(folder, sizeof(folder), "/proc/%d/fd", (int)pid);
    snprintf(expected, sizeof(expected), "socket:[%lu]", inode);
    fds = opendir(folder);
    while (fds && !found && (entry = readdir(fds))) {
        snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
        const ssize_t n = readlink(path, name, sizeof(name) - 1);
        found = n > 0 && (size_t)n == strlen(expected) && !memcmp(name, expected, (size_t)n);
    }
    if (fds)
        closedir(fds);
    return found;
}

/* As anybody on this machine finds it: the port at which a process listens, or 0. */
static int port_of(pid_t pid)
{
    FILE *table = fopen("/proc/net/tcp", "r");
    char line[256];
    int found = 0;

    while (table && !found && fgets(line, sizeof(line), table)) {
        unsigned port, state;
        unsigned long inode;
        if (sscanf(line, " %*d: %*x:%x %*x:%*x %x %*x:%*x %*x:%*x %*x %*u %*u %lu", &port, &state, &inode) == 3 &&
            state == 10 && has_socket(pid, inode))
            found = (int)port;
    }
    if (table)
        fclose(table);
    return found;
}

static void expect_closed(int fd)
{
    const struct timeval limit = {.tv_sec = 20};
    char byte;

    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    const ssize_t n = recv(fd, &byte, 1, 0);
    assert_true(n == 0 || (n < 0 && errno == ECONNRESET));
    close(fd);
}

/* The relay's challenge to a greeting. */
static int challenge(int port, const struct auth_greeting *greeting, struct auth_reply *reply)
{
    const int fd = connect_to(port);

    assert_int_equal(write(fd, greeting, sizeof(*greeting)), sizeof(*greeting));
    assert_int_equal(recv(fd, reply, sizeof(*reply), MSG_WAITALL), sizeof(*reply));
    return fd;
}

static void send_bytes(int fd, const void *data, size_t bytes)
{
    (void)!send(fd, data, bytes, MSG_NOSIGNAL);
}

static void strangers_with_words(int port)
{
    static const char web[] = "GET / HTTP/1.1\r\nHost: relay\r\n\r\n and more than a greeting has\r\n";
    const struct auth_greeting greeting = {.magic = AUTH_MAGIC, .version = AUTH_VERSION, .purpose = AUTH_TREE};
    const struct wire_hello hello = {.magic = WIRE_HELLO_MAGIC, .version = WIRE_VERSION, .rank = SLOW, .nranks = RANKS};
    struct auth_reply reply;
    int fd = connect_to(port);

    send_bytes(fd, web, sizeof(web));
    expect_closed(fd);
    fd = connect_to(port);
    send_bytes(fd, &hello, sizeof(hello)); /* a rank's, and not a word of the secret */
    send_bytes(fd, &hello, sizeof(hello));
    expect_closed(fd);
    fd = challenge(port, &greeting, &reply);
    send_bytes(fd, reply.proof, sizeof(reply.proof)); /* the relay's own proof */
    send_bytes(fd, &hello, sizeof(hello));
    expect_closed(fd);
}

/* What a rank has said, said again by somebody who has read it. */
static void a_replay(int port, const uint8_t *key)
{
    struct auth auth;
    struct auth_proof proof;
    struct auth_reply reply, again;
    int fd;

    assert_int_equal(auth_start(&auth, key, AUTH_TREE, 0), 0);
    fd = challenge(port, &auth.client_greeting, &reply);
    assert_int_equal(auth_take_reply(&auth, &reply, &proof), AUTH_OK);
    send_bytes(fd, &proof, sizeof(proof));
    close(fd);
    fd = challenge(port, &auth.client_greeting, &again);
    assert_memory_not_equal(&again, &reply, sizeof(reply));
    send_bytes(fd, &proof, sizeof(proof));
    expect_closed(fd);
}

/* A process that knows the secret, and says that it is another rank than the relay may serve. */
static void an_impostor(int port, const uint8_t *key, uint64_t job, int rank)
{
    const struct wire_hello hello = {
        .magic = WIRE_HELLO_MAGIC, .build = build_number(), .job = job, .rank = rank, .nranks = RANKS};
    struct channel channel;
    char byte;

    assert_int_equal(channel_start(&channel, connect_to(port), key, AUTH_TREE, 0), 0);
    fcntl(channel.fd, F_SETFL, O_NONBLOCK);
    assert_int_equal(channel_handshake_all(&channel, deadline_in(20000)), 0);
    assert_int_equal(channel_send_all(&channel, &hello, sizeof(hello), deadline_in(20000)), 0);
    assert_int_equal(channel_receive_all(&channel, &byte, 1, deadline_in(20000)), -1);
    assert_int_not_equal(errno, ETIMEDOUT);
    channel_close(&channel);
}

static void silent_ones(int port, int *fds)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};

    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < SILENT; i++) {
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        (void)connect(fds[i], (struct sockaddr *)&at, sizeof(at));
    }
}

static void expect_said(const char *words)
{
    char text[8192];
    const ssize_t n = pread(told->log, text, sizeof(text) - 1, 0);

    assert_true(n >= 0);
    text[n] = 0;
    if (!strstr(text, words))
        print_error("the relay said \"%s\", expected \"%s\"\n", text, words);
    assert_non_null(strstr(text, words));
}

/* All attacks on the relay of a rank that has not come yet. Returns when that rank may. */
static void attack(int port, int *silent)
{
    static const int claims[] = {0, RELAY, 2 * RELAY, 2 * RELAY + 1, RANKS, -1};
    struct secret secret;

    assert_int_equal(secret_read(1, &secret), EPX_OK);
    strangers_with_words(port);
    a_replay(port, secret.key);
    for (size_t i = 0; i < UNIT_COUNT(claims); i++)
        an_impostor(port, secret.key, told->job, claims[i]);
    an_impostor(port, secret.key, told->job + 1, SLOW);
    silent_ones(port, silent);
}

static void strangers_at_a_relay_do_no_harm(void **state)
{
    struct world world = world_make(RANKS, gather_among_strangers);
    static int silent[SILENT];
    uint64_t began;
    int port = 0;

    (void)state;
    told = mmap(NULL, sizeof(*told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(told != MAP_FAILED);
    told->log = memfd_create("log", 0);
    world_start(&world);
    for (int i = 0; i < 60000 && !(told->started && (port = port_of(world.pids[RELAY]))); i++)
        usleep(1000);
    assert_true(port > 0);
    attack(port, silent);
    began = clock_ns();
    told->go = 1;
    world_wait(&world);
    print_message("with %d silent connections: %.0f ms\n", SILENT, (double)(clock_ns() - began) * 1e-6);
    assert_false(slow_late(began, TREE_REPLY_MS / 2)); /* nobody waited in vain */
    for (int i = 0; i < SILENT; i++)
        close(silent[i]);
    expect_all_ok(&world);
    assert_true(told->has_relay);
    expect_said("a connection was refused that says it is rank 0 of 8: this port is for ranks 4 to 5");
    expect_said("connections to the port for ranks 4 to 5 were closed: they did not prove in time that they know the "
                "secret of this job; the last came from 127.0.0.1:");
    close(told->log);
    munmap(told, sizeof(*told));
    world_end(&world);
}

/* ---- A relay that gives up --------------------------------------------------------------------------------------- */

enum { PART = 1 << 18, PARTS = 4, READ_FIRST = 1 << 16 };

struct stall {
    int root[2], child[2]; /* [0] are the relay's */
    char *data, *got;      /* the result; what the child receives, and room for an error behind it */
    char *own;             /* what the relay itself sends to rank 0, after its frame */
    size_t bytes;
    atomic_int gave_up; /* the relay */
};

static size_t read_some(int fd, char *to, size_t bytes)
{
    size_t done = 0;
    ssize_t n;

    while (done < bytes && (n = recv(fd, to + done, bytes - done, 0)) > 0)
        done += (size_t)n;
    return done;
}

/* Rank 0, as this relay sees it. */
static void *give_result(void *arg)
{
    struct stall *stall = arg;
    const struct wire_frame frame = {
        .magic = WIRE_FRAME_MAGIC, .op = WIRE_RESULT, .sequence = 1, .bytes = (uint64_t)PARTS * PART};

    (void)read_some(stall->root[1], stall->own, sizeof(frame) + PART);
    (void)!send(stall->root[1], &frame, sizeof(frame), MSG_NOSIGNAL);
    for (int i = 0; i < PARTS; i++)
        (void)!send(stall->root[1], stall->data + (size_t)i * PART, PART, MSG_NOSIGNAL);
    return NULL;
}

/* Reads so little that there is room for an error, and poll() does not say so; the rest when the relay gave up. */
static void *read_slowly(void *arg)
{
    struct stall *stall = arg;

    usleep(500000);
    stall->bytes = read_some(stall->child[1], stall->got, READ_FIRST);
    while (!atomic_load(&stall->gave_up))
        usleep(1000);
    stall->bytes += read_some(stall->child[1], stall->got + stall->bytes, (size_t)PARTS * PART);
    return NULL;
}

static void an_error_is_never_taken_for_data(void **state)
{
    struct stall stall = {.data = malloc((size_t)PARTS * PART), .got = malloc((size_t)(PARTS + 1) * PART)};
    struct tree tree = TREE_NONE;
    struct gather gather = {.rank = 3, .nranks = PARTS, .timeout_ms = 1, .sequence = 1, .bytes = PART, .tree = &tree};
    struct channel root;
    pthread_t threads[2];

    (void)state;
    stall.own = malloc(sizeof(struct wire_frame) + PART);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, stall.root), 0);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, stall.child), 0);
    memset(stall.data, 7, (size_t)PARTS * PART);
    gather.send = stall.data;
    gather.recv = malloc((size_t)PARTS * PART);
    tree.children = calloc(1, sizeof(*tree.children));
    tree.child_ranks = calloc(1, sizeof(*tree.child_ranks));
    tree.count = 1;
    for (int i = 0; i < 2; i++)
        fcntl(i ? stall.child[0] : stall.root[0], F_SETFL, O_NONBLOCK);
    assert_int_equal(channel_start(&root, stall.root[0], NULL, AUTH_TREE, 0), 0);
    assert_int_equal(channel_start(tree.children, stall.child[0], NULL, AUTH_TREE, 0), 0);
    pthread_create(&threads[0], NULL, give_result, &stall);
    pthread_create(&threads[1], NULL, read_slowly, &stall);
    assert_int_not_equal(allgather_client(&gather, &root), EPX_OK);
    atomic_store(&stall.gave_up, 1);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    print_message("%zu bytes before the end\n", stall.bytes);
    assert_true(stall.bytes > sizeof(struct wire_frame) + READ_FIRST && stall.bytes < PARTS * PART);
    assert_memory_equal(stall.got + sizeof(struct wire_frame), stall.data, stall.bytes - sizeof(struct wire_frame));
    close(stall.root[1]);
    close(stall.child[1]);
    free((void *)gather.recv);
    free(stall.data);
    free(stall.got);
    free(stall.own);
}

static int set_up(void **state)
{
    (void)state;
    set_job_id();
    setenv("EPX_BOOT_BLOCK", "3", 1);
    return 0;
}

UNIT_TESTS_WITHIN(set_up, NULL, blocks_are_the_root_of_many_ranks, results_come_through_relays,
                  a_child_without_its_relay_asks_rank_0, a_relay_that_ends_is_named_by_all, who_hangs_is_named_by_all,
                  strangers_at_a_relay_do_no_harm, an_error_is_never_taken_for_data)

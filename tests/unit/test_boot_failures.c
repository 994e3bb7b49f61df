/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: cost=10 labels=leaks sleeps */
/* Ports that others use, and every way in which the rendezvous can fail. */
#include "tests/unit/boot_fixture.h"

#include <pthread.h>

#include "boot/channel.h"
#include "boot/secret.h"
#include "tests/lib/slow.h"

/* Rank 0 may take another port than MASTER_PORT. */
static void look_for_ports(int yes)
{
    if (yes)
        setenv("EPX_MASTER_PORTS", "17", 1);
    else
        unsetenv("EPX_MASTER_PORTS");
}

static void run_looking_for_ports(struct world *world)
{
    look_for_ports(1);
    world_run(world);
    look_for_ports(0);
    expect_all_ok(world);
}

/* ---- Tests: other services ------------------------------------------------------------------------------------- */

static void a_silent_service_on_the_port_is_passed_over(void **state)
{
    struct world world = world_make(4, open_and_gather);
    int listener = listen_at(world.port);

    (void)state;
    run_looking_for_ports(&world);
    close(listener);
    assert_true(world.outcomes[1].seconds * 2000 < world.timeout_ms);
    world_end(&world);
}

static void services_that_answer_nonsense_are_passed_over(void **state)
{
    struct world world = world_make(4, open_and_gather);
    pid_t http = start_service(world.port, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
    pid_t rude = start_service(world.port + 1, "");

    (void)state;
    run_looking_for_ports(&world);
    stop_service(http);
    stop_service(rude);
    world_end(&world);
}

static void unknown_clients_of_rank_0_do_no_harm(void **state)
{
    static const char junk[] = "GET / HTTP/1.1\r\nHost: nobody\r\nAccept: nothing at all\r\n\r\n";
    struct world world = world_make(2, last_comes_late);
    int silent, loud;

    (void)state;
    world_start(&world);
    silent = connect_to(world.port);
    loud = connect_to(world.port);
    assert_true(silent >= 0 && loud >= 0);
    assert_true(write(loud, junk, sizeof(junk)) > 0);
    world_wait(&world);
    close(silent);
    close(loud);
    expect_all_ok(&world);
    world_end(&world);
}

/* Of two jobs at a time. */
static void both_succeeded(struct world *first, struct world *second)
{
    expect_all_ok(first);
    expect_all_ok(second);
    world_end(first);
    world_end(second);
}

static void neighbouring_jobs_do_not_mix(void **state)
{
    struct world first = world_make(3, last_comes_late), second = world_make(3, open_and_gather);
    int listener = listen_at(first.port);

    (void)state;
    look_for_ports(1);
    second.port = first.port + 1; /* which the first takes, as its own is occupied */
    world_start(&first);
    close(connect_to(second.port)); /* it has */
    world_run(&second);
    world_wait(&first);
    close(listener);
    both_succeeded(&first, &second);
    look_for_ports(0);
}

static void jobs_on_one_port_are_told_apart_by_id(void **state)
{
    struct world first = world_make(3, last_comes_late), second = world_make(2, open_and_gather);

    (void)state;
    look_for_ports(1);
    second.port = first.port;
    setenv("EPX_JOB_ID", "first", 1);
    world_start(&first);
    close(connect_to(first.port)); /* which it holds now */
    setenv("EPX_JOB_ID", "second", 1);
    world_run(&second);
    set_job_id();
    world_wait(&first);
    both_succeeded(&first, &second);
    look_for_ports(0);
}

/* ---- Tests: failures ----------------------------------------------------------------------------------------- */

static void times_out(struct world *world, const char *words)
{
    world_run(world);
    expect_told(world, EPX_ERR_TIMEOUT, words);
    world_end(world);
}

static void missing_ranks_are_named_on_all(void **state)
{
    struct world world = world_make(5, open_and_gather);
    char words[96];

    (void)state;
    world.timeout_ms = slow_ms(2000); /* the others have connected by then, on a busy machine too */
    snprintf(words, sizeof(words), "ranks 2 and 4 did not connect within %d ms", world.timeout_ms);
    world.absent[0] = 2;
    world.absent[1] = 4;
    times_out(&world, words);
}

static void a_missing_rank_0_is_named(void **state)
{
    struct world world = world_make(3, open_and_gather);

    (void)state;
    world.timeout_ms = 400;
    world.rank_as[0] = 1; /* the first process is a rank 1 too, so that there is no rank 0 */
    world_run(&world);
    expect_failure(&world, 1, EPX_ERR_TIMEOUT, "rank 0 did not reply at 127.0.0.1");
    expect_failure(&world, 2, EPX_ERR_TIMEOUT, "within 400 ms");
    world_end(&world);
}

static void an_unknown_host_ends_at_the_deadline(void **state)
{
    struct world world = world_make(2, open_and_gather);

    (void)state;
    world.timeout_ms = 400;
    world.host = "no-such-host.invalid";
    world_run(&world);
    expect_failure(&world, 1, EPX_ERR_TIMEOUT, "no-such-host.invalid");
    assert_true(world.outcomes[1].seconds * 1000 < slow_ms(3000));
    world_end(&world);
}

static void a_death_is_named_at_once(void **state)
{
    struct world world = world_make(4, die_before_gather);

    (void)state;
    world_run(&world);
    expect_told(&world, EPX_ERR_PEER, "rank 2 ended during all-gather 2");
    expect_told(&world, EPX_ERR_PEER, "or its connection was cut");
    assert_true(world.outcomes[0].seconds * 2000 < world.timeout_ms);
    world_end(&world);
}

static void a_late_rank_is_named_at_the_deadline(void **state)
{
    struct world world = world_make(4, miss_gather);
    char words[96];

    (void)state;
    world.timeout_ms = slow_ms(2000);
    snprintf(words, sizeof(words), "rank 2 did not send data within %d ms (all-gather 1", world.timeout_ms);
    times_out(&world, words);
}

static void different_sizes_are_named(void **state)
{
    struct world world = world_make(4, gather_other_size);

    (void)state;
    world_run(&world);
    for (int i = 0; i < 4; i++)
        expect_failure(&world, i, EPX_ERR_MISMATCH, "rank 2 sends 64 bytes, rank 0 128");
    world_end(&world);
}

static void a_wrong_world_size_is_named_on_both_sides(void **state)
{
    struct world world = world_make(3, open_and_gather);

    (void)state;
    world.timeout_ms = slow_ms(3000); /* rank 1 may come when it is all over */
    world.world_as[2] = 4;
    world_run(&world);
    expect_failure(&world, 0, EPX_ERR_MISMATCH, "rank 2 has WORLD_SIZE 4, rank 0 has 3");
    expect_failure(&world, 2, EPX_ERR_MISMATCH, "rank 2 has WORLD_SIZE 4, rank 0 has 3");
    world_end(&world);
}

static void a_rank_given_twice_is_named(void **state)
{
    struct world world = world_make(4, open_and_gather);
    int told = 0;

    (void)state;
    world.timeout_ms = slow_ms(3000);
    world.rank_as[3] = 1;
    world_run(&world);
    expect_failure(&world, 0, EPX_ERR_MISMATCH, "two processes have RANK 1");
    for (int i = 1; i < 4; i++)
        told += !!strstr(world.outcomes[i].text, "two processes have RANK 1");
    assert_true(told >= 2);
    world_end(&world);
}

static void another_build_is_refused(void **state)
{
    struct world world = world_make(3, open_and_gather);
    struct wire_hello hello = {.magic = WIRE_HELLO_MAGIC, .build = 0, .rank = 1, .nranks = 3};
    struct {
        struct wire_frame frame;
        struct wire_error error;
    } answer;
    struct secret secret;
    struct channel channel;
    int fd;

    (void)state;
    world.absent[0] = 1;
    world.absent[1] = 2;
    world_start_unnamed(&world);
    fd = connect_to(world.port);
    assert_true(fd >= 0);
    assert_int_equal(secret_read(1, &secret), EPX_OK);
    assert_int_equal(channel_start(&channel, fd, secret.key, AUTH_RENDEZVOUS, 0), 0);
    assert_int_equal(channel_handshake_all(&channel, deadline_in(60000)), 0);
    /* The job's number: what settings.c makes of the port alone. */
    hello.job = (0xcbf29ce484222325u ^ (uint64_t)world.port) * 0x100000001b3u;
    assert_int_equal(channel_send_all(&channel, &hello, sizeof(hello), deadline_in(60000)), 0);
    assert_int_equal(channel_receive_all(&channel, &answer, sizeof(answer), deadline_in(60000)), 0);
    channel_close(&channel);
    world_wait(&world);
    assert_int_equal(answer.frame.op, WIRE_ERROR);
    assert_non_null(strstr(answer.error.text, "rank 1 has build 0.0.0-00000000"));
    expect_failure(&world, 0, EPX_ERR_MISMATCH, "rank 1 has build 0.0.0-00000000 of EPX, rank 0 has ");
    world_end(&world);
}

static void groups_in_another_order_are_named(void **state)
{
    struct world world = world_make(2, gather_in_other_order);

    (void)state;
    world_run(&world);
    for (int i = 0; i < 2; i++)
        expect_failure(&world, i, EPX_ERR_MISMATCH,
                       "rank 1 is in an all-gather of its group number 1, rank 0 of number 2");
    world_end(&world);
}

static void *meet_again(void *arg)
{
    const struct world *again = arg;

    return open_and_gather(again, 0) ? NULL : arg;
}

/* Three ranks meet, and then rank 2 stays away: the all-gather of a creation fails. Before that creation has freed what
 * it has made, a thread begins another one, of two ranks, as behind Ctrl-C in Python. */
static int leave_a_creation(const struct world *world, int rank)
{
    struct world again = *world;
    struct boot *boot;
    pthread_t thread;
    void *met = NULL;
    int status = boot_open(NULL, rank == 2 ? slow_ms(20000) : world->timeout_ms, &boot);

    if (rank == 2)
        await_others(world, rank);
    if (status || rank == 2)
        return status;
    again.timeout_ms = slow_ms(20000);
    status = gather_checked(boot, 64, 0) ? EPX_OK : -1;
    child_set_int("WORLD_SIZE", 2);
    if (pthread_create(&thread, NULL, meet_again, &again))
        return -1;
    usleep(300000);
    boot_close(boot);
    pthread_join(thread, &met);
    return met ? status : -1;
}

static void ranks_meet_again_behind_a_creation_that_fails(void **state)
{
    struct world world = world_make(3, leave_a_creation);

    (void)state;
    world.timeout_ms = slow_ms(2000);
    world_start(&world);
    for (int r = 0; r < 3; r++)
        waitpid(world.pids[r], NULL, 0);
    expect_all_ok(&world);
    world_end(&world);
}

/* A thread that creates a group goes on for a while when the process ends. */
static struct boot *left_open;

/* Behind the library's, which have no number. */
__attribute__((destructor(101))) static void use_at_exit(void)
{
    if (left_open && gather_checked(left_open, 64, 1) != EPX_ERR_USAGE)
        _exit(1);
}

static void a_thread_finds_the_end_of_the_process(void **state)
{
    struct world world = world_make(1, NULL);
    int ended = 0;
    pid_t pids[2];

    (void)state;
    for (int r = 0; r < 2; r++) {
        pids[r] = fork();
        assert_true(pids[r] >= 0);
        if (pids[r])
            continue;
        limit_time();
        child_set_int("RANK", r);
        child_set_int("WORLD_SIZE", 2);
        child_set_int("MASTER_PORT", world.port);
        setenv("MASTER_ADDR", "127.0.0.1", 1);
        if (boot_open(NULL, world.timeout_ms, &left_open) || gather_checked(left_open, 64, 0))
            _exit(2);
        exit(0);
    }
    for (int r = 0; r < 2; r++) {
        waitpid(pids[r], &ended, 0);
        assert_true(WIFEXITED(ended));
        assert_int_equal(WEXITSTATUS(ended), 0);
    }
    world_end(&world);
}

UNIT_TESTS_WITHIN(name_this_run, NULL, a_silent_service_on_the_port_is_passed_over,
                  services_that_answer_nonsense_are_passed_over, unknown_clients_of_rank_0_do_no_harm,
                  neighbouring_jobs_do_not_mix, jobs_on_one_port_are_told_apart_by_id, missing_ranks_are_named_on_all,
                  a_missing_rank_0_is_named, an_unknown_host_ends_at_the_deadline, a_death_is_named_at_once,
                  a_late_rank_is_named_at_the_deadline, different_sizes_are_named,
                  a_wrong_world_size_is_named_on_both_sides, a_rank_given_twice_is_named, another_build_is_refused,
                  groups_in_another_order_are_named, ranks_meet_again_behind_a_creation_that_fails,
                  a_thread_finds_the_end_of_the_process)

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Programs whose stdin, stdout or stderr is closed, and which print all the same: no memory and no connection of EPX,
 * nor of the libraries that it opens, has one of these numbers, so that every result is right and every rank ends well.
 * The thread that prints uses numbers of which it does not know what they are: ThreadSanitizer calls that a race.
 * ctest: labels=ranks,notsan
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit_net.h"
#include "util/descriptor.h"

enum { RANKS = 4, ROUNDS = 3, DEADLINE_MS = 10000, FAILED = 100 };

struct job {
    const char *net; /* NULL: one node */
    int closed;      /* bit fd */
};

/* Exit statuses, as there is nowhere to print. */
enum place { CREATED = 1, WORKED = 5, DESTROYED = 9 };

/* 0, or the place and which of the three is a file of EPX's. */
static int taken(int closed, enum place place)
{
    struct stat about;

    for (int fd = 0; fd < 3; fd++)
        if ((closed >> fd & 1) && fstat(fd, &about) == 0 && about.st_rdev != makedev(1, 3))
            return (int)place + fd;
    return 0;
}

static volatile int printing = 1;

static void *print(void *arg)
{
    static const char text[4096] = "what a program prints";
    const int closed = *(const int *)arg;

    while (printing) {
        for (int fd = 0; fd < 3; fd++)
            if ((closed >> fd & 1) && write(fd, text, sizeof(text)) >= 0 && fd != STDIN_FILENO)
                return arg; /* into what? */
        usleep(100);
    }
    return NULL;
}

static int work(int rank, const struct job *job)
{
    epx_group_config config = fixture_config(slow_ms(DEADLINE_MS));
    struct fixture s;
    int result;

    config.enable_mask = 1;
    config.ranks_per_node = job->net ? 2 : 0;
    snprintf(config.net, sizeof(config.net), "%s", job->net ? job->net : "");
    if (fixture_open(&s, rank, RANKS, NULL, &config))
        return FAILED;
    result = taken(job->closed, CREATED);
    for (int i = 0; i < ROUNDS && !result; i++)
        result = fixture_ll(&s) || fixture_ht(&s) ? FAILED + 1 : 0;
    result = result ? result : taken(job->closed, WORKED);
    fixture_close(&s);
    return result ? result : taken(job->closed, DESTROYED);
}

static int be_rank(int rank, void *arg)
{
    struct job *job = arg;
    void *wrote = NULL;
    pthread_t printer;
    int result;

    for (int fd = 0; fd < 3; fd++)
        if (job->closed >> fd & 1)
            close(fd);
    if (pthread_create(&printer, NULL, print, &job->closed))
        return FAILED + 2;
    result = work(rank, job);
    printing = 0;
    pthread_join(printer, &wrote);
    return result ? result : wrote ? FAILED + 3 : 0;
}

static void closed_in_all_ways(void **state)
{
    const char *net = *state;
    int failures = 0;

    unit_need_net(net);
    for (int closed = 1; closed < 8; closed++) {
        struct job job = {net, closed};
        pid_t pids[RANKS];

        child_world(RANKS);
        assert_int_equal(child_start_ranks(pids, RANKS, be_rank, &job), 0);
        for (int r = 0; r < RANKS; r++) {
            int status = 0;

            assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
            if (status)
                print_error("closed %d: rank %d: status %#x\n", closed, r, (unsigned)status);
            failures += status != 0;
        }
    }
    assert_int_equal(failures, 0);
}

/* What is held stays so: the program sees the errors of a closed descriptor, and gets no other number for its own. */
static void held_as_if_closed(void **state)
{
    const pid_t pid = child_fork();
    char byte = 0;

    (void)state;
    if (pid == 0) {
        const int closed = 7;

        for (int fd = 0; fd < 3; fd++)
            close(fd);
        fd_hold_standard();
        if (taken(closed, CREATED) || open("/dev/null", O_RDONLY) < FD_FIRST_OWN)
            _exit(1);
        if (read(0, &byte, 1) >= 0 || errno != EBADF || write(1, &byte, 1) >= 0 || errno != EBADF)
            _exit(2);
        close(1);
        _exit(fd_own(dup(0)) < FD_FIRST_OWN || fcntl(1, F_GETFD) >= 0);
    }
    assert_true(child_succeeded(pid));
}

static int set_up(void **state)
{
    (void)state;
    child_forget_settings();
    setenv("EPX_LOG", "info", 1);
    return 0;
}

UNIT_MAIN_WITHIN(set_up, NULL, UNIT_CASE("on_one_node", closed_in_all_ways, NULL),
                 UNIT_CASE("over_sockets", closed_in_all_ways, "ofi:tcp"), cmocka_unit_test(held_as_if_closed))

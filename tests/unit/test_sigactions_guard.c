/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The signal handling of a process before and after a vendor library is loaded and called. Each case is a process of
 * its own: dispositions are global, and a library's constructor runs once.
 */

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util/sigactions.h"
#include "tests/lib/unit.h"

static const int taken[] = {SIGINT, SIGTERM, SIGSEGV, SIGABRT}; /* by the constructor of fake_vendor.c */
enum { TAKEN = (int)(sizeof(taken) / sizeof(taken[0])) };

static void own_handler(int sig)
{
    (void)sig;
}

static void other_handler(int sig)
{
    (void)sig;
}

static void (*now(int sig))(int)
{
    struct sigaction action;

    return sigaction(sig, NULL, &action) == 0 ? action.sa_handler : SIG_ERR;
}

static void *open_vendor(void)
{
    const char *build = getenv("EPX_BUILD_DIR");
    char path[1024];

    snprintf(path, sizeof(path), "%s/tests/fake_ofi/libfabric.so.1", build ? build : "build");
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static void install_in(void *vendor, int sig)
{
    void (*install)(int);

    *(void **)&install = dlsym(vendor, "fake_install");
    install(sig);
}

#define CHECK(condition)                                            \
    do {                                                            \
        if (!(condition)) {                                         \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
            return 1;                                               \
        }                                                           \
    } while (0)

static int vendor_takes_over_where_nothing_is_guarded(void)
{
    CHECK(open_vendor());
    for (int i = 0; i < TAKEN; i++)
        CHECK(now(taken[i]) != SIG_DFL);
    CHECK(now(SIGPIPE) == SIG_IGN);
    return 0;
}

static int dispositions_and_mask_are_restored(void)
{
    struct sigaction before[SIGACTIONS_MAX + 1], after;
    struct sigactions s;
    sigset_t mask;

    signal(SIGINT, own_handler);
    for (int sig = 1; sig <= SIGACTIONS_MAX; sig++)
        sigaction(sig, NULL, &before[sig]);
    sigactions_save(&s);
    CHECK(open_vendor());
    CHECK(now(SIGINT) != own_handler && now(SIGTERM) != SIG_DFL);
    sigactions_restore(&s, "fake");
    for (int sig = 1; sig <= SIGACTIONS_MAX; sig++)
        if (sigaction(sig, NULL, &after) == 0)
            CHECK(after.sa_handler == before[sig].sa_handler &&
                  ((after.sa_flags ^ before[sig].sa_flags) & ~SIGACTIONS_RESTORER) == 0);
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    CHECK(!sigismember(&mask, SIGUSR1));
    return 0;
}

/* Another thread of the application may do so at any time. */
static int what_the_application_changes_meanwhile_stays(void)
{
    struct sigactions s;

    sigactions_save(&s);
    CHECK(open_vendor());
    signal(SIGUSR2, own_handler);
    signal(SIGTERM, own_handler); /* after the vendor */
    sigactions_restore(&s, "fake");
    CHECK(now(SIGUSR2) == own_handler);
    CHECK(now(SIGTERM) == own_handler);
    CHECK(now(SIGINT) == SIG_DFL);
    return 0;
}

/* Without a constructor that could have done it, SIG_IGN is the application's. */
static int ignored_signals_stay_where_nothing_was_loaded(void)
{
    struct sigactions s;

    sigactions_save(&s);
    signal(SIGPIPE, SIG_IGN);
    sigactions_restore(&s, "fake");
    CHECK(now(SIGPIPE) == SIG_IGN);
    return 0;
}

static int later_calls_are_covered(void)
{
    struct sigactions s;
    void *vendor;

    sigactions_save(&s);
    CHECK((vendor = open_vendor()));
    sigactions_restore(&s, "fake");
    signal(SIGINT, other_handler);
    sigactions_save(&s);
    install_in(vendor, SIGINT);
    install_in(vendor, SIGBUS);
    sigactions_restore(&s, "fake");
    CHECK(now(SIGINT) == other_handler);
    CHECK(now(SIGBUS) == SIG_DFL);
    return 0;
}

/* The application had loaded it, and has what it wanted. */
static int handlers_that_were_there_stay(void)
{
    struct sigactions s;
    void (*theirs)(int);
    void *vendor = open_vendor();

    CHECK(vendor);
    theirs = now(SIGTERM);
    sigactions_vendor(dlsym(vendor, "fake_install"));
    sigactions_save(&s);
    install_in(vendor, SIGBUS);
    sigactions_restore(&s, "fake");
    CHECK(now(SIGTERM) == theirs && theirs != SIG_DFL);
    CHECK(now(SIGPIPE) == SIG_IGN);
    CHECK(now(SIGBUS) == SIG_DFL);
    return 0;
}

/* Two threads: the second saves while the handlers are the vendor's, and its own call installs them again. */
static int overlapping_calls_are_covered(void)
{
    struct sigactions first, second;
    void *vendor;

    signal(SIGINT, own_handler);
    sigactions_save(&first);
    CHECK((vendor = open_vendor()));
    sigactions_restore(&first, "fake");

    sigactions_save(&first);
    install_in(vendor, SIGINT);
    sigactions_save(&second);
    sigactions_restore(&first, "fake");
    CHECK(now(SIGINT) == own_handler);
    install_in(vendor, SIGINT);
    sigactions_restore(&second, "fake");
    CHECK(now(SIGINT) == own_handler);

    /* Ended in the other order, and SIGPIPE, which the constructor ignores, is not taken for the application's
     * choice. */
    sigactions_save(&first);
    install_in(vendor, SIGINT);
    sigactions_save(&second);
    sigactions_restore(&second, "fake");
    sigactions_restore(&first, "fake");
    CHECK(now(SIGINT) == own_handler && now(SIGPIPE) == SIG_DFL);
    return 0;
}

static int overlapping_loads_are_covered(void)
{
    struct sigactions first, second;

    sigactions_save(&first);
    CHECK(open_vendor());
    sigactions_save(&second);
    sigactions_restore(&first, "fake");
    sigactions_restore(&second, "fake");
    CHECK(now(SIGPIPE) == SIG_DFL && now(SIGINT) == SIG_DFL);
    return 0;
}

static int errno_is_kept(void)
{
    struct sigactions s;

    errno = EXDEV;
    sigactions_save(&s);
    CHECK(errno == EXDEV);
    open_vendor();
    errno = EXDEV;
    sigactions_restore(&s, "fake");
    CHECK(errno == EXDEV);
    return 0;
}

static void in_a_process(int (*body)(void))
{
    int status;
    pid_t pid;

    fflush(NULL);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        for (int sig = 1; sig <= SIGACTIONS_MAX; sig++)
            signal(sig, SIG_DFL); /* not the test framework's, nor a sanitizer's */
        _exit(body());
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

#define CASE(name)                        \
    static void test_##name(void **state) \
    {                                     \
        (void)state;                      \
        in_a_process(name);               \
    }

CASE(vendor_takes_over_where_nothing_is_guarded)
CASE(dispositions_and_mask_are_restored)
CASE(what_the_application_changes_meanwhile_stays)
CASE(ignored_signals_stay_where_nothing_was_loaded)
CASE(later_calls_are_covered)
CASE(handlers_that_were_there_stay)
CASE(overlapping_calls_are_covered)
CASE(overlapping_loads_are_covered)
CASE(errno_is_kept)

UNIT_TESTS(test_vendor_takes_over_where_nothing_is_guarded, test_dispositions_and_mask_are_restored,
           test_what_the_application_changes_meanwhile_stays, test_ignored_signals_stay_where_nothing_was_loaded,
           test_later_calls_are_covered, test_handlers_that_were_there_stay, test_overlapping_calls_are_covered,
           test_overlapping_loads_are_covered, test_errno_is_kept)

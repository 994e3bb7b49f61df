/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank, started by `epx run`: the signal handling of the process is the same before a group is created, while it
 * exists, and after it is destroyed; its handlers of SIGINT, SIGTERM and SIGSEGV are called. With the argument "fails"
 * the group cannot be created, and the rest holds all the same. Exit status 0; 1 with a message.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "epx/epx.h"
#include "util/sigactions.h"

enum { SIGNALS = 64 };

static const int handled[] = {SIGINT, SIGTERM, SIGSEGV};
enum { HANDLED = sizeof(handled) / sizeof(handled[0]) };
static volatile sig_atomic_t calls[SIGNALS + 1];

static void on_signal(int sig)
{
    calls[sig]++;
}

/* Each handler of the program is called: how many were not. */
static int raise_all(int times)
{
    int missing = 0;

    for (int i = 0; i < HANDLED; i++) {
        raise(handled[i]);
        if (calls[handled[i]] == times)
            continue;
        fprintf(stderr, "the program's own handler of signal %d was not called\n", handled[i]);
        missing++;
    }
    return missing;
}

static struct sigaction before[SIGNALS + 1];
static sigset_t mask_before;

static void record(void)
{
    for (int sig = 1; sig <= SIGNALS; sig++)
        sigaction(sig, NULL, &before[sig]);
    sigprocmask(SIG_SETMASK, NULL, &mask_before);
}

static int differences(const char *when)
{
    sigset_t mask;
    int count = 0;

    for (int sig = 1; sig <= SIGNALS; sig++) {
        struct sigaction now;

        if (sigaction(sig, NULL, &now) != 0 || (now.sa_handler == before[sig].sa_handler &&
                                                ((now.sa_flags ^ before[sig].sa_flags) & ~SIGACTIONS_RESTORER) == 0))
            continue;
        fprintf(stderr, "%s: the handler of signal %d (%s) has changed\n", when, sig, strsignal(sig));
        count++;
    }
    sigprocmask(SIG_SETMASK, NULL, &mask);
    for (int sig = 1; sig <= SIGNALS; sig++)
        if (sigismember(&mask, sig) != sigismember(&mask_before, sig)) {
            fprintf(stderr, "%s: signal %d (%s) is blocked or no longer\n", when, sig, strsignal(sig));
            count++;
        }
    return count;
}

int main(int argc, char **argv)
{
    const int fails = argc > 1 && !strcmp(argv[1], "fails");
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    epx_group *group = NULL;
    epx_status status;
    int bad;

    config.num_experts = 8;
    config.max_tokens_per_rank = 8;
    config.max_hidden_bytes = 256;
    config.alloc_bytes = 1 << 20;
    for (int i = 0; i < HANDLED; i++)
        signal(handled[i], on_signal);
    record();
    status = epx_group_create(&group, NULL, &config);
    bad = differences("after epx_group_create");
    if ((status != EPX_OK) != fails) {
        fprintf(stderr, "epx_group_create: %s\n", status == EPX_OK ? "no error" : epx_last_error());
        return 1;
    }
    bad += raise_all(1);
    if (group && epx_group_destroy(group) != EPX_OK) {
        fprintf(stderr, "epx_group_destroy: %s\n", epx_last_error());
        return 1;
    }
    bad += differences("after epx_group_destroy") + raise_all(2);
    return bad > 0;
}

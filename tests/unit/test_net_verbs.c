/* SPDX-License-Identifier: Apache-2.0 */
/* The network suite over verbs; skipped where no card can be used. */
/* test_net_verbs [verbs|ofi [CASE...]]: `ofi` goes through libfabric's verbs provider; cases as the suite names them,
 * and, of verbs, its own. test_net_verbs --list: their names. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/lib/net_suite_rank.h"
#include "tests/lib/slow.h"
#include "tests/unit/net_suite_tell.h"
#include "util/clock.h"

enum { MAX_TESTS = 64, ROW = 64, ROWS = 8192, GOOD = 0x11, USED_AGAIN = 0xee };

static const struct net_suite verbs = {.label = "verbs", .ops = &net_verbs_ops, .provider = ""};
static const struct net_suite ofi = {.label = "ofi_verbs", .ops = &net_ofi_ops, .provider = "verbs"};
static const struct net_suite *suite = &verbs;

/* ---- A peer that is silent ------------------------------------------------------------------------------------- */

/* Rank 2, which does nothing for a while, as if it were stopped: receives that are consumed are not posted again. Then
 * nothing comes that was stored after its loss; and as rank 0 has reset its queue pair, it loses rank 0. */
static int be_silent(struct suite_rank *self)
{
    SUITE_TRY(suite_wait_arrived(self, 0, 1));
    SUITE_TRY(suite_wait_arrived(self, 1, 1));
    atomic_store(&self->shared->word, 1);
    while (atomic_load(&self->shared->word) != 2 && !atomic_load(&self->shared->stop))
        usleep(1000);
    while (!self->lost[0]) {
        if (self->posted[0] < ROWS)
            suite_try_put(self, 0, 0, 0, ROW, 0);
        SUITE_TRY(suite_step(self));
    }
    for (uint32_t i = 0; i < 2 * ROWS * ROW; i++)
        SUITE_CHECK(self, self->heap[i] != USED_AGAIN);
    return 0;
}

/* Until there is no room any more, and none comes for a while. */
static int fill_up(struct suite_rank *self)
{
    const uint64_t pause = 200000000u * (uint64_t)suite_time_scale();
    uint64_t since = clock_ns();

    while (clock_ns() - since < pause && !self->lost[2]) {
        const uint64_t target = ((uint64_t)self->rank * ROWS + self->posted[2]) * ROW;

        SUITE_CHECK(self, self->posted[2] < ROWS);
        if (!suite_try_put(self, 2, 0, target, ROW, 0))
            since = clock_ns();
        SUITE_TRY(suite_step(self));
    }
    return 0;
}

/* Closing does not wait for puts that the card repeats without end. */
static int close_now(struct suite_rank *self)
{
    const uint64_t begin = clock_ns();

    SUITE_CHECK(self, !self->lost[2] && self->completed[2] < self->posted[2]);
    suite_close(self);
    SUITE_CHECK(self, clock_ns() - begin < (uint64_t)self->timeout_ms * 1000000u / 2);
    return 0;
}

static int lose_at_the_deadline(struct suite_rank *self)
{
    const uint64_t begin = clock_ns(), most = (uint64_t)self->timeout_ms * 1000000u * 3 / 2;

    while (!self->lost[2]) {
        SUITE_TRY(suite_step(self));
        SUITE_CHECK(self, clock_ns() - begin < most);
    }
    SUITE_CHECK(self, self->lost[2] == ETIMEDOUT && self->completed[2] < self->posted[2]);
    SUITE_CHECK(self, suite_try_put(self, 2, 0, 0, ROW, 0) == -ETIMEDOUT);
    return 0;
}

static int silent_peer_is_given_up(struct suite_rank *self)
{
    SUITE_TRY(suite_open(self));
    memset(self->heap, GOOD, ROW);
    SUITE_TRY(suite_barrier(self));
    if (self->rank == 2)
        return be_silent(self);
    SUITE_TRY(suite_put(self, 2, 0, (uint64_t)self->rank * ROWS * ROW, ROW, 0));
    while (!atomic_load(&self->shared->word))
        SUITE_TRY(suite_step(self));
    atomic_store(&self->shared->gone[2], 1); /* for barriers */
    SUITE_TRY(suite_barrier(self));
    SUITE_TRY(fill_up(self));
    SUITE_TRY(self->rank ? close_now(self) : lose_at_the_deadline(self));
    if (!self->rank) /* the other has no heap any more */
        memset(self->heap, USED_AGAIN, ROW);
    SUITE_TRY(suite_barrier(self));
    atomic_store(&self->shared->word, 2);
    return 0;
}

/* ---- The program ------------------------------------------------------------------------------------------------- */

static const struct suite_case own[] = {
    {.name = "silent_peer_is_given_up", .nranks = 3, .body = silent_peer_is_given_up, .timeout_ms = 3000}};
enum { OWN = sizeof(own) / sizeof(own[0]) };

static int case_count(void)
{
    return net_suite_count() + (suite == &verbs ? OWN : 0);
}

static const struct suite_case *case_at(int index)
{
    return index < net_suite_count() ? &suite_cases[index] : &own[index - net_suite_count()];
}

static void run_case(void **state)
{
    char text[600];
    const enum net_suite_outcome outcome = suite_run_case(suite, case_at(*(int *)*state), text, sizeof(text));

    net_suite_tell(outcome, text);
}

/* In a process of its own: the test program must not open a card before it forks. */
static int probe(void)
{
    pid_t pid = fork();
    int status = 1;

    if (pid == 0) {
        char text[512];
        int bad = suite->ops->probe(suite->provider, text, sizeof(text)) != EPX_OK;
        printf("%s%s\n", bad ? "no card to test with: " : "", text);
        fflush(stdout);
        _exit(bad);
    }
    return pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status) ? -1 : 0;
}

static int is_asked_for(const char *name, int argc, char **argv)
{
    for (int i = 2; i < argc; i++)
        if (!strcmp(argv[i], name))
            return 1;
    return argc <= 2;
}

int main(int argc, char **argv)
{
    static struct CMUnitTest tests[MAX_TESTS];
    static char names[MAX_TESTS][96];
    static int indices[MAX_TESTS];
    int count = 0;

    if (argc > 1 && !strcmp(argv[1], "--list")) {
        for (int i = 0; i < case_count(); i++)
            puts(case_at(i)->name);
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "ofi"))
        suite = &ofi;
    for (int i = 0; i < case_count() && count < MAX_TESTS; i++) {
        if (!is_asked_for(case_at(i)->name, argc, argv))
            continue;
        indices[count] = i;
        snprintf(names[count], sizeof(names[count]), "%s_%s", suite->label, case_at(i)->name);
        tests[count] = (struct CMUnitTest){names[count], run_case, NULL, NULL, &indices[count]};
        count++;
    }
    if (probe())
        return 77;
    return _cmocka_run_group_tests("net_verbs", tests, (size_t)count, NULL, NULL);
}

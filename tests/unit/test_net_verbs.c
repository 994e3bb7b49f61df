/* SPDX-License-Identifier: Apache-2.0 */
/* The network suite over verbs; skipped where no card can be used. */
/* test_net_verbs [verbs|ofi [CASE...]]: `ofi` goes through libfabric's verbs provider; cases as the suite names them.
 * test_net_verbs --list: their names. */
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/net_suite_tell.h"

enum { MAX_TESTS = 64 };

static const struct net_suite verbs = {.label = "verbs", .ops = &net_verbs_ops, .provider = ""};
static const struct net_suite ofi = {.label = "ofi_verbs", .ops = &net_ofi_ops, .provider = "verbs"};
static const struct net_suite *suite = &verbs;

static void run_case(void **state)
{
    const int index = *(int *)*state;
    char text[600];
    const enum net_suite_outcome outcome = net_suite_run(suite, index, text, sizeof(text));

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
        for (int i = 0; i < net_suite_count(); i++)
            puts(net_suite_name(i));
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "ofi"))
        suite = &ofi;
    for (int i = 0; i < net_suite_count() && count < MAX_TESTS; i++) {
        if (!is_asked_for(net_suite_name(i), argc, argv))
            continue;
        indices[count] = i;
        snprintf(names[count], sizeof(names[count]), "%s_%s", suite->label, net_suite_name(i));
        tests[count] = (struct CMUnitTest){names[count], run_case, NULL, NULL, &indices[count]};
        count++;
    }
    if (probe())
        return 77;
    return _cmocka_run_group_tests("net_verbs", tests, (size_t)count, NULL, NULL);
}

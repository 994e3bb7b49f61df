/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "epx/epx.h"
#include "options.h"
#include "util/descriptor.h"
#include "util/env.h"

static int cmd_help(int argc, char **argv);
static int cmd_version(int argc, char **argv);

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"doctor", cmd_doctor, "report what works on this machine: devices, networks, and what is missing"},
    {"bench", cmd_bench, "measure dispatch and combine on this machine, and check their results"},
    {"ep-bench", cmd_ep_bench, "NVIDIA's ep_bench for NCCL EP, on EPX: its options, its lines"},
    {"top", cmd_top, "show the running groups of this machine: rates, and who waits for whom"},
    {"trace", cmd_trace, "merge traces (EPX_TRACE) of several machines"},
    {"run", cmd_run, "start ranks of a program on this machine"},
    {"sim", cmd_sim, "simulate many ranks on one thread, with faults, from seeds"},
    {"predict", cmd_predict, "predict dispatch and combine of many ranks on machines that are not here"},
    {"help", cmd_help, "this list, the options of one command (epx help bench), or epx help environment"},
    {"version", cmd_version, "print the version"},
};
enum { COMMAND_COUNT = (int)(sizeof(commands) / sizeof(commands[0])), NEAR = 3 };

static const struct command *find_command(const char *name)
{
    for (int i = 0; i < COMMAND_COUNT; i++)
        if (!strcmp(commands[i].name, name))
            return &commands[i];
    return NULL;
}

static void print_help(FILE *to)
{
    fprintf(to, "usage: epx COMMAND [options]\n\n"
                "EPX moves Mixture-of-Experts tokens between ranks: dispatch sends each token to its experts, combine\n"
                "brings the results back. This program tests, measures and starts ranks.\n\n");
    for (int i = 0; i < COMMAND_COUNT; i++)
        fprintf(to, "  %-9s %s\n", commands[i].name, commands[i].summary);
    fprintf(to, "\nBegin with:\n"
                "  epx doctor                  what this machine can do\n"
                "  epx bench ll --check        low latency (decoding), 8 ranks, results checked\n"
                "  epx bench ht --check        high throughput (prefill, training)\n"
                "\nepx help environment explains the variables that EPX reads. Exit status: 0 success, 1 failure, 2 "
                "wrong usage.\n");
}

/* For completion in shells: tools/completion. */
static void print_words(void)
{
    for (int i = 0; i < COMMAND_COUNT; i++)
        puts(commands[i].name);
}

static int unknown_command(const char *name)
{
    const char *nearest = NULL;
    int best = NEAR;

    for (int i = 0; i < COMMAND_COUNT; i++) {
        const int d = word_distance(name, commands[i].name);
        if (d < best) {
            best = d;
            nearest = commands[i].name;
        }
    }
    if (nearest)
        options_complain("epx", "unknown command '%s' (did you mean '%s'?)", name, nearest);
    else
        options_complain("epx", "unknown command '%s'", name);
    return EXIT_USAGE;
}

/* `epx help run` is `epx run --help`; `epx help environment` is about no command. */
static int cmd_help(int argc, char **argv)
{
    const struct command *command = argc > 1 ? find_command(argv[1]) : NULL;

    if (argc > 1 && !strcmp(argv[1], "environment"))
        return help_environment(argc - 1, argv + 1);
    if (argc > 1 && !command)
        return unknown_command(argv[1]);
    if (command && command->run != cmd_help && command->run != cmd_version) {
        char *question[] = {argv[1], "--help", NULL};
        return command->run(2, question);
    }
    print_help(stdout);
    return EXIT_OK;
}

static int cmd_version(int argc, char **argv)
{
    int code = 0;

    (void)argc, (void)argv;
    epx_version(&code);
    printf("epx %d.%d.%d\n", code / 10000, code / 100 % 100, code % 100);
    return 0;
}

extern char **environ;

/* The commands that start ranks or simulate them warn of misspelt variables once; the ranks would each do so again. */
static void warn_unknown_variables(const struct command *command)
{
    char name[ENV_NAME_BYTES];
    const char *nearest;

    if (command->run != cmd_bench && command->run != cmd_sim && command->run != cmd_predict)
        return;
    for (char **at = environ; *at;) {
        const size_t length = strcspn(*at, "=");
        snprintf(name, sizeof(name), "%.*s", (int)length, *at);
        if (length >= sizeof(name) || !env_is_unknown(name, &nearest)) {
            at++;
            continue;
        }
        fprintf(stderr, "epx: warning: %s is set, but EPX reads no such variable%s%s%s\n", name,
                nearest ? "; did you mean " : " (epx doctor lists all)", nearest ? nearest : "", nearest ? "?" : "");
        if (unsetenv(name) != 0) /* moves the following ones to `at` */
            return;
    }
}

/* Output that a full disk has cut is no success. */
static int finish(int status)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return status;
    fprintf(stderr, "epx: cannot write the output: %s\n", strerror(errno));
    return status ? status : EXIT_FAILED;
}

int main(int argc, char **argv)
{
    const struct command *command;

    fd_hold_standard();
    if (argc < 2) {
        print_help(stderr);
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))
        return finish(cmd_help(1, argv));
    if (!strcmp(argv[1], "--help=words")) {
        print_words();
        return finish(EXIT_OK);
    }
    if (!strcmp(argv[1], "--version"))
        return finish(cmd_version(1, argv));
    command = find_command(argv[1]);
    if (!command)
        return unknown_command(argv[1]);
    warn_unknown_variables(command);
    if (command->run != cmd_run)  /* a program that is started keeps its own */
        signal(SIGXFSZ, SIG_IGN); /* a file above `ulimit -f` is an error, with a message */
    return finish(command->run(argc - 1, argv + 1));
}

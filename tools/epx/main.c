/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "commands.h"
#include "epx/epx.h"

static int cmd_help(int argc, char **argv);
static int cmd_version(int argc, char **argv);

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"run", cmd_run, "start ranks of a program on this machine"},
    {"bench", cmd_bench, "measure and check dispatch and combine"},
    {"sim", cmd_sim, "simulate many ranks on one thread, with faults, from seeds"},
    {"doctor", cmd_doctor, "what is found here, what would be chosen and why"},
    {"help", cmd_help, "this list, or the options of one command"},
    {"version", cmd_version, "which version this is"},
};
enum { COMMAND_COUNT = (int)(sizeof(commands) / sizeof(commands[0])), USAGE_ERROR = 2 };

static const struct command *find_command(const char *name)
{
    for (int i = 0; i < COMMAND_COUNT; i++)
        if (!strcmp(commands[i].name, name))
            return &commands[i];
    return NULL;
}

static void print_commands(FILE *to)
{
    fprintf(to, "usage: epx COMMAND [options]\n\n");
    for (int i = 0; i < COMMAND_COUNT; i++)
        fprintf(to, "  %-9s %s\n", commands[i].name, commands[i].summary);
}

static int unknown_command(const char *name)
{
    fprintf(stderr, "epx: there is no command \"%s\"\n\n", name);
    print_commands(stderr);
    return USAGE_ERROR;
}

/* `epx help run` is `epx run --help`. */
static int cmd_help(int argc, char **argv)
{
    const struct command *command = argc > 1 ? find_command(argv[1]) : NULL;

    if (argc > 1 && !command)
        return unknown_command(argv[1]);
    if (command && command->run != cmd_help && command->run != cmd_version) {
        char *question[] = {argv[1], "--help", NULL};
        return command->run(2, question);
    }
    print_commands(stdout);
    return 0;
}

static int cmd_version(int argc, char **argv)
{
    int code = 0;

    (void)argc, (void)argv;
    epx_version(&code);
    printf("epx %d.%d.%d\n", code / 10000, code / 100 % 100, code % 100);
    return 0;
}

int main(int argc, char **argv)
{
    const struct command *command;

    if (argc < 2) {
        print_commands(stderr);
        return USAGE_ERROR;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h"))
        return cmd_help(1, argv);
    if (!strcmp(argv[1], "--version"))
        return cmd_version(1, argv);
    command = find_command(argv[1]);
    return command ? command->run(argc - 1, argv + 1) : unknown_command(argv[1]);
}

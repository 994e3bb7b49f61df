/* SPDX-License-Identifier: Apache-2.0 */
/* epx run: ranks of any program on this machine. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "boot/launcher.h"
#include "commands.h"
#include "options.h"

static int set_grace(void *target, const char *text);

struct options {
    struct launch_options launch;
    uint64_t given;
};

#define FIELD(name) offsetof(struct options, launch.name)

static const struct option_spec specs[] = {
    {.kind = OPTION_TITLE, .help = "Options:"},
    {.name = "ranks",
     .letter = 'n',
     .kind = OPTION_INT,
     .value = "N",
     .help = "number of ranks to start, 1 to 1024; required but in the world of a launcher",
     .offset = FIELD(nranks),
     .low = 1,
     .high = LAUNCH_MAX_RANKS,
     .hints = "np nproc nprocs nproc-per-node nproc_per_node ntasks num-ranks n"},
    {.name = "tag", .kind = OPTION_FLAG, .help = "begin each line of output with [rank]", .offset = FIELD(tag)},
    {.name = "port",
     .kind = OPTION_INT,
     .value = "PORT",
     .help = "MASTER_PORT of the ranks",
     .fallback = "a free one",
     .offset = FIELD(port),
     .low = 1,
     .high = 65535,
     .hints = "master-port master_port"},
    {.name = "grace",
     .kind = OPTION_CALL,
     .value = "SECONDS",
     .help = "time that the other ranks have to end once one rank has failed",
     .fallback = "5",
     .call = set_grace},
    {.name = "timeout",
     .kind = OPTION_SECONDS,
     .value = "SECONDS",
     .help = "end all ranks after this time, exit status 124",
     .fallback = "no limit",
     .offset = FIELD(timeout_ms),
     .high = 1000000000},
};

static const struct option_table table = {
    .program = "epx run",
    .usage = "epx run -n RANKS [options] [--] PROGRAM [ARGUMENTS...]\n"
             "epx run PROGRAM [ARGUMENTS...]       in a world that torchrun, mpirun or srun has started: joins it",
    .about = "Starts RANKS processes of PROGRAM on this machine and waits for all of them. Each one has RANK,\n"
             "LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, EPX_JOB_ID and EPX_SECRET in its\n"
             "environment, from which EPX (and torch.distributed) finds the other ranks.",
    .notes = "Example:  epx run -n 8 --tag ./my_program --its-option\n"
             "\n"
             "Exit status: 0 when every rank returned 0; otherwise that of the first rank that failed, or 128 + its\n"
             "signal; 124 after --timeout; 126 or 127 when PROGRAM cannot be started; 2 for a wrong command line.\n",
    .specs = specs,
    .count = (int)(sizeof(specs) / sizeof(specs[0])),
    .stop_at_word = 1,
    .given = offsetof(struct options, given),
};

/* 0 seconds means none at all, which a launch calls negative. */
static int set_grace(void *target, const char *text)
{
    struct launch_options *options = &((struct options *)target)->launch;
    double seconds;
    char rest;

    if (sscanf(text, "%lf%c", &seconds, &rest) != 1 || !(seconds >= 0 && seconds <= 1e6))
        return options_complain(table.program, "--grace is '%s'; expected seconds from 0 to 1000000", text);
    options->grace_ms = (int)(seconds * 1000);
    options->grace_ms = options->grace_ms ? options->grace_ms : -1;
    return 0;
}

static void set_number(const char *name, int value)
{
    char text[16];

    snprintf(text, sizeof(text), "%d", value);
    if (value >= 0)
        setenv(name, text, 1);
}

/* In a launcher's world, without -n: this process is one of its ranks, and the program takes its place, with the
 * variables that `epx run` sets beside the launcher's own. */
static int become_rank(char *const *argv)
{
    struct launcher launcher;

    if (launcher_read(&launcher) != EPX_OK) {
        fprintf(stderr, "epx run: %s\n", epx_last_error());
        return EXIT_USAGE;
    }
    set_number("RANK", launcher.rank);
    set_number("WORLD_SIZE", launcher.nranks);
    set_number("LOCAL_RANK", launcher.local_rank);
    set_number("LOCAL_WORLD_SIZE", launcher.local_nranks);
    execvp(argv[0], argv);
    fprintf(stderr, "epx run: %s: %s\n", argv[0], strerror(errno));
    return errno == ENOENT ? 127 : 126;
}

int cmd_run(int argc, char **argv)
{
    struct options options = {.launch = {.title = "epx run"}};
    struct launch_options *launch = &options.launch;
    const char *odd;
    int next;
    const enum option_result result = options_parse(&table, &options, argc, argv, 1, &next);

    if (result != OPTIONS_OK)
        return result == OPTIONS_HELP ? EXIT_OK : EXIT_USAGE;
    launch->argv = argv + next;
    if (!launch->nranks && launch->argv[0] && launcher_name()) {
        odd = options_given_beside(&table, &options, "");
        if (!odd)
            return become_rank(launch->argv);
        options_complain(table.program, "--%s belongs to -n RANKS; here %s has started the ranks", odd,
                         launcher_name());
        return EXIT_USAGE;
    }
    if (!launch->nranks || !launch->argv[0]) {
        options_complain(table.program, "%s is missing", launch->nranks ? "the program" : "-n RANKS");
        return EXIT_USAGE;
    }
    return launch_ranks(launch);
}

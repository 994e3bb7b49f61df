/* SPDX-License-Identifier: Apache-2.0 */
/* epx run: ranks of any program on this machine. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"

enum { USAGE_ERROR = 2 };

static void print_usage(FILE *to)
{
    fprintf(to,
            "usage: epx run -n RANKS [options] [--] PROGRAM [ARGUMENTS...]\n"
            "\n"
            "Starts RANKS processes of PROGRAM on this machine, each with RANK, LOCAL_RANK, WORLD_SIZE,\n"
            "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and EPX_JOB_ID set, and waits for all of them.\n"
            "\n"
            "  -n, --ranks RANKS      how many, 1 to %d\n"
            "      --tag              start each line of output with [rank]\n"
            "      --port PORT        MASTER_PORT (default: a free one)\n"
            "      --grace SECONDS    what the other ranks get once one has failed (default %g)\n"
            "      --timeout SECONDS  end everything after this long (default: no limit)\n"
            "\n"
            "Returns 0 when every rank did, else the first failure's exit code, or 128 + its signal;\n"
            "%d when --timeout ended it.\n",
            LAUNCH_MAX_RANKS, LAUNCH_GRACE_MS / 1000.0, LAUNCH_TIMED_OUT);
}

static int bad_value(const char *option, const char *text, const char *expected)
{
    fprintf(stderr, "epx run: %s is \"%s\", expected %s\n", option, text, expected);
    return USAGE_ERROR;
}

static int parse_int(const char *option, const char *text, int low, int high, int *value)
{
    char *end, expected[48];
    long number;

    errno = 0;
    number = strtol(text, &end, 10);
    if (!errno && end != text && !*end && number >= low && number <= high) {
        *value = (int)number;
        return 0;
    }
    snprintf(expected, sizeof(expected), "an integer from %d to %d", low, high);
    return bad_value(option, text, expected);
}

static int parse_seconds(const char *option, const char *text, int *ms)
{
    char *end;
    double seconds = strtod(text, &end);

    if (end == text || *end || !(seconds >= 0 && seconds <= 1e6))
        return bad_value(option, text, "seconds from 0 to 1000000");
    *ms = (int)(seconds * 1000);
    return 0;
}

/* 0 = go on, else stop with *code. */
static int parse_options(int argc, char **argv, struct launch_options *options, int *code)
{
    static const struct option known[] = {{"ranks", required_argument, NULL, 'n'},
                                          {"tag", no_argument, NULL, 't'},
                                          {"port", required_argument, NULL, 'p'},
                                          {"grace", required_argument, NULL, 'g'},
                                          {"timeout", required_argument, NULL, 'T'},
                                          {"help", no_argument, NULL, 'h'},
                                          {NULL, 0, NULL, 0}};
    int letter;

    optind = 1;
    *code = 0;
    while (!*code && (letter = getopt_long(argc, argv, "+n:h", known, NULL)) != -1) {
        switch (letter) {
        case 'n':
            *code = parse_int("-n", optarg, 1, LAUNCH_MAX_RANKS, &options->nranks);
            break;
        case 't':
            options->tag = 1;
            break;
        case 'p':
            *code = parse_int("--port", optarg, 1, 65535, &options->port);
            break;
        case 'g':
            *code = parse_seconds("--grace", optarg, &options->grace_ms);
            options->grace_ms = options->grace_ms ? options->grace_ms : -1; /* none at all */
            break;
        case 'T':
            *code = parse_seconds("--timeout", optarg, &options->timeout_ms);
            break;
        case 'h':
            print_usage(stdout);
            return 1;
        default:
            *code = USAGE_ERROR;
        }
    }
    return *code;
}

int cmd_run(int argc, char **argv)
{
    struct launch_options options = {.title = "epx run"};
    int code;

    if (parse_options(argc, argv, &options, &code))
        return code;
    options.argv = argv + optind;
    if (!options.nranks || !options.argv[0]) {
        fprintf(stderr, "epx run: %s is missing\n\n", options.nranks ? "the program" : "-n RANKS");
        print_usage(stderr);
        return USAGE_ERROR;
    }
    return launch_ranks(&options);
}

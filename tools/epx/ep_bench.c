/* SPDX-License-Identifier: Apache-2.0 */
/* epx ep-bench: ranks of epx-ep-bench (bench/ep_bench), which lies beside this program; in a launcher's world, this
 * process is one of them. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "boot/launcher.h"
#include "commands.h"
#include "options.h"
#include "util/env.h"

enum { DEFAULT_RANKS = 8, BAD_OPTIONS = 1 }; /* ep_bench's own status */

/* The program for the device, in the folder of this one. */
static int find_program(char path[PATH_MAX])
{
    const char *device = env_string("EPX_DEVICE");
    const char *name = device && !strcasecmp(device, "cuda") ? "epx-ep-bench-cuda" : "epx-ep-bench";
    const ssize_t length = readlink("/proc/self/exe", path, PATH_MAX - 32);
    char *end;

    if (length < 0)
        return -1;
    path[length] = '\0';
    end = strrchr(path, '/');
    strcpy(end ? end + 1 : path, name);
    if (!access(path, X_OK))
        return 0;
    fprintf(stderr, "epx ep-bench: %s: %s; %s\n", path, strerror(errno),
            strstr(name, "cuda") ? "build EPX where CUDA is" : "build EPX, or install the package epx-standin");
    return -1;
}

static int read_ranks(const char *text)
{
    char *end;
    const long n = text ? strtol(text, &end, 10) : 0;

    if (text && *text && !*end && n >= 1 && n <= LAUNCH_MAX_RANKS)
        return (int)n;
    options_complain("epx ep-bench", "-n is '%s'; expected 1 to %d ranks", text ? text : "", LAUNCH_MAX_RANKS);
    return 0;
}

static int asks_for_help(char *const *argv)
{
    while (*argv && strncmp(*argv, "--help", 6) && strcmp(*argv, "-h"))
        argv++;
    return *argv != NULL;
}

int cmd_ep_bench(int argc, char **argv)
{
    struct launch_options options = {.title = "epx ep-bench", .nranks = DEFAULT_RANKS};
    char path[PATH_MAX], **args = calloc((size_t)argc + 2, sizeof(*args));
    int count = 1;

    if (!args || find_program(path)) {
        free(args);
        return BAD_OPTIONS;
    }
    args[0] = path;
    for (int i = 1; i < argc && options.nranks; i++) {
        if (!strcmp(argv[i], "-n") || !strcmp(argv[i], "--ranks"))
            options.nranks = read_ranks(argv[++i < argc ? i : argc]);
        else
            args[count++] = argv[i];
    }
    options.argv = args;
    if (options.nranks && (launcher_name() || asks_for_help(args + 1)))
        execv(path, args); /* comes back only when it fails */
    count = options.nranks ? launch_ranks(&options) : BAD_OPTIONS;
    free(args);
    return count;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "util/core_wait.h"
#include "util/descriptor.h"

#include <stdio.h>
#include <string.h>

/* One line of /proc/self/task/TID/NAME; an empty text where there is none. */
static void read_line(int tid, const char *name, char *line, int bytes)
{
    char path[64];
    FILE *file;

    line[0] = 0;
    snprintf(path, sizeof(path), "/proc/self/task/%d/%s", tid, name);
    file = fd_open_file(path);
    if (!file)
        return;
    if (!fgets(line, bytes, file))
        line[0] = 0;
    fclose(file);
}

uint64_t thread_ran_ns(int tid)
{
    unsigned long long ran = 0;
    char line[128];

    read_line(tid, "schedstat", line, sizeof(line));
    return sscanf(line, "%llu", &ran) == 1 ? ran : 0;
}

int thread_is_runnable(int tid)
{
    const char *state;
    char line[256];

    read_line(tid, "stat", line, sizeof(line));
    state = strrchr(line, ')'); /* a thread's name may have any character */
    return state && state[1] == ' ' && state[2] == 'R';
}

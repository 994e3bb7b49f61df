/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"

enum { USAGE_ERROR = 2 };

static const char usage_text[] =
    "usage: epx doctor [--json]\n"
    "\n"
    "Says what EPX finds on this machine, what it would choose and why, and what would make it faster.\n"
    "Exit status 0 when EPX can run here, 1 when it cannot.\n"
    "\n"
    "  --json    one object instead of text\n";

char *read_line(const char *path, char *text, size_t bytes)
{
    FILE *file = fopen(path, "re");

    text[0] = 0;
    if (!file)
        return text;
    if (!fgets(text, (int)bytes, file))
        text[0] = 0;
    fclose(file);
    text[strcspn(text, "\n")] = 0;
    return text;
}

int path_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

int cmd_doctor(int argc, char **argv)
{
    struct report *report;
    int json = 0, can_run;

    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            fputs(usage_text, stdout);
            return 0;
        }
        if (strcmp(argv[i], "--json")) {
            fprintf(stderr, "epx doctor: unknown option \"%s\"\n\n%s", argv[i], usage_text);
            return USAGE_ERROR;
        }
        json = 1;
    }
    report = report_new();
    doctor_host(report); /* first: it forks, and the libraries that the others open may start threads */
    doctor_sockets(report);
    doctor_net(report);
    doctor_fabric(report);
    doctor_verbs(report);
    doctor_gpu(report);
    doctor_env(report);
    report_print(report, json);
    can_run = report_can_run(report);
    report_free(report);
    return can_run ? 0 : 1;
}

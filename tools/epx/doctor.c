/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "options.h"

struct options {
    int32_t json;
};

static const struct option_spec specs[] = {
    {.kind = OPTION_TITLE, .help = "Options:"},
    {.name = "json",
     .kind = OPTION_FLAG,
     .help = "print one JSON object instead of text",
     .offset = offsetof(struct options, json)},
};

static const struct option_table table = {
    .program = "epx doctor",
    .usage = "epx doctor [--json]",
    .about = "Reports what works on this machine, what does not, and what to do about it; then the details: devices,\n"
             "networks, cards, GPUs, and every environment variable. Run it in the environment of your ranks.",
    .notes = "Exit status: 0 when EPX can run here, 1 when it cannot, 2 for a wrong command line.\n",
    .specs = specs,
    .count = (int)(sizeof(specs) / sizeof(specs[0])),
};

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
    struct options options = {0};
    struct report *report;
    int next, can_run;
    const enum option_result parsed = options_parse(&table, &options, argc, argv, 1, &next);

    if (parsed != OPTIONS_OK)
        return parsed == OPTIONS_HELP ? EXIT_OK : EXIT_USAGE;
    report = report_new();
    doctor_host(report); /* first: it forks, and the libraries that the others open may start threads */
    doctor_sockets(report);
    doctor_net(report);
    doctor_fabric(report);
    doctor_verbs(report);
    doctor_gpu(report);
    doctor_env(report);
    report_print(report, options.json);
    can_run = report_can_run(report);
    report_free(report);
    return can_run ? EXIT_OK : EXIT_FAILED;
}

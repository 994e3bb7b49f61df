/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `epx trace merge`: traces of several machines as one. Their times are those of rank 0's clock already
 * (src/util/trace_write.c has the format), so that their events are put one behind the other:
 *
 *      HEADER                of the first
 *      events of the first, events of the second, ...
 *      FOOTER
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "options.h"

static const char header[] = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n"
                             "{\"name\":\"epx\",\"ph\":\"M\",\"pid\":0,\"tid\":0,\"args\":{\"version\":1}}";
static const char footer[] = "\n]}\n";

struct options {
    const char *output;
};

static const struct option_spec specs[] = {
    {.kind = OPTION_TITLE, .help = "Options:"},
    {.name = "output",
     .letter = 'o',
     .kind = OPTION_TEXT,
     .value = "FILE",
     .help = "where the merged trace goes",
     .fallback = "merged.json",
     .offset = offsetof(struct options, output)},
};

static const struct option_table table = {
    .program = "epx trace",
    .usage = "epx trace merge [options] FILE...",
    .about = "Makes one trace of those that ranks of several machines have written (EPX_TRACE): their times are those\n"
             "of rank 0's clock already. Open the result in https://ui.perfetto.dev or in chrome://tracing.",
    .notes =
        "Exit status: 0 on success, 1 when a file is no trace or cannot be read or written, 2 for a wrong command\n"
        "line.\n",
    .specs = specs,
    .count = (int)(sizeof(specs) / sizeof(specs[0])),
    .stop_at_word = 1,
};

/* The whole file with a zero behind it; NULL after a message. */
static char *read_whole(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "re");
    char *text = NULL;
    long end = -1;

    if (file && fseek(file, 0, SEEK_END) == 0)
        end = ftell(file);
    if (end >= 0 && fseek(file, 0, SEEK_SET) == 0)
        text = malloc((size_t)end + 1);
    if (text && fread(text, 1, (size_t)end, file) != (size_t)end) {
        free(text);
        text = NULL;
    }
    if (!text)
        fprintf(stderr, "epx trace: cannot read %s: %s\n", path, strerror(errno ? errno : EIO));
    else
        text[end] = 0;
    if (file)
        fclose(file);
    *bytes = end > 0 ? (size_t)end : 0;
    return text;
}

static int is_trace(const char *text, size_t bytes)
{
    const size_t ends = strlen(header) + strlen(footer);

    return bytes >= ends && !memcmp(text, header, strlen(header)) &&
           !memcmp(text + bytes - strlen(footer), footer, strlen(footer));
}

/* A rank is in one file only: in two, one of them is not of this run, or was given twice. owner[rank]: whose it is. */
static int check_ranks(const char *text, int file, char **paths, int *owner)
{
    static const char key[] = "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":";

    for (const char *at = strstr(text, key); at; at = strstr(at + 1, key)) {
        const int rank = atoi(at + strlen(key));

        if (rank < 0 || rank >= LAUNCH_MAX_RANKS || owner[rank] == file + 1)
            continue;
        if (owner[rank]) {
            fprintf(stderr, "epx trace: rank %d is in %s and in %s: expected traces of different ranks of one run\n",
                    rank, paths[owner[rank] - 1], paths[file]);
            return -1;
        }
        owner[rank] = file + 1;
    }
    return 0;
}

static int add_trace(FILE *to, int file, char **paths, int *owner)
{
    size_t bytes = 0;
    char *text = read_whole(paths[file], &bytes);
    int rc = text ? 0 : -1;

    if (text && !is_trace(text, bytes)) {
        fprintf(stderr, "epx trace: %s is no trace of EPX, or not complete\n", paths[file]);
        rc = -1;
    }
    if (rc == 0)
        rc = check_ranks(text, file, paths, owner);
    if (rc == 0)
        fwrite(text + strlen(header), 1, bytes - strlen(header) - strlen(footer), to);
    free(text);
    return rc;
}

static int merge(const char *output, int count, char **paths)
{
    int owner[LAUNCH_MAX_RANKS] = {0}, rc = 0;
    FILE *to = fopen(output, "we");

    if (to)
        fputs(header, to);
    for (int i = 0; to && rc == 0 && i < count; i++)
        rc = add_trace(to, i, paths, owner);
    if (to && rc == 0)
        fputs(footer, to);
    if (!to || ferror(to)) {
        fprintf(stderr, "epx trace: cannot write %s: %s\n", output, strerror(errno));
        rc = -1;
    }
    if (to && fclose(to) != 0)
        rc = -1;
    if (rc != 0 && to)
        unlink(output);
    return rc;
}

int cmd_trace(int argc, char **argv)
{
    struct options o = {.output = "merged.json"};
    const int named = argc > 1 && !strcmp(argv[1], "merge");
    int next = argc;
    const enum option_result parsed = options_parse(&table, &o, argc, argv, named ? 2 : 1, &next);

    if (parsed != OPTIONS_OK)
        return parsed == OPTIONS_HELP ? EXIT_OK : EXIT_USAGE;
    if (!named || next >= argc) {
        options_complain("epx trace", named ? "expected files" : "expected 'merge' and files");
        return EXIT_USAGE;
    }
    for (int i = next; i < argc; i++)
        if (!strcmp(argv[i], o.output)) {
            options_complain("epx trace", "%s is read and would be overwritten", o.output);
            return EXIT_USAGE;
        }
    if (merge(o.output, argc - next, argv + next) != 0)
        return EXIT_FAILED;
    printf("%d trace%s in %s\n", argc - next, argc - next == 1 ? "" : "s", o.output);
    return EXIT_OK;
}

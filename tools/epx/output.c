/* SPDX-License-Identifier: Apache-2.0 */
#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "progress.h"

/* A longer line is cut in two. */
enum { LINE_MOST = 1 << 16 };

int output_open(struct output *output, int *child_end)
{
    int ends[2];

    output->from = -1;
    output->buffer = malloc(LINE_MOST + 1);
    if (!output->buffer)
        return -1;
    if (pipe2(ends, O_CLOEXEC)) {
        free(output->buffer);
        output->buffer = NULL;
        return -1;
    }
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    output->from = ends[0];
    output->used = 0;
    *child_end = ends[1];
    return 0;
}

static void write_all(int fd, const char *data, size_t bytes)
{
    while (bytes) {
        ssize_t wrote = write(fd, data, bytes);
        if (wrote < 0 && errno != EINTR)
            return; /* our own output is gone: the ranks go on without it */
        if (wrote > 0) {
            data += wrote;
            bytes -= (size_t)wrote;
        }
    }
}

/* One write per line, so that lines of several ranks do not mix. `line` has room for a byte after its end. */
static void emit(struct output *output, char *line, size_t bytes)
{
    char tagged[LINE_MOST + sizeof(output->tag) + 1];
    size_t tag = strlen(output->tag);

    if (output->line) {
        char kept = line[bytes];
        line[bytes] = 0;
        output->line(output->context, line);
        line[bytes] = kept;
        return;
    }
    progress_end();
    memcpy(tagged, output->tag, tag);
    memcpy(tagged + tag, line, bytes);
    tagged[tag + bytes] = '\n';
    write_all(output->to, tagged, tag + bytes + 1);
}

static void emit_lines(struct output *output)
{
    char *at = output->buffer, *end = output->buffer + output->used, *newline;

    while (at < end && (newline = memchr(at, '\n', (size_t)(end - at)))) {
        emit(output, at, (size_t)(newline - at));
        at = newline + 1;
    }
    output->used = (size_t)(end - at);
    memmove(output->buffer, at, output->used);
    if (output->used == LINE_MOST) {
        emit(output, output->buffer, output->used);
        output->used = 0;
    }
}

void output_pump(struct output *output)
{
    while (output->from >= 0) {
        ssize_t got = read(output->from, output->buffer + output->used, LINE_MOST - output->used);
        if (got > 0) {
            output->used += (size_t)got;
            emit_lines(output);
        } else if (got == 0) {
            output_close(output);
        } else if (errno != EINTR) {
            return;
        }
    }
}

void output_close(struct output *output)
{
    if (output->from < 0)
        return;
    if (output->used)
        emit(output, output->buffer, output->used);
    output->used = 0;
    close(output->from);
    output->from = -1;
    free(output->buffer);
    output->buffer = NULL;
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Output of ranks that comes through us: whole lines, each with a tag, or handed to the caller. */
#ifndef EPX_TOOLS_OUTPUT_H
#define EPX_TOOLS_OUTPUT_H

#include <stddef.h>

struct output {
    int from; /* our end of the pipe; -1 = none or at its end */
    int to;   /* where lines go, unless taken by `line` */
    char tag[16];
    void (*line)(void *context, const char *line);
    void *context;
    char *buffer;
    size_t used;
};

/* Makes the pipe; its other end is *child_end. 0, or -1 with errno. */
int output_open(struct output *output, int *child_end);
/* Passes on what is there, without waiting. At the end of the pipe the last, unfinished line too. */
void output_pump(struct output *output);
void output_close(struct output *output);

#endif

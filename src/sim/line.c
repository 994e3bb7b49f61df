/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A line has a caller, who says, and the owner of the port, who hears; both may hang up. Its bytes come in pieces whose
 * size is drawn.
 */
#include "sim/line.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "sim/sched.h"
#include "util/status.h"

enum { PORTS = 2 * SIM_MAX_RANKS };

struct line_port {
    int rank, number;
};

struct sim_line {
    int used;
    int from, to; /* ranks */
    int port;     /* number of the port that was called; 0 = there is none */
    int answered, caller_gone, owner_gone;
    char *text;
    size_t heard, length, room;
};

static struct {
    int deaths_seen, ports; /* so far */
    int open[PORTS];        /* numbers of those that are open; 0 = none */
    struct sim_line *lines;
    int count;
} all;

void sim_lines_begin(int deaths_seen)
{
    memset(&all, 0, sizeof(all));
    all.deaths_seen = deaths_seen;
}

void sim_lines_end(void)
{
    for (int i = 0; i < all.count; i++)
        free(all.lines[i].text);
    free(all.lines);
    memset(&all, 0, sizeof(all));
}

static int is_gone(int rank)
{
    return all.deaths_seen && sim_is_dead(rank);
}

static int *find_port(int number)
{
    for (int i = 0; i < PORTS; i++)
        if (all.open[i] == number)
            return &all.open[i];
    return NULL;
}

static epx_status port_open(int rank, int near, struct line_address *own, struct line_port **out)
{
    struct line_port *port = calloc(1, sizeof(*port));
    int *place = find_port(0);

    (void)near;
    if (!port || !place) {
        free(port);
        return fail(EPX_ERR_MEMORY, "no memory for a simulated port");
    }
    port->rank = rank;
    port->number = *place = ++all.ports;
    memset(own, 0, sizeof(*own));
    own->bytes = sizeof(*port);
    memcpy(own->data, port, sizeof(*port));
    *out = port;
    return EPX_OK;
}

static void port_close(struct line_port *port)
{
    int *place = find_port(port->number);

    for (int i = 0; i < all.count; i++)
        if (all.lines[i].used && all.lines[i].port == port->number)
            all.lines[i].owner_gone = 1;
    if (place)
        *place = 0;
    free(port);
}

static int new_line(void)
{
    struct sim_line *larger;

    for (int i = 0; i < all.count; i++)
        if (!all.lines[i].used)
            return i;
    larger = realloc(all.lines, (size_t)(all.count + 1) * sizeof(*larger));
    if (!larger)
        return -ENOMEM;
    all.lines = larger;
    return all.count++;
}

/* Ends of lines are named 2 * line for the caller, 2 * line + 1 for the owner of the port. */
static int port_call(struct line_port *port, const struct line_address *to)
{
    struct line_port called;
    int at;

    sim_point();
    at = new_line();
    if (at < 0)
        return at;
    memcpy(&called, to->data, sizeof(called));
    memset(&all.lines[at], 0, sizeof(all.lines[at]));
    all.lines[at].used = 1;
    all.lines[at].from = port->rank;
    all.lines[at].to = called.rank;
    all.lines[at].port = find_port(called.number) ? called.number : 0;
    all.lines[at].owner_gone = !all.lines[at].port;
    return 2 * at;
}

static int port_answer(struct line_port *port)
{
    sim_point();
    for (int i = 0; i < all.count; i++) {
        struct sim_line *line = &all.lines[i];
        if (line->used && !line->answered && !line->owner_gone && line->port == port->number) {
            line->answered = 1;
            return 2 * i + 1;
        }
    }
    return -EAGAIN;
}

static int line_say(struct line_port *port, int end, const void *data, size_t bytes)
{
    const size_t n = 1 + (size_t)sim_draw(bytes);
    struct sim_line *line;

    (void)port;
    sim_point();
    line = &all.lines[end / 2]; /* not before: others may call meanwhile */
    if (!line->port || is_gone(line->to))
        return -ECONNREFUSED;
    if (line->owner_gone)
        return -ENOTCONN;
    if (line->length + n > line->room) {
        char *larger = realloc(line->text, 2 * (line->length + n));
        if (!larger)
            return -ENOMEM;
        line->text = larger;
        line->room = 2 * (line->length + n);
    }
    memcpy(line->text + line->length, data, n);
    line->length += n;
    return (int)n;
}

static int line_hear(struct line_port *port, int end, void *data, size_t bytes)
{
    struct sim_line *line;
    size_t n;

    (void)port;
    sim_point();
    line = &all.lines[end / 2];
    if (end % 2 == 0) /* the caller's: nobody speaks there */
        return !line->port || is_gone(line->to) ? -ECONNREFUSED : line->owner_gone ? -ENOTCONN : -EAGAIN;
    n = line->length - line->heard;
    n = n < bytes ? n : bytes;
    if (n == 0)
        return line->caller_gone || is_gone(line->from) ? -ENOTCONN : -EAGAIN;
    n = 1 + (size_t)sim_draw(n);
    memcpy(data, line->text + line->heard, n);
    line->heard += n;
    return (int)n;
}

static void line_hang_up(struct line_port *port, int end)
{
    struct sim_line *line = &all.lines[end / 2];

    (void)port;
    if (end % 2)
        line->owner_gone = 1;
    else
        line->caller_gone = 1;
    /* An unanswered line is still heard to its end; nobody hears one whose port is closed. */
    if (!line->caller_gone || !line->owner_gone)
        return;
    free(line->text);
    memset(line, 0, sizeof(*line));
}

const struct line_ops sim_line_ops = {
    .open = port_open,
    .call = port_call,
    .answer = port_answer,
    .say = line_say,
    .hear = line_hear,
    .hang_up = line_hang_up,
    .close = port_close,
};

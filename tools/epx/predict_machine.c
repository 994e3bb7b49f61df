/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Machine files: one line per value, a name and a number; # begins a comment. `like NAME` first takes all values of
 * another machine. Every value must be given, so that a file says all that a prediction is made from.
 */
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "options.h"
#include "predict.h"

enum { TEXT_BYTES = 1 << 16, LIKE_DEPTH = 4 };

#define VALUE(name, low)                                \
    {                                                   \
#name, offsetof(struct cost_machine, name), low \
    }

static const struct value {
    const char *name;
    size_t offset;
    uint64_t low;
} values[] = {
    VALUE(ranks_per_gpu, 1), VALUE(gpus_per_node, 1),  VALUE(sms, 1),        VALUE(warps_per_sm, 1), VALUE(sm_rate, 1),
    VALUE(memory_rate, 1),   VALUE(launch_ns, 0),      VALUE(barrier_ns, 0), VALUE(item_ns, 0),      VALUE(loop_ns, 0),
    VALUE(route_ns, 0),      VALUE(word_ns, 0),        VALUE(fence_ns, 0),   VALUE(link_rate, 0),    VALUE(link_ns, 0),
    VALUE(bus_rate, 0),      VALUE(bus_ns, 0),         VALUE(proxies, 1),    VALUE(command_ns, 0),   VALUE(put_ns, 0),
    VALUE(event_ns, 0),      VALUE(cards_per_rank, 1), VALUE(card_rate, 1),  VALUE(message_ns, 0),   VALUE(wire_ns, 0),
    VALUE(ordered, 0),       VALUE(uplink_rate, 0),
};
enum { VALUES = (int)(sizeof(values) / sizeof(values[0])) };

static int complain(const char *name, int line, const char *what, const char *word)
{
    return options_complain("epx predict", "machine %s, line %d: %s '%s'", name, line, what, word);
}

static int set_value(struct cost_machine *machine, uint32_t *given, const char *file, int line, const char *name,
                     const char *text)
{
    char *end;
    uint64_t number;

    for (int i = 0; i < VALUES; i++) {
        if (strcmp(values[i].name, name) != 0)
            continue;
        number = strtoull(text, &end, 10);
        if (*text == '-' || end == text || *end != '\0' || number < values[i].low || number > (uint64_t)1 << 40)
            return complain(file, line, "expected a number, got", text);
        *(uint64_t *)(void *)((char *)machine + values[i].offset) = number;
        *given |= 1u << i;
        return 0;
    }
    return complain(file, line, "unknown value", name);
}

static int load(const char *name, struct cost_machine *machine, uint32_t *given, int depth);

/* One line: a value, `like`, or nothing. */
static int take_line(const char *file, int number, char *line, struct cost_machine *machine, uint32_t *given, int depth)
{
    const char *name, *text, *more;

    line[strcspn(line, "#")] = '\0';
    name = strtok(line, " \t\r");
    text = name ? strtok(NULL, " \t\r") : NULL;
    more = text ? strtok(NULL, " \t\r") : NULL;
    if (!name)
        return 0;
    if (!text || more)
        return complain(file, number, "expected a name and a number, got", more ? more : name);
    if (!strcmp(name, "like"))
        return depth < LIKE_DEPTH ? load(text, machine, given, depth + 1)
                                  : complain(file, number, "too many machines are like each other", text);
    return set_value(machine, given, file, number, name, text);
}

static int parse(const char *file, const char *text, struct cost_machine *machine, uint32_t *given, int depth)
{
    char line[256];
    int number = 1;

    for (const char *at = text; *at; number++) {
        const size_t n = strcspn(at, "\n");

        if (n >= sizeof(line))
            return complain(file, number, "the line is too long:", "...");
        memcpy(line, at, n);
        line[n] = '\0';
        if (take_line(file, number, line, machine, given, depth) != 0)
            return -1;
        at += n + (at[n] == '\n');
    }
    return 0;
}

static int load_file(const char *path, struct cost_machine *machine, uint32_t *given, int depth)
{
    char *text = calloc(1, TEXT_BYTES + 1);
    FILE *file = text ? fopen(path, "r") : NULL;
    int rc = -1;

    if (!file) {
        options_complain("epx predict",
                         "--machine is '%s'; expected a built-in one (--machines lists them) or a file: %s", path,
                         strerror(errno));
    } else {
        (void)!fread(text, 1, TEXT_BYTES, file);
        rc = parse(path, text, machine, given, depth);
        fclose(file);
    }
    free(text);
    return rc;
}

static int load(const char *name, struct cost_machine *machine, uint32_t *given, int depth)
{
    for (const struct machine_text *m = machine_texts; m->name; m++)
        if (!strcmp(m->name, name))
            return parse(name, m->text, machine, given, depth);
    return load_file(name, machine, given, depth);
}

int machine_load(const char *name, struct cost_machine *machine)
{
    uint32_t given = 0;

    memset(machine, 0, sizeof(*machine));
    snprintf(machine->name, sizeof(machine->name), "%s", name);
    if (load(name, machine, &given, 0) != 0)
        return -1;
    for (int i = 0; i < VALUES; i++)
        if (!(given & 1u << i))
            return options_complain("epx predict", "machine %s: %s is missing", name, values[i].name);
    return 0;
}

void machine_list(FILE *to)
{
    for (const struct machine_text *m = machine_texts; m->name; m++) {
        const char *first = m->text + strspn(m->text, "# ");

        fprintf(to, "%-14s %.*s\n", m->name, (int)strcspn(first, "\n"), first);
    }
}

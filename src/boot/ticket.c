/* SPDX-License-Identifier: Apache-2.0 */
#include "boot/ticket.h"

#include <stdio.h>
#include <string.h>

#include "util/build.h"
#include "util/status.h"

static const char prefix[] = "epx-ticket-1:";

enum {
    HEAD = 3 * 4 + 2 * 8 + CRYPTO_KEY,
    DOOR_MAX = 4 + 1 + (int)sizeof(((struct conn_address *)0)->data),
    MOST = HEAD + TICKET_DOORS * DOOR_MAX + 4
};

struct bytes {
    uint8_t data[MOST];
    size_t at, count;
    int bad;
};

/* Numbers have their lowest byte first on every machine. */
static void put(struct bytes *b, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        b->data[b->count++] = (uint8_t)(value >> 8 * i);
}

static uint64_t get(struct bytes *b, int bytes)
{
    uint64_t value = 0;

    b->bad |= b->at + (size_t)bytes > b->count;
    for (int i = 0; i < bytes && !b->bad; i++)
        value |= (uint64_t)b->data[b->at++] << 8 * i;
    return value;
}

static void get_bytes(struct bytes *b, uint8_t *out, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        out[i] = (uint8_t)get(b, 1);
}

/* Finds a ticket that was cut or mistyped; it is no defence. */
static uint32_t checksum(const uint8_t *data, size_t bytes)
{
    uint32_t sum = 2166136261u;

    for (size_t i = 0; i < bytes; i++)
        sum = (sum ^ data[i]) * 16777619u;
    return sum;
}

epx_status ticket_write(const struct ticket *t, char *text, size_t bytes)
{
    struct bytes b = {.count = 0};
    size_t at = sizeof(prefix) - 1;

    put(&b, t->build, 8);
    put(&b, t->flags, 4);
    put(&b, (uint32_t)t->nranks, 4);
    put(&b, (uint32_t)t->ndoors, 4);
    put(&b, t->token, 8);
    for (int i = 0; i < CRYPTO_KEY; i++)
        put(&b, t->seed[i], 1);
    for (int d = 0; d < t->ndoors; d++) {
        put(&b, (uint32_t)t->door[d].rank, 4);
        put(&b, t->door[d].address.bytes, 1);
        for (uint32_t i = 0; i < t->door[d].address.bytes; i++)
            put(&b, t->door[d].address.data[i], 1);
    }
    put(&b, checksum(b.data, b.count), 4);
    if (at + 2 * b.count + 1 > bytes)
        return fail(EPX_ERR_ARGUMENT, "epx_group_ticket: expected room for %zu bytes (EPX_TICKET_BYTES), got %zu",
                    at + 2 * b.count + 1, bytes);
    memcpy(text, prefix, at);
    for (size_t i = 0; i < b.count; i++)
        snprintf(text + at + 2 * i, 3, "%02x", b.data[i]);
    return EPX_OK;
}

static int digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Everything up to the first character that is no digit. */
static int read_digits(const char *text, struct bytes *b)
{
    for (; digit(text[0]) >= 0 && digit(text[1]) >= 0; text += 2) {
        if (b->count == sizeof(b->data))
            return -1;
        b->data[b->count++] = (uint8_t)(digit(text[0]) << 4 | digit(text[1]));
    }
    return text[0] && text[0] != '\n' && text[0] != '\r' && text[0] != ' ' ? -1 : 0;
}

static void read_doors(struct bytes *b, struct ticket *t)
{
    for (int d = 0; d < t->ndoors && !b->bad; d++) {
        t->door[d].rank = (int32_t)get(b, 4);
        t->door[d].address.bytes = (uint32_t)get(b, 1);
        if (t->door[d].address.bytes > sizeof(t->door[d].address.data) || t->door[d].rank < 0 ||
            t->door[d].rank >= t->nranks) {
            b->bad = 1;
            break;
        }
        get_bytes(b, t->door[d].address.data, t->door[d].address.bytes);
    }
}

epx_status ticket_read(const char *text, struct ticket *t)
{
    struct bytes b = {.count = 0};

    memset(t, 0, sizeof(*t));
    if (!text || strncmp(text, prefix, sizeof(prefix) - 1) != 0)
        return fail(EPX_ERR_ARGUMENT,
                    "epx_group_join: ticket: expected the text of epx_group_ticket (\"%s...\"), got %s", prefix,
                    text ? "another" : "NULL");
    b.bad = read_digits(text + sizeof(prefix) - 1, &b) != 0 || b.count < HEAD + 4;
    if (!b.bad) {
        b.count -= 4;
        b.bad =
            checksum(b.data, b.count) != (b.data[b.count] | (uint32_t)b.data[b.count + 1] << 8 |
                                          (uint32_t)b.data[b.count + 2] << 16 | (uint32_t)b.data[b.count + 3] << 24);
    }
    t->build = get(&b, 8);
    if (!b.bad && t->build != build_number())
        return build_fail("epx_group_join: the group of the ticket", t->build, "this process", build_number());
    t->flags = (uint32_t)get(&b, 4);
    t->nranks = (int32_t)get(&b, 4);
    t->ndoors = (int32_t)get(&b, 4);
    t->token = get(&b, 8);
    get_bytes(&b, t->seed, sizeof(t->seed));
    b.bad |= t->ndoors < 1 || t->ndoors > TICKET_DOORS || t->nranks < 2;
    read_doors(&b, t);
    if (b.bad || b.at != b.count)
        return fail(EPX_ERR_ARGUMENT,
                    "epx_group_join: ticket: expected the whole text of epx_group_ticket, got one that was "
                    "cut or changed");
    return EPX_OK;
}

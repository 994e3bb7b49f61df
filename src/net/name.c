/* SPDX-License-Identifier: Apache-2.0 */
#include "net/name.h"

#include <string.h>

#include "util/log.h"
#include "util/runtime.h"
#include "util/status.h"

#define KNOWN "tcp, shm, ofi, ofi:PROVIDER (efa, cxi, verbs, tcp, shm), verbs, verbs:CARD, null, auto"

static const struct {
    const char *name;
    const struct net_ops *ops;
    const char *provider; /* of a short name; NULL: this is a network, which may be followed by a provider */
    int takes_provider;
} names[] = {
    {"verbs", &net_verbs_ops, NULL, 1}, {"ofi", &net_ofi_ops, NULL, 1},   {"tcp", &net_ofi_ops, "tcp", 0},
    {"shm", &net_ofi_ops, "shm", 0},    {"null", &net_null_ops, NULL, 0},
};
enum { NAMES = (int)(sizeof(names) / sizeof(names[0])) };

static int is_called(const char *known, const char *text, size_t length)
{
    return strlen(known) == length && !strncmp(known, text, length);
}

static epx_status take_provider(const char *text, size_t length, int i, struct net_name *name)
{
    if (!text[length])
        return EPX_OK;
    if (!names[i].takes_provider)
        return fail(EPX_ERR_ARGUMENT, "network \"%s\": %s takes no provider; expected \"%s\" alone", text,
                    names[i].name, names[i].name);
    if (!text[length + 1])
        return fail(EPX_ERR_ARGUMENT, "network \"%s\": expected %s after \"%c\"", text,
                    names[i].ops == &net_ofi_ops ? "a libfabric provider (efa, cxi, verbs, tcp, shm)" : "a card",
                    text[length]);
    if (text[length] == ';')
        log_line(LOG_INFO, "the network name \"%s\" is the old form of \"%s:%s\"", text, names[i].name,
                 text + length + 1);
    name->provider = text + length + 1;
    return EPX_OK;
}

epx_status net_name_parse(const char *text, struct net_name *name)
{
    const size_t length = strcspn(text, ":;");
    const struct net_ops *guest = runtime()->net_guest;

    if (guest && !strcmp(guest->name, text)) {
        *name = (struct net_name){.ops = guest, .provider = ""};
        return EPX_OK;
    }
    for (int i = 0; i < NAMES; i++) {
        if (!is_called(names[i].name, text, length))
            continue;
        *name = (struct net_name){.ops = names[i].ops, .provider = names[i].provider ? names[i].provider : ""};
        return take_provider(text, length, i, name);
    }
    return fail(EPX_ERR_ARGUMENT, "unknown network \"%s\"; expected one of: " KNOWN, text);
}

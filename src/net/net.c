/* SPDX-License-Identifier: Apache-2.0 */
/* Which network a group uses. */
#include "net/net.h"

#include <stdio.h>
#include <string.h>

#include "net/name.h"
#include "util/env.h"
#include "util/runtime.h"
#include "util/status.h"

/* In the order in which they are tried when none is asked for. */
static const struct net_ops *const automatic[] = {&net_verbs_ops, &net_ofi_ops};
enum { AUTOMATIC = (int)(sizeof(automatic) / sizeof(automatic[0])) };

/* "verbs: no card can be used" has its prefix already; other sentences get one. */
static void add_reason(char *reasons, size_t bytes, const char *network, const char *text)
{
    const size_t used = strlen(reasons), length = strlen(network);
    const int prefixed = !strncmp(text, network, length) && text[length] == ':';

    snprintf(reasons + used, bytes - used, "%s%s%s%s", used ? "; " : "", prefixed ? "" : network, prefixed ? "" : ": ",
             text);
}

static epx_status find_automatic(const struct net_ops **ops)
{
    char text[256], reasons[640] = "";
    int i;

    if (runtime()->net_guest && runtime()->net_guest->probe("", text, sizeof(text)) == EPX_OK) {
        *ops = runtime()->net_guest;
        return EPX_OK;
    }
    for (i = 0; i < AUTOMATIC; i++) {
        if (automatic[i]->probe("", text, sizeof(text)) == EPX_OK) {
            *ops = automatic[i];
            return EPX_OK;
        }
        add_reason(reasons, sizeof(reasons), automatic[i]->name, text);
    }
    return fail(EPX_ERR_UNSUPPORTED, "no network can be used on this machine (%s); see `epx doctor`", reasons);
}

epx_status net_find(const char *name, const struct net_ops **ops, const char **provider)
{
    const char *asked = name;
    struct net_name parsed;
    epx_status status;

    *provider = "";
    if (!asked[0] || !strcmp(asked, "auto"))
        asked = env_string("EPX_NET");
    if (!asked || !strcmp(asked, "auto"))
        return find_automatic(ops);
    status = net_name_parse(asked, &parsed);
    if (status != EPX_OK)
        return status;
    *ops = parsed.ops;
    *provider = parsed.provider;
    return EPX_OK;
}

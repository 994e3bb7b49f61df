/* SPDX-License-Identifier: Apache-2.0 */
/* The table of networks. */
#include "net/net.h"

#include <string.h>

#include "util/env.h"
#include "util/status.h"

void *net_sim_world;
const struct net_ops *net_guest;

/* In the order in which they are tried when none is asked for; the last ones are taken only by name. */
static const struct {
    const struct net_ops *ops;
    int automatic;
} networks[] = {
    {&net_verbs_ops, 1},
    {&net_ofi_ops, 1},
    {&net_null_ops, 0},
    {&net_sim_ops, 0},
};
enum { NETWORKS = (int)(sizeof(networks) / sizeof(networks[0])) };

static epx_status find_automatic(const struct net_ops **ops)
{
    char text[256];
    int i;

    if (net_guest && net_guest->probe("", text, sizeof(text)) == EPX_OK) {
        *ops = net_guest;
        return EPX_OK;
    }
    for (i = 0; i < NETWORKS; i++)
        if (networks[i].automatic && networks[i].ops->probe("", text, sizeof(text)) == EPX_OK) {
            *ops = networks[i].ops;
            return EPX_OK;
        }
    return fail(EPX_ERR_UNSUPPORTED, "no network can be used on this machine: see `epx doctor`");
}

static int is_called(const struct net_ops *ops, const char *name, size_t length)
{
    return strlen(ops->name) == length && !strncmp(ops->name, name, length);
}

epx_status net_find(const char *name, const struct net_ops **ops, const char **provider)
{
    const char *asked = name;
    size_t length;
    int i;

    *provider = "";
    if (!asked[0] || !strcmp(asked, "auto"))
        asked = env_string("EPX_NET");
    if (!asked || !strcmp(asked, "auto"))
        return find_automatic(ops);
    length = strcspn(asked, ";");
    for (i = 0; i <= NETWORKS; i++) {
        const struct net_ops *one = i < NETWORKS ? networks[i].ops : net_guest;

        if (!one || !is_called(one, asked, length))
            continue;
        *ops = one;
        *provider = asked[length] ? asked + length + 1 : "";
        return EPX_OK;
    }
    return fail(EPX_ERR_ARGUMENT, "unknown network \"%s\"; expected auto, verbs, ofi, ofi;PROVIDER, sim or null",
                asked);
}

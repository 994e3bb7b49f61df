/* SPDX-License-Identifier: Apache-2.0 */
/* Which network a group on several nodes would use. */
#include <string.h>

#include "doctor.h"
#include "net/net.h"
#include "util/env.h"

/* In the order in which net_find tries them. */
static const struct net_ops *const automatic[] = {&net_verbs_ops, &net_ofi_ops};
#define VERDICT "network between nodes"
enum { AUTOMATIC = (int)(sizeof(automatic) / sizeof(automatic[0])), TEXT = 1024 };

/* "verbs: no card" -> "no card", where the row has the name already. */
static const char *without_prefix(const char *text, const char *name)
{
    const size_t length = strlen(name);

    return !strncmp(text, name, length) && !strncmp(text + length, ": ", 2) ? text + length + 2 : text;
}

/* What EPX_NET asks for, whether it can be had or not. */
static void show_asked(struct report *report, const char *asked)
{
    const struct net_ops *ops;
    const char *provider;
    char text[TEXT] = "";

    if (net_find("", &ops, &provider) != EPX_OK) {
        report_row(report, "chosen", "none: %s", epx_last_error());
        report_missing(report, VERDICT, "EPX_NET: %s", epx_last_error());
        report_warn(report, "EPX_NET: %s", epx_last_error());
        return;
    }
    report_network(report, ops->name);
    if (ops->probe(provider, text, sizeof(text)) == EPX_OK) {
        report_row(report, "chosen", "%s, as EPX_NET is \"%s\": %s", ops->name, asked, text);
        report_works(report, VERDICT, "%s: %s (EPX_NET is \"%s\")", ops->name, text, asked);
        return;
    }
    report_missing(report, VERDICT, "EPX_NET is \"%s\", which cannot be used: %s", asked,
                   without_prefix(text, ops->name));
    report_row(report, "chosen", "%s, as EPX_NET is \"%s\", but it cannot be used: %s", ops->name, asked,
               without_prefix(text, ops->name));
    report_warn(report, "EPX_NET is \"%s\", which cannot be used here: groups on several nodes will fail", asked);
}

/* Nothing can be used: why not, and what to do. */
static void show_none(struct report *report)
{
    char verbs[TEXT] = "", ofi[TEXT] = "";

    net_verbs_ops.probe("", verbs, sizeof(verbs));
    net_ofi_ops.probe("", ofi, sizeof(ofi));
    report_row(report, "chosen", "none: only ranks of one node can form a group");
    report_missing(report, VERDICT, "none: ranks on several machines cannot form a group\nofi: %s\nverbs: %s",
                   without_prefix(ofi, "ofi"), without_prefix(verbs, "verbs"));
    report_warn(report, "There is no network: groups on several nodes cannot be created");
}

static void show_chosen(struct report *report, const struct net_ops *chosen)
{
    char text[TEXT] = "";

    chosen->probe("", text, sizeof(text));
    report_network(report, chosen->name);
    report_row(report, "chosen", "%s, the first of verbs and ofi that can be used", chosen->name);
    report_works(report, VERDICT, "%s: %s", chosen->name, text);
}

/* `asked`: EPX_NET has decided, and these are only the others that there are. */
static void show_automatic(struct report *report, int asked)
{
    const struct net_ops *chosen = NULL;
    const char *provider;
    char text[TEXT];

    if (!asked && net_find("", &chosen, &provider) == EPX_OK)
        show_chosen(report, chosen);
    else if (!asked)
        show_none(report);
    for (int i = 0; i < AUTOMATIC; i++) {
        if (automatic[i]->probe("", text, sizeof(text)) != EPX_OK)
            report_row(report, automatic[i]->name, "cannot be used: %s", without_prefix(text, automatic[i]->name));
        else if (chosen && automatic[i] != chosen)
            report_row(report, automatic[i]->name, "could be used, but %s comes first: %s", chosen->name, text);
        else
            report_row(report, automatic[i]->name, "can be used: %s", text);
    }
}

void doctor_net(struct report *report)
{
    const char *asked = env_string("EPX_NET");

    report_section(report, "network between nodes");
    if (asked && !strcmp(asked, "auto"))
        asked = NULL;
    if (asked)
        show_asked(report, asked);
    show_automatic(report, asked != NULL);
}

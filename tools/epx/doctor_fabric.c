/* SPDX-License-Identifier: Apache-2.0 */
/* What libfabric has found, and which of it EPX could use. */
#include <stdio.h>
#include <string.h>

#include "doctor.h"
#include "net/ofi/ofi.h"
#include "util/env.h"

#if EPX_HAVE_OFI

/* Those that EPX knows how to use, best first; shm only by name. */
static const char *const providers[] = {"efa", "cxi", "verbs", "tcp", "shm"};
enum { PROVIDERS = (int)(sizeof(providers) / sizeof(providers[0])), LIST_BYTES = 2048 };

static const char *remark(const char *provider, const char *text)
{
    if (!strcmp(provider, "shm"))
        return "; only inside a machine, where EPX needs no network";
    return strstr(text, ", net on ") ? "; net is TCP without the layer ofi_rxm" : "";
}

static void show_usable(struct report *report)
{
    char text[512];
    int fast = 0;

    for (int i = 0; i < PROVIDERS; i++) {
        if (net_ofi_ops.probe(providers[i], text, sizeof(text)) != EPX_OK) {
            report_row(report, "for EPX", "%s: no", providers[i]);
            continue;
        }
        report_row(report, "for EPX", "%s: %s%s", providers[i], text, remark(providers[i], text));
        fast |= i < 3;
    }
    if (!fast && net_verbs_ops.probe("", text, sizeof(text)) != EPX_OK)
        report_advise(report,
                      "Between nodes there is only TCP here: a card with RDMA (InfiniBand, RoCE, EFA, Slingshot) "
                      "and its driver would be many times faster");
}

/* Adds ", text" to a list unless it is there. */
static void add_once(char *list, size_t bytes, const char *text)
{
    size_t used = strlen(list), length = strlen(text);

    for (const char *at = list; (at = strstr(at, text)) != NULL; at += length)
        if ((at == list || at[-1] == ' ') && (at[length] == ',' || at[length] == 0))
            return;
    snprintf(list + used, bytes - used, "%s%s", used ? ", " : "", text);
}

/* Everything there is: a row per provider, with each place once. */
static void show_all(struct report *report, const struct ofi_lib *lib)
{
    struct fi_info *list = NULL;
    char names[LIST_BYTES] = "";
    int rc = lib->getinfo(OFI_API, NULL, NULL, 0, NULL, &list);

    if (rc) {
        report_row(report, "found", "nothing: %s", lib->strerror(-rc));
        return;
    }
    for (const struct fi_info *first = list; first; first = first->next) {
        const char *provider = first->fabric_attr->prov_name;
        char places[LIST_BYTES] = "", text[256];
        size_t had = strlen(names);

        add_once(names, sizeof(names), provider);
        if (strlen(names) == had)
            continue;
        for (const struct fi_info *at = first; at; at = at->next) {
            if (strcmp(at->fabric_attr->prov_name, provider))
                continue;
            ofi_describe(at, text, sizeof(text)); /* "provider on place" */
            add_once(places, sizeof(places), text + strlen(provider) + strlen(" on "));
        }
        report_row(report, "found", "%s on %s", provider, places);
    }
    lib->freeinfo(list);
}

void doctor_fabric(struct report *report)
{
    const char *why;
    const struct ofi_lib *lib = ofi_lib_get(&why);

    report_section(report, "libfabric");
    if (!lib) {
        report_row(report, "library", "%s", why);
        report_advise(report,
                      "Install libfabric (Debian: libfabric1) for groups on several nodes, over TCP, EFA or Slingshot");
        return;
    }
    report_row(report, "library", "version %u.%u; EPX was built with %u.%u", FI_MAJOR(lib->version()),
               FI_MINOR(lib->version()), FI_MAJOR_VERSION, FI_MINOR_VERSION);
    show_usable(report);
    show_all(report, lib);
}

#else

void doctor_fabric(struct report *report)
{
    report_section(report, "libfabric");
    report_row(report, "library", "this EPX was built without the headers of libfabric (rdma/fabric.h)");
    report_advise(
        report,
        "Build EPX with libfabric's headers (Debian: libfabric-dev) for groups on several nodes, over TCP, EFA or "
        "Slingshot");
}

#endif

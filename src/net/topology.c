/* SPDX-License-Identifier: Apache-2.0 */
#include "net/topology.h"
#include "util/descriptor.h"

#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SPLIT_BRIDGES = 1 << 16 };

/* The place of a device in the tree: .../devices/pci0000:15/0000:15:01.0/.../0000:1b:00.0, or "". */
static void device_path(const char *link, char path[PATH_MAX])
{
    if (!realpath(link, path) || !strstr(path, "/pci"))
        path[0] = 0;
}

static int numa_node(const char *path)
{
    char file[PATH_MAX + 16];
    FILE *in;
    int node = -1;

    snprintf(file, sizeof(file), "%s/numa_node", path);
    in = fd_open_file(file);
    if (in && fscanf(in, "%d", &node) != 1)
        node = -1;
    if (in)
        fclose(in);
    return node;
}

static int components(const char *path)
{
    int count = 0;

    for (; *path; path++)
        count += path[0] == '/' && path[1] && path[1] != '/';
    return count;
}

/* PCI devices between two of them, up from one to where the ways meet and down to the other; SPLIT_BRIDGES: they meet
 * above the host bridges. */
static int hops(const char *a, const char *b)
{
    const char *bridge = strstr(a, "/pci");
    size_t same = 0, last = 0;

    for (; a[same] && a[same] == b[same]; same++)
        if (a[same] == '/')
            last = same;
    if ((!a[same] || a[same] == '/') && (!b[same] || b[same] == '/'))
        last = same;
    if (a + last <= bridge)
        return SPLIT_BRIDGES;
    return components(a + last) + components(b + last);
}

/* The place of the device at a PCI address, in either case. */
static void pci_path(const char *sysfs, const char *pci, char path[PATH_MAX])
{
    char link[PATH_MAX], lower[32];
    size_t i = 0;

    for (; pci[i] && i + 1 < sizeof(lower); i++)
        lower[i] = (char)tolower((unsigned char)pci[i]);
    lower[i] = 0;
    snprintf(link, sizeof(link), "%s/bus/pci/devices/%s", sysfs, lower);
    path[0] = 0;
    if (lower[0])
        device_path(link, path);
}

static void card_path(const char *sysfs, const char *card, char path[PATH_MAX])
{
    char link[PATH_MAX];

    if (strchr(card, ':')) {
        pci_path(sysfs, card, path);
        return;
    }
    snprintf(link, sizeof(link), "%s/class/infiniband/%s/device", sysfs, card);
    device_path(link, path);
}

int topology_distance(const char *sysfs, const char *pci, const char *card)
{
    char gpu[PATH_MAX], nic[PATH_MAX];
    int n;

    pci_path(sysfs, pci, gpu);
    card_path(sysfs, card, nic);
    if (!gpu[0] || !nic[0])
        return TOPOLOGY_UNKNOWN;
    n = hops(gpu, nic);
    if (n < TOPOLOGY_BRIDGE)
        return n;
    return numa_node(gpu) == numa_node(nic) ? TOPOLOGY_BRIDGE : TOPOLOGY_NUMA;
}

int topology_sort(const char *sysfs, const char *pci, const char *const *cards, int count, int *order)
{
    int *distance = calloc((size_t)count + 1, sizeof(*distance));
    int nearest = 0;

    for (int i = 0; i < count; i++) {
        const int away = distance ? topology_distance(sysfs, pci, cards[i]) : TOPOLOGY_UNKNOWN;
        int at = i;

        for (; at > 0 && distance && distance[at - 1] > away; at--) {
            order[at] = order[at - 1];
            distance[at] = distance[at - 1];
        }
        order[at] = i;
        if (distance)
            distance[at] = away;
    }
    while (nearest < count && (!distance || distance[nearest] == distance[0]))
        nearest++;
    free(distance);
    return nearest;
}

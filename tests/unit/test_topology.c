/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which card a GPU uses, on PCI trees in the form of sysfs (tests/data/topology). The trees are written by hand after
 * what is published of such machines; none was recorded on one.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "net/ofi/ofi.h"
#include "net/topology.h"
#include "net/verbs/card.h"
#include "tests/lib/unit.h"

enum { MOST = 16, PATH_ROOM = 512 };

struct tree {
    char sysfs[64];
    char gpus[MOST][64];
    struct {
        char name[64], pci[64]; /* pci "": no PCI device */
    } cards[MOST];
    int ngpus, ncards;
};

static void make_folders(const char *path)
{
    char part[2 * PATH_ROOM];

    for (size_t i = 1; path[i]; i++)
        if (path[i] == '/') {
            snprintf(part, sizeof(part), "%.*s", (int)i, path);
            mkdir(part, 0700);
        }
    mkdir(path, 0700);
}

static void add_link(const struct tree *tree, const char *link, const char *device)
{
    char path[2 * PATH_ROOM], from[2 * PATH_ROOM];

    snprintf(path, sizeof(path), "%s/%s", tree->sysfs, device);
    snprintf(from, sizeof(from), "%s/%s", tree->sysfs, link);
    *strrchr(from, '/') = 0;
    make_folders(from);
    snprintf(from, sizeof(from), "%s/%s", tree->sysfs, link);
    assert_int_equal(symlink(path, from), 0);
}

/* The device's folder with its NUMA node, and the link by which it is found. */
static void add_device(const struct tree *tree, const char *link, const char *device, int numa)
{
    char path[2 * PATH_ROOM], from[2 * PATH_ROOM + 16];
    FILE *out;

    snprintf(path, sizeof(path), "%s/%s", tree->sysfs, device);
    make_folders(path);
    add_link(tree, link, device);
    snprintf(from, sizeof(from), "%s/numa_node", path);
    out = fopen(from, "w");
    assert_non_null(out);
    fprintf(out, "%d\n", numa);
    fclose(out);
}

static struct tree *tree_open(const char *name)
{
    struct tree *tree = calloc(1, sizeof(*tree));
    char line[PATH_ROOM], kind[16], what[64], device[200], link[128];
    FILE *in;
    int numa;

    assert_non_null(tree);
    snprintf(tree->sysfs, sizeof(tree->sysfs), "/tmp/epx-topology-XXXXXX");
    assert_non_null(mkdtemp(tree->sysfs));
    snprintf(line, sizeof(line), "%s/tests/data/topology/%s.txt", EPX_SOURCE_DIR, name);
    in = fopen(line, "r");
    assert_non_null(in);
    while (fgets(line, sizeof(line), in)) {
        if (line[0] == '#' || sscanf(line, "%15s %63s %199s %d", kind, what, device, &numa) != 4)
            continue;
        if (!strcmp(kind, "gpu")) {
            snprintf(link, sizeof(link), "bus/pci/devices/%s", what);
            snprintf(tree->gpus[tree->ngpus++], sizeof(tree->gpus[0]), "%s", what);
        } else {
            snprintf(link, sizeof(link), "class/infiniband/%s/device", what);
            snprintf(tree->cards[tree->ncards].name, sizeof(tree->cards[0].name), "%s", what);
            if (strstr(device, "/pci"))
                snprintf(tree->cards[tree->ncards].pci, sizeof(tree->cards[0].pci), "%.60s", strrchr(device, '/') + 1);
            tree->ncards++;
        }
        add_device(tree, link, device, numa);
        if (!strcmp(kind, "card") && strstr(device, "/pci")) {
            snprintf(link, sizeof(link), "bus/pci/devices/%s", tree->cards[tree->ncards - 1].pci);
            add_link(tree, link, device);
        }
    }
    fclose(in);
    return tree;
}

static void tree_close(struct tree *tree)
{
    char command[128];

    snprintf(command, sizeof(command), "rm -rf %s", tree->sysfs);
    assert_int_equal(system(command), 0);
    free(tree);
}

/* The nearest cards of a GPU, in order, as one line. */
static const char *nearest(const struct tree *tree, int gpu)
{
    static char text[MOST * 64];
    const char *names[MOST];
    int order[MOST], count;

    for (int i = 0; i < tree->ncards; i++)
        names[i] = tree->cards[i].name;
    count = topology_sort(tree->sysfs, tree->gpus[gpu], names, tree->ncards, order);
    text[0] = 0;
    for (int i = 0; i < count; i++)
        snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%s", i ? " " : "", names[order[i]]);
    return text;
}

static void a_gpu_and_its_card_share_a_switch(void **state)
{
    static const char *const pairs[] = {"mlx5_0", "mlx5_3", "mlx5_4",  "mlx5_5",
                                        "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"};
    struct tree *tree = tree_open("dgx_h100");

    (void)state;
    for (int g = 0; g < 8; g++)
        assert_string_equal(nearest(tree, g), pairs[g]);
    /* Driver and sysfs write addresses in different cases. */
    assert_int_equal(topology_distance(tree->sysfs, "0000:1B:00.0", "mlx5_0"), 4);
    assert_int_equal(topology_distance(tree->sysfs, tree->gpus[0], "mlx5_1"), TOPOLOGY_BRIDGE);
    assert_int_equal(topology_distance(tree->sysfs, tree->gpus[0], "mlx5_2"), TOPOLOGY_NUMA);
    tree_close(tree);
}

static void several_cards_are_equally_close(void **state)
{
    struct tree *tree = tree_open("four_cards_per_gpu");

    (void)state;
    assert_string_equal(nearest(tree, 0), "rdmap79s0 rdmap80s0 rdmap81s0 rdmap82s0");
    assert_string_equal(nearest(tree, 1), "rdmap96s0 rdmap97s0 rdmap98s0 rdmap99s0");
    tree_close(tree);
}

static void without_switches_the_processor_decides(void **state)
{
    struct tree *tree = tree_open("no_switches");

    (void)state;
    assert_string_equal(nearest(tree, 0), "mlx5_0");
    assert_string_equal(nearest(tree, 1), "mlx5_0");
    assert_string_equal(nearest(tree, 2), "mlx5_1 mlx5_2");
    assert_string_equal(nearest(tree, 3), "mlx5_2"); /* the same host bridge */
    assert_int_equal(topology_distance(tree->sysfs, tree->gpus[0], "rxe0"), TOPOLOGY_UNKNOWN);
    assert_int_equal(topology_distance(tree->sysfs, "0000:99:00.0", "mlx5_0"), TOPOLOGY_UNKNOWN);
    tree_close(tree);
}

/* Nothing is known: all are candidates, in their order. */
static void an_unknown_gpu_has_all_cards(void **state)
{
    struct tree *tree = tree_open("no_switches");

    (void)state;
    snprintf(tree->gpus[0], sizeof(tree->gpus[0]), "0000:99:00.0");
    assert_string_equal(nearest(tree, 0), "rxe0 mlx5_0 mlx5_1 mlx5_2");
    tree_close(tree);
}

#if EPX_HAVE_VERBS
static const char *chosen(const struct tree *tree, const char *pci, int rank, int gpu, int index)
{
    static struct verbs_card cards[MOST];
    const struct net_options options = {.rank = rank, .pci = pci, .gpu = gpu, .index = index};

    for (int i = 0; i < tree->ncards; i++)
        snprintf(cards[i].device, sizeof(cards[i].device), "%s", tree->cards[i].name);
    return cards[verbs_card_choose(tree->sysfs, &options, cards, tree->ncards)].device;
}

/* Endpoint i of GPU g has the same card on all machines of a kind, whatever the rank: one rail. */
static void endpoints_of_a_gpu_use_its_cards(void **state)
{
    struct tree *tree = tree_open("four_cards_per_gpu");
    unsigned seen = 0;

    (void)state;
    for (int i = 0; i < 4; i++) {
        const char *card = chosen(tree, tree->gpus[1], 1, 1, i);
        assert_string_equal(card, chosen(tree, tree->gpus[1], 9, 1, i));
        seen |= 1u << (card[strlen("rdmap9")] - '6'); /* rdmap96s0 to rdmap99s0 */
    }
    assert_int_equal(seen, 15);
    /* The processor has none of its own. */
    assert_string_equal(chosen(tree, "", 3, 0, 2), tree->cards[5].name);
    tree_close(tree);
}

/* GPUs that have the same nearest cards begin with different ones. */
static void gpus_share_cards_evenly(void **state)
{
    struct tree *tree = tree_open("no_switches");

    (void)state;
    assert_string_equal(chosen(tree, tree->gpus[2], 2, 2, 0), "mlx5_1");
    assert_string_equal(chosen(tree, tree->gpus[2], 3, 3, 0), "mlx5_2");
    assert_string_equal(chosen(tree, tree->gpus[2], 2, 2, 1), "mlx5_2");
    tree_close(tree);
}
#endif

#if EPX_HAVE_OFI
/* The same by libfabric's entries, with the bus attributes that its providers fill in, and without them. */
static const char *chosen_by_ofi(const struct tree *tree, const char *pci, int rank, int gpu, int index, int nics)
{
    struct fi_info infos[MOST];
    struct fi_domain_attr domains[MOST];
    struct fid_nic nic[MOST];
    struct fi_bus_attr buses[MOST];
    const struct fi_info *cards[MOST];
    const struct net_options options = {.rank = rank, .pci = pci, .gpu = gpu, .index = index};
    static char name[80];

    memset(infos, 0, sizeof(infos));
    for (int i = 0; i < tree->ncards; i++) {
        unsigned domain, bus, device, function;

        domains[i] = (struct fi_domain_attr){.name = (char *)(uintptr_t)tree->cards[i].name};
        infos[i].domain_attr = &domains[i];
        cards[i] = &infos[i];
        if (!nics || sscanf(tree->cards[i].pci, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4)
            continue;
        buses[i] = (struct fi_bus_attr){.bus_type = FI_BUS_PCI};
        buses[i].attr.pci = (struct fi_pci_attr){(uint16_t)domain, (uint8_t)bus, (uint8_t)device, (uint8_t)function};
        nic[i] = (struct fid_nic){.bus_attr = &buses[i]};
        infos[i].nic = &nic[i];
        domains[i].name = "a name that says nothing";
    }
    snprintf(name, sizeof(name), "%s", tree->cards[ofi_card_choose(tree->sysfs, &options, cards, tree->ncards)].name);
    return name;
}

static void libfabric_takes_the_same_cards(void **state)
{
    static const char *const trees[] = {"dgx_h100", "four_cards_per_gpu", "no_switches"};

    (void)state;
    for (int t = 0; t < 3; t++) {
        struct tree *tree = tree_open(trees[t]);

        for (int g = 0; g < tree->ngpus; g++)
            for (int i = 0; i < 4; i++)
                for (int nics = 0; nics < 2; nics++) {
                    const char *names[MOST];
                    int order[MOST], count;

                    for (int c = 0; c < tree->ncards; c++)
                        names[c] = tree->cards[c].name;
                    count = topology_sort(tree->sysfs, tree->gpus[g], names, tree->ncards, order);
                    assert_string_equal(chosen_by_ofi(tree, tree->gpus[g], g, g, i, nics),
                                        names[order[(g + i) % count]]);
                }
        assert_string_equal(chosen_by_ofi(tree, "", 1, 0, 1, 1), tree->cards[2].name);
        tree_close(tree);
    }
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_gpu_and_its_card_share_a_switch),
        cmocka_unit_test(several_cards_are_equally_close),
        cmocka_unit_test(without_switches_the_processor_decides),
        cmocka_unit_test(an_unknown_gpu_has_all_cards),
#if EPX_HAVE_VERBS
        cmocka_unit_test(endpoints_of_a_gpu_use_its_cards),
        cmocka_unit_test(gpus_share_cards_evenly),
#endif
#if EPX_HAVE_OFI
        cmocka_unit_test(libfabric_takes_the_same_cards),
#endif
    };

    return unit_run("topology", tests, UNIT_COUNT(tests));
}

/* SPDX-License-Identifier: Apache-2.0 */
/* The conformance suite of networks on a GPU machine, with heaps in host memory that the GPU (EPX_DEVICE) maps:
 * gpu_net "ofi;tcp". */
#include <stdio.h>
#include <string.h>

#include "device/device.h"
#include "support/net_suite.h"

/* Ranks are processes: each opens the device for itself, after the fork. */
static struct device *device;

static void *pinned(size_t bytes)
{
    void *memory = NULL;

    if ((device || device_open(EPX_DEVICE_AUTO, 0, &device) == EPX_OK) &&
        device->ops->host_alloc(device, bytes, &memory) == EPX_OK)
        return memory;
    fprintf(stderr, "gpu_net: %s\n", epx_last_error());
    return NULL;
}

static void unpin(void *memory)
{
    device->ops->host_free(device, memory);
}

int main(int argc, char **argv)
{
    struct net_suite suite = {.label = "gpu", .memory = pinned, .memory_free = unpin};
    int failed = 0, skipped = 0;
    char text[600];

    if (argc != 2 || net_find(argv[1], &suite.ops, &suite.provider) != EPX_OK) {
        fprintf(stderr, "usage: gpu_net NETWORK\n%s\n", argc == 2 ? epx_last_error() : "");
        return 2;
    }
    if (strstr(argv[1], "shm")) /* as in tests/test_net_ofi.c */
        for (int i = 0; i < 2; i++) {
            suite.gaps[i].name = i ? "survivors_go_on" : "death_is_told";
            suite.gaps[i].why = "shm has locks in shared memory that a killed process may hold";
        }
    for (int i = 0; i < net_suite_count(); i++) {
        const enum net_suite_outcome outcome = net_suite_run(&suite, i, text, sizeof(text));

        printf("%-8s %s%s%s\n",
               outcome == NET_SUITE_PASSED    ? "ok"
               : outcome == NET_SUITE_SKIPPED ? "skipped"
                                              : "FAILED",
               net_suite_name(i), text[0] ? ": " : "", text);
        fflush(stdout);
        failed += outcome == NET_SUITE_FAILED;
        skipped += outcome == NET_SUITE_SKIPPED;
    }
    printf("%d cases, %d failed, %d skipped\n", net_suite_count(), failed, skipped);
    return failed || skipped == net_suite_count();
}

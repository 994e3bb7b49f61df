/* SPDX-License-Identifier: Apache-2.0 */
/* The conformance suite of networks on a GPU machine, with heaps in host memory that the GPU (EPX_DEVICE) maps:
 * gpu_net "ofi:tcp". And what a card would need of the GPU's own memory: gpu_net memory. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "device/arrivals.h"
#include "device/device.h"
#include "tests/lib/net_suite.h"

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

/* A heap in the GPU's memory: its dma-buf is as large as it is, and what must be done about arrivals can be. */
static int check_memory(void)
{
    static const char *const rules[] = {"visible", "flushed", "never visible"};
    struct heap heap;
    int fd = -1, rule, failed = 0;

    if (device_open(EPX_DEVICE_AUTO, 0, &device) != EPX_OK ||
        device->ops->heap_create(device, (uint64_t)64 << 20, &heap) != EPX_OK) {
        fprintf(stderr, "gpu_net: %s\n", epx_last_error());
        return 1;
    }
    if (device->ops->heap_dmabuf(device, &heap, &fd) != EPX_OK) {
        printf("no dma-buf: %s\n", epx_last_error());
    } else {
        failed |= lseek(fd, 0, SEEK_END) != (off_t)heap.bytes;
        printf("dma-buf of %llu bytes, heap of %llu\n", (unsigned long long)lseek(fd, 0, SEEK_END),
               (unsigned long long)heap.bytes);
        close(fd);
    }
    rule = device->ops->arrivals(device);
    printf("arrivals in its memory: %s\n", rules[rule]);
    if (rule == ARRIVALS_FLUSH && device->ops->flush_arrivals(device) != EPX_OK) {
        printf("flush: %s\n", epx_last_error());
        failed = 1;
    }
    device->ops->heap_destroy(device, &heap);
    device->ops->close(device);
    return failed;
}

int main(int argc, char **argv)
{
    struct net_suite suite = {.label = "gpu", .memory = pinned, .memory_free = unpin};
    int failed = 0, skipped = 0;
    char text[600];

    if (argc == 2 && strcmp(argv[1], "memory") == 0)
        return check_memory();
    if (argc != 2 || net_find(argv[1], &suite.ops, &suite.provider) != EPX_OK) {
        fprintf(stderr, "usage: gpu_net NETWORK|memory\n%s\n", argc == 2 ? epx_last_error() : "");
        return 2;
    }
    if (strstr(argv[1], "shm")) /* as in tests/unit/test_net_ofi.c */
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

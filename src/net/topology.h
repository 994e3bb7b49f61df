/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How far a card is from a GPU, by sysfs. Two devices below one PCIe switch reach each other without the processor;
 * those below different host bridges cross it, and those of different NUMA nodes cross the link between processors too.
 */
#ifndef EPX_NET_TOPOLOGY_H
#define EPX_NET_TOPOLOGY_H

#define TOPOLOGY_SYSFS "/sys"

enum {
    TOPOLOGY_BRIDGE = 64,   /* distances from here on: below one host bridge no more than the PCI devices on the way */
    TOPOLOGY_NUMA = 128,    /* different host bridges of one NUMA node are below it */
    TOPOLOGY_UNKNOWN = 1024 /* no PCI device, as Soft-RoCE's, or no such device */
};

/* `pci`: address of the GPU, as "0000:1b:00.0", in either case; `card`: name of an RDMA device, as "mlx5_0",
 * or its own address, which has colons. */
int topology_distance(const char *sysfs, const char *pci, const char *card);
/* Fills order[count] with the numbers of the cards, nearest first, equals as they were; returns how many are nearest:
 * all of them where nothing is known. */
int topology_sort(const char *sysfs, const char *pci, const char *const *cards, int count, int *order);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_DEVICE_PROBE_H
#define EPX_DEVICE_PROBE_H

/* What a vendor's own library, opened at run time, finds on this machine. */
struct gpu_probe {
    void *library; /* NULL: not here. Stays open: drivers want that */
    const char *name;
    int count;     /* GPUs */
    char why[128]; /* there are none */
};

/* "cuda" or "hip". */
void gpu_probe(const char *device, struct gpu_probe *probe);
/* The library's function: 1 and in *slot, or 0. */
int gpu_probe_load(const struct gpu_probe *probe, const char *function, void *slot);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one seam between the library and what it runs on: clock, waiting, device, connections, proxies and network. A
 * simulation (sim/ranks.c) swaps all of it at once, and back; a test may swap single parts. A layer asks runtime() for
 * its own part, whose type it alone knows: NULL means the real one.
 */
#ifndef EPX_UTIL_RUNTIME_H
#define EPX_UTIL_RUNTIME_H

#include <stdint.h>

struct cpu_env;      /* device/cpu/agent.h */
struct device_ops;   /* device/device.h */
struct conn_ops;     /* boot/conn.h */
struct proxy_driver; /* proxy/proxy.h */
struct net_ops;      /* net/net.h */

struct runtime {
    uint64_t (*now_ns)(void);           /* host_now_ns() */
    void (*pause_ns)(uint64_t ns);      /* pause_ns() */
    const struct cpu_env *env;          /* how CPU agents wait and are woken; else as threads, on futexes */
    const struct device_ops *device;    /* is opened, whatever device is asked for */
    const struct conn_ops *conns;       /* connections between ranks; else TCP */
    const struct proxy_driver *proxies; /* runs the turns of proxies; else a thread for each */
    const struct net_ops *net_guest;    /* one more network, the first that is tried; else none */
    void *net_world;                    /* what its endpoints share */
    /* Most rows that a rank sends to one rank of another node in low latency, where a simulation knows it: receive
     * buffers are no larger, so that thousands of ranks fit into memory. NULL or 0: any number. */
    const int *remote_rows;
    /* Where epx_last_error() of the caller is kept, RUNTIME_ERROR_BYTES. Else, and where it returns NULL: in its
     * thread. */
    char *(*last_error)(void);
};

enum { RUNTIME_ERROR_BYTES = 1024 };

/* Never NULL, and now_ns and pause_ns are always set. */
const struct runtime *runtime(void);
/* Copies *given. NULL: everything real again. Only while no group exists and nothing runs. */
void runtime_swap(const struct runtime *given);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include "util/env.h"

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "util/log.h"

/* Order and text are those of docs/environment.md: a test compares them. */
static const struct env_entry entries[] = {
    {"EPX_LOG", "", "warn", "Least severe log lines shown on stderr: none, error, warn, info or debug"},
    {"EPX_TRACE", "", "none", "File for a trace of all operations, in the JSON of Perfetto and chrome://tracing"},
    {"EPX_TOP", "", "1", "0: groups are not shown by epx top, and make no page in /dev/shm for it"},
    {"EPX_TIMEOUT_MS", "NCCL_EP_TIMEOUT_MS,UCCL_EP_CPU_TIMEOUT_SECS", "100000",
     "Deadline of every wait of a group, in milliseconds, where its configuration says 0"},
    {"EPX_BOOT_TIMEOUT_MS", "", "the group's timeout",
     "Deadline of each step of the rendezvous over TCP, in milliseconds"},
    {"EPX_BOOT_BLOCK", "", "the square root of the ranks, from 64 on",
     "Ranks of a block, of which the first passes on to the others what rank 0 sends while groups are created; 0: rank "
     "0 sends to every rank. The setting of rank 0 counts"},
    {"EPX_SOCKET_IFNAME", "UCCL_SOCKET_IFNAME,NCCL_SOCKET_IFNAME", "the one that faces MASTER_ADDR",
     "Interfaces for the rendezvous: prefixes separated by commas; a leading = means exact names, a leading ^ all but "
     "these"},
    {"EPX_MASTER_PORT", "", "MASTER_PORT", "TCP port of EPX's rendezvous, where it must differ from MASTER_PORT"},
    {"EPX_MASTER_PORTS", "", "1; 17 under torchrun and where the port is derived",
     "How many ports, from the first on, rank 0 may try when another process holds the first; 1: a port that is held "
     "is "
     "an error"},
    {"EPX_SECRET", "", "EPX_SECRET_FILE, else a file of the user's",
     "Text that the ranks of a job share and nobody else knows, by which they prove to each other who they are; none: "
     "nobody proves anything"},
    {"EPX_SECRET_FILE", "", "~/.epx/secret", "File with the secret, which only its user can read"},
    {"EPX_JOB_ID", "TORCHELASTIC_RUN_ID", "the launcher's job",
     "Any text that the ranks of one job share and other jobs do not: distinguishes jobs on neighbouring ports"},
    {"EPX_RANKS_PER_NODE", "", "what the machines say", "Ranks that count as one node"},
    {"EPX_NUM_AGENTS", "", "automatic", "Agents (CPU threads, GPU warps) per operation"},
    {"EPX_LL_WIDE_WAIT_US", "", "100",
     "GPUs, low latency on one node: how long a whole operation waits for late peers with all its multiprocessors, in "
     "microseconds, at most 100000; then EPX_LL_FEW_SMS of them wait and do the rest, and the others are free. 0: as "
     "long as it takes"},
    {"EPX_LL_FEW_SMS", "", "2", "Multiprocessors that wait for late peers after EPX_LL_WIDE_WAIT_US"},
    {"EPX_CPU_LEVEL", "", "the highest of the machine",
     "Vector instructions of the CPU device: base, avx2, avx512 or avx512bf16; on aarch64 base or bf16. Results are "
     "the "
     "same"},
    {"EPX_CPU_CACHE_BYTES", "", "half of the last cache",
     "CPU device on x86_64: where the ranks of a node write more bytes of rows in a dispatch, they write past the "
     "cache"},
    {"EPX_ALLOC_BYTES", "", "4G", "Address space per rank from which epx_alloc serves"},
    {"EPX_HT_BUFFER_BYTES", "", "400M",
     "High throughput: most bytes of the slots for rows between nodes, per rank, where the group's configuration says "
     "0"},
    {"EPX_HT_NODE_BYTES", "", "512M",
     "High throughput: most bytes of the buffers for rows of tensors in ordinary memory, per rank, where the group's "
     "configuration says 0; on several nodes the default is 450M, or 640M with EPX_GPU_HEAP=split"},
    {"EPX_DEVICE", "", "cpu", "Device of groups whose configuration leaves it open: cpu, cuda or hip"},
    {"EPX_GPU_HEAP", "", "auto",
     "Where the heaps of GPU groups lie: device, host, split (several nodes, no masks: device, with host memory for "
     "the network alone), or auto: device, or split where the network between nodes does not reach GPU memory"},
    {"EPX_FABRIC", "", "epx_group_config.use_fabric",
     "GPUs of several hosts as one node: 1: where the drivers of all ranks make fabric handles; 0: never; files: file "
     "descriptors in the place of fabric handles, for tests on one machine"},
    {"EPX_RANKS_PER_HOST", "", "all ranks of a machine",
     "For tests: so many consecutive ranks of a machine look like a host of their own"},
    {"EPX_REGISTER", "", "between processes, with CUDA",
     "0: rows in a caller's own memory are copied before other ranks of the node read them; 1: other ranks read them "
     "in "
     "place, also those of the same process"},
    {"EPX_GIVEBACK", "", "1 with CUDA or HIP",
     "1: a rank frees the heap of a group that has ended when the other ranks of its node have unmapped it; 0: with a "
     "GPU when the process has no group left, with a CPU at once"},
    {"EPX_AGGRESSIVE_ATOMIC", "UCCL_EP_ENABLE_AGGRESSIVE_ATOMIC", "1",
     "AMD GPUs: 1: words that others wait for are reached by relaxed operations between explicit fences; 0: by "
     "acquire and release operations"},
    {"EPX_MODULE_DIR", "", "beside the library",
     "Folder with the modules of GPU devices, libepx_cuda.so, libepx_hip.so"},
    {"EPX_NET", "", "automatic",
     "Network between nodes: tcp, shm, verbs, ofi, ofi:PROVIDER (efa, cxi, verbs, tcp, shm), or null, which discards "
     "everything"},
    {"EPX_OFI_PROVIDER", "", "the first there is of efa, cxi, verbs, tcp",
     "Provider of libfabric where the network is ofi: efa, cxi, verbs, tcp, shm"},
    {"EPX_PROXY_THREADS", "", "1", "Proxy threads per rank; the same on all ranks"},
    {"EPX_PROXY_PIN", "", "1 with a GPU", "1: pin each proxy thread to a core; 0: do not"},
    {"EPX_PROXY_SLEEP_US", "", "5 to 100000",
     "Microseconds without work after which a proxy thread sleeps; the default depends on device and cores"},
    {"EPX_PROXY_ADAPTIVE_SLEEP", "UCCL_RDMA_ADAPTIVE_SLEEP", "after 100 ms",
     "Beside a GPU, where EPX_PROXY_SLEEP_US is not set: 1: proxies sleep after 120 s without work; 0: never"},
    {"EPX_PROXY_MERGE_BYTES", "", "1M", "Largest write that is made of several commands"},
    {"EPX_IB_MAX_INFLIGHT_BYTES", "UCCL_IB_MAX_INFLIGHT_BYTES", "0",
     "Bytes in flight from one rank to all its peers; 0: no limit but what adapts"},
    {"EPX_IB_MAX_INFLIGHT", "", "0", "Writes in flight from one rank on its card; 0: no limit but what adapts"},
    {"EPX_IB_MAX_INFLIGHT_LOW_LATENCY", "UCCL_IB_MAX_INFLIGHT_LOW_LATENCY", "EPX_IB_MAX_INFLIGHT",
     "The same for the low-latency mode alone"},
    {"EPX_IB_MAX_INFLIGHT_NORMAL", "UCCL_IB_MAX_INFLIGHT_NORMAL", "EPX_IB_MAX_INFLIGHT",
     "The same for the high-throughput mode alone"},
    {"EPX_IB_HCA", "UCCL_IB_HCA,NCCL_IB_HCA", "all",
     "Cards that verbs, also libfabric's, may use: prefixes of names, each with :PORT or without, separated by commas; "
     "a leading "
     "= means exact names, a leading ^ all but these"},
    {"EPX_IB_GID_INDEX", "UCCL_IB_GID_INDEX,NCCL_IB_GID_INDEX", "-1",
     "GID that verbs uses on its cards; -1: the best, RoCEv2 over IPv4 before RoCEv2 over IPv6 before others"},
    {"EPX_IB_SL", "EP_OVERRIDE_RDMA_SL,EP_DEFAULT_RDMA_SL,UCCL_IB_SL,NCCL_IB_SL", "3, on an EFA 8",
     "Service level of verbs"},
    {"EPX_IB_TC", "UCCL_IB_TC,NCCL_IB_TC", "104, on an EFA 0", "Traffic class of verbs"},
    {"EPX_IB_TIMEOUT", "NCCL_IB_TIMEOUT", "18, or less",
     "Time after which a card repeats a packet, 4.096 us * 2^this; the default makes all repeats end within "
     "the group's timeout"},
    {"EPX_IB_RETRY_CNT", "NCCL_IB_RETRY_CNT", "6", "How often a card repeats a packet before the peer counts as lost"},
    {"EPX_IB_SRQ", "", "1", "0: verbs keeps receives per peer even where a card can share them"},
    {"EPX_LIBRARY", "", "see python.md", "Python: the file of the library, and no other is tried"},
    {"EPX_DEEP_EP_MAX_TOKENS", "", "4K",
     "Python, deep_ep: tokens of one rank in one high-throughput dispatch, where the first one has no more"},
    {"EPX_DEEP_EP_GPU_BYTES", "", "2G",
     "Python, deep_ep on GPUs: least memory of each rank for high throughput, even if the buffer has fewer bytes; "
     "unset: where these are 0"},
    {"EPX_STANDIN_CAPABILITY", "", "10.0",
     "Stand-in for CUDA: compute capability of the device that it plays; NCCL EP's NVFP4 combine wants 10.0 or more"},
};
enum { ENTRY_COUNT = (int)(sizeof(entries) / sizeof(entries[0])) };

/* Aliases counted in another unit than the variable they stand for; *factor units of the variable each. */
static const struct {
    const char *alias;
    int64_t factor;
} scaled_aliases[] = {{"UCCL_EP_CPU_TIMEOUT_SECS", 1000}};

static atomic_flag warned[ENTRY_COUNT];

const struct env_entry *env_table(int *count)
{
    *count = ENTRY_COUNT;
    return entries;
}

static const struct env_entry *find_entry(const char *name)
{
    for (int i = 0; i < ENTRY_COUNT; i++)
        if (!strcmp(entries[i].name, name))
            return &entries[i];
    return NULL;
}

static const char *nonempty(const char *name)
{
    const char *value = getenv(name);

    return value && value[0] ? value : NULL;
}

const char *env_look_up(const struct env_entry *entry, char used[ENV_NAME_BYTES])
{
    const char *value = nonempty(entry->name);
    const char *at = entry->aliases;

    strncpy(used, entry->name, ENV_NAME_BYTES - 1);
    used[ENV_NAME_BYTES - 1] = 0;
    while (!value && *at) {
        size_t length = strcspn(at, ",");
        if (length < ENV_NAME_BYTES) {
            memcpy(used, at, length);
            used[length] = 0;
            value = nonempty(used);
        }
        at += length + (at[length] == ',');
    }
    return value;
}

const char *env_string(const char *name)
{
    char used[ENV_NAME_BYTES];
    const struct env_entry *entry = find_entry(name);

    if (!entry) {
        log_line(LOG_ERROR, "%s is missing from the table of environment variables", name);
        return NULL;
    }
    return env_look_up(entry, used);
}

static int64_t unit_of(const char *name)
{
    for (size_t i = 0; i < sizeof(scaled_aliases) / sizeof(scaled_aliases[0]); i++)
        if (!strcmp(scaled_aliases[i].alias, name))
            return scaled_aliases[i].factor;
    return 1;
}

static int suffix_shift(char letter)
{
    switch (letter) {
    case 'k':
    case 'K':
        return 10;
    case 'm':
    case 'M':
        return 20;
    case 'g':
    case 'G':
        return 30;
    default:
        return -1;
    }
}

/* Returns 0 when `text` is an integer with an optional suffix, and fits after scaling. */
static int parse_int(const char *text, int64_t unit, int64_t *value)
{
    char *end;
    long long number;

    errno = 0;
    number = strtoll(text, &end, 10);
    if (errno || end == text)
        return -1;
    if (*end) {
        int shift = suffix_shift(*end);
        if (shift < 0 || end[1] || __builtin_mul_overflow(number, 1ll << shift, &number))
            return -1;
    }
    return __builtin_mul_overflow(number, (long long)unit, value) ? -1 : 0;
}

int64_t env_int(const char *name, int64_t fallback, int64_t low, int64_t high)
{
    char used[ENV_NAME_BYTES];
    const struct env_entry *entry = find_entry(name);
    const char *text;
    int64_t value, unit;

    if (!entry) {
        log_line(LOG_ERROR, "%s is missing from the table of environment variables", name);
        return fallback;
    }
    text = env_look_up(entry, used);
    if (!text)
        return fallback;
    unit = unit_of(used);
    if (!parse_int(text, unit, &value) && value >= low && value <= high)
        return value;
    if (!atomic_flag_test_and_set(&warned[entry - entries]))
        log_line(LOG_WARN, "%s is \"%s\", expected an integer from %lld to %lld: ignored", used, text,
                 (long long)(low / unit), (long long)(high / unit));
    return fallback;
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Configuration and environment: a group's configuration by struct and by variables, and the texts that variables have
 * (names of networks, lists of hosts, cards and interfaces, the launchers' own variables, secrets).
 *
 *     kind (1), then pairs: which variable (1), length of its value (1), value; then the configuration
 */
#include "fuzz.h"

#include "boot/interface.h"
#include "boot/launcher.h"
#include "boot/nodelist.h"
#include "boot/secret.h"
#include "group/config.h"
#include "net/card_filter.h"
#include "net/name.h"
#include "util/env.h"
#include "util/text.h"

/* Of launchers, which the table of EPX's own does not have. */
static const char *const launchers[] = {"RANK",
                                        "WORLD_SIZE",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "LOCAL_RANK",
                                        "LOCAL_WORLD_SIZE",
                                        "TORCHELASTIC_RUN_ID",
                                        "MPI_LOCALNRANKS",
                                        "MPI_LOCALRANKID",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_MCA_orte_hnp_uri",
                                        "OMPI_MCA_orte_precondition_transports",
                                        "OMPI_MCA_ess_base_jobid",
                                        "PMIX_NAMESPACE",
                                        "PMIX_RANK",
                                        "PMI_FD",
                                        "PMI_JOBID",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "SLURM_JOB_ID",
                                        "SLURM_JOB_NODELIST",
                                        "SLURM_LAUNCH_NODE_IPADDR",
                                        "SLURM_LOCALID",
                                        "SLURM_PROCID",
                                        "SLURM_STEP_ID",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_STEP_NUM_NODES",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_NTASKS"};
enum { LAUNCHERS = sizeof(launchers) / sizeof(launchers[0]), TEXT = 600, SET = 12 };

FUZZ_BEGIN(fuzz_quiet)

/* A text from the input: what cannot be in a variable is left out. */
static void draw_text(struct fuzz *f, char text[TEXT])
{
    const size_t n = fuzz_int(f, 1) * 2;
    size_t used = 0;

    for (size_t i = 0; i < n && f->left; i++) {
        text[used] = (char)fuzz_int(f, 1);
        used += text[used] != 0;
    }
    text[used] = 0;
}

static void draw_environment(struct fuzz *f, const char *set[SET], int *nset)
{
    const unsigned n = fuzz_below(f, SET + 1);
    int count;
    const struct env_entry *table = env_table(&count);

    for (unsigned i = 0; i < n; i++) {
        const unsigned which = fuzz_below(f, (unsigned)count + LAUNCHERS);
        char text[TEXT];

        draw_text(f, text);
        set[*nset] = which < LAUNCHERS ? launchers[which] : table[which - LAUNCHERS].name;
        if (!strcmp(set[*nset], "EPX_LOG") || !strcmp(set[*nset], "EPX_SECRET_FILE"))
            continue;
        setenv(set[(*nset)++], text, 1);
    }
}

static void make_settings(struct fuzz *f)
{
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    const int nranks = (int)fuzz_around(f, (const int64_t[]){1, 2, 8, 1024, 4096}, 5);
    struct settings set;
    struct heap_plan plan;

    config.num_experts = (int32_t)fuzz_around(f, (const int64_t[]){1, 8, 256, 1 << 20}, 4);
    config.max_tokens_per_rank = (int32_t)fuzz_around(f, (const int64_t[]){1, 128, 4096, 1 << 20}, 4);
    config.max_hidden_bytes = (int32_t)fuzz_around(f, (const int64_t[]){16, 256, 14336, 1 << 24}, 4);
    config.max_topk = (int32_t)fuzz_around(f, (const int64_t[]){0, 1, 8, EPX_MAX_TOPK}, 4);
    config.max_recv_tokens = (int32_t)fuzz_around(f, (const int64_t[]){0, 1, 65536, INT32_MAX}, 4);
    config.max_inflight = (int32_t)fuzz_around(f, (const int64_t[]){0, 1, 2, 64}, 4);
    config.num_agents = (int32_t)fuzz_around(f, (const int64_t[]){0, 1, 1024}, 3);
    config.ranks_per_node = (int32_t)fuzz_around(f, (const int64_t[]){0, 1, 4, 8}, 4);
    config.alloc_bytes = (uint64_t)fuzz_around(f, (const int64_t[]){0, 4096, 1ll << 30, 1ll << 60}, 4);
    config.ht_buffer_bytes = (uint64_t)fuzz_around(f, (const int64_t[]){0, 4096, 1ll << 30, 1ll << 60}, 4);
    config.modes = fuzz_below(f, 5);
    config.layouts = fuzz_below(f, 8);
    config.timeout_ms = (int32_t)fuzz_around(f, (const int64_t[]){0, 1, INT32_MAX}, 3);
    config.device = (int32_t)fuzz_below(f, 5);
    if (!fuzz_below(f, 4)) {
        const uint32_t size = config.size;
        fuzz_fill(f, &config, sizeof(config));
        config.size = size;
    }
    if (settings_make(&config, nranks, &set) == EPX_OK) {
        FUZZ_REQUIRE(set.nranks == nranks && set.local_experts > 0 && set.max_topk > 0 && set.timeout_ms > 0);
        FUZZ_REQUIRE((int64_t)set.nranks * set.max_tokens * set.max_topk <= INT32_MAX);
        FUZZ_REQUIRE((int64_t)set.local_experts * nranks >= set.experts);
    }
    if (settings_plan(&config, nranks, &plan) == EPX_OK)
        FUZZ_REQUIRE(plan.total > 0 && plan.total < (uint64_t)1 << 62);
}

static void read_texts(struct fuzz *f)
{
    char text[TEXT], other[TEXT], out[64];
    struct net_name name;
    long hosts;

    draw_text(f, text);
    draw_text(f, other);
    (void)net_name_parse(text[0] ? text : "x", &name);
    (void)card_filter_match(text, other, (int)fuzz_int(f, 1));
    (void)interface_match(text, other);
    text_clean(out, 1 + fuzz_below(f, sizeof(out)), text, strlen(text) + 1);
    hosts = nodelist_host(text, (long)fuzz_int(f, 2), out, sizeof(out));
    FUZZ_REQUIRE(hosts >= -1 && memchr(out, 0, sizeof(out)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz f = {data, bytes};
    const unsigned kind = fuzz_below(&f, 4);
    const char *set[SET + 1] = {NULL}, *nearest;
    struct launcher launcher;
    struct secret secret;
    int nset = 0, count;
    const struct env_entry *table = env_table(&count);

    draw_environment(&f, set, &nset);
    if (kind == 0) {
        make_settings(&f);
    } else if (kind == 1) {
        read_texts(&f);
    } else if (kind == 2) {
        if (launcher_read(&launcher) == EPX_OK) {
            FUZZ_REQUIRE(launcher.rank >= 0 && launcher.rank < launcher.nranks);
            FUZZ_REQUIRE(launcher.nranks == 1 || (launcher.port > 0 && launcher.port <= 65535 && launcher.ports > 0));
        }
    } else {
        for (int i = 0; i < count; i++) {
            const int64_t value = env_int(table[i].name, 7, 1, 1000);
            FUZZ_REQUIRE(value >= 1 && value <= 1000);
        }
        if (getenv("EPX_SECRET"))
            (void)secret_read(0, &secret);
        for (int i = 0; i < nset; i++)
            FUZZ_REQUIRE(!env_is_unknown(set[i], &nearest));
    }
    for (int i = 0; i < nset; i++)
        unsetenv(set[i]);
    return 0;
}

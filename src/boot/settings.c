/* SPDX-License-Identifier: Apache-2.0 */
#include "boot/rendezvous.h"

#include <errno.h>
#include <stdlib.h>

#include "util/env.h"
#include "util/status.h"

/* RANK and its like come from a launcher: unlike an option of EPX's own, a bad value is no case for a default. */
static epx_status launcher_int(const char *name, long low, long high, int *value)
{
    const char *text = getenv(name);
    char *end;
    long number;

    if (!text || !text[0])
        return fail(EPX_ERR_USAGE,
                    "%s is not set: start the ranks with `epx run`, torchrun or the like, or give a bootstrap", name);
    errno = 0;
    number = strtol(text, &end, 10);
    if (errno || *end || number < low || number > high)
        return fail(EPX_ERR_ARGUMENT, "%s is \"%s\", expected an integer from %ld to %ld", name, text, low, high);
    *value = (int)number;
    return EPX_OK;
}

static uint64_t hash_text(uint64_t hash, const char *text)
{
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    return hash;
}

/* Jobs that look for ports in the same range differ in the first port; else EPX_JOB_ID must tell them apart. The world
 * size stays out, so that a rank with a wrong one is told so instead of being sent away as a stranger. */
static uint64_t job_of(int port)
{
    const char *id = env_string("EPX_JOB_ID");
    uint64_t hash = (0xcbf29ce484222325u ^ (uint64_t)port) * 0x100000001b3u;

    return hash_text(hash, id ? id : "");
}

epx_status rendezvous_from_env(struct rendezvous_config *config)
{
    epx_status status = launcher_int("WORLD_SIZE", 1, RENDEZVOUS_MAX_RANKS, &config->nranks);

    if (!status)
        status = launcher_int("RANK", 0, config->nranks - 1, &config->rank);
    if (status || config->nranks == 1)
        return status;
    config->host = getenv("MASTER_ADDR");
    if (!config->host || !config->host[0])
        return fail(EPX_ERR_USAGE, "MASTER_ADDR is not set, expected the name or address of rank 0's machine");
    config->port = (int)env_int("EPX_MASTER_PORT", 0, 1, 65535);
    if (!config->port)
        status = launcher_int("MASTER_PORT", 1, 65535, &config->port);
    config->job = job_of(config->port);
    config->interfaces = env_string("EPX_SOCKET_IFNAME");
    return status;
}

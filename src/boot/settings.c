/* SPDX-License-Identifier: Apache-2.0 */
/* The settings of a rendezvous, from what the launcher says. */
#include "boot/launcher.h"
#include "boot/rendezvous.h"
#include "boot/secret.h"
#include "util/env.h"

static uint64_t hash_text(uint64_t hash, const char *text)
{
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
    return hash;
}

/* Jobs whose port ranges overlap differ in their first port or in their job id. The world size is not part of the hash,
 * so that a rank with a wrong one gets an error instead of being ignored as a rank of another job. */
static uint64_t job_of(int port, const char *id)
{
    uint64_t hash = (0xcbf29ce484222325u ^ (uint64_t)port) * 0x100000001b3u;

    return hash_text(hash, id);
}

void rendezvous_from_launcher(const struct launcher *launcher, const struct secret *secret, int timeout_ms,
                              struct rendezvous_config *config)
{
    *config = (struct rendezvous_config){.rank = launcher->rank,
                                         .nranks = launcher->nranks,
                                         .timeout_ms = timeout_ms,
                                         .host = launcher->host,
                                         .host_from = launcher->host_from,
                                         .host_hint = launcher->host_hint,
                                         .port = launcher->port,
                                         .ports = launcher->ports,
                                         .key = secret->off ? NULL : secret->key,
                                         .key_from = secret->from,
                                         .job = job_of(launcher->port, launcher->job),
                                         .interfaces = env_string("EPX_SOCKET_IFNAME")};
}

/* SPDX-License-Identifier: Apache-2.0 */
/* What a membership is made of, from its port to the tables of its ranks. membership.c has the protocol. */
#include "boot/membership_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/files.h"
#include "util/runtime.h"
#include "util/status.h"

void membership_set_peers(struct membership *m, const struct conn_address *all, uint64_t token)
{
    memcpy(m->addresses, all, (size_t)m->nranks * sizeof(*all));
    m->token = token;
}

/* Any rank may have to be the coordinator. */
static epx_status reserve_files(const struct membership *m)
{
    char who[80];

    if (m->ops != &conn_socket_ops)
        return EPX_OK;
    snprintf(who, sizeof(who), "rank %d of %d ranks with enable_mask", m->rank, m->nranks);
    return files_need(who, 3 * m->nranks + MAX_PENDING);
}

epx_status membership_open(int rank, int nranks, int one_host, const uint8_t *key, struct conn_address *own,
                           struct membership **out)
{
    const size_t n = (size_t)nranks;
    struct membership *m = calloc(1, sizeof(*m));
    epx_status status;

    *out = NULL;
    if (!m)
        return fail(EPX_ERR_MEMORY, "no memory for the membership of %d ranks", nranks);
    m->ops = runtime()->conns ? runtime()->conns : &conn_socket_ops;
    m->rank = rank;
    m->nranks = nranks;
    m->late_for = -1;
    for (int i = 0; i < MAX_PENDING; i++)
        m->pending[i].conn = -1;
    join_open(m);
    m->addresses = calloc(n, sizeof(*m->addresses));
    m->incarnations = calloc(n, sizeof(*m->incarnations));
    m->processes = calloc(n, sizeof(*m->processes));
    m->peers = calloc(n, sizeof(*m->peers));
    m->excluded = calloc(5 + n, n); /* excluded, view, reported, without, then those of every peer */
    m->view = m->excluded ? m->excluded + n : NULL;
    m->reported = m->excluded ? m->excluded + 3 * n : NULL;
    m->without = m->excluded ? m->excluded + 4 * n : NULL;
    for (size_t r = 0; m->peers && m->excluded && r < n; r++)
        m->peers[r].excluded = m->excluded + (5 + r) * n;
    for (int r = 0; m->peers && r < nranks; r++)
        m->peers[r].conn = m->peers[r].rx.conn = -1;
    for (int r = 0; m->processes && r < nranks; r++)
        m->processes[r] = -1;
    if (!m->addresses || !m->incarnations || !m->processes || !m->peers || !m->excluded)
        status = fail(EPX_ERR_MEMORY, "no memory for the membership of %d ranks", nranks);
    else
        status = reserve_files(m);
    if (status == EPX_OK)
        status = m->ops->port_open(rank, one_host, key, own, &m->port);
    if (status != EPX_OK) {
        membership_close(m);
        return status;
    }
    *out = m;
    return EPX_OK;
}

void membership_close(struct membership *m)
{
    if (!m)
        return;
    if (m->port) {
        membership_end(m);
        join_close(m);
        m->ops->port_close(m->port);
    }
    for (int r = 0; m->peers && r < m->nranks; r++)
        free(m->peers[r].tx);
    for (int i = 0; i < 2; i++)
        free(m->result[i]);
    for (int r = 0; m->processes && r < m->nranks; r++)
        forget_process(m, r);
    free(m->processes);
    free(m->peers);
    free(m->incarnations);
    free(m->addresses);
    free(m->excluded);
    free(m);
}

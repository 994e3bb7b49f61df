/* SPDX-License-Identifier: Apache-2.0 */
#include "group/abort.h"

#include "device/cpu/agent.h"
#include "group/error.h"
#include "util/status.h"

uint64_t abort_word(struct epx_group *group)
{
    uint64_t word = 0;
    char *at = (char *)group->heap.base + offsetof(struct control, abort_word);

    if (group->device->ops->caps & DEVICE_HOST_HEAP)
        return __atomic_load_n((uint64_t *)at, __ATOMIC_ACQUIRE);
    group->device->ops->copy(group->device, &word, at, sizeof(word));
    return word;
}

/* Into the heap of a rank of this node. */
static void store_abort_word(struct epx_group *group, struct control *c, uint64_t word)
{
    const struct device_ops *ops = group->device->ops;

    if (!(ops->caps & DEVICE_HOST_HEAP)) {
        ops->copy(group->device, &c->abort_word, &word, sizeof(word));
        return;
    }
    __atomic_store_n(&c->abort_word, word, __ATOMIC_RELEASE); /* pairs with the acquire in cpu_wait_ge */
    cpu_env_ring(ops->env ? ops->env : &cpu_thread_env, &c->bell);
}

void group_abort(struct epx_group *group, int status)
{
    for (int r = 0; r < group->nranks; r++)
        if (group->bases[r])
            store_abort_word(group, group->bases[r], ABORT_WORD(status, group->rank));
}

void group_aborted_by(struct epx_group *group, int rank, int status)
{
    store_abort_word(group, group->heap.base, ABORT_WORD(status, rank));
}

void group_abort_left_out(struct epx_group *group, int rank)
{
    if (group->bases[rank])
        store_abort_word(group, group->bases[rank], ABORT_WORD(EPX_ERR_TIMEOUT, group->rank));
}

epx_status group_usable(struct epx_group *group)
{
    epx_error_info info;
    uint64_t word;

    /* Where the word is in GPU memory, the next kernel looks at it anyway: only what a kernel has told is looked at here. */
    if (!(group->device->ops->caps & DEVICE_HOST_HEAP) && error_read(group, &info) == EPX_OK)
        return EPX_OK;
    word = abort_word(group);
    if (!word)
        return EPX_OK;
    if (error_read(group, &info) != EPX_OK)
        return fail((epx_status)info.status,
                    "the group has failed (epx_group_error_clear on all ranks recovers it): %s", info.message);
    return fail(EPX_ERR_PEER,
                "the group has failed (epx_group_error_clear on all ranks recovers it): rank %d reported: %s",
                ABORT_RANK(word), epx_strerror((epx_status)ABORT_STATUS(word)));
}

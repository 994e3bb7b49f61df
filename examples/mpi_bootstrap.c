/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks of an MPI program: EPX finds them through an all-gather of MPI, and through nothing else. Start it with
 *
 *     mpirun -n 4 build/examples/mpi_bootstrap
 *
 * Any all-gather of bytes will do in its place: that of another library, or one over your own sockets. Each token goes
 * to two experts, which return it as it is; with weights 3/4 and 1/4 the sum is the token.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#include "epx/epx.h"

enum { TOKENS = 16, HIDDEN = 256, TOPK = 2, EXPERTS = 8 };

#define TRY(call)                                                 \
    do {                                                          \
        epx_status status_ = (call);                              \
        if (status_ != EPX_OK) {                                  \
            fprintf(stderr, "%s: %s\n", #call, epx_last_error()); \
            MPI_Abort(MPI_COMM_WORLD, 1);                         \
        }                                                         \
    } while (0)

/* Called on the thread that creates the group. The communicator must live as long as the group. */
static int gather(void *context, const void *send, void *recv, size_t bytes)
{
    return MPI_Allgather(send, (int)bytes, MPI_BYTE, recv, (int)bytes, MPI_BYTE, *(MPI_Comm *)context) != MPI_SUCCESS;
}

static epx_group *create_group(MPI_Comm *comm)
{
    epx_bootstrap bootstrap = EPX_BOOTSTRAP_INIT;
    MPI_Comm_rank(*comm, &bootstrap.rank);
    MPI_Comm_size(*comm, &bootstrap.nranks);
    bootstrap.allgather = gather;
    bootstrap.context = comm;

    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    config.modes = EPX_LOW_LATENCY;
    config.num_experts = EXPERTS;
    config.max_tokens_per_rank = TOKENS;
    config.max_hidden_bytes = HIDDEN * sizeof(float);
    config.max_topk = TOPK;
    epx_group *group;
    TRY(epx_group_create(&group, &bootstrap, &config));
    return group;
}

static float tokens[TOKENS][HIDDEN], result[TOKENS][HIDDEN], topk_weights[TOKENS][TOPK];
static int32_t topk_idx[TOKENS][TOPK];

static void exchange(epx_group *group, const epx_group_info *info)
{
    epx_handle_config config = EPX_HANDLE_CONFIG_INIT;
    config.mode = EPX_LOW_LATENCY;
    config.layout = EPX_EXPERT_MAJOR;
    config.topk = TOPK;
    epx_handle *handle;
    TRY(epx_handle_create(&handle, group, &config));

    /* Memory of epx_alloc: other ranks of the machine write into it without a copy in between. */
    const int64_t zone = (int64_t)info->nranks * TOKENS;
    void *rows;
    TRY(epx_alloc(group, (size_t)(info->local_experts * zone) * HIDDEN * sizeof(float), &rows));
    epx_tensor idx = epx_tensor_make(topk_idx, EPX_INT32, 2, TOKENS, TOPK, 0, 0);
    epx_tensor weights = epx_tensor_make(topk_weights, EPX_FP32, 2, TOKENS, TOPK, 0, 0);
    epx_tensor in = epx_tensor_make(tokens, EPX_FP32, 2, TOKENS, HIDDEN, 0, 0);
    epx_tensor received = epx_tensor_make(rows, EPX_FP32, 3, info->local_experts, zone, HIDDEN, 0);
    epx_tensor out = epx_tensor_make(result, EPX_FP32, 2, TOKENS, HIDDEN, 0, 0);

    epx_dispatch_inputs send = EPX_DISPATCH_INPUTS_INIT;
    send.tokens = &in;
    send.topk_idx = &idx;
    epx_dispatch_outputs receive = EPX_DISPATCH_OUTPUTS_INIT;
    receive.tokens = &received;
    epx_combine_inputs back = EPX_COMBINE_INPUTS_INIT;
    back.tokens = &received;
    back.topk_weights = &weights;
    epx_combine_outputs sum = EPX_COMBINE_OUTPUTS_INIT;
    sum.tokens = &out;
    TRY(epx_dispatch(handle, &send, &receive, NULL, NULL, NULL));
    TRY(epx_combine(handle, &back, &sum, NULL, NULL)); /* after the dispatch, on the same stream */
    TRY(epx_stream_sync(group, NULL));
    TRY(epx_handle_destroy(handle));
    TRY(epx_free(group, rows));
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm comm = MPI_COMM_WORLD;
    epx_group *group = create_group(&comm);
    epx_group_info info = EPX_GROUP_INFO_INIT;
    TRY(epx_group_query(group, &info));

    for (int t = 0; t < TOKENS; t++) {
        topk_idx[t][0] = (info.rank + t) % EXPERTS;
        topk_idx[t][1] = (info.rank + t + 3) % EXPERTS;
        topk_weights[t][0] = 0.75f;
        topk_weights[t][1] = 0.25f;
        for (int h = 0; h < HIDDEN; h++)
            tokens[t][h] = (float)(info.rank * 1000 + t);
    }
    exchange(group, &info);
    int errors = 0;
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HIDDEN; h++)
            errors += result[t][h] != tokens[t][h];
    printf("rank %d of %d: %d tokens to %d experts and back, %d wrong values\n", info.rank, info.nranks, TOKENS,
           EXPERTS, errors);
    TRY(epx_group_destroy(group));
    MPI_Finalize();
    return errors != 0;
}

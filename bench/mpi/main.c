/* SPDX-License-Identifier: Apache-2.0 */
/* epx-mpi-baseline SHARED_MEMORY: one rank of the MPI team of `epx bench --vs mpi`, which starts it under mpirun. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "baseline.h"
#include "node.h"
#include "tests/lib/bench_runner.h"

static void *plain_alloc(void *context, size_t bytes)
{
    (void)context;
    return aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
}

/* "Open MPI v4.1.4" out of a longer text. */
static void name_library(struct bench_team *team)
{
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int bytes;

    MPI_Get_library_version(text, &bytes);
    snprintf(team->library, sizeof(team->library), "%.*s", (int)strcspn(text, ",\n"), text);
}

static int run_rank(struct bench_shm_rank *self)
{
    static struct bench_work work;
    static struct baseline baseline;
    const struct bench_config *config = &self->shm->config;
    struct bench_runner runner = {.name = "mpi",
                                  .self = &baseline,
                                  .update = config->mode == EPX_HIGH_THROUGHPUT ? baseline_update : NULL,
                                  .dispatch = baseline_dispatch,
                                  .combine = baseline_combine,
                                  .corrupt_dispatch = config->corrupt == 3};
    int result;

    if (bench_work_open(&work, config, self->rank, plain_alloc, NULL) != 0 ||
        baseline_open(&baseline, config, &work) != 0) {
        bench_shm_fail(self->shm, BENCH_ERROR, "mpi rank %d: no memory for its tensors", self->rank);
        return -1;
    }
    if (self->rank == 0) {
        baseline_variants(config, self->team);
        name_library(self->team);
    }
    result = bench_runner_run(&runner, self, &work);
    bench_work_close(&work);
    return result;
}

int main(int argc, char **argv)
{
    struct bench_shm_rank self;
    int rank, nranks;

    if (argc > 3 && strcmp(argv[1], "--node") == 0)
        return node_run(argv[2], argv + 3, argc - 3);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &nranks);
    if (argc != 2) {
        fprintf(stderr, "epx-mpi-baseline is started by `epx bench --vs mpi`\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    if (bench_shm_attach(&self, argv[1], BENCH_MPI, rank) != 0) {
        perror("epx-mpi-baseline: cannot open the benchmark's shared memory");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    if (nranks != self.shm->config.ranks) {
        fprintf(stderr, "epx-mpi-baseline: %d ranks were started, %d are needed\n", nranks, self.shm->config.ranks);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    /* A rank that fails has stored the reason; the others may be inside MPI and would wait for it for ever. */
    if (run_rank(&self) != 0)
        MPI_Abort(MPI_COMM_WORLD, 3);
    MPI_Finalize();
    return 0;
}

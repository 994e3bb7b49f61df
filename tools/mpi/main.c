/* SPDX-License-Identifier: Apache-2.0 */
/* epx-mpi-baseline BOARD: one rank of the MPI team of `epx bench --vs mpi`, which starts it under mpirun. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "baseline.h"
#include "node.h"
#include "tests/lib/player.h"

static void *plain_alloc(void *context, size_t bytes)
{
    (void)context;
    return aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
}

/* "Open MPI v4.1.4" out of a longer text. */
static void name_library(struct board_team *team)
{
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int bytes;

    MPI_Get_library_version(text, &bytes);
    snprintf(team->library, sizeof(team->library), "%.*s", (int)strcspn(text, ",\n"), text);
}

static int play(struct board_seat *seat)
{
    static struct bench_work work;
    static struct baseline baseline;
    const struct bench_config *config = &seat->board->config;
    struct player player = {.name = "mpi",
                            .self = &baseline,
                            .update = config->mode == EPX_HIGH_THROUGHPUT ? baseline_update : NULL,
                            .dispatch = baseline_dispatch,
                            .combine = baseline_combine,
                            .corrupt_dispatch = config->corrupt == 3};
    int result;

    if (bench_work_open(&work, config, seat->rank, plain_alloc, NULL) != 0 ||
        baseline_open(&baseline, config, &work) != 0) {
        board_fail(seat->board, BOARD_ERROR, "mpi rank %d: no memory for its tensors", seat->rank);
        return -1;
    }
    if (seat->rank == 0) {
        baseline_variants(config, seat->team);
        name_library(seat->team);
    }
    result = player_run(&player, seat, &work);
    bench_work_close(&work);
    return result;
}

int main(int argc, char **argv)
{
    struct board_seat seat;
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
    if (board_attach(&seat, argv[1], BOARD_MPI, rank) != 0) {
        perror("epx-mpi-baseline: cannot open the benchmark's board");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    if (nranks != seat.board->config.ranks) {
        fprintf(stderr, "epx-mpi-baseline: %d ranks were started, %d are needed\n", nranks, seat.board->config.ranks);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    /* A rank that fails has written why on the board; the others may be inside MPI and would wait for it for ever. */
    if (play(&seat) != 0)
        MPI_Abort(MPI_COMM_WORLD, 3);
    MPI_Finalize();
    return 0;
}

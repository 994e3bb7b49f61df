/* SPDX-License-Identifier: Apache-2.0 */
#include "player.h"

static int recorded(const struct board_command *c, int i)
{
    return c->first < 0 || i < c->warmup ? -1 : c->first + i - c->warmup;
}

/* Ends a measurement; only after its barrier is everything of the operation posted and counted. */
static int finish(const struct player *player, struct board_seat *seat, enum board_op op, int variant, int slot)
{
    if (board_finish(seat, op, variant, slot) != 0)
        return -1;
    if (player->finished != NULL)
        player->finished(player->self, slot >= 0 ? (int)op : -1);
    return 0;
}

static int start(const struct player *player, struct board_seat *seat)
{
    if (board_barrier(seat) != 0)
        return -1;
    if (player->finished != NULL)
        player->finished(player->self, -1);
    return 0;
}

static int play_updates(const struct player *player, struct board_seat *seat, const struct board_command *c)
{
    int i;

    if (start(player, seat) != 0)
        return -1;
    for (i = 0; i < c->warmup + c->iters; i++)
        if (player->update(player->self) != 0 || finish(player, seat, BOARD_UPDATE, 0, recorded(c, i)) != 0)
            return -1;
    return 0;
}

static int play_exchanges(const struct player *player, struct board_seat *seat, const struct board_command *c)
{
    int i;

    if (start(player, seat) != 0)
        return -1;
    for (i = 0; i < c->warmup + c->iters; i++) {
        if (player->dispatch(player->self, c->variant) != 0)
            return -1;
        if (finish(player, seat, BOARD_DISPATCH, c->variant, recorded(c, i)) != 0)
            return -1;
        if (player->combine(player->self, c->variant) != 0)
            return -1;
        if (finish(player, seat, BOARD_COMBINE, c->variant, recorded(c, i)) != 0)
            return -1;
    }
    return 0;
}

static int verify(const struct player *player, struct board_seat *seat, struct bench_work *work)
{
    struct mismatch m = {{0}};
    int last = seat->board->config.ranks - 1;

    if (player->corrupt_dispatch && seat->rank == last)
        bench_work_corrupt(work, 0);
    if (player->corrupt_combine && seat->rank == last)
        bench_work_corrupt(work, 1);
    if (bench_work_check(work, &m) == 0)
        return 0;
    board_fail(seat->board, BOARD_MISMATCH, "%s rank %d, seed %llu: %s", player->name, seat->rank,
               (unsigned long long)work->workload.seed, m.text);
    return -1;
}

static int play(const struct player *player, struct board_seat *seat, struct bench_work *work,
                const struct board_command *c)
{
    if (bench_work_seed(work, c->seed) != 0) {
        board_fail(seat->board, BOARD_ERROR, "%s rank %d: no memory for the workload", player->name, seat->rank);
        return -1;
    }
    if (c->verify)
        bench_work_poison(work);
    if (player->update != NULL && play_updates(player, seat, c) != 0)
        return -1;
    if (play_exchanges(player, seat, c) != 0)
        return -1;
    return c->verify ? verify(player, seat, work) : 0;
}

int player_run(const struct player *player, struct board_seat *seat, struct bench_work *work)
{
    struct board_command command;

    while (board_next(seat, &command) == 0) {
        if (command.quit)
            return 0;
        if (play(player, seat, work, &command) != 0)
            return -1;
        board_done(seat);
    }
    return -1;
}

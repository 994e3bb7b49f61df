/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: labels=notsan (processes) */
/*
 * Memory is given back when all processes that have mapped it have unmapped it, or ended (group/giveback.h). The test
 * is the exporter, rank 0; its importers are processes, which do as they are told.
 */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "group/giveback.h"
#include "tests/lib/unit.h"

enum { RANKS = 3 };

struct importer {
    pid_t pid;
    int to, from;
    struct heap_export export;
};

/* Says where its ledger is; then unmaps the memory of rank 0 for each byte that it gets, and answers. */
static void import(int in, int out)
{
    struct ledger *ledger = NULL;
    struct heap_export export;
    char word;

    if (ledger_create(RANKS, &ledger) != EPX_OK)
        _exit(1);
    export = ledger_export(ledger);
    if (write(out, &export, sizeof(export)) != sizeof(export))
        _exit(1);
    while (read(in, &word, 1) == 1) {
        ledger_closed(ledger, 0);
        if (write(out, &word, 1) != 1)
            _exit(1);
    }
    _exit(0);
}

static void start(struct importer *p)
{
    int to[2], from[2];

    assert_int_equal(pipe(to) | pipe(from), 0);
    p->pid = fork();
    assert_true(p->pid >= 0);
    if (p->pid == 0) {
        close(to[1]);
        close(from[0]);
        import(to[0], from[1]);
    }
    close(to[0]);
    close(from[1]);
    p->to = to[1];
    p->from = from[0];
    assert_int_equal(read(p->from, &p->export, sizeof(p->export)), sizeof(p->export));
}

static void unmaps(struct importer *p)
{
    char word = 1;

    assert_int_equal(write(p->to, &word, 1), 1);
    assert_int_equal(read(p->from, &word, 1), 1);
}

static void end(struct importer *p)
{
    kill(p->pid, SIGKILL);
    close(p->to);
    close(p->from);
    assert_int_equal(waitpid(p->pid, NULL, 0), p->pid);
}

static void release(void *context)
{
    ++*(int *)context;
}

/* A group of rank 0 and two importers has ended on rank 0. */
static struct ledger *begin(struct importer p[RANKS])
{
    struct ledger *ledger = NULL;

    for (int r = 1; r < RANKS; r++)
        start(&p[r]);
    assert_int_equal(ledger_create(RANKS, &ledger), EPX_OK);
    for (int r = 1; r < RANKS; r++)
        ledger_add_peer(ledger, r, &p[r].export);
    return ledger;
}

static void all_words_are_waited_for(void **state)
{
    struct importer p[RANKS] = {{0}};
    struct ledger *ledger = begin(p);
    int freed = 0;

    (void)state;
    unmaps(&p[1]); /* before rank 0 ends its group */
    giveback_keep(ledger, 0, release, &freed);
    assert_int_equal(giveback_sweep(0), 1);
    assert_int_equal(freed, 0);
    unmaps(&p[2]);
    assert_int_equal(giveback_sweep(0), 0);
    assert_int_equal(freed, 1);
    for (int r = 1; r < RANKS; r++)
        end(&p[r]);
}

static void a_stopped_process_keeps_it_and_a_dead_one_does_not(void **state)
{
    struct importer p[RANKS] = {{0}};
    struct ledger *ledger = begin(p);
    int freed = 0;

    (void)state;
    giveback_keep(ledger, 0, release, &freed);
    unmaps(&p[1]);
    kill(p[2].pid, SIGSTOP);
    assert_int_equal(giveback_sweep(0), 1);
    end(&p[2]);
    assert_int_equal(giveback_sweep(0), 0);
    assert_int_equal(freed, 1);
    end(&p[1]);
}

static void a_new_process_of_a_rank_has_mapped_it_anew(void **state)
{
    struct importer p[RANKS] = {{0}};
    struct ledger *ledger = begin(p);
    int freed = 0;

    (void)state;
    unmaps(&p[1]);
    end(&p[2]);
    start(&p[2]);
    ledger_replace_peer(ledger, 2, &p[2].export);
    giveback_keep(ledger, 0, release, &freed);
    assert_int_equal(giveback_sweep(0), 1);
    unmaps(&p[2]);
    assert_int_equal(giveback_sweep(0), 0);
    for (int r = 1; r < RANKS; r++)
        end(&p[r]);
}

/* With no group left, and of a peer whose ledger cannot be mapped. */
static void at_the_end_nothing_is_kept(void **state)
{
    struct ledger *ledger = NULL;
    struct heap_export nowhere = {.bytes = 4096, .pid = 1, .token = 1 << 20};
    int freed = 0;

    (void)state;
    assert_int_equal(ledger_create(RANKS, &ledger), EPX_OK);
    ledger_add_peer(ledger, 1, &nowhere);
    giveback_keep(ledger, 0, release, &freed);
    assert_int_equal(giveback_sweep(0), 1);
    assert_int_equal(giveback_sweep(1), 0);
    assert_int_equal(freed, 1);
}

UNIT_MAIN(cmocka_unit_test(all_words_are_waited_for),
          cmocka_unit_test(a_stopped_process_keeps_it_and_a_dead_one_does_not),
          cmocka_unit_test(a_new_process_of_a_rank_has_mapped_it_anew), cmocka_unit_test(at_the_end_nothing_is_kept))

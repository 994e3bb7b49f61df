/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: labels=notsan (processes) */
/*
 * Memory is given back when all processes that have mapped it have unmapped it, or ended (group/giveback.h). The test
 * is the exporter, rank 0; its importers are processes, which do as they are told.
 */
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "group/giveback.h"
#include "tests/lib/unit.h"

enum { RANKS = 3, CLOSING_MS = 20000 };
enum { CLOSE = 1, BEGIN = 2, CLOSE_LATER = 3 }; /* what an importer is told */

struct importer {
    pid_t pid;
    int to, from;
    struct ledger_address address;
};

static int freed, releasable;

static void count_freed(struct device *device, struct heap *heap)
{
    (void)device;
    (void)heap;
    freed++;
}

static int release(void)
{
    return releasable;
}

static const struct device_ops counting = {.heap_destroy = count_freed, .release = release};

/* The group of that rank has ended. */
static void keep(struct ledger *ledger)
{
    static char memory;
    const struct heap heap = {.base = &memory, .bytes = 1};

    giveback_keep(ledger, &counting, &heap, CLOSING_MS);
}

/* Says where its ledger is; then does what the byte that it gets tells, and answers. */
static void import(int in, int out)
{
    struct ledger *ledger = NULL;
    struct ledger_address address;
    char word;

    if (ledger_create(RANKS, 1, &ledger) != EPX_OK)
        _exit(1);
    address = ledger_address(ledger);
    ledger_doubt(ledger, 1);
    if (write(out, &address, sizeof(address)) != sizeof(address))
        _exit(1);
    while (read(in, &word, 1) == 1) {
        if (word == CLOSE_LATER)
            usleep(10 * GIVEBACK_WAIT_MS * 1000);
        if (word == BEGIN)
            ledger_closing(ledger, 1);
        else
            keep(ledger);
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
    assert_int_equal(read(p->from, &p->address, sizeof(p->address)), sizeof(p->address));
}

static void send_word(struct importer *p, char word)
{
    assert_int_equal(write(p->to, &word, 1), 1);
}

static void recv_word(struct importer *p)
{
    char word;

    assert_int_equal(read(p->from, &word, 1), 1);
}

static void unmaps(struct importer *p)
{
    send_word(p, CLOSE);
    recv_word(p);
}

static void end(struct importer *p)
{
    kill(p->pid, SIGKILL);
    close(p->to);
    close(p->from);
    assert_int_equal(waitpid(p->pid, NULL, 0), p->pid);
}

/* A group of rank 0 and two importers; another group lives on, so that nothing is freed for being the last. */
static struct ledger *begin(struct importer p[RANKS], struct ledger **other)
{
    struct ledger *ledger = NULL;

    freed = 0;
    releasable = 1;
    for (int r = 1; r < RANKS; r++)
        start(&p[r]);
    assert_int_equal(ledger_create(1, 0, other), EPX_OK);
    assert_int_equal(ledger_create(RANKS, 0, &ledger), EPX_OK);
    ledger_doubt(ledger, 1);
    for (int r = 1; r < RANKS; r++)
        ledger_set_peer(ledger, r, p[r].pid, &p[r].address);
    ledger_doubt(ledger, 0);
    return ledger;
}

static void all_words_are_waited_for(void **state)
{
    struct importer p[RANKS] = {{0}};
    struct ledger *other, *ledger = begin(p, &other);

    (void)state;
    unmaps(&p[1]); /* before rank 0 ends its group */
    keep(ledger);
    assert_int_equal(giveback_sweep(), 1);
    assert_int_equal(freed, 0);
    unmaps(&p[2]);
    assert_int_equal(giveback_sweep(), 0);
    assert_int_equal(freed, 1);
    for (int r = 1; r < RANKS; r++)
        end(&p[r]);
    keep(other); /* which nobody has mapped */
    assert_int_equal(freed, 2);
}

/* Unmapping takes ten times as long as others wait for a rank that has not begun. */
static void a_rank_that_is_ending_the_group_is_waited_for(void **state)
{
    struct importer p[RANKS] = {{0}};
    struct ledger *other, *ledger = begin(p, &other);

    (void)state;
    unmaps(&p[1]);
    send_word(&p[2], BEGIN);
    recv_word(&p[2]);
    send_word(&p[2], CLOSE_LATER);
    keep(ledger);
    assert_int_equal(freed, 1);
    recv_word(&p[2]);
    for (int r = 1; r < RANKS; r++)
        end(&p[r]);
    keep(other);
}

static void a_stopped_process_keeps_it_and_a_dead_one_does_not(void **state)
{
    struct importer p[RANKS] = {{0}};
    struct ledger *other, *ledger = begin(p, &other);

    (void)state;
    keep(ledger);
    unmaps(&p[1]);
    kill(p[2].pid, SIGSTOP);
    assert_int_equal(giveback_sweep(), 1);
    end(&p[2]);
    assert_int_equal(giveback_sweep(), 0);
    assert_int_equal(freed, 1);
    end(&p[1]);
    keep(other);
}

static void a_new_process_of_a_rank_has_mapped_it_anew(void **state)
{
    struct importer p[RANKS] = {{0}};
    struct ledger *other, *ledger = begin(p, &other);

    (void)state;
    unmaps(&p[1]);
    end(&p[2]);
    start(&p[2]);
    ledger_set_peer(ledger, 2, p[2].pid, &p[2].address);
    keep(ledger);
    assert_int_equal(giveback_sweep(), 1);
    unmaps(&p[2]);
    assert_int_equal(giveback_sweep(), 0);
    for (int r = 1; r < RANKS; r++)
        end(&p[r]);
    keep(other);
}

/* As where ranks are threads of one process: its own mappings stay for a while. */
static void what_is_still_mapped_here_is_not_said_to_be_closed(void **state)
{
    struct ledger *ledgers[2] = {NULL};
    struct ledger *other;

    (void)state;
    freed = releasable = 0;
    assert_int_equal(ledger_create(1, 0, &other), EPX_OK);
    for (int r = 0; r < 2; r++)
        assert_int_equal(ledger_create(2, r, &ledgers[r]), EPX_OK);
    for (int r = 0; r < 2; r++) {
        const struct ledger_address address = ledger_address(ledgers[1 - r]);
        ledger_set_peer(ledgers[r], 1 - r, getpid(), &address);
    }
    for (int r = 0; r < 2; r++)
        keep(ledgers[r]);
    assert_int_equal(giveback_sweep(), 2);
    assert_int_equal(freed, 0);
    releasable = 1;
    (void)giveback_sweep(); /* the second says its word behind the first's look */
    assert_int_equal(giveback_sweep(), 0);
    assert_int_equal(freed, 2);
    keep(other);
}

/* Of a peer whose ledger cannot be mapped, of one that has none, and of peers that are not known. */
static void at_the_end_nothing_is_kept(void **state)
{
    struct ledger *ledgers[3] = {NULL};
    struct ledger_address nowhere = {.address = 4096, .token = 1 << 20}, none = {0};

    (void)state;
    freed = 0;
    releasable = 1;
    for (int i = 0; i < 3; i++)
        assert_int_equal(ledger_create(RANKS, 0, &ledgers[i]), EPX_OK);
    ledger_set_peer(ledgers[0], 1, 1, &nowhere);
    ledger_set_peer(ledgers[1], 1, 1, &none);
    ledger_doubt(ledgers[2], 1);
    keep(ledgers[0]);
    keep(ledgers[1]);
    assert_int_equal(giveback_sweep(), 2);
    assert_int_equal(freed, 0);
    keep(ledgers[2]);
    assert_int_equal(freed, 3);
}

UNIT_TESTS(all_words_are_waited_for, a_rank_that_is_ending_the_group_is_waited_for,
           a_stopped_process_keeps_it_and_a_dead_one_does_not, a_new_process_of_a_rank_has_mapped_it_anew,
           what_is_still_mapped_here_is_not_said_to_be_closed, at_the_end_nothing_is_kept)

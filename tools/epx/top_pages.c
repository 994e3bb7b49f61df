/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "group/watch.h"
#include "top.h"

enum { ASK_MS = 200 };

/* A page whose process is gone has no lock any more: it is removed. */
static int is_alive(int fd, int folder, const char *name)
{
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET};

    if (fcntl(fd, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK)
        return 1;
    unlinkat(folder, name, 0);
    return 0;
}

static int is_page(const struct watch *w, size_t bytes)
{
    /* Acquire: pairs with the release of group/watch.c. */
    return bytes >= sizeof(*w) && __atomic_load_n(&w->magic, __ATOMIC_ACQUIRE) == WATCH_MAGIC &&
           w->version == WATCH_VERSION && w->bytes <= bytes && w->nranks > 0 && w->rank >= 0 && w->rank < w->nranks &&
           sizeof(*w) + (size_t)w->nranks * (sizeof(struct watch_window) + sizeof(int32_t)) <= bytes;
}

static char process_state(int pid)
{
    char path[32], line[256] = "", *end;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    file = fopen(path, "re");
    if (!file)
        return 'X';
    if (!fgets(line, sizeof(line), file))
        line[0] = 0;
    fclose(file);
    end = strrchr(line, ')'); /* "4711 (name) T ..." */
    return end && end[1] ? end[2] : '?';
}

static void add_page(struct top *top, const struct watch *w, size_t bytes)
{
    struct top_page *pages = realloc(top->pages, (size_t)(top->count + 1) * sizeof(*pages));

    if (!pages) {
        munmap((void *)(uintptr_t)w, bytes);
        return;
    }
    top->pages = pages;
    pages[top->count++] = (struct top_page){.page = w, .bytes = bytes, .state = process_state(w->pid)};
}

static void open_page(struct top *top, int folder, const char *name)
{
    const int fd = openat(folder, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC); /* a lock is asked for by who could write */
    struct stat st;
    const struct watch *w = MAP_FAILED;

    if (fd < 0)
        return;
    if (fstat(fd, &st) == 0 && st.st_uid == getuid() && S_ISREG(st.st_mode) && is_alive(fd, folder, name) &&
        st.st_size >= (off_t)sizeof(*w))
        w = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (w == MAP_FAILED)
        return;
    if (is_page(w, (size_t)st.st_size))
        add_page(top, w, (size_t)st.st_size);
    else
        munmap((void *)(uintptr_t)w, (size_t)st.st_size);
}

static int by_group(const void *a, const void *b)
{
    const struct watch *x = ((const struct top_page *)a)->page, *y = ((const struct top_page *)b)->page;

    if (x->group != y->group)
        return x->group < y->group ? -1 : 1;
    return x->rank - y->rank;
}

void top_open(struct top *top)
{
    DIR *dir = opendir(WATCH_FOLDER);
    const struct dirent *entry;
    char mine[40];

    snprintf(mine, sizeof(mine), "epx-top-%ld-", (long)getuid());
    while (dir && (entry = readdir(dir)))
        if (strncmp(entry->d_name, mine, strlen(mine)) == 0)
            open_page(top, dirfd(dir), entry->d_name);
    if (dir)
        closedir(dir);
    if (top->count > 0)
        qsort(top->pages, (size_t)top->count, sizeof(*top->pages), by_group);
}

static int is_asked(const struct top_page *p)
{
    /* Acquire: pairs with the release of group/watch_sample.c. */
    return __atomic_load_n(&p->page->is_sampled, __ATOMIC_ACQUIRE) && !strchr("TtZX", p->state);
}

/* How many have not answered. */
static int unanswered(const struct top *top)
{
    int count = 0;

    for (int i = 0; i < top->count; i++) {
        const struct watch *w = top->pages[i].page;

        /* Acquire: pairs with the release of group/watch_sample.c. */
        count += is_asked(&top->pages[i]) && __atomic_load_n(&w->sampled, __ATOMIC_ACQUIRE) != w->looks;
    }
    return count;
}

void top_ask(const struct top *top)
{
    for (int i = 0; i < top->count; i++) {
        uint32_t *looks = (uint32_t *)(uintptr_t)&top->pages[i].page->looks;

        if (!is_asked(&top->pages[i]))
            continue;
        __atomic_add_fetch(looks, 1, __ATOMIC_RELEASE); /* pairs with the acquire of group/watch_sample.c */
        syscall(SYS_futex, looks, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
    for (int ms = 0; ms < ASK_MS && unanswered(top) > 0; ms++)
        usleep(1000);
}

void top_close(struct top *top)
{
    for (int i = 0; i < top->count; i++)
        munmap((void *)(uintptr_t)top->pages[i].page, top->pages[i].bytes);
    free(top->pages);
    memset(top, 0, sizeof(*top));
}

uint64_t top_bytes(const struct watch *w)
{
    uint64_t sum = __atomic_load_n(&w->stats.bytes_peer, __ATOMIC_RELAXED);

    for (int r = 0; r < w->nranks; r++)
        sum += __atomic_load_n(&watch_windows(w)[r].sent_bytes, __ATOMIC_RELAXED);
    return sum;
}

const struct watch_wait *top_longest_wait(const struct watch *w)
{
    const struct watch_wait *longest = NULL;

    for (int i = 0; i < WATCH_AGENTS; i++) {
        const struct watch_wait *wait = &w->waits[i];
        const uint64_t since = __atomic_load_n(&wait->since_ns, __ATOMIC_RELAXED);

        if (since && wait->phase != PHASE_AGENTS && (!longest || since < longest->since_ns))
            longest = wait;
    }
    return longest;
}

static int page_of(const struct top *top, int first, int end, int rank)
{
    for (int i = first; i < end; i++)
        if (top->pages[i].page->rank == rank)
            return i;
    return -1;
}

/* The rank that a rank waits for, -1: none. */
static int waits_for(const struct top_page *page)
{
    const struct watch_wait *wait = top_longest_wait(page->page);

    return wait ? wait->peer : -1;
}

int top_kernels_are_silent(const struct watch *w)
{
    return strcmp(w->device, "cpu") != 0;
}

int top_is_still(const struct top *top)
{
    for (int i = 0; i < top->count; i++) {
        const struct top_page *p = &top->pages[i];

        if (is_asked(p) && !top_longest_wait(p->page) && memcmp(p->before, p->page->count, sizeof(p->before)) == 0)
            return 1;
    }
    return 0;
}

/* Where kernels have not told for whom they wait: a rank whose process cannot go on. */
static int first_stopped(const struct top *top, int first, int end)
{
    for (int i = first; i < end && top_kernels_are_silent(top->pages[first].page); i++)
        if (strchr("TtZX", top->pages[i].state))
            return top->pages[i].page->rank;
    return -1;
}

/* From the rank that has waited longest on: whom it waits for, whom that one waits for, until one does not run, does
 * not wait, or has no page. */
int top_culprit(const struct top *top, int first, int end, int *page)
{
    const struct watch_wait *longest = NULL;
    int rank = -1;

    for (int i = first; i < end; i++) {
        const struct watch_wait *wait = top_longest_wait(top->pages[i].page);

        if (wait && wait->peer >= 0 && (!longest || wait->since_ns < longest->since_ns)) {
            longest = wait;
            rank = wait->peer;
        }
    }
    rank = longest ? rank : first_stopped(top, first, end);
    for (int hops = 0; hops < end - first; hops++) {
        const int at = page_of(top, first, end, rank);

        if (at < 0 || strchr("TtZX", top->pages[at].state) || waits_for(&top->pages[at]) < 0)
            break;
        rank = waits_for(&top->pages[at]);
    }
    *page = page_of(top, first, end, rank);
    return rank;
}

double top_percentile_us(const struct watch *w, int kernel, double percent)
{
    uint64_t all = 0, seen = 0;

    for (int i = 0; i < WATCH_BUCKETS; i++)
        all += w->times[kernel][i];
    for (int i = 0; i < WATCH_BUCKETS && all; i++) {
        seen += w->times[kernel][i];
        if ((double)seen >= percent / 100 * (double)all)
            return watch_bucket_ns(i) / 1e3;
    }
    return 0;
}

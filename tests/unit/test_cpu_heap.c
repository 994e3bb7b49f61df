/* SPDX-License-Identifier: Apache-2.0 */
/* Heaps of the CPU device, shared between processes. */
#include "tests/unit/cpu_fixture.h"

/* ThreadSanitizer leaves a program some 20 GiB of addresses on 64-bit ARM. */
#if defined(__SANITIZE_THREAD__)
#define BIG_HEAP (8 * GIB)
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define BIG_HEAP (8 * GIB)
#endif
#endif
#ifndef BIG_HEAP
#define BIG_HEAP (64 * GIB)
#endif

/* ---- Heaps --------------------------------------------------------------------------------------------------- */

static struct heap heap;

static const struct heap_export *make_heap(void)
{
    assert_int_equal(ops->heap_create(dev, 100000, &heap), EPX_OK);
    assert_true(heap.bytes >= 100000);
    strcpy(heap.base, "from the parent");
    return &heap.export;
}

static const struct heap_export *make_heap_wrong_inode(void)
{
    static struct heap_export wrong;

    wrong = *make_heap();
    wrong.opaque[8] ^= 1;
    return &wrong;
}

static int peer_reads_and_replies(const struct heap_export *export)
{
    void *base;

    if (ops->heap_open(dev, export, &base) != EPX_OK)
        return 1;
    if (strcmp(base, "from the parent") != 0)
        return 2;
    strcpy((char *)base + 50000, "from the child");
    ops->heap_close(dev, export, base);
    return 0;
}

static void heap_is_shared_between_processes(void **state)
{
    (void)state;
    assert_int_equal(with_peer(peer_reads_and_replies, make_heap), 0);
    assert_string_equal((char *)heap.base + 50000, "from the child");
    ops->heap_destroy(dev, &heap);
}

static int peer_is_refused(const struct heap_export *export)
{
    void *base = &base;

    if (ops->heap_open(dev, export, &base) != EPX_ERR_PEER || base != NULL)
        return 1;
    return strstr(epx_last_error(), "not the heap that was announced") ? 0 : 2;
}

static void another_file_is_refused(void **state)
{
    (void)state;
    assert_int_equal(with_peer(peer_is_refused, make_heap_wrong_inode), 0);
    ops->heap_destroy(dev, &heap);
}

static int other_user_is_refused(const struct heap_export *export)
{
    void *base;

    if (seteuid(12345) != 0)
        return 1;
    if (ops->heap_open(dev, export, &base) != EPX_ERR_SYSTEM)
        return 2;
    return strstr(epx_last_error(), "same user") ? 0 : 3;
}

static void another_user_gets_a_clear_message(void **state)
{
    (void)state;
    if (geteuid() != 0) {
        print_message("only root can become another user\n");
        skip();
    }
    assert_int_equal(with_peer(other_user_is_refused, make_heap), 0);
    ops->heap_destroy(dev, &heap);
}

static int peer_cannot_resize(const struct heap_export *export)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/%lld/fd/%lld", (long long)export->pid, (long long)export->token);
    return truncate(path, 4096) == 0 ? 1 : errno == EPERM ? 0 : 2;
}

static void heap_size_is_sealed(void **state)
{
    (void)state;
    assert_int_equal(with_peer(peer_cannot_resize, make_heap), 0);
    ops->heap_destroy(dev, &heap);
}

/* A child that makes a heap, sends its export, and then lives until it is killed. */
static pid_t start_owner(struct heap_export *export)
{
    int pipes[2];
    const pid_t child = fork_with_pipe(pipes);

    if (child == 0) {
        struct heap own;

        if (ops->heap_create(dev, 8192, &own) != EPX_OK)
            _exit(1);
        strcpy(own.base, "from the owner");
        write_all(pipes[1], &own.export, sizeof(own.export));
        for (;;)
            pause();
    }
    assert_true(read_all(pipes[0], export, sizeof(*export)));
    close_pipe(pipes);
    return child;
}

static void mapping_outlives_a_killed_owner(void **state)
{
    struct heap_export export;
    pid_t owner = start_owner(&export);
    void *base, *late;

    (void)state;
    assert_int_equal(ops->heap_open(dev, &export, &base), EPX_OK);
    kill(owner, SIGKILL);
    assert_int_equal(child_status(owner), -SIGKILL);
    assert_string_equal(base, "from the owner");
    strcpy(base, "still writable");
    assert_int_equal(ops->heap_open(dev, &export, &late), EPX_ERR_PEER);
    assert_non_null(strstr(epx_last_error(), "has ended"));
    assert_null(late);
    ops->heap_close(dev, &export, base);
}

static void own_heap_keeps_its_address(void **state)
{
    struct heap_export export;
    void *base;

    (void)state;
    export = *make_heap();
    assert_int_equal(ops->heap_open(dev, &export, &base), EPX_OK);
    assert_ptr_equal(base, heap.base);
    ops->heap_close(dev, &export, base);
    assert_string_equal(heap.base, "from the parent");
    ops->heap_destroy(dev, &heap);
    assert_null(heap.base);
    assert_int_not_equal(ops->heap_open(dev, &export, &base), EPX_OK); /* gone */
}

static void untouched_heap_costs_nothing(void **state)
{
    struct heap big;
    struct stat st;
    char *base;

    (void)state;
    assert_int_equal(ops->heap_create(dev, BIG_HEAP, &big), EPX_OK);
    base = big.base;
    base[0] = base[BIG_HEAP / 2] = base[BIG_HEAP - 1] = 1;
    assert_int_equal(fstat((int)big.export.token, &st), 0);
    assert_true(st.st_blocks * 512 <= 3 * 2 * 1024 * 1024); /* three pages, however large pages are */
    ops->heap_destroy(dev, &big);
}

static void wrong_heap_size_is_an_error(void **state)
{
    struct heap none;

    (void)state;
    assert_int_equal(ops->heap_create(dev, 0, &none), EPX_ERR_ARGUMENT);
    assert_int_equal(ops->heap_create(dev, UINT64_MAX, &none), EPX_ERR_ARGUMENT);
    assert_int_equal(ops->heap_create(dev, (uint64_t)1 << 60, &none), EPX_ERR_MEMORY);
    assert_null(none.base);
}

static int open_descriptors(void)
{
    int fd, count = 0;
    struct stat st;

    for (fd = 0; fd < 256; fd++)
        count += fstat(fd, &st) == 0;
    return count;
}

static void heaps_leave_no_descriptor(void **state)
{
    struct heap_export export;
    int before = open_descriptors();
    pid_t owner;
    void *base;

    (void)state;
    make_heap();
    ops->heap_destroy(dev, &heap);
    owner = start_owner(&export);
    assert_int_equal(ops->heap_open(dev, &export, &base), EPX_OK);
    ops->heap_close(dev, &export, base);
    export.opaque[8] ^= 1;
    assert_int_equal(ops->heap_open(dev, &export, &base), EPX_ERR_PEER);
    kill(owner, SIGKILL);
    child_status(owner);
    assert_int_equal(open_descriptors(), before);
}

UNIT_TESTS_WITHIN(set_up, tear_down, heap_is_shared_between_processes, another_file_is_refused,
                  another_user_gets_a_clear_message, heap_size_is_sealed, mapping_outlives_a_killed_owner,
                  own_heap_keeps_its_address, untouched_heap_costs_nothing, wrong_heap_size_is_an_error,
                  heaps_leave_no_descriptor)

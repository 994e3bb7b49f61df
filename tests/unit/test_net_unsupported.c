/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tables of a build without libfabric and without libibverbs. They are compiled here under names of their own, as
 * the library of this build may have the real ones.
 */
#undef EPX_HAVE_OFI
#define EPX_HAVE_OFI 0
#undef EPX_HAVE_VERBS
#define EPX_HAVE_VERBS 0
#define net_ofi_ops without_ofi
#define net_verbs_ops without_verbs
#include "net/unsupported.c"

#include <string.h>

#include "tests/lib/unit.h" /* last: it has a macro fail() */

static void every_slot_is_filled(void **state)
{
    const struct net_ops *const tables[] = {&without_ofi, &without_verbs};

    (void)state;
    for (size_t t = 0; t < 2; t++) {
        void *slots[sizeof(struct net_ops) / sizeof(void *)];

        memcpy(slots, tables[t], sizeof(slots));
        for (size_t i = 0; i < sizeof(slots) / sizeof(slots[0]); i++)
            assert_non_null(slots[i]);
    }
}

static void expect_words(const char *text, const char *library, const char *option)
{
    if (!strstr(text, library) || !strstr(text, option))
        fail_msg("\"%s\" names neither %s nor %s", text, library, option);
}

static void expect_explained(const struct net_ops *ops, const char *library, const char *off, const char *on)
{
    const struct net_options options = {.nranks = 2};
    struct net *net = NULL;
    char text[256] = "";

    assert_int_equal(ops->probe("", text, sizeof(text)), EPX_ERR_UNSUPPORTED);
    expect_words(text, library, off);
    expect_words(text, library, on);
    assert_int_equal(ops->open(&options, &net), EPX_ERR_UNSUPPORTED);
    assert_null(net);
    expect_words(epx_last_error(), library, off);
    expect_words(epx_last_error(), ops->name, on);
}

static void probe_and_open_say_how_to_get_the_network(void **state)
{
    (void)state;
    assert_string_equal(without_ofi.name, "ofi");
    expect_explained(&without_ofi, "libfabric", "-DEPX_OFI=OFF", "-DEPX_OFI=ON");
    assert_string_equal(without_verbs.name, "verbs");
    expect_explained(&without_verbs, "libibverbs", "-DEPX_VERBS=OFF", "-DEPX_VERBS=ON");
}

/* Nothing opens such a network, but a slot that were called all the same refuses. */
static void other_operations_refuse(void **state)
{
    struct net net = {.ops = &without_ofi};
    struct net_address address = {0};
    struct net_memory memory = {0};
    struct net_region region = {0};
    struct net_put put = {0};
    struct net_event event;

    (void)state;
    assert_int_equal(net.ops->caps(&net), 0);
    assert_int_equal(net.ops->address(&net, &address), EPX_ERR_UNSUPPORTED);
    assert_int_equal(net.ops->add_region(&net, &memory, &region), EPX_ERR_UNSUPPORTED);
    assert_int_equal(net.ops->connect(&net, 1, &address, &region), EPX_ERR_UNSUPPORTED);
    assert_int_equal(net.ops->put(&net, &put), -ENOSYS);
    assert_int_equal(net.ops->flush(&net), -ENOSYS);
    assert_int_equal(net.ops->poll(&net, &event, 1), -ENOSYS);
    assert_int_equal(net.ops->wait_fd(&net), -1);
    assert_int_equal(net.ops->arm(&net), -ENOSYS);
    net.ops->close(&net);
}

UNIT_TESTS(every_slot_is_filled, probe_and_open_say_how_to_get_the_network, other_operations_refuse)

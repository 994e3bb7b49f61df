/* SPDX-License-Identifier: Apache-2.0 */
/* Names of networks: what EPX_NET, epx_group_config.net and --net accept, and what they answer to anything else. */
#include <string.h>

#include "net/name.h"
#include "sim/net.h"
#include "util/runtime.h"
#include "tests/lib/unit.h"

static void expect(const char *text, const struct net_ops *ops, const char *provider)
{
    struct net_name name;

    if (net_name_parse(text, &name) != EPX_OK)
        fail_msg("\"%s\": %s", text, epx_last_error());
    assert_ptr_equal(name.ops, ops);
    assert_string_equal(name.provider, provider);
}

static void expect_error(const char *text, const char *word)
{
    struct net_name name;

    if (net_name_parse(text, &name) != EPX_ERR_ARGUMENT)
        fail_msg("\"%s\" is accepted", text);
    if (!strstr(epx_last_error(), text) || !strstr(epx_last_error(), word))
        fail_msg("\"%s\": the message names neither it nor \"%s\": %s", text, word, epx_last_error());
}

static void networks_by_name(void **state)
{
    (void)state;
    expect("verbs", &net_verbs_ops, "");
    expect("ofi", &net_ofi_ops, "");
    expect("null", &net_null_ops, "");
    runtime_swap(&(const struct runtime){.net_guest = &net_sim_ops});
    expect("sim", &net_sim_ops, "");
    expect("null", &net_null_ops, "");
    runtime_swap(NULL);
}

static void tcp_and_shm_are_short_for_libfabric_s(void **state)
{
    (void)state;
    expect("tcp", &net_ofi_ops, "tcp");
    expect("shm", &net_ofi_ops, "shm");
}

static void a_provider_follows_a_colon(void **state)
{
    (void)state;
    expect("ofi:tcp", &net_ofi_ops, "tcp");
    expect("ofi:efa", &net_ofi_ops, "efa");
    expect("ofi:tcp;ofi_rxm", &net_ofi_ops, "tcp;ofi_rxm");
    expect("verbs:mlx5_0:1", &net_verbs_ops, "mlx5_0:1"); /* a card filter has colons of its own */
}

static void the_old_form_has_a_semicolon(void **state)
{
    (void)state;
    expect("ofi;tcp", &net_ofi_ops, "tcp");
    expect("ofi;tcp;ofi_rxm", &net_ofi_ops, "tcp;ofi_rxm");
    expect("verbs;mlx5", &net_verbs_ops, "mlx5");
}

static void unknown_names_list_the_known_ones(void **state)
{
    static const char *const unknown[] = {"pigeons", "of",  "ofix", "tc",    "tcpx", "verb",
                                          "efa",     "Tcp", ":tcp", "nul:x", "sim"};

    (void)state;
    for (size_t i = 0; i < sizeof(unknown) / sizeof(unknown[0]); i++) {
        expect_error(unknown[i], "tcp, shm, ofi, ofi:PROVIDER");
        expect_error(unknown[i], "verbs");
    }
}

static void a_provider_where_none_belongs(void **state)
{
    (void)state;
    expect_error("null:any", "takes no provider");
    expect_error("tcp:shm", "takes no provider");
    expect_error("ofi:", "a libfabric provider");
    expect_error("ofi;", "a libfabric provider");
    expect_error("verbs:", "a card");
}

static void the_environment_decides_where_the_caller_does_not(void **state)
{
    const struct net_ops *ops = NULL;
    const char *provider;

    (void)state;
    setenv("EPX_NET", "tcp", 1);
    assert_int_equal(net_find("", &ops, &provider), EPX_OK);
    assert_ptr_equal(ops, &net_ofi_ops);
    assert_string_equal(provider, "tcp");
    assert_int_equal(net_find("auto", &ops, &provider), EPX_OK);
    assert_string_equal(provider, "tcp");
    assert_int_equal(net_find("null", &ops, &provider), EPX_OK);
    assert_ptr_equal(ops, &net_null_ops);
    assert_string_equal(provider, "");
    setenv("EPX_NET", "pigeons", 1);
    assert_int_equal(net_find("", &ops, &provider), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "pigeons"));
    unsetenv("EPX_NET");
}

UNIT_TESTS(networks_by_name, tcp_and_shm_are_short_for_libfabric_s, a_provider_follows_a_colon,
           the_old_form_has_a_semicolon, unknown_names_list_the_known_ones, a_provider_where_none_belongs,
           the_environment_decides_where_the_caller_does_not)

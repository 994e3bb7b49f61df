/* SPDX-License-Identifier: Apache-2.0 */
/* A deadline that is set later: operations end at it, kernels' waits too. ctest: labels=ranks */
#include <string.h>
#include <time.h>

#include "tests/lib/fixture.h"
#include "tests/lib/slow.h"
#include "tests/lib/unit_net.h"

enum { LONG_MS = 120000, SHORT_MS = 400 };

static int ms_of(epx_group *group)
{
    epx_group_info info = EPX_GROUP_INFO_INIT;

    return epx_group_query(group, &info) == EPX_OK ? info.timeout_ms : -1;
}

/* Rank 1 stays away from one dispatch. */
static int miss_one(struct fixture *s, int ms)
{
    static const char *const words[] = {"rank 1", NULL};
    const time_t start = time(NULL);
    epx_status status = epx_handle_update(s->ll, &s->idx, NULL, NULL);

    if (status == EPX_OK && s->rank == 0) {
        status = epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL);
        if (fixture_expect(s, "epx_stream_sync", fixture_sync(s, status), EPX_ERR_TIMEOUT, words))
            return -1;
        if (time(NULL) - start > 30 + 10 * ms / 1000)
            return fixture_fail(s, "the operation ended long after its deadline");
        status = EPX_OK;
    }
    if (status != EPX_OK)
        return fixture_fail(s, "epx_handle_update failed");
    return fixture_meet(s) || epx_group_error_clear(s->group) != EPX_OK ? fixture_fail(s, "not cleared") : 0;
}

static int set_and_miss(struct fixture *s)
{
    const int ms = slow_ms(SHORT_MS);

    if (ms_of(s->group) != LONG_MS || fixture_ll(s))
        return fixture_fail(s, "not the deadline of the configuration");
    if (epx_group_set_timeout(s->group, ms) != EPX_OK || ms_of(s->group) != ms)
        return fixture_fail(s, "not set");
    if (fixture_ll(s) || fixture_ht(s) || miss_one(s, ms))
        return -1;
    if (epx_group_set_timeout(s->group, LONG_MS) != EPX_OK || fixture_ll(s) || fixture_ht(s))
        return fixture_fail(s, "the group does not work with a longer deadline");
    if (epx_group_set_timeout(s->group, -1) != EPX_ERR_ARGUMENT || epx_group_set_timeout(NULL, 1) != EPX_ERR_ARGUMENT)
        return fixture_fail(s, "a negative number, or no group, was taken");
    if (epx_group_set_timeout(s->group, 0) != EPX_OK || ms_of(s->group) != 100000)
        return fixture_fail(s, "no default");
    return 0;
}

static void operations_end_at_it(void **state)
{
    const epx_group_config config = fixture_config(LONG_MS);

    (void)state;
    assert_int_equal(fixture_run(2, &config, set_and_miss, NULL), 0);
}

static int refused(struct fixture *s)
{
    static const char *const words[] = {"one node", NULL};

    return fixture_expect(s, "epx_group_set_timeout", epx_group_set_timeout(s->group, 5000), EPX_ERR_USAGE, words);
}

static void several_nodes_keep_theirs(void **state)
{
    epx_group_config config = fixture_config(LONG_MS);

    (void)state;
    unit_need_ofi("tcp");
    config.ranks_per_node = 1;
    assert_int_equal(fixture_group_run(2, &config, refused, NULL), 0);
}

UNIT_TESTS(operations_end_at_it, several_nodes_keep_theirs)

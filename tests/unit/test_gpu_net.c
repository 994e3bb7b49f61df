/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a GPU asks of rings, proxies and networks, with the CPU in a GPU's place: a device whose heaps the host is not
 * supposed to reach, and that keeps account of what is asked of it.
 */
#include <string.h>

#include "group/objects.h"
#include "device/arrivals.h"
#include "device/cpu/cpu.h"
#include "tests/lib/fixture.h"
#include "tests/lib/thread_boot.h"
#include "tests/lib/unit.h"
#include "tests/lib/unit_net.h"
#include "proxy/internal.h"
#include "tests/unit/proxy_fixture.h"
#include "util/runtime.h"

enum { BLOCKS = 64 };

/* A device that is all ops: its memory is the CPU's, with the blocks of each kind remembered. */
struct fake {
    struct device base;
    char *host[BLOCKS], *own[BLOCKS];
    size_t host_bytes[BLOCKS], own_bytes[BLOCKS];
    int nhost, nown, freed;
    int flushes, flush_fails;
    const struct proxy_fixture *fixture; /* whose counters must not have moved when the device is flushed */
};

static struct fake *fake_of(struct device *device)
{
    return (struct fake *)device;
}

static epx_status fake_host_alloc(struct device *device, size_t bytes, void **ptr)
{
    struct fake *f = fake_of(device);
    epx_status status = cpu_device_ops.host_alloc(device, bytes, ptr);

    f->host[f->nhost] = *ptr;
    f->host_bytes[f->nhost++] = bytes;
    return status;
}

static epx_status fake_mem_alloc(struct device *device, size_t bytes, void **ptr)
{
    struct fake *f = fake_of(device);
    epx_status status = cpu_device_ops.mem_alloc(device, bytes, ptr);

    f->own[f->nown] = *ptr;
    f->own_bytes[f->nown++] = bytes;
    return status;
}

static void fake_free(struct device *device, void *ptr)
{
    fake_of(device)->freed++;
    cpu_device_ops.mem_free(device, ptr);
}

static epx_status fake_flush(struct device *device)
{
    struct fake *f = fake_of(device);

    f->flushes++;
    if (f->fixture)
        assert_int_equal(counter_at(f->fixture, 2, 0, 0), 0);
    return f->flush_fails ? EPX_ERR_SYSTEM : EPX_OK;
}

static struct device_ops fake_ops;

static void fake_open(struct fake *f)
{
    memset(f, 0, sizeof(*f));
    fake_ops = cpu_device_ops;
    fake_ops.host_alloc = fake_host_alloc;
    fake_ops.mem_alloc = fake_mem_alloc;
    fake_ops.host_free = fake_ops.mem_free = fake_free;
    fake_ops.flush_arrivals = fake_flush;
    f->base.ops = &fake_ops;
}

static int lies_in(const void *at, char *const *blocks, const size_t *bytes, int n)
{
    for (int i = 0; i < n; i++)
        if ((const char *)at >= blocks[i] && (const char *)at < blocks[i] + bytes[i])
            return 1;
    return 0;
}

/* ---- The rule */

static void what_arrives_is_visible_flushed_or_refused_as_the_driver_says(void **state)
{
    static const struct {
        struct gpu_direct direct;
        enum arrival_rule rule;
    } cases[] = {
        {{0, 0, 0}, ARRIVALS_NEVER},     /* no GPUDirect */
        {{0, 200, 3}, ARRIVALS_NEVER},   /* the rest means nothing then */
        {{1, 0, 0}, ARRIVALS_NEVER},     /* neither ordered nor to be flushed */
        {{1, 0, 2}, ARRIVALS_NEVER},     /* flushed by operations on streams alone */
        {{1, 0, 1}, ARRIVALS_FLUSH},     /* by a call of the host */
        {{1, 0, 3}, ARRIVALS_FLUSH},     /* by either */
        {{1, 100, 0}, ARRIVALS_VISIBLE}, /* ordered for the owner */
        {{1, 100, 3}, ARRIVALS_VISIBLE}, /* ordered: no flush although there is one */
        {{1, 200, 1}, ARRIVALS_VISIBLE}, /* ordered for all */
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(arrival_rule(0, &cases[i].direct), cases[i].rule);
        assert_int_equal(arrival_rule(1, &cases[i].direct), ARRIVALS_VISIBLE); /* heaps in host memory */
    }
    assert_int_equal(cpu_device_ops.arrivals(NULL), ARRIVALS_VISIBLE);
}

/* ---- Proxies */

static struct proxy_fixture *open_flushing(void **state, struct fake *f, int flush)
{
    struct proxy_fixture *s = *state;

    fake_open(f);
    s->options.device = &f->base;
    s->options.flush = flush;
    f->fixture = s;
    proxy_fixture_open(s, RANKS, 1);
    return s;
}

static void close_flushing(struct proxy_fixture *s, const struct fake *f)
{
    for (int r = 0; r < RANKS; r++) {
        proxy_close(s->ranks[r].proxies);
        s->ranks[r].proxies = NULL;
    }
    assert_int_equal(f->freed, f->nhost + f->nown);
}

static void the_device_is_flushed_before_an_arrival_is_counted(void **state)
{
    struct fake f;
    struct proxy_fixture *s = open_flushing(state, &f, 1);

    first_arrives(s, 64);
    assert_int_equal(f.flushes, 1); /* and neither for answers nor for nothing */
    expect_nothing_wrong(s);
    close_flushing(s, &f);
}

static void where_arrivals_are_visible_nothing_is_flushed(void **state)
{
    struct fake f;
    struct proxy_fixture *s = open_flushing(state, &f, 0);

    first_arrives(s, 64);
    assert_int_equal(f.flushes, 0);
    close_flushing(s, &f);
}

static void a_flush_that_fails_is_an_error_of_the_group(void **state)
{
    struct fake f;
    struct proxy_fixture *s = open_flushing(state, &f, 1);

    f.flush_fails = 1;
    push(s, 0, 2, 0, 0, 0, 64);
    steps(s, 20);
    assert_int_equal(s->ranks[2].status, EPX_ERR_SYSTEM);
    close_flushing(s, &f);
}

static void rings_lie_where_kernels_and_host_reach_them(void **state)
{
    struct fake f;
    struct proxy_fixture *s = open_flushing(state, &f, 0);
    const struct ring_dev *ring = proxy_ring(s->ranks[0].proxies, 0);

    assert_true(lies_in(ring->slots, f.host, f.host_bytes, f.nhost));
    assert_true(lies_in(&ring->slots[ring->mask], f.host, f.host_bytes, f.nhost));
    assert_true(lies_in(ring->tail, f.host, f.host_bytes, f.nhost));
    assert_true(lies_in(ring->bell, f.host, f.host_bytes, f.nhost));
    assert_true(lies_in(ring->head, f.own, f.own_bytes, f.nown)); /* atomics: not over a bus */
    assert_true(lies_in(ring->tail_seen, f.own, f.own_bytes, f.nown));
    close_flushing(s, &f);
}

/* ---- Where heaps lie */

/* Two tables, as a GPU's device has: heaps in GPU memory, or in the host's. All of it is the CPU. */
static struct device_ops gpu_ops, host_ops;
static int gpu_rule;

static epx_status place(struct device *device, enum heap_place place)
{
    device->ops = place == HEAP_HOST ? &host_ops : &gpu_ops;
    return EPX_OK;
}

static epx_status open_gpu(int index, struct device **device)
{
    epx_status status = cpu_device_ops.open(index, device);

    if (status == EPX_OK)
        (*device)->ops = &gpu_ops;
    return status;
}

static int rule_of(struct device *device)
{
    return device->ops == &host_ops ? ARRIVALS_VISIBLE : gpu_rule;
}

static void make_gpu_device(int rule)
{
    gpu_ops = cpu_device_ops;
    gpu_ops.name = "gpu";
    gpu_ops.kind = EPX_DEVICE_CUDA;
    gpu_ops.caps &= ~(unsigned)DEVICE_HOST_HEAP;
    gpu_ops.open = open_gpu;
    gpu_ops.heap_place = place;
    gpu_ops.arrivals = rule_of;
    host_ops = gpu_ops;
    host_ops.name = "host";
    host_ops.caps |= DEVICE_HOST_HEAP;
    gpu_rule = rule;
    runtime_swap(&(const struct runtime){.device = &gpu_ops});
}

struct placed {
    const char *net, *device; /* expected name, or NULL: creation fails with `status` */
    epx_status status;
    int per_node;
    int split; /* rows between nodes pass through host memory */
    int masks;
};

static int is_placed(struct fixture *s)
{
    const struct placed *want = s->arg;
    const epx_group *group = s->group;

    if (!strcmp(group->device->ops->name, want->device) && group->set.split == want->split &&
        (group->net_memory != NULL) == want->split)
        return 0;
    return fixture_fail(s, "memory of another place");
}

static int create(int rank, int n, epx_bootstrap *boot, void *arg)
{
    const struct placed *want = arg;
    epx_group_config config = fixture_config(20000);

    config.device = EPX_DEVICE_AUTO;
    config.ranks_per_node = want->per_node;
    config.enable_mask = want->masks;
    snprintf(config.net, sizeof(config.net), "%s", want->net);
    if (!want->device)
        return fixture_refused(rank, n, boot, &config, want->status, NULL);
    return fixture_group(rank, n, boot, &config, is_placed, arg);
}

static void expect_place(const char *asked, int rule, struct placed want)
{
    make_gpu_device(rule);
    if (asked)
        setenv("EPX_GPU_HEAP", asked, 1);
    assert_int_equal(run_ranks(2, create, &want), 0);
    unsetenv("EPX_GPU_HEAP");
    runtime_swap(NULL);
}

static void heaps_lie_where_the_network_reaches_them(void **state)
{
    (void)state;
    /* One node: no network is asked. */
    expect_place(NULL, ARRIVALS_NEVER, (struct placed){"null", "gpu", EPX_OK, 0, 0, 0});
    expect_place("host", ARRIVALS_VISIBLE, (struct placed){"null", "host", EPX_OK, 0, 0, 0});
    /* The null network registers anything. */
    expect_place(NULL, ARRIVALS_VISIBLE, (struct placed){"null", "gpu", EPX_OK, 1, 0, 0});
    expect_place("auto", ARRIVALS_FLUSH, (struct placed){"null", "gpu", EPX_OK, 1, 0, 0});
    expect_place("AUTO", ARRIVALS_NEVER, (struct placed){"null", "gpu", EPX_OK, 1, 1, 0});
    expect_place("AUTO", ARRIVALS_NEVER, (struct placed){"null", "host", EPX_OK, 1, 0, 1});
    expect_place("split", ARRIVALS_VISIBLE, (struct placed){"null", "gpu", EPX_OK, 1, 1, 0});
    expect_place("host", ARRIVALS_VISIBLE, (struct placed){"null", "host", EPX_OK, 1, 0, 0});
    expect_place("device", ARRIVALS_FLUSH, (struct placed){"null", "gpu", EPX_OK, 1, 0, 0});
}

static void what_cannot_work_is_refused_with_the_reason(void **state)
{
    (void)state;
    expect_place("device", ARRIVALS_NEVER, (struct placed){"null", NULL, EPX_ERR_UNSUPPORTED, 1, 0, 0});
    expect_place("gpu", ARRIVALS_VISIBLE, (struct placed){"null", NULL, EPX_ERR_ARGUMENT, 1, 0, 0});
}

/* tcp registers no GPU memory: rows pass through the host's, and what was insisted on fails. */
static void libfabric_over_tcp_has_host_memory_for_the_network(void **state)
{
    (void)state;
    unit_need_ofi("tcp");
    expect_place(NULL, ARRIVALS_VISIBLE, (struct placed){"ofi:tcp", "gpu", EPX_OK, 1, 1, 0});
    expect_place("device", ARRIVALS_VISIBLE, (struct placed){"ofi:tcp", NULL, EPX_ERR_UNSUPPORTED, 1, 0, 0});
}

/* ---- Masks in memory that the host does not read */

static int goes_on_without(const struct epx_group *group, int rank)
{
    const struct proxy_options *o = &group->proxies->options;

    return o->goes_on_without(o->context, rank);
}

static int knows_the_lost(struct fixture *s, const char *when)
{
    for (int r = 0; r < s->nranks; r++)
        if (goes_on_without(s->group, r) != (r != s->rank))
            return fixture_fail(s, when);
    return 0;
}

/* Nothing arrives: each rank masks all others. What comes from them later is answered by the proxies. */
static int lose_all_others(struct fixture *s)
{
    int32_t one[3] = {1, 1, 1};

    for (int r = 0; r < s->nranks; r++)
        if (goes_on_without(s->group, r))
            return fixture_fail(s, "nobody is masked yet");
    one[(s->rank + 1) % 3] = 0;
    if (epx_mask_update(s->group, one, NULL) != EPX_OK || epx_stream_sync(s->group, NULL) != EPX_OK ||
        goes_on_without(s->group, (s->rank + 1) % 3))
        return fixture_fail(s, "a rank that was masked by hand");
    one[(s->rank + 1) % 3] = 1;
    fixture_refill(s);
    if (epx_mask_update(s->group, one, NULL) != EPX_OK || epx_handle_update(s->ll, &s->idx, NULL, NULL) != EPX_OK ||
        epx_dispatch(s->ll, &s->in, &s->ll_out, NULL, NULL, NULL) != EPX_OK ||
        epx_stream_sync(s->group, NULL) != EPX_ERR_TIMEOUT)
        return fixture_fail(s, "a dispatch that nobody answers");
    if (knows_the_lost(s, "after the deadline"))
        return -1;
    if (epx_group_error_clear(s->group) != EPX_OK)
        return fixture_fail(s, "epx_group_error_clear");
    return knows_the_lost(s, "after epx_group_error_clear");
}

static void the_host_knows_all_ranks_that_a_deadline_has_masked(void **state)
{
    epx_group_config config = fixture_config(300);

    (void)state;
    make_gpu_device(ARRIVALS_VISIBLE);
    gpu_ops.caps &= ~(unsigned)DEVICE_HOST_ACCESS;
    config.device = EPX_DEVICE_AUTO;
    config.ranks_per_node = 1;
    config.enable_mask = 1;
    snprintf(config.net, sizeof(config.net), "null");
    assert_int_equal(fixture_run(3, &config, lose_all_others, NULL), 0);
    runtime_swap(NULL);
}

UNIT_MAIN(cmocka_unit_test(what_arrives_is_visible_flushed_or_refused_as_the_driver_says),
          TEST(the_device_is_flushed_before_an_arrival_is_counted), TEST(where_arrivals_are_visible_nothing_is_flushed),
          TEST(a_flush_that_fails_is_an_error_of_the_group), TEST(rings_lie_where_kernels_and_host_reach_them),
          cmocka_unit_test(heaps_lie_where_the_network_reaches_them),
          cmocka_unit_test(what_cannot_work_is_refused_with_the_reason),
          cmocka_unit_test(libfabric_over_tcp_has_host_memory_for_the_network),
          cmocka_unit_test(the_host_knows_all_ranks_that_a_deadline_has_masked))

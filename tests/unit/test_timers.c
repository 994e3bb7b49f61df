/* SPDX-License-Identifier: Apache-2.0 */
/* Time stamps of the CPU device: taken in stream order, refused out of range. */
#include <unistd.h>

#include "device/device.h"
#include "tests/lib/unit.h"

static struct device *device;
static struct device_stream *stream;

static int open_device(void **state)
{
    (void)state;
    if (device_open(EPX_DEVICE_CPU, 0, &device) != EPX_OK)
        return -1;
    return device->ops->stream_create(device, &stream) == EPX_OK ? 0 : -1;
}

static int close_device(void **state)
{
    (void)state;
    device->ops->stream_destroy(device, stream);
    device->ops->close(device);
    return 0;
}

static void sleep_5_ms(void *arg)
{
    (void)arg;
    usleep(5000);
}

static void stamps_enclose_the_work_between_them(void **state)
{
    struct device_timers *timers = NULL;
    double us = 0, back = 0;

    (void)state;
    assert_int_equal(device->ops->timers_create(device, 3, &timers), EPX_OK);
    assert_int_equal(device->ops->timers_record(device, timers, 0, stream), EPX_OK);
    assert_int_equal(device->ops->stream_call(device, stream, sleep_5_ms, NULL), EPX_OK);
    assert_int_equal(device->ops->timers_record(device, timers, 2, stream), EPX_OK);
    assert_int_equal(device->ops->stream_sync(device, stream), EPX_OK);
    assert_int_equal(device->ops->timers_elapsed(device, timers, 0, 2, &us), EPX_OK);
    assert_true(us >= 5000);
    assert_int_equal(device->ops->timers_elapsed(device, timers, 2, 0, &back), EPX_OK);
    assert_true(back == -us);
    device->ops->timers_destroy(device, timers);
}

static void stamps_out_of_range_are_refused(void **state)
{
    struct device_timers *timers = NULL;
    double us;

    (void)state;
    assert_int_not_equal(device->ops->timers_create(device, 0, &timers), EPX_OK);
    assert_int_equal(device->ops->timers_create(device, 2, &timers), EPX_OK);
    assert_int_equal(device->ops->timers_record(device, timers, 2, stream), EPX_ERR_ARGUMENT);
    assert_int_equal(device->ops->timers_record(device, timers, -1, stream), EPX_ERR_ARGUMENT);
    assert_int_equal(device->ops->timers_elapsed(device, timers, 0, 2, &us), EPX_ERR_ARGUMENT);
    device->ops->timers_destroy(device, timers);
}

UNIT_MAIN(cmocka_unit_test_setup_teardown(stamps_enclose_the_work_between_them, open_device, close_device),
          cmocka_unit_test_setup_teardown(stamps_out_of_range_are_refused, open_device, close_device))

/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/unit.h"

#undef fail /* cmocka's; here it is EPX's */

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util/env.h"
#include "util/log.h"
#include "util/status.h"

/* ---- Status -------------------------------------------------------------------------------------------------- */

static void every_status_has_a_line_of_its_own(void **state)
{
    (void)state;
    for (int i = EPX_OK; i <= EPX_ERR_INTERNAL; i++) {
        assert_string_not_equal(epx_strerror((epx_status)i), "unknown status");
        for (int j = EPX_OK; j < i; j++)
            assert_string_not_equal(epx_strerror((epx_status)i), epx_strerror((epx_status)j));
    }
    assert_string_equal(epx_strerror((epx_status)(EPX_ERR_INTERNAL + 1)), "unknown status");
    assert_string_equal(epx_strerror((epx_status)-1), "unknown status");
}

static void a_failure_is_remembered(void **state)
{
    (void)state;
    assert_int_equal(fail(EPX_ERR_ARGUMENT, "topk is %d, expected %d to %d", 40, 1, 32), EPX_ERR_ARGUMENT);
    assert_string_equal(epx_last_error(), "topk is 40, expected 1 to 32");
    assert_int_equal(fail(EPX_ERR_PEER, "group: %s", epx_last_error()), EPX_ERR_PEER);
    assert_string_equal(epx_last_error(), "group: topk is 40, expected 1 to 32");
}

static void errno_is_appended_and_kept(void **state)
{
    (void)state;
    errno = ENOENT;
    assert_int_equal(fail_errno(EPX_ERR_SYSTEM, "open %s", "x"), EPX_ERR_SYSTEM);
    assert_int_equal(errno, ENOENT);
    assert_string_equal(epx_last_error(), "open x: No such file or directory");
    errno = EINTR;
    fail(EPX_ERR_SYSTEM, "plain");
    assert_int_equal(errno, EINTR);
}

static void a_long_message_is_cut(void **state)
{
    char text[4000];

    (void)state;
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = 0;
    errno = ENOENT;
    fail_errno(EPX_ERR_SYSTEM, "%s", text);
    assert_in_range(strlen(epx_last_error()), 500, 1100);
}

static void *fail_on_thread(void *context)
{
    (void)context;
    if (epx_last_error()[0])
        return "a new thread starts with a message";
    fail(EPX_ERR_BUSY, "of the other thread");
    return NULL;
}

static void messages_belong_to_their_thread(void **state)
{
    pthread_t thread;
    void *result;

    (void)state;
    fail(EPX_ERR_BUSY, "of this thread");
    assert_int_equal(pthread_create(&thread, NULL, fail_on_thread, NULL), 0);
    pthread_join(thread, &result);
    assert_null(result);
    assert_string_equal(epx_last_error(), "of this thread");
}

static void the_version_is_told(void **state)
{
    int code = 0;

    (void)state;
    assert_int_equal(epx_version(&code), EPX_OK);
    assert_int_equal(code, EPX_VERSION_CODE);
    assert_int_equal(epx_version(NULL), EPX_ERR_ARGUMENT);
}

static void dtypes_have_sizes(void **state)
{
    (void)state;
    assert_int_equal(epx_dtype_size(EPX_BF16), 2);
    assert_int_equal(epx_dtype_size(EPX_FP16), 2);
    assert_int_equal(epx_dtype_size(EPX_FP32), 4);
    assert_int_equal(epx_dtype_size(EPX_FP8_E4M3), 1);
    assert_int_equal(epx_dtype_size(EPX_INT32), 4);
    assert_int_equal(epx_dtype_size(EPX_INT64), 8);
    assert_int_equal(epx_dtype_size(EPX_UINT8), 1);
    assert_int_equal(epx_dtype_size((epx_dtype)0), 0);
    assert_int_equal(epx_dtype_size((epx_dtype)99), 0);
}

/* ---- Environment --------------------------------------------------------------------------------------------- */

/* Warnings come once per variable and process, and the level is read once: such tests run in a child whose stderr
 * comes back here. */
static void stderr_of(void (*body)(void), char *text, size_t bytes)
{
    int ends[2], status;
    size_t used = 0;
    ssize_t got;
    pid_t pid;

    assert_int_equal(pipe(ends), 0);
    pid = fork();
    if (!pid) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        body();
        _exit(0);
    }
    close(ends[1]);
    while (used < bytes - 1 && (got = read(ends[0], text + used, bytes - 1 - used)) > 0)
        used += (size_t)got;
    text[used] = 0;
    close(ends[0]);
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
}

static void numbers_may_have_suffixes(void **state)
{
    static const struct {
        const char *text;
        int64_t value;
    } cases[] = {{"7", 7}, {"3K", 3072}, {"2m", 2 << 20}, {"4G", 4ll << 30}, {" 12", 12}};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        setenv("EPX_ALLOC_BYTES", cases[i].text, 1);
        assert_int_equal(env_int("EPX_ALLOC_BYTES", -1, 0, INT64_MAX), cases[i].value);
    }
    unsetenv("EPX_ALLOC_BYTES");
}

static void read_bad_numbers(void)
{
    static const char *const bad[] = {"x", "7x", "K", "4GG", "99999999999999999999", "9000000000000G", "5", "200"};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        setenv("EPX_NUM_AGENTS", bad[i], 1);
        if (env_int("EPX_NUM_AGENTS", 42, 10, 100) != 42)
            _exit(1);
    }
}

static void bad_numbers_are_ignored_with_one_warning(void **state)
{
    char text[2048];

    (void)state;
    stderr_of(read_bad_numbers, text, sizeof(text));
    assert_string_equal(text, "epx: warn: EPX_NUM_AGENTS is \"x\", expected an integer from 10 to 100: ignored\n");
}

static void aliases_stand_in(void **state)
{
    (void)state;
    setenv("NCCL_SOCKET_IFNAME", "eth", 1);
    assert_string_equal(env_string("EPX_SOCKET_IFNAME"), "eth");
    setenv("UCCL_SOCKET_IFNAME", "ib", 1);
    assert_string_equal(env_string("EPX_SOCKET_IFNAME"), "ib");
    setenv("EPX_SOCKET_IFNAME", "lo", 1);
    assert_string_equal(env_string("EPX_SOCKET_IFNAME"), "lo");
    setenv("EPX_SOCKET_IFNAME", "", 1);
    assert_string_equal(env_string("EPX_SOCKET_IFNAME"), "ib");
    unsetenv("EPX_SOCKET_IFNAME");
    unsetenv("UCCL_SOCKET_IFNAME");
    unsetenv("NCCL_SOCKET_IFNAME");
    assert_null(env_string("EPX_SOCKET_IFNAME"));
}

static void aliases_keep_their_unit(void **state)
{
    (void)state;
    setenv("UCCL_EP_CPU_TIMEOUT_SECS", "30", 1);
    assert_int_equal(env_int("EPX_TIMEOUT_MS", 5, 1, 1000000), 30000);
    setenv("NCCL_EP_TIMEOUT_MS", "700", 1);
    assert_int_equal(env_int("EPX_TIMEOUT_MS", 5, 1, 1000000), 700);
    setenv("EPX_TIMEOUT_MS", "800", 1);
    assert_int_equal(env_int("EPX_TIMEOUT_MS", 5, 1, 1000000), 800);
    unsetenv("EPX_TIMEOUT_MS");
    unsetenv("NCCL_EP_TIMEOUT_MS");
    unsetenv("UCCL_EP_CPU_TIMEOUT_SECS");
    assert_int_equal(env_int("EPX_TIMEOUT_MS", 5, 1, 1000000), 5);
}

static void warn_of_unknown_variables(void)
{
    setenv("EPX_LOGG", "debug", 1);
    setenv("EPX_PROXY_THRAEDS", "2", 1);
    setenv("EPX_XYZZY", "1", 1);
    setenv("EPX_TIMEOUT", "3000", 1);
    setenv("EPX_TIMOUT", "3000", 1);
    setenv("EPX_LOG_LEVEL", "info", 1);
    setenv("EPX_LOG_", "info", 1);
    setenv("EPX_HCA", "mlx5_0", 1);
    setenv("EPX_FOO_BAR", "1", 1);
    setenv("EPX_TEST_SCALE", "1", 1);
    setenv("EPX_NET", "null", 1);
    env_warn_unknown();
    env_warn_unknown(); /* once per process */
}

static void unknown_variables_are_warned_about_once(void **state)
{
    static const char *const lines[] = {
        "epx: warn: EPX_LOGG is set, but EPX reads no such variable: did you mean EPX_LOG?\n",
        "epx: warn: EPX_PROXY_THRAEDS is set, but EPX reads no such variable: did you mean EPX_PROXY_THREADS?\n",
        "epx: warn: EPX_TIMEOUT is set, but EPX reads no such variable: did you mean EPX_TIMEOUT_MS?\n",
        "epx: warn: EPX_TIMOUT is set, but EPX reads no such variable: did you mean EPX_TIMEOUT_MS?\n",
        "epx: warn: EPX_LOG_LEVEL is set, but EPX reads no such variable: did you mean EPX_LOG?\n",
        "epx: warn: EPX_LOG_ is set, but EPX reads no such variable: did you mean EPX_LOG?\n",
        "epx: warn: EPX_HCA is set, but EPX reads no such variable: did you mean EPX_IB_HCA?\n",
        "epx: warn: EPX_FOO_BAR is set, but EPX reads no such variable (epx doctor lists all)\n",
        "epx: warn: EPX_XYZZY is set, but EPX reads no such variable (epx doctor lists all)\n"};
    char text[4096];
    size_t bytes = 0;

    (void)state;
    stderr_of(warn_of_unknown_variables, text, sizeof(text));
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        assert_non_null(strstr(text, lines[i]));
        bytes += strlen(lines[i]);
    }
    assert_int_equal(strlen(text), bytes); /* and nothing else */
}

static FILE *open_page(void)
{
    return fopen(EPX_SOURCE_DIR "/docs/environment.md", "r");
}

/* The aliases as the page writes them: `A`, `B`. */
static void quote_aliases(const char *aliases, char *out, size_t bytes)
{
    size_t used = 0;

    out[0] = 0;
    while (*aliases && used < bytes) {
        int length = (int)strcspn(aliases, ",");
        used += (size_t)snprintf(out + used, bytes - used, "%s`%.*s`", used ? ", " : "", length, aliases);
        aliases += length + (aliases[length] == ',');
    }
}

static void the_page_on_variables_agrees_with_the_table(void **state)
{
    char line[1024], expected[1024], aliases[256];
    int count, at = 0;
    const struct env_entry *table = env_table(&count);
    FILE *page = open_page();

    (void)state;
    assert_non_null(page);
    while (fgets(line, sizeof(line), page)) {
        if (strncmp(line, "| `EPX_", 7)) /* other tables of the page have rows of launchers */
            continue;
        assert_in_range(at, 0, count - 1);
        quote_aliases(table[at].aliases, aliases, sizeof(aliases));
        snprintf(expected, sizeof(expected), "| `%s` | %s | %s | %s |\n", table[at].name, aliases, table[at].fallback,
                 table[at].meaning);
        assert_string_equal(line, expected);
        at++;
    }
    fclose(page);
    assert_int_equal(at, count);
}

/* ---- Log ------------------------------------------------------------------------------------------------------- */

static void log_at_all_levels(void)
{
    errno = EBADF;
    log_set_rank(3);
    log_line(LOG_ERROR, "e %d", 1);
    log_line(LOG_WARN, "w");
    log_set_rank(-1);
    log_line(LOG_INFO, "i");
    log_line(LOG_DEBUG, "d");
    if (errno != EBADF)
        _exit(1);
}

static void lines_up_to_the_level_are_shown(void **state)
{
    char text[1024];

    (void)state;
    unsetenv("EPX_LOG");
    stderr_of(log_at_all_levels, text, sizeof(text));
    assert_string_equal(text, "epx: rank 3: error: e 1\nepx: rank 3: warn: w\n");
    setenv("EPX_LOG", "none", 1);
    stderr_of(log_at_all_levels, text, sizeof(text));
    assert_string_equal(text, "");
    setenv("EPX_LOG", "INFO", 1);
    stderr_of(log_at_all_levels, text, sizeof(text));
    assert_string_equal(text, "epx: rank 3: error: e 1\nepx: rank 3: warn: w\nepx: info: i\n");
    unsetenv("EPX_LOG");
}

static void an_unknown_level_is_said_once(void **state)
{
    char text[1024];

    (void)state;
    setenv("EPX_LOG", "loud", 1);
    stderr_of(log_at_all_levels, text, sizeof(text));
    unsetenv("EPX_LOG");
    assert_string_equal(text,
                        "epx: rank 3: warn: EPX_LOG is \"loud\", expected none, error, warn, info or debug: using "
                        "warn\nepx: rank 3: error: e 1\nepx: rank 3: warn: w\n");
}

/* First those that need a process in which nothing has been logged yet. */
UNIT_TESTS(lines_up_to_the_level_are_shown, an_unknown_level_is_said_once, bad_numbers_are_ignored_with_one_warning,
           unknown_variables_are_warned_about_once, numbers_may_have_suffixes, aliases_stand_in,
           aliases_keep_their_unit, the_page_on_variables_agrees_with_the_table, every_status_has_a_line_of_its_own,
           a_failure_is_remembered, errno_is_appended_and_kept, a_long_message_is_cut, messages_belong_to_their_thread,
           the_version_is_told, dtypes_have_sizes)

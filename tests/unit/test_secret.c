/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The secret of a user without a home that can be written, where another user of the machine has been first: in folders
 * that a mount namespace has of its own.
 */
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "boot/secret.h"
#include "tests/lib/child.h"
#include "tests/lib/unit.h"
#include "epx/epx.h"

enum { OTHER = 65534, REFUSED = 77 };

static const char *const places[] = {"/tmp/epx-0", "/dev/shm/epx-0", "/var/tmp/epx-0"};

/* Empty folders, and no home. */
static void set_up(void)
{
    static const char *const empty[] = {"/run", "/tmp", "/dev/shm", "/var/tmp"};

    if (geteuid() || unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        _exit(REFUSED);
    for (size_t i = 0; i < UNIT_COUNT(empty); i++)
        if (mount("none", empty[i], "tmpfs", 0, NULL))
            _exit(REFUSED);
    setenv("HOME", "/nonexistent", 1);
    unsetenv("EPX_SECRET");
    unsetenv("EPX_SECRET_FILE");
}

enum kind { FOLDER, LINK, FIFO, NEWEST };

static int squat(const char *path, enum kind kind)
{
    const int rc = kind == FOLDER ? mkdir(path, 0755) : kind == LINK ? symlink("/etc", path) : mkfifo(path, 0666);

    return rc ? rc : lchown(path, OTHER, OTHER);
}

static int reads(const char *from)
{
    struct secret secret, again;

    return secret_read(1, &secret) == EPX_OK && !strcmp(secret.from, from) && secret_read(1, &again) == EPX_OK &&
           !memcmp(secret.key, again.key, sizeof(secret.key));
}

static int be_user(enum kind kind)
{
    struct secret secret;

    set_up();
    if (squat(places[0], kind))
        return 2;
    if (!reads("/dev/shm/epx-0/secret"))
        return 3;
    if (rename(places[1], "/dev/shm/mine") || squat(places[1], kind) || squat(places[2], kind))
        return 4;
    if (secret_read(1, &secret) != EPX_ERR_SYSTEM || !strstr(epx_last_error(), "set EPX_SECRET") ||
        !strstr(epx_last_error(), "/tmp/epx-0 belongs to user 65534") ||
        !strstr(epx_last_error(), "/var/tmp/epx-0 belongs to user 65534"))
        return 5;
    return mkdir("/run/user", 0755) || mkdir("/run/user/0", 0700) || !reads("/run/user/0/epx/secret") ? 6 : 0;
}

static void who_is_first_in_tmp_stops_nobody(void **state)
{
    int status = 0;

    (void)state;
    for (int kind = FOLDER; kind < NEWEST; kind++) {
        const pid_t pid = child_fork();

        if (pid == 0) {
            status = be_user((enum kind)kind);
            if (status != 0)
                fprintf(stderr, "kind %d: step %d: %s\n", kind, status, epx_last_error());
            _exit(status);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (WIFEXITED(status) && WEXITSTATUS(status) == REFUSED) {
            print_message("may not mount here\n");
            skip();
        }
        assert_int_equal(status, 0);
    }
}

UNIT_TESTS(who_is_first_in_tmp_stops_nobody)

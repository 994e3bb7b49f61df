/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job that was given no secret takes that of its user: a random one in a file that nobody else can read,
 * ~/.epx/secret, or where there is no home that can be written, in the first folder of a list that is this user's alone
 * or can be made. The list is the same for all ranks: another user who makes one of these folders first moves all of
 * them to the next. Ranks on machines that share home folders find the same one. Several ranks may make the file at
 * once: each writes a file of its own and links it to the name, which only the first can; then all read what is there.
 */
#include "boot/secret.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "boot/auth.h"
#include "util/descriptor.h"
#include "util/env.h"
#include "util/log.h"
#include "util/status.h"

enum { FILE_MAX = 4096, SHORT = 16 };

epx_status secret_make(char text[SECRET_TEXT])
{
    uint8_t bytes[(SECRET_TEXT - 1) / 2];
    epx_status status = crypto_random(bytes, sizeof(bytes));

    for (size_t i = 0; status == EPX_OK && i < sizeof(bytes); i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    return status;
}

/* secret->from is set. */
static epx_status make_key(struct secret *secret, const char *text, size_t bytes)
{
    static const uint8_t label[CRYPTO_KEY] = "EPX: the key of a job";
    const struct crypto_ops *ops = crypto();

    if (!bytes)
        return fail(EPX_ERR_ARGUMENT, "the secret in %s: expected a text, got nothing but white space", secret->from);
    if (bytes < SHORT)
        log_line(LOG_WARN, "%s has %zu characters: others can guess it; expected %d random ones or more", secret->from,
                 bytes, SHORT);
    if (!ops)
        return EPX_ERR_UNSUPPORTED;
    if (ops->hmac(label, text, bytes, secret->key))
        return fail(EPX_ERR_SYSTEM, "%s: the key of %s cannot be computed", ops->name, secret->from);
    return EPX_OK;
}

/* ---- Files ---------------------------------------------------------------------------------------------------- */

static epx_status check_file(const char *path, const struct stat *about)
{
    if (!S_ISREG(about->st_mode) || about->st_size < 1 || about->st_size > FILE_MAX)
        return fail(EPX_ERR_ARGUMENT, "the secret in %s: expected a file of 1 to %d bytes, got %s%lld bytes", path,
                    FILE_MAX, S_ISREG(about->st_mode) ? "" : "something else, of ", (long long)about->st_size);
    if (about->st_uid != geteuid() && about->st_uid != 0)
        return fail(EPX_ERR_ARGUMENT, "the secret in %s belongs to user %u, expected this user (%u) or root", path,
                    (unsigned)about->st_uid, (unsigned)geteuid());
    if (about->st_mode & 077)
        return fail(EPX_ERR_ARGUMENT, "the secret in %s can be read by others (mode %03o): chmod 600 it", path,
                    (unsigned)about->st_mode & 0777);
    return EPX_OK;
}

/* errno ENOENT: there is no such file. */
static epx_status read_file(const char *path, struct secret *secret)
{
    char text[FILE_MAX];
    struct stat about;
    const int fd = fd_own(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK)); /* a FIFO must not block */
    ssize_t got = -1;
    epx_status status;

    if (fd < 0 || fstat(fd, &about))
        status = fail_errno(EPX_ERR_SYSTEM, "the secret in %s cannot be read", path);
    else
        status = check_file(path, &about);
    if (status == EPX_OK && (got = read(fd, text, sizeof(text))) < 1)
        status = fail_errno(EPX_ERR_SYSTEM, "the secret in %s cannot be read", path);
    while (got > 0 && (text[got - 1] == '\n' || text[got - 1] == '\r' || text[got - 1] == ' '))
        got--;
    snprintf(secret->from, sizeof(secret->from), "%.250s", path);
    if (status == EPX_OK)
        status = make_key(secret, text, (size_t)got);
    if (fd >= 0) {
        const int saved = errno;
        close(fd);
        errno = saved;
    }
    return status;
}

/* Writes a new secret and links it to `path`, unless another process was first. */
static int make_file(const char *folder, const char *path)
{
    char name[PATH_MAX], text[SECRET_TEXT];
    int fd, rc;

    if (snprintf(name, sizeof(name), "%s/.new-XXXXXX", folder) >= (int)sizeof(name) || secret_make(text) != EPX_OK)
        return -1;
    fd = fd_own(mkostemp(name, O_CLOEXEC)); /* mode 0600 */
    if (fd < 0)
        return -1;
    rc = write(fd, text, sizeof(text) - 1) == (ssize_t)sizeof(text) - 1 ? 0 : -1;
    if (close(fd) || rc)
        rc = -1;
    else if (link(name, path) && errno != EEXIST)
        rc = -1;
    unlink(name);
    return rc;
}

enum { WHY_BYTES = 400 };

/* A folder of this user's alone; made when it is missing. In /tmp others could have been first. Else -1, and the reason
 * behind what `why` has. */
static int own_folder(const char *folder, char why[WHY_BYTES])
{
    const size_t used = strlen(why);
    char *to = why + used;
    struct stat about;

    if ((mkdir(folder, 0700) && errno != EEXIST) || lstat(folder, &about))
        snprintf(to, WHY_BYTES - used, "; %.100s: %s", folder, strerror(errno));
    else if (about.st_uid != geteuid())
        snprintf(to, WHY_BYTES - used, "; %.100s belongs to user %u", folder, (unsigned)about.st_uid);
    else if (!S_ISDIR(about.st_mode))
        snprintf(to, WHY_BYTES - used, "; %.100s is no folder", folder);
    else if (about.st_mode & 022)
        snprintf(to, WHY_BYTES - used, "; %.100s can be written by others (mode %03o)", folder,
                 (unsigned)about.st_mode & 0777);
    return strlen(why) == used ? 0 : -1;
}

/* 0: `folder` has, or now has, a secret, and *status is what came of reading it. */
static int try_folder(const char *folder, struct secret *secret, epx_status *status, char why[WHY_BYTES])
{
    const size_t used = strlen(why);
    char path[PATH_MAX];
    struct stat about;

    if (own_folder(folder, why))
        return -1;
    if (snprintf(path, sizeof(path), "%s/secret", folder) >= (int)sizeof(path) ||
        (lstat(path, &about) && make_file(folder, path))) {
        snprintf(why + used, WHY_BYTES - used, "; %.100s: %s", folder, strerror(errno));
        return -1;
    }
    *status = read_file(path, secret);
    return 0;
}

static epx_status read_own_file(struct secret *secret)
{
    static const char *const places[] = {"/run/user/%u/epx", "/tmp/epx-%u", "/dev/shm/epx-%u", "/var/tmp/epx-%u"};
    const char *home = getenv("HOME");
    char folder[PATH_MAX], why[WHY_BYTES] = "";
    epx_status status;

    snprintf(folder, sizeof(folder), "%.4000s/.epx", home && home[0] == '/' ? home : "/nonexistent");
    if (!try_folder(folder, secret, &status, why))
        return status;
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        snprintf(folder, sizeof(folder), places[i], (unsigned)geteuid());
        if (!try_folder(folder, secret, &status, why))
            return status;
    }
    return fail(
        EPX_ERR_SYSTEM,
        "this job has no secret, and no folder can keep one: set EPX_SECRET to the same random text on all ranks "
        "(docs/security.md)%s",
        why);
}

/* ---- The order ------------------------------------------------------------------------------------------------ */

epx_status secret_read(int own_file, struct secret *secret)
{
    const char *text = env_string("EPX_SECRET"), *path = env_string("EPX_SECRET_FILE");

    memset(secret, 0, sizeof(*secret));
    if (text && !strcmp(text, "none")) {
        secret->off = 1;
        return EPX_OK;
    }
    if (text) {
        snprintf(secret->from, sizeof(secret->from), "EPX_SECRET");
        return make_key(secret, text, strlen(text));
    }
    if (path)
        return read_file(path, secret);
    if (own_file)
        return read_own_file(secret);
    snprintf(secret->from, sizeof(secret->from), "the caller's all-gather");
    return EPX_OK;
}

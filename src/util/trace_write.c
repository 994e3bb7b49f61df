/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The trace's file: one JSON object,
 *
 *      {"displayTimeUnit":"ns","traceEvents":[
 *      {...}            the header
 *      ,{...}           events of whoever wrote first
 *      ,{...}           ... of whoever came next, over the brackets of the one before
 *      ]}
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdio_ext.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util/clock.h"
#include "util/descriptor.h"
#include "util/log.h"
#include "util/trace_internal.h"

enum { LOCK_MS = 3000, LOCK_PAUSE_NS = 1000000 };

static const char header[] = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n"
                             "{\"name\":\"epx\",\"ph\":\"M\",\"pid\":0,\"tid\":0,\"args\":{\"version\":1}}";
static const char footer[] = "\n]}\n";

struct writer {
    FILE *to;
    off_t begin; /* of what is written now; 0: a file without a header */
    struct trace_buffer *buffer;
};

/* Microseconds, as the format wants them, of rank 0's clock. */
static void write_time(FILE *to, const char *name, uint64_t ns)
{
    const uint64_t aligned = ns - (uint64_t)trace_state.ahead_ns;

    fprintf(to, ",\"%s\":%" PRIu64 ".%03" PRIu64, name, aligned / 1000, aligned % 1000);
}

static void begin_event(const struct writer *w, const struct trace_event *e, const char *phase, uint64_t ns)
{
    fprintf(w->to, ",\n{\"name\":\"%s", e->name);
    if (e->kind == TRACE_COUNTER && e->peer >= 0)
        fprintf(w->to, " %d", e->peer);
    fprintf(w->to, "\",\"cat\":\"%s\",\"ph\":\"%s\",\"pid\":%d,\"tid\":%d", e->category, phase, e->rank,
            w->buffer->number);
    write_time(w->to, "ts", ns);
}

static void write_args(const struct writer *w, const struct trace_event *e)
{
    const char *comma = "";

    fprintf(w->to, ",\"args\":{");
    if (e->of)
        fprintf(w->to, "\"of\":\"%s\"", e->of), comma = ",";
    if (e->peer >= 0)
        fprintf(w->to, "%s\"peer\":%d", comma, e->peer), comma = ",";
    if (e->what)
        fprintf(w->to, "%s\"what\":\"%" PRIx64 "\"", comma, e->what), comma = ",";
    for (int i = 0; i < 2; i++)
        if (e->label[i])
            fprintf(w->to, "%s\"%s\":%" PRIu64, comma, e->label[i], e->value[i]), comma = ",";
    fprintf(w->to, "}}");
}

/* An arrow from a signal to the wait that it ends: both ends have the same number. */
static void write_arrow(const struct writer *w, const struct trace_event *e, const char *phase, uint64_t ns, int from,
                        int to)
{
    const struct trace_event arrow = {.category = "signal", .name = "signal", .rank = e->rank, .peer = -1};

    begin_event(w, &arrow, phase, ns);
    fprintf(w->to, "%s,\"id\":\"%" PRIx64 ".%d.%d\"}", phase[0] == 'f' ? ",\"bp\":\"e\"" : "", e->what, from, to);
}

static void write_signal(const struct writer *w, const struct trace_event *e)
{
    enum { MOST_ARROWS = 32 }; /* more would hide everything else */

    begin_event(w, e, "i", e->begin_ns);
    fprintf(w->to, ",\"s\":\"t\"");
    write_args(w, e);
    for (int to = 0; to < e->ranks && e->ranks <= MOST_ARROWS; to++)
        if (to != e->rank)
            write_arrow(w, e, "s", e->begin_ns, e->rank, to);
}

static void write_span(const struct writer *w, const struct trace_event *e)
{
    begin_event(w, e, "X", e->begin_ns);
    fprintf(w->to, ",\"dur\":%" PRIu64 ".%03" PRIu64, (e->end_ns - e->begin_ns) / 1000,
            (e->end_ns - e->begin_ns) % 1000);
    write_args(w, e);
    if (e->what && e->peer >= 0)
        write_arrow(w, e, "f", e->end_ns, e->peer, e->rank);
}

static void write_put(const struct writer *w, const struct trace_event *e)
{
    static uint64_t puts;
    const uint64_t id = ((uint64_t)getpid() << 32) + puts++; /* and the rank: other machines have this process too */

    begin_event(w, e, "b", e->begin_ns);
    fprintf(w->to, ",\"id\":\"%d.%" PRIx64 "\"", e->rank, id);
    write_args(w, e);
    begin_event(w, e, "e", e->end_ns);
    fprintf(w->to, ",\"id\":\"%d.%" PRIx64 "\"}", e->rank, id);
}

static void write_counter(const struct writer *w, const struct trace_event *e)
{
    begin_event(w, e, "C", e->begin_ns);
    fprintf(w->to, ",\"args\":{\"%s\":%" PRIu64 ",\"%s\":%" PRIu64 "}}", e->label[0], e->value[0], e->label[1],
            e->value[1]);
}

/* Names of the rank and of the thread, before its first event there. */
static void write_names(struct writer *w, const struct trace_event *e)
{
    struct trace_buffer *b = w->buffer;
    const uint64_t bit = (uint64_t)1 << (e->rank & 63);

    if (b->named & bit)
        return;
    b->named |= bit;
    fprintf(w->to,
            ",\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"args\":{\"name\":\"rank %d\"}}"
            ",\n{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"args\":{\"sort_index\":%d}}"
            ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\","
            "\"clock_error_ns\":%" PRIu64 "}}",
            e->rank, e->rank, e->rank, e->rank, e->rank, b->number, b->thread,
            trace_state.error_ns + b->clock_error_ns);
}

/* Of a track's clock, on this process's. */
static uint64_t host_time(const struct trace_buffer *b, uint64_t ns)
{
    int64_t ahead = b->clock_ahead_ns[0];

    if (b->clocks > 1 && b->clock_at_ns[1] > b->clock_at_ns[0])
        ahead += (int64_t)((double)(b->clock_ahead_ns[1] - ahead) * (double)(int64_t)(ns - b->clock_at_ns[0]) /
                           (double)(b->clock_at_ns[1] - b->clock_at_ns[0]));
    return ns - (uint64_t)ahead;
}

static void write_event(void *context, const struct trace_buffer *b, const struct trace_event *event)
{
    struct writer *w = context;
    struct trace_event on_host = *event;
    const struct trace_event *e = &on_host;

    on_host.begin_ns = host_time(b, event->begin_ns);
    on_host.end_ns = host_time(b, event->end_ns);
    write_names(w, e);
    if (e->kind == TRACE_SPAN)
        write_span(w, e);
    else if (e->kind == TRACE_SIGNAL)
        write_signal(w, e);
    else if (e->kind == TRACE_PUT)
        write_put(w, e);
    else
        write_counter(w, e);
}

/* Waits for the processes before this one as long as the file grows: one that has the lock may be stopped. 0, or -1
 * with errno set. */
static int lock_file(int fd)
{
    const struct timespec pause = {.tv_nsec = LOCK_PAUSE_NS};
    uint64_t deadline = clock_ns() + (uint64_t)LOCK_MS * 1000000;
    struct stat st = {.st_size = 0};

    while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        const off_t before = st.st_size;

        if ((errno != EWOULDBLOCK && errno != EINTR) || fstat(fd, &st) != 0)
            return -1;
        if (st.st_size != before)
            deadline = clock_ns() + (uint64_t)LOCK_MS * 1000000;
        if (clock_ns() >= deadline) {
            errno = EWOULDBLOCK;
            return -1;
        }
        nanosleep(&pause, NULL);
    }
    return 0;
}

/* The file at the place where events go, locked; -1 with errno set. */
static int open_file(struct writer *w)
{
    const int fd = fd_own(open(trace_state.path, O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    struct stat st;

    w->to = fd >= 0 ? fdopen(fd, "r+") : NULL;
    w->begin = 0;
    if (!w->to || lock_file(fd) || fstat(fd, &st) != 0)
        goto failed;
    if (st.st_size > (off_t)sizeof(header) &&
        (st.st_mtim.tv_sec > trace_state.started.tv_sec ||
         (st.st_mtim.tv_sec == trace_state.started.tv_sec && st.st_mtim.tv_nsec >= trace_state.started.tv_nsec))) {
        w->begin = st.st_size - (off_t)strlen(footer);
        if (fseeko(w->to, w->begin, SEEK_SET) == 0)
            return 0;
        goto failed;
    }
    if (ftruncate(fd, 0) != 0)
        goto failed;
    fputs(header, w->to);
    return 0;
failed:
    if (w->to)
        fclose(w->to);
    else if (fd >= 0)
        close(fd);
    return -1;
}

/* All events that are new. */
static int write_events(struct writer *w)
{
    for (struct trace_buffer *b = trace_state.first; b; b = b->next) {
        b->tried = b->written;
        b->named_before = b->named;
        w->buffer = b;
        b->written = trace_each(b, b->written, write_event, w);
    }
    fputs(footer, w->to);
    return fflush(w->to) != 0 || ferror(w->to) ? -1 : 0;
}

/* The disk is full: the file ends as it did before, and the events are new again. */
static void take_back(const struct writer *w)
{
    const int fd = fileno(w->to);

    for (struct trace_buffer *b = trace_state.first; b; b = b->next) {
        b->written = b->tried;
        b->named = b->named_before;
    }
    if (ftruncate(fd, w->begin) == 0 && w->begin && pwrite(fd, footer, strlen(footer), w->begin) < 0)
        (void)!ftruncate(fd, 0);
}

/* 0, or an errno value. */
static int write_file(void)
{
    struct writer w;
    int error = 0;

    if (open_file(&w))
        return errno;
    if (write_events(&w)) {
        error = errno;
        __fpurge(w.to);
        take_back(&w);
    }
    fclose(w.to); /* which gives the lock back */
    return error;
}

/* A file that becomes larger than its limit costs the process its life (SIGXFSZ), not the call its success. */
static int write_within_limit(void)
{
    static const struct timespec now;
    sigset_t xfsz, before, pending;
    int error;

    sigemptyset(&xfsz);
    sigaddset(&xfsz, SIGXFSZ);
    sigpending(&pending);
    pthread_sigmask(SIG_BLOCK, &xfsz, &before);
    error = write_file();
    if (error == EFBIG && !sigismember(&pending, SIGXFSZ))
        sigtimedwait(&xfsz, NULL, &now);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

static void warn_lost(void)
{
    const uint64_t lost = __atomic_exchange_n(&trace_state.lost, 0, __ATOMIC_RELAXED);

    if (lost)
        log_line(LOG_WARN, "EPX_TRACE: %" PRIu64 " events did not fit into %d MB of memory", lost,
                 (int)(TRACE_MOST_CHUNKS * sizeof(struct trace_chunk) >> 20));
}

void trace_flush(void)
{
    int error;

    if (!trace_state.path || trace_state.pid != getpid())
        return;
    pthread_mutex_lock(&trace_state.lock);
    error = write_within_limit();
    if (error && !trace_state.warned)
        log_line(LOG_WARN, "EPX_TRACE: cannot write '%s': %s", trace_state.path,
                 error == EWOULDBLOCK ? "another process keeps it locked" : strerror(error));
    trace_state.warned |= error != 0;
    pthread_mutex_unlock(&trace_state.lock);
    warn_lost();
}

/* Programs need not destroy their groups. */
__attribute__((destructor)) static void flush_at_exit(void)
{
    trace_flush();
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starts ranks here and sees them to their end. The life of a launch:
 *
 *   RUNNING --a rank fails, a signal comes, or time is up--> GRACE --grace over--> TERM --a second--> KILL
 *
 * In GRACE the other ranks may still end by themselves, with messages of their own; TERM and KILL are the signals sent
 * to those that have not. A launch is over when all ranks have been reaped, whatever the state. Each rank has a process
 * group of its own, so that what it started is ended with it, and so that the terminal's interrupt comes to us alone
 * and is passed on once. Should we be killed ourselves, the system kills the ranks.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "boot/launcher.h"
#include "boot/secret.h"
#include "commands.h"
#include "output.h"
#include "progress.h"
#include "util/clock.h"

enum { KILL_AFTER_MS = 1000 };

enum state { RUNNING, GRACE, TERM, KILL };

struct rank {
    pid_t pid; /* 0 = not started, or reaped */
    struct output out, err;
};

struct launch {
    const struct launch_options *options;
    const char *title;
    struct rank *ranks;
    struct pollfd *polls;
    int alive;
    int code; /* of the first failure */
    enum state state;
    uint64_t next_state_at; /* 0 = never */
    uint64_t time_up_at;    /* 0 = never */
    uint64_t started_at;
    int signals;   /* signalfd */
    int forwarded; /* the last signal that was passed on to the ranks; 0 = none */
    sigset_t old_mask;
    pid_t self;
    int port;
    char job[20];
    char secret[SECRET_TEXT]; /* "" = the user has set one */
};

/* ---- The environment of ranks -------------------------------------------------------------------------------- */

static int free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    socklen_t length = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int port = -1;

    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0)
        return -1;
    if (!bind(fd, (struct sockaddr *)&at, sizeof(at)) && !getsockname(fd, (struct sockaddr *)&at, &length))
        port = ntohs(at.sin_port);
    close(fd);
    return port;
}

static void name_job(char job[20])
{
    uint64_t number;

    if (getrandom(&number, sizeof(number), 0) != sizeof(number))
        number = clock_ns() ^ ((uint64_t)getpid() << 32);
    snprintf(job, 20, "%016llx", (unsigned long long)number);
}

/* One of its own for every run. EPX_SECRET in an environment can be read by its user alone. */
static void make_secret(char secret[SECRET_TEXT])
{
    secret[0] = 0;
    if (!getenv("EPX_SECRET") && !getenv("EPX_SECRET_FILE") && secret_make(secret) != EPX_OK)
        secret[0] = 0;
}

static void set_int(const char *name, int value)
{
    char text[16];

    snprintf(text, sizeof(text), "%d", value);
    setenv(name, text, 1);
}

static void set_environment(const struct launch *launch, int rank)
{
    launcher_clear_environment(); /* `epx run` inside mpirun or srun */
    set_int("RANK", rank);
    set_int("LOCAL_RANK", rank);
    set_int("WORLD_SIZE", launch->options->nranks);
    set_int("LOCAL_WORLD_SIZE", launch->options->nranks);
    set_int("MASTER_PORT", launch->port);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("EPX_JOB_ID", launch->job, 1);
    if (launch->secret[0])
        setenv("EPX_SECRET", launch->secret, 1);
    if (!launch->options->port) /* it was free a moment ago */
        setenv("EPX_MASTER_PORTS", "17", 0);
}

/* ---- Starting one rank --------------------------------------------------------------------------------------- */

/* Input cannot be shared by several ranks, and a process group in the background may not read the terminal. */
static void close_input(int rank)
{
    int null;

    if (rank == 0 && !isatty(STDIN_FILENO))
        return;
    null = open("/dev/null", O_RDONLY);
    if (null > STDIN_FILENO) {
        dup2(null, STDIN_FILENO);
        close(null);
    }
}

/* In the child. Comes back only when the program cannot be started, with errno. */
static void become_rank(const struct launch *launch, int rank, int out, int err)
{
    char *const *argv = launch->options->argv;

    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launch->self)
        _exit(1); /* our parent ended before the line above could tell us */
    sigprocmask(SIG_SETMASK, &launch->old_mask, NULL);
    close_input(rank);
    if (out >= 0)
        dup2(out, STDOUT_FILENO);
    if (err >= 0)
        dup2(err, STDERR_FILENO);
    set_environment(launch, rank);
    if (launch->options->self)
        execv("/proc/self/exe", argv);
    else
        execvp(argv[0], argv);
}

static int open_outputs(struct launch *launch, int rank, int *out, int *err)
{
    const struct launch_options *options = launch->options;
    struct rank *it = &launch->ranks[rank];

    *out = *err = -1;
    it->out.to = STDOUT_FILENO;
    it->err.to = STDERR_FILENO;
    if (options->tag) {
        snprintf(it->out.tag, sizeof(it->out.tag), "[%d] ", rank);
        snprintf(it->err.tag, sizeof(it->err.tag), "[%d] ", rank);
    }
    if (rank == 0 && options->rank0_line) {
        it->out.line = options->rank0_line;
        it->out.context = options->context;
    }
    if ((options->tag || it->out.line) && output_open(&it->out, out))
        return -1;
    return options->tag ? output_open(&it->err, err) : 0;
}

/* The pipe closes by itself at exec: what comes through it is the errno of one that failed. */
static int start_error(int pipe_end)
{
    int error = 0;
    ssize_t got;

    do
        got = read(pipe_end, &error, sizeof(error));
    while (got < 0 && errno == EINTR);
    return got == (ssize_t)sizeof(error) ? error : 0;
}

static pid_t fork_rank(struct launch *launch, int rank, int out, int err, int report)
{
    pid_t pid = fork();

    if (pid == 0) {
        become_rank(launch, rank, out, err);
        int error = errno;
        if (write(report, &error, sizeof(error)) < 0)
            _exit(126);
        _exit(error == ENOENT ? 127 : 126);
    }
    return pid;
}

static void close_if_open(int fd)
{
    if (fd >= 0)
        close(fd);
}

/* 0, or the code with which the launch fails. */
static int start_rank(struct launch *launch, int rank)
{
    const char *program = launch->options->self ? launch->title : launch->options->argv[0];
    int report[2] = {-1, -1}, out = -1, err = -1, error = 0;
    pid_t pid = -1;

    if (!open_outputs(launch, rank, &out, &err) && !pipe2(report, O_CLOEXEC))
        pid = fork_rank(launch, rank, out, err, report[1]);
    if (pid < 0)
        error = errno;
    close_if_open(out);
    close_if_open(err);
    close_if_open(report[1]);
    if (pid > 0) {
        launch->ranks[rank].pid = pid;
        launch->alive++;
        setpgid(pid, pid); /* also here, so that a signal sent at once finds the group */
        error = start_error(report[0]);
    }
    close_if_open(report[0]);
    if (!error)
        return 0;
    fprintf(stderr, "%s: cannot start %s as rank %d: %s\n", launch->title, program, rank, strerror(error));
    return error == ENOENT ? 127 : 126;
}

/* ---- Ends ---------------------------------------------------------------------------------------------------- */

static const char *signal_name(int number)
{
    static const struct {
        int number;
        const char *name;
    } names[] = {{SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},   {SIGQUIT, "SIGQUIT"}, {SIGILL, "SIGILL"},
                 {SIGTRAP, "SIGTRAP"}, {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},
                 {SIGKILL, "SIGKILL"}, {SIGUSR1, "SIGUSR1"}, {SIGSEGV, "SIGSEGV"}, {SIGUSR2, "SIGUSR2"},
                 {SIGPIPE, "SIGPIPE"}, {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"}, {SIGXCPU, "SIGXCPU"},
                 {SIGSYS, "SIGSYS"}};
    static char text[24];

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (names[i].number == number)
            return names[i].name;
    snprintf(text, sizeof(text), "signal %d", number);
    return text;
}

static void signal_ranks(const struct launch *launch, int number)
{
    for (int i = 0; i < launch->options->nranks; i++)
        if (launch->ranks[i].pid)
            kill(-launch->ranks[i].pid, number);
}

static int grace_ms(const struct launch *launch)
{
    int grace = launch->options->grace_ms;

    return grace ? (grace > 0 ? grace : 0) : LAUNCH_GRACE_MS;
}

static void begin_grace(struct launch *launch)
{
    if (launch->state != RUNNING)
        return;
    launch->state = GRACE;
    launch->next_state_at = clock_ns() + (uint64_t)grace_ms(launch) * 1000000u;
}

static void count_alive(const struct launch *launch, char *text, size_t bytes)
{
    size_t used = 0;

    text[0] = 0;
    for (int i = 0; i < launch->options->nranks && used + 8 < bytes; i++)
        if (launch->ranks[i].pid)
            used += (size_t)snprintf(text + used, bytes - used, " %d", i);
}

static void advance_state(struct launch *launch)
{
    char alive[128];

    if (launch->state == KILL || !launch->next_state_at || clock_ns() < launch->next_state_at)
        return;
    launch->state++;
    launch->next_state_at = launch->state == TERM ? clock_ns() + KILL_AFTER_MS * 1000000u : 0;
    if (launch->state == TERM && launch->alive) {
        count_alive(launch, alive, sizeof(alive));
        progress_end();
        fprintf(stderr, "%s: ending rank%s%s, still running\n", launch->title, launch->alive > 1 ? "s" : "", alive);
    }
    signal_ranks(launch, launch->state == TERM ? SIGTERM : SIGKILL);
}

static void check_time(struct launch *launch)
{
    if (!launch->time_up_at || launch->state != RUNNING || clock_ns() < launch->time_up_at)
        return;
    progress_end();
    fprintf(stderr, "%s: not finished after %d ms\n", launch->title, launch->options->timeout_ms);
    launch->code = LAUNCH_TIMED_OUT;
    begin_grace(launch);
    launch->next_state_at = clock_ns(); /* they had their time */
}

/* Only the first failure is told: the others mostly follow from it. */
static void record_end(struct launch *launch, int rank, int status)
{
    int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);

    if (!code)
        return;
    if (!launch->code) {
        launch->code = code;
        progress_end();
        if (launch->forwarded && WIFSIGNALED(status) && WTERMSIG(status) == launch->forwarded)
            ; /* whoever sent us the signal knows */
        else if (WIFSIGNALED(status))
            fprintf(stderr, "%s: rank %d was ended by %s (%s)\n", launch->title, rank, signal_name(WTERMSIG(status)),
                    strsignal(WTERMSIG(status)));
        else
            fprintf(stderr, "%s: rank %d failed with exit code %d\n", launch->title, rank, code);
    }
    begin_grace(launch);
}

static void reap(struct launch *launch)
{
    for (int i = 0; i < launch->options->nranks; i++) {
        struct rank *rank = &launch->ranks[i];
        int status;
        if (!rank->pid || waitpid(rank->pid, &status, WNOHANG) != rank->pid)
            continue;
        rank->pid = 0;
        launch->alive--;
        /* Print the rest of its output before the message about its end. */
        output_pump(&rank->out);
        output_pump(&rank->err);
        record_end(launch, i, status);
    }
}

static void take_signals(struct launch *launch)
{
    struct signalfd_siginfo info;

    while (read(launch->signals, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        int number = (int)info.ssi_signo;
        if (number == SIGCHLD)
            continue; /* reap() looks at all anyway */
        /* Who asks twice does not want to wait. */
        launch->forwarded = launch->state == RUNNING ? number : SIGKILL;
        signal_ranks(launch, launch->forwarded);
        begin_grace(launch);
    }
}

/* ---- The whole ----------------------------------------------------------------------------------------------- */

static int wait_ms(const struct launch *launch)
{
    uint64_t now = clock_ns(), until = 0;

    if (launch->state == RUNNING)
        until = launch->time_up_at;
    else if (launch->state != KILL)
        until = launch->next_state_at;
    if (!until)
        return 1000;
    if (until <= now)
        return 0;
    return until - now < 1000000000u ? (int)((until - now) / 1000000u) + 1 : 1000;
}

static void pump_all(struct launch *launch)
{
    for (int i = 0; i < launch->options->nranks; i++) {
        output_pump(&launch->ranks[i].out);
        output_pump(&launch->ranks[i].err);
    }
}

static void wait_for_news(struct launch *launch, int timeout_ms)
{
    nfds_t count = 0;

    launch->polls[count++] = (struct pollfd){.fd = launch->signals, .events = POLLIN};
    for (int i = 0; i < launch->options->nranks; i++) {
        launch->polls[count++] = (struct pollfd){.fd = launch->ranks[i].out.from, .events = POLLIN};
        launch->polls[count++] = (struct pollfd){.fd = launch->ranks[i].err.from, .events = POLLIN};
    }
    poll(launch->polls, count, timeout_ms);
}

/* A program that a rank left behind may hold its output open for ever: after the ranks, only what is there counts. */
static void close_outputs(struct launch *launch)
{
    pump_all(launch);
    for (int i = 0; i < launch->options->nranks; i++) {
        output_close(&launch->ranks[i].out);
        output_close(&launch->ranks[i].err);
    }
}

/* Only where all output passes through us: a line of progress would end up between the lines of the ranks. */
static void show_progress(const struct launch *launch)
{
    if (launch->options->tag && !launch->options->rank0_line)
        progress_show(launch->title, -1, "%d of %d ranks running, %.0f s", launch->alive, launch->options->nranks,
                      (double)(clock_ns() - launch->started_at) / 1e9);
}

static void supervise(struct launch *launch)
{
    while (launch->alive) {
        show_progress(launch);
        wait_for_news(launch, wait_ms(launch));
        take_signals(launch);
        pump_all(launch);
        reap(launch);
        check_time(launch);
        advance_state(launch);
    }
    progress_end();
    close_outputs(launch);
}

static int open_signals(struct launch *launch)
{
    sigset_t mask;

    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigaddset(&mask, SIGINT);
    sigaddset(&mask, SIGTERM);
    sigaddset(&mask, SIGHUP);
    if (sigprocmask(SIG_BLOCK, &mask, &launch->old_mask))
        return -1;
    launch->signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    if (launch->signals >= 0)
        return 0;
    sigprocmask(SIG_SETMASK, &launch->old_mask, NULL);
    return -1;
}

static int check_options(const struct launch_options *options, const char *title)
{
    if (options->nranks >= 1 && options->nranks <= LAUNCH_MAX_RANKS && options->argv && options->argv[0])
        return 0;
    fprintf(stderr, "%s: %d ranks of %s were asked for, expected a program and 1 to %d ranks\n", title, options->nranks,
            options->argv && options->argv[0] ? options->argv[0] : "no program", LAUNCH_MAX_RANKS);
    return -1;
}

static void start_all(struct launch *launch)
{
    for (int i = 0; i < launch->options->nranks && !launch->code; i++)
        launch->code = start_rank(launch, i);
    if (launch->code) {
        begin_grace(launch);
        launch->next_state_at = clock_ns(); /* the ranks that have started would only wait for the others */
        launch->state = TERM;
    }
}

int launch_ranks(const struct launch_options *options)
{
    struct launch launch = {.options = options, .title = options->title ? options->title : "epx", .self = getpid()};

    if (check_options(options, launch.title))
        return 2;
    launch.port = options->port ? options->port : free_port();
    launch.ranks = calloc((size_t)options->nranks, sizeof(*launch.ranks));
    launch.polls = calloc((size_t)options->nranks * 2 + 1, sizeof(*launch.polls));
    if (!launch.ranks || !launch.polls || launch.port < 0 || open_signals(&launch)) {
        fprintf(stderr, "%s: cannot prepare %d ranks: %s\n", launch.title, options->nranks, strerror(errno));
        launch.code = 1;
        goto free_all;
    }
    for (int i = 0; i < options->nranks; i++)
        launch.ranks[i].out.from = launch.ranks[i].err.from = -1;
    if (options->timeout_ms > 0)
        launch.time_up_at = clock_ns() + (uint64_t)options->timeout_ms * 1000000u;
    launch.started_at = clock_ns();
    name_job(launch.job);
    make_secret(launch.secret);
    fflush(NULL); /* or children would write what we have buffered once more */
    start_all(&launch);
    supervise(&launch);
    close(launch.signals);
    sigprocmask(SIG_SETMASK, &launch.old_mask, NULL);

free_all:
    free(launch.polls);
    free(launch.ranks);
    return launch.code;
}

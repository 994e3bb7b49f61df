/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "top.h"

#define KERNEL_TEXT(name, text) [KERNEL_##name] = text,
static const char *const kernels[WATCH_KERNELS] = {KERNELS(KERNEL_TEXT)};

#define PHASE_TEXT(phase, maskable, text) [PHASE_##phase] = text,
#define SIGNAL_TEXT(kind, operation, counts, flow, owed, maskable, text) [PHASE_##kind] = text,
static const char *const phases[PHASE_COUNT] = {OTHER_PHASES(PHASE_TEXT) SIGNALS(SIGNAL_TEXT)};

const char *top_kernel_name(uint32_t id)
{
    return id < WATCH_KERNELS && kernels[id] ? kernels[id] : "?";
}

static const char *phase_text(int phase)
{
    return phase >= 0 && phase < PHASE_COUNT ? phases[phase] : "?";
}

const char *top_state_text(char state)
{
    return strchr("Tt", state) ? "stopped" : strchr("ZX", state) ? "gone" : state == 'R' ? "running" : "asleep";
}

static double seconds_since(const struct top *top, uint64_t ns)
{
    return ns && top->now_ns > ns ? (double)(top->now_ns - ns) / 1e9 : 0;
}

static double per_second(const struct top *top, uint64_t before, uint64_t now)
{
    return now > before ? (double)(now - before) * 1e9 / (double)(top->now_ns - top->before_ns) : 0;
}

static double operations_per_second(const struct top *top, const struct top_page *p)
{
    double sum = 0;

    for (int k = 0; k < WATCH_KERNELS; k++)
        sum += per_second(top, p->before[k], p->page->count[k]);
    return sum;
}

int top_group_end(const struct top *top, int first)
{
    int end = first;

    while (end < top->count && top->pages[end].page->group == top->pages[first].page->group)
        end++;
    return end;
}

struct call_name {
    char text[sizeof(((struct watch *)0)->function)];
};

/* The name of the last function, as far as it is one. A copy: another process writes it, perhaps just now, perhaps of
 * another build, and printf() looks at a string twice. */
static struct call_name call_name(const struct watch *w)
{
    struct call_name name = {{0}};

    for (size_t i = 0; i + 1 < sizeof(name.text); i++) {
        const char c = *(const volatile char *)&w->function[i];

        if (!isalnum((unsigned char)c) && c != '_')
            break;
        name.text[i] = c;
    }
    return name;
}

/* ---- Text */

static void print_rank(const struct top *top, const struct top_page *p)
{
    const struct watch *w = p->page;
    const struct watch_wait *wait = top_longest_wait(w);
    const uint64_t running_ns = w->running_ns;

    printf("  %4d %7d %-8s %-12s %9.0f %9.1f", w->rank, w->pid, top_state_text(p->state),
           running_ns ? top_kernel_name(w->running) : "-", operations_per_second(top, p),
           per_second(top, p->bytes_before, top_bytes(w)) / 1e6);
    if (wait && wait->phase == PHASE_NONE)
        printf("  rank %d for %.1f s or longer (call %llu)", wait->peer, seconds_since(top, wait->since_ns),
               (unsigned long long)w->calls);
    else if (wait && wait->peer >= 0)
        printf("  rank %d for %.1f s (%s)", wait->peer, seconds_since(top, wait->since_ns), phase_text(wait->phase));
    else if (wait)
        printf("  %s for %.1f s (%s)", w->nnodes > 1 ? "ranks of other nodes" : "several ranks",
               seconds_since(top, wait->since_ns), phase_text(wait->phase));
    else if (top_kernels_are_silent(w) && w->inside_ns)
        printf("  (in %s for %.1f s, call %llu)", call_name(w).text, seconds_since(top, w->inside_ns),
               (unsigned long long)w->calls);
    else if (top_kernels_are_silent(w))
        printf("  (behind %s, call %llu)", call_name(w).text, (unsigned long long)w->calls);
    else
        printf("  -");
    printf("\n");
}

static void print_operations(const struct top *top, int first, int end)
{
    for (int k = 0; k < WATCH_KERNELS; k++) {
        double p50 = 0, p99 = 0, rate = 0;
        uint64_t count = 0;

        for (int i = first; i < end; i++) {
            const struct watch *w = top->pages[i].page;
            const double mine = top_percentile_us(w, k, 99);

            count += w->count[k];
            rate += per_second(top, top->pages[i].before[k], w->count[k]) / (end - first);
            p50 = top_percentile_us(w, k, 50) > p50 ? top_percentile_us(w, k, 50) : p50;
            p99 = mine > p99 ? mine : p99;
        }
        if (count > 0 && p50 <= 0)
            printf("  %-12s %9.0f/s\n", top_kernel_name((uint32_t)k), rate);
        else if (count > 0)
            printf("  %-12s %9.0f/s  p50 %9.0f us  p99 %9.0f us  (slowest rank, since %s)\n",
                   top_kernel_name((uint32_t)k), rate, p50, p99,
                   top_kernels_are_silent(top->pages[first].page) ? "epx top looks" : "the group was made");
    }
}

static void print_net(const struct watch *w)
{
    for (int r = 0; r < w->nranks; r++) {
        const struct watch_window *n = &watch_windows(w)[r];

        if (n->is_used && (n->bytes > 0 || n->pending > 0))
            printf("  window       rank %d to %d: %.1f of %.1f KB and %u of %u puts in flight, %u wait\n", w->rank, r,
                   (double)n->bytes / 1e3, (double)n->bytes_limit / 1e3, n->messages, n->messages_limit, n->pending);
    }
}

/* One line for each rank that is masked. */
static void print_masks(const struct top *top, int first, int end)
{
    for (int r = 0; r < top->pages[first].page->nranks; r++) {
        int by = 0, others = 0, one = -1;

        for (int i = first; i < end; i++) {
            const struct watch *w = top->pages[i].page;

            others += w->rank != r;
            by += !watch_mask(w)[r];
            one = watch_mask(w)[r] ? one : w->rank;
        }
        if (by == 1 && others > 1)
            printf("  masked       rank %d, by rank %d\n", r, one);
        else if (by > 0)
            printf("  masked       rank %d, by %d of the %d other ranks here\n", r, by, others);
    }
}

static void print_verdict(const struct top *top, int first, int end)
{
    int at;
    const int culprit = top_culprit(top, first, end, &at);
    const struct watch *w = top->pages[at >= 0 ? at : first].page;
    char what[96];
    double longest = 0;

    for (int i = first; i < end; i++) {
        const struct watch_wait *wait = top_longest_wait(top->pages[i].page);
        const double s = wait ? seconds_since(top, wait->since_ns) : 0;

        longest = s > longest ? s : longest;
    }
    if (culprit < 0 || (longest < 0.5 && !top_kernels_are_silent(w)))
        return;
    if (at >= 0)
        snprintf(what, sizeof(what), "process %d is %s", w->pid, top_state_text(top->pages[at].state));
    else
        snprintf(what, sizeof(what), "%s",
                 w->nnodes > 1 ? "it has ended, or is on another machine" : "it has ended, or has EPX_TOP=0");
    if (longest > 0)
        printf("  HANGS?       others wait for rank %d (%s), up to %.1f s; the deadline is %.1f s\n", culprit, what,
               longest, w->timeout_ms / 1e3);
    else
        printf("  HANGS?       rank %d cannot go on (%s); the deadline of the others is %.1f s\n", culprit, what,
               w->timeout_ms / 1e3);
}

static void print_group(const struct top *top, int first, int end)
{
    const struct watch *w = top->pages[first].page;

    printf("group %016llx: %d of %d ranks here, %d node%s, %s, for %.0f s\n", (unsigned long long)w->group, end - first,
           w->nranks, w->nnodes, w->nnodes == 1 ? "" : "s", w->device, seconds_since(top, w->created_ns));
    print_verdict(top, first, end);
    print_operations(top, first, end);
    printf("  %4s %7s %-8s %-12s %9s %9s  %s\n", "rank", "process", "state", "runs", "op/s", "MB/s", "waits for");
    for (int i = first; i < end; i++)
        print_rank(top, &top->pages[i]);
    for (int i = first; i < end; i++)
        print_net(top->pages[i].page);
    print_masks(top, first, end);
    printf("\n");
}

void top_print(const struct top *top)
{
    if (top->count == 0)
        printf("epx top: no group of this user runs on this machine\n");
    for (int first = 0; first < top->count; first = top_group_end(top, first))
        print_group(top, first, top_group_end(top, first));
}

/* ---- JSON */

static void json_operations(const struct top *top, const struct top_page *p)
{
    const char *comma = "";

    printf(",\"operations\":{");
    for (int k = 0; k < WATCH_KERNELS; k++) {
        if (!p->page->count[k])
            continue;
        printf("%s\"%s\":{\"count\":%llu,\"per_second\":%.1f", comma, top_kernel_name((uint32_t)k),
               (unsigned long long)p->page->count[k], per_second(top, p->before[k], p->page->count[k]));
        if (top_percentile_us(p->page, k, 50) > 0)
            printf(",\"p50_us\":%.1f,\"p99_us\":%.1f", top_percentile_us(p->page, k, 50),
                   top_percentile_us(p->page, k, 99));
        printf("}");
        comma = ",";
    }
    printf("}");
}

static void json_net(const struct watch *w)
{
    const char *comma = "";

    printf(",\"windows\":[");
    for (int r = 0; r < w->nranks; r++) {
        const struct watch_window *n = &watch_windows(w)[r];

        if (!n->is_used)
            continue;
        printf("%s{\"peer\":%d,\"bytes\":%llu,\"bytes_limit\":%llu,\"puts\":%u,\"puts_limit\":%u,\"pending\":%u}",
               comma, r, (unsigned long long)n->bytes, (unsigned long long)n->bytes_limit, n->messages,
               n->messages_limit, n->pending);
        comma = ",";
    }
    printf("],\"masked\":[");
    comma = "";
    for (int r = 0; r < w->nranks; r++)
        if (!watch_mask(w)[r])
            printf("%s%d", comma, r), comma = ",";
    printf("]");
}

static void json_rank(const struct top *top, const struct top_page *p)
{
    const struct watch *w = p->page;
    const struct watch_wait *wait = top_longest_wait(w);
    const uint64_t running_ns = w->running_ns;

    printf("{\"rank\":%d,\"pid\":%d,\"state\":\"%s\",\"calls\":%llu,\"last_call\":\"%s\"", w->rank, w->pid,
           top_state_text(p->state), (unsigned long long)w->calls, call_name(w).text);
    printf(",\"operations_per_second\":%.1f,\"bytes_per_second\":%.0f", operations_per_second(top, p),
           per_second(top, p->bytes_before, top_bytes(w)));
    if (running_ns)
        printf(",\"runs\":\"%s\",\"runs_seconds\":%.3f", top_kernel_name(w->running), seconds_since(top, running_ns));
    if (wait)
        printf(",\"waits\":{\"peer\":%d,\"phase\":\"%s\",\"seconds\":%.3f}", wait->peer,
               wait->phase == PHASE_NONE ? "" : phase_text(wait->phase), seconds_since(top, wait->since_ns));
    json_operations(top, p);
    json_net(w);
    printf("}");
}

void top_print_json(const struct top *top)
{
    printf("{\"groups\":[");
    for (int first = 0; first < top->count; first = top_group_end(top, first)) {
        const struct watch *w = top->pages[first].page;
        int page;
        const int end = top_group_end(top, first), culprit = top_culprit(top, first, end, &page);

        printf(
            "%s{\"group\":\"%016llx\",\"ranks\":%d,\"nodes\":%d,\"device\":\"%s\",\"seconds\":%.1f,\"deadline_seconds\""
            ":%.3f,",
            first ? "," : "", (unsigned long long)w->group, w->nranks, w->nnodes, w->device,
            seconds_since(top, w->created_ns), w->timeout_ms / 1e3);
        if (culprit >= 0)
            printf("\"waiting_for\":%d,", culprit);
        printf("\"here\":[");
        for (int i = first; i < end; i++) {
            printf("%s", i > first ? "," : "");
            json_rank(top, &top->pages[i]);
        }
        printf("]}");
    }
    printf("]}\n");
}

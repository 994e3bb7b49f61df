/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `epx doctor`: each inspector looks at one thing and writes rows of a report, which is printed once, as text or JSON:
 * first the verdict (what works, what does not, what to do), then the details.
 *
 *      doctor.c          the command
 *      doctor_report.c   verdict, sections, rows, warnings, advice; text and JSON
 *      doctor_host.c     the CPU device, memory sharing, huge pages, sockets
 *      doctor_net.c      which network would be chosen, and why not the others
 *      doctor_fabric.c   what libfabric has found
 *      doctor_verbs.c    the cards of libibverbs
 *      doctor_gpu.c      CUDA and HIP, and ways for cards to reach GPU memory
 *      doctor_env.c      variables, misspelt ones too
 */
#ifndef EPX_TOOLS_DOCTOR_H
#define EPX_TOOLS_DOCTOR_H

#include <stddef.h>

struct report;

/* Never NULL; what does not fit into memory is left out. */
struct report *report_new(void);
void report_free(struct report *report);
/* Rows that follow belong to it. `name` must live as long as the report, also below. */
void report_section(struct report *report, const char *name);
void report_row(struct report *report, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The verdict: a device or network that works, or one that does not, and why. */
void report_works(struct report *report, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void report_missing(struct report *report, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Something is wrong, or set to no effect. */
void report_warn(struct report *report, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* What to do: something is missing, or would make EPX faster. */
void report_advise(struct report *report, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* EPX cannot run here, and why; the first reason counts. */
void report_cannot_run(struct report *report, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The network that a group on several nodes would use. */
void report_network(struct report *report, const char *name);
int report_can_run(const struct report *report);
void report_print(const struct report *report, int json);

void doctor_host(struct report *report);
void doctor_sockets(struct report *report);
void doctor_net(struct report *report);
void doctor_fabric(struct report *report);
void doctor_verbs(struct report *report);
void doctor_gpu(struct report *report);
void doctor_env(struct report *report);
/* All variables as an array of objects. */
void doctor_env_json(void);
void json_string(const char *text);

/* The first line of a file without its end; "" when it cannot be read. Returns `text`. */
char *read_line(const char *path, char *text, size_t bytes);
/* 1 if the path is there. */
int path_exists(const char *path);

#endif

/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>

#include "predict.h"
#include "routing.h"

static const char *const op_names[PREDICT_OPS] = {"dispatch", "combine"};

static const char *mode_name(const struct predict_point *p)
{
    return p->mode == EPX_LOW_LATENCY ? "ll" : "ht";
}

void predict_table_head(void)
{
    printf("%-4s %5s %5s %6s  %-8s %9s %9s  %8s %8s %8s %8s %8s  %9s\n", "mode", "ranks", "nodes", "tokens", "",
           "us median", "slowest", "net MB", "headers", "messages", "signals", "links MB", "memory MB");
}

void predict_table_row(const struct predict_point *p, const struct predict_result *r)
{
    for (int op = 0; op < PREDICT_OPS; op++) {
        const struct predict_op_result *o = &r->op[op];
        printf("%-4s %5d %5d %6d  %-8s %9.1f %9.1f  %8.2f %7.1f%% %8.0f %8.0f %8.1f", mode_name(p), p->ranks,
               predict_nodes(p), p->tokens, op_names[op], o->us_median, o->us_slowest, o->bytes / 1e6,
               o->bytes > 0 ? 100 * o->header_bytes / o->bytes : 0, o->messages, o->signals, o->link_bytes / 1e6);
        if (op == 0)
            printf("  %9.1f", r->memory_bytes / 1e6);
        printf("\n");
    }
    fflush(stdout);
}

static void json_op(FILE *to, const struct predict_op_result *o, const char *name)
{
    fprintf(to,
            "\"%s\":{\"us_median\":%.2f,\"us_slowest\":%.2f,\"net_bytes\":%.0f,\"header_bytes\":%.0f,"
            "\"messages\":%.1f,\"signals\":%.1f,\"link_bytes\":%.0f,\"commands\":%.1f,\"looks\":%.1f}",
            name, o->us_median, o->us_slowest, o->bytes, o->header_bytes, o->messages, o->signals, o->link_bytes,
            o->commands, o->looks);
}

void predict_json(FILE *to, const struct predict_point *p, const struct predict_result *r)
{
    fprintf(to,
            "{\"machine\":\"%s\",\"mode\":\"%s\",\"ranks\":%d,\"nodes\":%d,\"tokens\":%d,\"hidden\":%d,\"topk\":%d,"
            "\"experts\":%d,\"dtype\":\"%s\",\"routing\":\"%s\",\"sms\":%" PRIu64 ",\"seed\":%" PRIu64 ",",
            p->machine.name, mode_name(p), p->ranks, predict_nodes(p), p->tokens, p->hidden, p->topk, p->experts,
            p->dtype == PREDICT_FP8 ? "fp8" : "bf16", option_choice_name(routing_choices, p->routing), p->machine.sms,
            p->seed);
    for (int op = 0; op < PREDICT_OPS; op++) {
        json_op(to, &r->op[op], op_names[op]);
        fprintf(to, ",");
    }
    fprintf(to,
            "\"update_us\":%.2f,\"memory_bytes\":%.0f,\"rows\":%.1f,\"node_rows\":%.1f,\"seconds\":%.2f,"
            "\"peak_bytes\":%.0f,\"steps\":%" PRIu64 ",\"hash\":\"%016" PRIx64 "\"}\n",
            r->update_us, r->memory_bytes, r->rows, r->node_rows, r->seconds, r->peak_bytes, r->steps, r->hash);
    fflush(to);
}

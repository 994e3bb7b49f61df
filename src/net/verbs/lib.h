/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libibverbs and libefa, opened at run time. Functions that the header defines in line go through tables in the opened
 * device and need no symbol; all others are called through this table and nothing is ever linked.
 */
#ifndef EPX_NET_VERBS_LIB_H
#define EPX_NET_VERBS_LIB_H

#if !defined(EPX_HAVE_VERBS) || !defined(EPX_HAVE_EFADV)
#error "the build defines EPX_HAVE_VERBS and EPX_HAVE_EFADV as 1 or 0 (cmake/EpxNetworks.cmake)"
#endif

#if EPX_HAVE_VERBS
#include <infiniband/verbs.h>
#endif
#if EPX_HAVE_EFADV
#include <infiniband/efadv.h>
#endif

#if EPX_HAVE_VERBS

/* _query_gid_ex is the symbol behind the inline ibv_query_gid_ex. query_port and reg_mr are macros in the header; the
 * table has the functions of those names. */
/* clang-format off */
#define VERBS_FUNCTIONS(X)                                                                                       \
    X(get_device_list) X(free_device_list) X(get_device_name) X(open_device) X(close_device) X(query_device)     \
    X(query_port) X(alloc_pd) X(dealloc_pd) X(reg_mr) X(dereg_mr) X(create_comp_channel) X(destroy_comp_channel) \
    X(create_cq) X(destroy_cq) X(get_cq_event) X(ack_cq_events) X(create_srq) X(destroy_srq) X(create_qp)        \
    X(modify_qp) X(destroy_qp) X(create_ah) X(destroy_ah) X(get_async_event) X(ack_async_event)                  \
    X(wc_status_str) X(event_type_str)
/* clang-format on */

struct verbs_lib {
#define VERBS_FIELD(name) __typeof__(ibv_##name) *name;
    VERBS_FUNCTIONS(VERBS_FIELD)
#undef VERBS_FIELD
    __typeof__(_ibv_query_gid_ex) *query_gid_ex;
    __typeof__(ibv_qp_to_qp_ex) *qp_to_qp_ex;
    /* NULL before rdma-core 34. */
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                    int access);
#if EPX_HAVE_EFADV
    /* NULL without libefa. */
    __typeof__(efadv_query_device) *efa_query_device;
    __typeof__(efadv_create_qp_ex) *efa_create_qp;
#endif
};

/* The table, loaded by the first call, or NULL: *why then says what is missing. */
const struct verbs_lib *verbs_lib_open(const char **why);

#endif
#endif

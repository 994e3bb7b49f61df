/* SPDX-License-Identifier: Apache-2.0 */
/* get_dispatch_layout(): counts of a routing. On a CPU they are counted here, on a GPU by the group's kernel. */
#include <string.h>

#include "calls.h"

enum { RANKS, EXPERTS, NODES, MARKS, OUTPUTS };

struct layout {
    struct call call;
    struct view idx;
    int64_t experts, nranks, nodes;
    PyObject *tensors[OUTPUTS]; /* the call's; NODES may be NULL */
    void *data[OUTPUTS];
};

/* On a CPU there need not be a group yet. */
static struct place *cpu_place(void)
{
    static PyObject *place;

    if (!place)
        place = call_helper("cpu_place", "()");
    return (struct place *)place;
}

static int make_outputs(struct layout *l, struct place *place)
{
    const int64_t shapes[OUTPUTS][2] = {{l->nranks}, {l->experts}, {l->nodes}, {l->idx.shape[0], l->nranks}};

    for (int i = 0; i < OUTPUTS; i++) {
        if (i == NODES && l->nodes == 1)
            continue;
        l->tensors[i] =
            memory_empty(place, i == MARKS ? DTYPE_BOOL : EPX_INT32, i == MARKS ? 2 : 1, shapes[i], &l->data[i]);
        if (!l->tensors[i])
            return -1;
    }
    return 0;
}

static int64_t expert_at(const struct view *idx, int64_t at)
{
    return idx->dtype == EPX_INT64 ? ((const int64_t *)idx->data)[at] : ((const int32_t *)idx->data)[at];
}

static int wrong_expert(const struct layout *l, int64_t token, int64_t k, int64_t expert)
{
    char name[64], expected[64];

    (void)snprintf(name, sizeof(name), "topk_idx[%lld][%lld]", (long long)token, (long long)k);
    (void)snprintf(expected, sizeof(expected), "-1 (none) to %lld (num_experts - 1)", (long long)l->experts - 1);
    return wrong(name, expected, PyLong_FromLongLong(expert));
}

/* The node of each rank is another number in each of `nodes`' places: NULL on one node. */
static int count(struct layout *l, const int64_t *node_of)
{
    const int64_t local = (l->experts + l->nranks - 1) / l->nranks, topk = l->idx.shape[1];
    int32_t *per_rank = l->data[RANKS], *per_expert = l->data[EXPERTS], *per_node = l->data[NODES];
    uint8_t *marks = l->data[MARKS];

    memset(per_rank, 0, sizeof(*per_rank) * (size_t)l->nranks);
    memset(per_expert, 0, sizeof(*per_expert) * (size_t)l->experts);
    if (per_node)
        memset(per_node, 0, sizeof(*per_node) * (size_t)l->nodes);
    for (int64_t token = 0; token < l->idx.shape[0]; token++, marks += l->nranks) {
        memset(marks, 0, (size_t)l->nranks);
        for (int64_t k = 0; k < topk; k++) {
            const int64_t expert = expert_at(&l->idx, token * topk + k);

            if (expert < -1 || expert >= l->experts)
                return wrong_expert(l, token, k, expert);
            if (expert < 0)
                continue;
            per_expert[expert]++;
            marks[expert / local] = 1;
        }
        for (int64_t r = 0, seen = -1; r < l->nranks; r++) { /* the ranks of a node are neighbours */
            per_rank[r] += marks[r];
            if (per_node && marks[r] && node_of[r] != seen)
                per_node[seen = node_of[r]]++;
        }
    }
    return 0;
}

static int count_here(struct layout *l)
{
    PyObject *nodes = PyObject_GetAttrString(l->call.engine, "node_of");
    int64_t *node_of = nodes ? PyMem_Malloc(sizeof(*node_of) * (size_t)l->nranks) : NULL;
    struct place *place = cpu_place();
    int failed = !node_of || !place;

    for (int64_t r = 0; !failed && r < l->nranks; r++) {
        PyObject *node = PySequence_GetItem(nodes, r);

        node_of[r] = node ? PyLong_AsLongLong(node) : -1;
        Py_XDECREF(node);
        failed = node_of[r] < 0 || node_of[r] >= l->nranks;
        l->nodes = node_of[r] >= l->nodes ? node_of[r] + 1 : l->nodes;
    }
    if (!failed)
        failed = make_outputs(l, place) || count(l, node_of);
    PyMem_Free(node_of);
    Py_XDECREF(nodes);
    return failed ? -1 : 0;
}

/* By the group's kernel, behind the group's other work. */
static int count_on_device(struct layout *l)
{
    epx_tensor idx = descriptor(&l->idx), outputs[OUTPUTS];
    epx_dispatch_layout_outputs to = EPX_DISPATCH_LAYOUT_OUTPUTS_INIT;
    epx_group *group = group_of(&l->call);

    l->nodes = l->call.place->nnodes;
    if (!group || make_outputs(l, l->call.place))
        return -1;
    outputs[RANKS] = epx_tensor_make(l->data[RANKS], EPX_INT32, 1, l->nranks, 0, 0, 0);
    outputs[EXPERTS] = epx_tensor_make(l->data[EXPERTS], EPX_INT32, 1, l->experts, 0, 0, 0);
    outputs[NODES] = epx_tensor_make(l->data[NODES], EPX_INT32, 1, l->nodes, 0, 0, 0);
    outputs[MARKS] = epx_tensor_make(l->data[MARKS], EPX_UINT8, 2, l->idx.shape[0], l->nranks, 0, 0);
    to.tokens_per_rank = &outputs[RANKS];
    to.tokens_per_expert = &outputs[EXPERTS];
    to.tokens_per_node = l->nodes > 1 ? &outputs[NODES] : NULL;
    to.token_in_rank = &outputs[MARKS];
    if (l->call.capturing && PyObject_SetAttrString(l->call.pool, "captured", Py_True))
        return -1; /* a replay runs the kernel with the memory of this group */
    for (int i = 0; i < OUTPUTS; i++) {
        if (l->tensors[i]) {
            Py_INCREF(l->tensors[i]);
            if (!bag_put(&l->call.used, l->tensors[i]))
                return -1;
        }
    }
    Py_INCREF(l->idx.tensor);
    if (!bag_put(&l->call.used, l->idx.tensor))
        return -1;
    l->call.queued = 1;
    return library_check(library.epx_dispatch_layout(group, &idx, &to, l->call.stream));
}

/* Before a dispatch has made a group for them, and for what its kernel does not take: by torch. */
static PyObject *count_by_torch(struct layout *l, const struct events *events)
{
    return call_helper("layout_by_torch", "OOLOOO", l->call.buffer, l->idx.tensor, (long long)l->experts,
                       events->previous, events->async_finish, events->allocate_on_comm_stream);
}

static PyObject *layout_result(struct layout *l, PyObject *event)
{
    PyObject *nodes = l->tensors[NODES] ? l->tensors[NODES] : Py_None;

    return event ? Py_BuildValue("OOOON", l->tensors[RANKS], nodes, l->tensors[EXPERTS], l->tensors[MARKS], event)
                 : NULL;
}

static PyObject *layout_run(struct layout *l, const struct events *events)
{
    PyObject *event = NULL, *pool;

    if (l->idx.device == EPX_DEVICE_CPU) {
        PyObject *waited = call_helper("host_wait", "(O)", events->previous);

        if (waited && !count_here(l))
            event = call_helper("host_event", "(O)", events->async_finish);
        Py_XDECREF(waited);
        return layout_result(l, event);
    }
    pool = call_helper("layout_pool", "OOL", l->call.engine, l->idx.tensor, (long long)l->experts);
    if (!pool)
        return NULL;
    if (pool == Py_None) {
        Py_DECREF(pool);
        return count_by_torch(l, events);
    }
    if (call_pool(&l->call, pool) || call_launch(&l->call) || count_on_device(l))
        return NULL;
    return layout_result(l, call_finish(&l->call));
}

/* (buffer, topk_idx, num_experts, previous_event, async_finish, allocate_on_comm_stream) */
PyObject *calls_layout(PyObject *module, PyObject *arguments)
{
    const struct want want = {.dtypes = INDICES, .ndim = 2, .shape = {ANY, ANY}};
    PyObject *buffer, *idx, *experts, *result = NULL;
    struct events events;
    struct layout l;

    (void)module;
    memset(&l, 0, sizeof(l));
    l.nodes = 1;
    if (!PyArg_ParseTuple(arguments, "OOOOOO", &buffer, &idx, &experts, &events.previous, &events.async_finish,
                          &events.allocate_on_comm_stream))
        return NULL;
    if (!tensor_check("topk_idx", idx, &want, &l.idx) && (l.experts = at_most("num_experts", experts, 1, MOST)) > 0 &&
        !check_device("topk_idx", &l.idx) && !call_begin(&l.call, buffer, &l.idx, &events) &&
        (l.nranks = integer_attribute(buffer, names.group_size)) > 0)
        result = layout_run(&l, &events);
    result = call_end(&l.call, result);
    for (int i = 0; i < OUTPUTS; i++)
        Py_XDECREF(l.tensors[i]);
    return result;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "heap.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "dlpack.h"

enum { ALIGN = 256, SMALL_SHARE = 64, STREAMS = 64, OTHER_STREAMS = STREAMS - 1 };
#define GRAPH_SPARE UINTPTR_MAX /* kept for a capture that has not come yet */

struct segment {
    struct segment *before, *behind; /* by address */
    size_t at, bytes;
    uint64_t streams;    /* bits of heap.streams */
    uint64_t released;   /* when, by heap.clock */
    uintptr_t graph;     /* the stream whose captures have it for ever, or GRAPH_SPARE; 0: not of captures */
    struct lease *lease; /* whose tensor uses it, or NULL */
};

struct heap {
    struct heap *next; /* of all */
    struct segment *first;
    char *base;
    size_t bytes, small;
    uintptr_t streams[OTHER_STREAMS];
    int nstreams, index;
    int closed, lost;      /* lost: there is no Heap of Python any more */
    int dropping, dropped; /* a thread lets go of the memory, or has */
    size_t leases;
    size_t flag_at, allocator_at; /* of a storage that can be resized (deep_ep/_resizable.py); both 0: unknown */
    uint64_t allocator;
    PyObject *owner;          /* of the memory; NULL behind the last tensor of a closed heap */
    PyObject *device_streams; /* current(), wait(), settle(); NULL on the CPU */
    uint64_t given, missing;  /* tensors with room and without */
    uint64_t clock;           /* counts releases */
};

/* A tensor of torch over a segment. */
struct lease {
    struct dl_managed managed;
    int64_t shape[EPX_MAX_NDIM], stride[EPX_MAX_NDIM];
    struct heap *heap;
    struct segment *segment; /* NULL: revoked */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct heap *heaps;

/* ---- Segments: under the lock -------------------------------------------------------------------------------- */

static uint64_t bit_of(struct heap *heap, uintptr_t stream)
{
    int i = 0;

    if (!heap->device_streams || stream == NO_STREAM)
        return 0;
    if (stream == EPX_DEFAULT_STREAM)
        stream = 0; /* torch's number of the same */
    while (i < heap->nstreams && heap->streams[i] != stream)
        i++;
    if (i == heap->nstreams && i < OTHER_STREAMS)
        heap->streams[heap->nstreams++] = stream;
    return UINT64_C(1) << i; /* the last bit: of all that have no other */
}

/* Those of a hole that a taker with this bit waits for. */
static uint64_t others(const struct segment *segment, uint64_t own)
{
    return segment->streams & (~own | UINT64_C(1) << OTHER_STREAMS);
}

static int is_hole(const struct segment *segment)
{
    return segment && !segment->lease && !segment->graph;
}

/* Two holes are one, if they are neighbours. Memory that no stream has used stays apart for captures, unless all of it
 * is needed. */
static int merge(struct segment *one, int all)
{
    struct segment *gone = is_hole(one) ? one->behind : NULL;

    if (!is_hole(gone) || (!all && !one->streams != !gone->streams))
        return 0;
    one->bytes += gone->bytes;
    one->streams |= gone->streams;
    one->released = one->released > gone->released ? one->released : gone->released;
    one->behind = gone->behind;
    if (gone->behind)
        gone->behind->before = one;
    free(gone);
    return 1;
}

static void give_back(struct heap *heap, struct segment *segment, uint64_t streams)
{
    segment->lease = NULL;
    segment->streams |= streams;
    segment->released = ++heap->clock;
    if (segment->graph)
        return;
    (void)merge(segment, 0);
    if (segment->before)
        (void)merge(segment->before, 0);
}

enum hole { HOLE_OF_OWN_STREAM, HOLE_FRESH, HOLE_TO_WAIT_FOR, HOLES };

/* The best kind that has room, none behind `worst`, and the smallest of these. What is small goes to the last hole, if
 * it need not wait: the rest stays whole. */
static struct segment *find_hole(struct heap *heap, size_t bytes, uint64_t own, enum hole worst)
{
    struct segment *found[HOLES] = {NULL};

    for (struct segment *s = heap->first; s; s = s->behind) {
        enum hole kind = !s->streams ? HOLE_FRESH : others(s, own) ? HOLE_TO_WAIT_FOR : HOLE_OF_OWN_STREAM;

        if (!is_hole(s) || s->bytes < bytes)
            continue;
        if (bytes <= heap->small && kind == HOLE_OF_OWN_STREAM && worst != HOLE_FRESH)
            kind = HOLE_FRESH;
        if (!found[kind] || bytes <= heap->small || s->bytes < found[kind]->bytes)
            found[kind] = s;
    }
    for (int kind = HOLE_OF_OWN_STREAM; kind <= (int)worst; kind++) {
        if (found[kind])
            return found[kind];
    }
    return NULL;
}

/* Where no hole has room: all neighbours become one. */
static struct segment *find_room(struct heap *heap, size_t bytes, uint64_t own)
{
    struct segment *hole = find_hole(heap, bytes, own, HOLE_TO_WAIT_FOR);
    int merged = 0;

    for (struct segment *s = heap->first; s && !hole; s = s->behind) {
        while (merge(s, 1))
            merged = 1;
    }
    return merged ? find_hole(heap, bytes, own, HOLE_TO_WAIT_FOR) : hole;
}

/* So many bytes of a hole: of its end if they are few. NULL: no memory for the list. */
static struct segment *cut(struct heap *heap, struct segment *hole, size_t bytes)
{
    const size_t left = hole->bytes - bytes;
    struct segment *rest;

    if (!left)
        return hole;
    rest = malloc(sizeof(*rest));
    if (!rest)
        return NULL;
    *rest = *hole;
    rest->before = hole;
    if (hole->behind)
        hole->behind->before = rest;
    hole->behind = rest;
    hole->bytes = bytes <= heap->small ? left : bytes;
    rest->bytes = bytes <= heap->small ? bytes : left;
    rest->at = hole->at + hole->bytes;
    return bytes <= heap->small ? rest : hole;
}

static struct segment *take(struct heap *heap, size_t bytes, uint64_t own, uint64_t *waits)
{
    struct segment *hole = find_room(heap, bytes, own), *segment = hole ? cut(heap, hole, bytes) : NULL;

    if (segment) {
        *waits |= others(segment, own);
        segment->streams = own;
    }
    return segment;
}

/* For a capture, or to be kept for one. What a capture takes anew is memory that no stream has used: it could not wait
 * for work outside of it. */
static struct segment *take_for_graphs(struct heap *heap, size_t bytes, uintptr_t graph)
{
    struct segment *found = NULL, *hole;

    for (struct segment *s = graph == GRAPH_SPARE ? NULL : heap->first; s; s = s->behind) {
        if (s->lease || s->bytes != bytes || !s->graph)
            continue;
        if (s->graph == graph || (s->graph == GRAPH_SPARE && !found))
            found = s;
    }
    hole = found ? NULL : find_hole(heap, bytes, 0, HOLE_FRESH);
    if (hole)
        found = cut(heap, hole, bytes);
    if (found)
        found->graph = graph;
    return found;
}

static struct segment *segment_at(struct heap *heap, const void *address)
{
    const size_t at = (size_t)((const char *)address - heap->base);
    struct segment *s = heap_holds(heap, address) ? heap->first : NULL;

    while (s && at - s->at >= s->bytes)
        s = s->behind;
    return s;
}

/* ---- Their end ------------------------------------------------------------------------------------------------ */

/* Of a heap that no tensor and no object of Python refers to. Under the lock. */
static void heap_free(struct heap *heap)
{
    struct heap **link = &heaps;

    while (*link && *link != heap)
        link = &(*link)->next;
    if (*link)
        *link = heap->next;
    while (heap->first) {
        struct segment *s = heap->first;

        heap->first = s->behind;
        free(s);
    }
    free(heap);
}

/* With Python's lock, whatever the thread has; an exception that propagates stays set. */
static uintptr_t with_python(uintptr_t (*run)(struct heap *heap), struct heap *heap)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *type, *value, *trace;
    uintptr_t result;

    PyErr_Fetch(&type, &value, &trace);
    result = run(heap);
    PyErr_Restore(type, value, trace);
    PyGILState_Release(state);
    return result;
}

static uintptr_t current_stream(struct heap *heap)
{
    PyObject *number = PyObject_CallMethod(heap->device_streams, "current", NULL);
    uintptr_t stream = number && number != Py_None ? (uintptr_t)PyLong_AsUnsignedLongLong(number) : NO_STREAM;

    Py_XDECREF(number);
    if (PyErr_Occurred()) {
        PyErr_Clear(); /* of a GPU that runs nothing any more */
        stream = NO_STREAM;
    }
    return stream;
}

/* True once: for the thread that is to drop() the memory of a closed heap without tensors. Under the lock. */
static int is_last(struct heap *heap)
{
    if (!heap->closed || heap->leases || heap->dropping)
        return 0;
    return heap->dropping = 1;
}

/* Lets go of the memory, and of the heap if nothing refers to it. */
static uintptr_t drop(struct heap *heap)
{
    PyObject *owner = heap->owner, *streams = heap->device_streams;

    heap->owner = heap->device_streams = NULL;
    Py_XDECREF(owner);
    Py_XDECREF(streams);
    pthread_mutex_lock(&lock);
    heap->dropped = 1;
    if (heap->lost)
        heap_free(heap);
    pthread_mutex_unlock(&lock);
    return 0;
}

static void lease_end(struct dl_managed *managed)
{
    struct lease *lease = managed->context;
    struct heap *heap = lease->heap;
    uintptr_t stream = NO_STREAM;
    int last;

    if (!Py_IsInitialized())
        return; /* the process ends */
    if (heap->device_streams && !heap->closed)
        stream = with_python(current_stream, heap);
    pthread_mutex_lock(&lock);
    if (lease->segment)
        give_back(heap, lease->segment, bit_of(heap, stream));
    heap->leases--;
    last = is_last(heap);
    pthread_mutex_unlock(&lock);
    free(lease);
    if (last)
        (void)with_python(drop, heap);
}

/* ---- Tensors -------------------------------------------------------------------------------------------------- */

static void capsule_end(PyObject *capsule)
{
    struct dl_managed *managed =
        PyCapsule_IsValid(capsule, "dltensor") ? PyCapsule_GetPointer(capsule, "dltensor") : NULL;

    if (managed)
        managed->deleter(managed);
}

static size_t part_bytes(const struct part *part)
{
    size_t nbytes = dtype_bytes(part->dtype);

    for (int i = 0; i < part->ndim; i++) {
        if (__builtin_mul_overflow(nbytes, (size_t)part->shape[i], &nbytes))
            return SIZE_MAX / ALIGN * ALIGN; /* there is no room */
    }
    return (nbytes + ALIGN - 1) / ALIGN * ALIGN;
}

static struct lease *lease_new(struct heap *heap, const struct part *part)
{
    struct lease *lease = calloc(1, sizeof(*lease));

    if (!lease)
        return NULL;
    lease->heap = heap;
    memcpy(lease->shape, part->shape, sizeof(lease->shape));
    memcpy(lease->stride, part->stride, sizeof(lease->stride));
    lease->managed = (struct dl_managed){.context = lease, .deleter = lease_end};
    tensor_kind(&lease->managed.tensor, part->dtype);
    lease->managed.tensor.device_type = heap->index < 0 ? DL_CPU : DL_CUDA;
    lease->managed.tensor.device_id = heap->index < 0 ? 0 : heap->index;
    lease->managed.tensor.ndim = part->ndim;
    lease->managed.tensor.shape = lease->shape;
    lease->managed.tensor.strides = part->strided ? lease->stride : NULL;
    return lease;
}

/* Waits, on the device, for the other streams that may use what was taken. */
static int wait_for(struct heap *heap, uintptr_t stream, uint64_t waits, uint64_t clock)
{
    PyObject *done;
    uint64_t own;

    for (int i = 0; i < STREAMS; i++) {
        if (!(waits >> i & 1))
            continue;
        done = i == OTHER_STREAMS ? PyObject_CallMethod(heap->device_streams, "settle", NULL)
                                  : PyObject_CallMethod(heap->device_streams, "wait", "KK", (unsigned long long)stream,
                                                        (unsigned long long)heap->streams[i]);
        if (!done)
            return -1;
        Py_DECREF(done);
    }
    pthread_mutex_lock(&lock);
    own = bit_of(heap, stream);
    for (struct segment *s = heap->first; s; s = s->behind) {
        if (is_hole(s) && s->streams & own && s->released <= clock)
            s->streams &= ~(waits & ~own); /* whose work the work of the taker is behind */
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Lets the storage of a tensor be resized, as torch's own can. */
static int make_resizable(const struct heap *heap, PyObject *tensor)
{
    PyObject *storage = heap->allocator_at ? call_method(tensor, names.untyped_storage, NULL) : NULL;
    PyObject *address = storage ? PyObject_GetAttr(storage, names._cdata) : NULL;
    char *at = address ? PyLong_AsVoidPtr(address) : NULL;

    Py_XDECREF(address);
    if (at) { /* the storage lives with its tensor */
        memcpy(at + heap->allocator_at, &heap->allocator, sizeof(heap->allocator));
        at[heap->flag_at] = 1;
    }
    Py_XDECREF(storage);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *tensor_of(struct heap *heap, struct lease *lease, const struct part *part)
{
    PyObject *capsule = PyCapsule_New(&lease->managed, "dltensor", capsule_end);
    PyObject *tensor = NULL;

    if (!capsule)
        lease_end(&lease->managed);
    else
        tensor = tensor_from_capsule(capsule, part->dtype);
    Py_XDECREF(capsule);
    if (tensor && make_resizable(heap, tensor)) {
        Py_DECREF(tensor);
        return NULL;
    }
    return tensor;
}

/* Segments for the parts, where there is room; the streams to wait for. */
static uint64_t take_all(struct heap *heap, uintptr_t stream, int in_graph, struct part *parts, int count,
                         struct lease **leases, uint64_t *clock)
{
    uint64_t waits = 0;

    pthread_mutex_lock(&lock);
    *clock = heap->clock;
    for (int i = 0; i < count; i++) {
        const size_t nbytes = part_bytes(&parts[i]);
        struct lease *lease = leases[i];
        struct segment *segment = NULL;

        if (nbytes && lease && !heap->closed)
            segment =
                in_graph ? take_for_graphs(heap, nbytes, stream) : take(heap, nbytes, bit_of(heap, stream), &waits);
        if (!segment) {
            free(lease);
            leases[i] = NULL;
            heap->missing += nbytes != 0;
            continue;
        }
        heap->given++;
        heap->leases++;
        segment->lease = lease;
        lease->segment = segment;
        lease->managed.tensor.data = parts[i].data = heap->base + segment->at;
    }
    pthread_mutex_unlock(&lock);
    return waits;
}

/* Where the wait for some streams failed: the next taker waits for them. */
static void return_unused(struct lease *lease, uint64_t waits)
{
    pthread_mutex_lock(&lock);
    lease->segment->streams |= waits;
    pthread_mutex_unlock(&lock);
    lease_end(&lease->managed);
}

int heap_tensors(struct heap *heap, uintptr_t stream, int in_graph, struct part *parts, int count)
{
    struct lease *leases[MOST_PARTS];
    uint64_t waits, clock;
    int failed;

    for (int i = 0; i < count; i++)
        leases[i] = lease_new(heap, &parts[i]);
    waits = take_all(heap, stream, in_graph, parts, count, leases, &clock);
    failed = waits ? wait_for(heap, stream, waits, clock) : 0;
    for (int i = 0; i < count; i++) {
        if (failed && leases[i])
            return_unused(leases[i], waits);
        else if (leases[i])
            failed = !(parts[i].tensor = tensor_of(heap, leases[i], &parts[i]));
    }
    return failed ? -1 : 0;
}

int heap_holds(const struct heap *heap, const void *address)
{
    return (const char *)address >= heap->base && (const char *)address < heap->base + heap->bytes;
}

void heap_used_on(uintptr_t stream, const void *address)
{
    pthread_mutex_lock(&lock);
    for (struct heap *heap = heaps; heap; heap = heap->next) {
        struct segment *segment = segment_at(heap, address);

        if (segment)
            segment->streams |= bit_of(heap, stream);
    }
    pthread_mutex_unlock(&lock);
}

/* ---- The class for Python -------------------------------------------------------------------------------------- */

struct heap_object {
    PyObject_HEAD struct heap *heap;
};

static PyTypeObject *heap_type;

struct heap *heap_of(PyObject *object)
{
    return heap_type && PyObject_TypeCheck(object, heap_type) ? ((struct heap_object *)object)->heap : NULL;
}

/* Heap(owner, address, nbytes, index, streams, (flag_at, allocator_at, allocator)): index -1 and streams None on the
 * CPU. */
static PyObject *heap_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *owner, *address, *streams;
    Py_ssize_t nbytes;
    Py_ssize_t flag_at, allocator_at;
    unsigned long long allocator;
    int index;
    struct heap *heap;
    struct heap_object *self;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);

    (void)keywords;
    if (!PyArg_ParseTuple(arguments, "OOniO(nnK)", &owner, &address, &nbytes, &index, &streams, &flag_at, &allocator_at,
                          &allocator))
        return NULL;
    self = (struct heap_object *)alloc(type, 0);
    heap = self ? calloc(1, sizeof(*heap)) : NULL;
    if (heap)
        heap->first = calloc(1, sizeof(*heap->first));
    if (!heap || !heap->first) {
        free(heap);
        Py_XDECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    self->heap = heap;
    Py_INCREF(owner);
    heap->owner = owner;
    if (streams != Py_None) {
        Py_INCREF(streams);
        heap->device_streams = streams;
    }
    heap->base = PyLong_AsVoidPtr(address);
    heap->bytes = heap->first->bytes = (size_t)nbytes / ALIGN * ALIGN;
    heap->small = heap->bytes / SMALL_SHARE;
    heap->index = index;
    heap->flag_at = (size_t)flag_at;
    heap->allocator_at = (size_t)allocator_at;
    heap->allocator = allocator;
    pthread_mutex_lock(&lock);
    heap->next = heaps;
    heaps = heap;
    pthread_mutex_unlock(&lock);
    return (PyObject *)self;
}

/* The memory ends with the last tensor. */
static PyObject *heap_close(PyObject *object, PyObject *unused)
{
    struct heap *heap = ((struct heap_object *)object)->heap;
    int last;

    (void)unused;
    pthread_mutex_lock(&lock);
    heap->closed = 1;
    last = is_last(heap);
    pthread_mutex_unlock(&lock);
    if (last)
        (void)drop(heap);
    Py_RETURN_NONE;
}

static void heap_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    struct heap *heap = ((struct heap_object *)object)->heap;
    int last;

    if (heap) {
        pthread_mutex_lock(&lock);
        heap->closed = heap->lost = 1;
        last = is_last(heap);
        if (heap->dropped)
            heap_free(heap);
        pthread_mutex_unlock(&lock);
        if (last)
            (void)drop(heap);
    }
    release(object);
    Py_DECREF((PyObject *)type);
}

/* tensors(stream, in_graph, ((dtype, shape, strides or None), ...)): a list, with None where there was no room. */
static PyObject *heap_make(PyObject *object, PyObject *arguments)
{
    struct heap *heap = ((struct heap_object *)object)->heap;
    struct part parts[MOST_PARTS];
    PyObject *given, *list;
    unsigned long long stream;
    int in_graph, count;

    if (!PyArg_ParseTuple(arguments, "KpO", &stream, &in_graph, &given))
        return NULL;
    count = parts_read(given, parts);
    if (count < 0 || heap_tensors(heap, (uintptr_t)stream, in_graph, parts, count))
        return NULL;
    list = PyList_New(count);
    for (int i = 0; list && i < count; i++) {
        PyObject *tensor = parts[i].tensor ? parts[i].tensor : Py_None;

        if (tensor == Py_None)
            Py_INCREF(tensor);
        PyList_SetItem(list, i, tensor);
    }
    return list;
}

/* Keeps memory for a tensor of captured calls: calls outside of captures may fill the rest. */
static PyObject *heap_prepare(PyObject *object, PyObject *arguments)
{
    struct heap *heap = ((struct heap_object *)object)->heap;
    struct part parts[MOST_PARTS];
    const int count = parts_read(arguments, parts);

    if (count < 0)
        return NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++)
        (void)take_for_graphs(heap, part_bytes(&parts[i]), GRAPH_SPARE);
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}

static PyObject *heap_has(PyObject *object, PyObject *address)
{
    void *at = PyLong_AsVoidPtr(address);

    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(heap_holds(((struct heap_object *)object)->heap, at));
}

/* Gives the memory at an address out again, although a tensor refers to it. */
static PyObject *heap_revoke(PyObject *object, PyObject *arguments)
{
    struct heap *heap = ((struct heap_object *)object)->heap;
    unsigned long long address, stream;
    struct segment *segment;

    if (!PyArg_ParseTuple(arguments, "KK", &address, &stream))
        return NULL;
    pthread_mutex_lock(&lock);
    segment = segment_at(heap, (void *)(uintptr_t)address);
    if (segment && segment->lease) {
        segment->lease->segment = NULL;
        give_back(heap, segment, bit_of(heap, (uintptr_t)stream));
    }
    pthread_mutex_unlock(&lock);
    Py_RETURN_NONE;
}

/* (tensors that had room, tensors that had none, bytes in use). */
static PyObject *heap_counts(PyObject *object, PyObject *unused)
{
    struct heap *heap = ((struct heap_object *)object)->heap;
    uint64_t given, missing, used = 0;

    (void)unused;
    pthread_mutex_lock(&lock);
    given = heap->given;
    missing = heap->missing;
    for (struct segment *s = heap->first; s; s = s->behind)
        used += s->lease ? s->bytes : 0;
    pthread_mutex_unlock(&lock);
    return Py_BuildValue("KKK", (unsigned long long)given, (unsigned long long)missing, (unsigned long long)used);
}

static PyMethodDef heap_methods[] = {
    {"tensors", heap_make, METH_VARARGS, NULL},
    {"prepare", heap_prepare, METH_VARARGS, NULL},
    {"holds", heap_has, METH_O, NULL},
    {"revoke", heap_revoke, METH_VARARGS, NULL},
    {"counts", heap_counts, METH_NOARGS, NULL},
    {"close", heap_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static void lock_for_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void unlock_behind_fork(void)
{
    pthread_mutex_unlock(&lock);
}

int heap_init(PyObject *module)
{
    static PyType_Slot slots[] = {
        {Py_tp_new, (void *)heap_new}, {Py_tp_dealloc, (void *)heap_dealloc}, {Py_tp_methods, heap_methods}, {0, NULL}};
    static PyType_Spec spec = {"epx._calls.Heap", sizeof(struct heap_object), 0, Py_TPFLAGS_DEFAULT, slots};

    heap_type = (PyTypeObject *)PyType_FromSpec(&spec);
    if (!heap_type || pthread_atfork(lock_for_fork, unlock_behind_fork, unlock_behind_fork))
        return -1;
    Py_INCREF((PyObject *)heap_type);
    return PyModule_AddObject(module, "Heap", (PyObject *)heap_type);
}

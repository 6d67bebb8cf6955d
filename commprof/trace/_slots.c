/* Slots for records in a part of a mapped file: the C version of commprof.trace.rank_files.segments.PythonSlots.
 *
 * The code holds the GIL all the time. Two threads therefore never get the same slot, and the mapping cannot be removed
 * while a record is written.
 */
#define PY_SSIZE_T_CLEAN
#include "_slots.h"

#include <string.h>
#include <time.h>

/* Increment this for every change of the arguments, the results or the written data of this module.
 * commprof.trace.rank_files.segments requires a specific version. */
#define VERSION 2

/* The parts of the record of commprof.schema that this module writes. The build defines RECORD_SIZE and
 * RECORD_SEQUENCE. */
enum {
    /* The offset of pg_seq. The times between issue_ns and pg_seq are not known yet and are set to 0. */
    SEQUENCE = RECORD_SEQUENCE,
    INTERNED = SEQUENCE + 8, /* signature, tag, call_site, thread: four bytes each */
    TAIL = RECORD_SIZE - TAIL_SIZE,
    COMMIT = RECORD_SIZE - 4, /* written last, so that a record without it can be recognized as torn */
};
_Static_assert(RECORD_SIZE % 8 == 0 && SEQUENCE % 8 == 0, "words of eight bytes complete a record");
_Static_assert(SEQUENCE >= 8 && TAIL == INTERNED + 16 && TAIL < COMMIT, "time, number, interned values, tail");

typedef struct {
    PyObject_HEAD
    Py_buffer view; /* the buffer of the mapping; view.obj is NULL if there is no mapping */
    Py_ssize_t next; /* the offset of the next slot */
    Py_ssize_t end;
} Slots;

static int64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now); /* the clock of time.perf_counter_ns on Linux */
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void
let_go(Slots *self)
{
    if (self->next < self->end) {
        self->end = self->next;
    }
    if (self->view.obj != NULL) {
        PyBuffer_Release(&self->view);
    }
}

static int
slots_init(Slots *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"mapping", "size", NULL};
    PyObject *mapping;
    Py_ssize_t size;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On", names, &mapping, &size)) {
        return -1;
    }
    let_go(self);
    self->next = 0;
    self->end = 0;
    if (mapping != Py_None) {
        if (PyObject_GetBuffer(mapping, &self->view, PyBUF_WRITABLE) < 0) {
            return -1;
        }
        if (size < 0 || size > self->view.len || (uintptr_t)self->view.buf % 8 != 0) {
            PyErr_Format(PyExc_ValueError, "%zd bytes of a mapping of %zd at %p cannot hold records", size, self->view.len,
                         self->view.buf);
            PyBuffer_Release(&self->view);
            return -1;
        }
        self->end = size - size % RECORD_SIZE;
    }
    return 0;
}

static void
slots_dealloc(Slots *self)
{
    PyTypeObject *type = Py_TYPE(self);
    let_go(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static int
has_room(PyObject *object)
{
    Slots *self = (Slots *)object;
    return self->next < self->end && self->view.obj != NULL;
}

static Py_ssize_t
take(PyObject *object, int64_t issue_ns, int64_t seq, const uint32_t interned[4], const char *tail)
{
    Slots *self = (Slots *)object;
    char *record = (char *)self->view.buf + self->next;
    Py_ssize_t index = self->next / 8;
    if (issue_ns == 0) {
        issue_ns = now_ns();
    }
    memcpy(record, &issue_ns, sizeof issue_ns);
    memset(record + sizeof issue_ns, 0, SEQUENCE - sizeof issue_ns);
    memcpy(record + SEQUENCE, &seq, sizeof seq);
    memcpy(record + INTERNED, interned, TAIL - INTERNED);
    memcpy(record + TAIL, tail, COMMIT - TAIL);
    uint32_t commit;
    memcpy(&commit, tail + (COMMIT - TAIL), sizeof commit);
    /* A process may be killed between any two instructions. */
    __atomic_store_n((uint32_t *)(record + COMMIT), commit, __ATOMIC_RELEASE);
    self->next += RECORD_SIZE;
    return index;
}

static int
stamp(PyObject *object, Py_ssize_t index)
{
    Slots *self = (Slots *)object;
    int64_t now = now_ns();
    if (self->view.obj != NULL) {
        if (index < 0 || index >= self->view.len / 8) {
            PyErr_Format(PyExc_IndexError, "word %zd of a mapping of %zd bytes", index, self->view.len);
            return -1;
        }
        ((int64_t *)self->view.buf)[index] = now;
        return 0;
    }
    PyObject *words = PyObject_GetAttrString(object, "words");
    PyObject *number = words == NULL ? NULL : PyLong_FromSsize_t(index);
    PyObject *value = number == NULL ? NULL : PyLong_FromLongLong(now);
    int result = value == NULL ? -1 : PyObject_SetItem(words, number, value);
    Py_XDECREF(value);
    Py_XDECREF(number);
    Py_XDECREF(words);
    return result;
}

PyDoc_STRVAR(take_doc,
             "take($self, issue_ns, seq, signature, tag, site, thread, tail, /)\n--\n\n"
             "Write a record into the next slot; the index of its first word, or -1 where there is no room.\n\n"
             "An ``issue_ns`` of 0 stands for now.");

static PyObject *
slots_take(Slots *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 7) {
        return PyErr_Format(PyExc_TypeError, "take() takes 7 arguments (%zd given)", count);
    }
    int64_t issue = PyLong_AsLongLong(args[0]);
    int64_t sequence = PyLong_AsLongLong(args[1]);
    if ((issue == -1 || sequence == -1) && PyErr_Occurred()) {
        return NULL;
    }
    uint32_t interned[4];
    for (int i = 0; i < 4; i++) {
        unsigned long number = PyLong_AsUnsignedLong(args[2 + i]);
        if (number > UINT32_MAX) { /* also true for an error, which is returned as (unsigned long)-1 */
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_OverflowError, "%lu does not fit 32 bits", number);
        }
        interned[i] = (uint32_t)number;
    }
    char *tail;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(args[6], &tail, &length) < 0) {
        return NULL;
    }
    if (length != TAIL_SIZE) {
        return PyErr_Format(PyExc_ValueError, "a tail of %zd bytes, where %d are expected", length, TAIL_SIZE);
    }
    if (!has_room((PyObject *)self)) {
        return PyLong_FromLong(-1);
    }
    return PyLong_FromSsize_t(take((PyObject *)self, issue, sequence, interned, tail));
}

PyDoc_STRVAR(stamp_doc,
             "stamp($self, index, /)\n--\n\n"
             "Write the time that it is now into the word at ``index``; through ``words`` where nothing is mapped.");

static PyObject *
slots_stamp(PyObject *self, PyObject *index)
{
    Py_ssize_t word = PyLong_AsSsize_t(index);
    if ((word == -1 && PyErr_Occurred()) || stamp(self, word) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(release_doc, "release($self, /)\n--\n\nLet go of the mapping: no slot is left, and ``end`` is what was used.");

static PyObject *
slots_release(Slots *self, PyObject *Py_UNUSED(none))
{
    let_go(self);
    Py_RETURN_NONE;
}

static PyObject *
slots_used(Slots *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(self->next);
}

static PyObject *
slots_end(Slots *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(self->end);
}

static PyMethodDef methods[] = {
    {"take", (PyCFunction)(void (*)(void))slots_take, METH_FASTCALL, take_doc},
    {"stamp", (PyCFunction)slots_stamp, METH_O, stamp_doc},
    {"release", (PyCFunction)slots_release, METH_NOARGS, release_doc},
    {NULL},
};

static PyGetSetDef attributes[] = {
    {"used", (getter)slots_used, NULL, "Bytes that hold records.", NULL},
    {"end", (getter)slots_end, NULL, "Bytes that there is room for.", NULL},
    {NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Slots(mapping, size)\n--\n\nRoom for records in the first ``size`` bytes of a mapping."},
    {Py_tp_init, slots_init},
    {Py_tp_dealloc, slots_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0},
};

static PyType_Spec spec = {
    .name = "commprof.trace._slots.Slots",
    .basicsize = sizeof(Slots),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};

static SlotsInterface interface = {NULL, has_room, take, stamp, now_ns};

static int
execute(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec); /* The interface keeps this reference. */
    if (type == NULL) {
        return -1;
    }
    interface.type = (PyTypeObject *)type;
    PyObject *capsule = PyCapsule_New(&interface, SLOTS_INTERFACE, NULL);
    int failed = capsule == NULL || PyModule_AddObjectRef(module, "INTERFACE", capsule) < 0;
    Py_XDECREF(capsule);
    failed = failed || PyModule_AddObjectRef(module, "Slots", type) < 0;
    return failed || PyModule_AddIntMacro(module, VERSION) < 0 ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "commprof.trace._slots",
    .m_doc = "Room for records in a part of a mapped file.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__slots(void)
{
    return PyModuleDef_Init(&module);
}

/* The common cases of the wrappers of ProcessGroup's methods, in C.
 *
 * DirectCall is the common case of DirectCalls.wrap (commprof.recorder.process_group.fast_path). GeneralCall is the
 * common case of Wrappers.wrap (commprof.recorder.process_group.wrappers). WaitCall is the common case of Waits.wrap
 * (commprof.recorder.process_group.handle_waits). Each follows the steps of the function in Python.
 *
 * In an unusual case, and if nothing has been counted so far, the C code calls the function in Python with the same
 * arguments, and this function does everything. Unusual cases are, for example, a call that is not known yet, a tag
 * that is not interned, or no free slot. The function in Python is therefore the reference for the behavior.
 */
#define PY_SSIZE_T_CLEAN
#include "../trace/_slots.h"

#include <structmember.h>

#include <stddef.h>
#include <string.h>

/* Increment this for every change of the arguments or results of this module.
 * commprof.recorder.process_group.compiled_calls requires a specific version. */
#define VERSION 5

/* The longest cost of a call in ns that is measured. The wall clock is used, because reading the clock for CPU time
 * takes longer than the code to be timed. If more time than this passes, the thread was not running, and the time is
 * not a cost of the recorder. */
#define LONGEST_NS 30000

static SlotsInterface *records;
static PyObject *shape_name, *dtype_name, *device_name, *is_cpu_name, *get_device_name, *state_name, *current_name, *interned_name, *number_name,
    *place_name, *timed_place_name, *base_name, *fault_name, *pass_on_name, *wait_name;
/* The depth of the program's frame. The frames of torch's function, its stand-in and its logging wrapper are between
 * the program and this code. */
static PyObject *depth;
/* The number of nested recorded calls that run on this thread. The C functions have no Python frames, so that they
 * have to report that they are running. See commprof.recorder.process_group.reentrancy. */
static _Thread_local int running;

/* The indices of the objects that a call keeps in ``held``. */
enum {
    PYTHON, /* the function in Python that handles all cases */
    ISSUE,  /* torch's method */
    GET_FRAME,
    FIND_SITE,
    KINDS, /* the address of a code object -> its kind; see CallSites */
    THREAD_LOCAL,
    JOURNAL,
    JOURNAL_KEY,
    PENDING,
    SETTLE,
    RECORD_RAISED,
    /* The class of the method. The function in Python handles calls on subclasses that a program defines in Python. */
    OWNER,
    /* DirectCall only. */
    LATEST,
    CALLS,
    DIRECT,
    FIND_DIRECT,
    /* GeneralCall only. */
    ENTRIES,
    FREEZERS,
    FREEZE_TENSOR,
    COUNT_EXTRA, /* or None */
    HELD
};

/* The kinds of code objects in KINDS. */
enum { PROGRAM, INTERNAL, API };

/* The size of the caches of previous results, which have one entry for each hash value modulo TABLE. The addresses of
 * code in these caches remain valid, because CallSites keeps references to the code objects. */
enum { TABLE = 64 };

typedef struct {
    const void *code; /* NULL: no entry */
    int kind;
} KnownCode;

typedef struct {
    const void *code, *api; /* the code of the program, and the code of the function of torch that was called */
    int last_instruction;
    uint32_t number; /* 0: no entry */
} KnownSite;

/* A row of CALLS that can be found without creating its key. The addresses are valid as long as the addresses in the
 * key. */
typedef struct {
    PyObject *key, *row; /* NULL: no entry */
    const void *pg, *code, *reduction;
    int last_instruction;
} KnownCall;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *dict;
    PyObject *weak_references;
    PyObject *held[HELD];
    KnownCode codes[TABLE];
    KnownSite sites[TABLE];
    KnownCall calls[TABLE]; /* DirectCall only */
    Py_ssize_t return_word, wait_begin_word, wait_end_word;
    Py_ssize_t sample, until_sample; /* The cost of our own code is measured in one of ``sample`` calls. */
    int is_paired, takes_none, has_accelerator; /* DirectCall only */
} Call;

/* A call that is about to be issued. References are owned unless a comment states otherwise. */
typedef struct {
    PyObject *segment; /* NULL: the call is not recorded */
    Py_ssize_t base;
    int is_async;
    int64_t begin_ns; /* the time at which the call began; 0: the cost of this call is not measured */
} Record;

/* Pass the current exception to a method of the journal and return 0, if our own code raised the exception. If the
 * program raised it (Ctrl-C, or an exception of a signal handler, while a Python function ran for us), the exception
 * remains set, because the method raises it again, and the result is -1. */
static int
tell_journal(Call *self, PyObject *method)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL) {
        PyException_SetTraceback(error, trace);
    }
    PyObject *result = PyObject_CallMethodOneArg(self->held[JOURNAL], method, error);
    Py_XDECREF(result);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return result == NULL ? -1 : 0;
}

/* Report a failure of our own code to the journal, which counts it. The training does not see this failure. */
static int
fault(Call *self)
{
    return tell_journal(self, fault_name);
}

/* Return the tensor that the caller passes to the method (borrowed), or NULL if the arguments are not those of
 * torch's function. */
static PyObject *
tensor_among(Call *self, PyObject *const *args)
{
    if (self->is_paired) {
        return args[2];
    }
    PyObject *list = args[1];
    return PyList_CheckExact(list) && PyList_GET_SIZE(list) == 1 ? PyList_GET_ITEM(list, 0) : NULL;
}

/* The known properties of a call. */
typedef struct {
    uint32_t signature, site;
    PyObject *counter, *group; /* owned; group: GeneralCall only */
    int is_async;
} Known;

/* Return the shape and dtype of a tensor as a tuple. */
static PyObject *
kind_of(PyObject *tensor)
{
    PyObject *shape = PyObject_GetAttr(tensor, shape_name);
    PyObject *dtype = shape == NULL ? NULL : PyObject_GetAttr(tensor, dtype_name);
    PyObject *kind = dtype == NULL ? NULL : PyTuple_Pack(2, shape, dtype);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return kind;
}

/* Return the index of an entry in a table of TABLE entries. */
static size_t
place_of(const void *address, int number)
{
    return ((uintptr_t)address / 16 * 31 + (size_t)number * 7) % TABLE;
}

/* Return whether an attribute of ``object`` is equal to ``expected``, or -1 with an exception if the comparison
 * fails. */
static int
has_equal(PyObject *object, PyObject *name, PyObject *expected)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int equal = value == NULL ? -1 : PyObject_RichCompareBool(value, expected, Py_EQ);
    Py_XDECREF(value);
    return equal;
}

/* Return whether a call from the call site of an entry matches the entry. This compares the parts of the key that are
 * not addresses. */
static int
is_known(Call *self, const KnownCall *entry, PyObject *const *args, PyObject *tensor, PyObject *asked)
{
    /* This reference is needed because comparisons may run code of the program, which may replace the entry. */
    PyObject *key = Py_NewRef(entry->key), *rest = PyTuple_GET_ITEM(key, 6);
    int equal = has_equal(tensor, shape_name, PyTuple_GET_ITEM(key, 1));
    equal = equal > 0 ? has_equal(tensor, dtype_name, PyTuple_GET_ITEM(key, 2)) : equal;
    if (equal > 0 && self->has_accelerator) {
        PyObject *device = PyObject_CallMethodNoArgs(tensor, get_device_name);
        equal = device == NULL ? -1 : PyObject_RichCompareBool(device, PyTuple_GET_ITEM(key, 3), Py_EQ);
        Py_XDECREF(device);
    }
    equal = equal > 0 ? PyObject_RichCompareBool(PyTuple_GET_ITEM(asked, 2), PyTuple_GET_ITEM(key, 5), Py_EQ) : equal;
    if (equal > 0 && self->is_paired) {
        equal = has_equal(args[1], shape_name, PyTuple_GET_ITEM(rest, 0));
        equal = equal > 0 ? has_equal(args[1], dtype_name, PyTuple_GET_ITEM(rest, 1)) : equal;
    } else if (equal > 0) {
        equal = PyObject_RichCompareBool(PyTuple_GET_ITEM(asked, 3), rest, Py_EQ);
    }
    Py_DECREF(key);
    return equal;
}

/* Return the row of a call in the table of all calls (a new reference to a tuple of four), and store its key in
 * ``*key``. The result is NULL, with or without an exception, if there is no row. */
static PyObject *
look_up(Call *self, PyObject *const *args, PyObject *tensor, PyObject *asked, const void *code, int last_instruction,
        PyObject **key)
{
    /* The parts of the key of DirectCalls.wrap, up to the first part that cannot be created. */
    PyObject *parts[] = {NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    enum { PARTS = sizeof parts / sizeof *parts };
    int is_whole =
        (parts[0] = PyLong_FromVoidPtr(args[0])) != NULL && (parts[1] = PyObject_GetAttr(tensor, shape_name)) != NULL
        && (parts[2] = PyObject_GetAttr(tensor, dtype_name)) != NULL
        && (parts[3] = self->has_accelerator ? PyObject_CallMethodNoArgs(tensor, get_device_name) : PyLong_FromLong(-1))
               != NULL
        && (parts[4] = PyLong_FromVoidPtr(PyTuple_GET_ITEM(asked, 1))) != NULL
        && (parts[5] = Py_NewRef(PyTuple_GET_ITEM(asked, 2))) != NULL
        && (parts[6] = self->is_paired ? kind_of(args[1]) : Py_NewRef(PyTuple_GET_ITEM(asked, 3))) != NULL
        && (parts[7] = PyLong_FromVoidPtr((void *)code)) != NULL
        && (parts[8] = PyLong_FromLong(last_instruction)) != NULL && (*key = PyTuple_New(PARTS)) != NULL;
    for (int i = 0; i < PARTS; i++) {
        if (is_whole) {
            PyTuple_SET_ITEM(*key, i, parts[i]);
        } else {
            Py_XDECREF(parts[i]);
        }
    }
    PyObject *row = is_whole ? PyDict_GetItemWithError(self->held[CALLS], *key) : NULL;
    return row != NULL && PyTuple_CheckExact(row) && PyTuple_GET_SIZE(row) == 4 ? Py_NewRef(row) : NULL;
}

/* Return the row of a direct call (a new reference to a tuple of four), or NULL, with or without an exception, if
 * there is no row. */
static PyObject *
find_row(Call *self, PyObject *const *args, PyObject *tensor, PyObject *asked)
{
    PyFrameObject *frame = (PyFrameObject *)PyObject_CallOneArg(self->held[GET_FRAME], depth);
    if (frame == NULL || !PyFrame_Check(frame)) {
        Py_XDECREF(frame);
        return NULL;
    }
    PyCodeObject *code = PyFrame_GetCode(frame);
    int last_instruction = PyFrame_GetLasti(frame);
    Py_DECREF(frame);
    KnownCall *entry = &self->calls[place_of(code, last_instruction)];
    PyObject *reduction = PyTuple_GET_ITEM(asked, 1), *row = NULL, *key = NULL;
    int known = 0;
    if (entry->row != NULL && entry->code == code && entry->last_instruction == last_instruction && entry->pg == args[0]
        && entry->reduction == reduction) {
        row = Py_NewRef(entry->row);
        known = is_known(self, entry, args, tensor, asked);
    }
    if (known == 0) {
        Py_XDECREF(row);
        row = look_up(self, args, tensor, asked, code, last_instruction, &key);
        if (row != NULL) {
            KnownCall before = *entry;
            *entry = (KnownCall){Py_NewRef(key), Py_NewRef(row), args[0], code, reduction, last_instruction};
            Py_XDECREF(before.key);
            Py_XDECREF(before.row);
        }
        Py_XDECREF(key);
    } else if (known < 0) {
        Py_CLEAR(row);
    }
    Py_DECREF(code);
    return row;
}

/* Return the number if it is positive and fits into 32 bits; otherwise return 0, with or without an exception. */
static uint32_t
positive(PyObject *number)
{
    unsigned long value = number != NULL && PyLong_CheckExact(number) ? PyLong_AsUnsignedLong(number) : 0;
    return value > UINT32_MAX ? 0 : (uint32_t)value;
}

/* Store the numbers of the thread and of its tag, and return 1. Return 0 if the function in Python has to determine
 * them. */
static int
find_thread(Call *self, uint32_t *thread, uint32_t *tag)
{
    PyObject *state = PyObject_GetAttr(self->held[THREAD_LOCAL], state_name);
    if (state == NULL) {
        return 0;
    }
    PyObject *number = PyObject_GetAttr(state, number_name);
    PyObject *current = number == NULL ? NULL : PyObject_GetAttr(state, current_name);
    Py_DECREF(state);
    *thread = positive(number);
    *tag = 0;
    int found = *thread != 0 && current != NULL;
    if (found && current != Py_None) {
        PyObject *interned = PyObject_GetAttr(current, interned_name);
        found = interned != NULL && PyTuple_CheckExact(interned) && PyTuple_GET_SIZE(interned) == 2
                && PyTuple_GET_ITEM(interned, 0) == self->held[JOURNAL_KEY];
        *tag = found ? positive(PyTuple_GET_ITEM(interned, 1)) : 0;
        found = found && *tag != 0;
        Py_XDECREF(interned);
    }
    Py_XDECREF(number);
    Py_XDECREF(current);
    return found;
}

/* Return the kind of a code object, or -1, with or without an exception, if the kind is not known. */
static int
kind_of_code(Call *self, PyCodeObject *code)
{
    KnownCode *entry = &self->codes[place_of(code, 0)];
    if (entry->code == code) {
        return entry->kind;
    }
    PyObject *address = PyLong_FromVoidPtr(code);
    PyObject *kind = address == NULL ? NULL : PyDict_GetItemWithError(self->held[KINDS], address);
    Py_XDECREF(address);
    long number = kind != NULL && PyLong_CheckExact(kind) ? PyLong_AsLong(kind) : -1;
    if (number != PROGRAM && number != INTERNAL && number != API) {
        return -1;
    }
    *entry = (KnownCode){code, (int)number};
    return (int)number;
}

/* Return the entry for the call site of this call in the program. The search is that of CallSites.find. The result is
 * NULL, with or without an exception, if the kind of a code object on the stack is not known. */
static KnownSite *
find_known_site(Call *self, KnownSite *wanted)
{
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    int kind = -1;
    wanted->api = NULL;
    while (frame != NULL) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        kind = kind_of_code(self, code);
        if (kind == API) {
            wanted->api = code;
        } else if (kind == PROGRAM) {
            wanted->code = code;
            wanted->last_instruction = PyFrame_GetLasti(frame);
        }
        Py_DECREF(code); /* CallSites keeps references to all code objects whose kind is known. */
        PyFrameObject *outer = kind == API || kind == INTERNAL ? PyFrame_GetBack(frame) : NULL;
        Py_DECREF(frame);
        frame = outer;
    }
    return kind == PROGRAM ? &self->sites[place_of(wanted->code, wanted->last_instruction)] : NULL;
}

/* Return the number of the call site in the program: ``known_site`` if it is a number, otherwise the result of a
 * search. The result is 0 if the call site is not found. */
static uint32_t
find_site(Call *self, PyObject *known_site)
{
    uint32_t site = known_site == NULL ? 0 : positive(known_site);
    if (site != 0 || PyErr_Occurred()) {
        return site;
    }
    KnownSite wanted, *entry = find_known_site(self, &wanted);
    if (entry == NULL && PyErr_Occurred()) {
        return 0;
    }
    if (entry != NULL && entry->number != 0 && entry->code == wanted.code && entry->api == wanted.api
        && entry->last_instruction == wanted.last_instruction) {
        return entry->number;
    }
    PyObject *frame = PyObject_CallNoArgs(self->held[GET_FRAME]);
    PyObject *number = frame == NULL ? NULL : PyObject_CallOneArg(self->held[FIND_SITE], frame);
    site = positive(number);
    if (entry != NULL && site != 0) {
        wanted.number = site;
        *entry = wanted;
    }
    Py_XDECREF(number);
    Py_XDECREF(frame);
    return site;
}

/* Store the known properties of a call of torch's own function, and return 1. Return 0 if some are not known. */
static int
find_direct_call(Call *self, PyObject *const *args, Py_ssize_t count, PyObject *names, Known *known)
{
    PyObject *latest = self->held[LATEST];
    if (names != NULL || count != (self->is_paired ? 4 : 3) || !PyList_CheckExact(latest) || PyList_GET_SIZE(latest) != 1) {
        return 0;
    }
    PyObject *asked = Py_NewRef(PyList_GET_ITEM(latest, 0));
    PyObject *tensor = tensor_among(self, args), *row = NULL;
    if (tensor != NULL && PyTuple_CheckExact(asked) && PyTuple_GET_SIZE(asked) == 4 && PyTuple_GET_ITEM(asked, 0) == tensor) {
        row = find_row(self, args, tensor, asked);
    }
    int found = row != NULL && (known->signature = positive(PyTuple_GET_ITEM(row, 0))) != 0
                && (known->site = find_site(self, PyTuple_GET_ITEM(row, 1))) != 0
                && (known->is_async = PyObject_IsTrue(PyTuple_GET_ITEM(asked, 2))) >= 0;
    if (found) {
        known->counter = Py_NewRef(PyTuple_GET_ITEM(row, 3));
    }
    Py_XDECREF(row);
    Py_DECREF(asked);
    return found;
}

static PyObject *freeze_all(Call *self, PyObject *const *values, Py_ssize_t count);

/* Freeze a value in the same way as commprof.recorder.process_group.signatures (a new reference). The result is NULL,
 * with or without an exception, if the value cannot be frozen. */
static PyObject *
freeze(Call *self, PyObject *value)
{
    if (value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyUnicode_CheckExact(value)) {
        return Py_NewRef(value);
    }
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
        if (Py_EnterRecursiveCall(" while a collective's arguments are read")) {
            return NULL;
        }
        /* Freezing an item may run code of the program, which may change the list. The tuple keeps the items
         * alive. */
        PyObject *items = PySequence_Tuple(value);
        PyObject *frozen = items == NULL ? NULL : freeze_all(self, &PyTuple_GET_ITEM(items, 0), PyTuple_GET_SIZE(items));
        Py_XDECREF(items);
        Py_LeaveRecursiveCall();
        return frozen;
    }
    PyObject *freezer = PyDict_GetItemWithError(self->held[FREEZERS], (PyObject *)Py_TYPE(value));
    if (freezer == NULL) {
        return NULL;
    }
    if (freezer != self->held[FREEZE_TENSOR]) {
        return PyObject_CallOneArg(freezer, value);
    }
    PyObject *names[] = {shape_name, dtype_name, is_cpu_name};
    PyObject *frozen = PyTuple_New(3);
    for (int i = 0; frozen != NULL && i < 3; i++) {
        PyObject *part = PyObject_GetAttr(value, names[i]);
        if (part == Py_False && names[i] == is_cpu_name) {
            Py_SETREF(part, PyObject_GetAttr(value, device_name));
        }
        if (part == NULL) {
            Py_CLEAR(frozen);
        } else {
            PyTuple_SET_ITEM(frozen, i, part);
        }
    }
    return frozen;
}

/* Freeze ``count`` values and return them as a tuple. */
static PyObject *
freeze_all(Call *self, PyObject *const *values, Py_ssize_t count)
{
    PyObject *frozen = PyTuple_New(count);
    for (Py_ssize_t i = 0; frozen != NULL && i < count; i++) {
        PyObject *part = freeze(self, values[i]);
        if (part == NULL) {
            Py_CLEAR(frozen);
        } else {
            PyTuple_SET_ITEM(frozen, i, part);
        }
    }
    return frozen;
}

/* Return the key of a call's signature: its frozen positional arguments, and its keyword arguments if there are
 * any. */
static PyObject *
key_of(Call *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    PyObject *positional = freeze_all(self, args, count);
    if (names == NULL || positional == NULL) {
        return positional;
    }
    Py_ssize_t named = PyTuple_GET_SIZE(names);
    PyObject *pairs = PyTuple_New(named);
    for (Py_ssize_t i = 0; pairs != NULL && i < named; i++) {
        PyObject *value = freeze(self, args[count + i]);
        PyObject *pair = value == NULL ? NULL : PyTuple_Pack(2, PyTuple_GET_ITEM(names, i), value);
        Py_XDECREF(value);
        if (pair == NULL) {
            Py_CLEAR(pairs);
        } else {
            PyTuple_SET_ITEM(pairs, i, pair);
        }
    }
    PyObject *key = pairs == NULL ? NULL : PyTuple_Pack(2, positional, pairs);
    Py_XDECREF(pairs);
    Py_DECREF(positional);
    return key;
}

/* Store the known properties of any call, and return 1. Return 0 if some are not known. */
static int
find_general_call(Call *self, PyObject *const *args, Py_ssize_t count, PyObject *names, Known *known)
{
    PyObject *address = count < 1 ? NULL : PyLong_FromVoidPtr(args[0]);
    /* The entry consists of a lookup, the group, the counter of the group's calls, and all signatures. */
    PyObject *entry = address == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(self->held[ENTRIES], address));
    Py_XDECREF(address);
    int found = entry != NULL && PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == 4
                && PyDict_CheckExact(PyTuple_GET_ITEM(entry, 3));
    PyObject *key = found ? key_of(self, args + 1, count - 1, names) : NULL;
    PyObject *number = key == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(PyTuple_GET_ITEM(entry, 3), key));
    found = number != NULL && (known->signature = positive(number)) != 0 && (known->site = find_site(self, NULL)) != 0;
    if (found) {
        known->is_async = 1;
        known->group = Py_NewRef(PyTuple_GET_ITEM(entry, 1));
        known->counter = Py_NewRef(PyTuple_GET_ITEM(entry, 2));
    }
    Py_XDECREF(number);
    Py_XDECREF(key);
    Py_XDECREF(entry);
    return found;
}

/* Count the additional sequence numbers that the backend uses for the current call. Return -1 if the program is
 * interrupted. */
static int
count_extra(Call *self, PyObject *group, PyObject *const *args, Py_ssize_t count)
{
    PyObject *given = PyTuple_New(count);
    for (Py_ssize_t i = 0; given != NULL && i < count; i++) {
        PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
    }
    PyObject *result =
        given == NULL ? NULL : PyObject_CallFunctionObjArgs(self->held[COUNT_EXTRA], group, given, NULL);
    int status = result == NULL ? fault(self) : 0;
    Py_XDECREF(result);
    Py_XDECREF(given);
    return status;
}

typedef int (*Finder)(Call *, PyObject *const *, Py_ssize_t, PyObject *, Known *);

/* Return whether there is a free slot at the place ``name``, an attribute of the journal. The references in
 * ``segment``, ``tail`` and ``follow`` are borrowed from ``place``, which the caller releases. */
static int
find_place(Call *self, PyObject *name, PyObject **place, PyObject **segment, PyObject **tail, PyObject **follow)
{
    Py_XSETREF(*place, PyObject_GetAttr(self->held[JOURNAL], name));
    Py_ssize_t parts = follow == NULL ? 2 : 3;
    if (*place == NULL || !PyTuple_CheckExact(*place) || PyTuple_GET_SIZE(*place) != parts) {
        return 0;
    }
    *segment = PyTuple_GET_ITEM(*place, 0);
    *tail = PyTuple_GET_ITEM(*place, 1);
    if (follow != NULL) {
        *follow = PyTuple_GET_ITEM(*place, 2);
    }
    return PyObject_TypeCheck(*segment, records->type) && PyBytes_CheckExact(*tail) && PyBytes_GET_SIZE(*tail) == TAIL_SIZE
           && records->has_room(*segment);
}

/* Return the object that the times of a call are written into (a new reference). This is ``segment``, or an object
 * that also creates events on a device. The result is NULL if the function in Python has to handle the call. */
static PyObject *
ask_for_times(PyObject *follow, uint32_t signature, PyObject *segment)
{
    PyObject *number = PyLong_FromUnsignedLong(signature);
    PyObject *arguments[3] = {NULL, number, segment};
    PyObject *times =
        number == NULL ? NULL : PyObject_Vectorcall(follow, arguments + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_XDECREF(number);
    if (times == Py_False) {
        Py_SETREF(times, Py_NewRef(segment));
    }
    if (times != NULL && !PyObject_TypeCheck(times, records->type)) {
        Py_CLEAR(times);
    }
    return times;
}

/* Store the position of the record in ``times``, and return whether this succeeded. */
static int
set_base(PyObject *times, PyObject *segment, Py_ssize_t base)
{
    if (times == segment) {
        return 1;
    }
    PyObject *number = PyLong_FromSsize_t(base);
    int status = number == NULL ? -1 : PyObject_SetAttr(times, base_name, number);
    Py_XDECREF(number);
    if (status < 0) {
        PyErr_Clear();
    }
    return status == 0;
}

/* Record the call and return 1. Return 0 if the function in Python has to handle the call; then nothing has been
 * counted. Return -1 if the program is interrupted. */
static int
begin_record(Call *self, PyObject *const *args, Py_ssize_t count, PyObject *names, Finder find, Record *record)
{
    record->begin_ns = self->until_sample <= 1 ? records->now_ns() : 0;
    Known known = {0};
    uint32_t thread = 0, tag = 0;
    int usual = count > 0 && (PyObject *)Py_TYPE(args[0]) == self->held[OWNER] && find(self, args, count, names, &known) && find_thread(self, &thread, &tag);
    PyObject *place = NULL, *segment = NULL, *tail = NULL, *number = NULL, *follow = NULL, *times = NULL;
    int64_t issue_ns = 0;
    if (usual) {
        usual = find_place(self, place_name, &place, &segment, &tail, NULL)
                || (!PyErr_Occurred() && find_place(self, timed_place_name, &place, &segment, &tail, &follow));
    }
    if (usual && follow != NULL) {
        /* Read the clock before the event is created, because the device may reach the event immediately. */
        issue_ns = records->now_ns();
        times = ask_for_times(follow, known.signature, segment);
        usual = times != NULL && records->has_room(segment);
    }
    /* From here on the call is counted. itertools.count runs no other code, so the slot is still free. */
    if (usual) {
        number = PyIter_Next(known.counter);
        int64_t seq = number == NULL ? -1 : PyLong_AsLongLong(number);
        usual = !PyErr_Occurred() && number != NULL && records->has_room(segment);
        if (usual) {
            uint32_t interned[4] = {known.signature, tag, known.site, thread};
            record->base = records->take(segment, issue_ns, seq, interned, PyBytes_AS_STRING(tail));
            record->segment = Py_NewRef(times != NULL && set_base(times, segment, record->base) ? times : segment);
            record->is_async = known.is_async;
            self->until_sample = record->begin_ns != 0 ? self->sample : self->until_sample - 1;
        }
    }
    Py_XDECREF(times);
    Py_XDECREF(number);
    Py_XDECREF(place);
    Py_XDECREF(known.counter);
    if (usual && self->held[COUNT_EXTRA] != NULL && self->held[COUNT_EXTRA] != Py_None
        && count_extra(self, known.group, args + 1, count - 1) < 0) {
        usual = -1;
        Py_CLEAR(record->segment);
    }
    Py_XDECREF(known.group);
    if (usual < 0) {
        return usual;
    }
    if (!usual && PyErr_Occurred()) {
        /* The exception is not counted here. The function in Python will raise it again and count it. */
        return tell_journal(self, pass_on_name);
    }
    return usual;
}

static PyObject *
token_of(const Record *record, int is_async)
{
    PyObject *base = PyLong_FromSsize_t(record->base);
    PyObject *token = base == NULL ? NULL : PyTuple_Pack(3, record->segment, base, is_async ? Py_True : Py_False);
    Py_XDECREF(base);
    return token;
}

/* Store the record under the address of the handle, so that a later wait for the handle finds the record. */
static int
remember(Call *self, const Record *record, PyObject *work, int is_async)
{
    if (work == Py_None) {
        return 0;
    }
    PyObject *address = PyLong_FromVoidPtr(work);
    PyObject *token = token_of(record, is_async);
    int result = address == NULL || token == NULL ? -1 : PyDict_SetItem(self->held[PENDING], address, token);
    Py_XDECREF(token);
    Py_XDECREF(address);
    return result;
}

/* Restore the exception that was set before our own code ran. If our own code was interrupted, the exception of the
 * interruption remains set, and the earlier exception becomes its context. */
static void
go_on(int interrupted, PyObject *type, PyObject *error, PyObject *trace)
{
    if (!interrupted || type == NULL) {
        if (!interrupted) {
            PyErr_Restore(type, error, trace);
        }
        return;
    }
    PyObject *newer_type, *newer, *newer_trace;
    PyErr_Fetch(&newer_type, &newer, &newer_trace);
    PyErr_NormalizeException(&newer_type, &newer, &newer_trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (newer != NULL && error != NULL && newer != error) {
        PyException_SetContext(newer, Py_NewRef(error));
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    PyErr_Restore(newer_type, newer, newer_trace);
}

/* Record that the call raised an exception. The exception remains set, unless the program is interrupted. */
static void
note_raised(Call *self, const Record *record, PyObject *pg)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL) {
        PyException_SetTraceback(error, trace);
    }
    PyObject *token = token_of(record, 0);
    PyObject *result =
        token == NULL ? NULL : PyObject_CallFunctionObjArgs(self->held[RECORD_RAISED], pg, token, error, NULL);
    int interrupted = result == NULL && fault(self) < 0;
    Py_XDECREF(result);
    Py_XDECREF(token);
    go_on(interrupted, type, error, trace);
}

/* Pass the record to the function SETTLE, which finishes a call whose cost is measured. */
static int
settle(Call *self, const Record *record, PyObject *work, int64_t cost_ns)
{
    PyObject *token = token_of(record, record->is_async);
    PyObject *cost = PyLong_FromLongLong(cost_ns > 0 ? cost_ns : 1);
    PyObject *result = token == NULL || cost == NULL
                           ? NULL
                           : PyObject_CallFunctionObjArgs(self->held[SETTLE], token, work, cost, NULL);
    Py_XDECREF(cost);
    Py_XDECREF(token);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Return the original function that our wrapper of the handle's ``wait`` wraps (a new reference). The result is NULL
 * if the method is not our wrapper. */
static PyObject *
find_wait(Call *self, PyObject *work)
{
    PyObject *kind = (PyObject *)Py_TYPE(work), *wait = NULL;
    PyObject *entry = Py_XNewRef(PyDict_GetItemWithError(self->held[DIRECT], kind));
    if (entry == NULL && !PyErr_Occurred()) {
        entry = PyObject_CallOneArg(self->held[FIND_DIRECT], kind);
    }
    if (entry != NULL && PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == 3) {
        PyObject *method = PyObject_GetItem(PyTuple_GET_ITEM(entry, 0), wait_name);
        if (method != NULL && method == PyTuple_GET_ITEM(entry, 1)) {
            wait = Py_NewRef(PyTuple_GET_ITEM(entry, 2));
        }
        Py_XDECREF(method);
    }
    Py_XDECREF(entry);
    return wait;
}

/* Finish the record of a call that returned ``work``, which the program may wait for. Return -1 if the program is
 * interrupted. */
static int
end_record(Call *self, const Record *record, PyObject *work, int64_t cost_ns)
{
    int failed;
    if (record->begin_ns != 0) {
        failed = settle(self, record, work, cost_ns);
    } else {
        failed = records->stamp(record->segment, record->base + self->return_word) < 0
                 || remember(self, record, work, record->is_async) < 0;
    }
    return failed ? fault(self) : 0;
}

/* Finish the record of a call of torch's own function. Return the object that this function gets instead of ``work``.
 * The reference to ``work`` is consumed. */
static PyObject *
end_direct_record(Call *self, const Record *record, PyObject *work, int64_t cost_ns)
{
    PyObject *wait = NULL;
    if (record->begin_ns != 0 || record->is_async || !self->takes_none) {
        if (end_record(self, record, work, cost_ns) < 0) {
            Py_CLEAR(work);
        }
        return work;
    }
    if (records->stamp(record->segment, record->base + self->return_word) == 0) {
        wait = find_wait(self, work);
        if (wait == NULL && !PyErr_Occurred()) {
            remember(self, record, work, 0);
        }
    }
    if (wait == NULL) {
        if (PyErr_Occurred() && fault(self) < 0) {
            Py_CLEAR(work);
        }
        return work;
    }
    PyObject *result = PyObject_CallOneArg(wait, work);
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    int interrupted = records->stamp(record->segment, record->base + self->wait_end_word) < 0 && fault(self) < 0;
    Py_DECREF(wait);
    Py_DECREF(work);
    Py_XDECREF(result);
    go_on(interrupted, type, error, trace);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* Return the cost of our own code so far in ns, if the cost of this call is measured, and 0 otherwise. */
static int64_t
cost_of(const Record *record)
{
    int64_t cost_ns = record->begin_ns != 0 ? records->now_ns() - record->begin_ns : 0;
    return cost_ns < LONGEST_NS ? cost_ns : LONGEST_NS;
}

static PyObject *
direct_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Call *self = (Call *)object;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    Record record = {0};
    int begun = begin_record(self, args, count, names, find_direct_call, &record);
    if (begun <= 0) {
        return begun < 0 ? NULL : PyObject_Vectorcall(self->held[PYTHON], args, flags, names);
    }
    running++;
    int64_t cost_ns = cost_of(&record);
    PyObject *work = PyObject_Vectorcall(self->held[ISSUE], args, count, NULL);
    if (work == NULL) {
        note_raised(self, &record, args[0]);
    } else {
        work = end_direct_record(self, &record, work, cost_ns);
    }
    running--;
    Py_DECREF(record.segment);
    return work;
}

static PyObject *
general_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Call *self = (Call *)object;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    Record record = {0};
    int begun = begin_record(self, args, count, names, find_general_call, &record);
    if (begun <= 0) {
        return begun < 0 ? NULL : PyObject_Vectorcall(self->held[PYTHON], args, flags, names);
    }
    running++;
    int64_t cost_ns = cost_of(&record);
    PyObject *work = PyObject_Vectorcall(self->held[ISSUE], args, count, names);
    if (work == NULL) {
        note_raised(self, &record, args[0]);
    } else if (end_record(self, &record, work, cost_ns) < 0) {
        Py_CLEAR(work);
    }
    running--;
    Py_DECREF(record.segment);
    return work;
}

/* Remove the token of a handle from the table, store it in ``*token`` (a new reference), and return 1. Return 0
 * if the handle has no token. Return -1, with or without an exception, if the token is unusual and remains in
 * the table. */
static int
take_token(Call *self, PyObject *work, PyObject **token)
{
    PyObject *address = PyLong_FromVoidPtr(work);
    PyObject *found = address == NULL ? NULL : Py_XNewRef(PyDict_GetItemWithError(self->held[PENDING], address));
    int status = found == NULL && !PyErr_Occurred() ? 0 : -1;
    if (found != NULL && PyTuple_CheckExact(found) && PyTuple_GET_SIZE(found) == 3
        && PyObject_TypeCheck(PyTuple_GET_ITEM(found, 0), records->type) && PyLong_CheckExact(PyTuple_GET_ITEM(found, 1))
        && PyBool_Check(PyTuple_GET_ITEM(found, 2)) && PyDict_DelItem(self->held[PENDING], address) == 0) {
        *token = Py_NewRef(found);
        status = 1;
    }
    Py_XDECREF(found);
    Py_XDECREF(address);
    return status;
}

static PyObject *
wait_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names)
{
    Call *self = (Call *)object;
    PyObject *token = NULL;
    int status = -1;
    /* For a class that a program derives in Python, C++ calls our wrapper again unless the wrapper has a Python
     * frame; see python_groups. The function in Python handles such classes. */
    if (PyVectorcall_NARGS(flags) == 1 && names == NULL && (PyObject *)Py_TYPE(args[0]) == self->held[OWNER]) {
        status = take_token(self, args[0], &token);
    }
    if (status < 0) {
        PyErr_Clear(); /* The error is a lack of memory, and the table has not changed. */
        return PyObject_Vectorcall(self->held[PYTHON], args, flags, names);
    }
    if (status == 0) { /* the program has waited for the handle before, or the call was not recorded */
        return PyObject_Vectorcall(self->held[ISSUE], args, 1, NULL);
    }
    PyObject *segment = PyTuple_GET_ITEM(token, 0), *result = NULL;
    Py_ssize_t base = PyLong_AsSsize_t(PyTuple_GET_ITEM(token, 1));
    if (PyTuple_GET_ITEM(token, 2) == Py_False || records->stamp(segment, base + self->wait_begin_word) == 0
        || fault(self) == 0) {
        result = PyObject_Vectorcall(self->held[ISSUE], args, 1, NULL);
        PyObject *type, *error, *trace;
        PyErr_Fetch(&type, &error, &trace);
        int interrupted = records->stamp(segment, base + self->wait_end_word) < 0 && fault(self) < 0;
        go_on(interrupted, type, error, trace);
        if (interrupted) {
            Py_CLEAR(result);
        }
    }
    Py_DECREF(token);
    return result;
}

PyDoc_STRVAR(forget_doc, "forget($self, /)\n--\n\nForget the calls that were found before: what an address is of has gone.");

static PyObject *
call_forget(Call *self, PyObject *Py_UNUSED(none))
{
    for (int i = 0; i < TABLE; i++) {
        KnownCall before = self->calls[i];
        self->calls[i] = (KnownCall){0};
        Py_XDECREF(before.key);
        Py_XDECREF(before.row);
    }
    Py_RETURN_NONE;
}

static void
hold(Call *self, const int *places, PyObject *const *given, int count)
{
    for (int i = 0; i < count; i++) {
        Py_XSETREF(self->held[places[i]], Py_NewRef(given[i]));
    }
}

/* The first arguments of DirectCall and GeneralCall, which are equal. */
#define COMMON_NAMES \
    "python", "issue", "get_frame", "find_site", "kinds", "thread_local", "journal", "journal_key", "pending", "settle", \
        "record_raised", "owner", "return_word", "sample"
#define COMMON_FORMAT "$OOOOO!OOOO!OOOnn"
#define COMMON_ADDRESSES \
    &given[0], &given[1], &given[2], &given[3], &PyDict_Type, &given[4], &given[5], &given[6], &given[7], &PyDict_Type, \
        &given[8], &given[9], &given[10], &given[11], &return_word, &sample
enum { COMMON = 12 };
static const int common_places[COMMON] = {PYTHON,  ISSUE,       GET_FRAME, FIND_SITE, KINDS,         THREAD_LOCAL,
                                          JOURNAL, JOURNAL_KEY, PENDING,   SETTLE,    RECORD_RAISED, OWNER};

static void
make_ready(Call *self, PyObject *const *given, Py_ssize_t return_word, Py_ssize_t sample, vectorcallfunc call)
{
    hold(self, common_places, given, COMMON);
    self->return_word = return_word;
    self->sample = self->until_sample = sample;
    self->vectorcall = call;
}

static int
direct_init(Call *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {COMMON_NAMES,    "wait_end_word", "latest",     "calls",           "direct",
                            "find_direct",   "is_paired",     "takes_none", "has_accelerator", NULL};
    static const int places[] = {LATEST, CALLS, DIRECT, FIND_DIRECT};
    PyObject *given[COMMON], *own[4];
    Py_ssize_t return_word, sample, wait_end_word;
    int is_paired, takes_none, has_accelerator;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, COMMON_FORMAT "nOO!O!Oppp", names, COMMON_ADDRESSES, &wait_end_word,
                                     &own[0], &PyDict_Type, &own[1], &PyDict_Type, &own[2], &own[3], &is_paired,
                                     &takes_none, &has_accelerator)) {
        return -1;
    }
    hold(self, places, own, 4);
    self->wait_end_word = wait_end_word;
    self->is_paired = is_paired;
    self->takes_none = takes_none;
    self->has_accelerator = has_accelerator;
    make_ready(self, given, return_word, sample, direct_call);
    return 0;
}

static int
general_init(Call *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {COMMON_NAMES, "entries", "freezers", "freeze_tensor", "count_extra", NULL};
    static const int places[] = {ENTRIES, FREEZERS, FREEZE_TENSOR, COUNT_EXTRA};
    PyObject *given[COMMON], *own[4];
    Py_ssize_t return_word, sample;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, COMMON_FORMAT "O!O!OO", names, COMMON_ADDRESSES, &PyDict_Type, &own[0],
                                     &PyDict_Type, &own[1], &own[2], &own[3])) {
        return -1;
    }
    hold(self, places, own, 4);
    make_ready(self, given, return_word, sample, general_call);
    return 0;
}

static int
wait_init(Call *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"python", "issue", "journal", "pending", "owner", "wait_begin_word", "wait_end_word", NULL};
    static const int places[] = {PYTHON, ISSUE, JOURNAL, PENDING, OWNER};
    PyObject *given[5];
    Py_ssize_t begin_word, end_word;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOO!Onn", names, &given[0], &given[1], &given[2], &PyDict_Type,
                                     &given[3], &given[4], &begin_word, &end_word)) {
        return -1;
    }
    hold(self, places, given, 5);
    self->wait_begin_word = begin_word;
    self->wait_end_word = end_word;
    self->vectorcall = wait_call;
    return 0;
}

/* Raise an exception. This is the call function of an object until __init__ has succeeded. */
static PyObject *
refuse(PyObject *Py_UNUSED(self), PyObject *const *Py_UNUSED(args), size_t Py_UNUSED(flags), PyObject *Py_UNUSED(names))
{
    PyErr_SetString(PyExc_RuntimeError, "this call was not made ready");
    return NULL;
}

static PyObject *
call_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    Call *self = (Call *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->vectorcall = refuse;
    }
    return (PyObject *)self;
}

static int
call_traverse(Call *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->dict);
    for (int i = 0; i < HELD; i++) {
        Py_VISIT(self->held[i]);
    }
    for (int i = 0; i < TABLE; i++) {
        Py_VISIT(self->calls[i].key);
        Py_VISIT(self->calls[i].row);
    }
    return 0;
}

static int
call_clear(Call *self)
{
    self->vectorcall = refuse;
    Py_CLEAR(self->dict);
    for (int i = 0; i < HELD; i++) {
        Py_CLEAR(self->held[i]);
    }
    Py_DECREF(call_forget(self, NULL));
    return 0;
}

static void
call_dealloc(Call *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (self->weak_references != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    call_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Bind like a function: the object that the method is called on becomes the first argument. */
static PyObject *
call_get(PyObject *self, PyObject *object, PyObject *Py_UNUSED(type))
{
    return object == NULL || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Call, vectorcall), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(Call, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Call, weak_references), READONLY, NULL},
    {NULL},
};

static PyGetSetDef attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};

static PyMethodDef call_methods[] = {
    {"forget", (PyCFunction)call_forget, METH_NOARGS, forget_doc},
    {NULL},
};

#define SLOTS(init) \
    { \
        {Py_tp_new, call_new}, {Py_tp_init, init}, {Py_tp_dealloc, call_dealloc}, {Py_tp_traverse, call_traverse}, \
            {Py_tp_clear, call_clear}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_descr_get, call_get}, \
            {Py_tp_members, members}, {Py_tp_getset, attributes}, {Py_tp_methods, call_methods}, {0}, \
    }
#define SPEC(type_name, type_slots) \
    { \
        .name = "commprof.recorder._calls." type_name, .basicsize = sizeof(Call), \
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, \
        .slots = type_slots, \
    }
static PyType_Slot direct_slots[] = SLOTS(direct_init), general_slots[] = SLOTS(general_init),
                   wait_slots[] = SLOTS(wait_init);
static PyType_Spec specs[] = {SPEC("DirectCall", direct_slots), SPEC("GeneralCall", general_slots),
                              SPEC("WaitCall", wait_slots)};

static int
execute(PyObject *module)
{
    static const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&shape_name, "shape"},       {&dtype_name, "dtype"},       {&device_name, "device"},
        {&is_cpu_name, "is_cpu"},     {&get_device_name, "get_device"},
        {&state_name, "state"},       {&current_name, "current"},   {&interned_name, "interned"},
        {&number_name, "recorder_number"}, {&place_name, "place"}, {&timed_place_name, "timed_place"}, {&base_name, "base"}, {&fault_name, "fault"},
        {&pass_on_name, "pass_on"}, {&wait_name, "wait"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (*names[i].name == NULL && (*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL) {
            return -1;
        }
    }
    if ((depth == NULL && (depth = PyLong_FromLong(3)) == NULL)
        || (records = PyCapsule_Import(SLOTS_INTERFACE, 0)) == NULL) {
        return -1;
    }
    static const char *const type_names[] = {"DirectCall", "GeneralCall", "WaitCall"};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        PyObject *type = PyType_FromSpec(&specs[i]);
        int failed = type == NULL || PyModule_AddObjectRef(module, type_names[i], type) < 0;
        Py_XDECREF(type);
        if (failed) {
            return -1;
        }
    }
    return PyModule_AddIntMacro(module, VERSION);
}

PyDoc_STRVAR(is_running_doc,
             "is_running($module, /)\n--\n\nWhether a call that is recorded here runs on this thread.");

static PyObject *
is_running(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(running > 0);
}

static PyMethodDef functions[] = {
    {"is_running", is_running, METH_NOARGS, is_running_doc},
    {NULL},
};

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "commprof.recorder._calls",
    .m_doc = "The wrappers of ProcessGroup's methods as they are called nearly always.",
    .m_methods = functions,
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__calls(void)
{
    return PyModuleDef_Init(&module);
}

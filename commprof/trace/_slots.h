/* What _slots.c gives to other compiled parts, in the capsule commprof.trace._slots.INTERFACE. */
#ifndef COMMPROF_SLOTS_H
#define COMMPROF_SLOTS_H

#include <Python.h>

#include <stdint.h>

#define SLOTS_INTERFACE "commprof.trace._slots.INTERFACE"
/* hatch_build.py takes both from the schema: commprof.trace.rank_files.layout.C_MACROS. */
#if !defined(RECORD_SIZE) || !defined(RECORD_SEQUENCE)
#error "RECORD_SIZE and RECORD_SEQUENCE are not defined; build with pip install"
#endif
/* What follows the number of eight bytes and the four interned values of four. */
#define TAIL_SIZE (RECORD_SIZE - RECORD_SEQUENCE - 24)

typedef struct {
    PyTypeObject *type;
    /* Whether a slot is left. */
    int (*has_room)(PyObject *slots);
    /* Write a record into the next slot, of which there is one; the index of its first word. Never fails.
     * interned: signature, tag, call site, thread. */
    Py_ssize_t (*take)(PyObject *slots, int64_t issue_ns, int64_t seq, const uint32_t interned[4], const char *tail);
    /* Write the time that it is now into the word at index; -1 and an exception where that fails. */
    int (*stamp)(PyObject *slots, Py_ssize_t index);
    int64_t (*now_ns)(void);
} SlotsInterface;

#endif

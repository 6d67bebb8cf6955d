/* The interface of _slots.c for other C modules, in the capsule commprof.trace._slots.INTERFACE. */
#ifndef COMMPROF_SLOTS_H
#define COMMPROF_SLOTS_H

#include <Python.h>

#include <stdint.h>

#define SLOTS_INTERFACE "commprof.trace._slots.INTERFACE"
/* hatch_build.py takes both macros from the schema (commprof.trace.rank_files.layout.C_MACROS). */
#if !defined(RECORD_SIZE) || !defined(RECORD_SEQUENCE)
#error "RECORD_SIZE and RECORD_SEQUENCE are not defined; build with pip install"
#endif
/* The size of the tail in bytes. The tail follows the sequence number (8 bytes) and the four interned values (4 bytes
 * each). */
#define TAIL_SIZE (RECORD_SIZE - RECORD_SEQUENCE - 24)

typedef struct {
    PyTypeObject *type;
    /* Return whether there is a free slot. */
    int (*has_room)(PyObject *slots);
    /* Write a record into the next slot and return the index of its first word. The caller has checked that there is
     * a free slot. This function never fails. interned: signature, tag, call site, thread. */
    Py_ssize_t (*take)(PyObject *slots, int64_t issue_ns, int64_t seq, const uint32_t interned[4], const char *tail);
    /* Write the current time into the word at index. Return 0, or -1 with an exception if this fails. */
    int (*stamp)(PyObject *slots, Py_ssize_t index);
    int64_t (*now_ns)(void);
} SlotsInterface;

#endif

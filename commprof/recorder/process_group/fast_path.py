"""The fast path for collectives that torch.distributed's own functions issue, from the call to the record.

Signature, call site, group and counter are looked up by one key; see also Note [the reduction, from torch's own
function].

Note [waiting at once]: in a synchronous call, a function of torch.distributed calls ``wait`` as soon as the
ProcessGroup's method has returned a handle. If the method returns None, the function assumes that the backend has
already waited. The wrapper therefore calls ``wait`` itself and returns None. The same two calls run in the same order,
and the recorder needs no table of handles and no second wrapper. This is done only for functions of torch that accept
None in this way, as a test call showed, and only while ``Work.wait`` is the same method as when recording began.
"""

from __future__ import annotations

import sys
import time
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

import torch

from commprof import hooks
from commprof.recorder.process_group.call_arguments import ApiFunction, ApiFunctions
from commprof.recorder.process_group.compiled_calls import compiled_call
from commprof.recorder.process_group.groups import Group
from commprof.recorder.process_group.handle_waits import unbound
from commprof.recorder.process_group.methods import Method, Shape
from commprof.recorder.process_group.signatures import MOST_CALLS
from commprof.trace.rank_files.segments import RETURN_WORD, WAIT_END_WORD

if TYPE_CHECKING:
    from commprof.recorder.process_group.wrappers import Entry, Wrappers

_MISSING: Final = object()
_PLAIN: Final = frozenset({int, bool, type(None), torch.dtype})
# One call in 251 measures the CPU time of our own code, because reading this clock is expensive. The number is odd,
# because segments contain multiples of 512 records.
COST_SAMPLE: Final = 251
_MOST_VALUES: Final = 300_000  # values in the keys of one table, about ten MB
_LOOK_EVERY: Final = 32  # the size is checked only every 32 keys, because counting a key's values takes long
# Without an accelerator, every tensor is on the CPU. The value depends on how torch was built. A query whether a device
# exists would initialize CUDA, and a program that forks its ranks afterwards could not use CUDA in the ranks.
_HAS_ACCELERATOR: Final = torch.accelerator.current_accelerator() is not None

# A call from one place in the program: signature, call site (0: searched at each call), group, counter of the calls. A
# plain tuple is used, because unpacking it costs half as much as unpacking a named tuple.
Known = tuple[int, int, Group, Any]


class DirectCalls:
    """Creates the wrappers for calls from torch.distributed's own functions; other calls use the general wrappers.

    Args:
        wrappers: The general wrappers, and the state that is shared with them.
    """

    def __init__(self, wrappers: Wrappers) -> None:
        self._wrappers = wrappers
        self._calls: list[dict[Any, Known]] = []
        self._compiled: list[Any] = []
        self._functions = ApiFunctions()

    def remove(self) -> None:
        """Restore torch's functions."""
        self._functions.remove()

    def forget(self, address: int) -> None:
        """Forget the ProcessGroup at ``address``, which was deleted. A new object may get the same address."""
        for calls in self._calls:
            for key in [key for key in calls if key[0] == address]:
                del calls[key]
        for compiled in self._compiled:
            compiled.forget()

    def wrap(  # noqa: C901 - see below
        self, method: Method, owner: type, original: Any, entries: dict[int, Entry], general: Any
    ) -> Any:
        """Return a wrapper for calls of ``method`` by a function of torch.distributed.

        The wrapper passes all other calls to ``general``.
        """
        api = self._functions.install(method.name)
        if api is None:
            return general
        wrappers, journal, waits = self._wrappers, self._wrappers.journal, self._wrappers.waits
        settle, pending, find_site = wrappers.settle, waits.pending, wrappers.sites.find
        get_frame, clock, cpu_clock = sys._getframe, time.perf_counter_ns, time.thread_time_ns
        return_word, wait_end_word = RETURN_WORD, WAIT_END_WORD
        thread_local, journal_key = hooks._thread, journal.key
        calls: dict[Any, Known] = {}
        self._calls.append(calls)
        learn, sample = self._learn, COST_SAMPLE
        latest, takes_none = self._functions.latest, api.takes_none
        paired = method.shape is Shape.OUTPUTS_INPUTS
        issue = unbound(original)
        direct, find_direct = waits.direct, waits.find_direct

        def call(  # noqa: C901 - flat: each call of a function that it makes is paid for by every collective
            pg: Any,
            first: Any = _MISSING,
            second: Any = _MISSING,
            third: Any = _MISSING,
            /,
            *rest: Any,
            **kwargs: Any,
        ) -> Any:
            tensor: Any
            caller = segment = start = None
            # Stage 1: is this the call of torch's function that noted its arguments? If not, use the general wrapper.
            asked, reduction, is_async, root = latest[0]
            if asked is not None and not rest and not kwargs and type(pg) is owner:
                try:
                    # These are the arguments that torch's function passes. A group class of the program may pass on
                    # more or fewer arguments.
                    if paired:
                        tensor = None if third is _MISSING else second
                    elif third is _MISSING and second is not _MISSING:
                        (tensor,) = first
                    else:
                        tensor = None
                    if tensor is asked:
                        # The frames between the program and this call are torch's function, its stand-in and its
                        # logging wrapper.
                        caller = get_frame(4)
                except (TypeError, ValueError):
                    pass
            if caller is None:
                return general(pg, *_given(first, second, third), *rest, **kwargs)
            try:
                # Stage 2: look up signature, call site, group and counter by one key.
                if paired:
                    root = first.shape, first.dtype
                key = (
                    id(pg),
                    tensor.shape,
                    tensor.dtype,
                    tensor.get_device() if _HAS_ACCELERATOR else -1,
                    id(reduction),
                    is_async,
                    root,
                    id(caller.f_code),
                    caller.f_lasti,
                )
                known = calls.get(key)
                if known is None:
                    arguments = _given(first, second, third)
                    known = learn(method, entries, calls, pg, key, arguments, get_frame(1), api, reduction)
                number, site, group, counter = known
                # Stage 3: write the record before the backend is called, so that a killed process has the record.
                mine = thread_local.state
                thread = mine.recorder_number or journal.intern_thread()
                tag = mine.current
                if tag is None:
                    tag_number = 0
                else:
                    interned = tag.interned
                    fresh = interned is None or interned[0] is not journal_key
                    tag_number = journal.intern_tag(tag) if fresh else interned[1]  # type: ignore[index]
                seq = next(counter)
                if not seq % sample:
                    start = cpu_clock()
                site = site or find_site(get_frame(1))
                segment, tail = journal.place
                base = segment.take(0, seq, number, tag_number, site, thread, tail)
                if base < 0:
                    segment, base = journal.append(group, clock(), seq, number, tag_number, site, thread)
                if start:
                    start = cpu_clock() - start
            except Exception as error:
                journal.fault(error)
                segment = None
            # Stage 4: make the program's own call, even if the recorder failed.
            try:
                work = issue(pg, first, second, third) if paired else issue(pg, first, second)
            except BaseException as error:
                wrappers.record_raised(pg, None if segment is None else (segment, base, False), error)
                raise
            if segment is None:
                return work
            if start:
                settle((segment, base, is_async), work, start)
                return work
            # Stage 5: complete the record; see Note [waiting at once].
            try:
                segment.stamp(base + return_word)
                if is_async or not takes_none:
                    if work is not None:
                        pending[id(work)] = segment, base, is_async
                    return work
                kind = type(work)
                methods, wrapper, wait = direct.get(kind) or find_direct(kind)
                if methods["wait"] is not wrapper:
                    if work is not None:
                        pending[id(work)] = segment, base, False
                    return work
            except Exception as error:
                journal.fault(error)
                return work
            try:
                wait(work)
            finally:
                try:
                    segment.stamp(base + wait_end_word)
                except Exception as error:
                    journal.fault(error)
            return None

        compiled: Any = compiled_call(
            "DirectCall",
            call,
            issue=issue,
            get_frame=get_frame,
            find_site=find_site,
            kinds=wrappers.sites.kinds,
            thread_local=thread_local,
            journal=journal,
            journal_key=journal_key,
            pending=pending,
            settle=wrappers.settle_quick,
            record_raised=wrappers.record_raised,
            return_word=return_word,
            sample=sample,
            wait_end_word=wait_end_word,
            latest=latest,
            calls=calls,
            direct=direct,
            find_direct=find_direct,
            is_paired=paired,
            takes_none=takes_none,
            has_accelerator=_HAS_ACCELERATOR,
            owner=owner,
        )
        if compiled is not call:
            self._compiled.append(compiled)
        return compiled

    def _learn(
        self,
        method: Method,
        entries: dict[int, Entry],
        calls: dict[Any, Known],
        pg: Any,
        key: Any,
        args: Any,
        frame: FrameType,
        api: ApiFunction,
        reduction: Any,
    ) -> Known:
        """Return the entry of a call at its first execution from a place in the program, and remember the entry.

        An address in the key is valid while a reference keeps its object alive, or a weak reference watches it. If the
        program calls torch through further functions of torch, the frame in the key is not a frame of the program. The
        call site is then searched at each call.
        """
        _, group, counter, signatures = self._wrappers.enter(method, entries, pg)
        signature_key = key[1:-2]
        is_sound = self._functions.hold(reduction) and _is_plain(signature_key)
        number = signatures.get(signature_key) if is_sound else None
        if number is None:
            number = self._wrappers.sign(method, group, args, {})
            if is_sound:
                remember(signatures, signature_key, number)
        sites = self._wrappers.sites
        site = sites.find(frame)
        caller = _caller(frame, api)
        if caller is None or not is_sound or not sites.holds(caller):
            return number, site, group, counter
        known = (number, site if sites.is_program(caller) else 0, group, counter)
        remember(calls, key, known)
        return known


def _caller(frame: FrameType, api: ApiFunction) -> CodeType | None:
    """Return the code that called ``api``; None if the frames are not as expected.

    The expected frames are, from ``frame`` outward, the function, its stand-in and its logging wrapper.
    """
    stand_in = frame.f_back if frame.f_code is api.code else None
    if stand_in is None or stand_in.f_code is not api.stand_in.__code__ or stand_in.f_back is None:
        return None
    caller = stand_in.f_back.f_back
    return None if caller is None else caller.f_code


def _is_plain(values: tuple[Any, ...]) -> bool:
    """Return whether ``values`` contains only plain values, because a program may pass any object as a flag or root."""
    return all(_is_plain(value) if isinstance(value, tuple) else type(value) in _PLAIN for value in values)


def remember(known: dict[Any, Any], key: Any, value: Any, most: int = MOST_CALLS) -> None:
    """Add an entry to a table, and empty the table first if it is too large.

    The limit is lower for long keys, which contain many splits.
    """
    size = len(known)
    if size > most or (not size % _LOOK_EVERY and size * _values_in(key) > _MOST_VALUES):
        known.clear()
    known[key] = value


def _values_in(key: Any) -> int:
    return sum(map(_values_in, key)) if isinstance(key, tuple) else 1


def _given(*values: Any) -> list[Any]:
    return [value for value in values if value is not _MISSING]

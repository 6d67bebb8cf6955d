"""The functions that stand in for the methods of ProcessGroup and Work. All of this is hot: it runs once per
collective.

Rules: the caller's call is made exactly once with the caller's own arguments; its result and its exceptions pass
through; whatever goes wrong in our own code is counted and forgotten. No tensor, Work or ProcessGroup is kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from operator import attrgetter
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

import torch
from torch._C._distributed_c10d import ReduceOp
from torch.distributed import c10d_logger, distributed_c10d

from commprof import hooks
from commprof.recorder.callsite import CallSites
from commprof.recorder.groups import Group
from commprof.recorder.journal import Journal
from commprof.recorder.methods import Method, Shape
from commprof.recorder.sequence import GLOO, GLOO_EXTRA
from commprof.recorder.signatures import describe, freeze
from commprof.trace.writer import (
    ISSUE,
    RETURN_WORD,
    WAIT_BEGIN_WORD,
    WAIT_END_WORD,
    Token,
    mark_raised,
)

_MISSING: Final = object()
_MOST_PENDING: Final = 4096  # handles that nobody waited for, remembered at most
_MOST_SIGNATURES: Final = 20_000  # distinct calls of one method on one group, remembered at most
# One call in 251 times our own code (CPU time: reading that clock is dear). Odd, since segments hold multiples of 512.
_COST_SAMPLE: Final = 251
_HAS_ACCELERATOR: Final = torch.accelerator.is_available()  # without one, every tensor is on the CPU
_MOST_REDUCTIONS: Final = 64
_CAPTURED: Final = 1 << 24
_UNSAMPLED_NS: Final = 1_300  # what a call spends before its sample begins and in the wait, measured once
_REDUCTIONS: Final = type(ReduceOp.SUM)

# What of a call's options its signature depends on, for the methods that torch.distributed calls all the time.
_OPTION_KEYS: Final[dict[str, Callable[[Any], Any]]] = {
    "allreduce": lambda options: (hash(options.reduceOp), options.asyncOp),
    "broadcast": attrgetter("asyncOp", "rootRank"),
    "reduce": lambda options: (hash(options.reduceOp), options.asyncOp, options.rootRank),
    "_allgather_base": attrgetter("asyncOp"),
    "all_gather_single": attrgetter("asyncOp"),
    "_reduce_scatter_base": lambda options: (hash(options.reduceOp), options.asyncOp),
    "reduce_scatter_single": lambda options: (hash(options.reduceOp), options.asyncOp),
}

# One group, as one method sees it: the signature of a key, the group, what numbers its calls, all signatures. A plain
# tuple, since unpacking it is half the cost of unpacking a named one.
Entry = tuple[Callable[[Any], "int | None"], Group, Any, "dict[Any, int]"]

# One all_reduce as it is issued from one place in the program: signature, call site, group, what numbers its calls.
Known = tuple[int, int, Group, Any]


class Wrappers:
    """Makes the wrappers of one recording.

    Args:
        journal: what the records go to.
        find_group: the group of a ProcessGroup; called at the first call of each method on each group.
    """

    def __init__(self, journal: Journal, find_group: Callable[[Any], Group]) -> None:
        self.journal = journal
        self.pending: dict[int, Token] = {}
        self._find_group = find_group
        self._entries: list[dict[int, Entry]] = []
        self._calls: dict[Any, Known] = {}
        self._reductions = _HeldReductions()
        self._sites = CallSites(lambda row: journal.intern("site", row))
        self._issue = _bind_issue(journal, self._sites)
        self._settle = _bind_settle(journal, self.pending)

    def forget(self, address: int) -> None:
        """The ProcessGroup at ``address`` is gone; another may get its address."""
        for entries in self._entries:
            entries.pop(address, None)
        for key in [key for key in self._calls if key[0] == address]:
            del self._calls[key]

    def wrap(self, method: Method, original: Any) -> Any:
        """What stands in for ``original``, the ProcessGroup method that ``method`` describes."""
        entries: dict[int, Entry] = {}
        self._entries.append(entries)
        general = self._wrap_general(method, original, entries)
        if method.name not in _OPTION_KEYS:
            return general
        if method.shape is Shape.OUTPUTS_INPUTS:
            return self._wrap_pair(method, original, entries, general)
        usual = self._wrap_buffers(method, original, entries, general)
        api_code = _all_reduce_code()
        if method.name != "allreduce" or api_code is None:
            return usual
        return self._wrap_all_reduce(method, original, entries, usual, api_code)

    def _enter(self, method: Method, entries: dict[int, Entry], pg: Any) -> Entry:
        """The entry of ``pg``, made at its first call of ``method``."""
        entry = entries.get(id(pg))
        if entry is None:
            group = self._find_group(pg)
            signatures: dict[Any, int] = {}
            counter = group.messages if method.is_p2p else group.collectives
            entry = entries[id(pg)] = (signatures.get, group, counter, signatures)
        return entry

    def _sign(self, method: Method, group: Group, args: Any, kwargs: Any) -> int:
        """The number of a call's signature."""
        row = describe(method, group, args, kwargs)
        if row["device"] not in (None, "cpu"):
            group.accelerated = group.special = True
        return self.journal.intern("signature", row)

    def _wrap_general(self, method: Method, original: Any, entries: dict[int, Entry]) -> Any:
        """Any method, any arguments."""
        journal, issue, settle = self.journal, self._issue, self._settle
        get_frame, clock = sys._getframe, time.perf_counter_ns
        extra = GLOO_EXTRA.get(method.name)
        blocks = method.name == "monitored_barrier"

        def call(pg: Any, /, *args: Any, **kwargs: Any) -> Any:
            token = None
            begin = clock()
            try:
                lookup, group, counter, signatures = self._enter(method, entries, pg)
                seq = next(counter)
                key = (freeze(args), freeze(tuple(kwargs.items()))) if kwargs else freeze(args)
                number = lookup(key)
                if number is None:
                    number = self._sign(method, group, args, kwargs)
                    _remember(signatures, key, number)
                    begin = clock()
                if extra is not None and group.backend_for(None) == GLOO:
                    group.extra += extra(group, args)
                token = issue(get_frame(1), group, seq, number)
                cost = 0 if seq % _COST_SAMPLE else clock() - begin
            except Exception as error:
                journal.fault(error)
            try:
                work = original(pg, *args, **kwargs)
            except BaseException:
                self._record_raised(pg, token)
                raise
            if token is not None:
                settle(token, work, cost)
                if blocks:
                    _record_block(journal, token, begin)
            return work

        return call

    def _wrap_buffers(self, method: Method, original: Any, entries: dict[int, Entry], general: Any) -> Any:
        """``method([tensor], options)``, as torch.distributed calls it; any other form goes to ``general``."""
        journal, issue, settle = self.journal, self._issue, self._settle
        get_frame, cpu_clock = sys._getframe, time.thread_time_ns
        option_key = _OPTION_KEYS[method.name]

        def call(
            pg: Any, tensors: Any = _MISSING, options: Any = _MISSING, /, *rest: Any, **kwargs: Any
        ) -> Any:
            if rest or kwargs or options is _MISSING or type(tensors) is not list or len(tensors) != 1:
                return general(pg, *_given(tensors, options), *rest, **kwargs)
            try:
                tensor = tensors[0]
                key = (tensor.shape, tensor.dtype, tensor.get_device(), option_key(options))
            except AttributeError:  # another overload: a reduction or a root in place of the options
                return general(pg, tensors, options)
            token = None
            start = 0
            try:
                lookup, group, counter, signatures = entries.get(id(pg)) or self._enter(method, entries, pg)
                seq = next(counter)
                if not seq % _COST_SAMPLE:
                    start = cpu_clock()
                number = lookup(key)
                if number is None:
                    start = 0  # what is done once is no sample of what each call costs
                    number = self._sign(method, group, (tensors, options), {})
                    _remember(signatures, key, number)
                token = issue(get_frame(1), group, seq, number)
                if start:
                    start = cpu_clock() - start
            except Exception as error:
                journal.fault(error)
            try:
                work = original(pg, tensors, options)
            except BaseException:
                self._record_raised(pg, token)
                raise
            if token is not None:
                settle(token, work, start)
            return work

        return call

    def _wrap_all_reduce(  # noqa: C901 - one flat function: each call that it makes is paid for by every all_reduce
        self, method: Method, original: Any, entries: dict[int, Entry], general: Any, api_code: CodeType
    ) -> Any:
        """The same for the collective that programs issue most, when ``torch.distributed.all_reduce`` calls it.

        Signature and call site are looked up together; see Note [the reduction, from torch's own frame].
        """
        journal, settle, pending = self.journal, self._settle, self.pending
        get_frame, clock, cpu_clock = sys._getframe, time.perf_counter_ns, time.thread_time_ns
        pack, thread_local, journal_key, return_word = (
            ISSUE.pack_into,
            hooks._thread,
            journal.key,
            RETURN_WORD,
        )
        calls, learn = self._calls, self._learn

        def call(
            pg: Any, tensors: Any = _MISSING, options: Any = _MISSING, /, *rest: Any, **kwargs: Any
        ) -> Any:
            frame = get_frame(1)
            if rest or kwargs or options is _MISSING or frame.f_code is not api_code:
                return general(pg, *_given(tensors, options), *rest, **kwargs)
            token = None
            start = 0
            try:
                (tensor,) = tensors
                arguments = frame.f_locals
                reduction, is_async = arguments["op"], arguments["async_op"]
                caller = get_frame(3)  # torch's logging wrapper stands between its functions and the program
                key = (
                    id(pg),
                    tensor.shape,
                    tensor.dtype,
                    tensor.get_device() if _HAS_ACCELERATOR else -1,
                    id(reduction),
                    is_async,
                    id(caller.f_code),
                    caller.f_lasti,
                )
                known = calls.get(key)
                if known is None:
                    known = learn(method, entries, pg, key, (tensors, options), frame, caller, reduction)
                number, site, group, counter = known
                seq = next(counter)
                if not seq % _COST_SAMPLE:
                    start = cpu_clock()
                mine = thread_local.state
                tag = mine.current
                if tag is None:
                    tag_number = 0
                else:
                    interned = tag.interned
                    fresh = interned is None or interned[0] is not journal_key
                    tag_number = journal.intern_tag(tag) if fresh else interned[1]  # type: ignore[index]
                thread = mine.recorder_number if mine.recorder is journal_key else journal.intern_thread()
                offsets, end, area, words, position, state = journal.place
                coalesce = 0
                if group.special:
                    coalesce, state = look_closer(group, state)
                offset = next(offsets)
                if offset < end:
                    base = offset >> 3
                    pack(
                        area,
                        offset,
                        clock(),
                        seq,
                        number,
                        tag_number,
                        site,
                        thread,
                        position,
                        coalesce,
                        state,
                    )
                else:
                    words, base = journal.append(
                        clock(), seq, number, tag_number, site, thread, position, coalesce, state
                    )
                token = words, base, is_async
                if start:
                    start = cpu_clock() - start
            except Exception as error:
                journal.fault(error)
            try:
                work = original(pg, tensors, options)
            except BaseException:
                self._record_raised(pg, token)
                raise
            if start:
                settle(token, work, start + _UNSAMPLED_NS)  # type: ignore[arg-type]
            elif token is not None:
                try:
                    words[base + return_word] = clock()
                    if work is not None:
                        pending[id(work)] = token
                except Exception as error:
                    journal.fault(error)
            return work

        return call

    def _learn(
        self,
        method: Method,
        entries: dict[int, Entry],
        pg: Any,
        key: Any,
        args: Any,
        frame: FrameType,
        caller: FrameType,
        reduction: Any,
    ) -> Known:
        """What is to be known about an all_reduce that is issued for the first time from its place in the program."""
        _, group, counter, _ = self._enter(method, entries, pg)
        known = (self._sign(method, group, args, {}), self._sites.find(frame), group, counter)
        # The addresses in the key are sound while what they belong to is held, or watched by a weak reference.
        if self._sites.holds(caller.f_code) and self._reductions.hold(reduction):
            if len(self._calls) > _MOST_SIGNATURES:
                self._calls.clear()
            self._calls[key] = known
        return known

    def _wrap_pair(self, method: Method, original: Any, entries: dict[int, Entry], general: Any) -> Any:
        """``method(output, input, options)`` with one tensor each, as torch.distributed calls it; else ``general``."""
        journal, issue, settle = self.journal, self._issue, self._settle
        get_frame, cpu_clock = sys._getframe, time.thread_time_ns
        option_key = _OPTION_KEYS[method.name]

        def call(
            pg: Any,
            output: Any = _MISSING,
            tensor: Any = _MISSING,
            options: Any = _MISSING,
            /,
            *rest: Any,
            **kwargs: Any,
        ) -> Any:
            if rest or kwargs or options is _MISSING:
                return general(pg, *_given(output, tensor, options), *rest, **kwargs)
            try:
                key = (
                    tensor.shape,
                    tensor.dtype,
                    tensor.get_device(),
                    output.shape,
                    output.dtype,
                    option_key(options),
                )
            except AttributeError:
                return general(pg, output, tensor, options)
            token = None
            start = 0
            try:
                lookup, group, counter, signatures = entries.get(id(pg)) or self._enter(method, entries, pg)
                seq = next(counter)
                if not seq % _COST_SAMPLE:
                    start = cpu_clock()
                number = lookup(key)
                if number is None:
                    start = 0
                    number = self._sign(method, group, (output, tensor, options), {})
                    _remember(signatures, key, number)
                token = issue(get_frame(1), group, seq, number)
                if start:
                    start = cpu_clock() - start
            except Exception as error:
                journal.fault(error)
            try:
                work = original(pg, output, tensor, options)
            except BaseException:
                self._record_raised(pg, token)
                raise
            if token is not None:
                settle(token, work, start)
            return work

        return call

    def _record_raised(self, pg: Any, token: Token | None) -> None:
        """The caller's call raised: it was most likely refused before the backend counted it."""
        try:
            self.journal.raised += 1
            self._find_group(pg).extra -= 1
            if token is not None:
                words, base, _ = token
                words[base + RETURN_WORD] = time.perf_counter_ns()
                mark_raised(token)
        except Exception as error:
            self.journal.fault(error)

    def wrap_wait(self, original: Any) -> Any:
        """What stands in for ``Work.wait``: the first wait of each handle is timed."""
        journal, take = self.journal, self.pending.pop
        clock = time.perf_counter_ns
        begin_word, end_word = WAIT_BEGIN_WORD, WAIT_END_WORD

        def wait(work: Any, timeout: Any = _MISSING) -> Any:
            token = take(id(work), None)
            if token is None:
                return original(work) if timeout is _MISSING else original(work, timeout)
            words, base, is_async = token
            try:
                if is_async:
                    words[base + begin_word] = clock()
                return original(work) if timeout is _MISSING else original(work, timeout)
            finally:
                try:
                    words[base + end_word] = clock()
                except Exception as error:
                    journal.fault(error)

        return wait


# Note [the reduction, from torch's own frame]
# Reading ``options.reduceOp`` costs 0.65 us of the 3 that a collective may cost: pybind ties the new object to the
# options (keep_alive). torch's all_reduce has the same value in its argument ``op``, and ``async_op`` beside
# it, so when the caller is exactly that function its arguments are read instead (0.4 us for both). They only
# make the key: the columns always come from the options. ``op`` is known by its address, which is sound because
# each enum value whose address is part of a key is held; with any other object nothing is remembered.


def _all_reduce_code() -> CodeType | None:
    """The code of torch's all_reduce, which is what calls ``ProcessGroup.allreduce``.

    None where it is not as it was when this was written: with these arguments, and in one logging wrapper.
    """
    function = distributed_c10d.all_reduce
    inner = getattr(function, "__wrapped__", None)
    if (
        not isinstance(function, FunctionType)
        or not isinstance(inner, FunctionType)
        or hasattr(inner, "__wrapped__")
    ):
        return None
    logged = function.__code__.co_filename == c10d_logger.__file__
    arguments = inner.__code__.co_varnames[: inner.__code__.co_argcount]
    return inner.__code__ if logged and {"op", "async_op"} <= set(arguments) else None


class _HeldReductions:
    """Keeps the enum values alive whose addresses are keys."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def hold(self, reduction: Any) -> bool:
        """Whether the address of ``reduction`` may be part of a key: it is held from now on."""
        if type(reduction) is not _REDUCTIONS or len(self._held) > _MOST_REDUCTIONS:
            return False
        self._held[id(reduction)] = reduction
        return True


def _remember(signatures: dict[Any, int], key: Any, number: int) -> None:
    if len(signatures) > _MOST_SIGNATURES:
        signatures.clear()
    signatures[key] = number


def _given(*values: Any) -> list[Any]:
    return [value for value in values if value is not _MISSING]


def _record_block(journal: Journal, token: Token, start: int) -> None:
    """A call that only returns when all ranks have come: the program waited all through it."""
    try:
        words, base, _ = token
        words[base + WAIT_BEGIN_WORD] = start
        words[base + WAIT_END_WORD] = words[base + RETURN_WORD]
    except Exception as error:
        journal.fault(error)


def _bind_settle(journal: Journal, pending: dict[int, Token]) -> Callable[[Token, Any, int], None]:
    """The function that completes a record when its call has returned."""
    clock = time.perf_counter_ns

    def settle(token: Token, work: Any, cost: int) -> None:
        try:
            words, base, _ = token
            words[base + RETURN_WORD] = now = clock()
            if work is not None:
                pending[id(work)] = token
            if cost:
                while len(pending) > _MOST_PENDING:
                    pending.pop(next(iter(pending)), None)
                journal.cost_samples += 1
                journal.cost_ns += cost + clock() - now
        except Exception as error:
            journal.fault(error)

    return settle


def _bind_issue(journal: Journal, sites: CallSites) -> Callable[[Any, Group, int, int], Token]:
    """The function that packs a record, for the methods that are not on the hot path."""
    find_site, clock = sites.find, time.perf_counter_ns
    thread_local, journal_key = hooks._thread, journal.key

    def issue(frame: Any, group: Group, seq: int, signature: int) -> Token:
        mine = thread_local.state
        tag = mine.current
        tag_number = 0
        if tag is not None:
            interned = tag.interned
            fresh = interned is None or interned[0] is not journal_key
            tag_number = journal.intern_tag(tag) if fresh else interned[1]  # type: ignore[index]
        thread = mine.recorder_number if mine.recorder is journal_key else journal.intern_thread()
        site = find_site(frame)
        offsets, end, area, words, position, state = journal.place
        coalesce, state = look_closer(group, state)
        offset = next(offsets)
        if offset >= end:
            words, base = journal.append(
                clock(), seq, signature, tag_number, site, thread, position, coalesce, state
            )
            return words, base, True
        ISSUE.pack_into(
            area, offset, clock(), seq, signature, tag_number, site, thread, position, coalesce, state
        )
        return words, offset >> 3, True

    return issue


_is_capturing: Final = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def look_closer(group: Group, state: int) -> tuple[int, int]:
    """The coalescing block that a call belongs to, and its state word with the mark of a captured CUDA graph."""
    if group.accelerated and _is_capturing is not None and torch.cuda.is_initialized() and _is_capturing():
        state |= _CAPTURED
    return group.coalesce_id, state

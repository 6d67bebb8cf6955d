"""The functions that stand in for the methods of ProcessGroup and Work. All of this is hot: it runs once per
collective.

Rules: the caller's call is made exactly once with the caller's own arguments; its result and its exceptions pass
through; whatever goes wrong in our own code is counted and forgotten. No tensor, Work or ProcessGroup is kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch

from commprof import hooks
from commprof.recorder.arguments import OPTION_KEYS, ApiFunction, HeldReductions, find_api_function
from commprof.recorder.callsite import CallSites
from commprof.recorder.groups import Group
from commprof.recorder.journal import PROCESS_GROUP, Journal
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
# What a call spends before its sample begins and in the wait, measured once, less what reading that clock costs itself.
_UNSAMPLED_NS: Final = 1_300

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
        layer: what the records say about who saw them, as a position in ``LAYERS``.
        pending: the handles that nobody has waited for yet, where others share them.
    """

    def __init__(
        self,
        journal: Journal,
        find_group: Callable[[Any], Group],
        layer: int = PROCESS_GROUP,
        pending: dict[int, Token] | None = None,
    ) -> None:
        self.journal = journal
        self.pending: dict[int, Token] = {} if pending is None else pending
        self._find_group = find_group
        self._entries: list[dict[int, Entry]] = []
        self._calls: list[dict[Any, Known]] = []
        self._reductions = HeldReductions()
        self._sites = CallSites(lambda row: journal.intern("site", row))
        self._layer = layer
        self._issue = _bind_issue(journal, self._sites, layer)
        self._settle = _bind_settle(journal, self.pending)

    def forget(self, address: int) -> None:
        """The ProcessGroup at ``address`` is gone; another may get its address."""
        for entries in self._entries:
            entries.pop(address, None)
        for calls in self._calls:
            for key in [key for key in calls if key[0] == address]:
                del calls[key]

    def wrap(self, method: Method, original: Any) -> Any:
        """What stands in for ``original``, the ProcessGroup method that ``method`` describes."""
        entries: dict[int, Entry] = {}
        self._entries.append(entries)
        general = self._wrap_general(method, original, entries)
        if method.name not in OPTION_KEYS or self._layer != PROCESS_GROUP:
            return general
        api = find_api_function(method.name)
        return general if api is None else self._wrap_direct(method, original, entries, general, api)

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
        number = self.journal.intern("signature", row)
        if row["device"] not in (None, "cpu"):
            group.accelerated = True
            self.journal.look_closer(group)
            self.journal.device_times.learn(number, row["device"], row["is_async"])
        return number

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

    def _wrap_direct(  # noqa: C901 - see below
        self, method: Method, original: Any, entries: dict[int, Entry], general: Any, api: ApiFunction
    ) -> Any:
        """``method`` as the one function of torch.distributed calls it that calls it all the time; else ``general``.

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
        calls: dict[Any, Known] = {}
        self._calls.append(calls)
        learn = self._learn
        api_code, arguments = api
        option_key = OPTION_KEYS[method.name]
        paired = method.shape is Shape.OUTPUTS_INPUTS

        def call(  # noqa: C901 - flat: each call of a function that it makes is paid for by every collective
            pg: Any,
            first: Any = _MISSING,
            second: Any = _MISSING,
            third: Any = _MISSING,
            /,
            *rest: Any,
            **kwargs: Any,
        ) -> Any:
            frame = get_frame(1)
            if rest or kwargs or frame.f_code is not api_code:
                return general(pg, *_given(first, second, third), *rest, **kwargs)
            token = start = None
            try:
                caller = get_frame(3)  # torch's logging wrapper stands between its functions and the program
                if arguments is None:
                    reduction = None
                    is_async = root = option_key(third if paired else second)
                else:
                    reduction, is_async, root = arguments(frame.f_locals)
                if paired:
                    tensor = second
                    root = root, first.shape, first.dtype
                else:
                    (tensor,) = first
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
                    given = _given(first, second, third)
                    known = learn(method, entries, calls, pg, key, given, frame, caller, reduction)
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
                thread = mine.recorder_number or journal.intern_thread()
                offsets, end, area, words, tail = journal.place
                offset = next(offsets)
                if offset < end:
                    base = offset >> 3
                    pack(area, offset, clock(), seq, number, tag_number, site, thread, tail)
                else:
                    words, base = journal.append(group, clock(), seq, number, tag_number, site, thread)
                token = words, base, is_async
                if start:
                    start = cpu_clock() - start
            except Exception as error:
                journal.fault(error)
            try:
                work = original(pg, first, second, third) if paired else original(pg, first, second)
            except BaseException:
                self._record_raised(pg, token)
                raise
            if start:
                settle(token, work, start)  # type: ignore[arg-type]
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
        calls: dict[Any, Known],
        pg: Any,
        key: Any,
        args: Any,
        frame: FrameType,
        caller: FrameType,
        reduction: Any,
    ) -> Known:
        """What is to be known about a call that is issued for the first time from its place in the program.

        The addresses in the key are sound while what they belong to is held, or watched by a weak reference. A call that
        the program makes through more of torch is not remembered: the frame in the key is not the program's then.
        """
        _, group, counter, signatures = self._enter(method, entries, pg)
        held = reduction is None or self._reductions.hold(reduction)
        signature_key = key[1:-2]
        number = signatures.get(signature_key) if held else None
        if number is None:
            number = self._sign(method, group, args, {})
            if held:
                _remember(signatures, signature_key, number)
        known = (number, self._sites.find(frame), group, counter)
        if held and self._sites.is_program(caller.f_code):
            _remember(calls, key, known)
        return known

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


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) > _MOST_SIGNATURES:
        known.clear()
    known[key] = value


def _cost_of_reading(clock: Callable[[], int]) -> int:
    """Nanoseconds between two reads of ``clock``, one right after the other."""
    return min(-(clock() - clock()) for _ in range(20))


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
    unsampled = _UNSAMPLED_NS - _cost_of_reading(time.thread_time_ns)

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
                journal.cost_ns += max(0, cost + unsampled) + clock() - now
                journal.completion.sample(token, work)
        except Exception as error:
            journal.fault(error)

    return settle


def _bind_issue(journal: Journal, sites: CallSites, layer: int) -> Callable[[Any, Group, int, int], Token]:
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
        thread = mine.recorder_number or journal.intern_thread()
        site = find_site(frame)
        words, base = journal.append(group, clock(), seq, signature, tag_number, site, thread, layer=layer)
        return words, base, True

    return issue

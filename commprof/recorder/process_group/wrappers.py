"""The general wrappers of ProcessGroup's and Work's methods. This code is on the hot path: it runs once per collective.

A wrapper makes the caller's call exactly once, with the caller's own arguments, and passes on its result and its
exceptions. Faults of the recorder's own code are counted and never raised. The wrappers keep no reference to a tensor,
Work or ProcessGroup.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from commprof import hooks
from commprof.program_exceptions import is_interruption
from commprof.recorder.coverage.sequence import GLOO, GLOO_EXTRA, count_raised
from commprof.recorder.process.journal import PROCESS_GROUP, Journal
from commprof.recorder.process_group.callsite import CallSites
from commprof.recorder.process_group.compiled_calls import compiled_call
from commprof.recorder.process_group.fast_path import COST_SAMPLE, DirectCalls, remember
from commprof.recorder.process_group.groups import Group
from commprof.recorder.process_group.handle_waits import Waits, unbound
from commprof.recorder.process_group.methods import Method
from commprof.recorder.process_group.python_groups import caller_of
from commprof.recorder.process_group.signatures import FREEZERS, Signer, freeze, freeze_tensor, most_known
from commprof.trace.rank_files.segments import RETURN_WORD, WAIT_BEGIN_WORD, WAIT_END_WORD, Token

# The time (ns) that a call spends outside its sampled part, measured once (see benchmarks/recorder_cost.py).
# The time that a sampled call spends on its own sample runs on cold code, and is not representative of other calls.
_UNSAMPLED_NS: Final = 900
_UNSAMPLED_QUICK_NS: Final = 400  # the same for the compiled wrapper

# The state of one method for one group: the lookup of a signature by its key, the group, the counter of its calls, and
# all signatures. A plain tuple is used, because unpacking it costs half as much as unpacking a named tuple.
Entry = tuple[Callable[[Any], "int | None"], Group, Any, "dict[Any, int]"]


class Wrappers:
    """Creates the wrappers of one recording.

    Args:
        journal: The journal that receives the records.
        find_group: A function that returns the group of a ProcessGroup. It is called at the first call of each method
            on each group.
        layer: The layer of the records, as a position in ``LAYERS``.
        pending: The table of handles without a wait, if it is shared with other wrappers; None for a new table.
    """

    def __init__(
        self,
        journal: Journal,
        find_group: Callable[[Any], Group],
        layer: int = PROCESS_GROUP,
        pending: dict[int, Token] | None = None,
    ) -> None:
        self.journal = journal
        self.waits = Waits(journal, pending)
        self.pending = self.waits.pending
        self._find_group = find_group
        self.sign = Signer(journal).sign
        self._entries: list[dict[int, Entry]] = []
        self.sites = CallSites(lambda row: journal.intern("site", row))
        self._layer = layer
        self.issue = _bind_issue(journal, self.sites, layer)
        self.settle = _bind_settle(journal, self.waits, _UNSAMPLED_NS - _cost_of_reading(time.thread_time_ns))
        self.settle_quick = _bind_settle(journal, self.waits, _UNSAMPLED_QUICK_NS)
        self._direct = DirectCalls(self)

    def forget(self, address: int) -> None:
        """Forget the ProcessGroup at ``address``, which was deleted. A new object may get the same address."""
        for entries in self._entries:
            entries.pop(address, None)
        self._direct.forget(address)

    def wrap(self, method: Method, owner: type, original: Any) -> Any:
        """Return a wrapper for ``original``, the method ``method`` of ``owner`` (ProcessGroup or Backend)."""
        entries: dict[int, Entry] = {}
        self._entries.append(entries)
        general = self._wrap_general(method, owner, original, entries)
        if self._layer != PROCESS_GROUP:
            return general
        return self._direct.wrap(method, owner, original, entries, general)

    def remove(self) -> None:
        """Restore torch's functions that the wrappers replaced, and forget the handles."""
        self._direct.remove()
        self.pending.clear()

    def enter(self, method: Method, entries: dict[int, Entry], pg: Any) -> Entry:
        """Return the entry of ``pg``, which is created at the first call of ``method`` on ``pg``."""
        entry = entries.get(id(pg))
        if entry is None:
            group = self._find_group(pg)
            signatures: dict[Any, int] = {}
            counter = group.messages if method.is_p2p else group.collectives
            entry = entries[id(pg)] = (signatures.get, group, counter, signatures)
        return entry

    def _wrap_general(self, method: Method, owner: type, original: Any, entries: dict[int, Entry]) -> Any:
        """Return a wrapper that accepts any method and any arguments."""
        journal, issue, settle = self.journal, self.issue, self.settle
        get_frame, clock = sys._getframe, time.perf_counter_ns
        extra = GLOO_EXTRA.get(method.name)
        count_extra = None if extra is None else _bind_count_extra(extra)
        blocks, most = method.blocks, most_known(method)
        function = unbound(original)
        beneath = caller_of(method.name, function)

        def call(pg: Any, /, *args: Any, **kwargs: Any) -> Any:
            token = None
            begin = clock()
            # The record is written before the backend is called, so that a killed process has the record.
            try:
                lookup, group, counter, signatures = self.enter(method, entries, pg)
                seq = next(counter)
                key = (freeze(args), freeze(tuple(kwargs.items()))) if kwargs else freeze(args)
                number = lookup(key)
                if number is None:
                    number = self.sign(method, group, args, kwargs, None if kwargs else key)
                    if journal.may_repeat(number):
                        remember(signatures, key, number, most)
                    begin = clock()
                if count_extra is not None:
                    count_extra(group, args)
                token = issue(get_frame(1), group, seq, number)
                cost = 0 if seq % COST_SAMPLE else clock() - begin
            except Exception as error:
                journal.fault(error)
            # Make the program's own call, even if the recorder failed.
            try:
                work = (function if type(pg) is owner else beneath)(pg, *args, **kwargs)
            except BaseException as error:
                self.record_raised(pg, token, error)
                raise
            if token is not None:
                settle(token, work, cost)
                if blocks:
                    _record_block(journal, token, begin)
            return work

        if self._layer != PROCESS_GROUP or blocks:
            return call
        return compiled_call(
            "GeneralCall",
            call,
            issue=function,
            get_frame=get_frame,
            find_site=self.sites.find,
            kinds=self.sites.kinds,
            thread_local=hooks._thread,
            journal=journal,
            journal_key=journal.key,
            pending=self.pending,
            settle=self.settle_quick,
            record_raised=self.record_raised,
            return_word=RETURN_WORD,
            sample=COST_SAMPLE,
            entries=entries,
            freezers=FREEZERS,
            freeze_tensor=freeze_tensor,
            count_extra=count_extra,
            owner=owner,
        )

    def wrap_wait(self, owner: type, original: Any) -> Any:
        """Return a wrapper for ``original``, the ``wait`` method of ``owner``, a class of handles."""
        return self.waits.wrap(owner, original)

    def record_raised(self, pg: Any, token: Token | None, error: BaseException) -> None:
        """Mark the record of a call that raised ``error``.

        An interruption is ignored, because it arrives when the backend already has the call.
        """
        try:
            if is_interruption(error):
                return
            self.journal.raised += 1
            count_raised(self._find_group(pg))
            if token is not None:
                self.journal.mark_raised(token)
        except Exception as fault:
            self.journal.fault(fault)


def _cost_of_reading(clock: Callable[[], int]) -> int:
    """Return the time in ns between two consecutive reads of ``clock``."""
    return min(-(clock() - clock()) for _ in range(20))


def _record_block(journal: Journal, token: Token, start: int) -> None:
    """Write the wait of a call that returns only when all ranks have arrived: the wait is the whole call."""
    try:
        words, base, _ = token
        words[base + WAIT_BEGIN_WORD] = start
        words[base + WAIT_END_WORD] = words[base + RETURN_WORD]
    except Exception as error:
        journal.fault(error)


def _bind_count_extra(extra: Callable[[Group, Sequence[Any]], int]) -> Callable[[Group, Sequence[Any]], None]:
    """Return a function that adds the number that gloo counts in addition to one for a call."""

    def count_extra(group: Group, args: Sequence[Any]) -> None:
        if group.backend_for(None) == GLOO:
            group.extra += extra(group, args)

    return count_extra


def _bind_settle(journal: Journal, waits: Waits, unsampled_ns: int) -> Callable[[Token, Any, int], None]:
    """Return a function that completes a record when its call has returned."""
    clock, pending = time.perf_counter_ns, waits.pending

    def settle(token: Token, work: Any, cost: int) -> None:
        try:
            words, base, _ = token
            words[base + RETURN_WORD] = clock()
            if work is not None:
                pending[id(work)] = token
            if cost:
                waits.evict()
                journal.cost_samples += 1
                journal.cost_ns += max(0, cost + unsampled_ns)
                journal.completion.sample(token, work)
        except Exception as error:
            journal.fault(error)

    return settle


def _bind_issue(journal: Journal, sites: CallSites, layer: int) -> Callable[[Any, Group, int, int], Token]:
    """Return a function that packs a record, for the methods that are not on the fast path."""
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

"""Wrapping the collective methods of torch's ProcessGroup class, so that each call becomes one record.

All of torch.distributed, FSDP, DeepSpeed and zero_runtime issue their collectives through these methods; no method calls another
through Python, so nothing is counted twice. C++ issuers (DDP's reducer) enter below; the self-check tells of them.

Rules of the wrappers: the caller's call is made exactly once with the caller's own arguments; its result and its exceptions pass
through; whatever goes wrong in our own code is counted and forgotten. No tensor, Work or ProcessGroup is kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from commprof import hooks
from commprof.recorder.callsite import API, PROGRAM, CallSites
from commprof.recorder.groups import Group, Groups
from commprof.recorder.journal import Journal
from commprof.recorder.methods import METHODS, Method, Shape
from commprof.recorder.signatures import describe, freeze
from commprof.trace.writer import (
    ISSUE,
    RECORD_WORDS,
    RETURN_WORD,
    WAIT_BEGIN_WORD,
    WAIT_END_WORD,
    Token,
    mark_raised,
)

_MISSING: Final = object()
_MOST_PENDING: Final = 4096  # handles that nobody waited for, remembered at most
_MOST_SIGNATURES: Final = 20_000  # distinct calls of one method on one group, remembered at most
_COST_SAMPLE_MASK: Final = 63  # one call in 64 times our own code
_RECORD_BYTES: Final = RECORD_WORDS * 8

# What of a call's options the signature depends on. hash() of a ReduceOp is its number; comparing two costs ten times as much.
_OPTION_KEYS: Final[dict[str, Callable[[Any], Any]]] = {
    "allreduce": lambda options: (hash(options.reduceOp), options.asyncOp),
    "broadcast": attrgetter("rootRank", "asyncOp"),
    "reduce": lambda options: (hash(options.reduceOp), options.rootRank, options.asyncOp),
    "_allgather_base": attrgetter("asyncOp"),
    "all_gather_single": attrgetter("asyncOp"),
    "_reduce_scatter_base": lambda options: (hash(options.reduceOp), options.asyncOp),
    "reduce_scatter_single": lambda options: (hash(options.reduceOp), options.asyncOp),
}

# Of one group and method: look a signature up, the group, the counter that numbers its calls.
_Entry = tuple[Callable[[Any], "int | None"], Group, Any, "dict[Any, int]"]


class Interception:
    """The wrappers of one recording.

    Args:
        journal: what the records go to.
        open_group: called at the first sight of a process group, before anything of it is recorded.
    """

    def __init__(self, journal: Journal, open_group: Callable[[Group], None]) -> None:
        self.journal = journal
        self.groups = Groups(open_group, self._forget)
        self.pending: dict[int, Token] = {}
        self._entries: list[dict[int, _Entry]] = []
        self._installed: list[tuple[type, str, Any, Any]] = []
        self._coalesced = 0
        self._issue = _bind_issue(journal)

    def install(self) -> None:
        """Wrap every method of the table that this torch has. Wrappers of others that are there already stay beneath."""
        for method in METHODS:
            original = vars(ProcessGroup).get(method.name)
            if original is not None:
                self._replace(ProcessGroup, method.name, original, self._wrap(method, original))
        for name, wrap in (
            ("_start_coalescing", self._wrap_start_coalescing),
            ("_end_coalescing", self._wrap_end_coalescing),
        ):
            original = vars(ProcessGroup).get(name)
            if original is not None:
                self._replace(ProcessGroup, name, original, wrap(original))
        for work in _work_classes():
            original = vars(work).get("wait")
            if original is not None:
                self._replace(work, "wait", original, self._wrap_wait(original))

    def remove(self) -> None:
        """Put torch's methods back, except where somebody else has wrapped ours since."""
        for owner, name, original, wrapper in self._installed:
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
        self._installed.clear()
        self.pending.clear()

    def _replace(self, owner: type, name: str, original: Any, wrapper: Any) -> None:
        wrapper.__name__ = name
        wrapper.__qualname__ = f"{owner.__name__}.{name}"
        wrapper.__doc__ = original.__doc__
        wrapper.__wrapped__ = original
        setattr(owner, name, wrapper)
        self._installed.append((owner, name, original, wrapper))

    def _forget(self, address: int) -> None:
        for entries in self._entries:
            entries.pop(address, None)

    def _enter(self, method: Method, entries: dict[int, _Entry], pg: Any) -> _Entry:
        """The entry of ``pg``, made at its first call of ``method``."""
        entry = entries.get(id(pg))
        if entry is None:
            group = self.groups.find(pg)
            signatures: dict[Any, int] = {}
            counter = group.messages if method.is_p2p else group.collectives
            entry = entries[id(pg)] = (signatures.get, group, counter, signatures)
        return entry

    def _sign(self, method: Method, entry: _Entry, key: Any, args: Any, kwargs: Any) -> int:
        """The number of a call's signature, described at its first appearance."""
        _, group, _, signatures = entry
        if len(signatures) > _MOST_SIGNATURES:
            signatures.clear()
        row = describe(method, group, args, kwargs)
        if row["device"] not in (None, "cpu"):
            group.accelerated = group.special = True
        number = self.journal.intern("signature", row)
        signatures[key] = number
        return number

    def _wrap(self, method: Method, original: Any) -> Any:
        entries: dict[int, _Entry] = {}
        self._entries.append(entries)
        general = self._wrap_general(method, original, entries)
        if method.name in _OPTION_KEYS:
            return self._wrap_usual(method, original, entries, general)
        return general

    def _wrap_general(self, method: Method, original: Any, entries: dict[int, _Entry]) -> Any:
        """Any method, any arguments."""
        journal, issue, pending = self.journal, self._issue, self.pending
        clock = time.perf_counter_ns
        hidden = _HIDDEN.get(method.name)
        blocks = method.name == "monitored_barrier"

        def call(pg: Any, /, *args: Any, **kwargs: Any) -> Any:
            token = None
            start = 0
            try:
                start = clock()
                entry = self._enter(method, entries, pg)
                lookup, group, counter, _ = entry
                seq = next(counter)
                key = (freeze(args), freeze(tuple(kwargs.items()))) if kwargs else freeze(args)
                number = lookup(key) or self._sign(method, entry, key, args, kwargs)
                if hidden is not None:
                    group.hidden += hidden(group)
                token = issue(group, seq, number)
                cost = clock() - start if seq & _COST_SAMPLE_MASK == _COST_SAMPLE_MASK else 0
            except Exception as error:
                journal.fault(error)
            try:
                work = original(pg, *args, **kwargs)
            except BaseException:
                if token is not None:
                    _record_raised(journal, token, clock())
                raise
            try:
                if token is not None:
                    words, base = token
                    words[base + RETURN_WORD] = now = clock()
                    if work is not None:
                        pending[id(work)] = token
                    elif blocks:
                        words[base + WAIT_BEGIN_WORD] = start
                        words[base + WAIT_END_WORD] = now
                    if cost:
                        _account(journal, pending, cost + clock() - now)
            except Exception as error:
                journal.fault(error)
            return work

        return call

    def _wrap_usual(self, method: Method, original: Any, entries: dict[int, _Entry], general: Any) -> Any:
        """The methods of the hot path in the form in which torch.distributed calls them: tensors, options.

        One list of one tensor, or an output and an input tensor. Everything else goes to ``general``.
        """
        journal, issue, pending = self.journal, self._issue, self.pending
        clock = time.perf_counter_ns
        option_key = _OPTION_KEYS[method.name]

        def buffers(
            pg: Any, tensors: Any = _MISSING, options: Any = _MISSING, /, *rest: Any, **kwargs: Any
        ) -> Any:
            if (
                rest
                or kwargs
                or type(tensors) is not list
                or len(tensors) != 1
                or not hasattr(options, "asyncOp")
            ):
                given = [value for value in (tensors, options) if value is not _MISSING]
                return general(pg, *given, *rest, **kwargs)
            token = None
            cost = 0
            try:
                start = clock()
                entry = entries.get(id(pg)) or self._enter(method, entries, pg)
                lookup, group, counter, _ = entry
                seq = next(counter)
                tensor = tensors[0]
                key = (tensor.shape, tensor.dtype, tensor.get_device(), option_key(options))
                number = lookup(key) or self._sign(method, entry, key, (tensors, options), {})
                token = issue(group, seq, number)
                if seq & _COST_SAMPLE_MASK == _COST_SAMPLE_MASK:
                    cost = clock() - start
            except Exception as error:
                journal.fault(error)
            try:
                work = original(pg, tensors, options)
            except BaseException:
                if token is not None:
                    _record_raised(journal, token, clock())
                raise
            try:
                if token is not None:
                    words, base = token
                    words[base + RETURN_WORD] = now = clock()
                    if work is not None:
                        pending[id(work)] = token
                    if cost:
                        _account(journal, pending, cost + clock() - now)
            except Exception as error:
                journal.fault(error)
            return work

        def pair(
            pg: Any,
            output: Any = _MISSING,
            tensor: Any = _MISSING,
            options: Any = _MISSING,
            /,
            *rest: Any,
            **kwargs: Any,
        ) -> Any:
            if rest or kwargs or not hasattr(options, "asyncOp"):
                given = [value for value in (output, tensor, options) if value is not _MISSING]
                return general(pg, *given, *rest, **kwargs)
            token = None
            cost = 0
            try:
                start = clock()
                entry = entries.get(id(pg)) or self._enter(method, entries, pg)
                lookup, group, counter, _ = entry
                seq = next(counter)
                key = (tensor.shape, tensor.dtype, tensor.get_device(), output.shape, option_key(options))
                number = lookup(key) or self._sign(method, entry, key, (output, tensor, options), {})
                token = issue(group, seq, number)
                if seq & _COST_SAMPLE_MASK == _COST_SAMPLE_MASK:
                    cost = clock() - start
            except Exception as error:
                journal.fault(error)
            try:
                work = original(pg, output, tensor, options)
            except BaseException:
                if token is not None:
                    _record_raised(journal, token, clock())
                raise
            try:
                if token is not None:
                    words, base = token
                    words[base + RETURN_WORD] = now = clock()
                    if work is not None:
                        pending[id(work)] = token
                    if cost:
                        _account(journal, pending, cost + clock() - now)
            except Exception as error:
                journal.fault(error)
            return work

        return buffers if method.shape is Shape.BUFFERS else pair

    def _wrap_wait(self, original: Any) -> Any:
        journal, take = self.journal, self.pending.pop
        clock = time.perf_counter_ns

        def wait(work: Any, /, *args: Any, **kwargs: Any) -> Any:
            token = take(id(work), None)
            if token is None:
                return original(work, *args, **kwargs)
            begin = clock()
            try:
                return original(work, *args, **kwargs)
            finally:
                try:
                    words, base = token
                    words[base + WAIT_BEGIN_WORD] = begin
                    words[base + WAIT_END_WORD] = clock()
                except Exception as error:
                    journal.fault(error)

        return wait

    def _wrap_start_coalescing(self, original: Any) -> Any:
        def start_coalescing(pg: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                group = self.groups.find(pg)
                self._coalesced += 1
                group.coalesce_id = self._coalesced
                group.special = True
            except Exception as error:
                self.journal.fault(error)
            return original(pg, *args, **kwargs)

        return start_coalescing

    def _wrap_end_coalescing(self, original: Any) -> Any:
        def end_coalescing(pg: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                group = self.groups.find(pg)
                group.coalesce_id = 0
                group.special = group.accelerated
            except Exception as error:
                self.journal.fault(error)
            return original(pg, *args, **kwargs)

        return end_coalescing


def _work_classes() -> list[type]:
    """torch's class of handles and those of its subclasses that are torch's own."""
    found = [Work]
    for kind in found:
        found.extend(sub for sub in kind.__subclasses__() if sub.__module__.startswith("torch."))
    return found


# What gloo adds to a group's sequence number beyond one for the call: a list reduce_scatter is one all_reduce a rank.
_HIDDEN: Final[dict[str, Callable[[Group], int]]] = {}


def _record_raised(journal: Journal, token: Token, now: int) -> None:
    try:
        journal.raised += 1
        words, base = token
        words[base + RETURN_WORD] = now
        mark_raised(token)
    except Exception as error:
        journal.fault(error)


def _account(journal: Journal, pending: dict[int, Token], cost: int) -> None:
    """Book what one call in 64 cost us, and forget the handles that nobody waited for."""
    journal.cost_samples += 1
    journal.cost_ns += cost
    while len(pending) > _MOST_PENDING:
        pending.pop(next(iter(pending)), None)


def _bind_issue(journal: Journal) -> Callable[[Group, int, int], Token]:
    """The function that packs a record, with everything it needs in local reach."""
    sites = CallSites(lambda row: journal.intern("site", row))
    kinds, known, classify, add_site = sites.kinds, sites.sites, sites.classify, sites.add
    get_frame, clock, pack = sys._getframe, time.perf_counter_ns, ISSUE.pack_into
    thread_tags, local, journal_key = hooks._thread, journal.local, journal.key
    capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

    def issue(group: Group, seq: int, signature: int) -> Token:
        frame: Any = get_frame(2)
        api = None
        key = (0, 0, 0)
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = classify(code)
            if kind == PROGRAM:
                key = (id(code), frame.f_lasti, id(api))
                break
            if kind == API:
                api = code
            frame = frame.f_back
        site = known.get(key) or add_site(frame, key, api)
        tag = thread_tags.current
        if tag is None:
            tag_number = 0
        else:
            interned = tag.interned
            if interned is not None and interned[0] is journal_key:
                tag_number = interned[1]
            else:
                tag_number = journal.intern_tag(tag)
        try:
            thread = local.number
        except AttributeError:
            thread = journal.intern_thread()
        state = journal.state
        coalesce = 0
        if group.special:
            coalesce = group.coalesce_id
            if group.accelerated and capturing is not None and torch.cuda.is_initialized() and capturing():
                state |= 1 << 24
        file = journal.records
        assert file is not None
        segment = file.segment
        slot = next(segment.slots)
        if slot < segment.capacity:
            pack(
                segment.map,
                slot * _RECORD_BYTES,
                clock(),
                seq,
                signature,
                tag_number,
                site,
                thread,
                journal.position,
                coalesce,
                state,
            )
            return segment.words, slot * RECORD_WORDS  # type: ignore[return-value]
        return file.append(
            clock(), seq, signature, tag_number, site, thread, journal.position, coalesce, state
        )

    return issue

"""Records of collectives that no method of ProcessGroup showed, made by kernels in front of torch's operators.

Exactly once: a method that records, and a functional operator, reach c10d's operators on their own thread, so a kernel of
c10d finds them among the frames below it and leaves the call to them. What it finds nobody for, C++ has issued.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from commprof import hooks
from commprof.recorder.callsite import CallSites
from commprof.recorder.dispatcher import Kernels, Redispatch, arguments_of
from commprof.recorder.frames import RecorderFrames
from commprof.recorder.groups import Group, Groups
from commprof.recorder.journal import Journal
from commprof.recorder.methods import Method
from commprof.recorder.operators import C10D, Issued, Reader, layout, read_c10d
from commprof.recorder.sequence import GLOO, GLOO_EXTRA
from commprof.recorder.signatures import describe, freeze
from commprof.schema import LAYERS, Layer
from commprof.trace.writer import RETURN_WORD, WAIT_BEGIN_WORD, WAIT_END_WORD, Token, mark_raised

_MOST_SIGNATURES: Final = 20_000
_MOST_RESULTS: Final = 4096  # results of functional operators that nobody waited for, remembered at most
# What the dispatcher takes to call a kernel in Python and to go on from it, beside the kernel's own time: c10d's operators
# carry boxes of groups, reductions and handles, functional ones tensors and words (measured: 7.0 and 2.2 us, bare).
_C10D_CROSSING_NS: Final = 7_000
_FUNCTIONAL_CROSSING_NS: Final = 2_200
# Nobody in Python waits for what C++ issues. Of one call in 31 the end is asked for: hardly a step has a multiple of that.
_COMPLETION_SAMPLE: Final = 31
_unbox_work: Final = getattr(Work, "unbox", None)
_C10D: Final = LAYERS.index(Layer.C10D)
_FRAMEWORK: Final = LAYERS.index(Layer.FRAMEWORK)

# Who to ask for a tag when C++ issues a collective that no block of the program tags: method, group, tensors.
Tagger = Callable[[Method, Group, Sequence[Any]], "hooks.tag | None"]

_Call = tuple[Token, Group]


class _Latest(threading.local):
    """What a method of ProcessGroup and the kernel below it tell each other."""

    def __init__(self) -> None:
        self.token: Token | None = None
        self.is_method = False


class KernelRecorder:
    """Makes the kernels of one recording and what they record.

    Args:
        journal: what the records go to.
        groups: the process groups of this process.
    """

    def __init__(self, journal: Journal, groups: Groups) -> None:
        self.journal = journal
        self.kernels = Kernels()
        self.tagger: Tagger | None = None
        self.records = 0
        self.cost_ns = 0
        self._groups = groups
        self._sites = CallSites(lambda row: journal.intern("site", row))
        self._signatures: dict[Any, int] = {}
        self._results: dict[int, Token] = {}  # by address of the storage that a functional operator returned
        self._recorders = RecorderFrames()
        self._latest = _Latest()

    def observe_c10d(self, name: str) -> None:
        """Record this operator of c10d, where nobody above it does.

        Raises:
            Exception: this torch takes no kernel for it, or its arguments are not as they were.
        """
        reader = read_c10d(C10D[name], layout(arguments_of(name)))
        self._observe(name, reader, Layer.C10D, beneath=True)

    def observe(self, operators: Mapping[str, Reader], layer: Layer) -> None:
        """Record these operators, above which nobody records."""
        for name, reader in operators.items():
            self._observe(name, reader, layer, beneath=False)

    def observe_waits(self, operator: str) -> None:
        """Note when the results of functional operators are waited for, by ``operator``."""
        self.kernels.put(operator, self._make_wait)

    def enter_method(self) -> None:
        """A method of ProcessGroup, which does not record, is about to run on this thread."""
        self._latest.token = None
        self._latest.is_method = True

    def leave_method(self) -> Token | None:
        """It has run: the record that a kernel made of it."""
        self._latest.is_method = False
        token: Token | None = self._latest.token
        return token

    def remove(self) -> None:
        """Take every kernel out."""
        self.kernels.remove()
        self._results.clear()

    def _observe(self, name: str, reader: Reader, layer: Layer, beneath: bool) -> None:
        number = LAYERS.index(layer)

        def make(redispatch: Redispatch) -> Callable[..., Any]:
            return self._make(reader, number, beneath, redispatch)

        self.kernels.put(name, make)

    def _make(self, reader: Reader, layer: int, beneath: bool, redispatch: Redispatch) -> Callable[..., Any]:
        journal, issue, recorded = self.journal, self._issue, self._recorders.among
        get_frame = sys._getframe
        crossing = _C10D_CROSSING_NS if beneath else _FUNCTIONAL_CROSSING_NS

        def kernel(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            calls: list[_Call] = []
            try:
                self.cost_ns += crossing
                frame = get_frame(1)
                if not (beneath and recorded(frame)):
                    calls = issue(reader, layer, args, kwargs, frame)
            except Exception as error:
                journal.fault(error)
            try:
                result = redispatch(keyset, *args, **kwargs)
            except BaseException:
                self._record_raised(calls, layer)
                raise
            if calls:
                self._settle(calls, result, beneath)
            return result

        return kernel

    def _issue(
        self, reader: Reader, layer: int, args: Sequence[Any], kwargs: Mapping[str, Any], frame: Any
    ) -> list[_Call]:
        """One record for each collective of the call; none while torch only traces."""
        begin = time.perf_counter_ns()
        tensor = _first_tensor(args)
        if tensor is not None and tensor.is_meta:
            return []
        calls = [self._append(issued, layer, frame) for issued in reader(args, kwargs)]
        self.records += len(calls)
        self.cost_ns += time.perf_counter_ns() - begin
        return calls

    def _append(self, issued: Issued, layer: int, frame: FrameType) -> _Call:
        method, _, values, is_async = issued
        group = self._find_group(issued.group)
        key = (layer, method.name, group.name, freeze(values))
        number = self._signatures.get(key)
        if number is None:
            number = self._sign(key, method, group, values)
        extra = GLOO_EXTRA.get(method.name)
        if layer == _FRAMEWORK:
            group.extra -= 1  # the group's backend has no part in it
        elif extra is not None and group.backend_for(None) == GLOO:
            group.extra += extra(group, values)
        seq = next(group.messages if method.is_p2p else group.collectives)
        tag_number = self._tag_number(method, group, values, layer)
        thread = hooks._thread.state.recorder_number or self.journal.intern_thread()
        site = self._sites.find(frame)
        now = time.perf_counter_ns()
        words, base = self.journal.append(group, now, seq, number, tag_number, site, thread, layer=layer)
        if method.name == "monitored_barrier":  # returns when all ranks have come: a wait all through
            words[base + WAIT_BEGIN_WORD] = now
        return (words, base, is_async), group

    def _sign(self, key: Any, method: Method, group: Group, values: Sequence[Any]) -> int:
        row = describe(method, group, values, {})
        number = self.journal.intern("signature", row)
        if row["device"] not in (None, "cpu"):
            group.accelerated = True
            self.journal.look_closer(group)
            self.journal.device_times.learn(number, row["device"], row["is_async"])
        if len(self._signatures) > _MOST_SIGNATURES:
            self._signatures.clear()
        self._signatures[key] = number
        return number

    def _tag_number(self, method: Method, group: Group, values: Sequence[Any], layer: int) -> int:
        tag = hooks.current_tag()
        if tag is None and self.tagger is not None and layer == _C10D and not self._latest.is_method:
            tag = self.tagger(method, group, values)
        if tag is None:
            return 0
        interned = tag.interned
        if interned is None or interned[0] is not self.journal.key:
            return self.journal.intern_tag(tag)
        return interned[1]

    def _find_group(self, given: Any) -> Group:
        """The group that an operator was given: a name, a box of a ProcessGroup, or None for that of all ranks."""
        if given is None:
            return self._groups.world()
        if isinstance(given, str):
            return self._groups.named(given)
        return self._groups.find(given if isinstance(given, ProcessGroup) else ProcessGroup.unbox(given))

    def _settle(self, calls: list[_Call], result: Any, beneath: bool) -> None:
        """The call has returned."""
        try:
            now = time.perf_counter_ns()
            tokens = [token for token, _ in calls]
            for words, base, _ in tokens:
                words[base + RETURN_WORD] = now
                if words[base + WAIT_BEGIN_WORD]:
                    words[base + WAIT_END_WORD] = now
            if beneath:
                self._latest.token = tokens[0]
                if self.records % _COMPLETION_SAMPLE == 1 and _unbox_work is not None:
                    boxed = result[-1] if isinstance(result, tuple) else result
                    self.journal.completion.sample(tokens[0], _unbox_work(boxed))
            else:
                self._remember(tokens, result)
        except Exception as error:
            self.journal.fault(error)

    def _remember(self, tokens: list[Token], result: Any) -> None:
        """Which record the wait for each result belongs to: several results of one collective, or each of its own."""
        results = result if isinstance(result, (list, tuple)) else [result]
        for position, tensor in enumerate(results):
            address = _storage_address(tensor)
            if address:
                self._results[address] = tokens[position if len(tokens) == len(results) else 0]
        while len(self._results) > _MOST_RESULTS:
            self._results.pop(next(iter(self._results)), None)

    def _make_wait(self, redispatch: Redispatch) -> Callable[..., Any]:
        take, journal, clock = self._results.pop, self.journal, time.perf_counter_ns

        def wait(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            token = None
            try:
                self.cost_ns += _FUNCTIONAL_CROSSING_NS
                token = take(_storage_address(args[0]), None)
                if token is not None:
                    words, base, _ = token
                    words[base + WAIT_BEGIN_WORD] = clock()
            except Exception as error:
                journal.fault(error)
            result = redispatch(keyset, *args, **kwargs)
            if token is not None:
                try:
                    words[base + WAIT_END_WORD] = clock()
                except Exception as error:
                    journal.fault(error)
            return result

        return wait

    def _record_raised(self, calls: list[_Call], layer: int) -> None:
        """torch's own kernel raised: the call was most likely refused before the backend counted it."""
        try:
            self.journal.raised += len(calls)
            now = time.perf_counter_ns()
            for token, group in calls:
                words, base, _ = token
                words[base + RETURN_WORD] = now
                mark_raised(token)
                if layer != _FRAMEWORK:
                    group.extra -= 1
        except Exception as error:
            self.journal.fault(error)


def _first_tensor(values: Sequence[Any]) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)):
            found = _first_tensor(value)
            if found is not None:
                return found
    return None


def _storage_address(tensor: Any) -> int:
    """Where the storage of ``tensor`` lies; 0 where it has none."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()

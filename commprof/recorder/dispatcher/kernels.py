"""Records collectives that bypass the methods of ProcessGroup, with kernels in front of torch's operators.

Each collective is recorded once. A recording method or functional operator calls c10d's operators on its own thread. A
kernel of c10d (``operator_calls``) therefore finds it among the calling frames, and does not record the call again. If
the kernel finds none, C++ has issued the collective.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch._C._distributed_c10d import ProcessGroup

from commprof import hooks
from commprof.program_exceptions import is_interruption
from commprof.recorder.coverage.sequence import GLOO, GLOO_EXTRA, count_raised
from commprof.recorder.dispatcher.operator_calls import OperatorCalls
from commprof.recorder.dispatcher.operators import C10D, Issued, Reader, layout
from commprof.recorder.dispatcher.registration import Kernels, Redispatch, arguments_of
from commprof.recorder.process.journal import Journal
from commprof.recorder.process_group.callsite import CallSites, is_of_autograd
from commprof.recorder.process_group.fast_path import remember
from commprof.recorder.process_group.groups import Group, Groups
from commprof.recorder.process_group.methods import Method
from commprof.recorder.process_group.pending_functional import Results
from commprof.recorder.process_group.signatures import Signer, freeze, most_known
from commprof.recorder.training.reducer_waits import Stalls
from commprof.schema import LAYERS, Layer, Purpose
from commprof.trace.rank_files.segments import RETURN_WORD, WAIT_BEGIN_WORD, WAIT_END_WORD, Token

# The time (ns) that the dispatcher takes to call a kernel in Python and to continue from it, without the kernel's own
# time (measured with an empty kernel).
_CROSSING_NS: Final = 2_200
_FRAMEWORK: Final = LAYERS.index(Layer.FRAMEWORK)
_FUNCTIONAL: Final = LAYERS.index(Layer.FUNCTIONAL)
# The tag for the backward pass of a collective through which gradients flow.
_ACTIVATION: Final = hooks.tag(Purpose.ACTIVATION.value)

# Returns a tag for a collective that C++ issues outside the program's tag blocks. Arguments: method, group, tensors.
Tagger = Callable[[Method, Group, Sequence[Any]], "hooks.tag | None"]

_Call = tuple[Token, Group]


class KernelRecorder:
    """Creates the kernels of one recording.

    Args:
        journal: The journal that receives the records.
        groups: The process groups of this process.
    """

    def __init__(self, journal: Journal, groups: Groups) -> None:
        self.journal = journal
        self.kernels = Kernels()
        self.tagger: Tagger | None = None
        self.records = 0
        self.cost_ns = 0
        self.groups = groups
        self.stalls = Stalls(journal)
        self.sites = CallSites(lambda row: journal.intern("site", row))
        self.sign = Signer(journal).sign
        self._signatures: dict[str, dict[Any, int]] = {}  # the known signatures, by method
        self._results = Results()  # the results of functional operators
        self._operators = OperatorCalls(self)

    def replace_methods(self) -> None:
        """Let the kernels of c10d record from now on, instead of the methods of ProcessGroup."""
        self._operators.methods_record = False

    def wrap_method(self, method: Method, owner: type, original: Any, pending: dict[int, Token]) -> Any:
        """Return a wrapper for a method of ProcessGroup that does not record; see :class:`OperatorCalls`.

        Args:
            method: The description of the method.
            owner: The class ProcessGroup.
            original: The method of torch.
            pending: The table of handles without a wait.
        """
        return self._operators.wrap_method(method, owner, original, pending)

    def observe_c10d(self, name: str) -> None:
        """Record the calls of this operator of c10d that no layer above it records.

        Raises:
            Exception: This version of torch accepts no kernel for the operator, or the operator has unknown arguments.
        """
        places = layout(arguments_of(name))
        self.kernels.put(name, lambda redispatch: self._operators.make(C10D[name], places, redispatch))

    def observe(self, operators: Mapping[str, Reader], layer: Layer) -> None:
        """Record all calls of these operators, because no layer above them records."""
        for name, reader in operators.items():
            self._observe(name, reader, layer)

    def observe_waits(self, operator: str) -> None:
        """Record the waits for results of functional operators, which call ``operator``."""
        self.kernels.put(operator, self._make_wait)

    def remove(self) -> None:
        """Remove every kernel."""
        self.kernels.remove()
        self._operators.functions.remove()
        self._results.clear()

    def _observe(self, name: str, reader: Reader, layer: Layer) -> None:
        number = LAYERS.index(layer)

        def make(redispatch: Redispatch) -> Callable[..., Any]:
            return self._make(reader, number, redispatch)

        self.kernels.put(name, make)

    def _make(self, reader: Reader, layer: int, redispatch: Redispatch) -> Callable[..., Any]:
        journal, issue, thread = self.journal, self._issue, self._operators.thread
        get_frame = sys._getframe

        def kernel(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            calls: list[_Call] = []
            try:
                self.cost_ns += _CROSSING_NS
                try:
                    frame = get_frame(1)
                except ValueError:  # no Python frame: autograd has a C++ thread for each GPU
                    frame = None
                calls = issue(reader, layer, args, kwargs, frame)
            except Exception as error:
                journal.fault(error)
            thread.recorded += 1
            try:
                result = redispatch(keyset, *args, **kwargs)
            except BaseException as error:
                self.record_raised(calls, layer, error)
                raise
            finally:
                thread.recorded -= 1
            if calls:
                self._settle(calls, result)
            return result

        return kernel

    def _issue(
        self,
        reader: Reader,
        layer: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        frame: FrameType | None,
    ) -> list[_Call]:
        """Write one record for each collective of the call, or no record while torch only traces."""
        begin = time.perf_counter_ns()
        tensor = _first_tensor(args)
        if tensor is not None and tensor.is_meta:
            return []
        calls = [self._append(issued, layer, frame) for issued in reader(args, kwargs)]
        self.records += len(calls)
        self.cost_ns += time.perf_counter_ns() - begin
        return calls

    def _append(self, issued: Issued, layer: int, frame: FrameType | None) -> _Call:
        method, _, values, is_async = issued
        group = self._named_group(issued.group)
        key = (layer, group.name, freeze(values))
        signatures = self._signatures.setdefault(method.name, {})
        number = signatures.get(key)
        if number is None:
            number = self.sign(method, group, values, {}, key[-1])
            if self.journal.may_repeat(number):
                remember(signatures, key, number, most_known(method))
        extra = GLOO_EXTRA.get(method.name)
        if layer == _FRAMEWORK:
            group.extra -= 1  # the group's backend does not count this collective
        elif extra is not None and group.backend_for(None) == GLOO:
            group.extra += extra(group, values)
        seq = next(group.messages if method.is_p2p else group.collectives)
        tag_number = self._tag_number()
        if not tag_number and layer == _FUNCTIONAL and is_of_autograd(frame):
            tag_number = self._number_of(_ACTIVATION)
        thread = hooks._thread.state.recorder_number or self.journal.intern_thread()
        site = self.sites.find(frame)
        now = time.perf_counter_ns()
        words, base = self.journal.append(group, now, seq, number, tag_number, site, thread, layer=layer)
        return (words, base, is_async), group

    def _tag_number(self) -> int:
        tag = hooks.current_tag()
        return 0 if tag is None else self._number_of(tag)

    def _number_of(self, tag: hooks.tag) -> int:
        interned = tag.interned
        if interned is None or interned[0] is not self.journal.key:
            return self.journal.intern_tag(tag)
        return interned[1]

    def _named_group(self, argument: Any) -> Group:
        """Return the group in an operator's argument: a name, a ProcessGroup or a box of one, or None for all ranks."""
        if argument is None:
            return self.groups.world()
        if isinstance(argument, str):
            return self.groups.named(argument)
        return self.groups.find(
            argument if isinstance(argument, ProcessGroup) else ProcessGroup.unbox(argument)
        )

    def _settle(self, calls: list[_Call], result: Any) -> None:
        """Complete the records of a call that has returned."""
        try:
            now = time.perf_counter_ns()
            tokens = [token for token, _ in calls]
            for words, base, _ in tokens:
                words[base + RETURN_WORD] = now
            self._results.remember(tokens, result)
        except Exception as error:
            self.journal.fault(error)

    def _make_wait(self, redispatch: Redispatch) -> Callable[..., Any]:
        take, journal, clock = self._results.take, self.journal, time.perf_counter_ns

        def wait(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            token = None
            try:
                self.cost_ns += _CROSSING_NS
                token = take(args[0])
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

    def record_raised(self, calls: list[_Call], layer: int, error: BaseException) -> None:
        """Mark the records of a call in which torch's own kernel raised ``error``.

        An interruption is ignored, because it arrives when the backend already has the call.
        """
        try:
            if is_interruption(error):
                return
            self.journal.raised += len(calls)
            for token, group in calls:
                self.journal.mark_raised(token)
                if layer != _FRAMEWORK:
                    count_raised(group)
        except Exception as fault:
            self.journal.fault(fault)


def _first_tensor(values: Sequence[Any]) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)):
            tensor = _first_tensor(value)
            if tensor is not None:
                return tensor
    return None

"""The kernels of c10d's operators: the fast path from a call of an operator to its record.

The dispatcher takes 7 us to call a Python function and to continue. The code here takes less than half of this time,
because a known call is found by its key and is not described again. The key consists of the tensors' shapes, the group
and the scalars of the call.

Note [reading a reduction]: torch passes the reduction to an operator in a box, and unboxing it costs 2 us. In complete
mode, the stand-in for the function of torch.distributed has already noted the reduction; see Note [the reduction, from
torch's own function].
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from torch._C._distributed_c10d import ProcessGroup, Work

from commprof import hooks
from commprof.recorder.coverage.sequence import GLOO, GLOO_EXTRA
from commprof.recorder.dispatcher.operators import Layout, Reader, read_c10d, tensor_arguments
from commprof.recorder.dispatcher.registration import Redispatch
from commprof.recorder.process_group.call_arguments import ApiFunctions
from commprof.recorder.process_group.fast_path import remember
from commprof.recorder.process_group.groups import Group
from commprof.recorder.process_group.methods import Method, Shape
from commprof.recorder.process_group.python_groups import caller_of
from commprof.recorder.process_group.reentrancy import RecorderFrames
from commprof.recorder.process_group.signatures import most_known
from commprof.schema import LAYERS, Layer
from commprof.trace.rank_files.segments import RETURN_WORD, WAIT_BEGIN_WORD, WAIT_END_WORD, Token

if TYPE_CHECKING:
    from commprof.recorder.dispatcher.kernels import KernelRecorder

C10D_LAYER: Final = LAYERS.index(Layer.C10D)
# The time (ns) that the dispatcher takes to call a kernel in Python and to continue from it (measured with an empty
# kernel). The time includes the boxing and unboxing of groups, reductions and handles.
_CROSSING_NS: Final = 7_000
# No Python code waits for collectives that C++ issues. The completion time is therefore recorded for one call in 31.
# The number of calls in a step is rarely a multiple of 31, so the sampled calls vary. The same calls also measure the
# CPU time of our own code, because reading this clock is expensive.
_SAMPLE: Final = 31
_ABSENT: Final = 99  # the position of an argument that an operator does not have
_UNKNOWN: Final[Any] = object()
_unbox_work: Final = getattr(Work, "unbox", None)

# A known call: signature, counter of the calls, the number that gloo counts in addition to one, and whether the issuer
# continues before the collective is complete. None for a call that sends nothing. A plain tuple is used, because
# unpacking it costs half as much as unpacking a named tuple.
_Known = tuple[int, Any, int, bool]


class ThreadCalls(threading.local):
    """The state of one thread that is shared by the kernels and by the wrappers above the operators of c10d."""

    def __init__(self) -> None:
        self.token: Token | None = None  # the token of the latest record by a kernel
        self.is_method = False  # whether a method of ProcessGroup that does not record is running
        self.recorded = 0  # the number of running kernels that have already recorded the calls below them


class OperatorCalls:
    """Creates the kernels of c10d's operators.

    Args:
        recorder: The recorder of the other kernels, whose state is shared.
    """

    def __init__(self, recorder: KernelRecorder) -> None:
        self.functions = ApiFunctions()
        self.thread = ThreadCalls()
        # Whether methods of ProcessGroup record. Otherwise only other kernels record above these kernels, and
        # ``thread`` shows whether one of them is running.
        self.methods_record = True
        self._recorder = recorder
        self._frames = RecorderFrames()

    def wrap_method(self, method: Method, owner: type, original: Any, pending: dict[int, Token]) -> Any:
        """Return a wrapper for a method of ProcessGroup that does not record, but links the handle to the record.

        Args:
            method: The description of the method.
            owner: The class ProcessGroup.
            original: The method of torch.
            pending: The table of handles without a wait, which receives the returned handle.
        """
        self.functions.install(method.name)
        fault, thread = self._recorder.journal.fault, self.thread
        function = getattr(original, "__func__", original)
        beneath = caller_of(method.name, function)

        def carry(*args: Any, **kwargs: Any) -> Any:
            mine = thread
            mine.token, mine.is_method = None, True
            try:
                work = (function if args and type(args[0]) is owner else beneath)(*args, **kwargs)
            finally:
                mine.is_method = False
            try:
                token = mine.token
                if token is not None and work is not None:
                    pending[id(work)] = token
            except Exception as error:
                fault(error)
            return work

        return carry

    def make(self, method: Method, places: Layout, redispatch: Redispatch) -> Callable[..., Any]:  # noqa: C901 - see below
        """Return the kernel of the operator below ``method``, whose arguments are at the positions ``places``."""
        recorder, journal = self._recorder, self._recorder.journal
        thread, recorded_above = self.thread, self._frames.among
        groups, find_group = recorder.groups.known, recorder.groups.find
        find_site, settle, record_raised = recorder.sites.find, self._settle, recorder.record_raised
        issued = recorder.stalls.issued
        get_frame, clock, cpu_clock = sys._getframe, time.perf_counter_ns, time.thread_time_ns
        layer, return_word = C10D_LAYER, RETURN_WORD
        thread_local, journal_key, noted = hooks._thread, journal.key, self.functions.latest
        reader = read_c10d(method, places)
        buffers, paired = tensor_arguments(method), method.shape is Shape.OUTPUTS_INPUTS
        at_group, at_reduction = places.group, _ABSENT if places.reduction is None else places.reduction
        at_root = _ABSENT if places.root is None else places.root
        at_async = _ABSENT if places.asynchronous is None else places.asynchronous
        at_splits = places.splits
        blocks = method.blocks
        crossing, sample, unknown = _CROSSING_NS, _SAMPLE, _UNKNOWN
        unbox, learn = ProcessGroup.unbox, self._learn
        calls: dict[Any, _Known | None] = {}

        def kernel(  # noqa: C901 - flat: each call of a function that it makes is paid for by every collective
            keyset: Any, /, *args: Any
        ) -> Any:
            segment = known = None
            start = 0
            try:
                mine = thread
                try:
                    frame = get_frame(1)
                except ValueError:  # no Python frame: autograd has a C++ thread for each GPU
                    frame = None
                recorder.cost_ns += crossing
                # Stage 1: does a layer above record this call? If not, look it up by its key.
                if not (recorded_above(frame) if self.methods_record else mine.recorded):
                    if recorder.records % sample == 1:
                        start = cpu_clock()
                    count = len(args)
                    pg = unbox(args[at_group])
                    group = groups.get(id(pg)) or find_group(pg)
                    del pg
                    reduction = named = None
                    if at_reduction < count:
                        asked, named, _, _ = noted[0]
                        if asked is not None and asked is (args[1] if paired else args[0][0]):
                            reduction = id(named)
                        else:
                            named, reduction = None, args[at_reduction].op()
                    shape: Any = None
                    first = args[0]
                    if buffers and type(first) is list and len(first) == 1 and type(first[0]) is not list:
                        (first,) = first
                        shape = first.shape, first.dtype, first.device
                    elif buffers:
                        shape = _shape(first)
                    key = (
                        group,
                        shape,
                        _shape(args[1]) if paired else None,
                        reduction,
                        args[at_root] if at_root < count else None,
                        args[at_async] if at_async < count else None,
                    )
                    if at_splits:
                        key = (*key, *[tuple(args[position]) for position in at_splits])
                    known = calls.get(key, unknown)
                    if known is unknown:
                        known = learn(method, reader, calls, key, args, named)
                        start = start and cpu_clock()
                # Stage 2: write the record, before the backend is called.
                if known is not None:
                    number, counter, extra, is_async = known
                    recorder.records += 1
                    seq = next(counter)
                    group.extra += extra
                    state = thread_local.state
                    tag = state.current
                    if not mine.is_method:  # C++ has issued the collective and will wait for it
                        issued()
                        if tag is None and recorder.tagger is not None:
                            tag = recorder.tagger(method, group, args)
                    if tag is None:
                        tag_number = 0
                    else:
                        interned = tag.interned
                        fresh = interned is None or interned[0] is not journal_key
                        tag_number = journal.intern_tag(tag) if fresh else interned[1]  # type: ignore[index]
                    own = state.recorder_number or journal.intern_thread()
                    site = find_site(frame)
                    segment, _ = journal.place
                    tail = journal.tails.get(layer) or journal.tail_of(layer)
                    base = segment.take(0, seq, number, tag_number, site, own, tail)
                    if base < 0:
                        now = clock()
                        segment, base = journal.append(
                            group, now, seq, number, tag_number, site, own, layer=layer
                        )
                    if start:
                        recorder.cost_ns += (cpu_clock() - start) * sample
            except Exception as error:
                journal.fault(error)
                segment = None
            # Stage 3: call torch's own kernel, even if the recorder failed.
            try:
                result = redispatch(keyset, *args)
            except BaseException as error:
                if segment is not None:
                    record_raised([((segment, base, is_async), group)], layer, error)
                raise
            # Stage 4: complete the record, and pass its position to the wrapper above.
            if segment is not None:
                try:
                    segment.stamp(base + return_word)
                    token = mine.token = segment, base, is_async
                    if start or blocks:
                        settle(token, result, blocks)
                except Exception as error:
                    journal.fault(error)
            return result

        return kernel

    def _learn(
        self,
        method: Method,
        reader: Reader,
        calls: dict[Any, _Known | None],
        key: Any,
        args: Sequence[Any],
        reduction: Any,
    ) -> _Known | None:
        """Return the entry of a new kind of call, and remember the entry if its key stays valid.

        Args:
            method: The method of ProcessGroup above the operator.
            reader: The reader of the operator's arguments.
            calls: The table of known calls.
            key: The key of the call.
            args: The arguments of the operator.
            reduction: The reduction whose address is part of the key; None if the key contains no address.
        """
        group: Group = key[0]
        (issued,) = reader(args, {})
        known: _Known | None = None
        if not _is_planned(args[0]):
            number = self._recorder.sign(method, group, issued.values, {})
            count = GLOO_EXTRA.get(method.name)
            extra = count(group, issued.values) if count and group.backend_for(None) == GLOO else 0
            counter = group.messages if method.is_p2p else group.collectives
            known = number, counter, extra, issued.is_async
        repeats = known is None or self._recorder.journal.may_repeat(known[0])
        if self.functions.hold(reduction) and repeats:
            remember(calls, key, known, most_known(method))
        return known

    def _settle(self, token: Token, result: Any, blocks: bool) -> None:
        """Complete the record of a sampled or blocking call that has returned.

        If ``blocks`` is true, the issuer has waited during the whole call.
        """
        words, base, _ = token
        if blocks:
            words[base + WAIT_BEGIN_WORD] = words[base]
            words[base + WAIT_END_WORD] = words[base + RETURN_WORD]
        elif _unbox_work is not None:
            boxed = result[-1] if isinstance(result, tuple) else result
            self._recorder.journal.completion.sample(token, _unbox_work(boxed))


def _shape(value: Any) -> Any:
    """Return the properties of a tensor, or of lists of tensors, on which a signature depends."""
    if type(value) is list:
        if len(value) == 1:
            return (_shape(value[0]),)
        return tuple([_shape(item) for item in value])
    return value.shape, value.dtype, value.device


def _is_planned(value: Any) -> bool:
    """Return whether torch only traces, so that the tensors have no storage."""
    while type(value) is list:
        if not value:
            return False
        value = value[0]
    return bool(getattr(value, "is_meta", False))

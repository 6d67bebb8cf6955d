"""The kernels of c10d's operators: the fast path from a call of an operator to its record.

The dispatcher takes 7 us to call a Python function and to continue. The code here takes less than half of that: the key of
a known call consists of its tensors' shapes, its group and its scalars, and the call is not described again.

Note [reading a reduction]: here torch passes the reduction boxed, and unboxing it costs 2 us. In complete mode the
function of torch.distributed has noted it; see Note [the reduction, from torch's own function].
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
# What the dispatcher takes to call a kernel in Python and to go on from it: groups, reductions and handles are put into
# boxes and taken out again (measured, bare).
_CROSSING_NS: Final = 7_000
# Nobody in Python waits for what C++ issues. Of one call in 31 the end is asked for: hardly a step has a multiple of that.
# The same calls time our own code (CPU time: reading that clock is dear).
_SAMPLE: Final = 31
_ABSENT: Final = 99  # the position of an argument that an operator does not have
_UNKNOWN: Final[Any] = object()
_unbox_work: Final = getattr(Work, "unbox", None)

# A call as it was seen before: signature, what numbers its calls, what gloo counts beyond one, whether the issuer goes on.
# None: a call that sends nothing. A plain tuple, since unpacking it is half the cost of unpacking a named one.
_Known = tuple[int, Any, int, bool]


class ThreadCalls(threading.local):
    """State of one thread that wrappers above the operators of c10d share with the kernels."""

    def __init__(self) -> None:
        self.token: Token | None = None  # of the record that a kernel has made last
        self.is_method = False  # a method of ProcessGroup that does not record is running
        self.recorded = 0  # how many kernels that have recorded what reaches c10d below them are running


class OperatorCalls:
    """Creates the kernels of c10d's operators.

    Args:
        recorder: what the other kernels share with these.
    """

    def __init__(self, recorder: KernelRecorder) -> None:
        self.functions = ApiFunctions()
        self.thread = ThreadCalls()
        self.methods_record = True  # else only kernels stand above, and say so in ``thread``
        self._recorder = recorder
        self._frames = RecorderFrames()

    def wrap_method(self, method: Method, owner: type, original: Any, pending: dict[int, Token]) -> Any:
        """What stands in for a method of ``owner``, ProcessGroup, that does not record: it takes the record to the handle.

        Args:
            pending: the handles that nobody has waited for yet.
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
        """The kernel of the operator below ``method``, whose arguments lie at ``places``."""
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
                except ValueError:  # no Python calls this: a thread of C++, as autograd has one for each GPU
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
                    if not mine.is_method:  # C++ has issued it, and will wait for it
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
            # Stage 3: torch's own kernel, whatever happened before.
            try:
                result = redispatch(keyset, *args)
            except BaseException as error:
                if segment is not None:
                    record_raised([((segment, base, is_async), group)], layer, error)
                raise
            # Stage 4: complete the record, and leave its place to the wrapper above.
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
        """What is to be known about a call whose like was not seen before.

        Args:
            reduction: whose address is part of the key, which is remembered only where that stays good.
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
        """The call that was looked at closely has returned; see also ``blocks``: the issuer has waited all through it."""
        words, base, _ = token
        if blocks:
            words[base + WAIT_BEGIN_WORD] = words[base]
            words[base + WAIT_END_WORD] = words[base + RETURN_WORD]
        elif _unbox_work is not None:
            boxed = result[-1] if isinstance(result, tuple) else result
            self._recorder.journal.completion.sample(token, _unbox_work(boxed))


def _shape(value: Any) -> Any:
    """What of a tensor, or of lists of tensors, a signature depends on."""
    if type(value) is list:
        if len(value) == 1:
            return (_shape(value[0]),)
        return tuple([_shape(item) for item in value])
    return value.shape, value.dtype, value.device


def _is_planned(value: Any) -> bool:
    """Whether torch only traces: tensors have no storage."""
    while type(value) is list:
        if not value:
            return False
        value = value[0]
    return bool(getattr(value, "is_meta", False))

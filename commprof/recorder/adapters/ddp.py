"""Adapter for DistributedDataParallel: determines the bucket or the purpose of each of its collectives.

The reducer issues collectives from C++ on the thread that runs the backward pass, where no tag can be opened.
So the kernel that records such a collective calls :meth:`Ddp.explain`. This method identifies the bucket by the
order in which the reducer reduces its buckets, and by their sizes. If two models could have issued a
collective, the collective gets only a purpose.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel

from commprof import hooks
from commprof.recorder.adapters.comm_hooks import CommHooks
from commprof.recorder.adapters.ddp_buckets import Assignment, Bucket, Reduction
from commprof.recorder.adapters.flushes import open_bucket
from commprof.recorder.adapters.parts import Doubts, Part, purpose
from commprof.recorder.adapters.patching import tagged
from commprof.recorder.process.journal import Journal
from commprof.recorder.process_group.groups import Group
from commprof.recorder.process_group.methods import Method
from commprof.recorder.training.published_models import plain_name
from commprof.recorder.training.reducer_waits import Stalls
from commprof.recorder.training.wrapped import WrappedModels
from commprof.schema import PASSES, PASSES_UNKNOWN, Purpose

FORWARD, FORWARD_ALONE, NO_GRADIENTS, BACKWARD, _ = PASSES
_MODULE: Final = "torch.nn.parallel.distributed"
_CLASS: Final = "DistributedDataParallel"
_CPP: Final = "torch._C._distributed_c10d"
_JOIN: Final = "torch.distributed.algorithms.join"
_BUCKET_UNKNOWN: Final = hooks.tag(Purpose.GRADIENT_REDUCE.value)
_USED_PARAMETERS: Final = hooks.tag(Purpose.UNUSED_PARAMETERS.value)

# The arguments that determine the traffic. :func:`commprof.requested.wrappers.ddp.read_ddp` reads them.
_ARGUMENTS: Final = (
    "broadcast_buffers",
    "forward_sync_buffers",
    "init_sync",
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "find_unused_parameters",
    "static_graph",
    "skip_all_reduce_unused_params",
)

# Functions that issue collectives on the calling thread. If calls are nested, the innermost purpose applies.
_PURPOSES: Final = (
    purpose(_MODULE, f"{_CLASS}.__init__", Purpose.CONTROL),
    purpose(_MODULE, "_verify_param_shape_across_processes", Purpose.TRACE_CHECK),
    purpose(_MODULE, f"{_CLASS}._register_delay_all_reduce_hook", Purpose.PARAMETER_BROADCAST, optional=True),
    purpose(_MODULE, f"{_CLASS}._delayed_all_reduce_hook", Purpose.GRADIENT_REDUCE, optional=True),
    purpose(_MODULE, f"{_CLASS}._pre_forward", Purpose.CONTROL),
    purpose(_CPP, "Reducer._rebuild_buckets", Purpose.BUCKET_REBUILD),
    purpose(_MODULE, f"{_CLASS}._sync_buffers", Purpose.BUFFER_BROADCAST),
    purpose(_MODULE, f"{_CLASS}._sync_module_buffers", Purpose.BUFFER_BROADCAST),
    purpose(_MODULE, f"{_CLASS}._find_common_rank", Purpose.CONTROL),
    purpose(_JOIN, "Join._get_num_nonjoined_procs", Purpose.CONTROL),
    purpose(_JOIN, "Join._notify_procs_to_terminate", Purpose.CONTROL),
    purpose(_JOIN, "Join.notify_join_context", Purpose.CONTROL),
    # These run on a rank that has no more data, to match the collectives of ranks that still have data.
    purpose(_MODULE, f"{_CLASS}._match_all_reduce_for_bwd_pass", Purpose.GRADIENT_REDUCE),
    purpose(_MODULE, f"{_CLASS}._match_unused_params_allreduce", Purpose.UNUSED_PARAMETERS),
    purpose(_MODULE, f"{_CLASS}._check_global_requires_backward_grad_sync", Purpose.CONTROL),
)


class Ddp:
    """Tracks the models that DistributedDataParallel wraps.

    Args:
        journal: The journal that receives notes on details that could not be determined.
        wrapped: The object that publishes the arguments of the models.
        stalls: The object that is notified when a communication hook of the program starts to reduce a bucket.
    """

    def __init__(self, journal: Journal, wrapped: WrappedModels, stalls: Stalls) -> None:
        self._wrapped = wrapped
        self._stalls = stalls
        self._doubt = Doubts(journal, "DistributedDataParallel")
        self._reductions: weakref.WeakKeyDictionary[DistributedDataParallel, Reduction] = (
            weakref.WeakKeyDictionary()
        )
        self._names: dict[int, str] = {}  # names of parameters by their ``id``
        self._assignment: Assignment | None = None
        self._hooks = CommHooks()

    def parts(self) -> list[Part]:
        """Return the functions to wrap, each with its wrapper."""
        return [
            *_PURPOSES,
            *self._hooks.parts(),
            Part("torch.distributed.utils", "_sync_params_and_buffers", _wrap_sync),
            Part("torch.distributed", "_compute_bucket_assignment_by_size", self._wrap_assignment),
            Part("torch.distributed", "_register_comm_hook", self._wrap_comm_hook),
            Part(_MODULE, f"{_CLASS}._ddp_init_helper", self._wrap_construction),
            Part(_MODULE, f"{_CLASS}.__init__", self._wrap_init),
            Part(_MODULE, f"{_CLASS}.register_comm_hook", self._wrap_hook_arguments),
            Part(_MODULE, f"{_CLASS}._register_builtin_comm_hook", self._wrap_hook_arguments),
            Part(_MODULE, f"{_CLASS}._pre_forward", self._wrap_pre_forward),
            Part(_MODULE, f"{_CLASS}._post_forward", self._wrap_post_forward),
        ]

    def explain(self, method: Method, group: Group, values: Sequence[Any]) -> hooks.tag | None:
        """Return the tag of a collective that C++ is about to issue in ``group``; None if DDP does not issue it.

        Must be called once for each collective, in the order of issue.

        Args:
            method: The method of the collective.
            group: The process group of the collective.
            values: The arguments of the collective. The first one is the list of its tensors.
        """
        if method.name != "allreduce" or not self._reductions:
            return None
        try:
            waiting = [each for each in self._reductions.values() if each.group == group.name]
            waiting = [each for each in waiting if each.due is not None]
            if not waiting:
                return None
            (tensor,) = values[0]
            numel = tensor.numel()
            if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
                return _USED_PARAMETERS if any(each.parameters == numel for each in waiting) else None
            due = [each for each in waiting if each.is_due(numel)]
            if len(due) == 1:
                return _opened(*due[0].take(), tensor)
            # Any of these models could have issued the collective, so the order of their buckets is no longer known.
            for each in due:
                each.lose()
                each.ran(PASSES_UNKNOWN)
            return _BUCKET_UNKNOWN if any(each.waits for each in waiting) else None
        except Exception as error:
            self._doubt(error)
            return None

    # Wrappers of functions that run when a model is constructed.

    def _wrap_assignment(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compute(tensors: Any, limits: Any, *args: Any, **kwargs: Any) -> Any:
            assignment = original(tensors, limits, *args, **kwargs)
            try:
                self._assignment = Assignment(tuple(limits), tuple(map(tuple, assignment[0])))
            except Exception as error:
                self._doubt(error)
            return assignment

        return compute

    def _wrap_construction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def construct(model: DistributedDataParallel, parameters: Any, *args: Any, **kwargs: Any) -> Any:
            self._assignment = None
            result = original(model, parameters, *args, **kwargs)
            try:
                self._add(model, parameters)
            except Exception as error:
                self._doubt(error)
            return result

        return construct

    def _wrap_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def init(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            try:
                bound = signature.bind(model, *args, **kwargs)
                bound.apply_defaults()
                self._publish(model, bound.arguments)
            except Exception as error:
                self._doubt(error)

        return init

    def _publish(self, model: DistributedDataParallel, constructor_arguments: Mapping[str, Any]) -> None:
        reduction = self._reductions.get(model)
        if reduction is None or reduction.wrapped is not None:
            return
        ignored = model.parameters_to_ignore
        arguments = {
            **{name: constructor_arguments[name] for name in _ARGUMENTS if name in constructor_arguments},
            "ignored": sorted(ignored),
            "sparse": any(getattr(each, "sparse", False) is True for each in model.module.modules()),
            "python_reducer": getattr(model, "_use_python_reducer", False),
            "mixed_precision": constructor_arguments.get("mixed_precision") is not None,
            "delayed": constructor_arguments.get("delay_all_reduce_named_params") is not None,
            "comm_hook": reduction.hook,
        }
        module = model.module
        reduction.wrapped = self._wrapped.add(
            "ddp",
            plain_name(type(module).__name__),
            model.process_group,
            arguments,
            module.named_parameters(),
            module.named_buffers(),
        )

    def _wrap_hook_arguments(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            result = original(model, *args, **kwargs)
            try:
                reduction = self._reductions.get(model)
                if reduction is not None:
                    values = (*args, *kwargs.values())
                    reduction.hook = next((name for each in values[::-1] if (name := _hook_name(each))), "?")
                    if reduction.wrapped is not None:
                        reduction.wrapped.set(comm_hook=reduction.hook, comm_hook_step=hooks.position.step)
            except Exception as error:
                self._doubt(error)
            return result

        return register

    def _add(self, model: DistributedDataParallel, parameters: Sequence[torch.Tensor]) -> None:
        self._names.update((id(p), plain_name(name)) for name, p in model.module.named_parameters())
        group = model.process_group.group_name  # type: ignore[union-attr]
        self._reductions[model] = Reduction(group, parameters, self._names, self._assignment)

    # Wrappers of functions that run in every pass.

    def _wrap_pre_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def pre_forward(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            self._count_forward(model)
            result = original(model, *args, **kwargs)
            try:
                reduction = self._reductions.get(model)
                if (
                    reduction is not None
                    and not reduction.rebuilt
                    and getattr(model, "_has_rebuilt_buckets", False)
                ):
                    reduction.read(model.reducer, _limits_of(model))
            except Exception as error:
                self._doubt(error)
            return result

        return pre_forward

    def _count_forward(self, model: DistributedDataParallel) -> None:
        try:
            reduction = self._reductions.get(model)
            if reduction is not None:
                if not torch.is_grad_enabled():
                    reduction.ran(NO_GRADIENTS)
                else:
                    reduction.ran(FORWARD if model.require_backward_grad_sync else FORWARD_ALONE)
        except Exception as error:
            self._doubt(error)

    def _wrap_post_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def post_forward(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            result = original(model, *args, **kwargs)
            try:
                reduction = self._reductions.get(model)
                if reduction is not None and torch.is_grad_enabled() and model.require_backward_grad_sync:
                    reduction.expect()
            except Exception as error:
                self._doubt(error)
            return result

        return post_forward

    # Wrappers for a communication hook of the program, which replaces the reduction.

    def _wrap_comm_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register(reducer: Any, state: Any, hook: Callable[..., Any]) -> Any:
            def tagged_hook(state: Any, bucket: Any) -> Any:
                try:
                    names = tuple(self._names.get(id(each), "?") for each in bucket.parameters())
                    buffer = bucket.buffer()
                    self._stalls.issued()
                    if bucket.index() == 0:
                        self._reduced_by_hook(bucket)
                    tag = open_bucket(bucket.index(), buffer.numel(), buffer.nbytes, buffer.dtype, names)
                except Exception as error:
                    self._doubt(error)
                    tag = _BUCKET_UNKNOWN
                with self._hooks.running(tag):
                    return hook(state, bucket)

            return original(reducer, state, tagged_hook)

        return register

    def _reduced_by_hook(self, bucket: Any) -> None:
        """Report a backward pass of the model to which ``bucket``, the first bucket of a reduction, belongs."""
        mine = {id(each) for each in bucket.parameters()}
        for reduction in self._reductions.values():
            if reduction.holds(mine):
                reduction.ran(BACKWARD)


def _hook_name(value: Any) -> str | None:
    """Return the name of a communication hook (a function or a built-in hook); None if ``value`` is neither."""
    if isinstance(value, BuiltinCommHookType):
        return str(value.name)
    return getattr(value, "__qualname__", None) if callable(value) else None


def _wrap_sync(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that broadcasts parameters and buffers in shared messages.

    Most callers use the function when training begins, so this is the purpose unless an evaluation calls it.
    """
    begin = tagged(original, hooks.tag(Purpose.PARAMETER_BROADCAST.value))

    def sync(*args: Any, **kwargs: Any) -> Any:
        outer = hooks.current_tag()
        evaluates = outer is not None and outer.purpose == Purpose.EVALUATION
        return (original if evaluates else begin)(*args, **kwargs)

    return sync


def _opened(number: int, bucket: Bucket, tensor: torch.Tensor) -> hooks.tag:
    size = tensor.dtype.itemsize
    capacity = None if bucket.capacity is None else bucket.capacity // size
    return open_bucket(number, bucket.numel, bucket.numel * size, tensor.dtype, bucket.names, capacity)


def _limits_of(model: DistributedDataParallel) -> tuple[int, ...]:
    """Return the limits in bytes with which the reducer of ``model`` rebuilds its buckets.

    If torch does not provide them, the limit is ``sys.maxsize``.
    """
    own = tuple(getattr(model, "bucket_bytes_cap_list", ()))
    limit = getattr(model, "bucket_bytes_cap", sys.maxsize)
    if own or not getattr(model, "bucket_bytes_cap_default", False):
        return own or (limit,)
    return _DEFAULT_FIRST_BUCKET_BYTES, limit

"""Adapter for FSDP 2 (``fully_shard``): tags each collective with its module and parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from commprof import hooks
from commprof.recorder.adapters.flushes import Numbers, open_bucket
from commprof.recorder.adapters.parts import Doubts, Part
from commprof.recorder.process.journal import Journal
from commprof.recorder.training.published_models import plain_name
from commprof.recorder.training.wrapped import MOST_PASSES, Wrapped, WrappedModels
from commprof.schema import Purpose, format_ranks

_STATE: Final = "torch.distributed.fsdp._fully_shard._fsdp_state"
_GROUP: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
ROOT: Final = "(root)"  # the name of the outermost module, which torch calls ""
_GATHER: Final = hooks.tag(Purpose.PARAMETER_GATHER.value)
_REDUCE: Final = hooks.tag(Purpose.GRADIENT_REDUCE.value)


class FullyShard:
    """Tracks the modules to which ``fully_shard`` was applied."""

    def __init__(self, journal: Journal, wrapped: WrappedModels) -> None:
        self._wrapped = wrapped
        self._places: weakref.WeakKeyDictionary[Any, tuple[Wrapped, int]] = weakref.WeakKeyDictionary()
        # Passes of groups that are not published yet because no forward pass has run, and the step of their records.
        self._early: list[tuple[weakref.ref[Any], str, int]] = []
        self._reducing: weakref.ref[Any] | None = None  # the parameter group whose gradients are reduced now
        self._doubt = Doubts(journal, "FSDP 2")
        self._numbers = Numbers()
        self._gathers: weakref.WeakKeyDictionary[Any, hooks.tag] = weakref.WeakKeyDictionary()

    def parts(self) -> list[Part]:
        """Return the functions to wrap, each with its wrapper."""
        return [
            Part(_GROUP, "FSDPParamGroup.unshard", self._wrap_unshard),
            Part(_GROUP, "FSDPParamGroup.post_backward", self._wrap_post_backward),
            Part(_GROUP, "foreach_reduce", self._wrap_reduce),
            Part(_STATE, "FSDPState._lazy_init", self._wrap_first_forward),
            Part(_STATE, "FSDPState._root_post_backward_final_callback", self._wrap_end),
            Part(_GROUP, "FSDPParamGroup.post_forward", self._wrap_post_forward),
            Part(_GROUP, "FSDPParamGroup.pre_backward", self._wrap_pre_backward),
            Part(_GROUP, "FSDPParamGroup._to_sharded", self._wrap_reshard),
            Part("torch.nn.utils.clip_grad", "_get_total_norm", self._wrap_clipping, optional=True),
            # Programs that clip in two steps call this function.
            Part("torch.nn.utils", "get_total_norm", self._wrap_norm, optional=True),
        ]

    def _wrap_unshard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_idle(group):
                self._ran("u", group)
            if not group.is_sharded and group.is_unsharded:
                return original(group, *args, **kwargs)
            with self._gather_of(group):
                return original(group, *args, **kwargs)

        return unshard

    def _gather_of(self, group: Any) -> hooks.tag:
        tag = self._gathers.get(group)
        if tag is not None:
            return tag
        try:
            names = _names(group.fsdp_params)
            tag = hooks.tag(
                Purpose.PARAMETER_GATHER.value, parameters=names, module=module_name(group._module_fqn)
            )
            if "?" not in names:  # the names are known from the first forward pass on
                self._gathers[group] = tag
            return tag
        except Exception as error:
            self._doubt(error)
            return _GATHER

    def _wrap_post_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def post_backward(group: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                tag = hooks.tag(Purpose.GRADIENT_REDUCE.value, module=module_name(group._module_fqn))
            except Exception as error:
                self._doubt(error)
                tag = _REDUCE
            self._ran("b" if group.reshard_after_backward else "k", group)
            self._reducing = weakref.ref(group)
            with tag:
                return original(group, *args, **kwargs)

        return post_backward

    # The arguments and passes of each model.

    def _ran(self, kind: str, group: Any, more: str = "") -> None:
        try:
            known = self._places.get(group)
            if known is not None:
                known[0].ran(f"{kind}{known[1]}{more}")
            elif len(self._early) < MOST_PASSES:
                self._early.append((weakref.ref(group), kind, self._wrapped.step))
        except Exception as error:
            self._doubt(error)

    def _wrap_post_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def post_forward(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._ran("R" if torch._C._current_graph_task_id() != -1 else "F", group)
            return original(group, *args, **kwargs)

        return post_forward

    def _wrap_pre_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def pre_backward(group: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(group._training_state, "name", "") != "PRE_BACKWARD":
                self._ran("p", group)
            return original(group, *args, **kwargs)

        return pre_backward

    def _wrap_reshard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reshard(group: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_idle(group) and not group.is_sharded:
                self._ran("r", group)
            return original(group, *args, **kwargs)

        return reshard

    def _wrap_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def end(state: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(state, *args, **kwargs)
            try:
                if state._state_ctx.is_last_backward:
                    for group in _groups_of(state._state_ctx.all_states)[:1]:
                        self._ran("E", group)
            except Exception as error:
                self._doubt(error)
            return result

        return end

    def _wrap_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._followed_norm(original, is_used=False)

    def _wrap_clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._followed_norm(original, is_used=True)

    def _followed_norm(self, original: Callable[..., Any], *, is_used: bool) -> Callable[..., Any]:
        """Wrap a function that computes a total norm, to report the norms that are reduced over the ranks.

        With a finite norm type, the norm of each sharded tensor is reduced immediately. With an infinite norm
        type, only the largest norm is reduced, and only if the caller uses it (``is_used``).
        """

        def norm(tensors: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(tensors, torch.Tensor | list | tuple):
                tensors = list(tensors)  # as torch does, because counting would exhaust an iterator
            try:
                if self._wrapped.is_clipped:
                    listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
                    count = sum(map(_is_in_shards, listed))
                    if float(norm_type) == math.inf:
                        count = min(count, int(is_used))
                    if count:
                        self._wrapped.clipped(count)
            except Exception as error:
                self._doubt(error)
            return original(tensors, norm_type, *args, **kwargs)

        return norm

    def _wrap_first_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def first_forward(state: Any, *args: Any, **kwargs: Any) -> Any:
            is_new = state._is_root is None
            result = original(state, *args, **kwargs)
            try:
                if is_new and state._is_root:
                    self._publish(state)
            except Exception as error:
                self._doubt(error)
            return result

        return first_forward

    def _publish(self, root: Any) -> None:
        states = root._state_ctx.all_states
        groups = _groups_of(states)
        model = self._wrapped.next_number
        first: Wrapped | None = None
        for state in states:
            prefetch = [
                groups.index(each)
                for one in getattr(state, "_states_to_backward_prefetch", ())
                for each in reversed(_groups_of([one]))
            ]
            for group in _groups_of([state]):
                wrapped = self._publish_unit(group, {"model": model, "prefetch": prefetch})
                first = first or wrapped
                first.has_units = True
                self._places[group] = first, groups.index(group)
        early, self._early = self._early, []
        for reference, kind, step in early:
            group = reference()
            if group in self._places and self._places[group][0] is first:
                first.ran_before(step, f"{kind}{self._places[group][1]}")
            elif group is not None:
                self._early.append((reference, kind, step))

    def _publish_unit(self, group: Any, arguments: dict[str, Any]) -> Wrapped:
        mesh, after = group.mesh_info, group.post_forward_mesh_info
        shards = getattr(mesh, "shard_process_group", None)
        replicas = getattr(mesh, "replicate_process_group", None)
        parameters = group.fsdp_params
        policies = {each.mp_policy for each in parameters}  # torch 2.15 lets each parameter have its own
        policy = next(iter(policies))
        arguments |= {
            "shards": shards is not None,
            "reshard_after_forward": after is not None,
            "after_forward_ranks": None
            if after is None or after is mesh or after.shard_process_group is shards
            else format_ranks(dist.get_process_group_ranks(after.shard_process_group)),
            "param_dtype": _dtype(policy.param_dtype),
            "reduce_dtype": _dtype(policy.reduce_dtype),
            "unshard_in_backward": getattr(group, "unshard_in_backward", True),
            "mesh_dims": max((each.sharded_param.device_mesh.ndim for each in parameters), default=1)
            - (2 if shards is not None and replicas is not None else 1),
            "unpredicted": _unpredicted(parameters, policies),
        }
        return self._wrapped.add(
            "fully_shard",
            module_name(group._module_fqn) or "?",
            shards or replicas,
            arguments,
            [_unsharded(each) for each in parameters],
            replicas=replicas if shards is not None else None,
        )

    def _wrap_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that reduces gradients. It is called only with parameters that have gradients."""

        def reduce(parameters: Any, gradients: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
            self._reduces(parameters)
            try:
                tag = self._bucket(parameters, gradients, 1 if group is None else group.size())
            except Exception as error:
                self._doubt(error)
                tag = _REDUCE
            with tag:
                return original(parameters, gradients, group, *args, **kwargs)

        return reduce

    def _reduces(self, parameters: Sequence[Any]) -> None:
        """Report that the gradients of ``parameters`` are reduced. Other trained parameters have no gradient."""
        try:
            group = None if self._reducing is None else self._reducing()
            if group is not None:
                mine = set(map(id, parameters))
                trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
                without = [str(place) for place, each in enumerate(trained) if id(each) not in mine]
                alone = "" if group.all_reduce_grads else "~"
                self._ran("B", group, alone + (f"-{'.'.join(without)}" if without else ""))
        except Exception as error:
            self._doubt(error)

    def _bucket(self, parameters: Sequence[Any], gradients: Sequence[Any], world: int) -> hooks.tag:
        outer = hooks.current_tag()
        dtype = parameters[0].reduce_dtype or gradients[0].dtype
        padded = sum(_padded(gradient.shape, world) for gradient in gradients)
        return open_bucket(
            self._numbers.take(),
            sum(gradient.numel() for gradient in gradients),
            padded * dtype.itemsize,
            dtype,
            _names(parameters),
            module=None if outer is None else outer.module,
        )


def _groups_of(states: Sequence[Any]) -> list[Any]:
    """Return the parameter groups of ``states``. Before torch 2.13, each state has at most one group."""
    groups_of_states: list[Any] = []
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None)
        groups_of_states += [
            each for each in (groups if groups is not None else [state._fsdp_param_group]) if each is not None
        ]
    return groups_of_states


def _is_idle(group: Any) -> bool:
    """Return whether ``group`` is in no pass, so that the program itself makes the current call."""
    return getattr(group._training_state, "name", "") == "IDLE"


def _unpredicted(parameters: Sequence[Any], policies: set[Any]) -> str | None:
    """Return why the messages of a unit cannot be predicted from its arguments; None if they can be predicted."""
    if any(hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather") for each in parameters):
        return "a parameter defines its own all-gather (fsdp_pre_all_gather)"
    if len(policies) > 1:
        return "its parameters have different mixed precision policies (param_dtype_override_fn)"
    return None


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _unsharded(parameter: Any) -> tuple[str, list[int], str, bool]:
    """Return the name, shape and dtype of a parameter, and whether it is trained.

    The sharded dimension is the first dimension of the shape.
    """
    shape = list(parameter._orig_size)
    place = getattr(parameter.fsdp_placement, "dim", 0)
    sharded = parameter.sharded_param
    name = plain_name(parameter._param_fqn) if parameter._param_fqn else "?"
    return (
        name,
        [*shape[place : place + 1], *shape[:place], *shape[place + 1 :]],
        str(_dtype(sharded.dtype)),
        sharded.requires_grad,
    )


def _padded(shape: Sequence[int], world: int) -> int:
    """Return the number of elements of a gradient that is padded to ``world`` equal shards along dimension 0."""
    if not shape:
        return 1
    return -(-shape[0] // world) * world * math.prod(shape[1:])


def _names(parameters: Sequence[Any]) -> tuple[str, ...]:
    return tuple(plain_name(each._param_fqn) if each._param_fqn else "?" for each in parameters)


def module_name(name: str | None) -> str | None:
    """Return the name of the module in records; None if torch has not set the name yet."""
    return name if name is None else plain_name(name) or ROOT


def _is_in_shards(tensor: Any) -> bool:
    """Return whether ``tensor`` is a DTensor that is not replicated along some mesh dimension."""
    return any(not each.is_replicate() for each in getattr(tensor, "placements", ()))

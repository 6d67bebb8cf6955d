"""Adapter for torch's tensor parallelism: publishes plans of ``parallelize_module``, and input and output shapes.

The functions of a style that distribute inputs and outputs are wrapped. The wrappers note the shape, dtype and
layout of each tensor, and the arrival and layout of its gradient. They keep no reference to a tensor and change
no tensor.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from commprof import hooks
from commprof.recorder.adapters.parts import Doubts, Part
from commprof.recorder.adapters.patching import tagged_by_default
from commprof.recorder.process.journal import Journal
from commprof.recorder.training.published_models import plain_name
from commprof.recorder.training.wrapped import Wrapped, WrappedModels
from commprof.schema import Purpose

_PACKAGE: Final = "torch.distributed.tensor.parallel"
_STYLES: Final = f"{_PACKAGE}.style"
_FSDP_PARAMETER: Final = "torch.distributed.fsdp._fully_shard._fsdp_param"
_CUTTING: Final = ("ColwiseParallel", "RowwiseParallel")
_SEQUENCE: Final = "SequenceParallel"
_INPUT, _OUTPUT = "PrepareModuleInput", "PrepareModuleOutput"
_COMPOSED: Final = "PrepareModuleInputOutput"  # a combination of the previous two styles
_ACTIVATION: Final = hooks.tag(Purpose.ACTIVATION.value)
_LOCAL: Final = "L"


class TensorParallel:
    """Tracks the modules in plans of ``parallelize_module``.

    Args:
        journal: The journal that receives notes on details that could not be determined.
        wrapped: The object that publishes the modules and their passes.
    """

    def __init__(self, journal: Journal, wrapped: WrappedModels) -> None:
        self._wrapped = wrapped
        self._doubt = Doubts(journal, "parallelize_module")
        self._names: Mapping[nn.Module, str] | None = None  # names of modules while a model is parallelized
        # The keys are modules. For styles that prepare inputs or outputs, the key is the style, which does not get its
        # module.
        self._followed: weakref.WeakKeyDictionary[Any, Wrapped] = weakref.WeakKeyDictionary()
        self._inputs: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._optimized: weakref.WeakKeyDictionary[Optimizer, _Optimized] = weakref.WeakKeyDictionary()
        self._handle: Any = None

    def install(self) -> None:
        """Register a hook that runs before the step of each optimizer."""
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Remove the optimizer hook."""
        if self._handle is not None:
            self._handle.remove()

    def parts(self) -> list[Part]:
        """Return the functions to wrap, each with its wrapper."""
        return [
            # The package re-exports the function from the module that defines it.
            Part(_PACKAGE, "parallelize_module", self._wrap_parallelize, optional=True),
            Part(f"{_PACKAGE}.api", "parallelize_module", self._wrap_parallelize, optional=True),
            *(
                Part(_STYLES, f"{style}._apply", self._wrap_apply, optional=True)
                for style in (*_CUTTING, _SEQUENCE, _INPUT, _OUTPUT)
            ),
            *(
                Part(_STYLES, f"{style}._prepare_input_fn", self._wrap_input, optional=True)
                for style in (*_CUTTING, _SEQUENCE)
            ),
            *(
                Part(_STYLES, f"{style}._prepare_output_fn", self._wrap_output, optional=True)
                for style in (*_CUTTING, _SEQUENCE)
            ),
            Part(_STYLES, f"{_INPUT}._prepare_input_arg", self._wrap_argument, optional=True),
            Part(_STYLES, f"{_OUTPUT}._prepare_out_fn", self._wrap_results, optional=True),
            Part(_FSDP_PARAMETER, "FSDPParam._get_grad_inner_tensor", self._wrap_summing, optional=True),
        ]

    # The arguments of each module.

    def _wrap_parallelize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def parallelize(*args: Any, **kwargs: Any) -> Any:
            if self._names is not None:  # torch calls itself for each module of the plan
                return original(*args, **kwargs)
            arguments: Mapping[str, Any] = {}
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                self._doubt(error)
            with self._naming(arguments.get("module")):
                result = original(*args, **kwargs)
            try:
                self._publish_unruled(arguments)
            except Exception as error:
                self._doubt(error)
            return result

        return parallelize

    @contextmanager
    def _naming(self, model: Any) -> Iterator[None]:
        try:
            self._names = {} if model is None else {each: name for name, each in model.named_modules()}
        except Exception as error:
            self._doubt(error)
            self._names = {}
        try:
            yield
        finally:
            self._names = None

    def _publish_unruled(self, call_arguments: Mapping[str, Any]) -> None:
        """Publish the styles of a plan that are not torch's own. No rule predicts their traffic."""
        mesh, plan = call_arguments.get("device_mesh"), call_arguments.get("parallelize_plan")
        if mesh is None or plan is None or mesh.ndim != 1:
            return
        for name, style in (plan if isinstance(plan, dict) else {"": plan}).items():
            if not _is_torchs(style):
                arguments = {"style": f"{type(style).__module__}.{type(style).__qualname__}"}
                self._wrapped.add("tensor_parallel", str(name), mesh.get_group(), arguments, ())

    def _wrap_apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(style: Any, module: nn.Module, device_mesh: Any, *args: Any, **kwargs: Any) -> Any:
            row = None
            try:
                if _is_torchs(style):
                    row = _arguments(style, module, device_mesh), _tensors(module.named_parameters())
            except Exception as error:
                self._doubt(error)
            result = original(style, module, device_mesh, *args, **kwargs)
            try:
                if row is not None:
                    self._publish(style, module, device_mesh.get_group(), *row)
            except Exception as error:
                self._doubt(error)
            return result

        return apply

    def _publish(
        self, style: Any, module: nn.Module, group: Any, arguments: Mapping[str, Any], parameters: Any
    ) -> None:
        name = plain_name((self._names or {}).get(module, ""))
        wrapped = self._wrapped.add("tensor_parallel", name, group, arguments, parameters)
        # All ranks run the same passes, so only the first rank of the group reports them.
        if dist.get_rank() == min(dist.get_process_group_ranks(group)):
            self._followed[style if _prepares(style) else module] = wrapped

    # The passes of each module. The text of a pass is a letter and a description of the tensors. For a gradient, the
    # layout of the gradient follows.

    def _wrap_input(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tagged = tagged_by_default(original, _ACTIVATION)

        def lay_out(*args: Any, **kwargs: Any) -> Any:
            try:
                module, inputs = args[-3], args[-2]
                wrapped = self._followed.get(module)
                if wrapped is not None:
                    input_text = f"{_described(inputs[0])}:{int(inputs[0].requires_grad)}"
                    self._inputs[module] = input_text
                    wrapped.ran(f"I{input_text};")
            except Exception as error:
                self._doubt(error)
            return tagged(*args, **kwargs)

        return lay_out

    def _wrap_output(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tagged = tagged_by_default(original, _ACTIVATION)

        def lay_out(*args: Any, **kwargs: Any) -> Any:
            wrapped = pass_text = None
            try:
                module, outputs = args[-3], args[-2]
                wrapped = self._followed.get(module)
                if wrapped is not None:
                    pass_text = f"{self._inputs.pop(module)}:{_dtype(outputs)}"
                    wrapped.ran(f"O{pass_text};")
            except Exception as error:
                self._doubt(error)
            result = tagged(*args, **kwargs)
            if wrapped is not None and pass_text is not None:
                self._follow_gradient(wrapped, f"G{pass_text}", result)
            return result

        return lay_out

    def _wrap_argument(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that prepares one input of a module, which is passed by position or by name."""
        tagged = tagged_by_default(original, _ACTIVATION)

        def prepare(style: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
            pass_text = None
            wrapped = self._followed.get(style)
            try:
                layouts = _layouts(args[-2:])
                if wrapped is not None and layouts is not None:
                    pass_text = f"{_described(tensor)}:{_pairs(style).index(layouts)}"
                    wrapped.ran(f"X{pass_text};")
            except Exception as error:
                self._doubt(error)
            result = tagged(style, tensor, *args, **kwargs)
            if wrapped is not None and pass_text is not None and result is not tensor:
                self._follow_gradient(wrapped, f"Y{pass_text}", result)
            return result

        return prepare

    def _wrap_results(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that prepares all outputs of a module."""
        tagged = tagged_by_default(original, _ACTIVATION)

        def prepare(style: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            wrapped, pass_texts = self._followed.get(style), []
            before = outputs if isinstance(outputs, tuple) else (outputs,)
            try:
                if wrapped is not None:
                    for tensor, *pair in zip(
                        before, style.output_layouts, style.desired_output_layouts, strict=True
                    ):
                        layouts = _layouts(pair)
                        index = None if layouts is None else _pairs(style).index(layouts)
                        pass_texts.append(None if index is None else f"{_described(tensor)}:{index}")
                        if index is not None:
                            wrapped.ran(f"X{pass_texts[-1]};")
            except Exception as error:
                self._doubt(error)
            result = tagged(style, outputs, *args, **kwargs)
            if wrapped is not None:
                after = result if isinstance(result, tuple) else (result,)
                for tensor, old, text in zip(after, before, pass_texts, strict=False):
                    if text is not None and tensor is not old:
                        self._follow_gradient(wrapped, f"Y{text}", tensor)
            return result

        return prepare

    def _follow_gradient(self, wrapped: Wrapped, text: str, tensor: Any) -> None:
        """Report the arrival of the gradient of ``tensor``. The hook keeps no reference to either of them."""
        try:
            if tensor.requires_grad:
                tensor.register_hook(self._on_gradient(wrapped, text))
        except Exception as error:
            self._doubt(error)

    def _on_gradient(self, wrapped: Wrapped, text: str) -> Callable[[torch.Tensor], None]:
        def came(gradient: torch.Tensor) -> None:
            try:
                wrapped.ran(f"{text}@{_layout(gradient)};")
            except Exception as error:
                self._doubt(error)

        return came

    # Partial gradients are summed over the ranks. fully_shard sums them before it reduces them. Without fully_shard, an
    # optimizer sums a partial gradient each time it reads the gradient.

    def _wrap_summing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def inner(parameter: Any, gradient: Any) -> Any:
            try:
                if self._followed and _is_dtensor(gradient) and _layout(gradient) == "P":
                    self._summed(parameter, gradient)
            except Exception as error:
                self._doubt(error)
            return original(parameter, gradient)

        return inner

    def _summed(self, parameter: Any, gradient: torch.Tensor) -> None:
        """Report that fully_shard sums a partial gradient. ``parameter`` is a parameter object of fully_shard."""
        module, name = parameter._module_info.module, parameter._module_info.param_name
        wrapped = self._followed.get(module)
        names = [name for name, _ in module.named_parameters()]
        if wrapped is not None and name in names:
            wrapped.ran(f"U{names.index(name)}:fully_shard+{_dtype(gradient)};")

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._followed or torch.compiler.is_compiling():
            return
        try:
            for wrapped, places in self._with_partial_gradients(optimizer).items():
                wrapped.ran(f"U{'.'.join(map(str, places))}:{_optimizer_name(optimizer)};")
        except Exception as error:
            self._doubt(error)

    def _with_partial_gradients(self, optimizer: Optimizer) -> dict[Wrapped, list[int]]:
        """Return the modules that have parameters of ``optimizer`` with partial gradients.

        For each of these modules, the result contains the positions of these parameters among the module's
        parameters.
        """
        known = self._optimized.get(optimizer)
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if known is None or known.parameters != count:
            mine = {id(each) for group in optimizer.param_groups for each in group["params"]}
            listed = [
                (weakref.ref(module), wrapped, place)
                for module, wrapped in self._followed.items()
                if isinstance(module, nn.Module)
                for place, each in enumerate(module.parameters())
                if id(each) in mine
            ]
            known = self._optimized[optimizer] = _Optimized(count, listed)
        partial: dict[Wrapped, list[int]] = {}
        for reference, wrapped, place in known.listed:
            module = reference()
            parameters = [] if module is None else list(module.parameters())
            gradient = parameters[place].grad if place < len(parameters) else None
            if gradient is not None and _is_dtensor(gradient) and _layout(gradient) == "P":
                partial.setdefault(wrapped, []).append(place)
        return partial


class _Optimized(NamedTuple):
    """The parameters of an optimizer that belong to tracked modules.

    Attributes:
        parameters: The number of parameters of the optimizer when this list was created.
        listed: For each such parameter, its module, the object that publishes the module, and the position of
            the parameter among the module's parameters.
    """

    parameters: int
    listed: list[tuple[weakref.ref[nn.Module], Wrapped, int]]


def _optimizer_name(optimizer: Optimizer) -> str:
    """Return the class name of a torch optimizer, with the flags that determine how often it reads a gradient.

    The result is "other" for an optimizer that is not torch's.
    """
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] != "torch":
        return "other"
    flags = [
        name for name in ("fused", "nesterov") if any(group.get(name) for group in optimizer.param_groups)
    ]
    return "+".join([kind.__name__, *flags])


def _is_torchs(style: Any) -> bool:
    """Return whether ``style`` is one of torch's own styles, and not an instance of a derived class."""
    names = (*_CUTTING, _SEQUENCE, _INPUT, _OUTPUT, _COMPOSED)
    return type(style).__module__ == _STYLES and type(style).__name__ in names


def _prepares(style: Any) -> bool:
    return type(style).__name__ in (_INPUT, _OUTPUT)


def _arguments(style: Any, module: nn.Module, mesh: Any) -> dict[str, Any]:
    """Return the arguments of ``style``, and properties of the module."""
    kind = type(style).__name__
    weights = list(module.parameters())
    # Parameters on the meta device are not sent, and DTensors were already sent.
    sends = all(not each.is_meta and not _is_dtensor(each) for each in weights)
    arguments = {
        "style": kind,
        "device": mesh.device_type,
        "module": "embedding" if isinstance(module, nn.Embedding) else type(module).__name__,
        "src_data_rank": getattr(style, "src_data_rank", 0) if sends else None,
        "use_local_output": bool(style.use_local_output),
    }
    if kind in _CUTTING:
        (arguments["input_layout"],) = map(_placement, style.input_layouts)
        (arguments["output_layout"],) = map(_placement, style.output_layouts)
    elif kind == _SEQUENCE:
        (arguments["sequence_layout"],) = map(_placement, style.sequence_sharding)
    else:
        arguments["layouts"] = _pairs(style)
    return arguments


def _tensors(parameters: Any) -> list[Any]:
    """Return the name, whole shape and dtype of each parameter, and whether it is trained."""
    return [(name, list(each.shape), _dtype(each), each.requires_grad) for name, each in parameters]


def _pairs(style: Any) -> list[list[str | None]]:
    """Return the distinct pairs of layouts (before, after) between which a style converts tensors."""
    if type(style).__name__ == _OUTPUT:
        layout_pairs = list(zip(style.output_layouts, style.desired_output_layouts, strict=True))
    else:
        layout_pairs = list(zip(style.input_layouts or (), style.desired_input_layouts or (), strict=True))
        named = style.desired_input_kwarg_layouts
        layout_pairs += [(layout, named.get(name)) for name, layout in style.input_kwarg_layouts.items()]
    distinct_pairs: list[list[str | None]] = []
    for pair in map(_layouts, layout_pairs):
        if pair is not None and pair not in distinct_pairs:
            distinct_pairs.append(pair)
    return distinct_pairs


def _layouts(pair: Any) -> list[str | None] | None:
    """Return the layouts before and after the style; None if it leaves the tensor unchanged."""
    declared, desired = pair
    return None if declared is None else [_placement(declared), desired and _placement(desired)]


def _described(tensor: Any) -> str:
    """Return the shape (the whole shape of a DTensor), dtype and layout of ``tensor`` as text."""
    return f"{'x'.join(map(str, tensor.shape))}:{_dtype(tensor)}:{_layout(tensor)}"


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "placements")


def _layout(tensor: Any) -> str:
    if not _is_dtensor(tensor):
        return _LOCAL
    placements = tensor.placements
    return _placement(placements[0]) if len(placements) == 1 else "?"


def _placement(placement: Any) -> str:
    """Return a placement as text: ``R`` replicated, ``P`` partial sums, ``S1`` sharded along dimension 1."""
    if placement.is_replicate():
        return "R"
    return "P" if placement.is_partial() else f"S{placement.dim}"

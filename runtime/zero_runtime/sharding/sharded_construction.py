"""Construction of a sharded model (stage 3).

Parameters are sharded when they are created, so that no rank ever stores all of them.

Within :func:`constructing`, every module shards its own parameters after its ``__init__`` has returned.
``module.apply(function)`` gathers the parameters of each module around the call of ``function``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.sharding.parameter_gathering import ACCESS, Gatherer, broadcast
from zero_runtime.sharding.placement.shard_storage import SliceStorage
from zero_runtime.sharding.shards import Shard, shard_of, shards_of

Module: Final = torch.nn.Module
_FACTORIES: Final = (
    torch.tensor, torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.eye, torch.randn,
)  # fmt: skip
Factory = Callable[..., torch.Tensor]
_cutters: list[Cutter] = []  # the cutters of the active contexts, innermost last
# The number of parameters of each size, in bytes, that were sharded since an engine was last constructed.
_sharded_bytes: Counter[int] = Counter()


class Cutter:
    """Shards the parameters of new modules.

    Args:
        group: The ranks among which the parameters are partitioned.
        storage: The storage of the shards.
        dtype: The dtype of the parameters; None does not cast them.
    """

    def __init__(self, group: DataParallelGroup, storage: SliceStorage, dtype: torch.dtype | None) -> None:
        self.group = group
        self.storage = storage
        self.dtype = dtype

    @torch.no_grad()
    def cut(self, module: torch.nn.Module, recurse: bool = False) -> None:
        """Shard the whole parameters of ``module``.

        Each parameter is broadcast from rank 0, so that all ranks have equal values.
        """
        for parameter in module.parameters(recurse=recurse):
            if shard_of(parameter) is not None or is_lazy(parameter) or parameter.is_meta:
                continue  # no elements yet; sharded later, when it has elements
            wanted = self.dtype if parameter.is_floating_point() else None
            parameter.data = parameter.data.to(device=self.group.device, dtype=wanted)
            broadcast(parameter, self.group)
            shard = Shard(parameter, self.group, self.storage.place)
            shard.release()
            self.storage.keep(shard)
            if hooks.recording():
                _sharded_bytes[_bytes(parameter.dtype, shard.numel)] += 1


class Construction(NamedTuple):
    """How the parameters of a model were constructed. The counts are made when the engine is constructed.

    A program may drop parameters that ``zero.Init`` has sharded, or replace them (for example resize an embedding).

    Attributes:
        sharded: The number of parameters that ``zero.Init`` has sharded in this process since the last engine
            was constructed, by size in bytes. Dropped parameters are included.
        unsharded: The number of the model's unsharded parameters, by size in bytes.
        sharded_of_model: The number of the model's parameters that are already sharded.
    """

    sharded: Mapping[int, int]
    unsharded: Mapping[int, int]
    sharded_of_model: int

    def described(self) -> dict[str, Any]:
        """Return the counts in the form for the recorder."""
        return {
            "sharded": sorted(map(list, self.sharded.items())),
            "whole": sorted(map(list, self.unsharded.items())),
            "sharded_of_model": self.sharded_of_model,
        }


def construction_of(parameters: Iterable[torch.nn.Parameter]) -> Construction:
    """Return how the ``parameters`` of a model were constructed.

    The next call counts only parameters that are sharded after this call.
    """
    sharded = Counter(_sharded_bytes)
    _sharded_bytes.clear()
    unsharded: Counter[int] = Counter()
    sharded_of_model = 0
    for parameter in parameters:
        if shard_of(parameter) is None:
            unsharded[_bytes(parameter.dtype, parameter.numel())] += 1
        else:
            sharded_of_model += 1
    return Construction(sharded, unsharded, sharded_of_model)


def _bytes(dtype: torch.dtype, numel: int) -> int:
    return numel * dtype.itemsize


def typed_factory(
    fn: Factory, target_fp_dtype: torch.dtype | None, target_device: torch.device | None
) -> Factory:
    """Return a wrapper of ``fn`` that creates floating-point tensors of one dtype, whatever dtype is requested.

    The signature is that of DeepSpeed's ``zero_wrapper_for_fp_tensor_constructor``.

    Args:
        fn: A tensor factory such as ``torch.empty``.
        target_fp_dtype: The dtype of the tensors; None does not change the dtype.
        target_device: The default device; None for torch's default.
    """

    @functools.wraps(fn)
    def typed(*args: Any, **keywords: Any) -> torch.Tensor:
        if target_device is not None and keywords.get("device") is None:
            keywords["device"] = target_device
        result = fn(*args, **keywords)
        if target_fp_dtype is not None and result.is_floating_point():
            # Cast in place, so that the tensor remains a leaf of autograd's graph.
            result.data = result.data.to(target_fp_dtype)
        return result

    return typed


@contextmanager
def constructing(
    cutter: Cutter, gather_in_apply: bool = True, typed: Callable[..., Factory] = typed_factory
) -> Iterator[None]:
    """Shard the parameters of every module that is constructed in this context.

    Contexts may be nested. The outermost context shards the parameters.

    Args:
        cutter: The object that shards the parameters.
        gather_in_apply: Whether ``module.apply`` gathers parameters.
        typed: A function that wraps tensor factories, with the arguments of :func:`typed_factory`.
    """
    with ExitStack() as stack:
        if not _cutters:
            stack.enter_context(_cutting_after_init())
            if gather_in_apply:
                stack.enter_context(_replaced(Module, "apply", _gathering_apply(Module.apply)))
            stack.enter_context(_replaced(Module, "to_empty", _cutting_to_empty(Module.to_empty)))
            if cutter.dtype is not None:
                device = cutter.group.device
                # On a CPU torch's default device is kept, because a program may use the meta device inside.
                target = None if device.type == "cpu" else device
                stack.enter_context(
                    _Factories(
                        {
                            each: typed(each, target_fp_dtype=cutter.dtype, target_device=target)
                            for each in _FACTORIES
                        }
                    )
                )
            if cutter.group.device.type != "cpu":
                stack.enter_context(cutter.group.device)
        _cutters.append(cutter)
        stack.callback(_cutters.pop)
        yield


class _Factories(TorchFunctionMode):
    """Replaces torch's tensor factories."""

    def __init__(self, typed: Mapping[Any, Factory]) -> None:
        super().__init__()
        self._typed = typed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made_by = self._typed.get(function, function) if _cutters else function
        return made_by(*args, **(kwargs or {}))


@contextmanager
def _cutting_after_init() -> Iterator[None]:
    """Wrap ``__init__`` of every existing module class, and of every class that is defined in this context."""
    originals: dict[type, Callable[..., None]] = {}
    building: set[int] = set()

    def wrap(kind: type) -> None:
        original = kind.__dict__.get("__init__")
        if original is not None and kind not in originals:
            originals[kind] = original
            kind.__init__ = _cutting_init(original, building)  # type: ignore[misc]

    before = Module.__dict__.get("__init_subclass__")

    def on_subclass(kind: Any, /, **keywords: Any) -> None:
        if before is None:
            super(Module, kind).__init_subclass__(**keywords)
        else:
            before.__get__(None, kind)(**keywords)
        wrap(kind)

    for kind in _subclasses(Module):
        wrap(kind)
    with _replaced(Module, "__init_subclass__", classmethod(on_subclass)):
        try:
            yield
        finally:
            for kind, original in originals.items():
                kind.__init__ = original  # type: ignore[misc]


def _cutting_init(original: Callable[..., None], building: set[int]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(module: torch.nn.Module, *args: Any, **keywords: Any) -> None:  # noqa: N807 - it is one
        # Only the called class shards the parameters, after its base classes have created and filled them.
        outermost = id(module) not in building
        building.add(id(module))
        try:
            original(module, *args, **keywords)
        finally:
            if outermost:
                building.discard(id(module))
        if outermost and _cutters and "_parameters" in module.__dict__:
            _cutters[0].cut(module)

    return __init__


def _gathering_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(module: torch.nn.Module, function: Callable[[torch.nn.Module], None]) -> Any:
        wrapped = function if isinstance(function, _Gathering) else _Gathering(function)
        return original(module, wrapped)

    return apply


class _Gathering:
    """A function that is called with the module's own parameters gathered.

    The changes of rank 0 become the new values.
    """

    def __init__(self, function: Callable[[torch.nn.Module], None]) -> None:
        self._function = function

    def __call__(self, module: torch.nn.Module) -> None:
        shards = [each for each in shards_of(module.parameters(recurse=False)) if not each.available]
        gatherer = Gatherer(why=ACCESS)
        for shard in shards:
            gatherer.gather_each([shard])
        self._function(module)
        for shard in shards:
            broadcast(shard.parameter, shard.group, why=ACCESS)
        for shard in shards:
            shard.keep()
            shard.release()


def _cutting_to_empty(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_empty(module: torch.nn.Module, *args: Any, **keywords: Any) -> Any:
        result = original(module, *args, **keywords)
        if _cutters:
            _cutters[0].cut(module, recurse=True)
        return result

    return to_empty


@contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    own = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _subclasses(kind: type) -> list[type]:
    classes: dict[type, None] = {}
    pending = [kind]
    while pending:
        each = pending.pop()
        if each not in classes:
            classes[each] = None
            pending += each.__subclasses__()
    return list(classes)

"""Making a model whose parameters are cut as soon as they exist, so that no rank ever holds the whole of it (stage 3).

While :func:`constructing` is entered, every module cuts its own parameters when its ``__init__`` has returned, and
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
from zero_runtime.sharding.gathering import ACCESS, Gatherer, broadcast
from zero_runtime.sharding.shards import Shard, shard_of, shards_of
from zero_runtime.sharding.storage import SliceStorage

Module: Final = torch.nn.Module
_FACTORIES: Final = (
    *(torch.tensor, torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.eye, torch.randn),
)
Factory = Callable[..., torch.Tensor]
_cutters: list[Cutter] = []  # of the contexts that are entered, innermost last
_sharded_bytes: Counter[int] = Counter()  # of parameters that were sharded here since an engine last asked


class Cutter:
    """Cuts the parameters of new modules.

    Args:
        group: the ranks that share them out.
        storage: where slices are kept.
        dtype: of the parameters; None to leave it.
    """

    def __init__(self, group: DataParallelGroup, storage: SliceStorage, dtype: torch.dtype | None) -> None:
        self.group = group
        self.storage = storage
        self.dtype = dtype

    @torch.no_grad()
    def cut(self, module: torch.nn.Module, recurse: bool = False) -> None:
        """Cut the parameters of ``module`` that are whole: one broadcast from rank 0 for each, so that all ranks agree."""
        for parameter in module.parameters(recurse=recurse):
            if shard_of(parameter) is not None or is_lazy(parameter) or parameter.is_meta:
                continue  # without elements: cut when it has some
            wanted = self.dtype if parameter.is_floating_point() else None
            parameter.data = parameter.data.to(device=self.group.device, dtype=wanted)
            broadcast(parameter, self.group)
            shard = Shard(parameter, self.group, self.storage.place)
            shard.release()
            self.storage.keep(shard)
            if hooks.recording():
                _sharded_bytes[_bytes(parameter.dtype, shard.numel)] += 1


class Construction(NamedTuple):
    """How the parameters of a model were made, when its engine is.

    A program may drop parameters that ``zero.Init`` has sharded, or replace them by others (an embedding that is resized).

    Attributes:
        sharded: the bytes of each parameter that ``zero.Init`` has sharded in this process since the last engine was made,
            whatever has become of it, and how many there are of that size.
        whole: of each parameter of the model that is not sharded yet.
        sharded_of_model: parameters of the model that are sharded already.
    """

    sharded: Mapping[int, int]
    whole: Mapping[int, int]
    sharded_of_model: int

    def described(self) -> dict[str, Any]:
        """As published for a recorder."""
        return {
            "sharded": sorted(map(list, self.sharded.items())),
            "whole": sorted(map(list, self.whole.items())),
            "sharded_of_model": self.sharded_of_model,
        }


def construction_of(parameters: Iterable[torch.nn.Parameter]) -> Construction:
    """How ``parameters``, those of a model, were made. The next call counts what is sharded after this one."""
    sharded = Counter(_sharded_bytes)
    _sharded_bytes.clear()
    whole: Counter[int] = Counter()
    sharded_of_model = 0
    for parameter in parameters:
        if shard_of(parameter) is None:
            whole[_bytes(parameter.dtype, parameter.numel())] += 1
        else:
            sharded_of_model += 1
    return Construction(sharded, whole, sharded_of_model)


def _bytes(dtype: torch.dtype, numel: int) -> int:
    return numel * dtype.itemsize


def typed_factory(
    fn: Factory, target_fp_dtype: torch.dtype | None, target_device: torch.device | None
) -> Factory:
    """``fn`` that makes floating-point tensors in one dtype, also where another is asked for.

    The signature is that of DeepSpeed's ``zero_wrapper_for_fp_tensor_constructor``.

    Args:
        fn: makes a tensor: ``torch.empty`` and its like.
        target_fp_dtype: None leaves the dtype.
        target_device: where ``fn`` makes it unless it is told; None for torch's default.
    """

    @functools.wraps(fn)
    def typed(*args: Any, **keywords: Any) -> torch.Tensor:
        if target_device is not None and keywords.get("device") is None:
            keywords["device"] = target_device
        result = fn(*args, **keywords)
        if target_fp_dtype is not None and result.is_floating_point():
            result.data = result.data.to(target_fp_dtype)  # in place: it stays a leaf of autograd's
        return result

    return typed


@contextmanager
def constructing(
    cutter: Cutter, gather_in_apply: bool = True, typed: Callable[..., Factory] = typed_factory
) -> Iterator[None]:
    """Cut the parameters of every module that is made inside.

    Contexts may be nested; the outermost one cuts.

    Args:
        cutter: cuts the parameters.
        gather_in_apply: whether ``module.apply`` sees whole parameters.
        typed: makes factories of tensors those of one dtype, by the arguments of :func:`typed_factory`.
    """
    with ExitStack() as stack:
        if not _cutters:
            stack.enter_context(_cutting_after_init())
            if gather_in_apply:
                stack.enter_context(_replaced(Module, "apply", _gathering_apply(Module.apply)))
            stack.enter_context(_replaced(Module, "to_empty", _cutting_to_empty(Module.to_empty)))
            if cutter.dtype is not None:
                device = cutter.group.device
                # torch's default where it is the CPU: a program may have chosen the meta device inside.
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
    """Calls other factories of tensors in the place of torch's."""

    def __init__(self, typed: Mapping[Any, Factory]) -> None:
        super().__init__()
        self._typed = typed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made_by = self._typed.get(function, function) if _cutters else function
        return made_by(*args, **(kwargs or {}))


@contextmanager
def _cutting_after_init() -> Iterator[None]:
    """Wrap ``__init__`` of every module class there is, and of those that are defined inside."""
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
        # Only the class that was called cuts; by then its bases have made and filled the parameters.
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
    """A function of a module, called while the module's own parameters are whole; what rank 0 makes of them counts."""

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
    found: dict[type, None] = {}
    pending = [kind]
    while pending:
        each = pending.pop()
        if each not in found:
            found[each] = None
            pending += each.__subclasses__()
    return list(found)

"""Features of a config whose rules are not stated in this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commprof.requested.errors import UnsupportedError


def refuse_unsupported(config: Mapping[str, Any], stage: int) -> None:
    """Raise UnsupportedError, naming the key, when ``config`` asks for more than stages 0, 1 and 2 by themselves."""
    if stage > 2:
        raise UnsupportedError(
            "zero_optimization.stage",
            stage,
            "stage 3 gathers parameters in an order that only a run can show",
        )
    zero = _mapping(config.get("zero_optimization"))
    if stage and zero.get("zenflow"):
        raise UnsupportedError(
            "zero_optimization.zenflow", zero["zenflow"], "ZenFlow selects gradients by value"
        )
    if stage and _mapping(config.get("torch_autocast")).get("enabled"):
        raise UnsupportedError(
            "torch_autocast.enabled",
            True,
            "the element type of a gradient then depends on the class of its module",
        )
    if _mapping(config.get("compile")).get("deepcompile"):
        raise UnsupportedError("compile.deepcompile", True, "DeepCompile replaces the gradient reduction")
    kept = _mapping(config.get("data_types")).get("keep_in_fp32_modules", "auto")
    if isinstance(kept, list) and kept:
        raise UnsupportedError(
            "data_types.keep_in_fp32_modules", kept, "the element types of the model are then mixed"
        )
    _refuse_parallel(config)


def _refuse_parallel(config: Mapping[str, Any]) -> None:
    tensor = _mapping(config.get("tensor_parallel"))
    sizes = {
        "sequence_parallel_size": config.get("sequence_parallel_size"),
        "tensor_parallel.autotp_size": tensor.get("autotp_size"),
        "tensor_parallel.tp.tp_size": _mapping(tensor.get("tp")).get("tp_size"),
        "pipeline.stages": _mapping(config.get("pipeline")).get("stages"),
    }
    for key, size in sizes.items():
        if isinstance(size, int) and size > 1:
            raise UnsupportedError(
                key, size, "the ranks then form more groups than the one of data parallelism"
            )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

"""``deepspeed.ops.op_builder``: queries for compiled operations. Nothing is built, because torch has the operations."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch

from zero_runtime.deepspeed_names.tables.names import INSTEAD
from zero_runtime.errors import UnsupportedError

_NOT_BUILT: Final = "zero_runtime has no kernels of its own to build or inject; it uses torch's"


class OpBuilder:
    """A compiled operation, with DeepSpeed's name.

    Attributes:
        NAME: The name of the operation in ``deepspeed.ops.__compatible_ops__``.
        HERE: Whether this runtime supports the purpose of the operation, with operations of torch.
    """

    NAME = ""
    HERE = False

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        """Return DeepSpeed's path of the operation."""
        return f"deepspeed.ops.{self.NAME}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether this runtime supports the purpose of the operation."""
        return self.HERE

    def load(self, verbose: bool = True) -> Any:
        """Load the compiled operation.

        Raises:
            UnsupportedError: There is no compiled operation. This error is always raised.
        """
        raise UnsupportedError(
            f"{type(self).__name__}().load() is not in this version: {_NOT_BUILT}; {INSTEAD}"
        )


class UtilsBuilder(OpBuilder):
    """An operation that converts tensors to one flat tensor, and to bytes."""

    NAME = "utils"
    HERE = True

    def load(self, verbose: bool = True) -> SimpleNamespace:
        """Return an object with the functions flatten, unflatten and cast_to_byte_tensor."""
        return SimpleNamespace(
            flatten=torch._utils._flatten_dense_tensors,
            unflatten=torch._utils._unflatten_dense_tensors,
            cast_to_byte_tensor=as_bytes,
        )


def as_bytes(tensors: torch.Tensor | Sequence[torch.Tensor]) -> Any:
    """Return the memory of one tensor, or of each tensor in a list, as a tensor of uint8."""
    if isinstance(tensors, torch.Tensor):
        return tensors.view(-1).view(torch.uint8)
    return [as_bytes(each) for each in tensors]


def _named(builder: str, name: str, is_here: bool) -> type[OpBuilder]:
    return type(builder, (OpBuilder,), {"NAME": name, "HERE": is_here, "__doc__": f"The operation {name}."})


_HERE: Final = {
    "CPUAdamBuilder": "cpu_adam", "CPUAdagradBuilder": "cpu_adagrad", "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam", "FusedLambBuilder": "fused_lamb", "FusedLionBuilder": "fused_lion",
    "AsyncIOBuilder": "async_io",
}  # fmt: skip
_ABSENT: Final = {
    "CCLCommBuilder": "deepspeed_ccl_comm", "EvoformerAttnBuilder": "evoformer_attn", "FPQuantizerBuilder": "fp_quantizer",
    "GDSBuilder": "gds", "InferenceBuilder": "transformer_inference", "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops", "QuantizerBuilder": "quantizer", "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops", "RandomLTDBuilder": "random_ltd", "ShareMemCommBuilder": "deepspeed_shm_comm",
    "SparseAttnBuilder": "sparse_attn", "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer", "TransformerBuilder": "transformer",
}  # fmt: skip
BUILDERS: Final[dict[str, type[OpBuilder]]] = {
    "UtilsBuilder": UtilsBuilder,
    **{builder: _named(builder, name, True) for builder, name in _HERE.items()},
    **{builder: _named(builder, name, False) for builder, name in _ABSENT.items()},
}
ALL_OPS: Final = {each.NAME: each() for each in BUILDERS.values()}
COMPATIBLE: Final = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}

"""``deepspeed.git_version_info.torch_info``: the versions of torch in this process.

DeepSpeed itself records these versions when it is built.
"""

from __future__ import annotations

from typing import Final

import torch


def _nccl() -> str:
    if not torch.cuda.is_available():
        return "0.0"
    return ".".join(map(str, torch.cuda.nccl.version()[:2]))  # type: ignore[no-untyped-call]


TORCH: Final = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": not torch.cuda.is_available() or torch.cuda.is_bf16_supported(),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": _nccl(),
    "hip_version": torch.version.hip or "0.0",
}

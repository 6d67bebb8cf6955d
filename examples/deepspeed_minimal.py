"""Create an engine with the minimum: a model and a config of three keys. The engine has no optimizer and cannot step.

Written for DeepSpeed's API; runs on either (DeepSpeed needs a GPU for fp16)::

    commprof run --engine zero_runtime --nproc 2 examples/deepspeed_minimal.py
"""

from __future__ import annotations

import deepspeed
from torch import nn

ds_config = {
    "train_batch_size": 16,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}


def main() -> None:
    """Create the engine and print its properties."""
    model = nn.Linear(10, 10)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=ds_config)
    if engine.local_rank == 0:
        print(
            f"stage {engine.zero_optimization_stage()}, {model.weight.dtype}, "
            f"micro-batches of {engine.train_micro_batch_size_per_gpu()}, optimizer: {optimizer}"
        )


if __name__ == "__main__":
    main()

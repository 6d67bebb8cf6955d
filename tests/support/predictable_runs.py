"""A synthetic run whose steps can be predicted: equal compute, and successive messages of known duration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from support.runs import SyntheticRun

LAYERS: Final = 8
NUMEL: Final = 10_000  # of a layer
MS: Final = 1_000_000
CONFIG: Final[dict[str, Any]] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 2 * NUMEL, "overlap_comm": False},
}
# The number of gradients that have arrived when each bucket is sent. By the rules of zero_runtime, the first
# gradient that does not fit into a bucket causes the bucket to be sent.
_ARRIVED: Final = (3, 5, 7, 8)
_BUCKET_BYTES: Final = 8 * NUMEL


def predictable_run(path: Path, *, gradient_ms: float, steps: int = 10, **options: Any) -> Path:
    """Write a run of two gloo ranks.

    A step has a forward pass of 30 ms and a backward pass of 60 ms. It also has four gradient messages of
    ``gradient_ms`` each, an optimizer step and the gather of the parameters.
    """
    run = SyntheticRun(2, **{"config": CONFIG, **options})
    run.add_parameters({f"layer{number}.weight": NUMEL for number in range(LAYERS)})
    now = 1_000 * MS
    for step in range(steps):
        begin = now
        end = begin + round((30 + 60 + 4 * gradient_ms + 4 + 2 + 1) * MS)
        run.add_step(step, begin_ns=begin, end_ns=end)
        for number, count in enumerate(_ARRIVED):
            at = begin + round((30 + 7.5 * count + gradient_ms * number) * MS)
            run.add_collective(
                "all_reduce",
                payload_bytes=_BUCKET_BYTES,
                step=step,
                issue_ns=at,
                host_ns=round(gradient_ms * MS),
                purpose="gradient_reduce",
                bucket=number,
            )
        run.add_collective(
            "all_gather",
            payload_bytes=4 * LAYERS * NUMEL,
            step=step,
            phase="optimizer",
            issue_ns=begin + round((94 + 4 * gradient_ms) * MS),
            host_ns=2 * MS,
            purpose="parameter_gather",
        )
        now = end
    run.write(path)
    manifest = json.loads((path / "run.json").read_text())
    command = ["python", "train.py", "--config", "ds.json"]
    (path / "run.json").write_text(json.dumps(manifest | {"command": command}))
    return path

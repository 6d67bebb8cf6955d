"""The moment of a training step at which a rank holds the most, from what is alive in each of its phases.

The phases are those of zero_runtime. Most DeepSpeed stages have the same ones; docs/plan.md compares both with measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from commprof.plan.activations import Activations
from commprof.requested.configuration import read_configuration
from commprof.requested.memory.states import Holding
from commprof.requested.parallel import grid
from commprof.requested.parallel.axes import Axes
from commprof.requested.parameters import Parameter

PASSES: Final = "forward and backward pass"
REDUCTION: Final = "gradient reduction"
STEP: Final = "optimizer step"
_TRANSIENT: Final = ("gradient buckets", "gathered parameters")


class Peak(NamedTuple):
    """The most that a rank holds at once.

    Attributes:
        device: bytes on its device.
        phase: of a training step.
    """

    device: int
    phase: str


def peak_of(
    config: Mapping[str, Any],
    axes: Axes,
    parameters: Sequence[Parameter],
    memory: Sequence[Holding],
    activations: Activations,
    backend: str,
) -> Peak:
    """Return the peak of rank 0.

    Args:
        config: the setting.
        axes: along which the ranks are arranged.
        parameters: of rank 0.
        memory: of rank 0, without activations.
        activations: of one micro-batch.
        backend: ``gloo`` means CPUs, where the buffers of buckets stay allocated in the optimizer step.
    """
    configuration = read_configuration(config)
    held = {each.what: each.device for each in memory}
    whole = held["gradients"] if configuration.stage < 2 and "gradients" in held else 0
    buckets, gathered = (held.get(what, 0) for what in _TRANSIENT)
    lasting = sum(held.values()) - whole - buckets - gathered
    # Stage 0 concatenates gradients after the backward pass; the other stages have buffers in which buckets are filled.
    buffers = buckets if configuration.partitions else 0
    accumulated = whole if grid.micro_batches(config, axes) > 1 else 0
    freed = configuration.reduces_in_backward_order or not whole
    passes = 0
    arrived = 0
    numels = {each.name: each.numel for each in parameters if each.requires_grad}
    item = whole / (sum(numels.values()) or 1)
    for num_bytes, name in activations.spans:
        passes = max(passes, num_bytes + max(accumulated, 0 if freed else round(arrived * item)))
        arrived += numels.get(name, 0)
    # Optimizers read gradients in the masters' type: a copy where they are accumulated in another one.
    copies = held.get("masters", 0)
    if configuration.accumulation_dtype == "float32":
        copies = 0
    phases = {
        PASSES: lasting + buffers + gathered + passes,
        REDUCTION: lasting + buckets + whole,
        STEP: lasting
        + (buffers if backend == "gloo" else 0)
        + (0 if configuration.partitions else whole)
        + copies,
    }
    phase = max(phases, key=lambda each: phases[each])
    return Peak(phases[phase], phase)

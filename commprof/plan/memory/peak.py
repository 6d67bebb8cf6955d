"""The moment of a training step at which a rank holds the most, from what is alive in each of its phases.

The phases are those of zero_runtime. docs/plan.md compares them with measurements, of DeepSpeed too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from commprof.plan.memory.spans import Activations
from commprof.requested.configuration import Configuration, read_configuration, zero_section
from commprof.requested.memory.states import Holding, reduces_beside_backward
from commprof.requested.parameters import Parameter, item_bytes
from commprof.requested.zero.flat_stages import Runtime
from commprof.requested.zero.gather_configuration import read_gather_configuration
from commprof.requested.zero.parameter_blocks import gathered_blocks, gathered_with_gradients

GATHER: Final = "parameter gather"
PASSES: Final = "forward and backward pass"
REDUCTION: Final = "gradient reduction"
STEP: Final = "optimizer step"
_WIDE: Final = 4  # bytes of an fp32 number, in which norms are computed


class Peak(NamedTuple):
    """The most that a rank holds at once.

    Attributes:
        device: bytes on its device.
        phase: of a training step.
    """

    device: int
    phase: str


class _Message(NamedTuple):
    """Of the block of a parameter: its number, the bytes of its gradients, and the bytes that are gathered meanwhile."""

    block: int
    sent: int
    gathered: int


class _Gradients(NamedTuple):
    """How gradients leave a backward pass.

    Attributes:
        whole: bytes of all of them, where they stay until the pass has ended; 0 where they enter buckets in it.
        accumulate: they are there from the beginning, of earlier micro-batches.
        limit: elements of a bucket.
        copied: bytes of an element that are allocated to send a bucket, beside it.
        overlap: a bucket is sent while the pass goes on.
        late: bytes that are allocated with the first gradient.
        apart: bytes of shards that are allocated as their gradients leave.
        messages: those of the blocks, by parameter; empty where gradients enter buckets.
        arriving: what a message that was sent needs, divided by its bytes.
    """

    whole: int
    accumulate: bool
    limit: int
    copied: int
    overlap: bool
    late: int
    apart: int
    messages: Mapping[str, _Message]
    arriving: int


def peak_of(
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    memory: Sequence[Holding],
    activations: Activations,
    micro_batches: int,
    backend: str,
    framework: Runtime = "zero_runtime",
) -> Peak:
    """Return the peak of a rank.

    Args:
        config: the setting, without axes other than that of the data.
        parameters: of the rank.
        memory: of the rank, without activations.
        activations: of one micro-batch.
        micro_batches: of a step.
        backend: ``gloo`` means CPUs, where the buffers of buckets stay allocated in the optimizer step.
        framework: ``deepspeed`` allocates buckets and reduced gradients of stages 1 and 2 in each backward pass.
    """
    configuration = read_configuration(config)
    on_device = {each.what: each.device for each in memory}
    waits = (
        configuration.stage >= 2
        and not configuration.reduces_every_micro_step
        and micro_batches > 1
        and framework == "zero_runtime"
    )
    whole_gradients = on_device.get("gradients", 0) if configuration.stage < 2 or waits else 0
    buckets, gathered = on_device.get("gradient buckets", 0), on_device.get("gathered parameters", 0)
    lasting = sum(on_device.values()) - whole_gradients - buckets - gathered
    # A gathered parameter gets its secondary shard as it is released.
    secondary = on_device.get("secondary shards", 0)
    whole_bytes = sum(each.numel * item_bytes(configuration.model_dtype or each.dtype) for each in parameters)
    secondary_share = secondary / whole_bytes if whole_bytes else 0.0
    numels = {each.name: each.numel for each in parameters if each.requires_grad}
    in_passes = configuration.reduces_in_backward_order
    own_buffers = configuration.partitions and not configuration.reduces_flat_groups
    stays = buckets if backend == "gloo" and own_buffers and not configuration.reduces_chunks else 0
    late = concatenated = 0
    if framework == "deepspeed" and own_buffers:
        stays = buckets if configuration.stage == 3 else 0
        if configuration.stage < 3:
            concatenated = on_device.get("gradients" if configuration.stage == 2 else "reduced gradients", 0)
        if configuration.stage < 3 and micro_batches == 1:
            late = concatenated + (buckets if in_passes else 0)
            lasting -= concatenated
    types = [configuration.model_dtype or each.dtype for each in parameters]
    # What is prefetched arrives in a buffer, from which the parameters are copied.
    gathering = read_gather_configuration(zero_section(config))
    blocks = gathered_blocks(parameters, gathering) if configuration.stage == 3 else []
    arriving_numel = max((sum(each.numel for each in members) for members in blocks), default=0)
    meanwhile = gathered_with_gradients(parameters, blocks, gathering) if blocks else {}
    # By block the shards of gradients come with the messages, and are joined after the pass.
    is_apart = blocks and micro_batches == 1 and framework == "zero_runtime"
    apart = on_device.get("gradients", 0) if is_apart else 0
    before_release = lasting - apart - round(min(gathered, whole_bytes) * secondary_share)
    arriving = min(gathered, (arriving_numel or gathering.prefetch_bucket_size) * item_bytes(types[0]))
    gradients = _Gradients(
        0 if in_passes and not waits else whole_gradients,
        micro_batches > 1,
        configuration.reduce_bucket_size,
        _copied(configuration, types[0]) if in_passes and not blocks else 0,
        reduces_beside_backward(config),
        late,
        apart,
        {
            each.name: _Message(
                number,
                sum(one.numel for one in members) * item_bytes(configuration.communication_dtype),
                meanwhile[number] * item_bytes(types[0]),
            )
            for number, members in enumerate(blocks)
            for each in members
        },
        1 if configuration.reduce_scatter_on(backend) == "native" else 2,
    )
    trained = sum(
        each.numel * item_bytes(configuration.model_dtype or each.dtype)
        for each in parameters
        if each.requires_grad
    )
    # Optimizers read gradients in the masters' type: a copy where they are accumulated in another one.
    copies = 0 if configuration.accumulation_dtype == "float32" else on_device.get("masters", 0)
    if not configuration.partitions and trained < _WIDE * sum(numels.values()):
        copies = _WIDE * sum(numels.values())  # for the norm, without masters too
    # Gradients that wait for the last micro-batch leave in its backward pass.
    left = 0 if waits else whole_gradients
    kept_gradients = left if not configuration.partitions or configuration.reduces_chunks else 0
    phases = {
        GATHER: before_release + stays + gathered + arriving,
        PASSES: before_release
        + (0 if blocks else buckets if in_passes and not late else stays)
        + max(_alive(activations, numels, gradients, gathered, trained, secondary_share)),
        REDUCTION: lasting
        + late
        + max(0 if late and in_passes else buckets, apart)
        + (0 if configuration.reduces_flat_groups else left),
        STEP: lasting + stays + kept_gradients + copies + concatenated + (concatenated if late else 0),
    }
    phase = max(phases, key=lambda each: phases[each])
    return Peak(phases[phase], phase)


def _alive(
    activations: Activations,
    numels: Mapping[str, int],
    gradients: _Gradients,
    gathered: int,
    trained: int,
    secondary_share: float,
) -> Iterator[int]:
    """What only a pass keeps, in each span and at the end of those that send a bucket.

    Args:
        activations: of the pass.
        numels: elements of the trained parameters by name.
        gradients: how they leave the pass.
        gathered: most bytes of gathered parameters.
        trained: bytes of all trained parameters.
        secondary_share: of a released parameter's bytes that its secondary shard has.
    """
    total = sum(numels.values()) or 1
    arrived = filled = sent = 0
    sent_rows = 0
    message = _Message(-1, 0, gathered)
    for span in activations.spans:
        done = arrived / total
        rest = gradients.whole if gradients.accumulate else round(gradients.whole * done)
        before, message = message, gradients.messages.get(span.parameter, message)
        if message.block != before.block:
            # Of a block that was sent there is also what arrives.
            sent_rows = before.sent * gradients.arriving * gradients.overlap
        rest += message.sent + sent_rows
        # A gathered parameter is released when its gradient is complete: this step does not use it again.
        still = min(message.gathered, round(trained * (1 - done)))
        rest += still + round((gathered - still) * secondary_share)
        rest += gradients.late if arrived else 0
        rest += round(gradients.apart * done)
        yield span.most + rest + (sent if gradients.overlap else 0)
        numel = numels.get(span.parameter, 0)
        if filled and (filled + numel > gradients.limit or not span.parameter):
            sent = filled * gradients.copied
            yield span.last + rest + sent
            filled = 0
        filled += numel
        arrived += numel


def _copied(configuration: Configuration, trained_type: str) -> int:
    """Bytes of an element of a bucket that its message needs beside it: rows of a reduce_scatter, and another type."""
    if configuration.reduces_chunks:
        return 0  # they are in the buffers
    arranges = configuration.stage == 3 and configuration.reduction == "reduce_scatter"
    casts = configuration.communication_dtype != trained_type
    return item_bytes(configuration.communication_dtype) * (arranges + casts)

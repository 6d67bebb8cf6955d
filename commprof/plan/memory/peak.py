"""Predict the peak memory of a rank in a training step, from the bytes that are alive in each phase.

The phases are those of zero_runtime. docs/plan.md compares the predictions with measurements, also of DeepSpeed.
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
    """The maximum memory that a rank needs at once.

    Attributes:
        device: The bytes on the device of the rank.
        phase: The phase of a training step in which the peak occurs.
    """

    device: int
    phase: str


class _Message(NamedTuple):
    """The number of a block, the bytes of its gradients, and the parameter bytes that are gathered with them."""

    block: int
    sent: int
    gathered: int


class _Gradients(NamedTuple):
    """The memory of gradients and of their reduction during a backward pass.

    Attributes:
        whole: The bytes of all gradients if they stay until the pass has ended. 0 if they enter buckets in the pass.
        accumulate: Whether gradients of earlier micro-batches exist from the beginning of the pass.
        limit: The maximum number of elements of a bucket.
        copied: The bytes per element that are allocated in addition to a bucket to send it.
        overlap: Whether the pass continues while a bucket is sent.
        late: The bytes that are allocated with the first gradient.
        apart: The bytes of gradient shards, which are allocated when the gradients are reduced.
        messages: The message of the block of each parameter. Empty if gradients enter buckets.
        arriving: The memory that a message needs while it is sent, as a multiple of its bytes.
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
    """Return the peak memory of a rank.

    Args:
        config: The setting, without axes other than the data axis.
        parameters: The parameters of the rank.
        memory: The memory of the rank by kind, without activations.
        activations: The activations of one micro-batch.
        micro_batches: The number of micro-batches of a step.
        backend: The backend. ``gloo`` means CPUs, where the buffers of buckets stay allocated in the optimizer step.
        framework: The runtime. ``deepspeed`` allocates buckets and reduced gradients of stages 1 and 2 in each
            backward pass.
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
    # The secondary shard of a gathered parameter is allocated when the parameter is released.
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
    # Prefetched parameters arrive in a buffer, and are then copied from this buffer.
    gathering = read_gather_configuration(zero_section(config))
    blocks = gathered_blocks(parameters, gathering) if configuration.stage == 3 else []
    arriving_numel = max((sum(each.numel for each in members) for members in blocks), default=0)
    meanwhile = gathered_with_gradients(parameters, blocks, gathering) if blocks else {}
    # If blocks are gathered, the shards of gradients are allocated with the messages, and are joined after the pass.
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
    # Optimizers read gradients in the type of the master weights. This needs a copy if they are accumulated in a
    # different type.
    copies = 0 if configuration.accumulation_dtype == "float32" else on_device.get("masters", 0)
    if not configuration.partitions and trained < _WIDE * sum(numels.values()):
        copies = _WIDE * sum(numels.values())  # for the norm, even without master weights
    # Gradients that wait for the last micro-batch are reduced in its backward pass.
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
    """Yield the bytes that only a pass needs, in each span and at the end of each span that sends a bucket.

    Args:
        activations: The activations of the pass.
        numels: The number of elements of each trained parameter, by name.
        gradients: The memory of gradients during the pass.
        gathered: The maximum number of bytes of gathered parameters.
        trained: The bytes of all trained parameters.
        secondary_share: The size of a secondary shard, as a fraction of the bytes of the released parameter.
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
            # The result of the message of the previous block is also alive, if the message overlaps the pass.
            sent_rows = before.sent * gradients.arriving * gradients.overlap
        rest += message.sent + sent_rows
        # A gathered parameter is released when its gradient is complete, because this step does not use it again.
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
    """Return the bytes per element that a message needs in addition to its bucket.

    They are the rows of a reduce_scatter, and a copy in a different type.
    """
    if configuration.reduces_chunks:
        return 0  # the buffers already contain these bytes
    arranges = configuration.stage == 3 and configuration.reduction == "reduce_scatter"
    casts = configuration.communication_dtype != trained_type
    return item_bytes(configuration.communication_dtype) * (arranges + casts)

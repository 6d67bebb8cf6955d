"""Predicts the messages of an expert layer, which sends tokens to the ranks with the experts, and the results back.

Each rank fills a buffer of [experts, capacity, hidden]. It has ``capacity`` slots for each expert, including empty
slots. An all_to_all with equal splits sends the buffer to the ranks with the experts. A second all_to_all returns the
results. Both are repeated for the gradients. The bytes therefore follow from the capacity, not from the choices of the
gate:

    capacity = max(ceil(tokens / experts x capacity_factor x k), min_capacity)

Without dropping (``drop_tokens: false``) the capacity is the largest number of tokens that a rank of the
expert-parallel group has for one expert. The ranks agree on the capacity by an all_reduce of one int64. Source:
DeepSpeed 0.19.8, ``moe/sharded_moe.py``: ``_capacity``, ``top1gating``, ``top2gating``, ``topkgating`` and
``MOELayer.forward``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from commprof.requested.errors import RequestedError
from commprof.requested.expectation import Expectation, row
from commprof.requested.experts.rank_groups import Groups, RankGroups
from commprof.requested.parameters import Parameter, in_model_order, item_bytes
from commprof.schema import Op, Purpose

CAPACITY_BYTES: Final = 8  # one int64
BALANCED: Final = "tokens are assumed to be spread evenly over the experts"
SKEWED: Final = "the fullest expert is assumed to get {:g} times the mean number of tokens"
_FULLEST: Final = "how many tokens the fullest expert gets"
_AUTOCAST: Final = (
    "whether the module before the layer leaves tokens in the type of torch.autocast or in fp32"
)


class ExpertLayer(NamedTuple):
    """One expert layer, as in the table ``expert_layers``, with the number of its tokens.

    Attributes:
        layer: The qualified name of the module.
        num_experts: The number of experts of all ranks of an expert-parallel group.
        ep_size: The number of ranks of an expert-parallel group.
        k: The number of experts that process each token.
        capacity_factor: The number of slots of an expert as a multiple of its share of the tokens.
        min_capacity: The minimum number of slots.
        drop_tokens: Whether tokens beyond the capacity are dropped. If not, the capacity grows.
        hidden: The number of elements of a token.
        tokens: The number of tokens of each rank in one forward pass.
        forwards: The number of forward passes in one micro-batch, which is 2 if activation checkpointing repeats the
            pass.
        skew: The load of the fullest expert as a multiple of the mean. 1 means an even spread.
        sent_bytes: The recorded bytes of a token's element on the way to the experts, or None for the bytes in the
            model.
        returned_bytes: The recorded bytes of a result's element, or None for the bytes in the model.
    """

    layer: str
    num_experts: int
    ep_size: int
    k: int
    capacity_factor: float
    min_capacity: int
    drop_tokens: bool
    hidden: int
    tokens: int
    forwards: int = 1
    skew: float = 1.0
    sent_bytes: int | None = None
    returned_bytes: int | None = None

    @property
    def capacity(self) -> int:
        """The number of slots of each expert per source rank.

        If tokens are not dropped, this is the number of slots that the fullest expert needs at ``skew``.
        """
        if not self.drop_tokens:
            return min(self.tokens, math.ceil(self.skew * self.tokens * self.k / self.num_experts))
        return capacity(self.tokens, self.num_experts, self.capacity_factor, self.k, self.min_capacity)

    def check(self) -> None:
        """Raise RequestedError if the sizes are not consistent."""
        if self.ep_size < 1 or self.num_experts < 1 or self.num_experts % self.ep_size:
            raise RequestedError(
                f"layer {self.layer} has {self.num_experts} experts and ep_size {self.ep_size}; "
                "expected a number of experts that ep_size divides"
            )
        if not 1 <= self.k <= self.num_experts:
            raise RequestedError(
                f"layer {self.layer} has k {self.k} and {self.num_experts} experts; expected 1 to {self.num_experts}"
            )


def capacity(tokens: int, num_experts: int, factor: float, k: int, min_capacity: int) -> int:
    """Return the number of slots of each expert per source rank, if tokens beyond the slots are dropped.

    Computed in fp32, as DeepSpeed does.

    >>> capacity(64, 4, 1.0, 1, 4), capacity(64, 4, 1.25, 2, 4), capacity(4, 8, 1.0, 1, 4)
    (16, 40, 4)
    """
    share = _fp32(tokens / num_experts)
    slots = math.ceil(_fp32(share * _fp32(factor * k)))
    return max(slots, min_capacity)


def token_bytes(parameters: Sequence[Parameter], model_dtype: str | None, autocast_dtype: str | None) -> int:
    """Return the bytes of a token's element. Its type is that of autocast, of the config, or of the first parameter."""
    own = parameters[0].dtype if parameters else "float32"
    return item_bytes(autocast_dtype or model_dtype or own)


def element_bytes_of(layer: ExpertLayer, returns: bool, element_bytes: int) -> int:
    """Return the bytes of an element on the way to the experts of ``layer``, or with ``returns`` on the way back.

    ``element_bytes`` is the element size in the model, which applies if the layer has no recorded size.
    """
    own = layer.returned_bytes if returns else layer.sent_bytes
    return element_bytes if own is None else own


def _fp32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def gets_gradient(layer: str, parameters: Sequence[Parameter]) -> bool:
    """Return whether the input of ``layer`` needs a gradient, because a trained parameter is before it in the model.

    Without such a gradient, the first all_to_all has no counterpart in the backward pass.
    """
    for each in in_model_order(parameters):
        if each.name.startswith(f"{layer}."):
            return False
        if each.requires_grad:
            return True
    return False


def in_autocast(rows: Iterable[Expectation]) -> list[Expectation]:
    """Return ``rows`` with estimated bytes, because under torch.autocast some tokens may be in fp32, not in 16 bits."""
    return [
        each._replace(
            bytes_exact=False,
            most_bytes=2 * (each.most_bytes or each.payload_bytes),
            estimate=each.estimate or _AUTOCAST,
        )
        if each.issued_op == Op.ALL_TO_ALL
        else each
        for each in rows
    ]


def token_messages(
    layer: ExpertLayer, groups: Groups, element_bytes: int, backwards: int, slots: int | None = None
) -> list[Expectation]:
    """Return the messages of ``layer`` in each micro-batch. With an ``ep_size`` of 1 there are none.

    Args:
        layer: The layer.
        groups: The expert-parallel groups, each of which sends the messages.
        element_bytes: The bytes of a token's element in the model.
        backwards: The number of all_to_alls of the backward pass: 2, or 1 if the input needs no gradient.
        slots: The capacity if it is known. None uses :attr:`ExpertLayer.capacity`.
    """
    if layer.ep_size == 1:
        return []
    # The backward pass first sends the gradients of the results.
    there, back = (element_bytes_of(layer, returns, element_bytes) for returns in (False, True))
    elements = [there, back] * layer.forwards + [back, there][:backwards]
    known = slots is not None or layer.drop_tokens
    of_slots = layer.num_experts * layer.hidden
    payloads = [of_slots * (layer.capacity if slots is None else slots) * each for each in elements]
    note = "" if slots is not None else BALANCED if layer.skew == 1 else SKEWED.format(layer.skew)
    sent = row("micro_step", Purpose.ACTIVATION, Op.ALL_TO_ALL, payloads, layer.ep_size, note)
    if not known:
        most = of_slots * layer.tokens * sum(elements)
        sent = sent._replace(bytes_exact=False, most_bytes=most, estimate=_FULLEST)
    rows = [sent]
    if not layer.drop_tokens:
        agreed = [CAPACITY_BYTES] * layer.forwards
        rows.append(row("micro_step", Purpose.ACTIVATION, Op.ALL_REDUCE, agreed, layer.ep_size))
    return [each._replace(groups=groups, padding_bytes=None) for each in rows]


def expected_tokens(
    layers: Iterable[ExpertLayer], parameters: Sequence[Parameter], element_bytes: int, groups: RankGroups
) -> list[Expectation]:
    """Return the messages of all ``layers`` in each micro-batch.

    Args:
        layers: The expert layers of the model.
        parameters: The parameters of the model. They are sorted into model order.
        element_bytes: The bytes of a token's element in the model.
        groups: The process groups of the ranks.

    Raises:
        RequestedError: the sizes of a layer are not consistent.
    """
    rows = []
    for layer in layers:
        layer.check()
        backwards = 1 + gets_gradient(layer.layer, parameters)
        rows += token_messages(layer, groups.of_experts(layer.ep_size), element_bytes, backwards)
    return rows

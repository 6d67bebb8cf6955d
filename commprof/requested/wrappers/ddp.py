"""Predicts the messages of DistributedDataParallel from its arguments and parameters, for torch 2.11 to 2.14.

========================= ====================================================================================
at construction           an all_gather of the number of parameters; a broadcast of their shapes; broadcasts of
                          parameters and buffers, which are closed by the tensor that reaches 250 MiB and have one
                          element type
before a forward pass     broadcasts of the buffers, if the gradients of the previous forward pass are reduced; a
                          broadcast of the new order of gradients, once
in a backward pass        an all_reduce for each bucket; an all_reduce of the flags of used parameters, if DDP searches
                          for unused parameters
========================= ====================================================================================

Buckets are first filled in the order of the model, and later in the order of the gradients. If the order of the
gradients is not known, the bytes are known, but not the number of messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from commprof.requested.errors import RequestedError
from commprof.requested.expectation import Expectation
from commprof.requested.parameters import item_bytes
from commprof.requested.wrappers.arguments import (
    BACKWARD,
    FORWARD,
    FORWARD_ALONE,
    NO_GRADIENTS,
    Tensor,
    Wrapper,
)
from commprof.schema import Op, Purpose

MIB: Final = 2**20
DEFAULT_BUCKET_MIB: Final = 25
FIRST_BUCKET_BYTES: Final = MIB  # only if bucket_cap_mb is not passed
BROADCAST_BYTES: Final = 250 * MIB
_INDEX_BYTES: Final = 4  # int32
_SHAPE_BYTES: Final = 8  # int64
# Communication hooks that reduce a bucket unchanged (None), or in another element type.
_HOOK_DTYPES: Final[dict[str, str | None]] = {
    "allreduce_hook": None,
    "ALLREDUCE": None,
    "fp16_compress_hook": "float16",
    "FP16_COMPRESS": "float16",
    "bf16_compress_hook": "bfloat16",
}


class State(NamedTuple):
    """The state between two passes.

    Attributes:
        syncs: Whether the next forward pass broadcasts the buffers.
        reductions: The number of backward passes that reduced gradients, counted up to 2.
        rebuilt: Whether buckets follow the order of the gradients.
    """

    syncs: bool = True
    reductions: int = 0
    rebuilt: bool = False


@dataclass(frozen=True)
class Ddp:
    """The rules for one model.

    Attributes:
        wrapper: The arguments and parameters of the model.
        order: The names of the trained parameters in the order of their gradients, or None if it is not known.
    """

    wrapper: Wrapper
    order: tuple[str, ...] | None = None

    def argument(self, name: str) -> Any:
        """Return the argument ``name``, or None if it was not passed."""
        return self.wrapper.arguments.get(name)

    @property
    def unpredicted(self) -> dict[str, str]:
        """The purposes that the rules do not predict, each with the reason."""
        reasons = {}
        for name, what in (
            ("sparse", "sparse gradients"),
            ("python_reducer", "the reducer in Python, of compiled autograd,"),
            ("mixed_precision", "mixed_precision"),
            ("delayed", "delay_all_reduce_named_params"),
            ("skip_all_reduce_unused_params", "skip_all_reduce_unused_params"),
        ):
            if self.argument(name):
                reasons[str(Purpose.GRADIENT_REDUCE)] = f"{what} decides how gradients are reduced"
        hook = self.argument("comm_hook")
        if hook is not None and hook not in _HOOK_DTYPES:
            reasons[str(Purpose.GRADIENT_REDUCE)] = f"the communication hook {hook} decides what is sent"
        elif hook is not None and (self.argument("comm_hook_step") or -1) >= 0:
            reasons[str(Purpose.GRADIENT_REDUCE)] = (
                f"the communication hook {hook} was registered during training"
            )
        return reasons

    def construction(self) -> list[Expectation]:
        """Return the messages at construction."""
        if self.argument("init_sync") is False:
            return []
        wrapper, world = self.wrapper, len(self.wrapper.ranks)
        # The message contains the sizes and strides of each trained parameter.
        shapes = sum(2 * len(each.extents) for each in self._reduced)
        buffers = wrapper.buffers if self._syncs_buffers_at_first else ()
        states = [each for each in (*wrapper.parameters, *buffers) if each.name not in self._ignored]
        return [
            *wrapper.sent(Purpose.TRACE_CHECK, Op.ALL_GATHER, [world * _SHAPE_BYTES], "init"),
            *wrapper.sent(Purpose.TRACE_CHECK, Op.BROADCAST, [shapes * _SHAPE_BYTES], "init"),
            *wrapper.sent(Purpose.PARAMETER_BROADCAST, Op.BROADCAST, _coalesced(states), "init"),
        ]

    def passes(self, passes: str, state: State | None) -> tuple[list[Expectation], State]:
        """Return the messages of ``passes``, and the state after them.

        ``passes`` consists of the letters in :mod:`commprof.requested.wrappers.arguments`.

        Raises:
            RequestedError: a pass is not known.
        """
        rows: list[Expectation] = []
        state = State() if state is None else state
        for each in passes:
            if each in (FORWARD, FORWARD_ALONE, NO_GRADIENTS):
                rebuilds = each != NO_GRADIENTS and not state.rebuilt and self._rebuilds(state)
                rows += self._forward(state, rebuilds=rebuilds)
                state = state._replace(syncs=each == FORWARD, rebuilt=state.rebuilt or rebuilds)
            elif each == BACKWARD:
                rows += self._backward(state)
                state = state._replace(reductions=min(state.reductions + 1, 2))
            else:
                raise RequestedError("which passes a model of DistributedDataParallel ran is not known")
        return rows, state

    def steady_messages(self) -> list[tuple[int, int, str]]:
        """Return the all_reduces of a backward pass whose buckets follow the order of the gradients.

        Returns:
            For each all_reduce: its bytes, how many gradients have arrived when it is sent, and the element type.
        """
        dtype = _HOOK_DTYPES[self.argument("comm_hook")] if self.argument("comm_hook") else None
        place = {name: number for number, name in enumerate(self.order or (), 1)}
        sent: list[tuple[int, int, str]] = []
        for bucket in self._buckets(rebuilt=True):
            num_bytes = sum(each.numel * item_bytes(dtype or each.dtype) for each in bucket)
            arrived = max(place.get(each.name, len(place)) for each in bucket)
            # Buckets are sent in order, even if a later bucket is full first.
            arrived = max(arrived, sent[-1][1] if sent else 0)
            sent.append((num_bytes, arrived, dtype or bucket[0].dtype))
        return sent

    @property
    def _ignored(self) -> frozenset[str]:
        return frozenset(self.argument("ignored") or ())

    @property
    def _reduced(self) -> list[Tensor]:
        return [each for each in self.wrapper.trained if each.name not in self._ignored]

    @property
    def _syncs_buffers(self) -> bool:
        new, old = self.argument("forward_sync_buffers"), self.argument("broadcast_buffers")
        return bool(new) if new is not None else old is None or bool(old)

    @property
    def _syncs_buffers_at_first(self) -> bool:
        return self.argument("forward_sync_buffers") is not None or self._syncs_buffers

    @property
    def _is_static(self) -> bool:
        return bool(self.argument("static_graph"))

    @property
    def _looks_for_unused(self) -> bool:
        return bool(self.argument("find_unused_parameters")) and not self._is_static

    def _rebuilds(self, state: State) -> bool:
        """Return whether the next forward pass rebuilds the buckets in the order of the gradients.

        The order is known after one backward pass, and with a static graph after the second.
        """
        return not self._looks_for_unused and state.reductions > int(self._is_static)

    def _forward(self, state: State, *, rebuilds: bool) -> list[Expectation]:
        wrapper = self.wrapper
        rows = []
        if rebuilds:
            buckets = self._buckets(rebuilt=True)
            indices = (len(self._reduced) + 1) * _INDEX_BYTES
            exact = self.order is not None
            sizes = [indices, len(buckets) * _INDEX_BYTES]
            sent = wrapper.sent(Purpose.BUCKET_REBUILD, Op.BROADCAST, sizes)
            estimate = "the order of gradients, which the run did not publish"
            rows += [
                each
                if exact
                else each._replace(
                    bytes_exact=False, least_bytes=indices, most_bytes=2 * indices, estimate=estimate
                )
                for each in sent
            ]
        if state.syncs and self._syncs_buffers:
            buffers = [each for each in wrapper.buffers if each.name not in self._ignored]
            rows += wrapper.sent(Purpose.BUFFER_BROADCAST, Op.BROADCAST, _coalesced(buffers))
        return rows

    def _backward(self, state: State) -> list[Expectation]:
        wrapper = self.wrapper
        rows = []
        if not self.unpredicted:
            dtype = _HOOK_DTYPES[self.argument("comm_hook")] if self.argument("comm_hook") else None
            payloads = [
                sum(each.numel * item_bytes(dtype or each.dtype) for each in bucket)
                for bucket in self._buckets(rebuilt=state.rebuilt)
            ]
            exact = not state.rebuilt or self.order is not None
            rows += wrapper.sent(Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, payloads, exact=exact)
        if self._looks_for_unused or (self._is_static and not state.reductions):
            size = len(self._reduced) * _INDEX_BYTES
            rows += wrapper.sent(Purpose.UNUSED_PARAMETERS, Op.ALL_REDUCE, [size])
        return rows

    def _buckets(self, *, rebuilt: bool) -> list[list[Tensor]]:
        listed, cap = self.argument("bucket_cap_mb_list"), self.argument("bucket_cap_mb")
        most = int((DEFAULT_BUCKET_MIB if cap is None else cap) * MIB)
        limits: list[int | None] = [FIRST_BUCKET_BYTES, most] if cap is None else [most]
        if listed:
            limits = [int(each * MIB) for each in listed]
        elif not rebuilt and not self._looks_for_unused:
            limits = [None]
        tensors = self._reduced
        if rebuilt:
            by_name = {each.name: each for each in tensors}
            names = self.order if self.order is not None else [each.name for each in reversed(tensors)]
            tensors = [by_name[name] for name in names]
        return filled(tensors, limits)


def filled(tensors: Sequence[Tensor], limits: Sequence[int | None]) -> list[list[Tensor]]:
    """Return ``tensors`` in buckets of one element type each. The tensor that reaches the limit closes a bucket.

    Args:
        tensors: The tensors in order.
        limits: The limits in bytes of the first buckets of each element type. The last limit applies to all further
            buckets. None means no limit.
    """
    closed: list[list[Tensor]] = []
    open_buckets: dict[str, list[Tensor]] = {}
    sizes, number = Counter[str](), Counter[str]()
    for each in tensors:
        open_buckets.setdefault(each.dtype, []).append(each)
        sizes[each.dtype] += each.nbytes
        limit = limits[min(number[each.dtype], len(limits) - 1)]
        if limit is not None and sizes[each.dtype] >= limit:
            closed.append(open_buckets.pop(each.dtype))
            number[each.dtype] += 1
            sizes[each.dtype] = 0
    return [*closed, *open_buckets.values()]


def _coalesced(tensors: Sequence[Tensor]) -> list[int]:
    return [sum(each.nbytes for each in bucket) for bucket in filled(tensors, [BROADCAST_BYTES])]


def with_order(rules: Ddp, names: Sequence[str] | None) -> Ddp:
    """Return ``rules`` with the order of gradients in ``names``.

    ``names`` may contain further names. If a trained parameter is missing or occurs twice, ``rules`` is unchanged.
    """
    if names is None:
        return rules
    mine = {each.name for each in rules._reduced}
    order = tuple(name for name in names if name in mine)
    return replace(rules, order=order) if len(order) == len(mine) == len(set(order)) else rules

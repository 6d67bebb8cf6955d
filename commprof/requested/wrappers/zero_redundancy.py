"""Predicts the messages of ZeroRedundancyOptimizer after each step, from its arguments and parameters.

The parameters of each group are assigned in order of decreasing size. Each parameter is assigned to the rank that has
the fewest elements so far. After a step each rank broadcasts the parameters that it updated. It broadcasts them
separately, or with ``parameters_as_bucket_view`` all trained parameters in one bucket.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from commprof.requested.errors import RequestedError
from commprof.requested.expectation import Expectation
from commprof.requested.parameters import item_bytes
from commprof.requested.wrappers.arguments import Tensor, Wrapper, matches
from commprof.schema import Op, Purpose

_PASS: Final = re.compile(r"S(?P<groups>\d+)(-(?P<frozen>[\d.]+))?;")
_EMPTY_BUCKET_BYTES: Final = 4  # one fp32, sent by a rank without a trained parameter
_OVERLAPPED: Final = "overlap_with_ddp sends from a communication hook, by buckets that are not published"
_DEVICES: Final = "its parameters are on several devices, and their placement is not published"


@dataclass(frozen=True)
class ZeroRedundancy:
    """The rules for one optimizer.

    Attributes:
        wrapper: The process group, the arguments, and the parameters in the order of the parameter groups.
    """

    wrapper: Wrapper

    @property
    def unpredicted(self) -> dict[str, str]:
        """The purposes that the rules do not predict, each with the reason."""
        arguments = self.wrapper.arguments
        if arguments.get("overlap_with_ddp"):
            return dict.fromkeys(
                (str(Purpose.PARAMETER_BROADCAST), str(Purpose.GRADIENT_REDUCE)), _OVERLAPPED
            )
        if self._in_buckets and len(arguments.get("devices") or ()) > 1:
            return {str(Purpose.PARAMETER_BROADCAST): _DEVICES}
        return {}

    def construction(self) -> list[Expectation]:
        """Return the messages at construction. There are none."""
        return []

    def passes(self, passes: str, state: None) -> tuple[list[Expectation], None]:
        """Return the messages of the optimizer steps in ``passes``, and None because no state is kept between steps.

        Raises:
            RequestedError: an entry of ``passes`` is not known.
        """
        rows: list[Expectation] = []
        known = "" if self.unpredicted else passes
        for match in matches(known, _PASS, "which steps a ZeroRedundancyOptimizer took"):
            frozen = frozenset(int(each) for each in (match["frozen"] or "").split(".") if each)
            payloads = self._payloads(int(match["groups"]), frozen)
            rows += self.wrapper.sent(Purpose.PARAMETER_BROADCAST, Op.BROADCAST, payloads)
        return rows, None

    def _payloads(self, groups: int, frozen: frozenset[int]) -> list[int]:
        if not self._in_buckets:
            return [each.nbytes for owned in self._partition(groups) for _, each in owned]
        payloads = []
        for owned in self._partition(groups):
            trained = [each for place, each in owned if place not in frozen]
            numel = sum(each.numel for each in trained)
            payloads.append(numel * item_bytes(trained[0].dtype) if numel else _EMPTY_BUCKET_BYTES)
        return payloads

    def _partition(self, groups: int) -> list[list[tuple[int, Tensor]]]:
        """Return for each rank the parameters that it updates, with their positions."""
        sizes = [0] * len(self.wrapper.ranks)
        owned: list[list[tuple[int, Tensor]]] = [[] for _ in sizes]
        for group in self._groups(groups):
            for place, each in sorted(group, key=lambda one: one[1].numel, reverse=True):
                rank = sizes.index(min(sizes))
                owned[rank].append((place, each))
                sizes[rank] += each.numel
        return owned

    def _groups(self, groups: int) -> Iterator[list[tuple[int, Tensor]]]:
        counts = self.wrapper.arguments.get("groups")
        if not isinstance(counts, list) or groups > len(counts):
            raise RequestedError(f"a ZeroRedundancyOptimizer has {groups} groups of {counts!r}")
        numbered = list(enumerate(self.wrapper.parameters))
        for count in counts[:groups]:
            yield numbered[:count]
            numbered = numbered[count:]

    @property
    def _in_buckets(self) -> bool:
        return bool(self.wrapper.arguments.get("parameters_as_bucket_view"))

"""Stage 3 of zero_runtime by blocks (``stage3_gather_unit``): which parameters one message gathers, and when.

A block contains the parameters of an outermost numbered module (a child of a ModuleList or Sequential), or the
parameters between two such modules. In a model without numbered modules, a block contains the parameters of a child of
the model.

A visit begins when the program passes from one block to another. The first micro-batch records the visits. In this
micro-batch each visit gathers its block and releases the block before. Visits in later micro-batches also prefetch the
next blocks, and keep blocks that are used again soon. The gradients of a block with the same element type are reduced
in one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cached_property
from itertools import accumulate, groupby, islice
from typing import Final, NamedTuple

from commprof.requested.parameters import Parameter, in_model_order
from commprof.requested.zero.gather_configuration import GatherConfiguration
from commprof.requested.zero.gathering import REPEATED_USES, Gather, Gathers
from commprof.requested.zero.modules import Visit, module_tree, training_visits

Block = tuple[Parameter, ...]
_NEVER: Final = 2**63
_EMBEDDING: Final = "Embedding"  # owner_types of torch's own class, without subclasses


def numbered_module(module: str) -> str:
    """Return the outermost numbered module that is or contains ``module``, or an empty string without one.

    >>> numbered_module("h.3.mlp.experts.0")
    'h.3'
    """
    parts = module.split(".")
    ends = (place for place, part in enumerate(parts, 1) if part.isdecimal())
    return ".".join(parts[: next(ends, 0)])


def blocks_of(parameters: Sequence[Parameter], unpartitioned: Set[str] = frozenset()) -> list[Block]:
    """Return the blocks of a model with ``parameters``, in model order, without the ``unpartitioned`` parameters."""
    listed = [each for each in in_model_order(parameters) if each.name not in unpartitioned]
    numbers = any(numbered_module(each.module) for each in listed)
    blocks: dict[str, list[Parameter]] = {}
    for name, run in groupby(
        listed, lambda each: numbered_module(each.module) if numbers else each.module.split(".")[0]
    ):
        members = list(run)
        blocks.setdefault(name or f"{members[0].module}:{members[-1].module}", []).extend(members)
    return [tuple(each) for each in blocks.values()]


def gathered_blocks(
    parameters: Sequence[Parameter], configuration: GatherConfiguration, unpartitioned: Set[str] = frozenset()
) -> list[Block]:
    """Return the blocks that are gathered by one message each, or an empty list if modules are gathered instead.

    ``auto`` gathers blocks if the model has at least two numbered modules, and if the largest block fits twice into
    ``stage3_max_live_parameters``.
    """
    if configuration.unit == "module":
        return []
    if configuration.unit == "auto":
        numbered = {numbered_module(each.module) for each in parameters} - {""}
        largest = max(map(_numel, blocks_of(parameters)), default=0)
        if len(numbered) < 2 or 2 * largest > configuration.max_live_parameters:
            return []
    return blocks_of(parameters, unpartitioned)


class _Live(NamedTuple):
    """The gathers of a visit, and the amount of gathered parameters during the visit.

    Attributes:
        numel: The number of elements of blocks that are gathered during the visit.
        gathers: The messages that the visit sends.
        block: The number of the visited block, or None for a gather of unpartitioned parameters.
        meets_gradients: Whether gradients arrive during the visit. This is the case in the backward pass, which begins
            in the last block of the forward pass.
    """

    numel: int
    gathers: tuple[Gather, ...]
    block: int | None = None
    meets_gradients: bool = False


class _Visits:
    """The visits of one micro-batch.

    Args:
        blocks: The blocks of the model.
        configuration: The settings of stage 3.
        visits: The visits of the modules, in the order in which the modules run.
    """

    def __init__(
        self, blocks: Sequence[Block], configuration: GatherConfiguration, visits: Sequence[Visit]
    ) -> None:
        self._configuration = configuration
        self._members = blocks
        self._numels = [_numel(block) for block in blocks]
        self._trained = [sum(each.numel for each in block if each.requires_grad) for block in blocks]
        self._largest = max(self._numels, default=0)
        self._block_of = {each.name: number for number, block in enumerate(blocks) for each in block}
        self._visits = visits
        self._order: list[int] = []
        self._turn = 0  # number of the first visit of the backward pass
        for visit in visits:
            for block in self._used(visit) if visit.enters else ():
                if not self._order or self._order[-1] != block:
                    self._order.append(block)
                    self._turn += visit.forward
        self._until = [0, *accumulate(self._numels[block] for block in self._order)]

    def run(self, *, recording: bool, missing: Iterable[Parameter] = ()) -> Iterator[_Live]:
        """Yield the gathers of each visit.

        Args:
            recording: Whether the order of the visits is not known yet.
            missing: The unpartitioned parameters that are not gathered at the start.
        """
        absent = {each.name: each for each in missing}
        users: list[set[tuple[str, bool]]] = [set() for _ in self._members]
        gathered: set[int] = set()
        place = -1
        for visit in self._visits:
            module, enters, forward = visit
            used = self._used(visit)
            for block in used:
                (users[block].add if enters else users[block].discard)((module.name, forward))
            for block in used if enters else ():
                if place >= 0 and self._order[place] == block:
                    continue
                place += 1
                ahead = [] if recording else self._ahead(place)
                idle = [each for each in gathered if each != block and not users[each] and each not in ahead]
                gathered -= self._released(place, idle, ahead) if not recording else set(idle)
                lacking = [each for each in (block, *ahead) if each not in gathered]
                gathered |= set(lacking)
                yield _Live(
                    sum(self._numels[each] for each in gathered),
                    tuple(Gather(self._members[each], forward) for each in lacking),
                    block,
                    meets_gradients=place >= self._turn - 1,
                )
            alone = tuple(
                absent.pop(each.name) for each in module.parameters if enters and each.name in absent
            )
            if alone:
                yield _Live(0, (Gather(alone, forward),))

    def _used(self, visit: Visit) -> list[int]:
        """Return the blocks that a module uses. The backward pass of an embedding reads row numbers, not parameters."""
        if not visit.forward and all(each.owner_types == _EMBEDDING for each in visit.module.parameters):
            return []
        names = (each.name for each in visit.module.parameters)
        return list(dict.fromkeys(self._block_of[name] for name in names if name in self._block_of))

    def _ahead(self, place: int) -> list[int]:
        """Return the next blocks to prefetch: at least one, and more while their sum is at most the largest block.

        In the forward pass the limit is up to twice the largest block, if the backward pass needs as much memory.
        """
        window = self._largest
        if place < self._turn:
            window = max(window, min(2 * window, self._room(place)))
        return self._following(place, window)

    def _room(self, place: int) -> int:
        """Return how many elements a forward visit can prefetch without raising the peak memory.

        The peak is that of the backward visits up to the visit of the same block.
        """
        current = self._order[place]
        backward = self._order[self._turn :]
        end = backward.index(current) + 1 if current in backward else len(backward)
        return max(self._needed[:end], default=0) - 2 * self._numels[current]

    @cached_property
    def _needed(self) -> list[int]:
        """The number of elements that each backward visit needs, for parameters and gradients.

        It is twice the sum of the visited block and the trained elements of the block before, plus the next blocks. It
        covers the gathered blocks, the gradients that are being sent, and the gradients that arrive.
        """
        return [
            2 * (self._trained[self._order[place - 1]] + self._numels[self._order[place]])
            + sum(self._numels[each] for each in self._following(place, self._largest))
            for place in range(self._turn, len(self._order))
        ]

    def _following(self, place: int, window: int) -> list[int]:
        """Return the next blocks that fit into ``window`` elements. There is at least one if the config allows any."""
        current, limit = self._order[place], self._configuration.max_live_parameters
        window = min(self._configuration.prefetch_bucket_size, window)
        ahead: list[int] = []
        for block in islice(self._order, place + 1, None) if self._configuration.prefetch_bucket_size else ():
            if block == current or block in ahead:
                continue
            numel = sum(self._numels[each] for each in (*ahead, block))
            if (ahead and numel > window) or self._numels[current] + numel > limit:
                break
            ahead.append(block)
        return ahead

    def _released(self, place: int, idle: Sequence[int], ahead: Sequence[int]) -> set[int]:
        """Return the ``idle`` blocks to release. Blocks with the nearest next use have priority to be kept."""
        room = self._configuration.max_live_parameters
        room -= sum(self._numels[each] for each in {self._order[place], *ahead})
        released = set()
        for distance, block in sorted((self._distance(place, block), block) for block in idle):
            if distance < self._configuration.max_reuse_distance and self._numels[block] <= room:
                room -= self._numels[block]
            else:
                released.add(block)
        return released

    def _distance(self, place: int, block: int) -> int:
        """Return the number of elements of the visits from ``place`` until the next visit of ``block``."""
        try:
            return self._until[self._order.index(block, place)] - self._until[place]
        except ValueError:
            return _NEVER


def block_gathers(
    parameters: Sequence[Parameter],
    used: Sequence[Parameter],
    blocks: Sequence[Block],
    configuration: GatherConfiguration,
    iteration: int,
    unpartitioned: Set[str] = frozenset(),
    *,
    all_released: bool = False,
) -> Gathers:
    """Return the gathers of micro-batch number ``iteration`` of a training.

    Args:
        parameters: The parameters of the model.
        used: The parameters whose modules run.
        blocks: The blocks that are gathered.
        configuration: The settings of stage 3.
        iteration: The number of the micro-batch since training started, from 0.
        unpartitioned: The names of parameters that are in no block and stay gathered.
        all_released: Whether no parameter is gathered when the micro-batch begins, because the step before was skipped
            or the program released the parameters.
    """
    listed = in_model_order(parameters)
    missing = [each for each in listed if each.name in unpartitioned] if all_released else []
    visits = _Visits(blocks, configuration, training_visits(module_tree(used)))
    gathers = tuple(
        gather for live in visits.run(recording=iteration == 0, missing=missing) for gather in live.gathers
    )
    numel = sum(map(_numel, blocks))
    fits = numel <= configuration.max_live_parameters
    once = iteration > 0 and fits and REPEATED_USES * numel <= configuration.max_reuse_distance
    return Gathers(gathers, once and not missing, once, 0, 0)


def gathered_with_gradients(
    parameters: Sequence[Parameter], blocks: Sequence[Block], configuration: GatherConfiguration
) -> dict[int, int]:
    """Return for each block the number of gathered elements while the gradients of the block arrive.

    The keys are the numbers of the blocks. All ``parameters`` of the model are assumed to be used. The forward pass
    needs no more memory than these elements and the gradients together.
    """
    visits = _Visits(blocks, configuration, training_visits(module_tree(in_model_order(parameters))))
    gathered: dict[int, int] = {}
    last = 0
    for live in visits.run(recording=False):
        if live.block is not None and live.meets_gradients:
            last = live.numel
            gathered[live.block] = max(last, gathered.get(live.block, 0))
    # The backward pass does not visit a block that it does not read. The last visited block is then still gathered.
    return dict.fromkeys(range(len(blocks)), last) | gathered


def block_messages(
    blocks: Sequence[Block],
    trained: Sequence[Parameter],
    gradient_order: Sequence[str] | None,
    model_dtype: str | None,
) -> list[tuple[Block, int]]:
    """Return for each message that reduces gradients its parameters and the number of gradients that have arrived.

    A message is sent when the last of its gradients arrives. If some of its gradients are missing, it is sent at the
    end of the backward pass.

    Args:
        blocks: The blocks of the model.
        trained: The trained parameters.
        gradient_order: The names of parameters in the order in which gradients arrive. None means reverse model order.
        model_dtype: The element type of all parameters, or None if each parameter has its own type.
    """
    order = gradient_order
    if order is None:
        order = [each.name for each in reversed(in_model_order(trained))]
    place = {name: number for number, name in enumerate(order, 1)}
    names = {each.name for each in trained if each.numel}
    sent = []
    for block in blocks:
        members = tuple(each for each in block if each.name in names)
        for dtype in dict.fromkeys(model_dtype or each.dtype for each in members):
            alike = tuple(each for each in members if (model_dtype or each.dtype) == dtype)
            arrived = [place[each.name] for each in alike if each.name in place]
            if arrived:
                is_full = len(arrived) == len(alike)
                sent.append((max(arrived) if is_full else len(order), not is_full, alike))
    return [(alike, count) for count, _, alike in sorted(sent, key=lambda each: each[:2])]


def _numel(block: Iterable[Parameter]) -> int:
    return sum(each.numel for each in block)

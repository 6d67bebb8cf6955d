"""Predicts which parameters stage 3 gathers at each module of a micro-batch.

The first micro-batch records the order of the modules. In this micro-batch each module gathers its missing parameters,
and releases all of them after use. From the second micro-batch on the order is known. Each module then also prefetches
parameters, and keeps parameters that are used again soon. Source: reference measurements of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from commprof.requested.parameters import Parameter
from commprof.requested.zero.gather_configuration import GatherConfiguration
from commprof.requested.zero.modules import Module, Visit, module_tree, training_visits

BEFORE_ANY_USE: Final = -1
# The reason why persistent parameters are not gathered: a step was skipped, or the program released them. The empty
# string means that they are gathered.
ReleasedBy = Literal["", "skip", "program"]
SKIP: Final = "skip"
PROGRAM: Final = "program"
# The most uses of a parameter in one micro-batch, which includes forward, backward and a repeated forward pass.
REPEATED_USES: Final = 4


class Gather(NamedTuple):
    """Parameters that are gathered together.

    Attributes:
        parameters: The parameters in model order.
        forward: Whether the gather belongs to the forward pass, not to the backward pass.
        call: The number of the module call that issues the gather, counted over both passes.
        ahead: Whether the gather is a prefetch for later modules, issued after the gather of the module's own
            parameters.
    """

    parameters: tuple[Parameter, ...]
    forward: bool
    call: int = 0
    ahead: bool = False


class Gathers(NamedTuple):
    """All gathers of one micro-batch.

    Attributes:
        gathers: The gathers in the order of issue.
        exact: Whether the gathers are the same for any order of the modules.
        each_once: Whether each parameter that is not yet gathered is gathered exactly once, for any order of the
            modules.
        modules: The number of module calls in both passes.
        uses: The number of parameter uses in these calls.
    """

    gathers: tuple[Gather, ...]
    exact: bool
    each_once: bool
    modules: int
    uses: int


def persistent_parameters(
    parameters: Sequence[Parameter], configuration: GatherConfiguration, unpartitioned: Set[str] = frozenset()
) -> list[Parameter]:
    """Return the parameters that stay gathered between steps, in model order.

    Parameters in ``unpartitioned`` stay gathered regardless of their size.
    """
    persistent: list[Parameter] = []
    numel = 0
    for parameter in parameters:
        if parameter.name in unpartitioned:
            persistent.append(parameter)
            continue
        fits = numel + parameter.numel <= configuration.model_persistence_threshold
        if fits and parameter.numel <= configuration.persistence_threshold:
            persistent.append(parameter)
            numel += parameter.numel
    return persistent


def gathers_of(
    parameters: Sequence[Parameter],
    configuration: GatherConfiguration,
    persistent: Set[str],
    micro_steps: int,
    iteration: int,
    unpartitioned: Set[str] = frozenset(),
    *,
    all_released: bool = False,
) -> Gathers:
    """Return the gathers of micro-batch number ``iteration`` of a training.

    Args:
        parameters: The parameters that the model uses, in model order.
        configuration: The settings of stage 3.
        persistent: The names of parameters that stay gathered between steps.
        micro_steps: The number of micro-batches in a step. Persistent parameters stay gathered from the end of the
            first step on.
        iteration: The number of the micro-batch since training started, from 0.
        unpartitioned: The names in ``persistent`` that are gathered before the first micro-batch.
        all_released: Whether no parameter is gathered when the micro-batch begins, because the step before was skipped
            or the program released the parameters.
    """
    model = module_tree(parameters, configuration.is_leaf)
    visits = training_visits(model)
    entered = [visit for visit in visits if visit.enters]
    order = [(use, number) for number, visit in enumerate(entered) for use in visit.module.parameters]
    calls = [visit.module for visit in entered]
    if iteration == 0:
        return Gathers(tuple(_recording(visits, unpartitioned)), False, False, len(calls), len(order))
    known = _KnownOrder(configuration, calls, order, persistent)
    # If the first step has one micro-batch, its end gathers the persistent parameters. Otherwise the second micro-batch
    # gathers them, and they stay gathered from then on.
    present = set(persistent) if micro_steps == 1 else set(unpartitioned)
    gathers, exact = known.run(visits, set() if all_released and iteration == 1 else present)
    if iteration > 1 and (all_released or micro_steps > 1):
        gathers, exact = known.run(visits, set() if all_released else set(persistent))
    numel = sum(parameter.numel for parameter in parameters)
    gathered = [parameter.name for gather in gathers for parameter in gather.parameters]
    each_once = REPEATED_USES * numel <= configuration.max_reuse_distance and len(set(gathered)) == len(
        gathered
    )
    return Gathers(tuple(gathers), exact, each_once, len(calls), len(order))


def _recording(visits: Sequence[Visit], unpartitioned: Set[str]) -> list[Gather]:
    by_visit = [
        (tuple(each for each in visit.module.parameters if each.name not in unpartitioned), visit.forward)
        for visit in visits
        if visit.enters
    ]
    return [Gather(parameters, forward) for parameters, forward in by_visit if parameters]


@dataclass
class _KnownOrder:
    """Determines the gathers of micro-batches after the order of the modules has been recorded.

    Attributes:
        configuration: The settings of stage 3.
        calls: The modules in the order in which they are entered in both passes.
        uses: The used parameters, each with the number of the call that uses it.
        persistent: The names of parameters that stay gathered.
        released: For (module name, number of calls so far), the names of parameters that the module releases. DeepSpeed
            decides this only once.
    """

    configuration: GatherConfiguration
    calls: Sequence[Module]
    uses: Sequence[tuple[Parameter, int]]
    persistent: Set[str]
    released: dict[tuple[str, int], frozenset[str]] = field(default_factory=dict)

    def run(self, visits: Sequence[Visit], present: set[str]) -> tuple[list[Gather], bool]:
        """Return the gathers of one micro-batch, and whether they are the same for any order of the modules.

        ``present`` contains the names of parameters that are gathered at the start. The order does not matter if the
        first module gathers everything, or if all parameters are persistent and nothing is gathered.
        """
        queue = deque(self.uses)
        planned: dict[str, int] = defaultdict(lambda: BEFORE_ANY_USE)
        gathers: list[Gather] = []
        live = call = 0
        everything_at_once = False
        for module, enters, forward in visits:
            if not enters:
                gone = present & self._released(module, call, planned)
                live -= sum(p.numel for p in module.parameters if p.name in gone)
                present -= gone
                continue
            missing = tuple(p for p in module.parameters if p.name not in present)
            live += sum(p.numel for p in missing)
            present |= {p.name for p in missing}
            self._take_own(module, call, queue, planned)
            ahead = self._ahead(queue, planned, present, live)
            live += sum(p.numel for p in ahead)
            present |= {p.name for p in ahead}
            gathers += [
                Gather(each, forward, call, is_ahead)
                for each, is_ahead in ((missing, False), (ahead, True))
                if each
            ]
            everything_at_once |= call == 0 and not queue
            call += 1
        only_persistent = all(use.name in self.persistent for use, _ in self.uses)
        return gathers, everything_at_once or (only_persistent and not gathers)

    def _take_own(
        self, module: Module, call: int, queue: deque[tuple[Parameter, int]], planned: dict[str, int]
    ) -> None:
        due = {p.name for p in module.parameters if planned[p.name] < call}
        taken: set[str] = set()
        while queue and len(taken) < len(due):
            use, number = queue.popleft()
            planned[use.name] = number
            taken.add(use.name)

    def _ahead(
        self, queue: deque[tuple[Parameter, int]], planned: dict[str, int], present: set[str], live: int
    ) -> tuple[Parameter, ...]:
        """Return the parameters to prefetch. The last parameter may exceed the limit."""
        limit = min(self.configuration.max_live_parameters - live, self.configuration.prefetch_bucket_size)
        ahead: dict[str, Parameter] = {}
        numel = 0
        while queue and numel < limit:
            use, number = queue.popleft()
            planned[use.name] = max(planned[use.name], number)
            if use.name not in present and use.name not in ahead:
                ahead[use.name] = use
                numel += use.numel
        return tuple(ahead.values())

    def _released(self, module: Module, call: int, planned: dict[str, int]) -> frozenset[str]:
        decided = self.released.get((module.name, call))
        if decided is not None:
            return decided
        names = {p.name for p in module.parameters if p.name not in self.persistent}
        names -= {name for name in names if planned[name] > call}
        traversed = 0
        number = call
        while names and number < len(self.calls) and traversed < self.configuration.max_reuse_distance:
            for parameter in self.calls[number].parameters:
                names.discard(parameter.name)
                traversed += parameter.numel
            number += 1
        return self.released.setdefault((module.name, call), frozenset(names))

"""Predicts the memory of a rank with either runtime. Frozen parameters have neither gradients nor optimizer states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from commprof.requested.memory.deepspeed import deepspeed_holdings
from commprof.requested.memory.states import Holding, holdings
from commprof.requested.parameters import Parameter
from commprof.requested.zero.flat_stages import Runtime

_OF_ALL: Final = (
    "parameters",
    "secondary shards",
    "gathered parameters",
    "buffers of files",
)  # kinds of memory that frozen parameters need too


def held_by_rank(
    config: Mapping[str, Any],
    parameters: Sequence[Parameter],
    world_size: int,
    backend: str = "nccl",
    runtime: Runtime = "zero_runtime",
) -> list[Holding]:
    """Return the memory of the rank that needs the most while ``runtime`` trains with ``config``.

    The other arguments are those of ``holdings``.

    Raises:
        RequestedError: the config or the parameters cannot be used as they are.
    """

    def of(chosen: Sequence[Parameter]) -> list[Holding]:
        if runtime == "deepspeed":
            return deepspeed_holdings(config, chosen, world_size)
        return holdings(config, chosen, world_size, backend)

    of_all = of(parameters)
    trained = [each for each in parameters if each.requires_grad]
    if len(trained) == len(parameters):
        return of_all
    of_trained = {each.what: each for each in of(trained)}
    return [
        each if each.what in _OF_ALL else of_trained[each.what]
        for each in of_all
        if each.what in {*_OF_ALL, *of_trained}
    ]

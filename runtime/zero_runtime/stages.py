"""A ZeRO stage is a row of data.

| stage | optimizer states | gradients                                        | parameters | when gradients are reduced    |
|-------|------------------|--------------------------------------------------|------------|-------------------------------|
| 0     | on every rank    | whole, until the step                            | replicated | once a step, after backward   |
| 1     | sharded          | whole, until the step                            | replicated | once a step                   |
| 2     | sharded          | own part; the rest is freed bucket by bucket     | replicated | in every micro-batch          |

Everything else is shared; no other module asks which stage it is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from zero_runtime.errors import ConfigError, UnsupportedError


class Stage(NamedTuple):
    """What a stage shards, and when gradients enter the buckets."""

    number: int
    shards_optimizer: bool
    shards_gradients: bool  # reduced in every micro-batch, and freed where another rank owns them
    reduces_in_hooks: (
        bool  # as gradients become ready, in backward order; otherwise after backward, in forward order
    )
    reductions: tuple[str, ...]  # which gradient reductions mean something


_SHARDED: Final = ("all_reduce", "multi_rank_all_reduce", "reduce_to_owner", "reduce_scatter")

STAGES: Final[dict[int, Stage]] = {
    0: Stage(0, False, False, False, ("all_reduce",)),
    1: Stage(1, True, False, False, _SHARDED),
    2: Stage(2, True, True, True, _SHARDED),
}


def stage(number: int, overlap_comm: bool = False) -> Stage:
    """The row of stage ``number``. ``overlap_comm`` moves the reduction of a sharded stage into the hooks.

    Raises:
        UnsupportedError: for stage 3.
        ConfigError: for a number that is no stage.
    """
    if number == 3:
        raise UnsupportedError(
            "zero_optimization.stage 3 (sharded parameters) is not in this version yet; use stage 0, 1 or 2"
        )
    if number not in STAGES:
        raise ConfigError(f"zero_optimization.stage is {number}; expected 0, 1 or 2")
    row = STAGES[number]
    return row._replace(reduces_in_hooks=row.reduces_in_hooks or (row.shards_optimizer and overlap_comm))

"""The ZeRO stages: the data that each stage shards, and the time when it reduces gradients.

| stage | optimizer states | gradients                                        | parameters | when gradients are reduced    |
|-------|------------------|--------------------------------------------------|------------|-------------------------------|
| 0     | on every rank    | whole, until the step                            | replicated | once a step, after backward   |
| 1     | sharded          | whole, until the step                            | replicated | once a step                   |
| 2     | sharded          | own shard; the rest is freed bucket by bucket    | replicated | in every micro-batch          |
| 3     | sharded          | own shards; the rest is freed bucket by bucket   | sharded    | in every micro-batch          |

With ``gradient_accumulation_reduce: boundary`` stages 2 and 3 keep whole gradients until the last micro-batch
of a step, and reduce them during the backward pass of this micro-batch.

No other module depends on the number of the stage.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.reduction import REDUCTIONS

# Values of gradient_accumulation_reduce: reduce in each micro-batch, or only in the last micro-batch of a step.
EACH: Final = "each"
BOUNDARY: Final = "boundary"


class Stage(NamedTuple):
    """The data that a stage shards, and the time when gradients enter the buckets."""

    number: int
    shards_optimizer: bool
    shards_gradients: bool  # reduced gradients that other ranks own are freed
    # Gradients are reduced as they become ready, in backward order. Otherwise they are reduced after backward, in
    # forward order.
    reduces_in_hooks: bool
    # Each rank has a shard of every parameter, instead of shards of flat buffers.
    shards_parameters: bool = False
    # Whole gradients are kept until the last micro-batch of a step, at a stage that otherwise reduces gradients in
    # each micro-batch.
    waits: bool = False

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Whether gradients are reduced in every micro-batch instead of once per step."""
        return self.shards_gradients and not self.waits

    @property
    def reductions(self) -> tuple[str, ...]:
        """The gradient reductions that are possible at this stage."""
        return tuple(name for name, reduction in REDUCTIONS.items() if self.number in reduction.stages)


STAGES: Final[dict[int, Stage]] = {
    0: Stage(0, False, False, False),
    1: Stage(1, True, False, False),
    2: Stage(2, True, True, True),
    3: Stage(3, True, True, True, shards_parameters=True),
}


def stage(number: int, overlap_comm: bool = False, accumulation_reduce: str = EACH) -> Stage:
    """Return the stage with number ``number``.

    ``overlap_comm`` moves the reduction of a sharded stage into the hooks.

    ``accumulation_reduce`` is the key ``gradient_accumulation_reduce``. A value that is not decided yet has the
    same effect as ``each``.

    Raises:
        ConfigError: There is no stage with this number.
    """
    if number not in STAGES:
        raise ConfigError(f"zero_optimization.stage is {number}; expected 0, 1, 2 or 3")
    row = STAGES[number]
    return row._replace(
        reduces_in_hooks=row.reduces_in_hooks or (row.shards_optimizer and overlap_comm),
        waits=row.shards_gradients and accumulation_reduce == BOUNDARY,
    )

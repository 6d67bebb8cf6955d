"""The gradient reductions of ZeRO stages 0 to 2, which compute the same sum by different collectives.

| name                  | in DeepSpeed, stages 1 and 2          | issued for a bucket of S bytes  | result on  | sent       |
|-----------------------|---------------------------------------|---------------------------------|------------|------------|
| all_reduce            | reduce_scatter false                  | 1 all_reduce of the bucket      | every rank | 2(n-1)/n S |
| multi_rank_all_reduce | reduce_scatter true,                  | 1 all_reduce of owners' shards  | every rank | 2(n-1)/n S |
|                       | use_multi_rank_bucket_allreduce true  | (more if it exceeds the limit)  |            |            |
| reduce_to_owner       | reduce_scatter true,                  | 1 reduce for each owner in it   | the owner  | (n-1)/n S  |
|                       | use_multi_rank_bucket_allreduce false |                                 |            |            |
| reduce_scatter        | none                                  | 1 reduce_scatter, or all_to_all | the owner  | (n-1)/n S  |
|                       |                                       | and a local sum                 |            |            |

n is the number of ranks. "sent" is the mean number of bytes over the ranks in the bandwidth-optimal model. Each
function takes the bucket and the group, and leaves the sum in ``bucket.tensor``, at least in the runs that this
rank owns. The rest is undefined. For an ``asynchronous`` bucket the collectives are only started. Call the
returned function before using the tensor.

Note [rows of a reduce_scatter]. The bucket is rearranged into one row for each owner. An all_to_all_single
takes rows of unequal length. A rank sends exactly the elements that it does not own, and the payload of a
step's buckets is equal to the gradients' bytes, without padding. A native reduce_scatter_single needs equal
rows. The rows are padded with zeros if this adds at most 1/16 to the bucket. Otherwise a reduce_scatter of a
list of unequal rows is issued, which NCCL runs as one reduce for each row. Measured in
tests/integration/zero_runtime/test_reductions.py: with all_to_all, payload = gradient bytes.

Equal bytes do not imply equal time. In backward order a small bucket is in the shard of one owner, and all
ranks send to this owner. Owner-ordered buckets avoid this if possible: see
:mod:`zero_runtime.gradient_reduction.owner_ordered_buckets`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import torch

from zero_runtime import comm
from zero_runtime.comm import DataParallelGroup, Work
from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.flat_layout import Run, flushed_runs
from zero_runtime.gradient_reduction.gradient_buckets import Bucket, joined

Finish = Callable[[], None]
Reduction = Callable[[Bucket, DataParallelGroup], Finish | None]

NATIVE: Final = "native"
ALL_TO_ALL: Final = "all_to_all"
_LARGEST_PADDING: Final = 1 / 16


def all_reduce(bucket: Bucket, group: DataParallelGroup) -> Finish | None:
    """Sum the whole bucket on every rank."""
    outgoing = scaled(bucket)
    work = group.all_reduce(outgoing, why=bucket.why(), asynchronous=bucket.asynchronous)

    def finish() -> None:
        if bucket.scaling.factor_after != 1.0:
            outgoing.mul_(bucket.scaling.factor_after)
        bucket.keep(outgoing)

    return after([work], finish)


def multi_rank_all_reduce(bucket: Bucket, group: DataParallelGroup) -> Finish | None:
    """Sum the shards of all owners on every rank. A message ends as soon as it exceeds the limit."""
    outgoing = scaled(bucket)
    works = []
    for batch in flushed_runs(bucket.runs, bucket.limit):
        message = outgoing.narrow(0, batch[0].start, sum(run.numel for run in batch))
        works.append(group.all_reduce(message, why=bucket.why(), asynchronous=bucket.asynchronous))
    return after(works, lambda: _keep(bucket, outgoing, group.rank))


def reduce_to_owner(bucket: Bucket, group: DataParallelGroup) -> Finish | None:
    """Sum the shards of each owner on that owner."""
    outgoing = scaled(bucket)
    works = []
    mine = []
    for owner in dict.fromkeys(run.owner for run in bucket.runs):
        runs = [run for run in bucket.runs if run.owner == owner]
        for batch in flushed_runs(runs, bucket.limit):
            shards = [outgoing.narrow(0, run.start, run.numel) for run in batch]
            message = joined(shards)
            why = bucket.why(owner=group.global_ranks[owner])
            works.append(group.reduce(message, owner, why=why, asynchronous=bucket.asynchronous))
            if owner == group.rank and len(shards) > 1:
                mine.append((message, shards))

    def finish() -> None:
        for message, shards in mine:
            _split(message, shards)
        _keep(bucket, outgoing, group.rank)

    return after(works, finish)


def reduce_scatter(
    bucket: Bucket, group: DataParallelGroup, implementation: str | None = None
) -> Finish | None:
    """Sum the shards that rank r owns (row r of the bucket) on rank r. See Note [rows of a reduce_scatter].

    Args:
        bucket: the bucket.
        group: the data-parallel ranks.
        implementation: ``native`` or ``all_to_all``. The default is all_to_all on gloo, which would run a
            native reduce_scatter as an all_reduce, and native on other backends.
    """
    outgoing = scaled(bucket)
    rows, numels = _rows(outgoing, bucket.runs, group.world_size)
    if (implementation or default_implementation(group.backend)) == ALL_TO_ALL:
        work, mine = exchange(rows, numels, bucket, group)
    else:
        work, mine = _native(rows, numels, bucket, group)

    def finish() -> None:
        own = [outgoing.narrow(0, run.start, run.numel) for run in bucket.runs if run.owner == group.rank]
        _split(mine(), own)
        _keep(bucket, outgoing, group.rank)

    return after([work], finish)


def default_implementation(backend: str) -> str:
    """Return the implementation of reduce_scatter on ``backend`` if the configuration value is auto."""
    return ALL_TO_ALL if backend == "gloo" else NATIVE


# A collective in flight, and a function that returns its sum after it has completed.
Scattered = tuple[Work | None, Callable[[], torch.Tensor]]


def exchange(
    rows: torch.Tensor,
    numels: Sequence[int],
    bucket: Bucket,
    group: DataParallelGroup,
    received: torch.Tensor | None = None,
) -> Scattered:
    """Send row r of ``rows`` to rank r. Each rank sums the rows that it receives.

    Args:
        rows: the concatenated rows, 1-D.
        numels: The number of elements of each row.
        bucket: The bucket that contains the rows.
        group: the data-parallel ranks.
        received: Memory for the received rows. None for the memory of the bucket, or new memory.
    """
    if received is None:
        received = _room(group.world_size * numels[group.rank], rows, bucket)
    why = bucket.why(intended_op="reduce_scatter", padded=rows)
    return group.sum_rows(received, rows, numels, why=why, asynchronous=bucket.asynchronous)


def _room(numel: int, rows: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Return memory for the received rows.

    If ``rows`` is a copy, the bucket's own memory is used if it is large enough, because the bucket is unused
    until the sum is done.
    """
    free = bucket.tensor
    copied = rows.untyped_storage().data_ptr() != free.untyped_storage().data_ptr()
    if copied and rows.dtype is free.dtype and numel <= free.numel():
        return free.narrow(0, 0, numel)
    return rows.new_empty(numel)


def scatter(rows: torch.Tensor, bucket: Bucket, group: DataParallelGroup) -> Scattered:
    """Sum equal, concatenated ``rows`` by the backend's reduce_scatter."""
    output = rows.new_empty(rows.numel() // group.world_size)
    why = bucket.why(padded=rows)
    work = group.reduce_scatter_single(output, rows, why=why, asynchronous=bucket.asynchronous)
    return work, lambda: output


def row_of_sum(
    bucket: Bucket,
    group: DataParallelGroup,
    implementation: str,
    take: Callable[[torch.Tensor], None],
) -> Finish | None:
    """Sum a bucket that has one run for each rank, in rank order, and pass this rank's run to ``take``.

    The bucket must be scaled and in its communication dtype. Runs start at equal distances. The elements
    between two runs are padding, which an all_to_all does not send. ``implementation`` is ``native`` or
    ``all_to_all``.
    """
    if implementation == ALL_TO_ALL:
        numels = [run.numel for run in bucket.runs]
        work, total = exchange(bucket.tensor, numels, bucket, group)
    else:
        work, total = scatter(bucket.tensor, bucket, group)
    return after([work], lambda: take(total()))


def _native(rows: torch.Tensor, numels: Sequence[int], bucket: Bucket, group: DataParallelGroup) -> Scattered:
    longest, mine = max(numels), numels[group.rank]
    if longest * len(numels) > rows.numel() * (1 + _LARGEST_PADDING):
        output = rows.new_empty(mine)
        unequal_rows = rows.split(list(numels))
        work = group.reduce_scatter(output, unequal_rows, why=bucket.why(), asynchronous=bucket.asynchronous)
        return work, lambda: output
    if min(numels) < longest:
        padded = rows.new_zeros(longest * len(numels))
        for owner, row in enumerate(rows.split(list(numels))):
            padded.narrow(0, owner * longest, row.numel()).copy_(row)
        rows = padded
    work, output_of = scatter(rows, bucket, group)
    return work, lambda: output_of().narrow(0, 0, mine)


def after(works: Sequence[Work | None], finish: Finish) -> Finish | None:
    """Call ``finish`` now if no collective is in flight.

    Otherwise return a function that waits and then calls ``finish``.
    """
    under_way = [work for work in works if work is not None]
    if not under_way:
        finish()
        return None

    def wait_and_finish() -> None:
        for work in under_way:
            comm.wait(work)
        finish()

    return wait_and_finish


def then(first: Finish | None, second: Finish) -> Finish | None:
    """Call ``second`` now if ``first`` is None. Otherwise return a function that calls both.

    If ``first`` is None, the first function has already been called.
    """
    if first is None:
        second()
        return None

    def both() -> None:
        first()
        second()

    return both


def _rows(
    outgoing: torch.Tensor, runs: Sequence[Run], world_size: int
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the bucket rearranged by owner, and the number of elements of each owner's row."""
    numels = [0] * world_size
    for run in runs:
        numels[run.owner] += run.numel
    if any(later.owner < earlier.owner for earlier, later in pairwise(runs)):
        ordered = sorted(runs, key=lambda run: run.owner)
        outgoing = torch.cat([outgoing.narrow(0, run.start, run.numel) for run in ordered])
    return outgoing, tuple(numels)


def scaled(bucket: Bucket) -> torch.Tensor:
    """Return the scaled bucket in the communication dtype. This is the bucket's own tensor if no cast is needed."""
    scaling = bucket.scaling
    if scaling.bucket_divisor != 1.0:
        bucket.tensor.div_(scaling.bucket_divisor)
    outgoing = bucket.tensor.to(bucket.dtype)
    if scaling.divisor != 1.0:
        outgoing.div_(scaling.divisor)
    if scaling.factor_before != 1.0:
        outgoing.mul_(scaling.factor_before)
    return outgoing


def _keep(bucket: Bucket, outgoing: torch.Tensor, rank: int) -> None:
    """Copy this rank's runs back into the bucket if a cast created ``outgoing`` as a separate tensor."""
    bucket.keep(outgoing, [run for run in bucket.runs if run.owner == rank])


def _split(message: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy ``message`` back into the tensors that were concatenated to create it."""
    position = 0
    for target in targets:
        target.copy_(message.narrow(0, position, target.numel()))
        position += target.numel()


def reduction(name: str, implementation: str | None = None) -> Reduction:
    """Return the reduction called ``name``; raise ConfigError for an unknown name."""
    if name not in REDUCTIONS:
        raise ConfigError(f"unknown gradient_reduction {name!r}; choose one of: {', '.join(REDUCTIONS)}")
    if name == "reduce_scatter":
        return partial(reduce_scatter, implementation=implementation)
    return REDUCTIONS[name].function


class GradientReduction(NamedTuple):
    """The properties of one gradient reduction. The name of the reduction is the configuration value.

    The collectives that the reduction sends are described independently in
    ``commprof/requested/zero/reductions.py``.

    Attributes:
        function: The function that reduces one bucket.
        stages: The ZeRO stages that allow this reduction.
        leaves: The part of a gradient that is summed on each rank: ``all``, ``own`` (the runs that the rank
            owns), or ``all unless cast`` (``own`` if the communication dtype differs from the dtype of the
            bucket).
        deepspeed_keys: The values of DeepSpeed's keys that select the reduction at stages 1 and 2; None if no
            values do.
    """

    function: Reduction
    stages: tuple[int, ...]
    leaves: str
    deepspeed_keys: Mapping[str, bool] | None


REDUCTIONS: Final[dict[str, GradientReduction]] = {
    "all_reduce": GradientReduction(all_reduce, (0, 1, 2, 3), "all", {"reduce_scatter": False}),
    "multi_rank_all_reduce": GradientReduction(
        multi_rank_all_reduce,
        (1, 2),
        "all unless cast",
        {"reduce_scatter": True, "use_multi_rank_bucket_allreduce": True},
    ),
    "reduce_to_owner": GradientReduction(
        reduce_to_owner, (1, 2), "own", {"reduce_scatter": True, "use_multi_rank_bucket_allreduce": False}
    ),
    "reduce_scatter": GradientReduction(reduce_scatter, (1, 2, 3), "own", None),
}

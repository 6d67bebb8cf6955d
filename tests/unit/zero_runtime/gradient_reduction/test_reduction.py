"""Compare each entry of REDUCTIONS with plain sums, over buckets of any layout.

The collectives are counted too.
"""

from __future__ import annotations

import random

import pytest
import torch

from support.process_group_log import logged
from support.ranks import run_ranks
from zero_runtime.comm import DataParallelGroup, sum_of_rows
from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.flat_layout import owner_runs
from zero_runtime.gradient_reduction.gradient_buckets import Bucket, Scaling
from zero_runtime.gradient_reduction.reduction import REDUCTIONS, reduction

VARIANTS = [(name, None) for name in REDUCTIONS] + [
    ("reduce_scatter", "native"),
    ("reduce_scatter", "all_to_all"),
]
DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]


def slices_of_buckets(world):
    """Yield buckets as lists of (owner, numel).

    The lists have one owner, or all owners in order, backward or repeated, and some owners have no shard.
    """
    draw = random.Random(world)
    yield [(world - 1, 5)]
    yield [(owner, 4) for owner in range(world)]
    yield [(owner, 1 + owner) for owner in reversed(range(world))]
    for _ in range(6):
        yield [(draw.randrange(world), draw.randint(1, 40)) for _ in range(draw.randint(1, 9))]


def reduce_everything(rank, world):
    """Return (variant, dtypes, shards, error of this rank's runs, issued methods) of each bucket."""
    group = DataParallelGroup()
    outcomes = []
    for slices in slices_of_buckets(world):
        runs = owner_runs(slices)
        numel = sum(run.numel for run in runs)
        parts = [
            torch.randn(numel, generator=torch.Generator().manual_seed(100 * world + each))
            for each in range(world)
        ]
        for held, sent in DTYPES:
            wanted = sum(part.to(held).double() for part in parts) / world
            for name, implementation in VARIANTS:
                scaling = (
                    Scaling(factor_after=1 / world) if name == "all_reduce" else Scaling(bucket_divisor=world)
                )
                tensor = parts[rank].to(held, copy=True)
                bucket = Bucket(0, tensor, runs, sent, 25, scaling, (), "full")
                with logged() as log:
                    reduction(name, implementation)(bucket, group)
                error = max(
                    (
                        (tensor.double() - wanted).narrow(0, run.start, run.numel).abs().max().item()
                        for run in runs
                        if run.owner == rank
                    ),
                    default=0.0,
                )
                calls = [(call.method, call.numel_in, call.root) for call in log.calls]
                outcomes.append((name, implementation, torch.bfloat16 in (held, sent), runs, error, calls))
    return outcomes


@pytest.mark.sampled
@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_owners_get_the_mean_and_the_messages_are_as_the_table_says(world):
    for outcomes in run_ranks(world, reduce_everything):
        for name, implementation, low_precision, runs, error, calls in outcomes:
            assert error < (0.03 if low_precision else 1e-6), (name, implementation, runs)
            numel = sum(run.numel for run in runs)
            methods = {method for method, _, _ in calls}
            if name == "all_reduce":
                assert calls == [("allreduce", numel, None)]
            elif name == "multi_rank_all_reduce":
                assert methods == {"allreduce"} and sum(sent for _, sent, _ in calls) == numel
                assert all(sent > 25 for _, sent, _ in calls[:-1])
            elif name == "reduce_to_owner":
                owners = list(dict.fromkeys(run.owner for run in runs))
                assert methods == {"reduce"} and list(dict.fromkeys(root for *_, root in calls)) == owners
                assert sum(sent for _, sent, _ in calls) == numel
            elif implementation == "native":
                assert len(calls) == 1 and methods <= {"reduce_scatter", "reduce_scatter_single"}
                assert numel <= calls[0][1] <= numel * (1 + 1 / 16)
            else:
                assert calls == [("all_to_all_single", numel, None)]


def test_an_unknown_reduction_is_refused_with_the_names():
    with pytest.raises(
        ConfigError, match="unknown gradient_reduction 'rs'; choose one of: all_reduce, multi_rank"
    ):
        reduction("rs")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 8, 16])
def test_sum_of_rows_is_the_sum_in_fp32_in_their_order_and_leaves_them_alone(world, dtype):
    rows = torch.randn(world, 1000, generator=torch.Generator().manual_seed(world)).to(dtype)
    before = rows.clone()
    total = sum_of_rows(rows)
    expected = rows[0].float()
    for row in rows[1:]:
        expected = expected + row.float()
    assert total.dtype is torch.float32 and torch.equal(total, expected) and torch.equal(rows, before)
    assert total.data_ptr() != rows.data_ptr()

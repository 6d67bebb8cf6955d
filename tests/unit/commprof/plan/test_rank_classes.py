"""Test the classes of ranks with equal traffic against hand-computed values."""

from __future__ import annotations

from commprof.plan.hosts import Hosts
from commprof.plan.rank_classes import RankClass, Sums, mean_wire_bytes, rank_classes, spreads
from commprof.requested.expectation import row
from commprof.schema import Op, Purpose


def test_the_ends_of_a_pipeline_send_half_as_many_messages():
    """There are two models of four stages.

    Over each of the three boundaries, 100 bytes pass in both directions.
    """
    lines = tuple(tuple(range(first, 8, 2)) for first in range(2))
    sent = row("step", Purpose.PIPELINE, Op.SEND, [100] * 6, 4)._replace(groups=lines)
    classes = rank_classes([sent], Hosts(1, 8))
    assert classes == [RankClass(0, 4, Sums(1, 100, 100)), RankClass(2, 4, Sums(2, 200, 200))]
    assert spreads(classes)["wire_bytes"] == (100, 150.0, 200)
    assert mean_wire_bytes(sent, 4) == 150


def test_a_rank_keeps_its_own_row_of_an_all_to_all():
    sent = row("step", Purpose.GRADIENT_REDUCE, Op.ALL_TO_ALL, [70], 4)._replace(payloads=((20, 20, 20, 10),))
    assert rank_classes([sent], Hosts(1, 4)) == [
        RankClass(0, 3, Sums(1, 70, 50)),
        RankClass(3, 1, Sums(1, 70, 60)),
    ]


def test_ranks_outside_of_all_groups_send_nothing():
    sent = row("step", Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, [100], 2)._replace(groups=((0, 1),))
    assert rank_classes([sent], Hosts(1, 3)) == [
        RankClass(0, 2, Sums(1, 100, 100)),
        RankClass(2, 1, Sums(0, 0, 0)),
    ]
    assert rank_classes([], Hosts(1, 2)) == [RankClass(0, 2, Sums(0, 0, 0))]

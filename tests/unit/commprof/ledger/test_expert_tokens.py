"""Test the bytes that expert layers should send in each step, from hand-written tables of tokens."""

from __future__ import annotations

import pyarrow as pa
import pytest

from commprof.ledger.records.issued import StepKey
from commprof.ledger.requests.expert_tokens import expert_tokens_of
from commprof.ledger.requests.request import parameters_of
from commprof.requested import Parameter, RequestedError
from commprof.requested.experts.rank_groups import RankGroups
from commprof.schema import TABLES
from commprof.trace.tables import conform

LAYER = {"rank": 0, "attempt": 0, "pid": 1, "layer": "moe", "num_experts": 2, "ep_size": 2, "k": 1}
LAYER |= {"capacity_factor": 1.0, "eval_capacity_factor": 1.0, "min_capacity": 4, "drop_tokens": True}
LAYER |= {"hidden": 8, "expert_ranks": "0,1"}
PARAMETERS = [Parameter("first", 4), Parameter("moe.wg", 16)]
SLOT = 2 * 8 * 4  # The bytes of one slot of both experts, in fp32.
GROUPS = ((0, 1),), ((2, 3),)


class Run:
    """A run that consists of the two tables."""

    def __init__(self, layer, loads):
        self._rows = {"expert_layers": [layer], "expert_loads": loads}

    def table(self, name):
        rows = [
            {column.name: row.get(column.name) for column in TABLES[name].columns} for row in self._rows[name]
        ]
        return conform(name, pa.Table.from_pylist(rows) if rows else empty(name))


def empty(name):
    return pa.table({column.name: pa.array([], pa.null()) for column in TABLES[name].columns})


def passed(counts, step=0, phase="forward", tokens=12, call=0):
    """Return the rows of one forward pass. ``counts`` is indexed by rank and expert."""
    shared = {
        "attempt": 0,
        "pid": 1,
        "step": step,
        "micro_step": 0,
        "phase": phase,
        "call": call,
        "layer": "moe",
    }
    shared |= {"dropped": 0, "capacity": 0, "sent": tokens, "time_ns": 0}
    return [
        {**shared, "rank": rank, "expert": expert, "tokens": count}
        for rank, of_rank in counts.items()
        for expert, count in enumerate(of_rank)
    ]


def tokens(loads, world=4, micro_steps=1, step=0, parameters=PARAMETERS, **layer):
    found = expert_tokens_of(Run({**LAYER, **layer}, loads), parameters, 4, RankGroups(world))
    rows = found.expected(StepKey(0, step), micro_steps)
    return {(row.issued_op, row.groups): (row.count, row.payload_bytes) for row in rows}, rows


EVEN = {0: (6, 6), 1: (6, 6), 2: (6, 6), 3: (6, 6)}


def test_the_bytes_follow_from_the_tokens_not_from_the_choices():
    uneven = {0: (12, 0), 1: (0, 12), 2: (9, 3), 3: (6, 6)}
    sent, _ = tokens(passed(uneven))
    assert sent == {("all_to_all", groups): (4, 4 * 6 * SLOT) for groups in GROUPS}


def test_without_dropping_each_group_has_the_slots_of_its_fullest_expert():
    sent, _ = tokens(passed({0: (7, 5), 1: (4, 8), 2: (6, 6), 3: (1, 11)}), drop_tokens=False)
    assert sent == {
        ("all_to_all", ((0, 1),)): (4, 4 * 8 * SLOT),
        ("all_reduce", ((0, 1),)): (1, 8),
        ("all_to_all", ((2, 3),)): (4, 4 * 11 * SLOT),
        ("all_reduce", ((2, 3),)): (1, 8),
    }


def test_activation_checkpointing_repeats_the_forward_pass():
    sent, _ = tokens(passed(EVEN) + passed(EVEN, phase="backward"))
    assert sent["all_to_all", ((0, 1),)] == (6, 6 * 6 * SLOT)


def test_each_step_has_its_own_tokens_and_evaluations_are_none():
    loads = passed(EVEN) + passed(EVEN, step=1, tokens=20) + passed(EVEN, phase="evaluation", tokens=100)
    assert tokens(loads)[0]["all_to_all", ((2, 3),)] == (4, 4 * 6 * SLOT)
    assert tokens(loads, step=1)[0]["all_to_all", ((2, 3),)] == (4, 4 * 10 * SLOT)


def test_a_step_without_records_is_an_estimate_by_most_others():
    loads = passed(EVEN) + passed(EVEN, step=1) + passed(EVEN, step=2, tokens=20)
    sent, rows = tokens(loads, step=7, micro_steps=3)
    assert sent == {("all_to_all", (*GROUPS[0], *GROUPS[1])): (12, 12 * 6 * SLOT)}
    assert [(row.exact, row.bytes_exact, row.least_bytes) for row in rows] == [(True, False, 0)]


def test_ranks_without_records_leave_the_slots_of_their_group_open():
    _, rows = tokens(passed({0: (7, 5), 2: (6, 6), 3: (1, 11)}), drop_tokens=False)
    assert {(row.groups, row.bytes_exact) for row in rows if row.issued_op == "all_to_all"} == {
        (((0, 1),), False),
        (((2, 3),), True),
    }


def test_the_first_module_of_a_model_gets_no_gradient_back():
    assert tokens(passed(EVEN), parameters=PARAMETERS[1:])[0]["all_to_all", ((0, 1),)] == (3, 3 * 6 * SLOT)


@pytest.mark.parametrize(
    ("layer", "text"), [({"hidden": None}, "has no hidden"), ({"num_experts": 3}, "ep_size divides")]
)
def test_what_a_damaged_trace_says_is_named(layer, text):
    with pytest.raises(RequestedError, match=text):
        tokens(passed(EVEN), **layer)


def test_of_the_experts_of_all_ranks_the_rules_take_those_of_the_lowest():
    row = {"dtype": "float32", "numel": 4, "requires_grad": True, "param_group": 0, "shape": "4"}
    listed = [("first", 0, None), *((f"experts.{n}.w", 1 + n % 2, 2) for n in range(4)), ("last", 3, None)]
    rows = [{**row, "name": name, "forward_index": index, "ep_size": size} for name, index, size in listed]
    names = TABLES["parameters"].columns
    table = pa.Table.from_pylist([{column.name: each.get(column.name) for column in names} for each in rows])
    assert [each.name for each in parameters_of(table)] == ["first", "experts.0.w", "experts.1.w", "last"]

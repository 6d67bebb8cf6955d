"""The messages that the rules expect of models with experts, compared with recorded runs of the real DeepSpeed.

The runs are data of the development tree and not of the repository. COMMPROF_RECORDED_RUNS names another
folder of runs. The model has an embedding, one layer of 4 experts with capacity factor 2, and an output
layer.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from typing import Any

import pytest

from commprof.requested import Parameter, UnsupportedError, expected
from commprof.requested.experts.layers import ExpertLayer
from commprof.schema import format_ranks
from support.requested_cases import RECORDED

EXPERTS, HIDDEN, VOCABULARY, TOKENS = 4, 64, 96, 4 * 16
OPS = {
    "allreduce": "all_reduce",
    "reduce": "reduce",
    "all_gather_single": "all_gather",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}
CASES = {
    path.parent.name: json.loads(path.read_text()) for path in sorted(RECORDED.glob("C_moe_*/config.json"))
}
REFUSED = {
    "C_moe_ep2_s3_w2": "zero_optimization.stage",
    "C_moe_ep2_s2_rs0_w2": "zero_optimization.reduce_scatter",
}

pytestmark = pytest.mark.skipif(
    not CASES, reason="no recorded DeepSpeed runs here; COMMPROF_RECORDED_RUNS names their folder"
)


def parameters_of(ep_size: int) -> list[Parameter]:
    """Return the parameters of a rank: the dense parameters in group 0, and those of its experts in group 1."""
    expert = (("0.weight", (256, 64)), ("0.bias", (256,)), ("2.weight", (64, 256)), ("2.bias", (64,)))
    moe = "moe.deepspeed_moe"
    shapes = [
        ("tok.weight", (VOCABULARY, HIDDEN), None),
        (f"{moe}.gate.wg.weight", (EXPERTS, HIDDEN), None),
        *(
            (f"{moe}.experts.deepspeed_experts.{number}.{name}", shape, ep_size)
            for number in range(EXPERTS // ep_size)
            for name, shape in expert
        ),
        ("head.weight", (VOCABULARY, HIDDEN), None),
        ("head.bias", (VOCABULARY,), None),
    ]
    return [
        Parameter(
            name, math.prod(shape), param_group=int(size is not None), forward_index=index, ep_size=size
        )
        for index, (name, shape, size) in enumerate(shapes)
    ]


def expected_rows(case: dict[str, Any]):
    ep_size, k = case["args"]["ep"], case["args"].get("k", 1)
    parameters = parameters_of(ep_size)
    layer = ExpertLayer("moe", EXPERTS, ep_size, k, 2.0, 4, True, HIDDEN, TOKENS)
    order = [each.name for each in parameters[::-1]]
    return expected(
        case["config"], parameters, case["world"], order, runtime="deepspeed", expert_layers=[layer]
    )


def recorded_rows(name: str) -> list[dict[str, str]]:
    with (RECORDED / name / "collectives.csv").open() as file:
        phases = ("init", "forward", "backward", "step")
        return [row for row in csv.DictReader(file) if row["phase"] in phases]


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_each_group_sends_the_recorded_messages_in_every_step(name):
    case = CASES[name]
    rows = expected_rows(case)
    wanted: dict[tuple[int, bool], Counter[Any]] = {}
    everyone = tuple(range(case["world"]))
    for row in rows:
        for group in row.groups or (everyone,):
            for rank in group:
                messages = wanted.setdefault((rank, row.when == "init"), Counter())
                sizes = [sum(each) for each in row.payloads]
                messages.update((row.issued_op, format_ranks(list(group)), size) for size in sizes)
    recorded: dict[tuple[int, str], Counter[Any]] = {}
    for row in recorded_rows(name):
        size = int(row["bytes_out" if row["op"] == "all_gather_single" else "bytes_in"])
        group = format_ranks([int(rank) for rank in row["group"].split("-")])
        step = recorded.setdefault((int(row["rank"]), row["step"]), Counter())
        step[OPS[row["op"]], group, size] += 1
    steps = {(rank, str(step)) for rank in range(case["world"]) for step in range(3)}
    assert recorded.keys() >= steps | {(0, "-1")}  # in one run only rank 0 recorded the initialization
    for (rank, step), messages in recorded.items():
        assert messages == wanted[rank, step == "-1"], (rank, step)


@pytest.mark.parametrize("name", REFUSED)
def test_what_deepspeed_refuses_is_refused(name):
    with pytest.raises(UnsupportedError) as refusal:
        expected_rows(CASES[name])
    assert refusal.value.key == REFUSED[name]

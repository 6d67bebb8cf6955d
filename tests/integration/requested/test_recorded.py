"""The messages that the rules expect, compared with recorded runs of the real DeepSpeed.

The runs are data of the development tree and not of the repository. COMMPROF_RECORDED_RUNS names another
folder of runs. These tests derive purposes from phase, operation and size alone, and count bytes from the
recorded rows.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from functools import cache
from typing import Any

import pytest

from commprof.requested import expected, micro_steps
from commprof.requested.configuration import read_configuration
from commprof.requested.parameters import trained_groups
from commprof.requested.zero.gradients import bucketed_gradients
from commprof.requested.zero.partition import lay_out
from support.requested_cases import RECORDED, finished_cases, parameters_of

OPS = {
    "allreduce": "all_reduce",
    "reduce": "reduce",
    "all_gather_single": "all_gather",
    "broadcast": "broadcast",
}
TRAINING = ("init", "forward", "backward", "step")


def gradient_order_of(case: dict[str, Any]) -> list[str]:
    """Return the exact reverse order, in which both models produce gradients.

    A layer that is not reached produces no gradient.
    """
    trained = [p.name for p in parameters_of(case) if p.requires_grad and not p.name.startswith("never")]
    return trained[::-1]


def stage_of(config: dict[str, Any]) -> int:
    return config.get("zero_optimization", {}).get("stage", 0)


def fills_buckets(config: dict[str, Any]) -> bool:
    configuration = read_configuration(config)
    return configuration.partitions and not configuration.reduces_flat_groups


def states_only_what_the_rules_cover(case: dict[str, Any]) -> bool:
    config = case["config"]
    stage = stage_of(config)
    return (
        stage < 3
        and case.get("kind") in (None, "std", "unused")
        and not {"after", "model_kw", "zero_init"} & set(case)
        and not (stage and config.get("torch_autocast", {}).get("enabled"))
        and not config.get("zero_optimization", {}).get("zenflow")
    )


@cache
def recorded_cases() -> dict[str, dict[str, Any]]:
    return {name: case for name, case in finished_cases().items() if states_only_what_the_rules_cover(case)}


def rows_of(name: str) -> list[dict[str, str]]:
    with (RECORDED / name / "collectives.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["phase"] in TRAINING]


def purpose_of(row: dict[str, str]) -> str:
    if row["phase"] == "init":
        return "parameter_broadcast"
    if row["op"] == "all_gather_single":
        return "parameter_gather"
    if row["dtype"] == "uint8":
        return "overflow_check"
    return "gradient_norm" if row["numel_in"] == "1" else "gradient_reduce"


def payload_of(row: dict[str, str]) -> int:
    return int(row["bytes_out"] if row["op"] == "all_gather_single" else row["bytes_in"])


def wire_of(row: dict[str, str]) -> float:
    ranks = len(row["group"].split("-"))
    trips = 2 if row["op"] == "allreduce" else 1
    return trips * payload_of(row) * (ranks - 1) / ranks


def step_of(row: dict[str, str], config: dict[str, Any]) -> str:
    if row["phase"] == "init":
        return "init"
    # Without managed accumulation each call of step() is a step, so each micro-batch is a step.
    return (
        row["step"] if config.get("managed_gradient_accumulation", True) else f"{row['step']}/{row['micro']}"
    )


def recorded_traffic(
    name: str, config: dict[str, Any], rank: str
) -> dict[str, dict[tuple[str, str], list[float]]]:
    """Return the count, payload bytes and wire bytes of each step by (purpose, op)."""
    traffic: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(
        lambda: defaultdict(lambda: [0, 0, 0.0])
    )
    for row in rows_of(name):
        if row["rank"] == rank:
            sums = traffic[step_of(row, config)][purpose_of(row), OPS[row["op"]]]
            sums[0] += 1
            sums[1] += payload_of(row)
            sums[2] += wire_of(row)
    return traffic


def expected_traffic(
    case: dict[str, Any], gradient_order: list[str] | None
) -> dict[str, dict[Any, list[float]]]:
    """Return the expected values for ``"init"`` and for any ``"step"`` from the rules, like ``recorded_traffic``."""
    config, world = case["config"], case["world"]
    traffic: dict[str, dict[Any, list[float]]] = {"init": {}, "step": {}}
    for row in expected(config, parameters_of(case), world, gradient_order, runtime="deepspeed"):
        times = micro_steps(config, world) if row.when == "micro_step" else 1
        into = traffic["init" if row.when == "init" else "step"]
        into[row.purpose, row.issued_op] = [
            row.count * times,
            row.payload_bytes * times,
            pytest.approx(row.wire_bytes * times),
        ]
    return traffic


def without_the_rest_of_a_skipped_step(expectation, recorded):
    """Remove the messages after the overflow check.

    A step of fp16 that overflowed ends at the check.
    """
    if ("parameter_gather", "all_gather") in recorded:
        return expectation
    return {k: v for k, v in expectation.items() if k[0] not in ("gradient_norm", "parameter_gather")}


needs_recorded_runs = pytest.mark.skipif(
    not recorded_cases(), reason="no recorded DeepSpeed runs here; COMMPROF_RECORDED_RUNS names their folder"
)


@needs_recorded_runs
@pytest.mark.parametrize("name", recorded_cases())
def test_counts_and_bytes_of_every_step_are_those_recorded(name):
    case = recorded_cases()[name]
    config = case["config"]
    expectation = expected_traffic(case, gradient_order_of(case))
    ranks = {row["rank"] for row in rows_of(name)}
    assert len(ranks) == case["world"]
    for rank in ranks:
        for step, recorded in recorded_traffic(name, config, rank).items():
            wanted = expectation["init" if step == "init" else "step"]
            if config.get("fp16", {}).get("enabled") and step != "init":
                wanted = without_the_rest_of_a_skipped_step(wanted, recorded)
            assert dict(recorded) == wanted, (rank, step)


@needs_recorded_runs
@pytest.mark.parametrize("name", [n for n, case in recorded_cases().items() if case.get("kind") != "unused"])
def test_without_the_gradient_order_the_bytes_are_still_those_recorded(name):
    case = recorded_cases()[name]
    recorded = recorded_traffic(name, case["config"], "0")
    last = max(step for step in recorded if step != "init")
    expectation = expected_traffic(case, None)["step"]
    for (purpose, op), (_, payload, wire) in recorded[last].items():
        assert expectation[purpose, op][1:] == [payload, wire]


@needs_recorded_runs
@pytest.mark.parametrize("name", [n for n, case in recorded_cases().items() if fills_buckets(case["config"])])
def test_each_gradient_message_has_the_recorded_size(name):
    case = recorded_cases()[name]
    configuration = read_configuration(case["config"]).as_deepspeed_reads()
    groups = trained_groups(parameters_of(case))
    layout = lay_out(
        groups,
        case["world"],
        configuration.model_dtype,
        round_robin=configuration.round_robin_gradients,
        align_parameters=configuration.parameter_alignment,
    )
    order = gradient_order_of(case)
    messages = bucketed_gradients(configuration, groups, layout, order).messages
    by_reduction = defaultdict(list)
    for row in rows_of(name):
        if purpose_of(row) == "gradient_reduce":
            by_reduction[row["rank"], row["step"], row["micro"]].append(
                (OPS[row["op"]], int(row["numel_in"]))
            )
    assert by_reduction
    for recorded in by_reduction.values():
        assert recorded == [(str(message.op), message.numel) for message in messages]


@needs_recorded_runs
@pytest.mark.skipif("COMMPROF_RECORDED_RUNS" in os.environ, reason="another set of runs may be smaller")
def test_the_recorded_runs_reach_every_rule():
    cases = recorded_cases().values()
    configurations = [read_configuration(case["config"]).as_deepspeed_reads() for case in cases]
    assert {c.stage for c in configurations} == {0, 1, 2}
    assert {c.reduction for c in configurations} == {"all_reduce", "multi_rank_all_reduce", "reduce_to_owner"}
    assert {c.model_dtype for c in configurations} == {None, "bfloat16", "float16"}
    assert {c.contiguous_gradients for c in configurations} == {True, False}
    assert {c.overlap_comm for c in configurations} == {True, False}
    assert any(c.reduces_flat_groups for c in configurations)
    assert any(not c.compute_grad_norm for c in configurations)
    assert any(micro_steps(case["config"], case["world"]) == 2 for case in cases)
    assert {1, 2, 3} <= {case["world"] for case in cases}

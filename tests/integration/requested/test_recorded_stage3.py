"""The messages that the rules expect of stage 3, compared with recorded runs of the real DeepSpeed.

These tests derive purposes from phase, operation and element type alone, and count bytes from the recorded
rows. A row that the rules call exact must agree in count and bytes. A row with certain bytes only must agree
in bytes.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from functools import cache
from typing import Any

import pytest

from commprof.requested import UnsupportedError, expected_in_step, reduction_share
from support.requested_cases import RECORDED, finished_cases, parameters_of

OPS = {
    "allreduce": "all_reduce",
    "reduce_scatter_single": "reduce_scatter",
    "all_gather_single": "all_gather",
    "broadcast": "broadcast",
}
TRAINING = ("init", "forward", "backward", "step")
# Programs that train with one engine, and call forward, backward and step once per micro-batch.
TRAINING_PROGRAMS = (None, "std", "unused", "actckpt", "ckpt_load")
TRAINING_CALLS = ("torch_backward", "fullgrad")
Traffic = dict[tuple[str, str], tuple[int, int]]


def trains_by_itself(case: dict[str, Any]) -> bool:
    plain = case.get("kind") in TRAINING_PROGRAMS or case.get("args", {}).get("which") in TRAINING_CALLS
    return plain and case.get("after") != "ckpt_roundtrip"


def refused_key(case: dict[str, Any]) -> str | None:
    try:
        expected_in_step(case["config"], parameters_of(case), case["world"], 0, runtime="deepspeed")
    except UnsupportedError as error:
        return error.key
    return None


@cache
def recorded_cases() -> dict[str, dict[str, Any]]:
    """Return the recorded runs of stage 3 that completed their training."""
    cases = {}
    for name, case in finished_cases().items():
        zero = case["config"].get("zero_optimization")
        if isinstance(zero, dict) and zero.get("stage") == 3 and trains_by_itself(case):
            cases[name] = case
    return cases


def covered_cases() -> list[str]:
    return [name for name, case in recorded_cases().items() if refused_key(case) is None]


def runs_modules_in_list_order(case: dict[str, Any]) -> bool:
    """Return whether each module runs once in the order of the parameter list, and no class is a leaf module."""
    classes = case["config"]["zero_optimization"].get("leaf_module", {}).get("classes")
    return case.get("kind") not in ("unused", "actckpt") and not classes


def gradient_order_of(case: dict[str, Any]) -> list[str]:
    """Return the reverse order, with an exception for DeepSpeed's own linear layer.

    This layer produces the gradient of its weight before that of its bias.
    """
    trained = [p.name for p in parameters_of(case) if p.requires_grad and not p.name.startswith("never")]
    order = trained[::-1]
    if not case["config"]["zero_optimization"].get("memory_efficient_linear", True):
        return order
    norms = {name for name in order if name.rpartition(".")[0].rpartition(".")[2].startswith("ln")}
    layers = dict.fromkeys(name.rpartition(".")[0] for name in order)
    by_layer = {layer: [name for name in order if name.rpartition(".")[0] == layer] for layer in layers}
    return [
        name for names in by_layer.values() for name in (names if norms & set(names) else sorted(names)[::-1])
    ]


def purpose_of(row: dict[str, str], config: dict[str, Any]) -> str:
    phase, op = row["phase"], row["op"]
    if op == "broadcast":
        return "parameter_broadcast" if phase == "init" else "trace_check"
    if op == "all_gather_single" or phase == "forward":
        return "parameter_gather"
    if phase == "step":
        return "overflow_check" if row["dtype"] == "uint8" else "gradient_norm"
    fetches = config["zero_optimization"].get("stage3_use_all_reduce_for_fetch_params")
    return "parameter_gather" if fetches and op == "allreduce" else "gradient_reduce"


@cache
def recorded_traffic(name: str) -> dict[str, dict[int, Traffic]]:
    """Return the count and payload bytes of each rank, by step since training started and by (purpose, op).

    Step -1 is the time before training.
    """
    config = recorded_cases()[name]["config"]
    with (RECORDED / name / "collectives.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["phase"] in TRAINING and r["op"] != "barrier"]
    first = min(int(row["step"]) for row in rows if row["step"] != "-1")
    traffic: dict[str, dict[int, Traffic]] = defaultdict(dict)
    for row in rows:
        step = max(int(row["step"]) - first, -1)
        mine = traffic[row["rank"]].setdefault(step, {})
        key = (purpose_of(row, config), OPS[row["op"]])
        count, payload = mine.get(key, (0, 0))
        size = int(row["bytes_out"] if row["op"] == "all_gather_single" else row["bytes_in"])
        mine[key] = (count + 1, payload + size)
    return traffic


def rows_of_step(name: str, step: int, order: list[str] | None):
    case = recorded_cases()[name]
    return expected_in_step(
        case["config"],
        parameters_of(case),
        case["world"],
        step,
        order,
        runtime="deepspeed",
        zero_init=case.get("zero_init", False),
    )


def overflowed(case: dict[str, Any], recorded: Traffic) -> bool:
    return (
        case["config"].get("fp16", {}).get("enabled", False)
        and ("gradient_norm", "all_reduce") not in recorded
    )


needs_recorded_runs = pytest.mark.skipif(
    not recorded_cases(), reason="no recorded DeepSpeed runs here; COMMPROF_RECORDED_RUNS names their folder"
)


@needs_recorded_runs
@pytest.mark.parametrize("ordered", [True, False], ids=["gradient-order", "no-order"])
@pytest.mark.parametrize("name", covered_cases())
def test_what_is_certain_is_what_was_recorded(name, ordered):
    case = recorded_cases()[name]
    if case.get("kind") == "unused" and not ordered:
        pytest.skip("without the order nobody knows that a layer is not reached")
    order = gradient_order_of(case) if ordered else None
    traffic = recorded_traffic(name)
    expectations = {step: rows_of_step(name, step, order) for step in traffic["0"]}
    for rank, steps in traffic.items():
        for step, recorded in steps.items():
            rows = expectations[step]
            if step >= 0 and overflowed(case, recorded):
                ends_at_the_check = {"gradient_norm"}
                rows = [row for row in rows if row.purpose not in ends_at_the_check]
            assert {(row.purpose, row.issued_op) for row in rows} == set(recorded), (rank, step)
            for row in rows:
                count, payload = recorded[row.purpose, row.issued_op]
                assert row.payload_bytes == payload or not row.bytes_exact, (rank, step, row)
                assert row.count == count or not row.exact, (rank, step, row)


@needs_recorded_runs
@pytest.mark.parametrize(
    "name", [n for n in covered_cases() if runs_modules_in_list_order(recorded_cases()[n])]
)
def test_what_is_estimated_is_right_where_modules_run_in_the_order_of_the_list(name):
    case = recorded_cases()[name]
    for step, recorded in recorded_traffic(name)["0"].items():
        rows = rows_of_step(name, step, None)
        if step >= 0 and overflowed(case, recorded):
            rows = [row for row in rows if row.purpose != "gradient_norm"]
        assert {(row.purpose, row.issued_op): (row.count, row.payload_bytes) for row in rows} == recorded, (
            step
        )


@needs_recorded_runs
@pytest.mark.parametrize("name", covered_cases())
def test_the_issued_share_of_the_gradients_is_the_recorded_one_but_for_padding(name):
    case = recorded_cases()[name]
    share = reduction_share(case["config"], case["world"])
    by_op: Counter[str] = Counter()
    for steps in recorded_traffic(name).values():
        for recorded in steps.values():
            by_op.update({op: size for (why, op), (_, size) in recorded.items() if why == "gradient_reduce"})
    # A parameter that is larger than the bucket is reduce-scattered, whatever the config requests.
    capacity = case["config"]["zero_optimization"].get("reduce_bucket_size", 500_000_000)
    if all(parameter.numel <= capacity for parameter in parameters_of(case)):
        assert set(by_op) == {share.issued_op}


@needs_recorded_runs
def test_refused_runs_are_those_whose_rules_need_more_than_config_and_parameters():
    refused = {name: refused_key(case) for name, case in recorded_cases().items()}
    assert {key for key in refused.values() if key} <= {"torch_autocast.enabled", "optimizer.type"}
    assert len(covered_cases()) > 0.9 * len(refused)

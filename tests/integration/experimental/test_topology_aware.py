"""Collectives along the axes of a grid, compared with the plain ones on real gloo ranks."""

from __future__ import annotations

import json
import re
from math import prod

import pytest

from support.ranks import RankError, run_ranks
from support.recording import record

pytestmark = pytest.mark.ranks
ADAM = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
STAGES = (
    {"stage": 0},
    {"stage": 1},
    {"stage": 2},
    {"stage": 2, "gradient_reduction": "reduce_scatter", "overlap_parameter_gather": True},
    {"stage": 2, "gradient_reduction": "reduce_scatter", "reduce_scatter_impl": "native"},
    {"stage": 2, "reduce_scatter": False, "allgather_bucket_size": 400},
    {"stage": 3, "stage3_param_persistence_threshold": 0},
    {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_scatter_impl": "native"},
    {"stage": 3, "reduce_scatter": False, "stage3_use_all_reduce_for_fetch_params": True},
)
SUM_OF_FLOATS = 1e-6  # after two steps, for the same fp32 sums in a different order


def composed(rank, world, sizes):
    """Run every composed collective and return those that differ from the plain ones.

    The values are small whole numbers, whose sums are exact.
    """
    import torch

    from commprof import hooks
    from zero_runtime.comm import DataParallelGroup
    from zero_runtime.configuration.blocks.communication_block import CommunicationConfig
    from zero_runtime.experimental.topology_aware.installation import install

    why = hooks.tag("gradient_reduce", bucket=1)
    generator = torch.Generator().manual_seed(rank)
    wrong = []

    def numbers(count, dtype=torch.float32):
        return torch.randint(-8, 8, (count,), generator=generator).to(dtype)

    def check(name, mine, plain):
        if not torch.equal(mine, plain):
            wrong.append(name)

    for implementation in ("all_to_all", "native"):
        plain, group = DataParallelGroup(), DataParallelGroup()
        install(group, CommunicationConfig(topology=sizes), implementation, DataParallelGroup)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for count in (1, world, 6 * world, 6 * world + 1):
                for asynchronous in (False, True):
                    name = (implementation, str(dtype), count, asynchronous)
                    tensor = numbers(count, dtype)
                    other = tensor.clone()
                    work = group.all_reduce(tensor, why=why, asynchronous=asynchronous)
                    assert (work is not None) == asynchronous
                    if asynchronous:
                        work.wait()
                    plain.all_reduce(other)
                    check(("all_reduce", *name), tensor, other)
                    gathered, expected = (tensor.new_empty(world * count) for _ in range(2))
                    piece = numbers(count, dtype)
                    work = group.all_gather_single(gathered, piece, why=why, asynchronous=asynchronous)
                    if asynchronous:
                        work.wait()
                    plain.all_gather_single(expected, piece)
                    check(("all_gather", *name), gathered, expected)
                    apart = [tensor.new_empty(count) for _ in range(world)]
                    work = group.all_gather(apart, piece, why=why, asynchronous=asynchronous)
                    if asynchronous:
                        work.wait()
                    check(("all_gather of a list", *name), torch.cat(apart), expected)
                    rows = numbers(world * count, dtype)
                    output, expected = rows.new_empty(count), rows.new_empty(count)
                    work = group.reduce_scatter_single(output, rows, why=why, asynchronous=asynchronous)
                    if asynchronous:
                        work.wait()
                    plain.reduce_scatter_single(expected, rows.clone())
                    check(("reduce_scatter", *name), output, expected)
        if implementation == "all_to_all":
            numels = [(7 * each) % 5 for each in range(world)]  # rows of different lengths, including 0
            rows = numbers(sum(numels))
            room = rows.new_empty(world * numels[rank])
            for asynchronous in (False, True):
                work, total = group.sum_rows(room, rows, numels, why=why, asynchronous=asynchronous)
                if work is not None:
                    work.wait()
                mine = total().clone()

                check(("sum_rows", asynchronous), mine, plain.sum_rows(room, rows, numels)[1]())
    return wrong


@pytest.mark.long
def test_composed_collectives_equal_the_plain_ones_to_the_bit_where_sums_are_exact():
    assert run_ranks(4, composed, (2, 2)) == [[]] * 4


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 2, 2), (2, 3, 2), (4, 2)])
def test_so_they_do_on_any_grid(sizes):
    assert run_ranks(prod(sizes), composed, sizes) == [[]] * prod(sizes)


def train(rank, world, config, steps=2):
    """Return the losses of a small model, no part of which is divisible by the number of ranks."""
    import torch

    import zero_runtime

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 70), torch.nn.ReLU(), torch.nn.Linear(70, 3))
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = engine(torch.randn(2, 33, generator=generator).to(next(model.parameters()).dtype))
        loss = loss.float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def both(rank, world, topology, stages):
    """Return, for each of ``stages``, the losses with plain collectives and with collectives along the axes."""
    return [
        [
            train(
                rank,
                world,
                {**ADAM, "zero_optimization": zero, "communication": {"topology": each}, **others},
            )
            for each in (1, topology)
        ]
        for zero, others in stages
    ]


def largest_difference(outcomes):
    return max(
        abs(mine / plain - 1) for rank in outcomes for case in rank for plain, mine in zip(*case, strict=True)
    )


@pytest.mark.long
def test_losses_are_those_of_plain_collectives_at_every_stage():
    outcomes = run_ranks(4, both, [2, 2], [(zero, {}) for zero in STAGES])
    assert largest_difference(outcomes) < SUM_OF_FLOATS


@pytest.mark.long
@pytest.mark.parametrize(("world", "topology"), [(6, 2), (6, 3), (8, 3), (5, 2), (3, "auto")])
def test_so_they_are_in_any_world(world, topology):
    outcomes = run_ranks(world, both, topology, [(zero, {}) for zero in STAGES])
    assert largest_difference(outcomes) < SUM_OF_FLOATS


@pytest.mark.long
def test_bf16_losses_differ_by_the_rounding_of_their_sums():
    stages = [(zero, {"bf16": {"enabled": True}}) for zero in STAGES]
    assert largest_difference(run_ranks(4, both, [2, 2], stages)) < 0.02


def test_each_collective_is_tagged_and_names_its_axis_and_verify_explains_it(tmp_path):
    from commprof.analysis import api

    config = {
        **ADAM,
        "zero_optimization": {"stage": 2, "gradient_reduction": "reduce_scatter"},
        "communication": {"topology": [2, 2], "slow_node_tolerance": 0.9},
    }
    run, _ = record(tmp_path / "run", 4, train, config, 2)
    table = run.table("collectives").to_pylist()
    step = [row for row in table if row["step"] == 1 and row["rank"] == 0]
    axes = [row for row in step if row["group_desc"].startswith("axis")]
    assert {(row["purpose"], row["op"], row["intended_op"], row["group_desc"], row["group_ranks"]) for row in axes} == {
        ("gradient_reduce", "all_to_all", "reduce_scatter", "axis 1 of 2x2", "0-1"),
        ("gradient_reduce", "all_to_all", "reduce_scatter", "axis 0 of 2x2", "0,2"),
        ("parameter_gather", "all_gather", None, "axis 0 of 2x2", "0,2"),
        ("parameter_gather", "all_gather", None, "axis 1 of 2x2", "0-1"),
    }  # fmt: skip
    assert all(row["bucket"] is not None for row in axes if row["purpose"] == "gradient_reduce")
    # The other axis sums only the half of the message that a rank has after the first axis of two ranks.
    sums = [row["payload_bytes"] for row in axes if row["purpose"] == "gradient_reduce"]
    assert sums[0] == 4 * (33 * 70 + 70 + 70 * 3 + 3) and abs(sums[1] - sums[0] / 2) <= 16
    # Small messages are not worth a composition and go to all ranks at once. These are the norm, and the
    # times for slow_node_tolerance.
    whole = [row["purpose"] for row in step if not row["group_desc"].startswith("axis")]
    assert sorted(whole) == ["gradient_norm", "metric"]
    assert {row["name"] for row in run.table("metrics").to_pylist()} >= {"lateness_ms"}
    verdict = api.verify(run)
    assert (verdict.exit_code, verdict.unexplained) == (0, ())
    assert any("communication.topology: [2, 2] has sums" in each for each in verdict.sentences)


@pytest.mark.long
def test_verify_closes_the_ledger_of_ranks_that_are_watched(tmp_path):
    from commprof.analysis import api

    config = {**ADAM, "zero_optimization": {"stage": 1}, "communication": {"slow_node_tolerance": 0.9}}
    run, _ = record(tmp_path / "run", 2, train, config)
    found = api.verify(run)
    assert found.exit_code == 0, found.sentences


def calibrations(folder):
    """Write calibration files in which all ranks are on slow links and the inner axis is on fast links.

    With these costs small messages stay plain.
    """
    from zero_runtime.experimental.topology_aware.costs import OPERATIONS, bus_factor

    made = {}
    for name, ranks, alpha, beta in (("world", 4, 5e4, 1e8), ("outer", 2, 5e4, 1e8), ("inner", 2, 5e3, 1e10)):
        ops = {
            each: {
                "bus_factor": bus_factor(each, ranks),
                "fit": {"alpha_ns": alpha, "beta_bytes_per_s": beta * 1 / bus_factor(each, ranks)},
            }
            for each in OPERATIONS
        }
        made[name] = folder / f"{name}.json"
        made[name].write_text(json.dumps({"format": "commprof-calibration", "ops": ops}))
    return {"world": str(made["world"]), "axes": [str(made["outer"]), str(made["inner"])]}


@pytest.mark.long
def test_measured_costs_choose_for_each_size(tmp_path):

    config = {
        **ADAM,
        "zero_optimization": {"stage": 2, "gradient_reduction": "all_reduce", "reduce_bucket_size": 300},
        "communication": {"topology": [2, 2], "calibration": calibrations(tmp_path)},
    }
    run, _ = record(tmp_path / "run", 4, train, config, 2)
    steps = [row for row in run.table("collectives").to_pylist() if row["step"] == 1 and row["rank"] == 0]
    reduced = [row for row in steps if row["purpose"] == "gradient_reduce"]
    plain = [row["payload_bytes"] for row in reduced if not row["group_desc"].startswith("axis")]
    along = [row["payload_bytes"] for row in reduced if row["op"] == "all_to_all"]
    assert plain and along and max(plain) < min(along)


def test_all_ranks_hear_that_a_calibration_is_missing(tmp_path):
    files = {"world": str(tmp_path / "none.json"), "axes": ["a.json", "b.json"]}
    config = {**ADAM, "communication": {"topology": [2, 2], "calibration": files}}
    with pytest.raises(RankError) as failure:
        run_ranks(4, train, config)
    text = str(failure.value)
    assert (
        "none.json cannot be read" in text
        and len(re.findall("ConfigError: .*: rank 0 cannot read", text)) == 3
    )


def sleepy(rank, world, config):
    """Train like :func:`train`, with one rank that sleeps."""
    import time

    import torch

    import zero_runtime

    model = torch.nn.Linear(8, 8)
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(5):
        if rank == 2:
            time.sleep(0.5)
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("topology", [1, [2, 2]])
def test_a_rank_that_sleeps_is_said_to_keep_the_others_waiting(capfd, topology):
    communication = {"topology": topology, "slow_node_tolerance": 0.3}
    run_ranks(4, sleepy, {**ADAM, "zero_optimization": {"stage": 1}, "communication": communication})
    assert "zero_runtime: rank 2 delays the others by" in capfd.readouterr().err

"""``auto`` for bucket sizes.

Rank 0 decides the sizes by a calibration or a measurement. They are equal on all ranks, and are recorded.
"""

from __future__ import annotations

import json

import pytest
import torch

import zero_runtime
from commprof.calibration.file import to_json
from commprof.calibration.results import Calibration, Timing
from commprof.cli.application import invoke
from commprof.ledger.verification import verify
from support.process_group_log import logged
from support.ranks import run_ranks
from support.recorded_models import make_batch, make_model
from support.recording import record
from support.standing_ranks import run_standing
from zero_runtime.comm import DataParallelGroup
from zero_runtime.experimental.topology_aware.costs import Cost
from zero_runtime.startup import message_sizes

pytestmark = pytest.mark.ranks

ALPHA_NS = 1_000
# In bytes per second, for large messages. With 2 ranks the bandwidth reaches 90 % of this value at 9 alpha
# beta.
BETA = {"all_reduce": 1e9, "reduce": 2e9, "all_gather": 1.5e9, "all_to_all": 1.2e9, "reduce_scatter": 0.7e9}
KNEE = {op: 9 * ALPHA_NS * 1e-9 * beta for op, beta in BETA.items()}


def calibration(path, world=2, without=(), alpha_ns=ALPHA_NS):
    timings = {
        op: tuple(
            Timing(size, round(alpha_ns + size / beta * 1e9), 1, 10**12, 5)
            for size in (1000 * 2**power for power in range(0, 16, 3))
        )
        for op, beta in BETA.items()
        if op not in without
    }
    made = Calibration(
        created="2026-01-01T00:00:00+00:00", torch="2", backend="gloo", backend_version=None, device="cpu",
        dtype="float32", world_size=world, hosts=("host",), machine={}, timings=timings,
    )  # fmt: skip
    path.write_text(to_json(made))
    return str(path)


def config(zero, path=None, **top):
    named = {"communication": {"calibration": {"world": path}}} if path else {}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
        **named,
        **top,
    }


def train(rank, world, settings):
    """Return the sizes in use, and the largest message of each kind in a step."""
    engine, *_ = zero_runtime.initialize(model=make_model("mlp"), config=settings)
    losses = []
    for step in range(3):
        inputs, targets = make_batch("mlp", step, 0, rank)
        with logged() as log:
            loss = engine(inputs.to(next(engine.parameters()).dtype), targets)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    zero = engine._config.effective()["zero_optimization"]
    largest = {}
    for call in log.calls:
        largest[call.method] = max(largest.get(call.method, 0), call.numel_in, call.numel_out)
    return zero, largest, losses


@pytest.mark.sampled("reduce_scatter")
@pytest.mark.parametrize(
    ("zero", "op"),
    [
        ({"stage": 2}, "all_reduce"),
        ({"stage": 2, "use_multi_rank_bucket_allreduce": False}, "reduce"),
        ({"stage": 1, "gradient_reduction": "reduce_scatter"}, "all_to_all"),
        (
            {"stage": 2, "gradient_reduction": "reduce_scatter", "reduce_scatter_impl": "native"},
            "reduce_scatter",
        ),
        ({"stage": 3}, "all_to_all"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_calibration_decides_the_smallest_size_at_90_percent_of_the_bandwidth(tmp_path, capfd, zero, op):
    path = calibration(tmp_path / "c.json")
    gathers = "stage3_prefetch_bucket_size" if zero["stage"] == 3 else "allgather_bucket_size"
    settings = config({**zero, "reduce_bucket_size": "auto", gathers: "auto"}, path)
    found = run_ranks(2, train, settings)
    assert found[0][0] == found[1][0]
    used, largest, losses = found[0]
    assert used["reduce_bucket_size"] * 4 == pytest.approx(KNEE[op], rel=0.002)
    assert used[gathers] * 4 == pytest.approx(KNEE["all_gather"], rel=0.002)
    printed = capfd.readouterr().err
    for name, operation in (("reduce_bucket_size", op), (gathers, "all_gather")):
        sentence = f"{name} is auto: {used[name]:,} elements ({used[name] * 4:,} bytes), the smallest {operation} among 2"
        assert printed.count(sentence) == 1, printed
    # The chosen sizes are in use: the messages equal those of a config with these sizes.
    written = config({**zero, "reduce_bucket_size": used["reduce_bucket_size"], gathers: used[gathers]})
    assert run_ranks(2, train, written)[0][1:] == (largest, losses)


def test_sizes_are_elements_of_the_dtype_that_is_sent(tmp_path):
    path = calibration(tmp_path / "c.json")
    zero = {"stage": 2, "reduce_bucket_size": "auto", "allgather_bucket_size": "auto"}
    used = run_standing(2, train, config(zero, path, bf16={"enabled": True}, communication_data_type="fp32"))[
        0
    ][0]
    assert used["reduce_bucket_size"] * 4 == pytest.approx(KNEE["all_reduce"], rel=0.002)
    assert used["allgather_bucket_size"] * 2 == pytest.approx(KNEE["all_gather"], rel=0.002)


def test_a_calibration_without_latency_leaves_the_default_and_not_the_smallest_size(tmp_path, capfd):
    path = calibration(tmp_path / "c.json", alpha_ns=0)
    assert json.loads((tmp_path / "c.json").read_text())["ops"]["all_reduce"]["fit"]["alpha_ns"] == 0
    settings = config({"stage": 2, "reduce_bucket_size": "auto"}, path)
    found = run_ranks(2, train, settings)
    assert [rank[0]["reduce_bucket_size"] for rank in found] == [500_000_000] * 2
    assert "reduce_bucket_size is auto: the default, since the calibration" in capfd.readouterr().err
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    arguments = ["plan", str(tmp_path / "ds.json"), "--model", "params:1e6", "--world", "2"]
    assert invoke([*arguments, "--backend", "gloo"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert (
        "reduce_bucket_size is auto: the default, 500,000,000 elements, since the calibration has a latency of 0"
        in shown
    )


def fails(rank, world, settings):
    with pytest.raises(zero_runtime.ConfigError) as error:
        zero_runtime.initialize(model=make_model("mlp"), config=settings)
    return str(error.value)


def test_a_calibration_that_cannot_be_used_is_an_error_on_every_rank(tmp_path):
    path = calibration(tmp_path / "c.json", without=("all_reduce",))
    for file, message in (
        (path, "no fitted times of all_reduce"),
        (str(tmp_path / "none.json"), "cannot be read"),
    ):
        found = run_standing(2, fails, config({"stage": 2, "reduce_bucket_size": "auto"}, file))
        assert found[0] == found[1]
        assert message in found[0]


def decided(rank, world, settings):
    return train(rank, world, settings)[0]


def test_without_a_calibration_a_run_measures_and_verify_closes(tmp_path, capfd):
    zero = {"stage": 2, "reduce_bucket_size": "auto", "allgather_bucket_size": "auto"}
    run, ranks = record(tmp_path / "run", 2, decided, config(zero))
    sizes = [
        (each["result"]["reduce_bucket_size"], each["result"]["allgather_bucket_size"]) for each in ranks
    ]
    assert sizes[0] == sizes[1]
    assert all(isinstance(size, int) and size > 0 and size % 2 == 0 for size in sizes[0])
    assert capfd.readouterr().err.count("by a measurement at the start") == 2
    assert verify(run).exit_code == 0
    recorded = run.manifest.effective_config["zero_optimization"]
    assert (recorded["reduce_bucket_size"], recorded["allgather_bucket_size"]) == sizes[0]


def measured(rank, world):
    torch.manual_seed(0)
    costs = message_sizes.measured_cost(DataParallelGroup(), "all_reduce", torch.float32)
    return tuple(costs)


def test_all_ranks_measure_the_same():
    found = run_standing(2, measured)
    assert found[0] == found[1]
    assert found[0][0] >= 0
    assert found[0][1] > 0


def test_the_fit_recovers_latency_and_bandwidth():
    times = [(2**power, 30_000 + 2**power * 0.5) for power in (12, 15, 18, 21)]
    assert message_sizes.fitted(times) == pytest.approx((30_000, 0.5))
    # times that do not increase with the bytes
    assert message_sizes.fitted([(2**10, 100.0), (2**20, 90.0)])[1] > 0
    alpha, _ = message_sizes.fitted([(2**12, 60_000.0), (2**15, 500_000.0), (2**21, 40_000_000.0)])
    assert alpha == 60_000  # a line through these times would have a negative latency
    cost = Cost(30_000, 0.5)
    payload = message_sizes.smallest_payload(cost, "all_reduce", 2)  # the bus factor of 2 ranks is 1
    assert payload / cost.time_ns("all_reduce", payload, 2) == pytest.approx(0.9 / 0.5)


@pytest.mark.parametrize("file", ["option", "config", "none"])
def test_plan_says_the_number_or_what_would_decide(tmp_path, capsys, file):
    path = calibration(tmp_path / "c.json")
    zero = {"stage": 2, "reduce_bucket_size": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(config(zero, path if file == "config" else None)))
    option = ["--calibration", path] if file == "option" else []
    arguments = [
        "plan",
        str(tmp_path / "ds.json"),
        "--model",
        "params:1e6",
        "--world",
        "2",
        "--backend",
        "gloo",
    ]
    assert invoke([*arguments, *option]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    if file == "none":
        assert "reduce_bucket_size is auto: the start of the run measures the smallest all_reduce" in shown
        return
    numel = run_ranks(2, train, config(zero, path))[0][0]["reduce_bucket_size"]
    assert f"reduce_bucket_size is auto: {numel:,} elements ({numel * 4:,} bytes)" in shown

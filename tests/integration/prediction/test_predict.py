"""``commprof predict`` on trainings of two gloo ranks whose compute is a timed sleep, so that the answer is known."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commprof.calibration.file import write_calibration
from commprof.ledger.requests.request import request_of
from commprof.prediction.changes import change
from commprof.prediction.program import Step
from commprof.prediction.recorded import recorded_steps
from commprof.prediction.sent import sent_by
from commprof.prediction.wrapper_settings import with_resharding
from commprof.trace.reader import open_run
from support import hosts as network
from support.calibrations import made_calibration
from support.command import commprof, output
from support.warm_hosts import run_commprof_on_each

pytestmark = [pytest.mark.ranks, pytest.mark.alone, pytest.mark.shared_answers]

STEPS = 14
FORWARD, BACKWARD = 0.020, 0.040  # the seconds of each of the four layers in each pass

MODEL = """
import sys, time
import torch
from torch import nn

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        time.sleep(forward)
        ctx.backward = backward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward)
        return gradient, None, None

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256, bias=False)

    def forward(self, x):
        return Slow.apply(self.linear(x), FORWARD, BACKWARD)

torch.manual_seed(0)
model = nn.Sequential(*(Layer() for _ in range(4)))
"""
ZERO = """
import zero_runtime
engine, *_ = zero_runtime.initialize(
    model=model, model_parameters=model.parameters(), config=sys.argv[sys.argv.index("--config") + 1]
)
for _ in range(STEPS):
    engine.backward(engine(torch.randn(2, 256)).square().mean())
    engine.step()
"""
DDP = """
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    model(torch.randn(2, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
FULLY_SHARD = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
for layer in model:
    fully_shard(layer, reshard_after_forward=RESHARD)
fully_shard(model, reshard_after_forward=RESHARD)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    model(torch.randn(2, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
COMPUTE_NS = 4 * (FORWARD + BACKWARD) * 1e9
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 256 * 256},
}


def write_program(folder, program, backward=BACKWARD):
    text = textwrap.dedent(MODEL + program)
    head = f"STEPS, FORWARD, BACKWARD = {STEPS}, {backward / 2}, {backward}"
    (folder / "train.py").write_text(f"{head}\n{text}")


def record(folder, program, *arguments):
    write_program(folder, program)
    run = folder / "run"
    output("run", "--nproc", "2", "--out", str(run), str(folder / "train.py"), *arguments, cwd=folder)
    return run


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    config = folder / "ds.json"
    config.write_text(json.dumps(CONFIG))
    return record(folder, ZERO, "--config", str(config))


@pytest.fixture(scope="module")
def exposed(tmp_path_factory):
    """Record a run on two hosts with slow links.

    Its gradients are reduced in each of 8 micro-batches. Stage 1 would reduce them once.
    """
    reason = network.why_impossible()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("exposed")
    zero = {"stage": 2, "reduce_bucket_size": 256 * 256, "overlap_comm": False}
    config = CONFIG | {"gradient_accumulation_steps": 8, "zero_optimization": zero}
    (folder / "ds.json").write_text(json.dumps(config))
    program = ZERO.replace("range(STEPS)", "range(8 * STEPS)")
    write_program(folder, program, backward=0.002)
    # A disturbed run is refused. The message advises the user to record again.
    for number in range(3):
        run = folder / f"run{number}"
        with network.hosts(2, "200mbit") as machines:
            run_commprof_on_each(
                machines, ["run", "--out", run.name, "train.py", "--config", "ds.json"], folder
            )
        if "on a quiet machine" not in " ".join(commprof("predict", str(run), cwd=folder).stderr.split()):
            break
    return run


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    return record(tmp_path_factory.mktemp("ddp"), DDP)


def answer(run, *arguments):
    return json.loads(output("predict", str(run), *arguments, "--json", cwd=run.parent))


def test_the_recorded_setting_is_replayed(zero):
    told = answer(zero)
    assert abs(told["replay"]["error"]) < 0.05
    (setting,) = told["settings"]
    assert setting["set"] == {}
    step = setting["step_ns"]
    assert step["low"] < step["median"] < step["high"]
    assert step["median"] == pytest.approx(told["recorded"]["step_ns"], rel=0.05)
    assert set(setting["exposed_ns"]) == {"gradient_reduce", "gradient_norm", "parameter_gather"}
    assert sum(each["ns"] for each in setting["critical_path"]) == pytest.approx(step["median"], rel=0.15)


def test_several_runs_of_one_setting(zero, tmp_path):
    again = shutil.copytree(zero, tmp_path / "again")
    one, two = answer(zero), answer(zero, str(again))
    assert two["recorded"] == one["recorded"] | {"steps": 2 * one["recorded"]["steps"]}
    widths = [
        each["settings"][0]["step_ns"]["high"] - each["settings"][0]["step_ns"]["low"] for each in (one, two)
    ]
    assert widths[1] < widths[0] and "promising" not in two


def test_without_messages_the_compute_is_left(zero):
    told = answer(zero, "--comm", "free")
    (setting,) = told["settings"]
    assert (
        COMPUTE_NS < setting["step_ns"]["median"] < min(1.25 * COMPUTE_NS, 1.01 * told["recorded"]["step_ns"])
    )
    # The remaining exposed time is waiting for the later rank.
    assert setting["exposed_ns"]["gradient_reduce"] < 0.1 * COMPUTE_NS


def test_other_buckets_and_overlap_have_their_messages(zero):
    told = answer(
        zero,
        "--set",
        "zero_optimization.overlap_comm=true",
        "--set",
        "zero_optimization.reduce_bucket_size=65536,131072",
    )
    small, large = told["settings"]
    assert small["set"] == {
        "zero_optimization.overlap_comm": True,
        "zero_optimization.reduce_bucket_size": 65536,
    }
    # The messages are four gradients in four or two buckets, the norm, and the parameters.
    assert (small["messages"], large["messages"]) == (6, 4)
    assert any("2 all_reduce" in sentence for sentence in large["why"])
    assert small["memory_bytes_per_rank"] < large["memory_bytes_per_rank"]


def test_a_config_of_another_program_is_not_taken_for_the_engines(zero, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(zero, run)
    manifest = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(manifest | {"config": {"learning_rate": 1}}))
    buckets = "--set", "zero_optimization.reduce_bucket_size=65536"
    (same,), (other,) = (answer(each, *buckets)["settings"] for each in (zero, run))
    assert other["messages"] == same["messages"]
    assert {**other, "why": None} == {**same, "why": None}


@pytest.mark.long
def test_without_a_setting_the_changes_worth_trying_are_listed(exposed):
    told = answer(exposed)
    assert [each["set"] for each in told["settings"]] == [{}]
    best = told["promising"]
    assert best["tried"] >= 1 and best["reason"] is None
    assert {"zero_optimization.stage": 1} in [each["set"] for each in best["changes"]]
    for one in best["changes"]:
        assert one["step_ns"]["high"] < told["recorded"]["step_ns"]
        assert one["gain_ns"]["median"] == told["recorded"]["step_ns"] - one["step_ns"]["median"]
        words = [
            word for key, value in one["set"].items() for word in ("--set", f"{key}={json.dumps(value)}")
        ]
        alone = answer(exposed, *words)
        assert alone["settings"][0]["step_ns"] == one["step_ns"]
        assert "promising" not in alone
    printed = output("predict", str(exposed), cwd=exposed.parent)
    assert f"commprof predict {exposed} --set zero_optimization.stage=1" in printed
    assert "give the file with --calibration" in printed.replace("\n", " ")


def test_where_messages_take_little_no_change_is_offered(zero):
    best = answer(zero)["promising"]
    assert best["changes"] == [] and best["tried"] > 0
    assert "none is faster than the recorded setting" in output("predict", str(zero), cwd=zero.parent)


def test_what_cannot_be_predicted_is_said_in_a_line(zero):
    for setting, said in (
        ("train_micro_batch_size_per_gpu=4", "it changes what is computed"),
        ("zero_optimization.stage=3", "commprof calibrate --nproc 2 --ops all_to_all"),
        (
            "ddp.bucket_cap_mb=1",
            "error: --set ddp.bucket_cap_mb applies to DistributedDataParallel, which this run does not",
        ),
        ("zero_optimization.reduce_bucket_size=-1", "reduce_bucket_size"),
        ("zero_optimization.gradient_reduction=reduce_to_owner", "commprof calibrate --nproc 2 --ops reduce"),
    ):
        done = commprof("predict", str(zero), "--set", setting, cwd=zero.parent)
        assert done.returncode != 0
        assert said in done.stderr and "Traceback" not in done.stderr, (setting, done.stderr)


def test_a_run_without_the_file_of_a_rank_is_refused(zero, tmp_path):
    copied = Path(shutil.copytree(zero, tmp_path / "run"))
    next((copied / "collectives").glob("rank-00001-*")).unlink()
    done = commprof("predict", str(copied), cwd=tmp_path)
    assert done.returncode == 2 and "has no records of 1 of 2 ranks (1)" in done.stderr, done.stderr


def test_messages_without_a_purpose_are_untagged(ddp, tmp_path):
    copied = Path(shutil.copytree(ddp, tmp_path / "run"))
    for file in (copied / "collectives").glob("*.parquet"):
        table = pq.read_table(file)
        column = table.column_names.index("purpose")
        pq.write_table(
            table.set_column(column, table.field(column), pa.nulls(len(table), table["purpose"].type)), file
        )
    told = answer(copied, "--comm", "free")
    assert set(told["recorded"]["exposed_ns"]) == {"untagged"} == set(told["settings"][0]["exposed_ns"])
    assert not any("nan" in each for each in told["settings"][0]["why"])


def test_a_run_given_twice_counts_once(zero):
    once, twice = answer(zero), json.loads(output("predict", "run", str(zero), "--json", cwd=zero.parent))
    assert twice["settings"][0]["step_ns"] == once["settings"][0]["step_ns"]


def test_buckets_of_ddp(ddp):
    told = answer(ddp, "--set", "ddp.bucket_cap_mb=0.3,0.5")
    four, two = told["settings"]
    assert abs(told["replay"]["error"]) < 0.05
    assert (four["messages"], two["messages"]) == (2, 2)
    assert four["step_ns"]["median"] == pytest.approx(told["recorded"]["step_ns"], rel=0.1)


def test_other_arguments_of_ddp(ddp):
    told = answer(ddp, "--set", "ddp.gradient_as_bucket_view=true,false")
    recorded = told["recorded"]["step_ns"]
    for setting in told["settings"]:
        assert setting["step_ns"]["median"] == pytest.approx(recorded, rel=0.05)
        assert any("changes no message: it saves a copy of the gradients" in each for each in setting["why"])
    for setting, said in (
        ("ddp.find_unused_parameters=true", "record a run with it"),
        ("ddp.gradient_as_bucket_view=3", "expected true or false"),
        ("ddp.comm_hook=powerSGD_hook", "expected one of allreduce_hook"),
    ):
        done = commprof("predict", str(ddp), "--set", setting, cwd=ddp.parent)
        assert done.returncode != 0 and said in done.stderr, (setting, done.stderr)
    (half,) = answer(ddp, "--set", "ddp.comm_hook=bf16_compress_hook")["settings"]
    assert any("2 all_reduce among 2 ranks (median 262,144 bytes) instead of" in each for each in half["why"])


def test_other_buckets_of_ddp_are_tried(ddp):
    best = answer(ddp)["promising"]
    assert best["reason"] is None and best["tried"] + len(best["refused"]) >= 1
    assert {key for each in best["refused"] for key in each["set"]} <= {"ddp.bucket_cap_mb"}


def test_of_a_program_without_a_config_links_can_change(ddp):
    (setting,) = answer(ddp, "--bandwidth", "x0.5")["settings"]
    assert setting["step_ns"]["median"] >= 0.95 * COMPUTE_NS
    refused = commprof("predict", str(ddp), "--set", "zero_optimization.stage=1", cwd=ddp.parent)
    assert refused.returncode != 0 and "DistributedDataParallel" in refused.stderr


STAGED = """
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(3)))
import zero_runtime
engine, *_ = zero_runtime.initialize(
    model=model, model_parameters=model.parameters(), config=sys.argv[sys.argv.index("--config") + 1]
)
for _ in range(2 * STEPS):
    engine.backward(engine(torch.randn(2, 64)).square().mean())
    engine.step()
"""
SETTINGS = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2, "overlap_comm": True},
    "3": {"stage": 3, "stage3_param_persistence_threshold": 100, "stage3_prefetch_bucket_size": 10_000},
    "3, nothing kept": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
    },
}


@pytest.mark.long
def test_the_messages_of_every_stage_are_predicted_from_every_other(tmp_path):
    configs, runs = {}, {}
    for number, (name, zero) in enumerate(SETTINGS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        configs[name] = CONFIG | {
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"reduce_bucket_size": 10_000, **zero},
        }
        (folder / "ds.json").write_text(json.dumps(configs[name]))
        (folder / "train.py").write_text(f"STEPS = {STEPS}\n{STAGED}")
        runs[name] = folder / "run"
        output("run", "--nproc", "2", "--out", str(runs[name]), "train.py", "--config", "ds.json", cwd=folder)
    programs = {name: recorded_steps(open_run(run)).program for name, run in runs.items()}
    for name, run in runs.items():
        request = request_of(open_run(run))
        for other, wanted in programs.items():
            steps = [made_step(programs[name])]
            sent = [sent_by(request, configs[each], 2) for each in (name, other)]
            program = change(programs[name], steps, *sent).program
            plain = [
                [each._replace(bucket=None) for each in messages]
                for messages in (program.messages, wanted.messages)
            ]
            assert plain[0] == plain[1], (name, other)
            assert program.events == wanted.events, (name, other)


def test_stage_3_is_predicted_from_stage_2(zero, tmp_path):
    write_calibration(tmp_path / "calibration.json", made_calibration())
    words = ("--calibration", str(tmp_path / "calibration.json"), "--set", "zero_optimization.stage=2,3")
    words = (*words, "--set", "zero_optimization.stage3_param_persistence_threshold=0")
    two, three = answer(zero, *words)["settings"]
    # The messages are four gradients, the norm, and all parameters at once. The parameters are sent at the
    # end of a step or in the forward pass.
    assert (two["messages"], three["messages"]) == (6, 6)
    assert any("4 all_to_all among 2 ranks (median 262,144 bytes)" in each for each in three["why"])
    assert sum(each.startswith("assumed: ") for each in three["why"]) == 2
    assert not any(each.startswith("assumed: ") for each in two["why"])
    widths = [each["step_ns"]["high"] - each["step_ns"]["low"] for each in (two, three)]
    assert widths[0] < widths[1]


def made_step(program):
    """Return a step with some compute before each event."""
    spans = np.linspace(1e6, 2e6, len(program.events) + 1)[:, None] * np.ones((1, 2))
    return Step(spans, np.zeros((len(program.messages), 2)), follows=True)


@pytest.mark.long
def test_parameters_of_fully_shard_that_stay_gathered(tmp_path):
    runs = {}
    for reshard in (True, False):
        folder = tmp_path / str(reshard)
        folder.mkdir()
        runs[reshard] = record(folder, FULLY_SHARD.replace("RESHARD", str(reshard)))
    told = answer(runs[True], "--set", "fsdp.reshard_after_forward=true,false")
    again, kept = told["settings"]
    # The messages of a step in each run, as recorded.
    sent = {}
    for reshard, run in runs.items():
        rows = open_run(run).table("collectives").to_pandas()
        last = rows[(rows["rank"] == 0) & (rows["step"] == STEPS - 1)]
        sent[reshard] = sorted(zip(last["op"], last["payload_bytes"], strict=True))
    assert (again["messages"], kept["messages"]) == (len(sent[True]), len(sent[False])) == (12, 8)
    assert sorted({*sent[True]}) == sorted({*sent[False]})
    assert 0.95 * COMPUTE_NS <= kept["step_ns"]["median"] <= again["step_ns"]["median"]
    assert kept["exposed_ns"]["parameter_gather"] < again["exposed_ns"]["parameter_gather"]
    assert any("0.5 MiB more of parameters" in each for each in kept["why"])
    programs = {reshard: recorded_steps(open_run(run)).program for reshard, run in runs.items()}
    wrapped = request_of(open_run(runs[False])).wrapped
    steps = [made_step(programs[False])]
    gathered = with_resharding(programs[False], steps, {"fsdp.reshard_after_forward": True}, wrapped).program
    assert [each._replace(bucket=None) for each in gathered.messages] == [
        each._replace(bucket=None) for each in programs[True].messages
    ]
    assert gathered.events == programs[True].events
    (there,) = answer(runs[False], "--set", "fsdp.reshard_after_forward=true")["settings"]
    assert there["messages"] == 12 and any("0.5 MiB less of parameters" in each for each in there["why"])
    refused = commprof("predict", str(runs[False]), "--set", "fsdp.param_dtype=bfloat16", cwd=tmp_path)
    assert refused.returncode != 0 and "it changes what is computed; record a run with it" in refused.stderr
    other = commprof("predict", str(runs[True]), "--set", "ddp.bucket_cap_mb=1", cwd=tmp_path)
    assert other.returncode != 0 and "fsdp.reshard_after_forward of fully_shard" in other.stderr


@pytest.mark.long
def test_a_sweep_shows_predicted_beside_measured(zero):
    folder = zero.parent
    # The program notes whether the predictions existed before it started.
    program = (folder / "train.py").read_text()
    noted = "from pathlib import Path\nprint('predicted before:', Path('s/predictions.json').is_file())\n"
    (folder / "train.py").write_text(noted + program)
    key = "zero_optimization.reduce_bucket_size"
    words = ("--nproc", "2", "--out", "s", "--predict", "run", "--set", f"{key}=131072")
    program_words = ("--", "train.py", "--config", "ds.json")
    done = commprof("sweep", *words, *program_words, cwd=folder)
    assert done.returncode == 0, done.stderr
    stored = json.loads((folder / "s" / "predictions.json").read_text())
    assert f"SHA-256 {stored['sha256']}" in done.stderr
    (run,) = [each for each in (folder / "s").iterdir() if each.is_dir()]
    assert "predicted before: True" in (run / "output.txt").read_text()
    assert [each["set"] for each in stored["predictions"]["settings"]] == [{key: 131072}]
    table = done.stdout[done.stdout.index("predicted before, measured") :]
    assert "80 % interval" in table and "in interval" in table
    (row,) = [line for line in table.splitlines() if line.strip().startswith("reduce_bucket_size=131072 ")]
    assert row.split()[-1] in {"yes", "no"}
    again = commprof("sweep", *words, "--force", *program_words, cwd=folder)
    assert again.returncode != 0 and "which are not replaced" in again.stderr

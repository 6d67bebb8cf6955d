"""DeepSpeed in a recorded process.

The tests always use a package with the structure of DeepSpeed. They also use the real DeepSpeed if an
interpreter has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from support.fake_deepspeed import write_fake
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

REAL = "COMMPROF_DEEPSPEED_PYTHON"  # an interpreter that has the real DeepSpeed
COMMPROF = str(Path(sys.executable).with_name("commprof"))


def methods(deepspeed):
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    return {**vars(deepspeed.DeepSpeedEngine), **vars(DeepSpeedZeroOptimizer)}


def train(rank, world, package, run, when, text):
    """Train two steps of two micro-batches.

    ``when`` is the time at which recording begins: before or after deepspeed is imported, or never.
    """
    import commprof
    from commprof import hooks

    sys.path.insert(0, package)
    if when == "after":
        import deepspeed
    if when != "never":
        commprof.attach(run, quiet=True)
    import deepspeed

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(
        [{"params": list(model[1].parameters())}, {"params": list(model[0].parameters())}], lr=0.1
    )
    engine, _, _, _ = deepspeed.initialize(model, optimizer, {"train_micro_batch_size_per_gpu": 3})
    losses = []
    for number in range(4):
        loss = engine(torch.full((3, 4), float(number + rank))).mean()
        losses.append(float(engine.backward(loss).detach()))
        engine.step()
    raised = None
    try:
        engine.backward(torch.ones(2))
    except ValueError as error:
        raised = str(error)
    kept = engine.save_checkpoint("here")
    document = type(engine).backward.__doc__
    commprof.detach()
    wrapped = [name for name, value in methods(deepspeed).items() if hasattr(value, "__wrapped__")]
    return {
        "losses": losses,
        "raised": raised,
        "kept": kept,
        "document": document,
        "still_wrapped": wrapped,
        "listening": hooks.recording() or any(type(f).__name__ == "ImportWatch" for f in sys.meta_path),
    }


def go(tmp_path, when="before", version="0.19.8", without=""):
    from commprof.trace.reader import open_run

    package = write_fake(tmp_path / "site", version, without)
    outcomes = run_ranks(2, train, str(package), str(tmp_path / "run"), when, version)
    return (None if when == "never" else open_run(tmp_path / "run")), outcomes


def said(run, rank=0):
    rows = sorted(
        (row for row in run.table("collectives").to_pylist() if row["rank"] == rank), key=lambda r: r["seq"]
    )
    return [
        (r["step"], r["micro_step"], r["phase"], r["op"], r["purpose"], r["bucket"], r["parameters"])
        for r in rows
    ]


STEP = [
    ("backward", "all_reduce", "gradient_reduce", 0, "1.weight,1.bias"),
    ("backward", "all_reduce", "gradient_reduce", 1, "0.weight,0.bias"),
    ("optimizer", "all_reduce", "gradient_norm", None, None),
    ("optimizer", "all_reduce", "overflow_check", None, None),
    *[("optimizer", "all_gather", "parameter_gather", None, None)] * 2,
    ("optimizer", "barrier", "other", None, None),
]
EXPECTED = [
    *[(-1, 0, "init", "broadcast", "parameter_broadcast", None, None)] * 4,
    (-1, 0, "init", "barrier", "other", None, None),
    *[(step, 1, *row) for step in (0, 1) for row in STEP],
    (-1, 0, "checkpoint", "barrier", "checkpoint", None, None),
]


@pytest.mark.sampled
@pytest.mark.parametrize("when", ["before", "after"])
def test_every_collective_says_why(tmp_path, when):
    run, outcomes = go(tmp_path, when)
    assert said(run, 0) == said(run, 1) == EXPECTED
    assert run.health.notes == ()
    assert [
        (r["name"], r["param_group"], r["shape"], r["forward_index"])
        for r in run.table("parameters").to_pylist()
    ] == [
        ("1.weight", 0, "1x8", 2),
        ("1.bias", 0, "1", 3),
        ("0.weight", 1, "8x4", 0),
        ("0.bias", 1, "8", 1),
    ]
    buckets = [row for row in run.table("buckets").to_pylist() if row["rank"] == 0]
    assert [(b["step"], b["bucket"], b["numel"], b["bytes"], b["capacity"]) for b in buckets] == [
        (step, *bucket) for step in (0, 1) for bucket in ((0, 9, 36, 40), (1, 40, 160, 40))
    ]
    assert run.manifest.engine == "deepspeed 0.19.8"
    assert run.manifest.effective_config["zero_optimization"]["stage"] == 1
    assert run.manifest.effective_config["train_batch_size"] == 12
    steps = [row for row in run.table("steps").to_pylist() if row["rank"] == 0]
    assert [(s["step"], s["micro_steps"], s["grad_norm"], s["samples"]) for s in steps] == [
        (0, 2, 0.5, 6.0),
        (1, 2, 0.5, 6.0),
    ]
    assert all(outcome["still_wrapped"] == [] and not outcome["listening"] for outcome in outcomes)


@pytest.mark.long
def test_flat_groups_that_are_longer_than_their_parameters_have_padding(tmp_path):
    run, _ = go(tmp_path)
    rows = run.table("collectives").to_pylist()
    gathers = [
        (r["payload_bytes"], r["padding_bytes"]) for r in rows if r["op"] == "all_gather" and r["step"] == 1
    ]
    # The groups have 9 and 40 elements, in buffers whose size is a multiple of four.
    assert gathers == [(4 * 12, 4 * 3), (4 * 40, None)] * 2
    assert {r["padding_bytes"] for r in rows if r["op"] != "all_gather"} == {None}


@pytest.mark.long
def test_results_and_exceptions_are_those_without_a_recorder(tmp_path):
    _, recorded = go(tmp_path / "a")
    _, alone = go(tmp_path / "b", "never")
    assert recorded == alone
    assert recorded[0]["raised"] == "a loss of one element" and recorded[0]["kept"] == "here"
    assert recorded[0]["document"] == "Docstring of backward."


@pytest.mark.sampled
@pytest.mark.parametrize("version", ["0.13.5", "0.20.0", "1.0"])
def test_another_version_is_recorded_without_purposes_and_told_of_once(tmp_path, version, capfd):
    run, _ = go(tmp_path, version=version)
    assert len(said(run)) == len(EXPECTED)
    # The barrier has the purpose that all barriers of torch have.
    assert {row[4] for row in said(run) if row[3] != "barrier"} == {None}
    assert len(run.table("parameters")) == 0
    line = f"commprof does not support DeepSpeed {version} (only 0.14 to 0.19)"
    assert capfd.readouterr().err.count(line) == 1
    assert [note for note in run.health.notes if line in note and "ranks 0, 1: " in note]


@pytest.mark.long
def test_a_method_that_is_gone_costs_its_purpose_only_and_is_named(tmp_path):
    run, _ = go(tmp_path, without="has_overflow")
    gone = [note for note in run.health.notes if "has_overflow" in note and "1 of the methods" in note]
    assert len(gone) == 1 and gone[0].startswith("ranks 0, 1: ")
    assert [
        (*row[:4], None if row[3:5] == ("all_reduce", "overflow_check") else row[4], *row[5:])
        for row in EXPECTED
    ] == said(run)


@pytest.mark.long
def test_a_version_that_never_had_a_method_does_not_miss_it(tmp_path):
    run, _ = go(tmp_path, version="0.14.0", without="_muon_all_gather_partitions")
    assert run.health.notes == ()
    assert said(run) == EXPECTED


def validate_between(rank, world, package, run):
    """Run a step, a validation, and another step.

    Before the second step only the model is set to training mode, as in Lightning.
    """
    import commprof

    sys.path.insert(0, package)
    commprof.attach(run, quiet=True)
    import deepspeed

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, _, _, _ = deepspeed.initialize(model, optimizer, {"train_micro_batch_size_per_gpu": 3})
    for _ in range(2):
        for _ in range(2):
            engine.backward(engine(torch.ones(3, 4)).mean())
            engine.step()
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(3, 4))
        engine.module.train()
    commprof.detach()


def record_three_times(rank, world, package, runs):
    """Record two steps of an engine, two more of the same engine, and a new engine beside it.

    Each part has its own recording.
    """
    import commprof

    sys.path.insert(0, package)
    import deepspeed

    engines = []  # keeps all engines alive
    for number, run in enumerate(runs):
        commprof.attach(run, quiet=True)
        if number != 1:
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
            groups = [{"params": list(model[each].parameters())} for each in (1, 0)]
            config = {"train_micro_batch_size_per_gpu": 3}
            engines.append(deepspeed.initialize(model, torch.optim.SGD(groups, lr=0.1), config)[0])
        for _ in range(4):
            engines[-1].backward(engines[-1](torch.ones(3, 4)).mean())
            engines[-1].step()
        commprof.detach()


def test_a_second_recording_of_a_process_has_steps_of_its_own(tmp_path):
    """A second recording in the same process has its own steps.

    Its collectives used to belong to the last step of the first recording, and verify could not check them.
    """
    from commprof.trace.reader import open_run

    runs = [str(tmp_path / name) for name in ("first", "goes_on", "another")]
    run_ranks(2, record_three_times, str(write_fake(tmp_path / "site", "0.19.8", "")), runs)
    first, goes_on, another = (said(open_run(run)) for run in runs)
    assert first == another == EXPECTED[:-1]
    assert [row[:3] for row in goes_on] == [(row[0] + 2, *row[1:3]) for row in EXPECTED[5:-1]]


def train_several(rank, world, package, run, order):
    """Train engines A and B: each letter of ``order`` is a step of an engine.

    Engines are created at their first step, or both at the start.
    """
    import commprof

    sys.path.insert(0, package)
    commprof.attach(run, quiet=True)
    import deepspeed

    engines = {}
    for name in order:
        if name not in engines:
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engines[name] = deepspeed.initialize(model, optimizer, {"train_micro_batch_size_per_gpu": 3})[0]
        for _ in range(2 * name.isupper()):
            engines[name].backward(engines[name](torch.ones(3, 4)).mean())
            engines[name].step()
        engines.update({each.upper(): engines[each] for each in list(engines) if each.islower()})
    commprof.detach()


@pytest.mark.parametrize(
    ("order", "steps"),
    [("AABBB", {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}), ("abABAB", {0: 2, 1: 2})],
    ids=["one training after another", "two that take turns"],
)
def test_several_engines(tmp_path, order, steps):
    """A second engine has its own steps.

    Its steps used to belong to the last step of the first engine until that engine was garbage.
    """
    from commprof.trace.reader import open_run

    package = str(write_fake(tmp_path / "site", "0.19.8", ""))
    run_ranks(2, train_several, package, str(tmp_path / "run"), order)
    rows = said(open_run(tmp_path / "run"))
    assert Counter(row[0] for row in rows if row[4] == "gradient_norm") == steps


@pytest.mark.long
def test_a_step_is_told_where_only_the_model_is_set_to_train(tmp_path):
    from commprof.trace.reader import open_run

    run_ranks(2, validate_between, str(write_fake(tmp_path / "site", "0.19.8", "")), str(tmp_path / "run"))
    run = open_run(tmp_path / "run")
    assert {row[0] for row in said(run) if row[2] == "backward"} == {0, 1}
    steps = [row for row in run.table("steps").to_pylist() if row["rank"] == 0]
    assert [(each["step"], each["micro_steps"]) for each in steps] == [(0, 2), (1, 2)]


# The real DeepSpeed.

SCRIPT = """
import json, os, sys
import torch, deepspeed
torch.manual_seed(0)
torch.set_num_threads(1)
stage, out, extra = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
deepspeed.init_distributed("gloo")
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4))
config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
          "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
          "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **extra}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
random = torch.Generator().manual_seed(int(os.environ["RANK"]))
losses = []
for _ in range(6):
    value, target = torch.randn(2, 16, generator=random), torch.randn(2, 4, generator=random)
    loss = torch.nn.functional.mse_loss(engine(value), target)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if os.environ["RANK"] == "0":
    json.dump(losses, open(out, "w"))
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "extra", "gradient_ops"),
    [
        (0, {}, {"all_reduce"}),
        (1, {}, {"all_reduce"}),
        (2, {"use_multi_rank_bucket_allreduce": False, "overlap_comm": True}, {"reduce"}),
        (2, {"reduce_scatter": False}, {"all_reduce"}),
        (3, {"stage3_param_persistence_threshold": 0}, {"reduce_scatter"}),
    ],
)
def test_the_real_deepspeed(tmp_path, stage, extra, gradient_ops):
    python = os.environ.get(REAL)
    if not python:
        pytest.skip(f"{REAL} names no interpreter that has the real DeepSpeed")
    from commprof.trace.reader import open_run

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def launch(name, *before):
        out = tmp_path / f"{name}.json"
        command = [*before, python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command += [str(script), str(stage), str(out), json.dumps(extra)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(out.read_text())

    recorded = launch("recorded", COMMPROF, "run", "--out", str(tmp_path / "run"), "--")
    assert recorded == launch("alone")
    run = open_run(tmp_path / "run")
    rows = run.table("collectives").to_pylist()
    assert run.health.notes == ()
    assert [row for row in rows if row["purpose"] is None] == []
    assert {row["op"] for row in rows if row["purpose"] == "gradient_reduce"} == gradient_ops
    assert Counter(row["purpose"] for row in rows)["gradient_norm"] == 2 * 3
    assert {row["phase"] for row in rows if row["purpose"] == "gradient_reduce"} == {"backward"}
    assert sum(row["numel"] for row in run.table("parameters").to_pylist()) == 1732
    assert run.manifest.engine.startswith("deepspeed 0.")
    assert run.manifest.effective_config["zero_optimization"]["stage"] == stage


def record_real(tmp_path, program, ranks, *arguments):
    """Return the run of ``program`` with the real DeepSpeed, or skip the test if DeepSpeed is not installed."""
    python = os.environ.get(REAL)
    if not python:
        pytest.skip(f"{REAL} names no interpreter that has the real DeepSpeed")
    from commprof.trace.reader import open_run

    script = tmp_path / "script.py"
    script.write_text(program)
    command = [COMMPROF, "run", "--out", str(tmp_path / "run"), "--", python, "-m", "torch.distributed.run"]
    command += ["--standalone", "--nproc_per_node", str(ranks), str(script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return open_run(tmp_path / "run")


def assert_verified(run, code):
    """Check that ``commprof verify`` exits with ``code`` and reports no unexplained bytes."""
    command = [COMMPROF, "verify", str(run.path)]
    verified = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert verified.returncode == code and "unexplained" not in verified.stdout, verified.stdout


ACCESS_SCRIPT = """
import sys, torch, deepspeed
torch.manual_seed(0)
torch.set_num_threads(1)
deepspeed.init_distributed("gloo")
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
          "zero_optimization": {"stage": int(sys.argv[1]), "stage3_param_persistence_threshold": 0}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(5):
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    if step == 2:
        deepspeed.utils.safe_get_full_grad(model[0].weight)
    engine.step()
    if step == 3:
        deepspeed.utils.safe_get_full_fp32_param(model[0].weight)
        with deepspeed.zero.GatheredParameters(list(model[2].parameters()), modifier_rank=0):
            model[2].weight.data.mul_(0.5)
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_program_reads_of_sharded_parameters_is_an_access(tmp_path, stage):
    run = record_real(tmp_path, ACCESS_SCRIPT, 2, str(stage))
    rows = [row for row in run.table("collectives").to_pylist() if row["rank"] == 0]
    accesses = [(row["op"], row["payload_bytes"]) for row in rows if row["purpose"] == "parameter_access"]
    # The gradient and the master weights have 32 x 16 elements in fp32. At stage 3 a weight of 4 x 32 and a
    # bias of 4 are gathered. Rank 0 then broadcasts them, because it has changed them.
    whole = [(op, size) for op in ("all_gather", "broadcast") for size in (512, 16)] if stage == 3 else []
    assert sorted(accesses) == sorted([("all_gather" if stage == 3 else "all_reduce", 2048)] * 2 + whole)
    assert_verified(run, 3)


CHECKPOINT_SCRIPT = """
import sys, torch, deepspeed
torch.manual_seed(0)
torch.set_num_threads(1)
deepspeed.init_distributed("gloo")
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
          "zero_optimization": {"stage": int(sys.argv[1]), "stage3_gather_16bit_weights_on_model_save": True}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.save_checkpoint("saved", tag="first")
engine.load_checkpoint("saved", tag="first")
for step in range(6):
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    engine.step()
    if step in (1, 3):
        engine.save_checkpoint("saved", tag=str(step))
        engine.save_16bit_model("saved", f"{step}.bin")
    if step == 3:
        engine.load_checkpoint("saved", tag="1")
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_checkpoint_gathers_is_for_the_checkpoint(tmp_path, stage):
    # At stage 3 DeepSpeed releases the persistent parameters for a checkpoint, and gathers them again after
    # the checkpoint.
    run = record_real(tmp_path, CHECKPOINT_SCRIPT, 2, str(stage))
    rows = run.table("collectives").to_pylist()
    beside = {row["purpose"] for row in rows if row["phase"] == "checkpoint"}
    assert beside == {"checkpoint"}
    assert_verified(run, 0)


RELEASE_SCRIPT = """
import sys, torch, deepspeed
torch.manual_seed(0)
torch.set_num_threads(1)
deepspeed.init_distributed("gloo")
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
          "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": int(sys.argv[2])}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(6):
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    engine.step()
    if step in (2, 3) and sys.argv[1] == "cache":
        engine.empty_partition_cache()
    if step in (2, 3) and sys.argv[1] == "state":
        engine._zero3_consolidated_16bit_state_dict()
    if step in (2, 3) and sys.argv[1] == "one":
        with deepspeed.zero.GatheredParameters([model[2].bias]):
            pass
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("what", ["cache", "state", "one"])
# Either only the biases stay gathered, or all parameters do.
@pytest.mark.parametrize("threshold", [100, 100_000])
def test_persistent_parameters_that_a_program_releases_are_gathered_again(tmp_path, what, threshold):
    run = record_real(tmp_path, RELEASE_SCRIPT, 2, what, str(threshold))
    rows = [row for row in run.table("collectives").to_pylist() if row["rank"] == 0]
    gathered = [
        sum(
            row["payload_bytes"]
            for row in rows
            if (row["step"], row["purpose"]) == (step, "parameter_gather")
        )
        for step in (3, 4, 5)
    ]
    biases, others = 4 * (32 + 4), 4 * (16 * 32 + 32 * 4) * (threshold > 100)
    again = {"cache": biases + others, "state": 0, "one": 4 * 4}[what]
    assert [size - gathered[2] for size in gathered] == [again, again, 0]
    assert_verified(run, 0)


PADDED_SCRIPT = """
import json, sys
import torch, deepspeed
torch.manual_seed(0)
torch.set_num_threads(1)
config = json.loads(sys.argv[1])
deepspeed.init_distributed("gloo")
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3), torch.nn.Linear(3, 1))
groups = [{"params": list(model[0].parameters())}, {"params": [*model[2].parameters(), *model[3].parameters()]}]
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}, **config}
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
dtype = next(model.parameters()).dtype
for _ in range(3):
    engine.backward(engine(torch.ones(2, 5, dtype=dtype)).float().square().mean())
    engine.step()
torch.distributed.destroy_process_group()
"""
# The groups have 42 and 28 elements, in parameters of 35, 7, 21, 3, 3 and 1. There are three ranks. At stages
# 1 and 2 the flat buffer of a group has a multiple of 2 x 3 elements: 42 and 30. At stage 3 a shard has a
# third of each parameter, rounded up: 12, 3, 7, 1, 1 and 1. Three shards make 36, 9, 21, 3, 3 and 3, which is
# 75 elements for 70.
SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}
BF16 = {"bf16": {"enabled": True}}
IN_FP32 = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "gathers", "reductions"),
    [
        ({"zero_optimization": {"stage": 0}}, [], [(280, None)]),
        ({"zero_optimization": {"stage": 1}}, [(168, None), (120, 8)], [(280, None)]),
        ({**BF16, "zero_optimization": {"stage": 2}}, [(84, None), (60, 4)], [(140, None)]),
        # BF16_Optimizer reduces the flat buffers themselves.
        (IN_FP32, [(84, None), (60, 4)], [(144, 4)]),
        ({"zero_optimization": SHARDED}, [(300, 20)], [(300, 20)]),
    ],
    ids=["stage 0", "stage 1", "stage 2", "bf16 optimizer", "stage 3"],
)
def test_the_real_deepspeeds_padding(tmp_path, config, gathers, reductions):
    rows = record_real(tmp_path, PADDED_SCRIPT, 3, json.dumps(config)).table("collectives").to_pylist()
    for rank in range(3):
        last = [row for row in rows if (row["rank"], row["step"]) == (rank, 2)]
        for purpose, expected in (("parameter_gather", gathers), ("gradient_reduce", reductions)):
            found = [
                (row["payload_bytes"], row["padding_bytes"]) for row in last if row["purpose"] == purpose
            ]
            assert found == expected
    others = {row["purpose"] for row in rows if row["padding_bytes"] is not None}
    assert others <= {"parameter_gather", "gradient_reduce"}


EXPERTS_SCRIPT = """
import json, os, sys
import torch, deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
torch.manual_seed(0)
torch.set_num_threads(1)
deepspeed.init_distributed("gloo")
rank, (layer, zero, chosen) = int(os.environ["RANK"]), json.loads(sys.argv[1])

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 1)
        torch.nn.init.eye_(self.first.weight)
        self.moe = MoE(8, torch.nn.Linear(8, 8), use_rts=False, top2_2nd_expert_sampling=False, **layer)
        with torch.no_grad():
            self.moe.deepspeed_moe.gate.wg.weight.copy_(100 * torch.eye(layer["num_experts"], 8))

    def forward(self, x):
        return self.last(self.moe(self.first(x))[0]).mean()

model = Model()
groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
config |= {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
for step in range(2):
    tokens = torch.tensor(chosen[rank % 2])
    engine.backward(engine(torch.nn.functional.one_hot(tokens, 8).float().unsqueeze(0)))
    engine.step()
torch.distributed.destroy_process_group()
"""
# The number of tokens that choose each of four experts, on even and odd ranks. Each rank has 16 tokens.
CHOSEN = ([10, 3, 2, 1], [4, 4, 4, 4])


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "ep_size", "drops", "stage", "capacity"),
    [(2, 2, True, 0, 4), (2, 2, False, 0, 10), (4, 2, True, 2, 4), (4, 4, False, 2, 10), (2, 1, True, 1, 4)],
)
def test_the_real_deepspeeds_experts(tmp_path, ranks, ep_size, drops, stage, capacity):
    from commprof.cli import execute

    layer = {"num_experts": 4, "ep_size": ep_size, "k": 1, "min_capacity": 2, "drop_tokens": drops}
    tokens = [[e for e, count in enumerate(counts) for _ in range(count)] for counts in CHOSEN]
    run = record_real(tmp_path, EXPERTS_SCRIPT, ranks, json.dumps([layer, {"stage": stage}, tokens]))
    assert run.health.notes == ()
    layers = {row["rank"]: row for row in run.table("expert_layers").to_pylist()}
    for rank in range(ranks):
        first = rank // ep_size * ep_size
        assert layers[rank]["layer"] == "moe" and layers[rank]["hidden"] == 8
        assert layers[rank]["expert_ranks"] == ",".join(map(str, range(first, first + ep_size)))
    loads = run.table("expert_loads").to_pylist()
    assert len(loads) == 2 * ranks * 4
    for row in loads:
        expected = CHOSEN[row["rank"] % 2][row["expert"]]
        assert (row["tokens"], row["capacity"], row["sent"]) == (expected, capacity, 16)
        assert row["dropped"] == max(0, expected - capacity) and row["phase"] == "forward"
    rows = run.table("collectives").to_pylist()
    exchanged = [row for row in rows if row["op"] == "all_to_all"]
    # 4 experts, their slots, and 8 numbers of 4 bytes, twice forward and twice backward.
    assert {(r["payload_bytes"], r["module"], r["purpose"]) for r in exchanged} == (
        {(4 * capacity * 8 * 4, "moe", "activation")} if ep_size > 1 else set()
    )
    assert len(exchanged) == (2 * 4 * ranks if ep_size > 1 else 0)
    agreed = [row for row in rows if row["dtype"] == "int64" and row["step"] == 0 and row["rank"] == 0]
    assert [(r["op"], r["purpose"], r["module"]) for r in agreed] == (
        [] if drops else [("all_reduce", "activation", "moe")]
    )
    names = {row["name"]: row["ep_size"] for row in run.table("parameters").to_pylist()}
    expert = "moe.deepspeed_moe.experts.deepspeed_experts.{}.weight"
    assert [name for name in names if "deepspeed_experts" in name and name.endswith("weight")] == [
        expert.format(number) for number in range(4)
    ]
    assert names[expert.format(3)] == ep_size and names["last.weight"] is None
    # Requested equals issued, and every byte is explained.
    assert execute(["verify", str(tmp_path / "run")]) == 0

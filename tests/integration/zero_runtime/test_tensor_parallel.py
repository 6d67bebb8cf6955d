"""Models whose ranks share tensors train like one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import zero_runtime
from commprof.ledger.verification import verify
from support import parallel_training as training
from support import recorded
from support.recording import record
from support.standing_ranks import run_standing
from zero_runtime.checkpoint.consolidation import consolidated_state_dict
from zero_runtime.errors import CheckpointError, ConfigError, UsageError
from zero_runtime.tensor_parallel import parallelize

CLIPPED = 0.3
HALVED = {"tp_size": 2, "gradient_clipping": CLIPPED}


@pytest.fixture(scope="module")
def alone():
    """Return the results of one process for all samples, by stage and precision."""
    found = {}

    def of(stage: int, **more):
        key = (stage, tuple(more))
        if key not in found:
            given = training.config(stage, gradient_clipping=CLIPPED, **more) | {
                "train_micro_batch_size_per_gpu": 4
            }
            found[key] = run_standing(1, training.train, given)[0]
        return found[key]

    return of


def _plan(sequence: bool = False) -> dict:
    return {"tensor_parallel": {"plan": training.PLAN, "sequence_parallel": sequence}}


# Each stage once, and both ways at stage 1.
LONG = ((0, True), (2, False), (3, False))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stage", "sequence"),
    [
        pytest.param(stage, each, marks=[pytest.mark.long] * ((stage, each) in LONG))
        for stage in range(4)
        for each in (False, True)
    ],
)
def test_two_slices_and_two_replicas_train_as_one_process_does(alone, stage, sequence):
    given = training.config(stage, **HALVED, **_plan(sequence))
    expected, norm = alone(stage)
    for losses, own in run_standing(4, training.train, given, 3, 4, None, True):
        assert losses == pytest.approx(expected, rel=2e-5)
        assert stage == 0 or own == pytest.approx(norm, rel=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_train_as_one_process_does(alone, precision):
    more = {precision: {"enabled": True}}
    expected, norm = alone(1, **more)
    given = training.config(1, **HALVED, **_plan(), **more)
    for losses, own in run_standing(4, training.train, given):
        assert losses == pytest.approx(expected, rel=5e-3)
        assert own == pytest.approx(norm, rel=0.05)


def test_names_say_how_layers_are_cut(alone):
    """Names determine how layers are partitioned.

    DeepSpeed's key partitions linear layers with known names. All other parameters are whole on every rank.
    """
    expected, _ = alone(1)
    given = training.config(
        1, gradient_clipping=CLIPPED, train_batch_size=4, tensor_parallel={"autotp_size": 2}
    )
    given["train_micro_batch_size_per_gpu"] = 4
    for losses, _ in run_standing(2, training.train, given):
        assert losses == pytest.approx(expected, rel=2e-5)


OTHER_SETTINGS = {
    "accumulated in fp32": (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 1e-3),
    "offloaded": (1, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, 2e-5),
    "chunks": (2, {"zero_optimization": {"stage": 2, "gradient_reduction": "reduce_scatter"}}, 2e-5),
    "overlapped": (2, {"zero_optimization": {"stage": 2, "overlap_comm": True}}, 2e-5),
    "stage 0 in fp16": (0, {"fp16": {"enabled": True}}, 1e-3),
}


@pytest.mark.long
@pytest.mark.parametrize("name", list(OTHER_SETTINGS))
def test_other_settings_train_as_one_process_does(name):
    stage, more, tolerance = OTHER_SETTINGS[name]
    base = {**training.config(stage, gradient_clipping=CLIPPED), **more}
    [(expected, norm)] = run_standing(1, training.train, {**base, "train_micro_batch_size_per_gpu": 4})
    for losses, own in run_standing(4, training.train, {**base, "tp_size": 2, **_plan(True)}):
        assert losses == pytest.approx(expected, rel=tolerance) and own == pytest.approx(norm, rel=5e-3)


class Net(nn.Module):
    """The model of the recorded case of AutoTP, which DeepSpeed cannot partition."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.up_proj, self.down_proj = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, y):
        hidden = self.tok(x)
        hidden = hidden + self.down_proj(F.gelu(self.up_proj(hidden)))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def _net(rank: int, world: int, given: dict):
    torch.manual_seed(0)
    model = Net()
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=given)
    assert engine.train_batch_size() == 4
    losses = []
    for step in range(3):
        loss = engine(*training.batch(step, 4))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses, tuple(model.up_proj.weight.shape)


@pytest.mark.skipif(not recorded.ROOT.is_dir(), reason=recorded.MISSING)
def test_the_recorded_configuration_of_autotp_trains():
    """The recorded configuration of AutoTP trains.

    DeepSpeed counts every sample twice in train_batch_size, and then does not support the model.
    """
    given = json.loads((recorded.ROOT / "C_autotp_s0_w2" / "config.json").read_text())["config"]
    alone = {**given, "train_batch_size": 4, "tensor_parallel": {}}
    [(expected, _)] = run_standing(1, _net, alone)
    for losses, shape in run_standing(2, _net, given):
        assert losses == pytest.approx(expected, rel=1e-5) and shape == (32, 16)


SPECIFICATIONS = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.(projection|contract)\.weight$"], "partition_type": "row"},
        {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1]},
        {"patterns": [r".*\.expand\.weight$"], "partition_type": "column"},
        {"patterns": ["head.weight"], "partition_type": "column", "gather_output": True},
    ],
}


def test_specifications_of_deepspeed_and_gathered_columns(alone):
    expected, _ = alone(1)
    block = {"autotp_size": 2, "partition_config": SPECIFICATIONS}
    given = training.config(1, gradient_clipping=CLIPPED, tensor_parallel=block)
    for losses, _ in run_standing(4, training.train, given):
        assert losses == pytest.approx(expected, rel=2e-5)


class Megatron:
    """Groups that a script creates itself."""

    def __init__(self) -> None:
        rank, pairs = dist.get_rank(), [[0, 1], [2, 3]]
        self.model = [dist.new_group(ranks) for ranks in pairs][rank // 2]
        self.data = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]

    def get_data_parallel_group(self):
        return self.data

    def get_model_parallel_group(self):
        return self.model

    def get_data_parallel_world_size(self):
        return 2

    get_model_parallel_world_size = get_data_parallel_world_size

    def get_data_parallel_rank(self):
        return dist.get_rank() // 2

    def get_model_parallel_rank(self):
        return dist.get_rank() % 2


def _with_groups(rank: int, world: int, kind: str):
    mpu = (
        Megatron()
        if kind == "object"
        else zero_runtime.ProcessGrid(zero_runtime.ProcessTopology.of(data=2, model=2))
    )
    # The groups are specified by the configuration or created by the script.
    given = training.config(1, gradient_clipping=CLIPPED) | (HALVED | _plan() if kind == "grid" else {})
    made = training.model()
    if kind == "object":
        parallelize(made, mpu.model, training.PLAN)
    return training.train(rank, world, given, mpu=mpu, made=made)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["grid", "object"])
def test_groups_of_the_script(alone, kind):
    expected, norm = alone(1)
    for losses, own in run_standing(4, _with_groups, kind):
        assert losses == pytest.approx(expected, rel=2e-5) and own == pytest.approx(norm, rel=1e-4)


def _saved_and_loaded(rank: int, world: int, folder: str):
    given = training.config(1, **HALVED, **_plan())
    engine = training.engine(given)
    for step in range(2):
        training.step_of(engine, step)
    engine.save_checkpoint(folder, tag="two")
    engine.save_16bit_model(folder, "whole.safetensors")
    wanted = [training.step_of(engine, step) for step in range(2, 4)]
    again = training.engine(given, seed=1)
    where, _ = again.load_checkpoint(folder)
    found = [training.step_of(again, step) for step in range(2, 4)]
    assert where == str(Path(folder) / "two") and again.global_steps == 4
    return wanted, found


def _refused(rank: int, world: int, folder: str, made):
    engine = training.engine_of(training.config(1), made)
    with pytest.raises(CheckpointError) as refusal:
        engine.load_checkpoint(folder)
    return str(refusal.value)


@pytest.mark.long
def test_checkpoints_keep_each_part(tmp_path, alone):
    for wanted, found in run_standing(4, _saved_and_loaded, str(tmp_path)):
        assert found == wanted
    whole = load_file(tmp_path / "whole.safetensors")
    joined = consolidated_state_dict(tmp_path)
    assert joined.keys() == whole.keys() and all(torch.equal(joined[name], whole[name]) for name in whole)
    model = training.model()
    model.load_state_dict(whole)
    expected, _ = alone(1)
    x, y = training.batch(2, 4)
    assert float(model(x, y).detach()) == pytest.approx(expected[2], rel=1e-5)
    model.head = nn.Linear(training.WIDTH, 2 * training.WORDS)
    (said,) = run_standing(1, _refused, str(tmp_path), model)
    assert "'head.weight' has shape (64, 16) in the model and (32, 16)" in said


def _config(slices: int, stage: int, world: int, sequence: bool = False) -> dict:
    given = training.config(stage, gradient_clipping=CLIPPED)
    given["train_micro_batch_size_per_gpu"] = 4 * slices // world
    return given | ({"tp_size": slices, **_plan(sequence)} if slices > 1 else {})


def _saved(rank: int, world: int, slices: int, stage: int, folder: str):
    engine = training.engine(_config(slices, stage, world))
    for step in range(2):
        training.step_of(engine, step)
    engine.save_checkpoint(folder, client_state={"seen": 8})
    return [training.step_of(engine, step) for step in range(2, 4)]


def _loaded(rank: int, world: int, slices: int, stage: int, folder: str):
    engine = training.engine(_config(slices, stage, world, slices > 1), seed=1)
    _, client_state = engine.load_checkpoint(folder)
    assert client_state == {"seen": 8} and engine.global_steps == 2
    return [training.step_of(engine, step) for step in range(2, 4)]


# tp_size and stage of the engine that saves, with its ranks, and of the engines that load.
CROSSINGS = {
    "1 -> 2": ((1, 1, 1), (2, 1, 2)),
    "2 -> 1": ((2, 1, 2), (1, 2, 2)),
    "2 -> 4": ((2, 2, 2), (4, 1, 4)),
    "2 -> 2 x 2 at stage 3": ((1, 0, 2), (2, 3, 4)),
    "4 -> 2 at stage 3": ((4, 3, 4), (2, 3, 4)),
}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * ("stage 3" in name)) for name in CROSSINGS]
)
def test_a_checkpoint_goes_on_with_another_tp_size(tmp_path, name):
    (slices, stage, ranks), (wanted_slices, wanted_stage, wanted_ranks) = CROSSINGS[name]
    wanted = run_standing(ranks, _saved, slices, stage, str(tmp_path))[0]
    for found in run_standing(wanted_ranks, _loaded, wanted_slices, wanted_stage, str(tmp_path)):
        assert found == pytest.approx(wanted, rel=2e-5)


def _saved_by_replicas(rank: int, world: int, folder: str):
    engine = training.engine(_config(1, 1, world))
    torch.manual_seed(100 + rank)
    engine.save_checkpoint(folder)


def _numbers_after_loading(rank: int, world: int, folder: str):
    engine = training.engine(_config(2, 1, world))
    torch.manual_seed(5)
    engine.load_checkpoint(folder)
    return torch.rand(3).tolist()


def test_ranks_that_share_a_model_draw_equal_numbers_after_loading(tmp_path):
    """Ranks that share a model draw equal random numbers after loading.

    Replicas, each with random generators of its own, have saved the checkpoint.
    """
    run_standing(2, _saved_by_replicas, str(tmp_path))
    first, second = run_standing(2, _numbers_after_loading, str(tmp_path))
    assert first == second


def _sharded_and_saved(rank: int, world: int, folder: str):
    given = training.config(3, **HALVED, **_plan())
    engine = training.engine(given)
    for step in range(2):
        training.step_of(engine, step)
    engine.save_checkpoint(folder)
    wanted = [training.step_of(engine, step) for step in range(2, 4)]
    again = training.engine(given, seed=1)
    again.load_checkpoint(folder)
    assert [training.step_of(again, step) for step in range(2, 4)] == wanted
    with zero_runtime.zero.Init():
        made = training.model()
    with pytest.raises(ConfigError, match=r"make the model outside of zero\.Init"):
        training.engine_of(given, made)


@pytest.mark.long
def test_parts_that_are_sharded_are_kept_too(tmp_path):
    run_standing(4, _sharded_and_saved, str(tmp_path))


def _different(rank: int, world: int):
    engine = training.engine(training.config(1, **HALVED, **_plan()))
    with pytest.raises(UsageError, match="share each tensor of the model, and were given different inputs"):
        engine(*training.batch(rank, 2))


def test_ranks_that_share_a_model_must_be_given_the_same():
    run_standing(2, _different)


def _recorded(rank: int, world: int, sequence: bool):
    engine = training.engine(training.config(1, **HALVED, **_plan(sequence)))
    for step in range(2):
        training.step_of(engine, step)


@pytest.mark.long
@pytest.mark.parametrize("sequence", [False, True], ids=["columns", "sequence"])
def test_traces_name_each_group_by_its_axis_and_each_message_by_its_module(tmp_path, sequence):
    run, _ = record(tmp_path / "run", 4, _recorded, sequence)
    rows = [row for row in run.table("collectives").to_pylist() if row["step"] == 1 and row["rank"] == 0]
    found = {(row["group_desc"], row["group_ranks"], row["purpose"], row["op"]) for row in rows}
    assert {("data", "0,2", "gradient_reduce"), ("data", "0,2", "parameter_gather")} <= {
        each[:3] for each in found
    }
    assert ("model", "0-1", "gradient_norm", "all_reduce") in found
    modules = {row["module"] for row in rows if row["purpose"] == "activation"}
    assert {"token", "blocks.0.qkv", "blocks.1.contract", "head", "loss"} <= modules
    assert {row["group_desc"] for row in rows if row["purpose"] == "activation"} == {"model"}
    forward = [row for row in rows if row["module"] == "blocks.0.qkv" and row["phase"] == "forward"]
    backward = [row for row in rows if row["module"] == "blocks.0.qkv" and row["phase"] == "backward"]
    if sequence:
        assert [row["op"] for row in forward] == ["all_gather"]
        assert [row["op"] for row in backward] == ["reduce_scatter"]
    else:
        assert forward == [] and [row["op"] for row in backward] == ["all_reduce"]
    # Two samples of eight tokens with width sixteen.
    assert backward[0]["payload_bytes"] == 2 * 8 * 16 * 4
    verdict = verify(run)
    assert (verdict.exit_code, verdict.unexplained) == (0, ()), verdict
    assert verdict.issued_bytes == verdict.explained_bytes + verdict.labelled_bytes > 0


REFUSALS = {
    "does not divide the 2 ranks": ({"tp_size": 3}, {}),
    "data_parallel_size is 2": ({"tp_size": 2, "data_parallel_size": 2}, {}),
    "tp_size 2 and tensor_parallel.autotp_size 4 differ": (
        {"tp_size": 2, "tensor_parallel": {"autotp_size": 4}},
        {},
    ),
    "heads": ({"tp_size": 2} | _plan(), {"heads": 1}),
    "token has 31 vocabulary entries, which tp_size 2 does not divide": (
        {"tp_size": 2} | _plan(),
        {"words": 31},
    ),
    "names 'blocks.*.kqv'": ({"tp_size": 2, "tensor_parallel": {"plan": {"blocks.*.kqv": "row"}}}, {}),
    "is a Embedding": ({"tp_size": 2, "tensor_parallel": {"plan": {"token": "row"}}}, {}),
    "expected one of column": ({"tp_size": 2, "tensor_parallel": {"plan": {"token": "rows"}}}, {}),
    "works on shards of sequences": (
        {"tp_size": 2, "tensor_parallel": {"plan": {"head": "column"}, "sequence_parallel": True}},
        {},
    ),
    "Muon, whose step depends on whole matrices": (
        {"tp_size": 2, "optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
        {},
    ),
}


def _refusals(rank: int, world: int):
    return {
        message: training.refusal(rank, world, training.config(1) | more, **arguments)
        for message, (more, arguments) in REFUSALS.items()
    }


def test_what_does_not_divide_is_refused_before_anything_is_cut():
    for found in run_standing(2, _refusals):
        for message, text in found.items():
            assert message in text, (message, text)

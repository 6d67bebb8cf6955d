"""Test the memory of each rank, the bytes that offload moves, and the command that shows both.

The expected values are computed by hand.
"""

from __future__ import annotations

import json

import pytest

from commprof.cli.application import invoke
from commprof.errors import UsageError
from commprof.requested.memory.sized_models import likely_layers, transformer
from commprof.requested.memory.states import Movement, holdings, movements
from commprof.requested.parameters import Parameter
from zero_runtime.config import RuntimeConfig

N = 64_000_000
MODEL = [Parameter(f"layers.{number}.weight", N // 8) for number in range(8)]
ADAM = {"type": "AdamW", "params": {}}


def config(stage, precision="fp16", optimizer=ADAM, **zero):
    found = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, **zero},
    }
    return found if precision == "fp32" else {**found, precision: {"enabled": True}}


def table(*arguments, **keywords):
    return {each.what: each[1:4] for each in holdings(config(*arguments, **keywords), MODEL, 4)}


def test_what_every_stage_shares_out():
    whole, quarter = N, N // 4
    assert table(0) == {
        "parameters": (2 * whole, 0, 0),
        "gradients": (2 * whole, 0, 0),
        "gradient buckets": (2 * whole, 0, 0),
        "masters": (4 * whole, 0, 0),
        "optimizer states": (8 * whole, 0, 0),
    }
    assert table(1)["masters"] == (4 * quarter, 0, 0)
    assert table(1)["gradients"] == (2 * whole, 0, 0)
    assert table(2)["gradients"] == (2 * quarter, 0, 0)
    assert table(2)["parameters"] == (2 * whole, 0, 0)
    assert table(3)["parameters"] == (2 * quarter, 0, 0)
    assert table(3)["gathered parameters"] == (2 * whole, 0, 0)
    assert table(2)["gradient buckets"] == (2 * 1000, 0, 0)
    assert table(3)["gradient buckets"] == (2 * 2 * 1000, 0, 0)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_wait_for_the_boundary_are_whole(stage):
    """The complete gradients are kept only if a step has several micro-batches.

    The shards of the reduced gradients are kept in addition.
    """
    one = {**config(stage, gradient_accumulation_reduce="boundary")}
    held = {each.what: each.device for each in holdings(one, MODEL, 4)}
    assert (held["gradients"], "reduced gradients" in held) == (2 * N // 4, False)
    held = {each.what: each.device for each in holdings({**one, "gradient_accumulation_steps": 2}, MODEL, 4)}
    assert (held["gradients"], held["reduced gradients"]) == (2 * N, 2 * N // 4)
    several = {"gradient_accumulation_steps": 2}
    for limit, gradients in ((2 * N, 2 * N), (2 * N - 1, 2 * N // 4)):
        zero = {"gradient_accumulation_reduce": "auto", "gradient_accumulation_limit": limit}
        held = {each.what: each.device for each in holdings(config(stage, **zero) | several, MODEL, 4)}
        assert held["gradients"] == gradients


def test_plan_says_what_decides_about_auto(tmp_path, capsys):
    path = tmp_path / "ds.json"
    zero = {"stage": 2, "gradient_accumulation_reduce": "auto"}
    for limit, sentence in (
        (
            {},
            "decided at the start of the run by the free memory (whole gradients need 4,000,000 bytes)",
        ),
        (
            {"gradient_accumulation_limit": 5_000_000},
            "boundary, since whole gradients need 4,000,000 bytes, within",
        ),
        ({"gradient_accumulation_limit": 5}, "each, since whole gradients need 4,000,000 bytes, more than"),
    ):
        path.write_text(
            json.dumps(
                {
                    "train_micro_batch_size_per_gpu": 1,
                    "gradient_accumulation_steps": 2,
                    "zero_optimization": {**zero, **limit},
                }
            )
        )
        assert invoke(["plan", str(path), "--model", "params:1e6", "--world", "4"]) == 0
        assert sentence in " ".join(capsys.readouterr().out.split())


def test_what_stays_gathered_is_limited():
    zero = {"stage3_max_live_parameters": 1000, "stage3_max_reuse_distance": 2000}
    assert table(3, **zero)["gathered parameters"] == (2 * (2000 + N // 8), 0, 0)


@pytest.mark.parametrize(
    ("optimizer", "numbers"),
    [
        (ADAM, 2),
        ({"type": "SGD", "params": {"lr": 0.1}}, 0),
        ({"type": "SGD", "params": {"momentum": 0.9}}, 1),
        ({"type": "Adagrad"}, 1),
        ({"type": "Lion"}, 1),
        (None, 2),
    ],
)
def test_states_of_optimizers(optimizer, numbers):
    assert table(2, optimizer=optimizer).get("optimizer states", (0,))[0] == 4 * numbers * N // 4


def test_corrected_momentum_is_that_of_each_rank():
    sgd = {"type": "SGD", "params": {"momentum": 0.9}}
    keys = {"gradient_compression": {"momentum_correction": True}}
    found = {each.what: each[1] for each in holdings(config(1, "fp32", sgd) | keys, MODEL, 4)}
    assert found["momentum before compression"] == found["left-over gradients"] == 4 * N
    assert not found.get("optimizer states")
    assert "momentum before compression" not in table(1, "fp32", sgd)


def test_a_wide_parameter_is_its_own_master():
    assert "masters" not in table(2, "fp32")
    assert table(2, "fp32", offload_optimizer={"device": "cpu"})["masters"] == (0, N, 0)
    assert table(3, "fp32", offload_param={"device": "cpu"})["masters"] == (N, 0, 0)
    # State that is in files is read for its update.
    assert "masters" not in table(3, "fp32", offload_param={"device": "nvme", "max_in_cpu": 0})
    given = config(3, "fp32", offload_param={"device": "nvme", "max_in_cpu": 0})
    assert movements(given, MODEL, 4, 4 * N)[0] == Movement("parameters", "disk", "host", 4 * N // 4 * 2)


def test_offload():
    slices = {
        "device": "nvme",
        "nvme_path": "x",
        "max_in_cpu": N // 8,
        "buffer_size": 1000,
        "buffer_count": 2,
    }
    found = table(
        3, offload_optimizer={"device": "nvme", "nvme_path": "x", "ratio": 0.5}, offload_param=slices
    )
    assert found["parameters"] == (0, 2 * N // 8, 2 * N // 8)
    assert found["masters"] == (2 * N // 4, 0, 2 * N // 4)
    assert found["optimizer states"] == (4 * N // 4, 0, 4 * N // 4)
    assert found["buffers of files"][1] == 2 * 2000 + 4 * 2**18 * (4 + 8 + 4)
    other = table(3, offload_optimizer={"device": "cpu"}, offload_params={"device": "cpu"})
    assert other["parameters"] == (0, 2 * N // 4, 0)
    assert other["optimizer states"] == (0, 8 * N // 4, 0)
    assert table(2, offload_param={"device": "cpu"}) == table(2)


def test_what_moves_in_a_step():
    slices = {"device": "nvme", "nvme_path": "x", "max_in_cpu": 0}
    given = config(3, offload_optimizer={"device": "nvme", "nvme_path": "x"}, offload_param=slices)
    assert movements(given, MODEL, 4, 2 * 2 * N) == [
        Movement("parameters", "disk", "host", N),  # This is twice a quarter of 2 bytes per parameter.
        Movement("parameters", "host", "disk", 2 * N // 4),
        Movement("parameters", "host", "device", N),
        Movement("masters", "disk", "host", 4 * N // 4),
        Movement("masters", "host", "disk", 4 * N // 4),
        Movement("optimizer states", "disk", "host", 8 * N // 4),
        Movement("optimizer states", "host", "disk", 8 * N // 4),
        Movement("gradients", "device", "host", 2 * N // 4),
    ]
    assert movements(config(3), MODEL, 4, 2 * 2 * N) == []


def test_layers_of_known_models():
    assert likely_layers(175_000_000_000) == 96
    model = transformer(1001, 3)
    assert sum(each.numel for each in model) == 1001
    assert len(model) == 12


LARGE = {
    "train_batch_size": 4096,
    "gradient_accumulation_steps": 16,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    "fp16": {"enabled": True, "loss_scale": 0},
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
}


@pytest.mark.long
def test_a_large_model(tmp_path, capsys):
    assert RuntimeConfig.from_mapping(LARGE, 256).train_micro_batch_size_per_gpu == 1
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(LARGE))
    assert invoke(["requested", str(path), "--params", "175e9", "--world", "256", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    held = {each["what"]: each for each in found["memory_per_rank"]}
    share = 175_000_000_000 / 256
    assert held["parameters"]["device"] == pytest.approx(2 * share, rel=1e-6)
    assert held["masters"]["host"] == pytest.approx(4 * share, rel=1e-6)
    assert held["optimizer states"]["host"] == pytest.approx(8 * share, rel=1e-6)
    reduced = [each for each in found["messages_per_step"] if each["purpose"] == "gradient_reduce"]
    assert sum(each["payload_bytes"] for each in reduced) == pytest.approx(16 * 2 * 175e9, rel=1e-6)
    assert invoke(["requested", str(path), "--params", "175B", "--world", "256"]) == 0
    shown = capsys.readouterr().out
    assert "of a host with 8 ranks" in shown and "96 layers" in shown
    assert "of a rank               7.40 GiB  7.64 GiB   0 B" in shown


def test_what_cannot_be_said_in_bytes_is_said(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config(3, mics_shard_size=2)))
    assert invoke(["requested", str(path), "--params", "1e9"]) == 0
    assert (
        "bytes of messages cannot be predicted: zero_optimization.mics_shard_size" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("{", ["--params", "1e9"], "is not JSON: line 1"),
        ("[]", ["--params", "1e9"], "holds a JSON array"),
        ("{}", ["--params", "many"], "--params is 'many'"),
        ("{}", ["--params", "20"], "expected at least"),
        ('{"zero_optimization": {"stage": 4}}', ["--params", "1e9"], "stage is 4"),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}',
            ["--params", "1e9"],
            "offload_param.device is 'disk'",
        ),
    ],
)
def test_refused(tmp_path, text, arguments, message):
    path = tmp_path / "ds.json"
    path.write_text(text)
    if message == "expected at least":
        arguments = [*arguments, "--layers", "2"]
    with pytest.raises(UsageError, match=message):
        invoke(["requested", str(path), *arguments])


AXES = {"tp_size": 2, "pipeline_parallel": {"pp_size": 2, "micro_batches": 3}}


def test_ranks_along_axes_send_what_each_axis_adds(tmp_path, capsys):
    """The model has four layers of width 64.

    There are two layers on each of two stages, halved by two tensor-parallel ranks, on two replicas.
    """
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, **AXES})
    )
    numel, activation = 4 * 12 * 64 * 64, 2 * 16 * 64 * 4
    given = ["requested", str(path), "--params", str(numel), "--layers", "4", "--world", "8", "--json"]
    assert invoke([*given, "--sequence", "16"]) == 0
    rows = json.loads(capsys.readouterr().out)["messages_per_step"]
    of_stages = [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    reduced = [row for row in rows if row["purpose"] == "gradient_reduce"]
    assert [(row["groups"], row["payload_bytes"]) for row in reduced] == [
        (groups, numel // 4 * 4) for groups in of_stages
    ]
    (sent,) = [row for row in rows if row["purpose"] == "pipeline"]
    assert sent["groups"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert (sent["count"], sent["payload_bytes"]) == (2 * 3, 2 * 3 * activation)
    shared = [row for row in rows if row["purpose"] == "activation"]
    # Each stage has two layers. There is a sum after each of two row layers in the forward pass, and one
    # before each of two column layers in the backward pass.
    assert [(row["groups"], row["count"], row["payload_bytes"]) for row in shared] == [
        ([[4 * stage, 4 * stage + 1], [4 * stage + 2, 4 * stage + 3]], 2 * 4 * 3, 2 * 4 * 3 * activation)
        for stage in range(2)
    ]
    norms = {str(row["groups"]): row["payload_bytes"] for row in rows if row["purpose"] == "gradient_norm"}
    assert norms[str([[0, 1, 4, 5], [2, 3, 6, 7]])] == 4 and len(norms) == 3
    assert invoke(given) == 0
    assert "give --sequence" in json.loads(capsys.readouterr().out)["note"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tp_size": 3}, "does not divide 8"),
        (
            {"tp_size": 2, "tensor_parallel": {"autotp_size": 4}},
            "tp_size 2 and tensor_parallel.autotp_size 4 differ",
        ),
        ({"tp_size": 0}, "tp_size is 0"),
        ({"pipeline": {"stages": 8}}, "2 layers cannot be divided among 8 stages"),
        ({"tp_size": 2, "train_batch_size": 7}, "train_batch_size 7 is not a multiple"),
    ],
)
def test_axes_that_cannot_be_are_refused(tmp_path, keys, message):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, **keys}))
    with pytest.raises(UsageError, match=message):
        invoke(["requested", str(path), "--params", "1e6", "--layers", "2", "--world", "8"])

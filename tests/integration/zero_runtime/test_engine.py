"""The engine as a training script uses it: ways to configure it, optimizers, schedules, data, and misuse."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys

import pytest
import torch

import zero_runtime
from support.process_group_log import logged
from support.ranks import run_ranks
from support.recorded_models import make_batch, make_model
from support.standing_ranks import run_standing
from zero_runtime import ConfigError, UnsupportedError, UsageError
from zero_runtime.optimizer_step.interface import WrappedOptimizer
from zero_runtime.tensor_access import safe_get_local_grad

pytestmark = pytest.mark.ranks

PLAIN = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 20_000},
}


def changed(zero=None, **top):
    config = json.loads(json.dumps({**PLAIN, **top}))
    config["zero_optimization"].update(zero or {})
    return {name: value for name, value in config.items() if value is not None}


def train(engine, rank, steps=2, model="mlp"):
    losses = []
    for step in range(steps):
        loss = engine(*make_batch(model, step, 0, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def losses_of(rank, steps=2, **arguments):
    model = make_model("mlp")
    engine, *_ = zero_runtime.initialize(
        model=model, **{name: make(model) if callable(make) else make for name, make in arguments.items()}
    )
    return train(engine, rank, steps)


def ways_to_configure(rank, world, path):
    parser = zero_runtime.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    client = changed(optimizer=None)

    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3)

    return args.local_rank, [
        losses_of(rank, config=PLAIN),
        losses_of(rank, config=str(path)),
        losses_of(rank, config_params=path),
        losses_of(rank, args=args),
        losses_of(rank, config=PLAIN, model_parameters=lambda model: model.parameters()),
        losses_of(rank, config=PLAIN, model_parameters=lambda model: [{"params": list(model.parameters())}]),
        losses_of(rank, config=client, optimizer=lambda model: adam(model.parameters())),
        losses_of(
            rank, config=client, optimizer=lambda model: adam, model_parameters=lambda m: m.parameters()
        ),
        losses_of(rank, config=changed({"stage": 0})),
        losses_of(rank, config=changed({"stage": 1, "overlap_comm": True, "round_robin_gradients": True})),
        losses_of(rank, config=changed({"stage": 1, "parameter_alignment": True})),
        losses_of(rank, config=changed({"allgather_partitions": False})),
        losses_of(rank, config=changed({"allgather_bucket_size": 5_000})),
        losses_of(rank, config=changed(disable_allgather=True)),
    ]


def test_all_ways_to_configure_train_alike(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(PLAIN))
    for _, losses in run_standing(2, ways_to_configure, path):
        for each in losses[1:]:
            assert each == pytest.approx(losses[0], rel=1e-6)


def sizes_of_two_groups(rank, world):
    model = make_model("mlp")
    groups = [
        {"params": [each for each in model.parameters() if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.dim() == 1], "lr": 1e-2},
        {"params": []},
    ]
    with logged() as log:
        engine, optimizer, _, _ = zero_runtime.initialize(model=model, model_parameters=groups, config=PLAIN)
        log.calls.clear()
        train(engine, rank, steps=1)
    return [(call.method, call.numel_out) for call in log.calls], engine.get_lr(), len(optimizer.param_groups)


def test_each_param_group_has_its_own_norm_and_gathering():
    matrices = 131 * 37 + 257 * 131 + 67 * 257 + 11 * 67
    padded = -(-matrices // 6) * 6
    for calls, rates, groups in run_standing(3, sizes_of_two_groups):
        assert calls[-4:] == [
            ("allreduce", 1),
            ("allreduce", 1),
            ("all_gather_single", padded),
            ("all_gather_single", 468),
        ]
        assert rates == [1e-3, 1e-2] and groups == 2


def messages_of_a_backward_pass(rank, world, multi_rank):
    config = changed({"use_multi_rank_bucket_allreduce": multi_rank})
    with logged() as log:
        engine, *_ = zero_runtime.initialize(model=make_model("mlp"), config=config)
        log.calls.clear()
        engine.backward(engine(*make_batch("mlp", 0, 0, rank)))
    return [(call.numel_in, call.root) for call in log.calls]


def test_messages_of_a_model_whose_weight_lies_in_all_pieces():
    """The messages of a model with a weight in all shards equal DeepSpeed's.

    They were recorded from DeepSpeed 0.19.8 with the same model on 3 ranks.
    """
    to_owners = [(18_291, 2), (14_002, 0), (18_980, 1), (685, 2), (4_978, 0)]
    together = [(18_291, None), (32_982, None), (685, None), (4_978, None)]
    assert run_standing(3, messages_of_a_backward_pass, False) == [to_owners] * 3
    assert run_standing(3, messages_of_a_backward_pass, True) == [together] * 3


def follow_schedules(rank, world):
    found = {}
    warmup = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4},
    }
    linear = {"type": "WarmupLR", "params": {**warmup["params"], "warmup_type": "linear"}}
    torch_one = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    for name, config in (("log", warmup), ("linear", linear), ("torch", torch_one)):
        engine, _, _, schedule = zero_runtime.initialize(
            model=make_model("mlp"), config=changed(scheduler=config)
        )
        found[name] = [engine.get_lr()[0]]
        for step in range(5):
            train(engine, rank, steps=1)
            found[name].append(engine.get_lr()[0])
            assert schedule.get_last_lr()[0] == engine.get_lr()[0] and engine.global_steps == step + 1
    # This schedule uses the optimizer that initialize returns.
    _, optimizer, _, _ = zero_runtime.initialize(model=make_model("mlp"), config=PLAIN)
    found["over the wrapper"] = type(torch.optim.lr_scheduler.StepLR(optimizer, 1)).__name__
    return found


def test_schedules():
    (found,) = run_standing(1, follow_schedules)
    log4 = torch.log(torch.tensor([1.0, 2.0, 3.0, 4.0])) / torch.log(torch.tensor(4.0)) * 0.01
    assert found["log"] == pytest.approx([0.0, *log4.tolist(), 0.01])
    assert found["linear"] == pytest.approx([0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01])
    assert found["torch"] == pytest.approx([1e-3 * 0.5**step for step in range(6)])
    assert found["over the wrapper"] == "StepLR"


def share_out_data(rank, world):
    dataset = torch.utils.data.TensorDataset(torch.arange(22))
    _, _, loader, _ = zero_runtime.initialize(model=make_model("mlp"), config=PLAIN, training_data=dataset)
    return [batch[0].tolist() for batch in loader]


def test_training_data_is_shared_out_in_micro_batches():
    shares = run_standing(2, share_out_data)
    assert [[len(batch) for batch in share] for share in shares] == [[4, 4, 3]] * 2
    assert sorted(each for share in shares for batch in share for each in batch) == list(range(22))


def overflow(rank, world):
    outcomes = []
    for stage in (0, 1, 2):
        model = make_model("mlp")
        engine, *_ = zero_runtime.initialize(
            model=model, config=changed({"stage": stage}, bf16={"enabled": True})
        )
        before = [each.detach().clone() for each in model.parameters()]
        features, targets = make_batch("mlp", 0, 0, rank, torch.bfloat16)
        if rank == 1:
            features[0, 0] = float("inf")
        engine.backward(engine(features, targets))
        engine.step()
        unchanged = all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        counts = (engine.global_steps, engine.skipped_steps, engine.was_step_applied())
        engine.backward(engine(*make_batch("mlp", 1, 0, rank, torch.bfloat16)))
        engine.step()
        outcomes.append((unchanged, counts, engine.was_step_applied()))
    return outcomes


def test_a_step_is_skipped_on_all_ranks_when_a_gradient_of_one_overflows():
    for outcomes in run_standing(2, overflow):
        assert outcomes == [(True, (1, 1, False), True)] * 3


def answers(rank, world):
    engine, *_ = zero_runtime.initialize(
        model=make_model("mlp"), config=changed(gradient_accumulation_steps=3, communication_data_type="bf16")
    )
    boundaries = []
    for micro in range(3):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        scaled = engine.backward(engine(*make_batch("mlp", 0, micro, rank)))
        engine.step()
    return {
        "boundaries": boundaries,
        "sizes": (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()),
        "counts": (engine.global_steps, engine.micro_steps, engine.global_samples),
        "stage": engine.zero_optimization_stage(),
        "dtype": engine.communication_data_type,
        "device": (engine.device.type, engine.local_rank),
        "norm": float(engine.get_global_grad_norm()),
        "scaled": scaled.item(),
        "gradients": [parameter.grad is None for parameter in engine.module.parameters()],
    }  # fmt: skip


def test_the_engine_answers_as_deepspeed_does():
    found = run_standing(2, answers)
    for rank, each in enumerate(found):
        assert each["boundaries"] == [False, False, True] and all(each["gradients"])
        assert each["sizes"] == (24, 4, 3) and each["counts"] == (1, 3, 24)
        assert (each["stage"], each["dtype"], each["device"]) == (2, torch.bfloat16, ("cpu", rank))
        assert 0 < each["scaled"] < 1 and each["norm"] == found[0]["norm"] > 0


MISUSE = [
    (ConfigError, "needs a model", lambda model: zero_runtime.initialize(config=PLAIN)),
    (ConfigError, "no configuration", lambda model: zero_runtime.initialize(model=model)),
    (
        ConfigError,
        "did you mean 'SGD'",
        lambda model: zero_runtime.initialize(model=model, config=changed(optimizer={"type": "sgd"})),
    ),
    (
        ConfigError,
        "lrate = 1 is not an argument of AdamW; AdamW takes lr, betas",
        lambda model: zero_runtime.initialize(
            model=model, config=changed(optimizer={"type": "AdamW", "params": {"lrate": 1}})
        ),
    ),
    (
        ConfigError,
        "use gradient_clipping at the top",
        lambda model: zero_runtime.initialize(
            model=model, config=changed(optimizer={"type": "Adam", "params": {"max_grad_norm": 1.0}})
        ),
    ),
    (
        ConfigError,
        "untested with ZeRO stage 2",
        lambda model: zero_runtime.initialize(model=model, config=changed(optimizer={"type": "RMSprop"})),
    ),
    (
        ConfigError,
        "needs whole parameters",
        lambda model: zero_runtime.initialize(
            model=model, config=changed(optimizer={"type": "Adafactor", "params": {"lr": 0.1}})
        ),
    ),
    (
        ConfigError,
        "did you mean 'WarmupLR'",
        lambda model: zero_runtime.initialize(model=model, config=changed(scheduler={"type": "WarmUpLR"})),
    ),
    (
        ConfigError,
        "is in more than one param group",
        lambda model: zero_runtime.initialize(
            model=model,
            optimizer=_shared_parameter(model),
            config=changed(optimizer=None),
        ),
    ),
    (
        UnsupportedError,
        "sparse gradients",
        lambda model: zero_runtime.initialize(model=torch.nn.Embedding(4, 4, sparse=True), config=PLAIN),
    ),
    (
        ConfigError,
        "none of which is one of the 8 of the model",
        lambda model: zero_runtime.initialize(
            model=model, optimizer=torch.optim.SGD(make_model("mlp").parameters(), lr=0.1), config=PLAIN
        ),
    ),
    (UsageError, "loss of one element", lambda model: _engine(model).backward(torch.ones(2))),
    (UsageError, "found 3.0", lambda model: _engine(model).backward(3.0)),
    (UsageError, "has no effect at ZeRO stage 2", lambda model: _engine(model).no_sync().__enter__()),
    (
        UsageError,
        "call engine.backward",
        lambda model: _engine(model, stage=0)(*make_batch("mlp", 0, 0, 0)).backward(),
    ),
    (
        UsageError,
        "step needs an optimizer, and there is none",
        lambda model: _engine(model, optimizer=None).step(),
    ),
]


def _engine(model, stage=2, **top):
    return zero_runtime.initialize(model=model, config=changed({"stage": stage}, **top))[0]


def _shared_parameter(model):
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}])
    optimizer.param_groups[1]["params"].append(first)
    return optimizer


def misuse(rank, world):
    found = []
    for expected, _, act in MISUSE:
        try:
            act(make_model("mlp"))
            found.append("nothing was raised")
        except expected as error:
            found.append(str(error))
    return found


def which_optimizer(rank, world):
    """Check the optimizer that initialize returns.

    At stage 0 without master copies DeepSpeed returns the given optimizer itself. With master copies it
    returns a wrapper.
    """
    found = []
    for top in ({}, {"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1}}):
        model = torch.nn.Linear(2, 2)
        client = torch.optim.Adam(model.parameters(), lr=0.5)
        engine, optimizer, _, _ = zero_runtime.initialize(
            model=model, optimizer=client, config={"train_batch_size": world, **top}
        )
        assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, WrappedOptimizer)
        assert not isinstance(optimizer, torch.optim.SGD) and engine.optimizer is optimizer
        found.append((isinstance(optimizer, torch.optim.Adam), optimizer == client, client in {optimizer}))
        engine.backward(engine(torch.ones(1, 2, dtype=model.weight.dtype)).sum())
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        engine.step()
        assert engine.was_step_applied()
    return found


def test_the_optimizer_of_stage_0_is_known_as_the_one_that_was_given():
    expected = [(True, True, True), (False, False, False), (False, False, False)]
    assert run_standing(2, which_optimizer) == [expected] * 2


def groups_by_name(rank, world):
    """Check the names that DeepSpeed's optimizers use for param groups and for this rank's reduced gradients."""
    for stage in (1, 2, 3):
        zero = {"stage": stage, "sub_group_size": 5000, "stage3_param_persistence_threshold": 0}
        engine, optimizer, _, _ = zero_runtime.initialize(model=make_model("mlp"), config=changed(zero=zero))
        engine.backward(engine(*make_batch("mlp", 0, 0, rank)))
        trained = list(engine.module.parameters())
        listed = [parameter for group in optimizer.fp16_groups for parameter in group]
        assert len(listed) == len(trained) and set(listed) == set(trained)
        assert len(optimizer.fp16_groups) == len(optimizer.fp32_partitioned_groups_flat)
        assert (len(optimizer.fp16_groups) > 1) is (stage == 3)
        parts = [each for group in optimizer.averaged_gradients.values() for each in group]
        local = [safe_get_local_grad(parameter) for parameter in listed]
        assert torch.equal(torch.cat(parts), torch.cat([each for each in local if each is not None]))
        flat = optimizer.grad_partitions_flat_buffer
        assert flat.numel() >= sum(each.numel() for each in parts) and flat.abs().sum() > 0
        assert flat.double().sum().item() == pytest.approx(sum(each.double().sum().item() for each in parts))
        engine.step()
        steps = {int(optimizer.state[flat]["step"]) for flat in optimizer.fp32_partitioned_groups_flat}
        assert steps == {engine.global_steps} == {1}
        engine.destroy()


def test_groups_and_gradients_have_deepspeeds_names():
    run_standing(2, groups_by_name)


def dtypes_by_name(rank, world):
    """Check the methods of DeepSpeed's engine that cast a model."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model.register_buffer("positions", torch.arange(4.0))
    model.register_buffer("numbers", torch.arange(4))
    types = {"buffer_dtype": "fp16", "param_dtype": "bf16"}
    engine = zero_runtime.initialize(
        model=model, config={"train_batch_size": world, "bf16": {"enabled": True}, "data_types": types}
    )[0]
    assert engine._mixed_precision_dtypes() == (torch.bfloat16, torch.float16)
    engine._assert_valid_mixed_precision_config()
    engine._config = dataclasses.replace(
        engine._config, precision=dataclasses.replace(engine._config.precision, bf16=False, fp16=True)
    )
    with pytest.raises(ValueError, match="param_dtype is bf16, but the model trains in fp16"):
        engine._assert_valid_mixed_precision_config()
    assert model.positions.dtype is torch.float16 and model[0].weight.dtype is torch.bfloat16
    engine._cast_module_mixed_precision(torch.float32, None, True)
    assert model[0].weight.dtype is torch.bfloat16
    engine._cast_module_mixed_precision(torch.float32, torch.float32, False)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert model.positions.dtype is torch.float32 and model.numbers.dtype is torch.int64


def test_dtypes_are_asked_for_and_cast_by_deepspeeds_names():
    run_standing(1, dtypes_by_name)


def test_misuse_is_refused_with_the_reason():
    (found,) = run_standing(1, misuse)
    for (_, message, _), text in zip(MISUSE, found, strict=True):
        assert message in text and "\n" not in text


def backends(rank, world):
    found = []
    for backend in (None, "gloo", "cpu:gloo"):
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        found.append((zero_runtime.comm.DataParallelGroup().backend, torch.distributed.get_backend()))
        torch.distributed.destroy_process_group()
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default backend is nccl where CUDA is there")
def test_the_backend_of_the_device_is_known_however_the_group_was_made():
    (found,) = run_ranks(1, backends, process_group=False)
    assert [backend for backend, _ in found] == ["gloo"] * 3


@pytest.mark.long
def test_without_a_launcher_the_process_is_the_only_rank(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, zero_runtime\n"
        "model = torch.nn.Linear(3, 1)\n"
        "config = {'train_batch_size': 2, 'optimizer': {'type': 'SGD', 'params': {'lr': 0.1}}, "
        "'zero_optimization': {'stage': 1, 'gradient_reduction': 'reduce_scatter', 'reduce_scatter': False}}\n"
        "engine, *_ = zero_runtime.initialize(model=model, config=config)\n"
        "for _ in range(2):\n"
        "    engine.backward(engine(torch.ones(2, 3)).square().mean())\n"
        "    engine.step()\n"
        "print(engine.global_steps, engine.world_size)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "2 1\n"), done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("zero_runtime:")]
    assert told == [
        "zero_runtime: gradient_reduction reduce_scatter is used; reduce_scatter false would mean all_reduce"
    ]

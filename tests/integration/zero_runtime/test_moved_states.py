"""States that were in host memory for a while (``engine.offload_states``): training continues as if they had stayed.

Without a GPU all states are in host memory already, and nothing is moved. In this test the ranks copy them
anyway, as from a device. The memory must be freed, and the states must return with equal bits.
"""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import zero_runtime
from support import recorded_models
from support.ranks import run_ranks
from support.standing_ranks import run_standing
from zero_runtime.errors import ConfigError, UnsupportedError, UsageError
from zero_runtime.offload import moves
from zero_runtime.training.moved_states import STATES, get_state_devices

pytestmark = pytest.mark.ranks

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}}
TWICE = {"gradient_accumulation_steps": 2}
CASES = {
    "stage 0": (0, TWICE, {}),
    "stage 0, bf16": (0, BF16, {}),
    "stage 1": (1, TWICE, {}),
    "stage 1, bf16 accumulated in fp32": (1, {**BF16, **TWICE, "data_types": {"grad_accum_dtype": "fp32"}}, {}),
    "stage 2, bf16": (2, {**BF16, **TWICE, "gradient_clipping": 0.05}, {}),
    "stage 2, fp16 with overflows": (2, FP16, {}),
    "stage 2, chunks": (2, BF16, {"gradient_reduction": "reduce_scatter"}),
    "stage 2, gathered while the next pass runs": (2, BF16, {"overlap_parameter_gather": True}),
    "stage 2, parameters travel quantized": (2, BF16, {"zero_quantized_weights": True}),
    "stage 2, Muon": (2, {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}, {"gradient_reduction": "all_reduce"}),
    "stage 3": (3, TWICE, {}),
    "stage 3, bf16, sub-groups": (3, {**BF16, **TWICE}, {"sub_group_size": 5000}),
    "stage 3, secondary slices": (3, BF16, {"zero_hpz_partition_size": 2}),
    "stage 3, Muon": (3, {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}, {}),
}  # fmt: skip
STEPS = 4


def make(stage, top, zero):
    block = {"stage": stage, "reduce_bucket_size": 20_000, **zero}
    if stage == 3:
        block = {"stage3_param_persistence_threshold": 100, **block}
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": ADAMW,
        "zero_optimization": block,
        **top,
    }
    model = recorded_models.make_model("mlp")
    next(iter(model.parameters())).requires_grad_(False)
    return zero_runtime.initialize(
        model=model,
        model_parameters=[each for each in model.parameters() if each.requires_grad],
        config=given,
    )[0]


def micro_batches(engine, rank, steps=STEPS, between=lambda number: None):
    """Train and return the losses.

    ``between`` is called with a number after each backward pass and after each step.
    """
    losses, numbers = [], itertools.count()
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            dtype = next(engine.module.parameters()).dtype
            loss = engine(*recorded_models.make_batch("mlp", step, micro, rank, dtype))
            engine.backward(loss)
            between(next(numbers))
            engine.step()
            between(next(numbers))
            losses.append(loss.item())
    return losses


def values(engine):
    """Return the model and the optimizer states, in this rank's layout."""
    with zero_runtime.zero.GatheredParameters(list(engine.module.parameters())):
        model = [each.detach().clone() for each in engine.module.parameters()]
    return model + [
        each.detach().clone()
        for name in ("hp_params", "optim_states")
        for each in engine._moved.tensors(name)
    ]


def memory_of(engine, names):
    """Return the memory blocks of these states that no other state uses."""
    of = {
        name: {
            each.untyped_storage().data_ptr(): StorageWeakRef(each.untyped_storage())
            for each in engine._moved.tensors(name)
            if each.untyped_storage().nbytes()
        }
        for name in STATES
    }
    kept = {place for name in STATES if name not in names for place in of[name]}
    return [ref for name in names for place, ref in of[name].items() if place not in kept]


class Excursions:
    """A callback that moves different states out and back each time, and checks that the memory is freed."""

    def __init__(self, engine):
        self.engine = engine
        self.freed = dict.fromkeys(STATES, 0)

    def __call__(self, number):
        names = [*[(name,) for name in STATES], ("hp_params", "optim_states"), STATES][number % 7]
        if self.engine._residency is not None:
            self.engine.empty_partition_cache()  # frees gathered parameters in any case
        before = memory_of(self.engine, names)
        self.engine.offload_states(None if names is STATES else list(names), pin_memory=number % 2 == 0)
        deadline = time.monotonic() + 10  # A gloo thread may still reference a message whose wait is over.
        while not all(each.expired() for each in before) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert all(each.expired() for each in before), names
        for name in names:
            self.freed[name] += len(before)
        self.engine.reload_states(non_blocking=number % 3 == 0)


def compare(rank, world, names):
    moves._is_on_host = lambda block: False  # only affects this process, which ends with the test
    found = {}
    for name in names:
        plain = make(*CASES[name])
        losses, expected = micro_batches(plain, rank), values(plain)
        skipped = plain.skipped_steps
        plain.destroy()
        engine = make(*CASES[name])
        excursions = Excursions(engine)
        assert micro_batches(engine, rank, between=excursions) == losses, name
        assert engine.skipped_steps == skipped
        for one, other in zip(values(engine), expected, strict=True):
            assert torch.equal(one, other), name
        engine.destroy()
        found[name] = excursions.freed
    return found


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("first", [0, 1])
def test_training_goes_on_as_if_the_states_had_stayed(first):
    names = list(CASES)[first::2]
    for found in run_standing(2, compare, names):
        assert list(found) == names
        for name, freed in found.items():
            # The masters of an fp32 model are its parameters. On their own they have no memory to free.
            expected = {"lp_params", "optim_states"} | (
                {"hp_params"} if "fp32" not in name and _narrow(name) else set()
            )
            assert {state for state, count in freed.items() if count} >= expected, (name, freed)


def _narrow(name):
    return any(key in CASES[name][1] for key in ("bf16", "fp16"))


def checkpoints(rank, world, path):
    moves._is_on_host = lambda block: False
    for stage, top in ((0, BF16), (1, BF16), (2, {}), (3, BF16)):
        engine = make(stage, top, {})
        micro_batches(engine, rank, 2)
        expected = values(engine)
        engine.offload_states()
        engine.save_checkpoint(path / str(stage))
        with pytest.raises(UsageError, match=r"load_checkpoint .* engine.reload_states\(\) first"):
            engine.load_checkpoint(path / str(stage))
        engine.save_16bit_model(path / f"{stage}-weights")
        engine.reload_states()
        micro_batches(engine, rank, 1)
        engine.load_checkpoint(path / str(stage))
        for one, other in zip(values(engine), expected, strict=True):
            assert torch.equal(one, other), stage
        engine.destroy()
        fresh = make(stage, top, {})
        fresh.load_checkpoint(path / str(stage))
        for one, other in zip(values(fresh), expected, strict=True):
            assert torch.equal(one, other), stage
        fresh.destroy()


def test_a_checkpoint_saved_while_they_are_away_is_complete(tmp_path):
    run_standing(2, checkpoints, tmp_path)


def refusals(rank, world):
    engine = make(2, BF16, {})
    batch = recorded_models.make_batch("mlp", 0, 0, rank, torch.bfloat16)

    def refused(doing, states):
        return pytest.raises(
            UsageError,
            match=rf"^{doing} was called while {states} (is|are) in host memory .*reload_states\(\) first",
        )

    engine.offload_states(["lp_params"])
    with refused("forward", "lp_params"):
        engine(*batch)
    engine.reload_states()
    loss = engine(*batch)
    engine.offload_states(["lp_grads", "optim_states"])
    with refused("backward", "lp_grads"):
        engine.backward(loss)
    engine.reload_states()
    engine.offload_states(["optim_states"])  # the backward pass does not use these states
    engine.backward(loss)
    engine.offload_states(["hp_params"])
    before = [each.detach().clone() for each in engine.module.parameters()]
    with refused("step", "optim_states, hp_params"):
        engine.step()
    assert engine.global_steps == 0
    engine.reload_states()
    engine.step()
    assert engine.global_steps == 1 and engine.was_step_applied()
    assert any(
        not torch.equal(one, each) for one, each in zip(before, engine.module.parameters(), strict=True)
    )
    engine.reload_states()  # nothing is offloaded
    engine.offload_states(device="none")
    engine.backward(engine(*batch))
    with pytest.raises(ValueError, match="device of offload_states is 'nvme'; expected cpu"):
        engine.offload_states(device="nvme")
    with pytest.raises(
        ConfigError, match="'masters' is not a state of an engine; expected one of contiguous_grad_buffer, "
    ):
        engine.offload_states(["masters"])
    assert get_state_devices(engine, "hp_params") == {torch.device("cpu")}
    engine.destroy()
    offloaded = make(3, {}, {"offload_param": {"device": "cpu"}})
    with pytest.raises(
        AssertionError, match=r"offload_param keeps the parameters off the device all the time"
    ):
        offloaded.offload_states()
    offloaded.destroy()
    signs = zero_runtime.initialize(
        model=recorded_models.make_model("mlp"),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}},
        },
    )[0]
    with pytest.raises(UnsupportedError, match="offload_states with optimizer OneBitAdam"):
        signs.offload_states()
    signs.destroy()
    bare = zero_runtime.initialize(
        model=recorded_models.make_model("mlp"), config={"train_micro_batch_size_per_gpu": 4}
    )[0]
    with pytest.raises(UsageError, match="offload_states needs an optimizer"):
        bare.offload_states()


def test_what_needs_them_is_refused_while_they_are_away():
    run_standing(2, refusals)


def untouched(rank, world):
    engine = make(2, BF16, {})
    micro_batches(engine, rank, 1)
    places = [each.data_ptr() for name in STATES[:-1] for each in engine._moved.tensors(name)]
    engine.offload_states()
    assert [each.data_ptr() for name in STATES[:-1] for each in engine._moved.tensors(name)] == places


def test_on_a_cpu_nothing_is_copied():
    run_ranks(2, untouched)

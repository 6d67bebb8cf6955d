"""Test ``checkpoint()`` in one process: gradients, random numbers, stored tensors, settings and their errors."""

from __future__ import annotations

import functools
import gc
import json
import weakref
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zero_runtime import checkpointing
from zero_runtime.activation_checkpointing.slots import Kind, Slots
from zero_runtime.errors import ConfigError, UsageError

BOTH = pytest.mark.parametrize(
    "checkpoint", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint], ids=lambda f: f.__name__
)
WIDTH = 16


@pytest.fixture(autouse=True)
def defaults():
    checkpointing.forget()
    checkpointing.get_rng_tracker().reset()
    yield
    checkpointing.forget()
    checkpointing.get_rng_tracker().reset()


def plainly(function, *args, **kwargs):
    return function(*args, **kwargs)


class Block(nn.Module):
    """A block with dropout, a branch that is computed in place, and arguments of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.runs = 0

    def forward(self, hidden, scale=1.0, *, extra=None):
        self.runs += 1
        wide = self.drop(F.relu(self.expand(self.norm(hidden)), inplace=True))
        hidden = hidden + scale * self.drop(self.contract(wide))
        if extra is None:
            return hidden
        return {"hidden": hidden, "rest": [extra["bias"] * hidden.mean(), extra["name"]]}


def blocks(count=3):
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(count))


def gradients(run, layers, batch_needs_gradient=True):
    """Return the gradients and a random number.

    The gradients are of the batch, of a tensor in a keyword argument, and of all parameters. The random
    number is drawn after the backward pass.
    """
    for parameter in layers.parameters():
        parameter.grad = None
    torch.manual_seed(1)
    batch = torch.randn(4, WIDTH, requires_grad=batch_needs_gradient)
    bias = torch.ones(3, requires_grad=True)
    hidden = batch
    for number, layer in enumerate(layers):
        if number == 1:
            found = run(layer, hidden, extra={"bias": bias, "name": "middle"})
            assert found["rest"][1] == "middle"
            hidden = found["hidden"] + found["rest"][0].sum()
        else:
            hidden = run(layer, hidden, 0.5)
    hidden.square().mean().backward()
    return [batch.grad, bias.grad, *(p.grad for p in layers.parameters()), torch.rand(3)]


def equal(mine, theirs):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@BOTH
@pytest.mark.parametrize("needs", [True, False])
def test_gradients_and_random_numbers_are_those_of_a_plain_call(checkpoint, needs):
    layers = blocks()
    wanted = gradients(plainly, layers, needs)
    for layer in layers:
        layer.runs = 0
    assert equal(gradients(checkpoint, layers, needs), wanted)
    assert [layer.runs for layer in layers] == [2, 2, 2]


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_the_same_the_second_time(checkpoint, dtype):
    layers = blocks()
    with torch.autocast("cpu", dtype):
        wanted = gradients(plainly, layers)
        assert equal(gradients(checkpoint, layers), wanted)


@BOTH
def test_buffers_that_are_made_once(checkpoint):
    layers = blocks()
    wanted = gradients(plainly, layers)
    checkpointing.configure(
        None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=3
    )
    for _ in range(3):
        assert equal(gradients(checkpoint, layers), wanted)


@BOTH
@pytest.mark.parametrize("contiguous", [False, True])
def test_a_function_may_change_its_input_in_place(checkpoint, contiguous):
    checkpointing.configure(
        None, partition_activations=contiguous, contiguous_checkpointing=contiguous, num_checkpoints=1
    )

    def change(hidden):
        hidden.mul_(3)
        return hidden.sin()

    def run(call):
        batch = torch.linspace(0, 1, 8, requires_grad=True)
        call(change, batch + 0).sum().backward()
        return batch.grad

    if contiguous:
        assert torch.equal(run(checkpoint), run(plainly))
    else:  # torch detects that a stored tensor has changed.
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(checkpoint)


@BOTH
@pytest.mark.parametrize("enabled", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept_or_run_again(checkpoint, enabled):
    checkpointing.configure(
        None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=1
    )
    layer = blocks(1)[0]
    with enabled():
        outputs = [checkpoint(layer, torch.ones(2, WIDTH)) for _ in range(3)]
    assert layer.runs == 3 and not any(output.requires_grad for output in outputs)


@BOTH
def test_frozen_functions_and_inputs(checkpoint):
    layer = blocks(1)[0].requires_grad_(False)
    assert not checkpoint(layer, torch.ones(2, WIDTH)).requires_grad
    batch = torch.ones(2, WIDTH, requires_grad=True)
    checkpoint(layer, batch).sum().backward()
    assert batch.grad is not None and all(p.grad is None for p in layer.parameters())
    layer.contract.requires_grad_(True)
    checkpoint(layer, torch.ones(2, WIDTH)).sum().backward()
    assert layer.contract.weight.grad is not None and layer.expand.weight.grad is None


def test_nothing_runs_again_after_the_last_tensor_that_is_needed():
    ran = []

    def function(hidden):
        hidden = hidden.sin()
        ran.append("needed")
        hidden = hidden + 1
        ran.append("not needed")
        return hidden

    batch = torch.ones(2, requires_grad=True)
    output = checkpointing.checkpoint(lambda x: function(x * x), batch)
    assert ran == ["needed", "not needed"]
    output.sum().backward()
    assert ran == ["needed", "not needed"]  # The last saved tensor is the input of sin, inside the function.
    assert torch.allclose(batch.grad, 2 * torch.cos(torch.ones(2)))


@BOTH
def test_the_graph_may_be_kept_and_differentiated_again(checkpoint):
    weight = torch.linspace(0.1, 1, 6, requires_grad=True)
    batch = torch.linspace(1, 2, 6, requires_grad=True)

    def run(call):
        output = call(lambda x: (x * weight).sin() ** 2, batch * 1).sum()
        (first,) = torch.autograd.grad(output, batch, retain_graph=True)
        (second,) = torch.autograd.grad(output, weight)
        return first, second

    assert equal(run(checkpoint), run(plainly))

    def twice(call):
        output = call(lambda x: (x * weight).sin() ** 2, batch * 1).sum()
        (first,) = torch.autograd.grad(output, batch, create_graph=True)
        return torch.autograd.grad(first.sum(), weight)

    assert equal(twice(checkpoint), twice(plainly))


@BOTH
def test_regions_within_regions(checkpoint):
    layers = blocks(4)
    wanted = gradients(plainly, layers)

    def inside(run):
        return lambda layer, *args, **kwargs: run(lambda: run(layer, *args, **kwargs))

    assert equal(gradients(inside(checkpoint), layers), wanted)


@BOTH
def test_the_structure_of_outputs_is_kept(checkpoint):
    pair = namedtuple("pair", "first second")
    batch = torch.ones(3, requires_grad=True)
    found = checkpoint(lambda x: pair((x * 2,), {"n": None, "x": [x.detach(), 5]}), batch)
    assert isinstance(found, pair) and isinstance(found.first, tuple) and found.second["x"][1] == 5
    assert found.first[0].requires_grad and not found.second["x"][0].requires_grad
    assert checkpoint(lambda x: x, batch).grad_fn is None  # The result is the batch itself.
    assert checkpoint(lambda: None) is None


@BOTH
def test_what_a_function_does_to_its_arguments_is_done_once(checkpoint):
    seen, batch = [], torch.ones(3, requires_grad=True)

    def function(hidden, collected):
        collected.append("run")
        return hidden.sin().cos()

    checkpoint(function, batch, seen).sum().backward()
    assert seen == ["run"] and batch.grad is not None


def test_deepspeeds_function_class_fills_the_list_of_outputs():
    outputs, batch = [], torch.ones(3, requires_grad=True)
    returned = checkpointing.CheckpointFunction.apply(lambda x, n: (x * n, n), outputs, batch, 4)
    assert outputs[0] is returned[0] and outputs[1] == 4
    outputs[0].sum().backward()
    assert torch.equal(batch.grad, torch.full((3,), 4.0))
    alone = []
    checkpointing.CheckpointFunction.apply(torch.sin, alone, batch)
    assert len(alone) == 1


@pytest.mark.parametrize("contiguous", [False, True])
def test_memory_is_free_after_the_backward_pass_without_the_garbage_collector(contiguous):
    checkpointing.configure(
        None, partition_activations=contiguous, contiguous_checkpointing=contiguous, num_checkpoints=1
    )
    layer, tensors = blocks(1)[0], []

    def run(hidden):
        middle = layer(hidden)
        tensors.append(weakref.ref(middle))
        return middle * middle

    gc.disable()
    try:
        for _ in range(3):  # For one tensor at a time, one buffer is sufficient.
            first = torch.ones(2, WIDTH, requires_grad=True) * 2
            tensors.append(weakref.ref(first))
            loss = checkpointing.checkpoint(run, first).sum()
            del first
            assert tensors[-1]() is None  # The tensors of the function are freed when it has returned.
            assert (tensors[-2]() is None) is contiguous
            loss.backward()
            assert all(tensor() is None for tensor in tensors)
    finally:
        gc.enable()


def test_too_few_buffers_is_an_error_that_says_what_to_do():
    checkpointing.configure(
        None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2
    )
    hidden = torch.ones(4, requires_grad=True)
    first = checkpointing.checkpoint(torch.sin, hidden)
    second = checkpointing.checkpoint(torch.sin, first)
    with pytest.raises(UsageError, match="number_checkpoints is 2, and more checkpoints"):
        checkpointing.checkpoint(torch.sin, second)
    checkpointing.reset()
    third = checkpointing.checkpoint(torch.sin, second)
    third.sum().backward()
    assert hidden.grad is not None


def test_slots_are_given_back():
    slots = Slots(2)
    kind = Kind(0, 8, torch.float32, torch.device("cpu"))
    first, second = slots.take(kind), slots.take(kind)
    address = first.row.data_ptr()
    del first
    third = slots.take(kind)
    assert third.row.data_ptr() == address and second.row.data_ptr() == address + 32


@pytest.mark.parametrize("contiguous", [False, True])
def test_strides_are_the_same_the_second_time(contiguous):
    checkpointing.configure(
        None, partition_activations=contiguous, contiguous_checkpointing=contiguous, num_checkpoints=1
    )
    seen = []

    def look(first, second, third):
        seen.append((first.stride(), second.stride(), third.stride(), first.sum().item()))
        return (first * second * third).sin()

    first = torch.rand(4, 6, requires_grad=True).transpose(0, 1)
    gaps = torch.rand(6, 8, requires_grad=True)[:, ::2]
    repeated = torch.rand(1, 4, requires_grad=True).expand(6, 4)
    checkpointing.checkpoint(look, first, gaps, repeated).sum().backward()
    assert len(seen) == 2 and seen[0] == seen[1]


# Random states.


@BOTH
def test_a_named_random_state_is_put_back_too(checkpoint):
    tracker = checkpointing.get_rng_tracker()

    def draw(hidden):
        with tracker.fork("mine"):
            hidden = F.dropout(hidden)
        return F.dropout(hidden).sin()

    def run(call):
        tracker.reset()
        tracker.add("mine", 7)
        torch.manual_seed(3)
        batch = torch.ones(64, requires_grad=True)
        call(draw, call(draw, batch)).sum().backward()
        with tracker.fork("mine"):
            return batch.grad, torch.rand(2)

    assert equal(run(checkpoint), run(plainly))


def test_the_tracker_draws_as_torch_does_from_that_seed():
    tracker = checkpointing.RNGTracker()
    tracker.add("one", 11)
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    with tracker.fork("one"):
        first = torch.randn(3)
    assert torch.equal(torch.rand(4), expected)
    kept = tracker.get_states()
    with tracker.fork("one"):
        second = torch.randn(3)
    tracker.set_states(kept)
    with tracker.fork("one"):
        again = torch.randn(3)
    torch.manual_seed(11)
    assert torch.equal(torch.randn(3), first)
    assert torch.equal(torch.randn(3), second) and torch.equal(second, again)


def test_errors_of_the_tracker():
    tracker = checkpointing.CudaRNGStatesTracker()
    tracker.add("one", 1)
    with pytest.raises(UsageError, match="seed 1 is in use"):
        tracker.add("two", 1)
    with pytest.raises(UsageError, match="'one' was added before"):
        tracker.add("one", 2)
    with pytest.raises(UsageError, match="no random state 'model-parallel-rng'"), tracker.fork():
        pass
    tracker.reset()
    tracker.add("one", 1)


def test_seeds_of_model_parallel_ranks_are_deepspeeds():
    checkpointing.model_parallel_cuda_manual_seed(100)
    assert torch.initial_seed() == 100
    with checkpointing.get_cuda_rng_tracker().fork():
        drawn = torch.rand(2)
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(100 + 2718)))
    checkpointing.model_parallel_reconfigure_tp_seed(200)
    with checkpointing.get_cuda_rng_tracker().fork():
        drawn = torch.rand(2)
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(200 + 2718)))


# Settings.


def test_configure_reads_the_block_and_arguments_win(tmp_path, capsys):
    assert not checkpointing.is_configured()
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 1, "activation_checkpointing": {"profile": True}}))
    checkpointing.configure(None, str(path))
    assert checkpointing.is_configured()
    checkpointing.checkpoint(functools.partial(Block()), torch.ones(2, WIDTH)).sum().backward()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1:3] for line in lines] == [
        [" checkpoint of Block", lines[0].split(":")[2]],
        [" checkpoint of Block", lines[1].split(":")[2]],
    ]
    assert lines[0].split()[-3] == "forward" and "ms, including" in lines[1] and "backward" in lines[1]
    checkpointing.configure(None, str(path), profile=False)
    checkpointing.checkpoint(torch.sin, torch.ones(2, requires_grad=True)).sum().backward()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"contiguous_checkpointing": True}, "without partition_activations"),
        ({"contiguous_checkpointing": True, "partition_activations": True}, "number_checkpoints is None"),
        ({"num_checkpoints": "many"}, "number_checkpoints is 'many'; expected a whole number"),
        ({"profile": "yes"}, "profile is 'yes'"),
        ({"deepspeed_config": {"activation_checkpointing": {"partition": True}}}, "did you mean"),
        ({"deepspeed_config": {"activation_checkpointing": 3}}, "activation_checkpointing is 3"),
    ],
)
def test_settings_that_cannot_be_used(given, said):
    with pytest.raises(ConfigError, match=said):
        checkpointing.configure(None, **given)
    assert not checkpointing.is_configured()


def test_an_mpu_without_the_methods_is_an_error():
    with pytest.raises(ConfigError, match="get_model_parallel_rank, get_model_parallel_world_size"):
        checkpointing.configure(object())


def test_deepspeeds_small_setters():
    checkpointing.set_num_layers(1)
    checkpointing.partition_activations_in_checkpoint(True)
    batch = torch.ones(2, requires_grad=True)
    checkpointing.checkpoint(torch.sin, batch).sum().backward()
    assert torch.equal(batch.grad, torch.cos(torch.ones(2)))

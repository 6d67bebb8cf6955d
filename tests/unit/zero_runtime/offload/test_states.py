"""Test masters and optimizer states in files.

They are updated through a few buffers and preserved if an update is interrupted.
"""

from __future__ import annotations

import pytest
import torch

from zero_runtime.configuration.blocks.offload_block import OptimizerOffload
from zero_runtime.errors import OffloadError
from zero_runtime.offload.offloaded_states import MASTER, StateFiles
from zero_runtime.offload.tensor_files import AsynchronousIO, TensorFiles

COUNT, NUMEL = 7, 3000


def made(folder, **keys):
    """Return the states of seven masters in files, with their optimizer and the masters."""
    policy = OptimizerOffload(device="nvme", nvme_path=str(folder), **keys)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5, momentum=0.9)
    folder.mkdir()
    states = StateFiles(optimizer, TensorFiles(folder, AsynchronousIO(4096, 1)), policy, pinned=False)
    masters = [
        states.add(number, NUMEL, torch.float32, lambda target, value=float(number): target.fill_(value))
        for number in range(COUNT)
    ]
    optimizer.param_groups[0]["params"] = masters
    return states, optimizer, masters


def step(states, optimizer, masters, numbers=None):
    for number in states.walk(numbers):
        masters[number].grad = torch.full((NUMEL,), float(number))
        optimizer.step()
        masters[number].grad = None


WAYS = [
    {"buffer_count": 1},
    {"buffer_count": 2, "pipeline_read": False},
    {"buffer_count": 3, "pipeline_write": False},
    {"buffer_count": 4, "fast_init": True},
    {"buffer_count": 20},
]


@pytest.mark.parametrize("keys", WAYS)
def test_every_master_is_updated_as_in_memory(tmp_path, keys):
    states, optimizer, masters = made(tmp_path / "f", **keys)
    for _ in range(3):
        step(states, optimizer, masters)
    for number in states.walk():
        # The momentum is 1, 1.9 and 2.71 gradients, and each step subtracts half of it.
        expected = number - 0.5 * number * (1 + 1.9 + 2.71)
        assert torch.allclose(masters[number], torch.full((NUMEL,), expected))
        assert torch.allclose(
            optimizer.state[masters[number]]["momentum_buffer"], torch.full((NUMEL,), 2.71 * number)
        )
    states.close()
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("keys", WAYS)
def test_a_walk_that_is_broken_off_keeps_what_has_changed(tmp_path, keys):
    states, optimizer, masters = made(tmp_path / "f", **keys)
    step(states, optimizer, masters)
    for number in states.walk():
        masters[number].detach().fill_(100.0 + number)
        if number == 2:
            break
    with pytest.raises(KeyError), states.resident(4):
        masters[4].detach().fill_(104.0)
        raise KeyError
    step(states, optimizer, masters, [5, 6])
    found = [float(states.show(number, MASTER, slice(10, 11))) for number in range(COUNT)]
    assert found == pytest.approx([100.0, 101.0, 102.0, 1.5, 104.0, 5 - 2.5 - 4.75, 6 - 3 - 5.7])
    states.close()


@pytest.mark.parametrize("keys", WAYS)
def test_what_was_read_ahead_of_a_step_that_is_skipped_serves_the_next(tmp_path, keys):
    states, optimizer, masters = made(tmp_path / "f", **keys)
    states.begin()
    step(states, optimizer, masters)
    states.begin()
    assert [float(states.show(number, MASTER, slice(0, 1))) for number in (6, 0, 1)] == [3.0, 0.0, 0.5]
    states.begin()
    with states.resident(6):
        masters[6].detach().fill_(10.0)
    states.begin()
    step(states, optimizer, masters)
    found = [float(states.show(number, MASTER, slice(0, 1))) for number in range(COUNT)]
    assert found == pytest.approx([number - 1.45 * number for number in range(6)] + [10 - 0.95 * 6])
    states.close()


def test_what_is_in_files_has_its_shape_and_cannot_be_written(tmp_path):
    states, optimizer, masters = made(tmp_path / "f")
    step(states, optimizer, masters)
    momentum = optimizer.state[masters[1]]["momentum_buffer"]
    assert masters[1].shape == momentum.shape == (NUMEL,)
    assert masters[1].isnan().all() and momentum.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"):
        momentum.mul_(2.0)
    assert states.kept(1) == {"momentum_buffer": torch.float32}
    assert states.show(1, "momentum_buffer", slice(0, 2)).tolist() == [1.0, 1.0]
    states.close()


def test_state_that_goes_away_is_not_kept(tmp_path):
    states, optimizer, masters = made(tmp_path / "f")
    step(states, optimizer, masters)
    with states.resident(3):
        optimizer.state.pop(masters[3])
    assert states.kept(3) == {} and states.kept(4) != {}
    states.close()


def test_a_damaged_file_ends_the_walk(tmp_path):
    states, optimizer, masters = made(tmp_path / "f")
    states.show(5, MASTER, slice(0, 1))  # The state was already written, so no code below writes it again.
    path = next(each for each in (tmp_path / "f").iterdir() if each.name.endswith("-5.master"))
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(OffloadError, match=r"5\.master.*XXH3"):
        step(states, optimizer, masters)
    states.close()

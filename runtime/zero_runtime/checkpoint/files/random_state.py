"""The states of the random generators of a process: Python, NumPy if it is imported, and torch on CPU and CUDA.

They include the named states of the tracker of activation checkpointing. Model-parallel ranks draw different
numbers from these states.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from zero_runtime.activation_checkpointing.random_states import default_generator, get_rng_tracker
from zero_runtime.errors import CheckpointError

_TRACKED: Final = "tracked."  # The prefix of the tracker's states: tracked.<device>.<name>.


def collect(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states as tensors, by name.

    The other integers of a generator's state are in the same tensor as its array of numbers.
    """
    version, words, following = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
    }
    if following is not None:
        states["python_gauss"] = torch.tensor([following], dtype=torch.float64)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, array, position, has_gauss, gauss = numpy.random.get_state()
        if kind == "MT19937":
            numbers = [*map(int, array), position, has_gauss]
            states["numpy"] = torch.tensor(numbers, dtype=torch.int64)
            states["numpy_gauss"] = torch.tensor([gauss], dtype=torch.float64)
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    tracked = get_rng_tracker().get_states()
    return states | {_tracked() + name: state for name, state in tracked.items()}


def _tracked() -> str:
    # The name contains the device, because a generator of another device cannot use this state.
    return f"{_TRACKED}{default_generator().device.type}."


def restore(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore the generators from ``states``. A generator without an entry in ``states`` is left unchanged.

    Raises:
        CheckpointError: The states do not come from :func:`collect`.
    """
    try:
        for name, put in _restorers(states, device).items():
            if name in states:
                put(states[name])
        _restore_tracked(states)
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"the random states in the checkpoint cannot be used: {error}; it was changed after it was written"
        ) from None


def _restorers(
    states: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, Callable[[torch.Tensor], Any]]:
    def python(state: torch.Tensor) -> None:
        version, *words = state.tolist()
        following = states["python_gauss"].item() if "python_gauss" in states else None
        random.setstate((version, tuple(words), following))

    def numpy(state: torch.Tensor) -> None:
        module = sys.modules.get("numpy")
        if module is not None:
            *words, position, has_gauss = state.tolist()
            array = module.array(words, dtype=module.uint32)
            gauss = states["numpy_gauss"].item()
            module.random.set_state(("MT19937", array, position, has_gauss, gauss))

    restorers: dict[str, Callable[[torch.Tensor], Any]] = {
        "torch": torch.set_rng_state,
        "python": python,
        "numpy": numpy,
    }
    if device.type == "cuda":
        restorers["cuda"] = lambda state: torch.cuda.set_rng_state(state, device)
    return restorers


def _restore_tracked(states: Mapping[str, torch.Tensor]) -> None:
    """Restore the tracker's states by name, including states that the script has not added yet.

    Other states are left unchanged.
    """
    prefix = _tracked()
    tracked = {
        name.removeprefix(prefix): state.to(torch.uint8).clone()
        for name, state in states.items()
        if name.startswith(prefix)
    }
    for state in tracked.values():
        # This raises an error if the tensor is not a state, before the tracker changes.
        torch.Generator(default_generator().device).set_state(state)
    tracker = get_rng_tracker()
    tracker.set_states(tracker.get_states() | tracked)

"""Random generators: named states besides the default one, and snapshots that the backward pass restores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from zero_runtime.errors import UsageError

# DeepSpeed's name of the random state that is different on each model-parallel rank.
MODEL_PARALLEL: Final = "model-parallel-rng"


def default_generator() -> torch.Generator:
    """Return the generator that models draw from: the generator of the current CUDA device, or else of the CPU."""
    if torch.cuda.is_available():
        number = torch.cuda.current_device()  # this call also creates the generators
        return torch.cuda.default_generators[number]
    return torch.default_generator


class RNGTracker:
    """A set of named random states, in addition to the state of the default generator.

    If all model-parallel ranks compute the same values, such as the dropout of a complete activation, they draw
    the same numbers. For their own shards, they draw different numbers. They :meth:`fork` a state that has a
    different seed on each rank.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Remove all states."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the dictionary of states by name."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace all states with ``states``, a result of :meth:`get_states`."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state ``name`` with ``seed``.

        Raises:
            UsageError: The seed or the name is already in use.
        """
        if seed in self._seeds:
            raise UsageError(f"seed {seed} is in use by another random state; give {name!r} one of its own")
        if name in self._states:
            raise UsageError(f"the random state {name!r} was added before; reset() forgets all of them")
        self._seeds.add(seed)
        self._states[name] = torch.Generator(default_generator().device).manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Enter a context in which random numbers are drawn from state ``name``.

        After the context, the default generator continues from its earlier state.

        Raises:
            UsageError: There is no such state.
        """
        if name not in self._states:
            known = ", ".join(sorted(self._states)) or "none"
            raise UsageError(
                f"there is no random state {name!r} (there are: {known}); call add({name!r}, seed) first"
            )
        generator = default_generator()
        before = generator.get_state()
        generator.set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = generator.get_state()
            generator.set_state(before)


_tracker: Final = RNGTracker()


def get_rng_tracker() -> RNGTracker:
    """Return the tracker of this process. A region that is recomputed in the backward pass restores its states."""
    return _tracker


class RandomStates:
    """A snapshot of all random states: of the CPU, of the devices of ``tensors``, and of the tracker."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        elsewhere = [tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")]
        self._kind = elsewhere[0].device.type if elsewhere else "cuda"
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*elsewhere) if elsewhere else ([], [])
        self._tracked = _tracker.get_states()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Enter a context in which the generators have the states of the snapshot.

        After the context, the generators continue from their earlier states.
        """
        tracked = _tracker.get_states()
        with torch.random.fork_rng(devices=self._devices, device_type=self._kind):
            torch.set_rng_state(self._cpu)
            if self._devices:
                set_device_states(self._devices, self._states, device_type=self._kind)
            _tracker.set_states(self._tracked)
            try:
                yield
            finally:
                _tracker.set_states(tracked)

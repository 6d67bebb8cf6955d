"""Open checkpoints of any format: they provide the manifest, and read tensors by name and range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from zero_runtime.checkpoint.files.checkpoint_manifest import Manifest, ParameterFacts
from zero_runtime.errors import CheckpointError
from zero_runtime.experimental.compression.residuals import Layout
from zero_runtime.optimizer_step.fragments import NumberTensor, Scalar


class TensorSource(Protocol):
    """An open file that reads ranges of its tensors on request."""

    def get_tensor(self, key: str) -> torch.Tensor:
        """Return the complete tensor of ``key``."""

    def get_slice(self, key: str) -> Any:
        """Return a lazy view of the tensor of ``key``. Indexing the view with a slice reads these elements."""


class StoredRange(NamedTuple):
    """Consecutive elements of a tensor, stored in one file."""

    start: int
    numel: int
    dtype: torch.dtype
    file: TensorSource
    key: str


class OpenCheckpoint:
    """The base class of checkpoints of all formats. A subclass sets the manifest and adds the stored ranges.

    Args:
        directory: The directory of the checkpoint.
        rounding: The dtype to which ``read_master`` rounds, by parameter. Parameters without an entry are not
            rounded.

    Attributes:
        manifest: Everything in the checkpoint except tensors.
        residual_layout: The ranks that used each element of the residuals of gradient compression. None if the
            checkpoint does not record this.
    """

    manifest: Manifest
    residual_layout: Layout | None = None

    def __init__(self, directory: Path, rounding: Mapping[str, torch.dtype] | None = None) -> None:
        self.directory = directory
        self._rounding = rounding or {}
        self._ranges: dict[tuple[str, str], list[StoredRange]] = {}
        self._scalars: dict[str, dict[str, Scalar | NumberTensor]] = {}
        self._states: dict[str, dict[str, torch.dtype]] = {}
        self._other_state_keys: dict[str, dict[str, str]] = {}

    def verify(self, ranks: Iterable[int]) -> None:
        """Compare files with their checksums. ``ranks`` are the numbers of the files in ``manifest.files``.

        Raises:
            CheckpointError: The content of a file differs from the content that was written.
        """
        raise CheckpointError(f"{self.directory} has no checksums")

    def decode(self, value: Any) -> Any:
        """Return a value of the manifest as it was passed to ``save``."""
        return value

    # Parameters.

    @property
    def parameters(self) -> Mapping[str, ParameterFacts]:
        """The parameters that are stored, by name."""
        return {
            name: each
            for name, each in self.manifest.parameters.items()
            if name not in self.manifest.excluded
        }

    def name_of(self, name: str) -> str:
        """Return the name under which parameter or buffer ``name`` is stored.

        This is ``name`` itself, or the name of the tensor that it is tied to.
        """
        return self.manifest.aliases.get(name, name)

    def has(self, name: str) -> bool:
        """Return whether parameter ``name`` is stored."""
        stored_name = self.name_of(name)
        return stored_name in self.manifest.parameters and stored_name not in self.manifest.excluded

    def read_value(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with the elements of parameter ``name`` that begin at ``start``.

        The elements are read in the precision that is stored.
        """
        self._read("value", self.name_of(name), start, target)

    def read_master(self, name: str, start: int, target: torch.Tensor) -> None:
        """Read the tensor that the optimizer updates, in the same way as ``read_value``."""
        self.read_value(name, start, target)
        if name in self._rounding:
            target.copy_(target.to(self._rounding[name]))

    # The optimizer's state.

    def state_dtypes(self, name: str) -> Mapping[str, torch.dtype]:
        """Return the dtypes of the elementwise state tensors of parameter ``name``, by name of the state."""
        return self._states.get(self.name_of(name), {})

    def read_state(self, state: str, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with the elements of a state tensor of parameter ``name`` that begin at ``start``."""
        self._read(f"state.{state}", self.name_of(name), start, target)

    def scalars(self, name: str) -> Mapping[str, Scalar | NumberTensor]:
        """Return the state values of parameter ``name`` that are not tensors or have one element."""
        return self._scalars.get(self.name_of(name), {})

    def whole(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return the state tensors of parameter ``name`` whose shapes differ from the parameter's shape."""
        name = self.name_of(name)
        return {
            state: self._tensor("whole", key) for state, key in self._other_state_keys.get(name, {}).items()
        }

    # Buffers and the states of ranks.

    def buffer(self, name: str, rank: int) -> torch.Tensor:
        """Return the buffer ``name`` of ``rank``, or that of rank 0 if ``rank`` did not store its own."""
        name = self.name_of(name)
        by_rank = {stored.start: stored for stored in self._ranges.get(("buffer", name), ())}
        if not by_rank:
            raise CheckpointError(
                f"{self.directory} lacks buffer {name!r}, which its manifest names; load another tag"
            )
        stored = by_rank.get(rank, by_rank.get(0))
        assert stored is not None
        return stored.file.get_tensor(stored.key)

    def random_states(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the states of the random generators of ``rank``, by name."""
        return self._of_rank("random", rank)

    def residuals(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the residuals of gradient compression of ``rank``, by parameter."""
        return self._of_rank("residual", rank)

    def _of_rank(self, wanted: str, rank: int) -> dict[str, torch.Tensor]:
        return {
            name: stored.file.get_tensor(stored.key)
            for (kind, name), ranges in self._ranges.items()
            if kind == wanted
            for stored in ranges
            if stored.start == rank
        }

    # For subclasses.

    def _add(self, kind: str, name: str, stored: StoredRange) -> None:
        """Add a stored range of ``kind``: value, state.<state>, whole, buffer, random, residual or json."""
        self._ranges.setdefault((kind, name), []).append(stored)
        if kind.startswith("state."):
            self._states.setdefault(name, {})[kind.removeprefix("state.")] = stored.dtype

    def _check_complete(self) -> None:
        """Sort the stored ranges, and check that they cover each parameter. Call this after all ranges are added.

        Raises:
            CheckpointError: An element of a parameter is in no range.
        """
        for ranges in self._ranges.values():
            ranges.sort(key=lambda stored: stored.start)
        for name, facts in self.parameters.items():
            covered = 0
            for stored in self._ranges.get(("value", name), ()):
                if stored.start > covered:
                    break
                covered = max(covered, stored.start + stored.numel)
            if covered < math.prod(facts.shape):
                raise CheckpointError(
                    f"{self.directory} lacks element {covered} of parameter {name!r} of {math.prod(facts.shape)} elements; "
                    "it was changed after it was written; load another tag"
                )

    def _tensor(self, kind: str, key: str) -> torch.Tensor:
        ranges = self._ranges.get((kind, key))
        if not ranges:
            raise CheckpointError(f"{self.directory} lacks the tensor {key!r}; load another tag")
        return ranges[0].file.get_tensor(key)

    def _read(self, kind: str, name: str, start: int, target: torch.Tensor) -> None:
        stop = start + target.numel()
        for stored, begin, end in self._overlaps(kind, name, start, stop):
            if begin != start:
                break
            values = stored.file.get_slice(stored.key)[begin - stored.start : end - stored.start]
            target.narrow(0, begin - (stop - target.numel()), end - begin).copy_(values)
            start = end
        if start < stop:
            raise CheckpointError(
                f"{self.directory} lacks elements {start} to {stop} of {kind} of parameter {name!r}; load another tag"
            )

    def _overlaps(
        self, kind: str, name: str, start: int, stop: int
    ) -> Iterator[tuple[StoredRange, int, int]]:
        for stored in self._ranges.get((kind, name), ()):
            begin, end = max(start, stored.start), min(stop, stored.start + stored.numel)
            if begin < end:
                yield stored, begin, end

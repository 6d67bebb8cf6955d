"""An open checkpoint: its manifest, and every tensor in it by name and range."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from zero_runtime.checkpoint import values
from zero_runtime.checkpoint.contents import METADATA
from zero_runtime.checkpoint.manifest import ParameterFacts, RankFile, read_manifest
from zero_runtime.checkpoint.tensor_file import DTYPES
from zero_runtime.errors import CheckpointError
from zero_runtime.fragments import NumberTensor, Scalar

_CHUNK: Final = 1 << 20  # bytes that are summed up at once


class _Piece(NamedTuple):
    """Consecutive elements of a tensor, in one file."""

    start: int
    numel: int
    dtype: torch.dtype
    file: Any
    key: str


class Checkpoint:
    """A checkpoint whose files are all there, as long as they should be, and hold every element of every parameter.

    Only headers are read here. :meth:`verify` reads whole files; the ``read_...`` methods read the ranges they are
    asked for.

    Args:
        directory: of the checkpoint.
        rounding: by parameter, the dtype to which ``read_master`` rounds; empty for none.

    Attributes:
        manifest: what it says of itself.

    Raises:
        CheckpointError: it is not a checkpoint, or a damaged one; with what is wrong and what to do.
    """

    def __init__(self, directory: Path, rounding: Mapping[str, torch.dtype] | None = None) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        self._rounding = rounding or {}
        self._pieces: dict[tuple[str, str], list[_Piece]] = {}
        self._scalars: dict[str, dict[str, Scalar | NumberTensor]] = {}
        self._states: dict[str, dict[str, torch.dtype]] = {}
        self._whole: dict[str, dict[str, str]] = {}
        self._files: list[Any] = []
        for rank, each in enumerate(self.manifest.files):
            self._open(rank, each)
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.start)
        self._check_complete()

    def verify(self, ranks: Iterable[int]) -> None:
        """Compare the files of ``ranks`` with their checksums.

        Raises:
            CheckpointError: one has other content than it was written with.
        """
        for rank in ranks:
            each = self.manifest.files[rank]
            crc = 0
            buffer = memoryview(bytearray(_CHUNK))
            with (self.directory / each.name).open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    crc = zlib.crc32(buffer[:count], crc)
            if crc != each.crc32:
                raise CheckpointError(
                    f"{self.directory / each.name} has the checksum {crc:08x}, and was written with {each.crc32:08x}: it is "
                    "damaged, or of another save; copy it again, or load another tag"
                )

    # Parameters.

    @property
    def parameters(self) -> Mapping[str, ParameterFacts]:
        """The parameters that are kept, by name."""
        return {
            name: each
            for name, each in self.manifest.parameters.items()
            if name not in self.manifest.excluded
        }

    def name_of(self, name: str) -> str:
        """The name under which parameter or buffer ``name`` is kept: its own, or that of what it is tied to."""
        return self.manifest.aliases.get(name, name)

    def has(self, name: str) -> bool:
        """Whether parameter ``name`` is kept."""
        found = self.name_of(name)
        return found in self.manifest.parameters and found not in self.manifest.excluded

    def read_value(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with elements from ``start`` of parameter ``name``, as exactly as they are kept."""
        self._read("value", self.name_of(name), start, target)

    def read_master(self, name: str, start: int, target: torch.Tensor) -> None:
        """As ``read_value``, for the tensor that an optimizer updates."""
        self.read_value(name, start, target)
        if name in self._rounding:
            target.copy_(target.to(self._rounding[name]))

    # The optimizer's state.

    def state_dtypes(self, name: str) -> Mapping[str, torch.dtype]:
        """The state tensors of parameter ``name`` that have an element for each of its own."""
        return self._states.get(self.name_of(name), {})

    def read_state(self, state: str, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with elements from ``start`` of a state tensor of parameter ``name``."""
        self._read(f"state.{state}", self.name_of(name), start, target)

    def scalars(self, name: str) -> Mapping[str, Scalar | NumberTensor]:
        """The state values of parameter ``name`` that are one number, or none."""
        return self._scalars.get(self.name_of(name), {})

    def whole(self, name: str) -> Mapping[str, torch.Tensor]:
        """The state tensors of parameter ``name`` of other shapes."""
        name = self.name_of(name)
        return {state: self._tensor("whole", key) for state, key in self._whole.get(name, {}).items()}

    # What else there is.

    def buffer(self, name: str, rank: int) -> torch.Tensor:
        """A buffer: that of ``rank`` where it is kept, and of rank 0 elsewhere."""
        name = self.name_of(name)
        pieces = {piece.start: piece for piece in self._pieces.get(("buffer", name), ())}
        if not pieces:
            raise CheckpointError(
                f"{self.directory} lacks buffer {name!r}, which its manifest names; load another tag"
            )
        piece = pieces.get(rank, pieces.get(0))
        assert piece is not None
        return piece.file.get_tensor(piece.key)

    def random_states(self, rank: int) -> dict[str, torch.Tensor]:
        """The states of the random generators of ``rank``, by name."""
        return {
            name: piece.file.get_tensor(piece.key)
            for (kind, name), pieces in self._pieces.items()
            if kind == "random"
            for piece in pieces
            if piece.start == rank
        }

    def decode(self, value: Any) -> Any:
        """A value of the manifest as it was given to ``save``."""
        return values.decode(value, lambda key: self._tensor("json", key))

    # Below.

    def _open(self, rank: int, each: RankFile) -> None:
        path = self.directory / each.name
        try:
            found = path.stat().st_size
        except OSError:
            raise CheckpointError(
                f"{path}, the file of rank {rank}, is missing; copy all {len(self.manifest.files)} files that "
                f"{self.directory / 'manifest.json'} names, or load another tag"
            ) from None
        if found != each.num_bytes:
            raise CheckpointError(
                f"{path} has {found} bytes, and was written with {each.num_bytes}: it was cut off or replaced; copy it "
                "again, or load another tag"
            )
        safetensors = _safetensors()
        try:
            file = safetensors.safe_open(path, framework="pt")
            told = json.loads(file.metadata()[METADATA])
            if told["rank"] != rank or told["world_size"] != len(self.manifest.files):
                raise ValueError(f"it is of rank {told['rank']} of {told['world_size']}")
            self._files.append(file)
            for key in file.keys():  # noqa: SIM118 - it is no dict
                self._index(rank, file, key)
            for group in told["scalars"]:
                scalars = {name: _scalar(value) for name, value in group["scalars"].items()}
                self._scalars.update(dict.fromkeys(group["parameters"], scalars))
        except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is not the file of rank {rank} of this checkpoint ({error}); copy it again, or load another tag"
            ) from None

    def _index(self, rank: int, file: Any, key: str) -> None:
        kind, _, rest = key.partition("/")
        view = file.get_slice(key)
        numel, dtype = math.prod(view.get_shape()), DTYPES[view.get_dtype()]
        if kind in ("buffer", "random"):
            self._pieces.setdefault((kind, rest), []).append(_Piece(rank, numel, dtype, file, key))
            return
        if kind == "json":
            self._pieces[kind, key] = [_Piece(0, numel, dtype, file, key)]
            return
        start, _, name = rest.partition("/")
        if kind.startswith("whole."):
            self._pieces["whole", key] = [_Piece(0, numel, dtype, file, key)]
            self._whole.setdefault(name, {})[kind.removeprefix("whole.")] = key
            return
        self._pieces.setdefault((kind, name), []).append(_Piece(int(start), numel, dtype, file, key))
        if kind.startswith("state."):
            self._states.setdefault(name, {})[kind.removeprefix("state.")] = dtype

    def _check_complete(self) -> None:
        for name, facts in self.parameters.items():
            covered = 0
            for piece in self._pieces.get(("value", name), ()):
                if piece.start > covered:
                    break
                covered = max(covered, piece.start + piece.numel)
            if covered < math.prod(facts.shape):
                raise CheckpointError(
                    f"{self.directory} lacks element {covered} of parameter {name!r} of {math.prod(facts.shape)} elements; "
                    "it was changed after it was written; load another tag"
                )

    def _tensor(self, kind: str, key: str) -> torch.Tensor:
        pieces = self._pieces.get((kind, key))
        if not pieces:
            raise CheckpointError(f"{self.directory} lacks the tensor {key!r}; load another tag")
        return pieces[0].file.get_tensor(key)

    def _read(self, kind: str, name: str, start: int, target: torch.Tensor) -> None:
        stop = start + target.numel()
        for piece, begin, end in self._overlaps(kind, name, start, stop):
            if begin != start:
                break
            part = piece.file.get_slice(piece.key)[begin - piece.start : end - piece.start]
            target.narrow(0, begin - (stop - target.numel()), end - begin).copy_(part)
            start = end
        if start < stop:
            raise CheckpointError(
                f"{self.directory} lacks elements {start} to {stop} of {kind} of parameter {name!r}; load another tag"
            )

    def _overlaps(self, kind: str, name: str, start: int, stop: int) -> Iterator[tuple[_Piece, int, int]]:
        for piece in self._pieces.get((kind, name), ()):
            begin, end = max(start, piece.start), min(stop, piece.start + piece.numel)
            if begin < end:
                yield piece, begin, end


def _safetensors() -> Any:
    try:
        return import_module("safetensors")
    except ImportError:
        raise CheckpointError(
            "checkpoints are read by the package safetensors, which is not installed; install commprof[train], or "
            "safetensors alone"
        ) from None


def _scalar(told: Mapping[str, Any]) -> Scalar | NumberTensor:
    value = values.decode(told["value"], _no_tensor)
    return NumberTensor(value, getattr(torch, told["dtype"])) if "dtype" in told else value


def _no_tensor(key: str) -> torch.Tensor:
    raise CheckpointError(f"a state value of the checkpoint stands for the tensor {key!r}; expected a number")

"""An open checkpoint in the format of zero_runtime."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from zero_runtime.checkpoint.files import values
from zero_runtime.checkpoint.files.checkpoint_manifest import RankFile, read_manifest
from zero_runtime.checkpoint.files.contents import METADATA
from zero_runtime.checkpoint.files.tensor_file import DTYPES
from zero_runtime.checkpoint.opened import OpenCheckpoint, StoredRange
from zero_runtime.errors import CheckpointError
from zero_runtime.experimental.compression.residuals import layout_of
from zero_runtime.optimizer_step.fragments import NumberTensor, Scalar

_CHUNK: Final = 1 << 20  # The number of bytes that are read and checksummed at a time.


class Checkpoint(OpenCheckpoint):
    """A checkpoint of this runtime.

    Opening it checks that all files exist, have the recorded sizes and cover every parameter. Opening reads
    headers only. :meth:`verify` reads complete files, and the ``read_...`` methods read the requested ranges.

    Raises:
        CheckpointError: The directory is not a checkpoint, or the checkpoint is damaged.
    """

    def __init__(self, directory: Path, rounding: Mapping[str, torch.dtype] | None = None) -> None:
        super().__init__(directory, rounding)
        self.manifest = read_manifest(directory)
        for rank, each in enumerate(self.manifest.files):
            self._open(rank, each)
        self._check_complete()

    def verify(self, ranks: Iterable[int]) -> None:
        """Compare the files of ``ranks`` with their checksums.

        Raises:
            CheckpointError: The content of a file differs from the content that was written.
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

    def decode(self, value: Any) -> Any:
        """Return a value of the manifest as it was passed to ``save``."""
        return values.decode(value, lambda key: self._tensor("json", key))

    def _open(self, rank: int, rank_file: RankFile) -> None:
        path = self.directory / rank_file.name
        try:
            num_bytes = path.stat().st_size
        except OSError:
            raise CheckpointError(
                f"{path}, the file of rank {rank}, is missing; copy all {len(self.manifest.files)} files that "
                f"{self.directory / 'manifest.json'} names, or load another tag"
            ) from None
        if num_bytes != rank_file.num_bytes:
            raise CheckpointError(
                f"{path} has {num_bytes} bytes, and was written with {rank_file.num_bytes}: it was cut off or "
                "replaced; copy it "
                "again, or load another tag"
            )
        safetensors = _safetensors()
        try:
            file = safetensors.safe_open(path, framework="pt")
            content = json.loads(file.metadata()[METADATA])
            if content["rank"] != rank or content["world_size"] != len(self.manifest.files):
                raise ValueError(f"it is of rank {content['rank']} of {content['world_size']}")
            for key in file.keys():  # noqa: SIM118 - it is no dict
                self._index(rank, file, key)
            self.residual_layout = layout_of(content.get("residuals"))
            for group in content["scalars"]:
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
        if kind in ("buffer", "random", "residual"):
            self._add(kind, rest, StoredRange(rank, numel, dtype, file, key))
            return
        if kind == "json":
            self._add(kind, key, StoredRange(0, numel, dtype, file, key))
            return
        start, _, name = rest.partition("/")
        if kind.startswith("whole."):
            self._add("whole", key, StoredRange(0, numel, dtype, file, key))
            self._other_state_keys.setdefault(name, {})[kind.removeprefix("whole.")] = key
            return
        self._add(kind, name, StoredRange(int(start), numel, dtype, file, key))


def _safetensors() -> Any:
    try:
        return import_module("safetensors")
    except ImportError:
        raise CheckpointError(
            "checkpoints are read by the package safetensors, which is not installed; install commprof[train], or "
            "safetensors alone"
        ) from None


def _scalar(encoded: Mapping[str, Any]) -> Scalar | NumberTensor:
    value = values.decode(encoded["value"], _no_tensor)
    if "dtype" not in encoded:
        return value  # type: ignore[no-any-return]
    return NumberTensor(value, getattr(torch, encoded["dtype"]), tuple(encoded.get("shape", ())))


def _no_tensor(key: str) -> torch.Tensor:
    raise CheckpointError(f"a state value of the checkpoint refers to the tensor {key!r}; expected a number")

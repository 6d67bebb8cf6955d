"""The file ``predictions.json``, which a sweep writes into the directory of its runs before the first run."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.errors import SchemaError, TraceError, UsageError

PREDICTIONS_NAME: Final = "predictions.json"
_FORMAT: Final = "commprof-predictions"
_LARGEST_FILE: Final = 16 * 2**20


class PredictionsFile(NamedTuple):
    """The predictions of a sweep.

    Attributes:
        predictions: The predictions, as ``commprof predict --json`` prints them.
        written: The date and time of the predictions, with UTC offset.
        run: The recorded run that the predictions are derived from.
        run_fingerprint: The fingerprint of the files of this run.
        world_size: The number of ranks that the predictions apply to.
    """

    predictions: Mapping[str, Any]
    written: str
    run: str
    run_fingerprint: str
    world_size: int

    @property
    def sha256(self) -> str:
        """The SHA-256 of the predictions as JSON with sorted keys and without spaces."""
        text = json.dumps(self.predictions, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def write_predictions(directory: Path, content: PredictionsFile) -> None:
    """Write the file into ``directory`` atomically. An existing file is never replaced.

    Raises:
        UsageError: The file exists.
        TraceError: The file cannot be written.
    """
    file = directory / PREDICTIONS_NAME
    text = json.dumps(
        {"format": _FORMAT, **content._asdict(), "sha256": content.sha256}, indent=1, allow_nan=False
    )
    temporary = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=f".{PREDICTIONS_NAME}-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(f"{text}\n")
        Path(temporary).chmod(0o644)
        file.hardlink_to(temporary)
    except FileExistsError:
        raise UsageError(
            f"{file} has the predictions of an earlier sweep, which are not replaced. Choose another --out"
        ) from None
    except OSError as error:
        raise TraceError(f"{file} cannot be written: {error.strerror}. Choose another --out") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def read_predictions(directory: Path) -> PredictionsFile | None:
    """Read the predictions in ``directory``. Return None if there is no such file.

    Raises:
        SchemaError: The file does not contain predictions, or was changed after it was written.
        TraceError: The file cannot be read.
    """
    file = directory / PREDICTIONS_NAME
    try:
        if not file.is_file():
            return None
        if file.stat().st_size > _LARGEST_FILE:
            raise SchemaError(
                f"{file} has more than {_LARGEST_FILE} bytes, so it is not a file of predictions"
            )
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError
        _check(content["predictions"])
        read = PredictionsFile(
            content["predictions"],
            datetime.fromisoformat(content["written"]).isoformat(),
            str(content["run"]),
            str(content["run_fingerprint"]),
            int(content["world_size"]),
        )
        stated = content["sha256"]
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SchemaError(
            f"{file} is not a file of predictions that commprof sweep --predict writes"
        ) from None
    if read.sha256 != stated:
        raise SchemaError(
            f"{file} was changed after it was written: its predictions have the SHA-256 {read.sha256}, and the file states "
            f"{stated}"
        )
    return read


def _check(predictions: Any) -> None:
    for setting in predictions["settings"]:
        if "refused" in setting:
            str(setting["refused"])
        else:
            [float(setting["step_ns"][name]) for name in ("median", "low", "high")]
        dict(setting["set"])

"""Reads and writes calibration files, which are JSON and described in ``docs/calibration.md``.

Uses only the standard library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from commprof.calibration.bandwidths import bus_factor
from commprof.calibration.fit import Fit
from commprof.calibration.results import Calibration, Timing
from commprof.errors import SchemaError, TraceError, UsageError
from commprof.version import __version__

FORMAT: Final = "commprof-calibration"
SCHEMA_VERSION: Final = 1
_LARGEST_FILE: Final = 16 * 2**20


def to_json(calibration: Calibration) -> str:
    """Return the JSON text of the file for ``calibration``."""
    fits = calibration.fits()
    content = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "commprof": __version__,
        "created": calibration.created,
        "torch": calibration.torch,
        "backend": calibration.backend,
        "backend_version": calibration.backend_version,
        "device": calibration.device,
        "dtype": calibration.dtype,
        "world_size": calibration.world_size,
        "hosts": list(calibration.hosts),
        "machine": dict(calibration.machine),
        "environment": dict(calibration.environment),
        "warmup": calibration.warmup,
        "ops": {
            op: {
                "bus_factor": bus_factor(op, calibration.world_size),
                "sizes": [_size(op, calibration.world_size, timing) for timing in timings],
                "fit": _fit(fits.get(op)),
            }
            for op, timings in calibration.timings.items()
        },
        "skipped": dict(calibration.skipped),
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _size(op: str, world_size: int, timing: Timing) -> dict[str, Any]:
    algbw = timing.payload_bytes / timing.time_ns * 1e9
    return {
        "payload_bytes": timing.payload_bytes,
        "iterations": timing.iterations,
        "time_ns": timing.time_ns,
        "low_ns": timing.low_ns,
        "high_ns": timing.high_ns,
        "algbw_bytes_per_s": round(algbw),
        "busbw_bytes_per_s": round(algbw * (bus_factor(op, world_size) or 0.0)),
    }


def _fit(fitted: Fit | None) -> dict[str, Any] | None:
    if fitted is None:
        return None
    alpha, beta = fitted.alpha_interval(), fitted.beta_interval()
    return {
        "alpha_ns": round(fitted.alpha_ns, 1),
        "alpha_low_ns": round(alpha.low or 0.0, 1),
        "alpha_high_ns": round(alpha.high or 0.0, 1),
        "beta_bytes_per_s": round(fitted.beta_bytes_per_s),
        "beta_low_bytes_per_s": round(beta.low or 0.0),
        "beta_high_bytes_per_s": None if beta.high is None else round(beta.high),
        "residual": round(fitted.residual, 6),
        "sizes": fitted.sizes,
    }


def check_target(path: Path, force: bool) -> None:
    """Raise UsageError before measuring if ``path`` cannot become the file of a calibration."""
    if path.is_dir():
        raise UsageError(
            f"--out {path} is a directory; the name of a file was expected, such as {path / 'calibration.json'}"
        )
    if not path.exists():
        if not path.parent.is_dir():
            raise UsageError(f"--out {path}: there is no directory {path.parent}; make it first")
        return
    if not force:
        raise UsageError(f"{path} is there already; choose another --out, or --force to replace it")
    try:
        read_calibration(path)
    except SchemaError:
        pass
    except TraceError:
        raise UsageError(
            f"{path} is not a calibration file, and --force replaces only calibration files; choose another --out"
        ) from None


def write_calibration(path: Path, calibration: Calibration, force: bool = False) -> None:
    """Write the file atomically.

    Raises:
        UsageError: the file exists and may not be replaced.
        TraceError: the file cannot be written.
    """
    check_target(path, force)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with beside.open("x", encoding="utf-8") as stream:
                stream.write(to_json(calibration))
                stream.flush()
                os.fsync(stream.fileno())
            if force:
                beside.replace(path)
            else:
                path.hardlink_to(beside)  # fails if another process has created ``path`` meanwhile
        finally:
            beside.unlink(missing_ok=True)
    except FileExistsError:
        raise UsageError(
            f"{path} has appeared meanwhile; choose another --out, or --force to replace it"
        ) from None
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from error


def read_calibration(path: Path) -> Calibration:
    """Return the calibration in the file ``path``.

    The fits in the file are not read. They are recomputed from the times.

    Raises:
        TraceError: the file cannot be read, is not a calibration file, or is damaged.
        SchemaError: a newer version of commprof wrote the file.
    """
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise TraceError(f"{path} is larger than any calibration; {FORMAT} JSON was expected")
        content = json.loads(path.read_bytes().decode("utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is no JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise TraceError(
            f"{path} is no calibration: its format is not {FORMAT!r}. Make one: commprof calibrate --out FILE"
        )
    version = content.get("schema_version")
    if type(version) is not int or version < 1:
        raise TraceError(f"{path} is damaged: schema_version is {version!r}, a whole number was expected")
    if version > SCHEMA_VERSION:
        raise SchemaError(
            f"{path} has schema version {version}; this commprof reads up to {SCHEMA_VERSION}. Update commprof"
        )
    try:
        return _from_content(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(
            f"{path} is damaged: {type(error).__name__} {str(error)[:200]}. Calibrate again"
        ) from None


def _from_content(content: Mapping[str, Any]) -> Calibration:
    return Calibration(
        created=_text(content["created"]),
        torch=_text(content["torch"]),
        backend=_text(content["backend"]),
        backend_version=None if content["backend_version"] is None else _text(content["backend_version"]),
        device=_text(content["device"]),
        dtype=_text(content["dtype"]),
        world_size=_count(content["world_size"], least=2),
        hosts=tuple(map(_text, content["hosts"])),
        machine=dict(content["machine"]),
        environment={_text(name): _text(value) for name, value in content["environment"].items()},
        warmup=_count(content["warmup"], least=0),
        timings={_text(op): _timings(entry["sizes"]) for op, entry in content["ops"].items()},
        skipped={_text(op): _text(why) for op, why in content["skipped"].items()},
    )


def _timings(entries: Sequence[Mapping[str, Any]]) -> tuple[Timing, ...]:
    timings = [
        Timing(
            payload_bytes=_count(entry["payload_bytes"]),
            time_ns=_count(entry["time_ns"]),
            low_ns=_count(entry["low_ns"]),
            high_ns=_count(entry["high_ns"]),
            iterations=_count(entry["iterations"]),
        )
        for entry in entries
    ]
    return tuple(sorted(timings, key=lambda timing: timing.payload_bytes))


def _count(value: Any, least: int = 1) -> int:
    if type(value) is not int or not least <= value < 2**62:
        raise ValueError(f"{value!r} is no whole number from {least} on")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")

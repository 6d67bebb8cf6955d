"""What the files of a run look like that derived tables are made from."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any, Final

from commprof.trace.directory import COLLECTIVES_DIRECTORY

VERSION: Final = 16  # of what is derived: the index and the summaries
_INPUTS: Final = ("clocks", "clock_offsets", "steps", "aggregates", "buckets", "groups", "stalls")


def fingerprint(run: Path) -> str:
    """Another text whenever a file that the index and the summaries of ``run`` are made from changes, comes or goes."""
    files = [run / f"{name}.parquet" for name in _INPUTS]
    files += sorted((run / COLLECTIVES_DIRECTORY).glob("*.parquet"))
    files += sorted(run.glob("rank-*"))
    found: list[Any] = [VERSION]
    for file in files:
        with contextlib.suppress(OSError):
            status = file.stat()
            found.append((file.name, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()

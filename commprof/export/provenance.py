"""The provenance of an export (software, missing data, checksums) and its data dictionary."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from commprof.analysis.api import Run
from commprof.export.files import ExportedFile
from commprof.schema import SCHEMA_VERSION, Column
from commprof.version import __version__

DICTIONARY: Final = "data_dictionary.csv"
PROVENANCE: Final = "provenance.json"


def provenance_text(runs: Sequence[Run], files: Sequence[ExportedFile]) -> str:
    """Return the text of ``provenance.json``."""
    return json.dumps(strict_json(provenance(runs, files)), indent=2) + "\n"


def strict_json(value: Any) -> Any:
    """Return ``value`` with strings in place of the floats nan and inf.

    JSON has no such floats, and many readers refuse a whole file that contains them.
    """
    if isinstance(value, dict):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def provenance(runs: Sequence[Run], files: Sequence[ExportedFile]) -> dict[str, Any]:
    """Return the content of ``provenance.json`` for an export of ``runs``.

    The keys ``run`` and ``health`` describe the first run. The key ``runs`` describes all runs.
    """
    described = [_describe(run) for run in runs]
    return {
        "schema_version": SCHEMA_VERSION,
        "exported_by": f"commprof {__version__}",
        "export_command": list(getattr(sys, "orig_argv", sys.argv)),
        "run": described[0]["run"],
        "health": described[0]["health"],
        "runs": described,
        "files": [
            {"name": file.path.name, "rows": file.rows, "bytes": file.bytes, "sha256": file.sha256}
            for file in files
        ],
    }


def _describe(run: Run) -> dict[str, Any]:
    manifest, health = run.manifest, run.health
    config = json.dumps(manifest.config, sort_keys=True, separators=(",", ":"))
    return {
        "run": {
            "name": run.path.name,
            "path": str(run.path.absolute()),
            "recorded_by": f"commprof {manifest.commprof_version}",
            "schema_version": manifest.schema_version,
            "state": health.state,
            "command": list(manifest.command),
            "script": manifest.script,
            "started_realtime_ns": manifest.started_realtime_ns,
            "ended_realtime_ns": manifest.ended_realtime_ns,
            "exit_code": manifest.exit_code,
            "first_failed_rank": manifest.first_failed_rank,
            "world_size": manifest.world_size,
            "hosts": list(manifest.hosts),
            "python": manifest.python,
            "torch": manifest.torch,
            "platform": manifest.platform,
            "environment": dict(manifest.environment),
            "config": manifest.config,
            "config_sha256": None if manifest.config is None else hashlib.sha256(config.encode()).hexdigest(),
            "sweep": manifest.sweep,
        },
        "health": {
            "records": health.records,
            "lost": health.lost,
            "unseen": health.unseen,
            "torn": health.torn,
            "raised": health.raised,
            "incomplete": health.incomplete,
            "ranks_expected": health.ranks_expected,
            "ranks_recorded": health.ranks_recorded,
            "missing_ranks": list(health.missing_ranks),
            "notes": list(health.notes),
        },
    }


def data_dictionary(tables: Sequence[tuple[str, Sequence[Column]]]) -> pa.Table:
    """Return the data dictionary: one row per column of each table.

    Its columns are table, column, type, unit, nullable, values and description.
    """
    return pa.Table.from_pylist(
        [
            {
                "table": name,
                "column": column.name,
                "type": column.type,
                "unit": column.unit or None,
                "nullable": column.nullable,
                "values": ";".join(column.values) or None,
                "description": column.doc,
            }
            for name, columns in tables
            for column in columns
        ],
        schema=pa.schema(
            [
                *((name, pa.string()) for name in ("table", "column", "type", "unit")),
                ("nullable", pa.bool_()),
                ("values", pa.string()),
                ("description", pa.string()),
            ]
        ),
    )

"""Access a run in storage that only Spark reads: its small tables are downloaded, its records are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from commprof.analysis.relations.spark import explained
from commprof.errors import TraceError
from commprof.trace.directory import COLLECTIVES_DIRECTORY, ELSEWHERE_NAME, MANIFEST_NAME
from commprof.trace.rank_files.layout import EVENTS_SUFFIX, RECORDS_SUFFIX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FETCHED = "*.{json,parquet}"  # the manifest, the configuration and the small tables


def fetch(session: SparkSession, place: str, target: Path) -> None:
    """Copy the run at ``place`` without its records to the directory ``target``.

    The copy contains a file that names the location of the records.

    Args:
        place: The URL of the directory of a finalized run that Spark reads (``s3a://...``).

    Raises:
        TraceError: There is no run at ``place``, the run was not finalized, or Spark cannot read it.
        OSError: ``target`` cannot be written.
    """
    place = place.rstrip("/")
    with explained(f"the run at {place} cannot be read by Spark"):
        running = _names(_files(session, place, f"rank-*{{{RECORDS_SUFFIX},{EVENTS_SUFFIX}}}"))
        if running:
            raise TraceError(
                f"{place} holds {len(running)} files of ranks that were not finalised ({min(running)}); run commprof "
                "finalise where the run was recorded, and copy it again"
            )
        records = _names(_files(session, f"{place}/{COLLECTIVES_DIRECTORY}", "rank-*.parquet"))
        target.mkdir()
        for row in _files(session, place, _FETCHED).select("path", "content").toLocalIterator():
            (target / _name(row.path)).write_bytes(bytes(row.content))
    if not (target / MANIFEST_NAME).is_file():
        raise TraceError(
            f"{place} has no {MANIFEST_NAME}; give the directory of one run that commprof recorded"
        )
    content = {"run": place, "collectives": sorted(name.removesuffix(".parquet") for name in records)}
    (target / ELSEWHERE_NAME).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _files(session: SparkSession, place: str, names: str) -> DataFrame:
    """Return the files in directory ``place`` whose names match. Subdirectories are not searched."""
    return session.read.format("binaryFile").option("pathGlobFilter", names).load(place)


def _names(files: DataFrame) -> list[str]:
    return [_name(row.path) for row in files.select("path").toLocalIterator()]


def _name(path: str) -> str:
    return urlsplit(path).path.rpartition("/")[2] or path.rpartition("/")[2]

"""Find the algorithm and protocol that NCCL chose for the collectives of a run, from logs aligned with the run.

There are two sources. The first is an NCCL log with lines that print the choices, which the alignment assigns
to records. The second is the log of the NCCL Inspector, imported or aligned with the run.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.columns.detailed_answers import ALGORITHMS
from commprof.analysis.columns.frames import from_rows
from commprof.calibration.bandwidths import bus_factor
from commprof.trace.reader import Run

_RECORD: Final = ["rank", "attempt", "pid", "seq"]
_LINE: Final = ["file", "line"]
_CHOICE: Final = ["algorithm", "protocol", "channels"]
_KIND: Final = ["op", "group_desc", "group_ranks", "group_size", "payload_bytes", *_CHOICE]
_COLLECTIVE: Final = ["attempt", "pg", "group_ranks", "pg_seq"]
_TIMES: Final = ["device_begin_ns", "device_end_ns"]


def algorithms(run: Run) -> pd.DataFrame:
    """Return one row per operation, group, payload and choice: see :func:`commprof.analysis.api.algorithms`."""
    inspected, printed = _frame(run.table("nccl_algorithms")), _printed(run)
    known = pd.MultiIndex.from_frame(inspected[_RECORD])
    printed = printed[~pd.MultiIndex.from_frame(printed[_RECORD]).isin(known)]  # each record counts once
    choices = pd.concat([inspected, printed], ignore_index=True)
    if not len(choices):
        return from_rows([], ALGORITHMS.columns)
    columns = list(dict.fromkeys([*_RECORD, *_COLLECTIVE, *_KIND[:5], *_TIMES]))
    wanted = pa.table({"seq": pa.array(choices["seq"].unique(), pa.int64())})["seq"]
    filtered_parts = (
        part.filter(pc.is_in(part["seq"], wanted)) for part in run.parts("collectives", columns)
    )
    records = _frame(pa.concat_tables([_plain(part) for part in filtered_parts]))
    chosen_records = records.merge(choices[[*_RECORD, *_CHOICE]], on=_RECORD)
    rows = [
        _row(dict(zip(_KIND, key, strict=True)), of_kind)
        for key, of_kind in chosen_records.groupby(_KIND, dropna=False, sort=False)
    ]
    rows.sort(
        key=lambda row: (-row["collectives"] * row["payload_bytes"], *(str(row[name]) for name in _KIND))
    )
    return from_rows(rows, ALGORITHMS.columns)


def _printed(run: Run) -> pd.DataFrame:
    """Return the choices in the NCCL log of the run, each with the record with which its line is aligned."""
    tuning = run.table("nccl_tuning")
    tuning = tuning.filter(pc.and_(tuning["op_line"].is_valid(), tuning["algorithm"].is_valid()))
    if not len(tuning):
        return pd.DataFrame(columns=[*_RECORD, *_CHOICE])
    choices = _frame(tuning)
    choices = choices.assign(
        line=choices["op_line"], channels=choices["last_channel"] - choices["first_channel"] + 1
    )
    matches = run.table("matches")
    matches = _frame(
        matches.filter(pc.equal(matches["state"], "matched")).select(
            ["record_pid", *_LINE, *_RECORD[:2], "seq"]
        )
    )
    matches = matches[matches["line"].notna()].rename(columns={"record_pid": "pid"})
    record_choices = matches.merge(choices[[*_LINE, *_CHOICE]], on=_LINE)
    return record_choices[[*_RECORD, *_CHOICE]].drop_duplicates()


def _plain(part: pa.Table) -> pa.Table:
    """Return ``part`` with dictionary-encoded texts as plain texts."""
    for place, field in enumerate(part.schema):
        if pa.types.is_dictionary(field.type):
            part = part.set_column(place, field.name, part.column(place).cast(pa.string()))
    return part


def _frame(table: pa.Table) -> pd.DataFrame:
    integer_types = {pa.int32(): pd.Int64Dtype(), pa.int64(): pd.Int64Dtype()}
    frame: pd.DataFrame = _plain(table).to_pandas(types_mapper=integer_types.get)
    return frame


def _row(kind: dict[str, Any], records: pd.DataFrame) -> dict[str, Any]:
    kind = {name: None if pd.isna(value) else value for name, value in kind.items()}
    took = (records["device_end_ns"] - records["device_begin_ns"]).dropna().astype("float64")
    took = took[took > 0]
    row = kind | {"collectives": len(records[_COLLECTIVE].drop_duplicates()), "records": len(records)}
    if len(took):
        middle = float(took.median())
        algbw = int(kind["payload_bytes"]) / middle * 1e9
        row |= {
            "time_ns": round(middle),
            "algbw_bytes_per_s": algbw,
            "busbw_bytes_per_s": algbw * (bus_factor(str(kind["op"]), int(kind["group_size"])) or np.nan),
        }
    return row

"""The columns of the answers about pairs of ranks, buckets, lateness and alignments: see ``answers.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from commprof import schema
from commprof.schema import Column, Table


def _of(table: Table, name: str, **changes: Any) -> Column:
    return replace(table.column(name), source=None, **changes)


# What matrix() can be asked by.
MATRIX_BY: Final[dict[str, Column]] = {
    name: _of(schema.COLLECTIVES, name) for name in ("step", "phase", "op", "intended_op", "purpose", "pg")
}

# One column, one line.
# fmt: off
MATRIX: Final = Table(
    "matrix",
    "Bytes that each rank sends to each other.",
    (
        Column("sender", "int32", "global rank that sends"),
        Column("receiver", "int32", "global rank that receives"),
        Column("wire_bytes", "float64", "wire, modelled, and sends as they were recorded", unit="bytes"),
        Column("message_bytes", "int64", "of these the sends, as they were recorded", unit="bytes"),
    ),
    key=("sender", "receiver"),
)

OWNERS: Final = Table(
    "owners",
    "What each rank owns and receives of the reduces to one owner.",
    (
        Column("rank", "int32", "global rank"),
        Column("collectives", "int64", "reduces to this rank"),
        Column("payload_bytes", "int64", "payload: S of nccl-tests, of these", unit="bytes"),
        Column("received_bytes", "int64", "wire, modelled: what the others send it for them", unit="bytes"),
    ),
    key=("rank",),
)
# fmt: on

DETAILED_ANSWERS: Final[dict[str, Table]] = {
    "matrix": MATRIX,
    "owners": OWNERS,
}

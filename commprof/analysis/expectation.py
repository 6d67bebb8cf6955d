"""What a run's config asked for, by the rules of ``commprof.requested``: the level that no collective is read for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa

from commprof.analysis.frames import from_rows
from commprof.errors import CommprofError
from commprof.requested import zero
from commprof.schema import Column, Table

REQUESTED: Final = Table(
    "requested",
    "What the config should send, from its words and the parameters alone.",
    (
        Column("when", "string", "how often: init, micro_step or step"),
        Column("purpose", "string", "why"),
        Column("requested_op", "string", "the operation that the config asks for"),
        Column("issued_op", "string", "the operation that the rules then send"),
        Column("intended_op", "string", "the operation that this one stands for", True),
        Column("count", "int64", "how many of them"),
        Column("payload_bytes", "int64", "payload: S of nccl-tests, of all of them", unit="bytes"),
        Column("wire_bytes", "float64", "wire, modelled: mean bytes that a rank sends", unit="bytes"),
        Column("exact", "bool", "false where count needs the order in which gradients arrived"),
        Column("note", "string", "what a reader should know"),
    ),
)

NO_CONFIG: Final = "no config was recorded"
NOT_ZERO: Final = "the config has no zero_optimization, so it asks for nothing by ZeRO's rules"
UNREADABLE: Final = "the config cannot be read by ZeRO's rules"
NO_PARAMETERS: Final = "the run published no parameters, so nothing can be computed from their sizes"


class Requested(NamedTuple):
    """``op``: what the config asks for to reduce gradients, or None and ``reason``: why that is not known."""

    op: str | None
    reason: str | None


def why_no_zero_config(config: Mapping[str, Any] | None) -> str | None:
    """Why ``config`` says nothing about ZeRO; None when it does."""
    if config is None:
        return NO_CONFIG
    return None if "zero_optimization" in config else NOT_ZERO


def requested_reduction(config: Mapping[str, Any] | None) -> Requested:
    """The operation that the words of ``config`` ask for to reduce gradients.

    ``config`` is the user's own: the one that an engine publishes has its keys already resolved to what it does.
    """
    reason = why_no_zero_config(config)
    if reason is not None:
        return Requested(None, reason)
    op = zero.requested_gradient_op(config)
    return Requested(op, None if op else UNREADABLE)


def requested(
    config: Mapping[str, Any] | None, parameters: pa.Table, world_size: int, backend: str
) -> tuple[pd.DataFrame, str | None]:
    """What ``config`` should send, one row per purpose (:data:`REQUESTED`), and why there is none.

    Args:
        config: the config as the user wrote it.
        parameters: the ``parameters`` table of the run.
        world_size: ranks of the data-parallel group.
        backend: backend of that group.
    """
    rows: list[zero.Expectation] = []
    reason = why_no_zero_config(config) or (None if parameters.num_rows else NO_PARAMETERS)
    if reason is None and config is not None:
        listed = [
            zero.Parameter(*(row[name] for name in zero.Parameter._fields)) for row in parameters.to_pylist()
        ]
        try:
            rows = zero.expected(config, listed, world_size, backend=backend)
        except CommprofError as error:
            reason = str(error)
    return from_rows((row._asdict() for row in rows), REQUESTED.columns), reason

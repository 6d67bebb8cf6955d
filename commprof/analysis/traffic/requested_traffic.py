"""The requested level of a run: what its config should send, by the rules of ``commprof.requested``, without records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis.columns.answers import REQUESTED
from commprof.analysis.columns.frames import from_rows
from commprof.ledger.requests.request import (
    RecordedRun,
    request_of,
    why_no_zero_config,
    without_derived_reduction,
)
from commprof.requested.zero import zero_stages

UNREADABLE: Final = "the config cannot be read by ZeRO's rules"


class Requested(NamedTuple):
    """``op``: the gradient reduction that the config requests, or None and ``reason``: why it is not known.

    ``explanation`` is a clause: the keys that request it, and what a runtime sends instead.
    """

    op: str | None
    reason: str | None
    explanation: str | None = None


def requested_reduction(
    config: Mapping[str, Any] | None, effective: Mapping[str, Any] | None = None
) -> Requested:
    """The gradient reduction that the keys of the config request.

    Args:
        config: the config as the user wrote it.
        effective: the one that the engine published, for a script that has no config file.
    """
    if config is None and effective is not None:
        config = without_derived_reduction(effective)
    reason = why_no_zero_config(config)
    if reason is not None:
        return Requested(None, reason)
    op = zero_stages.requested_gradient_op(config)
    return Requested(op, None if op else UNREADABLE, zero_stages.describe(config) if op else None)


def requested(run: RecordedRun) -> tuple[pd.DataFrame, str | None]:
    """What the config of ``run`` should send, one row per purpose (:data:`answers.REQUESTED`), and the reason if there is
    none.

    The rules are those of the runtime that the run used, as in the ledger.
    """
    request = request_of(run)
    rows = [] if request.reason is not None else request.rows()
    return from_rows((row._asdict() for row in rows), REQUESTED.columns), request.reason

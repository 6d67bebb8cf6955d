"""Compute the requested level of a run: the traffic that its configuration requests.

The rules are those of ``commprof.requested``. Records are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis.columns.answers import REQUESTED
from commprof.analysis.columns.frames import from_rows
from commprof.errors import CommprofError
from commprof.ledger.requests.request import (
    RecordedRun,
    request_of,
    why_no_zero_config,
    without_derived_reduction,
)
from commprof.ledger.requests.wrapped_models import reading_wrappers, wrapped_models_of
from commprof.requested.zero import zero_stages
from commprof.schema import Purpose

UNREADABLE: Final = "the config cannot be read by ZeRO's rules"
NOTHING_REDUCED: Final = "the wrappers of its models reduced no gradients"


class Requested(NamedTuple):
    """The requested gradient reduction.

    Attributes:
        op: The gradient reduction that is requested. None if it is not known.
        reason: The reason why the reduction is not known, or None.
        explanation: A clause that contains the keys that request the reduction, and what a runtime sends
            instead.
    """

    op: str | None
    reason: str | None
    explanation: str | None = None


def requested_reduction(run: RecordedRun) -> Requested:
    """Return the gradient reduction that the wrappers of the models (DDP, FSDP) request.

    Without wrappers, the keys of the configuration determine the reduction. As in the ledger, a configuration
    that an engine has published takes precedence, regardless of what wraps its model.
    """
    manifest = run.manifest
    if manifest.effective_config is None and run.table("wrappers").num_rows:
        return _of_wrappers(run)
    return _of_config(manifest.config, manifest.effective_config)


def _of_config(config: Mapping[str, Any] | None, effective: Mapping[str, Any] | None) -> Requested:
    """Return what the configuration requests as the user wrote it.

    For a script without a configuration file, the configuration that the engine has published is used.
    """
    if config is None and effective is not None:
        config = without_derived_reduction(effective)
    reason = why_no_zero_config(config)
    if reason is not None:
        return Requested(None, reason)
    op = zero_stages.requested_gradient_op(config)
    return Requested(op, None if op else UNREADABLE, zero_stages.describe(config) if op else None)


def _of_wrappers(run: RecordedRun) -> Requested:
    """Return what the wrappers request. Several operations, as in HSDP, are in order of wire bytes."""
    try:
        with reading_wrappers():
            models = wrapped_models_of(run, {})
            ops = [] if models is None else models.reductions()
    except CommprofError as error:
        return Requested(None, str(error))
    unpredicted = {} if models is None else models.unpredicted
    if Purpose.GRADIENT_REDUCE in unpredicted or not ops:
        return Requested(None, unpredicted.get(Purpose.GRADIENT_REDUCE, NOTHING_REDUCED))
    return Requested(", ".join(ops), None)


def requested(run: RecordedRun) -> tuple[pd.DataFrame, str | None]:
    """Return what the configuration of ``run`` requests, and the reason if nothing is returned.

    There is one row per purpose (:data:`answers.REQUESTED`). The rules are those of the runtime that the run
    used, as in the ledger.
    """
    request = request_of(run)
    rows = [] if request.reason is not None else request.rows()
    return from_rows((row._asdict() for row in rows), REQUESTED.columns), request.reason

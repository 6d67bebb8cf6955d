"""Convert a prediction to JSON, for ``commprof predict --json`` and ``commprof sweep --predict``."""

from __future__ import annotations

from typing import Any

from commprof.prediction.api import Change, Promising
from commprof.prediction.predictions import Predicted, Prediction, Setting


def prediction_json(answer: Prediction) -> dict[str, Any]:
    """Return ``answer`` as JSON values. Times are integers in ns."""
    return {
        "recorded": {
            "step_ns": round(answer.recorded_ns),
            "exposed_ns": {purpose: round(ns) for purpose, ns in answer.recorded_exposed_ns.items()},
            "steps": answer.steps,
        },
        "replay": {"step_ns": round(answer.replay_ns), "error": round(answer.replay_error, 6)},
        "settings": [_setting(each) for each in answer.settings],
        "notes": answer.notes,
    }


def _setting(each: Predicted | tuple[Setting, str]) -> dict[str, Any]:
    if not isinstance(each, Predicted):
        return {"set": dict(each[0]), "refused": each[1]}
    return {
        "set": dict(each.setting),
        "step_ns": {
            "median": round(each.median_ns),
            "low": round(each.low_ns),
            "high": round(each.high_ns),
        },
        "exposed_ns": {purpose: round(ns) for purpose, ns in each.exposed_ns.items()},
        "why": each.why,
        "memory_bytes_per_rank": each.memory_bytes,
        "messages": each.messages,
        "comm_free_ns": round(each.comm_free_ns),
        "no_straggler_ns": round(each.no_straggler_ns),
        "critical_path": [
            {"what": what, "rank": rank, "ns": round(ns)} for (what, rank), ns in each.path.items()
        ],
    }


def promising_json(answer: Promising) -> dict[str, Any]:
    """Return the changes that are worth trying as JSON values."""
    return {
        "changes": [_change(each) for each in answer.changes],
        "tried": answer.tried,
        "refused": [{"set": setting, "refused": reason} for setting, reason in answer.refused],
        "reason": answer.reason or None,
    }


def _change(each: Change) -> dict[str, Any]:
    return {
        "set": each.setting,
        "recorded": each.recorded,
        "step_ns": {"median": each.step_ns, "low": each.low_ns, "high": each.high_ns},
        "gain_ns": {"median": each.gain_ns, "low": each.gain_low_ns, "high": each.gain_high_ns},
        "why": each.why,
        "memory_bytes_per_rank": each.memory_bytes,
    }

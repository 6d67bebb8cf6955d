"""A prediction as JSON: what ``commprof predict --json`` prints and ``commprof sweep --predict`` writes."""

from __future__ import annotations

from typing import Any

from commprof.prediction.predictions import Predicted, Prediction, Setting


def prediction_json(answer: Prediction) -> dict[str, Any]:
    """``answer`` as JSON values: times are integers in ns."""
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

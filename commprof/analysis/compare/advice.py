"""The rules that recommend one of the measured settings. Pure. The sentences are in ``recommendation.py``.

The rules apply in this order:

1. A setting counts if it has complete training steps and ends at no higher loss than the other settings. If the
   settings do different work, nothing is recommended. The same applies if the jobs use different model parallelism
   (``model_sharding.py``), because then the work of a rank and the links that it uses differ.
2. A setting has the least bytes if it counts and its modelled wire bytes in a step are within 0.1 % of the minimum. The
   bytes are the executed bytes if these are known for all settings, and otherwise the issued bytes of all settings.
3. A setting is not slower if it counts and no other setting that counts has a measurably shorter step
   (``significance.py``).
4. The settings that have the least bytes and are not slower are recommended. If there are none, the settings with the
   least bytes among those that are not slower are recommended.
5. If rule 4 selects all settings that count, nothing is recommended. Either there is no measurable difference, or the
   runs are too few to show a difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis.columns.frames import from_rows
from commprof.analysis.columns.setting_answers import ADVICE
from commprof.analysis.compare import significance
from commprof.analysis.compare.comparison import Measured, by_label

SAME_BYTES: Final = 0.001  # partitions differ in their padding by less than this share
SAME_LOSS: Final = 0.01

RECOMMENDED: Final = "recommended"
NO_DIFFERENCE: Final = "no measurable difference"
CANNOT_TELL: Final = "cannot tell"

# Keys that change the training task. Bytes and times of different tasks cannot be compared.
_WORK: Final = ("script", "world_size", "gradient_accumulation_steps", "gradient_clipping")
_WORK_SUFFIXES: Final = ("batch_size", "micro_batch_size_per_gpu")
_WORK_SECTIONS: Final = ("arguments.", "optimizer.", "scheduler.")


class Candidate(NamedTuple):
    """The values of one setting that the rules use.

    ``medians`` are the median step times in ns and ``losses`` the final losses, for each run in which they are known.
    ``wire_bytes`` are the executed bytes per step if ``executed`` is True, and otherwise the issued bytes per step.
    """

    label: str
    values: Mapping[str, str]
    wire_bytes: float | None
    gradient_bytes: float | None
    payload_bytes: float | None
    medians: Sequence[float]
    losses: Sequence[float]
    steps_of_runs: frozenset[int]
    repeats: int
    requested_op: str | None
    issued_op: str | None
    intended_op: str | None
    explanation: str | None
    shape: str
    executed: bool = False
    moved_bytes: float | None = None
    failed: bool = False

    @property
    def step_time_ns(self) -> float | None:
        """The mean over the runs of their median step times in ns, as in ``compare``."""
        return fmean(self.medians) if self.medians else None


class Weighed(NamedTuple):
    """The result of the rules.

    ``left_out`` contains the reason for each setting that does not count, by label.
    """

    answer: str
    candidates: Sequence[Candidate]  # in order of wire bytes, least first
    left_out: Mapping[str, str]
    work: Sequence[str]  # keys that differ and change the work
    shapes: Sequence[str]  # the kinds of model parallelism of the jobs; empty if all are equal
    least: Sequence[str]
    not_slower: Sequence[str]
    recommended: Sequence[str]
    # Keys and values that distinguish recommended settings from the other settings. It may be empty.
    keys: Mapping[str, str]
    pairs: pd.DataFrame

    def of(self, label: str) -> Candidate:
        """Return the candidate with ``label``."""
        return next(one for one in self.candidates if one.label == label)

    def verdict(self, label: str, other: str) -> str:
        """Return the verdict on the step time of ``other`` relative to the step time of ``label``."""
        return _verdicts(self.pairs)[label, other]


class Advice(NamedTuple):
    """The advice: which setting to choose and why.

    Attributes:
        answer: ``recommended``, ``no measurable difference`` or ``cannot tell``.
        sentences: The advice, followed by the reasons and the warnings.
        settings: The evidence, one row per setting (:data:`setting_answers.ADVICE`).
        pairs: The comparison of step times, one row per pair of settings (:data:`setting_answers.STEP_TIME_PAIRS`).
    """

    answer: str
    sentences: tuple[str, ...]
    settings: pd.DataFrame
    pairs: pd.DataFrame


def candidates(runs: Sequence[Measured], rows: Sequence[Mapping[str, Any]]) -> list[Candidate]:
    """Return a candidate for each setting of ``runs``.

    Args:
        runs: The measured runs.
        rows: The rows of :func:`comparison.rows` for the same runs.
    """
    of_label = by_label(runs)
    executed = all(
        row["executed_wire_bytes_per_step"] is not None
        for row in rows
        if row["wire_bytes_per_step"] is not None
    )
    wire = "executed_wire_bytes_per_step" if executed else "wire_bytes_per_step"
    settings = []
    for row in rows:
        repeats = of_label[row["label"]]
        settings.append(
            Candidate(
                label=row["label"],
                values=repeats[0].setting.values,
                wire_bytes=row[wire],
                gradient_bytes=row["gradient_wire_bytes_per_step"],
                payload_bytes=row["gradient_payload_bytes_per_step"],
                medians=[median(run.durations) for run in repeats if run.durations],
                losses=[run.final_loss for run in repeats if run.final_loss is not None],
                steps_of_runs=frozenset(run.step_totals.steps for run in repeats),
                repeats=len(repeats),
                requested_op=row["requested_op"],
                issued_op=None if row["issued_reason"] else row["issued_op"],
                intended_op=row["intended_op"],
                explanation=next((run.requested.explanation for run in repeats), None),
                shape=", or ".join(sorted({run.shape for run in repeats})),
                executed=executed,
                moved_bytes=_mean_moved(repeats),
                failed=all(run.failed for run in repeats),
            )
        )
    return settings


def _mean_moved(repeats: Sequence[Measured]) -> float | None:
    known = [run.moved_bytes for run in repeats if run.moved_bytes is not None]
    return fmean(known) if len(known) == len(repeats) else None


def weigh(settings: Sequence[Candidate]) -> Weighed:
    """Apply the rules at the top of this module to ``settings``, which may be in any order."""
    ordered = sorted(settings, key=lambda one: (one.wire_bytes is None, one.wire_bytes or 0.0, one.label))
    left_out = _left_out(ordered)
    counted = [one for one in ordered if one.label not in left_out]
    pairs = significance.pairs({one.label: one.medians for one in counted})
    work = sorted({key for one in ordered for key in one.values if _changes_the_work(key)})
    shapes = sorted({one.shape for one in counted})
    verdicts = _verdicts(pairs)
    least = [one.label for one in counted if _sends_least(one, counted)]
    slower = {label for (label, _), verdict in verdicts.items() if verdict == significance.SHORTER}
    not_slower = [one.label for one in counted if one.label not in slower]
    best = [label for label in least if label in not_slower]
    if not best:
        rest = [one for one in counted if one.label in not_slower]
        best = [one.label for one in rest if _sends_least(one, rest)]
    are_distinguishable = significance.CANNOT_TELL not in verdicts.values()
    if work or len(shapes) > 1 or len(counted) < 2:
        answer, best = CANNOT_TELL, []
    elif len(best) == len(counted):
        answer, best = NO_DIFFERENCE if are_distinguishable else CANNOT_TELL, []
    else:
        answer = RECOMMENDED
    keys = _telling_keys(ordered, best)
    return Weighed(
        answer,
        ordered,
        left_out,
        work,
        shapes if len(shapes) > 1 else [],
        least,
        not_slower,
        best,
        keys,
        pairs,
    )


def settings_frame(weighed: Weighed) -> pd.DataFrame:
    """Return the evidence of the advice, one row per setting."""
    verdicts = _verdicts(weighed.pairs)
    rows = [
        {
            "label": one.label,
            "recommended": one.label in weighed.recommended,
            "wire_bytes_per_step": one.wire_bytes,
            "wire_of": "executed" if one.executed else "issued",
            "moved_bytes_per_step": one.moved_bytes,
            "least_bytes": one.label in weighed.least,
            "step_time_ns": None if one.step_time_ns is None else round(one.step_time_ns),
            "not_slower": _not_slower(one.label, weighed, verdicts),
            "final_loss": fmean(one.losses) if one.losses else None,
            "repeats": one.repeats,
            "left_out": weighed.left_out.get(one.label),
        }
        for one in weighed.candidates
    ]
    return from_rows(rows, ADVICE.columns)


def _not_slower(label: str, weighed: Weighed, verdicts: Mapping[tuple[str, str], str]) -> bool | None:
    mine = [verdict for (first, _), verdict in verdicts.items() if first == label]
    if not mine or significance.CANNOT_TELL in mine:
        return None
    return label in weighed.not_slower


def _changes_the_work(key: str) -> bool:
    return key in _WORK or key.startswith(_WORK_SECTIONS) or key.endswith(_WORK_SUFFIXES)


def _left_out(settings: Sequence[Candidate]) -> dict[str, str]:
    reasons = {
        one.label: "failed before the end of a training step" if one.failed else "no whole training step"
        for one in settings
        if one.wire_bytes is None
    }
    lossy = [one for one in settings if one.losses and one.label not in reasons]
    if len({steps for one in lossy for steps in one.steps_of_runs}) > 1 or not lossy:
        return reasons  # losses after different numbers of steps cannot be compared
    finite = [one for one in lossy if isfinite(fmean(one.losses))]
    best = min(finite, key=lambda one: (fmean(one.losses), one.label), default=None)
    for one in lossy:
        if best is not None and _is_higher(one.losses, best.losses):
            reasons[one.label] = (
                f"its loss ends at {fmean(one.losses):.5g}, where {best.label} ends at {fmean(best.losses):.5g}"
            )
    return reasons


def _is_higher(losses: Sequence[float], lowest: Sequence[float]) -> bool:
    """Return whether ``losses`` are higher than ``lowest`` by more than 1 %.

    If both settings have repeats, the difference must also be larger than the repeats explain.
    """
    loss, low = fmean(losses), fmean(lowest)
    if not isfinite(loss):
        return True
    if loss - low <= SAME_LOSS * abs(low):
        return False
    if min(len(losses), len(lowest)) < significance.LEAST_REPEATS:
        return True
    return significance.welch(lowest, losses).probability < significance.LEVEL


def _sends_least(one: Candidate, among: Sequence[Candidate]) -> bool:
    known = [other.wire_bytes for other in among if other.wire_bytes is not None]
    return one.wire_bytes is not None and one.wire_bytes <= min(known) * (1 + SAME_BYTES)


def _verdicts(pairs: pd.DataFrame) -> dict[tuple[str, str], str]:
    """Return the verdict on the second setting relative to the first, for both orders of each pair."""
    turned = {significance.SHORTER: significance.LONGER, significance.LONGER: significance.SHORTER}
    by_pair: dict[tuple[str, str], str] = {}
    for label, other, verdict in zip(pairs["label"], pairs["other"], pairs["verdict"], strict=True):
        by_pair[label, other] = verdict
        by_pair[other, label] = turned.get(verdict, verdict)
    return by_pair


def _telling_keys(settings: Sequence[Candidate], best: Sequence[str]) -> dict[str, str]:
    """Return the keys to set: a combination of keys and values that all settings of ``best`` and no others have.

    If there is none, the result is the key and value that most settings of ``best`` and no other settings have. If
    there is no such key either, the result is empty.
    """
    mine = [one.values for one in settings if one.label in best]
    if not mine:
        return {}
    others = [one.values for one in settings if one.label not in best]
    shared = {
        key: value for key, value in mine[0].items() if all(values.get(key) == value for values in mine)
    }
    distinguishing = {
        key: value for key, value in shared.items() if any(values.get(key) != value for values in others)
    }
    if distinguishing and not any(distinguishing.items() <= values.items() for values in others):
        return distinguishing
    pairs = {pair for values in mine for pair in values.items()}
    single = {pair for pair in pairs if not any(pair in values.items() for values in others)}
    if not single:
        return {}
    key, value = min(single, key=lambda pair: (-sum(pair in values.items() for values in mine), pair))
    return {key: value}

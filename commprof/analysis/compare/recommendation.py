"""The advice in sentences: which setting to choose, the reasons, and warnings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from commprof.analysis.columns.units import format_bytes, format_ns
from commprof.analysis.compare import significance
from commprof.analysis.compare.advice import (
    CANNOT_TELL,
    NO_DIFFERENCE,
    SAME_BYTES,
    SAME_LOSS,
    Advice,
    Candidate,
    Weighed,
    settings_frame,
)
from commprof.analysis.compare.settings import short_names

_MOST_NAMED: Final = 3
MOVED_ALIKE: Final = 0.05
REPEAT: Final = "commprof sweep --repeat 3 ... measures each setting three times"
_ONE_REPEAT: Final = f"Step times cannot be compared: one repeat does not show how runs vary. {REPEAT}."


def advise(weighed: Weighed) -> Advice:
    """Return the advice that follows from ``weighed``, with its evidence."""
    sentences = [
        _answer(weighed),
        *_as_good(weighed),
        *_moved(weighed),
        *_left_out(weighed),
        *_times(weighed),
        *_losses(weighed),
        *_warnings(weighed),
    ]
    return Advice(weighed.answer, tuple(sentences), settings_frame(weighed), weighed.pairs)


def _answer(weighed: Weighed) -> str:
    counted = _counted(weighed)
    if weighed.work:
        return (
            f"Cannot tell: the settings do not do the same work; they differ in {_listed(weighed.work)}. Compare runs in "
            "which only the settings to choose from differ."
        )
    if weighed.shapes:
        shapes = "; ".join(shape or "not at all" for shape in weighed.shapes)
        return (
            f"Cannot tell: the ranks of these jobs use different model parallelism (groups and their sizes: {shapes}). The "
            "work of a rank and the links that its bytes use differ, so a sum of bytes does not show which is better: look "
            "at the bytes of each group, and compare settings of one shape."
        )
    if len(counted) < 2:
        return (
            f"Cannot tell: {len(counted)} setting{'' if len(counted) == 1 else 's'} to choose from; at "
            "least two are needed."
        )
    if weighed.answer != "recommended":
        same_bytes = len(weighed.least) == len(counted)
        bytes_text = "all settings send the same bytes on the wire" if same_bytes else "the bytes differ"
        if weighed.answer == NO_DIFFERENCE:
            return f"No measurable difference: {bytes_text}, and their step times differ by no more than repeats do."
        times = _ONE_REPEAT if _ran_once(weighed) else "Whether their step times differ is not known."
        return f"No difference in bytes: {bytes_text}. {times}"
    return _recommendation(weighed, counted)


def _recommendation(weighed: Weighed, counted: Sequence[Candidate]) -> str:
    best = [one for one in counted if one.label in weighed.recommended]
    others = [one for one in counted if one.label not in weighed.recommended]
    words = _words(weighed, best)
    head = f"Set {words}"
    if set(weighed.recommended) <= set(weighed.least):
        more = [one for one in others if one.label not in weighed.least]
        if more:
            most = max(more, key=lambda one: (one.wire_bytes or 0.0, one.label))
            return (
                f"{head}: it sends the least, {_bytes(best[0])}; {most.label} sends {_more(most, best[0])}."
                f"{_beside_the_bytes(weighed)}"
            )
        return f"{head}: all send the same bytes, {_bytes(best[0])}, and its step is measurably shorter."
    least = next(one for one in counted if one.label in weighed.least)
    return (
        f"Set {words} if step time matters most: its step is measurably shorter than that of {least.label}, which "
        f"sends the fewest bytes, {_bytes(least)}; {best[0].label} sends {_more(best[0], least)}. On a slower "
        f"network, {least.label} may be faster."
    )


def _ran_once(weighed: Weighed) -> bool:
    """Return whether no pair of step times can be compared, because the settings have too few repeats."""
    verdicts = list(weighed.pairs["verdict"])
    return bool(verdicts) and verdicts.count(significance.CANNOT_TELL) == len(verdicts)


def _beside_the_bytes(weighed: Weighed) -> str:
    """Return a sentence about the step times of a setting that is recommended for its bytes.

    The sentence is necessary because a chart of step times is misleading if the times vary.
    """
    if _ran_once(weighed):
        return " Step times cannot be compared after one repeat."
    if set(weighed.pairs["verdict"]) == {significance.SAME}:
        return " Step times do not differ measurably."
    return ""


def _words(weighed: Weighed, best: Sequence[Candidate]) -> str:
    """Return the keys to set, or the labels of the settings if there are no such keys."""
    if not weighed.keys:
        more = "" if len(best) <= _MOST_NAMED else f", or one of {len(best) - _MOST_NAMED} more"
        return "; or ".join(one.label for one in best[:_MOST_NAMED]) + more
    short = short_names(weighed.keys, best[0].values)
    return ", ".join(f"{short[key]}={value}" for key, value in weighed.keys.items())


def _as_good(weighed: Weighed) -> list[str]:
    """Return a sentence that lists the recommended settings without the named keys."""
    if not weighed.keys:
        return []
    rest = [
        label for label in weighed.recommended if not weighed.keys.items() <= weighed.of(label).values.items()
    ]
    best = [weighed.of(label) for label in weighed.recommended if label not in rest]
    rest = [label for label in rest if not any(_moves_more(weighed.of(label), one) for one in best)]
    return [f"As good by these rules: {'; '.join(rest[:_MOST_NAMED])}."] if rest else []


def _moves_more(one: Candidate, other: Candidate) -> bool:
    """Return whether ``one`` moved more bytes than ``other``, beyond what headers and other programs explain."""
    if one.moved_bytes is None or other.moved_bytes is None:
        return False
    return one.moved_bytes > other.moved_bytes * (1 + MOVED_ALIKE)


def _moved(weighed: Weighed) -> list[str]:
    """Return a sentence about the interface counters if they contradict or confirm the recommendation.

    They contradict it if another setting moved fewer bytes than a recommended setting. They confirm it if no setting
    did, and the setting that sends the most bytes by the model moved more bytes.
    """
    counted = [one for one in _counted(weighed) if one.moved_bytes is not None]
    for one in counted:
        less = [other for other in counted if _moves_more(one, other)]
        if one.label in weighed.recommended and less:
            least = min(less, key=lambda other: (other.moved_bytes or 0.0, other.label))
            return [
                f"But the counters show more bytes for it: {one.label} moved "
                f"{format_bytes(one.moved_bytes or 0.0)} a step on all "
                f"interfaces, {least.label} {format_bytes(least.moved_bytes or 0.0)} (whole run, all programs of a host). "
                "Look at both ledgers first: commprof verify."
            ]
    best = [one for one in counted if one.label in weighed.recommended]
    if not best:
        return []
    # Of the settings that send most, the one that moved the fewest bytes: the noise of one run is no evidence.
    highest = max(one.wire_bytes or 0.0 for one in counted) * (1 - SAME_BYTES)
    sends_most = [one for one in counted if (one.wire_bytes or 0.0) >= highest]
    most = min(sends_most, key=lambda one: (one.moved_bytes or 0.0, one.label))
    if not _moves_more(most, best[0]):
        return []
    return [
        f"The interface counters agree: {format_bytes(best[0].moved_bytes or 0.0)} a step on all hosts together, and "
        f"{format_bytes(most.moved_bytes or 0.0)} with {most.label} (whole run, all programs of a host)."
    ]


def _bytes(one: Candidate) -> str:
    of = "modelled, as the backend runs it" if one.executed else "modelled, as issued"
    return f"{format_bytes(one.wire_bytes or 0.0)} on the wire per rank and step ({of})"


def _more(one: Candidate, least: Candidate) -> str:
    size, low = one.wire_bytes or 0.0, least.wire_bytes or 0.0
    return f"{format_bytes(size)}" + (f", {100 * (size / low - 1):.0f} % more" if low else "")


def _left_out(weighed: Weighed) -> list[str]:
    return [f"{label} is left out: {why}." for label, why in sorted(weighed.left_out.items())]


def _times(weighed: Weighed) -> list[str]:
    verdicts = list(weighed.pairs["verdict"])
    if not verdicts or weighed.work:
        return []
    unsure = verdicts.count(significance.CANNOT_TELL)
    if _ran_once(weighed):
        return [_ONE_REPEAT] if weighed.answer == "recommended" or len(_counted(weighed)) < 2 else []
    sentences = []
    different = weighed.pairs[weighed.pairs["verdict"].isin([significance.SHORTER, significance.LONGER])]
    if different.empty:
        sentences.append(
            "There is no measurable difference in step time: no two settings differ by more than their repeats do "
            "(Welch's t, Holm's correction over all pairs, 5 %)."
        )
    else:
        row = max(different.to_dict("records"), key=lambda row: (abs(row["difference_ns"]), row["label"]))
        slow, fast = (
            (row["other"], row["label"])
            if row["verdict"] == significance.LONGER
            else (row["label"], row["other"])
        )
        low, high = sorted(abs(int(row[name])) for name in ("low_ns", "high_ns"))
        sentences.append(
            f"{len(different)} of {len(verdicts)} pairs differ measurably in step time; largest difference: {fast} "
            f"takes {format_ns(abs(int(row['difference_ns'])))} less than {slow} ({format_ns(low)} to "
            f"{format_ns(high)})."
        )
        slower_all = [label for label in weighed.recommended if label not in weighed.not_slower]
        if weighed.recommended and not slower_all:
            sentences.append("No other setting is measurably faster than the recommended one.")
    if unsure:
        sentences.append(
            f"The step times of {unsure} of {len(verdicts)} pairs cannot be compared: they have too few repeats."
        )
    return sentences


def _losses(weighed: Weighed) -> list[str]:
    counted = _counted(weighed)
    if weighed.answer == CANNOT_TELL and weighed.work:
        return []
    known = [fmean(one.losses) for one in counted if one.losses]
    if len(counted) < 2:
        return []
    if not known:
        return [
            "No loss was published, so it is not known whether the settings train equally well: "
            "commprof.metric('loss', value)."
        ]
    if len({steps for one in counted if one.losses for steps in one.steps_of_runs}) > 1:
        return ["The runs have different numbers of steps, so their losses are not compared."]
    rest = (
        ""
        if len(known) == len(counted)
        else f" {len(counted) - len(known)} of the settings published no loss."
    )
    low, high = min(known), max(known)
    near = (
        f"within {100 * SAME_LOSS:.0f} %" if high - low <= SAME_LOSS * abs(low) else "as far as repeats tell"
    )
    return [f"Their losses are equal {near}: {low:.5g} to {high:.5g} at the last step.{rest}"]


def _warnings(weighed: Weighed) -> list[str]:
    """Return a warning for each recommended setting that requests an operation and does not issue it.

    If no setting is recommended, all settings are checked.
    """
    wanted = weighed.recommended or [one.label for one in weighed.candidates]
    sentences = []
    for one in sorted(weighed.candidates, key=lambda one: one.label):
        meant = one.intended_op or one.issued_op
        if one.label not in wanted or None in (one.requested_op, one.issued_op) or meant == one.requested_op:
            continue
        sentences.append(
            f"Warning: {one.label} requests {one.requested_op} and issues {one.issued_op}"
            + (f": {one.explanation}." if one.explanation else ".")
        )
    return list(dict.fromkeys(sentences))


def _counted(weighed: Weighed) -> list[Candidate]:
    return [one for one in weighed.candidates if one.label not in weighed.left_out]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)

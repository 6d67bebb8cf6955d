"""Find the changes of a run that are worth trying, for the command line and the dashboard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.analysis.storage import answer_files
from commprof.calibration.file import read_calibration
from commprof.calibration.results import Calibration
from commprof.errors import CommprofError, UsageError
from commprof.ledger.requests.request import Request
from commprof.prediction.candidates import Candidate, candidates, combined
from commprof.prediction.durations import WITH_CALIBRATION
from commprof.prediction.predictions import (
    Base,
    Predicted,
    device_memory,
    median_step,
    predict_from,
    replayed_run,
    sent_messages,
)
from commprof.prediction.streams import HOST
from commprof.prediction.wrapper_settings import KEY as RESHARDING
from commprof.prediction.wrapper_settings import gathered_again
from commprof.printable import command_line
from commprof.trace.manifest import RUNNING, Manifest
from commprof.trace.reader import Run, open_run

MOST_CHANGES: Final = 3
# A change that needs more additional memory than this fraction of the recorded memory reports the additional memory.
MORE_MEMORY: Final = 0.10
_MOST_WORK: Final = 24_000  # messages of a candidate in all steps, whose simulation takes about 4 s
_ADDS: Final = 0.02  # fraction of the step: a smaller gain is worth neither more memory nor a second change


class Change(NamedTuple):
    """A setting that is predicted to be faster than the recorded one by more than its uncertainty.

    Attributes:
        setting: The dotted keys and values, as in ``--set``.
        recorded: The value of each of these keys in the run.
        step_ns, low_ns, high_ns: The predicted step time with its 80 % interval.
        gain_ns, gain_low_ns, gain_high_ns: The difference from the recorded step time, with its interval. A positive
            gain is a shorter step.
        why: The reasons, without a final period.
        memory_bytes: The bytes on the device of a rank without activations, or None if they are not known.
        more_memory: The additional memory as a fraction of the recorded memory, or 0 if it is not more than
            :data:`MORE_MEMORY`.
    """

    setting: dict[str, Any]
    recorded: dict[str, Any]
    step_ns: int
    low_ns: int
    high_ns: int
    gain_ns: int
    gain_low_ns: int
    gain_high_ns: int
    why: str
    memory_bytes: int | None
    more_memory: float

    @property
    def words(self) -> list[str]:
        """The arguments ``--set`` of the command line for this setting."""
        return [word for key, value in self.setting.items() for word in ("--set", f"{key}={_text(value)}")]

    @property
    def beside_recorded(self) -> list[str]:
        """The arguments ``--set`` for a sweep over the recorded values and the values of this setting."""
        return [
            word
            for key, value in self.setting.items()
            for word in ("--set", f"{key}={_text(self.recorded[key])},{_text(value)}")
        ]


class Promising(NamedTuple):
    """The changes of a run that are worth trying.

    Attributes:
        changes: At most :data:`MOST_CHANGES` changes. The change with the largest gain comes first.
        recorded_ns: The median over steps of the recorded step time, which is a mean over ranks.
        tried: The number of settings that were predicted.
        refused: The settings that were not predicted, each with the reason.
        ranks: The number of ranks of the run.
        program: The arguments of ``commprof sweep`` that start the program of the run. Empty if the program names no
            config file.
        directory: The directory in which the program was started.
        reason: The reason why nothing can be predicted from the run. Empty if something can be predicted.
        is_running: Whether the run is still being recorded, so that nothing was tried.
    """

    changes: list[Change]
    recorded_ns: int = 0
    tried: int = 0
    refused: list[tuple[dict[str, Any], str]] = []  # noqa: RUF012 - a NamedTuple; never changed
    ranks: int = 0
    program: list[str] = []  # noqa: RUF012 - as above
    directory: str = ""
    reason: str = ""
    is_running: bool = False

    @property
    def uncalibrated(self) -> int:
        """The number of settings that could be predicted with a calibration."""
        return sum(WITH_CALIBRATION in reason for _, reason in self.refused)

    @property
    def sentences(self) -> list[str]:
        """Sentences about the number of changes that were tried, and the reasons why other changes were not."""
        if self.is_running:
            return []
        if self.reason:
            return [f"No change can be predicted: {self.reason}."]
        if not self.tried and not self.refused:
            return ["There is no change to try: no candidate sends anything else than the run."]
        sentences = [f"{_counted(self.tried)} predicted{self._outcome}."] if self.tried else []
        if self.uncalibrated:
            command = command_line("calibrate", "--nproc", self.ranks, "--out", "calibration.json")
            sentences.append(
                f"{_counted(self.uncalibrated)} not predicted, since the run has no messages of such sizes or operations. "
                f"Measure them on the same hosts ({command}), and {WITH_CALIBRATION}; the dashboard finds this file "
                "in or beside the directory of the run."
            )
        others = [reason for _, reason in self.refused if WITH_CALIBRATION not in reason]
        if others:
            sentences.append(f"{_counted(len(others))} refused: {'; '.join(dict.fromkeys(others))}.")
        return sentences

    @property
    def _outcome(self) -> str:
        if self.changes:
            return ""
        return "; none is faster than the recorded setting by more than its uncertainty"


def promising(run: Path, calibration: Path | None = None) -> Promising:
    """Try a fixed set of changes on ``run``, and return the best changes that gain more than their uncertainty.

    The candidates are the settings of :func:`candidates`, and then the best combination of the best candidates. A
    change is offered if the upper end of its 80 % interval is below the recorded and the replayed step time. The
    answer is cached on disk.

    Args:
        run: The directory of a run.
        calibration: A calibration file of the run's hosts, for messages that the run does not have.

    Raises:
        CommprofError: The run or the calibration cannot be read.
    """
    measured = None if calibration is None else read_calibration(calibration)

    def ask() -> tuple[Any, bool]:
        source = open_run(run)
        if source.health.state == RUNNING:
            return _as_json(Promising([], is_running=True)), False
        return _as_json(_promising(source, measured)), not source.pending

    answer = answer_files.remembered(f"promising {measured!r}", [run], ask)
    changes = [Change(**each) for each in answer["changes"]]
    refused = [(setting, reason) for setting, reason in answer["refused"]]
    return Promising(**{**answer, "changes": changes, "refused": refused})


def predict_command(run: Path, change: Change, calibration: Path | None = None) -> str:
    """Return the command that predicts ``change`` in detail."""
    return command_line("predict", run, *change.words, *_with(calibration))


def sweep_command(
    run: Path, change: Change, answer: Promising, calibration: Path | None = None
) -> str | None:
    """Return the command that runs the recorded setting and ``change``, and compares predicted and measured steps.

    The result is None if the program of the run names no config file that a sweep could change.
    """
    if not answer.program:
        return None
    return command_line(
        "sweep", "--predict", run, *_with(calibration), *change.beside_recorded, *answer.program
    )


def _with(calibration: Path | None) -> tuple[object, ...]:
    return () if calibration is None else ("--calibration", calibration)


def _promising(run: Run, calibration: Calibration | None) -> Promising:
    try:
        answer = promising_of(replayed_run(run, calibration))
    except CommprofError as problem:
        return Promising([], reason=str(problem))
    return answer._replace(program=_program(run.manifest), directory=run.manifest.cwd or "")


def promising_of(base: Base) -> Promising:
    """Return the changes that are worth trying for a run that was already replayed, like :func:`promising`.

    Raises:
        CommprofError: The rules cannot read the config of the run.
    """
    if base.recorded.device != HOST:
        return Promising(
            [],
            reason=f"the run is of {base.recorded.device}, where predictions of other settings were not validated; name "
            "one with --set",
        )
    listed = candidates(base.request)
    if not listed:
        return Promising([], reason=_why_none(base.request))
    refused: list[tuple[dict[str, Any], str]] = []
    medians = _medians(base, listed, refused)
    best = _offered(base, _best_of_keys(base, medians))
    several = [
        combined(base.request, each)
        for count in (2, 3)
        for each in combinations([one for one, _ in best], count)
    ]
    together = sorted(_medians(base, several, []), key=lambda pair: pair[1])
    # At most one combination is offered, and only if it gains more than its best part.
    if together and together[0][1] < best[0][1].median_ns - _ADDS * base.recorded_ns:
        best = [*_offered(base, [together[0][0]]), *best]
    memory = device_memory(base.request, None, base.recorded.world_size)
    return Promising(
        [_change(base, each, answer, memory) for each, answer in best[:MOST_CHANGES]],
        round(base.recorded_ns),
        len(medians) + len(together),
        refused,
        base.recorded.world_size,
    )


def _medians(
    base: Base, listed: Sequence[Candidate], refused: list[tuple[dict[str, Any], str]]
) -> list[tuple[Candidate, float]]:
    """Return the predicted step time in ns of each candidate that sends different messages from the run.

    Candidates that cannot be predicted are appended to ``refused``.
    """
    medians = []
    for each in listed:
        try:
            if _is_other(base, each):
                medians.append((each, median_step(base, each.setting, each.config)))
        except UsageError as problem:
            refused.append((each.setting, str(problem)))
    return medians


def _is_other(base: Base, candidate: Candidate) -> bool:
    """Return whether ``candidate`` sends different messages from the run.

    Raises:
        UsageError: The messages are not known, or are so many that their prediction takes long.
    """
    if RESHARDING in candidate.setting:
        return bool(gathered_again(base.recorded.program))
    world = base.recorded.world_size
    before, after = sent_messages(base.request, candidate.setting, candidate.config, world, world)
    count = sum(map(len, after.gradients)) + sum(map(len, after.at_end.values()))
    if count * len(base.quiet) > _MOST_WORK:
        raise UsageError(f"its {count:,} messages per step take long to predict; name it with --set")
    return before != after


def _best_of_keys(base: Base, medians: Sequence[tuple[Candidate, float]]) -> list[Candidate]:
    """Return the best candidate for each key: among about equally fast values, the one with the least memory."""
    by_key: dict[tuple[str, ...], list[tuple[Candidate, float]]] = {}
    for each, ns in sorted(medians, key=lambda pair: pair[1]):
        by_key.setdefault(tuple(each.setting), []).append((each, ns))

    def memory(each: Candidate) -> int:
        return device_memory(base.request, each.config, base.recorded.world_size) or 0

    return [
        min((each for each, ns in values if ns <= values[0][1] + _ADDS * base.recorded_ns), key=memory)
        for values in by_key.values()
    ]


def _offered(base: Base, listed: Sequence[Candidate]) -> list[tuple[Candidate, Predicted]]:
    """Return the candidates that are faster by more than their uncertainty. The best candidate comes first."""
    limit = min(base.recorded_ns, base.replay.median_ns)
    answers: Iterator[tuple[Candidate, Any]] = (
        (each, predict_from(base, [(each.setting, each.config)]).settings[0]) for each in listed
    )
    faster = [(each, answer) for each, answer in answers if answer.high_ns < limit]
    return sorted(faster, key=lambda pair: pair[1].median_ns)[:MOST_CHANGES]


def _program(manifest: Manifest) -> list[str]:
    """Return the arguments of ``commprof sweep`` that start the program of a run again.

    The list is empty if the program does not name its config on the command line.
    """
    command = list(manifest.command or ())
    named = any(word.partition("=")[0] == manifest.config_argument for word in command)
    if not named:  # a sweep passes the config of each run in this argument
        return []
    engine = (manifest.launcher or {}).get("engine")
    words = ["--engine", str(engine)] if engine else []
    if manifest.nproc is None:  # the program starts its own ranks
        return [*words, "--", *command]
    return [*words, "--nproc", str(manifest.nproc), "--", *command[1:]]  # without the Python interpreter


def _change(base: Base, candidate: Candidate, answer: Predicted, memory: int | None) -> Change:
    recorded_ns, step, low, high = map(
        round, (base.recorded_ns, answer.median_ns, answer.low_ns, answer.high_ns)
    )
    more = answer.memory_bytes / memory - 1.0 if answer.memory_bytes is not None and memory else 0.0
    return Change(
        candidate.setting,
        candidate.recorded,
        step,
        low,
        high,
        recorded_ns - step,
        recorded_ns - high,
        recorded_ns - low,
        _why(base, answer),
        answer.memory_bytes,
        more if more > MORE_MEMORY else 0.0,
    )


def _why(base: Base, answer: Predicted) -> str:
    """Return the reasons for the purpose whose exposed time shrinks most. Reasons for other purposes are left out."""
    before = base.exposed_ns
    gains = {purpose: ns - answer.exposed_ns.get(purpose, 0.0) for purpose, ns in before.items()}
    main = max(gains, key=lambda purpose: gains[purpose], default="")
    others = tuple({*before, *answer.exposed_ns} - {main})
    sentences = [each for each in answer.why if not each.startswith(others)]
    return "; ".join(sentences or answer.why)


def _why_none(request: Request) -> str:
    if request.reason is not None:
        return f"what this run requested is not known ({request.reason}), so there is no setting to try"
    if request.wrapped is not None:
        return f"this run trains with {request.wrapped.names}, whose settings are not predicted"
    return "the ranks of this run share the model (tensor, sequence or pipeline parallelism), which is not predicted yet"


def _counted(number: int) -> str:
    return f"{number} change{'s were' if number != 1 else ' was'}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _as_json(answer: Promising) -> dict[str, Any]:
    return {**answer._asdict(), "changes": [each._asdict() for each in answer.changes]}

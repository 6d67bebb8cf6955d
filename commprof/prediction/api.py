"""What the command line and the dashboard ask without naming a setting: which changes of a run are worth trying."""

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
MORE_MEMORY: Final = 0.10  # of the recorded memory: a change that needs this much more says so
_MOST_WORK: Final = 24_000  # messages of a candidate in all steps: a simulation of them takes about 4 s
_ADDS: Final = 0.02  # of the step: a smaller gain is worth neither more memory nor a second change


class Change(NamedTuple):
    """A setting that is predicted to be faster than the recorded one by more than its uncertainty.

    Attributes:
        setting: dotted keys and values, as of ``--set``.
        recorded: the value that each of these keys has in the run.
        step_ns, low_ns, high_ns: the predicted step with its 80 % interval.
        gain_ns, gain_low_ns, gain_high_ns: by how much it is shorter than the recorded step.
        why: one sentence, without a period.
        memory_bytes: on the device of a rank, without activations; None where it is not known.
        more_memory: of the recorded memory, where it is more than :data:`MORE_MEMORY`; else 0.
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
        """The words of ``--set`` on the command line."""
        return [word for key, value in self.setting.items() for word in ("--set", f"{key}={_text(value)}")]

    @property
    def beside_recorded(self) -> list[str]:
        """The words of ``--set`` for a sweep of the recorded values and these."""
        return [
            word
            for key, value in self.setting.items()
            for word in ("--set", f"{key}={_text(self.recorded[key])},{_text(value)}")
        ]


class Promising(NamedTuple):
    """Which changes of a run are worth trying.

    Attributes:
        changes: at most :data:`MOST_CHANGES`, that of the largest gain first.
        recorded_ns: median step of the run, mean over ranks.
        tried: settings that were predicted.
        refused: the others, each with the reason.
        ranks: of the run.
        program: words of ``commprof sweep`` that start the program of the run; empty where it names no config file.
        directory: where the program was started.
        reason: why nothing can be predicted from the run; empty where something can.
        is_running: the run is still being recorded, so nothing was tried.
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
        """Settings that could be predicted with a calibration."""
        return sum(WITH_CALIBRATION in reason for _, reason in self.refused)

    @property
    def sentences(self) -> list[str]:
        """How many changes were tried, and what keeps others from being tried; or why none was."""
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
                f"Measure them on the same hosts ({command}), and {WITH_CALIBRATION}; the dashboard finds it "
                "beside the run."
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
    """Try a fixed set of changes on ``run``, and return the best that gain more than their uncertainty.

    Candidates are changes of one key each (:func:`candidates`), then one combination of the best ones. A change is offered
    if the upper end of its 80 % interval is below the recorded and the replayed step. The answer is cached on disk.

    Args:
        run: the directory of a run.
        calibration: a file of the run's hosts, for messages that the run does not have.

    Raises:
        CommprofError: the run or the calibration cannot be read.
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
    """The command that says more about ``change``."""
    return command_line("predict", run, *change.words, *_with(calibration))


def sweep_command(
    run: Path, change: Change, answer: Promising, calibration: Path | None = None
) -> str | None:
    """The command that runs the recorded setting and ``change``, and shows predicted beside measured steps.

    None where the program of the run names no config file that a sweep could change.
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
    """:func:`promising` of a run that was replayed before.

    Raises:
        CommprofError: the rules cannot read the config of the run.
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
    # One combination says it all, and only where it gains more than its best part.
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
    """The predicted step of those of ``listed`` that send something else than the run; adds the others to ``refused``."""
    medians = []
    for each in listed:
        try:
            if _is_other(base, each):
                medians.append((each, median_step(base, each.setting, each.config)))
        except UsageError as problem:
            refused.append((each.setting, str(problem)))
    return medians


def _is_other(base: Base, candidate: Candidate) -> bool:
    """Whether ``candidate`` sends something else than the run.

    Raises:
        UsageError: that is not known, or it sends so much that its prediction takes long.
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
    """Of each key the fastest value; of those that are about as fast the one that needs the least memory."""
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
    """Those of ``listed`` that are faster by more than their uncertainty, the best first."""
    limit = min(base.recorded_ns, base.replay.median_ns)
    answers: Iterator[tuple[Candidate, Any]] = (
        (each, predict_from(base, [(each.setting, each.config)]).settings[0]) for each in listed
    )
    faster = [(each, answer) for each, answer in answers if answer.high_ns < limit]
    return sorted(faster, key=lambda pair: pair[1].median_ns)[:MOST_CHANGES]


def _program(manifest: Manifest) -> list[str]:
    """The arguments of ``commprof sweep`` that start the program of a run again; none where it does not name its config."""
    command = list(manifest.command or ())
    named = any(word.partition("=")[0] == manifest.config_argument for word in command)
    if not named:  # a sweep gives each run its config in this argument
        return []
    engine = (manifest.launcher or {}).get("engine")
    words = ["--engine", str(engine)] if engine else []
    if manifest.nproc is None:  # the program starts its ranks itself
        return [*words, "--", *command]
    return [*words, "--nproc", str(manifest.nproc), "--", *command[1:]]  # without python


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
    """The reasons about the purpose that is exposed for less time, without those about others."""
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

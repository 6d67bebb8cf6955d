"""``commprof sweep``: runs one program with many settings of its config and compares the runs."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.recording_options import recording_options
from commprof.cli.runs import opened
from commprof.cli.verbs.predict import CalibrationOption
from commprof.cli.verbs.run import ENGINE_HELP, NCCL_LOG_HELP, NPROC_HELP, WIRE_HELP, parse_ranks
from commprof.deepspeed_provider import Engine
from commprof.errors import CommprofError, UsageError
from commprof.exit_codes import ExitCode
from commprof.launch.logs.nccl_log import Mode
from commprof.launch.sweeps.points import Turn, derive, label, points, turns
from commprof.launch.user_program import check_program, parse_program, with_engine
from commprof.printable import command_line, escaped
from commprof.recorder.process.recorder_options import DEFAULTS, Options

if TYPE_CHECKING:
    from commprof.launch.sweeps.campaign import Campaign, TurnResult
    from commprof.trace.predictions_file import PredictionsFile

HELP_ORDER = 40


class Progress(Protocol):
    """Reports which run of the sweep is in progress."""

    def begin(self, turn: Turn) -> None:
        """Report that ``turn`` starts."""

    def end(self) -> None:
        """Report that the current turn has ended."""


@recording_options
def sweep(  # noqa: PLR0913 - a parameter for each option of the command
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=V1,V2",
            help="A config key in dotted form, and the values to try. If --set is repeated, every "
            "combination is run.",
        ),
    ],
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROGRAM...",
            help="The program as in commprof run, with the argument for its config file. Example: train.py "
            "--config ds.json.",
            show_default=False,
        ),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat", metavar="N", help="Run every combination N times, and interleave the repetitions."
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="The directory for the runs. Default: traces/<script>-sweep-<time>.",
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", "-f", help="Replace the runs of an earlier sweep in the directory of --out."),
    ] = False,
    nproc: Annotated[str | None, typer.Option("--nproc", metavar="N", help=NPROC_HELP)] = None,
    config_argument: Annotated[
        str | None,
        typer.Option(
            "--config-arg",
            metavar="NAME",
            help="The name of the script's argument that takes the config file.",
        ),
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first run that fails.")] = False,
    show_output: Annotated[
        bool,
        typer.Option(
            "--show-output", help="Print the program's output in this terminal, not to the file output.txt."
        ),
    ] = False,
    predict: Annotated[
        str | None,
        typer.Option(
            "--predict",
            metavar="RUN",
            help="Before the first run, predict the step time of every combination from the recorded run "
            "RUN, and write the predictions to predictions.json. At the end, show the predicted and "
            "the measured times.",
            show_default=False,
        ),
    ] = None,
    calibration: CalibrationOption = None,
    nccl_log: Annotated[Mode, typer.Option("--nccl-log", help=NCCL_LOG_HELP)] = Mode.AUTO,
    wire: Annotated[bool, typer.Option("--wire", help=WIRE_HELP)] = False,
    engine: Annotated[Engine | None, typer.Option("--engine", help=ENGINE_HELP, show_default=False)] = None,
    recording: Options = DEFAULTS,
) -> int:
    """Run a program once for each combination of config values, and compare the runs.

    commprof writes a config file for each run. It passes this file to the program instead of the file in
    the argument --config, --deepspeed_config or --ds_config. If the program does not read this file, the
    run is reported as failed. The exit code is 1 if any run failed.
    """
    if repeat < 1:
        raise UsageError(f"--repeat {repeat}: every point runs at least once; 1 or more was expected")
    if calibration is not None and predict is None:
        raise UsageError(
            f"--calibration {calibration} is used for predictions only; add --predict RUN, or leave it out"
        )
    ranks = parse_ranks(nproc)
    parsed = with_engine(parse_program(program or []), engine)
    check_program(parsed)
    planned = turns(points(settings), repeat)

    from commprof.launch.sweeps import campaign as campaigns

    # Check everything before anything is removed or run, because a sweep may take hours.
    campaigns.check_launch(parsed, ranks)
    position, config = campaigns.find_config_argument(parsed, config_argument)
    for turn in planned:
        derive(config.content or {}, turn.point)
    directory = out or campaigns.default_directory(parsed, datetime.now())
    campaigns.check_room(directory, force)
    campaign = campaigns.Campaign(
        program=parsed,
        turns=planned,
        config=config,
        argument=position,
        out=directory,
        ranks=ranks,
        show_output=show_output,
        nccl_log=nccl_log,
        wire=wire,
        engine=engine,
        recording=recording,
    )
    predictions = None if predict is None else _predict(campaign, predict, calibration)
    campaigns.make_room(directory, force)
    if predictions is not None:
        _write_predictions(directory, predictions)
    return _carry_out(campaign, fail_fast, predictions)


def _predict(campaign: Campaign, run: str, calibration: Path | None) -> PredictionsFile:
    """Return predictions for all points of the sweep, computed from the recorded run ``run``.

    Raises:
        UsageError: the run is in the output directory of the sweep, so the sweep could replace the run.
    """
    with needed("analysis", "to predict"):
        from commprof.calibration.file import read_calibration
        from commprof.launch.sweeps.sweep_predictions import predicted_points

        measured = None if calibration is None else read_calibration(calibration)
        recorded = opened(run)
        if recorded.path.resolve().is_relative_to(campaign.out.resolve()):
            raise UsageError(
                f"--predict {run}: this run is in {campaign.out}, whose runs --force replaces. Choose another --out"
            )
        return predicted_points(campaign, recorded, measured, datetime.now().astimezone())


def _write_predictions(directory: Path, content: PredictionsFile) -> None:
    from commprof.trace.predictions_file import PREDICTIONS_NAME, write_predictions

    write_predictions(directory, content)
    say(f"predictions in {directory / PREDICTIONS_NAME}, {content.written}, SHA-256 {content.sha256}")


def _carry_out(campaign: Campaign, fail_fast: bool, predictions: PredictionsFile | None) -> int:
    from commprof.launch.last_line import shown
    from commprof.launch.ranks import signals_held
    from commprof.launch.sweeps.campaign import carry_out

    where = shown(campaign.out)
    say(f"sweep of {len(campaign.turns)} runs into {where}")
    results: list[TurnResult] = []
    interrupted = False
    with signals_held() as asked_to_stop, _progress(len(campaign.turns), campaign.show_output) as progress:
        carried_out = carry_out(campaign, say)
        for turn in campaign.turns:
            progress.begin(turn)
            result = next(carried_out)
            progress.end()
            results.append(result)
            if result.problem is not None:
                problem, *output = result.problem.split("\n")
                say(f"run {result.turn.number + 1}, {label(result.turn.point)}, failed: {problem}", output)
            interrupted = result.asked_to_stop or asked_to_stop()
            if interrupted or (fail_fast and result.problem is not None):
                break
    code = _conclude(campaign, results, where, predictions)
    return ExitCode.INTERRUPTED if interrupted else code


def _conclude(
    campaign: Campaign, results: Sequence[TurnResult], where: str, predictions: PredictionsFile | None
) -> int:
    good = [result.run for result in results if result.problem is None]
    if good:
        try:
            _compare(good)
        except CommprofError as error:
            say(str(error))
    if predictions is not None:
        _show_outcomes(predictions, results)
    failed, left = len(results) - len(good), len(campaign.turns) - len(results)
    counts = f"{len(results)} {'run' if len(results) == 1 else 'runs'}, {failed} failed" + (
        f", {left} not run" if left else ""
    )
    follow = f"next: {command_line('dashboard', where)}" if good else f"see {shlex.quote(where)}"
    say(f"{where}  {counts}  {follow}")
    return ExitCode.FAILED if failed or left else 0


def _compare(runs: Sequence[Path]) -> None:
    from commprof.cli.verbs.compare import comparison_of, show

    show(comparison_of([str(run) for run in runs]))
    sys.stdout.flush()


def _show_outcomes(predictions: PredictionsFile, results: Sequence[TurnResult]) -> None:
    """Print a table of predicted and measured step times, then the reasons for missing values."""
    from commprof.cli import rendering
    from commprof.launch.sweeps.sweep_predictions import outcomes

    duration = rendering.duration
    listed = outcomes(predictions, results)
    headings = [
        rendering.Heading("setting"),
        rendering.Heading("predicted", True),
        rendering.Heading("80 % interval", True),
        rendering.Heading("measured", True),
        rendering.Heading("in interval"),
    ]
    rows = [
        (
            each.setting,
            duration(each.predicted_ns),
            rendering.MISSING
            if each.low_ns is None
            else f"{duration(each.low_ns)} to {duration(each.high_ns)}",
            duration(each.measured_ns),
            rendering.MISSING if each.is_inside is None else "yes" if each.is_inside else "no",
        )
        for each in listed
    ]
    rendering.show("", rendering.Rows(headings, rows, "step, mean over ranks: predicted before, measured"))
    for each in listed:
        for remark in each.remarks:
            rendering.show(rendering.paragraph(f"{each.setting}: {remark}"))
    sys.stdout.flush()


@contextlib.contextmanager
def _progress(total: int, output_is_shown: bool) -> Iterator[Progress]:
    """Yield a progress bar if standard error is a terminal that only commprof writes to.

    Otherwise yield an object that prints one line per run.
    """
    if not sys.stderr.isatty() or output_is_shown:
        yield _Lines(total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, bar.add_task("", total=total))


class _Lines:
    def __init__(self, total: int) -> None:
        self._total = total

    def begin(self, turn: Turn) -> None:
        repeat = f", repeat {turn.repeat + 1}" if turn.repeat else ""
        say(f"run {turn.number + 1} of {self._total}: {label(turn.point)}{repeat}")

    def end(self) -> None:
        pass


class _Bar:
    def __init__(self, bar: object, task: object) -> None:
        self._bar, self._task = bar, task

    def begin(self, turn: Turn) -> None:
        self._bar.update(self._task, description=escaped(label(turn.point)))  # type: ignore[attr-defined]

    def end(self) -> None:
        self._bar.advance(self._task)  # type: ignore[attr-defined]

"""``commprof predict``: the step time of a recorded run with other settings, with an interval and the reason."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.rendering import Heading, Rows
from commprof.cli.runs import opened
from commprof.cli.sections.prediction_section import AsJson, Settings
from commprof.launch.sweeps.points import derive, label, points

if TYPE_CHECKING:
    from commprof.prediction.api import Promising
    from commprof.prediction.predictions import Predicted, Prediction

HELP_ORDER = 100

_RECORDED: Final = "as recorded"
_MOST_RANKS: Final = 4_096  # limited because each rank is simulated
RunsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="A run directory or 'latest'. Several runs must have the same setting.",
        show_default=False,
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A file that commprof calibrate wrote on the same hosts. It gives the times of messages that "
        "do not occur in the run.",
        show_default=False,
    ),
]


def predict(
    runs: RunsArgument,
    settings: Settings = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="The rate of a rank's link, such as 10Gbit or 1.25GB/s, or a factor of the recorded rate, "
            "such as x4.",
            show_default=False,
        ),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="A time to add to each message, such as 50us. This option has not been validated.",
            show_default=False,
        ),
    ] = None,
    comm: Annotated[
        Literal["free"] | None,
        typer.Option(help="The only value is free: messages take no time.", show_default=False),
    ] = None,
    no_straggler: Annotated[
        bool,
        typer.Option(
            "--no-straggler",
            help="Assume that the compute time of every rank equals the mean over all ranks.",
        ),
    ] = False,
    world: Annotated[
        int | None,
        typer.Option(
            metavar="W",
            min=2,
            max=_MOST_RANKS,
            help="The number of ranks. Default: the number of ranks of the run.",
            show_default=False,
        ),
    ] = None,
    calibration: CalibrationOption = None,
    as_json: AsJson = False,
) -> int:
    """Predict the step time of a recorded run with other settings, links or ranks. Runs no program.

    Without options, commprof lists the changes that are worth trying. If you pass several runs with the
    same setting, the interval of the prediction is smaller.
    """
    with needed("analysis", "to predict"):
        from commprof.calibration.file import read_calibration
        from commprof.ledger.requests.request import request_of
        from commprof.prediction.api import promising
        from commprof.prediction.assumptions import Assumptions, parse_link
        from commprof.prediction.prediction_json import prediction_json, promising_json
        from commprof.prediction.repeats import predict_repeats

        link = parse_link(bandwidth, latency)
        measured = None if calibration is None else read_calibration(calibration)
        listed = points(settings or [])
        sources = [opened(each) for each in runs]
        source = sources[0]
        # Use the config that the rules read. A recorded file may belong to another program than the engine.
        config = request_of(source).config or None
        answer = predict_repeats(
            sources,
            [(point, derive(config, point) if config is not None and point else None) for point in listed],
            Assumptions(link, world, comm == "free", no_straggler),
            measured,
        )
        asks_nothing = len(runs) == 1 and not (
            settings or bandwidth or latency or comm or no_straggler or world
        )
        best = promising(source.path, calibration) if asks_nothing else None
    if as_json:
        rendering.show_json(
            {**prediction_json(answer), **({} if best is None else {"promising": promising_json(best)})}
        )
        return 0
    _show(answer)
    if best is not None:
        _show_promising(best, source.path, calibration)
    return 0


def _show(answer: Prediction) -> None:
    from commprof.prediction.predictions import Predicted

    shown = rendering.duration
    rendering.show(
        rendering.paragraph(
            f"Recorded: {shown(answer.recorded_ns)} per step (median of {answer.steps} steps, mean over ranks). Replayed "
            f"from its compute and message times of other steps: {shown(answer.replay_ns)} ({answer.replay_error:+.1%})."
        ),
        "",
    )
    predicted = [each for each in answer.settings if isinstance(each, Predicted)]
    headings = [
        Heading("setting"),
        Heading("step", True),
        Heading("80 % interval", True),
        Heading("exposed", True),
        Heading("messages", True),
        Heading("memory", True),
        Heading("without messages", True),
        Heading("without stragglers", True),
    ]
    rows = [
        (
            label(each.setting) if each.setting else _RECORDED,
            shown(each.median_ns),
            f"{shown(each.low_ns)} to {shown(each.high_ns)}",
            shown(sum(each.exposed_ns.values())),
            rendering.count(each.messages),
            rendering.number_of_bytes(each.memory_bytes)
            if each.memory_bytes is not None
            else rendering.MISSING,
            shown(each.comm_free_ns),
            shown(each.no_straggler_ns),
        )
        for each in predicted
    ]
    rendering.show(Rows(headings, rows, "predicted, per step and rank"), "")
    for each in answer.settings:
        if not isinstance(each, Predicted):
            say(f"{label(each[0])}: {each[1]}")
            continue
        name = label(each.setting) if each.setting else _RECORDED
        rendering.show(rendering.paragraph(f"{name}: {'; '.join(each.why)}."))
        rendering.show(rendering.paragraph(f"  Critical path: {_path(each)}."))
    for note in answer.notes:
        rendering.show(rendering.paragraph(note))


def _show_promising(best: Promising, run: Path, calibration: Path | None) -> None:
    """Print the changes that are worth trying, or the reason why there are none."""
    from commprof.prediction.api import predict_command

    shown = rendering.duration
    headings = [
        Heading("change worth trying"),
        Heading("gain", True),
        Heading("of the step", True),
        Heading("80 % interval", True),
        Heading("more memory", True),
    ]
    rows = [
        (
            label(each.setting),
            shown(each.gain_ns),
            f"{each.gain_ns / best.recorded_ns:.0%}",
            f"{shown(each.gain_low_ns)} to {shown(each.gain_high_ns)}",
            f"{each.more_memory:.0%}" if each.more_memory else rendering.MISSING,
        )
        for each in best.changes
    ]
    rendering.show("")
    if rows:
        rendering.show(Rows(headings, rows, "per step and rank"), "")
    for each in best.changes:
        rendering.show(rendering.paragraph(f"{label(each.setting)}: {each.why}."))
        rendering.show(f"  {predict_command(run, each, calibration)}")
    for sentence in best.sentences:
        rendering.show(rendering.paragraph(sentence))


def _path(each: Predicted) -> str:
    parts = [
        f"{rendering.duration(ns)} {what} on rank {rank}"
        for (what, rank), ns in sorted(each.path.items(), key=lambda pair: -pair[1])
        if ns > 0
    ]
    return ", ".join(parts[:5])

"""``commprof plan``: predicts what a config will send and hold for a model, and compares settings, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.runs import opened
from commprof.cli.sections.planned import latency_sentences, show_comparison, show_one
from commprof.cli.sections.predicted import (
    AsJson,
    Backend,
    ConfigFile,
    DeviceMemory,
    SequenceLength,
    Settings,
    World,
    device_capacity,
)
from commprof.launch.sweeps.points import label

_NAMES: Final = {"zero_runtime": "zero_runtime", "deepspeed": "DeepSpeed 0.19"}


def plan(  # noqa: PLR0913 - a parameter for each option of the command
    config: ConfigFile,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="params:175e9, py:module:function that returns the model, or hf:CONFIG_DIR (no weights are read).",
            show_default=False,
        ),
    ],
    world: World = 1,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="L", min=1, help="Layers of params:N. Default: typical for N.", show_default=False
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HxR", help="H hosts of R ranks each: 128x8. Default: hosts of 8.", show_default=False
        ),
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(
            metavar="RATES",
            help="Rate of a rank inside its host, and links x rate of a host: intra=450GB/s,inter=8x50GB/s.",
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    framework: Annotated[
        str, typer.Option(help="Whose rules say what is sent: zero_runtime or deepspeed.")
    ] = "zero_runtime",
    backend: Backend = "nccl",
    sequence: SequenceLength = None,
    device_memory: DeviceMemory = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Of commprof calibrate: times of messages, and is the largest gradient message latency bound?",
            show_default=False,
        ),
    ] = None,
    step_compute: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time that a rank computes in a step, without communication: 900ms. Gives bounds of the step.",
            show_default=False,
        ),
    ] = None,
    recorded: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="A run of this model and micro-batch: its computation, and the part of its communication that overlapped, "
            "narrow the bounds of the step.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Predict what a config sends per step and holds per rank for a model, and compare settings. Nothing is run."""
    from commprof.calibration.file import read_calibration
    from commprof.plan import api
    from commprof.plan.predictions import read_config
    from commprof.plan.traffic import traffic_of

    measured = None if calibration is None else read_calibration(calibration)
    told = None
    if recorded is not None:
        with needed("analysis", "to read a run"):
            from commprof.plan.recorded_steps import recorded_step

            told = recorded_step(opened(recorded))
    question = api.Question(
        read_config(config),
        model,
        world,
        hosts,
        links,
        tuple(settings or ()),
        layers,
        backend,
        sequence,
        step_compute,
        device_capacity(device_memory),
        measured,
        framework=framework,
        recorded=told,
    )
    planned = api.make_plan(question)
    for remark in planned.remarks:
        say(remark)
    found = [each for _, each in planned.usable]
    if as_json:
        missing = [f"activations are not counted: {each.uncounted}" for each in found if each.uncounted]
        for note in dict.fromkeys([*(each.note for each in found if each.note), *missing]):
            say(note)
        rendering.show_json(api.as_json(planned))
        return 0
    rendering.show(
        rendering.paragraph(
            f"{planned.model.source}; {world:,} rank{'s' * (world > 1)} on {backend}, {planned.hosts}; "
            "rings connect ranks in rank order; the program and libraries are not in the memory; messages are those of "
            f"{_NAMES[planned.job.framework]}"
        ),
        "",
    )
    if len(planned.outcomes) == 1:
        show_one(found[0], planned, measured)
        return 0
    show_comparison(planned)
    if measured is not None:
        for setting, each in planned.usable:
            for sentence in latency_sentences(traffic_of(each.sent, planned.hosts), measured):
                rendering.show(rendering.paragraph(f"{label(setting)}: {sentence}"))
    return 0

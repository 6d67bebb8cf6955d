"""``commprof plan``: predicts what a config will send and hold for a model, and compares settings, without a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.sections.planned import latency_sentences, show_comparison, show_one
from commprof.cli.sections.predicted import (
    AsJson,
    Backend,
    ConfigFile,
    DeviceMemory,
    SequenceLength,
    World,
    device_capacity,
)
from commprof.launch.sweeps.points import derive, label, points

if TYPE_CHECKING:
    from commprof.plan.durations import Timing
    from commprof.plan.hosts import Hosts
    from commprof.plan.predictions import Prediction, Refusal

Setting = Mapping[str, Any]


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
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=V1,V2",
            help="A dotted key of the config and its values. Several --set: every combination.",
            show_default=False,
        ),
    ] = None,
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
    as_json: AsJson = False,
) -> int:
    """Predict what a config sends per step and holds per rank for a model, and compare settings. Nothing is run."""
    from commprof.calibration.file import read_calibration
    from commprof.plan.durations import parse_duration, timing_by
    from commprof.plan.hosts import parse_hosts
    from commprof.plan.keys import check_keys
    from commprof.plan.links import parse_links
    from commprof.plan.models import read_model
    from commprof.plan.predictions import Job, Prediction, predict_each, read_config
    from commprof.plan.recommendations import samples_of
    from commprof.plan.traffic import traffic_of

    measured = None if calibration is None else read_calibration(calibration)
    placed = parse_hosts(hosts, world)
    rates = None if links is None else parse_links(links)
    compute_ns = None if step_compute is None else parse_duration(step_compute, "--step-compute")
    timing = timing_by(measured, rates, backend, compute_ns)
    listed = points(settings or [])
    check_keys(dict.fromkeys(key for point in listed for key in point))
    config_values, capacity = read_config(config), device_capacity(device_memory)
    configs = [derive(config_values, point) for point in listed]
    trained = read_model(model, layers, sequence)
    job = Job(trained, world, placed.ranks, backend, sequence)
    outcomes = predict_each(configs, job)
    usable = [
        (point, each) for point, each in zip(listed, outcomes, strict=True) if isinstance(each, Prediction)
    ]
    found = [each for _, each in usable]
    if compute_ns is not None and len({samples_of(each) for each in found}) > 1:
        say(
            "--step-compute is not used: steps have different numbers of samples, so ranks compute for different times"
        )
        timing = timing._replace(compute_ns=None)
    if as_json:
        missing = [f"activations are not counted: {each.uncounted}" for each in found if each.uncounted]
        for note in dict.fromkeys([*(each.note for each in found if each.note), *missing]):
            say(note)
        rendering.show_json(
            {"settings": [_as_json(*pair, placed, timing) for pair in zip(listed, outcomes, strict=True)]}
        )
        return 0
    rendering.show(
        rendering.paragraph(
            f"{trained.source}; {world:,} rank{'s' * (world > 1)} on {backend}, {placed}; "
            "rings connect ranks in rank order; the program and libraries are not in the memory"
        ),
        "",
    )
    if len(outcomes) == 1:
        show_one(found[0], job, placed, rates, capacity, measured, timing)
        return 0
    show_comparison(listed, outcomes, placed, rates, capacity, timing)
    if measured is not None:
        for point, each in usable:
            for sentence in latency_sentences(traffic_of(each.sent, placed), measured):
                rendering.show(rendering.paragraph(f"{label(point)}: {sentence}"))
    return 0


def _as_json(point: Setting, found: Prediction | Refusal, hosts: Hosts, timing: Timing) -> dict[str, Any]:
    from commprof.plan.durations import StepTime
    from commprof.plan.predictions import Refusal
    from commprof.plan.traffic import traffic_of

    if isinstance(found, Refusal):
        nothing: dict[str, Any] = {"set": dict(point), "traffic": [], "memory_bytes_per_rank": None}
        return {**nothing, "step_ns": {"least": None, "most": None}, "refused": found.reason}
    timed = timing.of(found, hosts)
    known = timed if isinstance(timed, StepTime) else None
    places = ("device", "host", "disk")
    return {
        "set": dict(point),
        "traffic": [
            {
                "purpose": row.purpose,
                "op": row.op,
                "group_size": row.group_size,
                "count": row.count,
                "payload_bytes": row.payload_bytes,
                "wire_bytes_per_rank": row.wire_bytes_per_rank,
            }
            for row in traffic_of(found.sent, hosts)
        ],
        "memory_bytes_per_rank": {
            **{place: sum(getattr(each, place) for each in found.parts) for place in places},
            "parts": {each.what: {place: getattr(each, place) for place in places} for each in found.parts},
        },
        "step_ns": {"least": known and known.least_ns, "most": known and known.most_ns},
        "communication_ns": {
            "all": known and known.communication_ns,
            "overlapping": known and known.overlapping_ns,
            "by_purpose": known and known.by_purpose(),
            "source": timing.source.text if known and timing.source else None,
            "note": "" if known else timed,
        },
    }

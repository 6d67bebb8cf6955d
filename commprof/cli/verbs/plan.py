"""``commprof plan``: predicts what a config will send and hold for a model, and compares settings, without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.rendering import Heading, Rows
from commprof.cli.sections.predicted import (
    AsJson,
    Backend,
    ConfigFile,
    DeviceMemory,
    SequenceLength,
    World,
    device_capacity,
    fit_sentence,
    memory_rows,
    movement_rows,
)
from commprof.launch.sweeps.points import derive, label, points

if TYPE_CHECKING:
    from commprof.calibration.results import Calibration
    from commprof.plan.hosts import Hosts
    from commprof.plan.links import Links
    from commprof.plan.predictions import Job, Prediction
    from commprof.plan.recommendations import Recommendation
    from commprof.plan.traffic import Totals, Traffic

Setting = Mapping[str, Any]
_REASONS: Final = {
    "only one": "it is the only setting",
    "only one fits": "it is the only setting that fits",
    "between hosts": "its hosts send the fewest bytes to other hosts",
    "per rank": "its ranks send the fewest bytes, and hosts send equally many to other hosts",
    "memory": "it needs the least memory, and sends as many bytes as the next one",
    "nothing": "it is the first of several that send and hold the same",
}


def plan(
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
            help="Of commprof calibrate: is the largest gradient message latency bound?",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Predict what a config sends per step and holds per rank for a model, and compare settings. Nothing is run."""
    from commprof.calibration.file import read_calibration
    from commprof.plan.hosts import parse_hosts
    from commprof.plan.keys import check_keys
    from commprof.plan.links import parse_links
    from commprof.plan.models import read_model
    from commprof.plan.predictions import Job, predict, read_config
    from commprof.plan.traffic import traffic_of

    measured = None if calibration is None else read_calibration(calibration)
    placed = parse_hosts(hosts, world)
    rates = None if links is None else parse_links(links)
    listed = points(settings or [])
    check_keys(dict.fromkeys(key for point in listed for key in point))
    config_values, capacity = read_config(config), device_capacity(device_memory)
    configs = [derive(config_values, point) for point in listed]
    trained = read_model(model, layers)
    job = Job(trained, world, placed.ranks, backend, sequence)
    found = [predict(each, job) for each in configs]
    if as_json:
        for note in dict.fromkeys(each.note for each in found if each.note):
            say(note)
        rendering.show_json(
            {"settings": [_as_json(*pair, placed) for pair in zip(listed, found, strict=True)]}
        )
        return 0
    rendering.show(
        rendering.paragraph(
            f"{trained.source}; {world:,} rank{'s' * (world > 1)} on {backend}, {placed}; "
            "rings connect ranks in rank order; activations, the program and libraries are not in the memory"
        ),
        "",
    )
    if len(found) == 1:
        _show_one(found[0], job, placed, rates, capacity, measured)
        return 0
    _show_comparison(listed, found, placed, rates, capacity)
    if measured is not None:
        for point, each in zip(listed, found, strict=True):
            for sentence in _latency(traffic_of(each.sent, placed), measured):
                rendering.show(rendering.paragraph(f"{label(point)}: {sentence}"))
    return 0


def _as_json(point: Setting, found: Prediction, hosts: Hosts) -> dict[str, Any]:
    from commprof.plan.traffic import traffic_of

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
            **{place: sum(getattr(each, place) for each in found.memory) for place in places},
            "parts": {each.what: {place: getattr(each, place) for place in places} for each in found.memory},
        },
        "step_ns": {"least": None, "most": None},
    }


def _show_one(
    found: Prediction,
    job: Job,
    hosts: Hosts,
    links: Links | None,
    capacity: int | None,
    calibration: Calibration | None,
) -> None:
    from commprof.plan.traffic import histogram, totals_of, traffic_of

    rendering.show(
        rendering.paragraph(f"The model in {found.precision}."),
        "",
        memory_rows(found.memory, hosts.ranks),
        "",
    )
    if capacity is not None:
        rendering.show(rendering.paragraph(fit_sentence(found.on_device, capacity)), "")
    if found.sent:
        traffic, totals = traffic_of(found.sent, hosts), totals_of(found.sent, hosts)
        rendering.show(_traffic_rows(traffic, totals))
        bins = histogram(traffic)
        if bins:
            rendering.show("", _size_rows(bins))
        rendering.show("")
        for sentence in [
            *_link_sentences(totals, hosts, links),
            *_latency(traffic, calibration),
            *_gathers(found, job),
        ]:
            rendering.show(rendering.paragraph(sentence))
    if found.note:
        rendering.show(rendering.paragraph(found.note))
    if found.moved:
        rendering.show("", movement_rows(found.moved))
    for line in sorted({row.note for row in found.sent if row.note}):
        rendering.show(rendering.paragraph(f"  {line}"))


def _traffic_rows(traffic: Sequence[Traffic], totals: Totals) -> Rows:
    headings = [
        Heading("purpose"),
        Heading("groups x ranks"),
        Heading("issued"),
        Heading("messages", True),
        Heading("payload", True),
        Heading("sent by each rank", True),
        Heading("of it to other hosts", True),
        Heading(""),
    ]
    rows = [
        (
            row.purpose,
            f"{row.groups} x {row.group_size}",
            row.op,
            rendering.count(row.count),
            rendering.number_of_bytes(row.payload_bytes),
            rendering.number_of_bytes(row.wire_bytes_per_rank),
            rendering.number_of_bytes(row.between_hosts),
            "" if row.exact else "about",
        )
        for row in traffic
    ]
    last = (
        "the rank that sends the most",
        "",
        "",
        rendering.count(totals.messages),
        "",
        rendering.number_of_bytes(totals.rank_bytes),
        "",
        "",
    )
    return Rows(headings, [*rows, (), last], "messages per step")


def _size_rows(bins: Mapping[int, int]) -> Rows:
    rows = [
        (
            rendering.number_of_bytes(low),
            rendering.number_of_bytes(2 * low) if low else "1 B",
            rendering.count(number),
        )
        for low, number in bins.items()
    ]
    headings = [Heading("from", True), Heading("to less than", True), Heading("messages", True)]
    return Rows(headings, rows, "payload of a message")


def _link_sentences(totals: Totals, hosts: Hosts, links: Links | None) -> list[str]:
    shown = rendering.number_of_bytes
    if not totals.rank_bytes:
        return ["No rank sends anything to another."]
    if hosts.count == 1:
        sentences = [f"All {shown(totals.rank_bytes)} that a rank sends per step stay inside its host."]
    else:
        sentences = [
            f"A rank sends at most {shown(totals.inside_bytes)} per step inside its host, and a host at most "
            f"{shown(totals.host_bytes)} to other hosts."
        ]
    if links is None:
        return sentences
    taken = {
        "inside a host": (totals.inside_bytes, links.intra),
        "between hosts": (totals.host_bytes if hosts.count > 1 else 0, links.inter),
    }
    seconds = {place: sent / rate for place, (sent, rate) in taken.items() if rate is not None and sent}
    if seconds:
        listed = ", ".join(f"{rendering.duration(each * 1e9)} {place}" for place, each in seconds.items())
        sentences.append(f"At the rates of --links these bytes alone take {listed} per step.")
    if len(seconds) > 1:
        slowest = max(seconds, key=lambda place: seconds[place])
        sentences[-1] += f" The links {slowest} saturate first."
    return sentences


def _latency(traffic: Sequence[Traffic], calibration: Calibration | None) -> list[str]:
    from commprof.plan.latency import gradient_chunk

    chunk = None if calibration is None else gradient_chunk(traffic, calibration)
    if chunk is None or calibration is None:
        return []
    shown = rendering.number_of_bytes
    bound = "latency" if chunk.num_bytes < chunk.least_bytes else "bandwidth"
    return [
        f"The largest gradient message, {chunk.op} of {shown(chunk.message_bytes)}, is {shown(chunk.num_bytes)} per owner "
        f"at {chunk.group_size:,} ranks: {bound} bound. Up to {chunk.most_ranks:,} ranks it is bandwidth bound: latency "
        f"equals the transfer of {shown(chunk.least_bytes)} per owner in the calibration ({calibration.world_size} ranks, "
        f"{calibration.backend} on {calibration.device})."
    ]


def _gathers(found: Prediction, job: Job) -> list[str]:
    from commprof.plan.blocks import all_gathers, all_gathers_by_block
    from commprof.requested.configuration import read_configuration

    if read_configuration(found.config).stage != 3:
        return []
    gathers = all_gathers(found.sent)
    if not gathers:
        return []
    sentence = f"Stage 3 launches {gathers:,} all-gathers per step because each module is a unit"
    by_block = all_gathers_by_block(found, job)
    if by_block is None or by_block >= gathers:
        return [f"{sentence}."]
    return [f"{sentence}; by block it would be {by_block:,} (zero_optimization.leaf_module)."]


def _show_comparison(
    listed: Sequence[Setting],
    found: Sequence[Prediction],
    hosts: Hosts,
    links: Links | None,
    capacity: int | None,
) -> None:
    from commprof.plan.recommendations import Candidate, recommend, samples_of
    from commprof.plan.traffic import totals_of

    totals = [totals_of(each.sent, hosts) for each in found]
    candidates = [
        Candidate(
            label(point),
            each.on_device,
            total.rank_bytes,
            total.host_bytes,
            samples_of(each),
            not each.note,
        )
        for point, each, total in zip(listed, found, totals, strict=True)
    ]
    shown = rendering.number_of_bytes
    rows = [
        (
            each.name,
            shown(each.rank_bytes) if each.complete else rendering.MISSING,
            shown(each.host_bytes) if each.complete else rendering.MISSING,
            shown(each.on_device),
            shown(sum(part.host for part in prediction.memory)),
            rendering.count(total.messages) if each.complete else rendering.MISSING,
            shown(total.median_bytes),
        )
        for each, prediction, total in zip(candidates, found, totals, strict=True)
    ]
    headings = [
        Heading("setting"),
        Heading("sent by a rank", True),
        Heading("by a host to others", True),
        Heading("device memory", True),
        Heading("host memory", True),
        Heading("messages", True),
        Heading("median message", True),
    ]
    rendering.show(Rows(headings, rows, "per step and rank, by setting"), "")
    for name, each, total in zip((each.name for each in candidates), found, totals, strict=True):
        if each.note:
            rendering.show(rendering.paragraph(f"{name}: {each.note}"))
        elif links is not None:
            rendering.show(rendering.paragraph(f"{name}: {_link_sentences(total, hosts, links)[-1]}"))
    rendering.show(rendering.paragraph(_sentence(recommend(candidates, capacity), candidates, capacity)))


def _sentence(chosen: Recommendation, candidates: Sequence[Any], capacity: int | None) -> str:
    shown = rendering.number_of_bytes
    if chosen.chosen is None:
        if not any(each.complete for each in candidates):
            return "No recommendation: the messages of no setting can be predicted."
        least = min((each for each in candidates if each.complete), key=lambda each: each.on_device)
        return (
            f"No setting fits in {shown(capacity)}, before activations: {least.name} needs the least, "
            f"{shown(least.on_device)} per rank."
        )
    best = candidates[chosen.chosen]
    fits = (
        f"of the {len(candidates)} settings, {chosen.fitting} fit{'s' * (chosen.fitting == 1)} in {shown(capacity)}"
        if capacity is not None
        else "whether a setting fits is not known without --device-memory"
    )
    compared = " for each sample" if chosen.per_sample else ""
    return (
        f"Use {best.name}: {_REASONS[chosen.decided_by]}{compared}. It sends {shown(best.host_bytes)} per host to other "
        f"hosts and {shown(best.rank_bytes)} per rank in a step, and holds {shown(best.on_device)} on each device before "
        f"activations; {fits}."
    )

"""The tables and sentences of ``plan``: one setting in full, or several beside each other with a recommendation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from commprof.cli import rendering
from commprof.cli.rendering import Heading, Rows
from commprof.cli.sections.predicted import fit_sentence, memory_rows, movement_rows
from commprof.cli.sections.step_times import (
    show_missing_times,
    show_time,
    time_cells,
    time_headings,
    typical_time,
)
from commprof.launch.sweeps.points import label

if TYPE_CHECKING:
    from commprof.calibration.results import Calibration
    from commprof.plan.durations import Timing
    from commprof.plan.hosts import Hosts
    from commprof.plan.links import Links
    from commprof.plan.predictions import Job, Prediction, Refusal
    from commprof.plan.recommendations import Candidate, Recommendation
    from commprof.plan.traffic import Totals, Traffic

Setting = Mapping[str, Any]
_REASONS: Final = {
    "only one": "it is the only setting",
    "only one fits": "it is the only setting that fits",
    "time": "its {timed} the least time",
    "time and bytes": "its {timed} the least time; of those within 1 % of it, bytes and then memory decide",
    "between hosts": "its hosts send the fewest bytes to other hosts",
    "per rank": "its ranks send the fewest bytes, and hosts send equally many to other hosts",
    "memory": "it needs the least memory, and sends as many bytes as the next one",
    "nothing": "it is the first of several that send and hold the same",
}


def show_one(
    found: Prediction,
    job: Job,
    hosts: Hosts,
    links: Links | None,
    capacity: int | None,
    calibration: Calibration | None,
    timing: Timing,
) -> None:
    """Print memory, messages and sentences of one setting."""
    from commprof.plan.traffic import histogram, totals_of, traffic_of

    rendering.show(
        rendering.paragraph(f"The model in {found.precision}."),
        "",
        memory_rows(found.parts, hosts.ranks),
        "",
    )
    if found.uncounted:
        rendering.show(rendering.paragraph(f"Activations are not counted: {found.uncounted}."), "")
    if capacity is not None:
        rendering.show(rendering.paragraph(fit_sentence(found.on_device, capacity, not found.uncounted)), "")
    if found.sent:
        traffic, totals = traffic_of(found.sent, hosts), totals_of(found.sent, hosts)
        rendering.show(_traffic_rows(traffic, totals))
        bins = histogram(traffic)
        if bins:
            rendering.show("", _size_rows(bins))
        rendering.show("")
        for sentence in [
            *_link_sentences(totals, hosts, links),
            *latency_sentences(traffic, calibration),
            *_gathers(found, job),
        ]:
            rendering.show(rendering.paragraph(sentence))
        show_time(timing.of(found, hosts), timing)
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


def latency_sentences(traffic: Sequence[Traffic], calibration: Calibration | None) -> list[str]:
    """Return whether the largest gradient message is latency bound by ``calibration``; nothing without one."""
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


def show_comparison(
    listed: Sequence[Setting],
    outcomes: Sequence[Prediction | Refusal],
    hosts: Hosts,
    links: Links | None,
    capacity: int | None,
    timing: Timing,
) -> None:
    """Print a row for each setting, those that are refused with the reason, and which one to use."""
    from commprof.plan.predictions import Refusal
    from commprof.plan.recommendations import Candidate, recommend, samples_of
    from commprof.plan.traffic import totals_of

    usable = [
        (point, each) for point, each in zip(listed, outcomes, strict=True) if not isinstance(each, Refusal)
    ]
    found = [each for _, each in usable]
    totals = [totals_of(each.sent, hosts) for each in found]
    times = [timing.of(each, hosts) for each in found]
    candidates = [
        Candidate(
            label(point),
            each.on_device,
            total.rank_bytes,
            total.host_bytes,
            samples_of(each),
            not each.note,
            not each.uncounted,
            typical_time(time),
        )
        for (point, each), total, time in zip(usable, totals, times, strict=True)
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
            *time_cells(time, timing),
        )
        for each, prediction, total, time in zip(candidates, found, totals, times, strict=True)
    ]
    headings = [
        Heading("setting"),
        Heading("sent by a rank", True),
        Heading("by a host to others", True),
        Heading("device memory", True),
        Heading("host memory", True),
        Heading("messages", True),
        Heading("median message", True),
        *time_headings(timing),
    ]
    refused = [
        (label(point), each.reason)
        for point, each in zip(listed, outcomes, strict=True)
        if isinstance(each, Refusal)
    ]
    rows += [(name, "refused", *[rendering.MISSING] * (len(headings) - 2)) for name, _ in refused]
    rendering.show(Rows(headings, rows, "per step and rank, by setting"), "")
    for name, reason in refused:
        rendering.show(rendering.paragraph(f"{name} is refused: {reason}"))
    for name, each, total in zip((each.name for each in candidates), found, totals, strict=True):
        if each.note:
            rendering.show(rendering.paragraph(f"{name}: {each.note}"))
        elif links is not None:
            rendering.show(rendering.paragraph(f"{name}: {_link_sentences(total, hosts, links)[-1]}"))
    show_missing_times(times, [each.note for each in found], timing)
    for reason in dict.fromkeys(each.uncounted for each in found if each.uncounted):
        rendering.show(rendering.paragraph(f"Activations are not counted: {reason}."))
    rendering.show(
        rendering.paragraph(_sentence(recommend(candidates, capacity), candidates, capacity, timing))
    )


def _sentence(chosen: Recommendation, candidates: Sequence[Any], capacity: int | None, timing: Timing) -> str:
    shown = rendering.number_of_bytes
    if chosen.chosen is None:
        if not any(each.complete for each in candidates):
            return "No recommendation: the messages of no setting can be predicted."
        least = min((each for each in candidates if each.complete), key=lambda each: each.on_device)
        return (
            f"No setting fits in {shown(capacity)}{_before(least)}: {least.name} needs the least, "
            f"{shown(least.on_device)} per rank."
        )
    best = candidates[chosen.chosen]
    fits = (
        f"of the {len(candidates)} settings, {chosen.fitting} fit{'s' * (chosen.fitting == 1)} in {shown(capacity)}"
        if capacity is not None
        else "whether a setting fits is not known without --device-memory"
    )
    timed = "messages take" if timing.compute_ns is None else "step takes"
    compared = " for each sample" if chosen.per_sample else ""
    reason = _REASONS[chosen.decided_by].format(timed=timed)
    return (
        f"Use {best.name}: {reason}{compared}. It sends {shown(best.host_bytes)} per host to other "
        f"hosts and {shown(best.rank_bytes)} per rank in a step, and holds {shown(best.on_device)} on each device"
        f"{_before(best)}; {fits}."
    )


def _before(candidate: Candidate) -> str:
    return "" if candidate.counted else ", before activations"

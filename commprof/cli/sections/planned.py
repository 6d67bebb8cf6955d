"""The tables and sentences of ``plan``: one setting in full, or several settings compared, with a recommendation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from commprof.cli import rendering
from commprof.cli.rendering import Heading, Rows
from commprof.cli.sections.prediction_section import fit_sentence, memory_rows, movement_rows
from commprof.cli.sections.step_times import show_missing_times, show_time, time_cells, time_headings

if TYPE_CHECKING:
    from commprof.plan.api import Plan
    from commprof.plan.experts import Load
    from commprof.plan.hosts import Hosts, Links
    from commprof.plan.predictions import Job, Prediction
    from commprof.plan.rank_classes import RankClass
    from commprof.plan.traffic import Totals, Traffic

_MOST_CLASSES: Final = 4  # the most classes of ranks in a sentence


def show_one(prediction: Prediction, plan: Plan) -> None:
    """Print the memory, the messages and the sentences of the only setting of ``plan``."""
    from commprof.plan.api import latency_sentences
    from commprof.plan.traffic import histogram, totals_of, traffic_of

    hosts, capacity = plan.hosts, plan.capacity
    rendering.show(
        rendering.paragraph(f"The model in {prediction.precision}."),
        "",
        memory_rows(prediction.parts, hosts.ranks),
        "",
    )
    for sentence in _expert_sentences(prediction):
        rendering.show(rendering.paragraph(sentence))
    if prediction.uncounted:
        rendering.show(rendering.paragraph(f"Activations are not counted: {prediction.uncounted}."), "")
    if prediction.peak is not None:
        peak = prediction.peak
        most = rendering.number_of_bytes(peak.device)
        sentence = (
            f"A rank needs most in the {peak.phase}: {most} on its device. Not all parts are alive at once."
        )
        rendering.show(rendering.paragraph(sentence), "")
    if capacity is not None:
        rendering.show(
            rendering.paragraph(fit_sentence(prediction.on_device, capacity, not prediction.uncounted)), ""
        )
    if prediction.sent:
        traffic, totals = traffic_of(prediction.sent, hosts), totals_of(prediction.sent, hosts)
        rendering.show(_traffic_rows(traffic), "", _rank_rows(totals.classes))
        bins = histogram(traffic)
        if bins:
            rendering.show("", _size_rows(bins))
        rendering.show("")
        for sentence in [
            *_class_sentences(totals.classes),
            *_link_sentences(totals, hosts, plan.links),
            *latency_sentences(plan, prediction),
            *_gathers(prediction, plan.job),
        ]:
            rendering.show(rendering.paragraph(sentence))
        show_time(plan.timing.of(prediction, hosts), plan.timing)
    for sentence in [*prediction.decisions, *filter(None, [prediction.note])]:
        rendering.show(rendering.paragraph(sentence))
    if prediction.moved:
        rendering.show("", movement_rows(prediction.moved))
    for line in sorted({row.note for row in prediction.sent if row.note}):
        rendering.show(rendering.paragraph(f"  {line}"))


def _expert_sentences(prediction: Prediction) -> list[str]:
    """Return sentences about the experts that a rank stores, and about the load of the experts."""
    sentences = []
    shown = rendering.number_of_bytes
    for each in prediction.loads:
        layer = each.layer
        sentences.append(
            f"{each.count:,} layer{'s have' if each.count > 1 else ' has'} {layer.num_experts:,} experts each, ep_size "
            f"{layer.ep_size}, k {layer.k}, capacity factor {layer.capacity_factor:g}: a rank holds {each.local_experts:,} "
            f"of each layer, {shown(each.held_bytes)} of parameters."
        )
        if layer.tokens:
            sentences.append(_load_sentence(each))
    if prediction.expert_memory:
        states = sum(part.device for part in prediction.expert_memory)
        sentences.append(f"Experts and their states take {shown(states)} of the memory on the device.")
    return sentences


def _load_sentence(load: Load) -> str:
    layer = load.layer
    chosen = f"Of the {layer.tokens:,} tokens of a rank, the fullest expert gets {load.fullest:,.0f}"
    spread = "balanced" if layer.skew == 1 else f"{layer.skew:g} times the mean"
    rule = (
        f"max(ceil(tokens / experts x factor x k), {layer.min_capacity})"
        if layer.drop_tokens
        else "the fullest expert"
    )
    text = f"{chosen} ({spread}); an expert has {layer.capacity:,} slots ({rule})"
    if layer.drop_tokens:
        text += f", and {100 * load.dropped_share:.1f} % of the choices are dropped"
    return (
        f"{text}. Empty slots are sent and computed too. Without empty slots, the rank with the fullest expert has "
        f"{load.busiest_rank:.2f} times the mean number of tokens per rank."
    )


def _traffic_rows(traffic: Sequence[Traffic]) -> Rows:
    headings = [
        Heading("purpose"),
        Heading("groups x ranks"),
        Heading("issued"),
        Heading("messages", True),
        Heading("payload", True),
        Heading("padding", True),
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
            rendering.number_of_bytes(row.padding_bytes),
            rendering.number_of_bytes(row.wire_bytes_per_rank),
            rendering.number_of_bytes(row.between_hosts),
            "" if row.exact else "about",
        )
        for row in traffic
    ]
    return Rows(headings, rows, "messages per step")


def _rank_rows(classes: Sequence[RankClass]) -> Rows:
    from commprof.plan.rank_classes import spreads

    shown = {"messages": rendering.count}
    names = {"messages": "messages", "payload_bytes": "payload", "wire_bytes": "sent"}
    rows = [
        (names[name], *map(shown.get(name, rendering.number_of_bytes), each))
        for name, each in spreads(classes).items()
    ]
    headings = [Heading(""), Heading("least", True), Heading("mean", True), Heading("most", True)]
    return Rows(headings, rows, "of a rank, per step")


def _class_sentences(classes: Sequence[RankClass]) -> list[str]:
    if len(classes) < 2:
        return []
    listed = [
        f"{each.ranks:,} like rank {each.first_rank:,} send {rendering.number_of_bytes(each.sums.wire_bytes)}"
        for each in classes[:_MOST_CLASSES]
    ]
    more = [f"{len(classes) - _MOST_CLASSES:,} more"] if len(classes) > _MOST_CLASSES else []
    return [f"{len(classes):,} classes of ranks with equal traffic: {'; '.join([*listed, *more])}."]


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


def _gathers(prediction: Prediction, job: Job) -> list[str]:
    from commprof.plan.blocks import all_gathers, all_gathers_by_block, gather_unit_key
    from commprof.requested.configuration import read_configuration, zero_section
    from commprof.requested.zero.gather_configuration import read_gather_configuration
    from commprof.requested.zero.parameter_blocks import gathered_blocks

    if read_configuration(prediction.config).stage != 3:
        return []
    gathers = all_gathers(prediction.sent)
    if not gathers:
        return []
    gathering = read_gather_configuration(zero_section(prediction.config))
    if job.framework == "zero_runtime" and gathered_blocks(job.model.parameters, gathering):
        return [f"Stage 3 launches {gathers:,} all-gathers per step: each block of the model is a unit."]
    sentence = f"Stage 3 launches {gathers:,} all-gathers per step because each module is a unit"
    by_block = all_gathers_by_block(prediction, job)
    if by_block is None or by_block >= gathers:
        return [f"{sentence}."]
    return [f"{sentence}; by block it would be {by_block:,} (zero_optimization.{gather_unit_key(job)})."]


def show_comparison(plan: Plan) -> None:
    """Print a row for each setting, the reason why settings are refused, and the recommended setting."""
    from commprof.plan.api import compare, recommendation

    compared = compare(plan)
    shown = rendering.number_of_bytes
    rows = [
        (
            each.label,
            shown(each.totals.rank_bytes) if not each.prediction.note else rendering.MISSING,
            shown(each.totals.host_bytes) if not each.prediction.note else rendering.MISSING,
            shown(each.prediction.on_device),
            shown(sum(part.host for part in each.prediction.memory)),
            rendering.count(each.totals.messages) if not each.prediction.note else rendering.MISSING,
            shown(each.totals.median_bytes),
            *time_cells(each.timed, plan.timing),
        )
        for each in compared
    ]
    headings = [
        Heading("setting"),
        Heading("sent by a rank", True),
        Heading("by a host to others", True),
        Heading("device memory", True),
        Heading("host memory", True),
        Heading("messages", True),
        Heading("median message", True),
        *time_headings(plan.timing),
    ]
    rows += [(name, "refused", *[rendering.MISSING] * (len(headings) - 2)) for name, _ in plan.refused]
    rendering.show(Rows(headings, rows, "per step and rank, by setting"), "")
    for name, reason in plan.refused:
        rendering.show(rendering.paragraph(f"{name} is refused: {reason}"))
    for each in compared:
        if each.prediction.note:
            rendering.show(rendering.paragraph(f"{each.label}: {each.prediction.note}"))
        elif plan.links is not None:
            sentence = _link_sentences(each.totals, plan.hosts, plan.links)[-1]
            rendering.show(rendering.paragraph(f"{each.label}: {sentence}"))
    notes = [each.prediction.note for each in compared]
    show_missing_times([each.timed for each in compared], notes, plan.timing)
    for reason in dict.fromkeys(each.prediction.uncounted for each in compared if each.prediction.uncounted):
        rendering.show(rendering.paragraph(f"Activations are not counted: {reason}."))
    rendering.show(rendering.paragraph(recommendation(plan, compared)[1]))

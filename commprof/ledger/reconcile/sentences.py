"""Describes the ledger in sentences: what was requested, issued, executed and moved, and why these differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from commprof.ledger.levels import PART, STEPS, LedgerRow, Moved
from commprof.ledger.reconcile.remedy import remedy_sentence
from commprof.ledger.records import movement
from commprof.requested.communication import sign_optimizers
from commprof.requested.configuration import Configuration
from commprof.requested.support import optimizer_type
from commprof.schema import Op, Purpose

_MUCH: Final = 0.01  # Headers and bytes in send buffers are mentioned above this share of the modeled bytes.
_VOWELS: Final = ("a", "e", "i", "o", "u")


def gradient_sentences(
    config: Mapping[str, Any],
    configuration: Configuration,
    by_size: Mapping[int, Sequence[LedgerRow]],
    world_size: int,
    runtime: str,
) -> list[str]:
    """Return sentences about the requested and the issued reduction of gradients, and about the setting to use.

    Bytes are given as a factor of the gradient bytes. The list is empty if no gradients were reduced.

    Args:
        config: The config of the run.
        configuration: The config as the runtime reads it.
        by_size: The rows of gradients by the size of their groups, the largest size first. The factors depend on it.
        world_size: The number of ranks that reduce gradients with each other.
        runtime: ``deepspeed`` or ``zero_runtime``.
    """
    groups = {size: [row for row in rows if row.issued_payload_bytes] for size, rows in by_size.items()}
    issued = [row for rows in groups.values() for row in rows]
    if not issued or world_size < 2:  # One replica reduces at most its own copies of a weight.
        return []
    if (sentence := _in_another_way(config, issued, world_size)) is not None:
        return [sentence]
    sentences = (
        _gradient_sentence(config, configuration, groups, issued),
        remedy_sentence(config, configuration, next(rows for rows in groups.values() if rows), runtime),
    )
    return [sentence for sentence in sentences if sentence is not None]


def _gradient_sentence(
    config: Mapping[str, Any],
    configuration: Configuration,
    groups: Mapping[int, Sequence[LedgerRow]],
    issued: Sequence[LedgerRow],
) -> str | None:
    row = max(issued, key=lambda row: (row.issued_op != row.requested_op, row.issued_payload_bytes))
    if row.requested_op is None or row.issued_op is None:
        return None
    request = f"{_requesting_words(config, configuration)} requested {_article(row.requested_op)}"
    payload = sum(each.issued_payload_bytes for each in issued)
    factors = {size: _factors(rows) for size, rows in groups.items() if rows}
    if row.issued_op == row.requested_op:
        used = {size: (used, used) for size, (used, _) in factors.items()}
        return f"{request}, and {_article(row.issued_op)} was issued: {_on_the_wire(used)}."
    cause = _turning_words(config, configuration, row.issued_op)
    ops = row.issued_op, row.requested_op
    alike = sum(each.issued_payload_bytes for each in issued if (each.issued_op, each.requested_op) == ops)
    if alike < payload:
        cause = f"for {100 * alike / payload:.0f} % of the bytes, {cause}"
    same = all(used == wanted for used, wanted in factors.values())
    return f"{request}; {cause}: {_on_the_wire(factors)}{', as much as requested' if same else ''}."


def _factors(rows: Sequence[LedgerRow]) -> tuple[str, str]:
    """Return the wire bytes of a rank divided by the gradient bytes, as issued and as requested."""
    used = sum(each.issued_wire_bytes for each in rows) / sum(each.issued_payload_bytes for each in rows)
    requested_bytes = sum(each.expected_payload_bytes or 0 for each in rows)
    wanted = sum(each.requested_wire_bytes or 0.0 for each in rows) / max(requested_bytes, 1)
    return f"{used:.2f}", f"{wanted:.2f}"


def _on_the_wire(factors: Mapping[int, tuple[str, str]]) -> str:
    """Return a text with the factor of each group size: as issued, and as requested if this is different."""
    amounts = {
        size: used if used == wanted else f"{used} instead of {wanted}"
        for size, (used, wanted) in factors.items()
    }
    (first, amount), *others = amounts.items()
    text = f"{amount} of the gradient bytes on the wire per rank at n = {first}"
    return f"{text}{''.join(f', {each} in groups of {size}' for size, each in others)} (modelled)"


def wrapper_sentence(names: str, rows: Sequence[LedgerRow]) -> str | None:
    """Return a sentence about the reduction that wrappers of models requested. None if they requested none.

    Bytes are given as a factor of the gradient bytes.
    """
    mine = [row for row in rows if row.when == STEPS and row.purpose == Purpose.GRADIENT_REDUCE]
    asked = [row for row in mine if row.requested_op is not None and row.expected_payload_bytes]
    if not asked:
        return None
    ops = " and ".join(_article(op) for op in dict.fromkeys(str(row.requested_op) for row in asked))
    payload = max(row.expected_payload_bytes or 0 for row in asked)
    wire = sum(row.requested_wire_bytes or 0.0 for row in asked) / payload
    sizes = sorted({row.group_size for row in asked})
    among = f"n = {sizes[0]}" if len(sizes) == 1 else f"groups of {_listed(sizes)} ranks"
    return (
        f"{names} requested {ops} of the gradients: {wire:.2f} of the gradient bytes on the wire per rank at {among} "
        "(modelled)."
    )


def _in_another_way(config: Mapping[str, Any], issued: Sequence[LedgerRow], world_size: int) -> str | None:
    """Return a sentence if a key of zero_runtime replaces the sum over all ranks by another method, and None otherwise.

    In this case no single factor describes the traffic.
    """
    kind = optimizer_type(config)
    ops = ", ".join(dict.fromkeys(str(row.issued_op) for row in issued))
    block = config.get("communication")
    block = block if isinstance(block, Mapping) else {}
    if kind in sign_optimizers.NAMES:
        name = config["optimizer"]["type"]
        return (
            f"optimizer.type: {name} has the ranks send signs instead of gradients after its warm-up: {ops}."
        )
    if block.get("bounded_delay") and any(row.issued_op == Op.SEND for row in issued):
        return (
            f"communication.bounded_delay: {block['bounded_delay']} has each rank send its gradients to every other one: "
            f"{ops} in place of an all_reduce."
        )
    if block.get("topology") not in (None, 1) and any(row.group_size != world_size for row in issued):
        return (
            f"communication.topology: {block['topology']} has sums of gradients go along the axes of a grid of ranks, one "
            f"after the other: {ops}."
        )
    return None


def _requesting_words(config: Mapping[str, Any], configuration: Configuration) -> str:
    if not configuration.partitions:
        return "stage 0, which partitions nothing, whatever reduce_scatter says,"
    if configuration.gradient_reduction != "auto":
        return f"gradient_reduction: {configuration.gradient_reduction}"
    return _key(config, "reduce_scatter", configuration.reduce_scatter)


def _turning_words(config: Mapping[str, Any], configuration: Configuration, issued_op: str) -> str:
    """Return a clause with the key or the rule that turned the requested operation into ``issued_op``."""
    if configuration.partitions and configuration.reduces_flat_groups:
        return (
            "bf16 at stage 1 with fp32 gradient accumulation reduces all gradients in one message and turned it into "
            f"{issued_op}"
        )
    if issued_op == Op.ALL_TO_ALL:
        return "it was issued as an all_to_all followed by a local sum" + (
            ""
            if configuration.reduce_scatter_impl != "auto"
            else ", since gloo has no reduce_scatter of its own"
        )
    if configuration.stage > 2:
        return f"stage 3, where it is overridden or a parameter is larger than a bucket, turned it into {issued_op}"
    if configuration.gradient_reduction != "auto":
        return f"the runtime turned it into {issued_op}"
    if not configuration.buffers_are_contiguous:
        return f"contiguous_gradients: false overrides it and turned it into {issued_op}"
    words = _key(config, "use_multi_rank_bucket_allreduce", configuration.use_multi_rank_bucket_allreduce)
    into = "one reduce for each owner" if issued_op == Op.REDUCE else issued_op
    return f"{words} turned it into {into}"


def _key(config: Mapping[str, Any], name: str, value: bool) -> str:
    """Return ``name: true`` if the config has the key, and ``name, true by default,`` otherwise."""
    section = config.get("zero_optimization")
    written = isinstance(section, Mapping) and name in section
    word = str(value).lower()
    return f"{name}: {word}" if written else f"{name}, {word} by default,"


def _article(op: str) -> str:
    return f"{'an' if op.startswith(_VOWELS) else 'a'} {op}"


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def execution_sentences(rows: Sequence[LedgerRow]) -> list[str]:
    """Return sentences about operations that the backend replaced, or for which it sends more than the model says."""
    sentences: dict[tuple[str, str], str] = {}
    for row in rows:
        if row.issued_op is None or row.executed_op is None or not row.issued_wire_bytes:
            continue
        ran, issued = (
            (value or 0.0) / row.issued_payload_bytes
            for value in (row.executed_wire_bytes, row.issued_wire_bytes)
        )
        share = f"of the payload on the wire per rank at n = {row.group_size} (modelled)"
        amount = f"{ran:.2f} instead of {issued:.2f} {share}"
        if row.executed_op != row.issued_op:
            sentences[row.issued_op, row.executed_op] = (
                f"The backend ran {row.issued_op} as {row.executed_op}: {amount}."
            )
        elif f"{ran:.2f}" != f"{issued:.2f}":
            sentences[row.issued_op, row.executed_op] = (
                f"The backend sends more for {_article(row.issued_op)} than the best algorithm would: {amount}."
            )
    return list(sentences.values())


def moved_sentence(row: Moved) -> str:
    """Return a sentence that compares the counters of one host, or of all hosts together, with the model."""
    over = {STEPS: f"in {row.steps} steps", PART: "between its first and its last reading"}.get(
        row.when, "over the whole run"
    )
    together = row.host == movement.ALL_HOSTS
    who = "All hosts together" if together else f"Host {row.host}"
    through = "" if together else f" through {row.device}"
    if row.when == STEPS and row.outside_bytes:
        over += (
            f" and the evaluations and checkpoints after them ({round(row.outside_bytes):,} bytes modelled)"
        )
    head = f"{who} sent {row.sent_bytes:,} bytes{through} {over} (counters of the whole host)"
    if row.expected_bytes is None:
        return f"{head}; not compared: {row.reason}."
    ratio = row.sent_bytes / row.expected_bytes
    text = f"{head}: {ratio:.3f} times the {round(row.expected_bytes):,} modelled from what was executed"
    if row.header_bytes and row.header_bytes > _MUCH * row.expected_bytes:
        text += f", {row.header_bytes:,} bytes of headers included"
    if ratio > 1 and row.queued_first_bytes > _MUCH * row.expected_bytes:
        text += (
            f", and up to {row.queued_first_bytes:,} bytes that waited in send buffers at the first reading"
        )
    if ratio < 1 and (row.queued_last_bytes or 0) > _MUCH * row.expected_bytes:
        text += f", and up to {row.queued_last_bytes:,} bytes waited in send buffers at the last reading"
    if ratio < 1 - movement.TOLERANCE and row.queued_last_bytes is None:
        text += (
            "; the difference is not judged, since bytes that waited in send buffers at the end are not known"
        )
    if movement.is_short(row):
        return text + "; fewer bytes moved than the model predicts, so the executed level above is wrong."
    rest = row.sent_bytes - round(row.expected_bytes)
    if movement.is_long(row):
        return f"{text}; {rest:,} bytes more than the records explain: a message without a record, or another program."
    if row.allowed_bytes is None and ratio > 1 + movement.TOLERANCE:
        return text + "; the rest is other traffic of the host, headers, or unrecorded traffic."
    return text + "."


def unread_sentences(uncovered: Mapping[str, str], moved: Sequence[Moved]) -> list[str]:
    """Return a sentence for each host without a row in ``moved``, whose moved bytes are not known."""
    known = {row.host for row in moved}
    return [
        f"What host {host} moved is not known: {text}."
        for host, text in uncovered.items()
        if host not in known
    ]

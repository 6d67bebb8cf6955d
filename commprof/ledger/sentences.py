"""The ledger in sentences: what the config asked for, what was issued, what ran, what moved, and why they differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from commprof.ledger import movement
from commprof.ledger.levels import STEPS, LedgerRow, Moved
from commprof.requested.configuration import Configuration
from commprof.schema import Op, Purpose, wire_bytes

_UNIT: Final = 1_000_000  # any payload: only the ratio of two models is read
_VOWELS: Final = ("a", "e", "i", "o", "u")


def gradient_sentence(
    config: Mapping[str, Any], configuration: Configuration, rows: Sequence[LedgerRow], world_size: int
) -> str | None:
    """What was asked for the gradients and what came of it, with its factor of the gradient bytes; None without them."""
    mine = [row for row in rows if row.when == STEPS and row.purpose == Purpose.GRADIENT_REDUCE]
    issued = [row for row in mine if row.issued_count]
    if not issued or issued[0].requested_op is None:
        return None
    row = issued[0]
    requested = str(row.requested_op)
    asked = f"{_asking_words(config, configuration)} asked for {_article(requested)}"
    used, wanted = (_factor(op, world_size) for op in (row.issued_op, requested))
    if row.issued_op == requested:
        return (
            f"{asked}, and {_article(requested)} was issued: {used:.2f} of the gradient bytes on the wire per rank "
            f"at n = {world_size} (modelled)."
        )
    amount = (
        f"{used:.2f} instead of {wanted:.2f}"
        if f"{used:.2f}" != f"{wanted:.2f}"
        else f"{used:.2f}, as asked,"
    )
    cause = _turning_words(config, configuration, str(row.issued_op))
    return f"{asked}; {cause}: {amount} of the gradient bytes on the wire per rank at n = {world_size} (modelled)."


def _asking_words(config: Mapping[str, Any], configuration: Configuration) -> str:
    if not configuration.partitions:
        return "stage 0, which partitions nothing, whatever reduce_scatter says,"
    if configuration.gradient_reduction != "auto":
        return f"gradient_reduction: {configuration.gradient_reduction}"
    return _key(config, "reduce_scatter", configuration.reduce_scatter)


def _turning_words(config: Mapping[str, Any], configuration: Configuration, issued_op: str) -> str:
    """Which key, or which rule, made ``issued_op`` of what was asked."""
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
    if configuration.gradient_reduction != "auto" or configuration.stage > 2:
        return f"the runtime turned it into {issued_op}"
    if not configuration.buffers_are_contiguous:
        return f"contiguous_gradients: false overrides it and turned it into {issued_op}"
    words = _key(config, "use_multi_rank_bucket_allreduce", configuration.use_multi_rank_bucket_allreduce)
    into = "one reduce for each owner" if issued_op == Op.REDUCE else issued_op
    return f"{words} turned it into {into}"


def _key(config: Mapping[str, Any], name: str, value: bool) -> str:
    """``name: true`` where the config has the key, ``name, true by default,`` where it has not."""
    section = config.get("zero_optimization")
    written = isinstance(section, Mapping) and name in section
    word = str(value).lower()
    return f"{name}: {word}" if written else f"{name}, {word} by default,"


def _article(op: str) -> str:
    return f"{'an' if op.startswith(_VOWELS) else 'a'} {op}"


def _factor(op: str | None, world_size: int) -> float:
    return 0.0 if op is None else wire_bytes(op, _UNIT, world_size) / _UNIT


def execution_sentences(rows: Sequence[LedgerRow], world_size: int) -> list[str]:
    """Where the backend ran another operation than was issued, with the factor that this costs."""
    found = {}
    for row in rows:
        if row.executed_op is None or row.issued_op in (None, row.executed_op, Op.BARRIER):
            continue
        ratio = (
            row.executed_wire_bytes / row.issued_wire_bytes
            if row.executed_wire_bytes and row.issued_wire_bytes
            else 1
        )
        found[row.issued_op, row.executed_op] = (
            f"The backend ran {row.issued_op} as {row.executed_op}: {ratio:.2f} times the modelled bytes of "
            f"{_article(str(row.issued_op))} ({_factor(row.executed_op, world_size):.2f} instead of "
            f"{_factor(row.issued_op, world_size):.2f} of the payload per rank at n = {world_size})."
        )
    return list(found.values())


def moved_sentence(row: Moved) -> str:
    """One host's counters beside the model."""
    over = f"in {row.steps} steps" if row.when == STEPS else "over the whole run"
    head = f"Host {row.host} sent {row.sent_bytes:,} bytes through {row.device} {over} (counters of the whole host)"
    if row.expected_bytes is None:
        return f"{head}; not compared: {row.reason}."
    ratio = row.sent_bytes / row.expected_bytes
    text = f"{head}: {ratio:.3f} of the {round(row.expected_bytes):,} modelled from what was executed"
    if movement.agrees(row):
        return text + "."
    if ratio > 1:
        return text + "; the rest is other traffic of the host, or nobody's that was recorded."
    return text + "; less moved than the model has, so what was executed is not what is said here."

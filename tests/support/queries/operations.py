"""Computes operations as docs/analysis.md defines them ("What is counted", "Bytes"), with plain loops over records.

This reference shares no code and no method with commprof: no SQL, no sums by rank, no comparison of ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

Row = dict[str, Any]

FROM_LOWEST_RANK = ("step", "micro_step", "phase", "op", "device", "api", "call_site")
FROM_ANY_RANK = ("after_step", "intended_op", "purpose", "bucket", "owner", "dtype", "reduce_op", "backend")
FROM_ANY_RANK += ("group_desc", "group_size", "padding_bytes")  # the largest value if ranks differ
MEASURES = ("collectives", "records", "payload_bytes", "padding_bytes", "wire_bytes", "executed_wire_bytes")
MEASURES += ("host_ns", "exposed_ns", "tensors", "timed")
NULL_IF_ALL_ARE = ("padding_bytes", "host_ns", "exposed_ns")


def operations(records: Iterable[Row], sums: Iterable[Row] = ()) -> list[Row]:
    """Return one row for each collective, each send and recv, and each combination of keys in ``sums``.

    ``sums`` are rows of the table ``aggregates``.
    """
    collectives: dict[Any, list[Row]] = defaultdict(list)
    uses: Counter[Any] = Counter()
    messages = []
    for record in sorted(records, key=lambda each: (each["issue_ns"], each["seq"])):
        if record["op"] in ("send", "recv"):
            messages.append(record)
            continue
        number = (*_group(record), record["pg_seq"])
        # A rank takes part in each collective once. If a rank uses the same number again, the name of the group was
        # reused and its numbers restarted, so this is a different collective.
        uses[number, record["rank"]] += 1
        collectives[number, uses[number, record["rank"]]].append(record)
    combinations: dict[Any, dict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    keys = (
        "step",
        "phase",
        "op",
        "intended_op",
        "purpose",
        "group_size",
        "attempt",
        "pg",
        "group_ranks",
        "after_step",
    )
    for each in sums:
        of_rank = combinations[tuple(each[key] for key in keys)][each["rank"]]
        of_rank.update(
            {name: each[name] or 0 for name in ("calls", "payload_bytes", "host_ns", "exposed_ns")}
        )
        of_rank["known"] += each["exposed_ns"] is not None
    rows = [_collective(members) for members in collectives.values()] + _messages(messages)
    rows += [
        dict(zip(keys, combination, strict=True)) | _summed(combination[2], list(ranks.values()))
        for combination, ranks in combinations.items()
    ]
    for row in rows:
        row["wire_bytes"] = wire_bytes(row["op"], row["payload_bytes"], row["group_size"])
    return rows


def wire_bytes(op: str, size: int, ranks: int) -> Fraction:
    """Return the wire bytes: the bytes that all ranks of the group send, divided by the number of ranks.

    For a send, these are its own bytes.
    """
    if op == "send":
        return Fraction(size)
    if op in ("recv", "barrier") or ranks < 2:
        return Fraction(0)
    shard = Fraction(size, ranks)
    if op in ("gather", "scatter"):
        return (ranks - 1) * shard / ranks  # n - 1 shards are sent, to or from the root
    rounds = 2 if op == "all_reduce" else 1
    return rounds * (ranks - 1) * shard


def totals(rows: Iterable[Row], by: Sequence[str]) -> dict[tuple[Any, ...], Row]:
    """Return the measures of ``rows`` for each combination of values of the columns ``by``. A null is None."""
    combinations: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        combinations[tuple(row.get(name) for name in by)].append(row)
    if not by:
        combinations.setdefault((), [])
    answer = {}
    for values, members in combinations.items():
        answer[values] = measures = {}
        for name in MEASURES:
            known = [row[name] for row in members if row.get(name) is not None]
            measures[name] = sum(known) if known or name not in NULL_IF_ALL_ARE else None
        if any(row["executed_wire_bytes"] is None for row in members):
            measures["executed_wire_bytes"] = None
        # The hosts are not known here, so the bytes between hosts are not known either, unless there are no bytes.
        measures["between_hosts_bytes"] = None if any(row["wire_bytes"] for row in members) else 0
    return answer


def _group(record: Row) -> tuple[Any, ...]:
    return record["attempt"], record["pg"], record["group_ranks"]


def _mean(values: list[int]) -> Fraction | None:
    return Fraction(sum(values), len(values)) if values else None


def _rounded(value: Fraction) -> int:
    return int(value + Fraction(1, 2))


def _known(members: Iterable[Row], name: str) -> list[Any]:
    return [each[name] for each in members if each[name] is not None]


def _host_ns(members: Iterable[Row]) -> list[int]:
    return [each["return_ns"] - each["issue_ns"] for each in members if each["return_ns"] is not None]


def _collective(members: list[Row]) -> Row:
    members.sort(key=lambda each: each["rank"])
    row = {name: members[0][name] for name in ("attempt", "pg", "group_ranks")}
    row |= {name: next(iter(_known(members, name)), None) for name in FROM_LOWEST_RANK}
    row |= {name: max(_known(members, name), default=None) for name in FROM_ANY_RANK}
    sizes, waits = _known(members, "payload_bytes"), _known(members, "exposed_ns")
    mean = _rounded(Fraction(sum(sizes), len(sizes)))
    return row | {
        "collectives": 1,
        "records": len(members),
        "payload_bytes": mean if row["op"] == "all_to_all" else max(sizes),
        "tensors": max(_known(members, "num_tensors")),
        "host_ns": _mean(_host_ns(members)),
        "exposed_ns": _mean(waits),
        "timed": len(waits),
        "root": members[0]["peer"],
    }


def _messages(records: list[Row]) -> list[Row]:
    """Return one row for each send and recv, given in the order of issue.

    A recv is matched with a send of its source. A recv from any source is matched with one of the remaining sends to
    its rank.
    """
    to_take: Counter[Any] = Counter()
    to_rank: Counter[Any] = Counter()
    for record in records:
        if record["op"] == "send":
            to_take[(*_group(record), record["rank"], record["peer"])] += 1
            to_rank[(*_group(record), record["peer"])] += 1
    rows = []
    for record in sorted(records, key=lambda each: each["peer"] < 0):
        ends = record["rank"], record["peer"]
        counts = 1
        if record["op"] == "recv":
            ends = ends[::-1]
            sends, key = to_take, (*_group(record), *ends)
            arrived = (*_group(record), record["rank"])
            if record["peer"] < 0:
                sends, key = to_rank, arrived
            if sends[key]:
                counts = 0  # the bytes are counted at the send
                sends[key] -= 1
                to_rank[arrived] -= sends is to_take
        padding, waits = record["padding_bytes"], _known([record], "exposed_ns")
        row = {
            name: record[name] for name in (*FROM_LOWEST_RANK, *FROM_ANY_RANK, "attempt", "pg", "group_ranks")
        }
        rows.append(
            row
            | {
                "collectives": counts,
                "records": 1,
                "payload_bytes": counts * record["payload_bytes"],
                "padding_bytes": None if padding is None else counts * padding,
                "tensors": counts * record["num_tensors"],
                "host_ns": _mean(_host_ns([record])),
                "exposed_ns": _mean(waits),
                "timed": len(waits),
                "root": -1,
                "sender": ends[0],
                "receiver": ends[1],
            }
        )
    return rows


def _summed(op: str, ranks: list[Counter[str]]) -> Row:
    """Return one row from the sums of each rank.

    The number of collectives is the largest number of any rank. Messages are counted at the send.
    """
    calls, sizes = [each["calls"] for each in ranks], [each["payload_bytes"] for each in ranks]
    waits = [each["exposed_ns"] for each in ranks if each["known"]]
    is_message = op in ("send", "recv")
    payload = _rounded(Fraction(sum(sizes), len(sizes))) if op == "all_to_all" else max(sizes)
    return {
        "collectives": sum(calls) if is_message else max(calls),
        "records": sum(calls),
        "payload_bytes": sum(sizes) if is_message else payload,
        "tensors": 0,
        "host_ns": Fraction(sum(each["host_ns"] for each in ranks), 1 if is_message else len(ranks)),
        "exposed_ns": Fraction(sum(waits), 1 if is_message else len(waits)) if waits else None,
        "timed": 0,
        "root": -1,
    } | ({"collectives": 0, "payload_bytes": 0} if op == "recv" else {})

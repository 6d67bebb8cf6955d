"""Who sends how much to whom in all_to_alls with unequal splits, as recorded. Pure.

Such a collective has its bytes in rows of their own, one for each pair of ranks, so that a matrix has them where they
went, and sums over all rows have what was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.distinct import numbered
from commprof.analysis.text_numbers import encoded_text
from commprof.schema import Op, parse_ranks, parse_splits

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

COLUMNS: Final = ("input_splits", "output_splits")


class Exchanges(NamedTuple):
    """The all_to_alls with splits of one group.

    Attributes:
        places: of each its place among the collectives.
        ranks: the global ranks of the group, in its order.
        sent: bytes by collective, sender and receiver, both as positions in the group: (collectives, n, n) with nothing on
            the diagonal; not-a-number where no record says.
    """

    places: Numbers
    ranks: Numbers
    sent: Floats


def exchanges(rows: pa.Table, order: Numbers, starts: Numbers, lengths: Numbers) -> list[Exchanges]:
    """Those among collectives of which ``rows`` are the records.

    Args:
        rows: records, with :data:`COLUMNS`, op, group_ranks and payload_bytes.
        order: the places of ``rows`` by collective, those of one by rank.
        starts, lengths: of each collective in ``order``.
    """
    if all(rows[name].null_count == len(rows) for name in COLUMNS):
        return []
    has_splits = pc.or_(*(pc.is_valid(rows[name]) for name in COLUMNS))
    mine = pc.and_(has_splits, pc.equal(rows["op"].cast(pa.string()), str(Op.ALL_TO_ALL)))
    flags: Flags = mine.to_numpy(zero_copy_only=False)[order]
    uneven = np.flatnonzero(np.logical_or.reduceat(flags, starts)) if len(starts) else starts
    groups = encoded_text(rows["group_ranks"])
    of_group = groups.indices.to_numpy(zero_copy_only=False)[order[starts[uneven]]]
    found = []
    for number in np.unique(of_group).tolist():
        ranks: Numbers = np.array(parse_ranks(groups.dictionary[number].as_py()), np.int64)
        places = uneven[of_group == number]
        found.append(Exchanges(places, ranks, _sent(rows, order, starts[places], lengths[places], ranks)))
    return found


def _sent(rows: pa.Table, order: Numbers, starts: Numbers, lengths: Numbers, ranks: Numbers) -> Floats:
    """Bytes of each collective between the positions in ``ranks``; all not-a-number where not every rank was recorded."""
    n = len(ranks)
    whole = lengths == n
    sent = np.full((len(starts), n, n), np.nan)
    # Records stand by rank, splits by position in the group.
    by_rank = np.empty(n, np.int64)
    by_rank[np.argsort(ranks)] = np.arange(n)
    places = order[starts[whole][:, None] + by_rank]
    chosen = rows.take(pa.array(places.ravel()))
    given, got = (_shares(chosen, name, n).reshape(-1, n, n) for name in COLUMNS)
    # What a sender's record does not say may be in those of its receivers.
    sent[whole] = np.where(np.isnan(given), got.transpose(0, 2, 1), given)
    return sent * (1 - np.eye(n))


def _shares(rows: pa.Table, name: str, ranks: int) -> Floats:
    """Bytes for each rank of the group by record: (records, ranks). An input without splits has equal parts."""
    texts = encoded_text(rows[name])
    parsed = [parse_splits(text, ranks) or (np.nan,) * ranks for text in texts.dictionary.to_pylist()]
    table: Floats = np.array([*parsed, (np.nan,) * ranks], np.float64)
    known = texts.is_valid().to_numpy(zero_copy_only=False)
    indices = pc.fill_null(texts.indices, len(parsed)).to_numpy(zero_copy_only=False)
    shares: Floats = table[indices]
    if name == COLUMNS[0]:
        sizes = rows["payload_bytes"].to_numpy().astype(np.float64)
        shares[~known] = (sizes[~known] / ranks)[:, None]
    return shares


class PairRows(NamedTuple):
    """Rows for pairs of ranks: of which collective each has its columns, and what was sent in all of its kind."""

    places: Numbers
    senders: Numbers
    receivers: Numbers
    sent_bytes: Numbers


def pair_rows(exchanged: Sequence[Exchanges], kinds: pa.Table) -> PairRows:
    """``exchanged`` added up over collectives that are alike in ``kinds`` (a row for each collective), by pair."""
    parts: list[tuple[Numbers, ...]] = []
    for one in exchanged:
        codes, first = numbered(kinds.take(pa.array(one.places)))
        known = ~np.isnan(one.sent).any(axis=(1, 2))
        sums = np.zeros((len(first), *one.sent.shape[1:]))
        np.add.at(sums, codes[known], one.sent[known])
        kind, sender, receiver = np.nonzero(sums)
        parts.append(
            (
                one.places[first[kind]],
                one.ranks[sender],
                one.ranks[receiver],
                np.rint(sums[kind, sender, receiver]).astype(np.int64),
            )
        )
    return PairRows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

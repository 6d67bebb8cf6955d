"""Sample the arrivals of the same steps on every host, for runs with too many records to read all of them.

A hash of the step number selects the steps. Each host stores the records of the steps with the lowest hashes,
up to its share of :data:`MOST_ROWS`. The host also stores a hash bound. The sample of the host is complete
for all steps with a hash below this bound. For the steps below the lowest bound of all hosts, the records of
all ranks are therefore available. These records are compared like the records of a whole run. If fewer than
:data:`_FEWEST_STEPS` steps fit, a half, a quarter, ... of their collectives is stored, selected by a hash of
their number in the group. Messages and records outside of steps are not in the sample. The own time of a rank
between two collectives is computed from all of its records before sampling.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks import cpp_waits
from commprof.align.ranks.collectives import matchable
from commprof.align.ranks.cpp_waits import CppWaits
from commprof.align.ranks.own_times import OWN_COLUMNS, with_own_times
from commprof.align.ranks.rank_arrivals import NEEDED
from commprof.trace.reader import Scan
from commprof.trace.tables import arrow_schema, read_columns

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

MOST_ROWS: Final = 400_000  # rows of all hosts; comparing this many takes 3 s
_MOST_OF_HOST: Final = 20_000
_FEWEST_STEPS: Final = 8
_MOST_OF_PART: Final = 100_000  # the most rows that are compared at once, unless one step has more
_MOST_HALVINGS: Final = 20
_ALL: Final = 1 << 64  # higher than any hash
_KEY: Final = b"commprof.sample"
_CONSTANT: Final = ("is_p2p", "captured")  # false in every row of a sample
_COUNTED: Final = ("attempt", "step", "issue_ns", "group_size", "pg_seq", "op", "peer", *_CONSTANT)


class Sample(NamedTuple):
    """The sample of one host, or of all hosts.

    Attributes:
        rows: The records of collectives, with OWN_COLUMNS.
        below: The hash bound. The sample contains all steps with a lower hash.
        halvings: How often the number of collectives of these steps was halved.
        steps: The number of training steps of the host or run, including those that are not in the sample.
        span_ns: The time from the first collective to the last, in ns.
    """

    rows: pa.Table
    below: int
    halvings: int
    steps: int
    span_ns: int

    @property
    def share(self) -> float:
        """The share of the collectives of the sampled steps that is in the sample."""
        return 0.5**self.halvings


def schema() -> pa.Schema:
    """Return the Arrow schema of the rows of a sample."""
    of_records = arrow_schema("collectives")
    fields = [
        pa.field(name, pa.int64()) if name in OWN_COLUMNS else of_records.field(name)
        for name in NEEDED
        if name not in _CONSTANT
    ]
    return pa.schema([field.remove_metadata().with_nullable(True) for field in fields])


def of_host(collectives: pa.Table | Scan, ranks: int, world: int, waits: CppWaits | None = None) -> pa.Table:
    """Return the sample of a host as a table. Its schema metadata contains the other fields of :class:`Sample`.

    Args:
        collectives: The records of the host.
        ranks: The number of ranks on the host.
        world: The number of ranks in the job.
        waits: The waits in C++ in the processes of the host, which are needed for the own times.

    Raises:
        TraceError: A file cannot be read.
    """
    most = min(_MOST_OF_HOST, MOST_ROWS * ranks // max(world, ranks, 1))
    collectives_of_step: dict[int, int] = {}
    first, last = [], []
    for rows in _processes(collectives, _COUNTED):
        ends = pc.min_max(rows["issue_ns"]).as_py()
        if ends["min"] is not None:
            first.append(ends["min"])
            last.append(ends["max"])
        for step, count in zip(*(of.tolist() for of in _counts(_compared(rows))), strict=True):
            collectives_of_step[step] = collectives_of_step.get(step, 0) + count
    steps, counts = (
        np.array(list(values), np.int64)
        for values in (collectives_of_step.keys(), collectives_of_step.values())
    )
    fitting = int((np.cumsum(counts[np.argsort(_hashes(steps))]) <= most).sum())
    is_halved = fitting < min(_FEWEST_STEPS, len(steps))
    lowest = np.ones(len(steps), np.int64) if is_halved else counts
    below = _bound(steps, lowest, _FEWEST_STEPS if is_halved else most)
    needed = tuple(name for name in NEEDED if name not in OWN_COLUMNS)
    needed = tuple(dict.fromkeys((*needed, *(cpp_waits.SOURCES if waits else ()))))
    halvings = 0
    sampled = schema().empty_table()
    for rows in _processes(collectives, needed):
        rows = rows if waits is None else waits.beside(rows)
        part = _of_steps(_compared(with_own_times(rows)), below, halvings)
        sampled = pa.concat_tables([sampled, part.select(schema().names).cast(schema())])
        while len(sampled) > most and halvings < _MOST_HALVINGS:
            halvings += 1
            sampled = _of_steps(sampled, below, halvings)
    span_ns = max(last) - min(first) if first else 0
    return as_table(Sample(sampled, below if len(sampled) <= most else 0, halvings, len(steps), span_ns))


def as_table(sample: Sample) -> pa.Table:
    """Return the rows of ``sample``, with its other fields in the schema metadata."""
    facts = {name: value for name, value in sample._asdict().items() if name != "rows"}
    return sample.rows.replace_schema_metadata({_KEY: json.dumps(facts).encode()})


def of_table(table: pa.Table) -> Sample:
    """Return the sample that :func:`as_table` stored in ``table``."""
    return Sample(table, **facts_of(table))


def facts_of(sample: pa.Table) -> dict[str, Any]:
    """Return the fields in the schema metadata of a sample, which :func:`joined` needs from each host."""
    facts: dict[str, Any] = json.loads(sample.schema.metadata[_KEY])
    return facts


def joined(rows: pa.Table, facts: Sequence[Mapping[str, Any]]) -> Sample:
    """Return the sample of a run from the ``rows`` of all its hosts: the steps that all hosts have.

    Args:
        facts: The fields of :class:`Sample` without the rows, for each host.
    """
    halvings = max((of["halvings"] for of in facts), default=0)
    rows = _of_steps(rows, min((of["below"] for of in facts), default=0), halvings)
    below = _bound(*_counts(rows), MOST_ROWS)
    below = min([below, *(of["below"] for of in facts)])
    steps, span_ns = (max((of[name] for of in facts), default=0) for name in ("steps", "span_ns"))
    return Sample(_of_steps(rows, below, halvings).cast(schema()), below, halvings, steps, span_ns)


def parts_of(sample: Sample) -> Iterator[pa.Table]:
    """Yield the rows of ``sample`` as records, in partitions of whole steps."""
    rows = sample.rows.combine_chunks()
    for name in _CONSTANT:
        rows = rows.append_column(name, pa.repeat(pa.scalar(False), len(rows)))
    codes = _codes(rows)
    order = np.argsort(codes, kind="stable")
    _, counts = np.unique(codes, return_counts=True)
    begin = end = 0
    for count in counts.tolist():
        if end > begin and end + count - begin > _MOST_OF_PART:
            yield rows.take(pa.array(order[begin:end]))
            begin = end
        end += count
    if end:
        yield rows.take(pa.array(order[begin:end]))


def steps_in(sample: Sample) -> int:
    """Return the number of steps in ``sample``."""
    return len(np.unique(_codes(sample.rows)))


def _processes(collectives: pa.Table | Scan, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Yield the records in batches. Each batch contains all records of its processes."""
    if not isinstance(collectives, Scan):
        yield collectives.select(columns)
        return
    for file in collectives.files:
        yield read_columns(file, columns)
    if len(collectives.rest):
        yield collectives.rest.select(columns)


def _compared(rows: pa.Table) -> pa.Table:
    """Return the collectives of several ranks within steps."""
    matched = matchable(rows)
    within = pc.and_(pc.greater_equal(matched["step"], 0), pc.greater(matched["group_size"], 1))
    return matched.filter(pc.and_(within, pc.invert(matched["is_p2p"])))


def _codes(rows: pa.Table) -> Numbers:
    """Return the step and attempt of each row as one number."""
    attempt, step = (rows[name].to_numpy().astype(np.int64) for name in ("attempt", "step"))
    codes: Numbers = (attempt << 32) + step
    return codes


def _counts(rows: pa.Table) -> tuple[Numbers, Numbers]:
    """Return the steps of ``rows`` and the number of rows of each step."""
    steps, counts = np.unique(_codes(rows), return_counts=True)
    return steps, counts


def _of_steps(rows: pa.Table, below: int, halvings: int) -> pa.Table:
    """Return the rows of the steps with a hash below ``below``.

    After ``halvings``, only the rows of the remaining collectives are returned.
    """
    codes = _codes(rows)
    chosen = _hashes(codes) < np.uint64(below) if below < _ALL else np.ones(len(rows), bool)
    if halvings:
        numbers = _hashes(codes) + rows["pg_seq"].to_numpy().astype(np.uint64)
        chosen &= _hashes(numbers) < np.uint64(_ALL >> halvings)
    return rows.filter(pa.array(chosen))


def _hashes(numbers: Numbers | Hashes) -> Hashes:
    """Return the hash of each number (splitmix64). The hashes are pseudorandom and equal on all hosts."""
    mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _bound(steps: Numbers, counts: Numbers, most: int) -> int:
    """Return the hash below which ``steps`` have at most ``most`` rows in total.

    Args:
        counts: The number of rows of each step.
    """
    hashes = _hashes(steps)
    order = np.argsort(hashes)
    beyond = np.flatnonzero(np.cumsum(counts[order]) > most)
    return int(hashes[order[beyond[0]]]) if len(beyond) else _ALL

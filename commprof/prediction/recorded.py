"""Read the steps of a run as a program: the events that all ranks run in each step, and the compute between events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from commprof.align.ranks.rank_arrivals import REAL_WAIT_NS
from commprof.analysis import api
from commprof.errors import UsageError
from commprof.ledger.limits import UNTAGGED
from commprof.ledger.records.issued import StepKey
from commprof.ledger.requests.expert_tokens import ForwardPass, forward_passes
from commprof.prediction.program import SUMMING, Event, Floats, Groups, Message, Program, Step
from commprof.prediction.streams import HOST, device_of, on_stream, stream_steps
from commprof.schema import Status, parse_ranks
from commprof.trace.reader import Run

LEAST_STEPS: Final = 6
MOST_STEPS: Final = 200  # the last steps are used; more steps do not make a median more certain
_MOST_MESSAGES: Final = 12_000  # messages of a rank in all these steps, whose replay takes about a second
# At least this many steps are used if the run has them, regardless of their number of messages.
_ENOUGH_STEPS: Final = 20
_COLUMNS: Final = (
    "rank",
    "attempt",
    "step",
    "seq",
    "micro_step",
    "phase",
    "op",
    "purpose",
    "bucket",
    "payload_bytes",
    "dtype",
    "group_ranks",
    "is_async",
    "is_p2p",
    "captured",
    "device",
    "status",
    "module",
    "issue_ns",
    "return_ns",
    "wait_begin_ns",
    "wait_end_ns",
    "device_begin_ns",
    "device_end_ns",
    "exposed_ns",
)
_MOST_CPU: Final = 1.5  # processor time beyond this multiple of the compute shows several compute threads
_ISSUE: Final = 0
_WAIT: Final = 1


class Recorded(NamedTuple):
    """The steps of a run that send the same messages.

    Attributes:
        program: The common program of the steps.
        steps: The compute of each step.
        numbers: The numbers of the steps.
        step_ns: The time of each step, as a mean over ranks. The time of the slowest rank would also include the time
            by which ranks get ahead of each other.
        exposed_ns: The recorded exposed time of a step by purpose, as the median over steps of the mean over ranks.
        world_size: The number of ranks.
        arrivals: The time at which each rank issued each message, in ns on one clock: (steps, messages, ranks).
        finishes: The time at which each message ended on each rank, or nan if the end was not observed. The shape is
            that of ``arrivals``.
        waits: The time at which each rank began to wait for each message, or nan if it did not wait. The shape is that
            of ``arrivals``.
        cpu_per_byte: The processor time in ns that the backend needs for a byte of payload, or None if it is not known.
        device: The kind of device that computes. All times are from the clock of this device.
        passes: The forward passes of layers of experts in each step.
    """

    program: Program
    steps: list[Step]
    numbers: list[int]
    step_ns: Floats
    exposed_ns: dict[str, float]
    world_size: int
    arrivals: Floats
    finishes: Floats
    waits: Floats
    cpu_per_byte: float | None = None
    device: str = HOST
    passes: Sequence[Sequence[ForwardPass]] = ()


class _Rank(NamedTuple):
    """The events of one rank in one step, as parallel arrays in program order, and the messages by position."""

    begin_ns: int
    end_ns: int
    kinds: npt.NDArray[np.int64]
    messages: npt.NDArray[np.int64]
    reached: npt.NDArray[np.int64]
    left: npt.NDArray[np.int64]
    calls: npt.NDArray[np.int64]
    cpu_ns: float
    rows: pd.DataFrame
    finishes: Floats
    waits: Floats


def recorded_steps(run: Run) -> Recorded:
    """Return the training steps of ``run`` that send the same messages, with the compute of each step.

    Only the last attempt is used. Its first step is left out as a warm-up, and so are steps with an evaluation or a
    checkpoint.

    Raises:
        UsageError: The run lacks data that a prediction needs. The message says what to record.
    """
    world = run.manifest.world_size or run.health.ranks_expected or 0
    _refuse_unpredictable(run, world)
    steps = _last_attempt(run.table("steps").to_pandas())
    if not len(steps):
        raise UsageError(
            f"{run.path} has no training steps, so there is nothing to predict; record a training whose steps are marked"
        )
    usable = _usable_steps(steps, world, str(run.path))
    per_step = max(entry["records"] for entry in run.manifest.ranks) // max(1, int(steps["step"].nunique()))
    usable = usable[-max(_ENOUGH_STEPS, min(MOST_STEPS, _MOST_MESSAGES // max(1, per_step))) :]
    attempt = int(steps["attempt"].iloc[0])
    records = _records(run, attempt, usable)
    if len(records):
        _refuse_missing(records["rank"].unique().tolist(), world, str(run.path))  # a rank file may be missing
    _refuse_records(records, str(run.path))
    times = steps.set_index(["step", "rank"])[["begin_ns", "end_ns", "cpu_ns"]]
    device = device_of(records, str(run.path))
    if device == HOST:
        waits = _waits_in_cpp(run, attempt)
    else:
        records, waits = on_stream(records, str(run.path)), {}
        times, usable = stream_steps(records, usable)
    by_place = {
        (int(rows["step"].iloc[0]), int(rows["rank"].iloc[0])): rows
        for _, rows in records.groupby(["step", "rank"], sort=False)
    }
    ranks = [
        [
            _rank_of(
                by_place.get((step, rank), records.iloc[:0]),
                times.loc[(step, rank)],
                waits.get((step, rank), []),
            )
            for rank in range(world)
        ]
        for step in usable
    ]
    experts = frozenset(run.table("expert_layers")["layer"].to_pylist())
    recorded = _with_most_common_program(ranks, usable, world, str(run.path), experts)
    passes = forward_passes(_of_steps(run.table("expert_loads"), attempt, usable[0])) if experts else {}
    return recorded._replace(
        device=device, passes=[passes.get(StepKey(attempt, step), ()) for step in recorded.numbers]
    )


def _refuse_unpredictable(run: Run, world: int) -> None:
    if run.table("aggregates").num_rows:
        raise UsageError(
            f"{run.path} was recorded as sums (--aggregate), which have no single times; record it without --aggregate"
        )
    recorded = {entry["rank"] for entry in run.manifest.ranks if entry["records"]}
    _refuse_missing(recorded, world, str(run.path))
    if world < 2:
        raise UsageError(
            f"{run.path} is of {world} rank, which sends nothing; record a training of several ranks"
        )


def _refuse_missing(ranks: Iterable[int], world: int, path: str) -> None:
    """Raise UsageError unless ``ranks`` contains all ranks of the job."""
    missing = sorted(set(range(world)) - set(ranks))
    if missing:
        few = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise UsageError(
            f"{path} has no records of {len(missing)} of {world} ranks ({few}); record all ranks of the job"
        )


def _last_attempt(steps: pd.DataFrame) -> pd.DataFrame:
    last: pd.DataFrame = steps[steps["attempt"] == steps["attempt"].max()]
    return last


def _usable_steps(steps: pd.DataFrame, world: int, path: str) -> list[int]:
    """Return the numbers of the steps that ended on all ranks.

    The first step is left out, and so are steps that contain other work than training.
    """
    complete = steps[steps["end_ns"].notna() & (steps["outside_ns"].fillna(0) == 0)]
    counts = Counter(complete["step"].tolist())
    first = int(steps["step"].min())
    usable = sorted(step for step, ranks in counts.items() if ranks == world and step > first)
    if len(usable) < LEAST_STEPS:
        raise UsageError(
            f"{path} has {len(usable)} complete step{'s' * (len(usable) != 1)} after the first; a prediction needs at least "
            f"{LEAST_STEPS}: record more steps"
        )
    return usable


def _records(run: Run, attempt: int, usable: Sequence[int]) -> pd.DataFrame:
    parts = [_of_steps(part, attempt, usable[0]) for part in run.parts("collectives", list(_COLUMNS))]
    frame = pa.concat_tables(parts).to_pandas() if parts else pd.DataFrame(columns=list(_COLUMNS))
    frame["purpose"] = frame["purpose"].fillna(UNTAGGED)
    frame = frame[frame["step"].isin(set(usable)) & (frame["status"] == str(Status.OK))]
    # Arrivals are only known for ranks on one clock, or on clocks that were compared. Without an arrival, the issue
    # time is used.
    arrived = api.arrivals(run)
    arrived = arrived.loc[arrived["attempt"] == attempt, ["rank", "seq", "arrived_ns"]]
    frame = frame.merge(arrived, on=["rank", "seq"], how="left")
    frame["arrived_ns"] = frame["arrived_ns"].fillna(frame["issue_ns"]).astype("int64")
    return frame.sort_values(["step", "rank", "seq"], kind="stable", ignore_index=True)


def _of_steps(table: pa.Table, attempt: int, first: int) -> pa.Table:
    """Return the rows of ``attempt`` from step ``first`` on."""
    return table.filter(
        pa.compute.and_(
            pa.compute.equal(table["attempt"], attempt), pa.compute.greater_equal(table["step"], first)
        )
    )


def _refuse_records(records: pd.DataFrame, path: str) -> None:
    unknown = records[records["group_ranks"].fillna("") == ""]
    if len(unknown):
        ranks = ", ".join(map(str, sorted(unknown["rank"].unique())[:5]))
        raise UsageError(
            f"{path} has {len(unknown):,} records whose process group is not known, of ranks {ranks}: their files are "
            "damaged; record the training again"
        )
    if records["is_p2p"].any():
        raise UsageError(
            f"{path} sends messages between single ranks (send and recv), as pipelines do; only collectives are predicted"
        )


def _waits_in_cpp(run: Run, attempt: int) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
    """Return the waits for messages in C++ by step and rank: the first issue time, the begin and the end of the wait.

    The begin of a wait is only known between two bounds, and the middle is used.
    """
    intervals: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for row in run.table("stalls").to_pylist():
        if row["attempt"] != attempt:
            continue
        exposed = (row["exposed_low_ns"] + row["exposed_high_ns"]) // 2
        begin = max(row["begin_ns"], row["end_ns"] - exposed)
        intervals.setdefault((row["step"], row["rank"]), []).append((row["since_ns"], begin, row["end_ns"]))
    return intervals


def _rank_of(rows: pd.DataFrame, times: Any, stalls: Sequence[tuple[int, int, int]]) -> _Rank:
    issue = rows["issue_ns"].to_numpy(np.int64)
    returned = rows["return_ns"].fillna(rows["issue_ns"]).to_numpy(np.int64)
    waited = rows["wait_begin_ns"].notna().to_numpy()
    sync = ~rows["is_async"].to_numpy(bool)
    # A blocking call without a separate wait contains the wait. The cost of the call itself is not known, but small.
    calls = np.where(sync & ~waited, 0, returned - issue)
    wait_begin = np.where(waited, rows["wait_begin_ns"].fillna(0).to_numpy(np.int64), issue)
    wait_end = np.where(waited, rows["wait_end_ns"].fillna(0).to_numpy(np.int64), returned)
    has_wait = waited | sync
    unknown = np.zeros(len(rows), bool)
    for since, begin, end in stalls:
        inside = np.flatnonzero(~has_wait & (issue >= since) & (issue <= end))
        # The wait ends with its last message. The ends of the other messages are not known.
        wait_begin[inside], wait_end[inside], has_wait[inside] = begin, begin, True
        wait_end[inside[-1:]] = end
        unknown[inside[:-1]] = True
    count = len(rows)
    numbers = np.arange(count)
    kinds = np.concatenate([np.full(count, _ISSUE), np.full(int(has_wait.sum()), _WAIT)])
    messages = np.concatenate([numbers, numbers[has_wait]])
    reached = np.concatenate([issue, np.maximum(wait_begin, issue + calls)[has_wait]])
    left = np.concatenate([issue + calls, wait_end[has_wait]])
    order = np.lexsort((messages, kinds, reached))
    blocked = has_wait & (wait_end - wait_begin > REAL_WAIT_NS)
    finishes = np.where(blocked | (sync & ~waited), wait_end, np.nan)
    sampled = rows["device_end_ns"].to_numpy(np.float64, na_value=np.nan)
    return _Rank(
        int(times["begin_ns"]),
        int(times["end_ns"]),
        kinds[order],
        messages[order],
        reached[order],
        left[order],
        calls,
        float(times["cpu_ns"]) if pd.notna(times["cpu_ns"]) else np.nan,
        rows,
        np.where(np.isnan(sampled), finishes, sampled),
        np.where(has_wait & ~unknown, wait_begin, np.nan),
    )


def _with_most_common_program(
    ranks: Sequence[Sequence[_Rank]],
    numbers: Sequence[int],
    world: int,
    path: str,
    experts: frozenset[str] = frozenset(),
) -> Recorded:
    """Return the steps that send the same messages, except for the bytes of tokens that the layers ``experts`` send."""
    keys = [{_signature(each, experts) for each in of_step} for of_step in ranks]
    uniform = [next(iter(each)) if len(each) == 1 else None for each in keys]
    known = Counter(each for each in uniform if each is not None)
    if not known:
        raise UsageError(
            f"the ranks of {path} issue different messages, or in different orders; only trainings whose ranks all do the "
            "same can be predicted"
        )
    common, count = known.most_common(1)[0]
    if count < LEAST_STEPS or 2 * count < len(numbers):
        raise UsageError(
            f"only {count} of {len(numbers)} steps of {path} send the same messages; a prediction needs at least "
            f"{LEAST_STEPS} such steps, and at least half of all steps: record more steps of one kind"
        )
    chosen = [place for place, each in enumerate(uniform) if each == common]
    program = _with_token_sizes(
        _program(ranks[chosen[0]], world, experts), [ranks[place] for place in chosen]
    )
    steps = [
        _step(ranks[place], program, follows=place > 0 and place - 1 in set(chosen[:number]))
        for number, place in enumerate(chosen)
    ]
    took = [np.mean([each.end_ns - each.begin_ns for each in ranks[place]]) for place in chosen]
    return Recorded(
        program,
        steps,
        [numbers[place] for place in chosen],
        np.array(took, np.float64),
        _exposed([ranks[place] for place in chosen]),
        world,
        *_on_one_clock([ranks[place] for place in chosen]),
        _cpu_per_byte([ranks[place] for place in chosen], steps, program),
    )


def _cpu_per_byte(ranks: Sequence[Sequence[_Rank]], steps: Sequence[Step], program: Program) -> float | None:
    """Return the processor time of the backend's threads per byte of payload, in ns.

    It is the processor time of a process beyond its compute. It is only known if compute runs on one thread, because a
    process with several compute threads needs more processor time than the duration of its compute.
    """
    payload = sum(message.payload_bytes for message in program.messages)
    used = np.array([[each.cpu_ns for each in of_step] for of_step in ranks])
    computed = np.array([step.spans.sum(axis=0) + step.calls.sum(axis=0) for step in steps])
    beyond = float(np.median(used - computed))
    if not payload or not np.isfinite(beyond) or beyond > _MOST_CPU * float(np.median(computed)):
        return None
    return max(0.0, beyond) / payload


def _on_one_clock(steps: Sequence[Sequence[_Rank]]) -> tuple[Floats, Floats, Floats]:
    """Return the arrivals, finishes and waits of all steps on one clock, each of shape (steps, messages, ranks)."""
    shifts = [
        [
            rank.rows["arrived_ns"].to_numpy(np.float64) - rank.rows["issue_ns"].to_numpy(np.float64)
            for rank in ranks
        ]
        for ranks in steps
    ]
    arrivals = [[rank.rows["arrived_ns"].to_numpy(np.float64) for rank in ranks] for ranks in steps]
    finishes, waits = (
        [
            [getattr(rank, name) + shift for rank, shift in zip(ranks, of_step, strict=True)]
            for ranks, of_step in zip(steps, shifts, strict=True)
        ]
        for name in ("finishes", "waits")
    )
    return tuple(np.array(each, np.float64).swapaxes(1, 2) for each in (arrivals, finishes, waits))  # type: ignore[return-value]


def _signature(rank: _Rank, experts: frozenset[str]) -> tuple[Any, ...]:
    rows = rank.rows
    return (
        tuple(rank.kinds.tolist()),
        tuple(rank.messages.tolist()),
        tuple(rows["op"]),
        tuple(rows["payload_bytes"].where(~rows["module"].isin(experts), -1)),
        tuple(rows["purpose"]),
    )


def _program(ranks: Sequence[_Rank], world: int, experts: frozenset[str]) -> Program:
    groups: dict[tuple[str, ...], Groups] = {}
    messages = []
    per_rank = [each.rows for each in ranks]
    listed = [each["group_ranks"].tolist() for each in per_rank]
    first = per_rank[0]
    columns = zip(
        *(
            first[name]
            for name in (
                "op",
                "payload_bytes",
                "purpose",
                "is_async",
                "bucket",
                "micro_step",
                "phase",
                "module",
                "dtype",
            )
        ),
        strict=True,
    )
    for number, (op, payload, purpose, is_async, bucket, micro, phase, module, dtype) in enumerate(columns):
        texts = tuple(each[number] for each in listed)
        if texts not in groups:
            groups[texts] = tuple(sorted({parse_ranks(text) for text in texts}))
        messages.append(
            Message(
                str(op),
                int(payload),
                str(purpose),
                groups[texts],
                not bool(is_async),
                None if pd.isna(bucket) else int(bucket),
                int(micro),
                str(phase),
                str(module) if module in experts else None,
                dtype=str(dtype) if op in SUMMING and pd.notna(dtype) else "",
            )
        )
    kinds = ranks[0].kinds
    events = tuple(
        Event("wait" if kind == _WAIT else "issue", int(message))
        for kind, message in zip(kinds, ranks[0].messages, strict=True)
    )
    return Program(tuple(messages), events)


def _with_token_sizes(program: Program, steps: Sequence[Sequence[_Rank]]) -> Program:
    """Return ``program`` with the bytes that each group sent in each step, for the messages of layers of experts."""
    tokens = [number for number, message in enumerate(program.messages) if message.module is not None]
    if not tokens:
        return program
    payloads = np.array(
        [[rank.rows["payload_bytes"].to_numpy(np.int64) for rank in ranks] for ranks in steps]
    )
    messages = list(program.messages)
    for number in tokens:
        first_ranks = [group[0] for group in messages[number].groups]
        messages[number] = messages[number].with_sizes(payloads[:, first_ranks, number].tolist())
    return program._replace(messages=tuple(messages))


def _step(ranks: Sequence[_Rank], program: Program, follows: bool) -> Step:
    spans = np.zeros((len(program.events) + 1, len(ranks)))
    for number, rank in enumerate(ranks):
        starts = np.concatenate([[rank.begin_ns], rank.left])
        ends = np.concatenate([rank.reached, [rank.end_ns]])
        spans[:, number] = np.maximum(ends - starts, 0)
    calls = np.array([each.calls for each in ranks], np.float64).T.reshape(len(program.messages), len(ranks))
    return Step(spans, calls, follows)


def _exposed(steps: Sequence[Sequence[_Rank]]) -> dict[str, float]:
    """Return the recorded exposed time of a step by purpose, as the median over steps of the mean over ranks."""
    rows = []
    for ranks in steps:
        sums: Counter[str] = Counter()
        for rank in ranks:
            waits = rank.kinds == _WAIT
            blocked = (rank.left - rank.reached)[waits]
            of = rank.messages[waits]
            begun = np.where(rank.rows["is_async"].to_numpy(bool)[of], 0, rank.calls[of])
            for purpose, ns in zip(rank.rows["purpose"].to_numpy()[of], blocked + begun, strict=True):
                sums[str(purpose)] += int(ns)
        rows.append({purpose: ns / len(ranks) for purpose, ns in sums.items()})
    purposes = {purpose for row in rows for purpose in row}
    return {
        purpose: float(np.median([row.get(purpose, 0.0) for row in rows])) for purpose in sorted(purposes)
    }

"""All answers about runs. Other packages import only this module of ``analysis``.

A ``run`` is a path or an opened :class:`Run`. Answers are pandas frames; their columns are declared in
``analysis/columns/answers.py`` and described in ``docs/analysis.md``. Three measures of bytes never mix:
``payload_bytes`` (S of nccl-tests), ``wire_bytes`` (modelled: mean bytes that a rank of the group sends) and moved
(counters, see :func:`moved`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from commprof.analysis.columns.defaults import MOST_BARS, MOST_LATE, NOTABLE_DROPS, UNEVEN_LOAD
from commprof.errors import TraceError, UsageError
from commprof.schema import TABLES, Column

# Each function imports the module that answers it, so that a command loads only what it needs.
if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import SparkSession

    from commprof.analysis.browse.alignment import Alignment, AlignmentSummary, AlignmentWindow
    from commprof.analysis.browse.record_details import Record
    from commprof.analysis.browse.record_pages import Filter
    from commprof.analysis.browse.record_pages import Page as RecordsPage
    from commprof.analysis.browse.timeline import MOST_LANES, Timeline
    from commprof.analysis.columns.csv_text import frame_csv, write_csv, write_csv_parts
    from commprof.analysis.columns.exposed_texts import exposed_share, exposed_time, overlapped_time
    from commprof.analysis.columns.units import format_bytes, format_ns
    from commprof.analysis.compare.advice import Advice
    from commprof.analysis.compare.compared_runs import Comparison, run_names
    from commprof.analysis.compare.predicted_steps import (
        PredictedStep,
        UnrunSetting,
        predicted_steps,
        unrun_settings,
    )
    from commprof.analysis.compare.settings import ABSENT
    from commprof.analysis.relations.memory import engine_settings
    from commprof.analysis.storage import index as index_module
    from commprof.analysis.storage.answer_cache import answer_cache
    from commprof.analysis.stragglers.straggling import Straggling
    from commprof.analysis.time.bandwidth import Bandwidths
    from commprof.analysis.traffic.buckets import BucketContent
    from commprof.analysis.traffic.experts import Summary as ExpertSummary
    from commprof.calibration.results import Calibration
    from commprof.ledger.levels import Verdict
    from commprof.trace.fingerprint import fingerprint
    from commprof.trace.health import Health
    from commprof.trace.reader import Run, open_run

__all__ = [
    "ABSENT",
    "MOST_BARS",
    "MOST_LANES",
    "MOST_LATE",
    "NOTABLE_DROPS",
    "TABLES",
    "TRAFFIC_BY",
    "UNEVEN_LOAD",
    "Advice",
    "Alignment",
    "AlignmentSummary",
    "AlignmentWindow",
    "Bandwidths",
    "BucketContent",
    "Comparison",
    "ExpertSummary",
    "Filter",
    "Health",
    "PredictedStep",
    "Record",
    "RecordsPage",
    "Run",
    "Straggling",
    "Timeline",
    "UnrunSetting",
    "Verdict",
    "advice",
    "algorithms",
    "alignment",
    "alignment_place",
    "alignment_summary",
    "alignment_window",
    "answer_cache",
    "arrivals",
    "arrivals_parts",
    "backends",
    "bandwidth",
    "bandwidth_both",
    "bandwidth_times",
    "bucket_content",
    "bucket_flushes",
    "bucket_means",
    "bucket_steps",
    "buckets_per_step",
    "calibrations",
    "ceiling",
    "ceiling_fits",
    "compare",
    "compare_both",
    "describe_columns",
    "engine_settings",
    "exchange_imbalance",
    "expert_imbalance",
    "expert_ranks",
    "expert_summary",
    "experts",
    "exposed_share",
    "exposed_time",
    "exposure",
    "exposure_per_step",
    "finalise",
    "find_runs",
    "fingerprint",
    "format_bytes",
    "format_ns",
    "frame_csv",
    "has_exposed_times",
    "has_index",
    "health",
    "index",
    "matrix",
    "moved",
    "one_offs",
    "open_run",
    "overlapped_time",
    "overview",
    "owners",
    "predicted_steps",
    "query",
    "rank_bytes",
    "record",
    "records_csv",
    "records_page",
    "records_place",
    "reduction_levels",
    "requested",
    "resource_use",
    "resources",
    "run_names",
    "sampled_stragglers",
    "settings",
    "several_trainings",
    "step_numbers",
    "step_times",
    "step_window",
    "stragglers",
    "straggling",
    "table",
    "timeline",
    "topology",
    "traffic",
    "traffic_by_group",
    "traffic_by_setting",
    "traffic_levels",
    "unrun_settings",
    "untagged",
    "verify",
    "warm_window",
    "write_csv",
    "write_csv_parts",
]

# Names of other modules that this one exports, loaded on first use.
_ELSEWHERE: Final = {
    "ABSENT": "commprof.analysis.compare.settings",
    "MOST_LANES": "commprof.analysis.browse.timeline",
    "Advice": "commprof.analysis.compare.advice",
    "Alignment": "commprof.analysis.browse.alignment",
    "AlignmentSummary": "commprof.analysis.browse.alignment",
    "AlignmentWindow": "commprof.analysis.browse.alignment",
    "Bandwidths": "commprof.analysis.time.bandwidth",
    "BucketContent": "commprof.analysis.traffic.buckets",
    "Comparison": "commprof.analysis.compare.compared_runs",
    "Filter": "commprof.analysis.browse.record_pages",
    "Health": "commprof.trace.health",
    "PredictedStep": "commprof.analysis.compare.predicted_steps",
    "Record": "commprof.analysis.browse.record_details",
    "Run": "commprof.trace.reader",
    "Straggling": "commprof.analysis.stragglers.straggling",
    "UnrunSetting": "commprof.analysis.compare.predicted_steps",
    "Timeline": "commprof.analysis.browse.timeline",
    "Verdict": "commprof.ledger.levels",
    "answer_cache": "commprof.analysis.storage.answer_cache",
    "engine_settings": "commprof.analysis.relations.memory",
    "exposed_share": "commprof.analysis.columns.exposed_texts",
    "exposed_time": "commprof.analysis.columns.exposed_texts",
    "fingerprint": "commprof.trace.fingerprint",
    "format_bytes": "commprof.analysis.columns.units",
    "format_ns": "commprof.analysis.columns.units",
    "frame_csv": "commprof.analysis.columns.csv_text",
    "open_run": "commprof.trace.reader",
    "overlapped_time": "commprof.analysis.columns.exposed_texts",
    "predicted_steps": "commprof.analysis.compare.predicted_steps",
    "run_names": "commprof.analysis.compare.compared_runs",
    "unrun_settings": "commprof.analysis.compare.predicted_steps",
    "write_csv": "commprof.analysis.columns.csv_text",
    "write_csv_parts": "commprof.analysis.columns.csv_text",
}


def __getattr__(name: str) -> Any:
    if name == "RecordsPage":
        return import_module("commprof.analysis.browse.record_pages").Page
    if name == "ExpertSummary":
        return import_module("commprof.analysis.traffic.experts").Summary
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_ELSEWHERE[name]), name)  # the next use finds it at once
    return value


AnyRun: TypeAlias = "Run | Path | str"

TRAFFIC_BY: Final = (
    "step",
    "phase",
    "op",
    "intended_op",
    "purpose",
    "pg",
    "group_desc",
    "group_size",
    "backend",
)


def _opened(run: AnyRun) -> Run:
    from commprof.analysis.storage.opened_runs import opened

    return opened(Path(run)) if isinstance(run, str | Path) else run


def find_runs(directory: Path | str) -> pd.DataFrame:
    """The runs in and below ``directory``, newest first; one that cannot be read is listed with the reason."""
    from commprof.analysis.browse import listing

    return listing.runs_below(Path(directory))


def traffic(run: AnyRun, by: Sequence[str] = TRAFFIC_BY) -> pd.DataFrame:
    """Traffic, one row for each combination of the columns ``by``; ``()`` gives one row with the totals.

    Collectives are deduplicated, and a message counts at its send. A recv whose send no rank recorded counts as well, with
    its payload and no wire bytes. Initialisation is step -1. Barriers are included.

    Raises:
        UsageError: a column of ``by`` cannot be grouped by.
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.traffic import operation_totals

    run = _opened(run)
    return operation_totals.traffic(run_totals.operations(run, operation_totals.checked(by)), by)


def matrix(
    run: AnyRun,
    by: Sequence[str] = (),
    steps: tuple[int, int] | None = None,
    op: str | None = None,
    purpose: str | None = None,
    most_ranks: int | None = None,
) -> pd.DataFrame:
    """Bytes from each rank to each other: sends as recorded, collectives by a model that conserves wire bytes.

    ``frame.attrs``: ``models``, the pairs of ranks to which the bytes of each operation are assigned (``docs/matrix.md``);
    ``unplaced_bytes``, bytes without known pairs; ``ranks`` of the run; ``ranks_per_cell``, the number of ranks that a
    sender or receiver represents (it is the first of them).

    Args:
        by: columns of ``step``, ``phase``, ``op``, ``intended_op``, ``purpose`` and ``pg``.
        steps: the first and the last; default: all, and what comes before them, which is step -1.
        op, purpose: only these; ``untagged``: without a purpose.
        most_ranks: rows and columns at most; with more ranks neighbours are summed.

    Raises:
        UsageError: a column of ``by`` cannot be grouped by.
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.traffic import matrix as matrix_module

    run = _opened(run)
    operations = run_totals.operations(run, matrix_module.columns(by))
    groups = run.table("groups")
    chosen = steps or matrix_module.EVERY_STEP
    return matrix_module.matrix(operations, groups, by, chosen, op, purpose, most_ranks)


def owners(run: AnyRun, steps: tuple[int, int] | None = None) -> pd.DataFrame:
    """Reduces to one owner: what each rank owns and receives, one row per rank of a group with such reduces.

    ``frame.attrs["imbalance"]`` is the largest ``received_bytes`` over the mean of the ranks; None without any.
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.traffic import matrix as matrix_module

    run = _opened(run)
    operations = run_totals.operations(run, matrix_module.columns(()))
    groups = run.table("groups")
    return matrix_module.owners(operations, groups, steps or matrix_module.EVERY_STEP)


def experts(run: AnyRun) -> pd.DataFrame:
    """The load of each expert in each training step, over all ranks; without rows if the run published none.

    The load is the number of tokens that chose the expert, before any were dropped.
    """
    from commprof.analysis.traffic import experts as experts_module

    return experts_module.experts(_opened(run))


def expert_ranks(run: AnyRun) -> pd.DataFrame:
    """The load of the experts of each rank in each training step: :func:`experts` by the rank that has them."""
    from commprof.analysis.traffic import experts as experts_module

    return experts_module.ranks(_opened(run))


def expert_imbalance(run: AnyRun) -> pd.DataFrame:
    """Imbalance of the experts of each layer in each training step, and the tokens that were dropped.

    The imbalance is the largest load of an expert over the mean load.
    """
    from commprof.analysis.traffic import experts as experts_module

    return experts_module.imbalance(_opened(run))


def expert_summary(run: AnyRun) -> ExpertSummary | None:
    """The experts of a run in a few values: layers, median and worst imbalance, dropped share; None without experts."""
    from commprof.analysis.traffic import experts as experts_module

    return experts_module.summary(_opened(run))


def exchange_imbalance(run: AnyRun, purpose: str | None = None, of_experts: bool = False) -> pd.DataFrame:
    """What the ranks receive in the all_to_alls of each training step, and how uneven that is; no hook is needed.

    The imbalance is the largest number of bytes that a rank receives from others over the mean of the ranks. It follows from
    the splits of the records; an all_to_all with equal splits, such as that of a padded buffer, is even. It is null where
    splits were given as tensors, and in runs that recorded sums only.

    Args:
        purpose: only these; ``untagged``: without a purpose; default: all.
        of_experts: only those of tokens: with the purpose activation, among ranks that share the experts of a layer.
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.traffic import exchanges
    from commprof.analysis.traffic import matrix as matrix_module

    run = _opened(run)
    operations = run_totals.operations(run, matrix_module.columns(()))
    if of_experts:
        operations = exchanges.among_experts(operations, run.table("expert_layers"))
    return exchanges.exchange_imbalance(operations, run.table("groups"), purpose, not run.health.summed)


def bucket_flushes(
    run: AnyRun,
    step: int | None = None,
    micro_step: int | None = None,
    bucket: int | None = None,
    group_ranks: str | None = None,
) -> pd.DataFrame:
    """The gradient buckets of a run: contents, reason of the flush, reduction and duration.

    Bytes count as in :func:`traffic`: those of the collectives of purpose gradient_reduce with the bucket's number. Ranks
    whose groups share no rank, such as those of two pipeline stages, have separate buckets: ``group_ranks``.

    Args:
        step, micro_step, bucket, group_ranks: only those; default: all.
    """
    from commprof.analysis.storage import run_totals

    only = {"step": step, "micro_step": micro_step, "bucket": bucket, "group_ranks": group_ranks}
    return run_totals.bucket_flushes(_opened(run), only)


def bucket_steps(run: AnyRun) -> pd.DataFrame:
    """The summed buckets of :func:`bucket_flushes`: one row for each step and reason of the flush."""
    from commprof.analysis.storage import run_totals

    return run_totals.bucket_steps(_opened(run))


def buckets_per_step(run: AnyRun) -> pd.DataFrame:
    """The gradient buckets of a training step, one row per reason of the flush, by the rule for values per step."""
    from commprof.analysis.storage import run_totals

    return run_totals.buckets_per_step(_opened(run))


def bucket_means(run: AnyRun) -> pd.DataFrame:
    """The buckets of a mean training step, over the steps with the most frequent contents. Times are medians.

    Bytes and times leave out the first step of each attempt.
    """
    from commprof.analysis.storage import run_totals

    return run_totals.bucket_means(_opened(run))


def bucket_content(
    run: AnyRun,
    step: int,
    bucket: int,
    micro_step: int = 0,
    attempt: int | None = None,
    group_ranks: str | None = None,
) -> BucketContent | None:
    """The parameters of one bucket and the collectives that reduced it; None if there is no such bucket.

    Args:
        attempt: default: the last that has it.
        group_ranks: as in :func:`bucket_flushes`; default: those that include the lowest rank.
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.traffic import buckets

    run = _opened(run)
    wanted = bucket_flushes(run, step, micro_step, bucket, group_ranks)
    if attempt is not None:
        wanted = wanted[wanted["attempt"] == attempt]
    if wanted.empty:
        return None
    last = wanted[wanted["attempt"] == wanted["attempt"].max()].iloc[0]
    return buckets.content(last, run.table("parameters"), run_totals.reducing(run, last))


def step_numbers(run: AnyRun) -> list[int]:
    """The numbers of the training steps of a run, in order: those of :func:`step_times`."""
    import pyarrow.compute as pc

    numbers = pc.unique(_opened(run).table("steps")["step"]).to_pylist()
    return sorted(number for number in numbers if number >= 0)


def step_times(run: AnyRun) -> pd.DataFrame:
    """One row per training step and attempt: times, loss, and what was sent in it."""
    from commprof.analysis.storage import run_totals

    run = _opened(run)
    return run_totals.step_times(run)


def resource_use(run: AnyRun) -> pd.DataFrame:
    """Memory, processors and share of communication of each training step, one row per step and attempt."""
    from commprof.analysis.compare import step_resources
    from commprof.analysis.storage import run_totals

    run = _opened(run)
    return step_resources.resource_use(run_totals.step_times(run), table(run, "samples"))


def arrivals(run: AnyRun, steps: tuple[int, int] | None = None) -> pd.DataFrame:
    """Arrivals of the ranks at each collective, on one clock, with error bounds; one row per rank.

    Collectives match by attempt, group (name and ranks), number in the group and operation; a send and a recv by sender,
    receiver and order. Ranks that read one clock are compared exactly. ``docs/clocks.md`` states bounds and formulas.

    Args:
        steps: the first and the last; default: all, and what comes before them, which is step -1.

    Raises:
        UsageError: the frame would not fit into memory: see :func:`arrivals_parts`.
    """
    from commprof.analysis.stragglers import straggler_answers

    return straggler_answers.arrivals(_opened(run), steps)


def arrivals_parts(run: AnyRun, steps: tuple[int, int] | None = None) -> Iterator[pd.DataFrame]:
    """:func:`arrivals` by partition, in the memory of one partition."""
    from commprof.analysis.columns.answers import ANSWERS
    from commprof.analysis.columns.frames import from_arrow
    from commprof.analysis.stragglers import straggler_answers

    for part in straggler_answers.arrival_parts(_opened(run), steps):
        yield from_arrow(part, ANSWERS["arrivals"].columns)


def stragglers(run: AnyRun) -> pd.DataFrame:
    """How often each rank arrives last, and how long the others wait for it, one row per rank.

    ``frame.attrs["statement"]`` is the verdict; None if there is none. ``frame.attrs["late"]``: the ranks that it names as
    late; ``frame.attrs["since"]``: pairs of a rank that became late and the step from which it is, if there are any.
    """
    return straggling(run).ranks


def sampled_stragglers(run: AnyRun) -> pd.DataFrame | None:
    """:func:`stragglers` of some training steps of a run of several hosts, from the files of its hosts; None without these.

    ``frame.attrs``: the number of sampled steps (``steps``) and of all steps (``of_steps``), the share of the collectives of
    these steps that was compared (``share``), and the hosts of the late ranks (``hosts``).
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.stragglers import straggler_answers
    from commprof.analysis.stragglers.arrival_sample import steps_in
    from commprof.analysis.stragglers.arrivals import hosts_of

    run = _opened(run)
    sample = run_totals.sample_of_arrivals(run)
    if sample is None:
        return None
    ranks = straggler_answers.sampled_straggling(run, sample).ranks
    hosts = hosts_of(run)
    ranks.attrs.update(steps=steps_in(sample), of_steps=sample.steps, share=sample.share)
    ranks.attrs["hosts"] = {rank: hosts[rank] for rank in ranks.attrs["late"] if rank in hosts}
    return ranks


def alignment(run: AnyRun) -> Alignment:
    """The stored alignment of a run with its NCCL log (``commprof align``); without rows if there is none.

    ``counts`` by rank, group, operation and state; ``divergences``, the first divergence of records and lines of each rank
    and group; ``rows``, every record with its line.
    """
    from commprof.analysis.browse import alignment as alignment_module

    return alignment_module.alignment(_opened(run))


def alignment_summary(run: AnyRun) -> AlignmentSummary:
    """``counts`` and ``divergences`` of :func:`alignment`, however many rows it has."""
    from commprof.analysis.browse import alignment as alignment_module

    return alignment_module.summary(_opened(run))


def alignment_window(
    run: AnyRun,
    rank: int | None,
    pg: str | None,
    state: str | None = None,
    at: int = 0,
    before: int = 0,
    limit: int = 40,
) -> AlignmentWindow:
    """Some of the ``rows`` of :func:`alignment`: those of one rank and group, from ``before`` rows before ``at`` on.

    Args:
        rank, pg: None for lines whose rank or group is not known.
        state: only rows in this state; default: all.
        at: position within the rank and group.
        limit: rows at most.
    """
    from commprof.analysis.browse import alignment as alignment_module

    return alignment_module.window(_opened(run), rank, pg, state, at, before, limit)


def alignment_place(
    run: AnyRun, rank: int, attempt: int, pid: int, seq: int
) -> tuple[int | None, str | None, int] | None:
    """Rank, group and position of a record among the ``rows`` of :func:`alignment`; None if it is not among them."""
    from commprof.analysis.browse import alignment as alignment_module

    return alignment_module.place(_opened(run), rank, attempt, pid, seq)


def topology(run: AnyRun) -> pd.DataFrame:
    """The rings and trees that NCCL printed: one row per communicator, channel and pair of ranks that it connects."""
    from commprof.analysis.browse import alignment as alignment_module

    return alignment_module.topology(_opened(run))


def straggling(run: AnyRun, limit: int = MOST_LATE, first_step: bool = True) -> Straggling:
    """Stragglers in one pass: :func:`stragglers`, lateness by rank, causes of waiting, the worst collectives, and ``steps``.

    ``steps`` is the lateness of each rank in each training step, with what the verdict counts there: its rows ``is_warm``.

    Args:
        limit: the number of worst collectives at most.
        first_step: False leaves out the first training step, in which ranks start up, and what came before it; this
            reads all records also of a run that has an index.
    """
    from commprof.analysis.stragglers import straggler_answers

    return straggler_answers.straggling(_opened(run), limit, first_step)


AnyCalibration: TypeAlias = "Calibration | Path | str"


def bandwidth_both(
    run: AnyRun, calibration: AnyCalibration | None = None, steps: tuple[int, int] | None = None
) -> Bandwidths:
    """:func:`bandwidth` and :func:`bandwidth_times` of the same run, reading it once."""
    from commprof.analysis.stragglers import straggler_answers
    from commprof.analysis.time import bandwidth as bandwidth_module
    from commprof.calibration.file import read_calibration

    run = _opened(run)
    opened = read_calibration(Path(calibration)) if isinstance(calibration, str | Path) else calibration
    return bandwidth_module.bandwidths(straggler_answers.times(run, steps), opened, run.manifest.hosts)


def bandwidth(
    run: AnyRun, calibration: AnyCalibration | None = None, steps: tuple[int, int] | None = None
) -> pd.DataFrame:
    """Bandwidth by operation, group and size: time, algorithm and bus bandwidth, and the ceiling.

    Outliers and impossible times are counted and left out of the medians. ``frame.attrs["notes"]`` has sentences on the
    limits of the values. ``docs/calibration.md`` defines times, bandwidths and the ceiling.

    Args:
        calibration: of ``commprof calibrate``, or its file; without one there is no ceiling.
        steps: the first and the last; default: all, and what comes before them, which is step -1.

    Raises:
        TraceError: the file cannot be read.
    """
    return bandwidth_both(run, calibration, steps).sizes


def bandwidth_times(
    run: AnyRun, calibration: AnyCalibration | None = None, steps: tuple[int, int] | None = None
) -> pd.DataFrame:
    """The bandwidth of each single collective and message, with a verdict on its time."""
    return bandwidth_both(run, calibration, steps).collectives


def ceiling(
    calibration: AnyCalibration,
    group_size: int | None = None,
    low: int | None = None,
    high: int | None = None,
) -> pd.DataFrame:
    """The ceiling of a machine: the fitted curve of each operation over payloads, and the times that it was fitted to.

    Args:
        group_size: of the groups to compare; default: the world size of the calibration.
        low, high: smallest and largest payload in bytes; default: the measured range.
    """
    from commprof.analysis.time import bandwidth as bandwidth_module
    from commprof.calibration.file import read_calibration

    opened = read_calibration(Path(calibration)) if isinstance(calibration, str | Path) else calibration
    return bandwidth_module.ceiling(opened, group_size, low, high)


def ceiling_fits(calibration: AnyCalibration) -> pd.DataFrame:
    """Latency and bandwidth of each operation of a calibration, with 95 % intervals and residuals."""
    from commprof.analysis.time import bandwidth as bandwidth_module
    from commprof.calibration.file import read_calibration

    opened = read_calibration(Path(calibration)) if isinstance(calibration, str | Path) else calibration
    return bandwidth_module.ceiling_fits(opened)


def calibrations(directory: Path | str) -> pd.DataFrame:
    """The calibrations (``calibration*.json``) in and below ``directory``, the newest first."""
    from commprof.analysis.time import bandwidth as bandwidth_module

    return bandwidth_module.calibrations_below(Path(directory))


def untagged(run: AnyRun) -> pd.DataFrame:
    """Call sites of collectives without a purpose, one row per place and operation, in order of payload, largest first.

    A place is the line of the program in ``call_site``; null if only sums were recorded, or no Python called.
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.traffic import untagged as untagged_module

    run = _opened(run)
    if not run_totals.operations(run, ("purpose",))[
        "purpose"
    ].null_count:  # these sums are stored, those by place are not
        return untagged_module.none()
    return untagged_module.untagged(traffic(run, by=untagged_module.BY))


def algorithms(run: AnyRun) -> pd.DataFrame:
    """Algorithm and protocol that NCCL chose, one row per operation, group, payload and choice, in order of payload.

    From an aligned NCCL log with TUNING, or a log of the NCCL Inspector; without rows if neither has it.
    """
    from commprof.analysis.traffic import algorithms as algorithms_module

    return algorithms_module.algorithms(_opened(run))


def exposure(run: AnyRun, by: Sequence[str] = ("step",)) -> pd.DataFrame:
    """Exposed and overlapped communication for each combination of the columns ``by``.

    By ``("step",)``, ``("purpose",)``, ``("step", "bucket")``, or ``("pg", "group_ranks", "pg_seq")`` for each collective;
    ``()`` gives one row. Rows may overlap in time and need not add up. ``docs/times.md`` defines exposed and overlapped.

    Raises:
        UsageError: a column of ``by`` cannot be grouped by.
    """
    from commprof.analysis.storage import run_totals

    run = _opened(run)
    return run_totals.exposure(run, by)


def exposure_per_step(run: AnyRun) -> pd.DataFrame:
    """Exposed and overlapped time of a training step, by purpose and in total (the last row, which is the union).

    Medians over the warm steps of means over the ranks; the share is that of the median duration of the same steps. Warm are
    the steps that ended, without the first of each attempt if there are others. Purposes overlap in time.
    """
    from commprof.analysis.storage import run_totals

    run = _opened(run)
    return run_totals.exposure_per_step(run)


def has_exposed_times(run: AnyRun) -> bool:
    """Whether the exposed time of each warm step is known, so that :func:`exposure_per_step` has that of a step."""
    from commprof.analysis.storage import run_totals

    run = _opened(run)
    return run_totals.has_exposed_times(run)


def one_offs(run: AnyRun) -> pd.DataFrame:
    """One-off traffic: what single training steps sent beyond the recurring traffic, by step, purpose, operation and group.

    No value per training step includes it. The rule is in ``docs/analysis.md`` (values of a step) and applies to the traffic
    of one operation, purpose and group.
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.traffic import one_offs as one_offs_module

    run = _opened(run)
    return one_offs_module.one_offs(traffic(run, one_offs_module.BY), run_totals.step_times(run))


def moved(run: AnyRun) -> pd.DataFrame:
    """Bytes moved during the run by host and interface: counters of the whole host with all its processes.

    ``frame.attrs["reason"]``: why the readings do not cover the run on every host: no readings at all, none of a host, a
    first reading too late or a last one too early; None if they do. Column ``left_out`` has the reason by host.
    """
    from commprof.analysis.traffic import moved_bytes
    from commprof.trace.coverage import uncovered

    opened = _opened(run)
    return moved_bytes.moved(opened.table("wire"), uncovered(opened))


def requested(run: AnyRun) -> pd.DataFrame:
    """What the run's config should send, predicted from its keys and the parameters, one row per purpose.

    If no prediction is possible, it has no rows, and ``frame.attrs["reason"]`` has the reason; else that is None.
    """
    from commprof.analysis.traffic import requested_traffic

    run = _opened(run)
    frame, reason = requested_traffic.requested(run)
    frame.attrs["reason"] = reason
    return frame


def records_place(path: Path | str) -> str | None:
    """The URL of the analysed run if ``path`` is an analysis of a run whose records are not on this machine; else None."""
    from commprof.trace.directory import elsewhere

    there = elsewhere(Path(path))
    return None if there is None else there.place


def verify(run: AnyRun) -> Verdict:
    """The ledger of a run: what was requested, issued, executed and moved, and whether every byte is explained."""
    from commprof.ledger import verification

    return verification.verify(_opened(run))


def model_numel(run: AnyRun) -> int | None:
    """Elements of all parameters that a run published; None if it published none."""
    from commprof.analysis.browse import listing

    return listing.model_numel(_opened(run))


def overview(run: AnyRun) -> dict[str, Any]:
    """The overview of a run as plain values: software, traffic, times, and what is missing.

    ``moved_reason``: why the moved bytes are None; ``requested_reason``: why the requested operation is None.
    """
    from commprof.analysis.compare import run_overview
    from commprof.analysis.storage import run_totals
    from commprof.analysis.traffic import operation_totals

    run = _opened(run)
    operations = run_totals.operations(run, run_overview.COLUMNS)
    return run_overview.overview(
        run,
        operations,
        run_totals.step_times(run),
        operation_totals.traffic(operations, ()),
        moved(run),
    )


def health(run: AnyRun) -> Health:
    """How a run ended, what was recorded of it, and what is missing."""
    return _opened(run).health


def backends(run: AnyRun) -> str | None:
    """The ``backends`` of :func:`overview`: of the collectives, or of the process groups of a run without collectives."""
    from commprof.analysis.compare import run_overview
    from commprof.analysis.storage import run_totals

    run = _opened(run)
    used = run_overview.used_backends(run_totals.operations(run, ("backend",)))
    return used or run_overview.group_backends(run.table("groups"))


def several_trainings(run: AnyRun) -> str | None:
    """Which steps are of which training, if a run has several, one after the other; None for a single training."""
    from commprof.analysis.storage import run_totals
    from commprof.analysis.time import trainings

    run = _opened(run)
    spans = trainings.trainings(run, run_totals.step_times(run))
    return trainings.sentence(spans) if spans else None


def settings(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """How the runs differ: ``run``, ``label``, and a text column for each dotted config key that differs.

    A key that a run's config lacks is ``(absent)``. Keys that only name places are left out. Other differences between
    experiments are keys too: ``script``, ``arguments.*``, ``world_size``, ``environment.NCCL_*``. Runs that differ in
    nothing else are distinguished by the wrappers of their models: ``wrapper``, ``ddp.*``, ``fsdp.*``. One row per run.
    """
    from commprof.analysis.compare import compared_runs

    return compared_runs.settings([_opened(run) for run in runs])


def compare(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """One row per setting, repeats merged, with the keys that differ after the label.

    Means of a step are over the steps that ended, without the first, which warms up, if there are others. Initialisation,
    barriers and one-off traffic are left out. Wire bytes are means over the ranks of the job. ``interval_over``: what the
    95 % interval is over: ``repeats`` (Student's t over the medians of the runs) or ``steps`` (order statistics of one run).
    """
    return compare_both(runs, ranks=False).settings


def traffic_by_setting(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """Bytes of a training step by setting, issued op, intended op and purpose: :func:`compare` in long form for charts."""
    from commprof.analysis.compare import compared_runs, comparison

    return comparison.traffic_by_setting(compared_runs.measured([_opened(run) for run in runs]))


def traffic_by_group(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """Bytes of a training step by setting, name and size of the group, and operation: the traffic of each axis.

    Wire bytes are of a rank of the job, as in :func:`compare`: those of a setting add up to its ``wire_bytes_per_step``.
    """
    from commprof.analysis.compare import compared_runs, comparison

    return comparison.traffic_by_group(compared_runs.measured([_opened(run) for run in runs]))


def compare_both(runs: Sequence[AnyRun], ranks: bool = True) -> Comparison:
    """All answers of the comparison of the same runs, reading each run once.

    Args:
        ranks: whether to answer :func:`rank_bytes` too, which takes a fifth of the time; it is empty otherwise.
    """
    from commprof.analysis.compare import compared_runs

    return compared_runs.comparison_of([_opened(run) for run in runs], ranks)


def advice(runs: Sequence[AnyRun]) -> Advice:
    """What to set, and why: least wire bytes at equal loss, a shorter step only if repeats show it.

    ``answer`` is ``recommended``, ``no measurable difference`` or ``cannot tell``; the other fields are its
    sentences and its evidence. The rules are in ``analysis/compare/advice.py`` and ``docs/analysis.md``; the order of
    the runs does not matter.
    """
    return compare_both(runs, ranks=False).advice


def resources(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """Memory and samples per second, one row per setting; ``samples_from``: the source of the samples of a step."""
    return compare_both(runs, ranks=False).resources


def rank_bytes(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """What each rank sends and receives in a training step, one row per setting and rank, by the model of :func:`matrix`.

    ``frame.attrs["reasons"]``: by label, why the bytes by rank of a setting are not known.
    """
    return compare_both(runs).ranks


def reduction_levels(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """Gradient reduction at the four levels by setting, from the ledger of each run.

    A level that is not known has null bytes and its ``reason``. Wire bytes are of a rank of the job, as in
    :func:`compare`. Moved bytes are all that the hosts sent.
    """
    from commprof.analysis.compare import compared_runs
    from commprof.analysis.traffic import setting_levels

    return setting_levels.reduction_levels(compared_runs.ledgers([_opened(run) for run in runs]))


def traffic_levels(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """All traffic of a step at the four levels by setting: :func:`reduction_levels`, and the rest of the step.

    The bytes of a setting and level add up to those of :func:`compare`. The requested level lacks traffic that no rule
    predicts, such as metrics. Moved bytes are also given for a rank and step.
    """
    from commprof.analysis.compare import compared_runs
    from commprof.analysis.traffic import setting_levels

    return setting_levels.traffic_levels(compared_runs.ledgers([_opened(run) for run in runs]))


def table(run: AnyRun, name: str) -> pd.DataFrame:
    """One table of the schema as a frame.

    Raises:
        UsageError: the schema has no table ``name``.
    """
    from commprof.analysis.columns.frames import from_arrow

    if name not in TABLES:
        raise UsageError(f"there is no table {name!r}; the tables are: {', '.join(TABLES)}")
    return from_arrow(_opened(run).table(name), TABLES[name].columns)


def query(run: AnyRun, sql: str, session: SparkSession | None = None) -> pd.DataFrame:
    """The answer to one SELECT over the tables and relations of a run; it has access to nothing else.

    Args:
        session: of Spark (:func:`commprof.analysis.relations.spark.start`), which answers in Spark's SQL; default: DuckDB.

    Raises:
        UsageError: it is not one SELECT, names another table, or cannot be evaluated.
    """
    import pandas as pd
    import pyarrow as pa

    if session is None:
        from commprof.analysis.relations.user_sql import query as ask_duckdb

        answer = ask_duckdb(_opened(run), sql)
    else:
        from commprof.analysis.relations.spark_question import query as ask_spark

        answer = ask_spark(session, _opened(run), sql)
    exact = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype()}
    frame: pd.DataFrame = answer.to_pandas(types_mapper=exact.get)
    return frame


def index(run: AnyRun, progress: index_module.Progress | None = None) -> dict[str, Any]:
    """Build and write the index of a run unless a valid one exists: beside the run, or in the user's cache directory.

    The functions below work without one; then they build it in memory on first use.

    Args:
        progress: called with the number of records done and of all records.

    Returns:
        ``records``, ``begin_ns`` and ``end_ns`` of the run, ``ranks``, ``lanes`` (of their groups; 0 if no rank has
        several), ``ops``, and ``in_file``: False if it is in memory (a small run, one that still runs, or no writable
        place).

    Raises:
        TraceError: the run cannot be read, or its index is too large for memory and cannot be written.
    """
    from commprof.analysis.storage import index as index_module

    opened = index_module.index_of(run, progress, write=True)
    return {
        **{
            name: opened.facts[name]
            for name in ("records", "begin_ns", "end_ns", "ranks", "lanes", "ops", "state")
        },
        "in_file": opened.path is not None,
    }


def finalise(run: Path | str) -> bool:
    """Finalise a run that has ended and was not finalised. Otherwise nothing is written.

    Returns:
        Whether it was finalised now. False: it was already, still runs, is damaged, or cannot be read or written.
    """
    from commprof.trace.directory import resolve
    from commprof.trace.finaliser import finalise_ended

    try:
        return finalise_ended(resolve(run)) is not None
    except TraceError:
        return False


def has_index(run: Path | str) -> bool:
    """Whether the functions below answer without building an index: the run is small, still runs, or has a valid index."""
    from commprof.analysis.storage import index as index_module

    return index_module.has_index(Path(run))


def timeline(
    run: AnyRun,
    begin_ns: int | None = None,
    end_ns: int | None = None,
    pixels: int = 1200,
    ranks: Sequence[int] | None = None,
    most_bars: int = MOST_BARS,
) -> Timeline:
    """The timeline between ``begin_ns`` and ``end_ns`` (default: the whole run): each record, or how busy each rank was.

    Up to ``most_bars`` records are returned as ``bars``. More are returned as ``density``: the busy time of each rank in
    each of about ``pixels`` bins, by operation, and by group (``lanes``) if ranks have several and all together have
    ``MOST_LANES`` at most. The edges of bins may lie slightly outside of the window.

    Args:
        ranks: the ranks to show; default: all.

    Raises:
        UsageError: the window has no length.
    """
    from commprof.analysis.browse import timeline as timeline_module
    from commprof.analysis.storage import index as index_module

    return timeline_module.timeline(index_module.index_of(run), begin_ns, end_ns, pixels, ranks, most_bars)


def step_window(run: AnyRun, step: int) -> tuple[int, int] | None:
    """When a training step began and ended, on the clock of :func:`timeline`; None if no step of that number ended."""
    from commprof.analysis.browse import timeline as timeline_module
    from commprof.analysis.storage import index as index_module

    return timeline_module.step_window(index_module.index_of(run), step)


def warm_window(run: AnyRun, steps: int = 3) -> tuple[int, int] | None:
    """When the first ``steps`` training steps after the first ran, on the clock of :func:`timeline`; None without one."""
    from commprof.analysis.browse import timeline as timeline_module
    from commprof.analysis.storage import index as index_module

    return timeline_module.warm_window(index_module.index_of(run), steps)


def records_page(
    run: AnyRun,
    filters: Sequence[Filter] = (),
    sort: str | None = None,
    offset: int = 0,
    limit: int = 100,
) -> RecordsPage:
    """A page of the records that match all ``filters``, and the number of all matches.

    Args:
        sort: a column, with a leading minus for descending order; default: order of time. Null comes last.
        offset: rows to skip; ``limit``: rows to return, 10,000 at most.

    Raises:
        UsageError: there is no such column or test, or a value is not of the column's type.
    """
    from commprof.analysis.browse import record_pages
    from commprof.analysis.storage import index as index_module

    return record_pages.page(index_module.index_of(run), filters, sort, offset, limit)


def records_csv(
    run: AnyRun,
    filters: Sequence[Filter] = (),
    sort: str | None = None,
    columns: Sequence[str] | None = None,
) -> Iterator[bytes]:
    """All matching records as CSV, in batches: see :func:`records_page`."""
    from commprof.analysis.browse import record_pages
    from commprof.analysis.storage import index as index_module

    return record_pages.csv_parts(index_module.index_of(run), filters, sort, columns)


def record(
    run: AnyRun, rank: int, seq: int, attempt: int | None = None, pid: int | None = None
) -> Record | None:
    """One record with its bucket, its NCCL lines, and the same collective on the other ranks; None if there is none.

    Args:
        attempt, pid: which process of the rank; default: the last one.
    """
    from commprof.analysis.browse.record_details import record as record_of
    from commprof.analysis.storage import index as index_module

    return record_of(index_module.index_of(run), rank, seq, attempt, pid)


def describe_columns(name: str) -> dict[str, Column]:
    """The columns of an answer or of a table of the schema, by name: type, unit and meaning.

    ``name`` is that of a function here (``traffic``, ``step_times``, ``moved``, ``compare``, ``traffic_by_setting``,
    ``find_runs``, ``requested``, ``exposure``) or of a table. ``traffic`` and ``exposure`` have the columns that they can be
    grouped by as well.

    Raises:
        UsageError: there is no such answer or table.
    """
    from commprof.analysis.columns.answers import ANSWERS, EXPOSURE_BY, GROUPINGS

    declared = {**TABLES, **ANSWERS}.get(name)
    if declared is None:
        raise UsageError(f"nothing is called {name!r}; choose from {', '.join((*ANSWERS, *TABLES))}")
    columns = {column.name: column for column in declared.columns}
    groupings = {"traffic": GROUPINGS, "exposure": EXPOSURE_BY}.get(name, {})
    return groupings | columns

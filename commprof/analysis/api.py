"""The functions that answer questions about runs. Other packages import only this module of ``analysis``.

The argument ``run`` is a path or an opened :class:`Run`. Most answers are pandas frames. The columns of the frames
are declared in ``analysis/columns/answers.py`` and described in ``docs/analysis.md``.

Three measures of bytes are never added to each other. ``payload_bytes`` is S of nccl-tests. ``wire_bytes`` are
modelled: the mean number of bytes that a rank of the group sends. Moved bytes are interface counters (see
:func:`moved`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from commprof.analysis.columns.defaults import MOST_BARS, MOST_LATE, NOTABLE_DROPS, UNEVEN_LOAD
from commprof.errors import TraceError, UsageError
from commprof.schema import TABLES, Column

# Each function imports its implementation when it is called, so that a command loads only the modules that it needs.
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

# Names that this module exports from other modules. They are loaded on first use.
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
    # Python calls __getattr__ only for missing names, so the global makes the next use of the name fast.
    value = globals()[name] = getattr(import_module(_ELSEWHERE[name]), name)
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
    """Return the runs in and below ``directory``, newest first. A run that cannot be read is listed with the reason."""
    from commprof.analysis.browse import listing

    return listing.runs_below(Path(directory))


def traffic(run: AnyRun, by: Sequence[str] = TRAFFIC_BY) -> pd.DataFrame:
    """Return the traffic of a run, with one row for each combination of the columns ``by``.

    Collectives are deduplicated, and a message counts at its send. If no rank recorded the send of a message, its recv
    counts with its payload and no wire bytes. Initialization is step -1. Barriers are included.

    Args:
        by: The columns to group by. ``()`` gives one row with the totals.

    Raises:
        UsageError: A column of ``by`` cannot be grouped by.
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
    """Return the bytes that each rank sends to each other rank.

    The bytes of sends are recorded. The bytes of collectives follow from a model that conserves wire bytes.

    ``frame.attrs`` contains:

    - ``models``: the pairs of ranks to which the bytes of each operation are assigned (``docs/matrix.md``)
    - ``unplaced_bytes``: the bytes whose pairs of ranks are not known
    - ``executed_unplaced_bytes``: the executed bytes whose pairs of ranks are not known
    - ``executed_reason``: the reason why some executed bytes are not known, or None
    - ``ranks``: the number of ranks of the run
    - ``ranks_per_cell``: the number of ranks that a sender or receiver represents. The sender or receiver is the first
      of these ranks.

    Args:
        by: The columns to group by: any of ``step``, ``phase``, ``op``, ``intended_op``, ``purpose`` and ``pg``.
        steps: The first and the last step to include. Default: all steps, including step -1, which is the time before
            the first step.
        op, purpose: The operation and the purpose to include. The purpose ``untagged`` selects traffic without a
            purpose.
        most_ranks: The maximum number of rows and columns. If there are more ranks, neighboring ranks are summed.

    Raises:
        UsageError: A column of ``by`` cannot be grouped by.
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.traffic import matrix as matrix_module

    run = _opened(run)
    operations = run_totals.operations(run, matrix_module.columns(by))
    groups = run.table("groups")
    chosen = steps or matrix_module.EVERY_STEP
    return matrix_module.matrix(operations, groups, by, chosen, op, purpose, most_ranks)


def owners(run: AnyRun, steps: tuple[int, int] | None = None) -> pd.DataFrame:
    """Return the bytes that each rank owns and receives in reduces to one owner.

    There is one row for each rank of a group with such reduces. ``frame.attrs["imbalance"]`` is the largest
    ``received_bytes`` divided by the mean of the ranks, or None if there are no such reduces.
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.traffic import matrix as matrix_module

    run = _opened(run)
    operations = run_totals.operations(run, matrix_module.columns(()))
    groups = run.table("groups")
    return matrix_module.owners(operations, groups, steps or matrix_module.EVERY_STEP)


def experts(run: AnyRun) -> pd.DataFrame:
    """Return the load of each expert in each training step, summed over all ranks.

    The load is the number of tokens that chose the expert, before any tokens were dropped. The frame has no rows if
    the run published no loads.
    """
    from commprof.analysis.traffic import experts as experts_module

    return experts_module.experts(_opened(run))


def expert_ranks(run: AnyRun) -> pd.DataFrame:
    """Return the load of the experts in each training step (see :func:`experts`), summed by the rank that has them."""
    from commprof.analysis.traffic import experts as experts_module

    return experts_module.ranks(_opened(run))


def expert_imbalance(run: AnyRun) -> pd.DataFrame:
    """Return the load imbalance of each layer in each training step, and the number of dropped tokens.

    The imbalance is the largest load of an expert divided by the mean load.
    """
    from commprof.analysis.traffic import experts as experts_module

    return experts_module.imbalance(_opened(run))


def expert_summary(run: AnyRun) -> ExpertSummary | None:
    """Return a summary of the experts of a run: layers, median and worst imbalance, and dropped share.

    The result is None if the run has no experts.
    """
    from commprof.analysis.traffic import experts as experts_module

    return experts_module.summary(_opened(run))


def exchange_imbalance(run: AnyRun, purpose: str | None = None, of_experts: bool = False) -> pd.DataFrame:
    """Return the bytes that the ranks receive in the all_to_alls of each training step, and their imbalance.

    The imbalance is the largest number of bytes that a rank receives from other ranks, divided by the mean of the
    ranks. It follows from the recorded splits, so the program needs no hook. An all_to_all with equal splits, for
    example of a padded buffer, is even. The imbalance is null if the splits were given as tensors, and in runs that
    recorded only sums.

    Args:
        purpose: The purpose of the all_to_alls to include. ``untagged`` selects those without a purpose. Default: all.
        of_experts: Whether to include only the all_to_alls that exchange tokens. These have the purpose activation and
            run among ranks that share the experts of a layer.
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
    """Return the gradient buckets of a run: contents, reason of the flush, reduction and duration.

    The bytes of a bucket are those of the collectives with the purpose gradient_reduce and the number of the bucket.
    They count as in :func:`traffic`. Ranks whose groups share no rank, for example the ranks of two pipeline stages,
    have separate buckets. The column ``group_ranks`` distinguishes these buckets.

    Args:
        step, micro_step, bucket, group_ranks: The values that the rows must have. Default: all rows.
    """
    from commprof.analysis.storage import run_totals

    only = {"step": step, "micro_step": micro_step, "bucket": bucket, "group_ranks": group_ranks}
    return run_totals.bucket_flushes(_opened(run), only)


def bucket_steps(run: AnyRun) -> pd.DataFrame:
    """Return the sums of the buckets of :func:`bucket_flushes`, one row for each step and reason of the flush."""
    from commprof.analysis.storage import run_totals

    return run_totals.bucket_steps(_opened(run))


def buckets_per_step(run: AnyRun) -> pd.DataFrame:
    """Return the buckets per training step, one row for each reason of the flush, by the rule for values per step."""
    from commprof.analysis.storage import run_totals

    return run_totals.buckets_per_step(_opened(run))


def bucket_means(run: AnyRun) -> pd.DataFrame:
    """Return the buckets of a mean training step, over the steps with the most frequent contents.

    Times are medians. Bytes and times exclude the first step of each attempt.
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
    """Return the parameters of one bucket and the collectives that reduced it, or None if there is no such bucket.

    Args:
        attempt: The attempt of the bucket. Default: the last attempt that has the bucket.
        group_ranks: The ranks that have the bucket, as in :func:`bucket_flushes`. Default: the ranks that include the
            lowest rank.
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
    """Return the sorted numbers of the training steps of a run, as in :func:`step_times`."""
    import pyarrow.compute as pc

    numbers = pc.unique(_opened(run).table("steps")["step"]).to_pylist()
    return sorted(number for number in numbers if number >= 0)


def step_times(run: AnyRun) -> pd.DataFrame:
    """Return the times, the loss and the traffic of each training step, one row per step and attempt."""
    from commprof.analysis.storage import run_totals

    run = _opened(run)
    return run_totals.step_times(run)


def resource_use(run: AnyRun) -> pd.DataFrame:
    """Return memory, processor use and communication share of each training step, one row per step and attempt."""
    from commprof.analysis.compare import step_resources
    from commprof.analysis.storage import run_totals

    run = _opened(run)
    return step_resources.resource_use(run_totals.step_times(run), table(run, "samples"))


def arrivals(run: AnyRun, steps: tuple[int, int] | None = None) -> pd.DataFrame:
    """Return the arrivals of the ranks at each collective, one row per collective and rank.

    All times are on one clock and have error bounds. The records of a collective are matched by attempt, group (name
    and ranks), number in the group and operation. A send and a recv are matched by sender, receiver and order. Ranks
    that read the same clock are compared exactly. ``docs/clocks.md`` states the bounds and formulas.

    Args:
        steps: The first and the last step to include. Default: all steps, including step -1, which is the time before
            the first step.

    Raises:
        UsageError: The frame would not fit into memory. Use :func:`arrivals_parts` instead.
    """
    from commprof.analysis.stragglers import straggler_answers

    return straggler_answers.arrivals(_opened(run), steps)


def arrivals_parts(run: AnyRun, steps: tuple[int, int] | None = None) -> Iterator[pd.DataFrame]:
    """Yield the rows of :func:`arrivals` by partition, so that only one partition is in memory."""
    from commprof.analysis.columns.answers import ANSWERS
    from commprof.analysis.columns.frames import from_arrow
    from commprof.analysis.stragglers import straggler_answers

    for part in straggler_answers.arrival_parts(_opened(run), steps):
        yield from_arrow(part, ANSWERS["arrivals"].columns)


def stragglers(run: AnyRun) -> pd.DataFrame:
    """Return how often each rank arrives last and how long the other ranks wait for it, one row per rank.

    ``frame.attrs`` contains:

    - ``statement``: the verdict, or None if there is none
    - ``late``: the ranks that the verdict names as late
    - ``since``: pairs of a rank that became late and the first step in which the rank is late, if there are any
    """
    return straggling(run).ranks


def sampled_stragglers(run: AnyRun) -> pd.DataFrame | None:
    """Return the answer of :func:`stragglers` for a sample of training steps of a run on several hosts.

    The sample comes from the files of the hosts. The result is None if there are no such files.

    In addition to the attributes of :func:`stragglers`, ``frame.attrs`` contains:

    - ``steps``: the number of sampled steps
    - ``of_steps``: the number of all steps
    - ``share``: the share of the collectives of the sampled steps that was compared
    - ``hosts``: the host of each late rank
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
    """Return the stored alignment of a run with its NCCL log (``commprof align``).

    ``counts`` contains the number of rows by rank, group, operation and state. ``divergences`` contains the first
    divergence between records and lines of each rank and group. ``rows`` contains every record with its line. The
    frames have no rows if no alignment is stored.
    """
    from commprof.analysis.browse import alignment as alignment_module

    return alignment_module.alignment(_opened(run))


def alignment_summary(run: AnyRun) -> AlignmentSummary:
    """Return ``counts`` and ``divergences`` of :func:`alignment` without loading its ``rows``."""
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
    """Return a window of the ``rows`` of :func:`alignment` for one rank and group.

    Args:
        rank, pg: The rank and the group. None selects lines whose rank or group is not known.
        state: The state that the rows must have. Default: any state.
        at: The position, within the rank and group, that the window shows.
        before: The number of rows to show before position ``at``.
        limit: The maximum number of rows.
    """
    from commprof.analysis.browse import alignment as alignment_module

    return alignment_module.window(_opened(run), rank, pg, state, at, before, limit)


def alignment_place(
    run: AnyRun, rank: int, attempt: int, pid: int, seq: int
) -> tuple[int | None, str | None, int] | None:
    """Return the rank, group and position of a record in the ``rows`` of :func:`alignment`.

    The result is None if the record has no row.
    """
    from commprof.analysis.browse import alignment as alignment_module

    return alignment_module.place(_opened(run), rank, attempt, pid, seq)


def topology(run: AnyRun) -> pd.DataFrame:
    """Return the rings and trees that NCCL printed, one row per communicator, channel and pair of connected ranks."""
    from commprof.analysis.browse import alignment as alignment_module

    return alignment_module.topology(_opened(run))


def straggling(run: AnyRun, limit: int = MOST_LATE, first_step: bool = True) -> Straggling:
    """Return all straggler answers, computed in one pass.

    These are :func:`stragglers`, the lateness by rank, the causes of waiting, the worst collectives, and ``steps``.
    ``steps`` is the lateness of each rank in each training step. The verdict counts the rows with ``is_warm``.

    Args:
        limit: The maximum number of worst collectives.
        first_step: Whether to include the first training step, in which ranks start up, and the time before it. False
            reads all records, even if the run has an index.
    """
    from commprof.analysis.stragglers import straggler_answers

    return straggler_answers.straggling(_opened(run), limit, first_step)


AnyCalibration: TypeAlias = "Calibration | Path | str"


def bandwidth_both(
    run: AnyRun, calibration: AnyCalibration | None = None, steps: tuple[int, int] | None = None
) -> Bandwidths:
    """Return :func:`bandwidth` and :func:`bandwidth_times` of the same run, which is read only once."""
    from commprof.analysis.stragglers import straggler_answers
    from commprof.analysis.time import bandwidth as bandwidth_module
    from commprof.calibration.file import read_calibration

    run = _opened(run)
    opened = read_calibration(Path(calibration)) if isinstance(calibration, str | Path) else calibration
    return bandwidth_module.bandwidths(straggler_answers.times(run, steps), opened, run.manifest.hosts)


def bandwidth(
    run: AnyRun, calibration: AnyCalibration | None = None, steps: tuple[int, int] | None = None
) -> pd.DataFrame:
    """Return time, algorithm bandwidth, bus bandwidth and ceiling by operation, group and size.

    Outliers and impossible times are counted, and the medians exclude them. ``frame.attrs["notes"]`` contains sentences
    about the limits of the values. ``docs/calibration.md`` defines times, bandwidths and the ceiling.

    Args:
        calibration: The result of ``commprof calibrate``, or the path of its file. Without a calibration there is no
            ceiling.
        steps: The first and the last step to include. Default: all steps, including step -1, which is the time before
            the first step.

    Raises:
        TraceError: The calibration file cannot be read.
    """
    return bandwidth_both(run, calibration, steps).sizes


def bandwidth_times(
    run: AnyRun, calibration: AnyCalibration | None = None, steps: tuple[int, int] | None = None
) -> pd.DataFrame:
    """Return the bandwidth of each single collective and message, with a verdict on its time."""
    return bandwidth_both(run, calibration, steps).collectives


def ceiling(
    calibration: AnyCalibration,
    group_size: int | None = None,
    low: int | None = None,
    high: int | None = None,
) -> pd.DataFrame:
    """Return the ceiling of a machine: the fitted curve of each operation by payload, and the measured times.

    Args:
        group_size: The number of ranks of the groups to compare. Default: the world size of the calibration.
        low, high: The smallest and the largest payload in bytes. Default: the measured range.
    """
    from commprof.analysis.time import bandwidth as bandwidth_module
    from commprof.calibration.file import read_calibration

    opened = read_calibration(Path(calibration)) if isinstance(calibration, str | Path) else calibration
    return bandwidth_module.ceiling(opened, group_size, low, high)


def ceiling_fits(calibration: AnyCalibration) -> pd.DataFrame:
    """Return the latency and bandwidth of each operation of a calibration, with 95 % intervals and residuals."""
    from commprof.analysis.time import bandwidth as bandwidth_module
    from commprof.calibration.file import read_calibration

    opened = read_calibration(Path(calibration)) if isinstance(calibration, str | Path) else calibration
    return bandwidth_module.ceiling_fits(opened)


def calibrations(directory: Path | str) -> pd.DataFrame:
    """Return the calibrations (``calibration*.json``) in and below ``directory``, newest first."""
    from commprof.analysis.time import bandwidth as bandwidth_module

    return bandwidth_module.calibrations_below(Path(directory))


def untagged(run: AnyRun) -> pd.DataFrame:
    """Return the call sites of collectives without a purpose, one row per call site and operation.

    Rows are in order of payload, largest first. ``call_site`` is a line of the program. It is null if only sums were
    recorded, or if the call did not come from Python.
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.traffic import untagged as untagged_module

    run = _opened(run)
    # The sums by purpose are stored, so this check is fast. The sums by call site are not stored.
    if not run_totals.operations(run, ("purpose",))["purpose"].null_count:
        return untagged_module.none()
    return untagged_module.untagged(traffic(run, by=untagged_module.BY))


def algorithms(run: AnyRun) -> pd.DataFrame:
    """Return the algorithm and protocol that NCCL chose, one row per operation, group, payload and choice.

    Rows are in order of payload. The source is an aligned NCCL log with TUNING, or a log of the NCCL Inspector. The
    frame has no rows if neither log contains the choice.
    """
    from commprof.analysis.traffic import algorithms as algorithms_module

    return algorithms_module.algorithms(_opened(run))


def exposure(run: AnyRun, by: Sequence[str] = ("step",)) -> pd.DataFrame:
    """Return exposed and overlapped communication for each combination of the columns ``by``.

    Rows may overlap in time, so their times need not add up. ``docs/times.md`` defines exposed and overlapped.

    Args:
        by: The columns to group by, for example ``("step",)``, ``("purpose",)`` or ``("step", "bucket")``.
            ``("pg", "group_ranks", "pg_seq")`` gives one row for each collective, and ``()`` gives one row.

    Raises:
        UsageError: A column of ``by`` cannot be grouped by.
    """
    from commprof.analysis.storage import run_totals

    run = _opened(run)
    return run_totals.exposure(run, by)


def exposure_per_step(run: AnyRun) -> pd.DataFrame:
    """Return exposed and overlapped time per training step, by purpose and in total.

    The last row is the total, which is the union of the waits. Purposes overlap in time, so their times need not add
    up. Each value is a median over the warm steps of means over the ranks. Shares are relative to the median duration
    of the same steps. Warm steps are the steps that ended, without the first step of each attempt if there are other
    steps.
    """
    from commprof.analysis.storage import run_totals

    run = _opened(run)
    return run_totals.exposure_per_step(run)


def has_exposed_times(run: AnyRun) -> bool:
    """Return whether the exposed time of each warm step is known, so that :func:`exposure_per_step` has a value."""
    from commprof.analysis.storage import run_totals

    run = _opened(run)
    return run_totals.has_exposed_times(run)


def one_offs(run: AnyRun) -> pd.DataFrame:
    """Return one-off traffic by step, purpose, operation and group.

    One-off traffic is sent by single training steps in addition to the recurring traffic. Values per training step
    exclude it. The rule is in ``docs/analysis.md`` (values of a step). It applies separately to each combination of
    operation, purpose and group.
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.traffic import one_offs as one_offs_module

    run = _opened(run)
    return one_offs_module.one_offs(traffic(run, one_offs_module.BY), run_totals.step_times(run))


def moved(run: AnyRun) -> pd.DataFrame:
    """Return the bytes moved during the run by host and interface.

    The interface counters include the traffic of all processes of the host. ``frame.attrs["reason"]`` states why the
    readings do not cover the run on every host, and is None if they do. The possible reasons are: no readings at all,
    none of a host, a first reading that is too late, or a last reading that is too early. The column ``left_out``
    contains the reason of each host.
    """
    from commprof.analysis.traffic import moved_bytes
    from commprof.trace.coverage import uncovered

    opened = _opened(run)
    return moved_bytes.moved(opened.table("wire"), uncovered(opened))


def requested(run: AnyRun) -> pd.DataFrame:
    """Return the traffic that the configuration of the run requests, one row per purpose.

    It is predicted from the configuration keys and the parameters. If no prediction is possible, the frame has no rows
    and ``frame.attrs["reason"]`` states why. Otherwise the reason is None.
    """
    from commprof.analysis.traffic import requested_traffic

    run = _opened(run)
    frame, reason = requested_traffic.requested(run)
    frame.attrs["reason"] = reason
    return frame


def records_place(path: Path | str) -> str | None:
    """Return the URL of the analyzed run if ``path`` is an analysis and the records are not on this machine.

    Otherwise the result is None.
    """
    from commprof.trace.directory import elsewhere

    there = elsewhere(Path(path))
    return None if there is None else there.place


def verify(run: AnyRun) -> Verdict:
    """Return the ledger of a run: requested, issued, executed and moved bytes, and whether every byte is explained."""
    from commprof.ledger import verification

    return verification.verify(_opened(run))


def model_numel(run: AnyRun) -> int | None:
    """Return the number of elements of all parameters that a run published, or None if it published none."""
    from commprof.analysis.browse import listing

    return listing.model_numel(_opened(run))


def overview(run: AnyRun) -> dict[str, Any]:
    """Return the overview of a run as plain values: software, traffic, times, and missing data.

    ``moved_reason`` states why the moved bytes are None. ``requested_reason`` states why the requested operation is
    None.
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
    """Return how a run ended, how much of it was recorded, and what is missing."""
    return _opened(run).health


def backends(run: AnyRun) -> str | None:
    """Return the backends of the collectives of a run, or of its process groups if the run has no collectives.

    This is the value ``backends`` of :func:`overview`.
    """
    from commprof.analysis.compare import run_overview
    from commprof.analysis.storage import run_totals

    run = _opened(run)
    used = run_overview.used_backends(run_totals.operations(run, ("backend",)))
    return used or run_overview.group_backends(run.table("groups"))


def several_trainings(run: AnyRun) -> str | None:
    """Return a sentence that states which steps belong to which of several successive trainings.

    The result is None for a single training, for a restarted run, and if no second training is known to begin.
    """
    from commprof.analysis.storage import run_totals
    from commprof.analysis.time import trainings

    run = _opened(run)
    spans = trainings.trainings(run, run_totals.step_times(run))
    return trainings.sentence(spans) if spans else None


def settings(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """Return how the runs differ, one row per run.

    The columns are ``run``, ``label``, and a text column for each dotted configuration key that differs. The value is
    ``(absent)`` if the configuration of a run lacks the key. Keys that only name paths or runs are excluded. Other
    differences between experiments are keys too: ``script``, ``arguments.*``, ``world_size``, ``environment.NCCL_*``.
    Runs without any such difference are distinguished by the wrappers of their models: ``wrapper``, ``ddp.*``,
    ``fsdp.*``.
    """
    from commprof.analysis.compare import compared_runs

    return compared_runs.settings([_opened(run) for run in runs])


def compare(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """Return the comparison of the settings of the runs, one row per setting.

    Repeats of a setting are merged. The keys that differ follow the column ``label``. Means per step are over the steps
    that ended. They exclude the first step, which is a warm-up, if there are other steps. They also exclude
    initialization, barriers and one-off traffic. Wire bytes are means over the ranks of the job.

    ``interval_over`` states the basis of the 95 % interval. It is ``repeats`` (Student's t over the medians of the
    runs) or ``steps`` (order statistics of one run).
    """
    return compare_both(runs, ranks=False).settings


def traffic_by_setting(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """Return bytes per training step by setting, issued operation, intended operation and purpose.

    These are the values of :func:`compare` in long form for charts.
    """
    from commprof.analysis.compare import compared_runs, comparison

    return comparison.traffic_by_setting(compared_runs.measured([_opened(run) for run in runs]))


def traffic_by_group(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """Return bytes per training step by setting, name and size of the group, and operation: the traffic of each axis.

    Wire bytes are means over the ranks of the job, as in :func:`compare`. The wire bytes of a setting add up to its
    ``wire_bytes_per_step``.
    """
    from commprof.analysis.compare import compared_runs, comparison

    return comparison.traffic_by_group(compared_runs.measured([_opened(run) for run in runs]))


def compare_both(runs: Sequence[AnyRun], ranks: bool = True) -> Comparison:
    """Return all answers of a comparison of runs. Each run is read only once.

    Args:
        ranks: Whether to compute :func:`rank_bytes` too, which takes a fifth of the time. Otherwise its frame is empty.
    """
    from commprof.analysis.compare import compared_runs

    return compared_runs.comparison_of([_opened(run) for run in runs], ranks)


def advice(runs: Sequence[AnyRun]) -> Advice:
    """Return which setting to choose and why.

    The rules prefer the fewest wire bytes at equal loss. A shorter step counts only if repeats show it. The field
    ``answer`` is ``recommended``, ``no measurable difference`` or ``cannot tell``. The other fields are the sentences
    and the evidence of the advice. The rules are in ``analysis/compare/advice.py`` and ``docs/analysis.md``. The order
    of the runs does not matter.
    """
    return compare_both(runs, ranks=False).advice


def resources(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """Return memory, exposed communication and samples per second, one row per setting.

    ``samples_from`` is the source of the number of samples in a step.
    """
    return compare_both(runs, ranks=False).resources


def rank_bytes(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """Return the bytes that each rank sends and receives per training step, one row per setting and rank.

    The bytes follow the model of :func:`matrix`. ``frame.attrs["reasons"]`` maps the label of a setting to the reason
    why its bytes by rank are not known.
    """
    return compare_both(runs).ranks


def reduction_levels(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """Return the gradient reduction at the four levels by setting, from the ledger of each run.

    A level that is not known has null bytes and a ``reason``. Wire bytes are means over the ranks of the job, as in
    :func:`compare`. Moved bytes are all bytes that the hosts sent.
    """
    from commprof.analysis.compare import compared_runs
    from commprof.analysis.traffic import setting_levels

    return setting_levels.reduction_levels(compared_runs.ledgers([_opened(run) for run in runs]))


def traffic_levels(runs: Sequence[AnyRun]) -> pd.DataFrame:
    """Return all traffic of a step at the four levels by setting.

    The answer contains :func:`reduction_levels` and the rest of the step. The bytes of a setting and level add up to
    the bytes in :func:`compare`. The requested level lacks traffic that no rule predicts, such as metrics. Moved bytes
    are also given per rank and step.
    """
    from commprof.analysis.compare import compared_runs
    from commprof.analysis.traffic import setting_levels

    return setting_levels.traffic_levels(compared_runs.ledgers([_opened(run) for run in runs]))


def table(run: AnyRun, name: str) -> pd.DataFrame:
    """Return one table of the schema as a frame.

    Raises:
        UsageError: The schema has no table ``name``.
    """
    from commprof.analysis.columns.frames import from_arrow

    if name not in TABLES:
        raise UsageError(f"there is no table {name!r}; the tables are: {', '.join(TABLES)}")
    return from_arrow(_opened(run).table(name), TABLES[name].columns)


def query(run: AnyRun, sql: str, session: SparkSession | None = None) -> pd.DataFrame:
    """Return the answer to one SELECT statement over the tables and relations of a run.

    The statement can access only these tables and relations.

    Args:
        session: A Spark session (:func:`commprof.analysis.relations.spark.start`), which evaluates the statement as
            Spark SQL. Default: DuckDB evaluates the statement.

    Raises:
        UsageError: ``sql`` is not one SELECT, names another table, or cannot be evaluated.
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
    """Build and write the index of a run, unless a valid index exists.

    The file is in the run directory, or in the user's cache directory if the former is not writable. The functions
    below do not need this call. If there is no index, they build it in memory on first use.

    Args:
        progress: A function that is called with the number of processed records and the number of all records.

    Returns:
        Facts about the run: ``records``, ``begin_ns``, ``end_ns``, ``ranks``, ``lanes`` (the number of lanes, or 0 if
        the timeline does not distinguish groups), ``ops``, ``state``, and ``in_file``. ``in_file`` is False if the
        index is in memory, because the run is small, still runs, or has no writable place for the file.

    Raises:
        TraceError: The run cannot be read, or its index is too large for memory and cannot be written.
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
    """Finalize a run that has ended and is not finalized yet. Otherwise nothing is written.

    Returns:
        Whether this call finalized the run. False if the run was finalized before, still runs, is damaged, or cannot be
        read or written.
    """
    from commprof.trace.directory import resolve
    from commprof.trace.finaliser import finalise_ended

    try:
        return finalise_ended(resolve(run)) is not None
    except TraceError:
        return False


def has_index(run: Path | str) -> bool:
    """Return whether the functions below answer without building the index of a large run.

    This is so if the run is small, still runs, or has a valid index.
    """
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
    """Return the timeline between ``begin_ns`` and ``end_ns``: either each record, or how busy each rank was.

    Up to ``most_bars`` records are returned as ``bars``. More records are returned as ``density``: the busy time of
    each rank in each of about ``pixels`` bins, by operation. The density is also divided by group (``lanes``) if ranks
    have several groups and there are at most ``MOST_LANES`` lanes in total. The edges of bins may be slightly outside
    of the window.

    Args:
        begin_ns, end_ns: The window in ns. Default: the whole run.
        pixels: The approximate number of bins.
        ranks: The ranks to show. Default: all ranks.
        most_bars: The maximum number of records to return as ``bars``.

    Raises:
        UsageError: The window has no length, or ``pixels`` or ``most_bars`` is too small.
    """
    from commprof.analysis.browse import timeline as timeline_module
    from commprof.analysis.storage import index as index_module

    return timeline_module.timeline(index_module.index_of(run), begin_ns, end_ns, pixels, ranks, most_bars)


def step_window(run: AnyRun, step: int) -> tuple[int, int] | None:
    """Return begin and end of a training step in ns on the clock of :func:`timeline`, or None if no such step ended."""
    from commprof.analysis.browse import timeline as timeline_module
    from commprof.analysis.storage import index as index_module

    return timeline_module.step_window(index_module.index_of(run), step)


def warm_window(run: AnyRun, steps: int = 3) -> tuple[int, int] | None:
    """Return begin and end of the first ``steps`` training steps that follow the first step of the last attempt.

    The times are in ns on the clock of :func:`timeline`. The result is None if no such step ended.
    """
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
    """Return a page of the records that match all ``filters``, and the number of all matching records.

    Args:
        sort: The column to sort by, with a leading minus for descending order. Null values are last. Default: order of
            time.
        offset: The number of rows to skip.
        limit: The maximum number of rows to return, at most 10,000.

    Raises:
        UsageError: A column or test does not exist, a value is not of the type of its column, or ``offset`` or
            ``limit`` is out of range.
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
    """Yield all matching records as CSV, in batches (see :func:`records_page`)."""
    from commprof.analysis.browse import record_pages
    from commprof.analysis.storage import index as index_module

    return record_pages.csv_parts(index_module.index_of(run), filters, sort, columns)


def record(
    run: AnyRun, rank: int, seq: int, attempt: int | None = None, pid: int | None = None
) -> Record | None:
    """Return one record with its bucket, its NCCL lines, and the records of the same collective on the other ranks.

    The result is None if there is no such record.

    Args:
        attempt, pid: The process of the rank. Default: the last process.
    """
    from commprof.analysis.browse.record_details import record as record_of
    from commprof.analysis.storage import index as index_module

    return record_of(index_module.index_of(run), rank, seq, attempt, pid)


def describe_columns(name: str) -> dict[str, Column]:
    """Return the columns of an answer or of a table of the schema by name, with type, unit and meaning.

    For ``traffic`` and ``exposure``, the result includes the columns that they can be grouped by.

    Args:
        name: The name of an answer, for example ``traffic``, ``step_times``, ``moved``, ``compare``,
            ``traffic_by_setting``, ``find_runs``, ``requested`` or ``exposure``, or the name of a table. Most answers
            have the name of their function in this module.

    Raises:
        UsageError: There is no such answer or table.
    """
    from commprof.analysis.columns.answers import ANSWERS, EXPOSURE_BY, GROUPINGS

    declared = {**TABLES, **ANSWERS}.get(name)
    if declared is None:
        raise UsageError(f"nothing is called {name!r}; choose from {', '.join((*ANSWERS, *TABLES))}")
    columns = {column.name: column for column in declared.columns}
    groupings = {"traffic": GROUPINGS, "exposure": EXPOSURE_BY}.get(name, {})
    return groupings | columns

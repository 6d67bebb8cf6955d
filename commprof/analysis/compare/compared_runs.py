"""A comparison of opened runs: their names and settings, and the values that the answers of the comparison need."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pandas as pd
import pyarrow.compute as pc

from commprof.analysis.compare import advice, comparison, recommendation, run_resources, setting_resources
from commprof.analysis.compare import settings as run_settings
from commprof.analysis.compare.advice import Advice
from commprof.analysis.compare.comparison import Measured
from commprof.analysis.storage import run_totals
from commprof.analysis.storage.answer_cache import answer_cache
from commprof.analysis.time import training_steps
from commprof.analysis.traffic import model_sharding, moved_bytes, rank_bytes, requested_traffic
from commprof.requested.errors import RequestedError
from commprof.requested.wrappers.arguments import arguments_of
from commprof.trace.coverage import uncovered
from commprof.trace.manifest import FAILED, KILLED
from commprof.trace.reader import Run

if TYPE_CHECKING:
    from commprof.analysis.traffic.setting_levels import Ledger
    from commprof.analysis.traffic.steady_steps import Step
    from commprof.ledger.levels import Verdict


# Arguments of wrappers that determine the traffic. _PREFIXES contains prefixes of keys as in commprof predict.
_ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "ddp": ("bucket_cap_mb", "comm_hook", "find_unused_parameters", "static_graph", "mixed_precision"),
    "fsdp": ("sharding_strategy", "param_dtype", "reduce_dtype"),
    "fully_shard": ("reshard_after_forward", "param_dtype", "reduce_dtype"),
    "zero_redundancy_optimizer": (),
}
_PREFIXES: Final = {"fully_shard": "fsdp"}


class ComparedRun(NamedTuple):
    """One run of a comparison, with its name and setting."""

    run: Run
    name: str
    setting: run_settings.Setting


class Comparison(NamedTuple):
    """All answers of one comparison. :mod:`commprof.analysis.api` also has a function for each answer."""

    settings: pd.DataFrame
    traffic: pd.DataFrame
    groups: pd.DataFrame
    resources: pd.DataFrame
    ranks: pd.DataFrame
    advice: Advice


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return the name of each run.

    If two runs have the same name, the name of the parent directory is added. If the names are still equal, the
    position in the list is added.
    """
    short = [run.path.name for run in runs]
    names = [
        name if short.count(name) == 1 else f"{run.path.parent.name}/{name}"
        for run, name in zip(runs, short, strict=True)
    ]
    return [name if names.count(name) == 1 else f"{name} #{place}" for place, name in enumerate(names, 1)]


def settings(runs: Sequence[Run]) -> pd.DataFrame:
    """Return how the runs differ, one row per run (see :func:`commprof.analysis.api.settings`)."""
    names = run_names(runs)
    return run_settings.settings_frame(_settings(runs, names), names)


def compared(runs: Sequence[Run]) -> list[ComparedRun]:
    """Return the runs with their names and settings, in display order."""
    names = run_names(runs)
    settings = _settings(runs, names)
    order = run_settings.in_order([run.manifest for run in runs])
    return [ComparedRun(runs[i], names[i], settings[i]) for i in order]


def _settings(runs: Sequence[Run], names: Sequence[str]) -> list[run_settings.Setting]:
    wrappers = [wrappers_of(run) for run in runs]
    return run_settings.settings_of([run.manifest for run in runs], names, wrappers)


def wrappers_of(run: Run) -> dict[str, Any]:
    """Return the wrappers of the model of ``run`` and the arguments that determine the traffic, by dotted key.

    The values are those of the lowest rank. If the units of a model differ in an argument, its value is a list. The
    result is empty if there are no wrappers.
    """
    table = run.table("wrappers").select(["rank", "number", "wrapper", "arguments", "time_ns"])
    # An engine that published its configuration trains according to it, whatever wraps its model.
    if not table.num_rows or run.manifest.effective_config is not None:
        return {}
    rows = table.filter(pc.equal(table["rank"], pc.min(table["rank"]))).to_pylist()
    latest = {row["number"]: row for row in sorted(rows, key=itemgetter("time_ns"))}
    kinds = [kind for kind in _ARGUMENTS if any(row["wrapper"] == kind for row in latest.values())]
    values: dict[str, list[Any]] = {}
    for row in latest.values():
        with suppress(RequestedError):  # raised for a damaged trace
            arguments = arguments_of(row["arguments"])
            prefix = _PREFIXES.get(row["wrapper"], row["wrapper"])
            for name in _ARGUMENTS.get(row["wrapper"], ()):
                of_key = values.setdefault(f"{prefix}.{name}", [])
                if arguments.get(name) not in of_key:
                    of_key.append(arguments.get(name))
    chosen = {key: each[0] if len(each) == 1 else each for key, each in values.items()}
    return {"wrapper": " and ".join(kinds)} | chosen if kinds else {}


def comparison_of(runs: Sequence[Run], ranks: bool) -> Comparison:
    """Return all answers of the comparison. Each run is read only once.

    Args:
        runs: The runs, in any order.
        ranks: Whether to compute ``ranks`` too, which takes a fifth of the time. Otherwise this frame is empty.
    """
    in_order = compared(runs)
    of_runs = _measured(in_order)
    rows = comparison.rows(of_runs)
    weighed = advice.weigh(advice.candidates(of_runs, rows))
    return Comparison(
        comparison.framed(rows, of_runs),
        comparison.traffic_by_setting(of_runs),
        comparison.traffic_by_group(of_runs),
        setting_resources.resources(of_runs),
        rank_bytes.rank_bytes(_rank_totals(in_order, of_runs) if ranks else []),
        recommendation.advise(weighed),
    )


def measured(runs: Sequence[Run]) -> list[Measured]:
    """Return the values of each run that a comparison needs, in display order."""
    return _measured(compared(runs))


def _measured(runs: Sequence[ComparedRun]) -> list[Measured]:
    return [
        answer_cache.get(one.run.state, "measured", partial(_measure, one.run))._replace(
            name=one.name, setting=one.setting
        )
        for one in runs
    ]


def _measure(run: Run) -> Measured:
    """Return the values of one run, except its name and setting, which depend on the other runs."""
    operations = run_totals.operations(run, run_totals.HELD_COLUMNS)
    times = run_totals.step_times(run)
    manifest = run.manifest
    moved = moved_bytes.moved(run.table("wire"), uncovered(run))
    return Measured(
        name="",
        setting=run_settings.Setting("", {}),
        step_totals=training_steps.step_totals(run.table("steps"), operations, times, manifest.world_size),
        durations=training_steps.durations_after_first(times),
        final_loss=training_steps.final_loss(times),
        requested=requested_traffic.requested_reduction(run),
        usage=run_resources.usage(times, manifest.effective_config or manifest.config, manifest.world_size),
        shape=model_sharding.shape(operations),
        moved_bytes=moved_bytes.moved_per_step(moved, int(times["duration_ns"].notna().sum())),
        failed=run.health.state in (FAILED, KILLED),
    )


def _rank_totals(runs: Sequence[ComparedRun], of_runs: Sequence[Measured]) -> list[rank_bytes.RankTotals]:
    def answer(run: Run, totals: training_steps.StepTotals) -> rank_bytes.RankTotals:
        operations = run_totals.operations(run, run_totals.HELD_COLUMNS)
        return rank_bytes.rank_totals("", totals, operations, run.table("groups"))

    return [
        answer_cache.get(one.run.state, "ranks", partial(answer, one.run, of.step_totals))._replace(
            label=one.setting.label
        )
        for one, of in zip(runs, of_runs, strict=True)
    ]


def ledgers(runs: Sequence[Run]) -> list[Ledger]:
    """Return the ledger and the totals of each run, in display order."""
    from commprof.analysis.traffic.setting_levels import Ledger

    return [
        Ledger(
            one.setting.label,
            *answer_cache.get(one.run.state, "ledger", partial(_ledger, one.run)),
            one.run.manifest.world_size,
        )
        for one in compared(runs)
    ]


def _ledger(run: Run) -> tuple[Verdict, training_steps.StepTotals, dict[str, float], list[Step]]:
    from commprof.analysis.traffic import setting_levels
    from commprof.ledger import verification

    operations, world_size = run_totals.operations(run, run_totals.HELD_COLUMNS), run.manifest.world_size
    times = run_totals.step_times(run)
    totals = training_steps.step_totals(run.table("steps"), operations, times, world_size)
    shares = setting_levels.job_shares(operations, world_size)
    return verification.verify(run), totals, shares, training_steps.whole_steps(times)

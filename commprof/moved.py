"""Modules that have moved: their names of before work for one release, with a DeprecationWarning.

Standard library only; read where a module of commprof is asked for that is not there.
"""

from __future__ import annotations

import importlib
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

# By names below ``commprof``.
MOVED: Final = {
    "align.agreement": "align.ranks.agreement",
    "align.arrivals": "align.ranks.arrivals",
    "align.bounds": "align.sequences.bounds",
    "align.collectives": "align.ranks.collectives",
    "align.distinct": "align.sequences.group_ids",
    "align.edits": "align.sequences.edits",
    "align.group_orders": "align.ranks.group_orders",
    "align.own_times": "align.ranks.own_times",
    "align.reference_clock": "align.ranks.reference_clock",
    "align.row_groups": "align.sequences.row_groups",
    "align.sequences": "align.sequences.pairs",
    "align.splits": "align.ranks.splits",
    "cli.algorithms": "cli.sections.algorithms",
    "cli.align": "cli.verbs.align",
    "cli.analyse": "cli.verbs.analyse",
    "cli.calibrate": "cli.verbs.calibrate",
    "cli.check": "cli.verbs.check",
    "cli.compare": "cli.verbs.compare",
    "cli.dashboard": "cli.verbs.dashboard",
    "cli.diagnosis": "cli.sections.diagnosis",
    "cli.doctor": "cli.verbs.doctor",
    "cli.dump": "cli.verbs.dump",
    "cli.export": "cli.verbs.export",
    "cli.exposure": "cli.sections.exposure",
    "cli.finalising": "cli.verbs.finalising",
    "cli.importing": "cli.verbs.importing",
    "cli.inspected": "cli.sections.inspected",
    "cli.nccl": "cli.verbs.nccl",
    "cli.paper": "cli.verbs.paper",
    "cli.query": "cli.verbs.query",
    "cli.report": "cli.verbs.report",
    "cli.requested": "cli.verbs.requested",
    "cli.resources": "cli.sections.resources",
    "cli.run": "cli.verbs.run",
    "cli.sweep": "cli.verbs.sweep",
    "cli.untagged": "cli.sections.untagged",
    "cli.verify": "cli.verbs.verify",
    "launch.campaign": "launch.sweeps.campaign",
    "launch.configuration": "launch.sweeps.configuration",
    "launch.job_log": "launch.logs.job_log",
    "launch.nccl_files": "launch.logs.nccl_files",
    "launch.nccl_log": "launch.logs.nccl_log",
    "launch.sweep": "launch.sweeps.points",
    "ledger.activations": "ledger.requests.activations",
    "ledger.attribution": "ledger.reconcile.attribution",
    "ledger.backends": "ledger.records.backends",
    "ledger.crossings": "ledger.requests.stage_activations",
    "ledger.demand": "ledger.requests.demand",
    "ledger.evaluations": "ledger.requests.evaluations",
    "ledger.executed": "ledger.records.executed",
    "ledger.group_orders": "ledger.reconcile.group_orders",
    "ledger.issue": "ledger.records.issued",
    "ledger.log_lines": "ledger.records.log_lines",
    "ledger.lookup": "ledger.records.row_index",
    "ledger.messages": "ledger.reconcile.unmatched_messages",
    "ledger.module_orders": "ledger.requests.module_orders",
    "ledger.movement": "ledger.records.movement",
    "ledger.overflows": "ledger.requests.overflows",
    "ledger.rank_orders": "ledger.reconcile.rank_orders",
    "ledger.readings": "ledger.records.readings",
    "ledger.request": "ledger.requests.request",
    "ledger.rows": "ledger.reconcile.ledger_table",
    "ledger.sendings": "ledger.records.sendings",
    "ledger.sentences": "ledger.reconcile.sentences",
    "ledger.shared_models": "ledger.requests.shared_models",
    "ledger.splits": "ledger.reconcile.splits",
    "ledger.summed": "ledger.records.aggregated_steps",
    "ledger.survey": "ledger.records.precount",
    "ledger.training_records": "ledger.requests.training_records",
    "ledger.turns": "ledger.requests.engine_sequence",
    "ledger.wrapped_models": "ledger.requests.wrapped_models",
    "nccl.assembly": "nccl.state.log_state",
    "nccl.attribution": "nccl.state.tuning_attribution",
    "nccl.calls": "nccl.state.launches",
    "nccl.census": "nccl.tables.census",
    "nccl.choices": "nccl.state.tuning_choices",
    "nccl.chronicle": "nccl.state.communicator_lifecycle",
    "nccl.columns": "nccl.tables.arrow_columns",
    "nccl.communicators": "nccl.state.communicators",
    "nccl.heads": "nccl.grammar.line_prefix",
    "nccl.lexicon": "nccl.grammar.lexicon",
    "nccl.line_kinds": "nccl.grammar.line_kinds",
    "nccl.lines": "nccl.grammar.lines",
    "nccl.membership": "nccl.state.membership",
    "nccl.messages": "nccl.grammar.warnings",
    "nccl.operations": "nccl.tables.operations",
    "nccl.remarks": "nccl.tables.missing_evidence",
    "nccl.repeats": "nccl.tables.bincount",
    "nccl.rows": "nccl.tables.op_buffer",
    "nccl.spelling": "nccl.grammar.spelling",
    "nccl.topology": "nccl.grammar.topology",
    "nccl.topology_tables": "nccl.tables.topology_tables",
    "nccl.tuning": "nccl.grammar.tuning",
    "nccl.versions": "nccl.grammar.versions",
    "recorder.aggregation": "recorder.process.aggregation",
    "recorder.arguments": "recorder.process_group.arguments",
    "recorder.backend_groups": "recorder.process_group.backend_groups",
    "recorder.beneath": "recorder.coverage.unseen_traffic",
    "recorder.bounds": "recorder.process.bounds",
    "recorder.buckets": "recorder.training.buckets",
    "recorder.callsite": "recorder.process_group.callsite",
    "recorder.clock_exchange": "recorder.clocks.clock_exchange",
    "recorder.clock_meeting": "recorder.clocks.clock_meeting",
    "recorder.clock_offsets": "recorder.clocks.clock_offsets",
    "recorder.clocks": "recorder.clocks.process_clocks",
    "recorder.compiled_calls": "recorder.process_group.compiled_calls",
    "recorder.compiler": "recorder.dispatcher.compiler",
    "recorder.completion": "recorder.device.completion",
    "recorder.counters": "recorder.process.counters",
    "recorder.device_clock": "recorder.device.device_clock",
    "recorder.device_events": "recorder.device.device_events",
    "recorder.device_timeline": "recorder.device.device_timeline",
    "recorder.device_times": "recorder.device.device_times",
    "recorder.direct": "recorder.process_group.fast_path",
    "recorder.dispatch_hooks": "recorder.coverage.dispatch_hooks",
    "recorder.dispatcher": "recorder.dispatcher.registration",
    "recorder.flight": "recorder.coverage.flight_recorder",
    "recorder.frames": "recorder.process_group.reentrancy",
    "recorder.functional": "recorder.dispatcher.functional",
    "recorder.graphs": "recorder.dispatcher.cuda_graphs",
    "recorder.groups": "recorder.process_group.groups",
    "recorder.interception": "recorder.process_group.interception",
    "recorder.issuers": "recorder.dispatcher.issuers",
    "recorder.journal": "recorder.process.journal",
    "recorder.kernels": "recorder.dispatcher.kernels",
    "recorder.lifecycle": "recorder.process_group.lifecycle",
    "recorder.methods": "recorder.process_group.methods",
    "recorder.models": "recorder.training.models",
    "recorder.opening": "recorder.process.opening",
    "recorder.operator_calls": "recorder.dispatcher.operator_calls",
    "recorder.operators": "recorder.dispatcher.operators",
    "recorder.options": "recorder.process.options",
    "recorder.outside_steps": "recorder.training.outside_steps",
    "recorder.placement": "recorder.process.placement",
    "recorder.progress": "recorder.training.progress",
    "recorder.python_groups": "recorder.process_group.python_groups",
    "recorder.results": "recorder.process_group.pending_functional",
    "recorder.selfcheck": "recorder.coverage.selfcheck",
    "recorder.sequence": "recorder.coverage.sequence",
    "recorder.signatures": "recorder.process_group.signatures",
    "recorder.stacks": "recorder.process.stacks",
    "recorder.stalls": "recorder.training.stalls",
    "recorder.steps": "recorder.training.steps",
    "recorder.threads": "recorder.process.threads",
    "recorder.training_loop": "recorder.training.training_loop",
    "recorder.trial": "recorder.coverage.trial",
    "recorder.waits": "recorder.process_group.waits",
    "recorder.wrapped": "recorder.training.wrapped",
    "recorder.wrappers": "recorder.process_group.wrappers",
    "requested.axes": "requested.parallel.axes",
    "requested.buckets": "requested.zero.buckets",
    "requested.compressed_sums": "requested.communication.compressed_sums",
    "requested.compression": "requested.communication.compression",
    "requested.ddp": "requested.wrappers.ddp",
    "requested.fetch_configuration": "requested.zero.gather_configuration",
    "requested.fetching": "requested.zero.gathering",
    "requested.flat_stages": "requested.zero.flat_stages",
    "requested.fsdp": "requested.wrappers.fsdp",
    "requested.fully_shard": "requested.wrappers.fully_shard",
    "requested.gradients": "requested.zero.gradients",
    "requested.grid": "requested.parallel.grid",
    "requested.late_sums": "requested.communication.delayed_sums",
    "requested.measured_costs": "requested.communication.measured_costs",
    "requested.memory": "requested.memory.states",
    "requested.models": "requested.memory.models",
    "requested.modules": "requested.zero.modules",
    "requested.offload": "requested.memory.offload",
    "requested.partition": "requested.zero.partition",
    "requested.reductions": "requested.zero.reductions",
    "requested.shapes": "requested.parallel.activation_shapes",
    "requested.sharded": "requested.zero.sharded",
    "requested.shared_modules": "requested.parallel.shared_modules",
    "requested.sign_optimizers": "requested.communication.sign_optimizers",
    "requested.stage3": "requested.zero.stage3",
    "requested.stage_messages": "requested.parallel.stage_messages",
    "requested.tensor_parallel": "requested.parallel.tensor_parallel",
    "requested.torus": "requested.communication.torus",
    "requested.unpartitioned": "requested.zero.unpartitioned",
    "requested.wrapped": "requested.wrappers.arguments",
    "requested.zero": "requested.zero.stages",
    "requested.zero_redundancy": "requested.wrappers.zero_redundancy",
    "trace.aggregates": "trace.rank_files.aggregates",
    "trace.columns": "trace.rank_files.columns",
    "trace.course": "trace.rank_files.step_boundaries",
    "trace.decoder": "trace.rank_files.decoder",
    "trace.engines": "trace.rank_files.engines",
    "trace.events": "trace.rank_files.events",
    "trace.flight_entries": "trace.rank_files.flight_entries",
    "trace.issue_order": "trace.rank_files.issue_order",
    "trace.layout": "trace.rank_files.layout",
    "trace.records": "trace.rank_files.records",
    "trace.rows": "trace.rank_files.outside_rows",
    "trace.segments": "trace.rank_files.segments",
    "trace.splits": "trace.rank_files.splits",
    "trace.steps": "trace.rank_files.steps",
    "trace.writer": "trace.rank_files.writer",
}


class Loader:
    """Gives the module that a name of before stands for."""

    def __init__(self, target: str) -> None:
        self._module = importlib.import_module(target)
        self._spec = self._module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, not another one."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed; importlib has given it another spec meanwhile."""
        module.__spec__ = self._spec


def spec_of(name: str) -> ModuleSpec | None:
    """What imports the module that had ``name``, a full one; None where none had it."""
    target = MOVED.get(name.removeprefix("commprof."))
    if target is None:
        return None
    _warn(name, f"commprof.{target}")
    return ModuleSpec(name, Loader(f"commprof.{target}"))  # type: ignore[arg-type]  # it has what importlib calls


def attribute(room: str, name: str) -> Any:
    """Attribute ``name`` of the module whose name the package ``room`` has now.

    Raises:
        AttributeError: it has none.
    """
    target = f"commprof.{MOVED[room.removeprefix('commprof.')]}"
    module = importlib.import_module(target)
    if name.startswith("__") or not hasattr(module, name):
        raise AttributeError(f"module {room!r} has no attribute {name!r}")
    _warn(f"{room}.{name}", f"{target}.{name}")
    return getattr(module, name)


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=4
    )

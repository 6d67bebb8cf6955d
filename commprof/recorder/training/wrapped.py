"""Publishes the arguments of model wrappers (DistributedDataParallel, FSDP, tensor parallelism) and their passes.

``commprof.requested`` derives their traffic from that. A wrapper is published once, when it is created. Its passes are
written when a step runs other passes than the step before, so a steady training adds nothing to the trace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from commprof import hooks
from commprof.recorder.process.journal import Journal
from commprof.schema import PASSES_UNKNOWN, format_ranks

MOST_PASSES: Final = 4096  # of one step; what runs more is not followed
# Rows of passes in one process: inputs of other lengths in each step are separate passes.
_MOST_ROWS: Final = 100_000


class Wrapped:
    """One wrapped model, and the passes that it runs in the current step.

    Args:
        journal: where its passes are written.
        row: what was published of it.
        models: all wrapped models of this process.
    """

    def __init__(self, journal: Journal, row: Mapping[str, Any], models: WrappedModels) -> None:
        self.row = dict(row)
        self._models = models
        self._journal = journal
        self.has_units = False  # of a model that is sharded in units, the first, which has the passes of all
        self._step = hooks.position.step
        self._passes: list[str] = []
        self._ends = journal.step_ends  # of steps, when the last of the passes ran
        self._ended_at: int | None = None  # how many of the passes had run when the step ended
        self._written: tuple[int, str] = (self._step, "")  # the step from which on each runs these passes

    def ran(self, kind: str) -> None:
        """A pass: one of the letters of ``schema.PASSES``, or as the table ``wrapper_passes`` says it of units."""
        step = hooks.position.step
        if step != self._step:
            self._models.begin_step(step)
        if self._journal.step_ends != self._ends:
            self._ends, self._ended_at = self._journal.step_ends, len(self._passes)
        if len(self._passes) < MOST_PASSES:
            self._passes.append(kind)

    def begin_step(self, step: int) -> None:
        """A model of this process runs the first pass of ``step``."""
        if step != self._step:
            self._end_step(step)

    def ran_before(self, step: int, kind: str) -> None:
        """A pass that ran in ``step``, this one or one before it, before the model was published."""
        if step < self._step:
            self._say(step, self._written[1] * (self._written[0] == step) + kind)
        else:
            self._passes.append(kind)

    @property
    def number(self) -> int:
        """Of the wrapper within its process."""
        return int(self.row["number"])

    def set(self, parameters: Iterable[Sequence[Any]] | None = None, **arguments: Any) -> None:
        """The program changed how the model is wrapped: publish it anew, with these arguments and parameters as well."""
        known = json.loads(self.row["arguments"])
        self.row["arguments"] = json.dumps({**known, **arguments})
        if parameters is not None:
            self.row["parameters"] = _listed(parameters)
        self.publish()

    def publish(self) -> None:
        """Write what the wrapper was given."""
        moment = {"step": hooks.position.step, "time_ns": time.perf_counter_ns()}
        self._journal.write("wrappers", {**self.row, **moment})

    def finish(self) -> None:
        """Recording ends."""
        self._ended_at = None  # no step comes
        self._end_step(hooks.position.step + 1)

    def _end_step(self, step: int) -> None:
        """The passes of a step are complete; those after its end are of ``step``, the next one that runs any.

        Its records say the same: only an evaluation or a checkpoint between two steps keeps what is there out of both.
        """
        after: list[str] = []
        is_last_end = self._ended_at is not None and self._journal.step_ends == self._ends
        if is_last_end and not self._journal.ran_outside and step == self._step + 1:
            after = self._passes[self._ended_at :]
            del self._passes[self._ended_at :]
        passes = "".join(self._passes) if len(self._passes) < MOST_PASSES else PASSES_UNKNOWN
        self._say(self._step, passes)
        if step > self._step + 1:
            self._say(self._step + 1, "")
        self._step, self._passes = step, after
        self._ends, self._ended_at = self._journal.step_ends, None

    def _say(self, step: int, passes: str) -> None:
        if passes != self._written[1] and self._models.rows_left <= 0:
            passes = PASSES_UNKNOWN
        if passes != self._written[1]:
            self._models.rows_left -= 1
            self._written = step, passes
            row = {"number": self.row["number"], "step": step, "passes": passes}
            self._journal.write("wrapper_passes", row)


class WrappedModels:
    """All wrapped models of this process.

    Args:
        journal: where they are written.

    Attributes:
        rows_left: how many rows of passes may still be written. From the last of them on, the passes of a model that runs
            others than in the step before are not known.
    """

    def __init__(self, journal: Journal) -> None:
        self.rows_left = _MOST_ROWS
        self._journal = journal
        self._known: list[Wrapped] = []

    def add(
        self,
        kind: str,
        unit: str,
        group: Any,
        arguments: Mapping[str, Any],
        parameters: Iterable[Sequence[Any]],
        buffers: Iterable[tuple[str, torch.Tensor]] = (),
        replicas: Any = None,
    ) -> Wrapped:
        """Publish a wrapper that was just made.

        Args:
            kind: a word of ``schema.WRAPPERS``.
            unit: qualified name of the module that it wraps, within the model.
            group: process group over which it reduces or shards.
            arguments: that it was given, with their defaults; what JSON can hold.
            parameters: in its order: name and tensor; or name, shape, element type and whether it is trained.
            buffers: likewise.
            replicas: process group that holds the same shard, where there is one.
        """
        wrapped = Wrapped(
            self._journal,
            {
                "number": len(self._known),
                "wrapper": kind,
                "unit": unit,
                "group_ranks": _ranks(group),
                "replica_ranks": None if replicas is None else _ranks(replicas),
                "arguments": json.dumps(arguments),
                "parameters": _listed(parameters),
                "buffers": json.dumps([_described(*each) for each in buffers]),
            },
            self,
        )
        self._known.append(wrapped)
        wrapped.publish()
        return wrapped

    @property
    def step(self) -> int:
        """The step that records have now; -1 before the first."""
        return self._journal.step

    @property
    def next_number(self) -> int:
        """The number of the wrapper that is added next."""
        return len(self._known)

    def begin_step(self, step: int) -> None:
        """The first pass of ``step`` runs: what all models ran before is written, in case the process is killed in it."""
        for each in self._known:
            each.begin_step(step)

    @property
    def is_clipped(self) -> bool:
        """Whether it is known whose gradients the program clips: there is one sharded model alone."""
        return sum(each.has_units for each in self._known) == 1

    def clipped(self, count: int) -> None:
        """The program computes the norm of ``count`` gradients of the one sharded model."""
        for wrapped in self._known:
            if wrapped.has_units:
                wrapped.ran(f"N{count}")

    def finish(self) -> None:
        """Recording ends: write the passes of the last step."""
        for wrapped in self._known:
            wrapped.finish()


def _listed(parameters: Iterable[Sequence[Any]]) -> str:
    return json.dumps([each if len(each) == 4 else _described(*each) for each in parameters])


def _described(name: str, tensor: torch.Tensor) -> Sequence[Any]:
    """Name, shape, element type, and whether it is trained."""
    return name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad


def _ranks(group: Any) -> str:
    return format_ranks(dist.get_process_group_ranks(group))

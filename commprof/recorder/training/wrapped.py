"""Publishes the arguments of model wrappers (DistributedDataParallel, FSDP, tensor parallelism) and their passes.

``commprof.requested`` derives the traffic of the wrappers from these rows. A wrapper is published once, when it is
created. Its passes are written only when a step runs different passes than the previous step. A steady training
therefore adds nothing to the trace.
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

MOST_PASSES: Final = 4096  # passes of one step; if a step runs more, its passes are not known
# Rows of passes in one process. The limit matters if input lengths vary, because each length is a different pass.
_MOST_ROWS: Final = 100_000


class Wrapped:
    """One wrapped model, and the passes that it runs in the current step.

    Args:
        journal: The journal that receives the passes.
        row: The published row of the wrapper.
        models: All wrapped models of this process.
    """

    def __init__(self, journal: Journal, row: Mapping[str, Any], models: WrappedModels) -> None:
        self.row = dict(row)
        self._models = models
        self._journal = journal
        # True for the first unit of a model that is sharded in units. This unit has the passes of all units.
        self.has_units = False
        self._step = hooks.position.step
        self._passes: list[str] = []
        self._ends = journal.step_ends  # the value of ``journal.step_ends`` when the last pass ran
        self._ended_at: int | None = None  # the number of passes that had run when the step ended
        # The last written row: a step, and the passes that this step and all later steps run.
        self._written: tuple[int, str] = (self._step, "")

    def ran(self, kind: str) -> None:
        """Register a pass.

        Args:
            kind: One of the letters of ``schema.PASSES``, or for units a text in the form that the documentation of the
                table ``wrapper_passes`` describes.
        """
        step = hooks.position.step
        if step != self._step:
            self._models.begin_step(step)
        if self._journal.step_ends != self._ends:
            self._ends, self._ended_at = self._journal.step_ends, len(self._passes)
        if len(self._passes) < MOST_PASSES:
            self._passes.append(kind)

    def begin_step(self, step: int) -> None:
        """Handle that a model of this process runs the first pass of ``step``."""
        if step != self._step:
            self._end_step(step)

    def ran_before(self, step: int, kind: str) -> None:
        """Register a pass that ran in ``step`` (the current step or an earlier one) before the model was published."""
        if step < self._step:
            self._say(step, self._written[1] * (self._written[0] == step) + kind)
        else:
            self._passes.append(kind)

    @property
    def number(self) -> int:
        """The number of the wrapper within its process."""
        return int(self.row["number"])

    def set(self, parameters: Iterable[Sequence[Any]] | None = None, **arguments: Any) -> None:
        """Publish the wrapper again with changed arguments and parameters, after the program changed the wrapper."""
        known = json.loads(self.row["arguments"])
        self.row["arguments"] = json.dumps({**known, **arguments})
        if parameters is not None:
            self.row["parameters"] = _listed(parameters)
        self.publish()

    def publish(self) -> None:
        """Write the row of the wrapper with its arguments."""
        moment = {"step": hooks.position.step, "time_ns": time.perf_counter_ns()}
        self._journal.write("wrappers", {**self.row, **moment})

    def finish(self) -> None:
        """Write the passes of the last step when recording ends."""
        self._ended_at = None  # no further step begins
        self._end_step(hooks.position.step + 1)

    def _end_step(self, step: int) -> None:
        """Write the passes of the current step, and continue with ``step``, the next step that runs a pass.

        Passes after the end of the current step belong to ``step``, as do their records. This applies only if ``step``
        directly follows the current step, no further end was reported, and no evaluation or checkpoint has begun since
        the end. Otherwise all passes belong to the current step.
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
        journal: The journal that receives the rows.

    Attributes:
        rows_left: The number of rows of passes that may still be written. After the last row, the passes of a model are
            not known from the step on in which they change.
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
        """Publish a wrapper that was just constructed.

        Args:
            kind: A word of ``schema.WRAPPERS``.
            unit: The qualified name, within the model, of the module that is wrapped.
            group: The process group over which the wrapper reduces or shards.
            arguments: The arguments of the wrapper, including defaults. The values must be serializable as JSON.
            parameters: The parameters in the wrapper's order. Each entry is either a name and a tensor, or a name, a
                shape, an element type, and whether the parameter is trained.
            buffers: The buffers. Each entry is a name and a tensor.
            replicas: The process group whose ranks store the same shard; None if there is none.
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
        """The step of the current records; -1 before the first step."""
        return self._journal.step

    @property
    def next_number(self) -> int:
        """The number of the wrapper that is added next."""
        return len(self._known)

    def begin_step(self, step: int) -> None:
        """Write the earlier passes of all models at the first pass of ``step``, in case the process is killed later."""
        for each in self._known:
            each.begin_step(step)

    @property
    def is_clipped(self) -> bool:
        """Whether it is known which model's gradients the program clips, because there is only one sharded model."""
        return sum(each.has_units for each in self._known) == 1

    def clipped(self, count: int) -> None:
        """Register that the program computes the norm of ``count`` gradients of the only sharded model."""
        for wrapped in self._known:
            if wrapped.has_units:
                wrapped.ran(f"N{count}")

    def finish(self) -> None:
        """Write the passes of the last step when recording ends."""
        for wrapped in self._known:
            wrapped.finish()


def _listed(parameters: Iterable[Sequence[Any]]) -> str:
    return json.dumps([each if len(each) == 4 else _described(*each) for each in parameters])


def _described(name: str, tensor: torch.Tensor) -> Sequence[Any]:
    """Return the name, the shape, the element type, and whether the tensor is trained."""
    return name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad


def _ranks(group: Any) -> str:
    return format_ranks(dist.get_process_group_ranks(group))

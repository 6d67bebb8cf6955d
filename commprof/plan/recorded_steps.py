"""Read from a recorded run what a plan needs: the job, the compute time of ranks, and the overlapped fraction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from commprof.errors import UsageError

if TYPE_CHECKING:
    from commprof.trace.reader import Run

_UNION: Final = "all"  # the row of all purposes together
_LEAST: Final = 0.01  # a purpose overlaps only if its overlapped time exceeds this fraction of the step


class RecordedStep(NamedTuple):
    """The times of a step of a recorded run, as medians over its warm steps.

    Attributes:
        path: The path of the run.
        compute_ns: The time of a step without its exposed communication, in ns.
        least_hidden, most_hidden: The bounds of the fraction of the communication of :attr:`purposes` that
            overlapped computation. They differ if the completion times of some collectives are not known.
        purposes: The purposes whose communication may have overlapped.
    """

    path: Path
    compute_ns: int
    least_hidden: float
    most_hidden: float
    purposes: tuple[str, ...]

    @property
    def text(self) -> str:
        """A description of the run and its times, for reports."""
        if not self.purposes:
            return (
                f"{self.path}: {self.compute_ns / 1e6:.1f} ms of computation per step, with no overlapped "
                "communication"
            )
        part = f"{self.least_hidden:.0%}"
        if self.most_hidden > self.least_hidden:
            part += f" to {self.most_hidden:.0%}"
        return (
            f"{self.path}: {self.compute_ns / 1e6:.1f} ms of computation per step, which overlaps {part} of the "
            f"communication for {' and '.join(self.purposes)}"
        )


class RecordedJob(NamedTuple):
    """The job of a run, as texts for the options of ``commprof plan``. A text is empty if its value is not known.

    ``has_model`` says whether the run published its parameters. ``has_times`` says whether the exposed time of its
    steps is known, which :func:`recorded_step` needs. ``host_names`` has the names of the hosts, in order.
    """

    world: str
    hosts: str
    backend: str
    framework: str
    has_model: bool
    has_times: bool
    host_names: tuple[str, ...] = ()


def recorded_job(run: Run) -> RecordedJob:
    """Return the job of ``run``."""
    from commprof.analysis import api

    manifest = run.manifest
    world, hosts = manifest.world_size or run.health.ranks_expected or 1, len(manifest.hosts)
    backends = {str(name) for name in run.table("groups")["backend"].unique().to_pylist()}
    on_nccl = any("nccl" in name for name in backends)
    return RecordedJob(
        str(world),
        f"{hosts}x{world // hosts}" if hosts > 1 and world % hosts == 0 else "",
        "nccl" if on_nccl else "gloo" if any("gloo" in name for name in backends) else "",
        "deepspeed" if str(manifest.engine or "").lower().startswith("deepspeed") else "zero_runtime",
        run.table("parameters").num_rows > 0,
        api.has_exposed_times(run),
        tuple(map(str, manifest.hosts)),
    )


def recorded_step(run: Run) -> RecordedStep:
    """Return the compute time and the overlapped fraction of the steps of ``run``.

    Raises:
        UsageError: The run has no steps, or its exposed time is not known.
    """
    from commprof.analysis import api

    frame = api.exposure_per_step(run)
    rows: Sequence[Mapping[Any, Any]] = frame.astype(object).where(frame.notna(), None).to_dict("records")
    union = next((row for row in rows if row["purpose"] == _UNION), None)
    if union is None or union["exposed_ns"] is None or union["step_ns"] is None:
        raise UsageError(
            f"--recorded is {run.path}, but the exposed communication of a step is not known; give a run of several "
            "steps that was recorded with times"
        )
    others = [
        row
        for row in rows
        if row is not union
        and row["exposed_ns"] is not None
        and (row["overlapped_at_most_ns"] or 0) > _LEAST * union["step_ns"]
    ]
    exposed = sum(row["exposed_ns"] for row in others)
    least = sum(row["overlapped_ns"] or 0 for row in others)
    most = sum(row["overlapped_at_most_ns"] for row in others)
    return RecordedStep(
        run.path,
        int(union["step_ns"] - union["exposed_ns"]),
        least / (least + exposed) if least else 0.0,
        most / (most + exposed) if most else 0.0,
        tuple(str(row["purpose"]) for row in others),
    )

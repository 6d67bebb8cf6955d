"""Where the training is: steps, the resources at their boundaries, and the rows that a program publishes about itself."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from commprof import hooks
from commprof.recorder.clocks import read_clocks
from commprof.recorder.counters import StepReadings
from commprof.recorder.journal import Journal

_CLOCK_INTERVAL_NS: Final = 60_000_000_000
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Steps:
    """Writes a row at each step boundary, and finds the boundaries itself when the program does not name them.

    Without ``hooks.step`` a step ends when an optimizer has stepped; the first one begins at the first forward
    of a module in training mode. With several optimizers the cycle of the first iteration is learned: a step
    ends with the optimizer that stepped last before the first one stepped again.

    Args:
        check: run at each boundary before the new step begins.
    """

    def __init__(self, journal: Journal, check: Callable[[], None]) -> None:
        self.journal = journal
        self.cost_ns = 0
        self.readings: StepReadings | None = None  # of the host's counters, where this rank takes them
        self._check = check
        self._next_clock_ns = 0
        self._explicit = False
        self._automatic_call = False
        self._handles: list[Any] = []
        self._cycle = OptimizerCycle()
        self._begun = False

    def explicit(self) -> bool:
        """Whether the program names its steps itself."""
        return self._explicit

    def install(self) -> None:
        """Listen to optimizers and to the first forward."""
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._handles = [
            register_optimizer_step_post_hook(self._on_optimizer),
            register_module_forward_pre_hook(self._on_forward),
        ]

    def remove(self) -> None:
        """Stop listening."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def start(self) -> None:
        """The files are open: write down where the training is already."""
        self._write_clock(time.perf_counter_ns())
        if hooks.position.step >= 0:
            self.begin(hooks.position.step, hooks.position.micro_step)

    def begin(self, step: int, micro_step: int) -> None:
        """Step ``step`` begins, or a further micro step of it."""
        now = time.perf_counter_ns()
        if not self._automatic_call and not self._explicit:
            self._explicit = True
            self.remove()
        if micro_step == 0:
            self._check()
            if self.readings is not None:
                self.readings.begin(step)
        self.journal.move(step, micro_step)
        self.journal.write(
            "step",
            {
                "step": step,
                "micro_step": micro_step,
                "time_ns": now,
                "automatic": self._automatic_call,
                **_resources(),
            },
        )
        if now >= self._next_clock_ns:
            self._write_clock(now)
        self.cost_ns += time.perf_counter_ns() - now

    def finish(self) -> None:
        """Recording ends: the last step's resources and the clocks."""
        now = time.perf_counter_ns()
        if self.readings is not None:
            self.readings.finish()
        self.journal.write("step", {"step": None, "micro_step": 0, "time_ns": now, **_resources()})
        self._write_clock(now)

    def note_row(self, table: str, row: Mapping[str, Any]) -> None:
        """Write one published row, with the step and the time."""
        now = time.perf_counter_ns()
        content = dict(row)
        if table == "metrics":
            value = content.get("value")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                self.journal.refused_metrics += 1
                return
            content["value"] = float(value) if math.isfinite(value) else repr(float(value))
        content |= {
            "step": hooks.position.step,
            "micro_step": hooks.position.micro_step,
            "time_ns": now,
        }
        self.journal.write(table, content)
        self.cost_ns += time.perf_counter_ns() - now

    def _write_clock(self, now: int) -> None:
        self._next_clock_ns = now + _CLOCK_INTERVAL_NS
        self.journal.write("clock", read_clocks()._asdict())

    def _on_forward(self, module: torch.nn.Module, args: Any) -> None:
        if self._explicit or self._begun or not module.training or not torch.is_grad_enabled():
            return
        self._begun = True
        self._handles.pop().remove()
        self._begin_automatic(0)

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._explicit or not self._cycle.ends_with(id(optimizer)):
            return
        self._begin_automatic(hooks.position.step + 1)

    def _begin_automatic(self, step: int) -> None:
        try:
            self._automatic_call = True
            hooks.step(step)
        except Exception as error:
            self.journal.fault(error)
        finally:
            self._automatic_call = False


class OptimizerCycle:
    """Which optimizer's step ends an iteration, learned from the order in which they step."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._last: int | None = None
        self._previous: int | None = None

    def ends_with(self, optimizer: int) -> bool:
        """Whether the step that ``optimizer`` (its address) has just made ends an iteration."""
        if self._first is None:
            self._first = self._last = optimizer
        elif optimizer == self._first and self._previous is not None:
            self._last = self._previous
        self._previous = optimizer
        return optimizer == self._last


def _resources() -> dict[str, int | None]:
    """Resident memory, memory allocated on the device, and CPU time of the process, now."""
    rss = None
    try:
        # Four times as fast as a file object, and this is once a step.
        descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            rss = int(os.read(descriptor, 128).split()[1]) * _PAGE
        finally:
            os.close(descriptor)
    except (OSError, ValueError, IndexError):
        pass
    device = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else None
    return {"rss_bytes": rss, "device_bytes": device, "cpu_ns": time.process_time_ns()}

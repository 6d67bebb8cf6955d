"""Monitors: scalars of each step, written to files by rank 0 (``csv_monitor``, ``tensorboard``)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from zero_runtime.configuration.config_values import MonitorConfig
from zero_runtime.errors import ConfigError


class Event(NamedTuple):
    """One value.

    Attributes:
        name: as DeepSpeed names it, such as Train/Samples/lr.
        value: the value.
        samples: trained so far, over all ranks.
    """

    name: str
    value: float
    samples: int


class Monitor(Protocol):
    """A destination of events."""

    def write_events(self, events: Sequence[Event]) -> None:
        """Write ``events``; other programs can read them immediately."""


class CsvMonitor:
    """One CSV file for each quantity: a header, then samples and value in each line. Appends to existing files.

    Args:
        config: the destination.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self.log_dir = Path(config.output_path) / config.job_name
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"csv_monitor cannot write to {self.log_dir}: {error.strerror}") from None

    def write_events(self, events: Sequence[Event]) -> None:
        """Add one line for each event."""
        for event in events:
            path = self.log_dir / (event.name.replace("/", "_").replace(" ", "_") + ".csv")
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if file.tell() == 0:
                    writer.writerow(["step", event.name.rpartition("/")[2]])
                writer.writerow([event.samples, event.value])


class TensorBoardMonitor:
    """TensorBoard event files.

    Args:
        config: the destination.
    """

    def __init__(self, config: MonitorConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional package

        writer: Any = SummaryWriter
        self.summary_writer = writer(log_dir=str(Path(config.output_path) / config.job_name))

    def write_events(self, events: Sequence[Event]) -> None:
        """Add one point for each event."""
        for event in events:
            self.summary_writer.add_scalar(event.name, event.value, event.samples)
        self.summary_writer.flush()


def monitors(csv_monitor: MonitorConfig, tensorboard: MonitorConfig, rank: int) -> tuple[Monitor, ...]:
    """The monitors of this rank: none but on rank 0.

    Raises:
        ConfigError: on every rank, if a package is missing; on rank 0, if the directory cannot be written.
    """
    if tensorboard.enabled and find_spec("tensorboard") is None:
        raise ConfigError(
            "tensorboard.enabled is true, but the package tensorboard is not installed; install it (pip install "
            "tensorboard), or use csv_monitor"
        )
    if rank != 0:
        return ()
    writers: list[Monitor] = []
    if tensorboard.enabled:
        writers.append(TensorBoardMonitor(tensorboard))
    if csv_monitor.enabled:
        writers.append(CsvMonitor(csv_monitor))
    return tuple(writers)

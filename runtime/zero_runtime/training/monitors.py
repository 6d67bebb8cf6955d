"""Monitors, with which rank 0 writes scalars of each step to files (``csv_monitor``, ``tensorboard``)."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from zero_runtime.configuration.config_values import MonitorConfig
from zero_runtime.errors import ConfigError


class Event(NamedTuple):
    """One value of a scalar.

    Attributes:
        name: The name that DeepSpeed gives the scalar, such as Train/Samples/lr.
        value: The value.
        samples: The number of samples trained so far, over all ranks.
    """

    name: str
    value: float
    samples: int


class Monitor(Protocol):
    """A destination of events."""

    def write_events(self, events: Sequence[Event]) -> None:
        """Write ``events``; other programs can read them immediately."""


class CsvMonitor:
    """A monitor that writes one CSV file for each scalar. It appends to existing files.

    Each file has a header, and then one line per event with the number of samples and the value.

    Args:
        config: The directory and the name of the job.
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
    """A monitor that writes TensorBoard event files.

    Args:
        config: The directory and the name of the job.
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
    """Return the monitors of this rank. Only rank 0 has monitors.

    Raises:
        ConfigError: A package is missing (on every rank), or the directory cannot be written (on rank 0).
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

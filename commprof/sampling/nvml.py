"""Samples of the GPUs of this host by NVML: utilisation, and bytes moved over PCIe and NVLink.

Utilisation, memory, power and others become samples. Byte counters become readings of the ``wire`` table (kinds ``pcie`` and
``nvlink``), like those of network interfaces: analysis takes differences of both. Each counter is accumulated from its
differences since the first reading, so a counter that restarts does not decrease.

Counters are read as field values: one call returns many, each with its own code and type. If a GPU lacks one, its code says
so, and it is left out.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from commprof.errors import CommprofError
from commprof.sampling.samples import Sample

NVML: Final = "nvml"
_READINGS_DIRECTORY: Final = "wire"  # the finaliser puts files of this name into the table of that name

# Field ids (nvml.h, NVML_FI_DEV_*) and their units.
PCIE_SENT, PCIE_RECEIVED = 197, 198  # PCIE_COUNT_TX_BYTES, PCIE_COUNT_RX_BYTES: bytes
NVLINK_SENT, NVLINK_RECEIVED = 138, 139  # NVLINK_THROUGHPUT_DATA_TX, _RX: KiB of payload
NVLINK_LINK_SENT, NVLINK_LINK_RECEIVED = 202, 204  # NVLINK_COUNT_XMIT_BYTES, _RCV_BYTES: bytes of one link
ALL_LINKS: Final = 0xFFFFFFFF  # the scope that stands for the sum over all links
MOST_LINKS: Final = 18

_SUCCESS: Final = 0
# By valueType (nvmlValueType_t), the member of the union that holds the value. A counter is whole and not negative.
_MEMBERS: Final = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


class Field(NamedTuple):
    """One field to be read; ``scope`` picks the link."""

    number: int
    scope: int = 0


class NvmlError(CommprofError):
    """NVML cannot be used here."""


class Nvml(Protocol):
    """The part of NVML that is used. Methods except ``open`` may raise any exception; such a value is left out."""

    def open(self) -> int:
        """Start NVML; returns the number of GPUs.

        Raises:
            NvmlError: there is no library, no driver, or no GPU.
        """

    def close(self) -> None:
        """Shut NVML down."""

    def utilisation(self, gpu: int) -> tuple[float, float]:
        """Percent of the time in which a kernel ran, and in which memory was read or written."""

    def memory(self, gpu: int) -> tuple[int, int]:
        """Bytes used, and bytes in all."""

    def power(self, gpu: int) -> float:
        """Watts."""

    def temperature(self, gpu: int) -> float:
        """Degrees Celsius."""

    def sm_clock(self, gpu: int) -> float:
        """MHz."""

    def fields(self, gpu: int, fields: Sequence[Field]) -> Sequence[Any]:
        """For each field an object with ``nvmlReturn``, ``valueType`` and ``value``, a union by that type."""


class DriverNvml:
    """NVML through the package nvidia-ml-py."""

    def open(self) -> int:
        """Load the library and count the GPUs."""
        try:
            import pynvml
        except ImportError:
            raise NvmlError("nvidia-ml-py is not installed (pip install 'commprof[sampling]')") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        except Exception as error:  # any error of the driver's library
            raise NvmlError(f"NVML says: {error}") from None
        if not self._handles:
            raise NvmlError("NVML sees no GPU")
        return len(self._handles)

    def close(self) -> None:
        """Shut the library down."""
        try:
            self._nvml.nvmlShutdown()
        except Exception:
            pass  # it goes with the process

    def utilisation(self, gpu: int) -> tuple[float, float]:
        """nvmlDeviceGetUtilizationRates."""
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handles[gpu])
        return float(rates.gpu), float(rates.memory)

    def memory(self, gpu: int) -> tuple[int, int]:
        """nvmlDeviceGetMemoryInfo."""
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handles[gpu])
        return int(memory.used), int(memory.total)

    def power(self, gpu: int) -> float:
        """nvmlDeviceGetPowerUsage, which counts milliwatts."""
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handles[gpu])) / 1000

    def temperature(self, gpu: int) -> float:
        """nvmlDeviceGetTemperature of the GPU itself."""
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        return float(self._nvml.nvmlDeviceGetTemperature(self._handles[gpu], sensor))

    def sm_clock(self, gpu: int) -> float:
        """nvmlDeviceGetClockInfo of the multiprocessors."""
        return float(self._nvml.nvmlDeviceGetClockInfo(self._handles[gpu], self._nvml.NVML_CLOCK_SM))

    def fields(self, gpu: int, fields: Sequence[Field]) -> Sequence[Any]:
        """nvmlDeviceGetFieldValues."""
        return list(
            self._nvml.nvmlDeviceGetFieldValues(self._handles[gpu], [tuple(field) for field in fields])
        )


def counter_value(value: Any) -> int | None:
    """The number in one field value; None if the GPU lacks it, or it is no integer of 0 or more.

    Args:
        value: with ``nvmlReturn``, ``valueType`` and ``value``.
    """
    member = _MEMBERS.get(value.valueType)
    if value.nvmlReturn != _SUCCESS or member is None:
        return None
    number = int(getattr(value.value, member))
    return number if number >= 0 else None


class _Counter:
    """A pair of counters of one device, accumulated across restarts."""

    def __init__(
        self, kind: str, device: str, fields: Sequence[tuple[Field, Field]], unit_bytes: int
    ) -> None:
        self.kind = kind
        self.device = device
        self.fields = fields  # pairs: sent, received
        self._unit_bytes = unit_bytes
        self._before: dict[Field, int] = {}
        self._moved = [0, 0]

    def take(self, values: dict[Field, int]) -> tuple[int, int] | None:
        """Bytes sent and received since the first reading; None if a value is missing."""
        wanted = [field for pair in self.fields for field in pair]
        if any(field not in values for field in wanted):
            return None
        for pair in self.fields:
            for direction, field in enumerate(pair):
                now, before = values[field], self._before.get(field)
                if before is not None:
                    # A counter that decreased has restarted: its value was moved since.
                    self._moved[direction] += now - before if now >= before else now
                self._before[field] = now
        return self._moved[0] * self._unit_bytes, self._moved[1] * self._unit_bytes


class NvmlSampler:
    """Samples of all GPUs of this host; their counters of bytes go to the ``wire`` table's readings.

    Args:
        run: the run directory.
        nvml: the interface to NVML.

    Raises:
        NvmlError: there is no GPU to sample.
    """

    def __init__(
        self, run: Path, nvml: Nvml | None = None, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._nvml = nvml or DriverNvml()
        self._clock = clock
        self._host = socket.gethostname()
        self._directory = run / _READINGS_DIRECTORY
        self._gpus = self._nvml.open()
        self._counters = {gpu: self._find_counters(gpu) for gpu in range(self._gpus)}

    def describe(self) -> str:
        """The GPUs and counters in one line."""
        kinds = sorted({counter.kind for counters in self._counters.values() for counter in counters})
        gpus = f"{self._gpus} GPU{'s' if self._gpus > 1 else ''}"
        return f"NVML: {gpus}, byte counters: {', '.join(kinds) or 'none'}"

    def read(self) -> list[Sample]:
        """The current samples of each GPU; also appends the counters to the readings."""
        samples, rows = [], []
        for gpu, counters in self._counters.items():
            now = self._clock()
            samples += [Sample(NVML, f"GPU {gpu}", name, value, now) for name, value in self._gauges(gpu)]
            values = self._values(gpu, [field for c in counters for pair in c.fields for field in pair])
            for counter in counters:
                moved = counter.take(values)
                if moved is not None:
                    rows.append(self._row(counter, now, *moved))
        self._write(rows)
        return samples

    def close(self) -> None:
        """Shut NVML down."""
        self._nvml.close()

    def _gauges(self, gpu: int) -> list[tuple[str, float]]:
        nvml = self._nvml
        readers: list[tuple[tuple[str, ...], Callable[[int], Any]]] = [
            (("gpu_utilization_percent", "memory_utilization_percent"), nvml.utilisation),
            (("memory_used_bytes", "memory_total_bytes"), nvml.memory),
            (("power_watts",), nvml.power),
            (("temperature_celsius",), nvml.temperature),
            (("sm_clock_mhz",), nvml.sm_clock),
        ]
        gauges: list[tuple[str, float]] = []
        for names, read in readers:
            try:
                values = read(gpu)
            except Exception:
                continue  # this GPU, or this driver, does not have it
            values = values if isinstance(values, tuple) else (values,)
            gauges += [(name, float(value)) for name, value in zip(names, values, strict=True)]
        return gauges

    def _find_counters(self, gpu: int) -> list[_Counter]:
        """The counters that GPU ``gpu`` has: PCIe, and NVLink in total or, without a sum, by link."""
        device = f"GPU {gpu}"
        pcie = (Field(PCIE_SENT), Field(PCIE_RECEIVED))
        totals = (Field(NVLINK_SENT, ALL_LINKS), Field(NVLINK_RECEIVED, ALL_LINKS))
        links = [(Field(NVLINK_LINK_SENT, n), Field(NVLINK_LINK_RECEIVED, n)) for n in range(MOST_LINKS)]
        present = self._values(gpu, [field for pair in (pcie, totals, *links) for field in pair])
        counters = []
        if all(field in present for field in pcie):
            counters.append(_Counter("pcie", device, [pcie], 1))
        live = [pair for pair in links if all(field in present for field in pair)]
        if all(field in present for field in totals):
            counters.append(_Counter("nvlink", device, [totals], 1024))
        elif live:
            counters.append(_Counter("nvlink", device, live, 1))
        return counters

    def _values(self, gpu: int, fields: Sequence[Field]) -> dict[Field, int]:
        """The values of ``fields`` that the GPU has."""
        if not fields:
            return {}
        try:
            values = self._nvml.fields(gpu, fields)
        except Exception:
            return {}
        numbers = {field: counter_value(value) for field, value in zip(fields, values, strict=False)}
        return {field: number for field, number in numbers.items() if number is not None}

    def _row(self, counter: _Counter, now: int, sent: int, received: int) -> dict[str, Any]:
        return {
            "host": self._host,
            "device": counter.device,
            "kind": counter.kind,
            "time_ns": now,
            "sent_bytes": sent,
            "received_bytes": received,
        }

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        if not rows:
            return
        self._directory.mkdir(exist_ok=True)
        file = self._directory / f"{self._host.replace('/', '_')}-gpu.jsonl"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, "".join(json.dumps(row) + "\n" for row in rows).encode())
        finally:
            os.close(descriptor)

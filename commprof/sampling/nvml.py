"""Samples the GPUs of this host with NVML: utilization, and bytes moved over PCIe and NVLink.

Utilization, memory, power, temperature and clock become samples. Byte counters become rows of the ``wire`` table
(kinds ``pcie`` and ``nvlink``), like the counters of network interfaces. The analysis takes differences of both. Each
counter is accumulated from its differences since the first reading. So a reading does not decrease when a counter
restarts.

Counters are read as NVML field values. One call returns many field values, each with its own return code and type. If a
GPU lacks a counter, the return code shows this, and the counter is left out.
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
_READINGS_DIRECTORY: Final = "wire"  # the finalizer reads the table ``wire`` from the files in this directory

# Field ids (nvml.h, NVML_FI_DEV_*) and their units.
PCIE_SENT, PCIE_RECEIVED = 197, 198  # PCIE_COUNT_TX_BYTES, PCIE_COUNT_RX_BYTES: bytes
NVLINK_SENT, NVLINK_RECEIVED = 138, 139  # NVLINK_THROUGHPUT_DATA_TX, _RX: KiB of payload
NVLINK_LINK_SENT, NVLINK_LINK_RECEIVED = 202, 204  # NVLINK_COUNT_XMIT_BYTES, _RCV_BYTES: bytes of one link
ALL_LINKS: Final = 0xFFFFFFFF  # the scope that requests the sum over all links
MOST_LINKS: Final = 18

_SUCCESS: Final = 0
# The union member that contains the value, by valueType (nvmlValueType_t). Counters are integers, so types of
# floating-point numbers are absent.
_MEMBERS: Final = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


class Field(NamedTuple):
    """One NVML field to read; ``scope`` selects the link."""

    number: int
    scope: int = 0


class NvmlError(CommprofError):
    """NVML cannot be used here."""


class Nvml(Protocol):
    """The functions of NVML that the sampler uses.

    All methods except ``open`` may raise any exception. The sampler then leaves the value out.
    """

    def open(self) -> int:
        """Start NVML and return the number of GPUs.

        Raises:
            NvmlError: there is no library, no driver, or no GPU.
        """

    def close(self) -> None:
        """Shut NVML down."""

    def utilisation(self, gpu: int) -> tuple[float, float]:
        """Return two percentages of the time: in which a kernel ran, and in which memory was read or written."""

    def memory(self, gpu: int) -> tuple[int, int]:
        """Return the used memory and the total memory of a GPU, in bytes."""

    def power(self, gpu: int) -> float:
        """Return the power in watts."""

    def temperature(self, gpu: int) -> float:
        """Return the temperature in degrees Celsius."""

    def sm_clock(self, gpu: int) -> float:
        """Return the clock frequency of the multiprocessors in MHz."""

    def fields(self, gpu: int, fields: Sequence[Field]) -> Sequence[Any]:
        """Return an object with ``nvmlReturn``, ``valueType`` and ``value`` for each field.

        ``value`` is a union, and ``valueType`` selects its member.
        """


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
            pass  # the library is unloaded when the process exits

    def utilisation(self, gpu: int) -> tuple[float, float]:
        """Return the values of nvmlDeviceGetUtilizationRates."""
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handles[gpu])
        return float(rates.gpu), float(rates.memory)

    def memory(self, gpu: int) -> tuple[int, int]:
        """Return the values of nvmlDeviceGetMemoryInfo."""
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handles[gpu])
        return int(memory.used), int(memory.total)

    def power(self, gpu: int) -> float:
        """Return the value of nvmlDeviceGetPowerUsage, converted from milliwatts to watts."""
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handles[gpu])) / 1000

    def temperature(self, gpu: int) -> float:
        """Return the value of nvmlDeviceGetTemperature for the sensor of the GPU."""
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        return float(self._nvml.nvmlDeviceGetTemperature(self._handles[gpu], sensor))

    def sm_clock(self, gpu: int) -> float:
        """Return the value of nvmlDeviceGetClockInfo for the multiprocessors."""
        return float(self._nvml.nvmlDeviceGetClockInfo(self._handles[gpu], self._nvml.NVML_CLOCK_SM))

    def fields(self, gpu: int, fields: Sequence[Field]) -> Sequence[Any]:
        """Return the values of nvmlDeviceGetFieldValues."""
        return list(
            self._nvml.nvmlDeviceGetFieldValues(self._handles[gpu], [tuple(field) for field in fields])
        )


def counter_value(value: Any) -> int | None:
    """Return the number in one field value; None if the GPU lacks the field or the number is not an integer >= 0.

    Args:
        value: An object with ``nvmlReturn``, ``valueType`` and ``value``.
    """
    member = _MEMBERS.get(value.valueType)
    if value.nvmlReturn != _SUCCESS or member is None:
        return None
    number = int(getattr(value.value, member))
    return number if number >= 0 else None


class _Counter:
    """The sent and received bytes of one device, accumulated across restarts of its counters."""

    def __init__(
        self, kind: str, device: str, fields: Sequence[tuple[Field, Field]], unit_bytes: int
    ) -> None:
        self.kind = kind
        self.device = device
        self.fields = fields  # pairs of a field for sent bytes and a field for received bytes
        self._unit_bytes = unit_bytes
        self._before: dict[Field, int] = {}
        self._moved = [0, 0]

    def take(self, values: dict[Field, int]) -> tuple[int, int] | None:
        """Return the bytes sent and received since the first reading, or None if ``values`` lacks a field."""
        wanted = [field for pair in self.fields for field in pair]
        if any(field not in values for field in wanted):
            return None
        for pair in self.fields:
            for direction, field in enumerate(pair):
                now, before = values[field], self._before.get(field)
                if before is not None:
                    # A counter that decreased has restarted at 0, so its value is the bytes moved since the restart.
                    self._moved[direction] += now - before if now >= before else now
                self._before[field] = now
        return self._moved[0] * self._unit_bytes, self._moved[1] * self._unit_bytes


class NvmlSampler:
    """Samples all GPUs of this host, and appends their byte counters to the readings for the ``wire`` table.

    Args:
        run: The run directory.
        nvml: The interface to NVML. Default: the package nvidia-ml-py.
        clock: The function that returns the time of a reading in ns.

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
        """Return one line about the GPUs and their byte counters."""
        kinds = sorted({counter.kind for counters in self._counters.values() for counter in counters})
        gpus = f"{self._gpus} GPU{'s' if self._gpus > 1 else ''}"
        return f"NVML: {gpus}, byte counters: {', '.join(kinds) or 'none'}"

    def read(self) -> list[Sample]:
        """Return the current samples of each GPU, and append the byte counters to the readings."""
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
                continue  # this GPU or this driver does not support the value
            values = values if isinstance(values, tuple) else (values,)
            gauges += [(name, float(value)) for name, value in zip(names, values, strict=True)]
        return gauges

    def _find_counters(self, gpu: int) -> list[_Counter]:
        """Return the byte counters of GPU ``gpu``: PCIe, and NVLink in total.

        If the GPU has no total for NVLink, the counter adds up the counters of the links.
        """
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
        """Return the values of those ``fields`` that the GPU supports."""
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

"""Test counters and gauges of GPUs with a fake driver, so that no GPU is needed."""

import json
import sys
from types import SimpleNamespace

import pytest

from commprof.sampling import nvml
from commprof.sampling.nvml import ALL_LINKS, DriverNvml, Field, NvmlError, NvmlSampler, counter_value
from commprof.trace.wire import read_readings, reading_files

UNSIGNED_LONG_LONG, DOUBLE, SIGNED = 3, 0, 4
NOT_SUPPORTED = 3


def field_value(number, kind=UNSIGNED_LONG_LONG, code=0):
    members = {
        "ullVal": 111,
        "ulVal": 222,
        "uiVal": 333,
        "sllVal": 444,
        "siVal": 555,
        "usVal": 666,
        "dVal": 777.0,
    }
    members[{0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}[kind]] = (
        number
    )
    return SimpleNamespace(nvmlReturn=code, valueType=kind, value=SimpleNamespace(**members))


class FakeNvml:
    """A driver with ``gpus`` GPUs that have the counters in ``values``."""

    def __init__(self, values, gpus=1, broken=()):
        self.values, self.gpus, self.broken, self.closed = values, gpus, broken, False

    def open(self):
        return self.gpus

    def close(self):
        self.closed = True

    def _say(self, name, value):
        if name in self.broken:
            raise RuntimeError("Not Supported")
        return value

    def utilisation(self, gpu):
        return self._say("utilisation", (70.0, 30.0))

    def memory(self, gpu):
        return self._say("memory", (5 << 30, 80 << 30))

    def power(self, gpu):
        return self._say("power", 310.5)

    def temperature(self, gpu):
        return self._say("temperature", 55.0)

    def sm_clock(self, gpu):
        return self._say("sm_clock", 1980.0)

    def fields(self, gpu, fields):
        self._say("fields", None)
        return [
            self.values.get((gpu, *field), self.values.get(tuple(field), field_value(0, code=NOT_SUPPORTED)))
            for field in fields
        ]


def moved(run):
    table = read_readings(reading_files(run)).to_pylist()
    return [(row["device"], row["kind"], row["sent_bytes"], row["received_bytes"]) for row in table]


PCIE = {(197, 0): field_value(1000), (198, 0): field_value(9000)}
NVLINK = {(138, ALL_LINKS): field_value(10), (139, ALL_LINKS): field_value(20)}


def test_gauges_carry_their_units_in_their_names(tmp_path):
    samples = NvmlSampler(tmp_path, FakeNvml({}), clock=lambda: 5).read()
    assert {(s.source, s.device, s.name, s.value, s.time_ns) for s in samples} == {
        ("nvml", "GPU 0", "gpu_utilization_percent", 70.0, 5),
        ("nvml", "GPU 0", "memory_utilization_percent", 30.0, 5),
        ("nvml", "GPU 0", "memory_used_bytes", float(5 << 30), 5),
        ("nvml", "GPU 0", "memory_total_bytes", float(80 << 30), 5),
        ("nvml", "GPU 0", "power_watts", 310.5, 5),
        ("nvml", "GPU 0", "temperature_celsius", 55.0, 5),
        ("nvml", "GPU 0", "sm_clock_mhz", 1980.0, 5),
    }


def test_what_a_gpu_does_not_have_is_left_out(tmp_path):
    driver = FakeNvml(PCIE, broken=("power", "temperature"))
    names = {sample.name for sample in NvmlSampler(tmp_path, driver).read()}
    assert "power_watts" not in names and "temperature_celsius" not in names and "sm_clock_mhz" in names


def test_byte_counters_are_differences_since_the_first_reading(tmp_path):
    driver = FakeNvml({**PCIE, **NVLINK})
    sampler = NvmlSampler(tmp_path, driver)
    assert sampler.describe() == "NVML: 1 GPU, byte counters: nvlink, pcie"
    sampler.read()
    driver.values = {
        (197, 0): field_value(1500),
        (198, 0): field_value(9070),
        (138, ALL_LINKS): field_value(13),
        (139, ALL_LINKS): field_value(20),
    }
    sampler.read()
    assert moved(tmp_path) == [
        ("GPU 0", "pcie", 0, 0),
        ("GPU 0", "nvlink", 0, 0),
        ("GPU 0", "pcie", 500, 70),
        ("GPU 0", "nvlink", 3 * 1024, 0),  # These fields are in KiB.
    ]


def test_a_counter_that_begins_anew_does_not_go_back(tmp_path):
    driver = FakeNvml(PCIE)
    sampler = NvmlSampler(tmp_path, driver)
    for sent in (1000, 1800, 30, 100):
        driver.values = {(197, 0): field_value(sent), (198, 0): field_value(9000)}
        sampler.read()
    assert [row[2] for row in moved(tmp_path)] == [0, 800, 830, 900]


def test_links_are_added_up_where_the_gpu_has_no_sum(tmp_path):
    links = {
        (202, 0): field_value(5),
        (204, 0): field_value(6),
        (202, 3): field_value(50),
        (204, 3): field_value(60),
    }
    driver = FakeNvml(links)
    sampler = NvmlSampler(tmp_path, driver)
    sampler.read()
    driver.values = {key: field_value(value.value.ullVal * 2) for key, value in links.items()}
    sampler.read()
    assert moved(tmp_path)[-1] == ("GPU 0", "nvlink", 55, 66)


def test_each_gpu_has_counters_of_its_own(tmp_path):
    values = {(0, 197, 0): field_value(1), (0, 198, 0): field_value(1), (1, 197, 0): field_value(7)}
    driver = FakeNvml(values, gpus=2)
    sampler = NvmlSampler(tmp_path, driver)
    sampler.read()
    assert [row[0] for row in moved(tmp_path)] == ["GPU 0"]  # Half of the pair of the other GPU is missing.


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (field_value(7), 7),
        (field_value(7, kind=1), 7),
        (field_value(7, kind=2), 7),
        (field_value(7, kind=6), 7),
        (field_value(-1, kind=SIGNED), None),  # The value is not a counter.
        (field_value(7.5, kind=DOUBLE), None),
        (field_value(7, code=NOT_SUPPORTED), None),
        (SimpleNamespace(nvmlReturn=0, valueType=99, value=SimpleNamespace()), None),
    ],
)
def test_code_and_type_of_each_value_are_looked_at(value, expected):
    assert counter_value(value) == expected


def test_a_reading_that_fails_moves_nothing(tmp_path):
    driver = FakeNvml(PCIE)
    sampler = NvmlSampler(tmp_path, driver)
    driver.broken = ("fields",)
    assert sampler.read() and moved(tmp_path) == []
    sampler.close()
    assert driver.closed


def test_without_library_driver_or_gpu_there_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(
        NvmlError, match=r"nvidia-ml-py is not installed \(pip install 'commprof\[sampling\]'\)"
    ):
        NvmlSampler(tmp_path)
    module = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 0, nvmlDeviceGetHandleByIndex=None
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(NvmlError, match="NVML sees no GPU"):
        NvmlSampler(tmp_path)

    def refuse():
        raise OSError("NVML Shared Library Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=refuse))
    with pytest.raises(NvmlError, match="NVML says: NVML Shared Library Not Found"):
        NvmlSampler(tmp_path)


def test_the_driver_is_asked_by_the_names_that_nvidia_gives(tmp_path, monkeypatch):
    """The library of the installed package is replaced.

    Every function that is called must exist, and fields are passed as pairs.
    """
    pynvml = pytest.importorskip("pynvml")
    asked = []
    replies = {
        "nvmlInit": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=12, memory=3),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=100, total=1000),
        "nvmlDeviceGetPowerUsage": 250_000,
        "nvmlDeviceGetTemperature": 40,
        "nvmlDeviceGetClockInfo": 1500,
        "nvmlShutdown": None,
    }
    for name, reply in replies.items():
        assert callable(getattr(pynvml, name))
        monkeypatch.setattr(pynvml, name, lambda *args, reply=reply: reply)
    real = pynvml.nvmlDeviceGetFieldValues

    def field_values(handle, fields):
        asked.append((handle, list(fields)))
        # The package fills its structures in its own way, without the library.
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda name: lambda *args: 0)
        values = real(handle, fields)
        for value in values:
            value.nvmlReturn, value.valueType, value.value.ullVal = (
                0,
                pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
                4096,
            )
        return values

    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", field_values)
    sampler = NvmlSampler(tmp_path, DriverNvml())
    values = {sample.name: sample.value for sample in sampler.read()}
    assert values["power_watts"] == 250.0 and values["gpu_utilization_percent"] == 12.0
    assert asked[0][0] == "handle" and (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0) in asked[0][1]
    assert (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS) in asked[0][1]
    assert {(row["kind"], row["device"]) for row in rows_of(tmp_path)} == {
        ("pcie", "GPU 0"),
        ("nvlink", "GPU 0"),
    }
    sampler.close()


def rows_of(run):
    return [json.loads(line) for file in reading_files(run) for line in file.read_text().splitlines()]


def test_the_field_ids_are_nvidias():
    pynvml = pytest.importorskip("pynvml")
    assert (nvml.PCIE_SENT, nvml.PCIE_RECEIVED) == (
        pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,
        pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
    )
    assert (nvml.NVLINK_SENT, nvml.NVLINK_RECEIVED) == (
        pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    )
    assert (nvml.NVLINK_LINK_SENT, nvml.NVLINK_LINK_RECEIVED) == (
        pynvml.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES,
        pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES,
    )
    assert Field(nvml.PCIE_SENT) == (197, 0)

"""Test the file of a calibration.

A written file can be read again. A damaged, foreign or newer file is refused with one sentence.
"""

from __future__ import annotations

import json
import random

import pytest

from commprof.calibration.calibration_plan import OPS, Plan, parse_ops, parse_sizes
from commprof.calibration.file import check_target, read_calibration, to_json, write_calibration
from commprof.calibration.results import Calibration, Timing
from commprof.errors import CommprofError, SchemaError, TraceError, UsageError


def calibration(world_size: int = 4, **changes) -> Calibration:
    """Return a calibration with fixed latencies and bandwidths.

    An all_reduce takes 100 us and 1 GB/s, and a send_recv 50 us and 2 GB/s. A broadcast is measured at two
    sizes only.
    """
    sizes = [2**n for n in range(10, 25, 2)]

    def timings(alpha: int, ns_per_byte: float, of=sizes):
        times = [round(alpha + ns_per_byte * size) for size in of]
        return tuple(Timing(size, t, t - 10, t + 10, 20) for size, t in zip(of, times, strict=True))

    values = {
        "created": "2026-01-02T03:04:05+00:00",
        "torch": "2.13.0",
        "backend": "gloo",
        "backend_version": None,
        "device": "cpu",
        "dtype": "float32",
        "world_size": world_size,
        "hosts": ("host-a",),
        "machine": {"system": "Linux", "machine": "x86_64", "cpus": 2, "accelerator": None},
        "environment": {"OMP_NUM_THREADS": "1"},
        "warmup": 3,
        "timings": {
            "all_reduce": timings(100_000, 1.0),
            "send_recv": timings(50_000, 0.5),
            "broadcast": timings(50_000, 0.5, sizes[:2]),
        },
        "skipped": {"all_to_all": "not there"},
    }
    return Calibration(**{**values, **changes})


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "calibration.json"
    write_calibration(path, calibration())
    assert read_calibration(path) == calibration()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_file_states_times_bandwidths_and_the_fit(tmp_path):
    content = json.loads(to_json(calibration()))
    assert (content["format"], content["schema_version"]) == ("commprof-calibration", 1)
    op = content["ops"]["all_reduce"]
    assert op["bus_factor"] == 1.5
    largest = op["sizes"][-1]
    assert largest["time_ns"] == 100_000 + 2**24
    assert largest["algbw_bytes_per_s"] == round(2**24 / (100_000 + 2**24) * 1e9)
    assert largest["busbw_bytes_per_s"] == pytest.approx(1.5 * largest["algbw_bytes_per_s"], rel=1e-6)
    fit = op["fit"]
    assert fit["alpha_ns"] == pytest.approx(100_000, rel=1e-3)
    assert fit["beta_bytes_per_s"] == pytest.approx(1e9, rel=1e-3)
    assert fit["alpha_low_ns"] <= fit["alpha_ns"] <= fit["alpha_high_ns"]
    assert fit["beta_low_bytes_per_s"] <= fit["beta_bytes_per_s"] <= fit["beta_high_bytes_per_s"]
    assert content["ops"]["broadcast"]["fit"] is None, "two sizes say no latency and bandwidth"
    assert content["skipped"] == {"all_to_all": "not there"}


def test_a_group_of_another_size_is_held_to_the_same_bus_bandwidth():
    ceilings = calibration(world_size=4).ceilings()
    assert ceilings.predict("all_reduce", 10**6, 4).time_ns == pytest.approx(1_100_000, rel=1e-3)
    # With 2 ranks the factor is 1 instead of 1.5, so two thirds of the bytes pass each link.
    assert ceilings.predict("all_reduce", 10**6, 2).time_ns == pytest.approx(100_000 + 2e6 / 3, rel=1e-3)
    assert ceilings.predict("recv", 10**6, 4).time_ns == pytest.approx(550_000, rel=1e-3)
    assert ceilings.predict("broadcast", 10**6, 4) is None
    assert ceilings.predict("barrier", 0, 4) is None
    assert ceilings.predict("all_reduce", 10**6, 1) is None


def test_an_earlier_file_is_never_replaced_unasked(tmp_path):
    path = tmp_path / "calibration.json"
    write_calibration(path, calibration())
    before = path.read_bytes()
    with pytest.raises(UsageError, match="--force"):
        write_calibration(path, calibration(torch="2.14"))
    assert path.read_bytes() == before
    write_calibration(path, calibration(torch="2.14"), force=True)
    assert read_calibration(path).torch == "2.14"


def test_force_replaces_nothing_but_calibrations(tmp_path):
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    with pytest.raises(UsageError, match="is not a calibration file"):
        write_calibration(path, calibration(), force=True)
    assert path.read_text() == '{"mine": 1}'
    with pytest.raises(UsageError, match="directory"):
        check_target(tmp_path, force=True)
    with pytest.raises(UsageError, match="no directory"):
        check_target(tmp_path / "gone" / "c.json", force=False)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"format": "other"}', "[" * 100_000, "\xff", '{"format": NaN}'],
)
def test_what_is_no_calibration_is_refused(tmp_path, text):
    path = tmp_path / "c.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TraceError, match=r"c\.json"):
        read_calibration(path)


def test_a_missing_file_and_a_newer_one_are_refused(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_calibration(tmp_path / "gone.json")
    path = tmp_path / "c.json"
    path.write_text(to_json(calibration()).replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(SchemaError, match="Update commprof"):
        read_calibration(path)


def test_damaged_files_are_refused_in_a_sentence(tmp_path):
    """Any one value of the file is replaced by a different value.

    The file is then either read or refused with the calibration error, and never fails otherwise.
    """
    path = tmp_path / "c.json"
    rng = random.Random(3)
    strange = [None, -1, 0, 1.5, "x", [], {}, [1], 2**70, True, {"a": None}]
    refused = 0
    for _ in range(400):
        content = json.loads(to_json(calibration()))
        place = content
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
                place = place[key]
                continue
            place[key] = rng.choice(strange)
            break
        path.write_text(json.dumps(content))
        try:
            read_calibration(path).ceilings().predict("all_reduce", 1000, 4)
        except CommprofError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 100


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1K:64K", (1024, 4096, 16384, 65536)),
        ("1k:4kb:2", (1024, 2048, 4096)),
        ("8", (8,)),
        ("2M,1K, 1K", (1024, 2**21)),
        ("1.5K", (1536,)),
        ("100:101:1.01", (100, 101)),
    ],
)
def test_sizes_as_people_write_them(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "x",
        "1:2:3:4",
        "4K:1K",
        "1K:2K:1",
        "1K:2K:x",
        "0",
        "-1",
        "1e9",
        "65G",
        "1:1G:1.01",
        "1K:2K:nan",
    ],
)
def test_sizes_that_cannot_be_measured_are_refused(text):
    with pytest.raises(UsageError, match="--sizes"):
        parse_sizes(text)


def test_operations_are_chosen_by_name():
    assert parse_ops([]) == OPS
    assert parse_ops(["send-recv,all_reduce"]) == ("all_reduce", "send_recv")
    assert parse_ops(["broadcast", "reduce"]) == ("reduce", "broadcast")
    with pytest.raises(UsageError, match="did you mean 'all_gather'"):
        parse_ops(["al_gather"])


def test_a_plan_reaches_the_ranks_as_it_is():
    plan = Plan(ops=("reduce",), sizes=(8, 16), dtype="float16", device="cpu", iterations=3, warmup=0)
    assert Plan.from_json(plan.to_json()) == plan

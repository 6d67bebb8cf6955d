"""Test the times of messages and the bounds of a step against hand-computed values."""

from __future__ import annotations

import json

import pytest

from commprof.calibration.file import write_calibration
from commprof.calibration.results import Calibration, Timing
from commprof.cli import execute
from commprof.errors import UsageError
from commprof.plan.durations import CalibratedTimes, UnknownTimeError, parse_duration, step_time
from commprof.plan.hosts import Hosts
from commprof.plan.nccl_model import Cost
from commprof.plan.overlap import exposed_messages
from commprof.requested.expectation import row
from commprof.schema import Op, Purpose

US, MS = 1_000, 1_000_000
LINKS = "intra=450GB/s,inter=8x50GB/s"


def calibration(**ops: tuple[int, float]) -> Calibration:
    """Return a calibration in which each operation has a latency and a time per byte.

    The measurements are on 2 ranks, up to 16 MiB.
    """
    sizes = [2**n for n in range(10, 25, 2)]
    return Calibration(
        created="2026-01-02T03:04:05+00:00",
        torch="2.13.0",
        backend="gloo",
        backend_version=None,
        device="cpu",
        dtype="float32",
        world_size=2,
        hosts=("a",),
        machine={"system": "Linux", "machine": "x86_64", "cpus": 2, "accelerator": None},
        timings={
            op: tuple(Timing(size, t, t, t, 20) for size in sizes for t in [round(alpha + slope * size)])
            for op, (alpha, slope) in ops.items()
        },
    )


class Fixed:
    """A time model in which a message takes one nanosecond per byte."""

    text = "a test"

    def cost_of(self, op, payload_bytes, place):
        return Cost(0.0, 1.0)


def test_calibrated_times_are_scaled_by_the_bus_bandwidth():
    """The calibrated time is 1 ns per byte among 2 ranks, where a rank sends S in an all_reduce.

    Among 4 ranks, a rank sends 1.5 S.
    """
    source = CalibratedTimes(calibration(all_reduce=(100_000, 1.0)))
    sent = [row("step", Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, [1_000_000, 2_000_000], 4)]
    found = step_time(sent, Hosts(1, 4), source, {}, None)
    assert found.communication_ns == pytest.approx(2 * 100_000 + 1.5 * 3_000_000, rel=1e-3)
    assert (found.least_ns, found.most_ns, found.overlapping_ns) == (None, None, 0)
    assert found.latency_ns == pytest.approx(2 * 100_000, rel=1e-3)
    with pytest.raises(UnknownTimeError, match="no times of broadcast; measure it with --ops broadcast"):
        step_time([row("step", Purpose.OTHER, Op.BROADCAST, [4], 4)], Hosts(1, 4), source, {}, None)
    large = [row("step", Purpose.OTHER, Op.ALL_REDUCE, [2**26], 4)]
    with pytest.raises(UnknownTimeError, match="--ops all_reduce --sizes 1024:67108864:4"):
        step_time(large, Hosts(1, 4), source, {}, None)


@pytest.mark.parametrize(
    ("exposed", "compute", "bounds"),
    [
        ({}, 5_000, (11_010, 11_010)),  # All of the 6,010 is exposed.
        # 5,000 of the 6,010 overlap with the 5,000 of computation.
        ({Purpose.GRADIENT_REDUCE: 1}, 5_000, (6_010, 11_010)),
        ({Purpose.GRADIENT_REDUCE: 2}, 5_000, (7_010, 11_010)),
        ({Purpose.GRADIENT_REDUCE: 1}, 100, (6_010, 6_110)),  # Communication takes longer than computation.
        ({Purpose.GRADIENT_REDUCE: 9}, 5_000, (11_010, 11_010)),
    ],
)
def test_bounds_of_a_step(exposed, compute, bounds):
    sent = [
        row("step", Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, [3_000, 1_000, 2_000], 4),
        row("step", Purpose.GRADIENT_NORM, Op.ALL_REDUCE, [10], 4),
    ]
    found = step_time(sent, Hosts(1, 4), Fixed(), exposed, compute)
    assert (found.least_ns, found.most_ns) == bounds
    assert found.by_purpose() == {"gradient_reduce": 6_000, "gradient_norm": 10}


def test_the_slowest_rank_decides():
    """Ranks 0 and 1 exchange 100 bytes, and ranks 2 and 3 exchange 700."""
    sent = [
        row("step", Purpose.OTHER, Op.ALL_REDUCE, [size], 2)._replace(groups=(group,))
        for size, group in ((100, (0, 1)), (700, (2, 3)))
    ]
    found = step_time(sent, Hosts(1, 4), Fixed(), {}, 1_000)
    assert (found.communication_ns, found.most_ns) == (700, 1_700)


@pytest.mark.parametrize(
    ("zero", "others", "found"),
    [
        ({"stage": 0}, {}, {}),
        ({"stage": 0}, {"communication": {"bounded_delay": 1}}, {"gradient_reduce": 0}),
        ({"stage": 1}, {}, {}),
        ({"stage": 1, "overlap_comm": True}, {}, {"gradient_reduce": 1}),
        ({"stage": 2}, {}, {}),
        ({"stage": 2, "gradient_reduction": "reduce_scatter"}, {}, {"gradient_reduce": 3}),
        ({"stage": 2, "overlap_comm": True}, {}, {"gradient_reduce": 3}),
        ({"stage": 2, "overlap_parameter_gather": True}, {}, {"parameter_gather": 1}),
        ({"stage": 3}, {}, {"gradient_reduce": 3, "parameter_gather": 1}),
        (
            {"stage": 3, "overlap_comm": False, "stage3_prefetch_bucket_size": 0},
            {},
            {},
        ),
        ({"stage": 1, "overlap_comm": True}, {"optimizer": {"type": "OneBitAdam"}}, {}),
    ],
)
def test_what_can_overlap_follows_from_the_keys(zero, others, found):
    assert exposed_messages({"zero_optimization": zero, **others}, 3) == found


def test_a_duration_has_a_unit():
    assert [parse_duration(text, "--step-compute") for text in ("900ms", "1.5 s", "50us", "2min")] == [
        900 * MS,
        1500 * MS,
        50 * US,
        120_000 * MS,
    ]
    with pytest.raises(UsageError, match="--step-compute is '900'; expected a time with its unit"):
        parse_duration("900", "--step-compute")


@pytest.fixture
def plan(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}')

    def run(*words):
        assert execute(["plan", str(path), "--model", "params:1e8", "--world", "64", *words]) == 0
        return capsys.readouterr().out

    return run


def test_times_in_json(plan):
    def first(*words):
        return json.loads(plan("--json", *words))["settings"][0]

    unknown = first("--step-compute", "900ms")
    assert unknown["step_ns"] == {"least": None, "most": None}
    assert unknown["communication_ns"] == {
        "all": None,
        "latency": None,
        "overlapping": None,
        "by_purpose": None,
        "source": None,
        "note": "give --calibration, or --links for NCCL's model",
    }
    sent = first("--links", LINKS)["communication_ns"]
    assert first("--links", LINKS)["step_ns"] == {"least": None, "most": None}
    assert sent["overlapping"] == 0 < sent["all"] == sum(sent["by_purpose"].values())
    assert "torch 2.13's inductor" in sent["source"] and not sent["note"]
    step = first("--links", LINKS, "--step-compute", "900ms")["step_ns"]
    assert step == {"least": 900 * MS + sent["all"], "most": 900 * MS + sent["all"]}
    overlap = (
        "--set",
        "zero_optimization.overlap_comm=true",
        "--set",
        "zero_optimization.reduce_bucket_size=1e6",
    )
    step = first("--links", LINKS, "--step-compute", "900ms", *overlap)["step_ns"]
    assert 900 * MS < step["least"] < step["most"]
    assert "no model of gloo" in first("--links", LINKS, "--backend", "gloo")["communication_ns"]["note"]


def test_times_in_tables(plan, tmp_path):
    def words(*options):
        return " ".join(plan(*options).split())

    assert "Times of messages are not known: give --calibration, or --links for NCCL's model." in words()
    text = words("--links", LINKS)
    assert "time of messages per step" in text and "not predicted without --step-compute" in text
    text = words("--links", LINKS, "--step-compute", "900ms")
    assert "A step takes 9" in text and ": 900 ms of computation and " in text
    assert (
        "Times are from NCCL's model of latencies, as in torch 2.13's inductor, at the rates of --links"
        in text
    )
    file = tmp_path / "calibration.json"
    write_calibration(file, calibration(all_reduce=(100_000, 1.0)))
    text = words("--calibration", str(file))
    assert "Times of messages are not known: the calibration ends at all_reduce of 16,777,216 bytes" in text
    both = words("--links", LINKS, "--step-compute", "1s", "--set", "zero_optimization.stage=1,3")
    assert "communication step" in both and "1.0" in both

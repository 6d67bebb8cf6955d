"""Test the costs of collectives from calibrations, and the choice that these costs determine."""

from __future__ import annotations

import json

import pytest

from commprof.requested.communication.measured_costs import costs_of
from commprof.schema import Op
from zero_runtime.errors import ConfigError
from zero_runtime.experimental.topology_aware.composition_choice import Choice
from zero_runtime.experimental.topology_aware.costs import OPERATIONS, Cost, Costs, bus_factor, read_costs
from zero_runtime.experimental.topology_aware.sizes import sharing

SLOW = {each: Cost(100_000.0, 8.0) for each in OPERATIONS}  # 0.1 ms and 125 MB/s.
FAST = {each: Cost(20_000.0, 0.1) for each in OPERATIONS}
SIZES = (2, 4)


def calibration(path, ranks=4, alpha=1000.0, beta=1e9, **changes):
    ops = {
        each: {
            "bus_factor": bus_factor(each, ranks),
            "sizes": [],
            "fit": {"alpha_ns": alpha, "beta_bytes_per_s": beta},
        }
        for each in OPERATIONS
    }
    path.write_text(json.dumps({"format": "commprof-calibration", "schema_version": 1, "ops": ops} | changes))
    return str(path)


def test_a_fitted_time_is_found_again(tmp_path):
    found = read_costs(calibration(tmp_path / "c.json", ranks=4, alpha=5000.0, beta=2e9))
    for operation in OPERATIONS:
        assert found[operation].time_ns(operation, 2e6, 4) == pytest.approx(5000 + 2e6 / 2e9 * 1e9)
    # A different number of ranks has the same bus bandwidth.
    assert found["all_gather"].time_ns("all_gather", 2e6, 2) == pytest.approx(5000 + 1e6 * (1 / 2) / (3 / 4))


def test_times_along_the_axes_add_up():
    costs = Costs(SLOW, (SLOW, FAST), (4, 1))
    inner = 20_000 + 1000 * 3 / 4 * 0.1
    # Each rank sends a quarter of the message, and four groups share the link.
    outer = 100_000 + 4 * 250 * 1 / 2 * 8.0
    assert costs.composed_ns("all_gather", 1000, SIZES, "native") == pytest.approx(inner + outer)
    both = 2 * inner + 100_000 + 4 * 250 * 2 * 1 / 2 * 8.0
    assert costs.composed_ns("all_reduce", 1000, SIZES, "native") == pytest.approx(both)
    assert costs.plain_ns("all_reduce", 1000, SIZES, "native") == pytest.approx(
        100_000 + 1000 * 2 * 7 / 8 * 8.0
    )


def test_small_messages_stay_plain_and_large_ones_go_along_the_axes():
    composes = Choice(SIZES, "native", Costs(SLOW, (SLOW, FAST), (4, 1))).composes
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        sizes = [composes(operation, 2**power) for power in range(2, 28)]
        assert not sizes[0] and sizes[-1] and sizes == sorted(sizes)


@pytest.mark.parametrize("implementation", ["native", "all_to_all"])
def test_the_rules_of_requested_choose_as_the_runtime_does(tmp_path, implementation):
    """The same files are read and evaluated a second time, for 2 hosts of 4 ranks."""
    numbers = [(1000.0, 1e8, 8), (10_000.0, 1e9, 2), (10_000.0, 1e10, 4)]
    files = [
        calibration(tmp_path / f"{index}.json", ranks=ranks, alpha=alpha, beta=beta)
        for index, (alpha, beta, ranks) in enumerate(numbers)
    ]
    world, *axes = map(read_costs, files)
    own = Costs(world, axes, sharing(SIZES, [0] * 4 + [1] * 4))
    composes = Choice(SIZES, implementation, own).composes
    block = {"communication": {"calibration": {"world": files[0], "axes": files[1:]}}}
    for known in (costs_of(block, SIZES, 4), costs_of(block, SIZES, None, own.described())):
        for operation in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER):
            chosen = [composes(operation, 2**power) for power in range(2, 28)]
            exchanges = implementation == "all_to_all"
            again = [
                known.goes_along(operation, 2**power, SIZES, exchanges=exchanges) for power in range(2, 28)
            ]
            assert chosen == again and set(chosen) == {True, False}


def test_where_no_link_is_slower_nothing_is_gained():
    composes = Choice(SIZES, "native", Costs(FAST, (FAST, FAST), (4, 1))).composes
    assert not any(composes("all_reduce", 2**power) for power in range(2, 28))


def test_a_reduce_scatter_of_all_to_all_costs_what_that_does():
    world = {**SLOW, "all_to_all": Cost(1.0, 0.001)}
    costs = Costs(world, (SLOW, FAST), (4, 1))
    assert not Choice(SIZES, "all_to_all", costs).composes("reduce_scatter", 2**26)
    assert Choice(SIZES, "native", costs).composes("reduce_scatter", 2**26)


def test_without_costs_everything_goes_along_the_axes():
    composes = Choice(SIZES, "native", None).composes
    assert composes("all_reduce", 4) and not composes("all_reduce", 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("{", "is no calibration"),
        ('{"format": "other"}', "is no calibration"),
        ('{"format": "commprof-calibration", "ops": {}}', "no fitted times of all_reduce"),
        ('{"format": "commprof-calibration", "ops": {"all_reduce": {"fit": null}}}', "no fitted times"),
    ],
)
def test_a_file_that_is_no_calibration_is_named(tmp_path, text, said):
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said) as refusal:
        read_costs(str(path))
    assert str(path) in str(refusal.value) and "communication.calibration" in str(refusal.value)


def test_a_file_of_commprof_calibrate_is_read(tmp_path):
    from commprof.calibration.file import to_json
    from commprof.calibration.results import Calibration, Timing

    times = tuple(
        Timing(payload_bytes=size, time_ns=5000 + size // 2, low_ns=1, high_ns=9 * size, iterations=5)
        for size in (2**10, 2**14, 2**18, 2**22)
    )
    written = Calibration(
        created="2026-11-22T00:00:00+00:00", torch="2", backend="gloo", backend_version=None, device="cpu", dtype="float32",
        world_size=4, hosts=("a",), machine={}, environment={}, warmup=1, skipped={},
        timings=dict.fromkeys(OPERATIONS, times),
    )  # fmt: skip
    path = tmp_path / "calibration.json"
    path.write_text(to_json(written))
    cost = read_costs(str(path))["all_reduce"]
    assert cost.time_ns("all_reduce", 2**20, 4) == pytest.approx(5000 + 2**19, rel=0.01)

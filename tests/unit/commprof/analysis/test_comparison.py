"""Test ``compare()`` and ``traffic_by_setting()``, which compare settings.

The expected numbers are computed by hand.
"""

from pathlib import Path

import pytest

from commprof.analysis import api
from commprof.analysis.columns.answers import COMPARISON, TRAFFIC_BY_SETTING
from support.runs import SyntheticRun


def zero(**keys):
    return {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2, **keys}}


def training(op: str, payload: int, *, messages: int = 1, step_ns: int = 1000, steps: int = 3, **settings):
    """Return a run of two ranks.

    Each step reduces gradients with ``messages`` x ``op``, computes the norm, issues a barrier and gathers
    the parameters.
    """
    intended = settings.pop("intended_op", None)
    run = SyntheticRun(world_size=settings.pop("world_size", 2), **settings)
    run.add_collective(
        "broadcast", payload_bytes=5_000, step=-1, phase="init", peer=0, purpose="parameter_broadcast"
    )
    for step in range(steps):
        # The first step takes longer, so that a test fails if the first step counts.
        run.add_step(step, duration_ns=step_ns * (50 if step == 0 else 1), loss=3.0 - step)
        for _ in range(messages):
            run.add_collective(
                op,
                payload_bytes=payload // messages,
                step=step,
                peer=0 if op == "reduce" else -1,
                purpose="gradient_reduce",
                intended_op=intended,
            )
        run.add_collective(
            "all_reduce", payload_bytes=4, step=step, phase="optimizer", purpose="gradient_norm"
        )
        run.add_collective("barrier", step=step, phase="other")
        run.add_collective(
            "all_gather", payload_bytes=800, step=step, phase="optimizer", purpose="parameter_gather"
        )
    return run


def opened(*runs: SyntheticRun):
    return [run.open(Path("traces") / f"run-{number}") for number, run in enumerate(runs)]


def test_three_reductions_side_by_side():
    frame = api.compare(
        opened(
            training(
                "all_reduce", 1000, config=zero(reduce_scatter=True, use_multi_rank_bucket_allreduce=True)
            ),
            training(
                "reduce",
                1000,
                messages=2,
                config=zero(reduce_scatter=True, use_multi_rank_bucket_allreduce=False),
            ),
            training(
                "all_to_all",
                1000,
                intended_op="reduce_scatter",
                config=zero(
                    reduce_scatter=True,
                    use_multi_rank_bucket_allreduce=True,
                    gradient_reduction="reduce_scatter",
                ),
            ),
        )
    ).set_index("label")
    first, second, third = frame.index
    assert first == "use_multi_rank_bucket_allreduce=true"
    assert frame["zero_optimization.use_multi_rank_bucket_allreduce"].tolist() == ["true", "false", "true"]
    assert frame["requested_op"].tolist() == ["reduce_scatter"] * 3
    assert frame["issued_op"].tolist() == ["all_reduce", "reduce", "all_to_all"]
    assert frame["intended_op"].tolist()[2] == "reduce_scatter"
    assert frame["intended_op"].isna().tolist() == [True, True, False]
    assert frame["collectives_per_step"].tolist() == [3.0, 4.0, 3.0]
    assert frame["payload_bytes_per_step"].tolist() == [1804.0] * 3  # 1000 + 4 + 800
    # On two ranks, an all_reduce sends S and every other operation S / 2.
    assert frame["wire_bytes_per_step"].tolist() == [1404.0, 904.0, 904.0]
    assert frame["gradient_payload_bytes_per_step"].tolist() == [1000.0] * 3
    assert frame["gradient_wire_bytes_per_step"].tolist() == [1000.0, 500.0, 500.0]
    assert frame.loc[first, ["wire_all_reduce", "wire_reduce", "wire_all_gather"]].tolist() == [
        1004.0,
        0.0,
        400.0,
    ]
    assert frame.loc[second, ["wire_all_reduce", "wire_reduce", "wire_broadcast"]].tolist() == [
        4.0,
        500.0,
        0.0,
    ]
    assert frame.loc[third, ["wire_all_to_all", "wire_reduce_scatter"]].tolist() == [500.0, 0.0]
    assert frame["step_time_ns"].tolist() == [1000] * 3
    assert frame["interval_over"].isna().all()  # Two steps after the first are too few.
    assert frame["final_loss"].tolist() == [1.0] * 3


def test_the_wire_columns_add_up_to_the_whole():
    frame = api.compare(
        opened(training("reduce", 640, config=zero(a=1)), training("all_reduce", 640, config=zero(a=2)))
    )
    columns = [
        name for name in frame.columns if name.startswith("wire_") and not name.startswith("wire_bytes")
    ]
    assert frame[columns].sum(axis=1).tolist() == frame["wire_bytes_per_step"].tolist()


def test_repeats_of_a_setting_are_one_row_with_an_interval_over_them():
    frame = api.compare(
        opened(
            training("all_reduce", 1000, config=zero(reduce_scatter=False), step_ns=1000),
            training("reduce", 1000, config=zero(reduce_scatter=True), step_ns=500),
            training("all_reduce", 1000, config=zero(reduce_scatter=False), step_ns=1200, steps=5),
        )
    )
    assert frame["label"].tolist() == ["reduce_scatter=false", "reduce_scatter=true"]
    assert frame["repeats"].tolist() == [2, 1]
    assert frame["steps"].tolist() == [8, 3]
    assert frame["runs"].tolist() == ["run-0, run-2", "run-1"]
    merged = frame.iloc[0]
    assert merged["payload_bytes_per_step"] == 1804.0
    # The medians are 1000 and 1200. The mean is 1100, s = 141.42, and t(1) = 12.7062: +- 12.7062 x 141.42 /
    # sqrt(2) = 1270.6.
    assert (merged["step_time_ns"], merged["step_time_low_ns"], merged["step_time_high_ns"]) == (
        1100,
        0,
        2371,
    )
    assert merged["interval_over"] == "repeats"
    assert merged["final_loss"] == pytest.approx((1.0 + -1.0) / 2)


def test_one_run_of_many_steps_has_an_interval_over_its_steps():
    frame = api.compare(opened(training("all_reduce", 8, steps=12, config=zero())))
    row = frame.iloc[0]
    assert (row["interval_over"], row["step_time_low_ns"], row["step_time_high_ns"]) == ("steps", 1000, 1000)
    assert row["label"] == "run-0"


def test_several_issued_operations_are_listed_by_their_bytes():
    run = training("reduce", 100, config=zero())
    for step in range(3):
        run.add_collective("all_reduce", payload_bytes=900, step=step, purpose="gradient_reduce")
    assert api.compare(opened(run))["issued_op"].tolist() == ["all_reduce, reduce"]


def test_a_run_that_says_nothing_of_steps_has_nothing_per_step():
    run = SyntheticRun(config=zero())
    run.add_collective("all_reduce", payload_bytes=100, step=-1)
    row = api.compare(opened(run)).iloc[0]
    assert row["steps"] == 0
    nulls = ["collectives_per_step", "payload_bytes_per_step", "wire_bytes_per_step", "wire_all_reduce"]
    assert row[[*nulls, "step_time_ns", "interval_over", "final_loss", "issued_op"]].isna().all()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("config", "op", "reason"),
    [
        (zero(reduce_scatter=True), "reduce_scatter", None),
        (zero(), "reduce_scatter", None),  # DeepSpeed's default is true.
        (zero(reduce_scatter=False), "all_reduce", None),
        ({"zero_optimization": {"stage": 0}}, "all_reduce", None),
        (None, None, "no config was recorded"),
        ({"model": "big"}, None, "not one of DeepSpeed's"),
        ({"zero_optimization": {"stage": "two"}}, None, "cannot be read"),
    ],
)
def test_the_requested_operation_comes_from_the_words_of_the_config(config, op, reason):
    row = api.compare(opened(training("all_reduce", 8, config=config))).to_dict("records")[0]
    assert (row["requested_op"] if op else None) == op
    assert row["issued_op"] == "all_reduce"
    if reason is None:
        assert row["requested_reason"] != row["requested_reason"]
    else:
        assert reason in row["requested_reason"]
        assert row["requested_op"] != row["requested_op"]


def test_different_world_sizes_are_different_settings():
    frame = api.compare(
        opened(
            training("all_reduce", 600, config=zero()),
            training("all_reduce", 600, world_size=3, config=zero()),
        )
    )
    assert frame["label"].tolist() == ["world_size=2", "world_size=3"]
    assert frame["gradient_wire_bytes_per_step"].tolist() == [600.0, 800.0]


@pytest.mark.long
def test_a_sweep_is_in_its_own_order_whatever_the_order_of_the_arguments():
    def point(value, repeat, started):
        return training(
            "all_reduce",
            8,
            config=zero(reduce_scatter=value),
            sweep={"name": "s", "point": {"zero_optimization.reduce_scatter": value}, "repeat": repeat},
            started_realtime_ns=started,
        )

    frame = api.compare(
        opened(point(False, 1, 40), point(True, 0, 10), point(False, 0, 20), point(True, 1, 30))
    )
    assert frame["label"].tolist() == ["reduce_scatter=true", "reduce_scatter=false"]
    assert frame["runs"].tolist() == ["run-1, run-3", "run-2, run-0"]


def test_traffic_by_setting_is_the_same_in_long_form():
    runs = opened(
        training("all_reduce", 1000, config=zero(reduce_scatter=False)),
        training("all_to_all", 1000, intended_op="reduce_scatter", config=zero(reduce_scatter=True)),
    )
    long = api.traffic_by_setting(runs)
    assert list(long.columns) == list(TRAFFIC_BY_SETTING.names)
    assert len(long) == 6
    gradients = long[long["purpose"] == "gradient_reduce"].set_index("label")
    assert gradients.loc["reduce_scatter=true", ["op", "intended_op", "wire_bytes_per_step"]].tolist() == [
        "all_to_all",
        "reduce_scatter",
        500.0,
    ]
    sums = long.groupby("label", sort=False)["wire_bytes_per_step"].sum()
    assert sums.tolist() == api.compare(runs)["wire_bytes_per_step"].tolist()
    assert "barrier" not in set(long["op"])


def test_the_columns_are_the_declared_ones_with_the_keys_after_the_label():
    frame = api.compare(
        opened(training("reduce", 8, config=zero(a=1)), training("reduce", 8, config=zero(a=2)))
    )
    label, *rest = COMPARISON.names
    assert list(frame.columns) == [label, "zero_optimization.a", *rest]
    assert frame["step_time_ns"].dtype == "Int64"
    assert frame["steps"].dtype == "int64"


def test_nothing_to_compare_gives_no_rows():
    assert len(api.compare([])) == 0
    assert len(api.traffic_by_setting([])) == 0
    assert len(api.settings([])) == 0


@pytest.mark.parametrize("beside", [None, "metric"])
def test_a_program_that_gives_no_purposes_has_all_its_operations_listed(beside):
    run = SyntheticRun(world_size=2, config=zero(reduce_scatter=True))
    for step in range(2):
        run.add_step(step, duration_ns=1000)
        run.add_collective("all_reduce", payload_bytes=1000, step=step)
        run.add_collective("all_gather", payload_bytes=800, step=step)
        run.add_collective("barrier", step=step)
        if beside:  # The gathers that accelerate issues on its own look like this.
            run.add_collective("gather", payload_bytes=0, step=step, purpose=beside)
    row = api.compare(opened(run)).iloc[0]
    assert (row["requested_op"], row["issued_op"]) == ("reduce_scatter", "all_reduce, all_gather")
    assert "no collective has the purpose gradient_reduce" in row["issued_reason"]
    assert row[["gradient_payload_bytes_per_step", "gradient_wire_bytes_per_step"]].isna().all()
    assert row["wire_bytes_per_step"] == 1000 + 400

"""Test ``advice()``, which recommends settings by fixed rules.

The expected answers are computed by hand. Noise and the order of the runs never decide an answer.
"""

import random
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from commprof.analysis import api
from commprof.analysis.compare import significance
from commprof.analysis.traffic import setting_levels
from support.runs import SyntheticRun

pytestmark = pytest.mark.shared_answers

REDUCE = {"gradient_reduction": "reduce"}
ALL_REDUCE = {"gradient_reduction": "all_reduce"}
TIMES = (1000, 1080, 1030)  # The step times of three repeats.


def new_run(
    op="all_reduce", step_ns=1_000_000, loss=2.0, world_size=2, steps=3, batch=4, samples=None, **zero
):
    """Return a run of two ranks that reduces 1000 bytes of gradients per step with ``op``.

    The first step is slow, so that a test fails if the first step counts.
    """
    config = {"train_micro_batch_size_per_gpu": batch, "zero_optimization": {"stage": 2, **zero}}
    made = SyntheticRun(world_size=world_size, config=config)
    for step in range(steps):
        metrics = {"loss": loss} if loss is not None else {}
        if samples is not None:
            metrics["samples"] = samples
        made.add_step(step, duration_ns=step_ns * (9 if step == 0 else 1), rss_bytes=100 + step, **metrics)
        made.add_collective(
            op,
            payload_bytes=1000,
            step=step,
            peer=0 if op in ("reduce", "broadcast") else -1,
            purpose="gradient_reduce",
        )
    return made


run = cache(new_run)  # For tests that do not change the run.


@cache
def view(made, number):
    """Open the run in this position once for all tests, so that its measurements are reused."""
    return made.open(Path("traces") / f"run-{number}")


def opened(*runs):
    return [view(each, number) for number, each in enumerate(runs)]


def two_reductions():
    return opened(
        *(run("all_reduce", t, **ALL_REDUCE, overlap_comm=True) for t in (1000, 1100, 1050)),
        *(run("reduce", t, **REDUCE, overlap_comm=True) for t in (1010, 1090, 1060)),
    )


def test_least_wire_bytes_at_equal_loss_is_recommended():
    found = api.advice(two_reductions())
    assert found.answer == "recommended"
    # For n = 2, an all_reduce sends 1000 bytes and a reduce 500. gloo runs the reduce with 3/4 of the
    # payload.
    assert found.sentences[0] == (
        "Set gradient_reduction=reduce: it sends the least, 750 B on the wire per rank and step (modelled, as the backend "
        "runs it); gradient_reduction=all_reduce sends 1000 B, 33 % more. Step times do not differ measurably."
    )
    assert "no measurable difference in step time" in found.sentences[1]
    assert found.sentences[2] == "Their losses are equal within 1 %: 2 to 2 at the last step."
    assert found.settings["label"].tolist() == ["gradient_reduction=reduce", "gradient_reduction=all_reduce"]
    assert found.settings["recommended"].tolist() == [True, False]
    assert found.settings["wire_bytes_per_step"].tolist() == [750.0, 1000.0]
    assert found.settings["not_slower"].tolist() == [True, True]


def test_what_several_settings_share_is_what_to_set():
    found = api.advice(
        opened(
            run("reduce", reduce_scatter=True, gradient_reduction="auto"),
            run("reduce", reduce_scatter=True, gradient_reduction="reduce_to_owner"),
            run("reduce", reduce_scatter=False, gradient_reduction="reduce_to_owner"),
            run("all_reduce", reduce_scatter=False, gradient_reduction="auto"),
        )
    )
    # Two of the three best runs have reduce_scatter=true, and two have gradient_reduction=reduce_to_owner,
    # which is listed first.
    assert found.sentences[0].startswith("Set gradient_reduction=reduce_to_owner: it sends the least, 750 B")
    assert found.sentences[1] == "As good by these rules: reduce_scatter=true, gradient_reduction=auto."
    assert found.settings["recommended"].tolist() == [True, True, True, False]


@pytest.mark.long
def test_fewer_bytes_that_take_measurably_longer_are_not_simply_recommended():
    found = api.advice(
        opened(*(run("all_reduce", t, **ALL_REDUCE) for t in (1000, 1010, 1005)))
        + opened(*(run("reduce", t, **REDUCE) for t in (2000, 2010, 2005)))
    )
    assert found.answer == "recommended"
    assert found.sentences[0].startswith(
        "Set gradient_reduction=all_reduce if step time matters most: its step is measurably shorter than that of "
        "gradient_reduction=reduce, which sends the fewest bytes, 750 B"
    )
    pair = found.pairs.iloc[0]
    # The difference is 2005 - 1005 = 1000. Both runs have s^2 = 25, so the error is sqrt(50 / 3) = 4.08 with
    # 4 degrees of freedom: t = 2.776, +- 11.33.
    assert (pair["label"], pair["verdict"]) == ("gradient_reduction=all_reduce", "longer")
    assert (pair["difference_ns"], pair["low_ns"], pair["high_ns"]) == (1000, 989, 1011)
    assert pair["probability"] < 1e-6


@pytest.mark.long
def test_equal_bytes_and_a_shorter_step():
    found = api.advice(
        opened(*(run(step_ns=t, overlap_comm=True) for t in (500, 505, 495)))
        + opened(*(run(step_ns=t, overlap_comm=False) for t in (1000, 1010, 990)))
    )
    assert found.sentences[0] == (
        "Set overlap_comm=true: all send the same bytes, 1000 B on the wire per rank and step (modelled, as the backend "
        "runs it), and its step is measurably shorter."
    )
    assert "No other setting is measurably faster" in found.sentences[2]


@pytest.mark.long
def test_one_repeat_never_claims_a_difference_in_time():
    found = api.advice(
        opened(run(step_ns=10, overlap_comm=True), run(step_ns=10_000_000, overlap_comm=False))
    )
    assert found.answer == "cannot tell"
    assert found.pairs["verdict"].tolist() == ["cannot tell"]
    assert found.pairs["reason"].str.contains("1 repeat").all()
    assert found.settings["not_slower"].isna().all()
    assert any("Step times cannot be compared" in text for text in found.sentences)
    assert not any("shorter" in text for text in found.sentences)


def test_one_repeat_is_enough_for_bytes():
    found = api.advice(opened(run("reduce", **REDUCE), run("all_reduce", **ALL_REDUCE)))
    assert found.answer == "recommended"
    assert "gradient_reduction=reduce" in found.sentences[0]


def test_a_setting_with_a_higher_loss_is_left_out():
    found = api.advice(opened(run("reduce", loss=2.1, **REDUCE), run("all_reduce", loss=2.0, **ALL_REDUCE)))
    assert found.answer == "cannot tell"  # Only one setting is left.
    assert "gradient_reduction=reduce is left out: its loss ends at 2.1" in found.sentences[1]


@pytest.mark.parametrize(
    ("state", "why"),
    [("failed", "failed before the end of a training step"), ("complete", "no whole training step")],
)
def test_a_setting_without_a_step_is_left_out_and_said_to_have_failed_only_if_it_did(state, why):
    config = {"zero_optimization": {"stage": 7}}
    found = api.advice(opened(run(stage=1), run(stage=2), SyntheticRun(2, config=config, state=state)))
    assert any(f"stage=7 is left out: {why}." in sentence for sentence in found.sentences)


@pytest.mark.long
def test_a_loss_that_repeats_explain_counts_as_equal():
    found = api.advice(
        opened(*(run("reduce", t, loss=x, **REDUCE) for t, x in ((10, 2.2), (11, 1.9), (12, 2.1))))
        + opened(*(run("all_reduce", t, loss=x, **ALL_REDUCE) for t, x in ((10, 2.1), (12, 1.8), (11, 2.0))))
    )
    assert found.answer == "recommended"
    assert "equal as far as repeats tell" in " ".join(found.sentences)


@pytest.mark.long
def test_losses_after_different_numbers_of_steps_are_not_compared():
    found = api.advice(opened(run("reduce", loss=9.0, steps=2, **REDUCE), run(steps=5, **ALL_REDUCE)))
    assert found.answer == "recommended"
    assert "not compared" in " ".join(found.sentences)


@pytest.mark.sampled
@pytest.mark.parametrize("other", [{"world_size": 3}, {"batch": 8}])
def test_settings_that_do_other_work_are_not_weighed(other):
    found = api.advice(opened(run("reduce", **REDUCE), run("all_reduce", **ALL_REDUCE, **other)))
    assert found.answer == "cannot tell"
    assert "do not do the same work" in found.sentences[0]
    assert not found.settings["recommended"].any()


def test_what_was_asked_for_and_not_issued_is_a_warning_with_its_key():
    keys = {"reduce_scatter": True, "use_multi_rank_bucket_allreduce": True}
    found = api.advice(
        opened(
            run("all_reduce", contiguous_gradients=False, **keys),
            run("all_reduce", contiguous_gradients=True, **keys),
        )
    )
    assert any(
        text.startswith("Warning: contiguous_gradients=false requests reduce_scatter and issues all_reduce")
        and "contiguous_gradients: false overrides it" in text
        for text in found.sentences
    )


@pytest.mark.parametrize("count", [0, 1])
def test_it_takes_two_settings(count):
    assert api.advice(opened(*[run() for _ in range(count)])).answer == "cannot tell"


@pytest.mark.long
def test_the_order_of_the_runs_changes_nothing():
    views = two_reductions() + opened(*(run("reduce", t, **REDUCE, overlap_comm=False) for t in TIMES[:2]))
    first = api.advice(views)
    for seed in range(3):
        random.Random(seed).shuffle(views)
        again = api.advice(views)
        assert (again.answer, again.sentences) == (first.answer, first.sentences)
        assert again.pairs.equals(first.pairs)
        assert again.settings.equals(first.settings)


def test_the_same_runs_twice_show_no_measurable_difference():
    found = api.advice(opened(*(run(step_ns=t, overlap_comm=on) for on in (True, False) for t in TIMES)))
    assert found.answer == "no measurable difference"
    assert found.sentences[0].startswith("No measurable difference: all settings send the same bytes")


@pytest.mark.long
def test_settings_that_are_alike_are_seldom_called_different():
    rng = random.Random(1)
    trials = 150
    called = 0
    for _ in range(trials):
        medians = {str(name): [rng.gauss(1e6, 5e4) for _ in range(4)] for name in range(6)}
        called += significance.pairs(medians)["verdict"].isin(["shorter", "longer"]).any()
    assert called / trials < 0.09  # The intended rate is 5 %.


def test_a_difference_that_is_there_is_found():
    rng = random.Random(2)
    found = 0
    for _ in range(100):
        medians = {
            name: [rng.gauss(mean, 1e4) for _ in range(4)] for name, mean in (("a", 1e6), ("b", 1.1e6))
        }
        found += significance.pairs(medians)["verdict"].tolist() == ["longer"]
    assert found > 95


def test_welch_by_hand():
    # The means are 2 and 6, and the variances of the three values are 1 and 4. The error is sqrt(5/3), t =
    # 3.098, and the degrees of freedom are (5/3)^2 / (1/18 + 16/18) = 2.941.
    found = significance.welch([1, 2, 3], [4, 6, 8])
    assert found.value == 4
    assert found.probability == pytest.approx(0.0549, abs=2e-4)
    assert (found.low, found.high) == pytest.approx((-0.155, 8.155), abs=2e-2)


@pytest.mark.long
def test_memory_and_samples_per_second():
    frame = api.resources(
        opened(
            run(step_ns=1_000_000, samples=5.0, **REDUCE),
            run(step_ns=3_000_000, samples=5.0, **REDUCE),
            run(step_ns=2_000_000, batch=4, **ALL_REDUCE),
        )
    ).set_index("label")
    metric, config = frame.index
    # The samples of both ranks add up: 10 in 1 ms and in 3 ms, and 4 x 2 ranks in 2 ms. The mean step of the
    # repeats takes 2 ms, which gives 5,000. A mean of the rates would be 6,667.
    assert frame.loc[metric, "samples_per_second"] == pytest.approx(5000)
    assert frame.loc[config, "samples_per_second"] == 4000.0
    assert frame["samples_from"].tolist() == ["metric", "config"]
    assert frame["samples_low"].isna().tolist() == [False, True]
    # The values are 100, 101 and 102. The first step counts only for the maximum.
    assert frame["rss_bytes"].tolist() == [102, 102]
    assert frame["rss_peak_bytes"].tolist() == [102, 102]
    assert frame["device_bytes"].isna().all()


def test_each_rank_of_a_reduce_to_one_owner():
    frame = api.rank_bytes(opened(run("reduce", world_size=4)))
    # Each of the ranks 1 to 3 sends 1000 bytes to rank 0.
    assert frame["sent_bytes_per_step"].tolist() == [0.0, 1000.0, 1000.0, 1000.0]
    assert frame["received_bytes_per_step"].tolist() == [3000.0, 0.0, 0.0, 0.0]
    assert frame["received_of_mean"].tolist() == [4.0, 0.0, 0.0, 0.0]
    assert frame.attrs["reasons"] == {}


@pytest.mark.sampled
@pytest.mark.parametrize("op", ["all_reduce", "reduce", "reduce_scatter", "broadcast", "all_to_all"])
def test_bytes_of_the_ranks_add_up_to_the_wire_bytes(op):
    runs = opened(run(op, world_size=3))
    frame = api.rank_bytes(runs)
    whole = 3 * api.compare(runs)["wire_bytes_per_step"][0]
    assert frame["sent_bytes_per_step"].sum() == pytest.approx(whole)
    assert frame["received_bytes_per_step"].sum() == pytest.approx(whole)


def test_levels_name_what_an_operation_stands_for():
    made = new_run("all_reduce")
    for step in range(3):
        made.add_collective(
            "all_to_all", payload_bytes=80, step=step, purpose="gradient_reduce", intended_op="reduce_scatter"
        )
    issued = api.reduction_levels(opened(made)).query("level == 'issued'").set_index("op")
    assert issued.loc["all_to_all", ["intended_op", "wire_bytes_per_step"]].tolist() == [
        "reduce_scatter",
        40.0,
    ]
    assert issued["intended_op"].isna().tolist() == [op == "all_reduce" for op in issued.index]


def test_levels_of_all_traffic_add_up_to_the_comparison():
    config = {"zero_optimization": {"stage": 2, "reduce_scatter": True}}
    made = SyntheticRun(2, config=config)
    made.add_parameters({"w": 1000})
    for step in range(3):
        made.add_step(step, duration_ns=1_000_000)
        made.add_collective("all_reduce", payload_bytes=4000, step=step, purpose="gradient_reduce")
        made.add_collective("all_gather", payload_bytes=4000, step=step, purpose="parameter_gather")
        made.add_collective("all_reduce", payload_bytes=8, step=step, purpose="metric")
    runs = opened(made)
    frame = api.traffic_levels(runs)
    by_level = frame.groupby("level")["wire_bytes_per_step"].sum()
    compared = api.compare(runs).iloc[0]
    assert by_level["issued"] == compared["wire_bytes_per_step"] == 4000 + 2000 + 8
    assert by_level["executed"] == compared["executed_wire_bytes_per_step"]
    requested = frame[frame["level"] == "requested"].set_index("op")["wire_bytes_per_step"]
    # No rule predicts metrics.
    assert requested.to_dict() == {"reduce_scatter": 2000.0, "all_gather": 2000.0}
    columns = list(api.reduction_levels(runs).columns)
    alone = frame[frame["reduces"].fillna(True).astype(bool)][columns].reset_index(drop=True)
    pd.testing.assert_frame_equal(alone, api.reduction_levels(runs))


@pytest.mark.parametrize(("over", "expected"), [("run", 250.0), ("step", 500.0)])
def test_moved_bytes_are_given_for_a_step_and_rank(over, expected):
    moved = {"moved_bytes": 1000.0, "moved_over": over}
    ledger = setting_levels.Ledger("a", None, None, {}, [(0, 0), (0, 1)], ranks=2)
    assert setting_levels._moved_of_rank([ledger], moved) == expected
    assert setting_levels._moved_of_rank([ledger._replace(ranks=None)], moved) is None
    assert setting_levels._moved_of_rank([ledger], moved | {"moved_bytes": None}) is None


def test_levels_of_a_setting_with_unknown_ones_said():
    frame = api.reduction_levels(opened(run("reduce")))
    levels = frame.set_index("level")
    assert levels.index.tolist() == ["requested", "issued", "executed", "moved"]
    assert levels.loc["issued", ["op", "wire_bytes_per_step"]].tolist() == ["reduce", 500.0]
    assert levels.loc["requested", ["op", "wire_bytes_per_step"]].isna().all()
    assert "no parameters" in levels.loc["requested", "reason"]
    assert levels.loc["moved", "moved_bytes"] != levels.loc["moved", "moved_bytes"]
    assert "no counters" in levels.loc["moved", "reason"]

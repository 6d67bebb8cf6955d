"""Test which changes of a run are worth trying.

The tests cover the candidates by rule, and the choice between them on hand-made runs.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from commprof.calibration.results import Calibration, Timing
from commprof.ledger.requests.request import Request
from commprof.plan.models import Model
from commprof.plan.predictions import Job, predict
from commprof.prediction.api import MORE_MEMORY, Promising, predict_command, promising_of, sweep_command
from commprof.prediction.candidates import candidates
from commprof.prediction.prediction_json import promising_json
from commprof.prediction.predictions import device_memory, predict_from, replayed_steps
from commprof.requested.wrappers.arguments import Tensor, Wrapper
from commprof.requested.wrappers.ddp import Ddp
from unit.commprof.prediction.made_runs import LAYERS, PARAMETERS, WIDTH, config, request, run, sent

NUMEL = LAYERS * WIDTH * WIDTH
ZERO = "zero_optimization."


def base(given, *, ns_per_byte=0.0, latency_ms=1.0, calibration=None, **changes):
    """Return a replayed run of the configuration ``given``. A message takes a latency and a time per byte."""
    made = run(sent(given), lambda each: latency_ms + each.payload_bytes * ns_per_byte / 1e6, **changes)
    return replayed_steps(made, request(given), calibration)


def calibration(ms, **others):
    """Return a calibration in which all operations take ``ms``, a number or a function of the size.

    ``others`` gives different values for single operations.
    """
    sizes = [1, 4, 16, *range(10_000, 650_000, 10_000)]

    def time(op, size):
        of_op = others.get(op, ms)
        return round((of_op(size) if callable(of_op) else of_op) * 1e6)

    timings = {
        op: tuple(Timing(size, time(op, size), 0, 0, 5) for size in sizes)
        for op in ("all_reduce", "reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast")
    }
    return Calibration(
        created="", torch="", backend="gloo", backend_version=None, device="cpu", dtype="float32", world_size=2,
        hosts=("a",), machine={}, timings=timings,
    )  # fmt: skip


def listed(given, runtime="zero_runtime"):
    return [
        (key.removeprefix(ZERO), value)
        for each in candidates(request(given, runtime))
        for key, value in each.setting.items()
    ]


def test_candidates_follow_from_the_config():
    assert listed(config()) == [
        ("stage", 0),
        ("stage", 1),
        ("gradient_reduction", "all_reduce"),
        ("gradient_reduction", "reduce_to_owner"),
        ("gradient_reduction", "reduce_scatter"),
        ("reduce_bucket_size", NUMEL),
        ("reduce_bucket_size", 2000),
        ("overlap_comm", True),
    ]


def test_of_a_recorded_default_that_exceeds_the_model_only_smaller_buckets_are_tried():
    sizes = [
        value for key, value in listed(config(reduce_bucket_size=500_000_000)) if key == "reduce_bucket_size"
    ]
    assert sizes == [NUMEL // 10]


def test_a_named_reduction_keeps_its_stages():
    tried = listed(config(gradient_reduction="reduce_to_owner"))
    assert [value for key, value in tried if key == "stage"] == [1]


def test_stage_0_may_send_buckets_by_three_keys_at_once():
    keys = {
        "gradient_reduction": "all_reduce",
        "overlap_comm": True,
        "reduce_bucket_size": NUMEL // 10,
    }
    settings = [each.setting for each in candidates(request(config(stage=0)))]
    assert {f"{ZERO}{key}": value for key, value in keys.items()} in settings
    # overlap_comm alone has no effect at this stage.
    settings = [each.setting for each in candidates(request(config(stage=0, overlap_comm=True)))]
    assert {f"{ZERO}{key}": value for key, value in keys.items()} in settings
    assert not any(len(each.setting) == 3 for each in candidates(request(config(stage=0, **keys))))
    assert not any(len(each.setting) == 3 for each in candidates(request(config(stage=0), "deepspeed")))


def test_deepspeed_has_its_own_two_keys():
    tried = listed(config(), "deepspeed")
    assert ("reduce_scatter", False) in tried and ("use_multi_rank_bucket_allreduce", False) in tried
    assert "gradient_reduction" not in dict(tried)


def test_stage_3_is_left_and_not_entered():
    def stages(*given):
        return [value for key, value in listed(*given) if key == "stage"]

    assert stages(config(stage=3)) == [0, 1, 2] and 3 not in stages(config(stage=0))
    assert stages(config(stage=3), "deepspeed") == [1, 2]
    assert stages(config(stage=3, gradient_reduction="reduce_scatter")) == [1, 2]
    assert stages(config(stage=3, offload_param={"device": "cpu"})) == []


@pytest.mark.parametrize(
    ("arguments", "caps"),
    [
        # The model has 40 MiB. The values are one bucket for all, four times the given size, and a quarter of
        # it.
        ({"bucket_cap_mb": 4}, [40.4, 16.0, 1.0]),
        ({"bucket_cap_mb": 20}, [40.4, 5.0]),
        ({}, [40.4, 6.25]),  # torch's default is 25 MiB.
    ],
)
def test_ddp_has_other_bucket_sizes(arguments, caps):
    tensors = tuple(Tensor(f"w{number}", (1024, 1024), "float32", True) for number in range(10))
    rules = Ddp(Wrapper("ddp", "", (0, 1), tensors, arguments=arguments))
    of_ddp = Request(wrapped=SimpleNamespace(rules=[rules], names="DistributedDataParallel"))
    assert [each.setting for each in candidates(of_ddp)] == [{"ddp.bucket_cap_mb": cap} for cap in caps]


def test_messages_that_hide_behind_compute_are_offered_with_the_numbers_of_predict():
    made = base(config(), ns_per_byte=100)  # Four messages of 8 ms run one after another.
    best = promising_of(made)
    (change,) = best.changes
    assert change.setting == {f"{ZERO}overlap_comm": True} and change.recorded == {
        f"{ZERO}overlap_comm": False
    }
    (same,) = predict_from(made, [(change.setting, config(overlap_comm=True))]).settings
    assert (change.step_ns, change.low_ns, change.high_ns) == tuple(
        map(round, (same.median_ns, same.low_ns, same.high_ns))
    )
    assert change.gain_ns == best.recorded_ns - change.step_ns > 0
    assert 0 < change.gain_low_ns == best.recorded_ns - change.high_ns < change.gain_ns < change.gain_high_ns
    assert "overlaps with compute instead of 0%" in change.why and "gradient_reduce is exposed" in change.why
    assert change.words == ["--set", f"{ZERO}overlap_comm=true"]
    assert predict_command("r", change).endswith(f"predict r --set {ZERO}overlap_comm=true")
    assert sweep_command("r", change, best) is None  # The program names no configuration file.
    program = best._replace(program=["--nproc", "2", "--", "train.py", "--config", "ds.json"])
    assert sweep_command("r", change, program, "c.json") == (
        f"commprof sweep --predict r --calibration c.json --set {ZERO}overlap_comm=false,true --nproc 2 -- train.py "
        "--config ds.json"
    )


def test_gains_below_their_uncertainty_are_not_offered():
    best = promising_of(base(config(), latency_ms=0.1))
    assert best.changes == [] and best.tried > 0 and not best.reason
    assert best.sentences[0] == (
        f"{best.tried} changes were predicted; none is faster than the recorded setting by more than its uncertainty."
    )


def test_what_needs_a_calibration_is_counted_and_says_what_to_measure():
    best = promising_of(base(config()))
    assert {tuple(setting) for setting, _ in best.refused} == {
        (f"{ZERO}gradient_reduction",),
        (f"{ZERO}reduce_bucket_size",),
        (f"{ZERO}stage",),
    }
    assert best.uncalibrated == len(best.refused)
    assert "commprof calibrate --nproc 2 --out calibration.json" in best.sentences[1]


def test_with_a_calibration_one_bucket_is_offered_and_says_what_memory_it_needs():
    given = config(reduce_bucket_size=WIDTH * WIDTH)
    # The number of messages determines the cost.
    made = base(given, latency_ms=8, calibration=calibration(8))
    best = promising_of(made)
    assert best.uncalibrated == 0 and len(best.changes) == 3
    by_setting = {tuple(each.setting.items()): each for each in best.changes}
    one = by_setting[(f"{ZERO}reduce_bucket_size", NUMEL),]
    assert one.more_memory > MORE_MEMORY
    plain, more = (
        each.memory_bytes
        for each in predict_from(made, [({}, None), (one.setting, config(reduce_bucket_size=NUMEL))]).settings
    )
    assert one.more_memory == pytest.approx(more / plain - 1)
    medians = [each.step_ns for each in best.changes]
    assert medians == sorted(medians)


def test_of_values_that_are_about_as_fast_the_one_of_least_memory_is_offered():
    # There are eight messages. Buckets that are ten times larger make two messages.
    given = config(reduce_bucket_size=4000)
    quick = calibration(lambda size: 8 if 20_000 < size < 60_000 else 0.1)
    best = promising_of(base(given, latency_ms=8, calibration=quick))
    key = f"{ZERO}reduce_bucket_size"
    assert [each.setting[key] for each in candidates(request(given)) if key in each.setting] == [
        NUMEL,
        40_000,
        400,
    ]
    assert [each.setting[key] for each in best.changes if list(each.setting) == [key]] == [40_000]


def test_two_values_of_a_key_are_not_both_offered():
    best = promising_of(
        base(config(reduce_bucket_size=WIDTH * WIDTH), latency_ms=8, calibration=calibration(8))
    )
    singles = [key for each in best.changes if len(each.setting) == 1 for key in each.setting]
    assert len(singles) == len(set(singles))


def test_a_combination_is_offered_where_it_gains_more_than_its_parts():
    given = config(gradient_reduction="reduce_to_owner")
    made = base(given, latency_ms=12, calibration=calibration(6, reduce=12))
    best = promising_of(made)
    together = [each for each in best.changes if len(each.setting) > 1]
    singles = [each for each in best.changes if len(each.setting) == 1]
    assert len(together) == 1 and best.changes[0] is together[0]
    assert all(together[0].step_ns < each.step_ns for each in singles)


def test_a_run_of_unknown_requests_says_so():
    made = base(config())._replace(request=Request("no config was recorded"))
    best = promising_of(made)
    assert best.changes == [] and best.sentences == [
        "No change can be predicted: what this run requested is not known (no config was recorded), so there is no setting "
        "to try."
    ]


def test_the_json_has_whole_nanoseconds():
    best = promising_of(base(config(), ns_per_byte=100))
    told = json.loads(json.dumps(promising_json(best)))
    (change,) = told["changes"]
    assert change["gain_ns"] == {
        "median": best.changes[0].gain_ns,
        "low": best.changes[0].gain_low_ns,
        "high": best.changes[0].gain_high_ns,
    }
    assert told["tried"] == best.tried and told["reason"] is None


def test_without_a_candidate_that_sends_something_else_a_sentence_says_so():
    assert Promising([], recorded_ns=10, ranks=2).sentences == [
        "There is no change to try: no candidate sends anything else than the run."
    ]


def test_the_memory_is_that_of_plan_for_the_framework_and_the_backend_of_the_run():
    given = config()
    parameters = [each._replace(requires_grad=bool(number)) for number, each in enumerate(PARAMETERS)]
    for runtime in ("zero_runtime", "deepspeed"):
        of_run = request(given, runtime)
        of_run.parameters = parameters
        job = Job(Model(parameters, None, ""), 2, 2, "gloo", framework=runtime)
        assert device_memory(of_run, None, 2) == sum(each.device for each in predict(given, job).memory)


def test_exposed_time_and_critical_path_are_parts_of_the_predicted_step():
    """The replay of a run takes longer than the run.

    The step is therefore predicted relative to the replay, and its parts are scaled in the same way.
    """
    made = base(config(), ns_per_byte=100)
    stretched = made._replace(recorded=made.recorded._replace(step_ns=made.recorded.step_ns * 0.5))
    (plain,), (half,) = (predict_from(each, [({}, None)]).settings for each in (made, stretched))
    assert half.median_ns == pytest.approx(plain.median_ns / 2)
    assert sum(half.exposed_ns.values()) == pytest.approx(sum(plain.exposed_ns.values()) / 2)
    assert sum(half.path.values()) == pytest.approx(half.median_ns, rel=0.01)


def test_that_none_is_faster_is_said_of_predicted_changes_alone():
    best = Promising([], recorded_ns=10, refused=[({"a": 1}, "no")], ranks=2)
    assert best.sentences == ["1 change was refused: no."]

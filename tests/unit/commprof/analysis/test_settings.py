"""Test ``settings()``, which finds the settings that differ between runs, and the labels of the settings."""

import json
import random

import pandas as pd
import pytest

from commprof.analysis import api
from commprof.analysis.compare.settings import (
    differing_keys,
    flatten,
    in_order,
    script_arguments,
    settings_frame,
    settings_of,
    short_names,
    telling_keys,
    value_text,
)
from support.runs import SyntheticRun


def zero(**keys):
    return {"train_batch_size": 8, "zero_optimization": {"stage": 2, **keys}}


def labels(*runs: SyntheticRun) -> list[str]:
    names = [f"run-{number}" for number in range(len(runs))]
    return [setting.label for setting in settings_of([run.open().manifest for run in runs], names)]


def test_only_the_keys_that_differ_make_the_label_by_their_shortest_names():
    found = labels(
        SyntheticRun(config=zero(reduce_scatter=True, use_multi_rank_bucket_allreduce=False)),
        SyntheticRun(config=zero(reduce_scatter=False, use_multi_rank_bucket_allreduce=False)),
        SyntheticRun(config=zero(reduce_scatter=True, use_multi_rank_bucket_allreduce=True)),
    )
    assert found == [
        "reduce_scatter=true, use_multi_rank_bucket_allreduce=false",
        "reduce_scatter=false, use_multi_rank_bucket_allreduce=false",
        "reduce_scatter=true, use_multi_rank_bucket_allreduce=true",
    ]


def test_a_missing_key_is_said_to_be_absent():
    assert labels(SyntheticRun(config=zero()), SyntheticRun(config=zero(overlap_comm=True))) == [
        "overlap_comm not set",
        "overlap_comm=true",
    ]


def test_a_run_without_config_differs_by_all_keys_of_the_other():
    assert labels(SyntheticRun(), SyntheticRun(config={"zero_optimization": {"stage": 1}})) == [
        "stage not set",
        "stage=1",
    ]


def test_an_empty_section_beside_a_filled_one_is_no_difference_of_its_own():
    assert labels(
        SyntheticRun(config={"zero_optimization": {}}),
        SyntheticRun(config={"zero_optimization": {"stage": 2}}),
    ) == ["stage not set", "stage=2"]
    assert labels(SyntheticRun(config={"bf16": {}}), SyntheticRun(config={"a": 1, "bf16": {}})) == [
        "a not set",
        "a=1",
    ]


def test_names_stay_apart_where_their_last_parts_are_equal():
    keys = ["fp16.enabled", "optimizer.params.lr", "scheduler.params.lr", "zero_optimization.stage"]
    assert short_names(keys, keys) == {
        "fp16.enabled": "fp16.enabled",
        "optimizer.params.lr": "optimizer.params.lr",
        "scheduler.params.lr": "scheduler.params.lr",
        "zero_optimization.stage": "stage",
    }


def test_a_key_that_equals_the_end_of_another_keeps_its_own_name():
    assert short_names(["lr"], ["lr", "params.lr"]) == {"lr": "lr"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (None, "null"),
        (5e8, "500000000"),
        (500_000_000, "500000000"),
        (1e-3, "0.001"),
        ("auto", "auto"),
        ([1, 2.5], "[1, 2.5]"),
        ({}, "{}"),
    ],
)
def test_values_are_written_as_json_without_quotes(value, text):
    assert value_text(value) == text


def test_equal_numbers_in_different_spelling_do_not_differ_but_text_and_truth_do():
    assert differing_keys([{"size": 5e8}, {"size": 500_000_000}]) == []
    assert differing_keys([{"a": True}, {"a": "true"}]) == ["a"]
    assert differing_keys([{"a": 1}, {"a": True}]) == ["a"]
    assert differing_keys([{"a": None}, {}]) == ["a"]


def test_keys_that_only_name_places_are_left_out():
    first = {
        "tensorboard": {"output_path": "a", "job_name": "x"},
        "nvme_path": "/a",
        "dump_dir": "p",
        "stage": 1,
    }
    second = {
        "tensorboard": {"output_path": "b", "job_name": "y"},
        "nvme_path": "/b",
        "dump_dir": "q",
        "stage": 2,
    }
    assert labels(SyntheticRun(config=first), SyntheticRun(config=second)) == ["stage=1", "stage=2"]


def test_world_size_script_and_nccl_tuning_make_settings_of_their_own():
    assert labels(SyntheticRun(world_size=2, config=zero()), SyntheticRun(world_size=4, config=zero())) == [
        "world_size=2",
        "world_size=4",
    ]
    assert labels(SyntheticRun(script="a/one.py"), SyntheticRun(script="b/two.py")) == [
        "script=one.py",
        "script=two.py",
    ]
    assert labels(
        SyntheticRun(environment={"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}),
        SyntheticRun(environment={"NCCL_ALGO": "Tree", "OMP_NUM_THREADS": "2"}),
    ) == ["NCCL_ALGO=Ring", "NCCL_ALGO=Tree"]


def test_arguments_of_the_script_count_but_not_the_name_of_its_config_file():
    def run(*arguments):
        run = SyntheticRun(config=zero()).open()
        run.manifest.command = ["python", "train.py", *arguments]
        return run.manifest

    found = settings_of(
        [
            run("--config", "a.json", "--layers", "2", "--out-dir", "x"),
            run("--config=b.json", "--layers", "4", "--out-dir", "y"),
        ],
        ["a", "b"],
    )
    assert [setting.label for setting in found] == ["--layers=2", "--layers=4"]


def test_arguments_with_negative_numbers_several_values_and_none():
    assert script_arguments(["x.py", "--lr", "-1", "--sizes", "1", "2", "-v"], "x.py") == {
        "--lr": "-1",
        "--sizes": "1 2",
        "-v": True,
    }
    assert script_arguments(["torchrun", "--x", "1"], None) == {}


def test_runs_that_differ_in_nothing_share_one_label():
    assert labels(SyntheticRun(config=zero()), SyntheticRun(config=zero())) == ["same settings"] * 2
    assert labels(SyntheticRun(config=zero())) == ["run-0"]


def sweep(value, repeat=0, **settings):
    key = "zero_optimization.reduce_scatter"
    return SyntheticRun(
        config=zero(reduce_scatter=value, follows_from_it=str(value)),
        sweep={"name": "s1", "point": {key: value}, "repeat": repeat},
        **settings,
    )


def test_a_sweep_labels_its_runs_by_its_point_alone():
    assert labels(sweep(True), sweep(False), sweep(True, repeat=1)) == [
        "reduce_scatter=true",
        "reduce_scatter=false",
        "reduce_scatter=true",
    ]
    assert labels(sweep(True), sweep(True, repeat=1)) == ["reduce_scatter=true"] * 2
    assert labels(sweep(False)) == ["reduce_scatter=false"]


def test_the_engine_that_a_failed_run_of_a_sweep_never_started_is_no_setting():
    manifests = [sweep(value).open().manifest for value in (True, False, "other")]
    manifests[0].engine = manifests[1].engine = "zero_runtime 0.1.0"
    names = ["a", "b", "c"]
    assert [one.label for one in settings_of(manifests, names)] == [
        "reduce_scatter=true",
        "reduce_scatter=false",
        "reduce_scatter=other",
    ]
    manifests[1].engine = "deepspeed 0.19.8"
    assert settings_of(manifests, names)[1].label == "reduce_scatter=false, engine=deepspeed 0.19.8"


def test_a_sweep_is_shown_in_the_order_in_which_it_ran_and_other_runs_as_given():
    swept = [sweep(True, started_realtime_ns=5), sweep(False, started_realtime_ns=3)]
    assert in_order([run.open().manifest for run in swept]) == [1, 0]
    others = [SyntheticRun(started_realtime_ns=5), SyntheticRun(started_realtime_ns=3)]
    assert in_order([run.open().manifest for run in others]) == [0, 1]


def test_the_frame_has_one_row_per_run_and_a_column_of_text_per_key():
    manifests = [SyntheticRun(config=zero(overlap_comm=value)).open().manifest for value in (True, False)]
    frame = settings_frame(settings_of(manifests, ["a", "b"]), ["a", "b"])
    pd.testing.assert_frame_equal(
        frame,
        pd.DataFrame(
            {
                "run": ["a", "b"],
                "label": ["overlap_comm=true", "overlap_comm=false"],
                "zero_optimization.overlap_comm": ["true", "false"],
            },
            dtype="str",
        ),
    )
    assert settings_frame([], []).columns.tolist() == ["run", "label"]


def test_flatten_keeps_lists_and_empty_mappings_as_values():
    assert flatten({"a": {"b": {"c": 1}}, "d": [1, {"e": 2}], "f": {}}) == {
        "a.b.c": 1,
        "d": [1, {"e": 2}],
        "f": {},
    }


def test_runs_of_unlike_scripts_are_labelled_by_the_keys_that_tell_them_apart():
    """Twelve keys differ, and one of them has three values.

    The label contains only that key, and the values contain all keys.
    """
    first = {f"option_{number}": 1 for number in range(12)}
    runs = [
        SyntheticRun(config={**first, "lr": 0.1}),
        SyntheticRun(config={**dict.fromkeys(first, 2), "lr": 0.2}),
        SyntheticRun(config={**dict.fromkeys(first, 2), "lr": 0.3}),
        SyntheticRun(config={**dict.fromkeys(first, 2), "lr": 0.3}),
    ]
    assert labels(*runs) == ["lr=0.1", "lr=0.2", "lr=0.3", "lr=0.3"]
    found = settings_of([run.open().manifest for run in runs], ["a", "b", "c", "d"])
    assert all(len(setting.values) == 13 for setting in found)


def test_a_label_that_leaves_out_what_a_run_lacks_still_tells_all_settings_apart():
    same = dict.fromkeys(("k1", "k2", "k3", "k4", "k5"), 1)
    runs = [SyntheticRun(config=config) for config in ({"a": 1, **same}, {"a": 1, "b": 2}, {"b": 2, **same})]
    found = [
        (setting.label, setting.values) for setting in settings_of([r.open().manifest for r in runs], "xyz")
    ]
    assert len({label for label, _ in found}) == 3
    assert telling_keys([values for _, values in found]) == ["a", "k1"]


@pytest.mark.parametrize("seed", range(20))
def test_labels_are_equal_exactly_for_equal_settings(seed):
    draw = random.Random(seed)
    configs = [{f"k{n}": draw.randrange(2) for n in range(9) if draw.random() < 0.8} for _ in range(12)]
    found = settings_of(
        [SyntheticRun(config=config).open().manifest for config in configs], list("abcdefghijkl")
    )
    labelled: dict[str, set[tuple[str, ...]]] = {}
    for setting in found:
        labelled.setdefault(setting.label, set()).add(tuple(setting.values.values()))
    assert all(len(values) == 1 for values in labelled.values())
    assert len(labelled) == len({tuple(setting.values.values()) for setting in found})


def wrapped(kind: str, **arguments) -> SyntheticRun:
    """Return a run without a configuration and arguments whose model is wrapped.

    A second row is written when a hook is registered.
    """
    run = SyntheticRun(2)
    run.add_step(0)
    for rank in range(2):
        for time, given in enumerate(({**arguments, "comm_hook": "early"}, arguments)):
            who = {"rank": rank, "attempt": 0, "pid": run.pid(rank), "number": 0, "step": -1, "time_ns": time}
            texts = {"arguments": json.dumps(given), "parameters": "[]", "buffers": "[]"}
            run.add("wrappers", **who, wrapper=kind, unit="", group_ranks="0-1", **texts)
    return run


def labels_of(tmp_path, *runs: SyntheticRun) -> list[str]:
    paths = [run.write(tmp_path / f"run-{number}") for number, run in enumerate(runs)]
    return api.settings(paths)["label"].tolist()


def test_a_model_that_is_wrapped_otherwise_is_no_repeat(tmp_path):
    runs = wrapped("ddp", bucket_cap_mb=25), wrapped("fully_shard", reshard_after_forward=True)
    assert labels_of(tmp_path, *runs) == ["wrapper=ddp", "wrapper=fully_shard"]


def test_arguments_of_wrappers_tell_runs_apart(tmp_path):
    runs = wrapped("ddp", bucket_cap_mb=25), wrapped("fully_shard"), wrapped("ddp", bucket_cap_mb=4)
    assert labels_of(tmp_path, *runs) == [
        "wrapper=ddp, bucket_cap_mb=25",
        "wrapper=fully_shard",
        "wrapper=ddp, bucket_cap_mb=4",
    ]


def test_repeats_of_a_wrapped_model_stay_repeats(tmp_path):
    runs = wrapped("ddp", bucket_cap_mb=25), wrapped("ddp", bucket_cap_mb=25)
    assert labels_of(tmp_path, *runs) == ["same settings", "same settings"]


def test_a_config_that_differs_says_enough(tmp_path):
    runs = wrapped("ddp"), wrapped("fully_shard")
    for run, value in zip(runs, (1, 2), strict=True):
        run.config = {"seed": value}
    assert labels_of(tmp_path, *runs) == ["seed=1", "seed=2"]

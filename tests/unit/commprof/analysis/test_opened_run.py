"""Test that ``commprof.open(run)`` answers every question of the dashboard pages.

A run can also be read while it is being finalized.
"""

from __future__ import annotations

import inspect

import pandas as pd
import pytest

import commprof
from commprof.analysis import api
from commprof.analysis.browse.notebook import OpenedRun
from commprof.cli import runs
from commprof.errors import TraceError
from support.detailed_runs import detailed_run

# Answers with a different name in ``api``, parts of other answers, and functions that are not about one run.
CALLED = {
    "bucket_flushes": "buckets",
    "bucket_content": "bucket",
    "records_page": "records",
    "bandwidth_both": "bandwidth",
    "compare_both": "comparison",
}
PARTS = {
    "advice",
    "resources",
    "rank_bytes",  # The fields of comparison().
    "backends",
    "health",
    "step_numbers",
    "has_exposed_times",  # The fields of overview(), step_times() and exposure_per_step().
}
NOT_OF_A_RUN = {
    "finalise",
    "has_index",
    "records_csv",
    "fingerprint",
    "predicted_steps",
    "run_names",
    "unrun_settings",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return detailed_run(steps=4).write(tmp_path_factory.mktemp("opened") / "run")


def test_there_is_a_method_for_every_question_about_runs():
    questions = {
        name
        for name in api.__all__
        if inspect.isfunction(getattr(api, name))
        and {"run", "runs"} & set(inspect.signature(getattr(api, name)).parameters)
    }
    methods = {CALLED.get(name, name) for name in questions - NOT_OF_A_RUN - PARTS}
    assert not methods - set(dir(OpenedRun))


@pytest.mark.long
def test_methods_answer_as_the_functions_do(path):
    run = commprof.open(path)
    for name in (
        "traffic_by_setting",
        "exposure_per_step",
        "straggling",
        "bandwidth_times",
        "bucket_means",
        "topology",
    ):
        mine = getattr(run, name)()
        theirs = getattr(api, name)([path] if name == "traffic_by_setting" else path)
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (mine, theirs)), strict=True):
            pd.testing.assert_frame_equal(a, b)
    assert run.records(limit=3).total == len(run.table("collectives"))
    assert len(run.records([api.Filter("op", "=", "all_gather")], sort="-payload_bytes", limit=2).rows) == 2
    first = run.records(limit=1).rows.iloc[0]
    assert run.record(int(first["rank"]), int(first["seq"])) is not None
    assert len(run.timeline().bars) == run.index()["records"]
    assert run.step_window(0) == api.step_window(path, 0)
    assert run.bandwidth(steps=(0, 1))["collectives"].sum() < run.bandwidth()["collectives"].sum()
    assert set(run.matrix(op="all_gather").attrs) == set(run.matrix().attrs)


@pytest.mark.long
def test_a_run_stands_beside_others(path, tmp_path):
    other = detailed_run(seed=1, steps=4).write(tmp_path / "other")
    run = commprof.open(path)
    assert len(run.settings(other)) == 2
    assert list(run.comparison(other).settings["label"]) == list(run.compare(commprof.open(other))["label"])
    assert len(run.reduction_levels(other)) >= 4


def replaced(path, name="steps.parquet"):
    file = path / name
    content = file.read_bytes()
    file.rename(path / "old")
    file.write_bytes(content)
    (path / "old").unlink()


def test_a_run_that_is_finalised_meanwhile_is_asked_again(path, monkeypatch):
    monkeypatch.setattr(runs, "_PAUSE_S", 0.0)
    asked = []

    def question(found):
        asked.append(found)
        if len(asked) < 3:
            replaced(path)
            raise TraceError("steps.parquet cannot be read: it is gone")
        return "the answer"

    found, answer = runs.asked([str(path)], question)
    assert answer == "the answer"
    assert len(asked) == 3
    assert found is asked[-1]


def test_an_error_of_a_run_that_is_still_is_told_at_once(path):
    def question(found):
        raise TraceError("it is damaged")

    with pytest.raises(TraceError, match="it is damaged"):
        runs.asked([str(path)], question)


def test_a_run_whose_files_never_rest_is_one_clear_message(path, monkeypatch):
    monkeypatch.setattr(runs, "_PAUSE_S", 0.0)

    def question(found):
        replaced(path)
        raise TraceError("steps.parquet cannot be read: it is gone")

    with pytest.raises(TraceError, match="another command is finalizing the run"):
        runs.asked([str(path)], question)

"""Test the questions of the API over run directories, by path and as opened runs."""

import re
from importlib import resources
from pathlib import Path

import pandas as pd
import pytest

from commprof import schema
from commprof.analysis import api
from commprof.analysis.columns.answers import ANSWERS, GROUPINGS
from commprof.errors import TraceError, UsageError
from support.runs import SyntheticRun


def zero(**keys):
    return {"zero_optimization": {"stage": 2, **keys}}


def small_run(**settings) -> SyntheticRun:
    """Return a run of two ranks and two steps.

    The run has a broadcast before the first step and a bfloat16 all_reduce of 300 elements in each step.
    """
    run = SyntheticRun(**settings)
    run.add_parameters({"a": 200, "b": 100}, dtype="bfloat16")
    run.add_collective("broadcast", payload_bytes=600, step=-1, phase="init", peer=0, dtype="bfloat16")
    for step in (0, 1):
        run.add_step(step, duration_ns=1_000_000, loss=2.0 - step)
        run.add_collective(
            "all_reduce",
            payload_bytes=600,
            step=step,
            dtype="bfloat16",
            purpose="gradient_reduce",
            exposed_ns=7,
        )
    return run


@pytest.fixture
def traces(tmp_path) -> Path:
    small_run(config=zero(reduce_scatter=False), started_realtime_ns=10**18).write(tmp_path / "first")
    small_run(config=zero(reduce_scatter=True), started_realtime_ns=10**18 + 5).write(tmp_path / "second")
    return tmp_path


def test_a_run_may_be_a_path_a_text_or_opened(traces):
    by_path = api.traffic(traces / "first", by=("op",))
    pd.testing.assert_frame_equal(by_path, api.traffic(str(traces / "first"), by=("op",)))
    pd.testing.assert_frame_equal(by_path, api.traffic(api.open_run(traces / "first"), by=("op",)))
    assert by_path[["op", "collectives", "records", "payload_bytes", "wire_bytes"]].values.tolist() == [
        ["all_reduce", 2, 4, 1200, 1200.0],
        ["broadcast", 1, 2, 600, 300.0],
    ]


def test_overview_of_a_whole_run(traces):
    facts = api.overview(traces / "first")
    assert facts["name"] == "first"
    assert (facts["state"], facts["world_size"], facts["backends"]) == ("complete", 2, "gloo")
    assert (facts["steps"], facts["whole_steps"], facts["final_loss"]) == (2, 2, 1.0)
    assert (facts["collectives"], facts["records"], facts["payload_bytes"]) == (3, 6, 1800)
    assert facts["wire_bytes"] == 1500.0
    assert facts["step_time_ns"] == 1_000_000
    assert facts["requested_op"] == "all_reduce"
    assert (facts["recorder_ns"], facts["recorder_share"]) == (1_000_000, 1e-4)
    assert facts["moved_sent_bytes"] is None
    assert "no counters" in facts["moved_reason"]
    assert facts["notes"] == []


def test_overview_says_what_is_missing(tmp_path):
    run = small_run(world_size=3, state="killed", recorded_ranks=(0, 2), lost=4, unseen=2)
    run.add_collective("all_reduce", payload_bytes=8, host_ns=None, step=1)
    facts = api.overview(run.write(tmp_path / "killed"))
    assert facts["state"] == "killed"
    assert (facts["ranks_expected"], facts["ranks_recorded"], facts["missing_ranks"]) == (3, 2, [1])
    assert (facts["lost"], facts["unseen"], facts["incomplete"]) == (4, 2, 2)
    assert any("rank 1" in note for note in facts["notes"])


def test_overview_adds_up_the_counters_where_there_are_any(tmp_path):
    run = small_run()
    for time_ns, sent in ((0, 100), (10, 900)):
        for device in ("eth0", "lo"):
            run.add(
                "wire",
                host="h",
                device=device,
                kind="interface",
                time_ns=time_ns,
                sent_bytes=sent,
                received_bytes=sent // 2,
            )
    path = run.write(tmp_path / "counted")
    facts = api.overview(path)
    assert (facts["moved_sent_bytes"], facts["moved_received_bytes"], facts["moved_reason"]) == (
        1600,
        800,
        None,
    )
    assert api.moved(path).attrs["reason"] is None


def test_an_empty_run_has_facts_too(tmp_path):
    facts = api.overview(SyntheticRun(world_size=1).write(tmp_path / "empty"))
    assert (facts["collectives"], facts["steps"], facts["records"]) == (0, 0, 0)
    assert facts["step_time_ns"] is None
    assert facts["final_loss"] is None
    assert facts["backends"] is None


def test_find_runs_lists_the_newest_first_and_the_unreadable_with_the_reason(traces):
    broken = traces / "nested" / "broken"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text('{"schema_version": 999}')
    frame = api.find_runs(traces)
    assert frame["name"].tolist() == ["second", "first", "nested/broken"]
    assert frame["state"].tolist() == ["complete", "complete", "unreadable"]
    assert frame["steps"].tolist() == [2, 2, pd.NA]
    assert frame["records"].tolist() == [6, 6, pd.NA]
    assert frame["backend"].tolist()[:2] == ["gloo", "gloo"]
    assert frame["setting"].tolist()[0] == "stage=2, reduce_scatter=true"
    assert "schema version 999" in frame["note"].tolist()[2]
    assert frame["finalised"].tolist() == [True, True, False]


def test_find_runs_of_a_run_is_that_run_and_of_nothing_is_nothing(traces, tmp_path_factory):
    assert api.find_runs(traces / "first")["name"].tolist() == ["first"]
    empty = api.find_runs(tmp_path_factory.mktemp("empty"))
    assert len(empty) == 0
    assert list(empty.columns) == list(api.describe_columns("find_runs"))


def test_two_runs_of_one_name_are_told_apart(tmp_path):
    paths = [small_run(config=zero(a=i)).write(tmp_path / name / "run") for i, name in enumerate("xy")]
    assert api.settings(paths)["run"].tolist() == ["x/run", "y/run"]


def test_compare_over_directories(traces):
    frame = api.compare([traces / "first", traces / "second"])
    assert frame["label"].tolist() == ["reduce_scatter=false", "reduce_scatter=true"]
    assert frame["requested_op"].tolist() == ["all_reduce", "reduce_scatter"]
    assert frame["issued_op"].tolist() == ["all_reduce", "all_reduce"]
    assert frame["wire_bytes_per_step"].tolist() == [600.0, 600.0]


def test_requested_is_from_config_and_parameters_alone(traces):
    frame = api.requested(traces / "second")
    assert frame.attrs["reason"] is None
    row = frame[frame["purpose"] == "gradient_reduce"].iloc[0]
    assert (row["requested_op"], row["issued_op"]) == ("reduce_scatter", "all_reduce")
    assert frame["payload_bytes"].dtype == "int64"


@pytest.mark.parametrize(
    ("engine", "op"), [("zero_runtime", "all_to_all"), ("deepspeed 0.19.8", "all_reduce")]
)
def test_requested_is_by_the_rules_of_the_runs_own_runtime(engine, op):
    run = small_run(config={"zero_optimization": {"stage": 2, "gradient_reduction": "reduce_scatter"}})
    run.add_parameters({"w": 100})
    opened = run.open()
    opened.manifest.engine = engine
    frame = api.requested(opened)
    assert frame[frame["purpose"] == "gradient_reduce"]["issued_op"].tolist() == [op]


def test_requested_says_why_there_is_nothing(tmp_path):
    no_config = api.requested(small_run().write(tmp_path / "no-config"))
    assert len(no_config) == 0
    assert no_config.attrs["reason"] == "no config was recorded"
    config = {"zero_optimization": {"stage": 2}, "communication": {"topology": [1, 2, 2]}}
    grid = api.requested(small_run(config=config).write(tmp_path / "grid"))
    assert len(grid) == 0
    assert "communication.topology" in grid.attrs["reason"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("effective", "op"),
    [
        ({"reduce_scatter": True, "gradient_reduction": "multi_rank_all_reduce"}, "reduce_scatter"),
        ({"reduce_scatter": False, "gradient_reduction": "all_reduce"}, "all_reduce"),
        # The configuration names the reduction explicitly.
        ({"reduce_scatter": True, "gradient_reduction": "all_reduce"}, "all_reduce"),
        ({"reduce_scatter": True, "gradient_reduction": "reduce_scatter"}, "reduce_scatter"),
    ],
)
def test_a_script_without_config_file_asked_for_what_its_engine_says(tmp_path, effective, op):
    run = small_run(effective_config=zero(**effective))
    assert api.overview(run.write(tmp_path / "run"))["requested_op"] == op


def test_every_table_of_the_schema_has_its_columns_and_integers(traces):
    for name, declared in schema.TABLES.items():
        frame = api.table(traces / "first", name)
        assert list(frame.columns) == list(declared.names)
        for column in declared.columns:
            if column.type.startswith("int"):
                assert frame[column.name].dtype == ("Int64" if column.nullable else "int64")
    assert len(api.table(traces / "first", "collectives")) == 6


def test_unknown_names_are_refused_with_the_choice(traces):
    with pytest.raises(UsageError, match=r"no table 'colectives'.*collectives, groups"):
        api.table(traces / "first", "colectives")
    with pytest.raises(UsageError, match="choose from traffic"):
        api.describe_columns("nothing")
    with pytest.raises(TraceError, match="does not exist"):
        api.traffic(traces / "third")


def test_every_column_of_every_answer_is_described(traces):
    first, second = traces / "first", traces / "second"
    answers = {
        "traffic": api.traffic(first),
        "step_times": api.step_times(first),
        "moved": api.moved(first),
        "requested": api.requested(second),
        "traffic_by_setting": api.traffic_by_setting([first, second]),
        "find_runs": api.find_runs(traces),
        "compare": api.compare([first, second]).drop(columns="zero_optimization.reduce_scatter"),
    }
    for name, frame in answers.items():
        described = api.describe_columns(name)
        assert set(frame.columns) <= set(described), name
        assert all(column.doc for column in described.values())
        for column in frame.columns:
            byte_measure = "bytes" in column or column.startswith("wire_")
            assert (described[column].unit == "bytes") == byte_measure, (name, column)


def test_the_queries_keep_to_sql_that_other_engines_read_too():
    texts = [
        re.sub(r"--.*", "", file.read_text("utf-8"))
        for file in (resources.files("commprof.analysis") / "queries").iterdir()
        if file.name.endswith(".sql")
    ]
    assert texts
    for text in texts:
        assert not re.search(
            r'"|`|//|::|\[|\bqualify\b|\bpivot\b|\bexclude\b|\bfilter\s*\(', text, re.IGNORECASE
        )


def test_the_page_about_analysis_lists_every_column_as_it_is_declared():
    page = (Path(__file__).parents[4] / "docs" / "analysis.md").read_text("utf-8")
    for name, answer in ANSWERS.items():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        listed = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w/]*) \| (yes)? ?\| (.*) \|$", section, re.MULTILINE)
        assert listed == [
            (column.name, column.type, column.unit, "yes" if column.nullable else "", column.doc)
            for column in answer.columns
        ]
    assert all(f"`{column}`" in page for column in GROUPINGS)

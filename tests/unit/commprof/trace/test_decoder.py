"""Test how rank files are read: complete, truncated, damaged and hostile."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commprof.errors import SchemaError, TraceError
from commprof.schema import COLLECTIVES, RECORD
from commprof.trace.rank_files.decoder import read_rank
from commprof.trace.rank_files.events import parse_events
from commprof.trace.rank_files.writer import PAGE, encode_row
from support.rank_files import write_rank
from support.sample import examples


def test_a_whole_rank_reads_back(tmp_path):
    trace = read_rank(write_rank(tmp_path, rank=1, world=4, records=12))
    rows = trace.collectives().to_pylist()
    assert [row["seq"] for row in rows] == list(range(12))
    assert rows[7] == {
        **dict.fromkeys(COLLECTIVES.names),
        "rank": 1,
        "attempt": 0,
        "pid": 4_000_001,
        "seq": 7,
        "step": 1,
        "micro_step": 0,
        "phase": "backward",
        "op": "all_reduce",
        "api": "all_reduce",
        "backend_method": "allreduce",
        "backend": "gloo",
        "device": "cpu",
        "reduce_op": "SUM",
        "dtype": "float32",
        "num_tensors": 1,
        "sizes": "8",
        "numel": 8,
        "input_bytes": 32,
        "output_bytes": 32,
        "payload_bytes": 32,
        "pg": "0",
        "pg_seq": 7,
        "group_desc": "default_pg",
        "group_ranks": "0-3",
        "group_size": 4,
        "group_rank": 1,
        "peer": -1,
        "is_async": False,
        "is_p2p": False,
        "captured": False,
        "call_site": "train.py:7 step",
        "thread": "MainThread",
        "layer": "process_group",
        "status": "ok",
        "issue_ns": 7010,
        "return_ns": 7020,
        "wait_begin_ns": 7020,
        "wait_end_ns": 7090,
        "exposed_ns": 80,
    }
    assert [step["step"] for step in trace.tables["steps"].to_pylist()] == [0, 1, 2]
    assert trace.entry["ended"] and trace.entry["records"] == 12 and trace.entry["torn"] == 0


def test_a_call_that_raised_takes_no_number_though_the_next_was_recorded_before_it_raised(tmp_path):
    trace = read_rank(write_rank(tmp_path, records=8, raised=(2, 5)))
    rows = trace.collectives().to_pylist()
    assert [row["pg_seq"] for row in rows] == [0, 1, -3, 2, 3, -5, 4, 5]
    assert [row["status"] for row in rows] == ["ok", "ok", "raised", "ok", "ok", "raised", "ok", "ok"]
    assert trace.entry["raised"] == 2


@pytest.mark.parametrize(("steps", "is_shared"), [((0, 0, 1, 1), True), ((0, 1, 2, 3), False)])
def test_engines_of_one_step_number_share_steps(tmp_path, steps, is_shared):
    """The adapter of DeepSpeed writes such steps.

    Only the first engine reports the begin of a step, and each engine reports the end.
    """
    stem = write_rank(tmp_path, records=0, ended=False)
    rows = [("config", {"config": {"zero_optimization": {"stage": 1}}, "step": -1})] * 2
    for step in steps:
        rows.append(("step", {"step": step, "ended": True, "is_told": True, "time_ns": 10}))
        # This end is inferred.
        rows.append(("step", {"step": step, "ended": True, "is_told": False, "time_ns": 11}))
    with stem.with_name(f"{stem.name}.events").open("ab") as events:
        events.writelines(encode_row(*row) for row in rows)
    engines = read_rank(stem).engines
    assert [each.get("share_steps") for each in engines] == ([True, True] if is_shared else [])


def test_every_table_has_the_columns_of_the_schema(tmp_path):
    from commprof.schema import TABLES

    trace = read_rank(write_rank(tmp_path))
    for name, table in {**trace.tables, "collectives": trace.collectives()}.items():
        assert tuple(table.column_names) == TABLES[name].names


@settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cut=st.integers(0, PAGE + 20 * RECORD.size))
def test_a_file_cut_anywhere_keeps_what_stands_before_the_cut(tmp_path_factory, cut):
    stem = write_rank(tmp_path_factory.mktemp("run"), records=20)
    file = stem.with_name(stem.name + ".records")
    file.write_bytes(file.read_bytes()[:cut])
    try:
        trace = read_rank(stem)
    except TraceError as error:
        assert cut < 64 and "cut off" in str(error)
        return
    assert trace.entry["records"] == max(0, cut - PAGE) // RECORD.size


@settings(
    max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    damage=st.lists(
        st.tuples(st.integers(0, PAGE + 8 * RECORD.size - 1), st.integers(0, 255)), min_size=1, max_size=12
    )
)
def test_damaged_records_are_read_or_refused_and_never_crash(tmp_path_factory, damage):
    stem = write_rank(tmp_path_factory.mktemp("run"), records=8)
    file = stem.with_name(stem.name + ".records")
    data = bytearray(file.read_bytes())
    for position, value in damage:
        data[position] = value
    file.write_bytes(data)
    try:
        trace = read_rank(stem)
    except TraceError:
        return
    assert trace.entry["records"] + trace.entry["torn"] <= 8
    assert len(trace.collectives()) == trace.entry["records"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(
    max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_events_are_read_or_left_out_and_never_crash(tmp_path_factory, data):
    stem = write_rank(tmp_path_factory.mktemp("run"), records=8)
    file = stem.with_name(stem.name + ".events")
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    row = data.draw(st.sampled_from(lines))
    key = data.draw(st.sampled_from(sorted(row)))
    row[key] = data.draw(_JSON)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        trace = read_rank(stem)
    except TraceError:
        return
    assert trace.entry["records"] + trace.entry["torn"] == 8


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("step", {"step": 0, "micro_step": 0, "time_ns": 1 << 63}),
        ("step", {"step": 0, "micro_step": 0, "time_ns": -(1 << 63) - 1}),
        ("step", {"step": None, "micro_step": 0, "time_ns": 5, "automatic": True}),
        ("outside_step", {"phase": "evaluation", "begin_ns": 1 << 70, "end_ns": 1 << 71, "passes": 1}),
        ("outside_step", {"phase": ["evaluation"], "begin_ns": 5, "end_ns": 6, "passes": 1}),
        ("aggregate", {"step": 0, "sums": [[[], "all_reduce", None, None, "0", False, 5, 1, 1, 1, 5, None]]}),
    ],
)
def test_a_damaged_line_does_not_keep_the_others_from_being_read(tmp_path, kind, line):
    stem = write_rank(tmp_path, records=8)
    with stem.with_name(stem.name + ".events").open("ab") as events:
        events.write(encode_row(kind, line))
        events.write(encode_row("step", {"step": 3, "micro_step": 0, "time_ns": 9_000}))
    assert len(read_rank(stem).collectives()) == 8


@given(st.binary(max_size=300))
def test_anything_at_all_parses_as_events(data):
    events = parse_events(data)
    assert events.torn <= data.count(b"\n") + 1


def test_a_torn_line_and_a_torn_record_are_counted(tmp_path):
    stem = write_rank(tmp_path, records=6, ended=False)
    events = stem.with_name(stem.name + ".events")
    events.write_bytes(events.read_bytes() + b'{"kind":"metr')
    records = stem.with_name(stem.name + ".records")
    data = bytearray(records.read_bytes())
    # The bytes are the commit word of the third record.
    data[PAGE + 3 * RECORD.size - 4 : PAGE + 3 * RECORD.size] = bytes(4)
    records.write_bytes(data)
    trace = read_rank(stem)
    assert (trace.entry["records"], trace.entry["torn"], trace.entry["torn_events"]) == (5, 1, 1)
    assert not trace.entry["ended"]
    assert [row["seq"] for row in trace.collectives().to_pylist()] == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("damage", ["cut", "no size", "no ranks"])
def test_records_of_a_group_whose_line_is_damaged_are_left_out_and_counted(tmp_path, damage):
    """The wire bytes of these records cannot be modelled, and 0 B would be a wrong number."""
    stem = write_rank(tmp_path, records=6)
    file = stem.with_name(stem.name + ".events")
    lines = file.read_text().splitlines()
    (at,) = (number for number, line in enumerate(lines) if json.loads(line)["kind"] == "group")
    row = json.loads(lines[at])
    without = {"no size": "group_size", "no ranks": "group_ranks"}.get(damage)
    lines[at] = lines[at][:30] if without is None else json.dumps({**row, without: None})
    file.write_text("\n".join(lines) + "\n")
    trace = read_rank(stem)
    assert (trace.entry["records"], trace.entry["torn"]) == (0, 6)
    assert trace.entry["torn_events"] >= 2  # The lines are the group's line and the signature of its records.
    assert not len(trace.collectives())


def test_another_version_is_refused_by_name(tmp_path):
    stem = write_rank(tmp_path)
    file = stem.with_name(stem.name + ".records")
    data = bytearray(file.read_bytes())
    data[8:12] = (99).to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(SchemaError, match="schema version 99"):
        read_rank(stem)


def test_what_is_no_records_file_is_refused(tmp_path):
    stem = write_rank(tmp_path)
    stem.with_name(stem.name + ".records").write_bytes(b"GIF89a" + bytes(5000))
    with pytest.raises(TraceError, match="damaged"):
        read_rank(stem)
    with pytest.raises(TraceError, match="is not the name"):
        read_rank(tmp_path / "model")


LIKE = {"id": 1, "op": "all_to_all", "sizes": "2x3->2x3", "dtype": "float32"}
SPLIT = {
    "id": 2,
    "like": 1,
    "row_shapes": [[3], [3]],
    "row_bytes": [12, 12],
    "rows": [5, 4],
    "splits": [[5, 0], [1, 3]],
}


def test_a_signature_that_differs_by_its_splits_says_the_rest_like_another():
    events = parse_events(encode_row("signature", LIKE) + encode_row("signature", SPLIT))
    row = dict(events.interned("signature")[2])
    assert events.torn == 0
    assert row == {
        "id": 2,
        "op": "all_to_all",
        "dtype": "float32",
        "sizes": "4x3->5x3",
        "numel": 12,
        "input_bytes": 48,
        "output_bytes": 60,
        "payload_bytes": 48,
        "input_splits": "12,36",
        "output_splits": "60,0",
    }


@pytest.mark.parametrize(
    "damage",
    [
        {"like": 7},
        {"rows": [5]},
        {"rows": ["5", 4]},
        {"rows": [1 << 60, 4]},
        {"row_bytes": [12, 1 << 49]},
        {"row_shapes": [["3"], [3]]},
        {"row_shapes": 3},
        {"splits": [[5, 0], [1, -3]]},
        {"splits": [[5, True], [1, 3]]},
        {"splits": None},
        {"id": 1},
    ],
)
def test_a_damaged_line_of_splits_is_left_out_and_counted(damage):
    events = parse_events(encode_row("signature", LIKE) + encode_row("signature", {**SPLIT, **damage}))
    assert events.torn == 1
    assert list(events.interned("signature")) == [1]


@pytest.mark.parametrize(
    "damage",
    [
        {"counts": [1, "2"]},
        {"counts": []},
        {"counts": None},
        {"counts": [-1, 2]},
        {"counts": [1 << 60]},
        {"layer": 5},
        {"capacity": None},
        {"tokens": "x"},
        {"phase": 99},
        {"step": 1 << 40},
    ],
)
def test_a_damaged_line_of_an_expert_load_is_left_out_and_counted(tmp_path, damage):
    stem = write_rank(tmp_path)
    line = {"kind": "expert_load", "step": 1, "micro_step": 0, "phase": 2, "time_ns": 7000, "layer": "moe"}
    line |= {"capacity": 3, "tokens": 6, "counts": [5, 1]}
    whole = read_rank(stem).entry["torn_events"]
    with stem.with_name(stem.name + ".events").open("a") as file:
        file.write(json.dumps(line) + "\n" + json.dumps(line | damage) + "\n")
    trace = read_rank(stem)
    rows = trace.tables["expert_loads"].to_pylist()
    assert [(row["step"], row["expert"], row["tokens"], row["dropped"]) for row in rows] == [
        (1, 0, 5, 2),
        (1, 1, 1, 0),
    ]
    assert trace.entry["torn_events"] == whole + 1


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "killed"])
@pytest.mark.parametrize("lines", [0, 2])
def test_steps_whose_sums_a_killed_rank_had_not_written_have_no_end(tmp_path, ended, lines):
    """The first three of the steps 0 to 3 have ended.

    A rank writes the sums of a step when the second step after it begins.
    """
    stem = write_rank(tmp_path, records=20, ended=False, options={"aggregate": True})
    with stem.with_name(f"{stem.name}.events").open("ab") as events:
        for step in range(lines):
            sums = ["backward", "all_reduce", None, None, "0", False, 5, 160, 160, 160, 50, None]
            events.write(encode_row("aggregate", {"step": step, "sums": [sums]}))
        if ended:
            events.write(encode_row("end", {"time_ns": 20_000}))
    steps = read_rank(stem).tables["steps"].to_pylist()
    assert [row["end_ns"] is not None for row in steps] == [True, True, ended, False]

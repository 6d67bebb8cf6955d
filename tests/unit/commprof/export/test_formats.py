"""Test exports in other formats, each with an independent reader.

Protobuf is read by its wire format, with code in this file.
"""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from commprof import schema
from commprof.cli import main
from commprof.errors import UsageError
from commprof.export.chakra import export_chakra
from commprof.export.csv import check_csv, export_csv
from commprof.export.database import export_database
from commprof.export.parquet import export_parquet
from commprof.export.perfetto import export_perfetto
from commprof.prediction.api import promising
from support.predictable_runs import predictable_run
from support.runs import SyntheticRun

pytestmark = pytest.mark.shared_answers


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code or 0


def make(path: Path, reduction="all_reduce", config=None) -> Path:
    run = SyntheticRun(world_size=3, config=config or {"zero_optimization": {"stage": 2}})
    run.add_collective("broadcast", payload_bytes=64, step=-1, phase="init", peer=0)
    for step in range(2):
        run.add_step(step, begin_ns=1_000_000 * step, end_ns=1_000_000 * (step + 1), loss=2.0 - step)
        for bucket, size in enumerate((36, 120)):
            run.add_collective(
                reduction,
                payload_bytes=size,
                step=step,
                purpose="gradient_reduce",
                bucket=bucket,
                exposed_ns=300,
                call_site='<script>alert(1)</script> "quoted", a.py:3 f',
            )
        run.add_collective("all_gather", payload_bytes=300, step=step, group=(0, 2), pg="sub")
        for sender, receiver in ((0, 2), (2, 0), (0, 2)):
            run.add_collective(
                "send", payload_bytes=40, ranks=(sender,), peer=receiver, step=step, is_async=True
            )
            run.add_collective("recv", payload_bytes=40, ranks=(receiver,), peer=sender, step=step)
        run.add_collective("barrier", step=step)
    return run.write(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("formats") / "run")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


# Tables


def test_parquet_and_duckdb_hold_what_the_csv_holds(run, tmp_path):
    export_csv(run, tmp_path / "csv", empty=True)
    export_parquet(run, tmp_path / "parquet", empty=True)
    export_database(run, tmp_path / "duckdb", empty=True)
    with duckdb.connect(str(tmp_path / "duckdb" / "run.duckdb"), read_only=True) as database:
        for name in (*schema.TABLES, "comparison", "traffic_by_setting", "traffic_by_group", "runs"):
            texts = rows_of(tmp_path / "csv" / f"{name}.csv")
            rows = pq.read_table(tmp_path / "parquet" / f"{name}.parquet").to_pylist()
            stored = database.sql(f'SELECT * FROM "{name}"').to_arrow_table().to_pylist()
            assert rows == stored
            assert len(rows) == len(texts)
            for row, text in zip(rows, texts, strict=True):
                for column, value in row.items():
                    if isinstance(value, bool):
                        assert text[column] == str(value).lower()
                    elif isinstance(value, int | float):
                        assert float(text[column]) == value
                    else:
                        assert text[column] == (value or "")
        said = database.sql(
            "SELECT comment FROM duckdb_columns() WHERE table_name = 'collectives' AND column_name = 'issue_ns'"
        ).fetchall()
    assert said == [(schema.COLLECTIVES.column("issue_ns").doc + " (ns)",)]
    field = pq.read_schema(tmp_path / "parquet" / "collectives.parquet").field("payload_bytes")
    assert field.metadata[b"unit"] == b"bytes" and field.metadata[b"description"].startswith(
        b"S of nccl-tests"
    )


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["csv", "parquet", "duckdb"])
def test_several_runs_stand_in_one_export(tmp_path, kind):
    a = make(tmp_path / "a", config={"zero_optimization": {"stage": 2, "reduce_scatter": True}})
    b = make(tmp_path / "b", "reduce", {"zero_optimization": {"stage": 2, "reduce_scatter": False}})
    assert command("export", a, b, "--format", kind, "--out", tmp_path / "out") == 0
    if kind == "csv":
        rows = rows_of(tmp_path / "out" / "collectives.csv")
        compared = rows_of(tmp_path / "out" / "comparison.csv")
    elif kind == "parquet":
        rows = pq.read_table(tmp_path / "out" / "collectives.parquet").to_pylist()
        compared = pq.read_table(tmp_path / "out" / "comparison.parquet").to_pylist()
    else:
        with duckdb.connect(str(tmp_path / "out" / "run.duckdb")) as database:
            rows = database.sql("SELECT * FROM collectives").to_arrow_table().to_pylist()
            compared = database.sql("SELECT * FROM comparison").to_arrow_table().to_pylist()
    assert Counter(row["run"] for row in rows) == {"a": 37, "b": 37}
    assert {row["issued_op"] for row in compared} == {"all_reduce", "reduce"}
    assert {str(row["zero_optimization.reduce_scatter"]) for row in compared} == {"true", "false"}


@pytest.mark.long
def test_the_check_finds_what_was_changed(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert command("export", run, "--out", out) == 0
    assert check_csv(out, run) == []
    assert command("export", "--check", out) == 0
    capsys.readouterr()
    file = out / "collectives.csv"
    data = file.read_bytes()
    file.write_bytes(data.replace(b",120,", b",121,", 1))
    assert command("export", "--check", out) == 1
    told = capsys.readouterr().err
    assert "collectives.csv was changed after the export" in told and "'121' where the run has '120'" in told
    file.write_bytes(b"".join(data.splitlines(keepends=True)[:-1]))
    assert any("fewer rows" in problem for problem in check_csv(out, run))
    file.unlink()
    assert "collectives.csv is missing" in check_csv(out, run)
    assert command("export", "--check", tmp_path) == 1


@pytest.mark.long
def test_the_check_knows_another_run(run, tmp_path):
    export_csv(run, tmp_path / "out")
    other = make(tmp_path / "other", "reduce")
    problems = check_csv(tmp_path / "out", other)
    assert any("collectives.csv differs from the run: row 1" in problem for problem in problems) or any(
        "column op" in problem for problem in problems
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "needs a RUN"),
        (("{run}",), "--out"),
        (("{run}", "--format", "perfetto", "--table", "steps", "--out", "x"), "--table"),
    ],
)
def test_words_that_do_not_fit_are_refused(run, words, said, capsys):
    assert command("export", *(word.format(run=run) for word in words)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["chakra", "perfetto"])
def test_each_run_has_a_trace_of_its_own(tmp_path, kind):
    for name in ("a", "b"):
        make(tmp_path / "runs" / name)
    assert command("export", tmp_path / "runs", "--format", kind, "--out", tmp_path / "x") == 0
    for name in ("a", "b"):
        command("export", tmp_path / "runs" / name, "--format", kind, "--out", tmp_path / "alone" / name)
        files = sorted(path.name for path in (tmp_path / "alone" / name).iterdir())
        assert sorted(path.name for path in (tmp_path / "x" / name).iterdir()) == files
        for file in files:
            if file.startswith("trace"):
                alone = (tmp_path / "alone" / name / file).read_bytes()
                assert (tmp_path / "x" / name / file).read_bytes() == alone


def test_traces_of_several_runs_need_a_directory(tmp_path, capsys):
    runs = [make(tmp_path / name) for name in ("a", "b")]
    (tmp_path / "file").touch()
    assert command("export", *runs, "--format", "perfetto", "--out", tmp_path / "file") == 1
    assert f"{tmp_path}/file/a cannot be written" in capsys.readouterr().err


# Perfetto


def trace_of(run, tmp_path):
    export_perfetto(run, tmp_path / "trace")
    return json.loads((tmp_path / "trace" / "trace.json").read_text())["traceEvents"]


def test_each_record_is_a_slice_of_its_rank_and_group(run, tmp_path):
    events = trace_of(run, tmp_path)
    slices = [each for each in events if each["ph"] == "X" and each["cat"] != "step"]
    export_csv(run, tmp_path / "csv", tables=["collectives"])
    rows = rows_of(tmp_path / "csv" / "collectives.csv")
    assert Counter(
        (str(each["pid"]), each["name"], str(each["args"]["payload_bytes"])) for each in slices
    ) == Counter((row["rank"], row["op"], row["payload_bytes"]) for row in rows)
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {threads[each["pid"], each["tid"]].split(" #")[0] for each in slices} == {
        "default_pg (0-2)",
        "group sub (0,2)",
    }
    assert {e["args"]["name"].split(" (")[0] for e in events if e["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
        "rank 2",
    }
    first = min(int(row["issue_ns"]) for row in rows)
    assert min(each["ts"] for each in slices) * 1000 == first - min(first, 0)
    steps = [each for each in events if each["ph"] == "X" and each["cat"] == "step"]
    assert Counter(each["name"] for each in steps) == {"step 0": 3, "step 1": 3}


def test_slices_of_one_thread_never_overlap(run, tmp_path):
    by_thread = defaultdict(list)
    for each in trace_of(run, tmp_path):
        if each["ph"] == "X":
            by_thread[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_arrows_join_one_collective_across_ranks_and_sends_with_their_recvs(run, tmp_path):
    events = trace_of(run, tmp_path)
    at = {(e["pid"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X" and e["cat"] != "step"}
    arrows = defaultdict(list)
    for each in events:
        if each["ph"] in "stf":
            arrows[each["id"]].append((each["ph"], at[each["pid"], each["tid"], each["ts"]]))
    for ends in arrows.values():
        kinds = [kind for kind, _ in ends]
        assert kinds == ["s", *["t"] * (len(ends) - 2), "f"]
        names = {slice_["name"] for _, slice_ in ends}
        if names & {"send", "recv"}:
            assert names == {"send", "recv"}
            (a, b) = (slice_ for _, slice_ in ends)
            assert (a["pid"], a["args"]["peer"]) == (b["args"]["peer"], b["pid"])
            assert a["args"]["payload_bytes"] == b["args"]["payload_bytes"]
        else:
            assert len(names) == 1
            assert len({slice_["args"]["pg_seq"] for _, slice_ in ends}) == 1
    sizes = Counter(len(ends) for ends in arrows.values())
    # The run has 1 broadcast, and 2 steps with 2 reductions and a barrier on 3 ranks. On 2 ranks there are 2
    # all_gathers and 6 messages.
    assert sizes == {3: 1 + 2 * 3, 2: 2 + 6}


# Chakra traces are read with the wire format of protobuf and the field numbers of the published schema only.

ATTRIBUTE_VALUES = {7: "int32_val", 9: "int64_val", 13: "uint64_val", 27: "bool_val", 29: "string_val"}


def varint(data, place):
    number = shift = 0
    while True:
        byte = data[place]
        place += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, place


def fields(data):
    place, found = 0, defaultdict(list)
    while place < len(data):
        key, place = varint(data, place)
        if key & 7 == 0:
            value, place = varint(data, place)
        else:
            assert key & 7 == 2
            length, place = varint(data, place)
            value, place = data[place : place + length], place + length
        found[key >> 3].append(value)
    return found


def numbers(values):
    """Return the numbers of a repeated integer field, packed or not."""
    found = []
    for value in values:
        if isinstance(value, int):
            found.append(value)
            continue
        place = 0
        while place < len(value):
            number, place = varint(value, place)
            found.append(number)
    return found


def attributes(values):
    found = {}
    for value in values:
        each = fields(value)
        (kind,) = set(each) - {1, 2}
        raw = each[kind][0]
        found[each[1][0].decode()] = raw.decode() if kind == 29 else raw
    return found


def read_trace(path):
    data = path.read_bytes()
    place, messages = 0, []
    while place < len(data):
        length, place = varint(data, place)
        messages.append(data[place : place + length])
        place += length
    nodes = []
    for message in messages[1:]:
        each = fields(message)
        nodes.append(
            {
                "id": each[1][0] if each[1] else 0,
                "name": each[2][0].decode(),
                "type": each[3][0],
                "deps": numbers(each[5]),
                "start": each[6][0] if each[6] else 0,
                "duration": each[7][0] if each[7] else 0,
                "attributes": attributes(each[10]),
            }
        )
    return fields(messages[0]), nodes


def test_chakra_traces_hold_every_operation_with_its_bytes_and_group(run, tmp_path):
    export_chakra(run, tmp_path / "et")
    groups = json.loads((tmp_path / "et" / "comm_groups.json").read_text())
    assert sorted(groups.values()) == [[0, 1, 2], [0, 2]]
    export_csv(run, tmp_path / "csv", tables=["collectives"])
    rows = rows_of(tmp_path / "csv" / "collectives.csv")
    kinds = {0: "all_reduce", 2: "all_gather", 5: "broadcast", 9: "barrier"}
    sent, received = Counter(), Counter()
    for rank in range(3):
        metadata, nodes = read_trace(tmp_path / "et" / f"trace.{rank}.et")
        assert metadata[1] == [b"0.0.4"]
        assert len({node["id"] for node in nodes}) == len(nodes)
        known = set()
        for node in nodes:
            assert set(node["deps"]) <= known, (
                "a node depends on one before it only, so nothing waits for itself"
            )
            known.add(node["id"])
        told = Counter()
        for node in nodes:
            about = node["attributes"]
            if node["type"] == 7:
                op = kinds[about["comm_type"]]
                told[
                    op, about["comm_size"] * (2 if op == "all_gather" else 1), tuple(groups[about["pg_name"]])
                ] += 1
            elif node["type"] in (5, 6):
                pair = about["comm_src"], about["comm_dst"], about["comm_size"]
                (sent if node["type"] == 5 else received)[pair] += 1
                assert rank == (about["comm_src"] if node["type"] == 5 else about["comm_dst"])
            else:
                assert node["type"] == 4 and node["name"] == "compute"
        expected = Counter(
            (row["op"], int(row["payload_bytes"]), schema.parse_ranks(row["group_ranks"]))
            for row in rows
            if int(row["rank"]) == rank and row["op"] not in ("send", "recv")
        )
        assert told == expected
    assert sent == received == {(0, 2, 40): 4, (2, 0, 40): 2}


def test_chakra_compute_is_what_the_host_did_between(tmp_path):
    synthetic = SyntheticRun(world_size=2)
    synthetic.add_step(0, begin_ns=0, end_ns=100_000_000)
    sync = {"host_ns": 2_000_000, "wait_end_ns": 5_000_000}
    # The host is blocked until 5 ms.
    synthetic.add_collective("all_reduce", payload_bytes=8, issue_ns=1_000_000, **sync)
    synthetic.add_collective(
        "all_reduce",
        payload_bytes=16,
        issue_ns=7_000_000,
        is_async=True,
        wait_begin_ns=10_000_000,
        wait_end_ns=14_000_000,
    )
    # The call is never waited for, so no node depends on it.
    synthetic.add_collective("barrier", issue_ns=15_500_000, is_async=True)
    export_chakra(synthetic.write(tmp_path / "run"), tmp_path / "et")
    _, nodes = read_trace(tmp_path / "et" / "trace.0.et")
    compute = [node for node in nodes if node["type"] == 4]
    assert [node["duration"] for node in compute] == [0, 0, 2000, 3000, 1500]
    operations = {node["id"]: node for node in nodes if node["type"] == 7}
    awaited = [sorted(set(node["deps"]) & set(operations)) for node in compute]
    first, second, third = sorted(operations)
    assert awaited == [[], [], [first], [], [second]]
    assert not any(third in node["deps"] for node in nodes)


def test_traces_of_an_earlier_export_of_more_ranks_do_not_stay(run, tmp_path):
    smaller = SyntheticRun(world_size=2)
    smaller.add_collective("all_reduce", payload_bytes=8)
    out = tmp_path / "et"
    export_chakra(run, out)
    (out / "trace.notes.et").touch()
    export_chakra(smaller.write(tmp_path / "smaller"), out, force=True)
    names = ["comm_groups.json", "provenance.json", "trace.0.et", "trace.1.et", "trace.notes.et"]
    assert sorted(file.name for file in out.iterdir()) == names


def test_a_restarted_job_is_no_chakra_trace(tmp_path):
    synthetic = SyntheticRun(world_size=2)
    for attempt in (0, 1):
        synthetic.add_step(0, attempt=attempt)
        synthetic.add_collective("all_reduce", payload_bytes=8, attempt=attempt)
    path = synthetic.write(tmp_path / "run")
    with pytest.raises(UsageError, match="restarted"):
        export_chakra(path, tmp_path / "et")
    events = trace_of(path, tmp_path)
    assert len({each["pid"] for each in events}) == 4
    assert not (tmp_path / "et").exists()


def test_a_diverged_run_is_json_for_every_reader(tmp_path):
    run = SyntheticRun(world_size=2, config={"limit": float("inf")})
    for step, loss in enumerate((2.0, float("nan"), float("inf"))):
        run.add_step(step, loss=loss, grad_norm=loss)
    path = run.write(tmp_path / "run")

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    assert command("export", path, "--format", "perfetto", "--out", tmp_path / "out") == 0
    for file in (tmp_path / "out").iterdir():
        content = json.loads(file.read_text(), parse_constant=refuse)
        if file.name == "trace.json":
            steps = [event["args"] for event in content["traceEvents"] if event.get("cat") == "step"]
            assert [step["loss"] for step in steps[::2]] == [2.0, "nan", "inf"]


def test_a_trace_without_the_collectives_in_sums_says_so(tmp_path, capsys):
    run = SyntheticRun(world_size=1)
    row = {
        column.name: {"string": "0", "bool": False}.get(column.type, 0)
        for column in schema.TABLES["aggregates"].columns
    }
    run.rows["aggregates"].append({**row, "op": "all_reduce", "phase": "backward"})
    path = run.write(tmp_path / "run")
    assert command("export", path, "--format", "perfetto", "--out", tmp_path / "p") == 0
    assert "holds sums per step" in capsys.readouterr().err
    assert command("export", path, "--format", "chakra", "--out", tmp_path / "c") == 2
    assert "no single collectives (--aggregate)" in capsys.readouterr().err


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["csv", "parquet", "duckdb", "perfetto"])
def test_an_empty_run_is_exported_as_such(tmp_path, kind):
    path = SyntheticRun(world_size=2).write(tmp_path / "run")
    assert command("export", path, "--format", kind, "--out", tmp_path / "out") == 0
    assert command("export", path, "--format", kind, "--out", tmp_path / "out") == 2
    assert command("export", path, "--format", kind, "--out", tmp_path / "out", "--force") == 0


# Columns of schema 2


SENT = ((8, 0, 24), (4, 4, 4), (0, 40, 16))  # The bytes from each rank to each rank.


def uneven(path: Path) -> Path:
    """Write a run on three hosts with an all_to_all of these parts.

    The run also has an all_to_all with unreadable parts, and a gather with padding.
    """
    run = SyntheticRun(world_size=3)
    run.add_step(0, begin_ns=0, end_ns=1_000_000)
    for rank, row in enumerate(SENT):
        column = [other[rank] for other in SENT]
        run.add_collective(
            "all_to_all",
            ranks=(rank,),
            payload_bytes=sum(row),
            input_bytes=sum(row),
            output_bytes=sum(column),
            input_splits=None if len(set(row)) == 1 else ",".join(map(str, row)),
            output_splits=",".join(map(str, column)),
        )
    run.add_collective("all_to_all", payload_bytes=12, input_splits="?", output_splits="?")
    run.add_collective("all_gather", payload_bytes=300, padding_bytes=20, purpose="parameter_gather")
    run.rows["groups"] = run.table("groups").to_pylist()
    for row in run.rows["groups"]:
        row["host"] = f'host {row["rank"]}, "x"'
    return run.write(path)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["csv", "parquet", "duckdb"])
def test_splits_padding_and_hosts_come_out_as_they_went_in(tmp_path, kind):
    path = uneven(tmp_path / "run")
    assert command("export", path, "--format", kind, "--out", tmp_path / "out") == 0
    tables = {}
    for name in ("collectives", "groups"):
        if kind == "csv":
            rows = rows_of(tmp_path / "out" / f"{name}.csv")
            tables[name] = [{key: value or None for key, value in row.items()} for row in rows]
        elif kind == "parquet":
            tables[name] = pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist()
        else:
            with duckdb.connect(str(tmp_path / "out" / "run.duckdb")) as database:
                tables[name] = database.sql(f"SELECT * FROM {name}").to_arrow_table().to_pylist()
    for rank in range(3):
        rows = sorted(
            (r for r in tables["collectives"] if int(r["rank"]) == rank), key=lambda r: int(r["seq"])
        )
        exchange, unread, gather = rows
        # A list is parsed at its commas. No list means equal parts.
        sent = exchange["input_splits"] and [int(part) for part in exchange["input_splits"].split(",")]
        assert (sent or [4, 4, 4]) == list(SENT[rank])
        assert [int(part) for part in exchange["output_splits"].split(",")] == [row[rank] for row in SENT]
        assert (unread["input_splits"], unread["output_splits"]) == ("?", "?")
        assert (gather["input_splits"], int(gather["padding_bytes"]), exchange["padding_bytes"]) == (
            None,
            20,
            None,
        )
        assert {r["host"] for r in tables["groups"] if int(r["rank"]) == rank} == {f'host {rank}, "x"'}


def test_perfetto_and_chakra_show_splits_and_padding(tmp_path):
    path = uneven(tmp_path / "run")
    events = [each for each in trace_of(path, tmp_path) if each["ph"] == "X"]
    slices = [each["args"] for each in events if each["cat"] != "step"]
    export_chakra(path, tmp_path / "et")
    for rank in range(3):
        nodes = [
            node["attributes"]
            for node in read_trace(tmp_path / "et" / f"trace.{rank}.et")[1]
            if node["type"] == 7
        ]
        splits = None if rank == 1 else ",".join(map(str, SENT[rank]))
        exchange, unread, gather = nodes
        assert (exchange["comm_size"], exchange.get("input_splits")) == (sum(SENT[rank]), splits)
        assert exchange["output_splits"] == ",".join(str(row[rank]) for row in SENT)
        assert (unread["input_splits"], gather["padding_bytes"], "padding_bytes" in exchange) == (
            "?",
            20,
            False,
        )
    exchanges = {each.get("input_splits"): each["wire_bytes"] for each in slices if each["seq"] == 0}
    # The bytes to other ranks, without a rank's own part: 0 + 24, 4 + 4, 0 + 40.
    assert exchanges == {"8,0,24": 24, None: 8, "0,40,16": 40}
    assert [each["wire_bytes"] for each in slices if each.get("input_splits") == "?"] == [None] * 3
    assert [each["padding_bytes"] for each in slices if "padding_bytes" in each] == [20] * 3


# HTML


class Links(HTMLParser):
    """Collects the addresses that a page loads or links to, and its text."""

    def __init__(self):
        super().__init__()
        self.found, self.tags, self.words = [], Counter(), []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.found += [value for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_data(self, data):
        self.words.append(data)


def test_the_report_is_one_file_that_loads_nothing(tmp_path):
    hostile = "<script>alert(1)</script>"
    a = make(
        tmp_path / "a", config={"zero_optimization": {"stage": 2, "reduce_scatter": True, "note": hostile}}
    )
    b = make(tmp_path / "b", "reduce", {"zero_optimization": {"stage": 2, "reduce_scatter": False}})
    assert command("export", a, b, "--format", "html", "--out", tmp_path / "out") == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    text = (tmp_path / "out" / "report.html").read_text()
    page = Links()
    page.feed(text)
    assert page.found == ["#advice", "#comparison", "#run-1", "#run-2"], "links within the file"
    assert all(f'id="{link[1:]}"' in text for link in page.found)
    # The tables are the comparison and its figures, and the figures of each run.
    assert page.tags["table"] == (2 + 1) + 2 * 4
    assert hostile not in text
    words = " ".join(page.words)
    assert "What to set" in words and "<td>(absent)</td>" not in text
    assert "2 runs compared" in words and "reduce_scatter=true" in words and "Ledger:" in words
    assert '"showSendToCloud": false' in text


@pytest.mark.long
def test_the_report_of_one_run_has_contents_and_what_to_set(tmp_path):
    run = predictable_run(tmp_path / "run", gradient_ms=12)
    assert command("export", run, "--format", "html", "--out", tmp_path / "out") == 0
    text = (tmp_path / "out" / "report.html").read_text()
    page = Links()
    page.feed(text)
    assert page.found[:3] == ["#advice", "#run-1", "#run-1-ledger"] and len(page.found) > 4
    assert all(text.count(f'id="{link[1:]}"') == 1 for link in page.found)
    words = " ".join(page.words)
    assert all(words.count(title) > 1 for title in ("What to set", "Ledger: ", "Traffic by purpose"))
    best = promising(run)
    assert best.changes and all(" ".join(change.words) in words for change in best.changes)
    assert "less per step" in words and best.sentences[-1] in words


def test_the_html_report_draws_the_imbalance_of_experts(tmp_path):
    from support.expert_runs import uneven_experts

    run = uneven_experts().write(tmp_path / "run")
    assert command("export", run, "--format", "html", "--out", tmp_path / "out") == 0
    text = (tmp_path / "out" / "report.html").read_text()
    assert text.count("Imbalance of experts by layer") >= 2
    assert '"name":"blocks.0.moe"' in text and '"name":"blocks.1.moe"' in text

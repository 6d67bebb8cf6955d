"""Compare the fast computation of answers with plain loops or plain SQL, on random records of all kinds."""

import random
from collections import Counter
from fractions import Fraction
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pytest

from commprof.align.ranks.rank_arrivals import arrivals
from commprof.align.ranks.reference_clock import ReferenceClock
from commprof.analysis.relations.sql_engine import evaluate
from commprof.analysis.stragglers.rank_lateness import RankLateness
from commprof.analysis.time.stalls import stall_times
from commprof.analysis.time.transfers import ALSO, timed
from commprof.analysis.traffic.operation_totals import EVERY_COLUMN, operations, traffic
from commprof.ledger.records.backends import execution
from commprof.schema import TABLES, Op
from commprof.trace.reader import Scan
from commprof.trace.tables import empty_table, table_from_rows, write_parquet
from support.queries.operations import MEASURES, totals
from support.queries.operations import operations as counted
from support.random_records import random_records, random_steps

QUERIES = Path(__file__).parents[3] / "support" / "queries"
COMBINATIONS = [
    (),
    ("op",),
    ("step", "purpose"),
    ("pg", "group_ranks", "phase", "backend"),
    ("bucket", "owner"),
]
WHOLE_NUMBERS = ("collectives", "records", "payload_bytes", "padding_bytes", "timed", "tensors")
FAULTS = (
    "none",
    "name used again",
    "missing",
    "payload_bytes",
    "num_tensors",
    "padding_bytes",
    "purpose",
    "return_ns",
)
NO_SUMS = {name: empty_table(name) for name in ("aggregates", "groups")}


def oracle(question: str, tables: dict[str, pa.Table], **clauses: str) -> pa.Table:
    text = (QUERIES / f"{question}.sql").read_text("utf-8")
    with duckdb.connect() as engine:
        for name, rows in tables.items():
            engine.register(name, rows)
        return engine.sql(text.format(**clauses) if clauses else text).to_arrow_table()


def listed(names, table: str = "") -> str:
    return "".join(f"{table}{name}, " for name in names)


def rows_of(table: pa.Table, names: list[str]) -> list[tuple]:
    return sorted((tuple(row.values()) for row in table.select(names).to_pylist()), key=repr)


def scanned(records: pa.Table, folder: Path) -> Scan:
    """Return the records as one file per process, as in a large run."""
    files = []
    processes = list(zip(*(records[name].to_pylist() for name in ("rank", "attempt", "pid")), strict=True))
    for process in sorted(set(processes)):
        rows = records.filter(pa.array([each == process for each in processes]))
        files.append(folder / "rank-{:05}-{}-{}.parquet".format(*process))
        write_parquet(files[-1], rows)
    return Scan(tuple(files), empty_table("collectives"))


def with_executed(rows: list[dict]) -> list[dict]:
    """Add the bytes that the backends execute to each row, computed with the ledger's model."""
    for row in rows:
        row["executed_wire_bytes"] = None
        if not row["wire_bytes"] or row["op"] == Op.SEND:
            row["executed_wire_bytes"] = row["wire_bytes"]
        elif row.get("backend") == "gloo":
            sent = execution(row["op"], row["payload_bytes"], row["group_size"]).wire_bytes
            row["executed_wire_bytes"] = Fraction(sent)
    return rows


def plain_operations(tables: dict[str, pa.Table]) -> list[dict]:
    return with_executed(counted(tables["collectives"].to_pylist(), tables["aggregates"].to_pylist()))


def assert_totals(answer: pd.DataFrame, rows: list[dict], by: tuple[str, ...]) -> None:
    """Assert that ``answer`` contains the totals of ``rows``, ordered by the values of ``by``."""
    expected = totals(rows, by)
    assert set(answer.columns) == {*by, *MEASURES, "between_hosts_bytes"}
    answers = {}
    for values in answer.astype(object).where(answer.notna(), None).to_dict("records"):
        answers[tuple(values.pop(name) for name in by)] = values
    order = sorted(expected, key=lambda values: [(value is None, value) for value in values])
    assert list(answers) == order and len(answer) == len(order)
    for values, measures in expected.items():
        for name, value in measures.items():
            actual = answers[values][name]
            assert (actual is None) == (value is None), (values, name)
            if value is not None:
                # Means over ranks are summed in a different order and rounded.
                allowed = 1 if name in ("host_ns", "exposed_ns") else abs(value) / 10**12
                assert abs(Fraction(actual) - value) <= allowed, (values, name, actual, float(value))


def assert_operations(tables: dict[str, pa.Table]) -> None:
    """Assert that the operations of ``tables`` equal those counted in plain loops.

    The operations are summed by few columns and by all columns.
    """
    rows = plain_operations(tables)
    every = operations(tables)
    for by in COMBINATIONS:
        for summed in (operations(tables, by), every):
            assert_totals(traffic(summed, by), rows, by)
    # call_bytes divides one reduce of gloo among ranks. test_executed_ranks.py compares the column with
    # gloo's algorithm. The column span is compared with hand-computed values in
    # tests/unit/commprof/analysis/test_traffic.py.
    names = [name for name in EVERY_COLUMN if name not in ("call_bytes", "span")]
    single: dict[tuple, dict] = {}
    for row in every.to_pylist():
        sums = single.setdefault(tuple(row[name] for name in names), dict.fromkeys(WHOLE_NUMBERS, 0))
        for name in WHOLE_NUMBERS:
            sums[name] += row[name] or 0
        sums["wire_bytes"] = sums.get("wire_bytes", 0) + Fraction(int(row["wire_share"]), row["wire_ranks"])
    expected = totals(rows, names)
    assert single.keys() == expected.keys()
    for values, sums in single.items():
        assert sums == {name: expected[values][name] or 0 for name in sums}, values


def random_sums(seed: int, count: int) -> pa.Table:
    draw, rows = random.Random(seed), []
    for number in range(count):
        row = {column.name: number % 2 for column in TABLES["aggregates"].columns}
        row |= {name: draw.choice("ab") for name in ("purpose", "pg", "group_ranks")}
        row |= {"op": draw.choice(list(Op)), "intended_op": None, "phase": "backward", "group_size": 4}
        row |= {
            "is_p2p": row["op"] in (Op.SEND, Op.RECV),
            "rank": draw.randrange(4),
            "step": draw.randrange(3),
        }
        row |= {"calls": draw.randrange(1, 9), "payload_bytes": draw.randrange(1 << 40)}
        row |= {"host_ns": draw.randrange(999), "exposed_ns": draw.choice([None, draw.randrange(99)])}
        rows.append(row)
    return table_from_rows("aggregates", rows)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "seed, count, sums", [(0, 0, 0), (0, 300, 0), (1, 300, 200), (2, 300, 200), (3, 0, 200)]
)
def test_operations_of_records_that_disagree_in_everything(seed: int, count: int, sums: int):
    tables = {"collectives": random_records(seed, count), "aggregates": random_sums(seed, sums)}
    assert_operations(NO_SUMS | tables)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
def test_operations_whose_numbers_come_once(seed: int):
    records = random_records(seed, 300)
    records = records.set_column(
        records.column_names.index("pg_seq"), "pg_seq", pa.array(range(100, 400), pa.int64())
    )
    once = records.filter([op not in (Op.SEND, Op.RECV) for op in records["op"].to_pylist()])
    assert_operations({"collectives": once} | NO_SUMS)
    assert traffic(operations({"collectives": once} | NO_SUMS, ()), ())["collectives"].item() == len(once)


def records_of_groups(draw: random.Random, attempt: int, fault: str) -> list[dict]:
    """Return the records of three groups whose ranks issue the same collectives at different times.

    In the group of four ranks, some records have the given ``fault``.
    """
    rows, issued = [], Counter()
    for number, row in enumerate(random_records(draw.randrange(99), 240).to_pylist()):
        ranks = draw.choice([(0, 1, 2, 3), (0, 1, 2, 3), (0, 2), (1,)])
        row |= {"attempt": attempt, "pg": str(len(ranks)), "group_ranks": ",".join(map(str, ranks))}
        row |= {"group_size": len(ranks), "backend": draw.choice(["gloo", "gloo", "nccl", None])}
        row |= {"op": draw.choice(list(Op)), "num_tensors": draw.randrange(1, 4), "step": number // 60}
        if row["op"] not in (Op.SEND, Op.RECV):
            row |= {"pg_seq": issued[ranks], "peer": draw.choice(ranks)}
            issued[ranks] += 1
        if fault == "name used again":
            row["pg_seq"] %= 9
        for rank in ranks:
            begin = 1000 * number + draw.randrange(900)
            row |= {"rank": rank, "pid": rank, "seq": number, "issue_ns": begin}
            row |= {"return_ns": begin + draw.randrange(99), "exposed_ns": draw.randrange(99)}
            if rank == 3:  # Rank 3 has no record of its waits.
                row["exposed_ns"] = None
            changed = len(ranks) == 4 and draw.random() < 0.1
            if changed and fault in row:
                rows.append(
                    row | {fault: {"purpose": "metric", "return_ns": None}.get(fault, draw.randrange(99))}
                )
            elif not changed or fault != "missing":
                rows.append(dict(row))
    return rows


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
def test_operations_of_groups_whose_ranks_agree_or_nearly(seed: int):
    """Each attempt has a different fault. For ranks that agree, commprof reads the sums of only one rank."""
    draw = random.Random(seed)
    rows = [row for number, fault in enumerate(FAULTS) for row in records_of_groups(draw, number, fault)]
    tables = {"collectives": table_from_rows("collectives", rows)} | NO_SUMS
    assert_operations(tables)
    agreement = evaluate("agreement", tables, ("op",)).to_pylist()
    for fault, agree in (("none", {1}), ("name used again", {0}), ("missing", {0})):
        of_attempt = [row for row in agreement if row["attempt"] == FAULTS.index(fault) and row["pg"] == "4"]
        assert {row["agree"] for row in of_attempt} == agree, fault


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
def test_operations_of_groups_whose_ranks_all_agree(seed: int):
    """In this case differing_operations is evaluated only if a question asks for it."""
    rows = records_of_groups(random.Random(seed), 0, "none")
    tables = {"collectives": table_from_rows("collectives", rows)} | NO_SUMS
    assert set(evaluate("agreement", tables, ("op",))["agree"].to_pylist()) == {1}
    assert_operations(tables)
    assert len(evaluate("differing_operations", tables, ("op",))) == 0


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", [0, 300])
def test_times_in_arrays_are_those_of_the_plain_question(seed: int, count: int, tmp_path: Path):
    records, steps = random_records(seed, count), random_steps(seed)
    spread = scanned(records, tmp_path)
    for by in COMBINATIONS:
        named = [name for name in by if name != "step"]
        clauses = {"by": listed(named), "of_extent": listed(named, "e."), "of_cut": listed(named, "c.")}
        expected = oracle("standstill", {"collectives": records, "steps": steps}, **clauses)
        for given in (records, spread):
            found = stall_times(given, steps, by)
            assert rows_of(found, expected.column_names) == rows_of(expected, expected.column_names)


def random_arrivals(seed: int, count: int) -> pa.Table:
    """Return arrivals of collectives of four ranks, and of messages.

    Some ranks have their own clocks, and some collectives are not recorded by all ranks.
    """
    draw, rows = random.Random(seed), []
    for number in range(count):
        op = draw.choice([*Op, Op.BROADCAST, Op.ALL_REDUCE])
        group = draw.choice([(0, 1, 2, 3), (1, 2), (3,)])
        if op in (Op.SEND, Op.RECV):
            group = tuple(draw.sample(range(4), 2))
        begin = 1_000_000 * (1 + number)
        for rank in group:
            if draw.random() < 0.03:
                continue
            issue = begin + draw.randrange(900)
            is_first = rank == group[0]
            is_message = op in (Op.SEND, Op.RECV)
            wait = draw.choice([None, issue + draw.randrange(2000)])
            device = draw.choice([None, issue + draw.randrange(90_000)])
            told = {
                "rank": rank,
                "pid": rank,
                "attempt": number % 2,
                "seq": number,
                "step": number // 9 - 1,
                "micro_step": 0,
                "phase": "backward",
                "api": None,
                "backend_method": "x",
                "layer": "process_group",
                "op": (Op.SEND if is_first else Op.RECV) if is_message else op,
                "is_p2p": is_message,
                "peer": sum(group) - rank if is_message else draw.choice([group[0], group[0], -1]),
                "pg": str(len(group)),
                "pg_seq": number,
                "group_ranks": ",".join(map(str, sorted(group))),
                "group_size": len(group),
                "group_rank": 0,
                "backend": draw.choice([None, "gloo", "nccl"]),
                "device": draw.choice([None, "cpu", "cpu", "cuda:0"]),
                "dtype": draw.choice([None, "float32"]),
                "purpose": draw.choice([None, "gradient_reduce", "other"]),
                "status": draw.choice(["ok", "ok", "ok", "raised"]),
                "payload_bytes": draw.choice([0, 7, 4096, 1 << 40]),
                "num_tensors": 1,
                "numel": 1,
                "input_bytes": 0,
                "output_bytes": 0,
                "is_async": draw.random() < 0.5,
                "captured": False,
                "issue_ns": issue,
                "return_ns": draw.choice([None, issue + draw.randrange(3000)]),
                "wait_begin_ns": wait,
                "wait_end_ns": None if wait is None else wait + draw.randrange(120_000),
                "device_begin_ns": device,
                "device_end_ns": None if device is None else device + draw.randrange(5000),
                "exposed_ns": draw.choice([None, draw.randrange(2000)]),
            }
            rows.append(told)
    clocks = [
        {"rank": rank, "attempt": attempt, "pid": rank, "host": "h", "clock": "ab"[rank == 3]}
        for rank in range(4)
        for attempt in range(2)
    ]
    offsets = [
        {**clock, "reference_rank": 0, "time_ns": time, "offset_ns": 9 * clock["rank"], "error_ns": 40}
        for clock in clocks
        if clock["attempt"] == 0 and clock["rank"] in (0, 3)
        for time in (0, 10**9)
    ]
    return arrivals(
        table_from_rows("collectives", rows), ReferenceClock(clocks, offsets, one_host=False), ALSO
    )


@pytest.mark.parametrize("seed", range(3))
def test_times_of_transfers_are_those_of_the_plain_question(seed: int):
    arrived = random_arrivals(seed, 400)
    expected, found = oracle("bandwidth", {"arrivals": arrived}), timed(arrived)
    names = [name for name in expected.column_names if name != "time_source"]
    assert found.column_names == expected.column_names and found["time_ns"].null_count < len(found)
    assert found.select(names).to_pylist() == expected.select(names).to_pylist()
    assert found["time_source"].is_valid().to_pylist() == expected["time_source"].is_valid().to_pylist()
    assert set(found["time_source"].to_pylist()) == {None, "device", "sampled", "wait", "host"}


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
def test_lateness_of_ranks_is_that_of_the_plain_questions(seed: int):
    arrived = random_arrivals(seed, 400)
    taken = RankLateness()
    for begin, end in ((0, 500), (500, 501), (501, len(arrived))):
        taken.add(arrived.slice(begin, end - begin))
    given = {"arrivals": arrived}
    for frame, question in ((taken.stragglers(), "stragglers"), (taken.lateness(), "lateness")):
        expected = oracle(question, given).select(list(frame.columns)).to_pylist()
        whole = [
            {name: None if pd.isna(v) else v for name, v in row.items()} for row in frame.to_dict("records")
        ]
        assert [row["rank"] for row in whole] == [0, 1, 2, 3]
        for mine, theirs in zip(whole, expected, strict=True):
            for name, value in theirs.items():
                # Quantiles are reported as integers.
                wanted = round(value) if question == "lateness" else value
                assert mine[name] == (None if value is None else pytest.approx(wanted, rel=1e-12)), name
    counted = {(row["rank"], row["cause"]): row for row in oracle("waiting_causes", given).to_pylist()}
    for row in taken.causes().to_dict("records"):
        theirs = counted.get((row["rank"], row["cause"]), {"collectives": 0, "time_ns": 0})
        assert (row["collectives"], row["time_ns"]) == (theirs["collectives"], theirs["time_ns"])
        assert row["of_collectives"] == sum(
            r["collectives"] for key, r in counted.items() if key[0] == row["rank"]
        )
    taken.close()

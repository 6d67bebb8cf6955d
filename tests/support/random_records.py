"""Records with independent random values in each row, so that tests execute every branch of a query."""

import random

import pyarrow as pa

from commprof.schema import TABLES, Op
from commprof.trace.tables import table_from_rows


def random_records(seed: int, count: int) -> pa.Table:
    """Return records of four ranks with independent random numbers, groups, roots and times.

    The records of different ranks need not be consistent.
    """
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        row: dict[str, object] = {}
        for column in TABLES["collectives"].columns:
            if column.nullable and draw.random() < 0.3:
                row[column.name] = None
            elif column.values:
                row[column.name] = draw.choice(list(column.values)[:3])
            elif column.type == "string":
                row[column.name] = draw.choice("ab")
            elif column.type == "bool":
                row[column.name] = draw.random() < 0.5
            else:
                row[column.name] = draw.randrange(3)
        issue = draw.randrange(1_000)
        row |= {
            "seq": number,
            "op": draw.choice(
                [Op.ALL_REDUCE, Op.ALL_TO_ALL, Op.BARRIER, Op.REDUCE, Op.SEND, Op.RECV, Op.GATHER]
            ),
            "rank": draw.randrange(4),
            "pid": draw.randrange(2),
            "peer": draw.randrange(-1, 4),
            "pg_seq": draw.randrange(8),
            "step": draw.randrange(-1, 4),
            "group_size": draw.choice([1, 4]),
            "payload_bytes": draw.randrange(1 << 40),
            "device": draw.choice([None, "cpu", "cuda:0"]),
            # The plain reference does not support splits. analysis/test_matrix.py tests splits against results by hand.
            "input_splits": None,
            "output_splits": None,
            "issue_ns": issue,
            "return_ns": draw.choice([None, issue + 8 * draw.randrange(9)]),
        }
        row |= {
            name: draw.choice([None, issue + draw.randrange(-20, 200)])
            for name in ("wait_begin_ns", "wait_end_ns", "device_begin_ns", "device_end_ns")
        }
        row["exposed_ns"] = draw.choice([None, draw.randrange(-5, 150)])
        rows.append(row)
    return table_from_rows("collectives", rows)


def random_steps(seed: int) -> pa.Table:
    draw = random.Random(seed)
    rows = []
    for process in range(3 * 4 * 2):
        time = draw.randrange(200)
        for step in range(draw.randrange(5)):
            begin, time = time, time + draw.randrange(1, 300)
            ended = draw.random() < 0.9
            place = {"attempt": process // 8, "rank": process // 2 % 4, "pid": process % 2, "step": step}
            rows.append({**place, "begin_ns": begin, "end_ns": time if ended else None, "micro_steps": 1})
            if not ended:
                break
            time += draw.choice([0, 0, 40])
    return table_from_rows("steps", rows)

"""Synthetic runs whose rows are specified by hand, so that a test knows the right answers independently of the code.

::

    run = SyntheticRun(world_size=2, config={"zero_optimization": {"stage": 2}})
    run.add_step(0, begin_ns=0, end_ns=1_000, loss=2.0)
    run.add_collective("all_reduce", step=0, phase="backward", payload_bytes=400, purpose="gradient_reduce")
    run.write(tmp_path / "a-run")        # a finalized run directory
    run.open()                           # or an opened run without files: path, manifest, health, table(name)
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from commprof import schema
from commprof.trace.fingerprint import Opening
from commprof.trace.health import Health

ARROW_TYPES = {
    "int8": pa.int8(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "uint8": 1}
METHODS = {
    "all_reduce": "allreduce",
    "reduce": "reduce",
    "reduce_scatter": "_reduce_scatter_base",
    "all_gather": "_allgather_base",
    "broadcast": "broadcast",
    "all_to_all": "alltoall_base",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}
HOST = "host-a"
PID_BASE = 1000


def arrow_schema(table: str) -> pa.Schema:
    return pa.schema(
        [pa.field(c.name, ARROW_TYPES[c.type], nullable=c.nullable) for c in schema.TABLES[table].columns]
    )


class SyntheticRun:
    """The rows of one run, added by hand. The process id of a rank is ``1000 + 100 * attempt + rank``."""

    def __init__(
        self,
        world_size: int = 2,
        *,
        config: dict[str, Any] | None = None,
        script: str = "train.py",
        backend: str = "gloo",
        state: str = "complete",
        started_realtime_ns: int = 1_700_000_000_000_000_000,
        seconds: float = 10.0,
        sweep: dict[str, Any] | None = None,
        recorded_ranks: tuple[int, ...] | None = None,
        environment: dict[str, str] | None = None,
        effective_config: dict[str, Any] | None = None,
        recorder_ns: int = 1_000_000,
        lost: int = 0,
        torn: int = 0,
        unseen: int = 0,
    ) -> None:
        self.world_size = world_size
        self.config = config
        self.script = script
        self.backend = backend
        self.state = state
        self.started_realtime_ns = started_realtime_ns
        self.ended_realtime_ns = None if state == "running" else started_realtime_ns + int(seconds * 1e9)
        self.sweep = sweep
        self.recorded_ranks = tuple(range(world_size)) if recorded_ranks is None else recorded_ranks
        self.environment = environment or {}
        self.effective_config = effective_config
        self.recorder_ns = recorder_ns
        self.lost, self.torn, self.unseen = lost, torn, unseen
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in schema.TABLES}
        self._next_seq: dict[tuple[int, int], int] = {}
        self._next_pg_seq: dict[tuple[Any, ...], int] = {}
        self._clock = 1_000_000
        self._issued: dict[tuple[int, int], int] = {}  # the number of issued calls by attempt and step
        self.engines: list[dict[str, Any]] = []  # in order of creation: see commprof.trace.rank_files.engines
        self.hosts: dict[int, str] = {}  # by rank; empty if all ranks are on one host

    def pid(self, rank: int, attempt: int = 0) -> int:
        return PID_BASE + 100 * attempt + rank

    def add_step(
        self,
        step: int,
        *,
        begin_ns: int | None = None,
        end_ns: int | None = -1,
        duration_ns: int | None = None,
        ranks: tuple[int, ...] | None = None,
        attempt: int = 0,
        **columns: Any,
    ) -> None:
        """Add one ``steps`` row for each rank. With ``end_ns=None``, the step did not end."""
        if begin_ns is None:
            begin_ns = self._clock
        if duration_ns is not None:
            end_ns = begin_ns + duration_ns
        elif end_ns == -1:
            end_ns = begin_ns + 1_000_000
        self._clock = max(self._clock, end_ns or begin_ns)
        for rank in self.recorded_ranks if ranks is None else ranks:
            self.rows["steps"].append(
                {
                    "rank": rank,
                    "attempt": attempt,
                    "pid": self.pid(rank, attempt),
                    "step": step,
                    "begin_ns": begin_ns,
                    "end_ns": end_ns,
                    "micro_steps": 1,
                    **columns,
                }
            )

    def add_collective(
        self,
        op: str,
        *,
        payload_bytes: int = 0,
        step: int = 0,
        phase: str = "backward",
        group: tuple[int, ...] | None = None,
        pg: str = "0",
        pg_seq: int | None = None,
        ranks: tuple[int, ...] | None = None,
        attempt: int = 0,
        dtype: str | None = "float32",
        peer: int = -1,
        host_ns: int | None = 1_000,
        exposed_ns: int | None = None,
        issue_ns: int | None = None,
        **columns: Any,
    ) -> None:
        """Add one ``collectives`` row for each recorded rank of ``group``, or for each recorded rank of ``ranks``.

        ``payload_bytes`` is S of the schema and determines the input and output bytes of each rank. The call is
        issued within its step if the step was added before. With ``exposed_ns``, a wait ends ``exposed_ns`` ns after
        the call is issued.
        """
        place = self._place(step, attempt)
        group = tuple(range(self.world_size)) if group is None else group
        is_p2p = op in ("send", "recv")
        members = group if ranks is None else ranks
        members = tuple(rank for rank in members if rank in self.recorded_ranks)
        for rank in members:
            stream = (attempt, pg, group, is_p2p, rank)
            number = self._next_pg_seq.get(stream, 0) if pg_seq is None else pg_seq
            if columns.get("status") == "raised":
                number = -1 - number  # as in the reader, for a call that takes no number
            else:
                self._next_pg_seq[stream] = number + 1
            seq = self._next_seq.get((rank, attempt), 0)
            self._next_seq[rank, attempt] = seq + 1
            begin = place + rank if issue_ns is None else issue_ns
            wait_end_ns = None if exposed_ns is None else begin + exposed_ns
            input_bytes, output_bytes = _buffers(op, payload_bytes, len(group), rank, peer)
            self.rows["collectives"].append(
                {
                    "rank": rank,
                    "attempt": attempt,
                    "pid": self.pid(rank, attempt),
                    "seq": seq,
                    "step": step,
                    "micro_step": 0,
                    "phase": phase,
                    "op": op,
                    "api": op,
                    "backend_method": METHODS[op],
                    "backend": self.backend,
                    "device": "cpu",
                    "reduce_op": "SUM" if op in ("all_reduce", "reduce", "reduce_scatter") else None,
                    "dtype": dtype,
                    "num_tensors": 0 if op == "barrier" else 1,
                    "numel": payload_bytes // ITEM_BYTES[dtype or "uint8"],
                    "input_bytes": input_bytes,
                    "output_bytes": output_bytes,
                    "payload_bytes": payload_bytes,
                    "pg": pg,
                    "pg_seq": number,
                    "group_desc": "default_pg" if pg == "0" else "undefined",
                    "group_ranks": schema.format_ranks(group),
                    "group_size": len(group),
                    "group_rank": group.index(rank),
                    "peer": peer,
                    "is_async": False,
                    "is_p2p": is_p2p,
                    "captured": False,
                    "layer": "process_group",
                    "status": "incomplete" if host_ns is None else "ok",
                    "issue_ns": begin,
                    "return_ns": None if host_ns is None else begin + host_ns,
                    "wait_end_ns": wait_end_ns,
                    "exposed_ns": exposed_ns,
                    **columns,
                }
            )

    def _place(self, step: int, attempt: int) -> int:
        """Return a time within the step that is later than the times of the earlier collectives of the step.

        If the step was not added, the time is that of a counter.
        """
        begins = [
            row["begin_ns"] for row in self.rows["steps"] if (row["step"], row["attempt"]) == (step, attempt)
        ]
        if not begins:
            self._clock += 10
            return self._clock - 10
        self._issued[attempt, step] = self._issued.get((attempt, step), 0) + 1
        return begins[0] + 10 * self._issued[attempt, step]

    def add_parameters(self, sizes: dict[str, int], dtype: str = "float32", param_group: int = 0) -> None:
        """Add one ``parameters`` row for each name, in order."""
        for index, (name, numel) in enumerate(sizes.items()):
            self.rows["parameters"].append(
                {
                    "name": name,
                    "shape": str(numel),
                    "dtype": dtype,
                    "numel": numel,
                    "param_group": param_group,
                    "requires_grad": True,
                    "module": name.rpartition(".")[0],
                    "forward_index": index,
                }
            )

    def add(self, table: str, **row: Any) -> None:
        """Add one row to any table, without changes."""
        self.rows[table].append(row)

    def tables(self, *names: str) -> dict[str, pa.Table]:
        return {name: self.table(name) for name in names}

    def table(self, name: str) -> pa.Table:
        rows = self.rows[name]
        if name == "groups" and not rows:
            rows = self._groups()
        return pa.Table.from_pylist(
            [{column: row.get(column) for column in schema.TABLES[name].names} for row in rows],
            schema=arrow_schema(name),
        )

    def parts(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        table = self.table(name)
        yield table if columns is None else table.select(columns)

    def _groups(self) -> list[dict[str, Any]]:
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in self.rows["collectives"]:
            key = (row["rank"], row["attempt"], row["pid"], row["pg"], row["group_ranks"])
            found[key] = {name: row.get(name) for name in schema.GROUPS.names} | {
                "backend": f"cpu:{row['backend']}",
                "unseen": 0,
                "host": self.hosts.get(row["rank"]),
            }
        return list(found.values())

    def manifest(self) -> dict[str, Any]:
        records = [(row["rank"], row["attempt"]) for row in self.rows["collectives"]]
        statuses = [(row["rank"], row["attempt"], row["status"]) for row in self.rows["collectives"]]
        attempts = sorted({attempt for _, attempt in records} | {0})
        return {
            "schema_version": schema.SCHEMA_VERSION,
            "commprof_version": "0.1.0",
            "command": [self.script],
            "script": self.script,
            "cwd": "work",
            "started_realtime_ns": self.started_realtime_ns,
            "ended_realtime_ns": self.ended_realtime_ns,
            "state": self.state,
            "exit_code": {"complete": 0, "failed": 1}.get(self.state),
            "first_failed_rank": None,
            "nproc": self.world_size,
            "world_size": self.world_size,
            "hosts": [HOST],
            "launcher": {"pid": 1, "host": HOST, "start_ticks": 0},
            "python": "3.11.2",
            "torch": "2.13.0",
            "platform": "Linux",
            "environment": self.environment,
            "config": self.config,
            "config_path": None if self.config is None else "ds.json",
            "config_argument": None if self.config is None else "--config",
            "effective_config": self.effective_config,
            "engine": None,
            "engines": self.engines,
            "sweep": self.sweep,
            "ranks": [
                {
                    "rank": rank,
                    "attempt": attempt,
                    "pid": self.pid(rank, attempt),
                    "file": f"rank-{rank:05d}-{attempt}-{self.pid(rank, attempt)}",
                    "host": self.hosts.get(rank, HOST),
                    "world_size": self.world_size,
                    "records": records.count((rank, attempt)),
                    "lost": self.lost if rank == self.recorded_ranks[0] else 0,
                    "torn": self.torn if rank == self.recorded_ranks[0] else 0,
                    "unseen": self.unseen if rank == self.recorded_ranks[0] else 0,
                    "raised": statuses.count((rank, attempt, "raised")),
                    "incomplete": statuses.count((rank, attempt, "incomplete")),
                    "summed": sum(
                        row["calls"]
                        for row in self.rows["aggregates"]
                        if (row["rank"], row["attempt"]) == (rank, attempt)
                    ),
                    "faults": 0,
                    "recorder_ns": self.recorder_ns,
                    "stopped_reason": None,
                    "ended": self.state == "complete",
                }
                for attempt in attempts
                for rank in self.recorded_ranks
            ],
        }

    def write(self, path: Path) -> Path:
        """Write a finalized run directory: run.json, collectives/*.parquet and one Parquet file per other table."""
        path.mkdir(parents=True)
        for name in schema.TABLES:
            table = self.table(name)
            if name == "collectives":
                self._write_collectives(path / "collectives", table)
            elif table.num_rows:
                pq.write_table(table, path / f"{name}.parquet", compression="zstd")
        if self.config is not None:
            (path / "config.json").write_text(json.dumps(self.config))
        (path / "run.json").write_text(json.dumps(self.manifest(), indent=2))
        return path

    def _write_collectives(self, directory: Path, table: pa.Table) -> None:
        directory.mkdir()
        for entry in self.manifest()["ranks"]:
            rows = [
                row
                for row in self.rows["collectives"]
                if (row["rank"], row["attempt"]) == (entry["rank"], entry["attempt"])
            ]
            part = pa.Table.from_pylist(
                [{column: row.get(column) for column in table.column_names} for row in rows],
                schema=table.schema,
            )
            pq.write_table(part, directory / f"{entry['file']}.parquet", compression="zstd")

    def open(self, path: Path = Path("synthetic")) -> SimpleNamespace:
        """Return the object that ``commprof.trace.reader.open_run`` would return for this run, from memory."""
        ranks = self.manifest()["ranks"]
        missing = tuple(rank for rank in range(self.world_size) if rank not in self.recorded_ranks)
        statuses = [row["status"] for row in self.rows["collectives"]]
        health = Health(
            records=len(statuses),
            lost=self.lost,
            unseen=self.unseen,
            torn=self.torn,
            raised=statuses.count("raised"),
            incomplete=statuses.count("incomplete"),
            summed=sum(row["calls"] for row in self.rows["aggregates"]),
            ranks_expected=self.world_size,
            ranks_recorded=len(self.recorded_ranks),
            missing_ranks=missing,
            state=self.state,
            notes=(f"rank {missing[0]} left no records",) if missing else (),
        )
        manifest = SimpleNamespace(**{**self.manifest(), "ranks": ranks, "construction": None})
        return SimpleNamespace(
            path=path,
            manifest=manifest,
            health=health,
            table=self.table,
            scan=lambda name, most_rows=None: self.table(name),
            parts=self.parts,
            state=Opening(),
        )


def _buffers(op: str, payload_bytes: int, size: int, rank: int, peer: int) -> tuple[int, int]:
    """Return (input_bytes, output_bytes) of one rank for a payload, by the definitions of the schema."""
    share = payload_bytes // size
    is_root = rank == peer
    return {
        "all_reduce": (payload_bytes, payload_bytes),
        "reduce": (payload_bytes, payload_bytes),
        "reduce_scatter": (payload_bytes, share),
        "all_gather": (share, payload_bytes),
        "broadcast": (payload_bytes if is_root else 0, payload_bytes),
        "all_to_all": (payload_bytes, payload_bytes),
        "gather": (share, payload_bytes if is_root else 0),
        "scatter": (payload_bytes if is_root else 0, share),
        "send": (payload_bytes, 0),
        "recv": (0, payload_bytes),
        "barrier": (0, 0),
    }[op]


_SUMMED_BY = (
    "rank",
    "attempt",
    "pid",
    "step",
    "after_step",
    "phase",
    "op",
    "intended_op",
    "purpose",
    "pg",
    "group_ranks",
    "group_size",
    "is_p2p",
)


def with_sums(run: SyntheticRun, steps: tuple[int, ...] | None = None) -> SyntheticRun:
    """Replace the records of ``steps`` (default: all steps) in ``run`` by sums, and return ``run``."""
    run.rows["groups"] = run._groups()
    sums: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    left = []
    for row in run.rows["collectives"]:
        if steps is not None and row["step"] not in steps:
            left.append(row)
            continue
        measures = {name: row[name] for name in ("payload_bytes", "input_bytes", "output_bytes")}
        measures |= {"calls": 1, "host_ns": row["return_ns"] - row["issue_ns"]}
        sums[tuple(row.get(key) for key in _SUMMED_BY)].update(measures)
    run.rows["collectives"] = left
    for key, values in sums.items():
        run.add("aggregates", **dict(zip(_SUMMED_BY, key, strict=True)), **values)
    return run

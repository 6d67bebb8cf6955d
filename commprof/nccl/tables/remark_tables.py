"""Builds the table of choices of algorithms, and the table of messages (warnings and the traces of errors)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from commprof.nccl.grammar.tuning import TuningLine, TuningModelLine
from commprof.nccl.grammar.warnings import Message
from commprof.nccl.state.communicators import Communicator, Process
from commprof.nccl.tables.arrow_columns import as_arrow, from_values, taken
from commprof.trace.tables import arrow_schema, conform


class TuningRows:
    """Collects choices of algorithms for the table ``nccl_tuning``.

    A row takes about 40 bytes, because logs contain millions of them.
    """

    def __init__(self) -> None:
        self._records: dict[TuningLine, int] = {}
        self._columns = {name: array("q") for name in ("process", "tid", "file", "line", "record")}

    def add(
        self,
        process: int,
        communicator: int | None,
        record: TuningLine | TuningModelLine,
        file: int,
        line: int,
        lines: int = 1,
        tid: int | None = None,
    ) -> None:
        """Add one line, or ``lines`` equal lines. Rows of the model are in no table and are dropped.

        :func:`commprof.nccl.state.tuning_attribution.attribute_tuning` finds the communicator after all lines were
        read.

        Args:
            process: The number of the process in the registry.
            communicator: Not used.
            record: The choice, or a row of the model.
            file: The number of the file.
            line: The number of the line in the file.
            lines: The number of equal lines.
            tid: The thread that printed the line.
        """
        del communicator
        number = self.number(record)
        if number >= 0:
            thread = 0 if tid is None else tid
            self.extend(*(np.full(lines, value) for value in (process, thread, file, line, number)))

    def number(self, record: TuningLine | TuningModelLine) -> int:
        """Return the number of a choice for :meth:`extend`; -1 for a row of the model."""
        if isinstance(record, TuningModelLine):
            return -1
        return self._records.setdefault(record, len(self._records))

    def extend(self, *columns: np.ndarray) -> None:
        """Add many lines, given as columns: process, thread, file, line, and the number of the choice."""
        for known, column in zip(self._columns.values(), columns, strict=True):
            known.frombytes(np.ascontiguousarray(column, np.int64).tobytes())

    def processes(self) -> list[int]:
        """Return the numbers of the processes that print choices."""
        return sorted(set(self._columns["process"]))

    def table(
        self, processes: Sequence[Process], communicators: Sequence[Communicator], files: Sequence[str]
    ) -> pa.Table:
        """Return the table ``nccl_tuning``, in the order of files and lines. ``comm`` and ``op_line`` are null."""
        del communicators
        numbers = {name: np.frombuffer(column, np.int64) for name, column in self._columns.items()}
        order = np.lexsort((numbers["line"], numbers["file"]))
        numbers = {name: column[order] for name, column in numbers.items()}
        columns = {
            "host": taken([process.host for process in processes], pa.string(), numbers["process"]),
            "pid": taken([process.pid for process in processes], pa.int32(), numbers["process"]),
            "tid": as_arrow(numbers["tid"], pa.int64()),
            "file": taken(files, pa.string(), numbers["file"]),
            "line": as_arrow(numbers["line"], pa.int64()),
        }
        types = {"op": pa.string(), "num_bytes": pa.int64(), "predicted_us": pa.float64()}
        types |= {"algorithm": pa.string(), "protocol": pa.string()}
        types |= {"first_channel": pa.int32(), "last_channel": pa.int32()}
        for name, arrow_type in types.items():
            values = [getattr(record, name) for record in self._records]
            columns["bytes" if name == "num_bytes" else name] = taken(values, arrow_type, numbers["record"])
        return conform("nccl_tuning", pa.table(columns))


class MessageRows:
    """Collects warnings and traces for the table ``nccl_messages``."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int | None, int | None, int, int, Message]] = []

    def add(
        self,
        process: int,
        communicator: int | None,
        record: Message,
        file: int,
        line: int,
        lines: int = 1,
        tid: int | None = None,
        device: int | None = None,
    ) -> None:
        """Add one line, or ``lines`` equal lines. A message belongs to no communicator.

        Args:
            process: The number of the process in the registry.
            communicator: Not used.
            record: The message.
            file: The number of the file.
            line: The number of the line in the file.
            lines: The number of equal lines.
            tid: The thread that printed the line.
            device: The device in the head of the line.
        """
        del communicator
        self._rows.extend([(process, tid, device, file, line, record)] * lines)

    def table(
        self, processes: Sequence[Process], communicators: Sequence[Communicator], files: Sequence[str]
    ) -> pa.Table:
        """Return the table ``nccl_messages``, in the order in which the lines were added."""
        del communicators
        rows = [
            message._asdict()
            | {
                "host": processes[process].host,
                "pid": processes[process].pid,
                "tid": tid,
                "device": device,
                "file": files[file],
                "line": line,
            }
            for process, tid, device, file, line, message in self._rows
        ]
        schema = arrow_schema("nccl_messages")
        columns = [from_values([row[field.name] for row in rows], field.type) for field in schema]
        return conform("nccl_messages", pa.table(columns, names=schema.names))

"""Parses the lines with the algorithm that NCCL chose for an operation, and the table of NCCL's performance model.

Formats of ``src/enqueue.cc`` and ``src/graph/tuning.cc`` of NVIDIA/nccl. NCCL prints one line per operation since
2.20.3. Up to 2.23 the line has the bytes of the whole operation and a predicted time, which is not a measurement. From
2.24 on it has the bytes of one rank's count, and names instead of numbers. No line names its communicator.

The functions are pure: they take bytes and return tuples.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from commprof.nccl.grammar.spelling import OPERATIONS
from commprof.schema import Op

ALGORITHMS: Final = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS: Final = ("LL", "LL128", "SIMPLE")


class TuningLine(NamedTuple):
    """The choice of an algorithm for one operation.

    Attributes:
        op: The operation; None for versions that print no name (2.20 to 2.22).
        num_bytes: The printed bytes: of the whole operation up to 2.23, of one rank's count from 2.24 on.
        algorithm: The algorithm, or the kernel or copy method of a symmetric or copy engine operation.
        protocol: The protocol; None if the line has none.
        first_channel: The first channel; None if unknown.
        last_channel: The last channel; None if unknown.
        predicted_us: The time that the model predicts, in microseconds; None from 2.24 on.
    """

    op: Op | None
    num_bytes: int
    algorithm: str | None
    protocol: str | None
    first_channel: int | None
    last_channel: int | None
    predicted_us: float | None


class TuningModelLine(NamedTuple):
    """A row of the table of NCCL's model, which NCCL prints when a communicator begins: its title and its cells."""

    title: str
    cells: tuple[str, ...]


_BYTES = rb"(\d{1,18}) Bytes -> "
_NUMBERED = re.compile(
    rb"(?:(\w{1,40}+): )?" + _BYTES + rb"Algo (\d{1,3}) proto (\d{1,3}) time (\d{1,18}(?:\.\d{1,9})?|inf|nan)"
)
_NAMED = re.compile(
    rb"(\w{1,40}+): " + _BYTES + rb"Algo (\w{1,40}) proto (\w{1,40})"
    rb" channel\{Lo\.\.Hi\}=\{(-?\d{1,6})\.\.(-?\d{1,6})\}"
)
_SYMMETRIC = re.compile(
    rb"(\w{1,40}+) \[Symmetric\]: "
    + _BYTES
    + rb"Kernel (\S{1,120}) nchannels \d{1,6} nthreads \d{1,6}(?: nWorks \d{1,9})?"
)
_COPY_ENGINE = re.compile(
    rb"(\w{1,40}+) \[(?:Copy Engine|Hierarchical CE)\]: "
    + _BYTES
    + rb"(cudaMemcpy\w{0,60}(?:; CE synchronization with NVLS)?|RMA proxy \+ CE)"
)
_MODEL = re.compile(
    rb" {0,80}(Algorithm|Protocol|Latency/AlgBw|Max NThreads|AllReduce|AllGather|ReduceScatter|Broadcast|Reduce)"
    rb" {0,80}\|((?:[^|]{1,80}\|)++)"
)
_THRESHOLDS = re.compile(rb"(threadThresholds) ((?:[\d/]{1,40}+(?: \| )?+)++)")


def read_tuning(body: bytes) -> TuningLine | TuningModelLine | None:
    """Return the choice or the row of the model in one message; None for other messages and truncated ones.

    Args:
        body: The text after ``NCCL INFO ``.

    >>> read_tuning(b"262144 Bytes -> Algo 0 proto 1 time 54.7").algorithm
    'TREE'
    """
    if b" Bytes -> " in body[:200]:
        return _choice(body.rstrip())
    if b"|" in body[:200]:
        return _model(body.rstrip())
    return None


def _choice(body: bytes) -> TuningLine | None:
    if numbered := _NUMBERED.fullmatch(body):
        name, size, algorithm, protocol, time = numbered.groups()
        op = None if name is None else OPERATIONS.get(name)
        if name is not None and op is None:
            return None
        return TuningLine(
            op,
            int(size),
            _name(ALGORITHMS, int(algorithm)),
            _name(PROTOCOLS, int(protocol)),
            None,
            None,
            float(time),
        )
    if named := _NAMED.fullmatch(body):
        name, size, algorithm, protocol, first, last = named.groups()
        if name not in OPERATIONS:
            return None
        return TuningLine(
            OPERATIONS[name],
            int(size),
            algorithm.decode(),
            protocol.decode(),
            _channel(first),
            _channel(last),
            None,
        )
    other = _SYMMETRIC.fullmatch(body) or _COPY_ENGINE.fullmatch(body)
    if other is None or other[1] not in OPERATIONS:
        return None
    how = other[3].decode("utf-8", "replace")
    return TuningLine(OPERATIONS[other[1]], int(other[2]), how, None, None, None, None)


def _model(body: bytes) -> TuningModelLine | None:
    match = _MODEL.fullmatch(body) or _THRESHOLDS.fullmatch(body)
    if match is None:
        return None
    cells = match[2].decode("utf-8", "replace").removesuffix("|").split("|")
    return TuningModelLine(match[1].decode(), tuple(cell.strip() for cell in cells))


def _name(names: tuple[str, ...], number: int) -> str | None:
    return names[number] if number < len(names) else None


def _channel(text: bytes) -> int | None:
    number = int(text)
    return None if number < 0 else number

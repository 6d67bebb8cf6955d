"""Controls the rank processes of a benchmark: requests and answers are lines of JSON."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any, Final

PIPES: Final = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


class RankProcesses:
    """The processes of the ranks that a benchmark controls.

    Args:
        processes: The processes in rank order, started with :data:`PIPES`.
    """

    def __init__(self, processes: Iterable[subprocess.Popen[str]]) -> None:
        self.processes = list(processes)

    def answers(self) -> list[dict[str, Any]]:
        """Read and return one answer of each rank.

        Raises:
            RuntimeError: A rank exited instead of answering.
        """
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            raise RuntimeError(f"rank {lines.index('')} ended")
        return [json.loads(line) for line in lines]

    def tell(self, request: Mapping[str, Any]) -> None:
        """Send a request to all ranks."""
        for process in self.processes:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send ``request`` to all ranks, and return one answer of each rank.

        Raises:
            RuntimeError: A rank exited instead of answering.
        """
        self.tell(request)
        return self.answers()

    def end(self) -> None:
        """Wait until the ranks exit. A rank that does not exit within 10 s is killed."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            process.wait()

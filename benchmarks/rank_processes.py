"""The processes of some ranks that a benchmark asks: a line of JSON to each, a line of JSON from each."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any, Final

PIPES: Final = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


class RankProcesses:
    """Some ranks.

    Args:
        processes: in rank order, started with :data:`PIPES`.
    """

    def __init__(self, processes: Iterable[subprocess.Popen[str]]) -> None:
        self.processes = list(processes)

    def answers(self) -> list[dict[str, Any]]:
        """One answer of each rank. Raises RuntimeError where a rank has ended instead."""
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            raise RuntimeError(f"rank {lines.index('')} ended")
        return [json.loads(line) for line in lines]

    def tell(self, request: Mapping[str, Any]) -> None:
        """Send a request to all."""
        for process in self.processes:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()

    def ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One answer of each rank to ``request``. Raises RuntimeError where a rank has ended instead."""
        self.tell(request)
        return self.answers()

    def end(self) -> None:
        """Let the ranks end, and see that they have."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            process.wait()

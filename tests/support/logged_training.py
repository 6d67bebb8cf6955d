"""A small training that keeps its own count: each line of its log says what it is about to do, or what came of it.

The log is written with one ``write`` a line and not buffered, so it tells what a process had begun before it was killed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ISSUE = b"issue\n"


class Log:
    """An append-only file. ``issued`` counts the collectives that were about to be issued."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def issue(self) -> None:
        """A collective is issued next."""
        os.write(self._descriptor, ISSUE)

    def say(self, text: str) -> None:
        """One line that is no collective."""
        os.write(self._descriptor, f"{text}\n".encode())


def issued(path: Path) -> int:
    """How many collectives the program was about to issue, by its own log; 0 without a log."""
    return path.read_bytes().count(ISSUE) if path.exists() else 0


def results(path: Path) -> list[str]:
    """What came of each step: the loss and a hash of the parameters, exactly."""
    return [line for line in path.read_text().splitlines() if line.startswith("step")]


def train(
    log: Log, steps: int, at_step: Callable[[int], Any] = lambda step: None, loader: Any = None
) -> None:
    """Train with gradients reduced by all_reduce; ``at_step`` is called in the middle of each step."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = iter(loader) if loader is not None else None
    for step in range(steps):
        batch = torch.randn(4, 8) if batches is None else next(batches)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for number, parameter in enumerate(model.parameters()):
            if number == 2:
                at_step(step)
            log.issue()
            dist.all_reduce(parameter.grad)
        log.issue()
        work = dist.all_reduce(loss.detach().clone(), async_op=True)
        work.wait()
        optimizer.step()
        data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        log.say(f"step {step} {loss.item().hex()} {hashlib.sha256(data).hexdigest()}")


def fork(function: Callable[..., Any], *args: Any) -> int:
    """A forked child that calls ``function`` and ends with 0, or with 1 where that raises. Returns its pid."""
    import torch._dynamo  # noqa: F401 - or every child imports it for itself, in its optimizer's first step: seconds

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function(*args)
            code = 0
        finally:
            os._exit(code)
    return pid


def outcome(pid: int, seconds: float = 120.0) -> int:
    """How child ``pid`` ended: its exit code, or the negative number of the signal that killed it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError(f"process {pid} did not end within {seconds} s")

"""A small training that logs its collectives independently of commprof.

A line of the log announces a collective before it is issued, or contains the result of a step. Each line is
written with one unbuffered ``write``, so the log also shows which collectives a killed process had begun.
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
    """An append-only log file. The function ``issued`` counts the collectives that the log announces."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def issue(self) -> None:
        """Log that a collective is issued next."""
        os.write(self._descriptor, ISSUE)

    def say(self, text: str) -> None:
        """Log a line that announces no collective."""
        os.write(self._descriptor, f"{text}\n".encode())


def issued(path: Path) -> int:
    """Return the number of collectives that the log of the program announces; 0 if there is no log."""
    return path.read_bytes().count(ISSUE) if path.exists() else 0


def results(path: Path) -> list[str]:
    """Return one line per step with its exact loss and a hash of the parameters."""
    return [line for line in path.read_text().splitlines() if line.startswith("step")]


def train(
    log: Log, steps: int, at_step: Callable[[int], Any] = lambda step: None, loader: Any = None
) -> None:
    """Train with all_reduce of the gradients. Call ``at_step`` in each step between two of these all_reduces."""
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
    """Fork a child that calls ``function``, and return the process id of the child.

    The child exits with 0, or with 1 if ``function`` raises.
    """
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
    """Wait for child ``pid`` and return its exit code.

    If a signal killed the child, the result is the negative number of the signal.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError(f"process {pid} did not end within {seconds} s")

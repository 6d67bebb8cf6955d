"""One rank of benchmarks/step_time.py: keeps one model at a time, under one runtime or none, and trains it as it is told.

Runs under DeepSpeed's Python as well as under this project's. A line on standard input begins a case: ``{"port", "model",
"micro_batch", "config"}``. Those that follow are ``{"steps": n}``, ``{"memory": true}``, and ``{"end": true}``, which alone
has no answer. An answer is a line of JSON on standard output.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch_peers
from step_memory import tensors

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
SEED = 7
WITHOUT_ENGINE = ("torch", "plain")  # not to be imported by this name


class Training:
    """A model and the batches that it has not seen yet: the same whatever trains it."""

    def __init__(self, framework: str, job: dict[str, Any]) -> None:
        example = _load(EXAMPLE)
        torch.manual_seed(SEED)
        self.module = example.GPT(**job["model"])
        self.engine: Any = None
        if framework == "torch":
            self.engine = torch_peers.peer(job["peer"], self.module, job["config"])
        elif framework != "plain":
            initialize = importlib.import_module(framework).initialize
            self.engine = initialize(
                model=self.module, model_parameters=self.module.parameters(), config=job["config"]
            )[0]
        self._shape = (job["micro_batch"], job["model"]["context"])
        self._vocabulary = job["model"]["vocabulary"]
        self._generator = torch.Generator().manual_seed(int(os.environ["RANK"]))

    def step(self) -> float:
        """One optimizer step, or without a runtime only forward and backward; the loss."""
        loss = self.forward_backward()
        if self.engine is None:
            for parameter in self.module.parameters():
                parameter.grad = None
        else:
            self.engine.step()
        return loss.item()

    def forward_backward(self) -> torch.Tensor:
        """Up to the optimizer; the loss."""
        first, second = (
            torch.randint(0, self._vocabulary, self._shape, generator=self._generator) for _ in range(2)
        )
        second = second % 64  # a part of the vocabulary, so that there is something to learn
        if self.engine is None:
            loss = self.module(first, second)
            loss.backward()
        else:
            loss = self.engine(first, second)
            self.engine.backward(loss)
        return loss.detach()


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(training: Training, steps: int) -> dict[str, Any]:
    """Train ``steps`` steps: wall seconds and loss of each, CPU seconds of all threads in the mean."""
    dist.barrier()
    losses, seconds = [], []
    cpu = time.process_time()
    for _ in range(steps):
        begin = time.perf_counter()
        losses.append(training.step())
        seconds.append(time.perf_counter() - begin)
    cpu = time.process_time() - cpu
    dist.barrier()
    return {"seconds": seconds, "cpu": cpu / steps, "losses": losses}


def peak_rss() -> float:
    """The most memory that this process has had resident, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def forget_peak() -> None:
    """Let :func:`peak_rss` count from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def serve(framework: str, job: dict[str, Any], answers: TextIO) -> None:
    """Join the process group, make the model, say so, and answer requests until the case ends."""
    os.environ["MASTER_PORT"] = str(job["port"])
    if framework in WITHOUT_ENGINE:
        dist.init_process_group("gloo")
    else:
        importlib.import_module(framework).init_distributed("gloo")
    forget_peak()
    before = peak_rss()
    training = Training(framework, job)
    _say({"rss_before": before}, answers)
    for line in sys.stdin:
        request = json.loads(line)
        if "end" in request:
            break
        if "steps" in request:
            _say(measure(training, request["steps"]), answers)
        else:
            _say({"peak_rss": peak_rss()} | tensors(training), answers)


def _say(answer: dict[str, Any], answers: TextIO) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Import once, and give every case a process of its own, so that its memory is its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=("deepspeed", "zero_runtime", *WITHOUT_ENGINE))
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the frameworks print is no answer
    torch.set_num_threads(1)
    if args.framework not in WITHOUT_ENGINE:
        importlib.import_module(args.framework)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                serve(args.framework, json.loads(line), answers)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            # Not destroy_process_group: a rank that ends while another still waits would look like a failure.
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(1)


if __name__ == "__main__":
    main()

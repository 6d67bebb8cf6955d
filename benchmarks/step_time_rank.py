"""Runs one rank of benchmarks/step_time.py, which trains one model at a time on request, with or without a runtime.

The script runs in the Python environment of DeepSpeed and in that of this project. A line ``{"port", "model",
"micro_batch", "config"}`` on standard input begins a case. The following lines are ``{"steps": n}``,
``{"memory": true}`` and ``{"end": true}``. Every request except ``{"end": true}`` has an answer, which is a line of
JSON on standard output.
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
WITHOUT_ENGINE = ("torch", "plain")  # These names are not modules with an engine.


class Training:
    """A model with its own stream of batches. The batches do not depend on the runtime."""

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
        """Run one optimizer step, or without a runtime only forward and backward; return the loss."""
        loss = self.forward_backward()
        if self.engine is None:
            for parameter in self.module.parameters():
                parameter.grad = None
        else:
            self.engine.step()
        return loss.item()

    def forward_backward(self) -> torch.Tensor:
        """Run the forward and the backward pass; return the loss."""
        first, second = (
            torch.randint(0, self._vocabulary, self._shape, generator=self._generator) for _ in range(2)
        )
        second = second % 64  # only a part of the vocabulary, so that the model can learn something
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
    """Train ``steps`` steps; return the wall seconds and loss of each step, and the mean CPU seconds of all threads."""
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
    """Return the peak resident memory of this process, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def forget_peak() -> None:
    """Reset the peak that :func:`peak_rss` returns to the current resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def serve(framework: str, job: dict[str, Any], answers: TextIO) -> None:
    """Join the process group, create the model, report readiness, and answer requests until the case ends."""
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
    """Import the modules once, and fork a process for every case, so that cases do not share memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=("deepspeed", "zero_runtime", *WITHOUT_ENGINE))
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # The frameworks print to stdout, which carries the answers.
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
            # destroy_process_group is not called: if a rank left while another rank waits, the other rank would fail.
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(1)


if __name__ == "__main__":
    main()

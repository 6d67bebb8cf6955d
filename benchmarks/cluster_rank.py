"""Runs one rank of benchmarks/cluster.py, which has an engine for each case and trains the requested case.

The script runs in the Python environment of DeepSpeed and in that of this project. Each line on standard input is a
request ``{"case": name, "steps": n}``. The answer is one line of JSON on standard output. It contains the seconds and
losses of the steps, and the mean seconds of each phase and mean processor seconds per step. It also contains the mean
bytes per step that the interface of the host received and sent. With ``"record": folder``, commprof records the steps
into that folder. The request ``{"case": name, "memory": true}`` asks for the memory of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch_peers
from step_memory import tensors

TORCH = "torch"
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"


class Training:
    """An engine with its own stream of batches. The batches are the same for every case."""

    def __init__(self, framework: str, config: dict[str, Any], job: dict[str, Any]) -> None:
        example = load(EXAMPLE)
        self.module = model = example.GPT(**job["model"])
        model.load_state_dict(torch.load(job["weights"], weights_only=True))
        if "peer" in config:
            self.engine = torch_peers.peer(config["peer"], model, config)
        else:
            initialize = importlib.import_module(framework).initialize
            self.engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        self._shape = (job["micro_batch"], job["model"]["context"])
        self._vocabulary = job["model"]["vocabulary"]
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> tuple[float, list[float]]:
        """Run one optimizer step; return the loss and the end times of the forward pass, backward pass and update."""
        loss, ends = self.forward_backward()
        self.engine.step()
        return loss.item(), [*ends, time.perf_counter()]

    def forward_backward(self) -> tuple[torch.Tensor, list[float]]:
        """Run a forward and a backward pass; return the loss and the end time of each pass."""
        first, second = (
            torch.randint(0, self._vocabulary, self._shape, generator=self._generator) for _ in range(2)
        )
        # The targets use only a part of the vocabulary, so that the model can learn something.
        loss = self.engine(first, second % 64)
        ends = [time.perf_counter()]
        self.engine.backward(loss)
        ends.append(time.perf_counter())
        return loss.detach(), ends


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counters(interface: str) -> tuple[int, int]:
    """Return the numbers of bytes that ``interface`` has received and sent."""
    folder = Path("/sys/class/net", interface, "statistics")
    return tuple(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


def measure(training: Training, steps: int, interface: str) -> dict[str, Any]:
    """Train ``steps`` steps and return the measurements.

    One additional step precedes the measured steps, so that the first measured step starts as in a long job: it may
    have to wait for parameters that the previous step is still gathering. The bytes are means over all steps,
    including the additional step.
    """
    dist.barrier()
    before = counters(interface)
    losses, seconds, phases = [training.step()[0]], [], [0.0] * 3
    processor = time.process_time()
    for _ in range(steps):
        begin = time.perf_counter()
        loss, ends = training.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss)
        for number, (first, last) in enumerate(pairwise([begin, *ends])):
            phases[number] += (last - first) / steps
    processor = (time.process_time() - processor) / steps
    dist.barrier()
    received, sent = (after - first for after, first in zip(counters(interface), before, strict=True))
    return {
        "seconds": seconds,
        "losses": losses,
        "phases": phases,
        "processor": processor,
        "received": received / (steps + 1),
        "sent": sent / (steps + 1),
    }


@contextlib.contextmanager
def recorded(folder: str | None) -> Iterator[None]:
    """Record with commprof into ``folder``; do nothing if ``folder`` is None."""
    if folder is None:
        yield
        return
    import commprof

    commprof.attach(folder)
    try:
        yield
    finally:
        commprof.detach()


def serve(job: dict[str, Any], names: list[str], framework: str, answers: TextIO) -> None:
    """Create the engines of the cases ``names``, report readiness, and answer requests until standard input ends."""
    trainings = {name: Training(framework, job["cases"][name], job) for name in names}
    print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        training = trainings[request["case"]]
        with recorded(request.get("record")):
            answer = (
                tensors(training)
                if "memory" in request
                else measure(training, request["steps"], job["interface"])
            )
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Join the process group and answer requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("framework", choices=("deepspeed", "zero_runtime", TORCH))
    parser.add_argument("cases", nargs="+")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # The frameworks print to stdout, which carries the answers.
    torch.set_num_threads(1)
    if args.framework == TORCH:
        dist.init_process_group("gloo")
    else:
        importlib.import_module(args.framework).init_distributed("gloo")
    serve(json.loads(args.job.read_text()), args.cases, args.framework, answers)
    # destroy_process_group is not called: if a rank left while another rank still waits, the other rank would fail.
    os._exit(0)


if __name__ == "__main__":
    main()

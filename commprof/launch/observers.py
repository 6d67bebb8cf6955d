"""Observers that run in the launcher of a job: readings of the interface counters, samplers, the watchdog."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from commprof.launch.counter_readings import INTERVAL_SECONDS, WireSampler
from commprof.recorder.process.counters import WIRE_DIRECTORY, InterfaceCounters, readings_file
from commprof.recorder.process.recorder_options import Options
from commprof.sampling.nvml import NVML, NvmlError, NvmlSampler
from commprof.sampling.processes import ProcessSampler, local_ranks
from commprof.sampling.samples import Sampler, SampleWriter
from commprof.sampling.stacks import StackSampler, py_spy_program
from commprof.sampling.watchdog import Watchdog
from commprof.trace.directory import EVERY_SAMPLES


@contextlib.contextmanager
def observed(run: Path, recording: Options, say: Callable[[str], None]) -> Iterator[None]:
    """Write the interface counters and the requested samples into ``run``, and run the watchdog, within this context.

    Only the launcher that prints the messages of the job uses this function.

    Args:
        run: The run directory.
        recording: The options that request samplers and the watchdog.
        say: The function that is called with one line of text for the user.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_interfaces(run / "wire.jsonl", recording))
        samplers = make_samplers(run, recording, say)
        if samplers:
            stack.enter_context(SampleWriter(run, samplers, recording.sample_every))
        if recording.watchdog is not None:
            stack.enter_context(Watchdog(run, recording.watchdog, say))
        yield


@contextlib.contextmanager
def sampled(run: Path, recording: Options, say: Callable[[str], None]) -> Iterator[None]:
    """Write the interface counters and the requested samples of another host into ``run`` within this context.

    The watchdog is not started, because it runs in the first launcher (see :func:`observed`).
    """
    samplers = make_samplers(run, recording, say)
    host = socket.gethostname().replace("/", "_")
    file = EVERY_SAMPLES.replace("*", f"-{host}")
    with contextlib.ExitStack() as stack:
        of_launcher = readings_file(run / WIRE_DIRECTORY, f"launcher-{os.getpid()}")
        stack.enter_context(_interfaces(of_launcher, recording))
        if samplers:
            stack.enter_context(SampleWriter(run, samplers, recording.sample_every, file))
        yield


def _interfaces(file: Path, recording: Options) -> WireSampler:
    interval = recording.sample_every if "interfaces" in recording.samplers else INTERVAL_SECONDS
    return WireSampler(file, InterfaceCounters(), interval)


def make_samplers(run: Path, recording: Options, say: Callable[[str], None]) -> list[Sampler]:
    """Return the samplers that ``recording`` requests for this host.

    A sampler that cannot work here is reported and left out.
    """
    samplers: list[Sampler] = []
    if NVML in recording.samplers:
        try:
            nvml = NvmlSampler(run)
        except NvmlError as error:
            say(f"--sample nvml: no samples of GPUs: {error}")
        else:
            say(nvml.describe())
            samplers.append(nvml)
    if "proc" in recording.samplers:
        samplers.append(ProcessSampler(lambda: local_ranks(run)))
    if "stacks" in recording.samplers:
        if py_spy_program() is None:
            say(
                "--sample stacks: no samples of stacks: py-spy is not installed (pip install 'commprof[sampling]')"
            )
        else:
            samplers.append(StackSampler(lambda: local_ranks(run), say))
    return samplers

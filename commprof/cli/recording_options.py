"""The options that control how a program is recorded, shared by all verbs that run one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from commprof.errors import UsageError
from commprof.recorder.process.recorder_options import (
    DEFAULTS,
    SAMPLERS,
    Options,
    describe_empty,
    parse_count,
    parse_samplers,
    parse_seconds,
    parse_size,
    parse_steps,
)

PARAMETER: Final = "recording"


def _declared(
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            metavar="A:B",
            help="Record only steps A to B - 1. A: records from step A to the end; :B records initialization "
            "and the steps before B.",
        ),
    ] = None,
    warmup: Annotated[
        str | None,
        typer.Option("--warmup", metavar="N", help="Skip initialization and the first N training steps."),
    ] = None,
    aggregate: Annotated[
        bool,
        typer.Option(
            "--aggregate",
            help="Record sums per step instead of each collective, for jobs that run for weeks.",
        ),
    ] = False,
    max_size: Annotated[
        str | None,
        typer.Option(
            "--max-size",
            metavar="SIZE",
            help="Limit of the bytes that each rank writes while it runs: 500MB, 2GiB. Once 80 % of the limit is used, "
            "only sums are recorded.",
        ),
    ] = None,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="Record all operators of c10d from the start, including those that C++ issues. Each call costs more.",
        ),
    ] = False,
    watchdog: Annotated[
        str | None,
        typer.Option(
            "--watchdog",
            metavar="SECONDS",
            help="Dump all ranks after SECONDS without progress.",
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample", metavar="LIST", help=f"Samplers to run during the job: {','.join(SAMPLERS)}."
        ),
    ] = None,
    sample_every: Annotated[
        str | None,
        typer.Option("--sample-every", metavar="SECONDS", help="Sampling interval. Default: 1."),
    ] = None,
    completion_every: Annotated[
        str | None,
        typer.Option(
            "--completion-every",
            metavar="N",
            help="Record the completion time of every Nth of the CPU calls that commprof samples. "
            "0 disables these times and GPU events. Default: 1.",
        ),
    ] = None,
) -> Options:
    """Convert the options, as a verb declares them, into the recorder's options."""
    # They come as texts and go through the parsers of the recorder, which also read what its ranks find in the environment.
    options = Options(
        steps=_parsed("--steps", steps, parse_steps),
        warmup=_parsed("--warmup", warmup, parse_count) or 0,
        aggregate=aggregate,
        max_bytes=_parsed("--max-size", max_size, parse_size),
        complete=complete,
        watchdog=_parsed("--watchdog", watchdog, parse_seconds),
        samplers=_parsed("--sample", sample, parse_samplers) or (),
        sample_every=_parsed("--sample-every", sample_every, parse_seconds) or DEFAULTS.sample_every,
        completion_every=DEFAULTS.completion_every
        if completion_every is None
        else _parsed("--completion-every", completion_every, parse_count),
    )
    first, end = options.window or (0, None)
    if end is not None and first >= end:
        raise UsageError(f"--steps {steps} --warmup {warmup}: {describe_empty(options)}")
    return options


def _parsed(option: str, text: str | None, parse: Callable[[object], Any]) -> Any:
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from None


def recording_options(verb: Callable[..., int]) -> Callable[..., int]:
    """Add these options to ``verb``, which gets them as one :class:`Options` in its parameter ``recording``."""
    own = inspect.signature(verb, eval_str=True)
    shared = inspect.signature(_declared, eval_str=True).parameters

    @functools.wraps(verb)
    def command(**values: Any) -> int:
        recording = _declared(**{name: values.pop(name) for name in shared})
        return verb(**values, **{PARAMETER: recording})

    own_parameters = [parameter for name, parameter in own.parameters.items() if name != PARAMETER]
    command.__signature__ = own.replace(parameters=[*own_parameters, *shared.values()])  # type: ignore[attr-defined]
    return command

"""The options that control how a program is recorded. All verbs that run a program share these options."""

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
            help="Record only steps A to B - 1. With `A:`, record from step A to the end. With `:B`, record "
            "initialization and the steps before B.",
        ),
    ] = None,
    warmup: Annotated[
        str | None,
        typer.Option("--warmup", metavar="N", help="Do not record initialization and the first N steps."),
    ] = None,
    aggregate: Annotated[
        bool,
        typer.Option(
            "--aggregate",
            help="Record sums per step instead of each collective. Use this for jobs that run for weeks.",
        ),
    ] = False,
    max_size: Annotated[
        str | None,
        typer.Option(
            "--max-size",
            metavar="SIZE",
            help="The largest number of bytes that each rank may write while it runs, for example 500MB or "
            "2GiB. When 80 % of the limit is used, commprof records only sums from then on.",
        ),
    ] = None,
    complete: Annotated[
        bool,
        typer.Option(
            "--complete",
            help="Record all operators of c10d from the start, including those that C++ code issues. Each "
            "call is then more expensive to record.",
        ),
    ] = False,
    watchdog: Annotated[
        str | None,
        typer.Option(
            "--watchdog",
            metavar="SECONDS",
            help="Write a dump of all ranks after SECONDS without progress.",
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="LIST",
            help=f"Samplers to run during the job. All samplers: {','.join(SAMPLERS)}.",
        ),
    ] = None,
    sample_every: Annotated[
        str | None,
        typer.Option("--sample-every", metavar="SECONDS", help="Sampling interval in seconds. Default: 1."),
    ] = None,
    completion_every: Annotated[
        str | None,
        typer.Option(
            "--completion-every",
            metavar="N",
            help="commprof samples some of the calls on CPU tensors. Record the completion time of every Nth "
            "sampled call. With 0, record no completion times on CPUs and no events on GPUs. Default: 1.",
        ),
    ] = None,
) -> Options:
    """Convert the values of the command line into the options of the recorder."""
    # The values are texts. The parsers of the recorder parse them, as they also parse the environment of the ranks.
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
    """Add the recording options to ``verb``, which gets them as one :class:`Options` in its parameter ``recording``."""
    own = inspect.signature(verb, eval_str=True)
    shared = inspect.signature(_declared, eval_str=True).parameters

    @functools.wraps(verb)
    def command(**values: Any) -> int:
        recording = _declared(**{name: values.pop(name) for name in shared})
        return verb(**values, **{PARAMETER: recording})

    own_parameters = [parameter for name, parameter in own.parameters.items() if name != PARAMETER]
    command.__signature__ = own.replace(parameters=[*own_parameters, *shared.values()])  # type: ignore[attr-defined]
    return command

"""``commprof calibrate``: measures the latency and bandwidth that collectives can reach on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from commprof.analysis.columns.units import format_bytes, format_ns
from commprof.calibration.bandwidths import bus_factor
from commprof.calibration.calibration_plan import (
    BACKENDS,
    DEFAULT_SIZES,
    DEVICES,
    DTYPES,
    OPS,
    Plan,
    parse_ops,
    parse_sizes,
)
from commprof.calibration.results import Calibration
from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.rendering import Heading, Rows
from commprof.cli.verbs.run import NPROC_HELP, parse_ranks
from commprof.errors import UsageError

HELP_ORDER = 190

_MOST_ITERATIONS: Final = 1_000_000


def calibrate(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", help="The JSON file to write.", show_default=False),
    ],
    nproc: Annotated[str | None, typer.Option("--nproc", metavar="N", help=NPROC_HELP)] = None,
    ops: Annotated[
        list[str] | None,
        typer.Option(
            "--ops", metavar="OP,...", help=f"The operations to measure. Default: {', '.join(OPS)}."
        ),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(
            "--sizes",
            metavar="A:B[:FACTOR]",
            help="Payloads from A to B, or a list A,B,C. From A to B, each payload is FACTOR times the "
            "previous one (4 times if FACTOR is not given). Units: K, M, G.",
        ),
    ] = DEFAULT_SIZES,
    dtype: Annotated[
        str, typer.Option("--dtype", help=f"The element type: {', '.join(DTYPES)}.")
    ] = "float32",
    device: Annotated[str, typer.Option("--device", help="The device: cpu or cuda.")] = "auto",
    backend: Annotated[str, typer.Option("--backend", help="The backend: gloo or nccl.")] = "auto",
    iterations: Annotated[
        int,
        typer.Option(
            "--iterations", metavar="N", help="Maximum number of timed iterations per operation and size."
        ),
    ] = 20,
    warmup: Annotated[
        int,
        typer.Option(
            "--warmup", metavar="N", help="Number of untimed iterations before the timed iterations."
        ),
    ] = 3,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace the file of an earlier calibration.")
    ] = False,
) -> int:
    """Measure the bandwidth that collectives can reach on this machine: the ceiling for runs.

    As in nccl-tests, each operation is checked once at each size and is then timed. The time is that of
    the slowest rank. Latency and bandwidth are fitted for each operation. The command starts N ranks. If
    torchrun, mpirun or srun starts the command, it is one rank of that job. Run nothing else at the same
    time. The dashboard finds the file if it is in the same directory as the runs (docs/calibration.md).
    """
    plan = Plan(
        ops=parse_ops(ops or []),
        sizes=parse_sizes(sizes),
        dtype=_one_of("--dtype", dtype, tuple(DTYPES)),
        device=_one_of("--device", device, DEVICES),
        backend=_one_of("--backend", backend, BACKENDS),
        iterations=_within("--iterations", iterations, 1),
        warmup=_within("--warmup", warmup, 0),
    )
    # Imported only now, so that a wrong option is reported at once.
    from commprof.launch.calibration import calibrate as carry_out
    from commprof.launch.calibration import is_first

    code = carry_out(plan, parse_ranks(nproc), out, force, say)
    if code == 0 and is_first(os.environ):
        from commprof.calibration.file import read_calibration

        _show(read_calibration(out))
        counted = f"{len(plan.ops)} operations, {len(plan.sizes)} sizes"
        say(f"{out}  {counted}. Put it beside the runs, and commprof dashboard shows it as their ceiling")
    return code


def _show(calibration: Calibration) -> None:
    """Print the latency and the bandwidth of each operation."""
    fits = calibration.fits()
    rows = []
    for op, timings in calibration.timings.items():
        factor = bus_factor(op, calibration.world_size) or 0.0
        best = max(timing.payload_bytes / timing.time_ns for timing in timings) * 1e9 * factor
        cells = ["-", "-", "-"]
        if op in fits:
            fit = fits[op]
            alpha, beta = fit.alpha_interval(), fit.beta_interval()
            high = "?" if beta.high is None else _rate(beta.high * factor)
            cells = [
                f"{_time(fit.alpha_ns)} ({_time(alpha.low or 0)} to {_time(alpha.high or 0)})",
                f"{_rate(fit.beta_bytes_per_s * factor)} ({_rate((beta.low or 0) * factor)} to {high})",
                f"{100 * fit.residual:.2g} %",
            ]
        rows.append((op, str(len(timings)), *cells, _rate(best)))
    rows += [(op, "0", "-", "-", "-", "-") for op in calibration.skipped if op not in calibration.timings]
    titles = ("sizes", "latency (95 %)", "busbw of large messages (95 %)", "residual", "best busbw")
    headings = [Heading("operation"), *(Heading(title, number=True) for title in titles)]
    about = (
        f"{calibration.world_size} ranks, {calibration.backend}, {calibration.device}, {calibration.dtype}"
    )
    rendering.show(Rows(headings, rows, title=f"Calibration: {about}"))


def _time(nanoseconds: float) -> str:
    return format_ns(round(nanoseconds))


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(round(bytes_per_s))}/s"


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UsageError(f"{option} {value[:80]}: one of {', '.join(allowed)} was expected")
    return value


def _within(option: str, value: int, least: int) -> int:
    if not least <= value <= _MOST_ITERATIONS:
        raise UsageError(f"{option} {value}: a number from {least} to {_MOST_ITERATIONS:,} was expected")
    return value

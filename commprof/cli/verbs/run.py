"""``commprof run``: runs a program on every rank with the recorder in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from commprof.cli.console import say
from commprof.cli.recording_options import recording_options
from commprof.deepspeed_provider import Engine
from commprof.errors import CommprofError, LaunchError, UsageError
from commprof.launch.logs.nccl_log import Mode
from commprof.launch.user_program import check_program, parse_program, with_engine
from commprof.recorder.process.recorder_options import DEFAULTS, Options

HELP_ORDER = 10

NPROC_HELP = "Number of ranks to start. Default: one per visible GPU, or 2 without a GPU."
NCCL_LOG_HELP = "Whether NCCL writes its log into the run directory. With auto, it does if a GPU is visible."
ENGINE_HELP = (
    "The package that `import deepspeed` imports: zero_runtime, deepspeed (the installed package) or auto. "
    "With auto, it is deepspeed if deepspeed is installed, and zero_runtime otherwise. Default: unchanged."
)
WIRE_HELP = "Also read the network interface counters at each step, once per host."


@recording_options
def run(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROGRAM...",
            help="SCRIPT ARGS, -m MODULE ARGS, or -- CMD ARGS. commprof passes all arguments of the "
            "program to the program unchanged.",
            show_default=False,
        ),
    ] = None,
    nproc: Annotated[str | None, typer.Option("--nproc", metavar="N", help=NPROC_HELP)] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="The run directory. Default: traces/<script>-<time>."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace an earlier run in the directory of --out.")
    ] = False,
    nccl_log: Annotated[Mode, typer.Option("--nccl-log", help=NCCL_LOG_HELP)] = Mode.AUTO,
    wire: Annotated[bool, typer.Option("--wire", help=WIRE_HELP)] = False,
    engine: Annotated[Engine | None, typer.Option("--engine", help=ENGINE_HELP, show_default=False)] = None,
    recording: Options = DEFAULTS,
) -> int:
    """Run a program on every rank and record its collectives.

    commprof starts SCRIPT or -m MODULE once per rank, in the same way as python. CMD is your own
    launcher, such as torchrun or deepspeed. commprof starts CMD once and records the ranks that CMD
    starts. If a launcher (torchrun, mpirun, srun) starts commprof as a rank, commprof runs the program
    as this rank. The exit code is the exit code of the program. If several ranks fail, it is the exit
    code of the rank that failed first.
    """
    ranks = parse_ranks(nproc)
    parsed = with_engine(parse_program(program or []), engine)
    check_program(parsed)

    # Import these modules only here, because a help page does not need code that reads traces and starts processes.
    from commprof.launch.foreign import belongs_to_a_job, run_foreign_rank
    from commprof.launch.job import Job, run_job

    job = Job(
        program=parsed,
        ranks=ranks,
        out=out,
        force=force,
        nccl_log=nccl_log,
        wire=wire,
        recording=recording,
        engine=engine,
    )
    try:
        here = belongs_to_a_job(job, os.environ)
        if here is not None:
            return run_foreign_rank(job, here, say).exit_code
        return run_job(job, say).exit_code
    except UsageError:
        raise
    except (CommprofError, OSError) as error:
        raise LaunchError(str(error)) from error


def parse_ranks(text: str | None) -> int | None:
    """Return the number of ranks from ``--nproc``; None if it is not given.

    Raises:
        UsageError: the value is not a positive integer.
    """
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f"--nproc {text}: a number of ranks, 1 or more, was expected. {NPROC_HELP}")
    return int(text)

"""Options, tables of memory and texts that ``plan``, ``predict`` and the deprecated ``requested`` share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer

from commprof.cli import rendering
from commprof.cli.rendering import Heading, Rows
from commprof.plan.options import OPTIONS

_DEVICES: Final = Path("/dev")
MOST_RANKS: Final = 2**22  # a plan for this number of ranks needs 1.3 GiB and 20 s


def plan_option(name: str, **more: Any) -> Any:
    """Return typer's declaration of an option of ``commprof plan``."""
    option = OPTIONS[name]
    return typer.Option(option.flag, metavar=option.metavar, help=option.help, **more)


ConfigFile: TypeAlias = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="The config file, in the format of DeepSpeed.")
]
World: TypeAlias = Annotated[int, plan_option("world", min=1, max=MOST_RANKS)]
Backend: TypeAlias = Annotated[str, plan_option("backend")]
SequenceLength: TypeAlias = Annotated[int | None, plan_option("sequence", min=1, show_default=False)]
DeviceMemory: TypeAlias = Annotated[str | None, plan_option("device_memory", show_default=False)]
Settings: TypeAlias = Annotated[list[str] | None, plan_option("settings", show_default=False)]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def device_capacity(text: str | None) -> int | None:
    """Return the memory of a device in bytes: the value of ``text``, or else the memory of this machine's first GPU.

    The result is None if ``text`` is None and there is no GPU.

    Raises:
        UsageError: ``text`` is not a number of bytes.
    """
    if text is not None:
        from commprof.plan.api import parse_capacity

        return parse_capacity(text)
    if not any(any(_DEVICES.glob(name)) for name in ("nvidia[0-9]*", "kfd")):
        return None  # without a GPU, do not import torch, which takes seconds
    try:
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory)
    except (ImportError, RuntimeError, AssertionError):
        return None


def fit_sentence(needed: int, capacity: int, counted: bool = False) -> str:
    """Return a sentence about whether ``needed`` bytes fit in ``capacity`` bytes.

    ``counted`` is whether ``needed`` includes activations.
    """
    before = "" if counted else ", before activations"
    need, there = rendering.number_of_bytes(needed), rendering.number_of_bytes(capacity)
    if needed > capacity:
        return f"Does not fit in {there}: a rank needs {need} on its device{before}."
    left = rendering.number_of_bytes(capacity - needed)
    return f"Fits in {there}{before}: a rank needs {need} on its device, and {left} are left."


def memory_rows(rank_memory: Sequence[Any], ranks: int) -> Rows:
    """Return the table of the memory of a rank, with a row for a host if the host has several ``ranks``."""
    places = ("device", "host", "disk")
    rows = [
        (each.what, *(rendering.number_of_bytes(getattr(each, place)) for place in places), each.note)
        for each in rank_memory
    ]
    totals = [sum(getattr(each, place) for each in rank_memory) for place in places]
    rows += [(), ("of a rank", *map(rendering.number_of_bytes, totals), "")]
    if ranks > 1:
        shared = [rendering.number_of_bytes(total * ranks) for total in totals]
        rows.append((f"of a host with {ranks} ranks", *shared, ""))
    headings = [Heading("memory"), *(Heading(place, True) for place in places), Heading("")]
    return Rows(headings, rows, "memory per rank")


def movement_rows(moved: Sequence[Any]) -> Rows:
    """Return the table of the data that offload moves per rank and step."""
    headings = [Heading("what"), Heading("from"), Heading("to"), Heading("bytes", True)]
    rows = [
        (each.what, each.source, each.target, rendering.number_of_bytes(each.num_bytes)) for each in moved
    ]
    return Rows(headings, rows, "moved per rank and step by offload")

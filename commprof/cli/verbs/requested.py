"""``commprof requested``: predicts what a config requests without a run: memory per rank, bytes per step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from commprof.cli import rendering
from commprof.cli.rendering import Heading, Rows
from commprof.errors import UsageError
from commprof.recorder.process.options import parse_size

NO_ACTIVATIONS: Final = (
    "activations that ranks send each other are left out: give --sequence to predict their size"
)
_DEVICES: Final = Path("/dev")
_FACTORS: Final = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def requested(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config file, as DeepSpeed reads it.")],
    params: Annotated[
        str, typer.Option(metavar="N", help="Parameters of the model: 175e9, 1.3B, 125M.", show_default=False)
    ],
    world: Annotated[int, typer.Option(metavar="W", min=1, help="Ranks.")] = 1,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="L", min=1, help="Layers of the model. Default: typical for N.", show_default=False
        ),
    ] = None,
    devices_per_host: Annotated[
        int, typer.Option(metavar="D", min=1, help="Ranks per host, which share memory and disk.")
    ] = 8,
    backend: Annotated[str, typer.Option(help="Backend of the ranks: nccl or gloo.")] = "nccl",
    sequence: Annotated[
        int | None,
        typer.Option(
            metavar="S",
            min=1,
            help="Sequence length in tokens, for activations that ranks send each other.",
            show_default=False,
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of a device: 80GiB. Default: that of the GPU of this machine, if it has one.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Predict what a config requests: memory per rank, and bytes per step. Nothing is run."""
    from commprof.requested.errors import RequestedError
    from commprof.requested.memory.models import likely_layers, shared_transformer, transformer
    from commprof.requested.memory.states import holdings, movements
    from commprof.requested.parallel import grid
    from commprof.requested.parallel.axes import DATA, MODEL, PIPE, SEQUENCE, axes_of_config
    from commprof.requested.zero.stages import expected_in_step, steady_step

    config_values = _read(config)
    numel = _number(params)
    depth = layers or likely_layers(numel)
    model = transformer(numel, depth)
    axes = axes_of_config(config_values, world)
    # With axes other than data, rank 0 holds only its pipeline stage and its model-parallel shard of it.
    replicas, of_rank, plain = world, model, config_values
    if not axes.only_data:
        model = shared_transformer(model, axes.size(MODEL), axes.size(PIPE))
        of_rank = [each for each in model if 0 in each.stage_numbers]
        replicas, plain = axes.size(DATA) * axes.size(SEQUENCE), grid.without_axes(config_values, axes)
    rank_memory = holdings(plain, of_rank, replicas)
    # Memory is predictable even if the messages are not: then the note says why they are missing.
    note = ""
    try:
        if axes.only_data:
            hosts = min(devices_per_host, world)
            step = steady_step(config_values)
            sent = expected_in_step(config_values, model, world, step, backend=backend, host_ranks=hosts)
        else:
            shapes = _shapes(config_values, model, axes, sequence)
            sent = grid.expected_in_step_on_axes(config_values, model, axes, shapes, backend)
            note = "" if sequence else NO_ACTIVATIONS
    except RequestedError as problem:
        sent, note = [], f"bytes of messages cannot be predicted: {problem}"
    precision, capacity = _precision(plain), _capacity(device_memory)
    # Offload moves states in each step, and also the parameters that stage 3 gathers.
    on_device = sum(each.device for each in rank_memory)
    gathered = sum(row.payload_bytes for row in sent if row.purpose == "parameter_gather")
    moved = movements(plain, of_rank, replicas, gathered)
    assumed = (
        f"{numel:,} parameters, assumed to be {depth} layers of 4 matrices each (--layers); {world} rank{'s' * (world > 1)} "
        f"on {backend}{'' if axes.only_data else f' along {axes}'}; the model in {precision}; activations are not included"
    )
    if as_json:
        rendering.show_json(
            {
                "config": str(config),
                "parameters": numel,
                "layers": depth,
                "world_size": world,
                "backend": backend,
                "precision": precision,
                "device_memory_bytes": capacity,
                "fits": None if capacity is None else on_device <= capacity,
                "memory_per_rank": [each._asdict() for each in rank_memory],
                "messages_per_step": [_without_single_messages(each._asdict()) for each in sent],
                "movements_per_step": [each._asdict() for each in moved],
                "note": note or None,
            }
        )
        return 0
    rendering.show(rendering.paragraph(assumed), "", _memory(rank_memory, min(devices_per_host, world)), "")
    if capacity is not None:
        rendering.show(rendering.paragraph(_fit(on_device, capacity)), "")
    if sent:
        rendering.show(_messages(sent, world))
    if note:
        rendering.show(rendering.paragraph(note))
    if moved:
        rendering.show("", _movements(moved))
    for line in sorted({row.note for row in sent if row.note}):
        rendering.show(rendering.paragraph(f"  {line}"))
    return 0


def _precision(config: Mapping[str, Any]) -> str:
    """Return the element type of the model's parameters, as the config sets it."""
    from commprof.requested.configuration import read_configuration

    return read_configuration(config).model_dtype or "float32 (the config names no type)"


def _capacity(text: str | None) -> int | None:
    """Return the memory of a device in bytes: as given, or of this machine's first GPU; None without a GPU.

    Raises:
        UsageError: ``text`` is not a number of bytes.
    """
    if text is not None:
        try:
            return parse_size(text)
        except ValueError as problem:
            raise UsageError(f"--device-memory is {text!r}: {problem}") from None
    if not any(any(_DEVICES.glob(name)) for name in ("nvidia[0-9]*", "kfd")):
        return None  # spares the seconds that importing torch takes
    try:
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory)
    except (ImportError, RuntimeError, AssertionError):
        return None


def _fit(needed: int, capacity: int) -> str:
    need, there = rendering.number_of_bytes(needed), rendering.number_of_bytes(capacity)
    if needed > capacity:
        return f"Does not fit in {there}: a rank needs {need} on its device, before activations."
    left = rendering.number_of_bytes(capacity - needed)
    return f"Fits in {there}, before activations: a rank needs {need} on its device, and {left} are left."


def _without_single_messages(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "payloads"}


def _memory(rank_memory: Sequence[Any], ranks: int) -> Rows:
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


def _shapes(config: Mapping[str, Any], model: Sequence[Any], axes: Any, sequence: int | None) -> Any:
    """Return the shapes of the model's activations; none if the sequence length is not known."""
    from commprof.requested.parallel.activation_shapes import Shapes, assumed_shapes
    from commprof.requested.parallel.axes import PIPE, SEQUENCE

    if sequence is None:
        return Shapes(assumed=True)
    return assumed_shapes(config, model, sequence, axes.size(PIPE), axes.size(SEQUENCE))


def _groups_by_ranks(row: Any, world: int) -> str:
    if row.groups:
        return f"{len(row.groups)} x {len(row.groups[0])}"
    size = row.group_size or world
    return f"{world // size} x {size}"


def _messages(sent: Sequence[Any], world: int) -> Rows:
    grouped = any(row.groups or row.group_size for row in sent)
    rows = [
        (
            row.purpose,
            *((_groups_by_ranks(row, world),) if grouped else ()),
            row.issued_op if row.intended_op is None else f"{row.issued_op} for {row.intended_op}",
            rendering.count(row.count),
            rendering.number_of_bytes(row.payload_bytes),
            rendering.number_of_bytes(row.wire_bytes),
            "" if row.exact else "about",
        )
        for row in sent
    ]
    total = (
        "all",
        "",
        rendering.count(sum(row.count for row in sent)),
        rendering.number_of_bytes(sum(row.payload_bytes for row in sent)),
        rendering.number_of_bytes(sum(row.wire_bytes for row in sent)),
        "",
    )
    headings = [
        Heading("purpose"),
        *((Heading("groups x ranks"),) if grouped else ()),
        Heading("issued"),
        Heading("messages", True),
        Heading("payload", True),
        Heading("sent by each rank", True),
        Heading(""),
    ]
    # No total: a rank is in one group of each axis, so rows of several pipeline stages belong to different ranks.
    return Rows(headings, rows if grouped else [*rows, (), total], "messages per step")


def _movements(moved: Sequence[Any]) -> Rows:
    headings = [Heading("what"), Heading("from"), Heading("to"), Heading("bytes", True)]
    rows = [
        (each.what, each.source, each.target, rendering.number_of_bytes(each.num_bytes)) for each in moved
    ]
    return Rows(headings, rows, "moved per rank and step by offload")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config_values = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UsageError(f"{path} cannot be read: {reason}; name a config file") from None
    except json.JSONDecodeError as problem:
        raise UsageError(
            f"{path} is not valid JSON: {problem.msg} in line {problem.lineno}, column {problem.colno}; correct it"
        ) from None
    if not isinstance(config_values, dict):
        raise UsageError(
            f"{path} holds a {type(config_values).__name__}; expected an object with keys, as in a DeepSpeed config"
        )
    return config_values


def _number(text: str) -> int:
    """Parse ``175e9``, ``1.3B`` or ``125M``."""
    stripped = text.strip().replace("_", "").replace(",", "")
    factor = _FACTORS.get(stripped[-1:].upper(), 1.0)
    digits = stripped[:-1] if factor > 1.0 else stripped
    try:
        numel = float(digits) * factor
    except ValueError:
        numel = float("nan")
    if not 1 <= numel < 1e18:
        raise UsageError(
            f"--params is {text!r}; expected a number of parameters, such as 175e9, 1.3B or 125M"
        )
    return round(numel)

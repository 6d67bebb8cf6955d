"""``commprof requested``: the deprecated name of ``commprof plan`` for a model whose size alone is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.rendering import Heading, Rows
from commprof.cli.sections.prediction_section import (
    AsJson,
    Backend,
    ConfigFile,
    DeviceMemory,
    SequenceLength,
    World,
    device_capacity,
    fit_sentence,
    memory_rows,
    movement_rows,
)

HELP_ORDER = 110


def requested(
    config: ConfigFile,
    params: Annotated[
        str,
        typer.Option(
            metavar="N", help="Number of parameters of the model: 175e9, 1.3B, 125M.", show_default=False
        ),
    ],
    world: World = 1,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="L",
            min=1,
            help="Number of layers of the model. Default: typical for N.",
            show_default=False,
        ),
    ] = None,
    devices_per_host: Annotated[
        int,
        typer.Option(metavar="D", min=1, help="Number of ranks per host. These ranks share memory and disk."),
    ] = 8,
    backend: Backend = "nccl",
    sequence: SequenceLength = None,
    device_memory: DeviceMemory = None,
    as_json: AsJson = False,
) -> int:
    """Predict memory per rank and bytes per step of a config. Deprecated: use commprof plan.

    The command runs no program.
    """
    from commprof.launch.sweeps.config_file import read_config
    from commprof.plan.models import parse_number, sized_model
    from commprof.plan.predictions import Job, predict

    say("commprof requested is deprecated; use commprof plan CONFIG --model params:N")
    model = sized_model(parse_number(params, "--params"), layers)
    prediction = predict(read_config(config), Job(model, world, devices_per_host, backend, sequence))
    for sentence in prediction.decisions:
        say(sentence)
    capacity, sent = device_capacity(device_memory), prediction.sent
    assumed = (
        f"{model.source}; {world} rank{'s' * (world > 1)} "
        f"on {backend}{'' if prediction.axes.only_data else f' along {prediction.axes}'}; "
        f"the model in {prediction.precision}; activations are not included"
    )
    # Programs may read this JSON, so the keys stay the same as before the verb was deprecated.
    if as_json:
        rendering.show_json(
            {
                "config": str(config),
                "parameters": model.numel,
                "layers": model.layers,
                "world_size": world,
                "backend": backend,
                "precision": prediction.precision,
                "device_memory_bytes": capacity,
                "fits": None if capacity is None else prediction.on_device <= capacity,
                "memory_per_rank": [each._asdict() for each in prediction.memory],
                "messages_per_step": [_without_single_messages(each._asdict()) for each in sent],
                "movements_per_step": [each._asdict() for each in prediction.moved],
                "note": prediction.note or None,
            }
        )
        return 0
    rendering.show(
        rendering.paragraph(assumed), "", memory_rows(prediction.memory, min(devices_per_host, world)), ""
    )
    if capacity is not None:
        rendering.show(rendering.paragraph(fit_sentence(prediction.on_device, capacity)), "")
    if sent:
        rendering.show(_messages(sent, world))
    if prediction.note:
        rendering.show(rendering.paragraph(prediction.note))
    if prediction.moved:
        rendering.show("", movement_rows(prediction.moved))
    for line in sorted({row.note for row in sent if row.note}):
        rendering.show(rendering.paragraph(f"  {line}"))
    return 0


def _without_single_messages(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "payloads"}


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
    # A grouped table has no total. Rows of different pipeline stages concern different ranks, because a rank is
    # in only one group of each axis.
    return Rows(headings, rows if grouped else [*rows, (), total], "messages per step")

"""``commprof plan``: predicts what a config will send and hold for a model, and compares settings, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.runs import opened
from commprof.cli.sections.planned import show_comparison, show_one
from commprof.cli.sections.prediction_section import (
    AsJson,
    Backend,
    ConfigFile,
    DeviceMemory,
    SequenceLength,
    Settings,
    World,
    device_capacity,
    plan_option,
)
from commprof.launch.sweeps.points import label

HELP_ORDER = 90

_NAMES: Final = {"zero_runtime": "zero_runtime", "deepspeed": "DeepSpeed 0.19"}


def plan(  # noqa: PLR0913 - a parameter for each option of the command
    config: ConfigFile,
    model: Annotated[str, plan_option("model", show_default=False)],
    world: World = 1,
    layers: Annotated[int | None, plan_option("layers", min=1, show_default=False)] = None,
    experts: Annotated[str | None, plan_option("experts", show_default=False)] = None,
    ep_size: Annotated[str | None, plan_option("ep_size", show_default=False)] = None,
    expert_k: Annotated[str | None, plan_option("expert_k", show_default=False)] = None,
    capacity_factor: Annotated[str | None, plan_option("capacity_factor", show_default=False)] = None,
    min_capacity: Annotated[str | None, plan_option("min_capacity", show_default=False)] = None,
    drop_tokens: Annotated[str | None, plan_option("drop_tokens", show_default=False)] = None,
    expert_layers: Annotated[str | None, plan_option("expert_layers", show_default=False)] = None,
    expert_skew: Annotated[str | None, plan_option("expert_skew", show_default=False)] = None,
    hosts: Annotated[str | None, plan_option("hosts", show_default=False)] = None,
    links: Annotated[str | None, plan_option("links", show_default=False)] = None,
    settings: Settings = None,
    framework: Annotated[str, plan_option("framework")] = "zero_runtime",
    backend: Backend = "nccl",
    sequence: SequenceLength = None,
    device_memory: DeviceMemory = None,
    calibration: Annotated[Path | None, plan_option("calibration", show_default=False)] = None,
    step_compute: Annotated[str | None, plan_option("step_compute", show_default=False)] = None,
    recorded: Annotated[str | None, plan_option("recorded", show_default=False)] = None,
    as_json: AsJson = False,
) -> int:
    """Predict traffic per step and memory per rank for a model and a config. Runs no program.

    If there are several settings, commprof compares them.
    """
    from commprof.calibration.file import read_calibration
    from commprof.launch.sweeps.config_file import read_config
    from commprof.plan import api

    measured = None if calibration is None else read_calibration(calibration)
    step_of_run = None
    if recorded is not None:
        with needed("analysis", "to read a run"):
            from commprof.plan.recorded_steps import recorded_step

            step_of_run = recorded_step(opened(recorded))
    # None means the value of the model, which no number can express.
    of_experts = {
        "num_experts": experts,
        "ep_size": ep_size,
        "k": expert_k,
        "capacity_factor": capacity_factor,
        "min_capacity": min_capacity,
        "drop_tokens": drop_tokens,
        "layers": expert_layers,
        "skew": expert_skew,
    }
    question = api.Question(
        read_config(config),
        model,
        world,
        hosts,
        links,
        tuple(settings or ()),
        layers,
        backend,
        sequence,
        step_compute,
        device_capacity(device_memory),
        measured,
        framework=framework,
        recorded=step_of_run,
        experts={name: text for name, text in of_experts.items() if text is not None},
    )
    planned = api.make_plan(question)
    for remark in planned.remarks:
        say(remark)
    usable = [each for _, each in planned.usable]
    if as_json:
        missing = [f"activations are not counted: {each.uncounted}" for each in usable if each.uncounted]
        decided = [sentence for each in usable for sentence in each.decisions]
        for note in dict.fromkeys([*decided, *(each.note for each in usable if each.note), *missing]):
            say(note)
        rendering.show_json(api.as_json(planned))
        return 0
    rendering.show(
        rendering.paragraph(
            f"{planned.model.source}; {world:,} rank{'s' * (world > 1)} on {backend}, {planned.hosts}; "
            "rings connect ranks in rank order; the program and libraries are not in the memory; messages are those of "
            f"{_NAMES[planned.job.framework]}"
        ),
        "",
    )
    if len(planned.outcomes) == 1:
        show_one(usable[0], planned)
        return 0
    show_comparison(planned)
    # Settings share most decisions. A shared decision is printed once.
    for sentence in dict.fromkeys(sentence for each in usable for sentence in each.decisions):
        rendering.show(rendering.paragraph(sentence))
    if measured is not None:
        for setting, each in planned.usable:
            for sentence in api.latency_sentences(planned, each):
                rendering.show(rendering.paragraph(f"{label(setting)}: {sentence}"))
    return 0

"""The options of ``commprof plan``, for the command line and the form of the Plan page. Standard library only."""

from __future__ import annotations

from typing import Final, NamedTuple


class PlanOption(NamedTuple):
    """One option.

    Attributes:
        flag: on the command line.
        help: what it says, in one sentence.
        metavar: what its value is called; None for the name of its type.
    """

    flag: str
    help: str
    metavar: str | None = None


OPTIONS: Final = {
    "model": PlanOption(
        "--model",
        "params:175e9; py:module:function (returns the model); hf:CONFIG_DIR (no weights are read); or run:RUN, the "
        "parameters of a recorded run.",
        "MODEL",
    ),
    "world": PlanOption("--world", "Ranks.", "W"),
    "layers": PlanOption("--layers", "Layers of params:N. Default: typical for N.", "L"),
    "experts": PlanOption(
        "--experts",
        "Experts in each mixture-of-experts layer of params:N; each is a copy of the feed-forward part. "
        "The plan compares several values of this option and of the next seven options.",
        "N",
    ),
    "ep_size": PlanOption("--ep-size", "Ranks that share the experts of a layer. Default: 1.", "RANKS"),
    "expert_k": PlanOption("--expert-k", "Experts that the gate chooses for each token. Default: 1.", "K"),
    "capacity_factor": PlanOption(
        "--capacity-factor",
        "Slots of an expert, as a multiple of its share of the tokens. Default: 1.",
        "FACTOR",
    ),
    "min_capacity": PlanOption("--min-capacity", "Least number of slots of an expert. Default: 4.", "SLOTS"),
    "drop_tokens": PlanOption(
        "--drop-tokens",
        "false: drop no tokens; the fullest expert determines the number of slots of each expert. Default: true.",
        "BOOL",
    ),
    "expert_layers": PlanOption(
        "--expert-layers", "Layers of params:N that have experts. Default: all.", "L"
    ),
    "expert_skew": PlanOption(
        "--expert-skew", "Load of the fullest expert, as a multiple of the mean. Default: 1, balanced.", "S"
    ),
    "hosts": PlanOption("--hosts", "H hosts of R ranks each: 128x8. Default: hosts of 8.", "HxR"),
    "links": PlanOption(
        "--links",
        "intra: rate of a rank inside its host. inter: number of links of a host x rate of each link. "
        "Example: intra=450GB/s,inter=8x50GB/s.",
        "RATES",
    ),
    "settings": PlanOption(
        "--set",
        "A dotted key of the config and its values. With several --set, every combination is used.",
        "KEY=V1,V2",
    ),
    "framework": PlanOption(
        "--framework", "Runtime whose rules predict the messages: zero_runtime or deepspeed."
    ),
    "backend": PlanOption("--backend", "Backend of the ranks: nccl or gloo."),
    "sequence": PlanOption("--sequence", "Sequence length in tokens, for activations.", "S"),
    "device_memory": PlanOption(
        "--device-memory",
        "Memory of a device: 80GiB. Default: that of the GPU of this machine, if it has one.",
        "SIZE",
    ),
    "calibration": PlanOption(
        "--calibration",
        "File of commprof calibrate. The plan then shows message times, and whether the largest gradient message "
        "is latency bound.",
        "FILE",
    ),
    "step_compute": PlanOption(
        "--step-compute",
        "Compute time of a rank in a step, without communication: 900ms. Gives bounds of the step time.",
        "TIME",
    ),
    "recorded": PlanOption(
        "--recorded",
        "A recorded run of this model and micro-batch. Its compute time and its fraction of overlapped "
        "communication narrow the bounds of the step time.",
        "RUN",
    ),
}

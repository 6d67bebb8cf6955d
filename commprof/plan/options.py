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
        "params:175e9, py:module:function that returns the model, hf:CONFIG_DIR (no weights are read), or run:RUN, the "
        "parameters of a recorded run.",
        "MODEL",
    ),
    "world": PlanOption("--world", "Ranks.", "W"),
    "layers": PlanOption("--layers", "Layers of params:N. Default: typical for N.", "L"),
    "experts": PlanOption(
        "--experts",
        "Experts of each layer with experts of params:N, copies of its feed-forward part. This and the next seven: several "
        "values are compared.",
        "N",
    ),
    "ep_size": PlanOption("--ep-size", "Ranks that share the experts of a layer. Default: 1.", "RANKS"),
    "expert_k": PlanOption("--expert-k", "Experts of each token. Default: 1.", "K"),
    "capacity_factor": PlanOption(
        "--capacity-factor",
        "Slots of an expert, as a multiple of its share of the tokens. Default: 1.",
        "FACTOR",
    ),
    "min_capacity": PlanOption("--min-capacity", "Least number of slots of an expert. Default: 4.", "SLOTS"),
    "drop_tokens": PlanOption(
        "--drop-tokens", "false: the slots grow to the fullest expert, instead. Default: true.", "BOOL"
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
        "Rate of a rank inside its host, and links x rate of a host: intra=450GB/s,inter=8x50GB/s.",
        "RATES",
    ),
    "settings": PlanOption(
        "--set",
        "A dotted key of the config and its values. Several --set: every combination.",
        "KEY=V1,V2",
    ),
    "framework": PlanOption("--framework", "Whose rules say what is sent: zero_runtime or deepspeed."),
    "backend": PlanOption("--backend", "Backend of the ranks: nccl or gloo."),
    "sequence": PlanOption("--sequence", "Sequence length in tokens, for activations.", "S"),
    "device_memory": PlanOption(
        "--device-memory",
        "Memory of a device: 80GiB. Default: that of the GPU of this machine, if it has one.",
        "SIZE",
    ),
    "calibration": PlanOption(
        "--calibration",
        "Of commprof calibrate: times of messages, and is the largest gradient message latency bound?",
        "FILE",
    ),
    "step_compute": PlanOption(
        "--step-compute",
        "Time that a rank computes in a step, without communication: 900ms. Gives bounds of the step.",
        "TIME",
    ),
    "recorded": PlanOption(
        "--recorded",
        "A run of this model and micro-batch: its computation, and the part of its communication that overlapped, narrow "
        "the bounds of the step.",
        "RUN",
    ),
}

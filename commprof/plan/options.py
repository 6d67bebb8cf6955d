"""The options of ``commprof plan``, for the command line and the form of the Plan page. Standard library only."""

from __future__ import annotations

from typing import Final, NamedTuple


class PlanOption(NamedTuple):
    """One option of ``commprof plan``.

    Attributes:
        flag: The flag on the command line.
        help: The help text.
        metavar: The name of the value in the help, or None for the name of its type.
    """

    flag: str
    help: str
    metavar: str | None = None


OPTIONS: Final = {
    "model": PlanOption(
        "--model",
        "The model in one of four forms. params:175e9 gives a number of parameters. py:module:function calls a function "
        "that returns the model. hf:CONFIG_DIR reads a Hugging Face config, without weights. run:RUN uses the "
        "parameters of a recorded run.",
        "MODEL",
    ),
    "world": PlanOption("--world", "Number of ranks.", "W"),
    "layers": PlanOption(
        "--layers", "Number of layers of params:N. Default: a number that is typical for N.", "L"
    ),
    "experts": PlanOption(
        "--experts",
        "Number of experts in each mixture-of-experts layer of params:N. Each expert is a copy of the feed-forward "
        "part. If you give several values for this option or for one of the next seven options, the plan "
        "compares them.",
        "N",
    ),
    "ep_size": PlanOption(
        "--ep-size", "Number of ranks that share the experts of a layer. Default: 1.", "RANKS"
    ),
    "expert_k": PlanOption(
        "--expert-k", "Number of experts that the gate chooses for each token. Default: 1.", "K"
    ),
    "capacity_factor": PlanOption(
        "--capacity-factor",
        "Number of slots of an expert, as a multiple of the mean number of tokens per expert. Default: 1.",
        "FACTOR",
    ),
    "min_capacity": PlanOption(
        "--min-capacity", "Minimum number of slots of an expert. Default: 4.", "SLOTS"
    ),
    "drop_tokens": PlanOption(
        "--drop-tokens",
        "With false, no tokens are dropped, and the expert with the most tokens determines the number of slots of "
        "every expert. Default: true.",
        "BOOL",
    ),
    "expert_layers": PlanOption(
        "--expert-layers", "Number of layers of params:N that have experts. Default: all layers.", "L"
    ),
    "expert_skew": PlanOption(
        "--expert-skew",
        "Load of the expert with the most tokens, as a multiple of the mean load. Default: 1.",
        "S",
    ),
    "hosts": PlanOption(
        "--hosts", "H hosts with R ranks each, such as 128x8. Default: hosts with 8 ranks.", "HxR"
    ),
    "links": PlanOption(
        "--links",
        "Rates of the links, such as intra=450GB/s,inter=8x50GB/s. intra is the rate of a rank within its host. "
        "inter is the number of links of a host and the rate of each link.",
        "RATES",
    ),
    "settings": PlanOption(
        "--set",
        "A dotted key of the config and its values. If --set is repeated, every combination is evaluated.",
        "KEY=V1,V2",
    ),
    "framework": PlanOption(
        "--framework", "Runtime whose rules predict the messages: zero_runtime or deepspeed."
    ),
    "backend": PlanOption("--backend", "Backend of the ranks: nccl or gloo."),
    "sequence": PlanOption("--sequence", "Sequence length in tokens, for activations.", "S"),
    "device_memory": PlanOption(
        "--device-memory",
        "Memory of a device, such as 80GiB. Default: the memory of this machine's GPU, if it has one.",
        "SIZE",
    ),
    "calibration": PlanOption(
        "--calibration",
        "File written by commprof calibrate. The plan then also shows message times, and whether the largest gradient "
        "message is latency-bound.",
        "FILE",
    ),
    "step_compute": PlanOption(
        "--step-compute",
        "Compute time of a rank in a step without communication, such as 900ms. The plan then shows bounds of the "
        "step time.",
        "TIME",
    ),
    "recorded": PlanOption(
        "--recorded",
        "A recorded run of this model and micro-batch. Its compute time and its fraction of overlapped "
        "communication narrow the bounds of the step time.",
        "RUN",
    ),
}

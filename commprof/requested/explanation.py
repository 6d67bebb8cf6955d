"""What a config asks for in words, and what becomes of it: one sentence, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from commprof.requested.configuration import Configuration, read_configuration
from commprof.requested.errors import RequestedError
from commprof.schema import Op

# What each value of zero_optimization.gradient_reduction names.
NAMED_OPS: Final[dict[str, Op]] = {
    "all_reduce": Op.ALL_REDUCE,
    "multi_rank_all_reduce": Op.ALL_REDUCE,
    "reduce_to_owner": Op.REDUCE,
    "reduce_scatter": Op.REDUCE_SCATTER,
}
# What each reduction sends, as the end of a sentence.
SENT: Final[dict[str, str]] = {
    "all_reduce": "one all_reduce per bucket",
    "multi_rank_all_reduce": "one all_reduce per bucket",
    "reduce_to_owner": "one reduce per bucket and owner",
    "reduce_scatter": "one reduce_scatter per bucket (on gloo an all_to_all and a local sum)",
}


def requested_op(configuration: Configuration) -> Op:
    """The operation on gradients that the words of the config ask for."""
    if not configuration.partitions:
        return Op.ALL_REDUCE
    if configuration.gradient_reduction != "auto":
        return NAMED_OPS[configuration.gradient_reduction]
    return Op.REDUCE_SCATTER if configuration.reduce_scatter else Op.ALL_REDUCE


def requested_gradient_op(config: Mapping[str, Any] | None) -> str | None:
    """The operation on gradients that the words of ``config`` ask for, whatever is then issued.

    ``reduce_scatter: true``, also by default, asks for a reduce_scatter; false, and stage 0, for an all_reduce; a value
    of ``gradient_reduction`` for what it names. None when there is no config, or one that cannot be read.
    """
    if config is None:
        return None
    try:
        return str(requested_op(read_configuration(config)))
    except RequestedError:
        return None


def describe(config: Mapping[str, Any] | None) -> str:
    """One sentence: what ``config`` asks for, and what a ZeRO runtime sends in its place."""
    if config is None:
        return "no config was recorded, so nothing is known of what was asked for"
    try:
        return describe_configuration(read_configuration(config))
    except RequestedError as error:
        return str(error)


def describe_configuration(configuration: Configuration) -> str:
    """The sentence of :func:`describe` for a config that has been read."""
    if configuration.stage == 0:
        return "stage 0 partitions nothing: one all_reduce of all gradients per step, whatever reduce_scatter says"
    if configuration.stage == 3:
        asked = "true" if configuration.reduce_scatter else "false"
        return f"stage 3 with reduce_scatter: {asked} partitions the parameters too; its messages follow the order of a run"
    if configuration.reduces_flat_groups:
        return (
            "bf16 at stage 1 with fp32 gradient accumulation reduces all gradients in one all_reduce; "
            "reduce_scatter, use_multi_rank_bucket_allreduce and reduce_bucket_size are ignored"
        )
    if configuration.gradient_reduction != "auto":
        name = configuration.gradient_reduction
        return f"gradient_reduction: {name} asks for {_article(name)}; zero_runtime sends {SENT[name]}"
    return _describe_deepspeed_keys(configuration)


def _describe_deepspeed_keys(configuration: Configuration) -> str:
    if not configuration.reduce_scatter:
        return "reduce_scatter: false asks for an all_reduce; DeepSpeed 0.19 sends one all_reduce per bucket"
    if not configuration.buffers_are_contiguous:
        return (
            "reduce_scatter: true asks for a reduce_scatter; contiguous_gradients: false overrides it and "
            "use_multi_rank_bucket_allreduce, and DeepSpeed 0.19 sends one all_reduce per bucket in its place"
        )
    value = "true" if configuration.use_multi_rank_bucket_allreduce else "false"
    return (
        f"reduce_scatter: true with use_multi_rank_bucket_allreduce: {value} asks for a reduce_scatter; "
        f"DeepSpeed 0.19 sends {SENT[configuration.reduction]} in its place"
    )


def _article(reduction: str) -> str:
    op = str(NAMED_OPS[reduction])
    return f"an {op}" if op.startswith("a") else f"a {op}"

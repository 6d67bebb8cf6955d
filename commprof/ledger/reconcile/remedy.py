"""What to set where a config requests a reduce_scatter and another operation is issued for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from commprof.ledger.levels import WHAT_TO_SET, LedgerRow
from commprof.requested.configuration import Configuration
from commprof.requested.support import optimizer_type
from commprof.schema import Op

_OWN_KEY: Final = "zero_optimization.gradient_reduction: reduce_scatter"


def remedy_sentence(
    config: Mapping[str, Any], configuration: Configuration, issued: Sequence[LedgerRow], runtime: str
) -> str | None:
    """What to set for a reduce_scatter, or why nothing needs to be set; None where the question does not arise.

    Args:
        issued: the rows of the gradients that were reduced in training steps.
        runtime: ``deepspeed`` or ``zero_runtime``, which has the reduce_scatter that DeepSpeed's stages 1 and 2 lack.
    """
    row = max(issued, key=lambda row: (row.issued_op != row.requested_op, row.issued_payload_bytes))
    if row.requested_op != Op.REDUCE_SCATTER or row.issued_op in (None, Op.REDUCE_SCATTER):
        return None
    if row.issued_op == Op.ALL_TO_ALL:
        return f"{WHAT_TO_SET}nothing. {_of_an_exchange(configuration)}"
    if configuration.stage not in (1, 2) or configuration.compression is not None:
        return None
    if optimizer_type(config) == "muon":
        return f"{WHAT_TO_SET}nothing. Muon needs the full gradients of a matrix, which a reduce_scatter leaves on no rank."
    stage = "zero_optimization.stage: 2 and " if configuration.reduces_flat_groups else ""
    if runtime == "zero_runtime":
        return f"{WHAT_TO_SET}{stage}{_OWN_KEY}. It sends {_saved(issued)}."
    return (
        f"{WHAT_TO_SET}DeepSpeed has no reduce_scatter at stages 1 and 2. {_of_deepspeed(configuration)}"
        f"For a reduce_scatter run the program with commprof run --engine zero_runtime and {stage}{_OWN_KEY}: "
        f"{_saved(issued)}."
    )


def _of_an_exchange(configuration: Configuration) -> str:
    same = "An all_to_all with a local sum sends as many bytes as a reduce_scatter"
    if configuration.reduce_scatter_impl == "auto":
        return f"{same}; on NCCL this config issues a reduce_scatter."
    return f"{same}; for a reduce_scatter on NCCL set reduce_scatter_impl: auto."


def _of_deepspeed(configuration: Configuration) -> str:
    """The keys with which DeepSpeed sends as little as it can; empty if they are set or have no effect."""
    if configuration.reduces_flat_groups:
        return ""
    keys = [] if configuration.buffers_are_contiguous else ["contiguous_gradients: true"]
    if configuration.use_multi_rank_bucket_allreduce:
        keys.append("use_multi_rank_bucket_allreduce: false")
    if not keys:
        return ""
    return f"With {' and '.join(keys)} it sends each owner one reduce, as many bytes by the model. "


def _saved(issued: Sequence[LedgerRow]) -> str:
    """The bytes of a reduce_scatter against those of what ran, as far as that is known, else of what was issued."""
    payload = sum(row.issued_payload_bytes for row in issued)
    expected = max(sum(row.expected_payload_bytes or 0 for row in issued), 1)
    wanted = f"{sum(row.requested_wire_bytes or 0.0 for row in issued) / expected:.2f}"
    executed = [row.executed_wire_bytes for row in issued if row.executed_wire_bytes is not None]
    is_known = len(executed) == len(issued)
    sent = sum(executed) if is_known else sum(row.issued_wire_bytes for row in issued)
    used = f"{sent / payload:.2f}"
    if used == wanted:
        return f"{wanted} of the gradient bytes, as the run did, but the same number from each rank"
    return f"{wanted} instead of {used} of the gradient bytes per rank"

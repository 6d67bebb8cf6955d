"""Suggests a setting if a config requests a reduce_scatter but a different operation is issued. Pure functions."""

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
    """Return a sentence with the setting for a reduce_scatter, or with the reason why no setting is needed.

    None if no reduce_scatter is requested, or if it is issued as requested.

    Args:
        config: The config of the run.
        configuration: The config as the runtime reads it.
        issued: The rows of the gradients that were reduced in training steps.
        runtime: ``deepspeed`` or ``zero_runtime``. At stages 1 and 2 only zero_runtime can issue a reduce_scatter.
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
        f"For a reduce_scatter, run the program with commprof run --engine zero_runtime and {stage}{_OWN_KEY}: "
        f"{_saved(issued)}."
    )


def _of_an_exchange(configuration: Configuration) -> str:
    same = "An all_to_all with a local sum sends as many bytes as a reduce_scatter"
    if configuration.reduce_scatter_impl == "auto":
        return f"{same}; on NCCL this config issues a reduce_scatter."
    return f"{same}; for a reduce_scatter on NCCL set reduce_scatter_impl: auto."


def _of_deepspeed(configuration: Configuration) -> str:
    """Return a sentence with the keys that minimize DeepSpeed's traffic. Empty if they are set or have no effect."""
    if configuration.reduces_flat_groups:
        return ""
    keys = [] if configuration.buffers_are_contiguous else ["contiguous_gradients: true"]
    if configuration.use_multi_rank_bucket_allreduce:
        keys.append("use_multi_rank_bucket_allreduce: false")
    if not keys:
        return ""
    return f"With {' and '.join(keys)} it sends each owner one reduce, as many bytes by the model. "


def _saved(issued: Sequence[LedgerRow]) -> str:
    """Return a text that compares the bytes of a reduce_scatter with those of the executed operations.

    If the executed operations are not known, the issued operations are used.
    """
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

"""Predicts the messages that sum compressed gradient buckets (stages 0 to 2 of zero_runtime).

For each bucket, every rank gathers the compressed payloads of all p ranks, C bytes from each rank. If the payloads are
Huffman coded, the ranks first gather their lengths.

With ``hierarchical_compress`` a bucket of n elements is first summed over the h ranks of each host. Each of these
ranks gets ceil(n / h) elements in fp32. The ranks with the same position on all hosts then sum these shares
compressed. Finally the ranks of each host gather the shares.

With ``two_phase`` each of p > 2 ranks receives its share of a bucket by an all_to_all of compressed shares. All ranks
then gather the sums, which are compressed again. A share is ceil(n / p) elements, rounded up to blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from commprof.requested.communication.compression import BLOCK, LENGTH_BYTES, Compression
from commprof.requested.configuration import Configuration
from commprof.requested.expectation import Expectation, row
from commprof.requested.explanation import requested_op
from commprof.requested.parameters import item_bytes
from commprof.requested.zero.partition import padded
from commprof.schema import Op, Purpose

_SHARE_BYTES: Final = 4  # bytes of an fp32 element that the ranks of a host sum
CODED: Final = "the size of coded payloads, which depends on their values"


def compressed_sums(
    configuration: Configuration,
    compression: Compression,
    numels: Sequence[int],
    world_size: int,
    backend: str,
) -> list[Expectation]:
    """Return the messages that sum compressed buckets, by operation and group. The caller sets ``when`` and notes.

    Args:
        configuration: The settings of the config.
        compression: The gradient compression. With ``hierarchical``, ``host_ranks`` must be known.
        numels: The number of elements of each bucket.
        world_size: The number of ranks that reduce gradients.
        backend: The backend of the process group. gloo has no native reduce_scatter.
    """
    asked = str(requested_op(configuration))
    size = item_bytes(configuration.communication_dtype)
    if not compression.hierarchical:
        rows = _exchanged(compression, numels, size, world_size)
        return [each._replace(requested_op=asked) for each in rows]
    inside = compression.host_ranks
    hosts = world_size // inside
    widths = [-(-numel // inside) for numel in numels]
    shares = [inside * width * _SHARE_BYTES for width in widths]
    scatter = Op.ALL_TO_ALL if backend == "gloo" else Op.REDUCE_SCATTER
    summed = row("step", Purpose.GRADIENT_REDUCE, scatter, shares, inside)
    gathered = row("step", Purpose.GRADIENT_REDUCE, Op.ALL_GATHER, shares, inside)
    across = tuple(tuple(range(place, world_size, inside)) for place in range(inside))
    rows = [
        summed._replace(
            group_size=inside, intended_op=str(Op.REDUCE_SCATTER) if scatter == Op.ALL_TO_ALL else None
        ),
        *(each._replace(groups=across) for each in _exchanged(compression, widths, size, hosts)),
        gathered._replace(group_size=inside, intended_op=str(Op.ALL_REDUCE)),
    ]
    return [each._replace(requested_op=asked) for each in rows]


def _exchanged(compression: Compression, numels: Sequence[int], size: int, ranks: int) -> list[Expectation]:
    if compression.two_phase and ranks > 2:
        shares = [padded(-(-numel // ranks), BLOCK) for numel in numels]
        payloads = [ranks * compression.payload_bytes(share, size) for share in shares]
        scattered, gathered = (
            row("step", Purpose.GRADIENT_REDUCE, op, payloads, ranks) for op in (Op.ALL_TO_ALL, Op.ALL_GATHER)
        )
        return [
            scattered._replace(intended_op=str(Op.REDUCE_SCATTER)),
            gathered._replace(intended_op=str(Op.ALL_REDUCE)),
        ]
    payloads = [ranks * compression.payload_bytes(numel, size) for numel in numels]
    lengths = [ranks * LENGTH_BYTES for _ in numels] if compression.coded else []
    sent = row("step", Purpose.GRADIENT_REDUCE, Op.ALL_GATHER, [*payloads, *lengths], ranks)
    sent = sent._replace(intended_op=str(Op.ALL_REDUCE))
    if not compression.coded:
        return [sent]
    least = sum(lengths) + ranks * len(numels)
    return [
        sent._replace(bytes_exact=False, least_bytes=least, most_bytes=sent.payload_bytes, estimate=CODED)
    ]

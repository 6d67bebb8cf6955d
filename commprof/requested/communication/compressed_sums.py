"""The messages that sum gradient buckets by sending them compressed (stages 0 to 2 of zero_runtime).

Every rank gathers the payloads of all: C bytes from each of p ranks for a bucket. The lengths of Huffman coded payloads
are gathered before. With ``hierarchical_compress`` a bucket of n elements is first summed over the h ranks of each host:
each gets ceil(n / h) elements in fp32. These shares are summed compressed over the ranks with the same position on all
hosts, and gathered within the host. With ``two_phase`` each of p > 2 ranks receives its share of a bucket by an all_to_all
of compressed shares, and all gather the sums, compressed again. A share is ceil(n / p) elements, rounded up to blocks.
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

_SHARE_BYTES: Final = 4  # of an element of what a host sums: fp32
CODED: Final = "the size of coded payloads, which depends on their values"


def compressed_sums(
    configuration: Configuration,
    compression: Compression,
    numels: Sequence[int],
    world_size: int,
    backend: str,
) -> list[Expectation]:
    """What sums buckets of ``numels`` elements, by operation and group; the caller sets ``when`` and notes.

    Args:
        configuration: what the config says.
        compression: how gradients are compressed; with ``hierarchical`` the ranks of each host too.
        numels: elements of each bucket.
        world_size: ranks that reduce gradients.
        backend: of their group; gloo has no reduce_scatter of its own.
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

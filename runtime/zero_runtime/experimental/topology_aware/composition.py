"""Composed collectives, which are sequences of collectives along the axes of a grid of ranks.

| collective     | along                                                             | bytes on axis 0 (outermost) |
|----------------|-------------------------------------------------------------------|-----------------------------|
| reduce_scatter | the innermost axis first; the next axes get the remaining shards  | 1/inner                     |
| all_gather     | the outermost axis first                                          | 1/inner                     |
| all_reduce     | reduce_scatter along all but axis 0, all_reduce along axis 0, and | 1/inner                     |
|                | all_gather along the other axes in reverse order                  |                             |

inner is the product of the sizes of the other axes. The column "bytes" is relative to the same collective of
the complete message along axis 0. Rank numbers count along the innermost axis first. With two axes this is
the hierarchical scheme of two levels, and with three axes the scheme of a 3D torus (Jain et al., "Efficient
MPI collectives on torus networks"; Mikami et al., arXiv:1811.05233, 2D).

Each function is a generator that yields the work handles of its messages. The caller resumes the generator
when the message is complete. A generator of blocking messages yields only None. Sums of 16-bit values are
rounded to 16 bits after each axis.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from math import prod

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, Work
from zero_runtime.gradient_reduction.reduction import ALL_TO_ALL

Steps = Generator[Work | None, None, None]
Groups = Sequence[DataParallelGroup]


class Composed:
    """The work handle of a composed collective.

    The constructor starts the first message, and ``wait`` starts the other messages.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._work: Work | None = None
        self._go_on()

    @property
    def done(self) -> bool:
        """Whether all messages are complete."""
        return self._work is None

    def _go_on(self) -> None:
        self._work = next((work for work in self._steps if work is not None), None)

    def is_completed(self) -> bool:
        """Return the value of :attr:`done`, which changes only in ``wait``."""
        return self.done

    def wait(self, *arguments: object) -> bool:
        """Run all messages to completion."""
        while self._work is not None:
            self._work.wait()
            self._go_on()
        return True


def all_reduce(
    tensor: torch.Tensor, groups: Groups, implementation: str, why: hooks.tag | None, asynchronous: bool
) -> Steps:
    """Sum the contiguous ``tensor`` in place on every rank.

    Args:
        tensor: The message. If its elements do not divide evenly among the ranks of the inner axes, a padded
            copy is sent.
        groups: This rank's group along each axis, outermost axis first.
        implementation: The implementation of a reduce_scatter along an axis: ``native`` or ``all_to_all``.
        why: The tag of every message.
        asynchronous: Whether messages are only started. The caller that runs the generator then waits for them.
    """
    why = _of_a_part(why)
    flat = tensor.view(-1)
    inner = prod(group.world_size for group in groups[1:])
    numel = -(-flat.numel() // inner) * inner
    padded = flat
    if numel != flat.numel():
        padded = flat.new_zeros(numel)
        padded.narrow(0, 0, flat.numel()).copy_(flat)
    levels = [padded]
    for group in reversed(groups[1:]):
        rows = levels[-1]
        width = rows.numel() // group.world_size
        work, total = _scatter(rows, [width] * group.world_size, group, implementation, why, asynchronous)
        yield work
        mine = rows.narrow(0, group.rank * width, width)
        mine.copy_(total())
        levels.append(mine)
    yield groups[0].all_reduce(levels[-1], why=why, asynchronous=asynchronous)
    for group in groups[1:]:
        mine = levels.pop()
        yield group.all_gather_single(levels[-1], mine, why=why, asynchronous=asynchronous)
    if padded is not flat:
        flat.copy_(padded.narrow(0, 0, flat.numel()))


def reduce_scatter(
    result: list[torch.Tensor],
    rows: torch.Tensor,
    numels: Sequence[int],
    groups: Groups,
    implementation: str,
    why: hooks.tag | None,
    asynchronous: bool,
) -> Steps:
    """Sum row r of the ``rows`` of all ranks on rank r.

    Args:
        result: The list that receives this rank's sum (1-D). The sum is fp32 after an all_to_all of 16-bit
            rows.
        rows: The concatenated rows (1-D), which are not changed.
        numels: The number of elements of each row. The numbers are equal unless ``implementation`` is
            ``all_to_all``.
        groups, implementation, why, asynchronous: The same arguments as for :func:`all_reduce`.
    """
    why = _of_a_part(why)
    row_numels = list(numels)
    for group in reversed(groups):
        size = group.world_size
        # Rank numbers count along this axis first, so the rows of the ranks of this axis alternate.
        split_rows = rows.split(row_numels)
        order = [index for step in range(size) for index in range(step, len(row_numels), size)]
        rows = torch.cat([split_rows[index] for index in order]) if len(row_numels) > size else rows
        widths = [sum(row_numels[step::size]) for step in range(size)]
        work, total = _scatter(rows, widths, group, implementation, why, asynchronous)
        yield work
        row_numels = row_numels[group.rank :: size]
        result[:] = [total()]
        rows = result[0].to(rows.dtype)


def all_gather(
    output: torch.Tensor,
    own: torch.Tensor,
    groups: Groups,
    why: hooks.tag | None,
    asynchronous: bool,
) -> Steps:
    """Gather the tensors ``own`` of all ranks (n elements each) into ``output`` in rank order.

    ``output`` is contiguous and has ranks x n elements.
    """
    why = _of_a_part(why)
    gathered = own.reshape(-1)
    for group in groups:
        wider = output.new_empty(group.world_size * gathered.numel())
        yield group.all_gather_single(wider, gathered, why=why, asynchronous=asynchronous)
        gathered = wider
    sizes = [group.world_size for group in groups]
    # The first dimension is now the axis of the last gather.
    turned = gathered.view(*reversed(sizes), -1).permute(*reversed(range(len(sizes))), len(sizes))
    output.view(*sizes, -1).copy_(turned)


def _scatter(
    rows: torch.Tensor,
    numels: Sequence[int],
    group: DataParallelGroup,
    implementation: str,
    why: hooks.tag | None,
    asynchronous: bool,
) -> tuple[Work | None, Callable[[], torch.Tensor]]:
    """Start a reduce_scatter along one axis.

    Returns:
        The work handle, and a function to call after the wait, which returns this rank's sum.
    """
    mine = numels[group.rank]
    if implementation != ALL_TO_ALL:
        output = rows.new_empty(mine)
        return group.reduce_scatter_single(output, rows, why=why, asynchronous=asynchronous), lambda: output
    received = rows.new_empty(group.world_size * mine)
    meant = None if why is None else _meaning_reduce_scatter(why)
    return group.sum_rows(received, rows, numels, why=meant, asynchronous=asynchronous)


def _of_a_part(why: hooks.tag | None) -> hooks.tag | None:
    """Return the tag of a composed collective's messages, which is ``why`` without padding bytes.

    The padding of the single messages is not known.
    """
    if why is None or why.padding_bytes is None:
        return why
    return hooks.tag(
        why.purpose, why.bucket, why.owner, why.parameters, why.intended_op, why.bucket_bytes, why.module
    )


def _meaning_reduce_scatter(why: hooks.tag) -> hooks.tag:
    if why.intended_op == "reduce_scatter":
        return why
    return hooks.tag(
        why.purpose,
        bucket=why.bucket,
        owner=why.owner,
        parameters=why.parameters,
        intended_op="reduce_scatter",
        bucket_bytes=why.bucket_bytes,
        module=why.module,
    )

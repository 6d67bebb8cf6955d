"""Composed collectives: collectives over a grid of ranks as sequences of collectives along its axes.

| collective     | along                                                             | bytes on axis 0 (outermost) |
|----------------|-------------------------------------------------------------------|-----------------------------|
| reduce_scatter | the innermost axis first; further axes have what remains          | 1/inner                     |
| all_gather     | the outermost axis first                                          | 1/inner                     |
| all_reduce     | reduce_scatter along all but axis 0, all_reduce along axis 0, and | 1/inner                     |
|                | all_gather along the other axes in reverse order                  |                             |

inner is the product of the other sizes; "bytes" compares with the same collective along axis 0 of the whole message. Rank
numbers count along the innermost axis first. This is the hierarchical scheme of two levels, and with three axes that of a 3D
torus (Jain et al., "Efficient MPI collectives on torus networks"; Mikami et al., arXiv:1811.05233, 2D).

Each function is a generator that yields the work handles of its messages; resume it once a message is complete. A blocking
one yields only None. Sums of 16-bit values are rounded to 16 bits after each axis.
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
    """The work handle of a composed collective. The constructor starts the first message, and ``wait`` the others."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._work: Work | None = None
        self._go_on()

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._work is None

    def _go_on(self) -> None:
        self._work = next((work for work in self._steps if work is not None), None)

    def is_completed(self) -> bool:
        """The value of :attr:`done`, which changes only by waiting."""
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
        tensor: the message; if its elements do not divide among the inner axes, a padded copy is sent.
        groups: this rank's group along each axis, outermost first.
        implementation: of a reduce_scatter along an axis: ``native`` or ``all_to_all``.
        why: the tag of every message.
        asynchronous: whether messages are only started; the caller that runs the steps waits for them.
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
    """Sum row r of ``rows`` on rank r.

    Args:
        result: gets this rank's sum, 1-D; with an all_to_all of 16-bit rows it is fp32.
        rows: the concatenated rows, 1-D; not changed.
        numels: elements of each row; equal unless ``implementation`` is ``all_to_all``.
        groups, implementation, why, asynchronous: as in :func:`all_reduce`.
    """
    why = _of_a_part(why)
    row_numels = list(numels)
    for group in reversed(groups):
        size = group.world_size
        # Rank numbers count along this axis first, so the rows of its ranks alternate.
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
    """Gather every rank's ``own`` (n elements) into ``output`` (ranks x n, contiguous), in rank order."""
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
    """A reduce_scatter along one axis: its work handle, and a function that then returns this rank's sum."""
    mine = numels[group.rank]
    if implementation != ALL_TO_ALL:
        output = rows.new_empty(mine)
        return group.reduce_scatter_single(output, rows, why=why, asynchronous=asynchronous), lambda: output
    received = rows.new_empty(group.world_size * mine)
    meant = None if why is None else _meaning_reduce_scatter(why)
    return group.sum_rows(received, rows, numels, why=meant, asynchronous=asynchronous)


def _of_a_part(why: hooks.tag | None) -> hooks.tag | None:
    """The tag of the messages of one collective, without padding bytes: the padding of each message is not known."""
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

"""The exchange of compressed payloads, in which every rank receives the payloads of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, Work
from zero_runtime.experimental.compression.codecs import Codec
from zero_runtime.experimental.compression.entropy import coded, decoded

Payloads = Callable[[], Sequence[torch.Tensor]]


class Exchange(NamedTuple):
    """The way in which payloads are encoded and sent.

    Attributes:
        codec: The codec that encodes the payloads.
        entropy: Whether each payload is also Huffman coded, if this makes the payload smaller. The sizes are
            then sent first, in a message of 8 bytes for each rank, and all payloads are padded to the largest
            one.
        two_phase: Whether more than two ranks sum in two phases. Otherwise each rank receives all payloads.
    """

    codec: Codec
    entropy: bool = False
    two_phase: bool = False

    def send(
        self,
        payload: torch.Tensor,
        numel: int,
        group: DataParallelGroup,
        why: hooks.tag,
        asynchronous: bool = False,
    ) -> tuple[Work | None, Payloads]:
        """Send this rank's ``payload`` of ``numel`` numbers to all of ``group``.

        Returns:
            A work handle to wait for, or None, and a function to call after the wait. The function returns the
            payloads of all ranks, in rank order.
        """
        if not self.entropy:
            received = payload.new_empty(group.world_size * payload.numel())
            work = group.all_gather_single(received, payload, why=why, asynchronous=asynchronous)
            return work, lambda: received.view(group.world_size, -1).unbind()
        return self._send_coded(payload, numel, group, why, asynchronous)

    def _send_coded(
        self, payload: torch.Tensor, numel: int, group: DataParallelGroup, why: hooks.tag, asynchronous: bool
    ) -> tuple[Work | None, Payloads]:
        sections = self.codec.sections(numel)
        message = coded(payload, sections)
        if message.numel() >= payload.numel():
            message = payload
        mine = torch.tensor([message.numel()], dtype=torch.int64, device=payload.device)
        sizes = mine.new_empty(group.world_size)
        group.all_gather_single(sizes, mine, why=why)
        lengths = sizes.tolist()
        longest = max(lengths)
        row = payload.new_zeros(longest)
        row.narrow(0, 0, message.numel()).copy_(message)
        received = payload.new_empty(group.world_size * longest)
        work = group.all_gather_single(received, row, why=why, asynchronous=asynchronous)

        def payloads() -> Sequence[torch.Tensor]:
            rows = received.view(group.world_size, -1).unbind()
            return [
                each.narrow(0, 0, length) if length == payload.numel() else decoded(each, sections)
                for each, length in zip(rows, lengths, strict=True)
            ]

        return work, payloads

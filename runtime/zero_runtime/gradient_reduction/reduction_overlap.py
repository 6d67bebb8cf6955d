"""Overlap of the gradient reduction with the backward pass.

On a CPU the collectives of a bucket are asynchronous: the process group's own threads run them, and the sum is processed
when the bucket *lands*. On CUDA the whole reduction, including the processing of the sum, is queued on a side stream, and
landing makes the current stream wait for it. Either way, the order of the collectives and every sum are the same as
without overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from zero_runtime.gradient_reduction.gradient_buckets import Bucket, Flight
from zero_runtime.gradient_reduction.reduction import Finish

# Buckets in flight at once: one on the wire, one queued behind it. A third is being filled meanwhile.
DEPTH: Final = 2
# Chunks are small: gloo's two threads send one each, and a third is ready for the first thread that is free.
CHUNK_DEPTH: Final = 3


class Overlap:
    """Sends buckets and keeps a queue of those in flight.

    Args:
        device: of the gradients.
        enabled: False makes ``send`` wait for every bucket.
        depth: buckets in flight at once.
    """

    def __init__(self, device: torch.device, enabled: bool, depth: int = DEPTH) -> None:
        self._depth = depth
        self._stream = torch.cuda.Stream(device) if enabled and device.type == "cuda" else None
        self._asynchronous = enabled and self._stream is None
        self._flights: deque[Flight] = deque()

    def send(
        self, bucket: Bucket, start: Callable[[Bucket], Finish | None], depth: int | None = None
    ) -> Flight:
        """Send ``bucket``, once fewer than ``depth`` buckets are in flight.

        Args:
            bucket: the bucket.
            start: sends it, and returns the function that processes the sum; None where that has been done.
            depth: for this bucket; default: that of all.
        """
        if self._stream is not None:
            return self._send_beside(bucket, start, self._stream)
        while len(self._flights) >= (self._depth if depth is None else depth):
            self._flights.popleft().land()
        bucket.asynchronous = self._asynchronous
        flight = Flight(start(bucket))
        if not flight.landed:
            self._flights.append(flight)
        return flight

    def _send_beside(
        self, bucket: Bucket, start: Callable[[Bucket], Finish | None], stream: torch.cuda.Stream
    ) -> Flight:
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            start(bucket)
            arrived = stream.record_event()
        # The allocator must not reuse their memory before the side stream has finished.
        for tensor in (bucket.tensor, *(entry.gradient for entry in bucket.entries)):
            tensor.record_stream(stream)
        flight = Flight(lambda: torch.cuda.current_stream(stream.device).wait_event(arrived))
        self._flights.append(flight)
        return flight

    def land_all(self) -> None:
        """Wait for every bucket in flight."""
        while self._flights:
            self._flights.popleft().land()

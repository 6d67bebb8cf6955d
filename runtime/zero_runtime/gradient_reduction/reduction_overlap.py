"""Overlap of the gradient reduction with the backward pass.

On a CPU the collectives of a bucket are asynchronous. The process group's own threads run them, and the sum is
processed when the bucket *lands*. On CUDA the whole reduction, including the processing of the sum, is queued
on a side stream. When a bucket lands, the current stream waits for the side stream. In both cases the order of
the collectives and every sum are the same as without overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from zero_runtime.gradient_reduction.gradient_buckets import Bucket, Flight
from zero_runtime.gradient_reduction.reduction import Finish

# Buckets in flight at the same time: one is being sent, and one is queued. A third bucket is being filled meanwhile.
DEPTH: Final = 2
# Chunks are small. Each of gloo's two threads sends one, and a third is ready for the first thread that becomes free.
CHUNK_DEPTH: Final = 3


class Overlap:
    """Sends buckets and keeps a queue of the buckets in flight.

    Args:
        device: The device of the gradients.
        enabled: Whether buckets may be in flight. If False, ``send`` waits for every bucket.
        depth: The largest number of buckets in flight at the same time.
    """

    def __init__(self, device: torch.device, enabled: bool, depth: int = DEPTH) -> None:
        self._depth = depth
        self._stream = torch.cuda.Stream(device) if enabled and device.type == "cuda" else None
        self._asynchronous = enabled and self._stream is None
        self._flights: deque[Flight] = deque()

    def send(
        self, bucket: Bucket, start: Callable[[Bucket], Finish | None], depth: int | None = None
    ) -> Flight:
        """Send ``bucket``, as soon as fewer than ``depth`` buckets are in flight.

        Args:
            bucket: the bucket.
            start: A function that sends the bucket. It returns the function that processes the sum, or None if
                the sum has already been processed.
            depth: The limit for this bucket. The default is the limit for all buckets.
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
        # The allocator must not reuse the memory of these tensors before the side stream has finished.
        for tensor in (bucket.tensor, *(entry.gradient for entry in bucket.entries)):
            tensor.record_stream(stream)
        flight = Flight(lambda: torch.cuda.current_stream(stream.device).wait_event(arrived))
        self._flights.append(flight)
        return flight

    def land_all(self) -> None:
        """Wait for every bucket in flight."""
        while self._flights:
            self._flights.popleft().land()

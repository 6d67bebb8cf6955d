"""Messages between neighboring pipeline stages, with activations in one direction and gradients in the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError
from zero_runtime.pipeline.transfer.tensor_headers import (
    HEADER_NUMEL,
    Form,
    TensorForm,
    form_from,
    form_of,
    more_numel,
)

_PIPELINE: Final = hooks.tag("pipeline")
IN_FLIGHT: Final = 16  # largest number of outstanding asynchronous sends


class Arrival:
    """Tensors that are being received or have been received."""

    def __init__(self, tensors: list[torch.Tensor], restore: Callable[[list[torch.Tensor]], Any]) -> None:
        self._restore = restore
        self.tensors = tensors
        self.works: list[Any] = []

    def value(self) -> Any:
        """Wait until the value has arrived, and return it."""
        while self.works:
            self.works.pop(0).wait()
        return self._restore(self.tensors)


class Channel:
    """The connections of this stage to the previous and the next stage.

    Every message is a send or receive of one tensor. By default messages block. With ``begun`` they are
    asynchronous: the stage waits for a received tensor when its value is used. It waits for a send some
    messages later, or in :meth:`settle`.

    A header with the shapes precedes the first activation of each chunk, or every activation with
    ``dynamic``. Headers always block. All messages have the tag ``pipeline``, and the micro-batch is the
    field ``micro_step`` of the record. If each rank has several chunks of the model, the last rank is also
    connected to the first rank.

    Args:
        stages: The ranks of all stages, in order.
        dynamic: Whether shapes and dtypes may change from one micro-batch to the next.
        chunks: The number of chunks of the model on each rank.
        begun: Whether messages are asynchronous. The schedule must have the messages in the same order on all
            ranks.
    """

    def __init__(
        self, stages: DataParallelGroup, dynamic: bool, chunks: int = 1, begun: bool = False
    ) -> None:
        self._stages = stages
        self._before = (stages.rank - 1) % stages.world_size
        self._after = (stages.rank + 1) % stages.world_size
        self._dynamic = dynamic
        self._chunks = chunks
        self._begun = begun
        self._sent: dict[int, Form] = {}
        self._received: dict[int, Form] = {}
        # The messages between chunks of this rank, if there is only one stage.
        self._sent_to_self: deque[torch.Tensor] = deque()
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()  # outstanding asynchronous sends

    def reset(self) -> None:
        """Send shapes again before the next activation. All stages must call this method."""
        self._sent.clear()
        self._received.clear()

    def open(self) -> None:
        """Send one number between neighboring stages, so that connections exist before the first step."""
        number = torch.zeros((), device=self._stages.device)
        rank, last = self._stages.rank, self._stages.world_size - 1
        even = rank % 2 == 0
        for sends in (even, not even):
            if sends and rank < last:
                self._send(number, self._after)
            elif not sends and rank:
                self._receive(number, self._before)
        if self._chunks > 1 and last > 1:
            if rank == last:
                self._send(number, self._after)
            elif not rank:
                self._receive(number, self._before)

    def send_activation(self, value: Any, chunk: int = 0) -> None:
        """Send the output of this rank's chunk ``chunk`` to the next chunk.

        Raises:
            UsageError: The form differs from the form of the previous output and ``dynamic`` is false, or the
                output cannot be sent.
        """
        form, tensors = form_of(value)
        earlier_form = self._sent.get(chunk)
        if self._dynamic or earlier_form is None:
            self._send_form(form)
            self._sent[chunk] = form
        elif form != earlier_form:
            raise UsageError(
                f"a stage returns {_shown(form)} after {_shown(earlier_form)}; give PipelineModule dynamic_shape=True "
                "where shapes change, or call engine.reset_activation_shape() on all ranks where they change rarely"
            )
        for each in tensors:
            self._start_send(each.detach(), self._after)

    def receive_activation(self, differentiable: bool, chunk: int = 0) -> Arrival:
        """Receive the input of chunk ``chunk``.

        With ``differentiable``, its floating-point and complex tensors require gradients.
        """
        form = self._received.get(chunk)
        if self._dynamic or form is None:
            form = self._received[chunk] = self._receive_form()

        def restore(tensors: list[torch.Tensor]) -> Any:
            pairs = zip(form.tensors, tensors, strict=True)
            return form.restore(
                [
                    tensor.requires_grad_() if differentiable and each.has_gradient else tensor
                    for each, tensor in pairs
                ]
            )

        return self._arriving(form.tensors, self._before, restore)

    def send_gradients(self, inputs: Any) -> None:
        """Send back the gradients of received ``inputs``.

        For an input on which the loss does not depend, the gradient is zero.
        """
        for each in tree_leaves(inputs):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                self._start_send(torch.zeros_like(each) if each.grad is None else each.grad, self._before)

    def receive_gradients(self, outputs: Any) -> Arrival:
        """Receive the gradients of the sent ``outputs``, as a list with one gradient per tensor that has gradients."""
        form, _ = form_of(outputs)
        return self._arriving([each for each in form.tensors if each.has_gradient], self._after, list)

    def settle(self) -> None:
        """Wait until all outstanding sends are complete."""
        while self._leaving:
            self._leaving.popleft()[0].wait()

    def _arriving(
        self, forms: Sequence[TensorForm], stage: int, restore: Callable[[list[torch.Tensor]], Any]
    ) -> Arrival:
        arrival = Arrival([each.empty(self._stages.device) for each in forms], restore)
        for each in arrival.tensors:
            if self._begun and stage != self._stages.rank and each.numel():
                arrival.works.append(self._stages.start_receive(each, stage, why=_PIPELINE))
            else:
                self._receive(each, stage)
        return arrival

    def _start_send(self, tensor: torch.Tensor, stage: int) -> None:
        if not self._begun or stage == self._stages.rank or not tensor.numel():
            self._send(tensor, stage)
            return
        tensor = tensor.contiguous()
        self._leaving.append((self._stages.start_send(tensor, stage, why=_PIPELINE), tensor))
        while len(self._leaving) > IN_FLIGHT:
            self._leaving.popleft()[0].wait()

    def _send_form(self, form: Form) -> None:
        header, more = form.header()
        self._send(self._numbers(header + [0] * (HEADER_NUMEL - len(header))), self._after)
        if more:
            self._send(self._numbers(more), self._after)

    def _receive_form(self) -> Form:
        header = self._receive_numbers(HEADER_NUMEL)
        count = more_numel(header)
        return form_from(header, self._receive_numbers(count) if count else ())

    def _receive_numbers(self, count: int) -> list[int]:
        numbers = self._numbers([0] * count)
        self._receive(numbers, self._before)
        received: list[int] = numbers.tolist()
        return received

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._stages.device)

    def _send(self, tensor: torch.Tensor, stage: int) -> None:
        if stage == self._stages.rank:
            self._sent_to_self.append(tensor.clone())
        elif tensor.numel():
            self._stages.send(tensor.contiguous(), stage, why=_PIPELINE)

    def _receive(self, tensor: torch.Tensor, stage: int) -> None:
        if stage == self._stages.rank:
            tensor.copy_(self._sent_to_self.popleft())
        elif tensor.numel():
            self._stages.receive(tensor, stage, why=_PIPELINE)


def _shown(form: Form) -> str:
    tensors = ", ".join(
        f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in form.tensors
    )
    return f"({tensors})" if form.structure is not None else tensors

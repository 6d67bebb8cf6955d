"""Checkpointed regions: calls that keep only their inputs and run again in the backward pass.

The non-reentrant torch.utils.checkpoint drops the tensors that a region saves. It runs the region again when
the first of these tensors is needed, and stops when all are recomputed. A region adds storage of its inputs
(:mod:`~zero_runtime.activation_checkpointing.activation_storage`), the states of all random generators, and an
operation at each of its two ends.

The first operation of a region is a mark, which saves an empty tensor. The last operation is an exit. The
backward pass begins with the exit. The exit requests the tensor of the mark, so that the region runs again
before the backward pass of any of its operations. Therefore modules with sharded parameters (stage 3) are
entered in the same order as with DeepSpeed's reentrant checkpoints. The backward pass of the region ends with
the mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zero_runtime.activation_checkpointing.activation_storage import StoredTensor
from zero_runtime.activation_checkpointing.held import is_holding, run_and_drop_saved
from zero_runtime.activation_checkpointing.process_settings import process
from zero_runtime.activation_checkpointing.random_states import RandomStates
from zero_runtime.activation_checkpointing.recomputation_times import Boundaries


@_disable_dynamo
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, keep only its inputs, and recompute the tensors that it saves in the backward pass.

    If the function is deterministic, the gradients are bitwise equal to those of ``function(*args, **kwargs)``.
    The second call draws the same random numbers from the default generators and from ``get_rng_tracker()``.

    Args:
        function: A module or any other callable.
        args, kwargs: The arguments of the function. Tensors are also found in nested tuples, lists and dictionaries.

    Returns:
        The result of the function. Tensors in the result that require gradients are aliases of the function's tensors.

    Raises:
        UsageError: ``contiguous_memory_optimization`` has too few buffers.
    """
    return _run(function, args, kwargs, ends=True)


@_disable_dynamo
def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` like :func:`checkpoint`, but recompute only when the backward pass first needs a saved tensor.

    :func:`checkpoint` recomputes before the backward pass of the function begins. At stage 3, this difference
    changes the order in which parameters are gathered. With ``profile``, the backward pass is not timed.
    """
    return _run(function, args, kwargs, ends=False)


class CheckpointFunction:
    """A class with DeepSpeed's name for :func:`checkpoint`, for scripts that call the class directly."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Checkpoint ``run_function(*args)`` and append its results to ``all_outputs``, one by one."""
        outputs = checkpoint(run_function, *args)
        all_outputs += [outputs] if isinstance(outputs, torch.Tensor) else outputs
        return outputs


def _run(function: Callable[..., Any], args: Any, kwargs: Any, *, ends: bool) -> Any:
    boundaries = Boundaries(process.settings, function)
    with boundaries.forward():
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        region = _Region(function, args, kwargs, boundaries, ends and not is_holding())
        if is_holding():
            return run_and_drop_saved(region, region.passed)
        return torch_checkpoint(region, *region.passed, use_reentrant=False, preserve_rng_state=False)


class _Passed(int):
    """The number of an input tensor among the tensors that torch keeps."""


class _Region:
    """A function and its inputs. The first call is the forward pass, and every later call is in a backward pass.

    Attributes:
        passed: The input tensors that torch keeps.
    """

    def __init__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, boundaries: Boundaries, ends: bool
    ) -> None:
        leaves, self._structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.passed: list[torch.Tensor] = []
        self._function = function
        self._boundaries = boundaries
        self._ends = ends
        # The first call gets the original arguments, because a function may append to a list among them.
        self._first: tuple[Any, Any] | None = args, kwargs
        self._stored_leaves = self._keep(leaves)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._random = RandomStates(tensors)

    def _keep(self, leaves: Sequence[Any]) -> list[Any]:
        """Store ``leaves`` so that they can be restored. A tensor that is passed twice is stored once."""
        store = process.store
        stored_leaves: list[Any] = []
        by_id: dict[int, Any] = {}
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                stored_leaves.append(leaf)
                continue
            if id(leaf) not in by_id:
                if store is not None and store.takes(leaf):
                    by_id[id(leaf)] = store.keep(leaf, place)
                else:
                    by_id[id(leaf)] = _Passed(len(self.passed))
                    self.passed.append(leaf)
            stored_leaves.append(by_id[id(leaf)])
        return stored_leaves

    def __call__(self, *tensors: torch.Tensor) -> Any:
        first, self._first = self._first, None
        if first is None:
            self._again(tensors)
            return None
        self.passed = []
        mark = _Mark.apply(_anchor(self._device), self._boundaries)
        args, kwargs = first
        outputs = self._function(*args, **kwargs)
        return self._exit(mark, outputs) if self._ends else outputs

    def _again(self, tensors: Sequence[torch.Tensor]) -> None:
        with self._boundaries.again(), self._random.again():
            _Mark.apply(_anchor(self._device), self._boundaries)
            args, kwargs = tree_unflatten(self._inputs(tensors), self._structure)
            self._function(*args, **kwargs)

    def _inputs(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return the inputs of the first call. Tensors in the store are restored."""
        stored = {id(each): each for each in self._stored_leaves if isinstance(each, StoredTensor)}
        differentiable = [each for each in stored.values() if each.requires_grad]
        restored = {key: each.whole() for key, each in stored.items() if not each.requires_grad}
        if differentiable:
            gathered = _Restored.apply(_anchor(self._device), differentiable)
            restored |= {id(each): tensor for each, tensor in zip(differentiable, gathered, strict=True)}
        return [
            restored[id(each)]
            if isinstance(each, StoredTensor)
            else tensors[each]
            if isinstance(each, _Passed)
            else each
            for each in self._stored_leaves
        ]

    def _exit(self, mark: torch.Tensor, outputs: Any) -> Any:
        leaves, structure = tree_flatten(outputs)
        numbers = [
            number
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
        ]
        if not numbers:
            return outputs
        replaced = _Exit.apply(mark, self._boundaries, *(leaves[number] for number in numbers))
        for number, tensor in zip(numbers, replaced, strict=True):
            leaves[number] = tensor
        return tree_unflatten(leaves, structure)


def _anchor(device: torch.device) -> torch.Tensor:
    """Return an empty tensor that requires a gradient, so that autograd records the operation that uses it."""
    return torch.empty(0, device=device, requires_grad=True)


class _Mark(torch.autograd.Function):
    """The first operation of a region."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, boundaries: Boundaries) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.boundaries = boundaries
        ctx.save_for_backward(anchor.detach())
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
        ctx.boundaries.end_backward()
        return None, None


class _Exit(torch.autograd.Function):
    """The last operation of a region, which returns aliases of the differentiable outputs."""

    @staticmethod
    def forward(
        ctx: Any, mark: torch.Tensor, boundaries: Boundaries, *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.boundaries = boundaries
        ctx.mark = mark.grad_fn
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.boundaries.begin_backward()
        _ = ctx.mark.saved_tensors  # this access runs the region again
        return None, None, *gradients


class _Restored(torch.autograd.Function):
    """An operation that restores inputs from the store.

    The inputs are the results of an operation, so that the region may change them in place.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, stored: Sequence[StoredTensor]) -> tuple[torch.Tensor, ...]:
        return tuple(each.whole() for each in stored)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None

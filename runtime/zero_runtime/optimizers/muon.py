"""Muon: orthogonalized momentum for matrices, and Adam for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from zero_runtime.errors import ConfigError
from zero_runtime.optimizers.newton_schulz import METHODS, orthogonalized
from zero_runtime.sharding.shards import shard_of

MOMENTUM: Final = "momentum_buffer"
_NOT_BY_NAME: Final = ("embed", "lm_head")
_OF_MATRICES: Final = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
_OF_OTHERS: Final = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}


class Muon(torch.optim.Optimizer):
    """Muon of Jordan et al. (2024) for the parameters marked ``use_muon``, and AdamW or Adam for the others.

    For a flat shard of matrices, the gradient already is the update. The sharded optimizer step orthogonalizes
    the matrices before it calls this optimizer (:mod:`zero_runtime.optimizer_step.matrix_updates`).

    Args:
        params: The tensors or param groups. Each group is divided into a group of matrices and a group of the
            other parameters.
        lr: The learning rate of both kinds of groups. The defaults are 0.02 for matrices and 3e-4 for the
            others.
        muon_lr: The learning rate of the matrices. It overrides ``lr``.
        adam_lr: The learning rate of the other parameters. It overrides ``lr``.
        momentum: The momentum coefficient of the matrices.
        weight_decay: The weight decay. It is decoupled.
        ns_method: The method that orthogonalizes matrices: gram or standard.
        betas: The betas of Adam.
        eps: The eps of Adam.
        adam_w_mode: Whether Adam's weight decay is decoupled.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_method: str = "gram",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        adam_w_mode: bool = True,
    ) -> None:
        configured = {"momentum": momentum, "weight_decay": weight_decay, "ns_method": ns_method}
        configured |= {"betas": tuple(betas), "eps": eps}
        halves = (
            (True, _OF_MATRICES, _first(muon_lr, lr, _OF_MATRICES["lr"])),
            (False, _OF_OTHERS, _first(adam_lr, lr, _OF_OTHERS["lr"])),
        )
        groups = []
        for own, tensors in _groups(params):
            for use_muon, defaults, rate in halves:
                half = [each for each in tensors if each.use_muon is use_muon]
                if not half:
                    continue
                if use_muon:
                    half.sort(key=_shape, reverse=True)
                options = {name: configured.get(name, value) for name, value in defaults.items()} | {
                    "lr": rate
                }
                options |= {name: value for name, value in own.items() if name in defaults}
                if use_muon and options["ns_method"] not in METHODS:
                    raise ConfigError(
                        f"optimizer.params.ns_method is {options['ns_method']!r}; expected one of: {', '.join(METHODS)}"
                    )
                groups.append({"params": half, "use_muon": use_muon, **options})
        super().__init__(groups, {})
        others = [group for group in self.param_groups if not group["use_muon"]]
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        # The inner Adam shares groups and state with this optimizer.
        self._adam = kind(others) if others else None
        if self._adam is not None:
            self._adam.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter. A missing gradient counts as zeros."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    tensor.grad = torch.zeros_like(tensor)
                if group["use_muon"]:
                    update = self._update(group, tensor) if tensor.dim() > 1 else tensor.grad
                    rate = float(group["lr"])
                    tensor.mul_(1.0 - rate * group["weight_decay"]).add_(update, alpha=-rate)
        if self._adam is not None:
            self._adam.step()
        return loss

    def _update(self, group: Mapping[str, Any], tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.grad is not None
        state = self.state[tensor]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(tensor, requires_grad=False)
        update, state[MOMENTUM] = matrix_update(tensor.grad, state[MOMENTUM], group)
        return update


def matrix_update(
    gradient: torch.Tensor, momentum: torch.Tensor, group: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the update of one matrix, for a learning rate of 1, and the new momentum.

    Args:
        gradient: The gradient, of two or more dimensions. The filters of a convolution become rows.
        momentum: The momentum, of the same shape as the gradient. It is not modified.
        group: The options ``momentum`` and ``ns_method``.
    """
    momentum = momentum.lerp(gradient, 1.0 - group["momentum"])
    blend = gradient.lerp(momentum, group["momentum"])
    matrix = blend.flatten(1) if blend.dim() == 4 else blend
    scale = max(1.0, gradient.size(-2) / gradient.size(-1)) ** 0.5
    update = orthogonalized(matrix, group["ns_method"]).mul_(scale)
    return update.to(gradient.dtype).reshape(gradient.shape), momentum


def mark_matrices(module: torch.nn.Module) -> None:
    """Set ``use_muon`` on every parameter that lacks this attribute.

    The value is true for matrices, except for embeddings and heads, which are recognized by name.
    """
    for name, parameter in module.named_parameters():
        if not hasattr(parameter, "use_muon"):
            named = any(word in name.lower() for word in _NOT_BY_NAME)
            parameter.use_muon = len(_shape(parameter)) > 1 and not named  # type: ignore[attr-defined]


def _groups(params: Iterable[Any]) -> list[tuple[dict[str, Any], list[Any]]]:
    """Return the options and trainable parameters of each group. Single tensors form the last group."""
    groups: list[tuple[dict[str, Any], list[Any]]] = []
    loose = []
    for each in params:
        if isinstance(each, dict):
            groups.append(({name: value for name, value in each.items() if name != "params"}, each["params"]))
        else:
            loose.append(each)
    if loose:
        groups.append(({}, loose))
    unmarked = sum(not hasattr(each, "use_muon") for _, tensors in groups for each in tensors)
    if unmarked:
        raise ConfigError(
            f"{unmarked} parameters of Muon are not in the model, so it is unknown whether they are matrices to "
            "orthogonalize; set use_muon to True or False on each"
        )
    return [(own, [each for each in tensors if each.requires_grad]) for own, tensors in groups]


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    shard = shard_of(tensor)
    return tuple(tensor.shape if shard is None else shard.shape)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)

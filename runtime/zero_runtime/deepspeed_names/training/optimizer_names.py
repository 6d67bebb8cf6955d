"""DeepSpeed's names for optimizers: ``deepspeed.ops.adam``, ``lamb``, ``lion`` and ``adagrad``.

The optimizers are those of torch or of this runtime. The signatures are DeepSpeed's. The names for CPUs and for
GPUs refer to the same class here, because the state is on the device of the parameters.
"""

from __future__ import annotations

from typing import Any

import torch

from zero_runtime.errors import ConfigError, UnsupportedError
from zero_runtime.optimizer_step.replicated_step import ReplicatedOptimizer
from zero_runtime.optimizer_step.torch_optimizer import with_fusion
from zero_runtime.optimizers import Lamb, Lion, UncorrectedAdam

Betas = tuple[float, float]


def adam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    decoupled: bool = True,
) -> torch.optim.Optimizer:
    """Return torch's AdamW, or torch's Adam if ``decoupled`` is false. The fused version is used if possible.

    Without bias correction, return this runtime's own Adam.

    Raises:
        UnsupportedError: ``amsgrad`` is true and ``bias_correction`` is false.
    """
    groups = list(params)
    common: dict[str, Any] = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
    if not bias_correction:
        if amsgrad:
            raise UnsupportedError(
                "amsgrad without bias correction is not in this version; leave out one of them"
            )
        return UncorrectedAdam(groups, **common, decoupled=decoupled)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(groups, **with_fusion(kind, {**common, "amsgrad": amsgrad}, groups))


class _Named(type):
    """The metaclass of classes that construct an optimizer of another class.

    ``isinstance`` is true for these optimizers. It is also true for the wrapper that replaces such an optimizer
    at stage 0, because DeepSpeed's engine has the optimizer itself there.
    """

    kinds: tuple[type, ...]

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        optimizer = super().__call__(*arguments, **options)
        # initialize uses this attribute to check whether the script used one of DeepSpeed's names.
        optimizer.made_as = cls.__name__
        return optimizer

    def __instancecheck__(cls, instance: Any) -> bool:
        if isinstance(instance, ReplicatedOptimizer):
            return isinstance(instance.optimizer, cls.kinds)
        return isinstance(instance, cls.kinds)


class FusedAdam(metaclass=_Named):
    """DeepSpeed's Adam on a GPU.

    Args:
        params: The tensors or param groups.
        lr: The learning rate.
        bias_correction: Whether to correct for moving averages that begin at zero.
        betas: The decay rates of the moving averages.
        eps: The number that is added to the square root of the mean square.
        adam_w_mode: Whether weight decay is applied separately from the gradient (AdamW).
        weight_decay: The weight decay of the parameters.
        amsgrad: True is refused, as in DeepSpeed.
        set_grad_none: This argument has no effect, because the engine drops gradients.
    """

    kinds = (torch.optim.Adam, UncorrectedAdam)

    def __new__(  # type: ignore[misc]  # noqa: D102
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        if amsgrad:
            raise ConfigError("FusedAdam has no variant amsgrad; use torch.optim.AdamW(amsgrad=True)")
        return adam(params, lr, bias_correction, betas, eps, weight_decay, False, adam_w_mode)


class DeepSpeedCPUAdam(metaclass=_Named):
    """DeepSpeed's Adam on a CPU.

    The arguments are those of :class:`FusedAdam`, except that ``adam_w_mode`` is called ``adamw_mode`` and
    ``amsgrad`` is supported.
    """

    kinds = (torch.optim.Adam, UncorrectedAdam)

    def __new__(  # type: ignore[misc]  # noqa: D102
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        if not fp32_optimizer_states:
            raise UnsupportedError(
                "fp32_optimizer_states=False is not in this version: the state has the dtype of the master weights; see "
                "bf16.bf16_optimizer_states in the configuration"
            )
        return adam(model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode)


class FusedLamb(metaclass=_Named):
    """DeepSpeed's Lamb. The optimizer is this runtime's Lamb, which also works on a CPU and needs no special kernel."""

    kinds = (Lamb,)

    def __new__(  # type: ignore[misc]  # noqa: D102
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> torch.optim.Optimizer:
        if amsgrad:
            raise ConfigError("FusedLamb has no variant amsgrad; leave it out")
        if max_grad_norm:
            raise UnsupportedError(
                f"max_grad_norm={max_grad_norm} of FusedLamb is not in this version; use gradient_clipping in the config"
            )
        return Lamb(
            params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff, min_coeff
        )


class FusedLion(metaclass=_Named):
    """DeepSpeed's Lion on a GPU. The optimizer is this runtime's Lion."""

    kinds = (Lion,)

    def __new__(  # type: ignore[misc]  # noqa: D102
        cls,
        params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        return Lion(params, lr, betas, weight_decay)


class DeepSpeedCPULion(metaclass=_Named):
    """DeepSpeed's Lion on a CPU. The optimizer is this runtime's Lion."""

    kinds = (Lion,)

    def __new__(  # type: ignore[misc]  # noqa: D102
        cls,
        model_params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        return Lion(model_params, lr, betas, weight_decay)


class DeepSpeedCPUAdagrad(metaclass=_Named):
    """DeepSpeed's Adagrad on a CPU. The optimizer is torch's Adagrad."""

    kinds = (torch.optim.Adagrad,)

    def __new__(  # type: ignore[misc]  # noqa: D102
        cls,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        if amsgrad:
            raise ConfigError("Adagrad has no variant amsgrad; leave it out")
        return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)

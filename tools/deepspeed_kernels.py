"""Replaces DeepSpeed's kernels of Lamb, Lion and Adagrad with equivalent torch operations.

The GPU kernels cannot be built without a GPU, and building the CPU kernels takes a quarter of an hour. The optimizers,
their states and the way they save them are still those of DeepSpeed. The formulas are those of DeepSpeed's
``csrc/lamb/fused_lamb_cuda_kernel.cu``, ``csrc/lion/multi_tensor_lion.cu``, ``csrc/lion/cpu_lion_impl.cpp`` and
``csrc/adagrad/cpu_adagrad.cpp``.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch


def install() -> None:
    """Make DeepSpeed's FusedLamb, FusedLion, DeepSpeedCPULion and DeepSpeedCPUAdagrad use this module's functions."""
    from deepspeed.ops.adagrad import cpu_adagrad
    from deepspeed.ops.lamb import fused_lamb
    from deepspeed.ops.lion import cpu_lion, fused_lion

    fused_lamb.FusedLambBuilder = _builder(lamb=lamb)
    fused_lion.FusedLionBuilder = _builder(multi_tensor_lion=multi_tensor_lion)
    cpu_lion.CPULionBuilder = _builder(create_lion=_ignore, destroy_lion=_ignore, lion_update=lion_update)
    cpu_adagrad.CPUAdagradBuilder = _builder(
        create_adagrad=_ignore, destroy_adagrad=_ignore, adagrad_update=adagrad_update
    )


def _builder(**functions):
    return lambda: SimpleNamespace(load=lambda: SimpleNamespace(**functions))


def _ignore(*arguments):
    pass


def lamb(  # noqa: PLR0913
    parameter,
    copy,
    mean,
    square,
    gradient,
    lr,
    beta1,
    beta2,
    high,
    low,
    eps,
    scale,
    step,
    mode,
    corrects,
    decay,
):
    """Update one parameter, and its 16-bit ``copy`` if there is one.

    Returns:
        The trust ratio: the norm of the parameter divided by the norm of the update, limited to [low, high].
    """
    gradient = gradient.float() / scale
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    divisor = (square + eps).sqrt() if mode == 0 else square.sqrt() + eps
    update = mean / divisor + decay * parameter
    rate = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step) if corrects else lr
    of_parameter, of_update = parameter.norm(), update.norm()
    ratio = torch.ones(())
    if of_parameter > 0 and of_update > 0:
        ratio = (of_parameter / of_update).clamp(low, high)
    parameter.sub_(rate * ratio * update)
    if copy.numel():
        copy.data.copy_(parameter)  # The copy is the parameter of the model itself.
    return ratio


def multi_tensor_lion(chunk, overflow, tensors, lr, beta1, beta2, step, decay):
    """Update lists of gradients, parameters and momenta."""
    for gradient, parameter, momentum in zip(*tensors, strict=True):
        blend = beta1 * momentum + (1 - beta1) * gradient
        # If blend is 0, the kernels also move the parameter by the full learning rate: this GPU kernel upward, the CPU
        # kernel downward.
        parameter.mul_(1 - lr * decay).add_(torch.where(blend > 0, -lr, lr))
        momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)


def lion_update(number, step, lr, beta1, beta2, decay, parameter, gradient, momentum):
    """Update one parameter and its momentum."""
    blend = beta1 * momentum + (1 - beta1) * gradient.float()
    parameter.mul_(1 - lr * decay).sub_(torch.full_like(blend, lr).copysign(blend))
    momentum.mul_(beta2).add_(gradient.float(), alpha=1 - beta2)


def adagrad_update(number, step, lr, eps, decay, parameter, gradient, square):
    """Update one parameter and the sum of the squares of its gradients."""
    whole = gradient.float() + decay * parameter
    square.addcmul_(whole, whole)
    parameter.addcdiv_(whole, square.sqrt() + eps, value=-lr)

"""Construction of the torch optimizer: from the config, or from the optimizer or callable that a client passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, Final

import torch

from zero_runtime.configuration.config_values import OptimizerConfig
from zero_runtime.configuration.reading.argument_signatures import check_arguments
from zero_runtime.errors import ConfigError, UnsupportedError
from zero_runtime.experimental.one_bit import OneBitAdam, OneBitOptimizer, ZeroOneAdam
from zero_runtime.experimental.one_bit_lamb import OneBitLamb
from zero_runtime.optimizers import Lamb, Lion, Muon, UncorrectedAdam

Parameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]
ClientOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
_Made = tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]

_ADAM: Final = ("adam", "adamw")
_MUP: Final = ("muadam", "muadamw", "musgd")
# These optimizers are correct on flat shards of parameters. DeepSpeed has not tested plain SGD, which is included here.
_TESTED: Final = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD, Lamb, Lion, UncorrectedAdam,
)  # fmt: skip
# These optimizers need whole parameters, or all parameters at once.
_NOT_ELEMENTWISE: Final = ("Adafactor", "Muon")
_UNUSABLE: Final = {
    "LBFGS": "computes the loss several times in a step, which engine.step() cannot do",
    "SparseAdam": "needs sparse gradients, which are not in this version",
}
# Adagrad is missing because it turns rounding noise into full steps, so fused Adagrad would differ from DeepSpeed's.
_FUSED: Final = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def torch_optimizer(
    config: OptimizerConfig | None, client: ClientOptimizer | None, parameters: Parameters
) -> torch.optim.Optimizer | None:
    """Return the optimizer over ``parameters``, or None if neither the config nor the client has an optimizer.

    ``parameters`` are tensors or param groups. The optimizer of the client overrides the optimizer of the
    config. "Adam" means AdamW unless adam_w_mode is false. Without torch_adam the default weight decay is 0, as
    in DeepSpeed's own Adam. With torch_adam the default is torch's. If torch has a fused implementation, an
    optimizer from the config uses it, unless its arguments choose another implementation.

    Raises:
        ConfigError: The type is unknown, or does not accept the arguments.
        UnsupportedError: The optimizer exists in DeepSpeed, but not in this version.
    """
    if isinstance(client, torch.optim.Optimizer):
        optimizer = client
    elif client is not None:
        optimizer = _from_client(client, parameters)
    elif config is None:
        return None
    else:
        kind, arguments = _from_config(config)
        groups = [_with_list(each) for each in parameters]
        try:
            optimizer = kind(groups, **with_fusion(kind, arguments, groups))
        except ConfigError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{kind.__name__} does not accept optimizer.params {dict(config.params)!r} or the parameters: {error}"
            ) from None
    name = type(optimizer).__name__
    if name in _UNUSABLE and type(optimizer).__module__.startswith("torch.optim"):
        raise ConfigError(f"optimizer {name} {_UNUSABLE[name]}; use another one, such as AdamW or SGD")
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def _with_list(each: Any) -> Any:
    """Return a tensor unchanged. Return a param group with its parameters as a list, which can be iterated twice."""
    if not isinstance(each, dict) or "params" not in each:
        return each
    params = each["params"]
    return {**each, "params": [params] if isinstance(params, torch.Tensor) else list(params)}


def _from_client(client: Any, parameters: Parameters) -> torch.optim.Optimizer:
    if not callable(client):
        raise ConfigError(
            f"optimizer is a {type(client).__name__}; expected a torch optimizer, or a function that makes one "
            "from the parameters"
        )
    optimizer = client(list(parameters))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"the function given as optimizer made a {type(optimizer).__name__}; expected a torch optimizer"
        )
    return optimizer


def _from_config(config: OptimizerConfig) -> _Made:
    name, arguments = config.type, dict(config.params)
    if "max_grad_norm" in arguments:
        raise ConfigError(
            "optimizer.params.max_grad_norm is not an optimizer's parameter; use gradient_clipping at the top instead"
        )
    # torch refuses a tuple that mixes the integer 0, as JSON may write it, with a float such as 0.99.
    if isinstance(betas := arguments.get("betas"), list | tuple):
        arguments["betas"] = [float(each) if type(each) is int else each for each in betas]
    lower = name.lower()
    if lower in _MUP:
        raise UnsupportedError(
            f"optimizer.type {name} is not in this version: it needs the package mup, whose learning rates depend on each "
            "parameter's width; make one of mup's optimizers, and pass it to initialize as optimizer"
        )
    own = _OWN.get(lower)
    kind, arguments = own(arguments, lower) if own else (_class_of_torch(name), arguments)
    check_arguments("optimizer.params", kind, arguments)
    return kind, arguments


def _class_of_torch(name: str) -> type[torch.optim.Optimizer]:
    known = {
        kind: value
        for kind, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and kind != "Optimizer"
    }
    if name not in known:
        near = get_close_matches(name, known, 1, 0.4) or get_close_matches(name.upper(), known, 1, 0.0)
        raise ConfigError(
            f"optimizer.type {name!r} is unknown; did you mean {near[0]!r}? Expected Adam, AdamW, Adagrad, Lamb, "
            "Lion, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam or a class of torch.optim"
        )
    return known[name]


def _adam(arguments: dict[str, Any], name: str) -> _Made:
    decoupled = _flag(arguments, "adam_w_mode", True) or name == "adamw"
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    if _flag(arguments, "torch_adam", False):
        return kind, arguments
    arguments.setdefault("weight_decay", 0.0)
    _flag(arguments, "set_grad_none", True)
    if not _flag(arguments, "fp32_optimizer_states", True):
        raise UnsupportedError(
            "optimizer.params.fp32_optimizer_states false is not in this version: the state has the dtype of the master "
            "weights; see bf16.bf16_optimizer_states"
        )
    if not _flag(arguments, "bias_correction", True):
        if not arguments.get("amsgrad"):
            arguments.pop("amsgrad", None)
        return UncorrectedAdam, {**arguments, "decoupled": decoupled}
    return kind, arguments


def _adagrad(arguments: dict[str, Any], name: str) -> _Made:
    return torch.optim.Adagrad, arguments


def _lamb(arguments: dict[str, Any], name: str) -> _Made:
    _refuse_amsgrad(arguments, "Lamb")
    return Lamb, arguments


def _lion(arguments: dict[str, Any], name: str) -> _Made:
    _flag(arguments, "set_grad_none", True)
    return Lion, arguments


def _muon(arguments: dict[str, Any], name: str) -> _Made:
    _flag(arguments, "torch_adam", False)
    if _flag(arguments, "per_head_muon", False):
        raise UnsupportedError(
            "optimizer.params.per_head_muon is not in this version: whole matrices are orthogonalized"
        )
    return Muon, arguments


_ONE_BIT: Final[Mapping[str, type[OneBitOptimizer]]] = {
    "onebitadam": OneBitAdam,
    "onebitlamb": OneBitLamb,
    "zerooneadam": ZeroOneAdam,
}


def _one_bit(arguments: dict[str, Any], name: str) -> _Made:
    if _flag(arguments, "bias_correction", False):
        raise ConfigError(
            f"optimizer.params.bias_correction is true, and {name} corrects no bias; remove it, or use AdamW with "
            "gradient_compression"
        )
    _refuse_amsgrad(arguments, name)
    # These arguments select DeepSpeed's transport and have no effect here.
    for idle in ("cuda_aware", "comm_backend_name"):
        arguments.pop(idle, None)
    return _ONE_BIT[name], arguments


_OWN: Final[Mapping[str, Callable[[dict[str, Any], str], _Made]]] = {
    **dict.fromkeys(_ADAM, _adam),
    "adagrad": _adagrad,
    "lamb": _lamb,
    "lion": _lion,
    "muon": _muon,
    **dict.fromkeys(_ONE_BIT, _one_bit),
}


def _flag(arguments: dict[str, Any], name: str, default: bool) -> bool:
    """Remove the flag ``name`` from ``arguments`` and return its value."""
    value = arguments.pop(name, None)
    if value is not None and not (isinstance(value, int) and value in (0, 1)):
        raise ConfigError(f"optimizer.params.{name} is {value!r}; expected true or false")
    return default if value is None else bool(value)


def _refuse_amsgrad(arguments: dict[str, Any], name: str) -> None:
    if _flag(arguments, "amsgrad", False):
        raise ConfigError(f"optimizer.params.amsgrad is true, and {name} has no such variant; remove it")


def with_fusion(
    kind: Callable[..., torch.optim.Optimizer], arguments: dict[str, Any], parameters: list[Any]
) -> dict[str, Any]:
    """Return ``arguments``, with torch's fused implementation selected if it can be used."""
    chosen = any(arguments.get(name) is not None for name in ("fused", "foreach", "differentiable"))
    if kind not in _FUSED or chosen:
        return arguments
    tensors = [
        tensor
        for each in parameters
        for tensor in (each["params"] if isinstance(each, dict) else [each])
        if isinstance(tensor, torch.Tensor)
    ]
    # The fused kernels ignore strides, so all tensors must be contiguous.
    fits = all(tensor.is_floating_point() and tensor.is_contiguous() for tensor in tensors)
    devices = {tensor.device for tensor in tensors}
    if not fits or not all(_has_fusion(kind, device.type) for device in devices):
        return arguments
    return {**arguments, "fused": True}


@cache
def _has_fusion(kind: Callable[..., torch.optim.Optimizer], device: str) -> bool:
    try:
        kind([torch.zeros(1, device=device, requires_grad=True)], lr=1.0, fused=True)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def check_shardable(optimizer: torch.optim.Optimizer, stage: int, untested_allowed: bool) -> None:
    """Refuse an optimizer that computes wrong results on flat shards of parameters.

    An optimizer that is untested on flat shards is refused too, unless ``untested_allowed`` is set.

    Raises:
        ConfigError: The optimizer is refused.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, OneBitOptimizer):
        raise ConfigError(
            f"optimizer {name} works at stage 0 only, where every rank has the complete moments, and the stage is "
            f"{stage}; use stage 0, or AdamW with gradient_compression"
        )
    if isinstance(optimizer, Muon):
        return
    if name in _NOT_ELEMENTWISE:
        raise ConfigError(
            f"optimizer {name} needs whole parameters, and ZeRO stage {stage} gives each rank a flat shard; use "
            "stage 0, or an elementwise optimizer, such as AdamW or SGD"
        )
    if type(optimizer) not in _TESTED and not untested_allowed:
        raise ConfigError(
            f"optimizer {name} is untested with ZeRO stage {stage}; set zero_allow_untested_optimizer to true to use it"
        )


def replace_parameters(optimizer: torch.optim.Optimizer, groups: list[list[torch.Tensor]]) -> None:
    """Make ``optimizer`` update other tensors: one list for each of its param groups, whose options do not change."""
    for group, tensors in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = tensors
    if optimizer.state and isinstance(optimizer, torch.optim.Adagrad):
        # Adagrad creates its state in its constructor, not in the first step.
        optimizer.state.clear()
        renewed = torch.optim.Adagrad(optimizer.param_groups, **optimizer.defaults)
        optimizer.state.update(renewed.state)
    else:
        optimizer.state.clear()

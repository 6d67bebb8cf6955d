"""The torch optimizer that does the arithmetic: from the config, the client's own, or from a client's callable."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, Final

import torch

from zero_runtime.config import OptimizerConfig
from zero_runtime.errors import ConfigError, UnsupportedError

Parameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]
ClientOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]

_ADAM: Final = ("adam", "adamw")
# DeepSpeed's own optimizers that have no counterpart here yet.
_LATER: Final = ("lamb", "lion", "muadam", "muadamw", "musgd", "muon")
_REMOVED: Final = ("onebitadam", "zerooneadam", "onebitlamb")
# Known to be right on flat pieces of parameters; plain SGD is, though DeepSpeed has not tested it.
_TESTED: Final = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)
# These need whole parameters, or all of them at once.
_NOT_ELEMENTWISE: Final = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


def torch_optimizer(
    config: OptimizerConfig | None, client: ClientOptimizer | None, parameters: Parameters
) -> torch.optim.Optimizer | None:
    """The optimizer over ``parameters`` (tensors or param groups); None where neither config nor client has one.

    A client's optimizer wins over the config's. "Adam" means AdamW unless adam_w_mode is false. Without torch_adam the
    default weight decay is 0, as in DeepSpeed's own Adam; with it, torch's.

    Raises:
        ConfigError: an unknown type, or arguments that it does not take.
        UnsupportedError: an optimizer of DeepSpeed's that is not in this version.
    """
    if isinstance(client, torch.optim.Optimizer):
        optimizer = client
    elif client is not None:
        if not callable(client):
            raise ConfigError(
                f"optimizer is a {type(client).__name__}; expected a torch optimizer, or a function that makes one "
                "of the parameters"
            )
        optimizer = client(list(parameters))
    elif config is None:
        return None
    else:
        kind, arguments = _from_config(config)
        try:
            optimizer = kind(list(parameters), **arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"optimizer.params {dict(config.params)!r} do not fit {kind.__name__}: {error}"
            ) from None
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def _from_config(config: OptimizerConfig) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    name, arguments = config.type, dict(config.params)
    if "max_grad_norm" in arguments:
        raise ConfigError(
            "optimizer.params.max_grad_norm is not an optimizer's parameter; use gradient_clipping at the top instead"
        )
    if name.lower() in _ADAM:
        return _adam(name.lower(), arguments)
    if name.lower() in _LATER:
        raise UnsupportedError(
            f"optimizer.type {name} is not in this version yet; use Adam, AdamW, SGD or another torch.optim class"
        )
    if name.lower() in _REMOVED:
        raise ConfigError(f"optimizer.type {name} has been removed from DeepSpeed; use Adam or AdamW")
    if name.lower() == "adagrad":
        return torch.optim.Adagrad, arguments
    known = {
        kind: value
        for kind, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and kind != "Optimizer"
    }
    if name not in known:
        near = get_close_matches(name, known, 1, 0.4) or get_close_matches(name.upper(), known, 1, 0.0)
        raise ConfigError(
            f"optimizer.type {name!r} is unknown; did you mean {near[0]!r}? It is Adam, AdamW or a class of torch.optim"
        )
    return known[name], arguments


def _adam(
    name: str, arguments: dict[str, Any]
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    decoupled = arguments.pop("adam_w_mode", True) or name == "adamw"
    if not arguments.pop("torch_adam", False):
        arguments.setdefault("weight_decay", 0.0)
        arguments.pop("fp32_optimizer_states", None)
        arguments.pop("set_grad_none", None)
        if not arguments.pop("bias_correction", True):
            raise UnsupportedError(
                "optimizer.params.bias_correction false is not in this version yet; remove it"
            )
    return (torch.optim.AdamW if decoupled else torch.optim.Adam), arguments


def check_shardable(optimizer: torch.optim.Optimizer, stage: int, untested_allowed: bool) -> None:
    """Refuse an optimizer that is wrong on flat pieces of parameters, or untested on them and not allowed to be.

    Raises:
        ConfigError: with what to do.
    """
    name = type(optimizer).__name__
    if name in _NOT_ELEMENTWISE:
        raise ConfigError(
            f"optimizer {name} needs whole parameters, and ZeRO stage {stage} gives each rank a flat piece; use "
            "stage 0, or an optimizer that works element by element, such as AdamW or SGD"
        )
    if type(optimizer) not in _TESTED and not untested_allowed:
        raise ConfigError(
            f"optimizer {name} is untested with ZeRO stage {stage}; set zero_allow_untested_optimizer to true to use it"
        )


def replace_parameters(optimizer: torch.optim.Optimizer, groups: list[list[torch.Tensor]]) -> None:
    """Make ``optimizer`` work on other tensors: one list for each of its param groups, options kept."""
    for group, tensors in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = tensors
    if optimizer.state and isinstance(optimizer, torch.optim.Adagrad):
        # Adagrad makes its state when it is made, not in the first step.
        optimizer.state.clear()
        renewed = torch.optim.Adagrad(optimizer.param_groups, **optimizer.defaults)
        optimizer.state.update(renewed.state)
    else:
        optimizer.state.clear()

"""Plan mixture-of-experts layers: the experts that each rank stores, and the effect of an uneven load.

The settings of experts belong to the model, not to a config. A plan stores them with its other settings under the
key :data:`KEY`, so that it compares several values in the same way as several values of a config.

An expert gets ``tokens x k / experts`` tokens of a rank on average. At skew s the fullest expert gets s times this
mean, and the other experts share the rest evenly. If tokens may be dropped, an expert takes at most as many tokens
as it has slots (its capacity), and the bytes do not depend on s. Without dropping, the fullest expert determines
the number of slots, and so the bytes grow with s. Source: DeepSpeed 0.19.8, ``moe/sharded_moe.py``; the rules are
those of :mod:`commprof.requested.experts.layers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from commprof.errors import UsageError
from commprof.plan.models import Model
from commprof.requested.experts.layers import ExpertLayer
from commprof.requested.memory.sized_models import MATRICES
from commprof.requested.parameters import Parameter

KEY: Final = "experts"  # the key of these settings among the settings of a plan
OPTIONS: Final = {  # maps the name of each setting of experts to an option of commprof plan
    "num_experts": "experts",
    "ep_size": "ep_size",
    "k": "expert_k",
    "capacity_factor": "capacity_factor",
    "min_capacity": "min_capacity",
    "drop_tokens": "drop_tokens",
    "layers": "expert_layers",
    "skew": "expert_skew",
}
NO_TOKENS: Final = (
    "the tokens that ranks exchange are left out: give --sequence, and a config with a micro-batch"
)
_SMALLEST: Final = {"num_experts": 1, "ep_size": 1, "k": 1, "min_capacity": 0, "layers": 1}
_INNER: Final = ".deepspeed_moe.experts.deepspeed_experts."
_FEED_FORWARD: Final = ("fc1", "fc2")


class Settings(NamedTuple):
    """The settings of experts. For a setting that is None, the model's own value applies.

    Attributes:
        num_experts: The number of experts of each layer that has experts.
        ep_size: The number of ranks that share the experts of a layer.
        k: The number of experts for each token.
        capacity_factor: The number of slots of an expert, as a multiple of its share of the tokens.
        min_capacity: The minimum number of slots.
        drop_tokens: Whether tokens beyond the slots are dropped.
        layers: The number of layers that have experts, if only the size of the model is known.
        skew: The load of the fullest expert, as a multiple of the mean.
    """

    num_experts: int | None = None
    ep_size: int | None = None
    k: int | None = None
    capacity_factor: float | None = None
    min_capacity: int | None = None
    drop_tokens: bool | None = None
    layers: int | None = None
    skew: float = 1.0


class Load(NamedTuple):
    """A set of equal layers with experts, and their load.

    Attributes:
        layer: One of these layers, with the tokens of a rank in one forward pass.
        count: The number of these layers.
        held_bytes: The parameter bytes of those experts of these layers that a rank stores, in the type of the model.
    """

    layer: ExpertLayer
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a record
    held_bytes: int

    @property
    def local_experts(self) -> int:
        """The number of experts of one layer that a rank stores."""
        return self.layer.num_experts // self.layer.ep_size

    @property
    def fullest(self) -> float:
        """The number of tokens of a rank that choose the fullest expert."""
        return min(self.layer.skew * self._mean, float(self.layer.tokens))

    @property
    def dropped_share(self) -> float:
        """The fraction of all choices of an expert by a token that are dropped."""
        chosen = self.layer.tokens * self.layer.k
        routed = min(self.fullest, self._slots) + (self.layer.num_experts - 1) * min(
            self._others, self._slots
        )
        return max(0.0, 1 - routed / chosen) if chosen else 0.0

    @property
    def busiest_rank(self) -> float:
        """The tokens for the rank that stores the fullest expert, as a multiple of the mean over the ranks."""
        others = min(self._others, self._slots)
        mine = min(self.fullest, self._slots) + (self.local_experts - 1) * others
        routed = min(self.fullest, self._slots) + (self.layer.num_experts - 1) * others
        return mine * self.layer.ep_size / routed if routed else 1.0

    @property
    def _slots(self) -> int:
        return self.layer.capacity

    @property
    def _mean(self) -> float:
        return self.layer.tokens * self.layer.k / self.layer.num_experts

    @property
    def _others(self) -> float:
        if self.layer.num_experts == 1:
            return 0.0
        return (self.layer.tokens * self.layer.k - self.fullest) / (self.layer.num_experts - 1)


def parse_values(name: str, flag: str, text: str) -> list[Any]:
    """Return the values of a setting of experts, which ``text`` lists with commas.

    Args:
        name: The name of the setting.
        flag: The option that ``text`` is the value of, for messages.
        text: The values, separated by commas.

    Raises:
        UsageError: A value cannot be used.
    """
    return [checked(name, flag, word.strip()) for word in text.split(",")]


def checked(name: str, flag: str, value: object) -> Any:
    """Return ``value`` of the setting ``name``, converted to the type of that setting.

    Raises:
        UsageError: The value is not valid for that setting. The message names ``flag``.
    """
    word = str(value).strip().lower()
    if name == "drop_tokens":
        if word in ("true", "false"):
            return word == "true"
        raise UsageError(f"{flag} is {value!r}; expected true or false")
    if name in _SMALLEST:
        if word.isdecimal() and int(word) >= _SMALLEST[name]:
            return int(word)
        raise UsageError(f"{flag} is {value!r}; expected a whole number of {_SMALLEST[name]} or more")
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    least = 1.0 if name == "skew" else 0.0
    if not least <= number < math.inf or not number:
        raise UsageError(
            f"{flag} is {value!r}; expected a number " + ("of 1 or more" if least else "above 0")
        )
    return number


def without_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``config`` without the settings of experts."""
    return {name: value for name, value in config.items() if name != KEY}


def settings_of(config: Mapping[str, Any]) -> Settings | None:
    """Return the settings of experts that ``config`` contains under :data:`KEY`, or None.

    Raises:
        UsageError: A setting has an unknown name or a value that cannot be used.
    """
    block = config.get(KEY)
    if block is None:
        return None
    if not isinstance(block, Mapping) or not set(block) <= set(Settings._fields):
        raise UsageError(f"{KEY} is {block!r}; expected some of {', '.join(Settings._fields)}")
    return Settings(**{name: checked(name, f"{KEY}.{name}", value) for name, value in block.items()})


def placed(model: Model, settings: Settings | None, tokens: int, item_bytes: int) -> tuple[Model, list[Load]]:
    """Return the part of ``model`` that one rank stores, and the loads of its layers with experts.

    Args:
        model: The model that is trained.
        settings: The settings of experts, or None.
        tokens: The number of tokens of a rank in one forward pass, or 0 if it is not known.
        item_bytes: The size of an element of a parameter, in bytes.

    Raises:
        UsageError: The settings do not fit the model, or contradict each other.
    """
    chosen = settings or Settings()
    if not model.experts and settings is None:
        return model, []
    if model.layers is None:
        parameters, layers = _of_built(model, chosen)
    else:
        parameters, layers = _of_size(model, chosen)
    layers = [each._replace(tokens=tokens, skew=chosen.skew) for each in layers]
    for each in layers:
        each.check()
        most = each.num_experts / each.k
        if chosen.skew > most:
            raise UsageError(
                f"--expert-skew is {chosen.skew:g} with {each.num_experts} experts and k {each.k}: an expert that gets all "
                f"tokens has {most:g} times the mean; expected 1 to {most:g}"
            )
    placed_model = model._replace(parameters=parameters, experts=tuple(layers))
    return placed_model, _loads(parameters, layers, item_bytes)


def _of_built(model: Model, settings: Settings) -> tuple[list[Parameter], list[ExpertLayer]]:
    """Return the parameters of a rank and the expert layers of a model that was built, with ``settings`` applied.

    All experts of a layer are copies of its first expert, and so have equal sizes.
    """
    if not model.experts:
        raise UsageError(
            "the model has no layers of experts; expected deepspeed.moe.layer.MoE in it, or --model params:N"
        )
    for name, flag in (("num_experts", "--experts"), ("layers", "--expert-layers")):
        if getattr(settings, name) is not None:
            raise UsageError(
                f"{flag} is for --model params:N; a model that is built has layers of experts of its own"
            )
    own = {name: value for name, value in settings._asdict().items() if name != "skew" and value is not None}
    layers = [each._replace(**own) for each in model.experts]
    local = {each.layer: each.num_experts // each.ep_size for each in layers}
    parameters: list[Parameter] = []
    for each in model.parameters:
        layer, inner, rest = each.name.partition(_INNER)
        number, _, name = rest.partition(".")
        if not inner or layer not in local:
            parameters.append(each)
        elif number == "0":
            size = next(one.ep_size for one in layers if one.layer == layer)
            copies = [f"{layer}{inner}{copy}.{name}" for copy in range(local[layer])]
            parameters += [
                each._replace(name=copy, ep_size=size, param_group=1, forward_index=None) for copy in copies
            ]
    return [each._replace(forward_index=None) for each in parameters], layers


def _of_size(model: Model, settings: Settings) -> tuple[list[Parameter], list[ExpertLayer]]:
    """Return the parameters of a rank and the expert layers of a transformer with a given size.

    In evenly spaced layers, the feed-forward part becomes experts, with a gate before them.
    """
    if settings.num_experts is None:
        raise UsageError(
            "settings of experts are given, and no number of experts; give --experts, such as --experts 8"
        )
    count = model.layers or 1
    with_experts = count if settings.layers is None else settings.layers
    if with_experts > count:
        raise UsageError(f"--expert-layers is {with_experts}, and the model has {count} layers (--layers)")
    ep_size, k = settings.ep_size or 1, settings.k or 1
    factor = 1.0 if settings.capacity_factor is None else settings.capacity_factor
    least = 4 if settings.min_capacity is None else settings.min_capacity  # DeepSpeed's default
    drops = settings.drop_tokens is not False
    parameters: list[Parameter] = []
    layers = []
    for number in range(count):
        own = model.parameters[number * len(MATRICES) : (number + 1) * len(MATRICES)]
        # Layers with experts are spaced as evenly as possible, and the last layer is one of them.
        if (number + 1) * with_experts // count == number * with_experts // count:
            parameters += own
            continue
        name = f"layers.{number}.moe"
        feed_forward = [each for each in own if each.name.split(".")[-2] in _FEED_FORWARD]
        width = math.isqrt(own[0].numel // MATRICES["qkv"])
        parameters += [each for each in own if each not in feed_forward]
        parameters.append(Parameter(f"{name}.deepspeed_moe.gate.wg.weight", width * settings.num_experts))
        layers.append(ExpertLayer(name, settings.num_experts, ep_size, k, factor, least, drops, width, 0))
        for copy in range(settings.num_experts // ep_size):
            for each in feed_forward:
                inner = f"{name}{_INNER}{copy}.{each.name.split('.')[-2]}.weight"
                parameters.append(each._replace(name=inner, ep_size=ep_size, param_group=1))
    return parameters, layers


def _loads(parameters: Sequence[Parameter], layers: Iterable[ExpertLayer], item_bytes: int) -> list[Load]:
    alike: dict[tuple[object, ...], Load] = {}
    for layer in layers:
        begin = f"{layer.layer}{_INNER}"
        size = sum(each.numel for each in parameters if each.name.startswith(begin)) * item_bytes
        before = alike.get(layer[1:], Load(layer, 0, 0))
        alike[layer[1:]] = Load(layer, before.count + 1, before.held_bytes + size)
    return list(alike.values())

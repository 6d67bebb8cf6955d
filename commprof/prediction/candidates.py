"""List the settings to try on a recorded run when the user names none. Rules derive them from the run's config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil, floor, log10
from typing import Any, Final, NamedTuple

from commprof.ledger.requests.request import Request
from commprof.prediction.wrapper_settings import KEY as RESHARDING
from commprof.requested.configuration import Configuration, read_configuration, zero_section
from commprof.requested.memory.offload import read_offload
from commprof.requested.parameters import trained_groups
from commprof.requested.wrappers.ddp import DEFAULT_BUCKET_MIB, MIB, Ddp
from commprof.requested.wrappers.fully_shard import FullyShard
from commprof.requested.zero.reductions import REDUCTIONS

# Changes from stage 3 are tried, and changes to stage 3 are not: it sends more than the other stages, and saves only
# memory. For DeepSpeed, the messages of a prediction from stage 3 to stage 0 were never compared with those of a run.
_STAGES: Final[tuple[int, ...]] = (0, 1, 2)
_FROM_STAGE_3: Final[dict[str, tuple[int, ...]]] = {"zero_runtime": _STAGES, "deepspeed": (1, 2)}
_ZERO: Final = "zero_optimization"
BUCKET_CAP: Final = "ddp.bucket_cap_mb"


class Candidate(NamedTuple):
    """A setting to try.

    Attributes:
        setting: The dotted keys and values, as in ``--set``.
        recorded: The value of each of these keys in the run.
        config: The run's config with ``setting``, or None if the run has no config.
    """

    setting: dict[str, Any]
    recorded: dict[str, Any]
    config: dict[str, Any] | None


def candidates(request: Request) -> list[Candidate]:
    """Return candidates for the run that requested ``request``, most of which change one key.

    The list is empty if no rule predicts the messages of the run.

    Raises:
        CommprofError: The rules cannot read the config of the run.
    """
    if request.reason is not None:
        return []
    if request.wrapped is not None:
        rules = request.wrapped.rules
        if all(isinstance(each, FullyShard) for each in rules):
            return [Candidate({RESHARDING: False}, {RESHARDING: True}, None)]
        return _of_ddp(rules[0]) if len(rules) == 1 and isinstance(rules[0], Ddp) else []
    return [] if not request.config or request.shared is not None else list(_of_zero(request))


def combined(request: Request, several: tuple[Candidate, ...]) -> Candidate:
    """Return one candidate with all changes of ``several``, which have different keys."""
    setting = {key: value for each in several for key, value in each.setting.items()}
    recorded = {key: value for each in several for key, value in each.recorded.items()}
    config = None if any(each.config is None for each in several) else _with(request.config, setting)
    return Candidate(setting, recorded, config)


def _of_zero(request: Request) -> Iterator[Candidate]:
    configuration = read_configuration(request.config)
    for name, value, recorded in _values(request, configuration):
        setting = {f"{_ZERO}.{name}": value}
        yield Candidate(setting, {f"{_ZERO}.{name}": recorded}, _with(request.config, setting))
    # Buckets at stage 0 need three keys at once, so this candidate changes three keys.
    is_own = request.runtime != "deepspeed"
    if configuration.stage == 0 and is_own and not configuration.reduces_whole_in_buckets:
        numel = sum(each.numel for group in trained_groups(request.parameters) for each in group)
        setting = {
            f"{_ZERO}.gradient_reduction": "all_reduce",
            f"{_ZERO}.overlap_comm": True,
            f"{_ZERO}.reduce_bucket_size": max(1, _rounded(numel / 10)),
        }
        # The attributes of the configuration have the names of the keys.
        recorded = {key: getattr(configuration, key.removeprefix(f"{_ZERO}.")) for key in setting}
        yield Candidate(setting, recorded, _with(request.config, setting))


def _values(request: Request, configuration: Configuration) -> Iterator[tuple[str, Any, Any]]:
    """Yield the key, the value and the recorded value of each candidate."""
    stage, is_deepspeed = configuration.stage, request.runtime == "deepspeed"
    reduction = (
        None if configuration.gradient_reduction == "auto" or is_deepspeed else configuration.reduction
    )
    stages = _FROM_STAGE_3[request.runtime] if stage == 3 else _STAGES
    if read_offload(zero_section(request.config), stage).parameters != "none":
        stages = ()  # no other stage can offload parameters
    for other in stages:
        # If a config names a reduction, zero_runtime refuses stages that do not have this reduction.
        if other != stage and (reduction is None or other in REDUCTIONS[reduction].stages):
            yield "stage", other, stage
    if is_deepspeed:
        for name in ("reduce_scatter", "use_multi_rank_bucket_allreduce"):
            yield name, not getattr(configuration, name), getattr(configuration, name)
    else:
        for name, stated in REDUCTIONS.items():
            if stage in stated.stages and name != configuration.reduction:
                yield "gradient_reduction", name, configuration.gradient_reduction
    numel = sum(each.numel for group in trained_groups(request.parameters) for each in group)
    size = configuration.reduce_bucket_size
    for other in _sizes(size, numel):
        yield "reduce_bucket_size", other, size
    yield "overlap_comm", not configuration.overlap_comm, configuration.overlap_comm


def _sizes(size: int, numel: int) -> list[int]:
    """Return the bucket sizes to try, in elements: ten times larger and smaller, and one bucket for all gradients.

    No size is much larger than the model.
    """
    used = min(size, numel)
    sizes = {min(_rounded(10 * used), numel), _rounded(used / 10), numel}
    return [
        _rounded(each, up=each == numel) for each in sorted(sizes, reverse=True) if each > 0 and each != used
    ]


def _of_ddp(rules: Ddp) -> list[Candidate]:
    cap = rules.argument("bucket_cap_mb")
    recorded = float(DEFAULT_BUCKET_MIB if cap is None else cap)
    total = sum(each.nbytes for each in rules.wrapper.trained) / MIB
    # 1 % more than all gradients, because a bucket of exactly all gradients may be rounded to two buckets.
    used, one = min(recorded, total), 1.01 * total
    sizes = dict.fromkeys(_rounded_mib(each) for each in (one, min(4 * used, one), used / 4))
    return [
        Candidate({BUCKET_CAP: each}, {BUCKET_CAP: _rounded_mib(recorded)}, None)
        for each in sizes
        if each > 0 and each != _rounded_mib(recorded)
    ]


def _with(config: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, Any]:
    block = {key.removeprefix(f"{_ZERO}."): value for key, value in setting.items()}
    return {**config, _ZERO: {**zero_section(config), **block}}


def _rounded(number: float, up: bool = False) -> int:
    """Return ``number`` rounded to two digits, so that it is readable in a config."""
    if number < 1:
        return 0
    unit: int = 10 ** max(0, floor(log10(number)) - 1)
    return (ceil(number / unit) if up else round(number / unit)) * unit


def _rounded_mib(number: float) -> float:
    """Return ``number`` rounded to three digits, or to whole MiB from 100 on."""
    return float(round(number)) if number >= 100 else float(f"{number:.3g}")

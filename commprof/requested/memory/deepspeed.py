"""Predicts the memory of a rank with DeepSpeed 0.19.8 where it differs from zero_runtime.

Source: measurements in docs/plan.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from commprof.requested.configuration import OWN_KEYS, read_configuration, zero_section
from commprof.requested.memory.offload import read_offload
from commprof.requested.memory.states import Holding, holdings
from commprof.requested.parameters import Parameter, item_bytes

_WIDE: Final = 4  # bytes of an fp32 number


def deepspeed_holdings(
    config: Mapping[str, Any], parameters: Sequence[Parameter], world_size: int
) -> list[Holding]:
    """Return the memory of the rank that needs the most while DeepSpeed trains with ``config``.

    The arguments are those of ``holdings``.

    Raises:
        RequestedError: the config or the parameters cannot be used as they are.
    """
    zero = {key: value for key, value in zero_section(config).items() if key not in OWN_KEYS}
    config = {
        **{key: value for key, value in config.items() if key != "gradient_compression"},
        "zero_optimization": zero,
    }
    configuration = read_configuration(config)
    by_name = {each.what: each for each in holdings(config, parameters, world_size)}
    if not configuration.partitions or configuration.reduces_flat_groups or not parameters:
        return list(by_name.values())
    offload = read_offload(zero, configuration.stage)
    item = max(item_bytes(configuration.model_dtype or each.dtype) for each in parameters)
    numels = [each.numel for each in parameters]
    share = sum(-(-numel // world_size) for numel in numels)
    # The buffers have reduce_bucket_size elements even for a smaller model.
    turns = 2 if configuration.overlap_comm and configuration.stage < 3 else 1
    buckets = turns * configuration.reduce_bucket_size * item if configuration.buffers_are_contiguous else 0
    by_name["gradient buckets"] = Holding(
        "gradient buckets", buckets, note="of reduce_bucket_size for every model"
    )
    if "masters" not in by_name:
        by_name["masters"] = Holding("masters", share * _WIDE, note="copies, of fp32 parameters too")
    if offload.optimizer != "none":
        if configuration.stage == 3:
            own = Holding("offloaded gradients", 0, share * _WIDE)
        else:
            reduced = "gradients" if configuration.stage == 2 else "reduced gradients"
            by_name[reduced] = by_name[reduced]._replace(device=0, host=by_name[reduced].device)
            own = Holding("offloaded gradients", max(numels) * item, share * _WIDE + max(numels) * item)
        by_name["offloaded gradients"] = own
    return list(by_name.values())

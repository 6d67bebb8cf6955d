"""Which messages of a step can be under way while the model computes, as zero_runtime issues them.

=================== ============================================================== ==================================
purpose             overlaps                                                       but not
=================== ============================================================== ==================================
``gradient_reduce`` the backward pass, where buckets are reduced in it with        the last message of each backward
                    ``overlap_comm`` (null: at stage 3, and at stage 2 with        pass that reduces
                    reduce_scatter); stage 0 only with ``bounded_delay``
``parameter_gather`` forward and backward at stage 3 with a prefetch bucket; the   the first message of a step
                    next forward pass with ``overlap_parameter_gather``
``pipeline``        computation of other micro-batches, with the schedules         none
                    ``interleaved`` and ``zero_bubble``
=================== ============================================================== ==================================

The ranks wait for everything else: norms, overflow checks, activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commprof.requested.communication import sign_optimizers
from commprof.requested.configuration import read_configuration, zero_section
from commprof.requested.keys import count, flag, section
from commprof.requested.memory.states import reduces_beside_backward
from commprof.requested.support import optimizer_type
from commprof.requested.zero.gather_configuration import read_gather_configuration
from commprof.schema import Purpose


def exposed_messages(config: Mapping[str, Any], micro_batches: int) -> dict[str, int]:
    """Return the purposes whose messages can overlap, with the number of their messages per step that cannot.

    Args:
        config: of the setting.
        micro_batches: of a step.

    Raises:
        RequestedError: a key that is read here has a value of the wrong type.
    """
    configuration, zero = read_configuration(config), zero_section(config)
    found: dict[str, int] = {}
    if count(section(config, "communication"), "bounded_delay", 0, least=0):
        found[Purpose.GRADIENT_REDUCE] = 0
    elif reduces_beside_backward(config) and optimizer_type(config) not in sign_optimizers.NAMES:
        found[Purpose.GRADIENT_REDUCE] = micro_batches if configuration.reduces_every_micro_step else 1
    if configuration.stage == 3:
        prefetches = read_gather_configuration(zero).prefetch_bucket_size > 0
    else:
        prefetches = flag(zero, "zero_optimization.overlap_parameter_gather", False)
    if prefetches:
        found[Purpose.PARAMETER_GATHER] = 1
    if section(config, "pipeline_parallel").get("schedule") in ("interleaved", "zero_bubble"):
        found[Purpose.PIPELINE] = 0
    return found

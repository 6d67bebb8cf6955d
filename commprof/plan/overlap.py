"""Determine which messages of a step can overlap the computation of the model on a GPU.

The rules are those of zero_runtime:

=================== ============================================================== ==================================
purpose             overlaps                                                       but not
=================== ============================================================== ==================================
``gradient_reduce`` the backward pass, where buckets are reduced in it with        the last message of each backward
                    ``overlap_comm`` (null: at stage 3, and at stage 2 with        pass that reduces
                    reduce_scatter); stage 0 with ``gradient_reduction`` and
                    ``overlap_comm: true``, or with ``bounded_delay``
``parameter_gather`` forward and backward at stage 3 with a prefetch bucket; the   the first message of a step
                    next forward pass with ``overlap_parameter_gather``
``pipeline``        computation of other micro-batches, with the schedules         none
                    ``interleaved`` and ``zero_bubble``
=================== ============================================================== ==================================

The ranks wait for all other messages: norms, overflow checks and activations. The same rules apply to DeepSpeed
0.19 on a GPU, except that it has no ``bounded_delay``, no ``overlap_parameter_gather`` and none of these schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commprof.requested.communication import sign_optimizers
from commprof.requested.config_keys import count, flag, section
from commprof.requested.configuration import read_configuration, zero_section
from commprof.requested.memory.states import reduces_beside_backward
from commprof.requested.support import optimizer_type
from commprof.requested.zero.flat_stages import Runtime
from commprof.requested.zero.gather_configuration import read_gather_configuration
from commprof.schema import Purpose


def exposed_messages(
    config: Mapping[str, Any], micro_batches: int, framework: Runtime = "zero_runtime"
) -> dict[str, int]:
    """Return the purposes whose messages can overlap, each with the number of its messages per step that cannot.

    Args:
        config: The config of the setting.
        micro_batches: The number of micro-batches of a step.
        framework: The runtime that reads the config. DeepSpeed ignores the keys of zero_runtime.

    Raises:
        RequestedError: A key that is read here has a value of the wrong type.
    """
    configuration, zero = read_configuration(config), zero_section(config)
    is_own = framework == "zero_runtime"
    if not is_own:
        configuration = configuration.as_deepspeed_reads()
    overlapping: dict[str, int] = {}
    if is_own and count(section(config, "communication"), "bounded_delay", 0, least=0):
        overlapping[Purpose.GRADIENT_REDUCE] = 0
    elif reduces_beside_backward(config) and optimizer_type(config) not in sign_optimizers.NAMES:
        overlapping[Purpose.GRADIENT_REDUCE] = micro_batches if configuration.reduces_every_micro_step else 1
    if configuration.stage == 3:
        prefetches = read_gather_configuration(zero).prefetch_bucket_size > 0
    else:
        prefetches = is_own and flag(zero, "zero_optimization.overlap_parameter_gather", False)
    if prefetches:
        overlapping[Purpose.PARAMETER_GATHER] = 1
    if is_own and section(config, "pipeline_parallel").get("schedule") in ("interleaved", "zero_bubble"):
        overlapping[Purpose.PIPELINE] = 0
    return overlapping

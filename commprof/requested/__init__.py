"""Predicts what a configuration sends, by rules alone.

States ZeRO's rules independently, from a DeepSpeed config and the list of parameters. It reads no running job and shares
no code with the runtime, so that the two can be compared.

======================= ======================================================================================
``parameters``          the input besides the config: what is known of each parameter
``configuration``       the keys that decide what is sent, with DeepSpeed's defaults
``gather_configuration`` those that only stage 3 has
``open_values``         the values that a config leaves to the start of a run
``keys``                reading one key of a config
``partition``           the flat buffers of a parameter group, and which rank owns which shard
``buckets``             which gradients are reduced together
``reductions``          the gradient reductions: a bucket becomes messages
``gradients``           all gradients of a reduction, in the order in which they come
``modules``             the modules that hold the parameters, and the order in which they run
``gathering``           what stage 3 gathers at which module
``sharded``             the messages of stage 3
``stage3``              the messages of stage 3 per purpose
``flat_stages``         the messages of stages 0 to 2 per purpose
``expectation``         the expected messages of one purpose
``rank_groups``         the process groups of expert parallelism
``layers``              the capacity of a layer of experts, and its messages of tokens
``stages``              :func:`~commprof.requested.zero.zero_stages.expected`: all messages per step and purpose
``explanation``         the same as one sentence
``offload``             what is in host memory or on NVMe
``states``              what each rank holds, and what moves between device, host and disk
``arguments``           the arguments of torch's own wrappers of models
``ddp``                 what DistributedDataParallel sends
``fsdp``                what FSDP 1 sends
``fully_shard``         what FSDP 2 sends, with and without replicas
``tensor_parallel``     what the modules of a plan of parallelize_module send
``zero_redundancy``     what ZeroRedundancyOptimizer sends
``models``              a list of parameters for a model whose size alone is known
``support``             features whose rules are not stated here
======================= ======================================================================================
"""

from commprof.requested.errors import RequestedError, UnsupportedError
from commprof.requested.explanation import ReductionShare, describe, reduction_share, requested_gradient_op
from commprof.requested.parameters import Parameter
from commprof.requested.zero.zero_stages import Expectation, expected, expected_in_step, micro_steps

__all__ = [
    "Expectation",
    "Parameter",
    "ReductionShare",
    "RequestedError",
    "UnsupportedError",
    "describe",
    "expected",
    "expected_in_step",
    "micro_steps",
    "reduction_share",
    "requested_gradient_op",
]

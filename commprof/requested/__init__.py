"""What a configuration should send, by rules alone: the second opinion.

A statement of ZeRO's rules of its own, from a DeepSpeed config and the list of parameters. It knows nothing of a running
job, imports nothing of the runtime and is imported by nothing of it, so that the two can be compared.

======================= ======================================================================================
``parameters``          the one input beside the config: what is known of each parameter
``configuration``       the keys that decide what is sent, with DeepSpeed's defaults
``fetch_configuration`` those that only stage 3 has
``keys``                reading one key of a config
``partition``           the flat buffers of a parameter group, and who owns which part
``buckets``             which gradients travel together
``reductions``          the gradient reductions: a bucket becomes messages
``gradients``           all gradients of a reduction, in the order in which they come
``modules``             the modules that hold the parameters, and the order in which they run
``fetching``            what stage 3 gathers at which module
``sharded``             the messages of stage 3
``stage3``              the same per purpose
``flat_stages``         the messages of stages 0 to 2 per purpose
``expectation``         one line of the answer
``zero``                :func:`~commprof.requested.zero.stages.expected`, all of it per step and purpose
``explanation``         the same in one sentence
``offload``             what is kept in host memory or in files
``memory``              what each rank holds, and what moves between device, host and disk
``wrapped``             what torch's own wrappers of models were given
``ddp``                 what DistributedDataParallel sends
``fsdp``                what FSDP 1 sends
``fully_shard``         what FSDP 2 sends, with and without replicas
``tensor_parallel``     what the modules of a plan of parallelize_module send
``zero_redundancy``     what ZeroRedundancyOptimizer sends
``models``              a list of parameters for a model of which only the size is known
``support``             what a config may ask for that is not stated here
======================= ======================================================================================
"""

from commprof.requested.errors import RequestedError, UnsupportedError
from commprof.requested.explanation import ReductionShare, describe, reduction_share, requested_gradient_op
from commprof.requested.parameters import Parameter
from commprof.requested.zero.stages import Expectation, expected, expected_in_step, micro_steps

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

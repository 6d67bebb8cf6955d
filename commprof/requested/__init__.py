"""Predicts the messages that a configuration sends, only from rules.

The package states ZeRO's rules independently of the runtime. Its input is a DeepSpeed config and the list of
parameters. It reads no running job and shares no code with the runtime, so that the two can be compared.

======================= ======================================================================================
``parameters``          the parameter list, which is the input besides the config
``configuration``       the keys that determine the messages, with DeepSpeed's defaults
``gather_configuration`` the keys that only stage 3 has
``auto_values``         the values that a config leaves open (``auto``) until the start of a run
``config_keys``         reads one key of a config
``partition``           the flat buffer of a parameter group, and the owner of each shard
``bucket_rules``        which gradients are reduced together
``reductions``          the gradient reductions, which turn a bucket into messages
``gradients``           all gradients of a reduction, in the order in which they arrive
``modules``             the modules that contain the parameters, and the order in which they run
``gathering``           which parameters stage 3 gathers at which module
``sharded``             the messages of stage 3
``stage3``              the messages of stage 3 per purpose
``flat_stages``         the messages of stages 0 to 2 per purpose
``expectation``         the expected messages of one purpose
``rank_groups``         the process groups of expert parallelism
``layers``              the capacity of an expert layer, and the messages that carry its tokens
``zero_stages``         :func:`~commprof.requested.zero.zero_stages.expected`: all messages per step and purpose
``explanation``         one sentence that explains the requested and the issued gradient reduction
``offload``             which states are in host memory or on NVMe
``states``              the memory of each rank, and the traffic between device, host and disk
``arguments``           the arguments of torch's own model wrappers
``ddp``                 the messages of DistributedDataParallel
``fsdp``                the messages of FSDP 1
``fully_shard``         the messages of FSDP 2, with and without replicas
``tensor_parallel``     the messages of the modules in a plan of parallelize_module
``zero_redundancy``     the messages of ZeroRedundancyOptimizer
``sized_models``        creates a parameter list for a model if only its size is known
``support``             refuses features that the rules do not cover
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

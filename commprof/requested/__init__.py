"""What a configuration should send, by rules alone: the second opinion.

A statement of ZeRO's rules for stages 0, 1 and 2 of its own, from a DeepSpeed config and the list of parameters. It knows
nothing of a running job, imports nothing of the runtime and is imported by nothing of it, so that the two can be compared.

================== ===========================================================================================
``parameters``     the one input beside the config: what is known of each parameter
``configuration``  the keys that decide what is sent, with DeepSpeed's defaults
``partition``      the flat buffers of a parameter group, and who owns which part
``buckets``        which gradients travel together
``reductions``     the gradient reductions: a bucket becomes messages
``gradients``      all gradients of a reduction, in the order in which they come
``zero``           :func:`~commprof.requested.zero.expected`, all of it per step and purpose
``explanation``    the same in one sentence
``support``        what a config may ask for that is not stated here
================== ===========================================================================================
"""

from commprof.requested.errors import RequestedError, UnsupportedError
from commprof.requested.explanation import describe, requested_gradient_op
from commprof.requested.parameters import Parameter
from commprof.requested.zero import Expectation, expected, micro_steps

__all__ = [
    "Expectation",
    "Parameter",
    "RequestedError",
    "UnsupportedError",
    "describe",
    "expected",
    "micro_steps",
    "requested_gradient_op",
]

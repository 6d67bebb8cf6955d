"""``deepspeed.zero.Init``, which uses a function that a library patched into DeepSpeed's ``partition_parameters``.

The full name of the patched module is ``deepspeed.runtime.zero.partition_parameters``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from zero_runtime import zero
from zero_runtime.sharding.sharded_construction import Factory, typed_factory

_MODULE: Final = "deepspeed.runtime.zero.partition_parameters"
_NAME: Final = "zero_wrapper_for_fp_tensor_constructor"


class Init(zero.Init):
    """A context that shards the parameters of modules immediately; see :class:`zero_runtime.zero.Init`.

    transformers replaces the function ``zero_wrapper_for_fp_tensor_constructor`` while this context is active,
    so that the positions of rotary embeddings keep their dtype.
    """

    def _typed_factory(self) -> Callable[..., Factory]:
        factory: Callable[..., Factory] = getattr(sys.modules.get(_MODULE), _NAME, typed_factory)
        return factory

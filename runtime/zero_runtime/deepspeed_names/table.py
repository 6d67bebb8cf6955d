"""Every module and name of DeepSpeed that this runtime knows: ``docs/deepspeed-names.md`` is made of this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zero_runtime.deepspeed_names import inner_names, top_names, training_names, utility_names
from zero_runtime.deepspeed_names.names import Module

# By their names within the package; the package itself is empty.
MODULES: Final[Mapping[str, Module]] = {
    **top_names.MODULES,
    **training_names.MODULES,
    **inner_names.MODULES,
    **utility_names.MODULES,
}

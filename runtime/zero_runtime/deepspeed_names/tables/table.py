"""All modules and names of DeepSpeed that this runtime knows; the source of ``docs/deepspeed-names.md``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zero_runtime.deepspeed_names.tables import inner_names, top_names, training_names, utility_names
from zero_runtime.deepspeed_names.tables.names import Module

# By the names within the package; the package itself has the empty name.
MODULES: Final[Mapping[str, Module]] = {
    **top_names.MODULES,
    **training_names.MODULES,
    **inner_names.MODULES,
    **utility_names.MODULES,
}

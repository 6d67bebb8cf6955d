"""Parameters that zero_runtime never partitions, by the classes of the modules that own them.

Only zero_runtime has these keys. ``zero_force_param_types`` names classes whose parameters are not partitioned.
``zero_allowed_param_types`` names the only classes whose parameters are partitioned. Base classes of a module count as
well. If several modules own a parameter, one owner of a forced class decides; otherwise one owner of an allowed class
is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from commprof.requested.config_keys import wrong
from commprof.requested.errors import UnsupportedError
from commprof.requested.parameters import Parameter

ALLOWED: Final = "zero_allowed_param_types"
FORCED: Final = "zero_force_param_types"


def unpartitioned(zero: Mapping[str, Any], parameters: Sequence[Parameter]) -> frozenset[str]:
    """Return the names of the parameters that are not partitioned.

    Args:
        zero: The section ``zero_optimization``.
        parameters: The parameters of the model.

    Raises:
        RequestedError: the value of a key is not a list of names.
        UnsupportedError: the classes of the owners of a parameter are not known.
    """
    allowed, forced = _names(zero, ALLOWED), _names(zero, FORCED) or frozenset()
    if allowed is None and not forced:
        return frozenset()
    names = set()
    for parameter in parameters:
        if parameter.owner_types is None:
            key = FORCED if forced else ALLOWED
            reason = "the classes of the modules that own a parameter are not known"
            raise UnsupportedError(f"zero_optimization.{key}", zero[key], reason)
        owners = [frozenset(each.split(",")) for each in parameter.owner_types.split(";")]
        is_forced = any(types & forced for types in owners)
        if is_forced or not (allowed is None or any(types & allowed for types in owners)):
            names.add(parameter.name)
    return frozenset(names)


def _names(zero: Mapping[str, Any], key: str) -> frozenset[str] | None:
    value = zero.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise wrong(f"zero_optimization.{key}", value, "a list of class names")
    return frozenset(value)

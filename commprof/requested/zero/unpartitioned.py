"""Parameters that zero_runtime never partitions, by the classes of the modules that own them.

The keys are zero_runtime's own: ``zero_force_param_types`` names classes whose parameters stay whole, and
``zero_allowed_param_types`` those whose parameters alone are partitioned. A module is of the classes that its own derives
from as well. Of several owners one of a forced class decides, and else one of an allowed class is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from commprof.requested.errors import UnsupportedError
from commprof.requested.keys import wrong
from commprof.requested.parameters import Parameter

ALLOWED: Final = "zero_allowed_param_types"
FORCED: Final = "zero_force_param_types"


def unpartitioned(zero: Mapping[str, Any], parameters: Sequence[Parameter]) -> frozenset[str]:
    """The names of the parameters that stay whole.

    Args:
        zero: the section ``zero_optimization``.
        parameters: of the model.

    Raises:
        RequestedError: a key is no list of names.
        UnsupportedError: it is not known of which classes the owners of a parameter are.
    """
    allowed, forced = _names(zero, ALLOWED), _names(zero, FORCED) or frozenset()
    if allowed is None and not forced:
        return frozenset()
    names = set()
    for parameter in parameters:
        if parameter.owner_types is None:
            key = FORCED if forced else ALLOWED
            reason = "of which classes the modules are that own a parameter is not known"
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
        raise wrong(f"zero_optimization.{key}", value, "a list of names of classes")
    return frozenset(value)

"""``deepspeed.runtime.config_utils``: the pydantic class for configurations of scripts.

This module requires the package pydantic, which this runtime's own configuration does not use. The
``json_schema_extra`` of a field can contain three entries. ``deprecated`` marks a deprecated field,
``new_param`` is the name of the field that replaces it, and ``new_param_fn`` is the function that converts the
value.
"""

from __future__ import annotations

from typing import Any

from zero_runtime import log
from zero_runtime.errors import UnsupportedError

try:
    from pydantic import BaseModel, ConfigDict
except ImportError as error:
    raise UnsupportedError(
        "DeepSpeedConfigModel needs the package pydantic, which is not installed; pip install pydantic"
    ) from error


class DeepSpeedConfigModel(BaseModel):
    """A configuration with checked fields. Unknown fields are refused, and values that are ``"auto"`` are dropped.

    Args:
        strict: Whether values that are ``"auto"`` are kept.
        data: The values, by field.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        values = {
            name: value
            for name, value in data.items()
            if strict or value != "auto" or name == "replace_method"
        }
        super().__init__(**values)
        for name, field in type(self).model_fields.items():
            rules = field.json_schema_extra
            if isinstance(rules, dict) and rules.get("deprecated") and name in self.model_fields_set:
                self._replace(name, rules)

    def _replace(self, name: str, rules: dict[str, Any]) -> None:
        """Move the value of the deprecated field ``name`` to the field that replaces it."""
        *path, new = str(rules.get("new_param", "")).split(".")
        target: Any = self
        hint = f"; write {rules['new_param']}" if new else ""
        log.warning(
            f"the configuration's {name} is deprecated{hint} {rules.get('deprecated_msg', '')}".rstrip()
        )
        if not new or not rules.get("set_new_param", True):
            return
        for each in path:
            target = getattr(target, each)
        assert new not in target.model_fields_set, (
            f"{name} is deprecated and is given together with {rules['new_param']}, which replaces it; keep the latter"
        )
        convert = rules.get("new_param_fn", lambda value: value)
        value = convert(getattr(self, name))
        delattr(self, name)
        setattr(target, new, value)

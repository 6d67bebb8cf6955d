"""The protobuf messages of a Chakra trace, built from a table of their fields.

The numbers and types of the fields are from schema/protobuf/et_def.proto of mlcommons/chakra. ``AttributeProto``
contains only the value types that commprof writes.
"""

from __future__ import annotations

import io
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto

_PACKAGE: Final = "ChakraProtoMsg"
_Field = descriptor_pb2.FieldDescriptorProto
_TEXT, _U64, _I32, _I64, _BOOL = (
    _Field.TYPE_STRING,
    _Field.TYPE_UINT64,
    _Field.TYPE_INT32,
    _Field.TYPE_INT64,
    _Field.TYPE_BOOL,
)

# message: (field, number, scalar type or name of the message type, repeated, member of the oneof "value")
_MESSAGES: Final[dict[str, tuple[tuple[str, int, Any, bool, bool], ...]]] = {
    "AttributeProto": (
        ("name", 1, _TEXT, False, False),
        ("doc_string", 2, _TEXT, False, False),
        ("int32_val", 7, _I32, False, True),
        ("int64_val", 9, _I64, False, True),
        ("uint64_val", 13, _U64, False, True),
        ("bool_val", 27, _BOOL, False, True),
        ("string_val", 29, _TEXT, False, True),
    ),
    "GlobalMetadata": (
        ("version", 1, _TEXT, False, False),
        ("attr", 2, "AttributeProto", True, False),
    ),
    "Node": (
        ("id", 1, _U64, False, False),
        ("name", 2, _TEXT, False, False),
        ("type", 3, _I32, False, False),  # an enum in the schema, with the same wire format
        ("ctrl_deps", 4, _U64, True, False),
        ("data_deps", 5, _U64, True, False),
        ("start_time_micros", 6, _U64, False, False),
        ("duration_micros", 7, _U64, False, False),
        ("attr", 10, "AttributeProto", True, False),
    ),
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="commprof/chakra.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if any(in_oneof for *_, in_oneof in fields):
            message.oneof_decl.add(name="value")
        for field, number, kind, repeated, in_oneof in fields:
            declared = message.field.add(
                name=field, number=number, label=_Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            )
            if isinstance(kind, str):
                declared.type, declared.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                declared.type = kind
            if in_oneof:
                declared.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_MADE: Final = _classes()
GlobalMetadata: Final[Any] = _MADE["GlobalMetadata"]
Node: Final[Any] = _MADE["Node"]


def delimited(message: Any) -> bytes:
    """Return the serialized ``message`` with its length as prefix, which is the format of messages in a trace."""
    out = io.BytesIO()
    proto.serialize_length_prefixed(message, out)
    return out.getvalue()

"""Requests without what they keep secret: fields that the wire marks `csi_secret`."""

from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from proto import csi_pb2 as csi

STRIPPED = "***stripped***"


def stripped(message: Message) -> dict[str, Any]:
    """The message as a JSON object, with the values of its secrets replaced, at any depth."""
    copy = type(message)()
    copy.CopyFrom(message)
    _strip(copy)
    return json_format.MessageToDict(copy, preserving_proto_field_name=True)


def _strip(message: Message) -> None:
    for field, value in message.ListFields():
        if field.GetOptions().Extensions[csi.csi_secret]:
            _replace(message, field)
        elif field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        else:
            for one in value if field.is_repeated else [value]:
                _strip(one)


def _replace(message: Message, field: FieldDescriptor) -> None:
    """Keep a secret's keys, which help to find a mistake, and none of its values."""
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for key in value:
            value[key] = STRIPPED
    else:
        message.ClearField(field.name)

"""The .proto files say what CSI 1.13 and kubelet say; modules are generated; calls answered."""

import copy
import json
import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from agent.csi.operator import Operator
from agent.extras.transfer.service import Transfer
from proto import carver_pb2, csi_pb2, generate, pluginregistration_pb2

TABLE = Path(__file__).parents[2] / "data" / "csi-1.13-wire.json"

Table = dict[str, Any]
Type = descriptor_pb2.FieldDescriptorProto.Type
Label = descriptor_pb2.FieldDescriptorProto.Label


# What the release reserves in enums: for them the table has lists of values, and no place for it.
RESERVED_IN_ENUMS = {
    "ControllerServiceCapability.RPC.Type": [11],
    "NodeServiceCapability.RPC.Type": [4],
}

# What a compiled file says, in the table's form. A true option is its name in a list, like in the
# table, and reserved numbers are one list; whatever the table has no word for (a reserved name, a
# default, another option) gets a key of its own, so that it makes a difference.


def described(file: descriptor_pb2.FileDescriptorProto) -> Table:
    prefix = f".{file.package}."
    enums: Table = {}
    messages: Table = {}

    def walk(scope: str, message: descriptor_pb2.DescriptorProto) -> None:
        name = scope + message.name
        # Made by protoc for a map field; its types are in the field's description.
        if message.options.map_entry:
            return
        messages[name] = described_message(message, prefix)
        for enum in message.enum_type:
            enums[f"{name}.{enum.name}"] = described_enum(enum)
        for nested in message.nested_type:
            walk(f"{name}.", nested)

    for enum in file.enum_type:
        enums[enum.name] = described_enum(enum)
    for message in file.message_type:
        walk("", message)
    return {
        "syntax": file.syntax,
        "package": file.package,
        "imports": list(file.dependency),
        **{option.name: value for option, value in file.options.ListFields()},
        "extensions": [
            {**described_field(extension, prefix), "extends": extension.extendee}
            for extension in file.extension
        ],
        "enums": enums,
        "messages": messages,
        "services": {service.name: described_service(service, prefix) for service in file.service},
        **rest(
            file,
            *("name", "syntax", "package", "dependency", "options"),
            *("extension", "enum_type", "message_type", "service"),
        ),
    }


def described_message(message: descriptor_pb2.DescriptorProto, prefix: str) -> Table:
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    fields = []
    for field in message.field:
        one = described_field(field, prefix)
        if entry := maps.get(field.type_name.rpartition(".")[2]):
            key, value = (described_field(part, prefix)["type"] for part in entry.field)
            one["type"] = f"map<{key}, {value}>"
            del one["repeated"]
        if field.HasField("oneof_index") and not field.proto3_optional:
            one["oneof"] = message.oneof_decl[field.oneof_index].name
        fields.append(one)
    return {
        "fields": fields,
        **options(message),
        # A message's range ends before its end.
        **reserved(message.reserved_range, 0),
        **rest(
            message,
            *("name", "field", "nested_type", "enum_type", "oneof_decl", "options"),
            "reserved_range",
        ),
    }


def described_field(field: descriptor_pb2.FieldDescriptorProto, prefix: str) -> Table:
    kind = field.type_name.removeprefix(prefix).removeprefix(".")
    return {
        "name": field.name,
        "number": field.number,
        "type": kind or Type.Name(field.type).removeprefix("TYPE_").lower(),
        **({"repeated": True} if field.label == Label.LABEL_REPEATED else {}),
        **options(field),
        **rest(
            field,
            *("name", "number", "type", "type_name", "label", "options"),
            *("oneof_index", "extendee", "json_name"),
        ),
    }


def described_enum(enum: descriptor_pb2.EnumDescriptorProto) -> Any:
    values = [
        {"name": value.name, "number": value.number, **options(value)} for value in enum.value
    ]
    # The table has no place for an enum's own options: it is a plain list where there are none.
    # An enum's range ends with its end.
    more = {
        **options(enum),
        **reserved(enum.reserved_range, 1),
        **rest(enum, "name", "value", "options", "reserved_range"),
    }
    return {"values": values, **more} if more else values


def described_service(service: descriptor_pb2.ServiceDescriptorProto, prefix: str) -> Table:
    methods = [
        {
            "name": method.name,
            "request": method.input_type.removeprefix(prefix),
            "response": method.output_type.removeprefix(prefix),
            **options(method),
            **rest(method, "name", "input_type", "output_type", "options"),
        }
        for method in service.method
    ]
    return {"methods": methods, **options(service)}


def reserved(ranges: Iterable[Any], inclusive: int) -> Table:
    numbers = [n for one in ranges for n in range(one.start, one.end + inclusive)]
    return {"reserved": numbers} if numbers else {}


def options(declaration: Any) -> Table:
    names = sorted(
        option.name if value is True else f"{option.name} = {value}"
        for option, value in declaration.options.ListFields()
    )
    return {"options": names} if names else {}


def rest(declaration: Message, *described: str) -> Table:
    """Return whatever else is set: client_streaming, proto3_optional, reserved_range and so on."""
    return {
        field.name: value
        for field, value in declaration.ListFields()
        if field.name not in described
    }


def compiled(module_descriptor: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    module_descriptor.CopyToProto(file)
    return file


def table() -> Table:
    return cast("Table", json.loads(TABLE.read_text()))


def wire() -> Table:
    """The table, with what it has no place for, and options in no order, which means nothing."""
    whole = table()
    for name, numbers in RESERVED_IN_ENUMS.items():
        whole["enums"][name] = {"values": whole["enums"][name], "reserved": [*numbers]}
    sort_options(whole)
    return whole


def sort_options(node: Any) -> None:
    if isinstance(node, dict):
        if "options" in node:
            node["options"].sort()
        node = list(node.values())
    if isinstance(node, list):
        for one in node:
            sort_options(one)


# The generated modules


def test_the_committed_modules_are_what_protoc_makes_of_the_proto_files(tmp_path: Path) -> None:
    generate.generate(tmp_path)

    assert contents(tmp_path / "proto") == contents(generate.FOLDER)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*_pb2*.py*")}


# CSI


def test_csi_proto_says_exactly_what_the_table_says() -> None:
    assert described(compiled(csi_pb2.DESCRIPTOR)) == wire()


def test_every_field_named_secrets_is_marked_as_secret() -> None:
    fields = [
        field
        for message in table()["messages"].values()
        for field in message["fields"]
        if field["name"] == "secrets"
    ]

    assert fields
    assert all("csi_secret" in field["options"] for field in fields)


def test_a_secret_is_found_through_the_option_at_run_time() -> None:
    fields = csi_pb2.NodeStageVolumeRequest.DESCRIPTOR.fields

    secret = [field.name for field in fields if field.GetOptions().Extensions[csi_pb2.csi_secret]]

    assert secret == ["secrets"]


# Kubelet's registration


def test_the_registration_proto_has_the_shape_that_kubelet_speaks() -> None:
    registration = described(compiled(pluginregistration_pb2.DESCRIPTOR))

    assert registration == {
        "syntax": "proto3",
        "package": "pluginregistration",
        "imports": [],
        "go_package": "carver/proto/pluginregistration",
        "extensions": [],
        "enums": {},
        "messages": {
            "InfoRequest": {"fields": []},
            "PluginInfo": {
                "fields": [
                    {"name": "type", "number": 1, "type": "string"},
                    {"name": "name", "number": 2, "type": "string"},
                    {"name": "endpoint", "number": 3, "type": "string"},
                    {"name": "supported_versions", "number": 4, "type": "string", "repeated": True},
                ]
            },
            "RegistrationStatus": {
                "fields": [
                    {"name": "plugin_registered", "number": 1, "type": "bool"},
                    {"name": "error", "number": 2, "type": "string"},
                ]
            },
            "RegistrationStatusResponse": {"fields": []},
        },
        "services": {
            "Registration": {
                "methods": [
                    {"name": "GetInfo", "request": "InfoRequest", "response": "PluginInfo"},
                    {
                        "name": "NotifyRegistrationStatus",
                        "request": "RegistrationStatus",
                        "response": "RegistrationStatusResponse",
                    },
                ]
            }
        },
    }


# Carver's own calls


@pytest.mark.parametrize(("service", "servicer"), [("Operator", Operator), ("Transfer", Transfer)])
def test_each_of_carvers_own_calls_is_answered(service: str, servicer: type) -> None:
    found = carver_pb2.DESCRIPTOR.services_by_name[service]
    assert found.methods
    assert {one.name for one in found.methods} <= vars(servicer).keys()


def test_sizes_and_offsets_of_carvers_own_calls_are_numbers_that_hold_them() -> None:
    file = described(compiled(carver_pb2.DESCRIPTOR))
    # Requests of v1 had another form: they must not be taken for these.
    assert file["package"] == "carver.v2"
    sizes = [
        field
        for message in file["messages"].values()
        for field in message["fields"]
        if "bytes" in field["name"] or "offset" in field["name"]
    ]
    assert sizes
    assert {one["type"] for one in sizes} == {"uint64"}


# The comparison itself: it must be able to fail


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterable[tuple[Any, ...]]:
    """Yield the way to every entry of the table, the leaves as well as what holds them."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def test_any_entry_dropped_from_the_table_is_noticed() -> None:
    whole = described(compiled(csi_pb2.DESCRIPTOR))
    for *path, last in places(wire()):
        less = wire()
        node = less
        for key in path:
            node = node[key]
        del node[last]
        assert less != whole, [*path, last]


File = descriptor_pb2.FileDescriptorProto


def field_of(file: File, message: str, name: str) -> descriptor_pb2.FieldDescriptorProto:
    found = next(each for each in file.message_type if each.name == message)
    return next(each for each in found.field if each.name == name)


def message_of(file: File, name: str) -> descriptor_pb2.DescriptorProto:
    return next(each for each in file.message_type if each.name == name)


def method_of(file: File, service: str, name: str) -> descriptor_pb2.MethodDescriptorProto:
    found = next(each for each in file.service if each.name == service)
    return next(each for each in found.method if each.name == name)


def drop_field(file: File) -> None:
    del message_of(file, "Volume").field[-1]


def add_field(file: File) -> None:
    message_of(file, "ProbeRequest").field.add(
        name="extra", number=1, type=Type.TYPE_BOOL, label=Label.LABEL_OPTIONAL
    )


def rename_field(file: File) -> None:
    field_of(file, "Volume", "volume_id").name = "id"


def renumber_field(file: File) -> None:
    field_of(file, "Volume", "volume_id").number = 6


def retype_field(file: File) -> None:
    field_of(file, "Volume", "capacity_bytes").type = Type.TYPE_UINT64


def retype_message_field(file: File) -> None:
    field_of(file, "CreateSnapshotResponse", "snapshot").type_name = ".csi.v1.Volume"


def retype_map(file: File) -> None:
    message_of(file, "Topology").nested_type[0].field[1].type = Type.TYPE_BYTES


def make_repeated(file: File) -> None:
    field_of(file, "CreateSnapshotResponse", "snapshot").label = Label.LABEL_REPEATED


def make_optional(file: File) -> None:
    field_of(file, "Volume", "volume_id").proto3_optional = True


def leave_the_oneof(file: File) -> None:
    field_of(file, "VolumeCapability", "mount").ClearField("oneof_index")


def rename_the_oneof(file: File) -> None:
    message_of(file, "VolumeCapability").oneof_decl[0].name = "other"


def deprecate_field(file: File) -> None:
    field_of(file, "Volume", "volume_id").options.deprecated = True


def tell_a_secret(file: File) -> None:
    secrets = field_of(file, "CreateVolumeRequest", "secrets")
    secrets.options.ClearExtension(csi_pb2.csi_secret)


def keep_one_of_two_options(file: File) -> None:
    secrets = field_of(file, "NodeExpandVolumeRequest", "secrets")
    secrets.options.ClearExtension(csi_pb2.alpha_field)


def reserve_a_number(file: File) -> None:
    message_of(file, "Volume").reserved_range.add(start=9, end=10)


def reserve_less(file: File) -> None:
    nested = message_of(file, "ListVolumesResponse").nested_type
    del next(one for one in nested if one.name == "VolumeStatus").reserved_range[:]


def reserve_another_number_of_an_enum(file: File) -> None:
    [rpc] = message_of(file, "NodeServiceCapability").nested_type
    rpc.enum_type[0].reserved_range[0].end = 5


def forget_what_an_enum_reserves(file: File) -> None:
    [rpc] = message_of(file, "ControllerServiceCapability").nested_type
    del rpc.enum_type[0].reserved_range[:]


def reserve_a_name(file: File) -> None:
    message_of(file, "Volume").reserved_name.append("attributes")


def add_message(file: File) -> None:
    file.message_type.add(name="Extra")


def add_nested_message(file: File) -> None:
    message_of(file, "Volume").nested_type.add(name="Extra")


def settle_an_alpha_message(file: File) -> None:
    message_of(file, "VolumeHealth").options.ClearExtension(csi_pb2.alpha_message)


def drop_enum_value(file: File) -> None:
    del file.enum_type[0].value[-1]


def renumber_nested_enum_value(file: File) -> None:
    message_of(file, "VolumeUsage").enum_type[0].value[1].number = 7


def deprecate_enum_value(file: File) -> None:
    file.enum_type[0].value[1].options.deprecated = True


def mark_enum_as_alpha(file: File) -> None:
    file.enum_type[0].options.Extensions[csi_pb2.alpha_enum] = True


def add_enum(file: File) -> None:
    file.enum_type.add(name="Extra")


def drop_method(file: File) -> None:
    del file.service[0].method[-1]


def swap_the_request(file: File) -> None:
    method_of(file, "Node", "NodeGetInfo").input_type = ".csi.v1.ProbeRequest"


def swap_the_response(file: File) -> None:
    method_of(file, "Node", "NodeGetInfo").output_type = ".csi.v1.ProbeResponse"


def stream_the_request(file: File) -> None:
    method_of(file, "Node", "NodeGetInfo").client_streaming = True


def stop_streaming(file: File) -> None:
    method_of(file, "SnapshotMetadata", "GetMetadataDelta").server_streaming = False


def settle_an_alpha_method(file: File) -> None:
    for service, name in (("Controller", "GetSnapshot"), ("Node", "NodeGetVolumeHealth")):
        method_of(file, service, name).options.ClearExtension(csi_pb2.alpha_method)


def deprecate_method(file: File) -> None:
    method_of(file, "Node", "NodeGetInfo").options.deprecated = True


def deprecate_service(file: File) -> None:
    file.service[0].options.deprecated = True


def add_service(file: File) -> None:
    file.service.add(name="Extra")


def renumber_extension(file: File) -> None:
    file.extension[0].number = 1061


def extend_something_else(file: File) -> None:
    file.extension[0].extendee = ".google.protobuf.FileOptions"


def drop_extension(file: File) -> None:
    del file.extension[-1]


def drop_import(file: File) -> None:
    del file.dependency[-1]


def import_publicly(file: File) -> None:
    file.public_dependency.append(0)


def move_go_package(file: File) -> None:
    file.options.go_package = "example.com/csi"


def add_file_option(file: File) -> None:
    file.options.java_package = "com.example.csi"


def rename_package(file: File) -> None:
    file.package = "csi.v2"


CHANGES: list[Callable[[File], None]] = [
    *(drop_field, add_field, rename_field, renumber_field, retype_field, retype_message_field),
    *(retype_map, make_repeated, make_optional, leave_the_oneof, rename_the_oneof),
    *(deprecate_field, tell_a_secret, keep_one_of_two_options, reserve_a_number, reserve_a_name),
    *(reserve_less, reserve_another_number_of_an_enum, forget_what_an_enum_reserves),
    *(add_message, add_nested_message, settle_an_alpha_message),
    *(drop_enum_value, renumber_nested_enum_value, deprecate_enum_value, mark_enum_as_alpha),
    *(add_enum, drop_method, swap_the_request, swap_the_response, stream_the_request),
    *(stop_streaming, settle_an_alpha_method, deprecate_method, deprecate_service, add_service),
    *(renumber_extension, extend_something_else, drop_extension, drop_import, import_publicly),
    *(move_go_package, add_file_option, rename_package),
]


@pytest.mark.parametrize("change", CHANGES, ids=operator.attrgetter("__name__"))
def test_any_change_of_the_proto_file_is_noticed(change: Callable[[File], None]) -> None:
    file = compiled(csi_pb2.DESCRIPTOR)
    before = copy.deepcopy(file)

    change(file)

    assert file != before
    assert described(file) != wire()

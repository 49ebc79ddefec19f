"""The .proto files say what CSI 1.13 and kubelet say; modules are generated; calls answered."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.json_format import MessageToDict, ParseDict

from agent.csi.controller import Controller
from agent.csi.group_controller import GroupController
from agent.csi.identity import Identity
from agent.csi.node import Node
from agent.csi.operator import Operator
from agent.extras.changed_blocks.changed_blocks_service import ChangedBlocks
from agent.extras.transfer.transfer_service import Transfer
from proto import carver_pb2, csi_pb2, generate, pluginregistration_pb2

DATA = Path(__file__).parents[2] / "data"
# Fields that calls of 0.2.0 have got since, each with the reason why a peer of 0.2.0, which passes
# over it or leaves it out, does no harm. A request by which data are lost where the field is passed
# over needs a call of its own, which a service of 0.2.0 refuses.
SINCE_0_2_0 = {
    ("Operator/RepairVolume", "differing_images"): "commands call RepairAsConfirmed",
    ("Operator/VolumesHere", "persistent_volumes"): "the name is then as Kubernetes makes it",
    ("Operator/VolumesHere", "capabilities"): "the command says that they are not recorded",
    ("Transfer/ReceiveStatus", "missing_group"): (
        "controllers alone go by it, and 0.2.0 refuses to serve them; the command asks its user"
    ),
    ("Transfer/BeginReceive", "missing_group"): "the volume is there, so it is not looked for",
    ("Transfer/AbortReceive", "release"): "commands read the state before, as those of 0.2.0 do",
    ("Transfer/UndoMove", "release"): "commands read the state before, as those of 0.2.0 do",
    ("Transfer/FinishMove", "release"): "commands read the state before, as those of 0.2.0 do",
    ("Transfer/UndoMove", "only_begun"): "controllers alone set it; 0.2.0 refuses to serve them",
    ("Transfer/AbortReceive", "only_begun"): "it is of UndoMove; no caller sets it",
    ("Transfer/FinishMove", "only_begun"): "it is of UndoMove; no caller sets it",
    ("Transfer/BeginMove", "replaces"): (
        "controllers alone set it, and send all unless the answer confirms it"
    ),
    ("Transfer/MoveStatus", "replaces"): "controllers alone go by it: nothing was confirmed",
    ("Transfer/CommitMove", "replaces"): "no caller reads it",
    ("Transfer/BeginReceive", "replaces"): "only a service sets it, to itself, for Pull",
    ("Transfer/BeginReceive", "replaceable"): "no caller reads it",
    ("Transfer/BeginReceive", "device_class"): "no caller reads it",
    ("Transfer/ReceiveStatus", "replaces"): "controllers alone go by it: nothing is compared",
    ("Transfer/ReceiveStatus", "replaceable"): "controllers alone go by it: all is sent",
    ("Transfer/ReceiveStatus", "device_class"): "controllers alone go by it, beside `replaceable`",
}


def compiled(module: ModuleType) -> FileDescriptorProto:
    file = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    return file


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*_pb2*.py*")}


def test_the_committed_modules_are_what_protoc_makes_of_the_proto_files(tmp_path: Path) -> None:
    generate.generate(tmp_path)

    assert contents(tmp_path / "proto") == contents(generate.FOLDER), "run make proto"


# The data are the descriptors of CSI 1.13.0 and of kubelet's pluginregistration/v1, in protobuf's
# JSON: every message, field, number, type, label, oneof, option, reserved number, enum, method and
# stream, so any change of a .proto file makes a difference.
@pytest.mark.parametrize(
    ("module", "recorded"),
    [
        (csi_pb2, "csi-1.13-wire.json"),
        (pluginregistration_pb2, "kubelet-registration-wire.json"),
    ],
)
def test_a_proto_file_compiles_to_exactly_the_recorded_descriptor(
    module: ModuleType, recorded: str
) -> None:
    expected = json.loads((DATA / recorded).read_text())
    assert MessageToDict(compiled(module)) == expected
    # JSON leaves out what protobuf does not know, such as an option that is not imported.
    assert compiled(module) == ParseDict(expected, FileDescriptorProto())


def test_every_field_named_secrets_is_marked_as_secret_at_run_time() -> None:
    marked = {
        field.full_name: field.GetOptions().Extensions[csi_pb2.csi_secret]
        for message in csi_pb2.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if field.name == "secrets"
    }
    assert "csi.v1.NodeStageVolumeRequest.secrets" in marked
    assert all(marked.values())


@pytest.mark.parametrize(("service", "servicer"), [("Operator", Operator), ("Transfer", Transfer)])
def test_each_of_carvers_own_calls_is_answered(service: str, servicer: type) -> None:
    found = carver_pb2.DESCRIPTOR.services_by_name[service]
    assert found.methods
    missing = {one.name for one in found.methods} - vars(servicer).keys()
    assert not missing, servicer.__module__


def test_each_field_that_a_peer_of_0_2_0_lacks_is_known_to_be_harmless() -> None:
    found = set()
    for name, fields in json.loads((DATA / "calls-0.2.0.json").read_text()).items():
        service, _, call = name.partition("/")
        method = carver_pb2.DESCRIPTOR.services_by_name[service].methods_by_name[call]
        for message, known in (
            (method.input_type, fields["request"]),
            (method.output_type, fields["answer"]),
        ):
            present = {field.name for field in message.fields}
            assert present >= set(known), f"{name}: carver.v2 only gains fields"
            found |= {(name, field) for field in present - set(known)}
    assert found == SINCE_0_2_0.keys()


def test_each_call_of_csi_is_answered() -> None:
    servicers = (Identity, Controller, GroupController, ChangedBlocks, Node)
    answered = {name for one in servicers for name in vars(one) if name[0].isupper()}
    every = [
        method.name
        for service in csi_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert len(every) == len(set(every)) == 36
    assert set(every) - answered == set()


def test_sizes_and_offsets_of_carvers_own_calls_are_numbers_that_hold_them() -> None:
    # Requests of v1 had another form: they must not be taken for these.
    assert carver_pb2.DESCRIPTOR.package == "carver.v2"
    sizes = [
        field
        for message in carver_pb2.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
        if "bytes" in field.name or "offset" in field.name
    ]
    assert sizes
    assert {one.type for one in sizes} == {one.TYPE_UINT64 for one in sizes}

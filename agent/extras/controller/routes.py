"""The table of CSI calls that nodes answer, each with the field that names its volume.

agent/extras/controller/router.py answers all other calls itself, or chooses their node.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.message import Message

from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

# Keys in GetPluginInfoResponse.manifest of the node's id, its topology segments (as JSON), and its
# volume groups (as JSON: names by the start of the UUIDs).
NODE_ID, SEGMENTS, GROUPS = "node", "topology", "groups"
# Key in the manifest, and two of its values: whether the node named all volume groups of Carver's
# on its disks. YES if, by the last scan, no disk may have another volume group; IN_PART if a disk
# may have another one; empty before the first scan.
IS_WHOLE, YES, IN_PART = "groups-whole", "yes", "in part"
# Key in the manifest: whether kubelet on the node asks for the health of volumes. The value is YES,
# or empty.
IS_WATCHED = "health-watched"

# The request's field with the id of the volume, snapshot or group snapshot that the call is about,
# by service and call.
FIELDS: Mapping[str, Mapping[str, str]] = {
    "csi.v1.Controller": {
        "DeleteVolume": "volume_id",
        "ValidateVolumeCapabilities": "volume_id",
        "ControllerGetVolume": "volume_id",
        "ControllerGetVolumeHealth": "volume_id",
        "ControllerExpandVolume": "volume_id",
        "ControllerModifyVolume": "volume_id",
        "CreateSnapshot": "source_volume_id",
        "DeleteSnapshot": "snapshot_id",
        "GetSnapshot": "snapshot_id",
    },
    "csi.v1.GroupController": {
        "CreateVolumeGroupSnapshot": "source_volume_ids",
        "DeleteVolumeGroupSnapshot": "group_snapshot_id",
        "GetVolumeGroupSnapshot": "group_snapshot_id",
    },
}
# Calls that are answered by a stream of messages: the request's field with the id of the snapshot
# that the call is about, by service and call.
STREAMS: Mapping[str, Mapping[str, str]] = {
    "csi.v1.SnapshotMetadata": {
        "GetMetadataAllocated": "snapshot_id",
        "GetMetadataDelta": "target_snapshot_id",
    },
}


def request_class(service: str, call: str) -> type[Message]:
    """Return the class of a call's request."""
    return message_factory.GetMessageClass(_method(service, call).input_type)


def response_class(service: str, call: str) -> type[Message]:
    """Return the class of a call's answer."""
    return message_factory.GetMessageClass(_method(service, call).output_type)


def _method(service: str, call: str) -> Any:
    package, _, name = service.rpartition(".")
    file = csi.DESCRIPTOR if package == "csi.v1" else carver.DESCRIPTOR
    return file.services_by_name[name].methods_by_name[call]


def source_of(request: csi.CreateVolumeRequest) -> tuple[str, str]:
    """Return the id of a new volume's source, and the request's field that has the id.

    Both are empty without a source.
    """
    identity, field = source(request.volume_content_source)
    return identity, field and f"volume_content_source.{field}"


def source(wire: csi.VolumeContentSource) -> tuple[str, str]:
    """Return the id in a VolumeContentSource, and the field with the id; both empty without one."""
    kind = wire.WhichOneof("type")
    if kind is None:
        return "", ""
    return getattr(getattr(wire, kind), f"{kind}_id"), f"{kind}.{kind}_id"


def ids_in(request: Any, field: str) -> Sequence[str]:
    """Return the ids in a field of a request, which has one id or a list of ids.

    For a field with one id, that id is returned even if it is empty.
    """
    value = getattr(request, field)
    return [value] if isinstance(value, str) else list(value)

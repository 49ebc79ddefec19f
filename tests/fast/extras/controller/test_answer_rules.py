"""What a node may answer: honest answers pass, and no changed one names what is another's."""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.wrappers_pb2 import Int64Value
from hypothesis import given
from hypothesis import strategies as st

from agent.core import ids
from agent.core.ids import VolumeId
from agent.csi.client import of_snapshot
from agent.extras.controller import routes
from agent.extras.controller.answer_rules import RULES, Asked, Row, Untrue, any_value
from agent.extras.controller.nodes import Nodes
from agent.extras.controller.router import Router
from agent.requests.requests import publish_context
from agent.settings.settings import DRIVER_NAME
from proto import csi_pb2 as csi

NODE, OTHER = "node-a", "node-b"
HERE = csi.Topology(segments=ids.topology(NODE, DRIVER_NAME))
# The node has two groups, another node has a third, and a fourth is detached.
OWN, SECOND, FOREIGN, DETACHED = "data@aaaaaaaa", "fast@bbbbbbbb", "data@cccccccc", "data@dddddddd"
LIMIT = 2 << 30
# A field that this version does not know: number 900, of bytes.
UNKNOWN = b"\xa2\x38\x05newer"


def asked(request: Any) -> Asked:
    def is_elsewhere(one: VolumeId) -> bool:
        return str(one).startswith(FOREIGN)

    def is_anothers(one: VolumeId) -> bool:
        return one.name == "vol-anothers"

    return Asked(request, NODE, HERE, frozenset((OWN, SECOND)), is_elsewhere, is_anothers)


def volume(name: str = "vol-1", place: str = OWN, **more: Any) -> csi.Volume:
    return csi.Volume(
        volume_id=f"{place}/{name}",
        capacity_bytes=1 << 30,
        volume_context={"carver/class": "fast"},
        accessible_topology=[HERE],
        **more,
    )


def snapshot(name: str = "snap-1", place: str = OWN, **more: Any) -> csi.Snapshot:
    return csi.Snapshot(
        **{
            "snapshot_id": f"{place}/{name}",
            "source_volume_id": f"{place}/vol-1",
            "size_bytes": 1 << 30,
            "creation_time": Timestamp(seconds=1_700_000_000, nanos=5),
            "ready_to_use": True,
            "accessible_topology": [HERE],
            **more,
        }
    )


def group_snapshot() -> csi.VolumeGroupSnapshot:
    """One of two volumes in two volume groups."""
    identity, sources = f"{OWN}/gsnap-g", (f"{OWN}/vol-1", f"{SECOND}/vol-2")
    return csi.VolumeGroupSnapshot(
        group_snapshot_id=identity,
        snapshots=[
            snapshot(
                ids.group_member("g", one),
                one.partition("/")[0],
                source_volume_id=one,
                group_snapshot_id=identity,
            )
            for one in sources
        ],
        creation_time=Timestamp(seconds=1_700_000_000),
        ready_to_use=True,
    )


SIZES = csi.CapacityRange(required_bytes=1 << 30, limit_bytes=LIMIT)
MEMBERS = [one.snapshot_id for one in group_snapshot().snapshots]
SNAPSHOT_ENTRIES = [
    csi.ListSnapshotsResponse.Entry(snapshot=one)
    for one in (
        snapshot(),
        snapshot("snap-2", SECOND, group_snapshot_id=f"{DETACHED}/gsnap-1"),
        snapshot("snap-3", source_volume_id=f"{OWN}/unknown"),
    )
]
RANGES = [
    csi.BlockMetadata(byte_offset=0, size_bytes=4096),
    csi.BlockMetadata(byte_offset=8192, size_bytes=4096),
]
BLOCKS: dict[str, Any] = {
    "block_metadata_type": csi.BlockMetadataType.VARIABLE_LENGTH,
    "volume_capacity_bytes": 12288,
    "block_metadata": RANGES,
}
UNWELL = [
    csi.VolumeHealth.VolumeHealthEntry(
        status=csi.VolumeHealthErrorType.INACCESSIBLE, reason="GroupMissing", message="attach it"
    )
]

# By RPC: requests with an honest answer each.
HONEST: dict[str, list[tuple[Any, Any]]] = {
    "CreateVolume": [
        (
            csi.CreateVolumeRequest(name="1", capacity_range=SIZES),
            csi.CreateVolumeResponse(volume=volume()),
        ),
        (
            csi.CreateVolumeRequest(
                name="x" * 100, volume_content_source=of_snapshot(f"{SECOND}/snap-1")
            ),
            csi.CreateVolumeResponse(
                volume=volume(
                    f"vol.{sha256(b'x' * 100).hexdigest()[:32]}",
                    content_source=of_snapshot(f"{SECOND}/snap-1"),
                )
            ),
        ),
    ],
    "DeleteVolume": [
        (csi.DeleteVolumeRequest(volume_id=f"{OWN}/vol-1"), csi.DeleteVolumeResponse()),
        (csi.DeleteVolumeRequest(volume_id="no id"), csi.DeleteVolumeResponse()),
    ],
    "ControllerPublishVolume": [
        (
            csi.ControllerPublishVolumeRequest(volume_id=f"{OWN}/vol-1", node_id=NODE),
            csi.ControllerPublishVolumeResponse(publish_context=publish_context(read_only=True)),
        )
    ],
    "ControllerUnpublishVolume": [
        (
            csi.ControllerUnpublishVolumeRequest(volume_id=f"{OWN}/vol-1", node_id=NODE),
            csi.ControllerUnpublishVolumeResponse(),
        )
    ],
    "ValidateVolumeCapabilities": [
        (
            csi.ValidateVolumeCapabilitiesRequest(volume_id=f"{OWN}/vol-1"),
            csi.ValidateVolumeCapabilitiesResponse(message="not so"),
        )
    ],
    "ListVolumes": [
        (
            csi.ListVolumesRequest(max_entries=3, starting_token=f"{OWN}/vol-1"),
            csi.ListVolumesResponse(
                entries=[
                    csi.ListVolumesResponse.Entry(volume=volume()),
                    csi.ListVolumesResponse.Entry(
                        volume=volume("vol-2", content_source=of_snapshot(f"{FOREIGN}/snap-1")),
                        status=csi.ListVolumesResponse.VolumeStatus(published_node_ids=[NODE]),
                    ),
                ],
                next_token=f"{OWN}/vol-3",
            ),
        ),
        (csi.ListVolumesRequest(), csi.ListVolumesResponse()),
    ],
    "ControllerListVolumeHealth": [
        (
            csi.ControllerListVolumeHealthRequest(max_entries=2),
            csi.ControllerListVolumeHealthResponse(
                entries=[
                    csi.VolumeHealth(volume_id=f"{OWN}/vol-1", health_statuses=UNWELL),
                    csi.VolumeHealth(volume_id=f"{DETACHED}/vol-1", health_statuses=UNWELL),
                ]
            ),
        )
    ],
    "ControllerGetVolumeHealth": [
        (
            csi.ControllerGetVolumeHealthRequest(volume_id=f"{OWN}/vol-1"),
            csi.ControllerGetVolumeHealthResponse(
                volume_health=csi.VolumeHealth(volume_id=f"{OWN}/vol-1", health_statuses=UNWELL)
            ),
        )
    ],
    "GetCapacity": [
        (csi.GetCapacityRequest(), csi.GetCapacityResponse(available_capacity=1 << 40)),
        (
            csi.GetCapacityRequest(),
            csi.GetCapacityResponse(
                available_capacity=0,
                maximum_volume_size=Int64Value(value=0),
                minimum_volume_size=Int64Value(value=4096),
            ),
        ),
    ],
    "CreateSnapshot": [
        (
            csi.CreateSnapshotRequest(name="1", source_volume_id=f"{OWN}/vol-1"),
            csi.CreateSnapshotResponse(snapshot=snapshot()),
        )
    ],
    "DeleteSnapshot": [
        (csi.DeleteSnapshotRequest(snapshot_id=f"{OWN}/snap-1"), csi.DeleteSnapshotResponse())
    ],
    "ListSnapshots": [
        (csi.ListSnapshotsRequest(), csi.ListSnapshotsResponse(entries=SNAPSHOT_ENTRIES)),
        (
            csi.ListSnapshotsRequest(snapshot_id=f"{OWN}/snap-1"),
            csi.ListSnapshotsResponse(entries=SNAPSHOT_ENTRIES[:1]),
        ),
        (
            csi.ListSnapshotsRequest(source_volume_id=f"{OWN}/vol-1"),
            csi.ListSnapshotsResponse(entries=SNAPSHOT_ENTRIES[:1]),
        ),
        (csi.ListSnapshotsRequest(snapshot_id="no id"), csi.ListSnapshotsResponse()),
    ],
    "GetSnapshot": [
        (
            csi.GetSnapshotRequest(snapshot_id=f"{OWN}/snap-1"),
            csi.GetSnapshotResponse(snapshot=snapshot(group_snapshot_id=f"{SECOND}/gsnap-1")),
        )
    ],
    "ControllerExpandVolume": [
        (
            csi.ControllerExpandVolumeRequest(volume_id=f"{OWN}/vol-1", capacity_range=SIZES),
            csi.ControllerExpandVolumeResponse(capacity_bytes=LIMIT, node_expansion_required=True),
        )
    ],
    "ControllerGetVolume": [
        (
            csi.ControllerGetVolumeRequest(volume_id=f"{OWN}/vol-1"),
            csi.ControllerGetVolumeResponse(
                volume=volume(), status=csi.ControllerGetVolumeResponse.VolumeStatus()
            ),
        )
    ],
    "ControllerModifyVolume": [
        (
            csi.ControllerModifyVolumeRequest(volume_id=f"{OWN}/vol-1"),
            csi.ControllerModifyVolumeResponse(),
        )
    ],
    "CreateVolumeGroupSnapshot": [
        (
            csi.CreateVolumeGroupSnapshotRequest(
                name="g", source_volume_ids=[f"{SECOND}/vol-2", f"{OWN}/vol-1"]
            ),
            csi.CreateVolumeGroupSnapshotResponse(group_snapshot=group_snapshot()),
        )
    ],
    "DeleteVolumeGroupSnapshot": [
        (
            csi.DeleteVolumeGroupSnapshotRequest(
                group_snapshot_id=f"{OWN}/gsnap-g", snapshot_ids=MEMBERS
            ),
            csi.DeleteVolumeGroupSnapshotResponse(),
        )
    ],
    "GetVolumeGroupSnapshot": [
        (
            csi.GetVolumeGroupSnapshotRequest(
                group_snapshot_id=f"{OWN}/gsnap-g", snapshot_ids=MEMBERS
            ),
            csi.GetVolumeGroupSnapshotResponse(group_snapshot=group_snapshot()),
        )
    ],
    "GetMetadataAllocated": [
        (
            csi.GetMetadataAllocatedRequest(snapshot_id=f"{OWN}/snap-1", max_results=2),
            csi.GetMetadataAllocatedResponse(**BLOCKS),
        )
    ],
    "GetMetadataDelta": [
        (
            csi.GetMetadataDeltaRequest(
                base_snapshot_id=f"{OWN}/snap-1", target_snapshot_id=f"{OWN}/snap-2"
            ),
            csi.GetMetadataDeltaResponse(**BLOCKS),
        )
    ],
}
CASES = [(method, *one) for method, cases in HONEST.items() for one in cases]
SERVICE = {method: service for service, rows in RULES.items() for method in rows}


def judged(method: str, request: Any, answer: bytes) -> Any:
    return Row.of(SERVICE[method], method).judge(asked(request), answer)


# The table is whole

# What the controller answers by itself.
ITS_OWN = {
    "csi.v1.Identity": {"GetPluginInfo", "GetPluginCapabilities", "Probe"},
    "csi.v1.Controller": {"ControllerGetCapabilities"},
    "csi.v1.GroupController": {"GroupControllerGetCapabilities"},
}


def test_each_rpc_that_the_controller_passes_on_has_a_row_and_an_honest_answer_here() -> None:
    def connect(*_: object) -> Any:
        raise AssertionError

    served = Router(Nodes(DRIVER_NAME, connect), DRIVER_NAME, "0", attach=True)._handlers
    routed = {
        service: set(methods) - ITS_OWN.get(service, set()) for service, methods in served.items()
    }
    assert {service: set(rows) for service, rows in RULES.items()} == {
        service: methods for service, methods in routed.items() if methods
    }
    assert SERVICE.keys() == HONEST.keys()


def test_each_rpc_of_the_wire_has_a_row_or_is_the_controller_s_or_not_served() -> None:
    every = {
        f"{one.full_name}/{method.name}"
        for one in csi.DESCRIPTOR.services_by_name.values()
        for method in one.methods
        if one.name != "Node"
    }
    known = {f"{service}/{method}" for method, service in SERVICE.items()}
    own = {f"{service}/{method}" for service, methods in ITS_OWN.items() for method in methods}
    assert every == known | own


def fields(message: Any, path: str = "") -> Iterator[str]:
    """The fields of a message, and those of the messages in it."""
    for one in message.fields:
        here = f"{path}{one.name}"
        yield here
        is_map = one.message_type is not None and one.message_type.GetOptions().map_entry
        if one.message_type is not None and not is_map:
            yield from fields(one.message_type, f"{here}{'[]' if one.is_repeated else ''}.")


@pytest.mark.parametrize("method", HONEST)
def test_each_field_of_an_answer_has_a_rule(method: str) -> None:
    rules = RULES[SERVICE[method]][method]
    every = set(fields(routes.response_class(SERVICE[method], method).DESCRIPTOR))
    # A message whose fields have rules needs none.
    covered = {
        one for one in every if any(rule.startswith((f"{one}.", f"{one}[].")) for rule in rules)
    }
    covered |= {
        one for one in every if any(one.startswith((f"{rule}.", f"{rule}[].")) for rule in rules)
    }
    assert every - covered - set(rules) == set()
    assert {rule.replace("[]", "") for rule in rules} <= {one.replace("[]", "") for one in every}


# What is honest passes


@pytest.mark.parametrize(("method", "request_", "answer"), CASES)
def test_an_honest_answer_passes(method: str, request_: Any, answer: Any) -> None:
    assert judged(method, request_, answer.SerializeToString()) == answer


def messages(one: Message) -> Iterator[Message]:
    """A message and all messages in it, but those of maps."""
    yield one
    for descriptor, value in one.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        for each in value if descriptor.is_repeated else [value]:
            yield from messages(each)


@pytest.mark.parametrize(("method", "request_", "answer"), CASES)
def test_fields_that_this_version_does_not_know_pass(
    method: str, request_: Any, answer: Any
) -> None:
    changed = type(answer).FromString(answer.SerializeToString())
    for one in list(messages(changed)):
        one.MergeFromString(UNKNOWN)
    assert judged(method, request_, changed.SerializeToString()) == changed


# What is changed passes only if it names nothing of another

IDS = st.builds(
    "{}/{}".format,
    st.sampled_from([OWN, SECOND, FOREIGN, DETACHED, "other@aaaaaaaa"]),
    st.sampled_from(
        ["vol-1", "vol-2", "vol-3", "vol.1", "snap-1", "snap-2", "gsnap-g", "unknown", "eph-1", ""]
    ),
)
TEXTS = st.one_of(IDS, st.sampled_from([NODE, OTHER, ""]), st.text(max_size=20))
TOPOLOGIES = st.builds(
    lambda segments: csi.Topology(segments=segments),
    st.one_of(
        st.sampled_from([dict(HERE.segments), ids.topology(OTHER, DRIVER_NAME), {}]),
        st.just({**HERE.segments, "zone": "z"}),
        st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    ),
)
NUMBERS = st.one_of(
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.sampled_from([0, 1, -1, 4096, (1 << 30) - 1, LIMIT, LIMIT + 1, 1 << 62, -(1 << 62)]),
)


def value_of(descriptor: Any) -> st.SearchStrategy[Any]:
    """Values for a field."""
    kind = descriptor.message_type
    if kind is not None and kind.full_name == "csi.v1.Topology":
        return TOPOLOGIES
    if kind is not None:
        return st.just(None)
    if descriptor.cpp_type == descriptor.CPPTYPE_STRING:
        return TEXTS
    if descriptor.cpp_type == descriptor.CPPTYPE_BOOL:
        return st.booleans()
    if descriptor.cpp_type == descriptor.CPPTYPE_ENUM:
        return st.integers(0, 9)
    most = 31 if descriptor.cpp_type == descriptor.CPPTYPE_INT32 else 63
    return NUMBERS.filter(lambda one: -(1 << most) <= one < 1 << most)


@st.composite
def changed(draw: Callable[[Any], Any]) -> tuple[str, Any, Any, Any]:
    """An RPC, its request, the honest answer, and one with changed fields."""
    method, request, honest = draw(
        st.sampled_from([one for one in CASES if list(one[2].DESCRIPTOR.fields)])
    )
    answer = type(honest).FromString(honest.SerializeToString())
    for _ in range(draw(st.integers(1, 3))):
        one: Any = draw(st.sampled_from(list(messages(answer))))
        descriptor = draw(st.sampled_from(list(one.DESCRIPTOR.fields) or [None]))
        if descriptor is None:
            continue
        kind, value = descriptor.message_type, getattr(one, descriptor.name)
        if kind is not None and kind.GetOptions().map_entry:
            value[draw(st.text(max_size=3))] = draw(TEXTS)
        elif descriptor.is_repeated:
            change_list(draw, value, descriptor)
        elif kind is not None:
            if draw(st.booleans()):
                one.ClearField(descriptor.name)
            else:
                value.SetInParent()
        else:
            setattr(one, descriptor.name, draw(value_of(descriptor)))
    return method, request, honest, answer


def change_list(draw: Callable[[Any], Any], value: Any, descriptor: Any) -> None:
    made = draw(value_of(descriptor))
    if value and draw(st.booleans()):
        del value[draw(st.integers(0, len(value) - 1))]
    elif descriptor.message_type is None:
        value.append(made)
    elif made is not None:
        value.add().CopyFrom(made)
    elif value and draw(st.booleans()):
        value.add().CopyFrom(value[0])
    else:
        value.add()


NAMING = ("volume_id", "snapshot_id", "source_volume_id", "group_snapshot_id")
# By RPC the fields in which the answer may name other things of the node's than the honest one.
LOOSE = {
    # Which of the node's groups, the node decides by the class.
    "CreateVolume": ("volume_id",),
    "ListVolumes": ("volume_id",),
    "ListSnapshots": NAMING,
    "ControllerListVolumeHealth": ("volume_id",),
    "GetSnapshot": ("source_volume_id", "group_snapshot_id"),
    "GetVolumeGroupSnapshot": ("source_volume_id",),
}
# The beginnings of names, by the field of an id.
KINDS = {
    "volume_id": ("vol-", "vol."),
    "snapshot_id": ("snap-", "snap."),
    "group_snapshot_id": ("gsnap-", "gsnap."),
}
SIZED = ("CreateVolume", "ControllerExpandVolume")


def named(answer: Message, keys: Sequence[str]) -> list[tuple[str, str, str]]:
    """All that an answer names in these fields, empty ones included."""
    return sorted(
        (one.DESCRIPTOR.full_name, key, getattr(one, key))
        for one in messages(answer)
        for key in keys
        if key in one.DESCRIPTOR.fields_by_name
        and not one.DESCRIPTOR.full_name.startswith("csi.v1.VolumeContentSource")
    )


def check(method: str, request: Any, honest: Any, answer: Any) -> None:
    """What holds of each answer that passes; written without the rules."""
    if method == "ControllerListVolumeHealth":
        answer = judged(method, request, answer.SerializeToString())
    asked_for = [one for one in NAMING if getattr(request, one, "") and method == "ListSnapshots"]
    loose = [one for one in LOOSE.get(method, ()) if one not in asked_for]
    exact = [one for one in NAMING if one not in loose and one not in asked_for]
    assert named(answer, exact) == named(honest, exact)
    for _, key, value in named(answer, asked_for):
        assert value == getattr(request, key)
    for _, key, value in named(answer, loose):
        place, _, name = value.partition("/")
        if key == "group_snapshot_id":
            assert place in ("", OWN, SECOND, DETACHED, "other@aaaaaaaa")
        elif method == "ControllerListVolumeHealth":
            assert place != FOREIGN
        else:
            assert place in (OWN, SECOND)
        assert not value or name.startswith(KINDS.get(key, (name,)))
    for one in messages(answer):
        part: Any = one
        if part.DESCRIPTOR.full_name in {"csi.v1.Volume", "csi.v1.Snapshot"}:
            assert list(part.accessible_topology) == [HERE]
        if part.DESCRIPTOR.full_name == "csi.v1.Snapshot":
            place = part.snapshot_id.partition("/")[0]
            assert VolumeId.parse(part.source_volume_id)
            assert part.source_volume_id.partition("/")[0] == place
        for node in getattr(part, "published_node_ids", ()):
            assert node == NODE
    if method == "CreateVolume":
        assert answer.volume.volume_id.split("/")[1:] == honest.volume.volume_id.split("/")[1:]
        wanted = routes.source(honest.volume.content_source)
        assert routes.source(answer.volume.content_source) == wanted
    if method in SIZED and request.HasField("capacity_range"):
        size = answer.volume.capacity_bytes if method == SIZED[0] else answer.capacity_bytes
        assert SIZES.required_bytes <= size <= LIMIT


@given(changed())
def test_whatever_is_changed_an_answer_that_passes_names_nothing_of_another(
    case: tuple[str, Any, Any, Any],
) -> None:
    method, request, honest, answer = case
    try:
        judged(method, request, answer.SerializeToString())
    except Untrue:
        return
    check(method, request, honest, answer)


PLACES = (OWN, SECOND, FOREIGN, DETACHED, "other@aaaaaaaa")
LOGICAL = ("vol-1", "vol-2", "vol-3", "snap-1", "snap-2", "gsnap-g", "gsnap-1", "unknown", "eph-1")
EVERY_TEXT = [NODE, OTHER, "", "no id", "a/b", f"{OWN}/", f"{OWN}/vol-a b"]
EVERY_TEXT += [f"{place}/{name}" for place in PLACES for name in LOGICAL]
EVERY_NUMBER = (0, 1, -1, 4096, (1 << 30) - 1, LIMIT, LIMIT + 1, 1 << 62, -(1 << 62))


def changed_alone(honest: Any) -> Iterator[Any]:
    """An answer with each of its fields changed, one at a time."""
    for index, one in enumerate(messages(honest)):
        for descriptor in one.DESCRIPTOR.fields:
            kind = descriptor.cpp_type
            values: Sequence[Any] = (None,)
            if kind == descriptor.CPPTYPE_STRING:
                values = EVERY_TEXT
            elif kind == descriptor.CPPTYPE_INT64:
                values = EVERY_NUMBER
            for value in values:
                answer = type(honest).FromString(honest.SerializeToString())
                part = list(messages(answer))[index]
                if descriptor.is_repeated and value is not None:
                    getattr(part, descriptor.name).append(value)
                elif value is None:
                    part.ClearField(descriptor.name)
                else:
                    setattr(part, descriptor.name, value)
                yield answer


@pytest.mark.parametrize(("method", "request_", "honest"), CASES)
def test_with_any_one_field_changed_an_answer_names_nothing_of_another(
    method: str, request_: Any, honest: Any
) -> None:
    for answer in changed_alone(honest):
        try:
            judged(method, request_, answer.SerializeToString())
        except Untrue:
            continue
        check(method, request_, honest, answer)


MANY = 20_000


def repeated() -> Iterator[tuple[str, Any, Any, str]]:
    """Each repeated field of the honest answers: RPC, request, answer with too many, the field."""
    for method, request, honest in CASES:
        for index, one in enumerate(messages(honest)):
            for descriptor in one.DESCRIPTOR.fields:
                kind: Any = descriptor.message_type
                is_map = kind is not None and kind.GetOptions().map_entry
                if not descriptor.is_repeated or is_map:
                    continue
                answer = type(honest).FromString(honest.SerializeToString())
                part = list(messages(answer))[index]
                empty = "" if kind is None else message_factory.GetMessageClass(kind)()
                getattr(part, descriptor.name).extend([empty] * MANY)
                yield method, request, answer, descriptor.name


@pytest.mark.parametrize(("method", "request_", "answer", "field"), list(repeated()))
def test_elements_are_counted_before_any_is_looked_at(
    method: str, request_: Any, answer: Any, field: str
) -> None:
    """The rules run in the event loop, and a message has room for a million empty elements."""
    request = type(request_).FromString(request_.SerializeToString())
    for key in ("max_entries", "max_results"):
        if key in request.DESCRIPTOR.fields_by_name:
            request.ClearField(key)
    looked = 0

    def is_elsewhere(_one: VolumeId) -> bool:
        nonlocal looked
        looked += 1
        return False

    about = asked(request)
    about.is_elsewhere = is_elsewhere
    with pytest.raises(Untrue) as raised:
        Row.of(SERVICE[method], method).judge(about, answer.SerializeToString())
    assert str(raised.value).split(" is ", 1)[0].rpartition(".")[2] == field
    assert looked < 10


@pytest.mark.parametrize("method", HONEST)
def test_an_answer_with_more_bytes_than_an_honest_one_is_not_parsed(method: str) -> None:
    request, honest = HONEST[method][0]
    row = Row.of(SERVICE[method], method)
    # As a field that this version does not know: number 900, of bytes.
    much = honest.SerializeToString() + b"\xa2\x38" + varint(row.most_bytes) + bytes(row.most_bytes)
    assert len(much) <= 4 << 20
    with pytest.raises(Untrue, match=f"the answer is .*: it has more than {row.most_bytes} bytes"):
        judged(method, request, much)


def varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


FREE = [
    (method, request, answer, path)
    for method, request, answer in CASES
    for path, rule in RULES[SERVICE[method]][method].items()
    if rule is any_value
]


@given(st.sampled_from(FREE), st.data())
def test_a_node_is_believed_what_it_says_of_its_own(
    case: tuple[str, Any, Any, str], data: st.DataObject
) -> None:
    method, request, honest, path = case
    answer = type(honest).FromString(honest.SerializeToString())
    parts, (*steps, key) = [answer], path.split(".")
    for step in steps:
        found = [getattr(one, step.removesuffix("[]")) for one in parts]
        parts = [each for one in found for each in (one if step.endswith("[]") else [one])]
    for one in parts:
        descriptor = one.DESCRIPTOR.fields_by_name[key]
        value = getattr(one, key)
        if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
            value[data.draw(st.text(max_size=5))] = data.draw(TEXTS)
        elif descriptor.is_repeated:
            value.add()
        elif descriptor.message_type is not None:
            value.SetInParent()
        else:
            setattr(one, key, data.draw(value_of(descriptor)))
    assert judged(method, request, answer.SerializeToString()) == answer


# By name


LIES: list[tuple[str, str, Callable[[Any], None]]] = []


def lie(method: str, where: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register a change of the first honest answer of an RPC, and the field that it gives away."""

    def add(change: Callable[[Any], None]) -> Callable[[Any], None]:
        LIES.append((method, where, change))
        return change

    return add


@lie("CreateVolume", "volume.volume_id")
def another_node_s_volume(answer: Any) -> None:
    answer.volume.volume_id = f"{FOREIGN}/vol-1"


@lie("CreateVolume", "volume.volume_id")
def another_tenant_s_volume_on_the_node(answer: Any) -> None:
    answer.volume.volume_id = f"{OWN}/vol-2"


@lie("CreateVolume", "volume.volume_id")
def a_group_under_another_name(answer: Any) -> None:
    answer.volume.volume_id = "other@aaaaaaaa/vol-1"


@lie("CreateVolume", "volume.accessible_topology")
def another_s_topology(answer: Any) -> None:
    answer.volume.accessible_topology[0].segments.update(ids.topology(OTHER, DRIVER_NAME))


@lie("CreateVolume", "volume.accessible_topology")
def another_s_topology_too(answer: Any) -> None:
    answer.volume.accessible_topology.add().segments.update(ids.topology(OTHER, DRIVER_NAME))


@lie("CreateVolume", "volume.accessible_topology")
def no_topology(answer: Any) -> None:
    del answer.volume.accessible_topology[:]


@lie("CreateVolume", "volume.capacity_bytes")
def less_than_was_asked_for(answer: Any) -> None:
    answer.volume.capacity_bytes = 1


@lie("CreateVolume", "volume.content_source")
def a_source_that_was_not_asked_for(answer: Any) -> None:
    answer.volume.content_source.volume.volume_id = f"{OWN}/vol-2"


@lie("ControllerExpandVolume", "capacity_bytes")
def more_than_the_limit(answer: Any) -> None:
    answer.capacity_bytes = LIMIT + 1


@lie("ListVolumes", "entries[].volume.volume_id")
def a_list_with_another_node_s_volume(answer: Any) -> None:
    answer.entries[1].volume.volume_id = f"{FOREIGN}/vol-2"


@lie("ListVolumes", "entries[].status.published_node_ids")
def a_volume_that_is_published_elsewhere(answer: Any) -> None:
    answer.entries[1].status.published_node_ids.append(OTHER)


@lie("ListVolumes", "entries")
def more_entries_than_asked_for(answer: Any) -> None:
    for _ in range(2):
        answer.entries.add().CopyFrom(answer.entries[0])


@lie("ListVolumes", "next_token")
def the_same_page_for_ever(answer: Any) -> None:
    answer.next_token = f"{OWN}/vol-1"


@lie("ControllerGetVolumeHealth", "volume_health.volume_id")
def another_volume_s_health(answer: Any) -> None:
    answer.volume_health.volume_id = f"{OWN}/vol-2"


@lie("CreateSnapshot", "snapshot.snapshot_id")
def a_snapshot_beside_another_source(answer: Any) -> None:
    answer.snapshot.snapshot_id = f"{SECOND}/snap-1"


@lie("CreateSnapshot", "snapshot.source_volume_id")
def a_snapshot_of_another_volume(answer: Any) -> None:
    answer.snapshot.source_volume_id = f"{OWN}/vol-2"


@lie("ListSnapshots", "entries[].snapshot.group_snapshot_id")
def a_part_of_another_node_s_group_snapshot(answer: Any) -> None:
    answer.entries[0].snapshot.group_snapshot_id = f"{FOREIGN}/gsnap-g"


@lie("ListSnapshots", "entries[].snapshot.creation_time")
def a_moment_that_is_none(answer: Any) -> None:
    answer.entries[0].snapshot.creation_time.nanos = 1 << 30


@lie("GetSnapshot", "snapshot.snapshot_id")
def another_snapshot(answer: Any) -> None:
    answer.snapshot.snapshot_id = f"{OWN}/snap-2"


@lie("CreateVolumeGroupSnapshot", "group_snapshot.snapshots[].snapshot_id")
def a_member_of_another_group_snapshot(answer: Any) -> None:
    answer.group_snapshot.snapshots[0].snapshot_id = f"{OWN}/snap-2"


@lie("CreateVolumeGroupSnapshot", "group_snapshot.snapshots")
def a_group_snapshot_without_a_source(answer: Any) -> None:
    del answer.group_snapshot.snapshots[0]


@lie("GetVolumeGroupSnapshot", "group_snapshot.snapshots")
def a_member_too_many(answer: Any) -> None:
    answer.group_snapshot.snapshots.add().CopyFrom(answer.group_snapshot.snapshots[0])


@lie("GetCapacity", "available_capacity")
def less_than_no_room(answer: Any) -> None:
    answer.available_capacity = -1


@lie("GetMetadataDelta", "block_metadata")
def blocks_beyond_the_snapshot(answer: Any) -> None:
    answer.block_metadata[1].size_bytes = 8192


@pytest.mark.parametrize(("method", "where", "change"), LIES)
def test_a_lie_is_refused_by_the_field_that_gives_it_away(
    method: str, where: str, change: Callable[[Any], None]
) -> None:
    request, honest = HONEST[method][0]
    answer = type(honest).FromString(honest.SerializeToString())
    change(answer)
    with pytest.raises(Untrue) as raised:
        judged(method, request, answer.SerializeToString())
    assert str(raised.value).startswith(f"{where} is ")


@lie("CreateVolume", "volume.volume_context")
def a_context_that_no_persistentvolume_has_room_for(answer: Any) -> None:
    answer.volume.volume_context["carver/class"] = "y" * 5000


@lie("ListVolumes", "entries[].volume.volume_context")
def a_context_of_another_program(answer: Any) -> None:
    answer.entries[1].volume.volume_context["csi.storage.k8s.io/ephemeral"] = "true"


def maps_of(message: Any, *steps: str) -> Iterator[tuple[str, ...]]:
    """The fields of a message, and of those in it, that are maps of texts, but in lists."""
    for one in message.fields:
        if one.message_type is not None and one.message_type.GetOptions().map_entry:
            yield (*steps, one.name)
        elif one.message_type is not None and not one.is_repeated:
            yield from maps_of(one.message_type, *steps, one.name)


# The maps that the sidecars keep in the cluster's objects. What a node says of capabilities that it
# confirms goes to the caller and nowhere else, and what it may be published with is of the request.
CONTEXTS = [
    (method, steps)
    for method in sorted(HONEST)
    for steps in maps_of(routes.response_class(SERVICE[method], method).DESCRIPTOR)
    if steps[0] != "confirmed"
]


def test_each_map_of_an_answer_is_one_of_those_that_are_bounded() -> None:
    assert {(method, steps[-1]) for method, steps in CONTEXTS} == {
        ("CreateVolume", "volume_context"),
        ("ControllerGetVolume", "volume_context"),
        ("ControllerPublishVolume", "publish_context"),
    }


@given(
    st.sampled_from(CONTEXTS),
    st.dictionaries(st.text(max_size=8), st.text(max_size=3000), max_size=4),
    st.booleans(),
)
def test_a_context_has_few_bytes_and_carver_s_keys_only(
    where: tuple[str, tuple[str, ...]], context: dict[str, str], prefixed: bool
) -> None:
    method, (*steps, key) = where
    request, honest = HONEST[method][0]
    answer = type(honest).FromString(honest.SerializeToString())
    made = {f"carver/{key}" if prefixed else key: value for key, value in context.items()}
    part = answer
    for step in steps:
        part = getattr(part, step)
    part.ClearField(key)
    getattr(part, key).update(made)
    size = sum(len(f"{key}{value}".encode()) for key, value in made.items())
    fits = size <= 4096 and all(one.startswith("carver/") for one in made)
    try:
        judged(method, request, answer.SerializeToString())
    except Untrue:
        assert not fits
    else:
        assert fits


@given(st.sampled_from(["vol-", "vol."]), st.integers(1, 300), st.integers(1, 300))
def test_an_id_is_no_longer_than_names_of_lvm(prefix: str, more: int, of_group: int) -> None:
    """A node could list ids of megabytes, which whoever collects all volumes would keep."""
    place, name = f"{'g' * of_group}@dddddddd", prefix + "x" * more
    fits = len(name) <= 127 and of_group <= 127
    assert (VolumeId.parse(f"{place}/{name}") is not None) is fits
    for method, entry in (
        ("ListVolumes", csi.ListVolumesResponse.Entry(volume=volume(name, place))),
        ("ControllerListVolumeHealth", csi.VolumeHealth(volume_id=f"{place}/{name}")),
    ):
        one = asked(routes.request_class(SERVICE[method], method)())
        one.places = frozenset((place,))
        data = routes.response_class(SERVICE[method], method)(entries=[entry]).SerializeToString()
        if fits or (method == "ListVolumes" and len(name) <= 127):
            # Of which groups a node is believed nodes.py judges.
            Row.of(SERVICE[method], method).judge(one, data)
        else:
            with pytest.raises(Untrue):
                Row.of(SERVICE[method], method).judge(one, data)


@pytest.mark.parametrize("required", [0, 1, 1 << 30, 1 << 50])
@pytest.mark.parametrize("more", [0, 4 << 20, 64 << 30, (64 << 30) + 1, 1 << 62])
def test_a_new_volume_is_no_larger_than_what_was_asked_for_rounded_up(
    required: int, more: int
) -> None:
    """Where the claim has no limit: what it has is what its PersistentVolume says."""
    request = csi.CreateVolumeRequest(
        name="1", capacity_range=csi.CapacityRange(required_bytes=required)
    )
    made = volume()
    made.capacity_bytes = required + more
    answer = csi.CreateVolumeResponse(volume=made).SerializeToString()
    if more <= 64 << 30:
        assert judged("CreateVolume", request, answer).volume == made
        return
    with pytest.raises(Untrue, match=r"volume\.capacity_bytes is "):
        judged("CreateVolume", request, answer)
    # A copy is as large as its source.
    request.volume_content_source.CopyFrom(of_snapshot(f"{OWN}/snap-1"))
    made.content_source.CopyFrom(of_snapshot(f"{OWN}/snap-1"))
    answer = csi.CreateVolumeResponse(volume=made).SerializeToString()
    assert judged("CreateVolume", request, answer).volume == made


OF_ANOTHER: list[tuple[str, Any]] = [
    ("DeleteVolume", csi.DeleteVolumeRequest(volume_id=f"{FOREIGN}/vol-1")),
    (
        "ControllerUnpublishVolume",
        csi.ControllerUnpublishVolumeRequest(volume_id=f"{FOREIGN}/vol-1", node_id=OTHER),
    ),
    ("DeleteSnapshot", csi.DeleteSnapshotRequest(snapshot_id=f"{FOREIGN}/snap-1")),
    ("ControllerModifyVolume", csi.ControllerModifyVolumeRequest(volume_id=f"{FOREIGN}/vol-1")),
    (
        "DeleteVolumeGroupSnapshot",
        csi.DeleteVolumeGroupSnapshotRequest(
            group_snapshot_id=f"{OWN}/gsnap-g", snapshot_ids=[f"{FOREIGN}/snap-1"]
        ),
    ),
    (
        "GetMetadataDelta",
        csi.GetMetadataDeltaRequest(
            base_snapshot_id=f"{FOREIGN}/snap-1", target_snapshot_id=f"{OWN}/snap-2"
        ),
    ),
    (
        "CreateVolume",
        csi.CreateVolumeRequest(name="1", volume_content_source=of_snapshot(f"{FOREIGN}/snap-1")),
    ),
]


@pytest.mark.parametrize(("method", "request_"), OF_ANOTHER)
def test_a_node_cannot_have_done_what_was_asked_about_another_s(method: str, request_: Any) -> None:
    answer = routes.response_class(SERVICE[method], method)()
    with pytest.raises(Untrue, match="it is in no volume group of node node-a"):
        judged(method, request_, answer.SerializeToString())


def test_a_node_cannot_have_attached_a_volume_to_another() -> None:
    request = csi.ControllerPublishVolumeRequest(volume_id=f"{OWN}/vol-1", node_id=OTHER)
    with pytest.raises(Untrue, match="it was to be attached to node 'node-b'"):
        judged("ControllerPublishVolume", request, b"")


def test_health_of_another_node_s_volumes_is_left_out() -> None:
    request, honest = HONEST["ControllerListVolumeHealth"][0]
    foreign = csi.VolumeHealth(volume_id=f"{FOREIGN}/vol-1", health_statuses=UNWELL)
    answer = csi.ControllerListVolumeHealthResponse(entries=[honest.entries[0], foreign])
    found = judged("ControllerListVolumeHealth", request, answer.SerializeToString())
    assert list(found.entries) == [honest.entries[0]]


@pytest.mark.parametrize("value", ["x" * 5000, [csi.Topology()] * 5000, b"x" * 5000])
def test_an_error_shows_the_beginning_of_what_a_node_said(value: Any) -> None:
    assert len(str(Untrue("field", value, "why"))) < 300


def test_an_answer_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(Untrue, match=r"the answer is .*: it cannot be read"):
        judged("DeleteVolume", csi.DeleteVolumeRequest(), b"\xff")

"""Rules for the answers of nodes: a row for each RPC that nodes answer, a rule for each field.

A rule refuses an answer that cannot be true. A node is believed about what is its own: contents of
its volumes, their health, its free capacity. What names something must follow from the request and
from the node:

- Ids are in a volume group that is the node's own, with the name that follows from the request's.
- The topology is the node's, and has nothing else.
- Sizes and sources are those that were asked for.

Each field of CSI's messages has a rule; fields that this version does not know have none. nodes.py
checks what a node reports about itself (GetPluginInfo).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError, Message

from agent.core import ids
from agent.core.ids import VolumeId
from agent.extras.controller import routes
from agent.requests.parameters import PREFIX
from agent.requests.requests import MOST_ENTRIES, SizeRange
from lvm import names
from proto import csi_pb2 as csi

# Largest number of characters that are shown of a refused value.
_MOST_SHOWN = 200
# Largest size, in bytes, of a page of a list, and of another answer. A larger answer is not even
# parsed. An honest page has 500 entries of at most 5 KiB each. Both limits are less than the 4 MiB
# that a sidecar takes (gRPC in Go).
MOST_PAGE_BYTES, _MOST_BYTES = 3 << 20, 1 << 20
# Largest number of ranges in a message about blocks, if the request sets no limit: 8 times what
# Carver sends.
_MOST_RANGES = 8192
# Largest number of keys, and of bytes, of a volume_context and a publish_context (CSI spec, "Size
# Limits"). The first becomes a part of the PersistentVolume, the second of the VolumeAttachment.
_MOST_KEYS, _MOST_MAP_BYTES = 64, 4096
# Largest number of bytes by which a size may be rounded up: to an extent on each stripe, beside a
# header, and to the least size of a file system. 64 GiB are 16 stripes with extents of 4 GiB.
_MOST_ROUNDING = 64 << 30
# Largest number of conditions of a volume, and of characters of a condition's reason and message.
# Carver has 31 reasons of at most 40 characters, and cuts a message to 1024 bytes.
_MOST_CONDITIONS, _MOST_REASON, _MOST_MESSAGE = 64, 128, 1024
# Valid seconds of a Timestamp, from the year 1 to the end of 9999 (timestamp.proto), and valid
# nanoseconds.
_SECONDS, _NANOSECONDS = range(-62_135_596_800, 253_402_300_800), range(10**9)


class Untrue(Exception):
    """An error: a field of a node's answer cannot be true.

    The error names the field and its value.
    """

    def __init__(self, where: str, value: object, problem: str) -> None:
        super().__init__(f"{where} is {_shown(value)}: {problem}")
        self.value = value


def _shown(value: Any) -> str:
    """Return the start of a value: a node may have made it as long as a message can be."""
    is_long = isinstance(value, Sequence) and len(value) > _MOST_SHOWN
    text = repr(value[:_MOST_SHOWN] if is_long else value)
    return text if not is_long and len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


@dataclass
class Asked:
    """A request to a node, with what the controller knows of that node."""

    request: Any
    node: str
    topology: csi.Topology
    # The volume groups that are the node's own, as volume ids name them: `group@uuid`.
    places: Set[str]
    # Function that returns whether an id is in a volume group of another node.
    is_elsewhere: Callable[[VolumeId], bool]
    # Function that returns whether an id's own PersistentVolume names another node, for a volume
    # group that several nodes may have.
    is_anothers: Callable[[VolumeId], bool]
    # The answer, and the message in the answer that has the field whose rule runs.
    answer: Any = field(default=None, init=False)
    part: Any = field(default=None, init=False)
    # The ids that were left out of the answer, because another node lists them.
    left_out: Sequence[VolumeId] = field(default=(), init=False)


# A rule: a function of a field's value that returns what is wrong with it; empty if nothing.
Rule = Callable[[Any, Asked], str]


def any_value(_value: Any, _call: Asked) -> str:
    """Accept any value: the field is about the node's own volume, snapshot or capacity."""
    return ""


def its_own(prefix: str) -> Rule:
    """Make a rule: the value is an id on the node that answered, with this prefix in its name."""
    begins = f"{prefix}-", f"{prefix}."

    def judge(value: str, call: Asked) -> str:
        name = value.partition("/")[2]
        if problem := _not_there(value, call):
            return problem
        if not name.startswith(begins) or not ids.is_name(name):
            return f"it must be the id of a {prefix!r}"
        return ""

    return judge


def equals_request_id(key: str) -> Rule:
    """Make a rule: the value equals the id in a field of the request, and is on the node."""

    def judge(value: str, call: Asked) -> str:
        if value != (expected := getattr(call.request, key)):
            return f"asked for was {expected!r}"
        return _not_there(value, call)

    return judge


def if_asked(key: str, rule: Rule) -> Rule:
    """Make a rule: the value fits `rule`, and equals the id in a field of the request, if set."""

    def judge(value: str, call: Asked) -> str:
        if value != (getattr(call.request, key) or value):
            return f"asked for was {getattr(call.request, key)!r}"
        return rule(value, call)

    return judge


def named_as_asked(prefix: str, sources: str = "") -> Rule:
    """Make a rule: the value is an id on the node, with the name that the request's name gives.

    With `sources`, a field of the request, the id must be in the volume group of one of the
    sources.
    """

    def judge(value: str, call: Asked) -> str:
        place, _, name = value.partition("/")
        if problem := _not_there(value, call):
            return problem
        if name != (expected := names.logical_volume(prefix, call.request.name)):
            return f"the name that was asked for gives {expected!r}"
        if sources and place not in map(_place, routes.ids_in(call.request, sources)):
            return "it is in another volume group than its source"
        return ""

    return judge


def member_as_asked(value: str, call: Asked) -> str:
    """Require the id of a snapshot in a group snapshot.

    The id follows from the request's name and the snapshot's source.
    """
    source = call.part.source_volume_id
    name = ids.group_member(call.request.name, source)
    expected = f"{_place(source)}/{name}"
    return "" if value == expected else f"the name that was asked for gives {expected!r}"


def beside(key: str) -> Rule:
    """Make a rule: the value is an id in the volume group of the id in field `key`.

    Both fields are in the same message.
    """

    def judge(value: str, call: Asked) -> str:
        if VolumeId.parse(value) is None or _place(value) != _place(getattr(call.part, key)):
            return f"it must be in the volume group of {key}"
        return ""

    return judge


def nothing(value: Any, _call: Asked) -> str:
    """Require an empty field."""
    return "it must be empty" if value else ""


def of_its_group_snapshot(value: str, call: Asked) -> str:
    """Require the id of the group snapshot that the answer is about."""
    expected = call.answer.group_snapshot.group_snapshot_id
    return "" if value == expected else f"the group snapshot is {expected!r}"


def group_snapshot_or_none(value: str, call: Asked) -> str:
    """Require an empty value, or the id of a group snapshot that is not another node's.

    A group snapshot that spans several volume groups is named after one of them, which may be
    detached from the node by now.
    """
    parsed = VolumeId.parse(value)
    if not value or (parsed and names.is_of(ids.GROUP_SNAPSHOT_PREFIX, parsed.name)):
        return _in_no_group(call) if parsed and call.is_elsewhere(parsed) else ""
    return f"it must be the id of a {ids.GROUP_SNAPSHOT_PREFIX!r}"


def any_volume(value: str, _call: Asked) -> str:
    """Require the id of a volume, on any node: `_leave_out` removes those of other nodes."""
    parsed = VolumeId.parse(value)
    if parsed is not None and names.is_of(ids.VOLUME_PREFIX, parsed.name):
        return ""
    return f"it must be the id of a {ids.VOLUME_PREFIX!r}"


def one_of_each(key: str, sources: str) -> Rule:
    """Make a rule: the list has one message for each id in a field of the request."""

    def judge(value: Sequence[Any], call: Asked) -> str:
        expected = set(getattr(call.request, sources))
        is_whole = (
            len(value) == len(expected) and {getattr(entry, key) for entry in value} == expected
        )
        return "" if is_whole else f"it must have one for each of {sources}"

    return judge


def own_topology(value: Sequence[csi.Topology], call: Asked) -> str:
    """Require exactly one topology: that of the node that answered."""
    # Messages are compared first: that is fast, comparing maps is slow. The maps decide if the
    # messages differ in fields that this version does not know.
    if len(value) == 1 and (
        value[0] == call.topology or value[0].segments == call.topology.segments
    ):
        return ""
    return f"it must be the topology of that node, {dict(call.topology.segments)}, alone"


def itself_only(value: Sequence[str], call: Asked) -> str:
    """Require a list of node ids with the node's own id, or an empty list."""
    if not value or (len(value) == 1 and value[0] == call.node):
        return ""
    return "a volume of that node can be published there only"


def of_itself(_value: Any, call: Asked) -> str:
    """Require that the request attaches the volume to the node that answered; accept any content.

    Only the node's own plugin reads the content.
    """
    expected = call.request.node_id
    return "" if expected == call.node else f"it was to be attached to node {expected!r}"


def each_of(*rules: Rule) -> Rule:
    """Make a rule: the value fits all these rules."""

    def judge(value: Any, call: Asked) -> str:
        return next(filter(None, (rule(value, call) for rule in rules)), "")

    return judge


def a_few_conditions(value: Sequence[csi.VolumeHealth.VolumeHealthEntry], _call: Asked) -> str:
    """Require conditions of a volume within the limits of number and length that Carver keeps."""
    if len(value) > _MOST_CONDITIONS:
        return f"there may be at most {_MOST_CONDITIONS}"
    if any(
        len(condition.reason) > _MOST_REASON or len(condition.message) > _MOST_MESSAGE
        for condition in value
    ):
        return f"a reason has at most {_MOST_REASON} characters, a message {_MOST_MESSAGE}"
    return ""


def not_negative(value: Any, _call: Asked) -> str:
    """Require a number of bytes that is not negative."""
    number = value if isinstance(value, int) else value.value
    return "" if number >= 0 else "it must not be negative"


def asked_size(value: int, call: Asked) -> str:
    """Require a size within the request's capacity range."""
    expected = call.request.capacity_range
    if SizeRange(expected.required_bytes, expected.limit_bytes).allows(value):
        return ""
    return (
        f"asked for were {expected.required_bytes} to"
        f" {expected.limit_bytes or 'any number of'} bytes"
    )


def made_size(value: int, call: Asked) -> str:
    """Require the size of a new volume: the requested size, rounded up.

    A copy is as large as its source, whose size the controller does not know.
    """
    if problem := asked_size(value, call):
        return problem
    expected = call.request.capacity_range
    is_bound = expected.limit_bytes or call.request.HasField("volume_content_source")
    if is_bound or value <= expected.required_bytes + _MOST_ROUNDING:
        return ""
    return f"asked for were {expected.required_bytes} bytes"


def a_context(value: Mapping[str, str], _call: Asked) -> str:
    """Require a context with Carver's own keys only, within the limits of CSI.

    Carver on the node reads the context when it publishes the volume.
    """
    if not value:
        return ""
    if len(value) > _MOST_KEYS or not all(key.startswith(PREFIX) for key in value):
        return f"it has at most {_MOST_KEYS} keys, which begin with {PREFIX}"
    size = sum(len(text.encode()) for pair in value.items() for text in pair)
    return "" if size <= _MOST_MAP_BYTES else f"it has more than {_MOST_MAP_BYTES} bytes"


def asked_source(value: csi.VolumeContentSource, call: Asked) -> str:
    """Require the request's content source, or none if the request has none."""
    expected, field = routes.source(call.request.volume_content_source)
    if routes.source(value) == (expected, field):
        return ""
    return f"asked for was {field} {expected!r}" if field else "no source was asked for"


def a_time(value: Any, _call: Asked) -> str:
    """Require a time that a Timestamp can have."""
    fits = value.seconds in _SECONDS and value.nanos in _NANOSECONDS
    return "" if fits else "it is no moment"


def a_page(value: Sequence[Any], call: Asked) -> str:
    """Require at most as many entries as were asked for, or as Carver's own pages have."""
    most = call.request.max_entries or MOST_ENTRIES
    return f"there may be at most {most}" if most < len(value) else ""


def advances(value: str, call: Asked) -> str:
    """Require an empty token at the end of the list, or one that is beyond the request's token.

    A page with a token must have entries.
    """
    if not value or (value > call.request.starting_token and call.part.entries):
        return ""
    return f"the page began at {call.request.starting_token!r}"


def ranges(value: Sequence[csi.BlockMetadata], call: Asked) -> str:
    """Require ranges within the snapshot, at most as many as were asked for."""
    most, size = call.request.max_results or _MOST_RANGES, call.part.volume_capacity_bytes
    if most < len(value):
        return f"there may be at most {most}"
    if all(
        block.byte_offset >= 0 < block.size_bytes <= size - block.byte_offset for block in value
    ):
        return ""
    return f"the snapshot has {size} bytes"


def _place(identity: str) -> str:
    """Return the volume group in an id, as `group@uuid`."""
    return identity.partition("/")[0]


def _not_there(identity: str, call: Asked) -> str:
    """Return why an id is not on the node that answered; empty if it may be there."""
    if _place(identity) not in call.places:
        return _in_no_group(call)
    if (parsed := VolumeId.parse(identity)) is not None and call.is_anothers(parsed):
        return f"its PersistentVolume names another node than {call.node}"
    return ""


def _in_no_group(call: Asked) -> str:
    return f"it is in no volume group of node {call.node}"


# Rules, by the fields of a message.
Fields = Mapping[str, Rule]


def _in(path: str, *fields: Fields) -> Fields:
    """Return rules whose fields have the path of their message before them."""
    return {f"{path}.{key}": rule for part in fields for key, rule in part.items()}


_VOLUME: Fields = {
    "volume_id": its_own(ids.VOLUME_PREFIX),
    "capacity_bytes": not_negative,
    "volume_context": a_context,
    # Any content source is accepted, as it only shows people where the volume came from: the source
    # may have moved to another node since.
    "content_source": any_value,
    "accessible_topology": own_topology,
}
_SNAPSHOT: Fields = {
    "snapshot_id": its_own(ids.SNAPSHOT_PREFIX),
    "source_volume_id": beside("snapshot_id"),
    "size_bytes": not_negative,
    "creation_time": a_time,
    "ready_to_use": any_value,
    "group_snapshot_id": group_snapshot_or_none,
    "accessible_topology": own_topology,
}
_STATUS: Fields = {"published_node_ids": itself_only}
_PAGE: Fields = {"entries": a_page, "next_token": advances}
_MEMBER: Fields = {**_SNAPSHOT, "group_snapshot_id": of_its_group_snapshot}
_BLOCKS: Fields = {
    "block_metadata_type": any_value,
    "volume_capacity_bytes": not_negative,
    "block_metadata": ranges,
}

# The rule of each field of an answer, by service and RPC. `[]` stands for the entries of a list.
RULES: Mapping[str, Mapping[str, Fields]] = {
    "csi.v1.Controller": {
        "CreateVolume": _in(
            "volume",
            _VOLUME,
            {
                "volume_id": named_as_asked(ids.VOLUME_PREFIX),
                "capacity_bytes": made_size,
                "content_source": asked_source,
            },
        ),
        "DeleteVolume": {},
        "ControllerPublishVolume": {"publish_context": each_of(of_itself, a_context)},
        "ControllerUnpublishVolume": {},
        "ValidateVolumeCapabilities": {"confirmed": any_value, "message": any_value},
        "ListVolumes": {
            **_PAGE,
            **_in("entries[].volume", _VOLUME),
            **_in("entries[].status", _STATUS),
        },
        "ControllerListVolumeHealth": {
            **_PAGE,
            "entries[].volume_id": any_volume,
            "entries[].health_statuses": a_few_conditions,
        },
        "ControllerGetVolumeHealth": {
            "volume_health.volume_id": equals_request_id("volume_id"),
            "volume_health.health_statuses": a_few_conditions,
        },
        "GetCapacity": {
            "available_capacity": not_negative,
            "maximum_volume_size": not_negative,
            "minimum_volume_size": not_negative,
        },
        "CreateSnapshot": _in(
            "snapshot",
            _SNAPSHOT,
            {
                "snapshot_id": named_as_asked(ids.SNAPSHOT_PREFIX, "source_volume_id"),
                "source_volume_id": equals_request_id("source_volume_id"),
                "group_snapshot_id": nothing,
            },
        ),
        "DeleteSnapshot": {},
        "ListSnapshots": {
            **_PAGE,
            **_in(
                "entries[].snapshot",
                _SNAPSHOT,
                {
                    "snapshot_id": if_asked("snapshot_id", _SNAPSHOT["snapshot_id"]),
                    "source_volume_id": if_asked("source_volume_id", _SNAPSHOT["source_volume_id"]),
                },
            ),
        },
        "GetSnapshot": _in(
            "snapshot", _SNAPSHOT, {"snapshot_id": equals_request_id("snapshot_id")}
        ),
        "ControllerExpandVolume": {
            "capacity_bytes": asked_size,
            "node_expansion_required": any_value,
        },
        "ControllerGetVolume": {
            **_in("volume", _VOLUME, {"volume_id": equals_request_id("volume_id")}),
            **_in("status", _STATUS),
        },
        "ControllerModifyVolume": {},
    },
    "csi.v1.GroupController": {
        "CreateVolumeGroupSnapshot": _in(
            "group_snapshot",
            {
                "group_snapshot_id": named_as_asked(ids.GROUP_SNAPSHOT_PREFIX, "source_volume_ids"),
                "snapshots": one_of_each("source_volume_id", "source_volume_ids"),
                "creation_time": a_time,
                "ready_to_use": any_value,
            },
            _in("snapshots[]", _MEMBER, {"snapshot_id": member_as_asked}),
        ),
        "DeleteVolumeGroupSnapshot": {},
        "GetVolumeGroupSnapshot": _in(
            "group_snapshot",
            {
                "group_snapshot_id": equals_request_id("group_snapshot_id"),
                "snapshots": one_of_each("snapshot_id", "snapshot_ids"),
                "creation_time": a_time,
                "ready_to_use": any_value,
            },
            _in("snapshots[]", _MEMBER),
        ),
    },
    "csi.v1.SnapshotMetadata": {"GetMetadataAllocated": _BLOCKS, "GetMetadataDelta": _BLOCKS},
}


@dataclass(frozen=True)
class Row:
    """The rules of one RPC's answer, by the messages that have the fields."""

    answer: type[Message]
    # The fields of the request that have ids: the fields that lead to their message, and the
    # field's name.
    identities: Sequence[tuple[Sequence[str], str]]
    parts: Mapping[tuple[str, ...], Sequence[tuple[str, Rule]]]
    most_bytes: int

    @classmethod
    def of(cls, service: str, method: str) -> "Row":
        """Return the rules of an RPC's answer. Raises KeyError for an RPC without rules."""
        rules_by_path: dict[tuple[str, ...], list[tuple[str, Rule]]] = {}
        for path, rule in RULES[service][method].items():
            *steps, key = path.split(".")
            if rule is not any_value:
                rules_by_path.setdefault(tuple(steps), []).append((key, rule))
        request = routes.request_class(service, method).DESCRIPTOR
        identities = tuple(_identities(request, ()))
        answer = routes.response_class(service, method)
        is_list = "entries" in answer.DESCRIPTOR.fields_by_name
        return cls(answer, identities, rules_by_path, MOST_PAGE_BYTES if is_list else _MOST_BYTES)

    def judge(self, call: Asked, data: bytes) -> Any:
        """Parse and check an answer, and return it. Raises Untrue.

        1. Refuse an answer with too many bytes, and parse it.
        2. Refuse an answer to a request whose ids are not the node's: the node cannot have carried
           it out.
        3. Apply the rule of each field.
        4. Leave out the health of other nodes' volumes.

        The rules run in the event loop, so they must be fast. For that, lengths are checked before
        contents: the rule of a list comes before those of its elements, and begins with the list's
        length.
        """
        if len(data) > self.most_bytes:
            raise Untrue("the answer", data, f"it has more than {self.most_bytes} bytes")
        try:
            answer = call.answer = self.answer.FromString(data)
        except DecodeError:
            raise Untrue("the answer", data, "it cannot be read") from None
        for steps, key in self.identities:
            for part in _parts(call.request, steps):
                self._judge_asked(getattr(part, key), call, key)
        for steps, rules in self.parts.items():
            for part in _parts(answer, steps):
                call.part = part
                for key, rule in rules:
                    value = getattr(part, key)
                    if problem := rule(value, call):
                        raise Untrue(".".join((*steps, key)), value, problem)
        if isinstance(answer, csi.ControllerListVolumeHealthResponse):
            _leave_out(answer, call)
        return answer

    @staticmethod
    def _judge_asked(value: Any, call: Asked, key: str) -> None:
        """Raise Untrue if an id in the request is another node's.

        The node then answered that it carried out a call about another node's volume.
        """
        for identity in [value] if isinstance(value, str) else value:
            # A text that is no volume id names no volume: deleting it succeeds.
            if VolumeId.parse(identity) is not None and (problem := _not_there(identity, call)):
                raise Untrue(f"the request's {key}", identity, problem)


def _leave_out(answer: csi.ControllerListVolumeHealthResponse, call: Asked) -> None:
    """Remove the health of other nodes' volumes from an answer: those nodes list it themselves.

    A node goes on to report the volumes of a volume group as missing after the group was attached
    to another node.
    """
    parsed_entries = [
        (health, parsed)
        for health in answer.entries
        if (parsed := VolumeId.parse(health.volume_id))
    ]
    call.left_out = [parsed for _, parsed in parsed_entries if call.is_elsewhere(parsed)]
    own_entries = [health for health, parsed in parsed_entries if parsed not in call.left_out]
    if len(own_entries) < len(answer.entries):
        own_data = [health.SerializeToString() for health in own_entries]
        del answer.entries[:]
        answer.entries.extend(map(csi.VolumeHealth.FromString, own_data))


def _identities(message: Any, steps: Sequence[str]) -> Iterator[tuple[Sequence[str], str]]:
    """The fields of a request that have ids of volumes, snapshots or group snapshots."""
    for descriptor in message.fields:
        if descriptor.message_type is not None:
            if descriptor.message_type.full_name.startswith("csi.v1.VolumeContentSource"):
                yield from _identities(descriptor.message_type, (*steps, descriptor.name))
        elif descriptor.name.endswith(("volume_id", "snapshot_id", "volume_ids", "snapshot_ids")):
            yield steps, descriptor.name


def _parts(message: Any, steps: Sequence[str]) -> Sequence[Any]:
    """The messages to which a path of fields leads; for a list, each of its messages."""
    messages = [message]
    for step in steps:
        name = step.removesuffix("[]")
        values = [getattr(message, name) for message in messages]
        messages = values if name == step else [entry for entries in values for entry in entries]
    return messages

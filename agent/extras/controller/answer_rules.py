"""Rules for the answers of nodes: a row for each RPC that nodes answer, a rule for each field.

The controller refuses an answer that cannot be true. It believes a node about the node's own state:
the contents of its volumes, their health, its free capacity. Names must follow from the request
and from the node:

- The id of a new volume or snapshot is in a volume group that is the node's own, and has the name
  that follows from the name in the request.
- The topology is that of the node, and has nothing else.
- The size and the source of a new volume are those of the request.

Each field of CSI's answers has a rule, which for some fields accepts any value. Fields that this
version does not know have no rule. nodes.py checks what a node reports about itself
(GetPluginInfo).
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

# Maximum number of characters of a refused value that an error shows.
_MOST_SHOWN = 200
# Maximum size, in bytes, of a node's answer with a page of a list, and of each other answer. A
# larger answer is not even parsed. An honest page has 500 entries of at most 5 KiB each. Both
# limits are less than the 4 MiB that a sidecar accepts (gRPC in Go).
MOST_PAGE_BYTES, _MOST_BYTES = 3 << 20, 1 << 20
# Maximum number of ranges of blocks in one message of GetMetadataAllocated or GetMetadataDelta, if
# the request sets no limit: 8 times what Carver sends.
_MOST_RANGES = 8192
# Maximum number of keys, and of bytes, of a volume_context and of a publish_context (CSI spec,
# "Size Limits"). A volume_context becomes a part of the PersistentVolume, a publish_context a part
# of the VolumeAttachment.
_MOST_KEYS, _MOST_MAP_BYTES = 64, 4096
# Maximum number of bytes by which a new volume may be larger than requested. A node adds a header,
# and rounds up to whole extents on each stripe and to the minimum size of a file system. 64 GiB are
# 16 stripes with extents of 4 GiB.
_MOST_ROUNDING = 64 << 30
# Maximum number of health conditions of a volume, and of characters of a condition's reason and
# message. Carver has 31 reasons of at most 40 characters, and cuts a message to 1024 bytes.
_MOST_CONDITIONS, _MOST_REASON, _MOST_MESSAGE = 64, 128, 1024
# Valid seconds of a Timestamp, from the year 1 to the end of 9999 (timestamp.proto), and valid
# nanoseconds.
_SECONDS, _NANOSECONDS = range(-62_135_596_800, 253_402_300_800), range(10**9)


class Untrue(Exception):
    """Error: a node's answer cannot be true.

    The error's text names a field of the answer, or of the request, and shows the start of the
    field's value.
    """

    def __init__(self, where: str, value: object, problem: str) -> None:
        super().__init__(f"{where} is {_shown(value)}: {problem}")
        self.value = value


def _shown(value: Any) -> str:
    """Return the text of a refused value for an error, cut to _MOST_SHOWN characters.

    A node may send a value that is as long as a message can be.
    """
    is_long = isinstance(value, Sequence) and len(value) > _MOST_SHOWN
    text = repr(value[:_MOST_SHOWN] if is_long else value)
    return text if not is_long and len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


@dataclass
class Asked:
    """A request to a node, and the facts by which the rules check the node's answer."""

    request: Any
    node: str
    topology: csi.Topology
    # The volume groups in which an id may be the node's, as volume ids name them (`group@uuid`):
    # the node's own volume groups, and those of the ids because of which this node is called.
    places: Set[str]
    # Function that returns whether the volume of an id belongs, or may belong, to another node.
    is_elsewhere: Callable[[VolumeId], bool]
    # Function that returns whether the PersistentVolume of an id, as last read, names another node.
    # It returns False for the ids because of which this node is called.
    is_anothers: Callable[[VolumeId], bool]
    # The parsed answer, and the message in the answer that has the field whose rule runs.
    answer: Any = field(default=None, init=False)
    part: Any = field(default=None, init=False)
    # The accepted message before this one, of a stream; None for the first one.
    previous: Any = field(default=None, init=False)
    # The ids of the volumes whose health was removed from the answer, because the volumes belong,
    # or may belong, to another node.
    left_out: Sequence[VolumeId] = field(default=(), init=False)


# Type of a rule: a function that gets the value of a field of an answer, and returns the text of
# what is wrong with the value. The text is empty if the value is accepted.
Rule = Callable[[Any, Asked], str]


def any_value(_value: Any, _call: Asked) -> str:
    """Accept any value of a field, because the controller cannot check it."""
    return ""


def its_own(prefix: str) -> Rule:
    """Make a rule: the field has an id on the node that answered, with this prefix in its name."""
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
    """Make a rule: the field has the id of the request's field `key`, on the node that answered."""

    def judge(value: str, call: Asked) -> str:
        if value != (expected := getattr(call.request, key)):
            return f"asked for was {expected!r}"
        return _not_there(value, call)

    return judge


def if_asked(key: str, rule: Rule) -> Rule:
    """Make a rule: the field's value satisfies `rule`, and is the id in the request's field `key`.

    If that field of the request is empty, only `rule` counts.
    """

    def judge(value: str, call: Asked) -> str:
        if value != (getattr(call.request, key) or value):
            return f"asked for was {getattr(call.request, key)!r}"
        return rule(value, call)

    return judge


def named_as_asked(prefix: str, sources: str = "") -> Rule:
    """Make a rule: the field has an id on the node, and its name follows from the request's name.

    `sources` is a field of the request with the ids of source volumes. If it is given, the value
    must be in the volume group of one of these ids.
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
    """Require that a snapshot of a new group snapshot has the expected id.

    That id follows from the request's name and from the id of the snapshot's source volume.
    """
    source = call.part.source_volume_id
    name = ids.group_member(call.request.name, source)
    expected = f"{_place(source)}/{name}"
    return "" if value == expected else f"the name that was asked for gives {expected!r}"


def beside(key: str) -> Rule:
    """Make a rule: the field has an id in the same volume group as the id in the field `key`.

    Both fields are in the same message of the answer.
    """

    def judge(value: str, call: Asked) -> str:
        if VolumeId.parse(value) is None or _place(value) != _place(getattr(call.part, key)):
            return f"it must be in the volume group of {key}"
        return ""

    return judge


def nothing(value: Any, _call: Asked) -> str:
    """Require that a field of the answer is empty."""
    return "it must be empty" if value else ""


def of_its_group_snapshot(value: str, call: Asked) -> str:
    """Require that a snapshot names the group snapshot that is in the same answer."""
    expected = call.answer.group_snapshot.group_snapshot_id
    return "" if value == expected else f"the group snapshot is {expected!r}"


def group_snapshot_or_none(value: str, call: Asked) -> str:
    """Require an empty value, or the id of a group snapshot that no other node may have.

    The volume group in the id need not be on the node that answered. The id of a group snapshot of
    several volume groups names one of these groups, which may be detached from the node by now.
    """
    parsed = VolumeId.parse(value)
    if not value or (parsed and names.is_of(ids.GROUP_SNAPSHOT_PREFIX, parsed.name)):
        return _in_no_group(call) if parsed and call.is_elsewhere(parsed) else ""
    return f"it must be the id of a {ids.GROUP_SNAPSHOT_PREFIX!r}"


def any_volume(value: str, _call: Asked) -> str:
    """Require the id of a volume, on the node that answered or on any other node.

    `_leave_out` later removes the entries of other nodes' volumes from the answer.
    """
    parsed = VolumeId.parse(value)
    if parsed is not None and names.is_of(ids.VOLUME_PREFIX, parsed.name):
        return ""
    return f"it must be the id of a {ids.VOLUME_PREFIX!r}"


def one_of_each(key: str, sources: str) -> Rule:
    """Make a rule: the list has one message for each id in the request's field `sources`.

    Each message has its id in its field `key`.
    """

    def judge(value: Sequence[Any], call: Asked) -> str:
        expected = set(getattr(call.request, sources))
        is_whole = (
            len(value) == len(expected) and {getattr(entry, key) for entry in value} == expected
        )
        return "" if is_whole else f"it must have one for each of {sources}"

    return judge


def own_topology(value: Sequence[csi.Topology], call: Asked) -> str:
    """Require exactly one topology: that of the node that answered."""
    # Compare the messages first, because comparing their maps is slow. Compare the maps only if the
    # messages differ, as they may differ in fields that this version does not know.
    if len(value) == 1 and (
        value[0] == call.topology or value[0].segments == call.topology.segments
    ):
        return ""
    return f"it must be the topology of that node, {dict(call.topology.segments)}, alone"


def itself_only(value: Sequence[str], call: Asked) -> str:
    """Require a list of node ids that is empty, or has only the id of the node that answered."""
    if not value or (len(value) == 1 and value[0] == call.node):
        return ""
    return "a volume of that node can be published there only"


def of_itself(_value: Any, call: Asked) -> str:
    """Require that ControllerPublishVolume attached the volume to the node that answered.

    This rule does not check the value, a publish_context, which only Carver on that node reads.
    """
    expected = call.request.node_id
    return "" if expected == call.node else f"it was to be attached to node {expected!r}"


def each_of(*rules: Rule) -> Rule:
    """Make a rule: the field's value satisfies all these rules."""

    def judge(value: Any, call: Asked) -> str:
        return next(filter(None, (rule(value, call) for rule in rules)), "")

    return judge


def a_few_conditions(value: Sequence[csi.VolumeHealth.VolumeHealthEntry], _call: Asked) -> str:
    """Require at most _MOST_CONDITIONS health conditions of a volume, with texts of limited length.

    Carver's own answers are within these limits.
    """
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
    """Require a size of a volume, in bytes, within the request's capacity range."""
    expected = call.request.capacity_range
    if SizeRange(expected.required_bytes, expected.limit_bytes).allows(value):
        return ""
    return (
        f"asked for were {expected.required_bytes} to"
        f" {expected.limit_bytes or 'any number of'} bytes"
    )


def made_size(value: int, call: Asked) -> str:
    """Require a new volume's size: within the request's range, and not far above the minimum.

    If the request has neither a limit nor a content source, the size is at most _MOST_ROUNDING
    above the requested minimum. A copy is as large as its source, whose size the controller does
    not know.
    """
    if problem := asked_size(value, call):
        return problem
    expected = call.request.capacity_range
    is_bound = expected.limit_bytes or call.request.HasField("volume_content_source")
    if is_bound or value <= expected.required_bytes + _MOST_ROUNDING:
        return ""
    return f"asked for were {expected.required_bytes} bytes"


def a_context(value: Mapping[str, str], _call: Asked) -> str:
    """Require a volume_context or publish_context with Carver's keys only, within CSI's limits.

    Carver on the node reads the context when it publishes the volume. The context may be empty.
    """
    if not value:
        return ""
    if len(value) > _MOST_KEYS or not all(key.startswith(PREFIX) for key in value):
        return f"it has at most {_MOST_KEYS} keys, which begin with {PREFIX}"
    size = sum(len(text.encode()) for pair in value.items() for text in pair)
    return "" if size <= _MOST_MAP_BYTES else f"it has more than {_MOST_MAP_BYTES} bytes"


def asked_source(value: csi.VolumeContentSource, call: Asked) -> str:
    """Require the content source of the request; no content source if the request has none."""
    expected, field = routes.source(call.request.volume_content_source)
    if routes.source(value) == (expected, field):
        return ""
    return f"asked for was {field} {expected!r}" if field else "no source was asked for"


def a_time(value: Any, _call: Asked) -> str:
    """Require a Timestamp within the bounds of seconds and nanoseconds of timestamp.proto."""
    fits = value.seconds in _SECONDS and value.nanos in _NANOSECONDS
    return "" if fits else "it is no moment"


def a_page(value: Sequence[Any], call: Asked) -> str:
    """Require a page of a list with at most `max_entries` entries, as the request says.

    If the request sets no maximum, a page has at most MOST_ENTRIES entries.
    """
    most = call.request.max_entries or MOST_ENTRIES
    return f"there may be at most {most}" if most < len(value) else ""


def advances(value: str, call: Asked) -> str:
    """Require that the token for the next page is empty, or comes after the request's token.

    Tokens are compared as texts. The token is empty at the end of the list. A page with a token
    must have entries. So each list ends.
    """
    if not value or (value > call.request.starting_token and call.part.entries):
        return ""
    return f"the page began at {call.request.starting_token!r}"


def ranges(value: Sequence[csi.BlockMetadata], call: Asked) -> str:
    """Require ranges of blocks within the snapshot, at most `max_results`, as the request says.

    If the request sets no maximum, there may be _MOST_RANGES ranges.
    """
    most, size = call.request.max_results or _MOST_RANGES, call.part.volume_capacity_bytes
    if most < len(value):
        return f"there may be at most {most}"
    if all(
        block.byte_offset >= 0 < block.size_bytes <= size - block.byte_offset for block in value
    ):
        return ""
    return f"the snapshot has {size} bytes"


def _place(identity: str) -> str:
    """Return the part of an id that names the volume group: `group@uuid`."""
    return identity.partition("/")[0]


def _not_there(identity: str, call: Asked) -> str:
    """Return why an id cannot be on the node that answered; empty if it can.

    A node can have an id if its volume group counts as the node's (`places`), and the id's
    PersistentVolume, as last read, names no other node.
    """
    if _place(identity) not in call.places:
        return _in_no_group(call)
    if (parsed := VolumeId.parse(identity)) is not None and call.is_anothers(parsed):
        return f"its PersistentVolume names another node than {call.node}"
    return ""


def _in_no_group(call: Asked) -> str:
    return f"it is in no volume group of node {call.node}"


# Type of a table of rules: the rule of each field, by the field's path in the answer.
Fields = Mapping[str, Rule]


def _in(path: str, *fields: Fields) -> Fields:
    """Return a table of all these rules, with `path` before the name of each field."""
    return {f"{path}.{key}": rule for part in fields for key, rule in part.items()}


_VOLUME: Fields = {
    "volume_id": its_own(ids.VOLUME_PREFIX),
    "capacity_bytes": not_negative,
    "volume_context": a_context,
    # Any content source of an existing volume is accepted: the source may have moved to another
    # node since. The field only shows people where the volume came from.
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

# The rule of each field of an answer, by service and RPC. In the path of a field, `[]` stands for
# the entries of a list.
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
    """The rules for the answer to one RPC."""

    # The protobuf class of the RPC's answer.
    answer: type[Message]
    # The fields of the request that have ids: for each, the path of fields that leads to the
    # message with the field, and the field's name.
    identities: Sequence[tuple[Sequence[str], str]]
    # The fields of the answer that are checked: name and rule of each field, by the path of fields
    # that leads to the message with these fields.
    parts: Mapping[tuple[str, ...], Sequence[tuple[str, Rule]]]
    # Maximum size of the answer, in bytes.
    most_bytes: int

    @classmethod
    def of(cls, service: str, method: str, table: Mapping[str, Fields] | None = None) -> "Row":
        """Return the rules for the answer to an RPC. Raises KeyError for an RPC without rules.

        The rules are in `table`, by the names of RPCs; without it, in RULES.
        """
        rules_by_path: dict[tuple[str, ...], list[tuple[str, Rule]]] = {}
        for path, rule in (RULES[service] if table is None else table)[method].items():
            *steps, key = path.split(".")
            if rule is not any_value:
                rules_by_path.setdefault(tuple(steps), []).append((key, rule))
        request = routes.request_class(service, method).DESCRIPTOR
        identities = tuple(_identities(request, ()))
        answer = routes.response_class(service, method)
        is_list = "entries" in answer.DESCRIPTOR.fields_by_name
        return cls(answer, identities, rules_by_path, MOST_PAGE_BYTES if is_list else _MOST_BYTES)

    def judge(self, call: Asked, data: bytes) -> Any:
        """Parse an answer, check it, and return it. Raises Untrue if a check fails.

        1. Refuse an answer that is too long. Parse the answer.
        2. Refuse the answer if the request has ids that are not the node's: the node cannot have
           carried out such a request.
        3. Apply the rule of each field.
        4. Remove the health of other nodes' volumes from the answer (`_leave_out`).

        The rules run in the event loop, so they must be fast. Therefore lengths are checked before
        contents: the rule of a list runs before the rules of the list's elements, and checks the
        list's length first.
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
        """Raise Untrue if a field of the request has an id that is not on the node that answered.

        The node then claims to have carried out a call about another node's volume.
        """
        for identity in [value] if isinstance(value, str) else value:
            # Accept a text that is no volume id: it names no volume, and deleting it succeeds.
            if VolumeId.parse(identity) is not None and (problem := _not_there(identity, call)):
                raise Untrue(f"the request's {key}", identity, problem)


def _leave_out(answer: csi.ControllerListVolumeHealthResponse, call: Asked) -> None:
    """Remove the health of volumes that belong, or may belong, to other nodes from an answer.

    The ids of these volumes are kept in `call.left_out`. The other nodes list the health of their
    volumes themselves. A node that had a volume group goes on to report its volumes as missing
    after the group's disks were attached to another node.
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
    """Yield the fields of a request that have ids of volumes, snapshots or group snapshots.

    Each field is the path of fields that leads to the message with the field, and its name.
    """
    for descriptor in message.fields:
        if descriptor.message_type is not None:
            if descriptor.message_type.full_name.startswith("csi.v1.VolumeContentSource"):
                yield from _identities(descriptor.message_type, (*steps, descriptor.name))
        elif descriptor.name.endswith(("volume_id", "snapshot_id", "volume_ids", "snapshot_ids")):
            yield steps, descriptor.name


def _parts(message: Any, steps: Sequence[str]) -> Sequence[Any]:
    """Return the messages to which a path of fields leads; for a list, each message in the list."""
    messages = [message]
    for step in steps:
        name = step.removesuffix("[]")
        values = [getattr(message, name) for message in messages]
        messages = values if name == step else [entry for entries in values for entry in entries]
    return messages

"""What each answer of a node must be: a row for each RPC that nodes answer, a rule for each field.

A node's word is enough for what is its own: its volumes' contents, health, room. What names
something must follow from the request and from the node: ids are in a volume group that is that
node's, with the name that the request's name gives; the topology is the node's, and nothing else;
sizes and sources are those that were asked for. Each field of the wire has a rule; fields that
this version does not know have none. What a node says of itself, GetPluginInfo, nodes.py judges.
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

# Characters that are shown of a value that is refused.
_MOST_SHOWN = 200
# The most bytes of a list's page, and of another answer: with more it is not even parsed. An honest
# page has 500 entries of at most 5 KiB each; both are less than a sidecar takes (4 MiB in Go).
MOST_PAGE_BYTES, _MOST_BYTES = 3 << 20, 1 << 20
# The most ranges of a message about blocks, where the request names no number: 8 times what Carver
# sends.
_MOST_RANGES = 8192
# The most keys and bytes of a volume_context and a publish_context (CSI spec, "Size Limits"), which
# become a part of the PersistentVolume and of the VolumeAttachment.
_MOST_KEYS, _MOST_MAP_BYTES = 64, 4096
# By how much a size is rounded up at most: to an extent on each stripe, beside a header, and to the
# least size of a file system. 64 GiB are 16 stripes with extents of 4 GiB.
_MOST_ROUNDING = 64 << 30
# The most conditions of a volume, and characters of each: Carver has 31 reasons of at most 40
# characters, and cuts a message to 1024 bytes.
_MOST_CONDITIONS, _MOST_REASON, _MOST_MESSAGE = 64, 128, 1024
# Seconds of a Timestamp, from the year 1 to the end of 9999 (timestamp.proto), and its nanoseconds.
_SECONDS, _NANOSECONDS = range(-62_135_596_800, 253_402_300_800), range(10**9)


class Untrue(Exception):
    """An answer that cannot be true: the field that gives it away, and its value."""

    def __init__(self, where: str, value: object, problem: str) -> None:
        super().__init__(f"{where} is {_shown(value)}: {problem}")
        self.value = value


def _shown(value: Any) -> str:
    """The beginning of a value, which a node may have made as long as a message can be."""
    is_long = isinstance(value, Sequence) and len(value) > _MOST_SHOWN
    text = repr(value[:_MOST_SHOWN] if is_long else value)
    return text if not is_long and len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


@dataclass
class Asked:
    """A request, and what the controller knows of the node that it was sent to."""

    request: Any
    node: str
    topology: csi.Topology
    # The volume groups that are the node's, as ids name them: `group@uuid`.
    places: Set[str]
    # Whether an id is in a volume group that is another node's.
    is_elsewhere: Callable[[VolumeId], bool]
    # Whether an id's own PersistentVolume names another node, where several have the group.
    is_anothers: Callable[[VolumeId], bool]
    # The answer, and that message of it which has the field to be judged.
    answer: Any = field(default=None, init=False)
    part: Any = field(default=None, init=False)
    # What was left out of the answer, as it is another node's to tell.
    left_out: Sequence[VolumeId] = field(default=(), init=False)


# Judges a field's value: says what is wrong with it; empty if nothing is.
Rule = Callable[[Any, Asked], str]


def its_word(_value: Any, _asked: Asked) -> str:
    """Accept what the node says: it is about its own volume, snapshot, or room."""
    return ""


def its_own(prefix: str) -> Rule:
    """The id of a volume, snapshot or group snapshot, by the prefix of its name, on the node."""
    begins = f"{prefix}-", f"{prefix}."

    def judge(value: str, asked: Asked) -> str:
        name = value.partition("/")[2]
        if problem := _not_there(value, asked):
            return problem
        if not name.startswith(begins) or not ids.is_name(name):
            return f"it must be the id of a {prefix!r}"
        return ""

    return judge


def the_asked(key: str) -> Rule:
    """The id in a field of the request, which must be on the node."""

    def judge(value: str, asked: Asked) -> str:
        if value != (wanted := getattr(asked.request, key)):
            return f"asked for was {wanted!r}"
        return _not_there(value, asked)

    return judge


def if_asked(key: str, rule: Rule) -> Rule:
    """What a rule accepts, and the id in a field of the request unless that is empty."""

    def judge(value: str, asked: Asked) -> str:
        if value != (getattr(asked.request, key) or value):
            return f"asked for was {getattr(asked.request, key)!r}"
        return rule(value, asked)

    return judge


def named_as_asked(prefix: str, sources: str = "") -> Rule:
    """The id that the name in the request gives: on the node, beside the sources that it names."""

    def judge(value: str, asked: Asked) -> str:
        place, _, name = value.partition("/")
        if problem := _not_there(value, asked):
            return problem
        if name != (wanted := names.logical_volume(prefix, asked.request.name)):
            return f"the name that was asked for gives {wanted!r}"
        if sources and place not in map(_place, routes.ids_in(asked.request, sources)):
            return "it is in another volume group than its source"
        return ""

    return judge


def member_as_asked(value: str, asked: Asked) -> str:
    """The id of a group snapshot's member, by the request's name and the member's source."""
    source = asked.part.source_volume_id
    name = ids.group_member(asked.request.name, source)
    wanted = f"{_place(source)}/{name}"
    return "" if value == wanted else f"the name that was asked for gives {wanted!r}"


def beside(key: str) -> Rule:
    """An id in the volume group of another id in the same message."""

    def judge(value: str, asked: Asked) -> str:
        if VolumeId.parse(value) is None or _place(value) != _place(getattr(asked.part, key)):
            return f"it must be in the volume group of {key}"
        return ""

    return judge


def nothing(value: Any, _asked: Asked) -> str:
    """An empty field."""
    return "it must be empty" if value else ""


def of_its_group_snapshot(value: str, asked: Asked) -> str:
    """The id of the answer's own group snapshot."""
    wanted = asked.answer.group_snapshot.group_snapshot_id
    return "" if value == wanted else f"the group snapshot is {wanted!r}"


def group_snapshot_or_none(value: str, asked: Asked) -> str:
    """Empty, or a group snapshot's id that is not another node's.

    One that spans several volume groups is named after one of them, which may be detached by now.
    """
    parsed = VolumeId.parse(value)
    if not value or (parsed and names.is_of(ids.GROUP_SNAPSHOT_PREFIX, parsed.name)):
        return _in_no_group(asked) if parsed and asked.is_elsewhere(parsed) else ""
    return f"it must be the id of a {ids.GROUP_SNAPSHOT_PREFIX!r}"


def any_volume(value: str, _asked: Asked) -> str:
    """The id of a volume, on the node or not; `_leave_out` sees to those of other nodes."""
    parsed = VolumeId.parse(value)
    if parsed is not None and names.is_of(ids.VOLUME_PREFIX, parsed.name):
        return ""
    return f"it must be the id of a {ids.VOLUME_PREFIX!r}"


def one_of_each(key: str, sources: str) -> Rule:
    """A list with one message for each id in a field of the request."""

    def judge(value: Sequence[Any], asked: Asked) -> str:
        wanted = set(getattr(asked.request, sources))
        is_whole = len(value) == len(wanted) and {getattr(one, key) for one in value} == wanted
        return "" if is_whole else f"it must have one for each of {sources}"

    return judge


def own_topology(value: Sequence[csi.Topology], asked: Asked) -> str:
    """The node's topology, alone."""
    # Messages are compared fast, maps slowly. Fields that this version does not know may differ.
    if len(value) == 1 and (
        value[0] == asked.topology or value[0].segments == asked.topology.segments
    ):
        return ""
    return f"it must be the topology of that node, {dict(asked.topology.segments)}, alone"


def itself_only(value: Sequence[str], asked: Asked) -> str:
    """Node ids: the node's own, or none."""
    if not value or (len(value) == 1 and value[0] == asked.node):
        return ""
    return "a volume of that node can be published there only"


def of_itself(_value: Any, asked: Asked) -> str:
    """What the node says of a volume that it attached to itself: only its own plugin reads it."""
    wanted = asked.request.node_id
    return "" if wanted == asked.node else f"it was to be attached to node {wanted!r}"


def each_of(*rules: Rule) -> Rule:
    """What all of the rules accept."""

    def judge(value: Any, asked: Asked) -> str:
        return next(filter(None, (one(value, asked) for one in rules)), "")

    return judge


def a_few_conditions(value: Sequence[csi.VolumeHealth.VolumeHealthEntry], _asked: Asked) -> str:
    """What is wrong with one volume: not more, nor in longer texts, than Carver says of one."""
    if len(value) > _MOST_CONDITIONS:
        return f"there may be at most {_MOST_CONDITIONS}"
    if any(len(one.reason) > _MOST_REASON or len(one.message) > _MOST_MESSAGE for one in value):
        return f"a reason has at most {_MOST_REASON} characters, a message {_MOST_MESSAGE}"
    return ""


def not_negative(value: Any, _asked: Asked) -> str:
    """A number of bytes."""
    number = value if isinstance(value, int) else value.value
    return "" if number >= 0 else "it must not be negative"


def asked_size(value: int, asked: Asked) -> str:
    """A size within the request's capacity range."""
    wanted = asked.request.capacity_range
    if SizeRange(wanted.required_bytes, wanted.limit_bytes).allows(value):
        return ""
    return (
        f"asked for were {wanted.required_bytes} to {wanted.limit_bytes or 'any number of'} bytes"
    )


def made_size(value: int, asked: Asked) -> str:
    """The size of a new volume: what was asked for, rounded up.

    A copy is as large as its source, which the controller does not know.
    """
    if problem := asked_size(value, asked):
        return problem
    wanted = asked.request.capacity_range
    is_bound = wanted.limit_bytes or asked.request.HasField("volume_content_source")
    if is_bound or value <= wanted.required_bytes + _MOST_ROUNDING:
        return ""
    return f"asked for were {wanted.required_bytes} bytes"


def a_context(value: Mapping[str, str], _asked: Asked) -> str:
    """What Carver on the node reads of the volume: keys of Carver's, no longer than CSI allows."""
    if not value:
        return ""
    if len(value) > _MOST_KEYS or not all(key.startswith(PREFIX) for key in value):
        return f"it has at most {_MOST_KEYS} keys, which begin with {PREFIX}"
    size = sum(len(one.encode()) for pair in value.items() for one in pair)
    return "" if size <= _MOST_MAP_BYTES else f"it has more than {_MOST_MAP_BYTES} bytes"


def asked_source(value: csi.VolumeContentSource, asked: Asked) -> str:
    """The request's content source, or none where it has none."""
    wanted, field = routes.source(asked.request.volume_content_source)
    if routes.source(value) == (wanted, field):
        return ""
    return f"asked for was {field} {wanted!r}" if field else "no source was asked for"


def a_time(value: Any, _asked: Asked) -> str:
    """A moment that a timestamp can have."""
    fits = value.seconds in _SECONDS and value.nanos in _NANOSECONDS
    return "" if fits else "it is no moment"


def a_page(value: Sequence[Any], asked: Asked) -> str:
    """At most as many entries as were asked for, or as Carver's own pages have."""
    most = asked.request.max_entries or MOST_ENTRIES
    return f"there may be at most {most}" if most < len(value) else ""


def advances(value: str, asked: Asked) -> str:
    """Empty at the end of the list; else further on than the request's token, after some entry."""
    if not value or (value > asked.request.starting_token and asked.part.entries):
        return ""
    return f"the page began at {asked.request.starting_token!r}"


def ranges(value: Sequence[csi.BlockMetadata], asked: Asked) -> str:
    """Ranges of the snapshot, at most as many as were asked for."""
    most, size = asked.request.max_results or _MOST_RANGES, asked.part.volume_capacity_bytes
    if most < len(value):
        return f"there may be at most {most}"
    if all(one.byte_offset >= 0 < one.size_bytes <= size - one.byte_offset for one in value):
        return ""
    return f"the snapshot has {size} bytes"


def _place(identity: str) -> str:
    """The volume group in an id, as `group@uuid`."""
    return identity.partition("/")[0]


def _not_there(identity: str, asked: Asked) -> str:
    """Why an id is not the node's; empty if it may be."""
    if _place(identity) not in asked.places:
        return _in_no_group(asked)
    if (parsed := VolumeId.parse(identity)) is not None and asked.is_anothers(parsed):
        return f"its PersistentVolume names another node than {asked.node}"
    return ""


def _in_no_group(asked: Asked) -> str:
    return f"it is in no volume group of node {asked.node}"


# Rules by the fields of a message.
Fields = Mapping[str, Rule]


def _in(path: str, *fields: Fields) -> Fields:
    """Rules of a message's fields, as the rules of what has the message in a field."""
    return {f"{path}.{key}": rule for each in fields for key, rule in each.items()}


_VOLUME: Fields = {
    "volume_id": its_own(ids.VOLUME_PREFIX),
    "capacity_bytes": not_negative,
    "volume_context": a_context,
    # Where it came from, for a person: it may have moved to another node since.
    "content_source": its_word,
    "accessible_topology": own_topology,
}
_SNAPSHOT: Fields = {
    "snapshot_id": its_own(ids.SNAPSHOT_PREFIX),
    "source_volume_id": beside("snapshot_id"),
    "size_bytes": not_negative,
    "creation_time": a_time,
    "ready_to_use": its_word,
    "group_snapshot_id": group_snapshot_or_none,
    "accessible_topology": own_topology,
}
_STATUS: Fields = {"published_node_ids": itself_only}
_PAGE: Fields = {"entries": a_page, "next_token": advances}
_MEMBER: Fields = {**_SNAPSHOT, "group_snapshot_id": of_its_group_snapshot}
_BLOCKS: Fields = {
    "block_metadata_type": its_word,
    "volume_capacity_bytes": not_negative,
    "block_metadata": ranges,
}

# By service and RPC: the rule of each field of the answer. A list's entries have `[]`.
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
        "ValidateVolumeCapabilities": {"confirmed": its_word, "message": its_word},
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
            "volume_health.volume_id": the_asked("volume_id"),
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
                "source_volume_id": the_asked("source_volume_id"),
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
        "GetSnapshot": _in("snapshot", _SNAPSHOT, {"snapshot_id": the_asked("snapshot_id")}),
        "ControllerExpandVolume": {
            "capacity_bytes": asked_size,
            "node_expansion_required": its_word,
        },
        "ControllerGetVolume": {
            **_in("volume", _VOLUME, {"volume_id": the_asked("volume_id")}),
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
                "ready_to_use": its_word,
            },
            _in("snapshots[]", _MEMBER, {"snapshot_id": member_as_asked}),
        ),
        "DeleteVolumeGroupSnapshot": {},
        "GetVolumeGroupSnapshot": _in(
            "group_snapshot",
            {
                "group_snapshot_id": the_asked("group_snapshot_id"),
                "snapshots": one_of_each("snapshot_id", "snapshot_ids"),
                "creation_time": a_time,
                "ready_to_use": its_word,
            },
            _in("snapshots[]", _MEMBER),
        ),
    },
    "csi.v1.SnapshotMetadata": {"GetMetadataAllocated": _BLOCKS, "GetMetadataDelta": _BLOCKS},
}


@dataclass(frozen=True)
class Row:
    """The rules of an RPC's answer, by the messages that have the fields."""

    answer: type[Message]
    # The fields of the request that have ids, by the fields that lead to their message.
    identities: Sequence[tuple[Sequence[str], str]]
    parts: Mapping[tuple[str, ...], Sequence[tuple[str, Rule]]]
    most_bytes: int

    @classmethod
    def of(cls, service: str, method: str) -> "Row":
        """The row of an RPC. Raises KeyError for one without rules."""
        parts: dict[tuple[str, ...], list[tuple[str, Rule]]] = {}
        for path, rule in RULES[service][method].items():
            *steps, key = path.split(".")
            if rule is not its_word:
                parts.setdefault(tuple(steps), []).append((key, rule))
        request = routes.request_class(service, method).DESCRIPTOR
        identities = tuple(_identities(request, ()))
        answer = routes.response_class(service, method)
        is_list = "entries" in answer.DESCRIPTOR.fields_by_name
        return cls(answer, identities, parts, MOST_PAGE_BYTES if is_list else _MOST_BYTES)

    def judge(self, asked: Asked, data: bytes) -> Any:
        """The answer that has these bytes. Raises Untrue.

        The rules run in the event loop, so bytes and elements are counted before any is looked at:
        the rule of a list comes before those of its elements, and begins with its length.
        """
        if len(data) > self.most_bytes:
            raise Untrue("the answer", data, f"it has more than {self.most_bytes} bytes")
        try:
            answer = asked.answer = self.answer.FromString(data)
        except DecodeError:
            raise Untrue("the answer", data, "it cannot be read") from None
        for steps, key in self.identities:
            for part in _parts(asked.request, steps):
                self._judge_asked(getattr(part, key), asked, key)
        for steps, rules in self.parts.items():
            for part in _parts(answer, steps):
                asked.part = part
                for key, rule in rules:
                    value = getattr(part, key)
                    if problem := rule(value, asked):
                        raise Untrue(".".join((*steps, key)), value, problem)
        if isinstance(answer, csi.ControllerListVolumeHealthResponse):
            _leave_out(answer, asked)
        return answer

    @staticmethod
    def _judge_asked(value: Any, asked: Asked, key: str) -> None:
        """Raise Untrue where the node has carried out what is about another's volume."""
        for one in [value] if isinstance(value, str) else value:
            # What is no id is no volume's: to delete it is done.
            if VolumeId.parse(one) is not None and (problem := _not_there(one, asked)):
                raise Untrue(f"the request's {key}", one, problem)


def _leave_out(answer: csi.ControllerListVolumeHealthResponse, asked: Asked) -> None:
    """Leave out the health of volumes that another node has by now: that one says it.

    A node goes on to say that the volumes of a group are missing which was attached to another.
    """
    every = [(one, parsed) for one in answer.entries if (parsed := VolumeId.parse(one.volume_id))]
    asked.left_out = [parsed for _, parsed in every if asked.is_elsewhere(parsed)]
    own = [one for one, parsed in every if parsed not in asked.left_out]
    if len(own) < len(answer.entries):
        kept = [one.SerializeToString() for one in own]
        del answer.entries[:]
        answer.entries.extend(map(csi.VolumeHealth.FromString, kept))


def _identities(message: Any, steps: Sequence[str]) -> Iterator[tuple[Sequence[str], str]]:
    """The fields of a request that have ids of volumes, snapshots or group snapshots."""
    for one in message.fields:
        if one.message_type is not None:
            if one.message_type.full_name.startswith("csi.v1.VolumeContentSource"):
                yield from _identities(one.message_type, (*steps, one.name))
        elif one.name.endswith(("volume_id", "snapshot_id", "volume_ids", "snapshot_ids")):
            yield steps, one.name


def _parts(message: Any, steps: Sequence[str]) -> Sequence[Any]:
    """The messages to which fields lead; those of a list each."""
    found = [message]
    for step in steps:
        name = step.removesuffix("[]")
        values = [getattr(one, name) for one in found]
        found = values if name == step else [each for one in values for each in one]
    return found

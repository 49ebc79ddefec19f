"""Volumes and snapshots as records: what LVM's report and their tags say of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agent.core import ids, tag
from agent.core.ids import VolumeId
from lvm import names, report, tags
from lvm.layout import LINEAR, Layout

# What a snapshot was taken of, where neither its tags nor lvm2 know; no logical volume's name.
UNKNOWN = "unknown"
# What is no volume any more, or not yet.
_UNLISTED = (tag.WIPING, tag.COPYING, tag.RECEIVING, tag.MOVED)


@dataclass(frozen=True)
class Volume:
    """A volume that Carver made: what LVM says of it, and its tags."""

    id: VolumeId
    group: report.Group
    name: str
    size_bytes: int
    own_tags: Mapping[str, str]
    health: str = ""
    read_only: bool = False

    @property
    def layout(self) -> Layout:
        """How it lies on disks, as its class said when it was made.

        Where that is lost, the report tells at least whether it lies in a pool.
        """
        logical = self.group.volumes.get(self.name)
        plain = Layout("thin") if logical is not None and logical.pool else LINEAR
        try:
            return Layout.parse(self.own_tags.get(tag.LAYOUT) or str(plain))
        except (ValueError, KeyError, TypeError):
            return plain

    @property
    def made_bytes(self) -> int:
        """The size that it was made with."""
        return _number(self.own_tags, tag.SIZE) or self.size_bytes

    @property
    def on_disks(self) -> report.LogicalVolume:
        """What of it lies on disks, and has a cache if any has: itself, or its pool."""
        return _lies_on(self.group, self.group.volume(self.name))

    @property
    def missing_disks(self) -> list[str]:
        """The UUIDs of the disks that are missing, and a part of it lies on.

        One that was made since the report is on none.
        """
        logical = self.group.volumes.get(self.name)
        disks = _lies_on(self.group, logical).disks if logical is not None else frozenset()
        return sorted(one.uuid for one in self.group.disks if one.missing and one.uuid in disks)

    @property
    def copy_on_write_snapshots(self) -> list[str]:
        """The ids of its copy-on-write snapshots, which are nothing without it."""
        every = self.group.copy_on_write_of(self.name)
        return sorted(str(VolumeId.of(self.group, one.name)) for one in every)

    @property
    def kept_snapshots(self) -> list[str]:
        """Those of them that were not deleted."""
        every = self.group.copy_on_write_of(self.name)
        kept = (one for one in every if tags.decode(one.tags).get(tag.STATE) != tag.WIPING)
        return sorted(str(VolumeId.of(self.group, one.name)) for one in kept)

    @property
    def wanted_bytes(self) -> int:
        """How large it shall be when it is staged next; 0 where it is as large as is on record."""
        wanted = _number(self.own_tags, tag.WANTED)
        return wanted if wanted > self.size_bytes else 0

    @property
    def refused_bytes(self) -> int:
        """The size that the last expansion asked for and could not give; 0 where there is none.

        If the volume has that size, its file system or its open LUKS mapping does not.
        """
        return _number(self.own_tags, tag.REFUSED)

    @property
    def is_encrypted(self) -> bool:
        """Whether it lies encrypted in its logical volume; also where a tag of that is lost."""
        return is_encrypted(self.own_tags)

    @property
    def claim(self) -> str:
        """The claim that it is for, namespace/name; empty where nobody told."""
        told = (self.own_tags.get(tag.NAMESPACE), self.own_tags.get(tag.PVC))
        return "/".join(filter(None, told))

    @property
    def is_copied(self) -> bool:
        """Whether what it holds was another's first, with that one's ids: by a copy, a stream."""
        return bool({tag.FROM, tag.RECEIVED} & self.own_tags.keys())

    @property
    def header_bytes(self) -> int:
        """How much of its logical volume its header takes, which is none of what a caller has."""
        return _number(self.own_tags, tag.HEADER)

    @property
    def capacity_bytes(self) -> int:
        """How large it is to who uses it."""
        return self.size_bytes - self.header_bytes

    @property
    def is_ephemeral(self) -> bool:
        """Whether it is an inline volume, which no CreateVolume made and no DeleteVolume ends."""
        return tag.EPHEMERAL in self.own_tags

    @property
    def is_listed(self) -> bool:
        """Whether it is a volume for the callers of the Controller."""
        return self.own_tags.get(tag.STATE) not in _UNLISTED and not self.is_ephemeral

    @property
    def is_half_made(self) -> bool:
        """Whether it is a RAID over whose making lvm2 died: it was never active, and cannot be.

        So nobody ever wrote to it. Of one that was, and gets other images or more, one of the first
        is whole.
        """
        layout = self.layout
        if not layout.is_raid or not self.group.is_bare(self.name, layout.disks):
            return False
        return self.copying or not {tag.FORMATTED, tag.SEALED} & self.own_tags.keys()

    @property
    def copying(self) -> bool:
        """Whether it has not yet what it shall be made of; then it is no volume yet."""
        return self.own_tags.get(tag.STATE) == tag.COPYING

    @property
    def receiving(self) -> bool:
        """Whether it comes as a stream, and is not finished; then it is no volume yet."""
        return self.own_tags.get(tag.STATE) == tag.RECEIVING

    @property
    def moved(self) -> bool:
        """Whether it is another node's now, and kept here until that is final."""
        return self.own_tags.get(tag.STATE) == tag.MOVED

    @property
    def content_bytes(self) -> int:
        """Of one that comes as a stream: the bytes of what it holds whole; 0 before."""
        return _number(self.own_tags, tag.CONTENT)

    @property
    def offset_bytes(self) -> int:
        """Of one that comes as a stream: up to which byte it is there."""
        return _number(self.own_tags, tag.OFFSET)

    @property
    def wiping(self) -> bool:
        """Whether it was deleted, and only its wiping is left to do."""
        return self.own_tags.get(tag.STATE) == tag.WIPING


@dataclass(frozen=True)
class Snapshot:
    """A volume as it was once. `size_bytes` is the volume's then, `area_bytes` its own."""

    id: VolumeId
    group: report.Group
    name: str
    source_id: VolumeId
    size_bytes: int
    time_nanoseconds: int
    area_bytes: int
    own_tags: Mapping[str, str]
    overflowed: bool | None = False
    pool: str = ""

    @property
    def capacity_bytes(self) -> int:
        """How large the volume was to who used it."""
        return self.size_bytes - self.header_bytes

    @property
    def header_bytes(self) -> int:
        """How much of it is the volume's header, by its tags."""
        return _number(self.own_tags, tag.HEADER)

    @property
    def is_encrypted(self) -> bool:
        """Whether the volume lies encrypted in its logical volume, and so the snapshot does."""
        return is_encrypted(self.own_tags)

    @property
    def sequence(self) -> int:
        """Its number in the order of the group's snapshots; 0 where Carver 0.1.0 took it."""
        return _number(self.own_tags, tag.SEQUENCE)

    @property
    def is_thin(self) -> bool:
        """Whether it shares a pool with its source, and does not need it any more."""
        return bool(self.pool)

    @property
    def is_bridge(self) -> bool:
        """Whether it is there only for a volume to be copied from it."""
        return names.is_of(ids.BRIDGE_PREFIX, self.name)

    @property
    def is_ready(self) -> bool:
        """Whether something can be made of it; not where its disk does not tell."""
        return self.overflowed is False

    @property
    def group_snapshot_id(self) -> str:
        """The group snapshot that it was taken for; empty where it was taken alone."""
        return self.own_tags.get(tag.GROUP_SNAPSHOT, "")

    @property
    def problem(self) -> str:
        """Why nothing can be made of it, now and for ever; empty where something can."""
        if not self.overflowed:
            return ""
        return (
            f"its area of {self.area_bytes} bytes for what {self.source_id} overwrites was full,"
            " and what it held is lost"
        )


def key_generation(own_tags: Mapping[str, str]) -> str:
    """The name of the only key that opens what is encrypted; in brackets, why there is none."""
    if tag.ROTATING in own_tags:
        return "(rotating)"
    return own_tags.get(tag.KEY_GENERATION, "(unnamed)")


def is_encrypted(own_tags: Mapping[str, str]) -> bool:
    """Whether the tags are of what lies encrypted; also where one that says so is lost."""
    return bool({tag.ENCRYPTION, tag.HEADER, tag.SEALED} & own_tags.keys())


def volume(group: report.Group, logical: report.LogicalVolume) -> Volume | None:
    """The volume that a logical volume is; None where it is none of Carver's."""
    own_tags = tags.decode(logical.tags)
    prefixes = (ids.VOLUME_PREFIX, ids.INLINE_PREFIX)
    if tag.NAME not in own_tags or not any(names.is_of(one, logical.name) for one in prefixes):
        return None
    if names.is_part(logical.name):
        # lvm2 gives the tags of a RAID to its parts, too.
        return None
    return _as_volume(group, logical, own_tags)


def remains(group: report.Group, logical: report.LogicalVolume) -> Volume | None:
    """What is left of a snapshot that was parted from its origin, or did not come to have one.

    Its area holds what the origin held once, and is nobody's: being there is its record. So it is
    of what a volume was to grow by.
    """
    own_tags = tags.decode(logical.tags)
    is_left = _is_snapshot(logical.name) or names.is_of(ids.GROWTH_PREFIX, logical.name)
    # Deleted while a disk was missing, and so not parted.
    is_deferred = own_tags.get(tag.STATE) == tag.WIPING
    if tag.NAME not in own_tags or not is_left:
        return None
    if (logical.origin or logical.pool) and not is_deferred:
        return None
    return _as_volume(group, logical, {**own_tags, tag.STATE: tag.WIPING})


def snapshot(group: report.Group, logical: report.LogicalVolume) -> Snapshot | None:
    """The snapshot that a logical volume is, if it is one and has what it was taken of."""
    own_tags = tags.decode(logical.tags)
    if tag.NAME not in own_tags or not _is_snapshot(logical.name):
        return None
    if not (logical.origin or logical.pool) or own_tags.get(tag.STATE) == tag.WIPING:
        return None
    return Snapshot(
        id=VolumeId.of(group, logical.name),
        group=group,
        name=logical.name,
        source_id=VolumeId.of(group, own_tags.get(tag.SOURCE) or logical.origin or UNKNOWN),
        size_bytes=_number(own_tags, tag.SIZE)
        or group.volumes.get(logical.origin, logical).size_bytes,
        time_nanoseconds=_number(own_tags, tag.TIME),
        area_bytes=logical.size_bytes,
        own_tags=own_tags,
        overflowed=logical.overflowed,
        pool=logical.pool,
    )


def snapshots_of(volume: Volume) -> Iterator[Snapshot]:
    """The snapshots of a volume, in the report that the volume is of."""
    every = (snapshot(volume.group, one) for one in volume.group.made_of(volume.name))
    return (one for one in every if one is not None and one.source_id == volume.id)


def next_sequence(group: report.Group) -> int:
    """The number of the next snapshot in a group, which the caller holds: above all that are there.

    The report must be one that was read within.
    """
    own_tags = (tags.decode(one.tags) for one in group.volumes.values())
    return 1 + max((_number(one, tag.SEQUENCE) for one in own_tags), default=0)


def is_older(one: Snapshot, other: Snapshot | Volume) -> bool | None:
    """Whether a snapshot was taken before another of its volume; None where that is not known.

    The clock has no say: it may have stepped in between. Where one has no number, by 0.1.0, a pool
    knows the order of what is in it.
    """
    if isinstance(other, Volume):
        return True
    if one.sequence and other.sequence:
        numbers: tuple[int | None, int | None] = (one.sequence, other.sequence)
    elif one.pool and one.pool == other.pool:
        numbers = (_thin_id(one), _thin_id(other))
    else:
        return None
    first, second = numbers
    if first is None or second is None or first == second:
        return None
    return first < second


def remains_of(snapshot: Snapshot, *, parted: bool = True) -> Volume:
    """What is left of a snapshot that is deleted: read-only, to be wiped once it is parted."""
    own_tags = {**snapshot.own_tags, tag.STATE: tag.WIPING}
    group, logical = snapshot.group, snapshot.group.volumes.get(snapshot.name)
    if parted and logical is not None:
        # The report is of before.
        alone = replace(logical, origin="")
        group = replace(group, volumes={**group.volumes, snapshot.name: alone})
    return Volume(snapshot.id, group, snapshot.name, snapshot.area_bytes, own_tags, read_only=True)


def _as_volume(
    group: report.Group, logical: report.LogicalVolume, own_tags: Mapping[str, str]
) -> Volume:
    return Volume(
        VolumeId.of(group, logical.name),
        group,
        logical.name,
        logical.size_bytes,
        own_tags,
        health=logical.health or _lies_on(group, logical).health,
        read_only=logical.read_only,
    )


def _is_snapshot(name: str) -> bool:
    return names.is_of(ids.SNAPSHOT_PREFIX, name) or names.is_of(ids.BRIDGE_PREFIX, name)


def _lies_on(group: report.Group, logical: report.LogicalVolume) -> report.LogicalVolume:
    """What of a volume lies on disks: itself, or its pool."""
    return group.volumes.get(logical.pool, logical)


def places_of(volumes: Sequence[Volume]) -> str:
    """What is kept of the groups that volumes are in."""
    return ",".join(sorted({place_of(str(one.id)) for one in volumes}))


def place_of(identity: str) -> str:
    """The group in an id: its name and the start of its UUID."""
    return identity.partition("/")[0]


def is_whole(members: Sequence[Snapshot]) -> bool:
    """Whether these snapshots of a group are all that it has."""
    return bool(members) and len(members) == max(
        _number(one.own_tags, tag.MEMBERS) for one in members
    )


def _thin_id(snapshot: Snapshot) -> int | None:
    logical = snapshot.group.volumes.get(snapshot.name)
    return None if logical is None else logical.thin_id


def _number(own_tags: Mapping[str, str], key: str) -> int:
    """A tag that is a number; 0 where it is lost, or someone wrote something else."""
    told = own_tags.get(key, "")
    return int(told) if told.isascii() and told.isdigit() else 0

"""Volumes and snapshots as records: each from LVM's report and Carver's own tags."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.requests.requests import BLOCK, MOUNT
from agent.volumes import backing, volume_states
from agent.volumes.backing import Backing
from agent.volumes.volume_states import Ender
from lvm import caches, layout, names, report, tags
from lvm.layout import Layout

# The source of a snapshot, where neither its tags nor lvm2 have it; no logical volume's name.
UNKNOWN = "unknown"

_READ_ONLY, _READ_WRITE = "ro", "rw"


@dataclass(frozen=True)
class Attachment:
    """How a volume is attached (ControllerPublishVolume): access, access mode, node.

    Nothing is connected: it is a record, which ControllerUnpublishVolume removes.
    """

    access: str
    mode: str
    read_only: bool
    node_id: str

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a tag's value; None for what is none."""
        access, mode, writes, node_id = (text.split(":", 3) + [""] * 3)[:4]
        if not node_id or writes not in (_READ_ONLY, _READ_WRITE):
            return None
        return cls(access, mode, writes == _READ_ONLY, node_id)

    def __str__(self) -> str:
        writes = _READ_ONLY if self.read_only else _READ_WRITE
        return f"{self.access}:{self.mode}:{writes}:{self.node_id}"


@dataclass(frozen=True)
class Volume:
    """A volume that Carver made. `own_tags` are decoded; sizes are in bytes.

    `id` is what callers name the volume by, for its whole life. `backing` is the logical volume
    that has its data now: devices are found by it, and commands name it. Both are put together
    where a record is made, and no other code takes one for the other.
    """

    id: VolumeId
    backing: Backing
    group: report.Group
    size_bytes: int
    own_tags: Mapping[str, str]
    health: str = ""
    read_only: bool = False

    @property
    def name(self) -> str:
        """The name of the logical volume that backs it."""
        return self.backing.name

    @property
    def layout(self) -> Layout:
        """Its layout by lvm2's report, and by its tag where lvm2 reports no other.

        That is while it is newer than the report, and below a cache, of which alone lvm2 tells. It
        decides where a volume grows and what that takes, so it is never a guess. Raises
        LayoutUnknown.
        """
        text = self.own_tags.get(tag.LAYOUT, "")
        found, logical = Layout.parse(text), self.group.volumes.get(self.name)
        if logical is not None and not caches.is_cached(logical):
            found = layout.actual(logical, found)
        if found is None:
            words = sorted(logical.layout) if logical is not None else ()
            raise errors.LayoutUnknown(str(self.id), text, words)
        return found

    @property
    def is_thin(self) -> bool:
        """Whether it lies in a pool: by lvm2's report, or by its tag while it is newer."""
        logical = self.group.volumes.get(self.name)
        return bool(logical.pool) if logical is not None else self.layout.is_thin

    @property
    def has_cache(self) -> bool:
        """Whether a cache holds data of it, be it parted: by lvm2, or by its tag while it is newer.

        The tag says what was wanted; an operator may have given it a cache, or taken that away.
        """
        logical = self.group.volumes.get(self.name)
        if logical is None:
            return tag.CACHE in self.own_tags
        return caches.is_cached(logical) or bool(caches.detached_cachevol(self.group, self.name))

    @property
    def made_bytes(self) -> int:
        """The size that it was created with."""
        return _number(self.own_tags, tag.SIZE) or self.size_bytes

    @property
    def requested_bytes(self) -> int:
        """The size that its caller asked for; its capacity where that is not known."""
        return requested_bytes(self.own_tags, self.size_bytes) or self.capacity_bytes

    @property
    def on_disks(self) -> report.LogicalVolume:
        """The logical volume that has disks and perhaps a cache: itself, or its pool."""
        return _lies_on(self.group, self.group.volume(self.name))

    @property
    def missing_disks(self) -> list[str]:
        """The UUIDs of its missing disks; none for a volume that is newer than the report."""
        logical = self.group.volumes.get(self.name)
        disks = _lies_on(self.group, logical).disks if logical is not None else frozenset()
        return sorted(one.uuid for one in self.group.disks if one.missing and one.uuid in disks)

    @property
    def copy_on_write_snapshots(self) -> list[str]:
        """The ids of its copy-on-write snapshots, which lvm2 removes with it."""
        every = self.group.copy_on_write_of(self.name)
        return sorted(str(VolumeId.of(self.group, one.name)) for one in every)

    @property
    def kept_snapshots(self) -> list[str]:
        """The ids of its copy-on-write snapshots that were not deleted."""
        every = self.group.copy_on_write_of(self.name)
        kept = (one for one in every if not volume_states.is_deleted_snapshot(one))
        return sorted(str(VolumeId.of(self.group, one.name)) for one in kept)

    @property
    def wanted_bytes(self) -> int:
        """The size to grow to when it is staged next; 0 for none."""
        wanted = _number(self.own_tags, tag.WANTED)
        return wanted if wanted > self.size_bytes else 0

    @property
    def refused_bytes(self) -> int:
        """The size that the last expansion could not reach; 0 for none.

        If the volume has that size, its file system or its open LUKS mapping does not.
        """
        return _number(self.own_tags, tag.REFUSED)

    def attachment_to(self, node_id: str) -> Attachment | None:
        """How it is attached to a node; None where it is not, as after its disks moved on."""
        found = Attachment.parse(self.own_tags.get(tag.ATTACHED, ""))
        return found if found is not None and found.node_id == node_id else None

    @property
    def is_block(self) -> bool:
        """Whether it was made for raw block access; raises TagsDamaged where no tag says so."""
        return is_block(str(self.id), self.own_tags)

    @property
    def is_encrypted(self) -> bool:
        """Whether it is encrypted; also if one of the tags that say so is lost."""
        return is_encrypted(self.own_tags)

    @property
    def claim(self) -> str:
        """Its claim as namespace/name; empty if unknown."""
        return "/".join(filter(None, map(self.own_tags.get, (tag.NAMESPACE, tag.PVC))))

    @property
    def is_copied(self) -> bool:
        """Whether its contents, and so their UUIDs, were copied or received."""
        return bool({tag.FROM, tag.RECEIVED} & self.own_tags.keys())

    @property
    def may_hold_btrfs(self) -> bool:
        """Whether its tags let it have a btrfs; a crash may have come before `formatted`."""
        return "btrfs" in (self.own_tags.get(tag.FORMATTED), self.own_tags.get(tag.FS_TYPE))

    @property
    def header_bytes(self) -> int:
        """The bytes of its LUKS2 header, at the start of its logical volume; 0 for none."""
        return _header_bytes(self.own_tags, self.size_bytes)

    def require_header_bytes(self) -> None:
        """Raise TagsDamaged where the bytes of a header that it has are lost.

        Its capacity is then less than it seems, and no size can be computed from what is asked for.
        """
        if self.is_encrypted and not self.header_bytes:
            lost = f"no `{tag.HEADER}`, which a stage of a volume that has been used writes again"
            raise errors.TagsDamaged(str(self.id), {lost})

    @property
    def capacity_bytes(self) -> int:
        """Its size as its users see it: without the header."""
        return self.size_bytes - self.header_bytes

    @property
    def is_ephemeral(self) -> bool:
        """Whether it is an inline volume, without CreateVolume and DeleteVolume."""
        return tag.EPHEMERAL in self.own_tags

    @property
    def is_listed(self) -> bool:
        """Whether the Controller service knows it as a volume."""
        return all(one.is_listed for one in volume_states.rows(self.own_tags))

    @property
    def ended_by(self) -> Ender:
        """What ends the state that its tags record."""
        return volume_states.ended_by(self.own_tags)

    @property
    def orphan(self) -> str:
        """What `carver orphans` calls it; empty where only what ends its state may remove it."""
        return volume_states.rows(self.own_tags)[0].orphan

    @property
    def is_doomed(self) -> bool:
        """Whether nothing of it is needed any more: only its removal is left."""
        return self.ended_by is Ender.ERASER

    @property
    def is_half_made(self) -> bool:
        """Whether lvm2 died while creating this RAID: it was never active, so it has no data.

        A RAID in use that gets other or more images has at least one whole image, so it is not. Nor
        is what was made as another layout, by its tag, and is being converted by hand: it has data.
        """
        recorded = Layout.parse(self.own_tags.get(tag.LAYOUT, ""))
        if recorded is not None and not recorded.is_raid:
            return False
        try:
            shape = self.layout
        except errors.LayoutUnknown:
            return False
        if not shape.is_raid or not self.group.is_bare(self.name, shape.disks):
            return False
        is_filled = self.ended_by is Ender.COPIER
        return is_filled or not {tag.FORMATTED, tag.SEALED} & self.own_tags.keys()

    @property
    def content_bytes(self) -> int:
        """While receiving: the size of the last complete contents; 0 before."""
        return _number(self.own_tags, tag.CONTENT)

    @property
    def offset_bytes(self) -> int:
        """While receiving: the bytes received so far."""
        return _number(self.own_tags, tag.OFFSET)


@dataclass(frozen=True)
class Snapshot:
    """A snapshot. `size_bytes` is its volume's then, `area_bytes` its COW store's.

    `id` and `backing` are as those of a `Volume`. `source_id` is the volume that callers took it
    of, `origin` the logical volume that a copy-on-write snapshot is activated with.
    """

    id: VolumeId
    backing: Backing
    group: report.Group
    source_id: VolumeId
    size_bytes: int
    time_nanoseconds: int
    area_bytes: int
    own_tags: Mapping[str, str]
    overflowed: bool | None = False
    pool: str = ""
    origin: str = ""

    @property
    def name(self) -> str:
        """The name of the logical volume that backs it."""
        return self.backing.name

    @property
    def capacity_bytes(self) -> int:
        """The volume's size as its users saw it: without the header."""
        return self.size_bytes - self.header_bytes

    @property
    def requested_bytes(self) -> int:
        """The size that the volume's caller asked for; its capacity where that is not known."""
        return requested_bytes(self.own_tags, self.size_bytes) or self.capacity_bytes

    @property
    def header_bytes(self) -> int:
        """The bytes of the volume's LUKS2 header; 0 for none."""
        return _header_bytes(self.own_tags, self.size_bytes)

    @property
    def is_encrypted(self) -> bool:
        """Whether the volume, and so the snapshot, is encrypted."""
        return is_encrypted(self.own_tags)

    @property
    def sequence(self) -> int:
        """Its number in the order of the group's snapshots; 0 where Carver 0.1.0 took it."""
        return _number(self.own_tags, tag.SEQUENCE)

    @property
    def is_thin(self) -> bool:
        """Whether it is in a thin pool, and so independent of its source."""
        return bool(self.pool)

    @property
    def is_bridge(self) -> bool:
        """Whether it exists only while a volume is copied from it."""
        return names.is_of(ids.BRIDGE_PREFIX, self.name)

    @property
    def copy_id(self) -> str:
        """The id of the volume that a bridge was taken for.

        Empty where a version took it that did not record this.
        """
        return self.own_tags.get(tag.COPY, "")

    @property
    def is_ready(self) -> bool:
        """Whether volumes can be made from it; not while its state is unknown."""
        return self.overflowed is False

    @property
    def group_snapshot_id(self) -> str:
        """Its group snapshot; empty for a single one."""
        return self.own_tags.get(tag.GROUP_SNAPSHOT, "")

    @property
    def problem(self) -> str:
        """Why it can never be used again; empty if it can."""
        if not self.overflowed:
            return ""
        return (
            f"its COW store of {self.area_bytes} bytes overflowed when {self.source_id} was written"
            " to, and its data are lost"
        )


def requested(asked_bytes: int, size_bytes: int, header_bytes: int) -> dict[str, str]:
    """The tag of a volume that is larger, without its header, than its caller asked for."""
    if not 0 < asked_bytes < size_bytes - header_bytes:
        return {}
    return {tag.REQUESTED: f"{asked_bytes}/{size_bytes}"}


def requested_bytes(own_tags: Mapping[str, str], size_bytes: int) -> int:
    """The bytes that were rounded up to this size, by the tag; 0 where there is none."""
    asked, _, given = own_tags.get(tag.REQUESTED, "").partition("/")
    return tags.number(asked) or 0 if given == str(size_bytes) else 0


_Record = TypeVar("_Record", Volume, Snapshot)


@dataclass(frozen=True)
class Newer(Generic[_Record]):
    """A volume or snapshot that this version must not use: what it `needs`, or its tags' `faults`.

    No call uses it, no background work continues it. It is listed as `shown`, and what it stands on
    stays. Records are made here alone, so that no reader can forget it.
    """

    shown: _Record
    needs: frozenset[str]
    faults: frozenset[str] = frozenset()

    @property
    def problem(self) -> errors.AgentError:
        """Why it must not be used."""
        if self.needs:
            return errors.NeedsOther(str(self.shown.id), self.needs)
        return errors.TagsDamaged(str(self.shown.id), self.faults)


def to_use(either: _Record | Newer[_Record]) -> _Record:
    """A volume or snapshot; raises NeedsOther or TagsDamaged for one that must not be used."""
    if isinstance(either, Newer):
        raise either.problem
    return either


# Keys of which one value must not be chosen among several: what is done to data goes by them.
_DECIDING = frozenset(
    {
        *(tag.NAME, tag.STATE, tag.CLASS, tag.LAYOUT, tag.ACCESS, tag.EPHEMERAL, tag.ADOPTED),
        *(tag.FROM, tag.BRIDGE, tag.COPY, tag.ZERO, tag.CACHE, tag.GIVEN_UP, tag.CHUNK),
        *(tag.ENCRYPTION, tag.HEADER, tag.SEALED, tag.SHARED_KEY, tag.FORMATTED),
        # How much of a volume is filled, and of a snapshot copied; which snapshot is older; whether
        # a copy may hold a btrfs.
        *(tag.SIZE, tag.SEQUENCE, tag.FS_TYPE),
        *(tag.SOURCE, tag.GROUP_SNAPSHOT, tag.MEMBERS, tag.MEMBER_GROUPS),
        *(tag.RECEIVED, tag.CHAIN, tag.INTO, tag.OFFSET, tag.RELEASE, tag.FINISHING),
        *(tag.RELEASED, tag.MOVE_TO, tag.MOVE_WORD),
    }
)


def faults(logical: report.LogicalVolume) -> frozenset[str]:
    """What of Carver's tags no version writes so: some were lost, or changed by hand.

    Such a volume is neither completed nor erased: either might be wrong.
    """
    own_tags = logical.own_tags
    found = set()
    # Others' tags are few, and most volumes have none.
    if len(logical.tags) > len(own_tags):
        found = {f"`{key}` twice" for key in tags.doubled(logical.tags) & _DECIDING}
    return frozenset({*found, *volume_states.faults(own_tags)})


def every(group: report.Group) -> Iterator[report.LogicalVolume]:
    """All logical volumes of a group, to be shown and counted, never to be changed.

    Those of others are among them, and those that only newer versions know.
    """
    yield from group.volumes.values()


def usable(group: report.Group) -> Iterator[report.LogicalVolume]:
    """Carver's logical volumes and pools that this version may change."""
    return (one for one in every(group) if is_usable(group, one))


def is_usable(group: report.Group, logical: report.LogicalVolume) -> bool:
    """Whether it has tags of Carver's, and this version may change it."""
    return bool(logical.own_tags) and not (_needs(group, logical) or faults(logical))


def reservation_name(name: str) -> str:
    """The logical volume that reserves the extents by which a volume grows."""
    return names.logical_volume(ids.GROWTH_PREFIX, name)


def reservation(group: report.Group, name: str) -> report.LogicalVolume | None:
    """The extents that Carver reserved for the growth of a volume; None where there are none.

    A name alone proves nothing: it has the tags of what is to be erased, as every version made it.
    """
    found = group.volumes.get(reservation_name(name))
    if found is None or not is_usable(group, found):
        return None
    own_tags = found.own_tags
    is_reserved = tag.NAME in own_tags and volume_states.is_recorded(own_tags, Ender.ERASER)
    return found if is_reserved and not (found.origin or found.pool) else None


def unknown_needs(logical: report.LogicalVolume) -> frozenset[str]:
    """What this version would have to know, and does not, to use a logical volume or pool."""
    if tag.NEEDS not in logical.own_tags:
        return frozenset()
    needs = ",".join(tags.values(logical.tags, tag.NEEDS)).split(",")
    return frozenset(filter(None, needs)) - tag.KNOWN_NEEDS


def _guarded(
    group: report.Group, logical: report.LogicalVolume, made: _Record
) -> _Record | Newer[_Record]:
    """The record, or the one that says that this version must not use it, or its pool."""
    needs, wrong = _needs(group, logical), faults(logical)
    return Newer(made, needs, wrong) if needs or wrong else made


def _needs(group: report.Group, logical: report.LogicalVolume) -> frozenset[str]:
    """What this version lacks for a logical volume, or for the pool that it lies in."""
    needs = unknown_needs(logical)
    if logical.pool in group.volumes:
        needs |= unknown_needs(group.volumes[logical.pool])
    return needs


def key_generation(own_tags: Mapping[str, str]) -> str:
    """The name of the only valid key; in brackets, why there is none."""
    if tag.ROTATING in own_tags:
        return "(rotating)"
    return own_tags.get(tag.KEY_GENERATION, "(unnamed)")


def is_block(identity: str, own_tags: Mapping[str, str]) -> bool:
    """Whether a volume, or a snapshot's volume, with these tags was made for raw block access.

    Never a guess: a raw block volume may hold what no probe knows, and would be formatted. One that
    was formatted is none. Raises TagsDamaged where the tag is lost, or has another value.
    """
    if not may_be_block(own_tags):
        return False
    if own_tags.get(tag.ACCESS) != BLOCK:
        raise errors.TagsDamaged(identity, {"no `access`"})
    return True


def may_be_block(own_tags: Mapping[str, str]) -> bool:
    """Whether a volume with these tags may hold what no probe knows: see `is_block`."""
    access = own_tags.get(tag.ACCESS)
    return access == BLOCK or (access != MOUNT and tag.FORMATTED not in own_tags)


def is_encrypted(own_tags: Mapping[str, str]) -> bool:
    """Whether tags are of an encrypted volume; also if one that says so is lost."""
    return bool({tag.ENCRYPTION, tag.HEADER, tag.SEALED} & own_tags.keys())


def volume(group: report.Group, logical: report.LogicalVolume) -> Volume | Newer[Volume] | None:
    """A logical volume as a volume; None if Carver did not make it."""
    own_tags = logical.own_tags
    prefixes = (ids.VOLUME_PREFIX, ids.INLINE_PREFIX)
    if tag.NAME not in own_tags or not any(names.is_of(one, logical.name) for one in prefixes):
        return None
    if names.is_part(logical.name):
        # lvm2 copies the tags of a RAID to its images.
        return None
    return _guarded(group, logical, _as_volume(group, logical, own_tags))


# The volumes of the state of each group that was asked for last, by the group's name.
_last_volumes: dict[str, tuple[report.Group, Sequence[Volume | Newer[Volume]]]] = {}


def volumes_of(group: report.Group) -> Sequence[Volume | Newer[Volume]]:
    """The volumes of a group; found once for each of its states, as lists are frequent.

    A state is the same object until something changes in the group.
    """
    state, own = _last_volumes.get(group.name, (None, ()))
    if state is not group:
        own = tuple(one for one in (volume(group, one) for one in every(group)) if one is not None)
        _last_volumes[group.name] = (group, own)
    return own


def named(group: report.Group, name: str, prefix: str = ids.VOLUME_PREFIX) -> Volume | None:
    """The volume of a group that the CO calls `name`; raises NeedsOther, TagsDamaged."""
    logical = group.volumes.get(names.logical_volume(prefix, name))
    either = None if logical is None else volume(group, logical)
    return None if either is None else to_use(either)


def remains(group: report.Group, logical: report.LogicalVolume) -> Volume | Newer[Volume] | None:
    """A logical volume as one to erase; None if it is not.

    It is a snapshot that was split from its origin, or killed before it got one, or extents that a
    volume was to grow by. Its existence records that its data must be erased.
    """
    own_tags = logical.own_tags
    is_so = _is_snapshot(logical.name) or names.is_of(ids.GROWTH_PREFIX, logical.name)
    if tag.NAME not in own_tags or not is_so or not volume_states.is_deleted_snapshot(logical):
        return None
    made = _as_volume(group, logical, {**own_tags, **volume_states.tags_for(Ender.ERASER)})
    return _guarded(group, logical, made)


def snapshot(
    group: report.Group, logical: report.LogicalVolume
) -> Snapshot | Newer[Snapshot] | None:
    """A logical volume as a snapshot; None if it is not, or has neither origin nor pool."""
    own_tags = logical.own_tags
    if tag.NAME not in own_tags or not _is_snapshot(logical.name):
        return None
    if volume_states.is_deleted_snapshot(logical):
        return None
    made = Snapshot(
        id=VolumeId.of(group, logical.name),
        backing=backing.of(group, logical.name),
        group=group,
        source_id=VolumeId.of(group, own_tags.get(tag.SOURCE) or logical.origin or UNKNOWN),
        size_bytes=_number(own_tags, tag.SIZE) or _shown_bytes(group, logical),
        time_nanoseconds=_number(own_tags, tag.TIME),
        area_bytes=logical.size_bytes,
        own_tags=own_tags,
        overflowed=logical.overflowed,
        pool=logical.pool,
        origin=logical.origin,
    )
    return _guarded(group, logical, made)


def snapshots_of(volume: Volume) -> Iterator[Snapshot]:
    """The snapshots of a volume, by the volume's report."""
    every = (snapshot(volume.group, one) for one in volume.group.made_of(volume.name))
    return (one for one in every if isinstance(one, Snapshot) and one.source_id == volume.id)


def next_sequence(group: report.Group) -> int:
    """The number of the next snapshot in a group: above all that exist.

    The group's lock is held, and the report was read under it.
    """
    every_tag = (one for logical in every(group) for one in tags.values(logical.tags, tag.SEQUENCE))
    return 1 + max((tags.number(one) or 0 for one in every_tag), default=0)


def is_older(one: Snapshot, other: Snapshot | Volume) -> bool | None:
    """Whether a snapshot is older than another of its volume; None if unknown.

    Times are not compared, since the clock may have been set. Snapshots of 0.1.0 have no number;
    in a pool, thin ids have their order.
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
    """A deleted snapshot as a read-only volume, to be erased once it is split from its origin."""
    own_tags = {**snapshot.own_tags, **volume_states.tags_for(Ender.ERASER)}
    group, logical = snapshot.group, snapshot.group.volumes.get(snapshot.name)
    if parted and logical is not None:
        # The report is older than the split.
        alone = replace(logical, origin="")
        group = replace(group, volumes={**group.volumes, snapshot.name: alone})
    return Volume(
        *(snapshot.id, snapshot.backing, group, snapshot.area_bytes, own_tags), read_only=True
    )


def _as_volume(
    group: report.Group, logical: report.LogicalVolume, own_tags: Mapping[str, str]
) -> Volume:
    return Volume(
        VolumeId.of(group, logical.name),
        backing.of(group, logical.name),
        group,
        logical.size_bytes,
        own_tags,
        health=logical.health or _lies_on(group, logical).health,
        read_only=logical.read_only,
    )


def _is_snapshot(name: str) -> bool:
    return names.is_of(ids.SNAPSHOT_PREFIX, name) or names.is_of(ids.BRIDGE_PREFIX, name)


def _lies_on(group: report.Group, logical: report.LogicalVolume) -> report.LogicalVolume:
    """The logical volume that lies on disks: itself, or its pool."""
    return group.volumes.get(logical.pool, logical)


def places_of(volumes: Sequence[Volume]) -> str:
    """The value of the tag MEMBER_GROUPS for these volumes."""
    return ",".join(sorted({place_of(str(one.id)) for one in volumes}))


def place_of(identity: str) -> str:
    """An id's group: name@uuid."""
    return identity.partition("/")[0]


def is_whole(members: Sequence[Snapshot]) -> bool:
    """Whether these are all snapshots of their group snapshot."""
    return bool(members) and len(members) == max(
        _number(one.own_tags, tag.MEMBERS) for one in members
    )


def _thin_id(snapshot: Snapshot) -> int | None:
    logical = snapshot.group.volumes.get(snapshot.name)
    return None if logical is None else logical.thin_id


def _shown_bytes(group: report.Group, snapshot: report.LogicalVolume) -> int:
    """The size of a snapshot's device: its own in a pool, else about that of its origin."""
    is_thin = bool(snapshot.pool)
    return (snapshot if is_thin else group.volumes.get(snapshot.origin, snapshot)).size_bytes


def _header_bytes(own_tags: Mapping[str, str], size_bytes: int) -> int:
    """The bytes of a LUKS2 header; 0 where the tag is lost, or has more than the volume."""
    found = _number(own_tags, tag.HEADER)
    return found if found < size_bytes else 0


def _number(own_tags: Mapping[str, str], key: str) -> int:
    """The number in a tag; 0 if it is lost or no number."""
    return tags.number(own_tags.get(key, "")) or 0

"""Records of volumes and snapshots, each made from lvm2's report and Carver's own tags."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, Self, TypeVar

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.requests.requests import BLOCK, MOUNT
from agent.volumes import backing, volume_states
from agent.volumes.backing import Backing
from agent.volumes.volume_states import EndedBy
from lvm import caches, layout, names, report, tags
from lvm.layout import Layout

# Name that stands for the source of a snapshot if neither the snapshot's tags nor lvm2's report say
# what it is. No logical volume has this name.
UNKNOWN = "unknown"

# Words in the tag ATTACHED: for a volume that is attached read-only, and for reading and writing.
_READ_ONLY, _READ_WRITE = "ro", "rw"


@dataclass(frozen=True)
class Attachment:
    """Record that a volume is attached to a node by ControllerPublishVolume, and for which access.

    No device is connected: an attachment is only a tag, which ControllerUnpublishVolume removes.
    """

    access: str
    mode: str
    read_only: bool
    node_id: str

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse the value of the tag ATTACHED; return None for a text that is no attachment."""
        access, mode, writes, node_id = (text.split(":", 3) + [""] * 3)[:4]
        if not node_id or writes not in (_READ_ONLY, _READ_WRITE):
            return None
        return cls(access, mode, writes == _READ_ONLY, node_id)

    def __str__(self) -> str:
        writes = _READ_ONLY if self.read_only else _READ_WRITE
        return f"{self.access}:{self.mode}:{writes}:{self.node_id}"


@dataclass(frozen=True)
class Volume:
    """Record of a volume that Carver made, or adopted. `own_tags` are decoded; sizes are in bytes.

    `id` is the name by which callers know the volume, for its whole life. `backing` is the logical
    volume that holds the data now: devices are found by the backing, and commands name it. Only the
    functions that make a record put both together; no other code takes one for the other.
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
        """Name of the logical volume that backs the volume."""
        return self.backing.name

    @property
    def layout(self) -> Layout:
        """Layout of the volume by lvm2's report, or by the volume's tag if lvm2 reports no layout.

        lvm2 reports no layout for a volume that is newer than the report, and for a volume with a
        cache, of which lvm2 reports the cache's layout alone. The layout decides where a volume
        grows and how many extents that takes, so it is never guessed. Raises LayoutUnknown if
        neither the report nor the tag has a layout that Carver makes.
        """
        text = self.own_tags.get(tag.LAYOUT, "")
        shape, logical = Layout.parse(text), self.group.volumes.get(self.name)
        if logical is not None and not caches.is_cached(logical):
            shape = layout.actual(logical, shape)
        if shape is None:
            words = sorted(logical.layout) if logical is not None else ()
            raise errors.LayoutUnknown(str(self.id), text, words)
        return shape

    @property
    def is_thin(self) -> bool:
        """Whether the volume is in a thin pool, by lvm2's report.

        For a volume that is newer than the report, the tag with its layout decides.
        """
        logical = self.group.volumes.get(self.name)
        return bool(logical.pool) if logical is not None else self.layout.is_thin

    @property
    def has_cache(self) -> bool:
        """Whether a cache holds data of the volume, even if the cache is detached now.

        lvm2's report decides. For a volume that is newer than the report, its tag decides. In other
        cases the tag only says what was requested: an operator may have attached or removed a cache
        since.
        """
        logical = self.group.volumes.get(self.name)
        if logical is None:
            return tag.CACHE in self.own_tags
        return caches.is_cached(logical) or bool(caches.detached_cachevol(self.group, self.name))

    @cached_property
    def made_bytes(self) -> int:
        """Size that the volume was created with, in bytes."""
        return _number(self.own_tags, tag.SIZE) or self.size_bytes

    @property
    def requested_bytes(self) -> int:
        """Size that the volume's caller asked for, in bytes; if unknown, the volume's capacity."""
        return requested_bytes(self.own_tags, self.size_bytes) or self.capacity_bytes

    @property
    def allocated_volume(self) -> report.LogicalVolume:
        """Logical volume whose extents hold the volume's data: its own, or its thin pool."""
        return _allocated_volume(self.group, self.group.volume(self.name))

    @property
    def missing_disks(self) -> list[str]:
        """UUIDs of the missing disks that hold data of the volume, or of its thin pool.

        None for a volume that is newer than the report.
        """
        logical = self.group.volumes.get(self.name)
        disks = _allocated_volume(self.group, logical).disks if logical is not None else frozenset()
        return sorted(disk.uuid for disk in self.group.disks if disk.missing and disk.uuid in disks)

    @property
    def copy_on_write_snapshots(self) -> list[str]:
        """Ids of the volume's copy-on-write snapshots; lvm2 removes them with the volume."""
        snapshots = self.group.copy_on_write_of(self.name)
        return sorted(str(VolumeId.of(self.group, logical.name)) for logical in snapshots)

    @property
    def kept_snapshots(self) -> list[str]:
        """Ids of the volume's copy-on-write snapshots that are not deleted, or being erased."""
        snapshots = self.group.copy_on_write_of(self.name)
        undeleted = (
            logical for logical in snapshots if not volume_states.is_deleted_snapshot(logical)
        )
        return sorted(str(VolumeId.of(self.group, logical.name)) for logical in undeleted)

    @property
    def wanted_bytes(self) -> int:
        """Size to which the volume is to grow when it is staged next, in bytes; 0 for no growth."""
        wanted_bytes = _number(self.own_tags, tag.WANTED)
        return wanted_bytes if wanted_bytes > self.size_bytes else 0

    @property
    def refused_bytes(self) -> int:
        """Size that the volume's last expansion did not reach, in bytes; 0 if it did.

        If the logical volume has that size, only its file system or its open LUKS mapping is still
        smaller.
        """
        return _number(self.own_tags, tag.REFUSED)

    def attachment_to(self, node_id: str) -> Attachment | None:
        """Return how the volume is attached to a node; None if it is not attached to that node.

        An attachment to another node may be recorded, for instance after the volume's disks were
        moved.
        """
        attachment = Attachment.parse(self.own_tags.get(tag.ATTACHED, ""))
        return attachment if attachment is not None and attachment.node_id == node_id else None

    @property
    def is_block(self) -> bool:
        """Whether the volume was made for raw block access.

        Raises TagsDamaged if the tags do not say for which access the volume was made.
        """
        return is_block(self.id, self.own_tags)

    @property
    def is_encrypted(self) -> bool:
        """Whether the volume is encrypted, also if one of the tags that say so is lost."""
        return is_encrypted(self.own_tags)

    @property
    def claim(self) -> str:
        """Kubernetes' PersistentVolumeClaim of the volume, as namespace/name; empty if unknown."""
        return "/".join(filter(None, map(self.own_tags.get, (tag.NAMESPACE, tag.PVC))))

    @property
    def is_copied(self) -> bool:
        """Whether the volume's contents were copied from another volume, or received.

        If so, its file system had the UUID of the source at first.
        """
        return bool({tag.FROM, tag.RECEIVED} & self.own_tags.keys())

    @property
    def may_hold_btrfs(self) -> bool:
        """Whether the volume may have a btrfs file system, by its tags.

        The file system of the StorageClass (tag `fsType`) counts as well as the tag `formatted`: a
        crash may have come after mkfs and before the tag `formatted` was written.
        """
        return "btrfs" in (self.own_tags.get(tag.FORMATTED), self.own_tags.get(tag.FS_TYPE))

    @property
    def header_bytes(self) -> int:
        """Size of the LUKS2 header at the start of the volume, by its tag, in bytes.

        0 if the volume has no header, or if the tag is lost.
        """
        return _header_bytes(self.own_tags, self.size_bytes)

    def require_header_bytes(self) -> None:
        """Raise TagsDamaged if the volume is encrypted, and the tag with the header's size is lost.

        The volume's capacity is then less than `capacity_bytes`, and the size of the logical volume
        cannot be computed from a requested capacity.
        """
        if self.is_encrypted and not self.header_bytes:
            lost_tag = (
                f"no `{tag.HEADER}`, which a stage of a volume that has been used writes again"
            )
            raise errors.TagsDamaged(str(self.id), {lost_tag})

    @property
    def capacity_bytes(self) -> int:
        """Size of the volume as its users see it, without the LUKS2 header, in bytes."""
        return self.size_bytes - self.header_bytes

    @property
    def is_ephemeral(self) -> bool:
        """Whether the volume is an inline volume, which has no CreateVolume and DeleteVolume."""
        return tag.EPHEMERAL in self.own_tags

    @property
    def is_listed(self) -> bool:
        """Whether the volume is in lists of volumes, such as that of ListVolumes, by its state."""
        return all(row.is_listed for row in volume_states.rows(self.own_tags))

    @property
    def ended_by(self) -> EndedBy:
        """Call, or part of Carver, that ends the state which the volume's tag `state` records."""
        return volume_states.ended_by(self.own_tags)

    @property
    def orphan(self) -> str:
        """Kind under which `carver orphans` lists the volume if nothing refers to the volume.

        Empty if the volume's removal is on record already.
        """
        return volume_states.rows(self.own_tags)[0].orphan

    @property
    def is_doomed(self) -> bool:
        """Whether the volume is recorded as deleted, and only has to be erased and removed."""
        return self.ended_by is EndedBy.ERASER

    @cached_property
    def is_half_made(self) -> bool:
        """Whether the volume is a RAID that lvm2 was creating when lvm2 was killed.

        Such a volume was never active, so it has no data. Three kinds of volumes do not count. A
        RAID in use whose images are replaced or added has at least one whole image. A volume that
        was made with another layout, by its tag, and is being converted to a RAID by hand has data.
        And a volume that was formatted or got a LUKS2 header, by its tags, has data, unless it is
        being filled by a copy.
        """
        # Look for the first image's metadata volume first, which nearly all volumes keep hidden.
        if not self.group.is_bare(self.name, 1):
            return False
        recorded = Layout.parse(self.own_tags.get(tag.LAYOUT, ""))
        if recorded is not None and not recorded.is_raid:
            return False
        try:
            shape = self.layout
        except errors.LayoutUnknown:
            return False
        if not shape.is_raid or not self.group.is_bare(self.name, shape.disks):
            return False
        is_filled = self.ended_by is EndedBy.COPIER
        return is_filled or not {tag.FORMATTED, tag.SEALED} & self.own_tags.keys()

    @property
    def content_bytes(self) -> int:
        """Size, in bytes, of the last complete contents of a volume that is being received.

        0 if no contents were received completely.
        """
        return _number(self.own_tags, tag.CONTENT)

    @property
    def offset_bytes(self) -> int:
        """Number of bytes received so far, for a volume that is being received."""
        return _number(self.own_tags, tag.OFFSET)


@dataclass(frozen=True)
class Snapshot:
    """Record of a snapshot of a volume, taken by Carver.

    `size_bytes` is the size of the snapshot's volume when the snapshot was taken, `area_bytes` the
    size of the snapshot's COW store. For `id` and `backing` see `Volume`. `source_id` is the id of
    the volume of which callers took the snapshot. `origin` is the logical volume with which a
    copy-on-write snapshot is activated. `overflowed` is None if that is unknown.
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
        """Name of the logical volume that backs the snapshot."""
        return self.backing.name

    @property
    def capacity_bytes(self) -> int:
        """Size of the volume as its users saw it, without the LUKS2 header, in bytes."""
        return self.size_bytes - self.header_bytes

    @property
    def requested_bytes(self) -> int:
        """Size that the volume's caller asked for, in bytes; if unknown, the volume's capacity."""
        return requested_bytes(self.own_tags, self.size_bytes) or self.capacity_bytes

    @property
    def header_bytes(self) -> int:
        """Size of the LUKS2 header of the snapshot's volume, by its tag, in bytes; 0 for none."""
        return _header_bytes(self.own_tags, self.size_bytes)

    @property
    def is_encrypted(self) -> bool:
        """Whether the snapshot's volume, and so the snapshot, is encrypted."""
        return is_encrypted(self.own_tags)

    @property
    def sequence(self) -> int:
        """Number of the snapshot in the order in which its volume group's snapshots were taken.

        0 if Carver 0.1.0 took the snapshot.
        """
        return _number(self.own_tags, tag.SEQUENCE)

    @property
    def is_thin(self) -> bool:
        """Whether the snapshot is in a thin pool, and therefore independent of its source."""
        return bool(self.pool)

    @property
    def is_bridge(self) -> bool:
        """Whether the snapshot is a bridge: a temporary snapshot from which a volume is copied."""
        return names.is_of(ids.BRIDGE_PREFIX, self.name)

    @property
    def copy_id(self) -> str:
        """Id of the volume that is copied from this temporary snapshot (`is_bridge`).

        Empty for other snapshots, and if an older version of Carver, which did not record the id,
        took the snapshot.
        """
        return self.own_tags.get(tag.COPY, "")

    @property
    def is_ready(self) -> bool:
        """Whether volumes can be made from the snapshot.

        False if its COW store overflowed, or if that is unknown.
        """
        return self.overflowed is False

    @property
    def group_snapshot_id(self) -> str:
        """Id of the group snapshot that the snapshot belongs to; empty for a single snapshot."""
        return self.own_tags.get(tag.GROUP_SNAPSHOT, "")

    @property
    def problem(self) -> str:
        """Why the snapshot can never be used again; empty if it can, or if that is unknown."""
        if not self.overflowed:
            return ""
        return (
            f"its COW store of {self.area_bytes} bytes overflowed when {self.source_id} was written"
            " to, and its data are lost"
        )


def requested(required_bytes: int, size_bytes: int, header_bytes: int) -> dict[str, str]:
    """Return the tag REQUESTED of a volume that has more capacity than was requested.

    The capacity is the volume's size without its LUKS2 header. The result is empty if no more than
    the requested size was allocated, or if no size was requested. All sizes are in bytes.
    """
    if not 0 < required_bytes < size_bytes - header_bytes:
        return {}
    return {tag.REQUESTED: f"{required_bytes}/{size_bytes}"}


def requested_bytes(own_tags: Mapping[str, str], size_bytes: int) -> int:
    """Return the requested size, in bytes, that was rounded up to the present size `size_bytes`.

    The tag REQUESTED has it. 0 if there is no tag, or if it was written for another present size.
    """
    requested_text, _, size_text = own_tags.get(tag.REQUESTED, "").partition("/")
    return tags.number(requested_text) or 0 if size_text == str(size_bytes) else 0


_Record = TypeVar("_Record", Volume, Snapshot)


@dataclass(frozen=True)
class MadeByNewerVersion(Generic[_Record]):
    """Wrapper of the record of a volume or snapshot that this version of Carver must not use.

    `needs` are the properties that this version does not know, `faults` the faults of the tags. No
    call uses such a volume or snapshot, no background work goes on with it, and logical volumes
    that it depends on are not removed. `shown` is the record, for lists. Each record is made in
    this module, so no other code can forget the check.
    """

    shown: _Record
    needs: frozenset[str]
    faults: frozenset[str] = frozenset()

    @property
    def problem(self) -> errors.AgentError:
        """The error that says why the volume or snapshot must not be used."""
        if self.needs:
            return errors.NeedsOther(str(self.shown.id), self.needs)
        return errors.TagsDamaged(str(self.shown.id), self.faults)


def require_usable(record: _Record | MadeByNewerVersion[_Record]) -> _Record:
    """Return the record of a volume or snapshot that may be used.

    Raises NeedsOther or TagsDamaged for one that this version of Carver must not use.
    """
    if isinstance(record, MadeByNewerVersion):
        raise record.problem
    return record


# Keys of tags that decide what is done to data. A logical volume with several values of such a tag
# must not be used (`faults`).
_DECIDING = frozenset(
    {
        *(tag.NAME, tag.STATE, tag.CLASS, tag.LAYOUT, tag.ACCESS, tag.EPHEMERAL, tag.ADOPTED),
        *(tag.FROM, tag.BRIDGE, tag.COPY, tag.ZERO, tag.CACHE, tag.GIVEN_UP, tag.CHUNK),
        *(tag.ENCRYPTION, tag.HEADER, tag.SEALED, tag.SHARED_KEY, tag.FORMATTED),
        # The tag SIZE says how much of a volume is filled, and how much of a snapshot is copied.
        # SEQUENCE says which snapshot is older. FS_TYPE says whether a copy may have a btrfs.
        *(tag.SIZE, tag.SEQUENCE, tag.FS_TYPE),
        *(tag.SOURCE, tag.GROUP_SNAPSHOT, tag.MEMBERS, tag.MEMBER_GROUPS),
        *(tag.RECEIVED, tag.CHAIN, tag.INTO, tag.OFFSET, tag.RELEASE, tag.FINISHING),
        *(tag.RELEASED, tag.MOVE_TO, tag.MOVE_WORD),
    }
)


def faults(logical: report.LogicalVolume) -> frozenset[str]:
    """Return the faults of a logical volume's tags, as texts; empty if there are none.

    Faults are tags such as no version of Carver writes: some were lost, or changed by hand. A
    volume with faults is neither completed nor erased, because either might be wrong.
    """
    own_tags = logical.own_tags
    doubled = set()
    # Search for keys with several values only if there are more tags than keys of Carver's. This
    # saves time, since most volumes have no tags of other programs.
    if len(logical.tags) > len(own_tags):
        doubled = {f"`{key}` twice" for key in tags.ambiguous_keys(logical.tags) & _DECIDING}
    return frozenset({*doubled, *volume_states.faults(own_tags)})


def all_logical_volumes(group: report.Group) -> Collection[report.LogicalVolume]:
    """Return all logical volumes of a volume group, to be shown and counted, never to be changed.

    Logical volumes of other programs are included, and those that only newer versions of Carver
    know.
    """
    return group.volumes.values()


def usable_logical_volumes(group: report.Group) -> Iterator[report.LogicalVolume]:
    """Return the logical volumes and thin pools of a volume group that this version may change.

    These have tags of Carver's, without faults, and no property that this version does not know.
    """
    return (logical for logical in all_logical_volumes(group) if is_usable(group, logical))


def is_usable(group: report.Group, logical: report.LogicalVolume) -> bool:
    """Whether this version of Carver may change a logical volume or thin pool.

    It may if the volume has tags of Carver's, without faults, and neither the volume nor its pool
    has a property that this version does not know.
    """
    return bool(logical.own_tags) and not (_needs(group, logical) or faults(logical))


def reservation_name(name: str) -> str:
    """Return the name of the logical volume that reserves the extents for a volume's growth."""
    return names.logical_volume(ids.GROWTH_PREFIX, name)


def reservation(group: report.Group, name: str) -> report.LogicalVolume | None:
    """Return the logical volume that reserves extents for a volume's growth; None if there is none.

    A name alone proves nothing: the reservation must have the tags of a logical volume that is to
    be erased. Each version of Carver makes reservations with these tags.
    """
    logical = group.volumes.get(reservation_name(name))
    if logical is None or not is_usable(group, logical):
        return None
    own_tags = logical.own_tags
    is_reserved = tag.NAME in own_tags and volume_states.is_recorded(own_tags, EndedBy.ERASER)
    return logical if is_reserved and not (logical.origin or logical.pool) else None


def unknown_needs(logical: report.LogicalVolume) -> frozenset[str]:
    """Return the values of a logical volume's tag NEEDS that this version does not know."""
    if tag.NEEDS not in logical.own_tags:
        return frozenset()
    needs = ",".join(tags.values(logical.tags, tag.NEEDS)).split(",")
    return frozenset(filter(None, needs)) - tag.KNOWN_NEEDS


def _guarded(
    group: report.Group, logical: report.LogicalVolume, record: _Record
) -> _Record | MadeByNewerVersion[_Record]:
    """Return a record, wrapped in `MadeByNewerVersion` if this version of Carver must not use it.

    This version must not use a volume if it does not know a property of the volume or of its thin
    pool, or if tags of the volume were lost or changed by hand.
    """
    needs, faulty_tags = _needs(group, logical), faults(logical)
    return MadeByNewerVersion(record, needs, faulty_tags) if needs or faulty_tags else record


def _needs(group: report.Group, logical: report.LogicalVolume) -> frozenset[str]:
    """Return the values of the tag NEEDS that this version does not know.

    The tags of a logical volume count, and those of its thin pool.
    """
    needs = unknown_needs(logical)
    if logical.pool in group.volumes:
        needs |= unknown_needs(group.volumes[logical.pool])
    return needs


def key_generation(own_tags: Mapping[str, str]) -> str:
    """Return the name of an encrypted volume's only valid key, by its tags.

    While the key is being changed, the result is `(rotating)`. For a key without a name it is
    `(unnamed)`.
    """
    if tag.ROTATING in own_tags:
        return "(rotating)"
    return own_tags.get(tag.KEY_GENERATION, "(unnamed)")


def is_block(identity: VolumeId | str, own_tags: Mapping[str, str]) -> bool:
    """Whether a volume with these tags, or the volume of a snapshot, was made for raw block access.

    The answer is never a guess: a raw block volume may hold contents that no probe recognizes, and
    would be formatted. A volume that was formatted is not a raw block volume. Raises TagsDamaged if
    the tag with the access type is lost, or has another value.
    """
    if not may_be_block(own_tags):
        return False
    if own_tags.get(tag.ACCESS) != BLOCK:
        raise errors.TagsDamaged(str(identity), {"no `access`"})
    return True


def may_be_block(own_tags: Mapping[str, str]) -> bool:
    """Whether a volume with these tags may be a raw block volume, also if the access tag is lost.

    The contents of such a volume may be such as no probe recognizes (`is_block`).
    """
    access = own_tags.get(tag.ACCESS)
    return access == BLOCK or (access != MOUNT and tag.FORMATTED not in own_tags)


def is_encrypted(own_tags: Mapping[str, str]) -> bool:
    """Whether these tags are those of an encrypted volume, even if one such tag is lost."""
    return bool({tag.ENCRYPTION, tag.HEADER, tag.SEALED} & own_tags.keys())


def volume(
    group: report.Group, logical: report.LogicalVolume
) -> Volume | MadeByNewerVersion[Volume] | None:
    """Return the record of a logical volume; None if it is no volume of Carver's.

    A volume that this version of Carver must not use is returned as a `MadeByNewerVersion`.
    """
    own_tags = logical.own_tags
    is_volume = names.is_of(ids.VOLUME_PREFIX, logical.name)
    if tag.NAME not in own_tags or not (is_volume or names.is_of(ids.INLINE_PREFIX, logical.name)):
        return None
    if names.is_part(logical.name):
        # Leave out images of RAIDs, which are no volumes, although lvm2 copies the tags of a RAID
        # to its images.
        return None
    return _guarded(group, logical, _as_volume(group, logical, own_tags))


# Cache of `volumes_of`: the last state of each volume group and the volumes in that state, by the
# group's name.
_last_volumes: dict[str, tuple[report.Group, Sequence[Volume | MadeByNewerVersion[Volume]]]] = {}


def volumes_of(group: report.Group) -> Sequence[Volume | MadeByNewerVersion[Volume]]:
    """Return the records of the volumes in a volume group.

    The records of the last call are returned again if the group is the same object: the state of a
    volume group stays the same object until something changes in the group. Volumes that this
    version of Carver must not use are returned as `MadeByNewerVersion`.
    """
    state, records = _last_volumes.get(group.name, (None, ()))
    if state is not group:
        records = tuple(
            record
            for record in (volume(group, logical) for logical in all_logical_volumes(group))
            if record is not None
        )
        _last_volumes[group.name] = (group, records)
    return records


def find_named(group: report.Group, own_name: str) -> Volume | None:
    """Return the volume in a volume group whose logical volume is `own_name`; None for none.

    Raises NeedsOther or TagsDamaged if this version of Carver must not use the volume.
    """
    logical = group.volumes.get(own_name)
    record = None if logical is None else volume(group, logical)
    return None if record is None else require_usable(record)


def remains(
    group: report.Group, logical: report.LogicalVolume
) -> Volume | MadeByNewerVersion[Volume] | None:
    """Return the record of a deleted snapshot, or of extents reserved for growth, to be erased.

    None if the logical volume is neither. A deleted snapshot was split from its origin, is tagged
    as deleted, or lvm2 was killed before the snapshot got its origin. Reserved extents are a
    logical volume by which a volume was to grow. No tag `state` is needed: that such a logical
    volume exists says that its data must be erased.
    """
    own_tags = logical.own_tags
    is_remains = _is_snapshot(logical.name) or names.is_of(ids.GROWTH_PREFIX, logical.name)
    if tag.NAME not in own_tags or not is_remains or not volume_states.is_deleted_snapshot(logical):
        return None
    record = _as_volume(group, logical, {**own_tags, **volume_states.tags_for(EndedBy.ERASER)})
    return _guarded(group, logical, record)


def snapshot(
    group: report.Group, logical: report.LogicalVolume
) -> Snapshot | MadeByNewerVersion[Snapshot] | None:
    """Return the record of a logical volume that is a snapshot, temporary ones included.

    None if the logical volume is no snapshot of Carver's, or is one that was deleted: it has
    neither origin nor pool, or is tagged as deleted. A snapshot that this version of Carver must
    not use is returned as a `MadeByNewerVersion`.
    """
    own_tags = logical.own_tags
    if tag.NAME not in own_tags or not _is_snapshot(logical.name):
        return None
    if volume_states.is_deleted_snapshot(logical):
        return None
    record = Snapshot(
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
    return _guarded(group, logical, record)


def snapshots_of(volume: Volume) -> Iterator[Snapshot]:
    """Return the snapshots of a volume, by the report from which the volume's record was made.

    Snapshots that this version of Carver must not use are left out.
    """
    candidates = (snapshot(volume.group, logical) for logical in volume.group.made_of(volume.name))
    return (
        record
        for record in candidates
        if isinstance(record, Snapshot) and record.source_id == volume.id
    )


def next_sequence(group: report.Group) -> int:
    """Return the number (tag SEQUENCE) for the next snapshot in a volume group.

    It is one more than the highest number in the group. The caller holds the group's lock, and has
    read the report under that lock.
    """
    values = (
        value
        for logical in all_logical_volumes(group)
        for value in tags.values(logical.tags, tag.SEQUENCE)
    )
    return 1 + max((tags.number(value) or 0 for value in values), default=0)


def is_older(snapshot: Snapshot, reference: Snapshot | Volume) -> bool | None:
    """Whether a snapshot is older than another snapshot, or than its volume; None if unknown.

    A snapshot is always older than its volume, which has the present contents.
    Times are not compared, since the clock may have been set. Snapshots of Carver 0.1.0 have no
    number; in a thin pool, the order of thin ids decides for them.
    """
    if isinstance(reference, Volume):
        return True
    if snapshot.sequence and reference.sequence:
        numbers: tuple[int | None, int | None] = (snapshot.sequence, reference.sequence)
    elif snapshot.pool and snapshot.pool == reference.pool:
        numbers = (_thin_id(snapshot), _thin_id(reference))
    else:
        return None
    snapshot_number, reference_number = numbers
    if snapshot_number is None or reference_number is None or snapshot_number == reference_number:
        return None
    return snapshot_number < reference_number


def remains_of(snapshot: Snapshot, *, is_split: bool = True) -> Volume:
    """Return a record for a snapshot that is being deleted: a read-only volume to be erased.

    With `is_split`, the record is that of the snapshot after its split from the origin.
    """
    own_tags = {**snapshot.own_tags, **volume_states.tags_for(EndedBy.ERASER)}
    group, logical = snapshot.group, snapshot.group.volumes.get(snapshot.name)
    if is_split and logical is not None:
        # Remove the origin from the record's report, which is older than the split.
        alone = replace(logical, origin="")
        group = replace(group, volumes={**group.volumes, snapshot.name: alone})
    return Volume(
        *(snapshot.id, snapshot.backing, group, snapshot.area_bytes, own_tags), read_only=True
    )


def _as_volume(
    group: report.Group, logical: report.LogicalVolume, own_tags: Mapping[str, str]
) -> Volume:
    """Return the record of a logical volume as a volume with the tags `own_tags`.

    A thin volume without a problem of its own has the health of its pool.
    """
    return Volume(
        VolumeId.of(group, logical.name),
        backing.of(group, logical.name),
        group,
        logical.size_bytes,
        own_tags,
        health=logical.health or _allocated_volume(group, logical).health,
        read_only=logical.read_only,
    )


def _is_snapshot(name: str) -> bool:
    """Whether a logical volume's name is that of a snapshot, temporary ones included."""
    return names.is_of(ids.SNAPSHOT_PREFIX, name) or names.is_of(ids.BRIDGE_PREFIX, name)


def _allocated_volume(group: report.Group, logical: report.LogicalVolume) -> report.LogicalVolume:
    """Return the logical volume whose extents hold the data: the given one, or its thin pool."""
    return group.volumes.get(logical.pool, logical)


def places_of(volumes: Sequence[Volume]) -> str:
    """Return the value of the tag MEMBER_GROUPS for a group snapshot of these volumes.

    It lists the volume groups of the volumes, each as name@uuid, separated by commas.
    """
    return ",".join(sorted({place_of(str(volume.id)) for volume in volumes}))


def place_of(identity: str) -> str:
    """Return the volume group in the id of a volume or snapshot, as name@uuid."""
    return identity.partition("/")[0]


def is_complete(members: Sequence[Snapshot]) -> bool:
    """Whether these snapshots of one group snapshot are all that it has, and show one moment."""
    return is_whole(members) and is_of_one_moment(members)


def is_whole(members: Sequence[Snapshot]) -> bool:
    """Whether these snapshots of one group snapshot are all that it has, by the tag MEMBERS."""
    return bool(members) and len(members) == max(
        _number(member.own_tags, tag.MEMBERS) for member in members
    )


def is_of_one_moment(members: Sequence[Snapshot]) -> bool:
    """Whether the existing snapshots of a group snapshot are known to show one moment.

    The tag `committed` of any of them says so: it is written after the last snapshot was taken and
    the volumes were found to have been suspended until then. Without the tag, the call may have
    failed between two snapshots. Versions of Carver that did not record the groups of the members
    did not write the tag either; their group snapshots count as committed while none of their
    snapshots is missing.
    """
    if any(tag.COMMITTED in snapshot.own_tags for snapshot in members):
        return True
    is_older = any(tag.MEMBER_GROUPS not in snapshot.own_tags for snapshot in members)
    return is_older and is_whole(members)


def _thin_id(snapshot: Snapshot) -> int | None:
    """Return the id of a snapshot's thin device in its thin pool; None if it has none."""
    logical = snapshot.group.volumes.get(snapshot.name)
    return None if logical is None else logical.thin_id


def _shown_bytes(group: report.Group, snapshot: report.LogicalVolume) -> int:
    """Return the size of a snapshot's device, in bytes.

    For a thin snapshot it is the snapshot's own size. For a copy-on-write snapshot it is the size
    of the origin, which may have grown since.
    """
    is_thin = bool(snapshot.pool)
    return (snapshot if is_thin else group.volumes.get(snapshot.origin, snapshot)).size_bytes


def _header_bytes(own_tags: Mapping[str, str], size_bytes: int) -> int:
    """Return the size of a volume's LUKS2 header by the tag HEADER, in bytes.

    0 if the tag is lost, or if the size is not less than the volume's.
    """
    header_bytes = _number(own_tags, tag.HEADER)
    return header_bytes if header_bytes < size_bytes else 0


def _number(own_tags: Mapping[str, str], key: str) -> int:
    """Return the number in the tag with this key; 0 if the tag is lost or has no number."""
    text = own_tags.get(key)
    return 0 if text is None else tags.number(text) or 0

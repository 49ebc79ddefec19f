"""What a new volume is made of: a snapshot or another volume, and what that asks of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from agent.core import errors, ids, tag
from agent.core.capabilities import BLOCK
from agent.core.ids import VolumeId
from agent.core.inventory import Inventory
from agent.core.records import Snapshot, Volume
from agent.core.requests import SNAPSHOT, VOLUME, SizeRange, Source
from lvm import names, report, thin
from lvm.lvm2 import Lvm
from lvm.tuning import Tuning


@dataclass(frozen=True)
class Contents:
    """A source that can be read; `own_tags` are its volume's."""

    id: str
    group: str
    size_bytes: int
    own_tags: Mapping[str, str]
    of: Snapshot | Volume


def source_of(own_tags: Mapping[str, str]) -> Source | None:
    """What a volume with these tags was made of."""
    parsed = VolumeId.parse(own_tags.get(tag.FROM, ""))
    if parsed is None:
        return None
    is_snapshot = names.is_of(ids.SNAPSHOT_PREFIX, parsed.name)
    return Source(SNAPSHOT if is_snapshot else VOLUME, str(parsed))


def find(within: Inventory, known: report.Report, source: Source) -> Contents:
    """The source of that kind and id, which is none that was deleted, or is incomplete, or lost.

    Raises NoSuchSnapshot, NoSuchVolume, OtherGroup, Copying, SourceLost.
    """
    found: Snapshot | Volume
    if source.kind == SNAPSHOT:
        found = within.snapshot(known, source.id)
        if found.problem:
            raise errors.SourceLost(source.id, found.problem)
    else:
        found = within.usable(known, source.id)
        require_settled(found)
    return Contents(source.id, found.group.name, found.size_bytes, found.own_tags, found)


def require_settled(volume: Volume) -> None:
    """Raise NotSnapshotted for a copy that has its source's master key, and is to get its own."""
    if tag.SHARED_KEY in volume.own_tags:
        raise errors.NotSnapshotted(
            str(volume.id),
            "it is to get a master key of its own, which it does when it is staged first",
        )


def size_of(size: SizeRange, contents: Contents) -> SizeRange:
    """The size that is asked for, or the source's; raises BadSize for less than that."""
    least = contents.size_bytes - header_bytes(contents)
    for name in ("required_bytes", "limit_bytes"):
        if 0 < getattr(size, name) < least:
            raise errors.BadSize(
                f"capacity_range.{name}: {getattr(size, name)} is less than what"
                f" {contents.id!r} holds, {least} bytes"
            )
    return SizeRange(size.required_bytes or least, size.limit_bytes)


def tags_of(own_tags: Mapping[str, str], contents: Contents) -> dict[str, str]:
    """The tags of a new volume that these are the contents of; it is not ready yet.

    Raises BadField where they cannot be used in the way that is asked for.
    """
    copied = {**own_tags, tag.STATE: tag.COPYING, tag.FROM: contents.id}
    _check_encryption(own_tags, contents)
    if tag.SEALED in contents.own_tags:
        copied[tag.SEALED] = contents.own_tags[tag.SEALED]
    fs_type = own_tags.get(tag.FS_TYPE, "")
    if not fs_type:
        return copied  # a raw block device holds whatever it is
    if contents.own_tags.get(tag.ACCESS) == BLOCK:
        raise errors.BadField(
            "volume_capabilities",
            f"mount: {contents.id!r} is of a raw block volume; what it holds is not Carver's",
        )
    formatted = contents.own_tags.get(tag.FORMATTED, "")
    if formatted and formatted != fs_type:
        raise errors.BadField(
            "volume_content_source", f"{contents.id!r} holds {formatted}, not {fs_type}"
        )
    return copied | ({tag.FORMATTED: formatted} if formatted else {})


def header_bytes(contents: Contents) -> int:
    """How much of these is a header, which what is made of them has, too."""
    told = contents.own_tags.get(tag.HEADER, "")
    return int(told) if told.isdigit() else 0


def _check_encryption(own_tags: Mapping[str, str], contents: Contents) -> None:
    """Raise BadField where one is encrypted and the other is not: data are copied as they lie."""
    wanted, has = own_tags.get(tag.ENCRYPTION, ""), contents.own_tags.get(tag.ENCRYPTION, "")
    if wanted != has:
        what = "is encrypted" if has else "is not encrypted"
        raise errors.BadField(
            "volume_content_source",
            f"{contents.id!r} {what}, and what is made of it must be so, too: ask for"
            f" carver/encryption={has or 'nothing'}",
        )


def may_hold_btrfs(own_tags: Mapping[str, str]) -> bool:
    """Whether a volume made of another's contents may hold a btrfs, which needs an id of its own.

    What was formatted a moment before a crash need not say so. One that is encrypted gets it when
    it is opened.
    """
    if tag.ENCRYPTION in own_tags:
        return False
    return "btrfs" in (own_tags.get(tag.FORMATTED), own_tags.get(tag.FS_TYPE))


def is_in(contents: Contents, group: report.Group, pool: str) -> bool:
    """Whether these lie in a group's thin pool, so that a volume of it can share them."""
    return contents.of.group.uuid == group.uuid and group.volume(contents.of.name).pool == pool


def share(
    lvm: Lvm,
    contents: Contents,
    name: str,
    size_bytes: int,
    own_tags: Mapping[str, str],
    tuning: Tuning,
) -> Volume:
    """Make a volume that shares its blocks with these: one command, and none of them is copied.

    It is ready at once, unless it has to grow or to get an id of its own.
    """
    group, origin = contents.of.group, contents.of.name
    present_bytes = group.volume(origin).size_bytes
    if present_bytes == size_bytes and not may_hold_btrfs(own_tags):
        own_tags = {**own_tags, tag.STATE: tag.READY}
    thin.snapshot(
        lvm, group.name, name, origin=origin, own_tags=own_tags, read_only=False, tuning=tuning
    )
    return Volume(VolumeId.of(group, name), group, name, present_bytes, own_tags)

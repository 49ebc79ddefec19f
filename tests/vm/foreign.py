"""Disks that claim to be a group's, as anyone who writes to a disk may make them."""

import re
from collections.abc import Callable

from fakes.images import Area, Image
from real.host import RealHost

from lvm import report
from lvm.labels import Group

EVIL = "EviLpv-evil-evil-evil-evil-evil-EviLpv"
TWIN = "EviLvg-evil-evil-evil-evil-evil-EviLvg"
MANY = 10**6
# Where lvm2 has data begin, behind the metadata.
_AREA_BYTES = (1 << 20) - 4096


def named(group: Group, _disk: str) -> tuple[str, Group]:
    """What another machine's disk bears: a group of the same name."""
    return EVIL, Group(group.name, TWIN, 1, (EVIL,))


def identified(group: Group, _disk: str) -> tuple[str, Group]:
    """The group's name and UUID, and more commits than it has."""
    return EVIL, Group(group.name, group.uuid, MANY, (EVIL,))


def copied(group: Group, disk: str) -> tuple[str, Group]:
    """A copy of one of the group's disks, which was written to since."""
    return disk, Group(group.name, group.uuid, MANY, group.disk_uuids)


KINDS: dict[str, Callable[[Group, str], tuple[str, Group]]] = {
    "name": named,
    "name-and-uuid": identified,
    "whole-copy": copied,
}


def put(host: RealHost, group: str, device: str, kind: str) -> Callable[[], None]:
    """Have a device say so; what is returned has it blank again."""
    own = report.read(host.lvm).group(group)
    uuids = tuple(one.uuid for one in own.disks)
    uuid, shown = KINDS[kind](Group(group, own.uuid, 1, uuids), uuids[0])
    file = host.directory / "metadata"
    host.lvm("vgcfgbackup", "--file", str(file), "--", group)
    image = Image(
        uuid=uuid.replace("-", ""),
        areas=[Area(size=_AREA_BYTES, text=_metadata(file.read_text(), own, uuid, shown))],
        size=1 << 20,
    )
    host.write_bytes(device, 0, bytes(image.bytes()))
    return lambda: host.erase(device)


def _metadata(text: str, own: report.Group, uuid: str, shown: Group) -> bytes:
    """lvm2's own copy of the metadata, as they stand on disks, and as this one has them."""
    about, _, body = text.partition(f"\n{own.name} {{")
    body = body.replace(own.uuid, shown.uuid).replace(own.disks[0].uuid, uuid)
    body = re.sub(r"\bseqno = \d+", f"seqno = {shown.seqno}", body, count=1)
    if len(shown.disk_uuids) == 1:
        body = re.sub(r"\n\t\tpv[1-9] \{.*?\n\t\t\}\n", "\n", body, flags=re.DOTALL)
    return f"{own.name} {{{body}\n{about}\n".encode() + b"\0"

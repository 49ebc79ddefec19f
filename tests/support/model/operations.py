"""What callers and operators do, as values: what the model answers and the driver calls."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

MIB = 1 << 20
T = TypeVar("T", bound=tuple[Any, ...])

WRITER = "SINGLE_NODE_WRITER"
MULTI_WRITER = "SINGLE_NODE_MULTI_WRITER"
READER_ONLY = "SINGLE_NODE_READER_ONLY"
# ReadOnlyMany.
READERS = "MULTI_NODE_READER_ONLY"

# Ids that no volume has: one of no form, one of a group of the same name on another node.
MALFORMED = "<malformed>"
ELSEWHERE = "<elsewhere>"
# Names of inline volumes begin so; they are ids as well.
INLINE = "csi-"


def is_inline(volume: str) -> bool:
    """Whether a volume is one that lives as long as its pod."""
    return volume.startswith(INLINE)


# What a volume is made of.
NO_SOURCE = ("", "")
OF_SNAPSHOT, OF_VOLUME = "snapshot", "volume"


@dataclass(frozen=True)
class Use:
    """A volume capability; `access` is block or mount."""

    access: str
    mode: str = WRITER
    fs_type: str = ""

    @property
    def is_block(self) -> bool:
        return self.access == "block"

    @property
    def reads(self) -> bool:
        """Whether the access mode allows no writer."""
        return self.mode in (READER_ONLY, READERS)

    @property
    def is_shared(self) -> bool:
        """Whether the access mode allows several targets."""
        return self.mode in (MULTI_WRITER, READERS)


# A capability of ReadOnlyMany.
READS = Use("mount", READERS)


@dataclass(frozen=True)
class Call:
    """A call."""


@dataclass(frozen=True)
class OfVolume(Call):
    """A call about a volume."""

    volume: str


@dataclass(frozen=True)
class AtPath(OfVolume):
    """A call about a volume at a path, a name within the host's directory."""

    path: str


@dataclass(frozen=True)
class Create(OfVolume):
    """CreateVolume; parameters as pairs, `source` as a kind and a name, empty for none."""

    required_bytes: int
    limit_bytes: int
    use: Use
    parameters: tuple[tuple[str, str], ...] = ()
    source: tuple[str, str] = NO_SOURCE
    mutable: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Modify(OfVolume):
    """ControllerModifyVolume; the parameters as pairs."""

    mutable: tuple[tuple[str, str], ...]


# The node, and another that it does not know.
HERE, THERE = "here", "there"


@dataclass(frozen=True)
class Attach(OfVolume):
    """ControllerPublishVolume."""

    node: str
    use: Use
    read_only: bool = False


@dataclass(frozen=True)
class Detach(OfVolume):
    """ControllerUnpublishVolume; an empty node is any."""

    node: str = ""


class Delete(OfVolume):
    """DeleteVolume."""


class Get(OfVolume):
    """ControllerGetVolume."""


@dataclass(frozen=True)
class Validate(OfVolume):
    """ValidateVolumeCapabilities."""

    use: Use


@dataclass(frozen=True)
class Volumes(Call):
    """ListVolumes, to its end, so many entries at a time; 0 is all at once."""

    page: int = 0


@dataclass(frozen=True)
class Snapshot(OfVolume):
    """CreateSnapshot, with room for all of the volume."""

    snapshot: str


@dataclass(frozen=True)
class DeleteSnapshot(Call):
    """DeleteSnapshot."""

    snapshot: str


@dataclass(frozen=True)
class Snapshots(Call):
    """ListSnapshots, of one volume or of all."""

    volume: str = ""


class Capacity(Call):
    """GetCapacity."""


@dataclass(frozen=True)
class Expand(OfVolume):
    """ControllerExpandVolume."""

    required_bytes: int
    limit_bytes: int = 0


@dataclass(frozen=True)
class Stage(AtPath):
    """NodeStageVolume; `key` is a secret's."""

    use: Use
    key: str = ""


class Unstage(AtPath):
    """NodeUnstageVolume."""


@dataclass(frozen=True)
class Publish(OfVolume):
    """NodePublishVolume."""

    staging: str
    path: str
    use: Use
    read_only: bool = False


@dataclass(frozen=True)
class PublishInline(AtPath):
    """NodePublishVolume of a volume that lives as long as its pod."""

    required_bytes: int
    use: Use
    read_only: bool = False


class Unpublish(AtPath):
    """NodeUnpublishVolume; an inline volume is gone with it."""


class Stats(AtPath):
    """NodeGetVolumeStats."""


@dataclass(frozen=True)
class Health(OfVolume):
    """ControllerGetVolumeHealth, or NodeGetVolumeHealth."""

    by_node: bool


@dataclass(frozen=True)
class NodeExpand(AtPath):
    """NodeExpandVolume; `reads` if its capability is a reader's."""

    required_bytes: int = 0
    limit_bytes: int = 0
    key: str = ""
    reads: bool = False


# Each kind of call.
CALLS = {one for kind in (Call, OfVolume, AtPath) for one in kind.__subclasses__()}
CALLS -= {OfVolume, AtPath}


@dataclass(frozen=True)
class Outcome:
    """A call's gRPC code and, where that is OK, what of its answer is compared."""

    code: str
    value: object = None


def ordered(rows: Iterable[T]) -> tuple[T, ...]:
    """The rows of a state in their order."""
    return tuple(sorted(rows))


@dataclass(frozen=True)
class State:
    """What a machine has of Carver, in words that the model and a real machine share.

    `volumes` are (name, bytes, formatted with, state, active, bytes that are read ahead or auto,
    writes a second or 0);
    `places` (path, volume, fs or block, read-only), as often as mounted; `loops` (volume, loop
    devices over it); `entries` (path, dir or file); `mappings` (volume, bytes) what is open of
    encrypted ones; `limits` (volume, writes a second) what the kernel allows pods; `attached`
    (volume, how).
    """

    volumes: tuple[tuple[str, int, str, str, bool, str, int], ...]
    places: tuple[tuple[str, str, str, bool], ...]
    loops: tuple[tuple[str, int], ...]
    entries: tuple[tuple[str, str], ...]
    free_bytes: int
    mappings: tuple[tuple[str, int], ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    attached: tuple[tuple[str, str], ...] = ()

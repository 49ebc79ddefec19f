"""What callers and operators do, as values: what the model answers and the driver calls."""

from dataclasses import dataclass

MIB = 1 << 20

WRITER = "SINGLE_NODE_WRITER"
MULTI_WRITER = "SINGLE_NODE_MULTI_WRITER"
READER_ONLY = "SINGLE_NODE_READER_ONLY"

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


@dataclass(frozen=True)
class Create:
    """CreateVolume; parameters as pairs, `source` as a kind and a name, empty for none."""

    volume: str
    required_bytes: int
    limit_bytes: int
    use: Use
    parameters: tuple[tuple[str, str], ...] = ()
    source: tuple[str, str] = NO_SOURCE
    mutable: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Modify:
    """ControllerModifyVolume; the parameters as pairs."""

    volume: str
    mutable: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Delete:
    """DeleteVolume."""

    volume: str


@dataclass(frozen=True)
class Get:
    """ControllerGetVolume."""

    volume: str


@dataclass(frozen=True)
class Validate:
    """ValidateVolumeCapabilities."""

    volume: str
    use: Use


@dataclass(frozen=True)
class Volumes:
    """ListVolumes, to its end, so many entries at a time; 0 is all at once."""

    page: int = 0


@dataclass(frozen=True)
class Snapshot:
    """CreateSnapshot, with room for all of the volume."""

    volume: str
    snapshot: str


@dataclass(frozen=True)
class DeleteSnapshot:
    """DeleteSnapshot."""

    snapshot: str


@dataclass(frozen=True)
class Snapshots:
    """ListSnapshots, of one volume or of all."""

    volume: str = ""


@dataclass(frozen=True)
class Capacity:
    """GetCapacity."""


@dataclass(frozen=True)
class Expand:
    """ControllerExpandVolume."""

    volume: str
    required_bytes: int
    limit_bytes: int = 0


@dataclass(frozen=True)
class Stage:
    """NodeStageVolume; paths are names within the host's directory. `key` is a secret's."""

    volume: str
    path: str
    use: Use
    key: str = ""


@dataclass(frozen=True)
class Unstage:
    """NodeUnstageVolume."""

    volume: str
    path: str


@dataclass(frozen=True)
class Publish:
    """NodePublishVolume."""

    volume: str
    staging: str
    path: str
    use: Use
    read_only: bool = False


@dataclass(frozen=True)
class PublishInline:
    """NodePublishVolume of a volume that lives as long as its pod."""

    volume: str
    path: str
    required_bytes: int
    use: Use
    read_only: bool = False


@dataclass(frozen=True)
class Unpublish:
    """NodeUnpublishVolume; an inline volume is gone with it."""

    volume: str
    path: str


@dataclass(frozen=True)
class Stats:
    """NodeGetVolumeStats."""

    volume: str
    path: str


@dataclass(frozen=True)
class Health:
    """ControllerGetVolumeHealth, or NodeGetVolumeHealth."""

    volume: str
    by_node: bool


@dataclass(frozen=True)
class NodeExpand:
    """NodeExpandVolume."""

    volume: str
    path: str
    required_bytes: int = 0
    limit_bytes: int = 0
    key: str = ""


Call = (
    Create
    | Modify
    | Delete
    | Get
    | Validate
    | Volumes
    | Snapshot
    | DeleteSnapshot
    | Snapshots
    | Capacity
    | Expand
    | Stage
    | Unstage
    | Publish
    | PublishInline
    | Unpublish
    | Stats
    | Health
    | NodeExpand
)


@dataclass(frozen=True)
class Outcome:
    """A call's gRPC code and, where that is OK, what of its answer is compared."""

    code: str
    value: object = None


@dataclass(frozen=True)
class State:
    """What a machine has of Carver, in words that the model and a real machine share.

    `volumes` are (name, bytes, formatted with, state, active, bytes that are read ahead or auto);
    `places` (path, volume, fs or block, read-only), as often as mounted; `loops` (volume, loop
    devices over it); `entries` (path, dir or file); `mappings` (volume, bytes) what is open of
    encrypted ones.
    """

    volumes: tuple[tuple[str, int, str, str, bool, str], ...]
    places: tuple[tuple[str, str, str, bool], ...]
    loops: tuple[tuple[str, int], ...]
    entries: tuple[tuple[str, str], ...]
    free_bytes: int
    mappings: tuple[tuple[str, int], ...] = ()

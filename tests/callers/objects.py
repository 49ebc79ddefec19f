"""What the API server keeps of claims, volumes, pods and snapshots, where callers ask for it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from proto import csi_pb2 as csi

SIDECAR_PREFIX = "csi.storage.k8s.io/"
# Of all pods and claims.
NAMESPACE = "shop"
FS_TYPE = f"{SIDECAR_PREFIX}fstype"


@dataclass(frozen=True)
class StorageClass:
    """With the parameters as people wrote them.

    Its volumes wait for their first consumer unless it binds immediately.
    """

    name: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    is_immediate: bool = False
    # The nodes of its allowedTopologies; all where it is empty.
    allowed: tuple[str, ...] = ()

    @property
    def fs_type(self) -> str:
        """What the provisioner puts into a capability (`--default-fstype=ext4`)."""
        return self.parameters.get(FS_TYPE, "ext4")


@dataclass
class PersistentVolume:
    """A volume that was provisioned, on the one node that can have it."""

    name: str
    id: str
    node: str
    size_bytes: int
    storage_class: str
    capability: csi.VolumeCapability
    context: Mapping[str, str]
    # `csi.readOnly`, which only ControllerPublishVolume has.
    read_only: bool = False


class Resize(enum.Enum):
    """A claim's allocatedResourceStatuses."""

    NONE = ""
    IN_PROGRESS = "ControllerResizeInProgress"
    INFEASIBLE = "ControllerResizeInfeasible"
    ON_NODE = "NodeResizePending"

    def __bool__(self) -> bool:
        return self is not Resize.NONE


@dataclass(eq=False)
class Claim:
    """A PersistentVolumeClaim. `source` is what it is made of: a Claim, a Snapshot or nothing."""

    name: str
    storage_class: str
    size_bytes: int
    capability: csi.VolumeCapability
    source: "Claim | Snapshot | None" = None
    selected_node: str = ""
    volume: PersistentVolume | None = None
    # What the pod can write: less than the volume's size until the node has grown it.
    capacity_bytes: int = 0
    is_infeasible: bool = False
    # By the cluster's resizer: how far it is, and the size it asked for last.
    resize: Resize = Resize.NONE
    allocated_bytes: int = 0
    # The VolumeAttributesClass that is wanted, and the one that its volume has.
    attributes_class: str = ""
    current_attributes_class: str = ""
    is_deleted: bool = False
    # CreateVolume may still be at work: it is called until the answer is final.
    is_under_way: bool = False

    @property
    def has_size(self) -> bool:
        """Whether it has the size that is asked for, or says that it cannot be had."""
        is_refused = self.resize is Resize.INFEASIBLE and self.allocated_bytes == self.size_bytes
        return is_refused or self.size_bytes <= self.capacity_bytes


@dataclass(eq=False)
class VolumeAttachment:
    """That a volume is to be attached to a node; gone once it is detached.

    `context` is what the driver has stage and publish know.
    """

    volume: PersistentVolume
    node: str
    is_attached: bool = False
    is_deleted: bool = False
    context: Mapping[str, str] = field(default_factory=dict)
    # Whether it is to be attached, or detached, though it is said to be so.
    is_doubted: bool = False
    # When the volume was to be detached at first.
    asked_at: int = -1


@dataclass(eq=False)
class Pod:
    """A pod with its claims. `nodes` are those that its affinity allows, all where it is empty."""

    name: str
    claims: tuple[Claim, ...]
    nodes: frozenset[str] = frozenset()
    read_only: bool = False
    # The node of the cycle that waits for the claims, and how many cycles found a node.
    assumed_node: str = ""
    cycles: int = 0
    node: str = ""
    is_running: bool = False
    is_deleted: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether neither it nor one of its claims was deleted."""
        return not self.is_deleted and not any(one.is_deleted for one in self.claims)

    @property
    def volumes(self) -> list[PersistentVolume]:
        """The volumes of its claims that are bound."""
        return [one.volume for one in self.claims if one.volume is not None]


@dataclass(eq=False)
class Snapshot:
    """A VolumeSnapshot with its content."""

    name: str
    claim: Claim
    id: str = ""
    node: str = ""
    is_ready: bool = False
    is_deleted: bool = False

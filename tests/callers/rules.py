"""How each caller takes each code, as data: callers.md is this table, for people.

Read in the callers' sources, which each rule names. The fake callers act by it, and the recorded
requests are judged by it.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

KUBELET = "kubelet"
PROVISIONER = "external-provisioner"
RESIZER = "external-resizer"
SNAPSHOTTER = "external-snapshotter"
SIDECARS = "every sidecar"


class Reaction(enum.Enum):
    """What a caller does after an answer."""

    GOES_ON = "goes on"
    REPEATS = "repeats it, and gives up nothing"
    RESCHEDULES = "gives the node up: the scheduler chooses again"
    STICKS = "repeats it on the same node for ever"
    FORGETS = "takes it for not done; repeats it while it is wanted, and undoes nothing"
    BLOCKS = "repeats it; a pod that starts waits for it in ContainerCreating"
    INFEASIBLE = "marks the claim, and goes on without"
    INSISTS = "repeats it with the same size, also after the claim was made smaller"
    MARKS = "marks the claim; a pod that starts waits, as the resizer takes the mark away"
    WAITS = "waits until the volume is out of use"
    STAYS = "goes on with the size that there is; asks again when the volume is mounted next"
    KEEPS = "keeps the capacity object as it is, or has none"
    ENDS = "ends, and is started again"

    @property
    def is_a_stop(self) -> bool:
        """Whether the caller comes no further by itself to what it is for."""
        going_on = (Reaction.GOES_ON, Reaction.REPEATS, Reaction.RESCHEDULES, Reaction.INSISTS)
        return self not in going_on


# "Still in progress" to all of them: gRPC's own codes, and CSI's "operation pending for volume".
IN_PROGRESS = ("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE")
# And to kubelet and the snapshotter: gRPC's "out of resources for now".
NOT_FINAL = (*IN_PROGRESS, "RESOURCE_EXHAUSTED")
NEVER = ("INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE")


@dataclass(frozen=True)
class Rule:
    """One call of one caller: what it fills, and how it takes each code that is not OK."""

    caller: str
    method: str
    source: str
    otherwise: Reaction
    codes: Mapping[str, Reaction] = field(default_factory=dict)
    # The reason of the Warning event that comes with each error, where there is one.
    warning: str = ""
    fields: tuple[str, ...] = ()

    def reaction(self, code: str) -> Reaction:
        """What the caller does."""
        return Reaction.GOES_ON if code == "OK" else self.codes.get(code, self.otherwise)

    def row(self) -> str:
        """The rule as callers.md has it."""
        by_reaction: dict[Reaction, list[str]] = {}
        for code, reaction in self.codes.items():
            by_reaction.setdefault(reaction, []).append(code)
        taken = [f"{', '.join(codes)}: {one.value}" for one, codes in by_reaction.items()]
        cells = (
            self.caller,
            f"`{self.method}`",
            ", ".join(f"`{one}`" for one in self.fields) or "-",
            "; ".join([*taken, f"{'all others' if taken else 'all'}: {self.otherwise.value}"]),
            self.warning or "-",
            self.source,
        )
        return f"| {' | '.join(cells)} |"


def _each(codes: tuple[str, ...], reaction: Reaction) -> dict[str, Reaction]:
    return dict.fromkeys(codes, reaction)


_sidecars, _provisioner, _resizer, _snapshotter, _kubelet = (
    partial(Rule, one) for one in (SIDECARS, PROVISIONER, RESIZER, SNAPSHOTTER, KUBELET)
)
_CLIENT = "kubernetes `pkg/volume/csi/csi_client.go` isFinalError"
_HEALTH = "kubernetes `pkg/kubelet/volumemanager/volumehealth/manager.go`"
_STAGED = ("volume_id", "staging_target_path", "volume_capability", "volume_context")

RULES = (
    _sidecars(
        "Probe",
        "csi-lib-utils `rpc/common.go` ProbeForever",
        Reaction.ENDS,
        {"DEADLINE_EXCEEDED": Reaction.REPEATS},
    ),
    *(
        _sidecars(method, f"csi-lib-utils `rpc/common.go` {function}", Reaction.ENDS)
        for method, function in (
            ("GetPluginInfo", "GetDriverName"),
            ("GetPluginCapabilities", "GetPluginCapabilities"),
            ("ControllerGetCapabilities", "GetControllerCapabilities"),
        )
    ),
    _provisioner(
        "NodeGetInfo",
        "external-provisioner `cmd/csi-provisioner/csi-provisioner.go` main",
        Reaction.ENDS,
    ),
    _provisioner(
        "CreateVolume",
        "external-provisioner `pkg/controller/controller.go` checkError",
        Reaction.STICKS,
        _each(IN_PROGRESS, Reaction.REPEATS) | {"RESOURCE_EXHAUSTED": Reaction.RESCHEDULES},
        "ProvisioningFailed",
        (
            "name",
            "capacity_range",
            "volume_capabilities",
            "parameters",
            "volume_content_source",
            "accessibility_requirements",
        ),
    ),
    _provisioner(
        "DeleteVolume",
        "sig-storage-lib-external-provisioner `controller/controller.go` deleteVolumeOperation",
        Reaction.REPEATS,
        warning="VolumeFailedDelete",
        fields=("volume_id",),
    ),
    _provisioner(
        "GetCapacity",
        "external-provisioner `pkg/capacity/capacity.go` syncCapacity",
        Reaction.KEEPS,
        fields=("parameters", "volume_capabilities", "accessible_topology"),
    ),
    _snapshotter(
        "CreateSnapshot",
        "external-snapshotter `pkg/sidecar-controller/snapshot_controller.go` isCSIFinalError",
        Reaction.FORGETS,
        _each(NOT_FINAL, Reaction.REPEATS),
        "SnapshotCreationFailed",
        ("name", "source_volume_id"),
    ),
    _snapshotter(
        "DeleteSnapshot",
        "external-snapshotter `pkg/sidecar-controller/snapshot_controller.go`"
        " deleteCSISnapshotOperation",
        Reaction.REPEATS,
        warning="SnapshotDeleteError",
        fields=("snapshot_id",),
    ),
    _snapshotter(
        "CreateVolumeGroupSnapshot",
        "external-snapshotter `pkg/sidecar-controller/groupsnapshot_helper.go`"
        " createGroupSnapshotWrapper",
        Reaction.FORGETS,
        _each(NOT_FINAL, Reaction.REPEATS),
        "GroupSnapshotCreationFailed",
        ("name", "source_volume_ids"),
    ),
    _snapshotter(
        "DeleteVolumeGroupSnapshot",
        "external-snapshotter `pkg/sidecar-controller/groupsnapshot_helper.go`"
        " deleteCSIGroupSnapshotOperation",
        Reaction.REPEATS,
        warning="GroupSnapshotDeleteError",
        fields=("group_snapshot_id", "snapshot_ids"),
    ),
    _resizer(
        "ControllerExpandVolume",
        "external-resizer `pkg/controller/expand_and_recover.go` callResizeOnPlugin",
        Reaction.REPEATS,
        _each(NOT_FINAL, Reaction.INSISTS)
        | _each(NEVER, Reaction.INFEASIBLE)
        | {"FAILED_PRECONDITION": Reaction.WAITS},
        "VolumeResizeFailed",
        ("volume_id", "capacity_range", "volume_capability"),
    ),
    _resizer(
        "ControllerModifyVolume",
        "external-resizer `pkg/modifycontroller/modify_volume.go`",
        Reaction.REPEATS,
        _each(NEVER, Reaction.INFEASIBLE),
        "VolumeModifyFailed",
        ("volume_id", "mutable_parameters"),
    ),
    _kubelet(
        "NodeGetInfo", "kubernetes `pkg/volume/csi/csi_plugin.go` RegisterPlugin", Reaction.REPEATS
    ),
    _kubelet(
        "NodeGetCapabilities",
        "kubernetes `pkg/volume/csi/csi_client.go` nodeGetCapabilities",
        Reaction.REPEATS,
    ),
    _kubelet(
        "NodeStageVolume",
        f"{_CLIENT}; `csi_attacher.go` MountDevice, `csi_block.go` SetUpDevice",
        Reaction.FORGETS,
        _each(NOT_FINAL, Reaction.REPEATS),
        "FailedMount",
        _STAGED,
    ),
    _kubelet(
        "NodePublishVolume",
        f"{_CLIENT}; `csi_mounter.go` SetUpAt, `csi_block.go` MapPodDevice",
        Reaction.FORGETS,
        _each(NOT_FINAL, Reaction.REPEATS),
        "FailedMount",
        (*_STAGED, "target_path", "readonly"),
    ),
    _kubelet(
        "NodeUnpublishVolume",
        "kubernetes `pkg/volume/csi/csi_mounter.go` TearDownAt",
        Reaction.REPEATS,
        fields=("volume_id", "target_path"),
    ),
    _kubelet(
        "NodeUnstageVolume",
        "kubernetes `pkg/volume/csi/csi_attacher.go` UnmountDevice",
        Reaction.REPEATS,
        fields=("volume_id", "staging_target_path"),
    ),
    _kubelet(
        "NodeExpandVolume",
        "kubernetes `pkg/volume/csi/expander.go` nodeExpandWithClient;"
        " `pkg/volume/util/operationexecutor/node_expander.go` expandOnPlugin",
        Reaction.BLOCKS,
        _each(NOT_FINAL, Reaction.REPEATS)
        | _each(NEVER, Reaction.MARKS)
        | {"FAILED_PRECONDITION": Reaction.STAYS},
        "VolumeResizeFailed",
        ("volume_id", "volume_path", "capacity_range", "staging_target_path", "volume_capability"),
    ),
    _kubelet(
        "NodeGetVolumeStats",
        "kubernetes `pkg/volume/csi/csi_metrics.go` GetMetrics",
        Reaction.REPEATS,
        fields=("volume_id", "volume_path"),
    ),
    _kubelet(
        "NodeGetVolumeHealth",
        f"{_HEALTH} probeVolumeHealth",
        Reaction.REPEATS,
        fields=("volume_id", "volume_publish_path", "staging_target_path"),
    ),
    _kubelet("NodeGetStorageHealth", f"{_HEALTH} probeStorageHealth", Reaction.REPEATS),
)


def of(method: str, caller: str = "") -> Rule:
    """The rule of a call; its usual caller's, where none is named."""
    return next(
        one for one in reversed(RULES) if one.method == method and caller in ("", one.caller)
    )

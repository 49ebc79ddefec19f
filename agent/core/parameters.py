"""What classes and pods say of volumes and snapshots, beside what Kubernetes tells of itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from agent.core import classes, errors, fields, tag, values
from lvm import tags
from lvm.layout import Reserve
from lvm.tuning import Tuning
from mount import errors as mount_errors
from mount import filesystem

# CSI spec, "Size Limits".
_MAXIMUM_MAP_BYTES = 4096
# Kubernetes' own keys. Sidecars strip them from some calls (CreateVolume) and leave them in others
# (GetCapacity, pkg/capacity of external-provisioner); kubelet adds some. They are never refused.
_KUBERNETES_PREFIX = "csi.storage.k8s.io/"
# Those that say the file system. The second has no prefix, is deprecated, and still understood by
# external-provisioner.
_FS_TYPE = (f"{_KUBERNETES_PREFIX}fstype", "fstype")
# What the external-provisioner adds with --extra-create-metadata. Kept as tags, for people.
_ABOUT = {
    "csi.storage.k8s.io/pvc/name": tag.PVC,
    "csi.storage.k8s.io/pvc/namespace": tag.NAMESPACE,
    "csi.storage.k8s.io/pv/name": tag.PV,
}
# What kubelet adds where the CSIDriver has podInfoOnMount.
_POD = {
    "csi.storage.k8s.io/pod.name": tag.POD,
    "csi.storage.k8s.io/pod.namespace": tag.NAMESPACE,
    "csi.storage.k8s.io/pod.uid": tag.POD_UID,
    "csi.storage.k8s.io/serviceAccount.name": "serviceAccount",
}


@dataclass(frozen=True)
class Parameters:
    """What a StorageClass may say, with or without the prefix `carver/`."""

    device_class: str = ""
    fs_type: str = ""
    mkfs_options: tuple[str, ...] = ()
    mount_options: tuple[str, ...] = ()
    about: Mapping[str, str] | None = None
    # Fields of lvm.layout.Layout that are not to be the class's.
    layout: Mapping[str, int] = field(default_factory=dict)
    cache_size: Reserve | None = None
    encryption: str = ""
    reencrypt: bool = False

    @classmethod
    def from_proto(cls, wire: Mapping[str, str], field: str = "parameters") -> Self:
        """Read and check a StorageClass's parameters: each must be known."""
        found, about = _of_volume(wire, field, fields.STORAGE_CLASS_PARAMETERS, _ABOUT)
        return cls._read(found, field, about)

    @classmethod
    def from_pod(cls, wire: Mapping[str, str]) -> tuple[Self, str]:
        """Read an inline volume's attributes and its size, among what kubelet tells of the pod."""
        field = "volume_context"
        found, about = _of_volume(wire, field, fields.INLINE_PARAMETERS, _POD)
        size = found.pop(fields.SIZE, "")
        return cls._read(found, field, about), size

    @classmethod
    def from_context(cls, wire: Mapping[str, str]) -> Self:
        """Read a volume_context: what `context` made, among keys that other programs added."""
        own = {
            key.removeprefix(fields.PARAMETER_PREFIX): value
            for key, value in wire.items()
            if key.startswith(fields.PARAMETER_PREFIX)
        }
        for key in own:
            if key not in fields.PARAMETERS:
                raise errors.NotAllowed(
                    "volume_context", fields.PARAMETER_PREFIX + key, fields.PARAMETERS
                )
        return cls._read(own, "volume_context", {})

    @classmethod
    def _read(cls, found: Mapping[str, str], field: str, about: Mapping[str, str]) -> Self:
        for key, value in (*found.items(), *about.items()):
            _check_fits(field, key, value)
        fs_type = found.get(tag.FS_TYPE, "")
        if fs_type and fs_type not in filesystem.FILE_SYSTEMS:
            raise errors.NotAllowed(f"{field}[fsType]", fs_type, filesystem.FILE_SYSTEMS)
        mount_options = tuple(filter(None, found.get(tag.MOUNT_OPTIONS, "").split(",")))
        fields.mount_options(f"{field}[mountOptions]", mount_options)
        layout = {
            one: fields.number(f"{field}[{key}]", found[key], read)
            for key, (one, read) in fields.LAYOUT_PARAMETERS.items()
            if key in found
        }
        encryption = found.get(tag.ENCRYPTION, "")
        if encryption and encryption not in classes.ENCRYPTIONS:
            raise errors.NotAllowed(f"{field}[{tag.ENCRYPTION}]", encryption, classes.ENCRYPTIONS)
        reencrypt = found.get(tag.REENCRYPT, "")
        if reencrypt and reencrypt != fields.YES:
            raise errors.NotAllowed(f"{field}[{tag.REENCRYPT}]", reencrypt, [fields.YES])
        cache_size = None
        if fields.CACHE_SIZE in found:
            cache_size = fields.number(
                f"{field}[{fields.CACHE_SIZE}]", found[fields.CACHE_SIZE], values.parse_part
            )
        return cls(
            device_class=found.get(tag.CLASS, ""),
            fs_type=fs_type,
            mkfs_options=tuple(found.get(tag.MKFS_OPTIONS, "").split()),
            mount_options=mount_options,
            about=about,
            layout=layout,
            cache_size=cache_size,
            encryption=encryption,
            reencrypt=bool(reencrypt),
        )

    def check_for(self, fs_type: str, field: str) -> None:
        """Check the options against the one file system that they are for."""
        try:
            filesystem.check_options(fs_type, self.mkfs_options)
        except mount_errors.BadOption as error:
            raise errors.BadField(f"{field}[mkfsOptions]", str(error)) from None
        fields.mount_options(f"{field}[mountOptions]", self.mount_options, fs_type)

    def context(self) -> dict[str, str]:
        """The volume_context that carries what staging needs."""
        values = {
            tag.CLASS: self.device_class,
            tag.FS_TYPE: self.fs_type,
            tag.MKFS_OPTIONS: " ".join(self.mkfs_options),
            tag.MOUNT_OPTIONS: ",".join(self.mount_options),
            tag.ENCRYPTION: self.encryption,
            tag.REENCRYPT: fields.YES if self.reencrypt else "",
        }
        return {fields.PARAMETER_PREFIX + key: value for key, value in values.items() if value}


def snapshot_parameters(
    parameters: Mapping[str, str], known: Mapping[str, str]
) -> tuple[Reserve | None, dict[str, str]]:
    """The size of a snapshot's area, if the parameters say it, and what they tell about it."""
    field = "parameters"
    _check_map(field, parameters)
    about, rest = _told(parameters, known)
    for key, value in about.items():
        _check_fits(field, key, value)
    found = _known(rest, field, fields.SNAPSHOT_PARAMETERS)
    if fields.SIZE not in found:
        return None, about
    return fields.number(f"{field}[{fields.SIZE}]", found[fields.SIZE], values.parse_part), about


def tuning_of(wire: Mapping[str, str]) -> Tuning:
    """A VolumeAttributesClass's parameters, beside what sidecars tell of the claim."""
    _check_map(fields.MUTABLE, wire)
    _, rest = _told(wire, _ABOUT)
    found = _known(rest, fields.MUTABLE, tuple(fields.MUTABLE_PARAMETERS))
    said: dict[str, Any] = {
        part: fields.number(f"{fields.MUTABLE}[{key}]", found[key], read)
        for key, (part, read) in fields.MUTABLE_PARAMETERS.items()
        if key in found
    }
    if why := Tuning(**said).refusal:
        raise errors.BadField(fields.MUTABLE, why)
    return Tuning(**said)


def _told(
    wire: Mapping[str, str], names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """What Kubernetes tells, by the names of the tags that it is kept as, and what is Carver's."""
    about = {names[key]: value for key, value in wire.items() if key in names}
    own = {key: value for key, value in wire.items() if not key.startswith(_KUBERNETES_PREFIX)}
    return about, own


def _of_volume(
    wire: Mapping[str, str], field: str, allowed: Sequence[str], names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """A volume's parameters, and what Kubernetes tells of it."""
    _check_map(field, wire)
    about, own = _told(wire, names)
    found = _known({key: own[key] for key in own if key not in _FS_TYPE}, field, allowed)
    for key in _FS_TYPE:
        if told := wire.get(key, ""):
            if (other := found.get(tag.FS_TYPE) or told) != told:
                raise errors.BadField(
                    f"{field}[{key}]", f"{told!r}, but {other!r} is asked for too"
                )
            found[tag.FS_TYPE] = told
    return found, about


def _known(wire: Mapping[str, str], field: str, allowed: Sequence[str]) -> dict[str, str]:
    """Parameters by their names, without the prefix; each must be allowed, and given once."""
    found: dict[str, str] = {}
    for key, value in wire.items():
        name = key.removeprefix(fields.PARAMETER_PREFIX)
        if name not in allowed:
            raise errors.NotAllowed(field, key, [fields.PARAMETER_PREFIX + one for one in allowed])
        if name in found:
            raise errors.BadField(f"{field}[{key}]", "is given with the prefix and without")
        found[name] = value
    return found


def _check_fits(field: str, key: str, value: str) -> None:
    if not tags.fits(key, value):
        raise errors.BadField(f"{field}[{key}]", "is too long to be kept in an LVM tag")


def _check_map(field: str, wire: Mapping[str, str]) -> None:
    if sum(len(key.encode()) + len(value.encode()) for key, value in wire.items()) > (
        _MAXIMUM_MAP_BYTES
    ):
        raise errors.BadField(field, f"are larger than {_MAXIMUM_MAP_BYTES} bytes")

"""Parameters of StorageClasses, inline volumes, VolumeAttributesClasses and snapshot classes.

Each is a row of one of the tables below. A new one is a row; if it changes how a volume is made,
also a function that applies it. What creates, compares, validates and stages volumes goes by rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from agent.core import errors, tag
from agent.settings import classes, values
from agent.settings.classes import DeviceClass
from lvm.layout import Reserve
from lvm.tuning import Tuning
from mount import filesystem, options
from mount import mount_errors as mount_errors

# May stand before any key; in a volume_context it always does.
PREFIX = "carver/"
MUTABLE_FIELD = "mutable_parameters"
EPHEMERAL = "csi.storage.k8s.io/ephemeral"
CACHE_SIZE = "cacheSize"
SIZE = "size"


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    `read` makes its value of a text; raises ValueError. `tag` keeps it with the volume, and what is
    kept must be the same in a repeated CreateVolume. `text` is its value in that tag and in the
    volume_context, where an empty one is left out; None: `tag` holds more than this value, and the
    volume_context nothing. `part` is the field of the Layout or Tuning that it sets. `apply`
    changes the class that a new volume is made by; raises ValueError.
    """

    key: str
    read: Callable[[str], Any]
    tag: str = ""
    text: Callable[[Any], str] | None = None
    part: str = ""
    apply: Callable[[DeviceClass, Any], DeviceClass] | None = None


def _optional(*allowed: str) -> Callable[[str], str]:
    """Read one of a few texts, or an empty one."""
    return lambda text: values.choice(*allowed)(text) if text else ""


def check_mount_options(field: str, flags: Sequence[str], fs_type: str | None = None) -> None:
    """Raise BadField for options that the file system, or any, does not have."""
    try:
        options.parse(flags, fs_type)
    except mount_errors.BadOption as error:
        raise errors.BadField(field, str(error)) from None


def _mount_options(text: str) -> tuple[str, ...]:
    found = tuple(filter(None, text.split(",")))
    try:
        options.parse(found, None)
    except mount_errors.BadOption as error:
        raise ValueError(str(error)) from None
    return found


def _inline_size(text: str) -> int:
    """Bytes; 0 for an empty text: the default size."""
    if not text:
        return 0
    size_bytes = values.parse_size(text)
    if size_bytes == 0:
        raise ValueError("must be larger than 0")
    return size_bytes


def _set_cache_size(one: DeviceClass, size: Reserve) -> DeviceClass:
    if one.cache is None:
        raise ValueError("the class has no cache; name one that has")
    if one.layout.is_thin:
        raise ValueError("cannot be set for a volume of a thin pool: the cache is its pool's")
    return replace(one, cache=replace(one.cache, size=size))


def _set_encryption(one: DeviceClass, encryption: str) -> DeviceClass:
    return replace(one, encryption=encryption or one.encryption)


def _of_layout(key: str, read: Callable[[str], Any], part: str) -> Parameter:
    """A parameter that overrides a field of the class's layout."""

    def apply(one: DeviceClass, value: Any) -> DeviceClass:
        # Neither is created by Layout.words, which would be ignored.
        if (one.layout.is_thin or one.cache) and value != getattr(one.layout, part):
            raise ValueError("cannot be set for a class that is thin or has a cache")
        changed: dict[str, Any] = {part: value}
        return replace(one, layout=replace(one.layout, **changed))

    return Parameter(key, read, tag.LAYOUT, None, part, apply)


# Limits of a volume's I/O: a StorageClass's, a pod's or a VolumeAttributesClass's. Kept as tags.
LIMITS: Sequence[Parameter] = (
    Parameter("readIOPS", values.parse_iops, part="read_iops"),
    Parameter("writeIOPS", values.parse_iops, part="write_iops"),
    Parameter("readBandwidth", values.parse_bandwidth, part="read_bandwidth"),
    Parameter("writeBandwidth", values.parse_bandwidth, part="write_bandwidth"),
    Parameter("readIOPSPerGiB", values.parse_iops_per_gib, part="read_iops_per_gib"),
    Parameter("writeIOPSPerGiB", values.parse_iops_per_gib, part="write_iops_per_gib"),
    Parameter("readBandwidthPerGiB", values.parse_bandwidth_per_gib, part="read_bandwidth_per_gib"),
    Parameter(
        "writeBandwidthPerGiB", values.parse_bandwidth_per_gib, part="write_bandwidth_per_gib"
    ),
)
# A StorageClass's. Applied in this order.
STORAGE_CLASS: Sequence[Parameter] = (
    _of_layout("stripes", values.parse_count, "stripes"),
    _of_layout("stripeSize", values.parse_size, "stripe_size_bytes"),
    _of_layout("mirrors", values.parse_count, "mirrors"),
    Parameter(CACHE_SIZE, values.parse_part, tag.CACHE, apply=_set_cache_size),
    Parameter(tag.CLASS, str, tag.CLASS, str),
    Parameter(tag.FS_TYPE, _optional(*filesystem.FILE_SYSTEMS), tag.FS_TYPE, str),
    Parameter(tag.MKFS_OPTIONS, lambda text: tuple(text.split()), tag.MKFS_OPTIONS, " ".join),
    Parameter(tag.MOUNT_OPTIONS, _mount_options, tag.MOUNT_OPTIONS, ",".join),
    Parameter(
        *(tag.ENCRYPTION, _optional(*classes.ENCRYPTIONS), tag.ENCRYPTION, str),
        apply=_set_encryption,
    ),
    *LIMITS,
)
# A pod's, of its inline volume.
INLINE: Sequence[Parameter] = (*STORAGE_CLASS, Parameter(SIZE, _inline_size))
# A VolumeAttributesClass's: what may change while a volume lives. lvm.tuning has LVM keep them, and
# agent.volumes.limiter applies the limits.
MUTABLE: Sequence[Parameter] = (
    Parameter("readAhead", values.parse_read_ahead, part="read_ahead_bytes"),
    Parameter("minimumRecoveryRate", values.parse_rate, part="minimum_recovery_kib"),
    Parameter("maximumRecoveryRate", values.parse_rate, part="maximum_recovery_kib"),
    *LIMITS,
)
# A VolumeSnapshotClass's or VolumeGroupSnapshotClass's.
SNAPSHOT: Sequence[Parameter] = (Parameter(SIZE, values.parse_part),)
# In a volume_context, and each in a tag of its own. The last one is in those that versions up to
# 0.2.0 made, and in their streams: it has no effect any more.
IN_CONTEXT = (
    *(row for row in STORAGE_CLASS if row.text is not None),
    Parameter(tag.REENCRYPT, _optional("true"), tag.REENCRYPT, str),
)

# CSI spec, "Size Limits".
_MAXIMUM_MAP_BYTES = 4096
# Kubernetes' own keys. Sidecars strip them from some calls (CreateVolume) and leave them in others
# (GetCapacity, pkg/capacity of external-provisioner); kubelet adds some. They are never refused.
_KUBERNETES_PREFIX = "csi.storage.k8s.io/"
# Name the file system. The second has no prefix, is deprecated, and still understood by
# external-provisioner.
_FS_TYPE = (f"{_KUBERNETES_PREFIX}fstype", "fstype")
# The tags that keep what Kubernetes says of an object, for people. Added by external-provisioner
# with --extra-create-metadata;
_OF_CLAIM = {
    "csi.storage.k8s.io/pvc/name": tag.PVC,
    "csi.storage.k8s.io/pvc/namespace": tag.NAMESPACE,
    "csi.storage.k8s.io/pv/name": tag.PV,
}
# by kubelet where the CSIDriver has podInfoOnMount;
_OF_POD = {
    "csi.storage.k8s.io/pod.name": tag.POD,
    "csi.storage.k8s.io/pod.namespace": tag.NAMESPACE,
    "csi.storage.k8s.io/pod.uid": tag.POD_UID,
    "csi.storage.k8s.io/serviceAccount.name": tag.SERVICE_ACCOUNT,
}
# by external-snapshotter with --extra-create-metadata.
OF_SNAPSHOT = {
    "csi.storage.k8s.io/volumesnapshot/name": tag.SNAPSHOT,
    "csi.storage.k8s.io/volumesnapshot/namespace": tag.NAMESPACE,
    "csi.storage.k8s.io/volumesnapshotcontent/name": tag.CONTENT,
}
OF_GROUP_SNAPSHOT = {
    "csi.storage.k8s.io/volumegroupsnapshot/name": tag.GROUP_SNAPSHOT_NAME,
    "csi.storage.k8s.io/volumegroupsnapshot/namespace": tag.NAMESPACE,
    "csi.storage.k8s.io/volumegroupsnapshotcontent/name": tag.CONTENT,
}
# Tags with the name or the UID of an object in Kubernetes. CONTENT may also be a number of bytes.
OBJECT_NAMES = frozenset[str]().union(
    *(one.values() for one in (_OF_CLAIM, _OF_POD, OF_SNAPSHOT, OF_GROUP_SNAPSHOT))
)


@dataclass(frozen=True)
class Parameters:
    """Parameters of a volume by their keys, as read; `about` are tags that keep metadata."""

    given: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_proto(cls, wire: Mapping[str, str], field: str = "parameters") -> Self:
        """Read a StorageClass's parameters: each must be known. Raises BadField."""
        return cls(*_of_volume(field, wire, STORAGE_CLASS, _OF_CLAIM))

    @classmethod
    def from_pod(cls, wire: Mapping[str, str]) -> Self:
        """Read an inline volume's attributes, beside what kubelet adds. Raises BadField."""
        return cls(*_of_volume("volume_context", wire, INLINE, _OF_POD))

    @classmethod
    def from_context(cls, wire: Mapping[str, str], *, newer: bool = True) -> Self:
        """Read a volume_context that `context` made; other programs may have added keys.

        Those of a `newer` version are passed over: what must be known is in the volume's tags
        (agent.core.tag.NEEDS). Else each of Carver's must be known; raises BadField.
        """
        own = {key: value for key, value in wire.items() if key.startswith(PREFIX)}
        if newer:
            known = {PREFIX + row.key for row in IN_CONTEXT}
            own = {key: value for key, value in own.items() if key in known}
        return cls(_read("volume_context", own, IN_CONTEXT))

    @property
    def device_class(self) -> str:
        """The device class's name; empty for the default."""
        return str(self.given.get(tag.CLASS, ""))

    @property
    def fs_type(self) -> str:
        """The file system; empty for the class's."""
        return str(self.given.get(tag.FS_TYPE, ""))

    @property
    def mkfs_options(self) -> tuple[str, ...]:
        """Arguments of mkfs."""
        return tuple(self.given.get(tag.MKFS_OPTIONS, ()))

    @property
    def mount_options(self) -> tuple[str, ...]:
        """Options of each mount."""
        return tuple(self.given.get(tag.MOUNT_OPTIONS, ()))

    @property
    def tuning(self) -> Tuning:
        """The mutable parameters among them."""
        return _tuning(self.given, LIMITS)

    @property
    def is_encrypted(self) -> bool:
        """Whether encryption is asked for."""
        return bool(self.given.get(tag.ENCRYPTION))

    def check_for(self, fs_type: str, field: str) -> None:
        """Check the options against the one file system that they are for."""
        try:
            filesystem.check_options(fs_type, self.mkfs_options)
        except mount_errors.BadOption as error:
            raise errors.BadField(f"{field}[mkfsOptions]", str(error)) from None
        check_mount_options(f"{field}[mountOptions]", self.mount_options, fs_type)

    def applied(self, one: DeviceClass, field: str) -> DeviceClass:
        """A class with what the parameters override; raises BadField."""
        for row in STORAGE_CLASS:
            if row.apply is None or row.key not in self.given:
                continue
            try:
                one = row.apply(one, self.given[row.key])
            except ValueError as error:
                raise errors.BadField(
                    f"{field}[{row.key}]", f"{error} (class {one.name})"
                ) from None
        return one

    def completed(self, one: DeviceClass, fs_type: str) -> Self:
        """The parameters with all that a class and a file system add, so that both may change."""
        inherits = not self.mkfs_options and fs_type == one.fs_type
        own = {
            tag.CLASS: one.name,
            tag.FS_TYPE: fs_type,
            tag.MKFS_OPTIONS: one.mkfs_options if inherits else self.mkfs_options,
            tag.ENCRYPTION: one.encryption,
        }
        return replace(self, given={**self.given, **own})

    def with_value(self, key: str, value: Any) -> Self:
        """The parameters with another value of one."""
        return replace(self, given={**self.given, key: value})

    def own_tags(self) -> dict[str, str]:
        """The tags that keep them, but for those that keep more (`Parameter.text`)."""
        texts = {
            row.tag: row.text(self.given[row.key])
            for row in IN_CONTEXT
            if row.text is not None and row.key in self.given
        }
        return {key: text for key, text in texts.items() if text}

    def context(self) -> dict[str, str]:
        """The volume_context that carries what staging needs."""
        return context_of(self.own_tags())


def context_of(own_tags: Mapping[str, str]) -> dict[str, str]:
    """The volume_context of a volume with these tags."""
    return {PREFIX + row.key: own_tags[row.tag] for row in IN_CONTEXT if row.tag in own_tags}


def snapshot_parameters(
    wire: Mapping[str, str], names: Mapping[str, str]
) -> tuple[Reserve | None, dict[str, str]]:
    """Read a snapshot class's parameters: the size of the COW store, if given, and metadata tags.

    `names` are the tags by the keys of external-snapshotter. Raises BadField.
    """
    field = "parameters"
    _check_map(field, wire)
    about = _about(field, wire, names)
    return _read(field, _without_kubernetes(wire), SNAPSHOT).get(SIZE), about


def tuning_of(wire: Mapping[str, str]) -> Tuning:
    """Read a VolumeAttributesClass's parameters; raises BadField."""
    _check_map(MUTABLE_FIELD, wire)
    given = _read(MUTABLE_FIELD, _without_kubernetes(wire), MUTABLE)
    tuning = _tuning(given, MUTABLE)
    if why := tuning.refusal:
        raise errors.BadField(MUTABLE_FIELD, why)
    return tuning


def _tuning(given: Mapping[str, Any], rows: Sequence[Parameter]) -> Tuning:
    return Tuning(**{row.part: given[row.key] for row in rows if row.key in given})


def _of_volume(
    field: str, wire: Mapping[str, str], rows: Sequence[Parameter], names: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """A volume's parameters, and the tags of what Kubernetes says of it."""
    _check_map(field, wire)
    own = _without_kubernetes(wire)
    own = {key: value for key, value in own.items() if key not in _FS_TYPE}
    given = _read(field, own, rows)
    for key in _FS_TYPE:
        if wanted := wire.get(key, ""):
            if (other := given.get(tag.FS_TYPE) or wanted) != wanted:
                raise errors.BadField(
                    f"{field}[{key}]", f"{wanted!r}, but {other!r} is asked for too"
                )
            given |= _read(field, {tag.FS_TYPE: wanted}, rows)
    return given, _about(field, wire, names)


def _read(field: str, wire: Mapping[str, str], rows: Sequence[Parameter]) -> dict[str, Any]:
    """Read parameters with or without the prefix; each must be in `rows`, and given once."""
    known = {row.key: row for row in rows}
    given: dict[str, Any] = {}
    for key, text in wire.items():
        name = key.removeprefix(PREFIX)
        if name not in known and name in classes.REMOVED:
            raise errors.BadField(f"{field}[{key}]", classes.REMOVED[name])
        if name not in known:
            raise errors.NotAllowed(field, key, [PREFIX + one for one in known])
        if name in given:
            raise errors.BadField(f"{field}[{key}]", "is given with the prefix and without")
        tag.require_fits(f"{field}[{name}]", name, text)
        try:
            given[name] = known[name].read(text)
        except ValueError as error:
            why = f"{text!r} is not allowed: {error}"
            raise errors.BadField(f"{field}[{name}]", why) from None
    return given


def _without_kubernetes(wire: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in wire.items() if not key.startswith(_KUBERNETES_PREFIX)}


def _about(field: str, wire: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """The tags of what Kubernetes says of an object."""
    about = {names[key]: text for key, text in wire.items() if key in names}
    require_object_names(field, about)
    return about


def require_object_names(field: str, own_tags: Mapping[str, str]) -> None:
    """Raise BadField for a tag that keeps an object's name in Kubernetes, and has another text.

    Such names are printed within lines for a shell.
    """
    for key in OBJECT_NAMES & own_tags.keys():
        try:
            values.parse_object_name(own_tags[key])
        except ValueError as error:
            why = f"{own_tags[key]!r} is not allowed: {error}"
            raise errors.BadField(f"{field}[{key}]", why) from None


def _check_map(field: str, wire: Mapping[str, str]) -> None:
    if sum(len(key.encode()) + len(text.encode()) for key, text in wire.items()) > (
        _MAXIMUM_MAP_BYTES
    ):
        raise errors.BadField(field, f"are larger than {_MAXIMUM_MAP_BYTES} bytes")

"""Parameters of StorageClasses, inline volumes, VolumeAttributesClasses and snapshot classes.

Each parameter is a row of one of the tables below. To add a parameter, add a row; a parameter that
changes how a volume is created also needs a function that applies the parameter to the device
class. The code that creates, compares, validates and stages volumes reads the rows.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from agent.core import errors, tag
from agent.settings import classes, values
from agent.settings.classes import DeviceClass
from lvm.layout import Reserve
from lvm.tuning import AS_IT_IS, Tuning
from mount import filesystem, options
from mount import mount_errors as mount_errors

# Prefix of Carver's keys: optional in parameters, and always present in a volume_context.
PREFIX = "carver/"
MUTABLE_FIELD = "mutable_parameters"
EPHEMERAL = "csi.storage.k8s.io/ephemeral"
CACHE_SIZE = "cacheSize"
SIZE = "size"
# Key of the parameter that lets the cluster's controller release claims of a lost node. It changes
# no volume: only agent.extras.evacuation.lost_claims reads it, from the StorageClass.
RELEASE_ON_NODE_LOSS = "releaseOnNodeLoss"


@dataclass(frozen=True)
class Parameter:
    """A parameter with the name `key`, as a row of a table.

    - `parse` parses the parameter's text; it raises ValueError.
    - `tag` is the key of the LVM tag that keeps the value with the volume. A repeated CreateVolume
      must have the same value for a parameter that is kept.
    - `format` formats the value for the tag and for the volume_context; an empty text is left out
      of both. If `format` is None, the tag holds more than this value, and the volume_context does
      not have the parameter.
    - `field_name` is the name of the field of Layout or Tuning that the parameter sets.
    - `apply` changes the device class by which a new volume is created; it raises ValueError.
    """

    key: str
    parse: Callable[[str], Any]
    tag: str = ""
    format: Callable[[Any], str] | None = None
    field_name: str = ""
    apply: Callable[[DeviceClass, Any], DeviceClass] | None = None


def _optional(*allowed: str) -> Callable[[str], str]:
    """Return a parser that accepts one of the allowed texts, or an empty text."""
    parse = values.choice(*allowed)
    return lambda text: parse(text) if text else ""


def check_mount_options(field: str, flags: Sequence[str], fs_type: str | None = None) -> None:
    """Raise BadField for mount options that are malformed, or that a file system does not have.

    Without `fs_type` the options of every supported file system are allowed.
    """
    try:
        options.parse(flags, fs_type)
    except mount_errors.BadOption as error:
        raise errors.BadField(field, str(error)) from None


def _mount_options(text: str) -> tuple[str, ...]:
    words = tuple(filter(None, text.split(",")))
    try:
        options.parse(words, None)
    except mount_errors.BadOption as error:
        raise ValueError(str(error)) from None
    return words


def _inline_size(text: str) -> int:
    """Parse the size of an inline volume, in bytes; an empty text gives 0, the default size."""
    if not text:
        return 0
    size_bytes = values.parse_size(text)
    if size_bytes == 0:
        raise ValueError("must be larger than 0")
    return size_bytes


def _set_cache_size(device_class: DeviceClass, size: Reserve) -> DeviceClass:
    if device_class.cache is None:
        raise ValueError("the class has no cache; name one that has")
    if device_class.layout.is_thin:
        raise ValueError("cannot be set for a volume of a thin pool: the cache is its pool's")
    return replace(device_class, cache=replace(device_class.cache, size=size))


def _set_encryption(device_class: DeviceClass, encryption: str) -> DeviceClass:
    return replace(device_class, encryption=encryption or device_class.encryption)


def _of_layout(key: str, parse: Callable[[str], Any], field_name: str) -> Parameter:
    """A parameter that overrides the field `field_name` of the device class's layout."""

    def apply(device_class: DeviceClass, value: Any) -> DeviceClass:
        # Refuse the parameter: a thin or cached volume is not created with the options that
        # Layout.words returns, so the value would be ignored.
        if (device_class.layout.is_thin or device_class.cache) and value != getattr(
            device_class.layout, field_name
        ):
            raise ValueError("cannot be set for a class that is thin or has a cache")
        layout_fields: dict[str, Any] = {field_name: value}
        return replace(device_class, layout=replace(device_class.layout, **layout_fields))

    return Parameter(key, parse, tag.LAYOUT, None, field_name, apply)


# Limits of a volume's I/O: parameters of StorageClasses, inline volumes and
# VolumeAttributesClasses. lvm/tuning.py keeps the limits as tags.
LIMITS: Sequence[Parameter] = (
    Parameter("readIOPS", values.parse_iops, field_name="read_iops"),
    Parameter("writeIOPS", values.parse_iops, field_name="write_iops"),
    Parameter("readBandwidth", values.parse_bandwidth, field_name="read_bandwidth"),
    Parameter("writeBandwidth", values.parse_bandwidth, field_name="write_bandwidth"),
    Parameter("readIOPSPerGiB", values.parse_iops_per_gib, field_name="read_iops_per_gib"),
    Parameter("writeIOPSPerGiB", values.parse_iops_per_gib, field_name="write_iops_per_gib"),
    Parameter(
        "readBandwidthPerGiB", values.parse_bandwidth_per_gib, field_name="read_bandwidth_per_gib"
    ),
    Parameter(
        "writeBandwidthPerGiB", values.parse_bandwidth_per_gib, field_name="write_bandwidth_per_gib"
    ),
)
# Parameters of a StorageClass, which are applied in this order.
STORAGE_CLASS: Sequence[Parameter] = (
    _of_layout("stripes", values.parse_count, "stripes"),
    _of_layout("stripeSize", values.parse_size, "stripe_size_bytes"),
    _of_layout("mirrors", values.parse_count, "mirrors"),
    Parameter(CACHE_SIZE, values.parse_share, tag.CACHE, apply=_set_cache_size),
    Parameter(tag.CLASS, str, tag.CLASS, str),
    Parameter(tag.FS_TYPE, _optional(*filesystem.FILE_SYSTEMS), tag.FS_TYPE, str),
    Parameter(tag.MKFS_OPTIONS, lambda text: tuple(text.split()), tag.MKFS_OPTIONS, " ".join),
    Parameter(tag.MOUNT_OPTIONS, _mount_options, tag.MOUNT_OPTIONS, ",".join),
    Parameter(
        *(tag.ENCRYPTION, _optional(*classes.ENCRYPTIONS), tag.ENCRYPTION, str),
        apply=_set_encryption,
    ),
    Parameter(RELEASE_ON_NODE_LOSS, values.choice("true", "false")),
    *LIMITS,
)
# Parameters of an inline volume, which a pod gives as volumeAttributes. An inline volume has no
# claim that could be released.
INLINE: Sequence[Parameter] = (
    *(row for row in STORAGE_CLASS if row.key != RELEASE_ON_NODE_LOSS),
    Parameter(SIZE, _inline_size),
)
# Parameters of a VolumeAttributesClass, which may change while a volume exists. lvm.tuning records
# the parameters in LVM's metadata, and agent.volumes.limiter applies the limits.
MUTABLE: Sequence[Parameter] = (
    Parameter("readAhead", values.parse_read_ahead, field_name="read_ahead_bytes"),
    Parameter("minimumRecoveryRate", values.parse_rate, field_name="minimum_recovery_kib"),
    Parameter("maximumRecoveryRate", values.parse_rate, field_name="maximum_recovery_kib"),
    *LIMITS,
)
# Parameters of a VolumeSnapshotClass or VolumeGroupSnapshotClass.
SNAPSHOT: Sequence[Parameter] = (Parameter(SIZE, values.parse_share),)
# Parameters in a volume_context; each is also kept in a tag. The parameter in the last row has no
# effect any more: it is in the contexts of volumes that versions up to 0.2.0 created.
IN_CONTEXT = (
    *(row for row in STORAGE_CLASS if row.format is not None),
    Parameter(tag.REENCRYPT, _optional("true"), tag.REENCRYPT, str),
)

# Maximum size of a map of parameters, in bytes (CSI spec, "Size Limits").
_MAXIMUM_MAP_BYTES = 4096
# Prefix of Kubernetes' own keys, which are never refused. Sidecars strip such keys from some calls
# (CreateVolume) and leave them in others (GetCapacity, pkg/capacity of external-provisioner), and
# kubelet adds some.
_KUBERNETES_PREFIX = "csi.storage.k8s.io/"
# Keys of Kubernetes that name the file system. The second key is deprecated, but
# external-provisioner still understands it.
_FS_TYPE = (f"{_KUBERNETES_PREFIX}fstype", "fstype")
# Keys by which external-provisioner, with --extra-create-metadata, names a volume's claim, and the
# tags that keep the names for people.
_OF_CLAIM = {
    "csi.storage.k8s.io/pvc/name": tag.PVC,
    "csi.storage.k8s.io/pvc/namespace": tag.NAMESPACE,
    "csi.storage.k8s.io/pv/name": tag.PV,
}
# Keys by which kubelet, if the CSIDriver has podInfoOnMount, names the pod of an inline volume, and
# the tags that keep the names for people.
_OF_POD = {
    "csi.storage.k8s.io/pod.name": tag.POD,
    "csi.storage.k8s.io/pod.namespace": tag.NAMESPACE,
    "csi.storage.k8s.io/pod.uid": tag.POD_UID,
    "csi.storage.k8s.io/serviceAccount.name": tag.SERVICE_ACCOUNT,
}
# Keys by which external-snapshotter, with --extra-create-metadata, names a snapshot's objects, and
# the tags that keep the names for people.
OF_SNAPSHOT = {
    "csi.storage.k8s.io/volumesnapshot/name": tag.SNAPSHOT,
    "csi.storage.k8s.io/volumesnapshot/namespace": tag.NAMESPACE,
    "csi.storage.k8s.io/volumesnapshotcontent/name": tag.CONTENT,
}
# Keys by which external-snapshotter, with --extra-create-metadata, names a group snapshot's
# objects, and the tags that keep the names for people.
OF_GROUP_SNAPSHOT = {
    "csi.storage.k8s.io/volumegroupsnapshot/name": tag.GROUP_SNAPSHOT_NAME,
    "csi.storage.k8s.io/volumegroupsnapshot/namespace": tag.NAMESPACE,
    "csi.storage.k8s.io/volumegroupsnapshotcontent/name": tag.CONTENT,
}
# Keys of tags with the name or the UID of a Kubernetes object. The tag CONTENT may also hold a
# number of bytes.
OBJECT_NAMES = frozenset[str]().union(
    *(tags.values() for tags in (_OF_CLAIM, _OF_POD, OF_SNAPSHOT, OF_GROUP_SNAPSHOT))
)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a volume: `parsed` has the parsed values by their keys.

    `object_tags` are tags that keep the names of Kubernetes objects, such as the volume's claim.
    The other fields follow from `parsed`.
    """

    parsed: Mapping[str, Any] = field(default_factory=dict)
    object_tags: Mapping[str, str] = field(default_factory=dict)
    # The name of the device class; empty for the default class.
    device_class: str = field(init=False, compare=False)
    # The name of the file system; empty for the file system of the device class.
    fs_type: str = field(init=False, compare=False)
    # The arguments of mkfs that the caller gave.
    mkfs_options: tuple[str, ...] = field(init=False, compare=False)
    # The options for each mount of the volume.
    mount_options: tuple[str, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        parsed = self.parsed
        vars(self).update(
            device_class=parsed.get(tag.CLASS, ""),
            fs_type=parsed.get(tag.FS_TYPE, ""),
            mkfs_options=parsed.get(tag.MKFS_OPTIONS, ()),
            mount_options=parsed.get(tag.MOUNT_OPTIONS, ()),
        )

    @classmethod
    def from_proto(cls, raw_parameters: Mapping[str, str], field: str = "parameters") -> Self:
        """Read the parameters of a StorageClass.

        Raises BadField for a parameter that is unknown or has a bad value.
        """
        return cls(*_of_volume(field, raw_parameters, STORAGE_CLASS, _OF_CLAIM))

    @classmethod
    def from_pod(cls, attributes: Mapping[str, str]) -> Self:
        """Read the attributes of an inline volume, and the keys that kubelet adds.

        Raises BadField for an attribute that is unknown or has a bad value.
        """
        return cls(*_of_volume("volume_context", attributes, INLINE, _OF_POD))

    @classmethod
    def from_context(cls, volume_context: Mapping[str, str], *, newer: bool = True) -> Self:
        """Read a volume_context that the method `context` made.

        Keys without Carver's prefix are ignored, as other programs may add keys. With `newer`,
        unknown keys with the prefix are ignored, too: a newer version of Carver may have written
        them, and the volume's tags name the properties that a version must know
        (agent.core.tag.NEEDS). Without `newer`, an unknown key with the prefix raises BadField.
        """
        own_texts = {key: value for key, value in volume_context.items() if key.startswith(PREFIX)}
        if newer:
            known_keys = {PREFIX + row.key for row in IN_CONTEXT}
            own_texts = {key: value for key, value in own_texts.items() if key in known_keys}
        return cls(_read("volume_context", own_texts, IN_CONTEXT))

    @property
    def tuning(self) -> Tuning:
        """The I/O limits among the parameters."""
        return _tuning(self.parsed, LIMITS)

    @property
    def is_encrypted(self) -> bool:
        """Whether the parameters ask for encryption."""
        return bool(self.parsed.get(tag.ENCRYPTION))

    def check_for(self, fs_type: str, field: str) -> None:
        """Raise BadField for options of mkfs or mount that a file system does not have."""
        try:
            filesystem.check_options(fs_type, self.mkfs_options)
        except mount_errors.BadOption as error:
            raise errors.BadField(f"{field}[mkfsOptions]", str(error)) from None
        if self.mount_options:
            check_mount_options(f"{field}[mountOptions]", self.mount_options, fs_type)

    def applied(self, device_class: DeviceClass, field: str) -> DeviceClass:
        """Return a device class with the parameters in place of the settings that these override.

        Raises BadField for a parameter that the class does not allow; `field` is the name of the
        request's field that has the parameters.
        """
        for row in STORAGE_CLASS:
            if row.apply is None or row.key not in self.parsed:
                continue
            try:
                device_class = row.apply(device_class, self.parsed[row.key])
            except ValueError as error:
                raise errors.BadField(
                    f"{field}[{row.key}]", f"{error} (class {device_class.name})"
                ) from None
        return device_class

    def with_class_values(self, device_class: DeviceClass, fs_type: str) -> Self:
        """The parameters, completed by the values of a device class and by a file system.

        The volume keeps the completed parameters, so the class may change later.
        """
        inherits = not self.mkfs_options and fs_type == device_class.fs_type
        completed = {
            tag.CLASS: device_class.name,
            tag.FS_TYPE: fs_type,
            tag.MKFS_OPTIONS: device_class.mkfs_options if inherits else self.mkfs_options,
            tag.ENCRYPTION: device_class.encryption,
        }
        return replace(self, parsed={**self.parsed, **completed})

    def with_value(self, key: str, value: Any) -> Self:
        """The parameters with the value of one parameter replaced."""
        return replace(self, parsed={**self.parsed, key: value})

    def own_tags(self) -> dict[str, str]:
        """Return the tags that keep the parameters.

        Tags that hold more than the value of one parameter are left out (see `Parameter.format`).
        """
        texts = {
            row.tag: row.format(self.parsed[row.key])
            for row in IN_CONTEXT
            if row.format is not None and row.key in self.parsed
        }
        return {key: text for key, text in texts.items() if text}

    def context(self) -> dict[str, str]:
        """The volume_context, which passes the parameters to staging and publishing."""
        return context_of(self.own_tags())


def context_of(own_tags: Mapping[str, str]) -> dict[str, str]:
    """The volume_context of a volume, from the volume's tags."""
    return {PREFIX + row.key: own_tags[row.tag] for row in IN_CONTEXT if row.tag in own_tags}


def snapshot_parameters(
    raw_parameters: Mapping[str, str], names: Mapping[str, str]
) -> tuple[Reserve | None, dict[str, str]]:
    """Read the parameters of a snapshot class.

    Returns the size of the COW store, if given, and the tags that keep the names of the snapshot's
    objects. `names` has the keys of these tags by the keys of external-snapshotter. Raises
    BadField for a parameter that is unknown or has a bad value.
    """
    field = "parameters"
    _check_map(field, raw_parameters)
    object_tags = _object_tags(field, raw_parameters, names)
    return _read(field, _without_kubernetes(raw_parameters), SNAPSHOT).get(SIZE), object_tags


def tuning_of(raw_parameters: Mapping[str, str], field: str = MUTABLE_FIELD) -> Tuning:
    """Read the parameters of a VolumeAttributesClass.

    Raises BadField for a parameter that is unknown or has a bad value, and for parameters that
    lvm2 would refuse together; `field` is the name of the request's field that has the parameters.
    """
    if not raw_parameters:
        return AS_IT_IS
    _check_map(field, raw_parameters)
    parameters = _read(field, _without_kubernetes(raw_parameters), MUTABLE)
    tuning = _tuning(parameters, MUTABLE)
    if why := tuning.refusal:
        raise errors.BadField(field, why)
    return tuning


def texts_of(tuning: Tuning) -> dict[str, str]:
    """Format the specified mutable parameters by their keys, as `tuning_of` reads them.

    Left out are values that no parameter can have, as an operator may have set by lvchange(8).
    """
    texts = {}
    for row in MUTABLE:
        value = getattr(tuning, row.field_name)
        text = f"{value}KiB" if row.field_name.endswith("_kib") else str(value)
        with suppress(ValueError):
            if value is not None and row.parse(text) == value:
                texts[row.key] = text
    return texts


def _tuning(parsed_values: Mapping[str, Any], rows: Sequence[Parameter]) -> Tuning:
    return Tuning(
        **{row.field_name: parsed_values[row.key] for row in rows if row.key in parsed_values}
    )


def _of_volume(
    field: str,
    raw_parameters: Mapping[str, str],
    rows: Sequence[Parameter],
    names: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a volume's parameters; return their values, and the tags for names of objects.

    The tags keep the names of Kubernetes objects, such as the claim. A file system may be named by
    Carver's key and by Kubernetes' keys, if all name the same file system. Raises BadField for a
    parameter that is unknown or has a bad value.
    """
    _check_map(field, raw_parameters)
    texts = _without_kubernetes(raw_parameters)
    texts = {key: value for key, value in texts.items() if key not in _FS_TYPE}
    parameters = _read(field, texts, rows)
    for key in _FS_TYPE:
        if fs_type := raw_parameters.get(key, ""):
            if (previous := parameters.get(tag.FS_TYPE) or fs_type) != fs_type:
                raise errors.BadField(
                    f"{field}[{key}]", f"{fs_type!r}, but {previous!r} is asked for too"
                )
            parameters |= _read(field, {tag.FS_TYPE: fs_type}, rows)
    return parameters, _object_tags(field, raw_parameters, names)


def _read(
    field: str, raw_parameters: Mapping[str, str], rows: Sequence[Parameter]
) -> dict[str, Any]:
    """Parse parameters, whose keys may have Carver's prefix; return the values by their keys.

    Raises BadField for a parameter that is not in `rows`, is given twice, or has a bad value.
    """
    rows_by_key = {row.key: row for row in rows}
    parameters: dict[str, Any] = {}
    for key, text in raw_parameters.items():
        name = key.removeprefix(PREFIX)
        if name not in rows_by_key and name in classes.REMOVED:
            raise errors.BadField(f"{field}[{key}]", classes.REMOVED[name])
        if name not in rows_by_key:
            raise errors.NotAllowed(field, key, [PREFIX + allowed for allowed in rows_by_key])
        if name in parameters:
            raise errors.BadField(f"{field}[{key}]", "is given with the prefix and without")
        tag.require_fits(f"{field}[{name}]", name, text)
        try:
            parameters[name] = rows_by_key[name].parse(text)
        except ValueError as error:
            why = f"{text!r} is not allowed: {error}"
            raise errors.BadField(f"{field}[{name}]", why) from None
    return parameters


def _without_kubernetes(raw_parameters: Mapping[str, str]) -> dict[str, str]:
    return {
        key: text for key, text in raw_parameters.items() if not key.startswith(_KUBERNETES_PREFIX)
    }


def _object_tags(
    field: str, raw_parameters: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, str]:
    """The tags that keep the names of Kubernetes objects in a map of parameters."""
    object_tags = {names[key]: text for key, text in raw_parameters.items() if key in names}
    require_object_names(field, object_tags)
    return object_tags


def require_object_names(field: str, own_tags: Mapping[str, str]) -> None:
    """Raise BadField for a tag that is to hold a Kubernetes object's name, but holds another text.

    A text that Kubernetes does not allow as a name could be harmful: Carver prints the names within
    command lines for a shell.
    """
    for key in OBJECT_NAMES & own_tags.keys():
        try:
            values.parse_object_name(own_tags[key])
        except ValueError as error:
            why = f"{own_tags[key]!r} is not allowed: {error}"
            raise errors.BadField(f"{field}[{key}]", why) from None


def _check_map(field: str, raw_parameters: Mapping[str, str]) -> None:
    if sum(len(key.encode()) + len(text.encode()) for key, text in raw_parameters.items()) > (
        _MAXIMUM_MAP_BYTES
    ):
        raise errors.BadField(field, f"are larger than {_MAXIMUM_MAP_BYTES} bytes")

"""Settings: their table, and how they are read from the file, the environment and flags."""

import argparse
import socket
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from agent.core import errors, ids
from agent.settings import classes, values
from agent.settings.classes import DeviceClass
from agent.settings.values import HALF, Address
from lvm.layout import NO_RESERVE, Reserve
from lvm.tuning import MOST_RECOVERY_KIB
from mount.kernel import OLDEST


@dataclass(frozen=True)
class BackingFile:
    """A sparse file that is the only disk of a volume group.

    A `size_bytes` of None means half of the free space of the file system that the file is in.
    """

    path: Path
    size_bytes: int | None = None


@dataclass(frozen=True)
class GroupDefinition:
    """A volume group that Carver creates if it is missing, on devices or in a file.

    `fast` are the devices among `devices` that are for caches.
    """

    group: str
    devices: tuple[str, ...] = ()
    file: BackingFile | None = None
    fast: tuple[str, ...] = ()


# Type of the limit of a volume group's background I/O; None for I/O that gives way to other I/O
# instead (agent/work/pace.py).
Bandwidth = Reserve | None
_BANDWIDTH = "background_bandwidth"

# Keys of a table [[groups]], with the parsers of their values.
GROUP_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "name": values.parse_lvm_name,
    "devices": values.parse_device_names,
    "fast": values.parse_device_names,
    "file": values.parse_absolute_path,
    "file_size": values.parse_file_size,
    _BANDWIDTH: values.parse_background_bandwidth,
}


def parse_groups(
    source: str, tables: object, classes: Sequence[DeviceClass]
) -> tuple[tuple[GroupDefinition, ...], Mapping[str, Bandwidth]]:
    """Parse the tables [[groups]]; raises BadConfig for an invalid or unused volume group.

    A group is unused if no class names it. Returns the definitions of the groups that Carver
    creates, and the limits of the background I/O of groups, by the groups' names.
    """
    used = {device_class.group for device_class in classes}
    definitions: list[GroupDefinition] = []
    names: set[str] = set()
    bandwidths: dict[str, Bandwidth] = {}
    paths: set[str] = set()
    for position, table in values.read(source, "groups", tables, GROUP_KEYS, ("name",)):
        if (name := table["name"]) not in used:
            raise errors.BadConfig(source, f"{position}.name", f"no class uses the group {name}")
        if name in names:
            raise errors.BadConfig(source, f"{position}.name", f"{name} is listed twice")
        names.add(name)
        if _BANDWIDTH in table:
            bandwidths[name] = table.pop(_BANDWIDTH)
            if table.keys() == {"name"}:
                continue  # the table sets only a limit, for a group that Carver does not create
        definition = _definition(source, position, table)
        for path in (str(definition.file.path),) if definition.file else definition.devices:
            if path in paths:
                raise errors.BadConfig(source, position, f"{path} is listed twice")
            paths.add(path)
        definitions.append(definition)
    return tuple(definitions), bandwidths


def _definition(source: str, position: str, table: Mapping[str, Any]) -> GroupDefinition:
    devices, file = table.get("devices", ()), table.get("file")
    if bool(devices) == bool(file):
        raise errors.BadConfig(source, position, "has either devices or a file")
    if file is None and "file_size" in table:
        raise errors.BadConfig(source, f"{position}.file_size", "is for a group on a file")
    fast = table.get("fast", ())
    if not set(fast) <= set(devices):
        raise errors.BadConfig(source, f"{position}.fast", "are some of the group's `devices`")
    backing = BackingFile(file, table.get("file_size")) if file else None
    return GroupDefinition(table["name"], tuple(devices), backing, tuple(fast))


# Default name of the CSI driver.
DRIVER_NAME = "lvm.csi.carver"
TOPOLOGY_KEY = f"topology.{DRIVER_NAME}/node"
DEFAULT_FILE = Path("/etc/carver/config.toml")
KUBELET_DIRECTORY = Path("/var/lib/kubelet")
DEFAULT_SOCKET = KUBELET_DIRECTORY / "plugins" / DRIVER_NAME / "csi.sock"
REGISTRY = KUBELET_DIRECTORY / "plugins_registry"
ENROLMENT_DIRECTORY = Path("/run/carver/enrolment")
# Default path of the sparse file that holds the volume group if no class is configured.
EMBEDDED_FILE = Path("/var/lib/carver/carver.img")
# The only device class if no class is configured.
EMBEDDED_CLASS = DeviceClass(name="default", group="carver", default=True)


@dataclass(frozen=True)
class Wipe:
    """How ErasePolicy (agent/volumes/erase_policy.py) erases with a value of the setting `wipe`."""

    # Whether deleted volumes are overwritten with zeroes.
    zeroes: bool = True
    # Whether volumes that are not encrypted are discarded instead of overwritten.
    discards: bool = False
    # Whether a volume is discarded only on disks that certainly read as zeroes after a discard.
    only_if_certain: bool = False


# Values of the setting `wipe`, with what each value does.
WIPES: Mapping[str, Wipe] = {
    "zero": Wipe(),
    "discard": Wipe(discards=True, only_if_certain=True),
    "discard-unguaranteed": Wipe(discards=True),
    "none": Wipe(zeroes=False),
}


@dataclass(frozen=True)
class Setting:
    """A setting: a key in the file, a variable CARVER_KEY in the environment, and a flag --key.

    `fixed` is the reason why the setting cannot change while the service runs; it is empty for a
    setting that a reload can change.
    """

    parse: Callable[[Any], Any]
    default: Any
    help: str
    fixed: str


# Value of `fixed` for a setting that a reload can change.
_RELOADABLE = ""
# Values of `fixed`: reasons why a setting cannot change while the service runs.
_REGISTERED = "kubelet was given it when Carver registered"
_REGISTRATION = "the registration began with the process"
_PAGES = "the pages are served there since the start"
_OFFERED = "callers ask once what Carver offers, when they start"
_CALLED = "lvm2 is called so since the start"
_SERVES_CONTROLLER = "the server for the cluster's controller began with the process"
_OF_CONTROLLER = "only `carver controller` uses it, which reads it when it starts"


# Table of all settings.
SETTINGS: Mapping[str, Setting] = {
    "node_id": Setting(
        values.parse_node_id,
        socket.gethostname(),
        "this node's name, as the cluster knows it",
        _REGISTERED,
    ),
    "driver_name": Setting(
        values.parse_driver_name,
        DRIVER_NAME,
        "the name by which the cluster knows this driver; another one for a second Carver",
        _REGISTERED,
    ),
    "endpoint": Setting(
        values.parse_absolute_path,
        DEFAULT_SOCKET,
        "the unix socket to serve",
        "callers are connected there",
    ),
    "registration": Setting(
        values.choice("self", "none"),
        "self",
        "who registers Carver with kubelet; none: not Carver; perhaps a node-driver-registrar",
        _REGISTRATION,
    ),
    "registration_directory": Setting(
        values.parse_absolute_path,
        REGISTRY,
        "where kubelet looks for sockets of plugins",
        _REGISTRATION,
    ),
    "kubelet_dir": Setting(
        values.parse_paths,
        (str(KUBELET_DIRECTORY),),
        "where volumes may be staged and published; /: anywhere",
        _RELOADABLE,
    ),
    "metrics_address": Setting(
        values.parse_address,
        "",
        "serve /metrics, /healthz and /readyz there, such as 127.0.0.1:9898; empty: nowhere",
        _PAGES,
    ),
    "health_address": Setting(
        values.parse_address,
        "",
        "serve /healthz and /readyz there too, without metrics; empty: only where the metrics are",
        _PAGES,
    ),
    "log_format": Setting(values.choice("text", "json"), "text", "text or json", _RELOADABLE),
    "log_level": Setting(
        values.choice("debug", "info", "warning", "error"),
        "info",
        "the least that is logged",
        _RELOADABLE,
    ),
    "controller_expand": Setting(
        values.parse_flag,
        True,
        "advertise the controller's EXPAND_VOLUME; false in a cluster, where NodeExpandVolume"
        " grows the volume on its node",
        _OFFERED,
    ),
    "attach": Setting(
        values.parse_flag,
        False,
        "offer ControllerPublishVolume and ControllerUnpublishVolume, for a CO that attaches"
        " volumes before it stages them",
        _OFFERED,
    ),
    "max_volumes_per_node": Setting(
        values.parse_count, 0, "volumes on this node; 0: no limit", _REGISTERED
    ),
    "inline_volume_limit": Setting(
        values.parse_size,
        "10GiB",
        "how large an inline volume may be; 0: no limit",
        _RELOADABLE,
    ),
    "inline_total_limit": Setting(
        values.parse_reserve,
        "50%",
        "what a node's inline volumes may take of its groups together, with copies and parity: a"
        " size, or a part of all groups; 0: no limit",
        _RELOADABLE,
    ),
    "lvm": Setting(
        values.choice("direct", "host"),
        "direct",
        "where lvm2 is; host: through nsenter",
        _CALLED,
    ),
    "lvm_session": Setting(
        values.parse_flag,
        True,
        "keep a shell of lvm2's open for each group; false: a process for each command",
        _CALLED,
    ),
    "pods_cgroup": Setting(
        str,
        "",
        "the cgroup whose I/O on a volume its limits hold, such as /database.slice; empty: that of"
        " kubelet's pods",
        "limits of I/O are in force there",
    ),
    "devices": Setting(
        lambda value: values.parse_device_names(value) if value else (),
        (),
        "confine lvm2 to these block devices; empty: to each group's own disks",
        _RELOADABLE,
    ),
    "wipe": Setting(
        values.choice(*WIPES),
        "zero",
        "what is done to a deleted volume's blocks; discard: only on disks that are certain to read"
        " as zeroes then; discard-unguaranteed: on all, after a look at a sample",
        _RELOADABLE,
    ),
    _BANDWIDTH: Setting(
        values.parse_background_bandwidth,
        values.AUTO,
        "background I/O of a group: auto, which gives way to others; a size a second, such as"
        " 200MiB; a part of what the disks do, such as 30%; 0: no limit",
        _RELOADABLE,
    ),
    "oldest_kernel": Setting(
        values.parse_kernel,
        "5.8",
        "the oldest Linux that must be able to mount new file systems, such as 5.10",
        _RELOADABLE,
    ),
    "header_backups": Setting(
        values.parse_optional_path,
        "",
        "the directory for copies of the headers of encrypted volumes; empty: none are kept",
        _RELOADABLE,
    ),
    "kubeconfig": Setting(
        values.parse_optional_path,
        "",
        "the cluster that `carver orphans` asks what is needed; empty: the one whose pod it is",
        _RELOADABLE,
    ),
    "orphan_interval_seconds": Setting(
        values.parse_period,
        0,
        "how often the service looks for orphans, and measures them; 0: never",
        "the scans began with the process",
    ),
    "orphan_grace_seconds": Setting(
        values.parse_grace,
        3600,
        "how long something must be an orphan before it counts as one; 60 or more",
        _RELOADABLE,
    ),
    "health_interval_seconds": Setting(
        values.parse_period,
        0,
        "how often the controller asks nodes for unhealthy volumes, to write Events; 0: never",
        _OF_CONTROLLER,
    ),
    "controller_address": Setting(
        values.parse_grpc_address,
        "",
        "serve the cluster's controller there over TLS, such as 0.0.0.0:9810; empty: nowhere",
        _SERVES_CONTROLLER,
    ),
    "tls_directory": Setting(
        values.parse_optional_path,
        "",
        "the directory with ca.crt, tls.crt and tls.key for controller and nodes",
        _SERVES_CONTROLLER,
    ),
    "nodes_file": Setting(
        values.parse_optional_path,
        "",
        "the nodes of the cluster, for `carver controller`: a TOML table `nodes` of addresses",
        _OF_CONTROLLER,
    ),
    "controllers": Setting(
        values.parse_address,
        "",
        "the Service of the cluster's controllers, such as carver-controller.carver.svc:9811, at"
        " which this node enrols; empty: it has a certificate in tls_directory",
        _SERVES_CONTROLLER,
    ),
    "advertised_host": Setting(
        str,
        "",
        "the address of this node or pod, at which the controllers reach it",
        _SERVES_CONTROLLER,
    ),
    "enrolment_directory": Setting(
        values.parse_absolute_path,
        ENROLMENT_DIRECTORY,
        "the directory with the pod's token for the controllers, and their ca.crt",
        _SERVES_CONTROLLER,
    ),
    "enrolment_address": Setting(
        values.parse_grpc_address,
        ":9811",
        "where `carver controller` serves nodes that enrol",
        _OF_CONTROLLER,
    ),
    "controller_authority": Setting(
        str,
        "carver-controller",
        "the Secret and ConfigMap in which `carver controller` keeps its certificate authority",
        _OF_CONTROLLER,
    ),
    "release_lost_claims": Setting(
        values.parse_flag,
        False,
        "have `carver controller` release claims whose node is deleted and forgotten, if the claim"
        " or its StorageClass allows that; needs forget_deleted_nodes",
        _OF_CONTROLLER,
    ),
    "forget_deleted_nodes": Setting(
        values.parse_flag,
        False,
        "have `carver controller` answer OK to the deletion of what was on a node that is deleted"
        " from the cluster: its disks are gone",
        _OF_CONTROLLER,
    ),
    "evacuation": Setting(
        values.parse_flag,
        False,
        "have the cluster's controller move volumes between nodes, which send them to each other",
        _SERVES_CONTROLLER,
    ),
    "node_account": Setting(
        str,
        "carver-node",
        "the ServiceAccount of the nodes' pods, in the controller's namespace",
        _OF_CONTROLLER,
    ),
    "evacuation_grace_seconds": Setting(
        values.parse_grace,
        86400,
        "how long what was moved from an evacuated node is kept there, before it is erased; 60 or"
        " more",
        _OF_CONTROLLER,
    ),
    "file": Setting(
        values.parse_absolute_path,
        EMBEDDED_FILE,
        "the sparse file that holds the group where no class is configured",
        _RELOADABLE,
    ),
    "file_size": Setting(
        values.parse_file_size,
        HALF,
        f"the file's size when it is made, such as 100GiB; {HALF}: of what is free beside it",
        _RELOADABLE,
    ),
}


@dataclass(frozen=True)
class Config:
    """The configuration: settings, device classes, and definitions of volume groups to create."""

    node_id: str
    endpoint: Path
    kubelet_dir: tuple[str, ...]
    log_format: str
    log_level: str
    controller_expand: bool
    max_volumes_per_node: int
    lvm: str
    lvm_session: bool
    devices: tuple[str, ...]
    wipe: str
    classes: tuple[DeviceClass, ...]
    definitions: tuple[GroupDefinition, ...] = ()
    background_bandwidth: Bandwidth = None
    # Limits of background I/O of the volume groups that have a limit of their own.
    bandwidths: Mapping[str, Bandwidth] = field(default_factory=dict)
    registration: str = "none"
    registration_directory: Path = REGISTRY
    metrics_address: Address | None = None
    inline_volume_limit: int = 0
    inline_total_limit: Reserve = NO_RESERVE
    health_address: Address | None = None
    driver_name: str = DRIVER_NAME
    oldest_kernel: tuple[int, int] = OLDEST
    header_backups: Path | None = None
    pods_cgroup: str = ""
    kubeconfig: Path | None = None
    orphan_interval_seconds: int = 0
    orphan_grace_seconds: int = 3600
    health_interval_seconds: int = 0
    controller_address: Address | None = None
    tls_directory: Path | None = None
    nodes_file: Path | None = None
    controllers: Address | None = None
    attach: bool = False
    advertised_host: str = ""
    enrolment_directory: Path = ENROLMENT_DIRECTORY
    enrolment_address: Address | None = None
    controller_authority: str = "carver-controller"
    node_account: str = "carver-node"
    release_lost_claims: bool = False
    evacuation_grace_seconds: int = 86400
    forget_deleted_nodes: bool = False
    evacuation: bool = False

    def device_class(self, name: str) -> DeviceClass | None:
        """The device class with a name, or the default class for an empty name.

        None if there is no such class.
        """
        for device_class in self.classes:
            if device_class.name == name or (not name and device_class.default):
                return device_class
        return None

    def bandwidth_of(self, group: str) -> Bandwidth:
        """The limit of the background I/O of a volume group; None if it gives way to other I/O."""
        return self.bandwidths.get(group, self.background_bandwidth)

    def recovery_bound_kib(self, group: str) -> int:
        """The bound of RAID recovery in a volume group, in KiB a second on each disk; 0 for none.

        The bound is the limit of background I/O, if that is a number of bytes. A percentage gives
        no bound, because the speed of the disks is not known before it is measured.
        """
        bandwidth = self.bandwidth_of(group) or NO_RESERVE
        return min(bandwidth.size_bytes >> 10, MOST_RECOVERY_KIB)

    @cached_property
    def here(self) -> Mapping[str, str]:
        """The topology segments of this node."""
        return ids.topology(self.node_id, self.driver_name)

    @property
    def topology_key(self) -> str:
        """The key of the driver's topology segment, which is also a label of Kubernetes nodes."""
        return ids.topology_key(self.driver_name)

    @property
    def lvm_root(self) -> Path:
        """The root directory in which lvm2 runs: for the host's lvm2, the root of process 1."""
        return Path("/proc/1/root" if self.lvm == "host" else "/")

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The names of the volume groups of all classes, without repeats, in the classes' order."""
        return tuple(dict.fromkeys(device_class.group for device_class in self.classes))


def add_arguments(parser: argparse.ArgumentParser, keys: Iterable[str] = tuple(SETTINGS)) -> None:
    """Add the flags of settings to a parser; by default, the flags of all settings."""
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"default: {DEFAULT_FILE}")
    for key in keys:
        flag = f"--{key.replace('_', '-')}"
        # Double the percent signs, because argparse formats the help text.
        described = SETTINGS[key].help.replace("%", "%%")
        parser.add_argument(flag, metavar=key.upper(), help=described)


def load(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Load the configuration from flags, environment and file; raises BadConfig if invalid.

    A flag takes precedence over an environment variable, and a variable over the file.
    """
    file = arguments.config or Path(environment.get("CARVER_CONFIG", DEFAULT_FILE))
    optional = file == DEFAULT_FILE
    table = _read(file, optional=optional)
    configured_classes = classes.parse(str(file), table.pop("classes", []))
    device_classes = configured_classes or (EMBEDDED_CLASS,)
    definitions, bandwidths = parse_groups(str(file), table.pop("groups", []), device_classes)
    for key in table:
        if key not in SETTINGS:
            allowed = ", ".join([*SETTINGS, "classes", "groups"])
            raise errors.BadConfig(str(file), key, f"is not a setting; allowed: {allowed}")
    settings = {
        key: _value(key, setting, arguments, environment, file, table)
        for key, setting in SETTINGS.items()
    }
    embedded = BackingFile(settings.pop("file"), settings.pop("file_size"))
    if not configured_classes and not definitions:
        definitions = (GroupDefinition(EMBEDDED_CLASS.group, file=embedded),)
    return Config(
        **settings, classes=device_classes, definitions=definitions, bandwidths=bandwidths
    )


def _read(file: Path, *, optional: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        if optional:
            return {}
        raise errors.BadConfig(str(file), "file", "does not exist") from None
    except (OSError, ValueError) as error:
        raise errors.BadConfig(str(file), "file", f"cannot be read: {error}") from None


def _value(
    key: str,
    setting: Setting,
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    file: Path,
    table: Mapping[str, Any],
) -> Any:
    flag, variable = f"--{key.replace('_', '-')}", f"CARVER_{key.upper()}"
    for source, raw in (
        (flag, getattr(arguments, key, None)),
        (variable, environment.get(variable)),
        (str(file), table.get(key)),
    ):
        if raw is not None:
            return values.checked(source, key, setting.parse, raw)
    return values.checked("default", key, setting.parse, setting.default)

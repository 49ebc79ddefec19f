"""Checks of the node and its volume groups (`carver doctor`), each with a verdict and a remedy.

The table of the checks is CHECKS, at the end of this file. A check is a function with a row in that
table. The docstring of the function says what is checked. The function yields a verdict, a message,
and a remedy for each finding. If a check cannot read something, that is a warning, not a failure.
"""

import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.core import errors, sockets, tag
from agent.groups.disk_search import REMEDY
from agent.groups.group_definitions import GroupDefinitions
from agent.settings.configuration import Configuration
from agent.settings.settings import Config
from agent.volumes import erase_policy, records
from agent.volumes.allocation import is_pool
from lvm import candidate_devices, groups, lvm2, names, report
from lvm.report import Group, Report
from mount import cgroups, filesystem, table
from mount import mount_errors as mount_errors
from mount.block_io import By
from mount.cgroups import Cgroups
from mount.command import Run
from mount.kernel import OLDEST, Kernel
from mount.programs import ENVIRONMENT, HOST_NAMESPACES
from mount.text import counted

# Verdicts of a check.
PASS = "pass"  # noqa: S105 - no password
WARN = "warn"
FAIL = "fail"

# Result of a check: a verdict, a message, and the remedy, which is empty for PASS.
CheckResult = tuple[str, str, str]

# Oldest lvm2 that Carver supports, 2.03.12: the first with the option --devices, by which Carver
# confines lvm2 to certain disks (WHATS_NEW of lvm2).
LEAST_LVM2 = (2, 3, 12)
# Number of the capability CAP_SYS_ADMIN (linux/capability.h).
_CAP_SYS_ADMIN = 21
# Programs that lvm2 runs for thin pools.
_THIN_PROGRAMS = ("thin_check", "thin_repair", "thin_dump")
# Fill level of a volume group's metadata area, in percent, from which a check warns. From 94 % on
# Carver creates nothing new in the group.
_NEARLY_FULL_PERCENT = 80
# Maximum number of volumes that are named in a finding about a missing device class.
_MOST_NAMED = 10


@dataclass(frozen=True)
class Finding:
    """One finding of a check; the remedy is empty for PASS."""

    check: str
    verdict: str
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Node:
    """What the checks examine: the configuration and the machine.

    `root` is the directory in which the paths of the machine are looked up; tests change it.
    """

    configuration: Configuration
    kernel: Kernel
    run: Run
    report: Callable[[], Report]
    root: Path = Path("/")
    # Returns the volume groups that are on this node but that Carver refuses to use, by name, with
    # the reasons. No report has these groups.
    refused: Callable[[], Mapping[str, errors.GroupRefused]] = dict
    # Returns the disks that claim to belong to a volume group and are ignored, each as a sentence,
    # by group.
    ignored: Callable[[], Mapping[str, Sequence[str]]] = dict

    def at(self, path: str) -> Path:
        """Return the path under `root` of a path of the machine."""
        return self.root / path.lstrip("/")

    @property
    def settings(self) -> Config:
        """The present configuration."""
        return self.configuration.now

    @property
    def lvm_root(self) -> Path:
        """The path under `root` of lvm2's root directory."""
        return self.at(str(self.settings.lvm_root))


# Type of a check: a function that yields results for a node.
Check = Callable[[Node], Iterator[CheckResult]]


def all_findings(node: Node) -> Sequence[Finding]:
    """Run all checks of the node, each after the checks that it depends on; return the findings."""
    return tuple(
        finding for name, check in CHECKS.items() for finding in _findings(name, check, node)
    )


def quick_findings(node: Node) -> Sequence[Finding]:
    """Run the checks that start no process and read no report; return the findings.

    The function is for frequent callers, such as the RPC Probe.
    """
    return tuple(
        finding for name in QUICK_CHECKS for finding in _findings(name, CHECKS[name], node)
    )


def _findings(name: str, check: Check, node: Node) -> Iterator[Finding]:
    try:
        for verdict, message, remedy in check(node):
            yield Finding(name, verdict, message, remedy)
    except (OSError, ValueError) as error:
        yield Finding(name, WARN, f"cannot be looked at: {error}", "see whether /proc is there")


def _pass(message: str) -> CheckResult:
    return PASS, message, ""


def _privileges(node: Node) -> Iterator[CheckResult]:
    """Check that this process has the capability CAP_SYS_ADMIN, which mounting requires."""
    lines = node.at("/proc/self/status").read_text().splitlines()
    capabilities = dict(line.split(":", 1) for line in lines).get("CapEff", "0")
    if int(capabilities, 16) >> _CAP_SYS_ADMIN & 1:
        yield _pass("may mount and use device-mapper")
    else:
        yield (
            FAIL,
            "has not the capability CAP_SYS_ADMIN, without which nothing can be mounted",
            "run it as root; in a container, with securityContext.privileged",
        )


def _kubelet_directory(node: Node) -> Iterator[CheckResult]:
    """Check that the mounts in which kubelet has volumes are shared (mount propagation).

    Without that, pods do not see what Carver mounts. A directory that does not exist is only a
    warning.
    """
    mounts = table.read(node.kernel)
    for directory in node.settings.kubelet_dir:
        # Check the two subdirectories in which kubelet has volumes; in a container they are the
        # mounts that lead to the host.
        volume_paths = [
            f"{directory.rstrip('/')}/{subdirectory}" for subdirectory in ("pods", "plugins")
        ]
        holders = {
            volume_path: mounts.holding(node.kernel.real_path(volume_path))
            for volume_path in volume_paths
        }
        private = {
            volume_path: holder
            for volume_path, holder in holders.items()
            if holder is None
            or not any(option.startswith("shared:") for option in holder.propagation)
        }
        for volume_path, holder in private.items():
            mount = "/" if holder is None else holder.path
            yield (
                # Only warn if the directory does not exist: without kubelet no other program needs
                # to see the mounts.
                FAIL if node.at(volume_path).exists() else WARN,
                f"{volume_path} is in a mount that is not shared ({mount}): kubelet and pods would"
                " not see what Carver mounts there",
                f"`mount --make-rshared {mount}`; in a container, mountPropagation: Bidirectional;"
                " under systemd, nothing that gives the unit mounts of its own (systemd.exec(5))",
            )
        if not private:
            yield _pass(f"{directory} is in a shared mount")


def _registration(node: Node) -> Iterator[CheckResult]:
    """Check that the directory exists in which kubelet looks for the sockets of CSI drivers.

    Nothing is checked if another program registers Carver with kubelet (`registration = "none"`).
    """
    directory = node.settings.registration_directory
    if node.settings.registration == "none":
        yield _pass("is left to another program")
    elif node.at(str(directory)).is_dir():
        yield _pass(f"{directory} is there")
    else:
        yield (
            WARN,
            f"{directory} does not exist, so kubelet did not run here yet, or has another root",
            "start kubelet; or set registration_directory and kubelet_dir to its --root-dir;"
            ' or registration = "none" where there is no kubelet',
        )


def _device_mapper(node: Node) -> Iterator[CheckResult]:
    """Check that the control node of device-mapper can be opened."""
    control = "/dev/mapper/control"
    try:
        # Open the control node, which loads the kernel module if needed.
        with node.at(control).open("rb"):
            yield _pass(f"{control} answers")
    except OSError as error:
        yield (
            FAIL,
            f"device-mapper does not answer: {control}: {error.strerror}",
            "`modprobe dm_mod`; in a container, mount the host's /dev",
        )


def _devices(node: Node) -> Iterator[CheckResult]:
    """Check that /dev is devtmpfs, the disks in `devices` are there, and loop devices exist.

    Also warn about disks that the configuration names by unstable paths in /dev.
    """
    holder = table.read(node.kernel).holding("/dev")
    is_kernels = holder is not None and holder.fs_type == "devtmpfs"
    if not is_kernels:
        kind = "no mount" if holder is None else holder.fs_type
        yield (
            WARN,
            f"/dev is {kind}, not the kernel's own: devices that appear later may have no nodes",
            "in a container, mount the host's /dev",
        )
    for device in node.settings.devices:
        if not node.at(device).is_block_device():
            yield (
                FAIL,
                f"{device}, which `devices` names, is not a block device here",
                "attach the disk, or correct `devices`; names below /dev/disk/by-id stay the same",
            )
    configured_devices = [
        *node.settings.devices,
        *(device for definition in node.settings.definitions for device in definition.devices),
    ]
    # Warn about names directly in /dev: names that udev and device-mapper give are deeper, such as
    # /dev/disk/by-id/… and /dev/mapper/…
    if unstable := [path for path in dict.fromkeys(configured_devices) if path.count("/") == 2]:
        yield (
            WARN,
            f"{', '.join(unstable)}: the kernel gives such a name to whatever it finds first, so"
            " after a reboot it may be another disk's, or none's",
            "name the disk by its link in /dev/disk/by-id (`udevadm info --query=symlink"
            f" {unstable[0]}`)",
        )
    if not node.at("/dev/loop-control").exists():
        yield (
            FAIL if any(definition.file for definition in node.settings.definitions) else WARN,
            "there are no loop devices, which read-only raw block volumes and a group on a file"
            " need",
            "`modprobe loop`; in a container, mount the host's /dev",
        )
    elif is_kernels:
        yield _pass("/dev is the kernel's own, with loop devices")


def _udev(node: Node) -> Iterator[CheckResult]:
    """Report whether udev runs; Carver works with udev and without."""
    runs = node.at("/run/udev/control").exists()
    without = "there is no udev here: lvm2 is run without it, and makes nodes itself"
    yield _pass("udev runs, and lvm2 waits for it" if runs else without)


def _guests(node: Node) -> Iterator[CheckResult]:
    """Warn if the node's own lvm2 would activate a volume group inside a raw block volume.

    A guest, such as a virtual machine, may have made that volume group.
    """
    # Kubelet attaches a loop device to each raw block volume, and udev has lvm2 scan that device
    # (69-lvm.rules). So the check is whether lvm2 accepts /dev/loop0.
    root = node.lvm_root
    settings, accepts = lvm2.configured(root), candidate_devices.read(root)
    is_rejected = accepts is not None and not accepts("/dev/loop0")
    is_filtered = is_rejected or lvm2.listed_disks(root) is not None
    scans_volumes = settings.get(("devices", "scan_lvs"), "0") == "1"
    is_manual = (
        settings.get(("global", "event_activation")) == "0"
        or ("activation", "auto_activation_volume_list") in settings
        or not node.at("/run/udev/control").exists()
    )
    if is_manual or (is_filtered and not scans_volumes):
        yield _pass("a guest's volume group inside a raw block volume is not activated here")
        return
    why = "scans logical volumes (devices/scan_lvs)" if scans_volumes else "scans loop devices"
    yield (
        WARN,
        f"the node's lvm2 {why}: it activates a volume group that a guest has inside a raw block"
        " volume, and keeps that volume in use",
        "`Guests' volume groups` in docs/install.md has the settings for lvm.conf",
    )


def _lvm2(node: Node) -> Iterator[CheckResult]:
    """Check that lvm2 can be run, and that its version is not older than LEAST_LVM2."""
    if node.settings.lvm == "host" and not _has(node, HOST_NAMESPACES[0]):
        yield FAIL, 'nsenter is missing, which lvm = "host" needs', "install util-linux"
        return
    try:
        version = lvm2.version(node.run)
    except mount_errors.CommandError as error:
        yield FAIL, str(error), "install lvm2, where `lvm` in the configuration says that it is"
        return
    version_text, oldest_text = (
        f"{numbers[0]}.{numbers[1]:02}.{numbers[2]}" for numbers in (version, LEAST_LVM2)
    )
    if version < LEAST_LVM2:
        yield FAIL, f"lvm2 is {version_text}, too old", f"install {oldest_text} or newer"
    else:
        yield _pass(f"lvm2 is {version_text}; {oldest_text} is enough")


def _groups(node: Node) -> Iterator[CheckResult]:
    """Check each volume group that a device class names: that it is on this node and whole.

    Further findings are about its metadata area, its disks' logical blocks, damaged tags, and how
    deleted data are erased. Runs one more command if filters or a devices file hide some groups.
    """
    try:
        groups_report = node.report()
    except (mount_errors.CommandError, errors.NotReady) as error:
        yield FAIL, str(error), "repair that first; the groups cannot be looked at without it"
        return
    refused, ignored = node.refused(), node.ignored()
    defined_devices = {
        definition.group: definition.devices
        for definition in node.settings.definitions
        if definition.devices
    }
    definitions = GroupDefinitions(node.configuration, node.kernel, defined_devices)
    unfiltered = _unfiltered(node, groups_report)
    for name in node.settings.groups:
        group, unfiltered_group = groups_report.groups.get(name), unfiltered.get(name)
        if (refusal := refused.get(name)) is not None:
            yield FAIL, str(refusal), "as it says; its classes have no room here until then"
        elif unfiltered_group is not None and (
            group is None or unfiltered_group.missing_disks < group.missing_disks
        ):
            yield _hidden(name, group, node.lvm_root)
        elif group is not None:
            yield from _of_group(node, groups_report, definitions, group)
            for why in ignored.get(name, ()):
                yield WARN, f"volume group {name}: {why}", REMEDY
        elif name in defined_devices:
            yield (
                WARN,
                f"volume group {name} is not there, which Carver makes of"
                f" {', '.join(defined_devices[name])} when it starts",
                "start it; if it did, its log says why the group could not be made",
            )
        else:
            yield (
                WARN,
                f"volume group {name} is not on this node, so its classes have no room here",
                "attach its disks (`pvs --all`), make it (`vgcreate --metadatasize 80m`), or"
                " correct the class",
            )


def _of_group(
    node: Node, lvm_report: Report, definitions: GroupDefinitions, group: Group
) -> Iterator[CheckResult]:
    name, fill = group.name, groups.text_percent(group)
    try:
        definitions.group(lvm_report, name)
    except errors.GroupRefused as error:
        yield FAIL, str(error), "`vgrename` that group, or correct the list"
        return
    for device in definitions.absent(group):
        yield (
            WARN,
            f"{device} is listed for volume group {name}, and is not one of its disks",
            f"if nothing on it is needed, `{groups.vgextend(group)} {device}`; else correct the"
            " list",
        )
    blocks = _blocks(node.kernel, group)
    if len(blocks) > 1:
        sizes = "; ".join(f"{size} bytes: {', '.join(blocks[size])}" for size in sorted(blocks))
        yield (
            WARN,
            f"volume group {name} has disks with logical blocks of several sizes ({sizes}): a file"
            " system that was made on the smaller ones may not be mounted once it lies on others",
            "move what is on one kind to the other (`pvmove`), and take that out (`vgreduce`)",
        )
    if group.missing_disks:
        yield (
            WARN,
            f"volume group {name} misses {group.missing_disks} of its disks",
            "attach them again, or see `A disk is replaced` in docs/operations.md",
        )
    else:
        yield _pass(
            f"volume group {name} is whole, with {counted(len(group.disks), 'disk')}; its metadata"
            f" area is {fill:.0f} % full"
        )
    yield from _erasing(node, group)
    yield from _damaged(group)
    yield from _of_no_class(node, group)
    if fill >= _NEARLY_FULL_PERCENT:
        yield (
            WARN,
            f"{groups.about_area(group)} is {fill:.0f} % full: soon nothing new is made there",
            "see `A group's metadata area is full` in docs/operations.md",
        )
    elif groups.narrow_disks(group):
        yield (
            WARN,
            f"{groups.about_area(group)} has less room than it could have",
            "see `A group's metadata area is full` in docs/operations.md",
        )


def _damaged(group: Group) -> Iterator[CheckResult]:
    """Warn about volumes and snapshots that Carver leaves alone because their tags are damaged.

    Tags are damaged if no version of Carver writes them together.
    """
    for logical in records.all_logical_volumes(group):
        if faults := records.faults(logical):
            damaged_tags = ", ".join(sorted(faults))
            yield (
                WARN,
                f"{group.name}/{logical.name} is left alone, as tags of it were lost or changed by"
                f" hand: {damaged_tags}",
                "see `lvs -o +tags`, and put them right (`lvchange --addtag`, `--deltag`)",
            )


def _of_no_class(node: Node, group: Group) -> Iterator[CheckResult]:
    """Warn about volumes and pools whose device class is not in the configuration any more."""
    classes = [
        device_class for device_class in node.settings.classes if device_class.group == group.name
    ]
    class_names, with_pool = (
        {device_class.name for device_class in classes},
        {device_class.name for device_class in classes if device_class.pool},
    )
    volume_names = defaultdict[str, list[str]](list)
    for logical in records.all_logical_volumes(group):
        name = logical.own_tags.get(tag.CLASS, "")
        is_gone = name not in (with_pool if is_pool(logical) else class_names)
        if name and is_gone and not names.is_part(logical.name):
            volume_names[name].append(logical.name)
    for name, members in sorted(volume_names.items()):
        shown_names = ", ".join(sorted(members)[:_MOST_NAMED]) + ", ..." * (
            len(members) > _MOST_NAMED
        )
        yield (
            WARN,
            f"volume group {group.name} has no class {name} any more, by which {shown_names} were"
            " made: they are used and extended, but with the defaults of a class, so without its"
            " reserve, automatic repair, key file, discards and `bypass_workqueue`",
            "put the class back as it was, or move what is left of it",
        )


def _erasing(node: Node, group: Group) -> Iterator[CheckResult]:
    """Report how deleted data are erased on each present disk of a volume group.

    Warn about disks on which data are zeroed because discarding is not possible.
    """
    ways = dict[str, list[str]]()
    for disk in group.disks:
        try:
            way, objection = erase_policy.zeroing_method(node.settings, node.kernel, disk.name)
        except OSError:
            # Skip a disk that cannot be read, such as a missing one.
            continue
        description = disk.name
        if objection and way is By.DISCARD:
            description += f" ({objection})"
        elif objection:
            yield (
                WARN,
                f"volume group {group.name}: deleted data on {disk.name} are zeroed, not discarded:"
                f" {objection}",
                "nothing need be done; see `How deleted data are erased` in docs/security.md",
            )
        ways.setdefault("not at all" if way is None else f"by {way.value}", []).append(description)
    if ways:
        description = "; ".join(f"{', '.join(disks)} {way}" for way, disks in ways.items())
        yield _pass(f"deleted data of volume group {group.name} are erased on {description}")


def _hidden(name: str, group: Group | None, root: Path) -> CheckResult:
    """Return the warning about a volume group with disks that the node's lvm2 is not to use.

    The disks are hidden by the node's devices file or by a filter in its lvm.conf.
    """
    if (file := lvm2.devices_file(root)) is not None:
        why = f"the node's devices file does not list (/{file.relative_to(root)})"
        remedy = f"`vgimportdevices {name}` on the node, if it is to be used; see lvmdevices(8)"
    else:
        why = "the filters in the node's lvm.conf reject (devices/filter, devices/global_filter)"
        remedy = "correct the filter, or name the disks in the setting `devices`"
    if group is None:
        problem = f"is on disks that {why}, so lvm2 does not use it, and its classes have no room"
    else:
        problem = f"misses {group.missing_disks} of its disks, some of which {why}"
    return WARN, f"volume group {name} {problem}", remedy


def _blocks(kernel: Kernel, group: Group) -> Mapping[int, list[str]]:
    """Return the present disks of a volume group, by the size of their logical blocks in bytes."""
    disks_by_size: dict[int, list[str]] = {}
    for disk in group.disks:
        with suppress(OSError):
            disks_by_size.setdefault(kernel.logical_block_bytes(disk.name), []).append(disk.name)
    return disks_by_size


def _unfiltered(node: Node, lvm_report: Report) -> Mapping[str, Group]:
    """Return the volume groups that lvm2 finds without the node's devices file and filters.

    Runs a command if the result may differ from `lvm_report`; else the result is empty.
    """
    root, known_groups = (
        node.lvm_root,
        [lvm_report.groups.get(name) for name in node.settings.groups],
    )
    is_well = all(group is not None and not group.missing_disks for group in known_groups)
    has_any = lvm2.devices_file(root) is not None or candidate_devices.read(root) is not None
    # Skip the command with the setting `devices`, which overrides the devices file and the filters.
    if is_well or node.settings.devices or not has_any:
        return {}
    filters = ('devices/filter=["a|.*|"]', 'devices/global_filter=["a|.*|"]')
    settings = (*lvm2.without_udev(), "devices/use_devicesfile=0", *filters)
    try:
        return report.read(lvm2.Lvm(node.run, settings=settings)).groups
    except mount_errors.CommandError:
        return {}


def _kernel(node: Node) -> Iterator[CheckResult]:
    """Check that the kernel is not too old, and warn if it lacks mount_setattr(2)."""
    if why := too_old(node.kernel):
        yield FAIL, why, "use a newer kernel"
        return
    if node.kernel.has_new_mount_calls():
        yield _pass("the kernel makes read-only binds at once (mount_setattr, Linux 5.12)")
    else:
        yield (
            WARN,
            "the kernel is older than 5.12: a read-only bind of a file system is writable for a"
            " moment, until it is remounted",
            "use a newer kernel where that matters",
        )


def too_old(kernel: Kernel) -> str:
    """Return why Carver does not run with this kernel; empty if it does."""
    version, oldest = (".".join(map(str, numbers)) for numbers in (kernel.version(), OLDEST))
    if kernel.version() >= OLDEST:
        return ""
    return (
        f"Linux {version} is too old: before {oldest} a mount table may lack mounts that are there,"
        " so that volumes would be mounted twice, or called unmounted while they are in use"
    )


def _modules(node: Node) -> Iterator[CheckResult]:
    """Check that the kernel has the modules that device classes and snapshots need.

    A missing module is a failure if a class needs it, and a warning if only snapshots do.
    """
    class_names = {
        device_class.layout.module: device_class.name
        for device_class in node.settings.classes
        if device_class.layout.module
    }
    class_names |= {
        f"dm-{device_class.cache.kind}": device_class.name
        for device_class in node.settings.classes
        if device_class.cache
    }
    purposes = {"dm-snapshot": "snapshots"} | {
        module: f"class {class_names[module]}" for module in class_names
    }
    for module, purpose in sorted(purposes.items()):
        is_there = _module_is_there(node, module)
        if is_there:
            yield _pass(f"the kernel has {module}, for {purpose}")
        elif is_there is None and module not in class_names:
            yield _pass(
                f"{module}, for {purpose}, is loaded when Carver starts, if the node has it"
            )
        elif is_there is None:
            yield (
                WARN,
                f"{module}, for {purpose}, is not loaded, and no /lib/modules here says whether it"
                " can be",
                f"`modprobe {module}` on the node",
            )
        else:
            yield (
                FAIL if module in class_names else WARN,
                f"the kernel has no {module}, which {purpose} need{'s' * (module in class_names)}",
                "install the kernel's full set of modules, or another kernel",
            )


def _file_systems(node: Node) -> Iterator[CheckResult]:
    """Check that libblkid and the programs of each file system are installed.

    Without libblkid the check fails. Missing programs are a failure if a device class uses the file
    system, else a warning.
    """
    try:
        node.kernel.signatures(os.devnull)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            yield FAIL, "libblkid is missing, so nothing is ever formatted", "install libblkid1"
    used = {device_class.fs_type for device_class in node.settings.classes}
    for fs_type in filesystem.FILE_SYSTEMS:
        if missing := missing_programs(node, fs_type):
            yield (
                FAIL if fs_type in used else WARN,
                f"{fs_type}: {', '.join(missing)} is missing, so no volume can have it",
                f"install {filesystem.FILE_SYSTEMS[fs_type].package}",
            )
        else:
            yield _pass(
                f"{fs_type}: found {' and '.join(filesystem.FILE_SYSTEMS[fs_type].programs)}"
            )


def missing_programs(node: Node, fs_type: str) -> list[str]:
    """Return the programs of a file system that this node lacks; runs no command."""
    return [
        program for program in filesystem.FILE_SYSTEMS[fs_type].programs if not _has(node, program)
    ]


def _thin_tools(node: Node) -> Iterator[CheckResult]:
    """Check that the programs are installed that lvm2 runs for thin pools.

    Nothing is checked if no device class is thin, or if lvm2 is the host's.
    """
    thin = [
        device_class.name for device_class in node.settings.classes if device_class.layout.is_thin
    ]
    # Skip the check with lvm = "host": lvm2 then runs the host's programs, which cannot be seen
    # here.
    if not thin or node.settings.lvm == "host":
        return
    if missing := [program for program in _THIN_PROGRAMS if not _has(node, program)]:
        yield (
            FAIL,
            f"{', '.join(missing)} is missing, without which lvm2 activates no thin pool (class"
            f" {', '.join(thin)})",
            "install thin-provisioning-tools",
        )
    else:
        yield _pass("the programs that check and repair thin pools are there")


def _encryption(node: Node) -> Iterator[CheckResult]:
    """Check that cryptsetup, dm-crypt, AES instructions and key files are there.

    Nothing is checked if no device class is encrypted.
    """
    encrypted = [device_class for device_class in node.settings.classes if device_class.encryption]
    if not encrypted:
        return
    class_names = f"class {', '.join(device_class.name for device_class in encrypted)}"
    if not _has(node, "cryptsetup"):
        yield FAIL, f"cryptsetup is missing, which {class_names} needs", "install cryptsetup-bin"
    is_there = _module_is_there(node, "dm-crypt")
    if is_there is False:
        yield FAIL, f"the kernel has no dm-crypt, which {class_names} needs", "install its modules"
    elif _has(node, "cryptsetup"):
        yield _pass(f"cryptsetup is there, and dm-crypt{' perhaps' * (is_there is None)}")
    # Look for the flag `aes`, which x86 and 64-bit ARM both use for the instructions.
    if "aes" in node.at("/proc/cpuinfo").read_text().lower().split():
        yield _pass("the processor has instructions for AES")
    else:
        yield (
            WARN,
            "the processor has no instructions for AES: encrypted volumes are some times slower",
            "nothing need be done; in a virtual machine, show it the host's processor",
        )
    for device_class in node.settings.classes:
        if device_class.key_file is not None and not node.at(str(device_class.key_file)).is_file():
            yield (
                WARN,
                f"class {device_class.name}: key_file {device_class.key_file} is not there, so"
                " only volumes with a secret are opened",
                "make the file, mode 0400, or correct the class",
            )


def _io_limits(node: Node) -> Iterator[CheckResult]:
    """Check that the pods' cgroup has an I/O controller; warn if a volume has limits without it.

    Without an I/O controller, the I/O limits of volumes have no effect.
    """
    try:
        directory = Cgroups(node.settings.pods_cgroup, node.at(str(cgroups.ROOT))).pods_directory()
        yield _pass(f"I/O can be limited, in {directory}")
        return
    except mount_errors.NoCgroup as error:
        why = str(error)
    limited = []
    with suppress(mount_errors.CommandError, errors.NotReady):
        logical_volumes = (
            logical
            for group in node.report().groups.values()
            for logical in records.all_logical_volumes(group)
        )
        limited = [logical.name for logical in logical_volumes if logical.tuning.is_limited]
    if limited:
        yield (
            WARN,
            f"{', '.join(limited)} are not limited: {why}",
            "repair that, or lift the limits",
        )
    else:
        yield _pass(f"no volume has limits of I/O, and none could: {why}")


def _service(node: Node) -> Iterator[CheckResult]:
    """Check that a process serves Carver's socket."""
    endpoint = node.settings.endpoint
    if sockets.is_served(endpoint):
        yield _pass(f"a process serves {endpoint}")
    else:
        yield WARN, f"no process serves {endpoint}", "`systemctl start carver`, or `carver serve`"


def _has(node: Node, program: str) -> bool:
    search_path = (str(node.at(directory)) for directory in ENVIRONMENT["PATH"].split(":"))
    return shutil.which(program, path=os.pathsep.join(search_path)) is not None


def _module_is_there(node: Node, module: str) -> bool | None:
    """Whether a kernel module is loaded, built in, or can be loaded; None if not known.

    Whether a module can be loaded is not known if /lib/modules lacks the running kernel's lists.
    """
    if node.at(f"/sys/module/{module.replace('-', '_')}").exists():
        return True
    release = node.at("/proc/sys/kernel/osrelease").read_text().strip()
    lists = [
        node.at(f"/lib/modules/{release}/modules.{list_name}") for list_name in ("builtin", "dep")
    ]
    readable = [path for path in lists if path.exists()]
    if not readable:
        return None
    return any(f"/{module}.ko" in path.read_text() for path in readable)


# All checks, by the name that a finding shows, in the order in which they run.
CHECKS: dict[str, Check] = {
    "privileges": _privileges,
    "kubelet directory": _kubelet_directory,
    "registration": _registration,
    "device-mapper": _device_mapper,
    "devices": _devices,
    "udev": _udev,
    "lvm2": _lvm2,
    "guests' groups": _guests,
    "groups": _groups,
    "kernel": _kernel,
    "modules": _modules,
    "file systems": _file_systems,
    "thin tools": _thin_tools,
    "encryption": _encryption,
    "limits of I/O": _io_limits,
    "service": _service,
}
# Names of the checks that start no process and read no report.
QUICK_CHECKS = ("device-mapper", "kubelet directory")

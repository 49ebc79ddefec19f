"""Checks of the node and its volume groups (`carver doctor`), each with a verdict and a remedy.

CHECKS at the end of this file is the table. A check is a function with a row there: its docstring
says what it looks at, and it yields a verdict, what was seen, and a remedy for each finding. What a
check cannot read is a warning, not an error.
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

PASS = "pass"  # noqa: S105 - no password
WARN = "warn"
FAIL = "fail"

# A verdict, what was seen, and the remedy, which is empty for PASS.
Seen = tuple[str, str, str]

# lvm2 2.03.12 brought --devices, by which Carver confines it (WHATS_NEW of lvm2).
LEAST_LVM2 = (2, 3, 12)
_CAP_SYS_ADMIN = 21  # linux/capability.h
_THIN_PROGRAMS = ("thin_check", "thin_repair", "thin_dump")
# From here on the check of a group's metadata area warns; from 94 % on nothing new is made.
_NEARLY_FULL_PERCENT = 80
# How many volumes of a class that is gone are named.
_MOST_NAMED = 10


@dataclass(frozen=True)
class Finding:
    """What one check found; the remedy is empty for PASS."""

    check: str
    verdict: str
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Node:
    """What the checks look at: the configuration and the machine. `root` is for tests."""

    configuration: Configuration
    kernel: Kernel
    run: Run
    report: Callable[[], Report]
    root: Path = Path("/")
    # The groups that are here, but not in the last report.
    refused: Callable[[], Mapping[str, errors.GroupRefused]] = dict
    # The disks that claim to be a group's and are ignored, each as a sentence, by group.
    ignored: Callable[[], Mapping[str, Sequence[str]]] = dict

    def at(self, path: str) -> Path:
        """Where a path of the machine is found."""
        return self.root / path.lstrip("/")

    @property
    def settings(self) -> Config:
        """The configuration that holds now."""
        return self.configuration.now

    @property
    def lvm_root(self) -> Path:
        """Where the root directory of lvm2 is found."""
        return self.at(str(self.settings.lvm_root))


Check = Callable[[Node], Iterator[Seen]]


def everything(node: Node) -> Sequence[Finding]:
    """All checks, in the order in which one depends on another."""
    return tuple(one for name, check in CHECKS.items() for one in _findings(name, check, node))


def cheap(node: Node) -> Sequence[Finding]:
    """The checks that start no process and read no report, for frequent callers."""
    return tuple(one for name in CHEAP for one in _findings(name, CHECKS[name], node))


def _findings(name: str, check: Check, node: Node) -> Iterator[Finding]:
    try:
        for verdict, message, remedy in check(node):
            yield Finding(name, verdict, message, remedy)
    except (OSError, ValueError) as error:
        yield Finding(name, WARN, f"cannot be looked at: {error}", "see whether /proc is there")


def _pass(message: str) -> Seen:
    return PASS, message, ""


def _privileges(node: Node) -> Iterator[Seen]:
    """The effective capabilities of this process."""
    lines = node.at("/proc/self/status").read_text().splitlines()
    held = dict(line.split(":", 1) for line in lines).get("CapEff", "0")
    if int(held, 16) >> _CAP_SYS_ADMIN & 1:
        yield _pass("may mount and use device-mapper")
    else:
        yield (
            FAIL,
            "has not the capability CAP_SYS_ADMIN, without which nothing can be mounted",
            "run it as root; in a container, with securityContext.privileged",
        )


def _kubelet_directory(node: Node) -> Iterator[Seen]:
    """The propagation of the mounts that hold kubelet's volumes: shared."""
    mounts = table.read(node.kernel)
    for directory in node.settings.kubelet_dir:
        # Where kubelet has volumes; in a container these two are the mounts that lead to the host.
        places = [f"{directory.rstrip('/')}/{one}" for one in ("pods", "plugins")]
        holders = {one: mounts.holding(node.kernel.real_path(one)) for one in places}
        private = {
            place: one
            for place, one in holders.items()
            if one is None or not any(word.startswith("shared:") for word in one.propagation)
        }
        for place, holder in private.items():
            seen = "/" if holder is None else holder.path
            yield (
                # Without kubelet nothing else needs to see the mounts.
                FAIL if node.at(place).exists() else WARN,
                f"{place} is in a mount that is not shared ({seen}): kubelet and pods would not see"
                " what Carver mounts there",
                f"`mount --make-rshared {seen}`; in a container, mountPropagation: Bidirectional;"
                " under systemd, nothing that gives the unit mounts of its own (systemd.exec(5))",
            )
        if not private:
            yield _pass(f"{directory} is in a shared mount")


def _registration(node: Node) -> Iterator[Seen]:
    """The directory where kubelet looks for drivers."""
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


def _device_mapper(node: Node) -> Iterator[Seen]:
    """The control node of device-mapper."""
    control = "/dev/mapper/control"
    try:
        # Opening it loads the driver's module if needed.
        with node.at(control).open("rb"):
            yield _pass(f"{control} answers")
    except OSError as error:
        yield (
            FAIL,
            f"device-mapper does not answer: {control}: {error.strerror}",
            "`modprobe dm_mod`; in a container, mount the host's /dev",
        )


def _devices(node: Node) -> Iterator[Seen]:
    """The kernel's /dev, the configured `devices`, and loop devices."""
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
    listed = [
        *node.settings.devices,
        *(d for one in node.settings.definitions for d in one.devices),
    ]
    # What udev and device-mapper name lies deeper: /dev/disk/by-id/…, /dev/mapper/…
    if unstable := [one for one in dict.fromkeys(listed) if one.count("/") == 2]:
        yield (
            WARN,
            f"{', '.join(unstable)}: the kernel gives such a name to whatever it finds first, so"
            " after a reboot it may be another disk's, or none's",
            "name the disk by its link in /dev/disk/by-id (`udevadm info --query=symlink"
            f" {unstable[0]}`)",
        )
    if not node.at("/dev/loop-control").exists():
        yield (
            FAIL if any(one.file for one in node.settings.definitions) else WARN,
            "there are no loop devices, which read-only raw block volumes and a group on a file"
            " need",
            "`modprobe loop`; in a container, mount the host's /dev",
        )
    elif is_kernels:
        yield _pass("/dev is the kernel's own, with loop devices")


def _udev(node: Node) -> Iterator[Seen]:
    """Whether udev runs; either is fine."""
    runs = node.at("/run/udev/control").exists()
    without = "there is no udev here: lvm2 is run without it, and makes nodes itself"
    yield _pass("udev runs, and lvm2 waits for it" if runs else without)


def _guests(node: Node) -> Iterator[Seen]:
    """Whether the node's lvm2 would activate a volume group inside a raw block volume."""
    # kubelet has a loop device over each raw block volume, of which udev tells lvm2 (69-lvm.rules).
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


def _lvm2(node: Node) -> Iterator[Seen]:
    """The version of lvm2."""
    if node.settings.lvm == "host" and not _has(node, HOST_NAMESPACES[0]):
        yield FAIL, 'nsenter is missing, which lvm = "host" needs', "install util-linux"
        return
    try:
        found = lvm2.version(node.run)
    except mount_errors.CommandError as error:
        yield FAIL, str(error), "install lvm2, where `lvm` in the configuration says that it is"
        return
    shown, least = (f"{one[0]}.{one[1]:02}.{one[2]}" for one in (found, LEAST_LVM2))
    if found < LEAST_LVM2:
        yield FAIL, f"lvm2 is {shown}, too old", f"install {least} or newer"
    else:
        yield _pass(f"lvm2 is {shown}; {least} is enough")


def _groups(node: Node) -> Iterator[Seen]:
    """Each volume group of a class; one more command where filters or a devices file hide some."""
    try:
        known = node.report()
    except (mount_errors.CommandError, errors.NotReady) as error:
        yield FAIL, str(error), "repair that first; the groups cannot be looked at without it"
        return
    refused, ignored = node.refused(), node.ignored()
    listed = {one.group: one.devices for one in node.settings.definitions if one.devices}
    definitions = GroupDefinitions(node.configuration, node.kernel, listed)
    unfiltered = _unfiltered(node, known)
    for name in node.settings.groups:
        group, whole = known.groups.get(name), unfiltered.get(name)
        if (refusal := refused.get(name)) is not None:
            yield FAIL, str(refusal), "as it says; its classes have no room here until then"
        elif whole is not None and (group is None or whole.missing_disks < group.missing_disks):
            yield _hidden(name, group, node.lvm_root)
        elif group is not None:
            yield from _of_group(node, known, definitions, group)
            for why in ignored.get(name, ()):
                yield WARN, f"volume group {name}: {why}", REMEDY
        elif name in listed:
            yield (
                WARN,
                f"volume group {name} is not there, which Carver makes of {', '.join(listed[name])}"
                " when it starts",
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
    node: Node, known: Report, definitions: GroupDefinitions, group: Group
) -> Iterator[Seen]:
    name, fill = group.name, groups.text_percent(group)
    try:
        definitions.group(known, name)
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
            f"volume group {name} is whole, with {len(group.disks)} disks; its metadata area is"
            f" {fill:.0f} % full"
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


def _damaged(group: Group) -> Iterator[Seen]:
    """Volumes and snapshots whose tags no version writes so."""
    for one in records.every(group):
        if faults := records.faults(one):
            wrong = ", ".join(sorted(faults))
            yield (
                WARN,
                f"{group.name}/{one.name} is left alone, as tags of it were lost or changed by"
                f" hand: {wrong}",
                "see `lvs -o +tags`, and put them right (`lvchange --addtag`, `--deltag`)",
            )


def _of_no_class(node: Node, group: Group) -> Iterator[Seen]:
    """Classes that volumes and pools of a group were made by, and that are not its own any more."""
    classes = [one for one in node.settings.classes if one.group == group.name]
    own, with_pool = {one.name for one in classes}, {one.name for one in classes if one.pool}
    found = defaultdict[str, list[str]](list)
    for one in records.every(group):
        name = one.own_tags.get(tag.CLASS, "")
        is_gone = name not in (with_pool if is_pool(one) else own)
        if name and is_gone and not names.is_part(one.name):
            found[name].append(one.name)
    for name, made in sorted(found.items()):
        shown = ", ".join(sorted(made)[:_MOST_NAMED]) + ", ..." * (len(made) > _MOST_NAMED)
        yield (
            WARN,
            f"volume group {group.name} has no class {name} any more, by which {shown} were made:"
            " they are used and extended, but with the defaults of a class, so without its reserve,"
            " automatic repair, key file, discards and `bypass_workqueue`",
            "put the class back as it was, or move what is left of it",
        )


def _erasing(node: Node, group: Group) -> Iterator[Seen]:
    """How deleted data are erased on each disk of a group that is present."""
    ways = dict[str, list[str]]()
    for disk in group.disks:
        try:
            way, doubt = erase_policy.way_on(node.settings, node.kernel, disk.name)
        except OSError:
            continue  # it is missing
        said = disk.name
        if doubt and way is By.DISCARD:
            said += f" ({doubt})"
        elif doubt:
            yield (
                WARN,
                f"volume group {group.name}: deleted data on {disk.name} are zeroed, not discarded:"
                f" {doubt}",
                "nothing need be done; see `How deleted data are erased` in docs/security.md",
            )
        ways.setdefault("not at all" if way is None else f"by {way.value}", []).append(said)
    if ways:
        said = "; ".join(f"{', '.join(disks)} {way}" for way, disks in ways.items())
        yield _pass(f"deleted data of volume group {group.name} are erased on {said}")


def _hidden(name: str, group: Group | None, root: Path) -> Seen:
    """A group of which the node's devices file, or a filter, hides disks."""
    if (file := lvm2.devices_file(root)) is not None:
        why = f"the node's devices file does not list (/{file.relative_to(root)})"
        remedy = f"`vgimportdevices {name}` on the node, if it is to be used; see lvmdevices(8)"
    else:
        why = "the filters in the node's lvm.conf reject (devices/filter, devices/global_filter)"
        remedy = "correct the filter, or name the disks in the setting `devices`"
    if group is None:
        seen = f"is on disks that {why}, so lvm2 does not use it, and its classes have no room"
    else:
        seen = f"misses {group.missing_disks} of its disks, some of which {why}"
    return WARN, f"volume group {name} {seen}", remedy


def _blocks(kernel: Kernel, group: Group) -> Mapping[int, list[str]]:
    """The disks that are present, by the size of their logical blocks."""
    found: dict[int, list[str]] = {}
    for disk in group.disks:
        with suppress(OSError):
            found.setdefault(kernel.logical_block_bytes(disk.name), []).append(disk.name)
    return found


def _unfiltered(node: Node, known: Report) -> Mapping[str, Group]:
    """The groups without the node's devices file and filters: a command, if that may differ."""
    root, found = node.lvm_root, [known.groups.get(one) for one in node.settings.groups]
    is_well = all(one is not None and not one.missing_disks for one in found)
    has_any = lvm2.devices_file(root) is not None or candidate_devices.read(root) is not None
    # The setting `devices` overrides both.
    if is_well or node.settings.devices or not has_any:
        return {}
    every = ('devices/filter=["a|.*|"]', 'devices/global_filter=["a|.*|"]')
    settings = (*lvm2.without_udev(), "devices/use_devicesfile=0", *every)
    try:
        return report.read(lvm2.Lvm(node.run, settings=settings)).groups
    except mount_errors.CommandError:
        return {}


def _kernel(node: Node) -> Iterator[Seen]:
    """The kernel's version, and its system calls for mounts."""
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
    """Why Carver does not serve with this kernel; empty where it does."""
    version, least = (".".join(map(str, one)) for one in (kernel.version(), OLDEST))
    if kernel.version() >= OLDEST:
        return ""
    return (
        f"Linux {version} is too old: before {least} a mount table may lack mounts that are there,"
        " so that volumes would be mounted twice, or called unmounted while they are in use"
    )


def _modules(node: Node) -> Iterator[Seen]:
    """The kernel modules that the classes need: FAIL without; for snapshots WARN."""
    needed = {one.layout.module: one.name for one in node.settings.classes if one.layout.module}
    needed |= {f"dm-{one.cache.kind}": one.name for one in node.settings.classes if one.cache}
    wanted = {"dm-snapshot": "snapshots"} | {one: f"class {needed[one]}" for one in needed}
    for module, purpose in sorted(wanted.items()):
        there = _module_is_there(node, module)
        if there:
            yield _pass(f"the kernel has {module}, for {purpose}")
        elif there is None and module not in needed:
            yield _pass(
                f"{module}, for {purpose}, is loaded when Carver starts, if the node has it"
            )
        elif there is None:
            yield (
                WARN,
                f"{module}, for {purpose}, is not loaded, and no /lib/modules here says whether it"
                " can be",
                f"`modprobe {module}` on the node",
            )
        else:
            yield (
                FAIL if module in needed else WARN,
                f"the kernel has no {module}, which {purpose} need{'s' * (module in needed)}",
                "install the kernel's full set of modules, or another kernel",
            )


def _file_systems(node: Node) -> Iterator[Seen]:
    """The programs of each file system, FAIL if a class uses it; and libblkid."""
    try:
        node.kernel.signatures(os.devnull)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            yield FAIL, "libblkid is missing, so nothing is ever formatted", "install libblkid1"
    used = {one.fs_type for one in node.settings.classes}
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
    """The programs that a file system needs and this node lacks; no command."""
    return [one for one in filesystem.FILE_SYSTEMS[fs_type].programs if not _has(node, one)]


def _thin_tools(node: Node) -> Iterator[Seen]:
    """The programs that lvm2 runs for thin pools, if a class is thin."""
    thin = [one.name for one in node.settings.classes if one.layout.is_thin]
    # With lvm = "host" lvm2 runs the host's, which cannot be seen from here.
    if not thin or node.settings.lvm == "host":
        return
    if missing := [one for one in _THIN_PROGRAMS if not _has(node, one)]:
        yield (
            FAIL,
            f"{', '.join(missing)} is missing, without which lvm2 activates no thin pool (class"
            f" {', '.join(thin)})",
            "install thin-provisioning-tools",
        )
    else:
        yield _pass("the programs that check and repair thin pools are there")


def _encryption(node: Node) -> Iterator[Seen]:
    """Cryptsetup, dm-crypt, AES instructions and key files, if a class is encrypted."""
    encrypted = [one for one in node.settings.classes if one.encryption]
    if not encrypted:
        return
    named = f"class {', '.join(one.name for one in encrypted)}"
    if not _has(node, "cryptsetup"):
        yield FAIL, f"cryptsetup is missing, which {named} needs", "install cryptsetup-bin"
    there = _module_is_there(node, "dm-crypt")
    if there is False:
        yield FAIL, f"the kernel has no dm-crypt, which {named} needs", "install its modules"
    elif _has(node, "cryptsetup"):
        yield _pass(f"cryptsetup is there, and dm-crypt{' perhaps' * (there is None)}")
    # x86 and 64-bit ARM have the same name for it.
    if "aes" in node.at("/proc/cpuinfo").read_text().lower().split():
        yield _pass("the processor has instructions for AES")
    else:
        yield (
            WARN,
            "the processor has no instructions for AES: encrypted volumes are some times slower",
            "nothing need be done; in a virtual machine, show it the host's processor",
        )
    for one in node.settings.classes:
        if one.key_file is not None and not node.at(str(one.key_file)).is_file():
            yield (
                WARN,
                f"class {one.name}: key_file {one.key_file} is not there, so only volumes with a"
                " secret are opened",
                "make the file, mode 0400, or correct the class",
            )


def _io_limits(node: Node) -> Iterator[Seen]:
    """The pods' cgroup and its I/O controller, if a volume has limits."""
    try:
        found = Cgroups(node.settings.pods_cgroup, node.at(str(cgroups.ROOT))).look()
        yield _pass(f"I/O can be limited, in {found}")
        return
    except mount_errors.NoCgroup as error:
        why = str(error)
    limited = []
    with suppress(mount_errors.CommandError, errors.NotReady):
        every = (one for group in node.report().groups.values() for one in records.every(group))
        limited = [one.name for one in every if one.tuning.is_limited]
    if limited:
        yield (
            WARN,
            f"{', '.join(limited)} are not limited: {why}",
            "repair that, or lift the limits",
        )
    else:
        yield _pass(f"no volume has limits of I/O, and none could: {why}")


def _service(node: Node) -> Iterator[Seen]:
    """Whether a process serves the socket."""
    endpoint = node.settings.endpoint
    if sockets.is_served(endpoint):
        yield _pass(f"a process serves {endpoint}")
    else:
        yield WARN, f"no process serves {endpoint}", "`systemctl start carver`, or `carver serve`"


def _has(node: Node, program: str) -> bool:
    places = (str(node.at(one)) for one in ENVIRONMENT["PATH"].split(":"))
    return shutil.which(program, path=os.pathsep.join(places)) is not None


def _module_is_there(node: Node, module: str) -> bool | None:
    """Whether a module is loaded, built in or can be loaded; None if that is not known."""
    if node.at(f"/sys/module/{module.replace('-', '_')}").exists():
        return True
    release = node.at("/proc/sys/kernel/osrelease").read_text().strip()
    lists = [node.at(f"/lib/modules/{release}/modules.{one}") for one in ("builtin", "dep")]
    readable = [one for one in lists if one.exists()]
    if not readable:
        return None
    return any(f"/{module}.ko" in one.read_text() for one in readable)


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
CHEAP = ("device-mapper", "kubelet directory")

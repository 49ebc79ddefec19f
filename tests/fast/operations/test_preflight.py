"""The preflight: what it finds on a healthy node, and for everything that can be missing."""

import errno
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller as do
from pathlib import Path

import configured
import pytest
from fakes.host import FakeHost
from fakes.kernel import FakeKernel

from agent.cli import main as cli
from agent.daemon.host import Host
from agent.operations import preflight
from agent.operations.preflight import FAIL, PASS, WARN, Finding, Node
from agent.settings.configuration import Configuration
from agent.settings.settings import BackingFile, Config, GroupDefinition
from lvm import groups, lvm2, report, volumes
from lvm.caches import Cache
from lvm.layout import Layout
from lvm.tuning import Tuning
from lvm.volumes import New
from mount.command import Result
from mount.filesystem import FILE_SYSTEMS
from mount.kernel import Kernel
from mount.stacks import Stack

RELEASE = "6.1.0-test"
PROGRAMS = ("nsenter", *(name for one in FILE_SYSTEMS.values() for name in one.programs))
THIN_PROGRAMS = ("thin_check", "thin_repair", "thin_dump")
MODULES = ("dm-raid", "dm-thin-pool", "dm-snapshot")


@dataclass
class Place:
    """A node whose files lie in a directory."""

    root: Path
    host: FakeHost
    settings: Config

    def file(self, path: str, text: str = "") -> Path:
        found = self.root / path.lstrip("/")
        found.parent.mkdir(parents=True, exist_ok=True)
        found.write_text(text)
        return found

    def program(self, name: str) -> None:
        self.file(f"/usr/sbin/{name}", "#!").chmod(0o755)

    def remove(self, *paths: str) -> None:
        for path in paths:
            found = self.root / path.lstrip("/")
            (found.rmdir if found.is_dir() else found.unlink)()

    def set(self, **settings: object) -> None:
        self.settings = replace(self.settings, **settings)  # type: ignore[arg-type]

    def set_class(self, **settings: object) -> None:
        """Have the only class differ in this."""
        one = replace(self.settings.classes[0], **settings)  # type: ignore[arg-type]
        self.set(classes=(one,))

    def set_kernel(self, kind: type[FakeKernel]) -> None:
        self.host.kernel = kind(self.host.block)

    def set_mount(self, number: int, **changes: object) -> None:
        """Have a mount differ in this: 0 is that of /, 1 that of /dev."""
        kernel = self.host.kernel
        assert isinstance(kernel, FakeKernel)
        kernel.mounts[number] = replace(kernel.mounts[number], **changes)  # type: ignore[arg-type]

    def set_lvm2(self, version: str) -> None:
        self.host.lvm2.version = version

    def list_disks(self, group: str, *disks: str) -> None:
        """Have the settings list the disks of a group."""
        self.set(definitions=(GroupDefinition(group, disks),))

    def node(self) -> Node:
        lvm = self.host.lvm
        return Node(
            Configuration(self.settings),
            self.host.kernel,
            self.host.run,
            lambda: report.read(lvm),
            self.root,
        )

    def of(self, check: str) -> list[Finding]:
        return [one for one in preflight.all_findings(self.node()) if one.check == check]

    def one(self, check: str) -> Finding:
        [found] = self.of(check)
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A node on which nothing is missing."""
    host = FakeHost(tmp_path)
    group = host.new_group(100)
    settings = configured.carver(
        tmp_path,
        group,
        registration="self",
        registration_directory=Path("/kubelet/plugins_registry"),
        kubelet_dir=("/kubelet",),
    )
    made = Place(tmp_path / "root", host, settings)
    made.file("/proc/self/status", "Name:\tcarver\nCapEff:\t000001ffffffffff\n")
    made.file("/proc/sys/kernel/osrelease", f"{RELEASE}\n")
    made.file("/dev/mapper/control")
    made.file("/dev/loop-control")
    made.file("/run/udev/control")
    made.file(CONF_FILE, f"activation/auto_activation_volume_list = [ {group!r} ]\n")
    made.file(f"{CGROUPS}/cgroup.controllers", "cpuset cpu io memory pids\n")
    (made.root / CGROUPS.lstrip("/") / "kubepods.slice").mkdir()
    modules = "".join(f"kernel/drivers/md/{one}.ko: kernel/x.ko\n" for one in MODULES)
    made.file(f"/lib/modules/{RELEASE}/modules.dep", modules)
    for directory in ("plugins_registry", "pods", "plugins"):
        (made.root / "kubelet" / directory).mkdir(parents=True)
    for program in (*PROGRAMS, *THIN_PROGRAMS):
        made.program(program)
    return made


CGROUPS, CONF_FILE = "/sys/fs/cgroup", "/etc/lvm/lvm.conf"
STATUS, DEPENDENCIES = "/proc/self/status", f"/lib/modules/{RELEASE}/modules.dep"


def test_a_healthy_node_passes_everything_but_the_service_that_does_not_run(place: Place) -> None:
    found = preflight.all_findings(place.node())
    assert {one.check for one in found if one.verdict != PASS} == {"service"}
    others = {"thin tools", "encryption"}
    assert {one.check for one in found} | others == set(preflight.CHECKS)
    assert all(bool(one.remedy) == (one.verdict != PASS) for one in found)


def test_all_checks_cost_two_commands_and_those_of_probe_none(place: Place) -> None:
    preflight.quick_findings(place.node())
    assert place.host.commands == []
    preflight.all_findings(place.node())
    assert [words[1] for words in place.host.commands] == ["version", "fullreport"]


Arrange = Callable[[Place], object]


class KernelWithoutLibblkid(FakeKernel):
    """On a node that has no such library."""

    def signatures(self, device: str, length_bytes: int = 0) -> Mapping[str, str]:
        raise OSError(errno.ENOSYS, "libblkid: cannot open shared object file")


class OldKernel(FakeKernel):
    """Linux before 5.12."""

    def has_new_mount_calls(self) -> bool:
        return False


class AncientKernel(FakeKernel):
    """Linux before 5.8."""

    def version(self) -> tuple[int, int]:
        return (5, 7)


def failing_lvm2(place: Place) -> None:
    place.host.intercept = lambda words: Result(3, "", "no") if words[0] == "lvm" else None


def without_group(place: Place) -> None:
    place.host.lvm2.groups.clear()


def without_disk(place: Place) -> None:
    place.host.lvm2.groups["group0"].disks[0].missing = True


def other_group(place: Place) -> None:
    place.list_disks("group0", place.host.new_device(1 << 30))


def new_disk(place: Place) -> None:
    first, second = (place.host.new_device(1 << 30) for _ in range(2))
    groups.create(place.host.lvm, "made", [first], {}, (1 << 20) - groups.LABEL_BYTES)
    place.set_class(group="made")
    place.list_disks("made", first, second)


def narrow_disk(place: Place) -> None:
    first, second = (place.host.new_device(1 << 30) for _ in range(2))
    groups.create(place.host.lvm, "made", [first], {}, (8 << 20) - groups.LABEL_BYTES)
    place.host.lvm("vgextend", "--", "made", second)
    place.set_class(group="made")


def encrypted(place: Place) -> None:
    place.set_class(encryption="luks2", key_file=Path("/etc/key"))
    place.program("cryptsetup")
    place.file("/etc/key")
    place.file("/sys/module/dm_crypt")
    place.file("/proc/cpuinfo", "flags\t\t: fpu vme aes\n")


def limited(place: Place) -> None:
    tuning = Tuning(read_iops=100)
    new = New("vol-a", 4 << 20, {"name": "a", **tuning.tags()})
    volumes.create(place.host.lvm, "group0", new)


def without_pods(place: Place) -> None:
    place.remove(f"{CGROUPS}/kubepods.slice")


def without_controller(place: Place) -> None:
    place.file(f"{CGROUPS}/cgroup.controllers", "cpuset cpu memory pids\n")


PRIVATE = do("set_mount", 0, propagation=())
ON_A_FILE = do("set", definitions=(GroupDefinition("data", file=BackingFile(Path("/x"))),))
RAID = do("set_class", layout=Layout("raid1", mirrors=1))
THIN = do("set_class", layout=Layout("thin"))
LOOP, PLUGINS = "/dev/loop-control", "/kubelet/plugins_registry"
NO_KUBELET = do("remove", "/kubelet/pods", "/kubelet/plugins")
NO_RAID = do("file", DEPENDENCIES, "kernel/drivers/md/dm-snapshot.ko:\n")
NO_AES = do("file", "/proc/cpuinfo", "flags: fpu\n")
REJECTS = 'devices {\n\tglobal_filter = [ "r|^/dev/loop|" ]\n'
CASES_OF_GUESTS = [
    ("", "scans loop devices"),
    ('devices/filter = [ "a|.*|" ]\n', "scans loop devices"),
    (f"{REJECTS}\tscan_lvs = 1\n}}\n", "scans logical volumes"),
    (f"{REJECTS}\tscan_lvs = 0\n}}\n", ""),
    (f"{REJECTS}}}\n", ""),
    ("global/event_activation = 0\n", ""),
    ("global/event_activation = 1\n", "scans loop devices"),
]
LACKS: list[tuple[Sequence[Arrange], str, str, str]] = [
    ([do("file", STATUS, f"CapEff:\t{0:016}\n")], "privileges", FAIL, "CAP_SYS_ADMIN"),
    ([do("remove", STATUS)], "privileges", WARN, "cannot be looked at"),
    ([PRIVATE], "kubelet directory", FAIL, "not shared"),
    ([PRIVATE, NO_KUBELET], "kubelet directory", WARN, "not shared"),
    ([do("remove", PLUGINS)], "registration", WARN, "registry does not exist"),
    ([do("remove", "/dev/mapper/control")], "device-mapper", FAIL, "does not answer"),
    ([do("set", devices=("/dev/mapper/x",))], "devices", FAIL, "/dev/mapper/x"),
    ([do("list_disks", "group0", "/dev/md127")], "devices", WARN, "/dev/md127: the kernel gives"),
    ([do("remove", LOOP)], "devices", WARN, "no loop devices"),
    ([ON_A_FILE, do("remove", LOOP)], "devices", FAIL, "no loop devices"),
    ([do("set_mount", 1, fs_type="tmpfs")], "devices", WARN, "/dev is tmpfs"),
    ([do("set_lvm2", "2.02.187(2) (2020-03-24)")], "lvm2", FAIL, "2.02.187, too old"),
    ([do("set_lvm2", "unknown")], "lvm2", FAIL, "unknown"),
    ([failing_lvm2], "lvm2", FAIL, "exit code 3"),
    ([do("set", lvm="host"), do("remove", "/usr/sbin/nsenter")], "lvm2", FAIL, "nsenter"),
    ([without_group], "groups", WARN, "group0 is not on this node"),
    ([do("list_disks", "group0", "/dev/sdx"), without_group], "groups", WARN, "makes of /dev/sdx"),
    ([other_group], "groups", FAIL, "which Carver did not make"),
    ([new_disk], "groups", WARN, "is not one of its disks"),
    ([narrow_disk], "groups", WARN, "/dev/fake1 has 1.0 MiB, others 8.0 MiB"),
    ([without_disk], "groups", WARN, "misses 1 of its disks"),
    ([failing_lvm2], "groups", FAIL, "exit code 3"),
    ([do("set_kernel", OldKernel)], "kernel", WARN, "5.12"),
    ([do("set_kernel", AncientKernel)], "kernel", FAIL, "Linux 5.7 is too old: before 5.8"),
    ([RAID, NO_RAID], "modules", FAIL, "no dm-raid, which class plain needs"),
    ([do("set_class", cache=Cache())], "modules", FAIL, "no dm-cache, which class plain needs"),
    ([do("file", DEPENDENCIES)], "modules", WARN, "no dm-snapshot, which snapshots need"),
    ([RAID, do("remove", DEPENDENCIES)], "modules", WARN, "class plain, is not loaded"),
    ([do("set_kernel", KernelWithoutLibblkid)], "file systems", FAIL, "nothing is ever formatted"),
    ([do("remove", "/usr/sbin/fsck.ext4")], "file systems", FAIL, "fsck.ext4"),
    ([do("remove", "/usr/sbin/mkfs.xfs")], "file systems", WARN, "mkfs.xfs"),
    ([THIN, do("remove", "/usr/sbin/thin_check")], "thin tools", FAIL, "thin_check"),
    ([encrypted, do("remove", "/usr/sbin/cryptsetup")], "encryption", FAIL, "cryptsetup is miss"),
    ([encrypted, do("remove", "/sys/module/dm_crypt")], "encryption", FAIL, "no dm-crypt"),
    ([encrypted, do("remove", "/etc/key")], "encryption", WARN, "/etc/key is not there"),
    ([encrypted, NO_AES], "encryption", WARN, "no instructions for AES"),
    ([limited, without_pods], "limits of I/O", WARN, "vol-a are not limited"),
    ([limited, without_controller], "limits of I/O", WARN, "has no I/O controller"),
]


@pytest.mark.parametrize(
    ("arrange", "check", "verdict", "words"),
    LACKS,
    ids=[f"{check}, {words}" for _, check, _, words in LACKS],
)
def test_what_is_missing_is_reported_with_a_remedy(
    place: Place, arrange: Sequence[Arrange], check: str, verdict: str, words: str
) -> None:
    for step in arrange:
        step(place)
    found = [one for one in place.of(check) if one.verdict != PASS]
    assert {one.verdict for one in found} == {verdict}
    assert words in found[0].message
    assert found[0].remedy


@pytest.mark.parametrize(("conf", "words"), CASES_OF_GUESTS)
def test_a_node_that_would_activate_a_guests_group_is_warned_of(
    place: Place, conf: str, words: str
) -> None:
    place.file(CONF_FILE, conf)
    found = place.one("guests' groups")
    assert found.verdict == (WARN if words else PASS)
    assert words in found.message


def test_a_devices_file_keeps_guests_groups_from_being_activated(place: Place) -> None:
    place.file(CONF_FILE, "")
    place.file("/etc/lvm/devices/system.devices")
    place.file(CONF_FILE, "devices/use_devicesfile = 1\n")
    assert place.one("guests' groups").verdict == PASS


UUID = "abcdef00000000000000000000000000"
FILE, OTHER, CONF = "devices/system.devices", "devices/own.devices", "lvm.conf"
ENTRY = f"# PVID={'x' * 32}\nIDTYPE=sys_wwid PVID={UUID} PART=1\n"
OFF = "devices {\n\tuse_devicesfile = 0\n}\n"


@pytest.mark.parametrize(
    ("files", "is_switched_on", "disks"),
    [
        ({}, False, None),
        ({CONF: "devices {\n\tuse_devicesfile = 1\n}\n"}, False, None),
        ({FILE: ""}, True, set()),
        ({FILE: ENTRY}, True, {UUID}),
        ({FILE: "", CONF: "# use_devicesfile = 1\n"}, True, set()),
        ({FILE: "", CONF: "devices/use_devicesfile=1\n"}, False, set()),
        ({FILE: "", CONF: OFF}, False, None),
        ({FILE: "", "lvmlocal.conf": "devices/use_devicesfile=0\n"}, False, None),
        ({OTHER: ENTRY, CONF: 'devices {\n\t# devicesfile = "own.devices"\n}\n'}, False, None),
        ({OTHER: ENTRY, "lvmlocal.conf": 'devices/devicesfile = "own.devices"\n'}, True, {UUID}),
    ],
)
def test_a_devices_file_counts_unless_lvm_conf_says_otherwise(
    tmp_path: Path, files: dict[str, str], is_switched_on: bool, disks: set[str] | None
) -> None:
    for name, text in files.items():
        path = tmp_path / "etc/lvm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    expected = ("devices/use_devicesfile=1",) if is_switched_on else ()
    assert lvm2.with_devices_file(tmp_path) == expected
    assert lvm2.listed_disks(tmp_path) == disks


def test_only_a_disk_that_the_devices_file_hides_is_blamed_on_it(place: Place) -> None:
    group = place.host.new_group(10, 10)
    place.settings = configured.carver(place.root, group)
    place.file("/etc/lvm/devices/system.devices")
    place.host.lvm2.devices_file = {place.host.lvm2.groups[group].disks[0].name}
    place.host.lvm = replace(place.host.lvm, settings=lvm2.with_devices_file(place.root))
    assert "some of which the node's devices file does not list" in place.one("groups").message
    place.host.lose_disk(group, 1)
    assert "attach them again" in place.of("groups")[0].remedy
    place.host.lvm2.groups.clear()
    assert "is not on this node" in place.one("groups").message


@pytest.mark.parametrize(
    ("arrange", "check", "words"),
    [
        ([do("remove", "/run/udev/control")], "udev", "without it"),
        ([do("remove", PLUGINS), do("set", registration="none")], "registration", "another pro"),
        ([THIN], "thin tools", ""),
        ([THIN], "modules", ""),
        ([encrypted], "encryption", ""),
        ([limited], "limits of I/O", "in"),
        ([without_pods], "limits of I/O", "none could"),
    ],
)
def test_what_is_not_needed_or_is_there_passes(
    place: Place, arrange: Sequence[Arrange], check: str, words: str
) -> None:
    for step in arrange:
        step(place)
    found = place.of(check)
    assert {one.verdict for one in found} == {PASS}
    assert words in found[0].message


def test_the_kernel_says_whether_it_has_the_new_mount_calls() -> None:
    assert Kernel(old_calls=True).has_new_mount_calls() is False
    assert isinstance(Kernel().has_new_mount_calls(), bool)


# The command


@pytest.fixture
def file(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration for the node, on which `carver doctor` runs."""
    machine = Host(place.host.run, place.host.kernel, place.host.devices, place.host.disks)
    monkeypatch.setattr("agent.daemon.host.this_host", lambda _settings: machine)
    node = partial(Node, root=place.root)
    monkeypatch.setattr(preflight, "Node", node)
    path = tmp_path / "config.toml"
    path.write_text(
        'kubelet_dir = ["/kubelet"]\nregistration = "none"\n'
        '[[classes]]\nname = "plain"\ngroup = "group0"\n'
    )
    return str(path)


@pytest.mark.parametrize(
    ("arrange", "code", "words"),
    [
        ([], 0, ("volume group group0 is whole", "1 warn")),
        ([do("remove", "/usr/sbin/fsck.ext4")], 1, ("fail", "install e2fsprogs")),
        ([without_group], 0, ("volume group group0 is not on this node", "vgcreate")),
    ],
    ids=["healthy", "failure", "no group is no failure"],
)
def test_the_doctor_exits_with_1_only_after_a_failure(
    place: Place,
    file: str,
    capsys: pytest.CaptureFixture[str],
    arrange: Sequence[Arrange],
    code: int,
    words: tuple[str, ...],
) -> None:
    for step in arrange:
        step(place)
    assert cli.main(["doctor", "--config", file]) == code
    shown = " ".join(capsys.readouterr().out.split())
    assert all(one in shown for one in words), shown


def test_the_doctor_prints_json(
    place: Place, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--config", file, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["well"] is True
    assert {one["verdict"] for one in shown["checks"]} == {PASS, WARN}
    assert set(shown["checks"][0]) == {"check", "verdict", "message", "remedy"}


def test_the_doctor_suggests_to_start_the_service_before_its_file_exists(
    place: Place, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(file).write_text(f'kubelet_dir = ["/kubelet"]\nfile = "{tmp_path}/carver.img"\n')
    assert cli.main(["doctor", "--config", file]) == 1
    assert "start the service" in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def zeroing(place: Place) -> Callable[..., None]:
    """A group of two disks, of which the first is certain to read as zeroes after a discard."""
    group = place.host.new_group(10, 10)
    first, second = (one.name for one in place.host.lvm2.groups[group].disks)
    for path in (first, second):
        place.host.block.add(path, 10 << 22, major=8)
    place.host.block.get(second).doubts = {"sdb": "nothing tells"}
    place.host.block.get(second).stack = Stack(has_write_zeroes=False)

    def set_wipe(wipe: str) -> None:
        place.settings = configured.carver(place.root, group, wipe=wipe)

    return set_wipe


@pytest.mark.parametrize(
    ("wipe", "said", "warned"),
    [
        ("none", ["{0}, {1} not at all"], []),
        ("zero", ["{0} by write zeroes; {1} by zeroes written by the kernel"], []),
        (
            "discard",
            ["{0} by a discard; {1} by zeroes written by the kernel"],
            ["{1} are zeroed, not discarded: nothing tells"],
        ),
        ("discard-unguaranteed", ["{0}, {1} (nothing tells) by a discard"], []),
    ],
)
def test_how_deleted_data_are_erased_is_said_for_each_disk(
    place: Place, zeroing: Callable[..., None], wipe: str, said: list[str], warned: list[str]
) -> None:
    zeroing(wipe)
    disks = [one.name for one in place.host.lvm2.groups["group1"].disks]
    for verdict, texts in ((PASS, said), (WARN, warned)):
        found = [one for one in place.of("groups") if one.verdict == verdict]
        messages = [one.message for one in found if "deleted data" in one.message]
        assert [one.partition(" on ")[2] for one in messages] == [
            text.format(*disks) for text in texts
        ]


def test_the_number_of_disks_has_the_right_noun(place: Place) -> None:
    assert "is whole, with 1 disk; " in place.one("groups").message
    place.set_class(group=place.host.new_group(20, 20))
    assert "is whole, with 2 disks; " in place.one("groups").message

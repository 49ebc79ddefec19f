"""The preflight: what it says of a node that is well, and of everything that can be missing."""

import errno
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import configured
import pytest
from fakes.host import FakeHost
from fakes.kernel import FakeKernel

from agent.cli import main as cli
from agent.core.host import Host
from agent.core.settings import BackingFile, Config, GroupDefinition
from agent.core.volume_groups import VolumeGroups
from agent.operations import preflight
from agent.operations.preflight import FAIL, PASS, WARN, Finding, Node
from lvm import groups, lvm2, report
from lvm.caches import Cache
from lvm.layout import Layout
from mount.command import Result
from mount.kernel import Kernel

RELEASE = "6.1.0-test"
PROGRAMS = ("nsenter", "mkfs.ext4", "fsck.ext4", "mkfs.xfs", "mkfs.btrfs")
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

    def node(self) -> Node:
        lvm = self.host.lvm
        return Node(
            self.settings, self.host.kernel, self.host.run, lambda: report.read(lvm), self.root
        )

    def of(self, check: str) -> list[Finding]:
        return [one for one in preflight.everything(self.node()) if one.check == check]

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
    modules = "".join(f"kernel/drivers/md/{one}.ko: kernel/x.ko\n" for one in MODULES)
    made.file(f"/lib/modules/{RELEASE}/modules.dep", modules)
    for directory in ("plugins_registry", "pods", "plugins"):
        (made.root / "kubelet" / directory).mkdir(parents=True)
    for program in (*PROGRAMS, *THIN_PROGRAMS):
        made.program(program)
    return made


def with_class(place: Place, kind: str) -> None:
    shape = Layout(kind, mirrors=int(kind == "raid1"))
    one = replace(place.settings.classes[0], layout=shape)
    place.settings = replace(place.settings, classes=(one,))


def test_a_node_that_is_well_passes_everything_but_the_service_that_does_not_run(
    place: Place,
) -> None:
    found = preflight.everything(place.node())
    assert {one.check for one in found if one.verdict != PASS} == {"service"}
    others = {"thin tools", "encryption"}
    assert {one.check for one in found} | others == set(preflight.CHECKS)
    assert all(bool(one.remedy) == (one.verdict != PASS) for one in found)


def test_all_of_it_costs_two_commands_and_what_probe_asks_none(place: Place) -> None:
    preflight.cheap(place.node())
    assert place.host.commands == []
    preflight.everything(place.node())
    assert [words[1] for words in place.host.commands] == ["version", "fullreport"]


def without_privileges(place: Place) -> None:
    place.file("/proc/self/status", "CapEff:\t0000000000000000\n")


def without_status(place: Place) -> None:
    (place.root / "proc/self/status").unlink()


def private(place: Place) -> None:
    kernel = place.host.kernel
    assert isinstance(kernel, FakeKernel)
    kernel.mounts[0] = replace(kernel.mounts[0], propagation=())


def private_without_kubelet(place: Place) -> None:
    private(place)
    for one in ("pods", "plugins"):
        (place.root / "kubelet" / one).rmdir()


def without(path: str) -> Callable[[Place], None]:
    return lambda place: (place.root / path.lstrip("/")).unlink()


def without_libblkid(place: Place) -> None:
    place.host.kernel = KernelWithoutLibblkid(place.host.block)


class KernelWithoutLibblkid(FakeKernel):
    """On a node that has no such library."""

    def signatures(self, device: str) -> Mapping[str, str]:
        raise OSError(errno.ENOSYS, "libblkid: cannot open shared object file")


def without_kubelet(place: Place) -> None:
    (place.root / "kubelet/plugins_registry").rmdir()


def without_device(place: Place) -> None:
    place.settings = replace(place.settings, devices=("/dev/sdx",))


def on_a_file(place: Place) -> None:
    place.settings = replace(
        place.settings, definitions=(GroupDefinition("data", file=BackingFile(Path("/x"))),)
    )
    without("/dev/loop-control")(place)


def in_a_container(place: Place) -> None:
    kernel = place.host.kernel
    assert isinstance(kernel, FakeKernel)
    kernel.mounts[1] = replace(kernel.mounts[1], fs_type="tmpfs")


def old_lvm2(place: Place) -> None:
    place.host.lvm2.version = "2.02.187(2) (2020-03-24)"


def odd_lvm2(place: Place) -> None:
    place.host.lvm2.version = "unknown"


def sick_lvm2(place: Place) -> None:
    place.host.intercept = lambda words: Result(3, "", "no") if words[0] == "lvm" else None


def lvm2_on_a_host_that_cannot_be_entered(place: Place) -> None:
    place.settings = replace(place.settings, lvm="host")
    without("/usr/sbin/nsenter")(place)


def without_group(place: Place) -> None:
    place.host.lvm2.groups.clear()


def without_disk(place: Place) -> None:
    place.host.lvm2.groups["group0"].disks[0].missing = True


def old_kernel(place: Place) -> None:
    place.host.kernel = OldKernel(place.host.block)


class OldKernel(FakeKernel):
    """Linux before 5.12."""

    def has_new_mount_calls(self) -> bool:
        return False


def listed(place: Place, group: str, *devices: str) -> None:
    place.settings = replace(place.settings, definitions=(GroupDefinition(group, devices),))


def unmade_group(place: Place) -> None:
    listed(place, "group0", "/dev/sdx")
    without_group(place)


def other_group(place: Place) -> None:
    listed(place, "group0", place.host.new_device(1 << 30))


def new_disk(place: Place) -> None:
    first, second = (place.host.new_device(1 << 30) for _ in range(2))
    groups.create(place.host.lvm, "made", [first], {}, (1 << 20) - groups.LABEL_BYTES)
    classes = (replace(place.settings.classes[0], group="made"),)
    place.settings = replace(place.settings, classes=classes)
    listed(place, "made", first, second)


def no_raid(place: Place) -> None:
    with_class(place, "raid1")
    place.file(f"/lib/modules/{RELEASE}/modules.dep", "kernel/drivers/md/dm-snapshot.ko:\n")


def no_cache(place: Place) -> None:
    one = replace(place.settings.classes[0], cache=Cache())
    place.settings = replace(place.settings, classes=(one,))


def no_snapshots(place: Place) -> None:
    place.file(f"/lib/modules/{RELEASE}/modules.dep", "")


def no_list_of_modules(place: Place) -> None:
    with_class(place, "raid1")
    without(f"/lib/modules/{RELEASE}/modules.dep")(place)


def thin_without_its_tools(place: Place) -> None:
    with_class(place, "thin")
    without("/usr/sbin/thin_check")(place)


def encrypted(place: Place) -> None:
    one = replace(place.settings.classes[0], encryption="luks2", key_file=Path("/etc/key"))
    place.settings = replace(place.settings, classes=(one,))
    place.program("cryptsetup")
    place.file("/etc/key")
    place.file("/sys/module/dm_crypt")
    place.file("/proc/cpuinfo", "flags\t\t: fpu vme aes\n")


def encrypted_without(path: str) -> Callable[[Place], None]:
    def arrange(place: Place) -> None:
        encrypted(place)
        without(path)(place)

    return arrange


def without_aes(place: Place) -> None:
    encrypted(place)
    place.file("/proc/cpuinfo", "flags\t\t: fpu vme\n")


LACKS: list[tuple[Callable[[Place], None], str, str, str]] = [
    (without_privileges, "privileges", FAIL, "CAP_SYS_ADMIN"),
    (without_status, "privileges", WARN, "cannot be looked at"),
    (private, "kubelet directory", FAIL, "not shared"),
    (private_without_kubelet, "kubelet directory", WARN, "not shared"),
    (without_kubelet, "registration", WARN, "plugins_registry does not exist"),
    (without("/dev/mapper/control"), "device-mapper", FAIL, "does not answer"),
    (without_device, "devices", FAIL, "/dev/sdx"),
    (without("/dev/loop-control"), "devices", WARN, "no loop devices"),
    (on_a_file, "devices", FAIL, "no loop devices"),
    (in_a_container, "devices", WARN, "/dev is tmpfs"),
    (old_lvm2, "lvm2", FAIL, "2.02.187, too old"),
    (odd_lvm2, "lvm2", FAIL, "unknown"),
    (sick_lvm2, "lvm2", FAIL, "exit code 3"),
    (lvm2_on_a_host_that_cannot_be_entered, "lvm2", FAIL, "nsenter"),
    (without_group, "groups", WARN, "group0 is not on this node"),
    (unmade_group, "groups", WARN, "which Carver makes of /dev/sdx"),
    (other_group, "groups", FAIL, "which Carver did not make"),
    (new_disk, "groups", WARN, "is not one of its disks"),
    (without_disk, "groups", WARN, "misses 1 of its disks"),
    (sick_lvm2, "groups", FAIL, "exit code 3"),
    (old_kernel, "kernel", WARN, "5.12"),
    (no_raid, "modules", FAIL, "no dm-raid, which class plain needs"),
    (no_cache, "modules", FAIL, "no dm-cache, which class plain needs"),
    (no_snapshots, "modules", WARN, "no dm-snapshot, which snapshots need"),
    (no_list_of_modules, "modules", WARN, "dm-raid, for class plain, is not loaded"),
    (without_libblkid, "file systems", FAIL, "nothing is ever formatted"),
    (without("/usr/sbin/fsck.ext4"), "file systems", FAIL, "fsck.ext4"),
    (without("/usr/sbin/mkfs.xfs"), "file systems", WARN, "mkfs.xfs"),
    (thin_without_its_tools, "thin tools", FAIL, "thin_check"),
    (encrypted_without("/usr/sbin/cryptsetup"), "encryption", FAIL, "cryptsetup is missing"),
    (encrypted_without("/sys/module/dm_crypt"), "encryption", FAIL, "no dm-crypt"),
    (encrypted_without("/etc/key"), "encryption", WARN, "/etc/key is not there"),
    (without_aes, "encryption", WARN, "no instructions for AES"),
]


@pytest.mark.parametrize(
    ("arrange", "check", "verdict", "words"),
    LACKS,
    ids=[f"{check}, {words}" for _, check, _, words in LACKS],
)
def test_what_is_missing_is_told_with_its_remedy(
    place: Place, arrange: Callable[[Place], None], check: str, verdict: str, words: str
) -> None:
    arrange(place)
    told = [one for one in place.of(check) if one.verdict != PASS]
    assert told
    assert {one.verdict for one in told} == {verdict}
    assert words in told[0].message
    assert told[0].remedy


def test_a_group_that_is_missing_because_of_the_devices_file_is_told_so(place: Place) -> None:
    place.file("/etc/lvm/devices/system.devices")
    place.host.lvm2.devices_file = set()
    place.host.lvm = replace(place.host.lvm, settings=lvm2.with_devices_file(place.root))
    found = place.one("groups")
    assert found.verdict == WARN
    assert "that the node's devices file does not list" in found.message
    assert "vgimportdevices group0" in found.remedy
    # One that is nowhere is not the file's fault.
    place.host.lvm2.groups.clear()
    assert "is not on this node" in place.one("groups").message


@pytest.mark.parametrize(
    ("files", "settings"),
    [
        ({}, ()),
        ({"lvm.conf": "devices {\n\tuse_devicesfile = 1\n}\n"}, ()),
        ({"devices/system.devices": "", "lvm.conf": "# use_devicesfile = 1\n"}, "heeded"),
        ({"devices/system.devices": ""}, "heeded"),
        ({"devices/system.devices": "", "lvm.conf": "devices {\n\tuse_devicesfile = 0\n}\n"}, ()),
        ({"devices/system.devices": "", "lvmlocal.conf": "devices/use_devicesfile=0\n"}, ()),
    ],
)
def test_a_devices_file_of_the_node_s_counts_unless_its_lvm_conf_says_otherwise(
    tmp_path: Path, files: dict[str, str], settings: str | tuple[str, ...]
) -> None:
    for name, text in files.items():
        path = tmp_path / "etc/lvm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    wanted = ("devices/use_devicesfile=1",) if settings == "heeded" else ()
    assert lvm2.with_devices_file(tmp_path) == wanted


def test_a_disk_that_the_devices_file_lacks_is_told_of_a_group_that_misses_it(place: Place) -> None:
    group = place.host.new_group(10, 10)
    place.settings = configured.carver(place.root, group)
    place.file("/etc/lvm/devices/system.devices")
    place.host.lvm2.devices_file = {place.host.lvm2.groups[group].disks[0].name}
    place.host.lvm = replace(place.host.lvm, settings=lvm2.with_devices_file(place.root))
    found = place.one("groups")
    assert found.verdict == WARN
    assert "misses 1 of its disks, some of which the node's devices file" in found.message
    assert f"vgimportdevices {group}" in found.remedy
    # One that is away is not the file's fault.
    place.host.lose_disk(group, 1)
    assert "attach them again" in place.one("groups").remedy


def test_a_devices_file_is_found_by_the_name_that_it_has_there(tmp_path: Path) -> None:
    own = tmp_path / "etc/lvm"
    (own / "devices").mkdir(parents=True)
    (own / "devices/own.devices").write_text(f"PVID={'x' * 32}\n")
    assert lvm2.listed_disks(tmp_path) is None
    (own / "lvm.conf").write_text('devices {\n\t# devicesfile = "none.devices"\n}\n')
    assert lvm2.listed_disks(tmp_path) is None
    (own / "lvmlocal.conf").write_text('devices/devicesfile = "own.devices"\n')
    assert lvm2.listed_disks(tmp_path) == frozenset({"x" * 32})


UUID = "abcdef-0000-0000-0000-0000-0000-000000"


@pytest.mark.parametrize(
    ("switch", "file", "listed"),
    [
        ("", None, None),
        ("", "", set()),
        ("", f"# PVID={'x' * 32}\nIDTYPE=sys_wwid PVID={UUID.replace('-', '')} PART=1\n", {UUID}),
        ("devices/use_devicesfile=1\n", "", set()),
        ("devices/use_devicesfile=0\n", "", None),
    ],
)
def test_the_disks_in_a_devices_file_are_told_where_it_counts(
    tmp_path: Path, switch: str, file: str | None, listed: set[str] | None
) -> None:
    (tmp_path / "etc/lvm/devices").mkdir(parents=True)
    (tmp_path / "etc/lvm/lvm.conf").write_text(switch)
    if file is not None:
        (tmp_path / lvm2.DEVICES_FILE).write_text(file)
    found = lvm2.listed_disks(tmp_path)
    assert found == (None if listed is None else {one.replace("-", "") for one in listed})


def test_an_engine_uses_no_disk_outside_the_devices_file(place: Place) -> None:
    fake = place.host
    [disk] = fake.lvm2.groups["group0"].disks
    file = place.root / lvm2.DEVICES_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    node = replace(fake.lvm, root=place.root)
    known = VolumeGroups(node, fake.disks, fake.devices, ["group0"])
    for listed, state in (("", "absent"), (f"PVID={disk.uuid.replace('-', '')}\n", "ready")):
        file.write_text(listed)
        for one in known:
            one.metadata.is_outdated = True
            one.state()
            assert one.status == state


def test_a_group_outside_the_devices_file_is_not_used(place: Place) -> None:
    place.file("/etc/lvm/devices/system.devices")
    [disk] = place.host.lvm2.groups["group0"].disks
    heeding = replace(place.host.lvm, settings=lvm2.with_devices_file(place.root))
    place.host.lvm2.devices_file = set()
    assert report.read(heeding).groups == {}
    place.host.lvm2.devices_file = {disk.name}
    assert set(report.read(heeding).groups) == {"group0"}


def test_without_udev_lvm2_does_not_wait_for_it(place: Place) -> None:
    without("/run/udev/control")(place)
    assert place.one("udev").verdict == PASS
    assert "without it" in place.one("udev").message


def test_who_leaves_registration_to_others_needs_no_directory(place: Place) -> None:
    without_kubelet(place)
    place.settings = replace(place.settings, registration="none")
    assert place.one("registration").verdict == PASS


def test_the_tools_of_thin_pools_are_asked_for_where_a_class_is_thin(place: Place) -> None:
    with_class(place, "thin")
    assert place.one("thin tools").verdict == PASS
    assert {one.verdict for one in place.of("modules")} == {PASS}


def test_a_node_that_can_encrypt_passes(place: Place) -> None:
    encrypted(place)
    assert {one.verdict for one in place.of("encryption")} == {PASS}


def test_the_kernel_s_own_answer_about_its_mount_calls() -> None:
    assert Kernel(old_calls=True).has_new_mount_calls() is False
    assert isinstance(Kernel().has_new_mount_calls(), bool)


# The command


@pytest.fixture
def file(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration for the node, which `carver doctor` takes for this one."""
    machine = Host(place.host.run, place.host.kernel, place.host.devices, place.host.disks)
    monkeypatch.setattr("agent.core.host.this_host", lambda _settings: machine)
    node = partial(Node, root=place.root)
    monkeypatch.setattr(preflight, "Node", node)
    path = tmp_path / "config.toml"
    path.write_text(
        'kubelet_dir = ["/kubelet"]\nregistration = "none"\n'
        '[[classes]]\nname = "plain"\ngroup = "group0"\n'
    )
    return str(path)


def test_the_doctor_ends_with_0_where_nothing_fails(
    place: Place, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--config", file]) == 0
    told = capsys.readouterr().out
    assert "volume group group0 is whole" in told
    assert "1 warn" in told


def test_the_doctor_ends_with_1_where_a_check_fails(
    place: Place, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    without("/usr/sbin/fsck.ext4")(place)
    assert cli.main(["doctor", "--config", file]) == 1
    told = capsys.readouterr().out
    assert "fail" in told
    assert "install e2fsprogs" in told


def test_a_node_without_any_of_the_groups_is_no_failure_and_says_what_it_lacks(
    place: Place, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    without_group(place)
    assert cli.main(["doctor", "--config", file]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "volume group group0 is not on this node" in told
    assert "vgcreate" in told


def test_the_doctor_speaks_json(
    place: Place, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--config", file, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["well"] is True
    assert {one["verdict"] for one in told["checks"]} == {PASS, WARN}
    assert set(told["checks"][0]) == {"check", "verdict", "message", "remedy"}


def test_a_group_on_a_file_that_is_not_there_yet_is_no_crash(
    place: Place, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(file).write_text(f'kubelet_dir = ["/kubelet"]\nfile = "{tmp_path}/carver.img"\n')
    assert cli.main(["doctor", "--config", file]) == 1
    assert "start the service" in " ".join(capsys.readouterr().out.split())

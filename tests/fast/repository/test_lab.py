"""The lab's machines: which are kept, made anew and removed; its locks, its steps, its files."""

import fcntl
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import expect
import psutil
import pytest

from vagrant import box, files, lab, lab_host, machines, machines_in_user_mode, steps
from vagrant.guest import Guest, guest_of
from vagrant.machines import Machines
from vagrant.machines_in_user_mode import UserModeMachines
from vagrant.power import GuestError
from vagrant.steps import Step, StepError
from vagrant.user_mode import InUserMode

BOX = "carver-lab-bookworm-new_vagrant_box_image_0_box.img"
OLD_BOX = "carver-lab-bookworm-old_vagrant_box_image_0_box.img"


class Libvirt:
    """What virsh answers and does: machines by name, volumes with what they are built on."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.volumes: dict[str, str] = {}
        self.answers, self.keeps = True, False

    def add(self, name: str, state: str = "running") -> None:
        self.states[name] = state
        self.volumes[f"{name}.img"] = BOX
        self.volumes.setdefault(BOX, "")

    def virsh(self, *words: str) -> subprocess.CompletedProcess[str]:
        if not self.answers:
            return subprocess.CompletedProcess(words, 1, "", "cannot connect")
        return subprocess.CompletedProcess(words, 0, self.said(*words), "")

    def said(self, verb: str, *words: str) -> str:
        if verb == "list":
            return "".join(f"{name}\n" for name in self.states)
        if verb == "domuuid":
            return f"uuid of {words[0]}"
        if verb == "domstate":
            return self.states.get(words[0], "")
        if verb == "undefine" and not self.keeps:
            self.states.pop(words[0], None)
            self.volumes.pop(f"{words[0]}.img", None)
        if verb == "vol-list":
            return "".join(f" {name}  /images/{name}\n" for name in self.volumes)
        if verb == "vol-dumpxml":
            name = words[-1]
            return f"<path>/images/{name}</path><path>/images/{self.volumes[name]}</path>"
        if verb == "vol-delete":
            self.volumes.pop(words[-1], None)
        return ""


@pytest.fixture
def libvirt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Libvirt:
    """A libvirt without machines, in no namespace; the lab's folder is a temporary one."""
    made = Libvirt()
    monkeypatch.setattr(lab_host, "LAB", tmp_path)
    monkeypatch.setattr(steps, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(lab_host, "virsh", made.virsh)
    monkeypatch.setattr(lab_host, "has_network", lambda: False)
    monkeypatch.setattr(lab_host, "remove_tree", _remove_tree)
    monkeypatch.setattr(box, "stock", lambda: None)
    monkeypatch.setattr(box, "name", lambda: "carver-lab-bookworm-new")
    monkeypatch.setattr(Machines, "_publish_box", lambda *_: None)
    monkeypatch.setattr(Guest, "disconnect", lambda self: None)
    monkeypatch.setattr(Guest, "address", lambda self: "192.0.2.1")
    monkeypatch.setattr(Guest, "revived", lambda self: nullcontext())
    monkeypatch.setattr(Guest, "write_ssh_config", lambda self, address: None)
    monkeypatch.setattr(Guest, "wait_for_boot", lambda self: None)

    def vagrant(self: Machines, step: Step, verb: str, *words: str) -> None:
        if verb != "up":
            raise StepError(["vagrant", verb], "it knows nothing", step.log)
        described = [one["name"] for one in json.loads(self._settings.read_text())["machines"]]
        for name in [one for one in words if not one.startswith("-")]:
            assert name in described
            made.add(name)
            known = self._record / "machines" / name / "libvirt" / "id"
            known.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(f"uuid of {name}")

    monkeypatch.setattr(Machines, "_vagrant", vagrant)
    return made


def _remove_tree(path: Path) -> None:
    for one in sorted(path.rglob("*"), reverse=True):
        one.rmdir() if one.is_dir() else one.unlink()
    with suppress(FileNotFoundError):
        path.rmdir()


def nodes(number: int, memory_mib: int = 3072) -> Machines:
    guests = [guest_of(f"carver-node-{one}") for one in range(1, number + 1)]
    return Machines("cluster-machines", guests, 2, memory_mib, family="carver-node-")


# Machines


def test_machines_that_are_as_described_are_left_as_they_are(
    libvirt: Libvirt, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes(3).ensure()
    monkeypatch.setattr(Machines, "_vagrant", None)
    nodes(3).ensure()
    assert nodes(3).fit() == ["carver-node-1", "carver-node-2", "carver-node-3"]


def test_a_machine_that_vagrant_does_not_know_is_removed_and_no_other(libvirt: Libvirt) -> None:
    nodes(3).ensure()
    _remove_tree(lab_host.LAB / "cluster-machines" / "machines" / "carver-node-2")
    libvirt.states["carver-node-2"] = "shut off"
    assert nodes(3).fit() == ["carver-node-1", "carver-node-3"]
    assert [*libvirt.states] == ["carver-node-1", "carver-node-3"]


@pytest.mark.parametrize("state", ["running", "paused", ""])
def test_a_machine_of_another_tree_is_refused_unless_it_is_switched_off(
    libvirt: Libvirt, state: str
) -> None:
    libvirt.add("carver-node-1", state)
    for act in (
        nodes(3).ensure,
        lambda: nodes(3).down("it"),
        lambda: nodes(0).add(guest_of("carver-node-1")),
    ):
        with pytest.raises(GuestError, match="another tree"):
            act()
    assert [*libvirt.states] == ["carver-node-1"]


def test_machines_beyond_those_described_are_removed(libvirt: Libvirt) -> None:
    nodes(5).ensure()
    libvirt.add("carver-lab")
    nodes(3).ensure()
    assert sorted(libvirt.states) == ["carver-lab", *(f"carver-node-{one}" for one in (1, 2, 3))]
    described = json.loads((lab_host.LAB / "cluster-machines.json").read_text())["machines"]
    assert len(described) == 3


def test_other_settings_make_every_machine_anew_unless_they_are_not_known(libvirt: Libvirt) -> None:
    nodes(2).ensure()
    files.write(lab_host.LAB / "cluster-machines.json", '{"box": "old", "mach')
    assert nodes(2, memory_mib=4096).fit() == ["carver-node-1", "carver-node-2"]
    nodes(2).ensure()
    assert nodes(2, memory_mib=4096).fit() == []
    assert not libvirt.states


def test_a_machine_is_added_and_removed_without_the_others(libvirt: Libvirt) -> None:
    made = nodes(2)
    made.ensure()
    libvirt.states["carver-node-1"] = "shut off"
    made.add(guest_of("carver-node-3"))
    assert libvirt.states["carver-node-1"] == "shut off"
    assert "carver-node-3" in libvirt.states
    made.drop("carver-node-3")
    assert [*libvirt.states] == ["carver-node-1", "carver-node-2"]
    assert [one.name for one in made.guests] == ["carver-node-1", "carver-node-2"]


def test_an_added_machine_is_like_the_others_whatever_the_environment_says(
    libvirt: Libvirt, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes(2, memory_mib=4096).ensure()
    nodes(2).add(guest_of("carver-node-3"))
    assert nodes(3, memory_mib=4096).fit() == [f"carver-node-{one}" for one in (1, 2, 3)]
    monkeypatch.setattr(box, "name", lambda: "carver-lab-bookworm-newer")
    with pytest.raises(GuestError, match="another box"):
        nodes(3).add(guest_of("carver-node-4"))


def test_a_machine_that_libvirt_does_not_remove_is_an_error(libvirt: Libvirt) -> None:
    nodes(1).ensure()
    libvirt.keeps = True
    with pytest.raises(GuestError, match="does not remove machine carver-node-1"):
        nodes(1).down("it")


def test_down_removes_machines_that_are_not_described(libvirt: Libvirt) -> None:
    nodes(3).ensure()
    nodes(0).down("it")
    assert not libvirt.states
    assert not (lab_host.LAB / "cluster-machines").exists()


def test_down_starts_libvirt_where_machines_may_be_left_and_fails_where_it_cannot(
    libvirt: Libvirt, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes(2).ensure()
    libvirt.answers = False

    def start(step: Step) -> None:
        raise StepError(["libvirtd"], "does not answer", step.log)

    monkeypatch.setattr(lab_host, "start_libvirt", start)
    with pytest.raises(StepError, match="does not answer"):
        nodes(2).down("it")
    assert (lab_host.LAB / "cluster-machines").exists()
    monkeypatch.setattr(lab_host, "start_libvirt", lambda step: setattr(libvirt, "answers", True))
    nodes(2).down("it")
    assert not libvirt.states


def test_down_starts_nothing_where_nothing_is_known(
    libvirt: Libvirt, monkeypatch: pytest.MonkeyPatch
) -> None:
    libvirt.answers = False
    monkeypatch.setattr(lab_host, "start_libvirt", None)
    nodes(2).down("it")


@pytest.mark.parametrize("answers", [True, False])
def test_libvirt_is_not_stopped_while_it_may_have_a_machine(
    libvirt: Libvirt, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    libvirt.add("carver-lab")
    libvirt.answers = answers
    monkeypatch.setattr(lab_host, "has_network", lambda: True)
    monkeypatch.setattr(lab_host, "_namespace_pids", lambda: ["17"])
    monkeypatch.setattr(lab_host, "_program", lambda pid: "libvirtd")
    with nullcontext() if answers else pytest.raises(lab_host.HostError, match="cannot connect"):
        lab_host.stop_libvirt()


# Boxes


def test_only_copies_of_boxes_that_no_disk_is_built_on_are_removed(libvirt: Libvirt) -> None:
    libvirt.add("carver-lab")
    libvirt.volumes |= {
        OLD_BOX: "",
        "other_vagrant_box_image_0_box.img": "",
        "carver-lab-x.img": "",
    }
    lab_host.remove_box_images()
    assert {"carver-lab.img", BOX, "carver-lab-x.img"} < {*libvirt.volumes}
    assert "other_vagrant_box_image_0_box.img" in libvirt.volumes
    assert OLD_BOX not in libvirt.volumes


def test_a_copy_of_a_box_that_was_cut_short_is_not_used(
    libvirt: Libvirt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(self: Machines, step: Step, verb: str, *words: str) -> None:
        assert BOX not in libvirt.volumes
        libvirt.volumes |= {BOX: "", "carver-node-1.img": ""}
        raise KeyboardInterrupt

    monkeypatch.setattr(Machines, "_vagrant", cut_short)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            nodes(1).ensure()


# Locks


@pytest.mark.usefixtures("libvirt")
def test_a_lock_is_one_program_s_which_may_ask_for_it_again() -> None:
    with machines.locked("cluster"), machines.locked("cluster"):
        assert _is_locked(lab_host.LAB / "cluster.lock")
        with machines.locked("libvirt"):
            pass
        assert _is_locked(lab_host.LAB / "cluster.lock")
    assert not _is_locked(lab_host.LAB / "cluster.lock")


def _is_locked(path: Path) -> bool:
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_libvirt_is_locked_while_machines_boot_and_while_it_is_stopped(
    libvirt: Libvirt, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    lock = lab_host.LAB / "libvirt.lock"
    monkeypatch.setattr(Guest, "wait_for_boot", lambda self: seen.append(_is_locked(lock)))
    monkeypatch.setattr(lab_host, "stop_libvirt", lambda: seen.append(_is_locked(lock)))
    nodes(1).ensure()
    nodes(1).down("it")
    assert seen == [True, True]


# Steps


class Interrupted:
    """A command that is interrupted so many times while it is waited for."""

    def __init__(self, times: int) -> None:
        self.times, self.returncode, self.killed = times, 1, False

    def wait(self, timeout: float | None = None) -> int:
        if self.times > 0 and not self.killed:
            self.times -= 1
            raise KeyboardInterrupt
        return self.returncode

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(("times", "is_killed"), [(1, False), (2, True)])
def test_a_step_s_command_is_waited_for_upon_ctrl_c_and_killed_upon_a_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, times: int, is_killed: bool
) -> None:
    command = Interrupted(times)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: command)
    with pytest.raises(KeyboardInterrupt):
        Step(tmp_path / "log").run("vagrant", "up")
    assert (command.times, command.killed) == (0, is_killed)


@pytest.mark.starts_programs
def test_a_step_s_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"no end after 0.1 s"):
        Step(tmp_path / "log").run("sleep", "600", timeout_seconds=0.1)


@pytest.mark.usefixtures("libvirt")
def test_a_log_that_root_left_is_replaced() -> None:
    steps.LOGS.mkdir()
    left = steps.LOGS / "up.log"
    left.write_text("root's")
    before = left.stat().st_ino
    with left.open(), steps.step("boot", "up") as step:
        assert step.log.read_text() == ""
        assert step.log.stat().st_ino != before


# Files and settings


def test_a_file_is_written_whole_or_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    files.write(path, '{"nodes": 3}', mode=0o600)

    def full(handle: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        files.write(path, '{"nodes": 4}')
    assert files.read_json(path) == {"nodes": 3}
    assert [*tmp_path.iterdir()] == [path]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["", '{"nodes": ', "[]", "3"])
def test_a_damaged_file_is_read_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "settings.json"
    assert files.read_json(path) is None
    path.write_text(content)
    assert files.read_json(path) is None


def test_what_root_writes_is_the_owner_s_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "chown", lambda path, user, group: given.append((user, group)))
    files.write(tmp_path / "file", "content")
    owner = tmp_path.stat()
    assert given == [(owner.st_uid, owner.st_gid)]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    files.write(tmp_path / "file", "content")
    assert len(given) == 1


@pytest.mark.parametrize("text", ["0", "-1", "three", "1.5", "²"])
def test_a_number_that_cannot_be_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("CARVER_CLUSTER_NODES", text)
    with pytest.raises(
        lab_host.HostError, match=f"CARVER_CLUSTER_NODES is '{text}': .* above zero"
    ):
        machines.setting("CARVER_CLUSTER_NODES", 3)


def test_the_box_of_each_release_is_kept_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(box, "KEY", tmp_path / "key")
    (tmp_path / "key.pub").write_text("a key")
    places = set()
    for release in box.RELEASES:
        monkeypatch.setenv("CARVER_LAB_RELEASE", release)
        places.add((box.folder(), box.wheels(), box.name()))
    assert len(places) == len({folder for folder, _, _ in places}) == len(box.RELEASES)


def test_a_release_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARVER_LAB_RELEASE", "buster")
    with pytest.raises(box.BoxError, match=r"CARVER_LAB_RELEASE is 'buster'; known are bookworm"):
        box.name()


@pytest.mark.parametrize(
    ("name", "driver", "chosen", "expected"),
    [
        ("carver-node-1", "qemu", "", True),
        ("carver-node-1", "kvm", "", False),
        ("carver-node-1", "qemu", "libvirt", False),
        ("carver-node-1", "kvm", "user-mode", True),
        ("carver-lab", "qemu", "", False),
        ("carver-lab", "qemu", "user-mode", True),
    ],
)
def test_a_cluster_s_machines_are_in_user_mode_where_nothing_virtualizes(
    monkeypatch: pytest.MonkeyPatch, name: str, driver: str, chosen: str, expected: bool
) -> None:
    monkeypatch.setattr(lab_host, "driver", lambda: driver)
    of = "CARVER_LAB_POWER" if name == "carver-lab" else "CARVER_CLUSTER_POWER"
    monkeypatch.setenv(of, chosen)
    assert lab_host.in_user_mode(name) is expected
    monkeypatch.setenv(of, "qemu")
    with pytest.raises(lab_host.HostError, match=f"{of} is 'qemu': it is libvirt or user-mode"):
        lab_host.in_user_mode(name)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[InUserMode]:
    """A machine in user mode whose kernel is a shell that sleeps."""
    monkeypatch.setattr(lab_host, "LAB", tmp_path)
    power = InUserMode("carver-node-7")
    ids = tmp_path / "user-mode" / "ids" / "carver-node-7"
    ids.mkdir(parents=True)
    power.folder.mkdir()
    words = ["sh", "-c", "sleep 100 & wait", "sh", "umid=carver-node-7"]
    with subprocess.Popen(words, start_new_session=True) as process:
        (ids / "pid").write_text(f"{process.pid}\n")
        # Whoever waits for an ended child takes it off the process table, as init does.
        waiter = threading.Thread(target=process.wait)
        waiter.start()
        yield power
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        waiter.join()


def _alive(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if one.status() != psutil.STATUS_ZOMBIE and os.getpgid(one.pid) == group:
                found.append(one.pid)
    return found


@pytest.mark.starts_programs
def test_a_machine_in_user_mode_is_paused_goes_on_and_is_cut(kernel: InUserMode) -> None:
    assert kernel.state() == "running"
    kernel.pause()
    assert kernel.state() == "paused"
    kernel.resume()
    assert kernel.state() == "running"
    pid = kernel._running()
    kernel.cut()
    assert kernel.state() == "shut off"
    # Also what the kernel had started, which it does not take with it: each ends on its own.
    expect.soon(lambda: not _alive(pid))
    kernel.cut()
    with pytest.raises(GuestError, match="carver-node-7 does not run"):
        kernel.pause()
    kernel.remove()
    assert kernel.state() == ""


@pytest.mark.starts_programs
def test_a_process_that_has_an_ended_machine_s_id_is_not_taken_for_it(kernel: InUserMode) -> None:
    with subprocess.Popen(["sleep", "100"]) as other:
        (lab_host.LAB / "user-mode" / "ids" / "carver-node-7" / "pid").write_text(str(other.pid))
        assert kernel.state() == "shut off"
        kernel.cut()
        assert other.poll() is None
        other.kill()


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a lab without machines, which has no network either."""
    monkeypatch.setattr(lab_host, "LAB", tmp_path)
    monkeypatch.setattr(steps, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(lab_host, "has_network", lambda: False)
    monkeypatch.setattr(lab_host, "remove_tree", _remove_tree)
    monkeypatch.setattr(Guest, "disconnect", lambda self: None)
    return tmp_path


def test_machines_in_user_mode_that_are_of_another_box_or_not_described_are_made_anew(
    monkeypatch: pytest.MonkeyPatch, empty: Path
) -> None:
    monkeypatch.setattr(machines_in_user_mode, "_base", lambda: Path("/box.raw"))
    for name, base in (
        *(("carver-node-1", "/box.raw"), ("carver-node-2", "/older.raw")),
        *(("carver-node-3", "/box.raw"), ("carver-lab", "/older.raw")),
    ):
        (empty / "user-mode" / name).mkdir(parents=True)
        made_of = json.dumps({"base": base, "memory": 3072})
        (empty / "user-mode" / name / "made-of.json").write_text(made_of)
    guests = [guest_of("carver-node-1"), guest_of("carver-node-2")]
    made = UserModeMachines(guests, 3072, "carver-node-")
    assert made.there() == ["carver-node-1", "carver-node-2", "carver-node-3"]
    assert made.fit() == ["carver-node-1"]
    assert made.there() == ["carver-node-1"]
    assert UserModeMachines(guests, 4096, "carver-node-").fit() == []
    assert (empty / "user-mode" / "carver-lab").exists()


@pytest.mark.parametrize("power", ["libvirt", "user-mode"])
def test_a_machine_that_was_made_by_another_power_is_removed(
    monkeypatch: pytest.MonkeyPatch, empty: Path, power: str
) -> None:
    monkeypatch.setenv("CARVER_LAB_POWER", power)
    machine = empty / "user-mode" / "carver-lab"
    machine.mkdir(parents=True)
    asked: list[str] = []
    monkeypatch.setattr(Machines, "down", lambda self, what: asked.append(what))
    (empty / "machine.json").write_text("{}")
    lab._remove_that_of_the_other_power()
    assert machine.exists() is (power == "user-mode")
    assert asked == (["the machine of another power"] if power == "user-mode" else [])


def test_a_base_stays_while_a_machine_s_disk_is_built_on_it(
    monkeypatch: pytest.MonkeyPatch, empty: Path
) -> None:
    needed, unused = empty / "carver-lab-old.raw", empty / "carver-lab-older.raw"
    for base in (needed, unused):
        base.touch()
    machine = empty / "user-mode" / "carver-lab"
    machine.mkdir(parents=True)
    (machine / "made-of.json").write_text(json.dumps({"base": str(needed), "memory": 2048}))
    monkeypatch.setattr(machines_in_user_mode, "_base", lambda: empty / "carver-lab-new.raw")
    monkeypatch.setattr(machines_in_user_mode, "_kernel", lambda: "6.1.0")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    making = Step(empty / "log")
    # The converter would have made it.
    monkeypatch.setattr(Step, "run", lambda *_: (empty / "carver-lab-new.part").touch())
    machines_in_user_mode._make_base(making)
    assert needed.exists()
    assert not unused.exists()
    assert (empty / "carver-lab-new.raw").exists()

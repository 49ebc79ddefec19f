"""The lab's machines: which are kept, made anew and removed; its locks, its steps, its files."""

import os
import subprocess
from pathlib import Path

import pytest

from vagrant import box, files, guest, host
from vagrant.machines import Machines
from vagrant.progress import Step, StepError

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


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The machines that were removed, of a libvirt that has one: `there`, not running."""
    gone: list[str] = []
    monkeypatch.setattr(host, "LAB", tmp_path)
    monkeypatch.setattr(host, "domain_uuid", lambda name: "there")
    monkeypatch.setattr(host, "domain_runs", lambda name: False)
    monkeypatch.setattr(Machines, "remove", lambda self, step: gone.append("there"))
    return gone


def vagrant_knows(uuid: str) -> None:
    known = host.LAB / "machine" / "machines" / host.NAME / "libvirt" / "id"
    known.parent.mkdir(parents=True)
    known.write_text(uuid)


def remove_what_vagrant_lost() -> None:
    Machines("machine", [guest.LAB_GUEST], cpus=2, memory_mib=2048)._remove_if_lost(guest.LAB_GUEST)


def test_a_machine_that_vagrant_made_is_kept(removed: list[str]) -> None:
    vagrant_knows("there")
    remove_what_vagrant_lost()
    assert removed == []


@pytest.mark.parametrize("known", ["another", None])
def test_a_machine_that_vagrant_does_not_know_is_removed(
    removed: list[str], known: str | None
) -> None:
    if known is not None:
        vagrant_knows(known)
    remove_what_vagrant_lost()
    assert removed == ["there"]


def test_a_running_machine_of_another_tree_is_refused(
    removed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "domain_runs", lambda name: True)
    with pytest.raises(guest.GuestError, match="another tree"):
        remove_what_vagrant_lost()
    assert removed == []


def test_no_machine_is_nothing_to_remove(
    removed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "domain_uuid", lambda name: "")
    remove_what_vagrant_lost()
    assert removed == []

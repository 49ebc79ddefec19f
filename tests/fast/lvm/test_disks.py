"""Disks are found and read side by side: one that does not answer delays no other."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.images import DASHED, UUIDS, Area, Image, metadata
from fakes.sysfs import GROUP_OF_VOLUMES, Sysfs

from lvm import labels
from lvm.candidate_devices import Excluded, ExclusionReason
from lvm.disk_reader import DiskErrors, Disks, Unanswered, Unreadable
from lvm.labels import Damaged, PhysicalLabel


class Machine:
    """Disks as files in a directory for /dev, with sysfs beside it."""

    def __init__(self, directory: Path) -> None:
        self.sysfs, self.dev = Sysfs(directory / "sys"), directory / "dev"
        self.dev.mkdir()
        self.backings: dict[str, int] = {}
        self.disks = Disks(self.sysfs.root, self.dev, self._backing)

    def add(self, name: str, image: Image | None) -> str:
        """A disk, blank without an image."""
        self.sysfs.add(name, f"8:{len(list(self.dev.iterdir()))}")
        return self.put(name, image)

    def put(self, name: str, image: Image | None) -> str:
        """Write a disk anew."""
        path = self.dev / name
        path.write_bytes(image.bytes() if image else bytes(8192))
        return str(path)

    def _backing(self, path: str) -> int:
        if (number := self.backings.get(Path(path).name)) is None:
            raise OSError(6, "No such device or address", path)
        return number


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without disks."""
    return Machine(tmp_path)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, threading.Event]]:
    """Disks that answer once their event is set, by their names."""
    events: dict[str, threading.Event] = {}

    def hang(name: str) -> None:
        real: Callable[[str], object] = getattr(labels, name)

        def waits(path: str) -> object:
            if event := events.get(Path(path).name):
                assert event.wait(60)
            return real(path)

        monkeypatch.setattr(labels, name, waits)

    hang("read")
    hang("mark")
    yield events
    for event in events.values():
        event.set()


def test_a_scan_has_all_devices_but_blank_ones(machine: Machine) -> None:
    data = machine.add("sda", Image())
    damaged = machine.add("sdb", Image(uuid="?" * 32))
    gone = machine.add("sdc", None)
    Path(gone).unlink()
    machine.add("sdd", None)
    odd = machine.add("vda", Image([]))
    machine.sysfs.volume("dm-0", "253:0", "sda")
    found = machine.disks.scan()
    label = labels.read(data)
    assert isinstance(label, PhysicalLabel)
    assert found == {
        data: replace(label, active_groups=frozenset({GROUP_OF_VOLUMES}), sequence="unknown"),
        damaged: Damaged("the label has no UUID"),
        gone: Unreadable("No such file or directory"),
        odd: PhysicalLabel(DASHED[0], Image().size, True, None, sequence="unknown"),
        str(machine.dev / "dm-0"): Excluded(ExclusionReason.VOLUME, "data-dm-0"),
    }


def test_a_scan_of_named_disks_reads_no_other(machine: Machine) -> None:
    named, other = machine.add("sda", Image()), machine.add("sdb", None)
    Path(other).unlink()
    assert machine.disks.scan(only_paths=[named]).keys() == {named}


def test_a_name_with_an_exclamation_mark_is_a_directory_s(machine: Machine) -> None:
    machine.sysfs.add("cciss!c0d0", "104:0")
    assert machine.disks.scan() == {
        str(machine.dev / "cciss/c0d0"): Unreadable("No such file or directory")
    }


def test_the_backing_of_each_loop_device_is_read(machine: Machine) -> None:
    machine.sysfs.add("sda", "8:9")
    machine.put("sda", None)
    paths = {name: machine.add(name, Image()) for name in ("loop0", "loop1", "loop2")}
    machine.backings = {"loop0": 0, "loop1": 8 << 8 | 9}
    found = machine.disks.scan()
    assert isinstance(found[paths["loop0"]], PhysicalLabel)
    assert found[paths["loop1"]] == Excluded(ExclusionReason.SECOND_VIEW, "sda")
    assert found[paths["loop2"]] == Excluded(ExclusionReason.UNKNOWN, "loop2")
    # Also where only a device above it is named.
    crypt = machine.put("dm-0", Image())
    machine.sysfs.add("dm-0", "253:0", on=("loop0",), dm__uuid="CRYPT-x")
    assert isinstance(machine.disks.scan(only_paths=[crypt])[crypt], PhysicalLabel)
    machine.backings = {"loop1": 0}
    assert machine.disks.scan(only_paths=[crypt])[crypt] == Excluded(
        ExclusionReason.UNKNOWN, "loop0"
    )


def test_a_disk_that_hangs_delays_neither_the_others_nor_the_next_scan(
    machine: Machine, hanging: dict[str, threading.Event]
) -> None:
    whole, stuck = machine.add("sda", Image()), machine.add("sdb", Image(uuid=UUIDS[1]))
    hanging["sdb"] = threading.Event()
    found = machine.disks.scan(patience_seconds=2)
    assert isinstance(found[whole], PhysicalLabel)
    assert found[stuck] == Unanswered()
    # It is waited for by one thread, and by no caller more.
    for _ in range(3):
        assert machine.disks.scan(patience_seconds=50)[stuck] == Unanswered()
        assert machine.disks.fingerprint([whole, stuck], patience_seconds=50) is None
    assert machine.disks.fingerprint([whole]) is not None
    every = [thread.name for thread in threading.enumerate()]
    assert every.count(f"disk {stuck}") == 1

    hanging.pop("sdb").set()
    machine.disks._late[stuck].result(60)
    assert isinstance(machine.disks.scan()[stuck], PhysicalLabel)


def test_a_fingerprint_needs_all_disks_and_metadata(machine: Machine) -> None:
    first = machine.add("sda", Image())
    second = machine.add("sdb", Image([], uuid=UUIDS[1]))
    both = machine.disks.fingerprint([first, second])
    assert both is not None
    assert both == machine.disks.fingerprint([second, first])
    assert both != machine.disks.fingerprint([first])
    # The disks changed places.
    machine.put("sda", Image([], uuid=UUIDS[1]))
    machine.put("sdb", Image())
    assert machine.disks.fingerprint([first, second]) not in (None, both)

    machine.put("sda", Image([Area(text=metadata(2))]))
    assert machine.disks.fingerprint([first]) not in (None, both[:1])
    machine.put("sda", None)
    assert machine.disks.fingerprint([first, second]) is None
    Path(first).unlink()
    assert machine.disks.fingerprint([first, second]) is None
    assert machine.disks.fingerprint([machine.add("sdc", Image([]))]) is None
    assert machine.disks.fingerprint([]) is None


def test_a_programming_error_is_not_taken_for_a_disk_s(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = machine.add("sda", Image())
    monkeypatch.setattr(labels, "mark", lambda path: path.nothing)
    with pytest.raises(AttributeError):
        machine.disks.fingerprint([path])


def test_each_attachment_of_a_disk_has_its_sequence_number(machine: Machine) -> None:
    disk, other, array = machine.add("sda", Image()), machine.add("sdb", None), "cciss/c0d0"
    (machine.sysfs.root / "class/block/sda/diskseq").write_text("7\n")
    machine.sysfs.add("cciss!c0d0", "104:0", diskseq="3")
    machine.sysfs.add("sdb1", "8:17", disk="sdb")
    machine.sysfs.add("loop0", "7:0", size="0", diskseq="9")
    part, empty = (str(machine.dev / one) for one in ("sdb1", "loop0"))
    paths = [disk, other, part, empty, str(machine.dev / array), "/dev/none"]
    assert machine.disks.sequences(paths) == {
        disk: "7",
        # Linux before 5.15.
        other: "unknown",
        part: "unknown",
        str(machine.dev / array): "3",
    }
    found = machine.disks.scan()[disk]
    assert isinstance(found, PhysicalLabel)
    assert found.sequence == "7"


# What the kernel counted against a disk, through what stands on it


HOUR = 3600.0


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    made = Sysfs(tmp_path / "sys")
    made.add("sda", "8:0", device__ioerr_cnt="0x3", badblocks="")
    made.add("sda1", "8:1", disk="sda")
    made.add("sdb", "8:16", device__ioerr_cnt="0x0")
    made.add("md0", "9:0", on=("sda1", "sdb"))
    made.add("nvme0n1", "259:0")
    return made


@pytest.fixture
def errors(sysfs: Sysfs) -> DiskErrors:
    return DiskErrors(sysfs.root)


def write(sysfs: Sysfs, disk: str, file: str, text: str) -> None:
    (sysfs.root / "class/block" / disk / file).write_text(f"{text}\n")


def test_commands_that_failed_before_the_first_look_do_not_count(
    sysfs: Sysfs, errors: DiskErrors
) -> None:
    assert errors.of("/dev/sda", 0.0) == ()
    write(sysfs, "sda", "device/ioerr_cnt", "0x5")
    assert errors.of("/dev/sda", 10.0) == ("2 commands to sda failed within the last hour",)


def test_a_failed_command_is_reported_for_an_hour(sysfs: Sysfs, errors: DiskErrors) -> None:
    errors.of("/dev/sda", 0.0)
    write(sysfs, "sda", "device/ioerr_cnt", "0x4")
    assert errors.of("/dev/sda", 10.0)
    assert errors.of("/dev/sda", HOUR)
    assert errors.of("/dev/sda", HOUR + 10) == ()
    write(sysfs, "sda", "device/ioerr_cnt", "0x5")
    [error] = errors.of("/dev/sda", HOUR + 20)
    assert error.startswith("1 command to")
    # A disk that was replaced begins anew.
    write(sysfs, "sda", "device/ioerr_cnt", "0x1")
    assert errors.of("/dev/sda", HOUR + 30) == ()


def test_bad_sectors_are_reported_until_they_are_gone(sysfs: Sysfs, errors: DiskErrors) -> None:
    write(sysfs, "sda", "badblocks", "100 8\n4000 1")
    for _ in range(2):
        assert errors.of("/dev/sda", 0.0) == ("sda has 2 ranges of sectors that cannot be read",)
    write(sysfs, "sda", "badblocks", "")
    assert errors.of("/dev/sda", 0.0) == ()


def test_the_errors_of_all_disks_below_count(sysfs: Sysfs, errors: DiskErrors) -> None:
    errors.of("/dev/md0", 0.0)
    write(sysfs, "sda", "device/ioerr_cnt", "0x4")
    write(sysfs, "sdb", "device/ioerr_cnt", "0x1")
    assert len(errors.of("/dev/md0", 10.0)) == 2


def test_a_disk_without_counters_and_a_missing_one_have_no_errors(errors: DiskErrors) -> None:
    assert errors.of("/dev/nvme0n1", 0.0) == ()
    assert errors.of("/dev/gone", 0.0) == ()

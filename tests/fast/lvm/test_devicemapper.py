"""device-mapper answers as linux/dm-ioctl.h lays it out, in the words of the kernel's documents."""

import errno
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lvm import active_devices, devicemapper, layout, names
from lvm.active_devices import Devices
from lvm.devicemapper import Cache, DeviceMapper, Mirror, Raid, Snapshot, ThinPool, WriteCache
from mount import block_devices

SECTORS = 2048
SIZE = SECTORS * 512
# thin-provisioning.rst, snapshot.rst, dm-raid.rst, cache.rst, writecache.rst; kernel 6.1 words.
LINES: list[tuple[str, str, devicemapper.Status]] = [
    (
        *("thin-pool", "1 14/1024 3/32 - rw discard_passdown queue_if_no_space - 1024"),
        ThinPool(SIZE, "rw", False, 3, 32, 14, 1024, transaction_id=1),
    ),
    (
        *(
            "thin-pool",
            "7 9/64 32/32 - out_of_data_space no_discard_passdown error_if_no_space - 4",
        ),
        ThinPool(SIZE, "out_of_data_space", False, 32, 32, 9, 64, transaction_id=7),
    ),
    (
        *("thin-pool", "7 64/64 8/32 7 ro discard_passdown queue_if_no_space needs_check 4"),
        # Someone reads its metadata.
        ThinPool(SIZE, "ro", True, 8, 32, 64, 64, has_metadata_snapshot=True, transaction_id=7),
    ),
    ("thin-pool", "Fail", ThinPool(SIZE, "fail")),
    ("thin-pool", "Error", ThinPool(SIZE, "fail")),
    ("snapshot", "16/8192 16", Snapshot(SIZE, "", 16, 8192, 16)),
    ("snapshot", "Invalid", Snapshot(SIZE, "Invalid")),
    ("snapshot", "Merge failed", Snapshot(SIZE, "Merge failed")),
    ("raid", "raid1 2 AA 204/204 idle 0 0 -", Raid(SIZE, "raid1", "AA", 204, 204, "idle", 0)),
    (
        "raid",
        "raid5_ls 3 ADa 5/10 recover 8 0 -",
        Raid(SIZE, "raid5_ls", "ADa", 5, 10, "recover", 8),
    ),
    ("raid", "raid1 2 AA 8/8", Raid(SIZE, "raid1", "AA", 8, 8)),
    (
        "cache",
        "8 27/1024 128 5/64 1 2 3 4 0 5 6 2 metadata2 writeback 2 migration_threshold"
        " 2048 smq 0 rw - ",
        Cache(SIZE, "rw", False, 6),
    ),
    ("cache", "8 1/2 128 0/64 0 0 0 0 0 0 9 0 0 smq 0 ro needs_check", Cache(SIZE, "ro", True, 9)),
    ("cache", "Fail", Cache(SIZE, "fail")),
    ("writecache", "0 1000 900 10 5 6 7", WriteCache(SIZE, 0, 1000, 900, 10)),
    ("mirror", "2 254:3 254:4 96/400 1 AA 1 core", Mirror(SIZE, 96, 400)),
]


@dataclass
class Mapped:
    """A device of device-mapper: its number, what it stands on, its targets."""

    number: int
    below: Sequence[int] = ()
    targets: Sequence[tuple[str, str]] = ()
    suspended: bool = False
    table: Sequence[tuple[str, str]] = ()
    heard: list[str] = field(default_factory=list)
    events: int = 0


@dataclass
class Driver:
    """The kernel's side of the control node."""

    devices: dict[str, Mapped] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    lists: int = 0
    # Targets whose modules the node has, and those that were loaded.
    loadable: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)

    def __call__(self, descriptor: int, request: int, buffer: bytearray) -> int:
        assert os.fstat(descriptor)
        assert request & ~0xFF == 0xC138FD00, "the size of struct dm_ioctl is in it"
        major, _, _, size, *_, flags, _, _, number = struct.unpack_from("=3I5I2IQ", buffer)
        assert (major, size) == (4, len(buffer))
        command = request & 0xFF
        if command == 6:
            assert flags in (0, 1 << 1), "writes are flushed, and a file system frozen"
        elif command not in (4, 7, 14, 17):
            assert flags & 1 << 11, "the target must not flush for a status"
        name = buffer[48:176].partition(b"\0")[0].decode()
        if command == 17:
            if name not in self.loadable:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self.loaded.add(name)
            return 0
        if command == 2:
            self.lists += 1
            return self._fill(self._list(), 0, buffer)
        for known, one in list(self.devices.items()):
            if (name and known == name) or (not name and one.number == number):
                if command == 4:
                    del self.devices[known]
                    return 0
                if command in (6, 7):
                    return self._flow(command, one, flags, buffer)
                if command == 14:
                    return self._hear(one, buffer)
                if flags & 1 << 4:
                    return self._answer(12, Mapped(one.number, targets=one.table), buffer)
                return self._answer(command, one, buffer)
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))

    def _hear(self, one: Mapped, buffer: bytearray) -> int:
        """Struct dm_target_msg: a sector, and a text with its end."""
        (start,) = struct.unpack_from("=I", buffer, 16)
        assert start == 312
        assert struct.unpack_from("=Q", buffer, start) == (0,)
        text, end, rest = bytes(buffer[start + 8 :]).partition(b"\0")
        assert (end, rest) == (b"\0", b"")
        if text.decode() in one.heard:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        one.heard.append(text.decode())
        return 0

    def _answer(self, command: int, one: Mapped, buffer: bytearray) -> int:
        self.asked.append(len(buffer))
        if command == 11:
            data = struct.pack(f"=II{len(one.below)}Q", len(one.below), 0, *one.below)
        else:
            assert command == 12
            data = b""
            for kind, line in one.targets:
                text = line.encode() + b"\0"
                text += b"\0" * (-len(text) % 8)
                following = len(data) + 40 + len(text)
                data += struct.pack("=QQiI16s", 0, SECTORS, 0, following, kind.encode()) + text
        return self._fill(data, len(one.targets), buffer)

    @staticmethod
    def _flow(command: int, one: Mapped, flags: int, buffer: bytearray) -> int:
        if command == 6:
            if flags and one.suspended:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            one.suspended = bool(flags)
        struct.pack_into("=I", buffer, 28, one.suspended << 1)
        struct.pack_into("=Q", buffer, 40, one.number)
        return 0

    def _list(self) -> bytes:
        data, last = b"", len(self.devices) - 1
        for index, (name, one) in enumerate(self.devices.items()):
            text = name.encode() + b"\0"
            text += b"\0" * (-(12 + len(text)) % 8)
            # Since 4.43 flags follow the number of events, and the UUID.
            text += struct.pack("=II", one.events, 2)
            following = 0 if index == last else 12 + len(text)
            data += struct.pack("=QI", one.number, following) + text
        return data or bytes(16)

    @staticmethod
    def _fill(data: bytes, targets: int, buffer: bytearray) -> int:
        start = 312
        if start + len(data) > len(buffer):
            struct.pack_into("=I", buffer, 28, 1 << 8)
            return 0
        struct.pack_into("=I", buffer, 16, start)
        struct.pack_into("=I", buffer, 20, targets)
        buffer[start : start + len(data)] = data
        return 0


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def mapper(driver: Driver, tmp_path: Path) -> DeviceMapper:
    control = tmp_path / "control"
    control.touch()
    return DeviceMapper(control, driver)


@pytest.mark.parametrize(("kind", "line", "expected"), LINES, ids=lambda one: str(one)[:20])
def test_a_target_s_line_is_parsed(
    driver: Driver, mapper: DeviceMapper, kind: str, line: str, expected: devicemapper.Status
) -> None:
    driver.devices["data-web"] = Mapped(1, targets=[(kind, line)])
    assert mapper.status("data-web") == (expected,)


def test_the_status_has_all_devices_below(driver: Driver, mapper: DeviceMapper) -> None:
    disk = 0x801
    driver.devices |= {
        "data-web": Mapped(5, [4], [("thin", "2048 2047")]),
        "data-pool-tpool": Mapped(4, [2, 3], [("thin-pool", "Fail")]),
        "data-pool_tmeta": Mapped(2, [disk], [("linear", "")]),
        "data-pool_tdata": Mapped(3, [6, 7], [("raid", "raid1 2 AA 8/8 idle 0 0 -")]),
        "data-pool_tdata_rimage_0": Mapped(6, [disk], [("linear", "")]),
        "data-pool_tdata_rimage_1": Mapped(7, [disk], [("linear", "")]),
    }
    assert mapper.status("data-web") == (
        ThinPool(SIZE, "fail"),
        Raid(SIZE, "raid1", "AA", 8, 8),
    )


def test_the_disks_that_a_device_needs_are_all_below_but_those_of_a_raid(
    driver: Driver, mapper: DeviceMapper
) -> None:
    driver.devices |= {
        "data-web": Mapped(5, [4], [("thin", "2048 2047")]),
        "data-pool-tpool": Mapped(4, [2, 3], [("thin-pool", "Fail")]),
        "data-pool_tmeta": Mapped(2, [0x811], [("linear", ""), ("linear", "")]),
        "data-pool_tdata": Mapped(3, [6], [("raid", "raid1 2 AA 8/8 idle 0 0 -")]),
        "data-pool_tdata_rimage_0": Mapped(6, [0x821], [("linear", "")]),
    }
    assert mapper.disks("data-web") == {(8, 0x11)}
    assert mapper.disks("data-none") == set()


def test_a_disk_that_went_away_is_missing_in_sysfs(
    driver: Driver, mapper: DeviceMapper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(active_devices, "_SYS_BY_NUMBER", tmp_path)
    driver.devices["data-web"] = Mapped(1, [0x811, 0x821], [("linear", ""), ("linear", "")])
    for number in ("8:17", "8:33"):
        (tmp_path / number).mkdir()
    assert not Devices(mapper).has_lost_disk("data", "web")
    (tmp_path / "8:33").rmdir()
    assert Devices(mapper).has_lost_disk("data", "web")
    assert not Devices(mapper).has_lost_disk("data", "none")


def test_every_target_of_a_device_is_read_however_many_there_are(
    driver: Driver, mapper: DeviceMapper
) -> None:
    driver.devices["data-web"] = Mapped(1, targets=[("linear", "x" * 20)] * 500 + [LINES[0][:2]])
    assert mapper.status("data-web") == LINES[0][2:]
    assert max(driver.asked) > min(driver.asked)


def test_a_device_is_removed(driver: Driver, mapper: DeviceMapper) -> None:
    driver.devices |= {"data-web": Mapped(1), "data-other": Mapped(2)}
    mapper.remove("data-web")
    assert list(mapper.events()) == ["data-other"]
    with pytest.raises(OSError, match="No such device"):
        mapper.remove("data-web")


def test_a_device_is_suspended_and_resumed(driver: Driver, mapper: DeviceMapper) -> None:
    driver.devices["data-web"] = Mapped(1)
    mapper.suspend("data-web")
    assert mapper.is_suspended("data-web")
    with pytest.raises(OSError, match="Invalid argument"):
        mapper.suspend("data-web")
    mapper.resume("data-web")
    mapper.resume("data-web")
    assert not mapper.is_suspended("data-web")


def test_a_missing_device_has_no_status_and_is_not_suspended(mapper: DeviceMapper) -> None:
    assert mapper.status("data-web") == ()
    assert not mapper.is_suspended("data-web")
    with pytest.raises(OSError, match="No such device"):
        mapper.suspend("data-web")


def test_without_a_control_node_nothing_is_known(tmp_path: Path) -> None:
    none = DeviceMapper(tmp_path / "none")
    assert (none.status("data-web"), none.own_status("data-web"), none.events()) == ((), (), {})
    assert (none.is_open("data-web"), none.is_closed("data-web")) == (False, False)
    with pytest.raises(FileNotFoundError):
        none.number("data-web")


def test_the_events_of_all_devices_are_read_at_once(driver: Driver, mapper: DeviceMapper) -> None:
    assert mapper.events() == {}
    driver.devices |= {f"data-web{n}": Mapped(n + 1, events=n % 7) for n in range(1000)}
    expected = {name: (one.number, one.events) for name, one in driver.devices.items()}
    assert mapper.events() == expected
    lists = driver.lists
    assert mapper.events() == expected
    assert driver.lists == lists + 1, "the size of the answer is known by then"
    # One event more, or a device less, is seen.
    driver.devices["data-web7"].events += 1
    number = driver.devices["data-web7"].number
    assert mapper.events()["data-web7"] == (number, driver.devices["data-web7"].events)
    assert Devices(mapper).events("data")["web7"] == mapper.events()["data-web7"]
    del driver.devices["data-web7"]
    assert "data-web7" not in mapper.events()


def test_the_status_of_a_device_alone_is_one_ioctl(driver: Driver, mapper: DeviceMapper) -> None:
    driver.devices |= {
        "data-snap": Mapped(3, [1, 2], [("snapshot", "16/8192 16")]),
        "data-vol-real": Mapped(1, [0x801], [("linear", "")]),
        "data-snap-cow": Mapped(2, [0x801], [("linear", "")]),
    }
    assert mapper.own_status("data-snap") == (Snapshot(SIZE, "", 16, 8192, 16),)
    assert len(driver.asked) == 1


def test_the_writes_to_all_cow_stores_are_read_at_once(
    driver: Driver, mapper: DeviceMapper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statistics = tmp_path / "diskstats"
    statistics.write_text(
        " 253       2 dm-2 1 0 8 4 5 0 4096 7 0 8 9 0 0 0 0 0 0\n"
        " 253       3 dm-3 1 0 8 4 5 0 16 7\n short\n"
    )
    monkeypatch.setattr(block_devices, "_STATISTICS", str(statistics))
    driver.devices |= {
        "data-snap--1": Mapped(0xFD01),
        "data-snap--1-cow": Mapped(0xFD02),
        "data-snap--2-cow": Mapped(0xFD07),
        "data-vol--1": Mapped(0xFD03),
        "other-snap--1-cow": Mapped(0xFD03),
    }
    assert Devices(mapper).written("data") == {"snap-1": ((253, 2), 4096), "snap-2": None}
    statistics.unlink()
    assert Devices(mapper).written("data") == {"snap-1": None, "snap-2": None}


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("my--data-snap--1", "snap-1"),
        ("my--data-snap--1-cow", ""),
        ("my--data-pool--thin_tdata", "pool-thin_tdata"),
        ("my--data--two-snap--1", ""),
        ("my--dat-a", ""),
        ("my--data-", ""),
    ],
)
def test_a_device_s_name_has_its_volume_s(device: str, name: str) -> None:
    assert names.of_device("my-data", device) == name


def test_shares_are_in_percent() -> None:
    pool = ThinPool(SIZE, "rw", False, 3, 32, 256, 1024)
    assert (pool.data_percent, pool.metadata_percent) == (9.375, 25.0)
    assert ThinPool(SIZE, "fail").data_percent == 0.0
    assert Snapshot(SIZE, "", 16, 64).percent == 25.0
    assert Raid(SIZE, "raid1", "AA", 1, 4).synced_percent == 25.0


def test_a_thin_volume_s_table_has_its_number(driver: Driver, mapper: DeviceMapper) -> None:
    driver.devices["data-web"] = Mapped(1, table=[("thin", "253:4 17")])
    driver.devices["data-db"] = Mapped(2, table=[("linear", "8:16 2048")])
    assert mapper.thin_id("data-web") == 17
    assert mapper.thin_id("data-db") is None
    assert mapper.thin_id("data-none") is None


def test_a_pool_gets_a_message_to_reserve_its_metadata(
    driver: Driver, mapper: DeviceMapper
) -> None:
    pool = driver.devices["data-pool-tpool"] = Mapped(1)
    mapper.tell("data-pool-tpool", "reserve_metadata_snap")
    assert pool.heard == ["reserve_metadata_snap"]
    with pytest.raises(OSError, match="busy"):
        mapper.tell("data-pool-tpool", "reserve_metadata_snap")
    with pytest.raises(OSError, match="No such device"):
        mapper.tell("data-other-tpool", "reserve_metadata_snap")


def test_an_unsupported_ioctl_is_no_answer(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.touch()
    # A plain file, by the real ioctl(2): ENOTTY.
    mapper = DeviceMapper(control)
    assert mapper.status("data-web") == ()
    with pytest.raises(OSError, match="Inappropriate ioctl") as found:
        mapper.suspend("data-web")
    assert found.value.errno == errno.ENOTTY


def test_a_device_is_found_by_its_name(driver: Driver, mapper: DeviceMapper) -> None:
    # huge_encode_dev in linux/kdev_t.h: major 253, minor 259.
    driver.devices["data-web"] = Mapped(0x10FD03)
    assert mapper.number("data-web") == (253, 259)
    assert mapper.number("data-other") is None


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with 300 logical volumes, no node in /dev/mapper, and what is read of sysfs."""
    block, numbers = tmp_path / "block", tmp_path / "dev"
    for minor in range(300):
        attributes = block / f"dm-{minor}/dm"
        attributes.mkdir(parents=True)
        (attributes / "name").write_text(f"data-vol--{minor}\n")
        (attributes / "uuid").write_text(f"LVM-{'g' * 32}{'v' * 32}\n")
        (attributes.parent / "dev").write_text(f"253:{minor}\n")
        (attributes.parent / "size").write_text("8192\n")
        numbers.mkdir(exist_ok=True)
        (numbers / f"253:{minor}").symlink_to(attributes.parent)
    monkeypatch.setattr(active_devices, "_SYS_BLOCK", block)
    monkeypatch.setattr(active_devices, "_SYS_BY_NUMBER", numbers)
    monkeypatch.setattr(active_devices, "_MAPPER", tmp_path / "mapper")
    read: list[str] = []
    real = block_devices.attribute

    def attribute(path: str) -> str:
        read.append(path)
        return real(path)

    monkeypatch.setattr(active_devices, "attribute", attribute)
    return read


def test_the_cost_of_finding_a_volume_does_not_grow_with_the_devices(
    driver: Driver, mapper: DeviceMapper, reads: list[str]
) -> None:
    driver.devices |= {
        f"data-vol--{minor}": Mapped(0x10_0000 * (minor >> 8) | 0xFD00 | minor & 0xFF)
        for minor in range(300)
    }
    for minor in (0, 299):
        found = Devices(mapper).find("data", f"vol-{minor}")
        assert found is not None
        assert (found.path, found.number) == (f"/dev/dm-{minor}", (253, minor))
        assert len(reads) <= 3
        reads.clear()
    assert Devices(mapper).find("data", "vol-inactive") is None
    assert reads == []


@pytest.mark.usefixtures("reads")
@pytest.mark.parametrize("answers", [True, False], ids=["device-mapper", "sysfs alone"])
def test_a_device_of_no_sectors_is_not_found(
    driver: Driver, mapper: DeviceMapper, tmp_path: Path, answers: bool
) -> None:
    driver.devices["data-vol--7"] = Mapped(0xFD07)
    devices_of = Devices(mapper if answers else DeviceMapper(tmp_path / "none"))
    found = devices_of.find("data", "vol-7")
    assert found is not None
    assert found.number == (253, 7)
    assert devices_of.find("data", "vol-inactive") is None
    (active_devices._SYS_BLOCK / "dm-7" / "size").write_text("0\n")
    assert devices_of.find("data", "vol-7") is None


def test_a_target_is_loaded_by_the_kernel_where_the_node_has_it(
    driver: Driver, mapper: DeviceMapper
) -> None:
    driver.loadable = {"snapshot"}
    assert mapper.load_target("snapshot")
    assert not mapper.load_target("thin-pool")
    assert driver.loaded == {"snapshot"}


def test_a_target_that_the_kernel_lacks_keeps_no_other_from_being_loaded(
    driver: Driver, mapper: DeviceMapper
) -> None:
    driver.loadable = {*devicemapper.TARGETS} - {"snapshot", "cache-smq"}
    Devices(mapper).load_targets()
    assert driver.loaded == driver.loadable


def test_without_device_mapper_no_target_is_loaded(tmp_path: Path) -> None:
    assert not DeviceMapper(tmp_path / "none").load_target("snapshot")


def test_every_target_that_a_layout_or_a_cache_needs_is_loaded() -> None:
    modules = {one.module for one in layout._KINDS.values() if one.module}
    needed = {one.removeprefix("dm-") for one in modules} | {"cache", "writecache", "snapshot"}
    assert needed <= {*devicemapper.TARGETS}

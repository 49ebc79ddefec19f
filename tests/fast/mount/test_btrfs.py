"""A copied btrfs gets an id of its own; nothing else of it changes."""

import errno
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.devices import FakeDevices
from fakes.filesystems import mkfs
from fakes.kernel import FakeKernel

from mount import calls, filesystem, mount_errors
from mount.kernel import Kernel

DEVICE = "/dev/fake"
MIB = 1 << 20
AT = 64 << 10


@pytest.fixture
def devices() -> FakeDevices:
    made = FakeDevices()
    made.add(DEVICE, 300 * MIB)
    mkfs(("mkfs.btrfs", "-q", "--", DEVICE), made)
    return made


def superblock(devices: FakeDevices, offset: int = AT) -> bytes:
    return devices.get(DEVICE).media.read(offset, 4096)


def test_the_checksum_is_crc32c() -> None:
    # RFC 3720, section B.4: 32 bytes of zeroes, and of ones.
    for data, checksum in ((bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)):
        signed = filesystem._signed(bytes(32) + data)
        assert struct.unpack("<I", signed[:4]) == (checksum,)


def test_the_id_is_new_and_the_old_one_is_kept_for_the_trees(devices: FakeDevices) -> None:
    before = superblock(devices)
    filesystem.renew_uuid(FakeKernel(devices), DEVICE)
    after = superblock(devices)
    assert after[0x20:0x30] != before[0x20:0x30]
    assert after[0x23B:0x24B] == before[0x20:0x30]
    assert struct.unpack_from("<Q", after, 0xBC) == (1 << 10,)
    changed = (*range(4), *range(0x20, 0x30), *range(0xBC, 0xC4), *range(0x23B, 0x24B))
    assert all(after[at] == before[at] for at in range(4096) if at not in changed)
    assert filesystem._signed(after) == after


def test_the_trees_id_is_that_of_the_first_origin_in_a_copy_of_a_copy(
    devices: FakeDevices,
) -> None:
    origin = superblock(devices)[0x20:0x30]
    for _ in range(2):
        filesystem.renew_uuid(FakeKernel(devices), DEVICE)
    assert superblock(devices)[0x23B:0x24B] == origin


def test_every_copy_of_the_superblock_gets_the_id(devices: FakeDevices) -> None:
    mirror = bytearray(superblock(devices))
    mirror[0x30:0x38] = (64 * MIB).to_bytes(8, "little")
    devices.get(DEVICE).media.write(64 * MIB, filesystem._signed(mirror))
    filesystem.renew_uuid(FakeKernel(devices), DEVICE)
    assert superblock(devices)[0x20:0x30] == superblock(devices, 64 * MIB)[0x20:0x30]


@pytest.mark.parametrize("at", [0x40, 0x30, 0x100, 0xC4])
def test_what_is_no_superblock_that_is_understood_is_left_alone(
    devices: FakeDevices, at: int
) -> None:
    spoilt = bytearray(superblock(devices))
    spoilt[at] ^= 1
    devices.get(DEVICE).media.write(AT, bytes(spoilt))
    with pytest.raises(mount_errors.RenewFailed, match="superblock"):
        filesystem.renew_uuid(FakeKernel(devices), DEVICE)
    assert superblock(devices) == bytes(spoilt)


def test_a_growth_that_btrfs_puts_off_is_no_growth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a balance is under way or paused, the ioctl returns 8, sets no errno, does nothing."""
    monkeypatch.setattr(calls, "_libc", SimpleNamespace(ioctl=lambda *_: 8))
    with pytest.raises(OSError, match="balance") as raised:
        Kernel().grow_btrfs(str(tmp_path))
    assert raised.value.errno == errno.EBUSY
    monkeypatch.setattr(calls, "_libc", SimpleNamespace(ioctl=lambda *_: 0))
    Kernel().grow_btrfs(str(tmp_path))

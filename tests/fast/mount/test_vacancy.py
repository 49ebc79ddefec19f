"""What keeps a block device from being taken, beside what it holds."""

from collections.abc import Callable
from pathlib import Path

import configured
import pytest
from fakes.devices import FakeDevice
from fakes.host import FakeHost
from laying import lay

from agent.core.settings import GroupDefinition
from mount import block_devices, errors, mounts
from mount.filesystem import Signature
from mount.kernel import Kernel

MIB = 1 << 20


def swap(device: FakeDevice) -> None:
    device.swap = True


def held(device: FakeDevice) -> None:
    device.held = 1


def part(device: FakeDevice) -> None:
    device.holders = ["dm-7"]


def partitioned(device: FakeDevice) -> None:
    device.partitions = ["sdb1", "sdb2"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (swap, "is used as swap"),
        (held, "is in exclusive use"),
        (part, "is a part of dm-7"),
        (partitioned, r"has partitions \(sdb1, sdb2\)"),
    ],
)
def test_a_device_that_is_used_is_named_with_its_user(
    tmp_path: Path, spoil: Callable[[FakeDevice], None], words: str
) -> None:
    host = FakeHost(tmp_path)
    device = host.new_device(MIB)
    mounts.require_unused(host.kernel, device)
    spoil(host.block.get(device))
    with pytest.raises(errors.NotVacant, match=f"{device} {words}"):
        mounts.require_unused(host.kernel, device)


class OwnFiles(Kernel):
    """The kernel, with a directory for a device's in sysfs and a file for /proc/swaps."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory

    def _sysfs(self, device: str) -> Path:
        return self._directory / device


def test_the_kernel_tells_partitions_and_holders_by_sysfs(tmp_path: Path) -> None:
    for file in ("sda1/partition", "sda2/partition", "queue/zoned", "holders/dm-1"):
        (tmp_path / "sda" / file).parent.mkdir(parents=True)
        (tmp_path / "sda" / file).touch()
    kernel = OwnFiles(tmp_path)
    assert kernel.device_partitions("sda") == ["sda1", "sda2"]
    assert kernel.device_holders("sda") == ["dm-1"]
    assert kernel.device_holders("sdb") == []


def test_the_kernel_tells_swap_by_number_whatever_the_device_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swaps = tmp_path / "swaps"
    swaps.write_text(
        "Filename Type Size Used Priority\n/swapfile file 1 0 -2\n/dev/dm-1 partition\n"
    )
    numbers = {"/dev/dm-1": (253, 1), "/dev/mapper/swap": (253, 1), "/dev/sda": (8, 0)}

    def number(_kernel: Kernel, path: str) -> tuple[int, int]:
        if path not in numbers:
            raise OSError(path)
        return numbers[path]

    monkeypatch.setattr(block_devices, "_SWAPS", swaps)
    monkeypatch.setattr(Kernel, "device_number", number)
    assert Kernel().device_is_swap("/dev/mapper/swap")
    assert not Kernel().device_is_swap("/dev/sda")


def test_a_disk_of_a_group_that_lvm2_cannot_read_is_not_taken(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    device = host.new_device(40 * MIB)
    host.block.get(device).contents = Signature("LVM2_member", "raid", "label", "used")
    config = configured.carver(
        tmp_path, definitions=(GroupDefinition("data", (device,)),), devices=(device,)
    )
    _, laid = lay(host, config)
    assert "holds LVM2_member" in laid.failures["data"]
    assert host.lvm2.groups == {}

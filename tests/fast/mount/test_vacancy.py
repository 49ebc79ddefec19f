"""What keeps a block device from being taken, beside what it holds."""

from pathlib import Path

import configured
import pytest
from fakes.host import FakeHost
from laying import lay

from agent.settings.settings import GroupDefinition
from mount import block_devices, mount_errors, mounts
from mount.filesystem import Signature
from mount.kernel import Kernel

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("swap", True, "is used as swap"),
        ("held", 1, "is in exclusive use"),
        ("holders", ["dm-7"], "is a part of dm-7"),
        ("partitions", ["sdb1", "sdb2"], r"has partitions \(sdb1, sdb2\)"),
    ],
)
def test_the_error_of_a_used_device_names_its_user(
    tmp_path: Path, name: str, value: object, words: str
) -> None:
    host = FakeHost(tmp_path)
    device = host.new_device(MIB)
    mounts.require_unused(host.kernel, device)
    setattr(host.block.get(device), name, value)
    with pytest.raises(mount_errors.NotVacant, match=f"{device} {words}"):
        mounts.require_unused(host.kernel, device)


def test_partitions_and_holders_are_read_from_sysfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("sda1/partition", "sda2/partition", "queue/zoned", "holders/dm-1"):
        (tmp_path / "sda" / file).parent.mkdir(parents=True)
        (tmp_path / "sda" / file).touch()
    kernel = Kernel()
    monkeypatch.setattr(kernel, "_sysfs", lambda device: tmp_path / device)
    assert kernel.device_partitions("sda") == ["sda1", "sda2"]
    assert kernel.device_holders("sda") == ["dm-1"]
    assert kernel.device_holders("sdb") == []


def test_swap_is_recognised_by_its_number_whatever_its_name(
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

"""A logical volume's life by bare commands: what each call of Carver's is compared to."""

import subprocess
from pathlib import Path

from mount.filesystem import FILE_SYSTEMS

SIZE_BYTES, GROWN_BYTES = 48 << 20, 64 << 20


class Bare:
    """One logical volume in a group, mounted and bound below a folder. Commands raise."""

    def __init__(self, group: str, name: str, folder: Path) -> None:
        self._group = group
        self._name = name
        self._device = f"/dev/{group}/{name}"
        self._staging, self._target = str(folder / "bare-staging"), str(folder / "bare-target")

    def create(self) -> None:
        """Make it, as Carver has it made."""
        run(
            *("lvcreate", "--yes", "--wipesignatures", "y", "--zero", "y"),
            *("--setautoactivation", "n", "--size", f"{SIZE_BYTES}b"),
            *("--name", self._name, "--", self._group),
        )

    def stage(self) -> None:
        """Make a file system, as Carver has it made: what is compared is the way there."""
        options = [word for pair in FILE_SYSTEMS["ext4"].options.items() for word in pair]
        run("mkfs.ext4", "-q", *options, "--", self._device)
        run("mount", "--types", "ext4", self._device, self._staging)

    def publish(self) -> None:
        run("mount", "--bind", self._staging, self._target)

    def stats(self) -> None:
        run("df", self._target)

    def expand(self) -> None:
        run("lvextend", "--size", f"{GROWN_BYTES}b", "--", self._device)
        run("resize2fs", self._device)

    def unpublish(self) -> None:
        run("umount", self._target)

    def unstage(self) -> None:
        run("umount", self._staging)

    def delete(self) -> None:
        run("blkdiscard", "--force", "--zeroout", self._device)
        run("lvremove", "--yes", "--", self._device)

    def prepare(self) -> None:
        for path in (self._staging, self._target):
            Path(path).mkdir()

    def undo(self) -> None:
        """Leave nothing of it, wherever it got to."""
        for path in map(Path, (self._target, self._staging)):
            if path.is_mount():
                run("umount", str(path))
            path.rmdir()
        if Path(self._device).exists():
            run("lvremove", "--yes", "--", self._device)


def fill(device: str, size_bytes: int) -> None:
    """Write data on a device that are nowhere else."""
    run(
        "dd",
        "if=/dev/urandom",
        f"of={device}",
        "bs=1M",
        f"count={size_bytes >> 20}",
        "oflag=direct",
    )


def read(size_bytes: int, *devices: str) -> None:
    """Read the start of devices, one after the other, past the page cache."""
    for one in devices:
        count = f"count={size_bytes >> 20}"
        run("dd", f"if={one}", "of=/dev/null", "bs=1M", count, "iflag=direct")


def report(group: str) -> None:
    run("vgs", "--noheadings", "--options", "vg_free", "--", group)


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout

"""A volume's life by Carver's calls, and by the bare commands that each is compared to."""

import subprocess
from pathlib import Path

from performance import rows

from agent.csi.client import Client
from mount.filesystem import FILE_SYSTEMS
from proto import csi_pb2 as csi

SIZE_BYTES, GROWN_BYTES = 48 << 20, 64 << 20


class Life:
    """A volume's life by Carver's calls; what each returns is the next one's to know."""

    def __init__(
        self, client: Client, name: str, folder: Path, size_bytes: int = SIZE_BYTES
    ) -> None:
        self._client, self._name, self._size_bytes = client, name, size_bytes
        self._staging, self._target = folder / f"{name}-staging", folder / f"{name}-target"
        self._volume = csi.Volume()

    @property
    def id(self) -> str:
        return self._volume.volume_id

    def do(self, call: str) -> None:
        """Make one of the calls of `rows`; all may be repeated."""
        client, volume = self._client, self._volume
        if call in (rows.CREATE, rows.REPEATED):
            self._volume = client.create(self._name, self._size_bytes)
        elif call == rows.STAGE:
            client.stage(volume, self._staging)
        elif call == rows.PUBLISH:
            client.publish(volume, self._staging, self._target)
        elif call == rows.GET_VOLUME:
            client.volume(self.id)
        elif call == rows.STATS:
            client.stats(self.id, self._target)
        elif call == rows.EXPAND:
            client.expand(self.id, GROWN_BYTES)
            client.node_expand(self.id, self._target, GROWN_BYTES)
        elif call == rows.UNPUBLISH:
            client.unpublish(self.id, self._target)
        elif call == rows.UNSTAGE:
            client.unstage(self.id, self._staging)
        elif call == rows.DELETE:
            client.delete(self.id)
            self._volume = csi.Volume()
        else:
            raise KeyError(call)

    def prepare(self) -> None:
        self._staging.mkdir()

    def undo(self) -> None:
        """Leave nothing of it, wherever it got to."""
        if self.id:
            for call in (rows.UNPUBLISH, rows.UNSTAGE, rows.DELETE):
                self.do(call)
        self._staging.rmdir()


class Bare:
    """One logical volume in a group, mounted and bound below a folder. Commands raise."""

    def __init__(self, group: str, name: str, folder: Path) -> None:
        device = self._device = f"/dev/{group}/{name}"
        staging = self._staging = str(folder / "bare-staging")
        target = self._target = str(folder / "bare-target")
        # As Carver has both made: what is compared is the way there.
        made = ("--yes", "--wipesignatures", "y", "--zero", "y", "--setautoactivation", "n")
        options = [word for pair in FILE_SYSTEMS["ext4"].options.items() for word in pair]
        self._commands: dict[str, list[tuple[str, ...]]] = {
            rows.LVCREATE: [
                ("lvcreate", *made, "--size", f"{SIZE_BYTES}b", "--name", name, "--", group)
            ],
            rows.MKFS: [
                ("mkfs.ext4", "-q", *options, "--", device),
                ("mount", "--types", "ext4", device, staging),
            ],
            rows.BIND: [("mount", "--bind", staging, target)],
            rows.DF: [("df", target)],
            rows.LVEXTEND: [
                ("lvextend", "--size", f"{GROWN_BYTES}b", "--", device),
                ("resize2fs", device),
            ],
            rows.UNBIND: [("umount", target)],
            rows.UMOUNT: [("umount", staging)],
            rows.LVREMOVE: [
                ("blkdiscard", "--force", "--zeroout", device),
                ("lvremove", "--yes", "--", device),
            ],
        }

    def do(self, step: str) -> None:
        for words in self._commands[step]:
            run(*words)

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
    count = f"count={size_bytes >> 20}"
    run("dd", "if=/dev/urandom", f"of={device}", "bs=1M", count, "oflag=direct")


def read(size_bytes: int, *devices: str) -> None:
    """Read the start of devices, one after the other, past the page cache."""
    for one in devices:
        count = f"count={size_bytes >> 20}"
        run("dd", f"if={one}", "of=/dev/null", "bs=1M", count, "iflag=direct")


def report(group: str) -> None:
    run("vgs", "--noheadings", "--options", "vg_free", "--", group)


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout

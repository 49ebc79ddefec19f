"""In the guest: volumes of each kind that one version of Carver made, served by another. As root.

    across.py MAKER SERVER

Each is a tree of Carver's. Prints a table of what the server did with each volume, and ends with 1
where that is not what docs/compatibility.md promises. The client is this tree's.
"""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import grpc
from faults.load import patiently
from performance import service
from rich.console import Console
from rich.table import Table
from vm import pods

from agent.csi.client import Client, block, mounted, of_snapshot, of_volume
from mount import loop, table
from mount.kernel import Kernel
from proto import csi_pb2 as csi

MIB = 1 << 20
GROUP = "carver_upgrade"
KEY = {"passphrase": "correct horse battery staple"}
MARK, AT = b"made by one version", MIB
_DISKS, _DISK_BYTES = 2, 3 << 30
# How long erasing may take.
_ERASED_SECONDS = 300
_CLASSES: Mapping[str, str] = {
    "plain": "default = true",
    "striped": 'layout = "striped"\nstripes = 2',
    "mirrored": 'layout = "raid1"',
    "thin": 'layout = "thin"',
    "zeroed": 'zero = "fully"',
    "sealed": 'encryption = "luks2"',
    "own": 'encryption = "luks2"',
}


@dataclass(frozen=True)
class Kind:
    """A kind of volume: its name, class, file system (none for raw block), size and parameters."""

    name: str
    of: str = "plain"
    fs_type: str = "ext4"
    size_bytes: int = 32 * MIB
    parameters: Mapping[str, str] = field(default_factory=dict)
    mutable: Mapping[str, str] = field(default_factory=dict)
    # Staged and published while the versions change.
    is_kept_in_use: bool = False

    @property
    def capability(self) -> csi.VolumeCapability:
        return mounted(self.fs_type) if self.fs_type else block()

    @property
    def secret(self) -> Mapping[str, str]:
        return KEY if self.of in ("sealed", "own") else {}


KINDS = (
    Kind("ext4"),
    Kind("in-use", is_kept_in_use=True),
    Kind("xfs", fs_type="xfs", size_bytes=320 * MIB),
    Kind("btrfs", fs_type="btrfs", size_bytes=256 * MIB),
    Kind("raw", fs_type=""),
    Kind("striped", "striped"),
    Kind("mirrored", "mirrored"),
    Kind("thin", "thin"),
    Kind("sealed", "sealed", size_bytes=48 * MIB),
    Kind("sealed-in-use", "sealed", "", 48 * MIB, is_kept_in_use=True),
    Kind("tuned", mutable={"readAhead": "1MiB", "writeIOPS": "1000"}),
    Kind("zeroed", "zeroed"),
    Kind("options", parameters={"carver/mkfsOptions": "-m 1", "carver/mountOptions": "noatime"}),
)
# What is made of another: its kind, the source's, and whether by a snapshot.
COPIES = (
    (Kind("clone"), "ext4", False),
    (Kind("restored"), "ext4", True),
    (Kind("thin-restored", "thin"), "thin", True),
    (Kind("re-encrypted", "own", size_bytes=48 * MIB), "sealed", False),
)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def group(place: Path) -> Iterator[None]:
    """A group on loop devices; afterwards nothing is left of it."""
    disks: list[str] = []
    try:
        for number in range(_DISKS):
            file = place / f"disk{number}"
            _run("truncate", "--size", str(_DISK_BYTES), str(file))
            disks.append(loop.attach(Kernel(), str(file)))
        _run("vgcreate", "--yes", "--", GROUP, *disks)
        try:
            yield
        finally:
            _let_go(place)
            _run("vgremove", "--force", "--force", "--yes", "--", GROUP)
    finally:
        for disk in disks:
            _run("losetup", "--detach", disk)


def _let_go(place: Path) -> None:
    """Unmount and close what a trial that failed left in use."""
    for mounted_at in reversed(table.read(Kernel()).under(str(place))):
        subprocess.run(("umount", mounted_at.path), check=False)
    for one in Path("/dev/mapper").glob("carver-luks-*"):
        subprocess.run(("cryptsetup", "close", one.name), check=False)


@contextmanager
def served(tree: Path, place: Path, *, is_first: bool) -> Iterator[Client]:
    """A version of Carver, as a process that ends with the `with`.

    A version up to 0.2.0 that comes first has a class that re-encrypts copies. Later versions
    refuse such a class, so it is gone from the configuration on the way back, too.
    """
    lines_of = dict(_CLASSES)
    if is_first and (tree / "agent/operations/reencrypt.py").exists():
        lines_of["own"] += "\nreencrypt = true"
    classes = "".join(
        f'[[classes]]\nname = "{name}"\ngroup = "{GROUP}"\n{lines}\n\n'
        for name, lines in lines_of.items()
    )
    text = (
        f'node_id = "upgrade"\nendpoint = "{place}/csi.sock"\nregistration = "none"\n'
        f'kubelet_dir = "{place}"\n\n{classes}'
    )
    with service.started(place, text, tree) as carver:
        yield carver.client


class Trial:
    """Volumes of each kind, made by one version and then served by another."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._volumes: dict[str, csi.Volume] = {}
        self._snapshots: dict[str, str] = {}
        # By kind and step: OK, or what was said.
        self.outcomes: dict[tuple[str, str], str] = {}

    def make(self, client: Client) -> None:
        """All that the one version makes."""
        for kind in KINDS:
            self._volumes[kind.name] = self._create(client, kind)
            self._use(client, kind, write=True)
            if not kind.is_kept_in_use:
                self._leave(client, kind)
        for name in ("ext4", "thin", "sealed"):
            made = client.snapshot(f"of-{name}", self._volumes[name].volume_id)
            self._snapshots[name] = made.snapshot_id
        for kind, source, by_snapshot in COPIES:
            self._volumes[kind.name] = self._create(client, kind, source, by_snapshot=by_snapshot)
        # Made, and never used.
        self._use(client, COPIES[0][0])
        self._leave(client, COPIES[0][0])

    def serve(self, client: Client) -> None:
        """All that the other version does with it."""
        there = {one.volume_id for one in client.volumes()}
        every = [*KINDS, *(kind for kind, *_ in COPIES)]
        # Beside a snapshot a volume in use does not grow.
        for kind in every:
            if kind.name in self._snapshots:
                self._step(kind, "restored", partial(self._restore, client, kind))
        for kind in every:
            is_listed = self._volumes[kind.name].volume_id in there
            self._step(kind, "listed", partial(_require, is_listed))
            for name, step in (
                ("created again", self._again),
                ("data read", self._use),
                ("grown", self._grow),
                ("snapshot", self._snapshot),
                ("let go of", self._leave),
            ):
                self._step(kind, name, partial(step, client, kind))
        for kind in every:
            delete = partial(client.delete, self._volumes[kind.name].volume_id)
            self._step(kind, "deleted", delete)
        end = time.monotonic() + _ERASED_SECONDS
        while left := _run("lvs", "--noheadings", "-o", "lv_name", GROUP):
            if time.monotonic() > end:
                raise RuntimeError(f"left in the group: {left}")
            time.sleep(1)

    def _step(self, kind: Kind, name: str, do: Callable[[], object]) -> None:
        try:
            do()
        except grpc.RpcError as error:
            self.outcomes[kind.name, name] = f"{error.code().name}: {error.details()}"
        except AssertionError as error:
            self.outcomes[kind.name, name] = f"wrong: {error}"
        else:
            self.outcomes[kind.name, name] = "OK"

    def _create(
        self, client: Client, kind: Kind, source: str = "", *, by_snapshot: bool = False
    ) -> csi.Volume:
        content = None
        if source:
            content = (
                of_snapshot(self._snapshots[source])
                if by_snapshot
                else of_volume(self._volumes[source].volume_id)
            )
        parameters = {"carver/class": kind.of, **kind.parameters}
        size = 0 if source else kind.size_bytes
        return patiently(
            lambda: client.create(
                kind.name,
                size,
                kind.capability,
                parameters=parameters,
                mutable=kind.mutable,
                source=content,
            )
        )

    def _again(self, client: Client, kind: Kind) -> None:
        source, by_snapshot = next(
            ((source, by) for one, source, by in COPIES if one is kind), ("", False)
        )
        again = self._create(client, kind, source, by_snapshot=by_snapshot)
        before = self._volumes[kind.name]
        _require(again.volume_id == before.volume_id, again.volume_id)
        told = dict(again.volume_context), dict(before.volume_context)
        _require(told[0] == told[1], str(told))

    def _use(self, client: Client, kind: Kind, *, write: bool = False) -> None:
        volume, (staging, target) = self._volumes[kind.name], self._paths(kind)
        patiently(lambda: client.stage(volume, staging, kind.capability, kind.secret))
        client.publish(volume, staging, target, kind.capability, kind.secret)
        if kind.fs_type:
            file = target / "mark"
            if write:
                file.write_bytes(MARK)
                _run("sync", "--file-system", str(file))
            _require(file.read_bytes() == MARK, "the data are others")
        else:
            with target.open("r+b") as device:
                device.seek(AT)
                if write:
                    device.write(MARK)
                    device.flush()
                    os.fsync(device.fileno())
                    device.seek(AT)
                _require(device.read(len(MARK)) == MARK, "the data are others")

    def _grow(self, client: Client, kind: Kind) -> None:
        volume, (_, target) = self._volumes[kind.name], self._paths(kind)
        size = kind.size_bytes + 64 * MIB
        client.expand(volume.volume_id, size)
        client.node_expand(volume.volume_id, target, size, kind.secret)

    def _snapshot(self, client: Client, kind: Kind) -> None:
        taken = client.snapshot(f"now-{kind.name}", self._volumes[kind.name].volume_id)
        client.delete_snapshot(taken.snapshot_id)

    def _restore(self, client: Client, kind: Kind) -> None:
        of = replace(kind, name=f"again-{kind.name}", size_bytes=0)
        self._volumes[of.name] = self._create(client, of, kind.name, by_snapshot=True)
        self._use(client, of)
        self._leave(client, of)
        client.delete(self._volumes[of.name].volume_id)
        client.delete_snapshot(self._snapshots[kind.name])

    def _leave(self, client: Client, kind: Kind) -> None:
        volume_id, (staging, target) = self._volumes[kind.name].volume_id, self._paths(kind)
        client.unpublish(volume_id, target)
        client.unstage(volume_id, staging)

    def _paths(self, kind: Kind) -> tuple[Path, Path]:
        return self._place / f"{kind.name}-staging", self._place / f"{kind.name}-target"


def _require(is_so: bool, problem: str = "is not so") -> None:
    if not is_so:
        raise AssertionError(problem)


def main() -> int:
    maker, server = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        place = Path(name)
        with pods.pod(pods.SYSTEMD), group(place):
            trial = Trial(place)
            with served(maker, place, is_first=True) as client:
                trial.make(client)
            with served(server, place, is_first=False) as client:
                trial.serve(client)
    shown = Table("volume", "step", "outcome", title=f"made by {maker}, served by {server}")
    for (kind, step), said in trial.outcomes.items():
        if said != "OK":
            shown.add_row(kind, step, said)
    failed = sum(said != "OK" for said in trial.outcomes.values())
    console = Console(width=200, highlight=False)
    console.print(shown if failed else "", f"{len(trial.outcomes)} steps, {failed} not OK")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

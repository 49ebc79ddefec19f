"""Measure each call against the bare commands that do the same, in turns, on the same machine.

Runs in the lab's guest, by `make bench`. Times are the machine's, ratios are Carver's: it never
fails on time.
"""

import argparse
import contextlib
import subprocess
import sys
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

# Behind everything else: Carver is the one that is installed, the tree adds only vagrant/.
sys.path.append(str(Path(__file__).resolve().parent.parent))

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import grpc
from rich import box
from rich.table import Table

from agent import client
from agent.config import DEFAULT_SOCKET
from agent.ids import VolumeId
from mount.filesystem import FILE_SYSTEMS
from vagrant import show, witness

_SIZE_BYTES, _GROWN_BYTES = 64 << 20, 96 << 20


@dataclass
class Pair:
    """A call, or two that belong together, and the bare commands that do the same.

    `commands` is what Carver promises to start at most.
    """

    call: str
    commands: int
    bare: str
    carver_seconds: list[float] = field(default_factory=list)
    bare_seconds: list[float] = field(default_factory=list)


def pairs() -> list[Pair]:
    """What is measured, in the order of a volume's life."""
    return [
        Pair("CreateVolume", 2, "lvcreate"),
        Pair("NodeStageVolume, first", 4, "mkfs.ext4, mount"),
        Pair("NodePublishVolume", 0, "mount --bind"),
        Pair("NodeGetVolumeStats", 0, "df"),
        Pair("Controller-, NodeExpandVolume", 2, "lvextend, resize2fs"),
        Pair("NodeUnpublishVolume", 0, "umount"),
        Pair("NodeUnstageVolume", 0, "umount"),
        Pair("DeleteVolume, wiping", 2, "blkdiscard, lvremove"),
    ]


def by_carver(carver: client.Client, name: str, folder: Path) -> Generator[None, None, None]:
    """Lead a volume through its life by calls, one at each step, in the order of `pairs`."""
    staging, target = folder / "carver-staging", folder / "carver-target"
    staging.mkdir()
    with contextlib.ExitStack() as undo:
        undo.callback(staging.rmdir)
        volume = carver.create(name, _SIZE_BYTES)
        undo.callback(carver.delete, volume.volume_id)
        yield
        undo.callback(carver.unstage, volume.volume_id, staging)
        carver.stage(volume, staging)
        yield
        undo.callback(carver.unpublish, volume.volume_id, target)
        carver.publish(volume, staging, target)
        yield
        carver.stats(volume.volume_id, target)
        yield
        carver.expand(volume.volume_id, _GROWN_BYTES)
        carver.node_expand(volume.volume_id, target, _GROWN_BYTES)
        yield
        carver.unpublish(volume.volume_id, target)
        yield
        carver.unstage(volume.volume_id, staging)
        yield
        carver.delete(volume.volume_id)
        yield


def by_hand(group: str, name: str, folder: Path) -> Generator[None, None, None]:
    """Lead a logical volume through the same life by bare commands."""
    staging, target = str(folder / "bare-staging"), str(folder / "bare-target")
    device, size = f"/dev/{group}/{name}", f"{_SIZE_BYTES}b"
    # As Carver does it, so that what is compared is the way there and not mke2fs.
    options = [word for pair in FILE_SYSTEMS["ext4"].options.items() for word in pair]
    with contextlib.ExitStack() as undo:
        for path in (staging, target):
            Path(path).mkdir()
            undo.callback(Path(path).rmdir)
        undo.callback(_ensure_removed, device)
        _run(
            *("lvcreate", "--yes", "--wipesignatures", "y", "--zero", "y"),
            *("--setautoactivation", "n", "--size", size, "--name", name, "--", group),
        )
        yield
        undo.callback(_ensure_unmounted, staging)
        _run("mkfs.ext4", "-q", *options, "--", device)
        _run("mount", "--types", "ext4", device, staging)
        yield
        undo.callback(_ensure_unmounted, target)
        _run("mount", "--bind", staging, target)
        yield
        _run("df", target)
        yield
        _run("lvextend", "--size", f"{_GROWN_BYTES}b", "--", device)
        _run("resize2fs", device)
        yield
        _run("umount", target)
        yield
        _run("umount", staging)
        yield
        _run("blkdiscard", "--force", "--zeroout", device)
        _run("lvremove", "--yes", "--", device)
        yield


def measure(carver: client.Client, group: str, measured: list[Pair], odd: bool) -> None:
    """One life of each kind, side by side; who goes first changes from round to round."""
    name = f"bench-{uuid.uuid4().hex[:6]}"
    folder = Path("/var/lib/kubelet/plugins", f"carver-{name}")
    folder.mkdir()
    with contextlib.ExitStack() as undo:
        undo.callback(folder.rmdir)
        calls = undo.enter_context(contextlib.closing(by_carver(carver, name, folder)))
        bare = undo.enter_context(contextlib.closing(by_hand(group, name, folder)))
        for pair in measured:
            sides = [(calls, pair.carver_seconds), (bare, pair.bare_seconds)]
            for steps, seconds in reversed(sides) if odd else sides:
                started = time.monotonic()
                next(steps)
                seconds.append(time.monotonic() - started)


def table(measured: list[Pair]) -> Table:
    """The medians, as a table."""
    drawn = Table(box=box.SIMPLE_HEAD)
    for title in ("call", "Carver ms", "commands", "by hand", "ms", "ratio"):
        words = title in {"call", "by hand"}
        drawn.add_column(title, justify="left" if words else "right", no_wrap=True)
    for pair in measured:
        carver_ms, bare_ms = (
            median(seconds) * 1000 for seconds in (pair.carver_seconds, pair.bare_seconds)
        )
        cells = (f"{carver_ms:.1f}", str(pair.commands), pair.bare, f"{bare_ms:.1f}")
        ratio = f"{carver_ms / bare_ms:.2f}"
        drawn.add_row(pair.call, *cells, f"[green]{ratio}" if carver_ms < bare_ms else ratio)
    return drawn


def _group(carver: client.Client) -> str:
    """The name of the group in which the service makes volumes, as a volume's id tells it."""
    volume = carver.create(f"bench-{uuid.uuid4().hex[:6]}", _SIZE_BYTES)
    carver.delete(volume.volume_id)
    found = VolumeId.parse(volume.volume_id)
    if found is None:
        raise witness.Surprise("a volume id such as group@uuid/name", volume.volume_id)
    return found.group


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _ensure_unmounted(path: str) -> None:
    if Path(path).is_mount():
        _run("umount", path)


def _ensure_removed(device: str) -> None:
    if Path(device).exists():
        _run("lvremove", "--yes", "--", device)


def main() -> int:
    """Measure and print the table; only what does not work at all is a failure."""
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often; default: 5")
    rounds = parser.parse_args().rounds
    console, measured = show.console(), pairs()
    with client.Client(DEFAULT_SOCKET) as carver:
        try:
            group = _group(carver)
            for number in range(rounds):
                with console.status(f"round {number + 1} of {rounds} …"):
                    measure(carver, group, measured, odd=number % 2 == 1)
        except grpc.RpcError as error:
            console.print(show.told(error), style="bold red")
            return 1
        except subprocess.CalledProcessError as error:
            console.print(f"{error}: {error.stderr.decode()}", style="bold red", markup=False)
            return 1
    console.print(table(measured))
    console.print(
        f"Medians of {rounds} rounds, in turns. Commands: what Carver promises to start at most."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

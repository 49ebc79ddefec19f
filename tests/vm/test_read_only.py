"""A read-only publish is read-only from its first moment: somebody watches, as fast as can be.

`CARVER_WATCH=publishes=1000` has more of them watched.
"""

import json
import mmap
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import chosen
import pytest
from vm import watcher

from agent.csi.client import Client, block, mounted

MIB = 1 << 20
RAW_SHARE = 10  # one in so many: each makes a loop device, and udev looks at it


class Watching:
    """A watcher of one path, which looks only on request."""

    def __init__(self, control: mmap.mmap) -> None:
        self._control = control
        self.found: dict[str, int] = {}

    def tell(self, what: bytes) -> None:
        """Have it wait or look, and wait until it does."""
        self._control[:1] = what
        while self._control[1:] != what:
            time.sleep(0.001)


@contextmanager
def watched(kind: str, path: Path, control: Path) -> Iterator[Watching]:
    """A process that tries to write at the path on request."""
    control.write_bytes(watcher.WAIT + watcher.END)
    words = [sys.executable, "-I", str(watcher.__file__), kind, str(path), str(control)]
    with (
        control.open("r+b") as file,
        mmap.mmap(file.fileno(), 2) as shared,
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process,
    ):
        watching = Watching(shared)
        try:
            watching.tell(watcher.WAIT)
            yield watching
        finally:
            shared[:1] = watcher.END
            watching.found = json.loads(process.communicate()[0])


@pytest.mark.parametrize("kind", chosen.kinds(["mount", "block"], usual=["block"]))
def test_no_look_sees_a_read_only_publish_writable(
    client: Client, directory: Path, tmp_path: Path, kind: str
) -> None:
    staging, target = directory / "staging", directory / "target"
    raw = kind == "block"
    capability = block() if raw else mounted("ext4")
    volume = client.create(f"test-watched-{kind}", 16 * MIB, capability)
    client.stage(volume, staging, capability)
    if not raw:
        (staging / "file").write_bytes(b"data")
    count = chosen.numbers("CARVER_WATCH", publishes=200)["publishes"]
    times = count // RAW_SHARE if raw else count - count // RAW_SHARE
    seen = target if raw else target / "file"

    with watched(kind, seen, tmp_path / "control") as watching:
        for _ in range(times):
            watching.tell(watcher.LOOK)
            client.publish(volume, staging, target, capability, read_only=True)
            # Not during the unmount: an open file keeps the mount busy.
            watching.tell(watcher.WAIT)
            client.unpublish(volume.volume_id, target)
    print(f"\n{times} read-only publishes, {kind}: {watching.found}")
    assert watching.found.get("writable", 0) == 0
    # It did look, before and after each mount appeared; else it would have proved nothing.
    assert watching.found["read-only"] >= times
    assert watching.found["nothing"] >= times

    with watched(kind, seen, tmp_path / "control") as watching:
        client.publish(volume, staging, target, capability)
        watching.tell(watcher.LOOK)
        watching.tell(watcher.WAIT)
    assert watching.found["writable"], "the watcher sees nothing at all"
    client.unpublish(volume.volume_id, target)
    client.unstage(volume.volume_id, staging)

"""A service of its own process, on a machine in memory, of which the disk of group a hangs."""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import sys
import threading
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import configured
from fakes.host import FakeHost
from serving import machine

from agent.cli import main as cli
from agent.daemon import host, service_process
from agent.operations import preflight
from agent.settings import settings
from agent.settings.classes import DeviceClass
from agent.work.group_worker import GroupWorkers
from mount.command import Result

# What a volume bears once its file system is made.
PROMISED = "carver.formatted=ext4"
CLASSES = (DeviceClass("sick", "a", default=True), DeviceClass("sound", "b"))


def main(directory: Path) -> int:
    """Serve as `carver serve` does; each command, and a wipe that hangs, is a line.

    The deferred tag cannot be written before the service ends, or has lost its socket.
    """
    fake, is_ending_now = FakeHost(directory), threading.Event()
    for one in ("a", "b"):
        fake.lvm2.add_group(one, [100])
    config = configured.carver(directory, kubelet_dir=(str(directory),), classes=CLASSES)
    zero_out = fake.kernel.zero_out

    def hang(device: str, offset_bytes: int, length_bytes: int, **how: Any) -> None:
        if "/a-" in device:
            print("hangs", flush=True)
            threading.Event().wait()
        zero_out(device, offset_bytes, length_bytes, **how)

    def notify(state: str) -> None:
        if state == "STOPPING=1":
            is_ending_now.set()

    def intercept(words: Sequence[str]) -> Result | None:
        is_ending = is_ending_now.is_set() or not config.endpoint.exists()
        if PROMISED in words and not is_ending:
            return Result(5, "", "a lock is held")
        print(*words, flush=True)
        return None

    fake.intercept = intercept
    made = machine(fake)
    with (
        patch.object(fake.kernel, "zero_out", hang),
        patch.object(host, "this_host", lambda _: made),
        patch.object(settings, "load", lambda *_: config),
        patch.object(preflight, "QUICK_CHECKS", ()),
        patch.object(preflight, "CHECKS", {}),
        patch.object(service_process, "notify", notify),
        patch.object(service_process, "_LOOK_SECONDS", 0.1),
        patch.object(GroupWorkers, "stop", partialmethod(GroupWorkers.stop, 1.0)),
    ):
        return cli.main(["serve"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

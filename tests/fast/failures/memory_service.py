"""A service of its own process, on a machine in memory: for a look at what it keeps in memory."""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import configured
from fakes.cryptsetup import FakeCryptsetup
from fakes.host import FakeHost

from agent.daemon.host import Host
from agent.daemon.server import Service
from mount.command import Result
from mount.programs import Programs


class Reader(FakeCryptsetup):
    """It has a program read the key, as the real one does, and remembers nothing of it."""

    def __call__(self, words: Sequence[str], stdin: bytearray | None) -> Result:
        if stdin is not None:
            assert Programs()("sh", "-c", "cat > /dev/null", stdin=stdin).exit_code == 0
        return super().__call__(words, bytearray(b"?"))


def main(directory: Path) -> None:
    """Serve until a signal."""
    host = FakeHost(directory)
    host.cryptsetup = Reader(host.block)
    config = configured.carver(directory, host.new_group(100))
    service = Service(config, Host(host.run, host.kernel, host.devices, host.disks), host.lvm)
    service.start(config.endpoint)
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM})


main(Path(sys.argv[1]))

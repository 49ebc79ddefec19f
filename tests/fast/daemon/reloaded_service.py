"""`carver serve` in a process of its own, with a file, on a machine in memory."""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import sys
from pathlib import Path
from unittest.mock import patch

from fakes.host import FakeHost
from serving import machine

from agent.cli import main as cli
from agent.daemon import host
from agent.operations import preflight


def main(directory: Path) -> int:
    fake = FakeHost(directory)
    for one in ("data", "more"):
        fake.lvm2.add_group(one, [100])
    made = machine(fake)
    words = ["serve", "--config", str(directory / "config.toml"), "--lvm-session", "false"]
    words += ["--endpoint", str(directory / "csi.sock"), "--registration", "none"]
    words += ["--kubelet-dir", str(directory)]
    with (
        patch.object(host, "this_host", lambda _: made),
        patch.object(preflight, "QUICK_CHECKS", ()),
        patch.object(preflight, "CHECKS", {}),
    ):
        return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

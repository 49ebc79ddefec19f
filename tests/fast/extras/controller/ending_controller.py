"""A controller of its own process, whose API server hangs, before a node in the test's process."""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import asyncio
import sys
import time
from pathlib import Path
from unittest.mock import patch

import api_server
import configured

from agent.extras.controller import controller_process


class Hanging(controller_process.Files):
    """Its source answers at the start, and never again."""

    async def look(self) -> None:
        print("hangs", flush=True)
        await asyncio.to_thread(time.sleep, 3600)


def main(directory: Path) -> None:
    config = configured.carver(
        directory,
        endpoint=directory / "controller.sock",
        tls_directory=directory / "controller",
        nodes_file=directory / "nodes.toml",
        # With the looks at volumes' health, whose API server is not there.
        health_interval_seconds=60,
        kubeconfig=api_server.kubeconfig(directory / "kubeconfig", "http://127.0.0.1:1"),
    )
    with (
        patch.object(controller_process, "Files", Hanging),
        patch.object(controller_process, "_LOOK_SECONDS", 0.1),
        patch.object(controller_process, "_DRAIN_SECONDS", 0.5),
    ):
        controller_process.run(config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

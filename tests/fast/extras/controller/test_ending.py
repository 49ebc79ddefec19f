"""The end of a controller's process while its API server and a node hang."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from authority import Authority
from simulated import SimulatedNode, uuid_of

from agent.core import sockets
from agent.extras.tls import certificates
from agent.settings.settings import DRIVER_NAME
from proto import csi_pb2 as csi

HERE = Path(__file__).parent
SUPPORT = HERE.parents[2] / "support"
ROOT = HERE.parents[3]


def test_a_controller_ends_in_time_whatever_hangs(tmp_path: Path) -> None:
    authority, node = Authority(), SimulatedNode(0)
    authority.write(tmp_path / "controller", certificates.controller_name(DRIVER_NAME))
    words = (sys.executable, str(HERE / "ending_controller.py"), str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{SUPPORT}"}

    async def test() -> None:
        address = await node.start(authority, tmp_path / "node")
        (tmp_path / "nodes.toml").write_text(f'[nodes]\n"{node.name}" = "{address}"\n')
        running = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE)
        assert running.stdout is not None
        try:
            assert await asyncio.to_thread(running.stdout.readline) == b"hangs\n"
            endpoint = tmp_path / "controller.sock"
            assert sockets.is_served(endpoint)
            assert resource.prlimit(running.pid, resource.RLIMIT_CORE) == (0, 0)
            async with grpc.aio.insecure_channel(f"unix://{endpoint}") as channel:
                call: Any = channel.unary_unary("/csi.v1.Controller/ControllerGetVolume")
                request = csi.ControllerGetVolumeRequest(volume_id=f"data@{uuid_of(0)}/vol-1")
                assert await call(request.SerializeToString(), timeout=20)
                node.answers.clear()
                node.calls.clear()
                waiting = call(request.SerializeToString())
                while not node.calls:
                    await asyncio.sleep(0.01)
                running.send_signal(signal.SIGTERM)
                # A code, and not a signal's number: it was not killed.
                assert await asyncio.to_thread(running.wait, 15) == 0
                with pytest.raises(grpc.aio.AioRpcError):
                    await waiting
        finally:
            running.kill()
            running.wait()
            running.stdout.close()
            node.answers.set()
            await node.stop()

    asyncio.run(test())

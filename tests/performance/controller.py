"""The cluster's controller before simulated nodes, on this machine: `make bench-controller`.

The nodes are servers on loopback with the real TLS in a process of their own, the controller is the
command `carver controller`, and this process is the sidecars. Figures are for this machine; what a
routed call adds is the difference of two calls that take turns.
"""

import agent  # isort: skip

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from psutil import Process

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests" / "support")]

from simulated import name_of, uuid_of  # noqa: E402

from agent.extras.controller import nodes  # noqa: E402
from agent.extras.tls import certificates  # noqa: E402
from agent.extras.tls.certificates import Certificates  # noqa: E402
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY  # noqa: E402
from proto import csi_pb2 as csi  # noqa: E402

RECORD = ROOT / "docs" / "performance-controller.json"
VOLUMES_OF_A_NODE = 20
AT_ONCE = 50
GET = "/csi.v1.Controller/ControllerGetVolume"
CAPACITY = "/csi.v1.Controller/GetCapacity"
LIST = "/csi.v1.Controller/ListVolumes"


class Bench:
    """The sidecars' side: makes calls and checks who answered."""

    def __init__(self, directory: Path, count: int, simulated: "subprocess.Popen[str]") -> None:
        self.directory, self.count, self._simulated = directory, count, simulated
        self.wrong = 0

    async def __aenter__(self) -> "Bench":
        self.routed = grpc.aio.insecure_channel(f"unix://{self.directory / 'csi.sock'}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.routed.close()

    def hang(self, *numbers: int) -> None:
        """Have these nodes hang, and no others."""
        assert self._simulated.stdin is not None
        assert self._simulated.stdout is not None
        self._simulated.stdin.write(" ".join(map(str, numbers)) + "\n")
        self._simulated.stdin.flush()
        self._simulated.stdout.readline()

    async def get(self, number: int, channel: grpc.aio.Channel, timeout: float = 30) -> float:
        """Ask for a volume of a node; the seconds it took."""
        request = csi.ControllerGetVolumeRequest(volume_id=f"data@{uuid_of(number)}/vol-1")
        call: Any = channel.unary_unary(GET)
        begun = time.perf_counter()
        answer = await call(request.SerializeToString(), timeout=timeout)
        seconds = time.perf_counter() - begun
        volume = csi.ControllerGetVolumeResponse.FromString(answer).volume
        self.wrong += volume.volume_context["carver/node"] != name_of(number)
        return seconds

    async def all_answer(self) -> None:
        """Wait until the controller has heard each node."""
        await self.each([self._until_answered(one) for one in range(self.count)])

    async def _until_answered(self, number: int) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                await self.get(number, self.routed)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(1)
            else:
                return
        raise SystemExit(f"{name_of(number)} never answered")

    async def each(self, calls: list[Any]) -> list[Any]:
        """Await all, so many at once."""
        turn = asyncio.Semaphore(AT_ONCE)

        async def one(call: Any) -> Any:
            async with turn:
                return await call

        return await asyncio.gather(*map(one, calls))

    async def capacity(self, number: int) -> None:
        segments = {TOPOLOGY_KEY: name_of(number)}
        request = csi.GetCapacityRequest(accessible_topology=csi.Topology(segments=segments))
        call: Any = self.routed.unary_unary(CAPACITY)
        answer = csi.GetCapacityResponse.FromString(
            await call(request.SerializeToString(), timeout=30)
        )
        self.wrong += answer.available_capacity != number

    async def sweep(self, calls: int) -> float:
        """The seconds that questions for capacity take, for three classes on each node, say."""
        begun = time.perf_counter()
        await self.each([self.capacity(one % self.count) for one in range(calls)])
        return time.perf_counter() - begun

    async def added(self, rounds: int) -> float:
        """The milliseconds that a routed call takes longer than one to the node; medians."""
        shown = Certificates.read(self.directory / "controller")
        address = nodes.read(self.directory / "nodes.toml")[name_of(0)]
        name = certificates.node_name(name_of(0), DRIVER_NAME)
        direct, routed = [], []
        async with grpc.aio.secure_channel(
            address, shown.for_client(), certificates.options(name)
        ) as channel:
            await self.get(0, channel)
            for _ in range(rounds):
                direct.append(await self.get(0, channel))
                routed.append(await self.get(0, self.routed))
        return (statistics.median(routed) - statistics.median(direct)) * 1000

    async def listed(self) -> tuple[int, float]:
        """All volumes, and the seconds that it took."""
        found, token, begun = 0, "", time.perf_counter()
        call: Any = self.routed.unary_unary(LIST)
        while True:
            request = csi.ListVolumesRequest(starting_token=token).SerializeToString()
            answer = csi.ListVolumesResponse.FromString(await call(request, timeout=60))
            found, token = found + len(answer.entries), answer.next_token
            if not token:
                return found, time.perf_counter() - begun

    async def beside_hung_nodes(self, calls: int) -> dict[str, float]:
        """Calls while another twentieth of the nodes hangs in each round; those hang, too."""
        chance = random.Random(7)
        fine, refused, failed = [], 0, 0
        every = list(range(self.count))
        for _ in range(10):
            hung = set(chance.sample(every, self.count // 20))
            self.hang(*hung)

            async def one(number: int, hung: "set[int]" = hung) -> None:
                nonlocal refused, failed
                try:
                    seconds = await self.get(number, self.routed, 2 if number in hung else 30)
                    fine.append(seconds)
                except grpc.aio.AioRpcError:
                    refused += number in hung
                    failed += number not in hung

            # Callers that wait for a hung node are as many as there are hung nodes: each asks once.
            waiting = [asyncio.create_task(one(number)) for number in hung]
            rest = [one_ for one_ in every if one_ not in hung]
            await self.each([one(chance.choice(rest)) for _ in range(calls // 10)])
            await asyncio.gather(*waiting)
            self.hang()
            await self.all_answer()
        fine.sort()
        return {
            "calls to others": len(fine),
            "of them failed": failed,
            "median ms": statistics.median(fine) * 1000,
            "p99 ms": fine[len(fine) * 99 // 100] * 1000,
        }


@contextmanager
def running(directory: Path, count: int) -> Iterator["tuple[subprocess.Popen[str], Process]"]:
    """The nodes' process and the controller's."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'support'}",
    }
    simulate = [sys.executable, str(ROOT / "tests" / "support" / "simulated.py"), str(directory)]
    control = [
        *(sys.executable, "-m", "agent", "controller", "--log-level", "warning"),
        *("--endpoint", str(directory / "csi.sock")),
        *("--nodes-file", str(directory / "nodes.toml")),
        *("--tls-directory", str(directory / "controller")),
    ]
    with subprocess.Popen(
        [*simulate, str(count), str(VOLUMES_OF_A_NODE)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as simulated:
        assert simulated.stdout is not None
        assert simulated.stdin is not None
        simulated.stdout.readline()
        log = (directory / "log").open("w")
        with subprocess.Popen(control, env=environment, stderr=log) as controller:
            while not (directory / "csi.sock").exists():
                if controller.poll() is not None:
                    raise SystemExit((directory / "log").read_text())
                time.sleep(0.1)
            try:
                yield simulated, Process(controller.pid)
            finally:
                controller.terminate()
        simulated.stdin.close()


async def measure(directory: Path, count: int, *, quick: bool) -> dict[str, float]:
    calls = 5_000 if quick else 100_000
    with running(directory, count) as (simulated, controller):
        async with Bench(directory, count, simulated) as bench:
            await bench.all_answer()
            found: dict[str, float] = {"nodes": count}
            found["capacity: 3,000 calls, s"] = await bench.sweep(3_000)
            found["routed call adds, ms"] = await bench.added(500)
            before = sum(controller.cpu_times()[:2])
            chance = random.Random(1)
            begun = time.perf_counter()
            numbers = [chance.randrange(count) for _ in range(calls)]
            for at in range(0, calls, 10_000):
                part = numbers[at : at + 10_000]
                await bench.each([bench.get(one, bench.routed) for one in part])
            found["calls a second"] = calls / (time.perf_counter() - begun)
            cpu = sum(controller.cpu_times()[:2]) - before
            found["calls a second of its CPU"] = calls / cpu
            listed, seconds = await bench.listed()
            found["volumes listed"] = listed
            found["list of all, s"] = seconds
            hung = await bench.beside_hung_nodes(calls // 10)
            found |= {f"a twentieth hangs: {key}": value for key, value in hung.items()}
            found["answered by another node"] = bench.wrong
            found["resident, MiB"] = controller.memory_info().rss / (1 << 20)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the calls")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--nodes", type=int, default=1000)
    parsed = parser.parse_args()
    # Each node has a listening socket, a connection, and its other end.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(Path(directory), parsed.nodes, quick=parsed.quick))
    for name, value in found.items():
        print(f"{name:40} {value:12,.2f}")
    if parsed.record:
        rounded = {name: round(value, 2) for name, value in found.items()}
        RECORD.write_text(json.dumps(rounded, indent=2) + "\n")
    bad = found["answered by another node"] or found["a twentieth hangs: of them failed"]
    return 1 if bad else 0


if __name__ == "__main__":
    assert agent.__name__
    sys.exit(main())

"""Simulated nodes: gRPC servers on loopback with TLS, which answer from memory, in one event loop.

As a program it serves many until its input ends: tests/performance/cluster.py runs it so.
"""

import agent  # isort: skip

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from authority import Authority

from agent.core import ids
from agent.extras.controller import routes
from agent.extras.controller.answer_rules import RULES
from agent.extras.tls import certificates
from agent.extras.tls.certificates import Certificates
from agent.settings.settings import DRIVER_NAME
from proto import csi_pb2 as csi


def uuid_of(number: int) -> str:
    """The part of a group's UUID that ids have."""
    return f"n{number:07d}"


def name_of(number: int) -> str:
    """The name of a node."""
    return f"node-{number:05d}"


class _Empty(grpc.GenericRpcHandler):
    """Ends some of a node's calls with the status OK and no message."""

    def __init__(self, node: "SimulatedNode") -> None:
        self._node = node

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """The handler of such a call; None for all others."""
        if details.method.rpartition("/")[2] not in self._node.empty:
            return None
        return grpc.unary_stream_rpc_method_handler(self._nothing)

    async def _nothing(self, _data: bytes, _context: Any) -> AsyncIterator[bytes]:
        messages: tuple[bytes, ...] = ()
        for one in messages:
            yield one


class SimulatedNode:
    """A node with one group; each of its answers names it."""

    def __init__(self, number: int, volumes: int = 0, name: str = "") -> None:
        self.name, self.number = name or name_of(number), number
        self.here = ids.topology(self.name, DRIVER_NAME)
        self.topology = csi.Topology(segments=self.here)
        self.groups = {uuid_of(number): "data"}
        # Whether it says that these are all: it has looked at its disks.
        self.whole = {routes.IS_WHOLE: routes.YES}
        every = [f"data@{uuid_of(number)}/vol-pvc-{number}-{one}" for one in range(volumes)]
        self.volumes = csi.ListVolumesResponse(
            entries=[csi.ListVolumesResponse.Entry(volume=self._there(one)) for one in every]
        ).SerializeToString()
        # Cleared: it hangs, as one whose disk does not answer.
        self.answers = asyncio.Event()
        self.answers.set()
        # Cleared: it does not say what it has; other calls are answered.
        self.info_answers = asyncio.Event()
        self.info_answers.set()
        # Cleared: it hangs where it has created a volume.
        self.creates = asyncio.Event()
        self.creates.set()
        # What it says is wrong, by the ids of its volumes: statuses, reasons, messages.
        self.unhealthy: dict[str, list[tuple[str, str, str]]] = {}
        # Volumes that it does not list as unhealthy, does not answer about, or says are not there.
        self.unlisted: set[str] = set()
        self.unanswered: set[str] = set()
        self.gone: set[str] = set()
        # Whether it cannot list.
        self.refuses = False
        self.asked = False
        self.created: set[str] = set()
        # What it says of itself in place of the truth, as bytes.
        self.says: bytes | None = None
        # What it answers in place of the truth, by the RPC.
        self.forged: dict[str, bytes] = {}
        # The codes that it fails with, by the RPC, and the text.
        self.fails: dict[str, grpc.StatusCode] = {}
        self.why = "it fails"
        # The RPCs that it ends well without an answer, and those that it never ends.
        self.empty: set[str] = set()
        self.hangs: set[str] = set()
        # The bytes of all requests, their RPCs, and what is added to their answers.
        self.requests: list[bytes] = []
        self.requested: list[str] = []
        self.adds = b""
        self.calls: list[str] = []
        self.cancelled: list[str] = []
        self._server: grpc.aio.Server | None = None
        self.port = 0

    def _there(self, volume_id: str) -> csi.Volume:
        """A volume of the node."""
        return csi.Volume(
            volume_id=volume_id, capacity_bytes=1 << 30, accessible_topology=[self.topology]
        )

    async def _info(self, _data: bytes, _context: Any) -> bytes:
        self.asked = True
        await self.answers.wait()
        await self.info_answers.wait()
        if self.says is not None:
            return self.says
        return csi.GetPluginInfoResponse(
            name=DRIVER_NAME,
            vendor_version="0.1.0",
            manifest={
                routes.NODE_ID: self.name,
                routes.SEGMENTS: json.dumps(self.here),
                routes.GROUPS: json.dumps(self.groups),
                **self.whole,
            },
        ).SerializeToString()

    async def _capacity(self, data: bytes, _context: Any) -> bytes:
        await self.answers.wait()
        answer = csi.GetCapacityResponse(available_capacity=self.number)
        answer.maximum_volume_size.value = (1 << 40) + self.number
        return answer.SerializeToString() + self.adds

    async def _create(self, data: bytes, context: Any) -> bytes:
        request = csi.CreateVolumeRequest.FromString(data)
        self.created.add(f"vol-{request.name}")
        await self.creates.wait()
        source, _ = routes.source_of(request)
        if source and source.split("@")[1].split("/")[0] not in self.groups:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the source is not here")
        return (
            csi.CreateVolumeResponse(
                volume=csi.Volume(
                    volume_id=f"data@{uuid_of(self.number)}/vol-{request.name}",
                    capacity_bytes=request.capacity_range.required_bytes,
                    content_source=request.volume_content_source if source else None,
                    accessible_topology=[self.topology],
                )
            ).SerializeToString()
            + self.adds
        )

    async def _snapshot(self, data: bytes, _context: Any) -> bytes:
        request = csi.CreateSnapshotRequest.FromString(data)
        return csi.CreateSnapshotResponse(
            snapshot=csi.Snapshot(
                snapshot_id=f"data@{uuid_of(self.number)}/snap-{request.name}",
                source_volume_id=request.source_volume_id,
                accessible_topology=[self.topology],
                ready_to_use=True,
            )
        ).SerializeToString()

    async def _list(self, _data: bytes, context: Any) -> bytes:
        await self.answers.wait()
        if self.refuses:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a disk does not answer")
        return self.volumes

    async def _list_health(self, data: bytes, context: Any) -> bytes:
        """The unhealthy volumes, a page for each."""
        self.calls.append("ControllerListVolumeHealth")
        await self.answers.wait()
        if self.refuses:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "a disk does not answer")
        token = csi.ControllerListVolumeHealthRequest.FromString(data).starting_token
        every = [one for one in sorted(self.unhealthy.keys() - self.unlisted) if one >= token]
        answer = csi.ControllerListVolumeHealthResponse(
            entries=map(self._health_of, every[:1]), next_token="".join(every[1:2])
        )
        return answer.SerializeToString()

    async def _get_health(self, data: bytes, context: Any) -> bytes:
        volume_id = csi.ControllerGetVolumeHealthRequest.FromString(data).volume_id
        self.calls.append(f"ControllerGetVolumeHealth {volume_id}")
        await self.answers.wait()
        if volume_id in self.gone:
            await context.abort(grpc.StatusCode.NOT_FOUND, "it is not here")
        if volume_id in self.unanswered:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "its group does not answer")
        if volume_id.split("@")[1].split("/")[0] not in self.groups:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the group is not here")
        answer = csi.ControllerGetVolumeHealthResponse(volume_health=self._health_of(volume_id))
        return answer.SerializeToString()

    def _health_of(self, volume_id: str) -> csi.VolumeHealth:
        found = csi.VolumeHealth(volume_id=volume_id)
        for status, reason, message in self.unhealthy.get(volume_id, ()):
            kind = csi.VolumeHealthErrorType.Value(status)
            found.health_statuses.add(status=kind, reason=reason, message=message)
        return found

    async def _volume(self, data: bytes, context: Any) -> bytes:
        request = csi.ControllerGetVolumeRequest.FromString(data)
        self.calls.append(request.volume_id)
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.volume_id)
            raise
        if request.volume_id.split("@")[1].split("/")[0] not in self.groups:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the group is not here")
        name = request.volume_id.rpartition("/")[2]
        # All others are there from the start.
        if name.startswith("vol-new") and name not in self.created:
            await context.abort(grpc.StatusCode.NOT_FOUND, "it is not here")
        volume = self._there(request.volume_id)
        volume.volume_context["carver/node"] = self.name
        return csi.ControllerGetVolumeResponse(volume=volume).SerializeToString() + self.adds

    def _or_forged(self, method: str, answer: Any) -> Any:
        async def handle(data: bytes, context: Any) -> bytes:
            if method != "GetPluginInfo":
                self.requests.append(data)
                self.requested.append(method)
            if method in self.hangs:
                await asyncio.Event().wait()
            if method in self.forged:
                return self.forged[method]
            if method in self.fails or answer is None:
                code = self.fails.get(method, grpc.StatusCode.UNIMPLEMENTED)
                await context.abort(code, self.why)
            found: bytes = await answer(data, context)
            return found

        return handle

    def _forged_stream(self, method: str) -> Any:
        """A stream of the same message twice."""

        async def handle(_data: bytes, _context: Any) -> AsyncIterator[bytes]:
            yield self.forged[method]
            yield self.forged[method]

        return handle

    async def start(self, authority: Authority, directory: Path) -> str:
        """Serve; return the address. A node that ended starts again at the same port."""
        name = certificates.node_name(self.name, DRIVER_NAME)
        found = Certificates.read(authority.write(directory, name))
        credentials = grpc.ssl_server_credentials(
            [(found.key, found.certificate)], found.authority, require_client_auth=True
        )
        made = self._server = grpc.aio.server(options=certificates.SERVER_OPTIONS)
        made.add_generic_rpc_handlers((_Empty(self),))
        served: dict[str, dict[str, Any]] = {
            "csi.v1.Identity": {"GetPluginInfo": self._info},
            # Its moves and classes are those of `forged`.
            "carver.v2.Transfer": {"Moves": None, "ReceiveStatus": None},
            "csi.v1.Controller": {
                "GetCapacity": self._capacity,
                "CreateVolume": self._create,
                "CreateSnapshot": self._snapshot,
                "ListVolumes": self._list,
                "ControllerGetVolume": self._volume,
                "ControllerListVolumeHealth": self._list_health,
                "ControllerGetVolumeHealth": self._get_health,
            },
        }
        for service in ("csi.v1.Identity", *dict.fromkeys(("carver.v2.Transfer", *RULES))):
            calls = served.get(service, {})
            handlers: dict[str, Any] = {
                name: grpc.unary_unary_rpc_method_handler(self._or_forged(name, calls.get(name)))
                for name in (*calls, *RULES.get(service, ()))
            }
            if service in routes.STREAMS:
                handlers = {
                    name: grpc.unary_stream_rpc_method_handler(self._forged_stream(name))
                    for name in handlers
                }
            handler: Any = grpc.method_handlers_generic_handler(service, handlers)
            made.add_generic_rpc_handlers((handler,))
        self.port = made.add_secure_port(f"127.0.0.1:{self.port}", credentials)
        await made.start()
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """End at once."""
        if self._server is not None:
            await self._server.stop(None)


async def serve(directory: Path, count: int, volumes: int) -> None:
    """Serve many nodes; write their file, and the controller's certificate.

    Each line of input has the numbers of the nodes that are to hang.
    """
    authority = Authority()
    authority.write(directory / "controller", certificates.controller_name(DRIVER_NAME))
    every = [SimulatedNode(number, volumes) for number in range(count)]
    lines = [f'"{one.name}" = "{await one.start(authority, directory)}"\n' for one in every]
    (directory / "nodes.toml").write_text("[nodes]\n" + "".join(lines))
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        # The numbers of the nodes that hang from now on; the others answer.
        hung = set(map(int, line.split()))
        for one in every:
            (one.answers.clear if one.number in hung else one.answers.set)()
        print("done", flush=True)
    await asyncio.gather(*(one.stop() for one in every))


if __name__ == "__main__":
    assert agent.__name__
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))

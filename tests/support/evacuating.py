"""A cluster with a node to be evacuated: an API server, nodes that answer, and their controller."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from api_server import CLAIMS, NODES, PODS, VOLUMES, ApiServer, Object
from authority import Authority
from clustered import Loop
from simulated import SimulatedNode, uuid_of

from agent.extras.controller.controller_process import ClusterController, Files
from agent.extras.evacuation.cluster_view import ClusterView
from agent.extras.evacuation.evacuation_calls import EvacuationCalls
from agent.extras.evacuation.progress import Progress
from agent.extras.kubernetes.access import Server
from agent.extras.kubernetes.objects import Lists, Objects
from agent.extras.tls import certificates
from agent.settings.settings import DRIVER_NAME, TOPOLOGY_KEY, Config
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

GIB = 1 << 30
KEY = f"evacuate.{DRIVER_NAME}/request"


class Api(ApiServer):
    """An API server with Nodes that can be annotated, and objects of the namespace shop."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[str, Object]] = []

    def node(self, name: str, **more: Any) -> Object:
        """A Node that is ready."""
        labels = {"kubernetes.io/hostname": name, TOPOLOGY_KEY: name}
        status = {"conditions": [{"type": "Ready", "status": "True"}]}
        about = {"labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
        return self.add(NODES, name, **{"metadata": about, "spec": {}, "status": status, **more})

    def claimed(self, volume_id: str, claim: str, node: str, driver: str = DRIVER_NAME) -> Object:
        """A claim, and its PersistentVolume; returns the latter."""
        made = self.add(
            CLAIMS,
            *(claim,),
            metadata={"namespace": "shop"},
            spec={"volumeName": f"pv-{claim}"},
            status={"phase": "Bound"},
        )
        place = {"key": TOPOLOGY_KEY, "operator": "In", "values": [node]}
        terms = [{"matchExpressions": [place]}]
        spec = {
            "csi": {"driver": driver, "volumeHandle": volume_id},
            "claimRef": {"namespace": "shop", "name": claim, "uid": made["metadata"]["uid"]},
            "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
            "persistentVolumeReclaimPolicy": "Delete",
        }
        return self.add(VOLUMES, f"pv-{claim}", spec=spec, status={"phase": "Bound"})

    def pod(self, name: str, node: str, *claims: str, **spec: Any) -> Object:
        """A pod of a StatefulSet that uses claims."""
        volumes = [{"name": one, "persistentVolumeClaim": {"claimName": one}} for one in claims]
        owner = {"kind": "StatefulSet", "name": "set", "uid": "u", "controller": True}
        about = {"namespace": "shop", "labels": {"app": "db"}, "ownerReferences": [owner]}
        return self.add(
            PODS,
            name,
            metadata=about,
            spec={"nodeName": node, "volumes": volumes, **spec},
            status={"phase": "Running"},
        )

    def annotate(self, node: str, text: str) -> None:
        self.found(node)["metadata"]["annotations"] = {KEY: text}

    def found(self, node: str) -> Object:
        """The Node of a name."""
        (found,) = [one for one in self.objects[NODES] if one["metadata"]["name"] == node]
        return found

    def answer(self, path: str, query: Mapping[str, list[str]]) -> tuple[int, Object]:
        if path.startswith(f"{NODES}/"):
            name = path.removeprefix(f"{NODES}/")
            for node in self.objects[NODES]:
                if node["metadata"]["name"] == name:
                    return 200, {"kind": "Node", **node}
            return 404, {"kind": "Status", "reason": "NotFound"}
        return super().answer(path, query)

    def write(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        assert method == "PATCH"
        self.changes.append((path, body))
        annotations = self.found(path.rpartition("/")[2])["metadata"].setdefault("annotations", {})
        for key, value in body["metadata"]["annotations"].items():
            annotations.pop(key, None)
            if value is not None:
                annotations[key] = value
        return 200, {"kind": "Node"}


class EvacuableNode(SimulatedNode):
    """A node with volumes of a class, moves, and space by classes."""

    def __init__(self, number: int, volumes: int = 0, name: str = "") -> None:
        super().__init__(number, volumes, name)
        listed = csi.ListVolumesResponse.FromString(self.volumes)
        for entry in listed.entries:
            entry.volume.volume_context["carver/class"] = "fast"
        self.volumes = listed.SerializeToString()
        self.rooms = {"fast": (100 * GIB, 4 << 20)}
        self.moves = carver.MovesResponse()
        self.moves.classes.add(name="fast", pool="data")
        self.snapshots = csi.ListSnapshotsResponse()
        self.forge()

    def handle(self, number: int) -> str:
        """The id of one of its volumes."""
        return f"data@{uuid_of(self.number)}/vol-pvc-{self.number}-{number}"

    def snapshot(self, name: str, volume: int, group: str = "") -> str:
        """A snapshot of a volume; its id."""
        made = self.snapshots.entries.add().snapshot
        made.snapshot_id = f"data@{uuid_of(self.number)}/snap-{name}"
        made.source_volume_id = self.handle(volume)
        made.group_snapshot_id = group and f"data@{uuid_of(self.number)}/gsnap-{group}"
        made.accessible_topology.append(self.topology)
        self.forge()
        return made.snapshot_id

    def moving(self, number: int, node: str, **more: Any) -> None:
        """A move of a volume to another node."""
        self.moves.moves.add(
            volume_id=self.handle(number),
            node=node,
            size_bytes=1 << 30,
            device_class="fast",
            **more,
        )
        self.forge()

    def forge(self) -> None:
        """Answer by what it has now."""
        self.forged["Moves"] = self.moves.SerializeToString()
        self.forged["ListSnapshots"] = self.snapshots.SerializeToString()

    async def _capacity(self, data: bytes, _context: Any) -> bytes:
        request = csi.GetCapacityRequest.FromString(data)
        most, least = self.rooms[request.parameters["class"]]
        answer = csi.GetCapacityResponse(available_capacity=most)
        answer.maximum_volume_size.value = most
        answer.minimum_volume_size.value = least
        return answer.SerializeToString()


class Site:
    """Nodes, of which the first has volumes, their controller, and an API server."""

    def __init__(
        self, config: Config, directory: Path, api: Api, loop: Loop, *, nodes: int, volumes: int
    ) -> None:
        self.config, self.api, self.loop = config, api, loop
        self.nodes = [EvacuableNode(0, volumes), *map(EvacuableNode, range(1, nodes))]
        self.source = self.nodes[0]
        authority = Authority()
        authority.write(directory / "controller", certificates.controller_name(DRIVER_NAME))

        async def started() -> list[str]:
            return [await one.start(authority, directory / "node") for one in self.nodes]

        addresses = loop.run(started())
        lines = [f'"{n.name}" = "{a}"\n' for n, a in zip(self.nodes, addresses, strict=True)]
        (directory / "nodes.toml").write_text("[nodes]\n" + "".join(lines))
        for number, node in enumerate(self.nodes):
            made = api.node(node.name)
            made["metadata"]["creationTimestamp"] = f"2026-01-{number + 1:02}T00:00:00Z"
        for number in range(volumes):
            api.claimed(self.source.handle(number), f"claim-{number:02}", self.source.name)
        server = Server("tests", "127.0.0.1", api.port)
        self.lists, self.objects = Lists(server), Objects(server)
        self.progress = Progress()
        # The progress that another controller has published.
        self.other_text = ""

        async def begun() -> ClusterController:
            controller = ClusterController(config, Files(config))
            self.calls = EvacuationCalls(
                *(config, controller.nodes, self.objects, self.lists, self.progress),
                lambda: self.other_text,
            )
            controller.handlers.append(self.calls.handler())
            await controller.start()
            await asyncio.gather(*map(controller.nodes.ask, controller.nodes))
            return controller

        self.controller = loop.run(begun())
        self.view = ClusterView(DRIVER_NAME, self.controller.nodes, self.lists, loop.loop)

    def ask(self) -> None:
        """Have the controller ask its nodes now."""

        async def ask() -> None:
            await asyncio.gather(*map(self.controller.nodes.ask, self.controller.nodes))

        self.loop.run(ask())

    def requests(self) -> int:
        """The number of requests to nodes so far."""
        return sum(len(node.requests) for node in self.nodes)

    def stop(self) -> None:
        async def stop() -> None:
            await self.controller.stop()
            for node in self.nodes:
                await node.stop()

        self.loop.run(stop())


def annotation(api: Api, node: str) -> Any:
    """The request on a Node, as JSON says it; None without one."""
    text = (api.found(node)["metadata"].get("annotations") or {}).get(KEY)
    return None if text is None else json.loads(text)

#!/usr/bin/env python3
"""Answer the cluster's controller in Carver's place, and lie, as the thief of a node's token can.

It runs with Carver's own modules and configuration, in a pod like Carver's (lying.py). By the token
of its pod it enrols as the node that the pod is on, and gets a certificate in that node's name. Its
only argument is a JSON object of the lies (`Lies`). It prints the name of each volume that it is
asked to create.
"""

# First of all: agent keeps gRPC's fork handlers out, and must come before grpc does.
import agent  # noqa: F401  isort: skip

import argparse
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from agent.core import ids
from agent.daemon import log
from agent.daemon.registration import Registration
from agent.extras.controller import routes
from agent.extras.controller.enrolling import Enroller
from agent.extras.tls import certificates
from agent.settings import settings
from agent.settings.settings import Config
from agent.settings.values import Address
from lvm import names
from proto import csi_pb2 as csi
from proto import csi_pb2_grpc

# More room than any node has.
_ROOM_BYTES = 1 << 50


@dataclass(frozen=True)
class Lies:
    """What is said of another node: its topology, and the id of a volume there.

    `groups` are those of the node that the program speaks for, as that node's Carver names them.
    """

    groups: Mapping[str, str]
    topology: Mapping[str, str]
    volume_id: str
    # Whether the program says that its own topology is the other's.
    as_other: bool


class Liar(
    csi_pb2_grpc.IdentityServicer, csi_pb2_grpc.ControllerServicer, csi_pb2_grpc.NodeServicer
):
    """Serves the controller, and kubelet as far as that registers the driver."""

    def __init__(
        self, config: Config, lies: Lies, tell: Callable[[str], object] = lambda _: None
    ) -> None:
        """`tell` is called with the name of each volume that is to be created."""
        self._config, self._lies, self._tell = config, lies, tell
        self._turns = itertools.cycle((True, False))
        if config.controller_address is None:
            raise SystemExit("there is no controller_address: Carver runs without a controller")
        address = Address(config.advertised_host, config.controller_address.port)
        self.enroller = Enroller(config, str(address), self._serve)
        self._registration = Registration(
            config.registration_directory, config.endpoint, driver_name=config.driver_name
        )
        self._servers: list[grpc.Server] = []

    def start(self) -> None:
        """Enrol, then serve."""
        self.enroller.task.start()

    def stop(self) -> None:
        """Enrol and serve no more; leave no socket."""
        self.enroller.task.stop()
        self._registration.stop()
        for one in self._servers:
            one.stop(grace=1).wait()

    def _serve(self) -> None:
        remote = grpc.server(ThreadPoolExecutor(8), options=certificates.SERVER_OPTIONS)
        csi_pb2_grpc.add_IdentityServicer_to_server(self, remote)
        csi_pb2_grpc.add_ControllerServicer_to_server(self, remote)
        credentials = certificates.server_credentials(lambda: self.enroller.certificates)
        remote.add_secure_port(str(self._config.controller_address), credentials)
        self._servers.append(remote)
        remote.start()
        if self._lies.as_other:
            # Else the provisioner would ask for a capacity that it does not get, ever less often.
            return
        local = grpc.server(ThreadPoolExecutor(2))
        csi_pb2_grpc.add_NodeServicer_to_server(self, local)
        local.add_insecure_port(f"unix://{self._config.endpoint}")
        self._servers.append(local)
        local.start()
        # The provisioner calls for a node only if kubelet knows the driver there.
        self._registration.start()

    def GetPluginInfo(  # noqa: N802
        self, request: csi.GetPluginInfoRequest, context: grpc.ServicerContext
    ) -> csi.GetPluginInfoResponse:
        """The node and its groups, and the topology of one or the other node."""
        here = self._lies.topology if self._lies.as_other else self._config.here
        answer = csi.GetPluginInfoResponse(name=self._config.driver_name, vendor_version="0")
        answer.manifest[routes.NODE_ID] = self._config.node_id
        answer.manifest[routes.SEGMENTS] = json.dumps(dict(here))
        answer.manifest[routes.GROUPS] = json.dumps(dict(self._lies.groups))
        return answer

    def GetCapacity(  # noqa: N802
        self, request: csi.GetCapacityRequest, context: grpc.ServicerContext
    ) -> csi.GetCapacityResponse:
        """Much, so that claims are sent here."""
        answer = csi.GetCapacityResponse(available_capacity=_ROOM_BYTES)
        answer.maximum_volume_size.value = _ROOM_BYTES
        return answer

    def CreateVolume(  # noqa: N802
        self, request: csi.CreateVolumeRequest, context: grpc.ServicerContext
    ) -> csi.CreateVolumeResponse:
        """By turns the other node's volume, and one of the right name with that node's topology."""
        self._tell(request.name)
        (uuid, group), *_ = self._lies.groups.items()
        own = names.logical_volume(ids.VOLUME_PREFIX, request.name)
        made = csi.Volume(capacity_bytes=request.capacity_range.required_bytes)
        if next(self._turns):
            made.volume_id = self._lies.volume_id
            made.accessible_topology.add(segments=self._config.here)
        else:
            made.volume_id = f"{group}@{uuid}/{own}"
            made.accessible_topology.add(segments=self._lies.topology)
        return csi.CreateVolumeResponse(volume=made)

    def NodeGetInfo(  # noqa: N802
        self, request: csi.NodeGetInfoRequest, context: grpc.ServicerContext
    ) -> csi.NodeGetInfoResponse:
        """The truth, as kubelet takes no other topology than its Node has."""
        here = csi.Topology(segments=self._config.here)
        return csi.NodeGetInfoResponse(node_id=self._config.node_id, accessible_topology=here)


def _tell(name: str) -> None:
    print("CreateVolume", name, flush=True)


def main() -> int:
    """Lie until SIGTERM."""
    config = settings.load(argparse.Namespace(config=None), os.environ)
    log.configure("text", "info")
    liar = Liar(config, Lies(**json.loads(sys.argv[1])), _tell)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    liar.start()
    ended.wait()
    liar.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The parts put together on one gRPC server, and ended in order."""

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from agent import admission, errors
from agent.admission import Admission
from agent.config.settings import Config
from agent.csi.controller import Controller
from agent.csi.group_controller import GroupController
from agent.csi.identity import Identity
from agent.csi.interceptor import Interceptor
from agent.csi.node import Node
from agent.csi.operator import Operator
from agent.csi.snapshot_metadata import SnapshotMetadata
from agent.csi.transfer import Transfer
from agent.delta.delta import Delta
from agent.ending import side_by_side
from agent.engine import sources
from agent.engine.engines import Engines
from agent.engine.host import Host
from agent.engine.inventory import Inventory
from agent.engine.means import Means
from agent.engine.sources import Foundations
from agent.engine.withheld import Withheld
from agent.health import preflight
from agent.health.conditions import Diagnosis
from agent.health.readiness import Readiness
from agent.health.storage_health import StorageHealth
from agent.health.volume_health import VolumesHealth
from agent.locks import VolumeLocks
from agent.publish.inline import Ephemeral
from agent.publish.staging import Access
from agent.transfer.moving import Mover
from agent.transfer.receiving import Receiver
from agent.transfer.sending import Sender
from agent.volumes.copying import Copier
from agent.volumes.expansion import Expander
from agent.volumes.group_snapshots import GroupSnapshotter
from agent.volumes.listing import Listing
from agent.volumes.provisioning import Provisioner
from agent.volumes.snapshots import Snapshotter
from agent.workers.auto_repair import AutoRepair
from agent.workers.autoextend import Grower
from agent.workers.disk_replacement import Replacement
from agent.workers.giving_up import GivingUp
from agent.workers.pool_removal import Reclaimer
from agent.workers.reencryption import Reencrypter
from agent.workers.repairing import Repairer
from agent.workers.wiping import Wiper
from agent.workers.zeroing import Zeroer
from lvm import errors as lvm_errors
from lvm.command import Converse, Run
from lvm.lvm2 import Lvm
from lvm.session import Session
from proto import csi_pb2_grpc

if TYPE_CHECKING:
    from agent.orphans.watch import OrphanWatch

_log = logging.getLogger(__name__)

# systemd's TimeoutStopSec and kubelet's grace period are longer than all of it.
_DRAIN_SECONDS = 25.0
# Work behind the answers is at a safe point by then, unless a disk hangs.
_ENDING_SECONDS = 10.0


class Service:
    """Carver's services on one gRPC server."""

    def __init__(
        self,
        config: Config,
        host: Host,
        lvm: Lvm,
        observe: Callable[[str, str, float], None] | None = None,
        foundations: Foundations = sources.NONE,
    ) -> None:
        sessions = _sessions(config, host, lvm.run, host.converse) if host.converse else None
        engines = self.engines = Engines(
            lvm,
            host.disks,
            host.devices,
            config.groups,
            sessions,
            listed=foundations.listed,
        )
        known = self.inventory = Inventory(engines, host.devices, foundations)
        self.node = preflight.Node(
            config,
            host.kernel,
            host.run,
            lambda: known.recent()[0],
            refused=lambda: known.refused,
            ignored=lambda: known.ignored,
        )
        self.admission = Admission()
        self.readiness = Readiness(known, self.node, self.admission)
        means = Means(config, host.run, host.kernel, engines, known, host.devices, host.stream)
        locks = self.locks = VolumeLocks()
        self.wiper = Wiper(means)
        self.reclaimer = Reclaimer(means)
        self.giving_up = GivingUp(means)
        self.wiper.emptied = partial(self.reclaimer.after, wait_seconds=0)
        self.wiper.given_up = self.giving_up.start
        self.grower = Grower(means)
        snapshotter = Snapshotter(means, self.wiper, self.reclaimer)
        self.group_snapshotter = GroupSnapshotter(
            means, host.devices, snapshotter, self.wiper, locks
        )
        self.copier = Copier(means, snapshotter)
        withheld = self.withheld = Withheld()
        self.reencrypter = Reencrypter(means)
        provision = Provisioner(
            means, self.wiper, self.reclaimer, self.copier, self.reencrypter, withheld
        )
        diagnosis = self.diagnosis = Diagnosis(host.kernel, host.devices, known)
        self.zeroer = Zeroer(means)
        expander = Expander(means, self.zeroer)
        access = Access(means, self.wiper, self.copier, expander, self.reencrypter, withheld)
        self.delta = Delta(means)
        metadata = SnapshotMetadata(self.delta)
        transfer = Transfer(
            Sender(means, self.delta.activations),
            Receiver(means, provision, self.reclaimer, withheld),
            Mover(means, provision, withheld),
            metadata,
            locks,
        )
        health = VolumesHealth(
            host.kernel, engines, known, diagnosis, access.check, config.kubelet_dir
        )
        self.storage = StorageHealth(engines, known, diagnosis, self.node, self.admission)
        repairer = Repairer(means)
        repairer.freed = self.giving_up.start
        self.auto_repair = AutoRepair(means, repairer)
        self.replacement = Replacement(means, repairer)
        self.replacement.freed = self.giving_up.start
        operator = Operator(repairer, self.replacement, Listing(means), locks, config.here)
        self.ephemeral = Ephemeral(means, provision, access, locks)
        self.orphans = _orphans(config, host, known)
        self._interceptor = Interceptor(observe, self.admission)
        self._server = grpc.server(
            ThreadPoolExecutor(admission.THREADS, thread_name_prefix="rpc"),
            interceptors=[self._interceptor],
        )
        self._server.add_generic_rpc_handlers((operator.handler(), transfer.handler()))
        csi_pb2_grpc.add_IdentityServicer_to_server(
            Identity(self.readiness, config.driver_name), self._server
        )
        csi_pb2_grpc.add_ControllerServicer_to_server(
            Controller(config, provision, expander, snapshotter, health, locks), self._server
        )
        csi_pb2_grpc.add_GroupControllerServicer_to_server(
            GroupController(config, self.group_snapshotter, locks), self._server
        )
        csi_pb2_grpc.add_SnapshotMetadataServicer_to_server(metadata, self._server)
        csi_pb2_grpc.add_NodeServicer_to_server(
            Node(config, expander, access, self.ephemeral, health, self.storage, locks),
            self._server,
        )

    def start(self, path: Path) -> None:
        """Serve on a unix socket that only root can reach."""
        # Between bind and chmod anyone could connect: the umask leaves no such moment.
        umask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix://{path}")
        finally:
            os.umask(umask)
        self._server.start()
        self.ephemeral.start()

    def stop(self) -> None:
        """Let calls in flight end, then background work at its next safe point.

        What has not ended by then is left: a disk that hangs keeps no process from ending, and no
        other group from having on its disks what it promised.
        """
        self.ephemeral.stop()
        if self.orphans is not None:
            self.orphans.stop()
        # Before the wait: a stream may last for hours.
        self.delta.stop()
        self._server.stop(_DRAIN_SECONDS).wait(_DRAIN_SECONDS + 1)
        # Before what may take long: only calls promise.
        self.engines.stop()
        works: Mapping[str, Callable[[], None]] = {
            "growth": self.grower.stop,
            "repair": self.auto_repair.stop,
            "zeroing": self.zeroer.stop,
            "copying": self.copier.stop,
            "re-encryption": self.reencrypter.stop,
            "wiping": self.wiper.stop,
            "the removal of pools": self.reclaimer.stop,
            "the sweeping of groups": self.giving_up.stop,
        }
        side_by_side(works, _ENDING_SECONDS)
        self.engines.close()


def _sessions(config: Config, host: Host, run: Run, converse: Converse) -> Callable[[str], Session]:
    """How an engine's session with lvm2 is made: in a directory that the host sees, too."""
    directory = config.endpoint.parent / "lvm"

    def begin(group: str) -> Session:
        return Session(run, converse, directory / group, root=config.lvm_root, observe=host.observe)

    return begin


def _orphans(config: Config, host: Host, known: Inventory) -> "OrphanWatch | None":
    if not config.orphan_interval_seconds:
        return None
    # Imported here: who does not ask for it reads no kubeconfig.
    from agent.orphans import look
    from agent.orphans.watch import OrphanWatch

    seeker = look.seeker(config, host.kernel, known)
    return OrphanWatch(seeker.look, config.orphan_interval_seconds)


def resume(service: Service, *groups: str) -> bool:
    """Take up the wipes and copies that are left in these groups, or in all.

    False where one of them was not there, or may not be used. Raises what a look at them raises.
    What lvm2 refuses is left to the next time: it must not keep all calls waiting.
    """
    try:
        seen = service.inventory.read(*groups)
    except errors.GroupRefused:
        return False  # told by the engine, and by each call
    service.withheld.resume(service.inventory, *groups)
    steps = {
        "wipes": service.wiper.resume,
        "empty pools": service.reclaimer.resume,
        "groups to be swept": service.giving_up.resume,
        "groups with a disk that is being emptied": service.replacement.resume,
        "half-made group snapshots": service.group_snapshotter.resume,
        "copies": service.copier.resume,
        "metadata snapshots": service.delta.reservations.resume,
        "snapshots that were read": service.delta.activations.resume,
    }
    for what, step in steps.items():
        try:
            count = step(*groups)
        except lvm_errors.OutcomeUnknown:
            raise
        except lvm_errors.LvmError as error:
            _log.error("%s that were left are not seen to before the next start: %s", what, error)
            continue
        if count:
            _log.info("going on with %d %s that were left", count, what)
    return all(one in seen.groups for one in groups or service.engines.names)

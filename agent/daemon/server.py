"""The parts put together on one gRPC server, and ended in order."""

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc

from agent.core import errors, extras, group_definitions, locks, trace
from agent.core.allocation import Allocators
from agent.core.background import run_all
from agent.core.context import Context
from agent.core.group_definitions import GroupDefinitions
from agent.core.host import Host
from agent.core.inventory import MONITOR_AGE_SECONDS, Inventory
from agent.core.settings import Config
from agent.core.trace import Trace, Traces
from agent.core.volume_groups import VolumeGroups
from agent.csi.controller import Controller
from agent.csi.group_controller import GroupController
from agent.csi.identity import Identity
from agent.csi.interceptor import Interceptor
from agent.csi.node import Node
from agent.csi.operator import Operator
from agent.daemon.extra import Extra
from agent.operations import preflight
from agent.operations.autoextend import Autoextender
from agent.operations.clone import Copier
from agent.operations.create import VolumeCreator
from agent.operations.delete import VolumeDeleter
from agent.operations.encrypt import EncryptedDevices
from agent.operations.erase import Eraser
from agent.operations.erase_free import FreedSpaceEraser, GrowthZeroer
from agent.operations.expand import Expander
from agent.operations.group_snapshot import GroupSnapshotter
from agent.operations.health import Diagnosis
from agent.operations.inline import InlineVolumes
from agent.operations.listing import Listing
from agent.operations.node_volumes import NodeVolumes
from agent.operations.publish import Publisher
from agent.operations.reencrypt import Reencrypter
from agent.operations.remove_pool import PoolRemover
from agent.operations.repair import AutoRepair, Repairer
from agent.operations.replace_disk import Replacement
from agent.operations.snapshot import Snapshotter
from agent.operations.stage import Stager
from agent.operations.storage_health import Readiness, StorageHealth
from agent.operations.volume_health import VolumesHealth
from lvm.lvm2 import Lvm
from lvm.session import Session
from mount import errors as mount_errors
from mount.command import Converse, Run
from proto import carver_pb2_grpc, csi_pb2_grpc

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
        observe: Callable[[Trace], None] | None = None,
        definitions: GroupDefinitions = group_definitions.NONE,
    ) -> None:
        self.traces = Traces()
        host, lvm = _traced(host), replace(lvm, run=trace.traced_run(lvm.run))
        sessions = _sessions(config, host, lvm.run, host.converse) if host.converse else None
        volume_groups = self.volume_groups = VolumeGroups(
            lvm,
            host.disks,
            host.devices,
            config.groups,
            sessions,
            listed=definitions.listed,
        )
        known = self.inventory = Inventory(volume_groups, host.devices, definitions)
        self.node = preflight.Node(
            config,
            host.kernel,
            host.run,
            lambda: known.state(max_age=MONITOR_AGE_SECONDS),
            refused=lambda: known.refused,
            ignored=lambda: known.ignored,
        )
        context = self.context = Context(
            config,
            host.run,
            host.kernel,
            volume_groups,
            known,
            host.devices,
            host.stream,
            Allocators(config.classes, known),
        )
        self.readiness = Readiness(known, self.node, context.admission)
        self.pool_remover = PoolRemover(context)
        self.freed_eraser = FreedSpaceEraser(context)
        self.eraser = Eraser(
            context,
            emptied=partial(self.pool_remover.after, wait_seconds=0),
            given_up=self.freed_eraser.start,
        )
        self.autoextender = Autoextender(context)
        snapshotter = Snapshotter(context, self.eraser, self.pool_remover)
        self.group_snapshotter = GroupSnapshotter(context, snapshotter, self.eraser)
        self.copier = Copier(context, snapshotter)
        self.reencrypter = Reencrypter(context)
        deleter = self.deleter = VolumeDeleter(
            context, self.eraser, self.pool_remover, self.copier, self.reencrypter
        )
        creator = VolumeCreator(context, self.eraser, self.pool_remover, self.copier, deleter)
        listing = Listing(context)
        diagnosis = self.diagnosis = Diagnosis(host.kernel, host.devices, known)
        self.growth_zeroer = GrowthZeroer(context)
        node_volumes = NodeVolumes(context, self.eraser, self.copier)
        encrypted = EncryptedDevices(context, self.reencrypter)
        expander = Expander(context, self.growth_zeroer, node_volumes, encrypted)
        stager = Stager(context, node_volumes, encrypted, expander, self.reencrypter)
        publisher = Publisher(context, node_volumes, encrypted, stager)
        health = VolumesHealth(
            host.kernel, volume_groups, known, diagnosis, node_volumes.check, config.kubelet_dir
        )
        self.storage = StorageHealth(volume_groups, known, diagnosis, self.node, context.admission)
        repairer = Repairer(context, freed=self.freed_eraser.start)
        self.auto_repair = AutoRepair(context, repairer)
        self.replacement = Replacement(context, repairer, freed=self.freed_eraser.start)
        operator = Operator(context, repairer, self.replacement, listing, self.traces)
        self.inline_volumes = InlineVolumes(context, creator, deleter, stager)
        # Last: an extra takes of the service what it needs.
        self.extras: dict[str, Extra] = {}
        for name, module in extras.modules("service"):
            self.extras[name] = module.add(self)
        offered = [one for extra in self.extras.values() for one in extra.offered]
        self._interceptor = Interceptor(observe, context.admission, self.traces)
        self._server = grpc.server(
            ThreadPoolExecutor(locks.THREADS, thread_name_prefix="rpc"),
            interceptors=[self._interceptor],
        )
        carver_pb2_grpc.add_OperatorServicer_to_server(operator, self._server)
        csi_pb2_grpc.add_IdentityServicer_to_server(
            Identity(self.readiness, config.driver_name, offered), self._server
        )
        csi_pb2_grpc.add_ControllerServicer_to_server(
            Controller(context, creator, deleter, listing, expander, snapshotter, health),
            self._server,
        )
        csi_pb2_grpc.add_GroupControllerServicer_to_server(
            GroupController(context, self.group_snapshotter), self._server
        )
        csi_pb2_grpc.add_NodeServicer_to_server(
            Node(
                context,
                expander,
                stager,
                publisher,
                node_volumes,
                self.inline_volumes,
                health,
                self.storage,
            ),
            self._server,
        )
        for extra in self.extras.values():
            extra.add_services(self._server)

    def start(self, path: Path) -> None:
        """Serve on a unix socket that only root can reach."""
        # Between bind and chmod anyone could connect: the umask leaves no such moment.
        umask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix://{path}")
        finally:
            os.umask(umask)
        self._server.start()
        self.inline_volumes.start()

    def stop(self) -> None:
        """Let calls in flight end, then background work at its next safe point.

        What has not ended by then is left: a disk that hangs keeps no process from ending, and no
        other group from having on its disks what it promised.
        """
        self.inline_volumes.stop()
        # Before the wait: a stream may last for hours.
        for extra in self.extras.values():
            extra.stop()
        self._server.stop(_DRAIN_SECONDS).wait(_DRAIN_SECONDS + 1)
        # Before what may take long: only calls promise.
        self.volume_groups.stop()
        works: Mapping[str, Callable[[], None]] = {
            "growth": self.autoextender.stop,
            "repair": self.auto_repair.stop,
            "zeroing": self.growth_zeroer.jobs.stop,
            "copying": self.copier.stop,
            "re-encryption": self.reencrypter.stop,
            "wiping": self.eraser.jobs.stop,
            "the removal of pools": self.pool_remover.jobs.stop,
            "the sweeping of groups": self.freed_eraser.jobs.stop,
        }
        run_all(works, _ENDING_SECONDS)
        self.volume_groups.close()


def _traced(host: Host) -> Host:
    """The host, each operation of which is a step of the call that asks for it."""
    return replace(
        host,
        run=trace.traced_run(host.run),
        observe=trace.traced_observer(host.observe),
        kernel=trace.traced(host.kernel),
        devices=trace.traced(host.devices),
    )


def _sessions(config: Config, host: Host, run: Run, converse: Converse) -> Callable[[str], Session]:
    """How an engine's session with lvm2 is made: in a directory that the host sees, too."""
    directory = config.endpoint.parent / "lvm"

    def begin(group: str) -> Session:
        return Session(run, converse, directory / group, root=config.lvm_root, observe=host.observe)

    return begin


def resume(service: Service, *groups: str) -> bool:
    """Take up the wipes and copies that are left in these groups, or in all.

    False where one of them was not there, or may not be used. Raises what a look at them raises.
    What lvm2 refuses is left to the next time: it must not keep all calls waiting.
    """
    try:
        seen = service.inventory.state(*groups)
    except errors.GroupRefused:
        return False  # told by the engine, and by each call
    service.context.holds.resume(service.inventory, *groups)
    steps = {
        "wipes": service.eraser.resume,
        "empty pools": service.pool_remover.resume,
        "groups to be swept": service.freed_eraser.resume,
        "groups with a disk that is being emptied": service.replacement.resume,
        "half-made group snapshots": service.group_snapshotter.resume,
        "copies": service.copier.resume,
    }
    for extra in service.extras.values():
        steps |= extra.recoveries()
    for what, step in steps.items():
        try:
            count = step(*groups)
        except mount_errors.OutcomeUnknown:
            raise
        except mount_errors.CommandError as error:
            _log.error("%s that were left are not seen to before the next start: %s", what, error)
            continue
        if count:
            _log.info("going on with %d %s that were left", count, what)
    return all(one in seen.groups for one in groups or service.volume_groups.names)

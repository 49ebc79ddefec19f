"""The service: create all operations, serve them on one gRPC server, and stop them in order."""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc

from agent.core import errors, extras, trace
from agent.core.trace import Trace, Traces
from agent.csi.controller import Controller
from agent.csi.group_controller import GroupController
from agent.csi.identity import Identity
from agent.csi.interceptor import Interceptor
from agent.csi.node import Node
from agent.csi.operator import Operator
from agent.daemon.extra import Extra
from agent.daemon.grpc_servers import stop_server
from agent.daemon.host import Host
from agent.groups.group_definitions import GroupDefinitions
from agent.groups.node_groups import VolumeGroups
from agent.operations import modify, preflight
from agent.operations.adopt import Adopter
from agent.operations.attach import Attacher
from agent.operations.autoextend import Autoextender
from agent.operations.clone import Copier
from agent.operations.create import VolumeCreator
from agent.operations.delete import VolumeDeleter
from agent.operations.diagnosis import Diagnosis
from agent.operations.encrypt import EncryptedDevices
from agent.operations.erase_deleted import Eraser
from agent.operations.erase_free import FreedSpaceEraser, GrowthZeroer
from agent.operations.expand import Expander
from agent.operations.group_snapshot import GroupSnapshotter
from agent.operations.inline import InlineVolumes
from agent.operations.listing import Listing
from agent.operations.node_volumes import NodeVolumes
from agent.operations.publish import Publisher
from agent.operations.remove_pool import PoolRemover
from agent.operations.repair import AutoRepair, Repairer
from agent.operations.replace_disk import Replacement
from agent.operations.snapshot import Snapshotter
from agent.operations.stage import Stager
from agent.operations.storage_health import Readiness, StorageHealth
from agent.operations.volume_health import VolumesHealth
from agent.settings.configuration import Configuration
from agent.settings.settings import Config
from agent.volumes.activator import Activator
from agent.volumes.allocation import Allocators
from agent.volumes.conflicts import Conflicts
from agent.volumes.context import Context
from agent.volumes.erase_policy import ErasePolicy
from agent.volumes.holds import Holds
from agent.volumes.limiter import Limiter
from agent.volumes.mender import Mender
from agent.volumes.reports import MONITOR_AGE_SECONDS, Reports
from agent.volumes.tag_writer import TagWriter
from agent.work import locks
from agent.work.background import reasons
from agent.work.group_worker import PeriodicJobs
from agent.work.pace import Paces
from lvm.lvm2 import Lvm
from lvm.session import Session
from mount.command import Converse, Run
from proto import carver_pb2_grpc, csi_pb2_grpc

_log = logging.getLogger(__name__)

# Time limit, in seconds, for RPCs in flight to end as the service stops. Together with
# the limits of the other steps, this limit is below systemd's TimeoutStopSec and kubelet's grace
# period.
_DRAIN_SECONDS = 25.0


class Service:
    """The node service: all operations and gRPC services of Carver, on one gRPC server."""

    def __init__(
        self,
        config: Config,
        host: Host,
        lvm: Lvm,
        observe: Callable[[Trace], None] | None = None,
    ) -> None:
        configuration = self.configuration = Configuration(config)
        self.traces = Traces()
        # The last error of each step of `resume` that failed, by the step and the volume group. The
        # same error is not logged again.
        self.unrecovered: dict[tuple[str, ...], str] = {}
        # Trace the programs that `run` or an lvm2 shell runs, and each operation of the kernel, as
        # steps of their RPC (agent/core/trace.py).
        lvm = replace(lvm, run=trace.traced_run(lvm.run))
        host = replace(
            host,
            run=trace.traced_run(host.run),
            observe=trace.traced_observer(host.observe),
            kernel=trace.traced(host.kernel),
            devices=trace.traced(host.devices),
        )
        # The machine, for extras that read and write devices as a command does.
        self.host = host
        sessions = _sessions(config, host, lvm.run, host.converse) if host.converse else None
        definitions = self.definitions = GroupDefinitions(configuration, host.kernel)
        volume_groups = self.volume_groups = VolumeGroups(
            lvm, host.disks, host.devices, configuration, sessions, listed=definitions.listed
        )
        reports = self.reports = Reports(volume_groups, definitions)
        activator = Activator(volume_groups, host.devices, reports)
        mender = Mender(volume_groups, reports, activator)
        self.node = preflight.Node(
            configuration,
            host.kernel,
            host.run,
            lambda: reports.seen(MONITOR_AGE_SECONDS),
            refused=lambda: reports.refused,
            ignored=lambda: reports.ignored,
        )
        holds = Holds()
        context = self.context = Context(
            configuration,
            host.run,
            host.kernel,
            volume_groups,
            reports,
            activator,
            mender,
            TagWriter(volume_groups, mender),
            host.devices,
            host.stream,
            Allocators(configuration, activator),
            Limiter(host.cgroups, reports, activator, host.kernel),
            Paces(configuration, host.kernel, volume_groups.changed_at),
            ErasePolicy(configuration, host.kernel),
            holds,
            Conflicts(holds),
        )
        self.readiness = Readiness(reports, self.node, context.admission)
        self.freed_eraser = FreedSpaceEraser(context)
        self.pool_remover = PoolRemover(context, freed=self.freed_eraser.start)
        self.eraser = Eraser(
            context,
            emptied=partial(self.pool_remover.remove_after, wait_seconds=0),
            given_up=self.freed_eraser.start,
        )
        self.autoextender = Autoextender(context, self.freed_eraser)
        snapshotter = Snapshotter(
            *(context, self.eraser, self.pool_remover),
            readers=lambda snapshot_id: self.copier.copies_from(snapshot_id),
        )
        self.group_snapshotter = GroupSnapshotter(context, snapshotter, self.eraser)
        self.copier = Copier(context, snapshotter)
        deleter = self.deleter = VolumeDeleter(context, self.eraser, self.pool_remover, self.copier)
        creator = VolumeCreator(context, self.eraser, self.pool_remover, self.copier, deleter)
        listing = Listing(context)
        diagnosis = self.diagnosis = Diagnosis(host.kernel, host.devices, activator)
        self.growth_zeroer = GrowthZeroer(context)
        node_volumes = NodeVolumes(context)
        encrypted = EncryptedDevices(context)
        expander = Expander(context, self.growth_zeroer, node_volumes, encrypted)
        stager = Stager(context, node_volumes, encrypted, expander)
        publisher = Publisher(context, node_volumes, encrypted, stager)
        health = VolumesHealth(context, diagnosis)
        self.storage = StorageHealth(context, diagnosis, self.node)
        repairer = Repairer(context, freed=self.freed_eraser.start)
        self.auto_repair = AutoRepair(context, repairer)
        self.replacement = Replacement(context, repairer, freed=self.freed_eraser.start)
        operator = Operator(
            context,
            repairer,
            self.replacement,
            listing,
            Adopter(context),
            self.traces,
            self._progress,
        )
        self.inline_volumes = InlineVolumes(context, creator, deleter, stager)
        # Load the extras last, because they use all other operations.
        self.extras: dict[str, Extra] = {}
        for name, module in extras.modules("service"):
            self.extras[name] = module.add(self)
        # Optional CSI services that extras add to the plugin.
        self.offered = [kind for extra in self.extras.values() for kind in extra.offered]
        self.interceptor = Interceptor(observe, context.admission, self.traces)
        self._rpc_threads = ThreadPoolExecutor(locks.THREADS, thread_name_prefix="rpc")
        server = self._server = grpc.server(self._rpc_threads, interceptors=[self.interceptor])
        carver_pb2_grpc.add_OperatorServicer_to_server(operator, server)
        identity = Identity(self.readiness, config.driver_name, self.offered)
        csi_pb2_grpc.add_IdentityServicer_to_server(identity, server)
        self.controller = Controller(
            context, creator, deleter, listing, expander, snapshotter, health, Attacher(context)
        )
        csi_pb2_grpc.add_ControllerServicer_to_server(self.controller, server)
        self.group_controller = GroupController(context, self.group_snapshotter)
        csi_pb2_grpc.add_GroupControllerServicer_to_server(self.group_controller, server)
        on_node = (expander, stager, publisher, node_volumes, self.inline_volumes)
        node = Node(context, *on_node, health, self.storage)
        csi_pb2_grpc.add_NodeServicer_to_server(node, server)
        for extra in self.extras.values():
            extra.add_services(server)

    def _progress(self) -> dict[str, str]:
        """The progress of background erasing, copying and zeroing, by volume id."""
        kinds = (self.eraser.jobs, self.copier.jobs, self.growth_zeroer.jobs)
        return {key: text for jobs in kinds for key, text in jobs.progress().items()}

    @property
    def scans(self) -> Sequence[PeriodicJobs]:
        """The periodic scans of volume groups: for autoextension, repair and inline volumes."""
        return self.autoextender.scans, self.auto_repair.scans, self.inline_volumes.scans

    def start(self, path: Path) -> None:
        """Serve on a Unix socket that only root can open, and start to sweep inline volumes."""
        # Restrict the mode by the umask: with chmod(2), any user could connect between bind and
        # chmod.
        umask = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix://{path}")
        finally:
            os.umask(umask)
        self._server.start()
        self.inline_volumes.scans.start()

    def stop(self) -> None:
        """Stop serving: let RPCs in flight end, then end background work at its next safe point.

        An RPC or a job that does not end in time is abandoned: a disk that hangs must not keep the
        process from ending, or the deferred tags of another volume group from being written.
        """
        self.inline_volumes.scans.stop()
        self.context.limiter.task.stop()
        # Stop the extras before waiting for RPCs: a stream of an extra may last for hours.
        for extra in self.extras.values():
            extra.stop()
        stop_server(self._server, self._rpc_threads, _DRAIN_SECONDS, _DRAIN_SECONDS + 1)
        self.volume_groups.stop()
        self.volume_groups.close()


def _sessions(config: Config, host: Host, run: Run, converse: Converse) -> Callable[[str], Session]:
    """Return a function that makes the lvm2 session of a volume group, by the group's name.

    A session is an lvm2 shell that stays open (lvm/session.py). The directory of each session is
    beside the CSI socket, because the host sees that directory, too.
    """
    directory = config.endpoint.parent / "lvm"

    def begin(group: str) -> Session:
        return Session(run, converse, directory / group, root=config.lvm_root, observe=host.observe)

    return begin


def _resume_holds(service: Service, group: str) -> int:
    """Note the volumes of a volume group that are received or were moved; return their number."""
    with service.volume_groups.hold(group):
        return service.context.holds.resume(service.reports, group)


def resume(service: Service, group: str) -> bool:
    """Resume the unfinished work of a volume group, which the group's tags record.

    Return whether all of the work is resumed. If not, as for a group that is absent or refused, the
    caller has to call again later. Raises the errors of reading the group. After an error about one
    volume, thin pool or snapshot, the other ones and the next steps are still tried; the error is
    logged once.
    """
    try:
        report = service.reports.fresh(group)
    except errors.GroupRefused:
        return False  # the volume group logs the refusal, and each RPC returns it
    if group not in report.groups:
        return False
    steps: dict[str, Callable[[str], int]] = {
        "volumes that are received or were moved": partial(_resume_holds, service),
        "wipes": service.eraser.jobs.start_due,
        "empty pools": service.pool_remover.jobs.start_due,
        "groups to be swept": service.freed_eraser.jobs.start_due,
        "groups with a disk that is being emptied": service.replacement.resume,
        "half-made group snapshots": service.group_snapshotter.resume,
        "copies": service.copier.resume,
        "limits of I/O": service.context.limiter.resume,
        "rates of RAID recovery": partial(modify.resume, service.context),
    }
    for extra in service.extras.values():
        steps |= extra.recoveries()
    is_done = True
    for work, step in steps.items():
        key, problem = (work, group), ""
        try:
            count = step(group)
        except Exception as error:
            problem = reasons(error)
        else:
            if count:
                _log.info("going on with %d %s that were left", count, work)
        if problem:
            is_done = False
            if service.unrecovered.get(key) != problem:
                _log.error("%s that were left are not seen to yet: %s", work, problem)
            service.unrecovered[key] = problem
        else:
            service.unrecovered.pop(key, None)
    return is_done

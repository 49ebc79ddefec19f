"""Drive a machine by the model's operations, and tell its state in the model's words."""

import itertools
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import configured
import expect
import grpc
import in_background
from csi_client import Client
from fakes import kubelet
from model import operations as do
from model.operations import Outcome, State, Use
from model.stopping import Switch
from real.any import AnyHost
from real.host import RealHost

from agent.csi import client
from agent.daemon.host import Host
from agent.daemon.server import Service
from agent.groups import quiesce
from agent.settings.settings import Config
from agent.work import locks
from agent.work.group_worker import Jobs
from lvm import report
from lvm.room import Room
from mount import loop, mounts, table
from mount.command import Converse
from proto import csi_pb2 as csi

# The fs_bytes that a file system tells lacks its own metadata: on a real one, that much at most.
_OVERHEAD = 0.5
# Of a pool on a group of some hundred extents, with their spare.
METADATA_EXTENTS = 2


def config(group: str, endpoint: Path, **settings: Any) -> Config:
    """One class, `plain`, on the group, whose volumes may be attached."""
    return configured.carver(endpoint.parent, group, endpoint=endpoint, attach=True, **settings)


@dataclass
class Machine:
    """A host with one group, and the Carver that runs on it now."""

    host: AnyHost
    group: str
    sockets: Path
    switch: Switch = field(default_factory=Switch)
    contexts: dict[str, dict[str, str]] = field(default_factory=dict)
    grace_seconds: float = 30
    # Of the configuration, other than usual.
    settings: dict[str, Any] = field(default_factory=dict)
    # How a shell of lvm2's is had, for each engine one; None where each command is a process.
    converse: Converse | None = None
    # Kubelet's loop devices over raw block volumes, by where these are published.
    held: dict[str, str] = field(default_factory=dict)
    _serial: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._uuid = self._report().uuid.replace("-", "")[:8]
        self.start(self.switch)

    @property
    def is_real(self) -> bool:
        return isinstance(self.host, RealHost)

    def start(self, switch: Switch) -> None:
        """A process of Carver's, whose way to the machine leads through the switch."""
        self.switch = switch
        run = switch.run(self.host.run)
        endpoint = self.sockets / f"{next(self._serial)}.sock"
        lvm = replace(self.host.lvm, run=run)
        host = Host(
            run,
            switch.kernel(self.host.kernel),
            switch.devices(self.host.devices),
            self.host.disks,
            switch.converse(self.converse) if self.converse else None,
            stream=switch.stream(self.host.stream),
            cgroups=switch.cgroups(self.host.cgroups),
        )
        self.service = Service(config(self.group, endpoint, **self.settings), host, lvm)
        service = self.service
        for one in (service.eraser, service.copier):
            one.grace_seconds = self.grace_seconds
        # What is put off is to be seen, and a refusal is not to take its time.
        service.context.locks.grace_seconds = 0
        switch.on_death = lambda: die(service)
        with (
            quiesce.resume_left(host.devices, [self.group]) as held,
            service.context.activator.keep_suspended(held),
        ):
            in_background.look(service, service.eraser.jobs)
            in_background.look(service, service.pool_remover.jobs)
            in_background.look(service, service.freed_eraser.jobs)
            service.group_snapshotter.resume()
            for name in service.volume_groups.names:
                service.copier.resume(name)
            for extra in service.extras.values():
                for resume in extra.recoveries().values():
                    resume()
            service.context.limiter.resume()
        service.start(endpoint)
        self.client = Client(endpoint)
        switch.counting = True

    def stop(self) -> None:
        """End the process in good order."""
        self.client.__exit__(None, None, None)
        self.service.stop()

    def restart(self, switch: Switch | None = None) -> None:
        """End the process in good order and start another; one to be killed waits briefly."""
        self.stop()
        if switch is not None:
            self.grace_seconds = 30 if switch.stop_at < 0 else 0.2
        self.start(switch or Switch())

    def revive(self) -> None:
        """After the process was killed another goes on."""
        self.client.__exit__(None, None, None)
        bury(self.service)
        self.grace_seconds = 30
        self.start(Switch())

    def give_up(self, call: do.Call) -> None:
        """What a CO does that gives a call up; each of it succeeds."""
        volume = getattr(call, "volume", "a")
        staged = next((name for _, name, _, _ in self.state().places), volume)
        undone: tuple[do.Call, ...] = (
            *(do.Unpublish(volume, path) for path in ("target", "other")),
            *(do.Unpublish(one, "staging") for one in (staged, volume)),
            *(do.Delete("copy"), do.DeleteSnapshot("snap"), do.Delete(volume), do.Delete("a")),
        )
        for one in undone:
            assert self.by_kubelet(one) == Outcome("OK"), one

    def call(self, call: do.Call) -> Outcome:
        """Carry out a call over the socket."""
        try:
            return Outcome("OK", self._carry_out(call))
        except grpc.RpcError as error:
            return Outcome(error.code().name)

    def by_kubelet(self, call: do.Call) -> Outcome:
        """A call as kubelet makes it, who holds a raw block volume for as long as it is there."""
        self.let_go(call)
        outcome = self.call(call)
        if isinstance(call, do.Publish) and call.use.is_block and outcome.code == "OK":
            path = self.place(call.path)
            if path not in self.held:
                self.held[path] = kubelet.hold(self.host.kernel, Path(path))
        return outcome

    def let_go(self, call: do.Call) -> None:
        """What kubelet does before it unpublishes: its loop device would keep the path busy."""
        if isinstance(call, do.Unpublish | do.Unstage) and self.place(call.path) in self.held:
            loop.detach(self.host.kernel, self.held.pop(self.place(call.path)))

    def let_all_go(self) -> None:
        """What the end of kubelet's node does."""
        for one in self.held.values():
            loop.detach(self.host.kernel, one)
        self.held.clear()

    def id_of(self, volume: str) -> str:
        """A volume's id, also where there is no such volume."""
        if do.is_inline(volume):
            return volume
        if volume == do.MALFORMED:
            return "no id at all"
        uuid = "00000000" if volume == do.ELSEWHERE else self._uuid
        return f"{self.group}@{uuid}/vol-{volume.strip('<>')}"

    def snapshot_id_of(self, snapshot: str) -> str:
        """A snapshot's id, also where there is no such snapshot."""
        return f"{self.group}@{self._uuid}/snap-{snapshot}"

    def _source(self, source: tuple[str, str]) -> csi.VolumeContentSource | None:
        kind, name = source
        if kind == do.OF_SNAPSHOT:
            return client.of_snapshot(self.snapshot_id_of(name))
        return client.of_volume(self.id_of(name)) if kind else None

    def place(self, path: str) -> str:
        """Where a path of the model's is on the machine."""
        return str(self.host.directory / path)

    def _carry_out(self, call: do.Call) -> object:
        volume_id = self.id_of(call.volume) if isinstance(call, do.OfVolume) else ""
        path = self.place(call.path) if isinstance(call, do.AtPath) else ""
        match call:
            case do.Create():
                made = self.client.create(
                    call.volume,
                    call.required_bytes,
                    _capability(call.use),
                    limit_bytes=call.limit_bytes,
                    parameters=dict(call.parameters),
                    source=self._source(call.source),
                    mutable=dict(call.mutable),
                )
                assert made.volume_id == volume_id
                self.contexts[call.volume] = dict(made.volume_context)
                return made.capacity_bytes, dict(made.volume_context)
            case do.Modify():
                self.client.modify(volume_id, dict(call.mutable))
            case do.Attach():
                use = _capability(call.use)
                return self.client.attach(volume_id, call.node, use, read_only=call.read_only)
            case do.Detach():
                self.client.detach(volume_id, call.node)
            case do.Delete():
                self.client.delete(volume_id)
            case do.Get():
                return self.client.volume(volume_id).volume.capacity_bytes
            case do.Validate():
                return self.client.confirms(volume_id, _capability(call.use))
            case do.Volumes():
                return sorted(self._volumes(call.page))
            case do.Snapshot():
                taken = self.client.snapshot(call.snapshot, volume_id, {"size": "100%"})
                assert taken.ready_to_use
                assert taken.snapshot_id == self.snapshot_id_of(call.snapshot)
                return taken.size_bytes
            case do.DeleteSnapshot():
                self.client.delete_snapshot(self.snapshot_id_of(call.snapshot))
            case do.Snapshots():
                of = self.id_of(call.volume) if call.volume else ""
                return sorted(
                    (
                        one.snapshot_id.partition("/snap-")[2],
                        one.source_volume_id.partition("/vol-")[2],
                        one.size_bytes,
                    )
                    for one in self.client.snapshots(volume_id=of)
                )
            case do.Capacity():
                capacity = self.client.capacity()
                assert capacity.maximum_volume_size.value == capacity.available_capacity
                return capacity.available_capacity
            case do.Expand():
                request = csi.ControllerExpandVolumeRequest(
                    volume_id=volume_id, capacity_range=_size(call)
                )
                grown = self.client.controller.ControllerExpandVolume(request)
                return grown.capacity_bytes, grown.node_expansion_required
            case do.Stage():
                use, secrets = _capability(call.use), _secrets(call.key)
                self.client.stage(self._volume(call.volume), path, use, secrets)
            case do.Unstage():
                self.client.unstage(volume_id, path)
            case do.Publish():
                self.client.publish(
                    self._volume(call.volume),
                    self.place(call.staging),
                    self.place(call.path),
                    _capability(call.use),
                    read_only=call.read_only,
                )
            case do.PublishInline():
                size = {"size": str(call.required_bytes)} if call.required_bytes else {}
                use = _capability(call.use)
                self.client.publish_inline(volume_id, path, size, use, read_only=call.read_only)
            case do.Unpublish():
                self.client.unpublish(volume_id, path)
            case do.Stats():
                return self.client.stats(volume_id, path).usage[0].total
            case do.Health():
                ask = self.client.node_health if call.by_node else self.client.volume_health
                assert ask(volume_id).volume_id == volume_id
            case do.NodeExpand():
                wire = csi.NodeExpandVolumeRequest(
                    volume_id=volume_id,
                    volume_path=path,
                    capacity_range=_size(call),
                    secrets=_secrets(call.key),
                    volume_capability=_capability(do.READS) if call.reads else None,
                )
                return self.client.node.NodeExpandVolume(wire).capacity_bytes
        return None

    def _volumes(self, page: int) -> Iterator[tuple[str, int]]:
        token = ""
        while True:
            request = csi.ListVolumesRequest(max_entries=page, starting_token=token)
            answer = self.client.controller.ListVolumes(request)
            for entry in answer.entries:
                name = entry.volume.volume_id.partition("/vol-")[2]
                yield name, entry.volume.capacity_bytes
            if not (token := answer.next_token):
                return

    def _volume(self, name: str) -> csi.Volume:
        return csi.Volume(volume_id=self.id_of(name), volume_context=self.contexts.get(name, {}))

    def same(self, call: do.Call, answer: Outcome, expected: Outcome) -> bool:
        """Whether an answer is as expected; a real file system's size is less its metadata."""
        if isinstance(call, do.Stats) and self.is_real and answer.code == expected.code == "OK":
            assert isinstance(answer.value, int)
            assert isinstance(expected.value, int)
            return expected.value * _OVERHEAD < answer.value <= expected.value
        return answer == expected

    # Behind Carver's back

    def deactivate(self, volume: str) -> None:
        self.host.deactivate(self.group, _logical(volume))

    def overwrite(self, volume: str, contents: str) -> None:
        device = self.host.devices.find(self.group, _logical(volume))
        assert device is not None
        self.host.erase(device.path)
        if contents:
            self.host.write(device.path, contents)

    def reboot(self) -> None:
        """End the process; let no mount, loop device over a volume, or device stay."""
        self.stop()
        kernel = self.host.kernel
        self.let_all_go()
        for mount in reversed(table.read(kernel).under(str(self.host.directory))):
            kernel.unmount(mount.path)
        for name, logical in self._report().volumes.items():
            if logical.is_copy_on_write:
                continue  # it goes with its origin
            if (device := self.host.devices.find(self.group, name)) is not None:
                mapping = self.host.devices.mapping(device)
                for one in loop.loop_devices_over(kernel, (mapping or device).number):
                    loop.detach(kernel, one)
                if mapping is not None:
                    self.host.run("cryptsetup", "close", "--", mapping.name)
                self.host.devices.close_leftovers(device)
                self.host.deactivate(self.group, name)
        self.start(Switch())

    # What there is

    def state(self) -> State:
        """What is seen of Carver on the machine, by its own means and not by asking Carver."""
        kernel, group = self.host.kernel, self._settled()
        names, places, loops, mappings = {}, [], [], []
        # A pool is no volume; its free bytes are those that it has not promised.
        volumes = [one for one in group.volumes.values() if "pool" not in one.layout]
        for logical in volumes:
            name = logical.own_tags.get("name", f"?{logical.name}")
            device = self.host.devices.find(self.group, logical.name)
            if device is not None and (mapping := self.host.devices.mapping(device)) is not None:
                device = mapping
                mappings.append((name, kernel.device_size_bytes(mapping.path)))
            if device is not None:
                over = loop.loop_devices_over(kernel, device.number)
                names[device.number] = name
                names |= {kernel.device_number(one): name for one in over}
                loops += [(name, len(over))] if over else []
        for mount in table.read(kernel).under(str(self.host.directory)):
            kind = "fs" if mount.device in names else "block"
            number = mount.device if kind == "fs" else mounts.node(kernel, mount.path)
            volume = names.get(number, "?") if number is not None else "?"
            places.append((Path(mount.path).name, volume, kind, mount.read_only))
        return State(
            volumes=do.ordered(_described(volumes)),
            places=do.ordered(places),
            loops=do.ordered(loops),
            entries=do.ordered((one.name, _kind(one)) for one in self.host.directory.iterdir()),
            free_bytes=self._free_extents(group) * group.extent_size_bytes,
            mappings=do.ordered(mappings),
            limits=do.ordered(
                (names.get(number, "?"), one.writes)
                for number, one in self.host.cgroups.limits().items()
            ),
            attached=do.ordered(
                (one.own_tags["name"], one.own_tags["attached"])
                for one in volumes
                if "attached" in one.own_tags
            ),
        )

    def _free_extents(self, group: report.Group) -> int:
        """What new volumes can have: by what a group has, or by what its pool may promise."""
        if not any(one.layout.is_thin for one in self.settings.get("classes", ())):
            return Room(group).free_extents
        pool = group.volumes.get("pool-plain")
        if pool is None:
            return Room(group).free_extents - METADATA_EXTENTS
        promised = sum(one.size_bytes for one in group.volumes.values() if one.pool)
        return Room(group).free_extents + (pool.size_bytes - promised) // group.extent_size_bytes

    def _settled(self) -> report.Group:
        """A report with which the devices agree: work behind an answer may end between the two."""
        for _ in range(20):
            group = self._report()
            every = [one for one in group.volumes.values() if "pool" not in one.layout]
            found = {one.name: self.host.devices.find(self.group, one.name) for one in every}
            # Which lvm2 calls active, and cannot be used: it died before the device had a table.
            half_made = {
                one.name: replace(one, active=False)
                for one in every
                if found[one.name] is None and self._is_half_made(one.name)
            }
            group = replace(group, volumes={**group.volumes, **half_made})
            differing = [
                one for one in found if group.volumes[one].active != (found[one] is not None)
            ]
            if not differing:
                return group
        raise AssertionError(f"lvm2 and the devices differ on {differing}")

    def _is_half_made(self, name: str) -> bool:
        """Whether a volume that has no device that can be used has one to device-mapper."""
        return name in self.host.devices.active(self.group)

    def _report(self) -> report.Group:
        return report.read(self.host.lvm).group(self.group)


def _described(
    volumes: Iterable[report.LogicalVolume],
) -> Iterator[tuple[str, int, str, str, bool, str, int]]:
    for one in volumes:
        own_tags = one.own_tags
        name = own_tags.get("name", f"?{one.name}")
        formatted, state = own_tags.get("formatted", ""), own_tags.get("state", "")
        ahead, writes = str(one.tuning.read_ahead_bytes), one.tuning.write_iops or 0
        yield name, one.size_bytes, formatted, state, one.active, ahead, writes


def die(service: Service) -> None:
    """What the end of the process itself would do: nothing answers, or is tried again."""
    # At once: a call that waits for the step that dies must not answer.
    service._server.stop(None)
    # Not from here: a look or a job that ends may wait for the thread that dies.
    threading.Thread(target=_end_work, args=[service], daemon=True).start()


def _end_work(service: Service) -> None:
    # A look a minute later would be met by whatever test is under way by then.
    service.inline_volumes.scans.stop()
    service.context.workers.halt()


def bury(service: Service) -> None:
    """Wait until a dead process has closed the volumes that it read or overwrote, as its end does.

    A stream that still reads would keep its snapshots from being deactivated by the next process.
    """
    service._server.stop(0).wait()
    # What a stream has open is closed when it gives its place back.
    streams = service.context.admission.streams
    expect.soon(lambda: streams.free_slots == locks.STREAMS)
    service.context.workers.stop(60)


def try_soon(service: Service) -> None:
    """What fails behind an answer is tried again while a test looks on, not a minute later."""
    for jobs in behind(service):
        jobs.retry_seconds = jobs.soon_seconds = 0.05


def behind(service: Service) -> list[Jobs[Any]]:
    """What goes on behind answers: copies, their bridges, what is undone or overwritten."""
    bridges, undone = service.copier.bridges, service.group_snapshotter.undone
    return [service.copier.jobs, bridges, undone, *_overwriting(service)]


def _overwriting(service: Service) -> list[Jobs[Any]]:
    workers = (service.eraser, service.growth_zeroer, service.freed_eraser, service.pool_remover)
    return [one.jobs for one in workers]


def _size(call: do.Expand | do.NodeExpand) -> csi.CapacityRange:
    return csi.CapacityRange(required_bytes=call.required_bytes, limit_bytes=call.limit_bytes)


def _secrets(key: str) -> dict[str, str]:
    return {"passphrase": key} if key else {}


def _logical(volume: str) -> str:
    """The logical volume's name."""
    return f"{'eph' if do.is_inline(volume) else 'vol'}-{volume}"


def _kind(path: Path) -> str:
    mode = path.lstat().st_mode
    # A bound device hides the file that it is bound to.
    return "dir" if stat.S_ISDIR(mode) else "file"


def _capability(use: Use) -> csi.VolumeCapability:
    mode = csi.VolumeCapability.AccessMode.Mode.Value(use.mode)
    return client.block(mode) if use.is_block else client.mounted(use.fs_type, mode=mode)


NewMachine = Callable[[], Machine]

"""CreateVolume: create a volume completely, or not at all. GetCapacity: the room of a device class.

The logical volume's name is a function of the CO's name, so a repeated call finds the volume of an
earlier call, whichever process made it. One lvcreate creates the logical volume with its tags and
its device.

A source in another volume group is prepared with that group locked
(`VolumeCreator._reserve_source`), and the volume is created afterwards with its own group locked. A
process that is killed in between leaves at most a bridge: a temporary snapshot of the source
volume, from which the new volume is copied (agent/operations/clone.py).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.operations import block_sizes, clone, modify, plan
from agent.operations.clone import Copier, Copy
from agent.operations.delete import VolumeDeleter
from agent.operations.erase_deleted import Eraser
from agent.operations.remove_pool import PoolRemover
from agent.requests.parameters import Parameters
from agent.requests.requests import VOLUME, CreateVolume, GetCapacity, SizeRange, Source
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from agent.volumes import backing, users, volume_states
from agent.volumes.allocation import Allocator, pool_name
from agent.volumes.context import Context
from agent.volumes.records import Snapshot, Volume
from agent.volumes.report_age import EveryGroup, Fresh
from agent.volumes.volume_states import Call, EndedBy, Outcome
from lvm import lvm_errors as lvm_errors
from lvm import report, volumes
from lvm.active_devices import Device
from lvm.tuning import AS_IT_IS, Tuning
from lvm.volumes import New


@dataclass(frozen=True)
class Capacity:
    """Room for new volumes of a device class, in bytes: in total, and for one volume."""

    available_bytes: int
    maximum_volume_bytes: int
    minimum_volume_bytes: int


@dataclass(frozen=True)
class CreatedVolume:
    """A volume that was found or created, and the job that fills it.

    The job is None for a volume that has its contents.
    """

    volume: Volume
    filling: Copy | None = None


# Check that is called before a volume is created, with the state of all volume groups and the
# volume's size in bytes. The lock of the volume's group is held. An exception prevents the volume.
Admit = Callable[[EveryGroup, int], None]


@dataclass(frozen=True)
class _Request:
    """A CreateVolume request, with all that follows from it and from the configuration.

    `config` is the configuration when the call began, by which the whole call acts. `pool` is the
    name of the class's thin pool, which a class without thin volumes does not have.
    """

    call: CreateVolume
    config: Config
    device_class: DeviceClass
    allocator: Allocator
    pool: str
    admit: Admit | None


@dataclass(frozen=True)
class _SourceToReserve:
    """A source in another volume group that must be reserved before the new volume is created.

    `group` is the volume group of the new volume. `VolumeCreator._reserve_source` reserves the
    source.
    """

    source: Source
    group: report.Group


@dataclass(frozen=True)
class _ReservedSource:
    """A source in another volume group that is reserved for the new volume.

    `origin` is the source as it was when it was reserved. `snapshot` is what is copied: the origin
    itself, or its bridge snapshot. `disks` are the UUIDs of the disks of the new volume's group
    when the contents were found to be usable on them.
    """

    origin: Snapshot | Volume
    snapshot: Snapshot
    disks: frozenset[str]


@dataclass(frozen=True)
class _States:
    """The states that a new volume is created by, read while the lock of its group is held.

    `group` is the new volume's group in the report `fresh`.
    """

    fresh: Fresh
    all_groups: EveryGroup
    group: report.Group


# Errors that no repeated call can overcome on this node: the source of a new volume is lost, or not
# on this node.
_FOR_EVER = (errors.NoSuchSnapshot, errors.SourceLost, errors.PerhapsOnAnotherNode)

# Errors that no repeated call can overcome on this node while a volume is filled: the errors in
# _FOR_EVER, and a lack of room for the volume's data. Another node may have the room.
_NOT_HERE = (*_FOR_EVER, errors.NoRoom, lvm_errors.NoSpace, lvm_errors.MetadataFull)


class VolumeCreator:
    """Creates volumes in this node's volume groups."""

    def __init__(
        self,
        context: Context,
        eraser: Eraser,
        pool_remover: PoolRemover,
        copier: Copier,
        deleter: VolumeDeleter,
    ) -> None:
        self._configuration = context.configuration
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._eraser = eraser
        self._pool_remover = pool_remover
        self._copier = copier
        self._deleter = deleter
        self._holds = context.holds
        self._limiter, self._conflicts = context.limiter, context.conflicts
        self._allocators = context.allocators

    def create(self, call: CreateVolume, admit: Admit | None = None) -> CreatedVolume:
        """Create a volume, or find the one that an earlier call created.

        If the volume still lacks its contents, the result has the job that fills it, and `complete`
        waits for that job.

        - Runs two commands: a report, and lvcreate, which also tags and activates. The first thin
          volume of a class takes up to two more, for its pool. A copy of another volume takes one
          more, for its bridge snapshot, and so does a RAID with a minimum recovery rate without a
          maximum.
        - Raises PerhapsOnAnotherNode if the class's group or the source is not on this node: only
          after that error does a scheduler choose another node.
        - Raises OperationPending while a volume of this name is being erased, or was erased in
          part, and while a chunk of the class's empty thin pool is being zeroed.
        """
        config = self._configuration.now
        if not call.topology.includes(config.here):
            raise errors.ExcludedByTopology(config.node_id)
        device_class = self.class_for(config, call.own_name, call.parameters)
        if call.tuning != AS_IT_IS:
            modify.check(call.tuning, device_class.layout)
            self._limiter.require(call.tuning)
        if call.source is not None:
            # Raise the error for a malformed source id before anything is read.
            ids.group_of(call.source.id)
            if call.source.kind == VOLUME:
                origin = backing.of_id(call.source.id)
                with self._limiter.lift(origin):
                    users.flush(self._kernel, self._activator, origin)
        allocator, pool = self._allocators.of(device_class), pool_name(device_class.name)
        request = _Request(call, config, device_class, allocator, pool, admit)
        make = partial(self._find_or_create, request)
        return self._pool_remover.retry_holding(device_class.group, pool, make)

    def _find_or_create(self, request: _Request) -> CreatedVolume:
        """Create or find a volume, while the lock of only one volume group is held at a time.

        A source in another volume group is reserved first. If the volume cannot be created, its
        bridge snapshot is removed.
        """
        # Begin with the volume group in which an earlier call may have created the volume: the
        # configuration may have given the device class another volume group since.
        earlier_group = self._volume_groups.unconfigured_group_of(request.call.own_name)
        group_name, reserved_source = earlier_group or request.device_class.group, None
        with ExitStack() as undo, ExitStack() as promises:
            while True:
                self._reports.await_others(group_name)
                match self._create(request, group_name, reserved_source):
                    case CreatedVolume() as created:
                        undo.pop_all()
                        return created
                    case _SourceToReserve() as source_to_reserve:
                        reserved_source = self._reserve_source(
                            request, source_to_reserve, undo, promises
                        )
                    case str(elsewhere):
                        group_name = elsewhere

    def class_for(
        self, config: Config, own_name: str, parameters: Parameters, field: str = "parameters"
    ) -> DeviceClass:
        """Return the device class by which a volume is or was created.

        Runs no command, unless the configuration lacks the class or has the class without the
        requested parameters: in these cases the class of an existing volume is returned, whose
        logical volume is `own_name`. Raises NotAllowed, BadField.
        """
        try:
            return plan.device_class(config, field, parameters)
        except errors.BadField:
            existing = self._reports.search(
                lambda volume: volume.name == own_name and not volume.is_doomed
            )
            if existing is None:
                raise
            return plan.class_of(config, existing)

    def _create(
        self, request: _Request, group_name: str, reserved_source: _ReservedSource | None
    ) -> CreatedVolume | _SourceToReserve | str:
        """Create or find a volume, while the lock of its volume group is held.

        Returns the volume, a source in another volume group that must be reserved first, or the
        name of another volume group that must be locked instead. A source in another group is not
        read here.
        """
        call, device_class = request.call, request.device_class
        is_across = call.source is not None and ids.group_of(call.source.id) != group_name
        with ExitStack() as undo, self._volume_groups.hold(group_name):
            with _absence_as_perhaps_elsewhere():
                state = self._mender.mend(group_name)
            all_groups = self._reports.every_group(state)
            existing = all_groups.find_named(call.own_name)
            if existing is not None and existing.group.name != group_name:
                # Go on in the volume group of the existing volume: the volume was created by
                # another device class, or by this class while the class had another volume group.
                return existing.group.name
            if existing is not None:
                # Raise an error if the existing volume is being erased, even if the volume's tag
                # does not say so yet.
                self._conflicts.check_jobs(Call.CREATE, str(existing.id))
            if existing is not None and volume_states.meets(Call.CREATE, existing, Outcome.ANEW):
                # Remove the existing volume, which lvm2 made only in part. Crash point: lvm2 was
                # killed while it created a RAID, which was never active.
                volumes.remove(self._volume_groups.lvm(group_name), group_name, existing.name)
                state, existing = self._mender.mend(group_name), None
                all_groups = self._reports.every_group(state)
            if existing is None and group_name != device_class.group:
                return device_class.group
            if existing is None and (
                why := self._volume_groups.reason_unsure(all_groups.silent, call.own_name)
            ):
                # Create no volume while a volume group that may have the volume, from an earlier
                # call, does not answer.
                raise errors.GroupBusy(f"volume {call.name!r}", why)
            source, source_id = None, ""
            try:
                if existing is None:
                    with _absence_as_perhaps_elsewhere():
                        group = self._reports.group(state, device_class.group)
                    is_taken = (
                        reserved_source is not None and _disks(group) <= reserved_source.disks
                    )
                    if is_across and call.source is not None and not is_taken:
                        return _SourceToReserve(call.source, group)
                    states = _States(state, all_groups, group)
                    volume, source = self._make(request, states, undo, reserved_source)
                    source_id = "" if source is None else str(source.id)
                else:
                    volume = existing
                    self._finish(request, volume)
                # Crash point: the volume has the tag `copying`; the next call or the next start of
                # Carver fills the volume anew.
                if volume.ended_by is not EndedBy.COPIER:
                    return CreatedVolume(volume)
                if existing is not None and not is_across:
                    with _absence_as_perhaps_elsewhere():
                        source = self._copier.source_of(state, volume)
                if is_across:
                    return CreatedVolume(volume, self._copier.start_across(volume, source_id))
                return CreatedVolume(volume, self._copier.start(volume, source))
            except _FOR_EVER as error:
                if existing is None:
                    raise
                final_error = error
        # Delete the incomplete volume: its source is lost, and after this error the caller repeats
        # no call for the volume.
        self._deleter.delete(str(existing.id))
        raise final_error

    def _reserve_source(
        self,
        request: _Request,
        source_to_reserve: _SourceToReserve,
        undo: ExitStack,
        promises: ExitStack,
    ) -> _ReservedSource:
        """Reserve a source in another volume group for the new volume.

        A request that cannot be met is refused before a bridge snapshot is created. Only the
        source's group is locked, and no group while a device is read. Raises the errors of `_make`.
        """
        group, source_group = source_to_reserve.group, ids.group_of(source_to_reserve.source.id)
        with self._volume_groups.hold(source_group):
            _, origin = self._origin(source_to_reserve.source)
        size_bytes, _, _ = self._planned(request, group, origin)
        self._require_room(request, group, size_bytes)
        self._require_blocks(origin, group)
        with self._volume_groups.hold(source_group):
            state, reread = self._origin(source_to_reserve.source)
            if _uuid(reread) != _uuid(origin):
                # Let the caller repeat the call, since the source was replaced by hand, and its new
                # contents were not checked.
                raise errors.OperationPending(str(reread.id))
            # Crash point: the bridge snapshot exists without its volume; the next call uses the
            # bridge, or the next start of Carver removes it.
            snapshot = self._copier.prepare(state, request.call.name, reread, group)
            if snapshot.is_bridge:
                undo.callback(self._copier.remove_bridges, str(snapshot.id))
            promises.enter_context(self._copier.keep_source(snapshot, request.call.name))
        return _ReservedSource(clone.origin_at_snapshot(reread, snapshot), snapshot, _disks(group))

    def _origin(self, source: Source) -> tuple[Fresh, Snapshot | Volume]:
        """Return the source of a new volume, and the fresh state of the source's volume group.

        The caller holds that group's lock. Raises the errors of `_found`, and PerhapsOnAnotherNode
        if the group is not on this node.
        """
        with _absence_as_perhaps_elsewhere():
            state = self._mender.mend(ids.group_of(source.id))
        return state, self._find_source(state, source)

    def _find_source(self, state: Fresh, source: Source) -> Snapshot | Volume:
        """Return the source of a new volume, if a volume may be copied from that source now.

        The caller holds the lock of the source's volume group. Raises PerhapsOnAnotherNode and the
        errors of `clone.find`.
        """
        with _absence_as_perhaps_elsewhere():
            origin = clone.find(self._reports, state, source)
        self._conflicts.check(Call.COPY_FROM, str(origin.id))
        return origin

    def complete(
        self, created: CreatedVolume, hold: Callable[[], AbstractContextManager[object]]
    ) -> Volume:
        """Wait until a volume has its contents; raise Copying before the caller's deadline.

        To be called without the locks of `create`. `hold` locks the new volume's id. Under that
        lock the volume is deleted if this node cannot fill it: if its source is lost or not on this
        node, or if there is no room.
        """
        if created.filling is None:
            return created.volume
        try:
            with _absent_source_as_perhaps_elsewhere():
                return self._copier.wait(created.filling)
        except _NOT_HERE:
            with hold():
                # Delete the volume, which cannot be filled, unless a call deleted it meanwhile, or
                # began to create it anew.
                if self._copier.jobs.of(created.filling.key) is created.filling:
                    self._deleter.delete(created.filling.key)
            raise

    def _finish(self, request: _Request, volume: Volume) -> None:
        """Complete an existing volume as a CreateVolume request asks for it.

        Sets mutable parameters, and adds a cache that is missing. Raises Incompatible if the volume
        differs from the request, OperationPending while the volume is being erased, and Receiving
        or Moved if the volume is being received or was moved to another node.
        """
        volume_states.require(Call.CREATE, volume)
        plan.require_same(request.call, volume)
        lvm = self._volume_groups.lvm(volume.group.name)
        if tag.CACHE in volume.own_tags:
            # Use the device class as it was when the volume was created; the configuration may have
            # changed since.
            device_class = plan.class_of(request.config, volume)
            # Crash point: an earlier call created the volume, and died before it attached the cache
            # or set the recovery rates. Complete these now.
            self._allocators.of(device_class).finish(lvm, volume)
        # Crash point: the parameters are in the metadata of the volume group, and the I/O limits
        # among them are not set in the kernel; the next start of Carver, or a repeated call, sets
        # the limits.
        #
        # The bound is the present one, not that of the call's configuration: a reload sets its
        # bound on each volume while it holds the group's lock, which this call holds now.
        bound_kib = self._configuration.now.recovery_bound_kib(volume.group.name)
        self._limiter.apply(volume, modify.ensure(lvm, volume, request.call.tuning, bound_kib))

    def _make(
        self,
        request: _Request,
        states: _States,
        undo: ExitStack,
        reserved_source: _ReservedSource | None,
    ) -> tuple[Volume, Snapshot | None]:
        """Create a volume; return it with the snapshot to copy from, if any.

        `undo` removes the bridge snapshot or an empty pool again if the volume cannot be created.
        Raises NoRoom, PerhapsOnAnotherNode if the source is not on this node, and PoolBeingZeroed
        while the class's thin pool is being zeroed.
        """
        call, state, group = request.call, states.fresh, states.group
        origin = None
        if reserved_source is not None:
            origin = reserved_source.origin
        elif call.source is not None:
            origin = self._find_source(state, call.source)
        size_bytes, own_tags, tuning = self._planned(request, group, origin)
        if request.admit is not None:
            request.admit(states.all_groups, size_bytes)
        allocator, pool = request.allocator, request.pool
        is_shared = origin is not None and clone.is_in(origin, group, pool)
        # Count the bridge snapshot of a copy in the same volume group, which is a further logical
        # volume until the copy is ready.
        takes_bridge = (
            reserved_source is None
            and origin is not None
            and not is_shared
            and self._copier.takes_bridge(state, call.name, origin)
        )
        self._require_room(request, group, size_bytes, int(takes_bridge))
        lvm, name = self._volume_groups.lvm(group.name), call.own_name
        volume_id = VolumeId.of(group, name)
        id_text = str(volume_id)
        # Forget the job that erased an earlier volume with this id: the report proves that no such
        # volume exists.
        self._eraser.jobs.forget(id_text)
        if origin is not None and is_shared:
            allocator.make_room(lvm, group)
            volume = clone.share(lvm, origin, name, size_bytes, own_tags, tuning)
            self._holds.remove_note(id_text)
            return volume, None
        source = None if reserved_source is None else reserved_source.snapshot
        if origin is not None and source is None:
            # Crash point: the bridge snapshot exists without its volume; the next call uses the
            # bridge, or the next start of Carver removes it.
            source = self._copier.prepare(state, call.name, origin, group)
            if source.is_bridge:
                undo.callback(self._copier.remove_bridges, str(source.id))
            origin = clone.origin_at_snapshot(origin, source)
            size_bytes, own_tags, tuning = self._planned(request, group, origin)
        if source is not None and source.is_bridge:
            own_tags |= {tag.BRIDGE: str(source.time_nanoseconds)}
        if request.device_class.pool is not None:
            # Crash point: the thin pool exists without a volume; the next call uses the pool, or
            # the next start of Carver removes it.
            self._pool_remover.remove_zeroing_volume(group, pool)
            undo.callback(self._pool_remover.remove_if_empty, group.name, pool)
        settable_tuning = tuning.for_new()
        allocator.create(lvm, group, New(name, size_bytes, own_tags, settable_tuning))
        undo.pop_all()
        # Allow calls to use the id of the new volume only now that the volume exists: another node
        # might have sent a volume with this id in between.
        self._holds.remove_note(id_text)
        if settable_tuning != tuning:
            modify.complete(lvm, group.name, name, tuning)
        return Volume(volume_id, backing.of(group, name), group, size_bytes, own_tags), source

    def _planned(
        self, request: _Request, group: report.Group, origin: Snapshot | Volume | None
    ) -> tuple[int, dict[str, str], Tuning]:
        """Return the size in bytes, the tags and the mutable parameters of a new volume.

        The bound of RAID recovery is the present one (`_finish`). Raises BadField or BadSize for a
        request that cannot be met.
        """
        call, device_class = request.call, request.device_class
        plan.check_stripe_size(device_class, group)
        size_bytes, own_tags = plan.size_and_tags(
            call, device_class, request.allocator, group, origin
        )
        tuning = modify.bounded(self._configuration.now, device_class, call.tuning)
        return size_bytes, own_tags | tuning.tags(), tuning

    def _require_room(
        self, request: _Request, group: report.Group, size_bytes: int, further_count: int = 0
    ) -> None:
        """Raise NoRoom or PoolBeingZeroed, before anything is created, if a volume has no room.

        PoolBeingZeroed is for a thin pool that is being zeroed. `further_count` is the number of
        further logical volumes that the group gets together with the volume.
        """
        allocator = request.allocator
        if size_bytes > (maximum := allocator.maximum_bytes(group, further_count)):
            purpose = allocator.reason_full(group, further_count) or allocator.purpose(group)
            raise errors.NoRoom(group.name, size_bytes, maximum, purpose)
        if request.device_class.pool is not None:
            self._pool_remover.require_kept(group.name, request.pool)

    def _require_blocks(self, origin: Snapshot | Volume, group: report.Group) -> None:
        """Raise BadField if a source's contents cannot be used on another volume group's disks.

        Runs a command or two only if the disks have larger logical blocks and the source is
        inactive. No group is locked while a device is read.
        """
        group_bytes = block_sizes.of_group(self._kernel, group)
        if group_bytes <= block_sizes.of_group(self._kernel, origin.group):
            return
        device = self._activated(origin)
        contents_bytes = block_sizes.of_contents(self._kernel, origin.own_tags, device.path)
        if why := block_sizes.problem(contents_bytes, group, group_bytes):
            raise errors.BadField("volume_content_source", f"cannot copy {str(origin.id)!r}: {why}")

    def _activated(self, origin: Snapshot | Volume) -> Device:
        """Activate the source of a new volume for reading without a lock; return its device.

        The caller holds the lock of the source's id. The source is left active, as by a copy:
        deactivating it might take the device from a copy that began meanwhile, or from a
        NodeStageVolume call.
        """
        with self._volume_groups.hold(origin.group.name):
            if isinstance(origin, Volume):
                return self._activator.activate(origin)
            return self._activator.activate_snapshot(origin)

    def capacity(self, call: GetCapacity) -> Capacity:
        """Return the sizes that CreateVolume with the same parameters could create now.

        Runs one command, or none if nothing can be created here. The sizes are zero if this node
        does not have the requested topology, parameters, device class or volume group: after an
        error the external-provisioner would keep the sizes of the last response. Raises PoolSilent
        if the thin pool does not report how full it is; the last response is then the best that is
        known.
        """
        config = self._configuration.now
        node_segments = config.here
        if (
            call.unsupported
            or any(node_segments.get(key) != value for key, value in (call.segments or {}).items())
            or config.device_class(call.parameters.device_class) is None
        ):
            return Capacity(0, 0, 0)
        device_class = plan.device_class(config, "parameters", call.parameters)
        parameters = plan.with_defaults(call.parameters, call.capabilities, device_class)
        try:
            with _absence_as_perhaps_elsewhere():
                group = self._reports.group(
                    self._reports.fresh(device_class.group), device_class.group
                )
        except errors.PerhapsOnAnotherNode:
            return Capacity(0, 0, 0)
        plan.check_stripe_size(device_class, group)
        allocator = self._allocators.of(device_class)
        header = plan.header_bytes(device_class, allocator, group)
        maximum = max(0, allocator.maximum_bytes(group) - header)
        smallest = SizeRange(1)
        minimum = plan.size_bytes(
            smallest, call.capabilities, parameters, group, device_class.layout, header
        )
        # Return the size of the largest volume as the available size: several smaller volumes could
        # have more together, but that is not promised.
        return Capacity(maximum, maximum, minimum - header)


def _disks(group: report.Group) -> frozenset[str]:
    """Return the UUIDs of a volume group's disks."""
    return frozenset(disk.uuid for disk in group.disks)


def _uuid(origin: Snapshot | Volume) -> str:
    """Return the UUID of a source's logical volume."""
    return origin.group.volume(origin.name).uuid


@contextmanager
def _absent_source_as_perhaps_elsewhere() -> Iterator[None]:
    """Raise PerhapsOnAnotherNode if the `with` block finds that a copy's source is elsewhere.

    The block raises OtherGroup if the volume group of the source is not on this node.
    """
    try:
        yield
    except errors.OtherGroup as error:
        raise errors.PerhapsOnAnotherNode(str(error)) from None


@contextmanager
def _absence_as_perhaps_elsewhere() -> Iterator[None]:
    """Raise PerhapsOnAnotherNode if the `with` block finds that a volume group is not on this node.

    A volume group that is refused counts as not on this node.
    """
    try:
        yield
    except (errors.OtherGroup, errors.GroupRefused, lvm_errors.GroupMissing) as error:
        raise errors.PerhapsOnAnotherNode(str(error)) from None

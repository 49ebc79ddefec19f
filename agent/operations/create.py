"""CreateVolume: a volume is made whole, or is not there. GetCapacity: how much room there is.

The logical volume's name is a function of the CO's name, so a repeated call finds what an earlier
one made, whatever process made it. One lvcreate makes the logical volume, its tags and its device.

A source in another group is taken with that group held (`VolumeCreator._take`), and the volume is
made afterwards with its own group held. Killed in between, the process leaves a bridge at most.
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
from agent.volumes import backing, users, volume_states
from agent.volumes.allocation import pool_name
from agent.volumes.context import Context
from agent.volumes.records import Snapshot, Volume
from agent.volumes.report_age import Every, Fresh
from agent.volumes.volume_states import Call, Ender, Outcome
from lvm import lvm_errors as lvm_errors
from lvm import names, report, volumes
from lvm.active_devices import Device
from lvm.tuning import Tuning
from lvm.volumes import New


@dataclass(frozen=True)
class Capacity:
    """Sizes in bytes of the volumes that can be made now."""

    available_bytes: int
    maximum_volume_bytes: int
    minimum_volume_bytes: int


@dataclass(frozen=True)
class Made:
    """A volume, and the job that fills it, unless it has its contents."""

    volume: Volume
    filling: Copy | None = None


@dataclass(frozen=True)
class _Untaken:
    """A source in another group, which is to be taken before the volume is made in this one."""

    source: Source
    group: report.Group


@dataclass(frozen=True)
class _Taken:
    """A source in another group, promised to the new volume; `origin` as it was when taken.

    `snapshot` is what is copied: the origin itself, or its bridge. `disks` are those of the new
    volume's group (UUIDs), on which the contents can lie.
    """

    origin: Snapshot | Volume
    snapshot: Snapshot
    disks: frozenset[str]


# No repeated call changes these: the source of a new volume is lost, or not on this node.
_FOR_EVER = (errors.NoSuchSnapshot, errors.SourceLost, errors.NotHere)

# Nor does a repeated call find room that a volume lacks while it is filled; another node may.
_NOT_HERE = (*_FOR_EVER, errors.NoRoom, lvm_errors.NoSpace, lvm_errors.MetadataFull)

# Called with the state that the group's lock keeps true, and the size of the volume to be made;
# an exception of it prevents the volume.
Admit = Callable[[Every, int], None]


class VolumeCreator:
    """Makes volumes in this node's groups."""

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

    def create(self, call: CreateVolume, admit: Admit | None = None) -> Made:
        """Make a volume, or find the one that an earlier call made; `complete` waits for contents.

        Two commands: a report, and lvcreate, which also tags and activates. The first thin volume
        of a class takes up to two more, for its pool; a bridge to another volume takes one more,
        and so does a RAID with a minimum rate of recovery without a maximum.
        Raises NotHere where the class's group or the source is not on this node (only after that
        answer a scheduler chooses another node), and OperationPending for a volume of this name
        that is being erased, or was in part, and while a chunk of the class's empty pool is zeroed.
        """
        if not call.topology.includes(self._configuration.now.here):
            raise errors.Elsewhere(self._configuration.now.node_id)
        one = self.class_for(call.name, call.parameters, is_ephemeral=call.is_ephemeral)
        modify.check(call.tuning, one.layout)
        self._limiter.require(call.tuning)
        if call.source is not None:
            # An id that can be none is refused before anything is looked at.
            ids.group_of(call.source.id)
            if call.source.kind == VOLUME:
                origin = backing.of_id(call.source.id)
                with self._limiter.lifted(origin):
                    users.flush(self._kernel, self._activator, origin)
        make = partial(self._make_or_find, call, one, admit)
        return self._pool_remover.when_kept(one.group, pool_name(one.name), make)

    def _make_or_find(self, call: CreateVolume, one: DeviceClass, admit: Admit | None) -> Made:
        """Make or find a volume, with one group held at a time."""
        prefix = _prefix(call.is_ephemeral)
        # An earlier call may have made it while the class had a group that no class has by now.
        left = self._volume_groups.left_with(names.logical_volume(prefix, call.name))
        group_name, taken = left or one.group, None
        with ExitStack() as undo, ExitStack() as promises:
            while True:
                self._reports.await_others(group_name)
                match self._create(call, one, group_name, taken, admit):
                    case Made() as made:
                        undo.pop_all()
                        return made
                    case _Untaken() as untaken:
                        taken = self._take(call, one, untaken, undo, promises)
                    case str(elsewhere):
                        group_name = elsewhere

    def class_for(
        self, name: str, parameters: Parameters, field: str = "parameters", *, is_ephemeral: bool
    ) -> DeviceClass:
        """The class by which a volume is made, or was made; raises NotAllowed, BadField.

        No command, unless the configuration lacks the class, or has it such that it refuses the
        parameters: a volume that was made by it before is found all the same.
        """
        try:
            return plan.device_class(self._configuration.now, field, parameters)
        except errors.BadField:
            own_name = names.logical_volume(_prefix(is_ephemeral), name)
            made = self._reports.search(lambda one: one.name == own_name and not one.is_doomed)
            if made is None:
                raise
            return plan.class_of(self._configuration.now, made)

    def _create(
        self,
        call: CreateVolume,
        one: DeviceClass,
        group_name: str,
        taken: _Taken | None,
        admit: Admit | None,
    ) -> Made | _Untaken | str:
        """Make or find a volume, with this group held; the name of the group to hold instead.

        A source in another group is not looked at.
        """
        prefix = _prefix(call.is_ephemeral)
        is_across = call.source is not None and ids.group_of(call.source.id) != group_name
        with ExitStack() as undo, self._volume_groups.hold(group_name):
            with _absence_as_not_here():
                known = self._mender.mend(group_name)
            every = self._reports.everywhere(known)
            found = every.named(call.name, prefix)
            if found is not None and found.group.name != group_name:
                # Made by another class, or by this one while it had another group.
                return found.group.name
            if found is not None:
                # Of one that is being erased the tag may not say so yet.
                self._conflicts.check_jobs(Call.CREATE, str(found.id))
            if found is not None and volume_states.meets(Call.CREATE, found, Outcome.ANEW):
                # Crash point: lvm2 was killed while it made a RAID, which was never active.
                volumes.remove(self._volume_groups.lvm(group_name), group_name, found.name)
                known, found = self._mender.mend(group_name), None
                every = self._reports.everywhere(known)
            if found is None and group_name != one.group:
                return one.group
            own_name = names.logical_volume(prefix, call.name)
            if found is None and (why := self._volume_groups.why_unsure(every.silent, own_name)):
                # An earlier call may have made it while the class had that group.
                raise errors.GroupBusy(f"volume {call.name!r}", why)
            source, source_id = None, ""
            try:
                if found is None:
                    with _absence_as_not_here():
                        group = self._reports.group(known, one.group)
                    is_taken = taken is not None and _disks(group) <= taken.disks
                    if is_across and call.source is not None and not is_taken:
                        return _Untaken(call.source, group)
                    volume, source = self._make(
                        call, one, (known, every), prefix, undo, admit, taken
                    )
                    source_id = "" if source is None else str(source.id)
                else:
                    volume = found
                    self._finish(call, volume)
                    if volume.ended_by is Ender.COPIER and not is_across:
                        with _absence_as_not_here():
                            source = self._copier.source_of(known, volume)
                # Crash point: the volume is tagged `copying`; the next start or call fills it anew.
                if volume.ended_by is not Ender.COPIER:
                    return Made(volume)
                if is_across:
                    return Made(volume, self._copier.start_across(volume, source_id))
                return Made(volume, self._copier.start(volume, source))
            except _FOR_EVER as error:
                if found is None:
                    raise
                lost = error
        # After this answer no call for the volume follows, so it must not stay.
        self._deleter.delete(str(found.id))
        raise lost

    def _take(
        self,
        call: CreateVolume,
        one: DeviceClass,
        untaken: _Untaken,
        undo: ExitStack,
        promises: ExitStack,
    ) -> _Taken:
        """Take the source of a volume, and promise it to the volume.

        What the volume cannot be is refused before a bridge is made. Only the source's group is
        held, and none while a device is read. Raises as `_make`.
        """
        group, source_group = untaken.group, ids.group_of(untaken.source.id)
        with self._volume_groups.hold(source_group):
            _, origin = self._origin(untaken.source)
        size_bytes, _, _ = self._planned(call, one, group, origin)
        self._require_room(one, group, size_bytes)
        self._require_blocks(origin, group)
        with self._volume_groups.hold(source_group):
            known, same = self._origin(untaken.source)
            if _uuid(same) != _uuid(origin):
                # Made anew by hand: its contents were not looked at.
                raise errors.OperationPending(str(same.id))
            # Crash point: a bridge without its volume; the next call uses it, the next start
            # removes it.
            snapshot = self._copier.prepare(known, call.name, same, group)
            if snapshot.is_bridge:
                undo.callback(self._copier.dismiss, str(snapshot.id))
            promises.enter_context(self._copier.promised(snapshot, call.name))
        return _Taken(clone.as_taken(same, snapshot), snapshot, _disks(group))

    def _origin(self, source: Source) -> tuple[Fresh, Snapshot | Volume]:
        """What a volume is to be made of, by the fresh state of its group, which is held."""
        with _absence_as_not_here():
            known = self._mender.mend(ids.group_of(source.id))
        return known, self._found(known, source)

    def _found(self, known: Fresh, source: Source) -> Snapshot | Volume:
        """What a volume is to be made of; its group is held. Raises NotHere and as `clone.find`."""
        with _absence_as_not_here():
            origin = clone.find(self._reports, known, source)
        self._conflicts.check(Call.COPY_FROM, str(origin.id))
        return origin

    def complete(self, made: Made, hold: Callable[[], AbstractContextManager[object]]) -> Volume:
        """Wait until a volume has its contents; raises Copying when the caller's time is over.

        To be called without the locks of `create`. `hold` locks the new volume: where its source
        is lost, it is deleted.
        """
        if made.filling is None:
            return made.volume
        try:
            with _absent_source_as_not_here():
                return self._copier.wait(made.filling)
        except _NOT_HERE:
            with hold():
                # Unless it was deleted meanwhile, or begun anew.
                if self._copier.jobs.of(made.filling.key) is made.filling:
                    self._deleter.delete(made.filling.key)
            raise

    def _finish(self, call: CreateVolume, volume: Volume) -> None:
        """Have a volume that an earlier call made as this call asks; raises Incompatible.

        Raises OperationPending while it is being erased, Receiving and Moved.
        """
        volume_states.require(Call.CREATE, volume)
        plan.require_same(call, volume)
        lvm = self._volume_groups.lvm(volume.group.name)
        if tag.CACHE in volume.own_tags:
            # By what it was made with: its class may be another by now.
            one = plan.class_of(self._configuration.now, volume)
            # Crash points: after lvcreate, before the cache or before the rates of recovery.
            self._allocators.of(one).finish(lvm, volume)
        # Crash point: on record and not set; the next start, or this call again, sets it.
        bound_kib = self._configuration.now.recovery_bound_kib(volume.group.name)
        self._limiter.apply(volume, modify.ensure(lvm, volume, call.tuning, bound_kib))

    def _make(
        self,
        call: CreateVolume,
        one: DeviceClass,
        states: tuple[Fresh, Every],
        prefix: str,
        undo: ExitStack,
        admit: Admit | None,
        taken: _Taken | None,
    ) -> tuple[Volume, Snapshot | None]:
        """Make a volume; with it the snapshot to copy from, if any. Raises NoRoom, NotHere."""
        known, every = states
        group = self._reports.group(known, one.group)
        origin = None
        if taken is not None:
            origin = taken.origin
        elif call.source is not None:
            origin = self._found(known, call.source)
        size_bytes, own_tags, tuning = self._planned(call, one, group, origin)
        if admit is not None:
            admit(every, size_bytes)
        allocator, pool = self._allocators.of(one), pool_name(one.name)
        is_shared = origin is not None and clone.is_in(origin, group, pool)
        # The bridge of a copy within the group is a logical volume of its own until it is ready.
        takes_bridge = (
            taken is None
            and origin is not None
            and not is_shared
            and self._copier.takes_bridge(known, call.name, origin)
        )
        self._require_room(one, group, size_bytes, int(takes_bridge))
        lvm, name = self._volume_groups.lvm(group.name), names.logical_volume(prefix, call.name)
        volume_id = VolumeId.of(group, name)
        # The report proves that there is no such volume: records of an earlier one are void.
        self._eraser.jobs.forget(str(volume_id))
        if origin is not None and is_shared:
            allocator.make_room(lvm, group)
            volume = clone.share(lvm, origin, name, size_bytes, own_tags, tuning)
            self._holds.allow(str(volume_id))
            return volume, None
        source = None if taken is None else taken.snapshot
        if origin is not None and source is None:
            # Crash point: as in `_take`.
            source = self._copier.prepare(known, call.name, origin, group)
            if source.is_bridge:
                undo.callback(self._copier.dismiss, str(source.id))
            origin = clone.as_taken(origin, source)
            size_bytes, own_tags, tuning = self._planned(call, one, group, origin)
        if source is not None and source.is_bridge:
            own_tags |= {tag.BRIDGE: str(source.time_nanoseconds)}
        if one.layout.is_thin:
            # Crash point: a pool without a volume; the next call uses it, the next start removes
            # it.
            self._pool_remover.empty(group, pool)
            undo.callback(self._pool_remover.give_back, group.name, pool)
        allocator.create(lvm, group, New(name, size_bytes, own_tags, tuning.for_new()))
        undo.pop_all()
        # Only now: a stream for that name might have been received in between.
        self._holds.allow(str(volume_id))
        modify.complete(lvm, group.name, name, tuning)
        return Volume(volume_id, backing.of(group, name), group, size_bytes, own_tags), source

    def _planned(
        self,
        call: CreateVolume,
        one: DeviceClass,
        group: report.Group,
        origin: Snapshot | Volume | None,
    ) -> tuple[int, dict[str, str], Tuning]:
        """The size, the tags and the settings of a volume to be made. Raises BadField, BadSize."""
        plan.check_stripe_size(one, group)
        size_bytes, own_tags = plan.new(call, one, self._allocators.of(one), group, origin)
        tuning = modify.bounded(self._configuration.now, one, call.tuning)
        return size_bytes, own_tags | tuning.tags(), tuning

    def _require_room(
        self, one: DeviceClass, group: report.Group, size_bytes: int, beside: int = 0
    ) -> None:
        """Raise NoRoom, and Removing for a pool that is being zeroed, before anything is made.

        `beside`: how many logical volumes the group gets beside the volume.
        """
        allocator = self._allocators.of(one)
        limited = allocator.full(group, beside)
        if size_bytes > (maximum := 0 if limited else allocator.maximum_bytes(group)):
            purpose = limited or allocator.purpose(group)
            raise errors.NoRoom(group.name, size_bytes, maximum, purpose)
        if one.layout.is_thin:
            self._pool_remover.require_kept(group.name, pool_name(one.name))

    def _require_blocks(self, origin: Snapshot | Volume, group: report.Group) -> None:
        """Raise BadField where what a source holds cannot be used on another group's disks.

        A command or two only where the disks have larger blocks, and the source is inactive. No
        group is held while a device is read.
        """
        wanted = block_sizes.of_group(self._kernel, group)
        if wanted <= block_sizes.of_group(self._kernel, origin.group):
            return
        device = self._activated(origin)
        held = block_sizes.of_contents(self._kernel, origin.own_tags, device.path)
        if why := block_sizes.problem(held, group, wanted):
            raise errors.BadField("volume_content_source", f"cannot copy {str(origin.id)!r}: {why}")

    def _activated(self, origin: Snapshot | Volume) -> Device:
        """The device of a source, to be read with no group held; the call holds the source.

        Left active, as by a copy: to deactivate it might take it, or its bridge or its volume, from
        a copy that began meanwhile, or from a stage.
        """
        with self._volume_groups.hold(origin.group.name):
            if isinstance(origin, Volume):
                return self._activator.activate(origin)
            return self._activator.activate_snapshot(origin)

    def capacity(self, call: GetCapacity) -> Capacity:
        """What CreateVolume with the same parameters could make now; one command.

        Zero for a class that is not this node's: after an error the external-provisioner would
        keep the value of the last answer. No command where no group is here. Raises PoolSilent
        where the pool does not report: there the last answer is the best that is known.
        """
        here = self._configuration.now.here
        if (
            call.unsupported
            or any(here.get(key) != value for key, value in (call.segments or {}).items())
            or self._configuration.now.device_class(call.parameters.device_class) is None
        ):
            return Capacity(0, 0, 0)
        one = plan.device_class(self._configuration.now, "parameters", call.parameters)
        parameters = plan.with_defaults(call.parameters, call.capabilities, one)
        try:
            with _absence_as_not_here():
                group = self._reports.group(self._reports.fresh(one.group), one.group)
        except errors.NotHere:
            return Capacity(0, 0, 0)
        plan.check_stripe_size(one, group)
        allocator = self._allocators.of(one)
        header = plan.header_bytes(one, allocator, group)
        maximum = max(0, allocator.maximum_bytes(group) - header)
        least = SizeRange(1)
        minimum = plan.size_bytes(least, call.capabilities, parameters, group, one.layout, header)
        # Several smaller volumes could have more than the largest alone: that is not promised.
        return Capacity(maximum, maximum, minimum - header)


def _prefix(is_ephemeral: bool) -> str:
    """The prefix of the logical volumes of inline volumes, or of all others."""
    return ids.INLINE_PREFIX if is_ephemeral else ids.VOLUME_PREFIX


def _disks(group: report.Group) -> frozenset[str]:
    """The UUIDs of a group's disks."""
    return frozenset(one.uuid for one in group.disks)


def _uuid(origin: Snapshot | Volume) -> str:
    """The UUID of a source's logical volume."""
    return origin.group.volume(origin.name).uuid


@contextmanager
def _absent_source_as_not_here() -> Iterator[None]:
    """Raise NotHere where a copy finds that the group of its source is not on this node."""
    try:
        yield
    except errors.OtherGroup as error:
        raise errors.NotHere(str(error)) from None


@contextmanager
def _absence_as_not_here() -> Iterator[None]:
    """Raise NotHere for a group that is not on this node: it may be on another."""
    try:
        yield
    except (errors.OtherGroup, errors.GroupRefused, lvm_errors.GroupMissing) as error:
        raise errors.NotHere(str(error)) from None

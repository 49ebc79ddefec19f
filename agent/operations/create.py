"""CreateVolume: a volume is made whole, or is not there. GetCapacity: how much room there is.

The logical volume's name is a function of the CO's name, so a repeated call finds what an earlier
one made, whatever process made it. One lvcreate makes the logical volume, its tags and its device.
"""

from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from agent.core import errors, ids, tag, users
from agent.core.allocation import pool_name
from agent.core.classes import DeviceClass
from agent.core.conflicts import Call
from agent.core.context import Context
from agent.core.ids import VolumeId
from agent.core.parameters import Parameters
from agent.core.records import Snapshot, Volume
from agent.core.requests import VOLUME, CreateVolume, GetCapacity, SizeRange
from agent.core.states import Every, Fresh
from agent.operations import block_sizes, clone, modify, plan
from agent.operations.clone import Copier, Copy
from agent.operations.delete import VolumeDeleter
from agent.operations.erase import Eraser
from agent.operations.remove_pool import PoolRemover
from lvm import errors as lvm_errors
from lvm import names, report, volumes
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
        self._config = context.config
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._inventory = context.inventory
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
        if not call.topology.includes(self._config.here):
            raise errors.Elsewhere(self._config.node_id)
        one = self.class_for(call.name, call.parameters, is_ephemeral=call.is_ephemeral)
        modify.check(call.tuning, one.layout)
        self._limiter.require(call.tuning)
        groups = {one.group}
        if call.source is not None:
            groups.add(ids.group_of(call.source.id))
            if call.source.kind == VOLUME:
                with self._limiter.lifted(call.source.id):
                    users.flush(self._kernel, self._inventory, call.source.id)

        def create() -> Made:
            found: Made | str = ""
            while isinstance(found, str):
                found = self._create(call, one, groups | {found} - {""}, admit)
            return found

        return self._pool_remover.when_kept(one.group, pool_name(one.name), create)

    def class_for(
        self, name: str, parameters: Parameters, field: str = "parameters", *, is_ephemeral: bool
    ) -> DeviceClass:
        """The class by which a volume is made, or was made; raises NotAllowed, BadField.

        No command, unless the configuration lacks the class, or has it such that it refuses the
        parameters: a volume that was made by it before is found all the same.
        """
        try:
            return plan.device_class(self._config, field, parameters)
        except errors.BadField:
            prefix = ids.INLINE_PREFIX if is_ephemeral else ids.VOLUME_PREFIX
            own_name = names.logical_volume(prefix, name)
            made = self._inventory.search(lambda one: one.name == own_name and not one.wiping)
            if made is None:
                raise
            return plan.class_of(self._config, made)

    def _create(
        self, call: CreateVolume, one: DeviceClass, groups: Set[str], admit: Admit | None
    ) -> Made | str:
        """Make or find a volume, with these groups held; another group's name if that has it."""
        prefix = ids.INLINE_PREFIX if call.is_ephemeral else ids.VOLUME_PREFIX
        source = None
        with ExitStack() as undo, self._volume_groups.hold(*groups):
            with _absence_as_not_here():
                known = self._inventory.state(*groups, resume=True)
            every = self._inventory.everywhere(known)
            found = self._inventory.named(every, call.name, prefix)
            if found is not None and found.group.name not in groups:
                # Made by another class, or by this one while it had another group.
                return found.group.name
            if found is not None:
                # Of one that is being erased the tag may not say so yet.
                self._conflicts.check(Call.CREATE, str(found.id))
            if found is not None and found.is_half_made:
                # Crash point: lvm2 was killed while it made a RAID, which was never active.
                group = found.group.name
                volumes.remove(self._volume_groups.lvm(group), group, found.name)
                known, found = self._inventory.state(*groups, resume=True), None
                every = self._inventory.everywhere(known)
            try:
                if found is None:
                    volume, source = self._make(call, one, (known, every), prefix, undo, admit)
                else:
                    volume = found
                    self._finish(call, volume)
                    if volume.copying:
                        with _absence_as_not_here():
                            source = self._copier.source_of(known, volume)
                # Crash point: the volume is tagged `copying`; the next start or call fills it anew.
                return Made(volume, self._copier.start(volume, source) if volume.copying else None)
            except _FOR_EVER as error:
                if found is None:
                    raise
                lost = error
        # After this answer no call for the volume follows, so it must not stay.
        self._deleter.delete(str(found.id))
        raise lost

    def complete(self, made: Made, hold: Callable[[], AbstractContextManager[object]]) -> Volume:
        """Wait until a volume has its contents; raises Copying when the caller's time is over.

        To be called without the locks of `create`. `hold` locks the new volume: where its source
        is lost, it is deleted.
        """
        if made.filling is None:
            return made.volume
        try:
            return self._copier.wait(made.filling)
        except _NOT_HERE:
            with hold():
                # Unless it was deleted meanwhile, or begun anew.
                if self._copier.jobs.of(made.filling.key) is made.filling:
                    self._deleter.delete(made.filling.key)
            raise

    def _finish(self, call: CreateVolume, volume: Volume) -> None:
        """Have a volume that an earlier call made as this call asks; raises Incompatible."""
        plan.require_same(call, volume)
        lvm = self._volume_groups.lvm(volume.group.name)
        if tag.CACHE in volume.own_tags:
            # By what it was made with: its class may be another by now.
            one = plan.class_of(self._config, volume)
            # Crash points: after lvcreate, before the cache or before the rates of recovery.
            self._allocators.of(one).finish(lvm, volume)
        # Crash point: on record and not set; the next start, or this call again, sets it.
        bound_kib = self._config.recovery_bound_kib(volume.group.name)
        self._limiter.apply(volume, modify.ensure(lvm, volume, call.tuning, bound_kib))

    def _make(
        self,
        call: CreateVolume,
        one: DeviceClass,
        states: tuple[Fresh, Every],
        prefix: str,
        undo: ExitStack,
        admit: Admit | None,
    ) -> tuple[Volume, Snapshot | None]:
        """Make a volume; with it the snapshot to copy from, if any. Raises NoRoom, NotHere."""
        known, every = states
        with _absence_as_not_here():
            group = self._inventory.group(known, one.group)
            origin = clone.find(self._inventory, known, call.source) if call.source else None
        plan.check_stripe_size(one, group)
        if origin is not None:
            self._conflicts.check(Call.COPY_FROM, str(origin.id))
        allocator = self._allocators.of(one)
        size_bytes, own_tags = plan.new(call, one, allocator, group, origin)
        if origin is not None:
            self._require_blocks(origin, group)
        tuning = modify.bounded(self._config, one, call.tuning)
        own_tags |= tuning.tags()
        if admit is not None:
            admit(every, size_bytes)
        if size_bytes > (maximum := allocator.maximum_bytes(group)):
            purpose = allocator.full(group) or allocator.purpose(group)
            raise errors.NoRoom(group.name, size_bytes, maximum, purpose)
        if one.layout.is_thin:
            self._pool_remover.require_kept(group.name, pool_name(one.name))
        lvm, name = self._volume_groups.lvm(group.name), names.logical_volume(prefix, call.name)
        volume_id = VolumeId.of(group, name)
        # The report proves that there is no such volume: records of an earlier one are void.
        self._eraser.jobs.forget(str(volume_id))
        pool = pool_name(one.name)
        if origin is not None and clone.is_in(origin, group, pool):
            allocator.make_room(lvm, group)
            volume = clone.share(lvm, origin, name, size_bytes, own_tags, tuning)
            self._holds.allow(str(volume_id))
            return volume, None
        source = None
        if origin is not None:
            # Crash point: a bridge without its volume; the next call uses it, the next start
            # removes it.
            source = self._copier.prepare(known, call.name, origin)
            if source.is_bridge:
                undo.callback(self._copier.dismiss, str(source.id))
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
        return Volume(volume_id, group, name, size_bytes, own_tags), source

    def _require_blocks(self, origin: Snapshot | Volume, group: report.Group) -> None:
        """Raise BadField where what a source holds cannot be used on a group's disks.

        A command or two only where the disks have larger blocks, and the source is inactive.
        """
        if origin.group.uuid == group.uuid:
            return
        wanted = block_sizes.of_group(self._kernel, group)
        if wanted <= block_sizes.of_group(self._kernel, origin.group):
            return
        with self._inventory.activated(origin.group.name, origin.name) as device:
            held = block_sizes.of_contents(self._kernel, origin.own_tags, device.path)
        if why := block_sizes.problem(held, group, wanted):
            raise errors.BadField("volume_content_source", f"cannot copy {str(origin.id)!r}: {why}")

    def capacity(self, call: GetCapacity) -> Capacity:
        """What CreateVolume with the same parameters could make now; one command.

        Zero for a class that is not this node's: after an error the external-provisioner would
        keep the value of the last answer. No command where no group is here. Raises PoolSilent
        where the pool does not report: there the last answer is the best that is known.
        """
        here = self._config.here
        if (
            call.unsupported
            or any(here.get(key) != value for key, value in (call.segments or {}).items())
            or self._config.device_class(call.parameters.device_class) is None
        ):
            return Capacity(0, 0, 0)
        one = plan.device_class(self._config, "parameters", call.parameters)
        parameters = plan.with_defaults(call.parameters, call.capabilities, one)
        try:
            with _absence_as_not_here():
                group = self._inventory.group(self._inventory.state(one.group), one.group)
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


@contextmanager
def _absence_as_not_here() -> Iterator[None]:
    """Raise NotHere for a group that is not on this node: it may be on another."""
    try:
        yield
    except (errors.OtherGroup, errors.GroupRefused, lvm_errors.GroupMissing) as error:
        raise errors.NotHere(str(error)) from None

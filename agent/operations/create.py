"""CreateVolume, DeleteVolume, ListVolumes, GetCapacity; and volumes listed for people."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from agent.core import errors, ids, locks, requests, tag, users
from agent.core.allocation import Allocators, pool_name
from agent.core.capabilities import Capability
from agent.core.classes import DeviceClass
from agent.core.context import Context
from agent.core.holds import Holds
from agent.core.ids import VolumeId
from agent.core.inventory import require_own
from agent.core.luks_devices import Mappings
from agent.core.parameters import Parameters
from agent.core.records import Snapshot, Volume
from agent.core.requests import (
    VOLUME,
    CreateVolume,
    GetCapacity,
    ModifyVolume,
    Page,
    Part,
    SizeRange,
    Topology,
)
from agent.core.volume_group import listed
from agent.operations import contents, erase, plan
from agent.operations.clone import Copier, Copy
from agent.operations.erase import Eraser
from agent.operations.reencrypt import Reencrypter
from agent.operations.remove_pool import PoolRemover
from lvm import errors as lvm_errors
from lvm import names, report, volumes
from lvm.report import Group, Report
from lvm.volumes import New


@dataclass(frozen=True)
class Capacity:
    """What can be made now, in bytes."""

    available_bytes: int
    maximum_volume_bytes: int
    minimum_volume_bytes: int


@dataclass(frozen=True)
class Made:
    """A volume, and what fills it, where it has not its contents yet."""

    volume: Volume
    filling: Copy | None = None


# What no repeated call changes: the contents of a new volume cannot be had any more, or not here.
_FOR_EVER = (errors.NoSuchSnapshot, errors.SourceLost, errors.NotHere)

# Asked with the report that the group's lock keeps true, and the size that the volume would have.
Admit = Callable[[report.Report, int], None]


class Provisioner:
    """Carries out the Controller's calls on this node's groups."""

    def __init__(
        self,
        context: Context,
        eraser: Eraser,
        pool_remover: PoolRemover,
        copier: Copier,
        reencrypter: Reencrypter,
        holds: Holds,
    ) -> None:
        self._config = context.config
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._inventory = context.inventory
        self._eraser = eraser
        self._pool_remover = pool_remover
        self._copier = copier
        self._reencrypter = reencrypter
        self._holds = holds
        self._allocators = Allocators(context.config.classes, context.inventory)
        self._mappings = Mappings(context)
        self._detached = context.detached

    @staticmethod
    def logical_name(name: str, prefix: str = ids.VOLUME_PREFIX) -> str:
        """The logical volume's name for what the CO calls `name`."""
        return names.logical_volume(prefix, name)

    def create(self, call: CreateVolume, admit: Admit | None = None) -> Made:
        """Make a volume, or find the one that an earlier call made; `complete` has its contents.

        `admit` is asked before one is made; what it raises keeps it from being made.

        Two commands: a report, and lvcreate, which also tags and activates; for the first thin
        volume of a class two more at most, for its pool; one more where another volume is copied,
        or a RAID has a minimum rate of recovery without a maximum.
        Raises NotHere where the class's group or the
        source is not on this node: only of such an answer a scheduler chooses another;
        OperationPending for what is being deleted, or was in part.
        """
        self._require_here(call.topology)
        one = plan.device_class(self._config, "parameters", call.parameters)
        plan.check(call.tuning, one.layout)
        prefix = ids.INLINE_PREFIX if call.is_ephemeral else ids.VOLUME_PREFIX
        if call.source is not None and call.source.kind == VOLUME:
            users.flush(self._kernel, self._inventory, call.source.id)
        groups = [one.group, *_groups_of(call)]
        with ExitStack() as undo, self._volume_groups.hold(*groups):
            with _elsewhere():
                known = self._inventory.awake(*groups)
            found = self._inventory.named(known, call.name, prefix)
            if found is not None:
                if self._eraser.is_deleting(str(found.id)):
                    # Of which no tag may tell yet.
                    raise errors.OperationPending(f"{found.id} (being wiped)")
                if found.is_half_made:
                    self._remove(found)
                    known, found = self._inventory.awake(*groups), None
            if found is not None:
                plan.check_stripe_size(one, found.group)
                plan.require_same(call, one, found)
                volume, source = found, None
                self._allocators.of(one).finish(self._volume_groups.lvm(volume.group.name), volume)
                plan.ensure(self._volume_groups.lvm(volume.group.name), volume, call.tuning)
            else:
                volume, source = self._make(call, one, known, prefix, undo, admit)
        if not volume.copying:
            return Made(volume)
        try:
            if found is not None:
                with _elsewhere():
                    source = self._copier.source_of(known, volume)
        except _FOR_EVER:
            # The caller gives up on such an answer, so nothing may stay.
            self.delete(str(volume.id))
            raise
        return Made(volume, self._copier.start(volume, source))

    def complete(self, made: Made, hold: Callable[[], AbstractContextManager[object]]) -> Volume:
        """The volume that was made, once it has its contents; raises Copying before that.

        To be called without the locks of `create`. `hold` gives the new volume's own: where the
        contents cannot be had any more, the volume goes.
        """
        if made.filling is None:
            return made.volume
        try:
            return self._copier.wait(made.filling)
        except _FOR_EVER:
            with hold():
                if self._copier.is_still(made.filling):
                    self.delete(made.filling.key)
            raise

    def _make(
        self,
        call: CreateVolume,
        one: DeviceClass,
        known: report.Report,
        prefix: str,
        undo: ExitStack,
        admit: Admit | None,
    ) -> tuple[Volume, Snapshot | None]:
        """A new volume, and what is to be copied to it; raises NoRoom, NotHere."""
        with _elsewhere():
            group = self._inventory.group(known, one.group)
            content = contents.find(self._inventory, known, call.source) if call.source else None
        plan.check_stripe_size(one, group)
        if content is not None and self._eraser.is_deleting(content.id):
            raise errors.NoSuchVolume(content.id)
        allocator = self._allocators.of(one)
        if content is None:
            header = plan.header_bytes(one, allocator, group)
            size_bytes, own_tags = plan.of(call, one, group, header)
            if tag.ZERO in own_tags:
                # It is filled behind the answer, as a copy is.
                own_tags |= {tag.STATE: tag.COPYING}
        else:
            call = replace(call, size=contents.size_of(call.size, content))
            header, held = contents.header_bytes(content), content.own_tags.get(tag.FORMATTED)
            size_bytes, own_tags = plan.of(call, one, group, header, held)
            own_tags = contents.tags_of(own_tags, content)
            if one.encryption and one.reencrypt:
                own_tags |= {tag.SHARED_KEY: "yes"}
        if admit is not None:
            admit(known, size_bytes)
        if size_bytes > (maximum := allocator.maximum_bytes(group)):
            raise errors.NoRoom(group.name, size_bytes, maximum, allocator.purpose(group))
        name = self.logical_name(call.name, prefix)
        # The report proves that there is none: what is known of an earlier one is void.
        volume_id = str(VolumeId.of(group, name))
        self._eraser.forget(volume_id)
        if content is not None and contents.is_in(content, group, pool_name(one.name)):
            lvm = self._volume_groups.lvm(group.name)
            made = contents.share(lvm, content, name, size_bytes, own_tags, call.tuning)
            self._holds.allow(volume_id)
            return made, None
        source = None
        if content is not None:
            source = self._copier.prepare(known, call.name, content)
            undo.callback(self._copier.give_up, source)
            if source.is_bridge:
                own_tags |= {tag.BRIDGE: str(source.time_nanoseconds)}
        if one.layout.is_thin:
            self._pool_remover.keep(group, pool_name(one.name))
            undo.callback(self._pool_remover.give_back, group.name, pool_name(one.name))
        new = New(name, size_bytes, own_tags, call.tuning.for_new())
        allocator.create(self._volume_groups.lvm(group.name), group, new)
        undo.pop_all()
        # Only now: what was to be received under that name might have come in between.
        self._holds.allow(volume_id)
        plan.complete(self._volume_groups.lvm(group.name), group.name, name, call.tuning)
        return Volume(VolumeId.of(group, name), group, name, size_bytes, own_tags), source

    def completed(self, parameters: Parameters, capability: Capability) -> Parameters:
        """An inline volume's parameters as its class completes them; no command."""
        one = plan.device_class(self._config, "volume_context", parameters)
        return plan.with_defaults(parameters, [capability], one)

    def delete(self, volume_id: str, *, received: bool = False, moved: bool = False) -> None:
        """Wipe and remove a volume; no volume of that id is no error.

        One that is being `received`, or was `moved`, goes only where the caller says that it is.
        A long wipe goes on after the answer: see agent/operations/erase.py, and for thin
        volumes agent/operations/remove_pool.py.
        """
        self._detached.call_off(volume_id)
        try:
            with self._copier.halted(volume_id), self._reencrypter.halted(volume_id):
                self._delete(volume_id, received=received, moved=moved)
        except errors.NoSuchVolume:
            return

    def is_mounted(self, volume_id: str) -> bool:
        """Whether a volume that CreateVolume made is staged or published; no command."""
        if ids.is_inline(volume_id):
            return False
        return bool(users.mounted_at(self._kernel, self._inventory, volume_id))

    def _delete(self, volume_id: str, *, received: bool, moved: bool) -> None:
        # So that of two that go at once, one sees that it is the last of its pool.
        group = ids.group_of(volume_id)
        with self._volume_groups.hold(group):
            known = self._inventory.awake(group)
            volume = self._inventory.get(known, volume_id)
            if not (received or moved):
                self._holds.require_free(volume_id)
                require_own(volume)
            if copies := self._inventory.copies_of(known, volume_id):
                raise errors.VolumeInUse(volume_id, f"{', '.join(copies)} is copied from it")
            if held := volume.kept_snapshots:
                raise errors.HasSnapshots(
                    volume_id, held, "they are nothing without it; delete them first"
                )
            if grown := erase.leftover(volume.group, volume.name):
                volumes.remove(self._volume_groups.lvm(volume.group.name), volume.group.name, grown)
            if volume.is_half_made:
                # There is nothing of anybody's to overwrite, and no way to.
                self._remove(volume)
            # While a disk of its pool is missing that cannot be told that it goes.
            is_thin = volume.layout.is_thin and not volume.missing_disks
            if is_thin and not volume.wiping and not volume.copy_on_write_snapshots:
                # It takes nothing along: its pool zeroes what it gives out.
                users.require_unused(self._kernel, self._inventory, volume)
                if volume.is_encrypted:
                    self._mappings.ensure_closed(volume)
                    self._mappings.erase(volume)
                self._pool_remover.remove(volume)
            else:
                is_thin = False
        self._copier.clear(known, volume)
        if volume.is_half_made:
            return
        if is_thin:
            self._pool_remover.after(volume, self._eraser.grace_seconds)
        else:
            self._eraser.delete(volume)

    def _remove(self, volume: Volume) -> None:
        volumes.remove(self._volume_groups.lvm(volume.group.name), volume.group.name, volume.name)

    def get(self, volume_id: str) -> Volume:
        """The volume of that id; raises NoSuchVolume."""
        return self._inventory.require(volume_id)

    def list(self, page: Page) -> Part[Volume]:
        """A part of the volumes, in the order of their ids."""
        requests.check(page)
        known = self._inventory.listed()
        every = self._inventory.all(known)
        found = {str(one.id): one for one in every if one.is_listed}
        return requests.part(found, page)

    def modify(self, call: ModifyVolume) -> None:
        """Have a volume as its mutable parameters say: two commands, one where it is so.

        Nothing is changed where any of them cannot be.
        """
        with self._volume_groups.hold(ids.group_of(call.volume_id)):
            volume = self.get(call.volume_id)
            plan.ensure(self._volume_groups.lvm(volume.group.name), volume, call.tuning)

    def capacity(self, call: GetCapacity) -> Capacity:
        """What CreateVolume with the same parameters could make now; one command.

        Of a class that is not this node's nothing, for on an error the external-provisioner leaves
        what was told before. No command where none of the groups is here. Raises PoolSilent where
        nobody can tell: what was told before is then the best that is known.
        """
        if call.unsupported or not self._is_here(call.segments):
            return Capacity(0, 0, 0)
        if self._config.device_class(call.parameters.device_class) is None:
            return Capacity(0, 0, 0)
        one = plan.device_class(self._config, "parameters", call.parameters)
        parameters = plan.with_defaults(call.parameters, call.capabilities, one)
        try:
            with _elsewhere():
                group = self._inventory.group(self._inventory.read(one.group), one.group)
        except errors.NotHere:
            return Capacity(0, 0, 0)
        plan.check_stripe_size(one, group)
        allocator = self._allocators.of(one)
        header = plan.header_bytes(one, allocator, group)
        maximum = max(0, allocator.maximum_bytes(group) - header)
        least = SizeRange(1)
        minimum = plan.size_bytes(least, call.capabilities, parameters, group, one.layout, header)
        minimum -= header
        # What several smaller volumes could have beside the largest is not promised.
        return Capacity(maximum, maximum, minimum)

    def _require_here(self, topology: Topology) -> None:
        if not topology.includes(self._config.here):
            raise errors.Elsewhere(self._config.node_id)

    def _is_here(self, segments: Mapping[str, str] | None) -> bool:
        here = self._config.here
        return segments is None or all(here.get(key) == value for key, value in segments.items())


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Inside, a group that is not here is one that may be on another node: raises NotHere."""
    try:
        yield
    except (errors.OtherGroup, errors.GroupRefused, lvm_errors.GroupMissing) as error:
        raise errors.NotHere(str(error)) from None


def _groups_of(call: CreateVolume) -> list[str]:
    """The group of what a volume is made of."""
    return [] if call.source is None else [ids.group_of(call.source.id)]


T = TypeVar("T")

_NO_ANSWER = (
    *(errors.GroupBusy, errors.GroupSilent, errors.GroupAwaited, errors.GroupRefused),
    lvm_errors.LvmError,
)


@dataclass(frozen=True)
class Here(Generic[T]):
    """What is here, by the ids; and why each group that is away is, by their names."""

    entries: tuple[T, ...]
    away: Mapping[str, str]


class Listing:
    """Lists that no group's absence keeps anybody from."""

    def __init__(self, context: Context) -> None:
        self._volume_groups = context.volume_groups
        self._inventory = context.inventory

    def volumes(self) -> Here[Volume]:
        """The volumes that are listed; raises TooManyCalls, Starting."""
        known, away = self._look()
        found = (one for one in self._inventory.present(known) if one.is_listed)
        return Here(tuple(sorted(found, key=lambda one: str(one.id))), away)

    def snapshots(self) -> Here[Snapshot]:
        """The snapshots that are listed; raises TooManyCalls, Starting."""
        known, away = self._look()
        found = self._inventory.snapshots(known)
        return Here(tuple(sorted(found, key=lambda one: str(one.id))), away)

    def _look(self) -> tuple[Report, Mapping[str, str]]:
        """All groups as they are now, or were when they answered last; and those that are away."""
        locks.enter()
        here: dict[str, Group] = {}
        away: dict[str, str] = {}
        for name, told in listed(self._volume_groups):
            try:
                # Of one that Carver could not make the second says why.
                group = told() or self._inventory.group(Report({}), name)
            except _NO_ANSWER as error:
                away[name] = str(error)
            else:
                here[name] = group
        return Report(here), away

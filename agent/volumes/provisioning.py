"""Volumes as objects: made, found, listed, deleted. What the Controller's calls mean."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from agent import errors, fact, ids
from agent.config.classes import DeviceClass
from agent.engine import users
from agent.engine.allocation import Carvings, pool_name
from agent.engine.inventory import require_own
from agent.engine.mappings import Mappings
from agent.engine.means import Means
from agent.engine.records import Snapshot, Volume
from agent.engine.withheld import Withheld
from agent.ids import VolumeId
from agent.requests import keys, pages
from agent.requests.capabilities import BLOCK, MOUNT, Capability
from agent.requests.pages import Page, Part
from agent.requests.parameters import Parameters
from agent.requests.volumes import (
    VOLUME,
    CreateVolume,
    GetCapacity,
    ModifyVolume,
    SizeRange,
    Topology,
    ValidateVolume,
)
from agent.volumes import contents, modifying, sealing
from agent.volumes.copying import Copier
from agent.workers import zeroing
from agent.workers.pool_removal import Reclaimer
from agent.workers.reencryption import Reencrypter
from agent.workers.wiping import Wiper
from lvm import errors as lvm_errors
from lvm import layout, names, report, tags, volumes
from lvm.volumes import New
from mount import filesystem

# What a volume is given where the caller names no size.
DEFAULT_SIZE_BYTES = 1 << 30


@dataclass(frozen=True)
class Capacity:
    """What can be made now, in bytes."""

    available_bytes: int
    maximum_volume_bytes: int
    minimum_volume_bytes: int


# What no repeated call changes: the contents of a new volume cannot be had any more, or not here.
_FOR_EVER = (errors.NoSuchSnapshot, errors.SourceLost, errors.NotHere)

# Asked with the report that the group's lock keeps true, and the size that the volume would have.
Admit = Callable[[report.Report, int], None]


class Provisioner:
    """Carries out the Controller's calls on this node's groups."""

    def __init__(
        self,
        means: Means,
        wiper: Wiper,
        reclaimer: Reclaimer,
        copier: Copier,
        reencrypter: Reencrypter,
        withheld: Withheld,
    ) -> None:
        self._config = means.config
        self._engines, self._kernel = means.engines, means.kernel
        self._inventory = means.inventory
        self._wiper = wiper
        self._reclaimer = reclaimer
        self._copier = copier
        self._reencrypter = reencrypter
        self._withheld = withheld
        self._carvings = Carvings(means.config.classes, means.inventory)
        self._mappings = Mappings(means)

    @staticmethod
    def logical_name(name: str, prefix: str = ids.VOLUME_PREFIX) -> str:
        """The logical volume's name for what the CO calls `name`."""
        return names.logical_volume(prefix, name)

    def create(self, call: CreateVolume, admit: Admit | None = None) -> Volume:
        """Make a volume, or find the one that an earlier call made.

        `admit` is asked before one is made; what it raises keeps it from being made.

        Two commands: a report, and lvcreate, which also tags and activates; for the first thin
        volume of a class two more at most, for its pool; one more where another volume is copied,
        or a RAID has a minimum rate of recovery without a maximum.
        Raises Copying while the contents are not complete, NotHere where the class's group or the
        source is not on this node: only of such an answer a scheduler chooses another.
        """
        self._require_here(call.topology)
        one = self._device_class("parameters", call.parameters)
        modifying.check(call.tuning, one.layout)
        prefix = ids.INLINE_PREFIX if call.is_ephemeral else ids.VOLUME_PREFIX
        if call.source is not None and call.source.kind == VOLUME:
            users.flush(self._kernel, self._inventory, call.source.id)
        groups = [one.group, *_groups_of(call)]
        with ExitStack() as undo, self._engines.hold(*groups):
            with _elsewhere():
                known = self._inventory.awake(*groups)
            found = self._inventory.named(known, call.name, prefix)
            if found is not None:
                _check_stripe_size(one, found.group)
                volume, source = self._same(call, one, found), None
                self._carvings.of(one).finish(self._engines.lvm(volume.group.name), volume)
                modifying.ensure(self._engines.lvm(volume.group.name), volume, call.tuning)
            else:
                volume, source = self._make(call, one, known, prefix, undo, admit)
        if not volume.copying:
            return volume
        try:
            if found is not None:
                with _elsewhere():
                    source = self._copier.source_of(known, volume)
            return self._copier.fill(volume, source)
        except _FOR_EVER:
            # The caller gives up on such an answer, so nothing may stay.
            self.delete(str(volume.id))
            raise

    def _same(self, call: CreateVolume, one: DeviceClass, found: Volume) -> Volume:
        """The volume that is there, if it is what is asked for now."""
        if found.wiping:
            raise errors.OperationPending(f"{found.id} (being wiped)")
        require_own(found)
        told = call.source.id if call.source is not None else ""
        if (was := found.facts.get(fact.FROM, "")) != told:
            raise errors.Incompatible(
                f"volume {call.name!r} exists, made of {was or 'nothing'}, not {told or 'nothing'}"
            )
        made_bytes = found.made_bytes
        # One that is not complete may have to grow to the size that it was made for.
        header = found.header_bytes
        if not call.size.allows(size_bytes := max(found.size_bytes, made_bytes) - header):
            raise errors.Incompatible(
                f"volume {call.name!r} exists with a size of {size_bytes} bytes, not of"
                f" {call.size.required_bytes} to {call.size.limit_bytes or 'any number of'}"
            )
        # All else is compared as of a call for the size with which it was made.
        call = replace(call, size=SizeRange(made_bytes - header))
        # What it was made of gave the file system, and may be gone by now.
        held = found.facts.get("fsType") if told else None
        return _compared(found, _planned(call, one, found.group, header, held)[1])

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
        _check_stripe_size(one, group)
        if content is not None and self._wiper.is_deleting(content.id):
            raise errors.NoSuchVolume(content.id)
        carving = self._carvings.of(one)
        if content is None:
            header = sealing.header_bytes(one, carving, group)
            size_bytes, facts = _planned(call, one, group, header)
            if fact.ZERO in facts:
                # It is filled behind the answer, as a copy is.
                facts |= {fact.STATE: fact.COPYING}
        else:
            call = replace(call, size=contents.size_of(call.size, content))
            header, held = contents.header_bytes(content), content.facts.get(fact.FORMATTED)
            size_bytes, facts = _planned(call, one, group, header, held)
            facts = contents.facts_of(facts, content)
            if one.encryption and one.reencrypt:
                facts |= {fact.SHARED_KEY: "yes"}
        if admit is not None:
            admit(known, size_bytes)
        if size_bytes > (maximum := carving.maximum_bytes(group)):
            raise errors.NoRoom(group.name, size_bytes, maximum, carving.purpose(group))
        name = self.logical_name(call.name, prefix)
        if content is not None and contents.is_in(content, group, pool_name(one.name)):
            lvm = self._engines.lvm(group.name)
            return contents.share(lvm, content, name, size_bytes, facts, call.tuning), None
        source = None
        if content is not None:
            source = self._copier.prepare(known, call.name, content)
            undo.callback(self._copier.give_up, source)
        if one.layout.is_thin:
            self._reclaimer.keep(group, pool_name(one.name))
            undo.callback(self._reclaimer.give_back, group.name, pool_name(one.name))
        new = New(name, size_bytes, facts, call.tuning.for_new())
        carving.create(self._engines.lvm(group.name), group, new)
        undo.pop_all()
        modifying.complete(self._engines.lvm(group.name), group.name, name, call.tuning)
        made = Volume(VolumeId.of(group, name), group, name, size_bytes, facts)
        self._wiper.forget(str(made.id))
        return made, source

    def completed(self, parameters: Parameters, capability: Capability) -> Parameters:
        """An inline volume's parameters as its class completes them; no command."""
        one = self._device_class("volume_context", parameters)
        return with_defaults(parameters, [capability], one)

    def delete(self, volume_id: str, *, received: bool = False, moved: bool = False) -> None:
        """Wipe and remove a volume; no volume of that id is no error.

        One that is being `received`, or was `moved`, goes only where the caller says that it is.
        A wipe that takes long goes on behind the answer: see agent/workers/wiping.py, and for thin
        volumes agent/workers/pool_removal.py.
        """
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
        with self._engines.hold(group):
            known = self._inventory.awake(group)
            volume = self._inventory.get(known, volume_id)
            if not (received or moved):
                self._withheld.require_free(volume_id)
                require_own(volume)
            if copies := self._inventory.copies_of(known, volume_id):
                raise errors.VolumeInUse(volume_id, f"{', '.join(copies)} is copied from it")
            if held := volume.kept_snapshots:
                raise errors.HasSnapshots(
                    volume_id, held, "they are nothing without it; delete them first"
                )
            if grown := zeroing.leftover(volume.group, volume.name):
                volumes.remove(self._engines.lvm(volume.group.name), volume.group.name, grown)
            # While a disk of its pool is missing that cannot be told that it goes.
            is_thin = volume.layout.is_thin and not volume.missing_disks
            if is_thin and not volume.wiping and not volume.copy_on_write_snapshots:
                # It takes nothing along: its pool zeroes what it gives out.
                users.require_unused(self._kernel, self._inventory, volume)
                if volume.is_encrypted:
                    self._mappings.ensure_closed(volume)
                    self._mappings.erase(volume)
                self._reclaimer.remove(volume)
            else:
                is_thin = False
        self._copier.clear(known, volume)
        if is_thin:
            self._reclaimer.after(volume, self._wiper.grace_seconds)
        else:
            self._wiper.delete(volume)

    def get(self, volume_id: str) -> Volume:
        """The volume of that id; raises NoSuchVolume."""
        return self._inventory.require(volume_id)

    def list(self, page: Page) -> Part[Volume]:
        """A part of the volumes, in the order of their ids."""
        pages.check(page)
        known = self._inventory.listed()
        every = self._inventory.all(known)
        found = {str(one.id): one for one in every if one.is_listed}
        return pages.part(found, page)

    def modify(self, call: ModifyVolume) -> None:
        """Have a volume as its mutable parameters say: two commands, one where it is so.

        Nothing is changed where any of them cannot be.
        """
        with self._engines.hold(ids.group_of(call.volume_id)):
            volume = self.get(call.volume_id)
            modifying.ensure(self._engines.lvm(volume.group.name), volume, call.tuning)

    def capacity(self, call: GetCapacity) -> Capacity:
        """What CreateVolume with the same parameters could make now; one command.

        Of a class that is not this node's nothing, for on an error the external-provisioner leaves
        what was told before. No command where none of the groups is here.
        """
        if call.unsupported or not self._is_here(call.segments):
            return Capacity(0, 0, 0)
        if self._config.device_class(call.parameters.device_class) is None:
            return Capacity(0, 0, 0)
        one = self._device_class("parameters", call.parameters)
        parameters = with_defaults(call.parameters, call.capabilities, one)
        try:
            with _elsewhere():
                group = self._inventory.group(self._inventory.read(one.group), one.group)
        except errors.NotHere:
            return Capacity(0, 0, 0)
        _check_stripe_size(one, group)
        carving = self._carvings.of(one)
        header = sealing.header_bytes(one, carving, group)
        maximum = max(0, carving.maximum_bytes(group) - header)
        least = SizeRange(1)
        minimum = planned_bytes(least, call.capabilities, parameters, group, one.layout, header)
        minimum -= header
        # What several smaller volumes could have beside the largest is not promised.
        return Capacity(maximum, maximum, minimum)

    def refusal(self, volume: Volume, call: ValidateVolume) -> str:
        """Why the volume cannot be used as wanted; empty where it can."""
        try:
            present = volume.group.volume(volume.name).tuning
            modifying.check(call.tuning, volume.layout, present)
            self._check_made_so(volume, call)
        except errors.BadField as error:
            return str(error)
        formatted = volume.facts.get(fact.FORMATTED)
        for capability in call.capabilities:
            if capability.is_block:
                continue
            if volume.facts[fact.ACCESS] == BLOCK:
                return "the volume was made for raw block access"
            if formatted and capability.fs_type not in {"", formatted}:
                return f"the volume is formatted with {formatted}, not {capability.fs_type}"
            fs_type = capability.fs_type or formatted or volume.facts.get("fsType", "")
            minimum = filesystem.FILE_SYSTEMS[fs_type].minimum_bytes if fs_type else 0
            if volume.capacity_bytes < minimum:
                return f"{fs_type} needs {minimum} bytes, the volume has {volume.capacity_bytes}"
        return ""

    def _check_made_so(self, volume: Volume, call: ValidateVolume) -> None:
        """Raise BadField for what a caller has of a volume, or says of its class, and is not so.

        What is not given is not compared: a class may have changed since.
        """
        facts, given = volume.facts, call.parameters
        if call.context and call.context != (own := context_of(facts)):
            raise errors.BadField("volume_context", f"{call.context} is not the volume's, {own}")
        if facts[fact.ACCESS] == BLOCK or any(one.fs_type for one in call.capabilities):
            # A raw block volume has none, and a capability's goes before it.
            given = replace(given, fs_type="")
        wanted = {key.removeprefix(keys.PARAMETER_PREFIX): v for key, v in given.context().items()}
        made = {key: facts.get(key, "") for key in wanted}
        for key, (part, _) in keys.LAYOUT_PARAMETERS.items():
            if part in given.layout:
                wanted[key] = str(given.layout[part])
                made[key] = str(getattr(volume.layout, part))
        if given.cache_size is not None:
            named = replace(given, device_class=given.device_class or facts.get("class", ""))
            # It has one, or else the parameter is refused.
            cache, extent = (
                self._device_class("parameters", named).cache,
                volume.group.extent_size_bytes,
            )
            wanted[keys.CACHE_SIZE] = cache.fact(volume.made_bytes, extent) if cache else ""
            made[keys.CACHE_SIZE] = facts.get(fact.CACHE, "")
        for key, value in wanted.items():
            if value != made[key]:
                was = made[key] or "none"
                raise errors.BadField(f"parameters[{key}]", f"{value!r}, the volume has {was!r}")

    def _device_class(self, field: str, parameters: Parameters) -> DeviceClass:
        found = self._config.device_class(parameters.device_class)
        if found is None:
            known = [one.name for one in self._config.classes]
            raise errors.NotAllowed(f"{field}[class]", parameters.device_class, known)
        return _overridden(field, found, parameters)

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


def _overridden(field: str, one: DeviceClass, parameters: Parameters) -> DeviceClass:
    """A class with the layout, and the size of its caches, that the parameters make of its own."""
    if parameters.cache_size is not None:
        why = "has no cache" if one.cache is None else "has one for all, its pool's"
        if one.cache is None or one.layout.is_thin:
            raise errors.BadField(f"{field}[{keys.CACHE_SIZE}]", f"class {one.name} {why}")
        one = replace(one, cache=replace(one.cache, size=parameters.cache_size))
    if parameters.encryption:
        one = replace(one, encryption=parameters.encryption)
    if parameters.reencrypt:
        if not one.encryption:
            why = f"is for volumes that are encrypted; ask for carver/{keys.ENCRYPTION}, too"
            raise errors.BadField(f"{field}[{keys.REENCRYPT}]", f"{why} (class {one.name})")
        one = replace(one, reencrypt=True)
    chosen: dict[str, Any] = dict(parameters.layout)
    try:
        return replace(one, layout=replace(one.layout, **chosen))
    except layout.Impossible as error:
        [key] = [key for key, (part, _) in keys.LAYOUT_PARAMETERS.items() if part == error.part]
        raise errors.BadField(f"{field}[{key}]", f"{error} (class {one.name})") from None


def _check_stripe_size(one: DeviceClass, group: report.Group) -> None:
    """Refuse what lvm2 would silently make smaller: a stripe is no larger than an extent."""
    if one.layout.stripe_size_bytes > group.extent_size_bytes:
        raise errors.BadField(
            "parameters[stripeSize]",
            f"{one.layout.stripe_size_bytes} is more than an extent of volume group {group.name},"
            f" {group.extent_size_bytes} bytes (class {one.name})",
        )


def with_defaults(
    parameters: Parameters,
    capabilities: Sequence[Capability],
    one: DeviceClass,
    held: str = "",
) -> Parameters:
    """The parameters as the class completes them, so that they no longer depend on it.

    `held` is the file system that is there already, on what is copied.
    """
    asked = next((c.fs_type for c in capabilities if c.fs_type), "") or parameters.fs_type
    mounted = any(not capability.is_block for capability in capabilities)
    fs_type = (asked or held or one.fs_type) if mounted else ""
    inherits = not parameters.mkfs_options and fs_type == one.fs_type
    return Parameters(
        device_class=one.name,
        fs_type=fs_type,
        mkfs_options=one.mkfs_options if inherits else parameters.mkfs_options,
        mount_options=parameters.mount_options,
        about=parameters.about,
        encryption=one.encryption,
        reencrypt=bool(one.encryption) and one.reencrypt,
    )


def _planned(
    call: CreateVolume,
    one: DeviceClass,
    group: report.Group,
    header_bytes: int,
    held: str | None = None,
) -> tuple[int, dict[str, str]]:
    """The size and the facts of the volume that is asked for."""
    parameters = with_defaults(call.parameters, call.capabilities, one, held or "")
    _check_options(call, parameters)
    size_bytes = planned_bytes(
        call.size, call.capabilities, parameters, group, one.layout, header_bytes
    )
    facts = _facts(call, parameters, size_bytes, one.layout) | sealing.facts(header_bytes)
    if one.cache is not None and not one.layout.is_thin:
        facts |= {fact.CACHE: one.cache.fact(size_bytes, group.extent_size_bytes)}
    if one.zero == fact.FULLY:
        facts |= {fact.ZERO: fact.FULLY}
    return size_bytes, facts


def _groups_of(call: CreateVolume) -> list[str]:
    """The group of what a volume is made of."""
    return [] if call.source is None else [ids.group_of(call.source.id)]


def _check_options(call: CreateVolume, parameters: Parameters) -> None:
    """Refuse now what mkfs or mount would refuse when the volume is staged."""
    if not parameters.fs_type:
        return  # raw block only: one StorageClass often serves both, its options are for the other
    for index, one in enumerate(call.capabilities):
        if one.fs_type and one.fs_type != parameters.fs_type:
            raise errors.BadField(
                "volume_capabilities", f"ask for {parameters.fs_type} and for {one.fs_type}"
            )
        one.check_for(parameters.fs_type, f"volume_capabilities[{index}]")
    parameters.check_for(parameters.fs_type, "parameters")


def planned_bytes(
    size: SizeRange,
    capabilities: Sequence[Capability],
    parameters: Parameters,
    group: report.Group,
    shape: layout.Layout,
    header_bytes: int = 0,
) -> int:
    """The size that a volume gets: whole extents, and enough for its file system and its header.

    Raises BadSize when that, without the header, is above the limit.
    """
    fs_types = {c.fs_type or parameters.fs_type for c in capabilities if not c.is_block}
    minimum = max((filesystem.FILE_SYSTEMS[one].minimum_bytes for one in fs_types), default=0)
    extent, unit = group.extent_size_bytes, group.extent_size_bytes * shape.stripes
    asked = size.required_bytes
    if not asked:
        within_limit = (size.limit_bytes + header_bytes) // unit * unit - header_bytes
        asked = min(DEFAULT_SIZE_BYTES, max(0, within_limit) or DEFAULT_SIZE_BYTES)
    planned = layout.round_up(max(asked, minimum) + header_bytes, extent, shape)
    if size.limit_bytes and planned - header_bytes > size.limit_bytes:
        raise errors.BadSize(
            f"capacity_range.limit_bytes: {size.limit_bytes} is less than the least volume that"
            f" can be made, {planned - header_bytes} bytes: {shape.stripes} times extents of"
            f" {extent} bytes"
            + (f", {minimum} bytes for {', '.join(sorted(fs_types))}" if minimum else "")
        )
    return planned


def context_of(facts: Mapping[str, str]) -> dict[str, str]:
    """The volume_context that a volume's facts amount to."""
    return {keys.PARAMETER_PREFIX + key: facts[key] for key in keys.PARAMETERS if key in facts}


def _facts(
    call: CreateVolume, parameters: Parameters, size_bytes: int, shape: layout.Layout
) -> dict[str, str]:
    """What is kept of a request: all that a repeated one is compared with."""
    chosen = {
        key.removeprefix(keys.PARAMETER_PREFIX): value
        for key, value in parameters.context().items()
    }
    capabilities = "|".join(sorted(map(str, call.capabilities)))
    if not tags.fits(fact.CAPABILITIES, capabilities):
        # Only compared, never read back: where there is no room, its digest will do.
        capabilities = f"sha256:{hashlib.sha256(capabilities.encode()).hexdigest()}"
    only_block = all(one.is_block for one in call.capabilities)
    return {
        fact.NAME: call.name,
        fact.STATE: fact.READY,
        fact.SIZE: str(size_bytes),
        fact.LAYOUT: str(shape),
        fact.ACCESS: BLOCK if only_block else MOUNT,
        fact.CAPABILITIES: capabilities,
        **chosen,
        **(parameters.about or {}),
    }


def _compared(found: Volume, facts: Mapping[str, str]) -> Volume:
    """The volume that is there, if it is what is asked for now."""
    compared = (fact.LAYOUT, fact.CACHE, fact.CAPABILITIES)
    for key in (*compared, *keys.PARAMETERS):
        if (was := found.facts.get(key, "")) != (wanted := facts.get(key, "")):
            raise errors.Incompatible(
                f"volume {facts[fact.NAME]!r} exists with {key} {was or 'none'!r},"
                f" not {wanted or 'none'!r}"
            )
    return found

"""Adopt logical volumes that Carver did not make, with their contents; undo that.

Two commands: the tags, then the name, since a volume's name begins with `vol`. No data are
written, and the tags of others stay. With a tag of its old name and not yet its new one it is no
volume of Carver's; a repeated call, or an undo, finds it so. Undoing takes the steps backwards.

What has not its new name yet is looked at as if for the first time by each call, since its old user
may have gone on with it; and an adopted volume is the answer only to a call that asks for it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.operations import plan
from agent.requests.requests import BLOCK, MOUNT
from agent.settings.classes import DeviceClass
from agent.volumes import backing, other_drivers, records, report_age, users, volume_states
from agent.volumes.allocation import is_own_pool, pool_name
from agent.volumes.context import Context
from agent.volumes.records import Volume
from agent.volumes.volume_states import Call, Ender
from lvm import layout, names, report, tags, tuning, volumes
from lvm.tuning import AS_IT_IS, PLAIN
from mount import filesystem

# Names that mean something to Carver, with its tags.
_OWN_PREFIXES = (
    *(ids.VOLUME_PREFIX, ids.INLINE_PREFIX, ids.SNAPSHOT_PREFIX, ids.POOL_PREFIX),
    *(ids.WIPE_PREFIX, ids.GROWTH_PREFIX, ids.BRIDGE_PREFIX),
)
_LUKS = "crypto_LUKS"


@dataclass(frozen=True)
class Asked:
    """What is to be adopted: a logical volume, by the name that it had before.

    An empty class is the default one, an empty driver none. `claim` has the tags of its claim.
    """

    group: str
    name: str
    device_class: str = ""
    made_by: str = ""
    is_block: bool = False
    dry_run: bool = False
    claim: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Group and name, as a person gives them to lvm2."""
        return f"{self.group}/{self.name}"

    @property
    def new_name(self) -> str:
        """The logical volume's name once it is adopted."""
        return names.logical_volume(ids.VOLUME_PREFIX, self.name)


@dataclass(frozen=True)
class Adoption:
    """The volume as it is or would be adopted, or None; and what was or would be changed."""

    volume: Volume | None
    changes: tuple[str, ...] = ()


class Adopter:
    """Adopts logical volumes of this node's groups."""

    def __init__(self, context: Context) -> None:
        self._configuration, self._kernel = context.configuration, context.kernel
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._holds, self._conflicts = context.holds, context.conflicts

    def adopt(self, asked: Asked) -> Adoption:
        """Tag and rename a logical volume; one that was adopted stays as it is.

        An inactive one is active while its contents are looked at, with no group held. Raises
        NotAdopted, NotAllowed, VolumeMissing, GroupMissing.
        """
        if asked.made_by and asked.made_by not in other_drivers.DRIVERS:
            raise errors.NotAllowed("made_by", asked.made_by, other_drivers.DRIVERS)
        with self._held(asked) as group:
            if (adopted := self._adopted(group, asked)) is not None:
                self._require_asked(asked, adopted)
                return Adoption(adopted)
            seen = group.volume(asked.name)
            self._planned(asked, group, seen)
        fs_type = self._contents(asked)
        with self._held(asked) as group:
            found = group.volume(asked.name)
            if found.uuid != seen.uuid:
                raise errors.NotAdopted(asked.path, "it was made anew meanwhile; call again")
            own_tags = self._planned(asked, group, found, fs_type)
            if asked.new_name in group.volumes:
                raise errors.NotAdopted(asked.path, f"there is a {asked.group}/{asked.new_name}")
            # Those of a call that was cut off, or of an undo, if any.
            old = dict(found.own_tags.items() - own_tags.items())
            new = dict(own_tags.items() - found.own_tags.items())
            steps = []
            if old:
                steps.append(f"remove the tags {_words(old)} from {asked.path}")
            if new:
                steps.append(f"add the tags {_words(new)} to {asked.path}")
            steps.append(f"rename {asked.path} to {asked.new_name}")
            if not asked.dry_run:
                lvm = self._volume_groups.lvm(asked.group)
                if old or new:
                    volumes.mark(lvm, asked.group, asked.name, old=old, new=new)
                # Crash point: tagged, not renamed: no volume yet; a repeated call renames it.
                volumes.rename(lvm, asked.group, asked.name, asked.new_name)
                self._holds.allow(str(VolumeId.of(group, asked.new_name)))
            return Adoption(_as_adopted(group, found, asked.new_name, own_tags), tuple(steps))

    def undo(self, asked: Asked) -> Adoption:
        """Give an adopted volume that is not in use its old name back, and remove Carver's tags.

        One that has none of them stays as it is. Raises NotAdopted, Receiving, Moved,
        VolumeMissing, GroupMissing.
        """
        self._reports.await_others(asked.group)
        with self._held(asked) as group:
            adopted = self._adopted(group, asked)
            if adopted is None:
                logical = group.volume(asked.name)
                old, own_tags = asked.name, logical.own_tags
                if needs := records.unknown_needs(logical):
                    raise errors.NeedsOther(asked.path, needs)
            else:
                old, own_tags = adopted.own_tags[tag.ADOPTED], adopted.own_tags
                self._require_unneeded(asked, adopted)
                if old in group.volumes:
                    raise errors.NotAdopted(asked.path, f"there is a {old} already", undo=True)
            if own_tags and own_tags.get(tag.ADOPTED) != old:
                raise errors.NotAdopted(asked.path, "Carver made it", undo=True)
            steps, present, lacking = [], PLAIN, AS_IT_IS
            if adopted is not None:
                present = group.volume(adopted.name).tuning
                # A bound of Carver's on RAID recovery is none of the volume's own settings.
                lacking = replace(AS_IT_IS, bound_recovery_kib=0).lacking_in(present)
                if lacking != AS_IT_IS:
                    kib = present.maximum_recovery_kib
                    steps.append(f"set the maximum recovery rate to {kib} KiB a second, as it was")
                steps.append(f"rename {asked.group}/{adopted.name} to {old}")
            if own_tags:
                steps.append(f"remove the tags {_words(own_tags)} from {asked.group}/{old}")
            if not asked.dry_run:
                lvm = self._volume_groups.lvm(asked.group)
                if lacking != AS_IT_IS and adopted is not None:
                    tuning.change(lvm, asked.group, [adopted.name], lacking, present)
                    # Crash point: without the bound, which the next start sets again.
                if adopted is not None:
                    volumes.rename(lvm, asked.group, adopted.name, old)
                # Crash point: as one that was tagged and not renamed; this call goes on with it.
                if own_tags:
                    volumes.mark(lvm, asked.group, old, old=own_tags, new={})
            return Adoption(None, tuple(steps))

    @contextmanager
    def _held(self, asked: Asked) -> Iterator[report.Group]:
        """Hold a group of Carver's, and give its fresh state; raises NotAllowed, GroupMissing."""
        if asked.group not in self._volume_groups.names:
            raise errors.NotAllowed("group", asked.group, self._volume_groups.names)
        with self._volume_groups.hold(asked.group):
            read = self._reports.fresh if asked.dry_run else self._mender.mend
            known = read(asked.group)
            yield self._reports.group(known, asked.group)

    def _adopted(self, group: report.Group, asked: Asked) -> Volume | None:
        """The adopted volume that had that name, or has it. Raises NeedsOther."""
        known = report_age.fresh([group])
        for one in known.shown():
            if (old := one.own_tags.get(tag.ADOPTED)) and asked.name in (old, one.name):
                return known.volume(str(one.id))
        return None

    def _require_asked(self, asked: Asked, adopted: Volume) -> None:
        """Raise NotAdopted, Incompatible unless an adopted volume is the one that is asked for.

        Raises Receiving, Moved.
        """
        volume_states.require(Call.ADOPT, adopted)
        if not adopted.is_listed:
            raise errors.NotAdopted(asked.path, "it is being deleted")
        own_tags, name = adopted.own_tags, adopted.own_tags[tag.ADOPTED]
        if asked.name != adopted.name and asked.name in adopted.group.volumes:
            why = (
                f"{asked.group}/{adopted.name} was adopted from another {name}; rename this one"
                " first (`lvrename`)"
            )
            raise errors.NotAdopted(asked.path, why)
        self._check_driver(asked, name, adopted.group.volume(adopted.name))
        wanted = {**asked.claim, tag.ACCESS: BLOCK if asked.is_block else MOUNT}
        if asked.device_class:
            wanted[tag.CLASS] = asked.device_class
        for key, value in wanted.items():
            if (was := own_tags.get(key, "")) != value:
                raise errors.Incompatible(
                    f"cannot adopt {asked.path}: it was adopted as {adopted.id} with {key}"
                    f" {was or 'none'!r}, not {value!r}; undo that first (`carver volume adopt"
                    " --undo`)"
                )

    def _planned(
        self, asked: Asked, group: report.Group, found: report.LogicalVolume, fs_type: str = ""
    ) -> Mapping[str, str]:
        """The tags that make it a volume of Carver's, with this file system, if any.

        Raises NotAdopted, NotAllowed.
        """
        one = self._class(asked)
        self._check_name(asked, found)
        self._check_driver(asked, asked.name, found)
        shape = _shape(asked, group, found, one)
        volume = Volume(
            VolumeId.of(group, asked.name),
            backing.of(group, asked.name),
            group,
            found.size_bytes,
            own_tags={},
        )
        try:
            users.require_unused(self._kernel, self._activator, volume)
        except errors.VolumeInUse as error:
            why = f"{error}; stop what uses it: pods, mounts, swap, other devices on it"
            raise errors.NotAdopted(asked.path, why) from None
        own_tags = {
            tag.NAME: asked.name,
            **volume_states.tags_for(Ender.CALLER),
            tag.SIZE: str(found.size_bytes),
            tag.LAYOUT: str(shape),
            tag.ACCESS: BLOCK if asked.is_block else MOUNT,
            tag.CLASS: one.name,
            tag.ADOPTED: asked.name,
            **asked.claim,
        }
        # It has no cache, whatever its class makes.
        own_tags |= plan.of_class(replace(one, cache=None), found.size_bytes, group)
        if fs_type:
            own_tags |= {tag.FS_TYPE: fs_type, tag.FORMATTED: fs_type}
        return own_tags

    def _class(self, asked: Asked) -> DeviceClass:
        """The class to adopt it by, of its group; raises NotAllowed, NotAdopted."""
        one = self._configuration.now.device_class(asked.device_class)
        if one is None or one.group != asked.group:
            every = self._configuration.now.classes
            known = [each.name for each in every if each.group == asked.group]
            wanted = asked.device_class or (one.name if one is not None else "")
            raise errors.NotAllowed("class", wanted, known)
        if one.encryption:
            why = f"class {one.name} encrypts, and it is not encrypted; name another --class"
            raise errors.NotAdopted(asked.path, why)
        return one

    @staticmethod
    def _check_name(asked: Asked, found: report.LogicalVolume) -> None:
        if found.own_tags and found.own_tags.get(tag.ADOPTED) != asked.name:
            why = "it has tags of Carver's already; `carver volume list` shows its volumes"
            raise errors.NotAdopted(asked.path, why)
        is_own = any(names.is_of(one, asked.name) for one in _OWN_PREFIXES)
        if is_own or asked.name == ids.SWEEP or names.is_part(asked.name):
            why = "its name is one of Carver's or lvm2's own; rename it first (`lvrename`)"
            raise errors.NotAdopted(asked.path, why)

    @staticmethod
    def _check_driver(asked: Asked, name: str, found: report.LogicalVolume) -> None:
        made_by = other_drivers.maker(name, found.tags)
        if made_by == asked.made_by:
            return
        why = f"by its name and tags it is of {made_by or 'none of these drivers'}"
        if made_by:
            why += f"; see that {made_by} uses it no more, and say --from {made_by}"
        raise errors.NotAdopted(asked.path, why)

    def _contents(self, asked: Asked) -> str:
        """The file system on it; empty for a raw block volume. Raises NotAdopted.

        No group is held: the disk may hang.
        """
        with self._activator.activated(asked.group, asked.name) as device:
            found = filesystem.probe(self._kernel, device.path)
        if found is not None and found.fs_type == _LUKS:
            why = (
                "it is encrypted (LUKS), and its key is not Carver's; make an encrypted volume,"
                " and copy the data"
            )
            raise errors.NotAdopted(asked.path, why)
        if asked.is_block:
            return ""
        if found is None or found.fs_type not in filesystem.FILE_SYSTEMS:
            why = f"it holds {found or 'no file system'}, not {', '.join(filesystem.FILE_SYSTEMS)}"
            raise errors.NotAdopted(asked.path, f"{why}; for a raw block volume say --block")
        return found.fs_type

    def _require_unneeded(self, asked: Asked, volume: Volume) -> None:
        """Raise NotAdopted, Receiving, Moved for a volume that Carver, or a user, still needs."""
        self._conflicts.require(Call.ADOPT, volume)
        volume_id, why = str(volume.id), ""
        if not volume.is_listed:
            why = "it is being deleted"
        elif made := volume.group.made_of(volume.name):
            why = f"it has the snapshots {', '.join(one.name for one in made)}, which Carver took"
        elif records.reservation(volume.group, volume.name) is not None:
            why = "it is growing; call again"
        if why:
            raise errors.NotAdopted(asked.path, why, undo=True)
        try:
            every = self._reports.everywhere(report_age.fresh([volume.group]))
            every.require_not_copied(volume_id)
            users.require_unused(self._kernel, self._activator, volume)
        except errors.VolumeInUse as error:
            raise errors.NotAdopted(asked.path, str(error), undo=True) from None


def _words(own_tags: Mapping[str, str]) -> str:
    return " ".join(tags.encode(own_tags))


def _shape(
    asked: Asked, group: report.Group, found: report.LogicalVolume, one: DeviceClass
) -> layout.Layout:
    """Its layout as it is, whatever the class's; raises NotAdopted."""
    why, shape = "", layout.recognize(found)
    snapshots = [each.name for each in group.made_of(found.name)]
    if group.missing_disks:
        why = "a disk of its group is missing; attach it again"
    elif found.origin:
        why = f"it is a snapshot of {found.origin}"
    elif snapshots:
        why = f"it has the snapshots {', '.join(snapshots)}, which are not Carver's"
    elif shape is None:
        is_now = ", ".join(sorted(found.layout))
        why = f"its layout is {is_now}; known are {', '.join(layout.KINDS)}"
    elif shape.is_thin and not _is_pool_of(group, found.pool, one):
        why = (
            f"its thin pool {found.pool} is not that of a class of Carver's; make a volume, and"
            " copy the data"
        )
    elif found.read_only:
        why = "it is read-only; if it is to be written to, `lvchange --permission rw` it"
    elif found.health:
        why = f"lvm2 reports {found.health!r} of it; repair it first"
    if shape is None or why:
        raise errors.NotAdopted(asked.path, why)
    return shape


def _is_pool_of(group: report.Group, pool: str, one: DeviceClass) -> bool:
    found = group.volumes.get(pool)
    return found is not None and pool == pool_name(one.name) and is_own_pool(found)


def _as_adopted(
    group: report.Group, found: report.LogicalVolume, name: str, own_tags: Mapping[str, str]
) -> Volume:
    """The volume, by the group's state before it was adopted."""
    kept = {one.name: one for one in records.every(group) if one.name != found.name}
    group = replace(group, volumes={**kept, name: replace(found, name=name)})
    return Volume(
        VolumeId.of(group, name), backing.of(group, name), group, found.size_bytes, own_tags
    )

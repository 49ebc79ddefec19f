"""Adopt logical volumes that Carver did not create, with their contents, and undo an adoption.

Adopting runs two commands: the first adds Carver's tags, the second renames the logical volume,
since a volume's name begins with `vol`. No data are written, and the tags of other programs stay.
The tag `adopted` holds the old name. A logical volume that has the tag `adopted` and is not renamed
yet is not a volume of Carver's; a repeated call or an undo continues from that state. An undo takes
the two steps in reverse order.

Each call checks a logical volume that is not renamed yet from the beginning, because the logical
volume's old user may have gone on using it. If the logical volume is adopted already, a call
succeeds only if it asks for the volume as it was adopted.
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
from agent.volumes.volume_states import Call, EndedBy
from lvm import layout, names, report, tags, tuning, volumes
from lvm.tuning import AS_IT_IS, PLAIN
from mount import filesystem

# Prefixes of the names that Carver gives to its logical volumes. A logical volume with such a name
# cannot be adopted.
_OWN_PREFIXES = (
    *(ids.VOLUME_PREFIX, ids.INLINE_PREFIX, ids.SNAPSHOT_PREFIX, ids.POOL_PREFIX),
    *(ids.WIPE_PREFIX, ids.GROWTH_PREFIX, ids.BRIDGE_PREFIX),
)
# Type that libblkid gives to the signature of a LUKS header.
_LUKS = "crypto_LUKS"


@dataclass(frozen=True)
class AdoptionRequest:
    """A request to adopt a logical volume, or to undo its adoption.

    `name` is the name of the logical volume before the adoption; for an adopted volume, its new
    name is accepted as well. An empty `device_class` means the default class. `made_by` is the
    driver that created the logical volume; empty for none of the known drivers. `claim` has the
    tags that record the volume's claim.
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
        """The volume group and name of the logical volume, in the form of lvm2's commands."""
        return f"{self.group}/{self.name}"

    @property
    def new_name(self) -> str:
        """The name of the logical volume after the adoption."""
        return names.logical_volume(ids.VOLUME_PREFIX, self.name)


@dataclass(frozen=True)
class Adoption:
    """Result of adopting a logical volume, or of undoing its adoption.

    `volume` is the adopted volume, or in a dry run the volume as it would be adopted; None after an
    undo. `changes` are the steps that were taken, or in a dry run would be taken.
    """

    volume: Volume | None
    changes: tuple[str, ...] = ()


class Adopter:
    """Adopts logical volumes of this node's volume groups."""

    def __init__(self, context: Context) -> None:
        self._configuration, self._kernel = context.configuration, context.kernel
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._holds, self._conflicts = context.holds, context.conflicts

    def adopt(self, request: AdoptionRequest) -> Adoption:
        """Adopt a logical volume: tag and rename it; an adopted volume stays as it is.

        An inactive logical volume is activated while its contents are probed. The group's lock is
        not held meanwhile. In a dry run nothing is tagged or renamed.

        The errors are:

        - NotAdopted, with the reason, if the logical volume cannot be adopted.
        - Incompatible if the volume was adopted with another claim, device class or kind of access;
          Receiving or Moved if the adopted volume is being received or was moved to another node.
        - NotAllowed for a driver, volume group or device class that is not known.
        - VolumeMissing or GroupMissing if the logical volume or its group does not exist.
        """
        if request.made_by and request.made_by not in other_drivers.DRIVERS:
            raise errors.NotAllowed("made_by", request.made_by, other_drivers.DRIVERS)
        with self._locked_group(request) as group:
            if (adopted := self._adopted(group, request)) is not None:
                self._require_requested(request, adopted)
                return Adoption(adopted)
            probed = group.volume(request.name)
            self._planned(request, group, probed)
        fs_type = self._contents(request)
        with self._locked_group(request) as group:
            logical = group.volume(request.name)
            if logical.uuid != probed.uuid:
                raise errors.NotAdopted(request.path, "it was made anew meanwhile; call again")
            own_tags = self._planned(request, group, logical, fs_type)
            if request.new_name in group.volumes:
                raise errors.NotAdopted(
                    request.path, f"there is a {request.group}/{request.new_name}"
                )
            # Replace the tags that an interrupted adoption or undo left on the logical volume, if
            # any.
            removed_tags = dict(logical.own_tags.items() - own_tags.items())
            added_tags = dict(own_tags.items() - logical.own_tags.items())
            steps = []
            if removed_tags:
                steps.append(f"remove the tags {_words(removed_tags)} from {request.path}")
            if added_tags:
                steps.append(f"add the tags {_words(added_tags)} to {request.path}")
            steps.append(f"rename {request.path} to {request.new_name}")
            if not request.dry_run:
                lvm = self._volume_groups.lvm(request.group)
                if removed_tags or added_tags:
                    volumes.mark(
                        lvm, request.group, request.name, old_tags=removed_tags, new_tags=added_tags
                    )
                # Crash point: the logical volume is tagged and not renamed, so it is no volume yet;
                # a repeated call renames it.
                volumes.rename(lvm, request.group, request.name, request.new_name)
                self._holds.remove_note(str(VolumeId.of(group, request.new_name)))
            return Adoption(_as_adopted(group, logical, request.new_name, own_tags), tuple(steps))

    def undo(self, request: AdoptionRequest) -> Adoption:
        """Give an adopted volume that is not in use its old name back, and remove Carver's tags.

        A logical volume without Carver's tags stays as it is. In a dry run nothing is changed.
        Raises NotAdopted if Carver created the volume, if the volume is still needed, or if the old
        name is taken; Receiving or Moved if the volume is being received or was moved to another
        node; NeedsOther for tags of a newer version of Carver; VolumeMissing or GroupMissing if the
        volume or its group does not exist.
        """
        self._reports.await_others(request.group)
        with self._locked_group(request) as group:
            adopted = self._adopted(group, request)
            if adopted is None:
                logical = group.volume(request.name)
                old_name, own_tags = request.name, logical.own_tags
                if needs := records.unknown_needs(logical):
                    raise errors.NeedsOther(request.path, needs)
            else:
                old_name, own_tags = adopted.own_tags[tag.ADOPTED], adopted.own_tags
                self._require_unneeded(request, adopted)
                if old_name in group.volumes:
                    raise errors.NotAdopted(
                        request.path, f"there is a {old_name} already", undo=True
                    )
            if own_tags and own_tags.get(tag.ADOPTED) != old_name:
                raise errors.NotAdopted(request.path, "Carver made it", undo=True)
            steps, present, lacking = [], PLAIN, AS_IT_IS
            if adopted is not None:
                present = group.volume(adopted.name).tuning
                # Remove the limit on RAID recovery that Carver set, as the logical volume did not
                # have that limit before.
                lacking = replace(AS_IT_IS, bound_recovery_kib=0).missing_from(present)
                if lacking != AS_IT_IS:
                    kib = present.maximum_recovery_kib
                    steps.append(f"set the maximum recovery rate to {kib} KiB a second, as it was")
                steps.append(f"rename {request.group}/{adopted.name} to {old_name}")
            if own_tags:
                steps.append(f"remove the tags {_words(own_tags)} from {request.group}/{old_name}")
            if not request.dry_run:
                lvm = self._volume_groups.lvm(request.group)
                if lacking != AS_IT_IS and adopted is not None:
                    tuning.change(lvm, request.group, [adopted.name], lacking, present)
                    # Crash point: the limit on RAID recovery is removed; the next start of Carver
                    # sets it again.
                if adopted is not None:
                    volumes.rename(lvm, request.group, adopted.name, old_name)
                # Crash point: the logical volume has its old name and still the tags; this call,
                # repeated, continues from that state.
                if own_tags:
                    volumes.mark(lvm, request.group, old_name, old_tags=own_tags, new_tags={})
            return Adoption(None, tuple(steps))

    @contextmanager
    def _locked_group(self, request: AdoptionRequest) -> Iterator[report.Group]:
        """Lock the requested volume group within the `with`, and provide its fresh state.

        What a killed lvm2 left in the group is repaired first, except in a dry run. Raises
        NotAllowed if the group is not configured, GroupMissing if the group is not on this node.
        """
        if request.group not in self._volume_groups.names:
            raise errors.NotAllowed("group", request.group, self._volume_groups.names)
        with self._volume_groups.hold(request.group):
            read = self._reports.fresh if request.dry_run else self._mender.mend
            state = read(request.group)
            yield self._reports.group(state, request.group)

    def _adopted(self, group: report.Group, request: AdoptionRequest) -> Volume | None:
        """Return the adopted volume that has the requested name, now or before the adoption.

        The result is None if there is no such volume. Raises NeedsOther or TagsDamaged if this
        version of Carver must not use the volume.
        """
        state = report_age.fresh([group])
        for volume in state.shown():
            if (old_name := volume.own_tags.get(tag.ADOPTED)) and request.name in (
                old_name,
                volume.name,
            ):
                return state.volume(str(volume.id))
        return None

    def _require_requested(self, request: AdoptionRequest, adopted: Volume) -> None:
        """Raise NotAdopted or Incompatible if an adopted volume is not as a request asks for.

        Incompatible says that the volume was adopted with another claim, device class or kind of
        access. Raises Receiving or Moved for a volume that is being received or was moved to
        another node.
        """
        volume_states.require(Call.ADOPT, adopted)
        if not adopted.is_listed:
            raise errors.NotAdopted(request.path, "it is being deleted")
        own_tags, name = adopted.own_tags, adopted.own_tags[tag.ADOPTED]
        if request.name != adopted.name and request.name in adopted.group.volumes:
            why = (
                f"{request.group}/{adopted.name} was adopted from another {name}; rename this one"
                " first (`lvrename`)"
            )
            raise errors.NotAdopted(request.path, why)
        self._check_driver(request, name, adopted.group.volume(adopted.name))
        requested_tags = {**request.claim, tag.ACCESS: BLOCK if request.is_block else MOUNT}
        if request.device_class:
            requested_tags[tag.CLASS] = request.device_class
        for key, value in requested_tags.items():
            if (present := own_tags.get(key, "")) != value:
                raise errors.Incompatible(
                    f"cannot adopt {request.path}: it was adopted as {adopted.id} with {key}"
                    f" {present or 'none'!r}, not {value!r}; undo that first (`carver volume adopt"
                    " --undo`)"
                )

    def _planned(
        self,
        request: AdoptionRequest,
        group: report.Group,
        logical: report.LogicalVolume,
        fs_type: str = "",
    ) -> Mapping[str, str]:
        """Check that a logical volume can be adopted; return the tags that make it one of Carver's.

        `fs_type` is the file system on the logical volume; empty for none, or if the contents were
        not probed yet. Raises NotAdopted if the logical volume cannot be adopted, for example
        because it is in use; NotAllowed for an unknown device class.
        """
        device_class = self._class(request)
        self._check_name(request, logical)
        self._check_driver(request, request.name, logical)
        shape = _shape(request, group, logical, device_class)
        volume = Volume(
            VolumeId.of(group, request.name),
            backing.of(group, request.name),
            group,
            logical.size_bytes,
            own_tags={},
        )
        try:
            users.require_unused(self._kernel, self._activator, volume)
        except errors.VolumeInUse as error:
            why = f"{error}; stop what uses it: pods, mounts, swap, other devices on it"
            raise errors.NotAdopted(request.path, why) from None
        own_tags = {
            tag.NAME: request.name,
            **volume_states.tags_for(EndedBy.CALLER),
            tag.SIZE: str(logical.size_bytes),
            tag.LAYOUT: str(shape),
            tag.ACCESS: BLOCK if request.is_block else MOUNT,
            tag.CLASS: device_class.name,
            tag.ADOPTED: request.name,
            **request.claim,
        }
        # Add the tags that the device class gives a volume, except the tag of a cache: an adopted
        # volume gets no cache.
        own_tags |= plan.of_class(replace(device_class, cache=None), logical.size_bytes, group)
        if fs_type:
            own_tags |= {tag.FS_TYPE: fs_type, tag.FORMATTED: fs_type}
        return own_tags

    def _class(self, request: AdoptionRequest) -> DeviceClass:
        """Return the device class that an adopted volume gets.

        Raises NotAllowed if the requested class does not exist or is of another volume group, and
        NotAdopted if the class encrypts.
        """
        device_class = self._configuration.now.device_class(request.device_class)
        if device_class is None or device_class.group != request.group:
            classes = self._configuration.now.classes
            class_names = [
                known_class.name for known_class in classes if known_class.group == request.group
            ]
            requested_class = request.device_class or (
                device_class.name if device_class is not None else ""
            )
            raise errors.NotAllowed("class", requested_class, class_names)
        if device_class.encryption:
            why = (
                f"class {device_class.name} encrypts, and it is not encrypted; name another --class"
            )
            raise errors.NotAdopted(request.path, why)
        return device_class

    @staticmethod
    def _check_name(request: AdoptionRequest, logical: report.LogicalVolume) -> None:
        if logical.own_tags and logical.own_tags.get(tag.ADOPTED) != request.name:
            why = "it has tags of Carver's already; `carver volume list` shows its volumes"
            raise errors.NotAdopted(request.path, why)
        is_own = any(names.is_of(prefix, request.name) for prefix in _OWN_PREFIXES)
        if is_own or request.name == ids.SWEEP or names.is_part(request.name):
            why = "its name is one of Carver's or lvm2's own; rename it first (`lvrename`)"
            raise errors.NotAdopted(request.path, why)

    @staticmethod
    def _check_driver(request: AdoptionRequest, name: str, logical: report.LogicalVolume) -> None:
        made_by = other_drivers.maker(name, logical.tags)
        if made_by == request.made_by:
            return
        why = f"by its name and tags it is of {made_by or 'none of these drivers'}"
        if made_by:
            why += f"; see that {made_by} uses it no more, and say --from {made_by}"
        raise errors.NotAdopted(request.path, why)

    def _contents(self, request: AdoptionRequest) -> str:
        """Return the file system on a logical volume; empty for a raw block volume.

        An inactive logical volume is activated meanwhile. The group's lock is not held, since the
        disk may hang. Raises NotAdopted for a LUKS volume, and for contents other than a supported
        file system unless a raw block volume is requested.
        """
        with self._activator.activated(request.group, request.name) as device:
            contents = filesystem.probe(self._kernel, device.path)
        if contents is not None and contents.fs_type == _LUKS:
            why = (
                "it is encrypted (LUKS), and its key is not Carver's; make an encrypted volume,"
                " and copy the data"
            )
            raise errors.NotAdopted(request.path, why)
        if request.is_block:
            return ""
        if contents is None or contents.fs_type not in filesystem.FILE_SYSTEMS:
            why = (
                f"it holds {contents or 'no file system'}, not {', '.join(filesystem.FILE_SYSTEMS)}"
            )
            raise errors.NotAdopted(request.path, f"{why}; for a raw block volume say --block")
        return contents.fs_type

    def _require_unneeded(self, request: AdoptionRequest, volume: Volume) -> None:
        """Raise an error if an adoption cannot be undone, because the volume is still needed.

        Raises NotAdopted for a volume that is in use, is being copied, deleted or grown, or has
        snapshots; Receiving, Moved or Moving for a volume that is being received, or was moved or
        moves to another node.
        """
        self._conflicts.require(Call.UNDO_ADOPT, volume)
        volume_id, why = str(volume.id), ""
        if not volume.is_listed:
            why = "it is being deleted"
        elif snapshots := volume.group.made_of(volume.name):
            why = (
                f"it has the snapshots {', '.join(snapshot.name for snapshot in snapshots)},"
                " which Carver took"
            )
        elif records.reservation(volume.group, volume.name) is not None:
            why = "it is growing; call again"
        if why:
            raise errors.NotAdopted(request.path, why, undo=True)
        try:
            all_groups = self._reports.every_group(report_age.fresh([volume.group]))
            all_groups.require_not_copied(volume_id)
            users.require_unused(self._kernel, self._activator, volume)
        except errors.VolumeInUse as error:
            raise errors.NotAdopted(request.path, str(error), undo=True) from None


def _words(own_tags: Mapping[str, str]) -> str:
    return " ".join(tags.encode(own_tags))


def _shape(
    request: AdoptionRequest,
    group: report.Group,
    logical: report.LogicalVolume,
    device_class: DeviceClass,
) -> layout.Layout:
    """Return the layout of a logical volume as lvm2 reports it; raise NotAdopted if it is unfit.

    Unfit are snapshots and their origins, layouts that Carver does not know, thin volumes outside
    the class's pool, read-only and unhealthy logical volumes, and all in a volume group that misses
    a disk. The layout may differ from that of the device class.
    """
    why, shape = "", layout.recognize(logical)
    snapshot_names = [snapshot.name for snapshot in group.made_of(logical.name)]
    if group.missing_disks:
        why = "a disk of its group is missing; attach it again"
    elif logical.origin:
        why = f"it is a snapshot of {logical.origin}"
    elif snapshot_names:
        why = f"it has the snapshots {', '.join(snapshot_names)}, which are not Carver's"
    elif shape is None:
        is_now = ", ".join(sorted(logical.layout))
        why = f"its layout is {is_now}; known are {', '.join(layout.KINDS)}"
    elif shape.is_thin and not _is_pool_of(group, logical.pool, device_class):
        why = (
            f"its thin pool {logical.pool} is not that of a class of Carver's; make a volume, and"
            " copy the data"
        )
    elif logical.read_only:
        why = "it is read-only; if it is to be written to, `lvchange --permission rw` it"
    elif logical.health:
        why = f"lvm2 reports {logical.health!r} of it; repair it first"
    if shape is None or why:
        raise errors.NotAdopted(request.path, why)
    return shape


def _is_pool_of(group: report.Group, pool: str, device_class: DeviceClass) -> bool:
    logical = group.volumes.get(pool)
    return logical is not None and pool == pool_name(device_class.name) and is_own_pool(logical)


def _as_adopted(
    group: report.Group, logical: report.LogicalVolume, name: str, own_tags: Mapping[str, str]
) -> Volume:
    """Return the record of an adopted volume, made from a report before the adoption."""
    other_volumes = {
        volume.name: volume
        for volume in records.all_logical_volumes(group)
        if volume.name != logical.name
    }
    group = replace(group, volumes={**other_volumes, name: replace(logical, name=name)})
    return Volume(
        VolumeId.of(group, name), backing.of(group, name), group, logical.size_bytes, own_tags
    )

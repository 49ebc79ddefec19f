"""Volumes made larger: now, or when they are staged next.

lvm2 extends the origin of copy-on-write snapshots only while it is not active. A cluster asks a
node to expand a volume when a pod has it, so that moment would never come by itself. What was asked
for is put on record then, as a tag, and the call is FAILED_PRECONDITION: of this code kubelet lets
the pod go on, or start, and asks again when the volume is mounted next (expandOnPlugin in
pkg/volume/util/operationexecutor/node_expander.go). So it is where there is no room: after any
other code the pod does not start. OK with the present size would not do, for kubelet reads no size
in the answer and notes the claim as grown. The next stage finds the record and grows the volume
while it is nobody's: it is deactivated, extended, and activated as ever.

A wish that the volume's size meets is none, so it needs no step of its own to be dropped. Killed
before the tag is written, the caller calls again; killed after it, or between deactivation and
growth, the next stage finds the wish; killed later, the volume is as large as wanted, and staging
goes on as after any kill. Where there is no room by then, or lvm2 refuses, the volume is staged as
it is, for a pod shall start, and the wish stays.
"""

import logging
from contextlib import suppress
from dataclasses import replace

from agent import errors, fact, ids
from agent.engine import users
from agent.engine.allocation import Carving, Carvings
from agent.engine.mappings import Mappings
from agent.engine.means import Means
from agent.engine.records import Volume
from agent.requests.volumes import ExpandVolume, SizeRange
from agent.workers.zeroing import Zeroer
from lvm import errors as lvm_errors
from lvm import layout, report, volumes

_log = logging.getLogger(__name__)


class Expander:
    """Makes volumes larger; their file systems are not touched."""

    def __init__(self, means: Means, zeroer: Zeroer) -> None:
        self._engines, self._kernel = means.engines, means.kernel
        self._inventory = means.inventory
        self._zeroer = zeroer
        self._mappings = Mappings(means)
        self._carvings = Carvings(means.config.classes, means.inventory)

    def expand(self, call: ExpandVolume) -> Volume:
        """Make the volume at least as large as asked; one that already is, stays.

        Two commands at most; with copy-on-write snapshots one more, or two where it is in use: then
        it raises GrowsLater. The latest call counts: a larger wish on record is withdrawn.

        Where what it grows by is overwritten first, four more, and Overwriting until that is done.
        """
        try:
            return self._expand(call)
        except errors.Overwriting:
            if not self._zeroer.wait(call.volume_id):
                raise
            return self._expand(call)

    def _expand(self, call: ExpandVolume) -> Volume:
        group = ids.group_of(call.volume_id)
        with self._engines.hold(group):
            known = self._inventory.awake(group)
            volume = self._inventory.usable(known, call.volume_id)
            wanted = _wanted_bytes(volume, call.size)
            if wanted > volume.size_bytes:
                try:
                    self._extend(known, volume, wanted)
                except (errors.VolumeInUse, lvm_errors.InUse) as error:
                    self._put_on_record(volume, wanted)
                    held = volume.copy_on_write_snapshots
                    raise errors.GrowsLater(call.volume_id, wanted, held, str(error)) from None
            if volume.wanted_bytes > wanted and call.size.required_bytes:
                self._record(volume, {})
        return replace(volume, size_bytes=max(wanted, volume.size_bytes))

    def expand_in_use(self, call: ExpandVolume) -> Volume:
        """Expand a volume that a pod has, or is about to have; one command more where it fails.

        Raises CannotGrow where there is no room, or lvm2 refuses: the pod shall have what there is,
        as it cannot be anywhere else. What was asked for is on record then, and tried again at the
        next stage.
        """
        try:
            return self.expand(call)
        except (
            errors.NoRoom,
            lvm_errors.NoSpace,
            lvm_errors.MetadataFull,
            lvm_errors.CommandFailed,
        ) as error:
            # A full group may have no room for the record either.
            with suppress(lvm_errors.LvmError):
                self._require_later(call)
            raise errors.CannotGrow(call.volume_id, str(error)) from None

    def _require_later(self, call: ExpandVolume) -> None:
        """Put on record what is asked for, where the volume is smaller."""
        group = ids.group_of(call.volume_id)
        with self._engines.hold(group):
            volume = self._inventory.usable(self._inventory.read(group), call.volume_id)
            wanted = _wanted_bytes(volume, call.size)
            if wanted > volume.size_bytes:
                self._put_on_record(volume, wanted)

    def is_due(self, volume_id: str) -> bool:
        """Whether a volume is smaller than is on record, by the last report; no command."""
        seen = self._inventory.glimpse(volume_id)
        return seen is not None and seen.wanted_bytes > 0

    def catch_up(self, volume: Volume) -> Volume:
        """A volume that is about to be activated, as large as is on record, if it can be.

        No command where nothing is on record, else four at most.
        """
        if not volume.wanted_bytes:
            return volume
        with self._engines.hold(volume.group.name):
            known = self._inventory.awake(volume.group.name)
            volume = self._inventory.usable(known, str(volume.id))
            wanted = volume.wanted_bytes
            try:
                self._extend(known, volume, wanted)
            except (lvm_errors.OutcomeUnknown, lvm_errors.StillRunning):
                raise  # the next call looks first, and nothing is changed before
            except (errors.AgentError, lvm_errors.LvmError) as error:
                _log.warning("volume %s is not grown to %d bytes yet: %s", volume.id, wanted, error)
                return volume
        _log.info("volume %s is grown to the %d bytes that were asked for", volume.id, wanted)
        return replace(volume, size_bytes=wanted)

    def _extend(self, known: report.Report, volume: Volume, size_bytes: int) -> None:
        """Grow it, out of use if need be; raises NoRoom, and VolumeInUse or InUse."""
        carving = self._carvings.of_volume(volume)
        more = size_bytes - volume.size_bytes
        if fact.ZERO in volume.facts and not volume.layout.is_thin:
            self._extend_overwritten(known, volume, size_bytes, carving)
            return
        if more > (room := carving.maximum_growth_bytes(volume)):
            group = volume.group
            raise errors.NoRoom(group.name, more, room, f"more {carving.purpose(group)}")
        self._take_out_of_use(known, volume)
        carving.extend(self._engines.lvm(volume.group.name), volume, size_bytes)

    def _extend_overwritten(
        self, known: report.Report, volume: Volume, size_bytes: int, carving: Carving
    ) -> None:
        """The same with extents that hold zeroes; raises Overwriting until there are such."""
        self._take_out_of_use(known, volume)
        ranges = self._zeroer.take(volume, size_bytes - volume.size_bytes, carving)
        lvm, group = self._engines.lvm(volume.group.name), volume.group.name
        volumes.extend(lvm, group, volume.name, size_bytes=size_bytes, disks=ranges)

    def _take_out_of_use(self, known: report.Report, volume: Volume) -> None:
        """Deactivate an origin of snapshots, and these with it: lvm2 grows it only so."""
        if self._inventory.device(str(volume.id)) is None or not volume.copy_on_write_snapshots:
            return
        users.require_unused(self._kernel, self._inventory, volume)
        self._mappings.ensure_closed(volume)
        for one in (str(volume.id), *volume.copy_on_write_snapshots):
            if copies := self._inventory.copies_of(known, one):
                raise errors.VolumeInUse(one, f"{', '.join(copies)} is copied from it")
        volumes.deactivate(self._engines.lvm(volume.group.name), volume.group.name, volume.name)

    def _put_on_record(self, volume: Volume, size_bytes: int) -> None:
        if volume.wanted_bytes != size_bytes:
            self._record(volume, {fact.WANTED: str(size_bytes)})
            # So that those who only glimpse, as staging of a raw block volume does, know of it.
            self._inventory.read(volume.group.name)

    def _record(self, volume: Volume, new: dict[str, str]) -> None:
        old = {key: volume.facts[key] for key in (fact.WANTED,) if key in volume.facts}
        volumes.mark(
            self._engines.lvm(volume.group.name), volume.group.name, volume.name, old=old, new=new
        )


def _wanted_bytes(volume: Volume, size: SizeRange) -> int:
    """The size that is asked for, in whole extents; raises BadSize where it is above the limit."""
    extent, header = volume.group.extent_size_bytes, volume.header_bytes
    wanted = layout.round_up(size.required_bytes + header, extent, volume.layout)
    larger = max(wanted, volume.size_bytes) - header
    if size.limit_bytes and larger > size.limit_bytes:
        raise errors.BadSize(
            f"capacity_range.limit_bytes: {size.limit_bytes} is less than the volume's size would"
            f" be, {larger} bytes"
        )
    return wanted

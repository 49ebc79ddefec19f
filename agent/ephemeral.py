"""Inline volumes: carved when a pod's volume is published, gone when it is unpublished.

Kubelet makes up such a volume's id and calls nothing but NodePublishVolume and NodeUnpublishVolume
for it. So the volume is found by its name, which is made of the id, and by nothing that a process
remembers: a call that follows a crash, at whatever step, finds what is there and goes on.

What is on such a volume lives as long as its pod. A reboot does not end a pod: kubelet publishes
with the same id again, so nothing is removed at start because it is not mounted. What is forgotten
is removed: kubelet takes away the directory of a target only after it was unpublished. Where that
directory is gone, though that of all pods is there, nobody will call again.
"""

import logging
import threading
from contextlib import suppress
from dataclasses import replace

from agent import calls, errors, holders, inventory
from agent.access import Access
from agent.inventory import Volume
from agent.locks import VolumeLocks
from agent.means import Means
from agent.provision import Provisioner
from lvm import errors as lvm_errors
from lvm import tags
from lvm.devices import Device
from mount import errors as mount_errors
from mount import table, target

_log = logging.getLogger(__name__)

# After a boot kubelet has published every pod's volumes again by then.
_GRACE_SECONDS = 600.0
_YES = "true"


class Ephemeral:
    """Carries out the Node's calls on inline volumes."""

    def __init__(
        self, means: Means, provision: Provisioner, access: Access, locks: VolumeLocks
    ) -> None:
        self._kernel, self._inventory = means.kernel, means.inventory
        self._provision = provision
        self._access = access
        self._locks = locks
        self._inside = means.config.kubelet_dir
        self._timer = threading.Timer(_GRACE_SECONDS, self._sweep_quietly)
        self._timer.daemon = True

    def publish(self, call: calls.Inline) -> None:
        """Have the volume mounted at its target: carved, formatted, mounted, whatever is left.

        Five commands at most: a report, lvcreate, and what staging takes. None where it is there.
        """
        place = self._access.place(call.target_path)
        parameters = self._provision.completed(call.parameters, call.capability)
        about = {**(parameters.about or {}), inventory.EPHEMERAL: _YES}
        if tags.fits(inventory.TARGET, place):
            about[inventory.TARGET] = place
        wanted = calls.Create(
            name=call.volume_id,
            size=calls.SizeRange(call.size_bytes),
            capabilities=(call.capability,),
            parameters=replace(call.parameters, about=about),
            topology=calls.Topology(),
            is_ephemeral=True,
        )
        device = self._inventory.device(call.volume_id)
        self._check_place(call.volume_id, device, place)
        self._access.ensure_mounted(
            calls.Stage(call.volume_id, place, call.capability, parameters),
            device,
            lambda: self._provision.create(wanted),
        )

    def ensure_absent(self, volume_id: str) -> None:
        """Wipe and remove the volume, which is unpublished; one that is not there is no error.

        Raises GroupMissing where a group is not there to prove that.
        """
        volume = self._find(volume_id)
        if volume is not None:
            self._provision.delete(str(volume.id))

    def start(self) -> None:
        """Look for what is forgotten, once, when kubelet has had its time."""
        self._timer.start()

    def stop(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def sweep(self) -> None:
        """Wipe and remove the volumes that nobody will unpublish any more."""
        for volume in self._inventory.present(self._inventory.read()):
            if self._is_forgotten(volume):
                self._remove(volume.facts[inventory.NAME])

    def _remove(self, volume_id: str) -> None:
        """Remove a forgotten volume, unless a call came for it meanwhile."""
        with suppress(errors.OperationPending), self._locks.hold(inventory.logical_name(volume_id)):
            volume = self._find(volume_id)
            if volume is None or not self._is_forgotten(volume):
                return
            _log.warning("inline volume %s was left by a pod that is gone; removing it", volume_id)
            try:
                self._provision.delete(str(volume.id))
            except errors.VolumeInUse as error:
                _log.warning("%s", error)

    def _sweep_quietly(self) -> None:
        try:
            self.sweep()
        except (errors.AgentError, lvm_errors.LvmError) as error:
            _log.warning("inline volumes that were left are not removed: %s", error)

    def _find(self, volume_id: str) -> Volume | None:
        known = self._inventory.read()
        volume = self._inventory.named(known, volume_id, inventory.INLINE_PREFIX)
        if volume is None:
            # A group that is not here may hold it.
            self._inventory.require_groups(known)
        return volume

    def _is_forgotten(self, volume: Volume) -> bool:
        """Whether kubelet has removed the target's directory, and not all of its directories."""
        place = volume.facts.get(inventory.TARGET, "")
        if volume.wiping or not volume.is_ephemeral or not place:
            return False
        parent = place.rpartition("/")[0]
        roots = (self._kernel.real_path(one).rstrip("/") + "/" for one in self._inside)
        all_pods = [root + place.removeprefix(root).partition("/")[0] for root in roots]
        there = any(place.startswith(f"{one}/") and self._is_there(one) for one in all_pods)
        return there and not self._is_there(parent)

    def _is_there(self, path: str) -> bool:
        """Only the kernel's own word that there is no such file says so."""
        try:
            self._kernel.lstat(path)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def _check_place(self, volume_id: str, device: Device | None, place: str) -> None:
        """Refuse before anything is made: a target that is taken, and a second one."""
        known = table.read(self._kernel)
        number = None if device is None else device.number
        for mount in known.at(place):
            if mount.device != number:
                raise mount_errors.ForeignMount(place, str(mount))
        target.check_directory(self._kernel, place)
        found = [] if device is None else holders.places(self._kernel, known, device)
        if others := {one.path for one in found} - {place}:
            elsewhere = ", ".join(sorted(others))
            raise errors.VolumeInUse(
                volume_id, f"it is published at {elsewhere}, and an inline volume has one target"
            )

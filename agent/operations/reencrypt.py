"""Re-encryption: a copy of an encrypted volume gets a master key of its own before its first use.

A copy has its source's header, and so its master key. Where its class or StorageClass says
`reencrypt`, lvcreate writes the tag `sharedKey`. When the copy is staged, and before it is opened,
cryptsetup re-encrypts it in place with the call's key. The call answers with the progress, and once
that is done the volume is staged as any other. Not the tag but the header proves the progress: a
complete header that is not being re-encrypted and has the volume's own UUID has its own master key.

| header, with the tag | what happens |
|---|---|
| another's UUID | keys other than the call's are killed, and a re-encryption is begun |
| is being re-encrypted | it goes on; what cryptsetup was at when it was killed is recovered first |
| all is done but the end of the header | it is ended here: cryptsetup may open it no more |
| the volume's own UUID | the tag is removed: it is done |

Crash point: between the end and the UUID; it is re-encrypted once more.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial

from agent.core import errors, luks_devices, tag
from agent.core.context import Context
from agent.core.luks_devices import Mappings, own_uuid, progress
from agent.core.records import Volume
from agent.core.secret import Key, Keys
from agent.core.task_queue import Job, TaskQueue
from agent.core.volume_states import Work
from lvm import volumes
from lvm.devices import Device
from mount import command, luks
from mount import errors as mount_errors
from mount.luks import Header

_log = logging.getLogger(__name__)

# Each job has its key in memory until cryptsetup has it, so few may be queued.
_WORKERS = 8


@dataclass(kw_only=True)
class _Reencryption(Job):
    volume: Volume
    device: Device
    secret: Key


class Reencrypter:
    """Re-encrypts copies with the keys of stage calls."""

    def __init__(self, context: Context) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._stream, self._paces = context.stream, context.paces
        self._cryptsetup = Mappings(context).cryptsetup
        self.grace_seconds = 10.0
        self.jobs = TaskQueue(
            "reencrypt",
            self._work,
            self._find,
            "volume %s has no master key of its own: %s",
            workers=_WORKERS,
        )
        context.conflicts.add(Work.REENCRYPT, self.jobs)

    def ensure(self, volume: Volume, device: Device, header: Header, keys: Sequence[Key]) -> bool:
        """Give a volume that is not open a master key of its own; False if it has one.

        The first of the keys that opens it is used; one process tries each. Raises Reencrypting
        until it is done, WrongKey.
        """
        if not (header.is_reencrypting or tag.SHARED_KEY in volume.own_tags):
            return False
        job = self.jobs.of(str(volume.id))
        if job is None or job.ended.done():
            if header.is_renewed:
                header = self._complete(volume, device)
            key = next((one for one in keys if self._opens(header, device, one)), None)
            if key is None:
                raise mount_errors.WrongKey(device.path)
            job = self._start(volume, device, key)
        wait([job.ended], command.patience_seconds(self.grace_seconds))
        if not job.ended.done():
            raise errors.Reencrypting(job.key, progress(self._kernel, device))
        job.ended.result()
        return True

    def is_at_work(self, volume_id: str) -> bool:
        """Tell whether a volume is being given a master key of its own just now."""
        job = self.jobs.of(volume_id)
        return job is not None and not job.ended.done()

    def _start(self, volume: Volume, device: Device, key: Key) -> _Reencryption:
        # A copy of the key, because the call's is overwritten at its end; and of the report only
        # this volume's part, because many jobs may wait.
        volume = replace(volume, group=volume.group.only(volume.name))
        job = _Reencryption(
            key=str(volume.id),
            on_record=False,
            volume=volume,
            device=device,
            secret=Key(bytearray(key.data)),
        )
        # Also for a job that is called off before it begins.
        job.ended.add_done_callback(lambda _: job.secret.wipe())
        try:
            return self.jobs.start(job)
        except BaseException:
            job.secret.wipe()
            raise

    def _complete(self, volume: Volume, device: Device) -> Header:
        """End what a cryptsetup that was killed in its last steps left."""
        try:
            luks.complete(self._kernel, device.path)
        except (OSError, ValueError) as error:
            raise mount_errors.CryptFailed("reencrypt", device.path, str(error)) from error
        # Crash point: complete, with another's UUID; it is re-encrypted once more.
        self._cryptsetup.name(device.path, own_uuid(device))
        _log.warning("volume %s: the end of its re-encryption was made up for", volume.id)
        return luks_devices.header(self._kernel, device.path, str(volume.id))

    def _opens(self, header: Header, device: Device, key: Key) -> bool:
        try:
            return self._cryptsetup.check(device.path, key.data)
        except mount_errors.CryptFailed:
            # During a re-encryption two slots are to be opened. For a key that opens neither,
            # cryptsetup exits as after any failure; its exit code for a single slot is exact.
            every = header.slots if header.is_reencrypting else ()
            if not every or any(self._cryptsetup.check(device.path, key.data, n) for n in every):
                raise
            return False

    def _find(self, volume_id: str) -> _Reencryption:
        """Nothing to retry: only the next stage has the key."""
        raise errors.NoSuchVolume(volume_id)

    def _work(self, job: _Reencryption) -> None:
        own = own_uuid(job.device)
        with Keys(job.secret).used():
            header = luks_devices.header(self._kernel, job.device.path, job.key)
            if header.is_torn:
                self._cryptsetup.recover(job.device.path, job.secret.data)
            if header.is_reencrypting or header.uuid != own:
                self._reencrypt(job, header)
                self._cryptsetup.name(job.device.path, own)
                _log.info("volume %s has a master key of its own", job.key)
        group, name, own_tags = job.volume.group.name, job.volume.name, job.volume.own_tags
        old = {key: own_tags[key] for key in (tag.SHARED_KEY, tag.SEALED) if key in own_tags}
        new = {tag.SEALED: own}
        if old.get(tag.SEALED) == own:
            del old[tag.SEALED]
        with self._volume_groups.hold(group):
            volumes.mark(self._volume_groups.lvm(group), group, name, old=old, new=new)

    def _reencrypt(self, job: _Reencryption, header: Header) -> None:
        slot = None if header.is_reencrypting else self._only_slot(job, header)
        _log.info("volume %s is being re-encrypted", job.key)
        device = job.device.path
        work = self._paces.of(job.volume.group.name).work(
            "reencrypt", device, check=partial(self.jobs.check, job)
        )
        # All of it is read and written once.
        turn = work.slices(lambda: self._kernel.transferred_bytes(device) // 2)
        self._cryptsetup.reencrypt(self._stream, device, job.secret.data, slot, turn)
        if luks_devices.header(self._kernel, device, job.key).is_reencrypting:
            raise mount_errors.CryptFailed("reencrypt", device, "it ended before its time")

    def _only_slot(self, job: _Reencryption, header: Header) -> int:
        """The slot of the key, after the other slots, which are keys of the source, are killed."""
        device, key = job.device.path, job.secret.data
        slot = next((one for one in header.slots if self._cryptsetup.check(device, key, one)), None)
        if slot is None:
            raise mount_errors.WrongKey(device)
        for other in (*header.slots, *header.unbound):
            if other != slot:
                self._cryptsetup.kill(device, key, other)
        return slot

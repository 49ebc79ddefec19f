"""Encrypted volumes: open them by their keys, change the keys, and create or refuse LUKS2 headers.

What happens when a volume is opened depends on its LUKS2 header and on its tag `sealed`, which
records the UUID of the header that belongs to the volume:

| header | tag `sealed` | what happens |
|---|---|---|
| none, and the device is blank | no | create the header, open; write the tag after the response |
| none, and the device is not blank | no | refuse, change nothing |
| complete, without a key slot, own UUID | no | cryptsetup was killed: create the header anew |
| complete, own UUID | no | the process died before the tag: open, write the tag |
| complete, with the UUID in the tag | yes | open |
| none, or with another UUID than the tag | yes | refuse as damaged; never create a header |

The own UUID of a volume's header is derived from the UUID of its logical volume. A copy of a volume
has the header of its source, so no own UUID is required of the header of a copy without the tag
`sealed`. A header with the own UUID is always accepted for a copy with the tag `sharedKey`, which
versions up to 0.2.0 re-encrypted.

A key is changed in these steps; after a crash between two of them the next call continues:

1. Write the tag `rotating`.
2. Add the new key to a free key slot.
3. Prove that the new key opens that slot.
4. Remove the slot of the old key.
5. Remove the tag `rotating`.

The tag `keyGeneration` names the present key. A volume has the tag only while that key is the only
one in its key slots, apart from the recovery key.
"""

import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from agent.core import errors, tag
from agent.requests.secret import MOST_BYTES, PASSPHRASE, Key, Keys
from agent.settings.classes import BYPASSES, DeviceClass
from agent.volumes import backing, luks_mappings, tag_writer
from agent.volumes.context import Context
from agent.volumes.luks_mappings import Mappings, own_uuid
from agent.volumes.records import Volume
from agent.volumes.volume_states import Call
from lvm import lvm_errors as lvm_errors
from lvm.active_devices import Device, mapping_name
from mount import filesystem, luks
from mount import mount_errors as mount_errors
from mount.luks import Header

_log = logging.getLogger(__name__)

# Sector size of dm-crypt, in bytes, on disks whose physical blocks are at least as large.
_LARGE_SECTOR_BYTES = 4096
# Errors of a change of keys that are only logged; the next call retries the change.
_FAILURES = (errors.AgentError, mount_errors.CommandError, mount_errors.MountError, OSError)
# Tags of a volume while its key is being changed.
_PENDING = {tag.ROTATING: "yes"}
# Key slots of the LUKS2 header for keys of Kubernetes secrets: all but that of the recovery key.
_USUAL = tuple(slot for slot in luks.SLOTS if slot != luks.RECOVERY)


class EncryptedDevices:
    """Opens encrypted volumes and changes their keys.

    The methods do not overwrite the keys that a call passes in: the caller does, when the call
    ends.
    """

    def __init__(self, context: Context) -> None:
        self._configuration = context.configuration
        self._kernel = context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._mender, self._tag_writer = context.mender, context.tag_writer
        self._mappings = Mappings(context)
        self._cryptsetup = self._mappings.cryptsetup
        # Digests of the present and previous key of open volumes, by volume id: of those volumes
        # that this process opened, or whose key it changed.
        self._known: dict[str, tuple[object, ...]] = {}

    def check_keys(self, volume_id: str, device_class: str, keys: Keys, *, encrypted: bool) -> None:
        """Raise KeyMissing if an encrypted volume gets no key, BadField for a needless key.

        A key for a volume without encryption is refused because the owner of the key would believe
        that the volume is encrypted.
        """
        if not encrypted and keys.present:
            raise errors.BadField(
                f"secrets[{PASSPHRASE}]",
                f"is given, but volume {volume_id!r} is not encrypted; make it of a StorageClass"
                " with carver/encryption, or give no secret",
            )
        if encrypted and not keys.present and self._key_file(device_class) is None:
            raise errors.KeyMissing(volume_id, self._missing_class(device_class))

    def check(self, volume: Volume, keys: Keys) -> None:
        """Raise KeyMissing or BadField if the keys of a call do not fit an existing volume."""
        is_encrypted = volume.is_encrypted
        if is_encrypted or keys.present is not None:
            class_name = volume.own_tags.get(tag.CLASS, "")
            self.check_keys(str(volume.id), class_name, keys, encrypted=is_encrypted)

    def opened(self, volume: Volume, device: Device, keys: Keys) -> tuple[Device, dict[str, str]]:
        """Open an active encrypted volume; return the device to use and new tags for the volume.

        For a volume without encryption the result is `device`. A blank volume gets its LUKS2 header
        first. If the copy of an encrypted volume has a btrfs, that gets a new UUID. Runs at most
        two commands unless the key is changed or such a btrfs is found. An open dm-crypt device
        that nothing uses is closed first, because the key that opened it is not known. The caller
        has checked the keys (`check`). Raises KeyMissing, WrongKey, HeaderDamaged, Reencrypting,
        UnexpectedContents.
        """
        if not volume.is_encrypted:
            return device, {}
        mapping = self._activator.mapping(volume)
        if mapping is not None and self._mappings.is_used(mapping):
            return mapping, {}
        # Close no dm-crypt device while the header shows that a re-encryption is under way: an
        # operator's cryptsetup may be running it.
        header = luks.read(self._kernel, device.path)
        if header is not None and header.is_reencrypting:
            raise errors.Reencrypting(str(volume.id), device.path)
        self._activator.close_leftovers(volume)
        with self._key(str(volume.id), volume.own_tags.get(tag.CLASS, ""), keys) as key:
            if mapping is not None:
                self._mappings.ensure_closed(volume)
            # Crash point: the LUKS2 header exists and the tag `sealed` does not. The UUID of the
            # header proves that the header is the volume's own.
            tags = self._ensure_header(volume, device, key, header)
            self._unlock(volume, device, keys, key)
        if tag.SHARED_KEY in volume.own_tags:
            self._adopt_header(volume, device)
        self._mappings.copies.keep(device)
        mapping = self._activator.mapping(volume)
        if mapping is None:
            raise lvm_errors.Inactive(volume.group.name, mapping_name(device))
        if tag.FORMATTED not in volume.own_tags:
            offset_bytes = self._header(volume, device).offset_bytes
            luks.zero_blank_ends(self._kernel, device.path, offset_bytes, mapping.path)
        is_new_copy = volume.is_copied and tag.RENEWED not in volume.own_tags
        # Read the tags before the device is probed: a raw block volume may hold a btrfs that
        # belongs to its user.
        if is_new_copy and volume.may_hold_btrfs and filesystem.is_on(self._kernel, mapping.path):
            # Give the copied btrfs a new UUID: the copy still has the UUID of its source.
            filesystem.renew_uuid(self._kernel, mapping.path)
            tags[tag.RENEWED] = "yes"
        return mapping, tags

    def follow_open(self, volume_id: str, keys: Keys) -> None:
        """Replace the key of a volume, if it is open, by the present key of its secret.

        See `update_key`.
        """
        device = self._activator.device(backing.of_id(volume_id)) if keys.present else None
        if device is not None:
            self.update_key(volume_id, device, keys)

    def update_key(self, volume_id: str, mapping: Device, keys: Keys) -> None:
        """Replace the previous key of an open volume by the present key of its secret.

        Runs no command if the call has no key, or if this process knows that the volume has the
        present key. A failure is logged, and the next call tries again; the volume stays in use.
        """
        if mapping.below is None or keys.present is None:
            return
        if self._known.get(volume_id) == keys.digests():
            return
        device = mapping.logical
        try:
            volume = self._mender.mended_volume(volume_id, Call.USE)
            try:
                self._rotate(volume, device, keys, keys.present)
            except mount_errors.WrongKey:
                self._record(volume, _PENDING)
                raise
        except _FAILURES as error:
            _log.warning("cannot give volume %s the key of its secret yet: %s", volume_id, error)
        else:
            self._known[volume_id] = keys.digests()

    def forget(self, volume_id: str) -> None:
        """Forget what this process knows about the keys of a volume."""
        self._known.pop(volume_id, None)

    def fill(self, volume_id: str, mapping: Device, keys: Keys, *, if_possible: bool) -> bool:
        """Grow the dm-crypt device of a volume to the size of its logical volume.

        The dm-crypt device is smaller than the logical volume by the LUKS2 header. Returns True if
        the device has its full size. Runs one command if the device has to grow. Without a key the
        method raises GrowsWithKey or, with `if_possible`, returns False.
        """
        logical = mapping.logical
        header = luks_mappings.header(self._kernel, logical.path, volume_id)
        size_bytes = self._kernel.device_size_bytes(logical.path) - header.offset_bytes
        if self._kernel.device_size_bytes(mapping.path) >= size_bytes:
            return True
        volume = self._reports.cached(volume_id)
        class_name = "" if volume is None else volume.own_tags.get(tag.CLASS, "")
        if not keys.present and self._key_file(class_name) is None:
            if if_possible:
                return False
            raise errors.GrowsWithKey(volume_id)
        self.update_key(volume_id, mapping, keys)
        with self._key(volume_id, class_name, keys) as key:
            self._cryptsetup.grow(logical.path, key.data, mapping.name)
        return True

    def _adopt_header(self, volume: Volume, device: Device) -> None:
        """Record the present header of a copy as the copy's own, and remove the tag `sharedKey`.

        Carver up to 0.2.0 re-encrypted a copy that has the tag `sharedKey` before its first use.
        """
        sealed_tags = {tag.SEALED: self._header(volume, device).uuid}
        with tag_writer.logging_refusals(str(volume.id), tag.SHARED_KEY):
            self._tag_writer.replace(volume.backing, (tag.SHARED_KEY, tag.SEALED), sealed_tags)

    def _ensure_header(
        self, volume: Volume, device: Device, key: Key, header: Header | None
    ) -> dict[str, str]:
        """Create a volume's LUKS2 header, or check the existing one; return the tags to be written.

        The table at the top of this module says which headers are created, accepted and refused.
        """
        sealed, derived_uuid = volume.own_tags.get(tag.SEALED), own_uuid(device)
        may_be_new = not sealed and tag.FORMATTED not in volume.own_tags
        if header is None or (may_be_new and not header.slots and header.uuid == derived_uuid):
            if not may_be_new:
                raise errors.HeaderDamaged(str(volume.id), "its header is not there, or not whole")
            if header is None:
                self._require_blank(volume, device)
            volume.require_header_bytes()
            # Erase the area of the header. The code gets here only if the probe found the device
            # blank, or if the device has the volume's own header without a key slot, and only if no
            # tag records a header.
            luks.zero_ends(self._kernel, device.path, volume.header_bytes)
            is_large = self._kernel.physical_block_bytes(device.path) >= _LARGE_SECTOR_BYTES
            self._cryptsetup.make(
                device.path,
                key.data,
                uuid=derived_uuid,
                offset_bytes=volume.header_bytes,
                sector_bytes=_LARGE_SECTOR_BYTES if is_large else 512,
            )
            return {tag.SEALED: derived_uuid}
        # Skip the checks of the header's UUID and offset for a copy with the tag `sharedKey` whose
        # header has the UUID that is derived from the copy's own logical volume: Carver up to 0.2.0
        # gave the header of a re-encrypted copy that UUID, and wrote the tag `sealed` only
        # afterwards.
        if not (tag.SHARED_KEY in volume.own_tags and header.uuid == derived_uuid):
            expected = sealed or ("" if volume.is_copied else derived_uuid)
            if expected and header.uuid != expected:
                why = f"there is another header, {header.uuid}, not {expected}"
                raise errors.HeaderDamaged(str(volume.id), why)
            if volume.header_bytes and header.offset_bytes != volume.header_bytes:
                why = f"its data begin at {header.offset_bytes}, not at {volume.header_bytes}"
                raise errors.HeaderDamaged(str(volume.id), why)
        present_tags = {tag.SEALED: header.uuid, tag.HEADER: str(header.offset_bytes)}
        return {key: text for key, text in present_tags.items() if key not in volume.own_tags}

    def _require_blank(self, volume: Volume, device: Device) -> None:
        if luks.has_header_copy(self._kernel, device.path):
            raise errors.HeaderDamaged(str(volume.id), "there is a header that is not whole")
        contents = filesystem.probe_grown(self._kernel, device.path, volume.made_bytes)
        if contents is not None:
            raise mount_errors.UnexpectedContents(device.path, str(contents), "nothing")

    def _unlock(self, volume: Volume, device: Device, keys: Keys, key: Key) -> None:
        """Open a volume by the present key of a call; first replace the previous key if necessary.

        If the keys cannot be changed now, the volume is opened by whichever of the two keys opens
        it. Raises WrongKey if neither key opens the volume.
        """
        previous_key = _former_key(keys.previous, key)
        is_unknown = False
        if previous_key or tag.ROTATING in volume.own_tags or _is_newer(volume, keys):
            try:
                self._rotate(volume, device, keys, key)
            except (errors.AgentError, mount_errors.CommandError) as error:
                # Go on without the change of keys, because no tag can be written now: the volume is
                # opened by the key that it has.
                is_unknown = True
                _log.warning("cannot change the key of volume %s now: %s", volume.id, error)
        try:
            self._open(volume, device, key)
        except mount_errors.WrongKey:
            if previous_key is None:
                raise
            self._open(volume, device, previous_key)
        if not (is_unknown or volume.is_ephemeral):
            self._known[str(volume.id)] = keys.digests()

    def _rotate(self, volume: Volume, device: Device, keys: Keys, key: Key) -> None:
        """Replace the previous key of a volume by the present one, in the header and its backup.

        The volume may be open. No key slot is changed if only the present key opens the volume
        already. Crash points: after each step the volume opens by one of the two keys, and the next
        call continues. Raises WrongKey if neither key opens the volume; nothing is changed in that
        case.
        """
        slots, path = self._header(volume, device).slots, device.path
        previous_key = _former_key(keys.previous, key)
        fitting_slot = next(
            (slot for slot in slots if self._cryptsetup.check(path, key.data, slot)), None
        )
        if fitting_slot is None:
            if previous_key is None or not self._cryptsetup.check(path, previous_key.data):
                raise mount_errors.WrongKey(path)
            self._record(volume, _PENDING)
            fitting_slot = change(self._cryptsetup, slots, path, previous_key, key)
        elif old_slots := self._old_slots(volume, path, slots, fitting_slot, previous_key):
            self._record(volume, _PENDING)
            for slot in old_slots:
                self._cryptsetup.remove_key(path, key.data, slot)
        remaining_slots = self._header(volume, device).slots
        is_changed = remaining_slots != slots or tag.ROTATING in volume.own_tags
        if is_changed:
            # Replace the backup of the header, which still opens by the old key.
            self._mappings.copies.keep(device, overwrite=True)
        if {*remaining_slots} & {*_USUAL} <= {fitting_slot} and (
            is_changed or _is_newer(volume, keys)
        ):
            generation_tags = {tag.KEY_GENERATION: keys.generation} if keys.generation else {}
            self._record(volume, generation_tags)

    def _old_slots(
        self,
        volume: Volume,
        path: str,
        slots: tuple[int, ...],
        present_slot: int,
        previous_key: Key | None,
    ) -> list[int]:
        """Return the key slots that an unfinished change of keys left with older keys.

        `present_slot` is the slot that the present key opens.
        """
        was_begun = bool(previous_key) or tag.ROTATING in volume.own_tags
        other_slots = [slot for slot in slots if slot not in (present_slot, luks.RECOVERY)]
        return [
            slot
            for slot in other_slots
            if (was_begun and {slot, present_slot} <= {*_USUAL})
            or (previous_key and self._cryptsetup.check(path, previous_key.data, slot))
        ]

    def _record(self, volume: Volume, new_tags: Mapping[str, str]) -> None:
        self._tag_writer.replace(volume.backing, tag.OF_KEYS, new_tags)

    def _open(self, volume: Volume, device: Device, key: Key) -> None:
        device_class = self._class(volume.own_tags.get(tag.CLASS, ""))
        self._cryptsetup.open(
            device.path,
            key.data,
            mapping_name(device),
            discard=device_class is not None and device_class.discard,
            bypass=() if device_class is None else BYPASSES[device_class.bypass_workqueue],
        )

    def _header(self, volume: Volume, device: Device) -> Header:
        return luks_mappings.header(self._kernel, device.path, str(volume.id))

    @contextmanager
    def _key(self, volume_id: str, device_class: str, keys: Keys) -> Iterator[Key]:
        """Provide the caller's key, or else the key in the class's `key_file`.

        The key that was read from the file is overwritten when the `with` block ends.
        """
        if keys.present:
            yield keys.present
            return
        file = self._key_file(device_class)
        if file is None:
            raise errors.KeyMissing(volume_id, self._missing_class(device_class))
        key = read_key(file)
        with Keys(key).used():
            yield key

    def _missing_class(self, device_class: str) -> str:
        """Return the name of a device class that the configuration lacks, or an empty string.

        The result is empty if the configuration has the class.
        """
        return device_class if device_class and self._class(device_class) is None else ""

    def _key_file(self, device_class: str) -> str | None:
        settings = self._class(device_class)
        return None if settings is None or settings.key_file is None else str(settings.key_file)

    def _class(self, name: str) -> DeviceClass | None:
        """Return the device class that has a name; None for a missing class or an empty name."""
        return next(
            (
                device_class
                for device_class in self._configuration.now.classes
                if device_class.name == name
            ),
            None,
        )


def read_key(path: str) -> Key:
    """Return the key in an operator's file: all bytes of the file.

    Raises NotReady if the file cannot be read, has a wrong length, or can be read by another user.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise errors.NotReady(f"key_file {path} cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.getuid()
            or status.st_mode & 0o077
        ):
            raise errors.NotReady(
                f"key_file {path} must be a file that only its owner, the user of Carver, can read"
                " (chmod 0400)"
            )
        buffer = bytearray(MOST_BYTES + 1)
        length = os.readv(descriptor, [buffer])
    finally:
        os.close(descriptor)
    if not 0 < length <= MOST_BYTES:
        buffer[:] = bytes(len(buffer))
        raise errors.NotReady(f"key_file {path} must have 1 to {MOST_BYTES} bytes")
    del buffer[length:]
    return Key(buffer)


def change(
    program: luks.Cryptsetup, slots: tuple[int, ...], device: str, old_key: Key, new_key: Key
) -> int:
    """Replace a volume's key, and return the slot of the new key.

    `old_key` is the volume's key or its recovery key. Crash points: before each `remove_key` the
    volume can be opened by both keys. Raises WrongKey if `old_key` opens no slot.
    """
    free_slot = next((slot for slot in _USUAL if slot not in slots), None)
    if free_slot is None:
        # Free a key slot whose key is not `old_key`: an unfinished change left a key in the slot
        # that is older than `old_key`. `old_key` must keep a slot, because the next command adds
        # the new key by `old_key`.
        candidates = (slot for slot in _USUAL if not program.check(device, old_key.data, slot))
        free_slot = next(candidates, _USUAL[-1])
        program.remove_key(device, old_key.data, free_slot)
    program.add(device, old_key.data, new_key.data, free_slot)
    if not program.check(device, new_key.data, free_slot):
        raise mount_errors.CryptFailed(
            "luksAddKey", device, f"the new key opens no slot {free_slot}"
        )
    for slot in slots:
        if slot in (free_slot, luks.RECOVERY):
            continue
        if slot in _USUAL or program.check(device, old_key.data, slot):
            program.remove_key(device, new_key.data, slot)
    return free_slot


def _former_key(previous_key: Key | None, present_key: Key) -> Key | None:
    """Return the previous key if it differs from the present one, else None."""
    return previous_key if previous_key and previous_key.data != present_key.data else None


def _is_newer(volume: Volume, keys: Keys) -> bool:
    """Whether a call's key has another name than the one in the volume's tag `keyGeneration`.

    The result is False for a key without a name.
    """
    return keys.generation not in ("", volume.own_tags.get(tag.KEY_GENERATION))

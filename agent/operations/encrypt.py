"""Encrypted volumes: opened by their keys, the keys changed; and when a header is made or refused.

| header | tag `sealed` | what happens |
|---|---|---|
| none, the device blank | no | a header is made; the tag is written after the answer; open |
| none, the device not blank | no | refused, untouched |
| complete, no key slot, the volume's own UUID | no | cryptsetup was killed: it is made anew |
| complete, the volume's own UUID | no | a crash came before the tag: open, the tag is written |
| complete, as the tag says | yes | open |
| none, or another than the tag says | yes | refused: damaged, and never made anew |

The UUID of a volume's own header follows from the logical volume's. A copy has the header of its
source.

A key is changed in steps, and each is a crash point: the tag `rotating`, the new key in a free
slot, a proof that it opens that slot, the old slot killed, the tag removed. The tag `keyGeneration`
is there only while the key of that name is the only one of the usual slots.
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

_LARGE_SECTOR_BYTES = 4096
_FAILURES = (errors.AgentError, mount_errors.CommandError, mount_errors.MountError, OSError)
_PENDING = {tag.ROTATING: "yes"}
_USUAL = tuple(one for one in luks.SLOTS if one != luks.RECOVERY)


class EncryptedDevices:
    """Opens encrypted volumes and changes their keys. The caller overwrites a call's keys."""

    def __init__(self, context: Context) -> None:
        self._configuration = context.configuration
        self._kernel = context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._mender, self._tag_writer = context.mender, context.tag_writer
        self._mappings = Mappings(context)
        self._cryptsetup = self._mappings.cryptsetup
        # Digests of the keys that each open volume has, as far as this process knows.
        self._known: dict[str, tuple[object, ...]] = {}

    def check_keys(self, volume_id: str, device_class: str, keys: Keys, *, encrypted: bool) -> None:
        """Raise KeyMissing, and BadField for a key to a volume that is not encrypted.

        The key's owner believes that it protects the volume.
        """
        if not encrypted and keys.present:
            raise errors.BadField(
                f"secrets[{PASSPHRASE}]",
                f"is given, but volume {volume_id!r} is not encrypted; make it of a StorageClass"
                " with carver/encryption, or give no secret",
            )
        if encrypted and not keys.present and self._key_file(device_class) is None:
            raise errors.KeyMissing(volume_id, self._gone(device_class))

    def check(self, volume: Volume, keys: Keys) -> None:
        """Raise what `check_keys` raises, for a volume that is there."""
        called = volume.own_tags.get(tag.CLASS, "")
        self.check_keys(str(volume.id), called, keys, encrypted=volume.is_encrypted)

    def opened(self, volume: Volume, device: Device, keys: Keys) -> tuple[Device, dict[str, str]]:
        """Open an active volume: the device by which it is used, and new tags for the volume.

        For a volume that is not encrypted that is its own device. Two commands at most, without a
        change of keys. A volume that is open and not used is closed first: what opened it is not
        known. Raises KeyMissing, WrongKey, HeaderDamaged, Reencrypting, UnexpectedContents.
        """
        self.check(volume, keys)
        if not volume.is_encrypted:
            return device, {}
        mapping = self._activator.mapping(volume)
        if mapping is not None and self._mappings.is_used(mapping):
            return mapping, {}
        # An operator's cryptsetup may be at the re-encryption now: nothing of it is closed.
        header = luks.read(self._kernel, device.path)
        if header is not None and header.is_reencrypting:
            raise errors.Reencrypting(str(volume.id), device.path)
        self._activator.close_leftovers(volume)
        with self._key(str(volume.id), volume.own_tags.get(tag.CLASS, ""), keys) as key:
            if mapping is not None:
                self._mappings.ensure_closed(volume)
            # Crash point: a header without the tag `sealed`; its UUID is the volume's own.
            tags = self._sealed(volume, device, key, header)
            self._unlock(volume, device, keys, key)
        if tag.SHARED_KEY in volume.own_tags:
            self._settle(volume, device)
        self._mappings.copies.keep(device)
        mapping = self._activator.mapping(volume)
        if mapping is None:
            raise lvm_errors.Inactive(volume.group.name, mapping_name(device))
        if tag.FORMATTED not in volume.own_tags:
            offset_bytes = self._header(volume, device).offset_bytes
            luks.blank(self._kernel, device.path, offset_bytes, mapping.path)
        is_new_copy = volume.is_copied and tag.RENEWED not in volume.own_tags
        # By the tags first: a raw block volume, or a file, may hold a btrfs that is its user's.
        if is_new_copy and volume.may_hold_btrfs and filesystem.is_on(self._kernel, mapping.path):
            # A copied btrfs has the id of its source.
            filesystem.renew(self._kernel, mapping.path)
            tags[tag.RENEWED] = "yes"
        return mapping, tags

    def follow_open(self, volume_id: str, keys: Keys) -> None:
        """Give a volume in use, if it is open, the present key of its secret; see `follow`."""
        device = self._activator.device(backing.of_id(volume_id)) if keys.present else None
        if device is not None:
            self.follow(volume_id, device, keys)

    def follow(self, volume_id: str, mapping: Device, keys: Keys) -> None:
        """Give an open volume the present key of its secret in place of the previous one.

        No command where this process knows that the volume has it, or without a key. A failure is
        logged and retried at the next call: the volume stays in use.
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
        """Forget which keys a volume has."""
        self._known.pop(volume_id, None)

    def fill(self, volume_id: str, mapping: Device, keys: Keys, *, if_possible: bool) -> bool:
        """Grow an open volume to its logical volume's size, less the header; True if it has it.

        One command if it is smaller. Without a key it raises GrowsWithKey or, `if_possible`,
        returns False.
        """
        logical = mapping.logical
        header = luks_mappings.header(self._kernel, logical.path, volume_id)
        size_bytes = self._kernel.device_size_bytes(logical.path) - header.offset_bytes
        if self._kernel.device_size_bytes(mapping.path) >= size_bytes:
            return True
        volume = self._reports.cached(volume_id)
        called = "" if volume is None else volume.own_tags.get(tag.CLASS, "")
        if not keys.present and self._key_file(called) is None:
            if if_possible:
                return False
            raise errors.GrowsWithKey(volume_id)
        self.follow(volume_id, mapping, keys)
        with self._key(volume_id, called, keys) as key:
            self._cryptsetup.grow(logical.path, key.data, mapping.name)
        return True

    def _settle(self, volume: Volume, device: Device) -> None:
        """Have the tags of a copy say that the header that is there is the copy's for good.

        Versions up to 0.2.0 were to re-encrypt a copy that has the tag `sharedKey`.
        """
        sealed = {tag.SEALED: self._header(volume, device).uuid}
        with tag_writer.logging_refusals(str(volume.id), tag.SHARED_KEY):
            self._tag_writer.replace(volume.backing, (tag.SHARED_KEY, tag.SEALED), sealed)

    def _sealed(
        self, volume: Volume, device: Device, key: Key, header: Header | None
    ) -> dict[str, str]:
        """Make a volume's header, or check the one that is there; return the tags to be written.

        The table above says which.
        """
        sealed, own = volume.own_tags.get(tag.SEALED), own_uuid(device)
        may_be_new = not sealed and tag.FORMATTED not in volume.own_tags
        if header is None or (may_be_new and not header.slots and header.uuid == own):
            if not may_be_new:
                raise errors.HeaderDamaged(str(volume.id), "its header is not there, or not whole")
            if header is None:
                self._require_blank(volume, device)
            volume.require_header_bytes()
            # Only for a device that is blank by the probe, or has its own header without a key
            # slot, and has no tag of a header.
            luks.erase(self._kernel, device.path, volume.header_bytes)
            is_large = self._kernel.physical_block_bytes(device.path) >= _LARGE_SECTOR_BYTES
            self._cryptsetup.make(
                device.path,
                key.data,
                uuid=own,
                offset_bytes=volume.header_bytes,
                sector_bytes=_LARGE_SECTOR_BYTES if is_large else 512,
            )
            return {tag.SEALED: own}
        # Versions up to 0.2.0 gave the header of a copy that they had re-encrypted the volume's own
        # UUID, and wrote the tag `sealed` after that.
        if not (tag.SHARED_KEY in volume.own_tags and header.uuid == own):
            expected = sealed or ("" if volume.is_copied else own)
            if expected and header.uuid != expected:
                why = f"there is another header, {header.uuid}, not {expected}"
                raise errors.HeaderDamaged(str(volume.id), why)
            if volume.header_bytes and header.offset_bytes != volume.header_bytes:
                why = f"its data begin at {header.offset_bytes}, not at {volume.header_bytes}"
                raise errors.HeaderDamaged(str(volume.id), why)
        found = {tag.SEALED: header.uuid, tag.HEADER: str(header.offset_bytes)}
        return {key: text for key, text in found.items() if key not in volume.own_tags}

    def _require_blank(self, volume: Volume, device: Device) -> None:
        if luks.bears_any(self._kernel, device.path):
            raise errors.HeaderDamaged(str(volume.id), "there is a header that is not whole")
        found = filesystem.probe_grown(self._kernel, device.path, volume.made_bytes)
        if found is not None:
            raise mount_errors.UnexpectedContents(device.path, str(found), "nothing")

    def _unlock(self, volume: Volume, device: Device, keys: Keys, key: Key) -> None:
        """Open a volume by its key, or by the previous one, which is replaced first."""
        previous = _other(keys.previous, key)
        is_unknown = False
        if previous or tag.ROTATING in volume.own_tags or _is_newer(volume, keys):
            try:
                self._rotate(volume, device, keys, key)
            except (errors.AgentError, mount_errors.CommandError) as error:
                # No tag can be written now. The volume is opened by the key that it has.
                is_unknown = True
                _log.warning("cannot change the key of volume %s now: %s", volume.id, error)
        try:
            self._open(volume, device, key)
        except mount_errors.WrongKey:
            if previous is None:
                raise
            self._open(volume, device, previous)
        if not (is_unknown or volume.is_ephemeral):
            self._known[str(volume.id)] = keys.digests()

    def _rotate(self, volume: Volume, device: Device, keys: Keys, key: Key) -> None:
        """Replace the previous key of a volume, which may be open, and of its header's copy.

        Crash points: each step; the volume opens by one of the two keys, and the next call goes on.
        Raises WrongKey where neither opens it; then nothing is changed.
        """
        slots, path = self._header(volume, device).slots, device.path
        previous = _other(keys.previous, key)
        fits = next((one for one in slots if self._cryptsetup.check(path, key.data, one)), None)
        if fits is None:
            if previous is None or not self._cryptsetup.check(path, previous.data):
                raise mount_errors.WrongKey(path)
            self._record(volume, _PENDING)
            fits = change(self._cryptsetup, slots, path, previous, key)
        elif old := self._old_slots(volume, path, slots, fits, previous):
            self._record(volume, _PENDING)
            for one in old:
                self._cryptsetup.kill(path, key.data, one)
        left = self._header(volume, device).slots
        is_changed = left != slots or tag.ROTATING in volume.own_tags
        if is_changed:
            # The header's copy opens by the old key.
            self._mappings.copies.keep(device, anew=True)
        if {*left} & {*_USUAL} <= {fits} and (is_changed or _is_newer(volume, keys)):
            named = {tag.KEY_GENERATION: keys.generation} if keys.generation else {}
            self._record(volume, named)

    def _old_slots(
        self, volume: Volume, path: str, slots: tuple[int, ...], fits: int, previous: Key | None
    ) -> list[int]:
        """The slots of older keys that an unfinished change of keys left."""
        was_begun = bool(previous) or tag.ROTATING in volume.own_tags
        others = [one for one in slots if one not in (fits, luks.RECOVERY)]
        return [
            one
            for one in others
            if (was_begun and {one, fits} <= {*_USUAL})
            or (previous and self._cryptsetup.check(path, previous.data, one))
        ]

    def _record(self, volume: Volume, new: Mapping[str, str]) -> None:
        self._tag_writer.replace(volume.backing, tag.OF_KEYS, new)

    def _open(self, volume: Volume, device: Device, key: Key) -> None:
        one = self._class(volume.own_tags.get(tag.CLASS, ""))
        self._cryptsetup.open(
            device.path,
            key.data,
            mapping_name(device),
            discard=one is not None and one.discard,
            bypass=() if one is None else BYPASSES[one.bypass_workqueue],
        )

    def _header(self, volume: Volume, device: Device) -> Header:
        return luks_mappings.header(self._kernel, device.path, str(volume.id))

    @contextmanager
    def _key(self, volume_id: str, device_class: str, keys: Keys) -> Iterator[Key]:
        """The caller's key, or that of the class's file, which is overwritten at the end."""
        if keys.present:
            yield keys.present
            return
        file = self._key_file(device_class)
        if file is None:
            raise errors.KeyMissing(volume_id, self._gone(device_class))
        key = read_key(file)
        with Keys(key).used():
            yield key

    def _gone(self, device_class: str) -> str:
        """The class's name where the configuration lacks it; else empty."""
        return device_class if device_class and self._class(device_class) is None else ""

    def _key_file(self, device_class: str) -> str | None:
        one = self._class(device_class)
        return None if one is None or one.key_file is None else str(one.key_file)

    def _class(self, name: str) -> DeviceClass | None:
        """The class of that name; None where the configuration lacks it, or the name is empty."""
        return next((one for one in self._configuration.now.classes if one.name == name), None)


def read_key(path: str) -> Key:
    """The key in an operator's file: all of its bytes.

    Raises NotReady for a file that another user can read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise errors.NotReady(f"key_file {path} cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
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
    program: luks.Cryptsetup, slots: tuple[int, ...], device: str, old: Key, new: Key
) -> int:
    """Replace a volume's key, by that or by the recovery key; the new key's slot.

    Crash points: before each `kill`; the volume opens by both keys. Raises WrongKey.
    """
    free = next((one for one in _USUAL if one not in slots), None)
    if free is None:
        # An unfinished change left a key older than `old`, which opens another slot by this check.
        others = (one for one in _USUAL if not program.check(device, old.data, one))
        free = next(others, _USUAL[-1])
        program.kill(device, old.data, free)
    program.add(device, old.data, new.data, free)
    if not program.check(device, new.data, free):
        raise mount_errors.CryptFailed("luksAddKey", device, f"the new key opens no slot {free}")
    for slot in slots:
        if slot in (free, luks.RECOVERY):
            continue
        if slot in _USUAL or program.check(device, old.data, slot):
            program.kill(device, new.data, slot)
    return free


def _other(previous: Key | None, present: Key) -> Key | None:
    """The previous key, if it is not the present one."""
    return previous if previous and previous.data != present.data else None


def _is_newer(volume: Volume, keys: Keys) -> bool:
    """Whether the name of a call's key is not the one that the volume's tags record."""
    return keys.generation not in ("", volume.own_tags.get(tag.KEY_GENERATION))

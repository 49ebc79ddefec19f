"""Describe a snapshot and its volume in a stream's header; check the header on arrival."""

import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from agent.core import errors, tag
from agent.core.ids import VolumeId, group_of
from agent.extras.changed_blocks.activations import Activations
from agent.extras.streams import form
from agent.extras.streams.form import Header
from agent.operations import block_sizes, plan
from agent.requests import parameters
from agent.requests.parameters import MUTABLE, STORAGE_CLASS, Parameters, require_object_names
from agent.requests.requests import BLOCK, MOUNT
from agent.settings.classes import DeviceClass
from agent.volumes import records, volume_states
from agent.volumes.context import Context
from agent.volumes.records import Snapshot
from agent.volumes.report_age import Fresh
from agent.volumes.volume_states import EndedBy
from lvm import report, tags
from lvm.layout import Layout
from lvm.tuning import PLAIN, Tuning
from mount import filesystem, luks
from mount import mount_errors as mount_errors

# Keys, in the `facts` of a stream's header, of the mutable parameters: the limits of I/O, which
# have tags of the same keys, and the settings that lvm2 keeps.
_MUTABLE = tuple(row.key for row in MUTABLE)
# Key, in the `facts` of a stream's header, that says that mutable parameters without a fact have
# their defaults. Versions up to 0.2.0 do not send this fact, and of these parameters only limits.
# Defaults themselves are not sent, as those versions would keep a tag for a limit of 0.
_ALL_MUTABLE = "allMutable"
# Keys of a volume's tags that a stream carries. All other tags belong to the node, or are made anew
# on the node that receives the stream.
SENT = tuple(key for key in tag.following(tag.Follows.MOVE) if key not in _MUTABLE)
# Keys of the tags that may be added to a volume after its first stream was received.
_ADDED = (tag.FORMATTED, tag.SEALED, tag.ROTATING)
# Keys of the tags that say the same in each stream of a volume.
_LASTING = (tag.ACCESS, tag.ENCRYPTION, tag.HEADER)

# Key, in the `facts` of a stream's header, of the largest logical block size that the contents can
# lie on, in bytes; 0 for any block size. This key is not the key of a tag.
BLOCKS = "blocks"


def blocks_of(header: Header) -> int:
    """Return the largest logical block size that a stream's contents can lie on, in bytes.

    The result is 0 if the contents can lie on blocks of any size, or if the header does not say.
    """
    return tags.number(header.facts.get(BLOCKS, "")) or 0


def tags_of(
    name: str, device_class: DeviceClass, header: Header, size_bytes: int, group: report.Group
) -> dict[str, str]:
    """Make the tags of the volume into which a stream is received, from the stream's header.

    `size_bytes` is the size of that volume. Raises BadField or NotAllowed if the header is wrong,
    and BadField if the class encrypts and the stream is not encrypted.
    """
    sent_tags = _checked(header, {})
    if device_class.encryption and tag.ENCRYPTION not in sent_tags:
        why = (
            f"class {device_class.name} encrypts, and the stream is not encrypted; take another"
            " class"
        )
        raise errors.BadField("stream.facts[encryption]", why)
    own_tags = {
        **sent_tags,
        tag.CLASS: device_class.name,
        tag.NAME: name,
        **volume_states.tags_for(EndedBy.RECEIVER),
        tag.SIZE: str(size_bytes),
        tag.LAYOUT: str(device_class.layout),
        tag.RECEIVED: header.volume_id,
        tag.INTO: header.chain,
        tag.OFFSET: "0",
        **({tag.RELEASE: header.release} if header.release else {}),
        **plan.of_class(device_class, size_bytes, group),
    }
    own_tags.pop(tag.REQUESTED, None)
    own_tags |= requested(header, size_bytes)
    for key, value in own_tags.items():
        tag.require_fits(f"stream.facts[{key}]", key, value)
    return own_tags


def added_tags(header: Header, present_tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of the contents that a volume gets by a stream after its first one.

    `present_tags` are the volume's tags. Raises BadField or NotAllowed if the header is wrong, or
    does not fit them.
    """
    sent_tags = _checked(header, present_tags)
    return {key: sent_tags[key] for key in _ADDED if sent_tags.get(key)}


def _checked(header: Header, present_tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that a stream carries; raise BadField or NotAllowed if one is wrong.

    `present_tags` are the tags of the volume that received the stream's base; empty if there is
    none. The access type, the encryption and the length of the LUKS2 header never change, so those
    that the header lacks are taken from these tags.
    """
    sent_tags = {key: value for key, value in header.facts.items() if key in SENT}
    if present_tags:
        if tag.ENCRYPTION in sent_tags and tag.ENCRYPTION not in present_tags:
            why = "is set, and the streams before were not encrypted"
            raise errors.BadField("stream.facts[encryption]", why)
        lasting = {key: present_tags[key] for key in _LASTING if key in present_tags}
        sent_tags = lasting | sent_tags
    # The volume mode is not guessed. If the header does not say the mode, only a volume that Carver
    # formatted counts as one with a file system: a volume that pods use as a raw device has no file
    # system of Carver's.
    access = sent_tags.get(tag.ACCESS, MOUNT if sent_tags.get(tag.FORMATTED) else "")
    if access not in (BLOCK, MOUNT):
        raise errors.NotAllowed("stream.facts[access]", access, (BLOCK, MOUNT))
    # Check the parameters that staging needs.
    texts = {
        row.key: sent_tags[row.tag] for row in STORAGE_CLASS if row.format and row.tag in sent_tags
    }
    given = Parameters.from_proto(texts, "stream.facts")
    if given.fs_type:
        given.check_for(given.fs_type, "stream.facts")
    _check_encryption(sent_tags, header.size_bytes)
    formatted = sent_tags.get(tag.FORMATTED, "")
    if formatted and formatted not in filesystem.FILE_SYSTEMS:
        raise errors.NotAllowed("stream.facts[formatted]", formatted, filesystem.FILE_SYSTEMS)
    require_object_names("stream.facts", sent_tags)
    for key, value in sent_tags.items():
        tag.require_fits(f"stream.facts[{key}]", key, value)
    return {**sent_tags, tag.ACCESS: access}


def tuning_of(header: Header, shape: Layout) -> Tuning:
    """Return the mutable parameters of the volume that receives a stream, by the stream's header.

    Parameters that the header does not describe are unspecified, as are the rates of RAID recovery
    if `shape`, the layout of that volume, is no RAID. Raises BadField if a parameter is wrong.
    """
    facts = {key: header.facts[key] for key in _MUTABLE if key in header.facts}
    sent = parameters.tuning_of(facts, "stream.facts")
    if _ALL_MUTABLE in header.facts:
        sent = replace(sent.applied_to(PLAIN), bound_recovery_kib=None)
    return sent if shape.is_raid else replace(sent, **dict.fromkeys(sent.of_raid))


def requested(header: Header, size_bytes: int) -> dict[str, str]:
    """Return the tag with the size that was asked for when the sent volume was made or grown.

    Empty if the volume has no more than that size. `size_bytes` is the size of the volume that
    receives the stream.
    """
    requested_bytes = records.requested_bytes(header.facts, header.size_bytes)
    return records.requested(
        requested_bytes, size_bytes, tags.number(header.facts.get(tag.HEADER, "")) or 0
    )


def _check_encryption(sent_tags: Mapping[str, str], size_bytes: int) -> None:
    """Raise BadField if a tag of the LUKS2 header is wrong, or set without encryption."""
    sealed, length = sent_tags.get(tag.SEALED, ""), sent_tags.get(tag.HEADER, "")
    if tag.ENCRYPTION not in sent_tags:
        if sealed or length:
            raise errors.BadField("stream.facts[header]", "is set, and the stream is not encrypted")
        return
    if not luks.METADATA_BYTES < (tags.number(length) or 0) < size_bytes:
        raise errors.BadField(
            "stream.facts[header]",
            f"{length!r} are not the bytes that an encrypted volume of {size_bytes} begins with",
        )
    if sealed:
        try:
            uuid.UUID(sealed)
        except ValueError:
            raise errors.BadField("stream.facts[sealed]", f"{sealed!r} is no UUID") from None


class Sender:
    """Activates snapshots to be sent, and makes the headers of their streams."""

    def __init__(self, context: Context, activations: Activations) -> None:
        self._volume_groups = context.volume_groups
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._kernel = context.kernel
        self._activations = activations

    def open(self, snapshot_id: str, base_id: str = "") -> tuple[Header, str]:
        """Activate a snapshot; return the header of its stream, and the id of a lease on it.

        With `base_id`, the header is of an increment since that snapshot. The caller ends the lease
        by `Activations.end_lease`; the id is empty for a COW snapshot, which has no lease. Runs at
        most two lvm2 commands, and commands that repair what a killed lvm2 left in the volume
        group.

        Raises NoSuchSnapshot or OtherGroup if this node has no such snapshot, SourceLost if a
        snapshot is invalid, TagsDamaged if no tag says the access type, and BadField if the base is
        not an older snapshot of the same volume.
        """
        with self._volume_groups.hold(group_of(snapshot_id)):
            fresh_report = self._mender.mend(group_of(snapshot_id))
            snapshot = self._ready(fresh_report, snapshot_id)
            header = self._header(fresh_report, snapshot, base_id)
            lease = self._activations.lease(snapshot)
        return self._with_blocks(header, snapshot), lease

    def _with_blocks(self, header: Header, snapshot: Snapshot) -> Header:
        """Add to a stream's header the largest logical block size that the contents can lie on.

        The contents can lie on blocks of at most that size. The size is read from the snapshot's
        active device, while no volume group's lock is held. If it cannot be read, the header is
        returned unchanged.
        """
        device = self._activator.device(snapshot.backing)
        if device is not None:
            with suppress(OSError, mount_errors.MountError):
                block_bytes = block_sizes.of_contents(self._kernel, header.facts, device.path)
                return replace(header, facts={**header.facts, BLOCKS: str(block_bytes)})
        return header

    def chain(self, snapshot_id: str) -> str:
        """Return a snapshot's chain, which names exactly what the snapshot holds (`form.chain_of`).

        The snapshot need not be active. Raises NoSuchSnapshot, OtherGroup, and SourceLost if the
        snapshot is invalid.
        """
        fresh_report = self._reports.fresh(group_of(snapshot_id))
        return chain_of(self._ready(fresh_report, snapshot_id))

    def _header(self, fresh_report: Fresh, snapshot: Snapshot, base_id: str) -> Header:
        header = Header(
            volume_id=str(snapshot.source_id),
            snapshot_id=str(snapshot.id),
            size_bytes=snapshot.size_bytes,
            taken_nanoseconds=snapshot.time_nanoseconds,
            chain=chain_of(snapshot),
            facts=self._facts(fresh_report, snapshot),
        )
        if not base_id:
            return header
        parsed = VolumeId.parse(base_id)
        if parsed is not None and parsed.group != snapshot.group.name:
            raise errors.BadField("since", f"{base_id} is in another volume group")
        base = self._ready(fresh_report, base_id)
        if base.source_id != snapshot.source_id:
            raise errors.BadField("since", f"{base_id} is of {base.source_id}, another volume")
        is_newer = records.is_older(base, snapshot) is False
        # A base is never larger than a later snapshot, because volumes only grow.
        if is_newer or base.id == snapshot.id or base.size_bytes > snapshot.size_bytes:
            raise errors.BadField("since", f"{base_id} is no older than {snapshot.id}")
        return replace(
            header,
            base_snapshot_id=str(base.id),
            base_chain=chain_of(base),
            base_size_bytes=base.size_bytes,
        )

    def _ready(self, fresh_report: Fresh, snapshot_id: str) -> Snapshot:
        snapshot = self._reports.snapshot(fresh_report, snapshot_id)
        if snapshot.problem:
            raise errors.SourceLost(snapshot_id, snapshot.problem)
        return snapshot

    def _facts(self, fresh_report: Fresh, snapshot: Snapshot) -> dict[str, str]:
        """Return the tags and mutable parameters of a snapshot's volume that a stream carries.

        The tags of the contents are as they were when the snapshot was taken. If the volume is
        gone, the tags come from the snapshot, which has copies of some, and the mutable parameters
        are left out. Raises TagsDamaged if no tag says the access type.
        """
        own_tags, texts = snapshot.own_tags, dict[str, str]()
        volume_id = str(snapshot.source_id)
        if VolumeId.parse(volume_id) is not None:
            try:
                volume = fresh_report.volume(volume_id)
                volume_tags = volume.own_tags
                tuning = volume.group.volume(volume.name).tuning
                texts = {**parameters.texts_of(tuning.missing_from(PLAIN)), _ALL_MUTABLE: "yes"}
            except errors.NoSuchVolume:
                volume_tags = {}
            # The tags of format, header and keys come from the snapshot only. Since the snapshot
            # was taken, the volume may have been formatted, or may have got its header or another
            # key.
            blank_tags = dict.fromkeys((tag.FORMATTED, tag.SEALED, *tag.OF_KEYS), "")
            own_tags = {**volume_tags, **blank_tags, **own_tags}
        sent_tags = {key: own_tags[key] for key in SENT if own_tags.get(key)}
        # `is_block` raises TagsDamaged if the tag of the access type is lost, and no other tag
        # implies the access type.
        is_block = records.is_block(str(snapshot.id), sent_tags)
        return {**sent_tags, **texts, tag.ACCESS: BLOCK if is_block else MOUNT}


def chain_of(snapshot: Snapshot) -> str:
    """Return a snapshot's chain: a digest that names exactly what the snapshot holds.

    The snapshot's volume need not exist any more.
    """
    lvm_uuid = snapshot.group.volume(snapshot.name).uuid
    return form.chain_of(
        str(snapshot.source_id), lvm_uuid, snapshot.time_nanoseconds, snapshot.size_bytes
    )

"""ControllerPublishVolume and ControllerUnpublishVolume: a volume's attachment, kept on record.

A volume is on its node's own disks, so nothing is connected or cut off. What a CO may rely on is
kept in a tag: that it is attached, how, and to which node.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from agent.core import errors, ids, tag
from agent.operations import validate
from agent.requests.requests import AttachVolume, DetachVolume
from agent.volumes import backing, tag_writer
from agent.volumes.context import Context
from agent.volumes.records import Attachment
from agent.volumes.volume_states import Call


class Attacher:
    """Attaches volumes to this node, and detaches them."""

    def __init__(self, context: Context) -> None:
        self._reports, self._mender = context.reports, context.mender
        self._tag_writer = context.tag_writer
        self._configuration = context.configuration
        self._guard = threading.Lock()
        # The ids of volumes that are being attached, which their tags do not say yet.
        self._beginning: set[str] = set()

    @property
    def _node_id(self) -> str:
        return self._configuration.now.node_id

    def attach(self, call: AttachVolume) -> None:
        """Record that a volume is attached to this node: two commands at most, later one or none.

        Where lvm2 refuses the tag, as where the group's metadata are full, the volume can be used
        all the same, and the record is missing. Raises NoSuchNode, AttachedOtherwise,
        TooManyAttached, or GroupBusy where a silent group decides that, and BadField for a
        capability that the volume can never have.
        """
        volume = self._mender.mended_volume(call.volume_id, Call.MANAGE)
        if call.node_id != self._node_id:
            raise errors.NoSuchNode(call.node_id, f"this is node {self._node_id!r}")
        if why := validate.unfit(volume, call.capability):
            raise errors.BadField("volume_capability", why)
        capability = call.capability
        wanted = Attachment(capability.access, capability.mode, call.read_only, self._node_id)
        found = volume.attachment_to(self._node_id)
        if found == wanted:
            return
        if found is not None:
            raise errors.AttachedOtherwise(call.volume_id, found, wanted)
        with self._counted(call.volume_id):
            self._record(call.volume_id, {tag.ATTACHED: str(wanted)})

    def detach(self, call: DetachVolume) -> None:
        """Remove the record: two commands at most, later one or none.

        What is not there, or not of this node, is not attached to it. What Carver must not change,
        of a refused group or for a newer version, keeps its record: no call could remove that, and
        an attachment must not stay for ever.
        """
        if call.node_id not in ("", self._node_id):
            return
        try:
            group = ids.group_of(call.volume_id)
            volume = self._reports.fresh(group).volume(call.volume_id)
        except (errors.NoSuchVolume, errors.OtherGroup, errors.GroupRefused, errors.NeedsOther):
            return
        except errors.TagsDamaged:
            # The record says nothing of the data, and those are left alone.
            self._record(call.volume_id, {})
            return
        if tag.ATTACHED in volume.own_tags:
            self._record(call.volume_id, {})

    def _record(self, volume_id: str, new: dict[str, str]) -> None:
        # Crash point: on record before the answer; the repeated call finds it.
        with tag_writer.logging_refusals(volume_id, tag.ATTACHED):
            self._tag_writer.replace(backing.of_id(volume_id), (tag.ATTACHED,), new)

    @contextmanager
    def _counted(self, volume_id: str) -> Iterator[None]:
        """Count a volume as attached meanwhile. Raises TooManyAttached, GroupBusy."""
        limit = self._configuration.now.max_volumes_per_node
        if not limit:
            yield
            return
        with self._guard:
            # Before the report, which may lack what ends meanwhile. A later call counts this one.
            earlier = frozenset(self._beginning)
            self._beginning.add(volume_id)
        try:
            known = self._reports.fresh(ids.group_of(volume_id))
            # A group that was never read does not count: its volumes must not keep others waiting.
            every = self._reports.everywhere(known)
            found = [one for one in every.shown() if one.attachment_to(self._node_id)]
            attached = earlier.union(str(one.id) for one in found) - {volume_id}
            # In a silent group one may be detached by now: after this code kubelet fails the pod.
            unsure = {str(one.id) for one in found if one.group.name in every.silent}
            if len(attached - unsure) >= limit:
                raise errors.TooManyAttached(volume_id, self._node_id, limit)
            if len(attached) >= limit:
                every.require_answered()
            yield
        finally:
            with self._guard:
                self._beginning.discard(volume_id)

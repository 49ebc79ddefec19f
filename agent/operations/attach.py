"""ControllerPublishVolume and ControllerUnpublishVolume: record to which node a volume is attached.

A volume is on its node's own disks, so attaching connects nothing and detaching cuts nothing off.
The tag `attached` of the volume records the node, the access mode and whether the volume is
read-only, because a CO may rely on these.
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
    """Records which volumes are attached to this node; no device is connected."""

    def __init__(self, context: Context) -> None:
        self._reports, self._mender = context.reports, context.mender
        self._tag_writer = context.tag_writer
        self._configuration = context.configuration
        self._guard = threading.Lock()
        # Ids of the volumes that calls under way are attaching; the volumes' tags do not record the
        # attachment yet.
        self._beginning: set[str] = set()

    @property
    def _node_id(self) -> str:
        return self._configuration.now.node_id

    def attach(self, request: AttachVolume) -> None:
        """Record that a volume is attached to this node.

        Runs at most two lvm2 commands, and a repeated call at most one. If lvm2 refuses the tag,
        because the group's metadata area is full, the volume can be used all the same, without the
        record.

        The errors are:

        - NoSuchNode if the call names another node.
        - BadField for a capability that the volume can never have.
        - AttachedOtherwise if the volume is recorded as attached with another access type or access
          mode, or if only one of record and call is read-only.
        - TooManyAttached if `max_volumes_per_node` volumes are attached to the node already.
        - GroupBusy if that number depends on a volume group that does not answer.
        """
        volume = self._mender.mended_volume(request.volume_id, Call.MANAGE)
        if request.node_id != self._node_id:
            raise errors.NoSuchNode(request.node_id, f"this is node {self._node_id!r}")
        if why := validate.reason_unfit(volume, request.capability):
            raise errors.BadField("volume_capability", why)
        capability = request.capability
        attachment = Attachment(
            capability.access, capability.mode, request.read_only, self._node_id
        )
        present = volume.attachment_to(self._node_id)
        if present == attachment:
            return
        if present is not None:
            raise errors.AttachedOtherwise(request.volume_id, present, attachment)
        with self._count_attached(request.volume_id):
            self._record(request.volume_id, {tag.ATTACHED: str(attachment)})

    def detach(self, request: DetachVolume) -> None:
        """Remove the record that a volume is attached to this node.

        Runs at most two lvm2 commands, and a repeated call at most one. The call succeeds without a
        change for a volume that does not exist, for an attachment to another node, and for a volume
        that Carver must not change, because its group is refused or its tags are of a newer
        version. Such a volume keeps its record, as no later call could remove the record either,
        and a CO must not see the volume as attached for ever.
        """
        if request.node_id not in ("", self._node_id):
            return
        try:
            group = ids.group_of(request.volume_id)
            volume = self._reports.fresh(group).volume(request.volume_id)
        except (errors.NoSuchVolume, errors.OtherGroup, errors.GroupRefused, errors.NeedsOther):
            return
        except errors.TagsDamaged:
            # Remove the record of the attachment in spite of damaged tags: the record says nothing
            # about the volume's data, which stay as they are.
            self._record(request.volume_id, {})
            return
        if tag.ATTACHED in volume.own_tags:
            self._record(request.volume_id, {})

    def _record(self, volume_id: str, new_tags: dict[str, str]) -> None:
        # Crash point: the tag is written or removed, and the call has no response; the repeated
        # call finds nothing left to do.
        with tag_writer.logging_refusals(volume_id, tag.ATTACHED):
            self._tag_writer.replace(backing.of_id(volume_id), (tag.ATTACHED,), new_tags)

    @contextmanager
    def _count_attached(self, volume_id: str) -> Iterator[None]:
        """Count a volume as attached within the `with`, and enforce `max_volumes_per_node`.

        Raises TooManyAttached if the limit is reached, and GroupBusy if that depends on a volume
        group that does not answer. Without a limit nothing is counted.
        """
        limit = self._configuration.now.max_volumes_per_node
        if not limit:
            yield
            return
        with self._guard:
            # Copy the set of volumes that are being attached before the report is read: a call that
            # ends meanwhile removes its volume from the set, and the report may lack the volume's
            # tag. Each later call counts the volume of this call.
            earlier = frozenset(self._beginning)
            self._beginning.add(volume_id)
        try:
            fresh = self._reports.fresh(ids.group_of(volume_id))
            # Do not count the volumes of a volume group that was never read: such a group must not
            # delay calls for other groups.
            all_groups = self._reports.every_group(fresh)
            attached_volumes = [
                volume for volume in all_groups.shown() if volume.attachment_to(self._node_id)
            ]
            attached = earlier.union(str(volume.id) for volume in attached_volumes) - {volume_id}
            # A volume in a volume group that does not answer may have been detached by now. Such a
            # volume must not cause TooManyAttached, after whose code kubelet fails the pod.
            unsure = {
                str(volume.id)
                for volume in attached_volumes
                if volume.group.name in all_groups.silent
            }
            if len(attached - unsure) >= limit:
                raise errors.TooManyAttached(volume_id, self._node_id, limit)
            if len(attached) >= limit:
                all_groups.require_answered()
            yield
        finally:
            with self._guard:
                self._beginning.discard(volume_id)

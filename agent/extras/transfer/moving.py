"""Move volumes to another node: the service's part on the node that the volume leaves.

`carver volume move` talks to both nodes; this module knows only this node. The tags of a volume on
this node say which node the volume belongs to:

    ready ──begin──▶ ready, moveTo, moveWord ──commit──▶ moved ──finish──▶ deleted
                       └──────────undo──────────┴──undo──▶ ready

The other node can finish its volume only with a secret word. This node reveals the word only while
its own volume is in the state `moved`, and so cannot be used. Therefore the volume can never be
used on both nodes at once.

While a move is under way the volume is not deleted: these tags alone say which node has received a
part of it (`Call.DELETE` in agent/volumes/volume_states.py).
"""

import hmac
import secrets
from collections.abc import Mapping
from contextlib import suppress

from agent.core import errors, ids, tag
from agent.core.ids import VolumeId
from agent.extras.transfer.move import digest_of
from agent.operations.delete import VolumeDeleter
from agent.volumes import records, users, volume_states
from agent.volumes.context import Context
from agent.volumes.records import Volume
from agent.volumes.volume_states import Call, EndedBy
from lvm import volumes
from mount import mount_errors as mount_errors
from proto import carver_pb2 as carver

# Length of the secret word of a move, in bytes.
_WORD_BYTES = 16
# Time after which the hold of a volume ends unless the command renews the hold, in seconds.
HELD_SECONDS = 30.0


class Mover:
    """Moves volumes away from this node."""

    def __init__(self, context: Context, deleter: VolumeDeleter) -> None:
        self._volume_groups, self._kernel = context.volume_groups, context.kernel
        self._reports, self._activator = context.reports, context.activator
        self._mender = context.mender
        self._deleter = deleter
        self._holds = context.holds

    def status(self, name: str) -> carver.MoveState:
        """Return the state of a volume, and of its move if a move was begun.

        `name` is the volume's name, the name of its logical volume, or its id. Raises NoSuchVolume
        if there is no such volume, or only an inline volume; for an id, only if its volume group is
        present and lacks it.
        """

        def is_it(volume: Volume) -> bool:
            names = (volume.name, str(volume.id), volume.own_tags[tag.NAME])
            return name in names and not volume.is_ephemeral

        if (volume := self._reports.search(is_it)) is None:
            if (identity := VolumeId.parse(name)) is not None:
                # Raise an error that is no proof of absence if the volume group is missing.
                self._reports.fresh(identity.group).volume(name)
            raise errors.NoSuchVolume(name)
        return self._state(volume)

    def begin(self, volume_id: str, node: str, replaces: str = "") -> carver.MoveState:
        """Record that a volume moves to a node, with a new secret word; idempotent.

        The volume can be used as before. With `replaces`, the digest of the word of the move by
        which the volume came, that word is forgotten, by one more command: that move can then not
        be taken back any more, and what it left on the other node may be overwritten. The state
        says so. A digest of another move changes nothing.

        Raises NotMoved if the volume already moves to another
        node, NoSuchVolume, and the error of `Fresh.usable` if the volume's state forbids a move.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            volume = self._volume(volume_id)
            old_node = volume.own_tags.get(tag.MOVE_TO, "")
            if old_node and old_node != node:
                why = f"it moves to {old_node}; end that move first"
                raise errors.NotMoved(volume_id, why)
            if not old_node:
                fresh_report = self._mender.mend(volume.group.name)
                fresh_report.usable(volume_id, Call.MANAGE)
                word = secrets.token_hex(_WORD_BYTES)
                self._mark(volume, {tag.MOVE_TO: node, tag.MOVE_WORD: word})
                volume = self._volume(volume_id)
            released = volume.own_tags.get(tag.RELEASED, "")
            is_own = volume.ended_by is EndedBy.CALLER
            if is_own and replaces and hmac.compare_digest(digest_of(released), replaces):
                self._mark(volume, {tag.RELEASE: replaces}, removed_keys=(tag.RELEASED,))
                volume = self._volume(volume_id)
        return self._state(volume)

    def hold(self, volume_id: str, token: str = "") -> str:
        """Hold a volume for HELD_SECONDS, so that no call can use it; return the hold's token.

        With `token`, the hold with that token is renewed. The caller holds the volume's lock.
        Raises NotMoved if no move was begun. Raises Moved if another command holds the volume, or
        if the hold with the token has ended. Raises VolumeInUse if the volume is in use; the hold
        then ends at once.
        """
        volume = self._moving(volume_id)
        hold_token = self._holds.hold(volume_id, volume.own_tags[tag.MOVE_TO], HELD_SECONDS, token)
        try:
            users.require_unused(self._kernel, self._activator, volume)
            if not token:
                group = volume.group.name
                with self._volume_groups.hold(group):
                    volume_group = self._mender.mend(group).group(group)
                    uuids = frozenset(
                        logical_volume.uuid
                        for logical_volume in records.all_logical_volumes(volume_group)
                    )
                    self._holds.note_unused(volume_id, hold_token, uuids)
        except BaseException:
            self._holds.release(volume_id, hold_token)
            raise
        return hold_token

    def release(self, volume_id: str, token: str) -> None:
        """End the hold with a token, so that the volume can be used again."""
        self._holds.release(volume_id, token)

    def commit(self, volume_id: str, snapshot_id: str, token: str) -> carver.MoveState:
        """Record that a volume is the other node's, which has all that the last snapshot holds.

        The hold must have begun before the snapshot was taken, so that nothing was written since. A
        volume that was moved already is not changed. Runs two lvm2 commands: the volume gets the
        state `moved`, and is deactivated. Raises NotMoved if the snapshot is not of the whole
        volume, or was not taken during the hold; VolumeInUse if the volume is in use.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            volume = self._moving(volume_id)
            if is_gone(volume):
                return self._state(volume)
            if volume.ended_by is not EndedBy.CALLER:
                raise errors.NotMoved(volume_id, "it is not this node's any more")
            fresh_report = self._mender.mend(volume.group.name)
            parsed = VolumeId.parse(snapshot_id)
            if parsed is not None and parsed.group != volume.group.name:
                raise errors.NotMoved(volume_id, f"{snapshot_id} is not all of it")
            snapshot = self._reports.snapshot(fresh_report, snapshot_id)
            uuid = snapshot.group.volume(snapshot.name).uuid
            if not self._holds.has_all(volume_id, token, uuid):
                why = f"it may have been used since {snapshot_id} was taken; send another"
                raise errors.NotMoved(volume_id, why)
            if snapshot.source_id != volume.id or snapshot.size_bytes != volume.size_bytes:
                raise errors.NotMoved(volume_id, f"{snapshot_id} is not all of it")
            users.require_unused(self._kernel, self._activator, volume)
            self._holds.note_moved(volume_id, volume.own_tags[tag.MOVE_TO])
            try:
                self._mark(volume, volume_states.tags_for(EndedBy.MOVER))
            except BaseException:
                # The command may have set the tags although it failed. Read the tags again.
                self._recall(volume_id)
                raise
            # Deactivate the volume, so that each later use has to activate it, and reads its tags
            # first.
            with suppress(mount_errors.CommandError):
                volumes.deactivate(
                    self._volume_groups.lvm(volume.group.name), volume.group.name, volume.name
                )
            return self._state(self._volume(volume_id))

    def undo(self, volume_id: str, release: str = "", *, only_begun: bool = False) -> None:
        """Make a volume this node's again, and forget the move; without a move, nothing is changed.

        The caller has made sure that the other node has nothing of the volume. With `only_begun`
        that is not needed: the word of a move was revealed to no other node before the volume was
        handed over, so what that node has can never be finished.

        Raises NotMoved if what is left of the volume on this node is being deleted, or replaced by
        a volume that is received; with `release`, the digest of a move's word, also if the volume
        is in another move; with `only_begun`, also if the volume was handed over.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            volume = self._volume(volume_id)
            if is_going(volume):
                raise errors.NotMoved(volume_id, "what is left of it here is being deleted")
            if volume.ended_by is EndedBy.RECEIVER:
                raise errors.NotMoved(volume_id, "it is received from another node")
            if tag.MOVE_TO in volume.own_tags:
                _require_move(volume, release)
                if only_begun and is_gone(volume):
                    raise errors.NotMoved(volume_id, "it was handed over by now")
                new_tags = volume_states.tags_for(EndedBy.CALLER) if is_gone(volume) else {}
                self._mark(volume, new_tags, removed_keys=(tag.MOVE_TO, tag.MOVE_WORD))
            self._holds.remove_note(volume_id)

    def finish(self, volume_id: str, release: str = "") -> None:
        """Delete what is left on this node of a volume that is the other node's; idempotent.

        Raises NotMoved if the volume is still this node's; with `release`, the digest of a move's
        word, also if the volume was moved by another move. Raises HasSnapshots if the volume has
        snapshots on this node.
        """
        with self._volume_groups.hold(ids.group_of(volume_id)):
            try:
                volume = self._volume(volume_id)
            except errors.NoSuchVolume:
                return
            if not (is_gone(volume) or volume.is_doomed):
                raise errors.NotMoved(volume_id, "it is still this node's")
            _require_move(volume, release)
            if kept_snapshots := volume.kept_snapshots:
                raise errors.HasSnapshots(
                    volume_id, kept_snapshots, "the move is final only while it has none here"
                )
            # Set the tag that forbids an undo before the first byte is erased. A later undo would
            # take back an incomplete volume.
            if not is_going(volume):
                self._mark(volume, {tag.MOVE_ENDED: volume_states.word_of(EndedBy.ERASER)})
        self._deleter.delete(volume_id, is_own=False)
        self._holds.remove_note(volume_id)

    def _recall(self, volume_id: str) -> None:
        try:
            is_moved = is_gone(self._volume(volume_id))
        except Exception:
            # It is unknown whether the tags were set, so the volume cannot be used until its move
            # is undone, or the notes are made anew from tags (`Holds.resume`).
            return
        if not is_moved:
            self._holds.remove_note(volume_id)

    def _volume(self, volume_id: str) -> Volume:
        fresh_report = self._mender.mend(ids.group_of(volume_id))
        volume = fresh_report.volume(volume_id)
        if volume.is_ephemeral:
            raise errors.NoSuchVolume(volume_id)
        return volume

    def _moving(self, volume_id: str) -> Volume:
        volume = self._volume(volume_id)
        if tag.MOVE_TO not in volume.own_tags:
            raise errors.NotMoved(volume_id, "no move of it was begun")
        return volume

    def _state(self, volume: Volume) -> carver.MoveState:
        own_tags = volume.own_tags
        word = _word_of(volume)
        mount_points = users.mount_paths(self._kernel, self._activator, volume.backing)
        return carver.MoveState(
            volume_id=str(volume.id),
            state=volume_states.word_of(EndedBy.ERASER if is_going(volume) else volume.ended_by),
            node=own_tags.get(tag.MOVE_TO, ""),
            release=digest_of(word),
            word=word if is_gone(volume) else "",
            in_use=bool(mount_points) or self._activator.is_open(volume),
            replaces=own_tags.get(tag.RELEASE, "") if volume.ended_by is EndedBy.CALLER else "",
            **{key: own_tags.get(key, "") for key in (tag.PV, tag.PVC, tag.NAMESPACE)},
        )

    def _mark(
        self, volume: Volume, new_tags: Mapping[str, str], removed_keys: tuple[str, ...] = ()
    ) -> None:
        old_tags = {
            key: volume.own_tags[key]
            for key in (*new_tags, *removed_keys)
            if key in volume.own_tags
        }
        lvm, group = self._volume_groups.lvm(volume.group.name), volume.group.name
        volumes.mark(lvm, group, volume.name, old_tags=old_tags, new_tags=new_tags)


def _word_of(volume: Volume) -> str:
    """Return the word of a volume's move; empty without a move."""
    own_tags = volume.own_tags
    return own_tags.get(tag.MOVE_WORD, "") if tag.MOVE_TO in own_tags else ""


def _require_move(volume: Volume, release: str) -> None:
    """Raise NotMoved if a volume is in another move than the one with a digest.

    Without a digest, or without a move, nothing is required.
    """
    found = digest_of(_word_of(volume))
    if release and found and not hmac.compare_digest(found, release):
        raise errors.NotMoved(str(volume.id), "it is in another move by now; read its state again")


def is_gone(volume: Volume) -> bool:
    """Return whether a volume was moved to another node and is kept until the move is final."""
    return volume.ended_by is EndedBy.MOVER


def is_going(volume: Volume) -> bool:
    """Return whether a volume is being deleted on this node, and so may be incomplete."""
    return volume.is_doomed or (is_gone(volume) and tag.MOVE_ENDED in volume.own_tags)

"""Snapshots that are sent: what a stream of one says of it, and what it can go on from."""

from agent import errors, fact
from agent.delta.activations import Activations
from agent.engine import records
from agent.engine.means import Means
from agent.engine.records import Snapshot
from agent.ids import VolumeId, group_of
from agent.streams import form
from agent.streams.form import Header
from agent.transfer import description
from lvm import report


class Sender:
    """Says what a stream of a snapshot begins with."""

    def __init__(self, means: Means, activations: Activations) -> None:
        self._engines, self._inventory = means.engines, means.inventory
        self._activations = activations

    def open(self, snapshot_id: str, base_id: str = "") -> tuple[Header, str]:
        """Have a snapshot's device there, and say what it is; since another, if one is named.

        With the word to close it by. At most two commands. Raises NoSuchSnapshot, OtherGroup,
        SourceLost, BadField.
        """
        with self._engines.hold(group_of(snapshot_id)):
            known = self._inventory.awake(group_of(snapshot_id))
            snapshot = self._ready(known, snapshot_id)
            header = self._header(known, snapshot, base_id)
            return header, self._activations.lease(snapshot)

    def close(self, snapshot_id: str, word: str) -> None:
        """The snapshot is not read any more."""
        self._activations.end_lease(group_of(snapshot_id), word)

    def chain(self, snapshot_id: str) -> str:
        """The name of exactly what a snapshot holds; it need not be active. The same errors."""
        known = self._inventory.read(group_of(snapshot_id))
        return chain_of(self._ready(known, snapshot_id))

    def _header(self, known: report.Report, snapshot: Snapshot, base_id: str) -> Header:
        header = Header(
            volume_id=str(snapshot.source_id),
            snapshot_id=str(snapshot.id),
            size_bytes=snapshot.size_bytes,
            taken_nanoseconds=snapshot.time_nanoseconds,
            chain=chain_of(snapshot),
            facts=self._facts(known, snapshot),
        )
        if not base_id:
            return header
        base = self._ready(known, base_id)
        if base.source_id != snapshot.source_id:
            raise errors.BadField("since", f"{base_id} is of {base.source_id}, another volume")
        is_newer = records.is_older(base, snapshot) is False
        # Volumes only grow.
        if is_newer or base.id == snapshot.id or base.size_bytes > snapshot.size_bytes:
            raise errors.BadField("since", f"{base_id} is no older than {snapshot.id}")
        return Header(
            **{
                **vars(header),
                "base_snapshot_id": str(base.id),
                "base_chain": chain_of(base),
                "base_size_bytes": base.size_bytes,
            }
        )

    def _ready(self, known: report.Report, snapshot_id: str) -> Snapshot:
        snapshot = self._inventory.snapshot(known, snapshot_id)
        if snapshot.problem:
            raise errors.SourceLost(snapshot_id, snapshot.problem)
        return snapshot

    def _facts(self, known: report.Report, snapshot: Snapshot) -> dict[str, str]:
        """The volume's facts, or what its snapshot has of them where it is gone."""
        facts = snapshot.facts
        volume_id = str(snapshot.source_id)
        if VolumeId.parse(volume_id) is not None:
            try:
                volume = self._inventory.get(known, volume_id).facts
            except errors.NoSuchVolume:
                volume = {}
            # It may have been formatted, or got its header, since.
            facts = {**volume, fact.FORMATTED: "", fact.SEALED: "", **facts}
        return {key: facts[key] for key in description.TOLD if facts.get(key)}


def chain_of(snapshot: Snapshot) -> str:
    """The name of exactly what a snapshot holds; its volume may be gone by now."""
    own = snapshot.group.volume(snapshot.name).uuid
    return form.chain_of(
        str(snapshot.source_id), own, snapshot.time_nanoseconds, snapshot.size_bytes
    )

"""The annotation of a PersistentVolume that lists the moves of its volume by evacuations.

The key is `evacuate.DRIVER/moves`, the value a JSON list with an entry for each node that the
volume left or leaves: `{"from": NODE, "volume": VOLUME_ID, "to": NODE}`. An entry is written before
the move begins. Rebinding copies it to the new PersistentVolume. So a controller that has just
started finds out:

- An entry with the PersistentVolume's own volume id: the move is under way.
- Another entry: the volume moved from there. What is left of it there is under quarantine, until it
  is erased and the entry removed.

The entry of a move back, by which an evacuation is undone, also has `"back": true`. It is not
undone in its turn. It is written behind the entry of the move that is undone, so the entries behind
it are those of later moves. When the volume is back, they are undone, too, and get `"back": true`.

Moves by `carver volume move` have no entry, and the evacuation leaves their quarantine alone.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent.core.ids import VolumeId
from agent.extras.kubernetes.objects import VOLUMES, Lists, Object, Objects

# Maximum number of characters of the annotation that are parsed, and of its entries.
_MOST_CHARACTERS, _MOST_ENTRIES = 64 << 10, 100


@dataclass(frozen=True)
class MoveNote:
    """A move of a volume from the node `source`, where it has `volume_id`, to the node `target`.

    `is_back` is whether the move undoes an evacuation of the target.
    """

    source: str
    volume_id: str
    target: str
    is_back: bool = False

    @property
    def ends(self) -> tuple[str, str, str]:
        """The note without its reason."""
        return self.source, self.volume_id, self.target


@dataclass(frozen=True)
class NotedVolume:
    """A PersistentVolume with notes of moves.

    `created` is its creationTimestamp. `is_rebinding` is whether a rebinding has made it and has
    not ended. `is_bound` is whether a claim is bound to it. `claim` is the namespace and the name
    of its claim; both are empty without one.
    """

    name: str
    uid: str
    version: str
    handle: str
    created: str
    is_rebinding: bool
    is_bound: bool
    claim: tuple[str, str]
    notes: tuple[MoveNote, ...]

    @property
    def under_way(self) -> MoveNote | None:
        """The note of the move away from where the volume is; None without one."""
        return under_way(self.notes, self.handle)

    @property
    def node(self) -> str:
        """The node that has the volume; empty without notes."""
        if (note := self.under_way) is not None:
            return note.source
        return self.notes[-1].target if self.notes else ""

    @property
    def left(self) -> Sequence[MoveNote]:
        """The notes of the moves by which the volume left other nodes, the oldest first."""
        return [note for note in self.notes if note.volume_id != self.handle]

    def noted_back(self, undone: MoveNote) -> Sequence[MoveNote]:
        """Return the notes with that of a move back, which undoes the move of the note `undone`."""
        position = self.notes.index(undone) + 1
        back = MoveNote(self.node, self.handle, undone.source, is_back=True)
        return [*self.notes[:position], back, *self.notes[position:]]

    @property
    def notes_after_move(self) -> Sequence[MoveNote]:
        """The notes when the move that is under way has ended.

        What the volume had left on that node is the volume itself by then.
        """
        if (last := self.under_way) is None:
            return self.notes
        position = self.notes.index(last)
        later = [
            replace(note, is_back=note.is_back or last.is_back)
            for note in self.notes[position + 1 :]
        ]
        others = (*self.notes[:position], *later)
        return [*(note for note in others if note.source != last.target), last]


class MoveNotes:
    """Reads and writes the notes. Its methods wait for the API server.

    They raise ClusterRefused or ClusterSilent if it refuses or does not answer.
    """

    def __init__(self, lists: Lists, objects: Objects, driver_name: str) -> None:
        self._lists, self._objects, self._driver_name = lists, objects, driver_name
        self.key = key(driver_name)

    def read(self) -> Sequence[NotedVolume]:
        """Return all PersistentVolumes with notes, in the order of their names."""
        listing = self._lists.whole(VOLUMES, "PersistentVolumeList", keep=self._kept)
        found = (self._noted(item) for item in listing.items if "spec" in item)
        return sorted((one for one in found if one.notes), key=lambda one: one.name)

    def find(self, name: str) -> NotedVolume | None:
        """Return a PersistentVolume, also without notes; None if it does not exist."""
        item = self._objects.find(f"{VOLUMES}/{name}", "PersistentVolume")
        return None if item is None else self._noted(item)

    def write(self, volume: NotedVolume, notes: Iterable[MoveNote]) -> None:
        """Replace the notes of a PersistentVolume that has not changed since it was read."""
        entries = [
            {
                "from": note.source,
                "volume": note.volume_id,
                "to": note.target,
                **({"back": True} if note.is_back else {}),
            }
            for note in notes
        ]
        value = json.dumps(entries) if entries else None
        change = {"metadata": {"annotations": {self.key: value}}}
        self._objects.change(f"{VOLUMES}/{volume.name}", change, volume.version)

    def ensure(self, name: str, note: MoveNote) -> None:
        """Write a note to a PersistentVolume, unless it has the note already.

        An earlier note about the same volume id is replaced. A PersistentVolume that does not exist
        any more is left out.
        """
        volume = self.find(name)
        if volume is None or note.ends in {known.ends for known in volume.notes}:
            return
        kept = [known for known in volume.notes if known.volume_id != note.volume_id]
        self.write(volume, [*kept, note])

    def remove(self, name: str, *notes: MoveNote) -> None:
        """Remove notes from a PersistentVolume, if it exists and has them."""
        volume = self.find(name)
        if volume is not None and set(notes) & set(volume.notes):
            self.write(volume, [note for note in volume.notes if note not in notes])

    def _kept(self, item: Object) -> Object:
        """Return an item of a list without what is not read; without a spec if it has no notes."""
        annotations = item["metadata"].get("annotations") or {}
        return item if self.key in annotations else {"metadata": {}}

    def _noted(self, item: Object) -> NotedVolume:
        metadata = item["metadata"]
        annotations = metadata.get("annotations") or {}
        source, reference = item["spec"].get("csi") or {}, item["spec"].get("claimRef") or {}
        is_own = source.get("driver") == self._driver_name
        return NotedVolume(
            metadata["name"],
            str(metadata.get("uid") or ""),
            str(metadata.get("resourceVersion") or ""),
            str(source.get("volumeHandle") or ""),
            str(metadata.get("creationTimestamp") or ""),
            f"move.{self._driver_name}/claim" in annotations,
            (item.get("status") or {}).get("phase") == "Bound",
            (str(reference.get("namespace") or ""), str(reference.get("name") or "")),
            parsed(annotations.get(self.key)) if is_own else (),
        )


def under_way(notes: Iterable[MoveNote], handle: str) -> MoveNote | None:
    """Return the note of the move away from where a volume with this id is; None without one."""
    return next((note for note in notes if note.volume_id == handle), None)


def target_of(annotations: Mapping[str, str], driver_name: str, handle: str) -> str:
    """Return the node to which a volume moves, by its PersistentVolume's notes; empty if none."""
    note = under_way(parsed(annotations.get(key(driver_name))), handle)
    return note.target if note is not None else ""


def key(driver_name: str) -> str:
    """Return the key of the annotation."""
    return f"evacuate.{driver_name}/moves"


def parsed(text: Any) -> tuple[MoveNote, ...]:
    """Return the notes in a value of the annotation; none for a value that cannot be parsed."""
    if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
        return ()
    try:
        entries = json.loads(text)
        notes = tuple(
            MoveNote(entry["from"], entry["volume"], entry["to"], entry.get("back") is True)
            for entry in entries
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return ()
    fields = [field for note in notes for field in (note.source, note.target, note.volume_id)]
    if not all(isinstance(field, str) and field for field in fields):
        return ()
    if any(VolumeId.parse(note.volume_id) is None for note in notes):
        return ()
    return notes[:_MOST_ENTRIES]

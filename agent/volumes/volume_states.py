"""What a volume is now: one table of its states, and of the background work that calls meet.

A row says of a state what ends it, who sees the volume, and what each call gets that meets it. Work
that is no state of a volume has a row of calls alone. A new state is a row here and the code that
ends it: all other code asks the table.

A state is read from the record of a volume: Carver's tags, and of a snapshot also whether it lost
its origin. What this process has under way, be it on record or not, is met by
agent/volumes/conflicts.py, to the same answers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from agent.core import errors, tag
from agent.core.ids import VolumeId
from lvm import report, volumes
from lvm.lvm2 import Lvm


class State(StrEnum):
    """States of a volume; of several the first decides that says something about a call.

    The value is that of the tag `state`, where that records it.
    """

    DELETED = tag.WIPING
    INLINE = "inline"
    COPYING = tag.COPYING
    RECEIVING = tag.RECEIVING
    MOVED = tag.MOVED
    HELD = "held"
    HALF_MADE = "half-made"
    READY = tag.READY


class Ender(StrEnum):
    """What ends a state."""

    CALLER = "DeleteVolume"
    POD = "NodeUnpublishVolume, or a sweep once the pod is gone"
    COPIER = "the copier, once the volume has its contents; DeleteVolume"
    ERASER = "the eraser, once the volume is overwritten and removed"
    RECEIVER = "`carver volume receive`, by --finish or --abort"
    MOVER = "`carver volume move`, by --finish or --undo"
    MOVE = "the move, by its commit or release, or thirty seconds without a sign of it"
    MAKER = "CreateVolume, which makes the volume anew; DeleteVolume"


class Work(StrEnum):
    """Background work that is no state of a volume."""

    COPIED = "another volume is filled from it, by a temporary snapshot"
    GROWTH = "the extents that it grows by are zeroed"
    LEFT_GROWTH = "extents that an earlier process reserved for its growth are overwritten"
    FORMAT = "mkfs of an earlier call makes its file system"
    SWEEP = "free extents of its group are overwritten"
    EMPTY_POOL = "the empty pool of its class is overwritten, to be removed"


class Call(StrEnum):
    """Calls, and what Carver does by itself as one."""

    CREATE = "CreateVolume of its name; for a pool, of its class"
    COPY_FROM = "CreateVolume with it as the source"
    SNAPSHOT = "CreateSnapshot, CreateVolumeGroupSnapshot"
    EXPAND = "ControllerExpandVolume, NodeExpandVolume, a stage with a size on record"
    EXPAND_OTHER = "an expansion to another size than the one under way"
    USE = "NodeStageVolume, NodePublishVolume, NodeGetVolumeStats, the calls for health"
    UNSTAGE = "NodeUnstageVolume"
    DELETE = "DeleteVolume"
    GROW = "a pool or a COW store must grow"
    MANAGE = (
        "ControllerGetVolume, ValidateVolumeCapabilities, ControllerPublishVolume,"
        " ControllerModifyVolume; a repair, a comparison, the first begin of a move"
    )
    ADOPT = "`carver volume adopt` of what was adopted; with --undo"


class Outcome(StrEnum):
    """What happens."""

    BESIDE = "both go on"
    JOINS = "the call waits a moment, and is OK: the work is on record"
    WAITS = "the call waits for the work, and is ABORTED with the progress where that takes longer"
    ABORTED = "the call is ABORTED with the progress"
    ABSENT = "the call does not find the volume, or is ABORTED until its deletion is on record"
    REFUSED = "the call is FAILED_PRECONDITION, by its operation"
    NOT_OWN = "the call is FAILED_PRECONDITION: the volume is not this node's yet, or any more"
    HALTS = "the work ends at its next safe point, and then the call goes on"
    ANEW = "the call removes the volume, which has no data, and goes on as if there were none"
    AT_ONCE = "the call removes the volume, which has no data to overwrite"


def _calls(**others: Outcome) -> Mapping[Call, Outcome]:
    """The outcomes of a row; both go on where nothing else is said."""
    return MappingProxyType({one: others.get(one.name, Outcome.BESIDE) for one in Call})


# The outcomes for a volume that is not this node's yet, or any more.
_NOT_OWN = dict.fromkeys(
    (
        *("CREATE", "COPY_FROM", "SNAPSHOT", "EXPAND", "EXPAND_OTHER"),
        *("USE", "DELETE", "MANAGE", "ADOPT"),
    ),
    Outcome.NOT_OWN,
)

# The error of a call that is stopped, from the volume's id and tags.
_Problem = Callable[[str, Mapping[str, str]], errors.AgentError]


def _no_volume(volume_id: str, _: Mapping[str, str]) -> errors.AgentError:
    return errors.NoSuchVolume(volume_id)


@dataclass(frozen=True)
class Row:
    """What is true of a volume in a state.

    `has_tag`: the tag `state` records it; others follow from other tags, from the layout, or are
    known to this process alone. `is_listed`: ListVolumes, `carver volume list` and
    ControllerListVolumeHealth have it. `is_callers`: the caller of a CreateVolume that failed
    deletes it. `orphan` is what `carver orphans` calls it where nothing refers to it; empty where
    only what ends the state may remove it. `is_noted`: calls that read no report know it by a note
    in this process, made at the start; other states have jobs. `problem` is the error of a call
    that is stopped by the record.
    """

    what: str
    ended_by: Ender
    calls: Mapping[Call, Outcome]
    has_tag: bool = True
    is_listed: bool = False
    is_callers: bool = False
    orphan: str = ""
    is_noted: bool = False
    problem: _Problem = _no_volume


# The first row that stops a call decides.
STATES: Mapping[State, Row] = MappingProxyType(
    {
        State.DELETED: Row(
            "it was deleted, and is overwritten and removed",
            Ender.ERASER,
            _calls(
                CREATE=Outcome.ABORTED,
                COPY_FROM=Outcome.ABSENT,
                SNAPSHOT=Outcome.ABSENT,
                EXPAND=Outcome.ABSENT,
                EXPAND_OTHER=Outcome.ABSENT,
                USE=Outcome.ABSENT,
                DELETE=Outcome.JOINS,
                MANAGE=Outcome.ABSENT,
                ADOPT=Outcome.REFUSED,
            ),
            problem=lambda volume_id, _: errors.OperationPending(f"{volume_id} (being erased)"),
        ),
        State.INLINE: Row(
            "it was made for one pod by NodePublishVolume, whose calls alone find it",
            Ender.POD,
            _calls(
                COPY_FROM=Outcome.ABSENT,
                SNAPSHOT=Outcome.ABSENT,
                EXPAND=Outcome.ABSENT,
                EXPAND_OTHER=Outcome.ABSENT,
                USE=Outcome.ABSENT,
                MANAGE=Outcome.ABSENT,
                ADOPT=Outcome.REFUSED,
            ),
            has_tag=False,
            is_callers=True,
            orphan="inline",
        ),
        State.COPYING: Row(
            "it is filled, from its source or with zeroes, and is no volume yet",
            Ender.COPIER,
            _calls(
                CREATE=Outcome.WAITS,
                COPY_FROM=Outcome.ABORTED,
                SNAPSHOT=Outcome.ABORTED,
                EXPAND=Outcome.ABORTED,
                EXPAND_OTHER=Outcome.ABORTED,
                USE=Outcome.ABORTED,
                DELETE=Outcome.HALTS,
                MANAGE=Outcome.ABORTED,
                ADOPT=Outcome.REFUSED,
            ),
            is_callers=True,
            orphan="half-made",
            problem=lambda volume_id, _: errors.Copying(volume_id, "it is not complete"),
        ),
        State.RECEIVING: Row(
            "it is received as a stream, and is no volume yet",
            Ender.RECEIVER,
            _calls(**_NOT_OWN),
            is_noted=True,
            problem=lambda volume_id, _: errors.Receiving(volume_id),
        ),
        State.MOVED: Row(
            "it was moved to another node, and is kept here until the move is final",
            Ender.MOVER,
            _calls(**_NOT_OWN),
            is_noted=True,
            problem=lambda volume_id, own_tags: errors.Moved(
                volume_id, own_tags.get(tag.MOVE_TO, "another node")
            ),
        ),
        State.HELD: Row(
            "its last snapshot is sent to another node, by this process alone",
            Ender.MOVE,
            # Adopted again it is as it was: no call but --undo asks.
            _calls(USE=Outcome.NOT_OWN, DELETE=Outcome.NOT_OWN, ADOPT=Outcome.NOT_OWN),
            has_tag=False,
            is_listed=True,
            is_callers=True,
            orphan="volume",
        ),
        State.HALF_MADE: Row(
            "lvm2 died while it made a RAID, which was never active",
            Ender.MAKER,
            _calls(CREATE=Outcome.ANEW, DELETE=Outcome.AT_ONCE),
            has_tag=False,
            is_listed=True,
            is_callers=True,
            orphan="volume",
        ),
        State.READY: Row(
            "it is the volume that CreateVolume made",
            Ender.CALLER,
            _calls(),
            is_listed=True,
            is_callers=True,
            orphan="volume",
        ),
    }
)

WORK: Mapping[Work, Mapping[Call, Outcome]] = MappingProxyType(
    {
        Work.COPIED: _calls(
            # In use it grows once the temporary snapshot is gone. A pod starts meanwhile: to
            # kubelet it is FAILED_PRECONDITION, and the next stage grows it.
            EXPAND=Outcome.ABORTED,
            EXPAND_OTHER=Outcome.ABORTED,
            DELETE=Outcome.REFUSED,
            ADOPT=Outcome.REFUSED,
        ),
        Work.GROWTH: _calls(
            EXPAND=Outcome.WAITS,
            EXPAND_OTHER=Outcome.HALTS,
            DELETE=Outcome.HALTS,
            ADOPT=Outcome.REFUSED,
        ),
        Work.LEFT_GROWTH: _calls(
            EXPAND=Outcome.HALTS,
            EXPAND_OTHER=Outcome.HALTS,
            DELETE=Outcome.HALTS,
            ADOPT=Outcome.REFUSED,
        ),
        # A snapshot of half a file system stays that, while its volume becomes a whole one.
        Work.FORMAT: _calls(
            COPY_FROM=Outcome.ABORTED,
            SNAPSHOT=Outcome.ABORTED,
            USE=Outcome.WAITS,
            DELETE=Outcome.ABORTED,
        ),
        Work.SWEEP: _calls(GROW=Outcome.HALTS),
        Work.EMPTY_POOL: _calls(CREATE=Outcome.HALTS),
    }
)

# The states by what ends each.
_ENDED_BY = {row.ended_by: state for state, row in STATES.items()}
# The states that the tag `state` records, by its value.
_TAGGED = {str(state): state for state, row in STATES.items() if row.has_tag}
# What only a volume that is made of another has, beside FROM.
_OF_COPIES = frozenset({tag.BRIDGE, tag.FORMATTED, tag.SEALED, tag.SHARED_KEY})
# What volumes have that are not made, or not gone, in one step.
_IN_STEPS = frozenset(
    {
        tag.FROM,
        tag.ZERO,
        tag.INTO,
        tag.OFFSET,
        tag.CHAIN,
        tag.FINISHING,
        tag.MOVE_TO,
        tag.MOVE_ENDED,
    }
)


class Recorded(Protocol):
    """A volume by its record."""

    @property
    def id(self) -> VolumeId:
        """Its id."""
        ...

    @property
    def own_tags(self) -> Mapping[str, str]:
        """Carver's tags of it, decoded."""
        ...

    @property
    def is_half_made(self) -> bool:
        """Whether lvm2 died while it made this RAID."""
        ...


def row_of(ender: Ender) -> Row:
    """The row of the state that an ender ends."""
    return STATES[_ENDED_BY[ender]]


def outcome(call: Call, work: Ender | Work) -> Outcome:
    """What happens when a call meets background work: an ender's, or other work."""
    return (WORK[work] if isinstance(work, Work) else row_of(work).calls)[call]


def by_tag(own_tags: Mapping[str, str]) -> State:
    """The state that tags record; READY without a record, for a volume that is made in one step.

    Also READY, to be shown, for a value that no version wrote or only a newer one knows: `faults`
    keeps such a volume from use.
    """
    return _TAGGED.get(own_tags.get(tag.STATE, ""), State.READY)


def ended_by(own_tags: Mapping[str, str]) -> Ender:
    """What ends the state that tags record."""
    return STATES[by_tag(own_tags)].ended_by


def rows(own_tags: Mapping[str, str]) -> list[Row]:
    """The rows of a volume with these tags, in the order of the table."""
    found = _by_tags(own_tags)
    return [row for state, row in STATES.items() if state in found]


def is_recorded(own_tags: Mapping[str, str], ender: Ender) -> bool:
    """Whether tags record the state that an ender ends; False where the tag `state` is lost.

    Pools, and the extents that Carver reserves, have the tag as well.
    """
    return own_tags.get(tag.STATE) == word_of(ender)


def is_deleted_snapshot(logical: report.LogicalVolume) -> bool:
    """Whether a snapshot, or what was reserved for growth, is only to be overwritten and removed.

    It was split from its origin, or killed before it got one; or it was deleted while a disk was
    missing, and so not split.
    """
    is_lost = not (logical.origin or logical.pool)
    return is_lost or is_recorded(logical.own_tags, Ender.ERASER)


def faults(own_tags: Mapping[str, str]) -> Iterator[str]:
    """Why tags record no state that a version of Carver wrote: some were lost or changed."""
    has_source = tag.FROM in own_tags
    is_zeroed = tag.ZERO in own_tags and _OF_COPIES.isdisjoint(own_tags)
    if is_recorded(own_tags, Ender.COPIER) and not (has_source or is_zeroed):
        yield "`copying` without `from`"
    text = own_tags.get(tag.STATE)
    # Without a state a volume that is made in one step is whole, and another perhaps not.
    is_known = text in _TAGGED or (text is None and _IN_STEPS.isdisjoint(own_tags))
    if tag.NAME in own_tags and not is_known:
        yield "no `state`"


def of(volume: Recorded) -> list[State]:
    """The states of a volume by its record, in the order of the table."""
    found = _by_tags(volume.own_tags) | ({State.HALF_MADE} if volume.is_half_made else set())
    return [one for one in STATES if one in found]


def _by_tags(own_tags: Mapping[str, str]) -> set[State]:
    return {by_tag(own_tags)} | ({State.INLINE} if tag.EPHEMERAL in own_tags else set())


def meets(call: Call, volume: Recorded, wanted: Outcome) -> bool:
    """Whether a call has this outcome by one of the states that a volume's record shows."""
    return any(STATES[one].calls[call] is wanted for one in of(volume))


def require(call: Call, volume: Recorded) -> None:
    """Raise the error of a call that a volume's state stops, by the volume's record.

    Raises NoSuchVolume, Copying, OperationPending, Receiving, Moved.
    """
    for one in of(volume):
        row, volume_id = STATES[one], str(volume.id)
        if row.calls[call] is Outcome.ABSENT:
            raise errors.NoSuchVolume(volume_id)
        if row.calls[call] in (Outcome.ABORTED, Outcome.NOT_OWN):
            raise row.problem(volume_id, volume.own_tags)


def word_of(ender: Ender) -> str:
    """The value of the tag `state` for the state that an ender ends; also on the wire."""
    return str(_ENDED_BY[ender])


def tags_for(ender: Ender) -> Mapping[str, str]:
    """The tag that records the state that an ender ends."""
    return {tag.STATE: word_of(ender)}


def hand_over(lvm: Lvm, group: str, name: str, own_tags: Mapping[str, str], to: Ender) -> None:
    """Record the state that the ender `to` ends, for a logical volume with these tags.

    One command.
    """
    old = {tag.STATE: str(by_tag(own_tags))}
    volumes.mark(lvm, group, name, old=old, new=tags_for(to))

"""States of volumes: a table of the states, and of background work that conflicts with calls.

A row of the table says what ends a state, in which lists a volume in that state is, and what
happens to each call on such a volume. The row of background work that is no state of a volume only
says what happens to each call. To add a state, add a row here and write the code that ends the
state: all other code asks the table.

A state is read from the record of a volume: from Carver's tags, and for a snapshot also from
whether it lost its origin. For work that this process has in progress, recorded or not,
agent/volumes/conflicts.py applies the same table.
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
    """State of a volume. A volume may be in several; the first that stops a call decides.

    If the tag `state` records the state, the value here is the tag's value.
    """

    DELETED = tag.WIPING
    INLINE = "inline"
    COPYING = tag.COPYING
    RECEIVING = tag.RECEIVING
    MOVED = tag.MOVED
    MOVING = "moving"
    HELD = "held"
    HALF_MADE = "half-made"
    READY = tag.READY


class EndedBy(StrEnum):
    """The call, or the part of Carver, that ends a state of a volume."""

    CALLER = "DeleteVolume"
    POD = "NodeUnpublishVolume, or a sweep once the pod is gone"
    COPIER = "the copier, once the volume has its contents; DeleteVolume"
    ERASER = "the eraser, once the volume is overwritten and removed"
    RECEIVER = "`carver volume receive`, by --finish or --abort"
    MOVER = "`carver volume move`, by --finish or --undo"
    HANDOVER = "the move, by its commit, or `carver volume move` by --undo"
    MOVE = "the move, by its commit or release, or thirty seconds without a sign of it"
    MAKER = "CreateVolume, which makes the volume anew; DeleteVolume"


class Work(StrEnum):
    """Background work that may conflict with a call and is no state of a volume."""

    COPIED = "another volume is filled from it, by a temporary snapshot"
    GROWTH = "the extents that it grows by are zeroed"
    LEFT_GROWTH = "extents that an earlier process reserved for its growth are overwritten"
    FORMAT = "mkfs of an earlier call makes its file system"
    SWEEP = "free extents of its group are overwritten"
    EMPTY_POOL = "the empty pool of its class is overwritten, to be removed"


class Call(StrEnum):
    """Kinds of calls on a volume, and of operations that Carver begins by itself."""

    CREATE = "CreateVolume of its name; for a pool, of its class"
    COPY_FROM = "CreateVolume with it as the source"
    SNAPSHOT = "CreateSnapshot, CreateVolumeGroupSnapshot"
    EXPAND = "ControllerExpandVolume, NodeExpandVolume, a stage with a size on record"
    EXPAND_OTHER = "an expansion to another size than the one under way"
    USE = "NodeStageVolume, NodePublishVolume, NodeGetVolumeStats, the calls for health"
    UNSTAGE = "NodeUnstageVolume"
    DELETE = "DeleteVolume"
    GROW = "a pool or a COW store must grow"
    MODIFY = "ControllerModifyVolume"
    MANAGE = (
        "ControllerGetVolume, ValidateVolumeCapabilities, ControllerPublishVolume; a repair, a"
        " comparison, the first begin of a move"
    )
    ADOPT = "`carver volume adopt` of what was adopted"
    UNDO_ADOPT = "`carver volume adopt --undo`"


class Outcome(StrEnum):
    """What happens to a call because of a volume's state, or of background work."""

    BESIDE = "both go on"
    JOINS = "the call waits a moment, and is OK: the work is on record"
    WAITS = "the call waits for the work, and is ABORTED with the progress where that takes longer"
    ABORTED = "the call is ABORTED with the progress"
    ABSENT = "the call does not find the volume, or is ABORTED until its deletion is on record"
    REFUSED = "the call is FAILED_PRECONDITION, by its operation"
    NOT_OWN = "the call is FAILED_PRECONDITION: the volume is not this node's alone"
    HALTS = "the work ends at its next safe point, and then the call goes on"
    ANEW = "the call removes the volume, which has no data, and goes on as if there were none"
    AT_ONCE = "the call removes the volume, which has no data to overwrite"


def _calls(**outcomes: Outcome) -> Mapping[Call, Outcome]:
    """Return the outcome of each call, for a row of the table; BESIDE for calls not given."""
    return MappingProxyType({call: outcomes.get(call.name, Outcome.BESIDE) for call in Call})


# Outcomes of calls on a volume that does not belong to this node yet, or any more.
_NOT_OWN = dict.fromkeys(
    (
        *("CREATE", "COPY_FROM", "SNAPSHOT", "EXPAND", "EXPAND_OTHER"),
        *("USE", "DELETE", "MODIFY", "MANAGE", "ADOPT", "UNDO_ADOPT"),
    ),
    Outcome.NOT_OWN,
)

# Type of a function that makes the error of a call that a volume's state excludes, from the
# volume's id and tags.
_Problem = Callable[[str, Mapping[str, str]], errors.AgentError]


def _no_volume(volume_id: str, _: Mapping[str, str]) -> errors.AgentError:
    """Return the error that says that a volume does not exist; for `StateRow.problem`."""
    return errors.NoSuchVolume(volume_id)


@dataclass(frozen=True)
class StateRow:
    """One row of the table of states: what is true of a volume in the state.

    - `description` describes the state, `ended_by` says what ends it, and `calls` has the outcome
      of each call.
    - `has_tag`: the tag `state` records the state. Other states follow from other tags or from the
      layout, or only this process knows them.
    - `is_listed`: ListVolumes, `carver volume list` and ControllerListVolumeHealth show the volume.
    - `is_callers`: if a CreateVolume call failed and left the volume, the caller deletes it.
    - `orphan`: the kind under which `carver orphans` lists the volume if nothing refers to it. The
      kind decides how the volume is removed then. Empty if its removal is on record already.
    - `is_noted`: calls that read no report of lvm2's know the state by a note in this process, made
      at the start (agent/volumes/holds.py). For other states they find jobs.
    - `problem`: returns the error of a call that the volume's state excludes.
    """

    description: str
    ended_by: EndedBy
    calls: Mapping[Call, Outcome]
    has_tag: bool = True
    is_listed: bool = False
    is_callers: bool = False
    orphan: str = ""
    is_noted: bool = False
    problem: _Problem = _no_volume


# Table of the states of volumes, in order of precedence: if a volume has several states, the first
# row that stops a call decides.
STATES: Mapping[State, StateRow] = MappingProxyType(
    {
        State.DELETED: StateRow(
            "it was deleted, and is overwritten and removed",
            EndedBy.ERASER,
            _calls(
                CREATE=Outcome.ABORTED,
                COPY_FROM=Outcome.ABSENT,
                SNAPSHOT=Outcome.ABSENT,
                EXPAND=Outcome.ABSENT,
                EXPAND_OTHER=Outcome.ABSENT,
                USE=Outcome.ABSENT,
                DELETE=Outcome.JOINS,
                MODIFY=Outcome.ABSENT,
                MANAGE=Outcome.ABSENT,
                ADOPT=Outcome.REFUSED,
                UNDO_ADOPT=Outcome.REFUSED,
            ),
            problem=lambda volume_id, _: errors.OperationPending(f"{volume_id} (being erased)"),
        ),
        State.INLINE: StateRow(
            "it was made for one pod by NodePublishVolume, whose calls alone find it",
            EndedBy.POD,
            _calls(
                COPY_FROM=Outcome.ABSENT,
                SNAPSHOT=Outcome.ABSENT,
                EXPAND=Outcome.ABSENT,
                EXPAND_OTHER=Outcome.ABSENT,
                USE=Outcome.ABSENT,
                MODIFY=Outcome.ABSENT,
                MANAGE=Outcome.ABSENT,
                ADOPT=Outcome.REFUSED,
                UNDO_ADOPT=Outcome.REFUSED,
            ),
            has_tag=False,
            is_callers=True,
            orphan="inline",
        ),
        State.COPYING: StateRow(
            "it is filled, from its source or with zeroes, and is no volume yet",
            EndedBy.COPIER,
            _calls(
                CREATE=Outcome.WAITS,
                COPY_FROM=Outcome.ABORTED,
                SNAPSHOT=Outcome.ABORTED,
                EXPAND=Outcome.ABORTED,
                EXPAND_OTHER=Outcome.ABORTED,
                USE=Outcome.ABORTED,
                DELETE=Outcome.HALTS,
                MODIFY=Outcome.ABORTED,
                MANAGE=Outcome.ABORTED,
                ADOPT=Outcome.REFUSED,
                UNDO_ADOPT=Outcome.REFUSED,
            ),
            is_callers=True,
            orphan="half-made",
            problem=lambda volume_id, _: errors.Copying(volume_id, "it is not complete"),
        ),
        State.RECEIVING: StateRow(
            "it is received as a stream, and is no volume yet",
            EndedBy.RECEIVER,
            _calls(**_NOT_OWN),
            orphan="receiving",
            is_noted=True,
            problem=lambda volume_id, _: errors.Receiving(volume_id),
        ),
        State.MOVED: StateRow(
            "it was moved to another node, and is kept here until the move is final",
            EndedBy.MOVER,
            _calls(**_NOT_OWN),
            orphan="moved",
            is_noted=True,
            problem=lambda volume_id, own_tags: errors.Moved(
                volume_id, own_tags.get(tag.MOVE_TO, "another node")
            ),
        ),
        State.MOVING: StateRow(
            "it is this node's, and is copied to another node, which has received a part of it",
            EndedBy.HANDOVER,
            # Without its volume, the move could not be undone: the node that receives the copy is
            # named by the volume's tags alone.
            _calls(DELETE=Outcome.NOT_OWN, UNDO_ADOPT=Outcome.NOT_OWN),
            has_tag=False,
            is_listed=True,
            is_callers=True,
            orphan="moving",
            problem=lambda volume_id, own_tags: errors.Moving(volume_id, own_tags[tag.MOVE_TO]),
        ),
        State.HELD: StateRow(
            "its last snapshot is sent to another node, by this process alone",
            EndedBy.MOVE,
            # The last stream says what the volume has on the other node: its size and its
            # parameters, beside its contents. What is changed later would be lost.
            _calls(
                EXPAND=Outcome.NOT_OWN,
                EXPAND_OTHER=Outcome.NOT_OWN,
                USE=Outcome.NOT_OWN,
                DELETE=Outcome.NOT_OWN,
                MODIFY=Outcome.NOT_OWN,
                UNDO_ADOPT=Outcome.NOT_OWN,
            ),
            has_tag=False,
            is_listed=True,
            is_callers=True,
            orphan="moving",
        ),
        State.HALF_MADE: StateRow(
            "lvm2 died while it made a RAID, which was never active",
            EndedBy.MAKER,
            _calls(CREATE=Outcome.ANEW, DELETE=Outcome.AT_ONCE),
            has_tag=False,
            is_listed=True,
            is_callers=True,
            orphan="volume",
        ),
        State.READY: StateRow(
            "it is the volume that CreateVolume made",
            EndedBy.CALLER,
            _calls(),
            is_listed=True,
            is_callers=True,
            orphan="volume",
        ),
    }
)

# Table of the background work that is no state of a volume, with the outcome of each call.
WORK: Mapping[Work, Mapping[Call, Outcome]] = MappingProxyType(
    {
        Work.COPIED: _calls(
            # While a volume in use is copied, it cannot grow before its temporary snapshot is gone.
            # A pod can start nevertheless: kubelet gets FAILED_PRECONDITION, and the next stage
            # grows the volume.
            EXPAND=Outcome.ABORTED,
            EXPAND_OTHER=Outcome.ABORTED,
            DELETE=Outcome.REFUSED,
            UNDO_ADOPT=Outcome.REFUSED,
        ),
        Work.GROWTH: _calls(
            EXPAND=Outcome.WAITS,
            EXPAND_OTHER=Outcome.HALTS,
            DELETE=Outcome.HALTS,
            UNDO_ADOPT=Outcome.REFUSED,
        ),
        Work.LEFT_GROWTH: _calls(
            EXPAND=Outcome.HALTS,
            EXPAND_OTHER=Outcome.HALTS,
            DELETE=Outcome.HALTS,
            UNDO_ADOPT=Outcome.REFUSED,
        ),
        # Snapshots and copies are ABORTED during mkfs: a snapshot taken then would have an
        # incomplete file system for ever.
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

# Map from each `EndedBy` to the state that it ends.
_ENDED_BY = {row.ended_by: state for state, row in STATES.items()}
# Map from each value of the tag `state` to the state that it records.
_TAGGED = {str(state): state for state, row in STATES.items() if row.has_tag}
# Keys of tags, beside FROM, that prove for a volume in the state COPYING that it is filled from a
# volume or a snapshot, and not only zeroed.
_OF_COPIES = frozenset({tag.BRIDGE, tag.FORMATTED, tag.SEALED, tag.SHARED_KEY})
# Keys of tags that mark a volume as one that is created or removed in several steps.
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
    """Interface of a volume's record, such as `records.Volume`, for this module."""

    @property
    def id(self) -> VolumeId:
        """Id of the volume."""
        ...

    @property
    def own_tags(self) -> Mapping[str, str]:
        """Carver's tags of the volume, decoded."""
        ...

    @property
    def is_half_made(self) -> bool:
        """Whether the volume is a RAID that lvm2 was creating when lvm2 was killed."""
        ...


def row_of(ender: EndedBy) -> StateRow:
    """Return the table row of the state that is ended by `ender` (see `EndedBy`)."""
    return STATES[_ENDED_BY[ender]]


def outcome(call: Call, work: EndedBy | Work) -> Outcome:
    """Return what happens to a call because of background work, by the table.

    `work` is other background work, or an `EndedBy`, for the work that ends a volume's state.
    """
    return outcomes(work)[call]


def outcomes(work: EndedBy | Work) -> Mapping[Call, Outcome]:
    """Return what happens to each call because of background work, as for `outcome`."""
    return WORK[work] if isinstance(work, Work) else row_of(work).calls


def by_tag(own_tags: Mapping[str, str]) -> State:
    """Return the state that the tag `state` records; READY if the tag is missing or unknown.

    A volume without the tag was created in one step. A value that no version wrote, or that only a
    newer version knows, is shown as READY; `faults` keeps such a volume from use.
    """
    return _TAGGED.get(own_tags.get(tag.STATE, ""), State.READY)


def ended_by(own_tags: Mapping[str, str]) -> EndedBy:
    """Return the call, or the part of Carver, that ends the state which the tag `state` records."""
    return STATES[by_tag(own_tags)].ended_by


def rows(own_tags: Mapping[str, str]) -> list[StateRow]:
    """Return the table's rows for the states that follow from a volume's tags, in their order."""
    states = _by_tags(own_tags)
    return [row for state, row in STATES.items() if state in states]


def is_recorded(own_tags: Mapping[str, str], ender: EndedBy) -> bool:
    """Whether the tag `state` records the state that is ended by `ender` (see `EndedBy`).

    False if the tag is lost. Thin pools have the tag as well, and so have the logical volumes that
    reserve extents for growth.
    """
    return own_tags.get(tag.STATE) == word_of(ender)


def is_deleted_snapshot(logical: report.LogicalVolume) -> bool:
    """Whether a snapshot, or extents reserved for growth, only has to be overwritten and removed.

    `logical` is the snapshot's logical volume, or the one that reserves the extents. One of these
    facts decides:

    - The logical volume has neither origin nor pool. The snapshot was split from its origin, or
      lvm2 was killed before the snapshot got its origin. Reserved extents never have an origin.
    - The tag `state` records the logical volume as deleted. A disk was missing, so the snapshot
      could not be split from its origin.
    """
    is_lost = not (logical.origin or logical.pool)
    return is_lost or is_recorded(logical.own_tags, EndedBy.ERASER)


def faults(own_tags: Mapping[str, str]) -> Iterator[str]:
    """Yield the faults of a volume's tags that say its state, as texts.

    Faults are tags such as no version of Carver writes: some were lost, or changed by hand.
    """
    has_source = tag.FROM in own_tags
    is_zeroed = tag.ZERO in own_tags and _OF_COPIES.isdisjoint(own_tags)
    if is_recorded(own_tags, EndedBy.COPIER) and not (has_source or is_zeroed):
        yield "`copying` without `from`"
    text = own_tags.get(tag.STATE)
    # Accept a volume without the tag `state` only if it was created in one step, and so is
    # complete. A volume that is created in several steps may be incomplete.
    is_known = text in _TAGGED or (text is None and _IN_STEPS.isdisjoint(own_tags))
    if tag.NAME in own_tags and not is_known:
        yield "no `state`"


def of(volume: Recorded) -> list[State]:
    """Return the states of a volume, by its record, in the order of precedence."""
    states = _by_tags(volume.own_tags) | ({State.HALF_MADE} if volume.is_half_made else set())
    return [state for state in STATES if state in states]


def _by_tags(own_tags: Mapping[str, str]) -> set[State]:
    """Return the states of a volume that follow from its tags."""
    states = {by_tag(own_tags)}
    if tag.EPHEMERAL in own_tags:
        states.add(State.INLINE)
    if tag.MOVE_TO in own_tags and State.READY in states:
        states.add(State.MOVING)
    return states


def meets(call: Call, volume: Recorded, expected_outcome: Outcome) -> bool:
    """Whether the table has the outcome `expected_outcome` for a call, in one of a volume's states.

    The states are those of the volume's record.
    """
    return any(STATES[state].calls[call] is expected_outcome for state in of(volume))


def require(call: Call, volume: Recorded) -> None:
    """Raise an error if one of a volume's states, by the volume's record, excludes a call.

    Raises NoSuchVolume if the call must not find the volume. Otherwise the error is that of the
    state: Copying, OperationPending, Receiving, Moved or Moving. Outcomes that the operation itself
    has to bring about, such as HALTS, raise nothing.
    """
    for state in of(volume):
        row = STATES[state]
        if row.calls[call] is Outcome.ABSENT:
            raise errors.NoSuchVolume(str(volume.id))
        if row.calls[call] in (Outcome.ABORTED, Outcome.NOT_OWN):
            raise row.problem(str(volume.id), volume.own_tags)


def word_of(ender: EndedBy) -> str:
    """Return the value of the tag `state` for the state that is ended by `ender` (see `EndedBy`).

    Carver's own RPCs use the same word for the state.
    """
    return str(_ENDED_BY[ender])


def tags_for(ender: EndedBy) -> Mapping[str, str]:
    """Return the tag `state`, as a dictionary, for the state that is ended by `ender`."""
    return {tag.STATE: word_of(ender)}


def hand_over(lvm: Lvm, group: str, name: str, own_tags: Mapping[str, str], ender: EndedBy) -> None:
    """Change the state that a logical volume's tag `state` records, by one command.

    The new state is the one that is ended by `ender` (see `EndedBy`). `own_tags` are the present
    tags of the logical volume.
    """
    old_tags = {tag.STATE: str(by_tag(own_tags))}
    volumes.mark(lvm, group, name, old_tags=old_tags, new_tags=tags_for(ender))

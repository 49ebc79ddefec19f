"""ControllerModifyVolume: a volume's mutable parameters, all of them changed or none."""

from agent.core import errors, ids, records
from agent.core.context import Context
from agent.core.parameters import MUTABLE, MUTABLE_FIELD, PREFIX
from agent.core.records import Volume
from agent.core.requests import ModifyVolume
from lvm import tuning
from lvm.layout import Layout
from lvm.lvm2 import Lvm
from lvm.tuning import PLAIN, Tuning


def modify(context: Context, call: ModifyVolume) -> None:
    """Give a volume its mutable parameters: two commands, one if it has them.

    Raises BadField, HasSnapshots, NoCgroup; then nothing is changed.
    """
    context.limiter.require(call.tuning)
    with context.volume_groups.hold(ids.group_of(call.volume_id)):
        volume = context.inventory.require(call.volume_id)
        tuned = ensure(context.volume_groups.lvm(volume.group.name), volume, call.tuning)
        # Crash point: on record and not set; the next start, or this call again, sets it.
        context.limiter.apply(volume, tuned)


def ensure(lvm: Lvm, volume: Volume, wanted: Tuning) -> Tuning:
    """Change what a volume lacks of its parameters, and return all: one metadata write, or none.

    The group's lock is held. Raises BadField, HasSnapshots; then nothing is changed.
    """
    group, present = volume.group, volume.group.volume(volume.name).tuning
    check(wanted, volume.layout, present)
    lacking = wanted.lacking_in(present)
    if lacking == tuning.AS_IT_IS:
        return present
    held = [str(one.id) for one in records.snapshots_of(volume) if not one.is_thin]
    if held and lacking.read_ahead_bytes is not None:
        raise errors.HasSnapshots(
            str(volume.id), held, "lvm2 does not change its read-ahead with them; delete them first"
        )
    tuning.change(lvm, group.name, volume.name, lacking, present)
    return wanted.over(present)


def complete(lvm: Lvm, group: str, name: str, wanted: Tuning) -> None:
    """Give a new volume the parameters that lvcreate refuses: one command, mostly none."""
    lacking = wanted.lacking_in(wanted.for_new().over(PLAIN))
    if lacking != tuning.AS_IT_IS:
        tuning.change(lvm, group, name, lacking)


def check(wanted: Tuning, shape: Layout, present: Tuning = PLAIN) -> None:
    """Raise BadField for parameters that a volume of that layout, and with these, cannot have."""
    if not (parts := wanted.of_raid):
        return
    if not shape.is_raid:
        keys = {row.part: row.key for row in MUTABLE}
        others = [PREFIX + keys[one.part] for one in tuning.SETTINGS if not one.of_raid]
        raise errors.BadField(
            f"{MUTABLE_FIELD}[{keys[parts[-1]]}]",
            f"is for a RAID's layouts, this volume is {shape.kind}; allowed: {', '.join(others)}",
        )
    if why := wanted.over(present).refusal:
        raise errors.BadField(MUTABLE_FIELD, why)

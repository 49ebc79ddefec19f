"""What of a volume may be changed while it is in use: a CO's mutable parameters.

They are no part of what a volume is. LVM's metadata hold them, and nothing else does.
"""

from agent import errors
from agent.engine import records
from agent.engine.records import Volume
from agent.requests import keys
from lvm import tuning
from lvm.layout import Layout
from lvm.lvm2 import Lvm
from lvm.tuning import PLAIN, Tuning


def check(wanted: Tuning, shape: Layout, present: Tuning = PLAIN) -> None:
    """Raise BadField for what a volume of that layout cannot have beside what it has."""
    if not wanted.is_of_recovery:
        return
    if not shape.is_raid:
        given = "minimum" if wanted.maximum_recovery_kib is None else "maximum"
        raise errors.BadField(
            f"{keys.MUTABLE}[{given}RecoveryRate]",
            f"is for a RAID's layouts, this volume is {shape.kind}; allowed: carver/readAhead",
        )
    if why := wanted.over(present).refusal:
        raise errors.BadField(keys.MUTABLE, why)


def complete(lvm: Lvm, group: str, name: str, wanted: Tuning) -> None:
    """Give a new volume what lvcreate does not take: one command, mostly none."""
    lacking = wanted.lacking_in(wanted.for_new().over(PLAIN))
    if lacking != tuning.AS_IT_IS:
        tuning.change(lvm, group, name, lacking)


def ensure(lvm: Lvm, volume: Volume, wanted: Tuning) -> None:
    """Have a volume as wanted: one command, none where it is; the group's lock is held.

    Raises BadField, HasSnapshots; then nothing is changed.
    """
    group, present = volume.group, volume.group.volume(volume.name).tuning
    check(wanted, volume.layout, present)
    lacking = wanted.lacking_in(present)
    if lacking == tuning.AS_IT_IS:
        return
    held = [str(one.id) for one in records.snapshots_of(volume) if not one.is_thin]
    if held and lacking.read_ahead_bytes is not None:
        raise errors.HasSnapshots(
            str(volume.id), held, "lvm2 does not change its read-ahead with them; delete them first"
        )
    tuning.change(lvm, group.name, volume.name, lacking)

"""ControllerModifyVolume: a volume's mutable parameters, all of them changed or none."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from agent.core import errors, ids
from agent.requests.parameters import MUTABLE, MUTABLE_FIELD, PREFIX
from agent.requests.requests import ModifyVolume
from agent.settings.classes import DeviceClass
from agent.settings.settings import Config
from agent.volumes import records, report_age
from agent.volumes.context import Context
from agent.volumes.records import Volume
from agent.volumes.volume_states import Call
from agent.work.background import Attempts, all_or_each
from lvm import tuning
from lvm.layout import Layout
from lvm.lvm2 import Lvm
from lvm.report import Group
from lvm.tuning import PLAIN, Tuning


def modify(context: Context, call: ModifyVolume) -> None:
    """Give a volume its mutable parameters: two commands, one if it has them.

    Raises BadField, HasSnapshots, NoCgroup; then nothing is changed.
    """
    context.limiter.require(call.tuning)
    with context.volume_groups.hold(ids.group_of(call.volume_id)):
        volume = context.mender.mended_volume(call.volume_id, Call.MANAGE)
        name = volume.group.name
        bound_kib = context.configuration.now.recovery_bound_kib(name)
        tuned = ensure(context.volume_groups.lvm(name), volume, call.tuning, bound_kib)
        # Crash point: on record and not set; the next start, or this call again, sets it.
        context.limiter.apply(volume, tuned)


def ensure(lvm: Lvm, volume: Volume, wanted: Tuning, bound_kib: int) -> Tuning:
    """Change what a volume lacks of its parameters, and return all: one metadata write, or none.

    RAID recovery is bounded to so many KiB a second, 0 for no bound. The group's lock is held.
    Raises BadField, HasSnapshots; then nothing is changed.
    """
    group, present = volume.group, volume.group.volume(volume.name).tuning
    check(wanted, volume.layout, present)
    if volume.layout.is_raid:
        wanted = wanted.bounded(present, bound_kib)
    lacking = wanted.lacking_in(present)
    if lacking == tuning.AS_IT_IS:
        return present
    held = [str(one.id) for one in records.snapshots_of(volume) if not one.is_thin]
    if held and lacking.read_ahead_bytes is not None:
        raise errors.HasSnapshots(
            str(volume.id), held, "lvm2 changes its read-ahead only while it has none"
        )
    tuning.change(lvm, group.name, [volume.name], lacking, present)
    return wanted.over(present)


def complete(lvm: Lvm, group: str, name: str, wanted: Tuning) -> None:
    """Give a new volume the parameters that lvcreate refuses: one command, mostly none."""
    lacking = wanted.lacking_in(wanted.for_new().over(PLAIN))
    if lacking != tuning.AS_IT_IS:
        tuning.change(lvm, group, [name], lacking)


def bounded(config: Config, one: DeviceClass, wanted: Tuning = tuning.AS_IT_IS) -> Tuning:
    """What a new volume of a class gets of which this is said: also the bound on RAID recovery."""
    if not one.layout.is_raid:
        return wanted
    return wanted.bounded(PLAIN, config.recovery_bound_kib(one.group))


def bound(context: Context, group: Group) -> int:
    """Have RAID recovery in a group keep to its `background_bandwidth`, as that is now.

    Returns how many volumes were changed: one command for those that are alike, none where all is
    so. While a disk is missing lvm2 changes nothing. The group's lock is held. Raises an
    ExceptionGroup once each was tried.
    """
    if group.missing_uuids:
        return 0
    bound_kib = context.configuration.now.recovery_bound_kib(group.name)
    alike = defaultdict[tuple[Tuning, Tuning], list[str]](list)
    for volume in report_age.fresh([group]).volumes():
        one = group.volume(volume.name)
        if "raid" not in one.layout:
            continue
        lacking = tuning.AS_IT_IS.bounded(one.tuning, bound_kib).lacking_in(one.tuning)
        if lacking != tuning.AS_IT_IS:
            alike[lacking, one.tuning].append(volume.name)
    lvm = context.volume_groups.lvm(group.name)
    with Attempts() as attempts:
        for (lacking, present), named in alike.items():
            change = partial(_change, lvm, group.name, lacking, present)
            with attempts.one():
                all_or_each(named, change)
    return sum(len(named) for named in alike.values())


def _change(lvm: Lvm, group: str, lacking: Tuning, present: Tuning, names: Sequence[str]) -> None:
    tuning.change(lvm, group, names, lacking, present)


def resume(context: Context, *groups: str) -> int:
    """`bound` these groups, or all, at the start: the setting may be another than before."""
    reports, count = context.reports, 0
    with Attempts() as attempts:
        for one in reports.fresh(*groups).groups.values():
            with attempts.one(), context.volume_groups.hold(one.name):
                count += bound(
                    context, context.reports.group(context.reports.fresh(one.name), one.name)
                )
    return count


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

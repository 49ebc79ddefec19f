"""ControllerModifyVolume: change all mutable parameters of a volume, or none."""

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


def modify(context: Context, request: ModifyVolume) -> None:
    """Set a volume's mutable parameters; run two commands, or one if the volume has them.

    Raises BadField for parameters that the volume cannot have, HasSnapshots if the read-ahead of a
    volume with copy-on-write snapshots would change, and NoCgroup if I/O cannot be limited on this
    node; nothing is changed in these cases.
    """
    context.limiter.require(request.tuning)
    with context.volume_groups.hold(ids.group_of(request.volume_id)):
        volume = context.mender.mended_volume(request.volume_id, Call.MODIFY)
        context.conflicts.check(Call.MODIFY, request.volume_id)
        name = volume.group.name
        bound_kib = context.config.recovery_bound_kib(name)
        tuned = ensure(context.volume_groups.lvm(name), volume, request.tuning, bound_kib)
        # Crash point: the parameters are in the metadata of the volume group, and the I/O limits
        # among them are not set in the kernel; the next start of Carver, or a repeated call, sets
        # the limits.
        context.limiter.apply(volume, tuned)


def ensure(lvm: Lvm, volume: Volume, requested: Tuning, bound_kib: int) -> Tuning:
    """Change the mutable parameters in which a volume differs from a request; return them all.

    Writes the group's metadata once, or not at all. `bound_kib` limits RAID recovery, in KiB a
    second; 0 means no limit. The caller holds the group's lock. Raises BadField for parameters that
    the volume cannot have, and HasSnapshots if the read-ahead of a volume with copy-on-write
    snapshots would change; nothing is changed in these cases.
    """
    group, present = volume.group, volume.group.volume(volume.backing.name).tuning
    shape = volume.layout
    check(requested, shape, present)
    if shape.is_raid:
        requested = requested.bounded(present, bound_kib)
    lacking = requested.missing_from(present)
    if lacking == tuning.AS_IT_IS:
        return present
    snapshot_ids = [
        str(snapshot.id) for snapshot in records.snapshots_of(volume) if not snapshot.is_thin
    ]
    if snapshot_ids and lacking.read_ahead_bytes is not None:
        raise errors.HasSnapshots(
            str(volume.id), snapshot_ids, "lvm2 changes its read-ahead only while it has none"
        )
    tuning.change(lvm, group.name, [volume.name], lacking, present)
    return requested.applied_to(present)


def complete(lvm: Lvm, group: str, name: str, requested: Tuning) -> None:
    """Set the parameters of a new volume that lvcreate cannot set; runs at most one command.

    Few volumes have such parameters.
    """
    lacking = requested.missing_from(requested.for_new().applied_to(PLAIN))
    if lacking != tuning.AS_IT_IS:
        tuning.change(lvm, group, [name], lacking)


def bounded(
    config: Config, device_class: DeviceClass, requested: Tuning = tuning.AS_IT_IS
) -> Tuning:
    """Return the mutable parameters of a new volume, with the limit on RAID recovery.

    `requested` are the mutable parameters that the caller asked for. A volume that is not a RAID
    gets no limit.
    """
    if not device_class.layout.is_raid:
        return requested
    return requested.bounded(PLAIN, config.recovery_bound_kib(device_class.group))


def bound(context: Context, group: Group) -> int:
    """Limit RAID recovery in a volume group to the present setting `background_bandwidth`.

    Returns how many volumes were changed. Runs one command for all volumes that need the same
    change, and none if no volume needs any. While a disk is missing lvm2 changes nothing, so the
    result is 0. The caller holds the group's lock. Raises an ExceptionGroup after each change was
    tried.
    """
    if group.missing_uuids:
        return 0
    bound_kib = context.config.recovery_bound_kib(group.name)
    volumes_by_change = defaultdict[tuple[Tuning, Tuning], list[str]](list)
    for volume in report_age.fresh([group]).volumes():
        logical = group.volume(volume.name)
        if "raid" not in logical.layout:
            continue
        lacking = tuning.AS_IT_IS.bounded(logical.tuning, bound_kib).missing_from(logical.tuning)
        if lacking != tuning.AS_IT_IS:
            volumes_by_change[lacking, logical.tuning].append(volume.name)
    lvm = context.volume_groups.lvm(group.name)
    with Attempts() as attempts:
        for (lacking, present), volume_names in volumes_by_change.items():
            change = partial(_change, lvm, group.name, lacking, present)
            with attempts.attempt():
                all_or_each(volume_names, change)
    return sum(len(volume_names) for volume_names in volumes_by_change.values())


def _change(
    lvm: Lvm, group: str, lacking: Tuning, present_tuning: Tuning, names: Sequence[str]
) -> None:
    tuning.change(lvm, group, names, lacking, present_tuning)


def resume(context: Context, *groups: str) -> int:
    """Limit RAID recovery in the named volume groups, or in all, when the service starts.

    The setting `background_bandwidth` may have changed while the service was stopped. Returns how
    many volumes were changed.
    """
    reports, count = context.reports, 0
    with Attempts() as attempts:
        for group in reports.fresh(*groups).groups.values():
            with attempts.attempt(), context.volume_groups.hold(group.name):
                count += bound(
                    context, context.reports.group(context.reports.fresh(group.name), group.name)
                )
    return count


def check(requested: Tuning, shape: Layout, present_tuning: Tuning = PLAIN) -> None:
    """Raise BadField for mutable parameters that a volume cannot have with its layout.

    `present_tuning` are the parameters that the volume has; those of `requested` are added to them.
    """
    if not (raid_parts := requested.of_raid):
        return
    if not shape.is_raid:
        keys = {parameter.field_name: parameter.key for parameter in MUTABLE}
        allowed = [
            PREFIX + keys[setting.field_name] for setting in tuning.SETTINGS if not setting.of_raid
        ]
        raise errors.BadField(
            f"{MUTABLE_FIELD}[{keys[raid_parts[-1]]}]",
            f"is for a RAID's layouts, this volume is {shape.kind}; allowed: {', '.join(allowed)}",
        )
    if why := requested.applied_to(present_tuning).refusal:
        raise errors.BadField(MUTABLE_FIELD, why)

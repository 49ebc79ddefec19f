"""A volume's condition as the caller is told it: what LVM reports against it, and the answer."""

from collections.abc import Sequence

from agent.inventory import Volume
from proto import csi_pb2 as csi

# lv_health_status, by lvmreport(7) and lib/report/report.c of lvm2.
_REMEDIES = {
    "partial": "a disk of it is missing; attach the disk again (`pvs`), or restore the volume from"
    " a backup",
    "refresh needed": "a disk of it was away; run `lvchange --refresh` on it",
    "mismatches exist": "its copies differ; run `lvchange --syncaction repair` on it",
}


def problems(volume: Volume) -> tuple[str, ...]:
    """What LVM's report says against a volume; usually nothing."""
    if not volume.health:
        return ()
    remedy = _REMEDIES.get(volume.health, "look with `lvs -o +lv_health_status` and at `dmesg`")
    return (f"logical volume {volume.group.name}/{volume.name} is {volume.health}: {remedy}",)


def answer(found: Sequence[str]) -> csi.VolumeCondition:
    """The condition that these problems make."""
    return csi.VolumeCondition(
        abnormal=bool(found), message="; ".join(found) or "no problem is known"
    )

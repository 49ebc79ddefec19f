"""A volume's condition, as the caller is told it."""

from collections.abc import Sequence

from proto import csi_pb2 as csi


def answer(found: Sequence[str]) -> csi.VolumeCondition:
    """The condition that these problems make."""
    return csi.VolumeCondition(
        abnormal=bool(found), message="; ".join(found) or "no problem is known"
    )

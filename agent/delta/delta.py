"""Deltas: what of a snapshot or a volume is allocated, and what changed since a snapshot of it."""

from contextlib import AbstractContextManager

from agent.delta.extents import Reading
from agent.engine.means import Means


class Delta:
    """Answers for snapshots, and for volumes as they are now, by their ids.

    A volume is read as it is while it is read: of one that is written to meanwhile the answer may
    lack what was written since it began. Take a snapshot for more.
    """

    def __init__(self, means: Means) -> None:
        self._means = means

    def allocated(self, identity: str) -> AbstractContextManager[Reading]:
        """What is not zero, or may not be; whatever it does not name reads as zeroes.

        Raises NoSuchSnapshot, NoSuchVolume, OtherGroup, Copying, SourceLost.
        """
        raise NotImplementedError

    def changed(self, base_id: str, target_id: str) -> AbstractContextManager[Reading]:
        """Where two snapshots of a volume, or one and the volume as it is, differ: block by block.

        Each block that it names differs, each that it does not name is equal. A base that is
        smaller is taken to read as zeroes behind its end. Raises the same, and NotComparable for
        those that are not of one volume, and for a base that is larger.
        """
        raise NotImplementedError

"""Replace Carver's tags of a volume, before the call is answered.

`VolumeGroup.add_tags_later` writes tags after the call has been answered.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from agent.core import errors, tag
from agent.groups.node_groups import VolumeGroups
from agent.volumes.backing import Backing
from agent.volumes.mender import Mender
from lvm import lvm_errors as lvm_errors
from lvm import tags, volumes
from mount import mount_errors as mount_errors

_log = logging.getLogger(__name__)


class TagWriter:
    """Replaces the tags of volumes in LVM's metadata."""

    def __init__(self, volume_groups: VolumeGroups, mender: Mender) -> None:
        self._volume_groups = volume_groups
        self._mender = mender

    def replace(self, volume: Backing, keys: Collection[str], new_tags: Mapping[str, str]) -> None:
        """Replace all tags of a volume with these keys by `new_tags`.

        Takes the lock of the volume's group, and first repairs what a killed lvm2 left in the
        group. Runs no further command if the volume has these tags already, else one. Raises as
        `Mender.mend`, VolumeMissing if the volume does not exist, and BadField for a value that is
        too long for a tag.
        """
        for key, text in new_tags.items():
            tag.require_fits(key, key, text)
        group, name = volume.group, volume.name
        with self._volume_groups.hold(group):
            present = self._mender.mend(group).group(group).volume(name).tags
            # Replace all values of a key. Only other programs write several values of one key.
            existing = {(key, value) for key in keys for value in tags.values(present, key)}
            removed, added = sorted(existing - new_tags.items()), dict(new_tags.items() - existing)
            if removed or added:
                volumes.mark(
                    self._volume_groups.lvm(group), group, name, old_tags=removed, new_tags=added
                )


@contextmanager
def logging_refusals(volume_id: str, key: str) -> Iterator[None]:
    """Log an error of the body, which changes a tag that the call does not depend on; suppress it.

    For instance, lvm2 writes no tag in a volume group whose metadata area is full, or of which a
    disk is missing. An error that leaves the outcome unknown is raised: the caller repeats the
    call. `key` is the tag's key, for the log.
    """
    try:
        yield
    except (mount_errors.OutcomeUnknown, lvm_errors.StillRunning):
        raise
    except (errors.AgentError, mount_errors.CommandError) as error:
        _log.warning("volume %s: its tag `%s` is not changed: %s", volume_id, key, error)

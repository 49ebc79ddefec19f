"""What an operator asks for that CSI has no call for: parse, hold the volume, call policy, answer.

On the same socket, which only root can open (agent/csi/own.py).
"""

import grpc
from google.protobuf.struct_pb2 import Struct

from agent import errors, ids
from agent.csi import own
from agent.locks import VolumeLocks
from agent.workers.disk_replacement import Replacement
from agent.workers.repairing import Progress, Repairer

# PATH_MAX of linux/limits.h.
_LONGEST = 4096


class Operator:
    """The operator's calls. Each goes on with a repair, and says how far it is."""

    def __init__(self, repairer: Repairer, replacement: Replacement, locks: VolumeLocks) -> None:
        self._repairer = repairer
        self._replacement = replacement
        self._locks = locks

    def repair_volume(self, request: Struct, context: grpc.ServicerContext) -> Struct:
        """Make a volume whole again; of a thin one its pool, if `pool_metadata` is true."""
        volume_id = _text(request, "volume_id")
        told = dict(request.items()).get("pool_metadata") is True
        with self._locks.hold(ids.logical_name(volume_id)):
            return _answer(self._repairer.repair(volume_id, pool_metadata=told))

    def replace_disk(self, request: Struct, context: grpc.ServicerContext) -> Struct:
        """Put `new_disk`, a path, in the place of `old_disk`, a path or a missing disk's UUID."""
        old, new = _text(request, "old_disk"), _text(request, "new_disk")
        return _answer(self._replacement.replace(old, new))

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server is given."""
        return own.handler(
            own.OPERATOR,
            {own.REPAIR_VOLUME: self.repair_volume, own.REPLACE_DISK: self.replace_disk},
        )


def _text(request: Struct, field: str) -> str:
    """A field that must be there; raises Missing, BadField."""
    told = dict(request.items()).get(field, "")
    if not told:
        raise errors.Missing(field)
    if not isinstance(told, str) or not told.isprintable() or len(told) > _LONGEST:
        raise errors.BadField(field, "is no name: a text of one line")
    return told


def _answer(progress: Progress) -> Struct:
    made = Struct()
    made.update({"done": progress.done, "message": progress.message})
    return made

"""What an operator asks for that CSI has no call for: parse, hold the volume, call policy, answer.

On the same socket, which only root can open (agent/csi/own.py).
"""

from collections.abc import Iterable, Mapping

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from agent.core import errors, ids, records
from agent.core.locks import VolumeLocks
from agent.core.records import Snapshot, Volume
from agent.csi import answers, own
from agent.operations.listing import Listing
from agent.operations.repair import Progress, Repairer
from agent.operations.replace_disk import Replacement

# PATH_MAX of linux/limits.h.
_LONGEST = 4096


class Operator:
    """The operator's calls. Those that repair go on with it, and say how far it is.

    `here` is this node's topology.
    """

    def __init__(
        self,
        repairer: Repairer,
        replacement: Replacement,
        listing: Listing,
        locks: VolumeLocks,
        here: Mapping[str, str],
    ) -> None:
        self._repairer = repairer
        self._replacement = replacement
        self._listing = listing
        self._locks = locks
        self._here = here

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

    def volumes_here(self, request: Struct, context: grpc.ServicerContext) -> Struct:
        """The volumes of the groups that are here: claims, names of keys; why others are not."""
        found = self._listing.volumes()
        made = _list((answers.volume(one, self._here) for one in found.entries), found.away)
        made.update({"claims": {str(one.id): one.claim for one in found.entries if one.claim}})
        made.update({"keys": _keys(found.entries)})
        return made

    def snapshots_here(self, request: Struct, context: grpc.ServicerContext) -> Struct:
        """The same of snapshots."""
        found = self._listing.snapshots()
        made = _list((answers.snapshot(one, self._here) for one in found.entries), found.away)
        made.update({"keys": _keys(found.entries)})
        return made

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server is given."""
        return own.handler(
            own.OPERATOR,
            {
                own.REPAIR_VOLUME: self.repair_volume,
                own.REPLACE_DISK: self.replace_disk,
                own.VOLUMES_HERE: self.volumes_here,
                own.SNAPSHOTS_HERE: self.snapshots_here,
            },
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


def _keys(found: Iterable[Volume | Snapshot]) -> dict[str, str]:
    """What the keys of those that are encrypted are called, by their ids."""
    return {str(one.id): records.key_generation(one.own_tags) for one in found if one.is_encrypted}


def _list(entries: Iterable[Message], away: Mapping[str, str]) -> Struct:
    """CSI's messages as their JSON, in which numbers of 64 bits are texts."""
    made = Struct()
    made.update({"entries": [json_format.MessageToDict(one) for one in entries], "away": away})
    return made

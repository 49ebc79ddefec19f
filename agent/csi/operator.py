"""The gRPC service Operator: RPCs that CSI lacks, for the command `carver`.

proto/carver.proto declares the RPCs.
"""
# ruff: noqa: D102, N802

from collections.abc import Callable, Iterable, Mapping

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from agent.core import errors, ids, tag
from agent.core.trace import Traces
from agent.csi import messages
from agent.operations import plan
from agent.operations.adopt import Adopter, Adoption, AdoptionRequest
from agent.operations.listing import Listing
from agent.operations.repair import Progress, Repairer
from agent.operations.replace_disk import Replacement
from agent.requests.parameters import require_object_names
from agent.volumes import records
from agent.volumes.context import Context
from agent.volumes.records import Snapshot, Volume
from proto import carver_pb2 as carver
from proto import carver_pb2_grpc

# Maximum length of a string in a request, in characters: PATH_MAX of linux/limits.h.
_MAX_CHARACTERS = 4096


class Operator(carver_pb2_grpc.OperatorServicer):
    """The Operator service: each method checks its request, calls one operation, and answers.

    A new method may need more parts of `context`, which `__init__` then stores. `kernel` is the
    interface to system calls. `mender.mended_volume(volume_id, call)` returns the volume with an
    id; `reports.for_lists().find_named(own_name)` returns the volume with that logical volume, or
    None, for which the method raises errors.NoSuchVolume. The tags of a volume (agent/core/tag.py)
    are its `own_tags`. `tag_writer.replace(volume.backing, keys, {key: text})` locks the volume
    group, writes the given tags, removes each tag of `keys` for which no text is given, and raises
    BadField for a text that is too long.
    """

    def __init__(
        self,
        context: Context,
        repairer: Repairer,
        replacement: Replacement,
        listing: Listing,
        adopter: Adopter,
        traces: Traces,
        progress: Callable[[], Mapping[str, str]],
    ) -> None:
        self._traces, self._all_progress = traces, progress
        self._repairer = repairer
        self._replacement = replacement
        self._listing = listing
        self._adopter = adopter
        self._locks = context.locks
        self._configuration = context.configuration

    def RepairVolume(
        self, request: carver.RepairVolumeRequest, context: grpc.ServicerContext
    ) -> carver.Progress:
        return self.RepairAsConfirmed(request, context)

    def RepairAsConfirmed(
        self, request: carver.RepairVolumeRequest, context: grpc.ServicerContext
    ) -> carver.Progress:
        require(request, "volume_id")
        with self._locks.hold(ids.logical_name(request.volume_id)):
            return _progress(
                self._repairer.repair(
                    request.volume_id,
                    pool_metadata=request.pool_metadata,
                    differing_images=request.differing_images,
                )
            )

    def ReplaceDisk(
        self, request: carver.ReplaceDiskRequest, context: grpc.ServicerContext
    ) -> carver.Progress:
        require(request, "old_disk", "new_disk")
        return _progress(self._replacement.replace(request.old_disk, request.new_disk))

    def SlowestCalls(
        self, request: carver.SlowestCallsRequest, context: grpc.ServicerContext
    ) -> carver.SlowestCallsResponse:
        if request.most < 1:
            raise errors.BadField("most", "must be at least 1")
        calls = [
            carver.TracedCall(
                method=trace.method,
                volume=trace.volume,
                code=trace.code,
                time_seconds=trace.time_seconds,
                seconds=trace.seconds,
                steps=[carver.TracedStep(**vars(step)) for step in trace.steps],
            )
            for trace in self._traces.slowest(request.most)
        ]
        return carver.SlowestCallsResponse(calls=calls)

    def BackgroundWork(
        self, request: Empty, context: grpc.ServicerContext
    ) -> carver.BackgroundWorkResponse:
        return carver.BackgroundWorkResponse(progress=self._all_progress())

    def VolumesHere(
        self, request: Empty, context: grpc.ServicerContext
    ) -> carver.VolumesHereResponse:
        listing = self._listing.volumes()
        return carver.VolumesHereResponse(
            entries=[
                messages.volume(volume, self._configuration.now.here) for volume in listing.entries
            ],
            away=listing.unread_groups,
            claims={str(volume.id): volume.claim for volume in listing.entries if volume.claim},
            keys=_keys(listing.entries),
            persistent_volumes={
                str(volume.id): volume.own_tags[tag.PV]
                for volume in listing.entries
                if volume.own_tags.get(tag.PV)
            },
            capabilities={
                str(volume.id): carver.VolumeCapabilities(
                    entries=map(messages.capability, capabilities)
                )
                for volume in listing.entries
                if (capabilities := plan.recorded_capabilities(volume))
            },
        )

    def SnapshotsHere(
        self, request: Empty, context: grpc.ServicerContext
    ) -> carver.SnapshotsHereResponse:
        listing = self._listing.snapshots()
        return carver.SnapshotsHereResponse(
            entries=[
                messages.snapshot(snapshot, self._configuration.now.here)
                for snapshot in listing.entries
            ],
            away=listing.unread_groups,
            keys=_keys(listing.entries),
        )

    def AdoptVolume(
        self, request: carver.AdoptVolumeRequest, context: grpc.ServicerContext
    ) -> carver.AdoptVolumeResponse:
        adoption = _adoption_request(request)
        with self._locks.hold(adoption.name, adoption.new_name):
            return self._adoption(self._adopter.adopt(adoption))

    def UndoAdoptVolume(
        self, request: carver.AdoptVolumeRequest, context: grpc.ServicerContext
    ) -> carver.AdoptVolumeResponse:
        adoption = _adoption_request(request)
        with self._locks.hold(adoption.name, adoption.new_name):
            return self._adoption(self._adopter.undo(adoption))

    def _adoption(self, adoption: Adoption) -> carver.AdoptVolumeResponse:
        segments = self._configuration.now.here
        volume = None if adoption.volume is None else messages.volume(adoption.volume, segments)
        return carver.AdoptVolumeResponse(volume=volume, changes=adoption.changes)


def _adoption_request(request: carver.AdoptVolumeRequest) -> AdoptionRequest:
    require(request, "group", "logical_volume")
    names = {tag.PV: request.pv, tag.PVC: request.pvc, tag.NAMESPACE: request.namespace}
    claim = {key: name for key, name in names.items() if name}
    require_object_names("claim", claim)
    return AdoptionRequest(
        request.group,
        request.logical_volume,
        request.device_class,
        request.made_by,
        is_block=request.block,
        dry_run=request.dry_run,
        claim=claim,
    )


def require(request: Message, *required: str, max_characters: int = _MAX_CHARACTERS) -> None:
    """Check the strings of a request of one of Carver's own RPCs.

    Raises Missing for an empty field of `required`, and BadField for a string that is too long or
    has an unprintable character, such as a line break.
    """
    for name in required:
        if not getattr(request, name):
            raise errors.Missing(name)
    for field, value in request.ListFields():
        if isinstance(value, str) and not (value.isprintable() and len(value) <= max_characters):
            problem = f"must be one line of printable text, at most {max_characters} characters"
            raise errors.BadField(field.name, problem)


def _progress(progress: Progress) -> carver.Progress:
    return carver.Progress(done=progress.done, message=progress.message)


def _keys(volumes_or_snapshots: Iterable[Volume | Snapshot]) -> dict[str, str]:
    """The name of the encryption key of each encrypted volume or snapshot, by the latter's id."""
    return {
        str(record.id): records.key_generation(record.own_tags)
        for record in volumes_or_snapshots
        if record.is_encrypted
    }

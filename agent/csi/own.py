"""What Carver serves beside CSI's own services, for which CSI has no call: names and form.

Requests and answers are protobuf's own Struct, so there is nothing to generate for them; those of a
call that is answered by a stream are GetMetadataDelta's.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct

from proto import csi_pb2 as csi

Call = Callable[[Struct, grpc.ServicerContext], Struct]
Delta = Callable[
    [csi.GetMetadataDeltaRequest, grpc.ServicerContext], Iterator[csi.GetMetadataDeltaResponse]
]

# agent/csi/operator.py
OPERATOR = "carver.v1.Operator"
REPAIR_VOLUME, REPLACE_DISK = "RepairVolume", "ReplaceDisk"
VOLUMES_HERE, SNAPSHOTS_HERE = "VolumesHere", "SnapshotsHere"

# Volumes that come and go as streams: agent/extras/transfer/service.py
TRANSFER = "carver.v1.Transfer"
_TRANSFER_CALLS = (
    *("OpenSnapshot", "CloseSnapshot", "SnapshotChain"),
    *("ReceiveStatus", "BeginReceive", "RecordReceive", "EndReceive", "FinishReceive"),
    *("OpenReceived", "AbortReceive", "WithdrawReceive"),
    *("MoveStatus", "BeginMove", "HoldMove", "ReleaseMove", "CommitMove", "UndoMove", "FinishMove"),
)
# Two of these, answered by a stream.
WRITTEN, DIFFERING = "GetWritten", "GetDiffering"

# Those that are answered once.
_CALLS = {
    OPERATOR: (REPAIR_VOLUME, REPLACE_DISK, VOLUMES_HERE, SNAPSHOTS_HERE),
    TRANSFER: _TRANSFER_CALLS,
}


def handler(
    service: str, calls: Mapping[str, Call], streams: Mapping[str, Delta] | None = None
) -> grpc.GenericRpcHandler:
    """What a server is given: calls that are answered once, and those that are by a stream."""
    methods: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(call, Struct.FromString, Struct.SerializeToString)
        for name, call in calls.items()
    }
    methods |= {
        name: grpc.unary_stream_rpc_method_handler(
            call,
            csi.GetMetadataDeltaRequest.FromString,
            csi.GetMetadataDeltaResponse.SerializeToString,
        )
        for name, call in (streams or {}).items()
    }
    return grpc.method_handlers_generic_handler(service, methods)


def stubs(channel: grpc.Channel) -> "dict[str, grpc.UnaryUnaryMultiCallable[Struct, Struct]]":
    """What a caller has: the calls of all services, by their names."""
    return {
        name: channel.unary_unary(f"/{service}/{name}", Struct.SerializeToString, Struct.FromString)
        for service, calls in _CALLS.items()
        for name in calls
    }


def ranges(
    channel: grpc.Channel, method: str
) -> "grpc.UnaryStreamMultiCallable[csi.GetMetadataDeltaRequest, csi.GetMetadataDeltaResponse]":
    """What a caller has for WRITTEN, or DIFFERING."""
    return channel.unary_stream(
        f"/{TRANSFER}/{method}",
        csi.GetMetadataDeltaRequest.SerializeToString,
        csi.GetMetadataDeltaResponse.FromString,
    )

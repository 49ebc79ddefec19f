"""What Carver serves beside CSI's own services, for which CSI has no call: names and form.

Requests and answers are protobuf's own Struct, so there is nothing to generate for them.
"""

from collections.abc import Callable, Mapping

import grpc
from google.protobuf.struct_pb2 import Struct

Call = Callable[[Struct, grpc.ServicerContext], Struct]

# agent/csi/operator.py
OPERATOR = "carver.v1.Operator"
REPAIR_VOLUME, REPLACE_DISK = "RepairVolume", "ReplaceDisk"

# Volumes that come and go as streams: agent/csi/transfer.py
TRANSFER = "carver.v1.Transfer"
_TRANSFER_CALLS = (
    "OpenSnapshot",
    *("ReceiveStatus", "BeginReceive", "RecordReceive", "EndReceive", "FinishReceive"),
    *("OpenReceived", "AbortReceive", "WithdrawReceive"),
    *("MoveStatus", "BeginMove", "HoldMove", "ReleaseMove", "CommitMove", "UndoMove", "FinishMove"),
)

_CALLS = {OPERATOR: (REPAIR_VOLUME, REPLACE_DISK), TRANSFER: _TRANSFER_CALLS}


def handler(service: str, calls: Mapping[str, Call]) -> grpc.GenericRpcHandler:
    """What a server is given."""
    methods = {
        name: grpc.unary_unary_rpc_method_handler(call, Struct.FromString, Struct.SerializeToString)
        for name, call in calls.items()
    }
    return grpc.method_handlers_generic_handler(service, methods)


def stubs(channel: grpc.Channel) -> "dict[str, grpc.UnaryUnaryMultiCallable[Struct, Struct]]":
    """What a caller has: the calls of all services, by their names."""
    return {
        name: channel.unary_unary(f"/{service}/{name}", Struct.SerializeToString, Struct.FromString)
        for service, calls in _CALLS.items()
        for name in calls
    }

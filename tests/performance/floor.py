"""The floor below every call: an empty one, of a server by grpcio that has nothing else in it."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from performance import rows
from performance.rows import Samples

_METHOD = "/floor.Floor/Nothing"
# As many threads as the service has.
_THREADS = 16
_WARM = 20
_PAUSE_SECONDS = 0.02


def measure(place: Path, calls: int, samples: Samples) -> None:
    """So many calls, one after the other, by a client as Carver's tests have it."""
    socket = f"unix:{place}/floor.sock"
    with subprocess.Popen([sys.executable, __file__, socket]) as server:
        try:
            with grpc.insecure_channel(socket) as channel:
                nothing: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_METHOD)
                for _ in range(_WARM):
                    nothing(b"", wait_for_ready=True)
                for _ in range(calls):
                    time.sleep(_PAUSE_SECONDS)
                    samples.time(rows.FLOOR, lambda: nothing(b""), time.monotonic)
        finally:
            server.terminate()


class _Handler(grpc.GenericRpcHandler):
    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        del handler_call_details
        return grpc.unary_unary_rpc_method_handler(lambda request, _context: request)


def main(socket: str) -> None:
    server = grpc.server(ThreadPoolExecutor(_THREADS), handlers=[_Handler()])
    server.add_insecure_port(socket)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main(sys.argv[1])

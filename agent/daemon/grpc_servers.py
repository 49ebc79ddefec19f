"""The end of a gRPC server, and of the threads that serve its RPCs."""

from concurrent.futures import ThreadPoolExecutor

import grpc


def stop_server(
    server: grpc.Server,
    threads: ThreadPoolExecutor,
    drain_seconds: float,
    limit_seconds: float | None = None,
) -> None:
    """Stop a gRPC server, and end its threads once they are idle.

    RPCs in flight may go on for `drain_seconds`, and are then cancelled. Their end is waited for,
    at most for `limit_seconds` if that is given. A gRPC server does not end its threads by itself.
    """
    server.stop(drain_seconds).wait(limit_seconds)
    threads.shutdown(wait=False)

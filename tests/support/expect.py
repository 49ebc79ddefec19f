"""What a test expects of a call: a gRPC code, and words in its message."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc


@contextmanager
def code(name: str, *words: str) -> Iterator[None]:
    """The call inside fails with the code, and its message has each of the words."""
    try:
        yield
    except grpc.RpcError as error:
        found, message = error.code().name, error.details() or ""
        assert found == name, f"{found}: {message}"
        for word in words:
            assert word in message, message
    else:
        raise AssertionError(f"the call succeeded, {name} was expected")

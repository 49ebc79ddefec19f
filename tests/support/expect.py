"""What a test expects: of a call a code and words, of another thread that it comes about."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest

# Time limit of what a test waits for: longer than anything takes on a machine that is busy with
# other work.
PATIENCE_SECONDS = 200


def soon(
    is_so: Callable[[], object], instead: Callable[[], object] = lambda: "it did not come about"
) -> None:
    """Wait for what another thread or process does; `instead` is what there is in its place."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end, instead()
        time.sleep(0.001)


@contextmanager
def no_threads() -> Iterator[None]:
    """No thread can be started inside."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


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

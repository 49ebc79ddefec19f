"""Keys in memory: few copies, overwritten; and never shown."""

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from agent.core import errors
from agent.csi.interceptor import Interceptor
from agent.requests import requests, secret
from agent.requests.secret import Key, Keys
from proto import csi_pb2 as csi


@pytest.mark.parametrize("fails", [False, True])
def test_both_keys_are_overwritten_in_place_also_after_an_error(fails: bool) -> None:
    both = Key(b"correct horse"), Key(b"battery horse")
    memory = [(ctypes.c_char * 13).from_buffer(one.data) for one in both]
    with contextlib.suppress(ZeroDivisionError), Keys(*both).used():
        assert [bytes(one) for one in memory] == [b"correct horse", b"battery horse"]
        if fails:
            raise ZeroDivisionError
    assert [bytes(one) for one in memory] == [bytes(13), bytes(13)]


def test_a_key_is_never_shown() -> None:
    key = Key(b"hunter2")
    for shown in (repr(key), str(key), f"{Keys(key)}", repr(vars(Keys(key)))):
        assert "hunter2" not in shown


@pytest.mark.parametrize("text", ["", "x" * 2049])
def test_a_key_has_1_to_2048_bytes(text: str) -> None:
    with pytest.raises(errors.BadField, match="1 to 2048 bytes") as caught:
        secret.of_text("secrets[passphrase]", text)
    assert "xx" not in str(caught.value)


def test_a_request_s_keys_are_read() -> None:
    wire = csi.NodeStageVolumeRequest(secrets={"passphrase": "hunter2", "user": "alice"})
    keys = requests.keys_of(wire.secrets)
    assert keys.present is not None
    assert keys.present.data == b"hunter2"
    assert keys.previous is None


DETAILS: Any = SimpleNamespace(method="/csi.v1.Node/NodeStageVolume", invocation_metadata=())


class Context:
    """A call's, of which only the end is of interest."""

    def time_remaining(self) -> None: ...

    def abort(self, code: grpc.StatusCode, message: str) -> None:
        raise RuntimeError(code, message)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_error_of_a_call_keeps_nothing_of_its_request(is_stream: bool) -> None:
    class Held:
        """What the call has at hand when it fails."""

    left: list[weakref.ref[Held]] = []

    def stream(_request: Message, _context: object) -> Iterator[Message]:
        held = Held()
        left.append(weakref.ref(held))
        raise errors.NoSuchVolume("data@x/vol-db")
        yield held

    def once(request: Message, context: object) -> Message:
        return next(stream(request, context))

    wire = csi.NodeStageVolumeRequest
    codecs = wire.FromString, wire.SerializeToString
    handler = (
        grpc.unary_stream_rpc_method_handler(stream, *codecs)
        if is_stream
        else grpc.unary_unary_rpc_method_handler(once, *codecs)
    )
    wrapped: Any = Interceptor().intercept_service(lambda _: handler, DETAILS)
    call = (lambda *said: list(wrapped.unary_stream(*said))) if is_stream else wrapped.unary_unary
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="NOT_FOUND"):
            call(wire(), Context())
        assert [one() for one in left] == [None]
    finally:
        gc.enable()

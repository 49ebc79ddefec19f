"""Keys in memory: few copies, overwritten; and never shown."""

import contextlib
import ctypes
import gc
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from agent.core import errors, requests, secret
from agent.core.secret import Key, Keys
from agent.csi.interceptor import Interceptor
from proto import csi_pb2 as csi


def fresh(text: str) -> str:
    """A text that nobody else has."""
    return "".join([text, ""]) if len(text) < 2 else "".join(list(text))


@pytest.mark.parametrize("fails", [False, True])
def test_both_keys_are_overwritten_in_place_also_after_an_error(fails: bool) -> None:
    both = Key(b"correct horse"), Key(b"battery horse")
    memory = [(ctypes.c_char * 13).from_buffer(one.data) for one in both]
    with contextlib.suppress(ZeroDivisionError), Keys(*both).used():
        assert [bytes(one) for one in memory] == [b"correct horse", b"battery horse"]
        if fails:
            raise ZeroDivisionError
    assert [bytes(one) for one in memory] == [bytes(13), bytes(13)]


@pytest.mark.parametrize("key", ["correct horse", "schlüssel", "鍵と錠", "🔑 and 鍵", "éé"])
def test_a_text_is_overwritten_in_place(key: str) -> None:
    text = fresh(key)
    secret.wipe(text)
    assert list(text) == ["\0"] * len(key)


def test_bytes_are_overwritten_in_place() -> None:
    data = bytes(bytearray(b"battery staple"))
    secret.wipe(data)
    assert data == bytes(14)


@pytest.mark.parametrize("shared", ["", "k", "é", b"", b"k"])
def test_texts_that_python_shares_are_left_alone(shared: str | bytes) -> None:
    before = str(shared)
    secret.wipe(shared)
    assert str(shared) == before
    assert chr(107) == "k"
    assert bytes([107]) == b"k"


def test_a_key_is_never_shown() -> None:
    key = Key(b"hunter2")
    for shown in (repr(key), str(key), f"{Keys(key)}", repr(vars(Keys(key)))):
        assert "hunter2" not in shown


@pytest.mark.parametrize("text", ["", "x" * 2049])
def test_a_key_has_1_to_2048_bytes(text: str) -> None:
    with pytest.raises(errors.BadField, match="1 to 2048 bytes") as caught:
        secret.of_text("secrets[passphrase]", text)
    assert "xx" not in str(caught.value)


def test_a_request_s_keys_are_read_and_its_texts_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wiped: list[str | bytes] = []
    real = secret.wipe

    def wipe(text: str | bytes) -> None:
        real(text)
        wiped.append(text)

    monkeypatch.setattr(secret, "wipe", wipe)
    wire = csi.NodeStageVolumeRequest(secrets={"passphrase": "hunter2", "user": "alice"})
    keys = requests.keys_of(wire.secrets)
    assert keys.present is not None
    assert keys.present.data == b"hunter2"
    assert keys.previous is None
    assert "hunter2" not in str(wiped)
    assert "\0" * 7 in wiped


DETAILS: Any = SimpleNamespace(method="/csi.v1.Node/NodeStageVolume", invocation_metadata=())


def test_the_bytes_of_a_request_are_overwritten_when_they_were_read() -> None:
    def behave(request: Message, _context: object) -> Message:
        return request

    handler = grpc.unary_unary_rpc_method_handler(
        behave, csi.NodeStageVolumeRequest.FromString, csi.NodeStageVolumeRequest.SerializeToString
    )
    wrapped = Interceptor().intercept_service(lambda _: handler, DETAILS)
    assert wrapped is not None
    assert wrapped.request_deserializer is not None
    data = csi.NodeStageVolumeRequest(secrets={"passphrase": "hunter2"}).SerializeToString()
    request = wrapped.request_deserializer(data)
    assert dict(request.secrets) == {"passphrase": "hunter2"}
    assert data == bytes(len(data))


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


def test_texts_and_bytes_have_their_data_behind_their_headers() -> None:
    # `wipe` relies on it: PyASCIIObject and PyBytesObject with their data behind them.
    text = fresh("correct horse")
    assert ctypes.string_at(id(text) + sys.getsizeof("") - 1, 13) == b"correct horse"
    for key, form in (("schlüssel", "latin-1"), ("鍵と錠", "utf-16-le"), ("🔑鍵", "utf-32-le")):
        text, data = fresh(key), key.encode(form)
        assert ctypes.string_at(id(text) + secret._WIDE_HEADER_BYTES, len(data)) == data
    assert ctypes.string_at(id(b"staple") + bytes.__basicsize__ - 1, 6) == b"staple"

"""Keys in memory: few copies, overwritten; and never shown."""

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


def test_a_key_is_overwritten_where_it_lies() -> None:
    key = Key(b"correct horse")
    lies = (ctypes.c_char * len(key.data)).from_buffer(key.data)
    with Keys(key).used():
        assert bytes(lies) == b"correct horse"
    assert bytes(lies) == bytes(13)


def test_it_is_overwritten_whatever_happened_and_also_the_one_before() -> None:
    keys = Keys(Key(b"new"), Key(b"old"))
    with pytest.raises(ZeroDivisionError), keys.used():
        raise ZeroDivisionError
    assert keys.present is not None
    assert keys.previous is not None
    assert keys.present.data == keys.previous.data == bytes(3)


@pytest.mark.parametrize("told", ["correct horse", "schlüssel", "鍵と錠", "🔑 and 鍵", "éé"])
def test_a_text_is_overwritten_where_it_lies(told: str) -> None:
    text = fresh(told)
    secret.wipe(text)
    assert list(text) == ["\0"] * len(told)


def test_bytes_are_overwritten_where_they_lie() -> None:
    data = bytes(bytearray(b"battery staple"))
    secret.wipe(data)
    assert data == bytes(14)


@pytest.mark.parametrize("told", ["", "k", "é", b"", b"k"])
def test_what_python_shares_is_left_alone(told: str | bytes) -> None:
    before = str(told)
    secret.wipe(told)
    assert str(told) == before
    assert chr(107) == "k"
    assert bytes([107]) == b"k"


def test_a_key_is_never_shown() -> None:
    key = Key(b"hunter2")
    for shown in (repr(key), str(key), f"{Keys(key)}", repr(vars(Keys(key)))):
        assert "hunter2" not in shown


@pytest.mark.parametrize("told", ["", "x" * 2049])
def test_a_key_has_1_to_2048_bytes(told: str) -> None:
    with pytest.raises(errors.BadField, match="1 to 2048 bytes") as caught:
        secret.of_text("secrets[passphrase]", told)
    assert "xx" not in str(caught.value)


def test_a_request_s_keys_are_read_and_its_texts_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wiped: list[str | bytes] = []
    real = secret.wipe

    def wipe(told: str | bytes) -> None:
        real(told)
        wiped.append(told)

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

    def behave(_request: Message, _context: object) -> Iterator[Message]:
        held = Held()
        left.append(weakref.ref(held))
        raise errors.NoSuchVolume("data@x/vol-db")
        yield held

    def behave_once(request: Message, context: object) -> Message:
        return next(behave(request, context))

    wire = csi.NodeStageVolumeRequest
    handler = (
        grpc.unary_stream_rpc_method_handler(behave, wire.FromString, wire.SerializeToString)
        if is_stream
        else grpc.unary_unary_rpc_method_handler(
            behave_once, wire.FromString, wire.SerializeToString
        )
    )
    wrapped: Any = Interceptor().intercept_service(lambda _: handler, DETAILS)

    def call() -> None:
        if is_stream:
            list(wrapped.unary_stream(wire(), Context()))
        else:
            wrapped.unary_unary(wire(), Context())

    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="NOT_FOUND"):
            call()
        assert [one() for one in left] == [None]
    finally:
        gc.enable()


def test_the_header_of_a_text_is_where_it_is_believed_to_be() -> None:
    # What `wipe` relies on: PyASCIIObject and PyBytesObject with their data behind them.
    text = fresh("correct horse")
    assert ctypes.string_at(id(text) + sys.getsizeof("") - 1, 13) == b"correct horse"
    for told, form in (("schlüssel", "latin-1"), ("鍵と錠", "utf-16-le"), ("🔑鍵", "utf-32-le")):
        text, data = fresh(told), told.encode(form)
        assert ctypes.string_at(id(text) + secret._WIDE_HEADER_BYTES, len(data)) == data
    assert ctypes.string_at(id(b"staple") + bytes.__basicsize__ - 1, 6) == b"staple"

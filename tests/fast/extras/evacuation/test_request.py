"""The annotation that requests an evacuation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.extras.evacuation import evacuation_request
from agent.extras.evacuation.evacuation_request import BadRequest, Kind, Request


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", Request()),
        ('{"to": []}', Request()),
        ('{"to": ["b", "a", "b"], "force": true}', Request(to=("b", "a"), force=True)),
        ('"stop"', Request(Kind.STOP)),
        (' "undo" ', Request(Kind.UNDO)),
    ],
)
def test_a_request_is_read(text: str, expected: Request) -> None:
    assert Request.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is no JSON"),
        ("stop", 'is no JSON; write .* or "stop" or "undo" with their quotes'),
        ("[" * 50_000, "is no JSON"),
        ("x" * 70_000, "more than 65536 characters"),
        ("null", "neither an object"),
        ("[]", "neither an object"),
        ('"evacuate"', "neither an object"),
        ('{"tos": []}', "its key 'tos' is not known"),
        ('{"to": "a"}', "`to` must be a list"),
        ('{"to": [1]}', "'1' is no name of a node"),
        ('{"to": ["a/b"]}', "'a/b' is no name of a node"),
        ('{"to": [""]}', "is no name of a node"),
        ('{"force": "yes"}', "`force` must be true or false"),
    ],
)
def test_what_is_no_request_is_refused_with_the_reason(text: str, expected: str) -> None:
    with pytest.raises(BadRequest, match=expected):
        Request.parse(text)


names = st.lists(st.from_regex(r"[a-z]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True), max_size=5)


@given(st.sampled_from(Kind), names, st.booleans())
def test_what_is_written_is_read_again(kind: Kind, to: list[str], force: bool) -> None:
    is_whole = kind is Kind.EVACUATE
    request = Request(kind, tuple(dict.fromkeys(to)) if is_whole else (), force and is_whole)
    assert Request.parse(request.text) == request


@given(st.text())
def test_any_text_is_a_request_or_is_refused(text: str) -> None:
    found = evacuation_request.of({"evacuate.d/request": text}, "d")
    assert isinstance(found, Request | BadRequest)


def test_a_node_without_the_annotation_has_no_request() -> None:
    assert evacuation_request.of({"evacuate.other/request": "{}"}, "d") is None
    assert evacuation_request.of({"evacuate.d/request": "{}"}, "d") == Request()

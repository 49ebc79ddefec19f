"""Every error has its code, and none hides behind another."""

from urllib import parse

import grpc
from error_classes import EVERY, code_of
from hypothesis import given
from hypothesis import strategies as st

from agent.core import codes


def test_every_error_has_a_row_of_the_table_or_the_code_of_one_that_it_derives_from() -> None:
    listed = {kind for kind, _ in codes.TABLE}
    # INTERNAL is also what an error gets that was forgotten.
    missing = [
        one.__name__ for one in EVERY if one not in listed and code_of(one) is codes.Code.INTERNAL
    ]
    assert missing == [], "add to TABLE of agent/core/codes.py"


def test_a_row_of_the_table_says_what_its_base_s_does_not() -> None:
    for index, (kind, code) in enumerate(codes.TABLE):
        base = next((pair for pair in codes.TABLE[index + 1 :] if issubclass(kind, pair[0])), None)
        assert base is None or code is codes.Code.INTERNAL or base[1] is not code, kind


def test_no_error_is_shadowed_by_one_before_it() -> None:
    kinds = [kind for kind, _ in codes.TABLE]
    for index, kind in enumerate(kinds):
        before = [one.__name__ for one in kinds[:index] if issubclass(kind, one)]
        assert before == [], kind


@given(st.text(max_size=50), st.integers(0, 5000))
def test_a_message_is_cut_to_what_a_client_takes(text: str, times: int) -> None:
    """GRPC drops an error with 8 KiB of headers, and says RESOURCE_EXHAUSTED in its place."""
    message = text * times
    said = codes.shorten(message)
    assert len(parse.quote(said, safe="", errors="replace")) < 7000
    assert said == message or (said.endswith("…") and message.startswith(said[:-1]))
    if len(message.encode(errors="replace")) <= 2000:
        assert said == message


def test_an_rpc_that_is_not_implemented_is_no_internal_error() -> None:
    assert codes.code_of(NotImplementedError()) is grpc.StatusCode.UNIMPLEMENTED
    assert codes.code_of(ZeroDivisionError()) is grpc.StatusCode.INTERNAL

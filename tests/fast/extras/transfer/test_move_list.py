"""What a node says of its moves, of what it receives, and of its classes."""

import nodes
from google.protobuf.empty_pb2 import Empty
from nodes import SIZE, Node, volume_of

from agent.csi.client import block
from proto import carver_pb2 as carver
from proto import csi_pb2 as csi


def moves(node: Node) -> list[carver.NodeMove]:
    return list(node.transfer.Moves(Empty()).moves)


def unused(node: Node, name: str = "db") -> csi.Volume:
    """A volume that was used before."""
    made = volume_of(node, name=name)
    node.client.unstage(made.volume_id, node.directory / "staging")
    return made


def test_a_node_without_moves_has_none(here: Node) -> None:
    unused(here)
    assert moves(here) == []


def test_a_move_is_shown_until_it_is_finished_and_its_word_is_not(here: Node) -> None:
    volume = unused(here)
    here.transfer.BeginMove(carver.BeginMoveRequest(volume_id=volume.volume_id, node="there"))
    (begun,) = moves(here)
    assert begun == carver.NodeMove(
        volume_id=volume.volume_id,
        node="there",
        size_bytes=SIZE,
        device_class=nodes.PLAIN,
    )
    hold = carver.HoldMoveRequest(volume_id=volume.volume_id)
    hold.token = here.transfer.HoldMove(hold).token
    snapshot = here.client.snapshot("last", volume.volume_id)
    state = here.transfer.CommitMove(
        carver.CommitMoveRequest(
            volume_id=volume.volume_id, snapshot_id=snapshot.snapshot_id, token=hold.token
        )
    )
    assert state.word
    answer = here.transfer.Moves(Empty())
    assert [(one.volume_id, one.handed_over) for one in answer.moves] == [(volume.volume_id, True)]
    assert state.word.encode() not in answer.SerializeToString()
    here.transfer.UndoMove(carver.MoveRequest(volume_id=volume.volume_id))
    assert moves(here) == []


def test_what_is_received_and_was_received_has_the_id_of_its_source(
    here: Node, there: Node
) -> None:
    volume = unused(here)
    snapshot = here.client.snapshot("one", volume.volume_id)
    received = nodes.receive(there, "db", nodes.stream(here, snapshot.snapshot_id))
    (found,) = moves(there)
    assert (found.volume_id, found.received, found.node) == (
        *(received["volume_id"], volume.volume_id),
        "",
    )
    there.transfer.FinishReceive(carver.ReleaseRequest(volume_id=found.volume_id))
    assert [one.received for one in moves(there)] == [volume.volume_id]
    # Moved on, it is a move.
    there.transfer.BeginMove(carver.BeginMoveRequest(volume_id=found.volume_id, node="next"))
    assert [(one.received, one.node) for one in moves(there)] == [("", "next")]


def test_each_class_has_the_pool_that_its_space_is_taken_from(here: Node) -> None:
    classes = {one.name: one for one in here.transfer.Moves(Empty()).classes}
    assert classes.keys() == {one.name for one in here.config.classes}
    assert classes[nodes.PLAIN].pool == here.group
    assert classes[nodes.THIN].pool.startswith(f"{here.group}/")
    assert {name for name, one in classes.items() if one.encrypts} == {
        one.name for one in here.config.classes if one.encryption
    }


def test_an_encrypted_volume_is_shown_as_one(here: Node) -> None:
    name = next(one.name for one in here.config.classes if one.encryption)
    made = here.client.create("sealed", SIZE, block(), parameters={"class": name})
    here.transfer.BeginMove(carver.BeginMoveRequest(volume_id=made.volume_id, node="there"))
    (found,) = moves(here)
    assert found.encrypted
    assert found.size_bytes > SIZE
